"""`mintrl train CONFIG --dry-run`: every stage of a recipe in seconds, without a GPU, a Hub or a server.

The policy is a tiny random model of the same family, the problems are built in, a served judge is a
stand-in behind real HTTP; all else is the recipe's: columns, prompts, guards, verifier and sandbox,
method, switch to GRPO, checkpoints, evaluation. What was replaced is printed, then what each stage did.
It says whether a recipe runs, nothing about what it learns.
"""

from __future__ import annotations

import io
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from mintrl_env import recipes
from mintrl_env.config import RunConfig
from mintrl_env.console import RunConsole
from mintrl_env.dry_run_config import Small, family_of, made_small
from mintrl_env.dry_run_judge import stand_in
from mintrl_env.dry_run_model import tiny_model
from mintrl_env.errors import MintrlError, StoreError
from mintrl_env.evaluation import best_folder
from mintrl_env.loops import sync
from mintrl_env.metrics import read_metrics
from mintrl_env.preflight_servers import is_judged
from mintrl_env.run_folder import RunFolder, write_json
from mintrl_env.types import Kind, Task

MARK = "dry_run.json"
"""A folder with this file is a dry run's, and may be replaced."""


def dry_run(
    config: RunConfig, folder: Path, *, console: RunConsole | None = None
) -> dict[str, Any]:
    """Go through all stages of a recipe, made small.

    Args:
        folder: for all that is written; an earlier dry run in it is replaced.

    Returns:
        stage -> what it did, also written to dry_run.json.

    Raises:
        MintrlError: a stage did not do its work; the message names it.
    """
    from mintrl_env.report import write_report
    from mintrl_env.running import evaluate, model_folder, run_tokenizer
    from mintrl_env.training import train

    console, started = console or RunConsole(), time.monotonic()
    quiet = RunConsole(Console(file=io.StringIO()))  # figures of a random model say nothing
    _clear(folder)
    write_json(folder / MARK, {})
    stages: dict[str, str] = {}

    def done(stage: str, what: str) -> None:
        stages[stage] = what
        console.say(f"{stage}: {what}")

    recipes.quiet_transformers()
    with ExitStack() as stack:
        positions = config.policy.max_prompt + 4096
        model = tiny_model(folder / "policy", family_of(config), positions=positions)
        options = config.judge.options if config.judge else {}
        url = stack.enter_context(
            stand_in(str(options.get("model", "stand-in")), options.get("capabilities"))
        )
        small = made_small(config, folder, model=model, judge_url=url)
        for line in small.said:
            console.say(f"replaced: {line}")
        tasks = recipes.load_task_set(small.config.tasks, "tasks", seed=small.config.train.seed)
        done("tasks", f"{len(tasks)} loaded")
        done("verify", _verify(small, tasks))
        run = RunFolder(folder / "run")
        summary = train(small.config, run, console=quiet)
        done("preflight", "passed")
        for stage, what in _trained(small.config, run):
            done(stage, what)
        if small.config.evaluation is None:
            done("evaluation", "the recipe has none")
        else:
            done("evaluation", f"accuracy {summary['accuracy_after']} after the training")
        for which, weights in (("last", model_folder(str(run.path))), ("best", _best(run))):
            if weights is None:
                continue
            where = RunFolder(folder / f"eval-{which}")
            found = evaluate(
                small.config, where, checkpoint=str(weights), n=1, ks=[1], console=quiet
            )
            done(f"mintrl eval, {which}", f"{found['problems']} problems, {weights.name}")
        tokenizer = run_tokenizer(run.path)
        page = write_report(run.path, decode=tokenizer.decode, special_ids=tokenizer.special_ids)
        done("report", f"{page} ({page.stat().st_size // 1024} KiB)")
    console.say(f"the recipe runs: all stages in {time.monotonic() - started:.0f} s")
    write_json(folder / MARK, stages)
    return stages


def _clear(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARK).is_file():
            raise StoreError(
                f"{folder} holds something else than a dry run: choose another with --run"
            )
        shutil.rmtree(folder)


def _verify(small: Small, tasks: Sequence[Task]) -> str:
    """The recipe's verifier on responses that are known to be right and wrong."""
    if not small.samples:
        return "the set is a built-in one, whose verifier has its own tests"
    section = small.config.tasks
    verifier = recipes.make_verifier(section, tasks, "tasks")
    columns = recipes.task_columns(section)
    for number, sample in enumerate(small.samples):
        task = columns.task(sample.row, f"problem {number}", number)
        for response, wanted in ((sample.right, 1.0), (sample.wrong, 0.0)):
            score = sync(verifier.score(task, response))
            if score.reward != wanted:
                raise MintrlError(
                    f"dry run, verify: the reward of a {'right' if wanted else 'wrong'} response is "
                    f"{score.reward}, not {wanted} ({score.status}: {score.detail})"
                )
    count = len(small.samples)
    return f"{section.verifier}: {count} right responses are paid, {count} wrong ones are not"


def _trained(config: RunConfig, run: RunFolder) -> list[tuple[str, str]]:
    """What rollouts, reviews, updates and checkpoints have left behind.

    Raises:
        MintrlError: something is missing.
    """
    rows, problems = run.store().read()
    wanted = config.rows_per_update * config.train.updates
    if problems or len(rows) != wanted:
        raise MintrlError(f"dry run, rollouts: {len(rows)} rows are stored, not {wanted}")
    judged = [row for row in rows if row.kind is Kind.INTERVENED]
    reviews = [review for row in judged for review in row.reviews]
    revises = sum(review.outcome == "revise" for review in reviews)
    on = config.objective.intervention_updates if is_judged(config) else 0
    expected = {u for u in range(config.train.updates) if on < 0 or u < on}
    if {row.update for row in judged} != expected:
        raise MintrlError(f"dry run, switch to GRPO: reviewed updates are not {sorted(expected)}")
    if expected and not reviews:
        raise MintrlError("dry run, reviews: no chunk was reviewed")
    tokens = sum(int((row.provenance == 1).sum()) for row in rows)
    metrics = read_metrics(run.metrics_file)
    losses = ", ".join(f"{row['loss']:.3g}" for row in metrics)
    phases = ", then ".join(dict.fromkeys(str(row["phase"]) for row in metrics))
    checkpoint = run.last_checkpoint()
    if len(metrics) != config.train.updates or checkpoint is None:
        raise MintrlError("dry run, checkpoint: an update or its checkpoint is missing")
    return [
        ("rollouts", f"{len(rows)} rows, {len(judged)} of them open to review"),
        ("reviews", f"{len(reviews)}, {revises} Revise; {tokens} tokens spliced in"),
        ("updates", f"{len(metrics)}, loss {losses}; {phases}"),
        ("checkpoint", checkpoint.name),
    ]


def _best(run: RunFolder) -> Path | None:
    try:
        return best_folder(run.path)
    except StoreError:
        return None
