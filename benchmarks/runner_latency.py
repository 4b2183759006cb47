"""What slow judges cost: the runner beside lockstep batches, and beside what would be possible.

    python benchmarks/runner_latency.py [--repeats 3]

Latencies are log-normal with a 99th percentile of 20 medians; the median is 0.1, 0.5 and 2 times
what the engine takes to write one chunk for a full batch. The same number of episodes are in flight
everywhere, the same draws of latency for the same review, and all responses have equal length.

- lockstep: all episodes of a batch write a chunk, then all are judged, then all go on; the next
  batch begins when the last episode of this one has ended.
- ours: the runner; an episode in the place of one that ended begins at once.
- the bound: every episode waits for its own judge alone. It is computed by an event simulation over
  the same latencies, in which a forward takes what one over as many rows was measured to take.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from measure import Line, parser, report, spread
from rollouts import BIG, Bench, written

from mintrl_env.adapters.pump import LoopThread
from mintrl_env.types import ReviewRequest, Verdict

MEDIANS = (0.1, 0.5, 2.0)
P99 = 20.0
SIGMA = math.log(P99) / 2.3263478740408408  # the 99th percentile of a normal distribution
AT_ONCE, EPISODES, CHUNK, REVIEWS = 16, 48, 16, 4
PROMPT = 32


def latencies(episodes: int, reviews: int) -> np.ndarray:
    """Latency over its median, of each review of each episode."""
    return np.exp(SIGMA * np.random.default_rng(2).standard_normal((episodes, reviews)))


@dataclass
class SlowJudge:
    """Keeps everything after the latency of the review."""

    seconds: np.ndarray

    async def review(self, request: ReviewRequest) -> Verdict:
        episode = int(request.task.task_id.removeprefix("task-"))
        await asyncio.sleep(float(self.seconds[episode, request.review]))
        return Verdict.keep()


class Lockstep:
    """A policy whose requests begin together and are answered together."""

    def __init__(self, engine: Any, size: int) -> None:
        self.engine, self.size = engine, size
        self._barrier: asyncio.Barrier | None = None

    async def generate(self, ids: Any, **options: Any) -> Any:
        self._barrier = self._barrier or asyncio.Barrier(self.size)
        await self._barrier.wait()
        chunk = await self.engine.generate(ids, **options)
        await self._barrier.wait()
        return chunk


def step_seconds(bench: Bench, counts: Sequence[int], repeats: int) -> dict[int, float]:
    """Seconds that the engine takes for one token of so many rows, the runner's part included."""
    found = {}
    for count in counts:
        tasks = bench.tasks(count, low=PROMPT, high=PROMPT)
        config = bench.rollout_config(tokens=3 * CHUNK, chunk=3 * CHUNK, reviews=0)
        runs = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            bench.run(tasks, config, None)
            runs.append((time.perf_counter() - start) / (3 * CHUNK))
        found[count] = spread(runs[1:])[0]
    return found


def bound(seconds: np.ndarray, step: Callable[[int], float], *, at_once: int, chunk: int) -> float:
    """Wall seconds where an episode waits for its own judge alone.

    Args:
        seconds: latencies, (episodes, reviews); an episode writes reviews + 1 chunks.
        step: seconds of a forward over n rows.
        at_once: episodes in flight.
        chunk: tokens of a chunk.
    """
    episodes, reviews = seconds.shape
    now, begun, done = 0.0, 0, 0
    writing: dict[int, tuple[int, int]] = {}  # episode: (chunks written, tokens left of this one)
    waiting: list[tuple[float, int, int]] = []  # (when, episode, chunks written)
    while done < episodes:
        while begun < episodes and len(writing) + len(waiting) < at_once:
            writing[begun] = (0, chunk)
            begun += 1
        while waiting and waiting[0][0] <= now:
            _, episode, chunks = heapq.heappop(waiting)
            writing[episode] = (chunks, chunk)
        if not writing:
            now = waiting[0][0]
            continue
        now += step(len(writing))
        for episode, (chunks, left) in list(writing.items()):
            if left > 1:
                writing[episode] = (chunks, left - 1)
                continue
            del writing[episode]
            if chunks == reviews:
                done += 1
            else:
                heapq.heappush(
                    waiting, (now + float(seconds[episode, chunks]), episode, chunks + 1)
                )
    return now


def interpolated(found: dict[int, float]) -> Callable[[int], float]:
    counts = sorted(found)
    table = np.interp(range(max(counts) + 1), counts, [found[c] for c in counts])
    return lambda n: float(table[n])


def measure(bench: Bench, episodes: int, at_once: int, repeats: int) -> list[Line]:
    tokens = CHUNK * (REVIEWS + 1)
    config = bench.rollout_config(tokens=tokens, chunk=CHUNK, reviews=REVIEWS)
    tasks = bench.tasks(episodes, low=PROMPT, high=PROMPT)
    counts = [1, *(n for n in (2, 4, 8, 16, 32) if n <= at_once)]
    each = latencies(episodes, REVIEWS)
    lines = []
    figures: dict[float, dict[str, list[float]]] = {m: {} for m in MEDIANS}
    for _ in range(repeats):
        # What a forward takes is measured anew each time: a busy machine changes under us.
        steps = step_seconds(bench, counts, 2)
        full = steps[max(counts)] * CHUNK
        for median in MEDIANS:
            seconds = each * (median * full)
            judge = SlowJudge(seconds)
            start = time.perf_counter()
            assert written(bench.run(tasks, config, judge, at_once=at_once)) == episodes * tokens
            ours = time.perf_counter() - start
            start = time.perf_counter()
            for a in range(0, episodes, at_once):
                policy = Lockstep(bench.engine, at_once)
                bench.run(tasks[a : a + at_once], config, judge, policy=policy)
            lockstep = time.perf_counter() - start
            least = bound(seconds, interpolated(steps), at_once=at_once, chunk=CHUNK)
            for name, value in (
                ("ours / bound", least / ours),
                ("lockstep / ours", lockstep / ours),
                ("full chunk s", full),
                ("ours s", ours),
                ("lockstep s", lockstep),
                ("bound s", least),
                ("possible / lockstep", lockstep / least),
            ):
                figures[median].setdefault(name, []).append(value)
    for median, found in figures.items():
        about = f"judge's median {median:g} chunks"
        share, low, high = spread(found["ours / bound"])
        gain, gain_low, gain_high = spread(found["lockstep / ours"])
        others = {
            name: spread(values)[0]
            for name, values in found.items()
            if name not in ("ours / bound", "lockstep / ours")
        }
        lines.append(
            Line(
                "runner_latency",
                f"our throughput over lockstep's, {about}",
                gain,
                low=gain_low,
                high=gain_high,
                beside=others,
            )
        )
        lines.append(
            Line(
                "runner_latency",
                f"our throughput over the bound, {about}",
                share,
                0.9,
                False,
                low,
                high,
            )
        )
    return lines


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=3)
    args = arguments.parse_args()
    torch.set_num_threads(1)
    with LoopThread() as loop:
        bench = Bench.make(BIG, slots=AT_ONCE, loop=loop)
        if args.quick:
            lines = measure(bench, 16, 8, 1)
        else:
            lines = measure(bench, EPISODES, AT_ONCE, args.repeats)
    report(lines, args.json)


if __name__ == "__main__":
    main()
