"""What a run folder holds, read for people: figures, metrics, config, and where the rollouts are.

    RUN/  summary.json  config.yaml  metrics.jsonl  curves.png  rollouts/*.parquet

or, where methods are compared, `summary.json` and `curves.png` in RUN and one such folder a method.
Every file is optional; one that cannot be read is a problem to be shown, not the end of the report.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mintrl_env.errors import StoreError
from mintrl_env.metrics import read_metrics
from mintrl_env.store import RolloutStore
from mintrl_env.trajectory import RolloutStats, Trajectory

_SECRET = re.compile(
    r"(?i)^(\s*[\"']?[\w.-]*(?:api[_-]?key|secret|password|passwd|authorization|credential|"
    r"(?:auth|access|hf|api|bearer|wandb)[_-]?(?:token|key))[\w.-]*[\"']?\s*:\s*)(?!(?:null|~|'')\s*$)\S.*$"
)
_URL_LOGIN = re.compile(r"(://)[^/\s@]+@")
_PART = re.compile(r"-u(-?\d+)")


@dataclass
class Run:
    """One method's run.

    Attributes:
        name: the method's name, or the folder's.
        figures: its part of summary.json, flattened (`tokens.policy`); counted from the rollouts
            where there is no summary.
        metrics: one row an update.
        config: config.yaml as text, secrets blotted out; "" where there is none.
        updates: the updates whose rollouts are stored.
        problems: what could not be read.
    """

    name: str
    folder: Path
    figures: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    config: str = ""
    updates: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def rollouts(self, update: int) -> list[Trajectory]:
        """The rows of one update; files that cannot be read become problems."""
        rows, problems = RolloutStore(self.folder / "rollouts").read(update=update)
        self.problems += [p for p in problems if p not in self.problems]
        return rows


def load_runs(run_dir: Path) -> list[Run]:
    """The runs in a folder: itself, or its methods.

    Raises:
        StoreError: there is no run in it.
    """
    folders = [run_dir] if _is_run(run_dir) else []
    if not folders and run_dir.is_dir():
        folders = sorted(path for path in run_dir.iterdir() if path.is_dir() and _is_run(path))
    if not folders:
        raise StoreError(
            f"{run_dir}: no run here: neither it nor a folder in it has rollouts/ or metrics.jsonl"
        )
    problems: list[str] = []
    summary = _summary(run_dir / "summary.json", problems)
    methods = summary.get("methods")
    methods = methods if isinstance(methods, dict) else {}
    order = {name: place for place, name in enumerate(methods)}
    folders.sort(key=lambda path: (order.get(path.name, len(order)), path.name))
    runs = []
    for folder in folders:
        run = _load(folder)
        own = methods.get(folder.name)
        if own is None and folder == run_dir:
            own = next(iter(methods.values())) if len(methods) == 1 else summary
        if own is None:
            own = _summary(folder / "summary.json", run.problems)
        run.figures = flatten(own) if isinstance(own, dict) else {}
        if not run.figures:
            run.figures = flatten(_counted(run))
        runs.append(run)
    runs[0].problems[:0] = problems
    return runs


def _is_run(folder: Path) -> bool:
    return (folder / "rollouts").is_dir() or (folder / "metrics.jsonl").is_file()


def _load(folder: Path) -> Run:
    run = Run(name=folder.resolve().name, folder=folder)
    try:
        run.metrics = read_metrics(folder / "metrics.jsonl")
    except StoreError as error:
        run.problems.append(str(error))
    try:
        run.config = without_secrets((folder / "config.yaml").read_text("utf-8", "replace"))
    except FileNotFoundError:
        pass
    except OSError as error:
        run.problems.append(f"{folder / 'config.yaml'}: cannot be read: {error.strerror}")
    names = (path.name for path in (folder / "rollouts").glob("[!.]*.parquet"))
    run.updates = sorted({int(m.group(1)) for name in names if (m := _PART.search(name))})
    return run


def _summary(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        summary = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"{path}: cannot be read: {error}")
        return {}
    if not isinstance(summary, dict):
        problems.append(f"{path}: not a JSON object")
        return {}
    return summary


def _counted(run: Run) -> dict[str, Any]:
    """The store's own figures, one update in memory at a time."""
    stats = RolloutStats()
    for update in run.updates:
        groups: dict[str, list[Trajectory]] = {}
        for row in run.rollouts(update):
            groups.setdefault(row.task_id, []).append(row)
        for rows in groups.values():
            stats.add_group(rows)
    return {"updates": len(run.updates), **stats.as_dict()} if stats.trajectories else {}


def flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= flatten(item, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = item
    return flat


def without_secrets(config: str) -> str:
    """A config's text with the values of keys that name a secret, and URLs' logins, blotted out."""
    lines = (_SECRET.sub(r"\1(hidden)", line) for line in config.splitlines())
    return "\n".join(_URL_LOGIN.sub(r"\1(hidden)@", line) for line in lines)


def config_differences(runs: list[Run]) -> list[tuple[str, list[str]]]:
    """Keys whose values differ between the runs' configs, each with one value a run."""
    import yaml

    flat: list[dict[str, Any]] = []
    for run in runs:
        try:
            parsed = yaml.safe_load(run.config)
        except yaml.YAMLError:
            parsed = None
        flat.append(flatten(parsed) if isinstance(parsed, dict) else {})
    keys = dict.fromkeys(key for config in flat for key in config)
    missing = object()
    rows = []
    for key in keys:
        values = [config.get(key, missing) for config in flat]
        if any(value != values[0] for value in values):
            rows.append(
                (key, ["not set" if v is missing else json.dumps(v, default=str) for v in values])
            )
    return rows
