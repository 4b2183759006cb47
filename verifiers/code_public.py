"""A code task's public tests, run for a judge: how the response's code fares, in words."""

from __future__ import annotations

import asyncio
import re
from typing import Any, Literal

from mintrl_env.errors import UsageError
from mintrl_env.types import Task
from mintrl_env.verifiers.code_report import BAD_TESTS, UNAVAILABLE
from mintrl_env.verifiers.code_tests import CodeVerifier

_FENCE = re.compile(r"^```", re.MULTILINE)


class PublicTests:
    """`await tests(task, text)` says how the first tests of a task went; see `ChatJudge.run_tests`.

    Args:
        count: how many of a task's tests are public: the others are never shown to a judge. "all":
            the hidden ones too, for a judge with privileged context.
        options: of `CodeVerifier`.
    """

    def __init__(self, count: int | Literal["all"], **options: Any) -> None:
        if count != "all" and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise UsageError(
                f"the number of public tests must be an integer >= 1 or all, not {count!r}"
            )
        most = None if count == "all" else count
        self._verifier = CodeVerifier(
            **{**options, "max_tests": most, "stop_at_first_failure": False}
        )

    async def __call__(self, task: Task, text: str) -> str:
        """One line a test; "" while no code block is finished, or where tests cannot be run."""
        fences = len(_FENCE.findall(text))
        if not fences or fences % 2:
            return ""
        report = await asyncio.to_thread(self._verifier.grade, task, text)
        if report.status in (BAD_TESTS, UNAVAILABLE) or not report.results:
            return ""
        lines = [
            f"test {number}: {result.status}" + (result.difference and f": {result.difference}")
            for number, result in enumerate(report.results, 1)
        ]
        return "\n".join(lines)
