"""What a local sandbox does with its processes: a program, calls in a module, assert snippets.

All of it works over any `Launcher`. Expected values never come here, but for those that stand in
assert snippets, which go to a tester's process and never to the code's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from mintrl_env.verifiers import plain_values
from mintrl_env.verifiers.sandbox import Call, Limits, Ran, Result, SandboxUnavailable
from mintrl_env.verifiers.sandbox_launch import START_TIMEOUT_S, Launcher, LauncherDied
from mintrl_env.verifiers.sandbox_process import (
    Process,
    Stopped,
    ending,
    frame,
    said_mb,
    told,
)
from mintrl_env.verifiers.sandbox_spares import start

SESSION_LIFE_S = 3600.0
"""Seconds after which a session's process is killed even if its grader goes on calling."""
_EARLY_BYTES = 1 << 16
GRACE_S = 2.0
"""Seconds that a tester has to end a snippet whose call has hung or died."""

_T = TypeVar("_T")


def _soon() -> float:
    """When a process that starts must have read what it is to do."""
    return time.monotonic() + START_TIMEOUT_S


def retried(action: Callable[[], _T]) -> _T:
    """Do it, once more where the launcher died under it.

    Raises:
        SandboxUnavailable: it died twice.
    """
    try:
        return action()
    except LauncherDied:
        pass
    try:
        return action()
    except LauncherDied as error:
        raise SandboxUnavailable(
            f"the process that starts sandboxes died twice in a row: {error}; "
            "is the machine out of memory?"
        ) from error


# ---- a program ------------------------------------------------------------------------------


def run_program(launcher: Launcher, code: str, stdin: str, limits: Limits) -> Result:
    """Run a program on a standard input; see `Sandbox.run`."""
    return retried(lambda: _run_program(launcher, code, stdin, limits))


def _run_program(launcher: Launcher, code: str, stdin: str, limits: Limits) -> Result:
    # Files in memory, not pipes: nobody has to pump them or wait for an end of file, and the
    # kernel itself stops a program that writes too much.
    in_fd, out_fd = _memory_file(stdin.encode("utf-8", "surrogatepass")), _memory_file(None)
    try:
        process = Process(launcher, limits, limits.wall_s + 30.0, (in_fd, out_fd))
        try:
            return _finish_program(process, code, out_fd, limits)
        finally:
            process.close()
    finally:
        os.close(in_fd)
        os.close(out_fd)


def _finish_program(process: Process, code: str, out_fd: int, limits: Limits) -> Result:
    with contextlib.suppress(Stopped):  # how it ended says the rest
        process.send(frame({"role": "program", "code": code}), _soon())
    process.wait_ready()
    deadline = process.started + limits.wall_s
    ended = process.life.wait(deadline - time.monotonic())
    seconds = time.monotonic() - process.started
    if ended is None:
        memory = process.end().memory_mb
        return Result(Ran.TIMEOUT, None, f"ran past {limits.wall_s:g} s", seconds, memory)
    last_words = process.last_words()
    if os.fstat(out_fd).st_size > limits.output_bytes:
        ran, detail = Ran.ERROR, f"printed more than {limits.output_bytes} bytes"
    elif ended.status != 0:
        ran, detail = ending(ended, last_words, limits)
    else:
        data = os.pread(out_fd, limits.output_bytes, 0)
        text = data.decode("utf-8", "replace")
        return Result(Ran.OK, text, "", seconds, ended.memory_mb)
    return Result(ran, None, detail, seconds, ended.memory_mb)


def _memory_file(data: bytes | None) -> int:
    """A descriptor of an anonymous file; with data: holding it, rewound, and never to be changed."""
    fd = os.memfd_create("sandbox", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    if data is None:
        return fd
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd


# ---- calls ----------------------------------------------------------------------------------


class Session:
    """A module in a process of its own.

    Args:
        first: the call that will be made first. It is sent along with the code, which saves a
            round trip; its time still begins when the module is loaded.

    Raises:
        LauncherDied, SandboxUnavailable: from every method.
    """

    def __init__(
        self, launcher: Launcher, code: str, limits: Limits, first: Call | None = None
    ) -> None:
        self.limits = limits
        self._number = 0
        self._sent = b"" if first is None else self._request(first)
        if len(self._sent) > _EARLY_BYTES:
            self._number, self._sent = 0, b""
        self.process = start(launcher, limits, SESSION_LIFE_S)
        self.over = False
        try:
            self.failure = self._load(code)
        except BaseException:
            self.process.close()
            raise
        """How loading failed; None: the module is loaded."""

    def _load(self, code: str) -> Result | None:
        with contextlib.suppress(Stopped):  # what follows will say so
            self.process.send(frame({"role": "session", "code": code}) + self._sent, _soon())
        self.process.wait_ready()
        started = self.process.started
        try:
            answer = self.process.message(started + self.limits.wall_s)
        except Stopped as stopped:
            return self.post_mortem(stopped, started, "while the module was loaded")
        if answer.get("loaded") is True:
            return None
        ran, detail = told(_object(answer.get("raised")))
        return Result(ran, None, detail, time.monotonic() - started)

    def _request(self, call: Call) -> bytes:
        self._number += 1
        encoder = plain_values.Encoder()
        try:
            return frame(
                {
                    "serve": "plain",
                    "n": self._number,
                    "function": call.function,
                    "args": encoder.encode(tuple(call.args)),
                    "kwargs": encoder.encode(dict(call.kwargs)),
                }
            )
        except plain_values.NotPlain as error:
            raise SandboxUnavailable(f"the arguments of a test cannot be sent: {error}") from error

    def call(self, call: Call) -> Result:
        """Make one call. Afterwards the process may be `over`."""
        early, self._sent = self._sent, b""
        data = b"" if early else self._request(call)
        started = time.monotonic()
        deadline = started + self.limits.wall_s
        try:
            if data:
                self.process.send(data, deadline)
            answer = self.process.message(deadline)
            if answer.get("n") != self._number:
                raise Stopped("garbled", "something that is no answer")
        except Stopped as stopped:
            return self.post_mortem(stopped, started, f"in {call.function}")
        seconds, memory_mb = time.monotonic() - started, said_mb(answer)
        if "value" in answer:
            try:
                value = plain_values.Decoder().decode(answer["value"])
            except plain_values.NotPlain as error:
                detail = f"the value cannot be read back: {error}"
                return Result(Ran.ERROR, None, detail, seconds, memory_mb)
            return Result(Ran.OK, value, "", seconds, memory_mb)
        if "raised" in answer:
            ran, detail = told(_object(answer["raised"]))
            return Result(ran, None, detail, seconds, memory_mb)
        detail = str(answer.get("unreadable") or answer.get("missing") or "no answer")[:500]
        return Result(Ran.ERROR, None, detail, seconds, memory_mb)

    def post_mortem(self, stopped: Stopped, started: float, where: str) -> Result:
        """End the process; the result of whatever it was doing."""
        self.over = True
        seconds = time.monotonic() - started
        if stopped.why == "gone":
            ended = self.process.life.wait(0.5) or self.process.end()
            if ended.killed == "asked":  # it closed the socket and went on
                return Result(Ran.ERROR, None, f"hung up {where}", seconds, ended.memory_mb)
            ran, detail = ending(ended, {}, self.limits)
            return Result(ran, None, f"{detail} {where}", seconds, ended.memory_mb)
        memory_mb = self.process.end().memory_mb
        if stopped.why == "timeout":
            detail = f"ran past {self.limits.wall_s:g} s {where}"
            return Result(Ran.TIMEOUT, None, detail, seconds, memory_mb)
        return Result(Ran.ERROR, None, f"{stopped.detail} {where}", seconds, memory_mb)

    def close(self) -> None:
        self.process.close()


def _object(value: object) -> dict[str, object]:
    return value if isinstance(value, dict) else {}


def make_calls(
    launcher: Launcher, code: str, calls: Iterable[Call], limits: Limits
) -> Iterator[Result]:
    """Load a module and make calls in it; see `Sandbox.calls`."""
    holder = _Holder(launcher, code, limits)
    try:
        for call in calls:
            yield retried(lambda call=call: holder.call(call))  # type: ignore[misc]
    finally:
        holder.drop()


class _Holder:
    """The session of a row of calls: loaded when needed, and anew after one that ended."""

    def __init__(self, launcher: Launcher, code: str, limits: Limits) -> None:
        self.launcher, self.code, self.limits = launcher, code, limits
        self.session: Session | None = None
        self.failure: Result | None = None

    def ready(self, first: Call | None = None) -> Session | None:
        """The loaded session; None where the module does not load (`failure` says how)."""
        if self.failure is None and self.session is None:
            try:
                self.session = Session(self.launcher, self.code, self.limits, first)
                self.failure = self.session.failure
            finally:
                if self.failure is not None:
                    self.drop()
        return self.session

    def call(self, call: Call) -> Result:
        try:
            session = self.ready(call)
            if session is None:
                assert self.failure is not None
                return self.failure
            result = session.call(call)
        except BaseException:
            self.drop()
            raise
        if session.over:
            self.drop()
        return result

    def drop(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            session.close()


# ---- asserts --------------------------------------------------------------------------------


def run_asserts(
    launcher: Launcher, code: str, snippets: Sequence[str], limits: Limits
) -> Iterator[Result]:
    """Run snippets against a module in another process; see `Sandbox.asserts`."""
    pair = _Pair(launcher, code, limits)
    try:
        for snippet in snippets:
            yield retried(lambda snippet=snippet: pair.run(snippet))  # type: ignore[misc]
    finally:
        pair.drop()


class _Pair:
    """The code's process and the tests', with the grader between them."""

    def __init__(self, launcher: Launcher, code: str, limits: Limits) -> None:
        self.launcher, self.limits = launcher, limits
        self.holder = _Holder(launcher, code, limits)
        self.tester: Process | None = None
        self.held: list[str] = []
        """The snippets that ran to their end, to be run again where a tester had to be replaced."""

    def run(self, snippet: str) -> Result:
        try:
            self._ready()
            if self.holder.failure is not None:
                return self.holder.failure
            result = self._snippet(snippet)
        except BaseException:
            self.drop()
            raise
        if result.ran is Ran.OK:
            self.held.append(snippet)
        return result

    def _ready(self) -> None:
        if self.holder.ready() is None or self.tester is not None:
            return
        self.tester = start(self.launcher, self.limits, SESSION_LIFE_S)
        with contextlib.suppress(Stopped):
            self.tester.send(frame({"role": "tester"}), _soon())
        self.tester.wait_ready()
        for snippet in self.held:
            if self._snippet(snippet).ran is not Ran.OK:
                break

    def _snippet(self, snippet: str) -> Result:
        tester, session = self.tester, self.holder.session
        assert tester is not None and session is not None
        started = time.monotonic()
        deadline = started + self.limits.wall_s
        failed: Result | None = None
        try:
            tester.send(frame({"snippet": snippet}), deadline)
            while True:
                body = tester.receive(deadline if failed is None else deadline + GRACE_S)
                if not body.startswith(b'{"rpc":'):
                    break
                if failed is None:
                    try:
                        session.process.send(_framed(body), deadline)
                        body = session.process.receive(deadline)
                    except Stopped as stopped:
                        failed = session.post_mortem(stopped, started, "in a call of the tests")
                if failed is not None:
                    body = frame({"gone": failed.detail})[4:]
                tester.send(_framed(body), deadline + GRACE_S)
        except Stopped as stopped:
            # The tests' own process hangs or is dead: nothing that stands in it can be used again.
            tester.end()
            self.drop()
            if failed is not None:
                return failed
            seconds = time.monotonic() - started
            if stopped.why == "timeout":
                return Result(Ran.TIMEOUT, None, f"ran past {self.limits.wall_s:g} s", seconds)
            return Result(Ran.ERROR, None, "the tests' own process ended", seconds)
        seconds = time.monotonic() - started
        if failed is not None:
            self.holder.drop()  # the next snippet gets a fresh load; the tests' names live on
            return failed
        done = _object(_object(plain_values.from_text(body)).get("done"))
        ran = {"ok": Ran.OK, "failed": Ran.FAILED}.get(str(done.get("ran")))
        detail = str(done.get("detail"))[:500]
        if ran is None:
            ran, detail = told({"flavour": done.get("ran"), "detail": detail})
        return Result(ran, None, detail, seconds)

    def drop(self) -> None:
        tester, self.tester = self.tester, None
        if tester is not None:
            tester.close()
        self.holder.drop()


def _framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body
