"""A trajectory as the pieces that a reader sees: who wrote what, what was cut, and when.

Pure. Text is decoded author by author, never token by token, so a character that is split over
tokens comes out whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from mintrl_env.errors import UsageError
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import IdsLike, Outcome, Provenance, Review

Decode = Callable[[list[int]], str]
_CONTEXT_TOKENS = 8


class Author(StrEnum):
    POLICY = "policy"
    JUDGE = "judge"
    ENVIRONMENT = "environment"
    DROPPED = "dropped"


_AUTHORS = {
    Provenance.POLICY: Author.POLICY,
    Provenance.INTERVENTION: Author.JUDGE,
    Provenance.ENVIRONMENT: Author.ENVIRONMENT,
}


@dataclass(frozen=True, slots=True)
class Text:
    """Text by one author; `special` where it is a special token, such as EOS."""

    author: Author
    text: str
    special: bool = False


@dataclass(frozen=True, slots=True)
class Gap:
    """Tokens that are not shown, since there are too many."""

    author: Author
    tokens: int


@dataclass(frozen=True, slots=True)
class Mark:
    """The place of a review: after a kept chunk, or before the dropped text and the correction."""

    review: int  # index into the trajectory's reviews


Piece = Text | Gap | Mark


@dataclass(frozen=True, slots=True)
class _Run:
    author: Author
    start: int
    stop: int
    special: bool = False
    gap: bool = False


def pieces_of(
    row: Trajectory,
    decode: Decode,
    *,
    special_ids: Collection[int] = (),
    max_tokens: int = 2400,
) -> list[Piece]:
    """The response in reading order, dropped text where it was cut.

    Args:
        decode: text of ids, special tokens written out.
        special_ids: tokens to set apart from the text around them.
        max_tokens: the most tokens shown of one run by one author (two thirds from its start, one
            from its end). Past four times as many in all, only ends of runs are shown.
    """
    budget = _Budget(max_tokens)
    reader = _Reader(row.ids, decode)
    marks = sorted(
        ((_place(review, len(row.ids)), index) for index, review in enumerate(row.reviews)),
    )
    runs = _cut_down(_runs(row, frozenset(special_ids)), budget)
    pieces: list[Piece] = []

    def mark(index: int) -> None:
        pieces.append(Mark(index))
        pieces.extend(_dropped(row, row.reviews[index], decode, frozenset(special_ids), budget))

    for run in runs:
        while marks and marks[0][0] <= run.start:
            mark(marks.pop(0)[1])
        if run.gap:
            pieces.append(Gap(run.author, run.stop - run.start))
            continue
        text = reader.text(run.start, run.stop)
        done = 0
        while marks and marks[0][0] < run.stop:
            place, index = marks.pop(0)
            # The characters of the text that are complete at this token.
            at = max(done, _common(text, reader.text(run.start, place)))
            if at > done:
                pieces.append(Text(run.author, text[done:at], run.special))
            mark(index)
            done = at
        if text[done:]:
            pieces.append(Text(run.author, text[done:], run.special))
    for _, index in marks:
        mark(index)
    return pieces


def prompt_pieces(
    ids: IdsLike, decode: Decode, *, special_ids: Collection[int] = (), max_tokens: int = 2400
) -> list[Piece]:
    """A prompt, special tokens set apart. Its author is ENVIRONMENT."""
    array = np.asarray(ids)
    reader = _Reader(array, decode)
    runs = _split_special([_Run(Author.ENVIRONMENT, 0, len(array))], array, frozenset(special_ids))
    return list(_shown(_cut_down(runs, _Budget(max_tokens)), reader))


def _place(review: Review, length: int) -> int:
    """Which response token the mark stands before; clamped, a stored row may be anything."""
    revised = review.outcome is Outcome.REVISE
    place = review.cut if revised else review.position + review.chunk_tokens
    return min(max(place, 0), length)


def _runs(row: Trajectory, special: frozenset[int]) -> list[_Run]:
    provenance = row.provenance
    edges = {int(edge) + 1 for edge in np.flatnonzero(np.diff(provenance))}
    # Two corrections in a row are two, with the second one's dropped text between them.
    edges.update(r.cut for r in row.reviews if r.outcome is Outcome.REVISE and r.correction_tokens)
    places = sorted({0, len(provenance)} | {e for e in edges if 0 < e < len(provenance)})
    runs = [
        _Run(_AUTHORS[Provenance(int(provenance[start]))], start, stop)
        for start, stop in itertools.pairwise(places)
    ]
    return _split_special(runs, row.ids, special)


def _split_special(runs: list[_Run], ids: np.ndarray, special: frozenset[int]) -> list[_Run]:
    if not special:
        return runs
    out: list[_Run] = []
    for run in runs:
        start = run.start
        hits = np.flatnonzero(np.isin(ids[run.start : run.stop], list(special))) + run.start
        for hit in hits.tolist():
            if hit > start:
                out.append(_Run(run.author, start, hit))
            out.append(_Run(run.author, hit, hit + 1, special=True))
            start = hit + 1
        if start < run.stop:
            out.append(_Run(run.author, start, run.stop))
    return out


class _Budget:
    """How many tokens of a run are shown; less and less where there are very many runs."""

    def __init__(self, max_tokens: int) -> None:
        self.per_run, self.left, self.runs_left = max_tokens, 4 * max_tokens, 400

    def take(self, length: int) -> tuple[int, int]:
        """Tokens to show of a run's start and of its end."""
        self.runs_left -= 1
        if self.runs_left < 0:
            return 0, 0
        allowed = max(min(self.per_run, self.left), 12)
        if length <= allowed:
            self.left -= length
            return length, 0
        self.left -= allowed
        return allowed - allowed // 3, allowed // 3


def _cut_down(runs: list[_Run], budget: _Budget) -> list[_Run]:
    out: list[_Run] = []
    for run in runs:
        head, tail = budget.take(run.stop - run.start)
        middle = run.stop - tail
        if head:
            out.append(_Run(run.author, run.start, run.start + head, run.special))
        if middle > run.start + head:
            start = run.start + head
            if out and out[-1].gap:
                start = out.pop().start
            out.append(_Run(run.author, start, middle, gap=True))
        if tail:
            out.append(_Run(run.author, middle, run.stop, run.special))
    return out


class _Reader:
    """Decodes stretches of one token sequence, each in the context of the tokens before it."""

    def __init__(self, ids: np.ndarray, decode: Decode) -> None:
        self._ids, self._decode = ids.tolist(), decode

    def text(self, start: int, stop: int) -> str:
        if stop <= start:
            return ""
        # Some tokenizers write a text's first space only if something stands before it.
        context = self._ids[max(0, start - _CONTEXT_TOKENS) : start]
        if context:
            before = self._call(context)
            both = self._call(context + self._ids[start:stop])
            if both.startswith(before):
                return both[len(before) :]
        return self._call(self._ids[start:stop])

    def _call(self, ids: list[int]) -> str:
        try:
            return self._decode(ids)
        except Exception as error:
            raise UsageError(
                f"decode failed on ids {ids[:4]} ... ({type(error).__name__}: {error}): is this "
                "the tokenizer that the run was made with?"
            ) from error


def _dropped(
    row: Trajectory, review: Review, decode: Decode, special: frozenset[int], budget: _Budget
) -> Iterator[Piece]:
    if not len(review.dropped_ids):
        return
    kept = row.ids[: _place(review, len(row.ids))][-_CONTEXT_TOKENS:]
    ids = np.concatenate([kept, review.dropped_ids])
    runs = [_Run(Author.DROPPED, len(kept), len(ids))]
    runs = _cut_down(_split_special(runs, ids, special), budget)
    yield from _shown(runs, _Reader(ids, decode))


def _shown(runs: list[_Run], reader: _Reader) -> Iterator[Piece]:
    for run in runs:
        if run.gap:
            yield Gap(run.author, run.stop - run.start)
        elif text := reader.text(run.start, run.stop):
            yield Text(run.author, text, run.special)


def _common(text: str, prefix: str) -> int:
    if text.startswith(prefix):
        return len(prefix)
    return next(
        (i for i, (a, b) in enumerate(zip(text, prefix, strict=False)) if a != b),
        min(len(text), len(prefix)),
    )
