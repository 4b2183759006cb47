"""Requests that wait for a slot: the order in which rows are served, whoever many they are.

Rows come in the order in which they arrived, and the requests of one row one after another. A row
whose KV is still in a slot may go first: serving another in its place would cost it that KV, and
with many more rows than slots every row would read its whole prefix again at every chunk.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator

from mintrl_env.adapters.slot_requests import Ask
from mintrl_env.adapters.slot_table import Row


class SlotQueue:
    """Waiting requests by row. Taking some costs as much as one takes, not as many as wait."""

    def __init__(self) -> None:
        # A request without a row stands for itself.
        self._waiting: dict[Row | Ask, deque[Ask]] = {}
        self._kinds: Counter[type[Ask]] = Counter()

    def __len__(self) -> int:
        """Rows that wait (each request without a row is one)."""
        return len(self._waiting)

    def __iter__(self) -> Iterator[Ask]:
        for asks in self._waiting.values():
            yield from asks

    def extend(self, asks: Iterable[Ask]) -> None:
        for ask in asks:
            self._waiting.setdefault(ask if ask.row is None else ask.row, deque()).append(ask)
            self._kinds[type(ask)] += 1

    def drop_cancelled(self) -> None:
        """Forget requests that nobody waits for any more."""
        kept = [ask for ask in self if not ask.cancelled]
        self.clear()
        self.extend(kept)

    def clear(self) -> None:
        self._waiting.clear()
        self._kinds.clear()

    def waits(self, row: Row | None) -> bool:
        """Is there a request of this row?"""
        return row is not None and row in self._waiting

    def take(
        self,
        kind: type[Ask],
        most: int,
        *,
        is_active: Callable[[Row | None], bool],
        first: Iterable[Row] = (),
    ) -> list[Ask]:
        """Up to `most` requests of one kind, each row once and none of a row that is at work.

        Args:
            first: rows that go before all others.
        """
        taken: list[Ask] = []
        if not most or not self._kinds[kind]:
            return taken
        rows: list[Row | Ask] = [row for row in first if row in self._waiting]
        known = set(rows)
        for row in rows:
            self._consider(row, kind, taken)
            if len(taken) == most:
                break
        else:
            # Taking alters the dictionary, so rows are chosen before.
            chosen: list[Row | Ask] = []
            for row, asks in self._waiting.items():
                if len(taken) + len(chosen) == most:
                    break
                if row in known or not isinstance(asks[0], kind) or is_active(asks[0].row):
                    continue
                chosen.append(row)
            for row in chosen:
                self._consider(row, kind, taken)
        return taken

    def _consider(self, row: Row | Ask, kind: type[Ask], taken: list[Ask]) -> None:
        asks = self._waiting[row]
        if not isinstance(asks[0], kind):
            return
        taken.append(asks.popleft())
        self._kinds[kind] -= 1
        if not asks:
            del self._waiting[row]
