"""Which rollouts a reader should see: few, and telling.

From the first, a middle and the last update, groups in which something is to be learnt: an
intervened rollout that came right beside a control that did not, a revision that did not help, a
review that failed or that a guard stopped. Deterministic: the same rows give the same choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Kind, Outcome, Provenance


@dataclass(frozen=True, slots=True)
class Shown:
    """One group and the rows of it that are shown in full.

    Attributes:
        rows: all rows, by rollout index.
        chosen: the ones shown.
    """

    rows: tuple[Trajectory, ...]
    chosen: tuple[Trajectory, ...]

    @property
    def update(self) -> int:
        return self.rows[0].update

    @property
    def task_id(self) -> str:
        return self.rows[0].task_id


def stages(updates: Sequence[int]) -> list[tuple[str, int]]:
    """First, middle and last update, named; evaluations (negative) where there is no other."""
    trained = sorted(u for u in set(updates) if u >= 0) or sorted(set(updates))
    if not trained:
        return []
    places = {0: "first", len(trained) - 1: "last", (len(trained) - 1) // 2: "middle"}
    if len(trained) == 1:
        places = {0: "only"}
    elif len(trained) == 2:
        places = {0: "first", 1: "last"}
    return [(places[i], trained[i]) for i in sorted(places)]


def features(row: Trajectory) -> frozenset[str]:
    """What a row can show; the words are for this module alone."""
    found = set()
    right = row.valid and row.score.decided and row.reward > 0
    outcomes = {review.outcome for review in row.reviews}
    if not row.valid:
        found.add("not valid")
    if row.kind is Kind.CONTROL:
        found.add("control right" if right else "control wrong")
    elif Outcome.REVISE in outcomes:
        found.add("revised right" if right else "revised wrong")
    elif outcomes:
        found.add("kept right" if right else "kept wrong")
    found |= {o.value for o in (Outcome.GUARDED, Outcome.FAILED, Outcome.UNPARSED) if o in outcomes}
    if row.count(Provenance.ENVIRONMENT) and row.valid:
        found.add("environment")
    return frozenset(found)


def choose(rows: Sequence[Trajectory], *, max_groups: int, max_rows: int = 4) -> list[Shown]:
    """Up to `max_groups` groups of one update; a further one only if it shows something new.

    Args:
        rows: all rows of the update.
        max_rows: the most rows shown of one group.
    """
    groups: dict[str, list[Trajectory]] = {}
    for row in sorted(rows, key=lambda r: (r.task_id, r.rollout)):
        groups.setdefault(row.task_id, []).append(row)
    seen: set[str] = set()
    shown: list[Shown] = []
    while groups and len(shown) < max_groups:
        gains = {task_id: _gain(group, seen) for task_id, group in groups.items()}
        best = max(gains, key=lambda task_id: gains[task_id])  # the first one of equals
        if shown and gains[best] < 1:
            break
        group = groups.pop(best)
        chosen = _rows(group, seen, max_rows)
        for row in chosen:
            seen |= features(row)
        shown.append(Shown(tuple(group), tuple(chosen)))
    return shown


def _gain(group: Sequence[Trajectory], seen: set[str]) -> int:
    found = frozenset().union(*(features(row) for row in group))
    # What the method is about: a correction reached what the policy alone did not.
    contrast = {"revised right", "control wrong"} <= found and "revised right" not in seen
    return len(found - seen) + 2 * contrast


def _rows(group: Sequence[Trajectory], seen: set[str], limit: int) -> list[Trajectory]:
    known, left = set(seen), list(group)
    chosen: list[Trajectory] = []
    while left and len(chosen) < limit:
        best = max(left, key=lambda row: len(features(row) - known))
        if chosen and not features(best) - known:
            break
        left.remove(best)
        chosen.append(best)
        known |= features(best)
    if all(row.kind is not Kind.CONTROL for row in chosen) and len(chosen) < limit:
        chosen += [row for row in left if row.kind is Kind.CONTROL][:1]
    return sorted(chosen, key=lambda row: row.rollout)
