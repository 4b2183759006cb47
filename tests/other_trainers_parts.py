"""What the tests of the hooks for other trainers share: one stored set of trajectories, log-probs
for it, and the loss and per-token gradient that `trainers.objective` gives."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mintrl_env.adapters.row_tensors import row_advantages, row_tensors
from mintrl_env.store import RolloutStore
from mintrl_env.trainers.objective import anchor, mintrl_loss, trained_rows
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Kind, Provenance, Score, StopReason

P, J, E = Provenance.POLICY, Provenance.INTERVENTION, Provenance.ENVIRONMENT
KAPPA, BETA_2 = -0.7, 0.05


def row(
    group: str, rollout: int, provenance: list[Provenance], reward: float, valid: bool = True
) -> Trajectory:
    """Two controls, then intervened rows; prompts and responses of several lengths."""
    count, rng = len(provenance), np.random.default_rng([ord(group), rollout])
    sampled = np.array([who == P for who in provenance])
    return Trajectory(
        task_id=group,
        update=0,
        rollout=rollout,
        kind=Kind.CONTROL if rollout < 2 else Kind.INTERVENED,
        prompt_ids=rng.integers(0, 50, 2 + ord(group) % 3).astype(np.int32),
        ids=rng.integers(0, 50, count).astype(np.int32),
        provenance=np.array(provenance, dtype=np.int8),
        logprobs=np.where(sampled, -rng.random(count) * 3, np.nan).astype(np.float32),
        policy_versions=np.zeros(count, dtype=np.int32),
        score=Score(reward, "x") if not math.isnan(reward) else Score.undecided("unavailable"),
        valid=valid,
        stop_reason=StopReason.EOS,
        draws=count,
    )


def groups() -> list[list[Trajectory]]:
    return [
        [
            row("a", 0, [P, P, P], 1.0),
            row("a", 1, [P, P], 0.0),
            row("a", 2, [P, J, J, P], 1.0),
            row("a", 3, [P, E, P, J, P, P], 0.0),
        ],
        [
            row("b", 0, [P], 0.0),
            row("b", 1, [P, P], math.nan, valid=False),  # its verifier was down
            row("b", 2, [J, P, P], 1.0),
            row("b", 3, [E], math.nan, valid=False),  # a placeholder
        ],
        [  # no valid control: the group is dropped
            row("c", 0, [P], math.nan, valid=False),
            row("c", 1, [P], math.nan, valid=False),
            row("c", 2, [P, J], 1.0),
            row("c", 3, [P, P], 0.0),
        ],
    ]


TRAINED = [0, 1, 2, 3, 4, 6]


def stored(folder: Path) -> list[Trajectory]:
    """The rows after a way through a store on disk."""
    store = RolloutStore(folder / "store")
    for rows in groups():
        store.write_group(rows)
    read, problems = store.read()
    assert len(read) == 12 and not problems
    return read


def logprobs(rows: list[Trajectory], seed: int, dtype: Any = torch.float64) -> list[Tensor]:
    """Made-up log-probs of each row's response."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (-3 * torch.rand(len(r.ids), generator=generator, dtype=torch.float64)).to(dtype)
        for r in rows
    ]


def expected(
    rows: list[Trajectory],
    new: list[Tensor],
    old: list[Tensor],
    *,
    variant: Any = "const",
    kappa: float | None = KAPPA,
    loss_scale: Any = "paper",
    **baseline: Any,
) -> tuple[Tensor, list[Tensor], Tensor]:
    """Loss, gradient to each row's log-probs, and advantages, all by `trainers.objective`."""
    leaves = [part.detach().double().requires_grad_() for part in new]
    batch, advantage_B = row_tensors(rows, pad_id=0), row_advantages(rows, **baseline)
    old_B_T = pad_sequence([part.double() for part in old], batch_first=True)
    anchor_B_T = anchor(old_B_T, batch.provenance_B_T, kind=variant, kappa=kappa)
    assert trained_rows(batch.provenance_B_T, advantage_B).nonzero().flatten().tolist() == [
        i for i, a in enumerate(advantage_B.tolist()) if not math.isnan(a)
    ]
    loss, _ = mintrl_loss(
        pad_sequence(leaves, batch_first=True),
        anchor_B_T,
        batch.provenance_B_T,
        advantage_B,
        beta_2=BETA_2,
        loss_scale=loss_scale,
    )
    return loss.detach(), list(torch.autograd.grad(loss, leaves)), advantage_B


VARIANTS: list[dict[str, Any]] = [
    {},
    {"variant": "proxy", "kappa": None},
    {"beta_1": 0.3},
    {"baseline": "loo"},
]
