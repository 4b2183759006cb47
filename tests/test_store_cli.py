"""`mintrl store`: what is printed, what is refused, what other programs get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
from typer.testing import CliRunner

from mintrl_env.cli import app
from mintrl_env.config import dump_config, parse_config
from mintrl_env.errors import StoreError, UsageError
from mintrl_env.judge_data import load_judge_rows
from mintrl_env.prompts import ByteTokenizer
from mintrl_env.store import RolloutStore
from mintrl_env.store_merge import run_names
from mintrl_env.store_show import printable
from mintrl_env.store_source import merge_sources, open_source
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import (
    Kind,
    Outcome,
    Review,
    Score,
    StopReason,
    Usage,
    frozen_ids,
    frozen_logprobs,
)

BYTES = ByteTokenizer()
KEPT, DROPPED, WROTE, REST = "2+3=5\n", "5+4=8\nSo 8", "5+4=", "9\nSo 9"


def ids(text: str) -> list[int]:
    return BYTES.encode(text)


def repaired(task_id: str, update: int, rollout: int, reward: float = 1.0) -> Trajectory:
    """The judge cut a wrong step and wrote the beginning of the right one."""
    response = [*ids(KEPT), *ids(WROTE), *ids(REST), BYTES.EOS]
    authors = np.zeros(len(response), np.int8)
    authors[len(KEPT) : len(KEPT + WROTE)] = 1
    logprobs = np.where(authors == 0, -0.5, np.nan)
    review = Review(
        0, 0, len(KEPT + DROPPED), Outcome.REVISE, step=1, cut=len(KEPT),
        correction_tokens=len(WROTE), dropped_ids=frozen_ids(ids(DROPPED)), reason="5+4 is 9",
        usage=Usage(100, 20),
    )  # fmt: skip
    return row(task_id, update, rollout, response, reward, (review,), authors, logprobs)


def control(task_id: str, update: int, rollout: int, reward: float = 0.0) -> Trajectory:
    return row(task_id, update, rollout, [*ids(KEPT + DROPPED), BYTES.EOS], reward)


def row(
    task_id: str, update: int, rollout: int, response: list[int], reward: float,
    reviews: tuple[Review, ...] = (), authors: Any = None, logprobs: Any = None,
) -> Trajectory:  # fmt: skip
    size = len(response)
    return Trajectory(
        task_id=task_id,
        update=update,
        rollout=rollout,
        kind=Kind.INTERVENED if reviews else Kind.CONTROL,
        prompt_ids=frozen_ids(ids("Q: 2+3+4\n")),
        ids=frozen_ids(response),
        provenance=np.zeros(size, np.int8) if authors is None else authors,
        logprobs=frozen_logprobs(np.full(size, -0.5) if logprobs is None else logprobs, size),
        policy_versions=frozen_ids([update] * size),
        score=Score(reward, "correct" if reward >= 1 else "wrong"),
        valid=True,
        stop_reason=StopReason.EOS,
        reviews=reviews,
        draws=size,
    )


def make_run(folder: Path, *, updates: int = 2, tasks: tuple[str, ...] = ("a", "b")) -> Path:
    """A run's folder: its config, and two groups of two rows an update."""
    folder.mkdir(parents=True)
    (folder.parent / "tasks.jsonl").write_text(
        "".join(json.dumps({"id": t, "prompt": f"Problem {t}", "answer": "9"}) + "\n" for t in "ab")
    )
    config = parse_config(
        {
            "method": "mintrl-const",
            "policy": {"path": "somewhere"},
            "tasks": {"path": str(folder.parent / "tasks.jsonl")},
            "judge": {"name": "keep"},
            "objective": {"kappa": -0.1},
            "episode": {"step_delimiters": ["\n"]},
            "rollout": {"n_control": 1, "n_intervened": 1},
            "train": {"prompts_per_update": 2, "micro_batch": 2, "updates": updates},
        },
        "test",
    )
    (folder / "config.yaml").write_text(dump_config(config))
    store = RolloutStore(folder / "rollouts")
    for update in range(updates):
        for task in tasks:
            store.write_group([control(task, update, 0), repaired(task, update, 1)])
    store.compact(0)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def store(*arguments: object, status: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(app, ["store", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result.stdout, result.stderr


def lines(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


# --- ls, stats


def test_ls_counts_by_update(run: Path) -> None:
    out, _ = store("ls", run)
    tokens = str(2 * (len(ids(KEPT + DROPPED)) + len(ids(KEPT + WROTE + REST)) + 2))
    assert lines(out) == [
        ["update", "groups", "rows", "valid", "tokens", "reward", "attempt"],
        ["0", "2", "4", "4", tokens, "0.5", "0"],
        ["1", "2", "4", "4", tokens, "0.5", "0"],
    ]
    out, _ = store("ls", run / "rollouts", "--groups", "--update", "1:")
    assert lines(out)[1:] == [["1", "a", "2", "0", "1"], ["1", "b", "2", "0", "1"]]


def test_stats_are_those_of_rollout_stats(run: Path) -> None:
    out, _ = store("stats", run, "--json", "--update", "0")
    (figures,) = map(json.loads, out.splitlines())
    assert (figures["run"], figures["update"], figures["groups"]) == ("", 0, 2)
    assert figures["tokens"]["dropped"] == 2 * len(DROPPED)
    assert figures["reward_gap"] == 1.0
    out, _ = store("stats", run)
    fraction = len(WROTE) / (len(ids(KEPT + WROTE + REST)) + 1)
    assert lines(out)[1][-5:-2] == ["1", f"{fraction:.3g}", lines(out)[1][-3]]
    assert lines(out)[0][:3] == ["update", "groups", "rows"] and len(lines(out)) == 3


def test_evaluations_are_shown_when_asked_for_or_alone(run: Path, tmp_path: Path) -> None:
    folder = RolloutStore(run / "rollouts")
    folder.write_group([control("e", -1, 0)])
    assert [line[0] for line in lines(store("ls", run)[0])[1:]] == ["0", "1"]
    assert [line[0] for line in lines(store("ls", run, "--update=-1:0")[0])[1:]] == ["-1", "0"]
    alone = RolloutStore(tmp_path / "alone")
    alone.write_group([control("e", -1, 0)])
    assert [line[0] for line in lines(store("ls", alone.folder)[0])[1:]] == ["-1"]


# --- show


def test_show_says_who_wrote_what(run: Path) -> None:
    out, _ = store("show", run, "b", "--rollout", "1", "--update", "1", "--tokenizer", "bytes")
    assert out.splitlines()[0] == (
        "b  update 1  rollout 1 (intervened)  reward 1 (correct)  ended by eos"
    )
    assert f"{KEPT}<1 revise>[-{DROPPED}-][+{WROTE}+]{REST}<|eos|>\n" in out
    assert "Q: 2+3+4\n" in out
    assert f"({len(KEPT + REST) + 1} policy, {len(WROTE)} judge, {len(DROPPED)} dropped)" in out
    last = ["1", "revise", f"0-{len(KEPT + DROPPED)}", "2", str(len(DROPPED)), str(len(WROTE))]
    assert lines(out)[-1] == [*last, "5+4", "is", "9"]


def test_show_takes_several_and_names_what_is_not_there(run: Path) -> None:
    out, _ = store("show", run, "--limit", "3", "--tokenizer", "bytes")
    assert out.count("ended by eos") == 3
    with pytest.raises(UsageError, match=r"no such trajectory; mintrl store ls .*--groups"):
        store("show", run, "nobody", "--tokenizer", "bytes")


def test_text_of_a_run_cannot_steer_the_terminal(tmp_path: Path) -> None:
    folder = RolloutStore(tmp_path)
    hostile = "\x1b[2J\x07\u202eabc"
    review = Review(0, 0, 3, Outcome.KEEP, reason=hostile)
    folder.write_group([row(hostile, 0, 0, ids(hostile), 0.0, (review,))])
    for command in (("show", "--tokenizer", "bytes"), ("ls", "--groups")):
        out, _ = store(command[0], tmp_path, *command[1:])
        assert not set(out) & set("\x1b\x07\u202e")
        assert "\\u001b[2J\\u0007" in out
    assert printable("a\nb\t日本") == "a\nb\t日本"
    assert printable("a\nb", line_ends=False) == "a\\nb"


def test_a_store_without_a_run_needs_a_tokenizer(run: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    (run / "rollouts").rename(bare)
    with pytest.raises(StoreError, match=r"no run folder is known beside these files.*--tokenizer"):
        store("show", bare)
    for path in (tmp_path / "absent", run):
        with pytest.raises(
            StoreError, match="no store here: expected a run's folder with rollouts"
        ):
            store("ls", path)


# --- validate


def test_validate_exits_1_and_names_file_and_row(run: Path) -> None:
    out, _ = store("validate", run)
    assert out == "3 file(s), 8 row(s), 0 problem(s)\n"
    part = sorted((run / "rollouts").glob("part-*"))[0]
    part.write_bytes(part.read_bytes()[:50])
    RolloutStore(run / "rollouts").write_group([repaired("c", 1, 1)])
    out, errors = store("validate", run, status=1)
    first, second, closing = out.splitlines()
    assert first.startswith(f"{part.name}: torn or no Parquet file")
    assert second == "update 1, task 'c': rollout 0 of 2 is missing"
    assert closing == "4 file(s), 7 row(s), 2 problem(s)"
    assert "mintrl store merge" in errors


def test_torn_files_are_named_by_every_command(run: Path, tmp_path: Path) -> None:
    part = sorted((run / "rollouts").glob("part-*"))[0]
    part.write_bytes(b"")
    for command in (
        ["ls", run],
        ["stats", run],
        ["show", run, "--limit", "99", "--tokenizer", "bytes"],
        ["merge", run, "--out", tmp_path / "merged"],
        ["export", run, tmp_path / "x.jsonl", "--kind", "sft", "--tokenizer", "bytes"],
    ):
        _, errors = store(*command)
        assert errors.count(f"{part.name}: torn or no Parquet file, ignored") == 1


# --- merge


def test_merged_runs_keep_their_rows_apart(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "second" / "run", updates=1)
    out, _ = store("merge", run, other, "--out", tmp_path / "merged")
    names = [f"{tmp_path.name}/run", "second/run"]
    assert out == f"{tmp_path / 'merged'}: 12 rows of {', '.join(names)}\n"
    source = open_source(tmp_path / "merged")
    rows, problems = source.store.read()
    assert problems == []
    keys = {(r.run, r.update, r.task_id, r.rollout) for r in rows}
    assert len(keys) == len(rows) == 12
    assert {r.run for r in rows} == set(names)
    assert source.runs == {names[0]: run, names[1]: other}
    assert store("validate", tmp_path / "merged")[0].endswith("0 problem(s)\n")
    heads, *found = lines(store("ls", tmp_path / "merged")[0])
    assert heads[:2] == ["run", "update"]
    expected = [(name, "0") for name in sorted(names)] + [(names[0], "1")]
    assert [(line[0], line[1]) for line in found] == expected
    # Merged once more, a row's run is named behind the store's name.
    third = make_run(tmp_path / "third", updates=1)
    merge_sources([tmp_path / "merged", third], tmp_path / "more")
    more = open_source(tmp_path / "more")
    assert set(more.runs) == {f"merged/{name}" for name in names} | {"third"}
    assert {r.run for r in more.store.read()[0]} == set(more.runs)


def test_a_merge_takes_the_latest_attempt_and_mends_doubles(run: Path, tmp_path: Path) -> None:
    from dataclasses import replace

    folder = RolloutStore(run / "rollouts")
    folder.write_group(
        [control("a", 0, 0), repaired("a", 0, 1)]
    )  # stands in the compacted file too
    again = [replace(control("b", 1, r), run_attempt=1) for r in (0, 1)]
    folder.write_group(again)
    assert len(store("validate", run, status=1)[0].splitlines()) == 3
    merge_sources([run], tmp_path / "clean")
    rows, _ = open_source(tmp_path / "clean").store.read()
    assert len(rows) == 8
    assert [r.run_attempt for r in rows if (r.update, r.task_id) == (1, "b")] == [1, 1]
    assert store("validate", tmp_path / "clean")[0].endswith(" 0 problem(s)\n")


def test_what_a_merge_refuses(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="stands twice"):
        store("merge", run, run, "--out", tmp_path / "merged")
    with pytest.raises(StoreError, match="exists already: choose a new folder"):
        store("merge", run, "--out", run)
    with pytest.raises(StoreError, match="no store here"):
        store("merge", run, tmp_path / "absent", "--out", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_names_are_as_short_as_tells_them_apart() -> None:
    assert run_names([Path("/x/grpo"), Path("/x/const")]) == ["grpo", "const"]
    assert run_names([Path("/x/a/run"), Path("/x/b/run")]) == ["a/run", "b/run"]


# --- export


@pytest.mark.parametrize(
    ("kind", "count"), [("sft", 4), ("pairs", 4), ("first-error", 4), ("int", 4)]
)
@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_export_writes_what_was_asked_for(
    run: Path, tmp_path: Path, kind: str, count: int, suffix: str
) -> None:
    out = tmp_path / f"rows{suffix}"
    said, _ = store("export", run, out, "--kind", kind, "--tokenizer", "bytes")
    assert said == f"{out}: {count} rows\n"
    rows = (
        [json.loads(line) for line in out.read_text().splitlines()]
        if suffix == ".jsonl"
        else parquet.read_table(out).to_pylist()
    )
    assert len(rows) == count
    assert {(row["update"], row["task_id"], row["rollout"]) for row in rows} == {
        (u, t, 1) for u in (0, 1) for t in "ab"
    }
    if kind == "pairs":
        assert {(row["chosen"], row["rejected"]) for row in rows} == {(WROTE, "5+4=8\n")}
    if kind == "first-error":
        found = load_judge_rows(str(out))
        assert {(r.problem, r.first_error) for r in found} == {("Problem a", 1), ("Problem b", 1)}


def test_export_by_update_and_reward_and_without_ids(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    options = ["--tokenizer", "bytes", "--update", "1", "--min-reward", "0", "--no-ids"]
    store("export", run, out, "--kind", "sft", *options)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["task_id"], row["reward"]) for row in rows] == [
        ("a", 0.0), ("a", 1.0), ("b", 0.0), ("b", 1.0)
    ]  # fmt: skip
    assert "input_ids" not in rows[0] and rows[1]["completion"] == KEPT + WROTE + REST


def test_what_an_export_refuses(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    with pytest.raises(UsageError, match="--kind is one of sft, pairs, first-error, int"):
        store("export", run, out, "--kind", "dpo")
    for update in ("x", ":", "1:y"):
        with pytest.raises(UsageError, match="--update takes N or A:B"):
            store("export", run, out, "--kind", "sft", "--update", update)
    with pytest.raises(UsageError, match="not the tokenizer and the step delimiters"):
        options = ["--tokenizer", "bytes", "--delimiter", "+"]
        store("export", run, out, "--kind", "pairs", *options)
    assert not out.exists()
    store("export", run, out, "--kind", "pairs", "--tokenizer", "bytes", "--delimiter", r"\n")
    with pytest.raises(StoreError, match="exists already"):
        store("export", run, out, "--kind", "sft", "--tokenizer", "bytes")


def test_tasks_that_cannot_be_read_leave_the_prompt(run: Path, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").unlink()
    out = tmp_path / "rows.jsonl"
    _, errors = store("export", run, out, "--kind", "first-error", "--tokenizer", "bytes")
    assert "the policy's prompt is given as the problem" in errors
    assert json.loads(out.read_text().splitlines()[0])["problem"] == "Q: 2+3+4\n"
