"""A training of many updates, simulated: rows, engines, judge, verifier, trainer, new weights.

    outcome = simulate(system, batches, Mode("async", max_lag=2), updates=8, skip=3)

Discrete events on one clock; deterministic. What is not in it: failures and retries, the network,
preemption of rows by an engine that runs out of KV memory.
"""

from __future__ import annotations

import heapq
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mintrl_env.errors import UsageError
from mintrl_env.plan_clock import Clock
from mintrl_env.plan_engine import Engine, Job, Speed, total
from mintrl_env.plan_rows import Batches, ReviewWork, RowScript

_TAIL = 0.9  # the share of an update's rows whose end begins its tail


class Booker(Protocol):
    """Spreads requests over the minute; `adapters.llm_limits.Gate` is one."""

    def book(self, tokens: int) -> tuple[Any, float]:
        """Something, and the seconds that a request of so many tokens has to wait."""
        ...


@dataclass(frozen=True, slots=True)
class JudgeSystem:
    """Who reviews.

    Attributes:
        concurrent: reviews at once.
        booker: makes what the service's limits a minute are kept by, from a clock; None: no limits.
        engine: how fast each of `engines` of its own is; None: reviews take their drawn latency.
        shared: it works on the policy's engines instead, behind the row's own requests.
        factor: of all latencies.
    """

    concurrent: int = sys.maxsize
    booker: Callable[[Callable[[], float]], Booker] | None = None
    engine: Speed | None = None
    engines: int = 0
    shared: bool = False
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class System:
    """The machines of a run.

    Attributes:
        policy, engines: how fast each of the policy's engines is, and how many there are.
        judge: None: nobody reviews.
        verifier_workers: scores at once, each for its drawn seconds times `verifier_factor`.
        train_s: seconds of learning from rows of so many tokens, prompt included.
        sync_s: seconds in which the weights reach the engines, which write nothing meanwhile.
        prefix_cache: engines keep a row's KV from chunk to chunk, and a prompt's for its group.
        deadline_s: of a row.
    """

    policy: Speed
    engines: int
    train_s: Callable[[Sequence[int]], float]
    sync_s: float = 0.0
    judge: JudgeSystem | None = None
    verifier_workers: int = sys.maxsize
    verifier_factor: float = 1.0
    prefix_cache: bool = True
    deadline_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class Mode:
    """When rows may begin.

    Attributes:
        name: sync (rollouts, then learning, then the next), one-step (an update's rollouts beside
            the learning from the last one's, with a barrier), async (no barrier).
        max_lag: async: the most updates between the weights that begin a row and those that it
            trains. As AReaL does it: prompts begin while fewer than (version + max_lag + 1) updates'
            worth have begun; and an update waits for old groups where leaving them would make them
            too old.
    """

    name: str = "sync"
    max_lag: int = 1

    def __post_init__(self) -> None:
        if self.name not in ("sync", "one-step", "async"):
            raise UsageError(f"a mode is sync, one-step or async, not {self.name!r}")
        if self.max_lag < 0:
            raise UsageError(f"max_lag is >= 0, not {self.max_lag}")


@dataclass(frozen=True, slots=True)
class Counts:
    """Everything that happened until a moment; two of them, taken apart, are a window.

    Attributes:
        at: seconds.
        policy_busy, row_steps, steps: of all policy engines, see `plan_engine.Work`.
        judge_busy: seconds of its engines, or of its reviews added up (waits for a limit apart).
        verifier_busy, train_s, sync_s: seconds.
        started, ended, late: rows; `late` ones ended by the deadline.
    """

    at: float = 0.0
    policy_busy: float = 0.0
    row_steps: int = 0
    steps: int = 0
    judge_busy: float = 0.0
    verifier_busy: float = 0.0
    train_s: float = 0.0
    sync_s: float = 0.0
    started: int = 0
    ended: int = 0
    late: int = 0

    def minus(self, other: Counts) -> Counts:
        names = Counts.__dataclass_fields__
        return Counts(**{name: getattr(self, name) - getattr(other, name) for name in names})


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulation shows, over the updates that were not skipped.

    Attributes:
        updates: how many.
        window: what happened in them.
        rows: that were learnt from.
        lags: rows by the updates between their first token's weights and those they trained.
        rollout_s, tail_s: seconds an update from its first row's start to its last one's end, and
            after nine tenths of its rows had ended; sync and one-step alone.
        alive: rows that had begun and not ended when it stopped.
    """

    updates: int
    window: Counts
    rows: tuple[RowScript, ...]
    lags: dict[int, int]
    rollout_s: float | None
    tail_s: float | None
    alive: int

    @property
    def seconds(self) -> float:
        """Of one update."""
        return self.window.at / self.updates


def simulate(
    system: System, batches: Batches, mode: Mode, *, updates: int, skip: int = 0
) -> Outcome:
    """Run until so many updates are learnt and their weights are out; the first `skip` are warm-up.

    Raises:
        UsageError: nothing to run, or it cannot go on.
    """
    if not 0 <= skip < updates:
        raise UsageError(f"updates must be more than skip, not {updates} and {skip}")
    if system.engines < 1 or system.verifier_workers < 1:
        raise UsageError("a system has an engine and a verifier's worker at least")
    return _Run(system, batches, mode, updates).go(skip)


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


@dataclass(slots=True, eq=False)
class _Group:
    index: int
    rows: list[_Row] = field(default_factory=list)
    left: int = 0
    submitted_at: int = 0  # version
    read_by: set[int] = field(default_factory=set)  # engines that have its prompt


@dataclass(slots=True, eq=False)
class _Row:
    script: RowScript
    group: _Group
    engine: int
    place: int = 0  # in the script
    version: int = -1
    job: Job | None = None
    ended: bool = False


class _Run:
    def __init__(self, system: System, batches: Batches, mode: Mode, updates: int) -> None:
        self.system, self.batches, self.mode, self.updates = system, batches, mode, updates
        self.clock = clock = Clock()
        self.engines = [Engine(clock, system.policy) for _ in range(system.engines)]
        self._least = [(0, i) for i in range(system.engines)]
        self._load = [0] * system.engines
        judge = system.judge
        self.judge_desk = Desk(clock, judge.concurrent if judge is not None else 1)
        self.judges = (
            [Engine(clock, judge.engine) for _ in range(judge.engines)]
            if judge is not None and judge.engine is not None
            else []
        )
        self.booker = (
            judge.booker(lambda: clock.now)
            if judge is not None and judge.booker is not None
            else None
        )
        self.verifier_desk = Desk(clock, system.verifier_workers)
        self.version = self.submitted = self.started = self.ended = self.late = 0
        self.train_s = self.sync_s = 0.0
        self.training = False
        self.trained_waits = False  # one-step: learnt, but its neighbour's rollouts still run
        self.running: dict[int, int] = {}  # groups not whole yet, by the update they belong to
        self.ready: list[_Group] = []
        self.unconsumed: Counter[int] = Counter()  # groups begun and not learnt from, by version
        self.marks: list[Counts] = []
        self.lags: list[Counter[int]] = []
        self.learnt: list[list[RowScript]] = []
        self.starts: dict[int, float] = {}
        self.ends: dict[int, list[float]] = {}

    def go(self, skip: int) -> Outcome:
        self.marks.append(self._counts())
        self._submit(first=True)
        if not self.clock.run(lambda: self.version >= self.updates):
            raise UsageError("the simulation stands still; this is a bug of mintrl plan")
        window = self.marks[-1].minus(self.marks[skip])
        lags: Counter[int] = Counter()
        for found in self.lags[skip:]:
            lags += found
        rollouts = tails = None
        if self.mode.name != "async":
            spans = [self._span(update) for update in range(skip, self.updates)]
            rollouts = sum(span[0] for span in spans) / len(spans)
            tails = sum(span[1] for span in spans) / len(spans)
        return Outcome(
            updates=self.updates - skip,
            window=window,
            rows=tuple(row for rows in self.learnt[skip:] for row in rows),
            lags=dict(sorted(lags.items())),
            rollout_s=rollouts,
            tail_s=tails,
            alive=self.started - self.ended,
        )

    def _span(self, update: int) -> tuple[float, float]:
        ends = sorted(self.ends[update])
        return (ends[-1] - self.starts[update], ends[-1] - ends[int(_TAIL * (len(ends) - 1))])

    def _counts(self) -> Counts:
        work = total(self.engines)
        judge_busy = total(self.judges).busy if self.judges else self.judge_desk.busy()
        return Counts(
            at=self.clock.now,
            policy_busy=work.busy,
            row_steps=work.row_steps,
            steps=work.steps,
            judge_busy=judge_busy,
            verifier_busy=self.verifier_desk.busy(),
            train_s=self.train_s,
            sync_s=self.sync_s,
            started=self.started,
            ended=self.ended,
            late=self.late,
        )

    # --- which groups run

    def _submit(self, first: bool = False) -> None:
        groups = self.batches.groups
        if self.mode.name == "one-step":
            # Called when an update's learning begins, and once for the first.
            most = self.submitted + groups
        else:
            lag = self.mode.max_lag if self.mode.name == "async" else 0
            most = (self.version + lag + 1) * groups
        if not first and self.version >= self.updates:
            return
        while self.submitted < most:
            self._start_group(self.submitted)
            self.submitted += 1

    def _start_group(self, index: int) -> None:
        update = index // self.batches.groups
        self.running[update] = self.running.get(update, 0) + 1
        self.starts.setdefault(update, self.clock.now)
        group = _Group(index, submitted_at=self.version)
        self.unconsumed[self.version] += 1
        for script in self.batches.group(index):
            row = _Row(script, group, self._assign())
            group.rows.append(row)
        group.left = len(group.rows)
        self.started += len(group.rows)
        for row in group.rows:
            if self.system.deadline_s != float("inf"):
                self._watch(row)
            self._write(row)

    def _watch(self, row: _Row) -> None:
        self.clock.at(self.clock.now + self.system.deadline_s, lambda: self._too_late(row))

    def _too_late(self, row: _Row) -> None:
        if row.ended:
            return
        self.late += 1
        if row.job is not None:
            self.engines[row.engine].cancel(row.job)
        self._end(row)

    def _assign(self) -> int:
        """The engine with the fewest rows; a row stays with its engine, which has its KV."""
        while True:
            load, engine = heapq.heappop(self._least)
            if load == self._load[engine]:
                break
        self._change_load(engine, 1)
        return engine

    def _change_load(self, engine: int, by: int) -> None:
        self._load[engine] += by
        heapq.heappush(self._least, (self._load[engine], engine))

    # --- a row

    def _write(self, row: _Row) -> None:
        segment = row.script.segments[row.place]
        read = segment.fresh if self.system.prefix_cache else segment.context
        if not row.place and self.system.prefix_cache:
            if row.engine in row.group.read_by:
                read = 0
            row.group.read_by.add(row.engine)
        row.job = Job(
            segment.tokens,
            read,
            segment.context,
            lambda: self._written(row),
            None if row.version >= 0 else lambda: self._begun(row),
        )
        self.engines[row.engine].submit(row.job)

    def _begun(self, row: _Row) -> None:
        row.version = self.version

    def _written(self, row: _Row) -> None:
        row.job = None
        review = row.script.segments[row.place].review
        if review is None or self.system.judge is None:
            self._go_on(row)
        else:
            self.judge_desk.enter(lambda: self._review(row, review))

    def _review(self, row: _Row, review: ReviewWork) -> None:
        """In a place of the judge's desk."""

        def done() -> None:
            self.judge_desk.leave()
            self._go_on(row)

        if row.ended:
            self.judge_desk.leave()
            return
        judge = self.system.judge
        assert judge is not None
        if self.judges or judge.shared:
            engine = (
                min(self.judges, key=lambda one: one.rows)
                if self.judges
                else self.engines[row.engine]
            )
            read = review.prompt_tokens
            engine.submit(Job(review.completion_tokens, read, read, done))
            return
        self._call(review, review.calls, done)

    def _call(self, review: ReviewWork, left: int, done: Callable[[], None]) -> None:
        assert self.system.judge is not None
        factor = self.system.judge.factor
        tokens = (review.prompt_tokens + review.completion_tokens) // review.calls
        wait = self.booker.book(tokens)[1] if self.booker is not None else 0.0

        def ended() -> None:
            if left > 1:
                self._call(review, left - 1, done)
            else:
                done()

        def begin() -> None:
            self.judge_desk.work(factor * review.seconds / review.calls, ended)

        if wait > 0:
            self.clock.at(self.clock.now + wait, begin)
        else:
            begin()

    def _go_on(self, row: _Row) -> None:
        if row.ended:
            return
        row.place += 1
        if row.place < len(row.script.segments):
            self._write(row)
            return
        self._change_load(row.engine, -1)

        def scored() -> None:
            self.verifier_desk.leave()
            self._end(row)

        seconds = self.system.verifier_factor * row.script.verifier_s
        self.verifier_desk.enter(lambda: self.verifier_desk.work(seconds, scored))

    def _end(self, row: _Row) -> None:
        if row.ended:
            return
        if row.place < len(row.script.segments):  # too late: nobody writes on it any more
            self._change_load(row.engine, -1)
        row.ended = True
        self.ended += 1
        group = row.group
        update = group.index // self.batches.groups
        self.ends.setdefault(update, []).append(self.clock.now)
        group.left -= 1
        if not group.left:
            self.running[update] -= 1
            self.ready.append(group)
            self._try_train()

    # --- learning

    def _try_train(self) -> None:
        if self.trained_waits:
            self._sync_if_alone()
            return
        if self.training:
            return
        batch = self._choose()
        if batch is None:
            return
        self.training = True
        rows = [row for group in batch for row in group.rows]
        # A row that was late when no engine had had time for it was begun by nobody: no lag of its.
        self.lags.append(Counter(self.version - row.version for row in rows if row.version >= 0))
        self.learnt.append([row.script for row in rows])
        seconds = self.system.train_s([row.script.prompt + row.script.response for row in rows])
        self.train_s += seconds
        if self.mode.name == "one-step":
            self._submit()
        self.clock.at(self.clock.now + seconds, self._learnt)

    def _choose(self) -> list[_Group] | None:
        """The groups of the next update, oldest first; None: it has to wait for some."""
        groups = self.batches.groups
        if len(self.ready) < groups:
            return None
        oldest = sorted(self.ready, key=lambda group: (group.submitted_at, group.index))
        batch = oldest[:groups]
        if self.mode.name == "async":
            # What is left must still fit, oldest first, into the updates that may take it.
            left = self.unconsumed.copy()
            left.subtract(group.submitted_at for group in batch)
            waiting = 0
            for version in sorted(left):
                waiting += left[version]
                if waiting > (version + self.mode.max_lag - self.version) * groups:
                    return None
        for group in batch:
            self.unconsumed[group.submitted_at] -= 1
            if not self.unconsumed[group.submitted_at]:
                del self.unconsumed[group.submitted_at]
        self.ready = oldest[groups:]
        return batch

    def _learnt(self) -> None:
        if self.mode.name == "one-step":
            self.trained_waits = True
            self._sync_if_alone()
        else:
            self._sync()

    def _sync_if_alone(self) -> None:
        """One-step: the next update's rollouts end before the weights change."""
        if not any(self.running.values()):
            self.trained_waits = False
            self._sync()

    def _sync(self) -> None:
        for engine in self.engines:
            engine.hold(self.system.sync_s)
        self.sync_s += self.system.sync_s
        self.clock.at(self.clock.now + self.system.sync_s, self._synced)

    def _synced(self) -> None:
        self.version += 1
        self.training = False
        self.marks.append(self._counts())
        if self.version >= self.updates:
            return
        if self.mode.name != "one-step":
            self._submit()
        self._try_train()
