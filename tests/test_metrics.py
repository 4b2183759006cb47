from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mintrl_env.errors import StoreError, UsageError
from mintrl_env.metrics import MetricsLog, read_metrics


def test_a_row_is_on_disk_before_write_returns_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    log = MetricsLog(path)
    log.write(0, {"loss": np.float32(0.5), "phase": "mintrl", "quantiles": np.arange(2)})
    assert json.loads(path.read_text()) == {
        "update": 0,
        "run_attempt": 0,
        "loss": 0.5,
        "phase": "mintrl",
        "quantiles": [0, 1],
    }
    log.close()
    with pytest.raises(StoreError, match="update 1 cannot be written"):
        log.write(1, {})


def test_nan_and_infinities_become_null_at_any_depth(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.write(
            0, {"a": math.nan, "b": {"c": [1.0, math.inf]}, "d": np.float64("nan"), "e": True}
        )
    (row,) = read_metrics(tmp_path / "m.jsonl")
    assert row == {
        "update": 0, "run_attempt": 0, "a": None, "b": {"c": [1.0, None]}, "d": None, "e": True
    }  # fmt: skip


def test_the_reader_keeps_the_latest_attempt_of_each_update(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with MetricsLog(path) as log:
        for update in range(3):
            log.write(update, {"loss": float(update), "only_first": 1})
    with MetricsLog(path, run_attempt=1) as log:
        log.write(1, {"loss": 10.0})
    rows = read_metrics(path)
    assert [(r["update"], r["run_attempt"], r["loss"]) for r in rows] == [
        (0, 0, 0.0), (1, 1, 10.0), (2, 0, 2.0)
    ]  # fmt: skip
    assert "only_first" not in rows[1]  # a new attempt replaces the row, it does not patch it


def test_rows_of_one_attempt_add_up(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.write(3, {"loss": 1.0, "grad_norm": 2.0})
        log.write(3, {"accuracy": 0.25, "loss": 1.5})
    assert read_metrics(tmp_path / "m.jsonl") == [
        {"update": 3, "run_attempt": 0, "loss": 1.5, "grad_norm": 2.0, "accuracy": 0.25}
    ]


@given(cut=st.integers(1, 200))
def test_a_torn_last_line_is_ignored_and_mended(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("torn") / "m.jsonl"
    with MetricsLog(path) as log:
        log.write(0, {"loss": 0.0})
        first = path.stat().st_size
        log.write(1, {"loss": 1.0, "note": "ä" * 10})
    whole = path.read_bytes()
    kept = max(first, len(whole) - cut)
    path.write_bytes(whole[:kept])
    before = read_metrics(path)
    # Without its newline alone the second row is still whole.
    assert [r["update"] for r in before] == ([0, 1] if kept == len(whole) - 1 else [0])
    with MetricsLog(path, run_attempt=1) as log:
        log.write(2, {"loss": 2.0})
    assert read_metrics(path)[:-1] == before
    assert read_metrics(path)[-1]["update"] == 2


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"update": 0}\n{"upd\n{"update": 2}\n')
    with pytest.raises(StoreError, match=r"m\.jsonl:2: no JSON object"):
        read_metrics(path)
    path.write_text('{"update": true}\n\n')
    with pytest.raises(StoreError, match=r"m\.jsonl:1"):
        read_metrics(path)


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_values_that_are_the_logs_own_or_not_json_are_refused(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "m.jsonl") as log:
        with pytest.raises(UsageError, match="'update' is set by the log"):
            log.write(0, {"update": 3})
        with pytest.raises(UsageError, match="JSON-able, not object"):
            log.write(0, {"x": object()})
    assert read_metrics(tmp_path / "m.jsonl") == []  # nothing half-written


def test_a_folder_that_cannot_be_made_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be opened"):
        MetricsLog(tmp_path / "file" / "m.jsonl")
