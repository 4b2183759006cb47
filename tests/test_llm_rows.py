"""Every fault of a judge, from a real server to the row of the group: kept, dropped, or the run stops."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mintrl_env.adapters.llm_judge import LLMJudge
from mintrl_env.adapters.llm_limits import Timing
from mintrl_env.episode import EpisodeConfig
from mintrl_env.errors import JudgeCause, JudgeError
from mintrl_env.guards import LeakGuard
from mintrl_env.prompts import ByteTokenizer, PromptBuilder
from mintrl_env.rollout import Parts, RolloutConfig, Runner
from mintrl_env.testing import FunctionVerifier, ScriptedPolicy
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Outcome, Provenance, StopReason, Task

_SPEC = importlib.util.spec_from_file_location(
    "fake_llm_server_for_rows", Path(__file__).with_name("fake_llm_server.py")
)
assert _SPEC is not None and _SPEC.loader is not None
fake: Any = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = fake
_SPEC.loader.exec_module(fake)

TOKENS = ByteTokenizer()
FIRST, WRONG, LAST = "1 + 2 = 3\n\n", "3 + 3 = 7\n\n", "So 18."
TASK = Task("t", "1 + 2 + 3?", "18", context="Add one and two first, then add three to all of it.")
QUICK = Timing(attempts=2, attempt_s=10.0, deadline_s=15.0, backoff_s=0.01, max_backoff_s=0.05)
IMPATIENT = Timing(attempts=2, attempt_s=0.3, deadline_s=5.0, backoff_s=0.01, max_backoff_s=0.05)
GUARD_S = 120.0
ROWS = 3  # of each kind


def revise(step: Any = 2, correction: Any = "3 + 3 = 6", **more: Any) -> str:
    answer = {"reason": "r", "verdict": "revise", "step": step, "correction": correction}
    return json.dumps({**answer, **more})


@dataclass(frozen=True)
class Case:
    """What the server does to every request of a review, and what is recorded.

    Attributes:
        outcome, cause, guard: of the review.
        text: of the whole response; by default nothing was cut.
    """

    name: str
    outcome: Outcome
    cause: str = ""
    guard: str = ""
    behaviour: Any = None
    says: str | None = None
    timing: Timing = QUICK
    text: str = FIRST + WRONG + LAST
    options: dict[str, Any] = field(default_factory=dict)


def failed(name: str, cause: str, behaviour: Any, timing: Timing = QUICK) -> Case:
    outcome = Outcome.UNPARSED if cause in ("unparsed", "bad_step") else Outcome.FAILED
    return Case(name, outcome, cause, behaviour=behaviour, timing=timing)


def unread(name: str, cause: str, says: str) -> Case:
    return Case(name, Outcome.UNPARSED, cause, says=says)


def guarded(name: str, guard: str, says: str) -> Case:
    return Case(name, Outcome.GUARDED, guard=guard, says=says)


def revised(name: str, says: str, text: str) -> Case:
    return Case(name, Outcome.REVISE, says=says, text=text)


DEEP = '{"verdict": ' + "[" * 60_000
CASES = [
    failed("time_out", "timeout", fake.Hang(), IMPATIENT),
    failed("after_the_deadline", "timeout", fake.Answer(delay=3.0), IMPATIENT),
    failed("never_ends", "timeout", fake.Trickle(0.1), IMPATIENT),
    failed("429", "rate_limit", fake.Status(429)),
    failed("429_long", "rate_limit", fake.Status(429, headers={"Retry-After": "3600"})),
    failed("500", "server", fake.Status(500)),
    failed("cut_mid_body", "connection", fake.Cut()),
    failed("wrong_shape", "server", fake.Json({"choices": [{"message": {"content": 7}}]})),
    failed("10_mb", "server", fake.Huge(10 << 20)),
    failed("auth", "auth", fake.Status(401)),
    failed("no_quota", "budget", fake.Status(402)),
    unread("step_0", "bad_step", revise(0)),
    unread("step_past_the_end", "bad_step", revise(4)),
    unread("step_as_word", "bad_step", revise("second")),
    unread("step_as_bool", "bad_step", revise(True)),
    unread("step_infinite", "bad_step", revise(2).replace('"step": 2', '"step": Infinity')),
    unread("step_with_a_fraction", "bad_step", revise(1.5)),
    unread("prose", "unparsed", "I think that all of it is fine."),
    unread("another_verdict", "unparsed", revise(verdict="maybe")),
    unread("correction_is_a_list", "unparsed", revise(correction=["3", "6"])),
    unread("deep_json", "unparsed", DEEP),
    unread("only_thoughts", "unparsed", "<think>" + revise()),
    guarded("eos", "special_token", revise(correction="3 + 3 = 6<eos>")),
    guarded("think", "special_token", revise(correction="3 + <think>3 = 6")),
    guarded("other_template", "special_token", revise(correction="<|im_end|>3 + 3 = 6")),
    guarded("equal", "equal", revise(correction="3 + 3 = 7")),
    guarded("answer", "leak", revise(correction="3 + 3 + 12 = 18")),
    guarded("answer_in_words", "leak", revise(correction="which is eighteen")),
    guarded("answer_unseen", "leak", revise(correction="which is 1\u200b8")),
    guarded("reference", "leak", revise(correction="one and two first, then add three to it")),
    revised("step_as_text", revise("Step 2"), FIRST + "3 + 3 = 6\n\n" + LAST),
    revised("step_as_float", revise(2.0), FIRST + "3 + 3 = 6\n\n" + LAST),
    revised("upper_case", revise(verdict="REVISE"), FIRST + "3 + 3 = 6\n\n" + LAST),
    revised("in_a_fence", f"```json\n{revise()}\n```", FIRST + "3 + 3 = 6\n\n" + LAST),
    revised("behind_thoughts", f"<think>{{}}</think>{revise()}", FIRST + "3 + 3 = 6\n\n" + LAST),
    revised("the_last_of_two", revise(1) + revise(2), FIRST + "3 + 3 = 6\n\n" + LAST),
    revised("the_last_of_two_keys", '{"step": 1, ' + revise(2)[1:], FIRST + "3 + 3 = 6\n\n" + LAST),
    revised("nothing_but_thoughts", revise(correction="<think>3 + 3 = 6"), FIRST + LAST),
    revised("empty_correction", revise(correction=""), FIRST + LAST),
    revised("over_long", revise(correction="6" * 300), FIRST + "6" * 48 + LAST),
    revised("half_characters", revise(correction="3 \ud800= 6"), FIRST + "3 \ufffd= 6\n\n" + LAST),
]


def policy() -> ScriptedPolicy:
    """Three steps, then the end; behind a cut it goes on with the end."""
    return ScriptedPolicy([TOKENS.encode(FIRST + WRONG), [*TOKENS.encode(LAST), TOKENS.EOS]])


def run(server: Any, case: Case, **config: Any) -> list[list[Trajectory]]:
    server.structured = set()
    if case.behaviour is not None:
        server.default = case.behaviour
    if case.says is not None:
        server.chat = lambda body: case.says
    judge = LLMJudge(server.url, "toy", TOKENS, mode="one-call", timing=case.timing, **case.options)
    runner = Runner(
        Parts(
            policy(),
            judge,
            guards=(LeakGuard(TOKENS),),
            verifier=FunctionVerifier(lambda task, response: float("18" in response)),
        ),
        PromptBuilder(TOKENS),
        RolloutConfig(
            EpisodeConfig(
                chunk_tokens=len(FIRST + WRONG), max_reviews=1, max_correction=48, max_response=200
            ),
            n_control=ROWS,
            n_intervened=ROWS,
            max_retries=0,
            **config,
        ),
    )

    async def main() -> list[list[Trajectory]]:
        try:
            async with asyncio.timeout(GUARD_S):
                return [list(g) for g in await runner.collect([TASK], update=0)]
        finally:
            await judge.aclose()

    return asyncio.run(main())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_fault_is_kept_and_recorded_and_no_row_is_lost(case: Case) -> None:
    with fake.FakeServer() as server:
        ((*rows,),) = run(server, case, max_failure_rate=1.0)
    assert [row.kind.value for row in rows] == ["control"] * ROWS + ["intervened"] * ROWS
    for row in rows[:ROWS]:
        assert not row.reviews and row.valid
        assert TOKENS.decode(row.ids[:-1]) == FIRST + WRONG + LAST
    for row in rows[ROWS:]:
        (review,) = row.reviews
        assert (review.outcome, review.cause, review.guard) == (
            case.outcome,
            case.cause,
            case.guard,
        )
        assert row.valid and row.stop_reason is StopReason.EOS and row.reward == 1.0
        assert TOKENS.decode(row.ids[:-1]) == case.text
        assert np.count_nonzero(row.provenance == Provenance.INTERVENTION) == (
            len(TOKENS.encode(case.text)) - len(FIRST + LAST)
            if not (case.cause or case.guard)
            else 0
        )


FAILED = [case for case in CASES if case.cause]


@pytest.mark.parametrize("case", FAILED, ids=lambda case: case.name)
def test_a_fault_may_drop_its_row_and_no_other(case: Case) -> None:
    with fake.FakeServer() as server:
        ((*rows,),) = run(server, case, on_judge_failure="drop", max_failure_rate=1.0)
    assert [row.valid for row in rows] == [True] * ROWS + [False] * ROWS
    for row in rows[ROWS:]:
        assert row.stop_reason is StopReason.ERROR
        assert row.cause == f"judge: {case.cause}"
        assert [review.cause for review in row.reviews] == [case.cause]


@pytest.mark.parametrize("case", FAILED, ids=lambda case: case.name)
def test_too_many_faults_stop_the_run_with_their_cause(case: Case) -> None:
    told = pytest.raises(JudgeError, match=f"{ROWS} of {ROWS} reviews failed")
    with fake.FakeServer() as server, told as caught:
        run(server, case, max_failure_rate=0.5, min_reviews=ROWS)
    assert caught.value.cause == JudgeCause(case.cause)


def test_nobody_listens() -> None:
    with fake.FakeServer() as server:
        pass
    case = Case("refused", Outcome.FAILED, "connection")
    ((*rows,),) = run(server, case, max_failure_rate=1.0)
    assert [row.valid for row in rows] == [True] * 2 * ROWS
    assert [row.reviews[0].cause for row in rows[ROWS:]] == ["connection"] * ROWS


def test_a_server_that_fails_once_costs_a_request_and_no_review() -> None:
    once: list[Callable[[], Any]] = [
        lambda: fake.Status(500),
        lambda: fake.Cut(),
        lambda: fake.Status(429, headers={"Retry-After": "0.1"}),
    ]
    with fake.FakeServer() as server:
        server.script += [make() for make in once]
        ((*rows,),) = run(server, Case("once", Outcome.REVISE, says=revise()))
        assert len(server.posts) == ROWS + len(once)
    assert [row.reviews[0].outcome for row in rows[ROWS:]] == [Outcome.REVISE] * ROWS
    assert sum(row.reviews[0].usage.calls for row in rows[ROWS:]) == ROWS + len(once)


def test_what_the_judge_knows_is_in_no_row() -> None:
    """Its context reaches the policy's ids through a correction alone, and the guard reads those."""
    secret = "Add one and two first"
    with fake.FakeServer() as server:
        case = Case("z", Outcome.REVISE, says=revise(), options={"privileged": "reference"})
        ((*rows,),) = run(server, case)
        assert all(secret in post.body["messages"][-1]["content"] for post in server.posts)
    for row in rows:
        assert secret not in TOKENS.decode(row.prompt_ids)
        assert secret not in TOKENS.decode(row.ids)
        assert all(secret not in TOKENS.decode(r.dropped_ids) for r in row.reviews)


def test_keys_of_rows_give_each_review_its_own_seed() -> None:
    with fake.FakeServer() as server:
        run(server, Case("seeds", Outcome.REVISE, says=revise()))
        seeds = [post.body["seed"] for post in server.posts]
    assert len(set(seeds)) == ROWS
