"""A training of many updates, simulated: rows, engines, judge, verifier, trainer, new weights.

    outcome = simulate(system, batches, Mode("async", max_lag=2), updates=8, skip=3)

Discrete events on one clock; deterministic. What is not in it: failures and retries, the network,
preemption of rows by an engine that runs out of KV memory.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from mintrl_env.errors import UsageError
from mintrl_env.plan_clock import Clock, Desk
from mintrl_env.plan_engine import Engine, Job, total
from mintrl_env.plan_rows import ReviewWork, RowScript
from mintrl_env.plan_system import Counts, Mode, Outcome, System

__all__ = ["Rows", "simulate"]

_TAIL = 0.9  # the share of an update's rows whose end begins its tail


class Rows(Protocol):
    """Where the rows come from; `plan_rows.Batches` is one."""

    groups: int  # prompts an update

    def group(self, index: int) -> list[RowScript]:
        """The rows of the group with this number, counted over all updates."""
        ...


def simulate(system: System, batches: Rows, mode: Mode, *, updates: int, skip: int = 0) -> Outcome:
    """Run until so many updates are learnt and their weights are out; the first `skip` are warm-up.

    Raises:
        UsageError: nothing to run, or it cannot go on.
    """
    if not 0 <= skip < updates:
        raise UsageError(f"updates must be more than skip, not {updates} and {skip}")
    if system.engines < 1 or system.verifier_workers < 1:
        raise UsageError("a system has an engine and a verifier's worker at least")
    return _Run(system, batches, mode, updates).go(skip)


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
    engine: int = -1
    place: int = 0  # in the script
    version: int = -1
    job: Job | None = None
    ended: bool = False


class _Run:
    def __init__(self, system: System, batches: Rows, mode: Mode, updates: int) -> None:
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
        self.door = Desk(clock, system.in_flight)
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
            group.rows.append(_Row(script, group))
        group.left = len(group.rows)
        for row in group.rows:
            self._wait(row)

    def _wait(self, row: _Row) -> None:
        self.door.enter(lambda: self._begin(row))

    def _begin(self, row: _Row) -> None:
        self.started += 1
        row.engine = self._assign()
        if self.system.deadline_s != float("inf"):
            self.clock.at(self.clock.now + self.system.deadline_s, lambda: self._too_late(row))
        self._write(row)

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
            None if row.version >= 0 else lambda: self._has_slot(row),
        )
        self.engines[row.engine].submit(row.job)

    def _has_slot(self, row: _Row) -> None:
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
        self.door.leave()
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
