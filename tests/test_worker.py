"""The pool of killable workers: deadlines, deaths, forks, threads, loops, odd text."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import mintrl_env
from mintrl_env.errors import VerifierError
from mintrl_env.verifiers.worker import (
    WorkerFailed,
    WorkerPool,
    WorkerTimeout,
    WorkerUnavailable,
    shared_pool,
)

HANDLERS = """
import os, signal, sys, time

def handle(request):
    kind = request["kind"]
    if kind == "echo":
        print("noise on stdout must not get among the frames")
        return {"text": request["text"], "pid": os.getpid(), "length": len(request["text"])}
    if kind == "sleep":
        time.sleep(request["seconds"])
        return {}
    if kind == "deaf":  # like C code that never gives the interpreter back to the alarm's handler
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        while True:
            pass
    if kind == "raise":
        raise KeyError(request["text"])
    if kind == "base":
        raise type("TimeoutException", (BaseException,), {})("a library's own")
    if kind == "die":
        os._exit(7)
    if kind == "memory":
        return {"size": len(bytearray(1 << 33))}
    if kind == "deep":
        return handle(request)
    return {}
"""


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("handlers")
    (folder / "mintrl_test_handlers.py").write_text(HANDLERS)
    sys.path.insert(0, str(folder))  # workers are given the parent's sys.path
    yield "mintrl_test_handlers:handle"
    sys.path.remove(str(folder))


@pytest.fixture
def pool(module: str) -> Iterator[WorkerPool]:
    made = WorkerPool(module, size=2)
    yield made
    made.close()


def echo(pool: WorkerPool, text: str = "x") -> dict[str, object]:
    return pool.call({"kind": "echo", "text": text}, 5.0)


def gone(pid: int, within_s: float = 5.0) -> bool:
    """Has the process ended (or is it a zombie that somebody else must reap)?"""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("text", ["plain", "\ud800 alone", "a\x00b", "é\U0001f600\r\n", ""])
def test_any_string_survives_the_wire(pool: WorkerPool, text: str) -> None:
    assert echo(pool, text)["text"] == text


def test_ten_megabytes_go_and_come_back(pool: WorkerPool) -> None:
    text = "\ud800y" * 1_000_000 + "z" * 8_000_000
    answer = pool.call({"kind": "echo", "text": text}, 30.0)
    assert answer["length"] == 10_000_000 and answer["text"] == text


def test_a_worker_is_used_again(pool: WorkerPool) -> None:
    assert echo(pool)["pid"] == echo(pool)["pid"] == pool.pids()[0]


def test_the_soft_limit_spares_the_process(pool: WorkerPool) -> None:
    pid = echo(pool)["pid"]
    with pytest.raises(WorkerTimeout):
        pool.call({"kind": "sleep", "seconds": 60}, 0.5)
    assert echo(pool)["pid"] == pid


def test_a_deaf_worker_is_killed_at_the_deadline(pool: WorkerPool) -> None:
    pid = echo(pool)["pid"]
    started = time.monotonic()
    with pytest.raises(WorkerTimeout):
        pool.call({"kind": "deaf"}, 0.5)
    assert time.monotonic() - started < 3.0  # a busy machine is slow to reap
    assert gone(int(str(pid)))
    assert echo(pool)["text"] == "x"


@pytest.mark.parametrize(
    ("kind", "message"),
    [("raise", "KeyError"), ("base", "TimeoutException"), ("memory", "memory"), ("deep", "deep")],
)
def test_a_handler_that_fails_says_so_and_the_worker_lives(
    pool: WorkerPool, kind: str, message: str
) -> None:
    pid = echo(pool)["pid"]
    with pytest.raises(WorkerFailed, match=message) as caught:
        pool.call({"kind": kind, "text": "\ud800"}, 5.0)
    assert isinstance(caught.value, VerifierError)
    assert echo(pool)["pid"] == pid


def test_a_worker_that_dies_is_replaced(pool: WorkerPool) -> None:
    with pytest.raises(WorkerFailed, match=r"exited \(7\)"):
        pool.call({"kind": "die"}, 5.0)
    pid = int(str(echo(pool)["pid"]))
    os.kill(pid, signal.SIGKILL)  # between two requests
    assert gone(pid)
    assert echo(pool)["pid"] != pid


def test_workers_are_replaced_after_their_share(module: str) -> None:
    pool = WorkerPool(module, max_requests=3)
    pids = [echo(pool)["pid"] for _ in range(6)]
    pool.close()
    assert len(set(pids[:3])) == len(set(pids[3:])) == 1 and pids[0] != pids[3]


def test_a_pool_holds_no_more_than_its_size(pool: WorkerPool) -> None:
    pids: list[object] = []
    threads = [
        threading.Thread(target=lambda: pids.extend(echo(pool)["pid"] for _ in range(20)))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(pids) == 120 and len(set(pids)) <= 2


def test_several_event_loops(pool: WorkerPool) -> None:
    async def once() -> object:
        loop = asyncio.get_running_loop()
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticker = loop.create_task(tick())
        call = {"kind": "sleep", "seconds": 0.3}
        await loop.run_in_executor(pool.executor(), pool.call, call, 5.0)
        ticker.cancel()
        return ticks

    for _ in range(2):
        assert int(str(asyncio.run(once()))) > 10  # the loop ran on while a worker slept


def test_close_kills_and_refuses(module: str) -> None:
    pool = WorkerPool(module)
    pid = int(str(echo(pool)["pid"]))
    pool.close()
    assert gone(pid)
    with pytest.raises(WorkerUnavailable, match="closed"):
        echo(pool)


def test_a_handler_that_cannot_be_imported_is_our_fault() -> None:
    pool = WorkerPool("mintrl_no_such_module:handle")
    with pytest.raises(WorkerUnavailable, match="mintrl_no_such_module"):
        pool.call({}, 1.0)
    assert pool.pids() == []


def test_no_interpreter_is_our_fault(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = WorkerPool(module)
    for executable, message in (("", "empty"), ("/no/such/python", "could not start")):
        monkeypatch.setattr(sys, "executable", executable)
        with pytest.raises(WorkerUnavailable, match=message):
            pool.call({}, 1.0)


# A text, not a function of this module: a spawned child would look for `tests.test_worker`, and veRL's
# wheel installs a package `tests` of its own.
_IN_CHILD = """
from mintrl_env.verifiers.worker import shared_pool
queue.put(shared_pool(handler, 1).call({"kind": "echo", "text": "child"}, 20.0)["pid"])
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_daemonic_children_have_their_own_workers(module: str, method: str) -> None:
    parent = shared_pool(module, 1)
    mine = int(str(echo(parent)["pid"]))
    context = multiprocessing.get_context(method)
    queue: multiprocessing.SimpleQueue[object] = context.SimpleQueue()
    child = context.Process(
        target=exec, args=(_IN_CHILD, {"handler": module, "queue": queue}), daemon=True
    )
    child.start()
    theirs = int(str(queue.get()))
    child.join()
    assert child.exitcode == 0 and theirs != mine
    assert gone(theirs)  # its stdin closed with the child
    assert echo(parent)["pid"] == mine
    parent.close()


def test_a_fork_does_not_keep_the_parents_workers_alive(module: str) -> None:
    """The parent is killed while a forked child of its lives on: the workers end all the same."""
    script = textwrap.dedent(
        f"""
        import os, sys, time
        sys.path[:] = {sys.path!r}
        from mintrl_env.verifiers.worker import shared_pool
        pool = shared_pool({module!r}, 1)
        worker = pool.call({{"kind": "echo", "text": ""}}, 20.0)["pid"]
        sibling = os.fork()
        if sibling == 0:
            time.sleep(60)
            os._exit(0)
        print(worker, sibling, flush=True)
        time.sleep(60)
        """
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    worker, sibling = map(int, process.stdout.readline().split())
    try:
        process.kill()
        process.wait()
        process.stdout.close()
        assert gone(worker)
    finally:
        os.kill(sibling, signal.SIGKILL)


def test_an_orphaned_runaway_ends_by_itself(module: str) -> None:
    script = textwrap.dedent(
        f"""
        import sys, threading, time
        sys.path[:] = {sys.path!r}
        from mintrl_env.verifiers.worker import shared_pool
        pool = shared_pool({module!r}, 1)
        print(pool.call({{"kind": "echo", "text": ""}}, 20.0)["pid"], flush=True)
        threading.Thread(target=pool.call, args=({{"kind": "deaf"}}, 0.5)).start()
        time.sleep(0.2)
        import os; os._exit(1)
        """
    )
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    # Its limit is in CPU seconds, which a busy machine deals out slowly.
    assert gone(int(done.stdout), within_s=60.0)


def test_workers_go_with_a_normal_exit(module: str) -> None:
    script = (
        f"import sys; sys.path[:] = {json.dumps(sys.path)}\n"
        "from mintrl_env.verifiers.worker import shared_pool\n"
        f"print(shared_pool({module!r}, 1).call({{'kind': 'echo', 'text': ''}}, 20.0)['pid'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0 and done.stderr == ""
    assert gone(int(done.stdout))


def test_the_package_under_test_is_this_one() -> None:
    assert Path(mintrl_env.__file__).is_file()
