"""Spaces of ragged tokens and of any text, which Gymnasium's own are too slow or too narrow for.

`Sequence(Discrete)` takes tuples only and checks under 100 observations a second at 2k tokens;
`Text` wants its character set written out. Both spaces here check in constant or vectorised time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Space

from mintrl_env.errors import UsageError

_SAMPLED_TEXT = "".join(map(chr, range(32, 127))) + "\n"


class TokenIds(Space[npt.NDArray[np.int32]]):
    """Token ids of a vocabulary: int32 arrays of shape (n,), min_len <= n <= max_len.

    Args:
        vocab: number of ids; every id lies in [0, vocab).
        max_len: the most tokens.
        min_len: the fewest.
        last_only: ids that may stand at the end only, such as EOS.
        sample_len: the most tokens of a sample (max_len, where it is not given): uniform length,
            then uniform ids.
        seed: of the sampling.
    """

    def __init__(
        self,
        vocab: int,
        max_len: int,
        *,
        min_len: int = 0,
        last_only: Iterable[int] = (),
        sample_len: int | None = None,
        seed: int | np.random.Generator | None = None,
    ) -> None:
        if not 0 <= min_len <= max_len or vocab < 1:
            raise UsageError(
                f"TokenIds needs vocab >= 1 and 0 <= min_len <= max_len, not vocab = {vocab}, "
                f"min_len = {min_len}, max_len = {max_len}"
            )
        self.vocab = int(vocab)
        self.max_len = int(max_len)
        self.min_len = int(min_len)
        self.last_only = tuple(sorted({int(i) for i in last_only}))
        if len(self.last_only) >= self.vocab and max_len > 1:
            raise UsageError("every id is in last_only, so no array could have two tokens")
        self.sample_len = max(min_len, min(max_len, max_len if sample_len is None else sample_len))
        super().__init__(None, np.int32, seed)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def contains(self, x: Any) -> bool:
        if not isinstance(x, np.ndarray) or x.dtype != np.int32 or x.ndim != 1:
            return False
        if not self.min_len <= len(x) <= self.max_len:
            return False
        if not len(x):
            return True
        # As unsigned numbers negative ids are huge, so that one look checks both bounds.
        unsigned = x.view(np.uint32)
        if unsigned.item(unsigned.argmax()) >= self.vocab:
            return False
        return not any((x[:-1] == i).any() for i in self.last_only)

    def sample(self, mask: Any = None, probability: Any = None) -> npt.NDArray[np.int32]:
        """A random element. There is no mask for a ragged space: UsageError where one is given."""
        if mask is not None or probability is not None:
            raise UsageError("TokenIds.sample takes neither mask nor probability")
        length = int(self.np_random.integers(self.min_len, self.sample_len + 1))
        ids = self.np_random.integers(self.vocab, size=length, dtype=np.int32)
        inner = ids[:-1]
        while (misplaced := np.isin(inner, self.last_only)).any():
            inner[misplaced] = self.np_random.integers(self.vocab, size=int(misplaced.sum()))
        return ids

    def to_jsonable(self, sample_n: Iterable[npt.NDArray[np.int32]]) -> list[list[int]]:
        return [ids.tolist() for ids in sample_n]

    def from_jsonable(self, sample_n: Sequence[Any]) -> list[npt.NDArray[np.int32]]:
        return [np.array(ids, dtype=np.int32) for ids in sample_n]

    def _key(self) -> tuple[Any, ...]:
        return (self.vocab, self.min_len, self.max_len, self.last_only, self.sample_len)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenIds) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"TokenIds({self.vocab}, {self.max_len}, min_len={self.min_len})"


class UnicodeText(Space[str]):
    """Any text: strings of min_length to max_length characters. Samples are printable ASCII.

    Args:
        max_length: the most characters.
        min_length: the fewest.
        sample_length: the most characters of a sample (max_length, where it is not given).
        seed: of the sampling.
    """

    def __init__(
        self,
        max_length: int,
        *,
        min_length: int = 0,
        sample_length: int | None = None,
        seed: int | np.random.Generator | None = None,
    ) -> None:
        if not 0 <= min_length <= max_length:
            raise UsageError(
                f"UnicodeText needs 0 <= min_length <= max_length, not {min_length}, {max_length}"
            )
        self.max_length = int(max_length)
        self.min_length = int(min_length)
        wanted = max_length if sample_length is None else sample_length
        self.sample_length = max(min_length, min(max_length, wanted))
        super().__init__(None, None, seed)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and self.min_length <= len(x) <= self.max_length

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """A random element. There is no mask for free text: UsageError where one is given."""
        if mask is not None or probability is not None:
            raise UsageError("UnicodeText.sample takes neither mask nor probability")
        length = int(self.np_random.integers(self.min_length, self.sample_length + 1))
        places = self.np_random.integers(len(_SAMPLED_TEXT), size=length)
        return "".join(_SAMPLED_TEXT[int(place)] for place in places)

    def _key(self) -> tuple[int, ...]:
        return (self.min_length, self.max_length, self.sample_length)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnicodeText) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        return f"UnicodeText({self.max_length}, min_length={self.min_length})"
