"""A stand-in for a judge's model server: real HTTP on this machine, with answers that no model wrote.

It speaks enough of the OpenAI wire for the real client: it lists its model, answers in JSON of the
schema that it is asked for, goes on with a text, counts tokens, tells log-probs. About half of its
verdicts revise the first step. What it says depends on what it is asked alone.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_WORDS = (
    "first second third check carry count again step value result sum term line note part".split()
)
_CONTINUED = "Let me check this again, one part at a time.\n\n"
_VERDICT = {
    "type": "object",
    "properties": {
        "reason": {"type": "string"},
        "verdict": {"type": "string", "enum": ["keep", "revise"]},
        "step": {"type": ["integer", "null"]},
    },
}
_CHARACTERS_A_TOKEN = 4


@contextmanager
def stand_in(model: str, capabilities: Mapping[str, Any] | None = None) -> Iterator[str]:
    """A server until the block ends; yields its url.

    Args:
        model: the name by which it is known.
        capabilities: what it can do, as a config declares it (`mintrl_env.chat.Capabilities`).
    """

    class Handler(_Handler):
        name = model
        structured = str((capabilities or {}).get("structured", "json_schema"))
        prefill = str((capabilities or {}).get("prefill", "none"))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    name, structured, prefill = "", "json_schema", "none"
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._send(200, {"object": "list", "data": [{"id": self.name, "object": "model"}]})
        elif self.path == "/version" and self.prefill == "vllm":
            self._send(200, {"version": "0"})
        else:
            self._send(404, {"error": {"message": f"no {self.path}"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        if self.path != "/v1/chat/completions":
            self._send(404, {"error": {"message": f"no {self.path}"}})
            return
        text = answer(body, self.structured, self.prefill)
        read = sum(len(str(message.get("content"))) for message in body["messages"])
        read, written = (1 + size // _CHARACTERS_A_TOKEN for size in (read, len(text)))
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": text},
        }
        if body.get("logprobs"):
            pieces = re.findall(r"\s*\S+|\s+\Z", text)
            choice["logprobs"] = {"content": [{"token": p, "logprob": -0.5} for p in pieces]}
        usage = {"prompt_tokens": read, "completion_tokens": written}
        self._send(200, {"model": self.name, "choices": [choice], "usage": usage})

    def _send(self, status: int, body: Mapping[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a dry run's console shows stages."""


def answer(body: Mapping[str, Any], structured: str, prefill: str) -> str:
    """What the stand-in says to a chat."""
    asked = json.dumps(body["messages"], sort_keys=True) + str(body.get("seed"))
    number = int.from_bytes(hashlib.blake2b(asked.encode(), digest_size=8).digest(), "big")
    schema = _schema(body, structured)
    if schema is not None:
        return json.dumps(_instance(schema, number))
    last = body["messages"][-1]
    limit = int(body.get("max_tokens") or body.get("max_completion_tokens") or 16)
    marks = {"vllm": "continue_final_message" in body, "deepseek": "prefix" in last}
    if last["role"] == "assistant" and marks.get(prefill, prefill != "none"):
        return _continuation(str(last["content"]))[: limit * _CHARACTERS_A_TOKEN]
    words = [_WORDS[(number >> (4 * i)) % len(_WORDS)] for i in range(12)]
    return " ".join(words)[: limit * _CHARACTERS_A_TOKEN]


def _continuation(text: str) -> str:
    """A word that was begun is ended, a count goes on; else a sentence."""
    counted = re.search(r"(\d+), (\d+),\Z", text)
    if counted:
        return f" {2 * int(counted[2]) - int(counted[1])}"
    return "is." if text.endswith(" Par") else _CONTINUED


def _schema(body: Mapping[str, Any], structured: str) -> Mapping[str, Any] | None:
    form = body.get("response_format") or {}
    if form.get("type") == structured == "json_schema":
        return dict(form["json_schema"]["schema"])
    if form.get("type") == structured == "json_object":
        return _VERDICT
    if structured == "structured_outputs" and structured in body:
        return dict(body["structured_outputs"]["json"])
    return None


def _instance(schema: Mapping[str, Any], number: int) -> Any:
    """A value of a schema; which one of several, the number says."""
    if "enum" in schema:
        return schema["enum"][number % len(schema["enum"])]
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        found = {name: _instance(s, number) for name, s in schema.get("properties", {}).items()}
        if found.get("verdict") == "keep" and "step" in found:
            found["step"] = None
        return found
    plain = {"integer": 1, "number": 0.5, "boolean": bool(number & 1), "array": []}
    return plain.get(str(kind), _CONTINUED.strip())
