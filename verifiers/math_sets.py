"""Sets of real numbers from intervals, inequalities, unions and points, and when two are equal.

Two sets whose ends are known constants are equal when they agree at every end of either and in
every gap between neighbouring ends: no case analysis, and open and closed ends come out right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mintrl_env.verifiers.math_expr import Node, neg, symbols

INFINITY: Node = ("const", "inf")
_NEGATIVE_INFINITY = neg(INFINITY)
_FLIP = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "!=": "!="}


@dataclass(frozen=True, slots=True)
class Span:
    low: Node
    low_closed: bool
    high: Node
    high_closed: bool


@dataclass(frozen=True, slots=True)
class Points:
    values: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Combined:
    operator: str
    left: Tree
    right: Tree


Tree = Span | Points | Combined
_REALS = Span(_NEGATIVE_INFINITY, False, INFINITY, False)


@dataclass(frozen=True, slots=True)
class RealSet:
    """A set, and the name of the variable that ranges over it where the answer gives one."""

    tree: Tree
    variable: str = ""


def set_tree(node: Node) -> RealSet | None:
    """The set of reals that an answer writes; None if it writes none."""
    kind = node[0]
    if kind == "seq" and len(node) == 5 and not (_free(node[3]) or _free(node[4])):
        return RealSet(Span(node[3], node[1] == "[", node[4], node[2] == "]"))
    if kind == "reals":
        return RealSet(_REALS)
    if kind == "empty":
        return RealSet(Points(()))
    if kind == "set" and not any(_free(item) for item in node[1:]):
        return RealSet(Points(node[1:]))
    if kind in ("union", "inter", "minus"):
        return _combine(kind, set_tree(node[1]), set_tree(node[2]))
    if kind == "list":
        result = set_tree(node[1]) if node[1][0] == "rel" else None
        for item in node[2:]:
            result = _combine("union", result, set_tree(item))
        return result
    return _relation(node) if kind == "rel" else None


def _free(node: Node) -> bool:
    return bool(node[0] not in _PLAIN or symbols(node))


_PLAIN = frozenset("num const add mul pow root fn fact binom abs floor ceil percent".split())


def _combine(operator: str, left: RealSet | None, right: RealSet | None) -> RealSet | None:
    if left is None or right is None:
        return None
    if left.variable and right.variable and left.variable != right.variable:
        return None
    return RealSet(Combined(operator, left.tree, right.tree), left.variable or right.variable)


def _relation(node: Node) -> RealSet | None:
    operators = node[1]
    parts = [part[2] if part[0] == "label" else part for part in node[2:]]
    if operators == ("in",) and parts[0][0] == "sym":
        inner = set_tree(parts[1])
        return RealSet(inner.tree, parts[0][1]) if inner else None
    if any(operator not in _FLIP for operator in operators):
        return None
    if len(parts) == 2:
        left, right = parts
        operator = operators[0]
        if left[0] != "sym":
            left, right, operator = right, left, _FLIP[operator]
        if left[0] != "sym" or _free(right):
            return None
        if operator == "!=":
            return RealSet(Combined("minus", _REALS, Points((right,))), left[1])
        if operator[0] == "<":
            span = Span(_NEGATIVE_INFINITY, False, right, operator == "<=")
        else:
            span = Span(right, operator == ">=", INFINITY, False)
        return RealSet(span, left[1])
    if len(parts) == 3 and parts[1][0] == "sym" and "!=" not in operators:
        if operators[0][0] != operators[1][0] or _free(parts[0]) or _free(parts[2]):
            return None
        low, high, closed = parts[0], parts[2], [op.endswith("=") for op in operators]
        if operators[0][0] == ">":
            low, high, closed = high, low, closed[::-1]
        return RealSet(Span(low, closed[0], high, closed[1]), parts[1][1])
    return None


def _ends(tree: Tree) -> list[Node]:
    if isinstance(tree, Span):
        return [end for end in (tree.low, tree.high) if end not in (INFINITY, _NEGATIVE_INFINITY)]
    if isinstance(tree, Points):
        return list(tree.values)
    return _ends(tree.left) + _ends(tree.right)


def sets_equal(
    one: RealSet,
    other: RealSet,
    same: Callable[[Node, Node], bool],
    double: Callable[[Node], float | None],
) -> bool:
    """Do two sets hold the same reals? `same` decides equal ends, `double` orders them."""
    places: dict[Node, int] = {}
    known: list[tuple[float, Node]] = []
    for end in dict.fromkeys(_ends(one.tree) + _ends(other.tree)):
        value = double(end)
        if value is None:
            return False
        known.append((value, end))
    known.sort(key=lambda pair: pair[0])
    place = -1
    previous: tuple[float, Node] | None = None
    for value, end in known:
        near = previous is not None and abs(value - previous[0]) <= 1e-9 * max(1.0, abs(value))
        if not (near and previous is not None and same(previous[1], end)):
            place += 2  # odd places are ends, even ones the gaps between them
        places[end] = place
        previous = (value, end)
    last = place + 1
    return all(
        _holds(one.tree, cell, places, last) == _holds(other.tree, cell, places, last)
        for cell in range(last + 1)
    )


def _holds(tree: Tree, cell: int, places: dict[Node, int], last: int) -> bool:
    if isinstance(tree, Points):
        return any(places[value] == cell for value in tree.values)
    if isinstance(tree, Combined):
        left = _holds(tree.left, cell, places, last)
        right = _holds(tree.right, cell, places, last)
        if tree.operator == "union":
            return left or right
        return left and (right if tree.operator == "inter" else not right)

    def place(end: Node) -> int:
        if end == INFINITY:
            return last + 1
        return -1 if end == _NEGATIVE_INFINITY else places[end]

    low, high = place(tree.low), place(tree.high)
    return low < cell < high or (
        low <= high and ((cell == low and tree.low_closed) or (cell == high and tree.high_closed))
    )
