"""Preflight: figures by hand, what refuses a run, a judge that is listened to, servers, the command."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from mintrl_env import registry
from mintrl_env.adapters.judge_servers import chat_servers, node_count, refuse_unreachable
from mintrl_env.adapters.llm_judge import LLMJudge
from mintrl_env.chat import Capabilities, ChatMessage, ChatReply
from mintrl_env.cli import app
from mintrl_env.config import RunConfig, parse_config
from mintrl_env.console import RunConsole
from mintrl_env.errors import ConfigError, JudgeError, MintrlError, UsageError
from mintrl_env.judges import ShuffledJudge
from mintrl_env.keys import RowKey
from mintrl_env.preflight import choose_tasks, plan_of
from mintrl_env.preflight_figures import (
    Check,
    Limits,
    checks,
    coverage,
    latency,
    notes,
    review_figures,
    row_figures,
)
from mintrl_env.preflight_forecast import JudgeLimits, Measured, Plan, budget_notes, forecast
from mintrl_env.preflight_gate import print_preflight, wanted
from mintrl_env.preflight_record import listening
from mintrl_env.preflight_servers import asks_service, check_servers, is_judged
from mintrl_env.preflight_tables import failures, forecast_lines
from mintrl_env.preflight_uplift import (
    Continued,
    Fork,
    continue_forks,
    forks_of,
    uplift_figures,
)
from mintrl_env.prompts import ByteTokenizer
from mintrl_env.protocols import Judge, Sampling
from mintrl_env.rollout import RolloutConfig
from mintrl_env.run_folder import RunFolder
from mintrl_env.testing import FunctionVerifier, ScriptedJudge, ScriptedPolicy
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import (
    Chunk,
    Finish,
    Kind,
    Outcome,
    Review,
    ReviewRequest,
    Score,
    Step,
    StopReason,
    Task,
    Usage,
    Verdict,
    frozen_ids,
    frozen_logprobs,
)

TOKENS = ByteTokenizer()
EPISODE = {
    "chunk_tokens": 8,
    "max_reviews": 2,
    "max_correction": 8,
    "max_response": 40,
    "step_delimiters": ["\n"],
}


def quiet() -> RunConsole:
    import os

    from rich.console import Console

    return RunConsole(Console(file=open(os.devnull, "w")))


def config(policy: str = "unused", **changes: Any) -> RunConfig:
    data: dict[str, Any] = {
        "method": "mintrl-const",
        "policy": {"path": policy, "chat": False, "max_prompt": 64},
        "tasks": {"name": "sums", "options": {"count": 8}},
        "judge": {"name": "arithmetic", "guards": {}},
        "episode": EPISODE,
        "rollout": {"n_control": 2, "n_intervened": 2, "slots": 16},
        "train": {
            "updates": 2, "prompts_per_update": 2, "micro_batch": 8, "checkpoint_every": 1,
        },
    }  # fmt: skip
    return parse_config(data | changes, "test")


def row(
    task_id: str = "t",
    rollout: int = 0,
    *,
    kind: Kind = Kind.INTERVENED,
    policy: int = 10,
    correction: tuple[int, int] | None = None,
    reviews: Sequence[Review] = (),
    reward: float = 0.0,
    stop: StopReason = StopReason.EOS,
    draws: int = 0,
) -> Trajectory:
    """`policy` tokens by the policy, and `correction` = (place, length) ones of the judge's."""
    place, length = correction or (0, 0)
    provenance = np.zeros(policy + length, dtype=np.int8)
    provenance[place : place + length] = 1
    ended = stop not in (StopReason.DEADLINE, StopReason.ERROR)
    score = Score(reward, "right") if not math.isnan(reward) else Score.undecided("bad_gold")
    return Trajectory(
        task_id=task_id,
        update=-4,
        rollout=rollout,
        kind=kind,
        prompt_ids=frozen_ids([1]),
        ids=frozen_ids(range(policy + length)),
        provenance=provenance,
        logprobs=frozen_logprobs(None, policy + length),
        policy_versions=frozen_ids(np.zeros(policy + length, dtype=np.int32)),
        score=score,
        valid=ended and score.decided,
        stop_reason=stop,
        reviews=tuple(reviews),
        cause="" if ended else "slow",
        draws=draws,
    )


def review(
    outcome: Outcome, index: int = 0, position: int = 0, tokens: int = 4, **more: Any
) -> Review:
    return Review(index, position, tokens, outcome, **more)


# --- figures by hand


class TestCoverage:
    def test_by_hand(self) -> None:
        # 4 tokens kept; of the next 4, cut at 6, 2 are kept behind a correction of 3 and 5 more.
        first = row(
            policy=11, correction=(6, 3),
            reviews=[
                review(Outcome.KEEP),
                review(Outcome.REVISE, 1, 4, 4, cut=6, step=1, correction_tokens=3),
            ],
        )  # fmt: skip
        control = row(rollout=1, kind=Kind.CONTROL, policy=20)
        found = coverage([[first, control]], chunk_tokens=4, max_reviews=2)
        assert (found["seen_tokens"], found["intervened_policy_tokens"]) == (6, 11)
        assert found["seen"] == 6 / 11
        # R k = 8 of each row's policy tokens lie within reach: of 11 and of 20.
        assert found["could_see"] == (8 + 8) / 31

    def test_of_nothing(self) -> None:
        assert coverage([], chunk_tokens=4, max_reviews=2)["seen"] is None


class TestReviews:
    def test_counts_and_rates(self) -> None:
        reviews = [
            review(Outcome.KEEP), review(Outcome.KEEP),
            review(Outcome.REVISE, cut=0, step=0, correction_tokens=2),
            review(Outcome.REVISE, cut=0, step=0),
            review(Outcome.GUARDED, guard="leak"),
            review(Outcome.UNPARSED, cause="unparsed", reason="no JSON"),
            review(Outcome.FAILED, cause="timeout"), review(Outcome.FAILED, cause="timeout"),
        ]  # fmt: skip
        found = review_figures([[row(reviews=reviews)]])
        assert (found["reviews"], found["keep"], found["revise"]) == (8, 2, 2)
        assert found["answer_rate"] == 6 / 8
        assert found["parse_rate"] == 5 / 6
        assert found["causes"] == {"timeout": 2, "unparsed": 1}
        assert (found["guards"], found["bare_cuts"]) == ({"leak": 1}, 1)
        assert found["examples"]["unparsed"] == "no JSON"

    def test_none(self) -> None:
        found = review_figures([[row(kind=Kind.CONTROL)]])
        assert (found["reviews"], found["answer_rate"], found["parse_rate"]) == (0, None, None)

    def test_latency(self) -> None:
        found = latency([float(i) for i in range(1, 102)])
        assert (found["p50"], found["p95"]) == (51.0, 96.0)
        assert latency([]) == {"p50": None, "p95": None}


class TestRows:
    def test_by_hand(self) -> None:
        groups = [
            [
                row("a", 0, kind=Kind.CONTROL, reward=1.0),
                row("a", 1, policy=6, correction=(2, 4), reward=1.0, stop=StopReason.LENGTH),
            ],
            [
                row("b", 0, kind=Kind.CONTROL, reward=math.nan),
                row("b", 1, stop=StopReason.DEADLINE),
            ],
            [row("c", 0, kind=Kind.CONTROL), row("c", 1)],
        ]  # fmt: skip
        found = row_figures(groups)
        assert (found["tasks"], found["rows"]) == (3, 6)
        assert found["finished_share"] == 5 / 6 and found["not_finished"] == {"slow": 1}
        assert found["decided_share"] == 4 / 5 and found["undecided"] == {"bad_gold": 1}
        assert found["truncated_share"] == 1 / 5
        assert (found["all_succeed_share"], found["all_fail_share"]) == (1 / 3, 1 / 3)
        # 4 tokens of the judge's beside 6 + 10 + 10 by the policy, and 30 more in the controls.
        assert found["off_policy_fraction_intervened"] == 4 / 30
        assert found["off_policy_fraction_all"] == 4 / 60


class TestForecast:
    PLAN = Plan(updates=10, judged_updates=4, prompts=5, n_control=2, n_intervened=3,
                probe_rows=6, evaluation_rows=20)  # fmt: skip

    def measured(self, **changes: Any) -> Measured:
        # 3 reviewed rows with 6 reviews of 2 calls each, 2 others; 5 rows in 36 seconds.
        usage = Usage(prompt_tokens=6000, completion_tokens=600, usd=0.03, calls=12)
        values: dict[str, Any] = {
            "rows": 5, "reviewed_rows": 3, "reviews": 6, "usage": usage, "sampled_reviewed": 330,
            "sampled_other": 160, "review_seconds": 9.0, "seconds": 36.0,
        }  # fmt: skip
        return Measured(**(values | changes))

    def test_rows(self) -> None:
        assert self.PLAN.rows_per_update == 25
        assert self.PLAN.rows == 10 * 25 + 6 + 20
        assert self.PLAN.reviewed_rows == 4 * 5 * 3 + 6

    def test_by_hand(self) -> None:
        found = forecast(self.measured(), self.PLAN, JudgeLimits(priced=True, service=True))
        assert found["per_reviewed_row"] == {
            "reviews": 2.0, "calls": 4.0, "prompt_tokens": 2000.0, "completion_tokens": 200.0,
            "usd": pytest.approx(0.01), "seconds": 3.0,
        }  # fmt: skip
        assert (found["reviews"], found["calls"]) == (66 * 2, 66 * 4)
        assert (found["prompt_tokens"], found["completion_tokens"]) == (132_000, 13_200)
        assert found["usd"] == pytest.approx(0.66)
        # 66 reviewed rows of 110 sampled tokens each, 210 others of 80.
        assert found["policy_tokens"] == 66 * 110 + 210 * 80
        # 26 rows outside the updates take 26/5 of 36 s; an update 36 s, or 25/5 of that.
        outside = 26 / 5 * 36
        hours = [(10 * 36 + outside) / 3600, (10 * 5 * 36 + outside) / 3600]
        assert found["hours"] == pytest.approx(hours)
        assert not any("prices" in line for line in found["assumptions"])
        assert ("money", "0.66 USD", "") in forecast_lines(found)

    def test_limits_are_floors(self) -> None:
        limits = JudgeLimits(concurrent=2, rpm=1, tpm=1000, service=True)
        found = forecast(self.measured(), self.PLAN, limits)
        assert found["hours_by_judge_limits"] == {
            "rpm": pytest.approx(264 / 60), "tpm": pytest.approx(145.2 / 60),
            "concurrent": pytest.approx(66 * 3 / 2 / 3600),
        }  # fmt: skip
        assert found["hours"] == [264 / 60, 264 / 60]
        assert found["usd"] is None
        assert any("judge.options.prices" in line for line in found["assumptions"])
        assert ("money", "not known", "") in forecast_lines(found)

    def test_a_batch_smaller_than_what_was_measured(self) -> None:
        plan = Plan(updates=10, judged_updates=0, prompts=1, n_control=2, n_intervened=0)
        found = forecast(self.measured(), plan, JudgeLimits())
        assert found["hours"] == pytest.approx([10 * 2 / 5 * 36 / 3600, 10 * 36 / 3600])
        assert (found["calls"], found["policy_tokens"]) == (0, 20 * 80)

    def test_a_budget_that_will_not_last(self) -> None:
        limits = JudgeLimits(tokens=145_199, usd=0.5, priced=True, service=True)
        found = forecast(self.measured(), self.PLAN, limits)
        assert budget_notes(found) == [
            "the run needs about 0.66 usd, and judge.options.limits.usd is 0.5: it would stop "
            "before its end",
            "the run needs about 1.452e+05 tokens, and judge.options.limits.tokens is 1.452e+05: "
            "it would stop before its end",
        ]
        enough = JudgeLimits(tokens=145_200, usd=0.7, priced=True, service=True)
        assert budget_notes(forecast(self.measured(), self.PLAN, enough)) == []
        assert budget_notes({}) == [], "of a forecast of nothing"

    def test_of_nothing(self) -> None:
        for changes in ({"rows": 0}, {"reviewed_rows": 0}):
            found = forecast(self.measured(**changes), self.PLAN, JudgeLimits())
            assert found["hours"] is None
            assert forecast_lines(found) == [("whole run", "-", "nothing was measured")]

    def test_measured_rows(self) -> None:
        usage = Usage(prompt_tokens=5, completion_tokens=2, usd=0.5, calls=2)
        groups = [[
            row("a", 0, kind=Kind.CONTROL, draws=7),
            row("a", 1, draws=11, reviews=[review(Outcome.KEEP, usage=usage)] * 2),
        ]]  # fmt: skip
        found = Measured.of(groups, seconds=3.0, review_seconds=1.5)
        total = Usage(prompt_tokens=10, completion_tokens=4, usd=1.0, calls=4)
        assert found == Measured(2, 1, 2, total, 11, 7, 1.5, 3.0)

    def test_the_plan_of_a_config(self) -> None:
        sums = {"name": "sums", "split": "other", "options": {"count": 8}}
        whole = config(
            evaluation={"tasks": sums, "n": 2, "every": 2, "after": False},
            probe={"tasks": sums, "n": 3},
            objective={"intervention_updates": 3},
            train={"updates": 5, "prompts_per_update": 2, "micro_batch": 8},
        )
        # Evaluated before, and after updates 2 and 4; probed before and after.
        expected = Plan(5, 3, 2, 2, 2, probe_rows=2 * 8 * 3, evaluation_rows=8 * 2 * 3)
        assert plan_of(whole, evaluation=8, probe=8) == expected
        always = config(objective={"intervention_updates": -1})
        assert plan_of(always).judged_updates == 2
        assert plan_of(config(method="grpo", judge=None)).reviewed_rows == 0


def test_tasks_are_drawn_by_the_seed_in_their_order() -> None:
    tasks = [Task(str(i), "p") for i in range(50)]
    chosen = choose_tasks(tasks, 6, 0)
    numbers = [int(task.task_id) for task in chosen]
    assert len(set(numbers)) == 6 and numbers == sorted(numbers) and numbers != list(range(6))
    assert choose_tasks(tasks, 6, 0) == chosen != choose_tasks(tasks, 6, 1)
    assert choose_tasks(tasks, 99, 0) == tasks


# --- uplift


def fork(task_id: str, index: int = 0, kept: str = "a\n", correction: str = "b\n") -> Fork:
    return Fork(
        Task(task_id, "p"), 2, 0, index, frozen_ids(TOKENS.encode("p")),
        frozen_ids(TOKENS.encode(kept)), frozen_ids(TOKENS.encode(correction)),
    )  # fmt: skip


class TestUplift:
    def go_on(self, forks: Sequence[Fork], writes: Any, **options: Any) -> Any:
        """`writes(key)` is what the policy writes, an EOS behind it."""
        policy = ScriptedPolicy(lambda key: [[*TOKENS.encode(writes(key)), 256]])
        verifier = FunctionVerifier(
            lambda task, text: None if "?" in text else float(text.endswith("right"))
        )
        live: list[int] = []
        done = asyncio.run(
            continue_forks(
                forks, policy, verifier, TOKENS, RolloutConfig(), update=-5, on_live=live.append,
                **options,
            )
        )  # fmt: skip
        return done, policy, live

    def test_both_sides_go_on_from_the_same_place(self) -> None:
        (found,), policy, live = self.go_on(
            [fork("t")], lambda key: "right" if "/corrected" in key.task_id else "wrong"
        )
        sides = {key.task_id: TOKENS.decode(ids) for key, ids, _ in policy.calls}
        assert sides == {"t/2.0.0/corrected": "pa\nb\n", "t/2.0.0/alone": "pa\n"}
        assert {limit for _, _, limit in policy.calls} == {16384 - 4, 16384 - 2}
        assert (found.corrected, found.alone) == ((1.0,), (0.0,))
        assert (found.corrected_text, found.alone_text) == ("a\nb\nright", "a\nwrong")
        assert found.difference == 1.0
        assert live == [2, 1, 0]

    def test_a_correction_at_the_very_start(self) -> None:
        (found,), _, _ = self.go_on([fork("t", kept="")], lambda key: "right")
        assert (found.corrected_text, found.alone_text) == ("b\nright", "right")

    def test_samples_and_what_could_not_be_scored(self) -> None:
        def writes(key: RowKey) -> str:
            if "/alone" in key.task_id:
                return "right" if key.rollout else "wrong"
            return "?" if key.rollout else "right"

        (found,), _, _ = self.go_on([fork("t")], writes, samples=2)
        assert found.corrected[0] == 1.0 and math.isnan(found.corrected[1])
        assert found.alone == (0.0, 1.0)
        assert found.difference == 0.5
        (none,), _, _ = self.go_on([fork("t")], lambda key: "?")
        assert none.difference is None
        assert uplift_figures([none])["mean"] is None

    def test_a_policy_that_fails_is_not_scored(self) -> None:
        class Down:
            async def generate(self, ids: Any, **options: Any) -> Chunk:
                raise ConnectionError("gone")

        verifier = FunctionVerifier(lambda task, text: 1.0)
        (found,) = asyncio.run(
            continue_forks([fork("t")], Down(), verifier, TOKENS, RolloutConfig(), update=-5)
        )
        assert found.difference is None and "gone" in found.alone_text

    def test_the_mean_is_over_tasks(self) -> None:
        done = [
            Continued(fork("a", 0), (1.0,), (0.0,)), Continued(fork("a", 1), (0.0,), (0.0,)),
            Continued(fork("b"), (0.0,), (1.0,)), Continued(fork("c"), (math.nan,), (1.0,)),
        ]  # fmt: skip
        found = uplift_figures(done)
        assert found["mean"] == (0.5 - 1.0) / 2
        assert (found["corrections"], found["scored"], found["tasks"]) == (4, 3, 2)
        assert (found["better"], found["equal"], found["worse"]) == (1, 1, 1)
        assert found["ci95"] == [-1.0, 0.5]
        assert (found["corrected_reward"], found["alone_reward"]) == (1 / 3, 1 / 3)
        assert uplift_figures([])["ci95"] is None

    def test_which_corrections(self) -> None:
        bare = review(Outcome.REVISE, 0, cut=3, step=1)
        written = [
            review(Outcome.REVISE, i, cut=2 + i, step=0, correction_tokens=2) for i in (1, 2, 3)
        ]
        groups = [
            [row("a", 4, policy=12, reviews=[bare, *written])],
            [row("b", 5, policy=12, reviews=[review(Outcome.KEEP), written[0]])],
        ]  # fmt: skip
        tasks = [Task("a", "p"), Task("b", "p")]
        found = forks_of(groups, tasks, per_task=9)
        places = [(f.task.task_id, f.rollout, f.review, len(f.kept)) for f in found]
        assert places == [("a", 4, 1, 3), ("a", 4, 2, 4), ("a", 4, 3, 5), ("b", 5, 1, 3)]
        assert found[0].kept.tolist() == [0, 1, 2] and found[0].correction.tolist() == [3, 4]
        assert [f.task.task_id for f in forks_of(groups, tasks, per_task=2)] == ["a", "a", "b"]
        assert forks_of(groups, tasks, per_task=0) == []


# --- checks


def sound(**changes: Any) -> dict[str, Any]:
    """Figures that pass; changes are `section__key`."""
    reviews = [review(Outcome.REVISE, cut=1, step=0, correction_tokens=1)] + [
        review(Outcome.KEEP)
    ] * 9
    groups = [[row("a", 0, kind=Kind.CONTROL, reward=1.0), row("a", 1, policy=99, reviews=reviews)]]
    figures: dict[str, Any] = {
        "rows": row_figures(groups),
        "reviews": review_figures(groups),
        "leaks": {"written": 0, "caught": 0, "through": 0},
        "uplift": uplift_figures([Continued(fork(str(i)), (1.0,), (0.0,)) for i in range(6)]),
        "coverage": {"seen": 0.9, "could_see": 0.9},
        "latency": {"p50": 1.0, "p95": 2.0},
        "forecast": forecast(
            TestForecast().measured(), TestForecast.PLAN, JudgeLimits(priced=True, service=True)
        ),
        "seconds": 1.0,
        "judge": "llm",
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        figures[section][name] = value
    return figures


def failed(figures: dict[str, Any], *, judged: bool = True, **limits: Any) -> dict[str, Check]:
    found = checks(figures, Limits(**limits), judged=judged)
    return {check.name: check for check in found if not check.passed}


class TestChecks:
    def test_all_hold(self) -> None:
        assert failed(sound()) == {}
        assert notes(sound(), judged=True) == []
        names = [check.name for check in checks(sound(), Limits(), judged=True)]
        assert names == [
            "rows finished", "rows scored", "judge answers", "verdicts parsed", "no leaks",
            "corrections help",
        ]  # fmt: skip
        assert len(checks(sound(), Limits(), judged=False)) == 2

    @pytest.mark.parametrize(
        ("changes", "name", "todo"),
        [
            ({"rows__finished_share": 0.9, "rows__not_finished": {"deadline": 2}}, "rows finished",
             "deadline 2: raise rollout.deadline_s"),
            ({"rows__decided_share": 0.94, "rows__undecided": {"bad_gold": 3}}, "rows scored",
             "could not tell: bad_gold 3"),
            ({"reviews__answer_rate": 0.4, "reviews__causes": {"auth": 6}}, "judge answers",
             "auth 6. judge.options.api_key_env"),
            ({"reviews__answer_rate": 0.0}, "judge answers", "reviews failed"),
            ({"reviews__answer_rate": None}, "judge answers", "never asked"),
            ({"reviews__parse_rate": 0.89, "reviews__examples": {"unparsed": "Hm."}},
             "verdicts parsed", "example: Hm."),
            ({"leaks__through": 1}, "no leaks", "put the leak guard into judge.guards"),
            ({"uplift__ci95": [-0.4, -0.01]}, "corrections help", "does better alone"),
        ],
    )  # fmt: skip
    def test_one_does_not(self, changes: dict[str, Any], name: str, todo: str) -> None:
        found = failed(sound(**changes))
        assert list(found) == [name]
        assert todo in found[name].todo

    def test_at_the_threshold_they_hold(self) -> None:
        figures = sound(
            reviews__parse_rate=0.9, rows__decided_share=0.95, rows__finished_share=0.95,
            uplift__ci95=[-0.5, 0.0], reviews__answer_rate=0.5,
        )  # fmt: skip
        assert failed(figures) == {}
        assert failed(sound(leaks__through=2), max_leaks=2) == {}
        assert set(failed(sound(reviews__parse_rate=0.9), min_parse_rate=0.91)) == {
            "verdicts parsed"
        }

    def test_an_uplift_of_few_tasks_refuses_nothing(self) -> None:
        figures = sound(uplift__ci95=[-1.0, -1.0], uplift__tasks=4)
        assert failed(figures) == {}
        equal = sound(uplift__equal=6, uplift__scored=6)
        assert "none of the 6 compared corrections" in notes(equal, judged=True)[0]
        assert "4 task(s) only" in " ".join(notes(figures, judged=True))

    def test_what_is_said_and_refuses_nothing(self) -> None:
        figures = sound(
            rows__truncated_share=0.3, rows__all_fail_share=0.9, coverage__could_see=0.1,
            rows__off_policy_fraction_intervened=0.2, reviews__revise=0,
        )  # fmt: skip
        figures["forecast"]["limits"] |= {"usd": 0.5, "tokens": 1_000_000}
        said = notes(figures, judged=True)
        for words in (
            "30 % of the responses stop at episode.max_response", "90 % of the groups all rows fail",
            "reach only 10 %", "writes 20 %", "corrected nothing", "about 0.66 usd",
        ):  # fmt: skip
            assert sum(words in line for line in said) == 1, words
        assert len(said) == 6
        assert len(notes(figures, judged=False)) == 2

    def test_failures_say_what_to_do(self) -> None:
        figures = sound(leaks__through=1)
        figures["checks"] = [c.as_dict() for c in checks(figures, Limits(), judged=True)]
        figures["notes"], figures["servers"] = [], ["server  x"]
        (line,) = failures(figures)
        assert line.startswith("no leaks: 1 through, 0 written, wanted <= 0 through. corrections")
        print_preflight(figures, quiet())


# --- listening


def request(review: int = 0) -> ReviewRequest:
    ids = frozen_ids(TOKENS.encode("x\n"))
    return ReviewRequest(
        Task("t", "p"), frozen_ids([1]), frozen_ids([]), "", ids, (Step("x\n", 0),), review, 0, 8,
        Finish.LENGTH, RowKey(0, -4, "t", 3, 1),
    )  # fmt: skip


class Chat:
    capabilities = Capabilities("none", "trailing")
    name = "fake"

    async def chat(self, messages: Any, **options: Any) -> ReplyOrError:
        if messages[0].content == "down":
            raise JudgeError("server", "no")
        return ChatReply("keep", "length", Usage(prompt_tokens=3))


ReplyOrError = Any


class Engine:
    extra = "kept"

    async def generate(self, ids: Any, **options: Any) -> Chunk:
        return Chunk(frozen_ids(TOKENS.encode("new")))

    async def logprobs(self, ids: Any, start: int, *, key: Any = None) -> Any:
        return np.full(len(ids) - start, -0.5, dtype=np.float32)


class Asking:
    """Asks a chat model and an engine, and puts its answers together."""

    def __init__(self, question: str = "is it right?") -> None:
        self._chat, self._engine, self._question = Chat(), Engine(), question

    async def review(self, request: ReviewRequest) -> Verdict:
        said = [ChatMessage("user", self._question)]
        reply = await self._chat.chat(said, max_tokens=3, prefill="so")
        ids = frozen_ids(TOKENS.encode("promptA"))
        await self._engine.logprobs(ids, 6)
        await self._engine.logprobs(frozen_ids(TOKENS.encode("promptBB")), 6)
        chunk = await self._engine.generate(
            ids, max_tokens=3, stop=(), sampling=Sampling(), key=request.key
        )
        assert self._engine.extra == "kept"
        return Verdict.revise(0, TOKENS.decode(chunk.ids), reply.text)


class TestListening:
    def test_all_that_is_asked_is_noted(self) -> None:
        inner = Asking()
        judge = ShuffledJudge(inner)
        before = dict(vars(inner))
        with listening(judge, TOKENS) as (heard, found):
            assert isinstance(heard, Judge)
            verdict = asyncio.run(heard.review(request(1)))
        assert vars(inner) == before
        (note,) = found
        assert note.place == ("t", 3, 1, 1)
        assert note.verdict == verdict and note.seconds >= 0
        asked = [(e.messages, e.answer) for e in note.exchanges]
        assert asked == [
            ((("user", "is it right?"), ("assistant, to go on with", "so")),
             "keep\n(ended by length)"),
            ((("prompt", "prompt"),), "log-prob -0.50: 'A'\nlog-prob -1.00: 'BB'"),
            ((("prompt", "promptA"),), "new"),
        ]  # fmt: skip

    def test_a_review_that_fails(self) -> None:
        judge = Asking("down")
        with listening(judge, TOKENS) as (heard, found), pytest.raises(JudgeError):
            asyncio.run(heard.review(request()))
        assert found[0].verdict is None
        assert found[0].exchanges[0].answer == "(no answer: server: no)"

    def test_many_reviews_keep_few_prompts(self) -> None:
        async def three(heard: Judge) -> None:
            await asyncio.gather(*(heard.review(request(i)) for i in range(3)))

        with listening(Asking(), TOKENS, keep=2) as (heard, found):
            asyncio.run(three(heard))
        assert [len(note.exchanges) for note in found] == [3, 3, 0]


# --- servers and nodes


@pytest.fixture(scope="module")
def fake() -> Any:
    path = Path(__file__).with_name("fake_llm_server.py")
    spec = importlib.util.spec_from_file_location("fake_llm_server_for_preflight", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def server(fake: Any) -> Iterator[Any]:
    with fake.FakeServer() as running:
        running.structured, running.prefill = set(), "none"
        yield running


def llm(server: Any, **options: Any) -> dict[str, Any]:
    given = {"url": server.url, "model": "toy", "capabilities": {"structured": "none"}}
    return {"name": "llm", "options": given | options, "guards": {}}


NODES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "SLURM_STEP_NUM_NODES", "NNODES",
         "PET_NNODES")  # fmt: skip


@pytest.fixture(autouse=True)
def one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NODES:
        monkeypatch.delenv(name, raising=False)


class TestNodes:
    @pytest.mark.parametrize(
        ("environ", "nodes"),
        [
            ({}, 1),
            ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, 1),
            ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, 2),
            ({"WORLD_SIZE": "9", "LOCAL_WORLD_SIZE": "8"}, 2),
            ({"WORLD_SIZE": "16"}, 1),
            ({"GROUP_WORLD_SIZE": "3"}, 3),
            ({"SLURM_STEP_NUM_NODES": "4"}, 4),
            ({"NNODES": "1:4", "PET_NNODES": ""}, 1),
        ],
    )
    def test_count(self, environ: dict[str, str], nodes: int) -> None:
        assert node_count(environ) == nodes

    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
    def test_a_loopback_is_refused_on_several(
        self, host: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        judge = LLMJudge(f"http://{host}:8000/v1", "m")
        refuse_unreachable(judge)
        monkeypatch.setenv("WORLD_SIZE", "4")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        with pytest.raises(ConfigError, match="the run has 2 nodes: each would call its own"):
            refuse_unreachable(ShuffledJudge(judge))
        refuse_unreachable(LLMJudge("http://judge.cluster:8000/v1", "m"))

    def test_a_preflight_asks_nobody_then(
        self, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("NNODES", "2")
        file = tmp_path / "c.yaml"
        file.write_text(yaml.safe_dump(config(judge=llm(server)).model_dump(mode="json")))
        result = CliRunner().invoke(app, ["preflight", str(file), "--out", str(tmp_path / "out")])
        assert isinstance(result.exception, ConfigError)
        assert "2 nodes" in str(result.exception)
        assert server.posts == [] and server.gets == []


class TestServers:
    def test_each_once_wherever_it_is_kept(self) -> None:
        judge = LLMJudge("http://a:1/v1", "m")
        assert chat_servers(ShuffledJudge(judge)) == [judge.chat]
        assert chat_servers(ScriptedJudge([])) == []

    def test_who_asks_a_service(self) -> None:
        assert not asks_service(config())
        assert not asks_service(config(judge={"name": "shuffled", "options": {"judge": "self"}}))
        assert asks_service(config(judge={"name": "shuffled", "options": {"judge": "llm"}}))
        assert asks_service(config(judge={"name": "my_module:MyJudge"}))
        off = config(judge={"name": "llm"}, objective={"intervention_updates": 0})
        assert not is_judged(off) and not asks_service(off)
        assert not is_judged(config(method="grpo"))

    def test_one_that_answers_and_does_not_generate(self, server: Any) -> None:
        server.chat = lambda body: "Hello! How can I help you?"
        with pytest.raises(JudgeError, match="it answers, but does not generate"):
            check_servers(config(judge=llm(server)))

    def test_one_that_is_down(self, server: Any) -> None:
        section = llm(server, timing={"backoff_s": 0.01, "max_backoff_s": 0.01})
        server.stop()
        with pytest.raises(JudgeError, match=r"POST http://127\.0\.0\.1"):
            check_servers(config(judge=section))
        server.start()

    def test_what_is_declared_and_is_not_so(self, server: Any) -> None:
        judging(server, revise)
        (report,) = check_servers(config(judge=llm(server)))
        assert not any("judge.options.capabilities" in note for note in report.notes)
        wrong = {"structured": "json_schema", "prefill": "trailing", "logprobs": True}
        (report,) = check_servers(config(judge=llm(server, capabilities=wrong)))
        said = [note for note in report.notes if "judge.options.capabilities" in note]
        assert said == [
            f"judge.options.capabilities.{name}: {declared} is declared, and toy at "
            f"{server.url.rstrip('/')} does none: set {name}: none"
            for name, declared in (("structured", "json_schema"), ("prefill", "trailing"))
        ]

    def test_a_replay_asks_nobody(self, server: Any, tmp_path: Path) -> None:
        section = llm(server, cache=str(tmp_path / "cache"), cache_mode="replay")
        assert check_servers(config(judge=section)) == []
        assert check_servers(config()) == []
        assert server.posts == []


class TestWanted:
    def test_by_config_and_command(self, tmp_path: Path) -> None:
        folder, asking = RunFolder(tmp_path), config(judge={"name": "llm"})
        assert wanted(asking, None, folder) and not wanted(asking, False, folder)
        assert not wanted(config(), None, folder) and wanted(config(), True, folder)
        for setting, expected in (("always", True), ("never", False)):
            section = {"before_training": setting}
            assert wanted(config(preflight=section), None, folder) is expected

    def test_a_run_that_goes_on(self, tmp_path: Path) -> None:
        folder = RunFolder(tmp_path)
        folder.open(config(), resume=False)
        folder.close()
        assert wanted(config(), True, folder)  # begun, and ended before its preflight
        file = tmp_path / "preflight.json"
        file.write_text('{"passed": false}')
        assert wanted(config(), True, folder)
        file.write_text('{"passed": true}')
        assert not wanted(config(), True, folder)
        file.unlink()
        folder.metrics_file.write_text('{"update": 0, "run_attempt": 0}\n')
        assert not wanted(config(), True, folder)


# --- the whole


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A policy of one layer over characters, as a transformers folder."""
    torch = pytest.importorskip("torch")
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("policy")
    vocab = {c: i for i, c in enumerate("0123456789+=?\n -")}
    for special in ("[unk]", "[eos]", "[pad]"):
        vocab[special] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="[unk]"))
    backend.decoder = decoders.Fuse()
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[unk]", eos_token="[eos]", pad_token="[pad]"
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(hf), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, initializer_range=0.2,
            max_position_embeddings=256, eos_token_id=hf.eos_token_id,
            pad_token_id=hf.pad_token_id,
        )
    )  # fmt: skip
    model.save_pretrained(str(folder))
    hf.save_pretrained(str(folder))
    return str(folder)


def judging(server: Any, verdict: Any, correction: str = "1+2=3\n") -> None:
    """The server judges: `verdict(body)` to a review's question, `correction` to what follows it."""
    probes = iter(range(1000))

    def chat(body: dict[str, Any]) -> str:
        if body["messages"][0]["role"] != "system":
            return f"words of {next(probes)}"  # the probe's questions
        said = any(message["role"] == "assistant" for message in body["messages"])
        return correction if said else verdict(body)

    server.chat = chat


def revise(body: Any) -> str:
    return json.dumps({"reason": "<b>no</b>", "verdict": "revise", "step": 1})


def command(
    tmp_path: Path, config: RunConfig, *arguments: str, name: str = "preflight"
) -> tuple[Any, Path]:
    file, out = tmp_path / "c.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    result = CliRunner().invoke(app, [name, str(file), "--run", str(out), *arguments])
    return result, out


class TestCommand:
    def test_a_judge_that_does_its_work(self, server: Any, policy: str, tmp_path: Path) -> None:
        judging(server, revise)
        prices = {"prompt": 100.0, "completion": 1000.0}
        section = llm(server, prices=prices) | {"guards": {"leak": {}}}
        own = config(policy, judge=section)
        result, out = command(tmp_path, own, "--n", "3")
        assert result.exit_code == 0, result.output
        found = json.loads((out / "preflight.json").read_text())
        assert found["passed"] and found["judge"] == "llm"
        assert found["rows"]["tasks"] == 3 and found["rows"]["rows"] == 12
        # Up to two reviews of each of 3 x 2 rows, with two calls for a revision, none for an EOS.
        reviews, revised = found["reviews"]["reviews"], found["reviews"]["revise"]
        assert 6 <= revised <= reviews <= 12
        assert found["reviews"]["keep"] == reviews - revised
        calls = found["forecast"]["per_reviewed_row"]["calls"]
        assert calls == pytest.approx(2 * revised / 6)
        assert found["forecast"]["reviewed_rows"] == 2 * 2 * 2
        assert found["forecast"]["calls"] == round(8 * calls)
        usage = found["forecast"]
        money = (usage["prompt_tokens"] * 100 + usage["completion_tokens"] * 1000) / 1e6
        assert usage["usd"] == pytest.approx(money, rel=0.01)
        # At most four corrections of a task; the policy is no good, so nothing differs.
        assert found["uplift"]["scored"] == revised and found["uplift"]["tasks"] == 3
        assert found["latency"]["p95"] >= found["latency"]["p50"] > 0
        assert len(found["all_reviews"]) == reviews
        one = next(r for r in found["all_reviews"] if r["outcome"] == "revise")
        assert (one["outcome"], one["step"], one["spliced"]) == ("revise", 0, "1+2=3\n")
        page = (out / "preflight.html").read_text()
        assert "What the judge was asked: a review that ended as revise" in page
        assert "&lt;b&gt;no&lt;/b&gt;" in page and "<b>no</b>" not in page
        assert "+ " in page and "You check a student" in page
        assert "Forecast of the whole run" in result.output
        # A second one takes the first one's place.
        assert command(tmp_path, own, "--n", "1")[0].exit_code == 0
        assert json.loads((out / "preflight.json").read_text())["rows"]["tasks"] == 1

    def test_a_judge_that_says_nothing_of_use(
        self, server: Any, policy: str, tmp_path: Path
    ) -> None:
        judging(server, lambda body: "Looks fine to me.")
        result, out = command(tmp_path, config(policy, judge=llm(server)), "--n", "2")
        assert result.exit_code == 1
        found = json.loads((out / "preflight.json").read_text())
        assert found["reviews"]["unparsed"] == found["reviews"]["reviews"] > 0
        (check,) = [check for check in found["checks"] if not check["passed"]]
        assert check["name"] == "verdicts parsed" and check["value"] == "0 %"
        assert "Looks fine to me." in check["todo"]
        lenient, _ = command(
            tmp_path,
            config(policy, judge=llm(server), preflight={"min_parse_rate": 0.0}),
            "--n",
            "2",
        )
        assert lenient.exit_code == 0

    def test_leaks(self, server: Any, policy: str, tmp_path: Path) -> None:
        answers = {}
        from mintrl_env.tasks import sum_tasks

        for task in sum_tasks(count=8):
            answers[task.prompt_text.strip()] = task.answer

        judging(server, revise)
        writes = server.chat

        def leaking(body: dict[str, Any]) -> str:
            if len(body["messages"]) < 3:
                return str(writes(body))
            case = body["messages"][1]["content"]
            return next(f"0+{a}={a}\n" for p, a in answers.items() if p in case)

        server.chat = leaking
        open_section = llm(server)
        result, out = command(tmp_path, config(policy, judge=open_section), "--n", "2")
        assert result.exit_code == 1
        found = json.loads((out / "preflight.json").read_text())
        assert found["leaks"]["through"] == found["leaks"]["written"] > 0
        assert [c["name"] for c in found["checks"] if not c["passed"]] == ["no leaks"]
        # A second one of a row tells it nothing new.
        first = [r for r in found["all_reviews"] if r["outcome"] == "revise" and not r["review"]]
        assert first and all(r["leak"] and r["leak_through"] for r in first)
        guarded = open_section | {"guards": {"leak": {}}}
        result, out = command(tmp_path, config(policy, judge=guarded), "--n", "2")
        assert result.exit_code == 0, result.output
        found = json.loads((out / "preflight.json").read_text())
        caught = found["reviews"]["guarded"]
        assert found["leaks"] == {"written": caught, "caught": caught, "through": 0}
        assert caught >= 4

    def test_a_judge_that_is_down_half_way(self, policy: str, tmp_path: Path) -> None:
        registry._registered["judge"]["test-down"] = lambda: ScriptedJudge(
            lambda request: JudgeError("timeout", "slow today")
        )
        try:
            own = config(
                policy,
                judge={"name": "test-down", "guards": {}},
                rollout={"n_control": 2, "n_intervened": 4, "slots": 16},
                train={"updates": 2, "prompts_per_update": 2, "micro_batch": 4},
            )
            result, out = command(tmp_path, own, "--n", "8")
        finally:
            del registry._registered["judge"]["test-down"]
        assert result.exit_code == 1
        found = json.loads((out / "preflight.json").read_text())
        # More than 32 reviews failed, and the run stops itself; the figures are there all the same.
        assert found["reviews"]["failed"] == found["reviews"]["reviews"] >= 32
        assert found["rows"]["tasks"] == 8
        assert "the preflight was stopped: timeout" in found["notes"][0]
        assert "raise judge.options.timing.attempt_s" in result.output.replace("\n", " ")

    def test_without_a_judge(self, policy: str, tmp_path: Path) -> None:
        own = config(policy, method="grpo", judge=None)
        result, out = command(tmp_path, own, "--n", "2")
        assert result.exit_code == 0, result.output
        found = json.loads((out / "preflight.json").read_text())
        assert found["judge"] is None and found["forecast"]["calls"] == 0
        assert [check["name"] for check in found["checks"]] == ["rows finished", "rows scored"]
        assert "Reviews" not in (out / "preflight.html").read_text().split("<nav")[1][:600]


class TestTraining:
    def test_refused(self, server: Any, policy: str, tmp_path: Path) -> None:
        pytest.importorskip("trl")
        judging(server, lambda body: "Looks fine to me.")
        own = config(policy, judge=llm(server))
        result, out = command(tmp_path, own, name="train")
        assert isinstance(result.exception, MintrlError)
        assert "nothing was trained:\n  verdicts parsed" in str(result.exception)
        assert "--no-preflight" in str(result.exception)
        assert not (out / "config.yaml").exists() and not (out / "model").exists()
        found = json.loads((out / "preflight.json").read_text())
        assert not found["passed"] and found["rows"]["tasks"] == 5
        assert (out / "preflight.html").exists()
        asked = len(server.posts)
        result, out = command(tmp_path, own, "--no-preflight", name="train")
        assert result.exit_code == 0, result.output
        assert (out / "model").exists() and len(server.posts) > asked

    def test_passed_and_then_trained_by_the_judge_as_it_was(
        self, server: Any, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("trl")
        from mintrl_env import training

        judging(server, revise)
        sessions: list[Any] = []

        def look_first(session: Any, *arguments: Any, **options: Any) -> None:
            judge, on_group = session.runner.parts.judge, session.runner.on_group
            original(session, *arguments, **options)
            assert (session.runner.parts.judge, session.runner.on_group) == (judge, on_group)
            assert chat_servers(judge) == [judge.chat]
            sessions.append(session)

        original = training.look_first
        monkeypatch.setattr(training, "look_first", look_first)
        own = config(policy, judge=llm(server), preflight={"tasks": 2, "corrections": 1})
        result, out = command(tmp_path, own, name="train")
        assert result.exit_code == 0, result.output
        assert len(sessions) == 1
        found = json.loads((out / "preflight.json").read_text())
        assert found["passed"] and found["rows"]["tasks"] == 2
        assert found["uplift"]["corrections"] == 2
        # What it ran is no part of the run: two updates of 2 x 4 rows are stored.
        rows, _ = RunFolder(out).store().read()
        assert {r.update for r in rows} == {0, 1} and len(rows) == 16
        # A run that goes on has had its preflight.
        longer = own.model_copy(update={"train": own.train.model_copy(update={"updates": 3})})
        result, out = command(tmp_path, longer, "--resume", name="train")
        assert result.exit_code == 0, result.output
        assert len(sessions) == 1

    def test_rounds(self, policy: str, tmp_path: Path) -> None:
        pytest.importorskip("trl")
        rollout = {"n_control": 2, "n_intervened": 2, "slots": 16, "schedule": "rounds"}
        own = config(policy, rollout=rollout, judge={"name": "oracle", "guards": {}},
                     preflight={"tasks": 2, "max_leaks": 99})  # fmt: skip
        result, out = command(tmp_path, own, "--preflight", name="train")
        assert result.exit_code == 0, result.output
        found = json.loads((out / "preflight.json").read_text())
        assert found["uplift"]["scored"] > 0

    def test_a_judge_of_this_process_has_none(self, policy: str, tmp_path: Path) -> None:
        pytest.importorskip("trl")
        result, out = command(tmp_path, config(policy), name="train")
        assert result.exit_code == 0, result.output
        assert not (out / "preflight.json").exists()


def test_a_session_refuses_a_loopback_on_several_nodes(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mintrl_env import recipes
    from mintrl_env.adapters.session import RolloutSession
    from mintrl_env.running import open_policy

    own = config(policy)
    host = open_policy(own)
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 nodes"):
        RolloutSession(
            host, recipes.rollout_config(own), judge=LLMJudge("http://localhost:1/v1", "m")
        )


def test_a_fork_of_a_broken_rule_is_raised() -> None:
    policy, verifier = ScriptedPolicy([]), FunctionVerifier(lambda task, text: 1.0)
    with pytest.raises(UsageError, match="has only 0"):
        asyncio.run(
            continue_forks([fork("t")], policy, verifier, TOKENS, RolloutConfig(), update=-5)
        )


def test_a_judge_that_answers_no_verdict_is_a_failed_review_here_too() -> None:
    from mintrl_env.preflight_record import ReviewNote, _HeardJudge

    class Wordy:
        async def review(self, request: Any) -> Any:
            return "keep"

    notes: list[ReviewNote] = []
    request: Any = object()
    assert asyncio.run(_HeardJudge(Wordy(), notes, 1).review(request)) == "keep"
    assert notes[0].verdict is None
