"""The two kinds of request that a slot engine serves."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mintrl_env.adapters.pump import Request
from mintrl_env.adapters.slot_table import Row
from mintrl_env.keys import RowKey
from mintrl_env.protocols import Sampling


class Ask(Request):
    """What both kinds of request hold: the sequence, and the row whose KV may serve it."""

    __slots__ = ("ids", "key", "row")

    def __init__(self, ids: npt.NDArray[np.int32], key: RowKey | None) -> None:
        super().__init__()
        self.ids, self.key = ids, key
        self.row: Row | None = None if key is None else key.row

    @property
    def target(self) -> int:
        """Tokens of `ids` that the KV has to hold before the first logits that count."""
        raise NotImplementedError


class Generate(Ask):
    """Continue `ids` by up to `max_tokens` tokens."""

    __slots__ = ("max_tokens", "sampling", "stop")

    def __init__(
        self,
        ids: npt.NDArray[np.int32],
        key: RowKey,
        max_tokens: int,
        stop: tuple[str, ...],
        sampling: Sampling,
    ) -> None:
        super().__init__(ids, key)
        self.max_tokens, self.stop, self.sampling = max_tokens, stop, sampling

    @property
    def target(self) -> int:
        return len(self.ids) - 1  # the last token is the first input of the common step


class Score(Ask):
    """Log-probs of `ids[start:]`."""

    __slots__ = ("start",)

    def __init__(self, ids: npt.NDArray[np.int32], key: RowKey | None, start: int) -> None:
        super().__init__(ids, key)
        self.start = start

    @property
    def target(self) -> int:
        return self.start - 1  # the logits after token start - 1 are the first that count
