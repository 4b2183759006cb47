"""Programs that try to get out, run through a sandbox before any other one is.

Each attempt is harmless where it works: it touches a file, a listener and a temporary directory of
our own, and sends signal 0. One that works refuses the whole sandbox, since a kernel, a container or
a bug let it through that this package took for closed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mintrl_env.verifiers.sandbox import Limits, Ran, Sandbox, SandboxUnavailable

LIMITS = Limits(wall_s=20.0, mem_mb=256)
"""A busy machine may take its time; the attempts themselves take milliseconds."""
_SHARED = {"LC_ALL", "LC_CTYPE", "LANG", "PWD", "SHLVL", "PYTHONHASHSEED"}
_SHARED |= {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"}

_PROGRAM = """
import ctypes, json, os, resource, socket, sys, threading
given = json.loads(sys.stdin.read())
grader, secret, folder = given["grader"], given["secret"], given["folder"]

def read(path):
    with open(path, "rb") as file:
        return file.read(8) != b""

def write(path):
    with open(path, "w") as file:
        file.write("x")
    return True

def connect(address):
    with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as link:
        link.settimeout(1)
        link.connect(address)
    return True

def fork():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return True

def unshare():
    return ctypes.CDLL(None).unshare(0x10000000) == 0

def inherited():
    for fd in range(4, 256):
        try:
            os.fstat(fd)
            return True
        except OSError:
            pass
    return False

def allocate():
    return len(bytearray(given["too_much"])) > 0

attempts = {
    "read a file of the grader's": lambda: read(secret),
    "read the grader's environment": lambda: read(f"/proc/{grader}/environ"),
    "read the grader's memory map": lambda: read(f"/proc/{grader}/maps"),
    "read /etc/passwd": lambda: read("/etc/passwd"),
    "list a directory": lambda: os.listdir(folder) is not None,
    "write a file": lambda: write(folder + "/written"),
    "make a directory": lambda: os.mkdir(folder + "/made") is None,
    "make a link": lambda: os.symlink("/", folder + "/link") is None,
    "overwrite a file": lambda: write(secret),
    "truncate a file": lambda: os.truncate(secret, 1) is None,
    "change a file's mode": lambda: os.chmod(secret, 0o600) is None,
    "change a file's times": lambda: os.utime(secret, (1, 1)) is None,
    "rename a file": lambda: os.rename(secret, secret + "2") is None,
    "connect to a port of this machine": lambda: connect(("127.0.0.1", given["port"])),
    "connect to an abstract socket": lambda: connect("\\0" + given["abstract"]),
    "open a socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM) is not None,
    "signal the grader": lambda: os.kill(grader, 0) is None,
    "signal its parent": lambda: os.getppid() and os.kill(os.getppid(), 0) is None,
    "signal every process": lambda: os.kill(-1, 0) is None,
    "hold a process": lambda: os.pidfd_open(grader) >= 0,
    "read another process's limits": lambda: resource.prlimit(grader, 7) is not None,
    "make a user namespace": unshare,
    "fork": fork,
    "make a file in memory": lambda: os.memfd_create("x") >= 0,
    "allocate more than its memory": allocate,
    "see an inherited descriptor": inherited,
    "see the grader's environment variables": lambda: bool(set(given["names"]) & set(os.environ)),
}
escaped, errors = [], {}
for name, attempt in attempts.items():
    try:
        if attempt():
            escaped.append(name)
    except (OSError, MemoryError) as error:
        errors[name] = repr(error)
ran = []
thread = threading.Thread(target=ran.append, args=(1,))
thread.start()
thread.join()
print(json.dumps({"escaped": escaped, "errors": errors, "ended": len(ran) == 1}))
"""

_EXEC = """
import os
for program in ("/bin/true", "/usr/bin/true"):
    try:
        os.execv(program, [program])
    except OSError:
        pass
print("not executed")
"""


def escapes(sandbox: Sandbox) -> list[str]:
    """What code can do in a sandbox that it must not be able to do; empty: it holds.

    Raises:
        SandboxUnavailable: the programs did not run at all.
    """
    with _bait() as bait:
        result = sandbox.run(_PROGRAM, json.dumps(bait.given()), LIMITS)
        if result.ran is not Ran.OK:
            raise SandboxUnavailable(
                f"a trial program did not run in the {sandbox.name} sandbox: {result.ran.value}, "
                f"{result.detail}"
            )
        try:
            report = json.loads(result.value)
            found = [str(name) for name in report["escaped"]]
            ended = report["ended"] is True
        except (ValueError, KeyError, TypeError) as error:
            raise SandboxUnavailable(
                f"a trial program in the {sandbox.name} sandbox printed {result.value!r:.200}"
            ) from error
        if not ended:
            raise SandboxUnavailable(f"threads do not work in the {sandbox.name} sandbox")
        found += bait.taken()
    result = sandbox.run(_EXEC, "", LIMITS)
    if result.ran is not Ran.OK or str(result.value).strip() != "not executed":
        found.append("execute a program")
    return list(dict.fromkeys(found))


def require_confined(sandbox: Sandbox) -> None:
    """
    Raises:
        SandboxUnavailable: an attempt to get out worked, or the sandbox does not work.
    """
    if found := escapes(sandbox):
        raise SandboxUnavailable(
            f"code in the {sandbox.name} sandbox can get out, so it is refused here: it could "
            + "; ".join(found)
        )


class _Bait:
    """Things of ours that the trial programs go for."""

    def __init__(self, folder: str, listener: socket.socket, abstract: socket.socket) -> None:
        self.folder, self.listener, self.abstract = Path(folder), listener, abstract
        self.folder.chmod(0o777)  # what stops a program must not be the file's mode
        self.secret = self.folder / "secret"
        self.text = secrets.token_hex(16)
        self.secret.write_text(self.text, encoding="ascii")
        self.secret.chmod(0o666)
        self.before = self._attributes()

    def given(self) -> dict[str, object]:
        return {
            "grader": os.getpid(),
            "secret": str(self.secret),
            "folder": str(self.folder),
            "port": self.listener.getsockname()[1],
            "abstract": self.abstract.getsockname()[1:].decode("ascii"),
            "too_much": 2 * LIMITS.mem_mb << 20,
            "names": sorted(set(os.environ) - _SHARED),
        }

    def _attributes(self) -> tuple[int, int, int]:
        found = self.secret.stat()
        return found.st_mode, found.st_mtime_ns, found.st_uid

    def taken(self) -> list[str]:
        """What happened to them, whatever the program said."""
        found = []
        if sorted(p.name for p in self.folder.iterdir()) != ["secret"]:
            found.append("change a directory")
        elif self.secret.read_text(encoding="ascii") != self.text:
            found.append("change a file")
        elif self._attributes() != self.before:
            found.append("change a file's attributes")
        for name, server in (("a port", self.listener), ("an abstract socket", self.abstract)):
            with contextlib.suppress(BlockingIOError):
                server.accept()[0].close()
                found.append(f"connect to {name}")
        return found


@contextlib.contextmanager
def _bait() -> Iterator[_Bait]:
    with (
        tempfile.TemporaryDirectory(prefix="mintrl-canary-") as folder,
        socket.socket(socket.AF_INET) as listener,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        listener.bind(("127.0.0.1", 0))
        abstract.bind("\0mintrl-canary-" + secrets.token_hex(8))
        for server in (listener, abstract):
            server.listen(1)
            server.setblocking(False)
        yield _Bait(folder, listener, abstract)
