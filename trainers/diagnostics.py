"""What a person watches while MInTRL trains: one function over an update, plain floats.

Pass the whole update, gathered over ranks. A figure about no rows at all is left out, never NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mintrl_env.errors import UsageError
from mintrl_env.trainers.objective import (
    INTERVENTION,
    loss_mask,
    sequence_log_ratio,
    trained_rows,
)

QUANTILES = {"min": 0.0, "p05": 0.05, "p50": 0.5, "p95": 0.95, "max": 1.0}


def diagnostics(
    *,
    logp_B_T: Tensor,
    old_logp_B_T: Tensor,
    anchor_B_T: Tensor,
    provenance_B_T: Tensor,
    rewards_B: Tensor,
    advantage_B: Tensor,
    is_control_B: Tensor,
    group_B: Tensor,
    valid_B: Tensor | None = None,
    beta_2: float,
    success_above: float = 0.0,
) -> dict[str, float]:
    """Figures of one update (arguments as in `mintrl_env.trainers.objective`; no gradient).

    Args:
        logp_B_T: log pi_theta now; at the first optimiser step it equals old_logp_B_T.
        old_logp_B_T: log pi_t, which wrote the policy's tokens.
        success_above: a reward above this is a success.

    Returns, all under `mintrl/`, shares as fractions:
        rows, trained_rows, undecided_rows: counts; a row is undecided when its reward is NaN.
        reward/control, reward/intervened: mean over valid, decided rows; their gap should close.
        groups/all_fail, groups/all_succeed: shares of the groups with a decided row in which no
            row, or every row, succeeds. groups/no_valid_control: how many groups were dropped
            because no baseline could be had.
        off_policy_fraction/intervened, /all: INTERVENTION / (POLICY + INTERVENTION) tokens, pooled
            over the valid intervened rows, and over all valid rows.
        advantage_shift/{min,mean,max}: A' - A = -beta_2 * sum_INTERVENTION (log pi_t - anchor), the
            bonus that the anchor grants, over the trained rows that hold an intervention (0 under
            Proxy). advantage_shift/flips: how many of these have A <= 0 and A' > 0: failures that
            are reinforced.
        residual/{min,p05,p50,p95,max}: beta_2 * log-ratio - A over trained rows; residual_success/
            and residual_failure/ the same, apart by reward.
        log_ratio/{min,mean,max}: sum (log pi_theta - anchor) over trained rows, nats.
        intervention_logp/mean: mean log pi_t of an INTERVENTION token in valid rows, nats.
    """
    with torch.no_grad():
        valid_B = torch.ones_like(group_B, dtype=torch.bool) if valid_B is None else valid_B.bool()
        control_B = is_control_B.bool()
        trained_B = trained_rows(provenance_B_T, advantage_B, valid_B)
        decided_B = valid_B & ~torch.isnan(rewards_B)
        success_B = rewards_B > success_above
        judge_B_T = provenance_B_T == INTERVENTION
        out = {
            "rows": float(len(rewards_B)),
            "trained_rows": _count(trained_B),
            "undecided_rows": _count(torch.isnan(rewards_B)),
        }
        out |= _mean("reward/control", rewards_B[decided_B & control_B])
        out |= _mean("reward/intervened", rewards_B[decided_B & ~control_B])
        out |= _groups(group_B, decided_B, control_B, success_B)

        for name, rows_B in (("intervened", valid_B & ~control_B), ("all", valid_B)):
            written = _count(loss_mask(provenance_B_T[rows_B]))
            if written:
                out[f"off_policy_fraction/{name}"] = _count(judge_B_T[rows_B]) / written
        out |= _mean("intervention_logp/mean", old_logp_B_T[judge_B_T & valid_B[:, None]])

        shift_B = advantage_shift(old_logp_B_T, anchor_B_T, provenance_B_T, beta_2=beta_2)
        held_B = trained_B & judge_B_T.any(dim=1)
        shift, a = shift_B[held_B], advantage_B[held_B]
        out |= _range("advantage_shift", shift)
        out["advantage_shift/flips"] = _count((a <= 0) & (a + shift > 0))

        log_ratio_B = sequence_log_ratio(logp_B_T, anchor_B_T, provenance_B_T)
        residual_B = beta_2 * log_ratio_B - advantage_B
        out |= _range("log_ratio", log_ratio_B[trained_B])
        out |= _quantiles("residual", residual_B[trained_B])
        out |= _quantiles("residual_success", residual_B[trained_B & success_B])
        out |= _quantiles("residual_failure", residual_B[trained_B & ~success_B])
    return {f"mintrl/{name}": value for name, value in out.items()}


def advantage_shift(
    old_logp_B_T: Tensor, anchor_B_T: Tensor, provenance_B_T: Tensor, *, beta_2: float
) -> Tensor:
    """A' - A = -beta_2 * sum_INTERVENTION (log pi_t - anchor), (B,), in units of reward.

    Regressing on A with this anchor is the same, for every theta, as regressing on A' with Proxy.
    """
    judge_B_T = provenance_B_T == INTERVENTION
    return -beta_2 * (
        torch.where(judge_B_T, old_logp_B_T, 0.0) - torch.where(judge_B_T, anchor_B_T, 0.0)
    ).sum(dim=1)


def clip_share(grad_norms: Sequence[float], max_norm: float) -> float:
    """Share of optimiser steps whose gradient was clipped: its norm was above `max_norm`.

    The sums over long sequences are unclipped, so this and the residuals are all that shows when
    the only guard is at work.

    Raises:
        UsageError: no step, or a norm that is not a number.
    """
    if not grad_norms or any(math.isnan(norm) for norm in grad_norms):
        raise UsageError(f"clip_share needs the gradient norms of some steps, not {grad_norms}")
    return sum(norm > max_norm for norm in grad_norms) / len(grad_norms)


def _groups(
    group_B: Tensor, decided_B: Tensor, control_B: Tensor, success_B: Tensor
) -> dict[str, float]:
    groups, index_B = torch.unique(group_B, return_inverse=True)

    def per_group(rows_B: Tensor) -> Tensor:
        return torch.zeros(len(groups), device=group_B.device).index_add_(
            0, index_B, rows_B.float()
        )

    decided_G = per_group(decided_B)
    succeeded_G = per_group(decided_B & success_B)
    out = {"groups/no_valid_control": _count(per_group(decided_B & control_B) == 0)}
    known_G = decided_G > 0
    if known_G.any():
        out["groups/all_fail"] = _count(known_G & (succeeded_G == 0)) / _count(known_G)
        out["groups/all_succeed"] = _count(known_G & (succeeded_G == decided_G)) / _count(known_G)
    return out


def _count(mask: Tensor) -> float:
    return float(mask.sum())


def _mean(name: str, values: Tensor) -> dict[str, float]:
    return {name: float(values.double().mean())} if len(values) else {}


def _range(name: str, values: Tensor) -> dict[str, float]:
    if not len(values):
        return {}
    return {
        f"{name}/min": float(values.min()),
        f"{name}/mean": float(values.double().mean()),
        f"{name}/max": float(values.max()),
    }


def _quantiles(name: str, values: Tensor) -> dict[str, float]:
    if not len(values):
        return {}
    points = torch.tensor(list(QUANTILES.values()), dtype=torch.float64, device=values.device)
    at = torch.quantile(values.double(), points).tolist()
    return {f"{name}/{q}": value for q, value in zip(QUANTILES, at, strict=True)}
