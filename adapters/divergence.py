"""How often a free-running run wrote another token than `schedule: rounds` would have.

Draws are keyed, so that who else is in a batch decides nothing; but float32 logits differ in their
last bits with the batch, and now and then a draw falls between the two. What that amounts to is
counted here: some groups are written again in rounds, by the same weights, draws and judge.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mintrl_env.adapters.pump import Rounds
from mintrl_env.adapters.session import JudgeFactory, RolloutSession
from mintrl_env.errors import UsageError
from mintrl_env.protocols import Judge
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Task

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Divergence:
    """What a comparison found.

    Attributes:
        rows: compared; those that are not valid in either are left out.
        differing: rows with another token, or of another length.
        tokens: up to the first difference of each row, over all rows.
    """

    rows: int
    differing: int
    tokens: int

    @property
    def share(self) -> float:
        """Rows that differ; NaN where none was compared."""
        return self.differing / self.rows if self.rows else float("nan")

    @classmethod
    def between(cls, free: Sequence[Trajectory], rounds: Sequence[Trajectory]) -> Divergence:
        """Compare rows one by one."""
        rows = differing = tokens = 0
        for a, b in zip(free, rounds, strict=True):
            if not (a.valid and b.valid):
                continue
            shorter = min(len(a.ids), len(b.ids))
            same = a.ids[:shorter] == b.ids[:shorter]
            first = shorter if same.all() else int(np.argmin(same))
            rows += 1
            tokens += first
            differing += first < max(len(a.ids), len(b.ids))
        return cls(rows, differing, tokens)


def compare_with_rounds(
    session: RolloutSession,
    groups: Sequence[Sequence[Trajectory]],
    tasks: Sequence[Task],
    *,
    judge: Judge | JudgeFactory | None = None,
    reviewed: bool = True,
) -> Divergence:
    """Write groups again in rounds, and count the rows that differ; logged at level INFO.

    Costs those rows, their reviews included, once more, and KV for them. A judge that answers
    otherwise when it is asked again makes rows differ as well.

    Args:
        session: a free-running one with the weights that wrote the groups.
        groups: whole groups of one update, as `session.groups` gave them.
        tasks: theirs, in the same order.
        judge: as the session was given it; made anew from a factory.
        reviewed: as in `session.groups`.

    Raises:
        UsageError: groups and tasks do not belong together, or the session works in rounds already.
    """
    if session.host.rounds is not None:
        raise UsageError("this session works in rounds: there is nothing to compare")
    if [rows[0].task_id for rows in groups] != [task.task_id for task in tasks]:
        raise UsageError("groups and tasks are not the same, in the same order")
    size = sum(map(len, groups))
    host = replace(session.host, rounds=Rounds(), slots=min(size, session.host.slots))
    runner = session.runner
    with RolloutSession(
        host,
        runner.config,
        judge=judge,
        guards=runner.parts.guards,
        verifier=runner.parts.verifier,
        environment=runner.parts.environment,
        seed=runner.seed,
    ) as other:
        again = other.groups(
            tasks,
            update=groups[0][0].update,
            reviewed=reviewed,
            rollouts=[[row.rollout for row in rows] for rows in groups],
        )
    found = Divergence.between(
        [row for rows in groups for row in rows], [row for rows in again for row in rows]
    )
    _log.info(
        "free-running beside rounds: %d of %d rows differ, after %d equal tokens in all",
        found.differing,
        found.rows,
        found.tokens,
    )
    return found
