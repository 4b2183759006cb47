"""The loss half of MInTRLTrainer: what happens to a batch that carries MInTRL's tensors.

`MInTRLTrainer` makes such batches, with these entries beside TRL's own:

    mintrl_active       0-dim bool; False leaves the batch to TRL's loss
    mintrl_provenance   (B, T), `PAD` on the right
    mintrl_advantage, mintrl_reward, mintrl_control, mintrl_group    (B,)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mintrl_env.errors import MissingExtraError, UsageError

try:
    from trl import GRPOTrainer
except ImportError as error:
    raise MissingExtraError("trl", "trl", "MInTRLTrainer") from error

from mintrl_env.adapters.trl_config import MInTRLConfig
from mintrl_env.adapters.trl_update import UpdateBatch, trained_counts
from mintrl_env.trainers.diagnostics import clip_share
from mintrl_env.trainers.objective import anchor, loss_mask, mintrl_loss


class RegressionTrainer(GRPOTrainer):
    """GRPOTrainer whose loss, for batches that say so, is the squared regression.

    The loss follows the batch, not the step, since a batch may be used again after the switch.
    """

    args: MInTRLConfig

    _update_batch: UpdateBatch | None = None
    _expects_ours = False  # the batch in hand is one for our loss
    _gradient_checked = False

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        before = self._buffered_inputs
        inputs: dict[str, Any] = super()._prepare_inputs(generation_batch)
        if not self.model.training:
            return inputs
        self._expects_ours = bool(inputs["mintrl_active"])
        if self._buffered_inputs is not before and self._expects_ours:
            # Only now is known which rows share an optimiser step: TRL has shuffled them.
            batches = self._buffered_inputs
            counts = trained_counts(
                batches, self.current_gradient_accumulation_steps, self.accelerator
            )
            for batch, (rows, tokens) in zip(batches, counts, strict=True):
                batch["mintrl_rows"], batch["mintrl_tokens"] = rows, tokens
            self._update_batch = None
        return inputs

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        # The loss follows the batch, not the step: a batch may outlive the switch.
        if not bool(inputs.get("mintrl_active", False)):
            loss: Tensor = super()._compute_loss(model, inputs)
            return loss
        args, steps = self.args, self.current_gradient_accumulation_steps
        logp_B_T, entropies_B_T, aux_loss = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
            compute_entropy=True,
            compute_aux_loss=self.aux_loss_enabled,
        )
        provenance_B_T = inputs["mintrl_provenance"]
        mask_B_T = loss_mask(provenance_B_T)
        old_B_T = inputs.get("old_per_token_logps")
        if old_B_T is None:  # TRL's sign that no optimiser step lies between rollout and loss
            old_B_T = logp_B_T.detach()
        anchor_B_T = anchor(
            old_B_T,
            provenance_B_T,
            kind=args.variant,
            kappa=args.kappa,
        )
        if not self._gradient_checked:
            logp_B_T.register_hook(lambda grad: self._check_gradient(grad, mask_B_T))
        loss, _ = mintrl_loss(
            logp_B_T,
            anchor_B_T,
            provenance_B_T,
            inputs["mintrl_advantage"],
            beta_2=args.beta_2,
            loss_scale=args.loss_scale,
            # This rank's share of the step's rows, since DDP averages gradients over ranks.
            denominator=inputs["mintrl_rows"] * steps / self.accelerator.num_processes,
            mean_tokens=inputs["mintrl_tokens"],
        )
        self._log_loss(inputs, logp_B_T, old_B_T, anchor_B_T, entropies_B_T, mask_B_T)
        if self.aux_loss_enabled:  # a mixture of experts balances its load
            loss = loss + self.router_aux_loss_coef * aux_loss / steps
        return loss

    def _check_gradient(self, grad_B_T: Tensor, mask_B_T: Tensor) -> None:
        """The run's first batch: our loss ran, and no masked token has a gradient."""
        if bool((grad_B_T.detach().masked_fill(mask_B_T, 0.0) != 0).any()):
            raise UsageError(
                "masked tokens (ENVIRONMENT or padding) have a gradient: the provenance and the "
                "completion mask do not fit together"
            )
        self._gradient_checked = True

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any) -> Tensor:
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        if self._expects_ours and not self._gradient_checked:
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
        entropies_B_T: Tensor,
        mask_B_T: Tensor,
    ) -> None:
        log = self._metrics["train"]
        totals = torch.stack([(entropies_B_T * mask_B_T).sum(), mask_B_T.sum()]).detach()
        total, count = self.accelerator.reduce(totals, reduction="sum")
        log["entropy"].append(float(total / count.clamp(min=1)))
        if self._update_batch is None:
            self._update_batch = UpdateBatch(self.args.steps_per_generation)
        whole = self._update_batch.add(
            logp_B_T=logp_B_T,
            old_logp_B_T=old_B_T,
            anchor_B_T=anchor_B_T,
            provenance_B_T=inputs["mintrl_provenance"],
            rewards_B=inputs["mintrl_reward"],
            advantage_B=inputs["mintrl_advantage"],
            is_control_B=inputs["mintrl_control"],
            group_B=inputs["mintrl_group"],
        )
        if whole:
            figures = self._update_batch.figures(self.accelerator, beta_2=self.args.beta_2)
            for name, value in figures.items():
                log[name].append(value)
            self._update_batch = None

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As in GRPOTrainer, with the share of the logged steps whose gradient was clipped."""
        norm = logs.get("grad_norm")
        if norm is not None and norm == norm and self.args.max_grad_norm:
            logs["mintrl/clip_share"] = clip_share([norm], self.args.max_grad_norm)
        super().log(logs, start_time)
