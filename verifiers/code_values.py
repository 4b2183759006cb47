"""Arguments and expected values as rows hold them -> plain built-in values."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mintrl_env.errors import VerifierError

MAX_LITERAL = 16 << 20
"""Characters of the longest encoded value that is read."""


class BadTests(VerifierError):
    """A task's tests cannot be run: the task is at fault, so the row is undecided, never wrong."""


_PLAIN = (type(None), bool, int, float, complex, str, bytes)


def plain(value: Any, where: str) -> Any:
    """A value made of plain built-in types: arrays become lists, numbers of NumPy Python's.

    Raises:
        BadTests: something else is in it; names `where`. So do the two below.
    """
    if type(value) in _PLAIN:
        return value
    if hasattr(value, "tolist"):
        return plain(value.tolist(), where)
    if isinstance(value, Mapping):
        return {plain(k, where): plain(v, f"{where}[{ascii(k)[:30]}]") for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items: Iterable[Any] = (plain(v, f"{where}[{i}]") for i, v in enumerate(value))
        kinds = (list, tuple, set, frozenset)
        return next(kind for kind in kinds if isinstance(value, kind))(items)
    raise BadTests(f"{where} must be made of plain values, not {kind_of(value)}")


_NUMBERS = re.compile(r"[-+0-9eE.,\[\] ]+")


def literal(text: Any, where: str) -> Any:
    """The value of a Python literal; 1e999 is infinity."""
    if not isinstance(text, str):
        raise BadTests(f"{where} must be the text of a Python literal, not {kind_of(text)}")
    if len(text) > MAX_LITERAL:
        raise BadTests(f"{where} has {len(text)} characters; at most {MAX_LITERAL} are read")
    if _NUMBERS.fullmatch(text):  # the same in both languages, and read much faster as JSON
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(text)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise BadTests(f"{where} is no Python literal: {text[:60]!a} ({error})") from error


def json_text(text: Any, where: str) -> Any:
    """The value of a text of JSON."""
    if not isinstance(text, str):
        raise BadTests(f"{where} must be a text of JSON, not {kind_of(text)}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadTests(f"{where} is no JSON: {text[:60]!a} ({error})") from error


DECODERS: dict[str, Callable[[Any, str], Any]] = {"python-literal": literal, "json": json_text}
"""By the name of an encoding."""


def kind_of(value: Any) -> str:
    """What a value is, in words for people who write rows."""
    names = {type(None): "null", bool: "true or false", str: "text", list: "a list"}
    return (
        "an object" if isinstance(value, Mapping) else names.get(type(value), type(value).__name__)
    )
