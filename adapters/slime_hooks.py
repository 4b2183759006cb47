"""MInTRL on slime: three functions, named on its command line, and rows as its samples.

    --custom-reward-post-process-path mintrl_env.adapters.slime_hooks.mintrl_rewards
    --custom-advantage-function-path  mintrl_env.adapters.slime_hooks.mintrl_advantages
    --loss-type custom_loss
    --custom-loss-function-path       mintrl_env.adapters.slime_hooks.mintrl_loss
    --custom-config-path              mintrl.yaml

    mintrl.yaml:  mintrl_beta_2: 0.001        mintrl_variant: const     mintrl_kappa: -0.2
                  mintrl_baseline: mean       mintrl_loss_scale: paper

Written against slime 0.3.1 and 38 commits (624b824): `backends/megatron_utils/loss.py`, `actor.py`,
`model.py`, `ray/rollout.py`, `utils/types.py`. The tests run its loss code on the CPU where it is
importable; Megatron, SGLang and Ray were not run.

Which of a sample's fields reach the trainer is a fixed list, and provenance is none of them. It
travels in one that a run without distillation leaves empty; what the loss needs stands in three
that slime computes only for other estimators:

    Sample.teacher_log_probs   who wrote each response token, as `Provenance`'s numbers
    rewards                    A of the row, from the controls of its group
    advantages                 A on each token
    returns                    the anchor
    values                     the row's weight: rows of its optimiser step / rows trained in it
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mintrl_env.errors import UsageError
from mintrl_env.trainers import objective
from mintrl_env.trainers.objective import PAD, anchor, control_baseline, loss_mask
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Kind, StopReason

CONTROL = "mintrl_control"
VALID = "mintrl_valid"


def fill_sample(sample: Any, row: Trajectory) -> Any:
    """Write a finished rollout into slime's `Sample`, which a `--custom-generate-function-path` or a
    rollout function returns. The sample's index, group and prompt are left as they are.
    """
    sample.tokens = [*row.prompt_ids.tolist(), *row.ids.tolist()]
    sample.response_length = len(row.ids)
    sample.loss_mask = loss_mask(torch.tensor(row.provenance)).int().tolist()
    sample.teacher_log_probs = row.provenance.astype(float).tolist()
    sample.rollout_log_probs = row.logprobs.tolist()  # NaN where the policy did not sample
    valid = row.valid and row.score.decided
    sample.reward = row.reward if valid else 0.0
    sample.metadata = {**(sample.metadata or {}), CONTROL: row.kind is Kind.CONTROL, VALID: valid}
    status = type(sample).Status
    sample.status = status.TRUNCATED if row.stop_reason is StopReason.LENGTH else status.COMPLETED
    return sample


def mintrl_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """`--custom-reward-post-process-path`: raw rewards, and A in place of normalised rewards.

    Rows that must not be trained on (not valid, or no valid control in their group) get A = 0 and
    `remove_sample`, by which slime empties their loss mask.

    Args:
        args: mintrl_beta_1 (inf) and mintrl_baseline ("mean").
        samples: all of the update, flat, groups told apart by `group_index`.

    Raises:
        UsageError: a sample that `fill_sample` did not fill, or one without a group.
    """
    for sample in samples:
        if sample.group_index is None or CONTROL not in (sample.metadata or {}):
            raise UsageError(
                f"sample {sample.index}: no group_index, or no {CONTROL!r} in its metadata: let the "
                "generate function end with slime_hooks.fill_sample(sample, row)"
            )
    raw = [float(sample.reward) for sample in samples]
    rewards_B = torch.tensor(
        [r if s.metadata[VALID] else math.nan for r, s in zip(raw, samples, strict=True)],
        dtype=torch.float64,
    )
    advantage_B = rewards_B - control_baseline(
        rewards_B,
        torch.tensor([bool(s.metadata[CONTROL]) for s in samples]),
        torch.tensor([s.group_index for s in samples]),
        beta_1=getattr(args, "mintrl_beta_1", math.inf),
        baseline=getattr(args, "mintrl_baseline", "mean"),
    )
    for sample, advantage in zip(samples, advantage_B.tolist(), strict=True):
        if math.isnan(advantage):
            sample.remove_sample = True
    return raw, torch.nan_to_num(advantage_B).tolist()


def mintrl_advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    """`--custom-advantage-function-path`: A, anchor and weight of this rank's rows, in place.

    log pi_t is `log_probs`, which slime recomputes before the update for every custom loss; one sum
    over the data-parallel ranks counts the rows that each optimiser step trains.

    Raises:
        UsageError: no log-probs or provenance, a KL penalty, whitening, or context parallelism.
    """
    from megatron.core import mpu  # type: ignore[import-not-found,unused-ignore]

    _check(args, mpu)
    logps, codes = rollout_data.get("log_probs"), rollout_data.get("teacher_log_probs")
    if not logps or not codes:
        raise UsageError(
            "log_probs or teacher_log_probs are missing: run without --use-rollout-logprobs, and "
            "fill samples by slime_hooks.fill_sample"
        )
    provenances = [
        _provenance(code, mask).to(logp.device)
        for code, mask, logp in zip(codes, rollout_data["loss_masks"], logps, strict=True)
    ]
    step_B = _steps(rollout_data)
    trained_B = torch.tensor([bool(loss_mask(p).any()) for p in provenances])
    tokens_B = torch.tensor([int(loss_mask(p).sum()) for p in provenances])
    steps = len(rollout_data["num_microbatches"])
    counts_2_S = torch.zeros(2, steps, dtype=torch.float64)
    counts_2_S[0].index_add_(0, step_B, trained_B.double())
    counts_2_S[1].index_add_(0, step_B, tokens_B.double())
    counts_2_S = counts_2_S.to(logps[0].device)
    torch.distributed.all_reduce(counts_2_S, group=mpu.get_data_parallel_group())
    rows_S, tokens_S = counts_2_S.cpu().clamp(min=1)
    weight_S = torch.tensor(rollout_data["global_batch_sizes"], dtype=torch.float64) / rows_S
    if getattr(args, "mintrl_loss_scale", "paper") == "matched":
        weight_S = weight_S * rows_S / (2 * args.mintrl_beta_2 * tokens_S)

    def on_tokens(values: Sequence[float]) -> list[Tensor]:
        return [torch.full_like(p, v) for p, v in zip(logps, values, strict=True)]

    rollout_data["advantages"] = on_tokens(rollout_data["rewards"])
    rollout_data["values"] = on_tokens(weight_S[step_B].tolist())
    rollout_data["returns"] = [
        anchor(
            logp[None],
            provenance[None],
            kind=getattr(args, "mintrl_variant", "const"),
            kappa=getattr(args, "mintrl_kappa", None),
        )[0]
        for logp, provenance in zip(logps, provenances, strict=True)
    ]


def mintrl_loss(
    args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """`--custom-loss-function-path`: the weighted sum over a micro-batch's rows.

    slime divides it by the rows of the optimiser step, so that a step has the mean over its trained
    rows. `sum_of_sample_mean` is not used: the method sums over tokens.
    """
    from slime.backends.megatron_utils.loss import (  # type: ignore[import-not-found,unused-ignore]
        get_log_probs_and_entropy,
    )

    _, found = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
    )

    def padded(parts: Sequence[Tensor], value: float = 0.0) -> Tensor:
        return pad_sequence(list(parts), batch_first=True, padding_value=value)

    provenance_B_T = padded(
        [
            _provenance(code, mask)
            for code, mask in zip(batch["teacher_log_probs"], batch["loss_masks"], strict=True)
        ],
        PAD,
    )
    weight = batch["values"][0][0]  # rows of a micro-batch are of one step
    loss, figures = objective.mintrl_loss(
        padded(found["log_probs"]),
        padded(batch["returns"]),
        provenance_B_T,
        torch.stack([a[0] for a in batch["advantages"]]),
        beta_2=args.mintrl_beta_2,
        denominator=1 / weight,
    )
    with torch.no_grad():
        mask_B_T = loss_mask(provenance_B_T)
        rows = mask_B_T.any(dim=1).sum()
        log = {
            "loss": loss.detach(),
            "mintrl/trained_share": rows.to(loss.dtype),
            "mintrl/log_ratio": figures.get("mintrl/log_ratio/mean", rows) * rows,
            "mintrl/entropy": (
                (padded(found["entropy"]) * mask_B_T).sum(dim=1) / mask_B_T.sum(dim=1).clamp(min=1)
            ).sum(),
        }
    return loss, log


def _provenance(codes_T: Tensor, mask_T: Tensor) -> Tensor:
    """Who wrote each token; PAD on all of a row that slime took out of the loss."""
    who_T = codes_T.round().long()
    return who_T if bool(mask_T.any()) else torch.full_like(who_T, PAD)


def _steps(rollout_data: dict[str, Any]) -> Tensor:
    """The optimiser step of each of this rank's rows, from slime's micro-batch schedule."""
    step_of_batch = [
        step for step, count in enumerate(rollout_data["num_microbatches"]) for _ in range(count)
    ]
    step_B = torch.zeros(len(rollout_data["rewards"]), dtype=torch.int64)
    for step, indices in zip(step_of_batch, rollout_data["micro_batch_indices"], strict=True):
        step_B[torch.as_tensor(indices, dtype=torch.int64)] = step
    return step_B


def _check(args: Any, mpu: Any) -> None:
    wrong = {
        "--calculate-per-token-loss": args.calculate_per_token_loss,
        "--normalize-advantages": args.normalize_advantages,
        "--use-opd": args.use_opd,
        "--kl-coef": args.kl_coef,
        "--context-parallel-size > 1": mpu.get_context_parallel_world_size() > 1,
    }
    given = [name for name, value in wrong.items() if value]
    if given:
        raise UsageError(
            f"{', '.join(given)}: MInTRL's loss is a square of a sum over a whole row, and has no "
            "place for these"
        )
