"""Real tokenizers, made on the spot: what the rules have to survive, without a download."""

from __future__ import annotations

from typing import Any

import pytest

from mintrl_env.prompts import ByteTokenizer, HFTokenizer
from mintrl_env.protocols import Tokenizer

ALPHABET = "abcdefghijklmnopqrstuvwxyzASTW0123456789 .,:=+`\n-日本語の計算é"
CORPUS = [
    "Step one: a + b = c.\n\nStep two: 12 + 30 = 42.\n\nSo the answer is 42.\n\n",
    "Think.\n\n```python\nprint(1 + 1)\n\nx = 2\n```\n\nThat prints 2.\n\n\n",
    "日本語の計算。\n\n計算の語。日本日本 😀😀 🎉 é è 👩‍👩‍👧\n\n",
    "We add 1 and 2, which is 3. Then we stop.\n\n",
] * 8
# Qwen's pre-tokenizer: punctuation takes the newlines behind it, hence tokens such as ".\n\n".
QWEN = r"[^\r\n\w]?\p{L}+|\p{N}| ?[^\s\w]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

KINDS = ("byte", "bpe", "sentencepiece", "metaspace", "char")


@pytest.fixture(scope="session")
def made_tokenizers() -> dict[str, Tokenizer]:
    """By kind: the built-in bytes; byte-level BPE (Qwen's way); SentencePiece's BPE with byte
    fallback (Llama's way); Metaspace, which adds and strips leading spaces; characters."""
    return {
        "byte": ByteTokenizer(),
        "bpe": _wrap(_byte_level_bpe()),
        "sentencepiece": _wrap(_sentencepiece_bpe()),
        "metaspace": _wrap(_metaspace_bpe()),
        "char": _wrap(_characters()),
    }


def _wrap(backend: Any) -> HFTokenizer:
    from transformers import PreTrainedTokenizerFast

    return HFTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eos|>", pad_token="<|pad|>")
    )


SPECIAL = ["<|eos|>", "<|pad|>", "<|im_start|>"]


def _byte_level_bpe() -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(SPECIAL) + 70,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    return backend


def _sentencepiece_bpe() -> Any:
    import json

    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator(
        CORPUS[1::4], trainers.BpeTrainer(vocab_size=90, show_progress=False)
    )
    learnt = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcxyz.,:\n`", "の"]
    pieces += [piece for piece in sorted(learnt["vocab"], key=learnt["vocab"].get)]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in learnt["merges"]]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(SPECIAL)
    return backend


def _metaspace_bpe() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(
        vocab_size=160,
        special_tokens=["<unk>", *SPECIAL],
        initial_alphabet=list(ALPHABET.replace(" ", "▁")),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def _characters() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocab = {c: i for i, c in enumerate(dict.fromkeys(["<unk>", *ALPHABET]))}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(SPECIAL)
    return backend
