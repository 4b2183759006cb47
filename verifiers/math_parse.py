r"""From tokens to an answer: a bounded recursive-descent parser for what people write in a box.

An answer is an expression (see `math_expr`) or one of
("list", items...)      bare commas, "or", "and", +-: unordered
("set", items...)       braces
("seq", open, close, items...)   (a, b), [a, b): ordered, its ends matter
("matrix", ("row", ...)...)
("union"|"inter"|"minus", a, b)  of sets;  ("reals",) ("empty",)
("rel", (ops...), parts...)      a chain of =, <, <=, >, >=, !=, in; each part an answer
("label", name, expression)   the left side of an assignment: a name, f(x)
("ratio", items...)     a:b
("unit", name, expression)   ("percent", expression)
("base", digits, base)  ("text", words)  ("choice", letter, answer)  ("ldots",)
"""

from __future__ import annotations

import re
from fractions import Fraction

from mintrl_env.verifiers.math_expr import (
    FUNCTIONS,
    MINUS_ONE,
    ONE,
    Node,
    add,
    divide,
    mul,
    neg,
    num,
    power,
    substitute,
)
from mintrl_env.verifiers.math_normal import ParseError, Token, tokenize
from mintrl_env.verifiers.math_units import canonical_unit, is_unit_run, is_word_run

_NUMERAL = re.compile(
    r"(?:\\(?:text|mathrm|rm)\s?)?[({]?([0-9A-Fa-f]+)[)}]?\s?_\s?(?:\{\s?(-?\d+)\s?\}|(\d))"
)
"""A numeral with its base, whose digits may be letters."""
MAX_DEPTH = 30
MAX_ITEMS = 200

_RELATIONS = {"=": "=", "<": "<", ">": ">", "le": "<=", "ge": ">=", "ne": "!=", "in": "in",
              "approx": "~", "equiv": "=="}  # fmt: skip
_SEPARATORS = frozenset([",", ";", "or"])
_CONSTANTS = {"pi": ("const", "pi"), "infty": ("const", "inf"), "infinity": ("const", "inf"),
              "inf": ("const", "inf")}  # fmt: skip
_GREEK = frozenset(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon "
    "phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega ell hbar".split()
)
_FUNCTION_NAMES = frozenset(
    "sin cos tan sec csc cot asin acos atan arcsin arccos arctan sinh cosh tanh ln log exp log10 "
    "gcd lcm max min sqrt".split()
)
_DECORATIONS = frozenset("overline vec hat bar tilde overrightarrow widehat underline angle".split())
_OPENERS = {"(": ")", "[": "]", "langle": "rangle"}
_CLOSERS = frozenset([")", "]", "rangle"])
_END = Token("end", "")
_DEGREE: Node = mul(("const", "pi"), num("1/180"))


def parse(text: str, *, thousands: bool = True) -> Node:
    """The answer that `text` writes.

    Raises:
        ParseError: it is not mathematics that we read.
    """
    if numeral := _NUMERAL.fullmatch(text.strip(" $.")):
        digits, base = numeral.group(1), numeral.group(2) or numeral.group(3)
        if len(digits) < 200 and re.search("[0-9]", digits):
            return ("base", digits.upper(), base)
    try:
        tokens = tokenize(text, thousands=thousands)
        if not tokens:
            raise ParseError("empty")
        return _Parser(tokens).answer()
    except (RecursionError, ValueError, ZeroDivisionError, OverflowError) as error:
        # int() refuses more than 4300 digits with a ValueError
        raise error if isinstance(error, ParseError) else ParseError(str(error)) from None


class _Parser:
    def __init__(self, tokens: list[Token]) -> None:
        self.tokens, self.at, self.depth = tokens, 0, 0
        self.in_abs = self.in_braces = self.in_function = 0
        self.currency = ""  # a sign before the number, or a unit found within it

    # --- tokens

    def peek(self, ahead: int = 0) -> Token:
        at = self.at + ahead
        return self.tokens[at] if at < len(self.tokens) else _END

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

    # --- answers

    def answer(self) -> Node:
        choice = self._choice()
        if choice is not None:
            return choice
        items = self.items("end")
        if self.peek() is not _END:
            raise ParseError(f"cannot read {self.peek().value!r}")
        return items[0] if len(items) == 1 else ("list", *_flatten(items))

    def _choice(self) -> Node | None:
        """`(C) 12`, `C. 12`, `\textbf{(C)}\\ 12`: a letter and its value."""
        paren = self.sees("(")
        token = self.peek(1 if paren else 0)
        close = self.peek(2 if paren else 1)
        if token.kind not in ("word", "run") or token.value not in "ABCDEFGHIJ":
            return None
        if close.value not in ((")",) if paren else (")", ".", ":")) or close.kind != "op":
            return None
        after = self.at + (3 if paren else 2)
        if after >= len(self.tokens):
            return ("text", token.value.lower())
        follower = self.tokens[after]
        if follower.kind == "op" and follower.value not in ("(", "[", "-", "$dollar", "."):
            return None
        if token.kind == "run" and follower.value in ("(", "["):
            return None
        self.at = after
        return ("choice", token.value.lower(), self.answer())

    def items(self, *closers: str) -> list[Node]:
        """Items up to (not including) a closer; separators in a row count once."""
        found: list[Node] = []
        while True:
            while self.sees(*_SEPARATORS):
                self.at += 1
            token = self.peek()
            if token is _END or (token.kind in ("op", "cmd") and token.value in closers):
                return found or self._nothing(closers)
            found.extend(self.item())
            if len(found) > MAX_ITEMS:
                raise ParseError("too many items")
            token = self.peek()
            if token is _END or (token.kind in ("op", "cmd") and token.value in closers):
                return found
            if not self.sees(*_SEPARATORS):
                raise ParseError(f"cannot read {token.value!r}")

    @staticmethod
    def _nothing(closers: tuple[str, ...]) -> list[Node]:
        if "}" in closers:
            return []
        raise ParseError("empty")

    def item(self) -> list[Node]:
        """A relation or ratio; several where a +- stands for both signs."""
        self.enter()
        outer, self.currency = self.currency, ""
        if self.accept("ldots"):
            item: Node = ("ldots",)
        else:
            item = self.relation()
            if self.sees(":"):
                parts = [item]
                while self.accept(":"):
                    parts.append(self.relation())
                item = ("ratio", *parts)
        self.currency = outer
        self.depth -= 1
        return _both_signs(item)

    def relation(self) -> Node:
        operators: list[str] = []
        parts: list[Node] = []
        while True:
            start = self.at
            if not parts and self.sees("approx"):
                self.at += 1
                continue
            part = self.sets()
            if not parts and self._is_label(start):
                part = ("label", " ".join(t.value for t in self.tokens[start : self.at]), part)
            parts.append(part)
            token = self.peek()
            if token.kind not in ("op", "cmd") or token.value not in _RELATIONS:
                break
            operators.append(_RELATIONS[self.next().value])
        return parts[0] if not operators else ("rel", tuple(operators), *parts)

    def _is_label(self, start: int) -> bool:
        """Is what was just read, before an `=`, the head of a definition: f(x), f'(x), A, AB, x_1?"""
        if not (self.sees("=") or self.sees("approx") or self.sees("in")):
            return False
        tokens = self.tokens[start : self.at]
        values = [token.value for token in tokens]
        if all(token.kind == "word" for token in tokens):
            return True
        if tokens[0].kind == "cmd" and values[0] in ("angle", "triangle"):
            return True
        if tokens[0].kind not in ("run", "roman", "cmd", "word"):
            return False
        if "(" in values:
            opening = values.index("(")
            inner = values[opening + 1 : -1]
            return (
                values[-1] == ")"
                and all(v in ("'", "_", "{", "}") or tokens[i].kind in ("run", "num")
                        for i, v in enumerate(values[:opening]))
                and len(values[0]) == 1
                and all(v == "," or (v.isalnum() and len(v) <= 2) for v in inner)
            )  # fmt: skip
        if "_" in values:
            return values[1] == "_" and all(v.isalnum() or v in "_{}," for v in values)
        if any(token.kind != "run" for token in tokens):
            return False
        return len(tokens) == 1 and len(values[0]) == 1 or "".join(values).isupper()

    def sets(self) -> Node:
        left = self.quantity()
        while self.sees("cup", "cap", "setminus"):
            operator = {"cup": "union", "cap": "inter", "setminus": "minus"}[self.next().value]
            left = (operator, left, self.quantity())
        return left

    def quantity(self) -> Node:
        """A sum with its unit, or words."""
        if self._at_word():
            return self._words()
        value = self.sum()
        parts: list[str] = []
        while True:
            token = self.peek()
            if token.kind in ("word", "roman") or (
                token.kind == "run" and (is_unit_run(token.value) or is_word_run(token.value))
            ):
                parts.append(self.next().value)
            elif self.sees("(") and self.peek(1).kind == "word" and self.peek(2).value == ")":
                parts.append(self.peek(1).value)
                self.at += 3
            elif self.sees("degree"):
                self.at += 1
                parts.append("degree")
                if self.peek().kind in ("run", "roman") and self.peek().value in "CFK":
                    parts[-1] = "°" + self.next().value
            elif self.sees("pmod", "mod"):
                self.at += 1
                parts.append("mod" + self._raw_argument())
            elif parts and self.sees("^"):
                self.at += 1
                parts.append("^" + self._unit_exponent())
            elif parts and self.sees("/") and self.peek(1).kind in ("word", "run", "roman"):
                self.at += 1
                parts += ["/", self.next().value]
            elif parts and self.sees("cdot") and self.peek(1).kind in ("word", "roman"):
                self.at += 1
            elif parts and self.sees("."):
                self.at += 1
            else:
                break
        if len(parts) > 6:
            raise ParseError("prose after a value")
        unit = canonical_unit(parts)
        if unit.split(" ")[0] == "percent" and value[0] != "percent":
            return ("percent", value)
        unit = unit or self.currency
        return ("unit", unit, value) if unit else value

    def _unit_exponent(self) -> str:
        braced = self.accept("{")
        token = self.next()
        if token.kind != "num":
            raise ParseError("a unit's exponent must be a number")
        if braced:
            self.expect("}")
        return token.value

    def _at_word(self) -> bool:
        token = self.peek()
        return token.kind == "word" or (
            token.kind == "run"
            and is_word_run(token.value)
            and token.value.lower() not in _FUNCTION_NAMES
            and token.value.lower() not in _CONSTANTS
        )

    def _words(self) -> Node:
        words: list[str] = []
        while (token := self.peek()) is not _END:
            if token.kind in ("word", "run", "num", "roman"):
                words.append(token.value.lower())
            elif token.kind == "op" and token.value in "-'.!":
                pass
            else:
                break
            self.at += 1
        if len(words) > 1 and words[0] in ("a", "an", "the"):
            words = words[1:]
        return ("text", " ".join(words))

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
            return not (is_unit_run(token.value) and token.value not in _FUNCTION_NAMES) and not (
                is_word_run(token.value)
                and token.value.lower() not in _FUNCTION_NAMES
                and token.value not in _CONSTANTS
            )
        if token.kind == "cmd":
            return (
                token.value in _CONSTANTS
                or token.value in _GREEK
                or token.value in _FUNCTION_NAMES
                or token.value in _DECORATIONS
                or token.value
                in ("frac", "sqrt", "binom", "lfloor", "lceil", "sum", "prod", "int", "langle")
                or token.value.startswith("begin")
            )
        if token.kind == "op" and token.value.startswith("$"):
            return False
        return token.kind == "op" and (
            token.value in ("(", "[", "{") or (token.value == "|" and not self.in_abs)
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
                if token is _END:
                    raise ParseError("braces that do not match")
                parts.append(token.value)
            index = "".join(parts)
        else:
            token = self.peek()
            index = self.next().value if token.kind != "num" else self._number_index()
        if base[0] == "num":
            digits = self.last_number
            if not index.isdigit():
                names = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6",
                         "seven": "7", "eight": "8", "nine": "9", "ten": "10", "sixteen": "16"}  # fmt: skip
                index = names.get(index.lower(), "")
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
        if token.kind == "word" or token is _END:
            raise ParseError("a word where a value was expected" if token.value else "cut off")
        value = token.value
        if value in _CONSTANTS:
            return _CONSTANTS[value]
        if value in _GREEK:
            return ("sym", value)
        if value in _FUNCTION_NAMES:
            return self._function(value)
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
        if value in _DECORATIONS:
            return ("sym", value + ":" + self._raw_argument())
        if value == "emptyset":
            return ("empty",)
        if value == "mathbb":
            return self._blackboard()
        if value.startswith("begin"):
            return self._matrix(value[5:])
        raise ParseError(f"cannot read {value!r}")

    def _number(self, value: str) -> Node:
        self.last_number = value
        if self.sees("overline", "dot") and "." in value or self.sees(".") and (
            self.peek(1).value in ("overline", "dot")
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
        if lower in _FUNCTION_NAMES and len(value) > 1:
            return self._function(lower)
        if lower in ("pi", "infinity", "inf", "infty"):
            return _CONSTANTS[lower]
        if lower in ("theta", "alpha", "beta", "phi", "lambda"):
            return ("sym", lower)
        for name in ("sin", "cos", "tan", "log", "sqrt", "ln"):
            if lower.startswith(name) and len(value) == len(name) + 1:
                self.tokens.insert(self.at, Token("run", value[-1]))
                return self._function(name)
        if lower.endswith("pi") and len(value) == 3:
            return mul(_letter(value[0]), _CONSTANTS["pi"])
        if is_word_run(value):
            raise ParseError("a word where a value was expected")
        if len(value) > 1:
            self.at -= 1
            self._split_run()
            self.at += 1
            value = value[0]
        return _letter(value)

    def _function(self, name: str) -> Node:
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
        argument = self._function_argument()
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

    def _function_argument(self) -> Node:
        if self.sees("(", "{", "|", "["):
            argument = self.atom()
            if argument[0] == "seq":
                raise ParseError("a function of several arguments")
            return argument
        if self.accept("-"):
            return neg(self._function_argument())
        parts = [self.factor()]
        while True:
            token = self.peek()
            is_function = token.value.lower() in _FUNCTION_NAMES and token.kind in ("cmd", "run")
            if is_function and token.value != "sqrt":
                break
            if self.sees("(", "["):
                break
            if self.accept("/"):
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

    def _raw_argument(self) -> str:
        """The tokens of an argument as text, for decorations."""
        if not self.accept("{"):
            token = self.next()
            return token.value
        depth, parts = 1, []
        while depth:
            token = self.next()
            if token is _END:
                raise ParseError("braces that do not match")
            if token.kind == "op":
                depth += {"{": 1, "}": -1}.get(token.value, 0)
            if depth:
                parts.append(token.value)
        return "".join(parts)

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


_VALUES = frozenset(
    "num sym const add mul pow root fn fact binom abs floor ceil sum prod int pm mp percent".split()
) | FUNCTIONS


def _letter(letter: str) -> Node:
    return ("const", letter) if letter in "ei" else ("sym", letter)


def _flatten(items: list[Node]) -> list[Node]:
    flat: list[Node] = []
    for item in items:
        flat.extend(item[1:] if item[0] == "list" else [item])
    return flat


def _both_signs(item: Node) -> list[Node]:
    """The answers that +- and -+ stand for: all combinations, or the two of one pair of signs."""
    count = _count_signs(item)
    if not count:
        return [item]
    if count > 3:
        raise ParseError("too many signs")
    paired = _has(item, "mp")
    results: list[Node] = []
    for choice in range(2 if paired else 2**count):
        bits = [choice] * count if paired else [choice >> i & 1 for i in range(count)]
        results.append(_pick(item, bits))
    return list(dict.fromkeys(results))


def _has(node: Node, kind: str) -> bool:
    return node[0] == kind or any(_has(p, kind) for p in node[1:] if isinstance(p, tuple) and p)


def _count_signs(node: Node) -> int:
    if node[0] in ("pm", "mp"):
        return 1
    return sum(_count_signs(p) for p in node[1:] if isinstance(p, tuple) and p)


def _pick(node: Node, bits: list[int]) -> Node:
    if node[0] in ("pm", "mp"):
        negative = bits.pop(0) == (1 if node[0] == "pm" else 0)
        return MINUS_ONE if negative else ONE
    parts = [_pick(p, bits) if isinstance(p, tuple) and p else p for p in node[1:]]
    if node[0] == "mul":
        return mul(*parts)
    if node[0] == "add":
        return add(*parts)
    return (node[0], *parts)
