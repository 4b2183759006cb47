"""Who may write to a run's folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mintrl_env.config import RunConfig, dump_config, parse_config
from mintrl_env.errors import ConfigError, StoreError
from mintrl_env.run_folder import RunFolder


def config(**train: object) -> RunConfig:
    data = {
        "method": "grpo",
        "policy": {"path": "x"},
        "tasks": {"name": "sums"},
        "train": {"prompts_per_update": 1, "micro_batch": 1, **train},
    }
    return parse_config(data, "test")


def test_a_run_is_begun_once_and_resumed_often(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    assert folder.open(config(), resume=False) == 0
    with pytest.raises(StoreError, match="holds a run already: go on with it by --resume"):
        folder.open(config(), resume=False)
    assert folder.open(config(), resume=True) == 1
    assert folder.open(config(), resume=True) == 2


def test_resuming_what_never_began_is_a_start(tmp_path: Path) -> None:
    assert RunFolder(tmp_path / "run").open(config(), resume=True) == 0


def test_another_config_is_refused_but_a_longer_run_is_not(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.open(config(updates=3), resume=False)
    assert folder.open(config(updates=5), resume=True) == 1
    with pytest.raises(ConfigError, match=r"train.seed: 0 -> 1"):
        folder.open(config(updates=5, seed=1), resume=True)


def test_only_a_whole_checkpoint_counts(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.last_checkpoint() is None
    for step, whole in ((9, True), (10, True), (11, False)):
        path = folder.checkpoints / f"checkpoint-{step}"
        path.mkdir(parents=True)
        if whole:
            (path / "trainer_state.json").write_text("{}")
    assert folder.last_checkpoint() == folder.checkpoints / "checkpoint-10"


HOLD = """
import sys
from mintrl_env.run_folder import RunFolder
from mintrl_env.config import load_config
folder = RunFolder(sys.argv[1])
folder.open(load_config(sys.argv[2]), resume=True)
print("held", flush=True)
input()
"""


def test_one_process_at_a_time_and_none_after_a_kill(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(dump_config(config()))
    path = tmp_path / "run"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), str(tmp_path / "c.yaml")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    folder = RunFolder(path)
    with pytest.raises(StoreError, match=f"process {holder.pid} is at work on this run"):
        folder.open(config(), resume=True)
    assert (path / "attempt").read_text() == "0\n", "the refused one changed nothing"
    holder.kill()
    holder.wait()
    assert folder.open(config(), resume=True) == 1
    folder.close()
    folder.close()
    assert RunFolder(path).open(config(), resume=True) == 2


def test_what_would_be_refused_is_refused_before_slow_work(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.check(config(), resume=False)
    assert not folder.path.exists()
    folder.open(config(), resume=False, asked={"n": 2})
    with pytest.raises(StoreError, match="holds a run already"):
        folder.check(config(), resume=False, asked={"n": 2})
    with pytest.raises(ConfigError, match="n: 2 -> 3"):
        folder.check(config(), resume=True, asked={"n": 3})
    folder.check(config(), resume=True, asked={"n": 2})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_not_writable_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="cannot be written"):
        RunFolder(tmp_path / "run").open(config(), resume=False)


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(StoreError, match="the run folder cannot be written"):
        RunFolder(tmp_path / "run").open(config(), resume=False)
