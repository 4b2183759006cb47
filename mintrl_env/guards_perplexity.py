"""The perplexity gate: a correction that the policy finds too surprising is not spliced in.

A policy can't learn from tokens that it would never write; reading of RTI: PPL(c) is
exp(-mean log pi_t) over the correction's tokens given the kept prefix, and the Revise stands if
PPL(c) <= tau, a fixed number or a quantile of the perplexities of what the policy writes itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mintrl_env.errors import JudgeCause, JudgeError, UsageError
from mintrl_env.judges_scoring import judge_key
from mintrl_env.protocols import Scorer, Tokenizer
from mintrl_env.splice import correction_ids
from mintrl_env.types import ReviewRequest, Verdict, VerdictKind, frozen_ids


def perplexity(logprobs: npt.ArrayLike) -> float:
    """exp(-mean) of log-probs in nats; infinite where a token is impossible.

    Raises:
        UsageError: no log-probs, or NaN among them.
    """
    values = np.asarray(logprobs, dtype=np.float64)
    if not values.size or np.isnan(values).any():
        raise UsageError(f"a perplexity needs log-probs, not {values.size} of them or NaN")
    try:
        return math.exp(-float(values.mean()))
    except OverflowError:
        return math.inf


def window_perplexities(logprobs: npt.ArrayLike, length: int) -> list[float]:
    """The perplexities of a trajectory's windows of `length` tokens that the policy sampled itself.

    Args:
        logprobs: of the response's tokens, shape (T,), NaN where the policy did not sample; a
            window never reaches over such a token, and a rest shorter than `length` is left out.
        length: tokens, as many as corrections have (L).

    Raises:
        UsageError: length < 1.
    """
    if length < 1:
        raise UsageError(f"length counts tokens and must be >= 1, not {length}")
    values = np.asarray(logprobs, dtype=np.float64)
    found, start = [], 0
    for end in [*np.flatnonzero(np.isnan(values)).tolist(), len(values)]:
        for left in range(start, end - length + 1, length):
            found.append(perplexity(values[left : left + length]))
        start = end + 1
    return found


class PerplexityGate:
    """Keeps where the policy's perplexity of the correction is above `tau`.

    Args:
        tokenizer: the policy's.
        scorer: the policy as it is now; None until `with_scorer`.
        tau: the highest perplexity that passes, >= 1.
        quantile: instead of `tau`, the quantile (0 to 1) of `sample` that becomes it.
        sample: perplexities of the policy's own text (`window_perplexities`): numbers, or the path
            of a JSON file that holds a list of them.

    Raises:
        UsageError: neither or both of tau and quantile, or values that make no sense.
    """

    name = "perplexity"

    def __init__(
        self,
        tokenizer: Tokenizer,
        scorer: Scorer | None = None,
        *,
        tau: float | None = None,
        quantile: float | None = None,
        sample: Sequence[float] | str | Path | None = None,
    ) -> None:
        if (tau is None) == (quantile is None):
            raise UsageError("give tau, or a quantile and the sample that it is taken of")
        if quantile is not None:
            if sample is None:
                raise UsageError("a quantile needs a sample of on-policy perplexities")
            tau = _quantile(sample, quantile)
        elif sample is not None:
            raise UsageError("a sample is of use with a quantile only, not with tau")
        assert tau is not None
        if not tau >= 1:
            raise UsageError(f"tau is a perplexity and must be >= 1, not {tau}")
        self.tau = float(tau)
        self._tokenizer = tokenizer
        self._scorer = scorer

    def with_scorer(self, scorer: Scorer) -> PerplexityGate:
        """The same gate, asking this policy."""
        return PerplexityGate(self._tokenizer, scorer, tau=self.tau)

    async def __call__(self, request: ReviewRequest, verdict: Verdict) -> Verdict:
        if verdict.kind is VerdictKind.KEEP or not len(verdict.correction):
            return verdict
        if self._scorer is None:
            raise UsageError("the perplexity gate has no scorer: call with_scorer(policy) first")
        assert verdict.step is not None
        if verdict.step >= len(request.steps):
            return verdict  # another check's business
        kept = request.kept_ids(verdict.step)
        # As the episode will splice it in, the text in front that a cut token carried included.
        ids = correction_ids(
            self._tokenizer,
            verdict.correction,
            carry=request.steps[verdict.step].carry,
            limit=request.max_correction,
            before=kept,
        )
        if not ids:
            return verdict
        head = np.concatenate([request.prompt_ids, kept])
        logprobs = await self._scorer.logprobs(
            frozen_ids(np.concatenate([head, frozen_ids(ids)])),
            len(head),
            key=judge_key(request, "perplexity"),
        )
        if logprobs.shape != (len(ids),) or np.isnan(logprobs).any():
            raise JudgeError(
                JudgeCause.INTERNAL,
                f"the scorer gave log-probs of shape {logprobs.shape} for {len(ids)} tokens, "
                f"{int(np.isnan(logprobs).sum())} of them NaN",
            )
        found = perplexity(logprobs)
        if found <= self.tau:
            return verdict
        return verdict.kept_by(
            self.name, f"the correction's perplexity is {found:.4g}, above {self.tau:.4g}"
        )


def _quantile(sample: Sequence[float] | str | Path, quantile: float) -> float:
    if not 0 <= quantile <= 1:
        raise UsageError(f"quantile must be between 0 and 1, not {quantile!r}")
    values: Any = sample
    where = "sample"
    if isinstance(sample, (str, Path)):
        where = f"sample {str(sample)!r}"
        try:
            values = json.loads(Path(sample).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UsageError(f"{where} cannot be read: {error}") from error
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{where} is no list of numbers: {error}") from error
    if array.ndim != 1 or not array.size or not (array >= 1).all():
        raise UsageError(f"{where} must hold perplexities, numbers >= 1, and at least one")
    return float(np.quantile(array, quantile))
