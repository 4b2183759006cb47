"""The benchmarks of what must not leak, made small: the soak and the memory of a window."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def program(name: str, *arguments: object) -> list[str]:
    return [sys.executable, str(ROOT / "benchmarks" / name), *map(str, arguments)]


def run(name: str, out: Path, *arguments: object) -> Any:
    command = program(name, *arguments, "--json", out)
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


@pytest.mark.slow
def test_a_soak_that_is_killed_and_resumed_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "soak"
    with subprocess.Popen(
        program("soak.py", "--episodes", 3000, "--run", folder), stdout=subprocess.DEVNULL, cwd=ROOT
    ) as process:
        end = time.monotonic() + 120
        while len(list((folder / "rollouts").glob("part-*"))) < 40:
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    figures = run("soak.py", tmp_path / "figures.json", "--run", folder, "--resume")
    assert (figures["missing"], figures["wrong"], figures["processes_left"]) == (0, [], 0)
    counts = figures["counts"]
    assert counts["episodes"] == figures["episodes"] == 3000
    assert counts["review failed"] > 100 and counts["score unavailable"] > 50


@pytest.mark.slow
def test_a_window_takes_bytes_and_not_objects(tmp_path: Path) -> None:
    (line,) = run("window_memory.py", tmp_path / "figures.json", "--episodes", 512)
    figures = line["beside"]
    assert line["name"] == "peak of 512 episodes of 2,048 tokens over 2,048 MB"
    assert line["value"] == figures["peak_mb"] / 2048
    # An id is 4 bytes, an int of Python's in a list 36; 512 episodes leave some noise.
    assert figures["bytes_a_token"] < 60
    assert figures["peak_mb"] < 256
