"""The policy's engine that an MInTRLConfig names."""

from __future__ import annotations

from typing import Any

from mintrl_env.adapters.session import PolicyEngine
from mintrl_env.adapters.slot_cache import bare_model
from mintrl_env.adapters.trl_config import MInTRLConfig


def policy_engine(args: MInTRLConfig, model: Any, accelerator: Any) -> PolicyEngine | None:
    """Makes the engine; None: the embedded one. Called by all ranks.

    Args:
        model: the policy, as the trainer wraps it.
        accelerator: the trainer's.
    """
    options: Any = args.engine_options or {}
    if args.rollout_engine == "server":
        from mintrl_env.adapters.ranks import OneRank, TorchRanks
        from mintrl_env.adapters.served_weights import trained_policy
        from mintrl_env.adapters.server_options import ServerOptions

        several = accelerator.num_processes > 1
        ranks = TorchRanks(args.ddp_timeout) if several else OneRank()
        return trained_policy(ServerOptions.of(options), ranks)
    if args.rollout_engine == "vllm":
        from mintrl_env.adapters.policy_vllm import vllm_policy

        plain: Any = bare_model(accelerator.unwrap_model(model))
        return vllm_policy(str(plain.config._name_or_path), **options)
    return None
