"""A local server with E2B's wire format, which runs cells and misbehaves on command.

One address plays the control plane (`/v2/sandboxes`, `/sandboxes/{id}`), the proxy in front of the
sandboxes (`/health`), and the kernel's server in each (`/execute`, lines of JSON); the header
`E2b-Sandbox-Id` says which sandbox is meant. The real client is pointed at it with E2B_API_URL and
E2B_SANDBOX_URL. Cells run in one Python process a sandbox, as in a kernel.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

if "fake_fusion" in sys.modules:
    _fusion = sys.modules["fake_fusion"]
else:
    _spec = importlib.util.spec_from_file_location(
        "fake_fusion", Path(__file__).with_name("fake_fusion.py")
    )
    assert _spec is not None and _spec.loader is not None
    _fusion = importlib.util.module_from_spec(_spec)
    sys.modules["fake_fusion"] = _fusion
    _spec.loader.exec_module(_fusion)
FakeHandler, FakeServer, Fault = _fusion.FakeHandler, _fusion.FakeServer, _fusion.Fault

KEY = "e2b_0000000000000000000000000000000000000000"

_KERNEL = """
import contextlib, io, json, sys, traceback
names = {"__name__": "__main__"}
for line in sys.stdin:
    out, error = io.StringIO(), None
    with contextlib.redirect_stdout(out):
        try:
            exec(compile(json.loads(line), "<cell>", "exec"), names)
        except BaseException as raised:
            error = [type(raised).__name__, str(raised), traceback.format_exc()]
    print(json.dumps([out.getvalue(), error]), file=sys.__stdout__, flush=True)
"""


class Machine:
    """One sandbox with its kernel."""

    def __init__(self, tmp: str) -> None:
        self.cells = 0
        self.kernel = subprocess.Popen(
            [sys.executable, "-c", _KERNEL],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": tmp},
        )
        self.lock = threading.Lock()

    def run(self, code: str) -> tuple[str, list[str] | None] | None:
        """What a cell printed and raised; None: the kernel ended."""
        with self.lock:
            assert self.kernel.stdin is not None and self.kernel.stdout is not None
            self.cells += 1
            try:
                self.kernel.stdin.write(json.dumps(code) + "\n")
                self.kernel.stdin.flush()
                line = self.kernel.stdout.readline()
            except (OSError, ValueError):
                return None
            return json.loads(line) if line else None

    def kill(self) -> None:
        self.kernel.kill()
        self.kernel.wait()


class FakeE2B(FakeServer):
    """`creations`, `executions` and `kills` are what the service was asked for; `faults` hit
    creations, `cell_faults` cells: there also the kinds "dies" (the sandbox ends in the middle of
    the cell), "kernel" (the kernel restarts) and "silent" (the cell's output gets lost)."""

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        self.cell_faults: deque[Any] = deque()
        self.creations: list[dict[str, Any]] = []
        self.executions: list[tuple[str, str]] = []
        self.kills: list[str] = []
        self.most_alive = 0
        self.numbers = itertools.count()
        super().__init__()

    def end_machine(self, name: str) -> bool:
        with self.lock:
            machine = self.machines.pop(name, None)
        if machine is None:
            return False
        machine.kill()
        return True

    def close(self) -> None:
        super().close()
        for name in list(self.machines):
            self.end_machine(name)


class _E2B(FakeHandler):
    fake: FakeE2B  # type: ignore[assignment]

    def do_POST(self) -> None:
        body = self.read_body()
        if self.path == "/v2/sandboxes":
            self.create(json.loads(body))
        elif self.path == "/execute":
            self.execute(json.loads(body))
        else:
            self.answer(404, {"code": 404, "message": "no such path"})

    def do_DELETE(self) -> None:
        name = self.path.rsplit("/", 1)[1]
        with self.fake.lock:
            self.fake.kills.append(name)
        if self.fake.end_machine(name):
            self.send_response(204)
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            self.answer(404, {"code": 404, "message": "sandbox not found"})

    def do_GET(self) -> None:
        name = self.headers.get("E2b-Sandbox-Id", "")
        if self.path == "/health" and name in self.fake.machines:
            self.answer(200, "OK")
        else:
            self.answer(502, {"message": f"The sandbox {name} was not found", "code": 502})

    def create(self, request: dict[str, Any]) -> None:
        with self.fake.lock:
            self.fake.creations.append({**request, "key": self.headers.get("X-API-KEY")})
            self.fake.times.append(time.monotonic())
        fault = self.fake.next_fault()
        if fault is not None and self.misbehave(fault):
            return
        if self.headers.get("X-API-KEY") != KEY:
            self.answer(401, {"code": 401, "message": "Invalid API key"})
            return
        name = f"i{next(self.fake.numbers):04d}"
        with self.fake.lock:
            self.fake.machines[name] = Machine(self.fake.folder)
            self.fake.most_alive = max(self.fake.most_alive, len(self.fake.machines))
        self.answer(
            201,
            {
                "templateID": request["templateID"],
                "sandboxID": name,
                "clientID": "client",
                "envdVersion": "0.4.0",
                "envdAccessToken": f"token-{name}",
                "domain": None,
            },
        )

    def execute(self, request: dict[str, Any]) -> None:
        name = self.headers.get("E2b-Sandbox-Id", "")
        with self.fake.lock:
            self.fake.executions.append((name, request["code"]))
            fault = self.fake.cell_faults.popleft() if self.fake.cell_faults else None
        machine = self.fake.machines.get(name)
        if machine is None:
            self.answer(502, {"message": f"The sandbox {name} was not found", "code": 502})
            return
        if self.headers.get("X-Access-Token") != f"token-{name}":
            self.answer(401, "no access token")
            return
        if fault is not None and self.misbehave(fault):
            return
        kind = fault.kind if fault is not None else ""
        self.begin()
        self.line({"type": "number_of_executions", "execution_count": machine.cells + 1})
        if kind == "dies":
            self.fake.end_machine(name)
            self.reset()
            return
        if kind == "kernel":
            self.line(
                {
                    "type": "error",
                    "name": "ContextRestarting",
                    "value": "Context was restarted",
                    "traceback": "",
                }
            )
        elif kind == "garbage":
            self.chunk(b'{"type": "stdout", "text\n')
        else:
            self.serve(machine, request["code"], silent=kind == "silent")
        self.line({"type": "end_of_execution"})
        self.chunk(b"")

    def serve(self, machine: Machine, code: str, *, silent: bool) -> None:
        self.fake.enter()
        try:
            ended = machine.run(code)
        finally:
            self.fake.leave()
        if ended is None:
            self.line(
                {"type": "error", "name": "UnexpectedEndOfExecution", "value": "", "traceback": ""}
            )
            return
        printed, error = ended
        self.line({"type": "keepalive"})
        now = datetime.now(UTC).isoformat()
        for start in range(0, 0 if silent else len(printed), 50_000):
            text = printed[start : start + 50_000]
            self.line({"type": "stdout", "text": text, "timestamp": now})
        if error is not None:
            names = dict(zip(("name", "value", "traceback"), error, strict=True))
            self.line({"type": "error", **names})

    def begin(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def line(self, message: dict[str, Any]) -> None:
        self.chunk(json.dumps(message).encode() + b"\n")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()


FakeE2B.handler = _E2B
