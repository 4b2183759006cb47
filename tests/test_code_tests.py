"""The code verifier: verdicts, rewards, limits, and everywhere that it may be called from.

The first half runs on a scripted sandbox, the second on the one of this machine.
"""

from __future__ import annotations

import asyncio
import json
import math
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest

from mintrl_env.errors import UsageError
from mintrl_env.protocols import Verifier
from mintrl_env.registry import resolve
from mintrl_env.types import Score, Task
from mintrl_env.verifiers import code_tests
from mintrl_env.verifiers.code_report import one_line
from mintrl_env.verifiers.code_tests import CodeVerifier
from mintrl_env.verifiers.sandbox import Call, Limits, Ran, Result, Sandbox, SandboxUnavailable

RESPONSE = "So:\n```python\nanswer = 42\n```\n"
CALL: dict[str, Any] = {
    "type": "call",
    "fn_name": "f",
    "inputs": [[1], [2], [3]],
    "outputs": [1, 2, 3],
}
STDIN: dict[str, Any] = {"type": "stdin", "inputs": ["1\n", "2\n"], "outputs": ["one\n", "two\n"]}
ASSERT: dict[str, Any] = {
    "type": "assert",
    "fn_name": "f",
    "asserts": ["assert f(1)", "assert f(2)"],
}


def task(tests: Any, **metadata: Any) -> Task:
    return Task("t1", "?", verifier="code", tests=tests, metadata=metadata)


def returned(*values: Any) -> list[Result]:
    return [Result(Ran.OK, value, seconds=0.5, memory_mb=2.0) for value in values]


class Scripted:
    """A sandbox that answers from a list and remembers what it was asked."""

    name = "scripted"

    def __init__(self, *results: Result | Exception) -> None:
        self.results = list(results)
        self.asked: list[Any] = []
        self.limits: list[Limits] = []
        self.closed = 0
        self.hook: Callable[[], None] = lambda: None

    def _next(self, asked: Any, limits: Limits) -> Result:
        self.asked.append(asked)
        self.limits.append(limits)
        self.hook()
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    def run(self, code: str, stdin: str, limits: Limits) -> Result:
        return self._next((code, stdin), limits)

    def calls(self, code: str, calls: Iterable[Call], limits: Limits) -> Iterator[Result]:
        try:
            for call in calls:
                yield self._next((code, call), limits)
        finally:
            self.closed += 1

    def asserts(self, code: str, snippets: Sequence[str], limits: Limits) -> Iterator[Result]:
        try:
            for snippet in snippets:
                yield self._next((code, snippet), limits)
        finally:
            self.closed += 1

    def close(self) -> None: ...


def verdict(
    tests: Any, *results: Result | Exception, response: str = RESPONSE, **options: Any
) -> tuple[Score, Scripted]:
    sandbox = Scripted(*results)
    assert isinstance(sandbox, Sandbox)
    return CodeVerifier(sandbox, **options).score_sync(task(tests), response), sandbox


# --- verdicts ------------------------------------------------------------------------------------


def test_all_pass() -> None:
    score, sandbox = verdict(CALL, *returned(1, 2, 3))
    assert score == Score(1.0, "passed", "3 tests passed")
    assert [call for _, call in sandbox.asked] == [
        Call("f", (1,)),
        Call("f", (2,)),
        Call("f", (3,)),
    ]
    assert sandbox.closed == 1
    score, sandbox = verdict(STDIN, *returned("one", "two"))
    assert score == Score(1.0, "passed", "2 tests passed")
    assert [given for _, given in sandbox.asked] == ["1\n", "2\n"]
    score, sandbox = verdict(ASSERT, *returned(None, None, None))
    assert score == Score(1.0, "passed", "2 tests passed")
    assert [snippet for _, snippet in sandbox.asked] == ["f = _mintrl_entry_", *ASSERT["asserts"]]
    assert sandbox.closed == 1


@pytest.mark.parametrize(
    ("result", "status", "detail"),
    [
        (Result(Ran.OK, 7), "failed", "test 2 of 3: failed: expected 2, got 7"),
        (Result(Ran.OK, None), "failed", "test 2 of 3: failed: expected 2, got None"),
        (Result(Ran.TIMEOUT, detail="over 3 s"), "timeout", "test 2 of 3: timeout: over 3 s"),
        (Result(Ran.MEMORY), "memory", "test 2 of 3: memory"),
        (Result(Ran.BLOCKED, detail="socket"), "blocked", "test 2 of 3: blocked: socket"),
        (Result(Ran.ERROR, 2, "\x1b[1mü"), "error", "test 2 of 3: error: \\x1b[1m\\xfc"),
    ],
)
def test_the_first_test_that_does_not_pass_decides(
    result: Result, status: str, detail: str
) -> None:
    score, sandbox = verdict(CALL, *returned(1), result)
    assert score == Score(0.0, status, detail)
    assert len(sandbox.asked) == 2 and sandbox.closed == 1


def test_what_is_expected_is_never_handed_over() -> None:
    secret = "kx-91-opal"
    for tests in ({**CALL, "outputs": [secret] * 3}, {**STDIN, "outputs": [secret] * 2}):
        _, sandbox = verdict(tests, *returned("a", "b", "c"), stop_at_first_failure=False)
        assert len(sandbox.asked) == len(tests["inputs"])
        assert secret not in repr(sandbox.asked) and "outputs" not in repr(sandbox.asked)


def test_no_code() -> None:
    score, sandbox = verdict(CALL, response="It is 4.")
    assert score == Score(0.0, "no_code", "no block of code (between lines of three backticks)")
    assert sandbox.asked == []
    score, _ = verdict(CALL, response="```python\n" + "#" * (2 << 20))
    assert score == Score(
        0.0, "error", "the program has 2097152 characters; at most 1048576 are run"
    )


def test_a_snippet_that_does_not_hold() -> None:
    failed = Result(Ran.FAILED, detail="assert f(2)")
    score, _ = verdict(ASSERT, *returned(None, None), failed)
    assert score == Score(0.0, "failed", "test 2 of 2: failed: assert f(2)")
    # the function is not there at all
    missing = Result(Ran.ERROR, detail="NameError: f")
    score, sandbox = verdict(ASSERT, missing, stop_at_first_failure=False)
    assert score == Score(0.0, "error", "test 1 of 2: error: NameError: f")
    assert len(sandbox.asked) == 1


def test_report() -> None:
    sandbox = Scripted(*returned(1, 9, 3))
    report = CodeVerifier(sandbox, stop_at_first_failure=False).grade(CALL, RESPONSE)
    assert (report.reward, report.status, report.passed, report.total) == (0.0, "failed", 2, 3)
    assert [result.status for result in report.results] == ["passed", "failed", "passed"]
    assert [result.difference for result in report.results] == ["", "expected 2, got 9", ""]
    assert [result.seconds for result in report.results] == [0.5] * 3
    assert [result.memory_mb for result in report.results] == [2.0] * 3
    assert report.score == Score(0.0, "failed", "test 2 of 3: failed: expected 2, got 9")
    assert report.seconds >= 0
    report = CodeVerifier(Scripted(*returned(1, 2, 3))).grade(task(CALL), RESPONSE)
    assert report.status == "passed"
    report = CodeVerifier(Scripted()).grade("{", RESPONSE)
    assert report.status == "bad_tests" and math.isnan(report.reward)


def test_details_are_one_short_line_of_ascii() -> None:
    assert one_line("a\nb") == "a\\nb"
    assert len(one_line("é" * 1000)) == 300
    score, _ = verdict(CALL, Result(Ran.ERROR, detail="\ud800\n" * 10**6))
    assert len(score.detail) < 350 and score.detail.isascii() and score.detail.isprintable()


# --- rewards, stops, limits ----------------------------------------------------------------------


def test_fraction() -> None:
    score, sandbox = verdict(CALL, *returned(1, 9, 3), reward="fraction")
    assert score.status == "failed" and score.reward == pytest.approx(2 / 3)
    assert len(sandbox.asked) == 3
    score, sandbox = verdict(
        CALL, *returned(1, 9, 3), reward="fraction", stop_at_first_failure=True
    )
    assert score.reward == pytest.approx(1 / 3) and len(sandbox.asked) == 2
    score, _ = verdict(CALL, *returned(1, 2, 3), reward="fraction")
    assert score == Score(1.0, "passed", "3 tests passed")


def test_max_tests() -> None:
    for tests, results in ((CALL, returned(1, 2)), (STDIN, returned("one", "two"))):
        score, sandbox = verdict(tests, *results, max_tests=1)
        assert score == Score(1.0, "passed", "1 test passed") and len(sandbox.asked) == 1
    score, sandbox = verdict(ASSERT, *returned(None, None), max_tests=1)
    assert score == Score(1.0, "passed", "1 test passed")
    assert [snippet for _, snippet in sandbox.asked] == ["f = _mintrl_entry_", "assert f(1)"]
    score, _ = verdict(CALL, *returned(1, 2, 3), max_tests=100)
    assert score == Score(1.0, "passed", "3 tests passed")


def test_time_of_all_tests_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(code_tests.time, "monotonic", lambda: now[0])
    sandbox = Scripted(*returned(1, 2, 3))

    def wait() -> None:
        now[0] += 40

    sandbox.hook = wait
    score = CodeVerifier(sandbox, reward="fraction").score_sync(task(CALL), RESPONSE)
    assert score.status == "timeout" and score.reward == pytest.approx(2 / 3)
    assert score.detail == "test 3 of 3: timeout: all tests together took 60 s"
    sandbox.results = returned(1, 2, 3)
    assert CodeVerifier(sandbox, {"wall_s": 20}).score_sync(task(CALL), RESPONSE).reward == 1.0
    sandbox.results = returned(1, 2, 3)
    assert CodeVerifier(sandbox, total_s=10).score_sync(task(CALL), RESPONSE).status == "timeout"


def test_limits_of_verifier_row_and_tests() -> None:
    def used(verifier_limits: Any, tests: Any, **metadata: Any) -> Limits:
        sandbox = Scripted(*returned(1, 2, 3))
        CodeVerifier(sandbox, verifier_limits).score_sync(task(tests, **metadata), RESPONSE)
        return sandbox.limits[0]

    assert used(None, CALL) == Limits()
    assert used({"wall_s": 7}, CALL) == Limits(wall_s=7)
    assert used(Limits(7), CALL, limits={"mem_mb": 64}) == Limits(7, 64)
    mine = {**CALL, "limits": {"wall_s": 1}}
    assert used(Limits(7), mine, limits={"mem_mb": 64, "wall_s": 2}) == Limits(1, 64)
    assert used(None, CALL, limits='{"wall_s": 9}') == Limits(9)
    assert used(None, json.dumps(mine)) == Limits(1)


def test_what_is_expected_fits_the_output() -> None:
    long = "x" * 3000
    tests = {**STDIN, "outputs": [long, "two"], "limits": {"output_bytes": 10}}
    score, sandbox = verdict(tests, *returned(long, "two"))
    assert score.reward == 1.0
    assert sandbox.limits[0].output_bytes == 10096 and sandbox.limits[1].output_bytes == 4102


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward": "half"}, "reward must be one of all, fraction, not 'half'"),
        ({"max_tests": 0}, "max_tests must be at least 1, not 0"),
        ({"workers": 0}, "workers must be at least 1, not 0"),
        ({"total_s": 0}, "total_s must be positive, not 0"),
        ({"limits": {"wall": 1}}, "limits.wall: unknown; known: wall_s, mem_mb, output_bytes"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        CodeVerifier(**options)


# --- what is nobody's wrong answer ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("tests", "detail"),
    [
        (None, "task t1: it has no tests"),
        (
            {"type": "call"},
            "task t1: tests.fn_name is missing: a call test needs the function's name",
        ),
        ({**CALL, "outputs": [1]}, "task t1: tests.inputs has 3 entries and tests.outputs 1"),
        ({**CALL, "limits": {"wall_s": "x"}}, "task t1: tests.limits.wall_s must be a number > 0"),
    ],
)
def test_bad_tests_are_undecided(tests: Any, detail: str) -> None:
    for response in (RESPONSE, "no code here"):
        for _ in range(2):  # read anew, and from the cache
            score, sandbox = verdict(tests, response=response)
            assert not score.decided and score.status == "bad_tests"
            assert score.detail.startswith(detail) and sandbox.asked == []


def test_a_setup_that_does_not_run_is_the_tasks_fault() -> None:
    broken = Result(Ran.ERROR, detail="ModuleNotFoundError: no module named 'numpy'")
    tests = {**ASSERT, "setup": "import numpy"}
    score, sandbox = verdict(tests, broken, broken)
    assert not score.decided and score.status == "bad_tests"
    assert score.detail.endswith("tests.setup does not run: " + repr(broken.detail)[1:-1])
    assert sandbox.asked[-1] == ("", "import numpy") and sandbox.closed == 2
    score, _ = verdict(tests, broken, *returned(None))  # it runs: the response's fault
    assert score.reward == 0.0 and score.status == "error"


def test_a_service_that_fails_is_undecided() -> None:
    for results in (
        [SandboxUnavailable("rate limited")],
        [*returned(1), SandboxUnavailable("rate limited")],
    ):
        score, _ = verdict(CALL, *results, reward="fraction")
        assert (
            not score.decided and score.status == "unavailable" and "rate limited" in score.detail
        )
    score, _ = verdict(CALL, *returned(1), KeyError("x"))  # a bug of a sandbox
    assert not score.decided and score.status == "unavailable" and score.detail == "KeyError: 'x'"

    class Short(Scripted):
        def calls(self, code: str, calls: Iterable[Call], limits: Limits) -> Iterator[Result]:
            yield Result(Ran.OK, 1)

    score = CodeVerifier(Short()).score_sync(task(CALL), RESPONSE)
    assert not score.decided and score.status == "unavailable"


# --- where it is called from, with a scripted sandbox ----------------------------------------------


class Echo(Scripted):
    """Answers every run with the program's first line."""

    def run(self, code: str, stdin: str, limits: Limits) -> Result:
        return Result(Ran.OK, code.split("\n")[0].removeprefix("# "))


def test_batches_keep_their_order() -> None:
    verifier = CodeVerifier(Echo(), workers=4)
    tests = {"type": "stdin", "inputs": [""], "outputs": ["yes"]}
    words = ["yes", "no", "yes", "yes", "no"] * 20
    pairs = [(task(tests), f"```python\n# {word}\n```") for word in words]
    scores = verifier.score_batch(iter(pairs))
    assert [score.reward for score in scores] == [float(word == "yes") for word in words]
    assert verifier.score_batch([]) == []
    assert verifier.score_batch(pairs[:1])[0].reward == 1.0

    async def together() -> list[Score]:
        return await asyncio.gather(*(verifier.score(*pair) for pair in pairs))

    assert asyncio.run(together()) == scores


def test_a_cancelled_score_ends_at_the_next_test() -> None:
    begun, go = threading.Event(), threading.Event()
    sandbox = Scripted(*returned(1, 2, 3))

    def wait() -> None:
        begun.set()
        go.wait(30)

    sandbox.hook = wait
    verifier = CodeVerifier(sandbox, workers=3)

    async def scenario() -> None:
        job = asyncio.create_task(verifier.score(task(CALL), RESPONSE))
        await asyncio.to_thread(begun.wait, 30)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        go.set()

    asyncio.run(scenario())
    # The thread is free again once the test that it was in has ended.
    code_tests._threads(3).submit(lambda: None).result(30)
    while not sandbox.closed:
        pass
    assert len(sandbox.asked) == 1


def test_tests_are_read_once_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    parse = code_tests.parse_tests

    def counted(tests: Any, **more: Any) -> Any:
        read.append(tests)
        return parse(tests, **more)

    monkeypatch.setattr(code_tests, "parse_tests", counted)
    tests, broken = dict(CALL), {"type": "call"}
    for _ in range(5):
        verdict(tests, *returned(1, 2, 3))
        verdict(broken)
    assert len(read) == 2
    for number in range(200):
        verdict({**CALL, "fn_name": f"f{number}"}, *returned(1, 2, 3))
    assert len(code_tests._state.parsed) == 64


def test_names_from_the_row() -> None:
    sandbox = Scripted(*returned(1, 2, 3))
    tests = {k: v for k, v in CALL.items() if k != "fn_name"}
    CodeVerifier(sandbox).score_sync(task(tests, entry_point="g"), RESPONSE)
    assert sandbox.asked[0][1] == Call("g", (1,))
    sandbox = Scripted(*returned(1, 2, 3))
    CodeVerifier(sandbox).score_sync(task(tests, entry_point="h"), RESPONSE)
    assert sandbox.asked[0][1] == Call("h", (1,))


def test_registered_and_a_verifier() -> None:
    assert resolve("verifier", "code") is CodeVerifier
    assert isinstance(CodeVerifier(), Verifier)
    again = pickle.loads(pickle.dumps(CodeVerifier(limits={"wall_s": 4}, reward="fraction")))
    assert again.limits == Limits(4.0) and again.reward == "fraction" and again.sandbox == "auto"
    assert again.stop_at_first_failure is False
