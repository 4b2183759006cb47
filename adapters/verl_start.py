"""What `mintrl_sync` looks at before its first step: the agent loop's entry, and the judge's server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from mintrl_env.adapters.judge_probe import probe_judge
from mintrl_env.adapters.judge_servers import chat_servers
from mintrl_env.adapters.server_probe import ChatReport, refuse_loopback
from mintrl_env.adapters.verl_parts import (
    START_S,
    LoopSettings,
    judge_of,
    settings_of,
    tokenizer_of,
    verifier_of,
)
from mintrl_env.errors import ConfigError, JudgeCause, JudgeError
from mintrl_env.loops import sync
from mintrl_env.protocols import Judge

_POLL_S = 5.0
"""Seconds between two looks at a server that is not up yet."""


def loop_settings(config: Any) -> LoopSettings | None:
    """The settings of veRL's default agent loop; None: it is another one than ours.

    Raises:
        ConfigError: no file, a file without the loop, or a key that the loop does not know.
    """
    from omegaconf import OmegaConf

    agent = config.actor_rollout_ref.rollout.agent
    path, name = agent.get("agent_loop_config_path"), agent.get("default_agent_loop")
    key = "actor_rollout_ref.rollout.agent"
    if not path:
        raise ConfigError(f"{key}.agent_loop_config_path names no file with the loop {name!r}")
    try:
        entries = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except OSError as error:
        raise ConfigError(
            f"{key}.agent_loop_config_path: {path}: cannot be read: {error.strerror}"
        ) from error
    entries = entries if isinstance(entries, list) else []
    for entry in entries:
        if isinstance(entry, Mapping) and entry.get("name") == name:
            if not str(entry.get("_target_", "")).endswith(".MintrlAgentLoop"):
                return None
            return settings_of({k: v for k, v in entry.items() if k not in ("name", "_target_")})
    raise ConfigError(f"{path}: there is no agent loop {name!r} ({key}.default_agent_loop)")


def check_judge(config: Any, hf_tokenizer: Any, *, nodes: int) -> list[ChatReport]:
    """Ask the judge's servers for generations; one that is not up yet is waited for (`start_s`).

    Args:
        config: veRL's. hf_tokenizer: the policy's.
        nodes: machines of the Ray cluster.

    Raises:
        ConfigError: no judge; wrong options; a server that other nodes would look for on themselves.
        JudgeError: a server that does not come up, or answers and does not generate.
    """
    settings = loop_settings(config)
    if settings is None:
        return []
    if settings.judge is None:
        raise ConfigError(
            "the agent loop has no judge, but policy_loss.intervention_updates says that rows are "
            "reviewed: name one in the YAML entry, or set it to 0 for GRPO"
        )
    path = config.actor_rollout_ref.get("model", {}).get("path")
    tokenizer = tokenizer_of(hf_tokenizer, path, settings.extra_eos)

    def made() -> Judge:
        judge, _ = judge_of(settings, tokenizer, verifier_of(settings))
        assert judge is not None
        return judge

    for server in chat_servers(made()):
        refuse_loopback(server.client.base_url, nodes=nodes)
    until = time.monotonic() + float(settings.judge.get("start_s", START_S))

    async def asked() -> list[ChatReport]:
        while True:
            try:
                return await probe_judge(made())
            except JudgeError as error:
                if error.cause is not JudgeCause.CONNECTION and "connection:" not in str(error):
                    raise
                if time.monotonic() >= until:
                    raise
                print(f"waiting for the judge's server: {error}", flush=True)
            await asyncio.sleep(_POLL_S)

    return sync(asked())


def node_count(config: Any) -> int:
    """Machines of the run: what the config says, or the Ray cluster that is there has."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []
    return max(1, int(config.trainer.nnodes), len(alive))
