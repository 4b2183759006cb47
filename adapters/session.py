"""A runner, its engines and its loop thread, held together for the length of a run.

Trainers, evaluations and `mintrl rollout` all ask this one object for groups, so that they share
prompts, sampling, judge and store.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from mintrl_env.adapters.pump import LoopThread, Pumped, run_with_pump
from mintrl_env.rollout import Runner
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Task

Progress = Callable[[int, int], None]


class RolloutSession:
    """Runs groups while the calling thread serves the engines.

    Args:
        runner: runs the episodes.
        engines: whatever is pumped: the policy's engine, the judge's; none for servers.
    """

    def __init__(self, runner: Runner, engines: Sequence[Pumped]) -> None:
        self.runner = runner
        self.engines = tuple(engines)
        self._loop: LoopThread | None = None

    def groups(
        self,
        tasks: Sequence[Task],
        *,
        update: int,
        reviewed: bool = True,
        rollouts: Sequence[Sequence[int]] | None = None,
        on_progress: Progress = lambda done, total: None,
    ) -> list[list[Trajectory]]:
        """The groups of `tasks`, in their order (see `Runner.groups`). Call it from the thread that
        owns the models."""
        if self._loop is None:
            self._loop = LoopThread()
        return run_with_pump(
            self.engines,
            lambda: self.runner.collect(
                tasks,
                update=update,
                reviewed=reviewed,
                rollouts=rollouts,
                on_progress=on_progress,
            ),
            loop=self._loop,
        )

    def close(self) -> None:
        """End the loop thread; closing twice is harmless."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()

    def __enter__(self) -> RolloutSession:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def distinct(tasks: Sequence[Task]) -> list[Task]:
    """The same tasks with every repeated id made unique (`id#2`), so that no two rows of an update
    share a key and with it their draws."""
    seen: dict[str, int] = {}
    out = []
    for task in tasks:
        seen[task.task_id] = seen.get(task.task_id, 0) + 1
        count = seen[task.task_id]
        out.append(task if count == 1 else replace(task, task_id=f"{task.task_id}#{count}"))
    return out


def task_id_of(row: Mapping[str, object]) -> str:
    """An id for a data set row that has none: a hash of its prompt, equal on every rank and run."""
    text = json.dumps(row.get("prompt"), sort_keys=True, default=str)
    return "row-" + hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
