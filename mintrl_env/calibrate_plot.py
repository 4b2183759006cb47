"""The plot of `mintrl calibrate`: reward gain against how much of the text is the judge's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mintrl_env.errors import MissingExtraError, StoreError

BEST = (0.02, 0.04)
"""Off-policy fractions at which the paper's runs were best."""


def write_plot(points: Sequence[Mapping[str, Any]], chosen: int, out: Path) -> Path:
    """Draw the points of a sweep, labelled (k, R, L), with their 95 % intervals.

    Args:
        points: with `k`, `R`, `L`, `off_policy_fraction_intervened` and, where they could be scored,
            `reward_gain` and `reward_gain_ci95`.
        chosen: index of the one that is marked.
        out: `.png`, `.svg` or `.pdf` by its suffix.

    Raises:
        MissingExtraError: matplotlib is not installed. StoreError: `out` cannot be written.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "trl", "drawing the calibration") from error
    # No pyplot: it would pick a window system and keep every figure alive.
    figure = Figure(figsize=(7.5, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.axvspan(100 * BEST[0], 100 * BEST[1], color="#eee", label="the paper's best")
    axes.axhline(0, color="#777", lw=0.8)
    for index, point in enumerate(points):
        x, y = point["off_policy_fraction_intervened"], point.get("reward_gain")
        if x is None or y is None:
            continue
        low, high = point["reward_gain_ci95"]
        is_chosen = index == chosen
        axes.errorbar(
            [100 * x], [y], yerr=[[max(0.0, y - low)], [max(0.0, high - y)]],
            fmt="s" if is_chosen else "o", ms=8 if is_chosen else 5, capsize=2, lw=1,
            color="#D55E00" if is_chosen else "#0072B2",
            label="chosen" if is_chosen else None,
        )  # fmt: skip
        axes.annotate(
            f"({point['k']}, {point['R']}, {point['L']})", (100 * x, y),
            textcoords="offset points", xytext=(6, 5), fontsize=8,
        )  # fmt: skip
    axes.set_xlabel("off-policy fraction of intervened rollouts, % of tokens")
    axes.set_ylabel("reward gain, intervened - control")
    axes.set_title("(k, R, L): chunk tokens, reviews, correction tokens", fontsize=10, loc="left")
    axes.set_xlim(0, 1.18 * max(5.0, axes.get_xlim()[1]))  # room for the last label
    axes.legend(frameon=False, fontsize=8)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with rc_context({"svg.fonttype": "none"}):
            figure.savefig(out)
    except OSError as error:
        raise StoreError(f"{out}: cannot be written: {error.strerror}") from error
    return out
