"""Are two answers equal? Lists, sets, intervals, relations, units, words; their parts are compared
by `math_value`.
"""

from __future__ import annotations

import math

from mintrl_env.verifiers.math_expr import Node, add, contains, mul, neg, num, symbols
from mintrl_env.verifiers.math_sets import set_tree, sets_equal
from mintrl_env.verifiers.math_units import same_unit
from mintrl_env.verifiers.math_value import (
    NO_VALUE,
    SAMPLES,
    Oracle,
    double_value,
    environment,
    expressions_equal,
)

_LISTS = ("list", "set")
_NOT_EXPRESSIONS = frozenset(
    "list set seq matrix union inter minus reals empty rel label ratio unit base text choice "
    "row ldots".split()
)


def equal(gold: Node, answer: Node, oracle: Oracle) -> bool:
    """Is `answer` the same answer as `gold`, by the conventions of docs/verifiers.md?

    Raises:
        whatever `oracle` raises.
    """
    if gold == answer:
        return True
    if "choice" in (gold[0], answer[0]):
        return _choices(gold, answer, oracle)
    if "text" in (gold[0], answer[0]):
        return _letters(gold) is not None and _letters(gold) == _letters(answer)
    if _is_membership(gold) or _is_membership(answer):
        (name, value), (other_name, other) = _unnamed(gold), _unnamed(answer)
        if None not in (name, other_name) and name != other_name:
            return False
        return equal(value, other, oracle)
    if "rel" in (gold[0], answer[0]):
        return _relations(gold, answer, oracle)
    if "percent" in (gold[0], answer[0]):
        return _percents(gold, answer, oracle)
    if {gold[0], answer[0]} == {"unit", "base"}:
        return False  # 25_6 is no 25 degrees: of two signs that differ none is missing
    if "unit" in (gold[0], answer[0]):
        (unit, value), (other_unit, other) = _unit(gold), _unit(answer)
        if {unit, other_unit} == {"degree", ""} and contains(mul(value, other), "pi"):
            turn = mul(("const", "pi"), num("1/180"))  # 60 degrees are pi/3
            value, other = (mul(value, turn), other) if unit else (value, mul(other, turn))
            return expressions_equal(value, other, oracle)
        return same_unit(unit, other_unit) and equal(value, other, oracle)
    if "base" in (gold[0], answer[0]):
        return _bases(gold, answer)
    if _is_set(gold) and _is_set(answer) and not gold[0] == answer[0] == "seq":
        verdict = _sets(gold, answer, oracle)
        if verdict is not None:
            return verdict
    if gold[0] in _LISTS or answer[0] in _LISTS:
        return _lists(gold, answer, oracle)
    if gold[0] == "matrix" and answer[0] == "matrix":
        return _matrices(gold, answer, oracle)
    if {gold[0], answer[0]} == {"matrix", "seq"}:
        return _vectors(gold, answer, oracle)
    if gold[0] != answer[0] and (gold[0] in _NOT_EXPRESSIONS or answer[0] in _NOT_EXPRESSIONS):
        return False
    if gold[0] == "seq":
        return gold[1:3] == answer[1:3] and _in_order(gold[3:], answer[3:], oracle)
    if gold[0] == "ratio":
        return _in_order(gold[1:], answer[1:], oracle)
    if gold[0] in ("union", "inter", "minus"):
        return _in_order(gold[1:], answer[1:], oracle)
    if gold[0] in _NOT_EXPRESSIONS:
        return False
    return expressions_equal(gold, answer, oracle)


def is_expression(node: Node) -> bool:
    """Has the answer a value of its own, other than a list, a set, a relation, a word?"""
    return node[0] not in _NOT_EXPRESSIONS


def _in_order(golds: tuple[Node, ...], answers: tuple[Node, ...], oracle: Oracle) -> bool:
    return len(golds) == len(answers) and all(
        equal(g, a, oracle) for g, a in zip(golds, answers, strict=True)
    )


def _letters(node: Node) -> str | None:
    """What a word or a lone letter spells."""
    if node[0] == "text":
        return str(node[1])
    if node[0] in ("sym", "const") and len(node[1]) == 1:
        return str(node[1]).lower()
    return None


def _choices(gold: Node, answer: Node, oracle: Oracle) -> bool:
    if gold[0] == "choice" and answer[0] == "choice":
        return bool(gold[1] == answer[1]) and equal(gold[2], answer[2], oracle)
    choice, other = (gold, answer) if gold[0] == "choice" else (answer, gold)
    letter = _letters(other)
    if letter is not None:
        return bool(letter == choice[1])
    return equal(choice[2], other, oracle)


# --- relations ---------------------------------------------------------------------------------


def _is_membership(node: Node) -> bool:
    r"""`x \in \{2, 9\}`: another way to write x = 2 or x = 9."""
    return node[0] == "rel" and node[1] == ("in",) and bool(node[3][0] == "set")


def _unnamed(node: Node) -> tuple[Node | None, Node]:
    """The name that an answer gives to its values, and the values; None: it gives no one name."""
    if _is_membership(node):
        return node[2], node[3][1] if len(node[3]) == 2 else node[3]
    if node[0] == "rel" and node[1] == ("=",) and len(node) == 4:
        return node[2], node[3]
    if node[0] == "list" and any(item[0] == "rel" for item in node[1:]):
        named = [_unnamed(item) for item in node[1:]]
        names = {name for name, _ in named if name is not None}
        if len(names) == 1:
            return names.pop(), ("list", *(value for _, value in named))
    return None, node


def _expression(part: Node) -> Node:
    inner: Node = part[2] if part[0] == "label" else part
    return inner


def _value(node: Node, oracle: Oracle) -> Node | None:
    """The value that `x = 5`, `2^3 = 8` or `x = 1/3 ~ 0.333` ends in; None: it is an equation."""
    operators, parts = list(node[1]), list(node[2:])
    if "~" in operators:
        cut = operators.index("~")
        if cut == 0 and parts[0][0] == "label":
            operators[0] = "="
            cut = next((i for i, op in enumerate(operators) if op == "~"), len(operators))
        operators, parts = operators[:cut], parts[: cut + 1]
        if not operators:
            return _expression(parts[0])
    if set(operators) != {"="}:
        return None
    if parts[0][0] == "label":
        name, values = parts[0], parts[1:]
        inner = _expression(name)
        if inner[0] == "sym" and any(inner[1] in _safe_symbols(value) for value in values):
            return None
    else:
        values = parts
        if any(_safe_symbols(value) for value in values):
            return None
    for value in values[:-1]:
        constant = not _safe_symbols(value) and not _safe_symbols(values[-1])
        if constant and not equal(value, values[-1], oracle):
            return None
    last: Node = values[-1]
    return last


def _safe_symbols(node: Node) -> frozenset[str]:
    return symbols(node) if node[0] not in ("text", "base", "ldots") else frozenset()


def _relations(gold: Node, answer: Node, oracle: Oracle) -> bool:
    if gold[0] == "rel" and answer[0] == "rel":
        if gold[1] == answer[1] and _in_order(
            tuple(map(_expression, gold[2:])), tuple(map(_expression, answer[2:])), oracle
        ):
            return True
        names = [node[2][1] if node[2][0] == "label" else None for node in (gold, answer)]
        if None not in names:
            single = [str(name).isalpha() and len(str(name)) == 1 for name in names]
            values = [_value(node, oracle) for node in (gold, answer)]
            if (names[0] == names[1] or not all(single)) and None not in values:
                return equal(values[0], values[1], oracle)  # type: ignore[arg-type]
        if set(gold[1]) == set(answer[1]) == {"="} and len(gold) == len(answer) == 4:
            return _proportional(gold, answer, "ratio", oracle)
        verdict = _sets(gold, answer, oracle)
        if verdict is not None:
            return verdict
        return _inequalities(gold, answer, oracle)
    relation, other = (gold, answer) if gold[0] == "rel" else (answer, gold)
    value = _value(relation, oracle)
    if value is not None:
        return equal(value, other, oracle) if gold is relation else equal(other, value, oracle)
    if (relation[1] == ("in",) and _is_set(relation[3])) or _is_set(other):
        verdict = _sets(gold, answer, oracle)
        return bool(verdict)
    return False


def _difference(node: Node) -> Node | None:
    left, right = _expression(node[2]), _expression(node[3])
    if left[0] in _NOT_EXPRESSIONS or right[0] in _NOT_EXPRESSIONS:
        return None
    return add(left, neg(right))


def _proportional(gold: Node, answer: Node, mode: str, oracle: Oracle) -> bool:
    one, other = _difference(gold), _difference(answer)
    if one is None or other is None:
        return False
    names = symbols(one)
    if not names or names != symbols(other):
        return False
    ratios = []
    for sample in range(len(SAMPLES)):
        env = environment(names, sample)
        try:
            ratios.append(complex(double_value(one, env)[0] / double_value(other, env)[0]))
        except NO_VALUE:
            continue
    if len(ratios) > 1 and any(abs(r - ratios[0]) > 1e-6 * abs(ratios[0]) for r in ratios):
        return False
    if mode == "positive" and ratios and ratios[0].real <= 0:
        return False
    return oracle(one, other, mode)


def _inequalities(gold: Node, answer: Node, oracle: Oracle) -> bool:
    def turned(node: Node) -> tuple[str, Node] | None:
        if len(node) != 4 or node[1][0] not in ("<", "<=", ">", ">=", "!="):
            return None
        operator = node[1][0]
        if operator in (">", ">="):
            return operator.replace(">", "<"), ("rel", ("<",), node[3], node[2])
        return operator, node

    one, other = turned(gold), turned(answer)
    if one is None or other is None or one[0] != other[0]:
        return False
    return _proportional(one[1], other[1], "ratio" if one[0] == "!=" else "positive", oracle)


# --- units, percent, bases ---------------------------------------------------------------------


def _unit(node: Node) -> tuple[str, Node]:
    return (node[1], node[2]) if node[0] == "unit" else ("", node)


def _percents(gold: Node, answer: Node, oracle: Oracle) -> bool:
    """50% is 0.5; and where one side has the sign, the bare number of the other is forgiven."""
    if gold[0] == "percent" and answer[0] == "percent":
        return equal(gold[1], answer[1], oracle)
    percent, other = (gold, answer) if gold[0] == "percent" else (answer, gold)
    if other[0] in _NOT_EXPRESSIONS:
        return False
    hundredth = mul(percent[1], num("1/100"))
    return equal(percent[1], other, oracle) or equal(hundredth, other, oracle)


def _bases(gold: Node, answer: Node) -> bool:
    if gold[0] == "base" and answer[0] == "base":
        return bool(gold[1].lstrip("0") == answer[1].lstrip("0") and gold[2] == answer[2])
    base, other = (gold, answer) if gold[0] == "base" else (answer, gold)
    return bool(other[0] == "num" and other[1] == base[1])


# --- collections -------------------------------------------------------------------------------


def _is_set(node: Node) -> bool:
    return (
        node[0] in ("union", "inter", "minus", "reals", "empty", "set", "rel")
        or (node[0] == "seq" and len(node) == 5)
        or (node[0] == "list" and any(item[0] == "rel" for item in node[1:]))
    )


def _sets(gold: Node, answer: Node, oracle: Oracle) -> bool | None:
    """Compare as sets of reals; None: they are not both such sets."""
    one, other = set_tree(gold), set_tree(answer)
    if one is None or other is None:
        return None
    if one.variable and other.variable and one.variable != other.variable:
        return False
    return sets_equal(one, other, lambda a, b: expressions_equal(a, b, oracle), _double)


def _double(node: Node) -> float | None:
    try:
        value = double_value(node, {})[0]
    except NO_VALUE:
        return None
    return value.real if abs(value.imag) < 1e-12 and math.isfinite(value.real) else None


def _items(node: Node) -> tuple[Node, ...]:
    return node[1:] if node[0] in _LISTS else (node,)


def _lists(gold: Node, answer: Node, oracle: Oracle) -> bool:
    if "empty" in (gold[0], answer[0]):
        return False
    if "seq" in (gold[0], answer[0]):
        sequence, items = (gold, answer) if gold[0] == "seq" else (answer, gold)
        return _assignments(items, sequence, oracle)
    ordered = any(item[0] == "ldots" for item in (*_items(gold), *_items(answer)))
    if ordered:
        return _in_order(_items(gold), _items(answer), oracle)
    golds, answers = list(_items(gold)), list(_items(answer))
    if "set" in (gold[0], answer[0]):
        golds, answers = _distinct(golds, oracle), _distinct(answers, oracle)
    if len(golds) != len(answers):
        return False
    for item in golds:
        for index, other in enumerate(answers):
            if equal(item, other, oracle):
                del answers[index]
                break
        else:
            return False
    return True


def _distinct(items: list[Node], oracle: Oracle) -> list[Node]:
    kept: list[Node] = []
    for item in items:
        if not any(equal(item, other, oracle) for other in kept):
            kept.append(item)
    return kept


def _assignments(items: Node, sequence: Node, oracle: Oracle) -> bool:
    """`x = 2, y = 5` for (2, 5): names in alphabetical order."""
    relations = items[1:]
    if sequence[1:3] != ("(", ")") or len(relations) != len(sequence) - 3:
        return False
    if not all(r[0] == "rel" and r[1] == ("=",) and r[2][0] == "label" for r in relations):
        return False
    names = [r[2][1] for r in relations]
    return names == sorted(set(names)) and _in_order(
        tuple(r[3] for r in relations), sequence[3:], oracle
    )


def _matrices(gold: Node, answer: Node, oracle: Oracle) -> bool:
    return len(gold) == len(answer) and all(
        _in_order(g[1:], a[1:], oracle) for g, a in zip(gold[1:], answer[1:], strict=True)
    )


def _vectors(gold: Node, answer: Node, oracle: Oracle) -> bool:
    """A column or row vector for (a, b, c)."""
    matrix, sequence = (gold, answer) if gold[0] == "matrix" else (answer, gold)
    rows = [row[1:] for row in matrix[1:]]
    flat = rows[0] if len(rows) == 1 else tuple(r[0] for r in rows if len(r) == 1)
    if sequence[1:3] != ("(", ")") or len(flat) != sum(len(row) for row in rows):
        return False
    return _in_order(flat, sequence[3:], oracle)
