"""A finished episode, frozen, and the counts over many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from mintrl_env.episode import Episode, Finished
from mintrl_env.errors import UsageError
from mintrl_env.types import (
    IdsLike,
    Kind,
    Outcome,
    Provenance,
    Review,
    Score,
    StopReason,
    _ByValue,
    frozen_ids,
    frozen_logprobs,
)


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory(_ByValue):
    """One response with everything that is known of it.

    Attributes:
        task_id, update, rollout, retry, run_attempt: where it stands in the run; `run_attempt`
            counts how often the update was run again after a resume.
        kind: control or intervened.
        prompt_ids: int32 (P,).
        ids, provenance, logprobs, policy_versions: int32, int8, float32 (NaN where the policy did
            not sample), int32, all of shape (T,), T >= 1.
        reviews: the record of each review, dropped tokens included.
        score: the verifier's.
        valid: False keeps the row out of baseline and loss.
        stop_reason: why it ended.
        cause: why it is not valid, else "".
        draws: policy tokens sampled, dropped ones included.
        run: in a store that several runs were merged into, whose row it is; else "".
    """

    task_id: str
    update: int
    rollout: int
    kind: Kind
    prompt_ids: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int32]
    provenance: npt.NDArray[np.int8]
    logprobs: npt.NDArray[np.float32]
    policy_versions: npt.NDArray[np.int32]
    score: Score
    valid: bool
    stop_reason: StopReason
    reviews: tuple[Review, ...] = ()
    retry: int = 0
    run_attempt: int = 0
    cause: str = ""
    draws: int = 0
    run: str = ""

    def __post_init__(self) -> None:
        lengths = {len(a) for a in (self.ids, self.provenance, self.logprobs, self.policy_versions)}
        if len(lengths) != 1 or 0 in lengths:
            raise UsageError(
                f"trajectory {self.task_id!r}/{self.rollout}: ids, provenance, log-probs and "
                f"policy versions must have one length >= 1, not {sorted(lengths)}"
            )

    @classmethod
    def of(
        cls, episode: Episode, *, update: int, rollout: int, retry: int = 0, run_attempt: int = 0
    ) -> Trajectory:
        """The record of a finished episode that holds at least one token."""
        end = episode.need
        if not isinstance(end, Finished):
            raise UsageError(f"the episode is not finished: it needs {type(end).__name__}")
        cause = ""
        if not end.valid:
            cause = end.detail or end.score.status
        return cls(
            task_id=episode.task.task_id,
            update=update,
            rollout=rollout,
            kind=episode.kind,
            prompt_ids=episode.prompt_ids,
            ids=episode.ids,
            provenance=episode.provenance,
            logprobs=episode.logprobs,
            policy_versions=episode.policy_versions,
            score=end.score,
            valid=end.valid,
            stop_reason=end.stop_reason,
            reviews=tuple(episode.reviews),
            retry=retry,
            run_attempt=run_attempt,
            cause=cause,
            draws=episode.draws,
        )

    @classmethod
    def failed(
        cls,
        *,
        task_id: str,
        prompt_ids: IdsLike,
        kind: Kind,
        update: int,
        rollout: int,
        eos_id: int,
        cause: str,
        stop_reason: StopReason = StopReason.ERROR,
        retry: int = 0,
        run_attempt: int = 0,
    ) -> Trajectory:
        """The placeholder of a row that failed: one EOS, not valid. Trainers need full rows."""
        return cls(
            task_id=task_id,
            update=update,
            rollout=rollout,
            kind=kind,
            prompt_ids=frozen_ids(prompt_ids),
            ids=frozen_ids([eos_id]),
            provenance=np.array([Provenance.ENVIRONMENT], dtype=np.int8),
            logprobs=frozen_logprobs(None, 1),
            policy_versions=frozen_ids([update]),
            score=Score.undecided("unavailable", cause),
            valid=False,
            stop_reason=stop_reason,
            retry=retry,
            run_attempt=run_attempt,
            cause=cause,
        )

    @property
    def reward(self) -> float:
        return self.score.reward

    def with_score(self, score: Score) -> Trajectory:
        """The same trajectory once a deferred score is known."""
        ended_well = self.stop_reason not in (StopReason.DEADLINE, StopReason.ERROR)
        valid = ended_well and score.decided
        return replace(self, score=score, valid=valid, cause="" if valid else score.status)

    def count(self, provenance: Provenance) -> int:
        return int(np.count_nonzero(self.provenance == provenance))

    @property
    def dropped_tokens(self) -> int:
        return sum(len(review.dropped_ids) for review in self.reviews)


@dataclass
class RolloutStats:
    """Pooled counts over trajectories; fractions are methods, so that they can't disagree.

    Two off-policy fractions, always: over intervened trajectories alone and over all.
    """

    trajectories: int = 0
    valid: int = 0
    policy_tokens: int = 0
    intervention_tokens: int = 0
    environment_tokens: int = 0
    dropped_tokens: int = 0
    judge_prompt_tokens: int = 0
    judge_completion_tokens: int = 0
    judge_usd: float = 0.0
    intervened_policy_tokens: int = 0
    reviewed_tokens: int = 0
    reviews: int = 0
    outcomes: dict[str, int] = field(default_factory=lambda: {o.value: 0 for o in Outcome})
    causes: dict[str, int] = field(default_factory=dict)
    groups: int = 0
    all_fail: int = 0
    all_succeed: int = 0
    no_control: int = 0
    control_reward: float = 0.0
    control_rows: int = 0
    intervened_reward: float = 0.0
    intervened_rows: int = 0

    def add_group(self, rows: Sequence[Trajectory]) -> None:
        """Count one whole group."""
        for row in rows:
            self._add(row)
        rewards = [row.reward for row in rows if row.valid and row.score.decided]
        self.groups += 1
        self.all_fail += bool(rewards) and max(rewards) <= 0.0
        self.all_succeed += bool(rewards) and min(rewards) >= 1.0
        self.no_control += not any(row.valid and row.kind is Kind.CONTROL for row in rows)

    def _add(self, row: Trajectory) -> None:
        self.trajectories += 1
        self.valid += row.valid
        policy = row.count(Provenance.POLICY)
        self.policy_tokens += policy
        self.intervention_tokens += row.count(Provenance.INTERVENTION)
        self.environment_tokens += row.count(Provenance.ENVIRONMENT)
        self.dropped_tokens += row.dropped_tokens
        if row.kind is Kind.INTERVENED:
            self.intervened_policy_tokens += policy
        if row.valid and row.score.decided:
            if row.kind is Kind.CONTROL:
                self.control_rows, self.control_reward = (
                    self.control_rows + 1,
                    self.control_reward + row.reward,
                )
            else:
                self.intervened_rows, self.intervened_reward = (
                    self.intervened_rows + 1,
                    self.intervened_reward + row.reward,
                )
        if not row.valid:
            self.causes[row.cause or "unknown"] = self.causes.get(row.cause or "unknown", 0) + 1
        for review in row.reviews:
            self.reviews += 1
            self.reviewed_tokens += review.chunk_tokens
            self.outcomes[review.outcome.value] += 1
            self.judge_prompt_tokens += review.usage.prompt_tokens
            self.judge_completion_tokens += review.usage.completion_tokens
            self.judge_usd += review.usage.usd

    @classmethod
    def over(cls, groups: Iterable[Sequence[Trajectory]]) -> RolloutStats:
        stats = cls()
        for rows in groups:
            stats.add_group(rows)
        return stats

    @property
    def revises(self) -> int:
        return self.outcomes[Outcome.REVISE.value]

    @property
    def off_policy_fraction_intervened(self) -> float:
        """INTERVENTION / (POLICY + INTERVENTION) over intervened trajectories."""
        return _ratio(
            self.intervention_tokens, self.intervened_policy_tokens + self.intervention_tokens
        )

    @property
    def off_policy_fraction_all(self) -> float:
        """INTERVENTION / (POLICY + INTERVENTION) over all trajectories."""
        return _ratio(self.intervention_tokens, self.policy_tokens + self.intervention_tokens)

    @property
    def revises_per_review(self) -> float:
        return _ratio(self.revises, self.reviews)

    @property
    def reward_gap(self) -> float:
        """Mean reward of intervened rows minus that of controls."""
        return _ratio(self.intervened_reward, self.intervened_rows) - _ratio(
            self.control_reward, self.control_rows
        )

    def as_dict(self) -> dict[str, object]:
        """Counts and fractions, JSON-able; a fraction of nothing is None."""

        def known(value: float) -> float | None:
            return None if math.isnan(value) else value

        return {
            "trajectories": self.trajectories,
            "valid": self.valid,
            "tokens": {
                "policy": self.policy_tokens,
                "intervention": self.intervention_tokens,
                "environment": self.environment_tokens,
                "dropped": self.dropped_tokens,
                "judge_prompt": self.judge_prompt_tokens,
                "judge_completion": self.judge_completion_tokens,
            },
            "judge_usd": self.judge_usd,
            "off_policy_fraction_intervened": known(self.off_policy_fraction_intervened),
            "off_policy_fraction_all": known(self.off_policy_fraction_all),
            "reviews": self.reviews,
            "revises": self.revises,
            "revises_per_review": known(self.revises_per_review),
            "reviews_by_outcome": dict(self.outcomes),
            "not_valid_by_cause": dict(self.causes),
            "reviewed_tokens": self.reviewed_tokens,
            "groups": self.groups,
            "all_fail_share": known(_ratio(self.all_fail, self.groups)),
            "all_succeed_share": known(_ratio(self.all_succeed, self.groups)),
            "groups_without_control": self.no_control,
            "control_reward": known(_ratio(self.control_reward, self.control_rows)),
            "intervened_reward": known(_ratio(self.intervened_reward, self.intervened_rows)),
            "reward_gap": known(self.reward_gap),
        }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
