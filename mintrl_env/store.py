"""Trajectories on disk: one Parquet part per finished group, compacted per update.

A part is written under a temporary name, synced and renamed, so that a finished group is readable
whatever happens next, and a torn one is ignored and named. `datasets`, DuckDB and polars read the
files without us.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from mintrl_env.errors import StoreError, UsageError
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

SCHEMA_VERSION = 1
_TRIES = 5
_PART = re.compile(r"(?:part|update)-u(-?\d+)(?:-.*)?\.parquet")


def arrow_schema() -> Any:
    """The store's columns; key: (update, task_id, rollout, run_attempt)."""
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
        "schema": SCHEMA_VERSION,
    }


def from_row(row: dict[str, Any]) -> Trajectory:
    """A row of the store as a trajectory."""
    if row["schema"] != SCHEMA_VERSION:
        raise StoreError(
            f"the row was written with schema {row['schema']}, this version reads {SCHEMA_VERSION}"
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
    )


def _storable(text: str) -> str:
    """The text with lone surrogates, which no file can hold, replaced by question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


class RolloutStore:
    """A folder of Parquet parts.

    Args:
        folder: made if it does not exist.

    Raises:
        StoreError: the folder cannot be written.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"{self.folder}: the folder cannot be made: {error.strerror or error}"
            ) from error

    def write_group(self, rows: Sequence[Trajectory]) -> Path:
        """Write one finished group, or one rank's share of it, as a part of its own.

        Raises:
            UsageError: no rows, or rows of several groups.
            StoreError: the part cannot be written; nothing that was there is lost.
        """
        groups = {(row.update, row.task_id, row.run_attempt) for row in rows}
        if len(groups) != 1:
            raise UsageError(f"a part holds the rows of one group, not of {len(groups)}")
        first = rows[0]
        name = re.sub(r"[^A-Za-z0-9_-]", "_", first.task_id)[:60]
        # Names are cut and cleaned: the digest tells groups apart.
        task = first.task_id.encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(task, digest_size=8).hexdigest()
        share = f"-r{first.rollout}" if first.rollout else ""
        return self._write(
            f"part-u{first.update:06d}-a{first.run_attempt}-{name}-{digest}{share}.parquet", rows
        )

    def compact(self, update: int) -> Path | None:
        """Put the parts of an update into one file, and delete them when it is safe.

        A part that cannot be read stays where it is, for `read` to name. None: nothing to do, or
        an earlier file of the update can't be read, and nothing is touched.
        """
        merged = self.folder / f"update-u{update:06d}.parquet"
        rows: list[Trajectory] = []
        if merged.exists():
            try:
                rows = _rows_of(merged)
            except _NoPart:
                return None
        done = []
        for part in sorted(self.folder.glob(f"part-u{update:06d}-*.parquet")):
            with suppress(_NoPart):
                rows += _rows_of(part)
                done.append(part)
        if not done:
            return None
        # A crash between here and the last unlink leaves rows twice, which `latest` sees through.
        path = self._write(merged.name, latest(rows))
        for part in done:
            part.unlink(missing_ok=True)
        return path

    def _write(self, name: str, rows: Iterable[Trajectory]) -> Path:
        import pyarrow as pa
        import pyarrow.parquet as parquet

        table = pa.Table.from_pylist([to_row(row) for row in rows], schema=arrow_schema())
        path = self.folder / name
        temporary = self.folder / f".{name}.{os.getpid()}.tmp"
        try:
            with temporary.open("wb") as file:
                parquet.write_table(table, file, compression="zstd")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            _sync_folder(self.folder)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            raise StoreError(f"{path}: cannot be written: {error.strerror or error}") from error
        return path

    def read(self, *, update: int | None = None) -> tuple[list[Trajectory], list[str]]:
        """All rows (the latest attempt of each), and a line for every file that was ignored."""
        for _ in range(_TRIES):
            paths = self._parts(update)
            rows, problems = read_rows(paths)
            # Parts that vanished were compacted meanwhile: their rows are in another file now.
            if all(path.exists() for path in paths):
                break
        problems += [
            f"{path.name}: unfinished, ignored" for path in sorted(self.folder.glob(".*.tmp"))
        ]
        return latest(rows), problems

    def _parts(self, update: int | None) -> list[Path]:
        named = ((path, _PART.fullmatch(path.name)) for path in self.folder.glob("*.parquet"))
        return sorted(
            path for path, m in named if m and (update is None or int(m.group(1)) == update)
        )


class _NoPart(Exception):
    """Why a file holds no rows of ours."""


def _rows_of(path: Path) -> list[Trajectory]:
    import pyarrow.parquet as parquet

    try:
        table = parquet.ParquetFile(path).read()
    except Exception as error:  # pyarrow raises many kinds for a torn file
        raise _NoPart(f"torn or no Parquet file, ignored ({error})") from error
    try:
        return [from_row(row) for row in table.to_pylist()]
    except StoreError as error:
        raise _NoPart(f"ignored: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise _NoPart(f"not written by this store, ignored ({error!r})") from error


def read_rows(paths: Iterable[Path]) -> tuple[list[Trajectory], list[str]]:
    """The rows of Parquet files, and a line for every file that cannot be read."""
    rows: list[Trajectory] = []
    problems: list[str] = []
    for path in paths:
        try:
            rows += _rows_of(path)
        except _NoPart as error:
            problems.append(f"{path.name}: {error}")
    return rows, problems


def latest(rows: Iterable[Trajectory]) -> list[Trajectory]:
    """One row per (update, task_id, rollout): that of the last attempt; sorted by that key."""
    best: dict[tuple[int, str, int], Trajectory] = {}
    for row in rows:
        key = (row.update, row.task_id, row.rollout)
        if key not in best or row.run_attempt >= best[key].run_attempt:
            best[key] = row
    return [best[key] for key in sorted(best)]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
