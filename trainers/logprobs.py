"""Log-probs of given tokens without the full logits: for training outside TRL.

With a vocabulary of 152k, the float32 logits of 4 x 1024 tokens take 2.5 GB, and their softmax and
gradient as much again. Here the lm_head is applied to `chunk_tokens` tokens at a time; the forward
pass keeps one log-sum-exp a token, and the backward pass computes each chunk's logits again.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mintrl_env.errors import UsageError

CHUNK_TOKENS = 256


def token_logprobs(
    hidden_B_T_H: Tensor,
    lm_head_weight_V_H: Tensor,
    ids_B_T: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Tensor:
    """log softmax((hidden @ W^T + bias) / temperature)[ids], (B, T), nats.

    Equal to the full computation in value and gradient (to hidden, W and bias; gradients of
    gradients are not to be had). Position t is scored with hidden t: shifting is the caller's
    (`sequence_logprobs` does it). Logits come from a product in the inputs' type, or autocast's,
    and are float32 at least from there on. Memory: `chunk_tokens` x V logits, and in the backward
    pass a float32 gradient of W where W is trained.

    Args:
        hidden_B_T_H: last hidden states, (..., H).
        lm_head_weight_V_H: (V, H); pass `weight[:n]` where the rows from n on are padding.
        ids_B_T: which token to score, integers in [0, V), (...).
        temperature: the sampling temperature, > 0.
        chunk_tokens: tokens whose logits exist at one time.

    Raises:
        UsageError: shapes do not fit, temperature <= 0 or chunk_tokens < 1.
    """
    if not temperature > 0:
        raise UsageError(f"temperature must be > 0, not {temperature}")
    if chunk_tokens < 1:
        raise UsageError(f"chunk_tokens must be >= 1, not {chunk_tokens}")
    if hidden_B_T_H.shape[:-1] != ids_B_T.shape:
        raise UsageError(
            f"hidden states {tuple(hidden_B_T_H.shape)} and ids {tuple(ids_B_T.shape)} do not fit: "
            "hidden must be the ids' shape and one axis more"
        )
    if hidden_B_T_H.shape[-1] != lm_head_weight_V_H.shape[-1]:
        raise UsageError(
            f"hidden states of width {hidden_B_T_H.shape[-1]} do not fit an lm_head of shape "
            f"{tuple(lm_head_weight_V_H.shape)}"
        )
    # A custom function sees autocast in its forward pass alone, so the casts are made out here,
    # where autograd undoes them.
    device = hidden_B_T_H.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    else:
        dtype = torch.promote_types(hidden_B_T_H.dtype, lm_head_weight_V_H.dtype)
    flat_N = _TokenLogprobs.apply(
        hidden_B_T_H.reshape(-1, hidden_B_T_H.shape[-1]).to(dtype),
        lm_head_weight_V_H.to(dtype),
        None if bias_V is None else bias_V.to(dtype),
        ids_B_T.reshape(-1).long(),
        float(temperature),
        int(chunk_tokens),
    )
    return cast(Tensor, flat_N).reshape(ids_B_T.shape)


def sequence_logprobs(
    model: Any,
    ids_B_T: Tensor,
    attention_mask_B_T: Tensor,
    *,
    keep: int | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = CHUNK_TOKENS,
    vocab_size: int | None = None,
) -> Tensor:
    """log p(ids[t] | ids[<t]) of a transformers causal LM, (B, T); of the last `keep` if given.

    Calls the model's decoder and its lm_head apart, through `get_decoder()` and
    `get_output_embeddings()`; a PEFT model is fine as long as its adapter leaves the lm_head alone.
    Padding may stand on either side; positions count real tokens. Tokens without a real one before
    them, and padding, get 0.0 and no gradient.

    Args:
        model: the bare model, not one wrapped for data parallelism: the wrapper's hooks would not
            run. Average gradients over ranks yourself.
        ids_B_T: prompt and response, (B, T).
        attention_mask_B_T: 1 for real tokens, (B, T).
        keep: how many last positions to score, such as the padded response's length.
        vocab_size: real tokens, where the lm_head has padding rows after them that sampling masks.

    Raises:
        UsageError: shapes differ, `keep` is out of range, the model has no such parts, or it does
            more to its logits than an lm_head (a quantised or adapted head, soft-capping, scaling).
    """
    if ids_B_T.shape != attention_mask_B_T.shape:
        raise UsageError(
            f"ids {tuple(ids_B_T.shape)} and attention mask {tuple(attention_mask_B_T.shape)} "
            "must have one shape"
        )
    length = ids_B_T.shape[1]
    keep = length if keep is None else keep
    if not 1 <= keep <= length:
        raise UsageError(f"keep must lie in 1 .. {length}, the sequences' length, not {keep}")
    decoder, head = _parts(model)
    inputs = {"input_ids": ids_B_T, "attention_mask": attention_mask_B_T, "use_cache": False}
    if "position_ids" in inspect.signature(decoder.forward).parameters:
        inputs["position_ids"] = (attention_mask_B_T.long().cumsum(1) - 1).clamp(min=0)
    hidden_B_T_H = decoder(**inputs).last_hidden_state

    first = max(length - keep, 1)  # nothing comes before position 0
    weight, bias = head.weight[:vocab_size], head.bias
    logp_B_K = token_logprobs(
        hidden_B_T_H[:, first - 1 : -1],
        weight,
        ids_B_T[:, first:],
        bias_V=None if bias is None else bias[:vocab_size],
        temperature=temperature,
        chunk_tokens=chunk_tokens,
    )
    real_B_T = attention_mask_B_T.bool()
    scored_B_K = real_B_T[:, first:] & real_B_T[:, first - 1 : -1]
    logp_B_K = torch.where(scored_B_K, logp_B_K, 0.0)
    return logp_B_K if keep < length else torch.nn.functional.pad(logp_B_K, (1, 0))


_LOGIT_KEYS = (  # what models of transformers 5.10 do around their lm_head
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
    "width_multiplier",
)


def _parts(model: Any) -> tuple[Any, torch.nn.Linear]:
    name = type(model).__name__
    if not hasattr(model, "get_decoder") or not hasattr(model, "get_output_embeddings"):
        raise UsageError(
            f"{name} has no get_decoder() and get_output_embeddings(): pass the transformers "
            "causal LM itself, unwrapped, or compute hidden states and call token_logprobs"
        )
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    # Subclasses hold packed weights or add an adapter's product, which `weight` does not show.
    if type(head) is not torch.nn.Linear:
        raise UsageError(
            f"the lm_head of {name} is a {type(head).__name__}, not a plain torch.nn.Linear: leave "
            "it out of adapters and quantisation, or use the model's full logits"
        )
    for key in _LOGIT_KEYS:
        if getattr(model.config, key, None) not in (None, 1, 1.0):
            raise UsageError(
                f"{name} changes its logits after the lm_head (config.{key} = "
                f"{getattr(model.config, key)}), which is not done here: use its full logits"
            )
    return decoder, head


class _TokenLogprobs(torch.autograd.Function):
    """log softmax of chosen tokens; keeps hidden, weight, bias, ids and one log-sum-exp a token."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_N_H: Tensor,
        weight_V_H: Tensor,
        bias_V: Tensor | None,
        ids_N: Tensor,
        temperature: float,
        chunk_tokens: int,
    ) -> Tensor:
        dtype = torch.promote_types(hidden_N_H.dtype, torch.float32)
        lse_N = torch.empty(len(ids_N), dtype=dtype, device=hidden_N_H.device)
        logp_N = torch.empty_like(lse_N)
        for part in _slices(len(ids_N), chunk_tokens):
            logits = _logits(hidden_N_H[part], weight_V_H, bias_V, temperature)
            picked = logits.gather(1, ids_N[part, None])[:, 0]
            # In place: torch.logsumexp makes copies of the logits, and takes twice as long.
            largest = logits.amax(dim=1)
            lse_N[part] = logits.sub_(largest[:, None]).exp_().sum(dim=1).log_().add_(largest)
            logp_N[part] = picked - lse_N[part]
        ctx.save_for_backward(hidden_N_H, weight_V_H, bias_V, ids_N, lse_N)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        return logp_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_N_H, weight_V_H, bias_V, ids_N, lse_N = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden_N_H) if wants_hidden else None
        # Summed over chunks, so in float32 even where the weights are bfloat16.
        d_weight = torch.zeros_like(weight_V_H, dtype=lse_N.dtype) if wants_weight else None
        d_bias = torch.zeros_like(bias_V, dtype=lse_N.dtype) if wants_bias else None
        for part in _slices(len(ids_N), ctx.chunk_tokens):
            logits = _logits(hidden_N_H[part], weight_V_H, bias_V, ctx.temperature)
            # d logp / d logits = (one-hot - softmax) / temperature, made in place of the logits.
            scale = grad_N[part, None].to(lse_N.dtype) / ctx.temperature
            d_logits = logits.sub_(lse_N[part, None]).exp_().mul_(-scale)
            d_logits.scatter_add_(1, ids_N[part, None], scale)
            if d_bias is not None:
                d_bias += d_logits.sum(dim=0)
            d_logits = d_logits.to(weight_V_H.dtype)
            if d_hidden is not None:
                d_hidden[part] = d_logits @ weight_V_H
            if d_weight is not None:
                if d_weight.dtype == d_logits.dtype:
                    d_weight.addmm_(d_logits.T, hidden_N_H[part])  # without a second (V, H)
                else:
                    d_weight += d_logits.T @ hidden_N_H[part]
        return (
            d_hidden,
            None if d_weight is None else d_weight.to(weight_V_H.dtype),
            None if d_bias is None else d_bias.to(bias_V.dtype),
            None,
            None,
            None,
        )


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, total, size)]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature == 1.0 else logits.div_(temperature)  # a pass over all of them
