"""A recipe made small: the same method, columns, judge and stages, with numbers that take seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mintrl_env.config import RunConfig, TasksSection, parse_config
from mintrl_env.dry_run_tasks import Sample, samples, write_rows
from mintrl_env.memory_shapes import shape_of
from mintrl_env.preflight_servers import IN_PROCESS

PROMPTS, UPDATES = 2, 2
_SERVED = ("llm", "rubric")
_FIRST = {"tasks": 0, "evaluation": 100, "probe": 200}
_COUNT = {"tasks": PROMPTS * UPDATES, "evaluation": 3, "probe": 2}


@dataclass
class Small:
    """A recipe made small.

    Attributes:
        config: the small one.
        said: what was replaced, a line each.
        samples: the built-in problems of `tasks`; none where the recipe's own set is built in.
    """

    config: RunConfig
    said: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


def family_of(config: RunConfig) -> str:
    """transformers' name of the policy's family.

    Raises:
        ConfigError: a model that is neither a folder nor one of the recipes'.
    """
    path = config.policy.path
    return "qwen3" if path.startswith("warmup:") else shape_of(path).model_type


def made_small(config: RunConfig, folder: Path, *, model: str, judge_url: str) -> Small:
    """The config with all that is big or elsewhere replaced.

    Args:
        folder: for files of problems.
        model: a folder with the tiny policy.
        judge_url: where a stand-in for the judge's server listens.

    Raises:
        ConfigError: a verifier that there are no built-in problems for.
    """
    data = json.loads(json.dumps(config.model_dump(mode="json")))
    small = Small(config)
    say = small.said.append
    say(
        f"policy.path: {config.policy.path} -> a random {family_of(config)}, 2 layers, bytes as tokens"
    )
    data["policy"] |= {"path": model, "dtype": "float32"}
    if data["policy"]["lora"]:
        data["policy"]["lora"]["r"] = min(4, data["policy"]["lora"]["r"])
    data["warmup"] = {}
    for name, section in (
        ("tasks", config.tasks),
        ("evaluation", config.evaluation.tasks if config.evaluation else None),
        ("probe", config.probe.tasks if config.probe else None),
    ):
        if section is None:
            continue
        where = name if name == "tasks" else f"{name}.tasks"
        target = data[name] if name == "tasks" else data[name]["tasks"]
        found = _replace_tasks(target, section, where, folder, name, say)
        if name == "tasks":
            small.samples = found
    _replace_judge(data, model, judge_url, say)
    _replace_numbers(data, config, say)
    small.config = parse_config(data, "the dry run's config")
    return small


def _replace_tasks(
    target: dict[str, Any],
    section: TasksSection,
    where: str,
    folder: Path,
    name: str,
    say: Any,
) -> list[Sample]:
    count = _COUNT[name]
    if section.name is not None:
        target["limit"] = count
        say(f"{where}: the first {count} of {section.name}")
        return []
    found = samples(section, where, first=_FIRST[name], count=count)
    target |= {"path": write_rows(folder / f"{name}.jsonl", found), "limit": None}
    read_by = f"form {section.form}" if section.form else "the same columns"
    say(f"{where}: {section.path} -> {count} built-in problems, read by {read_by}")
    return found


def _replace_judge(data: dict[str, Any], model: str, url: str, say: Any) -> None:
    judge = data["judge"]
    if judge is None:
        return
    name, options = judge["name"], judge["options"]
    inner = str(options.get("judge", "scoring")) if name == "shuffled" else name
    if inner in _SERVED:
        server = options["server"] if inner == "rubric" and options.get("server") else options
        gone = [key for key in ("api_key_env", "cache", "cache_mode") if server.pop(key, None)]
        limits = server.get("limits")
        if isinstance(limits, dict):
            for key in ("rpm", "tpm"):
                limits.pop(key, None)
        say(
            f"judge.options.url: {options.get('url')} -> a stand-in on this machine, real HTTP, answers "
            "by no model" + (f"; without {', '.join(gone)}" if gone else "")
        )
        options["url"] = url
    elif inner not in IN_PROCESS:
        say(f"judge.name: {name} -> keep: what yours asks is not known here")
        judge |= {"name": "keep", "options": {}, "path": None}
    elif judge["path"] is not None:
        say(f"judge.path: {judge['path']} -> the same random model as the policy")
        judge["path"] = model


def _replace_numbers(data: dict[str, Any], config: RunConfig, say: Any) -> None:
    episode, rollout, train = data["episode"], data["rollout"], data["train"]
    if rollout["engine"] != "transformers":
        say(f"rollout.engine: {rollout['engine']} -> transformers: no GPU, no server is needed")
        rollout |= {"engine": "transformers", "engine_options": {}}
    n_control, n_intervened = (min(2, rollout[k]) for k in ("n_control", "n_intervened"))
    rows = PROMPTS * (n_control + n_intervened)
    minibatches = train["minibatches"] if rows % (2 * train["minibatches"]) == 0 else 1
    small: dict[str, Mapping[str, Any]] = {
        "episode": {
            "chunk_tokens": 16,
            "max_reviews": min(2, episode["max_reviews"]),
            "max_correction": min(8, episode["max_correction"]),
            "max_response": 64,
            "spacing": min(4, episode["spacing"]),
        },
        "rollout": {
            "n_control": n_control, "n_intervened": n_intervened, "slots": 8, "deadline_s": 300.0,
        },
        "train": {
            "updates": UPDATES,
            "prompts_per_update": PROMPTS,
            "minibatches": minibatches,
            "iterations": min(2, train["iterations"]),
            "micro_batch": rows // minibatches // 2,
            "threads": 1,
            "checkpoint_every": 1,
            "report_to": [],
        },
        "objective": {
            "intervention_updates": min(1, config.objective.intervention_updates),
            "rewarm_updates": min(1, config.objective.rewarm_updates),
        },
        "preflight": {"before_training": "always", "tasks": 2, "corrections": 1, "samples": 1},
    }  # fmt: skip
    if data["evaluation"] is not None:
        small["evaluation"] = {"n": 1, "every": 1}
    if data["probe"] is not None:
        small["probe"] = {"n": 1}
    for section, values in small.items():
        before = data[section]
        changed = [f"{key} {value}" for key, value in values.items() if before[key] != value]
        if changed and section != "preflight":
            say(f"{section}: {', '.join(changed)}")
        before |= values
