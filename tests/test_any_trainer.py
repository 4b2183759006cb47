"""The example runs as a user would run it, and what it prints is a loop that learns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_any_trainer_runs_and_its_loss_falls() -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "any_trainer.py")],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    losses = [float(x) for x in re.findall(r"^step \d+  loss (\S+)$", run.stdout, re.MULTILINE)]
    assert len(losses) == 8
    assert losses == sorted(losses, reverse=True)
    figures = dict(re.findall(r"^(mintrl/\S+) +(\S+)$", run.stdout, re.MULTILINE))
    assert float(figures["mintrl/rows"]) == 32
    assert float(figures["mintrl/trained_rows"]) == 31  # one row's verifier was down
    assert float(figures["mintrl/off_policy_fraction/intervened"]) > 0
