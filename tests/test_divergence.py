"""Judge latencies: without effect in float64 and in rounds; in float32 their effect is counted."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl")

from mintrl_env.adapters.divergence import Divergence, compare_with_rounds
from mintrl_env.adapters.pump import Rounds
from mintrl_env.adapters.session import EngineHost, RolloutSession
from mintrl_env.episode import EpisodeConfig
from mintrl_env.errors import UsageError
from mintrl_env.prompts import HFTokenizer, PromptBuilder
from mintrl_env.rollout import RolloutConfig
from mintrl_env.testing import FunctionVerifier
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Outcome, ReviewRequest, Task, Verdict

_SPEC = importlib.util.spec_from_file_location("tiny_trl", Path(__file__).with_name("tiny_trl.py"))
assert _SPEC is not None and _SPEC.loader is not None
tiny = importlib.util.module_from_spec(_SPEC)
sys.modules["tiny_trl"] = tiny
_SPEC.loader.exec_module(tiny)

TASKS = [Task(f"t{i}", f"{i}+{i}=?\n", "2") for i in range(4)]
CONFIG = RolloutConfig(
    episode=EpisodeConfig(
        chunk_tokens=5, max_correction=3, max_response=18, step_delimiters=("\n",)
    ),
    n_control=1,
    n_intervened=3,
)
VERIFIER = FunctionVerifier(lambda task, response: 1.0)


class ShuffledLatency:
    """Revises every second review, each after a random time."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    async def review(self, request: ReviewRequest) -> Verdict:
        await asyncio.sleep(float(self._random.random()) * 0.01)
        return Verdict.keep() if request.review % 2 else Verdict.revise(0, "7=")


def session(
    dtype: torch.dtype, judge: Any, *, rounds: bool = False, **changes: Any
) -> RolloutSession:
    hf = HFTokenizer(tiny.tokenizer())
    host = EngineHost(
        model=tiny.model(dtype=dtype),
        tokenizer=hf,
        prompts=PromptBuilder(hf),
        slots=7,  # fewer than rows: who gets one next depends on latencies
        max_length=48,
        rounds=Rounds() if rounds else None,
    )
    return RolloutSession(host, CONFIG, judge=judge, verifier=VERIFIER, seed=4, **changes)


def rows(dtype: torch.dtype, seed: int, *, rounds: bool = False) -> list[Trajectory]:
    with session(dtype, ShuffledLatency(seed), rounds=rounds) as made:
        return [row for group in made.groups(TASKS, update=0) for row in group]


def test_shuffled_latencies_change_nothing_with_a_float64_student() -> None:
    first = rows(torch.float64, 0)
    assert sum(r.outcome is Outcome.REVISE for row in first for r in row.reviews) > 10
    for seed in (1, 2):
        for a, b in zip(first, rows(torch.float64, seed), strict=True):
            for name in ("ids", "provenance", "policy_versions"):
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-6)


def test_rounds_are_bit_exact_in_float32_whatever_the_latencies() -> None:
    for a, b in zip(
        rows(torch.float32, 0, rounds=True), rows(torch.float32, 1, rounds=True), strict=True
    ):
        assert a.logprobs.tobytes() == b.logprobs.tobytes()
        assert (a.ids.tobytes(), a.provenance.tobytes()) == (
            b.ids.tobytes(),
            b.provenance.tobytes(),
        )


def test_rows_are_compared_to_their_first_difference() -> None:
    free = rows(torch.float64, 0)[:4]
    other = list(free)
    changed = other[1].ids.copy()
    changed[3] ^= 1
    other[1] = replace(other[1], ids=changed)
    other[2] = replace(other[2], valid=False)
    found = Divergence.between(free, other)
    assert (found.rows, found.differing) == (3, 1)
    assert found.tokens == len(free[0].ids) + 3 + len(free[3].ids)
    assert found.share == pytest.approx(1 / 3)
    assert math.isnan(Divergence(0, 0, 0).share)


def test_divergences_from_rounds_are_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with session(torch.float64, judge := ShuffledLatency(0)) as made:
        groups = made.groups(TASKS, update=3)
        caplog.set_level("INFO", "mintrl_env.adapters.divergence")
        found = compare_with_rounds(made, groups[1:3], TASKS[1:3], judge=judge)
        assert (found.rows, found.differing) == (8, 0), "float64: none"
        assert found.tokens == sum(len(row.ids) for rows in groups[1:3] for row in rows)
        assert "0 of 8 rows differ" in caplog.text
        # Other weights stand for roundings: the count is not blind.
        with torch.no_grad():
            for parameter in made.host.model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape))
        assert compare_with_rounds(made, groups[:1], TASKS[:1], judge=judge).differing > 0
        with pytest.raises(UsageError, match="not the same"):
            compare_with_rounds(made, groups[:1], TASKS[1:2], judge=judge)
    made = session(torch.float32, judge, rounds=True)
    with made, pytest.raises(UsageError, match="works in rounds"):
        compare_with_rounds(made, groups[:1], TASKS[:1], judge=judge)
