"""The YAML entry of veRL's agent loop from a run's config; see `verl_parts.LoopSettings`.

Nothing here imports veRL.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mintrl_env.adapters.verl_names import NEEDS_MODEL
from mintrl_env.config import RunConfig
from mintrl_env.judge_recipes import judge_domain, judge_share

LOOP = "mintrl_agent"
WORKERS = 8
"""Processes with agent loops: veRL's default, fewer where the judge's limits don't divide so far."""


def is_reviewed(config: RunConfig) -> bool:
    """Whether any update of the run has reviews."""
    return config.method != "grpo" and config.objective.intervention_updates != 0


def agent_entry(config: RunConfig, workers: int, problems: list[str]) -> dict[str, Any]:
    """The entry, for a process with agent loops that is one of `workers`.

    Args:
        problems: gets a line for each key that a loop cannot honour.
    """
    policy, episode, rollout = config.policy, config.episode, config.rollout
    settings: dict[str, Any] = {
        "deadline_s": rollout.deadline_s,
        "max_retries": rollout.max_retries,
        "verifier_concurrency": rollout.verifier_concurrent,
    }
    entry: dict[str, Any] = {
        "name": LOOP,
        "_target_": "mintrl_env.adapters.verl_agent_loop.MintrlAgentLoop",
        "prompts": {
            "chat": policy.chat,
            "chat_template_kwargs": dict(policy.chat_template_kwargs),
            "system_prompt": policy.system_prompt,
            "template": policy.prompt_template,
        },
        "episode": {
            "chunk_tokens": episode.chunk_tokens,
            "max_reviews": episode.max_reviews,
            "max_correction": episode.max_correction,
            "step_delimiters": list(episode.step_delimiters),
            "spacing": episode.spacing,
        },
        "rollout": settings,
        "verifier": {"name": "task", "options": dict(config.tasks.verifier_options)},
        "seed": config.train.seed,
    }
    judge = config.judge
    if judge is not None and is_reviewed(config):
        if judge.name in NEEDS_MODEL:
            problems.append(
                f"judge.name: {judge.name!r} needs a model in its process, which agent loops have "
                "not: serve the judge's model and name the judge llm, or give package.module:Class"
            )
        if judge.path is not None:
            problems.append(
                "judge.path: no judge loads weights under veRL; serve the model instead"
            )
        settings["on_judge_failure"] = judge.on_failure
        share = judge_share(judge, workers)
        settings["judge_concurrency"] = share.concurrent
        entry["judge"] = {
            "name": judge.name,
            "domain": judge_domain(config),
            "options": dict(share.options),
            "guards": {name: dict(options or {}) for name, options in judge.guards.items()},
            "timeout_s": rollout.deadline_s,  # a client's own deadlines are among the options
        }
    for section, keys in (("policy", policy), ("episode", episode), ("judge", judge)):
        for key in _references({} if keys is None else keys.model_dump(), section):
            problems.append(f"{key}: veRL's config takes ${{ for a reference; write it otherwise")
    return entry


def _limits(options: Mapping[str, Any]) -> dict[str, float]:
    limits = options.get("limits")
    if not isinstance(limits, Mapping):
        return {}
    return {
        name: value
        for name, value in limits.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def agent_workers(config: RunConfig) -> int:
    """How many processes have agent loops: as many with agent loops as the judge's limits can be
    shared out to."""
    if config.judge is None or not is_reviewed(config):
        return WORKERS
    limits = _limits(config.judge.options)
    counts = [limits[name] for name in ("concurrent", "rpm") if name in limits]
    return max(1, min(WORKERS, config.judge.concurrent, *map(int, counts)))


def _references(value: Any, key: str) -> list[str]:
    """The keys of strings that OmegaConf, by which veRL reads the entry, would take for references."""
    if isinstance(value, str):
        return [key] if "${" in value else []
    if isinstance(value, Mapping):
        return [k for name, inner in value.items() for k in _references(inner, f"{key}.{name}")]
    if isinstance(value, (list, tuple)):
        return [k for inner in value for k in _references(inner, key)]
    return []
