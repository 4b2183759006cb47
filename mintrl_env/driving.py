"""How one episode is driven: its limits, whom it asks, and the fulfilment of its needs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np

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
from mintrl_env.errors import JudgeCause, UsageError
from mintrl_env.failures import failure_rule, stopped_by
from mintrl_env.guards import SpecialTokenGuard
from mintrl_env.protocols import Guard, Judge, Policy, Sampling, Verifier
from mintrl_env.reviewing import review_chunk
from mintrl_env.scoring import score_response
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
        on_judge_failure: keep, drop or stop, for all causes or by cause ("keep, auth=stop"); see
            `failures.failure_rule`.
        max_failure_rate: above this share of failed or unparsed reviews, or of rows that a service
            or a deadline failed, the run stops instead of silently becoming GRPO, or nothing.
            Counted over updates until there are `min_reviews` of them.
        policy_concurrency, judge_concurrency, verifier_concurrency: bounds on calls in flight, each
            of its own. An engine in this process has its slots as a bound besides.
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
    policy_concurrency: int = sys.maxsize
    judge_concurrency: int = 64
    verifier_concurrency: int = 16

    def __post_init__(self) -> None:
        if self.n_control < 0 or self.n_intervened < 0 or not self.group_size:
            raise UsageError("n_control and n_intervened count trajectories and can't both be 0")
        try:
            failure_rule(self.on_judge_failure)
        except UsageError as error:
            raise UsageError(f"on_judge_failure: {error}") from None
        if not self.deadline_s > 0:
            raise UsageError("deadline_s must be positive")
        for name in ("policy", "judge", "verifier"):
            if (bound := getattr(self, f"{name}_concurrency")) < 1:
                raise UsageError(f"{name}_concurrency must be >= 1, not {bound}")

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
    policy_slots: AbstractAsyncContextManager[None] | None = None,
    judge_slots: AbstractAsyncContextManager[None] | None = None,
    verifier_slots: AbstractAsyncContextManager[None] | None = None,
) -> Finished:
    """Fulfil the needs of one episode until it is finished, within the deadline.

    Args:
        until: when the deadline falls, by the running loop's clock; default `deadline_s` from now.
        policy_slots, judge_slots, verifier_slots: entered around each chunk, review and score.

    Raises whatever the policy or the environment raises; the judge's failures are reviews (JudgeError
    where the rule for their cause is stop), the verifier's are undecided scores.
    """
    rule = failure_rule(config.on_judge_failure)
    guards: tuple[Guard, ...] = (SpecialTokenGuard(episode.tokenizer), *parts.guards)

    async def fulfil(need: object) -> Event:
        if isinstance(need, NeedChunk):
            assert episode.key is not None
            async with policy_slots or nullcontext():
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
                if isinstance(event, FailedReview):
                    cause = JudgeCause(event.cause)
                    if rule[cause] == "stop":
                        raise stopped_by(cause, event.reason)
                    if rule[cause] == "drop":
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
