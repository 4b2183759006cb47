"""The figures of a preflight, and the checks that refuse a run by them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from textwrap import shorten
from typing import Any

import numpy as np

from mintrl_env.preflight_forecast import budget_notes
from mintrl_env.preflight_uplift import LEAST_TASKS
from mintrl_env.trajectory import RolloutStats, Trajectory
from mintrl_env.types import Kind, Outcome, Provenance, Review, StopReason

FEW = 0.04
"""Off-policy fraction of intervened rows; the paper did best at 2 to 4 %."""

_BAD_ENDS = (StopReason.DEADLINE, StopReason.ERROR)


@dataclass(frozen=True, slots=True)
class Limits:
    """Below or above what a run is refused; a share of nothing is not refused.

    Attributes:
        min_parse_rate: verdicts / answers of the judge.
        max_failure_rate: reviews without any answer / reviews; at most, the run would stop itself.
        max_leaks: corrections that give the answer away and came through the guards.
        min_decided: rows that the verifier could score / rows that came to their end.
        min_finished: rows that came to their end / rows.
    """

    min_parse_rate: float = 0.9
    max_failure_rate: float = 0.5
    max_leaks: int = 0
    min_decided: float = 0.95
    min_finished: float = 0.95


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold.

    Attributes:
        value: as people read it; "-" where there was nothing to measure.
        wanted: what it must be.
        todo: what to do where it does not hold.
    """

    name: str
    passed: bool
    value: str
    wanted: str
    todo: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Leaks:
    """Corrections that give the answer away by the leak guard's rules, by place in the rows.

    Attributes:
        written: all that the judge wrote, guards or no guards; place -> why.
        through: those that stand in a response.
    """

    written: Mapping[tuple[str, int, int, int], str]
    through: Mapping[tuple[str, int, int, int], str]


def coverage(
    groups: Sequence[Sequence[Trajectory]], *, chunk_tokens: int, max_reviews: int
) -> dict[str, Any]:
    """How much of the responses a judge saw, and could have seen.

    Returns:
        `seen`: policy tokens of intervened responses that stood in a reviewed chunk, their share.
        `could_see`: of all rows' tokens by policy, the share within the first R k of each.
        None of no tokens.
    """
    seen = written = reachable = all_written = 0
    for row in (row for rows in groups for row in rows):
        policy = row.count(Provenance.POLICY)
        all_written += policy
        reachable += min(policy, chunk_tokens * max_reviews)
        if row.kind is Kind.INTERVENED:
            written += policy
            seen += sum(_kept(review) for review in row.reviews)
    return {
        "seen": _share(seen, written),
        "could_see": _share(reachable, all_written),
        "seen_tokens": seen,
        "intervened_policy_tokens": written,
    }


def _kept(review: Review) -> int:
    """The tokens of a reviewed chunk that are still in the response."""
    if review.outcome is Outcome.REVISE:
        return review.cut - review.position
    return review.chunk_tokens


def review_figures(groups: Sequence[Sequence[Trajectory]]) -> dict[str, Any]:
    """How reviews ended. `answer_rate`: reviews that a judge answered; `parse_rate`: answers that
    were verdicts."""
    reviews = [review for rows in groups for row in rows for review in row.reviews]
    counts = Counter(review.outcome for review in reviews)
    failed, unparsed = counts[Outcome.FAILED], counts[Outcome.UNPARSED]
    answered = len(reviews) - failed
    causes = Counter(review.cause for review in reviews if review.cause)
    return {
        "reviews": len(reviews),
        **{outcome.value: counts[outcome] for outcome in Outcome},
        "answer_rate": _share(answered, len(reviews)),
        "parse_rate": _share(answered - unparsed, answered),
        "causes": dict(causes.most_common()),
        "examples": {review.cause: review.reason[:300] for review in reviews if review.cause},
        "guards": dict(Counter(review.guard for review in reviews if review.guard).most_common()),
        "bare_cuts": sum(
            review.outcome is Outcome.REVISE and not review.correction_tokens for review in reviews
        ),
    }


def row_figures(groups: Sequence[Sequence[Trajectory]]) -> dict[str, Any]:
    """How rows ended and were scored, off-policy fractions, groups with nothing to learn from."""
    rows = [row for group in groups for row in group]
    ended = [row for row in rows if row.stop_reason not in _BAD_ENDS]
    undecided = [row for row in ended if not row.score.decided]
    stats = RolloutStats.over(groups).as_dict()
    lengths = [len(row.ids) for row in ended]
    return {
        "tasks": len(groups),
        "rows": len(rows),
        "finished_share": _share(len(ended), len(rows)),
        "not_finished": dict(Counter(r.cause for r in rows if r.stop_reason in _BAD_ENDS)),
        "decided_share": _share(len(ended) - len(undecided), len(ended)),
        "undecided": dict(Counter(row.score.status for row in undecided)),
        "truncated_share": _share(
            sum(row.stop_reason is StopReason.LENGTH for row in ended), len(ended)
        ),
        "response_tokens_p50": _quantile(lengths, 0.5),
        "response_tokens_p95": _quantile(lengths, 0.95),
        **{
            name: stats[name]
            for name in (
                "off_policy_fraction_intervened",
                "off_policy_fraction_all",
                "all_fail_share",
                "all_succeed_share",
                "control_reward",
                "intervened_reward",
                "revises_per_review",
            )
        },
    }


def latency(seconds: Sequence[float]) -> dict[str, Any]:
    """Seconds of a review, the middle and the slow ones."""
    return {"p50": _quantile(seconds, 0.5), "p95": _quantile(seconds, 0.95)}


def _quantile(values: Sequence[float], at: float) -> float | None:
    return float(np.quantile(values, at)) if len(values) else None


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


# --- checks

_BY_CAUSE = {
    "timeout": "raise judge.options.timing.attempt_s, or ask less at once (judge.concurrent)",
    "connection": "is the server up, and judge.options.url its address?",
    "rate_limit": "set judge.options.limits {rpm, tpm} to what the service allows",
    "server": "look at the server's log, and at the reasons on the page",
    "auth": "judge.options.api_key_env names the variable that holds the key",
    "budget": "judge.options.limits {tokens, usd} are used up: raise them",
    "internal": "the reasons on the page hold the judge's own error",
}


def checks(figures: Mapping[str, Any], limits: Limits, *, judged: bool) -> list[Check]:
    """What must hold before a run, the judge's part only where `judged`."""
    rows = figures["rows"]
    found = [
        Check(
            "rows finished",
            _at_least(rows["finished_share"], limits.min_finished),
            _percent(rows["finished_share"]),
            f">= {_percent(limits.min_finished)}",
            f"rows ended by {_top(rows['not_finished'])}: raise rollout.deadline_s for a deadline; "
            "else the cause names what failed",
        ),
        Check(
            "rows scored",
            _at_least(rows["decided_share"], limits.min_decided),
            _percent(rows["decided_share"]),
            f">= {_percent(limits.min_decided)}",
            f"the verifier could not tell: {_top(rows['undecided'])}. bad_gold: mend those tasks' "
            "answers, or columns and answer_regex; unavailable: the verifier or its sandbox failed "
            "(mintrl doctor)",
        ),
    ]
    return found + (_judge_checks(figures, limits) if judged else [])


def _judge_checks(figures: Mapping[str, Any], limits: Limits) -> list[Check]:
    reviews, leaks, uplift = figures["reviews"], figures["leaks"], figures["uplift"]
    first = next(iter(reviews["causes"]), "")
    examples = {cause: shorten(text, 160) for cause, text in reviews["examples"].items()}
    rate, least = reviews["answer_rate"], 1 - limits.max_failure_rate
    unparsed = examples.get("unparsed") or examples.get("bad_step", "")
    reached = "the judge was never asked: see episode.max_reviews and the rows on the page"
    found = [
        Check(
            "judge answers",
            rate is not None and rate > 0 and rate >= least,
            _percent(rate),
            f">= {_percent(least)}",
            reached
            if rate is None
            else f"reviews failed: {_top(reviews['causes'])}. {_BY_CAUSE.get(first, '')}. For "
            f"example: {examples.get(first, '')}",
        ),
        Check(
            "verdicts parsed",
            _at_least(reviews["parse_rate"], limits.min_parse_rate),
            _percent(reviews["parse_rate"]),
            f">= {_percent(limits.min_parse_rate)}",
            f"for example: {unparsed}. Read more on the page; then declare what the "
            "judge's server can do "
            "(judge.options.capabilities), raise verdict_tokens for a reasoning model, allow "
            "reasks, edit the prompts (prompt_file), or take a stronger model",
        ),
        Check(
            "no leaks",
            leaks["through"] <= limits.max_leaks,
            f"{leaks['through']} through, {leaks['written']} written",
            f"<= {limits.max_leaks} through",
            "corrections that give the answer away reach the policy: put the leak guard into "
            "judge.guards (leak: {answer_line: ...}), last in the list, and give the judge less to "
            "see (privileged)",
        ),
    ]
    ends, few = uplift["ci95"], uplift["tasks"] < LEAST_TASKS
    if ends is not None:
        found.append(
            Check(
                "corrections help",
                few or ends[1] >= 0,
                f"{uplift['mean']:+.3f} ({ends[0]:+.2f}, {ends[1]:+.2f})",
                "upper end >= 0" if not few else f"(too few tasks: under {LEAST_TASKS})",
                "the policy does better alone than behind the judge's corrections: read them on the "
                "page. A stronger judge, one that sees the reference (privileged: reference), "
                "shorter corrections (episode.max_correction), or the perplexity guard",
            )
        )
    return found


def notes(figures: Mapping[str, Any], *, judged: bool) -> list[str]:
    """What should be looked at and refuses nothing."""
    rows, found = figures["rows"], []
    if _over(rows["truncated_share"], 0.2):
        found.append(
            f"{_percent(rows['truncated_share'])} of the responses stop at episode.max_response: "
            "raise it, or learn that longer ones fail"
        )
    for name, what in (("all_fail_share", "fail"), ("all_succeed_share", "succeed")):
        if _over(rows[name], 0.8):
            found.append(
                f"in {_percent(rows[name])} of the groups all rows {what}: little is learnt from "
                "those; take other tasks, or a longer run"
            )
    if not judged:
        return found
    reviews, seen = figures["reviews"], figures["coverage"]
    if _over(rows["off_policy_fraction_intervened"], FEW):
        found.append(
            f"the judge writes {_percent(rows['off_policy_fraction_intervened'])} of the reviewed "
            "responses, and 2 to 4 % was best in the paper: `mintrl calibrate` tries smaller "
            "(k, R, L)"
        )
    if seen["could_see"] is not None and seen["could_see"] < 0.5:
        found.append(
            f"reviews reach only {_percent(seen['could_see'])} of the tokens (R k of each "
            "response): raise episode.max_reviews or chunk_tokens, or set episode.spacing"
        )
    if reviews["reviews"] and not reviews["revise"]:
        found.append("the judge corrected nothing: such a run learns from plain rollouts alone")
    if figures["uplift"]["mean"] is not None and figures["uplift"]["tasks"] < LEAST_TASKS:
        found.append(
            f"corrections were compared on {figures['uplift']['tasks']} task(s) only: their uplift "
            "says little; raise --n"
        )
    compared = figures["uplift"]
    if compared["scored"] and compared["equal"] == compared["scored"]:
        found.append(
            f"none of the {compared['scored']} compared corrections changed a reward: raise --n or "
            "preflight.samples to learn whether they help"
        )
    return found + budget_notes(figures["forecast"])


def _at_least(value: float | None, least: float) -> bool:
    return value is None or value >= least


def _over(value: float | None, most: float) -> bool:
    return value is not None and value > most


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.4g} %"


def _top(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name[:160]} {n}" for name, n in list(counts.items())[:3]) or "-"
