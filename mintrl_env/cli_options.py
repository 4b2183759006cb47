"""What the commands of `mintrl` share: arguments, and under which heading --help lists them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RUNS = "Runs"
JUDGES = "Judges"
PROBLEMS = "Problems and answers"
MACHINES = "Machines"

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's YAML file.")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a key (repeatable).")
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with what is there.")]
