"""What the rows of a simulated update ask for: how much is written, reviewed, read again.

A row's script depends on the draws alone, never on when anything happens; so another number of GPUs,
or another judge's latency, is tried on the very same rows. The lengths follow the rules of
`mintrl_env.episode` (a test drives both).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mintrl_env.errors import UsageError
from mintrl_env.needs import EpisodeConfig

Z = {"p95": 1.6448536269514722, "p99": 2.3263478740408408}
"""Standard normal quantiles."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """Numbers to draw: log-normal by `median` and `sigma`, uniform over `ends`, or of `values`.

    Attributes:
        median: exp(mean of the logarithms); a constant where sigma is 0.
        sigma: standard deviation of the logarithms.
        ends: lowest and highest; goes before median and sigma.
        values: measured ones, each as likely; goes before both.
    """

    median: float = 0.0
    sigma: float = 0.0
    ends: tuple[float, float] | None = None
    values: tuple[float, ...] = ()

    @classmethod
    def log_normal(cls, median: float, quantile: float, at: str = "p99") -> Distribution:
        """From the median and another quantile, `at` p95 or p99."""
        if not 0 < median <= quantile:
            raise UsageError(
                f"median {median:g} and {at} {quantile:g}: 0 < median <= {at} is needed"
            )
        return cls(median, math.log(quantile / median) / Z[at])

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
        """Numbers of this shape."""
        if self.values:
            return np.asarray(self.values, dtype=np.float64)[
                rng.integers(len(self.values), size=shape)
            ]
        if self.ends is not None:
            low, high = self.ends
            return low + (high - low) * rng.random(shape)
        normal: npt.NDArray[np.float64] = rng.standard_normal(shape)
        return self.median * np.exp(self.sigma * normal)

    @property
    def mean(self) -> float:
        if self.values:
            return float(np.mean(self.values))
        if self.ends is not None:
            return sum(self.ends) / 2
        return self.median * math.exp(self.sigma**2 / 2)


@dataclass(frozen=True, slots=True)
class Habits:
    """How policy and judge behave.

    Attributes:
        prompt_tokens, response_tokens: lengths; a response longer than the limit is cut there.
        revise: the share of reviews that revise.
        kept: the share of a revised chunk that stays.
        correction_tokens: that the judge writes; cut to the limit.
        review_extra_tokens: that the judge reads besides prompt, response so far and chunk.
        review_tokens: that the judge writes in a review.
        calls: requests of a review, on average.
        latency_s, verifier_s: seconds of a review with no limit in the way, and of a score.
    """

    prompt_tokens: Distribution
    response_tokens: Distribution
    revise: float = 0.0
    kept: Distribution = Distribution(ends=(0.0, 1.0))
    correction_tokens: Distribution = Distribution()
    review_extra_tokens: float = 0.0
    review_tokens: Distribution = Distribution(1.0)
    calls: float = 1.0
    latency_s: Distribution = Distribution()
    verifier_s: Distribution = Distribution()


@dataclass(frozen=True, slots=True)
class ReviewWork:
    """One review as work for the judge.

    Attributes:
        seconds: its latency, limits apart.
        calls: requests, one after another.
        prompt_tokens, completion_tokens: of all of them.
    """

    seconds: float
    calls: int
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Segment:
    """A chunk that a row asks the policy for.

    Attributes:
        tokens: to write, >= 1.
        fresh: tokens at the end of the context that no engine has seen yet.
        context: tokens of prompt and response before the chunk.
        review: what follows; None: nobody looks at it.
    """

    tokens: int
    fresh: int
    context: int
    review: ReviewWork | None = None


@dataclass(frozen=True, slots=True)
class RowScript:
    """All that one row will ask for.

    Attributes:
        segments: in order.
        prompt, response: tokens; `corrected` of the response's are the judge's.
        verifier_s: seconds of its score.
        revises: reviews that revised.
        truncated: the limit ended it.
    """

    segments: tuple[Segment, ...]
    prompt: int
    response: int
    corrected: int
    verifier_s: float
    revises: int
    truncated: bool

    @property
    def sampled(self) -> int:
        """Policy tokens, dropped ones included."""
        return sum(segment.tokens for segment in self.segments)

    @property
    def reviews(self) -> list[ReviewWork]:
        return [segment.review for segment in self.segments if segment.review is not None]


@dataclass(frozen=True, slots=True)
class ReviewDraw:
    """One review's luck."""

    revises: bool
    kept: float
    correction: int
    seconds: float
    calls: int
    extra_tokens: int
    completion_tokens: int


def script(
    rules: EpisodeConfig,
    *,
    prompt: int,
    length: int,
    reviews: Sequence[ReviewDraw],
    verifier_s: float = 0.0,
) -> RowScript:
    """A row from its draws.

    Args:
        length: tokens of the response as the policy would end it; a correction does not move the
            end, except that one at or behind it leaves a last token to the policy.
        reviews: the draws of its reviews, as many as there may be; none for a control.
    """
    limit = rules.max_response
    segments: list[Segment] = []
    accepted, fresh, gap, made, corrected, revises = 0, prompt, 0, 0, 0, 0
    ended = False
    while not ended and accepted < limit:
        most = limit - accepted
        if made < len(reviews):
            most = min(gap or rules.chunk_tokens, most)
        tokens = min(most, max(1, length - accepted))
        eos = accepted + tokens >= length
        context = prompt + accepted
        if gap or made >= len(reviews):
            segments.append(Segment(tokens, fresh, context))
            gap = max(0, gap - tokens)
            accepted, fresh, ended = accepted + tokens, 0, eos
            continue
        luck = reviews[made]
        work = ReviewWork(
            luck.seconds, luck.calls, context + tokens + luck.extra_tokens, luck.completion_tokens
        )
        segments.append(Segment(tokens, fresh, context, work))
        made += 1
        gap = rules.spacing
        if not luck.revises:
            accepted, fresh, ended = accepted + tokens, 0, eos
            continue
        revises += 1
        accepted += min(int(luck.kept * tokens), tokens - 1)
        fresh = min(luck.correction, rules.max_correction, limit - accepted)
        corrected += fresh
        accepted += fresh
    return RowScript(
        tuple(segments), prompt, accepted, corrected, verifier_s, revises, truncated=not ended
    )


@dataclass(eq=False)
class Batches:
    """The rows of every update, made when they are first asked for.

    Args:
        habits: how policy and judge behave.
        rules: (k, R, L), T and spacing.
        groups: prompts an update.
        n_control, n_intervened: rows of a group; the controls come first.
        judged: False removes the judge and nothing else.
        seed: of all draws.
    """

    habits: Habits
    rules: EpisodeConfig
    groups: int
    n_control: int
    n_intervened: int
    judged: bool
    seed: int

    def __post_init__(self) -> None:
        self._made: dict[int, list[list[RowScript]]] = {}

    @property
    def group_size(self) -> int:
        return self.n_control + self.n_intervened

    def group(self, index: int) -> list[RowScript]:
        """The rows of the group with this number, counted over all updates."""
        update, place = divmod(index, self.groups)
        if update not in self._made:
            self._made[update] = self._make(update)
        return self._made[update][place]

    def _make(self, update: int) -> list[list[RowScript]]:
        habits, rows = self.habits, (self.groups, self.group_size)
        most = self.rules.max_reviews if self.judged else 0
        each = (*rows, most)

        def rng(part: int) -> np.random.Generator:
            # A stream of its own for each figure: another revise rate leaves the lengths alone.
            return np.random.default_rng([self.seed, update, part])

        prompts = _whole(habits.prompt_tokens.draw(rng(0), (self.groups,)))
        lengths = _whole(habits.response_tokens.draw(rng(1), rows))
        verifier = habits.verifier_s.draw(rng(2), rows)
        revises = rng(3).random(each) < habits.revise
        kept = np.clip(habits.kept.draw(rng(4), each), 0.0, 1.0)
        corrections = _whole(habits.correction_tokens.draw(rng(5), each), 0)
        seconds = habits.latency_s.draw(rng(6), each)
        written = _whole(habits.review_tokens.draw(rng(7), each))
        calls = np.floor(habits.calls + rng(8).random(each)).astype(np.int64)

        def luck(g: int, r: int) -> list[ReviewDraw]:
            return [
                ReviewDraw(
                    bool(revises[g, r, i]),
                    float(kept[g, r, i]),
                    int(corrections[g, r, i]),
                    float(seconds[g, r, i]),
                    max(1, int(calls[g, r, i])),
                    round(habits.review_extra_tokens),
                    int(written[g, r, i]),
                )
                for i in range(most)
            ]

        return [
            [
                script(
                    self.rules,
                    prompt=int(prompts[g]),
                    length=int(lengths[g, r]),
                    reviews=luck(g, r) if r >= self.n_control else (),
                    verifier_s=float(verifier[g, r]),
                )
                for r in range(self.group_size)
            ]
            for g in range(self.groups)
        ]


def _whole(numbers: npt.NDArray[np.float64], least: int = 1) -> npt.NDArray[np.int64]:
    return np.maximum(np.rint(numbers), least).astype(np.int64)
