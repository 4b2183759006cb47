"""`mintrl quickstart`: MInTRL-Const and GRPO from one start, side by side in two processes.

Each is an ordinary `mintrl train` of a shipped config; this module warms the models up first, follows
the two, and puts their figures, curves and rollouts together.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.table import Table

from mintrl_env import recipes
from mintrl_env.config import RunConfig, config_differences, load_config
from mintrl_env.console import RunConsole
from mintrl_env.curves import write_curves
from mintrl_env.errors import ConfigError, MintrlError
from mintrl_env.judge_audit import JudgeAudit, audit
from mintrl_env.metrics import read_metrics
from mintrl_env.prompts import HFTokenizer
from mintrl_env.report import write_report
from mintrl_env.run_folder import RunFolder
from mintrl_env.statistics import mean_interval

METHODS = {"mintrl-const": "quickstart_mintrl.yaml", "grpo": "quickstart_grpo.yaml"}
# What makes a method: everything else must be equal, or the comparison says nothing.
METHOD_KEYS = ("method", "objective", "train.learning_rate", "train.warmup_steps")


TASK = """\
The task, a table chain: `*` is a secret table of 100 facts (4*5 may be 7). A problem gives a start and
twelve operands; the response looks up one fact a line and ends with an answer line of four results.
The student knows 60 facts well, 25 badly, 15 hardly at all, so that it rarely gets twelve right in a
row. The judge is a teacher, the same kind of model, which knows nearly all facts but misses some errors
and finds some that are none; it corrects a line, never the answer. About 10 minutes on two idle cores.
"""


def quickstart(
    run_dir: Path, overrides: Sequence[str] = (), *, console: RunConsole | None = None
) -> dict[str, Any]:
    """Run both methods (or go on with them) and write summary.json, curves.png and report.html.

    Raises:
        ConfigError: the configs differ in more than the method's keys, have nothing to compare, or
            are not those of the runs in the folder.
        MintrlError: one of the two processes failed; its last lines are in the message.
    """
    console = console or RunConsole()
    started = time.monotonic()
    console.say(TASK)
    configs = {name: load_config(_shipped(file), overrides) for name, file in METHODS.items()}
    differences = config_differences(*configs.values())
    _print_differences(console, differences)
    _check_comparable(configs["mintrl-const"])
    finished = [name for name, config in configs.items() if _is_finished(run_dir / name, config)]
    if len(finished) == len(METHODS):
        console.say(
            f"{run_dir} is trained already: remove it, or name another folder, to train anew"
        )
    with console.bar("models", 1) as advance:
        recipes.warmup_models(configs["mintrl-const"], recipes.warmup_note(advance))
        advance(1, "")
    _train(run_dir, {n: c for n, c in configs.items() if n not in finished}, overrides, console)
    summary = collect(run_dir, configs, differences)
    summary["seconds"] = round(time.monotonic() - started, 1)
    RunFolder(run_dir).write_summary(summary)
    metrics = {name: read_metrics(run_dir / name / "metrics.jsonl") for name in METHODS}
    write_curves(metrics, run_dir / "curves.png", title="MInTRL-Const and GRPO from one start")
    tokenizer = _tokenizer(configs["mintrl-const"])
    write_report(
        run_dir,
        decode=tokenizer.decode,
        special_ids=tokenizer.special_ids,
        title="Quickstart: MInTRL-Const and GRPO",
    )
    print_summary(console, summary)
    console.say(
        f"\nLook at {run_dir}/report.html (rollouts, reviews, rewards), {run_dir}/curves.png and "
        f"{run_dir}/summary.json."
    )
    return summary


def _shipped(file: str) -> Path:
    return Path(str(files("mintrl_env.configs") / file))


def _print_differences(console: RunConsole, differences: Sequence[tuple[str, Any, Any]]) -> None:
    stray = [
        key
        for key, _, _ in differences
        if not any(key == name or key.startswith(name + ".") for name in METHOD_KEYS)
    ]
    if stray:
        raise ConfigError(
            f"the two configs differ in {', '.join(stray)}, which is no key of the method: the "
            "comparison would say nothing"
        )
    table = Table(title="The resolved configs differ in these keys alone", title_justify="left")
    for column in ("key", *METHODS):
        table.add_column(column)
    for key, *values in differences:
        table.add_row(key, *(str(value) for value in values))
    console.console.print(table)
    console.say(
        "Each learning rate is the one at which its method did best on validation problems."
    )


def _check_comparable(config: RunConfig) -> None:
    if config.tasks.name != "table_chain":
        raise ConfigError(
            "tasks: the quickstart checks its judge step by step, which only table_chain can do; "
            "train on other tasks with `mintrl train`"
        )
    if config.evaluation is None or not config.evaluation.after:
        raise ConfigError("evaluation: the quickstart compares accuracies; leave it on")


# --- the two processes


def _is_finished(folder: Path, config: RunConfig) -> bool:
    """Is this very run in the folder, at its end?

    Raises:
        ConfigError: a run of another config is there.
    """
    run = RunFolder(folder)
    run.check(config, resume=True)
    return run.summary_file.exists() and not config_differences(
        load_config(run.config_file), config
    )


def _train(
    run_dir: Path, configs: dict[str, RunConfig], overrides: Sequence[str], console: RunConsole
) -> None:
    """The runs of `configs`, side by side, to their end."""
    children: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name in configs:
            children[name] = _start(run_dir / name, METHODS[name], overrides)
        _follow(run_dir, children, configs, console)
    finally:
        for child in children.values():
            if child.poll() is None:
                child.terminate()
        for child in children.values():
            child.wait()


def _start(folder: Path, file: str, overrides: Sequence[str]) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "mintrl_env.cli", "train", str(_shipped(file))]
    command += ["--run", str(folder), "--resume"]
    for override in overrides:
        command += ["--set", override]
    # One core each: several threads a process would only fight for them.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with (folder / "run.log").open("ab") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env
        )


def _follow(
    run_dir: Path,
    children: dict[str, subprocess.Popen[bytes]],
    configs: dict[str, RunConfig],
    console: RunConsole,
) -> None:
    """Show both trainings as one bar until both have ended; the first failure ends the other."""
    total = sum(configs[name].train.updates for name in children)
    with console.bar("training", max(total, 1)) as advance:
        while True:
            running = [name for name, child in children.items() if child.poll() is None]
            rows = {name: read_metrics(run_dir / name / "metrics.jsonl") for name in children}
            notes = [_note(name, rows[name], name in running) for name in children]
            advance(sum(map(len, rows.values())), "; ".join(notes))
            for name, child in children.items():
                if child.returncode not in (None, 0):
                    raise MintrlError(_failure(run_dir / name, name, child.returncode))
            if not running:
                return
            time.sleep(1.0)


def _note(name: str, rows: Sequence[dict[str, Any]], running: bool) -> str:
    if not rows:
        return f"{name}: {'evaluating the start' if running else 'ended'}"
    reward = rows[-1].get("reward")
    shown = "" if reward is None else f", reward {reward:.2f}"
    return f"{name}: update {len(rows)}{shown}"


def _failure(folder: Path, name: str, status: int) -> str:
    log = folder / "run.log"
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    tail = "\n  ".join(lines[-12:])
    return f"the {name} run ended with status {status}; the end of {log}:\n  {tail}"


# --- the figures


def collect(
    run_dir: Path, configs: dict[str, RunConfig], differences: Sequence[tuple[str, Any, Any]]
) -> dict[str, Any]:
    """The two summaries in one, with the paired difference and the judge's own errors."""
    methods = {name: json.loads((run_dir / name / "summary.json").read_text()) for name in METHODS}
    const, grpo = (_accuracies(run_dir / name) for name in METHODS)
    paired = [const[task] - grpo[task] for task in const if task in grpo]
    mintrl = configs["mintrl-const"]
    reviews = audit_chain(run_dir / "mintrl-const", mintrl)
    return {
        "methods": methods,
        "difference": {
            "accuracy": sum(paired) / len(paired),
            "ci95": list(mean_interval(paired)),
            "problems": len(paired),
        },
        "judge": reviews.as_dict(),
        "config_differences": {key: list(values) for key, *values in differences},
    }


def _accuracies(folder: Path) -> dict[str, float]:
    found = json.loads((folder / "evaluation" / "after.json").read_text())
    return dict(found["by_task"])


def audit_chain(folder: Path, config: RunConfig) -> JudgeAudit:
    """The judge's reviews of a table-chain run against the task's exact step checker."""
    from mintrl_env.table_chain import ChainSettings, TableChain

    tasks = recipes.load_task_set(config.tasks, "tasks", seed=config.train.seed)
    prompts = {task.task_id: task.prompt_text for task in tasks}
    options = {k: v for k, v in config.tasks.options.items() if k not in ("count", "seed")}
    chain = TableChain(ChainSettings.from_dict(options))

    def first_wrong(task_id: str, accepted: str, steps: tuple[str, ...]) -> int | None:
        whole = accepted + "".join(steps)
        line = chain.first_wrong_line(prompts[task_id], whole, accepted.count("\n"))
        if line is None:
            return None
        # From the line's place in the text to the step that holds it: a chunk may begin anywhere.
        place = sum(len(text) + 1 for text in whole.split("\n")[:line])
        ends = accumulate(map(len, steps), initial=len(accepted))
        return next((i - 1 for i, end in enumerate(ends) if i and place < end), len(steps) - 1)

    rows, _ = RunFolder(folder).store().read()
    return audit(rows, _tokenizer(config), tuple(config.episode.step_delimiters), first_wrong)


def _tokenizer(config: RunConfig) -> HFTokenizer:
    path = recipes.resolve_path(config.policy.path, config)
    return HFTokenizer(recipes.load_tokenizer(path, "policy.path"))


def print_summary(console: RunConsole, summary: dict[str, Any]) -> None:
    """The table at the end."""
    table = Table(
        title="Held-out problems, sampled once each, nobody reviewing", title_justify="left"
    )
    table.add_column("")
    for name in summary["methods"]:
        table.add_column(name, justify="right")
    for label, show in _ROWS:
        table.add_row(label, *(show(figures) for figures in summary["methods"].values()))
    console.console.print(table)
    gap, judge = summary["difference"], summary["judge"]
    low, high = gap["ci95"]
    console.say(
        f"MInTRL-Const - GRPO: {_points(gap['accuracy'])} points "
        f"(95 % interval {_points(low)} to {_points(high)}, {gap['problems']} problems, paired)"
    )
    console.say(
        f"The judge on {judge['right_chunks'] + judge['wrong_chunks']} reviews: false Revises "
        f"{_percent(judge['false_revise_rate'])} of right chunks; of wrong chunks missed "
        f"{_percent(judge['miss_rate'])}, and of the found ones mislocated "
        f"{_percent(judge['mislocation_rate'])}."
    )
    console.say(f"{summary['seconds']:.0f} s in all.")


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _with_interval(figures: dict[str, Any], key: str) -> str:
    if figures[key] is None:
        return "-"
    low, high = figures[f"{key}_ci95"]
    return f"{100 * figures[key]:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def _probe(figures: dict[str, Any]) -> str:
    if "probe_before" not in figures:
        return "-"
    before, after = (figures[f"probe_{when}"]["revises_per_review"] for when in ("before", "after"))
    return f"{before:.2f} -> {after:.2f}"


_ROWS = (
    ("accuracy before", lambda f: _with_interval(f, "accuracy_before")),
    ("accuracy after", lambda f: _with_interval(f, "accuracy_after")),
    ("updates, rollouts", lambda f: f"{f['updates']}, {f['rollouts']}"),
    ("seconds of training", lambda f: f"{f['seconds']:.0f}"),
    ("tokens by the policy", lambda f: f"{f['tokens']['policy']:,}"),
    ("tokens by the judge, spliced in", lambda f: f"{f['tokens']['intervention']:,}"),
    ("tokens the judge read", lambda f: f"{f['tokens']['judge_prompt']:,}"),
    ("tokens dropped", lambda f: f"{f['tokens']['dropped']:,}"),
    ("off-policy fraction, intervened", lambda f: _percent(f["off_policy_fraction_intervened"])),
    ("off-policy fraction, all", lambda f: _percent(f["off_policy_fraction_all"])),
    ("reviews, revises", lambda f: f"{f['reviews']}, {f['revises']}"),
    ("groups all-fail", lambda f: _percent(f["all_fail_share"])),
    ("groups all-succeed", lambda f: _percent(f["all_succeed_share"])),
    ("revises per review on the probe", _probe),
)
