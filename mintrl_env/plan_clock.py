"""The clock of a simulation, and desks at which its parts queue. No wall time, no randomness."""

from __future__ import annotations

import heapq
from collections import deque
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


class Desk:
    """So many places, and a queue before them.

    Args:
        clock: the simulation's.
        places: served at once.
    """

    def __init__(self, clock: Clock, places: int) -> None:
        self._clock = clock
        self._free = places
        self._queue: deque[Callable[[], None]] = deque()
        self._counted, self._inside, self._since = 0.0, 0, 0.0

    def enter(self, served: Callable[[], None]) -> None:
        """Call `served` once there is a place; it ends with `leave`."""
        if self._free:
            self._free -= 1
            served()
        else:
            self._queue.append(served)

    def leave(self) -> None:
        if self._queue:
            self._queue.popleft()()
        else:
            self._free += 1

    def work(self, seconds: float, done: Callable[[], None]) -> None:
        """Be busy for so long, in a place."""
        self._change(1)

        def end() -> None:
            self._change(-1)
            done()

        self._clock.at(self._clock.now + seconds, end)

    def _change(self, by: int) -> None:
        self._counted = self.busy()
        self._since = self._clock.now
        self._inside += by

    def busy(self) -> float:
        """Seconds of work of all places until now."""
        return self._counted + self._inside * (self._clock.now - self._since)
