"""Public sets of programming tasks: every reference passes its own tests, a stub passes none."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mintrl_env.tasks import TaskColumns
from mintrl_env.types import Score, Task
from mintrl_env.verifiers.code_forms import StdinTests, parse_tests
from mintrl_env.verifiers.code_tests import CodeVerifier

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "code"
pytestmark = pytest.mark.skipif(not DATA.exists(), reason="../shared/data/code is not there")

SETS = {"humaneval": 134, "humanevalplus": 134, "mbpp": 944, "mbppplus": 348, "leetcode": 1939}
TOO_SLOW = {"mbpp-123"}
"""References that run for about 10 s, or longer."""
COLUMNS = TaskColumns(columns={"context": "canonical_solution"}, verifier="code")


@cache
def tasks(name: str) -> Sequence[Task]:
    with (DATA / f"{name}.jsonl").open() as lines:
        return [COLUMNS.task(json.loads(line), name, n) for n, line in enumerate(lines)]


def fenced(code: str) -> str:
    return f"Here it is.\n\n```python\n{code}\n```\n"


def reference(task: Task) -> str:
    return fenced(task.context or "")


def stub(task: Task) -> str:
    """The right name, any arguments, no answer."""
    head, dot, name = task.metadata["entry_point"].rpartition(".")
    if dot:
        return fenced(f"class {head}:\n    def {name}(self, *args, **kwargs):\n        return None")
    return fenced(f"def {name}(*args, **kwargs):\n    return None")


def verdicts(chosen: Sequence[Task], responses: Sequence[str]) -> list[Score]:
    verifier = CodeVerifier(limits={"wall_s": 10}, total_s=300)
    return verifier.score_batch(zip(chosen, responses, strict=True))


def check(chosen: Sequence[Task]) -> None:
    wrong = {}
    for task, score in zip(chosen, verdicts(chosen, [reference(t) for t in chosen]), strict=True):
        if score.status == "timeout":  # again, alone: the machine may have been busy
            [score] = verdicts([task], [reference(task)])
        if score.reward != 1.0:
            wrong[task.task_id] = score
    slow = {i for i, score in wrong.items() if i in TOO_SLOW and score.status == "timeout"}
    assert set(wrong) == slow, wrong
    for task, score in zip(chosen, verdicts(chosen, [stub(t) for t in chosen]), strict=True):
        assert score.reward == 0.0, (task.task_id, score)


@pytest.mark.parametrize("name", SETS)
def test_references_pass_and_stubs_do_not(name: str) -> None:
    rows = tasks(name)
    chosen = rows[:: len(rows) // 6][:6]
    if name in ("humanevalplus", "mbppplus"):  # some of the rows have tests of another form
        chosen = [*chosen, *[task for task in rows if (task.tests or {})["type"] == "assert"][:1]]
    check(chosen)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", SETS)
def test_all_references_pass_and_no_stub_does(name: str) -> None:
    assert len(tasks(name)) == SETS[name]
    check(tasks(name))


def test_contest_data_is_compared_by_tokens() -> None:
    counts: Counter[str] = Counter()
    for name in ("codecontests_stdin", "codeforces_stdin"):
        for task in tasks(name):
            row: dict[str, Any] = {**(task.tests or {}), "compare": "tokens"}
            tests = parse_tests(row)
            assert isinstance(tests, StdinTests) and not tests.by_lines
            counts[name] += 1
    assert counts == {"codecontests_stdin": 165, "codeforces_stdin": 408}
    task = tasks("codeforces_stdin")[0]
    code = "for _ in range(int(input())):\n    print(*sorted(map(int, input().split())), end='  ')"
    verifier = CodeVerifier()
    by_tokens = verifier.grade({**(task.tests or {}), "compare": "tokens"}, fenced(code))
    assert by_tokens.status == "passed"
    assert verifier.grade(task, fenced(code)).status == "failed"
