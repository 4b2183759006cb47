"""Does a text give an answer away? Pure functions on text, for `LeakGuard`.

What counts is the answer *on its own*: 18 is not in 180, 1.18, x18, 2^18 or 18th, but it is in
18.0, in $18, in 18 cm and in eighteen. Both sides are first written one way (LaTeX fractions, spacing,
thousands separators, signs, look-alikes of ASCII, characters that nobody sees). A single letter, or a
word that stands in any sentence ("no", "even", "two"), counts only where the text states it as an
answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from itertools import pairwise, takewhile
from typing import Literal

from mintrl_env.leaks_text import plain, spelled

Held = Literal["", "holds", "states"]

# Digits by the ten thousand are what a policy that repeats itself writes: nothing is gone over twice.
_NUMBER = re.compile(
    r"(?:(?<!\d,)\d{1,3}(?:,\d{3})++(?![,\d])|\d++)(?:\.\d++)?|(?<![A-Za-z])\.\d++"
)
_SPACED = re.compile(r"(?<!\d)(?<!\d[ \u00a0])\d{1,3}(?:[ \u00a0]\d{3})++(?![ ,]?\d)(?:\.\d++)?")
_FRACTION = re.compile(r"(?<!\d)(\d++)\s*+/\s*+(\d++)")
# A coefficient, an ordinal, a factor of a LaTeX command: not a value on its own. Some letters are
# units more often than variables.
_GOES_ON = re.compile(
    r"(?:st|nd|rd|th|[a-zA-Z](?<![mghsL]))(?![A-Za-z])|_|\s?\\(?:pi|sqrt|[a-z]{2,5}a)\b"
)
_STATED = re.compile(r"(?:\banswers?\b|\\boxed|#{3,})[^\n.!?]{0,60}$", re.IGNORECASE)
_CHOSEN = re.compile(r"\b(?:options?|choices?|choose|pick|select)\W{0,3}$", re.IGNORECASE)
_COPULA = re.compile(
    r"(?:\b(?:is|are|be|so|thus|hence|therefore)[,:]?|=|:)\s*[\"'(*{]*$", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"[\"')*}]*\s*(?:[.!\n]|\Z)")
_COMMON = frozenset(
    "no yes true false none all even odd both one two zero up down left right".split()
)

_FEW = 12  # up to here numbers are written as words in any sentence

_REWRITES = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"[\u2212\u2013\u2010\u2011]", "-"),
        (r"(?<=\d)(?:\\,|\\!|\{,\})+(?=\d{3}(?!\d))", ","),
        (r"(?<=\d)(?:\\,|\\!|\{\})+(?=\d)", ""),
        (r"\\(?:left|right|displaystyle|limits)(?![A-Za-z])|\\[,!;:]|\\ |~", " "),
        (r"\\(?:text|textbf|textit|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r" \1 "),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\^\s*\{?\s*\\circ\s*\}?|\u00b0", " "),
        (r"\\?\$|\\[()\[\]]", " "),
        (r"\\%", "%"),
        (r"\\frac\s*(\d)\s*(\d)", r" \1/\2"),
        (r"\\frac\s*\{\s*(\w+)\s*\}\s*\{\s*(\w+)\s*\}", r" \1/\2"),
    )
]


def held(text: str, answer: str, before: str = "") -> Held:
    """How a text gives an answer away.

    Args:
        text: what is looked at.
        answer: the gold answer.
        before: what stands in front of the text. It decides what the text's first characters mean
            ("8" behind "1" is 18), but holds nothing itself.

    Returns:
        "": the answer isn't in the text on its own; "holds": it is; "states": it is called the
        answer there.
    """
    wanted, whole = _normal(answer).strip(), _normal(before + text)
    letters = wanted.strip("() .")
    only_stated = letters.isalpha() and (len(letters) == 1 or letters.lower() in _COMMON)
    if only_stated:
        wanted = letters
    if not wanted:
        return ""
    pairs = zip(_normal(before), whole, strict=False)
    start = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    found: Held = ""
    for place, is_word in _places(whole, wanted):
        if place.end() <= start:
            continue
        needs_stating = only_stated or is_word
        # A text that is nothing but the word is an answer, too.
        alone = needs_stating and _normal(text).strip(" ().!\n") == place[0]
        if alone or _states(whole, place):
            return "states"
        found = found or ("" if needs_stating else "holds")
    return found


def shares_run(text: str, reference: str, length: int, *, but_not: str = "") -> bool:
    """Do `length` words in a row of a text stand in a reference, and not in `but_not`?"""
    words = words_of(text)
    theirs, known = f" {' '.join(words_of(reference))} ", f" {' '.join(words_of(but_not))} "
    runs = (f" {' '.join(words[i : i + length])} " for i in range(len(words) - length + 1))
    return any(run in theirs and run not in known for run in runs)


def words_of(text: str) -> list[str]:
    """The words of a text as they are compared, in small letters."""
    return re.findall(r"\w+", plain(text).lower())


def _normal(text: str) -> str:
    text = plain(text)
    for pattern, by in _REWRITES:
        text = pattern.sub(by, text)
    return text


def _places(text: str, wanted: str) -> Iterator[tuple[re.Match[str], bool]]:
    """Where the answer stands on its own, and whether as a word that stands in any sentence; both texts
    are normal."""
    value = _value(wanted)
    if value is not None:
        yield from ((match, False) for match in _numbers(text, value))
        yield from ((match, abs(value) <= _FEW) for match in spelled(text, value))
        return
    fraction = re.fullmatch(r"(-?)\s*" + _FRACTION.pattern, wanted)
    if fraction:
        sign, top, bottom = fraction.groups()
        for match in _FRACTION.finditer(text):
            alone = not re.match(r"\w|\.\d", text[match.end() :]) and _stands_alone(text, match)
            if alone and match.groups() == (top, bottom) and _signs(text, match.start()) & {sign}:
                yield match, False
        return
    yield from ((match, False) for match in _expression(wanted).finditer(text))


def _value(wanted: str) -> Decimal | None:
    """The answer as a number, units and `x =` aside; None where it is none."""
    number = re.fullmatch(
        rf"(?:[A-Za-z]\s*=\s*)?([-+]?)\s*({_SPACED.pattern}|{_NUMBER.pattern})"
        r"\s*(?:%|[^\W\d_]{2,}[^\d]*)?",
        wanted,
    )
    if number is None:
        return None
    value = _decimal(number[2])
    return value.copy_negate() if number[1] == "-" else value  # -value would be rounded


def _decimal(digits: str) -> Decimal:
    return Decimal(re.sub(r"[, \u00a0]", "", digits))


def _numbers(text: str, value: Decimal) -> Iterator[re.Match[str]]:
    size, sign = value.copy_abs(), "-" if value < 0 else ""
    for pattern in (_NUMBER, _SPACED):
        for match in pattern.finditer(text):
            if (
                _decimal(match[0]) == size
                and _stands_alone(text, match)
                and not _GOES_ON.match(text, match.end())
                and (not value or sign in _signs(text, match.start()))
            ):
                yield match


def _stands_alone(text: str, match: re.Match[str]) -> bool:
    """Not the end of a word or a number, no exponent, no subscript."""
    before = text[max(0, match.start() - 6) : match.start()]
    return not re.search(r"[\w^]\Z|\d\.\Z|[\^_]\{?\s*-?\Z", before)


def _signs(text: str, start: int) -> set[str]:
    """The signs that a number at `start` may have: a minus behind a value is an operator."""
    before = text[max(0, start - 40) : start]
    minus = re.search(r"-(\s*)\Z", before)
    if not minus:
        return {""}
    left = before[: minus.start()]
    if minus[1] and re.search(r"(?:\n|\A)\s*\Z", left):
        return {""}  # a list's bullet
    if re.search(r"[\d)\]}%]\s*\Z|(?<![^\W\d_])[^\W\d_]\s*\Z|[^\W\d_]\Z", left):
        return {""}
    return {"-"}


def _expression(wanted: str) -> re.Pattern[str]:
    """Words or a formula, spaced at will, not as a part of a longer word or number."""
    tokens = re.findall(r"\\[A-Za-z]+|[^\W\d_]+|\d+(?:\.\d+)?|\S", wanted)
    pattern = re.escape(tokens[0])
    for left, right in pairwise(tokens):
        apart = left.isalpha() and right.isalpha()
        pattern += (r"\s+" if apart else r"\s*") + re.escape(right)
    if tokens[0][0].isalnum():
        pattern = r"(?<!\w)(?<!\d\.)" + pattern
    if tokens[-1][-1].isalnum():
        pattern += r"(?!\w|\.\d)"
    is_words = all(token.isalpha() for token in tokens) and len(wanted) > 1
    return re.compile(pattern, re.IGNORECASE if is_words else 0)


def _states(text: str, place: re.Match[str]) -> bool:
    left = text[max(0, place.start() - 80) : place.start()]
    if _STATED.search(left):
        return True
    if not place[0][:1].isalpha() and place[0][:1] != "(":
        return False
    bracketed = len(place[0]) == 1 and left.endswith("(") and text[place.end() :][:1] == ")"
    ends = _SENTENCE_END.match(text, place.end())
    return bool(bracketed or _CHOSEN.search(left) or (_COPULA.search(left) and ends))
