"""What is in a store, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from mintrl_env.store_show import printable
from mintrl_env.trajectory import RolloutStats, Trajectory
from mintrl_env.types import Kind

Groups = list[list[Trajectory]]


def groups_by_update(rows: Iterable[Trajectory]) -> Iterator[tuple[tuple[str, int], Groups]]:
    """((run, update), its groups), as the rows of a store come; one update in memory at a time."""
    for _, of_update in groupby(rows, key=lambda row: row.update):
        for key, of_run in groupby(of_update, key=lambda row: (row.run, row.update)):
            yield key, [list(group) for _, group in groupby(of_run, key=lambda row: row.task_id)]


def ls_table(rows: Iterable[Trajectory]) -> Table:
    """A line an update: what there is of it."""
    lines: list[list[str | Text]] = []
    for (run, update), groups in groups_by_update(rows):
        flat = [row for group in groups for row in group]
        lines.append(
            [
                _cell(run),
                str(update),
                str(len(groups)),
                str(len(flat)),
                str(sum(row.valid for row in flat)),
                f"{sum(len(row.ids) for row in flat):,}",
                _number(_mean([row.reward for row in flat if row.valid and row.score.decided])),
                str(max(row.run_attempt for row in flat)),
            ]
        )
    heads = ["run", "update", ">groups", ">rows", ">valid", ">tokens", ">reward", ">attempt"]
    return _table(heads, lines)


def group_table(rows: Iterable[Trajectory]) -> Table:
    """A line a group, with the reward of each of its rows; one that has none is `-`."""
    lines: list[list[str | Text]] = []
    for (run, update), groups in groups_by_update(rows):
        for group in groups:
            kinds = [" ".join(_reward(row) for row in group if row.kind is kind) for kind in Kind]
            name = _cell(group[0].task_id)
            lines.append([_cell(run), str(update), name, str(len(group)), *kinds])
    return _table(["run", "update", "task", ">rows", "control", "intervened"], lines)


_STATS = {
    "groups": ">groups",
    "trajectories": ">rows",
    "valid": ">valid",
    "control_reward": ">control",
    "intervened_reward": ">interv",
    "reward_gap": ">gap",
    "reviews": ">reviews",
    "revises_per_review": ">revised",
    "off_policy_fraction_intervened": ">off-pol",
    "off_policy_fraction_all": ">all",
    "all_fail_share": ">fail",
    "all_succeed_share": ">right",
}


def stats_of(rows: Iterable[Trajectory]) -> list[dict[str, Any]]:
    """`RolloutStats` of every update (of every run), with `run` and `update` in front."""
    return [
        {"run": run, "update": update, **RolloutStats.over(groups).as_dict()}
        for (run, update), groups in groups_by_update(rows)
    ]


def stats_table(stats: Sequence[dict[str, Any]]) -> Table:
    """`stats_of` as a table, the figures that are looked at most."""
    lines: list[list[str | Text]] = [
        [_cell(row["run"]), str(row["update"]), *(_number(row[name]) for name in _STATS)]
        for row in stats
    ]
    return _table(["run", "update", *_STATS.values()], lines)


def _table(heads: Sequence[str], lines: Sequence[Sequence[str | Text]]) -> Table:
    """A table without lines; its first column, the run, only where a row has one."""
    first = 0 if any(str(line[0]) for line in lines) else 1
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for head in heads[first:]:
        justify: JustifyMethod = "right" if head.startswith(">") else "left"
        table.add_column(
            head.lstrip(">"), justify=justify, overflow="fold", no_wrap=justify == "right"
        )
    for line in lines:
        table.add_row(*line[first:])
    return table


def _cell(text: str) -> Text:
    return Text(printable(text, line_ends=False))


def _reward(row: Trajectory) -> str:
    if not row.valid or not row.score.decided:
        return "-"
    return _number(row.reward)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"
