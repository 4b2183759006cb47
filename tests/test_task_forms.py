"""Rows in the forms of public sets of programming tasks, read and then graded by the real verifier."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

from mintrl_env.errors import TaskError
from mintrl_env.task_forms import FORMS
from mintrl_env.tasks import TaskColumns, load_tasks
from mintrl_env.types import Task
from mintrl_env.verifiers.code_tests import CodeVerifier

ADD = "a, b = map(int, input().split())\nprint(a + b)\n"
TWICE = (
    "class Solution:\n    def twice(self, xs: list, n: int):\n        return [n * x for x in xs]\n"
)


def packed(cases: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(cases)))).decode()


STDIN_CASES = [{"input": "1 2\n", "output": "3\n"}, {"input": "20 22\n", "output": "42\n"}]
ROWS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    # name: form, row, a right program, what the prompt says at its end
    "deepcoder, cases fed": (
        "deepcoder",
        {
            "problem": "Add two numbers.",
            "solutions": [ADD],
            "tests": json.dumps([{"type": "stdin_stdout", **case} for case in STDIN_CASES]),
        },
        ADD,
        "print the answer to standard output.",
    ),
    "deepcoder, cases without a kind": (
        "deepcoder",
        {"problem": "Add two numbers.", "tests": json.dumps(STDIN_CASES)},
        ADD,
        "print the answer to standard output.",
    ),
    "deepcoder, inputs and outputs": (
        "deepcoder",
        {
            "problem": "Add two numbers.",
            "tests": json.dumps({"inputs": [["1 2", ""], "3 4\n"], "outputs": ["3\n", ["7"]]}),
        },
        ADD,
        "print the answer to standard output.",
    ),
    "deepcoder, inputs of a function, values in lists": (
        "deepcoder",
        {
            "problem": "Add.",
            "tests": json.dumps(
                {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]}
            ),
        },
        "def add(a, b):\n    return a + b\n",
        "Write a function `add`.",
    ),
    "deepcoder, calls": (
        "deepcoder",
        {
            "problem": "Double.",
            "tests": json.dumps(
                [
                    {"type": "function_call", "fn_name": "d", "input": [[1, 2]], "output": [2, 4]},
                    {"type": "function_call", "fn_name": "d", "input": [[]], "output": []},
                ]
            ),
        },
        "def d(xs):\n    return [2 * x for x in xs]\n",
        "Write a function `d`.",
    ),
    "deepcoder, a method": (
        "deepcoder",
        {
            "problem": "Multiply.",
            "starter_code": "class Solution:\n    def twice(self, xs: list, n: int):",
            "metadata": {"func_name": "twice"},
            "tests": json.dumps(
                [{"testtype": "functional", "input": "[1, 2]\n3", "output": "[3, 6]"}]
            ),
        },
        TWICE,
        "Complete this code:\n\n```python\nclass Solution:\n    def twice(self, xs: list, n: int):\n```",
    ),
    "livecodebench, fed": (
        "livecodebench",
        {
            "question_title": "Sum",
            "question_content": "Add two numbers.",
            "question_id": "abc1_a",
            "starter_code": "",
            "public_test_cases": json.dumps([{**STDIN_CASES[0], "testtype": "stdin"}]),
            "private_test_cases": packed([{**STDIN_CASES[1], "testtype": "stdin"}]),
            "metadata": "{}",
        },
        ADD,
        "print the answer to standard output.",
    ),
    "livecodebench, a method": (
        "livecodebench",
        {
            "question_content": "Multiply.",
            "question_id": "17",
            "starter_code": "class Solution:\n    def twice(self, xs: list, n: int):\n        ",
            "public_test_cases": json.dumps(
                [{"input": "[1]\n2", "output": "[2]", "testtype": "functional"}]
            ),
            "private_test_cases": json.dumps(
                [{"input": "[]\n2", "output": "[]", "testtype": "functional"}]
            ),
            "metadata": json.dumps({"func_name": "twice"}),
        },
        TWICE,
        "```",
    ),
    "humaneval": (
        "humaneval",
        {
            "task_id": "Own/0",
            "prompt": (
                "import math\n\ndef half(n):\n    return n // 2\n\n"
                'def root(n):\n    """Root of half."""\n'
            ),
            "entry_point": "root",
            "canonical_solution": "    return math.isqrt(half(n))\n",
            "test": (
                "import numpy as np\n\ndef check(candidate):\n"
                "    for n, wanted in [(10, 2), (32, 4)]:\n"
                "        assert np.allclose(candidate(n), wanted)\n"
            ),
        },
        "def root(n):\n    return math.isqrt(half(n))\n",  # leaves out what stands before it
        "```",
    ),
    "mbpp": (
        "mbpp",
        {
            "task_id": 7,
            "prompt": "Write a function that adds one.",
            "code": "def helper(n):\n    return 1\n\ndef plus(n):\n    return n + helper(n)\n",
            "test_imports": ["import math"],
            "test_list": ["assert plus(1) == 2", "assert plus(math.floor(2.5)) == 3"],
            "test": (
                "import numpy as np\n\ninputs = [[1], [5]]\nresults = [2, 6]\n"
                "for given, wanted in zip(inputs, results):\n"
                "    assert np.allclose(plus(*given), wanted)\n"
            ),
        },
        "def plus(n):\n    return n + 1\n",
        "```python\nassert plus(1) == 2\nassert plus(math.floor(2.5)) == 3\n```",
    ),
}


def task_of(form: str, row: Any) -> Task:
    return TaskColumns(form=form, verifier="code").task(row, "file:3", 2)


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_read_and_a_right_program_passes_and_a_wrong_one_does_not(name: str) -> None:
    form, row, right, ending = ROWS[name]
    task = task_of(form, row)
    assert task.prompt_text.endswith(ending)
    verifier = CodeVerifier(sandbox_options={"packages": ["numpy"]}, limits={"wall_s": 20})
    score = verifier.score_sync(task, fenced(right))
    assert (score.reward, score.status) == (1.0, "passed"), score.detail
    wrong = right.replace("+", "-").replace("*", "-").replace("isqrt", "sqrt")
    assert verifier.score_sync(task, fenced(wrong)).reward == 0.0
    assert verifier.score_sync(task, fenced("x = 1")).reward == 0.0
    # A task's rest goes on into its metadata, without tests and solutions.
    assert not {"tests", "solutions", "private_test_cases", "test"} & set(task.metadata)


def test_ids_and_reference_solutions_are_kept() -> None:
    assert task_of("livecodebench", ROWS["livecodebench, fed"][1]).task_id == "abc1_a"
    assert task_of("livecodebench", ROWS["livecodebench, fed"][1]).metadata == {
        "question_title": "Sum"
    }
    own = task_of("humaneval", ROWS["humaneval"][1])
    assert (own.task_id, own.context is not None) == ("Own/0", True)
    assert own.context is not None and own.context.endswith("isqrt(half(n))\n")
    assert task_of("mbpp", ROWS["mbpp"][1]).task_id == "7"
    # A row without an id is named by its number.
    assert task_of("deepcoder", ROWS["deepcoder, calls"][1]).task_id == "2"


def test_a_row_that_is_plain_already_passes() -> None:
    tests = {"type": "stdin", "inputs": ["1 2"], "outputs": ["3"]}
    task = task_of("deepcoder", {"task_id": "a", "prompt": "Add.", "tests": tests})
    assert (task.task_id, task.prompt, task.tests) == ("a", "Add.", tests)


def broken(name: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    form, row, _, _ = ROWS[name]
    return form, {**row, **changes}


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("taken",))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (broken("deepcoder, cases fed", tests="[1"), "field 'tests' is no JSON"),
        (broken("deepcoder, cases fed", tests="[]"), "there are no test cases"),
        (broken("deepcoder, cases fed", tests=None), "field 'tests' must be a list"),
        (broken("deepcoder, cases fed", problem=""), "field 'problem' must be a text and is empty"),
        (
            broken(
                "deepcoder, calls", tests='[{"type": "function_call", "input": [], "output": 1}]'
            ),
            "the tests call a function, and its name stands nowhere",
        ),
        (
            broken("deepcoder, calls", tests='[{"type": "web", "input": "", "output": ""}]'),
            "of an unknown one: web",
        ),
        (broken("livecodebench, fed", private_test_cases="!!"), "cannot be unpacked"),
        (
            broken(
                "livecodebench, fed",
                private_test_cases=base64.b64encode(zlib.compress(pickle.dumps(Evil()))).decode(),
            ),
            "cannot be unpacked: it names builtins.print",
        ),
        (broken("humaneval", entry_point=None), "field 'entry_point' must be a text"),
        (broken("mbpp", test_list=[]), "test_list is empty"),
        (broken("mbpp", test_list=["assert other(1) == 2"]), "no function of the reference"),
    ],
)
def test_a_row_of_another_form_is_refused_with_its_place(
    case: tuple[str, dict[str, Any]], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    form, row = case
    with pytest.raises(TaskError) as caught:
        task_of(form, row)
    text = str(caught.value)
    assert text.startswith(f"file:3: no row of the form {form}: ") and message in text
    assert capsys.readouterr().out == ""  # nothing of a pickle has run


def test_tests_that_unpack_to_too_much_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mintrl_env.task_forms.MAX_PACKED", 100)
    form, row = broken("livecodebench, fed", private_test_cases=packed([{"input": "1" * 500}]))
    with pytest.raises(TaskError, match="more than 100 bytes"):
        task_of(form, row)


def test_an_unknown_form_is_named() -> None:
    with pytest.raises(TaskError, match=f"form 'x' is none of {', '.join(FORMS)}"):
        TaskColumns(form="x")


def test_rows_that_cannot_be_used_are_left_out_where_somebody_is_told(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    rows = [
        {"problem": "1 + 1?", "answer": 2},
        {"problem": "?"},
        {"id": "0", "problem": "p", "answer": 1},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    told: list[str] = []
    tasks = load_tasks(str(path), on_unusable=told.append)
    assert [task.prompt for task in tasks] == ["1 + 1?"]
    assert len(told) == 2
    assert told[0].startswith(f"{path}:2: no answer") and "stands at" in told[1]
    path.write_text(json.dumps(rows[1]))
    with pytest.raises(TaskError, match="holds no rows to use"):
        load_tasks(str(path), on_unusable=told.append)
