"""The quickstart at two updates, and the full comparison's controls (slow)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mintrl_env.errors import MintrlError

ROOT = Path(__file__).resolve().parent.parent
SMALL = (
    "train.updates=2",
    "objective.intervention_updates=1",
    "train.prompts_per_update=2",
    "train.micro_batch=32",
    "train.checkpoint_every=0",
    "evaluation.tasks.options.count=8",
    "evaluation.every=0",
    "probe.tasks.options.count=4",
    "probe.n=1",
    "warmup={student: {steps: 30, batch: 16}, teacher: {steps: 60, batch: 16}}",
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    patch = pytest.MonkeyPatch()
    patch.setenv("MINTRL_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def folder(cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole quickstart by its command."""
    run = tmp_path_factory.mktemp("runs") / "quickstart"
    command = [sys.executable, "-m", "mintrl_env.cli", "quickstart", "--run", str(run)]
    for override in SMALL:
        command += ["--set", override]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (run / "stdout.txt").write_text(done.stdout)
    return run


def test_its_summary_has_what_the_readme_promises(folder: Path) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary["methods"]) == ["mintrl-const", "grpo"]
    for name, figures in summary["methods"].items():
        assert figures["updates"] == 2 and figures["rollouts"] == 64
        for when in ("before", "after"):
            low, high = figures[f"accuracy_{when}_ci95"]
            assert 0 <= low <= figures[f"accuracy_{when}"] <= high <= 1
        assert figures["tokens"]["policy"] > 0
        assert (figures["tokens"]["intervention"] > 0) == (name == "mintrl-const")
        assert (figures["reviews"] > 0) == (name == "mintrl-const")
        assert 0 <= figures["all_fail_share"] <= 1 and 0 <= figures["all_succeed_share"] <= 1
    const = summary["methods"]["mintrl-const"]
    assert 0 < const["off_policy_fraction_all"] < const["off_policy_fraction_intervened"] < 1
    # One start: the same weights, problems and draws.
    assert const["accuracy_before"] == summary["methods"]["grpo"]["accuracy_before"]
    assert summary["difference"]["problems"] == 8
    assert set(summary["judge"]) >= {"false_revise_rate", "miss_rate", "mislocation_rate"}
    assert "method" in summary["config_differences"]


def test_its_files_are_there_and_its_table_is_printed(folder: Path) -> None:
    from mintrl_env.store import RolloutStore

    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    report = (folder / "report.html").read_text()
    assert "mintrl-const" in report and "Revise" in report
    for name in ("mintrl-const", "grpo"):
        rows, problems = RolloutStore(folder / name / "rollouts").read()
        assert len(rows) == 64 and problems == []
    printed = (folder / "stdout.txt").read_text()
    for text in ("in these keys alone", "accuracy after", "The judge on", "report.html"):
        assert text in printed


def test_a_second_call_goes_on_where_the_first_one_ended(folder: Path, cache: None) -> None:
    from mintrl_env.quickstart import quickstart

    before = (folder / "grpo" / "summary.json").stat().st_mtime_ns
    summary = quickstart(folder, SMALL)
    assert (folder / "grpo" / "summary.json").stat().st_mtime_ns == before
    assert summary["methods"]["grpo"]["updates"] == 2


def test_figures_of_another_run_are_never_shown(folder: Path, cache: None) -> None:
    from mintrl_env.errors import ConfigError
    from mintrl_env.quickstart import quickstart

    with pytest.raises(ConfigError, match=r"begun with another config(?s:.*)train.seed: 0 -> 7"):
        quickstart(folder, [*SMALL, "train.seed=7"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("tasks={name: sums}", "only table_chain can do"),
        ("evaluation=null", "compares accuracies"),
        ("evaluation.after=false", "compares accuracies"),
    ],
)
def test_what_cannot_be_compared_is_refused_at_once(
    override: str, message: str, tmp_path: Path
) -> None:
    from mintrl_env.errors import ConfigError
    from mintrl_env.quickstart import quickstart

    with pytest.raises(ConfigError, match=message):
        quickstart(tmp_path / "q", [*SMALL, override])
    assert not (tmp_path / "q").exists()


def test_a_failed_process_shows_its_last_lines(
    cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mintrl_env.quickstart import quickstart

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(MintrlError, match=r"run ended with status 1(?s:.*)no-such-folder"):
        quickstart(tmp_path / "q", [*SMALL, "policy.path=no-such-folder"])


# --- controls: is the comparison fair?


EASIER_START = [
    "tasks.options.hard_share=[0.0, 0.3]",
    "evaluation.tasks.options.hard_share=[0.0, 0.3]",
    "train.learning_rate=3e-4",
    "train.updates=80",
]
CONTROL = ["evaluation.every=0", "probe=null", "train.checkpoint_every=0"]


def run_side_by_side(runs: dict[str, tuple[str, list[str]]], folder: Path) -> dict[str, Any]:
    """`mintrl train` of shipped configs with overrides, each in a process of its own."""
    children = {}
    for name, (config, overrides) in runs.items():
        command = [sys.executable, "-m", "mintrl_env.cli", "train", str(ROOT / "configs" / config)]
        command += ["--run", str(folder / name)]
        for override in overrides:
            command += ["--set", override]
        log = (folder / f"{name}.log").open("wb")
        children[name] = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT
        )
    for name, child in children.items():
        assert child.wait() == 0, (folder / f"{name}.log").read_text()[-3000:]
    return {name: json.loads((folder / name / "summary.json").read_text()) for name in runs}


@pytest.mark.slow
def test_grpo_is_not_crippled_and_shuffled_corrections_teach_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mintrl_env.config import load_config
    from mintrl_env.recipes import warmup_models

    # Once, before the two: they would each warm up the same models.
    monkeypatch.chdir(ROOT)
    warmup_models(load_config(ROOT / "configs" / "quickstart_mintrl.yaml"))
    found = run_side_by_side(
        {
            # An easier start, where GRPO has signal: it must learn well.
            "grpo": ("quickstart_grpo.yaml", [*CONTROL, *EASIER_START]),
            # The judge's corrections, each put into another problem: nothing to learn from.
            "shuffled": (
                "quickstart_mintrl.yaml",
                [*CONTROL, "judge.name=shuffled", "judge.options.judge=scoring"],
            ),
        },
        tmp_path,
    )
    grpo, shuffled = found["grpo"], found["shuffled"]
    print({name: (f["accuracy_before"], f["accuracy_after"]) for name, f in found.items()})
    assert grpo["accuracy_after"] - grpo["accuracy_before"] >= 0.25
    assert shuffled["accuracy_after"] - shuffled["accuracy_before"] <= 0.05
    assert shuffled["tokens"]["intervention"] > 0
