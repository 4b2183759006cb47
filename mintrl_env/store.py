"""Trajectories on disk: one Parquet part per finished group, compacted per update.

A part is written under a temporary name, synced and renamed, so that a finished group is readable
whatever happens next, and a torn one is ignored and named. `datasets`, DuckDB and polars read the
files without us.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mintrl_env.errors import StoreError, UsageError
from mintrl_env.store_rows import from_table, to_table
from mintrl_env.trajectory import Trajectory

_TRIES = 5
_PART = re.compile(r"(?:part|update)-u(-?\d+)(?:-.*)?\.parquet")


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
        groups = {(row.run, row.update, row.task_id, row.run_attempt) for row in rows}
        if len(groups) != 1:
            raise UsageError(f"a part holds the rows of one group, not of {len(groups)}")
        first = rows[0]
        whole = f"{first.run}\x1f{first.task_id}" if first.run else first.task_id
        name = _file_name(first.task_id, whole)
        share = f"-r{first.rollout}" if first.rollout else ""
        return self._write(
            f"part-u{first.update:06d}-a{first.run_attempt}-{name}{share}.parquet", rows
        )

    def write_update(self, rows: Sequence[Trajectory], name: str) -> Path:
        """Write rows of one update, of any of its groups, as a file of their own called `name`.

        Raises:
            UsageError: no rows, or rows of several updates. StoreError: it cannot be written.
        """
        updates = {row.update for row in rows}
        if len(updates) != 1:
            raise UsageError(f"a file holds the rows of one update, not of {len(updates)}")
        return self._write(f"update-u{rows[0].update:06d}-{_file_name(name, name)}.parquet", rows)

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
        import pyarrow.parquet as parquet

        table = to_table(rows)
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

    def next_attempt(self, update: int) -> int:
        """The `run_attempt` of rows that are to win over those of the update that are there already."""
        return 1 + max((row.run_attempt for row in self.read(update=update)[0]), default=-1)

    def _parts(self, update: int | None) -> list[Path]:
        named = ((path, part_update(path)) for path in self.folder.glob("*.parquet"))
        return sorted(
            path for path, of in named if of is not None and (update is None or of == update)
        )

    def updates(self) -> list[int]:
        """The updates that there are files of, ascending; evaluations are negative."""
        named = map(part_update, self.folder.glob("*.parquet"))
        return sorted({update for update in named if update is not None})


def part_update(path: Path) -> int | None:
    """The update that a store's file is of, by its name; None where the name is of no part."""
    match = _PART.fullmatch(path.name)
    return None if match is None else int(match.group(1))


def _file_name(text: str, whole: str) -> str:
    """`text` as part of a file's name: cut and cleaned, with a digest that tells `whole` apart."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", text)[:60]
    digest = hashlib.blake2b(whole.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"{name}-{digest}"


class _NoPart(Exception):
    """Why a file holds no rows of ours."""


class _Torn(StoreError):
    """A file that pyarrow cannot read."""


def read_table(path: Path) -> Any:
    """A Parquet file as an Arrow table.

    Raises:
        StoreError: it cannot be read, most often since it is torn.
    """
    import pyarrow.parquet as parquet

    try:
        return parquet.ParquetFile(path).read()
    except Exception as error:  # pyarrow raises many kinds for a torn file
        raise _Torn(f"torn or no Parquet file, ignored ({error})") from error


def _rows_of(path: Path) -> list[Trajectory]:
    try:
        return from_table(read_table(path))
    except _Torn as error:
        raise _NoPart(str(error)) from error
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
    """One row per (run, update, task_id, rollout): that of the last attempt; sorted by that key."""
    best: dict[tuple[str, int, str, int], Trajectory] = {}
    for row in rows:
        key = (row.run, row.update, row.task_id, row.rollout)
        if key not in best or row.run_attempt >= best[key].run_attempt:
            best[key] = row
    return [best[key] for key in sorted(best)]


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
