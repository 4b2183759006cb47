"""What a run's rollouts say: accuracy with its interval, counts over the stored updates."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mintrl_env.config import RunConfig
from mintrl_env.console import Advance
from mintrl_env.errors import StoreError
from mintrl_env.metrics import read_metrics
from mintrl_env.run_folder import RunFolder, write_json
from mintrl_env.statistics import mean_interval, wilson_interval
from mintrl_env.trajectory import RolloutStats, Trajectory
from mintrl_env.types import StopReason, Task

if TYPE_CHECKING:
    from mintrl_env.adapters.session import RolloutSession

EVALUATION, PROBE = -1, -2
"""Update numbers of evaluations and probes: their draws are the same before and after a training,
so that a difference is the policy's."""


def sample(
    session: RolloutSession,
    tasks: Sequence[Task],
    update: int,
    rows: range,
    reviewed: bool,
    advance: Advance,
    *,
    done: int = 0,
) -> list[list[Trajectory]]:
    """The rows `rows` of each task's group; the bar goes on from `done`.

    What is no update's (`update` < 0) may be any number of problems, and is run within the session's
    window.
    """
    return session.groups(
        tasks,
        update=update,
        reviewed=reviewed,
        rollouts=[rows] * len(tasks),
        on_progress=lambda rows, total: advance(done + rows, ""),
        at_once=session.window if update < 0 else None,
    )


def evaluate_groups(groups: Sequence[Sequence[Trajectory]]) -> dict[str, Any]:
    """Accuracy (pass@1) over problems, with its 95 % interval and the share of each problem.

    A row that could not be scored is left out; a problem without a scored row is counted apart.
    """
    by_task: dict[str, float] = {}
    undecided = unscored = 0
    for rows in groups:
        rewards = [row.reward for row in rows if row.valid and row.score.decided]
        unscored += len(rows) - len(rewards)
        if rewards:
            by_task[rows[0].task_id] = sum(reward >= 1.0 for reward in rewards) / len(rewards)
        else:
            undecided += 1
    values = list(by_task.values())
    accuracy = sum(values) / len(values) if values else None
    single = all(len(rows) == 1 for rows in groups)
    interval: tuple[float, float] | None = None
    if values:
        # Of values that are all alike a bootstrap knows no width.
        binary = single or set(values) in ({0.0}, {1.0})
        interval = wilson_interval(sum(values), len(values)) if binary else mean_interval(values)
    return {
        "accuracy": accuracy,
        "ci95": None if interval is None else list(interval),
        "problems": len(values),
        "undecided_problems": undecided,
        "unscored_rows": unscored,
        "truncated_share": _share(
            row.stop_reason is StopReason.LENGTH for rows in groups for row in rows
        ),
        "by_task": by_task,
    }


def summarise(config: RunConfig, folder: RunFolder, figures: dict[str, Any]) -> dict[str, Any]:
    """A run's figures: evaluations, and counts over all stored rollouts of its updates."""
    stats, store = RolloutStats(), folder.store()
    for update in range(config.train.updates):
        groups: dict[str, list[Trajectory]] = {}
        for row in store.read(update=update)[0]:
            groups.setdefault(row.task_id, []).append(row)
        for rows in groups.values():
            stats.add_group(rows)
    metrics = read_metrics(folder.metrics_file)
    seconds = sum(row.get("seconds") or 0.0 for row in metrics)
    summary: dict[str, Any] = {"method": config.method}
    for name in ("before", "after"):
        found = figures.get(name) or {}
        summary[f"accuracy_{name}"] = found.get("accuracy")
        summary[f"accuracy_{name}_ci95"] = found.get("ci95")
    summary |= {
        "held_out_problems": (figures.get("after") or figures.get("before") or {}).get(
            "problems", 0
        ),
        "updates": config.train.updates,
        "rollouts": stats.trajectories,
        "seconds": round(seconds, 1),
        **stats.as_dict(),
    }
    for name in ("probe_before", "probe_after"):
        if name in figures:
            summary[name] = {
                key: figures[name][key]
                for key in ("reviews", "revises", "revises_per_review", "intervened_reward")
            }
    return summary


def kept(
    path: Path, asked: Mapping[str, Any], fresh: bool, compute: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """The result stored at `path`, or a new one, which is then stored.

    Args:
        asked: what the result is of (tasks, samples); a result of something else is not taken.
        fresh: take none.

    Raises:
        StoreError: it cannot be written.
    """
    if not fresh and (found := stored(path, asked)) is not None:
        return found
    result = {**compute(), "asked": dict(asked)}
    write_json(path, result)
    return result


def keep_best(
    run: Path, update: int, accuracy: float | None, save: Callable[[str], object]
) -> bool:
    """Keep the weights where an evaluation is better than all before it; of equals the first stays.

    They lie in `run/best-UPDATE`; best.json names the folder, so that a kill leaves a whole one.

    Args:
        update: updates done.
        accuracy: None: nothing could be scored.
        save: writes the model into a folder.

    Raises:
        StoreError: best.json cannot be written.
    """
    before = _best(run)
    if accuracy is None or (before is not None and accuracy <= before["accuracy"]):
        return False
    name = f"best-{update}"
    shutil.rmtree(run / name, ignore_errors=True)
    save(str(run / name))
    write_json(run / "best.json", {"update": update, "accuracy": accuracy, "folder": name})
    if before is not None and before["folder"] != name:
        shutil.rmtree(run / before["folder"], ignore_errors=True)
    return True


def best_folder(run: Path) -> Path:
    """The weights of a run's best evaluation.

    Raises:
        StoreError: it has none.
    """
    best = _best(run)
    if best is None:
        raise StoreError(
            f"{run}: no best checkpoint: one is kept where a run is evaluated on its way "
            "(evaluation.every); --which last takes the last one"
        )
    return run / str(best["folder"])


def _best(run: Path) -> dict[str, Any] | None:
    with suppress(OSError, ValueError):
        found = json.loads((run / "best.json").read_text())
        if isinstance(found, dict) and (run / str(found.get("folder"))).is_dir():
            return found
    return None


def stored(path: Path, asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """The result at `path`, if it is of what is asked."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        if isinstance(found, dict) and found.get("asked") == asked:
            return found
    return None


def _share(flags: Iterable[bool]) -> float | None:
    values = [bool(flag) for flag in flags]
    return sum(values) / len(values) if values else None
