"""A policy behind a model server: ids in, ids out, as the engine in process gives them.

    client = ModelClient("http://host:8000/v1", breaker=None)
    policy = ServerPolicy(client, "model", tokenizer, wire="vllm_completions")

What servers do and a policy must not: sample rows of the embedding that are no tokens, put a BOS in
front of the prompt or cut it, take top_p from a file, end at an EOS that is not the tokenizer's, tell
log-probs of another temperature, write past a stop string. Each is prevented, mended or refused here.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mintrl_env.adapters.llm_client import Body, ModelClient
from mintrl_env.adapters.llm_faults import CallFailed
from mintrl_env.adapters.policy_wires import (
    Ask,
    LlamaCpp,
    LogprobsMode,
    Wire,
    WireName,
    Written,
    wire_for,
)
from mintrl_env.errors import PolicyError, UsageError
from mintrl_env.keys import RowKey
from mintrl_env.protocols import Sampling, Tokenizer
from mintrl_env.types import Chunk, Finish, IdsLike

T = TypeVar("T")
_log = logging.getLogger(__name__)
_DEFAULT = Sampling()
_PADDED_TRIES = 3
_LISTED = 1000  # likeliest tokens to look for one that llama.cpp has no entry of its own for


class ServerPolicy:
    """Policy and Scorer over HTTP.

    Sampling is the server's: the seed of a chunk follows from its row and draw, so that a chunk asked
    for again draws the same, as far as the server's arithmetic does not depend on its batch.

    Args:
        client: the server. Without a breaker, unless failed rows cost less than waiting.
        model: the name by which the server knows the model.
        tokenizer: the model's. Ids from its `vocab_size` on are no tokens, its `eos_ids` end a
            response.
        wire: see `policy_wires`.
        logprobs_mode: vLLM's --logprobs-mode; with "raw", its default, the log-probs of a
            temperature other than 1 (or 0) are not known, and are NaN.
        seeded: send seeds; without them vLLM samples somewhat faster.
        policy_version: stamped on the chunks of requests that begin from now on. vLLM's prefix cache
            is kept apart by it, so that no KV of older weights is used.
    """

    def __init__(
        self,
        client: ModelClient,
        model: str,
        tokenizer: Tokenizer,
        *,
        wire: WireName = "vllm_completions",
        logprobs_mode: LogprobsMode = "raw",
        seeded: bool = True,
        policy_version: int = 0,
    ) -> None:
        self.client, self.model, self.tokenizer = client, model, tokenizer
        self.policy_version = policy_version
        self._wire = wire_for(wire, logprobs_mode)
        self._seeded = seeded
        self._foreign_ends: set[int] = set()
        self._called: str | None = None  # the model, by the server's first reply

    def __repr__(self) -> str:
        return f"ServerPolicy({self.client.base_url!r}, {self.model!r})"

    async def generate(
        self,
        ids: npt.NDArray[np.int32],
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        sampling: Sampling = _DEFAULT,
        key: RowKey,
    ) -> Chunk:
        """Continue `ids` by 1 to `max_tokens` tokens (see `protocols.Policy`).

        Log-probs are those of the sampling temperature (of 1 at temperature 0), or NaN.

        Raises:
            UsageError: no ids, ids that the model has not, an empty stop string.
            PolicyError: no answer, or one that is no continuation of just these ids.
        """
        if max_tokens < 1:
            raise UsageError(f"max_tokens must be >= 1, not {max_tokens} (row {key.row})")
        if "" in stop:
            raise UsageError("an empty stop string would stop everywhere")
        version = self.policy_version
        row = key.philox_key().tobytes().hex()
        ask = Ask(
            self.model,
            self._checked(ids),
            max_tokens,
            tuple(stop),
            sampling.temperature,
            tuple(sorted(self.tokenizer.eos_ids)),
            row=row,
            salt=f"v{version}",
        )
        for attempt in range(_PADDED_TRIES):
            if self._seeded:
                ask = replace(ask, seed=_seed(row, key.draw, attempt))
            written = await self._written(ask, f"{row}-{key.draw}-{attempt}")
            count = self._tokens_before_padding(written.ids)
            if count:
                return self._chunk(written, count, ask, version)
        raise PolicyError(
            f"{self}: {_PADDED_TRIES} times the first token was an id from {self._vocab} on, which "
            "is none of the tokenizer's: are these the model and its tokenizer?"
        )

    async def logprobs(
        self, ids: npt.NDArray[np.int32], start: int, *, key: RowKey | None = None
    ) -> npt.NDArray[np.float32]:
        """Log-probs (temperature 1) of `ids[start:]`, each given all before it, float32.

        One request with vLLM; with llama.cpp, which scores no prompts, one for each id, and NaN where
        an id that leaves a character unfinished is not among the 1000 likeliest.

        Raises:
            UsageError: `start` not in 1 to len(ids), ids that the model has not.
            PolicyError: no answer.
        """
        checked = self._checked(ids)
        if not 1 <= start <= len(checked):
            raise UsageError(f"start must be 1 to {len(checked)} (the ids given), not {start}")
        if start == len(checked):
            return np.zeros(0, dtype=np.float32)
        row = key.philox_key().tobytes().hex() if key is not None else ""
        if isinstance(self._wire, LlamaCpp):
            scores = await self._forced(self._wire, checked, start, row)
        else:
            scores = await self._scored(checked, row)
            scores = scores[start - 1 :]
        return np.array(scores, dtype=np.float32)

    # -- requests --------------------------------------------------------------------------------

    async def _written(self, ask: Ask, name: str) -> Written:
        written = await self._call(
            self._wire,
            lambda: self._wire.body(ask),
            lambda reply: self._wire.read(reply, ask),
            prompt_tokens=len(ask.ids),
            max_tokens=ask.max_tokens,
            row=ask.row,
            request=name,
        )
        self._refuse_other_prompt(written, ask)
        self._refuse_other_weights(written)
        return written

    async def _scored(self, ids: npt.NDArray[np.int32], row: str) -> list[float]:
        ask = Ask(self.model, ids, 1, (), 0.0, (), row=row, salt=f"v{self.policy_version}")
        return await self._call(
            self._wire,
            lambda: self._wire.score_body(ask),
            lambda reply: self._wire.read_scores(reply, ask),
            prompt_tokens=len(ids),
            row=row,
        )

    async def _forced(
        self, wire: LlamaCpp, ids: npt.NDArray[np.int32], start: int, row: str
    ) -> list[float]:
        scores = []
        for at in range(start, len(ids)):  # in turn: each finds the KV of the one before
            token = int(ids[at])
            score = await self._call(
                wire,
                partial(wire.force_body, ids[:at], token),
                partial(wire.read_forced, token=token),
                prompt_tokens=at,
                row=row,
            )
            if score is None:
                eos = min(self.tokenizer.eos_ids)
                score = await self._call(
                    wire,
                    partial(wire.force_body, ids[:at], eos, _LISTED),
                    partial(wire.read_listed, token=token),
                    prompt_tokens=at,
                    row=row,
                )
            scores.append(score)
        return scores

    async def _call(
        self,
        wire: Wire,
        body: Body,
        read: Callable[[Any], T],
        *,
        prompt_tokens: int,
        max_tokens: int = 1,
        row: str,
        request: str = "",
    ) -> T:
        try:
            result, _ = await self.client.call(
                wire.path,
                body,
                read,
                prompt_tokens=prompt_tokens,
                max_tokens=max_tokens,
                row=row,
                request=request,
            )
        except CallFailed as error:
            raise PolicyError(f"{error.cause}: {error}") from error
        return result

    # -- replies ---------------------------------------------------------------------------------

    @property
    def _vocab(self) -> int:
        return self.tokenizer.vocab_size

    def _checked(self, ids: IdsLike) -> npt.NDArray[np.int32]:
        array = np.asarray(ids)
        if array.ndim != 1 or not len(array) or array.dtype.kind not in "iu":
            raise UsageError("ids are one row of integers, at least one")
        if array.min() < 0 or array.max() >= self._vocab:
            raise UsageError(
                f"ids must be 0 to {self._vocab - 1}, not {array.min()} to {array.max()}"
            )
        return array.astype(np.int32)

    def _refuse_other_prompt(self, written: Written, ask: Ask) -> None:
        read = written.prompt_tokens
        if written.prompt_ids is not None:
            same, read = written.prompt_ids == ask.ids.tolist(), len(written.prompt_ids)
        else:
            same = read is None or read == len(ask.ids)
        if not same:
            raise PolicyError(
                f"{self}: the server read {read} ids where {len(ask.ids)} were sent, or others: it "
                "adds a BOS or cuts the prompt, so that what it writes continues something else"
            )
        merged = written.ids[: len(ask.ids)] == ask.ids.tolist()
        if len(written.ids) > ask.max_tokens:
            raise PolicyError(
                f"{self}: {len(written.ids)} tokens came where {ask.max_tokens} were asked for"
                + (": the prompt stands in front of them (echo?)" if merged else "")
            )
        # A policy may say its prompt again; by the server's own count it has not written that much.
        told = written.completion_tokens
        if merged and told is not None and told <= len(written.ids) - len(ask.ids):
            raise PolicyError(
                f"{self}: {len(written.ids)} tokens came where the server counts {told}: the prompt "
                "stands in front of them (echo?)"
            )

    def _refuse_other_weights(self, written: Written) -> None:
        if len(written.versions) > 1:
            raise PolicyError(
                f"{self}: one chunk was written by the weights {', '.join(written.versions)}: pause "
                "the server while it takes new ones (vllm_sync)"
            )
        if written.model is None:
            return
        if self._called is None:
            self._called = written.model
        elif written.model != self._called:
            raise PolicyError(
                f"{self}: the server calls its model {written.model!r} now and called it "
                f"{self._called!r} before: was it restarted with another one?"
            )

    def _tokens_before_padding(self, ids: Sequence[int]) -> int:
        """How many ids come before one that is no token: rows that pad the embedding are sampled."""
        bad = (at for at, i in enumerate(ids) if not 0 <= i < self._vocab)
        return next(bad, len(ids))

    def _chunk(self, written: Written, count: int, ask: Ask, version: int) -> Chunk:
        """The first `count` tokens, up to the first EOS or the end of the first stop string."""
        ids = written.ids[:count]
        eos = self.tokenizer.eos_ids
        end = next((at + 1 for at, i in enumerate(ids) if i in eos), None)
        finish = Finish.LENGTH if end is None else Finish.EOS
        ids = ids[:end]
        # Looked for in the chunk's own text, as in the engine in process; the server's may differ.
        stopped = _end_of_stop(self.tokenizer, ids, ask.stop)
        if stopped is not None and (finish is not Finish.EOS or stopped < len(ids)):
            ids, finish = ids[:stopped], Finish.STOP
        elif finish is Finish.LENGTH and count == len(written.ids):
            if written.stopped == "string" and ask.stop:
                finish = Finish.STOP
            elif written.stopped != "length":
                self._note_foreign_end(ids[-1])
        logprobs = written.logprobs[: len(ids)] if written.logprobs is not None else None
        given = None if logprobs is None else np.array(logprobs, dtype=np.float32)
        return Chunk(np.array(ids, dtype=np.int32), given, finish, version)

    def _note_foreign_end(self, token: int) -> None:
        if token not in self._foreign_ends:
            self._foreign_ends.add(token)
            _log.warning(
                "%r ended at id %d, which does not end a response for the tokenizer, so the episode "
                "goes on. If it should, give it: HFTokenizer(tokenizer, extra_eos=[%d])",
                self,
                token,
                token,
            )


def _seed(row: str, draw: int, attempt: int) -> int:
    text = f"{row} {draw} {attempt}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _end_of_stop(tokenizer: Tokenizer, ids: list[int], stop: Sequence[str]) -> int | None:
    """How many ids it takes until their text holds a stop string; None: it never does."""

    def holds(count: int) -> bool:
        text = tokenizer.decode(ids[:count])
        return any(string in text for string in stop)

    if not stop or not holds(len(ids)):
        return None
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low
