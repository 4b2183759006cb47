"""Every figure of one small update, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mintrl_env.errors import UsageError
from mintrl_env.trainers.diagnostics import clip_share, diagnostics
from mintrl_env.trainers.objective import (
    ENVIRONMENT,
    INTERVENTION,
    PAD,
    POLICY,
    anchor,
    control_baseline,
)

torch.set_num_threads(1)
NAN = math.nan
P, J, E, X = POLICY, INTERVENTION, ENVIRONMENT, PAD


def f64(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def figures(kind: str = "const", **change: object) -> dict[str, float]:
    """Three groups: 0 is mixed, 1 fails throughout, 2 succeeds but has lost its control."""
    provenance = torch.tensor(
        [
            [P, P, P, X],  # group 0: control, fails
            [P, J, J, P],  #          intervened, succeeds
            [P, P, X, X],  #          intervened, undecided
            [P, P, E, P],  # group 1: control, fails
            [P, J, X, X],  #          intervened, fails
            [P, X, X, X],  # group 2: control, not valid
            [J, P, P, P],  #          intervened, succeeds
        ]
    )
    old = torch.where((provenance == P) | (provenance == J), -2.0, NAN).double()
    rewards = f64([0, 1, NAN, 0, 0, 1, 1])
    control = torch.tensor([True, False, False, True, False, True, False])
    group = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    valid = torch.tensor([True, True, True, True, True, False, True])
    anchors = anchor(old, provenance, kind=kind, kappa=-0.5)  # type: ignore[arg-type]
    value = control_baseline(rewards, control, group, valid_B=valid)
    arguments: dict[str, object] = {
        "logp_B_T": old + 0.25,
        "old_logp_B_T": old,
        "anchor_B_T": anchors,
        "provenance_B_T": provenance,
        "rewards_B": rewards,
        "advantage_B": rewards - value,
        "is_control_B": control,
        "group_B": group,
        "valid_B": valid,
        "beta_2": 0.5,
    }
    return diagnostics(**(arguments | change))  # type: ignore[arg-type]


def test_every_figure_by_hand() -> None:
    # Trained rows: 0, 1, 3, 4 with A = 0, 1, 0, 0. A token that counts moved by +0.25; kappa is 1.5
    # above log pi_t, so an INTERVENTION token adds 0.25 - 1.5 to the log-ratio and 0.5 * 1.5 to A.
    ratios = {0: 0.75, 1: 0.5 - 2.5, 3: 0.75, 4: 0.25 - 1.25}
    residuals = sorted([0.375, -1.0 - 1.0, 0.375, -0.5])  # -2, -0.5, 0.375, 0.375
    expected = {
        "rows": 7,
        "trained_rows": 4,
        "undecided_rows": 1,
        "reward/control": 0.0,
        "reward/intervened": 2 / 3,
        "groups/no_valid_control": 1,
        "groups/all_fail": 1 / 3,
        "groups/all_succeed": 1 / 3,
        # Intervened: 2 of 4, 0 of 2, 1 of 2, 1 of 4. Controls that are valid: 3 and 3 tokens.
        "off_policy_fraction/intervened": 4 / 12,
        "off_policy_fraction/all": 4 / 18,
        "intervention_logp/mean": -2.0,
        "advantage_shift/min": 0.75,
        "advantage_shift/mean": 1.125,
        "advantage_shift/max": 1.5,
        "advantage_shift/flips": 1,  # row 4: a failure with A = 0 and A' = 0.75
        "log_ratio/min": min(ratios.values()),
        "log_ratio/mean": sum(ratios.values()) / 4,
        "log_ratio/max": max(ratios.values()),
        "residual/min": -2.0,
        "residual/p05": residuals[0] + 0.15 * (residuals[1] - residuals[0]),
        "residual/p50": (residuals[1] + residuals[2]) / 2,
        "residual/p95": 0.375,
        "residual/max": 0.375,
        **{f"residual_success/{q}": -2.0 for q in ("min", "p05", "p50", "p95", "max")},
        "residual_failure/min": -0.5,
        "residual_failure/p05": -0.5 + 0.1 * 0.875,
        "residual_failure/p50": 0.375,
        "residual_failure/p95": 0.375,
        "residual_failure/max": 0.375,
    }
    actual = figures()
    assert actual == {f"mintrl/{name}": pytest.approx(v) for name, v in expected.items()}
    assert all(type(value) is float for value in actual.values())


def test_proxy_grants_no_bonus() -> None:
    actual = figures("proxy")
    assert actual["mintrl/advantage_shift/max"] == 0.0
    assert actual["mintrl/advantage_shift/min"] == 0.0
    assert actual["mintrl/advantage_shift/flips"] == 0.0


def test_the_bar_for_success_moves_the_group_shares() -> None:
    actual = figures(success_above=1.0)
    assert actual["mintrl/groups/all_fail"] == 1.0
    assert actual["mintrl/groups/all_succeed"] == 0.0
    assert "mintrl/residual_success/p50" not in actual


def test_figures_about_nothing_are_left_out() -> None:
    actual = figures(valid_B=torch.zeros(7, dtype=torch.bool))
    assert actual == {
        "mintrl/rows": 7.0,
        "mintrl/trained_rows": 0.0,
        "mintrl/undecided_rows": 1.0,
        "mintrl/groups/no_valid_control": 3.0,
        "mintrl/advantage_shift/flips": 0.0,
    }


def test_clip_share() -> None:
    assert clip_share([0.5, 1.0, 1.5, 3.0], max_norm=1.0) == 0.5
    for norms in ([], [0.5, NAN]):
        with pytest.raises(UsageError, match="clip_share"):
            clip_share(norms, max_norm=1.0)
