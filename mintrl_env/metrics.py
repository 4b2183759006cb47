"""The figures of a run, one JSON object a line for every update.

Append-only: a row is flushed and synced before `write` returns, so a kill loses at most the line
that was being written. After a resume the updates behind the checkpoint run again with
`run_attempt` raised; nothing is rewritten, the reader takes the latest attempt of each update.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from mintrl_env.errors import StoreError, UsageError


class MetricsLog:
    """Writes `metrics.jsonl`.

    Args:
        path: made, with its folder, if it does not exist; else appended to. A last line that a kill
            tore is removed first.
        run_attempt: goes into every row; raise it by one with every resume.

    Raises:
        StoreError: the file cannot be opened or written.
    """

    def __init__(self, path: str | Path, *, run_attempt: int = 0) -> None:
        self.path = Path(path)
        self.run_attempt = run_attempt
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _mend(self.path)
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise StoreError(
                f"{self.path}: cannot be opened for writing: {error.strerror}"
            ) from error

    def write(self, update: int, values: Mapping[str, Any]) -> None:
        """Append what is known of an update; NaN and infinities become null.

        Several rows of one update and attempt add up: later keys win.

        Args:
            update: index of the update, from 0.
            values: JSON-able values; numpy scalars and arrays and torch scalars are converted.
        """
        for key in ("update", "run_attempt"):
            if key in values:
                raise UsageError(f"{key!r} is set by the log itself: leave it out of the values")
        row = {"update": int(update), "run_attempt": self.run_attempt, **values}
        line = json.dumps(_jsonable(row), ensure_ascii=True, allow_nan=False)
        try:
            self._file.write(line + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except (OSError, ValueError) as error:  # ValueError: the file is closed
            raise StoreError(f"{self.path}: update {update} cannot be written: {error}") from error

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """One row for each update, ascending, of the latest attempt of that update.

    A torn last line is ignored, a file that does not exist yet has no rows; null stays None.

    Raises:
        StoreError: the file cannot be read, or a line before the last is no row (path:line).
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    best: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        row = _parse(line)
        if row is None:
            if number == len(lines):  # no newline after it: a kill tore it
                break
            raise StoreError(
                f"{path}:{number}: no JSON object with an integer `update`; remove the line"
            )
        old = best.get(row["update"])
        if old is None or row["run_attempt"] > old["run_attempt"]:
            best[row["update"]] = row
        elif row["run_attempt"] == old["run_attempt"]:
            old.update(row)
    return [best[update] for update in sorted(best)]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:  # bad JSON or bad UTF-8
        return None
    if not isinstance(row, dict) or type(row.get("update")) is not int:
        return None
    attempt = row.setdefault("run_attempt", 0)
    return row if type(attempt) is int else None


def _mend(path: Path) -> None:
    """Make the file end in a newline: finish a whole last line, cut off a torn one."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        data = file.read()
        if not data or data.endswith(b"\n"):
            return
        start = data.rfind(b"\n") + 1
        if _parse(data[start:]) is None:
            file.truncate(start)
        else:
            file.write(b"\n")


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "tolist"):  # numpy arrays and scalars, torch tensors
        return _jsonable(value.tolist())
    raise UsageError(f"a metric must be JSON-able, not {type(value).__name__}: {value!r}")
