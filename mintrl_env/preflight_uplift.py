"""Uplift: does a correction help? The policy goes on behind it, and without it from the same place.

Both go on alone to the response's end and are scored, so that the difference is the correction's.
What the judge cut is not the other side: it was written, and found wrong, before the cut.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mintrl_env.episode import Episode
from mintrl_env.errors import MissingExtraError, UsageError
from mintrl_env.keys import RowKey
from mintrl_env.protocols import Policy, Tokenizer, Verifier
from mintrl_env.rollout import Parts, RolloutConfig, drive
from mintrl_env.statistics import mean_interval
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Chunk, Finish, Kind, Outcome, Task, frozen_ids

LEAST_TASKS = 5
"""An interval over fewer tasks is too narrow to refuse anything by."""


@dataclass(frozen=True, slots=True, eq=False)
class Fork:
    """A place where a judge wrote a correction.

    Attributes:
        task, rollout, retry, review: whose.
        prompt_ids, kept, correction: int32; the response goes on behind `kept`, or behind both.
    """

    task: Task
    rollout: int
    retry: int
    review: int
    prompt_ids: npt.NDArray[np.int32]
    kept: npt.NDArray[np.int32]
    correction: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Continued:
    """The rewards of a fork's two sides (NaN: not scored) and the texts that got them."""

    fork: Fork
    corrected: tuple[float, ...]
    alone: tuple[float, ...]
    corrected_text: str = ""
    alone_text: str = ""

    @property
    def difference(self) -> float | None:
        """Mean reward behind the correction less that without it; None where a side has none."""
        sides = [[r for r in side if not math.isnan(r)] for side in (self.corrected, self.alone)]
        if not all(sides):
            return None
        return sum(sides[0]) / len(sides[0]) - sum(sides[1]) / len(sides[1])


def forks_of(
    groups: Sequence[Sequence[Trajectory]],
    tasks: Sequence[Task],
    *,
    per_task: int,
    seed: int = 0,
) -> list[Fork]:
    """The corrections of some rows, at most `per_task` of each task, drawn by the seed.

    A bare cut is one too: its other side is the same place, so it is left out.
    """
    by_id = {task.task_id: task for task in tasks}
    found: list[Fork] = []
    for rows in groups:
        forks = [
            Fork(
                by_id[row.task_id],
                row.rollout,
                row.retry,
                review.index,
                row.prompt_ids,
                frozen_ids(row.ids[: review.cut]),
                frozen_ids(row.ids[review.cut : review.cut + review.correction_tokens]),
            )
            for row in rows
            for review in row.reviews
            if review.outcome is Outcome.REVISE and review.correction_tokens
        ]
        if len(forks) > per_task:
            chosen = np.random.default_rng([seed, len(found)]).permutation(len(forks))[:per_task]
            forks = [forks[i] for i in sorted(chosen)]
        found += forks
    return found


async def continue_forks(
    forks: Sequence[Fork],
    policy: Policy,
    verifier: Verifier,
    tokenizer: Tokenizer,
    config: RolloutConfig,
    *,
    update: int,
    samples: int = 1,
    seed: int = 0,
    on_live: Callable[[int], object] = lambda live: None,
) -> list[Continued]:
    """Both sides of each fork, `samples` times, at once; nobody reviews.

    Args:
        update: of the draws' keys; one that nothing else has.
        on_live: called with the number of continuations that still run whenever it changes.
    """
    verifier_slots = asyncio.Semaphore(config.verifier_concurrency)
    live = 2 * samples * len(forks)
    on_live(live)

    async def one(fork: Fork, corrected: bool, sample: int) -> tuple[float, str]:
        nonlocal live
        try:
            side = "corrected" if corrected else "alone"
            name = f"{fork.task.task_id}/{fork.rollout}.{fork.retry}.{fork.review}/{side}"
            episode = Episode(
                fork.task,
                fork.prompt_ids,
                kind=Kind.CONTROL,
                tokenizer=tokenizer,
                config=config.episode,
                key=RowKey(seed, update, name, sample),
            )
            begun = [fork.kept, fork.correction] if corrected else [fork.kept]
            ids = frozen_ids(np.concatenate(begun))
            if len(ids):
                episode.send(Chunk(ids, finish=Finish.LENGTH))
            try:
                parts = Parts(policy, verifier=verifier)
                end = await drive(episode, parts, config, verifier_slots=verifier_slots)
            except (UsageError, MissingExtraError):
                raise  # bugs, as in the runner
            except Exception as error:  # as a row that failed: not scored, and the text says why
                return math.nan, f"({type(error).__name__}: {error})"
            return (end.score.reward if end.valid else math.nan), episode.text
        finally:
            live -= 1
            on_live(live)

    async def both(fork: Fork) -> Continued:
        runs = [one(fork, corrected, s) for corrected in (True, False) for s in range(samples)]
        done = await asyncio.gather(*runs)
        rewards = tuple(reward for reward, _ in done)
        return Continued(
            fork, rewards[:samples], rewards[samples:], done[0][1], done[samples][1]
        )  # fmt: skip

    jobs = [asyncio.ensure_future(both(fork)) for fork in forks]
    try:
        return list(await asyncio.gather(*jobs))
    finally:
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)


def uplift_figures(continued: Sequence[Continued], *, seed: int = 0) -> dict[str, Any]:
    """The mean difference over tasks (each task's corrections averaged first) with its interval.

    Corrections of one task are not independent, so the bootstrap draws tasks.
    """
    by_task: dict[str, list[Continued]] = {}
    for item in continued:
        if item.difference is not None:
            by_task.setdefault(item.fork.task.task_id, []).append(item)
    means = [_mean([item.difference or 0.0 for item in items]) for items in by_task.values()]
    counted = [item for items in by_task.values() for item in items]
    signs = [np.sign(item.difference or 0.0) for item in counted]
    return {
        "corrections": len(continued),
        "scored": len(counted),
        "tasks": len(means),
        "mean": _mean(means) if means else None,
        "ci95": list(mean_interval(means, seed=seed)) if means else None,
        "better": signs.count(1),
        "worse": signs.count(-1),
        "equal": signs.count(0),
        "corrected_reward": _rewards([item.corrected for item in counted]),
        "alone_reward": _rewards([item.alone for item in counted]),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _rewards(sides: Sequence[Sequence[float]]) -> float | None:
    """Pooled over all scored continuations; unlike the difference, not averaged by task first."""
    values = [reward for side in sides for reward in side if not math.isnan(reward)]
    return _mean(values) if values else None
