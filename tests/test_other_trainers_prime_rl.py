"""The prime-rl hook: marks on traces, samples, and the loss through prime-rl's own `compute_loss`.

prime-rl is on no registry. With its sources and what they import on PYTHONPATH (0.8.1.dev67,
commit 559b447, was used) the same tests run its code; else stand-ins of the same signatures.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mintrl_env.adapters import prime_rl_hooks as hooks
from mintrl_env.errors import UsageError

_PATH = Path(__file__).with_name("other_trainers_parts.py")
_SPEC = importlib.util.spec_from_file_location("other_trainers_parts", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
parts = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(parts)


def importable(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


LOSS = importable("prime_rl.trainer.rl.loss")
TRAJECTORIES = importable("prime_rl.orchestrator.trajectories")
needs_loss = pytest.mark.skipif(LOSS is None, reason="prime_rl is not importable")
needs_orchestrator = pytest.mark.skipif(
    TRAJECTORIES is None, reason="prime_rl's orchestrator is not importable"
)


@dataclass
class LossInputs:
    """The fields of prime-rl's class."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


def traces_of(rows: Sequence[Any]) -> list[Any]:
    """One trace a row: a node for the prompt, one for the response."""
    made = []
    for row in rows:
        prompt = row.prompt_ids.tolist()
        nodes = [
            SimpleNamespace(token_ids=prompt, mask=[False] * len(prompt), logprobs=[]),
            SimpleNamespace(**hooks.response_node(row)),
        ]
        for node in nodes:
            node.advantages = node.loss_weights = None
        made.append(SimpleNamespace(id=f"{row.task_id}{row.rollout}", nodes=nodes,
                                    info=hooks.trace_info(row)))  # fmt: skip
    return made


def marked(rows: Sequence[Any], **baseline: Any) -> list[Any]:
    traces = traces_of(rows)
    for group in "abc":
        hooks.mark_group([t for t in traces if t.id[0] == group], **baseline)
    return traces


def streams(trace: Any) -> dict[str, Tensor]:
    """A trace as flat streams over its tokens, as prime-rl's `trace_to_samples` lays them."""
    out: dict[str, list[float]] = {"mask": [], "advantages": [], "weights": [], "inference": []}
    for node in trace.nodes:
        compact, values = iter(node.advantages or []), iter(node.logprobs)
        weights = (node.loss_weights or {}).get("rl", [0.0] * len(node.token_ids))
        out["mask"] += node.mask
        out["weights"] += weights
        for kept in node.mask:
            out["advantages"].append(next(compact) if kept else 0.0)
            out["inference"].append(next(values) if kept else 0.0)
    return {name: torch.tensor(values) for name, values in out.items()}


def total(
    leaves: Sequence[Tensor], data: Sequence[dict[str, Tensor]], kwargs: dict[str, Any]
) -> Tensor:
    """The loss of a step: prime-rl's `compute_loss` on all sequences, where it is there."""
    scale = sum(int((d["mask"] & (d["weights"] != 0)).sum()) for d in data)
    if LOSS is not None:
        from prime_rl.configs.trainer import CustomLossConfig

        path = "mintrl_env.adapters.prime_rl_hooks.mintrl_loss_fn"
        loss, metrics = LOSS.compute_loss(
            trainer_logprobs=list(leaves),
            inference_logprobs=[d["inference"].to(leaves[0]) for d in data],
            ref_logprobs=None,
            advantages=[d["advantages"].double() for d in data],
            loss_mask=[d["mask"] for d in data],
            rl_weights=[d["weights"] for d in data],
            ce_weights=None,
            ref_kl_weights=None,
            rl_loss_fn=LOSS.setup_rl_loss_fn(CustomLossConfig(import_path=path, kwargs=kwargs)),
            rl_scale=scale,
            ce_scale=1,
            ref_kl_scale=1,
        )
        assert len(metrics["mintrl/residual_abs"]) == len(data)
        return loss
    sums = [
        hooks.mintrl_loss_fn(
            LossInputs(
                leaf, d["inference"].to(leaf), None, d["advantages"].double(), d["mask"],
                d["weights"],
            ),
            **kwargs,
        ).loss
        for leaf, d in zip(leaves, data, strict=True)
    ]  # fmt: skip
    return torch.stack(sums).sum() / scale


def prompt_and(row: Any, response: Tensor) -> Tensor:
    return torch.cat([torch.full((len(row.prompt_ids),), 99.0).to(response), response])


@pytest.mark.parametrize("changes", parts.VARIANTS)
def test_loss_and_gradient_are_the_objectives(tmp_path: Path, changes: dict[str, Any]) -> None:
    rows = parts.stored(tmp_path)
    kwargs = {
        "beta_2": parts.BETA_2,
        "variant": changes.get("variant", "const"),
        "kappa": changes.get("kappa", parts.KAPPA),
    }
    baseline = {k: v for k, v in changes.items() if k in ("beta_1", "baseline")}
    traces = marked(rows, **baseline)
    kept = [i for i, trace in enumerate(traces) if any(trace.nodes[1].mask)]
    new = parts.logprobs(rows, 1)
    leaves = [prompt_and(rows[i], new[i]).requires_grad_() for i in kept]
    loss = total(leaves, [streams(traces[i]) for i in kept], kwargs)
    loss.backward()
    wanted, gradients, advantage_B = parts.expected(rows, new, new, loss_scale="matched", **changes)
    assert kept == [i for i, a in enumerate(advantage_B.tolist()) if not math.isnan(a)]
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    for place, leaf in zip(kept, leaves, strict=True):
        start = len(rows[place].prompt_ids)
        assert leaf.grad is not None and not leaf.grad[:start].any()
        # The streams are float32: A is, and so are the gradients' scale.
        assert torch.allclose(leaf.grad[start:], gradients[place], rtol=1e-6, atol=1e-12)


def test_the_anchor_may_be_what_vllm_told(tmp_path: Path) -> None:
    rows = parts.stored(tmp_path)
    traces, new = marked(rows), parts.logprobs(rows, 1)
    told = [torch.tensor(r.logprobs).double() for r in rows]  # NaN on the judge's tokens
    old = [torch.where(torch.isnan(t), n, t) for t, n in zip(told, new, strict=True)]
    leaves = [prompt_and(rows[i], new[i]).requires_grad_() for i in parts.TRAINED]
    kwargs = {"beta_2": parts.BETA_2, "variant": "proxy", "policy_anchor": "inference"}
    loss = total(leaves, [streams(traces[i]) for i in parts.TRAINED], kwargs)
    wanted, gradients, _ = parts.expected(
        rows, new, old, variant="proxy", kappa=None, loss_scale="matched"
    )
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    loss.backward()
    for place, leaf in zip(parts.TRAINED, leaves, strict=True):
        got = leaf.grad[len(rows[place].prompt_ids) :]
        assert torch.allclose(got, gradients[place], rtol=1e-6, atol=1e-12)


def test_what_a_trace_carries(tmp_path: Path) -> None:
    rows = parts.stored(tmp_path)
    node = hooks.response_node(rows[3])  # P E P J P P
    assert node["mask"] == [True, False, True, True, True, True]
    assert [math.isnan(x) for x in node["logprobs"]] == [False, False, True, False, False]
    assert hooks.trace_info(rows[5])["mintrl"] == {
        "provenance": [0, 0], "control": True, "reward": None,
    }  # fmt: skip
    traces = marked(rows)
    assert traces[3].nodes[1].loss_weights == {"rl": [1.0, 0.0, 1.0, 2.0, 1.0, 1.0]}
    assert traces[3].nodes[1].advantages == [-0.5] * 5
    assert traces[2].nodes[1].loss_weights == {"rl": [1.0, 2.0, 2.0, 1.0]}
    for left_out in (5, 7, 8, 9, 10, 11):
        assert not any(traces[left_out].nodes[1].mask)
        assert traces[left_out].nodes[1].advantages is None
    group_a = [t for t in traces_of(rows) if t.id[0] == "a"]
    assert hooks.mark_group(group_a) == [0.5, -0.5, 0.5, -0.5]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    rows = parts.stored(tmp_path)[:4]
    traces = traces_of(rows)
    traces[1].info = {}
    with pytest.raises(UsageError, match="trace a1: info has no 'mintrl'"):
        hooks.mark_group(traces)
    traces = traces_of(rows)
    traces[2].nodes[1].token_ids.append(1)
    with pytest.raises(UsageError, match="trace a2: 4 marks for 5 tokens"):
        hooks.mark_group(traces)
    traces = traces_of(rows)
    traces[3].nodes[1].mask[1] = True
    with pytest.raises(UsageError, match="trace a3: mask and provenance differ"):
        hooks.mark_group(traces)

    def inputs(weights: Any) -> LossInputs:
        zeros = torch.zeros(2)
        return LossInputs(zeros, zeros, None, zeros, torch.ones(2, dtype=torch.bool), weights)

    with pytest.raises(UsageError, match="nobody knows who wrote"):
        hooks.mintrl_loss_fn(inputs(None), beta_2=0.1, kappa=-0.1)
    with pytest.raises(UsageError, match="another algorithm's weights"):
        hooks.mintrl_loss_fn(inputs(torch.tensor([1.0, 0.1])), beta_2=0.1, kappa=-0.1)
    with pytest.raises(UsageError, match="policy_anchor"):
        hooks.mintrl_loss_fn(
            inputs(torch.ones(2)),
            beta_2=0.1,
            kappa=-0.1,
            policy_anchor="both",  # type: ignore[arg-type]
        )
    with pytest.raises(UsageError, match="kappa"):
        hooks.mintrl_loss_fn(inputs(torch.ones(2)), beta_2=0.1)


@needs_loss
def test_the_real_inputs_have_our_fields() -> None:
    from dataclasses import fields

    assert [f.name for f in fields(LOSS.LossInputs)] == [f.name for f in fields(LossInputs)]
    assert {f.name for f in fields(LOSS.LossOutputs)} == {"loss", "metrics"}


@needs_orchestrator
def test_through_the_orchestrators_own_samples(tmp_path: Path) -> None:
    """Real traces: marks go through `trace_to_samples` and the packer, and come out as written."""
    import verifiers.v1 as vf
    from prime_rl.trainer.batch import build_bin_cost, prepare_batch
    from verifiers.v1.graph import MessageNode

    rows = parts.stored(tmp_path)
    traces = []
    for row in rows:
        trace = vf.Trace.model_construct(
            id=f"{row.task_id}{row.rollout}", info=hooks.trace_info(row), nodes=[], calls=[],
            ok=True, mm_token_type_id_map={},
        )  # fmt: skip
        prompt = row.prompt_ids.tolist()
        trace.nodes = [
            MessageNode(
                message=vf.UserMessage(content="?"), token_ids=prompt, mask=[False] * len(prompt)
            ),
            MessageNode(
                parent=0, sampled=True, message=vf.AssistantMessage(content="!"),
                **hooks.response_node(row),
            ),
        ]  # fmt: skip
        traces.append(trace)
    for group in "abc":
        hooks.mark_group([t for t in traces if t.id[0] == group])
    wanted = marked(rows)
    samples = [TRAJECTORIES.trace_to_samples(trace, env_name="x") for trace in traces]
    assert [i for i, made in enumerate(samples) if made] == parts.TRAINED
    for place in parts.TRAINED:
        (sample,) = samples[place]
        flat = streams(wanted[place])
        assert list(sample.mask) == flat["mask"].tolist()
        assert list(sample.rl_weights) == flat["weights"].tolist()
        assert list(sample.advantages) == flat["advantages"].tolist()
        sample.temperatures = [1.0] * len(sample.token_ids)
    packed = prepare_batch(
        rollouts=[samples[i][0] for i in parts.TRAINED], seq_len=64, num_train_workers=1,
        bin_cost=build_bin_cost(None), pad_to_multiple_of=8,
    )  # fmt: skip
    trained = [
        (weight, advantage)
        for batches in packed
        for micro in batches
        for mask, weight, advantage in zip(
            micro.loss_mask, micro.rl_weights, micro.advantages, strict=True
        )
        if mask
    ]
    assert sorted(w for w, _ in trained) == [1.0] * 14 + [2.0] * 4
    assert len(trained) == sum(int(streams(wanted[i])["mask"].sum()) for i in parts.TRAINED)
