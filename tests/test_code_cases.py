"""Honest and hostile programs, with what each of them must leave untouched.

Run as a program, it prints what went wrong as JSON: so the cases are also run by another user.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mintrl_env.types import Task
from mintrl_env.verifiers.code_tests import CodeVerifier

CASES = Path(__file__).resolve().parents[2] / "shared" / "cases" / "code_sandbox.jsonl"
SECRET = f"secret-{secrets.token_hex(8)}"
ORDINARY_USER = 12345


def load() -> list[dict[str, Any]]:
    if not CASES.exists():
        return []
    return [json.loads(line) for line in CASES.read_text().splitlines() if line.strip()]


HONEST = Task(
    "honest",
    "",
    verifier="code",
    tests={"type": "call", "fn_name": "add", "inputs": [[2, 3]], "outputs": [5]},
)
HONEST_RESPONSE = "```python\ndef add(a, b):\n    return a + b\n```"


class Listener:
    """A TCP port of the loopback that counts who connects."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.accepted = 0
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                self.accepted += 1
                connection.close()

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def world() -> Iterator[dict[str, Any]]:
    """What a case may not touch: a folder open to all, a port, a process, a secret."""
    os.environ["RLVR_SECRET"] = SECRET
    listener = Listener()
    victim = subprocess.Popen(["sleep", "600"])
    with tempfile.TemporaryDirectory(prefix="open-") as folder:
        os.chmod(folder, stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO)
        try:
            yield {"listener": listener, "victim": victim, "marker": Path(folder) / "marker"}
        finally:
            victim.kill()
            victim.wait()
            listener.close()


def filled(value: Any, here: dict[str, Any]) -> Any:
    """A response or tests with their placeholders filled in."""
    text = json.dumps(value)
    for name, filling in (
        ("MARKER", str(here["marker"])),
        ("LOOPBACK_PORT", str(here["listener"].port)),
        ("VICTIM_PID", str(here["victim"].pid)),
        ("SECRET_ENV", SECRET),
    ):
        text = text.replace("{{" + name + "}}", filling)
    return json.loads(text)


def leftovers(before: set[int]) -> list[int]:
    """Processes begun since that run untrusted code: they look like a sandbox's process of ours,
    whoever their parent is by now, and are not among those that we started ourselves."""
    me = psutil.Process()
    ours = {tuple(child.cmdline()) for child in me.children() if child.is_running()}
    found = []
    for process in psutil.process_iter(["pid", "ppid", "cmdline", "status"]):
        info = process.info
        if info["pid"] in before or info["ppid"] == me.pid or info["status"] == "zombie":
            continue
        if info["cmdline"] and tuple(info["cmdline"]) in ours:
            found.append(info["pid"])
    return found


def problems(case: dict[str, Any], verifier: CodeVerifier, here: dict[str, Any]) -> list[str]:
    """What is wrong with the verdict on a case, and with what it left behind."""
    wrong = []
    expected, watch = case["expected"], case.get("watch", {})
    task = Task(
        case["id"],
        "",
        verifier="code",
        tests=filled(case["tests"], here),
        metadata={"limits": case.get("limits")},
    )
    before, connections = set(psutil.pids()), here["listener"].accepted
    memory = psutil.Process().memory_info().rss
    started = time.monotonic()
    report = verifier.grade(task, filled(case["response"], here))
    seconds = time.monotonic() - started
    growth = (psutil.Process().memory_info().rss - memory) / 2**20
    if report.reward != expected["reward"]:
        wrong.append(f"reward {report.reward}, not {expected['reward']} ({report.detail})")
    if report.status not in (expected["status"], *expected["also_ok"]):
        wrong.append(f"status {report.status}, not {expected['status']} ({report.detail})")
    if seconds > watch.get("max_wall_s", 60):
        wrong.append(f"took {seconds:.1f} s")
    if growth > watch.get("max_grader_rss_growth_mb", 256):
        wrong.append(f"the grader grew by {growth:.0f} MiB")
    if here["marker"].exists():
        wrong.append("the marker was written")
        here["marker"].unlink()
    if here["listener"].accepted != connections:
        wrong.append("the listener was reached")
    if here["victim"].poll() is not None:
        wrong.append("the victim died")
    deadline = time.monotonic() + 5
    while (left := leftovers(before)) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        wrong.append(f"processes {left} were left behind")
    honest = verifier.grade(HONEST, HONEST_RESPONSE)
    if honest.status != "passed":
        wrong.append(f"an honest program after it: {honest.status} ({honest.detail})")
    return [f"{case['id']}: {what}" for what in wrong]


@pytest.fixture(scope="module")
def here() -> Iterator[dict[str, Any]]:
    with world() as made:
        yield made


@pytest.fixture(scope="module")
def verifier(here: dict[str, Any]) -> CodeVerifier:
    return CodeVerifier()


@pytest.mark.skipif(not CASES.exists(), reason="../shared/cases/code_sandbox.jsonl is not there")
def test_the_cases_are_all_there() -> None:
    assert len(load()) >= 36


@pytest.mark.parametrize("case", load(), ids=lambda case: f"{case['id']}-{case['kind']}")
def test_case(case: dict[str, Any], verifier: CodeVerifier, here: dict[str, Any]) -> None:
    assert problems(case, verifier, here) == []


_AS_ORDINARY_USER = """
set -e
if test -n "$HIDDEN"; then
    mkdir -p "$STAGE/${PYTHON#"$HIDDEN"}"
    mount --bind "$PYTHON" "$STAGE/${PYTHON#"$HIDDEN"}"
    mount --rbind "$STAGE" "$HIDDEN"
fi
exec setpriv --reuid "$ORDINARY" --regid "$ORDINARY" --clear-groups \\
    env -i PATH="$PATH" HOME=/nonexistent "$@"
"""
"""Where this Python lies in a folder that only root may enter, it is bound to one open to all, in a
mount namespace that goes away with the command."""


def as_ordinary_user(*command: str) -> subprocess.CompletedProcess[str]:
    python = Path(sys.base_prefix).resolve()
    closed = [p for p in python.parents if not p.stat().st_mode & stat.S_IXOTH]
    stage = tempfile.mkdtemp(prefix="stage-")
    os.chmod(stage, 0o755)
    try:
        return subprocess.run(
            [
                "unshare",
                "--mount",
                "--propagation",
                "private",
                "sh",
                "-c",
                _AS_ORDINARY_USER,
                "sh",
                *command,
            ],
            cwd=Path(__file__).resolve().parents[1],
            env={
                **os.environ,
                "STAGE": stage,
                "PYTHON": str(python),
                "HIDDEN": f"{closed[-1]}/" if closed else "",
                "ORDINARY": str(ORDINARY_USER),
            },
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
    finally:
        # What was bound there is gone, and only empty folders are removed.
        for folder, _, _ in os.walk(stage, topdown=False):
            os.rmdir(folder)


@pytest.mark.skipif(not CASES.exists(), reason="../shared/cases/code_sandbox.jsonl is not there")
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="there is no setpriv")
def test_cases_as_an_ordinary_user() -> None:
    able = as_ordinary_user(sys.executable, "-c", "import mintrl_env.types, psutil, pytest")
    if able.returncode:
        pytest.skip(f"an ordinary user cannot run this Python: {able.stderr.strip()[-200:]}")
    done = as_ordinary_user(sys.executable, __file__)
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout)
    assert answer == {"uid": ORDINARY_USER, "cases": len(load()), "problems": []}


def main() -> None:
    with world() as made:
        verifier = CodeVerifier()
        wrong = [problem for case in load() for problem in problems(case, verifier, made)]
    print(json.dumps({"uid": os.getuid(), "cases": len(load()), "problems": wrong}))


if __name__ == "__main__":
    main()
