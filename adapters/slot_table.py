"""Who sits in which slot: the host's side of the KV cache.

The active rows are always slots 0 to `active` - 1, so that a forward is a slice of the cache and
covers nobody else. Rows that ended stay behind them, filed under their key with their KV, until
somebody needs the slot: free slots go first, then the row that has been idle longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mintrl_env.adapters.slot_cache import SlotCache
from mintrl_env.keys import uniforms

_DRAWS = 64  # keys.uniforms makes its numbers in blocks of this many

Row = tuple[int, int, str, int, int]


class Seated(Protocol):
    """What the table needs of a request."""

    ids: npt.NDArray[np.int32]
    row: Row | None
    """The key that the row's KV is filed under; None keeps nothing."""

    @property
    def target(self) -> int:
        """How many of `ids` are to be in the KV before the first logits are wanted (< len(ids))."""
        ...


@dataclass(frozen=True)
class Seats:
    """Where newly placed requests sit: slots `first` to `last` - 1.

    Attributes:
        asks: the requests in slot order.
        feed: from which slot on rows have something to read; widths fall from there to `copies`.
        copies: from which slot on rows start with the same tokens as an earlier one, `source`.
        source: for each slot from `copies` on, the slot whose KV it copies once that is read.
    """

    first: int
    asks: list[Any]
    feed: int
    copies: int
    source: list[int]

    @property
    def last(self) -> int:
        return self.first + len(self.asks)


class SlotTable:
    """Per slot S: tokens, how many of them are known (`length`) and in the KV (`fed`), the draw."""

    def __init__(self, cache: SlotCache, slots: int) -> None:
        columns = cache.columns
        self.cache = cache
        self.slots = slots
        self.active = 0
        self.tokens_S_C = np.zeros((slots, columns), dtype=np.int32)
        self.logp_S_C = np.zeros((slots, columns), dtype=np.float64)
        self.length_S = np.zeros(slots, dtype=np.int64)
        self.fed_S = np.zeros(slots, dtype=np.int64)
        self.begin_S = np.zeros(slots, dtype=np.int64)
        self.limit_S = np.zeros(slots, dtype=np.int64)
        self.temperature_S = np.ones(slots, dtype=np.float64)
        self.stops_S = np.zeros(slots, dtype=bool)
        self.u_S_D = np.zeros((slots, _DRAWS), dtype=np.float64)
        self.u_next_S = np.zeros(slots, dtype=np.int64)
        self.u_end_S = np.zeros(slots, dtype=np.int64)
        self.tick_S = np.zeros(slots, dtype=np.int64)
        self.owner: list[Row | None] = [None] * slots
        self.ask: list[Any] = [None] * slots
        self.all_S = np.arange(slots)
        self._tick = 0
        self._slot_of: dict[Row, int] = {}
        self._scalars: tuple[npt.NDArray[Any], ...] = (
            self.length_S,
            self.fed_S,
            self.begin_S,
            self.limit_S,
            self.temperature_S,
            self.stops_S,
            self.u_next_S,
            self.u_end_S,
            self.tick_S,
        )

    def is_active(self, row: Row | None) -> bool:
        return row is not None and self._slot_of.get(row, self.slots) < self.active

    def idle_rows(self) -> list[Row]:
        """Rows that are not at work but still have KV."""
        return [row for row in self.owner[self.active :] if row is not None]

    @property
    def free(self) -> int:
        """Slots that a new request may take."""
        return self.slots - self.active

    # -- seating ---------------------------------------------------------------------------------

    def seat(self, asks: Sequence[Seated]) -> Seats:
        """Give each request a slot behind the active ones, its tokens written, its KV cut back.

        At most `free` requests, each row once and none of them active. The rows do not become
        active by this; the caller reads what is missing and then calls `activate`.
        """
        first, slots = self.active, self._slots_for(asks)
        for ask, slot in zip(asks, slots, strict=True):
            self._cut_back(slot, ask)

        # In slot order: rows that have all their KV, rows that read (widest first, so that a slice
        # of them makes an even batch), rows that start like one of those.
        ready: list[int] = []
        reading: list[int] = []
        followers: list[tuple[int, int]] = []
        leaders: dict[bytes, int] = {}
        for i, (ask, slot) in enumerate(zip(asks, slots, strict=True)):
            start = ask.ids[: ask.target].tobytes()
            if self.fed_S[slot] >= ask.target:
                ready.append(i)
            elif self.fed_S[slot] == 0 and start in leaders:
                followers.append((i, leaders[start]))
            else:
                reading.append(i)
                if self.fed_S[slot] == 0:
                    leaders[start] = i
        reading.sort(key=lambda i: int(self.fed_S[slots[i]]) - asks[i].target)
        order = self._stay_put(ready, slots, first) + reading + [i for i, _ in followers]
        place = {i: first + t for t, i in enumerate(order)}
        self._rearrange(first, [slots[i] for i in order])
        for t, i in enumerate(order):
            self.ask[first + t] = asks[i]
        feed = first + len(ready)
        return Seats(
            first=first,
            asks=[asks[i] for i in order],
            feed=feed,
            copies=feed + len(reading),
            source=[place[leader] for _, leader in followers],
        )

    def _slots_for(self, asks: Sequence[Seated]) -> list[int]:
        """The row's own slot where it has one, else a free one, else the longest idle one."""
        known = [self._slot_of.get(ask.row) if ask.row is not None else None for ask in asks]
        taken = {slot for slot in known if slot is not None}
        last = self.active + len(asks)
        spare = [slot for slot in range(self.active, self.slots) if slot not in taken]
        free = [slot for slot in spare if self.owner[slot] is None]
        free.sort(key=lambda slot: (slot >= last, slot))  # where it would not have to move first
        idle = [slot for slot in spare if self.owner[slot] is not None]
        idle.sort(key=lambda slot: int(self.tick_S[slot]))
        supply = iter(free + idle)
        return [slot if slot is not None else next(supply) for slot in known]

    def _cut_back(self, slot: int, ask: Seated) -> None:
        count = len(ask.ids)
        common = 0
        if ask.row is not None and self.owner[slot] == ask.row:
            most = min(int(self.fed_S[slot]), ask.target)
            same = self.tokens_S_C[slot, :most] == ask.ids[:most]
            common = most if same.all() else int(same.argmin())
        else:
            self._evict(slot)
            if ask.row is not None:
                self.owner[slot] = ask.row
                self._slot_of[ask.row] = slot
        self.tokens_S_C[slot, :count] = ask.ids
        self.length_S[slot] = self.begin_S[slot] = self.limit_S[slot] = count
        self.fed_S[slot] = common

    def _stay_put(self, ready: list[int], slots: list[int], first: int) -> list[int]:
        """Order rows that may sit anywhere in first ... so that as few as possible move."""
        order: list[int] = [-1] * len(ready)
        movers = []
        for i in ready:
            t = slots[i] - first
            if 0 <= t < len(ready):
                order[t] = i
            else:
                movers.append(i)
        left = iter(movers)
        return [i if i >= 0 else next(left) for i in order]

    def _rearrange(self, first: int, sources: list[int]) -> None:
        """Bring the contents of slots `sources` to first, first + 1, ...; nothing is lost."""
        last = first + len(sources)
        wanted = set(sources)
        pushed_out = [slot for slot in range(first, last) if slot not in wanted]
        vacated = [slot for slot in sources if not first <= slot < last]
        dst = [*range(first, last), *vacated]
        src = [*sources, *pushed_out]
        self.permute(dst, src)

    def permute(self, dst: list[int], src: list[int]) -> None:
        """Slot dst[i] gets all that slot src[i] held; together a permutation."""
        pairs = [(to, of) for to, of in zip(dst, src, strict=True) if to != of]
        if not pairs:
            return
        to_N, of_N = np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])
        kv = [(to, of) for to, of in pairs if self.fed_S[of]]
        self.cache.move([p[0] for p in kv], [p[1] for p in kv], int(self.fed_S[of_N].max()))
        known = int(self.length_S[of_N].max())
        for wide in (self.tokens_S_C[:, :known], self.logp_S_C[:, :known], self.u_S_D):
            wide[to_N] = wide[of_N]
        for scalar_S in self._scalars:
            scalar_S[to_N] = scalar_S[of_N]
        for things in (self.owner, self.ask):
            held = [things[of] for _, of in pairs]
            for (to, _), thing in zip(pairs, held, strict=True):
                things[to] = thing
        for to, _ in pairs:
            owner = self.owner[to]
            if owner is not None:
                self._slot_of[owner] = to

    # -- leaving ---------------------------------------------------------------------------------

    def retire(self, slots: Sequence[int]) -> None:
        """Rows that are done become idle; the active rows close up to slots 0 ... again."""
        for slot in slots:
            self._idle(slot)
        gone = {slot for slot in slots if slot < self.active}
        count = self.active - len(gone)
        holes = sorted(slot for slot in gone if slot < count)
        movers = [slot for slot in range(count, self.active) if slot not in gone]
        self.permute(holes + movers, movers + holes)
        self.active = count

    def _idle(self, slot: int) -> None:
        self.ask[slot] = None
        self._tick += 1
        self.tick_S[slot] = self._tick
        if self.owner[slot] is None:
            self.fed_S[slot] = 0

    def forget(self, slots: Sequence[int]) -> None:
        """The KV of these slots is not to be trusted any more."""
        for slot in slots:
            self._evict(slot)

    def _evict(self, slot: int) -> None:
        owner, self.owner[slot] = self.owner[slot], None
        if owner is not None:
            del self._slot_of[owner]
        self.fed_S[slot] = self.length_S[slot] = 0

    def reset(self) -> None:
        """Forget every row."""
        self.forget(range(self.slots))
        self.ask = [None] * self.slots
        self.active = self._tick = 0
        self.tick_S[:] = 0

    # -- draws -----------------------------------------------------------------------------------

    def next_draws(self) -> npt.NDArray[np.float64]:
        """Each active row's next uniform number, shape (active,)."""
        n = self.active
        next_n, end_n = self.u_next_S[:n], self.u_end_S[:n]
        for slot in np.flatnonzero(next_n == end_n):
            written = int(self.length_S[slot] - self.begin_S[slot])
            key = self.ask[slot].key
            draw = key.draw + written
            count = _DRAWS - draw % _DRAWS  # up to the end of a block of keys.uniforms
            self.u_S_D[slot, :count] = uniforms(key.at(draw), count)
            next_n[slot], end_n[slot] = 0, count
        u_n: npt.NDArray[np.float64] = self.u_S_D[self.all_S[:n], next_n]
        next_n += 1
        return u_n
