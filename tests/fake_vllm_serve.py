"""`vllm serve` as a policy's server with new weights, on a CPU: real HTTP, a real transformers model.

    with VllmServe("folder") as server: ... server.url ... server.log

Generation in both of vLLM's forms, and the weight routes of `fake_vllm_weights`. Tensors come over a
gloo group with the routes and the fields of vLLM's nccl backend (`gloo_transfer.py` is its other end).
A row's seed names it; the server draws as the embedded engine does, by the row's key and the place in
the row, so that the two write the same ids. A request of a paused server waits, as vLLM's do.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mintrl_env.keys import inverse_cdf, uniforms


def _beside(name: str) -> Any:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


weights_routes = _beside("fake_vllm_weights")
gloo = _beside("gloo_transfer")
local = threading.local()  # a thread has one connection


class _Drawn:
    """A place in a row, by the key that its requests carry."""

    def __init__(self, row: str, draw: int) -> None:
        self.draw, self._key = draw, np.frombuffer(bytes.fromhex(row), dtype=np.uint64)

    def philox_key(self) -> np.ndarray:
        return self._key


class VllmServe(weights_routes.WeightRoutes):  # type: ignore[misc, name-defined]
    """See the module.

    Attributes:
        written: requests answered with ids, by the version of the weights that wrote them.
        bodies_sent: of the generations, in order.
        fail_after: so many generations are answered, and the next ones with HTTP 500; None: all.
    """

    def __init__(self, folder: str | Path, name: str = "policy", **options: Any) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        super().__init__(**options)
        self.model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(str(folder))
        self.name = name
        self.vocab = len(self.tokenizer)
        self.written: list[str] = []
        self.bodies_sent: list[dict[str, Any]] = []
        self.fail_after: int | None = None
        self.group: Any = None
        self._forward = threading.Lock()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        local.request_id = request.headers.get("X-Request-Id") or ""
        super()._answer(request)

    def _do(self, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": self.name, "object": "model"}]}
        if path == "/version":
            return 200, {"version": "0.32.0"}
        if path == "/v1/completions":
            return self._generation(body, body["prompt"], body)
        if path == "/inference/v1/generate":
            return self._generation(body, body["token_ids"], body["sampling_params"])
        status, reply = super()._do(path, query, body)
        if status == 200 and path == "/init_weight_transfer_engine":
            info = body["init_info"]
            self.group = gloo.join_group(
                info["master_address"], info["master_port"], info["rank_offset"], info["world_size"]
            )
        if status == 200 and path == "/update_weights":
            self._receive(body["update_info"])
        return status, reply

    # --- weights

    def _receive(self, info: dict[str, Any]) -> None:
        parameters = dict(self.model.named_parameters())
        for name, dtype, shape in zip(
            info["names"], info["dtype_names"], info["shapes"], strict=True
        ):
            tensor = gloo.received(self.group, shape, getattr(torch, dtype))
            with torch.no_grad():
                parameters[name].copy_(tensor)

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self.group = None

    # --- generation

    def _generation(
        self, body: dict[str, Any], ids: list[int], params: dict[str, Any]
    ) -> tuple[int, Any]:
        until = time.monotonic() + 60
        while self.paused and time.monotonic() < until:
            time.sleep(0.01)
        if body["model"] != self.name:
            return 404, {"error": {"message": f"The model {body['model']!r} does not exist."}}
        with self._forward:
            if self.fail_after is not None and len(self.written) >= self.fail_after:
                return 500, {"error": {"message": "CUDA error: an illegal memory access"}}
            version = str(self.version)
            out, logprobs, finish, stop = self._write(body.get("session_id") or "", ids, params)
            self.written.append(version)
            self.bodies_sent.append(body)
        choice: dict[str, Any] = {
            "index": 0, "finish_reason": finish, "stop_reason": stop, "token_ids": out
        }  # fmt: skip
        scores = None
        if params.get("prompt_logprobs") is not None:
            scores = self._scores(ids)
        usage = {"prompt_tokens": len(ids), "completion_tokens": len(out)}
        if "sampling_params" not in body:
            choice |= {
                "text": self.tokenizer.decode(out),
                "logprobs": {"token_logprobs": logprobs},
                "prompt_token_ids": ids,
                "prompt_logprobs": scores,
            }
            return 200, {"id": "cmpl-x", "choices": [choice], "usage": usage}
        choice["logprobs"] = {"content": [{"token": "", "logprob": x} for x in logprobs]}
        choice["weight_versions"] = [{"version": version, "start": 0, "end": len(out)}]
        return 200, {"choices": [choice], "prompt_logprobs": scores, "usage": usage}

    @torch.inference_mode()
    def _write(
        self, row: str, ids: list[int], params: dict[str, Any]
    ) -> tuple[list[int], list[float], str, Any]:
        asked = re.fullmatch(r"[0-9a-f]{32}-(\d+)-\d+-\d+", local.request_id or "")
        draw, count = int(asked[1]) if asked and row else 0, params["max_tokens"]
        temperature = params.get("temperature", 1.0)
        numbers = uniforms(_Drawn(row or "00" * 16, draw), count)  # type: ignore[arg-type]
        out: list[int] = []
        logprobs: list[float] = []
        cache: Any = None
        feed = torch.tensor([ids])
        for number in numbers:
            made = self.model(feed, past_key_values=cache, use_cache=True)
            cache = made.past_key_values
            logits = made.logits[0, -1, : self.vocab].double().numpy()
            scaled = logits / (temperature or 1.0)
            probs = np.exp(scaled - scaled.max())
            token = inverse_cdf(probs, float(number)) if temperature else int(logits.argmax())
            raw = np.exp(logits - logits.max())  # vLLM's default: of temperature 1
            out.append(token)
            logprobs.append(float(np.log(raw[token] / raw.sum())))
            if token in (params.get("stop_token_ids") or ()):
                return out, logprobs, "stop", token
            text = self.tokenizer.decode(out)
            met = next((s for s in params.get("stop") or () if s in text), None)
            if met is not None:
                return out, logprobs, "stop", met
            feed = torch.tensor([[token]])
        return out, logprobs, "length", None

    @torch.inference_mode()
    def _scores(self, ids: list[int]) -> list[Any]:
        logits = self.model(torch.tensor([ids])).logits[0, :, : self.vocab].double()
        logp = torch.log_softmax(logits, -1)
        return [None] + [
            {str(token): {"logprob": float(logp[at, token]), "rank": 1, "decoded_token": ""}}
            for at, token in enumerate(ids[1:])
        ]
