"""Every outcome of a review against a truth that is known, counted by hand."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from mintrl_env.episode import Episode, EpisodeConfig, Finished, NeedChunk, NeedReview
from mintrl_env.judge_audit import JudgeAudit, audit, reviewed_chunk
from mintrl_env.prompts import ByteTokenizer
from mintrl_env.protocols import Tokenizer
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import (
    Chunk,
    FailedReview,
    Finish,
    Kind,
    Outcome,
    ReviewRequest,
    Score,
    Task,
    Verdict,
    frozen_ids,
)

BYTES = ByteTokenizer()
EOS = BYTES.EOS


def run(
    *turns: tuple[Any, Any], tokenizer: Tokenizer = BYTES, task_id: str = "t"
) -> tuple[Trajectory, list[ReviewRequest]]:
    """A finished episode of (chunk as text or ids, review) turns, and what the judge was shown."""
    episode = Episode(
        Task(task_id, "p"),
        [1],
        kind=Kind.INTERVENED,
        tokenizer=tokenizer,
        config=EpisodeConfig(
            chunk_tokens=64, max_reviews=len(turns), max_response=999, step_delimiters=("\n",)
        ),
    )
    shown = []
    for chunk, review in turns:
        ids = tokenizer.encode(chunk) if isinstance(chunk, str) else chunk
        finish = Finish.EOS if ids[-1] in tokenizer.eos_ids else Finish.LENGTH
        episode.send(Chunk(frozen_ids(ids), finish=finish))
        need = episode.need
        assert isinstance(need, NeedReview)
        shown.append(need.request)
        episode.send(review)
    if isinstance(episode.need, NeedChunk):
        episode.send(Chunk(frozen_ids([min(tokenizer.eos_ids)]), finish=Finish.EOS))
    episode.send(Score(1.0, "correct"))
    assert isinstance(episode.need, Finished)
    return Trajectory.of(episode, update=0, rollout=0), shown


def wrong_x(task_id: str, before: str, steps: tuple[str, ...]) -> int | None:
    """The truth of these tests: a step with an x is wrong."""
    return next((index for index, step in enumerate(steps) if "x" in step), None)


def counts(*turns: tuple[Any, Any]) -> JudgeAudit:
    row, _ = run(*turns)
    return audit([row], BYTES, ("\n",), wrong_x)


KEEP, GUARDED = Verdict.keep(), Verdict.revise(0, "c").kept_by("leak", "why")


@pytest.mark.parametrize(
    ("chunk", "review", "wanted"),
    [
        ("a\nb\n", KEEP, JudgeAudit(right=1)),
        ("a\nb\n", GUARDED, JudgeAudit(right=1)),
        ("a\nb\n", Verdict.revise(1, "c\n"), JudgeAudit(right=1, false_revises=1)),
        ("a\nb\n", Verdict.revise(0), JudgeAudit(right=1, false_revises=1)),
        ("a\nx\n", KEEP, JudgeAudit(wrong=1, misses=1)),
        ("a\nx\n", GUARDED, JudgeAudit(wrong=1, misses=1)),
        ("a\nx\nb\nx\n", Verdict.revise(1, "c\n"), JudgeAudit(wrong=1)),
        ("a\nx\nb\nx\n", Verdict.revise(0, "c\n"), JudgeAudit(wrong=1, mislocated=1)),
        ("a\nx\nb\nx\n", Verdict.revise(3), JudgeAudit(wrong=1, mislocated=1)),
        ("a\nx\n", FailedReview("timeout"), JudgeAudit()),
        ("a\nx\n", FailedReview("unparsed"), JudgeAudit()),
        ("a\nx\n", FailedReview("bad_step"), JudgeAudit()),
    ],
)
def test_every_outcome(chunk: str, review: Any, wanted: JudgeAudit) -> None:
    assert counts((chunk, review)) == wanted


def test_counts_add_up_over_reviews_and_rows() -> None:
    turns = [
        ("a\nx\n", Verdict.revise(1, "b\n")),  # found
        ("c\n", Verdict.revise(0, "x\n")),  # a false Revise, with a wrong correction
        ("d\n", KEEP),  # what was accepted is not judged again
        ("x\n", KEEP),
    ]
    once = JudgeAudit(right=2, wrong=2, false_revises=1, misses=1)
    assert counts(*turns) == once
    row, _ = run(*turns)
    assert audit([row, row], BYTES, ("\n",), wrong_x) == JudgeAudit(4, 4, 2, 2, 0)
    assert audit([], BYTES, ("\n",), wrong_x) == JudgeAudit()


def test_rates() -> None:
    assert JudgeAudit(4, 5, 1, 1, 2).as_dict() == {
        "right_chunks": 4,
        "wrong_chunks": 5,
        "false_revises": 1,
        "misses": 1,
        "mislocated": 2,
        "false_revise_rate": 0.25,
        "miss_rate": 0.2,
        "mislocation_rate": 0.5,  # of the four that were found
    }
    nothing = JudgeAudit().as_dict()
    assert nothing["false_revise_rate"] is nothing["miss_rate"] is None
    assert JudgeAudit(wrong=2, misses=2).as_dict()["mislocation_rate"] is None


def test_a_dropped_eos_is_part_of_the_chunk() -> None:
    row, (request,) = run(([*BYTES.encode("a\nx"), EOS], Verdict.revise(1, "b\n")))
    before, chunk = reviewed_chunk(row, row.reviews[0])
    assert (before.tolist(), chunk.tolist()) == ([], request.chunk_ids.tolist())
    assert counts(([*BYTES.encode("a\nx"), EOS], Verdict.revise(1, "b\n"))) == JudgeAudit(wrong=1)


@pytest.mark.parametrize("kind", ["byte", "bpe", "sentencepiece", "metaspace", "char"])
def test_the_truth_is_asked_about_what_the_judge_saw(
    made_tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    """Chunks that begin inside a character, a delimiter and a word, and corrections between."""
    tokenizer = made_tokenizers[kind]
    ids = tokenizer.encode("we add é\nand 計算 so\n\nthe answer\nis 42.\n")
    for place in range(1, len(ids)):
        cuts = sorted({0, place, min(place + 2, len(ids)), len(ids) - 1, len(ids)})
        pieces = [ids[a:b] for a, b in pairwise(cuts)]
        reviews = [KEEP, Verdict.revise(0, "b\n"), KEEP, GUARDED, FailedReview("server")]
        row, shown = run(*zip(pieces, reviews, strict=False), tokenizer=tokenizer)
        asked = []

        def truth(task_id: str, before: str, steps: tuple[str, ...], asked: Any = asked) -> None:
            asked.append((task_id, before, steps))

        audit([row], tokenizer, ("\n",), truth)
        judged = [r for r in row.reviews if r.outcome is not Outcome.FAILED]
        assert asked == [
            ("t", shown[r.index].accepted_text, tuple(s.text for s in shown[r.index].steps))
            for r in judged
        ]
        for review in row.reviews:
            before, chunk = reviewed_chunk(row, review)
            assert np.array_equal(before, shown[review.index].accepted_ids)
            assert np.array_equal(chunk, shown[review.index].chunk_ids)
            assert len(chunk) == review.chunk_tokens
