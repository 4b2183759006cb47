"""Grouped-query attention for one new token a row, without copying the cache.

Where a mask is given, transformers' sdpa path repeats keys and values for every query head of a
group: a copy of the whole cache in each layer and step, which takes several times as long as the
attention itself. With one query a row, a group's heads can stand in the place of queries instead:
they share keys, values and mask, so the result is the same (up to rounding) and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_NAME = "mintrl_slots"


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `sdpa_attention_forward`, to which everything but the one-token step goes.

    Args:
        query: (m, heads, W, head_dim).
        key, value: (m, kv_heads, L, head_dim).
        attention_mask: additive, (m, 1, W, L).

    Returns:
        (m, W, heads, head_dim), and no weights.
    """
    m, heads, width, head_dim = query.shape
    kv_heads = key.shape[1]
    if width != 1 or attention_mask is None or dropout or heads == kv_heads:
        output, weights = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
        return output, weights
    grouped = query.reshape(m, kv_heads, heads // kv_heads, head_dim)
    output = scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=scaling
    )
    return output.reshape(m, 1, heads, value.shape[-1]), None


@contextmanager
def grouped_attention(config: Any) -> Iterator[None]:
    """Let a model that uses sdpa use `attend` for as long as this lasts.

    Args:
        config: of the (text) model; its choice of attention is put back at the end.
    """
    before = config._attn_implementation
    if before != "sdpa":
        yield
        return
    AttentionInterface.register(_NAME, attend)
    config._attn_implementation_internal = _NAME
    try:
        yield
    finally:
        config._attn_implementation_internal = before
