"""How many rows a free-running run writes otherwise than `schedule: rounds` would, in float32.

    python benchmarks/divergence.py [--rows 512]

A judge of random latency keeps everything, 64 slots serve four times as many rows, so that batches
are chance; the same rows are written again in rounds, where they are not.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import torch
from measure import Line, parser, report
from rollouts import SMALL, make_model, make_tokenizer

from mintrl_env.adapters.divergence import compare_with_rounds
from mintrl_env.adapters.session import EngineHost, RolloutSession
from mintrl_env.episode import EpisodeConfig
from mintrl_env.prompts import PromptBuilder
from mintrl_env.rollout import RolloutConfig
from mintrl_env.testing import FunctionVerifier
from mintrl_env.types import ReviewRequest, Task, Verdict

GROUP, SLOTS, TOKENS = 16, 64, 64


class RandomLatency:
    def __init__(self) -> None:
        self._random = np.random.default_rng(0)

    async def review(self, request: ReviewRequest) -> Verdict:
        await asyncio.sleep(float(self._random.exponential(0.02)))
        return Verdict.keep()


def measure(rows: int) -> Line:
    tokenizer = make_tokenizer(512)
    model: Any = make_model(SMALL, 512)
    with torch.no_grad():  # as sharp as a trained model: flat logits would make flips rarer
        model.lm_head.weight.mul_(20.0)
    host = EngineHost(
        model=model,
        tokenizer=tokenizer,
        prompts=PromptBuilder(tokenizer, chat=False),
        slots=SLOTS,
        max_length=128,
    )
    config = RolloutConfig(
        episode=EpisodeConfig(chunk_tokens=16, max_reviews=4, max_response=TOKENS),
        n_control=GROUP // 2,
        n_intervened=GROUP // 2,
    )
    judge = RandomLatency()
    verifier = FunctionVerifier(lambda task, response: 1.0)
    tasks = [Task(f"task-{i}", f"dan bin {i} gor.", answer="1") for i in range(rows // GROUP)]
    with RolloutSession(host, config, judge=judge, verifier=verifier) as session:
        groups = session.groups(tasks, update=0)
        found = compare_with_rounds(session, groups, tasks, judge=judge)
    return Line(
        "divergence",
        f"rows that differ from rounds, float32, {found.rows} rows",
        found.share,
        beside={"rows that differ": found.differing, "equal tokens": found.tokens},
    )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rows", type=int, default=512)
    args = arguments.parse_args()
    torch.set_num_threads(1)
    report([measure(32 if args.quick else args.rows)], args.json)


if __name__ == "__main__":
    main()
