"""The vocabulary: what is refused when it is made, and that nobody can change it afterwards."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from mintrl_env.errors import MintrlError, UsageError
from mintrl_env.types import (
    Chunk,
    Finish,
    Kind,
    NoReview,
    Outcome,
    Provenance,
    Review,
    ReviewRequest,
    Score,
    Step,
    StopReason,
    Task,
    Turn,
    Usage,
    Verdict,
    VerdictKind,
    frozen_ids,
    frozen_logprobs,
)


def test_codes_that_are_stored() -> None:
    assert [int(p) for p in Provenance] == [0, 1, 2]
    assert [p.name for p in Provenance] == ["POLICY", "INTERVENTION", "ENVIRONMENT"]
    assert [str(k) for k in Kind] == ["control", "intervened"]
    assert [str(s) for s in StopReason] == ["eos", "length", "environment", "deadline", "error"]
    assert [str(o) for o in Outcome] == ["keep", "revise", "guarded", "failed", "unparsed"]


# --- arrays


def test_ids_are_an_int32_copy_that_stays_as_it_is() -> None:
    given = np.array([1, 2, 3])
    ids = frozen_ids(given)
    given[0] = 9
    assert ids.dtype == np.int32 and ids.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        ids[0] = 9
    assert frozen_ids(()).dtype == np.int32 and frozen_ids([]).shape == (0,)
    assert frozen_ids(range(3)).tolist() == [0, 1, 2]
    assert frozen_ids(given[::2]).tolist() == [9, 3]
    assert frozen_ids(np.array([5], dtype=np.uint64)).tolist() == [5]


@pytest.mark.parametrize("ids", [[1.5], [2.0], [[1, 2]], 7, [2**31], [-(2**31) - 1], "12", [True]])
def test_what_is_no_row_of_ids(ids: Any) -> None:
    with pytest.raises(UsageError):
        frozen_ids(ids)


def test_logprobs() -> None:
    given = np.array([-1.0, -2.0])
    logprobs = frozen_logprobs(given, 2)
    given[0] = 0
    assert logprobs.dtype == np.float32 and logprobs.tolist() == [-1.0, -2.0]
    with pytest.raises(ValueError, match="read-only"):
        logprobs[0] = 0
    assert np.isnan(frozen_logprobs(None, 2)).tolist() == [True, True]
    assert np.isnan(frozen_logprobs([None, -1.0], 2)).tolist() == [True, False]
    assert frozen_logprobs((), 0).shape == (0,)
    for wrong in ([-1.0], [[-1.0, -2.0]], -1.0):
        with pytest.raises(UsageError, match="2 token ids came with"):
            frozen_logprobs(wrong, 2)


# --- chunks


def test_a_chunk_owns_its_arrays() -> None:
    ids = np.array([1, 2])
    chunk = Chunk(ids, np.array([-0.5, -1.5]), "eos", 3)  # type: ignore[arg-type]
    ids[0] = 9
    assert chunk.ids.tolist() == [1, 2] and chunk.ids.dtype == np.int32
    assert chunk.logprobs is not None and chunk.logprobs.dtype == np.float32
    assert chunk.finish is Finish.EOS and chunk.policy_version == 3
    unknown = Chunk(np.array([1, 2]))
    assert unknown.logprobs is not None and np.isnan(unknown.logprobs).all()
    with pytest.raises(dataclasses.FrozenInstanceError):
        chunk.policy_version = 4  # type: ignore[misc]
    with pytest.raises(UsageError, match="2 token ids came with"):
        Chunk(np.array([1, 2]), np.array([-0.5]))


def test_chunks_are_equal_by_value() -> None:
    assert Chunk(np.array([1, 2])) == Chunk(np.array([1, 2])), "NaN log-probs are the same"
    assert Chunk(np.array([1, 2])) != Chunk(np.array([1, 3]))
    assert Chunk(np.array([1, 2])) != Chunk(np.array([1, 2, 3]))
    assert Chunk(np.array([1])) != Chunk(np.array([1]), np.array([-1.0]))
    assert Chunk(np.array([1])) != Chunk(np.array([1]), policy_version=1)
    assert Chunk(np.array([1])) != [1]
    assert Turn(Chunk(np.array([1, 2]))) == Turn(Chunk(np.array([1, 2])))
    with pytest.raises(TypeError):
        hash(Chunk(np.array([1])))


def test_a_turn_takes_a_review_and_leaves_the_first_one_alone() -> None:
    turn = Turn(Chunk(np.array([1])))
    reviewed = turn.with_verdict(NoReview())
    assert turn.review is None and reviewed.review == NoReview() and reviewed.chunk is turn.chunk


# --- verdicts


def test_verdicts() -> None:
    keep = Verdict.keep("fine", Usage(3, 4))
    assert keep.kind is VerdictKind.KEEP and keep.step is None and keep.correction == ""
    revise = Verdict.revise(np.int64(2), np.array([5, 6]), "wrong sign")  # type: ignore[arg-type]
    assert revise.step == 2 and type(revise.step) is int
    assert revise.correction == (5, 6) and all(type(i) is int for i in revise.correction)
    assert Verdict.revise(0).correction == "" and Verdict.revise(0, []).correction == ()
    assert Verdict.revise(0, None).correction == ""
    assert Verdict("revise", 1, "x") == Verdict.revise(1, "x")  # type: ignore[arg-type]
    assert Verdict("keep") == Verdict.keep()  # type: ignore[arg-type]
    assert Verdict(VerdictKind.REVISE, 0, None).correction == ""  # type: ignore[arg-type]
    assert hash(revise) == hash(Verdict.revise(2, [5, 6], "wrong sign"))


def test_a_guards_keep_is_known_and_costs_what_the_review_cost() -> None:
    kept = Verdict.revise(1, "x", usage=Usage(3, 4)).kept_by("leak", "it gives the answer")
    assert kept == Verdict(
        VerdictKind.KEEP, reason="it gives the answer", usage=Usage(3, 4), guard="leak"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Verdict.revise(-1),
        lambda: Verdict.revise(None),  # type: ignore[arg-type]
        lambda: Verdict.revise(True),
        lambda: Verdict.revise(1.0),  # type: ignore[arg-type]
        lambda: Verdict.revise("1"),  # type: ignore[arg-type]
        lambda: Verdict(VerdictKind.REVISE),
        lambda: Verdict(VerdictKind.KEEP, 0),
        lambda: Verdict(VerdictKind.KEEP, correction="x"),
        lambda: Verdict(VerdictKind.KEEP, correction=(5,)),
        lambda: Verdict.revise(0, [1.5]),  # type: ignore[list-item]
        lambda: Verdict.revise(0, 7),  # type: ignore[arg-type]
        lambda: Verdict("maybe"),  # type: ignore[arg-type]
    ],
)
def test_verdicts_that_are_none(wrong: Any) -> None:
    with pytest.raises(ValueError):
        wrong()


def test_usage_adds_up() -> None:
    total = Usage(1, 2, 0.5, 0.25) + Usage(10, 20, 0.25, 1.0, calls=2)
    assert total == Usage(11, 22, 0.75, 1.25, calls=3)


# --- requests, reviews, scores, tasks


def _request(**changes: Any) -> ReviewRequest:
    values: dict[str, Any] = {
        "task": Task("t", "p"),
        "prompt_ids": frozen_ids([1]),
        "accepted_ids": frozen_ids([97, 98]),
        "accepted_text": "ab",
        "chunk_ids": frozen_ids([99, 100, 101]),
        "steps": (Step("c", 0), Step("d", 1), Step("e", 2)),
        "review": 0,
        "reviews_left": 3,
        "max_correction": 64,
        "finish": Finish.LENGTH,
    }
    return ReviewRequest(**values | changes)


def test_what_is_kept_before_a_step() -> None:
    request = _request()
    assert request.chunk_text == "cde"
    assert [request.kept_text(step) for step in range(3)] == ["ab", "abc", "abcd"]
    assert [request.kept_ids(step).tolist() for step in range(3)] == [
        [97, 98],
        [97, 98, 99],
        [97, 98, 99, 100],
    ]
    assert request.kept_ids(1).dtype == np.int32


def test_requests_and_reviews_are_equal_by_value() -> None:
    assert _request() == _request()
    assert _request() != _request(chunk_ids=frozen_ids([99, 100, 102]))
    assert _request() != _request(review=1)
    a, b = (Review(0, 0, 2, Outcome.REVISE, dropped_ids=frozen_ids([1, 2])) for _ in range(2))
    assert a == b and a != Review(0, 0, 2, Outcome.REVISE, dropped_ids=frozen_ids([1, 3]))


def test_undecided_is_not_zero() -> None:
    assert Score(0.0, "wrong").decided and Score(-1.5, "wrong").decided
    assert not Score.undecided("unavailable", "no worker").decided
    assert math.isnan(Score.undecided("unavailable").reward)
    for infinite in (math.inf, -math.inf):
        with pytest.raises(UsageError, match="finite"):
            Score(infinite, "correct")


def test_a_tasks_text() -> None:
    assert Task("t", "What is 1 + 1?").prompt_text == "What is 1 + 1?"
    messages = (
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "1 + 1?"},
    )
    assert Task("t", messages).prompt_text == "Be brief.\n\n1 + 1?"


def test_refusals_are_mintrl_errors_and_value_errors() -> None:
    assert issubclass(UsageError, MintrlError) and issubclass(UsageError, ValueError)


@pytest.mark.parametrize("reward", ["1.0", b"1", None, [1.0], 1j])
def test_a_reward_is_a_number(reward: object) -> None:
    with pytest.raises(UsageError, match="a reward is a number, not"):
        Score(reward, "correct")  # type: ignore[arg-type]


def test_a_numpy_reward_is_a_float() -> None:
    assert type(Score(np.float32(0.5), "correct").reward) is float  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {"usd": math.nan},
        {"usd": -0.1},
        {"seconds": "three"},
        {"seconds": None},
        {"prompt_tokens": 3.5},
        {"prompt_tokens": "3"},
        {"completion_tokens": -1},
        {"calls": 2**63},
    ],
)
def test_a_usage_is_counts_and_finite_numbers(fields: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(fields))):
        Usage(**fields)  # type: ignore[arg-type]


def test_numpy_counts_are_plain_numbers() -> None:
    usage = Usage(np.int64(3), np.int32(4), np.float32(0.5))  # type: ignore[arg-type]
    assert usage == Usage(3, 4, 0.5) and type(usage.prompt_tokens) is int
    assert type(usage.usd) is float


@pytest.mark.parametrize("fields", [{"reason": b"x"}, {"usage": None}, {"guard": 3}])
def test_a_verdicts_other_fields_have_their_types(fields: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=f"a verdict's {next(iter(fields))} is"):
        Verdict(VerdictKind.KEEP, **fields)  # type: ignore[arg-type]
