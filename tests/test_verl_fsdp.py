"""Two optimiser steps of veRL's FSDP2 engine on two gloo ranks (see verl_fsdp_program.py)."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
pytest.importorskip("trl")

import torch
from transformers import AutoModelForCausalLM

from mintrl_env.adapters.verl_export import export_verl, verl_checkpoint

_SPEC = importlib.util.spec_from_file_location(
    "verl_parts", Path(__file__).with_name("verl_parts.py")
)
assert _SPEC is not None and _SPEC.loader is not None
parts = importlib.util.module_from_spec(_SPEC)
sys.modules["verl_parts"] = parts
_SPEC.loader.exec_module(parts)
tiny = parts.tiny_trl()

pytestmark = [pytest.mark.verl, pytest.mark.timeout(400)]
LIMIT_S = 300


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fsdp")


@pytest.fixture(scope="module")
def said(folder: Path) -> dict[str, Any]:
    """What rank 0 printed. Both ranks are killed at the limit."""
    tiny.tokenizer().save_pretrained(folder / "model")
    tiny.model().save_pretrained(folder / "model")
    log = folder / "log"
    program = Path(__file__).with_name("verl_fsdp_program.py")
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    with log.open("w") as file:
        process = subprocess.Popen(
            [*launch, str(program), str(folder)],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {LIMIT_S} s; its log ends\n{log.read_text()[-3000:]}")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    lines = [line for line in log.read_text().splitlines() if line.startswith("RESULT ")]
    assert lines, log.read_text()[-5000:]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


def test_log_probs_are_those_of_transformers(said: dict[str, Any]) -> None:
    assert len(said["logps"]) == 16
    for ours, theirs in zip(said["logps"], said["hand_logps"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_each_step_has_the_mean_over_its_own_trained_rows(said: dict[str, Any]) -> None:
    """Loss and gradient over two ranks and two micro-batches each, with padding, undecided rows, a
    dropped group, judge-written tokens under Const and tool output in them."""
    assert len(said["losses"]) == 2 and said["losses"][0] != pytest.approx(
        said["losses"][1], rel=0.1
    )
    assert said["losses"] == pytest.approx(said["hand_losses"], rel=1e-5)
    assert said["metrics"]["actor/pg_loss"] == pytest.approx(said["hand_losses"], rel=1e-5)
    assert said["norms"] == pytest.approx(said["hand_norms"], rel=1e-5)


def test_a_checkpoint_brings_the_weights_back(said: dict[str, Any]) -> None:
    mine = said["logps"][: len(said["loaded"])]  # rank 0's
    assert said["loaded"] == mine and said["spoilt"] != mine


def test_a_checkpoint_merges_into_a_plain_transformers_folder(
    said: dict[str, Any], folder: Path
) -> None:
    """By veRL's own merger; the learning rate was 0, so that the weights are the first ones."""
    shards = verl_checkpoint(folder / "global_step_1")
    assert shards == folder / "global_step_1" / "actor"
    export_verl(shards, folder / "out")
    made = AutoModelForCausalLM.from_pretrained(folder / "out", dtype=torch.float32).state_dict()
    wanted = tiny.model().state_dict()
    assert set(made) == set(wanted)
    for name, value in wanted.items():
        assert torch.allclose(made[name], value, rtol=1e-2), name  # merged in bfloat16
