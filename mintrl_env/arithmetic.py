"""Equations between numbers in a text: where they stand, and whether they hold. Pure functions.

Made to be right about what it flags rather than to see everything: an equation with a variable, mixed
units, a modulus or a form that is not understood is passed over.

    find_equations("so 3 * 4 = 13 apples")[0].holds  # False; .value is 12
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from mintrl_env.arithmetic_tokens import MEASURES, UNREADABLE, Token, tokenise

# What may stand right in front of a leading minus, and touch a number from behind or in front.
_SAFE = set(":;,.$([>\n")
_TOUCHES = set("_!:'°^\\{}\"#@")
# Words that belong to the number behind them: "half of 3 + 5", "7 mod 3 + 1".
_BINDS = frozenset(
    """by choose cos cube double exp gcd half lcm ln log max min minus mod modulo of per plus root sin
    sqrt square tan times triple twice""".split()
)


@dataclass(frozen=True, slots=True)
class Equation:
    """`left = right` in a text.

    Attributes:
        start, right_start, end: where the left side begins, where the right side begins and ends.
        value: what the left side comes to.
        holds: whether the right side comes to the same, rounding allowed for.
    """

    start: int
    right_start: int
    end: int
    value: Fraction
    holds: bool


def find_equations(text: str) -> list[Equation]:
    """The equations between numbers in a text, in order; a chain `a = b = c` is two of them."""
    tokens = tokenise(text)
    found = []
    for at, token in enumerate(tokens):
        if token.kind != "equals":
            continue
        left, right = _left_side(text, tokens, at), _right_side(text, tokens, at)
        if not left or not right or not (_has_operator(left) or _has_operator(right)):
            continue
        if not _has_operator(left) and (left[-1].unit or not _begins(text, tokens, left[0])):
            continue  # "2 hours = 2 * 60", "Anna has 3 = 2 + 2": whatever the 3 belongs to
        if _mixes_units([*left, *right]):
            continue
        value, other = _value(left), _value(right)
        if value is None or other is None:
            continue
        holds = _agree(left, value, right, other)
        found.append(Equation(left[0].start, right[0].start, right[-1].end, value, holds))
    return found


def written(value: Fraction, like: str) -> str:
    """A value as a number, in the form of another: its currency sign, commas, decimals.

    A value that no decimal number of four places is equal to is rounded, to two places at least.
    """
    decimals = len(like.partition(".")[2].rstrip("%\\ ")) if "." in like else 0
    if like.rstrip().endswith("%"):
        # "25%" of a share, and of what was multiplied by 100 already, can't be told apart.
        value = value * 100 if abs(value) <= 1 else value
    for places in (*range(decimals, 5), max(decimals, 2)):
        if (value * 10**places).denominator == 1:
            break
    grouped = f"{abs(round(value * 10**places)):,d}" if "," in like else None
    digits = (grouped or str(abs(round(value * 10**places)))).replace(",", "").zfill(places + 1)
    whole, rest = (digits[:-places], digits[-places:]) if places else (digits, "")
    if grouped:
        whole = f"{int(whole):,d}"
    sign = "-" if value < 0 and int(digits) else ""
    money = "$" if "$" in like else ""
    tail = "%" if like.rstrip().endswith("%") else ""
    return f"{sign}{money}{whole}{'.' + rest if rest else ''}{tail}"


# --- sides


_PARTS = ("number", "operator", "left", "right")


def _left_side(text: str, tokens: Sequence[Token], equals: int) -> list[Token]:
    """The longest run of arithmetic that ends at an equals sign; empty where there is none."""
    at, depth = equals, 0
    while at and tokens[at - 1].kind in _PARTS:
        token = tokens[at - 1]
        depth += (token.kind == "right") - (token.kind == "left")
        if depth < 0:
            break
        if at < equals and token.kind == "number" and tokens[at].kind == "number":
            if not _words_between(text, token, tokens[at]):
                return []  # "1 1/2", "80 000"
            break
        at -= 1
    side = list(tokens[at:equals])
    if not side or depth > 0:
        return []
    before = tokens[at - 1] if at else None
    if before is not None:
        if before.text == UNREADABLE:
            return []
        touching = before.end == side[0].start
        if touching and (before.kind in ("word", "number") or before.text in _TOUCHES):
            return []
        if touching and before.text == "," and text[before.start - 1 : before.start].isdigit():
            return []
        if before.text.lower() in _BINDS or before.text.startswith("\\"):
            return []
        if before.kind == "word" and len(before.text) == 1 and before.text not in "aAI":
            return []  # a variable, or an x whose other factor is not understood
        if side[0].kind == "operator" and not (before.kind == "equals" or before.text in _SAFE):
            return []
    return side


def _right_side(text: str, tokens: Sequence[Token], equals: int) -> list[Token]:
    """The longest run of arithmetic that begins behind an equals sign."""
    at, depth = equals + 1, 0
    while at < len(tokens) and tokens[at].kind in _PARTS:
        token = tokens[at]
        depth += (token.kind == "left") - (token.kind == "right")
        if depth < 0:
            break
        if at > equals + 1 and token.kind == "number" and tokens[at - 1].kind == "number":
            if not _words_between(text, tokens[at - 1], token):
                return []
            break
        at += 1
    side = list(tokens[equals + 1 : at])
    # "= 5 (since" opens a remark.
    while side and side[-1].kind == "left" and text[side[-1].start - 1 : side[-1].start] == " ":
        side.pop()
        depth -= 1
        at -= 1
    if not side or depth > 0:
        return []
    after = tokens[at] if at < len(tokens) else None
    if after is not None:
        if after.text == UNREADABLE:
            return []
        touching = after.start == side[-1].end and not side[-1].unit
        if touching and (after.kind in ("word", "number", "left") or after.text in _TOUCHES):
            return []
        if touching and after.text == "," and text[after.end : after.end + 1].isdigit():
            return []
        rest = text[after.start : after.start + 5].lower()
        if rest.startswith(("mod", "(mod", "\\pmod", "\\bmod", "...", "…", "\\dots", "\\ldot")):
            return []
    return side


def _words_between(text: str, a: Token, b: Token) -> bool:
    return any(c.isalpha() for c in text[a.end : b.start])


def _begins(text: str, tokens: Sequence[Token], first: Token) -> bool:
    """Does a side begin its line, or go on with a chain?"""
    before = [t for t in tokens if t.end <= first.start]
    return not before or before[-1].kind == "equals" or before[-1].text in ("\n", ";")


def _has_operator(side: Sequence[Token]) -> bool:
    return any(t.kind == "operator" for t in side[1:])


def _mixes_units(tokens: Sequence[Token]) -> bool:
    units = {t.unit for t in tokens if t.unit}
    added = any(t.kind == "operator" and t.text in "+-" for t in tokens)
    return len(units) > 1 and (added or len(units & MEASURES) > 1)


# --- values


def _value(side: Sequence[Token]) -> Fraction | None:
    """What a side comes to; None where it is no expression, or divides by zero, or is huge."""
    try:
        return _Parser(side).whole()
    except (ValueError, ZeroDivisionError, RecursionError):
        return None


class _Parser:
    """Recursive descent over + - * / ^, signs and parentheses."""

    def __init__(self, side: Sequence[Token]) -> None:
        if len(side) > 200:
            raise ValueError("too long")
        self._side, self._at = side, 0

    def whole(self) -> Fraction:
        value = self._sum()
        if self._at < len(self._side):
            raise ValueError("something is left over")
        return value

    def _take(self, kind: str, texts: str = "") -> str:
        if self._at < len(self._side):
            token = self._side[self._at]
            if token.kind == kind and (not texts or token.text in texts):
                self._at += 1
                return token.text
        return ""

    def _left_to_right(
        self, part: Callable[[], Fraction], signs: str, apply: Callable[..., Fraction]
    ) -> Fraction:
        value, divided = part(), False
        while sign := self._take("operator", signs):
            if sign == "/" and divided:
                raise ValueError("25 / 1/3 is read in two ways")
            divided = divided or sign == "/"
            value = apply(sign, value, part())
        return value

    def _sum(self) -> Fraction:
        return self._left_to_right(
            self._product, "+-", lambda sign, a, b: a + b if sign == "+" else a - b
        )

    def _product(self) -> Fraction:
        value = self._left_to_right(
            self._signed, "*/", lambda sign, a, b: a * b if sign == "*" else a / b
        )
        # "3(4 + 5)" is a product; with a blank between it is not clear what it is.
        while (
            self._at < len(self._side)
            and self._side[self._at].kind == "left"
            and self._side[self._at].start == self._side[self._at - 1].end
        ):
            if any(t.kind == "operator" and t.text == "/" for t in self._side):
                raise ValueError("8/2(2 + 2) is read in two ways")
            value *= self._power()
        return value

    def _signed(self) -> Fraction:
        if self._take("operator", "-"):
            return -self._signed()
        return self._power()

    def _power(self) -> Fraction:
        base = self._atom()
        if not self._take("operator", "^"):
            return base
        exponent = self._signed()
        if exponent.denominator != 1 or abs(exponent) > 64 or not _is_small(base):
            raise ValueError("a power that is not worked out")
        return base ** int(exponent)

    def _atom(self) -> Fraction:
        if self._take("left"):
            value = self._sum()
            if not self._take("right"):
                raise ValueError("a parenthesis is not closed")
            return value
        token = self._side[self._at] if self._at < len(self._side) else None
        if token is None or token.kind != "number":
            raise ValueError("no number")
        self._at += 1
        return token.value


def _is_small(base: Fraction) -> bool:
    return max(abs(base.numerator), base.denominator) <= 10**6


def _agree(left: Sequence[Token], value: Fraction, right: Sequence[Token], other: Fraction) -> bool:
    """Are both sides the same, as far as people who round would say so?"""
    percents = any(t.percent for t in (*left, *right))
    scales: tuple[int | Fraction, ...] = (1,)
    # "* 100 = 25%"; and "$" on one side alone may stand for cents there, or for thousands.
    if percents or any(t.unit == "dollar" for t in left) != any(t.unit == "dollar" for t in right):
        scales = (1, 100, Fraction(1, 100), *(() if percents else (1000, Fraction(1, 1000))))
    if any(value == other * scale for scale in scales):
        return True
    rounds = any(t.kind == "operator" and t.text == "/" for t in (*left, *right))
    rounds = rounds or any(t.percent or "frac" in t.text for t in (*left, *right))
    if _has_operator(left) and _has_operator(right):
        decimals = max(t.decimals for t in (*left, *right))
        return rounds and decimals > 0 and abs(value - other) <= abs(value) / 100
    # One side is a plain number, which may be rounded to its last place.
    plain, near, exact = (left, value, other) if not _has_operator(left) else (right, other, value)
    number = next(t for t in plain if t.kind == "number")
    places = number.decimals + 2 * number.percent
    if not (rounds or places):
        return False
    return any(
        abs(exact - near * scale) < scale * Fraction(1, 10**places)
        and (exact / scale * 10**places).denominator != 1
        for scale in scales
    )
