"""What the slot engine costs beside transformers' `generate`, on one CPU thread.

    python benchmarks/slot_engine.py [--repeats 5]

Random Qwen3-shaped models, ragged prompts, sampling at temperature 1, no EOS, so that both sides
write the same number of tokens. Repeats are interleaved (generate, engine, generate, ...) and a
figure is the median over repeats; CPU seconds are printed beside wall seconds, since a busy machine
spoils the latter. In the second part every row is interrupted: it is written in 4 chunks, as if a
judge had kept each, and `generate` reads the whole prefix again for each chunk.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from mintrl_env.adapters.policy_transformers import SlotEngine
from mintrl_env.adapters.pump import LoopThread, run_with_pump
from mintrl_env.keys import RowKey


@dataclass(frozen=True)
class Case:
    name: str
    rows: int
    new_tokens: int
    model: dict[str, int]


BIG = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
CASES = (
    Case("quickstart's size", 128, 110, SMALL),
    Case(">= 3M", 16, 64, BIG),
    Case(">= 3M", 64, 64, BIG),
)
CHUNKS = 4


def make_model(shape: dict[str, int]) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(max_position_embeddings=512, eos_token_id=None, pad_token_id=0, **shape)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def by_generate(model: Any, rows: list[list[int]], new_tokens: int, chunks: int) -> int:
    """All rows by `generate`, left-padded, in `chunks` calls that read the prefix again."""
    for _ in range(chunks):
        width = max(map(len, rows))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new_tokens // chunks,
            do_sample=True,
            top_k=0,
            top_p=1.0,
        )
        new = out[:, width:].tolist()
        rows = [row + more for row, more in zip(rows, new, strict=True)]
    return sum(map(len, rows))


def by_engine(
    engine: SlotEngine, loop: LoopThread, rows: list[list[int]], new_tokens: int, chunks: int
) -> int:
    """All rows by the slot engine, each row on its own, in `chunks` requests one after another."""

    async def row(i: int) -> int:
        ids = np.array(rows[i], dtype=np.int32)
        for chunk in range(chunks):
            count = new_tokens // chunks
            key = RowKey(0, 0, "benchmark", i, draw=chunk * count)
            written = await engine.generate(ids, max_tokens=count, key=key)
            ids = np.concatenate([ids, written.ids])
        return len(ids)

    async def everything() -> int:
        return sum(await asyncio.gather(*(row(i) for i in range(len(rows)))))

    engine.reset()
    return run_with_pump([engine], everything, loop=loop)


def medians(runs: dict[str, Callable[[], int]], repeats: int) -> dict[str, tuple[float, float]]:
    """Median wall and CPU seconds of each, interleaved after one warm-up; equal token counts."""
    if len({run() for run in runs.values()}) != 1:
        raise SystemExit("the two sides wrote different numbers of tokens")
    wall: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start_wall, start_cpu = time.perf_counter(), time.process_time()
            run()
            wall[name].append(time.perf_counter() - start_wall)
            cpu[name].append(time.process_time() - start_cpu)
    return {name: (statistics.median(wall[name]), statistics.median(cpu[name])) for name in runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    print(
        f"{'model':<18} {'params':>9} {'rows':>5} {'new':>4} {'chunks':>6} "
        f"{'generate s (CPU)':>18} {'engine s (CPU)':>18} {'ratio wall':>10} {'CPU':>6}"
    )
    with LoopThread() as loop:
        for case in CASES:
            run_case(case, loop, repeats)


def run_case(case: Case, loop: LoopThread, repeats: int) -> None:
    """Measure one case without and with interruptions; print a line each."""
    model = make_model(case.model)
    parameters = sum(p.numel() for p in model.parameters())
    vocab_size = case.model["vocab_size"]
    rng = np.random.default_rng(0)
    rows = [rng.integers(1, vocab_size, rng.integers(16, 49)).tolist() for _ in range(case.rows)]
    engine = SlotEngine(model, eos_ids=(), vocab_size=vocab_size, slots=case.rows, max_length=256)
    for chunks in (1, CHUNKS):
        new = case.new_tokens // chunks * chunks
        figures = medians(
            {
                "generate": partial(by_generate, model, rows, new, chunks),
                "engine": partial(by_engine, engine, loop, rows, new, chunks),
            },
            repeats,
        )
        (wall_g, cpu_g), (wall_e, cpu_e) = figures["generate"], figures["engine"]
        print(
            f"{case.name:<18} {parameters:>9,} {case.rows:>5} {new:>4} {chunks:>6} "
            f"{f'{wall_g:.2f} ({cpu_g:.2f})':>18} {f'{wall_e:.2f} ({cpu_e:.2f})':>18} "
            f"{wall_e / wall_g:>10.2f} {cpu_e / cpu_g:>6.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
