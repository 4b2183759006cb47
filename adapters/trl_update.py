"""Collects the micro-batches of one update, so that its diagnostics see all rows of all ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mintrl_env.trainers.diagnostics import diagnostics
from mintrl_env.trainers.objective import PAD


class UpdateBatch:
    """The tensors of one update as its micro-batches pass by.

    Args:
        micro_batches: how many make the update on this rank.
    """

    def __init__(self, micro_batches: int) -> None:
        self._left = micro_batches
        self._parts: list[dict[str, Tensor]] = []

    def add(self, **tensors: Tensor) -> bool:
        """Add one micro-batch (the arguments of `diagnostics`); True once the update is whole."""
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
