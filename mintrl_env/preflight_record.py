"""Listening to a judge at work: what it was shown, what its model was asked, what it answered, when.

with listening(judge, tokenizer) as (heard, notes): ...      # `heard` takes the judge's place

Recorders stand in front of every chat model and engine that a judge, or a judge in it, keeps as an
attribute, and are taken away again at the end. Nothing that the judge does is changed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mintrl_env.chat import Capabilities, ChatMessage, ChatModel, ChatReply
from mintrl_env.keys import RowKey
from mintrl_env.protocols import Judge, Policy, Sampling, Scorer, Tokenizer
from mintrl_env.types import Chunk, ReviewRequest, Verdict


@dataclass(slots=True)
class Exchange:
    """One question to a judge's model, as the model read it.

    Attributes:
        messages: (role, text) pairs; one pair, "prompt", where a model was given ids.
        answer: what it wrote, or how likely it found what it was shown; of a call that failed, why.
    """

    messages: tuple[tuple[str, str], ...]
    answer: str


@dataclass(slots=True)
class ReviewNote:
    """One review as the judge saw and answered it, before any guard.

    Attributes:
        request: what it was shown.
        seconds: how long it took, waits for the service's limits included.
        verdict: its answer; None where it raised, or was given up.
        exchanges: what its models were asked, of the first reviews only.
    """

    request: ReviewRequest
    seconds: float
    verdict: Verdict | None = None
    exchanges: list[Exchange] = field(default_factory=list)

    @property
    def place(self) -> tuple[str, int, int, int]:
        """Task, rollout, retry and review: what finds it in the trajectories."""
        key = self.request.key
        row = (key.rollout, key.retry) if isinstance(key, RowKey) else (0, 0)
        return (self.request.task.task_id, *row, self.request.review)


_HEARD: ContextVar[list[Exchange] | None] = ContextVar("mintrl_preflight_heard", default=None)


@contextmanager
def listening(
    judge: Judge, tokenizer: Tokenizer, *, keep: int = 256
) -> Iterator[tuple[Judge, list[ReviewNote]]]:
    """Put recorders in front of a judge and its models until the block ends.

    Args:
        tokenizer: writes out the ids that engines are given.
        keep: of so many reviews the exchanges are kept; a run's are too many for the memory.

    Yields:
        The judge to use, and the list that its reviews are noted in.
    """
    notes: list[ReviewNote] = []
    with ExitStack() as stack:
        _listen(judge, tokenizer, stack, set())
        yield _HeardJudge(judge, notes, keep), notes


def _listen(thing: object, tokenizer: Tokenizer, stack: ExitStack, seen: set[int]) -> None:
    seen.add(id(thing))
    for name, value in list(getattr(thing, "__dict__", {}).items()):
        heard: object
        if isinstance(value, ChatModel):
            heard = _HeardChat(value)
        elif isinstance(value, Scorer) and isinstance(value, Policy):
            heard = _HeardEngine(value, tokenizer)
        else:
            if isinstance(value, Judge) and id(value) not in seen:
                _listen(value, tokenizer, stack, seen)
            continue
        setattr(thing, name, heard)
        stack.callback(setattr, thing, name, value)


class _HeardJudge:
    def __init__(self, judge: Judge, notes: list[ReviewNote], keep: int) -> None:
        self._judge, self._notes, self._keep = judge, notes, keep

    async def review(self, request: ReviewRequest) -> Verdict:
        note = ReviewNote(request, 0.0)
        self._notes.append(note)
        token = _HEARD.set(note.exchanges if len(self._notes) <= self._keep else None)
        started = time.monotonic()
        try:
            answer = await self._judge.review(request)
            if isinstance(answer, Verdict):  # anything else is the review's to refuse
                note.verdict = answer
            return answer
        finally:
            note.seconds = time.monotonic() - started
            _HEARD.reset(token)


class _HeardChat:
    def __init__(self, chat: ChatModel) -> None:
        self._chat = chat

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
        said: list[tuple[str, str]] = [(m.role, m.content) for m in messages]
        said += [("assistant, to go on with", prefill)] if prefill else []
        exchange = Exchange(tuple(said), "(no answer)")
        heard = _HEARD.get()
        if heard is not None:
            heard.append(exchange)
        try:
            reply = await self._chat.chat(
                messages,
                max_tokens=max_tokens,
                schema=schema,
                prefill=prefill,
                stop=stop,
                temperature=temperature,
                seed=seed,
            )
        except Exception as error:
            exchange.answer = f"(no answer: {error})"
            raise
        ended = "" if reply.finish == "stop" else f"\n(ended by {reply.finish})"
        exchange.answer = reply.text + ended
        return reply


class _HeardEngine:
    """Also a Pumped, by way of the engine itself."""

    def __init__(self, engine: Any, tokenizer: Tokenizer) -> None:
        self._engine, self._tokenizer = engine, tokenizer

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
        heard = _HEARD.get()
        if heard is not None:
            prompt = self._tokenizer.decode(ids)
            heard.append(Exchange((("prompt", prompt),), self._tokenizer.decode(chunk.ids)))
        return chunk

    async def logprobs(
        self, ids: npt.NDArray[np.int32], start: int, *, key: RowKey | None = None
    ) -> npt.NDArray[np.float32]:
        found: npt.NDArray[np.float32] = await self._engine.logprobs(ids, start, key=key)
        heard = _HEARD.get()
        if heard is not None:
            total = float(np.sum(found, dtype=np.float64))
            shown = f"log-prob {total:.2f}: {self._tokenizer.decode(ids[start:])!r}"
            said = (("prompt", self._tokenizer.decode(ids[:start])),)
            last = heard[-1] if heard else None
            if last is not None and last.messages == said:  # another answer to the same question
                last.answer += f"\n{shown}"
            else:
                heard.append(Exchange(said, shown))
        return found
