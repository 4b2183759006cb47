r"""The expression half of the parser: sums, products, powers, functions, brackets, LaTeX commands.

Recursive descent with bounded nesting. Lists and relations inside brackets are `math_parse`'s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from fractions import Fraction

from mintrl_env.verifiers.math_expr import (
    MINUS_ONE,
    Node,
    add,
    divide,
    mul,
    neg,
    num,
    power,
)
from mintrl_env.verifiers.math_normal import ParseError, Token
from mintrl_env.verifiers.math_units import is_unit_run, is_word_run

_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7",
          "eight": "8", "nine": "9", "ten": "10", "twelve": "12", "sixteen": "16"}  # fmt: skip
MAX_DEPTH = 30

CONSTANTS = {"pi": ("const", "pi"), "infty": ("const", "inf"), "infinity": ("const", "inf"),
              "inf": ("const", "inf")}  # fmt: skip
_GREEK = frozenset(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell hbar".split()
)
FUNCTION_NAMES = frozenset(
    "sin cos tan sec csc cot asin acos atan arcsin arccos arctan sinh cosh tanh ln log exp log10 "
    "gcd lcm max min sqrt".split()
)
DECORATIONS = frozenset("overline vec hat bar tilde overrightarrow widehat underline angle".split())
END = Token("end", "")
_DEGREE: Node = mul(("const", "pi"), num("1/180"))


class ExpressionParser(ABC):
    """Reads tokens; `at` is the place of the next one."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens, self.at, self.depth = tokens, 0, 0
        self.in_abs = self.in_braces = self.in_function = 0
        self.currency = ""  # a sign before the number, or a unit found within it

    # --- tokens

    def peek(self, ahead: int = 0) -> Token:
        at = self.at + ahead
        return self.tokens[at] if at < len(self.tokens) else END

    def next(self) -> Token:
        token = self.peek()
        self.at += 1
        return token

    def sees(self, *values: str) -> bool:
        token = self.peek()
        return token.kind in ("op", "cmd") and token.value in values

    def accept(self, *values: str) -> bool:
        if self.sees(*values):
            self.at += 1
            return True
        return False

    def expect(self, value: str) -> None:
        if not self.accept(value):
            raise ParseError(f"expected {value!r}, found {self.peek().value!r}")

    def enter(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ParseError("nested too deeply")

    @abstractmethod
    def command(self, token: Token) -> Node:
        """The value of a bracket or a LaTeX command, just taken."""

    @abstractmethod
    def function(self, name: str) -> Node:
        """The value of a named function, whose name was just taken."""

    @abstractmethod
    def items(self, *closers: str) -> list[Node]:
        """Answers up to (not including) a closing bracket."""

    # --- expressions

    def sum(self) -> Node:
        terms = [self._signed_term(first=True)]
        while self.sees("+", "-", "pm", "mp"):
            terms.append(self._signed_term(first=False))
        return add(*terms)

    def _signed_term(self, *, first: bool) -> Node:
        sign: list[Node] = []
        while self.sees("+", "-", "pm", "mp"):
            operator = self.next().value
            if operator == "-":
                sign.append(MINUS_ONE)
            elif operator != "+":
                sign.append((operator,))
        if not first or sign:
            return mul(*sign, self.term())
        return self.term()

    def term(self) -> Node:
        left = self.factor()
        while True:
            if self.accept("cdot", "times", "*"):
                left = mul(left, self._signed_factor())
            elif self.sees("/", "div") and self.peek(1).kind != "word":
                self.at += 1
                left = divide(left, self._signed_factor())
            elif self._starts_factor():
                left = mul(left, self.factor())
            else:
                return left

    def _signed_factor(self) -> Node:
        return neg(self._signed_factor()) if self.accept("-") else self.factor()

    def _starts_factor(self) -> bool:
        token = self.peek()
        if token.kind == "num":  # n 2^{n-2} is a product; two numbers side by side are not
            return token.spaced and self.tokens[self.at - 1].kind != "num"
        if token.kind == "run":
            return not (is_unit_run(token.value) and token.value not in FUNCTION_NAMES) and not (
                is_word_run(token.value)
                and token.value.lower() not in FUNCTION_NAMES
                and token.value not in CONSTANTS
            )
        if token.kind == "cmd":
            return (
                token.value in CONSTANTS
                or token.value in _GREEK
                or token.value in FUNCTION_NAMES
                or token.value in DECORATIONS
                or token.value
                in ("frac", "sqrt", "binom", "lfloor", "lceil", "sum", "prod", "int", "langle")
                or token.value.startswith("begin")
            )
        if token.kind == "op" and token.value.startswith("$"):
            return False
        return token.kind == "op" and (
            (token.value in ("(", "[", "{") and self.peek(1).kind != "word")
            or (token.value == "|" and not self.in_abs)
        )

    def factor(self) -> Node:
        base = self._mixed_number() or self.atom()
        while True:
            if self.accept("!"):
                base = ("fact", base)
            elif self.accept("%"):
                base = ("percent", base)
            elif self.accept("'"):
                base = ("sym", f"{base}'")
            elif self.sees("^"):
                self.at += 1
                base = power(base, self._exponent())
            elif self.sees("degree") and self.in_function:
                self.at += 1
                base = mul(base, _DEGREE)
            elif self.sees("degree") and self.in_braces:  # a numerator in degrees
                self.at += 1
                self.currency = "degree"
            elif self.sees("_"):
                base = self._subscript(base)
            else:
                return base

    def _mixed_number(self) -> Node | None:
        r"""`1\frac{1}{2}`, `1 1/2`: a whole number and a proper fraction, added."""
        whole, then = self.peek(), self.peek(1)
        if whole.kind != "num" or not whole.value.isdigit():
            return None
        start = self.at
        if then.kind == "cmd" and then.value == "frac":
            self.at += 2
            over, under = self._plain_integer(), self._plain_integer()
        elif (
            then.kind == "num"
            and then.spaced
            and self.peek(2).value == "/"
            and self.peek(3).kind == "num"
        ):
            over, under = then.value, self.peek(3).value
            self.at += 4
        else:
            return None
        if over and under and over.isdigit() and under.isdigit() and int(over) < int(under):
            return num(int(whole.value) + Fraction(int(over), int(under)))
        self.at = start
        return None

    def _plain_integer(self) -> str | None:
        if self.accept("{"):
            token = self.next()
            return token.value if token.kind == "num" and self.accept("}") else None
        return self._digit() if self.peek().kind == "num" else None

    def _digit(self) -> str:
        """One digit of the number ahead: TeX's reading of an argument without braces."""
        token = self.peek()
        digit, rest = token.value[0], token.value[1:]
        if rest:
            self.tokens[self.at] = Token("num", rest)
        else:
            self.at += 1
        return digit

    def _exponent(self) -> Node:
        if self.sees("{"):
            return self._braces()
        if self.accept("-"):
            return neg(self._exponent())
        token = self.peek()
        if token.kind == "run" and len(token.value) > 1:
            self._split_run()
        return self.factor() if self.sees("(", "[") else self._tight_atom()

    def _tight_atom(self) -> Node:
        """An atom and powers of it, without what multiplies it: x^2y is (x^2)y."""
        base = self.atom()
        if self.accept("^"):
            base = power(base, self._exponent())
        return base

    def _argument(self) -> Node:
        r"""The argument of \frac and its kind: a group, or one token."""
        if self.sees("{"):
            return self._braces()
        if self.peek().kind == "num":
            return num(self._digit())
        if self.peek().kind == "run":
            self._split_run()
        return self.atom()

    def _split_run(self) -> None:
        """Replace a run of letters by single letters, so that an exponent binds the last only."""
        token = self.peek()
        if len(token.value) > 1:
            letters = [Token("run", letter) for letter in token.value]
            self.tokens[self.at : self.at + 1] = letters

    def _braces(self) -> Node:
        self.expect("{")
        self.enter()
        self.in_braces += 1
        over = self.sum()
        if self.accept("choose"):
            over = ("binom", over, self.sum())
        elif self.accept("over"):
            over = divide(over, self.sum())
        self.in_braces -= 1
        self.depth -= 1
        self.expect("}")
        return over

    def _subscript(self, base: Node) -> Node:
        self.expect("_")
        if self.accept("{"):
            parts = []
            while not self.accept("}"):
                token = self.next()
                if token is END:
                    raise ParseError("braces that do not match")
                parts.append(token.value)
            index = "".join(parts)
        else:
            token = self.peek()
            index = self.next().value if token.kind != "num" else self._number_index()
        if base[0] == "num":
            digits = self.last_number
            if not index.isdigit():
                index = _BASES.get(index.lower(), "")
            if not index:
                raise ParseError("a number with a subscript that is no base")
            return ("base", digits, index)
        if base[0] != "sym":
            raise ParseError("a subscript on something that is no name")
        return ("sym", f"{base[1]}_{index}")

    def _number_index(self) -> str:
        return self.next().value

    last_number = ""

    def atom(self) -> Node:
        self.enter()
        try:
            return self._atom()
        finally:
            self.depth -= 1

    def _atom(self) -> Node:
        token = self.next()
        if token.kind == "num":
            return self._number(token.value)
        if token.kind in ("run", "roman"):
            return self._run(token)
        if token.kind == "op" and token.value.startswith("$"):
            self.currency = token.value[1:]
            return self._signed_factor()
        if token.kind == "word" or token is END:
            raise ParseError("a word where a value was expected" if token.value else "cut off")
        value = token.value
        if value in CONSTANTS:
            return CONSTANTS[value]
        if value in _GREEK:
            return ("sym", value)
        if value in FUNCTION_NAMES:
            return self.function(value)
        return self.command(token)

    def _number(self, value: str) -> Node:
        self.last_number = value
        if (self.sees("overline", "dot", "bar") and "." in value) or (
            self.sees(".") and (self.peek(1).value in ("overline", "dot", "bar"))
        ):
            self.accept(".")
            self.at += 1
            digits = self._raw_argument()
            if digits.isdigit():
                whole, _, fraction = value.partition(".")
                shift, period = 10 ** len(fraction), 10 ** len(digits) - 1
                exact_part = Fraction(int(whole + fraction or "0"), shift)
                return num(exact_part + Fraction(int(digits), shift * period))
            raise ParseError("a bar over something that is no digit")
        return num(value if not value.startswith(".") else "0" + value)

    def _run(self, token: Token) -> Node:
        value = token.value
        lower = value.lower()
        if lower in FUNCTION_NAMES and len(value) > 1:
            return self.function(lower)
        if lower in ("pi", "infinity", "inf", "infty"):
            return CONSTANTS[lower]
        if lower in ("theta", "alpha", "beta", "phi", "lambda"):
            return ("sym", lower)
        for name in ("sin", "cos", "tan", "log", "sqrt", "ln"):
            if lower.startswith(name) and len(value) == len(name) + 1:
                self.tokens.insert(self.at, Token("run", value[-1]))
                return self.function(name)
        if lower.endswith("pi") and len(value) == 3:
            return mul(_letter(value[0]), CONSTANTS["pi"])
        if is_word_run(value):
            raise ParseError("a word where a value was expected")
        if len(value) > 1:
            self.at -= 1
            self._split_run()
            self.at += 1
            value = value[0]
        return _letter(value)

    def _raw_argument(self) -> str:
        """The tokens of an argument as text, for decorations."""
        if not self.accept("{"):
            token = self.next()
            return token.value
        depth, parts = 1, []
        while depth:
            token = self.next()
            if token is END:
                raise ParseError("braces that do not match")
            if token.kind == "op":
                depth += {"{": 1, "}": -1}.get(token.value, 0)
            if depth:
                parts.append(token.value)
        return "".join(parts)


def _letter(letter: str) -> Node:
    return ("const", letter) if letter in "ei" else ("sym", letter)
