"""The local sandbox: code in forks of a clean, confined process of this machine. Linux only."""

from __future__ import annotations

import atexit
import os
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence

from mintrl_env.verifiers.sandbox import Call, Limits, Result, SandboxUnavailable
from mintrl_env.verifiers.sandbox_launch import ZygoteLauncher
from mintrl_env.verifiers.sandbox_session import make_calls, run_asserts, run_program


class LocalSandbox:
    """Runs every program, module and set of tests in a fork of one zygote.

    Sandboxes of one process that are made alike share their zygote. Processes are started when
    first needed, so making one costs nothing; usable from threads, asyncio's executors, forked and
    daemonic processes (each process has a zygote of its own).

    Args:
        unconfined: do without Landlock and seccomp: code can then read and write files, use the
            network and start processes. For trusted code alone; a warning says so.
        packages: installed packages ("numpy") that code may import.

    Raises:
        SandboxUnavailable: from every method, not from here.
    """

    name = "local"

    def __init__(self, *, unconfined: bool = False, packages: Sequence[str] = ()) -> None:
        if unconfined:
            warnings.warn(
                "the local sandbox runs UNCONFINED: the code under test can read and write files, "
                "use the network and start processes as this user; only its memory, output and "
                "time are limited",
                RuntimeWarning,
                stacklevel=2,
            )
        self._key = (not unconfined, tuple(packages))
        self._launcher = _open(self._key, self)
        self._closed = False

    def run(self, code: str, stdin: str, limits: Limits) -> Result:
        """See `Sandbox.run`."""
        return run_program(self._open_launcher(), code, stdin, limits)

    def calls(self, code: str, calls: Iterable[Call], limits: Limits) -> Iterator[Result]:
        """See `Sandbox.calls`."""
        return make_calls(self._open_launcher(), code, calls, limits)

    def asserts(self, code: str, snippets: Sequence[str], limits: Limits) -> Iterator[Result]:
        """See `Sandbox.asserts`."""
        return run_asserts(self._open_launcher(), code, snippets, limits)

    def pids(self) -> list[int]:
        """The process id of the zygote, if it stands at this moment."""
        return self._launcher.pids()

    def close(self) -> None:
        """Close this sandbox; with the last one of its kind the zygote and all its processes end."""
        self._closed = True
        with _lock:
            users = _users.get(self._key, weakref.WeakSet())
            users.discard(self)
            last = not users
        if last:
            self._launcher.close()

    def _open_launcher(self) -> ZygoteLauncher:
        if self._closed:
            raise SandboxUnavailable("the sandbox is closed")
        return self._launcher


_Key = tuple[bool, tuple[str, ...]]
_launchers: dict[_Key, ZygoteLauncher] = {}
_users: dict[_Key, weakref.WeakSet[LocalSandbox]] = {}
_lock = threading.Lock()


def _open(key: _Key, sandbox: LocalSandbox) -> ZygoteLauncher:
    with _lock:
        if key not in _launchers:
            _launchers[key] = ZygoteLauncher(confine=key[0], packages=key[1])
            _users[key] = weakref.WeakSet()
        _users[key].add(sandbox)
        return _launchers[key]


def close_all() -> None:
    """End the zygotes of this process (also done at exit)."""
    for launcher in list(_launchers.values()):
        launcher.close()


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have held it when we were forked
    for launcher in list(_launchers.values()):
        launcher.abandon()


atexit.register(close_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
