"""What the tests of the TRL adapter share: a model of two layers, a tokenizer of characters, a
trainer that keeps what it did, and the hand that computes it again from the text up.

The hand's own lines of torch: tokenise, one full forward a row in float64, log-softmax at the
temperature, masks from the reviews, V from the controls, the mean of squares. TRL computes in
float32 with log-probs good to about 1e-7 nats; sums over some 100 tokens leave 1e-5.
"""

from __future__ import annotations

import copy
import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no telemetry
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, processors
from torch import Tensor
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
)

from mintrl_env.adapters.trl_trainer import MInTRLConfig, MInTRLTrainer
from mintrl_env.testing import ScriptedJudge
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Outcome, Provenance, ReviewRequest, Verdict

# The trainer collects garbage when it starts; what was imported is none, and takes a second to see.
gc.collect()
gc.freeze()

CHARACTERS = "0123456789+=?\n abc<>uas:|"


def tokenizer(*, bos: bool = False, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """One token a character; with `bos` plain prompts get a BOS in front, as Llama's do."""
    vocab = {c: i for i, c in enumerate(dict.fromkeys(CHARACTERS))}
    for special in ("[unk]", "[eos]", "[pad]", "[bos]"):
        vocab[special] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="[unk]"))
    backend.decoder = decoders.Fuse()
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="[bos] $A", special_tokens=[("[bos]", vocab["[bos]"])]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="[unk]",
        eos_token="[eos]",
        pad_token="[pad]",
        bos_token="[bos]",
    )
    made.chat_template = chat_template
    return made


def model(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Qwen3ForCausalLM:
    """About 20k parameters; the same for the same seed."""
    torch.manual_seed(seed)
    hf = tokenizer()
    settings = {
        "vocab_size": len(hf),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,  # so that the policy has preferences
        "eos_token_id": hf.eos_token_id,
        "pad_token_id": hf.pad_token_id,
    }
    return Qwen3ForCausalLM(Qwen3Config(**(settings | changes))).to(dtype)


def dataset(rows: int = 8, **columns: Sequence[Any]) -> Dataset:
    """Prompts of two lengths, so that padding is there on the left."""
    prompts = [f"{i}+{i}=?\n" if i % 2 else f"{i}=\n" for i in range(rows)]
    return Dataset.from_dict({"prompt": prompts, **columns})


def ones(prompts: Any, completions: Any, **_: Any) -> list[float]:
    """The share of `1` and `a` in the response, so that rewards differ."""
    return [(text.count("1") + text.count("a")) / max(len(text), 1) for text in completions]


def revise_first(request: ReviewRequest) -> Verdict:
    return Verdict.revise(0, "a1") if request.review == 0 else Verdict.keep()


def config(folder: Path, **changes: Any) -> MInTRLConfig:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 16,
        "num_generations": 8,
        "n_control": 4,
        "max_completion_length": 16,
        "max_prompt_length": 16,
        "chunk_tokens": 6,
        "max_correction": 3,
        "step_delimiters": ("\n",),
        "max_steps": 1,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.0,  # gradients as they are
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "engine_slots": 32,
        "schedule": "rounds",
    }
    return MInTRLConfig(**(settings | changes))


class Watched(MInTRLTrainer):
    """Keeps rows, micro-batches, losses, and at each optimiser step the weights and gradients.

    Attributes:
        updates: rows of each training update, rewards included, and the weights that wrote them.
        micro: one entry a micro-batch: its rows (indices into the update's), its loss, its inputs.
        steps: weights before, gradients, and micro-batches (indices) of each optimiser step.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.updates: list[tuple[list[Trajectory], dict[str, Tensor]]] = []
        self.evaluations: list[list[Trajectory]] = []
        self.micro: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        super().__init__(*args, **kwargs)
        self.add_callback(_Steps(self))

    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        weights = self.weights()
        batch = super()._generate_and_score_completions(inputs)
        if self.model.training:
            self.updates.append((list(self._rows), weights))
            batch["place"] = torch.arange(len(self._rows))
            batch["update"] = torch.tensor(len(self.updates) - 1)
        else:
            self.evaluations.append(list(self._rows))
        return batch

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        loss = super()._compute_loss(model, inputs)
        if self.model.training:
            self.micro.append({"loss": loss.item(), "inputs": inputs})
        return loss

    def logged(self, name: str) -> list[float]:
        return [entry[name] for entry in self.state.log_history if name in entry]


class _Steps(TrainerCallback):
    def __init__(self, trainer: Watched) -> None:
        self.trainer, self.first = trainer, 0

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        trainer = self.trainer
        trainer.steps.append(
            {
                "weights": trainer.weights(),
                "gradients": {
                    name: parameter.grad.clone()
                    for name, parameter in trainer.model.named_parameters()
                    if parameter.grad is not None
                },
                "micro": range(self.first, len(trainer.micro)),
            }
        )
        self.first = len(trainer.micro)


def trainer(folder: Path, *, kind: type[MInTRLTrainer] = Watched, **changes: Any) -> Any:
    """A trainer over the parts above; `changes` go to the trainer or to its config, by name."""
    ours = {
        "model",
        "reward_funcs",
        "train_dataset",
        "eval_dataset",
        "processing_class",
        "judge",
        "guards",
        "verifier",
        "task_of",
        "prompts",
        "store",
        "run_attempt",
        "callbacks",
        "optimizers",
        "peft_config",
        "reward_processing_classes",
    }
    given = {name: changes.pop(name) for name in list(changes) if name in ours}
    settings: dict[str, Any] = {
        "reward_funcs": ones,
        "train_dataset": dataset(),
        "processing_class": tokenizer(),
        "judge": ScriptedJudge(revise_first),
    }
    if "verifier" in given:
        del settings["reward_funcs"]
    settings |= given
    if "peft_config" in settings:
        settings["peft_config"] = copy.deepcopy(settings["peft_config"])  # peft writes into it
    settings.setdefault("model", model())
    return kind(args=config(folder, **changes), **settings)


def trained(tmp_path: Path, **changes: Any) -> Any:
    made = trainer(tmp_path, **changes)
    try:
        made.train()
    finally:
        made.close()
    return made


LORA = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules="all-linear")


class Hand:
    """Computes an optimiser step of a trainer again.

    Args:
        trainer: a Watched trainer that has trained.
        reward: row -> its reward, NaN for undecided.
        lora: the trainer trains this adapter.
    """

    def __init__(
        self,
        trainer: Any,
        reward: Callable[[Trajectory, str], float] | None = None,
        lora: LoraConfig | None = None,
    ) -> None:
        self.trainer, self.args, self.hf = trainer, trainer.args, tokenizer()
        self.reward = reward or (lambda row, text: ones(None, [text])[0])
        self.lora = lora
        self._old: dict[int, Any] = {}

    def old(self, update: int) -> Any:
        """The model that wrote the rows of an update."""
        if update not in self._old:
            self._old[update] = self.model(self.trainer.updates[update][1])
        return self._old[update]

    def model(self, weights: dict[str, Tensor]) -> Any:
        made = model()
        if self.lora is not None:
            made = get_peft_model(made, copy.deepcopy(self.lora))
        made.load_state_dict(weights)
        return made.double().eval()

    def ids(self, row: Trajectory) -> tuple[list[int], list[int]]:
        """Prompt and response, from their texts."""
        prompt, response = self.hf.decode(row.prompt_ids), self.hf.decode(row.ids)
        return self.hf.encode(prompt), self.hf.encode(response, add_special_tokens=False)

    def logprobs(self, model: Any, row: Trajectory) -> Tensor:
        prompt, response = self.ids(row)
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        logp = torch.log_softmax(logits / self.args.temperature, dim=-1)
        return logp.gather(1, torch.tensor(response)[:, None])[:, 0]

    def written_by_judge(self, row: Trajectory) -> Tensor:
        mask = torch.zeros(len(row.ids), dtype=torch.bool)
        for review in row.reviews:
            if review.outcome is Outcome.REVISE:
                mask[review.cut : review.cut + review.correction_tokens] = True
        return mask

    def advantages(self, rows: list[Trajectory]) -> list[float]:
        size, n_control = self.args.num_generations, self.args.n_control
        out = []
        for first in range(0, len(rows), size):
            group = rows[first : first + size]
            assert len({tuple(row.prompt_ids) for row in group}) == 1
            assert [row.rollout for row in group] == list(range(size))
            rewards = [
                self.reward(row, self.hf.decode(row.ids, skip_special_tokens=True))
                if row.valid
                else math.nan
                for row in group
            ]
            for at, reward in enumerate(rewards):
                controls = [
                    other
                    for place, other in enumerate(rewards[:n_control])
                    if not math.isnan(other) and not (self.args.baseline == "loo" and place == at)
                ]
                out.append(reward - self.value(controls))
        return out

    def value(self, controls: list[float]) -> float:
        if not controls:
            return math.nan
        if math.isinf(self.args.beta_1):
            return float(np.mean(controls))
        scaled = [math.exp(reward / self.args.beta_1) for reward in controls]
        return self.args.beta_1 * math.log(np.mean(scaled))

    def places(self, step: dict[str, Any]) -> list[tuple[int, int]]:
        """The rows of a step: indices of their update and in it."""
        found = []
        for index in step["micro"]:
            inputs = self.trainer.micro[index]["inputs"]
            found += [(int(inputs["update"]), int(place)) for place in inputs["place"]]
        return found

    def step(self, index: int) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradient of optimiser step `index`, of the squared regression."""
        args, step = self.args, self.trainer.steps[index]
        model = self.model(step["weights"])
        squares, tokens = [], []
        for update, place in self.places(step):
            rows, _ = self.trainer.updates[update]
            row, advantage = rows[place], self.advantages(rows)[place]
            counted = torch.tensor(row.provenance != Provenance.ENVIRONMENT)
            if math.isnan(advantage) or not counted.any():
                continue
            logp = self.logprobs(model, row)
            with torch.no_grad():
                reference = self.logprobs(self.old(update), row)
            if args.variant == "const":
                reference[self.written_by_judge(row)] = args.kappa
            log_ratio = ((logp - reference) * counted).sum()
            squares.append((args.beta_2 * log_ratio - advantage) ** 2)
            tokens.append(int(counted.sum()))
        assert squares, "the step has no row to learn from"
        loss = torch.stack(squares).mean()
        if args.loss_scale == "matched":
            loss = loss / (2 * args.beta_2 * np.mean(tokens))
        return self.with_gradient(model, loss)

    def with_gradient(self, model: Any, loss: Tensor) -> tuple[float, dict[str, Tensor]]:
        loss.backward()
        gradients = {
            name: parameter.grad.clone()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        }
        return loss.item(), gradients

    def check(self, index: int, tolerance: float = 2e-5) -> None:
        self.compare(index, *self.step(index), tolerance)

    def compare(
        self, index: int, loss: float, gradients: dict[str, Tensor], tolerance: float = 2e-5
    ) -> None:
        step = self.trainer.steps[index]
        theirs = sum(self.trainer.micro[micro]["loss"] for micro in step["micro"])
        assert theirs == pytest.approx(loss, rel=tolerance, abs=1e-7)
        assert set(step["gradients"]) == set(gradients)
        size = norm(gradients)
        assert size > 0
        for name, mine in gradients.items():
            difference = (step["gradients"][name].double() - mine).norm()
            assert float(difference) <= tolerance * size, name
        assert norm(step["gradients"]) == pytest.approx(size, rel=tolerance)


def norm(gradients: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients.values()))
