"""veRL's agent loop over `Episode`: the same driver, judge, guards and verifier as every other path.

    # agent.yaml, for actor_rollout_ref.rollout.agent.agent_loop_config_path
    - name: mintrl_agent
      _target_: mintrl_env.adapters.verl_agent_loop.MintrlAgentLoop
      episode: {chunk_tokens: 512, max_reviews: 4, max_correction: 64}
      judge: {name: llm, options: {url: "http://judge:8000/v1", model: Qwen3-4B-Instruct-2507}}

It runs under the trainer `mintrl_sync`, which says for each batch whether it is a validation's: veRL
itself does not tell a loop. Row `session_id` of a group is a control below N_c; reviews end after
`intervention_updates`; a validation is never reviewed. `extra_fields["mintrl"]` holds the trajectory
as the store writes it: provenance, reviews, score, versions, why it is not valid.

A failure of policy, judge or verifier is data: a row that is not valid, of one masked EOS where it
has no token. What is raised is a bug or a wrong setting; veRL logs it and goes on without the row, so
the trainer counts what is missing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mintrl_env.errors import ConfigError, MissingExtraError, UsageError

try:
    from omegaconf import OmegaConf
    from verl.experimental.agent_loop.agent_loop import (
        AgentLoopBase,
        AgentLoopMetrics,
        AgentLoopOutput,
    )
except ImportError as error:
    raise MissingExtraError("verl", "verl", "MintrlAgentLoop") from error

from mintrl_env.adapters.verl_names import ROW, VALIDATE, phase_schedule
from mintrl_env.adapters.verl_parts import (
    LoopSettings,
    VerlLimits,
    prompt_builder,
    runner_for,
    settings_of,
    tokenizer_of,
)
from mintrl_env.adapters.verl_policy import weights_version
from mintrl_env.adapters.verl_rows import task_of
from mintrl_env.store_rows import to_row
from mintrl_env.trainers.schedule import Phase
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Provenance


class MintrlAgentLoop(AgentLoopBase):
    """One trajectory. veRL makes an object of it for each.

    Args:
        trainer_config, server_manager, tokenizer, processor, dataset_cls, data_config,
        hf_model_type, tools: from veRL. name: the entry's own.
        prompts, extra_eos, episode, rollout, judge, verifier, seed: see `LoopSettings`.

    Raises:
        UsageError: sampling that the method has no term for (top_p, top_k), multi-modal models.
        ConfigError: from `run`, a wrong key of the YAML entry, or no judge while rows are reviewed.
    """

    def __init__(
        self,
        trainer_config: Any,
        server_manager: Any,
        tokenizer: Any,
        processor: Any,
        dataset_cls: Any,
        data_config: Any,
        hf_model_type: str | None = None,
        *,
        name: str = "",
        tools: Any = None,
        prompts: Any = None,
        extra_eos: Any = (),
        episode: Any = None,
        rollout: Any = None,
        judge: Any = None,
        verifier: Any = LoopSettings().verifier,  # noqa: B008 (a constant)
        seed: int = 0,
    ) -> None:
        super().__init__(
            trainer_config, server_manager, tokenizer, processor, dataset_cls, data_config,
            hf_model_type=hf_model_type,
        )  # fmt: skip
        if processor is not None:
            raise UsageError(
                "the model has a processor (images, audio): MInTRL's loop has text only"
            )
        self.settings = settings_of(
            {
                "prompts": _plain(prompts),
                "extra_eos": tuple(_plain(extra_eos) or ()),
                "episode": _plain(episode),
                "rollout": _plain(rollout),
                "judge": _plain(judge),
                "verifier": _plain(verifier),
                "seed": int(seed),
            }
        )
        actor_rollout = self.config.actor_rollout_ref
        loss = actor_rollout.actor.policy_loss
        self.limits = VerlLimits(
            max_response=int(actor_rollout.rollout.response_length),
            max_prompt=int(actor_rollout.rollout.prompt_length),
            temperature=float(actor_rollout.rollout.temperature),
            n_control=min(int(loss.n_control), int(actor_rollout.rollout.n)),
            group_size=int(actor_rollout.rollout.n),
        )
        self.phases = phase_schedule(loss)
        self.prompts = prompt_builder(
            self.settings,
            tokenizer_of(
                tokenizer, actor_rollout.get("model", {}).get("path"), self.settings.extra_eos
            ),
            self.limits,
        )

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Run the row `kwargs["session_id"]` of a group.

        Raises:
            UsageError: another trainer than `mintrl_sync`, or sampling that cannot be trained on.
            TaskError: a prompt that is empty or too long.
        """
        if VALIDATE not in kwargs:
            raise UsageError(
                "the batch does not say whether it is a validation's: run MInTRL's agent loop under "
                "trainer.v1.trainer_mode=mintrl_sync"
            )
        validate = bool(kwargs[VALIDATE])
        step = int(kwargs["global_steps"])  # of training from 1 on, of the first validation 0
        update = -1 - step if validate else step - 1
        limits = self.limits
        if validate:
            limits = replace(limits, temperature=float(sampling_params.get("temperature", 1.0)))
        else:
            _check_sampling(sampling_params)
        reviewed = not validate and self.phases.phase(update) is Phase.INTERVENTION
        if reviewed and self.settings.judge is None:
            raise ConfigError(
                "the agent loop has no judge, but policy_loss.intervention_updates says that rows are "
                "reviewed now: name one in the YAML entry, or set it to 0 for GRPO"
            )
        task = task_of(kwargs)
        prompt_ids = self.prompts.ids(task)
        runner = runner_for(
            self.settings, limits, self.prompts, self.server_manager, sampling_params
        )
        started = time.monotonic()
        row = await runner.trajectory(
            task,
            prompt_ids,
            update=update,
            rollout=int(kwargs["session_id"]),
            reviewed=reviewed,
        )
        return agent_output(
            row, scored=self.settings.verifier is not None, seconds=time.monotonic() - started
        )


def agent_output(row: Trajectory, *, scored: bool, seconds: float = 0.0) -> AgentLoopOutput:
    """A trajectory as veRL's output.

    The mask is 1 on what enters the loss: POLICY and INTERVENTION of a valid row. Sampling log-probs
    stay in the row: as `response_logprobs` they would need a number where nobody sampled.

    Args:
        scored: a verifier has scored in the loop; else veRL's reward loop scores, except for a row
            that is not valid, whose score is 0 and read by nobody.
    """
    versions = row.policy_versions
    if not row.valid and not row.draws:  # a placeholder, which carries the update's number
        versions = versions * 0 + weights_version(row.update)
    fields: dict[str, Any] = {
        ROW: to_row(row),
        "min_global_steps": int(versions.min()),
        "max_global_steps": int(versions.max()),
        "turn_scores": [],
        "tool_rewards": [],
    }
    score = None
    if scored or not row.valid:
        score = row.reward if row.score.decided and row.valid else 0.0
        fields["reward_extra_info"] = {
            "acc": score,
            "undecided": float(not row.valid),
            "status": row.score.status,
        }
    mask = (row.provenance != Provenance.ENVIRONMENT) & row.valid
    return AgentLoopOutput(
        prompt_ids=row.prompt_ids.tolist(),
        response_ids=row.ids.tolist(),
        response_mask=mask.astype(int).tolist(),
        reward_score=score,
        num_turns=2,
        metrics=AgentLoopMetrics(generate_sequences=seconds),
        extra_fields=fields,
    )


def _check_sampling(params: Mapping[str, Any]) -> None:
    """The rows of an update are drawn from the whole distribution, as V and the anchor assume."""
    wrong = [
        f"{name}={params[name]}"
        for name, allowed in (
            ("top_p", (1, 1.0)), ("top_k", (-1, 0)), ("min_p", (0, 0.0)),
            ("repetition_penalty", (1, 1.0)),
        )
        if name in params and params[name] not in allowed
    ]  # fmt: skip
    if not params.get("temperature", 1.0) > 0:
        wrong.append(f"temperature={params['temperature']}")
    if wrong:
        raise UsageError(
            f"actor_rollout_ref.rollout: {', '.join(wrong)}: MInTRL samples from the whole "
            "distribution (top_p 1, top_k -1, temperature > 0)"
        )


def _plain(given: Any) -> Any:
    return OmegaConf.to_container(given, resolve=True) if OmegaConf.is_config(given) else given
