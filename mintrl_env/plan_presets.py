"""Figures for models and GPUs that nobody has measured here: by formula from public numbers.

Every one of them is given, not measured. Models are those of model_shapes.yaml, memory is by the formulas
of `memory_formula`; bandwidth and bf16 arithmetic are the GPUs' data sheets'; efficiencies are assumptions:

    decode step        3 ms + max(weights / (0.6 bandwidth), 2 P rows / (0.5 arithmetic))
    ... and a token of context    KV bytes / (0.6 bandwidth)
    reading a token    2 P / (0.5 arithmetic)
    learning a token   8 P / (0.35 arithmetic): forward, backward, and a forward for the anchor
    new weights        1 s + weights / 10 GB/s, and 0.2 s for twice the engines
    an engine's rows   what a server's memory leaves for KV, over a row of typical length; at most 256
    trainer's GPUs     as few as a row of full length, alone and checkpointed, can be learnt from on

Attention's own arithmetic, which grows with the square of the length, is not in it.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from mintrl_env.errors import UsageError
from mintrl_env.memory_formula import GIB, SERVED_SHARE, Training, fewest_gpus, kv_row, served
from mintrl_env.memory_shapes import Shape, shape_of

_READ, _COMPUTE, _TRAIN, _OVERHEAD_S, _SYNC_BYTES_S = 0.6, 0.5, 0.35, 3e-3, 10e9
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Gpu:
    """bytes/s, bf16 FLOP/s without sparsity, GiB."""

    bandwidth: float
    arithmetic: float
    gib: float


MODELS = {
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-8b": "Qwen/Qwen3-8B",
}
GPUS = {
    "a100": Gpu(2.039e12, 312e12, 80),
    "h100": Gpu(3.35e12, 989e12, 80),
    "h200": Gpu(4.8e12, 989e12, 141),
}
JUDGE = "qwen3-4b"


def preset(
    name: str, *, max_prompt: int, max_response: int, bf16: bool = False, lora: int = 0
) -> dict[str, Any]:
    """The figures of a preset `MODEL@GPU`, as nested mappings.

    Args:
        max_prompt, max_response: limits, in tokens; lengths are guessed as shares of them.
        bf16, lora: how it is trained (`memory_formula.Training`): for the GPUs that it needs.

    Raises:
        UsageError: no such model or GPU, or rows that are too long to be learnt from on it.
    """
    model_name, _, gpu_name = name.lower().partition("@")
    for given, known, what in ((model_name, MODELS, "model"), (gpu_name, GPUS, "GPU")):
        if given not in known:
            near = difflib.get_close_matches(given, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
            raise UsageError(
                f"--preset {name}: MODEL@GPU, and there is no {what} {given!r}; {hint}"
            )
    shape, gpu = shape_of(MODELS[model_name]), GPUS[gpu_name]
    training = Training(
        shape, bf16=bf16, lora=lora, rows=1, length=max_prompt + max_response, checkpointing=True
    )
    least = fewest_gpus(training, int(gpu.gib * GIB))
    if least is None:
        raise UsageError(
            f"--preset {name}: a row of {training.length:,} tokens has no room to be learnt from on such "
            "a GPU, however many there are: shorten episode.max_response, or take a larger one"
        )
    typical = min(200, max_prompt) + max_response / 2
    return {
        "policy": _engine(shape, gpu, typical),
        "judge": {
            "latency_s": {"median": 2.0, "p99": 15.0},
            "engine": _engine(shape_of(MODELS[JUDGE]), gpu, typical),
            "calls": 1.0,
            "extra_tokens": 500,
            "tokens": {"median": 120, "p99": 400},
        },
        "verifier": {"seconds": {"median": 0.02, "p99": 0.5}, "workers_per_gpu": 2},
        "trainer": {
            "tokens_per_s": round(_TRAIN * gpu.arithmetic / (8 * shape.parameters)),
            "doubling": 0.95,
            "fixed_s": 2.0,
            "min_gpus": least,
        },
        "sync": {"seconds": 1 + 2 * shape.parameters / _SYNC_BYTES_S, "doubling_s": 0.2},
        "rows": {
            "prompt_tokens": min(200, max_prompt),
            "response_tokens": {"median": max(1.0, 0.2 * max_response), "p99": max_response},
            "revise": 0.25,
            "kept": {"low": 0.0, "high": 1.0},
            "correction_tokens": {"median": 40, "p99": 120},
        },
    }


def _engine(shape: Shape, gpu: Gpu, typical: float) -> dict[str, Any]:
    weights_s = 2 * shape.parameters / (_READ * gpu.bandwidth)
    token_s = 2 * shape.parameters / (_COMPUTE * gpu.arithmetic)
    room = served(shape, int(SERVED_SHARE * gpu.gib * GIB))
    return {
        "gpus": 1,
        "tokens_per_s": {
            rows: round(rows / (_OVERHEAD_S + max(weights_s, token_s * rows)), 1) for rows in _ROWS
        },
        "prefill_tokens_per_s": round(1 / token_s),
        "context_s": kv_row(shape, 1) / (_READ * gpu.bandwidth),
        "slots": max(1, min(256, int(room / (kv_row(shape, 1) * typical)))),
    }


def preset_for(path: str) -> str:
    """The preset that a policy's path suggests: its size by name, on an H100."""
    found = [name for name in MODELS if name.rpartition("-")[2] in path.lower()]
    return f"{found[0] if found else 'qwen3-1.7b'}@h100"
