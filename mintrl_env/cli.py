"""The command `mintrl`. Each command imports what it needs when it runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from mintrl_env import cli_launch, cli_plan, cli_recipes, cli_store, cli_verl
from mintrl_env.cli_options import JUDGES, MACHINES, PROBLEMS, RUNS, ConfigFile, Overrides, Resume
from mintrl_env.ending import end_with, exit_now, is_first
from mintrl_env.errors import MintrlError, UsageError

app = typer.Typer(
    name="mintrl",
    help="Minimal Intervention RL: rollouts whose wrong steps a judge may correct, and training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(cli_store.app, rich_help_panel=RUNS)
app.add_typer(cli_launch.app)
app.add_typer(cli_recipes.app)
app.add_typer(cli_plan.app)

RunDir = Annotated[
    Path | None, typer.Option("--run", help="The run's folder (default runs/NAME).", metavar="DIR")
]


def _version(asked: bool) -> None:
    if asked:
        from mintrl_env import __version__

        print(f"mintrl_env {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(rich_help_panel=RUNS)
def train(
    config: ConfigFile,
    run: RunDir = None,
    resume: Resume = False,
    set: Overrides = None,
    preflight: Annotated[
        bool | None,
        typer.Option(
            "--preflight/--no-preflight",
            help="Look at a few tasks first, and refuse a run that would fail. Default: where the "
            "judge asks a server.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Only go through all stages, in seconds: a tiny random model, built-in problems, a "
            "stand-in for a judge's server.",
        ),
    ] = False,
) -> None:
    """Train by a config, on this machine."""
    from mintrl_env.config import load_config
    from mintrl_env.run_folder import RunFolder

    resolved = load_config(config, set or [])
    if dry_run:
        from mintrl_env.dry_run import dry_run as go_through

        go_through(resolved, run or Path("runs") / f"{config.stem}-dry-run")
        return
    from mintrl_env.training import train as train_run

    folder = RunFolder(run or Path("runs") / config.stem)
    figures = train_run(resolved, folder, resume=resume, preflight=preflight)
    if is_first():
        _print_figures(figures)
        print(f"written: {folder.path}/ (look at it: mintrl view {folder.path})")


@app.command(rich_help_panel=JUDGES)
def preflight(
    config: ConfigFile,
    n: Annotated[int, typer.Option("--n", min=1, help="Tasks, a whole group each.")] = 20,
    out: Annotated[
        Path | None,
        typer.Option("--out", "--run", metavar="DIR", help="Folder (default runs/NAME-preflight)."),
    ] = None,
    set: Overrides = None,
) -> None:
    """Try some tasks before a run costs money or hours; exit status 1: it should not begin.

    Policy, judge, guards and verifier work on them as in the run; a page shows all that was said,
    with a forecast of time, tokens and money."""
    from mintrl_env.config import load_config
    from mintrl_env.console import RunConsole
    from mintrl_env.preflight import preflight as preflight_run
    from mintrl_env.preflight_gate import print_preflight
    from mintrl_env.preflight_tables import failures

    resolved = load_config(config, set or [])
    folder = out or Path("runs") / f"{config.stem}-preflight"
    figures = preflight_run(resolved, folder, n=n)
    console = RunConsole()
    print_preflight(figures, console)
    for line in failures(figures):
        console.say(f"failed: {line}")
    print(f"written: {folder}/ (preflight.html, preflight.json)")
    if not figures["passed"]:
        raise typer.Exit(1)


@app.command(rich_help_panel=RUNS)
def rollout(
    config: ConfigFile,
    run: RunDir = None,
    resume: Resume = False,
    set: Overrides = None,
    updates: Annotated[int, typer.Option(min=1, help="How many updates' rollouts.")] = 1,
) -> None:
    """Run the rollouts of a config alone: policy, judge, verifier; nothing is learnt."""
    from mintrl_env.config import load_config
    from mintrl_env.run_folder import RunFolder
    from mintrl_env.running import rollout as rollout_run

    resolved = load_config(config, set or [])
    folder = RunFolder(run or Path("runs") / f"{config.stem}-rollout")
    _print_figures(rollout_run(resolved, folder, updates=updates, resume=resume))
    print(f"written: {folder.path}/ (look at it: mintrl view {folder.path})")


@app.command("eval", rich_help_panel=RUNS)
def evaluate(
    config: ConfigFile,
    run: RunDir = None,
    resume: Resume = False,
    set: Overrides = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="A run, checkpoint or model folder (default: the policy)."
        ),
    ] = None,
    which: Annotated[
        str, typer.Option(help="Of a run's checkpoints: last, or best by its own evaluation.")
    ] = "last",
    n: Annotated[int, typer.Option("--n", min=1, help="Samples a problem.")] = 1,
    k: Annotated[str, typer.Option("--k", help="pass@k for these, as 1,4,8.")] = "1",
) -> None:
    """Accuracy on the held-out problems, sampled by the policy alone: pass@1, unbiased pass@k."""
    from mintrl_env.config import load_config
    from mintrl_env.evaluation import best_folder
    from mintrl_env.run_folder import RunFolder
    from mintrl_env.running import evaluate as evaluate_run
    from mintrl_env.running import parse_ks

    if which not in ("best", "last") or (which == "best" and checkpoint is None):
        raise UsageError("--which is best or last, of the run that --checkpoint names")
    if which == "best":
        checkpoint = str(best_folder(Path(str(checkpoint))))
    resolved, ks = load_config(config, set or []), parse_ks(k)
    folder = RunFolder(run or Path("runs") / f"{config.stem}-eval")
    result = evaluate_run(resolved, folder, checkpoint=checkpoint, n=n, ks=ks, resume=resume)
    _print_figures({key: value for key, value in result.items() if key != "by_task"})
    print(f"written: {folder.path}/")


@app.command(rich_help_panel=RUNS)
def quickstart(
    run: Annotated[Path, typer.Option("--run", metavar="DIR", help="The folder.")] = Path(
        "runs/quickstart"
    ),
    set: Overrides = None,
) -> None:
    """Train a small student by MInTRL-Const and by GRPO side by side, and compare them."""
    from mintrl_env.quickstart import quickstart as quickstart_run

    quickstart_run(run, set or [])


@app.command(rich_help_panel=RUNS)
def view(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    serve: Annotated[bool, typer.Option("--serve", help="Serve it and follow the run.")] = False,
    port: Annotated[int, typer.Option(help="With --serve; 0 takes a free one.")] = 0,
) -> None:
    """Write a run's HTML report: figures, curves, rollouts with who wrote what, each review."""
    from mintrl_env import view_server
    from mintrl_env.report import write_report
    from mintrl_env.running import run_tokenizer

    tokenizer = run_tokenizer(run)
    if serve:
        view_server.serve(run, port, decode=tokenizer.decode, special_ids=tokenizer.special_ids)
    else:
        print(write_report(run, decode=tokenizer.decode, special_ids=tokenizer.special_ids))


@app.command(rich_help_panel=RUNS)
def export(
    checkpoint: Annotated[
        str, typer.Argument(help="A run, checkpoint or adapter folder, of mintrl train or veRL.")
    ],
    out: Annotated[Path, typer.Argument(help="A new folder.")],
) -> None:
    """Write a checkpoint as a plain transformers folder (a LoRA adapter is merged)."""
    from mintrl_env.adapters.verl_export import export_verl, verl_checkpoint
    from mintrl_env.running import export as export_model

    shards = verl_checkpoint(checkpoint)
    print(export_verl(shards, out) if shards is not None else export_model(checkpoint, out))


@app.command(rich_help_panel=PROBLEMS)
def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Rows, one JSON object a line.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the verdicts go.")],
    kind: Annotated[
        str, typer.Option(metavar="NAME", help="math, code, or a verifier of your own.")
    ] = "math",
    workers: Annotated[int | None, typer.Option(min=1, help="Rows scored at once.")] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds: of a comparison (math), of a test (code).")
    ] = None,
    sandbox: Annotated[
        str | None, typer.Option(metavar="NAME", help="Where code runs (default: auto).")
    ] = None,
    set: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=C", help="An option of the verifier (repeatable)."),
    ] = None,
) -> None:
    """Score responses: rows {id, gold, response} or {id, response, tests} to verdicts."""
    from mintrl_env import verify as verifying
    from mintrl_env import verify_table
    from mintrl_env.config import apply_override

    def unread(line: int, reason: str) -> None:
        print(f"{file}:{line}: skipped: {reason}", file=sys.stderr)

    options = verifying.options_of(kind, workers=workers, timeout_s=timeout, sandbox=sandbox)
    for override in set or []:
        apply_override(options, override)
    count = verify_table.row_counter()
    try:
        summary = verifying.verify_file(
            file, out, kind=kind, options=options, on_row=count, on_unread=unread
        )
    except KeyboardInterrupt:
        print(f"interrupted; the verdicts so far are in {out}.part", file=sys.stderr, flush=True)
        exit_now(130)
    verify_table.print_summary(summary, out)
    if summary.could_not_run:
        print(f"error: no row could be scored; {out} says why of each", file=sys.stderr)
        raise typer.Exit(1)


@app.command(rich_help_panel=MACHINES)
def doctor() -> None:
    """Say what is installed, what works, and what to install for what is missing."""
    from mintrl_env.doctor import run_doctor

    raise typer.Exit(run_doctor())


@app.command("judge-bench", rich_help_panel=JUDGES)
def judge_bench(
    config: ConfigFile,
    data: Annotated[
        str, typer.Option("--data", metavar="FILE", help="Labelled rows: a file or a Hub id.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "--run", metavar="DIR", help="Folder (default runs/NAME-judge-bench)."
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="So many rows, drawn by the seed.")
    ] = None,
    split: Annotated[
        str | None, typer.Option("--split", help="Of a Hub id (default: all of them).")
    ] = None,
    rollouts: Annotated[
        int, typer.Option("--rollouts", min=0, help="Also run so many tasks, judge on and off.")
    ] = 0,
    resume: Resume = False,
    set: Overrides = None,
) -> None:
    """Score a config's judge on rows with a known first wrong step, beside what needs no judge."""
    from mintrl_env.config import load_config
    from mintrl_env.console import RunConsole
    from mintrl_env.judging import judge_bench as judge_bench_run
    from mintrl_env.judging import print_bench
    from mintrl_env.run_folder import RunFolder

    resolved = load_config(config, set or [])
    folder = RunFolder(out or Path("runs") / f"{config.stem}-judge-bench")
    figures = judge_bench_run(
        resolved, folder, data=data, split=split, limit=limit, rollouts=rollouts, resume=resume
    )
    print_bench(figures, RunConsole())
    print(f"written: {folder.path}/ (judge_bench.json, verdicts.jsonl)")


@app.command(rich_help_panel=JUDGES)
def calibrate(
    config: ConfigFile,
    out: Annotated[
        Path | None,
        typer.Option("--out", "--run", metavar="DIR", help="Folder (default runs/NAME-calibrate)."),
    ] = None,
    tasks: Annotated[int, typer.Option("--tasks", min=1, help="Problems, a group each.")] = 16,
    k: Annotated[str | None, typer.Option("--k", help="Chunk tokens to try, as 12,24.")] = None,
    r: Annotated[str | None, typer.Option("--r", help="Reviews to try.")] = None,
    l: Annotated[  # noqa: E741
        str | None, typer.Option("--l", help="Correction tokens to try.")
    ] = None,
    sweep: Annotated[
        bool, typer.Option(help="Try k, R and L halved and doubled, where none is given.")
    ] = True,
    set: Overrides = None,
) -> None:
    """The pilot before a run: kappa, and which (k, R, L) bring a gain with few off-policy tokens.

    kappa comes from the judge's corrections; a plot and the YAML lines to paste are written."""
    from mintrl_env.calibrate import calibrate as calibrate_run
    from mintrl_env.calibrate import grid, print_calibration, star
    from mintrl_env.config import load_config
    from mintrl_env.console import RunConsole
    from mintrl_env.run_folder import RunFolder

    resolved = load_config(config, set or [])
    given = k is not None or r is not None or l is not None
    points = grid(resolved, k, r, l) if given else star(resolved) if sweep else []
    folder = RunFolder(out or Path("runs") / f"{config.stem}-calibrate")
    figures = calibrate_run(resolved, folder, tasks=tasks, points=points)
    print_calibration(figures, RunConsole())
    print(f"written: {folder.path}/ (calibrate.yaml, calibrate.png, calibrate.json)")


def _print_figures(figures: dict[str, object]) -> None:
    """Nested figures as `key: value` lines."""
    for key, value in figures.items():
        if isinstance(value, dict):
            inner = ", ".join(f"{k} {_short(v)}" for k, v in value.items() if v)
            print(f"{key}: {inner or 'none'}")
        else:
            print(f"{key}: {_short(value)}")


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return f"[{', '.join(map(_short, value))}]"
    return "-" if value is None else str(value)


app.command("verl-command", rich_help_panel=MACHINES)(cli_verl.verl_command)


def main() -> None:
    """Entry point: errors of ours are one message and exit status 1, never a traceback."""
    # A judge or verifier of one's own lies beside the config: `judge.name: my_module:MyJudge`. Last,
    # so that no file there hides a package.
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        app()
    except MintrlError as error:
        end_with(error)
    except SystemExit as end:
        if end.code == 130:  # Ctrl-C, of which typer says nothing
            print("interrupted", file=sys.stderr)
        raise


if __name__ == "__main__":
    main()
