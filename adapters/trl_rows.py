"""Which rows of a TRL batch are one group, over all ranks, and what they are called.

TRL lays the groups of an update one after the other over the ranks, so a group may begin on one
rank and end on the next; its rows know each other by their place alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.utils import gather_object  # type: ignore[import-untyped]

from mintrl_env.adapters.session import distinct_ids, task_id_of
from mintrl_env.errors import UsageError
from mintrl_env.tasks import TaskColumns
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Outcome, Score, Task

_FAILED = (Outcome.FAILED, Outcome.UNPARSED)


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of one group that are on this rank.

    Attributes:
        group: the group's index in the update, over all ranks.
        start: where its rows begin in this rank's batch.
        rollouts: their indices in the group.
    """

    group: int
    start: int
    rollouts: tuple[int, ...]


def group_shares(rank: int, rows: int, size: int) -> list[Share]:
    """The groups, `size` rows each, that rank `rank` has a part of; every rank has `rows` rows."""
    by_group: dict[int, list[int]] = {}
    for place in range(rank * rows, (rank + 1) * rows):
        by_group.setdefault(place // size, []).append(place % size)
    return [
        Share(group, group * size + rollouts[0] - rank * rows, tuple(rollouts))
        for group, rollouts in by_group.items()
    ]


def check_repeated(prompts: Sequence[Any], shares: Sequence[Share]) -> None:
    """Refuse a batch in which a group's rows have different prompts.

    Raises:
        UsageError: TRL did not hand over each prompt once for every row of its group.
    """
    for share in shares:
        for place in range(share.start, share.start + len(share.rollouts)):
            if prompts[place] != prompts[share.start]:
                raise UsageError(
                    f"rows {share.start} and {place} of the batch should be of one group, but "
                    "their prompts differ: this TRL does not repeat prompts as 1.16 does"
                )


def distinct_over_ranks(
    tasks: Sequence[Task], shares: Sequence[Share], seen: dict[str, int]
) -> list[Task]:
    """The tasks, each repeated id made unique in the update, over all ranks (a collective call).

    A group has one id on all ranks, and two groups never share one, since rows of one key would
    take the same draws.
    """
    mine = [(share.group, task.task_id) for share, task in zip(shares, tasks, strict=True)]
    given = dict(gather_object(mine))
    groups = sorted(given)
    unique = dict(zip(groups, distinct_ids([given[g] for g in groups], seen), strict=True))
    return [
        replace(task, task_id=unique[share.group])
        for share, task in zip(shares, tasks, strict=True)
    ]


def task_of_row(row: Mapping[str, Any], *, verified: bool) -> Task:
    """A data set row as a Task: the columns prompt, answer, context (or solution), task_id (or id).

    A row without an id is named by its prompt. Other columns are the reward functions' and go into
    the metadata, whatever they hold; `tests` is read where a verifier scores (`verified`).
    """
    known = {name: value for name, value in row.items() if name != "system_prompt"}
    if not verified:
        known.pop("tests", None)
    if row.get("task_id") is None and row.get("id") is None:
        known["task_id"] = task_id_of(row)
    return TaskColumns(needs_answer=False).task(known, "train_dataset", 0)


def review_counts(rows: Sequence[Trajectory], accelerator: Any) -> dict[str, float]:
    """Counts of the update's reviews over all ranks, under `mintrl/` (a collective call)."""
    reviews = [review for row in rows for review in row.reviews]
    mine = {
        "reviews": len(reviews),
        "revises": sum(review.outcome is Outcome.REVISE for review in reviews),
        "reviews_guarded": sum(review.outcome is Outcome.GUARDED for review in reviews),
        "reviews_failed": sum(review.outcome in _FAILED for review in reviews),
        "dropped_tokens": sum(row.dropped_tokens for row in rows),
        "rows_not_valid": sum(not row.valid for row in rows),
    }
    counts = torch.tensor(list(mine.values()), device=accelerator.device)
    total = dict(zip(mine, accelerator.reduce(counts, reduction="sum").tolist(), strict=True))
    out = {f"mintrl/{name}": float(value) for name, value in total.items()}
    if total["reviews"]:
        out["mintrl/revises_per_review"] = total["revises"] / total["reviews"]
    return out


def score_of(reward: float, row: Trajectory) -> Score:
    """The trainer's reward of a valid row as its score; NaN where every function returned None."""
    if reward != reward:
        return Score.undecided("unavailable", "every reward function returned None")
    if row.score.decided:  # the verifier's, which other functions may have added to
        return Score(reward, row.score.status, row.score.detail)
    return Score(reward, "rewarded")


def by_group(rows: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """Rows of one update apart by task, in their order."""
    groups: dict[str, list[Trajectory]] = {}
    for row in rows:
        groups.setdefault(row.task_id, []).append(row)
    return list(groups.values())


def check_dataset(name: str, rows: Any) -> None:
    """Refuse a data set with which TRL would train on nothing, or fail by a KeyError.

    Raises:
        UsageError: it has no row, or no column `prompt`.
    """
    columns = getattr(rows, "column_names", None)
    if isinstance(columns, list) and columns and "prompt" not in columns:
        raise UsageError(f"{name} has no column 'prompt'; its columns are {', '.join(columns)}")
    if hasattr(rows, "__len__") and not len(rows):
        raise UsageError(f"{name} has no row")
