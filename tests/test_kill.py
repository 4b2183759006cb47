"""A run that is shot again and again ends as one that nobody disturbed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mintrl_env.config import parse_config
from mintrl_env.metrics import read_metrics
from mintrl_env.run_folder import RunFolder
from mintrl_env.store import RolloutStore
from mintrl_env.store_check import check_store
from mintrl_env.trajectory import Trajectory

KILLS = 20
GROUPS = 6
UPDATES = 24
SIZE = 4  # rows of a group
CONFIG: dict[str, Any] = {
    "method": "mintrl-const",
    "policy": {"path": "warmup:student", "chat": False, "max_prompt": 32},
    "tasks": {"name": "table_chain", "options": {"count": 64, "seed": 1}},
    "episode": {
        "chunk_tokens": 16,
        "max_reviews": 3,
        "max_correction": 3,
        "max_response": 80,
        "step_delimiters": ["\n"],
    },
    "rollout": {"n_control": 2, "n_intervened": 2, "slots": 24, "schedule": "rounds"},
    "judge": {
        "name": "scoring",
        "path": "warmup:teacher",
        "options": {"tau": -2.0, "never": "^B", "stop": ["\n"]},
        "guards": {"leak": {"answer_line": "^B", "ngram": 0}},
    },
    "objective": {"kappa": -0.2, "beta_2": 0.02, "intervention_updates": UPDATES - 2},
    "train": {
        "updates": UPDATES,
        "prompts_per_update": GROUPS,
        "micro_batch": 8,
        "learning_rate": 1e-3,
        "checkpoint_every": 1,
        "keep_checkpoints": 2,
    },
    "warmup": {
        kind: {"steps": 12, "batch": 8, "model": {"layers": 2, "hidden": 64, "intermediate": 96}}
        for kind in ("student", "teacher")
    },
}


class Shooter:
    """Runs `mintrl train --resume` on a folder and stops it where it can look around.

    A stopped process (SIGSTOP) changes nothing, so what is seen is what SIGKILL leaves.
    """

    def __init__(self, config: Path, folder: RunFolder, seed: int) -> None:
        self.config, self.folder = config, folder
        self.random = random.Random(seed)

    def command(self) -> list[str]:
        arguments = ["train", str(self.config), "--run", str(self.folder.path), "--resume"]
        return [sys.executable, "-m", "mintrl_env.cli", *arguments]

    def start(self, log: Path) -> subprocess.Popen[bytes]:
        with log.open("wb") as file:
            return subprocess.Popen(self.command(), stdout=file, stderr=file)

    def groups(self, update: int, attempt: int) -> set[str]:
        """The tasks of which an attempt at an update has left a whole group."""
        rows = RolloutStore(self.folder.path / "rollouts").read(update=update)[0]
        by_task: dict[str, int] = {}
        for row in rows:
            if row.run_attempt == attempt:
                by_task[row.task_id] = by_task.get(row.task_id, 0) + 1
        return {task for task, count in by_task.items() if count == SIZE}

    def current(self) -> tuple[int, int]:
        """The update that has the newest part, and its attempt."""
        parts = (self.folder.path / "rollouts").glob("part-u*.parquet")
        try:
            newest = max(parts, key=lambda path: path.stat().st_mtime_ns, default=None)
        except FileNotFoundError:  # compacted while it was looked for
            newest = None
        if newest is None:
            return -1, -1
        _, update, attempt, *_ = newest.name.split("-")
        return int(update[1:]), int(attempt[1:])

    def kill_in_flight(self, process: subprocess.Popen[bytes], attempt: int, log: Path) -> int:
        """Kill at a random moment at which some groups of an update are finished and some are not.

        Returns the update.
        """
        # Not always in the first update, nor always when its first group is finished.
        later, wanted = self.random.choice((0, 1, 1, 2)), self.random.randrange(1, GROUPS)
        target = None
        deadline = time.monotonic() + 240
        while True:
            assert process.poll() is None, f"it ended by itself:\n{log.read_text()[-2000:]}"
            assert time.monotonic() < deadline, f"no moment in 240 s:\n{log.read_text()[-2000:]}"
            time.sleep(self.random.uniform(0.0, 0.03))
            update, of = self.current()
            if of != attempt:
                continue
            process.send_signal(signal.SIGSTOP)
            update, of = self.current()
            if target is None:  # and some updates are left for the kills to come
                target = max(update, min(update + later, UPDATES - 4))
            finished = len(self.groups(update, of))
            is_time = update > target or (update == target and finished >= wanted)
            if of == attempt and 0 < finished < GROUPS and is_time:
                process.send_signal(signal.SIGKILL)
                assert process.wait() == -signal.SIGKILL
                return update
            process.send_signal(signal.SIGCONT)


def key(row: Trajectory) -> tuple[int, str, int]:
    return row.update, row.task_id, row.rollout


def tear(path: Path, cut: Callable[[int], int]) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: cut(len(content))])


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_run_that_is_killed_twenty_times_ends_as_an_undisturbed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINTRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(parse_config(CONFIG, "test").model_dump(mode="json")))
    undisturbed = RunFolder(tmp_path / "undisturbed")
    calm = Shooter(config, undisturbed, 0)
    assert calm.start(tmp_path / "calm.log").wait(600) == 0, (tmp_path / "calm.log").read_text()

    folder = RunFolder(tmp_path / "killed")
    shooter = Shooter(config, folder, seed=int(os.environ.get("MINTRL_KILL_SEED", "20")))
    torn: list[str] = []
    seen: dict[tuple[int, str, int], Trajectory] = {}
    attempt, updates = 0, []
    while len(updates) < KILLS:
        log = tmp_path / f"attempt-{attempt}.log"
        process = shooter.start(log)
        try:
            update = shooter.kill_in_flight(process, attempt, log)
        finally:
            process.kill()
            process.wait()
        updates.append(update)
        # What was finished is readable; a file that was not is named and no row of it is seen.
        rows, problems = folder.store().read()
        assert [line.split(": ")[0] for line in problems if ".tmp" not in line] == torn
        assert all("unfinished, ignored" in line for line in problems if ".tmp" in line)
        finished = {k: row for row in rows if (k := key(row))[0] < update}
        assert {k[0] for k in finished} == set(range(update))
        assert len(finished) == update * GROUPS * SIZE
        for k, row in finished.items():
            assert k not in seen or row == seen[k], "a finished update never changes"
        seen |= finished
        if len(updates) % 7 == 0:  # a disk that lost the end of a file
            parts = sorted((folder.path / "rollouts").glob(f"part-u{update:06d}-a{attempt}-*"))
            tear(parts[0], lambda size: shooter.random.randrange(size))
            torn = sorted([*torn, parts[0].name])
            found = check_store(folder.store())
            assert [line.split(": ")[0] for line in found.problems if ".parquet" in line] == torn
        attempt += 1
    assert max(updates) < UPDATES and updates == sorted(updates)

    log = tmp_path / "last.log"
    assert shooter.start(log).wait(600) == 0, log.read_text()
    ignored = {"seconds", "wall_seconds"}
    summaries = [
        {k: v for k, v in json.loads(run.summary_file.read_text()).items() if k not in ignored}
        for run in (undisturbed, folder)
    ]
    assert summaries[0] == summaries[1]
    stamps = {"seconds", "step_time", "run_attempt"}
    metrics = [
        [
            {k: v for k, v in row.items() if k not in stamps}
            for row in read_metrics(run.metrics_file)
        ]
        for run in (undisturbed, folder)
    ]
    assert [row["update"] for row in metrics[1]] == list(range(UPDATES))
    assert metrics[0] == metrics[1]
    calm_rows, rows = (run.store().read()[0] for run in (undisturbed, folder))
    assert [key(row) for row in calm_rows] == [key(row) for row in rows]
    for a, b in zip(calm_rows, rows, strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)
        assert a.score == b.score
    # Nothing is left but what was torn on purpose.
    found = check_store(folder.store())
    assert [line.split(": ")[0] for line in found.problems] == torn
    assert check_store(undisturbed.store()).problems == []
    import safetensors.numpy

    calm_weights, weights = (
        safetensors.numpy.load_file(run.path / "model" / "model.safetensors")
        for run in (undisturbed, folder)
    )
    assert calm_weights.keys() == weights.keys()
    for name in weights:
        np.testing.assert_array_equal(calm_weights[name], weights[name])
