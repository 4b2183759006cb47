"""A run's config as veRL's: hydra overrides, the agent loop's entry, and what veRL has no place for.

    launch = verl_launch(config, Place(Path("runs/x"), gpus=8))
    launch.overrides, launch.agent, launch.unused

Every key of RunConfig is mapped, or refused by name, or named in `unused` with what stands in its
place; a test goes through all of them. Nothing here imports veRL or reads a task.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mintrl_env.config import EvalSection, RunConfig
from mintrl_env.errors import ConfigError
from mintrl_env.verl_entry import LOOP, agent_entry, agent_workers, is_reviewed

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"
_LOSS = f"{_ACTOR}.policy_loss"
_PLUGIN = "mintrl_env.adapters.verl_plugin"
_LOGGERS = ("wandb", "mlflow", "swanlab", "tensorboard", "clearml", "trackio")


@dataclass(frozen=True)
class Place:
    """Where a run is: its folder, which every node must see, and its GPUs.

    Attributes:
        folder: an absolute path; the tasks' files, checkpoints and trajectories are in it.
        gpus: of a node. nodes: machines.
        tensor_parallel: GPUs that one inference server spans.
    """

    folder: Path
    gpus: int = 8
    nodes: int = 1
    tensor_parallel: int = 1

    def __post_init__(self) -> None:
        for name in ("gpus", "nodes", "tensor_parallel"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} counts from 1")
        if self.world % self.tensor_parallel:
            raise ConfigError(
                f"--tensor-parallel {self.tensor_parallel} does not divide {self.world} GPUs"
            )

    @property
    def world(self) -> int:
        return self.gpus * self.nodes

    @property
    def agent_file(self) -> Path:
        return self.folder / "agent.yaml"

    @property
    def train_file(self) -> Path:
        return self.folder / "train.parquet"

    @property
    def val_file(self) -> Path:
        return self.folder / "val.parquet"


@dataclass(frozen=True)
class Launch:
    """What veRL is started with.

    Attributes:
        overrides: for `python -m verl.trainer.main_ppo`, not shell-quoted.
        agent: the agent loop's entry, for `Place.agent_file`.
        unused: keys that veRL has no use for -> why, or what stands in their place.
    """

    overrides: list[str]
    agent: dict[str, Any]
    unused: dict[str, str] = field(default_factory=dict)


def verl_overrides(config: RunConfig, place: Place) -> list[str]:
    """The overrides alone; see `verl_launch`."""
    return verl_launch(config, place).overrides


def verl_launch(config: RunConfig, place: Place) -> Launch:
    """A config as veRL's.

    Raises:
        ConfigError: with every key that veRL cannot honour, and why.
    """
    problems: list[str] = []
    workers = agent_workers(config)
    unused = _unused(config)
    values: dict[str, Any] = {
        **_fixed(place, workers),
        **_policy(config, problems),
        **_tasks(config, place, problems),
        **_rollout(config, place, problems),
        **_objective(config, place),
        **_train(config, place, problems),
    }
    agent = agent_entry(config, workers, problems)
    if config.probe is not None:
        problems.append("probe: veRL has no place to measure a judge in; --set probe=null")
    if problems:
        listed = "\n  ".join(problems)
        raise ConfigError(f"veRL cannot run this config as it is:\n  {listed}")
    return Launch([f"{key}={_hydra(value)}" for key, value in values.items()], agent, unused)


def _fixed(place: Place, workers: int) -> dict[str, Any]:
    """What the plug-in needs whatever the config says."""
    return {
        "trainer.v1.trainer_mode": "mintrl_sync",
        "algorithm.adv_estimator": "mintrl",
        "critic.enable": False,
        f"{_LOSS}._target_": "mintrl_env.adapters.verl_loss.MintrlPolicyLossConfig",
        f"{_LOSS}.loss_mode": "mintrl",
        f"{_ACTOR}.strategy": "fsdp2",
        f"{_ROLLOUT}.name": "vllm",
        f"{_ROLLOUT}.tensor_model_parallel_size": place.tensor_parallel,
        f"{_ROLLOUT}.calculate_log_probs": False,
        f"{_ROLLOUT}.agent.default_agent_loop": LOOP,
        f"{_ROLLOUT}.agent.agent_loop_config_path": str(place.agent_file),
        f"{_ROLLOUT}.agent.num_workers": workers,
        "reward.num_workers": 1,  # the agent loop has scored
        "trainer.n_gpus_per_node": place.gpus,
        "trainer.nnodes": place.nodes,
        "trainer.project_name": "mintrl",
        "trainer.experiment_name": place.folder.name,
        "trainer.default_local_dir": str(place.folder / "checkpoints"),
        "hydra.run.dir": str(place.folder / "hydra"),
        # So that a plug-in that cannot be registered stops veRL, in every process.
        "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES": _PLUGIN,
    }


def _policy(config: RunConfig, problems: list[str]) -> dict[str, Any]:
    policy = config.policy
    if policy.path.startswith("warmup:"):
        problems.append(f"policy.path: {policy.path} has to be a folder (it is made when launched)")
    values: dict[str, Any] = {
        f"{_MODEL}.path": policy.path,
        f"{_ACTOR}.fsdp_config.model_dtype": {"float32": "fp32", "bfloat16": "bf16"}[policy.dtype],
        "data.max_prompt_length": policy.max_prompt,
    }
    lora = policy.lora
    if lora is not None:
        if lora.dropout:
            problems.append(
                "policy.lora.dropout: veRL's adapters have none (and MInTRL wants none); set it to 0"
            )
        values |= {
            f"{_MODEL}.lora_rank": lora.r,
            f"{_MODEL}.lora_alpha": lora.alpha,
            f"{_MODEL}.target_modules": lora.target_modules,
            # The servers read the base model's weights themselves; only the adapter is sent.
            f"{_ROLLOUT}.load_format": "safetensors",
        }
    return values


def _tasks(config: RunConfig, place: Place, problems: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {
        "data.train_files": str(place.train_file),
        "data.train_batch_size": config.train.prompts_per_update,
        "data.shuffle": True,
        "data.seed": config.train.seed,
    }
    section = config.evaluation
    if section is None:  # veRL wants a file all the same
        values |= {"data.val_files": str(place.train_file), "data.val_max_samples": 1}
        return values | {"trainer.val_before_train": False, "trainer.test_freq": -1}
    return values | {
        "data.val_files": str(place.val_file),
        f"{_ROLLOUT}.val_kwargs.n": section.n,
        f"{_ROLLOUT}.val_kwargs.do_sample": True,
        f"{_ROLLOUT}.val_kwargs.temperature": config.rollout.temperature,
        "trainer.val_before_train": section.before,
        "trainer.test_freq": _test_freq(section, config.train.updates, problems),
    }


def _test_freq(section: EvalSection, updates: int, problems: list[str]) -> int:
    """veRL evaluates after each `test_freq` updates and always after the last one, or never."""
    if not section.every:
        return updates if section.after else -1
    if not section.after and updates % section.every:
        problems.append(
            "evaluation.after: false, with evaluation.every: veRL evaluates after the last update "
            "too; set after to true, or every to 0"
        )
    return section.every


def _rollout(config: RunConfig, place: Place, problems: list[str]) -> dict[str, Any]:
    section = config.rollout
    if section.schedule != "free":
        problems.append(
            f"rollout.schedule: {section.schedule} is the embedded engine's; veRL's servers batch "
            "freely: set it to free"
        )
    rows = config.rows_per_update // config.train.minibatches
    if config.train.prompts_per_update % config.train.minibatches:
        problems.append(
            "train.minibatches: veRL splits an update by prompts, and "
            f"{config.train.prompts_per_update} do not split into {config.train.minibatches}"
        )
    if rows % place.world:
        problems.append(
            f"train: {rows} rows of an optimiser step do not split over {place.world} GPUs: change "
            "train.prompts_per_update, train.minibatches or --gpus"
        )
    micro = math.gcd(config.train.micro_batch, max(rows // place.world, 1))
    values: dict[str, Any] = {
        f"{_ROLLOUT}.n": config.group_size,
        f"{_ROLLOUT}.temperature": section.temperature,
        "data.max_response_length": config.episode.max_response,
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu": micro,
        f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu": micro,
    }
    return values | _vllm_options(config, problems)


def _vllm_options(config: RunConfig, problems: list[str]) -> dict[str, Any]:
    """Options of an engine in this process, for veRL's servers."""
    if config.rollout.engine != "vllm":
        return {}
    values: dict[str, Any] = {}
    for name, value in config.rollout.engine_options.items():
        if name == "memory":
            values[f"{_ROLLOUT}.gpu_memory_utilization"] = value
        elif name == "sleep":
            values[f"{_ROLLOUT}.free_cache_engine"] = bool(value)
        elif isinstance(value, (bool, int, float, str)):
            values[f"+{_ROLLOUT}.engine_kwargs.vllm.{name}"] = value
        else:
            problems.append(
                f"rollout.engine_options.{name}: no single value; give it as veRL wants it, by "
                f"--verl +{_ROLLOUT}.engine_kwargs.vllm.{name}=..., and leave it out here"
            )
    return values


def _objective(config: RunConfig, place: Place) -> dict[str, Any]:
    section = config.objective
    values: dict[str, Any] = {
        "variant": "proxy" if config.method == "mintrl-proxy" else "const",
        "kappa": section.kappa,
        "beta_1": section.beta_1,
        "beta_2": section.beta_2,
        "baseline": section.baseline,
        "loss_scale": section.loss_scale,
        "n_control": config.rollout.n_control,
        "intervention_updates": section.intervention_updates if is_reviewed(config) else 0,
        "rewarm_updates": section.rewarm_updates,
        "store": str(place.folder / "rollouts"),
    }
    if config.judge is not None:
        values["max_failure_rate"] = config.judge.max_failure_rate
    return {f"+{_LOSS}.{name}": value for name, value in values.items()}


def _train(config: RunConfig, place: Place, problems: list[str]) -> dict[str, Any]:
    train = config.train
    steps = train.minibatches * train.iterations
    if train.warmup_steps % steps:
        problems.append(
            f"train.warmup_steps: veRL's learning rate rises once an update, of {steps} optimiser "
            f"steps here; give a multiple of {steps}, not {train.warmup_steps}"
        )
    unknown = [name for name in train.report_to if name not in _LOGGERS]
    if unknown:
        problems.append(
            f"train.report_to: veRL does not report to {', '.join(unknown)}; it knows "
            f"{', '.join(_LOGGERS)}"
        )
    return {
        "trainer.total_training_steps": train.updates,
        "trainer.total_epochs": train.updates,  # more than enough: an epoch is an update at least
        f"{_ACTOR}.ppo_mini_batch_size": train.prompts_per_update // train.minibatches,
        f"{_ACTOR}.ppo_epochs": train.iterations,
        f"{_ACTOR}.optim.lr": train.learning_rate,
        f"{_ACTOR}.optim.lr_warmup_steps": train.warmup_steps // steps,
        f"{_ACTOR}.optim.weight_decay": train.weight_decay,
        f"{_ACTOR}.optim.clip_grad": train.max_grad_norm,
        f"{_ACTOR}.fsdp_config.seed": train.seed,
        f"{_ROLLOUT}.seed": train.seed,
        f"{_MODEL}.enable_gradient_checkpointing": train.gradient_checkpointing,
        "trainer.save_freq": train.checkpoint_every or train.updates,
        "trainer.max_actor_ckpt_to_keep": train.keep_checkpoints,
        "trainer.logger": ["console", *train.report_to],
    }


# --- what has no place


def _unused(config: RunConfig) -> dict[str, str]:
    unused = {
        "rollout.slots": f"the servers' {_ROLLOUT}.max_num_seqs bounds the rows at work",
        "rollout.engine": "veRL starts vLLM servers of its own",
        "train.threads": "torch's threads on the CPU",
        "preflight": "run mintrl preflight before; the trainer asks the judge's server itself",
    }
    if config.rollout.engine == "server":
        unused["rollout.engine_options"] = unused["rollout.engine"]
    if config.judge is not None and not is_reviewed(config):
        unused["judge"] = "no update has reviews"
    return unused


# --- values


_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./@%+-]*")
_WORDS = {"true", "false", "null", "nan", "inf"}


def _hydra(value: Any) -> str:
    """A value in the grammar of hydra's overrides."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_hydra, value))}]"
    text = str(value)
    if "$" in text:
        raise ConfigError(f"{text!r}: veRL's config would take the $ for a reference; rename it")
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    escaped = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text)
    return f"'{escaped}'"
