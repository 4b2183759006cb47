"""A real HTTP server with the weight routes of `vllm serve`, and their habits.

    with WeightRoutes() as server: ... WeightServer(server.url) ... server.log

Read in vLLM's source: a route that is not there is 404 (without VLLM_SERVER_DEV_MODE=1); an update that is
started twice, or sent without a start, fails, and a failed one is over; `/sleep` answers an empty body (a
JSON one from 0.32 on); a server that is only paused says that it sleeps, and waking it lets it go on;
waking all parts lets it go on too.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


class WeightRoutes:
    """Attributes: log, the requests in order; behave, a path to what is done instead of it; release, the
    vLLM it is; world, its processes; delay, seconds before an update is answered."""

    def __init__(self, release: str = "0.32", *, world: int = 1) -> None:
        self.release, self.world = release, world
        self.log: list[str] = []
        self.bodies: dict[str, Any] = {}
        self.behave: dict[str, Callable[[BaseHTTPRequestHandler], bool]] = {}
        self.auth: set[str | None] = set()
        self.delay = 0.0
        self.paused = self.active = False
        self.asleep: set[str] = set()
        self.version = self.sampled = "default"
        self.received: list[Any] = []
        self._lock = threading.Lock()

    def __enter__(self) -> WeightRoutes:
        routes = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                routes._answer(self)

            do_POST = do_GET

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.02,), daemon=True
        )
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        size = int(request.headers.get("Content-Length") or 0)
        body = json.loads(request.rfile.read(size)) if size else None
        url = urlsplit(request.path)
        query = parse_qs(url.query)
        shown = url.path + ("?" + url.query if url.query else "")
        with self._lock:
            self.log.append(shown)
            self.bodies[url.path] = body
            self.auth.add(request.headers.get("Authorization"))
        if url.path in self.behave and self.behave[url.path](request):
            return
        status, reply = self._do(url.path, query, body)
        send(request, status, reply)

    def _do(self, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        if self.release == "0.24" and path in ("/weight_info", "/inference/v1/generate"):
            return 404, {"detail": "Not Found"}
        if path == "/pause":
            self.paused = True
        elif path == "/resume":
            self.paused = False
        elif path == "/is_paused":
            return 200, {"is_paused": self.paused}
        elif path == "/is_sleeping":
            return 200, {"is_sleeping": self.paused or bool(self.asleep)}
        elif path == "/sleep":
            self.asleep, self.paused = {"weights", "kv_cache"}, True
            return 200, {"status": "sleeping"} if self.release == "0.32" else None
        elif path == "/wake_up":
            self.asleep -= set(query.get("tags", self.asleep))
            self.paused = self.paused and bool(self.asleep)
            return 200, None
        elif path == "/get_world_size":
            return 200, {"world_size": self.world}
        elif path == "/start_weight_update":
            if self.active:
                return 500, {"error": {"message": "start_weight_update called while active"}}
            assert self.paused and "weights" not in self.asleep
            self.active = True
        elif path == "/update_weights":
            if not self.active:
                return 500, {"error": {"message": "start_weight_update must be called before"}}
            time.sleep(self.delay)
            self.received.append(body["update_info"])
        elif path == "/finish_weight_update":
            if not self.active:
                return 500, {"error": {"message": "finish without a matching start"}}
            self.active = False
            if self.release != "0.24" and body.get("weight_version"):
                self.version = self.sampled = body["weight_version"]
        elif path == "/weight_info":
            return 200, {"weight_version": self.version}
        elif path == "/inference/v1/generate":
            assert not self.paused
            choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "token_ids": [5]}
            if self.release == "0.32":
                choice["weight_versions"] = [{"version": self.sampled, "start": 0, "end": 1}]
            return 200, {"request_id": "x", "choices": [choice]}
        elif path != "/init_weight_transfer_engine":
            return 404, {"detail": "Not Found"}
        return 200, {"message": "done"}


def send(request: BaseHTTPRequestHandler, status: int, reply: Any) -> bool:
    data = (
        b"" if reply is None else reply if isinstance(reply, bytes) else json.dumps(reply).encode()
    )
    request.send_response(status)
    request.send_header("Content-Length", str(len(data)))
    request.end_headers()
    request.wfile.write(data)
    return True


def drop(request: BaseHTTPRequestHandler) -> bool:
    """Close the connection without a word."""
    request.close_connection = True
    return True
