"""What rollouts by the slot engine cost beside transformers' `generate`, on one CPU thread.

    python benchmarks/slot_engine.py [--repeats 7]

Random Qwen3-shaped models, ragged prompts, sampling at temperature 1, no EOS, so that both sides
write the same number of tokens. Three contestants take turns: plain `generate` in one call; the
whole runner without a judge; the runner with four reviews that a judge answers at once, all Keep.
The last is also compared with `generate` called again for every chunk, as one without a cache of
its own would. CPU seconds are the process's and count the runner's loop thread as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from measure import Line, interleaved, parser, ratio_line, report
from rollouts import BIG, SMALL, Bench, written

from mintrl_env.adapters.pump import LoopThread
from mintrl_env.judges import KeepJudge

CHUNKS = 4
CASES = (("quickstart's size", 128, 96, SMALL), (">= 3M", 16, 128, BIG), (">= 3M", 64, 128, BIG))


def by_generate(model: Any, prompts: Sequence[list[int]], new_tokens: int, chunks: int) -> int:
    """All rows by `generate`, left-padded, in `chunks` calls that read the prefix again."""
    rows = list(prompts)
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
    return sum(map(len, rows)) - sum(map(len, prompts))


def measure(
    name: str, rows: int, tokens: int, shape: dict[str, int], repeats: int, loop: LoopThread
) -> list[Line]:
    bench = Bench.make(shape, slots=rows, loop=loop)
    parameters = sum(p.numel() for p in bench.model.parameters())
    tasks = bench.tasks(rows)
    prompts = [bench.prompts.ids(task).tolist() for task in tasks]
    off = bench.rollout_config(tokens=tokens, chunk=tokens, reviews=0)
    keep = bench.rollout_config(tokens=tokens, chunk=tokens // CHUNKS, reviews=CHUNKS)
    runs = {
        "generate": partial(by_generate, bench.model, prompts, tokens, 1),
        "generate by chunks": partial(by_generate, bench.model, prompts, tokens, CHUNKS),
        "judge off": lambda: written(bench.run(tasks, off, None)),
        "four Keeps": lambda: written(bench.run(tasks, keep, KeepJudge())),
    }
    if len({run() for run in runs.values()}) != 1:
        raise SystemExit("the contestants wrote different numbers of tokens")
    times = interleaved(runs, repeats, warm_up=False)
    lines = []
    about = f"{name}, {rows} rows"
    for contestant, target in (("judge off", 1.05), ("four Keeps", 1.10)):
        for kind in ("cpu", "wall"):
            others = {f"{kind} s, {n}": min(getattr(t, kind)) for n, t in times.items()}
            lines.append(
                ratio_line(
                    "slot_engine",
                    f"{contestant} over generate, {about}, {kind}",
                    getattr(times[contestant], kind),
                    getattr(times["generate"], kind),
                    target=target if shape is BIG else None,
                    **({"parameters": parameters} | others if contestant == "judge off" else {}),
                )
            )
    lines.append(
        ratio_line(
            "slot_engine",
            f"four Keeps over generate by chunks, {about}, cpu",
            times["four Keeps"].cpu,
            times["generate by chunks"].cpu,
        )
    )
    return lines


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=7)
    args = arguments.parse_args()
    torch.set_num_threads(1)
    cases = [(n, 4, 16, s) for n, _, _, s in CASES[:2]] if args.quick else CASES
    repeats = 2 if args.quick else args.repeats
    lines = []
    with LoopThread() as loop:
        for name, rows, tokens, shape in cases:
            lines += measure(name, rows, tokens, shape, repeats, loop)
    report(lines, args.json)


if __name__ == "__main__":
    main()
