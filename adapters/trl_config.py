"""MInTRLConfig: TRL's GRPOConfig with what MInTRL adds, and the defaults that the method pins."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, get_args

from mintrl_env.errors import MissingExtraError, UsageError

try:
    from trl import GRPOConfig
except ImportError as error:
    raise MissingExtraError("trl", "trl", "MInTRLConfig") from error

from mintrl_env.adapters.server_options import ENGINES, check_engine, check_processes
from mintrl_env.episode import EpisodeConfig
from mintrl_env.protocols import Sampling
from mintrl_env.rollout import RolloutConfig
from mintrl_env.splice import FENCE
from mintrl_env.trainers.objective import AnchorKind, Baseline, LossScale, check_kappa

# What the method fixes, or what our rollouts and our loss do not take into account, with the values
# that say so: anything else is refused instead of ignored.
_PINNED: dict[str, tuple[object, ...]] = {
    "use_vllm": (False,),
    "use_transformers_continuous_batching": (False,),
    "generation_kwargs": (None, {}),
    "top_p": (1.0,),
    "top_k": (0, None, -1),
    "min_p": (None, 0.0),
    "repetition_penalty": (1.0,),
    "beta": (0.0,),
    "mask_truncated_completions": (False,),
    "top_entropy_quantile": (1.0,),
    "off_policy_mask_threshold": (None,),
    "entropy_coef": (0.0,),
    "use_adaptive_entropy": (False,),
    "multi_objective_aggregation": ("sum_then_normalize",),
}


@dataclass
class MInTRLConfig(GRPOConfig):
    """GRPOConfig and the keys of MInTRL (arXiv 2609.12419); every GRPO keyword keeps its meaning.

    `num_generations` is N_c + N_m and `max_completion_length` is T. Defaults that differ from
    TRL's are the paper's: learning rate 1e-6, no warm-up, temperature 1, and for the GRPO phase
    token-mean over the batch, group-normalised by std, clip 0.2, no KL, no importance correction.
    Dropout is off (LoRA's too): its noise would add up in the sequence log-ratio, and the policy
    that wrote the rollouts had none.

    Attributes:
        n_control: N_c, rows of a group that nobody reviews.
        variant: "const" or "proxy": the anchor of judge-written tokens.
        kappa: the Const anchor, nats a token (-0.2 math, -0.1 code); <= 0.
        beta_1: temperature of the soft value; inf for the control mean.
        beta_2: nats to reward in the regression.
        baseline: "mean" or "loo" over the controls.
        loss_scale: "paper", or "matched" to a token-mean policy gradient.
        intervention_updates: updates with the judge on; GRPO after them. -1: always on; 0: GRPO.
        rewarm_updates: updates over which the learning rate rises again after the switch.
        chunk_tokens, max_reviews, max_correction, step_delimiters, spacing: see EpisodeConfig.
        max_prompt_length: a longer prompt is refused.
        engine_slots: sequences at work at once in the embedded engine; its KV cache holds as many
            rows of max_prompt_length + max_completion_length tokens.
        rollout_engine: "transformers", the embedded engine, "vllm" in this process, or "server":
            `vllm serve`, by HTTP.
        engine_options: of `policy_vllm.vllm_policy` (memory, sleep, and fields of vLLM's EngineArgs), or
            of the servers (`server_options`).
        schedule: "free", or "rounds": batches independent of latency (bit-exact on CPU).
        rollout_deadline_s, rollout_retries, on_judge_failure, max_judge_failure_rate,
        judge_concurrency, verifier_concurrency: see RolloutConfig.
    """

    learning_rate: float = field(default=1e-6, metadata={"help": "AdamW's learning rate."})
    lr_scheduler_type: str = field(default="constant", metadata={"help": "Learning rate schedule."})
    disable_dropout: bool = field(default=True, metadata={"help": "Dropout off, LoRA's too."})
    temperature: float = field(default=1.0, metadata={"help": "Sampling temperature."})
    num_generations: int | None = field(default=16, metadata={"help": "N_c + N_m rows a group."})
    max_completion_length: int | None = field(default=16384, metadata={"help": "T."})
    vllm_importance_sampling_correction: bool = field(
        default=False, metadata={"help": "Off: the anchor is recomputed by the trainer."}
    )

    n_control: int = field(default=8, metadata={"help": "N_c, rows nobody reviews."})
    variant: AnchorKind = field(default="const", metadata={"help": "const or proxy."})
    kappa: float = field(default=-0.2, metadata={"help": "Const anchor, nats a token."})
    beta_1: float = field(default=math.inf, metadata={"help": "Soft value's temperature."})
    beta_2: float = field(default=1e-3, metadata={"help": "Nats to reward."})
    baseline: Baseline = field(default="mean", metadata={"help": "mean or loo."})
    loss_scale: LossScale = field(default="paper", metadata={"help": "paper or matched."})
    intervention_updates: int = field(default=200, metadata={"help": "Updates with the judge on."})
    rewarm_updates: int = field(default=0, metadata={"help": "Re-warm-up at the switch."})
    chunk_tokens: int = field(default=512, metadata={"help": "k."})
    max_reviews: int = field(default=4, metadata={"help": "R."})
    max_correction: int = field(default=64, metadata={"help": "L."})
    step_delimiters: tuple[str, ...] = field(
        default=("\n\n", FENCE), metadata={"help": "What ends a step."}
    )
    spacing: int = field(default=0, metadata={"help": "Tokens left unreviewed after a review."})
    max_prompt_length: int = field(default=2048, metadata={"help": "Longest prompt."})
    engine_slots: int = field(default=16, metadata={"help": "Rows of the engine's KV cache."})
    rollout_engine: str = field(
        default="transformers", metadata={"help": "transformers, vllm in this process, server."}
    )
    engine_options: dict[str, Any] | None = field(
        default=None, metadata={"help": "Of vLLM: memory, sleep, EngineArgs; of servers."}
    )
    schedule: str = field(default="free", metadata={"help": "free or rounds."})
    rollout_deadline_s: float = field(default=1800.0, metadata={"help": "Per trajectory."})
    rollout_retries: int = field(default=1, metadata={"help": "Fresh attempts at a failed row."})
    on_judge_failure: str = field(
        default="keep", metadata={"help": "keep, drop or stop; keep, auth=stop."}
    )
    max_judge_failure_rate: float = field(default=0.5, metadata={"help": "Stop above it."})
    judge_concurrency: int = field(default=64, metadata={"help": "Reviews in flight."})
    verifier_concurrency: int = field(default=16, metadata={"help": "Scores in flight."})

    def __post_init__(self) -> None:
        super().__post_init__()
        wrong = [
            f"{name}={getattr(self, name)!r} (must be {allowed[0]!r})"
            for name, allowed in _PINNED.items()
            if getattr(self, name) not in allowed
        ]
        if wrong:
            raise UsageError(
                "MInTRL generates with the embedded engine, from the whole distribution, and has "
                f"no term for these settings, so they are refused: {', '.join(wrong)}"
            )
        if not self.temperature > 0:
            raise UsageError(f"temperature must be > 0 to train at, not {self.temperature}")
        for name, values in (
            ("variant", get_args(AnchorKind)),
            ("baseline", get_args(Baseline)),
            ("loss_scale", get_args(LossScale)),
            ("schedule", ("free", "rounds")),
            ("rollout_engine", ENGINES),
        ):
            if getattr(self, name) not in values:
                raise UsageError(f"{name} is {' or '.join(values)}, not {getattr(self, name)!r}")
        check_engine(self.rollout_engine, self.schedule, self.engine_options)
        check_processes(self.rollout_engine, self.world_size)
        if self.variant == "const":
            check_kappa(self.kappa)
        if not (self.beta_1 > 0 and 0 < self.beta_2 < math.inf):
            raise UsageError(f"beta_1 and beta_2 must be > 0, not {self.beta_1} and {self.beta_2}")
        if self.num_generations is None or self.max_completion_length is None:
            raise UsageError("num_generations and max_completion_length (T) must be set")
        if self.intervention_updates < -1:
            raise UsageError("intervention_updates counts updates; -1 keeps the judge on for ever")
        if self.intervention_updates and not 1 <= self.n_control <= self.num_generations:
            raise UsageError(
                f"n_control must be 1 to num_generations = {self.num_generations} (no baseline "
                f"without a control), not {self.n_control}"
            )
        self.rollout_config()  # its own checks, now rather than at the first update

    @property
    def device(self) -> Any:
        """As in TrainingArguments. Of several processes on CPUs it is "cpu:0" there, to which torch
        loads no optimiser's state when a run is resumed."""
        device = super().device
        return type(device)("cpu") if device.type == "cpu" else device

    def rollout_config(self) -> RolloutConfig:
        """The same settings as the runner takes them."""
        assert self.num_generations is not None and self.max_completion_length is not None
        return RolloutConfig(
            episode=EpisodeConfig(
                chunk_tokens=self.chunk_tokens,
                max_reviews=self.max_reviews,
                max_correction=self.max_correction,
                max_response=self.max_completion_length,
                step_delimiters=tuple(self.step_delimiters),
                spacing=self.spacing,
            ),
            sampling=Sampling(self.temperature),
            n_control=min(self.n_control, self.num_generations),
            n_intervened=max(self.num_generations - self.n_control, 0),
            deadline_s=self.rollout_deadline_s,
            max_retries=self.rollout_retries,
            on_judge_failure=self.on_judge_failure,
            max_failure_rate=self.max_judge_failure_rate,
            judge_concurrency=self.judge_concurrency,
            verifier_concurrency=self.verifier_concurrency,
        )

    @property
    def updates_with_judge(self) -> int:
        """`intervention_updates` with -1 written out as more than any run has."""
        return 2**31 if self.intervention_updates < 0 else self.intervention_updates


def rollout_keywords(config: RolloutConfig) -> dict[str, Any]:
    """The keywords of an MInTRLConfig whose `rollout_config()` is `config`."""
    episode = config.episode
    return {
        "chunk_tokens": episode.chunk_tokens,
        "max_reviews": episode.max_reviews,
        "max_correction": episode.max_correction,
        "max_completion_length": episode.max_response,
        "step_delimiters": episode.step_delimiters,
        "spacing": episode.spacing,
        "temperature": config.sampling.temperature,
        "num_generations": config.group_size,
        "n_control": config.n_control,
        "rollout_deadline_s": config.deadline_s,
        "rollout_retries": config.max_retries,
        "on_judge_failure": config.on_judge_failure,
        "max_judge_failure_rate": config.max_failure_rate,
        "judge_concurrency": config.judge_concurrency,
        "verifier_concurrency": config.verifier_concurrency,
    }
