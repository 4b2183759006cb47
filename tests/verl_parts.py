"""What the tests of the veRL adapter share: a config composed from veRL's own files, a stub of its
server manager, and rows as its data set gives them."""

from __future__ import annotations

import importlib.util
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import asyncio
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import verl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.utils import tensordict_utils as tu
from verl.workers.utils.losses import ppo_loss

import mintrl_env.adapters.verl_plugin  # noqa: F401 (registers; an entry point may not be installed)
from mintrl_env import registry
from mintrl_env.adapters.verl_agent_loop import MintrlAgentLoop
from mintrl_env.adapters.verl_rows import verl_row
from mintrl_env.prompts import HFTokenizer, PromptBuilder
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Task


def tiny_trl() -> Any:
    """tests/tiny_trl.py as a module."""
    if "tiny_trl" not in sys.modules:
        path = Path(__file__).with_name("tiny_trl.py")
        spec = importlib.util.spec_from_file_location("tiny_trl", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["tiny_trl"] = module
        spec.loader.exec_module(module)
    return sys.modules["tiny_trl"]


@contextmanager
def registered(**kinds: dict[str, Any]) -> Iterator[None]:
    """Names of a test's own, for as long as it runs: other tests list what is registered."""
    with pytest.MonkeyPatch.context() as patch:
        for kind, things in kinds.items():
            for name, thing in things.items():
                patch.setitem(registry._registered[kind], name, thing)
        yield


LAUNCH = (
    "trainer.v1.trainer_mode=mintrl_sync",
    "algorithm.adv_estimator=mintrl",
    "critic.enable=False",
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.calculate_log_probs=False",
    "actor_rollout_ref.rollout.prompt_length=32",
    "actor_rollout_ref.rollout.response_length=32",
    "actor_rollout_ref.rollout.agent.default_agent_loop=mintrl_agent",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.actor.policy_loss._target_="
    "mintrl_env.adapters.verl_loss.MintrlPolicyLossConfig",
    "actor_rollout_ref.actor.policy_loss.loss_mode=mintrl",
    "+actor_rollout_ref.actor.policy_loss.n_control=2",
    "+actor_rollout_ref.actor.policy_loss.intervention_updates=3",
    "data.train_batch_size=2",
)
"""The keys of a launch that are MInTRL's, and small sizes."""


def config(*overrides: str) -> Any:
    """veRL's own config with our keys and `overrides`, as `main_ppo` composes it."""
    return copy.deepcopy(_composed(overrides))


@lru_cache(maxsize=64)
def _composed(overrides: tuple[str, ...]) -> Any:
    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        return compose("ppo_trainer", overrides=[*LAUNCH, *overrides])


Script = Callable[[str, list[int], dict[str, Any]], Any]


class StubManager:
    """`LLMServerClient.generate` by a script; keeps what it was asked.

    Args:
        script: (request id, prompt ids, sampling parameters) -> ids, or a whole answer.
        version: the weights' version that each answer says.
    """

    def __init__(self, script: Script, version: int | None = 0) -> None:
        self.script, self.version = script, version
        self.calls: list[tuple[str, list[int], dict[str, Any]]] = []

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> Any:
        await asyncio.sleep(0)
        self.calls.append((request_id, prompt_ids, sampling_params))
        made = self.script(request_id, prompt_ids, sampling_params)
        if asyncio.iscoroutine(made):
            made = await made
        return made if isinstance(made, SimpleNamespace) else self.answer(made)

    def answer(self, ids: Sequence[int], **changes: Any) -> SimpleNamespace:
        given = {
            "token_ids": list(ids),
            "log_probs": [-0.5] * len(ids),
            "stop_reason": "completed",
            "extra_fields": {} if self.version is None else {"global_steps": self.version},
        }
        return SimpleNamespace(**(given | changes))


def loop(
    manager: Any, tokenizer: Any, verl_config: Any | None = None, **settings: Any
) -> MintrlAgentLoop:
    """A loop object as hydra makes it for each trajectory."""
    made = config() if verl_config is None else verl_config
    return MintrlAgentLoop(
        DictConfigWrap(made),
        manager,
        tokenizer,
        None,
        None,
        DictConfigWrap(made.data),
        tools=None,
        **{k: OmegaConf.create(v) if isinstance(v, dict) else v for k, v in settings.items()},
    )


def fields(task: Task, tokenizer: Any, **changes: Any) -> dict[str, Any]:
    """What veRL passes to `run` for a row of our own."""
    builder = PromptBuilder(HFTokenizer(tokenizer), chat=changes.pop("chat", False))
    row = verl_row(task, builder, index=0, split="train")
    given = {
        **{k: v for k, v in row.items() if k != "prompt"},
        "raw_prompt": row["prompt"],
        "uid": "u0",
        "session_id": 0,
        "global_steps": 1,
        "index": 0,
        "mintrl_validate": False,
    }
    return given | changes


def ragged(rows: Sequence[Any]) -> Any:
    """One-dimensional tensors as a jagged one, as TransferQueue gives them."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def actor_loss(
    actor: Any,
    rows: Sequence[Trajectory | None],
    logps: Sequence[Any],
    fields: Any,
    *,
    minibatch: int,
    dp_size: int = 1,
) -> Any:
    """veRL's own `ppo_loss` over a micro-batch: the actor's log-probs of whole sequences, ragged and
    shifted as its engines give them, and `fields` as they stand in TransferQueue.

    Args:
        rows, logps: trajectories (None: a padding row of one token) and log pi_theta of each.
        fields: TensorDict of ragged fields.
        minibatch: rows of the optimiser step, over all ranks.
    """
    prompts = [torch.zeros(127 if row is None else len(row.prompt_ids)).long() for row in rows]
    whole = [
        torch.cat([torch.full((len(prompt) - 1,), 99.0), logp.float(), torch.full((1,), 99.0)])
        for prompt, logp in zip(prompts, logps, strict=True)
    ]
    data = fields.clone()
    data["prompts"] = ragged(prompts)
    data["responses"] = ragged([torch.zeros(len(logp)).long() for logp in logps])
    tu.assign_non_tensor(
        data,
        dp_size=dp_size,
        batch_num_tokens=int(fields["loss_mask"].values().sum()),
        global_batch_size=minibatch,
    )
    loss, _ = ppo_loss(actor, {"log_probs": ragged(whole)}, data)
    return loss
