"""Was the judge right? Its stored reviews against a task whose steps can be checked exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from mintrl_env.protocols import Tokenizer
from mintrl_env.splice import REPLACEMENT, settled_text, split_steps
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Outcome, Review, Step

FirstWrong = Callable[[str, str, tuple[str, ...]], int | None]
"""(task id, accepted text, steps) -> 0-based index of the first wrong step, or None."""


@dataclass
class JudgeAudit:
    """Counts over reviews. Failed reviews are left out: there was no verdict.

    Attributes:
        right, wrong: reviews of chunks without and with a wrong step.
        false_revises: Revises of a right chunk.
        misses: Keeps (guarded ones included) of a wrong chunk.
        mislocated: Revises of a wrong chunk at another step than its first wrong one.
    """

    right: int = 0
    wrong: int = 0
    false_revises: int = 0
    misses: int = 0
    mislocated: int = 0

    def as_dict(self) -> dict[str, int | float | None]:
        """The counts, and rates: false Revises of right chunks, misses and mislocations of wrong
        ones (None of nothing)."""
        found = self.wrong - self.misses
        return {
            "right_chunks": self.right,
            "wrong_chunks": self.wrong,
            "false_revises": self.false_revises,
            "misses": self.misses,
            "mislocated": self.mislocated,
            "false_revise_rate": self.false_revises / self.right if self.right else None,
            "miss_rate": self.misses / self.wrong if self.wrong else None,
            "mislocation_rate": self.mislocated / found if found else None,
        }


def audit(
    rows: Iterable[Trajectory],
    tokenizer: Tokenizer,
    delimiters: tuple[str, ...],
    first_wrong: FirstWrong,
) -> JudgeAudit:
    """Compare every review of the rows with the truth, on what the judge was shown."""
    counts = JudgeAudit()
    for row in rows:
        for review in row.reviews:
            if review.outcome in (Outcome.FAILED, Outcome.UNPARSED):
                continue
            text, steps = reviewed_steps(row, review, tokenizer, delimiters)
            truth = first_wrong(row.task_id, text, tuple(step.text for step in steps))
            revised = review.outcome is Outcome.REVISE
            if truth is None:
                counts.right += 1
                counts.false_revises += revised
            else:
                counts.wrong += 1
                counts.misses += not revised
                counts.mislocated += revised and review.step != truth
    return counts


def reviewed_steps(
    row: Trajectory, review: Review, tokenizer: Tokenizer, delimiters: tuple[str, ...]
) -> tuple[str, tuple[Step, ...]]:
    """The accepted text before a review and the steps of its chunk, as the judge was shown them."""
    before, chunk = reviewed_chunk(row, review)
    text = tokenizer.decode(before)
    if text.endswith(REPLACEMENT):  # a character that the chunk completes is the chunk's
        whole = tokenizer.decode(np.concatenate([before, chunk]))
        text = settled_text(tokenizer, before, whole)
    return text, split_steps(tokenizer, chunk, delimiters, before_ids=before, before_text=text)


def reviewed_chunk(row: Trajectory, review: Review) -> tuple[np.ndarray, np.ndarray]:
    """The accepted ids before a review and the chunk that was reviewed, from the record.

    Returns:
        int32 (review.position,) and (review.chunk_tokens,).
    """
    before = row.ids[: review.position]
    if review.outcome is Outcome.REVISE:
        chunk = np.concatenate([row.ids[review.position : review.cut], review.dropped_ids])
    else:
        chunk = row.ids[review.position : review.position + review.chunk_tokens]
    return before, chunk
