"""Exported rows as a JSONL or Parquet file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from mintrl_env.errors import StoreError, UsageError

_SUFFIXES = (".jsonl", ".parquet")
_BATCH = 256


def write_export(
    rows: Iterable[Mapping[str, Any]], out: Path, columns: Sequence[tuple[str, str]]
) -> int:
    """Write rows as JSONL or Parquet, by the name of `out`; a few rows are in memory at a time.

    Args:
        out: a new file; it appears when it is whole.
        columns: names and forms, from `exports.columns_of`.

    Returns:
        How many rows were written.

    Raises:
        UsageError: another suffix. StoreError: the file exists, or cannot be written.
    """
    check_out(out)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    write = _write_jsonl if out.suffix == ".jsonl" else _write_parquet
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            count = write(iter(rows), file, columns)
        temporary.replace(out)
    except OSError as error:
        raise StoreError(f"{out}: cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return count


def check_out(out: Path) -> None:
    """Refuse, before anything is read, what `write_export` would refuse."""
    if out.suffix not in _SUFFIXES:
        raise UsageError(f"--out {out}: the file's name ends in {' or '.join(_SUFFIXES)}")
    if out.exists():
        raise StoreError(f"{out} exists already: remove it, or choose another file")


def _write_jsonl(
    rows: Iterator[Mapping[str, Any]], file: IO[bytes], columns: Sequence[tuple[str, str]]
) -> int:
    count = 0
    for row in rows:
        plain = {name: _plain(row[name]) for name, _ in columns}
        file.write(
            json.dumps(plain, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
        )
        file.write(b"\n")
        count += 1
    return count


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _write_parquet(
    rows: Iterator[Mapping[str, Any]], file: IO[bytes], columns: Sequence[tuple[str, str]]
) -> int:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    forms = {
        "text": pa.string(),
        "texts": pa.list_(pa.string()),
        "int": pa.int32(),
        "number": pa.float64(),
        "flag": pa.bool_(),
        "ids": pa.list_(pa.int32()),
        "mask": pa.list_(pa.int8()),
    }
    schema = pa.schema([(name, forms[form]) for name, form in columns])
    count = 0
    with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        while batch := [
            {name: _storable(row[name]) for name, _ in columns} for row in islice(rows, _BATCH)
        ]:
            writer.write_table(pa.Table.from_pylist(batch, schema=schema))
            count += len(batch)
    return count


def _storable(value: Any) -> Any:
    """Lone surrogates, which no file can hold, as question marks."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    return [_storable(v) for v in value] if isinstance(value, list) else value
