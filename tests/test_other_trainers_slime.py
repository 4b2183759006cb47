"""The slime hooks: from samples to the gradient of an optimiser step, over micro-batches and ranks.

slime is on no registry. With its sources and megatron-core on PYTHONPATH (commit 624b824 and 0.16.1
were used) the same tests run its `Sample`, schedule, `compute_advantages_and_returns` and
`loss_function` on the CPU; else stand-ins of the same signatures.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mintrl_env.adapters import slime_hooks as hooks
from mintrl_env.errors import UsageError

_PATH = Path(__file__).with_name("other_trainers_parts.py")
_SPEC = importlib.util.spec_from_file_location("other_trainers_parts", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
parts = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(parts)

VOCABULARY = 50


def importable(name: str) -> Any:
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        return None
    return importlib.import_module(name)


LOSS = importable("slime.backends.megatron_utils.loss")
PATHS = {
    "custom_advantage_function_path": "mintrl_env.adapters.slime_hooks.mintrl_advantages",
    "custom_loss_function_path": "mintrl_env.adapters.slime_hooks.mintrl_loss",
}


@dataclass
class StandInSample:
    """The fields of slime's `Sample` that are read or written."""

    group_index: int | None = None
    index: int | None = None
    tokens: list[int] = field(default_factory=list)
    response_length: int = 0
    reward: float | None = None
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    teacher_log_probs: list[float] | None = None
    remove_sample: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)

    class Status(Enum):
        COMPLETED = "completed"
        TRUNCATED = "truncated"

    status: Status | None = None


def stand_in_logprobs(
    logits: Tensor,
    *,
    args: Any,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Log-probs of the responses of packed rows, as slime's function of this signature."""
    logp = torch.log_softmax(logits[0] / args.rollout_temperature, dim=-1)
    out: dict[str, list[Tensor]] = {"log_probs": [], "entropy": []}
    end = 0
    for tokens, total, response in zip(
        unconcat_tokens, total_lengths, response_lengths, strict=True
    ):
        end += total
        part = logp[end - response - 1 : end - 1]
        out["log_probs"].append(part.gather(1, tokens[-response:, None])[:, 0])
        out["entropy"].append(-(part.exp() * part).sum(dim=1))
    return torch.empty(0), out


class Megatron:
    """The questions that are asked of megatron.core.mpu, for one process."""

    dp = 1
    cp = 1

    def get_context_parallel_world_size(self) -> int:
        return self.cp

    def get_data_parallel_group(self, **_: Any) -> None:
        return None

    def get_data_parallel_world_size(self, **_: Any) -> int:
        return self.dp

    def is_pipeline_last_stage(self) -> bool:
        return True

    def get_tensor_model_parallel_group(self) -> Any:
        return None

    def get_tensor_model_parallel_world_size(self) -> int:
        return 1

    def get_tensor_model_parallel_rank(self) -> int:
        return 0


@pytest.fixture
def megatron(monkeypatch: pytest.MonkeyPatch) -> Iterator[Megatron]:
    made = Megatron()
    core: Any = ModuleType("megatron.core")
    core.mpu = made
    if LOSS is None:
        package, loss = ModuleType("megatron"), ModuleType("slime.backends.megatron_utils.loss")
        loss.get_log_probs_and_entropy = stand_in_logprobs  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "megatron", package)
        monkeypatch.setitem(sys.modules, "megatron.core", core)
        monkeypatch.setitem(sys.modules, loss.__name__, loss)
    else:
        import megatron.core

        monkeypatch.setattr(megatron.core, "mpu", made)
        for name in ("loss", "cp_utils"):
            module = importlib.import_module(f"slime.backends.megatron_utils.{name}")
            monkeypatch.setattr(module, "mpu", made)
        monkeypatch.setattr(
            "slime.utils.ppo_utils._calculate_log_probs_and_entropy_chunk", one_device, raising=True
        )
    yield made


def one_device(
    logits: Tensor, tokens: Tensor, _group: Any, *, with_entropy: bool, **_: Any
) -> tuple[Tensor, Tensor | None]:
    """In place of the kernels over a sharded vocabulary, which need a GPU."""
    logp = torch.log_softmax(logits, dim=-1)
    entropy = -(logp.exp() * logp).sum(dim=-1).detach() if with_entropy else None
    return logp.gather(1, tokens[:, None]), entropy


def arguments(**changes: Any) -> Namespace:
    given = {
        "mintrl_beta_2": parts.BETA_2,
        "mintrl_variant": "const",
        "mintrl_kappa": parts.KAPPA,
        "rollout_temperature": 1.0,
        "calculate_per_token_loss": False,
        "normalize_advantages": False,
        "use_opd": False,
        "kl_coef": 0.0,
        "use_rollout_logprobs": False,
        "allgather_cp": False,
        "log_probs_chunk_size": -1,
        "entropy_coef": 0.0,
        "loss_type": "custom_loss",
        "recompute_loss_function": False,
        "micro_batch_size": 3,
        "use_dynamic_batch_size": False,
        "balance_data": False,
        "balance_by_flops": False,
        "custom_tis_function_path": None,
        "advantage_estimator": "grpo",
        **PATHS,
    }
    return Namespace(**(given | changes))


def samples_of(rows: Sequence[Any]) -> list[Any]:
    if LOSS is None:
        kind: Any = StandInSample
    else:
        from slime.utils.types import Sample as kind
    return [
        hooks.fill_sample(kind(group_index=ord(r.task_id), index=index), r)
        for index, r in enumerate(rows)
    ]


def train_data(args: Namespace, samples: Sequence[Any], ranks: int, steps: int) -> list[Any]:
    """The rows of each rank as RolloutManager lays them out: masks emptied where a sample was
    removed, then runs of micro-batches dealt out over the ranks."""
    _, rewards = hooks.mintrl_rewards(args, samples)
    masks = [[0] * s.response_length if s.remove_sample else s.loss_mask for s in samples]
    lengths = [len(s.tokens) for s in samples]
    size = len(samples) // steps
    if LOSS is None:
        bins = [
            [list(range(at, min(at + 3, first + size))) for at in range(first, first + size, 3)]
            for first in range(0, len(samples), size)
        ]
        order = [[made[r::ranks] for made in bins] for r in range(ranks)]
        counts = [len(step) for step in order[0]]
        partitions = [[i for step in rank for micro in step for i in micro] for rank in order]
        indices = []
        for rank in order:
            at, mine = 0, []
            for micro in (micro for step in rank for micro in step):
                mine.append(list(range(at, at + len(micro))))
                at += len(micro)
            indices.append(mine)
        sizes = [size] * steps
    else:
        from slime.utils.dp_schedule import build_dp_schedule

        parallel = {
            "dp_size": ranks, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1,
        }  # fmt: skip
        partitions, indices, counts, sizes = build_dp_schedule(
            args, parallel, lengths, global_batch_size=size,
            rollout_indices=[s.index for s in samples],
        )  # fmt: skip
    return [
        {
            "partition": mine,
            "tokens": [torch.tensor(samples[i].tokens) for i in mine],
            "response_lengths": [samples[i].response_length for i in mine],
            "total_lengths": [lengths[i] for i in mine],
            "rewards": [rewards[i] for i in mine],
            "loss_masks": [torch.tensor(masks[i], dtype=torch.int) for i in mine],
            "teacher_log_probs": [torch.tensor(samples[i].teacher_log_probs) for i in mine],
            "rollout_mask_sums": torch.tensor([float(sum(masks[i])) for i in mine]),
            "micro_batch_indices": indices[rank],
            "num_microbatches": counts,
            "global_batch_sizes": sizes,
        }
        for rank, mine in enumerate(partitions)
    ]


def logits_of(rows: Sequence[Any], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(len(r.prompt_ids) + len(r.ids), VOCABULARY, generator=generator) for r in rows
    ]


def response_logprobs(row: Any, logits: Tensor) -> Tensor:
    logp = torch.log_softmax(logits.double(), dim=-1)[len(row.prompt_ids) - 1 : -1]
    return logp.gather(1, torch.tensor(row.ids).long()[:, None])[:, 0]


def advantages(args: Namespace, data: Sequence[dict[str, Any]], monkeypatch: Any) -> None:
    """The hook on every rank, with the sum over ranks made here: one pass collects, one answers."""
    seen: list[Tensor] = []

    def collect(tensor: Tensor, **_: Any) -> None:
        seen.append(tensor.clone())

    def answer(tensor: Tensor, **_: Any) -> None:
        tensor.copy_(torch.stack(seen).sum(dim=0))

    for reduce in (collect, answer):
        monkeypatch.setattr(torch.distributed, "all_reduce", reduce)
        for rank in data:
            if LOSS is None:
                hooks.mintrl_advantages(args, rank)
            else:
                LOSS.compute_advantages_and_returns(args, rank)


def step_losses(
    args: Namespace, data: Sequence[dict[str, Any]], leaves: Sequence[Tensor], ranks: int
) -> tuple[list[Tensor], list[dict[str, float]]]:
    """The loss whose gradient each optimiser step follows: Megatron divides a micro-batch's by
    their number, and averages gradients over ranks."""
    steps = len(data[0]["num_microbatches"])
    losses: list[Any] = [0.0] * steps
    logs: list[dict[str, float]] = [{} for _ in range(steps)]
    for rank in data:
        micro_step = [s for s, n in enumerate(rank["num_microbatches"]) for _ in range(n)]
        for step, indices in zip(micro_step, rank["micro_batch_indices"], strict=True):
            batch = {
                key: [rank[key][i] for i in indices]
                for key in (
                    "response_lengths", "total_lengths", "loss_masks", "teacher_log_probs",
                    "advantages", "returns", "values", "log_probs", "rollout_mask_sums",
                )
            }  # fmt: skip
            batch["unconcat_tokens"] = [rank["tokens"][i] for i in indices]
            packed = torch.cat([leaves[rank["partition"][i]] for i in indices])
            logits = torch.cat([packed, torch.zeros(5, VOCABULARY)])[None]  # slime pads its packs
            count, size = rank["num_microbatches"][step], rank["global_batch_sizes"][step]
            if LOSS is None:
                loss, log = hooks.mintrl_loss(args, batch, logits, None)
                loss = loss * count / size * ranks
                values = {k: float(v) for k, v in log.items()}
            else:
                loss, _, made = LOSS.loss_function(args, batch, count, size, logits)
                values = dict(zip(made["keys"], made["values"][1:].tolist(), strict=True))
            losses[step] = losses[step] + loss / count / ranks
            for key, value in values.items():
                logs[step][key] = logs[step].get(key, 0.0) + value / size
    return losses, logs


@pytest.mark.parametrize("loss_scale", ["paper", "matched"])
@pytest.mark.parametrize("changes", parts.VARIANTS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_loss_and_gradient_are_the_objectives(
    tmp_path: Path,
    megatron: Megatron,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    loss_scale: str,
    ranks: int,
) -> None:
    megatron.dp = ranks
    args = arguments(
        mintrl_loss_scale=loss_scale, **{f"mintrl_{name}": value for name, value in changes.items()}
    )
    rows = parts.stored(tmp_path)
    data = train_data(args, samples_of(rows), ranks, steps=1)
    old = [response_logprobs(r, x) for r, x in zip(rows, logits_of(rows, 0), strict=True)]
    for rank in data:
        rank["log_probs"] = [old[i].float() for i in rank["partition"]]
    advantages(args, data, monkeypatch)
    leaves = [x.requires_grad_() for x in logits_of(rows, 1)]
    (loss,), (log,) = step_losses(args, data, leaves, ranks)
    loss.backward()

    new = [response_logprobs(r, x.detach()) for r, x in zip(rows, leaves, strict=True)]
    wanted, gradients, advantage_B = parts.expected(
        rows, new, old, loss_scale=loss_scale, **changes
    )
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    for row, leaf, gradient in zip(rows, leaves, gradients, strict=True):
        hand = leaf.detach().double().requires_grad_()
        response_logprobs(row, hand).backward(gradient)
        assert hand.grad is not None and leaf.grad is not None
        assert torch.allclose(leaf.grad.double(), hand.grad, rtol=1e-4, atol=1e-7)
    trained = int((~torch.isnan(advantage_B)).sum())
    assert log["loss"] == pytest.approx(wanted.item(), rel=1e-5)
    assert log["mintrl/trained_share"] == pytest.approx(trained / 12)


def test_each_optimiser_step_has_its_own_mean(
    tmp_path: Path, megatron: Megatron, monkeypatch: pytest.MonkeyPatch
) -> None:
    megatron.dp = 2
    args = arguments(mintrl_loss_scale="matched")
    rows = parts.stored(tmp_path)
    rows = [rows[i] for i in (0, 5, 6, 2, 7, 8, 1, 3, 9, 4, 10, 11)]  # 3 trained, then 3 others
    rows = [*rows[:4], rows[6], *rows[4:6], *rows[7:]]  # 4, then 2
    data = train_data(args, samples_of(rows), 2, steps=2)
    new = [response_logprobs(r, x) for r, x in zip(rows, logits_of(rows, 1), strict=True)]
    for rank in data:
        rank["log_probs"] = [new[i].float() for i in rank["partition"]]
    advantages(args, data, monkeypatch)
    losses, logs = step_losses(args, data, logits_of(rows, 1), 2)
    _, _, advantage_B = parts.expected(rows, new, new)
    assert [log["mintrl/trained_share"] for log in logs] == pytest.approx([4 / 6, 2 / 6])
    for step, loss in enumerate(losses):
        part = slice(6 * step, 6 * step + 6)
        kept = [i for i in range(12)[part] if not math.isnan(advantage_B[i])]
        squares, tokens = [], 0
        for i in kept:
            judged = torch.tensor(rows[i].provenance == parts.J)
            ratio = (new[i] - parts.KAPPA)[judged].sum()
            squares.append((parts.BETA_2 * ratio - advantage_B[i]) ** 2)
            tokens += int((rows[i].provenance != parts.E).sum())
        by_hand = torch.stack(squares).sum() / (2 * parts.BETA_2 * tokens)
        assert loss.item() == pytest.approx(by_hand.item(), rel=1e-5)


def test_what_a_sample_carries(tmp_path: Path, megatron: Megatron) -> None:
    rows = parts.stored(tmp_path)
    samples = samples_of(rows)
    sample = samples[3]  # P E P J P P
    assert sample.tokens == [*rows[3].prompt_ids.tolist(), *rows[3].ids.tolist()]
    assert sample.response_length == 6 and sample.loss_mask == [1, 0, 1, 1, 1, 1]
    assert sample.teacher_log_probs == [0.0, 2.0, 0.0, 1.0, 0.0, 0.0]
    assert [math.isnan(x) for x in sample.rollout_log_probs] == [0, 1, 0, 1, 0, 0]
    assert sample.metadata == {"mintrl_control": False, "mintrl_valid": True}
    assert samples[5].metadata == {"mintrl_control": True, "mintrl_valid": False}
    raw, advantage = hooks.mintrl_rewards(arguments(), samples)
    assert raw == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    assert advantage == [0.5, -0.5, 0.5, -0.5, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert [i for i, s in enumerate(samples) if not s.remove_sample] == parts.TRAINED


def test_what_does_not_fit_is_refused(
    tmp_path: Path, megatron: Megatron, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, args = parts.stored(tmp_path), arguments()
    samples = samples_of(rows)
    samples[2].metadata = {}
    with pytest.raises(UsageError, match="sample 2: no group_index, or no 'mintrl_control'"):
        hooks.mintrl_rewards(args, samples)
    (rank,) = train_data(args, samples_of(rows), 1, steps=1)
    with pytest.raises(UsageError, match="log_probs or teacher_log_probs are missing"):
        hooks.mintrl_advantages(args, rank)
    for name, value, option in (
        ("calculate_per_token_loss", True, "--calculate-per-token-loss"),
        ("normalize_advantages", True, "--normalize-advantages"),
        ("kl_coef", 0.1, "--kl-coef"),
        ("use_opd", True, "--use-opd"),
    ):
        with pytest.raises(UsageError, match=f"^{option}: "):
            hooks.mintrl_advantages(arguments(**{name: value}), rank)
    monkeypatch.setattr(megatron, "cp", 2)
    with pytest.raises(UsageError, match="--context-parallel-size > 1"):
        hooks.mintrl_advantages(args, rank)


@pytest.mark.skipif(LOSS is None, reason="slime is not importable")
def test_the_real_sample_has_our_fields() -> None:
    from dataclasses import fields

    from slime.utils.types import Sample

    assert {f.name for f in fields(StandInSample)} <= {f.name for f in fields(Sample)}
    assert {s.name for s in StandInSample.Status} <= {s.name for s in Sample.Status}
    assert SimpleNamespace(**{f.name: 0 for f in fields(Sample)}).teacher_log_probs == 0
