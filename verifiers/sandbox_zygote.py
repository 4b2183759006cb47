"""The process that local sandboxes fork from: a clean Python that never sees code or tests.

Started by exec with an empty environment and one descriptor, its control socket. A request is one
packet with limits, and with the descriptors of one run (life, talk, and for a program its standard
input and output). The zygote forks, the child confines itself and only then reads, from `talk`,
what it is to run; so nothing of one run is in the memory that the next one starts with.

`life` is a leash: when the grader shuts it, or its time is over, the child is killed. Once the
child is dead and reaped, one packet on `life` says how it ended. When the control socket closes or
the grader dies, every child is killed and the zygote ends.

Standard library only; its siblings are loaded from their files.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import contextlib
import gc
import importlib
import json
import operator
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
import types
from typing import Any

STACK_BYTES = 256 << 20
"""Soft limit of the stack at exec, which decides how much address space is left free for it."""
THREAD_STACK_BYTES = 8 << 20
CHECK_S = 5.0
"""Seconds between two looks at whether the grader still lives, where the kernel does not tell."""
TALK_FD = 3

_exit = os._exit

# Not `threading`, nor what needs it: it runs Python code in every fork, a third of a fork's cost.
PRELOADED = (
    "abc array bisect collections collections.abc contextlib copy dataclasses datetime decimal enum "
    "fractions functools heapq io itertools json math numbers operator os random re string struct "
    "sys time traceback types typing weakref"
).split()


REQUEST = struct.Struct("=dddd")
"""mem_mb, output_bytes, life_s, and where it is a spare the seconds that it waits to be taken (else
0); with it come the descriptors, one leash and at least one other."""
RECORD = struct.Struct("=cibdd")
"""E, wait status, killed (0 no, 1 asked, 2 life time, 3 a spare), peak memory in kB, processor
seconds. A record that begins with U is followed by the reason why there is no process."""
_FDS = socket.CMSG_LEN(5 * 4)


class Zygote:
    """The loop that forks, kills and reaps.

    Every page that it writes to after a fork is copied, since the child has it too: so it makes do
    with few objects, numbers for the most part.
    """

    def __init__(self, control: socket.socket, parent: int, plan: Any, confine: Any) -> None:
        self.control, self.parent, self.plan, self.confine = control, parent, plan, confine
        self.control_fd = control.fileno()
        self.life: dict[int, int] = {}  # of a child's process id: the descriptor of its leash,
        self.ends: dict[int, float] = {}  # and the time (monotonic) at which it is killed anyway
        self.pid_of: dict[int, int] = {}  # by the leash, until it is killed
        self.killed: dict[int, int] = {}
        self.spares: set[int] = set()
        self.poller = select.poll()
        self.wake, wake_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as the children want it
        signal.signal(signal.SIGCHLD, operator.is_)  # does nothing, without any Python code
        signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
        for fd in (self.control_fd, self.wake):
            self.poller.register(fd, select.POLLIN)
        self.parent_fd = _pidfd(parent)
        if self.parent_fd >= 0:
            self.poller.register(self.parent_fd, select.POLLIN)

    def serve(self) -> None:
        """Until the grader has gone."""
        while os.getppid() == self.parent:
            wait = CHECK_S
            if self.ends:
                wait = min(wait, max(0.0, min(self.ends.values()) - time.monotonic()) + 0.001)
            for fd, _ in self.poller.poll(wait * 1000):
                if fd == self.control_fd:
                    if not self.accept():
                        return
                elif fd == self.wake:
                    os.read(fd, 4096)
                elif fd == self.parent_fd:
                    return
                elif fd in self.pid_of:
                    self.heed(fd, self.pid_of[fd])
            if self.ends and min(self.ends.values()) <= time.monotonic():
                now = time.monotonic()
                for pid in [pid for pid, ends in self.ends.items() if ends <= now]:
                    self.kill(pid, 3 if pid in self.spares else 2)
            self.reap()

    def accept(self) -> bool:
        """Take one request; False at end of file."""
        try:
            data, extra, _, _ = self.control.recvmsg(256, _FDS)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        fds = memoryview(extra[0][2]).cast("i").tolist()
        life = fds.pop(0)
        try:
            pid = os.fork()
        except OSError as error:
            _tell(life, b"U" + f"fork: {error}".encode())
            os.close(life)
            pid = -1
        if pid == 0:
            try:
                mem_mb, output_bytes, life_s, _ = REQUEST.unpack(data)
                self.child(mem_mb, output_bytes, life_s, fds)
            finally:
                _exit(1)
        for fd in fds:
            os.close(fd)
        if pid > 0:
            _, _, life_s, spare_s = REQUEST.unpack(data)
            self.life[pid] = life
            self.ends[pid] = time.monotonic() + (spare_s or life_s)
            if spare_s:
                self.spares.add(pid)
            self.pid_of[life] = pid
            self.poller.register(life, select.POLLIN)
        return True

    def child(self, mem_mb: float, output_bytes: float, life_s: float, fds: list[int]) -> None:
        """In the fork: descriptors, signals, limits, then the code."""
        # `signal` wraps these into enums, in Python, and every page that is touched is a fault.
        _signal.set_wakeup_fd(-1)
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        stdin, stdout = fds[1:] if len(fds) == 3 else (null, null)
        # Every one of these is above TALK_FD, as `start` saw to.
        for target, source in enumerate((stdin, stdout, null, fds[0])):
            os.dup2(source, target)
        try:
            if self.plan is None:
                os.setsid()
                os.closerange(TALK_FD + 1, 1 << 20)
                sandbox_child.limit(int(mem_mb), int(output_bytes))
            else:
                self.confine(
                    self.plan,
                    cpu_s=life_s,
                    mem_mb=int(mem_mb),
                    output_bytes=int(output_bytes),
                    keep_fds=(0, 1, 2, TALK_FD),
                )
        except BaseException as error:
            sandbox_child.Talk(TALK_FD).send({"unconfined": f"{type(error).__name__}: {error}"})
            return
        gc.enable()
        sandbox_child.main(TALK_FD)

    def heed(self, life: int, pid: int) -> None:
        """What came over a leash: the seconds that a spare is to live, now that it was taken; or
        the end."""
        try:
            said = os.read(life, 64)
        except OSError:
            said = b""
        if said:
            self.spares.discard(pid)
            self.ends[pid] = time.monotonic() + float(said)
        else:
            self.kill(pid, 1)

    def kill(self, pid: int, why: int) -> None:
        """SIGKILL; it is reaped when the kernel says that it is dead."""
        if pid not in self.killed:
            self.killed[pid] = why
            self._unlisten(pid)
            _kill(pid)

    def _unlisten(self, pid: int) -> None:
        life = self.life[pid]
        self.poller.unregister(life)
        del self.pid_of[life], self.ends[pid]

    def reap(self) -> None:
        """Report every child that has ended."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid not in self.life:
                continue  # an orphan of a child, given to us
            self.spares.discard(pid)
            why = self.killed.pop(pid, 0)
            if not why:
                self._unlisten(pid)
            life = self.life.pop(pid)
            if self.plan is None:
                self.sweep(pid)
            cpu_s = usage.ru_utime + usage.ru_stime
            _tell(life, RECORD.pack(b"E", status, why, usage.ru_maxrss, cpu_s))
            os.close(life)

    def sweep(self, pid: int) -> None:
        """Without confinement code can fork: kill its session, and the orphans that came to us."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        for _ in range(100):
            orphans = [child for child in _children() if child not in self.life]
            if not orphans:
                return
            for orphan in orphans:
                _kill(orphan)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(orphan, 0)

    def end(self) -> None:
        """Kill and reap every child."""
        for pid in self.life:
            _kill(pid)
        for pid, life in self.life.items():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
            if self.plan is None:
                self.sweep(pid)
            os.close(life)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _tell(fd: int, packet: bytes) -> None:
    with contextlib.suppress(OSError):  # perhaps nobody waits for it any more
        os.write(fd, packet)


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def _pidfd(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def _become_subreaper() -> None:
    """Orphans of our children become ours, so that they can be killed."""
    ctypes = importlib.import_module("ctypes")
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def _with_large_stack() -> None:
    """Start anew, once, under a soft limit of the stack that leaves room for deep recursion."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))
    os.execv(sys.executable, sys.orig_argv)


def _load_sibling(name: str) -> types.ModuleType:
    from importlib.util import module_from_spec, spec_from_file_location

    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start(control_fd: int, parent: int, options: dict[str, Any]) -> None:
    """Import, prepare, say `ready` (or why not), and serve."""
    control = socket.socket(fileno=control_fd)
    os.set_inheritable(control_fd, False)
    if control_fd != TALK_FD:
        os.dup2(0, TALK_FD)  # a child's descriptors come here: nothing that it needs may lie there
    plan = confine = None
    try:
        _thread.stack_size(THREAD_STACK_BYTES)  # else the large stack would be every thread's
        for name in PRELOADED:
            importlib.import_module(name)
        sys.path += options["paths"]
        for name in options["packages"]:
            importlib.import_module(name)
        global sandbox_child
        _load_sibling("library_values")
        _load_sibling("plain_values")
        sandbox_child = _load_sibling("sandbox_child")
        sandbox_child.prepare()
        if options["confine"]:
            module = _load_sibling("sandbox_confine")
            plan, confine = module.prepare(tuple(options["packages"])), module.confine
        else:
            _become_subreaper()
        control.setblocking(False)
        zygote = Zygote(control, parent, plan, confine)
    except BaseException as error:
        _tell(control_fd, json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
        return
    gc.collect()
    gc.disable()
    gc.freeze()
    rss_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _tell(control_fd, json.dumps({"ready": True, "rss_kb": rss_kb}).encode())
    try:
        zygote.serve()
    finally:
        zygote.end()


sandbox_child: Any = None

if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # whatever the grader's thread had blocked
    _with_large_stack()
    start(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
