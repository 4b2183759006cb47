"""Figures measured by a rollout, a training or a preflight: what their folder tells a plan.

A store tells lengths, revises, cuts, corrections, and what reviews read, write and take; a
preflight.json how long reviews take. How fast engines and trainer are, none of them tells: that
depends on the machine, and goes into a file of figures.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mintrl_env.errors import ConfigError
from mintrl_env.store import RolloutStore
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Kind, Outcome, StopReason

_MOST = 5000  # numbers that are kept of each figure


def measured(path: Path) -> dict[str, Any]:
    """Figures of a run's folder (its store, its preflight) or of a preflight.json.

    Raises:
        ConfigError: nothing to read there, or nothing in it.
    """
    found: dict[str, Any] = {}
    record = path / "preflight.json" if path.is_dir() else path
    if record.is_file():
        found = of_preflight(record)
    store = path / "rollouts"
    if store.is_dir():
        rows = [row for row in RolloutStore(store).read()[0] if row.update >= 0]
        for section, values in of_rows(rows).items():
            found.setdefault(section, {}).update(values)
    if not found:
        raise ConfigError(
            f"{path}: nothing measured here: give the folder of a run (rollouts/ with finished "
            "groups of an update), or a preflight.json of a preflight that had rows"
        )
    return found


def of_rows(rows: Sequence[Trajectory]) -> dict[str, Any]:
    """Figures of stored rows; those that a failure or a deadline ended are left out."""
    ended = [r for r in rows if r.stop_reason not in (StopReason.DEADLINE, StopReason.ERROR)]
    if not ended:
        return {}
    about: dict[str, Any] = {
        "prompt_tokens": _values([len(row.prompt_ids) for row in ended]),
        "response_tokens": _values([len(row.ids) for row in ended]),
    }
    found = {"rows": about}
    reviews = [(row, r) for row in ended if row.kind is Kind.INTERVENED for r in row.reviews]
    if not reviews:
        return found
    revises = [review for _, review in reviews if review.outcome is Outcome.REVISE]
    about["revise"] = len(revises) / len(reviews)
    if revises:
        about["kept"] = _values([(r.cut - r.position) / r.chunk_tokens for r in revises])
        about["correction_tokens"] = _values([r.correction_tokens for r in revises])
    judge: dict[str, Any] = {}
    asked = [(row, r) for row, r in reviews if r.usage.calls and r.usage.prompt_tokens]
    if asked:
        beside = [
            r.usage.prompt_tokens - len(row.prompt_ids) - r.position - r.chunk_tokens
            for row, r in asked
        ]
        judge["calls"] = sum(r.usage.calls for _, r in asked) / len(asked)
        judge["extra_tokens"] = max(0.0, sum(beside) / len(beside))
        judge["tokens"] = _values([r.usage.completion_tokens for _, r in asked])
    seconds = [r.usage.seconds for _, r in reviews if r.usage.seconds > 0]
    if seconds:
        judge["latency_s"] = _values(seconds)
    return {**found, "judge": judge} if judge else found


def of_preflight(path: Path) -> dict[str, Any]:
    """Figures of a preflight.json.

    Raises:
        ConfigError: it is none.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        rows, reviews = record["rows"], record["reviews"]
        listed = record["all_reviews"]
        each = record["forecast"]["per_reviewed_row"] or {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: no preflight's record: {type(error).__name__}: {error}"
        ) from error
    found: dict[str, Any] = {"rows": {}, "judge": {}}
    middle, slow = rows["response_tokens_p50"], rows["response_tokens_p95"]
    if middle:
        found["rows"]["response_tokens"] = (
            {"median": middle, "p95": slow} if slow > middle else middle
        )
    if reviews["reviews"]:
        found["rows"]["revise"] = reviews["revise"] / reviews["reviews"]
        found["judge"]["calls"] = max(1.0, each.get("calls", 0.0) / each["reviews"])
    seconds = [review["seconds"] for review in listed if review["seconds"]]
    if seconds:
        found["judge"]["latency_s"] = _values(seconds)
    return {section: values for section, values in found.items() if values}


def _values(numbers: Sequence[float]) -> dict[str, list[float]]:
    stride = -(-len(numbers) // _MOST)
    return {"values": [float(number) for number in numbers[::stride]]}
