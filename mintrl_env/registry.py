"""Names -> objects: verifiers, judges, guards, tasks and engines, ours and other people's.

A name resolves to a built-in (a lazily imported `module:attribute`), to what `register` was given,
to an entry point (group `mintrl_env.<kind>`) or to a dotted path `package.module:attribute`. A
built-in name can't be taken by a package.
"""

from __future__ import annotations

import difflib
import importlib
import sys
import traceback
from importlib.metadata import entry_points
from typing import Any

from mintrl_env.errors import MissingExtraError, RegistryError

_BUILTIN: dict[str, dict[str, str]] = {
    "verifier": {
        "math": "mintrl_env.verifiers.math_answer:MathVerifier",
        "code": "mintrl_env.verifiers.code_tests:CodeVerifier",
        "exact_line": "mintrl_env.table_chain:ExactLineVerifier",
        "last_integer": "mintrl_env.env_defaults:LastIntegerVerifier",
    },
    "policy": {
        "sums": "mintrl_env.env_defaults:SumPolicy",
    },
    "judge": {
        "oracle": "mintrl_env.judges:OracleJudge",
        "keep": "mintrl_env.judges:KeepJudge",
        "llm": "mintrl_env.adapters.llm_judge:LLMJudge",
        "rubric": "mintrl_env.adapters.llm_judge:LLMRubricJudge",
        "scoring": "mintrl_env.judges_scoring:ScoringJudge",
        "self": "mintrl_env.judges_self:SelfJudge",
        "shuffled": "mintrl_env.judges:ShuffledJudge",
        "arithmetic": "mintrl_env.judges_arithmetic:ArithmeticJudge",
    },
    "guard": {
        "leak": "mintrl_env.guards:LeakGuard",
        "perplexity": "mintrl_env.guards_perplexity:PerplexityGate",
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
        RegistryError: an unknown kind, or a name that is taken, be it by us, by you or by an
            installed package (nothing is ever overwritten).
    """
    if name in names(kind):
        raise RegistryError(f"{kind} {name!r} is registered already; choose another name")
    _registered[kind][name] = thing


def names(kind: str) -> list[str]:
    """All known names of a kind, entry points included."""
    _check_kind(kind)
    return sorted({*_BUILTIN[kind], *_registered[kind], *_entry_points(kind)})


def resolve(kind: str, name: str) -> Any:
    """The object behind a name or a dotted path `package.module:attribute`.

    Raises:
        RegistryError: nothing of that name, with the nearest ones that exist; a name that two
            packages give to different things; something that cannot be loaded.
        MissingExtraError: it needs an optional dependency.
    """
    _check_kind(kind)
    if name in _registered[kind]:
        return _registered[kind][name]
    path = _BUILTIN[kind].get(name) or (None if ":" in name else _entry_point(kind, name)) or name
    module, _, attribute = path.partition(":")
    try:
        thing = importlib.import_module(module)
        for part in attribute.split("."):
            thing = getattr(thing, part)
    except MissingExtraError:
        raise
    except Exception as error:  # a module of somebody's own may raise anything when it is imported
        reason = _reason(error, module, attribute)
        raise RegistryError(f"{kind} {name!r}: {path} cannot be loaded: {reason}") from error
    return thing


def _reason(error: Exception, module: str, attribute: str) -> str:
    """Why a path cannot be loaded, with the line of an error in that module, or what to write."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error}"  # which names file and line
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        if module.endswith(".py"):
            return f"{error}; write the module without .py: {module[:-3]}:{attribute}"
        if f"{module}.".startswith(f"{error.name}."):
            return f"{error}; it is looked for in the current folder and on PYTHONPATH"
    if isinstance(error, AttributeError) and module in sys.modules:
        near = difflib.get_close_matches(attribute, dir(sys.modules[module]), n=1)
        if not _lines_of(error):
            return f"{error}, did you mean {near[0]!r}?" if near else str(error)
    text = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
    lines = _lines_of(error)
    return f"{text} ({lines[-1]})" if lines else text


def _lines_of(error: Exception) -> list[str]:
    """`file:line` of the frames that are neither ours nor the import system's."""
    frames = traceback.extract_tb(error.__traceback__)
    inner = (__file__, importlib.__file__)
    return [
        f"{frame.filename}:{frame.lineno}"
        for frame in frames
        if frame.filename not in inner and not frame.filename.startswith("<frozen")
    ]


def _entry_point(kind: str, name: str) -> str:
    paths = _entry_points(kind).get(name, [])
    if len(paths) > 1:
        raise RegistryError(
            f"{kind} {name!r} is offered by several installed packages: {', '.join(paths)}; "
            "give one of these paths instead"
        )
    if paths:
        return paths[0]
    near = difflib.get_close_matches(name, names(kind), n=1)
    module, _, attribute = name.rpartition(".")
    if not near and module and attribute != "py":
        near = [f"{module}:{attribute}"]
    hint = f", did you mean {near[0]!r}?" if near else "."
    raise RegistryError(
        f"no {kind} is called {name!r}{hint} Known: {', '.join(names(kind))}, "
        "or give a path package.module:attribute"
    )


def _entry_points(kind: str) -> dict[str, list[str]]:
    """Name -> the distinct paths that installed packages give it (one may be installed twice)."""
    found: dict[str, set[str]] = {}
    for point in entry_points(group=f"mintrl_env.{kind}"):
        found.setdefault(point.name, set()).add(f"{point.module}:{point.attr}")
    return {name: sorted(paths) for name, paths in found.items()}


def _check_kind(kind: str) -> None:
    if kind not in _BUILTIN:
        raise RegistryError(f"unknown kind {kind!r}; known: {', '.join(_BUILTIN)}")
