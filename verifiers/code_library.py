"""What snippets of test code use of the standard library without saying so.

In one namespace with the program, `assert math.isclose(f(1), 0.5)` would take whatever the program
calls `math`, and what a setup brings by `from math import *` would give way to the program's own.
So the tests import both by name.
"""

from __future__ import annotations

import ast
import builtins
import importlib
from collections.abc import Iterable, Sequence

MODULES = frozenset(
    "cmath collections functools itertools json math operator re statistics sys".split()
)
"""Modules that are meant wherever a snippet writes `name.something`."""
STARS = frozenset(
    "bisect cmath collections fractions functools heapq itertools math operator random re statistics "
    "string typing".split()
)
"""Modules that test code imports all of, and that are safe to look into here."""


def library_imports(setup: str, snippets: Sequence[str]) -> tuple[str, ...]:
    """Import statements for what a setup and its snippets, which can be parsed, need."""
    stars: list[str] = []
    used: set[str] = set()
    stored: set[str] = set()
    for node in _nodes((setup, *snippets)):
        if isinstance(node, ast.ImportFrom):
            if [alias.name for alias in node.names] == ["*"] and node.module in STARS:
                stars.append(node.module)
            stored.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            stored.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used.add(node.value.id)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            stored.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            stored.add(node.name)
        elif isinstance(node, ast.arg):
            stored.add(node.arg)
    lines = [f"import {name}" for name in sorted((used & MODULES) - stored)]
    return (*lines, *(f"from {name} import {', '.join(_public(name))}" for name in stars))


def calls_more_than_the_library(setup: str, snippets: Sequence[str]) -> bool:
    """Do the snippets call, by its bare name, something that neither they nor a setup nor the
    library has? That is what they test, then."""
    stored, called = set(), set()
    for node in _nodes((setup, *snippets)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.add(node.func.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            stored.add(node.name)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            stored.add(node.id)
        elif isinstance(node, ast.arg):
            stored.add(node.arg)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            stored.update(alias.asname or alias.name for alias in node.names)
            if isinstance(node, ast.ImportFrom) and node.module in STARS:
                stored.update(_public(node.module))
    return bool(called - stored - set(dir(builtins)))


def _nodes(sources: Iterable[str]) -> Iterable[ast.AST]:
    for source in sources:
        yield from ast.walk(ast.parse(source))


def _public(name: str) -> list[str]:
    module = importlib.import_module(name)
    return list(getattr(module, "__all__", None) or (n for n in dir(module) if n[0] != "_"))
