"""`mintrl filter`: pass rates of a real (tiny) policy, what is kept, what a kill leaves behind."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from mintrl_env.cli import app
from mintrl_env.config import RunConfig, apply_override, parse_config
from mintrl_env.console import RunConsole
from mintrl_env.dry_run_model import tiny_model
from mintrl_env.errors import MintrlError, StoreError, UsageError
from mintrl_env.filter_rates import Band, PilotFile, Rate, histogram, nothing_left
from mintrl_env.filter_tasks import filter_tasks, reading_keys
from mintrl_env.tasks import TaskColumns, load_tasks

# Right by the bytes of the response: how often is the task's business.
VERIFIER = """
from pathlib import Path

from mintrl_env import Score

class Sometimes:
    async def score(self, task, response):
        if task.answer == "undecided":
            return Score.undecided("bad_gold", "no answer")
        if task.answer == "0.6" and Path(__file__).with_suffix(".down").exists():
            return Score.undecided("unavailable", "no service")
        share = float(task.answer)
        right = sum(response.encode()) % 100 < 100 * share
        return Score(float(right), "correct" if right else "wrong")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3", positions=256)


@pytest.fixture
def verifier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = f"sometimes_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(VERIFIER)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield f"{name}:Sometimes"
    sys.modules.pop(name, None)


SHARES = ["0", "0.5", "1", "0.4", "undecided", "0.6", "0", "1"]


def rows(path: Path, shares: list[str] = SHARES) -> str:
    lines = [
        {"uid": f"t{i}", "text": f"Problem {i}?", "gold": share, "level": i, "why": "Since."}
        for i, share in enumerate(shares)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


COLUMNS = {"task_id": "uid", "prompt": ["question", "text"], "answer": "gold", "context": "why"}


def config(model: str, verifier: str, path: str, **tasks: Any) -> RunConfig:
    data: dict[str, Any] = {
        "method": "grpo",
        "policy": {"path": model, "max_prompt": 128},
        "tasks": {"path": path, "columns": COLUMNS, "verifier": verifier, **tasks},
        "episode": {"max_response": 24},
        "rollout": {"n_control": 2, "n_intervened": 2, "slots": 32},
        "train": {"prompts_per_update": 1, "micro_batch": 4},
    }
    return parse_config(data, "test")


def quiet() -> RunConsole:
    from rich.console import Console

    return RunConsole(Console(file=io.StringIO()))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_problems_in_the_band_are_written_as_the_same_config_reads_them(
    tmp_path: Path, model: str, verifier: str, suffix: str
) -> None:
    source, out = rows(tmp_path / "all.jsonl"), tmp_path / f"kept.{suffix}"
    run = config(model, verifier, source)
    figures = filter_tasks(run, out, n=16, keep="0.1..0.9", console=quiet())
    pilot = [json.loads(line) for line in (tmp_path / f"kept.{suffix}.pilot.jsonl").open()]
    assert pilot[0]["asked"]["n"] == 16
    rates = {row["task_id"]: row for row in pilot[1:]}
    assert set(rates) == {f"t{i}" for i in range(8)}
    assert {t: (r["passed"], r["decided"]) for t, r in rates.items() if t in ("t0", "t2", "t4")} == {
        "t0": (0, 16), "t2": (16, 16), "t4": (0, 0),
    }  # fmt: skip
    columns = TaskColumns(COLUMNS, verifier=verifier)
    before = {task.task_id: task for task in load_tasks(source, columns)}
    kept = load_tasks(str(out), columns)
    # The middling ones, in the file's order, with their rates and all that the rows had.
    assert [task.task_id for task in kept] == ["t1", "t3", "t5"]
    for task in kept:
        same = before[task.task_id]
        rate = rates[task.task_id]
        assert (task.prompt, task.answer, task.context) == (same.prompt, same.answer, "Since.")
        assert task.metadata == {
            "level": same.metadata["level"],
            "pass_rate": rate["passed"] / rate["decided"],
            "pass_samples": 16,
        }
        assert 0.1 <= task.metadata["pass_rate"] <= 0.9
    decided = [r for r in rates.values() if r["decided"]]
    assert figures == {
        "verifier": verifier, "problems": 8, "kept": 3,
        "never_solved": 2, "always_solved": 2, "undecided": 1,
        "left_out_before": 0,
        "mean_pass_rate": pytest.approx(sum(r["passed"] / r["decided"] for r in decided) / 7),
        "truncated_share": sum(r["truncated"] for r in rates.values()) / 128,
        "sampled_tokens": sum(r["tokens"] for r in rates.values()),
    }  # fmt: skip


def test_a_pilot_that_was_cut_short_goes_on(tmp_path: Path, model: str, verifier: str) -> None:
    source = rows(tmp_path / "all.jsonl")
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    run = config(model, verifier, source)
    filter_tasks(run, whole, n=4, keep="0..1", console=quiet())
    lines = (tmp_path / "whole.jsonl.pilot.jsonl").read_bytes().splitlines(keepends=True)
    pilot = tmp_path / "cut.jsonl.pilot.jsonl"
    pilot.write_bytes(b"".join(lines[:4]) + lines[4][:17])  # three problems and a torn line
    with pytest.raises(
        StoreError, match=r"cut\.jsonl\.pilot\.jsonl holds a pilot already: .*--resume"
    ):
        filter_tasks(run, cut, n=4, keep="0..1", console=quiet())
    filter_tasks(run, cut, n=4, keep="0..1", resume=True, console=quiet())
    assert pilot.read_bytes()[: len(b"".join(lines[:4]))] == b"".join(lines[:4])
    # The draws are by task, so the rest comes out as in the whole one.
    assert sorted(pilot.read_bytes().splitlines()) == sorted(line.strip() for line in lines)
    assert cut.read_bytes() == whole.read_bytes()
    with pytest.raises(StoreError, match="is a pilot of another n: remove it"):
        filter_tasks(run, cut, n=5, keep="0..1", resume=True, console=quiet())
    other = config(model, verifier, source).model_copy(
        update={"episode": run.episode.model_copy(update={"max_response": 9})}
    )
    with pytest.raises(StoreError, match="is a pilot of another max_response"):
        filter_tasks(other, cut, n=4, resume=True, console=quiet())


def test_what_a_service_failed_is_sampled_again_by_a_resume(
    tmp_path: Path, model: str, verifier: str
) -> None:
    run, out = config(model, verifier, rows(tmp_path / "all.jsonl")), tmp_path / "kept.jsonl"
    down = tmp_path / f"{verifier.partition(':')[0]}.down"

    def pilot() -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / "kept.jsonl.pilot.jsonl").open()][1:]

    down.touch()
    filter_tasks(run, out, n=4, keep="0..1", console=quiet())
    before = pilot()
    assert {row["task_id"]: row["failed"] for row in before if row["failed"]} == {"t5": 4}
    assert len(out.read_text().splitlines()) == 6
    down.unlink()
    filter_tasks(run, out, n=4, keep="0..1", resume=True, console=quiet())
    (again,) = pilot()[len(before) :]
    assert (again["task_id"], again["decided"], again["failed"]) == ("t5", 4, 0)
    assert len(out.read_text().splitlines()) == 7


def test_another_band_chooses_anew_without_sampling(
    tmp_path: Path, model: str, verifier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = config(model, verifier, rows(tmp_path / "all.jsonl")), tmp_path / "kept.jsonl"
    filter_tasks(run, out, n=4, keep="0..1", console=quiet())
    assert len(out.read_text().splitlines()) == 7  # what could not be scored has no rate

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("sampled again")

    monkeypatch.setattr("mintrl_env.filter_tasks.sample", refuse)
    filter_tasks(run, out, n=4, keep="1..1", resume=True, console=quiet())
    pilot = [json.loads(line) for line in (tmp_path / "kept.jsonl.pilot.jsonl").open()][1:]
    always = {row["task_id"] for row in pilot if row["passed"] == row["decided"] == 4}
    assert {json.loads(line)["uid"] for line in out.read_text().splitlines()} == always
    assert {"t2", "t7"} <= always and "t0" not in always


def test_rows_and_prompts_that_cannot_be_used_are_left_out_and_counted(
    tmp_path: Path, model: str, verifier: str
) -> None:
    source = tmp_path / "all.jsonl"
    rows(source, ["0.5", "0.5"])
    with source.open("a") as file:
        file.write(json.dumps({"uid": "empty", "text": "?"}) + "\n")
        file.write(json.dumps({"uid": "long", "text": "x" * 400, "gold": "0.5"}) + "\n")
    figures = filter_tasks(
        config(model, verifier, str(source)),
        tmp_path / "k.jsonl",
        n=4,
        keep="0..1",
        console=quiet(),
    )
    assert (figures["problems"], figures["kept"], figures["left_out_before"]) == (2, 2, 2)


def test_the_command_prints_rates_and_how_to_train_and_fails_where_nothing_is_left(
    tmp_path: Path, model: str, verifier: str
) -> None:
    path, out = tmp_path / "run.yaml", tmp_path / "kept.jsonl"
    run = config(model, verifier, rows(tmp_path / "all.jsonl", ["0", "1", "0.5"]))
    path.write_text(yaml.safe_dump(run.model_dump(mode="json")))
    done = CliRunner().invoke(app, ["filter", str(path), "--out", str(out), "--n", "8"])
    assert done.exit_code == 0, done.output
    assert "kept: 1" in done.output and f"mintrl train {path} --set tasks.path={out}" in done.output
    assert " 0.000  1  ####" in done.output and "  kept" in done.output
    out.unlink()
    done = CliRunner().invoke(
        app, ["filter", str(path), "--out", str(out), "--keep", "0.01..0.02", "--resume"]
    )
    assert isinstance(done.exception, MintrlError) and done.exit_code == 1
    assert str(done.exception) == (
        "no problem is left: of 3, 1 never solved, 1 always solved, 1 in between, outside the band. "
        "What to do: give a wider --keep"
    )
    assert not out.exists()


def rate(passed: int, decided: int, *, samples: int = 8, truncated: int = 0) -> Rate:
    return Rate(f"t{passed}-{decided}", samples, decided, passed, truncated, 10)


def test_why_nothing_is_left() -> None:
    band = Band.parse("0.1..0.9")
    assert nothing_left([rate(0, 8)] * 3, band) == (
        "no problem is left: of 3, 3 never solved. What to do: take more samples (--n), easier "
        "problems or a better policy"
    )
    cut = nothing_left([rate(0, 8, truncated=6)] * 3, band)
    assert "75% of the responses were cut: raise episode.max_response" in cut
    assert "no response could be scored" in nothing_left([rate(0, 0)] * 2, band)


@pytest.mark.parametrize("text", ["", "0.5", "0.9..0.1", "0..2", "a..b", "-1..1", "nan..1"])
def test_a_band_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--keep takes two pass rates"):
        Band.parse(text)


def test_the_ends_of_a_band_belong_to_it() -> None:
    band = Band.parse("0.125..0.5")
    assert [rate(k, 8) in band for k in range(6)] == [False, True, True, True, True, False]
    assert rate(0, 0) not in Band.parse("0..1")


def test_a_histogram_has_a_line_a_rate() -> None:
    lines = histogram([rate(0, 8)] * 4 + [rate(2, 8)] * 2 + [rate(0, 0)], Band.parse("0.1..0.9"))
    assert lines == [
        f" 0.000  4  {'#' * 40}",
        f" 0.250  2  {'#' * 20}  kept",
        "     -  1  could not be scored",
    ]


def test_a_file_that_is_no_pilot_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pilot.jsonl"
    path.write_text('{"task_id": 1}\n')
    with pytest.raises(StoreError, match="is no pilot's file"):
        PilotFile(path, {}, resume=True)
    with pytest.raises(UsageError, match=r"ends with \.jsonl or \.parquet"):
        filter_tasks(config("m", "math", "x.jsonl"), tmp_path / "out.csv", console=quiet())


def test_the_training_that_is_named_has_the_pilots_verifier_and_overrides(tmp_path: Path) -> None:
    out, given = tmp_path / "kept.jsonl", ["policy.path=x", "tasks.limit=9", "rollout.slots=8"]
    on_file = config("model", "exact", "all.jsonl")
    assert reading_keys(on_file, out, "exact", given) == [
        "policy.path=x", "rollout.slots=8", f"tasks.path={out}",
    ]  # fmt: skip
    data = on_file.model_dump(mode="json") | {"tasks": {"name": "table_chain"}}
    named = parse_config(data, "x.yaml")
    keys = reading_keys(named, out, "exact_line", [*given, "tasks.options.count=4"])
    assert keys == [
        "policy.path=x", "rollout.slots=8", f"tasks={{path: {out}, verifier: exact_line}}",
    ]  # fmt: skip
    apply_override(data, keys[-1])
    assert parse_config(data, "x.yaml").tasks.verifier == "exact_line"
