"""docs/store.md: its rows are what the exports write, its tables are whole, its snippets run."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mintrl_env.cli import app
from mintrl_env.exports import EXPORTS
from mintrl_env.store_rows import SCHEMA_VERSION, arrow_schema

# Loaded by its path: pytest runs with --import-mode=importlib.
_SPEC = importlib.util.spec_from_file_location(
    "store_cli_rows", Path(__file__).with_name("test_store_cli.py")
)
assert _SPEC is not None and _SPEC.loader is not None
rows = importlib.util.module_from_spec(_SPEC)
sys.modules["store_cli_rows"] = rows
_SPEC.loader.exec_module(rows)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "store.md"
TEXT = PAGE.read_text(encoding="utf-8")


def mintrl_store(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["store", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("kind", EXPORTS)
def test_the_example_rows_are_what_is_written(kind: str, tmp_path: Path) -> None:
    run = rows.make_run(tmp_path / "run")
    out = tmp_path / "rows.jsonl"
    mintrl_store("export", run, out, "--kind", kind, "--tokenizer", "bytes")
    written = json.loads(out.read_text().splitlines()[0])
    part = TEXT.split(f"\n### {kind}:")[1].split("\n### ")[0]
    (example,) = re.findall(r"```json\n(.*?)```", part, flags=re.DOTALL)
    left_out = re.findall(r"`(\w+)`", TEXT.split("where it is from: ")[1].split(";")[0])
    assert {k: v for k, v in written.items() if k not in left_out} == json.loads(example)
    assert [k for k in written if k in left_out] == left_out


def test_the_trajectory_looks_like_that(tmp_path: Path) -> None:
    run = rows.make_run(tmp_path / "run")
    shown = mintrl_store("show", run, "--rollout", "1", "--tokenizer", "bytes")
    (example,) = re.findall(r"```\n(a  update 0.*?)```", TEXT, flags=re.DOTALL)
    assert [line.rstrip() for line in shown.splitlines()] == example.splitlines()


def test_every_column_is_described() -> None:
    table = TEXT.split("## Columns")[1].split("\n## ")[0]
    names = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", table, flags=re.MULTILINE)
    described = [name for cell in names for name in re.findall(r"\w+", cell)]
    assert described == arrow_schema().names
    (line,) = (line for line in table.splitlines() if line.startswith("| `reviews`"))
    fields = [field.name for field in arrow_schema().field("reviews").type.value_type]
    assert [name for name in re.findall(r"`(\w+)`", line) if name in fields] == fields
    assert f"version of these columns: {SCHEMA_VERSION} " in table


def test_every_command_is_listed() -> None:
    listed = re.findall(r"^    mintrl store (\w+) ", TEXT, flags=re.MULTILINE)
    assert listed == ["ls", "show", "stats", "validate", "merge", "export"]
    for name in listed:
        assert CliRunner().invoke(app, ["store", name, "--help"]).exit_code == 0


def test_others_read_the_files_as_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("datasets", "duckdb", "polars"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    rows.make_run(tmp_path / "RUN")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    part = TEXT.split("## Reading them")[1]
    snippet = re.findall(r"```python\n(.*?)```", part, flags=re.DOTALL)[0]
    first, *lines = [line for line in snippet.splitlines() if line]
    space: dict[str, object] = {}
    exec(first, space)
    table, kinds, means = (eval(line, space) for line in lines)
    assert len(table) == 8
    assert sorted(kinds.fetchall()) == [("control", 0.0), ("intervened", 1.0)]
    assert dict(means.iter_rows()) == {0: 0.5, 1: 0.5}
