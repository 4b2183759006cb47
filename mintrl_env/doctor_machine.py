"""What this machine offers: Python, the ways to confine a program, room to write."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from mintrl_env.doctor_check import Check, Status

_NEWEST_PYTHON = (3, 12)
_LANDLOCK_CREATE_RULESET = 444  # the same on every architecture
_LANDLOCK_VERSION = 1  # flag: tell the ABI, make nothing
_ROOM_FAIL, _ROOM_WARN = 200 * 2**20, 5 * 2**30
# Runs in a child of its own, since it changes the process it runs in. User namespace: 0x10000000.
_UNSHARE = (
    "import ctypes, os, sys; libc = ctypes.CDLL(None, use_errno=True); "
    "sys.exit(ctypes.get_errno() if libc.unshare(0x10000000) else 0)"
)


def python_checks(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> list[Check]:
    """Python's version and where it lives."""
    text = ".".join(map(str, version))
    where = f"{text} at {sys.prefix}"
    if version < (3, 11):
        fix = "use Python 3.11 or 3.12"
        return [Check("Python", "version", Status.FAIL, f"{where}: older than 3.11", fix)]
    if version[:2] > _NEWEST_PYTHON:
        detail = f"{where}: newer than 3.12, where nothing was tried"
        return [Check("Python", "version", Status.WARN, detail, "use Python 3.11 or 3.12")]
    checks = [Check("Python", "version", Status.OK, where)]
    if sys.prefix == sys.base_prefix and not os.environ.get("CONDA_PREFIX"):
        fix = "python -m venv .venv && . .venv/bin/activate"
        detail = "none: packages are installed for the whole system"
        checks.append(Check("Python", "virtual environment", Status.WARN, detail, fix))
    return checks


def sandbox_checks() -> list[Check]:
    """Each way to confine a program, and whether at least one complete way works."""
    abi, why = landlock_abi()
    seccomp, seccomp_detail = _seccomp()
    bubblewrap, bubblewrap_check = _bubblewrap()
    landlock = Check(
        "sandboxes",
        "Landlock",
        Status.OK if abi else Status.WARN,
        f"ABI {abi}" if abi else why,
        "" if abi else "boot Linux 5.13 or newer with lsm=...,landlock",
    )
    filters = Check(
        "sandboxes", "seccomp filters", Status.OK if seccomp else Status.WARN, seccomp_detail
    )
    e2b, e2b_check = _e2b()
    ways = [
        name
        for name, works in (
            ("Landlock with seccomp", bool(abi) and seccomp),
            ("bubblewrap", bubblewrap),
            ("E2B", e2b),
        )
        if works
    ]
    if ways:
        summary = Check("sandboxes", "code tests", Status.OK, "can run in: " + ", ".join(ways))
    else:
        detail = "no sandbox works here, so code tests would be refused (math needs none)"
        fix = "install bubblewrap, or use E2B"
        summary = Check("sandboxes", "code tests", Status.WARN, detail, fix)
    return [summary, landlock, filters, _namespaces(), bubblewrap_check, e2b_check]


def landlock_abi() -> tuple[int, str]:
    """Landlock's ABI by syscall (0: none), and why there is none."""
    if sys.platform != "linux":
        return 0, f"Linux only, this is {platform.system()}"
    libc = ctypes.CDLL(None, use_errno=True)
    abi = int(
        libc.syscall(
            ctypes.c_long(_LANDLOCK_CREATE_RULESET),
            ctypes.c_void_p(),
            ctypes.c_size_t(0),
            ctypes.c_uint32(_LANDLOCK_VERSION),
        )
    )
    if abi > 0:
        return abi, ""
    code = ctypes.get_errno()
    words = {
        errno.ENOSYS: "the kernel has no Landlock",
        errno.EOPNOTSUPP: "the kernel has Landlock, but it is switched off at boot",
    }
    return 0, words.get(code, f"refused: {os.strerror(code)}")


def _seccomp() -> tuple[bool, str]:
    if sys.platform != "linux":
        return False, f"Linux only, this is {platform.system()}"
    try:
        actions = Path("/proc/sys/kernel/seccomp/actions_avail").read_text().split()
    except OSError as error:
        return False, f"not offered by the kernel ({error.strerror})"
    needed = {"allow", "errno", "kill_process"}
    if not needed <= set(actions):
        return False, f"the kernel lacks the actions {', '.join(sorted(needed - set(actions)))}"
    if platform.machine() not in ("x86_64", "aarch64", "arm64"):
        return False, f"no table of system calls for {platform.machine()}"
    return True, f"offered, {platform.machine()}"


def _namespaces() -> Check:
    name = "user namespaces"
    if sys.platform != "linux":
        return Check("sandboxes", name, Status.WARN, f"Linux only, this is {platform.system()}")
    code = _exit_code([sys.executable, "-I", "-S", "-c", _UNSHARE])
    if code == 0:
        return Check("sandboxes", name, Status.OK, "can be made")
    why = "took too long" if code is None else os.strerror(code)
    detail = f"cannot be made ({why}); only bubblewrap without root needs them"
    return Check("sandboxes", name, Status.WARN, detail)


def _bubblewrap() -> tuple[bool, Check]:
    path = shutil.which("bwrap")
    if path is None:
        detail = "not found in PATH; the second choice, where Landlock is missing"
        fix = "if wanted: apt-get install bubblewrap"
        return False, Check("sandboxes", "bubblewrap", Status.WARN, detail, fix)
    code = _exit_code([path, "--ro-bind", "/", "/", "--unshare-all", "--die-with-parent", "true"])
    if code == 0:
        return True, Check("sandboxes", "bubblewrap", Status.OK, f"{path} runs a program")
    detail = f"{path} cannot run a program here (exit status {code})"
    return False, Check("sandboxes", "bubblewrap", Status.WARN, detail)


def _e2b() -> tuple[bool, Check]:
    """Whether a key is set; never which."""
    key = bool(os.environ.get("E2B_API_KEY"))
    try:
        version = metadata.version("e2b-code-interpreter")
    except metadata.PackageNotFoundError:
        version = ""
    parts = [f"e2b-code-interpreter {version}" if version else "package not installed"]
    parts.append("E2B_API_KEY is set (not tried)" if key else "E2B_API_KEY is not set")
    fixes = [] if version else ['pip install "mintrl-env[e2b]"']
    fixes += [] if key else ["export E2B_API_KEY=..."]
    works = key and bool(version)
    return works, Check(
        "sandboxes",
        "E2B",
        Status.OK if works else Status.WARN,
        ", ".join(parts),
        f"if wanted: {'; '.join(fixes)}" if fixes else "",
    )


def _exit_code(command: list[str]) -> int | None:
    try:
        return subprocess.run(command, capture_output=True, timeout=4, check=False).returncode
    except (subprocess.TimeoutExpired, OSError):
        return None


def folder_checks(folder: Path) -> list[Check]:
    """Can runs be written here, and is there room?"""
    where = folder.resolve()
    checks = []
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".mintrl-doctor-") as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
        checks.append(Check("this machine", "write access", Status.OK, str(where)))
    except OSError as error:
        fix = "go to a folder of yours, or give --run"
        detail = f"{where}: {error.strerror}"
        checks.append(Check("this machine", "write access", Status.FAIL, detail, fix))
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        detail = f"not known: {error.strerror}"
        return [*checks, Check("this machine", "disk space", Status.WARN, detail)]
    status = Status.FAIL if free < _ROOM_FAIL else Status.WARN if free < _ROOM_WARN else Status.OK
    fix = (
        "" if status is Status.OK else "free some: models, checkpoints and rollouts take gigabytes"
    )
    detail = f"{free / 2**30:.1f} GiB free"
    checks.append(Check("this machine", "disk space", status, detail, fix))
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cores = os.cpu_count() or 1
    checks.append(Check("this machine", "processors", Status.OK, f"{cores} usable"))
    return checks
