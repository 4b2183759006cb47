"""`mintrl export` of veRL's checkpoints: which folder is meant, and what is refused, without veRL.

test_verl_export.py merges real ones.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from mintrl_env.adapters import verl_export
from mintrl_env.adapters.verl_export import export_verl, verl_checkpoint
from mintrl_env.errors import MissingExtraError, StoreError


def run_of(folder: Path, steps: tuple[int, ...] = (5, 10)) -> Path:
    for step in steps:
        actor = folder / "checkpoints" / f"global_step_{step}" / "actor"
        actor.mkdir(parents=True)
        (actor / "fsdp_config.json").write_text('{"world_size": 1}')
    (folder / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(f"{steps[-1]}")
    return folder


def test_a_run_and_its_checkpoints_mean_the_last_step(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    last = run / "checkpoints" / "global_step_10" / "actor"
    assert verl_checkpoint(run) == verl_checkpoint(run / "checkpoints") == last
    first = run / "checkpoints" / "global_step_5"
    assert verl_checkpoint(first) == verl_checkpoint(str(first / "actor")) == first / "actor"


def test_other_folders_are_none_of_verls(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "checkpoint-3").mkdir(parents=True)
    (tmp_path / "model").mkdir()
    for folder in (tmp_path, tmp_path / "model", tmp_path / "nowhere"):
        assert verl_checkpoint(folder) is None


def test_a_step_that_is_not_there(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    (run / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("11\n")
    with pytest.raises(StoreError, match="names step 11"):
        verl_checkpoint(run)


def test_an_existing_folder_and_a_missing_verl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = verl_checkpoint(run_of(tmp_path))
    assert shards is not None
    with pytest.raises(StoreError, match="choose a new folder"):
        export_verl(shards, tmp_path / "checkpoints")
    monkeypatch.setattr(verl_export, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"mintrl-env\[verl\]"):
        export_verl(shards, tmp_path / "out")
    assert not (tmp_path / "out").exists()
