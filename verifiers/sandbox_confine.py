"""Confine this very process for good: Landlock, seccomp, resource limits, no capabilities.

`prepare` does once what is the same for every program (the BPF program, the Landlock ruleset);
`confine` is then a handful of system calls in each child. Loaded from its file by a bare
`python -I -S`, hence the standard library alone and no import of the package.

Two independent walls stand before every file and every other process. Landlock lets files be read
below a few directories and nothing else be opened, connected to or signalled. The seccomp
allow-list (`sandbox_syscalls`) knows no call that creates a process, a socket or a file, or that
changes one by name. docs/sandbox.md says what neither of them covers.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import math
import os
import resource
import struct
import sys
import types
from collections.abc import Iterable

if sys.byteorder != "little":
    raise ImportError("the seccomp program is written for little-endian machines")

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # the same on both machines
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_READ_FILE, _READ_DIR, _WRITE_FILE = 1 << 2, 1 << 3, 1 << 1
_FS_RIGHTS = {
    1: 13,
    2: 14,
    3: 15,
    4: 15,
    5: 16,
}  # how many there are, by ABI: REFER, TRUNCATE, IOCTL
_QUIET = 1  # do not write a line into the audit log for everything that a program tries

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_CAP_HEADER, _CAP_NONE = struct.pack("=Ii", 0x20080522, 0), bytes(24)
_UINT32 = struct.Struct("=I")
_MIB = 1 << 20
_OPEN_FILES, _HIGHEST_FD = 64, 1 << 20
_THREADS, _ANY_THREADS = 256, 1 << 20
_FIXED_LIMITS = (
    (resource.RLIMIT_NOFILE, _OPEN_FILES),
    (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_MEMLOCK, 0),
    (resource.RLIMIT_MSGQUEUE, 0),
)

_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_DATA = (  # read by the standard library or the C library, the same on every machine of a release
    "/usr/share/zoneinfo",
    "/usr/lib/locale",
    "/usr/share/locale",
    "/etc/ld.so.cache",
    "/etc/ssl/openssl.cnf",
    "/etc/pki/tls/openssl.cnf",
    "/etc/mime.types",
)
NOT_STANDARD = frozenset({"site-packages", "dist-packages", "test", "idlelib", "turtledemo"})


class ConfineError(OSError):
    """A step that the kernel refused: nothing may run here. `errno` is the kernel's."""

    def __init__(self, number: int, step: str) -> None:
        super().__init__(number, f"{step}: {os.strerror(number)}")
        self.step = step


class Plan:
    """What `prepare` made.

    Attributes:
        landlock_abi: the kernel's, 0 where it has none.
        readable: the files and directories that a program may read.
        ruleset: descriptor of the Landlock ruleset, or -1.
        path: what is left of `sys.path`.
        mapped_bytes: address space of the process that prepared, and of a fresh child.
        pid: the process that prepared, whose death ends the children.
    """

    def __init__(
        self, machine: str, readable: tuple[str, ...], landlock_abi: int, mapped_bytes: int
    ) -> None:
        syscalls = _sibling("sandbox_syscalls")
        program, self._pids_at = syscalls.assemble(machine)
        self._program = bytearray(program)
        self._buffer = (ctypes.c_char * len(program)).from_buffer(self._program)
        address = ctypes.addressof(self._buffer)
        header = struct.pack("=HxxxxxxQ", len(program) // 8, address)  # struct sock_fprog
        # SECCOMP_SET_MODE_FILTER
        self._filter = (_SECCOMP[machine], ctypes.c_uint(1), ctypes.c_uint(0), header)
        self.readable, self.landlock_abi = readable, landlock_abi
        self.ruleset = _ruleset(landlock_abi, readable) if landlock_abi else -1
        self.pid, self.mapped_bytes = os.getpid(), mapped_bytes
        # A package that may not be read is to be missing, not forbidden: others do without it then.
        real = {entry: os.path.realpath(entry) for entry in sys.path}
        self.path = [p for p, r in real.items() if r == _stdlib() or _below(r, readable)]
        which = [n for n in dir(resource) if n.startswith("RLIMIT_")]
        self._hard = {n: resource.getrlimit(n)[1] for n in (getattr(resource, w) for w in which)}


_libc = ctypes.CDLL(None, use_errno=True)
_syscall, _prctl_function, _capset = _libc.syscall, _libc.prctl, _libc.capset
_syscall.restype = ctypes.c_long
_NOTHING = tuple(ctypes.c_ulong(0) for _ in range(3))


def _call(step: str, number: int, *args: object) -> int:
    result: int = _syscall(ctypes.c_long(number), *args)
    if result < 0:
        raise ConfineError(ctypes.get_errno(), step)
    return result


def _prctl(step: str, option: int, value: int) -> None:
    if _prctl_function(option, ctypes.c_ulong(value), *_NOTHING) < 0:
        raise ConfineError(ctypes.get_errno(), step)


def _sibling(name: str) -> types.ModuleType:
    """A module beside this file, which a bare Python has on no path."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name + ".py")
    spec = importlib.util.spec_from_file_location("_" + name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def landlock_abi() -> int:
    """The kernel's Landlock ABI.

    Raises:
        ConfineError: ENOSYS (older than Linux 5.13, or built without), EOPNOTSUPP (switched off at
            boot), EPERM (an outer seccomp filter, as old Docker releases have).
    """
    return _call("landlock_create_ruleset", _LANDLOCK_CREATE, None, 0, 1)


def seccomp_available() -> None:
    """
    Raises:
        ConfineError: filters cannot be installed here.
    """
    machine = os.uname().machine
    if machine not in _SECCOMP:
        raise ConfineError(errno.ENOSYS, f"seccomp filter for {machine}")
    action = ctypes.c_uint32(0x00050000)  # SECCOMP_RET_ERRNO
    _call("seccomp", _SECCOMP[machine], ctypes.c_uint(2), ctypes.c_uint(0), ctypes.byref(action))


def prepare(
    packages: tuple[str, ...] = (), *, landlock: str = "required", mapped_bytes: int = 256 * _MIB
) -> Plan:
    """Make the plan for this process's children (or for itself). Starts nothing, confines nothing.

    Call it when all that the children need is imported: what is mapped then is not counted as
    theirs.

    Args:
        packages: importable top-level names outside the standard library whose files may be read,
            for instance ("numpy",); already imported, with all they need.
        landlock: "required"; or, where something else keeps the files away (bubblewrap's mounts),
            "optional" or "off".
        mapped_bytes: what to take for this process's address space where there is no /proc.

    Raises:
        ConfineError: Landlock or seccomp is missing.
    """
    seccomp_available()
    abi = 0
    try:
        abi = landlock_abi() if landlock != "off" else 0
    except ConfineError:
        if landlock == "required":
            raise
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(-8, 1)  # one arena: each further one reserves 64 MiB of a thread's memory
    readable = readable_paths(packages)
    return Plan(os.uname().machine, readable, abi, _mapped_bytes() or mapped_bytes)


def confine(
    plan: Plan, *, cpu_s: float, mem_mb: int, output_bytes: int, keep_fds: tuple[int, ...]
) -> None:
    """Confine this process, irrevocably. Call it in a process with a single thread.

    Args:
        plan: from `prepare`, in this process or in its parent.
        cpu_s: processor seconds after which the kernel ends the process. A last resort: the parent
            keeps the deadline; give it the wall seconds of all that the process is to do.
        mem_mb: MiB of address space beyond `plan.mapped_bytes`.
        output_bytes: the longest file that can be written to, by an inherited descriptor.
        keep_fds: the descriptors that stay open; all others are closed.

    Raises:
        ConfineError: a step failed. The process is confined by half: end it.
    """
    limits = (
        (resource.RLIMIT_CPU, math.ceil(cpu_s) + 1),
        (resource.RLIMIT_AS, plan.mapped_bytes + mem_mb * _MIB),
        (resource.RLIMIT_FSIZE, output_bytes),
        (resource.RLIMIT_NPROC, _own_user()),
    )
    _lower(plan, limits)
    _lower(plan, _FIXED_LIMITS)
    _close_others({*keep_fds, plan.ruleset} - {-1})
    _drop_capabilities()
    if plan.pid != os.getpid():
        _prctl("prctl PDEATHSIG", _PR_SET_PDEATHSIG, 9)
        if os.getppid() != plan.pid:
            os._exit(1)  # it died before the signal was asked for
    _prctl("prctl DUMPABLE", _PR_SET_DUMPABLE, 0)
    _prctl("prctl NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)
    os.chdir("/")
    sys.path[:] = plan.path
    if plan.ruleset >= 0:
        flags = _QUIET if plan.landlock_abi >= 7 else 0
        step = "landlock_restrict_self"
        _call(step, _LANDLOCK_RESTRICT, ctypes.c_int(plan.ruleset), ctypes.c_uint(flags))
        os.close(plan.ruleset)
    _install_filter(plan)


def _mapped_bytes() -> int:
    # Once, not in each child: opening a file of a new process in /proc is slow.
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0


def _close_others(keep: set[int]) -> None:
    lowest = 0
    for fd in sorted(keep):
        if lowest < fd:
            os.closerange(lowest, fd)
        lowest = fd + 1
    os.closerange(lowest, _HIGHEST_FD)


def _own_user() -> int:
    """As root, take a real user id that nobody else has, so that threads can be counted (root's are
    not). The effective id stays, since Python itself may lie in root's home. Returns how many
    threads the user may have."""
    if os.geteuid() == 0:
        pid = os.getpid()
        for uid in (0x60000000 + pid, 20000 + pid % 40000):  # the second: containers map 65,536 ids
            try:
                os.setresuid(uid, 0, 0)
            except OSError:
                continue
            return _THREADS
    return thread_limit()


def thread_limit() -> int:
    """A limit on a user's threads that stops a bomb and nobody else: it counts all of the user's,
    wherever they run, of which there are no more than on the machine."""
    try:
        with open("/proc/loadavg", encoding="ascii") as file:
            return int(file.read().split()[3].split("/")[1]) + 4 * _THREADS
    except (OSError, ValueError, IndexError):
        return _ANY_THREADS


def _lower(plan: Plan, limits: tuple[tuple[int, int], ...]) -> None:
    for which, value in limits:
        hard = plan._hard[which]
        if 0 <= hard < value:
            value = hard
        # Both, so that the kernel's SIGKILL comes instead of a SIGXCPU that can be ignored.
        resource.setrlimit(which, (value, value))


def _drop_capabilities() -> None:
    # Without permitted ones there are no ambient ones either.
    if _capset(_CAP_HEADER, _CAP_NONE) < 0:
        raise ConfineError(ctypes.get_errno(), "capset")


def _install_filter(plan: Plan) -> None:
    pid = os.getpid()
    for at in plan._pids_at:
        _UINT32.pack_into(plan._program, at, pid)
    _call("seccomp", *plan._filter)


def _ruleset(abi: int, readable: tuple[str, ...]) -> int:
    """A Landlock ruleset: all that this ABI can refuse is refused, but for reading below
    `readable`."""
    filesystem = (1 << _FS_RIGHTS[min(abi, 5)]) - 1
    net = 3 if abi >= 4 else 0  # TCP: bind, connect
    scoped = 3 if abi >= 6 else 0  # abstract Unix sockets, signals
    size = 8 if abi < 4 else 16 if abi < 6 else 24
    attributes = struct.pack("=QQQ", filesystem, net, scoped)[:size]
    ruleset = _call(
        "landlock_create_ruleset",
        _LANDLOCK_CREATE,
        attributes,
        ctypes.c_size_t(len(attributes)),
        ctypes.c_uint(0),
    )
    os.set_inheritable(ruleset, False)
    _allow(ruleset, _stdlib(), _READ_DIR)  # what the import system lists to find a module
    for path in readable:
        rights = _READ_FILE | (_READ_DIR if os.path.isdir(path) else 0)
        _allow(ruleset, path, rights)
    for path in _DEVICES:
        _allow(ruleset, path, _READ_FILE | (_WRITE_FILE if path == "/dev/null" else 0))
    return ruleset


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # not there, so nobody can read it either
    try:
        rule = struct.pack("=Qi", rights, fd)
        kind = ctypes.c_int(1)  # LANDLOCK_RULE_PATH_BENEATH
        _call(
            "landlock_add_rule", _LANDLOCK_ADD, ctypes.c_int(ruleset), kind, rule, ctypes.c_uint(0)
        )
    finally:
        os.close(fd)


def _stdlib() -> str:
    return os.path.dirname(os.path.realpath(os.__file__))


def readable_paths(packages: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Real paths that a program may read: the standard library without what is installed into it,
    shared libraries, time zones, and `packages`. Existing ones only, none below another."""
    found = [e.path for e in os.scandir(_stdlib()) if e.name not in NOT_STANDARD]
    machine = os.uname().machine
    for root in ("/", "/usr", "/usr/local"):
        found.append(os.path.join(root, "lib64"))
        for libc in ("gnu", "musl"):
            found.append(os.path.join(root, "lib", f"{machine}-linux-{libc}"))
    for directory in {"/lib", "/usr/lib", "/usr/local/lib", os.path.join(sys.base_prefix, "lib")}:
        found += _shared_libraries(directory)
    found += _DATA
    found += _package_files(packages)
    real = sorted({os.path.realpath(p) for p in found if os.path.exists(p)})
    kept: list[str] = []
    for path in real:  # a parent sorts before what is below it
        if not _below(path, kept):
            kept.append(path)
    return tuple(kept)


def _below(path: str, above: Iterable[str]) -> bool:
    return any(path == one or path.startswith(one + "/") for one in above)


def _shared_libraries(directory: str) -> list[str]:
    try:
        return [e.path for e in os.scandir(directory) if ".so" in e.name and not e.is_dir()]
    except OSError:
        return []


def _package_files(names: tuple[str, ...]) -> list[str]:
    """Of packages, and of all else that was imported from the same directories (what they need):
    the directory or file, and `NAME.libs` beside it, where wheels keep libraries."""
    folders = {_home(name) for name in names} - {""}
    found = []
    for name in list(sys.modules):
        folder = _home(name)
        if "." not in name and folder in folders:
            file = str(sys.modules[name].__file__)
            package = os.path.dirname(file)
            found.append(file if package == folder else package)
            found.append(os.path.join(folder, name + ".libs"))
    return found


def _home(name: str) -> str:
    """The directory on the path in which a top-level module lies."""
    file: str | None = getattr(sys.modules.get(name), "__file__", None)
    if not file:
        return ""
    folder = os.path.dirname(file)
    is_package = os.path.basename(file).startswith("__init__.")
    return os.path.dirname(folder) if is_package else folder
