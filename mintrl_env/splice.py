"""Where steps begin in a text, and where that is between tokens. Pure functions.

A step boundary is a place in text; a cut is a place between tokens. Where a token straddles the
boundary (`.\\n\\n`, an emoji split over tokens) the cut falls before it, and what the token carried
of the text before the boundary is the *carry*, which a correction restores.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from mintrl_env.protocols import Tokenizer
from mintrl_env.types import IdsLike, Step

FENCE = "```"
REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are no character, such as the first half of one."""

# More characters than a token of any known vocabulary has (the longest are runs of 128 blanks).
CHARACTERS_PER_TOKEN = 256

_CONTEXT_TOKENS = 8
_WINDOW = 12
_FENCE_LINE = re.compile(r"^```+[^\n`]*(?:\n|\Z)", re.MULTILINE)


def token_ends(
    tokenizer: Tokenizer, ids: IdsLike, before: IdsLike = ()
) -> tuple[str, npt.NDArray[np.int64]]:
    """The text of `ids` and where each token's text ends in it.

    Args:
        ids: the tokens, shape (n,).
        before: the tokens in front of them; the last few decide how the first is written.

    Returns:
        The text, which is what `ids` add to the text of `before` (a character that `ids` complete
        belongs to it as a whole), and int64 ends of shape (n + 1,): `ends[i]` characters are what
        the first i tokens write, or -1 where that is not the beginning of the text, because the
        place lies inside a character. `ends[0] == 0`, `ends[n] == len(text)`.
    """
    context = _context(tokenizer, before, ids)
    tokens = context + [int(i) for i in ids]
    whole = tokenizer.decode(tokens)
    base = len(settled_text(tokenizer, context, whole))
    alone = [tokenizer.decode([token]) for token in tokens]
    # The usual case: every token writes here what it writes alone.
    if REPLACEMENT not in whole and "".join(alone) == whole:
        lengths = np.cumsum([0, *map(len, alone[len(context) :])])
        if len(whole) - base == lengths[-1]:
            return whole[base:], lengths
    # Where no U+FFFD is written, what a token writes depends on its near neighbours alone; with
    # invalid bytes only the decoder knows, and every place is decoded from the start.
    local = REPLACEMENT not in whole[:-1]
    ends = np.full(len(tokens) - len(context) + 1, -1, dtype=np.int64)
    scene, shown, written = 0, 0, ""  # decode(tokens[scene:]) repeats `written`, up to `shown`
    for place in range(len(ends)):
        stop = len(context) + place
        window = tokenizer.decode(tokens[scene:stop])
        if not window.startswith(written) or not whole.startswith(window[len(written) :], shown):
            continue
        ends[place] = shown + len(window) - len(written)
        if local and stop - scene >= _WINDOW:
            clean = [p for p in range(max(0, place - 2 * _WINDOW), place - 2) if ends[p] >= 0]
            if clean:
                scene, shown = len(context) + clean[-1], int(ends[place])
                written = tokenizer.decode(tokens[scene:stop])
    ends[ends >= 0] -= base
    ends[0], ends[-1] = 0, len(whole) - base
    return whole[base:], np.maximum(ends, -1)


def _context(tokenizer: Tokenizer, before: IdsLike, ids: IdsLike = ()) -> list[int]:
    """The last few tokens of `before`, cut where a character begins if they have to be cut."""
    context = [int(i) for i in before[-_CONTEXT_TOKENS:]]
    if len(before) > len(context):
        # Some decoders write a run of bytes as U+FFFD throughout when its beginning is missing.
        for start in range(4):
            if not tokenizer.decode([*context[start:], *map(int, ids)]).startswith(REPLACEMENT):
                return context[start:]
    return context


def settled_text(tokenizer: Tokenizer, before: IdsLike, whole: str) -> str:
    """The text of `before`, less a last character that only the tokens behind it complete.

    Args:
        before: the tokens in front.
        whole: the text of `before` and of all that follows it.
    """
    for place in range(len(before), max(-1, len(before) - _CONTEXT_TOKENS - 1), -1):
        text = tokenizer.decode(before[:place])
        if whole.startswith(text):
            return text
    pairs = zip(tokenizer.decode(before), whole, strict=False)
    return "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def place_of(ends: npt.NDArray[np.int64], boundary: int) -> int:
    """The most whole tokens whose text ends at or before `boundary` characters."""
    return int(np.flatnonzero((ends >= 0) & (ends <= boundary))[-1])


def step_starts(text: str, delimiters: Sequence[str], before: str = "") -> list[int]:
    """Where the steps of `text` begin, ascending, 0 first; always at least one.

    A delimiter, and a run of it, belongs to the step before it. The delimiter "```" stands for code
    fences: a block begins a step with its opening fence line and ends it with its closing one, and
    nothing inside it is a boundary of its own except other delimiters.

    Args:
        text: the pending chunk.
        delimiters: literal strings, of which "```" is special.
        before: the accepted text, which tells whether a fence opens or closes.
    """
    places: set[int] = set()
    for delimiter in delimiters:
        if delimiter == FENCE:
            places.update(_fence_places(text, before))
        else:
            run = f"(?:{re.escape(delimiter)})+"
            if delimiter.strip("\n") == "":
                run += "\n*"  # "\n\n\n" is one boundary, not one and a half
            places.update(match.end() for match in re.finditer(run, text))
    starts = [0]
    for place in sorted(places):
        if not text[place:].strip():
            break
        # White space alone is no step: it goes to the step before, or stays at the chunk's start.
        if text[starts[-1] : place].strip():
            starts.append(place)
        elif starts[-1] > 0:
            starts[-1] = place
    return starts


def _fence_places(text: str, before: str) -> list[int]:
    # The line that the chunk begins in may have begun in `before`, and be a fence only as a whole.
    offset = len(before) - (before.rfind("\n") + 1)
    whole = before[len(before) - offset :] + text
    is_open = len(_FENCE_LINE.findall(before[: len(before) - offset])) % 2 == 1
    places = []
    for match in _FENCE_LINE.finditer(whole):
        places.append((match.end() if is_open else match.start()) - offset)
        is_open = not is_open
    return [place for place in places if place > 0]


def split_steps(
    tokenizer: Tokenizer,
    ids: IdsLike,
    delimiters: Sequence[str],
    *,
    before_ids: IdsLike = (),
    before_text: str = "",
) -> tuple[Step, ...]:
    """The steps of a pending chunk; their texts joined are its text. A final EOS has no text."""
    body = list(ids)
    while body and int(body[-1]) in tokenizer.eos_ids:
        body.pop()
    text, ends = token_ends(tokenizer, body, before_ids)
    starts = step_starts(text, delimiters, before_text)
    steps = []
    for start, stop in zip(starts, [*starts[1:], len(text)], strict=True):
        cut = place_of(ends, start)
        steps.append(Step(text[start:stop], cut, text[int(ends[cut]) : start]))
    return tuple(steps)


def correction_ids(
    tokenizer: Tokenizer,
    correction: str | Sequence[int],
    *,
    carry: str,
    limit: int,
    before: IdsLike = (),
) -> list[int]:
    """The tokens that replace a cut suffix: the carry, then the correction, at most `limit`.

    A text is encoded once, together with the carry, such that it reads the same behind `before`,
    the kept tokens. An over-long correction is cut after the last whole character that fits (L is a
    generation limit, not a fault). An empty correction is a bare cut and restores nothing.
    """
    correction = clip_correction(correction, limit)
    if not len(correction):
        return []
    if isinstance(correction, str):
        ids = encode_behind(tokenizer, before, carry + correction)
    else:
        ids = [*encode_behind(tokenizer, before, carry), *map(int, correction)]
    if len(ids) <= limit:
        return ids
    _, ends = token_ends(tokenizer, ids, before)
    return ids[: int(np.flatnonzero(ends[: limit + 1] >= 0)[-1])]


def clip_correction(correction: str | Sequence[int], limit: int) -> str | Sequence[int]:
    """The part of a correction that `limit` tokens could hold, and a little more.

    A judge may answer megabytes: what can't be spliced in is not worth encoding or looking at.
    """
    room = limit + 8  # a character split over tokens, or the carry, may reach over the limit
    return correction[: room * CHARACTERS_PER_TOKEN if isinstance(correction, str) else room]


def encode_behind(tokenizer: Tokenizer, before: IdsLike, text: str) -> list[int]:
    """Ids that read as exactly `text` behind `before`, as far as the tokenizer can.

    Some tokenizers (SentencePiece's way) put a space in front of whatever they encode. Then the
    text is encoded behind something else, of which nothing is kept.
    """
    if not text:
        return []
    context = _context(tokenizer, before)
    wanted = tokenizer.decode(context) + text
    plain = list(tokenizer.encode(text))
    if tokenizer.decode([*context, *plain]) == wanted:
        return plain
    for lead in ("\n", ".", "a"):
        head, ids = tokenizer.encode(lead), tokenizer.encode(lead + text)
        rest = list(ids[len(head) :])
        if ids[: len(head)] == head and tokenizer.decode([*context, *rest]) == wanted:
            return rest
    return plain
