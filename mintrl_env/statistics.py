"""Intervals and pass@k: what an evaluation may claim from a finite number of samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mintrl_env.errors import UsageError

Z95 = 1.959963984540054


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The unbiased estimate of pass@k from `correct` of `samples`: 1 - C(n - c, k) / C(n, k).

    Raises:
        UsageError: k is not within 1 to `samples`, or `correct` not within 0 to `samples`.
    """
    if not 1 <= k <= samples or not 0 <= correct <= samples:
        raise UsageError(f"pass@{k} of {correct} right in {samples} samples makes no sense")
    if samples - correct < k:
        return 1.0
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def wilson_interval(correct: float, total: int) -> tuple[float, float]:
    """The 95 % Wilson interval of a share of independent trials; (0, 1) for none."""
    if total == 0:
        return 0.0, 1.0
    share, z2 = correct / total, Z95**2
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = Z95 / (1 + z2 / total) * math.sqrt(share * (1 - share) / total + z2 / (4 * total**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(
    values: Sequence[float], *, seed: int = 0, draws: int = 4000
) -> tuple[float, float]:
    """The 95 % bootstrap interval of a mean over problems (percentiles).

    Pass one value a problem (its mean over samples, or a paired difference), since samples of one
    problem are not independent.
    """
    data = np.asarray(values, dtype=np.float64)
    if not len(data):
        raise UsageError("an interval of no values")
    generator = np.random.default_rng(seed)
    means = np.concatenate(
        [
            data[generator.integers(0, len(data), size=(min(500, draws - at), len(data)))].mean(1)
            for at in range(0, draws, 500)
        ]
    )
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)
