"""The clock of a simulation: what happens next, and when. No wall time, no randomness."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """Runs actions in the order of their times; those of one time in the order in which they came."""

    def __init__(self) -> None:
        self.now = 0.0
        self._count = 0
        self._waiting: list[tuple[float, int, Action]] = []

    def at(self, when: float, do: Action) -> None:
        """Do something at a time; one that has passed is now."""
        self._count += 1
        heapq.heappush(self._waiting, (max(when, self.now), self._count, do))

    def run(self, done: Callable[[], bool]) -> bool:
        """Go on until `done`; False where nothing is left to happen before that."""
        while not done():
            if not self._waiting:
                return False
            self.now, _, do = heapq.heappop(self._waiting)
            do()
        return True
