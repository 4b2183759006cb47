"""A plan as people read it: a table with a column for each number of GPUs, and what it rests on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.table import Table

from mintrl_env.console import RunConsole

Run = Mapping[str, Any]
_PHASES = {"judged": "updates with the judge", "plain": "updates without"}
_PARTS = ("policy", "judge", "verifier", "trainer", "gpus")


def plan_table(plan: Mapping[str, Any]) -> Table:
    """The runs side by side."""
    runs: Sequence[Run] = plan["runs"]
    lag = f", lag <= {plan['max_lag']}" if plan["max_lag"] is not None else ""
    table = Table(title=f"Plan, {plan['mode']}{lag}", title_justify="left", show_edge=False)
    table.add_column("GPUs", no_wrap=True)
    for run in runs:
        table.add_column(f"{run['gpus']:,}", justify="right")

    def line(name: str, shown: Callable[[Run], str], *, end: bool = False) -> None:
        table.add_row(name, *map(shown, runs), end_section=end)

    line("split", lambda run: run["split"]["text"])
    line("rows an update", lambda run: f"{run['rows_per_update']:,}", end=True)
    for phase, title in _PHASES.items():
        if any(run[phase] for run in runs):
            table.add_row(f"[bold]{title}[/bold]")
            for name, shown in _phase_lines(runs, phase):
                line(name, shown)
            table.add_section()
    table.add_row("[bold]the whole run[/bold]")
    for name, shown in _RUN_LINES:
        if any(shown(run["run"]) != "-" for run in runs):
            line(name, lambda run, shown=shown: shown(run["run"]))  # type: ignore[misc]
    return table


def _phase_lines(runs: Sequence[Run], phase: str) -> list[tuple[str, Callable[[Run], str]]]:
    def of(shown: Callable[[Run], str]) -> Callable[[Run], str]:
        return lambda run: shown(run[phase]) if run[phase] else "-"

    def percent(*path: str) -> Callable[[Run], str]:
        return of(lambda found: _percent(_at(found, path)))

    def number(*path: str) -> Callable[[Run], str]:
        return of(lambda found: _number(_at(found, path)))

    lines = [
        ("  update, s", number("update_s")),
        ("  of it rollouts, s", number("rollout_s")),
        ("  ... last tenth of the rows, s", number("tail_s")),
        ("  learning, s", number("train_s")),
        ("  new weights, s", number("sync_s")),
        ("  trajectories/s", number("trajectories_per_s")),
        ("  policy tokens/s", number("tokens_per_s")),
        ("  rows at once an engine", number("rows_at_once")),
        *((f"  idle: {_idle_name(part)}", percent("idle", part)) for part in _PARTS),
        ("  late rows", of(lambda found: _percent(found["late_share"] or None))),
        ("  lag, mean (most)", of(_lag)),
        ("  bottleneck", of(_bottleneck)),
    ]
    return [(name, shown) for name, shown in lines if any(shown(run) != "-" for run in runs)]


def _idle_name(part: str) -> str:
    return "all GPUs" if part == "gpus" else part


def _lag(found: Run) -> str:
    return f"{found['lag_mean']:.2g} ({found['lag_max']})" if found["lag_max"] else "-"


def _bottleneck(found: Run) -> str:
    name = found["bottleneck"]
    return name if name == "none" else f"{name} ({_percent(found['gains'][name])})"


_RUN_LINES: tuple[tuple[str, Callable[[Run], str]], ...] = (
    ("  updates with / without", lambda r: f"{r['judged_updates']} / {r['plain_updates']}"),
    ("  hours with / without", lambda r: f"{r['judged_hours']:.3g} / {r['plain_hours']:.3g}"),
    ("  hours", lambda r: _number(r["hours"])),
    ("  GPU hours", lambda r: _number(r["gpu_hours"])),
    ("  GPU USD", lambda r: _number(r["gpu_usd"])),
    ("  policy tokens", lambda r: _number(r["policy_tokens"])),
    ("  reviews", lambda r: _number(r["reviews"] or None)),
    ("  judge calls", lambda r: _number(r["judge_calls"] or None)),
    ("  judge tokens read", lambda r: _number(r["judge_prompt_tokens"] or None)),
    ("  judge tokens written", lambda r: _number(r["judge_completion_tokens"] or None)),
    ("  judge USD", lambda r: _number(r["judge_usd"])),
)


def source_lines(plan: Mapping[str, Any]) -> list[str]:
    """Which figures come from where, the measured ones first."""
    by_source = sorted(plan["sources"].items(), key=lambda item: (item[1][0] != "m", item[1]))
    lines = []
    for source, keys in groupby(by_source, key=lambda item: item[1]):
        lines.append(f"{source}: {', '.join(sorted(key for key, _ in keys))}")
    return lines


def print_plan(plan: Mapping[str, Any], console: RunConsole) -> None:
    """The table, the bottleneck's meaning, where figures come from, what is taken for granted."""
    console.console.print(plan_table(plan))
    console.say(
        "\nbottleneck: the part that, twice as fast, would shorten an update most (by so much)"
    )
    for note in plan["notes"]:
        console.say(f"note: {note}")
    for line in source_lines(plan):
        console.say(f"figures, {line}")
    for line in plan["assumptions"]:
        console.say(f"assumed: {line}")


def _at(data: Any, path: Sequence[str]) -> Any:
    for name in path:
        data = data[name]
    return data


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.3g} %"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
