"""The process that local sandboxes fork from, as the grader sees it: start it, ask it, replace it.

A launcher starts one process for untrusted code on descriptors that it is given, and holds it on a
leash. `ZygoteLauncher` asks one zygote (`sandbox_zygote`) of this process; another launcher may
start a process in another way, as long as it ends up in `sandbox_child.main`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mintrl_env.verifiers.sandbox import Limits, SandboxUnavailable

START_TIMEOUT_S = 60.0
KILL_TIMEOUT_S = 10.0
"""Seconds that a SIGKILL may take on a busy machine before the zygote itself is given up."""
REQUEST = struct.Struct("=dddd")
RECORD = struct.Struct("=cibdd")
KILLED = ("", "asked", "life time", "spare")
"""As in `sandbox_zygote`, which cannot be imported here, nor import from here."""


class LauncherDied(Exception):
    """The launcher ended under a run (it was killed, or ran out of memory): try the run again."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended, as its launcher saw it.

    Attributes:
        status: as `os.wait` gives it.
        killed: why the launcher killed it; empty: it did not.
        memory_mb: its peak memory above the fresh interpreter's.
        cpu_s: processor seconds.
    """

    status: int
    killed: str
    memory_mb: float
    cpu_s: float


class Life(Protocol):
    """The leash of one process. All methods may be called again, and after the end."""

    def kill(self) -> None:
        """Have the process killed, with all that it started; does not wait."""
        ...

    def wait(self, timeout_s: float) -> Ended | None:
        """How the process ended; None: it has not after so many seconds.

        Raises:
            LauncherDied: nobody will ever say.
            SandboxUnavailable: no process could be started.
        """
        ...

    def close(self) -> None:
        """Kill, and let go of what the leash holds."""
        ...


class Launcher(Protocol):
    """Starts processes that run `sandbox_child.main`."""

    def launch(self, fds: Sequence[int], limits: Limits, life_s: float) -> Life:
        """Start one process.

        Args:
            fds: its end of the `talk` socket; for a program also its standard input and output.
                The caller closes its own copies afterwards.
            limits: memory, and the longest file it may write (`output_bytes`).
            life_s: seconds after which the launcher kills it whatever happens.

        Raises:
            LauncherDied, SandboxUnavailable
        """
        ...

    def close(self) -> None:
        """End every process; closing twice is harmless."""
        ...


class ZygoteLife:
    """A leash that a zygote holds the other end of."""

    def __init__(self, leash: socket.socket, zygote: Zygote) -> None:
        self._leash, self._zygote = leash, zygote
        self._ended: Ended | None = None

    def kill(self) -> None:
        # Not `close`: a forked sibling may hold a copy, which would keep the socket open.
        with contextlib.suppress(OSError):
            self._leash.shutdown(socket.SHUT_WR)

    def take(self, life_s: float) -> bool:
        """Use a spare from now on; False: its zygote has gone."""
        if not self._zygote.alive():
            return False
        try:
            self._leash.send(f"{life_s:g}".encode())
        except OSError:
            return False
        return True

    def wait(self, timeout_s: float) -> Ended | None:
        if self._ended is not None:
            return self._ended
        self._leash.settimeout(max(timeout_s, 0.0) or 1e-6)
        try:
            packet = self._leash.recv(4096)
        except (TimeoutError, BlockingIOError):
            return None
        except OSError as error:
            self._zygote.dead = True
            raise LauncherDied(f"the leash broke: {error}") from error
        if not packet:
            self._zygote.dead = True
            raise LauncherDied("the zygote ended")
        if packet[:1] == b"U":
            raise SandboxUnavailable(
                f"no process could be started: {packet[1:].decode()}; check the limits on "
                "processes and memory (ulimit -a, and the container's)"
            )
        _, status, killed, rss_kb, cpu_s = RECORD.unpack(packet)
        if KILLED[killed] == "spare":
            raise LauncherDied("a spare was taken too late")
        memory_mb = max(0.0, rss_kb - self._zygote.base_kb) / 1024
        self._ended = Ended(status, KILLED[killed], memory_mb, cpu_s)
        return self._ended

    def close(self) -> None:
        self.kill()
        self._leash.close()

    def abandon(self) -> None:
        """In a forked child: let go without a word to the zygote."""
        self._leash.close()


class Zygote:
    """One zygote process and its control socket."""

    def __init__(self, options: dict[str, object]) -> None:
        if sys.platform != "linux":
            raise SandboxUnavailable(
                f"the local sandbox needs Linux, this is {sys.platform}; use a remote one "
                "(E2B or Sandbox Fusion), or run in a Linux container or virtual machine"
            )
        if not sys.executable:
            raise SandboxUnavailable(
                "sys.executable is empty, so no process can be started; "
                "run under a normal Python interpreter"
            )
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = str(Path(__file__).with_name("sandbox_zygote.py"))
        # As -I, but for -E: the environment is ours, and a fixed hash seed makes the order of a
        # set, and so a verdict, repeatable.
        command = [sys.executable, "-s", "-S", "-P", "-B", "-X", "utf8", program]
        command += [str(theirs.fileno()), str(os.getpid()), json.dumps(options)]
        environment = {
            "LC_ALL": "C.UTF-8",
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
        }
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                close_fds=True,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C in the terminal is the grader's business
                cwd="/",
                env=environment,
            )
        except (OSError, ValueError) as error:
            self.control.close()
            raise SandboxUnavailable(
                f"could not start {sys.executable}: {error}; check the limits on processes and "
                "memory (ulimit -a)"
            ) from error
        finally:
            theirs.close()
        self.base_kb = 0
        self.dead = False
        """Seen to be dying, maybe a moment before the kernel says so."""
        try:
            self._wait_ready()
        except BaseException:
            self.kill()
            raise

    def _wait_ready(self) -> None:
        self.control.settimeout(START_TIMEOUT_S)
        try:
            packet = self.control.recv(65536)
        except OSError as error:
            raise SandboxUnavailable(
                f"the sandbox's process was not ready after {START_TIMEOUT_S:g} s: {error}"
            ) from error
        hello = json.loads(packet) if packet else {"failed": "it ended without a word"}
        if "ready" not in hello:
            raise SandboxUnavailable(
                f"the local sandbox cannot work here: {hello.get('failed')}; `mintrl doctor` says "
                "what this machine offers. Other sandboxes: bubblewrap, E2B, Sandbox Fusion"
            )
        self.base_kb = int(hello["rss_kb"])

    def send(self, request: bytes, fds: Sequence[int]) -> None:
        """One request; packets of several threads do not mix."""
        try:
            socket.send_fds(self.control, [request], list(fds))
        except (ConnectionError, TimeoutError) as error:
            self.dead = True
            raise LauncherDied(f"the zygote ended: {error}") from error

    def alive(self) -> bool:
        return not self.dead and self.process.poll() is None

    def kill(self) -> None:
        """End it and its children; SIGKILL where it does not end at once."""
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)
        self.control.close()
        try:
            self.process.wait(KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its children die with it, by their parent-death signal
            self.process.wait()

    def abandon(self) -> None:
        """In a forked child: let go without touching what the parent goes on using."""
        self.control.close()
        self.process.returncode = 0  # not our child: nothing to reap, nothing to warn about


class ZygoteLauncher:
    """Forks from one zygote of this process, started when first needed and replaced when it died.

    Args:
        confine: the children confine themselves; without it they are only limited in resources.
        packages: importable names (numpy) that the zygote imports ahead, so that code can use them.
    """

    def __init__(self, *, confine: bool, packages: Sequence[str] = ()) -> None:
        self.confine, self.packages = confine, tuple(packages)
        self.reset()

    def reset(self) -> None:
        """As new, for a forked child: nothing of the parent's is ours."""
        self._lock = threading.Lock()
        self._zygote: Zygote | None = None
        self._pid = os.getpid()

    def launch(self, fds: Sequence[int], limits: Limits, life_s: float) -> Life:
        return self.launch_spare(fds, limits, life_s, 0.0)

    def launch_spare(
        self, fds: Sequence[int], limits: Limits, life_s: float, spare_s: float
    ) -> ZygoteLife:
        """As `launch`, for a process that is killed after `spare_s` seconds unless it was taken."""
        request = REQUEST.pack(limits.mem_mb, limits.output_bytes, life_s, spare_s)
        try:
            return self._ask(request, fds)
        except LauncherDied:  # between two runs, so nothing was lost
            return self._ask(request, fds)

    def _ask(self, request: bytes, fds: Sequence[int]) -> ZygoteLife:
        zygote = self._ready()
        leash, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            zygote.send(request, [theirs.fileno(), *fds])
        except BaseException:
            leash.close()
            raise
        finally:
            theirs.close()
        return ZygoteLife(leash, zygote)

    def pids(self) -> list[int]:
        """The process id of the zygote, if there is one."""
        zygote = self._zygote
        return [zygote.process.pid] if zygote is not None and zygote.alive() else []

    def close(self) -> None:
        """End the zygote and all of its children; a later launch starts another one."""
        with self._lock:
            zygote, self._zygote = self._zygote, None
        if zygote is not None:
            zygote.kill()

    def abandon(self) -> None:
        """In a forked child: forget the parent's zygote."""
        if self._zygote is not None:
            self._zygote.abandon()
        self.reset()

    def _ready(self) -> Zygote:
        if self._pid != os.getpid():  # forked by something that skips Python's fork hooks
            self.abandon()
        with self._lock:
            if self._zygote is not None and not self._zygote.alive():
                self._zygote.kill()
                self._zygote = None
            if self._zygote is None:
                self._zygote = Zygote(
                    {
                        "confine": self.confine,
                        "packages": self.packages,
                        "paths": package_paths(self.packages),
                    }
                )
            return self._zygote


def package_paths(packages: Sequence[str]) -> list[str]:
    """The directories in which this process would find some packages."""
    paths: list[str] = []
    for name in packages:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise SandboxUnavailable(
                f"the package {name!r} that the sandbox is to preload is not installed here"
            )
        file = Path(spec.origin)
        folder = file.parent.parent if file.name == "__init__.py" else file.parent
        if str(folder) not in paths:
            paths.append(str(folder))
    return paths
