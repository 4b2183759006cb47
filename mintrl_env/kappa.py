"""kappa from a pilot: what log-prob a judge gives the corrections that it writes itself.

The judge's tokens need not be the policy's: the log-probs of a correction are summed over the judge's
tokens and divided by its length in the *policy's* tokenizer, which is what Const's anchor is spread
over. Recorders stand in front of the judge's model and listen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mintrl_env.chat import Capabilities, ChatMessage, ChatModel, ChatReply
from mintrl_env.errors import UsageError
from mintrl_env.keys import RowKey
from mintrl_env.protocols import Judge, Sampling, Tokenizer
from mintrl_env.types import Chunk, frozen_ids


@dataclass(frozen=True, slots=True)
class Written:
    """One correction as it was written.

    Attributes:
        logprob: the judge's log-probs at temperature 1, summed, nats.
        tokens: its length in the policy's tokenizer, >= 1.
    """

    logprob: float
    tokens: int


def kappa_figures(
    written: Sequence[Written], *, seed: int = 0, draws: int = 2000
) -> dict[str, Any]:
    """kappa (sum of log-probs over sum of lengths), its 95 % bootstrap interval over corrections,
    and how single corrections spread. None of no corrections.

    A correction with a token whose log-prob nobody told (NaN), or that is impossible, has no mean; such
    ones are left out and counted (`unknown`).

    Raises:
        UsageError: a correction without tokens.
    """
    if any(w.tokens < 1 for w in written):
        raise UsageError("a correction has at least one token")
    unknown = sum(not np.isfinite(w.logprob) for w in written)
    written = [w for w in written if np.isfinite(w.logprob)]
    counts: dict[str, Any] = {"corrections": len(written), "unknown": unknown}
    if not written:
        return {"kappa": None, "kappa_ci95": None, **counts, "tokens": 0, "spread": None}
    sums = np.array([w.logprob for w in written], dtype=np.float64)
    lengths = np.array([w.tokens for w in written], dtype=np.float64)
    generator = np.random.default_rng(seed)
    chosen = generator.integers(0, len(sums), size=(draws, len(sums)))
    means = sums[chosen].sum(1) / lengths[chosen].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    spread = np.quantile(sums / lengths, [0.1, 0.5, 0.9])
    return {
        "kappa": float(sums.sum() / lengths.sum()),
        "kappa_ci95": [float(low), float(high)],
        **counts,
        "tokens": int(lengths.sum()),
        "spread": {"p10": float(spread[0]), "p50": float(spread[1]), "p90": float(spread[2])},
    }


class RecordingEngine:
    """A judge's own engine (policy and scorer at once) that notes what it writes.

    What it does not know itself it asks the engine, so that a pump takes it for one.

    Args:
        engine: a Policy that is a Scorer too.
        tokenizer: the policy's, which is the judge's too. A final EOS is no part of a correction,
            and one with another special token would be refused.
        note: called with each continuation.
    """

    def __init__(
        self, engine: Any, tokenizer: Tokenizer, note: Callable[[Written], object]
    ) -> None:
        self._engine, self._tokenizer, self._note = engine, tokenizer, note

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self,
        ids: npt.NDArray[np.int32],
        *,
        max_tokens: int,
        stop: Sequence[str],
        sampling: Sampling,
        key: RowKey,
    ) -> Chunk:
        chunk: Chunk = await self._engine.generate(
            ids, max_tokens=max_tokens, stop=stop, sampling=sampling, key=key
        )
        body = chunk.ids
        while len(body) and int(body[-1]) in self._tokenizer.eos_ids:
            body = body[:-1]
        if len(body) and self._tokenizer.special_ids.isdisjoint(body.tolist()):
            # Scored anew: the chunk's own log-probs are at the judge's temperature.
            whole = frozen_ids(np.concatenate([ids, body]))
            logprobs = await self._engine.logprobs(whole, len(ids), key=key)
            self._note(Written(float(np.sum(logprobs, dtype=np.float64)), len(body)))
        return chunk

    async def logprobs(
        self, ids: npt.NDArray[np.int32], start: int, *, key: RowKey | None = None
    ) -> npt.NDArray[np.float32]:
        found: npt.NDArray[np.float32] = await self._engine.logprobs(ids, start, key=key)
        return found


class RecordingChat:
    """A judge's chat model that notes the texts it writes freely, where it tells their log-probs.

    An answer by a schema is a verdict; a correction inside one can't be told apart.

    Args:
        chat: the model.
        tokenizer: the policy's.
        note: called with each text.
    """

    def __init__(
        self, chat: ChatModel, tokenizer: Tokenizer, note: Callable[[Written], object]
    ) -> None:
        self._chat, self._tokenizer, self._note = chat, tokenizer, note

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chat, name)

    @property
    def capabilities(self) -> Capabilities:
        return self._chat.capabilities

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        max_tokens: int,
        schema: Mapping[str, Any] | None = None,
        prefill: str = "",
        stop: Sequence[str] = (),
        temperature: float = 1.0,
        seed: int | None = None,
    ) -> ChatReply:
        reply = await self._chat.chat(
            messages,
            max_tokens=max_tokens,
            schema=schema,
            prefill=prefill,
            stop=stop,
            temperature=temperature,
            seed=seed,
        )
        if schema is None and reply.logprobs and reply.text.strip():
            ids = self._tokenizer.encode(reply.text)
            total = float(np.sum(np.array(reply.logprobs, dtype=np.float64)))
            if ids and np.isfinite(total) and self._tokenizer.special_ids.isdisjoint(ids):
                self._note(Written(total, len(ids)))
        return reply


def watch_chats(judge: Judge, tokenizer: Tokenizer, note: Callable[[Written], object]) -> int:
    """Put a recorder in front of every chat model that a judge, or a judge in it, keeps as attribute.

    Returns:
        How many there are now; a judge that keeps its model elsewhere has none.
    """
    found = 0
    for name, value in list(getattr(judge, "__dict__", {}).items()):
        if isinstance(value, RecordingChat):
            continue
        if isinstance(value, ChatModel):
            setattr(judge, name, RecordingChat(value, tokenizer, note))
            found += 1
        elif isinstance(value, Judge):
            found += watch_chats(value, tokenizer, note)
    return found
