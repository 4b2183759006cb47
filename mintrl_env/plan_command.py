"""What `mintrl plan` does with its options: figures, a mode, counts; its output."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mintrl_env.config import RunConfig
from mintrl_env.console import RunConsole
from mintrl_env.errors import UsageError
from mintrl_env.plan import Wanted, plan
from mintrl_env.plan_figures import Sourced, gather, read_figures
from mintrl_env.plan_measured import measured
from mintrl_env.plan_presets import preset, preset_for
from mintrl_env.plan_system import Mode
from mintrl_env.plan_tables import print_plan
from mintrl_env.run_folder import write_json


def gather_figures(
    config: RunConfig, *, name: str | None, runs: Sequence[Path], file: Path | None
) -> Sourced:
    """The preset's figures, over them what was measured, over them the file's."""
    named, name = name is not None, name or preset_for(config.policy.path)
    policy = config.policy
    given = preset(
        name,
        max_prompt=policy.max_prompt,
        max_response=config.episode.max_response,
        bf16=policy.dtype == "bfloat16",
        lora=policy.lora.r if policy.lora else 0,
    )
    if config.judge is not None and config.judge.options.get("mode", "two-call") == "two-call":
        given["judge"]["calls"] = 1 + given["rows"]["revise"]  # the correction is a second one
    known = (
        ""
        if named or name.partition("@")[0] in policy.path.lower()
        else f"; none is known for {policy.path}"
    )
    layers: list[tuple[str, Mapping[str, Any]]] = [
        (f"given, not measured (preset {name}{known})", given)
    ]
    layers += [(f"measured ({run})", measured(run)) for run in runs]
    if file is not None:
        layers.append((f"given ({file})", read_figures(file)))
    return gather(*layers)


def parse_gpus(text: str) -> list[int]:
    """`8,64,512` as numbers."""
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise UsageError(f"--gpus takes numbers with commas between, as 8,64,512; not {text!r}")
    return [int(part) for part in text.split(",")]


def make_mode(name: str, max_lag: int | None) -> Mode:
    """`--mode` and `--max-lag`, which goes with async alone."""
    if max_lag is not None and name != "async":
        raise UsageError(f"--max-lag goes with --mode async, not with {name}")
    return Mode(name, 1 if max_lag is None else max_lag)


def run_plan(
    config: RunConfig, sourced: Sourced, wanted: Wanted, *, out: Path | None, console: RunConsole
) -> dict[str, Any]:
    """Simulate, print, and write the JSON file where one is named."""
    found = plan(config, sourced, wanted)
    print_plan(found, console)
    if out is not None:
        write_json(out, found)
        console.say(f"written: {out}")
    return found
