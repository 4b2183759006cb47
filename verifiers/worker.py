"""A pool of worker processes that can be killed: the parent's half. `worker_main` is the child's.

A worker is started by exec (never `multiprocessing`, whose children are forbidden in daemonic
parents), speaks length-prefixed JSON over its two pipes, and gets one request at a time. The parent
waits on the pipe with `poll`; at the deadline it sends SIGKILL, reaps, and starts another one when
the next request needs it. Nothing here uses signals or the event loop of the parent, so a pool
works from the main thread, from other threads, from any number of asyncio loops, from forked and
from daemonic processes.

Pools are per process id: a forked child drops what it inherited (and closes its copies of the
pipes, since a worker ends itself when the last write end of its stdin is closed).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mintrl_env.errors import VerifierError

HEADER = struct.Struct(">I")
MAX_FRAME = 1 << 28
"""Bytes of the longest message either side accepts (256 MiB)."""

_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from mintrl_env.verifiers.worker_main import main; main(sys.argv[2], int(sys.argv[3]))"
)
"""Run by `python -c`: the parent's own sys.path, so that the child imports what the parent does
and nothing that happens to lie in the working directory."""


class WorkerUnavailable(VerifierError):
    """No worker could be started, or the pool is closed: our fault, the row is undecided."""


class WorkerTimeout(VerifierError):
    """The request was not answered by its deadline; the worker was killed."""


class WorkerFailed(VerifierError):
    """The handler raised, or the worker died (out of memory, crash) while it ran the request."""


def encode(message: Mapping[str, Any]) -> bytes:
    """A frame: 4 bytes of length (big-endian), then ASCII JSON, in which any str survives."""
    body = json.dumps(message, ensure_ascii=True, separators=(",", ":")).encode("ascii")
    if len(body) > MAX_FRAME:
        raise WorkerFailed(f"a request of {len(body)} bytes is over the limit of {MAX_FRAME}")
    return HEADER.pack(len(body)) + body


class Worker:
    """One child process. Not thread-safe: the pool lends it to one caller at a time."""

    def __init__(self, handler: str, memory_bytes: int) -> None:
        if not sys.executable:
            raise WorkerUnavailable(
                "sys.executable is empty, so no worker process can be started; "
                "run under a normal Python interpreter"
            )
        path = [p if p else os.getcwd() for p in sys.path]
        command = [sys.executable, "-c", _BOOTSTRAP, json.dumps(path), handler, str(memory_bytes)]
        # One BLAS thread: a worker must not take the cores of the others.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                close_fds=True,
                start_new_session=True,  # Ctrl-C in the terminal is the parent's business
                env=environment,
            )
        except (OSError, ValueError) as error:
            raise WorkerUnavailable(
                f"could not start a worker with {sys.executable}: {error}; check the limits on "
                "processes and memory (ulimit -a)"
            ) from error
        assert self.process.stdin is not None and self.process.stdout is not None
        self._stdin, self._stdout = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self._stdin, False)
        os.set_blocking(self._stdout, False)
        self._handler = handler
        self.ready = False
        self.in_step = True  # no answer is outstanding
        self.served = 0

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the child has imported what it needs.

        Raises:
            WorkerUnavailable: it died, said why it cannot work, or took too long.
        """
        if self.ready:
            return
        hint = f'try: {sys.executable} -c "import {self._handler.split(":")[0]}"'
        try:
            hello = self._receive(time.monotonic() + timeout_s)
        except WorkerTimeout as error:
            raise WorkerUnavailable(
                f"a worker for {self._handler} was not ready after {timeout_s:g} s; {hint}"
            ) from error
        except WorkerFailed as error:
            raise WorkerUnavailable(
                f"a worker for {self._handler} died while it started: {error}; {hint}"
            ) from error
        if "ready" not in hello:
            raise WorkerUnavailable(
                f"a worker for {self._handler} cannot run: {hello.get('error')}; {hint}"
            )
        self.ready = True

    def call(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a request, return the handler's answer, within `timeout_s` seconds.

        Raises:
            WorkerTimeout, WorkerFailed: the worker can be used again if it is `in_step`, that is
                if the error came as an answer.
        """
        deadline = time.monotonic() + timeout_s
        self.in_step = False
        self._send(encode({"timeout_s": timeout_s, "request": message}), deadline)
        answer = self._receive(deadline)
        self.in_step = True
        self.served += 1
        if "timeout" in answer:
            raise WorkerTimeout(str(answer["timeout"]))
        if "error" in answer:
            raise WorkerFailed(str(answer["error"]))
        result = answer["result"]
        assert isinstance(result, dict)
        return result

    def kill(self) -> None:
        """SIGKILL and reap. Safe to call twice."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.abandon()

    def abandon(self) -> None:
        """Close our ends of the pipes; the worker ends by itself. All that a fork may do."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def _wait(self, fd: int, events: int, deadline: float) -> None:
        poller = select.poll()
        poller.register(fd, events)
        left = deadline - time.monotonic()
        if left <= 0 or not poller.poll(left * 1000):
            raise WorkerTimeout("no answer before the deadline")

    def _send(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            self._wait(self._stdin, select.POLLOUT, deadline)
            try:
                view = view[os.write(self._stdin, view) :]
            except BlockingIOError:
                continue
            except OSError as error:
                raise WorkerFailed(self._obituary()) from error

    def _receive(self, deadline: float) -> dict[str, Any]:
        (length,) = HEADER.unpack(self._read(HEADER.size, deadline))
        if length > MAX_FRAME:
            raise WorkerFailed(f"a worker announced a message of {length} bytes")
        answer = json.loads(self._read(length, deadline))
        if not isinstance(answer, dict):
            raise WorkerFailed("a worker answered with something that is no JSON object")
        return answer

    def _read(self, count: int, deadline: float) -> bytes:
        parts: list[bytes] = []
        while count:
            self._wait(self._stdout, select.POLLIN, deadline)
            try:
                part = os.read(self._stdout, min(count, 1 << 20))
            except BlockingIOError:
                continue
            if not part:
                raise WorkerFailed(self._obituary())
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def _obituary(self) -> str:
        try:
            code = self.process.wait(0.2)
        except subprocess.TimeoutExpired:
            return "the worker closed its pipe"
        return f"the worker ended by signal {-code}" if code < 0 else f"the worker exited ({code})"


class WorkerPool:
    """At most `size` workers for one handler, started when first needed.

    Args:
        handler: "module:function", a callable from a JSON object to a JSON object; its module is
            imported by the child before it says that it is ready.
        size: how many requests may run at once.
        start_timeout_s: how long a worker may take to start; not counted in a request's deadline.
        memory_bytes: what a worker may allocate beyond what it has after its imports.
        max_requests: a worker is replaced after so many requests, so that what libraries cache
            does not grow for ever.
    """

    def __init__(
        self,
        handler: str,
        *,
        size: int = 1,
        start_timeout_s: float = 60.0,
        memory_bytes: int = 1 << 30,
        max_requests: int = 20_000,
    ) -> None:
        self.handler, self.size = handler, max(1, size)
        self.start_timeout_s, self.memory_bytes = start_timeout_s, memory_bytes
        self.max_requests = max_requests
        self._reset()
        _live.add(self)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._free = threading.Condition(threading.Lock())
        self._idle: list[Worker] = []
        self._all: set[Worker] = set()
        self._lent = 0
        self._closed = False
        self._executor: ThreadPoolExecutor | None = None

    def _forget_parent(self) -> None:
        """In a forked child: the parent's workers, locks and threads are not ours."""
        for worker in self._all:
            worker.abandon()
            worker.process.returncode = 0  # not our child: nothing to reap, nothing to warn about
        self._reset()

    def call(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Run one request in a worker; blocks the calling thread only.

        Waiting for a free worker, or for one to start, is not counted in `timeout_s`.

        Raises:
            WorkerTimeout: killed at its deadline.
            WorkerFailed: the handler raised or the worker died.
            WorkerUnavailable: none can be started.
        """
        if self._pid != os.getpid():  # forked by something that skips Python's fork hooks
            self._forget_parent()
        worker = self._borrow()
        try:
            worker.wait_ready(self.start_timeout_s)
            result = worker.call(message, timeout_s)
        except BaseException:
            # An interrupt or a deadline between request and answer leaves the pipe unusable.
            self._give_back(worker, keep=worker.ready and worker.in_step)
            raise
        self._give_back(worker, keep=worker.served < self.max_requests)
        return result

    def executor(self) -> ThreadPoolExecutor:
        """Threads to wait in, one per worker, for callers that must not block an event loop."""
        if self._pid != os.getpid():
            self._forget_parent()
        with self._free:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self.size, thread_name_prefix="mintrl-verify")
            return self._executor

    def pids(self) -> list[int]:
        """The process ids of the workers that stand at this moment."""
        with self._free:
            return [worker.process.pid for worker in self._all]

    def close(self) -> None:
        """Kill the workers. The pool starts no more."""
        with self._free:
            self._closed = True
            workers, self._all, self._idle = list(self._all), set(), []
            executor, self._executor = self._executor, None
            self._free.notify_all()
        for worker in workers:
            worker.kill()
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)

    def _borrow(self) -> Worker:
        with self._free:
            while True:
                if self._closed:
                    raise WorkerUnavailable(f"the pool of workers for {self.handler} is closed")
                if self._idle:
                    self._lent += 1
                    worker = self._idle.pop()
                    if worker.process.poll() is None:
                        return worker
                    self._lent -= 1  # it died between two requests
                    self._all.discard(worker)
                    worker.kill()
                    continue
                if self._lent < self.size:
                    break
                self._free.wait()
            self._lent += 1
        try:
            worker = Worker(self.handler, self.memory_bytes)
        except BaseException:
            with self._free:
                self._lent -= 1
                self._free.notify()
            raise
        with self._free:
            self._all.add(worker)
        return worker

    def _give_back(self, worker: Worker, *, keep: bool) -> None:
        if not keep:
            worker.kill()
        with self._free:
            self._lent -= 1
            if keep and not self._closed:
                self._idle.append(worker)
            else:
                self._all.discard(worker)
            self._free.notify()
        if keep and self._closed:
            worker.kill()


_live: weakref.WeakSet[WorkerPool] = weakref.WeakSet()
_shared: dict[tuple[str, int], WorkerPool] = {}
_shared_lock = threading.Lock()


def shared_pool(handler: str, size: int) -> WorkerPool:
    """The pool that all users of `handler` with this size share in this process."""
    with _shared_lock:
        pool = _shared.get((handler, size))
        if pool is None or pool._closed:
            pool = _shared[handler, size] = WorkerPool(handler, size=size)
        return pool


def close_all() -> None:
    """Kill the workers of every pool of this process (also run at exit)."""
    for pool in list(_live):
        if pool._pid == os.getpid():
            pool.close()


def _after_fork_in_child() -> None:
    global _shared_lock
    _shared_lock = threading.Lock()  # another thread may have held it when we were forked
    for pool in list(_live):
        pool._forget_parent()


atexit.register(close_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
