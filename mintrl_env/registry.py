"""Names -> objects: verifiers, judges, guards, tasks and engines, ours and other people's.

A name resolves to a built-in (a lazily imported `module:attribute`), to what `register` was given,
to an entry point (group `mintrl_env.<kind>`) or to a dotted path `package.module:attribute`.
"""

from __future__ import annotations

import difflib
import importlib
from importlib.metadata import entry_points
from typing import Any

from mintrl_env.errors import MissingExtraError, RegistryError

_BUILTIN: dict[str, dict[str, str]] = {
    "verifier": {
        "math": "mintrl_env.verifiers.math_answer:MathVerifier",
        "exact_line": "mintrl_env.table_chain:ExactLineVerifier",
        "last_integer": "mintrl_env.env_defaults:LastIntegerVerifier",
    },
    "policy": {
        "sums": "mintrl_env.env_defaults:SumPolicy",
    },
    "judge": {
        "oracle": "mintrl_env.judges:OracleJudge",
        "keep": "mintrl_env.judges:KeepJudge",
        "scoring": "mintrl_env.judges_scoring:ScoringJudge",
        "self": "mintrl_env.judges_self:SelfJudge",
        "shuffled": "mintrl_env.judges:ShuffledJudge",
    },
    "guard": {
        "leak": "mintrl_env.guards:LeakGuard",
        "special_token": "mintrl_env.guards:SpecialTokenGuard",
    },
    "tasks": {
        "table_chain": "mintrl_env.table_chain:make_tasks",
        "sums": "mintrl_env.tasks:sum_tasks",
    },
}
_registered: dict[str, dict[str, Any]] = {kind: {} for kind in _BUILTIN}


def register(kind: str, name: str, thing: Any) -> None:
    """Register an object or class under a name.

    Raises:
        RegistryError: an unknown kind, or a name that is taken (nothing is ever overwritten).
    """
    _check_kind(kind)
    if name in _registered[kind] or name in _BUILTIN[kind]:
        raise RegistryError(f"{kind} {name!r} is registered already; choose another name")
    _registered[kind][name] = thing


def names(kind: str) -> list[str]:
    """All known names of a kind, entry points included."""
    _check_kind(kind)
    points = (point.name for point in entry_points(group=f"mintrl_env.{kind}"))
    return sorted({*_BUILTIN[kind], *_registered[kind], *points})


def resolve(kind: str, name: str) -> Any:
    """The object behind a name or a dotted path `package.module:attribute`.

    Raises:
        RegistryError: nothing of that name, with the nearest ones that exist.
    """
    _check_kind(kind)
    if name in _registered[kind]:
        return _registered[kind][name]
    path = _BUILTIN[kind].get(name)
    if path is None:
        for point in entry_points(group=f"mintrl_env.{kind}"):
            if point.name == name:
                return point.load()
        if ":" not in name:
            near = difflib.get_close_matches(name, names(kind), n=1)
            hint = f", did you mean {near[0]!r}?" if near else "."
            raise RegistryError(
                f"no {kind} is called {name!r}{hint} Known: {', '.join(names(kind))}, "
                "or give a path package.module:attribute"
            )
        path = name
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except MissingExtraError:
        raise
    except (ImportError, AttributeError) as error:
        raise RegistryError(f"{kind} {name!r}: {path} cannot be loaded: {error}") from error


def _check_kind(kind: str) -> None:
    if kind not in _BUILTIN:
        raise RegistryError(f"unknown kind {kind!r}; known: {', '.join(_BUILTIN)}")
