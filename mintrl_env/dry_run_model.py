"""A tiny random model of a given family, with a tokenizer of bytes, made on the spot without a Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mintrl_env.errors import ConfigError, MissingExtraError

END, START, PAD = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
"""Laid out as Qwen3's: without thinking, the answer begins behind an empty thought."""


def tiny_model(folder: Path, model_type: str, *, positions: int, seed: int = 0) -> str:
    """Write a transformers folder: two layers, 32 wide, random weights; a token is a byte.

    Args:
        model_type: transformers' name of the family ("qwen3", "llama").
        positions: the longest sequence.

    Returns:
        The folder, as a path for `policy.path`.

    Raises:
        ConfigError: transformers has no decoder of that name.
    """
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise MissingExtraError("transformers", "trl", "a dry run") from error
    tokenizer = byte_tokenizer()
    try:
        config = AutoConfig.for_model(
            model_type,
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            max_position_embeddings=positions,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"no tiny model of the family {model_type!r} can be made: {error}"
        ) from error
    model.save_pretrained(str(folder))
    tokenizer.save_pretrained(str(folder))
    return str(folder)


def byte_tokenizer() -> Any:
    """A fast tokenizer whose tokens are the 256 bytes, chat marks, and a thought's two marks."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([PAD, START, END])
    backend.add_tokens(
        [AddedToken(mark, special=False, normalized=False) for mark in ("<think>", "</think>")]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )
