"""Public tests for a judge: outcomes in words, hidden tests never in them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mintrl_env.errors import UsageError
from mintrl_env.types import Task
from mintrl_env.verifiers.code_public import PublicTests

TESTS = {"type": "call", "fn_name": "double", "inputs": [[1], [2], [-7]], "outputs": [2, 4, -14]}
TASK = Task("t", "Write double(n).", verifier="code", tests=TESTS)


def outcome(text: str, count: Any = 2) -> str:
    return asyncio.run(PublicTests(count)(TASK, text))


def test_the_outcome_of_each_public_test_is_one_line() -> None:
    right = outcome("Easy.\n```python\ndef double(n):\n    return 2 * n\n```\n")
    assert right == "test 1: passed\ntest 2: passed"
    first, second = outcome("```python\ndef double(n):\n    return n * n + 1\n```").splitlines()
    assert first == "test 1: passed"
    assert second.startswith("test 2: failed") and "5" in second and "4" in second


def test_hidden_tests_are_not_run() -> None:
    wrong = "```python\ndef double(n):\n    return 2 * abs(n)\n```"
    assert "14" not in outcome(wrong)
    assert outcome(wrong, "all").splitlines()[2].startswith("test 3: failed")


@pytest.mark.parametrize(
    "text", ["", "Let me think.", "```python\ndef double(n):\n    return", "```\na\n```\n```py\nb"]
)
def test_unfinished_code_is_not_judged(text: str) -> None:
    assert outcome(text) == ""


def test_tests_that_cannot_be_run_say_nothing() -> None:
    task = Task("t", "p", verifier="code", tests={"type": "nonsense"})
    assert asyncio.run(PublicTests(1)(task, "```python\nx = 1\n```")) == ""


@pytest.mark.parametrize("count", [0, -1, True, "2", 1.5])
def test_a_number_that_makes_no_sense_is_refused(count: object) -> None:
    with pytest.raises(UsageError, match="public tests"):
        PublicTests(count)  # type: ignore[arg-type]
