"""What test_trl_ranks.py runs, on one rank in its own process and on two under torchrun: trains two
steps and writes what each rank saw. Arguments: the folder, rows a micro-batch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tiny_trl as tiny
import torch

from mintrl_env.store import RolloutStore


def partly(completions: list[str], **_: Any) -> list[float | None]:
    """Undecided by what was written, so that it does not matter on which rank."""
    return [None if "+" in text[:1] else tiny.ones(None, [text])[0] for text in completions]


def train(folder: Path, per_rank: int) -> None:
    trainer = tiny.trainer(
        folder,
        reward_funcs=partly,
        # In update 0 the first and the third group have one prompt, on two ranks.
        train_dataset=tiny.dataset(3).select([0, 1, 0, 2, 1, 0]),
        shuffle_dataset=False,
        store=RolloutStore(folder / "rollouts"),
        per_device_train_batch_size=per_rank,
        gradient_accumulation_steps=2,
        steps_per_generation=2,
        loss_scale="matched",
        intervention_updates=1,
        max_steps=2,
        beta_2=0.05,
        learning_rate=1e-3,
    )
    trainer.train()
    seen = {
        "world": trainer.accelerator.num_processes,
        "rows": [
            [(row.task_id, row.rollout, row.ids.tolist(), row.reward, row.valid) for row in rows]
            for rows, _ in trainer.updates
        ],
        "advantages": [
            (int(place), float(advantage))
            for micro in trainer.micro
            if bool(micro["inputs"]["mintrl_active"])
            for place, advantage in zip(
                micro["inputs"]["place"], micro["inputs"]["mintrl_advantage"], strict=True
            )
        ],
        "gradients": [step["gradients"] for step in trainer.steps],
    }
    rank = trainer.accelerator.process_index
    torch.save(seen, folder / f"rank{rank}.pt")
    if rank == 0:
        (folder / "log.json").write_text(json.dumps(trainer.state.log_history))
    trainer.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), int(sys.argv[2]))
