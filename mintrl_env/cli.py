"""The command `mintrl`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from mintrl_env.errors import MintrlError

app = typer.Typer(
    name="mintrl",
    help="Minimal Intervention RL: rollouts in which a judge may correct a step, and training on them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.")]
RunDir = Annotated[Path | None, typer.Option("--run", help="The run's folder.", metavar="DIR")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a key (repeatable).")
]


@app.command()
def train(
    config: ConfigFile, run: RunDir = None, resume: Resume = False, set: Overrides = None
) -> None:
    """Train by a config, on this machine."""
    from mintrl_env.config import load_config
    from mintrl_env.run_folder import RunFolder
    from mintrl_env.training import train as train_run

    resolved = load_config(config, set or [])
    folder = run or Path("runs") / config.stem
    train_run(resolved, RunFolder(folder), resume=resume)


@app.callback()
def _root() -> None:
    pass


def main() -> None:
    """Entry point: errors of ours are one message and exit status 1, never a traceback."""
    try:
        app()
    except MintrlError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
