"""Small problems of a recipe's kind, written as the recipe reads its own: its columns, its form of tests.

Each comes with a response that is right and one that is wrong, so that the verifier, and for code the
sandbox, has real work: a random model never writes a whole program.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mintrl_env import recipes
from mintrl_env.config import TasksSection
from mintrl_env.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Sample:
    """A row, and what answers it rightly and wrongly."""

    row: dict[str, Any]
    right: str
    wrong: str


def samples(section: TasksSection, where: str, *, first: int, count: int) -> list[Sample]:
    """`count` rows that the section can read; those from another `first` are other problems.

    Raises:
        ConfigError: there are none of its kind.
    """
    if section.verifier == "code":
        make = _FORMS.get(section.form or "", _plain_code)
    elif section.verifier == "math":
        make = _math
    else:
        raise ConfigError(
            f"{where}.verifier: a dry run has problems for math and code, and none for "
            f"{section.verifier!r}; a few of your own do as well: --set {where}.path=FILE"
        )
    return [make(section, number) for number in range(first, first + count)]


def write_rows(path: Path, rows: list[Sample]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(sample.row) + "\n" for sample in rows), encoding="utf-8")
    return str(path)


def _named(section: TasksSection, **fields: Any) -> dict[str, Any]:
    """A row under the names by which the section reads it."""
    columns = recipes.task_columns(section)
    return {columns.names(f)[0]: value for f, value in fields.items() if columns.names(f)}


def _fenced(code: str) -> str:
    return f"The program:\n\n```python\n{code}```\n"


def _math(section: TasksSection, k: int) -> Sample:
    a, b = 12 + k, 30 + 2 * k
    row = _named(
        section,
        task_id=f"sum-{k}",
        prompt=f"What is {a} + {b}?",
        answer=str(a + b),
        context=f"Start from {a}.\n\nAdding {b} gives {a + b}.\n",
    )
    return Sample(row, f"So it is \\boxed{{{a + b}}}.", f"So it is \\boxed{{{a + b + 1}}}.")


def _sum_cases(k: int) -> tuple[list[dict[str, str]], str, str]:
    cases = [
        {"input": f"{a} {b}\n", "output": f"{a + b + k}\n"} for a, b in ((1, 2), (20, 22), (k, 5))
    ]
    program = f"a, b = map(int, input().split())\nprint(a + b + {k})\n"
    return cases, program, program.replace("+ b", "- b")


def _plain_code(section: TasksSection, k: int) -> Sample:
    cases, right, wrong = _sum_cases(k)
    tests = {
        "type": "stdin",
        "inputs": [case["input"] for case in cases],
        "outputs": [case["output"] for case in cases],
    }
    row = _named(
        section, task_id=f"code-{k}", prompt=f"Print the sum of two numbers and {k}.", tests=tests
    )
    return Sample(row, _fenced(right), _fenced(wrong))


def _deepcoder(section: TasksSection, k: int) -> Sample:
    """By turns the three forms that its subsets have."""
    cases, right, wrong = _sum_cases(k)
    problem = f"Read two numbers and print their sum and {k}."
    if k % 3 == 0:
        tests: Any = [{"type": "stdin_stdout", **case} for case in cases]
        return Sample(
            {"problem": problem, "tests": json.dumps(tests)}, _fenced(right), _fenced(wrong)
        )
    if k % 3 == 1:
        tests = {"inputs": [c["input"] for c in cases], "outputs": [c["output"] for c in cases]}
        return Sample(
            {"problem": problem, "tests": json.dumps(tests)}, _fenced(right), _fenced(wrong)
        )
    starter, right, wrong = _method(k)
    tests = [{"testtype": "functional", "input": "[1, 2]\n3", "output": str([3 + k, 6 + k])}]
    row = {
        "problem": f"Multiply each number and add {k}.",
        "starter_code": starter,
        "metadata": {"func_name": "scaled"},
        "tests": json.dumps(tests),
    }
    return Sample(row, _fenced(right), _fenced(wrong))


def _method(k: int) -> tuple[str, str, str]:
    starter = "class Solution:\n    def scaled(self, xs: list, n: int) -> list:\n"
    right = f"{starter}        return [n * x + {k} for x in xs]\n"
    return starter, right, right.replace("n * x", "n - x")


def _livecodebench(section: TasksSection, k: int) -> Sample:
    cases, right, wrong = _sum_cases(k)
    cases = [{**case, "testtype": "stdin"} for case in cases]
    row = {
        "question_id": f"own_{k}",
        "question_content": f"Read two numbers and print their sum and {k}.",
        "starter_code": "",
        "public_test_cases": json.dumps(cases[:1]),
        "private_test_cases": json.dumps(cases[1:]),
        "metadata": "{}",
    }
    return Sample(row, _fenced(right), _fenced(wrong))


def _humaneval(section: TasksSection, k: int) -> Sample:
    head = f'def plus_{k}(n):\n    """Return n and {k}."""\n'
    row = {
        "task_id": f"Own/{k}",
        "prompt": head,
        "entry_point": f"plus_{k}",
        "canonical_solution": f"    return n + {k}\n",
        "test": f"def check(candidate):\n    for n in range(5):\n        assert candidate(n) == n + {k}\n",
    }
    return Sample(row, _fenced(f"{head}    return n + {k}\n"), _fenced(f"{head}    return n\n"))


def _mbpp(section: TasksSection, k: int) -> Sample:
    code = f"def times_{k}(n):\n    return n * {k + 2}\n"
    row = {
        "task_id": k,
        "prompt": f"Write a function that multiplies by {k + 2}.",
        "code": code,
        "test_imports": [],
        "test_list": [f"assert times_{k}(1) == {k + 2}"],
        "test": f"for n in range(5):\n    assert times_{k}(n) == n * {k + 2}\n",
    }
    return Sample(row, _fenced(code), _fenced(code.replace("*", "+")))


_FORMS: dict[str, Callable[[TasksSection, int], Sample]] = {
    "deepcoder": _deepcoder,
    "livecodebench": _livecodebench,
    "humaneval": _humaneval,
    "mbpp": _mbpp,
}
