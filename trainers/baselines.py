"""The losses that MInTRL is compared with, and the GRPO phase that follows it, on tensors.

GRPO is pinned here once for the baseline and for the second phase, and is the same under TRL and
veRL: advantages normalised by the group's standard deviation, token-mean over the whole batch,
clip 0.2 on both sides, no KL term, truncated responses included, no importance-sampling correction
for the inference engine. Axes and provenance as in `mintrl_env.trainers.objective`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mintrl_env.trainers.objective import POLICY, divisor, loss_mask

STD_EPSILON = 1e-4
"""What TRL adds to a group's standard deviation."""


def grpo_advantages(rewards_B: Tensor, group_B: Tensor, valid_B: Tensor | None = None) -> Tensor:
    """(r - mean) / (std + 1e-4) within each group, (B,): `scale_rewards="group"` of TRL 1.16.

    The standard deviation has Bessel's correction (n - 1). NaN rewards, rows that are not valid and
    rows alone in their group get 0, as in TRL: nothing to learn. Groups may have any size, order
    and numbering. Leave such rows out of the loss with its `valid_B`.
    """
    rewards_B = rewards_B.detach()
    used_B = ~torch.isnan(rewards_B)
    if valid_B is not None:
        used_B = used_B & valid_B.bool()
    groups, index_B = torch.unique(group_B, return_inverse=True)

    def per_group(values_B: Tensor) -> Tensor:
        sums_G = torch.zeros(len(groups), dtype=torch.float64, device=rewards_B.device)
        return sums_G.index_add_(0, index_B, values_B.double())[index_B]

    n_B = per_group(used_B)
    r_B = torch.where(used_B, rewards_B.double(), 0.0)
    centred_B = torch.where(used_B, r_B - per_group(r_B) / n_B.clamp(min=1), 0.0)
    std_B = (per_group(centred_B.square()) / (n_B - 1).clamp(min=1)).sqrt()
    dtype = rewards_B.dtype if rewards_B.is_floating_point() else torch.get_default_dtype()
    return (centred_B / (std_B + STD_EPSILON)).to(dtype)


def grpo_loss(
    logp_B_T: Tensor,
    old_logp_B_T: Tensor,
    provenance_B_T: Tensor,
    advantage_B: Tensor,
    valid_B: Tensor | None = None,
    *,
    clip: float = 0.2,
    denominator: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped policy gradient over POLICY tokens, mean over the tokens of the batch.

    -min(rho A, clamp(rho, 1 - clip, 1 + clip) A) with rho = pi_theta / pi_t a token. Tokens that
    the policy did not sample have no such ratio and are left out.

    Args:
        logp_B_T, old_logp_B_T: log pi_theta with a graph and log pi_t, (B, T).
        advantage_B: see `grpo_advantages`, (B,).
        denominator: POLICY tokens of the valid rows of the whole optimiser batch on all ranks; None
            for this call's.

    Returns:
        (loss, metrics): a scalar with a graph even where no token counts; `grpo/clip_low` and
        `grpo/clip_high`, shares of tokens that the clip silenced, and `grpo/tokens`.
    """
    mask_B_T = (provenance_B_T == POLICY) & _rows(valid_B, logp_B_T)[:, None]
    # Masked before the exponential, so that what stands on other tokens can't reach the gradient.
    log_ratio_B_T = torch.where(mask_B_T, logp_B_T, 0.0) - torch.where(
        mask_B_T, old_logp_B_T.detach(), 0.0
    )
    ratio_B_T = log_ratio_B_T.exp()
    a_B_1 = torch.nan_to_num(advantage_B.detach()).to(ratio_B_T.dtype)[:, None]
    loss_B_T = -torch.minimum(ratio_B_T * a_B_1, ratio_B_T.clamp(1 - clip, 1 + clip) * a_B_1)
    loss = torch.where(mask_B_T, loss_B_T, 0.0).sum()
    tokens = mask_B_T.sum()
    low_B_T = mask_B_T & (ratio_B_T < 1 - clip) & (a_B_1 < 0)
    high_B_T = mask_B_T & (ratio_B_T > 1 + clip) & (a_B_1 > 0)
    metrics = {
        "grpo/tokens": tokens,
        "grpo/clip_low": low_B_T.sum() / divisor(tokens, loss),
        "grpo/clip_high": high_B_T.sum() / divisor(tokens, loss),
    }
    return loss / divisor(tokens if denominator is None else denominator, loss), metrics


def nll_loss(
    logp_B_T: Tensor,
    provenance_B_T: Tensor,
    valid_B: Tensor | None = None,
    *,
    denominator: float | Tensor | None = None,
) -> Tensor:
    """Negative log-likelihood, nats, mean over POLICY and INTERVENTION tokens: SFT's loss.

    For SFT+GRPO the rows are whole trajectories of the judge. `denominator` as in `grpo_loss`, over
    the same tokens; the scalar has a graph even where no token counts.
    """
    mask_B_T = loss_mask(provenance_B_T) & _rows(valid_B, logp_B_T)[:, None]
    loss = -torch.where(mask_B_T, logp_B_T, 0.0).sum()
    return loss / divisor(mask_B_T.sum() if denominator is None else denominator, loss)


def _rows(valid_B: Tensor | None, logp_B_T: Tensor) -> Tensor:
    if valid_B is not None:
        return valid_B.bool()
    return torch.ones(len(logp_B_T), dtype=torch.bool, device=logp_B_T.device)
