"""A config's policy behind model servers: `rollout.engine: server`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mintrl_env.config import RunConfig
from mintrl_env.errors import ConfigError, TaskError, UsageError
from mintrl_env.loops import sync
from mintrl_env.prompts import HFTokenizer, PromptBuilder
from mintrl_env.types import Task

if TYPE_CHECKING:
    from mintrl_env.adapters.policy_served import Served
    from mintrl_env.adapters.server_options import ServerOptions
    from mintrl_env.adapters.session import EngineHost

_PROBE_TEXT = "What is 12 + 30?"


@dataclass(frozen=True)
class Servers:
    """The servers of a config's policy, asked what they can do.

    Attributes:
        options: the config's.
        found: what they can do.
    """

    options: ServerOptions
    found: Served

    def said(self) -> str:
        """For the console."""
        return f"the policy's server{'s' if len(self.options.urls) > 1 else ''}:\n{self.found}"


def ask_servers(
    config: RunConfig, tokenizer: HFTokenizer, prompts: PromptBuilder, *, nodes: int | None = None
) -> Servers:
    """Ask every server of a config's policy what it can do, by generating.

    Args:
        nodes: of the run; None: as its launcher says.

    Raises:
        ConfigError: a loopback address in a run of several nodes, a key that is not there.
        PolicyError: a server that is not there, or is no fit for a policy.
    """
    from mintrl_env.adapters.judge_servers import node_count
    from mintrl_env.adapters.policy_served import probe_servers
    from mintrl_env.adapters.server_options import ServerOptions
    from mintrl_env.adapters.server_probe import refuse_loopback

    options = ServerOptions.of(config.rollout.engine_options)
    try:
        options.api_key()
    except UsageError as error:
        raise ConfigError(f"rollout.engine_options.{error}") from None
    for url in options.urls:
        refuse_loopback(url, nodes=node_count() if nodes is None else nodes)
    found = sync(probe_servers(options, tokenizer, _probe_ids(tokenizer, prompts)))
    return Servers(options, found)


def _probe_ids(tokenizer: HFTokenizer, prompts: PromptBuilder) -> Any:
    try:
        return prompts.ids(Task("probe", _PROBE_TEXT))
    except TaskError:  # longer than max_prompt
        return np.array(tokenizer.encode("1")[:1] or [tokenizer.eos_id], dtype=np.int32)


def served_host(config: RunConfig, host: EngineHost, servers: Servers) -> EngineHost:
    """The host with the policy behind its servers."""
    from mintrl_env.adapters.policy_served import ServedPolicy

    return replace(
        host,
        policy_engine=lambda made: ServedPolicy.over(
            servers.options, servers.found, made.tokenizer
        ),
        report=servers.said(),
    )


def model_ends(path: str) -> list[int]:
    """The ids that end a response for a model that is not loaded, by its files.

    Raises:
        ConfigError: they cannot be read.
    """
    from transformers import AutoConfig, GenerationConfig

    try:
        ends = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:
        try:
            ends = getattr(AutoConfig.from_pretrained(path), "eos_token_id", None)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"policy.path: {path!r}: neither generation_config.json nor config.json can be read: "
                f"{error}"
            ) from error
    return [] if ends is None else [int(i) for i in ends] if isinstance(ends, list) else [int(ends)]
