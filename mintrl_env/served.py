"""A config's policy behind model servers: `rollout.engine: server`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mintrl_env.config import RunConfig
from mintrl_env.errors import ConfigError, UsageError
from mintrl_env.loops import sync
from mintrl_env.prompts import PromptBuilder

if TYPE_CHECKING:
    from mintrl_env.adapters.policy_served import Served
    from mintrl_env.adapters.server_options import ServerOptions
    from mintrl_env.adapters.session import EngineHost


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


def ask_servers(config: RunConfig, prompts: PromptBuilder, *, trained: bool = False) -> Servers:
    """Ask every server of a config's policy what it can do, by generating.

    Args:
        trained: they have to take new weights, too.

    Raises:
        ConfigError: a loopback address in a run of several nodes, a key that is not there.
        PolicyError: a server that is not there, or is no fit for a policy.
    """
    from mintrl_env.adapters.policy_served import probe_ids, probe_servers, refuse_other_nodes
    from mintrl_env.adapters.server_options import ServerOptions

    options = ServerOptions.of(config.rollout.engine_options)
    try:
        options.api_key()
    except UsageError as error:
        raise ConfigError(f"rollout.engine_options.{error}") from None
    refuse_other_nodes(options)
    ids = probe_ids(prompts)
    if trained:
        from mintrl_env.adapters.served_weights import check_trainable

        return Servers(options, check_trainable(options, prompts.tokenizer, ids))
    return Servers(options, sync(probe_servers(options, prompts.tokenizer, ids)))


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
