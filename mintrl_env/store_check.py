"""What is wrong in a store: torn files, doubled rows, rows that are not what they should be.

Reading a store ignores and names what it cannot read; this looks at every row. It changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mintrl_env.errors import StoreError
from mintrl_env.store import RolloutStore, part_update, read_table
from mintrl_env.store_rows import LISTS, SCHEMA_VERSION, arrow_schema, raw_rows
from mintrl_env.types import Kind, Outcome, Provenance, StopReason

_TOKEN_LISTS = ("ids", "provenance", "logprobs", "policy_versions")

GroupSize = Callable[[str, int], int | None]
"""(run, update) -> rows of a whole group, or None where nobody knows."""


@dataclass
class StoreCheck:
    """What a check found.

    Attributes:
        files, rows: how much was looked at.
        problems: a line each, file and row named; none of them is harmless.
        notes: leftovers that readers pass over.
    """

    files: int = 0
    rows: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_store(
    store: RolloutStore, *, group_size: GroupSize = lambda run, update: None
) -> StoreCheck:
    """Look at every file and row of a store, one file in memory at a time.

    Args:
        group_size: from the run's config. Where it is not known, the highest rollout of an update
            says how many rows its groups have.
    """
    found = StoreCheck()
    places: dict[tuple[str, int, str, int, int], str] = {}
    for path in sorted(store.folder.glob("*.parquet")):
        update = part_update(path)
        if update is None:
            found.notes.append(f"{path.name}: no part by its name, readers of this package skip it")
            continue
        found.files += 1
        for number, row in _rows(path, found):
            found.rows += 1
            where = f"{path.name}: row {number} ({_name(row)})"
            try:
                found.problems += [f"{where}: {text}" for text in _problems(row, update)]
            except Exception as error:  # a value of a type that no rule expects
                found.problems.append(f"{where}: can't be looked at: {error!r}")
            key = (row.get("run") or "", *(row[name] for name in _KEY))
            if key in places:
                found.problems.append(
                    f"{where}: doubled, it stands in {places[key]} too; this package reads one of "
                    "them, other readers read both"
                )
            else:
                places[key] = f"{path.name} row {number}"
    found.problems += _incomplete(places, group_size)
    found.notes += [
        f"{path.name}: unfinished, left by a process that was killed; it may be deleted"
        for path in sorted(store.folder.glob(".*.tmp"))
    ]
    return found


_KEY = {"update": int, "task_id": str, "rollout": int, "run_attempt": int}


def _name(row: Mapping[str, Any]) -> str:
    run = f"run {row['run']!r}, " if row.get("run") else ""
    attempt = f", attempt {row['run_attempt']}" if row["run_attempt"] else ""
    return (
        f"{run}update {row['update']}, task {row['task_id']!r}, rollout {row['rollout']}{attempt}"
    )


def _rows(path: Path, found: StoreCheck) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a file with their numbers from 0; what makes it unreadable goes to `found`."""
    try:
        table = read_table(path)
    except StoreError as error:
        found.problems.append(f"{path.name}: {error}")
        return
    found.problems += [f"{path.name}: {text}" for text in _schema_problems(table)]
    try:
        rows = raw_rows(table)
        if not all(isinstance(row[name], kind) for row in rows for name, kind in _KEY.items()):
            return  # which the types of the columns have said
    except Exception as error:  # whatever another program wrote
        found.problems.append(f"{path.name}: its rows can't be read: {error!r}")
        return
    yield from enumerate(rows)


def _schema_problems(table: Any) -> list[str]:
    given = dict(_leaves(table.schema))
    out = []
    for name, kind in _leaves(arrow_schema()):
        if name not in given:
            if name != "run":  # version 1 had none
                out.append(f"column {name!r} is missing")
        elif given[name] != kind:
            out.append(f"column {name!r} is {given[name]}, not {kind}")
    for name in set(arrow_schema().names) & set(table.column_names) - {"reward"}:
        if table[name].null_count:
            nulls = table[name].is_null().to_pylist()
            out.append(f"row {nulls.index(True)}: column {name!r} is null")
    return out


def _leaves(fields: Iterable[Any], before: str = "") -> Iterator[tuple[str, str]]:
    """The columns and the fields inside them, with their types written out."""
    for field_ in fields:
        name, kind = f"{before}{field_.name}", field_.type
        is_list = hasattr(kind, "value_type")
        inner = kind.value_type if is_list else kind
        if hasattr(inner, "num_fields") and inner.num_fields and not hasattr(inner, "value_type"):
            yield from _leaves(inner, f"{name}.")
        else:
            yield name, f"list of {inner}" if is_list else str(inner)


def _problems(row: Mapping[str, Any], update: int) -> Iterator[str]:
    if not 1 <= row["schema"] <= SCHEMA_VERSION:
        yield f"schema {row['schema']}, this version reads 1 to {SCHEMA_VERSION}"
        return
    if row["update"] != update:
        yield f"the file's name says update {update}"
    for name, kind in (("kind", Kind), ("stop_reason", StopReason)):
        if row[name] not in list(kind):
            yield f"{name} is {row[name]!r}, not one of {', '.join(kind)}"
    if row["valid"] and row["reward"] is None and row["status"] != "deferred":
        yield "valid, but without a reward"
    if row["reward"] is not None and not np.isfinite(row["reward"]):
        yield f"reward {row['reward']}: an undecided one is null"
    lengths = {name: len(row[name]) for name in _TOKEN_LISTS}
    if len(set(lengths.values())) != 1 or not lengths["ids"]:
        yield "lengths differ: " + ", ".join(f"{name} {n}" for name, n in lengths.items())
        return
    yield from _token_problems(row)
    yield from _review_problems(row)


def _token_problems(row: Mapping[str, Any]) -> Iterator[str]:
    authors = row["provenance"]
    if not np.isin(authors, list(Provenance)).all():
        yield f"provenance holds {sorted(set(authors.tolist()) - set(Provenance))}"
    for name in LISTS[:2]:
        if len(row[name]) and row[name].min() < 0:
            yield f"{name} holds {row[name].min()}, which is no token"
    sampled = ~np.isnan(row["logprobs"])
    if (sampled & (authors != Provenance.POLICY)).any():
        place = int(np.flatnonzero(sampled & (authors != Provenance.POLICY))[0])
        yield f"token {place} has a log-prob, but the policy did not sample it"


def _review_problems(row: Mapping[str, Any]) -> Iterator[str]:
    length, corrected = len(row["ids"]), 0
    for place, review in enumerate(row["reviews"]):
        position, end = review["position"], review["position"] + review["chunk_tokens"]
        if review["outcome"] not in list(Outcome):
            yield f"review {place}: outcome {review['outcome']!r}"
        elif review["outcome"] == Outcome.REVISE:
            cut, stop = review["cut"], review["cut"] + review["correction_tokens"]
            corrected += review["correction_tokens"]
            if not 0 <= position <= cut <= stop <= length:
                yield (
                    f"review {place}: chunk at {position}, cut {cut}, correction to {stop} do not "
                    f"lie in a response of {length} tokens"
                )
            elif (row["provenance"][cut:stop] != Provenance.INTERVENTION).any():
                yield f"review {place}: tokens {cut} to {stop} are not all the judge's"
            if len(review["dropped_ids"]) != end - cut:
                yield (
                    f"review {place}: {len(review['dropped_ids'])} dropped tokens, but a chunk from "
                    f"{position} to {end} was cut at {cut}"
                )
        elif not 0 <= position <= end <= length:
            yield f"review {place}: its chunk ends at {end}, the response at {length}"
    written = int(np.count_nonzero(row["provenance"] == Provenance.INTERVENTION))
    if written != corrected:
        yield f"{written} tokens are the judge's, but its reviews wrote {corrected}"


def _incomplete(
    keys: Sequence[tuple[str, int, str, int, int]] | Mapping[Any, Any], group_size: GroupSize
) -> list[str]:
    """A line for every group that lacks rollouts, all attempts taken together."""
    groups: dict[tuple[str, int, str], set[int]] = {}
    highest: dict[tuple[str, int], int] = {}
    for run, update, task_id, rollout, _ in keys:
        groups.setdefault((run, update, task_id), set()).add(rollout)
        highest[run, update] = max(highest.get((run, update), 0), rollout)
    out = []
    for (run, update, task_id), rollouts in sorted(groups.items()):
        size = group_size(run, update) or highest[run, update] + 1
        missing = sorted(set(range(size)) - rollouts)
        if missing:
            of = f"run {run!r}, " if run else ""
            out.append(
                f"{of}update {update}, task {task_id!r}: rollout "
                f"{', '.join(map(str, missing[:8]))}{' ...' if len(missing) > 8 else ''} of "
                f"{size} is missing"
            )
    return out
