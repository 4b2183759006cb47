"""The concurrent driver: many episodes at once, no barrier between them.

`drive` fulfils the needs of one Episode; `Runner` runs groups of them, each of its parts (policy,
judge, verifier) bounded on its own, so that an episode that waits for its judge holds no one up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mintrl_env.episode import (
    Ended,
    EnvironmentOutput,
    Episode,
    EpisodeConfig,
    Event,
    Finished,
    NeedChunk,
    NeedEnvironment,
    NeedReview,
    NeedScore,
)
from mintrl_env.errors import JudgeCause, MissingExtraError, TaskError, UsageError
from mintrl_env.failures import FailureWatch
from mintrl_env.guards import SpecialTokenGuard
from mintrl_env.keys import RowKey
from mintrl_env.prompts import PromptBuilder
from mintrl_env.protocols import Guard, Judge, Policy, Sampling, Verifier
from mintrl_env.reviewing import review_chunk
from mintrl_env.scoring import score_response
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import (
    FailedReview,
    Kind,
    NoReview,
    ReviewEvent,
    Score,
    StopReason,
    Task,
)

Environment = Callable[[Task, NeedEnvironment], Awaitable[tuple[str, bool]]]
"""Answers a turn or a tool call: its output text, and whether the episode ends with it."""


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """How rollouts run.

    Attributes:
        episode: the limits of an episode.
        sampling: the policy's.
        n_control, n_intervened: N_c and N_m, the trajectories of a group; rollouts 0 to N_c - 1
            are the controls.
        deadline_s: for one trajectory, its set-up, reviews, score and fresh attempts included.
        max_retries: fresh attempts at a trajectory that failed, before it becomes a row that is
            not valid.
        on_judge_failure: "keep" accepts the chunk (recorded as failed), "drop" makes the row not
            valid.
        max_failure_rate: above this share of failed or unparsed reviews, or of rows that a service
            or a deadline failed, the run stops instead of silently becoming GRPO, or nothing.
            Counted over updates until there are `min_reviews` of them.
        judge_concurrency, verifier_concurrency: bounds on calls in flight.
    """

    episode: EpisodeConfig = field(default_factory=EpisodeConfig)
    sampling: Sampling = field(default_factory=Sampling)
    n_control: int = 8
    n_intervened: int = 8
    deadline_s: float = 1800.0
    max_retries: int = 1
    on_judge_failure: str = "keep"
    max_failure_rate: float = 0.5
    min_reviews: int = 32
    judge_concurrency: int = 64
    verifier_concurrency: int = 16

    def __post_init__(self) -> None:
        if self.n_control < 0 or self.n_intervened < 0 or not self.group_size:
            raise UsageError("n_control and n_intervened count trajectories and can't both be 0")
        if self.on_judge_failure not in ("keep", "drop"):
            raise UsageError(f"on_judge_failure is keep or drop, not {self.on_judge_failure!r}")
        if not self.deadline_s > 0:
            raise UsageError("deadline_s must be positive")

    @property
    def group_size(self) -> int:
        return self.n_control + self.n_intervened

    def kind(self, rollout: int) -> Kind:
        """The kind of the group's row number `rollout`."""
        return Kind.CONTROL if rollout % self.group_size < self.n_control else Kind.INTERVENED


@dataclass(slots=True)
class Parts:
    """Whom the driver asks.

    Attributes:
        policy: writes chunks.
        judge: reviews them; None means that nobody does.
        guards: look at its Revises, in order; the special-token guard is always added.
        verifier: scores; None defers the score to the trainer's own reward functions.
        environment: answers turns and tool calls; needed with `turns` only.
    """

    policy: Policy
    judge: Judge | None = None
    guards: Sequence[Guard] = ()
    verifier: Verifier | None = None
    environment: Environment | None = None


async def drive(
    episode: Episode,
    parts: Parts,
    config: RolloutConfig,
    *,
    until: float | None = None,
    judge_slots: AbstractAsyncContextManager[None] | None = None,
    verifier_slots: AbstractAsyncContextManager[None] | None = None,
) -> Finished:
    """Fulfil the needs of one episode until it is finished, within the deadline.

    Args:
        until: when the deadline falls, by the running loop's clock; default `deadline_s` from now.
        judge_slots, verifier_slots: entered around each review and score.

    Raises whatever the policy or the environment raises; the judge's failures are reviews, the
    verifier's are undecided scores.
    """
    guards: tuple[Guard, ...] = (SpecialTokenGuard(episode.tokenizer), *parts.guards)

    async def fulfil(need: object) -> Event:
        if isinstance(need, NeedChunk):
            assert episode.key is not None
            return await parts.policy.generate(
                np.concatenate([episode.prompt_ids, episode.ids]),
                max_tokens=need.max_tokens,
                stop=need.stop,
                sampling=config.sampling,
                key=episode.key.at(need.draw),
            )
        if isinstance(need, NeedReview):
            return await _review(episode, need, parts, guards, judge_slots)
        if isinstance(need, NeedEnvironment):
            if parts.environment is None:
                raise UsageError("the episode has turns, but no environment answers them")
            text, done = await parts.environment(episode.task, need)
            return EnvironmentOutput(episode.tokenizer.encode(text), done)
        assert isinstance(need, NeedScore)
        if parts.verifier is None:
            return Score.undecided("deferred")
        async with verifier_slots or nullcontext():
            return await score_response(parts.verifier, episode.task, need.text)

    if until is None:
        until = asyncio.get_running_loop().time() + config.deadline_s
    deadline = asyncio.timeout_at(until)
    try:
        async with deadline:
            while not isinstance(need := episode.need, Finished):
                event = await fulfil(need)
                episode.send(event)
                if isinstance(event, FailedReview) and config.on_judge_failure == "drop":
                    episode.send(Ended(StopReason.ERROR, f"judge: {event.cause}"))
    except TimeoutError:
        if not deadline.expired():
            raise  # somebody else's: a policy's client, an environment
        if episode.awaits_review:  # a judge that hangs has failed, and is counted
            episode.send(FailedReview(JudgeCause.TIMEOUT, "the trajectory's deadline passed"))
        episode.send(Ended(StopReason.DEADLINE, f"deadline of {config.deadline_s:g} s"))
    end = episode.need
    assert isinstance(end, Finished)
    return end


async def _review(
    episode: Episode,
    need: NeedReview,
    parts: Parts,
    guards: Sequence[Guard],
    slots: AbstractAsyncContextManager[None] | None,
) -> ReviewEvent:
    if parts.judge is None:
        return NoReview()
    async with slots or nullcontext():
        return await review_chunk(
            parts.judge, need.request, guards=guards, check=episode.illegal_because
        )


async def _end(futures: Sequence[asyncio.Future[Any]]) -> None:
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
        on_group: called with the rows of each finished group, in the runner's loop (a store's writer).
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
        self._on_progress: Callable[[int], None] = lambda live: None
        self._live = 0
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
    ) -> AsyncIterator[list[Trajectory]]:
        """The rows of each group once it is whole, in the order in which groups finish.

        Args:
            tasks: one group each, no task twice.
            update: the update's index; negative for evaluations.
            reviewed: False removes the judge and nothing else.
            rollouts: for each task the rows to run here (a rank's share); default the whole group.
            on_progress: called with (rows done, rows in all) whenever a row is done.

        Raises:
            TaskError: a prompt that cannot be used, before anything has run.
            JudgeError, VerifierError, PolicyError: reviews or rows failed too often; the finished
                groups came out before.
        """
        ids = [self.prompts.ids(task) for task in tasks]
        if len({task.task_id for task in tasks}) != len(tasks):
            raise TaskError("a task stands twice in one update; its rows could not be told apart")
        shares = rollouts or [range(self.config.group_size)] * len(tasks)
        total = sum(map(len, shares))
        self._on_progress = lambda live: on_progress(total - live, total)
        self._change_live(total - self._live)
        futures = [
            asyncio.ensure_future(self._group(task, row, share, update, reviewed))
            for task, row, share in zip(tasks, ids, shares, strict=True)
        ]
        pending = set(futures)
        try:
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    rows = future.result()
                    if self.on_group is not None:
                        self.on_group(rows)
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
    ) -> list[list[Trajectory]]:
        """All groups, in the order of `tasks` (arguments as in `groups`)."""
        found: dict[str, list[Trajectory]] = {}
        async for rows in self.groups(
            tasks, update=update, reviewed=reviewed, rollouts=rollouts, on_progress=on_progress
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
                self._change_live(-1)

        rows = [asyncio.ensure_future(row(rollout)) for rollout in rollouts]
        try:
            return list(await asyncio.gather(*rows))
        finally:
            await _end(rows)  # where one fails, the others must not run on unseen

    def _change_live(self, by: int) -> None:
        self._live += by
        self._on_live(self._live)
        self._on_progress(self._live)

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
            try:
                await drive(
                    episode,
                    self.parts,
                    self.config,
                    until=until,
                    judge_slots=self._slots("judge"),
                    verifier_slots=self._slots("verifier"),
                )
            except Exception as error:
                # Bugs and missing packages: retrying would hide them.
                if isinstance(error, (UsageError, MissingExtraError)):
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

    def _slots(self, name: str) -> asyncio.Semaphore:
        # Semaphores belong to the loop that runs them, and a runner may outlive a loop.
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._semaphores = {
                "judge": asyncio.Semaphore(self.config.judge_concurrency),
                "verifier": asyncio.Semaphore(self.config.verifier_concurrency),
            }
        return self._semaphores[name]
