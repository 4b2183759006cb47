"""The log of an episode: who appended which tokens. Ids, provenance and log-probs are views of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from mintrl_env.types import Provenance, frozen_logprobs

_Scalar = TypeVar("_Scalar", bound=np.generic)


class Segment(NamedTuple):
    """One entry of the log: tokens by one author, appended at once."""

    ids: npt.NDArray[np.int32]
    provenance: Provenance
    logprobs: npt.NDArray[np.float32]
    policy_version: int


class EventLog:
    """Segments in the order in which they were appended; nothing is ever taken out.

    The arrays are read-only and grow with the log: asking twice costs nothing.
    """

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self._arrays: dict[str, tuple[npt.NDArray[Any], int]] = {}  # and the segments in them
        self.length = 0  # tokens

    def __len__(self) -> int:
        return self.length

    def append(
        self,
        ids: npt.NDArray[np.int32],
        provenance: Provenance,
        policy_version: int,
        logprobs: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """Append frozen arrays, which the log shares; an empty one leaves no trace."""
        count = len(ids)
        if count:
            if logprobs is None:
                logprobs = frozen_logprobs(None, count)
            elif len(logprobs) != count:
                logprobs = logprobs[:count]
            self.segments.append(Segment(ids, provenance, logprobs, policy_version))
            self.length += count

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """The accepted response, int32 (N,), read-only as all of these are."""
        return self._view("ids", np.int32, lambda s: s.ids)

    @property
    def provenance(self) -> npt.NDArray[np.int8]:
        """Who wrote each accepted token, int8 (N,)."""
        return self._view("provenance", np.int8, lambda s: np.full(len(s.ids), s.provenance))

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """Sampling log-probs, float32 (N,), NaN where the policy did not sample."""
        return self._view("logprobs", np.float32, lambda s: s.logprobs)

    @property
    def policy_versions(self) -> npt.NDArray[np.int32]:
        """The weights at work when each token was written, int32 (N,)."""
        return self._view("versions", np.int32, lambda s: np.full(len(s.ids), s.policy_version))

    def _view(
        self, name: str, dtype: type[_Scalar], part: Callable[[Segment], npt.NDArray[Any]]
    ) -> npt.NDArray[_Scalar]:
        array: npt.NDArray[_Scalar]
        array, seen = self._arrays.get(name) or (np.empty(0, dtype=dtype), 0)
        if seen < len(self.segments) or not seen:  # the log only grows, and so do its views
            parts = [array, *map(part, self.segments[seen:])]
            array = np.concatenate(parts, dtype=dtype, casting="same_kind")
            array.flags.writeable = False
            self._arrays[name] = (array, len(self.segments))
        return array
