"""What a training and its rollouts take of a GPU's memory, by formula. Nothing here is measured.

P parameters, T trained ones, s tokens of a micro-batch (rows x longest sequence), h hidden, V vocabulary

    weights             4 P (float32; the trainer autocasts to bf16) or 2 P (bfloat16)
    bf16 copies         2 x linear weights, which autocast keeps for the length of a forward
    gradients           4 T, and as much again in DDP's buckets where there are several GPUs
    AdamW               8 T, two float32 moments
    activations         checkpointed: layers x h x s x 4, and one layer's insides, forward and backward
    log-probs           V x h x 4 (the gradient of the output layer), hidden states and their gradient,
                        one tile of logits of 4,096 tokens; full logits would be s x V x 4, twice
    KV cache            2 x layers x KV heads x head size x 2 bytes a token
    the rest            2 GiB: CUDA, its libraries, fragments
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mintrl_env.memory_shapes import Shape

GIB = 1 << 30
REST = 2 * GIB
SERVED_SHARE = 0.9
"""Of a GPU's memory, what a server that has it alone takes (vLLM's own default)."""
_MOST_GPUS = 4096
_TILE = 4096 * 8192 * 2  # bytes of a tile of logits


@dataclass(frozen=True, slots=True)
class Training:
    """How a model is trained on each of `gpus` GPUs (data-parallel: each has all of it).

    Attributes:
        bf16: weights in bfloat16 (else float32, autocast).
        lora: rank of an adapter, 0: the whole model is trained.
        rows, length: of a micro-batch.
        checkpointing: of gradients.
    """

    shape: Shape
    bf16: bool
    lora: int
    rows: int
    length: int
    checkpointing: bool
    gpus: int = 1

    @property
    def trained(self) -> int:
        return self.shape.lora_parameters(self.lora) if self.lora else self.shape.parameters

    def state(self) -> dict[str, int]:
        """What is there all the time: bytes by part."""
        size = 2 if self.bf16 else 4
        adam = 4 if self.bf16 and not self.lora else 8  # moments have the weights' type
        return {
            "weights": size * self.shape.parameters + (4 * self.trained if self.lora else 0),
            "AdamW": adam * self.trained,
        }

    def step(self) -> dict[str, int]:
        """What a forward and backward adds: bytes by part."""
        shape, tokens = self.shape, self.rows * self.length
        size = 2 if self.bf16 and not self.lora else 4
        copies = {} if self.bf16 else {"bf16 copies": 2 * shape.linear_parameters}
        buckets = {"DDP buckets": size * self.trained} if self.gpus > 1 else {}
        return {
            **copies,
            "gradients": size * self.trained,
            **buckets,
            "activations": self._activations(tokens),
            "log-probs": self._logprobs(tokens),
        }

    def _activations(self, tokens: int) -> int:
        shape, residual = self.shape, 2 if self.bf16 else 4
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        # Norms' inputs and outputs; queries, keys, values (also rotated), attention's output; gate, up,
        # their product and what goes into it.
        layer = 4 * residual * shape.hidden + 2 * (3 * q + 3 * kv + 4 * shape.intermediate)
        if not self.checkpointing:
            return tokens * shape.layers * layer
        return tokens * (shape.layers * residual * shape.hidden + 2 * layer)

    def _logprobs(self, tokens: int) -> int:
        shape = self.shape
        head = 0 if self.lora else 4 * shape.vocab * shape.hidden
        return head + 2 * 4 * tokens * shape.hidden + _TILE

    def full_logits(self) -> int:
        """What the step would take besides, if all logits were there, with their gradient."""
        return 2 * 4 * self.rows * self.length * self.shape.vocab

    def whole(self) -> int:
        """On a GPU that has all of it."""
        return sum(self.state().values()) + sum(self.step().values()) + REST

    def sharded(self, gpus: int) -> int:
        """A GPU's share where weights, gradients and moments are split (FSDP, as veRL does it)."""
        step = self.step()
        whole = sum(self.state().values()) + step["gradients"]
        # One layer at a time is there whole, in bf16.
        layer = 2 * self.shape.linear_parameters // self.shape.layers
        return whole // gpus + layer + step["activations"] + step["log-probs"] + REST


def fewest_gpus(training: Training, memory: int) -> int | None:
    """GPUs with so many bytes each that have room for it: one, or as few as it can be sharded over;
    None: what each has to hold whatever their number (a layer, a micro-batch) is too much."""
    if replace(training, gpus=1).whole() <= memory:
        return 1
    return next((n for n in range(2, _MOST_GPUS + 1) if training.sharded(n) <= memory), None)


def kv_row(shape: Shape, length: int) -> int:
    """Bytes of a row's KV cache in bf16."""
    return 2 * shape.kv_values * length


def served(shape: Shape, memory: int) -> int:
    """Bytes that a server's share of memory leaves for its KV cache: less weights in bf16, and 2 GiB."""
    return max(0, memory - 2 * shape.parameters - REST)
