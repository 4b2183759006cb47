"""MInTRLTrainer: TRL's GRPOTrainer with MInTRL's rollouts, baseline and loss.

Three overrides, and one rollout function that every phase shares, so that ids, template and sampling
are the same with the judge and without:

    _generate_and_score_completions   rollouts by our runner, control-only baseline
    _calculate_rewards                rows that are not valid become undecided
    _compute_loss                     the squared regression while the judge is on, else TRL's own

What TRL calls private is what is overridden, hence the pin `trl>=1.16,<1.17` and the contract tests.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from mintrl_env.errors import MissingExtraError, UsageError

try:
    from trl import GRPOTrainer
    from trl.trainer.utils import pad
except ImportError as error:
    raise MissingExtraError("trl", "trl", "MInTRLTrainer") from error

from mintrl_env.adapters.policy_transformers import SlotEngine
from mintrl_env.adapters.pump import Pumped, Rounds
from mintrl_env.adapters.session import RolloutSession, distinct, task_id_of
from mintrl_env.adapters.trl_config import MInTRLConfig
from mintrl_env.adapters.trl_update import UpdateBatch
from mintrl_env.prompts import HFTokenizer, PromptBuilder
from mintrl_env.protocols import Guard, Judge, Verifier
from mintrl_env.rollout import Parts, Runner
from mintrl_env.store import RolloutStore
from mintrl_env.tasks import TaskColumns
from mintrl_env.trainers.objective import (
    PAD,
    anchor,
    batch_counts,
    control_baseline,
    loss_mask,
    mintrl_loss,
)
from mintrl_env.trainers.schedule import Phase, PhaseSchedule
from mintrl_env.trajectory import RolloutStats, Trajectory
from mintrl_env.types import Provenance, Score, Task

JudgeFactory: TypeAlias = Callable[["MInTRLTrainer"], tuple[Judge, Sequence[Pumped]]]
"""Makes a judge that needs the trainer's model, and the engines that the pump has to serve for it."""

_OURS = "mintrl_"


class MInTRLTrainer(GRPOTrainer):
    """GRPOTrainer with a judge.

    The drop-in form takes what GRPOTrainer takes, and a judge:

        MInTRLTrainer(model, reward_funcs=f, train_dataset=ds, peft_config=p, judge=judge,
                      args=MInTRLConfig(**my_grpo_kwargs, n_control=8))

    Args:
        model, reward_funcs, args, train_dataset, eval_dataset, processing_class, callbacks,
        optimizers, peft_config: as in GRPOTrainer; `args` is a MInTRLConfig. Evaluation by
            `eval_dataset` is never reviewed.
        judge: an object with `async review(request)`, or a JudgeFactory; None trains by GRPO with
            our rollouts.
        guards: look at the judge's Revises, in order.
        verifier: scores responses inside the rollout; with it `reward_funcs` may be empty.
        task_of: data set row -> Task. Default: the columns prompt, answer, context (or solution)
            and task_id (or id), of which only the prompt is needed.
        prompts: makes prompt ids; default: as TRL does (messages get the chat template).
        store: where trajectories go.
        run_attempt: raised by a resumed run, for the store.

    Raises:
        UsageError: arguments that contradict one another.
    """

    _tag_names = ["trl", "grpo", "mintrl"]  # noqa: RUF012 (TRL's own form)
    _name = "MInTRL"

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
        callbacks: Any = None,
        optimizers: Any = (None, None),
        peft_config: Any = None,
        reward_processing_classes: Any = None,
    ) -> None:
        if args is None:
            args = MInTRLConfig(output_dir="MInTRL")
        if not isinstance(args, MInTRLConfig):
            raise UsageError(
                f"args must be a MInTRLConfig, not {type(args).__name__}: it takes every keyword of "
                "GRPOConfig"
            )
        if args.use_vllm:
            raise UsageError("use_vllm: this trainer generates with the embedded engine; leave it off")
        funcs = _as_list(reward_funcs)
        if verifier is not None:
            funcs = [self._verifier_rewards(), *funcs]
        if not funcs:
            raise UsageError("nothing scores the responses: give reward_funcs or a verifier")
        super().__init__(
            model,
            reward_funcs=funcs,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
            rollout_func=_rollout_function(self),
        )
        self.args: MInTRLConfig
        self.tokenizer = HFTokenizer(self._tokenizer, self.eos_token_ids)
        make_prompts = prompts or self._default_prompts
        self.prompts = make_prompts(self.tokenizer)
        self.phases = PhaseSchedule(args.updates_with_judge if judge is not None else 0,
                                    args.rewarm_updates)  # fmt: skip
        self.store = store
        self.stats = RolloutStats()  # of the whole run, training updates only
        self._judge, self._guards, self._verifier = judge, tuple(guards), verifier
        self._task_of = task_of or self._default_task_of
        self._run_attempt = run_attempt
        self._session: RolloutSession | None = None
        self._next_update: int | None = None
        self._dataset_rows: list[Mapping[str, Any]] = []
        self._rows: list[Trajectory] = []
        self._reward_B: Tensor | None = None
        self._update_batch: UpdateBatch | None = None
        self._gradient_checked = False

    # --- rollouts

    @property
    def session(self) -> RolloutSession:
        """The rollout session; made at its first use, when the model is where it will stay."""
        if self._session is None:
            self._session = self._make_session()
        return self._session

    def _make_session(self) -> RolloutSession:
        args = self.args
        rounds = Rounds() if args.schedule == "rounds" else None
        self.engine = self.make_engine(self.accelerator.unwrap_model(self.model), rounds=rounds)
        judge, engines = self._judge, ()
        if judge is not None and not hasattr(judge, "review"):
            judge, engines = judge(self)
        parts = Parts(self.engine, judge, self._guards, self._verifier)  # type: ignore[arg-type]
        runner = Runner(
            parts,
            self.prompts,
            args.rollout_config(),
            seed=args.seed,
            run_attempt=self._run_attempt,
            on_group=self._on_group,
            on_live=self._on_live,
        )
        return RolloutSession(runner, (self.engine, *engines))

    def make_engine(
        self, model: torch.nn.Module, *, rounds: Rounds | None = None, **options: Any
    ) -> SlotEngine:
        """A slot engine with this run's tokenizer and limits; judges of the same family use it."""
        args = self.args
        settings: dict[str, Any] = {
            "eos_ids": self.tokenizer.eos_ids,
            "vocab_size": self.tokenizer.vocab_size,
            "slots": args.engine_slots,
            "max_length": args.max_prompt_length + (args.max_completion_length or 0),
            "pad_id": self._tokenizer.pad_token_id,
            "decode": self.tokenizer.decode,
            "rounds": rounds,
            "autocast": self._autocast_dtype(),
        }
        return SlotEngine(model, **{**settings, **options})

    def _autocast_dtype(self) -> torch.dtype | None:
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(
            self.accelerator.mixed_precision
        )

    def _on_live(self, live: int) -> None:
        if self.engine.rounds is not None:
            self.engine.live = live

    def _on_group(self, rows: Sequence[Trajectory]) -> None:
        # Rows whose score the trainer's reward functions give are stored when it is known.
        if self.store is not None and rows[0].update >= 0 and self._verifier is not None:
            self.store.write_group(rows)

    def _rollout(self, prompts: Sequence[Any]) -> dict[str, Any]:
        """What TRL's `rollout_func` is asked: prompts arrive repeated, one for every row."""
        training = self.model.training
        size = (self.num_generations if training else self.num_generations_eval) or 1
        first = self.accelerator.process_index * len(prompts)
        by_group: dict[int, list[int]] = {}
        for index in range(len(prompts)):
            by_group.setdefault((first + index) // size, []).append((first + index) % size)
        tasks, at = [], 0
        for rollouts in by_group.values():
            tasks.append(self._task_of(self._dataset_rows[at]))
            at += len(rollouts)
        if training:
            update = self._take_update()
            reviewed = self.phases.phase(update) is Phase.INTERVENTION
        else:
            update, reviewed = -1 - self.state.global_step, False
        groups = self.groups(
            distinct(tasks), update=update, reviewed=reviewed, rollouts=list(by_group.values())
        )
        self._rows = [row for group in groups for row in group]
        return {
            "prompt_ids": [row.prompt_ids.tolist() for row in self._rows],
            "completion_ids": [row.ids.tolist() for row in self._rows],
            # The anchor is recomputed by the trainer; sampling log-probs are diagnostics.
            "logprobs": None,
            "env_mask": [(row.provenance != Provenance.ENVIRONMENT).tolist() for row in self._rows],
        }

    def groups(
        self,
        tasks: Sequence[Task],
        *,
        update: int,
        reviewed: bool,
        rollouts: Sequence[Sequence[int]] | None = None,
    ) -> list[list[Trajectory]]:
        """Groups by the model as it is now (a negative `update` for what is not training)."""
        session = self.session
        was_training = self.model.training
        self.engine.reset()
        self.engine.policy_version = max(update, 0)
        try:
            return session.groups(tasks, update=update, reviewed=reviewed, rollouts=rollouts)
        finally:
            self.model.train(was_training)

    def _take_update(self) -> int:
        """The index of the update whose groups are made now, also after a resume."""
        args = self.args
        per_update = args.steps_per_generation * self.num_iterations
        if self._next_update is None:
            self._next_update = self.state.global_step * args.gradient_accumulation_steps // per_update
        self._next_update += 1
        return self._next_update - 1

    def _default_prompts(self, tokenizer: HFTokenizer) -> PromptBuilder:
        return PromptBuilder(
            tokenizer,
            chat_template_kwargs=dict(self.args.chat_template_kwargs or {}),
            max_prompt=self.args.max_prompt_length,
        )

    def _default_task_of(self, row: Mapping[str, Any]) -> Task:
        columns = TaskColumns(needs_answer=False)
        if row.get("task_id") is None and row.get("id") is None:
            row = {**row, "task_id": task_id_of(row)}
        return columns.task(row, "train_dataset", 0)

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
        self._dataset_rows = [copy.copy(row) for row in inputs]
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return batch
        device = batch["completion_ids"].device
        rows, update = self._rows, self._rows[0].update
        active = self.phases.phase(update) is Phase.INTERVENTION
        provenance_B_T = pad(
            [torch.tensor(row.provenance.astype(np.int64)) for row in rows],
            padding_value=PAD,
            padding_side="right",
            pad_to_multiple_of=self.pad_to_multiple_of,
        ).to(device)

        assert self._reward_B is not None
        reward_B = self._reward_B
        first = self.accelerator.process_index * len(rows)
        here = slice(first, first + len(rows))
        # Groups stand one after the other over all ranks; the kinds follow from the place.
        index_B = torch.arange(len(reward_B), device=device)
        group_B = index_B // self.num_generations
        control_B = (index_B % self.num_generations < self.args.n_control) | (not active)
        value_B = control_baseline(
            reward_B,
            control_B,
            group_B,
            beta_1=self.args.beta_1,
            baseline=self.args.baseline,  # type: ignore[arg-type]
        )
        advantage_B = (reward_B - value_B)[here]
        self._score_rows(reward_B[here])
        local = {
            "provenance": provenance_B_T,
            "reward": reward_B[here],
            "control": control_B[here],
            "group": group_B[here],
        }
        if active:
            local["advantage"] = advantage_B
            batch["advantages"] = advantage_B
            logged = self._logs["advantages"]  # TRL has put its own there
            for _ in range(len(reward_B)):
                logged.pop()
            logged.extend((reward_B - value_B).tolist())
            counts = torch.stack(batch_counts(provenance_B_T, advantage_B)).to(device)
            rows_n, tokens_n = self.accelerator.reduce(counts, reduction="sum").double()
            # What one micro-batch's sum is divided by: our share of the rows of an optimiser step,
            # as TRL rescales its own `num_items_in_batch`; DDP then averages over ranks.
            share = self.current_gradient_accumulation_steps / self.args.steps_per_generation
            batch[_OURS + "denominator"] = rows_n * share / self.accelerator.num_processes
            batch[_OURS + "mean_tokens"] = tokens_n / rows_n.clamp(min=1)
            self._update_batch = UpdateBatch(self.args.steps_per_generation)
        batch[_OURS + "active"] = torch.tensor(active, device=device)
        batch |= {_OURS + name: value for name, value in local.items()}
        self._log_rollouts(active)
        return batch

    def _score_rows(self, reward_B: Tensor) -> None:
        """Rows take the trainer's reward; those that waited for it go to the store now."""
        if self._verifier is None:
            scored = [
                row if not row.valid else row.with_score(_score_of(reward))
                for row, reward in zip(self._rows, reward_B.tolist(), strict=True)
            ]
            self._rows = scored
            if self.store is not None:
                for group in _grouped(scored):
                    self.store.write_group(group)
        if self.store is not None and self.accelerator.num_processes == 1:
            self.store.compact(self._rows[0].update)

    def _log_rollouts(self, active: bool) -> None:
        stats = RolloutStats()
        for group in _grouped(self._rows):
            stats.add_group(group)
            self.stats.add_group(group)
        log = self._metrics["train"]
        log["mintrl/intervention_phase"].append(float(active))
        for name in ("reviews", "revises", "revises_per_review", "dropped_tokens"):
            value = getattr(stats, name)
            if value == value:  # a share of nothing is NaN: left out
                log[f"mintrl/{name}"].append(float(value))
        failed = stats.outcomes["failed"] + stats.outcomes["unparsed"]
        log["mintrl/reviews_failed"].append(float(failed))
        log["mintrl/rows_not_valid"].append(float(stats.trajectories - stats.valid))

    # --- loss

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        # The loss follows the batch, not the step: a batch may outlive the switch.
        if not bool(inputs.get(_OURS + "active", False)):
            return super()._compute_loss(model, inputs)
        args = self.args
        keep = inputs["completion_ids"].size(1)
        logp_B_T, entropies_B_T, _ = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            keep,
            compute_entropy=True,
        )
        provenance_B_T = inputs[_OURS + "provenance"]
        mask_B_T = loss_mask(provenance_B_T)
        old_B_T = inputs.get("old_per_token_logps")
        if old_B_T is None:
            old_B_T = logp_B_T.detach()
        anchor_B_T = anchor(
            old_B_T, provenance_B_T, kind=args.variant, kappa=args.kappa  # type: ignore[arg-type]
        )
        if logp_B_T.requires_grad and not self._gradient_checked:
            logp_B_T.register_hook(lambda grad: self._check_gradient(grad, mask_B_T))
        loss, _ = mintrl_loss(
            logp_B_T,
            anchor_B_T,
            provenance_B_T,
            inputs[_OURS + "advantage"],
            beta_2=args.beta_2,
            loss_scale=args.loss_scale,  # type: ignore[arg-type]
            denominator=inputs[_OURS + "denominator"],
            mean_tokens=inputs[_OURS + "mean_tokens"],
        )
        self._log_loss(inputs, logp_B_T, old_B_T, anchor_B_T, entropies_B_T)
        return loss

    def _check_gradient(self, grad_B_T: Tensor, mask_B_T: Tensor) -> None:
        """The run's first batch: our loss ran, and no masked token has a gradient."""
        stray = grad_B_T.detach().masked_fill(mask_B_T, 0.0)
        if bool((stray != 0).any()):
            raise UsageError(
                "masked tokens (ENVIRONMENT or padding) have a gradient: the provenance and the "
                "completion mask do not fit together"
            )
        self._gradient_checked = True

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        expects_ours = self._rows and self.phases.phase(self._rows[0].update) is Phase.INTERVENTION
        if expects_ours and not self._gradient_checked:
            raise UsageError(
                "the judge is on, but MInTRL's loss did not run on the first batch: something else "
                "overrides `_compute_loss`"
            )
        return loss

    def _log_loss(
        self,
        inputs: dict[str, Any],
        logp_B_T: Tensor,
        old_B_T: Tensor,
        anchor_B_T: Tensor,
        entropies_B_T: Tensor | None,
    ) -> None:
        mask_B_T = loss_mask(inputs[_OURS + "provenance"])
        log = self._metrics["train" if self.model.training else "eval"]
        if entropies_B_T is not None:
            totals = torch.stack([(entropies_B_T * mask_B_T).sum(), mask_B_T.sum()]).detach()
            total, count = self.accelerator.reduce(totals, reduction="sum")
            log["entropy"].append(float(total / count.clamp(min=1)))
        if self._update_batch is None:
            return  # a reused batch: its diagnostics are in the log already
        whole = self._update_batch.add(
            logp_B_T=logp_B_T,
            old_logp_B_T=old_B_T,
            anchor_B_T=anchor_B_T,
            provenance_B_T=inputs[_OURS + "provenance"],
            rewards_B=inputs[_OURS + "reward"],
            advantage_B=inputs[_OURS + "advantage"],
            is_control_B=inputs[_OURS + "control"],
            group_B=inputs[_OURS + "group"],
        )
        if whole:
            for name, value in self._update_batch.figures(
                self.accelerator, beta_2=self.args.beta_2
            ).items():
                log[name].append(value)
            self._update_batch = None

    # --- schedule

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if self.phases.rewarm_updates and hasattr(scheduler, "lr_lambdas"):
            per_update = self.args.steps_per_generation * self.num_iterations
            steps = max(1, per_update // self.args.gradient_accumulation_steps)
            scheduler.lr_lambdas = [
                self.phases.lr_lambda(steps, base) for base in scheduler.lr_lambdas
            ]
        return scheduler

    def close(self) -> None:
        """End the loop thread of the rollouts."""
        if self._session is not None:
            self._session.close()


def _rollout_function(trainer: MInTRLTrainer) -> Callable[..., dict[str, Any]]:
    # A plain function: TRL looks at the callable's name and signature, and deep copies nothing.
    def rollout(prompts: Sequence[Any], _: Any) -> dict[str, Any]:
        return trainer._rollout(prompts)

    return rollout


def _as_list(reward_funcs: Any) -> list[Any]:
    if reward_funcs is None:
        return []
    return list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]


def _score_of(reward: float) -> Score:
    if reward != reward:
        return Score.undecided("unavailable", "every reward function returned None")
    return Score(reward, "rewarded")


def _grouped(rows: Sequence[Trajectory]) -> list[list[Trajectory]]:
    groups: dict[str, list[Trajectory]] = {}
    for row in rows:
        groups.setdefault(row.task_id, []).append(row)
    return list(groups.values())


__all__ = ["JudgeFactory", "MInTRLConfig", "MInTRLTrainer"]
