"""A checkpoint of veRL's FSDP engine as a plain transformers folder, by veRL's own merger.

The merger writes bfloat16, whatever the training's precision was. A LoRA adapter, which it leaves
beside the base model, is merged here too.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from mintrl_env.errors import MissingExtraError, StoreError

_SHARDS = "fsdp_config.json"
_LATEST = "latest_checkpointed_iteration.txt"


def verl_checkpoint(path: str | Path) -> Path | None:
    """The folder with the actor's shards that `path` means; None: it is no checkpoint of veRL's.

    Args:
        path: that folder, the `global_step_N` that it is in, the folder of these, or a run's.

    Raises:
        StoreError: veRL's, but without a checkpoint that can be read.
    """
    folder = Path(path)
    for root in (folder, folder / "checkpoints"):
        latest = root / _LATEST
        if latest.is_file():
            step = latest.read_text().strip()
            if not (root / f"global_step_{step}" / "actor" / _SHARDS).is_file():
                raise StoreError(
                    f"{latest} names step {step}, and {root} has no FSDP checkpoint of that step"
                )
            return root / f"global_step_{step}" / "actor"
    for place in (folder, folder / "actor"):
        if (place / _SHARDS).is_file():
            return place
    return None


def export_verl(shards: Path, out: Path) -> Path:
    """Merge the shards into `out`, tokenizer included.

    Args:
        shards: of `verl_checkpoint`.
        out: a new folder.

    Raises:
        StoreError: `out` exists, or the merger failed.
        MissingExtraError: veRL is not installed.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StoreError(f"{out} exists already: choose a new folder")
    if find_spec("verl") is None:
        raise MissingExtraError("verl", "verl", "exporting a checkpoint of veRL's")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        merged = Path(scratch) / "merged"
        words = ["merge", "--backend", "fsdp", "--local_dir", str(shards), "--target_dir"]
        done = subprocess.run(
            [sys.executable, "-m", "verl.model_merger", *words, str(merged)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode:
            raise StoreError(f"{shards}: veRL's merger failed:\n{done.stdout[-2000:].strip()}")
        if (merged / "lora_adapter").is_dir():
            _merge_adapter(merged, shards)
        if out.is_dir():
            out.rmdir()
        merged.rename(out)
    return out


def _merge_adapter(folder: Path, shards: Path) -> None:
    """Add the adapter that lies in a model's folder to its weights."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    adapter = folder / "lora_adapter"
    if not json.loads((adapter / "adapter_config.json").read_text()).get("lora_alpha"):
        raise StoreError(
            f"{shards}: lora_train_meta.json does not say the adapter's alpha, without which it "
            "would be merged as nothing"
        )
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, adapter).merge_and_unload()
    shutil.rmtree(adapter)
    model.to(torch.bfloat16).save_pretrained(folder)
