"""`sync`: await something from plain code, on one daemon event loop per process.

`env.step` is a plain function, judges and verifiers are coroutines. All of them run on one loop in
a thread of its own, so that their clients keep their connections from step to step, and so that
`step` also works where the caller's own thread runs a loop (a notebook).
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Awaitable
from typing import TypeVar

from mintrl_env.errors import UsageError

_T = TypeVar("_T")


class _Background:
    """The loop and its thread; at most one of each in a process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread: threading.Thread | None = None
        self.watches_fork = False

    def started(self) -> asyncio.AbstractEventLoop:
        with self.lock:
            if self.loop is None or self.thread is None or not self.thread.is_alive():
                if not self.watches_fork and hasattr(os, "register_at_fork"):
                    os.register_at_fork(after_in_child=self.forget)
                    self.watches_fork = True
                ready = threading.Event()
                self.loop = asyncio.new_event_loop()
                self.thread = threading.Thread(
                    target=_run, args=(self.loop, ready), name="mintrl-sync", daemon=True
                )
                self.thread.start()
                ready.wait()
            return self.loop

    def forget(self) -> None:
        # A fork copies neither the thread nor the right to the loop's file descriptors, and the
        # lock may have been held by a thread that the child does not have.
        self.lock = threading.Lock()
        self.loop = self.thread = None


_background = _Background()


def _run(loop: asyncio.AbstractEventLoop, ready: threading.Event) -> None:
    asyncio.set_event_loop(loop)
    loop.call_soon(ready.set)
    loop.run_forever()


async def _await(awaitable: Awaitable[_T]) -> _T:
    return await awaitable


def sync(awaitable: Awaitable[_T]) -> _T:
    """The result of an awaitable, or its exception; blocks until it is there.

    An interrupt (Ctrl-C) cancels the awaitable and is raised.

    Raises:
        UsageError: called from the background loop itself, where waiting would never end.
    """
    if threading.current_thread() is _background.thread:
        if inspect.iscoroutine(awaitable):
            awaitable.close()  # it will never run: no "was never awaited" warning on top
        raise UsageError(
            "sync() was called from the event loop that it waits for; inside a judge, guard or "
            "verifier use `await` instead (and drive environments from outside)"
        )
    future = asyncio.run_coroutine_threadsafe(_await(awaitable), _background.started())
    try:
        return future.result()
    except BaseException:
        future.cancel()  # no effect where it is done; an interrupted wait must not leave it running
        raise
