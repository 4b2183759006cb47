"""MInTRL on prime-rl: its custom loss, and the advantages and marks that its samples need.

    [trainer.loss]                                   [orchestrator.train]
    type = "custom"                                  filter_zero_advantages = false
    import_path = "mintrl_env.adapters.prime_rl_hooks.mintrl_loss_fn"
    kwargs = { beta_2 = 1e-3, variant = "const", kappa = -0.2 }

Written against prime-rl 0.8.1.dev67 (559b447): `trainer/rl/loss.py`, `orchestrator/algo/`,
`orchestrator/trajectories.py`, whose code the tests run where it is importable. Nothing here
imports it.

prime-rl calls its loss once a sequence with the sequence's tokens, and has no place for provenance.
What is needed travels in streams that it has:

    rl_weights     who wrote the token: 1 POLICY, 2 INTERVENTION, 0 not in the loss
    advantages     A on each of these tokens
    loss_mask      True on both kinds, since it is what puts a token in the loss

The sum over sequences is divided by the tokens that are in the loss on all ranks, so the scale is
`matched`: the loss of a sequence is residual^2 / (2 beta_2). The paper's scale would need the number
of rows, which no hook is told. Advantages of 0 must stay: a row with A = 0 is regressed too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from mintrl_env.errors import UsageError
from mintrl_env.trainers.objective import (
    INTERVENTION,
    PAD,
    POLICY,
    AnchorKind,
    Baseline,
    anchor,
    control_baseline,
    loss_mask,
    mintrl_loss,
)
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Kind

PolicyAnchor: TypeAlias = Literal["trainer", "inference"]

INFO = "mintrl"
"""The key of `Trace.info` under which a rollout's record stands."""
POLICY_WEIGHT, INTERVENTION_WEIGHT = 1.0, 2.0


@dataclass(frozen=True)
class LossOutputs:
    """The two fields that prime-rl reads of its own class of this name."""

    loss: Tensor
    metrics: dict[str, Tensor]


def mintrl_loss_fn(
    inputs: Any,
    *,
    beta_2: float,
    variant: AnchorKind = "const",
    kappa: float | None = None,
    policy_anchor: PolicyAnchor = "trainer",
) -> LossOutputs:
    """The squared regression of one sequence, `trainer.loss.import_path`.

    Args:
        inputs: prime-rl's `LossInputs`: trainer_logprobs, inference_logprobs, advantages, loss_mask
            and loss_weights, all (seq,).
        beta_2, variant, kappa: see `trainers.objective`.
        policy_anchor: log pi_t of POLICY tokens. "trainer": the trainer's log-probs of this very
            pass, exact where the rollouts are of the newest weights. "inference": those that vLLM
            told when it sampled, which know the version that wrote a stale row but differ from the
            trainer's by the engines' arithmetic. INTERVENTION tokens have the trainer's always.

    Returns:
        The loss with a graph to trainer_logprobs, and scalars of this row.

    Raises:
        UsageError: a sequence without provenance, or values that the objective refuses.
    """
    if policy_anchor not in ("trainer", "inference"):
        raise UsageError(f"policy_anchor is trainer or inference, not {policy_anchor!r}")
    weights_T, mask_T = inputs.loss_weights, inputs.loss_mask.bool()
    if weights_T is None:
        raise UsageError(
            "a sequence came without rl_weights, so nobody knows who wrote its tokens: let the "
            "algorithm call prime_rl_hooks.mark_group on every group"
        )
    known_T = (weights_T == POLICY_WEIGHT) | (weights_T == INTERVENTION_WEIGHT)
    if bool((mask_T & ~known_T).any()):
        raise UsageError(
            f"rl_weights are {POLICY_WEIGHT} (POLICY) or {INTERVENTION_WEIGHT} (INTERVENTION) on "
            "the tokens of the loss; another algorithm's weights cannot be mixed in"
        )
    provenance_T = torch.where(weights_T == INTERVENTION_WEIGHT, INTERVENTION, POLICY)
    provenance_1_T = torch.where(mask_T, provenance_T, PAD)[None]
    logp_1_T = inputs.trainer_logprobs[None]
    old_1_T = logp_1_T.detach()
    if policy_anchor == "inference":
        old_1_T = torch.where(provenance_1_T == POLICY, inputs.inference_logprobs[None], old_1_T)
    first = int(mask_T.int().argmax())
    loss, figures = mintrl_loss(
        logp_1_T,
        anchor(old_1_T, provenance_1_T, kind=variant, kappa=kappa),
        provenance_1_T,
        inputs.advantages[first : first + 1],
        beta_2=beta_2,
        loss_scale="matched",
        denominator=1,
        mean_tokens=1,
    )
    nothing = torch.zeros((), device=loss.device)
    return LossOutputs(
        loss,
        {
            "mintrl/log_ratio": figures.get("mintrl/log_ratio/mean", nothing),
            "mintrl/residual_abs": figures.get("mintrl/residual/abs_max", nothing),
            "mintrl/intervention_tokens": (provenance_1_T == INTERVENTION).sum(),
        },
    )


def response_node(row: Trajectory) -> dict[str, Any]:
    """The token fields of the response's `MessageNode`.

    `mask` is True on POLICY and INTERVENTION tokens; `logprobs` has one entry for each of these,
    NaN where the policy did not sample (prime-rl's own `mismatch_kl` figure is NaN then: read
    `mintrl/*` instead).
    """
    mask = loss_mask(torch.tensor(row.provenance)).numpy()
    return {
        "token_ids": row.ids.tolist(),
        "mask": mask.tolist(),
        "logprobs": row.logprobs[mask].tolist(),
    }


def trace_info(row: Trajectory) -> dict[str, Any]:
    """What `mark_group` has to know of a rollout: put it into `Trace.info`."""
    return {
        INFO: {
            "provenance": row.provenance.tolist(),
            "control": row.kind is Kind.CONTROL,
            "reward": row.reward if row.valid and row.score.decided else None,
        }
    }


def mark_group(
    traces: Sequence[Any], *, beta_1: float = math.inf, baseline: Baseline = "mean"
) -> list[float]:
    """Write A and provenance onto the traces of one group: the body of `Algorithm.score_group`.

    A row that must not be trained on (not valid, undecided, no valid control in its group) loses
    its mask, so that prime-rl makes no sample of it: weights of 0 alone would be dropped as an
    absent stream, which stands for 1 on every token.

    Args:
        traces: of one group, each with `trace_info` in its `info` and one node that holds the
            response (`response_node`).

    Returns:
        A of each trace; NaN for those left out.

    Raises:
        UsageError: a trace without the record, or whose tokens it does not fit.
    """
    records = [_record(trace) for trace in traces]
    rewards_B = torch.tensor(
        [math.nan if r["reward"] is None else r["reward"] for r in records], dtype=torch.float64
    )
    control_B = torch.tensor([bool(r["control"]) for r in records])
    one_group_B = torch.zeros(len(records), dtype=torch.int64)
    advantage_B = rewards_B - control_baseline(
        rewards_B, control_B, one_group_B, beta_1=beta_1, baseline=baseline
    )
    for trace, record, advantage in zip(traces, records, advantage_B.tolist(), strict=True):
        for node in trace.nodes:
            if any(node.mask):
                _mark(node, record["provenance"], advantage, trace)
    return advantage_B.tolist()


def _record(trace: Any) -> Mapping[str, Any]:
    record = trace.info.get(INFO)
    if record is None:
        raise UsageError(f"trace {trace.id}: info has no {INFO!r}: fill it by trace_info(row)")
    return record


def _mark(node: Any, provenance: Sequence[int], advantage: float, trace: Any) -> None:
    if len(provenance) != len(node.token_ids):
        raise UsageError(
            f"trace {trace.id}: {len(provenance)} marks for {len(node.token_ids)} tokens: a response "
            "has to be one node"
        )
    provenance_T = torch.tensor(provenance)
    if math.isnan(advantage):
        node.mask = [False] * len(provenance)
        node.logprobs = []
        return
    mask_T = loss_mask(provenance_T)
    if mask_T.tolist() != [bool(kept) for kept in node.mask]:
        raise UsageError(f"trace {trace.id}: mask and provenance differ: use response_node(row)")
    weights_T = torch.where(provenance_T == INTERVENTION, INTERVENTION_WEIGHT, POLICY_WEIGHT)
    node.advantages = [advantage] * int(mask_T.sum())
    node.loss_weights = {"rl": torch.where(mask_T, weights_T, 0.0).tolist()}
