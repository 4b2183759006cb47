"""The faces that outside parts show to the rules: policy, scorer, judge, guard, verifier, tokenizer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from mintrl_env.keys import RowKey
from mintrl_env.types import Chunk, IdsLike, ReviewRequest, Score, Task, Verdict


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a policy samples. MInTRL's log-probs and baseline use this distribution, so top_p is 1.

    Attributes:
        temperature: > 0, or 0 for greedy.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be >= 0, not {self.temperature}")


@runtime_checkable
class Tokenizer(Protocol):
    """What the rules need of a tokenizer; `mintrl_env.prompts.HFTokenizer` wraps a real one."""

    @property
    def eos_ids(self) -> frozenset[int]: ...

    @property
    def special_ids(self) -> frozenset[int]:
        """EOS, pad, chat-template and other added tokens: what a correction must not hold."""
        ...

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """Ids of a plain text, without special tokens put around it."""
        ...

    def decode(self, ids: IdsLike) -> str:
        """Text of ids, special tokens written out, bytes that are no character as U+FFFD."""
        ...


@runtime_checkable
class Policy(Protocol):
    """Writes chunks: ids in, ids out."""

    async def generate(
        self,
        ids: npt.NDArray[np.int32],
        *,
        max_tokens: int,
        stop: Sequence[str],
        sampling: Sampling,
        key: RowKey,
    ) -> Chunk:
        """Continue `ids` (prompt and response so far) by 1 to `max_tokens` tokens.

        `key` names the row, whose KV an engine may reuse as far as the ids agree, and its draws:
        token i of the chunk takes draw `key.draw + i`.
        """
        ...


@runtime_checkable
class Scorer(Protocol):
    """Optional: what a gate, a scoring judge or kappa's calibration needs."""

    async def logprobs(
        self, ids: npt.NDArray[np.int32], start: int, *, key: RowKey | None = None
    ) -> npt.NDArray[np.float32]:
        """Log-probs (temperature 1) of `ids[start:]`, each given all before it; start >= 1."""
        ...


@runtime_checkable
class Judge(Protocol):
    """Reviews chunks and writes corrections."""

    async def review(self, request: ReviewRequest) -> Verdict:
        """Keep the pending chunk, or cut it at its earliest wrong step.

        Raises:
            JudgeError: no usable verdict; its cause is recorded in the review.
        """
        ...


Guard = Callable[[ReviewRequest, Verdict], Awaitable[Verdict]]
"""Looks at a Revise and may turn it into a Keep (`verdict.kept_by(name, reason)`)."""


@runtime_checkable
class Verifier(Protocol):
    """Scores responses."""

    async def score(self, task: Task, response: str) -> Score:
        """Is the response right? Undecided (NaN) only for what we or a service cause."""
        ...
