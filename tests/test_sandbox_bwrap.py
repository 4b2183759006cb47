"""Code in bubblewrap: the same answers as the local sandbox, and nothing gets out."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mintrl_env.verifiers import sandbox_canaries
from mintrl_env.verifiers.sandbox import Call, Limits, Ran, SandboxUnavailable
from mintrl_env.verifiers.sandbox_bwrap import BwrapLauncher, BwrapSandbox, find_bwrap
from mintrl_env.verifiers.sandbox_choice import probes
from mintrl_env.verifiers.sandbox_session import run_program

LIMITS = Limits(wall_s=20.0)


def _why_not() -> str:
    try:
        find_bwrap()
    except SandboxUnavailable as error:
        return str(error)
    return next((str(p) for p in probes() if p.name == "bubblewrap" and not p.ok), "")


works = pytest.mark.skipif(bool(_why_not()), reason=f"no bubblewrap: {_why_not()}")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[BwrapSandbox]:
    made = BwrapSandbox()
    yield made
    made.close()


@works
def test_nothing_gets_out(sandbox: BwrapSandbox) -> None:
    assert sandbox_canaries.escapes(sandbox) == []


class MountsAlone:
    """Bubblewrap as on a kernel without Landlock."""

    name = "mounts alone"

    def __init__(self) -> None:
        self.launcher = BwrapLauncher(landlock=False)

    def run(self, code: str, stdin: str, limits: Limits):  # type: ignore[no-untyped-def]
        return run_program(self.launcher, code, stdin, limits)


@works
def test_nothing_gets_out_without_landlock() -> None:
    sandbox = MountsAlone()
    assert sandbox_canaries.escapes(sandbox) == []  # type: ignore[arg-type]
    code = (
        "import os, sys\n"
        "stdlib = os.path.dirname(os.__file__)\n"
        "print(os.path.exists('/proc'), os.path.exists('/var'), os.getuid())\n"
        "for name in ('site-packages', 'test'):\n"
        "    path = os.path.join(stdlib, name)\n"
        "    print(os.listdir(path) if os.path.exists(path) else [])\n"
        "import json, sqlite3, hashlib, zoneinfo; print('imported')\n"
        "for path in (stdlib + '/new', stdlib + '/site-packages/new', '/new', '/dev/new'):\n"
        "    try: open(path, 'w'); print('written', path)\n"
        "    except OSError: pass\n"
    )
    result = sandbox.run(code, "", LIMITS)
    assert (result.ran, result.value) == (Ran.OK, "False False 65534\n[]\n[]\nimported\n")
    sandbox.launcher.close()


@works
@pytest.mark.parametrize(
    "code, ran, detail",
    [
        ("print(input()[::-1])", Ran.OK, ""),
        ("1 / 0", Ran.ERROR, "ZeroDivisionError"),
        ("import sys; sys.exit(3)", Ran.ERROR, "SystemExit"),
        ("import socket; socket.socket()", Ran.BLOCKED, "PermissionError"),
        ("print('a' * (2 << 20))", Ran.ERROR, "printed more than 1048576 bytes"),
        ("x = bytearray(600 << 20)", Ran.MEMORY, "MemoryError"),
        ("import ctypes; ctypes.string_at(0)", Ran.ERROR, "ended by signal 11 (SIGSEGV)"),
    ],
)
def test_how_a_program_ends(sandbox: BwrapSandbox, code: str, ran: Ran, detail: str) -> None:
    result = sandbox.run(code, "abc", LIMITS)
    assert result.ran is ran
    assert result.detail.startswith(detail)
    assert result.value == ("cba\n" if ran is Ran.OK else None)


@works
def test_an_endless_program_is_ended(sandbox: BwrapSandbox) -> None:
    result = sandbox.run("while True: pass", "", Limits(wall_s=1.5))
    assert result.ran is Ran.TIMEOUT


@works
def test_calls_and_asserts(sandbox: BwrapSandbox) -> None:
    code = "def f(x):\n    if x < 0: raise SystemExit\n    return [x, x + 1]"
    results = list(sandbox.calls(code, [Call("f", (n,)) for n in (1, -1, 5)], LIMITS))
    assert [result.ran for result in results] == [Ran.OK, Ran.ERROR, Ran.OK]
    assert results[2].value == [5, 6]
    held = list(sandbox.asserts(code, ["assert f(1) == [1, 2]", "assert f(1) == [2]"], LIMITS))
    assert [result.ran for result in held] == [Ran.OK, Ran.FAILED]


@works
def test_packages(sandbox: BwrapSandbox) -> None:
    with_numpy = BwrapSandbox(packages=("numpy",))
    result = with_numpy.run("import numpy; print(numpy.arange(4).sum())", "", LIMITS)
    assert (result.ran, result.value) == (Ran.OK, "6\n")
    with_numpy.close()
    assert sandbox.run("import numpy", "", LIMITS).ran is Ran.ERROR


@works
def test_a_process_outlives_the_thread_that_asked_for_it(sandbox: BwrapSandbox) -> None:
    calls = sandbox.calls("def f(x): return x", [Call("f", (n,)) for n in (1, 2)], LIMITS)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(next(calls).value))
    thread.start()
    thread.join()
    time.sleep(0.2)
    found.append(next(calls).value)
    calls.close()  # type: ignore[attr-defined]
    assert found == [1, 2]


@works
def test_nothing_is_left(sandbox: BwrapSandbox) -> None:
    sandbox.run("print(1)", "", LIMITS)
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(sandbox.run, f"print({n})", "", LIMITS) for n in range(8)]
        assert [job.result().value for job in jobs] == [f"{n}\n" for n in range(8)]
    sandbox.run("import time; time.sleep(60)", "", Limits(wall_s=0.5))
    assert len(os.listdir("/proc/self/fd")) <= before
    assert _children_named("bwrap") == []


def _children_named(name: str) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rsplit(")", 1)
            except OSError:
                continue
            if fields[0].endswith(f"({name}") and int(fields[1].split()[1]) == os.getpid():
                found.append(int(entry))
    return found


@works
def test_a_closed_sandbox_starts_nothing() -> None:
    made = BwrapSandbox()
    made.close()
    made.close()
    with pytest.raises(SandboxUnavailable, match="closed"):
        made.run("print(1)", "", LIMITS)


def test_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxUnavailable, match="apt-get install bubblewrap"):
        BwrapSandbox().run("print(1)", "", LIMITS)


def test_what_bubblewrap_says_is_passed_on(tmp_path: Path) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1")
    broken.chmod(0o755)
    sandbox = BwrapSandbox(bwrap=str(broken))
    with pytest.raises(SandboxUnavailable, match="bubblewrap failed: bwrap: No permissions"):
        sandbox.run("print(1)", "", LIMITS)
