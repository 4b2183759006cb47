"""Where a store lies, and what its run's config says about it: tokenizer, steps, tasks, groups."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mintrl_env import recipes
from mintrl_env.config import RunConfig, load_config
from mintrl_env.errors import MintrlError, StoreError
from mintrl_env.exports import Reading
from mintrl_env.needs import EpisodeConfig
from mintrl_env.prompts import ByteTokenizer, HFTokenizer
from mintrl_env.run_folder import write_json
from mintrl_env.store import RolloutStore
from mintrl_env.store_merge import merge_stores, run_names
from mintrl_env.trajectory import Trajectory

_RUNS = "runs.json"


@dataclass
class StoreSource:
    """A store and the folders of the runs whose rows it holds.

    Attributes:
        store: the Parquet files.
        runs: a row's `run` -> the run's folder, which need not be there any more. A run's own store
            has one, under "".
        remarks: what could not be had of a run, for people; gathered by `reading`.
    """

    store: RolloutStore
    runs: Mapping[str, Path]
    remarks: list[str] = field(default_factory=list)
    _configs: dict[str, RunConfig | None] = field(default_factory=dict)
    _tokenizers: dict[str, HFTokenizer | ByteTokenizer] = field(default_factory=dict)

    def config(self, run: str) -> RunConfig | None:
        """The config of a run, or None where it cannot be read."""
        if run not in self._configs:
            file = self.runs[run] / "config.yaml" if run in self.runs else None
            try:
                self._configs[run] = load_config(file) if file and file.is_file() else None
            except MintrlError as error:
                self.remarks.append(f"{file}: {error}")
                self._configs[run] = None
        return self._configs[run]

    def group_size(self, run: str, update: int) -> int | None:
        """Rows of a whole group of a training update, by the config."""
        config = self.config(run) if update >= 0 else None
        return None if config is None else config.group_size

    def reading(
        self, run: str, *, tokenizer: str | None = None, delimiters: Sequence[str] = ()
    ) -> Reading:
        """What it takes to read a run's tokens as texts and steps.

        Args:
            tokenizer: a folder or Hub id, or "bytes"; default the run's own.
            delimiters: default the config's, or the built-in ones where there is no config.

        Raises:
            StoreError: no tokenizer is known for the run. ConfigError: it cannot be loaded.
        """
        config = self.config(run)
        if not delimiters:
            delimiters = (
                config.episode.step_delimiters if config else EpisodeConfig().step_delimiters
            )
        return Reading(self.tokenizer(run, tokenizer), tuple(delimiters), self._problems(run))

    def tokenizer(self, run: str, named: str | None = None) -> HFTokenizer | ByteTokenizer:
        """The tokenizer of a run, or the one that is named; see `reading`."""
        key = named if named is not None else f"run {run}"
        if key not in self._tokenizers:
            self._tokenizers[key] = self._load_tokenizer(run, named)
        return self._tokenizers[key]

    def _load_tokenizer(self, run: str, named: str | None) -> HFTokenizer | ByteTokenizer:
        from mintrl_env.running import run_tokenizer

        if named == "bytes":
            return ByteTokenizer()
        if named is not None:
            return HFTokenizer(recipes.load_tokenizer(named, "--tokenizer"))
        if run not in self.runs:
            raise StoreError(
                f"{self.store.folder}: no run folder is known"
                + (f" for the rows of run {run!r}" if run else " beside these files")
                + ", and with it no tokenizer: name one with --tokenizer"
            )
        try:
            return run_tokenizer(self.runs[run])
        except StoreError as error:
            raise StoreError(f"{error}; or name a tokenizer with --tokenizer") from error

    def _problems(self, run: str) -> dict[str, str]:
        config = self.config(run)
        if config is None:
            return {}
        sections = [("tasks", config.tasks)]
        if config.evaluation is not None:
            sections.append(("evaluation.tasks", config.evaluation.tasks))
        found: dict[str, str] = {}
        for where, section in reversed(sections):  # a name of both sets is the training's
            try:
                tasks = recipes.load_task_set(section, where, seed=config.train.seed)
            except MintrlError as error:
                self.remarks.append(
                    f"{where}: {error}; the policy's prompt is given as the problem"
                )
                continue
            found |= {task.task_id: task.prompt_text for task in tasks}
        return found

    def rows(
        self,
        first: int | None = None,
        last: int | None = None,
        *,
        problems: list[str] | None = None,
    ) -> Iterator[Trajectory]:
        """The latest rows, one update in memory at a time.

        Args:
            first, last: the updates to read, both ends included; default all that are not negative
                (evaluations), or all where there are no others.
            problems: gets a line for every file that was ignored, once.
        """
        for update in self.chosen_updates(first, last):
            rows, ignored = self.store.read(update=update)
            if problems is not None:
                problems += [line for line in ignored if line not in problems]
            yield from rows

    def chosen_updates(self, first: int | None = None, last: int | None = None) -> list[int]:
        updates = self.store.updates()
        if first is None and last is None:
            return [u for u in updates if u >= 0] or updates
        low = updates[:1] if first is None else [first]
        high = updates[-1:] if last is None else [last]
        return [u for u in updates if low[0] <= u <= high[0]]


def open_source(path: Path) -> StoreSource:
    """The store at `path`: a run's folder, a merged one, or a folder of Parquet parts.

    Raises:
        StoreError: there is none.
    """
    folder = path / "rollouts" if (path / "rollouts").is_dir() else path
    if not folder.is_dir() or not (folder != path or RolloutStore(folder).updates()):
        raise StoreError(
            f"{path}: no store here: expected a run's folder with rollouts/, or a folder with "
            "part-*.parquet or update-*.parquet"
        )
    home = folder.resolve().parent if folder.name == "rollouts" else folder
    store = RolloutStore(folder)
    if (home / _RUNS).is_file():
        try:
            runs = {str(k): Path(v) for k, v in json.loads((home / _RUNS).read_text()).items()}
        except (ValueError, AttributeError, OSError) as error:
            raise StoreError(f"{home / _RUNS}: cannot be read: {error}") from error
        return StoreSource(store, runs)
    return StoreSource(store, {"": home} if (home / "config.yaml").is_file() else {})


def merge_sources(paths: Sequence[Path], out: Path) -> tuple[int, list[str], list[str]]:
    """Merge the stores at `paths` into a new folder `out`.

    Returns:
        Rows written, the names of the runs, and a line for every file that was ignored.

    Raises:
        StoreError: a store that is not there, or an `out` that is. UsageError: a store twice.
    """
    sources = [open_source(path) for path in paths]
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StoreError(f"{out} exists already: choose a new folder")
    names = run_names([_home(source, path) for source, path in zip(sources, paths, strict=True)])
    stores = {name: source.store for name, source in zip(names, sources, strict=True)}
    count, problems = merge_stores(stores, RolloutStore(out / "rollouts"))
    runs: dict[str, Any] = {}
    for name, source in zip(names, sources, strict=True):
        for run, folder in source.runs.items():
            runs[f"{name}/{run}" if run else name] = str(folder.resolve())
    write_json(out / _RUNS, runs)
    return count, names, problems


def _home(source: StoreSource, path: Path) -> Path:
    """What a store is called by: its run's folder."""
    return source.store.folder.resolve().parent if path.name == "rollouts" else path
