"""MInTRLTrainer: TRL's GRPOTrainer with MInTRL's rollouts, baseline and loss.

Three overrides, and one rollout function that every phase shares, so that ids, template and
sampling are the same with the judge and without:

    _generate_and_score_completions   rollouts by our runner, control-only baseline
    _calculate_rewards                rows that are not valid become undecided
    _compute_loss (trl_loss.py)       the squared regression while the judge is on, else TRL's own

What TRL calls private is what is overridden, hence the pin `trl>=1.16,<1.17` and the contract
tests.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mintrl_env.errors import MissingExtraError, StoreError, UsageError

try:
    from trl.trainer.utils import pad
except ImportError as error:
    raise MissingExtraError("trl", "trl", "MInTRLTrainer") from error

from mintrl_env.adapters.pump import Rounds
from mintrl_env.adapters.reward_functions import check_rewards
from mintrl_env.adapters.session import (
    EngineHost,
    JudgeFactory,
    Progress,
    RolloutSession,
)
from mintrl_env.adapters.trl_config import MInTRLConfig
from mintrl_env.adapters.trl_engine import policy_engine
from mintrl_env.adapters.trl_epochs import Beginnings, EpochSampler
from mintrl_env.adapters.trl_loss import RegressionTrainer
from mintrl_env.adapters.trl_rows import (
    by_group,
    check_dataset,
    check_repeated,
    distinct_over_ranks,
    group_shares,
    review_counts,
    score_of,
    task_of_row,
)
from mintrl_env.prompts import HFTokenizer, PromptBuilder
from mintrl_env.protocols import Guard, Judge, Verifier
from mintrl_env.store import RolloutStore
from mintrl_env.trainers.objective import PAD, control_baseline
from mintrl_env.trainers.schedule import Phase, PhaseSchedule
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Provenance, Task

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class MInTRLTrainer(RegressionTrainer):
    """GRPOTrainer with a judge.

    The drop-in form takes what GRPOTrainer takes, and a judge:

        MInTRLTrainer(model, reward_funcs=f, train_dataset=ds, peft_config=p, judge=judge,
                      args=MInTRLConfig(**my_grpo_kwargs, n_control=8))

    Args:
        model, reward_funcs, args, train_dataset, eval_dataset, processing_class, callbacks,
        optimizers, quantization_config, peft_config, reward_processing_classes: as in GRPOTrainer;
            `args` is a MInTRLConfig. Evaluation by `eval_dataset` is never reviewed.
        judge: an object with `async review(request)`, or a JudgeFactory; None trains by GRPO with
            our rollouts.
        guards: look at the judge's Revises, in order.
        verifier: scores responses inside the rollout; with it `reward_funcs` may be empty. It is
            the first of the reward functions, in `reward_weights` too.
        task_of: data set row -> Task. Default: the columns prompt, answer, context (or solution)
            and task_id (or id), of which only the prompt is needed.
        prompts: makes prompt ids; default: as TRL does (messages get the chat template).
        store: where trajectories go.
        run_attempt: raised by a resumed run, for the store.

    Raises:
        UsageError: arguments that contradict one another.
        StoreError: from `train`, where a checkpoint cannot be written.
    """

    _tag_names = ["trl", "grpo", "mintrl"]  # noqa: RUF012 (TRL's own form)
    _name = "MInTRL"
    _paper = {"title": "MInTRL", "id": "2609.12419"}  # noqa: RUF012

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: MInTRLConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        *,
        judge: Judge | JudgeFactory | None = None,
        guards: Sequence[Guard] = (),
        verifier: Verifier | None = None,
        task_of: Callable[[Mapping[str, Any]], Task] | None = None,
        prompts: Callable[[HFTokenizer], PromptBuilder] | None = None,
        store: RolloutStore | None = None,
        run_attempt: int = 0,
        reward_processing_classes: Any = None,
        callbacks: Any = None,
        optimizers: Any = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
    ) -> None:
        if args is None:
            args = MInTRLConfig(output_dir="MInTRL")
        if not isinstance(args, MInTRLConfig):
            raise UsageError(
                f"args must be a MInTRLConfig, not {type(args).__name__}: it takes every keyword "
                "of GRPOConfig"
            )
        funcs, classes = _as_list(reward_funcs), reward_processing_classes
        if verifier is not None:
            funcs = [self._verifier_rewards(), *funcs]
            classes = None if classes is None else [None, *_as_list(classes)]
        check_rewards(funcs)
        check_dataset("train_dataset", train_dataset)
        if not funcs:
            raise UsageError("nothing scores the responses: give reward_funcs or a verifier")
        if judge is not None and args.updates_with_judge and args.n_control == args.num_generations:
            raise UsageError(
                f"n_control = num_generations = {args.n_control} leaves the judge no row to review"
            )
        with warnings.catch_warnings():
            # Which experimental parts of TRL are used here is not the user's business.
            warnings.filterwarnings("ignore", "You are using 'rollout_func'", UserWarning)
            super().__init__(
                model,
                reward_funcs=funcs,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                reward_processing_classes=classes,
                callbacks=callbacks,
                optimizers=optimizers,
                quantization_config=quantization_config,
                peft_config=peft_config,
                rollout_func=_rollout_function(self),
            )
        if self._is_vlm:
            raise UsageError(
                "the embedded engine reads text only: give a tokenizer, not a processor"
            )
        self.args: MInTRLConfig
        self.tokenizer = HFTokenizer(self._tokenizer, self.eos_token_ids)
        self.prompts = (prompts or self._default_prompts)(self.tokenizer)
        self.phases = PhaseSchedule(args.updates_with_judge if judge is not None else 0,
                                    args.rewarm_updates)  # fmt: skip
        self.store = store
        self.on_progress: Progress = lambda done, total: None  # (rows done, rows of the update)
        self._judge, self._guards, self._verifier = judge, tuple(guards), verifier
        self._task_of = task_of or (lambda row: task_of_row(row, verified=verifier is not None))
        self._run_attempt = run_attempt
        self._session: RolloutSession | None = None
        self._sampler: EpochSampler | None = None
        self._next_update = 0
        self._evaluated: dict[str, int] = {}
        self._dataset_rows: list[Mapping[str, Any]] = []
        self._rows: list[Trajectory] = []
        self._reward_B: Tensor | None = None
        self.add_callback(Beginnings(self._begin, self._begin_epoch))

    # --- rollouts

    @property
    def session(self) -> RolloutSession:
        """The rollout session; made at its first use, when the model is where it will stay."""
        if self._session is None:
            args = self.args
            host = EngineHost(
                model=self.accelerator.unwrap_model(self.model),
                tokenizer=self.tokenizer,
                prompts=self.prompts,
                slots=args.engine_slots,
                max_length=args.max_prompt_length + (args.max_completion_length or 0),
                autocast=_AUTOCAST.get(self.accelerator.mixed_precision),
                rounds=Rounds() if args.schedule == "rounds" else None,
                policy_engine=policy_engine(args, self.model, self.accelerator),
            )
            self._session = RolloutSession(
                host,
                args.rollout_config(),
                judge=self._judge,
                guards=self._guards,
                verifier=self._verifier,
                seed=args.seed,
                run_attempt=self._run_attempt,
                on_group=self._on_group,
            )
        return self._session

    def _on_group(self, rows: Sequence[Trajectory]) -> None:
        # Rows whose score the trainer's reward functions give are stored when it is known.
        if self.store is not None and rows[0].update >= 0 and self._verifier is not None:
            self.store.write_group(rows)

    def _rollout(self, prompts: Sequence[Any]) -> dict[str, Any]:
        """What TRL's `rollout_func` is asked: prompts arrive repeated, one for every row."""
        training = self.model.training
        size = (self.num_generations if training else self.num_generations_eval) or 1
        shares = group_shares(self.accelerator.process_index, len(prompts), size)
        check_repeated(prompts, shares)
        tasks = [self._task_of(self._dataset_rows[share.start]) for share in shares]
        if training:
            update, self._next_update = self._next_update, self._next_update + 1
            reviewed = self.phases.phase(update) is Phase.INTERVENTION
            tasks = distinct_over_ranks(tasks, shares, {})
        else:
            update, reviewed = -1 - self.state.global_step, False
            tasks = distinct_over_ranks(tasks, shares, self._evaluated)
        groups = self.session.groups(
            tasks,
            update=update,
            reviewed=reviewed,
            rollouts=[share.rollouts for share in shares],
            on_progress=self.on_progress,
        )
        self._rows = [row for group in groups for row in group]
        return {
            "prompt_ids": [row.prompt_ids.tolist() for row in self._rows],
            "completion_ids": [row.ids.tolist() for row in self._rows],
            # The anchor is recomputed by the trainer; sampling log-probs are diagnostics.
            "logprobs": None,
            "env_mask": [(row.provenance != Provenance.ENVIRONMENT).tolist() for row in self._rows],
        }

    def _default_prompts(self, tokenizer: HFTokenizer) -> PromptBuilder:
        return PromptBuilder(
            tokenizer,
            chat_template_kwargs=dict(self.args.chat_template_kwargs or {}),
            max_prompt=self.args.max_prompt_length,
        )

    def _begin(self, done: int) -> None:
        """A call of `train` starts after `done` micro-batches: 0, or its checkpoint's."""
        # TRL counts from 0 after a resume too, and would generate in the middle of an update.
        self._step, self._buffered_inputs, self._update_batch = done, None, None
        self._next_update = done // (self.args.steps_per_generation * self.num_iterations)

    def _begin_epoch(self, epoch: int) -> None:
        if self._sampler is not None:
            self._sampler.epoch = epoch

    def _get_train_sampler(self, dataset: Any = None) -> EpochSampler:
        self._sampler = EpochSampler.like(super()._get_train_sampler(dataset))
        return self._sampler

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As in GRPOTrainer. Nobody reviews, and the same evaluation takes the same draws."""
        self._evaluated = {}
        figures: dict[str, float] = super().evaluate(*args, **kwargs)
        return figures

    # --- rewards and baseline

    def _verifier_rewards(self) -> Callable[..., list[float | None]]:
        """The verifier's scores, which the rollout has already, as a reward function of TRL's."""

        def verifier(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
            return [row.reward if row.score.decided else None for row in self._rows]

        return verifier

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> Tensor:
        rewards_B_F = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        valid = torch.tensor([row.valid for row in self._rows], device=rewards_B_F.device)
        valid_B = self.accelerator.gather(valid)
        # A row that a deadline or an error ended is undecided, whatever a function makes of it.
        rewards_B_F = torch.where(valid_B[:, None], rewards_B_F, torch.nan)
        weights_F = self.reward_weights.to(rewards_B_F.device)
        reward_B = (rewards_B_F * weights_F).nansum(dim=1)
        self._reward_B = torch.where(rewards_B_F.isnan().all(dim=1), torch.nan, reward_B)
        return rewards_B_F

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._dataset_rows = [dict(row) for row in inputs]
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return batch
        reward_B = self._reward_B
        assert reward_B is not None
        here = slice(
            self.accelerator.process_index * len(self._rows),
            (self.accelerator.process_index + 1) * len(self._rows),
        )
        self._store_rows(reward_B[here])
        active = self.phases.phase(self._rows[0].update) is Phase.INTERVENTION
        self._metrics["train"]["mintrl/intervention_phase"].append(float(active))
        for name, value in review_counts(self._rows, self.accelerator).items():
            self._metrics["train"][name].append(value)
        # A tensor without dimensions goes with every micro-batch that the batch is split into.
        batch["mintrl_active"] = torch.tensor(active, device=reward_B.device)
        if active:
            self._regress(batch, reward_B, here)
        else:
            self._leave_out_undecided(batch, reward_B[here])
        return batch

    def _regress(self, batch: dict[str, Any], reward_B: Tensor, here: slice) -> None:
        """What our loss needs: provenance and A = r - V, V from the controls of the whole group."""
        args, device = self.args, reward_B.device
        # Groups stand one after the other over all ranks; the kinds follow from the place.
        index_B = torch.arange(len(reward_B), device=device)
        group_B = index_B // self.num_generations
        control_B = index_B % self.num_generations < args.n_control
        value_B = control_baseline(
            reward_B,
            control_B,
            group_B,
            beta_1=args.beta_1,
            baseline=args.baseline,
        )
        advantage_B = reward_B - value_B
        batch["advantages"] = advantage_B[here]
        logged = self._logs["advantages"]  # TRL has put its own there
        for _ in range(len(advantage_B)):
            logged.pop()
        logged.extend(advantage_B.tolist())
        batch["mintrl_provenance"] = pad(
            [torch.tensor(row.provenance.astype(np.int64)) for row in self._rows],
            padding_value=PAD,
            padding_side="right",
            pad_to_multiple_of=self.pad_to_multiple_of,
        ).to(device)
        batch["mintrl_advantage"] = advantage_B[here]
        batch["mintrl_reward"] = reward_B[here]
        batch["mintrl_control"] = control_B[here]
        batch["mintrl_group"] = group_B[here]

    def _leave_out_undecided(self, batch: dict[str, Any], reward_b: Tensor) -> None:
        """The GRPO phase: TRL gives undecided rows no advantage, but counts their tokens."""
        batch["tool_mask"] = batch["tool_mask"] * ~torch.isnan(reward_b)[:, None]
        tokens = (batch["completion_mask"] * batch["tool_mask"]).sum()
        batch["num_items_in_batch"] = self.accelerator.reduce(tokens, reduction="sum")

    def _store_rows(self, reward_b: Tensor) -> None:
        """Rows take the trainer's reward, and go to the store with it."""
        self._rows = [
            row.with_score(score_of(reward, row)) if row.valid else row
            for row, reward in zip(self._rows, reward_b.tolist(), strict=True)
        ]
        if self.store is None:
            return
        for group in by_group(self._rows):
            self.store.write_group(group)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            self.store.compact(self._rows[0].update)

    # --- schedule

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """As in Trainer, with the re-warm-up at the switch to GRPO."""
        given = self.lr_scheduler
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if not self.args.rewarm_updates or given is not None:
            return scheduler
        if not hasattr(scheduler, "lr_lambdas"):
            raise UsageError(
                f"rewarm_updates scales a learning rate given by a function of the step, which "
                f"lr_scheduler_type={self.args.lr_scheduler_type!s} is not"
            )
        micro, per_update = (
            self.args.gradient_accumulation_steps,
            self.args.steps_per_generation * self.num_iterations,
        )
        scheduler.lr_lambdas = [
            lambda step, base=base: base(step) * self.phases.lr_factor(step * micro // per_update)
            for base in scheduler.lr_lambdas
        ]
        return scheduler

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        try:
            super()._save_checkpoint(model, trial)
        except Exception as error:  # a full disk is a different class in each library
            raise StoreError(
                f"{self.args.output_dir}: the checkpoint after step {self.state.global_step} cannot "
                f"be written: {error}. Make room and resume from the one before"
            ) from error

    def close(self) -> None:
        """End the loop thread of the rollouts."""
        if self._session is not None:
            self._session.close()


def _rollout_function(trainer: MInTRLTrainer) -> Callable[..., dict[str, Any]]:
    # A plain function: TRL looks at the callable's name and signature, and deep copies nothing.
    def rollout(prompts: Sequence[Any], _: Any) -> dict[str, Any]:
        return trainer._rollout(prompts)

    return rollout


def _as_list(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


__all__ = ["JudgeFactory", "MInTRLConfig", "MInTRLTrainer"]
