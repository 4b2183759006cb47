"""How vLLM's answers are read: which tokens of an output are a chunk, and their log-probs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mintrl_env.adapters.slot_requests import Generate, Score
from mintrl_env.errors import PolicyError
from mintrl_env.types import Chunk, Finish, IdsLike

LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]


@dataclass(frozen=True, slots=True)
class Going:
    """A chunk that goes on; `seen` of its tokens were looked at."""

    seen: int


@dataclass(frozen=True, slots=True)
class Padded:
    """A chunk whose first token is none: to be drawn again."""


@dataclass(frozen=True, slots=True)
class Reader:
    """What has to be known to read answers.

    Attributes:
        eos_ids, vocab_size, decode: as in `VLLMEngine`.
        mode: what vLLM's log-probs are.
    """

    eos_ids: frozenset[int]
    vocab_size: int
    decode: Callable[[IdsLike], str] | None
    mode: LogprobsMode

    def chunk(self, ask: Generate, output: Any, seen: int, version: int) -> Chunk | Going | Padded:
        """What a `vllm.RequestOutput` says of a chunk.

        Args:
            seen: tokens that were looked at before, and end nothing.
            version: the policy_version of the chunk.

        Raises:
            PolicyError: vLLM gave up, or wrote something that is no continuation of just these ids.
        """
        written = output.outputs[0]
        end, finish = self._end(ask, written.token_ids, seen)
        if finish is None:
            if not output.finished:
                return Going(len(written.token_ids))
            if written.finish_reason != "length" or not len(written.token_ids):
                raise PolicyError(
                    f"vLLM ended the request with {written.finish_reason!r} "
                    f"({written.stop_reason!r}) after {len(written.token_ids)} tokens"
                )
            finish = Finish.LENGTH
        refuse_other_prompt(output, ask.ids)
        if end == 0:
            return Padded()
        ids = list(written.token_ids[:end])
        logprobs = logprobs_of(written.logprobs, ids)
        if not are_known(self.mode, ask.sampling.temperature):
            logprobs = None
        given = None if logprobs is None else logprobs.astype(np.float32)
        return Chunk(np.array(ids, dtype=np.int32), given, finish, version)

    def score(self, ask: Score, output: Any) -> npt.NDArray[np.float32]:
        """What a `vllm.RequestOutput` says of a prompt.

        Raises:
            PolicyError: vLLM gave up, or has read something else.
        """
        reason = output.outputs[0].finish_reason if output.outputs else None
        if reason not in ("length", "stop"):
            raise PolicyError(f"vLLM ended the request with {reason!r}")
        refuse_other_prompt(output, ask.ids)
        ids = ask.ids.tolist()
        # The entry of the first id is None, or empty: nothing stands before it.
        values = logprobs_of(output.prompt_logprobs, ids[ask.start :], ask.start)
        if values is None:
            raise PolicyError("vLLM gave no prompt_logprobs")
        return values.astype(np.float32)

    def _end(self, ask: Generate, ids: Sequence[int], seen: int) -> tuple[int, Finish | None]:
        """How many tokens belong to the chunk, and why it ends there if it does."""
        if len(ids) > ask.max_tokens:
            merged = list(ids[: len(ask.ids)]) == ask.ids.tolist()
            raise PolicyError(
                f"{len(ids)} tokens came where {ask.max_tokens} were asked for"
                + (": the prompt stands in front of them" if merged else "")
            )
        for at in range(seen, len(ids)):
            token = ids[at]
            if not 0 <= token < self.vocab_size:
                return at, Finish.LENGTH
            if token in self.eos_ids:
                return at + 1, Finish.EOS
            if ask.stop and self._completes_stop(ids[: at + 1], ask.stop):
                return at + 1, Finish.STOP
        return len(ids), None

    def _completes_stop(self, ids: Sequence[int], stop: tuple[str, ...]) -> bool:
        """Does the last of a chunk's tokens complete a stop string?"""
        assert self.decode is not None
        # A character takes at most four tokens, so an occurrence that the last token completes lies
        # in a window of this many; a hit there is confirmed on the whole chunk.
        window = 4 * max(len(s) for s in stop) + 4
        for start in sorted({max(0, len(ids) - window), 0}, reverse=True):
            text = self.decode(ids[start:])
            if not any(s in text for s in stop):
                return False
        return True


def are_known(mode: LogprobsMode, temperature: float) -> bool:
    """Are vLLM's log-probs those of the distribution that was sampled from?

    At temperature 0 those of temperature 1 are wanted, which both modes give.
    """
    return mode == "processed_logprobs" or temperature in (0.0, 1.0)


def refuse_other_prompt(output: Any, ids: npt.NDArray[np.int32]) -> None:
    """Raises PolicyError unless vLLM read just these ids."""
    read = output.prompt_token_ids
    if read is not None and not np.array_equal(np.asarray(read), ids):
        raise PolicyError(
            f"vLLM read {len(read)} ids where {len(ids)} were given, or others, so what it wrote "
            "continues something else"
        )


def logprobs_of(entries: Any, ids: Sequence[int], first: int = 0) -> npt.NDArray[np.float64] | None:
    """Log-probs of `ids`, from vLLM's `logprobs` or `prompt_logprobs`, flat or not.

    Args:
        entries: position `first + i` belongs to `ids[i]`, and there are no more after the last.

    Returns:
        float64, at most 0 (float32 may make a bit more), or None where vLLM gave none.

    Raises:
        PolicyError: entries of other tokens, or NaN.
    """
    if entries is None:
        return None
    if len(entries) < first + len(ids):
        raise PolicyError(f"{len(entries)} log-probs came for {first + len(ids)} tokens")
    values = np.empty(len(ids))
    flat = hasattr(entries, "start_indices")
    for at, token in enumerate(ids):
        value: Any
        if flat:  # the token itself comes first at its position
            place = entries.start_indices[first + at]
            filled = place < entries.end_indices[first + at]
            value = entries.logprobs[place] if filled else None
            found = filled and entries.token_ids[place] == token
        else:
            entry = (entries[first + at] or {}).get(token)
            found = entry is not None
            value = entry.logprob if entry is not None else None
        if not found:
            raise PolicyError(f"vLLM's log-probs belong to other tokens (at {at}, not {token})")
        values[at] = value
    if np.isnan(values).any():
        raise PolicyError(
            "the policy's logits are NaN: look at its weights (a diverged update?) and its dtype"
        )
    return np.minimum(values, 0.0)
