"""A local server with Sandbox Fusion's wire format, which runs what it is sent and misbehaves on command.

It treats a program as the real one does in its mode without isolation: a file in a fresh folder,
standard output read after the end only (so that a program which prints more than the pipe and the
reader hold never ends), and files fetched as base64.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass
class Fault:
    """What the server does with one request instead of serving it.

    Attributes:
        status, headers, body: an answer; a body that is no str is sent as JSON.
        kind: "answer", or "reset" (the connection breaks with the request read), "cut" (it breaks
            in the middle of the answer), "hang" (no answer until the server stops), "killed" (the
            script is killed as soon as it runs), "late" (served, `seconds` later).
    """

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = ""
    kind: str = "answer"
    seconds: float = 0.0


class FakeServer:
    """A threaded HTTP/1.1 server on a port of its own; `faults` are used up one a request."""

    handler: type[BaseHTTPRequestHandler]

    def __init__(self) -> None:
        self.faults: deque[Fault | None] = deque()
        self.requests: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.connections = 0
        self.running = 0
        self.most_running = 0
        self.ended = threading.Event()
        self.folder = tempfile.mkdtemp(prefix="fake-")  # the machine's /tmp
        self.lock = threading.Lock()
        self.sockets: list[socket.socket] = []
        owner = self

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128
            fake = owner

            def process_request(self, request: Any, client_address: Any) -> None:
                with owner.lock:
                    owner.connections += 1
                    owner.sockets.append(request)
                super().process_request(request, client_address)

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # clients that went away, on purpose

        self.server = Server(("127.0.0.1", 0), self.handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.ended.set()
        self.server.shutdown()
        self.server.server_close()
        for open_socket in self.sockets:
            open_socket.close()
        self.thread.join(10)
        shutil.rmtree(self.folder, ignore_errors=True)

    def next_fault(self) -> Fault | None:
        with self.lock:
            return self.faults.popleft() if self.faults else None

    def enter(self) -> None:
        with self.lock:
            self.running += 1
            self.most_running = max(self.most_running, self.running)

    def leave(self) -> None:
        with self.lock:
            self.running -= 1


class FakeHandler(BaseHTTPRequestHandler):
    """What both fakes' handlers need."""

    protocol_version = "HTTP/1.1"

    @property
    def fake(self) -> Any:
        return self.server.fake  # type: ignore[attr-defined]

    def log_message(self, *arguments: Any) -> None:
        pass

    def read_body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        kind = "text/plain" if isinstance(body, str) else "application/json"
        self.send_response(status)
        for name, value in {"Content-Type": kind, **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def misbehave(self, fault: Fault) -> bool:
        """Do what a fault says; True if the request is done with."""
        if fault.kind == "answer":
            self.answer(fault.status, fault.body, fault.headers)
        elif fault.kind == "reset":
            self.reset()
        elif fault.kind == "cut":
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b'{"status": "Succ')
            self.wfile.flush()
            self.reset()
        elif fault.kind == "hang":
            self.fake.ended.wait()
            self.reset()
        elif fault.kind == "late":
            self.fake.ended.wait(fault.seconds)
            return False
        else:
            return False
        return True

    def reset(self) -> None:
        """Break the connection with RST instead of an orderly end."""
        self.close_connection = True
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()


class _Fusion(FakeHandler):
    def do_POST(self) -> None:
        body = self.read_body()
        request = json.loads(body)
        with self.fake.lock:
            self.fake.requests.append({"headers": dict(self.headers), **request})
            self.fake.times.append(time.monotonic())
        fault = self.fake.next_fault()
        if fault is not None and self.misbehave(fault):
            return
        if self.path != "/run_code":
            self.answer(404, {"detail": "Not Found"})
            return
        if not isinstance(request.get("code"), str) or request.get("language") != "python":
            self.answer(422, {"detail": [{"loc": ["body", "code"], "msg": "Field required"}]})
            return
        self.fake.enter()
        try:
            killed = fault is not None and fault.kind == "killed"
            self.answer(200, asyncio.run(run_code(request, self.fake.folder, killed=killed)))
        finally:
            self.fake.leave()


class FakeFusion(FakeServer):
    handler = _Fusion


async def run_code(request: dict[str, Any], tmp: str, *, killed: bool = False) -> dict[str, Any]:
    """What `POST /run_code` answers."""
    with tempfile.TemporaryDirectory(dir=tmp, ignore_cleanup_errors=True) as folder:
        for name, content in request.get("files", {}).items():
            Path(folder, name).write_bytes(base64.b64decode(content))
        program = Path(folder, "tmpcode.py")
        # One that is to be killed must not have ended by then.
        program.write_text("import time\ntime.sleep(60)\n" if killed else request["code"])
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(program),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=folder,
            env={**os.environ, "TMPDIR": tmp},
            start_new_session=True,
        )
        assert process.stdin and process.stdout and process.stderr
        if request.get("stdin") is not None:
            process.stdin.write(request["stdin"].encode())
        process.stdin.close()
        if killed:
            process.kill()
        began = time.time()
        late = False
        try:
            await asyncio.wait_for(process.wait(), request.get("run_timeout", 10))
        except TimeoutError:
            late = True
        taken = time.time() - began
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        result = {
            "status": "TimeLimitExceeded" if late else "Finished",
            "execution_time": taken,
            "return_code": None if late else process.returncode,
            "stdout": await _read(process.stdout),
            "stderr": await _read(process.stderr),
        }
        await process.wait()
        process._transport.close()  # type: ignore[attr-defined]
        files = {}
        for name in request.get("fetch_files", []):
            path = Path(folder, name)
            if path.is_file():
                files[name] = base64.b64encode(path.read_bytes()).decode()
    return {
        "status": "Failed" if late or result["return_code"] != 0 else "Success",
        "message": "",
        "compile_result": None,
        "run_result": result,
        "executor_pod_name": None,
        "files": files,
    }


async def _read(stream: asyncio.StreamReader) -> str:
    try:
        return (await asyncio.wait_for(stream.read(1024 * 1024), 0.01)).decode(errors="replace")
    except TimeoutError:
        return ""
