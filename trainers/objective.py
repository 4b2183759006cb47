"""The MInTRL objective (arXiv 2609.12419, equations 4 to 7) as pure functions on tensors.

For a group with rewards r, a baseline V from its control rows alone, and A = r - V,

    loss = mean over trained rows of ( beta_2 * sum_s (log pi_theta(y_s) - anchor_s) - A )^2

summed over the tokens that the policy or the judge wrote. No importance weights: the log-ratio is
regressed on the advantage, and the control rows, which nobody touched, say what pi_t gets alone.

Axes: B rows (trajectories), T response tokens. Padding is a value of the provenance, `PAD` = -1,
so that one tensor says for every cell whether it counts; padding may stand on either side. Rewards
of NaN are undecided (a service failed), never wrong answers; they stay NaN in the advantage, and
every function here leaves such rows out.
"""

from __future__ import annotations

import math
import warnings
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from mintrl_env.errors import UsageError
from mintrl_env.types import Provenance

PAD = -1
POLICY = int(Provenance.POLICY)
INTERVENTION = int(Provenance.INTERVENTION)
ENVIRONMENT = int(Provenance.ENVIRONMENT)

Baseline: TypeAlias = Literal["mean", "loo"]
AnchorKind: TypeAlias = Literal["proxy", "const"]
LossScale: TypeAlias = Literal["paper", "matched"]

MATH_KAPPA = -0.2
"""The paper's kappa for math, nats a token at temperature 1."""
CODE_KAPPA = -0.1
"""The paper's kappa for code, nats a token at temperature 1."""


def loss_mask(provenance_B_T: Tensor) -> Tensor:
    """The tokens that enter the sums: POLICY and INTERVENTION, bool (B, T)."""
    return (provenance_B_T == POLICY) | (provenance_B_T == INTERVENTION)


def trained_rows(
    provenance_B_T: Tensor, advantage_B: Tensor, valid_B: Tensor | None = None
) -> Tensor:
    """The rows that enter the loss, bool (B,).

    A row is left out when it is marked not valid, when its advantage is NaN (its reward is
    undecided, or its group has no valid control), or when it has no token to train.
    """
    rows_B = ~torch.isnan(advantage_B) & loss_mask(provenance_B_T).any(dim=1)
    return rows_B if valid_B is None else rows_B & valid_B.bool()


def batch_counts(
    provenance_B_T: Tensor, advantage_B: Tensor, valid_B: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Trained rows, and tokens in their sums: two int64 scalars that can be added up.

    Sum both over the micro-batches of one optimiser step and over all ranks; then
    `mintrl_loss(..., denominator=rows, mean_tokens=tokens / rows)` of the parts adds up to the
    loss of the whole batch. (DDP averages gradients over ranks: multiply by the world size there.)
    """
    rows_B = trained_rows(provenance_B_T, advantage_B, valid_B)
    tokens_B = loss_mask(provenance_B_T).sum(dim=1)
    return rows_B.sum(), tokens_B[rows_B].sum()


def control_baseline(
    rewards_B: Tensor,
    is_control_B: Tensor,
    group_B: Tensor,
    *,
    beta_1: float = math.inf,
    baseline: Baseline = "mean",
    valid_B: Tensor | None = None,
) -> Tensor:
    """The value V of each row's group, from the group's valid control rows alone.

    V = mean(r) for beta_1 = inf, the paper's setting, else the soft value
    V = beta_1 * log mean exp(r / beta_1) (arXiv 2609.12419, equations 4 to 7).

    Args:
        rewards_B: rewards, (B,); NaN is undecided and counts as not valid.
        is_control_B: which rows nobody reviewed, (B,) bool.
        group_B: which rows belong together, (B,) integers; any numbering, any order.
        beta_1: the soft value's temperature, > 0, in units of reward; inf for the mean.
        baseline: "mean" over all valid controls, or "loo", which leaves a control's own reward out
            of its own baseline ("mean" shrinks a control's gradient by (n - 1) / n). Intervened
            rows have the same V either way.
        valid_B: rows that may be used, (B,) bool; None for all.

    Returns:
        V_B, (B,), float: one value a row; NaN where no valid control is left, so A = r - V is NaN
        and the row drops out of the loss. No gradient flows. Pairs of rows are compared, so B x B
        numbers are held for a moment: 1 MB for the paper's 512 rows.

    Raises:
        UsageError: shapes differ, a reward is infinite, beta_1 <= 0 or `baseline` is unknown.
    """
    if not beta_1 > 0:
        raise UsageError(
            f"beta_1 is a temperature and must be > 0 (inf for the mean), not {beta_1}"
        )
    _one_of("baseline", baseline, get_args(Baseline))
    _same_shape(rewards_B=rewards_B, is_control_B=is_control_B, group_B=group_B, valid_B=valid_B)
    if not rewards_B.is_floating_point():
        rewards_B = rewards_B.to(torch.get_default_dtype())
    if torch.isinf(rewards_B).any():
        raise UsageError("rewards_B holds an infinite reward: use NaN for what could not be scored")

    counted_B = is_control_B.bool() & ~torch.isnan(rewards_B)
    if valid_B is not None:
        counted_B = counted_B & valid_B.bool()
    counted_B_B = (group_B[:, None] == group_B[None, :]) & counted_B[None, :]
    if baseline == "loo":
        counted_B_B = counted_B_B & ~torch.eye(
            len(rewards_B), dtype=torch.bool, device=rewards_B.device
        )
    r_B = rewards_B.detach().double()
    n_B = counted_B_B.sum(dim=1).double()
    if math.isinf(beta_1):
        V_B = torch.where(counted_B_B, r_B[None, :], 0.0).sum(dim=1) / n_B  # 0 / 0 is NaN: wanted
    else:
        scaled_B_B = torch.where(counted_B_B, r_B[None, :] / beta_1, -math.inf)
        V_B = beta_1 * (torch.logsumexp(scaled_B_B, dim=1) - n_B.log())  # -inf + inf is NaN: wanted
    return V_B.to(rewards_B.dtype)


def check_kappa(kappa: float | None) -> float:
    """kappa, the constant log-prob that Const gives to an INTERVENTION token, if it can be one.

    Raises:
        UsageError: kappa is missing, not finite or > 0 (it stands for a log-probability).
    Warns:
        UserWarning: kappa is 0, which says that the judge is certain of each of its tokens. An
            oracle's calibration gives that; a model's means that its log-probs went missing.
    """
    if kappa is None or not math.isfinite(kappa) or kappa > 0:
        raise UsageError(
            f"kappa stands for the log-prob of a token and must be a number <= 0, not {kappa}: "
            f"calibrate it, or take the paper's {MATH_KAPPA} (math) or {CODE_KAPPA} (code)"
        )
    if kappa == 0:
        warnings.warn(
            "kappa = 0 says that the judge is certain of every token it writes: right for an oracle"
            " alone; calibrate it on the judge's own log-probs otherwise",
            stacklevel=2,
        )
    return float(kappa)


def anchor(
    old_logp_B_T: Tensor,
    provenance_B_T: Tensor,
    *,
    kind: AnchorKind,
    kappa: float | None = None,
) -> Tensor:
    """The reference log-probs of the regression, (B, T), without gradient.

    "proxy": log pi_t of every token. "const": the same on POLICY tokens, kappa on INTERVENTION
    tokens. Const is Proxy with A' = A - beta_2 * sum_INTERVENTION (log pi_t - kappa) for every
    theta: kappa is a bonus per trajectory for interventions that surprise pi_t.

    Args:
        old_logp_B_T: log pi_t, recomputed by the trainer at the sampling temperature, (B, T). What
            stands on ENVIRONMENT tokens and padding is not read and may be NaN.
        provenance_B_T: who wrote each token, `PAD` for none, (B, T).
        kind: "proxy" or "const".
        kappa: nats a token, on the scale of old_logp_B_T; read for "const" alone.

    Raises:
        UsageError: shapes differ, the kind is unknown, kappa is missing or > 0 (0 warns).
    """
    _one_of("kind", kind, get_args(AnchorKind))
    _same_shape(old_logp_B_T=old_logp_B_T, provenance_B_T=provenance_B_T)
    anchor_B_T = torch.where(loss_mask(provenance_B_T), old_logp_B_T.detach(), 0.0)
    if kind == "const":
        anchor_B_T = torch.where(provenance_B_T == INTERVENTION, check_kappa(kappa), anchor_B_T)
    return anchor_B_T


def sequence_log_ratio(
    logp_B_T: Tensor,
    anchor_B_T: Tensor,
    provenance_B_T: Tensor,
    weight_B_T: Tensor | None = None,
) -> Tensor:
    """sum_s w_s (log pi_theta(y_s) - anchor_s) over POLICY and INTERVENTION tokens, (B,), nats.

    Differences are taken before the sum and in float32 at least: over 16384 tokens the two sums
    are large and nearly equal. Other tokens have no gradient, even where they hold NaN.
    """
    dtype = torch.promote_types(logp_B_T.dtype, torch.float32)
    mask_B_T = loss_mask(provenance_B_T)
    # Both sides are masked before they meet: a NaN that only the result hides would come back as
    # 0 * NaN in the backward pass.
    ratio_B_T = torch.where(mask_B_T, logp_B_T.to(dtype), 0.0) - torch.where(
        mask_B_T, anchor_B_T.to(dtype), 0.0
    )
    if weight_B_T is not None:
        ratio_B_T = ratio_B_T * torch.where(mask_B_T, weight_B_T.detach().to(dtype), 0.0)
    return ratio_B_T.sum(dim=1)


def mintrl_loss(
    logp_B_T: Tensor,
    anchor_B_T: Tensor,
    provenance_B_T: Tensor,
    advantage_B: Tensor,
    valid_B: Tensor | None = None,
    *,
    beta_2: float,
    weight_B_T: Tensor | None = None,
    loss_scale: LossScale = "paper",
    denominator: float | Tensor | None = None,
    mean_tokens: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The squared regression of the sequence log-ratio on the advantage (see the module's head).

    Args:
        logp_B_T: log pi_theta at the sampling temperature, (B, T), with a graph.
        anchor_B_T: see `anchor`, (B, T); taken as a constant.
        provenance_B_T: who wrote each token; ENVIRONMENT and `PAD` are masked out, (B, T).
        advantage_B: A = r - V, (B,); a NaN row is not trained on.
        valid_B: rows that may be used, (B,) bool; None for all. A response cut at the limit T is
            valid; one ended by a deadline or an error is not.
        beta_2: nats to reward, > 0; the paper's is 1e-3.
        weight_B_T: how much each token's log-ratio counts in its row's sum, finite and >= 0, (B, T);
            None: 1, as in the paper. RTI's weights (`mintrl_env.judges_rubric.shift_weights`, mean
            1 over a correction) stand here on INTERVENTION tokens.
        loss_scale: "paper", or "matched": divided by 2 * beta_2 * mean tokens, which gives the
            gradient of a token-mean policy gradient at theta = theta_t, so that gradient clipping
            and the switch to GRPO see one scale.
        denominator: what the sum over rows is divided by: the trained rows of the whole optimiser
            batch on all ranks (`batch_counts`). None: those of this call. A batch without one gives
            a zero loss, not a division by zero.
        mean_tokens: tokens a trained row, over the same whole batch, for "matched". None: this
            call's own.

    Returns:
        (loss, metrics): a scalar that always has a graph to logp_B_T, zero without a trained row;
        and detached scalars under `mintrl/` about this call's rows: `valid_rows`, `loss_tokens`,
        and, where there is a row to speak of, `log_ratio/{min,mean,max}` in nats and
        `residual/{mean,abs_max}` in units of reward.

    Raises:
        UsageError: shapes differ, beta_2 <= 0, a weight is < 0 or not finite, loss_scale is unknown.
    """
    if not 0 < beta_2 < math.inf:
        raise UsageError(f"beta_2 must be a finite number > 0 (the paper's is 1e-3), not {beta_2}")
    _one_of("loss_scale", loss_scale, get_args(LossScale))
    _same_shape(
        logp_B_T=logp_B_T,
        anchor_B_T=anchor_B_T,
        provenance_B_T=provenance_B_T,
        weight_B_T=weight_B_T,
    )
    _same_shape(rows=logp_B_T.shape[:1], advantage_B=advantage_B, valid_B=valid_B)

    rows_B = trained_rows(provenance_B_T, advantage_B, valid_B)
    # Rows that are not trained lose their tokens first: see sequence_log_ratio on NaN.
    provenance_B_T = torch.where(rows_B[:, None], provenance_B_T, PAD)
    if weight_B_T is not None:
        used_B_T = weight_B_T[loss_mask(provenance_B_T)]
        if not bool((used_B_T.isfinite() & (used_B_T >= 0)).all()):
            raise UsageError("weight_B_T holds a weight that is negative or not finite")
    log_ratio_B = sequence_log_ratio(logp_B_T, anchor_B_T.detach(), provenance_B_T, weight_B_T)
    advantage_B = torch.where(rows_B, advantage_B.detach(), 0.0).to(log_ratio_B.dtype)
    residual_B = beta_2 * log_ratio_B - advantage_B

    rows, tokens = rows_B.sum(), loss_mask(provenance_B_T).sum()
    loss = residual_B.square().sum()
    loss = loss / divisor(rows if denominator is None else denominator, loss)
    if loss_scale == "matched":
        own_mean = tokens / divisor(rows, loss)
        loss = loss / (2 * beta_2 * divisor(own_mean if mean_tokens is None else mean_tokens, loss))

    metrics = {"mintrl/valid_rows": rows.detach(), "mintrl/loss_tokens": tokens.detach()}
    if rows_B.any():
        ratios, residuals = log_ratio_B.detach()[rows_B], residual_B.detach()[rows_B]
        metrics |= {
            "mintrl/log_ratio/min": ratios.min(),
            "mintrl/log_ratio/mean": ratios.mean(),
            "mintrl/log_ratio/max": ratios.max(),
            "mintrl/residual/mean": residuals.mean(),
            "mintrl/residual/abs_max": residuals.abs().max(),
        }
    return loss, metrics


def divisor(count: float | Tensor, like: Tensor) -> Tensor:
    """`count` as a scalar of `like`'s type, or 1 where it is 0: nothing over no rows is nothing."""
    count = torch.as_tensor(count, dtype=like.dtype, device=like.device).detach()
    return torch.where(count > 0, count, 1.0)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")


def _same_shape(**tensors: Tensor | torch.Size | None) -> None:
    shapes = {
        name: tuple(t.shape if isinstance(t, Tensor) else t)
        for name, t in tensors.items()
        if t is not None
    }
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise UsageError(f"these must have one shape: {listed}")
