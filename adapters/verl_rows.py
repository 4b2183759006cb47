"""Tasks as rows of veRL's Parquet files, and rows as tasks again. Nothing here imports veRL.

`verl_row` writes the whole task into `extra_info`, so that the agent loop makes prompts and scores
from the same object as every other path. Rows that somebody else wrote are read too: their prompt,
their ground truth (an answer, or a code task's tests) and their index.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mintrl_env.adapters.verl_score import _alone, _tests
from mintrl_env.errors import StoreError, TaskError
from mintrl_env.prompts import PromptBuilder
from mintrl_env.types import Task

TASK = "mintrl_task"
"""The key of `extra_info` that holds the task, in JSON."""

_FIELDS = ("task_id", "prompt", "answer", "verifier", "tests", "context", "system_prompt")


def verl_row(task: Task, prompts: PromptBuilder, *, index: int, split: str) -> dict[str, Any]:
    """A task as veRL's data set reads it.

    Args:
        prompts: makes the messages, by which veRL filters prompts that are too long.
        index: the row's number in its file.
        split: train or test.

    Raises:
        TaskError: the task cannot be written as JSON.
    """
    known = {name: getattr(task, name) for name in _FIELDS}
    try:
        text = json.dumps({**known, "metadata": dict(task.metadata)}, default=_plain)
    except (TypeError, ValueError) as error:
        raise TaskError(f"task {task.task_id!r} cannot be written as JSON: {error}") from error
    truth = task.answer if task.tests is None else json.dumps(dict(task.tests), default=_plain)
    return {
        "data_source": task.verifier,
        "prompt": prompts.messages(task),
        "ability": task.verifier,
        "reward_model": {"style": "rule", "ground_truth": truth or ""},
        "extra_info": {"index": index, "split": split, TASK: text},
    }


def write_verl_rows(
    tasks: Sequence[Task], path: str | Path, prompts: PromptBuilder, *, split: str
) -> Path:
    """Write tasks as a Parquet file for `data.train_files` or `data.val_files`.

    Raises:
        TaskError: a task whose prompt is empty or too long, or that cannot be written.
        StoreError: the file cannot be written.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    rows = []
    for index, task in enumerate(tasks):
        prompts.ids(task)
        rows.append(verl_row(task, prompts, index=index, split=split))
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.Table.from_pylist(rows), file)
    except OSError as error:
        raise StoreError(f"{file}: cannot be written: {error.strerror or error}") from error
    return file


def task_of(fields: Mapping[str, Any]) -> Task:
    """The task of a row, from what veRL hands to an agent loop.

    Raises:
        TaskError: a row without a prompt, or a task that another program wrote.
    """
    info = fields.get("extra_info") or {}
    text = info.get(TASK)
    if text is None:
        return _foreign(fields, info)
    try:
        given = json.loads(text)
        prompt = given["prompt"]
        return Task(**{**given, "prompt": prompt if isinstance(prompt, str) else tuple(prompt)})
    except (ValueError, TypeError, KeyError) as error:
        raise TaskError(f"extra_info.{TASK} holds no task of ours: {error!r}") from error


def _foreign(fields: Mapping[str, Any], info: Mapping[str, Any]) -> Task:
    messages = fields.get("raw_prompt")
    source, index = fields.get("data_source", "row"), info.get("index", fields.get("index", ""))
    name = f"{source} {index}".strip()
    if messages is None or not len(messages):
        raise TaskError(f"{name}: the row has no prompt (data.prompt_key)")
    truth = _alone((fields.get("reward_model") or {}).get("ground_truth"))
    tests = _tests(truth)
    return Task(
        task_id=name,
        prompt=messages if isinstance(messages, str) else tuple(dict(m) for m in messages),
        answer=None if truth is None or tests is not None else str(truth),
        verifier="math" if tests is None else "code",
        tests=tests,
        context=info.get("solution"),
        metadata={key: info[key] for key in ("limits", "entry_point") if info.get(key)},
    )


def _plain(value: Any) -> Any:
    """numpy's and other mappings' values as JSON's."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON value")
