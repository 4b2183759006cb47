"""The best checkpoint of a run, and suites: several held-out sets, best and last, one file."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from mintrl_env.cli import app
from mintrl_env.config import dump_config, load_config, parse_config
from mintrl_env.console import RunConsole
from mintrl_env.dry_run_model import tiny_model
from mintrl_env.dry_run_tasks import samples, write_rows
from mintrl_env.errors import ConfigError, StoreError, UsageError
from mintrl_env.evaluation import best_folder, keep_best
from mintrl_env.suite import evaluate_suite, load_suite

CONFIGS = Path(__file__).resolve().parent.parent / "configs"


class TestBest:
    def saver(self, log: list[str]) -> Any:
        def save(folder: str) -> None:
            Path(folder).mkdir()
            (Path(folder) / "config.json").write_text(folder)
            log.append(Path(folder).name)

        return save

    def test_the_first_of_the_highest_accuracies_is_kept(self, tmp_path: Path) -> None:
        log: list[str] = []
        kept = [
            keep_best(tmp_path, update, accuracy, self.saver(log))
            for update, accuracy in ((10, 0.2), (20, None), (30, 0.5), (40, 0.5), (50, 0.4))
        ]
        assert kept == [True, False, True, False, False]
        assert log == ["best-10", "best-30"]
        assert best_folder(tmp_path) == tmp_path / "best-30"
        assert sorted(p.name for p in tmp_path.iterdir()) == ["best-30", "best.json"]
        assert json.loads((tmp_path / "best.json").read_text()) == {
            "update": 30, "accuracy": 0.5, "folder": "best-30",
        }  # fmt: skip

    def test_a_kill_while_it_is_written_leaves_the_one_before(self, tmp_path: Path) -> None:
        keep_best(tmp_path, 10, 0.2, self.saver([]))

        def killed(folder: str) -> None:
            Path(folder).mkdir()
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            keep_best(tmp_path, 20, 0.9, killed)
        assert best_folder(tmp_path) == tmp_path / "best-10"
        assert keep_best(tmp_path, 20, 0.9, self.saver([]))  # the update runs again
        assert best_folder(tmp_path) == tmp_path / "best-20"

    def test_a_run_without_one_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(StoreError, match=r"no best checkpoint: .*evaluation\.every"):
            best_folder(tmp_path)
        keep_best(tmp_path, 10, 0.2, self.saver([]))
        shutil.rmtree(tmp_path / "best-10")
        with pytest.raises(StoreError, match="no best checkpoint"):
            best_folder(tmp_path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder as a training leaves it: config, last weights, best weights."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("runs") / "own"
    base = tiny_model(folder / "base", "qwen3", positions=512)
    data: dict[str, Any] = {
        "method": "grpo",
        "policy": {"path": base, "max_prompt": 256, "system_prompt": "Be short."},
        "tasks": {"path": "none.jsonl"},
        "episode": {"max_response": 8},
        "rollout": {"slots": 16},
    }
    (folder / "config.yaml").write_text(dump_config(parse_config(data, "test")))
    tiny_model(folder / "model", "qwen3", positions=512, seed=1)
    keep_best(folder, 3, 0.5, lambda path: tiny_model(Path(path), "qwen3", positions=512, seed=2))
    return folder


def write_suite(folder: Path, **changes: Any) -> Path:
    section = parse_config(
        {"method": "grpo", "policy": {"path": "x"}, "tasks": {"path": "x.jsonl"}}, "test"
    ).tasks
    sets = {
        name: {
            "path": write_rows(folder / f"{name}.jsonl", samples(section, name, first=k, count=3))
        }
        for name, k in (("easy", 0), ("hard", 10))
    }
    data = {"n": 2, "k": [1, 2], "max_response": 12, "sets": sets, **changes}
    path = folder / "suite.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def quiet() -> RunConsole:
    return RunConsole(Console(file=io.StringIO()))


def test_each_checkpoint_is_evaluated_on_each_set(run: Path, tmp_path: Path) -> None:
    suite, out = load_suite(write_suite(tmp_path)), tmp_path / "out"
    results = evaluate_suite(run, suite, out, console=quiet())
    assert json.loads((out / "suite.json").read_text()) == results
    assert list(results) == ["best", "last"]
    for which, weights in (("best", run / "best-3"), ("last", run / "model")):
        assert results[which]["mean"] == 0.0
        for name in ("easy", "hard"):
            found = results[which][name]
            assert (found["checkpoint"], found["n"]) == (str(weights), 2)
            assert (found["problems"], found["pass@2"]) == (3, 0.0)
            kept = load_config(out / which / name / "config.yaml")
            # The suite's length and the run's own prompt.
            assert kept.episode.max_response == 12
            assert kept.policy.system_prompt == "Be short."
    with pytest.raises(StoreError, match="holds a run already: go on with it by --resume"):
        evaluate_suite(run, suite, out, console=quiet())
    assert evaluate_suite(run, suite, out, resume=True, console=quiet()) == results


def test_equal_weights_are_evaluated_once(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = tmp_path / "twin"
    shutil.copytree(run, twin)
    shutil.rmtree(twin / "model")
    shutil.copytree(twin / "best-3", twin / "model")
    asked: list[str] = []

    def fake(config: Any, folder: Any, *, checkpoint: str, **options: Any) -> dict[str, Any]:
        asked.append(Path(checkpoint).name)
        return {"accuracy": 0.25, "ci95": [0.0, 1.0], "by_task": {}}

    monkeypatch.setattr("mintrl_env.suite.evaluate", fake)
    results = evaluate_suite(
        twin, load_suite(write_suite(tmp_path)), tmp_path / "o", console=quiet()
    )
    assert asked == ["best-3", "best-3"]
    assert results["last"] == results["best"] and results["last"]["mean"] == 0.25


def test_the_commands_take_best_and_last(run: Path, tmp_path: Path) -> None:
    suite = write_suite(tmp_path, checkpoints=["best"], n=1, k=[1])
    done = CliRunner().invoke(
        app, ["eval-suite", str(run), str(suite), "--out", str(tmp_path / "out"), "--set", "n=1"]
    )
    assert done.exit_code == 0, done.output
    assert "easy" in done.output and "mean" in done.output and "0.00" in done.output
    tasks = json.dumps({"path": str(tmp_path / "easy.jsonl")})
    for which, weights in (("best", "best-3"), ("last", "model")):
        command = ["eval", str(run / "config.yaml"), "--checkpoint", str(run), "--which", which]
        command += ["--set", f"tasks={tasks}", "--run", str(tmp_path / which)]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        asked = json.loads((tmp_path / which / "asked.json").read_text())["checkpoint"]
        assert asked == str(run / weights if which == "best" else run)
    for wrong in (["--which", "best"], ["--checkpoint", str(run), "--which", "first"]):
        done = CliRunner().invoke(app, ["eval", str(run / "config.yaml"), *wrong])
        assert isinstance(done.exception, UsageError)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sets": {}}, "sets: "),
        ({"sampels": 3}, "sampels: no such key; did you mean"),
        (
            {"sets": {"a": {"path": "x", "frm": "mbpp"}}},
            "sets.a.frm: no such key; did you mean form?",
        ),
        ({"checkpoints": ["first"]}, "checkpoints.0: "),
        ({"k": [1, 4]}, "k: pass@4 needs as many samples, and n is 2"),
    ],
)
def test_what_is_wrong_with_a_suite_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = write_suite(tmp_path, **changes)
    with pytest.raises(ConfigError) as caught:
        load_suite(path)
    assert str(path) in str(caught.value) and message in str(caught.value)


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"no run here: config\.yaml is missing"):
        evaluate_suite(tmp_path, load_suite(write_suite(tmp_path)), tmp_path / "o", console=quiet())


@pytest.mark.parametrize("name", ["eval_math", "eval_code"])
def test_the_suites_of_the_paper(name: str) -> None:
    suite = load_suite(CONFIGS / f"{name}.yaml")
    assert (suite.n, suite.max_response, suite.checkpoints) == (32, 32768, ["best", "last"])
    assert set(suite.sets) == (
        {"aime25", "aime26", "hmmt_feb25"}
        if name == "eval_math"
        else {"livecodebench", "humaneval_plus", "mbpp_plus"}
    )
