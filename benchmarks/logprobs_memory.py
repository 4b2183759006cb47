"""Log-probs over a vocabulary of 152k tokens without the full logits: memory and time.

    python benchmarks/logprobs_memory.py [--repeats 2] [--tokens 4096]

Forward and backward of the log-probs of 4 x 1,024 tokens, hidden states and lm_head both trained,
float32, one thread: `trainers.logprobs.token_logprobs` beside full logits, `log_softmax` and a
gather. Each side has a process of its own, whose peak of resident memory over what it holds before
(inputs and weights) is compared; they take turns, and CPU seconds are compared.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measure import Line, parser, peak_mb, ratio_line, report

VOCABULARY, HIDDEN = 151_936, 256
TOKENS = 4096
BYTES_FULL = 3 * 4 * VOCABULARY  # a token's logits, log-softmax and gradient


def full(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    logits = torch.nn.functional.linear(hidden, weight)
    return torch.log_softmax(logits, -1).gather(-1, ids[:, None])[:, 0]


def ours(hidden: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    from mintrl_env.trainers.logprobs import token_logprobs

    return token_logprobs(hidden, weight, ids)


SIDES: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "full": full,
    "ours": ours,
}


def worker(side: str, tokens: int, vocabulary: int) -> None:
    """Answer each line of standard input with CPU seconds, MB of peak memory and a check sum."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    weight = (torch.randn(vocabulary, HIDDEN) * 0.02).requires_grad_()
    hidden = torch.randn(tokens, HIDDEN).requires_grad_()
    ids = torch.randint(vocabulary, (tokens,))
    SIDES[side](hidden[:2], weight, ids[:2]).sum().backward()  # code and buffers, once
    weight.grad = hidden.grad = None
    before = resident()
    for _ in sys.stdin:
        start = time.process_time()
        logp = SIDES[side](hidden, weight, ids)
        (logp * torch.linspace(-1, 1, tokens)).sum().backward()
        seconds = time.process_time() - start
        assert hidden.grad is not None
        total = float(logp.detach().double().sum() + hidden.grad.double().abs().sum())
        weight.grad = hidden.grad = None
        print(json.dumps([seconds, peak_mb() - before, total]), flush=True)


def resident() -> float:
    """MB that this process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def fitting(tokens: int) -> int:
    """As many tokens as the machine's free memory allows, with room to spare."""
    rows = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(row.split()[1]) * 1024 for row in rows if row.startswith("MemAvailable"))
    while tokens > 512 and 1.3 * tokens * BYTES_FULL > free:
        tokens //= 2
    return tokens


def measure(tokens: int, vocabulary: int, repeats: int) -> list[Line]:
    sides = {
        side: subprocess.Popen(
            [sys.executable, __file__, "--worker", side, str(tokens), str(vocabulary)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for side in SIDES
    }
    answers: dict[str, list[list[float]]] = {side: [] for side in SIDES}
    try:
        for _ in range(repeats):
            for side, process in sides.items():
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write("\n")
                process.stdin.flush()
                answers[side].append(json.loads(process.stdout.readline()))
    finally:
        for process in sides.values():
            assert process.stdin is not None
            process.stdin.close()
            process.wait(10)
    seconds, peaks, sums = (
        {side: [answer[i] for answer in answers[side]] for side in SIDES} for i in range(3)
    )
    if abs(sums["full"][0] - sums["ours"][0]) > 1e-4 * abs(sums["full"][0]):
        raise SystemExit(f"the two sides computed different numbers: {sums}")
    about = f"{tokens:,} tokens, vocabulary {vocabulary:,}"
    peak = {side: max(values) for side, values in peaks.items()}
    return [
        Line(
            "logprobs_memory",
            f"peak memory over full logits', {about}",
            peak["ours"] / peak["full"],
            1 / 9,
            beside={f"MB, {side}": value for side, value in peak.items()},
        ),
        ratio_line(
            "logprobs_memory",
            f"CPU time over full logits', {about}",
            seconds["ours"],
            seconds["full"],
            target=1.3,
            **{f"s, {side}": min(values) for side, values in seconds.items()},
        ),
    ]


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        return
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=2)
    arguments.add_argument("--tokens", type=int, default=TOKENS)
    args = arguments.parse_args()
    tokens = 512 if args.quick else fitting(args.tokens)
    report(measure(tokens, VOCABULARY, 1 if args.quick else args.repeats), args.json)


if __name__ == "__main__":
    main()
