"""A store's rows for other trainers: every column against the record, and TRL's and our own readers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest

from mintrl_env.episode import Episode, EpisodeConfig, Finished, NeedChunk, NeedReview
from mintrl_env.errors import StoreError, UsageError
from mintrl_env.export_files import write_export
from mintrl_env.exports import EXPORTS, Reading, RowFilter, columns_of, export_rows
from mintrl_env.judge_data import load_judge_rows
from mintrl_env.prompts import ByteTokenizer
from mintrl_env.protocols import Tokenizer
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Chunk, Kind, NoReview, Provenance, Score, Task, Verdict

BYTES = ByteTokenizer()
PROBLEM = "What is 2+3+4?"
READING = Reading(BYTES, ("\n\n",), {"sum": PROBLEM})


def row(
    chunks: Sequence[str],
    verdicts: Sequence[Verdict | NoReview],
    *,
    reward: float = 1.0,
    tokenizer: Tokenizer = BYTES,
    delimiters: tuple[str, ...] = ("\n\n",),
    task_id: str = "sum",
) -> Trajectory:
    """A finished episode in which the policy wrote these chunks (the last one, and one with a `$`
    behind it, with an EOS) and a judge said these things."""
    prompt = tokenizer.encode("Q: 2+3+4\n")
    kind = Kind.INTERVENED if verdicts else Kind.CONTROL
    limits = EpisodeConfig(
        chunk_tokens=64, max_reviews=max(1, len(verdicts)), max_correction=24, max_response=400,
        step_delimiters=delimiters,
    )  # fmt: skip
    task = Task(task_id, PROBLEM)
    episode = Episode(task, prompt, kind=kind, tokenizer=tokenizer, config=limits)
    written, said = iter(chunks), iter(verdicts)
    left = len(chunks)
    while not isinstance(need := episode.need, Finished):
        if isinstance(need, NeedChunk):
            text, left = next(written), left - 1
            ends = not left or text.endswith("$")
            ids = tokenizer.encode(text.rstrip("$")) + [min(tokenizer.eos_ids)] * ends
            episode.send(Chunk(np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32)))
        elif isinstance(need, NeedReview):
            episode.send(next(said))
        else:
            episode.send(Score(reward, "correct" if reward >= 1 else "wrong"))
    return Trajectory.of(episode, update=2, rollout=5)


def one(kind: str, rows: Sequence[Trajectory], reading: Reading = READING, **options: Any) -> Any:
    found = list(export_rows(rows, kind, reading, **options))
    assert len(found) == 1
    return found[0]


REPAIRED = row(
    ["2+3=5\n\n5+4=8\n\nSo 8", "5+4=9\n\nSo 9"],
    [Verdict.revise(1, "Careful: ")],
)


def test_sft_rows_hold_prompt_and_response() -> None:
    out = one("sft", [REPAIRED])
    assert out["prompt"] == "Q: 2+3+4\n"
    assert out["completion"] == "2+3=5\n\nCareful: 5+4=9\n\nSo 9"
    assert out["input_ids"].tolist() == [*REPAIRED.prompt_ids, *REPAIRED.ids]
    assert out["input_ids"][-1] == BYTES.EOS
    assert out["completion_mask"].tolist() == [0] * 9 + [1] * len(REPAIRED.ids)
    known = {"id": "2/sum/5/0", "run": "", "update": 2, "task_id": "sum", "rollout": 5}
    known |= {"kind": "intervened", "stop_reason": "eos", "valid": True, "reward": 1.0}
    assert {name: out[name] for name in known} == known


def test_what_a_tool_wrote_is_not_trained_on() -> None:
    authors = REPAIRED.provenance.copy()
    authors[3:6] = Provenance.ENVIRONMENT
    out = one("sft", [replace(REPAIRED, provenance=authors)])
    assert np.flatnonzero(out["completion_mask"][9:] == 0).tolist() == [3, 4, 5]


def test_pairs_are_the_dropped_step_and_its_correction() -> None:
    out = one("pairs", [REPAIRED])
    assert out["prompt"] == "Q: 2+3+4\n2+3=5\n\n"
    assert out["rejected"] == "5+4=8\n\n"  # the step, and not "So 8" behind it
    assert out["chosen"] == "Careful: "
    for name in ("prompt", "chosen", "rejected"):
        assert BYTES.decode(out[f"{name}_ids"]) == out[name]
    assert out["id"] == "2/sum/5/0/0"
    # The chunk's last step is dropped up to its end, an EOS excepted.
    last = row(["2+3=6", "=5. So 9"], [Verdict.revise(0, "2+3")])
    assert one("pairs", [last])["rejected"] == "2+3=6"
    ended = row(["1\n\n2+3=6$", "5"], [Verdict.revise(1, "2+3=")])
    assert one("pairs", [ended])["rejected"] == "2+3=6"


def test_a_bare_cut_is_no_pair_and_no_intervention() -> None:
    cut = row(["2+3=5\n\n5+4=8", "So 9"], [Verdict.revise(1, "")])
    assert list(export_rows([cut], "pairs", READING)) == []
    assert list(export_rows([cut], "int", READING)) == []
    assert one("first-error", [cut])["first_error"] == 1


def test_intervention_rows_end_with_the_correction() -> None:
    out = one("int", [REPAIRED])
    assert out["completion"] == "2+3=5\n\nCareful: "
    assert out["intervention"] == "Careful: "
    assert BYTES.decode(out["input_ids"]) == out["prompt"] + out["completion"]
    assert BYTES.EOS not in out["input_ids"]
    # Only where the continuation came right.
    wrong = row(["a\n\nb", "c"], [Verdict.revise(1, "x")], reward=0.0)
    assert list(export_rows([wrong], "int", READING)) == []
    assert one("int", [wrong], keep=RowFilter(min_reward=0.0))["completion"] == "a\n\nx"


def test_each_correction_is_a_row_of_its_own() -> None:
    twice = row(
        ["a=1\n\nb=2", "b=3\n\nc=4", "c=5"],
        [Verdict.revise(1, "b:"), Verdict.revise(1, "c:")],
    )
    rows = list(export_rows([twice], "int", READING))
    assert [out["completion"] for out in rows] == ["a=1\n\nb:", "a=1\n\nb:b=3\n\nc:"]
    assert [out["id"] for out in rows] == ["2/sum/5/0/0", "2/sum/5/0/1"]
    errors = list(export_rows([twice], "first-error", READING))
    assert [(out["steps"], out["first_error"]) for out in errors] == [
        (["a=1\n\n", "b=2"], 1),
        (["a=1\n\n", "b:b=3\n\n", "c=4"], 2),
    ]


@pytest.mark.parametrize(
    ("chunks", "step", "steps", "first"),
    [
        # A chunk that begins inside a step: the step that it goes on with is the wrong one.
        (["a=1\n\nb", "=3\n\nc=4", "d"], 0, ["a=1\n\n", "b=3\n\n", "c=4"], 1),
        (["a=1\n\nb", "=3\n\nc=4", "d"], 1, ["a=1\n\n", "b=3\n\n", "c=4"], 2),
        # Its first blanks end the step before.
        (["a=1\n", "\nb=3\n\nc=4", "d"], 0, ["a=1\n\n", "b=3\n\n", "c=4"], 1),
        (["a=1\n\n", "\n\nb=3", "d"], 0, ["a=1\n\n\n\n", "b=3"], 1),
    ],
)
def test_a_wrong_step_is_counted_over_the_whole_response(
    chunks: list[str], step: int, steps: list[str], first: int
) -> None:
    found = row(chunks, [Verdict.keep(), Verdict.revise(step, "x")])
    out = one("first-error", [found])
    assert (out["steps"], out["first_error"]) == (steps, first)
    assert BYTES.decode(out["response_ids"]) == "".join(steps)
    assert out["problem"] == PROBLEM


def test_a_response_without_an_error_needs_every_review_and_the_verifier() -> None:
    kept = row(["a=1\n\n", "b=2"], [Verdict.keep(), Verdict.keep()])
    out = one("first-error", [kept])
    assert (out["steps"], out["first_error"]) == (["a=1\n\n", "b=2"], -1)
    assert (
        list(export_rows([replace(kept, score=Score(0.0, "wrong"))], "first-error", READING)) == []
    )
    guarded = row(["a=1\n\n", "b=2"], [Verdict.keep(), Verdict.revise(0, "x").kept_by("g", "")])
    assert list(export_rows([guarded], "first-error", READING)) == []
    assert list(export_rows([row(["a"], [])], "first-error", READING)) == []


def test_a_problem_is_found_under_its_number_or_read_from_the_prompt() -> None:
    again = replace(REPAIRED, task_id="sum#2")
    assert one("first-error", [again])["problem"] == PROBLEM
    assert one("first-error", [replace(REPAIRED, task_id="x")])["problem"] == "Q: 2+3+4\n"


def test_filters() -> None:
    half = replace(REPAIRED, score=Score(0.5, "partly"))
    bad = replace(REPAIRED, valid=False, score=Score.undecided("unavailable"))
    rows = [REPAIRED, half, bad]

    def rewards(kind: str, keep: RowFilter | None) -> list[float | None]:
        return [out["reward"] for out in export_rows(rows, kind, READING, keep=keep)]

    assert rewards("sft", None) == [1.0]
    assert rewards("sft", RowFilter(min_reward=0.5)) == [1.0, 0.5]
    assert rewards("sft", RowFilter(valid_only=False)) == [1.0, 0.5, None]
    assert rewards("sft", RowFilter(valid_only=False, min_reward=-1.0)) == [1.0, 0.5]
    assert rewards("pairs", None) == [1.0, 0.5]


def test_another_tokenizer_is_noticed() -> None:
    with pytest.raises(UsageError, match="not the tokenizer and the step delimiters"):
        list(export_rows([REPAIRED], "pairs", Reading(BYTES, ("=",))))
    with pytest.raises(UsageError, match="sft, pairs, first-error, int, not 'dpo'"):
        list(export_rows([REPAIRED], "dpo", READING))


@pytest.mark.parametrize("name", ["bpe", "sentencepiece", "metaspace", "char"])
def test_ids_are_the_records_whatever_the_tokenizer(
    made_tokenizers: dict[str, Tokenizer], name: str
) -> None:
    tokenizer = made_tokenizers[name]
    found = row(
        ["We add 1 and 2, which is 4.\n\nThen we stop.\n\nSo", " it is 3."],
        [Verdict.revise(1, "Then 1 and 2 is 3. ")],
        tokenizer=tokenizer,
    )
    reading = Reading(tokenizer, ("\n\n",))
    pair, whole, stub = (one(kind, [found], reading) for kind in ("pairs", "sft", "int"))
    cut = found.reviews[0].cut
    assert pair["prompt_ids"].tolist() == [*found.prompt_ids, *found.ids[:cut]]
    assert (
        pair["rejected_ids"].tolist()
        == list(found.reviews[0].dropped_ids)[: len(pair["rejected_ids"])]
    )
    assert pair["chosen_ids"].tolist() == found.ids[found.provenance == 1].tolist()
    assert pair["rejected"].strip() == "Then we stop."
    assert stub["completion"].endswith(stub["intervention"])
    assert whole["completion"].startswith(stub["completion"])
    assert whole["input_ids"].tolist() == [*found.prompt_ids, *found.ids]
    assert not tokenizer.eos_ids & set(stub["input_ids"].tolist())


# --- files

ROWS = [REPAIRED, row(["a=1\n\n", "b=2"], [Verdict.keep(), Verdict.keep()])]


@pytest.mark.parametrize("kind", EXPORTS)
@pytest.mark.parametrize("ids", [True, False])
def test_jsonl_and_parquet_hold_the_same(tmp_path: Path, kind: str, ids: bool) -> None:
    columns = columns_of(kind, ids=ids)
    files = [tmp_path / "new" / "rows.jsonl", tmp_path / "rows.parquet"]
    for file in files:
        rows = export_rows(ROWS, kind, READING, ids=ids)
        assert write_export(rows, file, columns) == (2 if kind in ("sft", "first-error") else 1)
    plain = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert parquet.read_table(files[1]).to_pylist() == plain
    assert list(plain[0]) == [name for name, _ in columns]
    assert any(name.endswith("ids") for name in plain[0]) == ids
    with pytest.raises(StoreError, match="exists already"):
        write_export([], files[0], columns)
    with pytest.raises(UsageError, match=r"ends in \.jsonl or \.parquet"):
        write_export([], tmp_path / "rows.csv", columns)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "rows.parquet"]


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def rows() -> Any:
        yield from export_rows(ROWS, "sft", READING)
        raise UsageError("no more")

    for file in (tmp_path / "rows.jsonl", tmp_path / "rows.parquet"):
        with pytest.raises(UsageError, match="no more"):
            write_export(rows(), file, columns_of("sft"))
    assert list(tmp_path.iterdir()) == []
    odd = replace(ROWS[1], task_id="a\ud800")
    for file in (tmp_path / "rows.jsonl", tmp_path / "rows.parquet"):
        assert write_export(export_rows([odd], "sft", READING), file, columns_of("sft")) == 1


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_judge_bench_reads_first_error_rows(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"rows{suffix}"
    rows = export_rows(ROWS, "first-error", READING)
    write_export(rows, file, columns_of("first-error"))
    found = load_judge_rows(str(file))
    assert [(r.problem, r.steps, r.first_error) for r in found] == [
        (PROBLEM, ("2+3=5\n\n", "5+4=8\n\n", "So 8"), 1),
        (PROBLEM, ("a=1\n\n", "b=2"), -1),
    ]
    assert len({r.row_id for r in found}) == 2
