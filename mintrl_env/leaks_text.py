"""What a text says, whatever characters say it: look-alikes written plainly, numbers written as words."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from decimal import Decimal
from functools import lru_cache

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_SCALES = ((10**9, "billion"), (10**6, "million"), (1000, "thousand"), (100, "hundred"))
_MOST = 10**12
_ANY = "|".join([*_ONES, *_TENS, *(name for _, name in _SCALES), "point", "half"])
_NUMBER_BEFORE = re.compile(rf"(?<![A-Za-z])(?:{_ANY})(?:[\s-]+and)?[\s-]+\Z", re.IGNORECASE)
_NUMBER_BEHIND = re.compile(rf"[\s-]+(?:and[\s-]+)?(?:{_ANY})(?![A-Za-z])", re.IGNORECASE)
_MINUS = re.compile(r"(?<![A-Za-z])(?:minus|negative)\s+\Z", re.IGNORECASE)


def plain(text: str) -> str:
    """A text without characters that nobody sees, and with full-width, mathematical and vulgar-fraction
    forms written as ASCII has them. Raised and lowered digits stay: 2\u00b9 is not 21."""
    return text if text.isascii() else "".join(map(_plain, text))


@lru_cache(maxsize=4096)
def _plain(character: str) -> str:
    if character.isascii():
        return character
    if unicodedata.category(character) == "Cf":  # zero width, soft hyphen, direction
        return ""
    form = unicodedata.decomposition(character).partition(" ")[0]
    if form in ("<super>", "<sub>"):
        return character
    if form == "<fraction>":
        top, _, bottom = unicodedata.normalize("NFKC", character).partition("\u2044")
        return f" {top}/{bottom}"
    if form == "" or not form.startswith("<"):  # no look-alike; an accented letter stays as it is
        digit = unicodedata.decimal(character, None)
        return character if digit is None else str(digit)
    return unicodedata.normalize("NFKC", character)


def spelled(text: str, value: Decimal) -> Iterator[re.Match[str]]:
    """Where a whole number stands in words ("eighteen", "one hundred and five"), not as a part of a
    longer number."""
    size = abs(value)
    if size != size.to_integral_value() or size >= _MOST:
        return
    for match in _pattern(int(size)).finditer(text):
        before = text[max(0, match.start() - 40) : match.start()]
        whole = not _NUMBER_BEFORE.search(before) and not _NUMBER_BEHIND.match(text, match.end())
        if whole and (value < 0) is bool(_MINUS.search(before)):
            yield match


@lru_cache(maxsize=1024)
def _pattern(number: int) -> re.Pattern[str]:
    words = r"[\s-]+(?:and[\s-]+)?".join(_words(number))
    return re.compile(rf"(?<![A-Za-z])(?:{words})(?![A-Za-z])", re.IGNORECASE)


def _words(number: int) -> list[str]:
    if number < 20:
        return [_ONES[number]]
    if number < 100:
        return [_TENS[number // 10 - 2], *([_ONES[number % 10]] if number % 10 else [])]
    size, name = next((size, name) for size, name in _SCALES if number >= size)
    rest = _words(number % size) if number % size else []
    count = _words(number // size)
    if count == ["one"]:
        count = ["(?:one|an?)"]
    return [*count, name, *rest]
