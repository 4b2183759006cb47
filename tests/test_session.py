"""RolloutSession and EngineHost: one policy, one loop thread, one set of engines."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl")

from mintrl_env.adapters.pump import Rounds
from mintrl_env.adapters.session import EngineHost, RolloutSession, task_id_of
from mintrl_env.episode import EpisodeConfig
from mintrl_env.errors import JudgeError, TaskError, UsageError
from mintrl_env.judges import KeepJudge
from mintrl_env.prompts import HFTokenizer, PromptBuilder
from mintrl_env.rollout import RolloutConfig
from mintrl_env.testing import FunctionVerifier, ScriptedJudge
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Kind, Provenance, Task, Verdict

_SPEC = importlib.util.spec_from_file_location("tiny_trl", Path(__file__).with_name("tiny_trl.py"))
assert _SPEC is not None and _SPEC.loader is not None
tiny = importlib.util.module_from_spec(_SPEC)
sys.modules["tiny_trl"] = tiny
_SPEC.loader.exec_module(tiny)

TASKS = [Task("a", "1+1=?\n", "2"), Task("b", "2="), Task("c", "3+3=?\n")]
CONFIG = RolloutConfig(
    episode=EpisodeConfig(
        chunk_tokens=6, max_correction=3, max_response=20, step_delimiters=("\n",)
    ),
    n_control=2,
    n_intervened=2,
)


def host(**changes: Any) -> EngineHost:
    hf = HFTokenizer(tiny.tokenizer())
    settings: dict[str, Any] = {
        "model": tiny.model(),
        "tokenizer": hf,
        "prompts": PromptBuilder(hf),
        "slots": 8,
        "max_length": 40,
        "rounds": Rounds(),
    }
    return EngineHost(**(settings | changes))


@pytest.fixture
def session() -> Iterator[RolloutSession]:
    with RolloutSession(host(), CONFIG, judge=ScriptedJudge(tiny.revise_first), seed=3) as made:
        yield made


def ids(groups: list[list[Trajectory]]) -> list[list[list[int]]]:
    return [[row.ids.tolist() for row in rows] for rows in groups]


def test_groups_come_whole_and_in_order(session: RolloutSession) -> None:
    done: list[tuple[int, int]] = []
    groups = session.groups(TASKS, update=0, on_progress=lambda n, of: done.append((n, of)))
    assert [[row.task_id for row in rows] for rows in groups] == [["a"] * 4, ["b"] * 4, ["c"] * 4]
    assert [row.kind for row in groups[0]] == [Kind.CONTROL] * 2 + [Kind.INTERVENED] * 2
    assert done == [(rows, 12) for rows in range(13)]
    judged = [row.count(Provenance.INTERVENTION) for rows in groups for row in rows]
    assert judged == [0, 0, 2, 2] * 3


def test_the_same_update_has_the_same_draws(session: RolloutSession) -> None:
    first = ids(session.groups(TASKS, update=0))
    assert ids(session.groups(TASKS, update=0)) == first
    assert ids(session.groups(TASKS, update=1)) != first
    # A share of the rows, in another order of tasks: each row is what it was.
    part = session.groups([TASKS[2], TASKS[0]], update=0, rollouts=[[1, 3], [2]])
    assert ids(part) == [[first[2][1], first[2][3]], [first[0][2]]]


def test_unreviewed_rows_are_the_controls(session: RolloutSession) -> None:
    reviewed = session.groups(TASKS, update=0)
    plain = session.groups(TASKS, update=0, reviewed=False)
    assert all(row.kind is Kind.CONTROL and not row.reviews for rows in plain for row in rows)
    for a, b in zip(reviewed, plain, strict=True):
        assert [row.ids.tolist() for row in a[:2]] == [row.ids.tolist() for row in b[:2]]


def test_changed_weights_are_seen(session: RolloutSession) -> None:
    before = session.groups(TASKS, update=0)
    with torch.no_grad():
        for parameter in session.host.model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    after = session.groups(TASKS, update=0)
    assert ids(before) != ids(after)
    model = session.host.model.eval()
    for rows in after:
        for row in rows:
            whole = torch.tensor(np.concatenate([row.prompt_ids, row.ids]))[None].long()
            logits = model(whole).logits[0, len(row.prompt_ids) - 1 : -1]
            logp = torch.log_softmax(logits.double(), -1)
            logp = logp.gather(1, torch.tensor(row.ids)[:, None].long())[:, 0].detach().numpy()
            sampled = ~np.isnan(row.logprobs)
            assert np.abs(logp - row.logprobs)[sampled].max() < 1e-5


def test_policy_versions_are_the_update(session: RolloutSession) -> None:
    for update, version in ((7, 7), (-2, 0)):
        rows = session.groups(TASKS[:1], update=update)[0]
        assert rows[0].update == update
        assert set(rows[0].policy_versions.tolist()) == {version}


def test_a_judge_made_from_the_host_is_pumped_with_the_policy() -> None:
    made: list[Any] = []

    def factory(of: EngineHost) -> Any:
        engine = of.engine(tiny.model(seed=1), max_length=64)
        made.append(engine)

        class Judge:
            async def review(self, request: Any) -> Verdict:
                whole = np.concatenate([request.prompt_ids, request.chunk_ids])
                scores = await engine.logprobs(whole, len(request.prompt_ids), key=request.key)
                assert scores.shape == request.chunk_ids.shape
                return Verdict.revise(0, "1") if scores.min() < -6 else Verdict.keep()

        return Judge(), (engine,)

    with RolloutSession(host(), CONFIG, judge=factory) as session:
        rows = [row for group in session.groups(TASKS, update=0) for row in group]
    assert made[0].max_length == 64 and made[0] is not session.engine
    assert made[0].rounds is session.engine.rounds
    verdicts = {review.outcome for row in rows for review in row.reviews}
    assert verdicts and "failed" not in verdicts


def test_one_loop_thread_for_all_calls(session: RolloutSession) -> None:
    threads: set[int] = set()
    session.runner.on_group = lambda rows: threads.add(threading.get_ident())
    for update in range(2):
        session.groups(TASKS, update=update)
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_closing_ends_the_thread_and_may_be_repeated() -> None:
    before = threading.active_count()
    session = RolloutSession(host(), CONFIG, judge=KeepJudge())
    session.groups(TASKS, update=0)
    assert threading.active_count() == before + 1
    session.close()
    session.close()
    assert threading.active_count() == before
    assert session.groups(TASKS[:1], update=0)  # and opens again
    session.close()


def test_errors_reach_the_caller_and_leave_the_session_usable() -> None:
    def verdict(request: Any) -> Verdict | Exception:
        return JudgeError("server", "down") if request.key.update == 0 else Verdict.keep()

    config = RolloutConfig(
        episode=CONFIG.episode, n_control=0, n_intervened=4, min_reviews=4, max_failure_rate=0.5
    )
    finished: list[str] = []
    with RolloutSession(
        host(),
        config,
        judge=ScriptedJudge(verdict),
        on_group=lambda rows: finished.append(rows[0].task_id),
    ) as session:
        with pytest.raises(JudgeError, match="silently become GRPO"):
            session.groups(TASKS, update=0)
        assert sorted(finished) == ["a", "b", "c"]
        with pytest.raises(TaskError, match="twice"):
            session.groups([TASKS[0], TASKS[0]], update=1)
        assert len(session.groups(TASKS, update=1)) == 3


def test_a_verifier_scores_inside_the_rollout() -> None:
    verifier = FunctionVerifier(lambda task, text: float(task.task_id == "a"))
    with RolloutSession(host(), CONFIG, verifier=verifier) as session:
        groups = session.groups(TASKS, update=0)
    assert [[row.reward for row in rows] for rows in groups] == [[1.0] * 4, [0.0] * 4, [0.0] * 4]


def test_a_prompt_that_leaves_no_room_is_an_error() -> None:
    with (
        RolloutSession(host(max_length=12), CONFIG) as session,
        pytest.raises(UsageError, match="max_length 12"),
    ):
        session.groups(TASKS, update=0)


def test_a_tokenizer_without_a_pad_token() -> None:
    bare = tiny.tokenizer()
    bare.pad_token = None
    hf = HFTokenizer(bare)
    with RolloutSession(host(tokenizer=hf, prompts=PromptBuilder(hf)), CONFIG) as session:
        assert len(session.groups(TASKS, update=0)) == 3


def test_task_ids_of_rows_without_one() -> None:
    row = {"prompt": [{"role": "user", "content": "1"}]}
    assert task_id_of(row) == task_id_of({**row, "answer": "2"})
    assert task_id_of(row) != task_id_of({"prompt": "1"})
    assert task_id_of({"prompt": "1"}).startswith("row-")


def test_a_forked_child_gets_a_loop_of_its_own(session: RolloutSession) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # OpenMP's, which a child does not inherit
    try:
        expected = ids(session.groups(TASKS, update=0))
        child = os.fork()
        if child == 0:  # whatever happens, it ends here
            status = 3
            try:
                signal.alarm(120)
                same = ids(session.groups(TASKS, update=0)) == expected
                session.close()
                status = 0 if same else 2
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert torch.get_num_threads() == 2, "only the child's are one"
        assert ids(session.groups(TASKS, update=0)) == expected, "the parent's own still runs"
    finally:
        torch.set_num_threads(threads)


def test_a_self_judges_copy_takes_over_the_policys_weights_on_a_schedule() -> None:
    from mintrl_env.judge_recipes import refresher

    taken: list[tuple[int, float]] = []
    model, copied = tiny.model(), tiny.model(seed=1)

    class Engine:
        def reset(self) -> None:
            weight = next(copied.parameters()).flatten()[0]
            taken.append((now, float(weight.detach())))

    of = host(model=model)
    of.before_update.append(refresher(of, copied, Engine(), 2))
    with RolloutSession(of, CONFIG) as running:
        for now in (0, 1, 2, 3, -1, 5, 6):
            with torch.no_grad():
                next(iter(model.parameters())).fill_(float(now))
            running.groups(TASKS[:1], update=now)
    assert taken == [(2, 2.0), (5, 5.0), (6, 6.0)], (
        "5 stands for 4, whose rollouts nobody asked for"
    )


def test_closing_closes_the_judges_connections_on_their_loop() -> None:
    closed: list[str] = []

    class Connected(KeepJudge):
        async def aclose(self) -> None:
            closed.append(threading.current_thread().name)
            raise OSError("half closed already")

    session = RolloutSession(host(), CONFIG, judge=Connected())
    session.close()
    assert closed == [], "nothing was opened"
    session.groups(TASKS[:1], update=0)
    session.close()
    session.close()
    assert closed == ["mintrl-loop"]


class _PlainJudge:
    def review(self, request: Any) -> Verdict:
        return Verdict.keep()


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        (KeepJudge, "the class KeepJudge"),
        ("keep", "str has no `async def review"),
        (_PlainJudge(), "_PlainJudge.review is a plain function"),
        (lambda host: (_PlainJudge(), ()), "_PlainJudge.review is a plain function"),
    ],
)
def test_a_judge_that_could_only_fail_is_refused_at_once(judge: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RolloutSession(host(), CONFIG, judge=judge)


def test_a_caller_whose_thread_runs_a_loop_may_ask_as_in_a_notebook(
    session: RolloutSession,
) -> None:
    async def cell() -> list[list[Trajectory]]:
        return session.groups(TASKS, update=0)

    assert ids(asyncio.run(cell())) == ids(session.groups(TASKS, update=0))
