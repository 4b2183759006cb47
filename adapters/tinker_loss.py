"""MInTRL on tinker: rows as its data, and the loss for `forward_backward_custom`.

    batch = tinker_batch(rows, beta_2=1e-3, variant="const", kappa=-0.2)
    backward = training_client.forward_backward_custom(batch.data, batch)
    training_client.optim_step(types.AdamParams(learning_rate=1e-6, grad_clip_norm=1.0))

tinker runs the model on its servers and the loss here: it hands over the log-probs of every
target token, a float32 tensor a row, and sends back their gradient. So provenance, control or
intervened, kappa and the rows left out never have to travel: the batch holds them by place.

Written against tinker 0.38.0 (PyPI), `TrainingClient._compute_custom_loss`, which the tests run;
its servers were not asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mintrl_env.adapters.row_tensors import provenance_tensor, row_advantages
from mintrl_env.errors import UsageError
from mintrl_env.trainers.objective import (
    AnchorKind,
    Baseline,
    LossScale,
    anchor,
    check_kappa,
    mintrl_loss,
    trained_rows,
)
from mintrl_env.trajectory import Trajectory


class TinkerBatch:
    """The data of one optimiser step and their loss, which is the object itself.

    log pi_t, the anchor's own log-probs, are those that the first pass over the batch brings, and
    are kept for further passes. That is right where the first pass runs with the weights that wrote
    the rows. Where optimiser steps lie between (an update split into several batches), pass
    `old_logprobs`, taken by `training_client.forward` before the first step.

    Attributes:
        rows: the trajectories that are trained on, in the order of `data`.
        data: one `tinker.Datum` a row; empty where no row can be trained on: skip the step then.
        old_logp_B_T: log pi_t of the responses, padded on the right; None before the first pass.
        rows_left_out: how many were not valid, undecided, or had no valid control in their group.
    """

    def __init__(
        self,
        rows: Sequence[Trajectory],
        advantage_B: Tensor,
        *,
        beta_2: float,
        variant: AnchorKind,
        kappa: float | None,
        loss_scale: LossScale,
        old_logprobs: Sequence[Any] | None,
        denominator: float | None,
        mean_tokens: float | None,
    ) -> None:
        width = max((len(row.ids) for row in rows), default=1)
        kept_B = trained_rows(provenance_tensor(rows, width), advantage_B)
        places = kept_B.nonzero().flatten().tolist()
        self.rows = [rows[place] for place in places]
        self.rows_left_out = len(rows) - len(places)
        self.data = [_datum(row) for row in self.rows]
        self.provenance_B_T = provenance_tensor(
            self.rows, max((len(row.ids) for row in self.rows), default=1)
        )
        self.advantage_B = advantage_B[kept_B]
        self.old_logp_B_T: Tensor | None = None
        if old_logprobs is not None:
            if len(old_logprobs) != len(self.rows):
                raise UsageError(
                    f"old_logprobs has {len(old_logprobs)} entries and the batch {len(self.rows)} "
                    "data: pass what `forward(batch.data, ...)` gave"
                )
            self.old_logp_B_T = self._responses([torch.as_tensor(x) for x in old_logprobs]).detach()
        self._settings: dict[str, Any] = {
            "beta_2": beta_2,
            "loss_scale": loss_scale,
            "denominator": denominator,
            "mean_tokens": mean_tokens,
        }
        self._variant = variant
        self._kappa = check_kappa(kappa) if variant == "const" else None

    def __call__(
        self, data: Sequence[Any], logprobs: Sequence[Tensor]
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss of the batch and its figures, as tinker's `CustomLossFnV1`.

        Raises:
            UsageError: other data than this batch's, or as many log-probs as there are not targets.
        """
        if [id(datum) for datum in data] != [id(datum) for datum in self.data]:
            raise UsageError(
                "a TinkerBatch is the loss of its own data: call "
                "forward_backward_custom(batch.data, batch)"
            )
        logp_B_T = self._responses(logprobs)
        if self.old_logp_B_T is None:
            self.old_logp_B_T = logp_B_T.detach()
        anchor_B_T = anchor(
            self.old_logp_B_T, self.provenance_B_T, kind=self._variant, kappa=self._kappa
        )
        loss, metrics = mintrl_loss(
            logp_B_T, anchor_B_T, self.provenance_B_T, self.advantage_B, **self._settings
        )
        return loss, {name: float(value) for name, value in metrics.items()}

    def _responses(self, logprobs: Sequence[Tensor]) -> Tensor:
        """The response's part of each row's log-probs, (B, T). Target j is token j + 1."""
        for row, values in zip(self.rows, logprobs, strict=True):
            if len(values) != len(row.prompt_ids) + len(row.ids) - 1:
                raise UsageError(
                    f"{row.task_id}/{row.rollout}: {len(values)} log-probs for "
                    f"{len(row.prompt_ids) + len(row.ids) - 1} target tokens"
                )
        if not logprobs:
            return torch.zeros(0, 1)
        return pad_sequence(
            [
                values[len(row.prompt_ids) - 1 :]
                for row, values in zip(self.rows, logprobs, strict=True)
            ],
            batch_first=True,
        )


def tinker_batch(
    rows: Sequence[Trajectory],
    *,
    beta_2: float,
    variant: AnchorKind = "const",
    kappa: float | None = None,
    beta_1: float = math.inf,
    baseline: Baseline = "mean",
    loss_scale: LossScale = "paper",
    advantages: Tensor | None = None,
    old_logprobs: Sequence[Any] | None = None,
    denominator: float | None = None,
    mean_tokens: float | None = None,
) -> TinkerBatch:
    """Rows of an update as tinker's data with their loss.

    Args:
        rows: whole groups, scored. A part of an update's rows needs `advantages`.
        beta_2, variant, kappa, beta_1, baseline, loss_scale: see `trainers.objective`. Log-probs
            are those of the model at temperature 1, tinker's only scale here: sample at 1.
        advantages: A of each row, (B,); None: computed from these rows' controls.
        old_logprobs: log pi_t of each datum's targets, an entry a datum (see TinkerBatch).
        denominator, mean_tokens: as in `mintrl_loss`, where an optimiser step takes several calls.

    Raises:
        UsageError: a row without a prompt, or values that the objective refuses.
        ModuleNotFoundError: tinker is not installed.
    """
    for row in rows:
        if not len(row.prompt_ids):
            raise UsageError(f"{row.task_id}/{row.rollout}: no prompt, so its first token is free")
    if advantages is None:
        advantages = row_advantages(rows, beta_1=beta_1, baseline=baseline)
    return TinkerBatch(
        rows,
        advantages,
        beta_2=beta_2,
        variant=variant,
        kappa=kappa,
        loss_scale=loss_scale,
        old_logprobs=old_logprobs,
        denominator=denominator,
        mean_tokens=mean_tokens,
    )


def _datum(row: Trajectory) -> Any:
    from tinker import types  # type: ignore[import-not-found,unused-ignore]

    ids = [*row.prompt_ids.tolist(), *row.ids.tolist()]
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": torch.tensor(ids[1:], dtype=torch.int64)},
    )
