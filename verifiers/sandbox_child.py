"""What runs beside untrusted code, in its process: load it, call it, say how it went.

Started by `sandbox_zygote` in a fork, or by another launcher in a Python of its own (`prepare`, then
`main`). Its one instruction comes as the first message on the `talk` socket; the
code it loads can do whatever this process can, so nothing that is said here proves anything: the
other side checks every value itself, and takes how the process ended from its launcher.

A message is 4 bytes of length (big-endian), then ASCII JSON.

Standard library only, and nothing of this package but its siblings, loaded from their files.
"""

from __future__ import annotations

import _sitebuiltins
import atexit
import builtins
import contextlib
import errno
import io
import json
import os
import resource
import struct
import sys
import types
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from mintrl_env.verifiers import plain_values
else:
    import plain_values

HEADER = struct.Struct(">I")
MAX_FRAME = 64 << 20
"""Bytes of the longest message that either side reads."""
FILE = "solution.py"
"""The code's name in tracebacks and detail."""

Message = dict[str, Any]

_READY = b"\x00\x00\x00\x0e" + b'{"ready":true}'
_to_json = json.JSONEncoder(separators=(",", ":")).encode
_reserve: list[bytearray] = []
_exit = os._exit  # whatever the code makes of the module `os`


class Talk:
    """Framed messages over the socket to the grader."""

    def __init__(self, fd: int) -> None:
        self.fd = self.out = fd

    def receive(self) -> Message | None:
        """The next message; None once the other side has gone."""
        head = self._read(HEADER.size)
        if head is None:
            return None
        body = self._read(min(HEADER.unpack(head)[0], MAX_FRAME))
        return None if body is None else json.loads(body)

    def send(self, message: Message) -> None:
        """Send; what is too long to be read is sent as `unreadable`."""
        body = _to_json(message).encode("ascii")
        if len(body) > plain_values.MAX_TEXT:
            said = f"the value cannot be read back: {len(body)} characters"
            body = _to_json({"n": message.get("n"), "unreadable": said}).encode("ascii")
        view = memoryview(HEADER.pack(len(body)) + body)
        while view:
            view = view[os.write(self.out, view) :]

    def _read(self, count: int) -> bytes | None:
        parts = []
        while count:
            try:
                part = os.read(self.fd, min(count, 1 << 20))
            except OSError:
                return None
            if not part:
                return None
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


def prepare() -> None:
    """Do ahead what every child needs, before a fork or in its own process."""
    for name in ("exit", "quit"):  # as the module `site` makes them, which is not loaded
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D"))
    sandbox_module = sibling("sandbox_module")
    sandbox_module.USUAL.update(sandbox_module.usual_names())
    sibling("sandbox_raised")
    sibling("sandbox_stub")
    sibling("sandbox_tester")
    standard_streams()
    _warm_up()
    # Given up when memory runs out, so that there is some to say so. It is never touched.
    _reserve.append(bytearray(4 << 20))


def _warm_up() -> None:
    """Go the way of a session a few times with code of our own: the interpreter writes into code
    that is new to it, and in a fork each page that is written to has to be copied first."""
    request = {"serve": "plain", "n": 1, "function": "f", "args": {"t": [1]}, "kwargs": {"d": []}}
    argv, limit = sys.argv, sys.getrecursionlimit()
    for _ in range(16):
        ours, theirs = os.pipe()
        answers = os.open(os.devnull, os.O_WRONLY)
        Talk(theirs).send(request)
        os.close(theirs)
        talk = Talk(ours)
        talk.out = answers
        sibling("sandbox_module").run_session(talk, "def f(x): return x")
        os.close(ours)
        os.close(answers)
    sys.setrecursionlimit(limit)
    sys.argv = argv
    del sys.modules["solution"]


def limit(mem_mb: int, output_bytes: int) -> None:
    """The resource limits alone, for a process that nothing else confines."""
    with open("/proc/self/statm", encoding="ascii") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    for which, value in (
        (resource.RLIMIT_AS, mapped + (mem_mb << 20)),
        (resource.RLIMIT_FSIZE, output_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))


def main(talk_fd: int) -> None:
    """Do what the first message says; ends the process and never returns."""
    talk = Talk(talk_fd)
    os.write(talk_fd, _READY)  # before any code: what comes in its place is the launcher's word
    first = talk.receive()
    if first is None:
        _exit(0)
    role = first["role"]
    if role == "program":
        run_program(talk, first["code"])
    elif role == "session":
        sibling("sandbox_module").run_session(talk, first["code"])
    else:
        sibling("sandbox_tester").run_tester(talk)
    _exit(0)


def sibling(name: str) -> types.ModuleType:
    """A module of this folder under its bare name, without putting the folder on `sys.path`."""
    if name in sys.modules:
        return sys.modules[name]
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def describe(error: BaseException) -> Message:
    """An exception for the other side: flavour, classes down from a built-in one, plain arguments
    and attributes, text."""
    if isinstance(error, MemoryError):
        _reserve.clear()
    kind = type(error)
    try:
        said = str(error)
        text = f"{kind.__name__}: {said[:300]}"
    except BaseException:
        said, text = "", "an exception that cannot be shown"
    try:
        args = plain_values.Encoder(keep=True).encode(tuple(error.args))
    except BaseException:
        args = {"t": [text]}
    told = {
        "flavour": _flavour(error),
        "type": nearest_builtin(kind).__name__,
        "args": args,
        "detail": text,
    }
    if kind not in _EXCEPTIONS:
        told["names"] = names_of(kind)
        told["text"] = said[:10_000]
        told["attributes"] = {"d": _plain_attributes(error)}
    return told


def names_of(kind: type[BaseException]) -> list[list[str]]:
    """(module, name) of an exception's class and of those between it and a built-in one."""
    mro = kind.__mro__[: kind.__mro__.index(nearest_builtin(kind))]
    derived = [base for base in mro if issubclass(base, BaseException)]
    return [[str(base.__module__), base.__name__] for base in derived]


def _plain_attributes(error: BaseException) -> list[list[Any]]:
    pairs = []
    for name, value in list(getattr(error, "__dict__", {}).items())[:50]:
        with contextlib.suppress(BaseException):
            pairs.append([name, plain_values.Encoder(keep=True).encode(value)])
    return pairs


def nearest_builtin(kind: type[BaseException]) -> type[BaseException]:
    """The first built-in class that an exception's class is derived from, or is."""
    return next((base for base in kind.__mro__ if base in _EXCEPTIONS), Exception)


def _flavour(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return "memory"
    seen = 0
    cause: BaseException | None = error
    while cause is not None and seen < 20:
        # What a library raises instead (urllib, asyncio) keeps the refusal as its context.
        if isinstance(cause, OSError) and cause.errno in (errno.EPERM, errno.EACCES):
            return "blocked"
        cause, seen = cause.__cause__ or cause.__context__, seen + 1
    return "error"


_EXCEPTIONS = {
    thing
    for thing in vars(builtins).values()
    if isinstance(thing, type) and issubclass(thing, BaseException)
}


def standard_streams() -> None:
    """`sys.stdin`, `stdout`, `stderr` over descriptors 0, 1, 2, as a UTF-8 Python makes them."""
    encoding, errors = "utf-8", "surrogateescape"
    stdin = io.BufferedReader(io.FileIO(0, "rb", closefd=False))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(stdin, encoding, errors)  # type: ignore[misc]
    stdout = io.BufferedWriter(io.FileIO(1, "wb", closefd=False))
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(stdout, encoding, errors)  # type: ignore[misc]
    stderr = io.BufferedWriter(io.FileIO(2, "wb", closefd=False))
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(  # type: ignore[misc]
        stderr, encoding, "backslashreplace", line_buffering=True
    )
    for stream, name, mode in (
        (sys.stdin, "<stdin>", "r"),
        (sys.stdout, "<stdout>", "w"),
        (sys.stderr, "<stderr>", "w"),
    ):
        stream.buffer.raw.name = name  # type: ignore[attr-defined]
        stream.mode = mode  # type: ignore[misc]


def fresh_module(name: str, names: dict[str, Any] | None = None) -> types.ModuleType:
    """An empty module, known to `sys.modules` as dataclasses and pickle want it."""
    module = types.ModuleType(name)
    module.__dict__.update(__builtins__=names or builtins, __file__=FILE)
    sys.modules[name] = module
    sys.argv = [FILE]
    # The frames below the code's own are not its business.
    sys.setrecursionlimit(sys.getrecursionlimit() + _depth())
    return module


def _depth() -> int:
    depth, frame = 0, sys._getframe(1).f_back
    while frame is not None:
        depth, frame = depth + 1, frame.f_back
    return depth


def run_program(talk: Talk, code: str) -> None:
    """Run code as `python solution.py` would, from its first line to the end of the process."""
    try:
        module = fresh_module("__main__")
        exec(compile(code, FILE, "exec", dont_inherit=True), module.__dict__)
        status = 0
    except SystemExit as error:
        status = _exit_status(error)
        if status:
            _quietly(
                talk.send, {"flavour": "error", "detail": f"SystemExit: {str(error.code)[:300]}"}
            )
    except BaseException as error:
        status = 1
        _quietly(talk.send, describe(error))
        if sys.excepthook is not sys.__excepthook__:
            _quietly(sys.excepthook, type(error), error, error.__traceback__)
    # As the interpreter ends: threads, exit handlers, buffers.
    if "threading" in sys.modules:
        _quietly(sys.modules["threading"]._shutdown)
    _quietly(atexit._run_exitfuncs)
    try:
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()
    except BaseException as error:
        _quietly(talk.send, describe(error))
        status = status or 120
    _exit(status)


def _exit_status(error: SystemExit) -> int:
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def _quietly(action: Callable[..., object], *args: object) -> None:
    with contextlib.suppress(BaseException):
        action(*args)
