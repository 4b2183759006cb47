"""An update's rows as the tensors that veRL's actor takes: pure functions, no veRL here.

veRL's optimiser steps over mini-batches of a batch that has been padded and reordered, and divides by
their size. The mean that the method wants is over the rows that are trained in each, so a row's weight
is (size of its mini-batch) / (rows trained in it), at "matched" scale also over 2 beta_2 mean tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mintrl_env.adapters.row_tensors import group_numbers, provenance_tensor, rewards_of
from mintrl_env.errors import UsageError
from mintrl_env.trainers.baselines import grpo_advantages
from mintrl_env.trainers.diagnostics import diagnostics
from mintrl_env.trainers.objective import (
    anchor,
    control_baseline,
    loss_mask,
    trained_rows,
)
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Kind


@dataclass(frozen=True)
class ActorTensors:
    """What veRL's loss is given, padded on the right.

    Attributes:
        mask_B_T: the tokens that enter the loss, int64.
        advantages_B_T: A on each of these, 0 elsewhere, float32.
        old_logp_B_T: the anchor, or log pi_t in the GRPO phase, float32.
        weights_B_T: each row's weight on its tokens; None in the GRPO phase.
        metrics: of the update.
    """

    mask_B_T: Tensor
    advantages_B_T: Tensor
    old_logp_B_T: Tensor
    weights_B_T: Tensor | None
    metrics: dict[str, float]


def minibatch_index(rows: int, *, dp_size: int, minibatch: int) -> Tensor:
    """Which optimiser step (counted within a pass) each row of a batch enters, (rows,).

    veRL gives each rank a run of rows, and each rank takes its share of a mini-batch from its own
    run, in order.

    Raises:
        UsageError: sizes that veRL could not split either.
    """
    if rows % dp_size or minibatch % dp_size or rows % minibatch:
        raise UsageError(
            f"{rows} rows do not split into mini-batches of {minibatch} on {dp_size} ranks"
        )
    within = torch.arange(rows) % (rows // dp_size)
    return within // (minibatch // dp_size)


def regression_tensors(
    rows: Sequence[Trajectory | None],
    groups: Sequence[str],
    old_logp_B_T: Tensor,
    step_B: Tensor,
    settings: Mapping[str, Any],
    *,
    minibatch: int,
) -> ActorTensors:
    """The tensors of an update with the judge on.

    Args:
        rows: the batch's trajectories with their scores, None for padding rows.
        groups: the group of each row.
        old_logp_B_T: log pi_t, recomputed at the sampling temperature.
        step_B: from `minibatch_index`.
        settings: variant, kappa, beta_1, beta_2, baseline, loss_scale.
        minibatch: rows of an optimiser step over all ranks.
    """
    real = [index for index, row in enumerate(rows) if row is not None]
    provenance_B_T = provenance_tensor(rows, old_logp_B_T.shape[1])
    rewards_B, group_B = rewards_of(rows), group_numbers(rows, groups)
    control_B = torch.tensor([row is not None and row.kind is Kind.CONTROL for row in rows])
    value_B = control_baseline(
        rewards_B,
        control_B,
        group_B,
        beta_1=settings["beta_1"],
        baseline=settings["baseline"],
    )
    advantage_B = rewards_B - value_B
    anchor_B_T = anchor(
        old_logp_B_T, provenance_B_T, kind=settings["variant"], kappa=settings["kappa"]
    )
    trained_B = trained_rows(provenance_B_T, advantage_B)
    mask_B_T = loss_mask(provenance_B_T) & trained_B[:, None]
    steps = int(step_B.max()) + 1
    rows_S = torch.zeros(steps).index_add_(0, step_B, trained_B.float())
    tokens_S = torch.zeros(steps).index_add_(0, step_B, mask_B_T.sum(dim=1).float())
    weight_S = minibatch / rows_S.clamp(min=1)
    if settings["loss_scale"] == "matched":
        mean_tokens_S = tokens_S / rows_S.clamp(min=1)
        weight_S = weight_S / (2 * settings["beta_2"] * mean_tokens_S.clamp(min=1))
    figures = diagnostics(
        logp_B_T=old_logp_B_T[real],
        old_logp_B_T=old_logp_B_T[real],
        anchor_B_T=anchor_B_T[real],
        provenance_B_T=provenance_B_T[real],
        rewards_B=rewards_B[real],
        advantage_B=advantage_B[real],
        is_control_B=control_B[real],
        group_B=group_B[real],
        beta_2=settings["beta_2"],
    )
    return ActorTensors(
        mask_B_T.long(),
        _on(mask_B_T, advantage_B),
        torch.where(mask_B_T, anchor_B_T, 0.0).float(),
        _on(mask_B_T, weight_S[step_B]),
        figures,
    )


def grpo_tensors(
    rows: Sequence[Trajectory | None], groups: Sequence[str], old_logp_B_T: Tensor
) -> ActorTensors:
    """The tensors of an update of the GRPO phase: rows that are undecided are left out."""
    provenance_B_T = provenance_tensor(rows, old_logp_B_T.shape[1])
    rewards_B, group_B = rewards_of(rows), group_numbers(rows, groups)
    advantage_B = grpo_advantages(rewards_B, group_B)
    mask_B_T = loss_mask(provenance_B_T) & ~torch.isnan(rewards_B)[:, None]
    decided = ~torch.isnan(rewards_B)
    metrics = {
        "mintrl/undecided_rows": float(sum(r is not None for r in rows) - int(decided.sum()))
    }
    if decided.any():
        metrics["mintrl/reward/control"] = float(rewards_B[decided].mean())
    return ActorTensors(
        mask_B_T.long(),
        _on(mask_B_T, advantage_B),
        torch.where(mask_B_T, old_logp_B_T, 0.0).float(),
        None,
        metrics,
    )


def _on(mask_B_T: Tensor, value_B: Tensor) -> Tensor:
    """A row's number on each token of the mask, 0 elsewhere."""
    return torch.where(mask_B_T, value_B[:, None].float(), 0.0)
