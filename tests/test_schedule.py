"""Phases and the re-warm-up, update by update."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mintrl_env.errors import UsageError
from mintrl_env.trainers.schedule import Phase, PhaseSchedule

torch.set_num_threads(1)


def test_phases_count_from_zero() -> None:
    schedule = PhaseSchedule(intervention_updates=2)
    assert [schedule.phase(u) for u in range(4)] == ["intervention", "intervention", "grpo", "grpo"]


def test_the_default_is_the_papers() -> None:
    schedule = PhaseSchedule()
    assert schedule.phase(199) is Phase.INTERVENTION
    assert schedule.phase(200) is Phase.GRPO
    assert {schedule.lr_factor(u) for u in (0, 199, 200, 500)} == {1.0}


def test_no_intervention_is_grpo_from_the_start_without_a_switch() -> None:
    schedule = PhaseSchedule(intervention_updates=0, rewarm_updates=5)
    assert schedule.phase(0) is Phase.GRPO
    assert schedule.lr_factor(0) == 1.0


def test_rewarm_up_is_linear_and_never_zero() -> None:
    schedule = PhaseSchedule(intervention_updates=3, rewarm_updates=4)
    assert [schedule.lr_factor(u) for u in range(9)] == [1, 1, 1, 0.25, 0.5, 0.75, 1, 1, 1]


def test_lr_lambda_drives_a_torch_scheduler_by_optimiser_steps() -> None:
    schedule = PhaseSchedule(intervention_updates=1, rewarm_updates=2)
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=8.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimiser, schedule.lr_lambda(2, base=lambda step: 1.0 if step else 0.5)
    )
    seen = []
    for _ in range(7):
        seen.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        scheduler.step()
    # Two steps an update: updates 0 0 | 1 1 (half) | 2 2 3 (whole).
    assert seen == [4.0, 8.0, 4.0, 4.0, 8.0, 8.0, 8.0]
    assert schedule.lr_lambda(1)(1) == 0.5


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 100))
def test_factor_lies_in_0_1_and_never_falls_within_a_phase(
    n: int, rewarm: int, update: int
) -> None:
    schedule = PhaseSchedule(n, rewarm)
    now, later = schedule.lr_factor(update), schedule.lr_factor(update + 1)
    assert 0 < now <= 1
    is_switch = update + 1 == n > 0
    assert is_switch or later >= now
    assert schedule.lr_factor(n + rewarm) == 1.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PhaseSchedule(-1), "intervention_updates"),
        (lambda: PhaseSchedule(1, -1), "rewarm_updates"),
        (lambda: PhaseSchedule().phase(-1), "count from 0"),
        (lambda: PhaseSchedule().lr_factor(-1), "count from 0"),
        (lambda: PhaseSchedule().lr_lambda(0), "at least one"),
    ],
)
def test_refuses(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match=message):
        call()
