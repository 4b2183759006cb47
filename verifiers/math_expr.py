"""Expressions as nested tuples, their exact rational value, and their numeric value.

Nodes: ("num", Fraction-as-str) ("sym", name) ("const", pi|e|i|inf) ("add", ...) ("mul", ...)
("pow", base, exponent) ("root", x, n) ("fn", name, args...) ("fact", n) ("binom", n, k)
("abs", x) ("floor", x) ("ceil", x) ("sum"|"prod", variable, low, high, body)
("int", variable, low, high, body) ("percent", x).

They go to the worker as JSON, so they hold strings and tuples only. Sizes are bounded before any
arithmetic: a power tower or a huge factorial raises TooBig instead of being computed.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

Node = tuple[Any, ...]

MAX_BITS = 1 << 16
"""Bits of the largest numerator or denominator that is computed exactly; see `allow_bits`."""
MAX_TERMS = 10_000
"""Terms of the longest sum or product that is added up."""


class NotRational(Exception):
    """The expression has no value that we compute exactly."""


class TooBig(Exception):
    """Computing the value would take more than it is worth."""


class Undefined(Exception):
    """0/0, log 0 and their like: equal to nothing."""


def allow_bits(bits: int) -> None:
    """Raise MAX_BITS for this process: a worker may compute longer than its parent may block."""
    global MAX_BITS
    MAX_BITS = bits


def num(value: int | str | Fraction) -> Node:
    return ("num", str(Fraction(value)))


ONE, MINUS_ONE, ZERO = num(1), num(-1), num(0)


def _sorted(parts: list[Node]) -> tuple[Node, ...]:
    return tuple(sorted(parts, key=repr))


def add(*parts: Node) -> Node:
    flat: list[Node] = []
    for part in parts:
        flat.extend(part[1:] if part[0] == "add" else [part])
    return flat[0] if len(flat) == 1 else ("add", *_sorted(flat))


def mul(*parts: Node) -> Node:
    flat: list[Node] = []
    for part in parts:
        flat.extend(part[1:] if part[0] == "mul" else [part])
    signs = sum(part == MINUS_ONE for part in flat)
    flat = [part for part in flat if part not in (ONE, MINUS_ONE)]
    if signs % 2:
        if flat and all(part[0] == "num" for part in flat[:1]):
            flat[0] = num(-Fraction(flat[0][1]))
        else:
            flat.append(MINUS_ONE)
    if not flat:
        return ONE
    return flat[0] if len(flat) == 1 else ("mul", *_sorted(flat))


def neg(node: Node) -> Node:
    return mul(MINUS_ONE, node)


def power(base: Node, exponent: Node) -> Node:
    return base if exponent == ONE else ("pow", base, exponent)


def divide(over: Node, under: Node) -> Node:
    return mul(over, power(under, MINUS_ONE))


def symbols(node: Node) -> frozenset[str]:
    """Free variables."""
    if node[0] == "sym":
        return frozenset((node[1],))
    if node[0] in ("num", "const"):
        return frozenset()
    if node[0] in ("sum", "prod", "int"):
        return (symbols(node[4]) - {node[1]}) | symbols(node[2]) | symbols(node[3])
    found: frozenset[str] = frozenset()
    for part in node[1:]:
        if isinstance(part, tuple):
            found |= symbols(part)
    return found


def contains(node: Node, *kinds: str) -> bool:
    """Does a node of one of these kinds (or a constant of this name) occur?"""
    if node[0] in kinds or (node[0] == "const" and node[1] in kinds):
        return True
    return any(contains(part, *kinds) for part in node[1:] if isinstance(part, tuple))


def substitute(node: Node, change: Callable[[Node], Node | None]) -> Node:
    """The node with every sub-node for which `change` returns something replaced."""
    new = change(node)
    if new is not None:
        return new
    return (
        node[0],
        *(substitute(part, change) if isinstance(part, tuple) else part for part in node[1:]),
    )


# --- exact -------------------------------------------------------------------------------------


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise TooBig
    return value


def integer_root(value: int, degree: int) -> int | None:
    """The exact degree-th root of a non-negative integer, or None."""
    if value < 2:
        return value
    if degree > value.bit_length():
        return None
    guess = 1 << -(-value.bit_length() // degree)
    while True:  # Newton from above
        lower = ((degree - 1) * guess + value // guess ** (degree - 1)) // degree
        if lower >= guess:
            return guess if guess**degree == value else None
        guess = lower


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        if exponent.denominator > 64 or (base < 0 and exponent.denominator % 2 == 0):
            raise NotRational
        over = integer_root(abs(base.numerator), exponent.denominator)
        under = integer_root(base.denominator, exponent.denominator)
        if over is None or under is None:
            raise NotRational
        root = Fraction(over if base >= 0 else -over, under)
        return _exact_power(root, Fraction(exponent.numerator))
    if base == 0:
        if exponent <= 0:
            raise Undefined
        return base
    if abs(base) == 1:
        return base if exponent.numerator % 2 else Fraction(1)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(exponent.numerator) > 2 * MAX_BITS:
        raise TooBig
    return _bounded(base**exponent.numerator)


def _whole(node: Node, limit: int) -> int:
    value = exact(node)
    if value.denominator != 1:
        raise NotRational
    if abs(value.numerator) > limit:
        raise TooBig
    return value.numerator


def exact(node: Node) -> Fraction:
    """The rational value.

    Raises:
        NotRational: it has none that we compute exactly.
        TooBig: its numerator or denominator would have more than MAX_BITS bits.
        Undefined: 0/0 and its like.
    """
    kind = node[0]
    if kind == "num":
        return Fraction(node[1])
    if kind == "add":
        total = Fraction(0)
        for part in node[1:]:
            total = _bounded(total + exact(part))
        return total
    if kind == "mul":
        product = Fraction(1)
        for part in node[1:]:
            product = _bounded(product * exact(part))
        return product
    if kind == "pow":
        return _exact_power(exact(node[1]), exact(node[2]))
    if kind == "root":
        return _exact_power(exact(node[1]), 1 / Fraction(_whole(node[2], 64) or 65))
    if kind == "fact":
        value = _whole(node[1], MAX_BITS // 13)  # n! has over 13 n bits from here on
        if value < 0:
            raise Undefined
        return _bounded(Fraction(math.factorial(value)))
    if kind == "binom":
        over, under = _whole(node[1], 20_000), _whole(node[2], 20_000)
        if over < 0 or under < 0:
            raise NotRational
        return _bounded(Fraction(math.comb(over, under)))
    if kind == "abs":
        return abs(exact(node[1]))
    if kind == "percent":
        return exact(node[1]) / 100
    if kind == "floor":
        return Fraction(math.floor(exact(node[1])))
    if kind == "ceil":
        return Fraction(math.ceil(exact(node[1])))
    if kind == "fn" and node[1] in ("gcd", "lcm", "max", "min"):
        values = [exact(part) for part in node[2:]]
        if node[1] in ("max", "min"):
            return max(values) if node[1] == "max" else min(values)
        if all(value.denominator == 1 for value in values):
            integers = [value.numerator for value in values]
            return Fraction(math.gcd(*integers) if node[1] == "gcd" else math.lcm(*integers))
    raise NotRational


# --- numeric -----------------------------------------------------------------------------------


class Numbers:
    """Complex doubles. The worker has a subclass for mpmath, so that there is one evaluator."""

    pi: Any = math.pi
    e: Any = math.e
    i: Any = 1j

    def __init__(self) -> None:
        self.scale: Any = 0.0
        """The largest term of any sum so far: what cancellation is measured against."""
        self.tiny: Any = None
        """The smallest, which is lost without enough digits."""

    def note(self, terms: list[Any]) -> None:
        sizes = [size for size in map(abs, terms) if size]
        if sizes:
            self.scale = max(self.scale, *sizes)
            self.tiny = min(sizes if self.tiny is None else [self.tiny, *sizes])

    max_terms = 0
    """Terms of a sum that may be added up here; 0 leaves sums to the worker."""

    def number(self, value: Fraction) -> Any:
        return complex(value.numerator / value.denominator)

    def power(self, base: Any, exponent: Any) -> Any:
        return base**exponent

    def function(self, name: str, args: list[Any]) -> Any:
        return _FUNCTIONS[name](*args)

    def real(self, value: Any) -> float:
        if abs(value.imag) > 1e-9 * (1 + abs(value.real)):
            raise NotRational
        return float(value.real)

    def integral(self, node: Node, env: Mapping[str, Any]) -> Any:
        raise NotRational


def _gamma(value: complex) -> complex:
    if abs(value.imag) > 1e-12:
        raise NotRational
    return complex(math.gamma(value.real))


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sin": cmath.sin, "cos": cmath.cos, "tan": cmath.tan, "asin": cmath.asin, "acos": cmath.acos,
    "atan": cmath.atan, "sinh": cmath.sinh, "cosh": cmath.cosh, "tanh": cmath.tanh,
    "ln": cmath.log, "exp": cmath.exp, "gamma": _gamma,
    "sec": lambda x: 1 / cmath.cos(x), "csc": lambda x: 1 / cmath.sin(x),
    "cot": lambda x: 1 / cmath.tan(x), "log": lambda x, b: cmath.log(x) / cmath.log(b),
    "re": lambda x: complex(x.real), "im": lambda x: complex(x.imag),
    "conj": lambda x: x.conjugate(),
}  # fmt: skip
FUNCTIONS = frozenset(_FUNCTIONS) | {"gcd", "lcm", "max", "min"}


def evaluate(node: Node, env: Mapping[str, Any], numbers: Numbers) -> Any:
    """The numeric value with variables from `env`.

    Raises:
        NotRational: something in it that is not evaluated here.
        TooBig, Undefined, OverflowError, ZeroDivisionError, ValueError: no value.
    """
    kind = node[0]
    if kind == "num":
        return numbers.number(Fraction(node[1]))
    if kind == "sym":
        return env[node[1]]
    if kind == "const":
        if node[1] == "inf":
            raise NotRational
        return {"pi": numbers.pi, "e": numbers.e, "i": numbers.i}[node[1]]
    if kind == "add":
        terms = [evaluate(part, env, numbers) for part in node[1:]]
        numbers.note(terms)
        return sum(terms[1:], terms[0])
    if kind == "percent":
        return evaluate(node[1], env, numbers) / 100
    if kind == "mul":
        product = evaluate(node[1], env, numbers)
        for part in node[2:]:
            product = product * evaluate(part, env, numbers)
        return product
    if kind in ("pow", "root"):
        return _power(node, env, numbers)
    if kind == "fact":
        return numbers.function("gamma", [evaluate(node[1], env, numbers) + 1])
    if kind == "binom":
        n, k = evaluate(node[1], env, numbers), evaluate(node[2], env, numbers)
        gamma = numbers.function
        return gamma("gamma", [n + 1]) / gamma("gamma", [k + 1]) / gamma("gamma", [n - k + 1])
    if kind == "abs":
        return numbers.number(Fraction(1)) * abs(evaluate(node[1], env, numbers))
    if kind in ("floor", "ceil"):
        value = numbers.real(evaluate(node[1], env, numbers))
        return numbers.number(Fraction(math.floor(value) if kind == "floor" else math.ceil(value)))
    if kind in ("sum", "prod"):
        return _series(node, env, numbers)
    if kind == "int":
        return numbers.integral(node, env)
    if kind == "fn":
        args = [evaluate(part, env, numbers) for part in node[2:]]
        if node[1] in ("max", "min"):
            reals = [numbers.real(value) for value in args]
            return numbers.number(Fraction(max(reals) if node[1] == "max" else min(reals)))
        return numbers.function(node[1], args)
    raise NotRational


def _power(node: Node, env: Mapping[str, Any], numbers: Numbers) -> Any:
    base, exponent_node = evaluate(node[1], env, numbers), node[2]
    if node[0] == "root":
        exponent_node = divide(ONE, exponent_node)
    try:
        exponent = exact(exponent_node)
    except (NotRational, TooBig, Undefined):
        return numbers.power(base, evaluate(exponent_node, env, numbers))
    if exponent == 0 and base == 0:
        raise Undefined
    # People mean the real root: (-8)^(1/3) = -2.
    odd = exponent.denominator % 2 == 1 and exponent.denominator > 1
    if odd and base.imag == 0 and base.real < 0:
        value = numbers.power(-base, numbers.number(exponent))
        return -value if exponent.numerator % 2 else value
    return numbers.power(base, numbers.number(exponent))


def _series(node: Node, env: Mapping[str, Any], numbers: Numbers) -> Any:
    kind, variable, low, high, body = node
    first, last = (numbers.real(evaluate(end, env, numbers)) for end in (low, high))
    if first != int(first) or last != int(last):
        raise NotRational
    if last - first >= numbers.max_terms:
        raise TooBig if numbers.max_terms else NotRational
    total = numbers.number(Fraction(0 if kind == "sum" else 1))
    for index in range(int(first), int(last) + 1):
        term = evaluate(body, {**env, variable: numbers.number(Fraction(index))}, numbers)
        total = total + term if kind == "sum" else total * term
    return total
