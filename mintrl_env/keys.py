"""Keyed draws: which uniform number decides which token, whoever else is in the batch.

Every policy token of a run takes one number u in [0, 1) from a Philox stream that depends on the
row alone (seed, update, task, rollout, retry) and on `draw`, the count of policy tokens sampled in
the row so far, dropped ones included. So a batch's composition, a judge's latency or a resume does
not change what is sampled, and a cut leads to a new attempt at the step.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from mintrl_env.errors import PolicyError, UsageError

_BLOCK = 64


@dataclass(frozen=True, slots=True)
class RowKey:
    """Names one row (episode) of a run and the next draw in it.

    Attributes:
        seed: the run's seed.
        update: index of the update, from 0; evaluations use negative numbers.
        task_id: the task's id.
        rollout: index of the trajectory in its group.
        retry: how often the row was started again after a failure.
        draw: policy tokens sampled so far in the row, dropped ones included.
    """

    seed: int
    update: int
    task_id: str
    rollout: int
    retry: int = 0
    draw: int = 0

    def at(self, draw: int) -> RowKey:
        """The same row at another draw."""
        return replace(self, draw=draw)

    @property
    def row(self) -> tuple[int, int, str, int, int]:
        """What identifies the row; equal for every draw, so engines file a row's KV under it."""
        return (self.seed, self.update, self.task_id, self.rollout, self.retry)

    def philox_key(self) -> np.ndarray:
        """The row's 128-bit Philox key, as two uint64."""
        text = "\x1f".join(str(part) for part in self.row)
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def uniforms(key: RowKey, count: int) -> np.ndarray:
    """The numbers for draws `key.draw` to `key.draw + count - 1`.

    Returns:
        float64 array of shape (count,), values in [0, 1). Any split of a row's draws into calls
        gives the same numbers.

    Raises:
        UsageError: a negative draw or count.
    """
    if key.draw < 0 or count < 0:
        raise UsageError(f"draws count from 0: no {count} draw(s) from {key.draw} on")
    first, last = key.draw // _BLOCK, (key.draw + max(count, 1) - 1) // _BLOCK
    philox_key = key.philox_key()
    # The block's number goes into the counter's second word, so that blocks never overlap.
    blocks = [
        np.random.Philox(
            key=philox_key, counter=np.array([0, block, 0, 0], dtype=np.uint64)
        ).random_raw(_BLOCK)
        for block in range(first, last + 1)
    ]
    start = key.draw - first * _BLOCK
    # The upper 53 bits, as doubles: numpy keeps raw streams for ever, but not those of Generator.
    bits = np.concatenate(blocks)[start : start + count] >> np.uint64(11)
    return bits * 2.0**-53


def inverse_cdf(probs_V: np.ndarray, u: float) -> int:
    """The token id that `u` selects from a distribution, in float64.

    Args:
        probs_V: probabilities, shape (V,); need not sum to exactly 1.
        u: a number in [0, 1).

    Raises:
        PolicyError: no token has a probability, or one is NaN, infinite or negative.
    """
    cdf_V = np.cumsum(probs_V, dtype=np.float64)
    if not (len(cdf_V) and 0 < cdf_V[-1] < np.inf and np.min(probs_V) >= 0):
        raise PolicyError("the policy's probabilities are not a distribution (NaN in its logits?)")
    index = int(np.searchsorted(cdf_V, u * cdf_V[-1], side="right"))
    # u * total may round up to the total: step back onto the last token with any probability.
    return index if index < len(cdf_V) else int(np.flatnonzero(probs_V)[-1])
