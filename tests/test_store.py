"""Trajectories on disk: whole, never lost, never doubled, readable without us."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mintrl_env import store as store_module
from mintrl_env.errors import StoreError, UsageError
from mintrl_env.store import RolloutStore, latest, read_rows
from mintrl_env.store_rows import arrow_schema, from_row, raw_rows, to_row
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

REVIEWS = (
    Review(0, 0, 3, Outcome.KEEP, reason="fine", usage=Usage(10, 1, 0.25, 1.5, 2)),
    Review(
        1,
        3,
        4,
        Outcome.REVISE,
        step=1,
        cut=5,
        correction_tokens=1,
        dropped_ids=frozen_ids([9, 8]),
        reason="wrong: 日 \x00 \n",
    ),
    Review(2, 6, 1, Outcome.FAILED, cause="timeout", usage=Usage(calls=0)),
    Review(3, 7, 1, Outcome.GUARDED, guard="leak", reason="x" * 100_000),
    Review(4, 8, 1, Outcome.UNPARSED, cause="bad_step", usage=Usage(2**40, 2**33)),
)


def row_of(task_id: str = "t", **changes: Any) -> Trajectory:
    """A trajectory in which every field differs from its default."""
    row = Trajectory(
        task_id=task_id,
        update=3,
        rollout=0,
        kind=Kind.INTERVENED,
        prompt_ids=frozen_ids([1, 2]),
        ids=frozen_ids([5, 6, 7, 256]),
        provenance=np.array([0, 1, 2, 0], dtype=np.int8),
        logprobs=frozen_logprobs([-0.5, np.nan, np.nan, -1e-7], 4),
        policy_versions=frozen_ids([3, 3, 2, 3]),
        score=Score(1.0, "correct", "detail é"),
        valid=True,
        stop_reason=StopReason.EOS,
        reviews=REVIEWS,
        retry=1,
        run_attempt=2,
        cause="none",
        draws=11,
        run="first",
    )
    return replace(row, **changes)


UNDECIDED = row_of(
    score=Score.undecided("unavailable"),
    valid=False,
    reviews=(),
    kind=Kind.CONTROL,
    stop_reason=StopReason.DEADLINE,
    rollout=1,
    prompt_ids=frozen_ids([]),
)
FAILED = Trajectory.failed(
    task_id="t",
    prompt_ids=[1],
    kind=Kind.CONTROL,
    update=3,
    rollout=2,
    eos_id=256,
    cause="engine: gone",
    run_attempt=2,
)
UNDECIDED, FAILED = replace(UNDECIDED, run="first"), replace(FAILED, run="first")


@pytest.fixture
def store(tmp_path: Path) -> RolloutStore:
    return RolloutStore(tmp_path / "a" / "rollouts")


def names(store: RolloutStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


# --- round trip


def test_every_field_makes_the_round_trip(store: RolloutStore) -> None:
    rows = [row_of(), UNDECIDED, FAILED]
    plain = {f.name: f.default for f in fields(Trajectory) if f.default is not MISSING}
    assert all(getattr(rows[0], name) != value for name, value in plain.items())
    path = store.write_group(rows)
    again, problems = store.read()
    assert problems == []
    assert again == rows
    first = again[0]
    for name, dtype in (("ids", "i4"), ("provenance", "i1"), ("logprobs", "f4")):
        assert getattr(first, name).dtype == dtype
    assert first.reviews == REVIEWS
    assert parquet.read_schema(path).equals(arrow_schema())


def test_nulls_and_nans_on_disk(store: RolloutStore) -> None:
    table = parquet.read_table(store.write_group([row_of(), UNDECIDED]))
    assert table["reward"].to_pylist() == [1.0, None]  # undecided is null, never NaN or 0
    logprobs = table["logprobs"].to_pylist()[0]
    assert logprobs[0] == -0.5 and math.isnan(logprobs[1])  # a value, so that lengths agree
    assert table["reviews"].to_pylist()[1] == []
    assert table["schema"].to_pylist() == [2, 2]


def test_a_row_read_is_arrays_and_is_what_others_read(store: RolloutStore) -> None:
    table = parquet.read_table(store.write_group([row_of(), UNDECIDED, FAILED]))
    rows, plain = raw_rows(table), table.to_pylist()
    for name in ("prompt_ids", "ids", "provenance", "policy_versions"):
        assert isinstance(rows[0][name], np.ndarray)
        assert [row[name].tolist() for row in rows] == [row[name] for row in plain]
    assert [len(row["reviews"]) for row in rows] == [5, 0, 0]
    for one, other in zip(rows[0]["reviews"], plain[0]["reviews"], strict=True):
        assert {**one, "dropped_ids": one["dropped_ids"].tolist()} == other
    assert raw_rows(table.slice(1, 1))[0]["ids"].tolist() == plain[1]["ids"]
    # polars writes lists of another width, and strings as categories.
    wide = table.set_column(
        table.column_names.index("ids"), "ids", table["ids"].cast(pa.large_list(pa.int64()))
    )
    assert from_row(raw_rows(wide)[0]) == row_of()


def test_lone_surrogates_are_storable_everywhere(store: RolloutStore) -> None:
    bad = "a\ud800"
    review = Review(0, 0, 1, Outcome.FAILED, reason=bad, cause=bad, guard=bad)
    row = row_of(bad, score=Score(0.0, bad, bad), cause=bad, reviews=(review,))
    store.write_group([row])
    (again,), _ = store.read()
    assert again.task_id == again.cause == again.score.status == again.score.detail == "a?"
    assert {again.reviews[0].reason, again.reviews[0].cause, again.reviews[0].guard} == {"a?"}


def test_a_huge_row(store: RolloutStore) -> None:
    length = 200_000
    ids = np.arange(length, dtype=np.int32)
    row = row_of(
        ids=ids,
        provenance=np.zeros(length, np.int8),
        logprobs=frozen_logprobs(np.linspace(-5, 0, length), length),
        policy_versions=np.zeros(length, np.int32),
    )
    store.write_group([row])
    assert store.read()[0] == [row]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5),
    st.floats(allow_infinity=False),
    st.text(max_size=5),
    st.integers(-5, 10**6),
)
def test_rows_are_what_they_were(ids: list[int], reward: float, text: str, update: int) -> None:
    row = row_of(
        task_id=text,
        update=update,
        ids=frozen_ids(ids),
        provenance=np.zeros(len(ids), np.int8),
        logprobs=frozen_logprobs(None, len(ids)),
        policy_versions=frozen_ids([0] * len(ids)),
        score=Score(math.nan if math.isnan(reward) else reward, text),
    )
    table = pa.Table.from_pylist([to_row(row)], schema=arrow_schema())
    assert from_row(table.to_pylist()[0]) == row


# --- file names

TASK_IDS = [
    "gsm8k/train/7",
    "gsm8k_train_7",
    "../../etc/passwd",
    "日本語",
    "日本誤",
    "x" * 300,
    "x" * 300 + "y",
    "x" * 299,
    "",
    " ",
    ".",
    "a\nb",
    "A",
    "a",
    "plumless",  # these two have one CRC-32
    "buckeroo",
]


def test_file_names_never_collide_and_stay_in_the_folder(store: RolloutStore) -> None:
    paths = [store.write_group([row_of(task_id)]) for task_id in TASK_IDS]
    assert len({path.name.lower() for path in paths}) == len(TASK_IDS)
    assert {path.parent for path in paths} == {store.folder}
    assert all(len(path.name) < 140 and path.name.isascii() for path in paths)
    rows, problems = store.read()
    assert sorted(row.task_id for row in rows) == sorted(TASK_IDS) and problems == []
    store.compact(3)
    assert sorted(row.task_id for row in store.read()[0]) == sorted(TASK_IDS)


def test_ranks_write_shares_of_one_group(store: RolloutStore) -> None:
    shares = [[row_of(rollout=r) for r in (0, 1)], [row_of(rollout=r) for r in (2, 3)]]
    assert len({store.write_group(share) for share in shares}) == 2
    assert [row.rollout for row in store.read()[0]] == [0, 1, 2, 3]


def test_a_part_is_one_group(store: RolloutStore) -> None:
    for rows in ([], [row_of(), row_of("u")], [row_of(), row_of(update=4)]):
        with pytest.raises(UsageError, match="one group"):
            store.write_group(rows)
    assert names(store) == []


def test_updates_are_told_apart(store: RolloutStore) -> None:
    updates = [-1, -12, 0, 1, 12, 123456, 1234567]
    for update in updates:
        store.write_group([row_of(update=update)])
    for update in updates:
        assert [row.update for row in store.read(update=update)[0]] == [update]
        path = store.compact(update)
        assert path is not None and [row.update for row in read_rows([path])[0]] == [update]
        assert [row.update for row in store.read(update=update)[0]] == [update]
    assert [row.update for row in store.read()[0]] == sorted(updates)


# --- attempts


def test_the_latest_attempt_wins_row_by_row(store: RolloutStore) -> None:
    old = [row_of(task, rollout=r, run_attempt=0, draws=0) for task in "ab" for r in (0, 1)]
    for task in (0, 2):
        store.write_group(old[task : task + 2])
    new = [row_of("a", rollout=r, run_attempt=1, draws=1) for r in (0, 1)]
    store.write_group(new)
    wanted = [("a", 0, 1), ("a", 1, 1), ("b", 0, 0), ("b", 1, 0)]

    def found() -> list[tuple[str, int, int]]:
        return [(row.task_id, row.rollout, row.run_attempt) for row in store.read()[0]]

    assert found() == wanted
    store.compact(3)
    assert found() == wanted
    # A later attempt that comes to a compacted update, and an earlier one that comes too late.
    store.write_group([row_of("b", run_attempt=10), row_of("b", rollout=1, run_attempt=10)])
    store.write_group([row_of("b", run_attempt=9)])
    assert store.next_attempt(3) == 11 and store.next_attempt(4) == 0
    assert found()[2:] == [("b", 0, 10), ("b", 1, 10)]
    store.compact(3)
    assert found()[2:] == [("b", 0, 10), ("b", 1, 10)]


def test_latest_whatever_the_order() -> None:
    rows = [row_of(run_attempt=n, draws=n) for n in (1, 3, 0, 2)]
    assert [row.run_attempt for row in latest(rows)] == [3]
    assert [row.run_attempt for row in latest(reversed(rows))] == [3]


# --- files that are not whole


def damaged(path: Path, content: Callable[[bytes], bytes]) -> None:
    path.write_bytes(content(path.read_bytes()))


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "no footer": lambda data: data[:-8],
    "text": lambda data: b"hello",
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_torn_part_is_named_and_survives_compaction(store: RolloutStore, kind: str) -> None:
    good, torn = store.write_group([row_of("a")]), store.write_group([row_of("b")])
    damaged(torn, DAMAGES[kind])
    for _ in range(2):
        rows, problems = store.read()
        assert [row.task_id for row in rows] == ["a"]
        assert len(problems) == 1 and problems[0].startswith(f"{torn.name}: torn or no Parquet")
        store.compact(3)
        assert torn.exists() and not good.exists()
    assert store.compact(3) is None


def test_files_of_others_are_named_and_survive(store: RolloutStore) -> None:
    store.write_group([row_of("a")])
    other = store.folder / "part-u000003-other.parquet"
    parquet.write_table(pa.table({"x": [1]}), other)
    newer = store.folder / "part-u000003-newer.parquet"
    table = pa.Table.from_pylist([{**to_row(row_of("b")), "schema": 9}], schema=arrow_schema())
    parquet.write_table(table, newer)
    (store.folder / "notes.parquet").write_text("not ours by its name")
    store.compact(3)
    rows, problems = store.read()
    assert [row.task_id for row in rows] == ["a"]
    assert len(problems) == 2 and other.exists() and newer.exists()
    assert (
        "newer.parquet: ignored: the row was written with schema 9, this version reads 1 to 2"
        in (problems[0])
    )
    assert "other.parquet: not written by this store" in problems[1]
    with pytest.raises(StoreError, match="schema 9"):
        from_row({**to_row(row_of()), "schema": 9})


def test_a_torn_compacted_file_stops_compaction(store: RolloutStore) -> None:
    store.write_group([row_of("a")])
    merged = store.compact(3)
    assert merged is not None
    damaged(merged, DAMAGES["half"])
    torn = merged.read_bytes()
    part = store.write_group([row_of("b")])
    assert store.compact(3) is None
    assert merged.read_bytes() == torn and part.exists()
    rows, problems = store.read()
    assert [row.task_id for row in rows] == ["b"] and merged.name in problems[0]


def test_leftovers_are_named(store: RolloutStore) -> None:
    store.write_group([row_of()])
    (store.folder / ".part-u000003-x.parquet.99.tmp").write_bytes(b"PAR1half")
    for _ in range(2):
        rows, problems = store.read()
        assert len(rows) == 1
        assert problems == [".part-u000003-x.parquet.99.tmp: unfinished, ignored"]
        store.compact(3)


# --- compaction


def test_compaction_is_idempotent(store: RolloutStore) -> None:
    assert store.compact(3) is None
    rows = [row_of(task_id) for task_id in "dacb"]
    for row in rows:
        store.write_group([row])
    store.write_group([row_of("other", update=4)])
    path = store.compact(3)
    assert path is not None and names(store)[-1] == "update-u000003.parquet"
    before = path.read_bytes()
    assert store.compact(3) is None and path.read_bytes() == before
    assert len(names(store)) == 2
    assert [row.task_id for row in store.read(update=3)[0]] == ["a", "b", "c", "d"]
    store.write_group([row_of("e")])
    store.compact(3)
    assert [row.task_id for row in store.read(update=3)[0]] == ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("deleted", [0, 1, 2])
def test_a_crash_after_the_merge_loses_and_doubles_nothing(
    store: RolloutStore, deleted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for task_id in "abc":
        store.write_group([row_of(task_id)])
    unlinked = []

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if len(unlinked) == deleted:
            raise KeyboardInterrupt
        unlinked.append(path)
        os.unlink(path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        with pytest.raises(KeyboardInterrupt):
            store.compact(3)
    assert len(names(store)) == 4 - deleted
    wanted = ["a", "b", "c"]
    assert [row.task_id for row in store.read()[0]] == wanted
    path = store.compact(3)
    assert names(store) == ["update-u000003.parquet"]
    assert path is not None and [row.task_id for row in read_rows([path])[0]] == wanted


def test_a_crash_before_the_merge_is_renamed_leaves_the_parts(
    store: RolloutStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for task_id in "ab":
        store.write_group([row_of(task_id)])
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.compact(3)
    rows, problems = store.read()
    assert [row.task_id for row in rows] == ["a", "b"] and len(problems) == 1
    store.compact(3)
    assert [row.task_id for row in store.read()[0]] == ["a", "b"]


def test_a_reader_sees_all_rows_while_parts_are_compacted(
    store: RolloutStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for task_id in "abc":
        store.write_group([row_of(task_id)])
    honest = store_module.read_rows
    calls = []

    def slow(paths: Any) -> Any:
        calls.append(list(paths))
        if len(calls) == 1:  # the folder was listed; now its parts go
            store.compact(3)
        return honest(calls[-1])

    monkeypatch.setattr(store_module, "read_rows", slow)
    rows, problems = store.read()
    assert [row.task_id for row in rows] == ["a", "b", "c"] and problems == []


# --- writers


def test_many_writers_of_different_groups(store: RolloutStore) -> None:
    def write(number: int) -> None:
        RolloutStore(store.folder).write_group([row_of(f"t{number:02}", rollout=r) for r in (0, 1)])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(32)))
    rows, problems = store.read()
    assert problems == []
    assert [(row.task_id, row.rollout) for row in rows] == [
        (f"t{n:02}", r) for n in range(32) for r in (0, 1)
    ]


def test_writing_a_group_again_replaces_it(store: RolloutStore) -> None:
    store.write_group([row_of(draws=1)])
    store.write_group([row_of(draws=2)])
    assert len(names(store)) == 1 and store.read()[0][0].draws == 2


def test_places_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match=r"file.*the folder cannot be made: "):
            RolloutStore(folder)
    store = RolloutStore(tmp_path / "gone")
    store.folder.rmdir()
    with pytest.raises(StoreError, match=r"part-u000003-.*cannot be written: No such file"):
        store.write_group([row_of()])
    # A full disk: what was there stays, and no torn file is left.
    store = RolloutStore(tmp_path / "full")
    store.write_group([row_of(draws=1)])

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match="No space left on device"):
            store.write_group([row_of(draws=2)])
    rows, problems = store.read()
    assert [row.draws for row in rows] == [1] and problems == []


WRITER = """
import io, os, pathlib, signal, sys, numpy as np, pyarrow.parquet as pq
from mintrl_env.store import RolloutStore
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Kind, Score, StopReason
store, n = RolloutStore(sys.argv[1]), 4_000
ids = np.random.default_rng(int(sys.argv[2])).integers(0, 50_000, n).astype(np.int32)
def row(task, rollout):
    return Trajectory(task, 3, rollout, Kind.CONTROL, ids[:9], ids, np.zeros(n, np.int8),
                      np.zeros(n, np.float32), ids, Score(1.0, "correct"), True, StopReason.EOS)
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
def half(table, file, **options):
    whole = io.BytesIO()
    honest(table, whole, **options)
    file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
    file.flush()
    die()
honest = pq.write_table
print("go", flush=True)
for i in range(10**6):
    if i == 7 and sys.argv[3] == "write":
        pq.write_table = half
    if i == 7 and sys.argv[3] == "fsync":
        os.fsync = die
    if i == 7 and sys.argv[3] == "rename":
        pathlib.Path.replace = die
    store.write_group([row(f"{sys.argv[2]}-{i}", r) for r in range(3)])
    if i % 5 == 4:
        store.compact(3)
    print(i, flush=True)
"""


@pytest.mark.parametrize("kills", [["write", "fsync", "rename"], ["now", "now"]])
def test_kill_9_leaves_whole_files_only(store: RolloutStore, kills: list[str]) -> None:
    finished: dict[int, int] = {}
    for turn, kill in enumerate(kills):
        arguments = [sys.executable, "-c", WRITER, str(store.folder), str(turn), kill]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"go\n"
            if kill == "now":
                writer.stdout.readline()
                time.sleep(0.05 + 0.07 * turn)
                writer.send_signal(signal.SIGKILL)
            finished[turn] = len(writer.stdout.read().split()) + (kill == "now")
        assert writer.returncode == -signal.SIGKILL
        assert kill == "now" or finished[turn] == 7
    for path in store.folder.glob("*.parquet"):
        parquet.ParquetFile(path).read()  # raises if it is torn
    rows, problems = store.read()
    assert all("unfinished, ignored" in problem for problem in problems)
    assert len(problems) == len(kills) or kills[0] == "now"
    keys = [(row.task_id, row.rollout) for row in rows]
    assert len(set(keys)) == len(keys)
    for turn, groups in finished.items():
        for group in range(groups):
            assert {(f"{turn}-{group}", r) for r in range(3)} <= set(keys)


# --- readers without us


def test_datasets_reads_it(store: RolloutStore, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    store.write_group([row_of(), UNDECIDED])
    store.write_group([row_of("u", reviews=())])
    files = sorted(map(str, store.folder.glob("*.parquet")))
    table = datasets.load_dataset(
        "parquet", data_files=files, split="train", cache_dir=str(tmp_path / "cache")
    )
    assert table["task_id"][:] == ["t", "t", "u"] and table["reward"][:] == [1.0, None, 1.0]
    review = table[0]["reviews"][1]
    assert (review["outcome"], review["dropped_ids"]) == ("revise", [9, 8])


def test_duckdb_reads_it(store: RolloutStore) -> None:
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    store.write_group([row_of(), UNDECIDED])
    query = (
        "select task_id, reward, len(ids), len(reviews), reviews[2].outcome "
        f"from read_parquet('{store.folder}/*.parquet') order by rollout"
    )
    assert duckdb.sql(query).fetchall() == [("t", 1.0, 4, 5, "revise"), ("t", None, 4, 0, None)]


def test_polars_reads_it(store: RolloutStore) -> None:
    polars = pytest.importorskip("polars", reason="polars is not installed")
    store.write_group([row_of(), UNDECIDED])
    frame = polars.read_parquet(store.folder / "*.parquet").sort("rollout")
    assert frame["reward"].to_list() == [1.0, None]
    reviews = frame.select("reviews").explode("reviews").unnest("reviews")
    assert reviews["outcome"].to_list()[:5] == [review.outcome.value for review in REVIEWS]
    assert json.dumps(frame["ids"].to_list()[0]) == "[5, 6, 7, 256]"
