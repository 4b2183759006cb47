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

from mintrl_env.verifiers.math_commands import CommandParser
from mintrl_env.verifiers.math_expr import MINUS_ONE, ONE, Node, add, mul
from mintrl_env.verifiers.math_grammar import CONSTANTS, END, FUNCTION_NAMES
from mintrl_env.verifiers.math_normal import ParseError, tokenize
from mintrl_env.verifiers.math_units import canonical_unit, is_unit_run, is_word_run

_NUMERAL = re.compile(
    r"(?:\\(?:text|mathrm|rm)\s?)?[({]?([0-9A-Fa-f]+)[)}]?\s?_\s?(?:\{\s?(-?\d+)\s?\}|(\d))"
)
"""A numeral with its base, whose digits may be letters."""
MAX_ITEMS = 200
_NO_UNITS = frozenset(
    "not no wrong incorrect never maybe perhaps possibly unless except if either but else "
    "less more least most between".split()
)
"""Words after a value that take it back or leave it open."""
_ALL_REALS = ("all real numbers", "all reals", "all real x", "real numbers")

_RELATIONS = {"=": "=", "<": "<", ">": ">", "le": "<=", "ge": ">=", "ne": "!=", "in": "in",
              "approx": "~", "equiv": "=="}  # fmt: skip
_NAMED = frozenset("angle overline".split())
_SEPARATORS = frozenset([",", ";", "or"])


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
        return _AnswerParser(tokens).answer()
    except (RecursionError, ValueError, ZeroDivisionError, OverflowError) as error:
        # int() refuses more than 4300 digits with a ValueError
        raise error if isinstance(error, ParseError) else ParseError(str(error)) from None


class _AnswerParser(CommandParser):
    def answer(self) -> Node:
        choice = self._choice()
        if choice is not None:
            return choice
        items = self.items("end")
        if self.peek() is not END:
            raise ParseError(f"cannot read {self.peek().value!r}")
        return items[0] if len(items) == 1 else ("list", *_flatten(items))

    def _choice(self) -> Node | None:
        """`(C) 12`, `C. 12`, `\textbf{(C)}\\ 12`: a letter and its value."""
        named = self.peek().value.lower() in ("option", "choice") and self.peek().kind != "op"
        if named and len(self.tokens) == 2 and self.peek(1).value in [*"ABCDEFGHIJ"]:
            self.at = 2
            return ("text", self.tokens[1].value.lower())
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
            if token is END or (token.kind in ("op", "cmd") and token.value in closers):
                return found or self._nothing(closers)
            # A sign in a pair stands for two pairs, so that it is resolved outside of brackets.
            item = self.item()
            found.extend(_both_signs(item) if closers in (("end",), ("}",)) else [item])
            if len(found) > MAX_ITEMS:
                raise ParseError("too many items")
            token = self.peek()
            if token is END or (token.kind in ("op", "cmd") and token.value in closers):
                return found
            if not self.sees(*_SEPARATORS):
                raise ParseError(f"cannot read {token.value!r}")

    @staticmethod
    def _nothing(closers: tuple[str, ...]) -> list[Node]:
        if "}" in closers:
            return []
        raise ParseError("empty")

    def item(self) -> Node:
        """A relation or ratio."""
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
        return item

    def relation(self) -> Node:
        operators: list[str] = []
        parts: list[Node] = []
        while True:
            start = self.at
            if not parts and self.sees("approx"):
                self.at += 1
                continue
            part = self.sets()
            if not parts and self._is_label(start, part):
                part = ("label", " ".join(t.value for t in self.tokens[start : self.at]), part)
            elif not parts and self.sees("=", "in") and _is_names(part):
                part = ("label", " ".join(name[1] for name in part[3:]), part)
            parts.append(part)
            token = self.peek()
            if token.kind not in ("op", "cmd") or token.value not in _RELATIONS:
                break
            operators.append(_RELATIONS[self.next().value])
        return parts[0] if not operators else ("rel", tuple(operators), *parts)

    def _is_label(self, start: int, part: Node) -> bool:
        """Is what was just read the left side of a definition: f(x), f'(x), A, AB, x_1?"""
        if not (self.sees("=") or self.sees("approx") or self.sees("in")):
            return False
        tokens = self.tokens[start : self.at]
        values = [token.value for token in tokens]
        if all(token.kind == "word" for token in tokens):
            return True
        if values[:2] == ["m", "angle"] or (tokens[0].kind == "cmd" and values[0] in _NAMED):
            names = sorted(part[1:], key=str) if part[0] == "mul" else [part]
            kinds = [str(name[1]).partition(":") for name in names if name[0] == "sym"]
            alone = [kind for kind, _, _ in kinds if len(kinds) == len(names)]
            if alone in (["angle", "m"], ["angle"]):
                return True
            return alone == ["overline"] and len(kinds[0][2]) > 1 and kinds[0][2].isupper()
        if values[0] == values[-1] == "|":  # |AB|, but not |x|
            name = "".join(values[1:-1])
            return len(name) > 1 and name.isalpha() and name.isupper()
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
        return (len(tokens) == 1 and len(values[0]) == 1) or "".join(values).isupper()

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
                if self.peek().kind in ("run", "roman", "word") and self.peek().value in "CFK":
                    parts[-1] = "°" + self.next().value
            elif token.kind == "op" and token.value.startswith("$"):  # 5€
                parts.append(self.next().value[1:])
            elif self.sees("(") and self.peek(1).value == "mod" and self.peek(3).value == ")":
                parts.append("mod" + self.peek(2).value)
                self.at += 4
            elif self.sees("pmod", "mod"):
                self.at += 1
                parts.append("mod" + self._raw_argument())
            elif parts and self.sees("^"):
                self.at += 1
                parts.append("^" + self._unit_exponent())
            elif parts and self.sees("/") and self.peek(1).kind in ("word", "run", "roman"):
                self.at += 1
                parts += ["/", self.next().value]
            elif (parts and self.sees("cdot") and self.peek(1).kind in ("word", "roman")) or (
                parts and self.sees(".")
            ):
                self.at += 1
            else:
                break
        if len(parts) > 6 or any(part.lower() in _NO_UNITS for part in parts):
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
            and token.value.lower() not in FUNCTION_NAMES
            and token.value.lower() not in CONSTANTS
        )

    def _words(self) -> Node:
        words: list[str] = []
        while (token := self.peek()) is not END:
            if token.kind in ("word", "run", "num", "roman"):
                words.append(token.value.lower())
            elif token.kind == "op" and token.value in "-'.!":
                pass
            else:
                break
            self.at += 1
        if len(words) > 1 and words[0] in ("a", "an", "the"):
            words = words[1:]
        text = " ".join(words)
        return ("reals",) if text in _ALL_REALS else ("text", text)


def _is_names(part: Node) -> bool:
    """Is it (x, y), a name for a pair? In alphabetical order, lest (y, x) be taken for (x, y)."""
    if part[:3] != ("seq", "(", ")") or any(item[0] != "sym" for item in part[3:]):
        return False
    names = [item[1] for item in part[3:]]
    return names == sorted(set(names))


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
