r"""The command half of the expressions: functions, roots, brackets, matrices, sums, integrals."""

from __future__ import annotations

from mintrl_env.verifiers.math_expr import (
    FUNCTIONS,
    MINUS_ONE,
    ONE,
    Node,
    contains,
    divide,
    mul,
    neg,
    num,
    power,
    substitute,
)
from mintrl_env.verifiers.math_grammar import (
    DECORATIONS,
    FUNCTION_NAMES,
    ExpressionParser,
)
from mintrl_env.verifiers.math_normal import ParseError, Token

MAX_ITEMS = 200
"""Entries of the largest matrix."""
_OPENERS = {"(": ")", "[": "]", "langle": "rangle"}
_CLOSERS = frozenset([")", "]", "rangle"])
_VALUES = FUNCTIONS.union(
    "num sym const add mul pow root fn fact binom abs floor ceil sum prod int pm mp".split(),
    ["percent"],
)
"""Kinds of nodes that have a value."""


class CommandParser(ExpressionParser):
    """Expressions whole; lists and relations inside brackets are still `items`'s."""

    def command(self, token: Token) -> Node:
        value = token.value
        if value in _OPENERS:
            return self._paren(value)
        if value == "{":
            if token.kind == "cmd":
                return self._set()
            self.at -= 1
            return self._braces()
        if value == "|":
            self.in_abs += 1
            inside = self.sum()
            self.in_abs -= 1
            self.expect("|")
            return ("abs", inside)
        if value in ("lfloor", "lceil"):
            inside = self.sum()
            self.expect("r" + value[1:])
            return (value[1:] if value == "lceil" else "floor", inside)
        if value == "frac":
            over = self._argument()
            return divide(over, self._argument())
        if value == "binom":
            over = self._argument()
            return ("binom", over, self._argument())
        if value in ("sum", "prod"):
            return self._series(value)
        if value == "int":
            return self._integral()
        if value in DECORATIONS:
            return ("sym", value + ":" + self._raw_argument())
        if value == "emptyset":
            return ("empty",)
        if value == "mathbb":
            return self._blackboard()
        if value.startswith("begin"):
            return self._matrix(value[5:])
        raise ParseError(f"cannot read {value!r}")

    def function(self, name: str) -> Node:
        name = {"arcsin": "asin", "arccos": "acos", "arctan": "atan"}.get(name, name)
        if name == "sqrt":
            return self._root()
        base: Node | None = None
        exponent: Node | None = None
        while self.sees("_", "^"):
            if self.next().value == "_":
                base = self._argument()
            else:
                exponent = self._exponent()
        if name in ("gcd", "lcm", "max", "min"):
            self.expect("(")
            args = self.items(")")
            self.expect(")")
            return ("fn", name, *args)
        self.in_function += 1
        argument = self._function_argument(trigonometric=name not in ("ln", "log", "log10", "exp"))
        self.in_function -= 1
        if exponent == MINUS_ONE and name in ("sin", "cos", "tan"):
            name, exponent = "a" + name, None
        if name == "log10" or (name == "log" and base is not None):
            value: Node = ("fn", "log", argument, base if base is not None else num(10))
        elif name == "log":
            value = ("fn", "log?", argument)  # base 10 or e: `math_equal` tries both
        else:
            value = ("fn", name, argument)
        return value if exponent is None else power(value, exponent)

    def _function_argument(self, *, trigonometric: bool) -> Node:
        if self.sees("(", "{", "|", "["):
            argument = self.atom()
            if argument[0] == "seq":
                raise ParseError("a function of several arguments")
            return argument
        if self.accept("-"):
            return neg(self._function_argument(trigonometric=trigonometric))
        parts = [self.factor()]
        while True:
            token = self.peek()
            is_function = token.value.lower() in FUNCTION_NAMES and token.kind in ("cmd", "run")
            if is_function and token.value != "sqrt":
                break
            if self.sees("(", "["):
                break
            # sin pi/6 is meant as sin(pi/6), but sin x/x as (sin x)/x
            turns = trigonometric and any(contains(part, "pi") for part in parts)
            if turns and self.peek(1).kind == "num" and self.accept("/"):
                parts.append(power(self.factor(), MINUS_ONE))
            elif self._starts_factor():
                parts.append(self.factor())
            else:
                break
        return mul(*parts)

    def _root(self) -> Node:
        degree: Node = num(2)
        if self.accept("["):
            degree = self.sum()
            self.expect("]")
        inside = self._braces() if self.sees("{") else self.atom()
        if inside[0] not in _VALUES:
            raise ParseError("a root of something that is no value")
        return ("root", inside, degree)

    def _paren(self, opening: str) -> Node:
        outer, self.in_abs = self.in_abs, 0
        items = self.items(*_CLOSERS)
        self.in_abs = outer
        token = self.next()
        if token.value not in _CLOSERS:
            raise ParseError("brackets that do not match")
        opening = "(" if opening == "langle" else opening
        closing = ")" if token.value == "rangle" else token.value
        if len(items) == 1:
            if _OPENERS[opening] != closing:
                raise ParseError("brackets that do not match")
            return items[0]
        return ("seq", opening, closing, *items)

    def _set(self) -> Node:
        builder = self.peek().kind == "run" and len(self.peek().value) == 1
        if builder and self.peek(1).kind == "op" and self.peek(1).value in ("|", ":"):
            self.at += 2  # {x | x > 3} is the answer x > 3
            conditions = self.items("}")
            self.expect("}")
            if len(conditions) != 1:
                raise ParseError("a set with several conditions")
            return conditions[0]
        items = self.items("}")
        if self.peek().kind != "cmd":
            raise ParseError("braces that do not match")
        self.expect("}")
        return ("set", *items) if items else ("empty",)

    def _blackboard(self) -> Node:
        name = self._raw_argument()
        if name != "R":
            return ("text", "mathbb" + name)
        return ("reals",)

    def _matrix(self, name: str) -> Node:
        if "matrix" not in name and name != "array":
            raise ParseError(f"unknown environment {name}")
        rows: list[Node] = []
        row: list[Node] = []
        while True:
            if self.accept("end" + name):
                break
            if self.accept("\\\\"):
                rows.append(("row", *row))
                row = []
            elif self.accept("&"):
                continue
            else:
                row.append(self.sum())
                if len(row) + len(rows) > MAX_ITEMS:
                    raise ParseError("too many items")
        if row:
            rows.append(("row", *row))
        if name.startswith("v"):
            raise ParseError("a determinant")
        return ("matrix", *rows)

    def _series(self, kind: str) -> Node:
        low: Node | None = None
        high: Node | None = None
        variable = ""
        while self.sees("_", "^"):
            if self.next().value == "_":
                self.expect("{")
                token = self.next()
                variable = token.value
                if token.kind != "run" or len(variable) != 1:
                    raise ParseError("a sum without a variable")
                self.expect("=")
                low = self.sum()
                self.expect("}")
            else:
                high = self._braces() if self.sees("{") else self._tight_atom()
        if low is None or high is None:
            raise ParseError("a sum without limits")
        return (kind, variable, low, high, self._bound(self.term(), variable))

    @staticmethod
    def _bound(body: Node, variable: str) -> Node:
        """The body of a sum: `i` and `e` there may be its variable."""

        def change(node: Node) -> Node | None:
            if node[0] == "const" and node[1] == variable:
                return ("sym", variable)
            if node[0] == "sym" and "_" in node[1] and variable in node[1].split("_", 1)[1]:
                raise ParseError("a sum over an indexed name")
            return None

        return substitute(body, change)

    def _integral(self) -> Node:
        low: Node | None = None
        high: Node | None = None
        while self.sees("_", "^"):
            if self.next().value == "_":
                low = self._argument()
            else:
                high = self._argument()
        for end in range(len(self.tokens) - 1, self.at - 1, -1):
            token = self.tokens[end]
            if token.kind == "run" and len(token.value) == 2 and token.value[0] == "d":
                break
        else:
            raise ParseError("an integral without its variable")
        if low is None or high is None:
            raise ParseError("an integral without limits")
        variable = token.value[1]
        rest = self.tokens[end + 1 :]
        self.tokens = self.tokens[:end]
        body = self.sum() if self.at < end else ONE
        if self.at < len(self.tokens):
            raise ParseError("an integral that we do not read")
        self.tokens = self.tokens + rest
        return ("int", variable, low, high, body)
