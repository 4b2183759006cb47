"""Are two expressions equal? Exact rationals first, doubles to say no, the oracle to say yes.

Two expressions that differ clearly at a sample point are different, whereas agreement in doubles
proves nothing and is confirmed by the oracle (`math_handler`, in a worker) with hundreds of digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mintrl_env.verifiers.math_expr import (
    Node,
    NotRational,
    Numbers,
    TooBig,
    Undefined,
    contains,
    evaluate,
    exact,
    num,
    substitute,
    symbols,
)

Oracle = Callable[[Node, Node, str], bool]
"""(a, b, mode) -> equal; mode "value", "ratio" (a = c b, c != 0) or "positive" (c > 0)."""

NO_VALUE = (NotRational, TooBig, Undefined, ArithmeticError, ValueError, KeyError, RecursionError)

SAMPLES: tuple[tuple[float, ...], ...] = (
    (3.3717, 2.7392, 5.1931, 4.6181, 1.5179, 6.1213, 2.4491, 7.8713),
    (5.6137, 1.8719, 0.2347, 7.3713, 3.2391, 2.5173, 6.9311, 4.7331),
    (-1.2713, 2.8391, -3.7177, 1.4391, -2.1173, 5.5391, -4.6731, 3.1931),
    (2.7931, -4.6373, 1.3391, -3.4793, 6.9731, -1.1397, 5.6713, -2.0713),
)
"""Values of the variables in alphabetical order: two points of positive ones, then mixed signs."""
POSITIVE_SAMPLES = 2


def environment(names: Iterable[str], sample: int) -> dict[str, float]:
    values = SAMPLES[sample]
    return {
        name: values[index % len(values)] * (1 + index // len(values) * 0.137)
        for index, name in enumerate(sorted(names))
    }


def expressions_equal(gold: Node, answer: Node, oracle: Oracle) -> bool:
    """Equal value, for all (positive) values of the variables where there are any."""
    if gold == answer:
        return True
    if _has_open_log(gold) or _has_open_log(answer):
        return any(
            expressions_equal(_read_log(gold, base), _read_log(answer, base), oracle)
            for base in (("const", "e"), num(10))
        )
    series = contains(gold, "sum", "prod", "int") or contains(answer, "sum", "prod", "int")
    if not series and (contains(gold, "inf") or contains(answer, "inf")):
        return False  # not written alike, as was seen above
    names, other_names = symbols(gold), symbols(answer)
    if bool(names) != bool(other_names):
        return False  # a free variable matches no number
    if not names:
        try:
            return exact(gold) == exact(answer)
        except Undefined:
            return False
        except (NotRational, TooBig):
            pass
    if _clearly_different(gold, answer, names | other_names):
        return False
    return oracle(gold, answer, "value")


def _has_open_log(node: Node) -> bool:
    return node[:2] == ("fn", "log?") or any(
        _has_open_log(part) for part in node[1:] if isinstance(part, tuple) and part
    )


def _read_log(node: Node, base: Node) -> Node:
    def change(part: Node) -> Node | None:
        if part[:2] == ("fn", "log?"):
            return ("fn", "log", _read_log(part[2], base), base)
        return None

    return substitute(node, change)


def double_value(node: Node, env: Mapping[str, Any]) -> tuple[complex, float]:
    """The value in doubles and the largest term that was added on the way."""
    numbers = Numbers()
    value = complex(evaluate(node, env, numbers))
    if not (math.isfinite(value.real) and math.isfinite(value.imag)):
        raise TooBig
    return value, float(numbers.scale)


def _clearly_different(gold: Node, answer: Node, names: frozenset[str]) -> bool:
    for sample in range(len(SAMPLES) if names else 1):
        env = environment(names, sample)
        try:
            one, scale = double_value(gold, env)
            other, other_scale = double_value(answer, env)
        except NO_VALUE:
            continue
        size = max(abs(one), abs(other))
        if max(scale, other_scale) > 1e7 * size:
            continue  # cancellation: the doubles say nothing
        real = abs(one.imag) < 1e-9 * size and abs(other.imag) < 1e-9 * size
        # At mixed signs only real values count: sqrt(1/n) = 1/sqrt(n) is meant for positive n.
        if abs(one - other) > 1e-6 * size and (sample < POSITIVE_SAMPLES or real):
            return True
    return False
