"""TRL's own trainers take the exports, and train on the tokens that they should."""

from __future__ import annotations

import importlib.util
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("trl", reason="trl is not installed")
from datasets import Dataset, load_dataset
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from mintrl_env.export_files import write_export
from mintrl_env.exports import Reading, columns_of, export_rows
from mintrl_env.prompts import HFTokenizer
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import (
    Kind,
    Outcome,
    Provenance,
    Review,
    Score,
    StopReason,
    frozen_ids,
    frozen_logprobs,
)

# Loaded by its path: pytest runs with --import-mode=importlib.
_SPEC = importlib.util.spec_from_file_location("tiny_trl", Path(__file__).with_name("tiny_trl.py"))
assert _SPEC is not None and _SPEC.loader is not None
tiny = importlib.util.module_from_spec(_SPEC)
sys.modules["tiny_trl"] = tiny
_SPEC.loader.exec_module(tiny)
model, tokenizer = tiny.model, tiny.tokenizer

TOKENS = HFTokenizer(tokenizer())
KEPT, DROPPED, WROTE, REST = "a=1\n", "b=2\nc=3", "b=", "3\nc=4"


def repaired(rollout: int = 0) -> Trajectory:
    response = [i for text in (KEPT, WROTE, REST) for i in TOKENS.encode(text)] + [TOKENS.eos_id]
    authors = np.zeros(len(response), np.int8)
    authors[len(KEPT) : len(KEPT + WROTE)] = Provenance.INTERVENTION
    review = Review(
        0, 0, len(KEPT + DROPPED), Outcome.REVISE, step=1, cut=len(KEPT),
        correction_tokens=len(WROTE), dropped_ids=frozen_ids(TOKENS.encode(DROPPED)),
    )  # fmt: skip
    return Trajectory(
        task_id="t",
        update=0,
        rollout=rollout,
        kind=Kind.INTERVENED,
        prompt_ids=frozen_ids(TOKENS.encode("1+2?")),
        ids=frozen_ids(response),
        provenance=authors,
        logprobs=frozen_logprobs(None, len(response)),
        policy_versions=frozen_ids([0] * len(response)),
        score=Score(1.0, "correct"),
        valid=True,
        stop_reason=StopReason.EOS,
        reviews=(review,),
    )


def exported(kind: str, file: Path, *, ids: bool = True) -> Dataset:
    rows = [replace(repaired(), rollout=rollout) for rollout in range(4)]
    reading = Reading(TOKENS, ("\n",))
    write_export(export_rows(rows, kind, reading, ids=ids), file, columns_of(kind, ids=ids))
    form = "json" if file.suffix == ".jsonl" else "parquet"
    cache = str(file.parent / "cache")
    return load_dataset(form, data_files=str(file), split="train", cache_dir=cache)


def settings(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "out"),
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("kind", ["sft", "int"])
def test_sft_trains_on_the_records_tokens(tmp_path: Path, kind: str, suffix: str) -> None:
    data = exported(kind, tmp_path / f"rows{suffix}")
    trainer = SFTTrainer(
        model(), args=SFTConfig(**settings(tmp_path)), train_dataset=data,
        processing_class=TOKENS.hf,
    )  # fmt: skip
    row = trainer.train_dataset[0]
    length = len(KEPT + WROTE) if kind == "int" else len(KEPT + WROTE + REST) + 1
    record = repaired()
    assert row["input_ids"] == [*record.prompt_ids, *record.ids[:length]]
    assert row["labels"] == [-100] * 4 + record.ids[:length].tolist()
    # TRL adds an EOS to texts: an intervention row must not end with one, so it comes as ids.
    assert (row["labels"][-1] == TOKENS.eos_id) == (kind == "sft")
    assert np.isfinite(trainer.train().training_loss)


def test_sft_texts_are_for_other_tokenizers(tmp_path: Path) -> None:
    data = exported("sft", tmp_path / "rows.jsonl", ids=False)
    trainer = SFTTrainer(
        model(), args=SFTConfig(**settings(tmp_path)), train_dataset=data,
        processing_class=tokenizer(),
    )  # fmt: skip
    row, record = trainer.train_dataset[0], repaired()
    assert row["input_ids"] == [*record.prompt_ids, *record.ids]
    assert row["labels"] == [-100] * 4 + record.ids.tolist()


class IdsDPOTrainer(DPOTrainer):
    """Takes `prompt_ids`, `chosen_ids` and `rejected_ids` as they are."""

    def _prepare_dataset(self, dataset: Any, *others: Any) -> Any:
        return dataset


@pytest.mark.parametrize("by_ids", [True, False])
def test_dpo_takes_pairs(tmp_path: Path, by_ids: bool) -> None:
    data = exported("pairs", tmp_path / "rows.parquet")
    kind = IdsDPOTrainer if by_ids else DPOTrainer
    trainer = kind(
        model(), ref_model=model(), args=DPOConfig(**settings(tmp_path)), train_dataset=data,
        processing_class=TOKENS.hf,
    )  # fmt: skip
    row = trainer.train_dataset[0]
    end = [] if by_ids else [TOKENS.eos_id]  # TRL's own reading of the texts ends both with an EOS
    assert row["prompt_ids"] == TOKENS.encode("1+2?" + KEPT)
    assert row["chosen_ids"] == TOKENS.encode(WROTE) + end
    assert row["rejected_ids"] == TOKENS.encode("b=2\n") + end
    assert np.isfinite(trainer.train().training_loss)
