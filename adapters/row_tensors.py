"""Finished rows as the tensors that the objective takes, for loops that are nobody's trainer.

    batch = row_tensors(rows, pad_id=tokenizer.pad_token_id)
    advantage_B = row_advantages(rows)

A row keeps its place. Prompts are padded on the left, responses on the right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mintrl_env.errors import UsageError
from mintrl_env.trainers.objective import PAD, Baseline, control_baseline
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Kind


def provenance_tensor(rows: Sequence[Trajectory | None], width: int) -> Tensor:
    """Who wrote each token, (B, width), `PAD` on the right; a None is a padding row."""
    out = torch.full((len(rows), width), PAD, dtype=torch.int64)
    for index, row in enumerate(rows):
        if row is not None:
            out[index, : len(row.ids)] = torch.from_numpy(row.provenance.astype("int64"))
    return out


def rewards_of(rows: Sequence[Trajectory | None]) -> Tensor:
    """Rewards, (B,), float64; NaN for rows that are not valid, not decided, or padding."""
    return torch.tensor(
        [row.reward if row is not None and row.valid else float("nan") for row in rows],
        dtype=torch.float64,
    )


def group_numbers(rows: Sequence[Trajectory | None], groups: Sequence[str]) -> Tensor:
    """The groups' names as numbers, (B,); each padding row has one of its own."""
    known: dict[Any, int] = {}
    names = [
        name if row is not None else index
        for index, (row, name) in enumerate(zip(rows, groups, strict=True))
    ]
    return torch.tensor([known.setdefault(name, len(known)) for name in names])


@dataclass(frozen=True, slots=True, eq=False)
class RowTensors:
    """A batch of B rows, T the longest response, S the longest prompt and T.

    Attributes:
        ids_B_S: prompts and responses, int64.
        attention_mask_B_S: 1 where `ids_B_S` holds a token, int64.
        provenance_B_T: who wrote each response token, `PAD` on the right, int64.
        rewards_B: float64; NaN for rows that are not valid or not decided.
        is_control_B: rows that nobody reviewed, bool.
        group_B: rows of one task in one update have one number, int64.
    """

    ids_B_S: Tensor
    attention_mask_B_S: Tensor
    provenance_B_T: Tensor
    rewards_B: Tensor
    is_control_B: Tensor
    group_B: Tensor


def row_tensors(
    rows: Sequence[Trajectory], *, pad_id: int, device: str | torch.device = "cpu"
) -> RowTensors:
    """The rows as tensors.

    Raises:
        UsageError: there is no row.
    """
    if not rows:
        raise UsageError("row_tensors needs at least one trajectory")
    P, T = max(len(row.prompt_ids) for row in rows), max(len(row.ids) for row in rows)
    ids_B_S = torch.full((len(rows), P + T), pad_id, dtype=torch.int64)
    mask_B_S = torch.zeros_like(ids_B_S)
    for index, row in enumerate(rows):
        here = slice(P - len(row.prompt_ids), P + len(row.ids))
        ids_B_S[index, here] = torch.tensor([*row.prompt_ids.tolist(), *row.ids.tolist()])
        mask_B_S[index, here] = 1
    made = (
        ids_B_S,
        mask_B_S,
        provenance_tensor(rows, T),
        rewards_of(rows),
        torch.tensor([row.kind is Kind.CONTROL for row in rows]),
        _groups(rows),
    )
    return RowTensors(*(tensor.to(device) for tensor in made))


def row_advantages(
    rows: Sequence[Trajectory], *, beta_1: float = math.inf, baseline: Baseline = "mean"
) -> Tensor:
    """A = r - V of each row, (B,), float64, V from the controls of its group alone.

    NaN for rows that must not be trained on: not valid, undecided, or without a valid control.
    `beta_1` and `baseline` as in `objective.control_baseline`; pass whole groups.
    """
    rewards_B = rewards_of(rows)
    control_B = torch.tensor([row.kind is Kind.CONTROL for row in rows])
    return rewards_B - control_baseline(
        rewards_B, control_B, _groups(rows), beta_1=beta_1, baseline=baseline
    )


def _groups(rows: Sequence[Trajectory]) -> Tensor:
    return group_numbers(rows, [f"{row.run}/{row.update}/{row.task_id}" for row in rows])
