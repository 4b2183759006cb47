from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from mintrl_env.curves import smoothing_window, trailing_mean, write_curves
from mintrl_env.errors import MissingExtraError, StoreError, UsageError


def rows(updates: int = 12, **more: Any) -> list[dict[str, Any]]:
    return [
        {"update": u, "reward_control": 0.1 * u, "loss": 0.2, "grad_norm": 0.01 * (u + 1), **more}
        for u in range(updates)
    ]


def texts(path: Path) -> list[str]:
    """The figure's words: the SVG backend writes text as text."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


def test_every_known_key_gets_its_panel_and_missing_ones_get_none(tmp_path: Path) -> None:
    written = write_curves({"one": rows(), "two": rows()}, tmp_path / "deep" / "c.svg")
    words = texts(written)
    assert {"Training reward", "Loss", "Gradient norm before clipping", "one", "two"} <= set(words)
    assert "Revises per review" not in words and "Off-policy fraction of tokens" not in words
    both = rows(off_policy_fraction_all=0.01, revises_per_review=0.5, accuracy=0.2)
    words = texts(write_curves({"one": both}, tmp_path / "d.svg"))
    assert {"Revises per review", "Off-policy fraction of tokens"} <= set(words)
    assert "Accuracy, nobody reviewing" in words


def test_the_gap_is_drawn_only_where_the_rewards_are_not(tmp_path: Path) -> None:
    gap = "Reward gap, intervened minus control"
    assert gap not in texts(write_curves({"a": rows(reward_gap=0.1)}, tmp_path / "a.svg"))
    alone = [{"update": 0, "reward_gap": 0.1}, {"update": 1, "reward_gap": -0.1}]
    assert gap in texts(write_curves({"a": alone}, tmp_path / "b.svg"))


def test_the_switch_to_grpo_is_marked_only_where_a_run_switches(tmp_path: Path) -> None:
    switched = [
        {"update": u, "loss": 1.0, "phase": "mintrl" if u < 5 else "grpo"} for u in range(9)
    ]
    always = [{"update": u, "loss": 1.0, "phase": "grpo"} for u in range(9)]
    marked = write_curves({"mintrl": switched, "grpo": always}, tmp_path / "a.svg")
    assert "switch to GRPO" in texts(marked)
    assert "switch to GRPO" not in texts(write_curves({"grpo": always}, tmp_path / "b.svg"))


def test_nulls_nans_and_foreign_values_are_skipped(tmp_path: Path) -> None:
    odd: list[Any] = [None, math.nan, math.inf, "0.5", True, [1.0]]
    holes = [{"update": u, "loss": value} for u, value in enumerate(odd)]
    with pytest.raises(UsageError, match="no curves: no row of any run"):
        write_curves({"a": holes}, tmp_path / "a.png")
    with pytest.raises(UsageError, match="no curves"):
        write_curves({}, tmp_path / "a.png")
    holes.append({"update": 7, "loss": 0.5, "accuracy": 0.5, "accuracy_ci95": [None, 0.6]})
    assert write_curves({"a": holes, "empty": []}, tmp_path / "a.png").is_file()


def test_the_png_is_wide_and_the_same_for_the_same_rows(tmp_path: Path) -> None:
    first = write_curves({"a": rows()}, tmp_path / "a.png").read_bytes()
    assert first[:8] == b"\x89PNG\r\n\x1a\n" and int.from_bytes(first[16:20], "big") == 1800
    assert write_curves({"a": rows()}, tmp_path / "b.png").read_bytes() == first
    assert write_curves({"a": rows()}, tmp_path / "a.svg").read_bytes() == (
        write_curves({"a": rows()}, tmp_path / "b.svg").read_bytes()
    )


def test_lines_differ_by_more_than_colour(tmp_path: Path) -> None:
    names = [f"run {i}" for i in range(4)]
    page = write_curves({name: rows() for name in names}, tmp_path / "a.svg").read_text()
    # Solid, and three dash patterns, each drawn in one colour of its own.
    styles = re.findall(r"stroke-dasharray: ([\d., ]+); stroke-dashoffset: 0; stroke: (#\w+)", page)
    by_colour = {(dashes, colour) for dashes, colour in styles if colour != "#555555"}
    assert len({colour for _, colour in by_colour}) == 3
    assert len({dashes for dashes, _ in by_colour}) >= 3


def test_averages_by_hand() -> None:
    assert trailing_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
    assert trailing_mean([1.0, 3.0], 1) == [1.0, 3.0]
    assert trailing_mean([], 3) == []
    assert [smoothing_window(n) for n in (1, 14, 45, 200)] == [1, 1, 4, 20]


def test_no_average_reaches_over_the_switch() -> None:
    from mintrl_env.curves import _smooth

    xs, ys = list(range(20)), [1.0] * 10 + [100.0] * 10
    assert _smooth(xs, ys, 10, log=False) == ys
    assert _smooth(xs, ys, 10, log=True) == pytest.approx(ys)
    assert _smooth(xs, ys, None, log=False)[10] == 50.5
    assert _smooth(xs, ys, None, log=True)[10] == pytest.approx(10.0)


def test_errors_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be written"):
        write_curves({"a": rows()}, tmp_path / "file" / "c.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r'pip install "mintrl-env\[trl\]"'):
        write_curves({"a": rows()}, tmp_path / "c.png")
