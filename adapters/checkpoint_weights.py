"""A model's weights under the names of its checkpoint, as engines that load checkpoints want them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mintrl_env.adapters.slot_cache import bare_model
from mintrl_env.errors import UsageError


def checkpoint_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every parameter, one at a time, those that are tied once.

    A LoRA adapter is added to the weights that it adapts, in a copy, so that the trained model stays
    bit for bit what it was (merging and unmerging rounds). Parameters that FSDP2 shards are gathered:
    then all ranks have to iterate together.

    Args:
        model: a transformers causal model whose parameters are named as in its checkpoint, as those of
            dense models are, or a peft model over one.

    Raises:
        UsageError: parameters that can't be had so (ZeRO-3, FSDP's first version), or an adapter that
            is no plain LoRA.
    """
    model = bare_model(model)
    is_peft = hasattr(model, "peft_config")
    base: torch.nn.Module = model.get_base_model() if is_peft else model  # type: ignore[operator]
    for name, parameter in base.named_parameters():
        if hasattr(parameter, "ds_id") or "_fsdp_wrapped_module" in name:
            raise UsageError(
                f"{name} is sharded by ZeRO-3 or FSDP's first version, which gather otherwise; use "
                "FSDP2, or save the model and load the folder"
            )
        tensor = parameter.detach()
        if callable(gather := getattr(tensor, "full_tensor", None)):
            tensor = gather()
        name = name.replace("_orig_mod.", "")  # torch.compile
        if is_peft:
            plain = _without_peft(name)
            if plain is None:
                continue
            if name.endswith(".base_layer.weight"):
                layer = base.get_submodule(name.removesuffix(".base_layer.weight"))
                tensor = _adapted(layer, tensor, plain)
            name = plain
        yield name, tensor


def _without_peft(name: str) -> str | None:
    """The name in the checkpoint; None for what is not in there."""
    parts = name.split(".")
    if "original_module" in parts or any(part.startswith("lora_") for part in parts):
        return None
    if "modules_to_save" in parts:  # ... .modules_to_save.default.weight
        at = parts.index("modules_to_save")
        del parts[at : at + 2]
    return ".".join(part for part in parts if part != "base_layer")


def _adapted(layer: Any, weight: torch.Tensor, name: str) -> torch.Tensor:
    """The weight with its active adapters added."""
    if not hasattr(layer, "get_delta_weight") or not hasattr(layer, "lora_A"):
        raise UsageError(
            f"the adapter of {name} is no LoRA: save the merged model, load the folder"
        )
    if layer.disable_adapters or layer.merged:
        return weight
    for adapter in layer.active_adapters:
        if adapter not in layer.lora_A and adapter not in layer.lora_embedding_A:
            continue
        if adapter in layer.lora_variant or layer.lora_bias.get(adapter):
            raise UsageError(
                f"the adapter of {name} is no plain LoRA (DoRA, or a bias): save the merged model and "
                "load the folder"
            )
        with torch.no_grad():
            weight = weight + layer.get_delta_weight(adapter).to(weight.dtype)
    return weight


@torch.no_grad()
def copy_weights(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Give `target` the weights of `source`, a LoRA adapter of it added.

    Args:
        source: see `checkpoint_weights`.
        target: the same model without an adapter; its precision and place are kept.

    Raises:
        UsageError: a parameter that `target` does not have, or of another shape.
    """
    parameters = dict(target.named_parameters())
    for name, tensor in checkpoint_weights(source):
        into = parameters.get(name)
        if into is None or into.shape != tensor.shape:
            raise UsageError(f"{name} of shape {tuple(tensor.shape)} has no place in the copy")
        into.copy_(tensor)
