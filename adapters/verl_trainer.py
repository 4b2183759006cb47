"""Trainer `mintrl_sync`: veRL's synchronous trainer with MInTRL's baseline, anchor and phases.

    trainer.v1.trainer_mode=mintrl_sync

It differs from veRL's own in few places, each an override of what PPOTrainerSync does anyway:

    on_init_end          the judge's server is asked for a generation, before step 1
    fit                  each batch says whether it is a validation's, which a loop is not told
    _compute_advantage   V from the controls of each group, the anchor, the mask, rows' weights
    _update_actor        the loss of the phase: `mintrl`, or veRL's `vanilla` once GRPO has begun; the
                         learning rate rises again there (`rewarm_updates`)
    __init__             settings that the method has no term for are refused

What veRL calls private is what is overridden, hence the pin `verl>=0.9.1,<0.10`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mintrl_env.errors import MissingExtraError, StoreError, UsageError

try:
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf, open_dict
    from tensordict import TensorDict
    from verl.trainer.ppo.utils import Role
    from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer
    from verl.utils import tensordict_utils as tu
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import response_to_nested
except ImportError as error:
    raise MissingExtraError("verl", "verl", "the trainer mintrl_sync") from error

from mintrl_env.adapters.verl_batch import (
    ActorTensors,
    grpo_tensors,
    minibatch_index,
    regression_tensors,
)
from mintrl_env.adapters.verl_names import LOSS_MODE, ROW, VALIDATE, phase_schedule
from mintrl_env.adapters.verl_start import check_judge, node_count
from mintrl_env.failures import FailureWatch
from mintrl_env.store import RolloutStore
from mintrl_env.store_rows import from_row
from mintrl_env.trainers.diagnostics import clip_share
from mintrl_env.trainers.schedule import Phase
from mintrl_env.trajectory import RolloutStats, Trajectory
from mintrl_env.types import Score

if TYPE_CHECKING:
    from mintrl_env.adapters.verl_loss import MintrlPolicyLossConfig

TRAINER_MODE = "mintrl_sync"
_NO_DUAL_CLIP = 1e6
"""veRL's `vanilla` clips bad rows a second time, at this ratio; the GRPO phase has one clip."""


@register_trainer(TRAINER_MODE)
class MintrlTrainerSync(PPOTrainerSync):
    """See the module's head.

    Args:
        config: veRL's, with `actor.policy_loss` a MintrlPolicyLossConfig.

    Raises:
        UsageError: settings that contradict the method, all of them in one message; from a step,
            rows that another agent loop made.
        JudgeError, PolicyError, VerifierError: from a step, too much has failed to go on.
    """

    def __init__(self, config: Any) -> None:
        check_config(config)
        with open_dict(config):
            config.trainer.v1.trainer_mode = "sync"  # the base compares with this string
        super().__init__(config)
        self.settings = loss_settings(config)
        self.phases = phase_schedule(self.settings)
        self._watch = FailureWatch(self.settings.max_failure_rate, self.settings.min_reviews)
        self._store = RolloutStore(self.settings.store) if self.settings.store else None
        self._loss_phase = Phase.INTERVENTION  # of the workers' loss

    def _init_resource_pool_mgr(self) -> None:
        from mintrl_env.adapters.verl_worker import MintrlActorWorker

        super()._init_resource_pool_mgr()
        for role in (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(MintrlActorWorker)

    def on_init_end(self) -> None:
        """Sync the weights, once the judge has shown that it is there."""
        first = int(self.global_steps)  # the update that comes next, after a resume too
        if self.phases.phase(first) is Phase.INTERVENTION:
            for report in check_judge(self.config, self.tokenizer, nodes=node_count(self.config)):
                print(f"the judge's server:\n{report}", flush=True)
        super().on_init_end()

    def fit(self, agent_loop_manager: Any) -> None:
        """As in PPOTrainer."""
        super().fit(MarkedManager(agent_loop_manager))

    @property
    def update(self) -> int:
        """The update at work, from 0; veRL's steps count from 1."""
        return int(self.global_steps) - 1

    # --- advantages

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        fields = ["uid", "response_mask", "rm_scores", "old_log_probs", "extra_fields"]
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=fields
        )
        padding = [bool(tag.get("is_padding", False)) for tag in batch.tags]
        rows = trajectories(
            [
                None if pad else value
                for pad, value in zip(padding, _list(data["extra_fields"]), strict=True)
            ],
            [float(score.sum()) for score in data["rm_scores"].unbind()],
        )
        groups = [str(uid) for uid in _list(data["uid"])]
        nested_mask = data["response_mask"]
        old_logp_B_T = data["old_log_probs"].to_padded_tensor(0.0).float()
        phase = self.phases.phase(self.update)
        if phase is Phase.INTERVENTION:
            minibatch = self._minibatch_rows()
            step_B = minibatch_index(len(rows), dp_size=self._dp_size(), minibatch=minibatch)
            tensors = regression_tensors(
                rows, groups, old_logp_B_T, step_B, self.settings, minibatch=minibatch
            )
        else:
            tensors = grpo_tensors(rows, groups, old_logp_B_T)
        metrics.update(tensors.metrics)
        metrics["mintrl/intervention_phase"] = float(phase is Phase.INTERVENTION)
        self._account(rows, groups, metrics)
        return tq.kv_batch_put(
            keys=batch.keys,
            partition_id=batch.partition_id,
            fields=actor_fields(tensors, nested_mask),
        )

    def _minibatch_rows(self) -> int:
        config = self.config.actor_rollout_ref
        return int(config.actor.ppo_mini_batch_size) * int(config.rollout.n)

    def _dp_size(self) -> int:
        return max(self.actor_rollout_wg._dispatch_info["actor"]) + 1

    def _account(
        self, rows: Sequence[Trajectory | None], groups: Sequence[str], metrics: dict[str, Any]
    ) -> None:
        """Counts of reviews and rows, the store, and the end of a run whose parts fail too often."""
        by_group: dict[str, list[Trajectory]] = {}
        for row, name in zip(rows, groups, strict=True):
            if row is not None:
                by_group.setdefault(name, []).append(row)
        size = int(self.config.actor_rollout_ref.rollout.n)
        metrics.update(rollout_metrics(by_group, group_size=size))
        if self._store is not None:
            # A resumed run does updates again, by other draws: its rows must not mix with the old.
            attempt = self._store.next_attempt(self.update)
            for group in distinct_groups(by_group):
                self._store.write_group([replace(row, run_attempt=attempt) for row in group])
            self._store.compact(self.update)
        for group in by_group.values():
            self._watch.add(group)
        self._watch.check()

    # --- the update

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        phase = self.phases.phase(self.update)
        if phase is not self._loss_phase:
            self.actor_rollout_wg.set_loss_fn(grpo_loss_function(self.config))
            self._loss_phase = phase
        factor = self.phases.lr_factor(self.update)
        if factor != 1.0:
            self.actor_rollout_wg.scale_learning_rate(factor)
        metrics["mintrl/lr_factor"] = factor
        batch = super()._update_actor(batch, metrics)
        norm = metrics.get("actor/grad_norm")
        if norm is not None and norm == norm:
            limit = float(self.config.actor_rollout_ref.actor.optim.get("clip_grad", 1.0))
            metrics["mintrl/clip_share"] = clip_share([float(norm)], limit)
        return batch

    def _save_checkpoint(self) -> None:
        try:
            super()._save_checkpoint()
        except OSError as error:
            raise StoreError(
                f"{self.config.trainer.default_local_dir}: the checkpoint after step "
                f"{self.global_steps} cannot be written: {error}. Make room and resume"
            ) from error


class MarkedManager:
    """An agent loop manager whose every batch says whether it is a validation's."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def generate_sequences(self, batch: Any) -> Any:
        validate = bool(batch["validate"]) if "validate" in batch else False
        tu.assign_non_tensor_data(batch, VALIDATE, validate)
        return self._manager.generate_sequences(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


def loss_settings(config: Any) -> MintrlPolicyLossConfig:
    """`actor.policy_loss` as the workers have it.

    Raises:
        UsageError: it is no MintrlPolicyLossConfig, or holds a value that the objective refuses.
    """
    from mintrl_env.adapters.verl_loss import MintrlPolicyLossConfig

    section = config.actor_rollout_ref.actor.policy_loss
    target = f"{MintrlPolicyLossConfig.__module__}.{MintrlPolicyLossConfig.__qualname__}"
    if section.get("_target_") != target:
        raise UsageError(
            f"set actor_rollout_ref.actor.policy_loss._target_={target}; it is "
            f"{section.get('_target_')!r}"
        )
    try:
        made = omega_conf_to_dataclass(section)
    except Exception as error:  # hydra wraps what a constructor raises
        raise UsageError(f"actor_rollout_ref.actor.policy_loss: {error}") from error
    assert isinstance(made, MintrlPolicyLossConfig)
    return made


def check_config(config: Any) -> None:
    """Refuse what the method has no term for.

    Raises:
        UsageError: with every setting that is wrong, and the value it must have.
    """
    settings = loss_settings(config)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    wanted = {
        "algorithm.use_kl_in_reward": (False, None),
        "algorithm.rollout_correction": (None,),
        "algorithm.filter_groups.enable": (False, None),
        "actor_rollout_ref.actor.use_kl_loss": (False, None),
        "actor_rollout_ref.actor.entropy_coeff": (0, 0.0),
        "actor_rollout_ref.actor.policy_loss.loss_mode": (LOSS_MODE,),
        "actor_rollout_ref.rollout.calculate_log_probs": (False,),
        "actor_rollout_ref.rollout.top_p": (1, 1.0),
        "actor_rollout_ref.rollout.top_k": (-1, 0),
        "critic.enable": (False, None),
        "distillation.enabled": (False, None),
    }
    wrong = []
    for key, allowed in wanted.items():
        value = OmegaConf.select(config, key)
        if key.endswith("rollout_correction"):
            value = _correction(value)
        if value not in allowed:
            wrong.append(f"{key}={value!r} (must be {allowed[0]!r})")
    if config.algorithm.adv_estimator == "gae":
        wrong.append("algorithm.adv_estimator='gae' (must be 'mintrl')")
    n = int(rollout.n)
    if settings.intervention_updates and not 1 <= settings.n_control <= n:
        wrong.append(f"policy_loss.n_control={settings.n_control} (must be 1 to rollout.n = {n})")
    several = int(config.data.train_batch_size) > int(actor.ppo_mini_batch_size)
    if several and actor.get("shuffle", False):
        wrong.append(
            "actor_rollout_ref.actor.shuffle=True (must be False with several mini-batches)"
        )
    if wrong:
        raise UsageError(f"settings that MInTRL has no term for: {'; '.join(wrong)}")


def _correction(section: Any) -> Any:
    """What of `rollout_correction` is on; None: nothing."""
    if section is None:
        return None
    on = {key: section.get(key) for key in ("rollout_is", "rollout_rs", "bypass_mode")}
    return {key: value for key, value in on.items() if value} or None


def trajectories(
    extra_fields: Sequence[Mapping[str, Any] | None], scores: Sequence[float]
) -> list[Trajectory | None]:
    """Each row's trajectory with its score, None for a padding row (whose fields are a copy).

    Args:
        extra_fields: of the batch, None where a row is padding.
        scores: the sum of `rm_scores`, which a deferred score becomes.

    Raises:
        UsageError: a row that another agent loop made.
    """
    rows: list[Trajectory | None] = []
    for fields, reward in zip(extra_fields, scores, strict=True):
        if fields is None:
            rows.append(None)
            continue
        if ROW not in fields:
            raise UsageError(
                f"a row without extra_fields[{ROW!r}]: its agent loop is another than "
                "mintrl_env.adapters.verl_agent_loop.MintrlAgentLoop (default_agent_loop)"
            )
        row = from_row(fields[ROW])
        if row.valid and not row.score.decided:  # veRL's reward loop has scored it since
            info = fields.get("reward_extra_info") or {}
            if float(info.get("undecided", 0.0) or 0.0):
                row = row.with_score(Score.undecided("unavailable", str(info.get("status", ""))))
            else:
                row = row.with_score(Score(reward, str(info.get("status", "rewarded"))))
        rows.append(row)
    return rows


def actor_fields(tensors: ActorTensors, nested_mask: Any) -> TensorDict:
    """The tensors as veRL keeps them, one ragged row a response."""
    padded = {
        "response_mask": tensors.mask_B_T,
        "loss_mask": tensors.mask_B_T,
        "advantages": tensors.advantages_B_T,
        "returns": tensors.advantages_B_T,
        "old_log_probs": tensors.old_logp_B_T,
    }
    if tensors.weights_B_T is not None:
        padded["rollout_is_weights"] = tensors.weights_B_T
    fields = {name: response_to_nested(value, nested_mask) for name, value in padded.items()}
    return TensorDict(fields, batch_size=len(nested_mask.offsets()) - 1)


def rollout_metrics(
    groups: Mapping[str, Sequence[Trajectory]], *, group_size: int
) -> dict[str, float]:
    """Counts over an update's rows, under `mintrl/`; `rows_missing` are those whose loop raised."""
    stats = RolloutStats.over(groups.values())
    outcomes = Counter(stats.outcomes)
    out: dict[str, float] = {
        "rows_not_valid": stats.trajectories - stats.valid,
        "rows_missing": sum(max(group_size - len(group), 0) for group in groups.values()),
        "groups/without_control": stats.no_control,
        "reviews": stats.reviews,
        "revises": outcomes["revise"],
        "reviews_guarded": outcomes["guarded"],
        "reviews_failed": outcomes["failed"] + outcomes["unparsed"],
        "dropped_tokens": stats.dropped_tokens,
        "judge_prompt_tokens": stats.judge_prompt_tokens,
        "judge_completion_tokens": stats.judge_completion_tokens,
    }
    if stats.reviews:
        out["revises_per_review"] = stats.revises_per_review
    return {f"mintrl/{name}": float(value) for name, value in out.items()}


def distinct_groups(groups: Mapping[str, Sequence[Trajectory]]) -> list[list[Trajectory]]:
    """The groups for the store, a task that stands twice in the update told apart (`id#2`)."""
    from mintrl_env.adapters.session import distinct_ids

    names = distinct_ids([group[0].task_id for group in groups.values()])
    return [
        [replace(row, task_id=name) for row in group]
        for name, group in zip(names, groups.values(), strict=True)
    ]


def grpo_loss_function(config: Any) -> Any:
    """veRL's PPO loss as the GRPO phase has it: token-mean, one clip of 0.2, no KL, no correction."""
    actor = OmegaConf.create(OmegaConf.to_container(config.actor_rollout_ref.actor, resolve=True))
    changes = {
        "policy_loss": {"_target_": "verl.workers.config.PolicyLossConfig", "loss_mode": "vanilla"},
        "loss_agg_mode": "token-mean",
        "clip_ratio": 0.2,
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
        "clip_ratio_c": _NO_DUAL_CLIP,
    }
    with open_dict(actor):
        for key, value in changes.items():
            actor[key] = value
    return partial(ppo_loss, config=omega_conf_to_dataclass(actor))


def _list(stack: Any) -> list[Any]:
    return stack.tolist() if hasattr(stack, "tolist") else list(stack)
