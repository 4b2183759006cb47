"""What the parts of veRL's plug-in have in common. Nothing here imports veRL.

veRL imports its plug-ins while it is itself imported, be it by one of our own modules. So what a
plug-in's modules import of each other at their top lies here, or comes only when it is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mintrl_env.trainers.schedule import PhaseSchedule

LOSS_MODE = "mintrl"
VALIDATE = "mintrl_validate"
"""The field by which the trainer marks a batch: true for a validation's."""
ROW = "mintrl"
"""The key of `extra_fields` that holds the trajectory."""
NEEDS_MODEL = ("scoring", "self", "shuffled")
"""Judges that need a model in their process, which agent loops have not."""


def phase_schedule(loss: Mapping[str, Any]) -> PhaseSchedule:
    """The phases that `actor.policy_loss` asks for; -1 updates: the judge stays on."""
    updates = int(loss["intervention_updates"])
    return PhaseSchedule(2**31 if updates < 0 else updates, int(loss.get("rewarm_updates", 0)))
