"""What became of a response's tests, one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mintrl_env.types import Score

BAD_TESTS = "bad_tests"
UNAVAILABLE = "unavailable"
_LONGEST = 300
"""Characters of a text that a report shows."""


def one_line(text: str, longest: int = _LONGEST) -> str:
    """A text that may hold anything as one short line of printable ASCII."""
    text = ascii(text[: longest + 1])[1:-1]
    return text if len(text) <= longest else text[: longest - 3] + "..."


@dataclass(frozen=True, slots=True)
class TestResult:
    """One test.

    Attributes:
        status: passed, failed, timeout, memory, error or blocked.
        difference: where and how the first difference shows, or the exception; "" if it passed.
        seconds: wall time.
        memory_mb: peak memory above the fresh interpreter's, NaN where unknown.
    """

    __test__ = False  # for pytest: no class of tests

    status: str
    difference: str = ""
    seconds: float = 0.0
    memory_mb: float = math.nan

    @property
    def passed(self) -> bool:
        return self.status == "passed"


@dataclass(frozen=True, slots=True)
class CodeReport:
    """All tests of one response.

    Attributes:
        reward: 0 to 1, NaN where it is undecided.
        status: passed, or that of the first test that did not pass, or no_code; undecided:
            bad_tests, unavailable.
        detail: one line for people.
        results: the tests that were run, in order; those after a stop are missing.
        total: how many tests there are.
        seconds: wall time of the whole.
    """

    reward: float
    status: str
    detail: str = ""
    results: tuple[TestResult, ...] = ()
    total: int = 0
    seconds: float = 0.0

    @property
    def passed(self) -> int:
        """How many tests passed."""
        return sum(result.passed for result in self.results)

    @property
    def score(self) -> Score:
        return Score(self.reward, self.status, self.detail)


def summed_up(
    results: tuple[TestResult, ...], total: int, *, fraction: bool, seconds: float
) -> CodeReport:
    """The report of tests that were run; `total` counts those that were not, too."""
    passed = sum(result.passed for result in results)
    first = next((i for i, result in enumerate(results) if not result.passed), None)
    if first is None and len(results) == total:
        detail = "1 test passed" if total == 1 else f"{total} tests passed"
        return CodeReport(1.0, "passed", detail, results, total, seconds)
    assert first is not None, "a run stops early only at a test that does not pass"
    bad = results[first]
    detail = f"test {first + 1} of {total}: {bad.status}"
    if bad.difference:
        detail += f": {bad.difference}"
    reward = passed / total if fraction else 0.0
    return CodeReport(reward, bad.status, detail, results, total, seconds)
