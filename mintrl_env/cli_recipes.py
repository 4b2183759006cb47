"""Commands around a recipe: `mintrl filter`, `mintrl eval-suite`, `mintrl memory`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from mintrl_env.cli_options import MACHINES, PROBLEMS, RUNS, ConfigFile, Overrides, Resume

app = typer.Typer()


@app.command("filter", rich_help_panel=PROBLEMS)
def filter_command(
    config: ConfigFile,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="The kept problems: .jsonl or .parquet.")
    ],
    n: Annotated[int, typer.Option("--n", min=1, help="Samples a problem.")] = 8,
    keep: Annotated[
        str, typer.Option("--keep", metavar="LOW..HIGH", help="The pass rates that stay.")
    ] = "0.1..0.9",
    resume: Resume = False,
    set: Overrides = None,
) -> None:
    """Keep the problems that the policy alone solves sometimes: a pilot before a training.

    Rates of all problems go into FILE.pilot.jsonl; --resume goes on with it, or chooses anew by
    another --keep. Exit status 1 where nothing is left."""
    from mintrl_env.config import load_config
    from mintrl_env.console import RunConsole
    from mintrl_env.filter_tasks import filter_tasks, reading_keys

    resolved, console = load_config(config, set or []), RunConsole()
    figures = filter_tasks(resolved, out, n=n, keep=keep, resume=resume, console=console)
    for key, value in figures.items():
        console.say(f"{key}: {value:.4g}" if isinstance(value, float) else f"{key}: {value}")
    told = reading_keys(resolved, out, figures["verifier"], set or [])
    keys = " ".join(f"--set {shlex.quote(key)}" for key in told)
    console.say(f"written: {out}\nmintrl train {config} {keys}")


@app.command("eval-suite", rich_help_panel=RUNS)
def eval_suite(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    suite: Annotated[
        Path, typer.Argument(metavar="SUITE", help="configs/eval_math.yaml, or yours.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Folder (default RUN-SUITE).")
    ] = None,
    resume: Resume = False,
    set: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="A.B=C", help="Override a key of the suite (repeatable)."),
    ] = None,
    set_run: Annotated[
        list[str] | None,
        typer.Option("--set-run", metavar="A.B=C", help="Override a key of the run's config."),
    ] = None,
) -> None:
    """Accuracy of a run's best and last checkpoint on several held-out sets."""
    from mintrl_env.console import RunConsole
    from mintrl_env.suite import evaluate_suite, load_suite, print_suite

    folder = out or run.with_name(f"{run.name}-{suite.stem}")
    console = RunConsole()
    results = evaluate_suite(
        run, load_suite(suite, set), folder, overrides=set_run, resume=resume, console=console
    )
    print_suite(results, console)
    console.say(f"written: {folder}/suite.json")


@app.command(rich_help_panel=MACHINES)
def memory(
    config: ConfigFile,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that train.")] = 1,
    gpu_gib: Annotated[float, typer.Option("--gpu-gib", help="GiB of each.")] = 80.0,
    response: Annotated[int, typer.Option(min=1, help="Mean tokens of a response.")] = 4096,
    revise: Annotated[
        float, typer.Option(min=0, max=1, help="Share of reviews that revise.")
    ] = 0.35,
    write: Annotated[
        float | None, typer.Option(min=1, help="Tokens a second that a GPU writes.")
    ] = None,
    learn: Annotated[
        float | None, typer.Option(min=1, help="Tokens a second that a GPU learns from.")
    ] = None,
    evaluation: Annotated[
        int,
        typer.Option(min=0, help="Problems of the run's own evaluation, where it has no limit."),
    ] = 30,
    set: Overrides = None,
) -> None:
    """Memory of a GPU, the judge's calls and tokens, hours, and what halves them: by formula.

    Nothing is measured, loaded or asked: all of it follows from the config and what is stated."""
    from mintrl_env.config import load_config
    from mintrl_env.console import RunConsole
    from mintrl_env.memory import Stated, print_memory

    stated = Stated(gpus, gpu_gib, response, revise, write, learn, evaluation)
    print_memory(load_config(config, set or []), stated, RunConsole())
