"""`sync`: one daemon loop, from any thread, after a fork, never from itself."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import warnings

import pytest

from mintrl_env.errors import UsageError
from mintrl_env.loops import _background, sync


async def where() -> tuple[str, int]:
    await asyncio.sleep(0)
    return threading.current_thread().name, id(asyncio.get_running_loop())


def test_gives_results_and_exceptions() -> None:
    async def fails() -> None:
        raise KeyError("mine")

    assert sync(asyncio.sleep(0, result=5)) == 5
    with pytest.raises(KeyError, match="mine"):
        sync(fails())


def test_any_awaitable_will_do() -> None:
    class Later:
        def __await__(self):  # type: ignore[no-untyped-def]
            yield from asyncio.sleep(0).__await__()
            return "later"

    assert sync(Later()) == "later"


def test_all_callers_share_one_loop_in_a_daemon_thread() -> None:
    name, loop = sync(where())
    assert name == "mintrl-sync"
    found: list[tuple[str, int]] = []
    threads = [threading.Thread(target=lambda: found.append(sync(where()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(name, loop)] * 4
    assert [t.daemon for t in threading.enumerate() if t.name == "mintrl-sync"] == [True]


def test_works_where_the_caller_runs_a_loop_of_its_own() -> None:
    async def notebook_cell() -> tuple[str, int]:
        return sync(where())

    assert asyncio.run(notebook_cell()) == sync(where())


def test_from_its_own_loop_it_raises_instead_of_hanging() -> None:
    async def nested() -> None:
        sync(where())

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no coroutine that was never awaited is left behind
        with pytest.raises(UsageError, match="await"):
            sync(nested())
    assert sync(asyncio.sleep(0, result=1)) == 1


def test_an_interrupt_cancels_what_was_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    started, cancelled = threading.Event(), threading.Event()

    async def long() -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    submit = asyncio.run_coroutine_threadsafe

    def interrupted(coroutine, loop):  # type: ignore[no-untyped-def]
        future = submit(coroutine, loop)

        def result(timeout: float | None = None) -> None:
            assert started.wait(5)
            raise KeyboardInterrupt

        future.result = result  # type: ignore[method-assign,assignment]
        return future

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sync(long())
    assert cancelled.wait(5)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_gets_a_loop_of_its_own() -> None:
    _, parent_loop = sync(where())
    assert parent_loop
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:  # the child has the lock but not the thread that would release it
        with _background.lock:
            held.set()
            forked.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(5)
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of forks beside threads
        child = os.fork()
    if child == 0:
        try:
            name, _ = sync(where())
            os.write(write, name.encode())
        finally:
            os._exit(0)
    forked.set()
    holder.join()
    os.close(write)
    deadline = time.monotonic() + 10
    done = 0
    while not done and time.monotonic() < deadline:
        done, _ = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if not done:
        os.kill(child, 9)
        os.waitpid(child, 0)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"mintrl-sync"
    assert sync(where())[1] == parent_loop
