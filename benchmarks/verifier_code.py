"""What the code verifier costs, for `benchmarks/verifiers.py code` and `memory --kind code`."""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil

from mintrl_env.types import Task
from mintrl_env.verifiers.code_tests import CodeVerifier

RESPONSE = "It is a sum.\n\n```python\ndef total(values):\n    return sum(values)\n```\n"
PYTHON = [sys.executable, "-I", "-S", "-c", "pass"]


def call_task(at: int = 0) -> Task:
    """One passing call test; no two tasks are the same object, as in training."""
    tests = {"type": "call", "fn_name": "total", "inputs": [[[1, at]]], "outputs": [1 + at]}
    return Task(f"call {at}", "", verifier="code", tests=tests)


def starts() -> dict[str, Callable[[], None]]:
    """By name: one passing call test in a sandbox, or one start of a bare process."""
    found: dict[str, Callable[[], None]] = {"a passing call test": _checked(CodeVerifier())}
    found["python -I -S -c pass"] = _process(PYTHON)
    bwrap = shutil.which("bwrap")
    if bwrap:
        confined = "--ro-bind / / --dev /dev --proc /proc --unshare-all --die-with-parent".split()
        found["the same under bubblewrap"] = _process([bwrap, *confined, *PYTHON])
        found["a passing call test, sandbox bubblewrap"] = _checked(CodeVerifier("bubblewrap"))
    return found


def _checked(verifier: CodeVerifier) -> Callable[[], None]:
    def run() -> None:
        score = verifier.score_sync(call_task(), RESPONSE)
        assert score.reward == 1.0, score

    run()  # the sandbox stands, and has been tried, before the clock runs
    return run


def _process(command: list[str]) -> Callable[[], None]:
    def run() -> None:
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)

    run()
    return run


def times(repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each, one after the other in turn, so that all meet the same machine."""
    taken: dict[str, list[float]] = {}
    runs = starts()
    for _ in range(repeats):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            taken.setdefault(name, []).append((time.perf_counter() - started) * 1e3)
    return taken


def throughput(at_once: int, count: int, repeats: int = 3) -> tuple[float, float]:
    """(tests a second, median ms of one from request to score) with so many requests open."""
    verifier = CodeVerifier()
    verifier.score_sync(call_task(), RESPONSE)
    rates, middles = [], []
    for _ in range(repeats):
        waits: list[float] = []

        async def requests(waits: list[float] = waits) -> None:
            free = asyncio.Semaphore(at_once)

            async def one(at: int) -> None:
                async with free:
                    started = time.perf_counter()
                    score = await verifier.score(call_task(at), RESPONSE)
                    assert score.reward == 1.0, score
                    waits.append((time.perf_counter() - started) * 1e3)

            await asyncio.gather(*(one(at) for at in range(count)))

        started = time.perf_counter()
        asyncio.run(requests())
        rates.append(count / (time.perf_counter() - started))
        middles.append(statistics.median(waits))
    return statistics.median(rates), statistics.median(middles)


def left_behind() -> dict[str, Any]:
    """Resident memory (MiB), descriptors and child processes of this process, files in the
    temporary folder."""
    own = psutil.Process()
    children = own.children(recursive=True)
    memory = [own.memory_info().rss]
    for child in children:
        try:
            memory.append(child.memory_info().rss)
        except psutil.NoSuchProcess:
            continue
    return {
        "memory": f"{memory[0] / 2**20:.1f}",
        "children's": f"{sum(memory[1:]) / 2**20:.1f}",
        "descriptors": own.num_fds(),
        "processes": len(children),
        "files": len(os.listdir(os.environ.get("TMPDIR", "/tmp"))),
    }


def runs(verifier: CodeVerifier, first: int, count: int) -> None:
    """Passing, failing and broken programs in turn."""
    broken = ["", "def total(values):\n    return 0", "def total(values):\n    1 / 0"]
    for at in range(first, first + count):
        code = broken[at % 3]
        response = f"```python\n{code}\n```" if code else RESPONSE
        score = verifier.score_sync(call_task(at), response)
        assert score.status == ("passed", "failed", "error")[at % 3], score
