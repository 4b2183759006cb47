"""A trajectory as a row of the store, and back: the columns and their meaning.

The lists of a row are arrays on both ways: a token never becomes a Python object, which would take
about nine times the memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from mintrl_env.errors import StoreError
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

SCHEMA_VERSION = 2
"""Version 1 had no column `run`."""

LISTS = ("prompt_ids", "ids", "provenance", "logprobs", "policy_versions")


def arrow_schema() -> Any:
    """The store's columns; key: (run, update, task_id, rollout, run_attempt)."""
    import pyarrow as pa

    review = pa.struct(
        [
            ("index", pa.int32()),
            ("position", pa.int32()),
            ("chunk_tokens", pa.int32()),
            ("outcome", pa.string()),
            ("step", pa.int32()),
            ("cut", pa.int32()),
            ("correction_tokens", pa.int32()),
            ("dropped_ids", pa.list_(pa.int32())),
            ("reason", pa.string()),
            ("cause", pa.string()),
            ("guard", pa.string()),
            ("prompt_tokens", pa.int64()),
            ("completion_tokens", pa.int64()),
            ("usd", pa.float64()),
            ("seconds", pa.float64()),
            ("calls", pa.int64()),
        ]
    )
    return pa.schema(
        [
            ("update", pa.int32()),
            ("task_id", pa.string()),
            ("rollout", pa.int32()),
            ("run_attempt", pa.int32()),
            ("retry", pa.int32()),
            ("kind", pa.string()),
            ("prompt_ids", pa.list_(pa.int32())),
            ("ids", pa.list_(pa.int32())),
            ("provenance", pa.list_(pa.int8())),
            ("logprobs", pa.list_(pa.float32())),
            ("policy_versions", pa.list_(pa.int32())),
            ("reviews", pa.list_(review)),
            ("reward", pa.float64()),
            ("status", pa.string()),
            ("detail", pa.string()),
            ("valid", pa.bool_()),
            ("stop_reason", pa.string()),
            ("cause", pa.string()),
            ("draws", pa.int32()),
            ("run", pa.string()),
            ("schema", pa.int32()),
        ]
    )


def to_row(row: Trajectory) -> dict[str, Any]:
    """A trajectory as a row of the store; an undecided reward is null."""
    return {
        "update": row.update,
        "task_id": _storable(row.task_id),
        "rollout": row.rollout,
        "run_attempt": row.run_attempt,
        "retry": row.retry,
        "kind": row.kind.value,
        "prompt_ids": row.prompt_ids,
        "ids": row.ids,
        "provenance": row.provenance,
        "logprobs": row.logprobs,
        "policy_versions": row.policy_versions,
        "reviews": [
            {
                "index": review.index,
                "position": review.position,
                "chunk_tokens": review.chunk_tokens,
                "outcome": review.outcome.value,
                "step": review.step,
                "cut": review.cut,
                "correction_tokens": review.correction_tokens,
                "dropped_ids": review.dropped_ids,
                "reason": _storable(review.reason),
                "cause": _storable(review.cause),
                "guard": _storable(review.guard),
                "prompt_tokens": review.usage.prompt_tokens,
                "completion_tokens": review.usage.completion_tokens,
                "usd": review.usage.usd,
                "seconds": review.usage.seconds,
                "calls": review.usage.calls,
            }
            for review in row.reviews
        ],
        "reward": row.score.reward if row.score.decided else None,
        "status": _storable(row.score.status),
        "detail": _storable(row.score.detail),
        "valid": row.valid,
        "stop_reason": row.stop_reason.value,
        "cause": _storable(row.cause),
        "draws": row.draws,
        "run": _storable(row.run),
        "schema": SCHEMA_VERSION,
    }


def from_row(row: Mapping[str, Any]) -> Trajectory:
    """A row of the store as a trajectory; its lists may be arrays.

    Raises:
        StoreError: another version of this package wrote it, in a form that is not known here.
    """
    if row["schema"] not in range(1, SCHEMA_VERSION + 1):
        raise StoreError(
            f"the row was written with schema {row['schema']}, this version reads 1 to "
            f"{SCHEMA_VERSION}"
        )
    reviews = tuple(
        Review(
            index=r["index"],
            position=r["position"],
            chunk_tokens=r["chunk_tokens"],
            outcome=Outcome(r["outcome"]),
            step=r["step"],
            cut=r["cut"],
            correction_tokens=r["correction_tokens"],
            dropped_ids=frozen_ids(r["dropped_ids"]),
            reason=r["reason"],
            cause=r["cause"],
            guard=r["guard"],
            usage=Usage(
                r["prompt_tokens"], r["completion_tokens"], r["usd"], r["seconds"], r["calls"]
            ),
        )
        for r in row["reviews"]
    )
    reward = row["reward"]
    return Trajectory(
        task_id=row["task_id"],
        update=row["update"],
        rollout=row["rollout"],
        kind=Kind(row["kind"]),
        prompt_ids=frozen_ids(row["prompt_ids"]),
        ids=frozen_ids(row["ids"]),
        provenance=np.array(row["provenance"], dtype=np.int8),
        logprobs=frozen_logprobs(row["logprobs"], len(row["ids"])),
        policy_versions=frozen_ids(row["policy_versions"]),
        score=Score(math.nan if reward is None else reward, row["status"], row["detail"]),
        valid=row["valid"],
        stop_reason=StopReason(row["stop_reason"]),
        reviews=reviews,
        retry=row["retry"],
        run_attempt=row["run_attempt"],
        cause=row["cause"],
        draws=row["draws"],
        run=row.get("run") or "",
    )


def to_table(rows: Iterable[Trajectory]) -> Any:
    """Rows as an Arrow table."""
    import pyarrow as pa

    schema, dicts = arrow_schema(), [to_row(row) for row in rows]
    columns = [
        _list_array([row[field.name] for row in dicts], field.type)
        if field.name in LISTS
        else pa.array([row[field.name] for row in dicts], field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _list_array(lists: Sequence[Any], kind: Any) -> Any:
    """Arrays, one a row, as a column of lists, number for number."""
    import pyarrow as pa

    ends = np.cumsum([0, *map(len, lists)], dtype=np.int32)
    flat = np.concatenate([np.asarray(part) for part in lists]) if lists else np.empty(0)
    return pa.ListArray.from_arrays(pa.array(ends), pa.array(flat, kind.value_type), type=kind)


def from_table(table: Any) -> list[Trajectory]:
    """The rows of an Arrow table.

    Raises:
        StoreError: as `from_row`. KeyError, TypeError, ValueError: it is no table of a store.
    """
    return [from_row(row) for row in raw_rows(table)]


def raw_rows(table: Any) -> list[dict[str, Any]]:
    """A table's rows as they are, for `from_row`; lists of numbers are arrays.

    Raises:
        as `from_table`.
    """
    columns = {
        name: _arrays(table[name]) if name in LISTS else table[name].to_pylist()
        for name in table.column_names
        if name != "reviews"
    }
    columns["reviews"] = _review_rows(table["reviews"])
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


def _arrays(column: Any) -> list[np.ndarray]:
    """A column of lists of numbers as arrays, one a row."""
    lists = _whole(column)
    values = lists.flatten().to_numpy(zero_copy_only=False)
    return [values[start:stop] for start, stop in _bounds(lists)]


def _review_rows(column: Any) -> list[list[dict[str, Any]]]:
    lists = _whole(column)
    reviews = lists.flatten()
    names = [field.name for field in reviews.type]
    fields = {
        name: _arrays(reviews.field(name))
        if name == "dropped_ids"
        else reviews.field(name).to_pylist()
        for name in names
    }
    rows = [dict(zip(fields, values, strict=True)) for values in zip(*fields.values(), strict=True)]
    return [rows[start:stop] for start, stop in _bounds(lists)]


def _whole(column: Any) -> Any:
    """A column as one array of lists."""
    array = column.combine_chunks() if hasattr(column, "combine_chunks") else column
    if array.null_count:
        raise ValueError(f"a list is missing in {array.null_count} row(s)")
    return array


def _bounds(lists: Any) -> Iterable[tuple[int, int]]:
    ends = lists.offsets.to_numpy() - lists.offsets[0].as_py()
    return itertools.pairwise(ends.tolist())


def _storable(text: str) -> str:
    """The text with lone surrogates, which no file can hold, replaced by question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")
