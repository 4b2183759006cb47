"""What a whole run will use, reckoned from a few measured groups. Arithmetic only.

per reviewed row: reviews, calls, tokens, money       x  rows that will be reviewed
per row of each kind: tokens that the policy samples  x  rows of that kind
seconds of the measured groups                        x  updates, between two ways of growing
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Kind, Usage


@dataclass(frozen=True, slots=True)
class Plan:
    """How many rows a run has.

    Attributes:
        updates: of these, the first `judged_updates` have the judge.
        prompts: groups an update.
        n_control, n_intervened: rows of a group.
        probe_rows: reviewed rows outside the updates.
        evaluation_rows: rows outside the updates that nobody reviews.
    """

    updates: int
    judged_updates: int
    prompts: int
    n_control: int
    n_intervened: int
    probe_rows: int = 0
    evaluation_rows: int = 0

    @property
    def rows_per_update(self) -> int:
        return self.prompts * (self.n_control + self.n_intervened)

    @property
    def rows(self) -> int:
        return self.updates * self.rows_per_update + self.probe_rows + self.evaluation_rows

    @property
    def reviewed_rows(self) -> int:
        return self.judged_updates * self.prompts * self.n_intervened + self.probe_rows


@dataclass(frozen=True, slots=True)
class JudgeLimits:
    """What bounds the calls of a judge. None: nothing does.

    Attributes:
        concurrent: reviews at once.
        rpm, tpm: calls and tokens a minute.
        tokens, usd: in all.
        priced: whether the judge knows what its tokens cost.
        service: whether it may cost anything at all.
    """

    concurrent: int | None = None
    rpm: int | None = None
    tpm: int | None = None
    tokens: int | None = None
    usd: float | None = None
    priced: bool = False
    service: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """What groups have used.

    Attributes:
        rows, reviewed_rows: trajectories, and those of them that were open to review.
        reviews, usage: of all reviews.
        sampled_reviewed, sampled_other: policy tokens sampled in rows of either kind, dropped ones
            included.
        review_seconds: of all reviews, added up.
        seconds: from the first row's start to the last one's end.
    """

    rows: int
    reviewed_rows: int
    reviews: int
    usage: Usage
    sampled_reviewed: int
    sampled_other: int
    review_seconds: float
    seconds: float

    @classmethod
    def of(
        cls,
        groups: Sequence[Sequence[Trajectory]],
        *,
        seconds: float,
        review_seconds: float = 0.0,
    ) -> Measured:
        rows = [row for group in groups for row in group]
        reviewed = [row for row in rows if row.kind is Kind.INTERVENED]
        usages = [review.usage for row in reviewed for review in row.reviews]
        return cls(
            rows=len(rows),
            reviewed_rows=len(reviewed),
            reviews=len(usages),
            usage=sum(usages, Usage(calls=0)),
            sampled_reviewed=sum(row.draws for row in reviewed),
            sampled_other=sum(row.draws for row in rows if row.kind is Kind.CONTROL),
            review_seconds=review_seconds,
            seconds=seconds,
        )


def forecast(measured: Measured, plan: Plan, limits: JudgeLimits) -> dict[str, Any]:
    """Calls, tokens, money and hours of the whole run, and what that takes for granted.

    Returns:
        Counts of the judge's part; `usd` is None where nobody knows prices. `hours` is a pair: an
        update as fast as the measured groups, whatever its size, and one whose rows take their
        time each; both at least what the judge's limits allow. None of no rows.
    """
    found: dict[str, Any] = {
        "rows": plan.rows,
        "reviewed_rows": plan.reviewed_rows,
        "per_reviewed_row": None,
        "per_update_rows": plan.rows_per_update,
    }
    if not measured.rows or (plan.reviewed_rows and not measured.reviewed_rows):
        return {**found, "hours": None, "assumptions": ["no row was measured"]}
    scale = plan.reviewed_rows / measured.reviewed_rows if plan.reviewed_rows else 0.0
    usage = measured.usage
    calls = scale * usage.calls
    tokens = scale * (usage.prompt_tokens + usage.completion_tokens)
    if measured.reviewed_rows:
        each = measured.reviewed_rows
        found["per_reviewed_row"] = {
            "reviews": measured.reviews / each,
            "calls": usage.calls / each,
            "prompt_tokens": usage.prompt_tokens / each,
            "completion_tokens": usage.completion_tokens / each,
            "usd": usage.usd / each if limits.priced else None,
            "seconds": measured.review_seconds / each,
        }
    floors = {
        "rpm": calls / limits.rpm / 60 if limits.rpm else 0.0,
        "tpm": tokens / limits.tpm / 60 if limits.tpm else 0.0,
        "concurrent": scale * measured.review_seconds / limits.concurrent / 3600
        if limits.concurrent
        else 0.0,
    }
    return {
        **found,
        "reviews": round(scale * measured.reviews),
        "calls": round(calls),
        "prompt_tokens": round(scale * usage.prompt_tokens),
        "completion_tokens": round(scale * usage.completion_tokens),
        "usd": scale * usage.usd if limits.priced else None,
        "policy_tokens": round(_sampled(measured, plan)),
        "hours": [max(hours, *floors.values()) for hours in _hours(measured, plan)],
        "hours_by_judge_limits": floors,
        "limits": asdict(limits),
        "assumptions": _assumptions(plan, limits),
    }


def budget_notes(found: Mapping[str, Any]) -> list[str]:
    """What a judge's budget (limits of tokens and money) will not last for.

    Args:
        found: a forecast, or its `limits`, `usd`, `prompt_tokens` and `completion_tokens`.
    """
    limits = found.get("limits")
    if not limits:
        return []
    tokens = found["prompt_tokens"] + found["completion_tokens"]
    return [
        f"the run needs about {needed:,.4g} {name}, and judge.options.limits.{name} is "
        f"{limits[name]:,.4g}: it would stop before its end"
        for name, needed in (("usd", found["usd"]), ("tokens", tokens))
        if limits[name] is not None and needed is not None and needed > limits[name]
    ]


def _sampled(measured: Measured, plan: Plan) -> float:
    other_rows = measured.rows - measured.reviewed_rows
    reviewed = measured.sampled_reviewed / measured.reviewed_rows if measured.reviewed_rows else 0.0
    other = measured.sampled_other / other_rows if other_rows else reviewed
    return plan.reviewed_rows * reviewed + (plan.rows - plan.reviewed_rows) * other


def _hours(measured: Measured, plan: Plan) -> tuple[float, float]:
    ratio = plan.rows_per_update / measured.rows
    rest = (plan.probe_rows + plan.evaluation_rows) / measured.rows
    ends = [(plan.updates * grown + rest) * measured.seconds / 3600 for grown in (1.0, ratio)]
    return min(ends), max(ends)


def _assumptions(plan: Plan, limits: JudgeLimits) -> list[str]:
    lines = [
        f"{plan.rows:,} rows ({plan.updates:,} updates of {plan.rows_per_update:,}, probes and "
        f"evaluations), {plan.reviewed_rows:,} of them open to review",
        "every row is as long, and as often reviewed, as the measured ones; a policy that learns "
        "may come to write longer or shorter responses",
        "hours are those of rollouts: learning (optimiser steps) is not in them, and rows without a "
        "judge are taken to be as slow as those with one",
        "the hours lie between an update that takes as long as the measured groups did, and rows "
        "that take their time each, as if no more of them ran at once than here",
    ]
    if limits.service and not limits.priced and plan.reviewed_rows:
        lines.append("money is not known: the judge has no prices (judge.options.prices)")
    return lines
