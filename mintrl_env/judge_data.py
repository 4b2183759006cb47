"""Benchmarks of judges as rows of (problem, steps, index of the first wrong step or -1).

Rows are recognised by their fields, so that the published files work as they are:

    ours              problem, steps, first_error (0-based; -1 or null: no error); id, source
    ProcessBench      problem, steps, label (0-based; -1: no error); id, generator
    MR-GSM8K          question, model_output_steps, model_output_solution_first_error_step (1-based;
                      "N/A": no error); uuid, question_type
    PRMBench          modified_process, error_steps (1-based), and original_process: two rows
    BIG-Bench-Mistake input, steps, mistake_index (0-based; null: no error)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mintrl_env.errors import MissingExtraError, TaskError
from mintrl_env.task_files import READERS

NO_ERROR = -1


@dataclass(frozen=True, slots=True)
class JudgeRow:
    """One solution whose first wrong step is known.

    Attributes:
        row_id: unique within its set.
        problem: the problem's text.
        steps: the solution's steps, at least one that is not blank.
        first_error: 0-based index of the first wrong step, or -1.
        source: the part of the benchmark that it belongs to, for figures by source.
        context: a reference solution, for judges that are shown one; None unless it was asked for.
    """

    row_id: str
    problem: str
    steps: tuple[str, ...]
    first_error: int
    source: str = ""
    context: str | None = None


def load_judge_rows(
    data: str,
    *,
    split: str | None = None,
    subset: str | None = None,
    limit: int | None = None,
    seed: int = 0,
    context: Sequence[str] = (),
) -> list[JudgeRow]:
    """Read a benchmark from a .jsonl, .json or .parquet file, or a dataset id on the Hub.

    Args:
        split: of a Hub id; None: all of them.
        limit: so many rows, drawn by `seed` (files are often sorted), in the file's order.
        context: names of fields with a reference solution; the first one that a row has is taken.
            Without a name nobody is shown a reference.

    Raises:
        TaskError: a row that cannot be used, with file, line and field; no rows; a repeated id; a
            source that cannot be read.
    """
    if limit is not None and limit < 1:
        raise TaskError(f"--limit must be at least 1, not {limit}")
    rows: list[JudgeRow] = []
    seen: dict[str, str] = {}
    try:
        for number, (where, part, raw) in enumerate(_raw_rows(data, subset, split)):
            for row in judge_rows(raw, where, number, source=part, context=context):
                if row.row_id in seen:
                    raise TaskError(
                        f"{where}: row id {row.row_id!r} stands at {seen[row.row_id]} already"
                    )
                seen[row.row_id] = where
                rows.append(row)
    except OSError as error:
        raise TaskError(f"--data: {data} cannot be read: {error.strerror or error}") from error
    if not rows:
        raise TaskError(f"--data: {data} holds no rows")
    if limit is not None and limit < len(rows):
        chosen = np.random.default_rng([seed, 0x1D6E]).choice(len(rows), limit, replace=False)
        rows = [rows[i] for i in sorted(chosen)]
    return rows


def judge_rows(
    raw: Any, where: str, number: int, *, source: str = "", context: Sequence[str] = ()
) -> list[JudgeRow]:
    """One raw row as rows: two for PRMBench's pairs, else one.

    Args:
        where: file and line, for errors.
        number: the row's index, its id where it has none.
        source: of rows that name none.

    Raises:
        TaskError: naming `where` and the field.
    """
    if not isinstance(raw, Mapping):
        raise TaskError(f"{where}: a row is an object, not {type(raw).__name__}")
    fields = _Fields(raw, where)
    reference = fields.optional(*context)
    if "first_error" in raw:
        shape = _Shape("first_error", "steps", ("problem", "question"), ("id", "row_id"))
    elif "model_output_solution_first_error_step" in raw:
        shape = _Shape(
            "model_output_solution_first_error_step",
            "model_output_steps",
            ("question",),
            ("uuid",),
            first=1,
            source="question_type",
        )
    elif "mistake_index" in raw:
        shape = _Shape("mistake_index", "steps", ("input", "problem"), ("id",))
    elif "error_steps" in raw:
        return _prm_bench(fields, number, reference)
    elif "label" in raw:
        shape = _Shape("label", "steps", ("problem", "prompt"), ("id",))
    else:
        raise TaskError(
            f"{where}: no label: looked for first_error | label | mistake_index | error_steps | "
            f"model_output_solution_first_error_step; the row has {', '.join(sorted(map(str, raw)))}"
        )
    steps = fields.steps(shape.steps)
    row = JudgeRow(
        row_id=fields.optional(*shape.row_id) or str(number),
        problem=fields.text(*shape.problem),
        steps=steps,
        first_error=fields.index(shape.label, len(steps), shape.first),
        source=fields.optional(shape.source) or source,
        context=reference,
    )
    return [row]


@dataclass(frozen=True, slots=True)
class _Shape:
    """The fields of a published format; `first` is the number of its first step."""

    label: str
    steps: str
    problem: tuple[str, ...]
    row_id: tuple[str, ...]
    first: int = 0
    source: str = "source"


def _prm_bench(fields: _Fields, number: int, reference: str | None) -> list[JudgeRow]:
    name = fields.optional("idx", "id") or str(number)
    source = fields.optional("classification") or ""
    steps = fields.steps("modified_process")
    marked = fields.raw["error_steps"]
    if not isinstance(marked, (list, tuple, np.ndarray)) or not len(marked):
        raise TaskError(f"{fields.where}: field 'error_steps' is a list of steps, not {marked!r}")
    numbers = [fields.number("error_steps", item, len(steps), 1) for item in marked]
    question = fields.text("modified_question", "question", "original_question")
    wrong = JudgeRow(name, question, steps, min(numbers), source, reference)
    if fields.raw.get("original_process") is None:
        return [wrong]
    problem = fields.text("original_question", "question", "modified_question")
    right = fields.steps("original_process")
    return [wrong, JudgeRow(f"{name}/original", problem, right, NO_ERROR, source, reference)]


class _Fields:
    """A raw row's fields, with errors that say where."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def text(self, *names: str) -> str:
        text = self.optional(*names)
        if text is None:
            raise TaskError(
                f"{self.where}: no {' | '.join(names)}: a row needs its problem as text"
            )
        return text

    def optional(self, *names: str) -> str | None:
        """The first of the fields that is there and not blank, as text."""
        for name in names:
            value = self.raw.get(name)
            if isinstance(value, (str, int)) and not isinstance(value, bool) and str(value).strip():
                return str(value)
        return None

    def steps(self, name: str) -> tuple[str, ...]:
        given = self.raw.get(name)
        if isinstance(given, str) or not isinstance(given, (list, tuple, np.ndarray)):
            raise TaskError(
                f"{self.where}: field {name!r} is a list of texts, not {type(given).__name__}"
            )
        if not len(given):
            raise TaskError(f"{self.where}: field {name!r} holds no step")
        for place, step in enumerate(given):
            if not isinstance(step, str):
                raise TaskError(f"{self.where}: field {name!r}: step {place} (from 0) is {step!r}")
        # Published rows hold a blank step now and then, which keeps its number.
        if not any(step.strip() for step in given):
            raise TaskError(f"{self.where}: field {name!r} holds blank steps alone")
        return _without_numbers([str(step) for step in given])

    def index(self, name: str, count: int, first: int) -> int:
        """A label as a 0-based index or -1."""
        value = self.raw[name]
        if isinstance(value, str) and value.strip().upper() in ("N/A", "NA", "NONE", ""):
            value = None
        if value is None or (isinstance(value, (float, np.floating)) and value != value):
            return NO_ERROR
        return self.number(name, value, count, first)

    def number(self, name: str, value: Any, count: int, first: int) -> int:
        if isinstance(value, str) and re.fullmatch(r"\s*-?\d{1,9}\s*", value):
            value = int(value)
        if isinstance(value, (float, np.floating)) and float(value).is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TaskError(f"{self.where}: field {name!r} is the number of a step, not {value!r}")
        if int(value) == -1 and first == 0:
            return NO_ERROR
        if not first <= int(value) < first + count:
            none = ", or -1 for none" if first == 0 else ""
            raise TaskError(
                f"{self.where}: field {name!r} is {int(value)}, but the solution's {count} step(s) "
                f"are {first} to {first + count - 1}{none}"
            )
        return int(value) - first


def _without_numbers(steps: Sequence[str]) -> tuple[str, ...]:
    """The steps without `Step 3:` in front, where all of them carry their own number."""
    matches = [re.match(rf"\s*step\s+{i}\s*[:.]\s*(?=\S)", s, re.I) for i, s in enumerate(steps, 1)]
    if not all(matches):
        return tuple(steps)
    return tuple(s[m.end() :] for s, m in zip(steps, matches, strict=True) if m is not None)


def _raw_rows(
    data: str, subset: str | None, split: str | None
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Where a row stands, the part of the set that it is in, and the row."""
    path = Path(data).expanduser()
    suffix = path.suffix.lower()
    if suffix in READERS:
        if not path.exists():
            raise TaskError(f"--data: {data} does not exist (looked in {Path.cwd()})")
        yield from ((where, "", row) for where, row in READERS[suffix](path))
    elif path.exists():
        raise TaskError(f"--data: {data} is neither .jsonl, .json nor .parquet")
    else:
        yield from _hub_rows(data, subset, split)


def _hub_rows(
    name: str, subset: str | None, split: str | None
) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("datasets", "trl", "reading a benchmark from the Hub") from error
    try:
        loaded = datasets.load_dataset(name, subset, split=split)
    except Exception as error:
        raise TaskError(
            f"--data: {name!r} is no file here, and as a dataset on the Hub it could not be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error
    parts = {split: loaded} if split is not None else dict(loaded)
    for part, rows in parts.items():
        yield from ((f"{name}[{part}] row {i}", str(part), row) for i, row in enumerate(rows))
