"""The concurrent driver: many episodes at once, no barrier between them.

`drive` fulfils the needs of one Episode; `Runner` runs groups of them, each of its parts (policy,
judge, verifier) bounded on its own, so that an episode that waits for its judge holds no one up.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from mintrl_env.driving import Environment, Parts, RolloutConfig, drive
from mintrl_env.episode import (
    Episode,
    Finished,
)
from mintrl_env.errors import JudgeError, MissingExtraError, TaskError, UsageError
from mintrl_env.failures import FailureWatch
from mintrl_env.keys import RowKey
from mintrl_env.prompts import PromptBuilder
from mintrl_env.trajectory import Trajectory
from mintrl_env.turnstile import Turnstile
from mintrl_env.types import (
    Kind,
    StopReason,
    Task,
)

__all__ = ["Environment", "Parts", "RolloutConfig", "Runner", "drive"]

_CLOSE_S = 10.0  # what closing may take once a deadline has passed


async def _within(work: Coroutine[Any, Any, Any], seconds: float) -> bool:
    """Run `work`; False where it has not ended after so many seconds and is left behind.

    A deadline cancels what is waited for, but somebody may wait for something in turn while closing
    (a connection, a sandbox), and would hold up the row's whole group.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=max(seconds, 0.0))
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task}, timeout=_CLOSE_S)
        raise
    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    if task.done():
        task.result()
    return task.done()


async def _end(futures: Collection[asyncio.Future[Any]]) -> None:
    """Cancel what still runs, wait for its end, and look at every exception."""
    for future in futures:
        future.cancel()
    await asyncio.gather(*futures, return_exceptions=True)


class Runner:
    """Runs groups of trajectories.

    Args:
        parts: whom to ask.
        prompts: makes prompt ids; its tokenizer is the policy's.
        config: how rollouts run.
        seed: of the keyed draws.
        run_attempt: stamped on the trajectories; raised when an update is run again.
        on_group: called with the rows of each finished group, one group at a time, in a thread beside
            the runner's loop: a store's writer, whose disk holds no episode up.
        on_live: called with the number of episodes still running whenever it changes.
    """

    def __init__(
        self,
        parts: Parts,
        prompts: PromptBuilder,
        config: RolloutConfig,
        *,
        seed: int = 0,
        run_attempt: int = 0,
        on_group: Callable[[Sequence[Trajectory]], object] | None = None,
        on_live: Callable[[int], None] = lambda live: None,
    ) -> None:
        self.parts = parts
        self.prompts = prompts
        self.config = config
        self.seed = seed
        self.run_attempt = run_attempt
        self.on_group = on_group
        self._on_live = on_live
        self._on_progress: Callable[[int], None] = lambda ended: None
        self._live = self._ended = 0
        self._watch = FailureWatch(config.max_failure_rate, config.min_reviews)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def groups(
        self,
        tasks: Sequence[Task],
        *,
        update: int,
        reviewed: bool = True,
        rollouts: Sequence[Sequence[int]] | None = None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        at_once: int | None = None,
    ) -> AsyncIterator[list[Trajectory]]:
        """The rows of each group once it is whole, in the order in which groups finish.

        Args:
            tasks: one group each, no task twice.
            update: the update's index; negative for evaluations.
            reviewed: False removes the judge and nothing else.
            rollouts: for each task the rows to run here (a rank's share); default the whole group.
            on_progress: called with (rows done, rows in all) whenever a row is done.
            at_once: the most rows that have begun and not ended; a group that is larger runs alone.
                A row's deadline counts from its beginning. None: all begin at once.

        Raises:
            TaskError: a prompt that cannot be used, before anything has run.
            JudgeError, VerifierError, PolicyError: reviews or rows failed too often, or a review by a
                cause whose rule is stop; the finished groups came out before.
        """
        ids = [self.prompts.ids(task) for task in tasks]
        if len({task.task_id for task in tasks}) != len(tasks):
            raise TaskError("a task stands twice in one update; its rows could not be told apart")
        shares = rollouts or [range(self.config.group_size)] * len(tasks)
        total, most = sum(map(len, shares)), sys.maxsize if at_once is None else at_once
        self._on_progress = lambda ended: on_progress(ended, total)
        self._live = self._ended = 0
        waiting = deque(zip(tasks, ids, shares, strict=True))
        pending: set[asyncio.Future[list[Trajectory]]] = set()
        futures: set[asyncio.Future[list[Trajectory]]] = set()  # whose result nobody has had

        def begin() -> None:
            begun = 0
            while waiting and (not pending or self._live + begun + len(waiting[0][2]) <= most):
                task, row, share = waiting.popleft()
                begun += len(share)
                group = asyncio.ensure_future(self._group(task, row, share, update, reviewed))
                futures.add(group)
                pending.add(group)
            if begun:
                self._change_live(begun)

        try:
            begin()
            while pending:
                done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                pending -= done
                begin()
                for future in done:
                    rows = future.result()
                    futures.remove(future)
                    if self.on_group is not None:
                        await asyncio.to_thread(self.on_group, rows)
                    self._watch.add(rows)
                    yield rows
            self._watch.check()
        finally:
            await _end(futures)

    async def collect(
        self,
        tasks: Sequence[Task],
        *,
        update: int,
        reviewed: bool = True,
        rollouts: Sequence[Sequence[int]] | None = None,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        at_once: int | None = None,
    ) -> list[list[Trajectory]]:
        """All groups, in the order of `tasks` (arguments as in `groups`)."""
        found: dict[str, list[Trajectory]] = {}
        async for rows in self.groups(
            tasks,
            update=update,
            reviewed=reviewed,
            rollouts=rollouts,
            on_progress=on_progress,
            at_once=at_once,
        ):
            found[rows[0].task_id] = rows
        return [found[task.task_id] for task in tasks]

    async def _group(
        self,
        task: Task,
        prompt_ids: npt.NDArray[np.int32],
        rollouts: Sequence[int],
        update: int,
        reviewed: bool,
    ) -> list[Trajectory]:
        async def row(rollout: int) -> Trajectory:
            try:
                return await self.trajectory(
                    task, prompt_ids, update=update, rollout=rollout, reviewed=reviewed
                )
            finally:
                self._ended += 1
                self._change_live(-1)

        rows = [asyncio.ensure_future(row(rollout)) for rollout in rollouts]
        try:
            return list(await asyncio.gather(*rows))
        finally:
            await _end(rows)  # where one fails, the others must not run on unseen

    def _change_live(self, by: int) -> None:
        self._live += by
        self._on_live(self._live)
        self._on_progress(self._ended)

    async def trajectory(
        self,
        task: Task,
        prompt_ids: npt.NDArray[np.int32],
        *,
        update: int,
        rollout: int,
        reviewed: bool = True,
    ) -> Trajectory:
        """One row, retried as a fresh episode when it fails, then recorded as not valid."""
        kind = self.config.kind(rollout) if reviewed else Kind.CONTROL
        until = asyncio.get_running_loop().time() + self.config.deadline_s
        cause, stop_reason = "", StopReason.ERROR
        for retry in range(self.config.max_retries + 1):
            episode = Episode(
                task,
                prompt_ids,
                kind=kind,
                tokenizer=self.prompts.tokenizer,
                config=self.config.episode,
                key=RowKey(self.seed, update, task.task_id, rollout, retry),
            )
            attempt = drive(
                episode,
                self.parts,
                self.config,
                until=until,
                policy_slots=self._slots("policy"),
                judge_slots=self._slots("judge"),
                verifier_slots=self._slots("verifier"),
            )
            try:
                left = until - asyncio.get_running_loop().time()
                if not await _within(attempt, left + _CLOSE_S):
                    cause = (
                        f"deadline of {self.config.deadline_s:g} s, and what was asked then did not "
                        f"close within {_CLOSE_S:g} s more"
                    )
                    stop_reason = StopReason.DEADLINE
                    break
            except Exception as error:
                # Bugs, missing packages, a judge at whose failure the run shall stop: retrying
                # would hide them.
                if isinstance(error, (UsageError, MissingExtraError, JudgeError)):
                    raise
                cause = f"{type(error).__name__}: {error}"
                continue
            if len(episode):
                return Trajectory.of(
                    episode, update=update, rollout=rollout, retry=retry,
                    run_attempt=self.run_attempt,
                )  # fmt: skip
            end = episode.need
            assert isinstance(end, Finished)
            cause = cause or f"{end.detail}, before the first token"
            stop_reason = end.stop_reason
            break
        return Trajectory.failed(
            task_id=task.task_id,
            prompt_ids=prompt_ids,
            kind=kind,
            update=update,
            rollout=rollout,
            eos_id=min(self.prompts.tokenizer.eos_ids),
            cause=cause,
            stop_reason=stop_reason,
            retry=retry,
            run_attempt=self.run_attempt,
        )

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """No chunk is being written inside: the policy may get new weights in mid-flight.

            async with runner.paused():  # on the loop that runs the rows
                engine.policy_version += 1

        Begins when the chunks in flight are there; reviews and scores go on. A row that is written by
        two versions says so token by token (`policy_versions`). Not for `schedule: rounds`.
        """
        async with self._slots("policy").closed():
            yield

    def _slots(self, name: str) -> Turnstile:
        # They belong to the loop that runs them, and a runner may outlive a loop.
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._turnstiles = {
                "policy": Turnstile(self.config.policy_concurrency),
                "judge": Turnstile(self.config.judge_concurrency),
                "verifier": Turnstile(self.config.verifier_concurrency),
            }
        return self._turnstiles[name]
