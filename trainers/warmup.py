"""Warm-up of the quickstart's models: a small Qwen3 and its tokenizer, taught table-chain demonstrations.

What comes out is a plain transformers folder (`AutoModelForCausalLM`, `AutoTokenizer`), so that a
recipe for a real model differs from the quickstart's by names and numbers only. The student learns
from flawed demonstrations, the teacher (the judge) from nearly right ones; see
`mintrl_env.table_chain`. Training is NLL on the response's tokens, EOS included, on fresh
demonstrations every step, in fp32 on one thread; a kind, its settings and its seed fix the weights.

    python -m mintrl_env.trainers.warmup student --out FOLDER [--settings JSON]

Folders are cached under the hash of their resolved settings. A folder is made under a temporary name
and renamed when whole, so an interrupted one is never trusted and two processes may make the same one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import numpy.typing as npt

from mintrl_env.errors import MissingExtraError, PolicyError, UsageError
from mintrl_env.table_chain import ALPHABET, ChainSettings, TableChain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

Kind = Literal["student", "teacher"]
KINDS: tuple[Kind, ...] = ("student", "teacher")
Progress = Callable[[str, int, int, float], None]
"""Called with (kind, steps done, steps in all, mean NLL of the last steps in nats a token)."""

PAD, EOS, UNK = "<|pad|>", "<|end|>", "<|unk|>"
RECORD = "warmup.json"
# Part of the hash: raise it when the meaning of equal settings changes.
_FORMAT = 1
_REPORT_EVERY = 10
# Concatenates the messages: the task's prompt ends with its own generation mark.
_CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """The shape of the small Qwen3."""

    layers: int = 3
    hidden: int = 64
    heads: int = 2
    head_dim: int = 32
    intermediate: int = 160
    positions: int = 512


@dataclass(frozen=True, slots=True)
class WarmupSettings:
    """How one kind of model is warmed up.

    Attributes:
        steps, batch: optimiser steps and demonstrations a step.
        lr: peak learning rate of AdamW; linear rise over `rise` steps, then a cosine down to a tenth.
        seed: draws the first weights and the demonstrations.
        model, chain: the model's shape and the task.
    """

    steps: int = 800
    batch: int = 32
    lr: float = 2e-3
    rise: int = 50
    seed: int = 0
    model: ModelSettings = field(default_factory=ModelSettings)
    chain: ChainSettings = field(default_factory=ChainSettings)

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1 or not self.lr > 0:
            raise UsageError(f"warm-up needs steps, batch >= 1 and lr > 0, not {self}")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> WarmupSettings:
        """Settings from a mapping, also after JSON made lists of its tuples; absent keys keep their
        defaults. An unknown key raises TypeError."""
        values = dict(data)
        values["chain"] = ChainSettings.from_dict(values.get("chain", {}))
        values["model"] = ModelSettings(**values.get("model", {}))
        return cls(**values)

    def key(self, kind: Kind) -> str:
        """The cache folder's name: kind and a hash of everything that fixes the weights."""
        text = json.dumps([_FORMAT, kind, asdict(self)], sort_keys=True)
        return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A character-level fast tokenizer: pad, EOS and unknown tokens, then the task's characters."""
    try:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
    except ImportError as error:
        raise MissingExtraError("transformers", "trl", "warm-up") from error
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNK, *ALPHABET])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=_CHAT_TEMPLATE,
    )


def model_config(settings: ModelSettings, tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """The Qwen3 config of the given shape for the tokenizer's vocabulary."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden,
        intermediate_size=settings.intermediate,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        head_dim=settings.head_dim,
        max_position_embeddings=settings.positions,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )


def build_model(config: Qwen3Config, seed: int = 0) -> Qwen3ForCausalLM:
    """A fresh fp32 model; the seed fixes its weights and the global generator is left alone."""
    import torch
    from transformers import Qwen3ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    generation = model.generation_config
    assert generation is not None
    generation.do_sample, generation.top_k, generation.top_p = True, 0, 1.0
    return model


def learning_rate(settings: WarmupSettings, step: int) -> float:
    """The learning rate of optimiser step `step`, counted from 0."""
    rise = min(settings.rise, settings.steps)
    if step < rise:
        return settings.lr * (step + 1) / rise
    done = (step - rise) / max(settings.steps - rise, 1)
    return settings.lr * (0.55 + 0.45 * math.cos(math.pi * done))


def encode_batch(
    tokenizer: PreTrainedTokenizerFast, prompts: list[str], responses: list[str]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Prompts and responses as right-padded ids (B, T), and labels: -100 on prompt and padding."""
    eos, pad = cast(int, tokenizer.eos_token_id), cast(int, tokenizer.pad_token_id)
    rows_p = [tokenizer.encode(text, add_special_tokens=False) for text in prompts]
    rows_r = [[*tokenizer.encode(text, add_special_tokens=False), eos] for text in responses]
    width = max(len(p) + len(r) for p, r in zip(rows_p, rows_r, strict=True))
    ids = np.full((len(prompts), width), pad, dtype=np.int64)
    labels = np.full_like(ids, -100)
    for i, (p, r) in enumerate(zip(rows_p, rows_r, strict=True)):
        ids[i, : len(p) + len(r)] = [*p, *r]
        labels[i, len(p) : len(p) + len(r)] = r
    return ids, labels


def warm_up(
    kind: Kind, settings: WarmupSettings, out_dir: Path | str, progress: Progress | None = None
) -> Path:
    """Train one kind of model and save it as a whole transformers folder at `out_dir`.

    Returns at once if `out_dir` is a finished folder of these settings.

    Raises:
        UsageError: unknown kind, or `out_dir` holds something else.
    """
    if kind not in KINDS:
        raise UsageError(f"unknown kind {kind!r}; there are {', '.join(KINDS)}")
    out = Path(out_dir)
    if finished(kind, settings, out):
        return out
    if out.exists():
        raise UsageError(f"{out} exists and is no warm-up of these settings: move it away")
    started = time.monotonic()
    tokenizer = build_tokenizer()
    model = build_model(model_config(settings.model, tokenizer), settings.seed)
    nll = _train(model, tokenizer, kind, settings, progress)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        temporary.chmod(0o755)
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        record = {
            "kind": kind,
            "settings": asdict(settings),
            "nll": nll,
            "seconds": round(time.monotonic() - started, 1),
        }
        (temporary / RECORD).write_text(json.dumps(record, indent=1) + "\n")
        for path in temporary.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        try:
            temporary.rename(out)
        except OSError:
            # Another process was first. Equal settings give an equal folder, so take that one.
            if not finished(kind, settings, out):
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def finished(kind: Kind, settings: WarmupSettings, folder: Path | str) -> bool:
    """Is `folder` a whole warm-up of exactly these settings?"""
    try:
        record = json.loads((Path(folder) / RECORD).read_text())
        return bool(
            record["kind"] == kind and WarmupSettings.from_dict(record["settings"]) == settings
        )
    except (OSError, ValueError, KeyError, TypeError, UsageError):
        return False


def ensure_models(
    settings: Mapping[Kind, WarmupSettings],
    cache_dir: Path | str,
    progress: Progress | None = None,
) -> dict[Kind, Path]:
    """The cached folders of the given kinds; what is missing is warmed up, side by side.

    Each missing kind gets a process of its own (started by exec, one torch thread). A process whose
    parent has died ends at its next report, when its pipe is gone.

    Raises:
        PolicyError: a process failed; its last lines are in the message. The others are ended.
    """
    # Absolute: the child's working directory is ours, but a later caller's may differ.
    cache = Path(cache_dir).resolve()
    folders = {kind: cache / value.key(kind) for kind, value in settings.items()}
    missing = [kind for kind in settings if not finished(kind, settings[kind], folders[kind])]
    if not missing:
        return folders
    cache.mkdir(parents=True, exist_ok=True)
    children: dict[Kind, subprocess.Popen[str]] = {}
    tails: dict[Kind, list[str]] = {kind: [] for kind in missing}
    threads = []
    try:
        for kind in missing:
            children[kind] = _start(kind, settings[kind], folders[kind])
            threads.append(
                threading.Thread(
                    target=_follow, args=(kind, children[kind], tails[kind], progress), daemon=True
                )
            )
            threads[-1].start()
        while any(child.poll() is None for child in children.values()):
            if any(child.poll() for child in children.values()):
                break
            time.sleep(0.1)
    finally:
        # Whatever is still running here has a sibling that failed, or a caller that was interrupted.
        for child in children.values():
            if child.poll() is None:
                child.terminate()
            child.wait()
        for thread in threads:
            thread.join(timeout=5)
        for child in children.values():
            if child.stdout is not None:
                child.stdout.close()
    for kind in missing:
        if not finished(kind, settings[kind], folders[kind]):
            failed = [k for k in missing if children[k].returncode not in (0, -15)] or [kind]
            raise PolicyError(
                f"warm-up of the {failed[0]} ended with status {children[failed[0]].returncode}: "
                + "\n".join(tails[failed[0]][-8:])
            )
    return folders


def _train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    kind: Kind,
    settings: WarmupSettings,
    progress: Progress | None,
) -> list[float]:
    """NLL training in place; the mean NLL (nats a token) of each block of `_REPORT_EVERY` steps."""
    import torch

    chain = TableChain(settings.chain)
    # Student and teacher see different demonstrations even of equal seeds.
    rng = np.random.default_rng([settings.seed, KINDS.index(kind)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, fused=True, weight_decay=0.01)
    model.train()
    history: list[float] = []
    block: list[float] = []
    for step in range(settings.steps):
        prompts = [chain.prompt(rng, "warmup") for _ in range(settings.batch)]
        responses = [chain.demonstration(prompt, kind, rng) for prompt in prompts]
        ids, labels = (torch.from_numpy(a) for a in encode_batch(tokenizer, prompts, responses))
        # Right padding under a causal mask changes nothing before it, so no attention mask is needed.
        logits = model(input_ids=ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(settings, step)
        optimizer.step()
        block.append(loss.item())
        if len(block) == _REPORT_EVERY or step == settings.steps - 1:
            history.append(round(sum(block) / len(block), 5))
            block.clear()
            if progress:
                progress(kind, step + 1, settings.steps, history[-1])
    model.eval()
    return history


def _start(kind: Kind, settings: WarmupSettings, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "mintrl_env.trainers.warmup", kind]
    command += ["--out", str(folder), "--settings", json.dumps(asdict(settings))]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )


def _follow(
    kind: Kind, child: subprocess.Popen[str], tail: list[str], progress: Progress | None
) -> None:
    """Read a child's lines: reports go to `progress`, all others are kept for an error's message."""
    assert child.stdout is not None
    for line in child.stdout:
        if not line.startswith("progress "):
            tail.append(line.rstrip())
            del tail[:-50]
        elif progress:
            _, step, total, nll = line.split()
            progress(kind, int(step), int(total), float(nll))


def main(argv: list[str] | None = None) -> None:
    """Warm up one model in this process, reporting `progress STEP STEPS NLL` lines."""
    parser = argparse.ArgumentParser(prog="python -m mintrl_env.trainers.warmup")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--settings", type=json.loads, help="WarmupSettings as JSON")
    options = parser.parse_args(argv)
    import torch

    torch.set_num_threads(1)
    settings = WarmupSettings()
    if options.settings is not None:
        settings = WarmupSettings.from_dict(options.settings)

    def report(kind: str, step: int, total: int, nll: float) -> None:
        print(f"progress {step} {total} {nll}", flush=True)

    warm_up(options.kind, settings, options.out, report)


if __name__ == "__main__":
    main()
