"""Methods compared over updates, in one figure.

Every panel draws what its keys give and disappears where no run has them. A method has one colour
(Okabe and Ito's, told apart by colour-blind readers), one marker and one dash pattern throughout.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mintrl_env.errors import MissingExtraError, StoreError, UsageError

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Style:
    colour: str
    marker: str
    dashes: tuple[float, ...]  # lengths of dash and gap in line widths; empty for a solid line


_STYLES = (
    _Style("#0072B2", "o", ()),
    _Style("#D55E00", "s", (5, 1.6)),
    _Style("#009E73", "^", (1.2, 1.2)),
    _Style("#CC79A7", "D", (7, 1.5, 1.2, 1.5)),
    _Style("#E69F00", "v", (3, 1)),
    _Style("#56B4E9", "P", (9, 2)),
    _Style("#000000", "X", (2, 2, 6, 2)),
)


@dataclass(frozen=True, slots=True)
class _Series:
    key: str
    label: str = ""
    second: bool = False  # drawn thinner, with open markers
    points: bool = False  # few and exact: joined by markers, never averaged


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    series: tuple[_Series, ...]
    percent: bool = False
    log: bool = False
    band: tuple[float, float] | None = None
    note: str = ""  # what else is drawn, in a few words
    instead_of: str = ""  # drawn only where that panel has nothing


_PANELS = (
    _Panel(
        "Accuracy, nobody reviewing",
        (_Series("accuracy", points=True),),
        percent=True,
        note="bars: 95 % intervals, where known",
    ),
    _Panel(
        "Training reward",
        (
            _Series("reward_control", "control"),
            _Series("reward_intervened", "intervened", second=True),
        ),
    ),
    _Panel(
        "Reward gap, intervened minus control",
        (_Series("reward_gap"),),
        instead_of="Training reward",
    ),
    _Panel(
        "Off-policy fraction of tokens",
        (
            _Series("off_policy_fraction_intervened", "intervened"),
            _Series("off_policy_fraction_all", "whole group", second=True),
        ),
        percent=True,
        band=(0.02, 0.04),
        note="grey: 2 to 4 %, the paper's best",
    ),
    _Panel("Revises per review", (_Series("revises_per_review"),), percent=True),
    _Panel("Gradient norm before clipping", (_Series("grad_norm"),), log=True),
    _Panel("Loss", (_Series("loss"),)),
)
CURVE_KEYS = tuple(series.key for panel in _PANELS for series in panel.series)


def write_curves(runs: Mapping[str, Rows], out: str | Path, *, title: str = "") -> Path:
    """Draw the figure.

    Args:
        runs: for each method its rows, one an update, as `metrics.read_metrics` gives them. Rows
            have `update` and any of `CURVE_KEYS`; `accuracy` may stand in a few rows only, with
            `accuracy_ci95` ([low, high]) beside it. A change of `phase` to "grpo" is marked.
        out: `.png` (1800 pixels wide, meant for 1200), or `.svg` or `.pdf` by its suffix.
        title: above the figure.

    Returns:
        `out` as a Path.

    Raises:
        UsageError: no run has any of the keys.
        MissingExtraError: matplotlib is not installed.
        StoreError: `out` cannot be written.
    """
    panels = [panel for panel in _PANELS if any(_has(panel, rows) for rows in runs.values())]
    titles = {panel.title for panel in panels}
    panels = [panel for panel in panels if panel.instead_of not in titles]
    if not panels:
        raise UsageError(
            "no curves: no row of any run has a finite value under " + ", ".join(CURVE_KEYS)
        )
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ImportError as error:
        raise MissingExtraError("matplotlib", "trl", "drawing curves") from error
    updates = [x for rows in runs.values() for key in CURVE_KEYS for x in _curve(rows, key)[0]]
    first, last = min(updates), max(updates)  # one x axis for all panels
    columns = min(3, len(panels)) if len(panels) != 4 else 2
    lines = -(-len(panels) // columns)
    with rc_context(_RC):
        # No pyplot: it would pick a window system and keep every figure alive.
        figure = Figure(figsize=(12, 0.75 + 3.1 * lines), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        grid = figure.subplots(lines, columns, squeeze=False)
        for place, axes in enumerate(grid.flat):
            if place >= len(panels):
                axes.axis("off")
                continue
            _draw(axes, panels[place], runs)
            axes.set_xlim(first - 0.03 * (last - first) - 0.5, last + 0.03 * (last - first) + 0.5)
            if place + columns >= len(panels):
                axes.set_xlabel("update")
        handles = [
            Line2D([], [], color=s.colour, marker=s.marker, lw=2, ms=6, label=name, **_dashes(s))
            for name, s in _styles(runs)
        ]
        if any(_switch(rows) is not None for rows in runs.values()):
            handles.append(Line2D([], [], color="#555", lw=1.2, ls=":", label="switch to GRPO"))
        figure.legend(
            handles=handles,
            loc="outside upper center",
            ncols=min(5, len(handles)),
            title=title or None,
            title_fontproperties={"weight": "bold", "size": 13},
            handlelength=4,
        )
        out = Path(out)
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            # Without a date the same metrics give the same bytes.
            plain = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(out.suffix, {})
            figure.savefig(out, metadata=plain)
        except OSError as error:
            raise StoreError(f"{out}: cannot be written: {error.strerror}") from error
    return out


_RC: dict[Any, Any] = {
    "figure.constrained_layout.h_pad": 0.1,
    "figure.constrained_layout.w_pad": 0.08,
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#777",
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "legend.frameon": False,
    "legend.fontsize": 10,
    "svg.hashsalt": "mintrl",
    "svg.fonttype": "none",
}


def _dashes(style: _Style) -> dict[str, Any]:
    return {"dashes": style.dashes} if style.dashes else {}


def _styles(runs: Mapping[str, Rows]) -> list[tuple[str, _Style]]:
    return [(name, _STYLES[i % len(_STYLES)]) for i, name in enumerate(runs)]


def _number(value: Any) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value) if math.isfinite(value) else None
    return None


def _curve(rows: Rows, key: str) -> tuple[list[int], list[float]]:
    points = [
        (int(row["update"]), number)
        for row in rows
        if _number(row.get("update")) is not None and (number := _number(row.get(key))) is not None
    ]
    points.sort()
    return [x for x, _ in points], [y for _, y in points]


def _has(panel: _Panel, rows: Rows) -> bool:
    return any(_curve(rows, series.key)[0] for series in panel.series)


def _switch(rows: Rows) -> int | None:
    """The first update of the GRPO phase, where another phase came before it."""
    before = False
    for row in rows:
        phase = row.get("phase")
        if phase == "grpo":
            return int(row["update"]) if before else None
        before = before or phase is not None
    return None


def trailing_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and up to `window - 1` before it."""
    return [
        sum(values[max(0, i + 1 - window) : i + 1]) / len(values[max(0, i + 1 - window) : i + 1])
        for i in range(len(values))
    ]


def smoothing_window(count: int) -> int:
    """How many updates a line averages: 1 for short runs, about a tenth of long ones."""
    return max(1, round(count / 10))


def _draw(axes: Any, panel: _Panel, runs: Mapping[str, Rows]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator, NullFormatter, PercentFormatter

    window = 1
    for name, style in _styles(runs):
        for series in panel.series:
            xs, ys = _curve(runs[name], series.key)
            if not xs:
                continue
            look: dict[str, Any] = {"color": style.colour, "lw": 1.2 if series.second else 2}
            look |= _dashes(style)
            look |= {"marker": style.marker, "ms": 5.5 if series.points else 4.5}
            look["markerfacecolor"] = "white" if series.second else style.colour
            if series.points:
                _interval_bars(axes, runs[name], series.key, style)
            else:
                look["markevery"] = max(1, len(xs) // 8)
                if smoothing_window(len(xs)) > 1:
                    window = max(window, smoothing_window(len(xs)))
                    axes.plot(xs, ys, color=style.colour, lw=0.7, alpha=0.35)
                    ys = _smooth(xs, ys, _switch(runs[name]), log=panel.log)
            axes.plot(xs, ys, **look)
        switch = _switch(runs[name])
        if switch is not None:
            axes.axvline(switch - 0.5, color="#555", lw=1.2, ls=":", zorder=1)
    note = [panel.note] if panel.note else []
    if window > 1:
        note.insert(0, f"thick: mean of {window} updates")
    axes.set_title(panel.title, pad=15 if note else 6)
    axes.text(0, 1.02, "; ".join(note), transform=axes.transAxes, fontsize=8.5, color="#555")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    drawn = [y for s in panel.series for rows in runs.values() for y in _curve(rows, s.key)[1]]
    if panel.log and min(drawn) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        if max(drawn) < 10 * min(drawn):  # perhaps no power of ten in sight
            axes.yaxis.set_minor_formatter(lambda y, _: f"{y:g}")
        else:
            axes.yaxis.set_minor_formatter(NullFormatter())
    elif min(drawn) >= 0:
        axes.set_ylim(0, 1.1 * max(*drawn, axes.get_ylim()[1] / 1.1) if max(drawn) else 1)
    else:
        axes.axhline(0, color="#999", lw=0.8, zorder=1)
    if panel.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None, symbol=" %"))
    handles = [
        Line2D([], [], color="#333", lw=1.2 if s.second else 2, marker="o", ms=4.5,
               markerfacecolor="white" if s.second else "#333", label=s.label)
        for s in panel.series
        if s.label and any(_curve(rows, s.key)[0] for rows in runs.values())
    ]  # fmt: skip
    if panel.band:
        axes.axhspan(*panel.band, color="#999", alpha=0.18, lw=0)
    if handles:
        axes.legend(handles=handles, loc="best", fontsize=8.5, handlelength=2.2)


def _smooth(
    xs: Sequence[int], ys: Sequence[float], switch: int | None, *, log: bool
) -> list[float]:
    """Trailing means that don't reach over the switch, where the objective changes."""
    window = smoothing_window(len(xs))
    at = sum(x < switch for x in xs) if switch is not None else 0
    parts: list[float] = []
    for part in (ys[:at], ys[at:]):
        if log and min(part, default=0) > 0:
            parts += [math.exp(y) for y in trailing_mean([math.log(y) for y in part], window)]
        else:
            parts += trailing_mean(part, window)
    return parts


def _interval_bars(axes: Any, rows: Rows, key: str, style: _Style) -> None:
    for row in rows:
        value, bounds = _number(row.get(key)), row.get(f"{key}_ci95")
        if value is None or not isinstance(bounds, (list, tuple)) or len(bounds) != 2:
            continue
        low, high = _number(bounds[0]), _number(bounds[1])
        if low is not None and high is not None:
            axes.plot([row["update"]] * 2, [low, high], color=style.colour, lw=5, alpha=0.25)
