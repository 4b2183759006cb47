"""`mintrl filter`: the policy alone tries each problem some times, and those of a fitting pass rate stay.

A group in which all rollouts fail, or all succeed, teaches GRPO nothing, and one that the judge too
cannot rescue teaches MInTRL nothing; a pilot before the training leaves them out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mintrl_env import recipes
from mintrl_env.config import RunConfig
from mintrl_env.console import RunConsole
from mintrl_env.errors import MintrlError, MissingExtraError, TaskError, UsageError
from mintrl_env.evaluation import sample
from mintrl_env.filter_rates import (
    Band,
    PilotFile,
    Rate,
    histogram,
    nothing_left,
    refuse_other_pilot,
)
from mintrl_env.prompts import PromptBuilder
from mintrl_env.run_folder import write_text
from mintrl_env.running import open_policy
from mintrl_env.tasks import TaskColumns, load_tasks
from mintrl_env.types import Task

FILTER = -6
"""Update number: its draws are no training's, evaluation's or preflight's."""

SHARE = "pass_rate"
_SLICE = 256  # problems whose responses are in memory at once
_SUFFIXES = (".jsonl", ".parquet")


def filter_tasks(
    config: RunConfig,
    out: Path,
    *,
    n: int = 8,
    keep: str = "0.1..0.9",
    resume: bool = False,
    console: RunConsole | None = None,
) -> dict[str, Any]:
    """Write the config's problems whose pass rate lies in a band, with their rates.

    Args:
        out: a .jsonl or .parquet file that `tasks.path` of the same config reads; replaced. The
            rates of all problems stand in `OUT.pilot.jsonl` beside it.
        n: samples a problem.
        keep: the band.
        resume: go on with a pilot that was cut short; with a whole one, only choose anew.

    Returns:
        Counts.

    Raises:
        MintrlError: no problem is left; nothing is written then.
        StoreError: `out` or its pilot cannot be written, or belongs to another config.
    """
    band, console = Band.parse(keep), console or RunConsole()
    if out.suffix not in _SUFFIXES:
        raise UsageError(f"--out {out}: a file for tasks ends with {' or '.join(_SUFFIXES)}")
    if n < 1:
        raise UsageError(f"--n counts samples and must be at least 1, not {n}")
    pilot_path = out.with_name(f"{out.name}.pilot.jsonl")
    refuse_other_pilot(pilot_path, resume=resume)
    from mintrl_env.adapters.session import RolloutSession

    section = config.tasks
    unusable: list[str] = []
    tasks = recipes.load_task_set(
        section, "tasks", seed=config.train.seed, on_unusable=unusable.append
    )
    verifier = recipes.make_verifier(section, tasks, "tasks")
    with console.bar("model", 1) as advance:
        host = open_policy(config, progress=recipes.warmup_note(advance))
        advance(1, "")
    tasks = _fitting(host.prompts, tasks, unusable)
    for why in unusable[:3]:
        console.say(f"left out: {why}")
    if len(unusable) > 3:
        console.say(f"left out: {len(unusable) - 3} more that cannot be used")
    settings = recipes.rollout_config(config, n_control=n, n_intervened=0)
    pilot = PilotFile(pilot_path, _asked(config, n), resume=resume)
    with pilot:
        done_before = {name for name, rate in pilot.rates.items() if not rate.failed}
        left = [task for task in tasks if task.task_id not in done_before]
        with (
            RolloutSession(
                host,
                settings,
                verifier=verifier,
                seed=config.train.seed,
                on_group=lambda rows: pilot.add(Rate.of(rows)),
            ) as session,
            console.bar("pilot", len(tasks) * n) as advance,
        ):
            done = len(tasks) - len(left)
            for start in range(0, len(left), _SLICE):
                some = left[start : start + _SLICE]
                sample(session, some, FILTER, range(n), False, advance, done=done * n)
                done += len(some)
    return _choose(config, tasks, pilot.rates, out, band, len(unusable), console)


def _choose(
    config: RunConfig,
    tasks: Sequence[Task],
    rates: Mapping[str, Rate],
    out: Path,
    band: Band,
    unusable: int,
    console: RunConsole,
) -> dict[str, Any]:
    found = [rates[task.task_id] for task in tasks]
    for line in histogram(found, band):
        console.say(line)
    kept = [(task, rates[task.task_id]) for task in tasks if rates[task.task_id] in band]
    if not kept:
        raise MintrlError(nothing_left(found, band) if found else "no problem is left to try")
    columns = recipes.task_columns(config.tasks)
    _write_rows(out, [_row(task, rate, columns) for task, rate in kept])
    _check_readable(out, columns, [task for task, _ in kept])
    decided = [rate for rate in found if rate.decided]
    return {
        "verifier": tasks[0].verifier,
        "problems": len(found),
        "kept": len(kept),
        "never_solved": sum(rate.passed == 0 for rate in decided),
        "always_solved": sum(rate.passed == rate.decided for rate in decided),
        "undecided": len(found) - len(decided),
        "left_out_before": unusable,
        "mean_pass_rate": sum(r.share for r in decided) / len(decided) if decided else None,
        "truncated_share": sum(r.truncated for r in found) / max(1, sum(r.samples for r in found)),
        "sampled_tokens": sum(rate.tokens for rate in found),
    }


def reading_keys(
    config: RunConfig, out: Path, verifier: str, overrides: Sequence[str] = ()
) -> list[str]:
    """What a training with the same config has to be told, to read the file.

    Args:
        verifier: the problems' (a procedural set names its own).
        overrides: those with which the pilot ran; they hold for the training too, but for which
            problems are taken.
    """
    if config.tasks.path is not None:
        chosen = ("tasks.path=", "tasks.limit=", "tasks.shuffle=")
        return [*(o for o in overrides if not o.startswith(chosen)), f"tasks.path={out}"]
    others = [override for override in overrides if not override.startswith("tasks")]
    return [*others, f"tasks={{path: {out}, verifier: {verifier}}}"]


def _asked(config: RunConfig, n: int) -> dict[str, Any]:
    """What rates are of: they hold for no other policy, prompt, length or problems."""
    data = config.model_dump(mode="json")
    tasks = {key: value for key, value in data["tasks"].items() if key != "limit"}
    return {
        "n": n,
        "policy": data["policy"],
        "tasks": tasks,
        "max_response": config.episode.max_response,
        "temperature": config.rollout.temperature,
        "seed": config.train.seed,
        "warmup": data["warmup"],
    }


def _fitting(prompts: PromptBuilder, tasks: Sequence[Task], unusable: list[str]) -> list[Task]:
    """The tasks whose prompts fit; the others are told of."""
    fit = []
    for task in tasks:
        try:
            prompts.ids(task)
        except TaskError as error:
            unusable.append(str(error))
        else:
            fit.append(task)
    return fit


def _row(task: Task, rate: Rate, columns: TaskColumns) -> dict[str, Any]:
    """A task as a row under the names by which the same config reads it."""
    row = dict(task.metadata)
    fields = {
        "task_id": task.task_id,
        "prompt": task.prompt if isinstance(task.prompt, str) else [dict(m) for m in task.prompt],
        "answer": task.answer,
        "tests": task.tests,
        "context": task.context,
        "system_prompt": task.system_prompt,
    }
    for field, value in fields.items():
        if value is not None and columns.names(field):
            row[columns.names(field)[0]] = value
    return {**row, SHARE: rate.share, "pass_samples": rate.decided}


def _write_rows(out: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    if out.suffix == ".jsonl":
        write_text(out, "".join(json.dumps(row, default=str) + "\n" for row in rows))
        return
    try:
        import pyarrow as pa
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingExtraError("pyarrow", "trl", "writing Parquet tasks") from error
    # A column of tests has values of all types: it is written as JSON, which is read back.
    plain = [
        {
            key: json.dumps(value, default=str) if isinstance(value, Mapping) else value
            for key, value in row.items()
        }
        for row in rows
    ]
    try:
        table = pa.Table.from_pylist(plain, schema=_schema(pa, plain))
        temporary = out.with_name(f".{out.name}.tmp")
        parquet.write_table(table, temporary)
        temporary.replace(out)
    except (pa.ArrowException, OSError) as error:
        raise MintrlError(
            f"{out}: the rows do not fit into Parquet ({error}); take .jsonl"
        ) from error


def _schema(pa: Any, rows: Sequence[Mapping[str, Any]]) -> Any:
    """Columns of all rows: the first row alone does not have what is absent in it."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    return pa.schema([(name, pa.array(values).type) for name, values in columns.items()])


def _check_readable(out: Path, columns: TaskColumns, kept: Sequence[Task]) -> None:
    """Read the file as a training will, and compare: no problem may have changed on the way."""
    for before, after in zip(kept, load_tasks(str(out), columns), strict=True):
        for name in ("task_id", "prompt", "answer", "context", "system_prompt"):
            if getattr(before, name) != getattr(after, name):
                raise MintrlError(
                    f"{out}: task {before.task_id!r} would be read back with another {name} "
                    f"({getattr(after, name)!r}): report this as a bug"
                )
        if json.dumps(before.tests, default=str) != json.dumps(after.tests, default=str):
            raise MintrlError(
                f"{out}: the tests of task {before.task_id!r} would be read otherwise"
            )
