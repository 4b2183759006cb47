"""Does `mintrl plan`'s simulation say how long the real runner takes?

    python benchmarks/plan_check.py [--repeats 2]

The runner with the transformers slot engine on one CPU thread, at three numbers of episodes at once,
and a judge that only waits: log-normal latencies, 99th percentile 20 medians, the median a tenth and
a half of what a full batch takes for a chunk. What the simulation is told is measured in the same
run and with no slow judge: seconds of a step by rows at once, of a row's begin, and what reviews cost
that are answered at once: of one row, of all rows together, and of all rows one by one (the first
review of each sets them apart). Nothing is fitted to the runs that are predicted. The ratio is that
of the longer to the shorter of predicted and measured seconds.

Seconds are the wall's, less those in which the engine's thread was ready to run and the system gave
it no core (Linux; elsewhere nothing is taken off): other people's work is not the simulation's to
foresee. On an idle machine that is the wall time. The judge's latencies go by the same clock.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from measure import Line, parser, report, spread
from rollouts import BIG, Bench, written
from runner_latency import latencies

from mintrl_env.adapters.pump import LoopThread
from mintrl_env.episode import EpisodeConfig
from mintrl_env.judges import KeepJudge
from mintrl_env.plan_engine import Speed
from mintrl_env.plan_rows import ReviewDraw, RowScript, script
from mintrl_env.plan_sim import simulate
from mintrl_env.plan_system import JudgeSystem, Mode, System
from mintrl_env.types import ReviewRequest, Verdict

MEDIANS = (0.1, 0.5)
LEVELS = (4, 8, 16)
EPISODES, CHUNK, REVIEWS, PROMPT = 24, 16, 4, 32
TOKENS = CHUNK * (REVIEWS + 1)


@dataclass(frozen=True)
class Episodes:
    """Scripts as `plan_rows.Batches` gives them: one group of all episodes."""

    scripts: list[RowScript]
    groups: int = 1

    def group(self, index: int) -> list[RowScript]:
        return self.scripts


class OwnClock:
    """Seconds of the wall without those in which the thread that made this waited for a core."""

    def __init__(self) -> None:
        self._file = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")

    def now(self) -> float:
        try:
            waited = int(self._file.read_text().split()[1]) / 1e9
        except OSError:
            waited = 0.0
        return time.perf_counter() - waited


@dataclass(frozen=True)
class SlowJudge:
    """Keeps everything after the latency of the review."""

    seconds: np.ndarray
    clock: OwnClock

    async def review(self, request: ReviewRequest) -> Verdict:
        episode = int(request.task.task_id.removeprefix("task-"))
        until = self.clock.now() + float(self.seconds[episode, request.review])
        while (left := until - self.clock.now()) > 0:
            await asyncio.sleep(left)
        return Verdict.keep()


CLOCK = OwnClock()


def seconds_of(bench: Bench, rows: int, tokens: int, reviews: int) -> float:
    """Wall seconds of so many rows of so many tokens, all at once, no judge or an instant one."""
    tasks = bench.tasks(rows, low=PROMPT, high=PROMPT)
    chunk = CHUNK if reviews else tokens
    config = bench.rollout_config(tokens=tokens, chunk=chunk, reviews=reviews)
    start = CLOCK.now()
    assert written(bench.run(tasks, config, KeepJudge() if reviews else None)) == rows * tokens
    return CLOCK.now() - start


def measured_speed(bench: Bench, counts: Sequence[int], repeats: int) -> Speed:
    """The engine, with what the runner costs around it."""

    def middle(rows: int, tokens: int, reviews: int, times: int = repeats) -> float:
        return spread([seconds_of(bench, rows, tokens, reviews) for _ in range(times)])[0]

    steps, whole = {}, {}
    for rows in counts:
        short, whole[rows] = middle(rows, CHUNK, 0), middle(rows, TOKENS, 0)
        steps[rows] = max(1e-6, (whole[rows] - short) / (TOKENS - CHUNK))
    for low, high in pairwise(counts):
        steps[high] = max(steps[high], steps[low])  # more rows take no less: that was noise
    most = counts[-1]
    alone = middle(1, TOKENS, REVIEWS, 2 * repeats) - middle(1, TOKENS, 0, 2 * repeats)
    alone = max(0.0, alone / REVIEWS)
    together = max(0.0, (middle(most, TOKENS, REVIEWS) - whole[most]) / REVIEWS)
    request = min(max(0.0, (together - alone) / (most - 1)), together / most)
    admit = max(0.0, alone - request)
    begin = (whole[most] - TOKENS * steps[most] - admit) / most
    speed = Speed(
        tuple(sorted(steps.items())),
        prefill_s=max(0.0, begin - request) / PROMPT,
        request_s=request,
        slots=most,
        admit_s=admit,
    )
    return one_by_one(bench, speed, repeats)


def one_by_one(bench: Bench, speed: Speed, repeats: int) -> Speed:
    """With what it costs that a row comes back among others that write."""
    seconds = np.zeros((speed.slots, REVIEWS))
    seconds[:, 0] = speed.step(speed.slots) * np.arange(speed.slots)
    real = spread([judged(bench, seconds, speed.slots) for _ in range(repeats)])[0]
    low, high = 0.0, speed.step(1)  # of a row; the prediction rises with it
    for _ in range(20):
        middle = (low + high) / 2
        above = predicted(replace(speed, admit_row_s=middle), seconds, speed.slots) > real
        low, high = (low, middle) if above else (middle, high)
    return replace(speed, admit_row_s=low)


def judged(bench: Bench, seconds: np.ndarray, at_once: int) -> float:
    """Real seconds of the episodes whose reviews take these seconds."""
    config = bench.rollout_config(tokens=TOKENS, chunk=CHUNK, reviews=REVIEWS)
    tasks = bench.tasks(len(seconds), low=PROMPT, high=PROMPT)
    judge = SlowJudge(seconds, CLOCK)
    start = CLOCK.now()
    rows = bench.run(tasks, config, judge, at_once=at_once)
    assert written(rows) == len(seconds) * TOKENS
    return CLOCK.now() - start


def predicted(speed: Speed, seconds: np.ndarray, at_once: int) -> float:
    """Wall seconds of the episodes by the simulation."""
    rules = EpisodeConfig(
        chunk_tokens=CHUNK, max_reviews=REVIEWS, max_response=TOKENS, max_correction=8
    )
    rows = [
        script(
            rules,
            prompt=PROMPT + 1,  # the task's own tokens and one that differ: nothing is shared
            length=TOKENS + 1,
            reviews=[ReviewDraw(False, 0.0, 0, float(s), 1, 0, 1) for s in row],
        )
        for row in seconds
    ]
    system = System(
        policy=speed,
        engines=1,
        train_s=lambda tokens: 0.0,
        judge=JudgeSystem(),
        in_flight=at_once,
        prefix_cache=True,
    )
    return simulate(system, Episodes(rows), Mode(), updates=1).seconds


def measure(
    bench: Bench, levels: Sequence[int], episodes: int, medians: Sequence[float], repeats: int
) -> list[Line]:
    most = max(levels)
    counts = [n for n in (1, 4, 8, 16) if n <= most]
    each = latencies(episodes, REVIEWS)
    seconds_of(bench, most, TOKENS, 0)  # warm-up
    found: dict[tuple[int, float], list[tuple[float, float]]] = {}
    for _ in range(repeats):
        # Measured anew each time: a busy machine changes under us.
        speed = measured_speed(bench, counts, 2)
        full = speed.step(most) * CHUNK
        for level in levels:
            for median in medians:
                latency = each * (median * full)
                real = judged(bench, latency, level)
                found.setdefault((level, median), []).append(
                    (predicted(speed, latency, level), real)
                )
    lines = []
    for (level, median), pairs in found.items():
        value, low, high = spread([max(a, b) / min(a, b) for a, b in pairs])
        lines.append(
            Line(
                "plan_check",
                f"predicted beside real, {level} at once, judge's median {median:g} chunks",
                value,
                1.15,
                True,
                low,
                high,
                {
                    "predicted s": spread([a for a, _ in pairs])[0],
                    "real s": spread([b for _, b in pairs])[0],
                    "predicted / real": spread([a / b for a, b in pairs])[0],
                },
            )
        )
    return lines


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=2)
    args = arguments.parse_args()
    torch.set_num_threads(1)
    with LoopThread() as loop:
        bench = Bench.make(BIG, slots=max(LEVELS), loop=loop)
        if args.quick:
            lines = measure(bench, (2, 4), 4, (0.1,), 1)
        else:
            lines = measure(bench, LEVELS, EPISODES, MEDIANS, args.repeats)
    report(lines, args.json)


if __name__ == "__main__":
    main()
