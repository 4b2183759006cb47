"""Which system calls untrusted code may make, and the seccomp program that says so.

An allow-list: what is not named fails with EPERM, what is newer than this file with ENOSYS (so that
a C library falls back to what it did before). Loaded from its file by a bare `python -I -S`, hence
the standard library alone and no import of the package.
"""

from __future__ import annotations

import errno
import struct

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Of each machine name (`os.uname().machine`), what the kernel calls its 64-bit little-endian ABI."""

# fmt: off
X86_64 = {
    "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7,
    "lseek": 8, "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13,
    "rt_sigprocmask": 14, "rt_sigreturn": 15, "ioctl": 16, "pread64": 17, "pwrite64": 18,
    "readv": 19, "writev": 20, "access": 21, "pipe": 22, "select": 23, "sched_yield": 24,
    "mremap": 25, "madvise": 28, "dup": 32, "dup2": 33, "pause": 34, "nanosleep": 35,
    "getitimer": 36, "alarm": 37, "setitimer": 38, "getpid": 39, "sendto": 44, "recvfrom": 45,
    "shutdown": 48, "getsockname": 51, "getpeername": 52, "socketpair": 53, "getsockopt": 55,
    "clone": 56, "exit": 60, "wait4": 61, "kill": 62, "uname": 63, "fcntl": 72, "getcwd": 79,
    "readlink": 89, "gettimeofday": 96, "getrlimit": 97, "getrusage": 98, "sysinfo": 99,
    "times": 100, "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108, "getppid": 110,
    "getpgrp": 111, "getgroups": 115, "getresuid": 118, "getresgid": 120, "getpgid": 121,
    "getsid": 124, "rt_sigpending": 127, "rt_sigtimedwait": 128, "rt_sigsuspend": 130,
    "sigaltstack": 131, "prctl": 157, "gettid": 186, "tkill": 200, "time": 201, "futex": 202,
    "sched_getaffinity": 204, "epoll_create": 213, "getdents64": 217, "set_tid_address": 218,
    "restart_syscall": 219, "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230,
    "exit_group": 231, "epoll_wait": 232, "epoll_ctl": 233, "tgkill": 234, "waitid": 247,
    "openat": 257, "newfstatat": 262, "readlinkat": 267, "faccessat": 269, "pselect6": 270,
    "ppoll": 271, "set_robust_list": 273, "epoll_pwait": 281, "epoll_create1": 291, "dup3": 292,
    "pipe2": 293, "prlimit64": 302, "getcpu": 309, "getrandom": 318, "membarrier": 324,
    "statx": 332, "rseq": 334, "clone3": 435, "close_range": 436, "faccessat2": 439,
    "epoll_pwait2": 441,
}
AARCH64 = {  # the kernel's asm-generic table: calls that another one covers do not exist
    "getcwd": 17, "epoll_create1": 20, "epoll_ctl": 21, "epoll_pwait": 22, "dup": 23, "dup3": 24,
    "fcntl": 25, "ioctl": 29, "faccessat": 48, "openat": 56, "close": 57, "pipe2": 59,
    "getdents64": 61, "lseek": 62, "read": 63, "write": 64, "readv": 65, "writev": 66,
    "pread64": 67, "pwrite64": 68, "pselect6": 72, "ppoll": 73, "readlinkat": 78, "newfstatat": 79,
    "fstat": 80, "exit": 93, "exit_group": 94, "waitid": 95, "set_tid_address": 96, "futex": 98,
    "set_robust_list": 99, "nanosleep": 101, "getitimer": 102, "setitimer": 103,
    "clock_gettime": 113, "clock_getres": 114, "clock_nanosleep": 115, "sched_getaffinity": 123,
    "sched_yield": 124, "restart_syscall": 128, "kill": 129, "tkill": 130, "tgkill": 131,
    "sigaltstack": 132, "rt_sigsuspend": 133, "rt_sigaction": 134, "rt_sigprocmask": 135,
    "rt_sigpending": 136, "rt_sigtimedwait": 137, "rt_sigreturn": 139, "getresuid": 148,
    "getresgid": 150, "times": 153, "getpgid": 155, "getsid": 156, "getgroups": 158, "uname": 160,
    "getrlimit": 163, "getrusage": 165, "prctl": 167, "getcpu": 168, "gettimeofday": 169,
    "getpid": 172, "getppid": 173, "getuid": 174, "geteuid": 175, "getgid": 176, "getegid": 177,
    "gettid": 178, "sysinfo": 179, "socketpair": 199, "getsockname": 204, "getpeername": 205,
    "sendto": 206, "recvfrom": 207, "getsockopt": 209, "shutdown": 210, "brk": 214, "munmap": 215,
    "mremap": 216, "clone": 220, "mmap": 222, "mprotect": 226, "madvise": 233, "wait4": 260,
    "prlimit64": 261, "getrandom": 278, "membarrier": 283, "statx": 291, "rseq": 293,
    "clone3": 435, "close_range": 436, "faccessat2": 439, "epoll_pwait2": 441,
}
# fmt: on
TABLES = {"x86_64": X86_64, "aarch64": AARCH64}
NEWEST = 450
"""The last number that was judged (Linux 6.0): any later call does not exist as far as we tell."""

PID = "the caller's own process id"

# What an argument must be: (index, mask, values, wanted). With `wanted` the masked low 32 bits are
# one of `values`, otherwise none of them. Every argument named here is an int or unsigned int in
# the kernel, which ignores the upper half too, except NULL's, which is a pointer.
Condition = tuple[int, int, tuple[object, ...], bool]
_ALL = 0xFFFFFFFF
NULL = -1


def _in(arg: int, *values: object, mask: int = _ALL) -> Condition:
    return (arg, mask, values, True)


def _no_bits(arg: int, allowed: int) -> Condition:
    return (arg, _ALL & ~allowed, (0,), True)


def _null(arg: int) -> Condition:
    return (arg, NULL, (), True)


_CLOEXEC, _NONBLOCK = 0x80000, 0x800
_THREAD = 0x3D0F00  # VM FS FILES SIGHAND THREAD SYSVSEM SETTLS PARENT_SETTID CHILD_CLEARTID
_MUSL_DETACHED = 0x400000
_O_TRUNC, _O_ACCMODE = 0x200, 3
# Truncating through a descriptor opened for reading is checked by Landlock from ABI 3 on only.
_NO_READ_TRUNC: Condition = (1, _O_TRUNC | _O_ACCMODE, (_O_TRUNC,), False)
_NO_READ_TRUNC_AT: Condition = (2, _O_TRUNC | _O_ACCMODE, (_O_TRUNC,), False)
_MSG_OOB = 1

CONDITIONS: dict[str, tuple[Condition, ...]] = {
    "clone": (_in(0, _THREAD, mask=_ALL & ~_MUSL_DETACHED),),  # threads, never processes
    "kill": (_in(0, PID),),
    "tkill": (_in(0, PID),),
    "tgkill": (_in(0, PID),),
    "prlimit64": (_in(0, 0, PID),),
    "open": (_NO_READ_TRUNC,),
    "openat": (_NO_READ_TRUNC_AT,),
    # isatty, close-on-exec, non-blocking, bytes waiting, terminal size
    "ioctl": (_in(1, 0x5401, 0x5450, 0x5451, 0x5421, 0x541B, 0x5413),),
    # DUPFD, GETFD, SETFD, GETFL, SETFL, DUPFD_CLOEXEC; never O_ASYNC (signals)
    "fcntl": (_in(1, 0, 1, 2, 3, 4, 1030), _in(2, 0, mask=0x2000)),
    # Page advice for one's own memory; not the kinds that merge pages or evict files from memory.
    "madvise": (_in(2, 0, 1, 2, 3, 4, 8, 14, 15, 16, 17, 102, 103),),
    "mmap": (_no_bits(3, _ALL & ~0x40000),),  # no huge pages out of the machine's pool
    "pipe2": (_no_bits(1, _CLOEXEC | _NONBLOCK),),
    "close_range": (_no_bits(2, 4),),
    "prctl": (_in(0, 15, 16),),  # a thread's name
    # A pair of connected Unix stream sockets, as event loops use: no way out of the process.
    "socketpair": (_in(0, 1), _in(1, 1, mask=_ALL & ~(_CLOEXEC | _NONBLOCK)), _in(2, 0)),
    "sendto": (_in(3, 0, mask=_MSG_OOB), _null(4)),
    "recvfrom": (_in(3, 0, mask=_MSG_OOB),),
    "getsockopt": (_in(1, 1), _in(2, 3, 4, 38, 39)),  # type, error, protocol, domain
}
ERRNOS = {"clone3": errno.ENOSYS}  # its flags lie in memory, where a filter cannot look

_LD, _JA, _JEQ, _JGE, _AND, _RET = 0x20, 0x05, 0x15, 0x35, 0x54, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EPERM, _ENOSYS = _ERRNO | errno.EPERM, _ERRNO | errno.ENOSYS
_NR_AT, _ARCH_AT, _ARGS_AT = 0, 4, 16  # of struct seccomp_data
_X32 = 0x40000000

Instruction = tuple[int, int, int, object]  # code, jump if true, jump if false, operand


def _ret(action: int) -> Instruction:
    return (_RET, 0, 0, action)


def _condition(condition: Condition) -> list[Instruction]:
    """Falls through where it holds, returns EPERM where not."""
    arg, mask, values, wanted = condition
    low: Instruction = (_LD, 0, 0, _ARGS_AT + 8 * arg)
    if mask == NULL:
        high: Instruction = (_LD, 0, 0, _ARGS_AT + 8 * arg + 4)
        return [low, (_JEQ, 0, 2, 0), high, (_JEQ, 1, 0, 0), _ret(_EPERM)]
    code = [low] if mask == _ALL else [low, (_AND, 0, 0, mask)]
    if wanted:
        tests = [(_JEQ, len(values) - i, 0, value) for i, value in enumerate(values)]
    else:
        code.append((_JEQ, 0, 1, values[0]))
        tests = []
    return [*code, *tests, _ret(_EPERM)]


def _tree(ranges: list[tuple[int, object]]) -> list[Instruction]:
    """Binary search over (first number, what to do), so that few instructions run per call."""
    if len(ranges) == 1:
        what = ranges[0][1]
        return [_ret(what) if isinstance(what, int) else (_JA, 0, 0, what)]
    middle = len(ranges) // 2
    left, right = _tree(ranges[:middle]), _tree(ranges[middle:])
    pivot = ranges[middle][0]
    if len(left) <= 255:
        return [(_JGE, len(left), 0, pivot), *left, *right]
    return [(_JGE, 0, 1, pivot), (_JA, 0, 0, len(left)), *left, *right]


def assemble(machine: str) -> tuple[bytes, list[int]]:
    """The BPF program for a machine, and the offsets at which the process id is to be written
    (uint32, native byte order).

    Raises:
        KeyError: no table for this machine.
    """
    table, arch = TABLES[machine], AUDIT_ARCH[machine]
    actions: dict[int, object] = {number: _ALLOW for number in table.values()}
    blocks: dict[str, list[Instruction]] = {}
    for name, conditions in CONDITIONS.items():
        if name in table:
            actions[table[name]] = name
            blocks[name] = [i for c in conditions for i in _condition(c)] + [_ret(_ALLOW)]
    for name, number in ERRNOS.items():
        actions[table[name]] = _ERRNO | number
    ranges: list[tuple[int, object]] = []
    for number in range(NEWEST + 1):
        action = actions.get(number, _EPERM)
        if not ranges or ranges[-1][1] != action:
            ranges.append((number, action))
    ranges += [(NEWEST + 1, _ENOSYS), (_X32, _EPERM)]  # x32: the same kernel under other numbers
    code: list[Instruction] = [
        (_LD, 0, 0, _ARCH_AT),
        (_JEQ, 1, 0, arch),
        _ret(_EPERM),  # 32-bit calls, whose numbers mean something else
        (_LD, 0, 0, _NR_AT),
        *_tree(ranges),
    ]
    starts: dict[object, int] = {}
    for name, block in blocks.items():
        starts[name] = len(code)
        code += block
    return _pack(code, starts)


def _pack(code: list[Instruction], starts: dict[object, int]) -> tuple[bytes, list[int]]:
    program, pids = bytearray(), []
    for at, (op, if_true, if_false, operand) in enumerate(code):
        if op == _JA and operand in starts:
            operand = starts[operand] - at - 1
        if operand is PID:
            pids.append(len(program) + 4)
            operand = 0
        program += struct.pack("=HBBI", op, if_true, if_false, operand)
    return bytes(program), pids
