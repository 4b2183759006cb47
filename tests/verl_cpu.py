"""veRL on the CPU: a platform, and model servers over transformers. Importing it registers both.

    VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda VERL_USE_EXTERNAL_MODULES=verl_cpu,...
    python -m verl.trainer.main_ppo actor_rollout_ref.rollout.name=transformers_cpu trainer.device=cpu

veRL itself supports neither. The servers take the weights that the actor sends after each update and
sample from them, so that all but vLLM and the GPU is what a real run has.
"""

from __future__ import annotations

import types
from contextlib import nullcontext
from functools import partial
from typing import Any

import ray
import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

NAME = "transformers_cpu"


def device_module() -> Any:
    """torch.cpu with what veRL also asks of torch.cuda."""
    module = types.ModuleType("cpu_device")
    nothing = {
        "memory_allocated": 0, "memory_reserved": 0, "max_memory_allocated": 0,
        "max_memory_reserved": 0, "empty_cache": None, "set_device": None, "synchronize": None,
        "reset_peak_memory_stats": None, "mem_get_info": (0, 0), "current_device": 0,
        "get_device_name": "cpu", "manual_seed": None, "manual_seed_all": None,
        "device_count": 0, "is_available": False, "set_rng_state": None,
    }  # fmt: skip
    for name, value in nothing.items():
        setattr(module, name, lambda *_, value=value, **__: value)
    return module


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """What the engine asks of a platform, for the CPU."""

    device_name = "cpu"  # type: ignore[assignment]
    vendor_name = "none"  # type: ignore[assignment]
    device_module = device_module()  # type: ignore[assignment]

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def communication_backend_name(self) -> str:
        return "gloo"

    def nvtx_range(self, msg: str) -> Any:
        return nullcontext()

    def get_device_capability(self, device_index: int = 0) -> Any:
        return None, None

    def is_ipc_supported(self) -> bool:
        return False

    def ray_noset_envvars(self) -> list[str]:
        return []

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {}

    def _nothing(self, *_: Any, **__: Any) -> Any:
        return None

    set_device = synchronize = manual_seed = manual_seed_all = set_allocator_settings = _nothing
    empty_cache = profiler_start = profiler_stop = cudart = get_collective_module = _nothing

    def visible_devices_envvar(self) -> str:
        return "NO_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "CPU"

    def rollout_env_vars(self) -> dict[str, str]:
        return {}


PlatformCPU.__abstractmethods__ = frozenset()

# Only now: these ask for the platform when they are imported.
from verl.utils import distributed  # noqa: E402
from verl_cpu_server import Server  # noqa: E402

# Its own backend, "cpu:gloo,DEVICE:BACKEND", names the CPU twice here.
distributed.initialize_global_process_group_ray = partial(
    distributed.initialize_global_process_group_ray, backend="gloo"
)
from verl.workers.rollout import base  # noqa: E402
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry  # noqa: E402


def server_name(rank: int) -> str:
    return f"{NAME}_{rank}"


class Replica(RolloutReplica):
    """One server a rank."""

    async def launch_servers(self) -> None:
        path = self.model_config.path
        made = ray.remote(Server).options(name=server_name(self.replica_rank), num_cpus=0.1)
        self.servers = [made.remote(path)]
        self._server_handle = self.servers[0]
        self._server_address = server_name(self.replica_rank)


class Sender(base.BaseRollout):
    """The actor's side: sends its weights to the rank's server."""

    async def resume(self, tags: list[str]) -> None:
        return None

    async def release(self) -> None:
        return None

    async def update_weights(self, weights: Any, global_steps: int = 0, **_: Any) -> None:
        plain = {name: tensor.detach().float().cpu().clone() for name, tensor in weights}
        server = ray.get_actor(server_name(torch.distributed.get_rank()))
        await server.set_weights.remote(plain, global_steps)


RolloutReplicaRegistry.register(NAME, lambda: Replica)
base._ROLLOUT_REGISTRY[(NAME, "async")] = f"{__name__}.Sender"
