"""What untrusted code can and cannot do once it is confined, as root and as an ordinary user; and
the seccomp program for both machines, run by an interpreter of its instructions."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

if sys.platform != "linux":
    pytest.skip("Landlock and seccomp are Linux's", allow_module_level=True)

from mintrl_env.verifiers import sandbox_confine, sandbox_syscalls

ORDINARY = 12345
MACHINES = ("x86_64", "aarch64")

# Runs in a bare Python: forks, confines and executes each program of stdin, prints what they gave.
DRIVER = r"""
import importlib.util, json, os, sys, traceback
spec = importlib.util.spec_from_file_location("confine", sys.argv[1])
confine = importlib.util.module_from_spec(spec)
spec.loader.exec_module(confine)
given = json.load(sys.stdin)
if given["abi"]:
    confine.landlock_abi = lambda: given["abi"]
try:
    plan = confine.prepare()
except confine.ConfineError as error:
    print(json.dumps({"unavailable": str(error)}))
    sys.exit()

def run(source):
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            confine.confine(
                plan, cpu_s=20, mem_mb=256, output_bytes=1 << 20, keep_fds=(0, 1, 2, writing)
            )
            try:
                names = {"__name__": "__main__", "GRADER": given["grader"], "FILE": given["file"]}
                exec(compile(source, "program", "exec"), names)
                report = {"result": names.get("result")}
            except OSError as error:
                report = {"raised": type(error).__name__, "errno": error.errno}
            except BaseException as error:
                report = {"raised": type(error).__name__, "text": traceback.format_exc()[-600:]}
            os.write(writing, json.dumps(report).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as file:
        text = file.read()
    status = os.waitpid(pid, 0)[1]
    return json.loads(text) if text else {"died": status}

answers = {name: run(source) for name, source in given["programs"].items()}
print(json.dumps({"answers": answers, "uid": os.geteuid(), "readable": plan.readable}))
"""

HONEST: dict[str, tuple[str, Any]] = {
    "json": ("import json; result = json.loads(json.dumps({'a': [1, None]}))", {"a": [1, None]}),
    "re": ("import re; result = re.findall(r'\\d+', 'a1b22')", ["1", "22"]),
    "decimal": ("from decimal import Decimal as D; result = str(D('0.1') + D('0.2'))", "0.3"),
    "fractions": ("from fractions import Fraction as F; result = str(F(1, 3) + F(1, 6))", "1/2"),
    "random": ("import random; random.seed(1); result = random.randint(1, 6)", 2),
    "system random": ("import secrets; result = len(secrets.token_bytes(9))", 9),
    "time zones": (
        "import zoneinfo, datetime\n"
        "zone = zoneinfo.ZoneInfo('Europe/Berlin')\n"
        "result = datetime.datetime(2024, 7, 1, tzinfo=zone).isoformat()",
        "2024-07-01T00:00:00+02:00",
    ),
    "local time": ("import time; result = len(time.localtime())", 9),
    "heapq": ("import heapq; h = [3, 1, 2]; heapq.heapify(h); result = heapq.heappop(h)", 1),
    "io": ("import io; s = io.StringIO(); print('x', file=s); result = s.getvalue()", "x\n"),
    "devnull": ("result = open('/dev/null', 'w').write('abc')", 3),
    "urandom": ("result = len(open('/dev/urandom', 'rb').read(4))", 4),
    "a thread with a large stack": (
        "import sys, threading\n"
        "sys.setrecursionlimit(200000)\n"
        "threading.stack_size(1 << 27)\n"
        "found = []\n"
        "def depth(n): return n and 1 + depth(n - 1)\n"
        "thread = threading.Thread(target=lambda: found.append(depth(50000)))\n"
        "thread.start(); thread.join(); result = found[0]",
        50000,
    ),
    "many threads": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(32) as pool: result = sum(pool.map(abs, range(-500, 0)))",
        125250,
    ),
    "asyncio": (
        "import asyncio\n"
        "async def main():\n"
        "    await asyncio.sleep(0.001)\n"
        "    queue = asyncio.Queue()\n"
        "    await asyncio.gather(*(queue.put(i) for i in range(5)))\n"
        "    return [await asyncio.to_thread(abs, -3), queue.qsize()]\n"
        "result = asyncio.run(main())",
        [3, 5],
    ),
    "a pair of sockets": (
        "import socket\n"
        "a, b = socket.socketpair(); a.sendall(b'hello'); b.settimeout(5)\n"
        "result = b.recv(9).decode()",
        "hello",
    ),
    "a pipe": ("import os; r, w = os.pipe(); os.write(w, b'ab'); result = len(os.read(r, 9))", 2),
    "alarm": (
        "import signal, time\n"
        "def handler(*_): raise TimeoutError\n"
        "signal.signal(signal.SIGALRM, handler)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.01)\n"
        "try: time.sleep(20)\n"
        "except TimeoutError: result = 'woken'",
        "woken",
    ),
    "a signal to itself": (
        "import os, signal\n"
        "got = []\n"
        "signal.signal(signal.SIGUSR1, lambda *_: got.append(1))\n"
        "os.kill(os.getpid(), signal.SIGUSR1); signal.raise_signal(signal.SIGUSR1)\n"
        "result = len(got)",
        2,
    ),
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(100000)\n"
        "def f(n): return n and 1 + f(n - 1)\nresult = f(90000)",
        90000,
    ),
    "hashes": (
        "import hashlib; result = [hashlib.md5(b'').hexdigest()[:4],"
        "hashlib.new('sha3_256', b'').hexdigest()[:4]]",
        ["d41d", "a7ff"],
    ),
    "zlib": ("import zlib, bz2, lzma; result = len(zlib.decompress(zlib.compress(b'a' * 99)))", 99),
    "sqlite in memory": (
        "import sqlite3; result = sqlite3.connect(':memory:').execute('select 1 + 1').fetchone()",
        [2],
    ),
    "ctypes": ("import ctypes; result = ctypes.c_uint8(257).value", 1),
    "its own limits": (
        "import resource; result = resource.getrlimit(resource.RLIMIT_CORE)[1]",
        0,
    ),
    "the standard library, imported late": (
        "import importlib\n"
        "names = '''array ast asyncio base64 bisect calendar cmath collections.abc colorsys "
        "configparser contextvars copy csv ctypes dataclasses difflib dis doctest email.message "
        "enum fnmatch functools getopt glob graphlib gzip html.parser http.client inspect "
        "ipaddress itertools linecache locale logging.handlers math mimetypes multiprocessing "
        "numbers operator optparse pathlib pickle platform pprint profile queue quopri sched "
        "selectors shelve shlex shutil smtplib socketserver ssl statistics string struct "
        "subprocess symtable tarfile tempfile textwrap timeit token tokenize trace traceback "
        "types typing unicodedata unittest.mock urllib.request uuid wave weakref "
        "xml.etree.ElementTree xmlrpc.client zipfile zipimport'''.split()\n"
        "for name in names: importlib.import_module(name)\n"
        "result = len(names)",
        80,
    ),
    "memory within the limit": ("result = len(bytearray(150 << 20))", 150 << 20),
    "listing the standard library": (
        "import os; result = 'json' in os.listdir(os.path.dirname(os.__file__))",
        True,
    ),
}

EACCES, EPERM = errno.EACCES, errno.EPERM
HOSTILE: dict[str, tuple[str, int]] = {
    "read the passwords": ("result = open('/etc/passwd').read(1)", EACCES),
    "read its own environment": ("result = open('/proc/self/environ', 'rb').read(1)", EACCES),
    "read its own memory": ("result = open('/proc/self/mem', 'rb').read(1)", EACCES),
    "read the grader's environment": (
        "result = open(f'/proc/{GRADER}/environ', 'rb').read(1)",
        EACCES,
    ),
    "read the grader's memory": ("open(f'/proc/{GRADER}/mem', 'r+b')", EACCES),
    "read its parent's program": (
        "import os; result = os.readlink(f'/proc/{os.getppid()}/exe')",
        EACCES,
    ),
    "read a file": ("result = open(FILE).read()", EACCES),
    "list the root": ("import os; result = os.listdir('/')", EACCES),
    "list the temporary files": ("import os; result = os.listdir('/tmp')", EACCES),
    "list the installed packages' files": (
        "import os\n"
        "path = os.path.dirname(os.__file__) + '/site-packages/pip/__init__.py'\n"
        "if os.path.exists(path): open(path)\n"
        "else: raise PermissionError(13, 'not there')",
        EACCES,
    ),
    "write a file": ("open(FILE + '.new', 'w')", EACCES),
    "overwrite a file": ("open(FILE, 'r+')", EACCES),
    "overwrite the standard library": ("import os; open(os.__file__, 'r+')", EACCES),
    "truncate the standard library": (
        "import os; os.open(os.__file__, os.O_RDONLY | os.O_TRUNC)",
        EPERM,
    ),
    "add to the standard library": (
        "import os; open(os.path.dirname(os.__file__) + '/added.py', 'x')",
        EACCES,
    ),
    "a nameless file": (
        "import os; os.open('/tmp', os.O_TMPFILE | os.O_RDWR)",
        EACCES,
    ),
    "the terminal": ("open('/dev/tty')", EACCES),
    "a device": ("open('/dev/kmsg')", EACCES),
    "mkdir": ("import os; os.mkdir(FILE + '.d')", EPERM),
    "symlink": ("import os; os.symlink('/', FILE + '.l')", EPERM),
    "hard link": ("import os; os.link(FILE, FILE + '.h')", EPERM),
    "rename": ("import os; os.rename(FILE, FILE + '.r')", EPERM),
    "unlink": ("import os; os.unlink(FILE)", EPERM),
    "truncate": ("import os; os.truncate(FILE, 0)", EPERM),
    "chmod": ("import os; os.chmod(FILE, 0o777)", EPERM),
    "chmod of an open file": ("import os; os.fchmod(os.open(os.__file__, 0), 0o777)", EPERM),
    "chown": ("import os; os.chown(FILE, 1, 1)", EPERM),
    "utime": ("import os; os.utime(FILE, (1, 1))", EPERM),
    "setxattr": ("import os; os.setxattr(FILE, 'user.x', b'1')", EPERM),
    "mkfifo": ("import os; os.mkfifo(FILE + '.f')", EPERM),
    "lock the standard library": (
        "import fcntl, os; fcntl.flock(os.open(os.__file__, 0), fcntl.LOCK_EX)",
        EPERM,
    ),
    "lock a range of it": (
        "import fcntl, os; fcntl.lockf(os.open(os.__file__, 0), fcntl.LOCK_SH)",
        EPERM,
    ),
    "chroot": ("import os; os.chroot('/usr')", EPERM),
    "chdir": ("import os; os.chdir('/usr')", EPERM),
    "TCP": ("import socket; socket.create_connection(('127.0.0.1', 1))", EPERM),
    "UDP": ("import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM)", EPERM),
    "IPv6": ("import socket; socket.socket(socket.AF_INET6)", EPERM),
    "a Unix socket": ("import socket; socket.socket(socket.AF_UNIX)", EPERM),
    "netlink": ("import socket; socket.socket(16, socket.SOCK_RAW)", EPERM),
    "vsock": ("import socket; socket.socket(40)", EPERM),
    "a datagram pair": (
        "import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
        EPERM,
    ),
    "a packet pair": (
        "import socket; socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)",
        EPERM,
    ),
    "out of band": ("import socket; socket.socketpair()[0].send(b'x', socket.MSG_OOB)", EPERM),
    "send to an address": (
        "import socket; socket.socketpair()[0].sendto(b'x', '/run/x')",
        EPERM,
    ),
    "send a descriptor": (
        "import socket; socket.send_fds(socket.socketpair()[0], [b'x'], [0])",
        EPERM,
    ),
    "receive a message": ("import socket; socket.socketpair()[0].recvmsg(1, 99)", EPERM),
    "connect a pair": ("import socket; socket.socketpair()[0].connect('/run/x')", EPERM),
    "bind a pair": ("import socket; socket.socketpair()[0].bind('\\0x')", EPERM),
    "a socket's option": (
        "import socket; socket.socketpair()[0].setsockopt(1, 26, b'0' * 16)",
        EPERM,
    ),
    "the peer's process": ("import socket; socket.socketpair()[0].getsockopt(1, 77, 4)", EPERM),
    "signal the parent": ("import os; os.kill(os.getppid(), 0)", EPERM),
    "signal its group": ("import os; os.kill(0, 0)", EPERM),
    "signal everybody": ("import os; os.kill(-1, 0)", EPERM),
    "signal the grader": ("import os; os.kill(GRADER, 0)", EPERM),
    "signals by O_ASYNC": (
        "import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.F_SETFL, os.O_ASYNC)",
        EPERM,
    ),
    "an owner for signals": (
        "import fcntl, os; fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, os.getppid())",
        EPERM,
    ),
    "notify of a directory": (
        "import fcntl, os; fcntl.fcntl(os.open(os.path.dirname(os.__file__), 0), 1026, 1)",
        EPERM,
    ),
    "a larger pipe": ("import fcntl, os; fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)", EPERM),
    "fork": ("import os; os.fork() or os._exit(0)", EPERM),
    "vfork": ("import subprocess; subprocess.run(['/bin/true'])", EPERM),
    "posix_spawn": ("import os; os.posix_spawn('/bin/true', ['true'], {})", EPERM),
    "a shell": ("import os; result = os.popen('true').read()", EPERM),
    "exec": ("import os; os.execv('/bin/true', ['true'])", EPERM),
    "exec of a descriptor": (
        "import os; os.execve(os.open(os.__file__, os.O_PATH), ['x'], {})",
        EPERM,
    ),
    "a process pool": (
        "import multiprocessing as m; m.get_context('fork').Process(target=print).start()",
        EPERM,
    ),
    "another's limits": ("import os, resource; resource.prlimit(os.getppid(), 7)", EPERM),
    "another's limits, set": (
        "import os, resource; resource.prlimit(os.getppid(), 7, (1, 1))",
        EPERM,
    ),
    "a new session": ("import os; os.setsid()", EPERM),
    "another group": ("import os; os.setpgid(0, 0)", EPERM),
    "another user": ("import os; os.setuid(0)", EPERM),
    "another real user": ("import os; os.setresuid(0, 0, 0)", EPERM),
    "priority": ("import os; os.setpriority(0, 0, 5)", EPERM),
    "affinity": ("import os; os.sched_setaffinity(0, {0})", EPERM),
    "real time": ("import os; os.sched_setscheduler(0, 1, os.sched_param(1))", EPERM),
    "a file in memory": ("import os; os.memfd_create('x')", EPERM),
    "hold a process": ("import os; os.pidfd_open(os.getppid())", EPERM),
    "eventfd": ("import os; os.eventfd(0)", EPERM),
    "splice": ("import os; r, w = os.pipe(); os.splice(r, w, 1)", EPERM),
    "sendfile": ("import os; os.sendfile(1, 0, 0, 1)", EPERM),
    "forget a file's pages": (
        "import os; os.posix_fadvise(os.open(os.__file__, 0), 0, 0, os.POSIX_FADV_DONTNEED)",
        EPERM,
    ),
    "hostname": ("import socket; socket.sethostname('x')", EPERM),
    "a new descriptor limit": (
        "import os\nfor _ in range(100): os.dup(0)",
        errno.EMFILE,
    ),
}

# By name, the numbers on x86-64 and arm64 (0: there is none), of calls no program may make.
REFUSED = {
    "ptrace": (101, 117),
    "fork": (57, 0),
    "vfork": (58, 0),
    "execve": (59, 221),
    "execveat": (322, 281),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "unshare": (272, 97),
    "setns": (308, 268),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "inotify_init1": (294, 26),
    "fanotify_init": (300, 262),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "personality": (135, 92),
    "socket": (41, 198),
    "connect": (42, 203),
    "accept4": (288, 242),
    "bind": (49, 200),
    "listen": (50, 201),
    "sendmsg": (46, 211),
    "recvmsg": (47, 212),
    "sendmmsg": (307, 269),
    "setsockopt": (54, 208),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "openat2": (437, 437),
    "truncate": (76, 45),
    "ftruncate": (77, 46),
    "fallocate": (285, 47),
    "unlinkat": (263, 35),
    "renameat2": (316, 276),
    "mkdirat": (258, 34),
    "fchmodat": (268, 53),
    "fchownat": (260, 54),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "flock": (73, 32),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "timer_create": (222, 107),
    "signalfd4": (289, 74),
    "splice": (275, 76),
    "vmsplice": (278, 75),
    "copy_file_range": (326, 285),
    "mincore": (27, 232),
    "mlock": (149, 228),
    "remap_file_pages": (216, 234),
    "pkey_alloc": (330, 289),
    "seccomp": (317, 277),
    "capset": (126, 91),
    "setuid": (105, 146),
    "setresuid": (117, 147),
    "setsid": (112, 157),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "reboot": (169, 142),
    "syslog": (103, 116),
    "quotactl": (179, 60),
    "rt_sigqueueinfo": (129, 138),
    "kcmp": (312, 272),
    "modify_ldt": (154, 0),
    "ioperm": (173, 0),
    "arch_prctl": (158, 0),
    "landlock_create_ruleset": (444, 444),
}


# ---- real programs in a real kernel ---------------------------------------------------------


def _python_for(user: int | None) -> str | None:
    """A Python 3.11 or later that this user can start with its standard library."""
    base = os.path.realpath(sys.executable)
    for python in (base, shutil.which("python3", path="/usr/bin:/usr/local/bin") or ""):
        check = "import sys, ctypes, resource; assert sys.version_info >= (3, 11)"
        try:
            subprocess.run([python, "-I", "-S", "-c", check], check=True, user=user, timeout=60)
        except (OSError, subprocess.SubprocessError):
            continue
        return python
    return None


@pytest.fixture(scope="module", params=["this user", "an ordinary user", "the first Landlock"])
def confined(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What every program gave, by name."""
    ordinary = request.param == "an ordinary user"
    if ordinary and os.geteuid() != 0:
        pytest.skip("this user is an ordinary one already")
    python = _python_for(ORDINARY if ordinary else None)
    if python is None:
        pytest.skip("no Python here can be started by an ordinary user (it lies in a private home)")
    folder = Path(
        subprocess.check_output(["mktemp", "-d", "/tmp/confine-XXXXXX"], text=True).strip()
    )
    try:
        folder.chmod(0o777)
        for name in ("sandbox_confine.py", "sandbox_syscalls.py"):
            shutil.copy(Path(sandbox_confine.__file__).with_name(name), folder)
            (folder / name).chmod(0o644)
        (folder / "file").write_text("secret")
        (folder / "file").chmod(0o666)
        programs = {f"honest {name}": source for name, (source, _) in HONEST.items()}
        programs |= {f"hostile {name}": source for name, (source, _) in HOSTILE.items()}
        programs |= PARTICULAR
        given = {"programs": programs, "grader": os.getpid(), "file": str(folder / "file")}
        # What later ones refuse besides (truncation, ioctl, TCP, signals), seccomp refuses too.
        given["abi"] = 1 if request.param == "the first Landlock" else 0
        done = subprocess.run(
            [python, "-I", "-S", "-B", "-c", DRIVER, str(folder / "sandbox_confine.py")],
            input=json.dumps(given),
            capture_output=True,
            text=True,
            timeout=240,
            user=ORDINARY if ordinary else None,
            group=ORDINARY if ordinary else None,
            extra_groups=[] if ordinary else None,
            cwd="/",
        )
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        if "unavailable" in report:
            pytest.skip(f"this kernel cannot confine: {report['unavailable']}")
        assert report["uid"] == (ORDINARY if ordinary else os.geteuid())
        assert {path.name for path in folder.iterdir()} == {
            "file",
            "sandbox_confine.py",
            "sandbox_syscalls.py",
        }
        assert (folder / "file").read_text() == "secret"
        assert (folder / "file").stat().st_mode & 0o777 == 0o666
        return report
    finally:
        shutil.rmtree(folder)


_RAW = {name: numbers[MACHINES.index(os.uname().machine)] for name, numbers in REFUSED.items()}
PARTICULAR = {
    "raw": f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
result = {{}}
for name, number in {_RAW!r}.items():
    if number:
        ctypes.set_errno(0)
        code = libc.syscall(number, *(ctypes.c_long(-1),) * 6)
        result[name] = [code, ctypes.get_errno()]
""",
    "clone3": """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
result = [libc.syscall(435, ctypes.c_long(0), ctypes.c_long(88)), ctypes.get_errno()]
""",
    "32-bit call": """
import ctypes, mmap
# mov eax, 20 (getpid of i386); int 0x80; ret
memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
memory.write(bytes.fromhex("b814000000cd80c3"))
address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
result = ctypes.CFUNCTYPE(ctypes.c_int)(address)()
""",
    "x32 call": """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
result = [libc.syscall(0x40000000 + 39), ctypes.get_errno()]
""",
    "thread bomb": """
import threading
threading.stack_size(32768)
gate, result = threading.Event(), 0
try:
    while result < 20000:
        threading.Thread(target=gate.wait, daemon=True).start()
        result += 1
except (RuntimeError, MemoryError):
    pass
gate.set()
""",
    "memory": """
try:
    result = len(bytearray(400 << 20))
except MemoryError:
    result = "refused"
""",
    "descriptors": """
import os
result = []
for fd in range(3, 300):
    try: os.fstat(fd); result.append(fd)
    except OSError: pass
""",
    "capabilities": """
import ctypes
header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
result = "not even readable" if ctypes.CDLL(None).capget(header, data) else list(data)
""",
    "flags": """
import ctypes
prctl = ctypes.CDLL(None).prctl
result = [prctl(4, 1, 0, 0, 0), prctl(38, 0, 0, 0, 0), prctl(22, 0, 0, 0, 0)]
""",
    "raised limits": """
import resource
result = []
for which in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE):
    hard = resource.getrlimit(which)[1]
    try:
        resource.setrlimit(which, (hard + 1, hard + 1))
        result.append(which)
    except (ValueError, OSError):
        pass
""",
    "tempfile": """
import tempfile
try:
    tempfile.TemporaryFile()
except OSError as error:
    result = type(error).__name__
""",
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_works(confined: Any, name: str) -> None:
    assert confined["answers"][f"honest {name}"] == {"result": HONEST[name][1]}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_is_refused(confined: Any, name: str) -> None:
    answer = confined["answers"][f"hostile {name}"]
    assert answer.get("errno") == HOSTILE[name][1], answer


def test_raw_system_calls_are_refused(confined: Any) -> None:
    answers = confined["answers"]["raw"]["result"]
    assert len(answers) > 75
    assert {name: got for name, got in answers.items() if got != [-1, errno.EPERM]} == {}


def test_what_a_c_library_tries_first_does_not_exist(confined: Any) -> None:
    assert confined["answers"]["clone3"] == {"result": [-1, errno.ENOSYS]}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="other numbers exist on x86-64 only")
def test_no_way_in_by_other_numbers(confined: Any) -> None:
    assert confined["answers"]["x32 call"] == {"result": [-1, errno.EPERM]}
    got = confined["answers"]["32-bit call"]
    # A kernel without 32-bit calls ends the program instead.
    assert got == {"result": -errno.EPERM} or "died" in got


def test_limits_hold(confined: Any) -> None:
    answers = confined["answers"]
    assert answers["memory"] == {"result": "refused"}
    assert answers["raised limits"] == {"result": []}
    assert 32 <= answers["thread bomb"]["result"] < 20000


def test_threads_are_counted_for_root_too(confined: Any) -> None:
    if confined["uid"] != 0:
        pytest.skip("an ordinary user's threads are counted by the kernel, wherever they run")
    assert confined["answers"]["thread bomb"]["result"] < 256


def test_nothing_is_inherited(confined: Any) -> None:
    assert len(confined["answers"]["descriptors"]["result"]) == 1  # the driver's own pipe
    assert confined["answers"]["capabilities"] == {"result": "not even readable"}
    assert confined["answers"]["flags"] == {"result": [-1, -1, -1]}


def test_temporary_files_are_refused_cleanly(confined: Any) -> None:
    assert confined["answers"]["tempfile"] == {"result": "FileNotFoundError"}


def test_what_may_be_read(confined: Any) -> None:
    readable = confined["readable"]
    assert any(path.endswith("/json") for path in readable)
    assert not [path for path in readable if "site-packages" in path or "dist-packages" in path]
    home = os.path.expanduser("~")
    for private in ("/", "/etc", "/proc", "/tmp", "/usr", "/var", "/home", home, os.getcwd()):
        assert private not in readable


# ---- the program of the filter, for both machines -------------------------------------------


def interpret(program: bytes, arch: int, number: int, args: tuple[int, ...]) -> int:
    """Run classic BPF over one `struct seccomp_data`, as the kernel does."""
    data = struct.pack("<iIQ6Q", number, arch, 0, *(a & (2**64 - 1) for a in (*args, *[0] * 6)[:6]))
    code = list(struct.iter_unpack("<HBBI", program))
    at = accumulator = 0
    for _ in range(len(code)):
        op, if_true, if_false, k = code[at]
        at += 1
        match op:
            case 0x20:
                assert k % 4 == 0 and k + 4 <= len(data)
                (accumulator,) = struct.unpack_from("<I", data, k)
            case 0x54:
                accumulator &= k
            case 0x05:
                at += k
            case 0x15:
                at += if_true if accumulator == k else if_false
            case 0x35:
                at += if_true if accumulator >= k else if_false
            case 0x06:
                return int(k)
            case _:
                raise AssertionError(f"no instruction {op:#x}")
    raise AssertionError("the program does not end")


ALLOW = 0x7FFF0000
OWN, OTHER, HIGH = 4242, 4243, 1 << 40


@cache
def patched_program(machine: str) -> bytes:
    program, pids_at = sandbox_syscalls.assemble(machine)
    patched = bytearray(program)
    for at in pids_at:
        struct.pack_into("<I", patched, at, OWN)
    return bytes(patched)


def verdict(machine: str, number: int, *args: int, arch: int | None = None) -> str:
    which = sandbox_syscalls.AUDIT_ARCH[machine] if arch is None else arch
    action = interpret(patched_program(machine), which, number, args)
    if action == ALLOW:
        return "allow"
    assert action & 0xFFFF0000 == 0x00050000
    return errno.errorcode[action & 0xFFFF]


THREAD = 0x3D0F00
ARGUMENTS = [
    ("clone", (THREAD,), "allow"),
    ("clone", (THREAD | 0x400000,), "allow"),
    ("clone", (THREAD | 0x10000000,), "EPERM"),  # a user namespace besides
    ("clone", (17,), "EPERM"),
    ("clone", (0x4111,), "EPERM"),  # vfork's
    ("clone", (0,), "EPERM"),
    ("clone3", (0, 0), "ENOSYS"),
    ("kill", (OWN, 9), "allow"),
    ("kill", (OTHER, 9), "EPERM"),
    ("kill", (0, 9), "EPERM"),
    ("kill", (-1, 9), "EPERM"),
    ("kill", (-OWN, 9), "EPERM"),
    ("tgkill", (OWN, OTHER, 9), "allow"),  # the kernel checks that the thread is the process's
    ("tgkill", (OTHER, OWN, 9), "EPERM"),
    ("tkill", (OTHER, 9), "EPERM"),
    ("prlimit64", (0, 7, 0, 0), "allow"),
    ("prlimit64", (OWN, 7, 0, 0), "allow"),
    ("prlimit64", (OTHER, 7, 0, 0), "EPERM"),
    ("socketpair", (1, 1, 0), "allow"),
    ("socketpair", (1, 1 | 0x80000 | 0x800, 0), "allow"),
    ("socketpair", (1, 2, 0), "EPERM"),
    ("socketpair", (1, 5, 0), "EPERM"),
    ("socketpair", (2, 1, 0), "EPERM"),
    ("socketpair", (16, 1, 0), "EPERM"),
    ("sendto", (3, 1, 1, 0, 0, 0), "allow"),
    ("sendto", (3, 1, 1, 0x4000, 0, 0), "allow"),
    ("sendto", (3, 1, 1, 1, 0, 0), "EPERM"),
    ("sendto", (3, 1, 1, 0, 5, 0), "EPERM"),
    ("sendto", (3, 1, 1, 0, HIGH, 0), "EPERM"),
    ("recvfrom", (3, 1, 1, 0, 0, 0), "allow"),
    ("recvfrom", (3, 1, 1, 1, 0, 0), "EPERM"),
    ("getsockopt", (3, 1, 3), "allow"),
    ("getsockopt", (3, 1, 77), "EPERM"),
    ("getsockopt", (3, 6, 3), "EPERM"),
    ("ioctl", (0, 0x5401), "allow"),
    ("ioctl", (0, 0x5421), "allow"),
    ("ioctl", (0, 0x5412), "EPERM"),  # TIOCSTI: type into the terminal
    ("ioctl", (0, 0x541C), "EPERM"),  # TIOCLINUX
    ("ioctl", (0, 0x5401 | HIGH), "allow"),  # the kernel ignores the upper half, so do we
    ("fcntl", (0, 3), "allow"),
    ("fcntl", (0, 4, 0x800), "allow"),
    ("fcntl", (0, 4, 0x2000), "EPERM"),
    ("fcntl", (0, 8), "EPERM"),
    ("fcntl", (0, 10), "EPERM"),
    ("fcntl", (0, 6), "EPERM"),
    ("fcntl", (0, 1026), "EPERM"),
    ("fcntl", (0, 1024), "EPERM"),
    ("fcntl", (0, 1033), "EPERM"),
    ("fcntl", (0, 1030, 9), "allow"),
    ("openat", (-100, 1, 0), "allow"),
    ("openat", (-100, 1, 0x241), "allow"),  # /dev/null for writing; Landlock refuses the rest
    ("openat", (-100, 1, 0x200), "EPERM"),
    ("openat", (-100, 1, 0x80200), "EPERM"),
    ("mmap", (0, 4096, 7, 0x22), "allow"),
    ("mmap", (0, 4096, 7, 0x40022), "EPERM"),
    ("madvise", (0, 4096, 4), "allow"),
    ("madvise", (0, 4096, 14), "allow"),
    ("madvise", (0, 4096, 12), "EPERM"),
    ("madvise", (0, 4096, 21), "EPERM"),
    ("madvise", (0, 4096, 100), "EPERM"),
    ("pipe2", (0, 0x80800), "allow"),
    ("pipe2", (0, 0x80), "EPERM"),
    ("close_range", (3, 9, 0), "allow"),
    ("close_range", (3, 9, 2), "EPERM"),
    ("prctl", (15,), "allow"),
    ("prctl", (1,), "EPERM"),
    ("prctl", (4,), "EPERM"),
    ("prctl", (22,), "EPERM"),
    ("prctl", (0x59616D61,), "EPERM"),
]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name, args, expected", ARGUMENTS)
def test_the_filter_looks_at_arguments(
    machine: str, name: str, args: tuple[int, ...], expected: str
) -> None:
    assert verdict(machine, sandbox_syscalls.TABLES[machine][name], *args) == expected


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_allows_what_is_named_and_nothing_else(machine: str) -> None:
    table = sandbox_syscalls.TABLES[machine]
    special = set(sandbox_syscalls.CONDITIONS) | set(sandbox_syscalls.ERRNOS)
    free = {number for name, number in table.items() if name not in special}
    assert len(free) > 70
    checked = {table[name] for name in special if name in table}
    for number in range(sandbox_syscalls.NEWEST + 1):
        if number not in checked:
            assert verdict(machine, number) == ("allow" if number in free else "EPERM"), number
    for number in (sandbox_syscalls.NEWEST + 1, 462, 1000, 0x3FFFFFFF):
        assert verdict(machine, number) == "ENOSYS"
    for number in (0x40000000, 0x40000000 + 39, 0x7FFFFFFF, -1):
        assert verdict(machine, number) == "EPERM"


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", REFUSED)
def test_the_filter_refuses_by_name(machine: str, name: str) -> None:
    assert name not in sandbox_syscalls.TABLES[machine]
    number = REFUSED[name][MACHINES.index(machine)]
    if number:
        assert verdict(machine, number) == "EPERM"


@pytest.mark.parametrize("machine", MACHINES)
def test_the_filter_knows_its_machine(machine: str) -> None:
    read = sandbox_syscalls.TABLES[machine]["read"]
    assert verdict(machine, read) == "allow"
    for other in (0x40000003, 0x40000028, 0xC00000B7, 0xC000003E, 0):  # i386, arm, arm64, x86-64
        if other != sandbox_syscalls.AUDIT_ARCH[machine]:
            assert verdict(machine, read, arch=other) == "EPERM"


def test_no_program_is_too_long_for_the_kernel() -> None:
    for machine in MACHINES:
        assert len(sandbox_syscalls.assemble(machine)[0]) // 8 <= 4096


def _numbers(header: Path) -> dict[str, int]:
    """System calls of a C header, by name."""
    lines = re.findall(r"^#define\s+(__NR\w*)\s+(\w+)", header.read_text(), re.M)
    defined = dict(lines)
    found = {name: defined.get(value, value) for name, value in defined.items()}
    return {
        name.removeprefix("__NR_"): int(value)
        for name, value in found.items()
        if name.startswith("__NR_") and value.isdigit()
    }


@pytest.mark.parametrize(
    "machine, headers",
    [
        (
            "x86_64",
            ["/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"],
        ),
        ("aarch64", ["/usr/include/asm-generic/unistd.h"]),
    ],
)
def test_the_tables_are_the_kernels(machine: str, headers: list[str]) -> None:
    present = [Path(path) for path in headers if Path(path).exists()]
    if not present:
        pytest.skip("the kernel's headers are not installed")
    kernel = _numbers(present[0])
    kernel["newfstatat"] = kernel.get("newfstatat", kernel.get("fstatat", -1))  # one call
    table = sandbox_syscalls.TABLES[machine]
    assert {name: kernel.get(name) for name in table} == table
    column = MACHINES.index(machine)
    refused = {name: both[column] for name, both in REFUSED.items() if both[column]}
    known = {name: number for name, number in refused.items() if name in kernel}
    assert len(known) > 70
    assert {name: kernel[name] for name in known} == known


def test_the_tables_agree() -> None:
    x86, arm = sandbox_syscalls.X86_64, sandbox_syscalls.AARCH64
    assert len(set(x86.values())) == len(x86)
    assert len(set(arm.values())) == len(arm)
    assert set(arm) <= set(x86)
    # What arm64 has under another name only: calls without a directory, a mask or flags.
    assert set(x86) - set(arm) == set(
        "open stat lstat access readlink pipe poll select dup2 pause alarm time getpgrp "
        "epoll_create epoll_wait".split()
    )
    assert {n: v for n, v in x86.items() if v > 423} == {n: v for n, v in arm.items() if v > 423}


# ---- what can be read -----------------------------------------------------------------------


def test_packages_come_with_what_they_need() -> None:
    import numpy

    paths = sandbox_confine.readable_paths(("numpy",))
    assert os.path.dirname(os.path.realpath(numpy.__file__)) in paths
    site = os.path.dirname(os.path.dirname(os.path.realpath(numpy.__file__)))
    assert site not in paths
    assert sandbox_confine.readable_paths(("no_such_package",)) == sandbox_confine.readable_paths()
    for path in paths:
        assert not any(path != other and path.startswith(other + "/") for other in paths)


@pytest.mark.parametrize("abi", range(1, 8))
def test_a_ruleset_for_every_landlock(abi: int) -> None:
    try:
        ours = sandbox_confine.landlock_abi()
    except sandbox_confine.ConfineError as error:
        pytest.skip(str(error))
    if abi > ours:
        pytest.skip(f"this kernel has ABI {ours}")
    ruleset = sandbox_confine._ruleset(abi, ("/usr/lib", os.__file__, "/does/not/exist"))
    assert os.readlink(f"/proc/self/fd/{ruleset}") == "anon_inode:[landlock-ruleset]"
    os.close(ruleset)


def test_an_error_names_the_step() -> None:
    error = sandbox_confine.ConfineError(errno.EPERM, "landlock_restrict_self")
    assert str(error) == "[Errno 1] landlock_restrict_self: Operation not permitted"
    assert error.step == "landlock_restrict_self"
