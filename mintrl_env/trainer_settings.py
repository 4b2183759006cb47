"""A config's `train` section as TRL's trainer takes it, on one process or several."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mintrl_env import recipes
from mintrl_env.config import RunConfig
from mintrl_env.errors import ConfigError, MissingExtraError, UsageError

_SLACK_S = 1800.0


def patience_s(config: RunConfig) -> float:
    """How long a process waits for the others: one may have drawn all the long rows of an update, and
    giving the servers new weights takes its time."""
    return config.rollout.deadline_s + _SLACK_S


def check_split(config: RunConfig, processes: int) -> None:
    """Refuse what cannot be trained in so many processes: an engine, or rows that don't split.

    Raises:
        ConfigError
    """
    from mintrl_env.adapters.server_options import check_processes

    try:
        check_processes(config.rollout.engine, processes)
    except UsageError as error:
        raise ConfigError(f"rollout.engine: {error}") from None
    check_rows(config, processes)


def check_rows(config: RunConfig, processes: int) -> None:
    """Refuse rows that don't split over processes, minibatches and forwards.

    Raises:
        ConfigError
    """
    train, rows = config.train, config.rows_per_update
    each = processes * train.minibatches
    if rows % (each * train.micro_batch):
        hint = (
            f"change train.micro_batch (to a divisor of {rows // each})"
            if rows % each == 0
            else f"change train.prompts_per_update (now {train.prompts_per_update}), the number of "
            "processes or of minibatches"
        )
        raise ConfigError(
            f"train: {rows} rows an update don't split over {processes} processes, "
            f"{train.minibatches} minibatch(es) and {train.micro_batch}-row forwards: {hint}"
        )


def refuse_sharding(environ: Mapping[str, str]) -> None:
    """Refuse FSDP and DeepSpeed, as accelerate's launcher asks for them.

    Raises:
        ConfigError
    """
    for name, what in (
        ("ACCELERATE_USE_FSDP", "FSDP"),
        ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed"),
    ):
        if environ.get(name, "").lower() in ("1", "true", "yes"):
            raise ConfigError(
                f"mintrl train keeps the whole model in every process (DDP), and was started with "
                f"{what}: launch without it, train a LoRA (policy.lora), or take veRL for a model that "
                "does not fit"
            )


def trainer_config(config: RunConfig, output: Path, *, processes: int = 1) -> Any:
    """The MInTRLConfig of a run.

    Args:
        output: the checkpoints' folder.
        processes: that train together; an update's rows are shared out over them.

    Raises:
        ConfigError: the rows don't split so. UsageError: what MInTRLConfig refuses.
    """
    import torch

    from mintrl_env.adapters.trl_config import MInTRLConfig, rollout_keywords

    check_split(config, processes)
    train, rollout, objective = config.train, config.rollout, config.objective
    on_gpu = torch.cuda.is_available()
    updates = objective.intervention_updates if config.method != "grpo" else 0
    micro = config.rows_per_update // (train.micro_batch * processes)
    steps = train.minibatches * train.iterations
    return MInTRLConfig(
        output_dir=str(output),
        seed=train.seed,
        max_steps=train.updates * steps,
        per_device_train_batch_size=train.micro_batch,
        gradient_accumulation_steps=micro // train.minibatches,
        steps_per_generation=micro,
        num_iterations=train.iterations,
        learning_rate=train.learning_rate,
        warmup_steps=train.warmup_steps,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        gradient_checkpointing=train.gradient_checkpointing,
        bf16=on_gpu,  # and `open_policy` evaluates so
        use_cpu=not on_gpu,
        save_strategy="steps" if train.checkpoint_every else "no",
        save_steps=max(1, train.checkpoint_every) * steps,
        save_total_limit=train.keep_checkpoints,
        logging_steps=1,
        disable_tqdm=True,
        report_to=list(train.report_to),
        ddp_timeout=int(patience_s(config)),
        max_prompt_length=config.policy.max_prompt,
        variant="proxy" if config.method == "mintrl-proxy" else "const",
        kappa=objective.kappa,
        beta_1=objective.beta_1,
        beta_2=objective.beta_2,
        baseline=objective.baseline,
        loss_scale=objective.loss_scale,
        intervention_updates=updates,
        rewarm_updates=objective.rewarm_updates,
        engine_slots=rollout.slots,
        schedule=rollout.schedule,
        rollout_engine=rollout.engine,
        engine_options=rollout.engine_options or None,
        **rollout_keywords(recipes.rollout_config(config)),
    )


def peft_config(config: RunConfig) -> Any:
    """The LoRA adapter of a run; None: the whole model is trained."""
    lora = config.policy.lora
    if lora is None:
        return None
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise MissingExtraError("peft", "trl", "policy.lora") from error
    return LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
    )
