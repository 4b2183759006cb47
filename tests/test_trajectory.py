"""The record of an episode, and counts over many, by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mintrl_env.episode import Ended, Episode, EpisodeConfig
from mintrl_env.errors import UsageError
from mintrl_env.prompts import ByteTokenizer
from mintrl_env.trajectory import RolloutStats, Trajectory
from mintrl_env.types import (
    Chunk,
    Finish,
    Kind,
    Outcome,
    Provenance,
    Review,
    Score,
    StopReason,
    Task,
    Usage,
    Verdict,
    frozen_ids,
)

EOS = ByteTokenizer.EOS


def episode(kind: Kind = Kind.INTERVENED) -> Episode:
    config = EpisodeConfig(max_reviews=1, max_correction=3, step_delimiters=("\n",))
    return Episode(Task("t", "p"), [1, 2], kind=kind, tokenizer=ByteTokenizer(), config=config)


def finished() -> Episode:
    made = episode()
    made.send(Chunk(frozen_ids(list(b"a\nb\n")), np.array([-1, -2, -3, -4]), policy_version=4))
    made.send(Verdict.revise(1, "cd", usage=Usage(10, 2, 0.5)))
    made.send(Chunk(frozen_ids([EOS]), np.array([-5]), Finish.EOS, policy_version=5))
    made.send(Score(1.0, "correct"))
    return made


def test_the_record_of_an_episode() -> None:
    row = Trajectory.of(finished(), update=3, rollout=1, retry=2, run_attempt=4)
    assert (row.task_id, row.update, row.rollout, row.retry, row.run_attempt) == ("t", 3, 1, 2, 4)
    assert row.ids.tolist() == [*b"a\ncd", EOS] and row.prompt_ids.tolist() == [1, 2]
    assert row.provenance.tolist() == [0, 0, 1, 1, 0]
    assert row.policy_versions.tolist() == [4, 4, 4, 4, 5]
    np.testing.assert_array_equal(row.logprobs, np.float32([-1, -2, np.nan, np.nan, -5]))
    assert (row.reward, row.valid, row.stop_reason, row.cause) == (1.0, True, StopReason.EOS, "")
    assert (row.draws, row.dropped_tokens) == (5, 2)
    assert [row.count(author) for author in Provenance] == [3, 2, 0]
    with pytest.raises(UsageError, match="not finished: it needs NeedChunk"):
        Trajectory.of(episode(), update=0, rollout=0)


def test_rows_that_ended_badly() -> None:
    for reason in (StopReason.DEADLINE, StopReason.ERROR):
        made = episode(Kind.CONTROL)
        made.send(Chunk(frozen_ids([65])))
        made.send(Ended(reason, "engine: gone"))
        row = Trajectory.of(made, update=0, rollout=0)
        assert (row.valid, row.cause, row.stop_reason) == (False, "engine: gone", reason)
        assert not row.with_score(Score(1.0, "correct")).valid  # no score makes it valid
    made = episode(Kind.CONTROL)
    made.send(Chunk(frozen_ids([EOS]), finish=Finish.EOS))
    made.send(Score.undecided("bad_gold", "no gold"))
    row = Trajectory.of(made, update=0, rollout=0)
    assert (row.valid, row.cause) == (False, "bad_gold")
    now = row.with_score(Score(0.0, "wrong"))
    assert (now.valid, now.cause, now.reward) == (True, "", 0.0)
    assert now.with_score(Score.undecided("unavailable")).cause == "unavailable"


def test_the_placeholder_of_a_failed_row() -> None:
    row = Trajectory.failed(
        task_id="t",
        prompt_ids=[1],
        kind=Kind.CONTROL,
        update=2,
        rollout=3,
        eos_id=EOS,
        cause="gone",
    )
    assert (row.ids.tolist(), row.provenance.tolist()) == ([EOS], [Provenance.ENVIRONMENT])
    assert (row.valid, row.cause, row.stop_reason) == (False, "gone", StopReason.ERROR)
    assert math.isnan(row.reward) and np.isnan(row.logprobs).all()


def test_lengths_must_agree() -> None:
    row = Trajectory.of(finished(), update=0, rollout=0)
    for name in ("ids", "provenance", "logprobs", "policy_versions"):
        with pytest.raises(UsageError, match=r"'t'/0: .*one length >= 1, not"):
            replace(row, **{name: getattr(row, name)[:-1]})
    nothing = {n: getattr(row, n)[:0] for n in ("ids", "provenance", "logprobs", "policy_versions")}
    with pytest.raises(UsageError, match=r"not \[0\]"):
        replace(row, **nothing)


def test_equality_is_by_value() -> None:
    one, other = (Trajectory.of(finished(), update=0, rollout=0) for _ in range(2))
    assert one == other  # NaN log-probs included
    assert one != replace(other, draws=9) and one != replace(other, ids=other.ids[::-1])
    assert one != "a row"


# --- counts


def row(
    kind: Kind, reward: float | None, provenance: list[int], *, cause: str = "", **changes: Any
) -> Trajectory:
    length = len(provenance)
    score = Score.undecided("unavailable") if reward is None else Score(reward, "s")
    return replace(
        Trajectory.failed(
            task_id="t",
            prompt_ids=[1],
            kind=kind,
            update=0,
            rollout=0,
            eos_id=EOS,
            cause=cause,
        ),
        ids=frozen_ids([65] * length),
        provenance=np.array(provenance, dtype=np.int8),
        logprobs=np.zeros(length, np.float32),
        policy_versions=frozen_ids([0] * length),
        score=score,
        valid=reward is not None,
        **changes,
    )


REVIEWS = (
    Review(0, 0, 4, Outcome.REVISE, dropped_ids=frozen_ids([1, 2, 3]), usage=Usage(10, 2, 0.5)),
    Review(1, 0, 5, Outcome.KEEP, usage=Usage(20, 1, 0.25)),
)
GROUP = [
    row(Kind.CONTROL, 0.0, [0, 0, 0]),
    row(Kind.CONTROL, 1.0, [0, 0, 2]),
    row(Kind.INTERVENED, 1.0, [0, 0, 0, 1, 1], reviews=REVIEWS),
    row(Kind.INTERVENED, None, [0, 1], cause="gone"),
]


def test_counts_by_hand() -> None:
    stats = RolloutStats.over([GROUP])
    found = stats.as_dict()
    assert found == {
        "trajectories": 4,
        "valid": 3,
        "tokens": {
            "policy": 9,
            "intervention": 3,
            "environment": 1,
            "dropped": 3,
            "judge_prompt": 30,
            "judge_completion": 3,
        },
        "judge_usd": 0.75,
        "off_policy_fraction_intervened": 3 / 7,
        "off_policy_fraction_all": 3 / 12,
        "reviews": 2,
        "revises": 1,
        "revises_per_review": 0.5,
        "reviews_by_outcome": {"keep": 1, "revise": 1, "guarded": 0, "failed": 0, "unparsed": 0},
        "not_valid_by_cause": {"gone": 1},
        "reviewed_tokens": 9,
        "groups": 1,
        "all_fail_share": 0.0,
        "all_succeed_share": 0.0,
        "groups_without_control": 0,
        "control_reward": 0.5,
        "intervened_reward": 1.0,
        "reward_gap": 0.5,
    }
    json.dumps(found, allow_nan=False)


def test_groups_are_told_apart() -> None:
    control, intervened = Kind.CONTROL, Kind.INTERVENED
    stats = RolloutStats.over(
        [
            [row(control, 0.0, [0]), row(intervened, 0.0, [0])],
            [row(control, 1.0, [0]), row(intervened, 1.0, [0])],
            [row(control, 1.0, [0]), row(intervened, None, [0])],  # the undecided doesn't count
            [row(control, None, [0]), row(intervened, 0.0, [0])],
            [row(control, None, [0]), row(intervened, None, [0])],
            [row(control, 0.0, [0]), row(intervened, 1.0, [0])],
        ]
    )
    assert (stats.groups, stats.all_fail, stats.all_succeed, stats.no_control) == (6, 2, 2, 2)
    assert stats.causes == {"unknown": 4}


def test_fractions_of_nothing_are_none() -> None:
    found = RolloutStats().as_dict()
    for name in (
        "off_policy_fraction_intervened",
        "off_policy_fraction_all",
        "revises_per_review",
        "control_reward",
        "intervened_reward",
        "reward_gap",
        "all_fail_share",
    ):
        assert found[name] is None
    only_controls = RolloutStats.over([[row(Kind.CONTROL, 1.0, [0])]]).as_dict()
    assert only_controls["reward_gap"] is None and only_controls["off_policy_fraction_all"] == 0.0
    json.dumps(found, allow_nan=False)
