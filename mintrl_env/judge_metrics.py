"""How good a judge's verdicts on labelled rows are, beside what needs no judge. Pure functions.

F1 is ProcessBench's: the harmonic mean of the accuracy on rows with an error (the step must be the
first wrong one) and on rows without. A review without a verdict matches nothing, and is counted apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mintrl_env.errors import UsageError

KEEP = -1
_BIN = 20  # rows, at least, that a rule of the position-only guess is read off


@dataclass(frozen=True, slots=True)
class Judged:
    """A labelled row and what was said of it.

    Attributes:
        problem: rows of one problem are not independent, and are drawn together.
        steps: how many the solution has.
        first_error: 0-based, or -1.
        predicted: the 0-based step, -1 for Keep, None for no verdict.
        source: the part of the benchmark.
    """

    problem: str
    steps: int
    first_error: int
    predicted: int | None
    source: str = ""


def judge_score(
    rows: Sequence[Judged], *, seed: int = 0, draws: int = 1000, by_source: bool = False
) -> dict[str, Any]:
    """The figures of one judge, JSON-able; a share of nothing is None.

    Intervals are 95 % bootstrap ones over problems. `step_distance` is the mean of |step - first
    error| over erroneous rows with a Revise; `answered` holds the accuracies and F1 of the rows that
    got a verdict.

    Args:
        by_source: add the same accuracies for each source, under `by_source`.
    """
    if not rows:
        raise UsageError("a score of no rows")
    sums = _Sums.of(rows)
    point = sums.figures(np.ones((1, len(sums.table))))
    low, high = sums.intervals(seed, draws)
    figures: dict[str, Any] = {
        "rows": len(rows),
        "erroneous": sum(r.first_error >= 0 for r in rows),
        "correct": sum(r.first_error < 0 for r in rows),
        "abstained": sum(r.predicted is None for r in rows),
    }
    for name, value in point.items():
        figures[name] = _known(value[0])
        figures[f"{name}_ci95"] = _pair(low[name], high[name])
    figures["verdicts"] = _verdicts(rows)
    answered = [r for r in rows if r.predicted is not None]
    figures["answered"] = None
    if answered:
        values = _Sums.of(answered)
        found = values.figures(np.ones((1, len(values.table))))
        names = ("accuracy_erroneous", "accuracy_correct", "f1")
        figures["answered"] = {name: _known(found[name][0]) for name in names}
    if by_source:
        parts: dict[str, list[Judged]] = {}
        for row in rows:
            parts.setdefault(row.source, []).append(row)
        figures["by_source"] = {
            name: judge_score(part, seed=seed, draws=draws) for name, part in sorted(parts.items())
        }
    return figures


def _verdicts(rows: Sequence[Judged]) -> dict[str, int]:
    """What became of the rows: each is counted once."""
    counts = Counter(map(_verdict, rows))
    names = ("exact", "early", "late", "missed", "right_keep", "false_revise", "abstained")
    return {name: counts[name] for name in names}


def _verdict(row: Judged) -> str:
    if row.predicted is None:
        return "abstained"
    if row.first_error < 0:
        return "right_keep" if row.predicted < 0 else "false_revise"
    if row.predicted < 0:
        return "missed"
    if row.predicted == row.first_error:
        return "exact"
    return "early" if row.predicted < row.first_error else "late"


@dataclass(frozen=True, slots=True)
class _Sums:
    """Counts of each problem, so that a draw of problems is one matrix product.

    Attributes:
        table: float64 (problems, 6): erroneous rows, hits among them, correct rows, hits among
            them, located rows (an erroneous one with a Revise), their distances.
    """

    table: npt.NDArray[np.float64]

    @classmethod
    def of(cls, rows: Sequence[Judged]) -> _Sums:
        places: dict[str, int] = {}
        for row in rows:
            places.setdefault(row.problem, len(places))
        table = np.zeros((len(places), 6))
        for row in rows:
            at = table[places[row.problem]]
            hit = row.predicted == row.first_error
            if row.first_error < 0:
                at[2:4] += 1, hit
                continue
            at[0:2] += 1, hit
            if row.predicted is not None and row.predicted >= 0:
                at[4:6] += 1, abs(row.predicted - row.first_error)
        return cls(table)

    def figures(self, weights: npt.NDArray[np.float64]) -> dict[str, npt.NDArray[np.float64]]:
        """The figures for each row of weights, shape (draws, problems); NaN of nothing."""
        wrong, wrong_hits, right, right_hits, located, distance = (weights @ self.table).T
        with np.errstate(invalid="ignore", divide="ignore"):
            on_wrong, on_right = wrong_hits / wrong, right_hits / right
            harmonic = 2 * on_wrong * on_right / (on_wrong + on_right)
            f1 = np.where(on_wrong + on_right == 0, 0.0, harmonic)
            return {
                "f1": f1,
                "accuracy_erroneous": on_wrong,
                "accuracy_correct": on_right,
                "accuracy": (wrong_hits + right_hits) / (wrong + right),
                "step_distance": distance / located,
            }

    def intervals(
        self, seed: int, draws: int
    ) -> tuple[dict[str, float | None], dict[str, float | None]]:
        generator, count = np.random.default_rng(seed), len(self.table)
        found: dict[str, list[npt.NDArray[np.float64]]] = {}
        for at in range(0, draws, 250):
            size = min(250, draws - at)
            weights = generator.multinomial(count, np.full(count, 1 / count), size=size)
            for name, values in self.figures(weights.astype(np.float64)).items():
                found.setdefault(name, []).append(values)
        low: dict[str, float | None] = {}
        high: dict[str, float | None] = {}
        for name, parts in found.items():
            values = np.concatenate(parts)
            values = values[np.isfinite(values)]
            ends = np.quantile(values, [0.025, 0.975]) if len(values) else (np.nan, np.nan)
            low[name], high[name] = _known(ends[0]), _known(ends[1])
        return low, high


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _pair(low: float | None, high: float | None) -> list[float] | None:
    return None if low is None or high is None else [low, high]


# --- what needs no judge


def always(rows: Sequence[Judged], step: int) -> list[Judged]:
    """One answer for every row: -1 (always correct), 0 (always the first step)."""
    return [replace(row, predicted=step) for row in rows]


def position_only(rows: Sequence[Judged], *, seed: int = 0) -> list[Judged]:
    """The best guess that knows how many steps a solution has, and nothing of what they say.

    Each half of the problems is answered by rules read off the other half: for solutions of about
    equal length either Keep, or one place counted from the start or from the end, chosen so that F1
    on that other half is highest. A judge that is not above this has shown no more than a bias.
    """
    problems = sorted({row.problem for row in rows})
    order = np.random.default_rng([seed, 0x905]).permutation(len(problems))
    first = {problems[i] for i in order[: len(order) // 2]}
    halves = [[r for r in rows if (r.problem in first) is side] for side in (True, False)]
    rules = [_fit(half) for half in halves]
    return [
        replace(row, predicted=rules[1 if row.problem in first else 0](row.steps)) for row in rows
    ]


_Place = Callable[[int], int]


def _from_start(place: int) -> _Place:
    return lambda steps: min(place, steps - 1)


def _from_end(place: int) -> _Place:
    return lambda steps: max(steps - 1 - place, 0)


def _fit(rows: Sequence[Judged]) -> _Place:
    """The rule steps -> answer with the highest F1 on these rows."""
    bins = _bins([row.steps for row in rows])
    options: list[tuple[_Place, int, int]] = []  # best place, its hits, rows without an error
    for low, high in bins:
        part = [row for row in rows if low <= row.steps <= high]
        wrong = [row for row in part if row.first_error >= 0]
        best, hits = _from_start(0), 0
        for place in range(max((row.steps for row in wrong), default=0)):
            for rule in (_from_start(place), _from_end(place)):
                found = sum(rule(row.steps) == row.first_error for row in wrong)
                if found > hits:
                    best, hits = rule, found
        options.append((best, hits, len(part) - len(wrong)))
    # F1 grows in both accuracies, so the best choice of bins to keep is a cut in the order of how
    # many correct rows are lost for each hit.
    order = sorted(range(len(bins)), key=lambda i: _price(options[i]))
    keeps = [set(order[cut:]) for cut in range(len(order) + 1)]
    kept = max(keeps, key=lambda keep: _f1(rows, bins, options, keep))

    def answer(steps: int) -> int:
        at = next((i for i, (low, high) in enumerate(bins) if steps <= high), len(bins) - 1)
        return KEEP if at in kept or not bins else options[at][0](steps)

    return answer


def _price(option: tuple[_Place, int, int]) -> float:
    _, hits, correct = option
    return correct / hits if hits else float("inf")


def _f1(
    rows: Sequence[Judged],
    bins: Sequence[tuple[int, int]],
    options: Sequence[tuple[_Place, int, int]],
    kept: set[int],
) -> float:
    wrong = sum(row.first_error >= 0 for row in rows)
    right = len(rows) - wrong
    hits = sum(options[i][1] for i in range(len(bins)) if i not in kept)
    keeps = sum(options[i][2] for i in kept)
    if not (wrong and right and hits and keeps):
        return (hits + keeps) / len(rows) / 1e6 if rows else 0.0  # ties: by accuracy
    a, b = hits / wrong, keeps / right
    return 2 * a * b / (a + b)


def _bins(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of lengths with at least `_BIN` rows each, the shortest solutions first."""
    bins: list[tuple[int, int]] = []
    low, count = 0, 0
    for length, often in sorted(Counter(lengths).items()):
        count += often
        if count >= _BIN:
            bins.append((low, length))
            low, count = length + 1, 0
    if count and bins:
        bins[-1] = (bins[-1][0], max(lengths))
    elif count:
        bins.append((0, max(lengths)))
    return bins
