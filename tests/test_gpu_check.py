"""scripts/gpu_check.sh on the CPU with a tiny model: every part, and what becomes of failures."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(
    folder: Path, *options: str, code: int = 0, **environment: str
) -> tuple[dict[str, Any], str]:
    run = subprocess.run(
        [str(ROOT / "scripts" / "gpu_check.sh"), "--out", str(folder / "out.json"), *options],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert run.returncode == code, run.stdout + run.stderr
    return json.loads((folder / "out.json").read_text()), run.stdout


def figures(found: dict[str, Any], part: str) -> dict[str, dict[str, float]]:
    record = found["parts"][part]
    assert record["status"] == "ok", record
    return {row["what"]: row["figures"] for row in record["rows"]}


def test_logprobs_and_an_update(tmp_path: Path) -> None:
    options = ("--device", "cpu", "--tiny", "--parts", "logprobs,update,vllm,smollm2")
    found, printed = check(tmp_path, *options)
    rows = figures(found, "logprobs")
    assert rows["model"] == {"parameters": 35_040}
    for tokens in ("64", "128"):
        assert rows[f"largest difference, {tokens} tokens"]["nats"] < 1e-4
        for side in ("chunked", "full"):
            row = rows[f"{side} log-probs, {tokens} tokens"]
            assert row["step s"] > 0 and row["peak MB"] > 10
            assert row["tokens/s"] == pytest.approx(int(tokens) / row["step s"])
    rows = figures(found, "update")
    assert list(rows) == [f"update {i}, 8 rows of 24 tokens" for i in range(2)]
    for row in rows.values():
        assert row["judge's tokens"] == 4 * 4  # one correction of 4 in each intervened row
        assert row["grad norm"] > 0 and row["sampled tokens/s"] > 0
    for part, why in (("vllm", "needs a GPU"), ("smollm2", "no folder of SmolLM2")):
        assert found["parts"][part]["status"] == "skipped"
        assert found["parts"][part]["why"].startswith(why)
    assert found["machine"]["torch"] and found["device"] == "cpu"
    assert "| logprobs | model | parameters 35,040 |" in printed
    assert "| vllm | skipped | needs a GPU |" in printed


def test_a_failed_part_is_written_down_and_the_next_one_runs(tmp_path: Path) -> None:
    """No GPU is to be seen: each part says so, and none stops the others."""
    options = ("--tiny", "--parts", "logprobs,update")
    found, printed = check(tmp_path, *options, code=1, CUDA_VISIBLE_DEVICES="")
    for part in ("logprobs", "update"):
        assert found["parts"][part]["status"] == "failed"
        assert found["parts"][part]["why"] == "no CUDA device is to be seen by this torch"
    assert "| update | failed | no CUDA device" in printed


def test_a_part_out_of_time_is_ended(tmp_path: Path) -> None:
    module = script()
    args = module.arguments(["--device", "cpu", "--tiny"])
    record = module.run_part("update", args, 0.05)
    assert record["status"] == "timed out" and record["why"] == "stopped after 0 s"
    assert record["rows"] == []


def test_no_time_left_skips_the_rest(tmp_path: Path) -> None:
    found, _ = check(
        tmp_path, "--device", "cpu", "--tiny", "--budget", "1", "--parts", "trl,update"
    )
    assert {r["status"] for r in found["parts"].values()} == {"skipped"}
    assert {r["why"] for r in found["parts"].values()} == {"no time left"}


def test_the_parts_fit_into_eight_minutes(capsys: pytest.CaptureFixture[str]) -> None:
    module = script()
    assert sum(module.PARTS.values()) <= 480 == module.arguments([]).budget
    with pytest.raises(SystemExit):
        module.arguments(["--parts", "trl,nccl"])
    assert "not nccl" in capsys.readouterr().err


def test_the_shape_is_qwen3s(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    monkeypatch.syspath_prepend(ROOT / "scripts")
    module = importlib.import_module("gpu_check_common")
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**module.QWEN3_06B))
    assert sum(p.numel() for p in model.parameters()) == 596_049_920


@pytest.mark.slow
def test_every_part_that_needs_no_gpu(tmp_path: Path) -> None:
    """With a folder in SmolLM2's place: a tiny Llama and a tokenizer of words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    names = ["[unk]", "[eos]", *map(str, range(100)), *"+=?", "What", "is", "Add", "\n"]
    backend = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="[unk]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(names), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256,
        )
    ).save_pretrained(tmp_path / "model")  # fmt: skip
    PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[unk]", eos_token="[eos]"
    ).save_pretrained(tmp_path / "model")
    found, _ = check(tmp_path, "--device", "cpu", "--tiny", "--smollm2", str(tmp_path / "model"))
    assert {n: r["status"] for n, r in found["parts"].items()} == {
        "logprobs": "ok", "update": "ok", "trl": "ok", "smollm2": "ok", "vllm": "skipped",
    }  # fmt: skip
    assert list(figures(found, "trl")) == [f"step {i}, 8 rows of 24 tokens" for i in (1, 2)]
    rows = figures(found, "smollm2")
    assert rows["before"]["problems"] == 4 and rows["after"]["updates"] >= 1
    assert 0 <= rows["after"]["success"] <= 1
    assert rows["update 1"]["train s"] > 0
