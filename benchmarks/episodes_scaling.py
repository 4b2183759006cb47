"""Wall time of a trajectory with 64 to 4,096 episodes at once.

    python benchmarks/episodes_scaling.py [--repeats 3]

One engine with 64 slots, so that nearly all episodes wait for one most of the time; each writes 64
tokens in four chunks that a judge keeps. What would grow with the number of episodes: looking for
the next request, reading a row's prefix again after others had its slot, memory.
"""

from __future__ import annotations

import gc
from functools import partial

import torch
from measure import Line, interleaved, parser, peak_mb, ratio_line, report
from rollouts import SMALL, Bench

from mintrl_env.adapters.pump import LoopThread
from mintrl_env.judges import KeepJudge

COUNTS = (64, 256, 1024, 4096)
SLOTS, TOKENS, CHUNK = 64, 64, 16


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=3)
    args = arguments.parse_args()
    torch.set_num_threads(1)
    counts = (64, 256) if args.quick else COUNTS
    with LoopThread() as loop:
        bench = Bench.make(SMALL, vocab_size=512, slots=SLOTS, max_length=128, loop=loop)
        lines = measure(bench, counts, 2 if args.quick else args.repeats)
    report(lines, args.json)


def measure(bench: Bench, counts: tuple[int, ...], repeats: int) -> list[Line]:
    config = bench.rollout_config(tokens=TOKENS, chunk=CHUNK, reviews=4)
    tasks = bench.tasks(max(counts))
    bench.run(tasks[: counts[0]], config, KeepJudge())  # a warm-up

    def run(count: int) -> None:
        # The smallest often enough that its figure is no worse known than the others'.
        for _ in range(max(1, 256 // count)):
            bench.run(tasks[:count], config, KeepJudge())
        gc.collect()

    runs = {str(count): partial(run, count) for count in counts}
    figures = interleaved(runs, repeats, warm_up=False)

    def each(count: int, kind: str) -> list[float]:
        rows = count * max(1, 256 // count)
        return [seconds / rows * 1000 for seconds in getattr(figures[str(count)], kind)]

    lines = []
    for count in counts[1:]:
        last = count == counts[-1]
        for kind in ("wall", "cpu"):
            beside = {f"ms a trajectory, {n}": min(each(n, kind)) for n in counts} if last else {}
            if last and kind == "wall":
                beside["peak MB of the process"] = peak_mb()
            lines.append(
                ratio_line(
                    "episodes_scaling",
                    f"{kind} a trajectory, {count:,} episodes at once over {counts[0]}",
                    each(count, kind),
                    each(counts[0], kind),
                    target=1.1 if last else None,
                    **beside,
                )
            )
    return lines


if __name__ == "__main__":
    main()
