"""A judge's figures for people: tables by rich, and lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def bench_tables(figures: Mapping[str, Any]) -> list[Any]:
    """What `judging.judge_bench` found, as rich tables: beside the baselines, and by source.

    `off` is the mean distance in steps, `none` counts rows without a verdict, `gain` is the reward
    on rollouts over that without reviews.
    """
    from rich.box import SIMPLE
    from rich.table import Table

    judge, baselines = figures["judge"], figures["baselines"]
    table = Table(
        title=f"{judge['rows']} rows, {judge['erroneous']} with an error (%, 95 % intervals)",
        title_justify="left",
        box=SIMPLE,
        pad_edge=False,
    )
    for name in ("", "F1", "erroneous", "correct", "off", "none"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    # Who keeps everything changes no reward; for the other guesses there are no corrections.
    gains = {name: "+0.000" if name == "always correct" else "-" for name in baselines}
    found = figures.get("rollouts")
    if found and found["tasks"]:
        table.add_column("gain", justify="right", no_wrap=True)
        gains[figures["judge_name"]] = f"{found['reward_gain']:+.3f}"
    else:
        gains = {}
    for name, row in ((figures["judge_name"], judge), *baselines.items()):
        table.add_row(
            name,
            _cell(row, "f1"),
            _cell(row, "accuracy_erroneous"),
            _cell(row, "accuracy_correct"),
            "-" if row["step_distance"] is None else f"{row['step_distance']:.2f}",
            str(row["abstained"]),
            *([gains[name]] if gains else []),
        )
    return (
        [table, _by_source(judge, baselines["position only"])] if "by_source" in judge else [table]
    )


def _by_source(judge: Mapping[str, Any], guess: Mapping[str, Any]) -> Any:
    from rich.box import SIMPLE
    from rich.table import Table

    names = list(judge["by_source"])
    heads = {name.partition("/")[0] for name in names}
    shared = f"{heads.pop()}/" if len(heads) == 1 and all("/" in name for name in names) else ""
    table = Table(title=f"by source {shared} (%)", title_justify="left", box=SIMPLE)
    for name in ("", "rows", "F1", "erroneous", "correct", "position F1"):
        table.add_column(name, justify="left" if not name else "right", no_wrap=bool(name))
    for name, row in judge["by_source"].items():
        other = guess["by_source"][name]
        shares = [_percent(row[key]) for key in ("f1", "accuracy_erroneous", "accuracy_correct")]
        table.add_row(name[len(shared) :] or "-", str(row["rows"]), *shares, _percent(other["f1"]))
    return table


def _cell(row: Mapping[str, Any], name: str) -> str:
    value, ends = row[name], row[f"{name}_ci95"]
    if value is None:
        return "-"
    spread = ends is not None and ends[0] < ends[1]
    interval = f" ({100 * ends[0]:.0f}-{100 * ends[1]:.0f})" if spread else ""
    return f"{100 * value:.1f}{interval}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"


def bench_lines(figures: Mapping[str, Any]) -> list[str]:
    """Verdicts, cost and rollouts, a line each."""
    cost, verdicts = figures["cost"], figures["judge"]["verdicts"]
    lines = [
        "verdicts: " + ", ".join(f"{name} {count}" for name, count in verdicts.items() if count),
        f"cost: {cost['calls']} calls, {cost['prompt_tokens']} + {cost['completion_tokens']} tokens, "
        f"{cost['usd']:.4g} USD; a review takes {_time(cost['seconds_p50'])} (p50), "
        f"{_time(cost['seconds_p95'])} (p95), {figures['concurrent']} at once",
    ]
    if cost["no_verdict_by_cause"]:
        causes = ", ".join(f"{k} {v}" for k, v in cost["no_verdict_by_cause"].items())
        answered = figures["judge"]["answered"]
        f1 = answered and answered["f1"]
        lines.append(f"no verdict: {causes}; F1 of the answered rows: {_short(f1)}")
    if cost["refused_corrections"]:
        lines.append(f"corrections that a rollout would refuse: {cost['refused_corrections']}")
    if found := figures.get("rollouts"):
        lines.append(gain_line(found))
    return lines


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.2g} ms"


def gain_line(found: Mapping[str, Any]) -> str:
    """Rewards with and without the judge, in one line."""
    if not found["tasks"]:
        return "rollouts: no task has a scored row of both kinds"
    low, high = found["reward_gain_ci95"]
    return (
        f"rollouts: {found['tasks']} tasks, reward {found['control_reward']:.3f} alone, "
        f"{found['intervened_reward']:.3f} with the judge: gain {found['reward_gain']:+.3f} "
        f"[{low:+.2f}, {high:+.2f}], off-policy "
        f"{_short(found['off_policy_fraction_intervened'])}, revises a review "
        f"{_short(found['revises_per_review'])}"
    )


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
