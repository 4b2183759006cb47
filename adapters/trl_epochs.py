"""Where a run of TRL's trainer stands: its micro-batches, epochs and order, also after a resume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback
from trl.trainer.utils import RepeatSampler


class EpochSampler(RepeatSampler):
    """TRL's sampler, whose order depends on seed and epoch alone.

    TRL's own draws each epoch's order from a generator that starts afresh after a resume, so that
    the epochs after the first would see other prompts than in an undisturbed run.
    """

    epoch = 0

    @classmethod
    def like(cls, other: RepeatSampler) -> EpochSampler:
        return cls(
            other.data_source,
            other.mini_repeat_count,
            other.batch_size,
            other.repeat_count,
            other.shuffle,
            other.seed,
        )

    def __iter__(self) -> Any:
        if self.shuffle and self.seed is not None:
            self.generator.manual_seed(self.seed + self.epoch)
        return super().__iter__()


class Beginnings(TrainerCallback):
    """Says where a call of `train` begins, and when an epoch does.

    Args:
        on_train: called with the micro-batches that were done before: 0, or a checkpoint's.
        on_epoch: called with the epoch's index.
    """

    def __init__(self, on_train: Callable[[int], None], on_epoch: Callable[[int], None]) -> None:
        self._on_train, self._on_epoch = on_train, on_epoch

    def on_train_begin(
        self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any
    ) -> None:
        done = state.global_step * args.gradient_accumulation_steps
        # Exact where an epoch's last optimiser step has fewer micro-batches.
        if state.epoch and hasattr(train_dataloader, "__len__"):
            done = round(state.epoch * len(train_dataloader))
        self._on_train(done)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._on_epoch(int(state.epoch or 0))
