"""Two ranks under torchrun: groups that straddle them, and the same step as one rank computes."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import torch

from mintrl_env.adapters.session import distinct_ids
from mintrl_env.adapters.trl_rows import check_repeated, group_shares
from mintrl_env.errors import UsageError
from mintrl_env.store import RolloutStore

HERE = Path(__file__).parent


def loaded(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def seen(folder: Path, ranks: int) -> list[dict[str, Any]]:
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(ranks)]


def under_torchrun(folder: Path, ranks: int, per_rank: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = os.environ | {
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(HERE.parent),
    }
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
    launcher += ["--master_addr", "127.0.0.1", "--master_port", str(port)]
    command = [*launcher, str(HERE / "trl_ranks_program.py"), str(folder), str(per_rank)]
    # torchrun ends its workers when it is told to end; a group of its own leaves none behind.
    process = subprocess.Popen(
        command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _, errors = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    assert process.returncode == 0, errors[-4000:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any], list[Any]]:
    """24 rows an update in two micro-batches: over one rank, and over two."""
    folder = tmp_path_factory.mktemp("ranks")
    loaded("tiny_trl")
    for name, ranks in (("one", 1), ("two", 2)):
        (folder / name).mkdir()
        if ranks == 1:
            loaded("trl_ranks_program").train(folder / name, 12)
        else:
            under_torchrun(folder / name, ranks, 6)
    return folder, seen(folder / "one", 1), seen(folder / "two", 2)


def test_same_trajectories(runs: Any) -> None:
    _, (one,), two = runs
    assert one["world"] == 1 and [rank["world"] for rank in two] == [2, 2]
    for update in range(2):
        whole = one["rows"][update]
        parts = [row for rank in two for row in rank["rows"][update]]
        assert len(whole) == 24 and [len(rank["rows"][update]) for rank in two] == [12, 12]
        for a, b in zip(whole, parts, strict=True):
            assert a[:3] == b[:3]
            assert a[4] == b[4] and (a[3] == pytest.approx(b[3]) or math.isnan(b[3]))
    # The second group begins on one rank and ends on the other.
    first, second = ([(r[0], r[1]) for r in rank["rows"][0]] for rank in two)
    assert first[8][0] == second[0][0]
    assert [r[1] for r in first[8:]] == [0, 1, 2, 3] and [r[1] for r in second[:4]] == [4, 5, 6, 7]


def test_a_prompt_that_stands_on_both_ranks(runs: Any) -> None:
    """Its two groups have ids of their own, so their rows differ."""
    _, _, two = runs
    rows = [row for rank in two for row in rank["rows"][0]]
    assert rows[16][0] == f"{rows[0][0]}#2"
    assert all(a[2] != b[2] for a, b in zip(rows[:8], rows[16:], strict=True))
    assert all("#" not in row[0] for rank in two for row in rank["rows"][1])


def test_control_advantages_sum_to_zero(runs: Any) -> None:
    _, _, two = runs
    by_group: dict[str, list[float]] = {}
    undecided = 0
    for rank in two:
        for place, advantage in rank["advantages"]:
            task, rollout, _, _, valid = rank["rows"][0][place]
            undecided += not valid
            assert math.isnan(advantage) == (not valid)
            if rollout < 4 and valid:
                by_group.setdefault(task, []).append(advantage)
    assert len(by_group) == 3
    assert undecided > 0
    for advantages in by_group.values():
        assert sum(advantages) == pytest.approx(0.0, abs=1e-6)
        assert len(advantages) > 1


@pytest.mark.parametrize("step", [0, 1], ids=["regression", "grpo"])
def test_loss_and_gradient_equal_those_of_one_rank(runs: Any, step: int) -> None:
    folder, (one,), two = runs
    mine = one["gradients"][step]
    norm = math.sqrt(sum(float((g**2).sum()) for g in mine.values()))
    assert norm > 0
    for rank in two:
        theirs = rank["gradients"][step]
        assert set(theirs) == set(mine)
        for name, gradient in mine.items():
            assert float((gradient - theirs[name]).norm()) <= 2e-5 * norm, name
    logs = [json.loads((folder / which / "log.json").read_text()) for which in ("one", "two")]
    assert logs[0][step]["loss"] == pytest.approx(logs[1][step]["loss"], rel=1e-5)
    assert logs[0][step]["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_diagnostics_equal_those_of_one_rank(runs: Any) -> None:
    folder, _, _ = runs
    logs = [json.loads((folder / which / "log.json").read_text()) for which in ("one", "two")]
    for step, (one, two) in enumerate(zip(*logs, strict=True)):
        ours = {name for name in one if name.startswith("mintrl/")}
        assert {name for name in two if name.startswith("mintrl/")} == ours
        assert step != 0 or len(ours) > 30
        for name in (*ours, "reward", "completions/mean_length"):
            if name in one:
                assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    assert logs[0][0]["mintrl/reviews"] > 12 and logs[0][0]["mintrl/revises"] == 12


def test_the_store_has_every_row_once(runs: Any) -> None:
    folder, (one,), _ = runs
    for which in ("one", "two"):
        store = RolloutStore(folder / which / "rollouts")
        assert sorted(path.name for path in store.folder.iterdir()) == [
            "update-u000000.parquet",
            "update-u000001.parquet",
        ]
        for update in range(2):
            stored, problems = store.read(update=update)
            found = {(row.task_id, row.rollout): row.ids.tolist() for row in stored}
            assert not problems and len(stored) == len(found) == 24
            assert found == {(row[0], row[1]): row[2] for row in one["rows"][update]}


# --- places


def test_group_shares() -> None:
    assert [(s.group, s.start, s.rollouts) for s in group_shares(0, 6, 4)] == [
        (0, 0, (0, 1, 2, 3)),
        (1, 4, (0, 1)),
    ]
    assert [(s.group, s.start, s.rollouts) for s in group_shares(1, 6, 4)] == [
        (1, 0, (2, 3)),
        (2, 2, (0, 1, 2, 3)),
    ]
    # A group over three ranks.
    assert [(s.group, s.start, s.rollouts) for s in group_shares(1, 2, 6)] == [(0, 0, (2, 3))]


def test_check_repeated() -> None:
    check_repeated(["a", "a", "b", "b"], group_shares(0, 4, 2))
    check_repeated([[{"role": "user"}]] * 2, group_shares(0, 2, 2))
    with pytest.raises(UsageError, match="rows 2 and 3"):
        check_repeated(["a", "a", "b", "a"], group_shares(0, 4, 2))


def test_distinct_ids() -> None:
    assert distinct_ids(["a", "b", "a", "a"]) == ["a", "b", "a#2", "a#3"]
    assert distinct_ids(["a#2", "a", "a"]) == ["a#2", "a", "a#3"]
    assert distinct_ids(["a", "a", "a#2", "a#2"]) == ["a", "a#2", "a#2#2", "a#2#3"]
    seen: dict[str, int] = {}
    assert distinct_ids(["a", "b"], seen) == ["a", "b"]
    assert distinct_ids(["b", "a", "c"], seen) == ["b#2", "a#2", "c"]
