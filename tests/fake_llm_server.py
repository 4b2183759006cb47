"""A real HTTP server that speaks like vLLM, llama.cpp and OpenAI, and misbehaves on command.

    with FakeServer() as server:
        server.script += [Status(500), Answer()]        # what the next POSTs get, in order
        ...
        assert len(server.posts) == 2

Its model is a Markov chain over bytes, so that every log-prob can be computed again by the test. It
runs on a thread of its own, or as a process: `python tests/fake_llm_server.py [PORT]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

EOS = 256
VOCAB = 257
PADDED = 264  # rows of the embedding: 257 to 263 are no tokens


class ToyModel:
    """logits of the next token given the last one; texts of a few letters, line ends and EOS."""

    def __init__(
        self,
        seed: int = 0,
        alphabet: str = "abcdefgh \n",
        *,
        pad_logit: float = -60.0,
        eos_bias: float = -2.0,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.logits = np.full((PADDED, PADDED), -60.0)
        letters = [*alphabet.encode(), EOS]
        self.logits[:, letters] = rng.normal(size=(PADDED, len(letters)))
        self.logits[:, EOS] += eos_bias
        self.logits[:, VOCAB:] = pad_logit

    def logprobs(self, last: int, temperature: float = 1.0) -> np.ndarray:
        scaled = self.logits[last] / (temperature or 1.0)
        scaled = scaled - scaled.max()
        return np.asarray(scaled - np.log(np.exp(scaled).sum()))

    def write(
        self,
        ids: Sequence[int],
        max_tokens: int,
        *,
        temperature: float,
        seed: int | None,
        stop: Sequence[str] = (),
        bias: Mapping[int, float] | None = None,
        after_stop: int = 0,
    ) -> tuple[list[int], str, str | None]:
        """New ids, finish reason ("stop" or "length"), and the stop string that was met."""
        rng = np.random.default_rng(seed)
        out: list[int] = []
        met: str | None = None
        left = max_tokens
        while left > 0:
            logits = self.logits[ids[-1] if not out else out[-1]].copy()
            for token, by in (bias or {}).items():
                logits[token] += by
            if temperature == 0:
                token = int(logits.argmax())
            else:
                scaled = logits / temperature
                p = np.exp(scaled - scaled.max())
                token = int(rng.choice(PADDED, p=p / p.sum()))
            out.append(token)
            left -= 1
            if token == EOS:
                return out, "stop", None
            if met is None:
                text = text_of(out)
                met = next((s for s in stop if s in text), None)
                if met is not None:
                    left = min(left, after_stop)
        return out, "stop" if met is not None else "length", met


def text_of(ids: Sequence[int]) -> str:
    return bytes(i for i in ids if i < 256).decode("utf-8", "replace")


# --- what a POST may get


@dataclass(frozen=True)
class Answer:
    """The right answer, after `delay` seconds unless the client has gone by then."""

    delay: float = 0.0


@dataclass(frozen=True)
class Status:
    code: int
    error: Any = "made to fail"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Json:
    """200 and this."""

    body: Any


@dataclass(frozen=True)
class Raw:
    """200 and these bytes, which need be no JSON."""

    data: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cut:
    """The right answer's first bytes, and the connection is closed."""

    after: int = 20


@dataclass(frozen=True)
class Hang:
    """Read the request and never answer."""


@dataclass(frozen=True)
class Drop:
    """Close without a word."""


@dataclass(frozen=True)
class Trickle:
    """The right answer, a byte every so many seconds."""

    every: float = 0.05


@dataclass(frozen=True)
class Huge:
    """JSON of so many bytes."""

    size: int = 10 << 20


Behaviour = Answer | Status | Json | Raw | Cut | Hang | Drop | Trickle | Huge


@dataclass
class Seen:
    method: str
    path: str
    headers: dict[str, str]
    body: Any
    at: float


class FakeServer:
    """See the module.

    Attributes:
        script: behaviours of the next POSTs; when it is empty, `default`.
        posts, gets: what came, in order.
        connections: how many were opened; `open_now` of them still are.
        gone: requests whose client went away before the answer.
        chat: text for a chat body; None: the toy model's.
        message: more fields of a chat reply's message.
        structured: forms of JSON answers that are held to; others are ignored.
        prefill: how a last assistant message is continued ("none": it is answered), and whether the
            reply repeats it.
        wires: which of "completions", "generate", "llama" exist.
        logprobs_mode: of vLLM's forms; "raw" or "processed".
        bos: a token put in front of every prompt, as servers that know better do.
        after_stop: tokens that the model goes on writing behind a stop string.
        latency: seconds before every answer.
    """

    def __init__(
        self, model: ToyModel | None = None, *, port: int = 0, host: str = "127.0.0.1"
    ) -> None:
        self.model = model or ToyModel()
        self.host = host
        self.model_name = "toy"
        self.port = port
        self.script: deque[Behaviour] = deque()
        self.default: Behaviour = Answer()
        self.posts: list[Seen] = []
        self.gets: list[Seen] = []
        self.connections = self.open_now = self.gone = self.at_work = self.most_at_work = 0
        self.chat: Callable[[Mapping[str, Any]], str] | None = None
        self.message: dict[str, Any] = {}
        self.structured: set[str] = {"json_schema", "structured_outputs", "json_object"}
        self.prefill, self.echo = "trailing", False
        self.wires = {"completions", "generate", "llama"}
        self.logprobs_mode = "raw"
        self.bos: int | None = None
        self.after_stop = 0
        self.latency = 0.0
        self.with_usage = True
        self._draws = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stop: asyncio.Event | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"

    def __enter__(self) -> FakeServer:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True)
        self._thread.start()
        assert ready.wait(10)

    def stop(self) -> None:
        """Stop listening and cut every connection; `start` opens the same port again."""
        if self._loop is not None and self._stop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(10)
            assert not self._thread.is_alive()
        self._loop = None

    async def _serve(self, ready: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._connected, self.host, self.port, backlog=1024)
        self.port = server.sockets[0].getsockname()[1]
        ready.set()
        await self._stop.wait()
        server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        self.open_now += 1
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self.open_now -= 1
            self._tasks.discard(task)
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head[1:] if line)
        }
        data = await reader.readexactly(int(headers.get("content-length", "0")))
        seen = Seen(method, path, headers, json.loads(data) if data else None, time.monotonic())
        if method == "GET":
            self.gets.append(seen)
            self._send(writer, *self._get(path))
            await writer.drain()
            return True
        self.posts.append(seen)
        behaviour = self.script.popleft() if self.script else self.default
        self.at_work += 1
        self.most_at_work = max(self.most_at_work, self.at_work)
        try:
            return await self._behave(behaviour, seen, reader, writer)
        finally:
            self.at_work -= 1

    async def _behave(
        self,
        behaviour: Behaviour,
        seen: Seen,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> bool:
        delay = behaviour.delay if isinstance(behaviour, Answer) else 0.0
        if isinstance(behaviour, Hang):
            delay = 3600.0
        if delay + self.latency:
            # A client that waits sends nothing: reading ends only when it goes away.
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(delay + self.latency):
                    if await reader.read(1) == b"":
                        self.gone += 1
                        return False
        if isinstance(behaviour, Drop):
            return False
        if isinstance(behaviour, Status):
            body = behaviour.error
            if isinstance(body, str):
                body = {"error": {"message": body, "type": "made_up", "code": None}}
            self._send(writer, behaviour.code, body, behaviour.headers)
        elif isinstance(behaviour, Json):
            self._send(writer, 200, behaviour.body)
        elif isinstance(behaviour, Raw):
            writer.write(_head(200, len(behaviour.data), behaviour.headers) + behaviour.data)
        elif isinstance(behaviour, Huge):
            writer.write(_head(200, behaviour.size + 2) + b'"')
            for _ in range(behaviour.size >> 16):
                writer.write(b"x" * (1 << 16))
                await writer.drain()
            writer.write(b"x" * (behaviour.size & 0xFFFF) + b'"')
        else:
            status, body = self._post(seen.path, seen.body)
            data = json.dumps(body).encode()
            if isinstance(behaviour, Cut):
                writer.write(_head(status, len(data)) + data[: behaviour.after])
                await writer.drain()
                return False
            writer.write(_head(status, len(data)))
            if isinstance(behaviour, Trickle):
                for byte in data:
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(behaviour.every)
            else:
                writer.write(data)
        await writer.drain()
        return True

    def _send(
        self,
        writer: asyncio.StreamWriter,
        status: int,
        body: Any,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        data = json.dumps(body).encode()
        writer.write(_head(status, len(data), headers) + data)

    # --- what the paths answer

    def _get(self, path: str) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": self.model_name, "object": "model"}]}
        if path == "/version" and "generate" in self.wires:
            return 200, {"version": "0.32.0"}
        if path == "/props" and "llama" in self.wires:
            return 200, {"total_slots": 4, "model_path": "toy.gguf"}
        return 404, {"error": {"message": f"no {path}", "code": 404}}

    def _post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        wire, answer = {
            "/v1/chat/completions": ("chat", self._chat),
            "/v1/completions": ("completions", self._completions),
            "/inference/v1/generate": ("generate", self._generate),
            "/completion": ("llama", self._llama),
        }.get(path, ("none", None))
        if answer is None or (wire != "chat" and wire not in self.wires):
            return 404, {"error": {"message": f"no {path}", "code": 404}}
        return 200, answer(body)

    def _seed(self, seed: int | None) -> int:
        self._draws += 1
        return self._draws if seed is None else seed

    def _logprob(self, last: int, token: int, temperature: float, mode: str) -> float:
        scale = temperature if mode == "processed" else 1.0
        return float(self.model.logprobs(last, scale)[token])

    def _usage(self, prompt: int, written: int) -> dict[str, Any]:
        if not self.with_usage:
            return {}
        return {
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": written,
                "total_tokens": prompt + written,
            }
        }

    def _prompt(self, ids: list[int]) -> list[int]:
        return ids if self.bos is None else [self.bos, *ids]

    def _written(
        self, ids: list[int], params: Mapping[str, Any]
    ) -> tuple[list[int], str, str | None, list[float]]:
        temperature = params.get("temperature", 1.0)
        out, finish, met = self.model.write(
            ids,
            params["max_tokens"],
            temperature=temperature,
            seed=self._seed(params.get("seed")),
            stop=params.get("stop") or (),
            after_stop=self.after_stop,
        )
        lasts = [ids[-1], *out]
        logprobs = [
            self._logprob(last, token, temperature, self.logprobs_mode)
            for last, token in zip(lasts, out, strict=False)
        ]
        return out, finish, met, logprobs

    def _prompt_logprobs(self, ids: list[int]) -> list[Any]:
        return [None] + [
            {str(b): {"logprob": float(self.model.logprobs(a)[b]), "rank": 1, "decoded_token": ""}}
            for a, b in itertools.pairwise(ids)
        ]

    def _completions(self, body: dict[str, Any]) -> Any:
        ids = self._prompt(body["prompt"])
        out, finish, met, logprobs = self._written(ids, body)
        choice: dict[str, Any] = {
            "index": 0,
            "text": text_of(out),
            "finish_reason": finish,
            "stop_reason": met,
            "logprobs": None,
            "prompt_logprobs": None,
        }
        if body.get("logprobs") is not None:
            choice["logprobs"] = {
                "token_logprobs": logprobs,
                "tokens": [text_of([i]) for i in out],
                "top_logprobs": [None for _ in out],
                "text_offset": list(range(len(out))),
            }
        if body.get("prompt_logprobs") is not None:
            choice["prompt_logprobs"] = self._prompt_logprobs(ids)
        if body.get("return_token_ids"):
            choice |= {"token_ids": out, "prompt_token_ids": ids}
        return {
            "id": f"cmpl-{body.get('request_id', 'x')}",
            "object": "text_completion",
            "model": self.model_name,
            "choices": [choice],
            **self._usage(len(ids), len(out)),
        }

    def _generate(self, body: dict[str, Any]) -> Any:
        params = body["sampling_params"]
        ids = self._prompt(body["token_ids"])
        out, finish, _, logprobs = self._written(ids, params)
        content = [
            {"token": f"token_id:{i}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for i, logprob in zip(out, logprobs, strict=True)
        ]
        asked = params.get("logprobs") is not None
        prompt = params.get("prompt_logprobs") is not None
        return {
            "request_id": body.get("request_id", "x"),
            "choices": [
                {
                    "index": 0,
                    "logprobs": {"content": content} if asked else None,
                    "finish_reason": finish,
                    "token_ids": out,
                }
            ],
            "prompt_logprobs": self._prompt_logprobs(ids) if prompt else None,
            **self._usage(len(ids), len(out)),
        }

    def _llama(self, body: dict[str, Any]) -> Any:
        ids = self._prompt(body["prompt"])
        temperature = body["temperature"]
        out, finish, met = self.model.write(
            ids,
            body["n_predict"],
            temperature=temperature,
            seed=self._seed(body.get("seed")),
            stop=body.get("stop") or (),
            bias={int(i): by for i, by in body.get("logit_bias") or ()},
        )
        post = bool(body.get("post_sampling_probs"))
        entries = []
        for index, (last, token) in enumerate(zip([ids[-1], *out], out, strict=False)):
            done = bytes(i for i in out[: index + 1] if i < 256)
            with contextlib.suppress(UnicodeDecodeError):
                done.decode()  # a token that leaves a character unfinished has no entry
                logprob = self._logprob(last, token, temperature, "processed" if post else "raw")
                value = {"prob": float(np.exp(logprob))} if post else {"logprob": logprob}
                entries.append({"id": token, "token": text_of([token]), **value})
        if met is not None:
            entries = entries[: len(entries) - len(met)]
        how = "word" if met is not None else "eos" if finish == "stop" else "limit"
        text = text_of(out)
        return {
            "content": text[: text.index(met)] if met is not None else text,
            "tokens": out if body.get("return_tokens") else [],
            "stop_type": how,
            "stopping_word": met or "",
            "tokens_predicted": len(out),
            "tokens_evaluated": len(ids),
            "truncated": False,
            **({"completion_probabilities": entries} if body.get("n_probs") else {}),
        }

    def _chat(self, body: dict[str, Any]) -> Any:
        messages = body["messages"]
        last = messages[-1]
        continued = last["role"] == "assistant" and (
            self.prefill == "trailing"
            or (self.prefill == "deepseek" and last.get("prefix") is True)
            or (self.prefill == "vllm" and body.get("continue_final_message") is True)
        )
        prompt = "\n".join(message["content"] for message in messages)
        text = self._structured(body)
        finish = "stop"
        if text is None and self.chat is not None:
            text = self.chat(body)
        if text is None:
            limit = body.get("max_tokens", body.get("max_completion_tokens", 16))
            out, finish, _ = self.model.write(
                list(prompt.encode()) or [32],
                limit,
                temperature=body.get("temperature", 1.0),
                seed=self._seed(body.get("seed")),
                stop=body.get("stop") or (),
            )
            text = text_of(out)
        tokens = list(text.encode())
        content = [{"token": chr(i), "logprob": -i / 1000, "bytes": [i]} for i in tokens]
        if continued and self.echo:
            text = last["content"] + text
        return {
            "id": "chatcmpl-x",
            "object": "chat.completion",
            "model": self.model_name,
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": text, **self.message},
                    "finish_reason": finish,
                    "logprobs": {"content": content} if body.get("logprobs") else None,
                }
            ],
            **self._usage(len(prompt), len(tokens)),
        }

    def _structured(self, body: Mapping[str, Any]) -> str | None:
        form = body.get("response_format") or {}
        if form.get("type") == "json_schema" and "json_schema" in self.structured:
            return json.dumps(instance(form["json_schema"]["schema"]))
        outputs = body.get("structured_outputs")
        if outputs and "structured_outputs" in self.structured:
            return json.dumps(instance(outputs["json"]))
        if form.get("type") == "json_object" and "json_object" in self.structured:
            return '{"made": "up"}'
        return None


def instance(schema: Mapping[str, Any]) -> Any:
    """Something that a (simple) JSON schema allows."""
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    if schema.get("type") == "object":
        return {name: instance(each) for name, each in schema.get("properties", {}).items()}
    return {"integer": 1, "number": 1.5, "boolean": True, "array": []}.get(schema["type"], "text")


def _head(status: int, length: int, headers: Mapping[str, str] | None = None) -> bytes:
    lines = [
        f"HTTP/1.1 {status} X",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        *(f"{name}: {value}" for name, value in (headers or {}).items()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def main() -> None:
    """Serve until standard input ends; says the port."""
    with FakeServer(port=int(sys.argv[1]) if len(sys.argv) > 1 else 0) as server:
        server.latency = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
        print(server.port, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
