"""Values in the replies of model servers to a policy: ids, log-probs, counts, each as it may be wrong."""

from __future__ import annotations

import math
from typing import Any

from mintrl_env.adapters.llm_faults import WrongShape, member

CLAMPED = -9999.0
"""What vLLM writes for a log-prob that JSON has no number for."""


def ids_of(holder: Any, name: str) -> list[int]:
    ids = member(holder, list, name)
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise WrongShape(f"{name} holds something that is no id")
    return ids


def number(value: Any) -> float:
    """A sampled token's log-prob, NaN where there is none.

    vLLM writes -9999 for what JSON has no number for; no token of that log-prob is ever sampled.
    """
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not CLAMPED < value < 1e-3:
        return math.nan
    return min(float(value), 0.0)  # of 1, float32 may make a bit more


def log(prob: float) -> float:
    return math.log(prob) if 0 < prob <= 1 else math.nan


def spread(ids: list[int], entry_ids: list[int], values: list[float]) -> list[float]:
    """Log-probs for all ids, from entries for some of them, in order.

    llama.cpp has no entry for a token that leaves a character unfinished, nor for the end of a stop
    string. An entry counts where there is but one token that it can belong to; the others are NaN.

    Raises:
        WrongShape: entries of tokens that were not written.
    """
    if entry_ids == ids:
        return values
    first, last = [], []
    at = 0
    for token in entry_ids:
        while at < len(ids) and ids[at] != token:
            at += 1
        first.append(at)
        at += 1
    if at > len(ids):
        raise WrongShape("log-probs came for tokens that were not written")
    at = len(ids) - 1
    for token in reversed(entry_ids):
        while ids[at] != token:
            at -= 1
        last.append(at)
        at -= 1
    found = [math.nan] * len(ids)
    for low, high, value in zip(first, reversed(last), values, strict=True):
        if low == high:
            found[low] = value
    return found


def count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def name_of(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def versions_of(spans: Any) -> tuple[str, ...]:
    """From vLLM's `weight_versions`: spans of a choice's tokens, each with its `version`."""
    found = spans if isinstance(spans, list) else []
    found = [span.get("version") if isinstance(span, dict) else span for span in found]
    return tuple(dict.fromkeys(map(str, found)))
