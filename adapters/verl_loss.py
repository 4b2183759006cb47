"""The squared regression as veRL's policy loss `mintrl`, and its config.

    actor_rollout_ref.actor.policy_loss._target_=mintrl_env.adapters.verl_loss.MintrlPolicyLossConfig
    actor_rollout_ref.actor.policy_loss.loss_mode=mintrl
    +actor_rollout_ref.actor.policy_loss.beta_2=1e-3

veRL hands a policy loss four tensors, and provenance is none of them. The trainer `mintrl_sync` puts
what is needed into these four (see verl_batch.py): the anchor stands in `old_log_prob`, A on every
token of `advantages`, the mask is 1 on the POLICY and INTERVENTION tokens of trained rows, and
`rollout_is_weights` holds each row's weight, which makes the sum over a mini-batch the mean over the
rows that are trained in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from mintrl_env.errors import MissingExtraError, UsageError

try:
    from verl.workers.config import PolicyLossConfig
except ImportError as error:
    raise MissingExtraError("verl", "verl", "the policy loss `mintrl`") from error

from mintrl_env.adapters.verl_names import LOSS_MODE
from mintrl_env.trainers.objective import (
    PAD,
    POLICY,
    AnchorKind,
    Baseline,
    LossScale,
    check_kappa,
    divisor,
    sequence_log_ratio,
)


@dataclass
class MintrlPolicyLossConfig(PolicyLossConfig):
    """veRL's PolicyLossConfig and what MInTRL adds; trainer and agent loop read it too.

    Attributes:
        variant: "const" or "proxy": the anchor of judge-written tokens.
        kappa: the Const anchor, nats a token; <= 0.
        beta_1: temperature of the soft value; inf for the control mean.
        beta_2: nats to reward in the regression.
        baseline: "mean" or "loo" over the controls.
        loss_scale: "paper", or "matched" to a token-mean policy gradient.
        n_control: N_c; rows 0 to N_c - 1 of `rollout.n` are controls.
        intervention_updates: updates with the judge on; GRPO after them. -1: always on; 0: GRPO.
        rewarm_updates: updates over which the learning rate rises again after the switch.
        max_failure_rate, min_reviews: see RolloutConfig; the trainer stops above the rate.
        store: folder for the trajectories, on the machine of the trainer's process; "": none.

    Raises:
        UsageError: a value that the objective refuses.
    """

    loss_mode: str = LOSS_MODE
    variant: str = "const"
    kappa: float = -0.2
    beta_1: float = math.inf
    beta_2: float = 1e-3
    baseline: str = "mean"
    loss_scale: str = "paper"
    n_control: int = 8
    intervention_updates: int = 200
    rewarm_updates: int = 0
    max_failure_rate: float = 0.5
    min_reviews: int = 32
    store: str = ""

    def __post_init__(self) -> None:
        for name, values in (
            ("loss_mode", (LOSS_MODE,)),
            ("variant", get_args(AnchorKind)),
            ("baseline", get_args(Baseline)),
            ("loss_scale", get_args(LossScale)),
        ):
            if getattr(self, name) not in values:
                raise UsageError(
                    f"policy_loss.{name} is {' or '.join(values)}, not {getattr(self, name)!r}"
                )
        if self.variant == "const":
            check_kappa(self.kappa)
        if not (self.beta_1 > 0 and 0 < self.beta_2 < math.inf):
            raise UsageError(
                f"policy_loss: beta_1 and beta_2 must be > 0, not {self.beta_1} and {self.beta_2}"
            )
        if self.intervention_updates < -1:
            raise UsageError("policy_loss.intervention_updates counts updates; -1: always on")
        if self.rewarm_updates < 0:
            raise UsageError("policy_loss.rewarm_updates counts updates; 0: none")
        if self.intervention_updates and self.n_control < 1:
            raise UsageError("policy_loss.n_control: no baseline without a control")


def mintrl_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """sum over rows of w (beta_2 * sum_s (log pi_theta - anchor) - A)^2, over the global mini-batch.

    Args:
        old_log_prob: the anchor, (B, T). log_prob: log pi_theta, (B, T), with a graph.
        advantages: A on each token of a row, (B, T).
        response_mask: the tokens of the sums, (B, T); a row without one is left out.
        loss_agg_mode: not used: the method has one way to aggregate.
        config: the actor's; its `policy_loss` gives beta_2, its `global_batch_info` the size of the
            mini-batch over all ranks and the number of ranks, over which gradients are averaged.
        rollout_is_weights: w on each token of a row, (B, T). None: 1, and every row counts in the
            mean, also one that is left out.

    Returns:
        (loss, metrics): a scalar that always has a graph to log_prob, and detached floats.
    """
    mask_B_T = response_mask.bool()
    rows_B = mask_B_T.any(dim=1)
    first_B_1 = mask_B_T.int().argmax(dim=1, keepdim=True)

    def of_row(values_B_T: Tensor) -> Tensor:
        return torch.where(rows_B, values_B_T.detach().gather(1, first_B_1).squeeze(1), 0.0)

    log_ratio_B = sequence_log_ratio(
        log_prob, old_log_prob.detach(), torch.where(mask_B_T, POLICY, PAD)
    )
    residual_B = config.policy_loss.beta_2 * log_ratio_B - of_row(advantages).to(log_ratio_B.dtype)
    residual_B = torch.where(rows_B, residual_B, 0.0)
    squared_B = residual_B.square()
    if rollout_is_weights is not None:
        squared_B = squared_B * of_row(rollout_is_weights).to(squared_B.dtype)
    info = config.global_batch_info
    size = info.get("global_batch_size")
    loss = squared_B.sum() / divisor(rows_B.sum() if size is None else size, squared_B)
    loss = loss * (info.get("dp_size") or 1)
    trained = divisor(rows_B.sum(), squared_B)
    metrics = {
        "mintrl/log_ratio_abs": float((log_ratio_B.detach().abs() * rows_B).sum() / trained),
        "mintrl/residual_abs": float(residual_B.detach().abs().sum() / trained),
    }
    return loss, metrics
