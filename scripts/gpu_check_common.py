"""What the parts of the GPU check share: sizes, the report, a model from nothing, a learning step.

Random weights of Qwen3-0.6B's shape, in bf16, with as many made-up words as it has tokens, so that
no file is needed and a response hardly ever ends before its limit.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mintrl_env.adapters.row_tensors import row_advantages, row_tensors
from mintrl_env.adapters.session import EngineHost
from mintrl_env.driving import RolloutConfig
from mintrl_env.episode import EpisodeConfig
from mintrl_env.prompts import HFTokenizer, PromptBuilder
from mintrl_env.testing import ScriptedJudge
from mintrl_env.trainers import objective
from mintrl_env.trainers.logprobs import sequence_logprobs
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Score, Task, Verdict

QWEN3_06B = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": True,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Sizes:
    """How much each part does; one set for a GPU, one for a test."""

    shape: dict[str, Any]
    dtype: torch.dtype
    lengths: tuple[int, ...]
    repeats: int
    tasks: int
    rows: int  # of a group, half of them controls
    response: int
    chunk: int
    correction: int
    micro_batch: int
    updates: int
    learning_s: float
    held_out: int
    problem_tokens: int


GPU = Sizes(
    QWEN3_06B, torch.bfloat16, (4096, 8192, 16_384), 3, 4, 16, 512, 128, 16, 8, 2, 60.0, 64, 96
)
SMALL = Sizes(TINY, torch.float32, (64, 128), 1, 2, 4, 24, 8, 4, 4, 2, 1.0, 4, 12)


class Report:
    """The part's rows so far, in its file."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device, self.smollm2 = torch.device(args.device), args.smollm2
        self.sizes = SMALL if args.tiny else GPU
        self._file: Path = args.result
        self._told: dict[str, Any] = {"machine": machine(self.device), "rows": []}

    def row(self, what: str, **figures: float) -> None:
        self._told["rows"].append({"what": what, "figures": figures})
        self._file.write_text(json.dumps(self._told))

    def failed(self, what: str, why: str) -> None:
        self._told["rows"].append({"what": what, "figures": {}, "failed": why})
        self._file.write_text(json.dumps(self._told))


def machine(device: torch.device) -> dict[str, Any]:
    told: dict[str, Any] = {"python": platform.python_version()}
    for package in ("torch", "transformers", "trl", "vllm"):
        try:
            told[package] = version(package)
        except PackageNotFoundError:
            told[package] = None
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        told |= {"card": card.name, "card_mb": card.total_memory // 2**20}
    return told


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_mb(device: torch.device) -> float:
    """Most memory since `fresh_peak`: of the card, else of this process since it began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def fresh_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


@contextmanager
def timed(into: dict[str, float], name: str, device: torch.device) -> Iterator[None]:
    wait(device)
    start = time.perf_counter()
    yield
    wait(device)
    into[name] = into.get(name, 0.0) + time.perf_counter() - start


def make_model(report: Report) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes, before = report.sizes, torch.get_default_dtype()
    config = Qwen3Config(eos_token_id=1, pad_token_id=0, **sizes.shape)
    torch.set_default_dtype(sizes.dtype)
    try:
        with report.device:
            return Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def make_tokenizer(size: int) -> HFTokenizer:
    """As many words as the model has tokens; id 1 is the end."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["[unk]", "[eos]", *(f"w{i}" for i in range(2, size))]
    backend = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="[unk]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return HFTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[unk]", eos_token="[eos]")
    )


def made_up_tasks(count: int) -> list[Task]:
    return [Task(f"t{i}", " ".join(f"w{2 + i + j}" for j in range(16))) for i in range(count)]


class Share:
    """A reward that differs from row to row: the share of odd words."""

    async def score(self, task: Task, response: str) -> Score:
        words = response.split()
        odd = sum(word[-1:] in "13579" for word in words)
        return Score(odd / max(len(words), 1), "share")


def revise_first(correction: int) -> ScriptedJudge:
    """Cuts the first chunk of every response and writes its start anew."""
    text = " ".join(f"w{i}" for i in range(2, 2 + correction))
    return ScriptedJudge(lambda r: Verdict.revise(0, text) if r.review == 0 else Verdict.keep())


def rollout_config(sizes: Sizes) -> RolloutConfig:
    episode = EpisodeConfig(
        chunk_tokens=sizes.chunk,
        max_reviews=2,
        max_correction=sizes.correction,
        max_response=sizes.response,
    )
    half = sizes.rows // 2
    return RolloutConfig(episode, n_control=half, n_intervened=sizes.rows - half)


def make_host(report: Report, model: Any, tokenizer: HFTokenizer, **changes: Any) -> EngineHost:
    sizes = report.sizes
    return EngineHost(
        model,
        tokenizer,
        changes.pop("prompts", None) or PromptBuilder(tokenizer, chat=False),
        slots=sizes.tasks * sizes.rows,
        max_length=changes.pop("prompt_tokens", 32) + sizes.response,
        **changes,
    )


def drawn(rows: list[Trajectory]) -> int:
    """Tokens that the policy sampled, cut ones included."""
    return sum(row.draws for row in rows)


def learn(
    report: Report, model: Any, optimiser: Any, rows: list[Trajectory], pad_id: int
) -> dict[str, float]:
    """One optimiser step on the rows, without a trainer; seconds by phase."""
    device, spent = report.device, dict[str, float]()
    batch = row_tensors(rows, pad_id=pad_id, device=device)
    who, advantage = batch.provenance_B_T, row_advantages(rows).to(device)
    parts = torch.arange(len(rows), device=device).split(report.sizes.micro_batch)
    bf16 = device.type == "cuda" and next(model.parameters()).dtype == torch.float32

    def logprobs(part: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16) if bf16 else nullcontext():
            return sequence_logprobs(
                model, batch.ids_B_S[part], batch.attention_mask_B_S[part], keep=who.shape[1]
            )

    with timed(spent, "old log-probs s", device), torch.no_grad():
        old = torch.cat([logprobs(part) for part in parts])
    with timed(spent, "train s", device):
        anchor = objective.anchor(old, who, kind="const", kappa=-0.2)
        trained, tokens = objective.batch_counts(who, advantage)
        for part in parts:
            loss, _ = objective.mintrl_loss(
                logprobs(part),
                anchor[part],
                who[part],
                advantage[part],
                beta_2=1e-3,
                loss_scale="matched",
                denominator=trained,
                mean_tokens=tokens / trained.clamp(min=1),
            )
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
    spent["grad norm"] = float(norm)
    spent["trained tokens/s"] = float(tokens) / spent["train s"]
    return spent
