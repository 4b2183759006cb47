"""What `mintrl store validate` finds: each kind of damage, with file and row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from mintrl_env.store import RolloutStore
from mintrl_env.store_check import check_store
from mintrl_env.store_rows import to_row, to_table
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import (
    Kind,
    Outcome,
    Review,
    Score,
    StopReason,
    frozen_ids,
    frozen_logprobs,
)


def row_of(task_id: str = "t", rollout: int = 0, **changes: Any) -> Trajectory:
    """Seven tokens: two of the policy's, a correction of two in place of three, a tool's one, two."""
    row = Trajectory(
        task_id=task_id,
        update=3,
        rollout=rollout,
        kind=Kind.INTERVENED,
        prompt_ids=frozen_ids([1, 2]),
        ids=frozen_ids([5, 6, 7, 8, 9, 10, 256]),
        provenance=np.array([0, 0, 1, 1, 2, 0, 0], dtype=np.int8),
        logprobs=frozen_logprobs([-1, -1, *[np.nan] * 3, -1, -1], 7),
        policy_versions=frozen_ids([3] * 7),
        score=Score(1.0, "correct"),
        valid=True,
        stop_reason=StopReason.EOS,
        reviews=(
            Review(
                0, 0, 5, Outcome.REVISE, step=1, cut=2, correction_tokens=2,
                dropped_ids=frozen_ids([4, 4, 4]),
            ),
            Review(1, 4, 3, Outcome.KEEP),
        ),
        draws=9,
    )  # fmt: skip
    return replace(row, **changes)


@pytest.fixture
def store(tmp_path: Path) -> RolloutStore:
    store = RolloutStore(tmp_path / "rollouts")
    store.write_group([row_of("a", r) for r in range(3)])
    store.write_group([row_of("b", r, run_attempt=1) for r in range(3)])
    return store


def test_a_whole_store_has_no_problem(store: RolloutStore) -> None:
    for _ in range(2):
        found = check_store(store, group_size=lambda run, update: 3)
        assert (found.problems, found.notes) == ([], [])
        assert found.rows == 6
        store.compact(3)
    assert found.files == 1


def test_an_older_store_without_runs_has_no_problem(store: RolloutStore) -> None:
    for path in store.folder.glob("*.parquet"):
        table = parquet.read_table(path).drop_columns(["run"])
        place = table.column_names.index("schema")
        parquet.write_table(table.set_column(place, "schema", pa.array([1] * 3, pa.int32())), path)
    assert check_store(store).problems == []
    assert {row.run for row in store.read()[0]} == {""}


ROW = "part-x.parquet: row 1 (update 3, task 'c', rollout 1): "
DAMAGES: dict[str, tuple[dict[str, Any], str]] = {
    "length": ({"ids": [1, 2]}, "lengths differ: ids 2, provenance 7, logprobs 7, policy_ver"),
    "empty": ({n: [] for n in ("ids", "provenance", "logprobs", "policy_versions")}, "lengths di"),
    "author": ({"provenance": [0, 0, 1, 1, 7, 0, 0]}, "provenance holds [7]"),
    "negative": ({"ids": [5, 6, 7, 8, 9, -100, 256]}, "ids holds -100, which is no token"),
    "sampled": ({"logprobs": [-1.0] * 7}, "token 2 has a log-prob, but the policy did not"),
    "kind": ({"kind": "mixed"}, "kind is 'mixed', not one of control, intervened"),
    "stop": ({"stop_reason": "bored"}, "stop_reason is 'bored', not one of eos, length"),
    "reward": ({"reward": None}, "valid, but without a reward"),
    "nan": ({"reward": float("nan")}, "reward nan: an undecided one is null"),
    "schema": ({"schema": 77}, "schema 77, this version reads 1 to 2"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_row_that_is_wrong_is_named(store: RolloutStore, kind: str) -> None:
    changes, text = DAMAGES[kind]
    rows = [to_row(row_of("c", r)) for r in range(3)]
    rows[1] |= changes
    whole = to_table([row_of("c")]).schema
    path = store.folder / "part-u000003-x.parquet"
    parquet.write_table(pa.Table.from_pylist(rows, schema=whole), path)
    (problem,) = check_store(store).problems
    assert problem.startswith(ROW.replace("part-x", "part-u000003-x") + text)


def reviews_of(**changes: Any) -> tuple[Review, ...]:
    first, second = row_of().reviews
    return replace(first, **changes), second


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"reviews": reviews_of(cut=9)},
            "review 0: chunk at 0, cut 9, correction to 11 do not lie",
        ),
        ({"reviews": reviews_of(cut=1)}, "review 0: tokens 1 to 3 are not all the judge's"),
        ({"reviews": reviews_of(dropped_ids=frozen_ids([4]))}, "review 0: 1 dropped tokens, but a"),
        ({"reviews": row_of().reviews[1:]}, "2 tokens are the judge's, but its reviews wrote 0"),
        (
            {"reviews": (row_of().reviews[0], Review(1, 4, 9, Outcome.KEEP))},
            "review 1: its chunk ends at 13, the response at 7",
        ),
        ({"update": 4}, "the file's name says update 3"),
    ],
)
def test_a_record_that_contradicts_itself_is_named(
    store: RolloutStore, changes: dict[str, Any], text: str
) -> None:
    update = changes.pop("update", 3)
    rows = [row_of("c", r, update=update) for r in range(3)]
    rows[1] = replace(rows[1], **changes)
    parquet.write_table(to_table(rows), store.folder / "part-u000003-x.parquet")
    problems = check_store(store).problems
    assert all(".parquet: row " in problem for problem in problems)
    assert any(f"rollout 1): {text}" in problem for problem in problems)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.drop_columns(["ids"]), "column 'ids' is missing"),
        (
            lambda t: t.set_column(1, "task_id", pa.array([1, 2, 3])),
            "column 'task_id' is int64, not string",
        ),
        (
            lambda t: t.set_column(
                t.column_names.index("valid"), "valid", pa.array([True, None, True])
            ),
            "row 1: column 'valid' is null",
        ),
    ],
)
def test_other_columns_are_named(
    store: RolloutStore, change: Callable[[Any], Any], text: str
) -> None:
    path = store.folder / "part-u000003-x.parquet"
    parquet.write_table(change(to_table([row_of("c", r) for r in range(3)])), path)
    assert any(line == f"{path.name}: {text}" for line in check_store(store).problems)


def test_torn_files_are_problems_and_leftovers_are_notes(store: RolloutStore) -> None:
    path = store.write_group([row_of("c", r) for r in range(3)])
    path.write_bytes(path.read_bytes()[:-20])
    (store.folder / ".part-u000003-y.parquet.99.tmp").write_bytes(b"PAR1")
    (store.folder / "notes.parquet").write_text("mine")
    found = check_store(store)
    (problem,) = found.problems
    assert problem.startswith(f"{path.name}: torn or no Parquet file")
    assert [note.split(": ")[0] for note in found.notes] == [
        "notes.parquet",
        ".part-u000003-y.parquet.99.tmp",
    ]


def test_rows_that_stand_twice_are_named(store: RolloutStore) -> None:
    store.compact(3)
    store.write_group([row_of("a", r) for r in range(3)])  # as if the parts were not yet deleted
    problems = check_store(store).problems
    assert len(problems) == 3
    assert (
        "update-u000003.parquet: row 1 (update 3, task 'a', rollout 1): doubled, it stands in"
        in (problems[1])
    )
    # A later attempt is no double: readers take the latest.
    store.compact(3)
    store.write_group([row_of("a", r, run_attempt=4) for r in range(3)])
    assert check_store(store).problems == []


def test_groups_that_lack_rollouts_are_named(store: RolloutStore) -> None:
    store.write_group([row_of("c", r) for r in (0, 2)])
    wanted = ["update 3, task 'c': rollout 1 of 3 is missing"]
    assert check_store(store).problems == wanted  # by the highest rollout of the update
    found = check_store(store, group_size=lambda run, update: 4 if update == 3 else None)
    assert found.problems == [
        "update 3, task 'a': rollout 3 of 4 is missing",
        "update 3, task 'b': rollout 3 of 4 is missing",
        "update 3, task 'c': rollout 1, 3 of 4 is missing",
    ]
    # A rank's shares are one group.
    store.write_group([row_of("c", 1)])
    assert check_store(store).problems == []


def test_runs_are_told_apart(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    store.write_update([row_of("a", r, run="x") for r in range(2)], "x")
    store.write_update([row_of("a", r, run="y") for r in range(2)], "y")
    assert check_store(store).problems == []
    store.write_update([row_of("a", 3, run="z")], "z")
    assert check_store(store).problems == [
        "run 'z', update 3, task 'a': rollout 0, 1, 2 of 4 is missing"
    ]
