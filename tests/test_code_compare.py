"""What counts as printed, and as returned, as expected."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mintrl_env.verifiers.code_compare import How, Rule, compare_output, compare_value

STRICT, EQUAL = Rule(), Rule(How.EQUAL)


# --- standard output -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "printed"),
    [
        ("15\n", "15"),
        ("15", "15\n\n\n"),
        ("a b\r\nc\r\n\r\n", "a b\nc\n"),
        ("a b\n", "a   b  \n"),
        ("a b\n", "  a\tb\n"),
        ("", "\n \n"),
        ("a\n\nb\n", "a\n\nb"),
        ("a\n  \nb\n", "a\n\nb"),
        # numbers
        ("0.333333333333\n", "0.3333333"),
        ("2.0", "2"),
        ("2.50", "2.5000004"),
        ("1e3", "1000"),
        ("1E-3", "0.001"),
        ("1000000000.0", "1000000900"),
        ("-0.0", "0"),
        (".5", "0.5"),
        ("+1.5", "1.5"),
        ("1e400", "1e400"),
        ("x 0.5 y", "x 0.50 y"),
        # text
        ("YES", "YES"),
        ("café ✓", "café ✓\n"),
        ("1.2.3", "1.2.3"),
        ("nan", "nan"),
    ],
)
def test_equal_output(expected: str, printed: str) -> None:
    assert compare_output(expected, printed) is None
    assert compare_output(expected, printed, by_lines=False) is None


@pytest.mark.parametrize(
    ("expected", "printed", "difference"),
    [
        ("100000000000000001\n", "100000000000000000\n",
         "line 1, token 1: expected '100000000000000001', got '100000000000000000'"),
        ("5", "5.0", "line 1, token 1: expected '5', got '5.0'"),
        ("5", "05", "line 1, token 1: expected '5', got '05'"),
        ("5", "+5", "line 1, token 1: expected '5', got '+5'"),
        ("1.5", "1.50001", "line 1, token 1: expected '1.5', got '1.50001'"),
        ("1.5", "1_0.5", "line 1, token 1: expected '1.5', got '1_0.5'"),
        ("0.0", "nan", "line 1, token 1: expected '0.0', got 'nan'"),
        ("1.0", "inf", "line 1, token 1: expected '1.0', got 'inf'"),
        ("1e400", "3", "line 1, token 1: expected '1e400', got '3'"),
        ("1.0", "1e400", "line 1, token 1: expected '1.0', got '1e400'"),
        ("1.2.3", "1.2.4", "line 1, token 1: expected '1.2.3', got '1.2.4'"),
        ("1.5", "\u0661.5", "line 1, token 1: expected '1.5', got '\\u0661.5'"),
        ("YES", "Yes", "line 1, token 1: expected 'YES', got 'Yes'"),
        ("a b", "a\u00a0b", "line 1, 1 token for 2: 'b' is missing"),
        ("a\nb c\n", "a\nb d\n", "line 2, token 2: expected 'c', got 'd'"),
        ("a b", "a", "line 1, 1 token for 2: 'b' is missing"),
        ("a", "a b c", "line 1, 3 tokens for 1: 'b' is too much"),
        ("1\n2\n", "1\n", "1 line for 2: '2' is missing"),
        ("1\n", "1\n2\n3\n", "3 lines for 1: '2' is too much"),
        ("1\n\n2\n", "1\n2\n", "line 2, 1 token for 0: '2' is too much"),
        ("\n1\n", "1\n", "line 1, 1 token for 0: '1' is too much"),
        ("1", "", "0 lines for 1: '1' is missing"),
        ("", "1", "1 line for 0: '1' is too much"),
    ],
)  # fmt: skip
def test_first_difference_of_output(expected: str, printed: str, difference: str) -> None:
    found = compare_output(expected, printed)
    assert found is not None
    if expected == "a b" and "\u00a0" in printed:
        assert "got 'a\\xa0b'" in found
    else:
        assert found == difference


def test_tokens_may_stand_on_other_lines() -> None:
    assert compare_output("1 2\n3\n", "1\n2\n3 ", by_lines=False) is None
    assert compare_output("1 2\n3\n", "1\n2\n3 ") is not None
    assert compare_output("1 2", "1\n3", by_lines=False) == "token 2: expected '2', got '3'"
    assert compare_output("1 2", "1", by_lines=False) == "1 token for 2: '2' is missing"


def test_differences_are_short_ascii_lines() -> None:
    found = compare_output("ü" * 10**6, "\x1b[31m\n" * 10**5)
    assert found is not None and len(found) < 200 and found.isascii() and found.isprintable()
    found = compare_output("1." + "0" * 10**6, "1." + "0" * 10**6 + "1")
    assert found is not None and len(found) < 200


text = st.text(st.sampled_from("ab1.- \t\n\r"), max_size=30)


@given(text, text)
def test_output_equals_itself_and_order_of_line_ends_does_not_matter(a: str, b: str) -> None:
    assert compare_output(a, a) is None
    assert compare_output(a, a + " \n\n") is None
    assert compare_output(a.replace("\r", ""), a.replace("\r", "").replace("\n", "\r\n")) is None
    if compare_output(a, b) is None:  # by lines is the finer of the two
        assert compare_output(a, b, by_lines=False) is None


@given(st.integers(), st.integers())
def test_integers_are_text(a: int, b: int) -> None:
    assert (compare_output(str(a), str(b)) is None) == (a == b)


@given(st.floats(allow_nan=False, allow_infinity=False), st.floats(-2e-6, 2e-6))
def test_floats_are_numbers(a: float, error: float) -> None:
    b = a * (1 + error)
    if math.isfinite(b) and "e" not in repr(a):
        close = abs(a - b) <= max(1e-6, 1e-6 * abs(a))
        assert (compare_output(repr(a), repr(b)) is None) == close


# --- values --------------------------------------------------------------------------------------


class Yes:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class List(list[int]):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class Int(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


SAME: list[tuple[Any, Any]] = [
    (1, 1),
    (None, None),
    ("a", "a"),
    (b"a", b"a"),
    ([1, 2], (1, 2)),
    ((1, [2]), [1, (2,)]),
    ([], ()),
    (2.0, 2),
    (2.0, 2.0000005),
    (1e12, 1e12 + 1e5),
    ([0.1 + 0.2], [0.3]),
    (math.inf, math.inf),
    (math.nan, math.nan),
    ({1, 2}, {2, 1}),
    ({1, 2}, frozenset({1, 2})),
    ({0.3}, {0.1 + 0.2}),
    ({"a": 1, "b": [2]}, {"b": (2,), "a": 1}),
    ({(1, 2): 0.5}, {(1, 2): 0.5 + 1e-9}),
    (1 + 2j, 1 + 2j),
    (10**400, 10**400),
]
UNLIKE: list[tuple[Any, Any]] = [
    (1, 2),
    (1, "1"),
    ("1", 1),
    (None, 0),
    (None, False),
    ([], None),
    ([1], [1, 1]),
    ([1, 2], [2, 1]),
    ([1], {1}),
    ({1}, [1]),
    ("ab", ["a", "b"]),
    ("a", b"a"),
    (2.0, 2.00001),
    (2.0, "2.0"),
    (2.0, True),
    (math.inf, -math.inf),
    (math.inf, 10**400),
    (1.0, 10**400),
    (math.nan, 0.0),
    (0.0, math.nan),
    (10**17 + 1, 10**17),
    ({"a": 1}, {"a": 1, "b": 2}),
    ({"a": 1, "b": 2}, {"a": 1}),
    ({"a": 1}, {"b": 1}),
    ({"1": 2}, {1: 2}),
    ({}, []),
    ({1, 2}, {1, 3}),
    ({0.3}, {0.4}),
    # never by an object's own idea of equality
    (1, Yes()),
    ([1], Yes()),
    ([1], [Yes()]),
    ({"a": 1}, {"a": Yes()}),
    ([9, 7], List([9, 7])),
    (3, Int(3)),
    (3.0, Int(3)),
]


@pytest.mark.parametrize(("expected", "got"), SAME)
def test_equal_values(expected: Any, got: Any) -> None:
    assert compare_value(expected, got, STRICT) is None
    assert compare_value(expected, got, EQUAL) is None
    assert compare_value([expected], [got], STRICT) is None


@pytest.mark.parametrize(("expected", "got"), UNLIKE)
def test_unequal_values(expected: Any, got: Any) -> None:
    assert compare_value(expected, got, STRICT)
    assert compare_value((expected,), (got,), STRICT)
    if got is not True:
        assert compare_value(expected, got, EQUAL)


@pytest.mark.parametrize(
    ("expected", "got"),
    [(2, 2.0), (1, True), (True, 1), (0, False), ({1}, {True}), ({1: 2}, {True: 2})],
)
def test_numbers_of_other_types_only_where_the_rule_is_pythons(expected: Any, got: Any) -> None:
    assert compare_value(expected, got, STRICT)
    assert compare_value(expected, got, EQUAL) is None


def test_rules() -> None:
    assert compare_value(1.0, 1.00005, Rule(How.EQUAL, atol=1e-4)) is None
    assert compare_value(1.0, 1.0005, Rule(How.EQUAL, atol=1e-4))
    sets = Rule(How.SET)
    assert compare_value((1, 2), [2, 1, 1], sets) is None
    assert compare_value((1, 2), [2, 3], sets)
    assert compare_value([], None, sets)
    assert compare_value([[1]], [[1]], sets) is None  # nothing to make a set of: as lists
    given = Rule(How.NOT_NONE)
    assert compare_value(True, (0, 1), given) is None
    assert compare_value(True, [], given) is None
    assert compare_value(True, None, given)
    assert compare_value(False, None, given) is None
    assert compare_value(False, True, given)


@pytest.mark.parametrize(
    ("expected", "got", "difference"),
    [
        (1, 2, "expected 1, got 2"),
        (1, True, "expected 1, got True"),
        (2, 2.0, "expected 2, got 2.0"),
        ([1, [2, 3]], [1, [2, 4]], "at [1][1]: expected 3, got 4"),
        ({"a": {"b": 1}}, {"a": {"b": 2}}, "at ['a']['b']: expected 1, got 2"),
        ([1, 2], [1], "expected 2 elements [1, 2], got 1 [1]"),
        ([[1], []], [[1], [2]], "at [1]: expected 0 elements [], got 1 [2]"),
        ({"a": 1}, {"b": 1}, "expected the key 'a', got {'b': 1}"),
        ([1], None, "expected [1], got None"),
        ((1,), {1}, "expected (1,), got {1}"),
        (set(), frozenset({1}), "expected set(), got frozenset({1})"),
        (1, 10**1000, "expected 1, got an integer of 3322 bits"),
        (1, Yes(), "expected 1, got an object Yes"),
        ("é\n", "e", "expected '\\xe9\\n', got 'e'"),
    ],
)
def test_first_difference_of_values(expected: Any, got: Any, difference: str) -> None:
    assert compare_value(expected, got) == difference


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_large_and_deep_values_give_short_differences() -> None:
    for got in (list(range(10**6)), "x" * 10**6, nested(100_000), {i: i for i in range(10**5)}):
        for expected in (1, [0] * 10**6, nested(5)):
            found = compare_value(expected, got)
            assert found is not None and len(found) < 250 and found.isascii()
    found = compare_value(nested(100_000), nested(100_000))
    assert found is not None and "nested too deep" in found


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(plain, plain)
def test_values_equal_themselves_and_strict_is_the_narrower(a: Any, b: Any) -> None:
    assert compare_value(a, a) is None
    assert compare_value([a, b], (a, b)) is None
    found = compare_value(a, b)
    if found is None:
        assert compare_value(a, b, EQUAL) is None
    else:
        assert found.isascii() and found.isprintable() and len(found) < 400
