"""The rows of the FSDP test, and the hand that computes their steps again with transformers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Kind, Provenance, Score, StopReason

P, J, E = Provenance.POLICY, Provenance.INTERVENTION, Provenance.ENVIRONMENT
BETA_2, KAPPA = 0.05, -0.2


def _row(group: str, rollout: int, who: Sequence[Provenance], reward: float) -> Trajectory:
    rng = np.random.default_rng([ord(group), rollout])
    decided = not math.isnan(reward)
    return Trajectory(
        task_id=group,
        update=0,
        rollout=rollout,
        kind=Kind.CONTROL if rollout < 2 else Kind.INTERVENED,
        prompt_ids=rng.integers(0, 20, 3 + rollout).astype(np.int32),
        ids=rng.integers(0, 20, len(who)).astype(np.int32),
        provenance=np.array(who, dtype=np.int8),
        logprobs=np.full(len(who), np.nan, dtype=np.float32),
        policy_versions=np.zeros(len(who), dtype=np.int32),
        score=Score(reward, "scored") if decided else Score.undecided("unavailable"),
        valid=decided,
        stop_reason=StopReason.EOS,
        draws=len(who),
    )


ROWS: list[Trajectory | None] = [
    _row("a", 0, [P] * 5, 1.0),
    None,
    _row("a", 1, [P] * 3, 0.0),
    _row("b", 0, [P] * 4, math.nan),
    _row("a", 2, [P, J, J, P, P], 1.0),
    _row("b", 1, [P, P], 1.0),
    _row("a", 3, [J, P, E, E, P], 0.0),
    _row("b", 2, [P, J, P], 0.0),
    _row("b", 3, [P] * 6, 1.0),
    None,
    _row("c", 0, [P], math.nan),
    _row("c", 1, [P, P], math.nan),
    _row("c", 2, [P, J, P], 1.0),
    _row("c", 3, [P, J], 0.0),
    None,
    None,
]
"""Two groups with valid controls, one without, padding in between."""
NAMES = [row.task_id if row is not None else f"pad{i}" for i, row in enumerate(ROWS)]
VALUES = {"a": 0.5, "b": 1.0}


def old_logps(logps: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Log-probs of a policy that differs a little from today's."""
    return [
        p.float() + 0.1 * torch.sin(torch.arange(len(p)).float() + i) for i, p in enumerate(logps)
    ]


def hand(
    folder: Path, sequences: Any, old: Sequence[torch.Tensor], ranks: int, minibatch: int
) -> dict[str, Any]:
    """Loss and gradient norm of each optimiser step, and log-probs, by a plain transformers model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).double().eval()
    logps = []
    for prompt, response in sequences:
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        logps.append(torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0])
    losses, norms = [], []
    per_rank, share = len(ROWS) // ranks, minibatch // ranks
    for step in range(len(ROWS) // minibatch):
        squares = []
        for rank in range(ranks):
            for index in range(
                rank * per_rank + step * share, rank * per_rank + (step + 1) * share
            ):
                row = ROWS[index]
                if row is None or not row.valid or row.task_id not in VALUES:
                    continue
                ratio = torch.zeros((), dtype=torch.float64)
                for t, who in enumerate(row.provenance):
                    if who != E:
                        ratio = (
                            ratio + logps[index][t] - (KAPPA if who == J else float(old[index][t]))
                        )
                squares.append((BETA_2 * ratio - (row.reward - VALUES[row.task_id])) ** 2)
        loss = torch.stack(squares).mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        losses.append(float(loss.detach()))
        norms.append(math.sqrt(sum(float((g**2).sum()) for g in gradients)))
    return {
        "hand_losses": losses,
        "hand_norms": norms,
        "hand_logps": [part.tolist() for part in logps],
    }
