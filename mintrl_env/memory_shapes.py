"""The shape of a model: its parameters and what a token of its KV cache takes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from mintrl_env.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder with gated MLPs and grouped heads (Qwen3, Llama and their like).

    Attributes:
        model_type: transformers' name of the family.
        layers, hidden, heads, kv_heads, head_dim, intermediate, vocab: as in its config.json.
        tied: whether the embedding is the output layer too.
        qk_norm: whether queries and keys are normalised.
    """

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool
    qk_norm: bool

    @property
    def linear_parameters(self) -> int:
        """Weights of all linear layers but the output layer."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def parameters(self) -> int:
        norms = self.layers * (2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0))
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.linear_parameters + norms + self.hidden + embeddings

    @property
    def kv_values(self) -> int:
        """Values of a token in the KV cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def lora_parameters(self, r: int) -> int:
        """Of an adapter on all linear layers (peft's "all-linear", which leaves the output out)."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        inner = (self.hidden + q) + 2 * (self.hidden + kv) + (q + self.hidden)
        return self.layers * r * (inner + 3 * (self.hidden + self.intermediate))


def known_shapes() -> dict[str, Shape]:
    """By Hub id: the models of the recipes."""
    import yaml

    text = (files("mintrl_env") / "model_shapes.yaml").read_text(encoding="utf-8")
    return {name: Shape(**row) for name, row in yaml.safe_load(text).items()}


def shape_of(path: str) -> Shape:
    """The shape of a model by its Hub id, or of one in a folder.

    Raises:
        ConfigError: neither is known.
    """
    known = known_shapes()
    if path in known:
        return known[path]
    file = Path(path) / "config.json"
    if file.is_file():
        return _of_config(json.loads(file.read_text()), str(file))
    raise ConfigError(
        f"policy.path: the shape of {path!r} is not known here ({', '.join(known)} are): give a folder "
        "with its config.json"
    )


def _of_config(data: dict[str, Any], where: str) -> Shape:
    try:
        heads = data["num_attention_heads"]
        return Shape(
            model_type=data["model_type"],
            layers=data["num_hidden_layers"],
            hidden=data["hidden_size"],
            heads=heads,
            kv_heads=data.get("num_key_value_heads") or heads,
            head_dim=data.get("head_dim") or data["hidden_size"] // heads,
            intermediate=data["intermediate_size"],
            vocab=data["vocab_size"],
            tied=bool(data.get("tie_word_embeddings", False)),
            qk_norm=data["model_type"].startswith("qwen3"),
        )
    except KeyError as error:
        raise ConfigError(f"{where}: no {error} in it: is it a decoder's?") from error
