"""Continuous batching, simulated: rows that join and leave an engine between two decode steps.

An engine writes one token a step for every row at work, so between two changes of its batch it is
known in one go how many steps are made and how long they take. An event is a change of the batch,
never a token.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from mintrl_env.plan_clock import Clock

_NEARLY = 1e-9  # of a step: what float sums may lack


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast one engine is.

    Attributes:
        steps: seconds of a decode step by rows at once. Between two sizes it is interpolated;
            beyond the largest the last slope goes on, or its throughput where there is one size.
        prefill_s: seconds to read one token. Reading holds up the rows that write.
        request_s: seconds that a request costs besides, whatever it asks for.
        admit_s: seconds that letting requests in costs, however many come in together.
        admit_row_s: and more for each row that is at work already.
        context_s: seconds that a step takes longer for each token of context of the rows at work.
        slots: rows at once; more wait.
    """

    steps: tuple[tuple[int, float], ...]
    prefill_s: float = 0.0
    request_s: float = 0.0
    context_s: float = 0.0
    slots: int = 1 << 30
    admit_s: float = 0.0
    admit_row_s: float = 0.0

    @classmethod
    def of_throughput(
        cls,
        tokens_per_s: Mapping[int, float],
        *,
        prefill_tokens_per_s: float = math.inf,
        request_s: float = 0.0,
        context_s: float = 0.0,
        slots: int = 1 << 30,
        admit_s: float = 0.0,
        admit_row_s: float = 0.0,
    ) -> Speed:
        """From tokens/s of the whole batch by its rows."""
        steps = tuple((rows, rows / tokens_per_s[rows]) for rows in sorted(tokens_per_s))
        read = 1 / prefill_tokens_per_s
        return cls(steps, read, request_s, context_s, slots, admit_s, admit_row_s)

    def step(self, rows: int) -> float:
        """Seconds of a decode step of so many rows, without what their context adds."""
        steps = self.steps
        if rows <= steps[0][0]:
            return steps[0][1]
        if len(steps) == 1:
            return steps[0][1] * rows / steps[0][0]
        at = min(bisect_right(steps, (rows, math.inf)), len(steps) - 1)
        (low, slow), (high, fast) = steps[at - 1], steps[at]
        return slow + (fast - slow) * (rows - low) / (high - low)

    def times(self, factor: float) -> Speed:
        """An engine of the same kind that takes `factor` times as long for everything."""
        return Speed(
            tuple((rows, seconds * factor) for rows, seconds in self.steps),
            self.prefill_s * factor,
            self.request_s * factor,
            self.context_s * factor,
            self.slots,
            self.admit_s * factor,
            self.admit_row_s * factor,
        )


@dataclass(slots=True, eq=False)
class Job:
    """One request to an engine.

    Attributes:
        tokens: to write, >= 1.
        read: tokens to read first.
        context: tokens that the row holds once they are read.
        done: called when the last token is written.
        begun: called when it gets its slot.
        cancelled: nobody waits for it any more; `Engine.cancel` sets it.
    """

    tokens: int
    read: int
    context: int
    done: Callable[[], None]
    begun: Callable[[], None] | None = None
    cancelled: bool = False


@dataclass(slots=True)
class Work:
    """What an engine has done so far.

    Attributes:
        busy: seconds with a row at work.
        row_steps: tokens written, those of cancelled requests included.
        steps: decode steps.
        read: tokens read.
    """

    busy: float = 0.0
    row_steps: int = 0
    steps: int = 0
    read: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.busy + other.busy,
            self.row_steps + other.row_steps,
            self.steps + other.steps,
            self.read + other.read,
        )


@dataclass(slots=True, eq=False)
class Engine:
    """One engine on a clock."""

    clock: Clock
    speed: Speed
    work: Work = field(default_factory=Work)
    _queue: deque[Job] = field(default_factory=deque)
    _active: list[tuple[int, int, Job]] = field(default_factory=list)  # by the step they end at
    _made: int = 0  # steps so far
    _context: int = 0  # tokens of all rows at work
    _began: float = 0.0  # when the steps in progress began; reading goes before them
    _since: float = 0.0  # since when it has been busy and that was not counted yet
    _planned: int = 0
    _step: float = 0.0
    _epoch: int = 0
    _running: bool = False
    _boundary: bool = False  # one is waiting at this very moment
    _count: int = 0
    _held_until: float = 0.0

    @property
    def rows(self) -> int:
        """Rows at work and waiting."""
        return len(self._active) + len(self._queue)

    def submit(self, job: Job) -> None:
        self._queue.append(job)
        if not self._running:
            self._wake()
        elif len(self._active) < self.speed.slots:
            self._cut()

    def cancel(self, job: Job) -> None:
        job.cancelled = True
        if self._running:
            self._cut()

    def hold(self, seconds: float) -> None:
        """No step begins for so long, counted from now: the weights change."""
        self._held_until = max(self._held_until, self.clock.now + seconds)
        if self._running:
            self._cut()

    def counted(self) -> Work:
        """The work until now; of steps in progress the busy time alone."""
        busy = self.clock.now - self._since if self._running else 0.0
        return self.work + Work(busy=busy)

    # --- steps

    def _wake(self) -> None:
        if not self._boundary:  # all that arrive at one moment are in the first step together
            self._boundary = True
            self._plan(self.clock.now)

    def _plan(self, when: float) -> None:
        self._epoch += 1
        epoch = self._epoch
        self.clock.at(when, lambda: self._at_boundary(epoch))

    def _cut(self) -> None:
        """End the steps in progress with the one that is being made."""
        made = self._steps_within(self.clock.now - self._began)
        if made < self._planned:
            self._planned = made
            self._plan(self._began + self._seconds(made))

    def _seconds(self, steps: int) -> float:
        """Seconds of so many steps of the rows at work; the context grows as they go."""
        speed, rows = self.speed, len(self._active)
        grown = self._context * steps + rows * steps * (steps - 1) / 2
        return steps * self._step + speed.context_s * grown

    def _steps_within(self, seconds: float) -> int:
        """The fewest whole steps that take at least so long."""
        if seconds <= 0:
            return 0
        rows, extra = len(self._active), self.speed.context_s
        linear, square = self._step + extra * (self._context - rows / 2), extra * rows / 2
        if square:
            root = (math.sqrt(linear * linear + 4 * square * seconds) - linear) / (2 * square)
        elif linear:
            root = seconds / linear
        else:
            return self._planned
        return math.ceil(root - _NEARLY)

    def _at_boundary(self, epoch: int) -> None:
        if epoch != self._epoch:
            return  # another one was planned since
        ended = self._end_steps() if self._running else []
        for job in ended:
            job.done()  # may ask for more, which is then in the next step
        if self.clock.now < self._held_until:
            if self._active or self._queue:
                self._boundary = True
                self._plan(self._held_until)
            return
        self._admit()

    def _end_steps(self) -> list[Job]:
        work, rows, made = self.work, len(self._active), self._planned
        work.busy += self.clock.now - self._since
        work.steps += made
        work.row_steps += rows * made
        self._made += made
        self._context += rows * made
        self._running = False
        ended: list[Job] = []
        while self._active and self._active[0][0] <= self._made:
            job = heapq.heappop(self._active)[2]
            self._context -= job.context + job.tokens
            if not job.cancelled:
                ended.append(job)
        return ended

    def _drop_cancelled(self) -> None:
        if any(job.cancelled for _, _, job in self._active):
            for end, _, job in self._active:
                if job.cancelled:
                    self._context -= job.context + job.tokens - (end - self._made)
            self._active = [entry for entry in self._active if not entry[2].cancelled]
            heapq.heapify(self._active)

    def _admit(self) -> None:
        speed = self.speed
        self._boundary = False
        self._drop_cancelled()
        reading, count, rows = 0.0, self._count, len(self._active)
        while self._queue and len(self._active) < speed.slots:
            job = self._queue.popleft()
            if job.cancelled:
                continue
            reading += job.read * speed.prefill_s + speed.request_s
            self.work.read += job.read
            self._count += 1
            self._context += job.context
            heapq.heappush(self._active, (self._made + job.tokens, self._count, job))
            if job.begun is not None:
                job.begun()
        if not self._active:
            return
        if self._count > count:
            reading += speed.admit_s + speed.admit_row_s * rows
        self._since, self._began = self.clock.now, self.clock.now + reading
        self._step = speed.step(len(self._active))
        self._planned = self._active[0][0] - self._made
        self._running = True
        self._plan(self._began + self._seconds(self._planned))


def total(engines: Iterable[Engine]) -> Work:
    """The work of several engines until now."""
    found = Work()
    for engine in engines:
        found = found + engine.counted()
    return found
