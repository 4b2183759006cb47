"""Weights under the names of a checkpoint, against what `save_pretrained` and peft's own merge say."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config

from mintrl_env.adapters.checkpoint_weights import checkpoint_weights, copy_weights
from mintrl_env.errors import UsageError

TARGETS = ["q_proj", "v_proj", "down_proj"]


def tiny(tied: bool = False) -> Any:
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, tie_word_embeddings=tied,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def adapted(model: Any, **options: Any) -> Any:
    settings = {"r": 4, "target_modules": TARGETS, "task_type": "CAUSAL_LM", **options}
    model = get_peft_model(model, LoraConfig(**settings))
    torch.manual_seed(4)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_names_and_values_are_the_checkpoints(tied: bool, tmp_path: Path) -> None:
    model = tiny(tied)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    found = dict(checkpoint_weights(model))
    assert set(found) == set(saved) and ("lm_head.weight" in found) is not tied
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    assert not any(tensor.requires_grad for tensor in found.values())


@pytest.mark.parametrize("saved", [None, ["lm_head"]])
def test_a_lora_is_added_to_a_copy(saved: list[str] | None) -> None:
    model = adapted(tiny(), modules_to_save=saved)
    if saved:
        with torch.no_grad():
            model.base_model.model.lm_head.modules_to_save.default.weight += 1.0
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = dict(checkpoint_weights(model))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    merged = copy.deepcopy(model).merge_and_unload()
    wanted = dict(merged.named_parameters())
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    plain = dict(tiny().named_parameters())
    changed = {name for name in found if not torch.equal(found[name], plain[name])}
    assert len(changed) == 2 * len(TARGETS) + bool(saved)


def test_a_disabled_or_merged_adapter_is_not_added_again() -> None:
    model = adapted(tiny())
    plain = dict(tiny().named_parameters())
    with model.disable_adapter():
        found = dict(checkpoint_weights(model))
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    merged = dict(copy.deepcopy(model).merge_and_unload().named_parameters())
    model.merge_adapter()
    found = dict(checkpoint_weights(model))
    assert all(torch.equal(found[name], merged[name]) for name in merged)


def test_what_is_no_plain_lora_is_refused() -> None:
    with pytest.raises(UsageError, match=r"q_proj.weight is no plain LoRA \(DoRA"):
        list(checkpoint_weights(adapted(tiny(), use_dora=True)))
    sharded = tiny()
    next(sharded.parameters()).ds_id = 1  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match=r"embed_tokens.weight is sharded by ZeRO-3"):
        list(checkpoint_weights(sharded))


def test_a_copy_takes_over_the_weights_with_their_adapter() -> None:
    model, copied = adapted(tiny()), tiny().to(torch.float64)
    copy_weights(model, copied)
    merged = copy.deepcopy(model).merge_and_unload()
    for name, parameter in copied.named_parameters():
        assert parameter.dtype == torch.float64
        torch.testing.assert_close(parameter.float(), merged.get_parameter(name), rtol=0, atol=1e-6)
    with pytest.raises(UsageError, match="has no place in the copy"):
        copy_weights(model, torch.nn.Linear(2, 2))
