"""Task rows -> Task: JSONL, Parquet, a Hub id, or a procedural generator by name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mintrl_env.errors import MissingExtraError, TaskError
from mintrl_env.types import Task

_FIELDS = ("task_id", "prompt", "answer", "context", "tests", "system_prompt")
_DEFAULT_COLUMNS: dict[str, tuple[str, ...]] = {
    "task_id": ("task_id", "id"),
    "prompt": ("prompt", "problem", "question"),
    "answer": ("answer",),
    "context": ("context", "solution"),
    "tests": ("tests",),
    "system_prompt": ("system_prompt",),
}


@dataclass(frozen=True, slots=True)
class TaskColumns:
    """How rows become tasks.

    Attributes:
        columns: our field -> the row's column, or alternatives of which the first present is
            taken: `{"prompt": ["question", "problem"]}`. Unnamed fields keep their defaults.
        answer_regex: applied to the answer; its first group (or the match) is the gold where it
            matches, else the whole field.
        verifier: the verifier of every task.
        needs_answer: refuse a row without an answer or tests.
    """

    columns: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    answer_regex: str | None = None
    verifier: str = "math"
    needs_answer: bool = True

    def __post_init__(self) -> None:
        unknown = sorted(set(self.columns) - set(_FIELDS))
        if unknown:
            raise TaskError(
                f"columns: unknown field {unknown[0]!r}; known fields: {', '.join(_FIELDS)}"
            )
        try:
            re.compile(self.answer_regex or "")
        except re.error as error:
            raise TaskError(f"answer_regex {self.answer_regex!r} is no regex: {error}") from error

    def names(self, name: str) -> tuple[str, ...]:
        given = self.columns.get(name, _DEFAULT_COLUMNS[name])
        return (given,) if isinstance(given, str) else tuple(given)

    def task(self, row: Any, where: str, number: int) -> Task:
        """One row as a task.

        Args:
            row: the row.
            where: file and line, for errors.
            number: the row's index, its id where it has none.
        """
        if not isinstance(row, Mapping):
            raise TaskError(f"{where}: a task is an object, not {type(row).__name__}")
        found = {name: self._value(row, name) for name in _FIELDS}
        prompt = self._prompt(found["prompt"], where)
        answer = self._answer(found["answer"])
        tests = found["tests"]
        if isinstance(tests, str):
            try:
                tests = json.loads(tests)
            except json.JSONDecodeError as error:
                raise TaskError(f"{where}: field 'tests' is no JSON: {error}") from error
        if self.needs_answer and answer is None and tests is None:
            raise TaskError(
                f"{where}: no answer: looked for {' | '.join(self.names('answer'))} (and tests); "
                f"the row has {', '.join(sorted(map(str, row)))}. Set tasks.columns.answer"
            )
        used = {column for name in _FIELDS for column in self.names(name)}
        context = found["context"]
        if context is None and isinstance(found["answer"], str) and answer != found["answer"]:
            context = found["answer"]  # the gold was cut out of a worked solution
        return Task(
            task_id=str(found["task_id"] if found["task_id"] is not None else number),
            prompt=prompt,
            answer=answer,
            verifier=self.verifier,
            tests=tests,
            context=None if context is None else str(context),
            system_prompt=found["system_prompt"],
            metadata={key: value for key, value in row.items() if key not in used},
        )

    def _value(self, row: Mapping[str, Any], name: str) -> Any:
        for column in self.names(name):
            if row.get(column) is not None:
                return row[column]
        return None

    def _prompt(self, value: Any, where: str) -> str | tuple[Mapping[str, Any], ...]:
        names = " | ".join(self.names("prompt"))
        if value is None:
            raise TaskError(f"{where}: no prompt: looked for {names}. Set tasks.columns.prompt")
        if isinstance(value, str):
            if not value.strip():
                raise TaskError(f"{where}: the prompt ({names}) is empty")
            return value
        is_chat = isinstance(value, (list, tuple, np.ndarray)) and len(value) > 0
        if is_chat and all(isinstance(m, Mapping) and "role" in m and "content" in m for m in value):
            if not any(str(m["content"]).strip() for m in value):
                raise TaskError(f"{where}: the prompt ({names}) has only empty messages")
            return tuple(dict(message) for message in value)
        raise TaskError(
            f"{where}: the prompt ({names}) must be text or chat messages with role and content, "
            f"not {type(value).__name__}"
        )

    def _answer(self, value: Any) -> str | None:
        if value is None:
            return None
        text = str(value).strip()
        if self.answer_regex:
            match = re.search(self.answer_regex, text)
            if match:
                text = (match.group(1) if match.re.groups else match.group()).strip()
        return text or None


def load_tasks(
    source: str,
    columns: TaskColumns = TaskColumns(),
    *,
    split: str = "train",
    subset: str | None = None,
    limit: int | None = None,
) -> list[Task]:
    """Read tasks from a .jsonl, .json or .parquet file, or a dataset id on the Hub.

    Raises:
        TaskError: a row that cannot be used, with file, line and field; no rows; a repeated id.
    """
    path = Path(source).expanduser()
    if path.suffix in (".jsonl", ".json", ".parquet"):
        if not path.is_file():
            raise TaskError(f"tasks.path: {source} does not exist (looked in {Path.cwd()})")
        rows = _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)
    elif path.exists():
        raise TaskError(f"tasks.path: {source} is neither .jsonl, .json nor .parquet")
    else:
        rows = _hub_rows(source, subset, split)
    tasks: list[Task] = []
    seen: dict[str, str] = {}
    for number, (where, row) in enumerate(rows):
        if limit is not None and number >= limit:
            break
        task = columns.task(row, where, number)
        if task.task_id in seen:
            raise TaskError(
                f"{where}: task id {task.task_id!r} stands at {seen[task.task_id]} already"
            )
        seen[task.task_id] = where
        tasks.append(task)
    if not tasks:
        raise TaskError(f"tasks.path: {source} holds no rows")
    return tasks


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    if path.suffix == ".json":
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise TaskError(f"{path}: no JSON: {error}") from error
        if not isinstance(rows, list):
            raise TaskError(f"{path}: a JSON file of tasks holds a list; for lines use .jsonl")
        yield from ((f"{path}[{index}]", row) for index, row in enumerate(rows))
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise TaskError(f"{path}:{number}: no JSON: {error}") from error
            yield f"{path}:{number}", row


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow", "trl", "reading Parquet tasks") from error
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:
        raise TaskError(f"{path}: no Parquet file: {error}") from error
    number = 0
    for batch in file.iter_batches(1024):
        for row in batch.to_pylist():
            yield f"{path} row {number}", row
            number += 1


def _hub_rows(name: str, subset: str | None, split: str) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("datasets", "trl", "reading tasks from the Hub") from error
    try:
        rows = datasets.load_dataset(name, subset, split=split)
    except Exception as error:
        raise TaskError(
            f"tasks.path: {name!r} is no file here, and as a dataset on the Hub it could not be "
            f"loaded: {type(error).__name__}: {error}"
        ) from error
    yield from ((f"{name}[{split}] row {index}", row) for index, row in enumerate(rows))


def sum_tasks(split: str = "train", *, count: int = 64, seed: int = 0) -> list[Task]:
    """A built-in set for bare environments and examples: sums of three two-digit numbers."""
    generator = np.random.default_rng([seed, sum(split.encode())])
    tasks = []
    for index in range(count):
        a, b, c = (int(x) for x in generator.integers(10, 100, size=3))
        tasks.append(
            Task(
                task_id=f"sums-{split}-{index}",
                prompt=f"{a} + {b} + {c} = ?\n",
                answer=str(a + b + c),
                verifier="last_integer",
                context=f"{a} + {b} = {a + b}\n\n{a + b} + {c} = {a + b + c}\n\n",
            )
        )
    return tasks
