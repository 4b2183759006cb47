"""vLLM as the policy's engine, in this process: `add_request` and `step`, driven by the pump.

    engine = VLLMEngine(load_vllm(folder, max_length=4096), eos_ids=..., vocab_size=..., decode=...)
    ...                                           # rollouts, as with any engine
    engine.load_weights(checkpoint_weights(model), version=update + 1)

It sleeps and gets weights between two pumps only, never between two chunks. What vLLM does that a
policy must not is prevented, mended or refused here and in `vllm_requests`: it samples rows of the
embedding that are no tokens, tells log-probs of another temperature, changes one near 0, keeps its
prefix cache over a change of weights, and files blocks there whose forward has failed.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mintrl_env.adapters.pump import Inbox, Rounds, deliver, unserved
from mintrl_env.adapters.slot_requests import Ask, Generate, Score
from mintrl_env.adapters.vllm_answers import Going, Padded, Reader
from mintrl_env.adapters.vllm_core import Core, SleepLevel, Weights, failure
from mintrl_env.adapters.vllm_engine import checked_engine, load_vllm
from mintrl_env.adapters.vllm_requests import (
    check_temperature,
    generate_params,
    prompt_for,
    row_name,
    score_params,
    seed_of,
    vllm_package,
)
from mintrl_env.errors import PolicyError, UsageError
from mintrl_env.keys import RowKey
from mintrl_env.protocols import Sampling
from mintrl_env.types import Chunk, IdsLike, frozen_ids

if TYPE_CHECKING:
    from mintrl_env.adapters.session import EngineHost

_DEFAULT = Sampling()
_PADDED_TRIES = 3


@dataclass(slots=True)
class _Open:
    """A request that vLLM is at work on."""

    ask: Ask
    attempt: int
    version: int
    seen: int = 0  # tokens that were looked at


class VLLMEngine:
    """Policy and Scorer over a `vllm.LLMEngine` in this process.

    `generate` and `logprobs` may be awaited on any event loop; they are served while a pump
    (`pump.run_pump`, `pump.run_with_pump`) runs in the thread that owns the engine.

    Sampling is vLLM's: the seed of a chunk follows from its row and draw, so that a chunk asked for
    again draws the same, as far as vLLM's arithmetic does not depend on its batch.

    Args:
        llm: a `vllm.LLMEngine`, or a `vllm.LLM` that nobody else uses (see `load_vllm`).
        eos_ids: ids that end a response; with none, only lengths and stop strings do.
        vocab_size: the tokenizer's; ids from here on (rows that pad the embedding) are no tokens. A
            chunk ends before one. They keep their share in vLLM's log-probs.
        decode: text of ids, needed for stop strings only.
        rounds: requests are begun together (see `pump.Rounds`). vLLM's batches are not bit-exact.
        policy_version: stamped on chunks; setting another one drops the prefix cache.
        sleep: what vLLM gives up between pumps: nothing; 1: KV, with the weights moved to the host;
            2: KV and weights, which then have to be loaded before each pump. Needs an engine made
            with `enable_sleep_mode`.
        seeded: send seeds; without them vLLM samples somewhat faster.

    Raises:
        UsageError: an engine that cannot be used so, or arguments out of range.
    """

    def __init__(
        self,
        llm: Any,
        *,
        eos_ids: Collection[int],
        vocab_size: int,
        decode: Callable[[IdsLike], str] | None = None,
        rounds: Rounds | None = None,
        policy_version: int = 0,
        sleep: SleepLevel = 0,
        seeded: bool = True,
    ) -> None:
        self._vllm = vllm_package()
        llm, facts = checked_engine(llm, vocab_size=vocab_size, sleep=sleep)
        self._core = Core(llm, sleep)
        if not all(0 <= i < vocab_size for i in eos_ids):
            raise UsageError(f"eos_ids {sorted(eos_ids)} must be ids below vocab_size {vocab_size}")
        self.vocab_size, self.max_length = vocab_size, facts.max_length
        self.rounds = rounds
        self._reader = Reader(frozenset(eos_ids), vocab_size, decode, facts.logprobs_mode)
        self._policy_version = policy_version
        self._seeded = seeded
        self._inbox = Inbox()
        if rounds is not None:
            rounds.join(self._inbox)
        self._answers: list[tuple[Ask, Any]] = []
        self._held: list[Ask] = []
        self._queue: deque[Ask] = deque()
        self._open: dict[str, _Open] = {}
        self._pumped = False

    # -- what a caller sees ----------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        if version != self._policy_version:
            self.reset()
        self._policy_version = version

    def reset(self) -> None:
        """Drop the prefix cache, as after a change of weights (`load_weights` does it itself).

        Raises:
            UsageError: rows are being written at this moment.
            PolicyError: vLLM does not let go of it.
        """
        if self._open:
            raise UsageError(
                f"reset with {len(self._open)} rows at work; end the pump before weights change"
            )
        self._core.drop_cache()

    def load_weights(self, weights: Weights, *, version: int | None = None) -> None:
        """Give vLLM new weights, between two pumps, and drop what was computed with the old.

        Args:
            weights: (name, tensor) pairs as in the model's checkpoint (see `checkpoint_weights`), all
                of them, for an engine wholly in this process; or a folder to read them from.
            version: the `policy_version` from now on; None leaves it.

        Raises:
            UsageError: the pump runs, or tensors for an engine in another process.
            PolicyError: vLLM failed; what it holds now is unknown, so nothing is written until
                weights have been loaded.
        """
        if self._pumped:
            raise UsageError("weights change between two pumps, and this engine is being pumped")
        self._core.load_weights(weights)
        if version is not None:
            self._policy_version = version

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

        Log-probs are those of the sampling temperature (of 1 at temperature 0), or NaN where vLLM's
        `logprobs_mode` does not give them. Stop strings are looked for in the chunk's own text and
        end the chunk with the token that completes one.

        Raises:
            UsageError: no room for `max_tokens` within `max_length`, ids that are no tokens, `stop`
                without `decode`, a temperature between 0 and 0.01.
            PolicyError: vLLM failed, or the pump ended.
        """
        array = self._checked(ids)
        if key.draw < 0:
            raise UsageError(f"draws count from 0, not {key.draw} (row {key.row})")
        if max_tokens < 1:
            raise UsageError(f"max_tokens must be >= 1, not {max_tokens} (row {key.row})")
        if len(array) + max_tokens > self.max_length:
            raise UsageError(
                f"row {key.row}: {len(array)} tokens and max_tokens {max_tokens} exceed vLLM's "
                f"max_model_len {self.max_length}; raise it, or shorten the prompt"
            )
        stop = tuple(stop)
        if "" in stop:
            raise UsageError("an empty stop string would stop everywhere")
        if stop and self._reader.decode is None:
            raise UsageError("stop strings need the engine's `decode`, which was not given")
        check_temperature(sampling.temperature)
        chunk: Chunk = await self._inbox.ask(Generate(array, key, max_tokens, stop, sampling))
        return chunk

    async def logprobs(
        self, ids: npt.NDArray[np.int32], start: int, *, key: RowKey | None = None
    ) -> npt.NDArray[np.float32]:
        """Log-probs (temperature 1) of `ids[start:]`, each given all before it, float32.

        vLLM reads the whole prompt anew for it, whatever its prefix cache holds.

        Raises:
            UsageError: `start` not in 1 to len(ids), `max_length` ids or more (vLLM writes one token
                with it), no key in rounds.
            PolicyError: vLLM failed, or the pump ended.
        """
        array = self._checked(ids)
        if not 1 <= start <= len(array):
            raise UsageError(f"start must be 1 to {len(array)} (the ids given), not {start}")
        if len(array) >= self.max_length:
            raise UsageError(
                f"{len(array)} tokens and one that vLLM has to write exceed its max_model_len "
                f"{self.max_length}"
            )
        if key is None and self.rounds is not None:
            raise UsageError("in rounds every request needs a key: it decides the order")
        if start == len(array):
            return np.zeros(0, dtype=np.float32)
        scores: npt.NDArray[np.float32] = await self._inbox.ask(Score(array, key, start))
        return scores

    def _checked(self, ids: IdsLike) -> npt.NDArray[np.int32]:
        array = frozen_ids(ids)
        if not len(array):
            raise UsageError("no token to go on from: ids is empty")
        if array.min() < 0 or array.max() >= self.vocab_size:
            raise UsageError(
                f"ids must be 0 to {self.vocab_size - 1}, not {array.min()} to {array.max()}"
            )
        return array

    # -- what the pump calls ---------------------------------------------------------------------

    @contextmanager
    def pumping(self, wake: threading.Event) -> Iterator[None]:
        """vLLM awake, with weights; on the way out everything open is failed, and vLLM may sleep."""
        if self._pumped:
            raise UsageError("this engine is being pumped already")
        self._core.check_usable()
        self._pumped = True
        try:
            self._core.wake("weights", "kv_cache")
            self._inbox.wake = wake
            yield
        except BaseException:
            self._abandon(interrupted=True)
            raise
        finally:
            self._pumped = False
            self._abandon()
        self._core.fall_asleep()

    def drain(self) -> None:
        arrived, any_cancelled = self._inbox.drain()
        (self._held if self.rounds is not None else self._queue).extend(arrived)
        if any_cancelled:
            self._held = [ask for ask in self._held if not ask.cancelled]
            self._queue = deque(ask for ask in self._queue if not ask.cancelled)
            self._abort([name for name, one in self._open.items() if one.ask.cancelled])

    @property
    def held(self) -> Sequence[Ask]:
        return self._held

    @property
    def in_round(self) -> bool:
        return bool(self._queue or self._open)

    def begin_round(self) -> None:
        def order(ask: Ask) -> tuple[Any, ...]:
            assert ask.key is not None
            return (ask.row, ask.key.draw, type(ask).__name__, ask.target, ask.ids.tobytes())

        self._queue.extend(sorted(self._held, key=order))
        self._held = []

    def turn(self, forwards: int) -> bool:
        self.drain()
        if not self.in_round:
            return False
        while self._queue:
            self._add(self._queue.popleft())
        for _ in range(forwards):
            if not self._open:
                break
            self._step()
        self._deliver()
        return True

    def _deliver(self) -> None:
        answers, self._answers = self._answers, []
        deliver(answers)

    def _abandon(self, interrupted: bool = False) -> None:
        """Fail what is open: nobody will serve it."""
        self.drain()
        left = [*(one.ask for one in self._open.values()), *self._queue, *self._held]
        self._answers.extend((ask, unserved(type(self).__name__)) for ask in left)
        self._queue.clear()
        self._held = []
        self._abort(list(self._open))
        self._deliver()
        if interrupted:  # a step may be half done, and its blocks filed as if they were computed
            self._core.distrust(None)

    # -- vLLM ------------------------------------------------------------------------------------

    def _add(self, ask: Ask, attempt: int = 0) -> None:
        """Hand a request to vLLM; what is wrong with it is its own failure."""
        if self._core.broken is not None:
            self._answers.append((ask, self._core.given_up()))
            return
        row = row_name(ask)
        base = f"{row or 'no-row'}-score"
        if isinstance(ask, Generate):
            assert ask.key is not None
            base = f"{row}-{ask.key.draw}-{attempt}"
        name, others = base, 0
        while name in self._open:
            others += 1
            name = f"{base}.{others}"
        try:
            prompt = prompt_for(ask.ids, f"v{self._policy_version}")
            self._core.llm.add_request(name, prompt, self._params(ask, row, attempt))
        except Exception as error:
            self._core.abort([name])  # vLLM may have put down half of it
            self._answers.append((ask, failure("vLLM did not take the request", error)))
        else:
            self._open[name] = _Open(ask, attempt, self._policy_version)

    def _params(self, ask: Ask, row: str, attempt: int) -> Any:
        if not isinstance(ask, Generate):
            return score_params(self._vllm)
        assert ask.key is not None
        seed = seed_of(row, ask.key.draw, attempt) if self._seeded else None
        return generate_params(self._vllm, ask, self._reader.eos_ids, seed=seed)

    def _abort(self, names: Sequence[str]) -> None:
        for name in names:
            del self._open[name]
        self._core.abort(names)

    def _step(self) -> None:
        """One token, or a piece of a prompt, for every row."""
        if self._core.broken is not None:
            self._fail_open(self._core.given_up)
            return
        try:
            outputs = self._core.step()
        except Exception as error:
            # Whose fault it was cannot be told, so all that vLLM had fail; others go on.
            self._fail_open(partial(failure, "a step of vLLM failed", error))
            self._core.distrust(error)
            return
        for output in outputs:
            one = self._open.get(output.request_id)
            if one is not None:  # else it was cancelled meanwhile
                self._take(output.request_id, one, output)
        if self._open and not outputs and not self._core.llm.has_unfinished_requests():
            lost = "vLLM has lost the request: it ended without an answer"
            self._fail_open(partial(PolicyError, lost))

    def _fail_open(self, error: Callable[[], PolicyError]) -> None:
        self._answers.extend((one.ask, error()) for one in self._open.values())
        self._abort(list(self._open))

    # -- answers ---------------------------------------------------------------------------------

    def _take(self, name: str, one: _Open, output: Any) -> None:
        answer: Any
        try:
            if isinstance(one.ask, Generate):
                answer = self._reader.chunk(one.ask, output, one.seen, one.version)
            else:
                assert isinstance(one.ask, Score)
                answer = self._reader.score(one.ask, output)
        except PolicyError as error:
            answer = error
        except Exception as error:
            answer = failure("vLLM's answer could not be read", error)
        if isinstance(answer, Going):
            one.seen = answer.seen
            return
        if output.finished:
            del self._open[name]
        else:
            self._abort([name])
        if isinstance(answer, Padded):
            if one.attempt + 1 < _PADDED_TRIES:
                self._add(one.ask, one.attempt + 1)
                return
            answer = PolicyError(
                f"{_PADDED_TRIES} times the first token was an id from {self.vocab_size} on, which "
                "is none of the tokenizer's: are these the model and its tokenizer?"
            )
        self._answers.append((one.ask, answer))


def vllm_policy(
    folder: str | os.PathLike[str], *, memory: float = 0.4, sleep: SleepLevel = 0, **options: Any
) -> Callable[[EngineHost], VLLMEngine]:
    """A policy's engine for `EngineHost.policy_engine`: vLLM in this process, beside the trainer.

    Args:
        folder: the model that the training starts from; each update's weights are copied in.
        memory, options: see `load_vllm`.
        sleep: see `VLLMEngine`.
    """

    def make(host: EngineHost) -> VLLMEngine:
        llm = load_vllm(
            folder, max_length=host.max_length, rows=host.slots, memory=memory, sleep=sleep > 0,
            **options,
        )  # fmt: skip
        return VLLMEngine(
            llm,
            eos_ids=host.tokenizer.eos_ids,
            vocab_size=host.tokenizer.vocab_size,
            decode=host.tokenizer.decode,
            rounds=host.rounds,
            sleep=sleep,
        )

    return make
