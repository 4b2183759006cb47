"""A preflight's figures as people read them: lines for the page, tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Line = tuple[str, str, str]
"""What, how much, and what it means."""


def figure_lines(figures: Mapping[str, Any]) -> list[Line]:
    """The measured part."""
    rows = figures["rows"]
    lines = [
        ("tasks, rows", f"{rows['tasks']}, {rows['rows']}", f"in {figures['seconds']:.1f} s"),
        (
            "response tokens, p50 / p95",
            f"{_number(rows['response_tokens_p50'])} / {_number(rows['response_tokens_p95'])}",
            "",
        ),
        ("truncated", _percent(rows["truncated_share"]), "responses that max_response stopped"),
        (
            "groups all-fail / all-succeed",
            f"{_percent(rows['all_fail_share'])} / {_percent(rows['all_succeed_share'])}",
            "where no row differs there is little to learn",
        ),
        ("reward of controls", _number(rows["control_reward"]), ""),
    ]
    return lines + (_judge_lines(figures) if figures["judge"] is not None else [])


def _judge_lines(figures: Mapping[str, Any]) -> list[Line]:
    rows, reviews, leaks = figures["rows"], figures["reviews"], figures["leaks"]
    uplift, seen, slow = figures["uplift"], figures["coverage"], figures["latency"]
    kinds = ("keep", "revise", "guarded", "failed", "unparsed")
    lines = [
        ("reward of intervened rows", _number(rows["intervened_reward"]), ""),
        (
            "reviews",
            str(reviews["reviews"]),
            ", ".join(f"{kind} {reviews[kind]}" for kind in kinds if reviews[kind]),
        ),
        ("parse rate", _percent(reviews["parse_rate"]), "answers that were verdicts"),
        (
            "leaks",
            f"{leaks['through']} through",
            f"{leaks['caught']} caught by the leak guard; {leaks['written']} with guards off",
        ),
        (
            "seconds a review, p50 / p95",
            f"{_number(slow['p50'])} / {_number(slow['p95'])}",
            "waits for the service's limits included",
        ),
        (
            "off-policy fraction",
            _percent(rows["off_policy_fraction_intervened"]),
            f"of intervened rows; {_percent(rows['off_policy_fraction_all'])} of whole groups",
        ),
        (
            "coverage",
            f"{_percent(seen['seen'])} seen",
            f"of the policy's tokens in intervened rows; {_percent(seen['could_see'])} of all rows' "
            "lie within reach (R k)",
        ),
    ]
    if uplift["ci95"] is not None:
        low, high = uplift["ci95"]
        lines.append(
            (
                "uplift of a correction",
                f"{uplift['mean']:+.3f} ({low:+.2f}, {high:+.2f})",
                f"reward behind it less that of going on alone; {uplift['scored']} corrections of "
                f"{uplift['tasks']} tasks: better {uplift['better']}, worse {uplift['worse']}, "
                f"equal {uplift['equal']}",
            )
        )
    else:
        lines.append(("uplift of a correction", "-", "no correction was compared"))
    return lines


def forecast_lines(forecast: Mapping[str, Any]) -> list[Line]:
    """The whole run, reckoned."""
    if forecast["hours"] is None:
        return [("whole run", "-", "nothing was measured")]
    low, high = forecast["hours"]
    lines = [
        ("rows", f"{forecast['rows']:,}", f"{forecast['reviewed_rows']:,} open to review"),
        ("hours of rollouts", f"{_hours(low)} to {_hours(high)}", ""),
        ("policy tokens", f"{forecast['policy_tokens']:,}", "sampled, dropped ones included"),
    ]
    if forecast["reviewed_rows"]:
        each = forecast["per_reviewed_row"]
        unpriced = "not known" if forecast["limits"]["service"] else "none"
        money = unpriced if forecast["usd"] is None else f"{forecast['usd']:,.2f} USD"
        lines += [
            ("reviews", f"{forecast['reviews']:,}", f"{each['reviews']:.3g} a row"),
            ("judge calls", f"{forecast['calls']:,}", f"{each['calls']:.3g} a row"),
            (
                "judge tokens",
                f"{forecast['prompt_tokens']:,} + {forecast['completion_tokens']:,}",
                "read + written",
            ),
            ("money", money, ""),
        ]
    return lines


def tables(figures: Mapping[str, Any]) -> list[Any]:
    """Figures, forecast and checks, as rich tables."""
    from rich.box import SIMPLE
    from rich.table import Table

    found = []
    for title, lines in (
        ("Preflight", figure_lines(figures)),
        ("Forecast of the whole run", forecast_lines(figures["forecast"])),
    ):
        table = Table(
            title=title, title_justify="left", box=SIMPLE, pad_edge=False, show_header=False
        )
        for wraps in (False, False, True):
            table.add_column(no_wrap=not wraps)
        for line in lines:
            table.add_row(*line)
        found.append(table)
    table = Table(title="Checks", title_justify="left", box=SIMPLE, pad_edge=False)
    for name in ("", "", "found", "wanted"):
        table.add_column(name)
    for check in figures["checks"]:
        word = "ok" if check["passed"] else "FAILED"
        table.add_row(word, check["name"], check["value"], check["wanted"])
    return [*found, table]


def failures(figures: Mapping[str, Any]) -> list[str]:
    """What refuses the run, each with what to do."""
    return [
        f"{check['name']}: {check['value']}, wanted {check['wanted']}. {check['todo']}"
        for check in figures["checks"]
        if not check["passed"]
    ]


def _hours(hours: float) -> str:
    if hours < 1:
        return f"{60 * hours:.2g} min"
    return f"{hours:,.1f} h" if hours < 100 else f"{hours:,.0f} h"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
