"""How close to zero an expression in radicals can come without being zero.

The separation bound of Burnikel, Funke, Mehlhorn, Schirra and Schmitt ("A separation bound for real
algebraic expressions", 2001): the value is written as U/L with algebraic integers U and L whose
conjugates are all at most 2^u and 2^l; its degree is at most D, the product of the indices of the
distinct roots. A value that is not zero is then at least 2^-(l + (D - 1) u). So enough digits prove
that two numbers such as sqrt(50) and 5 sqrt(2) are equal, and that 2^9 sqrt(2^20 + 2) - 2^19 is no
integer.
"""

from __future__ import annotations

import math
from fractions import Fraction

from mintrl_env.verifiers.math_expr import Node, NotRational, exact

MAX_DEGREE = 64


def separation(node: Node) -> tuple[int, int] | None:
    """(decimal digits d, degree D): the value is 0 or at least 10^-d in size; None: no such bound.

    Raises:
        TooBig, Undefined: as `exact` does.
    """
    roots: set[Node] = set()
    try:
        u, low = _bits(node, roots)
    except NotRational:
        return None
    degree = math.prod(_index(root) for root in roots)
    if degree > MAX_DEGREE:
        return None
    return math.ceil((low + (degree - 1) * u) * math.log10(2)) + 1, degree


def _index(root: Node) -> int:
    return int(root[2])


def _log2(value: int) -> float:
    return math.log2(abs(value)) if value else 0.0


def _bits(node: Node, roots: set[Node]) -> tuple[float, float]:
    """The logarithms (u, l); adds (kind, radicand, index) of every root to `roots`."""
    kind = node[0]
    if kind in ("num", "fact", "binom", "percent"):
        value = exact(node)
        return _log2(value.numerator), _log2(value.denominator)
    if kind == "const" and node[1] == "i":
        roots.add(("root", ("num", "-1"), 2))
        return 0.0, 0.0
    if kind == "mul":
        parts = [_bits(part, roots) for part in node[1:]]
        return sum(u for u, _ in parts), sum(low for _, low in parts)
    if kind == "add":
        parts = [_bits(part, roots) for part in node[1:]]
        below = sum(low for _, low in parts)
        sizes = [u + below - low for u, low in parts]
        most = max(sizes)
        return most + math.log2(sum(2.0 ** (size - most) for size in sizes)), below
    if kind == "root":
        return _root(node[1], exact(node[2]), roots)
    if kind == "pow":
        exponent = exact(node[2])
        u, low = _root(node[1], Fraction(exponent.denominator), roots)
        if exponent < 0:
            u, low = low, u
        return u * abs(exponent.numerator), low * abs(exponent.numerator)
    raise NotRational


def _root(radicand: Node, index: Fraction, roots: set[Node]) -> tuple[float, float]:
    if index.denominator != 1 or not 1 <= index <= MAX_DEGREE:
        raise NotRational
    u, low = _bits(radicand, roots)
    k = index.numerator
    if k == 1:
        return u, low
    roots.add(("root", radicand, k))
    if u >= low:
        return (u + (k - 1) * low) / k, low
    return u, ((k - 1) * u + low) / k
