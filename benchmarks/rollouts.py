"""A model, a tokenizer, tasks and a runner of one kind for the benchmarks of rollouts.

Random Qwen3-shaped weights and no EOS among the ids that may be sampled, so that every response has
the length that was asked for and all contestants write the same number of tokens. The tokenizer is
a fast one over words, as real ones are: a review decodes and splits what it is shown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from mintrl_env.adapters.policy_transformers import SlotEngine
from mintrl_env.adapters.pump import LoopThread, run_with_pump
from mintrl_env.episode import EpisodeConfig
from mintrl_env.prompts import HFTokenizer, PromptBuilder
from mintrl_env.protocols import Judge, Policy
from mintrl_env.rollout import Parts, RolloutConfig, Runner
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Task

BIG = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}  # 3.4M parameters with a vocabulary of 2048
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}  # the quickstart's student
EOS = "<|end|>"


def make_model(shape: dict[str, int], vocab_size: int) -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
        max_position_embeddings=4096,
        eos_token_id=None,
        pad_token_id=0,
        **shape,
    )
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def make_tokenizer(vocab_size: int) -> HFTokenizer:
    """A byte-level BPE over made-up words; the last id is EOS, which no benchmark samples."""
    rng = np.random.default_rng(0)
    syllables = [a + b + c for a in "bdfgklmnprst" for b in "aeiou" for c in ("", "n", "r", "s")]
    words = ["".join(rng.choice(syllables, rng.integers(1, 4))) for _ in range(4000)]
    lines = [" ".join(rng.choice(words, 12)) + ".\n" for _ in range(2000)]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size - 1, show_progress=False)
    bpe.train_from_iterator(lines, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=EOS)
    assert len(fast) == vocab_size, len(fast)
    return HFTokenizer(fast)


@dataclass
class Bench:
    """What the benchmarks of rollouts share."""

    model: Any
    tokenizer: HFTokenizer
    engine: SlotEngine
    loop: LoopThread
    prompts: PromptBuilder

    @classmethod
    def make(
        cls,
        shape: dict[str, int],
        *,
        vocab_size: int = 2048,
        slots: int,
        max_length: int = 256,
        loop: LoopThread,
    ) -> Bench:
        tokenizer = make_tokenizer(vocab_size)
        model = make_model(shape, vocab_size)
        engine = SlotEngine(
            model,
            eos_ids=(),
            vocab_size=vocab_size - 1,
            slots=slots,
            max_length=max_length,
            decode=tokenizer.decode,
        )
        return cls(model, tokenizer, engine, loop, PromptBuilder(tokenizer, chat=False))

    def tasks(self, count: int, *, low: int = 16, high: int = 48) -> list[Task]:
        """Tasks whose prompts have `low` to `high` tokens."""
        rng = np.random.default_rng(1)
        made = []
        for i in range(count):
            ids = rng.integers(0, self.tokenizer.vocab_size - 1, int(rng.integers(low, high + 1)))
            made.append(Task(f"task-{i}", self.tokenizer.decode(ids), answer="1"))
        return made

    def rollout_config(self, *, tokens: int, chunk: int, reviews: int) -> RolloutConfig:
        """One intervened row a task; `reviews` 0 writes a response in one go."""
        episode = EpisodeConfig(
            chunk_tokens=chunk, max_reviews=reviews, max_response=tokens, max_correction=8
        )
        return RolloutConfig(
            episode=episode, n_control=0, n_intervened=1, judge_concurrency=1_000_000
        )

    def run(
        self,
        tasks: Sequence[Task],
        config: RolloutConfig,
        judge: Judge | None,
        *,
        at_once: int | None = None,
        policy: Policy | None = None,
    ) -> list[Trajectory]:
        """All tasks' rows, `at_once` of them in flight (default: all)."""
        runner = Runner(Parts(policy or self.engine, judge), self.prompts, config)
        self.engine.reset()

        async def everything() -> list[Trajectory]:
            window = asyncio.Semaphore(at_once or len(tasks))

            async def one(task: Task) -> Trajectory:
                async with window:
                    return await runner.trajectory(
                        task, self.prompts.ids(task), update=0, rollout=0
                    )

            return list(await asyncio.gather(*map(one, tasks)))

        rows = run_with_pump([self.engine], everything, loop=self.loop)
        wanted = config.episode.max_response
        assert all(len(row.ids) == wanted and not row.cause.startswith("U") for row in rows), rows
        return rows


def written(rows: Sequence[Trajectory]) -> int:
    """Tokens of all responses."""
    return sum(len(row.ids) for row in rows)
