"""How much memory the episodes of one window take, beyond model and KV cache.

    python benchmarks/window_memory.py [--episodes 4096] [--tokens 2048] [--quick] [--json FILE]

A scripted policy, so that there is no model and no KV cache: what is measured is the rest. Half the
episodes are controls, the others are reviewed four times, and a Revise drops a step. All of them wait
at the verifier until the last one is there, which is when the window is fullest; then they finish,
the rows are collected and written as a store. Figures are the growth of the resident set.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
from measure import Line, parser, peak_mb, report

from mintrl_env.episode import EpisodeConfig
from mintrl_env.keys import RowKey
from mintrl_env.prompts import ByteTokenizer, PromptBuilder
from mintrl_env.protocols import Sampling
from mintrl_env.rollout import Parts, RolloutConfig, Runner
from mintrl_env.store import RolloutStore
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Chunk, ReviewRequest, Score, Task, Verdict

LIMIT_MB = 2048
BESIDE = ("peak_mb", "window_mb", "collected_mb", "stored_mb", "bytes_a_token")
STEP = b"so a + b = 12, and then c.\n\n"


class Policy:
    """Writes steps for as long as it may; log-probs as an engine gives them."""

    async def generate(
        self,
        ids: npt.NDArray[np.int32],
        *,
        max_tokens: int,
        stop: Sequence[str],
        sampling: Sampling,
        key: RowKey,
    ) -> Chunk:
        await asyncio.sleep(0)
        text = (STEP * (max_tokens // len(STEP) + 1))[:max_tokens]
        written = np.frombuffer(text, dtype=np.uint8).astype(np.int32)
        return Chunk(written, np.full(max_tokens, -0.25, np.float32))


class Judge:
    async def review(self, request: ReviewRequest) -> Verdict:
        await asyncio.sleep(0)
        if request.review == 1:
            return Verdict.revise(len(request.steps) - 1, "c = 3, so ", reason="a slip " * 8)
        return Verdict.keep("all is well")


class Gate:
    """A verifier at which every episode waits until all are there."""

    def __init__(self, episodes: int) -> None:
        self.missing = episodes
        self.full, self.open = asyncio.Event(), asyncio.Event()

    async def score(self, task: Task, response: str) -> Score:
        self.missing -= 1
        if not self.missing:
            self.full.set()
        await self.open.wait()
        return Score(float(len(response) % 2), "correct" if len(response) % 2 else "wrong")


def resident_mb() -> float:
    return float(psutil.Process().memory_info().rss) / 2**20


async def run(episodes: int, tokens: int, folder: Path) -> dict[str, float]:
    group, gate = 16, Gate(episodes)
    config = RolloutConfig(
        episode=EpisodeConfig(
            chunk_tokens=tokens // 5, max_reviews=4, max_correction=64, max_response=tokens
        ),
        n_control=group // 2,
        n_intervened=group // 2,
        judge_concurrency=episodes,
        verifier_concurrency=episodes,
        deadline_s=3600.0,
    )
    tasks = [Task(f"task-{i}", f"{i}: " + "what is a + b? " * 20) for i in range(episodes // group)]
    parts = Parts(Policy(), Judge(), (), gate)
    runner = Runner(parts, PromptBuilder(ByteTokenizer()), config)
    store = RolloutStore(folder)
    store.write_group([_small()])  # what pyarrow itself takes is no part of the figure
    base, started = resident_mb(), time.perf_counter()
    job = asyncio.ensure_future(runner.collect(tasks, update=1))
    await gate.full.wait()
    await asyncio.sleep(0)
    full, seconds = resident_mb(), time.perf_counter() - started
    gate.open.set()
    groups = await job
    collected = resident_mb()
    for rows in groups:
        store.write_group(rows)
    stored = resident_mb()
    assert sum(len(row.ids) for rows in groups for row in rows) == episodes * tokens
    return {
        "episodes": episodes,
        "tokens_each": tokens,
        "window_mb": round(full - base, 1),
        "collected_mb": round(collected - base, 1),
        "stored_mb": round(stored - base, 1),
        "peak_mb": round(peak_mb() - base, 1),
        "bytes_a_token": round((full - base) * 2**20 / (episodes * tokens), 1),
        "seconds": round(seconds, 1),
    }


def _small() -> Trajectory:
    from mintrl_env.types import Kind

    return Trajectory.failed(
        task_id="t", prompt_ids=[1], kind=Kind.CONTROL, update=0, rollout=0, eos_id=256, cause="x"
    )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--episodes", type=int, default=4096)
    arguments.add_argument("--tokens", type=int, default=2048)
    args = arguments.parse_args()
    episodes = 256 if args.quick else args.episodes
    with tempfile.TemporaryDirectory() as folder:
        figures = asyncio.run(run(episodes, args.tokens, Path(folder)))
    report([line(figures)], args.json)


def line(figures: Mapping[str, float]) -> Line:
    """The peak as a share of the limit."""
    beside = {name: figures[name] for name in BESIDE}
    name = f"peak of {figures['episodes']:,} episodes of {figures['tokens_each']:,} tokens"
    return Line(
        "window_memory", f"{name} over {LIMIT_MB:,} MB", figures["peak_mb"] / LIMIT_MB, 1.0,
        beside=beside,
    )  # fmt: skip


if __name__ == "__main__":
    main()
