"""Code in bubblewrap: a Python of its own for every process, in namespaces of its own. Linux only.

For kernels without Landlock. Slower than the local sandbox by more than ten times. Mounts hold the
interpreter, its standard library and shared libraries, read-only, and nothing else; there is no
network, no other process and no writable place. Inside, the process confines itself as in the local
sandbox as far as the kernel lets it: seccomp always, Landlock where there is one.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from mintrl_env.verifiers.sandbox import Call, Limits, Result, SandboxUnavailable
from mintrl_env.verifiers.sandbox_launch import Ended, Life, package_paths
from mintrl_env.verifiers.sandbox_session import make_calls, run_asserts, run_program

_PROGRAM = Path(__file__).with_name("sandbox_bwrap_main.py")
_OURS = (
    "library_values.py",
    "plain_values.py",
    "sandbox_bwrap_main.py",
    "sandbox_child.py",
    "sandbox_confine.py",
    "sandbox_module.py",
    "sandbox_raised.py",
    "sandbox_stub.py",
    "sandbox_syscalls.py",
    "sandbox_tester.py",
)
_ENVIRONMENT = {
    "LC_ALL": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_UID = "65534"
_PYTHON = ["-s", "-S", "-P", "-B", "-X", "utf8"]
START_TIMEOUT_S = 60.0


class BwrapSandbox:
    """Runs every process under bubblewrap.

    Args:
        packages: installed packages ("numpy") that code may import.
        bwrap: the program, by default the one on the PATH.

    Raises:
        SandboxUnavailable: from every method, not from here.
    """

    name = "bubblewrap"

    def __init__(self, *, packages: Sequence[str] = (), bwrap: str = "") -> None:
        self._launcher = BwrapLauncher(packages, bwrap)

    def run(self, code: str, stdin: str, limits: Limits) -> Result:
        """See `Sandbox.run`."""
        return run_program(self._launcher, code, stdin, limits)

    def calls(self, code: str, calls: Iterable[Call], limits: Limits) -> Iterator[Result]:
        """See `Sandbox.calls`."""
        return make_calls(self._launcher, code, calls, limits)

    def asserts(self, code: str, snippets: Sequence[str], limits: Limits) -> Iterator[Result]:
        """See `Sandbox.asserts`."""
        return run_asserts(self._launcher, code, snippets, limits)

    def close(self) -> None:
        """End every process."""
        self._launcher.close()


class BwrapLauncher:
    """Starts one bubblewrap for each process.

    Each is to die with this process, which Linux ties to the *thread* that started it: so one
    thread, which lives as long as the process, starts them all.

    Args:
        landlock: False leaves everything to the mounts, as on a kernel without Landlock.
    """

    def __init__(
        self, packages: Sequence[str] = (), bwrap: str = "", *, landlock: bool = True
    ) -> None:
        self._packages, self._bwrap = tuple(packages), bwrap
        self._landlock = "optional" if landlock else "off"
        self._reset()
        _live.add(self)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._starter: ThreadPoolExecutor | None = None
        self._command: list[str] = []
        self._options: dict[str, object] = {}
        self._lives: set[BwrapLife] = set()
        self._closed = False

    def launch(self, fds: Sequence[int], limits: Limits, life_s: float) -> Life:
        """See `Launcher.launch`."""
        from mintrl_env.verifiers.sandbox_confine import thread_limit  # Linux alone has it

        if self._pid != os.getpid():
            self._reset()
        with self._lock:
            if self._closed:
                raise SandboxUnavailable("the sandbox is closed")
            if not self._command:
                self._make_ready()
            if self._starter is None:
                self._starter = ThreadPoolExecutor(1, thread_name_prefix="mintrl-bwrap")
            starter = self._starter
        options = self._options | {
            "fds": list(fds),
            "cpu_s": life_s,
            "mem_mb": limits.mem_mb,
            "output_bytes": limits.output_bytes,
            "threads": thread_limit(),
        }
        command = [*self._command, json.dumps(options)]
        try:
            life = starter.submit(BwrapLife, command, tuple(fds)).result()
        except RuntimeError as error:  # shut down since
            raise SandboxUnavailable("the sandbox is closed") from error
        with self._lock:
            self._lives = {other for other in self._lives if not other.over} | {life}
        return life

    def close(self) -> None:
        """End every process; the launcher starts no more."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._closed = True
            lives, self._lives = self._lives, set()
            starter, self._starter = self._starter, None
        for life in lives:
            life.close()
        if starter is not None:
            starter.shutdown(wait=False)

    def _make_ready(self) -> None:
        """Find out what to mount."""
        bwrap = find_bwrap(self._bwrap)
        options = {
            "packages": self._packages,
            "paths": package_paths(self._packages),
            "landlock": self._landlock,
        }
        command = [sys.executable, *_PYTHON, str(_PROGRAM), "paths", json.dumps(options)]
        try:
            found = subprocess.run(
                command,
                env=_ENVIRONMENT,
                cwd="/",
                capture_output=True,
                timeout=START_TIMEOUT_S,
                check=True,
            )
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or b""
            raise SandboxUnavailable(
                f"{sys.executable} could not list its own files: {error} {said!r:.300}"
            ) from error
        files = json.loads(found.stdout)
        self._command = _command(bwrap, files)
        self._options = options | {"mapped_bytes": files["mapped_bytes"]}


class BwrapLife:
    """One bubblewrap; see `Life`."""

    def __init__(self, command: list[str], fds: tuple[int, ...]) -> None:
        self._ended: Ended | None = None
        self._killed = ""
        self._lock = threading.Lock()
        self._errors: IO[bytes] = os.fdopen(os.memfd_create("bwrap"), "w+b")
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=fds,
                env={},
                cwd="/",
            )
        except (OSError, ValueError) as error:
            self._errors.close()
            raise SandboxUnavailable(f"could not start {command[0]}: {error}") from error
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError:
            self._pidfd = -1

    @property
    def over(self) -> bool:
        """It has ended and was reaped."""
        return self._ended is not None

    def kill(self) -> None:
        with self._lock:
            if self._ended is None and not self._killed:
                self._killed = "asked"
                # All that runs inside dies with the first process of its namespace, and that one
                # with bubblewrap.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._process.pid, 9)

    def wait(self, timeout_s: float) -> Ended | None:
        deadline = time.monotonic() + timeout_s
        pause = 0.001
        while self._ended is None and not self._reap():
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            if self._pidfd >= 0:
                poller = select.poll()
                poller.register(self._pidfd, select.POLLIN)
                poller.poll(left * 1000)
            else:
                time.sleep(min(left, pause))
                pause = min(2 * pause, 0.02)
        self._complain()
        return self._ended

    def close(self) -> None:
        self.kill()
        if self._ended is None:
            with contextlib.suppress(SandboxUnavailable):
                self.wait(10.0)
        with self._lock:
            self._errors.close()
            if self._pidfd >= 0:
                os.close(self._pidfd)
                self._pidfd = -1

    def _reap(self) -> bool:
        with self._lock:
            if self._ended is not None:
                return True
            try:
                pid, status, usage = os.wait4(self._process.pid, os.WNOHANG)
            except ChildProcessError:  # somebody else's SIGCHLD handler was quicker
                pid, status, usage = self._process.pid, 9, None
            if pid == 0:
                return False
            self._process.returncode = os.waitstatus_to_exitcode(status)
            code = self._process.returncode
            if not self._killed and 128 < code <= 192:
                status = code - 128  # bubblewrap exits with what its child died from
            cpu_s = usage.ru_utime + usage.ru_stime if usage is not None else 0.0
            # Its memory is not known: what the kernel counts begins with ours, when it was started.
            self._ended = Ended(status, self._killed, float("nan"), cpu_s)
            return True

    def _complain(self) -> None:
        """Where bubblewrap itself failed, no code has run."""
        if self._ended is None or self._killed or self._errors.closed:
            return
        self._errors.seek(0)
        said = self._errors.read(2000).decode("utf-8", "replace").strip()
        if said:
            raise SandboxUnavailable(f"bubblewrap failed: {said}")


def find_bwrap(name: str = "") -> str:
    """The path of bubblewrap.

    Raises:
        SandboxUnavailable
    """
    if sys.platform != "linux":
        raise SandboxUnavailable(f"bubblewrap needs Linux, this is {sys.platform}")
    found = shutil.which(name or "bwrap")
    if found is None:
        raise SandboxUnavailable(
            f"{name or 'bwrap'} is not installed: apt-get install bubblewrap (or dnf, apk, pacman)"
        )
    return found


def _command(bwrap: str, found: dict[str, object]) -> list[str]:
    """bubblewrap's command line up to the options of a run."""
    readable = [str(path) for path in found["readable"]]  # type: ignore[attr-defined]
    hidden = [str(name) for name in found["hidden"]]  # type: ignore[attr-defined]
    stdlib, python = str(found["stdlib"]), str(found["python"])
    command = [bwrap, "--unshare-all", "--unshare-user", "--uid", _UID, "--gid", _UID]
    command += [
        "--die-with-parent",
        "--as-pid-1",
        "--new-session",
        "--cap-drop",
        "ALL",
        "--clearenv",
    ]
    for name, value in _ENVIRONMENT.items():
        command += ["--setenv", name, value]
    for link in ("/bin", "/lib", "/lib64", "/usr/lib64"):
        if os.path.islink(link):  # the loader's path is written into every program
            command += ["--symlink", os.readlink(link), link]
    command += _mount(stdlib)
    empty = [os.path.join(stdlib, name) for name in hidden]
    empty = [path for path in empty if os.path.isdir(path)]
    for path in empty:
        command += ["--tmpfs", path]
    for path in [*readable, python, *map(str, (_PROGRAM.with_name(name) for name in _OURS))]:
        if os.path.dirname(path) != stdlib:
            command += _mount(path)
    for device in _DEVICES:
        command += ["--dev-bind", device, device]
    for path in ["/", *empty]:
        command += ["--remount-ro", path]
    return [*command, "--chdir", "/", "--", python, *_PYTHON, str(_PROGRAM), "run"]


def _mount(path: str) -> list[str]:
    return ["--ro-bind", path, path]


_live: weakref.WeakSet[BwrapLauncher] = weakref.WeakSet()


def _close_all() -> None:
    for launcher in list(_live):
        launcher.close()


atexit.register(_close_all)
