"""What a simulation is of, and what comes out of it: machines, modes, counts. Data only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mintrl_env.errors import UsageError
from mintrl_env.plan_engine import Speed
from mintrl_env.plan_rows import RowScript


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
        in_flight: rows that have begun and not ended, at most; more wait before their start.
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
    in_flight: int = sys.maxsize
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
