"""Rows of public sets of programming tasks, whose tests stand in forms of their own -> plain rows.

deepcoder       agentica-org/DeepCoder-Preview-Dataset: `tests` is a text of JSON, one of four forms
livecodebench   lighteval/code_generation_lite: public tests, and private ones packed into a text
humaneval       evalplus/humanevalplus: a `check(candidate)` for `entry_point`
mbpp            evalplus/mbppplus: one program of tests, whose function's name stands in `test_list`

`tasks.form: deepcoder` in a config. A plain row has `prompt` and `tests` as the code verifier reads
them (and `task_id`, `context` where there are any), with all that the form did not use. A row that
is plain already passes, so that a file which `mintrl filter` wrote is read by the same config.
"""

from __future__ import annotations

import ast
import base64
import binascii
import io
import json
import pickle
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mintrl_env.errors import TaskError

MAX_PACKED = 1 << 30
"""Bytes that the tests of one row may have when they are unpacked."""

_STDIN = "Read the input from standard input, and print the answer to standard output."
_STARTER = "Complete this code:\n\n```python\n{}\n```"


def as_plain_row(form: str, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row of one of the forms as a plain one.

    Raises:
        TaskError: it is no such row, or has no test; says why, not where.
    """
    tests = row.get("tests")
    if isinstance(tests, Mapping) and "type" in tests:
        return row
    if isinstance(tests, str) and tests.startswith('{"type"'):  # out of a Parquet file of ours
        return row
    return FORMS[form](row)


def _deepcoder(row: Mapping[str, Any]) -> dict[str, Any]:
    tests = _json(row.get("tests"), "tests")
    metadata = _json(row.get("metadata") or {}, "metadata")
    if isinstance(tests, Mapping):  # taco
        cases = [
            {"input": given, "output": wanted}
            for given, wanted in zip(
                _list(tests.get("inputs"), "tests.inputs"),
                _list(tests.get("outputs"), "tests.outputs"),
                strict=False,
            )
        ]
        function = tests.get("fn_name")
        plain = _calls(function, cases) if function else _stdin(cases)
    else:
        plain = _cases(_list(tests, "tests"), metadata)
    return _row(row, _text(row, "problem"), plain, used=("problem", "solutions"))


def _livecodebench(row: Mapping[str, Any]) -> dict[str, Any]:
    cases = [
        *_list(_json(row.get("public_test_cases"), "public_test_cases"), "public_test_cases"),
        *_list(_unpacked(row.get("private_test_cases") or "[]"), "private_test_cases"),
    ]
    plain = _cases(cases, _json(row.get("metadata") or {}, "metadata"))
    used = ("question_content", "public_test_cases", "private_test_cases", "question_id")
    return {
        "task_id": row.get("question_id"),
        **_row(row, _text(row, "question_content"), plain, used=used),
    }


def _humaneval(row: Mapping[str, Any]) -> dict[str, Any]:
    code, function = _text(row, "prompt"), _text(row, "entry_point")
    tests = {
        "type": "assert",
        "check": _text(row, "test"),
        "fn_name": function,
        "setup": _before(code, function),  # imports and helpers, which a response may leave out
    }
    solution = row.get("canonical_solution")
    used = ("test", "canonical_solution", "prompt", "entry_point")
    plain = _row(
        row, f"Complete this function.\n\n```python\n{code.strip()}\n```", tests, used=used
    )
    return {**plain, "context": code + solution} if isinstance(solution, str) else plain


def _mbpp(row: Mapping[str, Any]) -> dict[str, Any]:
    examples = [str(line) for line in _list(row.get("test_list"), "test_list")]
    if not examples:
        raise TaskError("test_list is empty, and the function's name stands nowhere else")
    code = _text(row, "code")
    tests = {
        "type": "assert",
        "code": _text(row, "test"),
        "fn_name": _function(code, examples[0]),
        "setup": "\n".join(str(line) for line in row.get("test_imports") or ()),
    }
    shown = "\n".join(examples)
    prompt = f"{_text(row, 'prompt').strip()}\n\nIt has to pass:\n\n```python\n{shown}\n```"
    used = ("prompt", "code", "test", "test_list", "test_imports")
    return {**_row(row, prompt, tests, used=used), "context": code}


FORMS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "deepcoder": _deepcoder,
    "livecodebench": _livecodebench,
    "humaneval": _humaneval,
    "mbpp": _mbpp,
}


# --- lists of cases


def _cases(cases: Sequence[Any], metadata: Any) -> dict[str, Any]:
    """Cases that say themselves what they are; those of one task are of one kind."""
    if not cases or not all(isinstance(case, Mapping) for case in cases):
        raise TaskError("there are no test cases" if not cases else "a test case is no object")
    kinds = {str(case.get("testtype") or case.get("type") or "stdin") for case in cases}
    if kinds <= {"stdin", "stdin_stdout"}:
        return _stdin(cases)
    if kinds == {"functional"}:
        return _functional(cases, metadata)
    if kinds == {"function_call"}:
        names = {case.get("fn_name") for case in cases}
        return _calls(names.pop() if len(names) == 1 else None, cases)
    raise TaskError(
        f"test cases of several kinds, or of an unknown one: {', '.join(sorted(kinds))}"
    )


def _stdin(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "type": "stdin",
        "inputs": [_lines(case.get("input")) for case in cases],
        "outputs": [_lines(case.get("output")) for case in cases],
    }


def _functional(cases: Sequence[Mapping[str, Any]], metadata: Any) -> dict[str, Any]:
    """LiveCodeBench's: an argument a line, each JSON; the function's name is in the metadata."""
    own = cases[0].get("metadata")
    found = [m.get("func_name") for m in (metadata, own) if isinstance(m, Mapping)]
    function = next((name for name in found if name), None)
    arguments = [
        [_json(line, "input") for line in str(case.get("input", "")).splitlines() if line.strip()]
        for case in cases
    ]
    wanted = [_json(case.get("output"), "output") for case in cases]
    return _call(function, arguments, wanted)


def _calls(function: Any, cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Arguments as a list. The value stands in a list of its own where it does so in every case."""
    arguments = [_list(case.get("input"), "input") for case in cases]
    wanted = [case.get("output") for case in cases]
    if all(isinstance(value, (list, tuple)) and len(value) == 1 for value in wanted):
        wanted = [value[0] for value in wanted if value is not None]
    return _call(function, arguments, wanted)


def _call(function: Any, arguments: Sequence[Any], wanted: Sequence[Any]) -> dict[str, Any]:
    if not isinstance(function, str) or not function:
        raise TaskError("the tests call a function, and its name stands nowhere")
    return {"type": "call", "fn_name": function, "inputs": arguments, "outputs": wanted}


def _row(
    row: Mapping[str, Any], problem: str, tests: Mapping[str, Any], *, used: Sequence[str]
) -> dict[str, Any]:
    """The plain row: the problem with what a response has to look like, the tests, the rest."""
    parts, starter = [problem.strip()], row.get("starter_code")
    if isinstance(starter, str) and starter.strip():
        parts.append(_STARTER.format(starter.strip("\n")))
    elif tests["type"] == "stdin":
        parts.append(_STDIN)
    elif tests["type"] == "call":
        parts.append(f"Write a function `{tests['fn_name']}`.")
    gone = {*used, "tests", "starter_code", "metadata"}
    rest = {key: value for key, value in row.items() if key not in gone}
    return {**rest, "prompt": "\n\n".join(parts), "tests": dict(tests)}


# --- values


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise TaskError(f"field {name!r} must be a text and is {'empty' if not value else 'none'}")
    return value


def _lines(value: Any) -> str:
    """What is fed or printed; some rows hold it as a list of lines."""
    if isinstance(value, (list, tuple)):
        return "\n".join(str(line) for line in value)
    return "" if value is None else str(value)


def _list(value: Any, name: str) -> Sequence[Any]:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        raise TaskError(f"field {name!r} must be a list")
    return value


def _json(value: Any, name: str) -> Any:
    if not isinstance(value, (str, bytes)):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise TaskError(f"field {name!r} is no JSON: {error}") from error


class _PlainUnpickler(pickle.Unpickler):
    """Reads built-in values alone: a pickle that names any class or function is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _unpacked(value: Any) -> Any:
    """Private tests: JSON, or base64 of a zlib stream of a pickled text of JSON."""
    if not isinstance(value, str) or value.lstrip()[:1] == "[":
        return _json(value, "private_test_cases")
    try:
        stream = zlib.decompressobj()
        data = stream.decompress(base64.b64decode(value, validate=True), MAX_PACKED)
        if stream.unconsumed_tail:
            raise ValueError(f"more than {MAX_PACKED} bytes")
        found = _PlainUnpickler(io.BytesIO(data)).load()
    except (binascii.Error, zlib.error, pickle.UnpicklingError, ValueError, EOFError) as error:
        raise TaskError(f"field 'private_test_cases' cannot be unpacked: {error}") from error
    return _json(found, "private_test_cases")


def _before(code: str, function: str) -> str:
    """What stands before a function of a program."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError):
        return ""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == function:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            return "\n".join(code.splitlines()[: first - 1]).strip()
    return ""


def _function(code: str, example: str) -> str:
    """The function of a reference program that an example calls."""
    try:
        defined = [n.name for n in ast.parse(code).body if isinstance(n, ast.FunctionDef)]
        called = {
            node.func.id
            for node in ast.walk(ast.parse(example.strip()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
    except (SyntaxError, ValueError) as error:
        raise TaskError(f"the reference or its first example is no Python: {error}") from error
    found = next((name for name in reversed(defined) if name in called), None)
    if found is None:
        raise TaskError(f"no function of the reference is called in {example[:60]!r}")
    return found
