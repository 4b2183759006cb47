"""Checkpoints of veRL's FSDP engine, full and LoRA, merged by `mintrl export`.

These hold whole tensors, as one rank's do; test_verl_fsdp.py exports what two ranks have saved.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
pytest.importorskip("trl")

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from mintrl_env.adapters.verl_export import export_verl
from mintrl_env.cli import app
from mintrl_env.errors import StoreError

_SPEC = importlib.util.spec_from_file_location("tiny_trl", Path(__file__).with_name("tiny_trl.py"))
assert _SPEC is not None and _SPEC.loader is not None
tiny = importlib.util.module_from_spec(_SPEC)
sys.modules["tiny_trl"] = tiny
_SPEC.loader.exec_module(tiny)

pytestmark = pytest.mark.verl


def checkpoint(folder: Path, state: dict[str, Any]) -> Path:
    """A step's folder as one rank writes it."""
    actor = folder / "global_step_3" / "actor"
    tiny.tokenizer().save_pretrained(actor / "huggingface")
    config = tiny.model().config
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(actor / "huggingface")
    (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 1}))
    torch.save(state, actor / "model_world_size_1_rank_0.pt")
    return actor


def check(folder: Path, wanted: dict[str, Any]) -> None:
    made = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert set(made) == set(wanted)
    for name, value in wanted.items():
        assert torch.allclose(made[name], value, rtol=1e-2, atol=5e-3), (
            name
        )  # bfloat16, base and adapter
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("12", add_special_tokens=False) == tiny.tokenizer().encode(
        "12", add_special_tokens=False
    )


def test_full_weights(tmp_path: Path) -> None:
    state = tiny.model(seed=3).state_dict()
    checkpoint(tmp_path, state)
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["export", str(tmp_path / "global_step_3"), str(out)])
    assert done.exit_code == 0, done.output
    assert done.stdout.strip() == str(out)
    check(out, state)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["global_step_3", "out"]  # no scratch


@pytest.mark.parametrize("alpha", [8, None])
def test_an_adapter_is_merged(tmp_path: Path, alpha: int | None) -> None:
    base = tiny.model(seed=3)
    model = get_peft_model(
        base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    actor = checkpoint(tmp_path, {k: v.clone() for k, v in model.state_dict().items()})
    if alpha is None:
        with pytest.raises(StoreError, match="does not say the adapter's alpha"):
            export_verl(actor, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        return
    meta = {"r": 4, "lora_alpha": alpha, "task_type": "CAUSAL_LM"}
    (actor / "lora_train_meta.json").write_text(json.dumps(meta))
    plain = base.state_dict()["model.layers.0.self_attn.q_proj.base_layer.weight"].clone()
    export_verl(actor, tmp_path / "out")
    merged = model.merge_and_unload().state_dict()
    moved = merged["model.layers.0.self_attn.q_proj.weight"] - plain
    assert float(moved.abs().max()) > 0.1
    check(tmp_path / "out", merged)
    assert not (tmp_path / "out" / "lora_adapter").exists()


def test_a_merger_that_fails_says_why(tmp_path: Path) -> None:
    actor = checkpoint(tmp_path, {})
    (actor / "model_world_size_1_rank_0.pt").unlink()
    with pytest.raises(StoreError, match=r"(?s)merger failed.*model_world_size_1_rank_0\.pt"):
        export_verl(actor, tmp_path / "out")
    assert not (tmp_path / "out").exists()
