"""`mintrl eval-suite`: a run's checkpoints on several held-out sets, as one YAML file says.

n: 32                       # samples a problem
k: [1, 8, 32]               # pass@k
max_response: 32768         # tokens; default: the run's
checkpoints: [best, last]
sets:
  aime25: {path: MathArena/aime_2025, split: train}

Prompts, template, sampling and seed are the run's own. Each set and checkpoint has a folder as
`mintrl eval` writes one, so that `resume` goes on where a suite was cut short.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.table import Table

from mintrl_env.config import EvalSection, RunConfig, TasksSection, apply_override, load_config
from mintrl_env.console import RunConsole
from mintrl_env.errors import ConfigError, StoreError
from mintrl_env.evaluation import best_folder
from mintrl_env.run_folder import RunFolder, write_json
from mintrl_env.running import evaluate, model_folder

Which = Literal["best", "last"]


class Suite(BaseModel):
    """What is evaluated; see the module."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    n: int = Field(32, ge=1)
    k: list[Annotated[int, Field(ge=1)]] = [1]
    max_response: int | None = Field(None, ge=1)
    checkpoints: list[Which] = Field(["best", "last"], min_length=1)
    sets: dict[str, TasksSection] = Field(min_length=1)


def load_suite(path: Path, overrides: list[str] | None = None) -> Suite:
    """Read a suite's YAML file and apply `a.b=c` overrides.

    Raises:
        ConfigError: with every problem, its key and the file.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a suite is a mapping of keys, not {type(data).__name__}")
    for override in overrides or []:
        apply_override(data, override)
    try:
        suite = Suite.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{path}:\n  " + "\n  ".join(map(_problem, error.errors()))) from None
    wrong = [k for k in suite.k if k > suite.n]
    if wrong:
        raise ConfigError(f"{path}: k: pass@{wrong[0]} needs as many samples, and n is {suite.n}")
    return suite


def _problem(item: Any) -> str:
    place = ".".join(str(part) for part in item["loc"]) or "(the whole)"
    if item["type"] != "extra_forbidden":
        return f"{place}: {str(item['msg']).removeprefix('Value error, ')}"
    known = TasksSection.model_fields if len(item["loc"]) > 1 else Suite.model_fields
    near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
    return f"{place}: no such key; {hint}"


def evaluate_suite(
    run: Path,
    suite: Suite,
    out: Path,
    *,
    overrides: list[str] | None = None,
    resume: bool = False,
    console: RunConsole | None = None,
) -> dict[str, Any]:
    """Evaluate a run's checkpoints on the sets of a suite.

    Args:
        run: the run's folder, with its config.yaml.
        out: the folder; gets CHECKPOINT/SET/ and suite.json.
        overrides: of the run's config ("rollout.slots=64").

    Returns:
        checkpoint -> set -> its figures, and `mean` over the sets.

    Raises:
        StoreError: no run, or none of these checkpoints.
    """
    console = console or RunConsole()
    if not (run / "config.yaml").is_file():
        raise StoreError(f"{run}: no run here: config.yaml is missing")
    base = load_config(run / "config.yaml", overrides or [])
    folders = {str(which): checkpoint_folder(run, which) for which in suite.checkpoints}
    results: dict[str, Any] = {}
    for which, weights in folders.items():
        twin = next((w for w in results if _same(folders[w], weights)), None)
        if twin is not None:
            console.say(f"{which} is {twin}: {weights}")
            results[which] = results[twin]
            continue
        figures = {}
        for name, section in suite.sets.items():
            console.say(f"{which}, {name}")
            found = evaluate(
                _config_of(base, suite, section),
                RunFolder(out / which / name),
                checkpoint=str(weights),
                n=suite.n,
                ks=suite.k,
                resume=resume,
                console=console,
            )
            figures[name] = {key: value for key, value in found.items() if key != "by_task"}
        shares = [f["accuracy"] for f in figures.values() if f["accuracy"] is not None]
        results[which] = {**figures, "mean": sum(shares) / len(shares) if shares else None}
    write_json(out / "suite.json", results)
    return results


def checkpoint_folder(run: Path, which: Which) -> Path:
    """The weights of a run that a name means.

    Raises:
        StoreError: it has none.
    """
    return best_folder(run) if which == "best" else model_folder(str(run))


def _same(a: Path, b: Path) -> bool:
    """Whether two folders hold the same weights, byte by byte."""
    files = [sorted(folder.glob("*.safetensors")) for folder in (a, b)]
    names = [[file.name for file in found] for found in files]
    return names[0] == names[1] != [] and all(
        x.read_bytes() == y.read_bytes() for x, y in zip(*files, strict=True)
    )


def _config_of(base: RunConfig, suite: Suite, section: TasksSection) -> RunConfig:
    episode = base.episode
    if suite.max_response is not None:
        episode = episode.model_copy(update={"max_response": suite.max_response})
    # The verifier is the set's own: nothing of the run's tasks is sampled.
    return base.model_copy(
        update={"evaluation": EvalSection(tasks=section), "episode": episode, "probe": None}
    )


def print_suite(results: Mapping[str, Any], console: RunConsole) -> None:
    """A row a set, a column a checkpoint: pass@1 with its 95 % interval."""
    table = Table("pass@1, %", *results)
    names = [name for name in next(iter(results.values())) if name != "mean"]
    for name in names:
        table.add_row(name, *(_cell(figures[name]) for figures in results.values()))
    means = [figures["mean"] for figures in results.values()]
    table.add_row("mean", *("-" if mean is None else f"{100 * mean:.2f}" for mean in means))
    console.console.print(table)


def _cell(found: Mapping[str, Any]) -> str:
    if found["accuracy"] is None:
        return "-"
    low, high = found["ci95"]
    return f"{100 * found['accuracy']:.2f} ({100 * low:.1f} to {100 * high:.1f})"
