"""The code verifier: does the program of a response pass the task's tests?

Extraction (`code_extract`), the forms of tests (`code_forms`) and comparison (`code_compare`) run
where they are called; the program runs in a sandbox (`sandbox`), which never gets to see what is
expected of a stdin or call test. Exit status 0, a printed verdict or a written file prove nothing.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from mintrl_env.errors import ConfigError, MissingExtraError, UsageError
from mintrl_env.types import Score, Task
from mintrl_env.verifiers.code_compare import compare_output, compare_value
from mintrl_env.verifiers.code_extract import extract
from mintrl_env.verifiers.code_forms import (
    CallTests,
    StdinTests,
    Tests,
    parse_limits,
    parse_tests,
    read_mapping,
)
from mintrl_env.verifiers.code_program import calls_of, module_of, prelude_of
from mintrl_env.verifiers.code_report import (
    BAD_TESTS,
    UNAVAILABLE,
    CodeReport,
    TestResult,
    one_line,
    summed_up,
)
from mintrl_env.verifiers.code_values import BadTests
from mintrl_env.verifiers.sandbox import Limits, Ran, Result, Sandbox, SandboxUnavailable
from mintrl_env.verifiers.sandbox_choice import NAMES, choose_sandbox

MAX_CODE = 1 << 20
"""Characters of the longest program that is run."""
_REWARDS = ("all", "fraction")


class CodeVerifier:
    """Scores a response by the tests of its task (`task.tests`; `code_forms` lists the forms).

    Statuses: passed, failed, timeout, memory, error, blocked, no_code; the first test that does not
    pass decides. Undecided, with a NaN reward: bad_tests, unavailable (no sandbox).

    Args:
        sandbox: "auto" (what this machine can do), another name (see `sandbox_choice`), or a
            sandbox. A verifier that holds one is pickled only if that can be.
        limits: what one test may use; a task's own (`limits` in its tests or its row) override it.
        reward: "all": 1 if every test passes, else 0; "fraction": the share of tests that pass.
        stop_at_first_failure: run no test after one that does not pass (with "fraction", those
            count as not passed). None: exactly where the reward is "all".
        max_tests: run at most so many of a task's tests, the first ones. None: all.
        stdin_compare: "lines" or "tokens": how outputs are compared where a stdin test does not say.
        total_s: seconds that all tests of a response may take together; a test that would begin
            later is a timeout. None: `Limits.total_s`, what the tests may take one by one, but at
            most ten minutes, or ten times `wall_s` where that is more.
        workers: threads of this process that wait for sandboxes. None: one for each core.
        sandbox_options: for a sandbox by name, for instance {"packages": ["numpy"]}.

    Safe to use from any thread and any event loop, and after a fork.
    """

    def __init__(
        self,
        sandbox: str | Sandbox = "auto",
        limits: Limits | Mapping[str, Any] | None = None,
        reward: str = "all",
        stop_at_first_failure: bool | None = None,
        max_tests: int | None = None,
        stdin_compare: str = "lines",
        total_s: float | None = None,
        workers: int | None = None,
        sandbox_options: Mapping[str, Any] | None = None,
    ) -> None:
        if reward not in _REWARDS:
            raise UsageError(f"reward must be one of {', '.join(_REWARDS)}, not {reward!r}")
        if stdin_compare not in ("lines", "tokens"):
            raise UsageError(f"stdin_compare must be lines or tokens, not {stdin_compare!r}")
        for name, number in (("max_tests", max_tests), ("workers", workers)):
            if number is not None and number < 1:
                raise UsageError(f"{name} must be at least 1, not {number}")
        if isinstance(sandbox, str) and sandbox not in NAMES:
            raise UsageError(f"sandbox must be one of {', '.join(NAMES)}, not {sandbox!r}")
        if sandbox_options and not isinstance(sandbox, str):
            raise UsageError("sandbox_options are for a sandbox that is given by name")
        if total_s is not None and not total_s > 0:
            raise UsageError(f"total_s must be positive, not {total_s}")
        if not isinstance(limits, Limits):
            try:
                limits = parse_limits(limits or {}, Limits())
            except BadTests as error:
                raise UsageError(str(error)) from error
        self.sandbox, self.limits, self.reward = sandbox, limits, reward
        self.stop_at_first_failure = (
            reward == "all" if stop_at_first_failure is None else stop_at_first_failure
        )
        self.sandbox_options = dict(sandbox_options or {})
        self.max_tests, self.total_s = max_tests, total_s
        self.stdin_compare = stdin_compare
        self.workers = workers or os.cpu_count() or 2

    async def score(self, task: Task, response: str) -> Score:
        """Score one response without blocking the event loop.

        Cancelled, it ends the tests at the next one.
        """
        cancelled = threading.Event()
        job = functools.partial(self._report, task, response, cancelled)
        try:
            report = await asyncio.get_running_loop().run_in_executor(_threads(self.workers), job)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return report.score

    def score_sync(self, task: Task, response: str) -> Score:
        """Score one response; blocks the calling thread for at most about `total_s`."""
        return self._report(task, response).score

    def score_batch(self, pairs: Iterable[tuple[Task, str]]) -> list[Score]:
        """Scores in the order of `pairs`, `workers` of them at once."""
        todo = list(pairs)
        if len(todo) < 2:
            return [self.score_sync(task, response) for task, response in todo]
        executor = _threads(self.workers)
        jobs = [executor.submit(self._report, task, response) for task, response in todo]
        try:
            return [job.result().score for job in jobs]
        finally:
            for job in jobs:
                job.cancel()

    def grade(self, tests: Task | Mapping[str, Any] | str, response: str) -> CodeReport:
        """What became of each test of one response.

        Args:
            tests: a task, or its tests alone.
        """
        if not isinstance(tests, Task):
            # A text of JSON is read with the rest of the tests' mistakes.
            tests = Task("tests", "", verifier="code", tests=tests)  # type: ignore[arg-type]
        return self._report(tests, response)

    def _report(
        self, task: Task, response: str, cancelled: threading.Event | None = None
    ) -> CodeReport:
        started = time.monotonic()
        try:
            return self._graded(task, response, started, cancelled or threading.Event())
        except BadTests as error:
            status, reason = BAD_TESTS, f"task {task.task_id}: {error}"
        except SandboxUnavailable as error:
            status, reason = UNAVAILABLE, str(error)
        except (UsageError, MissingExtraError):
            raise
        except Exception as error:  # ours: a batch must not die of one row
            status, reason = UNAVAILABLE, f"{type(error).__name__}: {error}"
        seconds = time.monotonic() - started
        return CodeReport(float("nan"), status, one_line(reason), seconds=seconds)

    def _graded(
        self, task: Task, response: str, started: float, cancelled: threading.Event
    ) -> CodeReport:
        tests, own_limits = _tests_of(task, self.stdin_compare)
        limits = self.limits
        for given, where in ((task.metadata.get("limits"), "limits"), (own_limits, "tests.limits")):
            if given is not None:
                limits = parse_limits(given, limits, where)
        total = len(tests) if self.max_tests is None else min(len(tests), self.max_tests)
        found = extract(response)
        if found.code is None:
            return CodeReport(0.0, "no_code", found.reason, total=total)
        if len(found.code) > MAX_CODE:
            detail = f"the program has {len(found.code)} characters; at most {MAX_CODE} are run"
            return CodeReport(0.0, "error", detail, total=total)
        module = module_of(tests, found.code)
        sandbox = self.sandbox
        if isinstance(sandbox, str):
            sandbox = _sandbox(sandbox, self.sandbox_options)
        total_s = self.total_s or limits.total_s(total)
        results: list[TestResult] = []
        with _ended(_run(sandbox, tests, module, limits, total)) as running:
            for _ in range(total):
                if cancelled.is_set():
                    raise SandboxUnavailable("cancelled")
                if time.monotonic() - started > total_s:
                    results.append(TestResult("timeout", f"all tests together took {total_s:g} s"))
                    break
                result = next(running, None)
                if result is None:
                    raise SandboxUnavailable(f"{sandbox.name} left tests out; report it as a bug")
                results.append(result)
                if self.stop_at_first_failure and not result.passed:
                    break
        if results[0].status in ("error", "blocked") and tests.setup.strip():
            _check_setup(sandbox, tests, limits)
        return summed_up(
            tuple(results),
            total,
            fraction=self.reward == "fraction",
            seconds=time.monotonic() - started,
        )


_T = TypeVar("_T")


@contextmanager
def _ended(iterator: Iterator[_T]) -> Iterator[Iterator[_T]]:
    """An iterator that is closed at the end: a sandbox's ends its process then."""
    try:
        yield iterator
    finally:
        close = getattr(iterator, "close", None)
        if close is not None:
            close()


# --- running -------------------------------------------------------------------------------------


def _run(
    sandbox: Sandbox, tests: Tests, module: str, limits: Limits, total: int
) -> Iterator[TestResult]:
    """The first `total` tests, each when it is asked for."""
    if isinstance(tests, StdinTests):
        for given, expected in zip(tests.inputs[:total], tests.outputs, strict=False):
            # What is expected must always fit.
            room = max(limits.output_bytes, 2 * len(expected.encode()) + 4096)
            ran = sandbox.run(module, given, replace(limits, output_bytes=room))
            found = compare_output(expected, _printed(ran), by_lines=tests.by_lines)
            yield _result(ran, found)
    elif isinstance(tests, CallTests):
        with _ended(sandbox.calls(module, calls_of(tests)[:total], limits)) as calls:
            for ran, value in zip(calls, tests.expected, strict=False):
                found = compare_value(value, ran.value, tests.rule) if ran.ran is Ran.OK else None
                yield _result(ran, found)
    else:
        prelude = prelude_of(tests)
        snippets = [prelude] * bool(prelude) + list(tests.snippets[:total])
        with _ended(sandbox.asserts(module, snippets, limits)) as running:
            if prelude:
                first = next(running, None)
                if first is not None and first.ran is not Ran.OK:
                    # Without the function under test no snippet can hold.
                    yield from [_result(first, None)] * total
                    return
            for ran in running:
                yield _result(ran, None)


def _printed(ran: Result) -> str:
    return ran.value if isinstance(ran.value, str) else ""


def _result(ran: Result, difference: str | None) -> TestResult:
    if ran.ran is not Ran.OK:
        detail = one_line(ran.detail) + _lendable(ran.detail)
        return TestResult(ran.ran.value, detail, ran.seconds, ran.memory_mb)
    status = "passed" if difference is None else "failed"
    return TestResult(status, difference or "", ran.seconds, ran.memory_mb)


_MISSING = re.compile(r"No module named '([A-Za-z_]\w{0,60})")


def _lendable(detail: str) -> str:
    """What to do where code misses a package that this process has."""
    missing = _MISSING.search(detail)
    if missing is None or importlib.util.find_spec(missing[1]) is None:
        return ""
    return f'; to lend it to code: sandbox_options={{"packages": ["{missing[1]}"]}}'


def _check_setup(sandbox: Sandbox, tests: Tests, limits: Limits) -> None:
    """Raises BadTests if the task's own setup does not run by itself."""
    with _ended(sandbox.asserts("", [tests.setup], limits)) as running:
        ran = next(running, None)
    if ran is not None and ran.ran is not Ran.OK:
        raise BadTests(f"tests.setup does not run: {ran.detail or ran.ran.value}")


# --- what this process keeps ---------------------------------------------------------------------

_CACHED = 64
"""Tasks whose parsed tests are kept: those of the groups that are being scored."""


@dataclass(slots=True)
class _Parsed:
    given: Any
    """Held, so that its id names nothing else meanwhile."""
    tests: Tests | None = None
    limits: Any = None
    problem: str = ""


@dataclass(slots=True)
class _State:
    lock: threading.Lock
    choosing: threading.Lock
    parsed: OrderedDict[tuple[int, str, str], _Parsed]
    threads: dict[int, ThreadPoolExecutor]
    sandboxes: dict[str, Sandbox]
    refused: dict[str, tuple[float, str]]


def _new_state() -> _State:
    return _State(threading.Lock(), threading.Lock(), OrderedDict(), {}, {}, {})


_state = _new_state()


def _after_fork_in_child() -> None:
    global _state
    # Threads do not live on in a child, and another one may have held the lock.
    _state = _new_state()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _tests_of(task: Task, stdin_compare: str) -> tuple[Tests, Any]:
    """The task's tests, read once for as long as its group is being scored, and their limits."""
    if task.tests is None:
        raise BadTests("it has no tests")
    entry_point = task.metadata.get("entry_point")
    key = (id(task.tests), str(entry_point), stdin_compare)
    with _state.lock:
        if known := _state.parsed.get(key):
            _state.parsed.move_to_end(key)
    if known is None:
        known = _Parsed(task.tests)
        try:
            row = read_mapping(task.tests, "tests")
            known.limits = row.get("limits")
            known.tests = parse_tests(row, entry_point=entry_point, stdin_compare=stdin_compare)
        except BadTests as error:
            known.problem = str(error)
        with _state.lock:
            _state.parsed[key] = known
            while len(_state.parsed) > _CACHED:
                _state.parsed.popitem(last=False)
    if known.tests is None:
        raise BadTests(known.problem)
    return known.tests, known.limits


def _threads(workers: int) -> ThreadPoolExecutor:
    with _state.lock:
        if workers not in _state.threads:
            _state.threads[workers] = ThreadPoolExecutor(workers, thread_name_prefix="mintrl-code")
        return _state.threads[workers]


_REFUSED_FOR = 60.0
"""Seconds before a sandbox that could not be had is tried again."""


def _sandbox(name: str, options: Mapping[str, Any]) -> Sandbox:
    """The sandbox that all verifiers of this process share, one for each name and options."""
    key = repr((name, sorted(options.items())))
    with _state.choosing:  # trying what works here takes a moment
        if key not in _state.sandboxes:
            last, reason = _state.refused.get(key, (0.0, ""))
            if reason and time.monotonic() - last < _REFUSED_FOR:
                raise SandboxUnavailable(reason)
            try:
                _state.sandboxes[key] = choose_sandbox(name, options)
            except SandboxUnavailable as error:
                _state.refused[key] = time.monotonic(), str(error)
                raise
            except ConfigError as error:
                raise UsageError(f"sandbox: {error}") from error
        return _state.sandboxes[key]
