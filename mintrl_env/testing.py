"""Scripted peers, public so that your tests need no model: a policy, a judge, a verifier.

policy = ScriptedPolicy([[1, 2, 3], [4, 256]])
judge = ScriptedJudge([Verdict.revise(0, "x"), Verdict.keep()])
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mintrl_env.errors import UsageError
from mintrl_env.keys import RowKey, uniforms
from mintrl_env.protocols import Sampling
from mintrl_env.types import Chunk, Finish, IdsLike, ReviewRequest, Score, Task, Verdict


class ScriptedPolicy:
    """Writes given chunks in turn, per row; a chunk longer than asked for is cut to `max_tokens`.

    Args:
        chunks: the chunks of every row, or a function from a row's key to them.
        eos_ids: ids that end a response, for the finish reason.
        latency: seconds before each answer, or a function from the key to them.
    """

    def __init__(
        self,
        chunks: Sequence[IdsLike] | Callable[[RowKey], Sequence[IdsLike]],
        *,
        eos_ids: Sequence[int] = (256,),
        latency: float | Callable[[RowKey], float] = 0.0,
    ) -> None:
        self._chunks = chunks
        self._eos = frozenset(eos_ids)
        self._latency = latency
        self._turns: dict[tuple[Any, ...], int] = {}
        self.calls: list[tuple[RowKey, npt.NDArray[np.int32], int]] = []

    async def generate(
        self,
        ids: npt.NDArray[np.int32],
        *,
        max_tokens: int,
        stop: Sequence[str],
        sampling: Sampling,
        key: RowKey,
    ) -> Chunk:
        self.calls.append((key, ids, max_tokens))
        await asyncio.sleep(self._latency(key) if callable(self._latency) else self._latency)
        chunks = self._chunks(key) if callable(self._chunks) else self._chunks
        turn = self._turns.get(key.row, 0)
        if turn >= len(chunks):
            raise UsageError(f"the script of row {key.row} has only {len(chunks)} chunk(s)")
        self._turns[key.row] = turn + 1
        written = np.asarray(chunks[turn], dtype=np.int32)[:max_tokens]
        ended = len(written) > 0 and int(written[-1]) in self._eos
        logprobs = -uniforms(key, len(written)).astype(np.float32)
        return Chunk(written, logprobs, Finish.EOS if ended else Finish.LENGTH)


class ScriptedJudge:
    """Gives verdicts in turn, per row (`request.key`); an exception in the script is raised.

    Args:
        verdicts: for every row, or a function from the request to one verdict or exception.
    """

    def __init__(
        self,
        verdicts: Sequence[Verdict | Exception] | Callable[[ReviewRequest], Verdict | Exception],
        *,
        latency: float | Callable[[ReviewRequest], float] = 0.0,
    ) -> None:
        self._verdicts = verdicts
        self._latency = latency
        self.requests: list[ReviewRequest] = []

    async def review(self, request: ReviewRequest) -> Verdict:
        self.requests.append(request)
        await asyncio.sleep(self._latency(request) if callable(self._latency) else self._latency)
        if callable(self._verdicts):
            verdict = self._verdicts(request)
        elif request.review < len(self._verdicts):
            verdict = self._verdicts[request.review]
        else:
            verdict = Verdict.keep("the script has ended")
        if isinstance(verdict, Exception):
            raise verdict
        return verdict


class FunctionVerifier:
    """A verifier from a plain function `f(task, response) -> float | Score`; None or NaN from it
    means undecided."""

    def __init__(self, function: Callable[[Task, str], float | Score | None]) -> None:
        self._function = function

    async def score(self, task: Task, response: str) -> Score:
        result = self._function(task, response)
        if isinstance(result, Score):
            return result
        if result is None or math.isnan(result):
            return Score.undecided("unavailable", "the function gave no reward")
        return Score(float(result), "correct" if result > 0 else "wrong")
