"""Task rows -> Task: JSONL, Parquet, a Hub id, or a procedural generator by name."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import islice
from typing import Any

import numpy as np

from mintrl_env.errors import TaskError
from mintrl_env.task_files import rows_of
from mintrl_env.task_forms import FORMS, as_plain_row
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
        columns: our field -> the row's column, or alternatives of which the first present (and not
            null) is taken: `{"prompt": ["question", "problem"]}`; `[]`: no column. Unnamed fields
            keep their defaults.
        answer_regex: applied to the answer; its first group (or the match) is the gold where it
            matches, else the whole field. What a gold was cut out of is the context, where the row
            has no other.
        verifier: the verifier of every task.
        needs_answer: refuse a row without an answer or tests.
        form: of a public set whose tests stand in a form of their own (`mintrl_env.task_forms`);
            `columns` then name what the form makes of a row.
    """

    columns: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    answer_regex: str | None = None
    verifier: str = "math"
    needs_answer: bool = True
    form: str | None = None

    def __post_init__(self) -> None:
        if self.form is not None and self.form not in FORMS:
            raise TaskError(f"form {self.form!r} is none of {', '.join(FORMS)}")
        for name, given in self.columns.items():
            if name not in _FIELDS:
                near = difflib.get_close_matches(str(name), _FIELDS, n=1)
                hint = f", did you mean {near[0]!r}?" if near else ";"
                raise TaskError(
                    f"columns: unknown field {name!r}{hint} known fields: {', '.join(_FIELDS)}"
                )
            if not isinstance(given, str) and not (
                isinstance(given, (list, tuple)) and all(isinstance(c, str) for c in given)
            ):
                raise TaskError(
                    f"columns.{name}: a column's name or a list of names, not {given!r}"
                )
        if self.columns.get("prompt") in ([], ()):
            raise TaskError("columns.prompt: a task needs a prompt: name at least one column")
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

        Raises:
            TaskError: naming `where` and the field.
        """
        if not isinstance(row, Mapping):
            raise TaskError(f"{where}: a task is an object, not {_kind(row)}")
        if self.form is not None:
            try:
                row = as_plain_row(self.form, row)
            except TaskError as error:
                raise TaskError(f"{where}: no row of the form {self.form}: {error}") from error
        taken: set[str] = set()

        def text_of(name: str) -> str | None:
            return self._text(row, name, where, taken)

        prompt = self._prompt(row, where, taken)
        given, tests = text_of("answer"), self._tests(row, where, taken)
        answer = self._gold(given)
        if self.needs_answer and answer is None and tests is None:
            raise TaskError(self._no_answer(row, where))
        context = text_of("context")
        if context is None and given is not None and answer not in (None, given.strip()):
            context = given  # the gold was cut out of a worked solution
        task_id = text_of("task_id")
        return Task(
            task_id=task_id if task_id and task_id.strip() else str(number),
            prompt=prompt,
            answer=answer,
            verifier=self.verifier,
            tests=tests,
            context=context,
            system_prompt=text_of("system_prompt"),
            metadata={key: value for key, value in row.items() if key not in taken},
        )

    def _present(self, row: Mapping[str, Any], name: str) -> Iterator[tuple[str, Any]]:
        """The alternatives for a field that the row has, less nulls (NaN is a table's null)."""
        for column in self.names(name):
            value = row.get(column)
            if value is not None and not (
                isinstance(value, (float, np.floating)) and value != value
            ):
                yield column, value

    def _text(self, row: Mapping[str, Any], name: str, where: str, taken: set[str]) -> str | None:
        for column, value in self._present(row, name):
            text = _scalar_text(value)
            if text is not None:
                taken.add(column)
                return text
            # A default name may mean something else in other people's rows: then it is metadata.
            if name in self.columns:
                raise TaskError(
                    f"{where}: field {column!r} ({name}) must be text or a number, not "
                    f"{_kind(value)}. Set tasks.columns.{name} ([]: no column)"
                )
        return None

    def _prompt(
        self, row: Mapping[str, Any], where: str, taken: set[str]
    ) -> str | tuple[Mapping[str, Any], ...]:
        column, value = next(self._present(row, "prompt"), ("", None))
        if value is None:
            names = " | ".join(self.names("prompt"))
            raise TaskError(
                f"{where}: no prompt: looked for {names}; {_has(row)}. Set tasks.columns.prompt"
            )
        taken.add(column)
        if isinstance(value, str):
            if not value.strip():
                raise TaskError(f"{where}: the prompt (field {column!r}) is empty")
            return value
        if not isinstance(value, (list, tuple, np.ndarray)):
            raise TaskError(
                f"{where}: the prompt (field {column!r}) must be text or chat messages with role "
                f"and content, not {_kind(value)}"
            )
        if not len(value):
            raise TaskError(f"{where}: the prompt (field {column!r}) has no messages")
        for index, message in enumerate(value):
            ok = isinstance(message, Mapping) and isinstance(message.get("role"), str)
            if not ok or not isinstance(message.get("content", 0), (str, type(None))):
                raise TaskError(
                    f"{where}: the prompt (field {column!r}): message {index} must have role and "
                    f"content as text, not {_kind(message)} {_shown(message)}"
                )
        if not any((message["content"] or "").strip() for message in value):
            raise TaskError(f"{where}: the prompt (field {column!r}) has only empty messages")
        # Parquet gives every message the keys of all, null where it has none.
        return tuple(
            {k: v for k, v in message.items() if v is not None or k == "content"}
            for message in value
        )

    def _tests(
        self, row: Mapping[str, Any], where: str, taken: set[str]
    ) -> Mapping[str, Any] | None:
        for column, value in self._present(row, "tests"):
            tests = value
            if isinstance(value, str):
                try:
                    tests = json.loads(value) if value.strip() else {}
                except (ValueError, RecursionError) as error:
                    raise TaskError(
                        f"{where}: field {column!r} (tests) is no JSON: {error}"
                    ) from error
            if not isinstance(tests, Mapping) and not _is_nothing(tests):
                raise TaskError(
                    f"{where}: field {column!r} (tests) must be an object, as the code verifier "
                    f"reads it, not {_kind(tests)}. Set tasks.columns.tests ([]: no column)"
                )
            taken.add(column)
            if isinstance(tests, Mapping) and tests:
                return dict(tests)
        return None

    def _gold(self, given: str | None) -> str | None:
        text = (given or "").strip()
        match = re.search(self.answer_regex, text) if self.answer_regex else None
        if match:
            # An alternative of the expression may leave its group out.
            group = next((g for g in match.groups() if g is not None), match.group())
            text = group.strip()
        return text or None

    def _no_answer(self, row: Mapping[str, Any], where: str) -> str:
        names = " | ".join(self.names("answer"))
        column, value = next(self._present(row, "answer"), ("", None))
        why = f"looked for {names} (and tests); {_has(row)}"
        if column:
            text = _scalar_text(value)
            if text is None:
                why = f"field {column!r} must be text or a number, not {_kind(value)}"
            elif text.strip():
                why = f"answer_regex {self.answer_regex!r} cuts nothing out of {_shown(text)}"
            else:
                why = f"field {column!r} is empty (and there are no tests)"
        return f"{where}: no answer: {why}. Set tasks.columns.answer, or leave the row out"


def _is_nothing(value: Any) -> bool:
    return value is None or (isinstance(value, (list, tuple, np.ndarray)) and not len(value))


def _scalar_text(value: Any) -> str | None:
    """A text or a number as text; None for anything else."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)  # a column of integers with gaps reads as floats
    return str(value) if isinstance(value, (str, int, float, Decimal)) else None


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "true or false", str: "text", list: "a list"}
    if isinstance(value, Mapping):
        return "an object"
    return names.get(type(value), type(value).__name__)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _has(row: Mapping[str, Any]) -> str:
    if not row:
        return "the row is empty"
    columns = [str(key) + (" (null)" if value is None else "") for key, value in row.items()]
    return f"the row has {', '.join(sorted(columns)[:30])}"


def load_tasks(
    source: str,
    columns: TaskColumns = TaskColumns(),
    *,
    split: str = "train",
    subset: str | Sequence[str] | None = None,
    limit: int | None = None,
    on_unusable: Callable[[str], None] | None = None,
) -> list[Task]:
    """Read tasks from a .jsonl, .json or .parquet file, or a dataset id on the Hub.

    JSON lines and Parquet are streamed; nothing behind `limit` rows is looked at.

    Args:
        subset: of a dataset on the Hub; of several, one after the other.
        on_unusable: told of each row that cannot be used, which is left out then.

    Raises:
        TaskError: a row that cannot be used, with file, line and field; no rows; a repeated id; a
            source that cannot be read.
    """
    if limit is not None and limit < 1:
        raise TaskError(f"tasks.limit must be at least 1, not {limit}")
    tasks: list[Task] = []
    seen: dict[str, str] = {}
    try:
        for number, (where, row) in enumerate(islice(rows_of(source, subset, split), limit)):
            try:
                task = columns.task(row, where, number)
                if task.task_id in seen:
                    raise TaskError(
                        f"{where}: task id {task.task_id!r} stands at {seen[task.task_id]} already"
                    )
            except TaskError as error:
                if on_unusable is None:
                    raise
                on_unusable(str(error))
                continue
            seen[task.task_id] = where
            tasks.append(task)
    except OSError as error:
        raise TaskError(
            f"tasks.path: {source} cannot be read: {error.strerror or error}"
        ) from error
    if not tasks:
        raise TaskError(f"tasks.path: {source} holds no rows" + (" to use" if on_unusable else ""))
    return tasks


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
