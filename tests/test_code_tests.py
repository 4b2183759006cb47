"""The code verifier: verdicts, rewards, limits, and everywhere that it may be called from.

The first half runs on a scripted sandbox, the second on the one of this machine.
"""

from __future__ import annotations

import asyncio
import json
import math
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from mintrl_env.config import TasksSection
from mintrl_env.errors import ConfigError, UsageError
from mintrl_env.protocols import Verifier
from mintrl_env.recipes import make_verifier
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
    assert CodeVerifier(sandbox, {"wall_s": 30}).score_sync(task(CALL), RESPONSE).reward == 1.0
    sandbox.results = returned(1, 2, 3)
    assert CodeVerifier(sandbox, total_s=10).score_sync(task(CALL), RESPONSE).status == "timeout"


@pytest.mark.parametrize(
    ("wall_s", "tests", "total_s"),
    [(3, 1, 60), (3, 20, 80), (3, 138, 552), (3, 10_000, 600), (60, 2, 122), (90, 50, 900)],
)
def test_seconds_of_all_tests_where_nobody_says(wall_s: float, tests: int, total_s: float) -> None:
    assert Limits(wall_s).total_s(tests) == total_s


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
        ({"sandbox": "none"}, "sandbox must be one of auto, local, .*, not 'none'"),
        ({"sandbox": Scripted(), "sandbox_options": {"a": 1}}, "sandbox_options are for a sandbox"),
        ({"stdin_compare": "words"}, "stdin_compare must be lines or tokens, not 'words'"),
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


def test_a_sandbox_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse(name: str, options: Mapping[str, Any]) -> Sandbox:
        asked.append((name, options))
        raise SandboxUnavailable("no sandbox works here:\n  Landlock: ENOSYS (38)")

    monkeypatch.setattr(code_tests, "_state", code_tests._new_state())
    monkeypatch.setattr(code_tests, "choose_sandbox", refuse)
    verifier = CodeVerifier("local", sandbox_options={"packages": ["numpy"]})
    for _ in range(3):
        score = verifier.score_sync(task(CALL), RESPONSE)
        assert not score.decided and score.status == "unavailable"
        assert score.detail == "no sandbox works here:\\n  Landlock: ENOSYS (38)"
    assert asked == [("local", {"packages": ["numpy"]})]  # not tried anew for every row
    assert verifier.score_sync(task(CALL), "no code").status == "no_code"


def test_a_sandbox_option_that_there_is_not_is_a_usage_error() -> None:
    verifier = CodeVerifier("local", sandbox_options={"package": ["numpy"]})
    with pytest.raises(UsageError, match="sandbox: the local sandbox has no option 'package'"):
        verifier.score_sync(task(CALL), RESPONSE)
    with pytest.raises(UsageError):
        verifier.score_batch([(task(CALL), RESPONSE)] * 2)


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


# --- the sandbox of this machine -------------------------------------------------------------------


def fenced(code: str) -> str:
    return f"```python\n{code}\n```"


ADD = {"type": "call", "fn_name": "add", "inputs": [[1, 2], ["a", "b"]], "outputs": [3, "ab"]}
ECHO = {"type": "stdin", "inputs": ["x\n", "y\n"], "outputs": ["x\n", "y\n"]}
SORTED = {
    "type": "assert",
    "fn_name": "put_in_order",
    "setup": "import math",
    "asserts": [
        "xs = [2, 1]\nassert put_in_order(xs) is None\nassert xs == [1, 2]",
        "assert math.pi",
    ],
}

REAL: list[tuple[str, Any, str, str]] = [
    ("passes", ADD, "def add(a, b):\n    return a + b", "passed"),
    ("wrong", ADD, "def add(a, b):\n    return a", "failed"),
    ("raises", ADD, "def add(a, b):\n    return a.b", "error"),
    ("wrong name", ADD, "def plus(a, b):\n    return a + b", "error"),
    ("no syntax", ADD, "def add(a, b:\n    return a + b", "error"),
    ("method", ADD, "class Solution:\n    def add(self, a, b):\n        return a + b", "passed"),
    ("hangs", ADD, "def add(a, b):\n    while True: pass", "timeout"),
    ("no plain value", ADD, "def add(a, b):\n    return object()", "error"),
    ("echoes", ECHO, "print(input())", "passed"),
    ("prints too much", ECHO, "print(input())\nprint()\nprint('z')", "failed"),
    ("exits", ECHO, "print(input())\nraise SystemExit(3)", "error"),
    ("in place", SORTED, "def put_in_order(xs):\n    xs.sort()", "passed"),
    ("a copy", SORTED, "def put_in_order(xs):\n    sorted(xs)", "failed"),
    ("leaves", SORTED, "import os\nos._exit(0)\ndef put_in_order(xs):\n    xs.sort()", "error"),
]


@pytest.mark.parametrize(
    ("tests", "code", "status"), [row[1:] for row in REAL], ids=[r[0] for r in REAL]
)
def test_in_the_sandbox(tests: Any, code: str, status: str) -> None:
    report = CodeVerifier(limits={"wall_s": 2}).grade(tests, fenced(code))
    assert report.status == status, report
    assert report.reward == float(status == "passed")
    assert all(result.seconds >= 0 for result in report.results)


@pytest.mark.parametrize(
    ("function", "code", "reward"),
    [
        ("sum", "def sum(a, b):\n    return a + b", 1.0),
        ("sum", "x = 1", 0.0),
        ("gcd", "def gcd(a, b):\n    return a + b", 1.0),
        ("gcd", "x = 1", 0.0),
        ("gcd", "from math import gcd", 0.0),
    ],
)
def test_no_other_function_stands_in(function: str, code: str, reward: float) -> None:
    """Built-ins and what a setup imports have the name, and would pass or fail the test."""
    tests = {
        "type": "assert",
        "fn_name": function,
        "setup": "from math import *",
        "asserts": [f"assert {function}(2, 4) == 6"],
    }
    assert CodeVerifier().grade(tests, fenced(code)).reward == reward


@pytest.mark.parametrize(
    ("setup", "snippet", "helper"),
    [
        ("", "assert math.isclose(f(1), 2)",
         "class math:\n    @staticmethod\n    def isclose(*args):\n        return True"),
        ("from math import *", "assert isclose(f(1), 2)", "def isclose(*args):\n    return True"),
        ("", "assert all([f(1) == 2])", "def all(things):\n    return True"),
    ],
)  # fmt: skip
def test_the_program_stands_in_for_nothing_of_the_library(
    setup: str, snippet: str, helper: str
) -> None:
    tests = {"type": "assert", "fn_name": "f", "setup": setup, "asserts": [snippet]}
    verifier = CodeVerifier()
    assert verifier.grade(tests, fenced(f"{helper}\ndef f(x): return x + 1")).status == "passed"
    assert verifier.grade(tests, fenced(f"{helper}\ndef f(x): return x")).status == "failed"


def test_rows_of_many_tests_go_on_after_one_that_hangs() -> None:
    tests = {"type": "call", "fn_name": "f", "inputs": [[i] for i in range(6)], "outputs": [0] * 6}
    code = "def f(i):\n    while i == 2: pass\n    if i == 4: raise SystemExit\n    return i // 5"
    report = CodeVerifier(limits={"wall_s": 1}, reward="fraction").grade(tests, fenced(code))
    assert [result.status for result in report.results] == (
        ["passed", "passed", "timeout", "passed", "error", "failed"]
    )
    assert report.reward == 0.5 and report.status == "timeout"


PROGRAM = """
import asyncio, json, multiprocessing, pickle, threading
from mintrl_env.types import Task
from mintrl_env.verifiers.code_tests import CodeVerifier

TESTS = {"type": "call", "fn_name": "f", "inputs": [[1]], "outputs": [1]}
PAIRS = [(Task("t", "", verifier="code", tests=TESTS), f"```python\\ndef f(x): return {y}\\n```")
         for y in ("x", "0", "x", "1")]
WANT = [1.0, 0.0, 1.0, 1.0]
verifier = CodeVerifier(workers=3)
answers = {}


def rewards(scores):
    return [score.reward for score in scores]


def in_batch(verifier, send):
    send(rewards(verifier.score_batch(PAIRS)))


async def together():
    return await asyncio.gather(*(verifier.score(*pair) for pair in PAIRS))


def elsewhere(context, daemon):
    receive, send = context.Pipe(False)
    child = context.Process(target=in_batch, args=(verifier, send.send), daemon=daemon)
    child.start()
    answer = receive.recv() if receive.poll(100) else "no answer"
    child.join(20)
    return answer


def in_threads():
    found = [None] * 8
    def one(i):
        found[i] = rewards([verifier.score_sync(*pair) for pair in PAIRS])
    threads = [threading.Thread(target=one, args=(i,)) for i in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    return found


if __name__ == "__main__":
    answers["batch"] = rewards(verifier.score_batch(PAIRS))
    answers["asyncio"] = rewards(asyncio.run(together()))
    answers["asyncio again"] = rewards(asyncio.run(together()))
    answers["pickled"] = rewards(pickle.loads(pickle.dumps(verifier)).score_batch(PAIRS))
    answers["forked"] = elsewhere(multiprocessing.get_context("fork"), False)
    answers["forked daemon"] = elsewhere(multiprocessing.get_context("fork"), True)
    answers["spawned daemon"] = elsewhere(multiprocessing.get_context("spawn"), True)
    answers["threads"] = in_threads()
    print(json.dumps({k: v in (WANT, [WANT] * 8) or v for k, v in answers.items()}))
"""


def test_from_asyncio_threads_and_other_processes(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr[-2000:]
    answers = json.loads(done.stdout)
    assert len(answers) == 8 and all(v is True for v in answers.values()), answers


def test_from_a_config() -> None:
    section = TasksSection(
        path="tasks.jsonl",
        verifier="code",
        verifier_options={"reward": "fraction", "limits": {"wall_s": 2}, "stdin_compare": "tokens"},
    )
    made = make_verifier(section, [task(ADD)], "tasks")
    assert isinstance(made, CodeVerifier)
    assert made.limits == Limits(2.0) and made.reward == "fraction"
    assert made.score_sync(task(ADD), fenced("def add(a, b): return 3")).reward == 0.5
    assert made.score_sync(task(ECHO), fenced("print(); print(input())")).reward == 1.0
    section = TasksSection(path="x.jsonl", verifier="code", verifier_options={"reward": "some"})
    with pytest.raises(ConfigError, match=r"tasks\.verifier_options: reward must be one of"):
        make_verifier(section, [task(ADD)], "tasks")


def test_a_package_that_could_be_lent_is_named() -> None:
    tests = {"type": "call", "fn_name": "f", "inputs": [[1]], "outputs": [1]}
    code = "```python\nimport numpy\ndef f(x):\n    return x\n```"
    (result,) = CodeVerifier(sandbox="local").grade(tests, code).results
    assert result.status == "error"
    assert result.difference.endswith("""sandbox_options={"packages": ["numpy"]}""")
    unknown = CodeVerifier(sandbox="local").grade(tests, code.replace("numpy", "numpie_"))
    assert "sandbox_options" not in unknown.detail
    lent = CodeVerifier(sandbox="local", sandbox_options={"packages": ["numpy"]})
    assert lent.grade(tests, code).status == "passed"
    with pytest.raises(UsageError, match="packages is a list"):
        CodeVerifier(sandbox="local", sandbox_options={"packages": "numpy"}).grade(tests, code)
