"""A text as numbers, operators, units and the rest: what `arithmetic` reads. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

_NUMBER = r"\d{1,3}(?:,\d{3})+(?![\d,])(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+"
_PATTERN = re.compile(
    rf"""(?P<blank>\s+)
    |\\[dt]?frac\{{\s*(?P<top>\d{{1,18}})\s*\}}\{{\s*(?P<bottom>\d{{1,18}})\s*\}}
    |(?P<number>(?:\\?\$\s?)?(?:{_NUMBER}))(?P<percent>\s?\\?%)?
    |(?P<times>\\times\b|\\cdot\b|[×·∙*])|(?P<over>\\div\b|[÷/])|(?P<plus>\+)|(?P<minus>[-−–])
    |(?P<power>\^)
    |(?P<left>\\left\(|\()|(?P<right>\\right\)|\))
    |(?P<other><=|>=|!=|==|=>|:=|\*\*|//|\+\+|--)
    |(?P<equals>=)
    |(?P<word>\\?[^\W\d_]+)
    |(?P<sign>.)""",
    re.VERBOSE | re.DOTALL,
)
_MARKER = re.compile(r"^[ \t]*(?:\d{1,3}[.)]|[a-z]\)|[-*•])[ \t]+", re.MULTILINE)
_OPERATORS = {"times": "*", "over": "/", "plus": "+", "minus": "-", "power": "^"}
_NO_UNITS = frozenset(
    """a an and are as at because but by dozen double each equals for from gives had half has have
    hence hundred if in into is it leaves leaving less makes million minus mod modulo more of on or
    over per percent plus since so sum than that the their them then there therefore these this
    thousand times to total totals twice was we were when where which with yields billion gross
    score trillion choose cos exp gcd lcm log max min root sin sqrt square squared tan""".split()
)
MEASURES = frozenset(
    """second minute hour day week month year decade inch foot feet yard mile meter metre kilometer
    kilometre centimeter centimetre millimeter cm km mm gram kilogram kg pound lb ounce oz ton cent
    dollar penny pennies nickel dime quarter liter litre ml milliliter cup pint quart gallon
    tablespoon teaspoon percent degree""".split()
)
_LONGEST_NUMBER = 30  # digits; what is longer is no arithmetic of a step


UNREADABLE = "#"
"""The text of a token that has digits but is no number here: "0900", a run of 40 digits."""


@dataclass(frozen=True, slots=True)
class Token:
    kind: str  # number, operator, left, right, equals, word, other
    text: str
    start: int
    end: int
    value: Fraction = Fraction(0)
    decimals: int = 0
    percent: bool = False
    unit: str = ""


def tokenise(text: str) -> list[Token]:
    """The tokens of a text, blanks left out. A word behind a number is its unit."""
    return _with_units(text, list(_tokens(text)))


def _tokens(text: str) -> Iterator[Token]:
    markers = {m.start(): m.end() for m in _MARKER.finditer(text)}
    at = 0
    while at < len(text):
        if at in markers:  # "1) ", "- " at a line's start are no arithmetic
            yield Token("other", ";", at, markers[at])
            at = markers[at]
            continue
        match = _PATTERN.match(text, at)
        assert match is not None
        at = match.end()
        kind, token = match.lastgroup or "", match.group()
        if match["top"] is not None:
            bottom = int(match["bottom"])
            kind = "number" if bottom else "other"
            value = Fraction(int(match["top"]), bottom) if bottom else Fraction(0)
            yield Token(kind, token, match.start(), at, value)
        elif match["number"] is not None:
            yield _number(match)
        elif kind in _OPERATORS:
            yield Token("operator", _OPERATORS[kind], match.start(), at)
        elif kind == "sign":
            yield Token("other", token, match.start(), at)
        elif kind != "blank":
            yield Token(kind, token, match.start(), at)
        elif "\n" in token:
            yield Token("other", "\n", match.start(), at)


def _number(match: re.Match[str]) -> Token:
    digits = match["number"].replace(",", "").lstrip("\\$ ")
    is_clock = re.match(r"0\d", digits) is not None  # "0900"
    if is_clock or len(digits) > _LONGEST_NUMBER:
        return Token("other", UNREADABLE, match.start(), match.end())
    value = Fraction(digits)
    if match["percent"]:
        value /= 100
    return Token(
        "number",
        match.group(),
        match.start(),
        match.end(),
        value,
        len(digits.partition(".")[2]),
        bool(match["percent"]),
        "dollar" if "$" in match["number"] else "",
    )


def _with_units(text: str, tokens: list[Token]) -> list[Token]:
    """A word behind a number becomes its unit; `x` between numbers and `% of` become times."""
    out: list[Token] = []
    skip = 0
    for at, token in enumerate(tokens):
        if at < skip:
            continue
        before = out[-1] if out else None
        after = tokens[at + 1] if at + 1 < len(tokens) else None
        if token.kind == "word" and before is not None and before.kind in ("number", "right"):
            is_times = token.text.lower() == "x" or (token.text == "of" and before.percent)
            if is_times and after is not None and after.kind in ("number", "left"):
                out.append(Token("operator", "*", token.start, token.end))
                continue
            word = token.text.lower()
            # "5kg" has a unit, "5x" and "5xy" have variables, "2 sin(3)" a function.
            attached = token.start == before.end and _singular(word) not in MEASURES
            is_unit = len(word) >= (4 if attached else 3) or _singular(word) in MEASURES
            is_unit = is_unit and word not in _NO_UNITS and not word.startswith("\\")
            if is_unit and text[token.end : token.end + 1] not in ("(", "_", "^"):
                out[-1] = replace(before, unit=before.unit or _singular(word))
                over, word_after = tokens[at + 1 : at + 2], tokens[at + 2 : at + 3]
                if over and over[0].text == "/" and word_after and word_after[0].kind == "word":
                    skip = at + 3  # "slices/pizza"
                continue
        out.append(token)
    return out


def _singular(word: str) -> str:
    if word in ("feet", "foot"):
        return "foot"
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word
