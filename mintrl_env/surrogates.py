"""Halves of surrogate pairs: JSON can write them, but they can be neither tokenised nor stored."""

from __future__ import annotations

import re

_PAIR = re.compile("[\ud800-\udbff][\udc00-\udfff]")
_LONE = re.compile("[\ud800-\udfff]")


def whole_text(text: str) -> str:
    """A text that can be encoded: halves of surrogate pairs joined, or else U+FFFD.

    Decoding as UTF-16 with "replace" does the same, in a time that grows with the square of the
    number of lone halves.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return _LONE.sub("\ufffd", _PAIR.sub(_joined, text))
    return text


def _joined(match: re.Match[str]) -> str:
    return match[0].encode("utf-16", "surrogatepass").decode("utf-16")
