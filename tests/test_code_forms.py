"""The ways in which people write tests, what is refused and how, what the sandbox is given."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from mintrl_env.verifiers.code_compare import How, Rule
from mintrl_env.verifiers.code_forms import (
    AssertTests,
    CallTests,
    StdinTests,
    parse_limits,
    parse_tests,
)
from mintrl_env.verifiers.code_program import calls_of, module_of, prelude_of, with_setup
from mintrl_env.verifiers.code_values import BadTests
from mintrl_env.verifiers.sandbox import Call, Limits

STDIN = {"type": "stdin", "inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]}
CALL: dict[str, Any] = {
    "type": "call", "fn_name": "double", "inputs": [[1], [2]], "outputs": [2, 4],
}  # fmt: skip
ASSERT = {"type": "assert", "fn_name": "double", "asserts": ["assert double(1) == 2", "x = 1"]}
CHECK = "def check(candidate):\n    assert candidate(1) == 2\n"


def call(**changes: Any) -> CallTests:
    tests = parse_tests({**CALL, **changes})
    assert isinstance(tests, CallTests)
    return tests


def asserts(entry_point: str | None = None, **row: Any) -> AssertTests:
    tests = parse_tests({"type": "assert", **row}, entry_point=entry_point)
    assert isinstance(tests, AssertTests)
    return tests


# --- the three forms -----------------------------------------------------------------------------


def test_stdin() -> None:
    tests = StdinTests(("1\n", "2\n"), ("2\n", "4\n"))
    assert parse_tests(STDIN) == tests and len(tests) == 2 and tests.by_lines
    assert parse_tests({**STDIN, "compare": "lines"}) == tests
    assert parse_tests({**STDIN, "compare": "tokens"}) == StdinTests(
        tests.inputs, tests.outputs, by_lines=False
    )
    assert parse_tests({"type": "stdin", "inputs": STDIN["inputs"], "expected": STDIN["outputs"]})


def test_call() -> None:
    assert call() == CallTests((Call("double", (1,)), Call("double", (2,))), (2, 4))
    named = {"type": "call", "entry_point": "double", "inputs": [[1], [2]], "expected": [2, 4]}
    assert parse_tests(named) == call()
    assert call(inputs=[{"x": 1}, [2]]).calls[0] == Call("double", (), {"x": 1})
    assert call(fn_name="Solution.double").calls[0].function == "Solution.double"
    row = {k: v for k, v in CALL.items() if k != "fn_name"}
    assert parse_tests(row, entry_point="double") == call()
    assert parse_tests(CALL, entry_point="other") == call()  # the tests' own name comes first


def test_encoded_values() -> None:
    tests = call(
        encoding="python-literal", inputs=["[(1, 2)]", "[{3}]"], outputs=["{'a': (1,)}", "1e999"]
    )
    assert tests.calls == (Call("double", ((1, 2),)), Call("double", ({3},)))
    assert tests.expected == ({"a": (1,)}, math.inf)
    tests = call(encoding="json", inputs=["[[1, 2]]", "[null]"], outputs=['{"a": true}', "1.5"])
    assert tests.calls == (Call("double", ([1, 2],)), Call("double", (None,)))
    assert tests.expected == ({"a": True}, 1.5)


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({}, Rule()),
        ({"compare": "strict"}, Rule()),
        ({"compare": "equal", "atol": 0.0}, Rule(How.EQUAL)),
        ({"compare": "equal", "atol": 1e-4}, Rule(How.EQUAL, atol=1e-4)),
        ({"compare": "equal", "rtol": 0.01}, Rule(How.EQUAL, rtol=0.01)),
        ({"compare": "set"}, Rule(How.SET)),
        ({"compare": "not_none"}, Rule(How.NOT_NONE)),
        ({"atol": 1}, Rule(atol=1.0)),
    ],
)
def test_how_values_are_compared(row: dict[str, Any], rule: Rule) -> None:
    assert call(**row).rule == rule


def test_asserts() -> None:
    assert parse_tests(ASSERT) == AssertTests(("assert double(1) == 2", "x = 1"), "double")
    assert asserts(code="assert f(1)\n", asserts=["assert f(1)"]).snippets == ("assert f(1)",)
    assert asserts(code="assert f(1)\nassert f(2)", asserts=[]).snippets == (
        "assert f(1)\nassert f(2)",
    )
    assert asserts(code="f()", setup="import math").setup == "import math"
    # what `code` does before the asserts, and code that is something else
    both = asserts(
        code="n = N(1)\nn.x = 2\nassert f(n)\nassert g(n)\n", asserts=["assert f(n)", "assert g(n)"]
    )
    assert both.snippets == ("n = N(1)\nn.x = 2\nassert f(n)", "assert g(n)")
    assert asserts(code="assert f(1) or g()\n", asserts=["assert f(1)"]).snippets == (
        "assert f(1) or g()\n",
    )


def test_checks_are_called() -> None:
    by_name = f"{CHECK}\n\ncheck(double)\n"
    assert asserts(check=CHECK, fn_name="double").snippets == (by_name,)
    assert asserts("double", check=CHECK).snippets == (by_name,)
    assert asserts("Solution.f", check=CHECK).snippets == (f"{CHECK}\n\ncheck(Solution().f)\n",)
    # a `check` in `code` that nothing calls would test nothing
    meta = "METADATA = {}\n'''words'''\n" + CHECK
    assert asserts("double", code=meta).snippets == (f"{meta}\n\ncheck(double)\n",)
    called = CHECK + "\ncheck(double)\n"
    assert asserts("double", code=called).snippets == (called,)
    looped = CHECK + "for f in (double,):\n    check(f)\n"
    assert asserts("double", code=looped).snippets == (looped,)


def test_the_type_is_guessed_where_it_is_missing() -> None:
    for row in (STDIN, CALL, ASSERT):
        assert parse_tests({k: v for k, v in row.items() if k != "type"}) == parse_tests(row)
    assert isinstance(parse_tests({"inputs": ["1"], "outputs": ["1"]}, entry_point="f"), StdinTests)


@pytest.mark.parametrize("row", [STDIN, CALL, ASSERT])
def test_rows_as_tables_hold_them(row: dict[str, Any]) -> None:
    assert parse_tests(json.dumps(row)) == parse_tests(row)
    filled = {**dict.fromkeys(("fn_name", "inputs", "outputs", "asserts", "check", "code")), **row}
    assert parse_tests(filled) == parse_tests(row)
    texts = {k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()}
    assert parse_tests(texts) == parse_tests(row)
    arrays = {
        k: np.array(v, dtype=object if isinstance(v[0], str) else None)
        if isinstance(v, list) else v
        for k, v in row.items()
    }  # fmt: skip
    assert parse_tests(arrays) == parse_tests(row)


def test_values_of_numpy_become_plain() -> None:
    tests = call(inputs=[[np.arange(2)], [np.float64(1.5)]], outputs=[np.int64(3), (np.True_,)])
    assert repr(tests.calls[0].args) == "([0, 1],)" and repr(tests.calls[1].args) == "(1.5,)"
    assert repr(tests.expected) == "(3, (True,))"


# --- what cannot be run --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (None, "tests: there are none"),
        ([], "tests must be an object, not a list"),
        ("{", "tests is no JSON"),
        ("[" * 100_000, "tests is no JSON"),
        ("[1]", "tests must be an object, not a list"),
        ({}, "tests.type must be stdin, call or assert, not null"),
        ({"type": "pytest"}, "tests.type must be stdin, call or assert, not 'pytest'"),
        ({"type": ["stdin"]}, "tests.type must be stdin, call or assert, not a list"),
        ({"type": "stdin"}, "tests.inputs is missing"),
        ({**STDIN, "outputs": None}, "tests.outputs is missing (or tests.expected)"),
        ({**STDIN, "inputs": [], "outputs": []}, "tests.inputs is empty: nothing would be tested"),
        ({**STDIN, "inputs": ["1"]}, "tests.inputs has 1 entries and tests.outputs 2: they are pairs"),
        ({**STDIN, "inputs": "1"}, "tests.inputs must be a list, not int"),
        ({**STDIN, "inputs": "x"}, "tests.inputs is a text that is no JSON"),
        ({**STDIN, "inputs": ["1", 2]}, "tests.inputs[1] must be text, not int"),
        ({**STDIN, "outputs": ["1", None]}, "tests.outputs[1] must be text, not null"),
        ({**STDIN, "compare": "words"}, "tests.compare must be lines or tokens, not 'words'"),
        ({**CALL, "fn_name": None}, "tests.fn_name is missing: a call test needs"),
        ({**CALL, "fn_name": "os.system('x')"}, "tests.fn_name must be a function's name, not text"),
        ({**CALL, "fn_name": 3}, "tests.fn_name must be a function's name, not int"),
        ({**CALL, "inputs": [[1], 2]}, "tests.inputs[1] must be a list of arguments, not int"),
        ({**CALL, "inputs": [[1], {1: 2}]}, "tests.inputs[1] must be a list of arguments, not an object"),
        ({**CALL, "outputs": [1, object()]}, "tests.outputs[1] must be made of plain values, not object"),
        ({**CALL, "outputs": [1, [object()]]}, "tests.outputs[1][0] must be made of plain values"),
        ({**CALL, "encoding": "pickle"}, "tests.encoding must be python-literal or json, not 'pickle'"),
        ({**CALL, "encoding": "json"}, "tests.inputs[0] must be a text of JSON, not a list"),
        ({**CALL, "encoding": "json", "inputs": ["[1]", "[2"]}, "tests.inputs[1] is no JSON: '[2'"),
        ({**CALL, "encoding": "python-literal"}, "tests.inputs[0] must be the text of a Python literal"),
        ({**CALL, "encoding": "python-literal", "inputs": ["[1]", "[f()]"]},
         "tests.inputs[1] is no Python literal: '[f()]'"),
        ({**CALL, "encoding": "python-literal", "inputs": ["[1]", "(" * 10_000]},
         "tests.inputs[1] is no Python literal: '((("),
        ({**CALL, "encoding": "python-literal", "inputs": ["[1]", "[" + "1," * (9 << 20) + "]"]},
         "tests.inputs[1] has 18874370 characters; at most"),
        ({**CALL, "compare": "same"}, "tests.compare must be strict, equal, set, not_none, not 'same'"),
        ({**CALL, "atol": -1}, "tests.atol must be a number >= 0, not -1"),
        ({**CALL, "atol": math.inf}, "tests.atol must be a number >= 0, not inf"),
        ({**CALL, "rtol": "x"}, "tests.rtol must be a number >= 0, not 'x'"),
        ({"type": "assert"}, "an assert test needs one of: tests.asserts, tests.check, tests.code"),
        ({"type": "assert", "asserts": [], "code": " "}, "an assert test needs one of"),
        ({"type": "assert", "asserts": ["a", 2]}, "tests.asserts[1] must be text, not int"),
        ({"type": "assert", "asserts": ["a", "b ="]}, "tests.asserts[1] is no Python, line 1: "),
        ({"type": "assert", "asserts": ["a", "# b"]}, "tests.asserts[1] is empty: nothing would be tested"),
        ({"type": "assert", "asserts": ["\0"]}, "tests.asserts[0] is no Python"),
        ({"type": "assert", "code": "x\ny = (\n"}, "tests.code is no Python, line 2"),
        ({"type": "assert", "code": 3}, "tests.code must be text, not int"),
        ({"type": "assert", "code": CHECK}, "tests.fn_name is missing: tests.code needs the candidate's"),
        ({"type": "assert", "check": CHECK}, "tests.fn_name is missing: tests.check needs"),
        ({"type": "assert", "fn_name": "f", "check": "assert f()"}, "tests.check must define check"),
        ({"type": "assert", "code": "f()", "setup": "import"}, "tests.setup is no Python, line 1"),
        ({**STDIN, "setup": 3}, "tests.setup must be text, not int"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_says_where(row: Any, message: str) -> None:
    with pytest.raises(BadTests) as error:
        parse_tests(row)
    assert message in str(error.value)
    assert len(str(error.value)) < 300


def test_limits() -> None:
    base = Limits(2.0, 256, 1000)
    assert parse_limits({}, base) == base
    assert parse_limits({"wall_s": 5, "mem_mb": None}, base) == Limits(5.0, 256, 1000)
    assert parse_limits('{"mem_mb": 64, "output_bytes": 10}', base) == Limits(2.0, 64, 10)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"wall": 1}, "limits.wall: unknown; known: wall_s, mem_mb, output_bytes"),
        ({"wall_s": 0}, "limits.wall_s must be a number > 0, not 0"),
        ({"wall_s": math.nan}, "limits.wall_s must be a number > 0, not nan"),
        ({"mem_mb": True}, "limits.mem_mb must be a number > 0, not True"),
        ({"mem_mb": "1"}, "limits.mem_mb must be a number > 0, not '1'"),
        (3, "limits must be an object, not int"),
    ],
)
def test_limits_that_cannot_be(given: Any, message: str) -> None:
    with pytest.raises(BadTests, match="^" + message.replace("(", r"\(")):
        parse_limits(given, Limits())


# --- what the sandbox is given -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "whole"),
    [
        ("a = 1\n", "S\na = 1\n"),
        ("", "S\n"),
        ("from __future__ import annotations\na = 1\n",
         "from __future__ import annotations\nS\na = 1\n"),
        ('"""Words."""\n\n# more\nfrom __future__ import annotations  # yes\na = 1\n',
         '"""Words."""\n\n# more\nfrom __future__ import annotations  # yes\nS\na = 1\n'),
        ("'words'\nfrom __future__ import (\n    annotations,\n)\na = 1\n",
         "'words'\nfrom __future__ import (\n    annotations,\n)\nS\na = 1\n"),
        ("from __future__ import annotations", "from __future__ import annotations\nS\n"),
        # not where it would be inside of something
        ('x = """\nfrom __future__ import annotations\n"""\n',
         'S\nx = """\nfrom __future__ import annotations\n"""\n'),
        ("#\n" * 3 + "a = 1", "S\n" + "#\n" * 3 + "a = 1"),
    ],
)  # fmt: skip
def test_a_setup_comes_first(code: str, whole: str) -> None:
    assert with_setup("S", code) == whole
    assert with_setup(" \n", code) == code


def test_a_program_of_stdin_tests_is_left_as_it_is() -> None:
    assert module_of(parse_tests(STDIN), "class Solution: pass\n") == "class Solution: pass\n"


def run(module: str, **names: Any) -> dict[str, Any]:
    """A test's own module, run here."""
    space: dict[str, Any] = {"__name__": "candidate", **names}
    exec(module, space)
    return space


def test_methods_are_found_by_their_bare_name() -> None:
    code = "class Solution:\n    def double(self, x):\n        return 2 * x"
    assert run(module_of(call(), code))["double"](3) == 6
    assert run(module_of(call(), code), double=len)["double"](3) == 6
    own = "def double(x):\n    return 3 * x\n" + code
    assert run(module_of(call(), own))["double"](3) == 9
    other = "class Solution:\n    pass\ndouble = 5"
    assert run(module_of(call(), other))["double"] == 5
    # a dotted name is the sandbox's business
    assert module_of(call(fn_name="Solution.double"), code) == code


def test_the_function_under_test_is_the_programs_own() -> None:
    """Neither a built-in nor a name of the setup may stand in for it."""
    tests = asserts(fn_name="sum", asserts=["assert sum(1, 2) == 3"], setup="from math import *")
    module = module_of(tests, "def sum(a, b):\n    return a + b\n")
    assert module.startswith("from math import *\n")
    shared = {"_mintrl_entry_": run(module)["_mintrl_entry_"]}
    exec(prelude_of(tests), shared)
    exec(tests.snippets[0], shared)
    with pytest.raises(NameError):
        run(module_of(asserts(fn_name="f", code="f()"), "g = 1"))
    assert prelude_of(asserts(code="assert sum([1]) == 1")) == ""
    assert prelude_of(asserts(code="f()", fn_name="A.f", setup="import math")) == "import math"


@pytest.mark.parametrize(
    ("setup", "snippets", "imports"),
    [
        ("", ["assert math.isclose(f(1), 1)", "assert sys.maxsize"], ("import math", "import sys")),
        ("import math", ["assert math.isclose(f(1), 1)"], ()),
        ("", ["import math\nassert math.isclose(f(1), 1)"], ()),
        ("", ["math = f(1)\nassert math.x"], ()),
        ("", ["def check(math):\n    assert math.x"], ()),
        ("", ["assert queue.pop() == f(1)"], ()),
        ("from heapq import *", ["assert f(1)"], (
            "from heapq import heappush, heappop, heapify, heapreplace, merge, nlargest, nsmallest, "
            "heappushpop",)),
        ("from heapq import heappop", ["assert f(1)"], ()),
        ("from os import *", ["assert f(1)"], ()),
    ],
)  # fmt: skip
def test_what_snippets_use_of_the_library(
    setup: str, snippets: list[str], imports: tuple[str, ...]
) -> None:
    tests = asserts(fn_name="f", setup=setup, asserts=snippets)
    assert tests.imports == imports
    assert prelude_of(tests).endswith("\n".join([*imports, "f = _mintrl_entry_"]))
    assert asserts(setup=setup, asserts=snippets).imports == imports


@pytest.mark.parametrize(
    ("setup", "snippet", "given"),
    [
        ("from math import *", "assert gcd(4, 6) == 2", False),  # may be what is under test
        ("", "from math import *\nassert gcd(4, 6) == abs(-2)", False),
        ("", "from math import *\nassert isclose(area(2), 4)", True),
        ("from math import *", "def near(a): return isclose(a, 4)\nassert near(2)", False),
        ("from math import *", "def check(f): assert isclose(f(2), 4)\ncheck(area)", False),
    ],
)
def test_a_function_that_nobody_names(setup: str, snippet: str, given: bool) -> None:
    """The program's own come before the library's only where they may be what is tested."""
    tests = asserts(setup=setup, asserts=[snippet])
    assert any(line.startswith("from math import ") for line in tests.imports) is given


def test_whether_anything_is_returned_is_asked_beside_the_function() -> None:
    tests = call(compare="not_none")
    names = {one.function for one in calls_of(tests)}
    assert [one.args for one in calls_of(tests)] == [(1,), (2,)] and len(names) == 1
    asked = run(module_of(tests, "def double(x):\n    return x"))[names.pop()]
    assert [asked(x) for x in (object(), None, 0, "", True, False)] == [
        True, False, True, True, True, False,
    ]  # fmt: skip
    assert calls_of(call()) is not calls_of(tests) and calls_of(call()) == call().calls
    tests = call(compare="not_none", fn_name="A.double")
    space = run(module_of(tests, "class A:\n    def double(self, x):\n        return x"))
    assert space[calls_of(tests)[0].function](None) is False


@pytest.mark.parametrize(
    ("key", "near"), [("compar", "compare"), ("input", "inputs"), ("asert", "asserts")]
)
def test_a_misspelt_key_is_named(key: str, near: str) -> None:
    row = {**STDIN, key: "x"}
    row.pop(near, None)
    with pytest.raises(BadTests, match=f"tests.{key}: no such key; did you mean {near}"):
        parse_tests(row)
    assert parse_tests({**STDIN, "n_base": 3, "time_limit": 2}) == parse_tests(STDIN)


def test_a_list_of_texts_is_a_list_of_asserts() -> None:
    texts = ["assert f(1) == 2", "assert f(2) == 3"]
    assert parse_tests(texts) == parse_tests({"type": "assert", "asserts": texts})
    with pytest.raises(BadTests, match="tests must be an object"):
        parse_tests([1, 2])
