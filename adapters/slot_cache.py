"""The slots: one preallocated KV cache whose rows a stock transformers model reads and writes.

Row s holds the keys and values of one sequence, position p in column p, so that cutting a sequence
back is setting a number, and a forward over rows `lo` to `hi` sees a view that ends at the longest
of them. Who sits in which row, and how much of it counts, is the engine's business; columns past a
row's length hold whatever was there, and the mask hides them.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from mintrl_env.errors import UsageError

_ATTENTION = ("sdpa", "eager")


class _Layer(CacheLayerMixin):
    """What the mask helpers ask a layer; the tensors live in `SlotCache`."""

    is_sliding = False

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self._cache = cache
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None: ...

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise NotImplementedError("SlotCache.update writes")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.seen, 0

    def get_seq_length(self) -> int:
        return self._cache.seen - self._cache.width

    def get_max_cache_shape(self) -> int:
        return self._cache.columns


class SlotCache(Cache):
    """KV of `slots` rows, shape (layers, slots, heads, columns, head_dim), keys and values.

    Args:
        layers, heads, head_dim: the model's (`heads` counts key-value heads).
        slots: rows.
        max_length: the most tokens whose KV a row may hold.
        dtype, device: of the keys and values.
    """

    def __init__(
        self,
        *,
        layers: int,
        heads: int,
        head_dim: int,
        slots: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # One column more, where tokens that pad a ragged batch are written; whole multiples of 8
        # keep the rows aligned for the GPU's kernels.
        self.columns = (max_length + 1 + 7) // 8 * 8
        self.scratch = self.columns - 1
        shape = (layers, slots, heads, self.columns, head_dim)
        # Zeros, not empty: a masked column counts as 0 * value, and 0 * NaN is NaN.
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)
        flat = (layers, slots * heads * self.columns, head_dim)
        self._flat = list(zip(self._keys.view(flat), self._values.view(flat), strict=True))
        self._by_layer = list(zip(self._keys, self._values, strict=True))
        self._dtype = dtype
        heads_H = torch.arange(heads, device=device) * self.columns
        rows_S = torch.arange(slots, device=device) * (heads * self.columns)
        self._base_S_H_1 = (rows_S[:, None] + heads_H)[:, :, None]
        self._index: torch.Tensor
        self.lo = self.hi = self.seen = self.width = 0
        super().__init__(layers=[_Layer(self) for _ in range(layers)])

    @property
    def nbytes(self) -> int:
        return 2 * self._keys.numel() * self._keys.element_size()

    def aim(self, lo: int, hi: int, columns_m_W: torch.Tensor, seen: int) -> None:
        """Say where the next forward writes and what it sees.

        Args:
            lo, hi: the forward's batch is rows lo to hi - 1.
            columns_m_W: int64, the column that each new token goes to (`scratch` for padding).
            seen: attention covers columns 0 to seen - 1.
        """
        self.lo, self.hi, self.seen, self.width = lo, hi, seen, columns_m_W.shape[1]
        self._index = (self._base_S_H_1[lo:hi] + columns_m_W[:, None]).view(-1)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values, shape (m, heads, W, head_dim); return views of all seen."""
        flat_keys, flat_values = self._flat[layer_idx]
        head_dim = flat_keys.shape[-1]
        flat_keys.index_copy_(0, self._index, key_states.reshape(-1, head_dim).to(self._dtype))
        flat_values.index_copy_(0, self._index, value_states.reshape(-1, head_dim).to(self._dtype))
        keys, values = self._by_layer[layer_idx]
        return (
            keys[self.lo : self.hi, :, : self.seen],
            values[self.lo : self.hi, :, : self.seen],
        )

    def move(self, dst: list[int], src: list[int], length: int) -> None:
        """Copy the first `length` columns of rows `src` to rows `dst`, all at once (a permutation
        loses nothing)."""
        if not dst or not length:
            return
        to = torch.tensor(dst, device=self._keys.device)
        of = torch.tensor(src, device=self._keys.device)
        # Layer by layer, since indexing makes a temporary copy of what it moves.
        for layer in self._by_layer:
            for tensor in layer:
                part = tensor[:, :, :length]
                part[to] = part[of]

    def wipe(self, rows: list[int]) -> None:
        """Zero these rows."""
        if rows:
            self._keys[:, rows] = 0
            self._values[:, rows] = 0


def bare_model(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside a DistributedDataParallel wrapper (whose forward would be a collective)."""
    while isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
        model = model.module
    return model


def check_model(model: torch.nn.Module, max_length: int) -> Any:
    """Refuse what the slot engine cannot run.

    Returns:
        the text model's config.

    Raises:
        UsageError: a sharded model (FSDP, ZeRO-3, tensor-parallel), an encoder-decoder, other than
            full attention within `max_length`, an attention kernel that takes no mask.
    """
    for module in model.modules():
        names = {cls.__name__ for cls in type(module).__mro__}
        if names & {"FullyShardedDataParallel", "FSDPModule", "FSDP"}:
            raise _sharded("FSDP")
    for parameter in model.parameters():
        if hasattr(parameter, "ds_id"):
            raise _sharded("DeepSpeed ZeRO-3")
        if any(cls.__name__ == "DTensor" for cls in type(parameter).__mro__):
            raise _sharded("FSDP or tensor parallelism (DTensor)")
        if parameter.is_meta:
            raise UsageError("the model's weights are on the meta device; load them first")
        if parameter.numel() == 0:
            raise _sharded("FSDP or ZeRO-3 (empty local parameters)")

    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise UsageError(f"{type(model).__name__} is no transformers model: it has no config")
    if config.is_encoder_decoder:
        raise UsageError(f"{type(model).__name__} is an encoder-decoder; give a causal model")
    config = config.get_text_config(decoder=True)
    attention = getattr(config, "_attn_implementation", None)
    if attention not in _ATTENTION:
        raise UsageError(
            f"the slot engine masks rows of unequal length, which attention {attention!r} cannot: "
            f'call model.set_attn_implementation("sdpa") ({" or ".join(_ATTENTION)})'
        )
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds - {"full_attention", "sliding_attention"}:
        raise UsageError(f"the slot engine runs full attention, not layers of kind {sorted(kinds)}")
    sliding = "sliding_attention" in kinds or (window and not hasattr(config, "layer_types"))
    if sliding and (window or 0) < max_length:
        raise UsageError(
            f"the model's attention slides over {window} tokens, fewer than max_length {max_length}"
        )
    return config


def _sharded(how: str) -> UsageError:
    return UsageError(
        f"the model is sharded ({how}): a rank holds no whole weights to generate with. Use the "
        "embedded engine with an unsharded model (one GPU, DDP, LoRA), or generate with vLLM"
    )


def forward_options(model: torch.nn.Module) -> frozenset[str]:
    """Which of the optional arguments of a causal model's forward this one has."""
    get_base = getattr(model, "get_base_model", None)  # peft's wrapper takes **kwargs
    forward = (get_base() if callable(get_base) else model).forward
    return frozenset({"logits_to_keep"} & set(inspect.signature(forward).parameters))


def cache_for(
    config: Any, model: torch.nn.Module, slots: int, max_length: int, dtype: torch.dtype | None
) -> SlotCache:
    """A cache of the model's shape on its device; `dtype` None takes the weights' own."""
    embedding = model.get_input_embeddings().weight  # type: ignore[operator]
    heads = config.num_attention_heads
    return SlotCache(
        layers=config.num_hidden_layers,
        heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        slots=slots,
        max_length=max_length,
        dtype=dtype or embedding.dtype,
        device=embedding.device,
    )
