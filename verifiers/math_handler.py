"""What a math worker does: decide whether two expressions are equal, with mpmath and sympy.

Run only in a worker process (`worker`), which has a deadline, an alarm and a memory limit. The
request is {"mode": "value" | "ratio" | "positive", "a": node, "b": node} with nodes of `math_expr`
as JSON lists; the answer is {"equal": bool, "how": str}. No text is ever parsed or evaluated here.

Numbers made with roots are compared at as many digits as prove the verdict (`math_bound`). Other
values are compared at 50 and then at least 250 digits (more where terms of very different size are
added), at several points where there are variables. That is no proof, but a wrong answer that agrees
to 250 digits with a right one is not written by accident; integers and fractions are compared exactly
and never come here unless they are huge.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import mpmath
import sympy
from mpmath import mp

from mintrl_env.verifiers.math_bound import separation
from mintrl_env.verifiers.math_expr import (
    MAX_TERMS,
    Node,
    NotRational,
    Numbers,
    TooBig,
    Undefined,
    add,
    allow_bits,
    contains,
    evaluate,
    exact,
    neg,
    symbols,
)
from mintrl_env.verifiers.math_value import POSITIVE_SAMPLES, SAMPLES, environment

allow_bits(1 << 21)
_MAX_EXPONENT_BITS = 1 << 24
"""Binary exponent of the largest number that mpmath is let make."""

_MAX_DIGITS = 12_000
_COUNTS = 16
"""Whole numbers at which sums with a variable end are compared."""

_MP_FUNCTIONS: dict[str, Any] = {
    **{name: getattr(mp, name) for name in (
        "sin cos tan asin acos atan sinh cosh tanh ln exp gamma sec csc cot re im conj".split()
    )},
    "log": lambda x, base: mp.ln(x) / mp.ln(base),
}  # fmt: skip
_NO_VALUE = (Undefined, ArithmeticError, ValueError, mpmath.libmp.libhyper.NoConvergence)


class _Digits(Numbers):
    """mpmath at the current precision."""

    max_terms = MAX_TERMS

    def __init__(self) -> None:
        super().__init__()
        self.pi, self.e, self.i = +mp.pi, +mp.e, mp.mpc(0, 1)
        self.scale = mp.mpf(0)

    def number(self, value: Fraction) -> Any:
        return mp.mpf(value.numerator) / value.denominator

    def power(self, base: Any, exponent: Any) -> Any:
        if base and abs(exponent) * (abs(mp.log(abs(base), 2)) + 1) > _MAX_EXPONENT_BITS:
            raise TooBig
        return mp.power(base, exponent)

    def function(self, name: str, args: list[Any]) -> Any:
        if name not in _MP_FUNCTIONS:
            raise NotRational
        if max(abs(arg) for arg in args) > _MAX_EXPONENT_BITS and name in ("exp", "gamma"):
            raise TooBig
        return _MP_FUNCTIONS[name](*args)

    def real(self, value: Any) -> Any:
        if abs(value.imag) > mp.mpf(10) ** (-mp.dps // 2) * (1 + abs(value.real)):
            raise NotRational
        return value.real

    def integral(self, node: Node, env: Mapping[str, Any]) -> Any:
        _, variable, low, high, body = node
        ends = [evaluate(end, env, self) for end in (low, high)]
        noted = self.scale, self.tiny
        value = mp.quad(lambda x: evaluate(body, {**env, variable: x}, self), ends)
        self.scale, self.tiny = noted  # sums inside an integrand say nothing about cancellation
        return value


def handle(request: dict[str, Any]) -> dict[str, Any]:
    """Answer one request; raises what the computation raises."""
    mode, a, b = request["mode"], _node(request["a"]), _node(request["b"])
    for side in (a, b):
        if _has_bomb(side):
            return {"equal": False, "how": "too large to compute"}
    if mode == "value":
        return _values(a, b)
    return {"equal": _ratio(a, b, positive=mode == "positive"), "how": "numeric"}


def _node(value: Any) -> Any:
    return tuple(_node(part) for part in value) if isinstance(value, list) else value


def _has_bomb(node: Node) -> bool:
    """A constant part whose exact value would be gigantic, though all of it is arithmetic."""
    if node[0] in ("pow", "fact", "binom"):
        try:
            exact(node)
        except TooBig:
            return True
        except (NotRational, Undefined):
            pass
    return any(_has_bomb(part) for part in node[1:] if isinstance(part, tuple) and part)


def _values(a: Node, b: Node) -> dict[str, Any]:
    names = symbols(a) | symbols(b)
    if not names:
        try:
            return {"equal": exact(a) == exact(b), "how": "exact"}
        except TooBig:
            return {"equal": False, "how": "too large to compute"}
        except Undefined:
            return {"equal": False, "how": "undefined"}
        except NotRational:
            pass
        proof = _algebraic(a, b)
        if proof is not None:
            return proof
    counted = _counted(a) | _counted(b)
    integral = contains(a, "int") or contains(b, "int")
    try:
        usable = 0
        digits = 25 if integral else 50
        for _ in range(2):
            needed = 250
            for sample in range(_COUNTS if counted else len(SAMPLES) if names else 1):
                verdict, span = _agree(a, b, names, counted, sample, digits)
                if verdict is False:
                    return {"equal": False, "how": f"{digits} digits"}
                usable += verdict is True and (bool(counted) or sample < POSITIVE_SAMPLES)
                needed = max(needed, span + 50)
            if integral or needed > _MAX_DIGITS:
                break
            digits = needed
        if needed > _MAX_DIGITS:
            return {"equal": False, "how": "too many digits to compare"}
        if usable:
            return {"equal": True, "how": f"{digits} digits"}
    except TooBig:
        return {"equal": False, "how": "too large to compute"}
    except NotRational:
        pass
    return {"equal": _symbolic(a, b), "how": "symbolic"}


def _algebraic(a: Node, b: Node) -> dict[str, Any] | None:
    """Numbers made with roots: a proof, by as many digits as the separation bound asks for."""
    difference = add(a, neg(b))
    try:
        found = separation(difference)
        if found is None:
            return None
        digits, degree = found
        with mp.workdps(30):
            numbers = _Digits()
            evaluate(difference, {}, numbers)
            size = max(0, int(mp.log10(numbers.scale or 1)))
        # A root of what cancels loses its share of the digits: `degree` times as many are enough.
        needed = degree * (digits + 10) + size + 10
        if needed > _MAX_DIGITS:
            return None
        with mp.workdps(needed):
            value = evaluate(difference, {}, _Digits())
            equal = bool(abs(value) < mp.mpf(10) ** -digits / 2)
    except (TooBig, NotRational, *_NO_VALUE):
        return None
    return {"equal": equal, "how": f"{needed} digits, a proof"}


def _agree(
    a: Node, b: Node, names: frozenset[str], counted: frozenset[str], sample: int, digits: int
) -> tuple[bool | None, int]:
    """Do both agree at a sample point (None: one has no (real) value there), and how many decimal
    orders lie between the largest and the smallest term of their sums.
    """
    with mp.workdps(digits + 15):
        env = {
            name: mp.mpf(repr(value))
            for name, value in environment(
                names, sample % POSITIVE_SAMPLES if counted else sample
            ).items()
        }
        for index, name in enumerate(sorted(counted)):  # the ends of a sum are whole numbers
            env[name] = mp.mpf(sample + 1 + 2 * index)
        numbers = _Digits()
        try:
            one, other = evaluate(a, env, numbers), evaluate(b, env, numbers)
        except _NO_VALUE:
            return (None if names else False), 0
        if not (mp.isfinite(one) and mp.isfinite(other)):
            return (None if names else False), 0
        span = int(mp.log10(numbers.scale / numbers.tiny)) if numbers.tiny else 0
        size = max(abs(one), abs(other))
        tolerance = mp.mpf(10) ** -(digits - 10)
        if not one or not other:  # an exact zero is reached by cancellation only
            size = max(size, numbers.scale)
        if abs(one - other) <= tolerance * size:
            return True, span
        if digits <= span:
            return None, span  # lost in cancellation at so few digits
        real = all(abs(mp.im(value)) <= tolerance * size for value in (one, other))
        return (False if counted or sample < POSITIVE_SAMPLES or real else None), span


def _ratio(a: Node, b: Node, *, positive: bool) -> bool:
    """Is a = c b for a constant c, not 0 (or c > 0)?"""
    names = symbols(a) | symbols(b)
    with mp.workdps(60):
        ratios = []
        for sample in range(len(SAMPLES)):
            env = {name: mp.mpf(repr(v)) for name, v in environment(names, sample).items()}
            try:
                one, other = (evaluate(side, env, _Digits()) for side in (a, b))
                ratios.append(one / other)
            except (*_NO_VALUE, NotRational, TooBig):
                continue
        if len(ratios) < 2 or not ratios[0] or not all(mp.isfinite(r) for r in ratios):
            return False
        if any(abs(ratio - ratios[0]) > abs(ratios[0]) * mp.mpf(10) ** -45 for ratio in ratios):
            return False
        first = ratios[0]
        return not positive or (abs(mp.im(first)) < abs(first) / 10**40 and mp.re(first) > 0)


def _symbolic(a: Node, b: Node) -> bool:
    """Sums with a variable or infinite end, and what else has no plain numeric value."""
    counted = _counted(a) | _counted(b)
    table = {
        name: sympy.Symbol(name, positive=True, integer=name in counted or None)
        for name in symbols(a) | symbols(b)
    }
    try:
        difference = _sympy(a, table) - _sympy(b, table)
        return bool(sympy.simplify(difference.doit()) == 0)
    except (NotRational, KeyError):
        return False


def _counted(node: Node) -> frozenset[str]:
    found = symbols(node[2]) | symbols(node[3]) if node[0] in ("sum", "prod") else frozenset()
    for part in node[1:]:
        if isinstance(part, tuple) and part:
            found |= _counted(part)
    return found


def _sympy(node: Node, table: Mapping[str, Any]) -> Any:
    kind = node[0]
    if kind == "num":
        return sympy.Rational(node[1])
    if kind == "sym":
        return table[node[1]]
    if kind == "const":
        return {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "inf": sympy.oo}[node[1]]
    if kind in ("sum", "prod", "int"):
        index = sympy.Symbol(node[1], integer=True) if kind != "int" else sympy.Symbol(node[1])
        low, high = _sympy(node[2], table), _sympy(node[3], table)
        if kind != "int" and (high - low).is_number and high.is_finite and high - low > MAX_TERMS:
            raise NotRational
        make = {"sum": sympy.Sum, "prod": sympy.Product, "int": sympy.Integral}[kind]
        return make(_sympy(node[4], {**table, node[1]: index}), (index, low, high))
    if kind == "fn" and node[1] not in ("max", "min", "gcd", "lcm", "gamma"):
        args = [_sympy(part, table) for part in node[2:]]
        name = "conjugate" if node[1] == "conj" else str(node[1])
        return getattr(sympy, name)(*args)
    make = {
        "add": sympy.Add, "mul": sympy.Mul, "pow": sympy.Pow, "root": sympy.root,
        "fact": sympy.factorial, "binom": sympy.binomial, "abs": sympy.Abs,
        "floor": sympy.floor, "ceil": sympy.ceiling, "percent": lambda x: x / 100,
    }.get(kind)  # fmt: skip
    if make is None:
        raise NotRational
    return make(*(_sympy(part, table) for part in node[1:]))
