"""A run's report in the browser, made anew when the run's files change.

Listens on 127.0.0.1 alone, answers GET of two paths, writes nothing.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from mintrl_env.errors import MintrlError, UsageError
from mintrl_env.report import render_report
from mintrl_env.report_html import plain
from mintrl_env.report_pieces import Decode
from mintrl_env.report_run import load_runs

_FILES = ("summary.json", "config.yaml", "metrics.jsonl", "curves.png", "rollouts/*.parquet")


def serve(
    run_dir: str | Path,
    port: int = 0,
    *,
    decode: Decode,
    max_groups: int = 9,
    title: str = "",
    special_ids: Collection[int] = (),
    announce: Callable[[str], None] = print,
) -> None:
    """Serve until Ctrl-C; see `write_report` for the arguments.

    Args:
        port: 0 takes a free one.
        announce: gets one line with the address.

    Raises:
        StoreError: there is no run in the folder.
        UsageError: the port is taken.
    """
    server = make_server(
        run_dir, port, decode=decode, max_groups=max_groups, title=title, special_ids=special_ids
    )
    try:
        announce(f"http://127.0.0.1:{server.server_port}/  (Ctrl-C ends it)")
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


def make_server(
    run_dir: str | Path,
    port: int = 0,
    *,
    decode: Decode,
    max_groups: int = 9,
    title: str = "",
    special_ids: Collection[int] = (),
) -> ThreadingHTTPServer:
    """The server, bound and not yet running."""
    folder = Path(run_dir)
    load_runs(folder)  # complains here, not in the browser, where there is no run at all
    lock = threading.Lock()  # one page is made at a time; the second reader gets the same one
    cached: dict[str, str] = {}

    def page() -> str:
        with lock:
            version = files_version(folder)
            if version not in cached:
                cached.clear()
                cached[version] = render_report(
                    folder,
                    decode=decode,
                    max_groups=max_groups,
                    title=title,
                    special_ids=special_ids,
                    version=version,
                )
            return cached[version]

    class Handler(BaseHTTPRequestHandler):
        server_version, sys_version = "mintrl", ""

        def do_GET(self) -> None:
            # A foreign page whose name resolves to 127.0.0.1 must not read the run.
            host = self.headers.get("Host", "").rsplit(":", 1)[0]
            if host not in ("127.0.0.1", "localhost"):
                self._answer(403, "text/plain", "only for 127.0.0.1 and localhost")
            elif self.path == "/":
                try:
                    self._answer(200, "text/html", page())
                except MintrlError as error:
                    self._answer(500, "text/html", f"<pre>{plain(str(error))}</pre>")
            elif self.path == "/version":
                self._answer(200, "text/plain", files_version(folder))
            else:
                self._answer(404, "text/plain", "only / and /version are here")

        def _answer(self, status: int, kind: str, text: str) -> None:
            body = text.encode("utf-8", "backslashreplace")
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet: the page is polled every few seconds."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False  # Ctrl-C doesn't wait for a page in the making

    try:
        return Server(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:
        raise UsageError(f"port {port} cannot be used ({error}); give another, or 0") from error


def files_version(run_dir: Path) -> str:
    """A short text that changes when a file that the report shows does."""
    digest = hashlib.sha256()
    for folder in (".", "*"):
        for pattern in _FILES:
            for path in sorted(run_dir.glob(pattern if folder == "." else f"{folder}/{pattern}")):
                try:
                    state = path.stat()
                except OSError:
                    continue  # compacted away in between
                digest.update(f"{path}\0{state.st_mtime_ns}\0{state.st_size}\n".encode())
    return digest.hexdigest()[:16]
