"""Which phase an update is in, and what the learning rate does where the phases meet.

Updates count from 0: one update is one generation of groups and what is learnt from it, however
many optimiser steps that takes. The judge is on for the first `intervention_updates` of them
(200 of 500 in the paper); GRPO on untouched rollouts follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from mintrl_env.errors import UsageError


class Phase(StrEnum):
    """What an update learns from."""

    INTERVENTION = "intervention"
    GRPO = "grpo"


@dataclass(frozen=True, slots=True)
class PhaseSchedule:
    """The phases of one run.

    Attributes:
        intervention_updates: updates with the judge on, from update 0; 0 is plain GRPO.
        rewarm_updates: updates over which the learning rate rises linearly again from the switch
            on; 0 for none. Adam's second moment still remembers the first phase's gradients, which
            at `loss_scale="paper"` are an order of magnitude smaller.

    Raises:
        UsageError: a count is negative.
    """

    intervention_updates: int = 200
    rewarm_updates: int = 0

    def __post_init__(self) -> None:
        for name in ("intervention_updates", "rewarm_updates"):
            if getattr(self, name) < 0:
                raise UsageError(
                    f"{name} counts updates and must be >= 0, not {getattr(self, name)}"
                )

    def phase(self, update: int) -> Phase:
        """The phase of update number `update`, counted from 0."""
        if update < 0:
            raise UsageError(f"updates count from 0, not {update}")
        return Phase.INTERVENTION if update < self.intervention_updates else Phase.GRPO

    def lr_factor(self, update: int) -> float:
        """What the learning rate of `update` is multiplied by: 1, but for the re-warm-up.

        Over n = rewarm_updates the factors are 1/n, 2/n, ... 1: no update is spent at zero. A run
        that starts with GRPO has no switch and so no re-warm-up.
        """
        phase = self.phase(update)
        if phase is Phase.INTERVENTION or not self.intervention_updates or not self.rewarm_updates:
            return 1.0
        return min(1.0, (update - self.intervention_updates + 1) / self.rewarm_updates)

    def lr_lambda(
        self, steps_per_update: int, base: Callable[[int], float] = lambda step: 1.0
    ) -> Callable[[int], float]:
        """`lr_factor` as a function of the optimiser step, times `base(step)`: for LambdaLR.

        Raises:
            UsageError: steps_per_update < 1.
        """
        if steps_per_update < 1:
            raise UsageError(f"an update takes at least one optimiser step, not {steps_per_update}")
        return lambda step: base(step) * self.lr_factor(step // steps_per_update)
