"""What is known of an update only over all its micro-batches and ranks: counts and diagnostics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mintrl_env.trainers.diagnostics import diagnostics
from mintrl_env.trainers.objective import PAD, batch_counts


def trained_counts(
    batches: Sequence[dict[str, Tensor]], window: int, accelerator: Any
) -> list[tuple[Tensor, Tensor]]:
    """Trained rows a micro-batch and tokens a trained row, for each micro-batch's optimiser step.

    Both are over all ranks (a collective call). The first, times the micro-batches of a step, is
    what the sum of squares is divided by.

    Args:
        batches: the micro-batches of an update in the order in which they are used, with
            `mintrl_provenance` and `mintrl_advantage`.
        window: micro-batches that make an optimiser step.

    Where steps and updates do not fit into one another, rows of other updates belong to the same
    step and are not known yet: the update's own average stands for them then, as in TRL.
    """
    counts_M_2 = torch.stack(
        [
            torch.stack(batch_counts(batch["mintrl_provenance"], batch["mintrl_advantage"]))
            for batch in batches
        ]
    )
    counts_M_2 = accelerator.reduce(counts_M_2, reduction="sum").to(torch.float32)
    size = window if len(batches) % window == 0 else len(batches)
    out = []
    for part_W_2 in counts_M_2.split(size):
        rows, tokens = part_W_2.sum(dim=0)
        out += [(rows / size, tokens / rows.clamp(min=1))] * size
    return out


class UpdateBatch:
    """The tensors of one pass over an update, as its micro-batches go by.

    Args:
        micro_batches: how many make the pass on this rank.
    """

    def __init__(self, micro_batches: int) -> None:
        self._left = micro_batches
        self._parts: list[dict[str, Tensor]] = []

    def add(self, **tensors: Tensor) -> bool:
        """Add one micro-batch (the arguments of `diagnostics`); True once the pass is whole."""
        self._parts.append({name: tensor.detach() for name, tensor in tensors.items()})
        self._left -= 1
        return self._left == 0

    def figures(self, accelerator: Any, *, beta_2: float) -> dict[str, float]:
        """`diagnostics` over the whole update, gathered over ranks (a collective call)."""
        gathered: dict[str, Tensor] = {}
        for name in self._parts[0]:
            tensor = torch.cat([part[name] for part in self._parts])
            if tensor.dim() == 2:
                padding = PAD if name == "provenance_B_T" else 0
                tensor = accelerator.pad_across_processes(tensor, dim=1, pad_index=padding)
            gathered[name] = accelerator.gather(tensor)
        return diagnostics(**gathered, beta_2=beta_2)  # type: ignore[arg-type]
