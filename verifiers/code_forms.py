"""The tests of a code task, as people write them -> tests that can be run.

    stdin    inputs, outputs (texts); compare: lines | tokens
    call     fn_name (or entry_point); inputs: argument lists; outputs (or expected); encoding:
             python-literal | json where they are texts; compare: equal | set | not_none; atol, rtol
    assert   one of: asserts (snippets), check (a `def check(candidate)`), code (one snippet, or the
             asserts and what comes before them); fn_name where the snippets do not call it by name

`setup` is a text that comes before the program (and before the snippets). A list of texts alone is a
list of asserts. Other keys are ignored, unless they look like one of these misspelt.
A dotted name `Class.method` is called on a new object. Whatever cannot be run raises BadTests,
which says where: a task without a usable test must never look like a wrong response.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from mintrl_env.surrogates import whole_text
from mintrl_env.verifiers.code_compare import How, Rule
from mintrl_env.verifiers.code_library import calls_more_than_the_library, library_imports
from mintrl_env.verifiers.code_values import DECODERS, BadTests, kind_of, plain
from mintrl_env.verifiers.sandbox import Call, Limits


@dataclass(frozen=True, slots=True)
class StdinTests:
    """Programs' runs.

    Attributes:
        inputs, outputs: what is fed and what must be printed, one of each a test.
        by_lines: outputs are compared line by line, else as one list of tokens.
        setup: comes before the program.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    by_lines: bool = True
    setup: str = ""

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True, slots=True)
class CallTests:
    """Calls of one function.

    Attributes:
        calls, expected: what is called and what it must return, one of each a test.
        rule: how the two are compared.
        setup: comes before the program.
    """

    calls: tuple[Call, ...]
    expected: tuple[Any, ...]
    rule: Rule = field(default_factory=Rule)
    setup: str = ""

    def __len__(self) -> int:
        return len(self.calls)


@dataclass(frozen=True, slots=True)
class AssertTests:
    """Snippets of test code.

    Attributes:
        snippets: run in order in one namespace, one a test.
        function: the name of the function under test, where it is known.
        setup: comes before the program and before the snippets.
        imports: what the snippets need of the library by name, lest the program gives it to them.
    """

    snippets: tuple[str, ...]
    function: str | None = None
    setup: str = ""
    imports: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.snippets)


Tests = StdinTests | CallTests | AssertTests
_KEYS = (
    "type fn_name entry_point function inputs outputs expected compare encoding atol rtol asserts "
    "check code setup limits"
).split()


def parse_tests(tests: Any, *, entry_point: Any = None, stdin_compare: str = "lines") -> Tests:
    """Tests as a mapping, or as a text of JSON, in one of the forms above.

    Args:
        entry_point: the function's name where the tests do not give one (a column of the row).
        stdin_compare: "lines" or "tokens", for stdin tests that do not give `compare`.

    Raises:
        BadTests: they cannot be run; names the key.
    """
    row = read_mapping(tests, "tests")
    _refuse_misspelt(row)
    own = _first(row, "fn_name", "entry_point", "function")
    function = own if own is not None else entry_point
    if function is not None and not (
        isinstance(function, str) and all(part.isidentifier() for part in function.split("."))
    ):
        raise BadTests(f"tests.fn_name must be a function's name, not {kind_of(function)}")
    kind = row.get("type")
    if kind is None:
        kind = _guess(row, own is not None)
    parser = _PARSERS.get(kind) if isinstance(kind, str) else None
    if parser is None:
        shown = ascii(kind)[:40] if isinstance(kind, str) else kind_of(kind)
        raise BadTests(f"tests.type must be stdin, call or assert, not {shown}")
    if kind == "stdin":
        row.setdefault("compare", stdin_compare)
    return parser(row, function)


def parse_limits(given: Any, base: Limits, where: str = "limits") -> Limits:
    """`base`, with what a mapping (or a text of JSON) gives instead.

    Raises:
        BadTests: an unknown key, or a value that is no number > 0.
    """
    row = read_mapping(given, where)
    known = {"wall_s": base.wall_s, "mem_mb": base.mem_mb, "output_bytes": base.output_bytes}
    for key, value in row.items():
        if key not in known:
            raise BadTests(f"{where}.{key}: unknown; known: {', '.join(known)}")
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value < math.inf:
            raise BadTests(f"{where}.{key} must be a number > 0, not {ascii(value)[:40]}")
        known[key] = float(value) if key == "wall_s" else max(1, int(value))
    return Limits(known["wall_s"], int(known["mem_mb"]), int(known["output_bytes"]))


# --- the three forms -----------------------------------------------------------------------------


def _stdin(row: Mapping[str, Any], function: str | None) -> StdinTests:
    compare = row["compare"]
    if compare not in ("lines", "tokens"):
        raise BadTests(f"tests.compare must be lines or tokens, not {ascii(compare)[:40]}")
    inputs, outputs = _pairs(row)
    for key, texts in (("inputs", inputs), ("outputs", outputs)):
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise BadTests(f"tests.{key}[{index}] must be text, not {kind_of(text)}")
    return StdinTests(
        tuple(map(whole_text, inputs)),
        tuple(map(whole_text, outputs)),
        compare == "lines",
        _text(row, "setup"),
    )


def _call(row: Mapping[str, Any], function: str | None) -> CallTests:
    if function is None:
        raise BadTests("tests.fn_name is missing: a call test needs the function's name")
    encoding = row.get("encoding")
    if encoding is not None and encoding not in DECODERS:
        known = " or ".join(DECODERS)
        raise BadTests(f"tests.encoding must be {known}, not {ascii(encoding)[:40]}")
    decode: Callable[[Any, str], Any] = DECODERS[encoding] if encoding else plain
    inputs, outputs = _pairs(row)
    calls = []
    for index, given in enumerate(inputs):
        arguments = decode(given, f"tests.inputs[{index}]")
        if isinstance(arguments, (list, tuple)):
            calls.append(Call(function, tuple(arguments)))
        elif isinstance(arguments, dict) and all(isinstance(k, str) for k in arguments):
            calls.append(Call(function, (), arguments))
        else:
            raise BadTests(
                f"tests.inputs[{index}] must be a list of arguments, not {kind_of(arguments)}"
            )
    expected = tuple(decode(v, f"tests.outputs[{i}]") for i, v in enumerate(outputs))
    return CallTests(tuple(calls), expected, _rule(row), _text(row, "setup"))


def _assert(row: Mapping[str, Any], function: str | None) -> AssertTests:
    asserts = _list(row, "asserts")
    code, check = _text(row, "code"), _text(row, "check")
    if asserts:
        snippets = []
        for index, snippet in enumerate(asserts):
            if not isinstance(snippet, str):
                raise BadTests(f"tests.asserts[{index}] must be text, not {kind_of(snippet)}")
            _parsed(snippet, f"tests.asserts[{index}]")
            snippets.append(snippet)
        if code.strip():
            snippets = _with_preparation(code, snippets)
    elif check.strip():
        snippets = [_with_check(check, function, "check")]
    elif code.strip():
        tree = _parsed(code, "tests.code")
        snippets = [code]
        if _only_defines_check(tree):  # else nothing at all would be tested
            snippets = [_with_check(code, function, "code")]
    else:
        raise BadTests("an assert test needs one of: tests.asserts, tests.check, tests.code")
    setup = _text(row, "setup")
    if setup.strip():
        _parsed(setup, "tests.setup")
    # Where nobody names the function under test, it may be one that the library has too.
    known = function is not None or calls_more_than_the_library(setup, snippets)
    imports = library_imports(setup, snippets) if known else ()
    return AssertTests(tuple(map(whole_text, snippets)), function, setup, imports)


_PARSERS: dict[str, Callable[[Mapping[str, Any], str | None], Tests]] = {
    "stdin": _stdin,
    "call": _call,
    "assert": _assert,
}


def _guess(row: Mapping[str, Any], function: bool) -> str | None:
    if any(row.get(key) is not None for key in ("asserts", "check", "code")):
        return "assert"
    if row.get("inputs") is not None:
        return "call" if function else "stdin"
    return None


def _with_preparation(code: str, asserts: list[str]) -> list[str]:
    """Snippets whose `code` holds them too: what it does before them belongs to the first."""
    _parsed(code, "tests.code")
    together = "\n".join(asserts).strip()
    if code.strip() == together:
        return asserts
    if not code.strip().endswith("\n" + together):
        return [code]
    before = code.strip().removesuffix(together)
    return [before + asserts[0], *asserts[1:]]


def _with_check(source: str, function: str | None, key: str) -> str:
    tree = _parsed(source, f"tests.{key}")
    if not any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body):
        raise BadTests(f"tests.{key} must define check(candidate)")
    if function is None:
        raise BadTests(f"tests.fn_name is missing: tests.{key} needs the candidate's name")
    return f"{source}\n\ncheck({candidate(function)})\n"


def candidate(function: str) -> str:
    """An expression for the function under test."""
    head, dot, method = function.rpartition(".")
    return f"{head}().{method}" if dot else function


def _only_defines_check(tree: ast.Module) -> bool:
    """Is there a `check` that nothing calls, among statements that test nothing themselves?"""
    if not any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body):
        return False
    passive = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign, ast.Constant)
    return all(
        isinstance(node.value if isinstance(node, ast.Expr) else node, passive)
        for node in tree.body
    )


# --- reading -------------------------------------------------------------------------------------


def read_mapping(given: Any, where: str) -> dict[str, Any]:
    """The entries of a mapping, or of a text of JSON, less those that are null (as a table fills
    them up).

    Raises:
        BadTests: it is neither; names `where`.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise BadTests(f"{where} is no JSON: {error}") from error
    if given is None:
        raise BadTests(f"{where}: there are none")
    if (
        where == "tests"
        and isinstance(given, (list, tuple))
        and given
        and all(isinstance(text, str) for text in given)
    ):
        given = {"type": "assert", "asserts": list(given)}
    if not isinstance(given, Mapping):
        raise BadTests(f"{where} must be an object, not {kind_of(given)}")
    return {key: value for key, value in given.items() if value is not None}


def _refuse_misspelt(row: Mapping[str, Any]) -> None:
    # Left out without a word, `compar: set` would change verdicts.
    for key in row:
        near = get_close_matches(str(key), _KEYS, n=1, cutoff=0.8) if key not in _KEYS else []
        if near and near[0] not in row:
            raise BadTests(f"tests.{ascii(key)[1:-1][:40]}: no such key; did you mean {near[0]}?")


def _first(row: Mapping[str, Any], *keys: str) -> Any:
    return next((row[key] for key in keys if row.get(key) is not None), None)


def _text(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key, "")
    if not isinstance(value, str):
        raise BadTests(f"tests.{key} must be text, not {kind_of(value)}")
    return whole_text(value.replace("\r\n", "\n"))


def _list(row: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = row.get(key, ())
    if isinstance(value, str):  # a column of a table that cannot hold values of several types
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise BadTests(f"tests.{key} is a text that is no JSON: {error}") from error
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise BadTests(f"tests.{key} must be a list, not {kind_of(value)}")
    return value


def _pairs(row: Mapping[str, Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    if row.get("inputs") is None:
        raise BadTests("tests.inputs is missing")
    key = "outputs" if row.get("outputs") is not None else "expected"
    if row.get(key) is None:
        raise BadTests("tests.outputs is missing (or tests.expected)")
    inputs, outputs = _list(row, "inputs"), _list(row, key)
    if len(inputs) != len(outputs):
        raise BadTests(
            f"tests.inputs has {len(inputs)} entries and tests.{key} {len(outputs)}: they are pairs"
        )
    if not inputs:
        raise BadTests("tests.inputs is empty: nothing would be tested")
    return inputs, outputs


def _rule(row: Mapping[str, Any]) -> Rule:
    name = row.get("compare") or "strict"
    if name not in list(How):
        raise BadTests(f"tests.compare must be {', '.join(How)}, not {ascii(name)[:40]}")
    rule = Rule(How(name))
    tolerances = []
    for key, default in (("atol", rule.atol), ("rtol", rule.rtol)):
        value = row.get(key, 0.0)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 <= value < math.inf:
            raise BadTests(f"tests.{key} must be a number >= 0, not {ascii(value)[:40]}")
        tolerances.append(float(value) or default)
    return Rule(How(name), *tolerances)


def _parsed(source: str, where: str) -> ast.Module:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise BadTests(f"{where} is no Python{line}: {reason}") from error
    if not tree.body:
        raise BadTests(f"{where} is empty: nothing would be tested")
    return tree
