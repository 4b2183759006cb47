"""What stands in the tests' process for a function, a class or an object of the code.

What is done to it is sent to the code's process (`Link.do` of `sandbox_tester`). It equals nothing.

Standard library only; loaded from its file.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from typing import Any

_SHOWN = {"__name__", "__dict__", "__module__", "__qualname__"}


async def _awaited(stub: Remote) -> Any:
    return stub._link.do("await", stub)


def coroutine(stub: Remote) -> Coroutine[Any, Any, Any]:
    """A coroutine that has the code's own one run to its end."""
    return _awaited(stub)


class Remote:
    __slots__ = ("__weakref__", "_kind", "_link", "_target")

    def __init__(self, link: Any, target: list[Any], kind: str) -> None:
        for name, value in (("_link", link), ("_target", target), ("_kind", kind)):
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name not in _SHOWN:
            raise AttributeError(name)
        return self._link.do("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._link.do("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._link.do("delete", self, name)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._link.do("call", self, *args, **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self._link.do("item", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._link.do("set_item", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self._link.do("del_item", self, key)

    def __iter__(self) -> Iterator[Any]:
        return self._link.do("iter", self)  # type: ignore[no-any-return]

    def __next__(self) -> Any:
        return self._link.do("next", self)

    def __len__(self) -> int:
        return self._link.do("len", self)  # type: ignore[no-any-return]

    def __bool__(self) -> bool:
        return self._link.do("bool", self)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return self._link.do("str", self)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return self._link.do("repr", self)  # type: ignore[no-any-return]

    def __instancecheck__(self, thing: object) -> bool:
        return type(thing) is Remote and self._link.do("isinstance", self, thing) is True

    def __subclasscheck__(self, thing: object) -> bool:
        return type(thing) is Remote and self._link.do("issubclass", self, thing) is True

    @property
    def __doc__(self) -> Any:  # type: ignore[override]
        return self._link.do("get", self, "__doc__")

    def __enter__(self) -> Any:
        return self._link.do("enter", self)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        # Whatever the code answers: it must not swallow the failure of an assert.
        known = (
            next((base for base in kind.__mro__ if base.__module__ == "builtins"), None)
            if kind
            else None
        )
        self._link.do("exit", self, known)

    # No operator hands the code what it is compared with: an object of the code equals nothing,
    # and arithmetic or ordering with it is a TypeError.

    def __eq__(self, other: object) -> bool:
        self._link.compared = self._kind
        return False

    def __ne__(self, other: object) -> bool:
        self._link.compared = self._kind
        return True

    def __hash__(self) -> int:
        return id(self)
