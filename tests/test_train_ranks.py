"""`mintrl train` against `vllm serve` (a stand-in over real HTTP, weights included), in one process and
in two under torchrun."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip("trl")

import torch

from mintrl_env import recipes
from mintrl_env.config import parse_config
from mintrl_env.metrics import read_metrics
from mintrl_env.run_folder import RunFolder
from mintrl_env.trajectory import Trajectory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

HERE = Path(__file__).parent
HANG_S = 300


def _beside(name: str) -> Any:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


fake = _beside("fake_vllm_serve")

TINY: dict[str, Any] = {
    "method": "mintrl-const",
    "policy": {"path": "warmup:student", "chat": False, "max_prompt": 32},
    "tasks": {"name": "table_chain", "options": {"count": 16, "seed": 1}},
    "evaluation": {
        "tasks": {"name": "table_chain", "split": "heldout", "options": {"count": 3, "seed": 2}},
        "every": 1,
    },
    "episode": {
        "chunk_tokens": 12,
        "max_reviews": 3,
        "max_correction": 3,
        "max_response": 28,
        "step_delimiters": ["\n"],
    },
    "rollout": {"n_control": 2, "n_intervened": 2, "slots": 8, "engine": "server"},
    "judge": {
        "name": "scoring",
        "path": "warmup:teacher",
        "options": {"tau": -2.0, "never": "^B", "stop": ["\n"]},
        "guards": {"leak": {"answer_line": "^B", "ngram": 0}},
    },
    "objective": {"kappa": -0.2, "beta_2": 0.02, "intervention_updates": 2},
    "train": {
        "updates": 3,
        "prompts_per_update": 3,  # so that a group lies on both ranks
        "micro_batch": 2,
        "learning_rate": 2e-3,
        "checkpoint_every": 1,
    },
    "warmup": {
        kind: {"steps": 12, "batch": 8, "model": {"layers": 1, "hidden": 32, "intermediate": 48}}
        for kind in ("student", "teacher")
    },
}


@dataclass
class Finished:
    """A run that has come to its end."""

    folder: RunFolder
    server: Any
    weights: Path
    outcome: subprocess.CompletedProcess[str]

    def rows(self) -> list[Trajectory]:
        rows, problems = self.folder.store().read()
        assert problems == []
        return rows


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Warmed-up models of these tests only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINTRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def student() -> str:
    config = copy.deepcopy(TINY)
    config["rollout"].pop("engine")
    return recipes.resolve_path("warmup:student", parse_config(config, "test"))


def launch(
    config: Path, folder: Path, *more: str, ranks: int, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The command in so many processes, with a time after which all of them are killed."""
    program = [str(HERE / "train_ranks_program.py"), "train", str(config), "--run", str(folder)]
    launcher = [sys.executable]
    if ranks > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        launcher += ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks)]
        # Without --, torchrun takes our --run for one of its own options.
        launcher += ["--master_addr", "127.0.0.1", "--master_port", str(port), "--"]
    env = os.environ | {
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]),
        **environment,
    }
    process = subprocess.Popen(
        [*launcher, *program, *more], env=env, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=HANG_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        pytest.fail(f"still there after {HANG_S} s:\n{out[-2000:]}\n{err[-4000:]}")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def written(path: Path, server: Any, **train: Any) -> Path:
    config = copy.deepcopy(TINY)
    config["rollout"]["engine_options"] = {
        "url": server.url, "transfer": "gloo_transfer:GlooTransfer"
    }  # fmt: skip
    config["train"] |= train
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, student: str) -> Iterator[Finished]:
    folder = tmp_path_factory.mktemp("one")
    with fake.VllmServe(student) as server:
        config = written(folder / "run.yaml", server)
        run = folder / "run"
        outcome = launch(config, run, ranks=1, MINTRL_TEST_WEIGHTS=str(folder))
        assert outcome.returncode == 0, outcome.stderr[-4000:]
        yield Finished(RunFolder(run), server, folder, outcome)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, student: str) -> Iterator[Finished]:
    """Two ranks, whose second one fails in update 1 and ends the first; then the run goes on."""
    folder = tmp_path_factory.mktemp("two")
    with fake.VllmServe(student) as server:
        config = written(folder / "run.yaml", server)
        run = folder / "run"
        broken = launch(config, run, ranks=2, MINTRL_TEST_FAIL="1 judge")
        said = "error (process 1 of 2): budget: the account has no quota"
        assert broken.returncode == 1 and said in broken.stderr, broken.stderr[-4000:]
        assert [row["update"] for row in read_metrics(run / "metrics.jsonl")] == [0]
        outcome = launch(config, run, "--resume", ranks=2, MINTRL_TEST_WEIGHTS=str(folder))
        assert outcome.returncode == 0, outcome.stderr[-4000:]
        yield Finished(RunFolder(run), server, folder, outcome)


def weights(run: Finished, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(run.weights / f"rank{rank}.pt", weights_only=True)
    return found


def test_both_ranks_end_with_equal_weights_and_so_does_the_server(two: Finished) -> None:
    first, second = weights(two, 0), weights(two, 1)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    # The evaluation at the end wrote by them.
    served = two.server.model.state_dict()
    assert all(torch.equal(tensor, served[name]) for name, tensor in first.items())


def furthest(a: dict[str, Any], b: dict[str, Any]) -> float:
    assert a.keys() == b.keys()
    return max(float((tensor - b[name]).abs().max()) for name, tensor in a.items())


def test_the_run_is_that_of_one_process(one: Finished, two: Finished, student: str) -> None:
    from transformers import AutoModelForCausalLM

    ours, theirs = one.rows(), two.rows()
    assert [(r.update, r.task_id, r.rollout) for r in ours] == [
        (r.update, r.task_id, r.rollout) for r in theirs
    ]
    assert len(ours) == 3 * 3 * 4
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.provenance, b.provenance)
        assert (a.reward, a.valid, a.kind) == (b.reward, b.valid, b.kind)
    left, right = weights(one, 0), weights(two, 0)
    start = AutoModelForCausalLM.from_pretrained(student).state_dict()
    # Gradients are sums in another order; AdamW divides small ones by their own size.
    assert furthest(left, right) < 1e-5 < 1e-3 < furthest(left, start)
    for a, b in zip(*(read_metrics(run.folder.metrics_file) for run in (one, two)), strict=True):
        assert a["phase"] == b["phase"]
        for key in ("reward", "loss", "mintrl/reviews", "mintrl/revises", "accuracy"):
            assert a.get(key) == pytest.approx(b.get(key), rel=1e-3, abs=1e-5), key


def test_all_is_written_once(two: Finished) -> None:
    rows = two.rows()
    groups = {(row.update, row.task_id) for row in rows}
    assert len(groups) == 9 and len(rows) == 9 * 4
    assert len({(row.update, row.task_id, row.rollout) for row in rows}) == len(rows)
    lines = [json.loads(line) for line in two.folder.metrics_file.read_text().splitlines()]
    assert [(line["update"], line["run_attempt"]) for line in lines] == [(0, 0), (1, 1), (2, 1)]
    assert (two.folder.path / "attempt").read_text() == "1\n"
    assert {row.run_attempt for row in rows if row.update == 0} == {0}
    assert {row.run_attempt for row in rows if row.update > 0} == {1}
    names = sorted(path.name for path in two.folder.checkpoints.glob("checkpoint-*"))
    assert names == ["checkpoint-2", "checkpoint-3"]
    summary = json.loads(two.folder.summary_file.read_text())
    assert (summary["updates"], summary["rollouts"], summary["groups"]) == (3, 36, 9)
    # One process speaks.
    assert two.outcome.stdout.count("the policy's server:") == 1
    assert two.outcome.stdout.count("written: ") == 1


def test_rows_are_written_by_the_weights_of_their_update(one: Finished) -> None:
    for row in one.rows():
        assert set(row.policy_versions[row.provenance == 0].tolist()) == {row.update}
    server = one.server
    # Before each of 3 updates, and each of 5 evaluations; nothing in between, so never a chunk's.
    assert server.log.count("/finish_weight_update") == 8
    assert server.version == "8" and not server.paused
    assert sorted(set(server.written) - {"default"}, key=int) == [str(n) for n in range(1, 9)]
    assert server.log.count("/init_weight_transfer_engine?") == 0
    assert server.log.count("/init_weight_transfer_engine") == 1


def test_a_rank_that_is_killed_ends_the_other_and_one_process_goes_on(
    student: str, one: Finished, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    with fake.VllmServe(student) as server:
        config = written(tmp_path / "run.yaml", server)
        outcome = launch(config, run.path, ranks=2, MINTRL_TEST_FAIL="1 kill")
        assert outcome.returncode != 0
        assert "SIGKILL" in outcome.stderr, outcome.stderr[-4000:]
        assert [row["update"] for row in read_metrics(run.metrics_file)] == [0]
        again = launch(
            config, run.path, "--resume", ranks=1, MINTRL_TEST_WEIGHTS=str(tmp_path)
        )  # fmt: skip
        assert again.returncode == 0, again.stderr[-4000:]
        finished = Finished(run, server, tmp_path, again)
    assert furthest(weights(one, 0), weights(finished, 0)) < 1e-5
    for a, b in zip(one.rows(), finished.rows(), strict=True):
        assert (a.update, a.task_id, a.rollout) == (b.update, b.task_id, b.rollout)
        np.testing.assert_array_equal(a.ids, b.ids)
