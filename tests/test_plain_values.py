"""Plain values between processes that do not trust each other."""

from __future__ import annotations

import collections
import datetime
import json
import math
import sys
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mintrl_env.verifiers import plain_values
from mintrl_env.verifiers.plain_values import Decoder, Encoder, NotPlain, dumps, loads

ANY_TEXT = st.text(st.characters(exclude_categories=()))  # surrogates too
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | ANY_TEXT | st.binary()
)
KEYS = st.integers() | ANY_TEXT | st.tuples(st.integers(), st.booleans()) | st.none()
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.sets(KEYS)
        | st.frozensets(KEYS)
    ),
    max_leaves=20,
)


JSON = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from("tdezisbacrxvn@o"), inner, max_size=2)
    ),
)


class Point(NamedTuple):
    x: int
    y: int


def same(a: Any, b: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, (set, frozenset)):
        return a == b and sorted(map(repr, a)) == sorted(map(repr, b))
    return repr(a) == repr(b)


class TestRoundTrip:
    @given(VALUES)
    def test_any_plain_value_comes_back_with_its_types(self, value: Any) -> None:
        assert same(loads(dumps(value)), value)

    @pytest.mark.parametrize(
        "value",
        [
            2**63 - 1,
            2**63,
            -(2**63),
            -(2**63) - 1,
            -0.0,
            math.inf,
            -math.inf,
            math.nan,
            1e-320,
            complex(math.inf, -0.0),
            range(2, 2**70, 3),
            bytearray(b"\x00\xff"),
            "\ud83d\ude00",  # two surrogates, which are not the one character they would spell
            "\U0001f600",
            {"d": [[1, 2]]},
            [{"i": "0x1"}],
            [True, 1, 1.0],
            {1: "a", "1": "b", None: "c", (1, (2,)): "d", frozenset({1}): "e"},
            [2**64, 1],
            ["\udfff", "a"],
            [],
            {},
            set(),
            (),
            "",
        ],
    )
    def test_the_edges(self, value: Any) -> None:
        text = dumps(value)
        assert text.isascii()
        assert same(loads(text), value)
        assert same(loads(text.encode()), value)

    def test_an_int_of_more_digits_than_python_reads(self) -> None:
        assert loads(dumps([10**6000, -(10**6000)])) == [10**6000, -(10**6000)]

    def test_scalars_and_lists_are_themselves_in_json(self) -> None:
        assert json.loads(dumps([1, "a", None, True, 0.5, [2]])) == [1, "a", None, True, 0.5, [2]]


class TestStandardContainers:
    VALUE = (
        collections.Counter("aab"),
        collections.deque([1, 2], maxlen=2),
        collections.OrderedDict(b=1, a=2),
        collections.defaultdict(list, {1: [2]}),
    )

    def test_they_count_as_what_they_hold(self) -> None:
        assert same(
            loads(dumps(self.VALUE)), ({"a": 2, "b": 1}, [1, 2], {"b": 1, "a": 2}, {1: [2]})
        )

    def test_or_keep_their_class(self) -> None:
        back = Decoder(keep=True).decode(Encoder(keep=True).encode(self.VALUE))
        assert back == self.VALUE
        assert [type(value) for value in back] == [type(value) for value in self.VALUE]
        assert back[1].maxlen == 2
        assert back[3].default_factory is list
        other = collections.defaultdict(lambda: 5, {1: 2})
        back = Decoder(keep=True).decode(Encoder(keep=True).encode(other))
        assert back == {1: 2} and back.default_factory is None  # code does not travel

    def test_the_order_that_an_ordered_dict_was_given_later(self) -> None:
        value = collections.OrderedDict(a=1, b=2, c=3)
        value.move_to_end("a")
        back = Decoder(keep=True).decode(Encoder(keep=True).encode(value))
        assert list(back) == ["b", "c", "a"]

    def test_a_named_tuple_is_plain_only_where_classes_are_kept(self) -> None:
        tree = Encoder(keep=True).encode([Point(1, 2), Point(3, [4])])
        first, second = Decoder(keep=True).decode(tree)
        assert first == (1, 2) and (second.x, second.y) == (3, [4])
        assert type(first) is type(second) is not Point and first._fields == Point._fields
        assert type(first).__name__ == "Point"
        with pytest.raises(NotPlain, match="class Point"):
            dumps(Point(1, 2))
        with pytest.raises(NotPlain):
            Decoder().decode(tree)

    @pytest.mark.parametrize(
        "body",
        [
            ["P", ["__eq__", "x"], [1, 2]],
            ["P", ["_make"], [1]],
            ["P", ["x", "x"], [1, 2]],
            ["P", ["x"], [1, 2]],
            ["P", ["x=print()"], [1]],
            ["P", ["\ufb01", "fi"], [1, 2]],
            ["class", ["x"], [1]],
            ["P", [["x"]], [1]],
            ["P", [f"x{i}" for i in range(300)], [1] * 300],
            ["P", ["x"]],
            7,
        ],
    )
    def test_named_tuples_that_are_none(self, body: Any) -> None:
        with pytest.raises(NotPlain):
            Decoder(keep=True).decode({"n": body})

    def test_a_class_that_looks_like_one_of_named_tuples(self) -> None:
        kind = type("P", (tuple,), {"_fields": ("__eq__",), "__eq__": lambda *_: True})
        back = Decoder(keep=True).decode(Encoder(keep=True).encode(kind((1,))))
        assert same(back, (1,))


UTC1 = datetime.timezone(datetime.timedelta(hours=1))


class TestLibraryValues:
    @pytest.mark.parametrize(
        "value",
        [
            Decimal("1.10"),
            Decimal("-0"),
            Decimal("Infinity"),
            Decimal("1E+999999"),
            Fraction(-3, 7),
            Fraction(10**400, 3),
            datetime.date(2024, 2, 29),
            datetime.time(1, 2, 3, 4, fold=1),
            datetime.time(1, tzinfo=datetime.UTC),
            datetime.datetime(2024, 1, 2, 3, 4, 5, 6, fold=1),
            datetime.datetime(2024, 1, 2, tzinfo=UTC1),
            datetime.timedelta(days=-1, microseconds=1),
            UTC1,
            {Decimal(1): [Fraction(1, 2)], (datetime.date.min,): {datetime.timedelta(1)}},
        ],
    )
    def test_they_keep_their_class_where_classes_are_kept(self, value: Any) -> None:
        tree = json.loads(json.dumps(Encoder(keep=True).encode(value)))
        back = Decoder(keep=True).decode(tree)
        assert back == value and type(back) is type(value) and str(back)[:10] == str(value)[:10]
        assert getattr(back, "fold", 0) == getattr(value, "fold", 0)
        with pytest.raises(NotPlain):
            dumps(value)
        with pytest.raises(NotPlain):
            Decoder().decode(tree)

    @pytest.mark.parametrize(
        "body",
        [
            ["Decimal", "x"],
            ["Decimal", 1],
            ["Decimal", "1" * 200_000],
            ["Decimal"],
            ["Fraction", 1, 0],
            ["Fraction", 0.5, 1],
            ["Fraction", {"i": "0x1" + "0" * 200_000}, 3],
            ["date", 2024, 2, 30],
            ["date", 2024, True, 3],
            ["time", 1, 2, 3, 4, "UTC", 0],
            ["datetime", 2024, 1, 1],
            ["timedelta", 10**12, 0, 0],
            ["timezone", 3600],
            ["timezone", {"v": ["timedelta", 2, 0, 0]}],
            ["eval", "1"],
            [["Decimal"], "1"],
            {},
        ],
    )
    def test_what_is_none_is_refused(self, body: Any) -> None:
        with pytest.raises(NotPlain):
            Decoder(keep=True).decode({"v": body})

    def test_subclasses_are_not_plain(self) -> None:
        for kind, argument in ((Decimal, 1), (Fraction, 1), (datetime.timedelta, 1)):
            liar = type("Liar", (kind,), {"__eq__": lambda *_: True})
            with pytest.raises(NotPlain, match="class Liar"):
                Encoder(keep=True).encode(liar(argument))


class Liar(list):  # type: ignore[type-arg]
    """Equal to everything, and says that it is a list."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]

    @property
    def __class__(self) -> Any:
        return list

    @__class__.setter
    def __class__(self, value: Any) -> None: ...


class Whole(int):
    pass


class TestNotPlain:
    @pytest.mark.parametrize(
        "value",
        [
            object(),
            Liar([1]),
            [Whole(1)],
            {"a": {Whole(2): 1}},
            (x for x in ()),
            {}.keys(),
            int,
            len,
            [1, [Liar()]],
        ],
    )
    def test_other_classes_are_refused(self, value: Any) -> None:
        with pytest.raises(NotPlain, match="is not plain"):
            dumps(value)

    def test_a_cycle_and_a_deep_nest_are_refused(self) -> None:
        cycle: list[Any] = []
        cycle.append(cycle)
        deep: Any = 0
        for _ in range(plain_values.MAX_DEPTH + 2):
            deep = (deep,)
        for value in (cycle, deep):
            with pytest.raises(NotPlain, match="200 deep"):
                dumps(value)

    def test_the_deepest_nest_that_may_be(self) -> None:
        deep: Any = 0
        for _ in range(plain_values.MAX_DEPTH):
            deep = [deep]
        assert loads(dumps(deep)) == deep

    @pytest.mark.parametrize(
        "make",
        [
            lambda: "x" * (plain_values.MAX_TEXT + 1),
            lambda: [0] * (plain_values.MAX_NODES + 1),
            lambda: 1 << (80 << 20),
        ],
        ids=["text", "list", "int"],
    )
    def test_what_would_be_too_large_to_read_is_not_written(self, make: Any) -> None:
        with pytest.raises(NotPlain, match="more than"):
            dumps(make())


class TestHostileText:
    @pytest.mark.parametrize(
        "text",
        [
            "",
            "{",
            "nonsense",
            '{"d":[[1]]}',
            '{"d":[[[1],2]]}',  # a list as a key
            '{"d":5}',
            '{"e":[[1]]}',
            '{"e":{"l":1}}',
            '{"t":1}',
            '{"t":[],"d":[]}',
            "{}",
            '{"unknown":1}',
            '{"i":5}',
            '{"i":"nonsense"}',
            '{"s":"zz"}',
            '{"b":[1]}',
            '{"r":[1,2,0]}',
            '{"r":[1,2]}',
            '{"r":["a",2,1]}',
            '{"c":[1]}',
            '{"c":["a",1]}',
            '{"x":["Counter"]}',
            '{"x":["object",[],null]}',
            '{"@":0}',
            '{"o":1}',
            "[" * 100_000,
            "[" * 300 + "]" * 300,
            "1" * 10_000,
            '"\\ud800',
        ],
        ids=lambda text: text[:30] or "empty",
    )
    def test_it_is_refused(self, text: str) -> None:
        with pytest.raises(NotPlain):
            loads(text)

    def test_it_is_bounded_before_it_is_read(self) -> None:
        with pytest.raises(NotPlain, match="over the limit"):
            loads(" " * (plain_values.MAX_TEXT + 1))
        with pytest.raises(NotPlain, match="more than 2000000 values"):
            loads("[" + "0," * plain_values.MAX_NODES + "0]")
        with pytest.raises(NotPlain, match="not JSON"):
            loads(b"\xff")

    @pytest.mark.parametrize("tag", ["e", "z", "d"])
    def test_keys_that_share_a_hash_are_not_put_into_a_table(self, tag: str) -> None:
        keys: list[Any] = [{"i": hex(k * (2**61 - 1))} for k in range(1, 5000)]
        text = json.dumps({tag: [[key, 0] for key in keys] if tag == "d" else keys})
        with pytest.raises(NotPlain, match="same hash"):
            loads(text)

    def test_a_long_run_of_digits_is_refused_where_python_would_read_it(self) -> None:
        before = sys.get_int_max_str_digits()
        sys.set_int_max_str_digits(0)
        try:
            with pytest.raises(NotPlain, match="40 digits"):
                loads("1" * 1_000_000)
            assert loads("[12, -9223372036854775808]") == [12, -(2**63)]
        finally:
            sys.set_int_max_str_digits(before)

    @given(JSON)
    def test_any_json_is_a_value_or_refused(self, tree: Any) -> None:
        try:
            value = loads(json.dumps(tree))
        except NotPlain:
            return
        assert same(loads(dumps(value)), value)


class TestTables:
    """Containers that both sides know by a number: how in-place changes travel."""

    def test_references_keep_what_is_the_same_the_same(self) -> None:
        inner = [1]
        table = [inner]
        tree = Encoder(known={id(inner): 0}).encode([inner, inner, [2]])
        assert tree == [{"@": 0}, {"@": 0}, [2]]
        back = Decoder(table=table).decode(tree)
        assert back[0] is inner
        assert back[1] is inner

    @pytest.mark.parametrize(
        ("container", "new"),
        [
            ([1], [2, 3]),
            ({1: 2}, {"a": [1]}),
            ({1}, {2, 3}),
            (bytearray(b"a"), bytearray(b"bc")),
            (collections.deque([1]), collections.deque([2])),
            (collections.Counter("a"), collections.Counter("bb")),
        ],
    )
    def test_fill_replaces_the_contents_in_place(self, container: Any, new: Any) -> None:
        same_object = container
        Decoder(keep=True).fill(container, Encoder(keep=True).contents(new))
        assert container == new
        assert container is same_object

    def test_references_out_of_the_table_are_refused(self) -> None:
        for number in (1, -1, True, "0"):
            with pytest.raises(NotPlain):
                Decoder(table=[[]]).decode({"@": number})

    def test_what_is_not_plain_can_be_named(self) -> None:
        tree = Encoder(opaque=lambda thing: {"o": thing.__name__}).encode([int])
        assert tree == [{"o": "int"}]
        assert Decoder(opaque={"int": int}.__getitem__).decode(tree) == [int]
