"""From the trainer's logs of optimiser steps to a row of metrics.jsonl an update."""

from __future__ import annotations

import math
import time
from typing import Any, Protocol

from mintrl_env.config import RunConfig

_ROW_KEYS = {
    "reward": "reward",
    "loss": "loss",
    "grad_norm": "grad_norm",
    "learning_rate": "learning_rate",
    "entropy": "entropy",
    "completions/mean_length": "mean_length",
    "mintrl/reward/control": "reward_control",
    "mintrl/reward/intervened": "reward_intervened",
    "mintrl/off_policy_fraction/intervened": "off_policy_fraction_intervened",
    "mintrl/off_policy_fraction/all": "off_policy_fraction_all",
    "mintrl/revises_per_review": "revises_per_review",
}


def metrics_row(logs: dict[str, Any]) -> dict[str, Any]:
    """The trainer's log of a step under the names that metrics.jsonl uses; the rest as it is."""
    row = {_ROW_KEYS.get(key, key): value for key, value in logs.items()}
    if "reward_control" in row and "reward_intervened" in row:
        row["reward_gap"] = row["reward_intervened"] - row["reward_control"]
    row["phase"] = "intervention" if row.pop("mintrl/intervention_phase", 0.0) else "grpo"
    if row["phase"] == "grpo" and "reward" in row:
        row["reward_control"] = row["reward"]  # nobody reviews: all rows are controls
    return row


class Watched(Protocol):
    """Whom the callback reports to."""

    config: RunConfig
    done: int

    def after_update(self, update: int, logs: dict[str, Any]) -> None: ...


def report_callback(run: Watched) -> Any:
    """The trainer's callback that calls `run.after_update` once an update's optimiser steps are done."""
    from transformers import TrainerCallback

    class Report(TrainerCallback):  # type: ignore[misc]
        """Gathers the logs of an update's optimiser steps and reports the update when it is done."""

        def __init__(self) -> None:
            self.logs: dict[str, Any] = {}
            self.started = time.monotonic()

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.started = time.monotonic()
            steps = run.config.train.minibatches * run.config.train.iterations
            run.done = state.global_step // steps

        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
        ) -> None:
            if not logs or "loss" not in logs:
                return  # the trainer's closing figures
            numbers = {k: v for k, v in logs.items() if isinstance(v, (int, float))}
            self.logs |= {k: v for k, v in numbers.items() if not math.isnan(v)}
            steps = run.config.train.minibatches * run.config.train.iterations
            if state.global_step % steps == 0:
                self.logs["seconds"] = round(time.monotonic() - self.started, 3)
                run.after_update(state.global_step // steps - 1, self.logs)
                self.logs, self.started = {}, time.monotonic()

    return Report()
