"""`mintrl train` from a config to its end: what it writes, what it refuses, what survives kill -9."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from mintrl_env.config import RunConfig, load_config, parse_config
from mintrl_env.console import RunConsole
from mintrl_env.errors import ConfigError, StoreError, TaskError, UsageError
from mintrl_env.evaluation import kept
from mintrl_env.metrics import read_metrics
from mintrl_env.run_folder import RunFolder
from mintrl_env.training import train
from mintrl_env.types import Score

TINY: dict[str, Any] = {
    "method": "mintrl-const",
    "policy": {"path": "warmup:student", "chat": False, "max_prompt": 32},
    "tasks": {"name": "table_chain", "options": {"count": 32, "seed": 1}},
    "evaluation": {
        "tasks": {"name": "table_chain", "split": "heldout", "options": {"count": 6, "seed": 2}},
        "every": 2,
    },
    "probe": {
        "tasks": {"name": "table_chain", "split": "probe", "options": {"count": 4, "seed": 3}}
    },
    "episode": {
        "chunk_tokens": 16,
        "max_reviews": 3,
        "max_correction": 3,
        "max_response": 40,
        "step_delimiters": ["\n"],
    },
    "rollout": {"n_control": 2, "n_intervened": 2, "slots": 16, "schedule": "rounds"},
    "judge": {
        "name": "scoring",
        "path": "warmup:teacher",
        "options": {"tau": -2.0, "never": "^B", "stop": ["\n"]},
        "guards": {"leak": {"answer_line": "^B", "ngram": 0}},
    },
    "objective": {"kappa": -0.2, "beta_2": 0.02, "intervention_updates": 3},
    "train": {
        "updates": 4,
        "prompts_per_update": 2,
        "micro_batch": 4,
        "learning_rate": 1e-3,
        "checkpoint_every": 1,
    },
    "warmup": {
        kind: {"steps": 12, "batch": 8, "model": {"layers": 1, "hidden": 32, "intermediate": 48}}
        for kind in ("student", "teacher")
    },
}


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Warmed-up models of these tests only."""
    before = os.environ.get("MINTRL_CACHE")
    os.environ["MINTRL_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["MINTRL_CACHE"]
    else:
        os.environ["MINTRL_CACHE"] = before


def config(**changes: Any) -> RunConfig:
    data = json.loads(json.dumps(TINY))
    for key, value in changes.items():
        section, _, name = key.partition("__")
        if name:
            data[section][name] = value
        else:
            data[section] = value
    return parse_config(data, "test")


def quiet() -> RunConsole:
    from rich.console import Console

    return RunConsole(Console(file=io.StringIO()))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, dict[str, Any]]:
    folder = RunFolder(tmp_path_factory.mktemp("run") / "whole")
    return folder, train(config(), folder, console=quiet())


def test_a_run_writes_all_that_it_promises(
    finished: tuple[RunFolder, dict[str, Any]],
) -> None:
    folder, summary = finished
    assert json.loads(folder.summary_file.read_text()) == summary
    assert (summary["updates"], summary["rollouts"], summary["groups"]) == (4, 32, 8)
    for when in ("before", "after"):
        low, high = summary[f"accuracy_{when}_ci95"]
        assert 0.0 <= low <= summary[f"accuracy_{when}"] <= high <= 1.0
    assert summary["held_out_problems"] == 6
    # Two control and two intervened rows a group for three updates, then four that nobody reviews.
    rows, problems = folder.store().read()
    assert problems == []
    kinds = {u: sum(r.kind == "intervened" for r in rows if r.update == u) for u in range(4)}
    assert kinds == {0: 4, 1: 4, 2: 4, 3: 0}
    tokens = summary["tokens"]
    assert tokens["policy"] == sum(int((r.provenance == 0).sum()) for r in rows)
    assert tokens["intervention"] == sum(int((r.provenance == 1).sum()) for r in rows) > 0
    assert tokens["dropped"] == sum(r.dropped_tokens for r in rows) > 0
    assert summary["reviews"] == sum(len(r.reviews) for r in rows) > summary["revises"] > 0
    assert sum(summary["reviews_by_outcome"].values()) == summary["reviews"]
    assert summary["probe_before"]["reviews"] > 0
    # The judge never writes the answer line or EOS.
    for row in rows:
        for review in row.reviews:
            spliced = row.ids[review.cut : review.cut + review.correction_tokens]
            if review.outcome == "revise":
                assert not set(spliced.tolist()) & {0, 1, 2}


def test_a_run_logs_every_update(finished: tuple[RunFolder, dict[str, Any]]) -> None:
    rows = read_metrics(finished[0].metrics_file)
    assert [row["update"] for row in rows] == [0, 1, 2, 3]
    assert [row["phase"] for row in rows] == ["intervention"] * 3 + ["grpo"]
    for row in rows[:3]:
        assert row["off_policy_fraction_intervened"] >= row["off_policy_fraction_all"] >= 0
        assert row["mintrl/trained_rows"] == 8
        assert row["loss"] >= 0 and row["grad_norm"] >= 0 and row["seconds"] > 0
    assert ["accuracy" in row for row in rows] == [False, True, False, True]


def test_a_finished_run_has_a_plain_model_that_evaluates_and_exports(
    finished: tuple[RunFolder, dict[str, Any]], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from mintrl_env.running import evaluate, export

    folder, _ = finished
    first = RunFolder(tmp_path / "eval")
    asked = {"checkpoint": str(folder.path), "n": 2, "ks": [1, 2], "console": quiet()}
    result = evaluate(config(), first, **asked)
    assert json.loads(first.summary_file.read_text()) == result
    assert result["problems"] == 6 and result["pass@1"] == result["accuracy"] <= result["pass@2"]
    with pytest.raises(StoreError, match="holds a run already"):
        evaluate(config(), first, **asked)
    with pytest.raises(ConfigError, match="begun with another n: 2 -> 1"):
        evaluate(config(), first, **{**asked, "n": 1, "ks": [1]}, resume=True)
    # One group is lost, and of one a service failed a row: only they are sampled again, with the
    # same draws.
    rows, _ = first.store().read()
    for path in (first.path / "rollouts").glob("*.parquet"):
        path.unlink()
    lost, failed, *others = sorted({row.task_id for row in rows})
    down = Score.undecided("unavailable", "no service")
    for task_id in (failed, *others):
        group = [row for row in rows if row.task_id == task_id]
        if task_id == failed:
            group[0] = replace(group[0], score=down, valid=False)
        first.store().write_group(group)
    assert evaluate(config(), first, **asked, resume=True) == result
    attempts = {row.task_id: row.run_attempt for row in first.store().read()[0]}
    assert attempts == {lost: 1, failed: 1, **dict.fromkeys(others, 0)}
    assert all(row.valid for row in first.store().read()[0])
    out = export(str(folder.path), tmp_path / "plain")
    assert AutoModelForCausalLM.from_pretrained(out).config.model_type == "qwen3"
    assert AutoTokenizer.from_pretrained(out).decode([3]) == AutoTokenizer.from_pretrained(
        folder.path / "model"
    ).decode([3])
    with pytest.raises(StoreError, match="exists already"):
        export(str(folder.path), out)
    with pytest.raises(StoreError, match="no model here"):
        export(str(tmp_path), tmp_path / "other")


def test_a_finished_run_that_is_resumed_shows_its_figures(
    finished: tuple[RunFolder, dict[str, Any]],
) -> None:
    folder, summary = finished
    before = folder.metrics_file.read_bytes()
    assert train(config(), folder, resume=True, console=quiet()) == summary
    assert folder.metrics_file.read_bytes() == before
    with pytest.raises(
        ConfigError, match=r"train.updates: 4 -> 3 \(a run may only be made longer\)"
    ):
        train(config(train__updates=3), folder, resume=True, console=quiet())


def test_rollouts_alone_take_up_the_groups_that_are_there(tmp_path: Path) -> None:
    from mintrl_env.running import rollout

    folder = RunFolder(tmp_path / "rollouts")
    summary = rollout(config(), folder, updates=2, console=quiet())
    assert (summary["groups"], summary["trajectories"]) == (4, 16)
    assert summary["revises"] > 0
    again = rollout(config(), folder, updates=3, resume=True, console=quiet())
    assert again["groups"] == 6
    rows, problems = folder.store().read()
    assert problems == []
    assert {row.run_attempt for row in rows if row.update < 2} == {0}
    assert {row.run_attempt for row in rows if row.update == 2} == {1}


def test_a_finished_run_is_not_begun_again(finished: tuple[RunFolder, dict[str, Any]]) -> None:
    with pytest.raises(StoreError, match="holds a run already"):
        train(config(), finished[0], console=quiet())


def command(path: Path, folder: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "mintrl_env.cli",
        "train",
        str(path),
        "--run",
        str(folder),
        "--resume",
    ]


def wait_for(condition: Any, process: subprocess.Popen[bytes], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < end, "the run did not come so far"
        time.sleep(0.02)


def test_after_kill_9_a_resumed_run_ends_as_an_undisturbed_one(
    finished: tuple[RunFolder, dict[str, Any]], tmp_path: Path
) -> None:
    undisturbed, summary = finished
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config().model_dump(mode="json")))
    folder = RunFolder(tmp_path / "killed")
    process = subprocess.Popen(command(path, folder.path), stdout=subprocess.DEVNULL)
    # Two checkpoints exist and the third update's first group is on disk: then it is shot.
    wait_for(
        lambda: (
            (folder.checkpoints / "checkpoint-2" / "trainer_state.json").exists()
            and list((folder.path / "rollouts").glob("*-u000002*.parquet"))
        ),
        process,
    )
    process.send_signal(signal.SIGKILL)
    process.wait()
    readable, _ = folder.store().read()
    assert {row.update for row in readable} >= {0, 1, 2}, "finished groups are readable"

    again = subprocess.run(command(path, folder.path), capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    resumed = json.loads(folder.summary_file.read_text())
    ignored = {"seconds", "wall_seconds"}
    assert {k: v for k, v in resumed.items() if k not in ignored} == (
        {k: v for k, v in summary.items() if k not in ignored}
    )
    a, b = (run.store().read()[0] for run in (undisturbed, folder))
    assert [(r.update, r.task_id, r.rollout) for r in a] == [
        (r.update, r.task_id, r.rollout) for r in b
    ]
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x.ids, y.ids)
    # The update that was cut short ran again, with the same draws and a higher attempt.
    assert {row.run_attempt for row in b if row.update == 3} == {1}
    assert [row["update"] for row in read_metrics(folder.metrics_file)] == [0, 1, 2, 3]

    import safetensors.numpy

    left, right = (
        safetensors.numpy.load_file(run.path / "model" / "model.safetensors")
        for run in (undisturbed, folder)
    )
    for name in left:
        np.testing.assert_array_equal(left[name], right[name])


def test_ctrl_c_ends_a_run_that_can_go_on(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config(train__updates=400).model_dump(mode="json")))
    folder = RunFolder(tmp_path / "run")
    process = subprocess.Popen(
        command(path, folder.path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        # A shell's background job ignores SIGINT, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_for(lambda: len(read_metrics(folder.metrics_file)) >= 2, process)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode not in (0, -signal.SIGKILL)
    assert b"Traceback" not in errors
    assert folder.last_checkpoint() is not None


# --- bad input


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"train__prompts_per_update": 64}, ConfigError, "fewer than train.prompts_per_update"),
        (
            {"policy__path": "no/such-model"},
            ConfigError,
            "policy.path: 'no/such-model' is no folder",
        ),
        ({"policy__max_prompt": 8}, TaskError, "more than max_prompt = 8"),
        ({"judge__name": "scorring"}, Exception, "did you mean 'scoring'"),
        ({"judge__options": {"taw": -1}}, ConfigError, "judge.options: no option 'taw'"),
        ({"judge__guards": {"leek": {}}}, Exception, "did you mean 'leak'"),
        (
            {"judge": {"name": "keep", "path": "warmup:teacher"}, "probe": None},
            ConfigError,
            "judge.path: the judge 'keep' has no weights to load",
        ),
        (
            {"evaluation": {"tasks": {"name": "sums"}}},
            ConfigError,
            "evaluation.tasks: these tasks are for the verifier 'last_integer'",
        ),
        ({"judge__path": None}, ConfigError, "judge.path: a scoring judge needs the weights"),
        ({"tasks": {"name": "table_chian"}}, Exception, "did you mean 'table_chain'"),
        ({"tasks__options": {"cuont": 3}}, ConfigError, "tasks.options: no setting 'cuont'"),
        ({"tasks": {"path": "absent.jsonl"}}, TaskError, "absent.jsonl does not exist"),
        (
            {"tasks": {"path": "rows.jsonl", "verifier": "mth"}},
            Exception,
            "did you mean 'math'",
        ),
        (
            {"evaluation": {"tasks": {"name": "table_chain", "options": {"count": 4, "seed": 1}}}},
            ConfigError,
            "4 problem\\(s\\) are training prompts too",
        ),
        (
            # The same problem with other blanks is the same problem.
            {
                "tasks": {"path": "rows.jsonl"},
                "evaluation": {"tasks": {"path": "blanks.jsonl"}},
                "probe": None,
            },
            ConfigError,
            "1 problem\\(s\\) are training prompts too",
        ),
        ({"warmup": {"student": {"stpes": 3}}}, ConfigError, "warmup: .*stpes"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_bad_input_is_refused_before_the_folder_is_touched(
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path("rows.jsonl").write_text(
        '{"prompt": "1a2|", "answer": "x", "id": 1}\n{"prompt": "2a2|", "answer": "x", "id": 2}\n'
    )
    Path("blanks.jsonl").write_text('{"prompt": " 2a2|\\n", "answer": "x", "id": 1}\n')
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(error, match=message):
        train(config(**changes), folder, console=quiet())
    assert not folder.path.exists()


def test_what_several_processes_cannot_do_is_refused_before_any_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(
        ConfigError, match=r"8 rows an update don't split over 3 processes, .*prompts"
    ):
        train(config(), folder, console=quiet())
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match=r"change train.micro_batch \(to a divisor of 2\)"):
        train(config(), folder, console=quiet())
    for name, what in (("FSDP", "FSDP"), ("DEEPSPEED", "DeepSpeed")):
        with monkeypatch.context() as patch:
            patch.setenv(f"ACCELERATE_USE_{name}", "true")
            with pytest.raises(ConfigError, match=f"started with {what}: launch without it"):
                train(config(), folder, console=quiet())
    assert not folder.path.exists()


def test_an_evaluation_that_was_kept_is_not_taken_for_another(tmp_path: Path) -> None:
    asked = [{"n": 1}, {"n": 1}, {"n": 2}]
    results = iter([{"accuracy": 0.1}, {"accuracy": 0.2}, {"accuracy": 0.3}])
    path = tmp_path / "evaluation" / "before.json"
    found = [kept(path, a, False, lambda: next(results))["accuracy"] for a in asked]
    assert found == [0.1, 0.1, 0.2]
    assert kept(path, {"n": 2}, True, lambda: next(results))["accuracy"] == 0.3
    path.write_text('{"accu')  # by hand, or an older version's
    assert kept(path, {"n": 2}, False, lambda: {"accuracy": 0.4})["accuracy"] == 0.4


def test_a_run_that_cannot_begin_blocks_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    # Engines are made when the model is loaded, after the folder was opened.
    with monkeypatch.context() as patch, pytest.raises(UsageError, match="no engine today"):
        patch.setattr(
            "mintrl_env.adapters.session.EngineHost.engine",
            lambda *_, **__: (_ for _ in ()).throw(UsageError("no engine today")),
        )
        train(config(), folder, console=quiet())
    assert not folder.config_file.exists()
    folder.open(config(train__seed=5), resume=False)


def test_the_command_prints_errors_without_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("method: grpo\npolicy: {pth: x}\n")
    done = subprocess.run(
        [sys.executable, "-m", "mintrl_env.cli", "train", str(path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith(f"error: {path}: 3 problems")
    assert "policy.pth: no such key; did you mean path?" in done.stderr


def test_shipped_quickstart_configs_differ_in_the_methods_keys_alone() -> None:
    from mintrl_env.config import config_differences
    from mintrl_env.quickstart import METHOD_KEYS, METHODS, _shipped

    differences = config_differences(*(load_config(_shipped(file)) for file in METHODS.values()))
    assert differences[0] == ("method", "mintrl-const", "grpo")
    for key, _, _ in differences:
        assert key.startswith(METHOD_KEYS)
