"""Values of the standard library as plain parts, and back: what tests of code compare results with.

Exact classes only, so that nothing but the library's own code ever runs on such a value, here or
where it is built again. Building checks every part, since anybody may have written them.

Standard library only, and nothing of this package: a sandbox loads this file by itself.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import functools
from typing import Any

MAX_DIGITS = 100_000
"""Of a Decimal's text, and (in bits, times four) of the two numbers of a Fraction."""
_MAX_FIELDS = 256

NAMES: dict[type, str] = {
    decimal.Decimal: "Decimal",
    fractions.Fraction: "Fraction",
    datetime.date: "date",
    datetime.time: "time",
    datetime.datetime: "datetime",
    datetime.timedelta: "timedelta",
    datetime.timezone: "timezone",
}
CONTAINERS: dict[type, str] = {
    collections.Counter: "Counter",
    collections.OrderedDict: "OrderedDict",
    collections.defaultdict: "defaultdict",
    collections.deque: "deque",
}
_FACTORIES: dict[str, type] = {kind.__name__: kind for kind in (int, float, str, list, dict, set)}
_DATE = ("year", "month", "day")
_TIME = ("hour", "minute", "second", "microsecond", "tzinfo", "fold")
_PARTS: dict[str, tuple[str, ...]] = {
    "Fraction": ("numerator", "denominator"),
    "date": _DATE,
    "time": _TIME,
    "datetime": _DATE + _TIME,
    "timedelta": ("days", "seconds", "microseconds"),
}


def parts(value: Any, name: str) -> list[Any]:
    """What a value of the class `NAMES` calls so is made of. Of a time zone only the offset."""
    if name == "Decimal":
        return [str(value)]
    if name == "timezone":
        return [value.utcoffset(None)]
    return [getattr(value, part) for part in _PARTS[name]]


def more_of(value: Any) -> Any:
    """What a container has beside its contents: a deque's bound; the name of a default's class
    (other factories are code, which does not travel)."""
    if type(value) is collections.deque:
        return value.maxlen
    if type(value) is collections.defaultdict:
        return next((n for n, k in _FACTORIES.items() if k is value.default_factory), None)
    return None


def container(name: str, contents: Any, more: Any) -> Any:
    """The container that `CONTAINERS` calls so, from a list or dict and from `more_of` it.

    Raises:
        TypeError, ValueError, ArithmeticError: it is none.
    """
    if name == "deque":
        return collections.deque(contents, more)
    if name == "Counter":
        return collections.Counter(contents)
    if name == "OrderedDict":
        return collections.OrderedDict(contents)
    if name == "defaultdict":
        return collections.defaultdict(_FACTORIES.get(more), contents)
    raise ValueError(f"no container is called {name[:40]!r}")


def build(name: str, given: list[Any]) -> Any:
    """The value that consists of these parts.

    Raises:
        TypeError, ValueError, ArithmeticError: it is none.
    """
    if name == "Decimal":
        (text,) = given
        if type(text) is not str or len(text) > MAX_DIGITS:
            raise ValueError("not the text of a number")
        return decimal.Decimal(text)
    if name == "timezone":
        (offset,) = given
        if type(offset) is not datetime.timedelta:
            raise TypeError("not an offset")
        return datetime.timezone(offset)
    names = _PARTS.get(name)
    if names is None or len(given) != len(names):
        raise ValueError(f"not the parts of a {name[:40]}")
    known = dict(zip(names, given, strict=True))
    zone = known.pop("tzinfo", None)
    if any(type(part) is not int for part in known.values()):
        raise TypeError(f"not the parts of a {name}")
    if name == "Fraction":
        if any(part.bit_length() > 4 * MAX_DIGITS for part in given):
            raise ValueError("too many digits")
        return fractions.Fraction(*given)
    if "fold" in known:
        if type(zone) not in (datetime.timezone, type(None)):
            raise TypeError("not a time zone")
        known["tzinfo"] = zone
    return getattr(datetime, name)(**known)


@functools.lru_cache(maxsize=256)
def named_tuple(name: str, fields: tuple[str, ...]) -> Any:
    """The class of named tuples with this name and these fields, the same one each time.

    Raises:
        TypeError, ValueError: there is none; a field may not begin with an underscore, so it can
            replace nothing that a tuple compares itself by.
    """
    if len(fields) > _MAX_FIELDS or any(type(text) is not str for text in (name, *fields)):
        raise TypeError("not the names of fields")
    if not all(text.isascii() and len(text) <= 200 for text in (name, *fields)):
        raise ValueError("not the names of fields")
    return collections.namedtuple(name, fields)


def fields_of(kind: type, name: str, count: int) -> tuple[str, ...] | None:
    """The fields of a class of named tuples; None where it only looks like one."""
    fields = kind.__dict__["_fields"]
    try:
        return fields if len(named_tuple(name, fields)._fields) == count else None
    except (TypeError, ValueError):
        return None
