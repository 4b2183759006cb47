"""A judge that reads log-probs: a step with a token that a teacher finds too unlikely is wrong."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from mintrl_env.errors import JudgeError, UsageError
from mintrl_env.keys import RowKey
from mintrl_env.protocols import Policy, Sampling, Scorer, Tokenizer
from mintrl_env.splice import encode_behind
from mintrl_env.types import IdsLike, ReviewRequest, Usage, Verdict, frozen_ids


def judge_key(request: ReviewRequest, purpose: str) -> RowKey:
    """A judge's own row: its draws and its KV must not be the policy's."""
    key = request.key
    if not isinstance(key, RowKey):
        key = RowKey(0, 0, request.task.task_id, 0)
    return replace(key, task_id=f"{key.task_id}/{purpose}", draw=0)


_DRAWS_PER_REVIEW = 1 << 20


async def write_correction(
    policy: Policy,
    tokenizer: Tokenizer,
    prompt_ids: IdsLike,
    request: ReviewRequest,
    step: int,
    *,
    stop: Sequence[str],
    sampling: Sampling,
    key: RowKey,
) -> tuple[tuple[int, ...], Usage]:
    """Continue what is kept before `step` by a correction, behind a prompt of the writer's own.

    Returns:
        Its ids, at most `request.max_correction` less what the carry takes, an EOS that the writer
        adds left out; and what it cost.
    """
    kept = request.kept_ids(step)
    # As the episode will put it in front of the correction.
    carry = encode_behind(tokenizer, kept, request.steps[step].carry)
    room = request.max_correction - len(carry)
    if room < 1:
        return (), Usage(calls=0)
    prefix = np.concatenate([frozen_ids(prompt_ids), kept, frozen_ids(carry)])
    # Every review of a row draws numbers of its own, however long the corrections before it were.
    key = key.at(request.review * _DRAWS_PER_REVIEW)
    chunk = await policy.generate(
        frozen_ids(prefix), max_tokens=room, stop=stop, sampling=sampling, key=key
    )
    ids = [int(i) for i in chunk.ids]
    while ids and ids[-1] in tokenizer.eos_ids:
        ids.pop()
    return tuple(ids), Usage(prompt_tokens=len(prefix), completion_tokens=len(chunk.ids))


class ScoringJudge:
    """Finds the earliest wrong step by a teacher's log-probs, and lets the teacher rewrite it.

    A step is wrong if the least log-prob of its tokens is below `tau`. The correction is the
    teacher's own continuation of the kept prefix, up to a step's end, at most L tokens.

    Args:
        scorer, policy: the teacher; it shares the policy's tokenizer and prompt.
        tokenizer: theirs.
        tau: nats; lower is more lenient.
        never: steps that this regular expression finds are passed over (the answer line), and
            so is whatever follows the first of them.
        stop: strings that end a correction.
        temperature: of the correction.
    """

    def __init__(
        self,
        scorer: Scorer,
        policy: Policy,
        tokenizer: Tokenizer,
        *,
        tau: float = -2.0,
        never: str | None = None,
        stop: Sequence[str] = ("\n",),
        temperature: float = 1.0,
    ) -> None:
        if not tau < 0:
            raise UsageError(f"tau is a log-prob and must be < 0, not {tau}")
        self._scorer, self._policy, self._tokenizer = scorer, policy, tokenizer
        self._tau = tau
        try:
            self._never = re.compile(never, re.MULTILINE) if never else None
        except re.error as error:
            raise UsageError(f"never: {never!r} is no regex: {error}") from error
        self._stop = tuple(stop)
        self._sampling = Sampling(temperature=temperature)

    async def review(self, request: ReviewRequest) -> Verdict:
        started = time.monotonic()
        body = self._body(request.chunk_ids)
        head = np.concatenate([request.prompt_ids, request.accepted_ids])
        if not len(body):
            return Verdict.keep("nothing but the end", Usage(calls=0))
        ids = frozen_ids(np.concatenate([head, body]))
        key = judge_key(request, "judge")
        logprobs = await self._scorer.logprobs(ids, len(head), key=key)
        usage = Usage(prompt_tokens=len(ids))
        if logprobs.shape != body.shape or np.isnan(logprobs).any():
            raise JudgeError(
                "internal",
                f"the scorer gave {logprobs.shape} log-probs for {len(body)} tokens, "
                f"{int(np.isnan(logprobs).sum())} of them NaN",
                usage=usage,
            )
        wrong = self._first_wrong(request, logprobs)
        if wrong is None:
            return Verdict.keep("likely", replace(usage, seconds=time.monotonic() - started))
        correction, cost = await write_correction(
            self._policy,
            self._tokenizer,
            request.prompt_ids,
            request,
            wrong,
            stop=self._stop,
            sampling=self._sampling,
            key=key,
        )
        usage = replace(usage + cost, seconds=time.monotonic() - started)
        return Verdict.revise(wrong, correction, f"a token below {self._tau:g} nats", usage)

    def _body(self, chunk_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        end = len(chunk_ids)
        while end and int(chunk_ids[end - 1]) in self._tokenizer.eos_ids:
            end -= 1
        return chunk_ids[:end]

    def _first_wrong(self, request: ReviewRequest, logprobs: npt.NDArray[np.float32]) -> int | None:
        cuts = [*(step.cut for step in request.steps), len(logprobs)]
        line = request.accepted_text[request.accepted_text.rfind("\n") + 1 :]
        for index, step in enumerate(request.steps):
            text = line + step.text if index == 0 else step.text
            if self._never is not None and self._never.search(text):
                return None
            least = logprobs[cuts[index] : cuts[index + 1]]
            if len(least) and float(least.min()) < self._tau:
                return index
        return None
