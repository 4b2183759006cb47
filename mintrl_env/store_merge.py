"""Several stores as one, whose rows say which run they are from."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from mintrl_env.errors import StoreError, UsageError
from mintrl_env.store import RolloutStore
from mintrl_env.trajectory import Trajectory


def run_names(paths: list[Path]) -> list[str]:
    """A name for each folder, as short as tells them apart: `grpo`, or `a/grpo` and `b/grpo`.

    Raises:
        UsageError: a folder stands twice.
    """
    parts = [path.resolve().parts for path in paths]
    if len(set(parts)) < len(parts):
        raise UsageError("a store stands twice: merging it with itself would double its rows")
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(p[-length:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("distinct paths have distinct names")


def merge_stores(sources: Mapping[str, RolloutStore], out: RolloutStore) -> tuple[int, list[str]]:
    """Copy the latest rows of each run into `out`, a file for each update and run.

    Rows of two runs never collide: each is given its run's name. One update of one run is in memory
    at a time. A merge that is cut short leaves nothing at `out`.

    Args:
        sources: by the run's name; a store that was merged itself keeps its names behind this one.

    Returns:
        The rows written, and a line for every file that could not be read.

    Raises:
        StoreError: `out` holds rows already, or cannot be written.
    """
    if out.updates():
        raise StoreError(f"{out.folder} holds rows already: merge into a new folder")
    draft = RolloutStore(out.folder.with_name(f".{out.folder.name}.merging"))
    count, problems = 0, []
    try:
        for name, store in sources.items():
            for update in store.updates():
                rows, ignored = store.read(update=update)
                problems += [f"{name}: {line}" for line in ignored]
                if rows:
                    draft.write_update([_of_run(row, name) for row in rows], name)
                    count += len(rows)
        shutil.rmtree(out.folder)
        draft.folder.replace(out.folder)
    except OSError as error:
        raise StoreError(f"{out.folder}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(draft.folder, ignore_errors=True)
    return count, list(dict.fromkeys(problems))


def _of_run(row: Trajectory, name: str) -> Trajectory:
    return replace(row, run=f"{name}/{row.run}" if row.run else name)
