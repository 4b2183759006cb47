"""Figures for models and GPUs that nobody has measured here: by formula from public numbers.

Every one of them is given, not measured. Parameters, layers and KV heads are the models' published
configurations, bandwidth and bf16 arithmetic the GPUs' data sheets; the efficiencies are assumptions:

    decode step        3 ms + max(weights / (0.6 bandwidth), 2 P rows / (0.5 arithmetic))
    ... and a token of context    KV bytes / (0.6 bandwidth)
    reading a token    2 P / (0.5 arithmetic)
    learning a token   8 P / (0.35 arithmetic): forward, backward, and a forward for the anchor
    new weights        1 s + weights / 10 GB/s, and 0.2 s for twice the engines

Attention's own arithmetic, which grows with the square of the length, is not in it.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import Any

from mintrl_env.errors import UsageError

_READ, _COMPUTE, _TRAIN, _OVERHEAD_S, _SYNC_BYTES_S = 0.6, 0.5, 0.35, 3e-3, 10e9
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_STATE_BYTES = 16  # a parameter's: weights, gradient and AdamW's two moments, mixed precision


@dataclass(frozen=True, slots=True)
class Model:
    """Sizes: parameters, layers, KV heads, their width."""

    parameters: float
    layers: int
    kv_heads: int
    head: int

    @property
    def kv_bytes(self) -> int:
        """Of a token, in bf16."""
        return 2 * self.layers * self.kv_heads * self.head * 2


@dataclass(frozen=True, slots=True)
class Gpu:
    """bytes/s, bf16 FLOP/s without sparsity, bytes."""

    bandwidth: float
    arithmetic: float
    memory: float


MODELS = {
    "qwen3-0.6b": Model(0.6e9, 28, 8, 128),
    "qwen3-1.7b": Model(1.7e9, 28, 8, 128),
    "qwen3-4b": Model(4.0e9, 36, 8, 128),
    "qwen3-8b": Model(8.2e9, 36, 8, 128),
}
GPUS = {
    "a100": Gpu(2.039e12, 312e12, 80e9),
    "h100": Gpu(3.35e12, 989e12, 80e9),
    "h200": Gpu(4.8e12, 989e12, 141e9),
}
JUDGE = "qwen3-4b"


def preset(name: str, *, max_prompt: int, max_response: int) -> dict[str, Any]:
    """The figures of a preset `MODEL@GPU`, as nested mappings.

    Args:
        max_prompt, max_response: limits, in tokens; lengths are guessed as shares of them.

    Raises:
        UsageError: no such model or GPU.
    """
    model_name, _, gpu_name = name.lower().partition("@")
    for given, known, what in ((model_name, MODELS, "model"), (gpu_name, GPUS, "GPU")):
        if given not in known:
            near = difflib.get_close_matches(given, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise UsageError(
                f"--preset {name}: MODEL@GPU, and there is no {what} {given!r}; {hint}"
            )
    model, gpu = MODELS[model_name], GPUS[gpu_name]
    typical = min(200, max_prompt) + max_response / 2
    return {
        "policy": _engine(model, gpu, typical),
        "judge": {
            "latency_s": {"median": 2.0, "p99": 15.0},
            "engine": _engine(MODELS[JUDGE], gpu, typical),
            "calls": 1.0,
            "extra_tokens": 500,
            "tokens": {"median": 120, "p99": 400},
        },
        "verifier": {"seconds": {"median": 0.02, "p99": 0.5}, "workers_per_gpu": 2},
        "trainer": {
            "tokens_per_s": round(_TRAIN * gpu.arithmetic / (8 * model.parameters)),
            "doubling": 0.95,
            "fixed_s": 2.0,
            "min_gpus": math.ceil(_STATE_BYTES * model.parameters / (0.7 * gpu.memory)),
        },
        "sync": {"seconds": 1 + 2 * model.parameters / _SYNC_BYTES_S, "doubling_s": 0.2},
        "rows": {
            "prompt_tokens": min(200, max_prompt),
            "response_tokens": {"median": max(1.0, 0.2 * max_response), "p99": max_response},
            "revise": 0.25,
            "kept": {"low": 0.0, "high": 1.0},
            "correction_tokens": {"median": 40, "p99": 120},
        },
    }


def _engine(model: Model, gpu: Gpu, typical: float) -> dict[str, Any]:
    weights_s = 2 * model.parameters / (_READ * gpu.bandwidth)
    token_s = 2 * model.parameters / (_COMPUTE * gpu.arithmetic)
    room = 0.85 * gpu.memory - 2 * model.parameters
    return {
        "gpus": 1,
        "tokens_per_s": {
            rows: round(rows / (_OVERHEAD_S + max(weights_s, token_s * rows)), 1) for rows in _ROWS
        },
        "prefill_tokens_per_s": round(1 / token_s),
        "context_s": model.kv_bytes / (_READ * gpu.bandwidth),
        "slots": max(1, min(256, int(room / (model.kv_bytes * typical)))),
    }


def preset_for(path: str) -> str:
    """The preset that a policy's path suggests: its size by name, on an H100."""
    found = [name for name in MODELS if name.rpartition("-")[2] in path.lower()]
    return f"{found[0] if found else 'qwen3-1.7b'}@h100"
