"""What the code raised, raised again in the tests' process: its class, arguments and attributes.

A built-in class is itself. A class of the code is stood for by one of that name, derived as the
code's is derived, so that `except` and `assertRaises` tell it as they would beside the code. Of the
library's classes only those are used that mean nothing to whoever runs tests (a `SkipTest` would).

Standard library only; loaded from its file.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Sequence
from typing import Any

_LIBRARY = frozenset(
    "_csv _pickle _queue binascii configparser copy csv dataclasses decimal graphlib json pickle "
    "queue re sre_constants statistics struct zlib".split()
)
"""Top-level modules whose exceptions are raised as they are, where a test has imported them."""
_STOPS = (StopIteration, StopAsyncIteration)
_TEXT = "_mintrl_text_"


class Exceptions:
    """The classes that stand for the code's, by name."""

    def __init__(self) -> None:
        self.known: dict[str, type[BaseException]] = {}

    def stand_in(self, builtin: str, names: Sequence[Any]) -> type[BaseException]:
        """The class for one of the code's.

        Args:
            builtin: the built-in class that it is derived from.
            names: (module, name) of it and of what lies between the two, the most derived first.
        """
        base = getattr(builtins, builtin, None)
        if not (isinstance(base, type) and issubclass(base, BaseException)):
            base = Exception
        for module, name in reversed(names[:20]):
            known = self.known.get(name) or _of_library(str(module), str(name))
            if known is None:
                known = type(str(name)[:80], (base,), {"__str__": _said})
            base = self.known[name] = known
        return base

    def made(
        self, told: dict[str, Any], decode: Callable[[Any], Any], stops: bool
    ) -> BaseException:
        """The exception that the code's process told of.

        Args:
            decode: reads a value.
            stops: a StopIteration may come through. Where it is not asked for it would quietly end
                a `map` over the function under test, and with it the test.
        """
        kind = self.stand_in(told["type"], told.get("names", ()))
        if issubclass(kind, _STOPS) and not stops:
            return RuntimeError(f"the code raised {str(told['detail'])[:300]}")
        args = decode(told["args"])
        try:
            error = kind(*args)
        except Exception:  # a class of the library that makes its one argument of several
            error = kind.__new__(kind, *args)
        known = decode(told.get("attributes", {"d": []}))
        error.__dict__.update({str(name): value for name, value in known.items()})
        if "text" in told:
            error.__dict__[_TEXT] = str(told["text"])
        return error


def _said(self: BaseException) -> str:
    text = self.__dict__.get(_TEXT)
    return BaseException.__str__(self) if text is None else str(text)


def _of_library(module: str, name: str) -> type[BaseException] | None:
    if module.partition(".")[0] not in _LIBRARY:
        return None
    kind = getattr(sys.modules.get(module), name, None)
    return kind if isinstance(kind, type) and issubclass(kind, BaseException) else None
