"""Files and Hub data sets -> rows with the place each came from: JSONL, JSON, Parquet."""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from mintrl_env.errors import MissingExtraError, TaskError
from mintrl_env.surrogates import whole_text


def rows_of(
    source: str, subset: str | Sequence[str] | None, split: str
) -> Iterator[tuple[str, Any]]:
    """The rows of a file or of a dataset on the Hub (of several subsets, one after the other), each
    with its place.

    Raises:
        TaskError: a source that cannot be read.
    """
    path = Path(source).expanduser()
    suffix = path.suffix.lower()
    if suffix not in READERS:
        if path.exists():
            raise TaskError(f"tasks.path: {source} is neither .jsonl, .json nor .parquet")
        return _hub_rows(source, subset, split)
    if not path.exists():
        raise TaskError(f"tasks.path: {source} does not exist (looked in {Path.cwd()})")
    return READERS[suffix](path)


def _jsonl_rows(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield f"{path}:{number}", _json(partial(line.decode, "utf-8"), f"{path}:{number}")


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    rows = _json(partial(path.read_text, "utf-8-sig"), str(path))
    if not isinstance(rows, list):
        raise TaskError(f"{path}: a JSON file of tasks holds a list; for lines use .jsonl")
    yield from ((f"{path}[{index}]", row) for index, row in enumerate(rows))


def _json(read: Callable[[], str], where: str) -> Any:
    try:
        text = read()
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise TaskError(f"{where}: not UTF-8 (byte {error.start}): save it as UTF-8") from error
    except json.JSONDecodeError as error:
        raise TaskError(f"{where}: no JSON: {error.msg}, at character {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:  # a number of over 4300 digits; nested too deep
        raise TaskError(f"{where}: no JSON that can be read: {error}") from error
    # Half a surrogate pair can be written in JSON, but neither tokenised nor stored.
    return _whole_characters(value) if "\\u" in text else value


def _whole_characters(value: Any) -> Any:
    if isinstance(value, str):
        return whole_text(value)
    if isinstance(value, list):
        return [_whole_characters(item) for item in value]
    if isinstance(value, dict):
        return {_whole_characters(k): _whole_characters(v) for k, v in value.items()}
    return value


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow", "trl", "reading Parquet tasks") from error
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(1024):
                for row in batch.to_pylist():
                    yield f"{path} row {number}", row
                    number += 1
    except (pa.ArrowException, OSError) as error:
        raise TaskError(f"{path}: no Parquet file that can be read: {error}") from error


READERS: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
    ".jsonl": _jsonl_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
}


def _hub_rows(
    name: str, subset: str | Sequence[str] | None, split: str
) -> Iterator[tuple[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("datasets", "trl", "reading tasks from the Hub") from error
    for one in [subset] if subset is None or isinstance(subset, str) else subset:
        try:
            rows = datasets.load_dataset(name, one, split=split)
        except Exception as error:
            raise TaskError(
                f"tasks.path: {name!r} is no file here, and as a dataset on the Hub it could not be "
                f"loaded: {type(error).__name__}: {error}"
            ) from error
        part = split if one is None else f"{one}/{split}"
        yield from ((f"{name}[{part}] row {index}", row) for index, row in enumerate(rows))
