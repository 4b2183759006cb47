"""The local sandbox: code in forks of a clean, confined process of this machine. Linux only."""

from __future__ import annotations

import atexit
import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence

from mintrl_env.verifiers.sandbox import Call, Limits, Result
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
        self._launcher = _shared_launcher(not unconfined, tuple(packages))
        self._closed = False

    def run(self, code: str, stdin: str, limits: Limits) -> Result:
        """See `Sandbox.run`."""
        return run_program(self._launcher, code, stdin, limits)

    def calls(self, code: str, calls: Iterable[Call], limits: Limits) -> Iterator[Result]:
        """See `Sandbox.calls`."""
        return make_calls(self._launcher, code, calls, limits)

    def asserts(self, code: str, snippets: Sequence[str], limits: Limits) -> Iterator[Result]:
        """See `Sandbox.asserts`."""
        return run_asserts(self._launcher, code, snippets, limits)

    def pids(self) -> list[int]:
        """The process id of the zygote, if it stands at this moment."""
        return self._launcher.pids()

    def close(self) -> None:
        """End the zygote and every process of it, also for the sandboxes that share it: theirs
        starts anew when they need it."""
        self._launcher.close()


_launchers: dict[tuple[bool, tuple[str, ...]], ZygoteLauncher] = {}
_lock = threading.Lock()


def _shared_launcher(confine: bool, packages: tuple[str, ...]) -> ZygoteLauncher:
    with _lock:
        launcher = _launchers.get((confine, packages))
        if launcher is None:
            launcher = ZygoteLauncher(confine=confine, packages=packages)
            _launchers[confine, packages] = launcher
        return launcher


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
