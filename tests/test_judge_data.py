"""Rows of judge benchmarks: published shapes, and rows that can't be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mintrl_env.errors import TaskError
from mintrl_env.judge_data import JudgeRow, judge_rows, load_judge_rows

STEPS = ["2 + 3 = 5", "5 * 4 = 21", "So it is 21."]
SHARED = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "judge"


def one(raw: dict[str, Any], **options: Any) -> JudgeRow:
    (row,) = judge_rows(raw, "f.jsonl:1", 7, **options)
    return row


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


class TestShapes:
    def test_ours(self) -> None:
        raw = {"id": "a", "source": "s", "problem": "p", "steps": STEPS, "first_error": 1}
        assert one(raw) == JudgeRow("a", "p", tuple(STEPS), 1, "s")

    @pytest.mark.parametrize("none", [-1, None, -1.0, float("nan")])
    def test_no_error(self, none: Any) -> None:
        row = one({"problem": "p", "steps": STEPS, "first_error": none})
        assert (row.first_error, row.row_id) == (-1, "7")

    def test_process_bench(self) -> None:
        raw = {
            "id": "gsm8k-0", "generator": "someone", "problem": "p", "steps": STEPS,
            "final_answer_correct": False, "label": 2,
        }  # fmt: skip
        assert one(raw, source="gsm8k") == JudgeRow("gsm8k-0", "p", tuple(STEPS), 2, "gsm8k")

    @pytest.mark.parametrize(("label", "index"), [("2", 1), (1, 0), ("N/A", -1), (None, -1)])
    def test_mr_gsm8k_counts_from_one(self, label: Any, index: int) -> None:
        raw = {
            "uuid": "u", "question": "p", "question_type": "POT",
            "model_output_steps": [f"Step {i}: {s}" for i, s in enumerate(STEPS, 1)],
            "model_output_solution_first_error_step": label,
            "ground_truth_solution": "the reference",
        }  # fmt: skip
        assert one(raw) == JudgeRow("u", "p", tuple(STEPS), index, "POT")
        assert one(raw, context=["nothing", "ground_truth_solution"]).context == "the reference"

    def test_prm_bench_gives_a_wrong_row_and_a_right_one(self) -> None:
        raw = {
            "idx": "i", "classification": "confidence", "original_question": "p",
            "modified_question": "q", "original_process": ["a", "b"],
            "modified_process": STEPS, "error_steps": [3, 2],
        }  # fmt: skip
        assert judge_rows(raw, "f", 0) == [
            JudgeRow("i", "q", tuple(STEPS), 1, "confidence"),
            JudgeRow("i/original", "p", ("a", "b"), -1, "confidence"),
        ]

    @pytest.mark.parametrize(("label", "index"), [(0, 0), (2, 2), (None, -1)])
    def test_big_bench_mistake(self, label: Any, index: int) -> None:
        raw = {"input": "p", "steps": STEPS, "answer": "21", "target": "20", "mistake_index": label}
        assert one(raw).first_error == index

    def test_numbers_in_front_stay_where_not_all_steps_have_theirs(self) -> None:
        steps = ["Step 1: a", "Step 3: b"]
        assert one({"problem": "p", "steps": steps, "first_error": 0}).steps == tuple(steps)

    @given(st.integers(1, 12), st.data())
    def test_an_index_within_the_steps_is_kept_in_every_shape(
        self, count: int, data: st.DataObject
    ) -> None:
        index = data.draw(st.integers(-1, count - 1))
        steps = ["x"] * count
        assert one({"problem": "p", "steps": steps, "first_error": index}).first_error == index
        assert one({"problem": "p", "steps": steps, "label": index}).first_error == index
        raw = {
            "question": "p",
            "model_output_steps": steps,
            "model_output_solution_first_error_step": index + 1 if index >= 0 else "N/A",
        }
        assert one(raw).first_error == index


class TestBadRows:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                {"first_error": 3},
                r"x\.jsonl:2: field 'first_error' is 3, but the solution's 3 step",
            ),
            ({"first_error": -2}, r"x\.jsonl:2: field 'first_error' is -2"),
            ({"first_error": True}, "is the number of a step, not True"),
            ({"first_error": "late"}, "is the number of a step, not 'late'"),
            ({"first_error": 1.5}, "is the number of a step, not 1.5"),
            ({"steps": []}, r"x\.jsonl:2: field 'steps' holds no step"),
            ({"steps": "one text"}, "field 'steps' is a list of texts, not str"),
            ({"steps": ["a", None], "first_error": 0}, r"step 1 \(from 0\) is None"),
            ({"steps": ["", " "], "first_error": 0}, "holds blank steps alone"),
            ({"problem": " "}, r"x\.jsonl:2: no problem | question"),
            ({"id": "a"}, r"x\.jsonl:2: row id 'a' stands at .*x\.jsonl:1 already"),
        ],
    )
    def test_named_with_file_line_and_field(
        self, tmp_path: Path, change: dict[str, Any], message: str
    ) -> None:
        good = {"id": "a", "problem": "p", "steps": STEPS, "first_error": 0}
        data = write(tmp_path / "x.jsonl", [good, {**good, "id": "b", **change}])
        with pytest.raises(TaskError, match=message):
            load_judge_rows(data)

    def test_no_label_names_what_is_there(self) -> None:
        with pytest.raises(
            TaskError, match=r"no label: looked for first_error .* has problem, steps"
        ):
            judge_rows({"problem": "p", "steps": STEPS}, "f:1", 0)

    def test_no_json_and_no_object(self, tmp_path: Path) -> None:
        (tmp_path / "x.jsonl").write_text('{"problem": \n')
        with pytest.raises(TaskError, match=r"x\.jsonl:1: no JSON"):
            load_judge_rows(str(tmp_path / "x.jsonl"))
        with pytest.raises(TaskError, match=r"y\.jsonl:1: a row is an object, not list"):
            load_judge_rows(write(tmp_path / "y.jsonl", [[1]]))

    def test_files_that_are_not_there_or_of_another_kind(self, tmp_path: Path) -> None:
        with pytest.raises(TaskError, match=r"--data: no\.jsonl does not exist"):
            load_judge_rows("no.jsonl")
        (tmp_path / "x.csv").write_text("a,b\n")
        with pytest.raises(TaskError, match=r"neither \.jsonl, \.json nor \.parquet"):
            load_judge_rows(str(tmp_path / "x.csv"))
        with pytest.raises(TaskError, match="holds no rows"):
            load_judge_rows(write(tmp_path / "empty.jsonl", []))

    def test_an_error_of_prm_bench_past_the_end(self) -> None:
        raw = {"idx": "i", "question": "p", "modified_process": ["a"], "error_steps": [2]}
        with pytest.raises(TaskError, match=r"f: field 'error_steps' is 2, .* are 1 to 1"):
            judge_rows(raw, "f", 0)


class TestLimit:
    def test_a_sample_over_the_whole_file_in_its_order(self, tmp_path: Path) -> None:
        raw = [{"problem": str(i), "steps": ["a"], "first_error": -1} for i in range(100)]
        data = write(tmp_path / "x.jsonl", raw)
        rows = load_judge_rows(data, limit=20, seed=1)
        numbers = [int(row.row_id) for row in rows]
        assert numbers == sorted(numbers) and len(set(numbers)) == 20
        assert numbers[-1] > 60, "the sample reaches into the file"
        assert load_judge_rows(data, limit=20, seed=1) == rows
        assert load_judge_rows(data, limit=20, seed=2) != rows
        assert len(load_judge_rows(data, limit=1000)) == 100
        with pytest.raises(TaskError, match="--limit must be at least 1"):
            load_judge_rows(data, limit=0)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared benchmark files are not here")
class TestPublished:
    @pytest.mark.parametrize(
        ("name", "rows", "wrong"), [("bigbench_mistake", 1865, 1460), ("prmbench_p1", 597, 360)]
    )
    def test_every_row_is_read(self, name: str, rows: int, wrong: int) -> None:
        found = load_judge_rows(str(SHARED / f"{name}.jsonl"))
        assert (len(found), sum(row.first_error >= 0 for row in found)) == (rows, wrong)
