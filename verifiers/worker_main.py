"""The child's half of `worker`: read a request, run the handler, write the answer, for ever.

A request has a soft limit first, an alarm in this process's own main thread, which most runaway
computations obey, so that the process need not be started anew. Where C code holds the interpreter
the parent's SIGKILL ends it; where there is no parent any more, the kernel's CPU-time timer does.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import select
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from mintrl_env.verifiers.worker import HEADER, MAX_FRAME, encode

SOFT_SHARE = 0.8
"""The alarm comes at this share of the request's time, the parent's SIGKILL at all of it."""

Handler = Callable[[dict[str, Any]], dict[str, Any]]


class _Alarm(BaseException):
    """Past every `except Exception` of the libraries."""


def _on_alarm(signum: int, frame: FrameType | None) -> None:
    raise _Alarm


def _limit_memory(extra_bytes: int) -> None:
    """RLIMIT_AS: what is mapped now plus a budget, whatever the libraries have mapped."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        limit = mapped + extra_bytes
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    except (OSError, ValueError):
        pass  # no /proc, or a stricter limit stands already: the deadline still holds


def _read(fd: int, count: int, parent: int) -> bytes:
    """Exactly `count` bytes; ends the process at end of file or when the parent has gone."""
    data = bytearray()
    while len(data) < count:
        # The pipe stays open when a forked sibling holds its other end: so look at the parent too.
        while not select.select([fd], [], [], 10.0)[0]:
            if os.getppid() != parent:
                os._exit(0)
        part = os.read(fd, min(count - len(data), 1 << 20))
        if not part:
            os._exit(0)
        data += part
    return bytes(data)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
    except BrokenPipeError:
        os._exit(0)


def _answer(handler: Handler, message: dict[str, Any]) -> dict[str, Any]:
    timeout_s = float(message["timeout_s"])
    signal.setitimer(signal.ITIMER_PROF, 2 * timeout_s + 1)  # SIGPROF's default action: terminate
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, SOFT_SHARE * timeout_s)
            # A handler may take the alarm for itself (math-verify does): ours is set every time.
            signal.signal(signal.SIGALRM, _on_alarm)
            return {"result": handler(message["request"])}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
    except _Alarm:
        return {"timeout": f"stopped after {SOFT_SHARE * timeout_s:g} s"}
    except MemoryError:
        return {"error": "out of memory"}
    except RecursionError:
        return {"error": "nested too deeply"}
    except BaseException as error:  # libraries raise BaseException subclasses of their own
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}


def main(handler_name: str, memory_bytes: int) -> None:
    """Serve until stdin closes. Called by `worker`'s bootstrap, never by hand."""
    parent = os.getppid()
    stdin, stdout = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)  # whatever a library prints must not get among the frames
    signal.signal(signal.SIGALRM, _on_alarm)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    try:
        module, function = handler_name.split(":")
        handler: Handler = getattr(importlib.import_module(module), function)
    except BaseException as error:
        _write(stdout, encode({"error": f"{type(error).__name__}: {error}"}))
        sys.exit(1)
    _limit_memory(memory_bytes)
    _write(stdout, encode({"ready": True}))
    while True:
        (length,) = HEADER.unpack(_read(stdin, HEADER.size, parent))
        if length > MAX_FRAME:
            os._exit(1)
        answer = _answer(handler, json.loads(_read(stdin, length, parent)))
        _write(stdout, encode(answer))
