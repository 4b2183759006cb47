"""`mintrl train-command`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mintrl_env.cli_options import MACHINES, ConfigFile, Overrides

app = typer.Typer()


@app.command("train-command", rich_help_panel=MACHINES)
def train_command(
    config: ConfigFile,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="GPUs of this node.")] = 1,
    policy: Annotated[
        int | None,
        typer.Option(
            "--policy-gpus", min=0, help="For the policy's servers; 0: it stays in the trainer."
        ),
    ] = None,
    judge: Annotated[
        int | None, typer.Option("--judge-gpus", min=0, help="For a judge's server on this node.")
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--run", help="The run's folder.", metavar="DIR")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run.")] = False,
    set: Overrides = None,
) -> None:
    """Print the commands that train by a config on one node of GPUs: servers first, then the trainer.

    Nothing is started. docs/scaling.md explains the placements."""
    from mintrl_env.config import load_config
    from mintrl_env.placement import commands, place, script

    resolved = load_config(config, set or [])
    placement = place(resolved, gpus=gpus, policy=policy, judge=judge)
    more = ["--run", str(run)] if run else []
    more += ["--resume"] if resume else []
    more += [word for override in set or [] for word in ("--set", override)]
    print(f"{gpus} GPU{'s' if gpus > 1 else ''}: {placement}", file=sys.stderr)
    print(script(commands(resolved, placement, str(config), more)))
