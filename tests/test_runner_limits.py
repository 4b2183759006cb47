"""Runner: who waits for whom, bounds, the pause, deadlines that closing cannot outlast."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from mintrl_env import rollout
from mintrl_env.episode import EpisodeConfig
from mintrl_env.errors import UsageError
from mintrl_env.prompts import ByteTokenizer, PromptBuilder
from mintrl_env.rollout import Parts, RolloutConfig, Runner
from mintrl_env.testing import FunctionVerifier, ScriptedPolicy
from mintrl_env.trajectory import Trajectory
from mintrl_env.turnstile import Turnstile
from mintrl_env.types import Chunk, Finish, Kind, ReviewRequest, Score, StopReason, Task, Verdict

TOKENS = ByteTokenizer()
PROMPTS = PromptBuilder(TOKENS)
TASKS = [Task(f"t{i}", "1+1=", "2") for i in range(4)]
END = [*TOKENS.encode("ok\n\n"), TOKENS.EOS]
VERIFIER = FunctionVerifier(lambda task, response: 1.0)


def runner(parts: Parts, **settings: Any) -> Runner:
    episode = EpisodeConfig(chunk_tokens=8, max_reviews=2, max_response=40)
    config = RolloutConfig(episode=episode, **({"n_control": 1, "n_intervened": 1} | settings))
    return Runner(parts, PROMPTS, config)


def collect(made: Runner, tasks: list[Task] = TASKS) -> list[Trajectory]:
    return [row for rows in asyncio.run(made.collect(tasks, update=0)) for row in rows]


@pytest.mark.parametrize("where", ["judge", "verifier"])
def test_who_waits_holds_no_one_up(where: str) -> None:
    """One row's judge (or verifier) answers only when all other rows have been scored."""
    scored: list[str] = []
    waited: list[int] = []

    async def until_the_others_are_done() -> None:
        while len(scored) < 7:
            await asyncio.sleep(0.001)
        waited.append(len(scored))

    class Judge:
        async def review(self, request: ReviewRequest) -> Verdict:
            if where == "judge" and request.task.task_id == "t0":
                await until_the_others_are_done()
            return Verdict.keep()

    class Verifier:
        slow = True

        async def score(self, task: Task, response: str) -> Score:
            if where == "verifier" and task.task_id == "t0" and self.slow:
                self.slow = False
                await until_the_others_are_done()
            scored.append(task.task_id)
            return Score(1.0, "correct")

    made = runner(Parts(ScriptedPolicy([END]), Judge(), (), Verifier()), deadline_s=60.0)
    rows = collect(made)
    assert waited == [7]
    assert all(row.valid for row in rows)
    assert scored[-1] == "t0"


def test_a_disk_that_waits_holds_no_one_up() -> None:
    """The first group's writer comes back only when all other rows have been scored, and they wait
    until it is at work."""
    scored: list[str] = []
    at_work, all_others = threading.Event(), threading.Event()
    stored: list[tuple[str, bool]] = []

    class Verifier:
        async def score(self, task: Task, response: str) -> Score:
            while task.task_id != "t0" and not at_work.is_set():
                await asyncio.sleep(0.001)
            scored.append(task.task_id)
            if len(scored) == 8:
                all_others.set()
            return Score(1.0, "correct")

    def store(rows: Sequence[Trajectory]) -> None:
        at_work.set()
        stored.append((rows[0].task_id, all_others.wait(60)))

    made = runner(Parts(ScriptedPolicy([END]), None, (), Verifier()), n_intervened=1)
    made.on_group = store
    assert len(collect(made)) == 8
    assert stored[0] == ("t0", True)
    assert sorted(task for task, _ in stored) == ["t0", "t1", "t2", "t3"]


class Counting:
    """Policy, judge and verifier in one, which counts its calls in flight by part."""

    def __init__(self) -> None:
        self.now = {"policy": 0, "judge": 0, "verifier": 0}
        self.most = dict(self.now)

    async def _call(self, part: str) -> None:
        self.now[part] += 1
        self.most[part] = max(self.most[part], self.now[part])
        await asyncio.sleep(0.001)
        self.now[part] -= 1

    async def generate(self, ids: Any, **options: Any) -> Chunk:
        await self._call("policy")
        return Chunk(np.array(END), finish=Finish.EOS)

    async def review(self, request: ReviewRequest) -> Verdict:
        await self._call("judge")
        return Verdict.keep()

    async def score(self, task: Task, response: str) -> Score:
        await self._call("verifier")
        return Score(1.0, "correct")


def test_policy_judge_and_verifier_are_bounded_each_on_its_own() -> None:
    all_of_them = Counting()
    made = runner(
        Parts(all_of_them, all_of_them, (), all_of_them),
        n_control=2,
        n_intervened=10,
        policy_concurrency=5,
        judge_concurrency=3,
        verifier_concurrency=2,
    )
    assert all(row.valid for row in collect(made))
    assert all_of_them.most == {"policy": 5, "judge": 3, "verifier": 2}
    assert all_of_them.now == {"policy": 0, "judge": 0, "verifier": 0}


def test_bounds_of_nobody_are_refused() -> None:
    for part in ("policy", "judge", "verifier"):
        with pytest.raises(UsageError, match=f"{part}_concurrency must be >= 1"):
            RolloutConfig(**{f"{part}_concurrency": 0})


class Versioned:
    """Writes letters, two at a time, stamped with the version at which the chunk began."""

    version = 0
    writing = 0

    async def generate(self, ids: Any, **options: Any) -> Chunk:
        self.writing += 1
        version = self.version
        await asyncio.sleep(0.002)
        self.writing -= 1
        return Chunk(np.array(TOKENS.encode("ab")), policy_version=version)


def test_a_pause_lets_no_chunk_be_written_and_rows_say_which_weights_wrote_what() -> None:
    policy = Versioned()
    seen: list[int] = []

    class Judge:
        async def review(self, request: ReviewRequest) -> Verdict:
            await asyncio.sleep(0.001)
            return Verdict.keep()

    episode = EpisodeConfig(chunk_tokens=2, max_reviews=50, max_response=40)
    config = RolloutConfig(episode=episode, n_control=0, n_intervened=3)
    made = Runner(Parts(policy, Judge(), (), VERIFIER), PROMPTS, config)

    async def new_weights() -> None:
        for _ in range(3):
            await asyncio.sleep(0.01)
            async with made.paused():
                seen.append(policy.writing)
                await asyncio.sleep(0.01)
                seen.append(policy.writing)
                policy.version += 1

    async def both() -> list[list[Trajectory]]:
        groups, _ = await asyncio.gather(made.collect(TASKS[:2], update=0), new_weights())
        return groups

    rows = [row for rows in asyncio.run(both()) for row in rows]
    assert seen == [0] * 6
    assert all(row.valid and len(row.ids) == 40 for row in rows)
    for row in rows:
        versions = row.policy_versions.tolist()
        assert versions == sorted(versions) and versions[0] == 0
        assert versions[::2] == versions[1::2], "a chunk is of one version"
    assert max(row.policy_versions.max() for row in rows) > 0


def test_two_pauses_come_one_after_the_other_and_a_cancelled_wait_loses_no_place() -> None:
    async def main() -> None:
        turnstile = Turnstile(1)
        log: list[str] = []

        async def close(name: str) -> None:
            async with turnstile.closed():
                log.append(f"{name} begins")
                await asyncio.sleep(0.002)
                log.append(f"{name} ends")

        async def enter(name: str) -> None:
            async with turnstile:
                log.append(name)

        closers = [asyncio.create_task(close(name)) for name in "ab"]
        await asyncio.sleep(0)
        waiting = asyncio.create_task(enter("cancelled"))
        await asyncio.sleep(0.001)
        waiting.cancel()
        await asyncio.gather(*closers, enter("c"), waiting, return_exceptions=True)
        assert [entry for entry in log if entry != "c"] == [
            "a begins", "a ends", "b begins", "b ends"
        ]  # fmt: skip
        assert log.count("c") == 1 and log.index("c") in (2, 4), "nobody enters what is closed"
        assert turnstile.inside == 0

    asyncio.run(main())


@pytest.mark.parametrize("who", ["policy", "judge", "verifier"])
def test_a_deadline_covers_closing(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is asked at the deadline hangs in its clean-up: the row ends all the same."""
    monkeypatch.setattr(rollout, "_CLOSE_S", 0.05)

    class Hangs(Counting):
        async def _call(self, part: str) -> None:
            if part != who:
                return
            try:
                await asyncio.sleep(60)
            finally:
                while True:  # deaf to being cancelled once; the loop's end cancels again
                    await asyncio.sleep(60)

    part = Hangs()
    made = runner(Parts(part, part, (), part), n_control=0, deadline_s=0.1, max_retries=3)

    async def bounded() -> list[list[Trajectory]]:
        return await asyncio.wait_for(made.collect(TASKS[:2], update=0), 20)

    rows = [row for rows in asyncio.run(bounded()) for row in rows]
    assert [row.stop_reason for row in rows] == [StopReason.DEADLINE] * 2
    assert [row.valid for row in rows] == [False, False]
    assert [row.kind for row in rows] == [Kind.INTERVENED] * 2
    assert all("did not close within 0.05 s" in row.cause for row in rows)
    assert [row.retry for row in rows] == [0, 0], "a deadline is not tried again"


@pytest.mark.parametrize(("at_once", "most"), [(None, 8), (5, 4), (4, 4), (2, 2), (1, 2)])
def test_groups_begin_as_others_end_within_a_window(at_once: int | None, most: int) -> None:
    """4 groups of 2 rows: whole groups alone, one at least."""
    live: list[int] = []
    progress: list[tuple[int, int]] = []
    made = runner(Parts(Counting(), None, (), VERIFIER))
    made._on_live = live.append
    groups = asyncio.run(
        made.collect(TASKS, update=0, at_once=at_once, on_progress=lambda *p: progress.append(p))
    )
    assert [[row.task_id for row in rows] for rows in groups] == [[t.task_id] * 2 for t in TASKS]
    assert max(live) == most
    assert live[-1] == 0
    assert [a for a, b in zip(progress, [None, *progress[:-1]], strict=True) if a != b] == [
        (done, 8) for done in range(9)
    ]
