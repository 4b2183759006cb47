"""An update and a validation through the real Ray and TransferQueue (see verl_ray_program.py)."""

from __future__ import annotations

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

from mintrl_env.store import RolloutStore
from mintrl_env.types import Kind, Outcome

pytestmark = [pytest.mark.verl, pytest.mark.timeout(600)]
LIMIT_S = 540


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What the program printed, and its folder. It is killed with all it started at the limit."""
    folder = tmp_path_factory.mktemp("ray")
    log = folder / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("verl_ray_program.py")), str(folder)],
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
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
    return json.loads(lines[-1].removeprefix("RESULT ")), folder


def test_the_training_step(made: tuple[dict[str, Any], Path]) -> None:
    result, _ = made
    fields, texts, metrics = result["fields"], result["texts"], result["metrics"]
    assert sorted(fields) == [f"uid{g}_{s}_0" for g in range(2) for s in range(4)]
    for group in range(2):
        for session in range(4):
            key = f"uid{group}_{session}_0"
            # A control writes both texts; the judge puts "so " in the place of the first.
            begin = "1+1=3\n" if session < 2 else "so "
            assert texts[key] == f"{begin}\\boxed{{2}}[eos]"
            row = fields[key]
            count = len(row["responses"])
            judged = 0 if session < 2 else 3
            expected = [-0.2] * judged + [-1.0] * (count - judged)
            assert row["old_log_probs"] == pytest.approx(expected)
            assert row["response_mask"] == [1] * count
            assert row["rollout_is_weights"] == [1.0] * count
            # All rows of a group have one reward, so V is that reward.
            assert row["advantages"] == [0.0] * count
    # Our verifier, asked by veRL's reward workers: one task's answer is 2, the other's 3.
    assert metrics["critic/score/mean"] == 0.5
    assert metrics["mintrl/reward/control"] == metrics["mintrl/reward/intervened"] == 0.5
    assert metrics["mintrl/trained_rows"] == 8 and metrics["mintrl/revises"] == 4
    assert metrics["training/off_policy/trajectory_staleness/mean"] == 0.0
    assert metrics["mintrl/rows_missing"] == 0


def test_the_store(made: tuple[dict[str, Any], Path]) -> None:
    rows, problems = RolloutStore(made[1] / "store").read(update=0)
    assert not problems and len(rows) == 8
    assert {row.task_id for row in rows} == {"right", "wrong"}
    assert {row.task_id: row.reward for row in rows} == {"right": 1.0, "wrong": 0.0}
    for row in rows:
        reviewed = row.rollout >= 2
        assert row.kind is (Kind.INTERVENED if reviewed else Kind.CONTROL)
        assert [r.outcome for r in row.reviews] == [Outcome.REVISE, Outcome.KEEP][: 2 * reviewed]


def test_the_validation_was_not_reviewed(made: tuple[dict[str, Any], Path]) -> None:
    """Four rows a task, more than there are controls, at step 1: update -2."""
    result, _ = made
    assert result["validation_rows"] == [["control", -2, 0]] * 8
    scores = [
        v for k, v in result["validation"].items() if "reward/mean@4" in k or "acc/mean@4" in k
    ]
    assert scores and all(score == 0.5 for score in scores)
