"""What the tests' process makes of what the code's process says: values, exceptions, objects, lies."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator

import pytest

from mintrl_env.verifiers.sandbox import Limits, Ran, Result, SandboxUnavailable
from mintrl_env.verifiers.sandbox_local import LocalSandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the local sandbox needs Linux")

LIMITS = Limits(wall_s=20.0)


@pytest.fixture(scope="module")
def box() -> Iterator[LocalSandbox]:
    sandbox = LocalSandbox()
    try:
        sandbox.run("", "", LIMITS)
    except SandboxUnavailable as error:
        pytest.skip(f"this machine cannot confine: {error}")
    yield sandbox
    sandbox.close()


def ran(box: LocalSandbox, program: str, *snippets: str) -> list[Result]:
    return list(box.asserts(textwrap.dedent(program), [*snippets], LIMITS))


def holds(box: LocalSandbox, program: str, *snippets: str) -> None:
    for snippet, result in zip(snippets, ran(box, program, *snippets), strict=True):
        assert result.ran is Ran.OK, (snippet, result)


VALUES = """
    import datetime
    from collections import namedtuple
    from decimal import Decimal
    from fractions import Fraction
    from typing import NamedTuple
    P = namedtuple("P", "x y")
    class Q(NamedTuple):
        x: int
        y: list
    def money(s): return Decimal(s)
    def part(a, b): return Fraction(a, b)
    def next_day(d): return d + datetime.timedelta(days=1)
    def at(h): return datetime.time(h, 30)
    def point(x): return P(x, 2)
    def other(x): return [Q(x, [x])]
    def span(a, b): return b - a
    def fields(p): return (p.x, p._fields, type(p).__name__)
"""


def test_values_of_the_library_are_compared_as_what_they_are(box: LocalSandbox) -> None:
    holds(
        box,
        VALUES,
        "import datetime\nfrom decimal import Decimal\nfrom fractions import Fraction",
        "assert money('1.10') == Decimal('1.1') and str(money('1.10')) == '1.10'",
        "assert money('0.5') == 0.5 and money('2') + 1 == 3 and round(money('1.26'), 1) == Decimal('1.3')",
        "assert {money('1'): [part(1, 2)]} == {Decimal(1): [Fraction(1, 2)]}",
        "assert part(2, 4) == Fraction(1, 2) == 0.5 and part(4, 2) == 2",
        "assert next_day(datetime.date(2024, 2, 28)) == datetime.date(2024, 2, 29)",
        "assert next_day(datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc)).day == 2",
        "assert at(1) == datetime.time(1, 30) and at(2).hour == 2",
        "assert span(datetime.date(2024, 1, 1), datetime.date(2024, 1, 3)).days == 2",
        "p = point(1)\nassert p == (1, 2) and p.x == 1 and p._asdict() == {'x': 1, 'y': 2}",
        "assert point(1) == P(1, 2) and point(1) != P(1, 3)",
        "x, y = point(5)\nassert (x, y) == (5, 2)\nassert other(1)[0].y == [1]",
        "from collections import namedtuple\nT = namedtuple('T', 'x')\n"
        "assert fields(T(7)) == (7, ('x',), 'T')",
    )
    results = ran(
        box,
        VALUES,
        "from decimal import Decimal\nassert money('1.1') == Decimal('1.2')",
        "assert money('1.1') == 1.1",
        "assert point(1) == (1, 3)",
        "import datetime\nassert at(1) == datetime.time(1, 31)",
    )
    assert [r.ran for r in results] == [Ran.FAILED] * 4


@pytest.mark.parametrize("kind", ["Decimal", "Fraction", "timedelta", "tuple"])
def test_a_subclass_of_one_equals_nothing(box: LocalSandbox, kind: str) -> None:
    program = f"""
        from decimal import Decimal
        from fractions import Fraction
        from datetime import timedelta
        class Liar({kind}):
            _fields = ("count",)
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            __hash__ = {kind}.__hash__
            def __lt__(self, other): return True
        def f(): return Liar(), [Liar()]
        """
    results = ran(
        box,
        program,
        "from datetime import timedelta",
        *("assert f()[0] == 1", "assert f()[0] == timedelta(1)", "assert f()[1] == [timedelta(1)]"),
        "assert not f()[0] != 1",
        "assert f()[0] < 1",
    )
    assert all(r.ran in (Ran.ERROR, Ran.FAILED) for r in results[1:])


EXCEPTIONS = """
    import json
    from decimal import Decimal
    class Base(Exception): pass
    class Sub(Base):
        def __init__(self, message, code):
            super().__init__(message)
            self.code, self.what = code, [message]
    class Odd(KeyError):
        def __str__(self): return "odd: " + repr(self.args[0])
    def sub(): raise Sub("no", 7)
    def odd(): raise Odd("k")
    def base(): raise Base("b")
    def bad(text): return json.loads(text)
    def divide(): return Decimal(1) / 0
"""


def expecting(kind: str, call: str, held: str = "True") -> str:
    return (
        f"try:\n    {call}\n    assert False\nexcept {kind} as e:\n    assert {held}, (e, vars(e))"
    )


def test_exceptions_are_told_apart_as_beside_the_code(box: LocalSandbox) -> None:
    holds(
        box,
        EXCEPTIONS,
        expecting("Base", "sub()", "e.code == 7 and str(e) == 'no' and e.what == ['no']"),
        expecting("Sub", "sub()", "isinstance(e, Base) and e.args == ('no',)"),
        expecting("KeyError", "odd()", "str(e) == \"odd: 'k'\" and e.args == ('k',)"),
        expecting("Odd", "odd()"),
        "import json\n" + expecting("json.JSONDecodeError", "bad('[1,')", "e.pos == 3"),
        expecting("ValueError", "bad('[1,')", "'line 1' in str(e)"),
        "import decimal\n" + expecting("decimal.DivisionByZero", "divide()"),
        "import unittest\nclass T(unittest.TestCase):\n"
        "    def test(self):\n        with self.assertRaises(Base): sub()\nT('test').debug()",
    )
    results = ran(box, EXCEPTIONS, expecting("Sub", "base()"), expecting("Sub", "odd()"))
    assert [r.ran for r in results] == [Ran.ERROR] * 2


SUITE = """
import unittest
class T(unittest.TestCase):
    def test(self): self.assertEqual(f(1), 2)
result = unittest.TestResult()
T('test').run(result)
assert result.wasSuccessful()
"""


@pytest.mark.parametrize(
    "raised",
    [
        "StopIteration",
        "StopIteration(2)",
        "StopAsyncIteration",
        "type('Mine', (StopIteration,), {})",
        "GeneratorExit",
        "SystemExit(0)",
        "__import__('unittest').SkipTest('x')",
        "AssertionError",
    ],
)
def test_no_exception_of_the_code_ends_a_test_quietly(box: LocalSandbox, raised: str) -> None:
    results = ran(
        box,
        f"def f(x): raise {raised}",
        "assert f(1) == 2",
        "assert all(got == 2 for got in map(f, [1, 1]))",
        "assert all(map(lambda x: f(x) == 2, [1, 1]))",
        "for got, wanted in zip(map(f, [1]), [2]):\n    assert got == wanted",
        "assert not [x for x in map(f, [1]) if x != 2]",
        SUITE,
    )
    assert all(r.ran in (Ran.ERROR, Ran.FAILED) for r in results), results


def test_a_snippet_that_speaks_of_stop_iteration_gets_it(box: LocalSandbox) -> None:
    holds(
        box,
        "class It:\n    def pull(self): raise StopIteration(3)\ndef up(): yield 1",
        expecting("StopIteration", "It().pull()", "e.value == 3"),
        "it = up()\nassert next(it) == 1 and next(it, None) is None",
        "assert list(up()) == [1] and sum(map(lambda x: x, up())) == 1",
    )


TREE = """
class TreeNode:
    def __init__(self, val=0, left=None, right=None):
        self.val, self.left, self.right = val, left, right
    def values(self):
        return [self.val] + [v for n in (self.left, self.right) if n for v in n.values()]
"""
WITH_TREES = (
    TREE
    + """
def total(t): return t.val + total(t.left) + total(t.right) if t else 0
def invert(t):
    if t: t.left, t.right = invert(t.right), invert(t.left)
    return t
def grow(t): t.left = TreeNode(9)
def fresh(n): return TreeNode(n, TreeNode(n + 1))
def last(node):
    while node.right: node = node.right
    return node
def method(t): t.values = [1]
class TreeNode2: pass
"""
)


def test_objects_of_the_tests_are_lent_to_the_code(box: LocalSandbox) -> None:
    holds(
        box,
        WITH_TREES,
        TREE,
        "t = TreeNode(1, TreeNode(2), TreeNode(3))\nassert total(t) == 6 and total(None) == 0",
        "kept = t.left\nassert invert(t) is t and t.right is kept and t.values() == [1, 3, 2]",
        "grow(t)\nassert t.left.val == 9 and total(t) == 12",
        "assert fresh(4).left.val == 5 and total(fresh(4)) == 9",
        "chain = end = TreeNode(0)\nfor i in range(3000):\n"
        "    end.right = TreeNode(i)\n    end = end.right",
        "assert last(chain) is end",
        "class Own:\n    def __init__(self): self.val, self.left, self.right = 4, None, None",
        "assert total(Own()) == 4",
    )
    results = ran(box, WITH_TREES, TREE, "t = TreeNode(1)\nmethod(t)\nassert t.values() == [1]")
    assert [r.ran for r in results] == [Ran.OK, Ran.ERROR]


def test_functions_that_are_awaited_and_managers(box: LocalSandbox) -> None:
    holds(
        box,
        """
        import asyncio
        async def late(x):
            await asyncio.sleep(0)
            if x < 0: raise ValueError("negative")
            return x + 1
        class Open:
            log = []
            def __enter__(self): return self
            def __exit__(self, kind, *rest): self.log.append(kind and kind.__name__)
        """,
        "import asyncio\nassert asyncio.run(late(1)) == 2",
        "async def both(): return await asyncio.gather(late(1), late(2))\n"
        "assert asyncio.run(both()) == [2, 3]",
        expecting("ValueError", "asyncio.run(late(-1))", "str(e) == 'negative'"),
        "with Open() as o:\n    assert o.log == []\nassert o.log == [None]",
        "try:\n    with Open() as o: int('x')\nexcept ValueError: pass\n"
        "assert o.log == [None, 'ValueError']",
    )
    swallows = (
        "class Open:\n    def __enter__(self): return 5\n    def __exit__(self, *_): return True"
    )
    results = ran(box, swallows, "with Open() as o:\n    assert o == 6", "with Open(): 1 / 0")
    assert [r.ran for r in results] == [Ran.FAILED, Ran.ERROR]


def test_arguments_of_the_library(box: LocalSandbox) -> None:
    holds(
        box,
        """
        class Full(Exception): pass
        def kinds(*given): return [type(x) for x in given]
        def listed(items): return list(items)
        def gather(d, key): d[key].append(1)
        def caught(f):
            try: f()
            except Full as error: return str(error)
        """,
        "from collections import defaultdict\nd = defaultdict(list)\ngather(d, 'x')\n"
        "assert d == {'x': [1]} and d['y'] == []",
        "assert listed({1: 2}.keys()) == [1] and listed({1: 2}.items()) == [(1, 2)]",
        "assert kinds(1, 'a', {}) == [int, str, dict] and kinds(1.0)[0] is float",
        "def full(): raise Full('up')\nassert caught(full) == 'up'",
    )


def test_classes_of_the_code_know_their_objects(box: LocalSandbox) -> None:
    holds(
        box,
        "class A: pass\nclass B(A): pass\ndef f(): return B()",
        "assert isinstance(f(), A) and isinstance(f(), (int, B)) and issubclass(B, A)",
        "assert not isinstance(3, A) and not isinstance(f(), int) and not issubclass(A, B)",
    )


FORGER = """
    import os, struct, sys
    talk = sys.modules["sandbox_child"].Talk
    real, armed = talk.send, []
    def send(self, message):
        if not armed: return real(self, message)
        armed.clear()
        body = {body!r}.replace("N", str(message["n"])).encode()
        os.write(self.out, struct.pack(">I", len(body)) + body)
    talk.send = send
    def f(x):
        armed.append(x)
        return 3
"""


@pytest.mark.parametrize("said", ['"ok"', '"passed"', '"failed"', '["ok"]', "null", '"timeout"'])
def test_the_code_does_not_say_how_a_snippet_went(box: LocalSandbox, said: str) -> None:
    body = '{"n":N,"raised":{"type":"ValueError","args":{"t":[]},"detail":"x","flavour":%s}}'
    program = FORGER.format(body=body % said)
    for result in ran(box, program, "assert f([1]) == 4", "assert f([1]) == f([1])"):
        assert result.ran is Ran.ERROR, result


@pytest.mark.parametrize(
    "body",
    [
        "[]",
        "null",
        "{}",
        "no JSON",
        '{"n":N}',
        '{"n":N,"value":{"o":[0,"int"]},"changed":[]}',
        '{"n":N,"value":{"o":7},"changed":[]}',
        '{"n":N,"value":4}',
        '{"n":N,"value":4,"changed":[[99,[]]]}',
        '{"n":N,"value":4,"changed":[[0,{"o":["x",{"d":[]}]}]]}',
        '{"n":N,"value":{"n":["int",["__eq__"],[4]]},"changed":[]}',
        '{"n":N,"value":{"v":["Decimal","sNaN"]},"changed":[]}',
        '{"n":N,"value":{"@":0},"changed":[[0,[{"@":0}]]]}',
        '{"n":N,"raised":[]}',
        '{"n":N,"raised":{"type":"print","names":{"a":1},"args":3,"detail":1}}',
        '{"n":N,"gone":""}',
        '{"callback":-1,"args":{"t":[]},"kwargs":{"d":[]}}',
        '{"rpc":{"serve":"kinds"}}',
        '{"done":{"ran":"ok","detail":""}}',
    ],
)
def test_answers_that_are_none(box: LocalSandbox, body: str) -> None:
    program = FORGER.format(body=body) + "    def g(): return 5\n"
    results = ran(box, program, "assert f([1]) == 4", "assert [f([1])] == [4]", "assert g() == 5")
    assert all(r.ran in (Ran.ERROR, Ran.FAILED) for r in results[:2]), results
    assert results[2].ran is Ran.OK  # of the next snippet nothing is lost
