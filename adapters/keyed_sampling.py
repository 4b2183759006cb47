"""Keyed sampling over a batch: each row's own uniform number picks its token."""

from __future__ import annotations

import torch


def draw(
    logits_B_V: torch.Tensor, temperature_B: torch.Tensor, u_B: torch.Tensor, *, greedy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick one token a row by inverse CDF in float64, the batch form of `keys.inverse_cdf`.

    Args:
        logits_B_V: any float dtype, the real vocabulary only.
        temperature_B: float64; 0 is greedy (`u_B` is ignored, log-probs at temperature 1).
        u_B: float64 in [0, 1).
        greedy: whether any temperature is 0 (known to the caller without asking the device).

    Returns:
        ids int64 (B,) and their log-probs float64 (B,) under softmax(logits / temperature); a
        log-prob is NaN where the logits are.
    """
    logits_B_V = logits_B_V.double()
    scaled_B_V = logits_B_V / torch.where(temperature_B > 0, temperature_B, 1.0)[:, None]
    scaled_B_V -= scaled_B_V.amax(-1, keepdim=True)
    probs_B_V = scaled_B_V.exp()
    cdf_B_V = probs_B_V.cumsum(-1)
    total_B_1 = cdf_B_V[:, -1:].contiguous()
    ids_B_1 = torch.searchsorted(cdf_B_V, u_B[:, None] * total_B_1, right=True)
    # u * total may round up to the total: step back onto the last token with any probability.
    ids_B_1 = torch.minimum(ids_B_1, torch.searchsorted(cdf_B_V, total_B_1))
    ids_B_1 = ids_B_1.clamp(max=cdf_B_V.shape[1] - 1)  # NaN sorts past the end
    if greedy:
        best_B_1 = logits_B_V.argmax(-1, keepdim=True)
        ids_B_1 = torch.where(temperature_B[:, None] > 0, ids_B_1, best_B_1)
    logp_B_1 = scaled_B_V.gather(-1, ids_B_1) - total_B_1.log()
    return ids_B_1[:, 0], logp_B_1[:, 0]


def token_logprobs(logits_N_V: torch.Tensor, ids_N: torch.Tensor) -> torch.Tensor:
    """Log-probs float64 (N,) of given tokens at temperature 1, in the logits' precision (at least
    float32)."""
    if logits_N_V.dtype != torch.float64:
        logits_N_V = logits_N_V.float()
    picked_N = logits_N_V.gather(-1, ids_N[:, None])[:, 0]
    return (picked_N - logits_N_V.logsumexp(-1)).double()
