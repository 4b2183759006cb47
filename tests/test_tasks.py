"""Rows -> tasks: what is read, and that every bad row is named by file, line, field, next step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from mintrl_env.errors import TaskError
from mintrl_env.tasks import TaskColumns, load_tasks, sum_tasks
from mintrl_env.types import Task

GSM8K_REGEX = r"####\s*(.+)"
GSM8K = {"question": "How many clips?", "answer": "48/2 = <<48/2=24>>24.\n#### 72"}
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data" / "math"


def write(path: Path, *rows: Any) -> str:
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tasks.jsonl"


PLAIN = TaskColumns()


def one(row: Any, columns: TaskColumns = PLAIN) -> Task:
    return columns.task(row, "f:1", 0)


# --- what is read


def test_a_row_with_everything() -> None:
    row = {
        "id": "a/1",
        "problem": " 1 + 1? ",
        "answer": " 2 ",
        "solution": "Add.",
        "system_prompt": "",
        "level": 3,
        "extra": None,
    }
    assert one(row, TaskColumns(verifier="v")) == Task(
        "a/1",
        " 1 + 1? ",
        "2",
        "v",
        context="Add.",
        system_prompt="",
        metadata={"level": 3, "extra": None},
    )


def test_the_first_present_alternative_counts_and_the_others_are_kept() -> None:
    columns = TaskColumns({"prompt": ["question", "problem"], "answer": "gold"})
    assert one({"problem": "p", "gold": 1}, columns).prompt == "p"
    both = one({"question": None, "problem": "p", "prompt": "q", "gold": 1}, columns)
    assert both.prompt == "p"
    assert both.metadata == {"question": None, "prompt": "q"}
    assert one({"question": "q", "problem": "p", "gold": 1}, columns).metadata == {"problem": "p"}
    assert one({"question": "q", "gold": 1, "answer": 2}, columns).metadata == {"answer": 2}


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        (0, "0"),
        (-3, "-3"),
        (10**30, str(10**30)),
        (0.5, "0.5"),
        (18.0, "18"),  # a column of integers with gaps
        (0.0, "0"),
        (1e300, "1e+300"),
        (True, "True"),
        (False, "False"),
        (Decimal("1.50"), "1.50"),
        (np.int64(7), "7"),
        (np.float32(0.5), "0.5"),
        (np.float64(3.0), "3"),
        ("0", "0"),
        ("\\frac{1}{2}\n", "\\frac{1}{2}"),
    ],
)
def test_answers_of_every_kind(answer: Any, gold: str) -> None:
    task = one({"prompt": "p", "answer": answer})
    assert (task.answer, task.context) == (gold, None)


def test_ids_and_context_that_are_numbers() -> None:
    task = one({"prompt": "p", "answer": "1", "id": 0, "solution": 12})
    assert (task.task_id, task.context) == ("0", "12")
    assert one({"prompt": "p", "answer": "1", "id": 3.0}).task_id == "3"
    assert TaskColumns().task({"prompt": "p", "answer": "1", "id": " "}, "f", 4).task_id == "4"
    assert TaskColumns().task({"prompt": "p", "answer": "1"}, "f", 5).task_id == "5"


def test_the_hubs_gsm8k() -> None:
    columns = TaskColumns({"prompt": ["question", "problem"]}, GSM8K_REGEX)
    task = one(GSM8K, columns)
    assert (task.prompt, task.answer) == ("How many clips?", "72")
    assert task.context == GSM8K["answer"]  # a worked solution, for the self-judge
    assert task.metadata == {}
    # The same expression on a row whose answer is the gold already.
    task = one({"problem": "p", "answer": "72", "solution": "s"}, columns)
    assert (task.answer, task.context) == ("72", "s")
    # A context of the row's own stays.
    assert one({**GSM8K, "solution": "own"}, columns).context == "own"


@pytest.mark.parametrize(
    ("regex", "given", "gold"),
    [
        (r"####\s*(.+)", "a\n####   7 ", "7"),
        (r"\d+", "about 42 of 50", "42"),  # no group: the match
        (r"(?:#### (\w+))|(?:= (\w+))", "x = 9", "9"),  # the first group takes no part
        (r"(a)|\d+", "17", "17"),  # no group takes part
        (r"####\s*(.+)", "no mark 8", "no mark 8"),
        (r"(?s)boxed\{(.*)\}", "boxed{1\n2}", "1\n2"),
        (r"(\d+)", 314, "314"),
    ],
)
def test_answer_regex(regex: str, given: Any, gold: str) -> None:
    assert one({"prompt": "p", "answer": given}, TaskColumns(answer_regex=regex)).answer == gold


@pytest.mark.parametrize("given", ["  18 ", "18", "18\n"])
@pytest.mark.parametrize("regex", [None, r"(\d+)", "x"])
def test_white_space_around_an_answer_is_no_worked_solution(given: str, regex: str | None) -> None:
    task = one({"prompt": "p", "answer": given}, TaskColumns(answer_regex=regex))
    assert (task.answer, task.context) == ("18", None)


def test_tests_as_object_and_as_json_text() -> None:
    tests = {"type": "stdin", "inputs": ["1"], "outputs": ["2"]}
    for given in (tests, json.dumps(tests)):
        task = one({"prompt": "p", "tests": given})
        assert (task.tests, task.answer) == (tests, None)
    for nothing in (None, {}, [], "", "null", "{}"):
        assert one({"prompt": "p", "answer": 1, "tests": nothing}).tests is None
    assert one({"prompt": "p", "io": tests}, TaskColumns({"tests": "io"})).tests == tests


def test_chat_messages() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "Q"}]
    task = one({"prompt": messages, "answer": "1"})
    assert task.prompt == tuple(messages)
    assert task.prompt_text == "s\n\nQ"
    called = [
        {"role": "assistant", "content": None, "tool_calls": [1], "name": None},
        *messages,
    ]
    task = one({"prompt": np.array(called, dtype=object), "answer": "1"})
    assert task.prompt[0] == {"role": "assistant", "content": None, "tool_calls": [1]}


def test_other_peoples_columns_of_our_names_are_metadata() -> None:
    row = {"prompt": "p", "answer": "1", "solution": {"steps": []}, "id": [1], "system_prompt": {}}
    task = one(row)
    assert (task.context, task.task_id, task.system_prompt) == (None, "0", None)
    assert set(task.metadata) == {"solution", "id", "system_prompt"}
    lenient = TaskColumns(needs_answer=False)
    task = one({"prompt": "p", "answer": ["1", "one"]}, lenient)
    assert (task.answer, task.metadata) == (None, {"answer": ["1", "one"]})
    row = {"prompt": "p", "answer": 1, "solution": "s"}
    assert one(row, TaskColumns({"context": []})).context is None


# --- what is refused


BAD_ROWS: list[tuple[Any, list[str]]] = [
    ([1], ["an object", "a list"]),
    ("x", ["an object", "text"]),
    (None, ["an object", "null"]),
    ({}, ["no prompt", "prompt | problem | question", "the row is empty", "tasks.columns.prompt"]),
    ({"text": "p", "answer": "1"}, ["no prompt", "the row has answer, text"]),
    ({"prompt": None, "answer": "1"}, ["no prompt", "prompt (null)"]),
    ({"prompt": " \n", "answer": "1"}, ["'prompt'", "empty"]),
    ({"problem": 5, "answer": "1"}, ["'problem'", "text or chat messages", "int"]),
    ({"prompt": [], "answer": "1"}, ["'prompt'", "no messages"]),
    ({"prompt": ["hi"], "answer": "1"}, ["message 0", "role and content", "'hi'"]),
    ({"prompt": [{"role": "user"}, 1], "answer": "1"}, ["message 0", "content"]),
    ({"prompt": [{"role": "user", "content": [{"type": "text"}]}]}, ["message 0", "as text"]),
    ({"prompt": [{"role": 1, "content": "x"}]}, ["message 0"]),
    ({"prompt": [{"role": "user", "content": " "}], "answer": "1"}, ["only empty messages"]),
    ({"prompt": [{"role": "user", "content": None}], "answer": "1"}, ["only empty messages"]),
    ({"prompt": "p"}, ["no answer", "looked for answer", "has prompt", "tasks.columns.answer"]),
    ({"prompt": "p", "answer": None}, ["no answer", "answer (null)"]),
    ({"prompt": "p", "answer": float("nan")}, ["no answer"]),
    ({"prompt": "p", "answer": ""}, ["no answer", "'answer' is empty"]),
    ({"prompt": "p", "answer": " "}, ["no answer", "'answer' is empty"]),
    ({"prompt": "p", "answer": ["1"]}, ["no answer", "'answer'", "a list"]),
    ({"prompt": "p", "answer": {"a": 1}}, ["no answer", "an object"]),
    ({"prompt": "p", "tests": []}, ["no answer", "has prompt, tests"]),
    ({"prompt": "p", "tests": "[1"}, ["'tests'", "no JSON"]),
    ({"prompt": "p", "tests": "[" * 100_000}, ["'tests'", "no JSON"]),
    ({"prompt": "p", "tests": ["assert"]}, ["'tests'", "an object", "a list", "columns.tests"]),
    ({"prompt": "p", "answer": "1", "tests": "3"}, ["'tests'", "an object", "int"]),
]


@pytest.mark.parametrize(("row", "parts"), BAD_ROWS)
def test_bad_rows_are_named(file: Path, row: Any, parts: list[str]) -> None:
    source = write(file, {"prompt": "p", "answer": "1"}, b"", row)
    with pytest.raises(TaskError) as caught:
        load_tasks(source)
    for part in [f"{file}:3: ", *parts]:
        assert part in str(caught.value)


def test_a_column_that_was_named_must_be_usable() -> None:
    for name, value in (
        ("context", ["a"]),
        ("task_id", {}),
        ("answer", [1]),
        ("system_prompt", []),
    ):
        columns = TaskColumns({name: "c"})
        with pytest.raises(TaskError, match=rf"f:1: field 'c' \({name}\).*tasks\.columns\.{name}"):
            one({"prompt": "p", "answer": "1", "c": value}, columns)


def test_a_regex_that_leaves_nothing() -> None:
    with pytest.raises(TaskError, match=r"f:1: no answer: answer_regex .* cuts nothing out of '7'"):
        one({"prompt": "p", "answer": "7"}, TaskColumns(answer_regex=r"7(\s*)"))


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (b'{"prompt": "p", ', ["no JSON", "at character"]),
        (b"{'prompt': 'p'}", ["no JSON"]),
        (b'{"prompt": "\xff", "answer": 1}', ["not UTF-8 (byte 12)"]),
        (b'{"prompt": "\xed\xa0\x80", "answer": 1}', ["not UTF-8"]),
        (b'{"answer": ' + b"9" * 5000 + b"}", ["no JSON that can be read"]),
        (b"[" * 200_000, ["no JSON that can be read"]),
        (b"\x00", ["no JSON"]),
    ],
)
def test_lines_that_are_no_json(file: Path, line: bytes, parts: list[str]) -> None:
    source = write(file, {"prompt": "p", "answer": "1"}, line)
    with pytest.raises(TaskError) as caught:
        load_tasks(source)
    for part in [f"{file}:2: ", *parts]:
        assert part in str(caught.value)


def test_utf16_is_named_as_such(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.json"):
        path = tmp_path / name
        path.write_text('{"prompt": "p", "answer": 1}', encoding="utf-16")
        with pytest.raises(TaskError, match="not UTF-8"):
            load_tasks(str(path))


def test_bom_blank_lines_crlf_and_no_last_newline(file: Path) -> None:
    file.write_bytes(
        b'\xef\xbb\xbf{"prompt": "a\xc3\xa9", "answer": 1}\r\n\r\n  \t\n'
        b'{"prompt": "b\xe2\x80\xa8c", "answer": 2}'  # U+2028 ends no line
    )
    first, second = load_tasks(str(file))
    assert (first.prompt, first.task_id) == ("aé", "0")
    assert (second.prompt, second.task_id) == ("b\u2028c", "1")
    file.write_bytes(b'\xef\xbb\xbf\r\n{"prompt": "a", "answer": 1}')
    assert len(load_tasks(str(file))) == 1


def test_lone_surrogates_become_replacement_characters(file: Path) -> None:
    row = (
        b'{"id": "\\ud800", "prompt": "x\\udc00y \\ud83d\\ude00", "answer": "\\ud800", '
        b'"more": [{"\\ud800": "\\ud800"}]}'
    )
    (task,) = load_tasks(write(file, row))
    assert (task.task_id, task.prompt, task.answer) == ("\ufffd", "x\ufffdy 😀", "\ufffd")
    assert task.metadata == {"more": [{"\ufffd": "\ufffd"}]}
    json.dumps(task.metadata, ensure_ascii=False).encode()


def test_repeated_ids_are_named_by_both_places(file: Path) -> None:
    row = {"id": 7, "prompt": "p", "answer": 1}
    source = write(file, row, {**row, "id": 8}, b"", {**row, "id": "7"})
    with pytest.raises(TaskError) as caught:
        load_tasks(source)
    assert str(caught.value) == f"{file}:4: task id '7' stands at {file}:1 already"
    # A row without an id takes its number, which another may have as its own.
    source = write(file, {"id": "1", "prompt": "p", "answer": 1}, {"prompt": "p", "answer": 1})
    with pytest.raises(TaskError, match="task id '1' stands at"):
        load_tasks(source)


def test_limit_looks_at_nothing_behind_it(file: Path) -> None:
    source = write(file, *({"prompt": f"p{i}", "answer": i} for i in range(3)), b"not json")
    assert [task.prompt for task in load_tasks(source, limit=3)] == ["p0", "p1", "p2"]
    with pytest.raises(TaskError, match=":4: no JSON"):
        load_tasks(source, limit=4)
    for limit in (0, -1):
        with pytest.raises(TaskError, match=r"tasks\.limit must be at least 1"):
            load_tasks(source, limit=limit)


def test_files_that_hold_nothing(tmp_path: Path) -> None:
    for name, content in (("a.jsonl", "\n\n"), ("b.jsonl", ""), ("a.json", "[]")):
        (tmp_path / name).write_text(content)
        with pytest.raises(TaskError, match=f"{name} holds no rows"):
            load_tasks(str(tmp_path / name))


def test_places_that_are_no_file(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"none\.jsonl does not exist \(looked in /"):
        load_tasks(str(tmp_path / "none.jsonl"))
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(TaskError, match=r"folder\.jsonl cannot be read: Is a directory"):
        load_tasks(str(tmp_path / "folder.jsonl"))
    (tmp_path / "folder.parquet").mkdir()
    with pytest.raises(TaskError, match=r"folder\.parquet"):
        load_tasks(str(tmp_path / "folder.parquet"))
    (tmp_path / "rows.csv").write_text("prompt,answer\n")
    with pytest.raises(TaskError, match=r"neither \.jsonl, \.json nor \.parquet"):
        load_tasks(str(tmp_path / "rows.csv"))
    (tmp_path / "torn.parquet").write_bytes(b"PAR1")
    with pytest.raises(TaskError, match=r"torn\.parquet: no Parquet file"):
        load_tasks(str(tmp_path / "torn.parquet"))
    (tmp_path / "UP.JSONL").write_text('{"prompt": "p", "answer": 1}')
    assert len(load_tasks(str(tmp_path / "UP.JSONL"))) == 1


def test_json_lists(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf[{"prompt": "p\\ud800", "answer": 0}, {"prompt": "q"}]')
    assert load_tasks(str(path), limit=1)[0].prompt == "p\ufffd"
    with pytest.raises(TaskError) as caught:
        load_tasks(str(path))
    assert str(caught.value).startswith(f"{path}[1]: no answer")
    path.write_text('{"data": []}')
    with pytest.raises(TaskError, match=r"holds a list; for lines use \.jsonl"):
        load_tasks(str(path))
    path.write_text('[{"prompt": ')
    with pytest.raises(TaskError, match="no JSON"):
        load_tasks(str(path))


def test_parquet_gives_what_jsonl_gives(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {
            "id": "a",
            "prompt": [
                {"role": "user", "content": "Q"},
                {"role": "assistant", "content": None, "name": "n"},
            ],
            "answer": 0,
            "solution": None,
            "gold": None,
        },
        {"id": "b", "prompt": [{"role": "user", "content": "R"}], "answer": None, "gold": "7"},
    ]
    columns = TaskColumns({"answer": ["answer", "gold"]})
    by_line = load_tasks(write(tmp_path / "t.jsonl", *rows), columns)
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    by_table = load_tasks(str(tmp_path / "t.parquet"), columns)
    assert [t.answer for t in by_table] == ["0", "7"]
    assert [(t.task_id, t.prompt, t.answer, t.context) for t in by_table] == [
        (t.task_id, t.prompt, t.answer, t.context) for t in by_line
    ]


def test_parquet_types(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    table = pa.table(
        {
            "id": pa.array([1, 2], pa.uint8()),
            "problem": pa.array(["p", "q"]).dictionary_encode(),
            "answer": pa.array([18.0, None], pa.float32()),
            "nothing": pa.nulls(2),
            "tests": pa.array([None, {"type": "call"}]),
            "price": pa.array([Decimal("1.5"), None]),
        }
    )
    parquet.write_table(table, path)
    first, second = load_tasks(str(path))
    assert (first.task_id, first.prompt, first.answer, first.tests) == ("1", "p", "18", None)
    assert (second.answer, second.tests) == (None, {"type": "call"})
    assert first.metadata == {"nothing": None, "price": Decimal("1.5"), "tests": None}
    parquet.write_table(pa.table({"problem": ["p", None], "answer": ["1", "2"]}), path)
    with pytest.raises(TaskError, match=r"t\.parquet row 1: no prompt.*problem \(null\)"):
        load_tasks(str(path))
    parquet.write_table(pa.table({"problem": ["p"], "answer": [float("nan")]}), path)
    with pytest.raises(TaskError, match="row 0: no answer"):
        load_tasks(str(path))


@pytest.mark.parametrize("ending", [".jsonl", ".json"])
def test_a_large_file_is_not_held_twice(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"t{ending}"
    lines = [json.dumps({"prompt": "x" * 100_000, "answer": i}) for i in range(100)]
    path.write_text("\n".join(lines) if ending == ".jsonl" else "[" + ",\n".join(lines) + "]")
    tracemalloc.start()
    try:
        tasks = load_tasks(str(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(len(str(task.prompt)) for task in tasks) == 10_000_000
    # The prompts themselves are 10 MB; a JSON list has its text besides, lines have not.
    assert peak < (12e6 if ending == ".jsonl" else 22e6)


def test_columns_are_checked() -> None:
    with pytest.raises(TaskError, match="unknown field 'promt', did you mean 'prompt'"):
        TaskColumns({"promt": "x"})
    with pytest.raises(TaskError, match="known fields: task_id, prompt"):
        TaskColumns({"zzz": "x"})
    for bad in (None, 3, [3], {"a": 1}):
        with pytest.raises(TaskError, match=r"columns\.answer: a column's name"):
            TaskColumns({"answer": bad})  # type: ignore[dict-item]
    with pytest.raises(TaskError, match=r"columns\.prompt: a task needs a prompt"):
        TaskColumns({"prompt": []})
    with pytest.raises(TaskError, match="answer_regex '\\(' is no regex"):
        TaskColumns(answer_regex="(")


def test_a_hub_id_offline_is_a_task_error(tmp_path: Path) -> None:
    # In a process of its own: the library reads the variable when it is imported.
    program = (
        "from mintrl_env.errors import TaskError\n"
        "from mintrl_env.tasks import load_tasks\n"
        "try:\n    load_tasks('mintrl-nobody/no-such-set')\n"
        "except TaskError as error:\n    print('TaskError', error)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "TaskError tasks.path: 'mintrl-nobody/no-such-set' is no file here" in done.stdout


def test_sums_are_right_repeatable_and_differ_by_split() -> None:
    tasks = sum_tasks(count=20, seed=3)
    assert tasks == sum_tasks(count=20, seed=3)
    assert tasks != sum_tasks(count=20, seed=4)
    assert [t.prompt for t in tasks] != [t.prompt for t in sum_tasks("test", count=20, seed=3)]
    assert len({task.task_id for task in tasks}) == 20
    for task in tasks:
        a, b, c = map(int, str(task.prompt).removesuffix(" = ?\n").split(" + "))
        assert task.answer == str(a + b + c)
        assert task.context == f"{a} + {b} = {a + b}\n\n{a + b} + {c} = {a + b + c}\n\n"


# --- real data


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data/math is not here")
def test_shared_math_reads_as_it_is() -> None:
    files = sorted(SHARED.glob("*.jsonl"))
    assert files
    columns = TaskColumns({"prompt": ["question", "problem"]}, GSM8K_REGEX)
    for path in files:
        with path.open("rb") as lines:
            rows = [json.loads(line) for line in lines]
        tasks = load_tasks(str(path), columns)
        assert len(tasks) == len(rows) > 0
        for task, row in zip(tasks, rows, strict=True):
            assert task.answer == row["answer"].strip() and task.prompt == row["problem"]
            assert task.task_id == row["id"]
            assert task.context == row.get("solution")


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data/math is not here")
def test_gold_survives_in_the_hubs_form_of_gsm8k() -> None:
    with (SHARED / "gsm8k_test.jsonl").open("rb") as lines:
        rows = [json.loads(line) for line in lines]
    columns = TaskColumns(answer_regex=GSM8K_REGEX)
    for row in rows:
        hub = {"question": row["problem"], "answer": row["solution"]}
        task = columns.task(hub, "f", 0)
        assert task.answer is not None
        assert task.answer.replace(",", "") == row["answer"].replace(",", "")
        assert task.context == row["solution"]
