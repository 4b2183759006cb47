"""`mintrl train`: one run from a config, through TRL's trainer on this machine.

What it needs of torch, transformers and TRL is imported when it runs.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from mintrl_env import judge_recipes, recipes
from mintrl_env.config import RunConfig
from mintrl_env.console import RunConsole
from mintrl_env.errors import ConfigError, MissingExtraError
from mintrl_env.evaluation import (
    EVALUATION,
    PROBE,
    evaluate_groups,
    keep_best,
    kept,
    sample,
    summarise,
)
from mintrl_env.metrics import MetricsLog
from mintrl_env.preflight_gate import look_first, wanted
from mintrl_env.preflight_servers import check_servers
from mintrl_env.prompts import HFTokenizer
from mintrl_env.protocols import Guard
from mintrl_env.run_folder import RunFolder
from mintrl_env.trajectory import RolloutStats
from mintrl_env.types import Task

if TYPE_CHECKING:
    from mintrl_env.adapters.trl_trainer import MInTRLTrainer


def train(
    config: RunConfig,
    folder: RunFolder,
    *,
    resume: bool = False,
    preflight: bool | None = None,
    console: RunConsole | None = None,
) -> dict[str, Any]:
    """Run a config to its end and return the summary that is also written to the folder.

    `preflight` looks at a few tasks first (`preflight_gate`); None: by the config.

    Raises:
        MintrlError: the preflight found that the run should not begin.
        ConfigError, TaskError: something in the config or the tasks is wrong; nothing has run.
        StoreError: the folder holds another run, or cannot be written.
        JudgeError: the judge failed too often; what was finished is stored, `--resume` goes on.
    """
    console = console or RunConsole()
    folder.check(config, resume=resume)
    summary = folder.finished(config)
    if summary is not None:
        console.say(f"{folder.path} has come to its end already; these are its figures.")
        return summary
    run = _Run(config, folder, console)
    run.prepare(preflight=wanted(config, preflight, folder))
    with run.parts:
        run.parts.callback(folder.close)
        attempt = folder.open(config, resume=resume)
        try:
            run.build(attempt)
            run.look_first()
        except BaseException:
            if attempt == 0:
                folder.forget()  # nothing has run: the next start shall not find a run here
            raise
        try:
            return run.go()
        except KeyboardInterrupt:
            console.say(f"stopped after {run.done} update(s); --resume goes on from {folder.path}")
            raise


class _Run:
    def __init__(self, config: RunConfig, folder: RunFolder, console: RunConsole) -> None:
        self.config, self.folder, self.console = config, folder, console
        self.trainer: MInTRLTrainer
        self.log: MetricsLog
        self.parts = ExitStack()  # what has to be closed
        self.done = 0  # updates

    # --- everything that can be refused, before the folder is touched

    def prepare(self, *, preflight: bool) -> None:
        config, self.looks_first = self.config, preflight
        try:
            import torch
            import transformers  # noqa: F401
            import trl  # noqa: F401
        except ImportError as error:
            raise MissingExtraError(str(error.name), "trl", "mintrl train") from error
        torch.set_num_threads(config.train.threads)
        _refuse_several_processes()
        recipes.quiet_transformers()
        self.servers = check_servers(config) if preflight else []
        self.tasks = recipes.load_task_set(config.tasks, "tasks", seed=config.train.seed)
        if len(self.tasks) < config.train.prompts_per_update:
            raise ConfigError(
                f"tasks: {len(self.tasks)} task(s) are fewer than train.prompts_per_update = "
                f"{config.train.prompts_per_update}"
            )
        self.verifier = recipes.make_verifier(config.tasks, self.tasks, "tasks")
        self.held_out: list[Task] = []
        if config.evaluation is not None:
            section = config.evaluation.tasks
            self.held_out = recipes.load_task_set(
                section, "evaluation.tasks", seed=config.train.seed
            )
        self.probe_tasks: list[Task] = []
        if config.probe is not None:
            section = config.probe.tasks
            self.probe_tasks = recipes.load_task_set(section, "probe.tasks", seed=config.train.seed)
        for tasks, where in (
            (self.held_out, "evaluation.tasks"),
            (self.probe_tasks, "probe.tasks"),
        ):
            _refuse_other_verifiers(self.tasks, tasks, where)
        _refuse_overlap(self.tasks, self.held_out, "evaluation.tasks")
        with self.console.bar("models", 1) as advance:
            self.judge = judge_recipes.make_judge(config, recipes.warmup_note(advance))
            self.model_path = recipes.resolve_path(
                config.policy.path, config, recipes.warmup_note(advance)
            )
            self.tokenizer = recipes.load_tokenizer(self.model_path, "policy.path")
            advance(1, "")
        tokenizer = HFTokenizer(self.tokenizer)
        self.guards: Sequence[Guard] = ()
        if config.judge is not None:
            self.guards = judge_recipes.make_guards(config.judge, tokenizer, self.verifier)
        prompts = recipes.make_prompts(tokenizer, config.policy)
        for tasks in (self.tasks, self.held_out, self.probe_tasks):
            recipes.check_prompts(prompts, tasks)

    # --- the trainer

    def build(self, attempt: int) -> None:
        from datasets import Dataset
        from transformers import PrinterCallback

        from mintrl_env.adapters.trl_trainer import MInTRLTrainer

        config = self.config
        by_id = {task.task_id: task for task in self.tasks}
        model = recipes.load_model(self.model_path, "policy.path", dtype=config.policy.dtype)
        self.log = self.parts.enter_context(
            MetricsLog(self.folder.metrics_file, run_attempt=attempt)
        )
        self.trainer = MInTRLTrainer(
            model,
            args=self._trainer_config(),
            train_dataset=Dataset.from_list(
                [{"prompt": task.prompt_text, "task_id": task.task_id} for task in self.tasks]
            ),
            processing_class=self.tokenizer,
            judge=self.judge,
            guards=self.guards,
            verifier=self.verifier,
            task_of=lambda row: by_id[row["task_id"]],
            prompts=lambda tokenizer: recipes.make_prompts(tokenizer, config.policy),
            store=self.folder.store(),
            run_attempt=attempt,
            peft_config=_peft_config(config),
            callbacks=[_make_callback(self)],
        )
        self.parts.callback(self.trainer.close)
        self.trainer.remove_callback(PrinterCallback)  # our own callback reports
        _ = self.trainer.session  # engines, judge and KV cache: what doesn't fit fails here

    def look_first(self) -> None:
        """A preflight of a few tasks, where one is wanted."""
        if self.looks_first:
            look_first(
                self.trainer.session, self.config, self.folder, self.tasks, verifier=self.verifier,
                evaluation=len(self.held_out), probe=len(self.probe_tasks), reports=self.servers,
                console=self.console)  # fmt: skip

    def _trainer_config(self) -> Any:
        import torch

        from mintrl_env.adapters.trl_config import MInTRLConfig, rollout_keywords

        config = self.config
        train, rollout, objective = config.train, config.rollout, config.objective
        on_gpu = torch.cuda.is_available()
        updates = objective.intervention_updates if config.method != "grpo" else 0
        micro = config.rows_per_update // train.micro_batch
        steps = train.minibatches * train.iterations
        return MInTRLConfig(
            output_dir=str(self.folder.checkpoints),
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

    # --- the run

    def go(self) -> dict[str, Any]:
        config, started = self.config, time.monotonic()
        figures: dict[str, Any] = {}
        evaluation = config.evaluation
        if evaluation is not None and evaluation.before:
            figures["before"] = self.evaluate("before")
        if self.probe_tasks:
            figures["probe_before"] = self.probe("probe before")
        checkpoint = self.folder.last_checkpoint()
        with self.console.bar("training", config.train.updates) as self.advance:
            self.trainer.on_progress = self._in_update
            self.trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        self.trainer.save_model(str(self.folder.path / "model"))
        if evaluation is not None and evaluation.after:
            figures["after"] = self.evaluate("after", fresh=True)
        if self.probe_tasks:
            figures["probe_after"] = self.probe("probe after", fresh=True)
        summary = summarise(config, self.folder, figures)
        summary["wall_seconds"] = round(time.monotonic() - started, 1)
        self.folder.write_summary(summary)
        return summary

    def evaluate(self, name: str, *, fresh: bool = False) -> dict[str, Any]:
        """Accuracy on the held-out problems, by the policy alone; kept, so a resume has it."""
        assert self.config.evaluation is not None
        n = self.config.evaluation.n
        with self.console.bar(f"evaluation {name}", len(self.held_out) * n) as advance:
            return kept(
                self.folder.path / "evaluation" / f"{name}.json",
                self.config.evaluation.model_dump(mode="json", include={"tasks", "n"}),
                fresh,
                lambda: evaluate_groups(
                    sample(
                        self.trainer.session, self.held_out, EVALUATION, range(n), False, advance
                    )
                ),
            )

    def probe(self, name: str, *, fresh: bool = False) -> dict[str, Any]:
        """The judge on a frozen set of prompts: how often it revises, and what that brings."""
        assert self.config.probe is not None
        first = self.config.rollout.n_control
        rows = range(first, first + self.config.probe.n)
        with self.console.bar(name, len(self.probe_tasks) * len(rows)) as advance:
            return kept(
                self.folder.path / "evaluation" / f"{name.replace(' ', '_')}.json",
                self.config.probe.model_dump(mode="json"),
                fresh,
                lambda: RolloutStats.over(
                    sample(self.trainer.session, self.probe_tasks, PROBE, rows, True, advance)
                ).as_dict(),
            )

    def _in_update(self, rows: int, total: int) -> None:
        note = "learning" if rows == total else f"{rows} of {total} rows"
        self.advance(self.done, f"update {self.done + 1}: {note}")

    def after_update(self, update: int, logs: dict[str, Any]) -> None:
        """Called by the trainer's callback once an update's optimiser steps are done."""
        row = _metrics_row(logs)
        evaluation = self.config.evaluation
        done = self.done = update + 1
        if evaluation is not None and evaluation.every and done % evaluation.every == 0:
            result = self.evaluate(f"update-{done}", fresh=True)
            row["accuracy"], row["accuracy_ci95"] = result["accuracy"], result["ci95"]
            keep_best(self.folder.path, done, result["accuracy"], self.trainer.save_model)
        self.log.write(update, row)
        reward = row.get("reward")
        self.advance(done, "" if reward is None else f"reward {reward:.2f}")


def _refuse_other_verifiers(tasks: Sequence[Task], others: Sequence[Task], where: str) -> None:
    ours = {task.verifier for task in tasks}
    strange = sorted({task.verifier for task in others} - ours)
    if strange:
        raise ConfigError(
            f"{where}: these tasks are for the verifier {strange[0]!r}, those of `tasks` for "
            f"{min(ours)!r}, and a run has one verifier; use `mintrl eval` with a config of its own"
        )


def _refuse_overlap(tasks: Sequence[Task], held_out: Sequence[Task], where: str) -> None:
    # The same problem with other blanks or line ends is the same problem.
    train = {" ".join(task.prompt_text.split()) for task in tasks}
    shared = [task.task_id for task in held_out if " ".join(task.prompt_text.split()) in train]
    if shared:
        raise ConfigError(
            f"{where}: {len(shared)} problem(s) are training prompts too (the first is "
            f"{shared[0]!r}): an accuracy on them would say nothing; use another split"
        )


_ROW_KEYS = {
    "reward": "reward",
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "entropy": "entropy",
    "completions/mean_length": "mean_length",
    "mintrl/reward/control": "reward_control",
    "mintrl/reward/intervened": "reward_intervened",
    "mintrl/off_policy_fraction/intervened": "off_policy_fraction_intervened",
    "mintrl/off_policy_fraction/all": "off_policy_fraction_all",
    "mintrl/revises_per_review": "revises_per_review",
}


def _metrics_row(logs: dict[str, Any]) -> dict[str, Any]:
    """The trainer's log of a step under the names that metrics.jsonl uses; the rest as it is."""
    row = {_ROW_KEYS.get(key, key): value for key, value in logs.items()}
    if "reward_control" in row and "reward_intervened" in row:
        row["reward_gap"] = row["reward_intervened"] - row["reward_control"]
    row["phase"] = "intervention" if row.pop("mintrl/intervention_phase", 0.0) else "grpo"
    if row["phase"] == "grpo" and "reward" in row:
        row["reward_control"] = row["reward"]  # nobody reviews: all rows are controls
    return row


def _peft_config(config: RunConfig) -> Any:
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


def _refuse_several_processes() -> None:
    world = int(os.environ.get("WORLD_SIZE") or 1)
    if world > 1:
        raise ConfigError(
            f"mintrl train runs in one process, and here it was started as one of {world} (torchrun, "
            "accelerate launch): start it alone, or use MInTRLTrainer in a script of your own"
        )


def _make_callback(run: _Run) -> Any:
    from transformers import TrainerCallback

    class Report(TrainerCallback):  # type: ignore[misc]
        """Gathers the logs of an update's optimiser steps and reports the update when it is done."""

        def __init__(self) -> None:
            self.logs: dict[str, Any] = {}
            self.started = time.monotonic()

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.started = time.monotonic()
            steps = run.config.train.minibatches * run.config.train.iterations
            run.done = state.global_step // steps

        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
        ) -> None:
            if not logs or "loss" not in logs:
                return  # the trainer's closing figures
            numbers = {k: v for k, v in logs.items() if isinstance(v, (int, float))}
            self.logs |= {k: v for k, v in numbers.items() if not math.isnan(v)}
            steps = run.config.train.minibatches * run.config.train.iterations
            if state.global_step % steps == 0:
                self.logs["seconds"] = round(time.monotonic() - self.started, 3)
                run.after_update(state.global_step // steps - 1, self.logs)
                self.logs, self.started = {}, time.monotonic()

    return Report()
