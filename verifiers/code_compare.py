"""Did the program print, or the function return, what was expected? Plain types and text only.

Standard output (`compare_output`): CRLF counts as LF; blank space at the ends of lines and empty
lines at the end do not count. Then, line by line (or over the whole text), the tokens between blank
space are compared. A token is equal as text, or, only where the expected one has a point or an
exponent, as a number within 1e-6 absolute or relative. Integers compare as text.

Values (`compare_value`): by built-in type, never by an object's own `__eq__`. A tuple counts as a
list, a frozenset as a set; an expected float takes an int or a float that is close; NaN equals NaN.

Both return None where all is equal, else where and how the first difference shows, in one short
line of ASCII.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

TOLERANCE = 1e-6
_SHOWN = 60
"""Characters of a value that a difference shows."""
_LONGEST_NUMBER = 400
_BLANK = " \t\r\v\f"
_SPACE = re.compile(r"[ \t\r\v\f]+")
_WHITE = re.compile(r"[ \t\r\v\f\n]+")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")


# --- standard output -----------------------------------------------------------------------------


def compare_output(expected: str, printed: str, *, by_lines: bool = True) -> str | None:
    """The first difference of what a program printed, or None.

    Args:
        by_lines: lines are compared one by one, in number too; else the whole text's tokens.
    """
    if expected == printed:
        return None
    if not by_lines:
        return _tokens(_split(_WHITE, expected), _split(_WHITE, printed), "")
    want, got = _lines(expected), _lines(printed)
    for number, (a, b) in enumerate(zip(want, got, strict=False), start=1):
        if a != b and (found := _tokens(_split(_SPACE, a), _split(_SPACE, b), f"line {number}, ")):
            return found
    if len(want) == len(got):
        return None
    if len(got) < len(want):
        return f"{_count(len(got), 'line')} for {len(want)}: {_shown(want[len(got)])} is missing"
    return f"{_count(len(got), 'line')} for {len(want)}: {_shown(got[len(want)])} is too much"


def _lines(text: str) -> list[str]:
    lines = [line.rstrip(_BLANK) for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _split(space: re.Pattern[str], text: str) -> list[str]:
    return [token for token in space.split(text) if token]


def _tokens(want: list[str], got: list[str], where: str) -> str | None:
    for number, (a, b) in enumerate(zip(want, got, strict=False), start=1):
        if a != b and not _same_number(a, b):
            return f"{where}token {number}: expected {_shown(a)}, got {_shown(b)}"
    if len(want) == len(got):
        return None
    place = f"{where}{_count(len(got), 'token')} for {len(want)}"
    if len(got) < len(want):
        return f"{place}: {_shown(want[len(got)])} is missing"
    return f"{place}: {_shown(got[len(want)])} is too much"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _same_number(expected: str, printed: str) -> bool:
    if max(len(expected), len(printed)) > _LONGEST_NUMBER:
        return False
    if not ("." in expected or "e" in expected or "E" in expected):
        return False
    if not (_NUMBER.fullmatch(expected) and _NUMBER.fullmatch(printed)):
        return False
    return _close(float(expected), float(printed), TOLERANCE, TOLERANCE)


def _close(expected: float, got: float, absolute: float, relative: float) -> bool:
    if math.isfinite(expected) and math.isfinite(got):
        return abs(expected - got) <= max(absolute, relative * abs(expected))
    return expected == got or (expected != expected and got != got)


# --- values --------------------------------------------------------------------------------------


class How(StrEnum):
    """How a returned value is compared with the expected one.

    STRICT: by type: True is not 1, 2.0 is not the expected 2.
    EQUAL: numbers by Python's ==: True is 1, 2.0 is 2.
    SET: as EQUAL, of `set(value)` on both sides.
    NOT_NONE: an expected bool says whether something was returned at all (a returned bool is
        compared as it is).
    """

    STRICT = "strict"
    EQUAL = "equal"
    SET = "set"
    NOT_NONE = "not_none"


@dataclass(frozen=True, slots=True)
class Rule:
    """How, and within what an expected float is met: |a - b| <= max(atol, rtol |expected|)."""

    how: How = How.STRICT
    atol: float = TOLERANCE
    rtol: float = TOLERANCE


def compare_value(expected: Any, got: Any, rule: Rule = Rule()) -> str | None:
    """The first difference between an expected value and one that was returned, or None.

    `got` consists of plain built-in types (whatever else is in it is a difference); `expected` is
    trusted: nothing is walked deeper than it goes.
    """
    if rule.how is How.NOT_NONE:
        if type(expected) is bool and type(got) is not bool:
            got = got is not None
    elif rule.how is How.SET:
        expected, got = _as_set(expected), _as_set(got)
    try:
        return _differs(expected, got, rule, "")
    except RecursionError:
        return f"expected {_shown(expected)}, got {_shown(got)}: nested too deep to compare"


def _as_set(value: Any) -> Any:
    if type(value) in (list, tuple, set, frozenset, dict, str):
        try:
            return set(value)
        except TypeError:  # something in it cannot be hashed
            return value
    return value


def _differs(expected: Any, got: Any, rule: Rule, where: str) -> str | None:
    kind = type(expected)
    if kind in (list, tuple):
        if type(got) not in (list, tuple):
            return _unequal(expected, got, where)
        return _sequences(expected, got, rule, where)
    if kind is dict:
        return _dicts(expected, got, rule, where)
    if kind in (set, frozenset):
        if type(got) in (set, frozenset) and _sets(expected, got, rule):
            return None
        return _unequal(expected, got, where)
    return None if _same_leaf(expected, got, rule) else _unequal(expected, got, where)


def _same_leaf(expected: Any, got: Any, rule: Rule) -> bool:
    kind, other = type(expected), type(got)
    if kind is float:
        if other is float:
            return _close(expected, got, rule.atol, rule.rtol)
        if other is int or (other is bool and rule.how is not How.STRICT):
            return _close_int(expected, got, rule)
        return False
    if kind is complex and other in (complex, float, int):
        return _close_complex(expected, got, rule)
    if kind is other:
        return bool(expected == got)
    if rule.how is How.STRICT:
        return False
    numbers = (int, float, bool)
    return kind in numbers and other in numbers and bool(expected == got)


def _close_int(expected: float, got: int, rule: Rule) -> bool:
    try:
        return _close(expected, float(got), rule.atol, rule.rtol)
    except OverflowError:  # beyond every float
        return False


def _close_complex(expected: complex, got: complex, rule: Rule) -> bool:
    try:
        number = complex(got)
    except OverflowError:
        return False
    return _close(expected.real, number.real, rule.atol, rule.rtol) and _close(
        expected.imag, number.imag, rule.atol, rule.rtol
    )


def _sequences(expected: Any, got: Any, rule: Rule, where: str) -> str | None:
    for index, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a is not b and (found := _differs(a, b, rule, f"{where}[{index}]")):
            return found
    if len(expected) == len(got):
        return None
    place = f"at {where}: " if where else ""
    return (
        f"{place}expected {_count(len(expected), 'element')} {_shown(expected)}, "
        f"got {len(got)} {_shown(got)}"
    )


def _dicts(expected: dict[Any, Any], got: Any, rule: Rule, where: str) -> str | None:
    if type(got) is not dict:
        return _unequal(expected, got, where)
    place = f"at {where}: " if where else ""
    if len(expected) != len(got):
        return f"{place}expected {_shown(expected)}, got {_shown(got)}"
    # Python's own look-up takes True for 1; a strict rule does not.
    own = {_key(k): k for k in got} if rule.how is How.STRICT else None
    for key, value in expected.items():
        name: Any = key
        if own is not None:
            name = own.get(_key(key), _MISSING)
        if name is _MISSING or name not in got:
            return f"{place}expected the key {_shown(key)}, got {_shown(got)}"
        if found := _differs(value, got[name], rule, f"{where}[{_shown(key)}]"):
            return found
    return None


_MISSING = object()


def _key(value: Any) -> Any:
    """What tells keys and elements apart by type and value."""
    if type(value) is tuple:
        return (tuple, tuple(_key(item) for item in value))
    if type(value) is frozenset:
        return (frozenset, frozenset(_key(item) for item in value))
    return (type(value), value)


def _sets(expected: Iterable[Any], got: Iterable[Any], rule: Rule) -> bool:
    if rule.how is How.STRICT:
        equal = {_key(item) for item in expected} == {_key(item) for item in got}
    else:
        equal = expected == got
    if equal:
        return True
    want, have = list(expected), list(got)
    if len(want) != len(have) or not any(type(item) is float for item in want):
        return False
    if not all(type(item) in (int, float) and item == item for item in (*want, *have)):
        return False
    return all(_same_leaf(a, b, rule) for a, b in zip(sorted(want), sorted(have), strict=True))


def _unequal(expected: Any, got: Any, where: str) -> str:
    place = f"at {where}: " if where else ""
    want, have = _shown(expected), _shown(got)
    if type(expected) is not type(got) and want == have:
        want, have = f"{type(expected).__name__} {want}", f"{type(got).__name__} {have}"
    return f"{place}expected {want}, got {have}"


# --- for people ----------------------------------------------------------------------------------


def _shown(value: Any) -> str:
    """A value in a few characters of ASCII, without ever writing all of a large one."""
    text = _piece(value, _SHOWN + 1)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
    dict: ("{", "}"),
}


def _piece(value: Any, room: int) -> str:
    kind = type(value)
    if kind in (str, bytes, bytearray):
        return ascii(value[: max(1, room)])
    if kind is int:
        bits = value.bit_length()
        return str(value) if bits < 500 else f"an integer of {bits} bits"
    if value is None or kind in (bool, float, complex):
        return repr(value)
    if kind not in _BRACKETS:
        return f"an object {kind.__name__}"
    if not value and kind in (set, frozenset):
        return f"{kind.__name__}()"
    opening, closing = _BRACKETS[kind]
    text = opening
    for number, item in enumerate(value):
        if len(text) > room:
            return text
        text += ", " if number else ""
        text += _piece(item, room - len(text))
        if kind is dict and len(text) <= room:
            text += ": " + _piece(value[item], room - len(text))
    return text + ("," if kind is tuple and len(value) == 1 else "") + closing
