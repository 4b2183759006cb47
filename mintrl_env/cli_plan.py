"""The command `mintrl plan`. What it needs is imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mintrl_env.cli_options import MACHINES, ConfigFile, Overrides

app = typer.Typer()


@app.command(rich_help_panel=MACHINES)
def plan(
    config: ConfigFile,
    gpus: Annotated[str, typer.Option("--gpus", help="Numbers of GPUs, as 8,64,512.")] = "8,64,512",
    figures: Annotated[
        Path | None, typer.Option("--figures", metavar="FILE", help="YAML: speeds, latencies, ...")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option("--preset", metavar="MODEL@GPU", help="Given figures, as qwen3-4b@h100."),
    ] = None,
    measured: Annotated[
        list[Path] | None,
        typer.Option("--measured", metavar="RUN", help="A run's folder or preflight.json."),
    ] = None,
    mode: Annotated[str, typer.Option("--mode", help="sync, one-step or async.")] = "sync",
    max_lag: Annotated[
        int | None, typer.Option("--max-lag", min=0, help="Updates, with async (default 1).")
    ] = None,
    split: Annotated[
        str, typer.Option("--split", help="auto, colocated, or TRAIN:POLICY[:JUDGE].")
    ] = "auto",
    scale_prompts: Annotated[
        bool, typer.Option("--scale-prompts", help="Prompts an update grow with the GPUs.")
    ] = False,
    updates: Annotated[
        int, typer.Option("--updates", min=0, help="Simulated a figure; 0: as the mode needs.")
    ] = 0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the draws.")] = 0,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write it.")] = None,
    set: Overrides = None,
) -> None:
    """Simulate a run on so many GPUs: seconds, idle parts, bottleneck, tokens, money, hours.

    Speeds are a preset's (given, not measured) unless --measured or --figures says better."""
    from mintrl_env.config import load_config
    from mintrl_env.console import RunConsole
    from mintrl_env.plan_command import gather_figures, make_mode, parse_gpus, run_plan
    from mintrl_env.plan_machines import Wanted

    resolved = load_config(config, set or [])
    wanted = Wanted(
        parse_gpus(gpus),
        make_mode(mode, max_lag),
        split=split,
        updates=updates,
        scale_prompts=scale_prompts,
        seed=seed,
    )
    sourced = gather_figures(resolved, name=preset, runs=measured or [], file=figures)
    run_plan(resolved, sourced, wanted, out=json, console=RunConsole())
