"""The embedded engine: a transformers model that writes and scores rows of one KV cache.

It shares its weights with the trainer and runs in the trainer's thread (see `pump`). One forward a
token covers all active rows; rows join in mid-flight, and a row that comes back with other tokens
(after a judge's cut and correction) is cut back to what its KV still holds and fed only the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mintrl_env.adapters.pump import Inbox, Returns, Rounds, deliver, unserved
from mintrl_env.adapters.slot_attention import grouped_attention
from mintrl_env.adapters.slot_cache import bare_model, cache_for, check_model, forward_options
from mintrl_env.adapters.slot_queue import SlotQueue
from mintrl_env.adapters.slot_reader import SlotReader
from mintrl_env.adapters.slot_requests import Ask, Generate, Score
from mintrl_env.adapters.slot_table import Seats, SlotTable
from mintrl_env.errors import PolicyError, UsageError
from mintrl_env.keys import RowKey
from mintrl_env.protocols import Sampling
from mintrl_env.types import Chunk, Finish, IdsLike

_DEFAULT = Sampling()
_Written = tuple[npt.NDArray[np.int32], npt.NDArray[np.float64], Finish, int]


class SlotEngine:
    """Policy and Scorer over a transformers causal model in this process.

    `generate` and `logprobs` may be awaited on any event loop; they are served while a pump
    (`pump.run_pump`, `pump.run_with_pump`) runs in the thread that owns the model.

    Args:
        model: a causal model with full attention by sdpa or eager kernels, in one piece on one
            device; a DDP wrapper is taken off, a peft wrapper may stay.
        eos_ids: ids that end a response; with none, only lengths and stop strings do.
        vocab_size: ids from here on (rows that pad the embedding) are never sampled and have no
            share in the log-probs.
        slots: rows of KV, the most sequences at work at once; those that are idle between two
            chunks keep their KV as long as nobody needs the slot. The cache takes
            2 * layers * kv_heads * head_dim * slots * max_length numbers (`kv_bytes`).
        max_length: the most tokens in a row, prompt and response together.
        pad_id: what fills ragged batches; masked, so any id of the model does.
        decode: text of ids, needed for stop strings only.
        rounds: batches independent of latency (see `pump.Rounds`); shared by the engines of a run.
        policy_version: stamped on chunks; setting another one drops all KV.
        autocast: run forwards under autocast of this dtype (weights in fp32, as mixed-precision
            trainers keep them); None runs them as the weights are.
        around: makes a context for forwards, such as `peft_model.disable_adapter` for a judge that
            is the policy's first version.
        prefill_tokens: the most tokens, padding included, of one forward that reads; also bounds
            the logits of a forward that scores, to as many float32 numbers times 16384.

    Raises:
        UsageError: a model that cannot be run so (sharded, encoder-decoder, sliding windows shorter
            than `max_length`, flash attention), or arguments out of range.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        eos_ids: Collection[int],
        vocab_size: int,
        slots: int,
        max_length: int,
        pad_id: int = 0,
        decode: Callable[[IdsLike], str] | None = None,
        rounds: Rounds | None = None,
        policy_version: int = 0,
        autocast: torch.dtype | None = None,
        around: Callable[[], AbstractContextManager[Any]] | None = None,
        prefill_tokens: int = 8192,
    ) -> None:
        model = bare_model(model)
        config = check_model(model, max_length)
        rows = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        if not 0 < vocab_size <= rows:
            raise UsageError(
                f"vocab_size must be 1 to the model's {rows}, not {vocab_size}: a tokenizer with "
                "more tokens than the model has embeddings is another model's, or needs "
                "model.resize_token_embeddings"
            )
        if slots < 1 or max_length < 2 or prefill_tokens < 1:
            raise UsageError("slots and prefill_tokens must be >= 1, max_length >= 2")
        if not all(0 <= i < vocab_size for i in eos_ids):
            raise UsageError(f"eos_ids {sorted(eos_ids)} must be ids below vocab_size {vocab_size}")
        if not 0 <= pad_id < rows:
            raise UsageError(f"pad_id {pad_id} is no id of the model (0 to {rows - 1})")
        self.model = model
        self._config = config
        self.vocab_size = vocab_size
        self.max_length = max_length
        self.rounds = rounds
        self._embedding_rows = rows
        self._decode = decode
        self._policy_version = policy_version
        self._autocast = autocast
        self._around = around or nullcontext
        self._cache = cache_for(config, model, slots, max_length, autocast)
        self._table = SlotTable(self._cache, slots)
        self._reader = SlotReader(
            model,
            self._cache,
            self._table,
            vocab_size=vocab_size,
            pad_id=pad_id,
            prefill_tokens=prefill_tokens,
            keep_option="logits_to_keep" in forward_options(model),
        )
        self._is_eos_V = np.zeros(vocab_size, dtype=bool)
        self._is_eos_V[list(eos_ids)] = True
        self._device: torch.device = next(model.parameters()).device
        self._inbox = Inbox()
        if rounds is not None:
            rounds.join(self._inbox)
        self._live = 0
        self._answers: list[tuple[Ask, Any]] = []
        self._held: list[Ask] = []
        self._queue = SlotQueue()
        self._returns = Returns()
        self._pumped = False
        self._weights: tuple[Any, ...] = ()

    # -- what a caller sees ----------------------------------------------------------------------

    @property
    def kv_bytes(self) -> int:
        """Memory of the KV cache."""
        return self._cache.nbytes

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        if version != self._policy_version:
            self.reset()
        self._policy_version = version

    @property
    def live(self) -> int:
        """Episodes still running; only `rounds` looks at it (one number for all its engines)."""
        return self._live if self.rounds is None else self.rounds.live

    @live.setter
    def live(self, count: int) -> None:
        self._live = count
        if self.rounds is not None:
            self.rounds.live = count

    def reset(self) -> None:
        """Drop all KV, as after a change of weights.

        A new `policy_version` does it too, and so does a pump that starts and finds that parameters
        were written in place since the last one.

        Raises:
            UsageError: rows are being written at this moment.
        """
        if self._table.active:
            raise UsageError(
                f"reset with {self._table.active} rows at work; end the pump before weights change"
            )
        self._table.reset()

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

        Token i takes draw `key.draw + i`; temperature 0 gives the log-probs of temperature 1. Stop
        strings are looked for in the chunk's own text and end the chunk with the token that
        completes one. Requests of one row (`key.row`) are served one after another.

        Raises:
            UsageError: no room for `max_tokens` within `max_length`, ids that the model has not,
                `stop` without `decode`.
            PolicyError: a forward failed, or the pump ended.
        """
        array, logprobs, finish, version = await self._generate(
            ids, max_tokens, stop, sampling, key
        )
        return Chunk(array, logprobs.astype(np.float32), finish, version)

    async def _generate(
        self,
        ids: IdsLike,
        max_tokens: int,
        stop: Sequence[str],
        sampling: Sampling,
        key: RowKey,
    ) -> _Written:
        array = self._checked(ids)
        if key.draw < 0:
            raise UsageError(f"draws count from 0, not {key.draw} (row {key.row})")
        if max_tokens < 1:
            raise UsageError(f"max_tokens must be >= 1, not {max_tokens} (row {key.row})")
        if len(array) + max_tokens > self.max_length:
            raise UsageError(
                f"row {key.row}: {len(array)} tokens and max_tokens {max_tokens} exceed the "
                f"engine's max_length {self.max_length}; raise it, or shorten the prompt"
            )
        stop = tuple(stop)
        if "" in stop:
            raise UsageError("an empty stop string would stop everywhere")
        if stop and self._decode is None:
            raise UsageError("stop strings need the engine's `decode`, which was not given")
        written: _Written = await self._inbox.ask(Generate(array, key, max_tokens, stop, sampling))
        return written

    async def logprobs(
        self, ids: npt.NDArray[np.int32], start: int, *, key: RowKey | None = None
    ) -> npt.NDArray[np.float32]:
        """Log-probs (temperature 1) of `ids[start:]`, each given all before it, float32.

        With a key the row's KV is reused and kept, as in `generate`.

        Raises:
            UsageError: `start` not in 1 to len(ids), more than `max_length` ids, no key in rounds.
            PolicyError: a forward failed, or the pump ended.
        """
        return (await self._logprobs(ids, start, key)).astype(np.float32)

    async def _logprobs(
        self, ids: IdsLike, start: int, key: RowKey | None
    ) -> npt.NDArray[np.float64]:
        array = self._checked(ids)
        if not 1 <= start <= len(array):
            raise UsageError(f"start must be 1 to {len(array)} (the ids given), not {start}")
        if len(array) > self.max_length:
            raise UsageError(
                f"{len(array)} tokens exceed the engine's max_length {self.max_length}"
            )
        if array[start:].size and array[start:].max() >= self.vocab_size:
            raise UsageError(f"ids from {self.vocab_size} on have no probability")
        if key is None and self.rounds is not None:
            raise UsageError("in rounds every request needs a key: it decides the order")
        scores: npt.NDArray[np.float64] = await self._inbox.ask(Score(array, key, start))
        return scores

    def _checked(self, ids: IdsLike) -> npt.NDArray[np.int32]:
        array = np.array(ids, dtype=np.int32).reshape(-1)
        if not len(array):
            raise UsageError("no token to go on from: ids is empty")
        if array.min() < 0 or array.max() >= self._embedding_rows:
            raise UsageError(
                f"ids must be 0 to {self._embedding_rows - 1}, not {array.min()} to {array.max()}"
            )
        return array

    # -- what the pump calls ---------------------------------------------------------------------

    @contextmanager
    def pumping(self, wake: threading.Event) -> Iterator[None]:
        """Eval mode, KV that fits the weights; on the way out everything open is failed."""
        if self._pumped:
            raise UsageError("this engine is being pumped already")
        self._pumped = True
        training = [module for module in self.model.modules() if module.training]
        try:
            self.model.eval()
            weights = _weights_of(self.model)
            if weights != self._weights:
                self._table.reset()
            self._weights = weights
            self._inbox.wake = wake
            yield
        except BaseException:
            self._abandon(interrupted=True)
            raise
        finally:
            self._pumped = False
            for module in training:
                module.training = True
            self._abandon()

    def drain(self) -> None:
        arrived, any_cancelled = self._inbox.drain()
        (self._held if self.rounds is not None else self._queue).extend(arrived)
        if any_cancelled:
            self._held = [ask for ask in self._held if not ask.cancelled]
            self._queue.drop_cancelled()
            n = self._table.active
            self._table.retire([s for s in range(n) if self._table.ask[s].cancelled])

    @property
    def held(self) -> Sequence[Ask]:
        return self._held

    @property
    def in_round(self) -> bool:
        return bool(self._queue or self._table.active)

    def begin_round(self) -> None:
        def order(ask: Ask) -> tuple[Any, ...]:
            assert ask.key is not None
            return (ask.row, ask.key.draw, type(ask).__name__, ask.target, ask.ids.tobytes())

        self._queue.extend(sorted(self._held, key=order))
        self._held = []

    def turn(self, forwards: int) -> bool:
        self.drain()
        if self.rounds is None and self._queue:
            self._let_rows_return()
        if not self.in_round:
            return False
        with ExitStack() as stack:
            stack.enter_context(self._around())
            # Nothing made here outlives the turn (the cache was made outside), so inference mode is
            # safe beside training.
            stack.enter_context(torch.inference_mode())
            stack.enter_context(self._autocast_context())
            stack.enter_context(grouped_attention(self._config))
            self._admit()
            for _ in range(forwards):
                if not self._table.active:
                    break
                self._step()
                # Who ended has waited long enough, and so has who arrived. (In rounds arrivals
                # wait anyway, and must not decide when a turn ends.)
                if self._answers or (self.rounds is None and len(self._inbox)):
                    break
        self._deliver()
        return True

    def _autocast_context(self) -> AbstractContextManager[Any]:
        # An outer autocast would mix dtypes with the cache's, and leave casts of the weights that
        # were made without grad where the trainer would pick them up.
        torch.clear_autocast_cache()
        return torch.autocast(
            self._device.type, dtype=self._autocast, enabled=self._autocast is not None
        )

    def _abandon(self, interrupted: bool = False) -> None:
        """Fail what is open: nobody will serve it."""
        self.drain()
        at_work = [ask for ask in self._table.ask if ask is not None]
        for ask in (*at_work, *self._queue, *self._held):
            self._answers.append((ask, unserved(type(self).__name__)))
        if at_work or interrupted:  # a forward or a move may be half done
            self._table.reset()
        self._queue.clear()
        self._held = []
        self._deliver()

    def _deliver(self) -> None:
        """Hand over what the turn has answered.

        At most once a forward, since waking another thread costs this one the interpreter lock.
        """
        answers, self._answers = self._answers, []
        self._returns.expect(deliver(answers))

    def _fail(self, slots: Iterable[int], error: Exception) -> None:
        """A forward over these slots failed: its requests get the error, its KV is void."""
        slots = list(slots)
        self._answers.extend((self._table.ask[s], _failed(error)) for s in slots)
        self._void(slots)
        self._table.retire(slots)

    def _void(self, slots: Iterable[int]) -> None:
        """Forget these slots' KV, and wipe it: a NaN there would reach whoever sits there next."""
        slots = [int(slot) for slot in slots]
        self._table.forget(slots)
        self._cache.wipe(slots)

    # -- reading ---------------------------------------------------------------------------------

    def _admit(self) -> None:
        while scores := self._take(Score):
            self._score(self._table.seat(scores))
        if asks := self._take(Generate):
            self._begin(self._table.seat(asks))

    def _take(self, kind: type[Ask]) -> list[Ask]:
        """The requests of one kind that can have a slot now, in order, each row once."""
        table = self._table
        # In rounds the keys alone decide.
        first = table.idle_rows() if self.rounds is None and len(self._queue) > table.free else ()
        return self._queue.take(kind, table.free, is_active=table.is_active, first=first)

    def _let_rows_return(self) -> None:
        """Before slots go to other rows: those just answered may be back at once (an instant judge).

        It would cost them their KV otherwise, since answers and new requests cross on the way.
        """
        table = self._table
        idle = table.idle_rows()
        cold = len(self._queue) - sum(map(self._queue.waits, idle))
        if cold > table.free - len(idle) and self._returns.wait():
            before = len(self._queue)
            self.drain()
            self._returns.learn(any(map(self._queue.waits, idle)) and len(self._queue) > before)

    def _begin(self, seats: Seats) -> None:
        """Read what the new rows lack and make them active."""
        table = self._table
        for slot, ask in enumerate(seats.asks, seats.first):
            table.limit_S[slot] = len(ask.ids) + ask.max_tokens
            table.stops_S[slot] = bool(ask.stop)
            table.temperature_S[slot] = ask.sampling.temperature
            table.u_next_S[slot] = table.u_end_S[slot] = 0
        try:
            self._reader.read(seats)
        except Exception as error:
            self._fail(range(seats.first, seats.last), error)
        else:
            table.active = seats.last

    def _score(self, seats: Seats) -> None:
        slots = range(seats.first, seats.last)
        try:
            results = self._reader.score(seats, [ask.start for ask in seats.asks])
        except Exception as error:
            self._fail(slots, error)
            return
        broken = [bool(np.isnan(result).any()) for result in results]
        for ask, result, bad in zip(seats.asks, results, broken, strict=True):
            self._answers.append((ask, _no_numbers() if bad else result))
        self._void(slot for slot, bad in zip(slots, broken, strict=True) if bad)
        self._table.retire(slots)

    # -- writing ---------------------------------------------------------------------------------

    def _step(self) -> None:
        """One token for every active row."""
        table, n = self._table, self._table.active
        try:
            new_n, logp_n = self._reader.step()
        except Exception as error:
            self._fail(range(n), error)
            return
        rows_n, length_n = table.all_S[:n], table.length_S[:n]
        broken_n = np.isnan(logp_n)
        new_n = np.where(broken_n, 0, new_n)
        table.tokens_S_C[rows_n, length_n] = new_n
        table.logp_S_C[rows_n, length_n] = logp_n
        length_n += 1
        table.fed_S[:n] += 1
        ended_n = self._is_eos_V[new_n] | (length_n >= table.limit_S[:n]) | broken_n
        stopped = {int(s) for s in np.flatnonzero(table.stops_S[:n]) if self._stops(int(s))}
        ended = sorted(stopped.union(map(int, np.flatnonzero(ended_n))))
        if not ended:
            return
        for slot in ended:
            if self._is_eos_V[new_n[slot]] and not broken_n[slot]:
                finish = Finish.EOS
            else:
                finish = Finish.STOP if slot in stopped else Finish.LENGTH
            answer = _no_numbers() if broken_n[slot] else self._written(slot, finish)
            self._answers.append((table.ask[slot], answer))
        self._void(np.flatnonzero(broken_n))
        table.retire(ended)

    def _written(self, slot: int, finish: Finish) -> _Written:
        table = self._table
        part = slice(int(table.begin_S[slot]), int(table.length_S[slot]))
        return (
            table.tokens_S_C[slot, part].copy(),
            table.logp_S_C[slot, part].copy(),
            finish,
            self._policy_version,
        )

    def _stops(self, slot: int) -> bool:
        """Does the newest token complete a stop string?"""
        table, stop = self._table, self._table.ask[slot].stop
        assert self._decode is not None
        begin, end = int(table.begin_S[slot]), int(table.length_S[slot])
        # A character takes at most four tokens, so an occurrence that the newest token completes
        # lies in a window of this many; a hit there is confirmed on the whole chunk.
        window = 4 * max(len(s) for s in stop) + 4
        for start in sorted({max(begin, end - window), begin}, reverse=True):
            text = self._decode(table.tokens_S_C[slot, start:end])
            if not any(s in text for s in stop):
                return False
        return True


def _failed(error: Exception) -> PolicyError:
    failure = PolicyError(f"a forward of the policy failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _no_numbers() -> PolicyError:
    return PolicyError(
        "the policy's logits are NaN: look at its weights (a diverged update?) and at its dtype"
    )


def _weights_of(model: torch.nn.Module) -> tuple[Any, ...]:
    """Differs once a parameter was replaced or written in place (not through `.data`)."""
    return tuple((p.data_ptr(), 0 if p.is_inference() else p._version) for p in model.parameters())
