"""One process for untrusted code, from the grader's side: messages with deadlines, and its end.

Here, and nowhere else, is decided what an ending means (`ending`). What the process says of itself
chooses between kinds of failure only: it can never turn one into a pass.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mintrl_env.verifiers import plain_values
from mintrl_env.verifiers.sandbox import Limits, Ran, SandboxUnavailable
from mintrl_env.verifiers.sandbox_launch import (
    KILL_TIMEOUT_S,
    START_TIMEOUT_S,
    Ended,
    Launcher,
    LauncherDied,
    Life,
    ZygoteLauncher,
    ZygoteLife,
)

HEADER = struct.Struct(">I")
MAX_FRAME = plain_values.MAX_TEXT + (1 << 16)
"""Bytes of the longest message that is read from a process."""
NEAR_LIMIT = 0.9
"""A process that failed with this share of its memory in use ran out of it."""


_to_json = json.JSONEncoder(separators=(",", ":")).encode


class Stopped(Exception):
    """The conversation is over: `timeout`, `gone` (it closed the socket or died) or `garbled`."""

    def __init__(self, why: str, detail: str = "") -> None:
        super().__init__(why, detail)
        self.why, self.detail = why, detail


def frame(message: Mapping[str, Any]) -> bytes:
    """A message as it goes over the socket."""
    body = _to_json(message).encode("ascii")
    return HEADER.pack(len(body)) + body


class Process:
    """A process on its leash, and the socket to it. Used by one thread at a time.

    Args:
        launcher: starts it.
        limits: of the process; it may write one byte more than `output_bytes`, so that too much
            output can be told from just enough.
        life_s: seconds after which it is killed whatever happens.
        stdio: descriptors of a program's standard input and output.
        spare_s: start it as a spare, which is killed after so many seconds unless it is taken.

    Raises:
        LauncherDied, SandboxUnavailable
    """

    def __init__(
        self,
        launcher: Launcher,
        limits: Limits,
        life_s: float,
        stdio: Sequence[int] = (),
        *,
        spare_s: float = 0.0,
    ) -> None:
        self.limits = limits
        self._talk, theirs = socket.socketpair()
        self._buffer = bytearray()
        limits = Limits(limits.wall_s, limits.mem_mb, limits.output_bytes + 1)
        try:
            self.life: Life
            if spare_s and isinstance(launcher, ZygoteLauncher):
                self.life = launcher.launch_spare([theirs.fileno()], limits, life_s, spare_s)
            else:
                self.life = launcher.launch([theirs.fileno(), *stdio], limits, life_s)
        except BaseException:
            self._talk.close()
            raise
        finally:
            theirs.close()
        self.started = time.monotonic()

    def send(self, data: bytes, deadline: float) -> None:
        """Send a frame.

        Raises:
            Stopped
        """
        self._talk.settimeout(max(deadline - time.monotonic(), 1e-6))
        try:
            self._talk.sendall(data)
        except TimeoutError:
            raise Stopped("timeout") from None
        except OSError as error:
            raise Stopped("gone", str(error)) from None

    def wait_ready(self) -> None:
        """Wait until the process is confined and about to read what was sent; its time begins now.

        Raises:
            LauncherDied: it ended before that.
            SandboxUnavailable: it could not be confined, or never started. No code has run in it.
        """
        try:
            hello = self.message(time.monotonic() + START_TIMEOUT_S)
        except Stopped as stopped:
            if stopped.why == "timeout":
                raise SandboxUnavailable(
                    f"a process did not start in {START_TIMEOUT_S:g} s; is the machine overloaded?"
                ) from None
            if self.life.wait(0.5) is None:
                self.end()
            raise LauncherDied(f"a process ended while it started: {stopped.why}") from None
        if "ready" not in hello:
            raise SandboxUnavailable(
                f"a process could not be confined: {hello.get('unconfined')}; `mintrl doctor` "
                "says what this machine offers"
            )
        self.started = time.monotonic()

    def receive(self, deadline: float) -> bytes:
        """The body of the next message.

        Raises:
            Stopped
        """
        buffer = self._buffer
        wanted = HEADER.size
        while True:
            if wanted == HEADER.size and len(buffer) >= HEADER.size:
                (length,) = HEADER.unpack_from(buffer)
                if length > MAX_FRAME:
                    raise Stopped("garbled", f"a message of {length} bytes, over {MAX_FRAME}")
                wanted = HEADER.size + length
            if len(buffer) >= wanted > HEADER.size:
                body = bytes(buffer[HEADER.size : wanted])
                del buffer[:wanted]
                return body
            left = deadline - time.monotonic()
            if left <= 0:
                raise Stopped("timeout")
            self._talk.settimeout(left)
            try:
                part = self._talk.recv(1 << 18)
            except TimeoutError:
                raise Stopped("timeout") from None
            except OSError as error:
                raise Stopped("gone", str(error)) from None
            if not part:
                raise Stopped("gone")
            buffer += part

    def message(self, deadline: float) -> dict[str, Any]:
        """The next message, read as what it should be: JSON of bounded size, an object.

        Raises:
            Stopped
        """
        return _message(self.receive(deadline))

    def last_words(self) -> dict[str, Any]:
        """Of a process that has ended: the message that it left, or an empty one."""
        try:
            return self.message(time.monotonic() + 0.1)
        except Stopped:
            return {}

    def end(self) -> Ended:
        """Kill it if it still runs, and wait until it is reaped.

        Raises:
            LauncherDied, SandboxUnavailable
        """
        self.life.kill()
        ended = self.life.wait(KILL_TIMEOUT_S)
        if ended is None:
            raise SandboxUnavailable(
                f"a process was not reaped {KILL_TIMEOUT_S:g} s after it was killed; "
                "the machine is overloaded or its launcher was stopped"
            )
        return ended

    def close(self) -> None:
        """Have it killed, and close everything. For that it does not wait: the launcher sees to it
        before it starts another process."""
        self.life.close()
        self._talk.close()

    def abandon(self) -> None:
        """In a forked child: let go of the parent's process, unseen by the other side."""
        if isinstance(self.life, ZygoteLife):
            self.life.abandon()
        self._talk.close()


def _message(body: bytes) -> dict[str, Any]:
    try:
        tree = plain_values.from_text(body)
    except plain_values.NotPlain as error:
        raise Stopped("garbled", str(error)) from None
    if type(tree) is not dict:
        raise Stopped("garbled", "not a JSON object")
    return tree


_FLAVOURS = {"memory": Ran.MEMORY, "blocked": Ran.BLOCKED}


def told(message: Mapping[str, Any]) -> tuple[Ran, str]:
    """What a process says it failed from: memory, a refused operation, or any other exception."""
    return _FLAVOURS.get(str(message.get("flavour")), Ran.ERROR), str(message.get("detail"))[:500]


def said_mb(message: Mapping[str, Any]) -> float:
    """What a process says of its peak memory, which is no more than a figure for people."""
    said = message.get("mb")
    return float(said) if isinstance(said, (int, float)) and said >= 0 else float("nan")


def ending(ended: Ended, last_words: Mapping[str, Any], limits: Limits) -> tuple[Ran, str]:
    """What the end of a process means that nobody wanted to end; never OK."""
    if ended.killed:
        return Ran.TIMEOUT, "its time was over"
    full = ended.memory_mb >= NEAR_LIMIT * limits.mem_mb
    if os.WIFSIGNALED(ended.status):
        number = os.WTERMSIG(ended.status)
        if number == signal.SIGKILL and ended.cpu_s >= limits.wall_s:
            return Ran.TIMEOUT, f"{ended.cpu_s:.1f} s of processor time"
        ran, detail = Ran.ERROR, f"ended by signal {number} ({_signal_name(number)})"
    elif "flavour" in last_words:
        ran, detail = told(last_words)
    else:
        ran, detail = Ran.ERROR, f"exit status {os.waitstatus_to_exitcode(ended.status)}"
    if full and ran is Ran.ERROR:  # whatever was made of the failure to get more
        return Ran.MEMORY, f"{detail}, with {ended.memory_mb:.0f} MiB in use"
    return ran, detail


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
