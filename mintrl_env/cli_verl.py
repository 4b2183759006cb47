"""`mintrl verl-command`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mintrl_env.cli_options import ConfigFile, Overrides


def verl_command(
    config: ConfigFile,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="The run's folder (default runs/NAME-verl)."),
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of a node.")] = 8,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the Ray cluster.")] = 1,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="GPUs that one inference server spans.")
    ] = 1,
    verl: Annotated[
        list[str] | None,
        typer.Option(
            "--verl", metavar="KEY=VALUE", help="An override in veRL's own terms (repeatable)."
        ),
    ] = None,
    run: Annotated[bool, typer.Option("--run", help="Run it too.")] = False,
    set: Overrides = None,
) -> None:
    """Print (and run) the command that trains by a config under veRL: Ray, many GPUs.

    Writes the tasks and the agent loop's settings into the run's folder, which every node must see.
    The same command again goes on from the last checkpoint there."""
    from mintrl_env import verl_command as launching
    from mintrl_env.config import load_config
    from mintrl_env.verl_overrides import Place

    resolved = load_config(config, set or [])
    folder = (out or Path("runs") / f"{config.stem}-verl").absolute()
    launch = launching.prepare(resolved, Place(folder, gpus, nodes, tensor_parallel))
    for key, why in launch.unused.items():
        print(f"not used under veRL: {key}: {why}", file=sys.stderr)
    print(launching.command_text(launch, verl or []), flush=True)
    if run:
        raise typer.Exit(launching.run(launch, verl or []))
