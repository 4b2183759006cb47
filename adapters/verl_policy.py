"""veRL's server manager as a policy: ids in, ids out. Nothing here imports veRL.

How a server ended is not asked: veRL says "completed" for an end of sequence and for a limit alike,
so the last id tells. The client takes one request id for all chunks of a trajectory, which keeps
them on one server and its prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mintrl_env.errors import PolicyError, UsageError
from mintrl_env.keys import RowKey
from mintrl_env.protocols import Sampling, Tokenizer
from mintrl_env.types import Chunk, Finish

_VERSION = "global_steps"


class ServerManagerPolicy:
    """Policy over `LLMServerClient.generate`.

    Args:
        manager: veRL's client (or anything with its `generate`).
        tokenizer: the policy's; its `eos_ids` end a response, ids from its `vocab_size` on are none.
        params: veRL's sampling parameters of the batch; the temperature is the driver's.
    """

    def __init__(self, manager: Any, tokenizer: Tokenizer, params: Mapping[str, Any]) -> None:
        self._manager, self._tokenizer = manager, tokenizer
        self._params = dict(params)

    async def generate(
        self,
        ids: npt.NDArray[np.int32],
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        sampling: Sampling,
        key: RowKey,
    ) -> Chunk:
        """Continue `ids` by 1 to `max_tokens` tokens (see `protocols.Policy`).

        Raises:
            UsageError: stop strings, whose end is a place in the text and not between tokens.
            PolicyError: the request was aborted, or the first id is none of the tokenizer's.
        """
        if stop:
            raise UsageError("stop strings (episode.stop) are not offered under veRL")
        ends = sorted(self._tokenizer.eos_ids)
        answer = await self._manager.generate(
            request_id=key.philox_key().tobytes().hex(),
            prompt_ids=[int(i) for i in ids],
            sampling_params={
                **self._params,
                "temperature": sampling.temperature,
                "max_tokens": max_tokens,
                "stop_token_ids": ends,  # also where the model's own list is another
                "logprobs": True,
            },
        )
        written = [int(i) for i in answer.token_ids][:max_tokens]
        count = self._count(written)
        if not count:
            raise PolicyError(
                f"row {key.row}: the server wrote {'no token' if not written else 'no known token'} "
                f"(stop reason {answer.stop_reason!r})"
            )
        version = (answer.extra_fields or {}).get(_VERSION)
        return Chunk(
            written[:count],
            _logprobs(answer.log_probs, count),
            Finish.EOS if written[count - 1] in self._tokenizer.eos_ids else Finish.LENGTH,
            weights_version(key.update) if version is None else int(version),
        )

    def _count(self, written: Sequence[int]) -> int:
        """Tokens up to the first EOS, which counts, or the first id that is none."""
        for place, token in enumerate(written):
            if not 0 <= token < self._tokenizer.vocab_size:
                return place
            if token in self._tokenizer.eos_ids:
                return place + 1
        return len(written)


def weights_version(update: int) -> int:
    """The version of veRL's weights that write the rows of an update; evaluation -1 - s is by s."""
    return update if update >= 0 else -1 - update


def _logprobs(given: Sequence[float] | None, count: int) -> npt.NDArray[np.float32] | None:
    """Sampling log-probs, diagnostics only; None where the server gave none."""
    if not given or len(given) < count:
        return None
    return np.asarray(given[:count], dtype=np.float32)
