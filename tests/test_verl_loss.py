"""The loss `mintrl` through veRL's own `ppo_loss`: by hand, beside the TRL adapter, over splits."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("verl")
pytest.importorskip("trl")

from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.config import omega_conf_to_dataclass

from mintrl_env.adapters.verl_batch import grpo_tensors, minibatch_index, regression_tensors
from mintrl_env.adapters.verl_loss import MintrlPolicyLossConfig, mintrl_policy_loss
from mintrl_env.adapters.verl_trainer import actor_fields, grpo_loss_function, loss_settings
from mintrl_env.errors import UsageError
from mintrl_env.store import RolloutStore
from mintrl_env.trainers.baselines import grpo_advantages, grpo_loss
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Kind, Provenance, Score, StopReason

_SPEC = importlib.util.spec_from_file_location(
    "verl_parts", Path(__file__).with_name("verl_parts.py")
)
assert _SPEC is not None and _SPEC.loader is not None
parts = importlib.util.module_from_spec(_SPEC)
sys.modules["verl_parts"] = parts
_SPEC.loader.exec_module(parts)
tiny = parts.tiny_trl()

pytestmark = pytest.mark.verl
P, J, E = Provenance.POLICY, Provenance.INTERVENTION, Provenance.ENVIRONMENT


def actor_of(**settings: Any) -> Any:
    """The actor's config as a worker makes it."""
    keys = [f"+actor_rollout_ref.actor.policy_loss.{k}={v}" for k, v in settings.items()]
    return omega_conf_to_dataclass(parts.config(*keys).actor_rollout_ref.actor)


def row(
    group: str, rollout: int, provenance: list[Provenance], reward: float, valid: bool = True
) -> Trajectory:
    count = len(provenance)
    return Trajectory(
        task_id=group,
        update=0,
        rollout=rollout,
        kind=Kind.CONTROL if rollout < 2 else Kind.INTERVENED,
        prompt_ids=np.arange(2 + rollout, dtype=np.int32),
        ids=np.arange(count, dtype=np.int32),
        provenance=np.array(provenance, dtype=np.int8),
        logprobs=np.full(count, np.nan, dtype=np.float32),
        policy_versions=np.zeros(count, dtype=np.int32),
        score=Score(reward, "x") if not math.isnan(reward) else Score.undecided("unavailable"),
        valid=valid,
        stop_reason=StopReason.EOS,
        draws=count,
    )


ROWS: list[Trajectory | None] = [
    row("a", 0, [P, P, P], 1.0),
    row("a", 1, [P, P], 0.0),
    row("a", 2, [P, J, J, P], 1.0),
    row("a", 3, [P, E, P, J], 0.0),
    row("b", 0, [P], 0.0),
    row("b", 1, [P, P], math.nan, valid=False),
    row("b", 2, [J, P, P], 1.0),
    row("b", 3, [E], math.nan, valid=False),  # a placeholder
    row("c", 0, [P], math.nan, valid=False),  # no valid control: the group is dropped
    row("c", 1, [P], math.nan, valid=False),
    row("c", 2, [P, J], 1.0),
    row("c", 3, [P, P], 0.0),
    None,
    None,
    None,
    None,
]
NAMES = [f"uid-{r.task_id}" if r else f"pad{i}" for i, r in enumerate(ROWS)]
LENGTHS = [len(r.ids) if r else 1 for r in ROWS]


def numbers(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [-torch.rand(n, generator=generator) * 3 for n in LENGTHS]


def padded(parts_: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(parts_, batch_first=True)


def fields_of(settings: Any, *, minibatch: int = 16, dp_size: int = 1, order: Any = None) -> Any:
    order = range(16) if order is None else order
    old = [numbers(0)[i] for i in order]
    step_B = minibatch_index(16, dp_size=dp_size, minibatch=minibatch)
    tensors = regression_tensors(
        [ROWS[i] for i in order], [NAMES[i] for i in order], padded(old), step_B, settings,
        minibatch=minibatch,
    )  # fmt: skip
    mask = parts.ragged([torch.ones(len(part)).long() for part in old])
    return actor_fields(tensors, mask), tensors


def by_hand(
    members: list[int], settings: Any, new: list[torch.Tensor]
) -> tuple[torch.Tensor, list[float]]:
    """The mean of squares over the trained ones of `members`, in plain numbers."""
    value = {"a": 0.5, "b": 0.0, "c": math.nan}
    if settings.beta_1 != math.inf:
        value["a"] = settings.beta_1 * math.log((math.exp(1 / settings.beta_1) + 1) / 2)
    old = numbers(0)
    squares, tokens, advantages = [], [], []
    for index in members:
        r = ROWS[index]
        if r is None or not r.valid or math.isnan(value[r.task_id]):
            continue
        v = value[r.task_id]
        if settings.baseline == "loo" and r.kind is Kind.CONTROL:
            if r.task_id == "b":
                continue  # its only valid control has no other
            v = 1.0 - r.reward
        a, total, count = r.reward - v, torch.zeros(()), 0
        for t, who in enumerate(r.provenance):
            if who == E:
                continue
            reference = old[index][t]
            if who == J and settings.variant == "const":
                reference = torch.tensor(settings.kappa)
            total, count = total + new[index][t] - reference, count + 1
        squares.append((settings.beta_2 * total - a) ** 2)
        tokens.append(count)
        advantages.append(a)
    loss = torch.stack(squares).mean()
    if settings.loss_scale == "matched":
        loss = loss / (2 * settings.beta_2 * float(np.mean(tokens)))
    return loss, advantages


VARIANTS = [
    {},
    {"variant": "proxy"},
    {"kappa": -0.7},
    {"beta_1": 0.3},
    {"baseline": "loo"},
    {"loss_scale": "matched"},
]


@pytest.mark.parametrize("changes", VARIANTS)
def test_loss_and_gradient_by_hand(changes: dict[str, Any]) -> None:
    actor = actor_of(beta_2=0.05, **changes)
    settings = actor.policy_loss
    fields, _ = fields_of(settings)
    new = [part.requires_grad_() for part in numbers(1)]
    loss = parts.actor_loss(actor, ROWS, new, fields, minibatch=16)
    gradients = torch.autograd.grad(loss, new)
    mine = [part.requires_grad_() for part in numbers(1)]
    expected, _ = by_hand(list(range(16)), settings, mine)
    theirs = torch.autograd.grad(expected, mine, allow_unused=True)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for ours, wanted in zip(gradients, theirs, strict=True):
        wanted = torch.zeros_like(ours) if wanted is None else wanted
        assert torch.allclose(ours, wanted, rtol=1e-4, atol=1e-8)
    # Padding, rows that are not valid, groups without a control and ENVIRONMENT tokens: no gradient.
    for index in (5, 7, 8, 9, 10, 11, 12, 13, 14, 15):
        assert not gradients[index].any()
    assert gradients[3][1] == 0 and gradients[3][0] != 0


def test_advantages_masks_and_counts() -> None:
    actor = actor_of(beta_2=0.05)
    fields, tensors = fields_of(actor.policy_loss)
    per_row = [part.tolist() for part in fields["advantages"].unbind()]
    assert per_row[0] == [0.5] * 3 and per_row[1] == [-0.5] * 2
    assert per_row[3] == [-0.5, 0.0, -0.5, -0.5]
    assert per_row[6] == [1.0] * 3 and per_row[4] == [0.0]
    masks = [part.tolist() for part in fields["response_mask"].unbind()]
    assert masks[3] == [1, 0, 1, 1] and masks[7] == [0] and masks[10] == [0, 0]
    assert masks == [part.tolist() for part in fields["loss_mask"].unbind()]
    assert not any(map(any, masks[8:]))
    weights = fields["rollout_is_weights"].unbind()[0].tolist()
    assert weights == pytest.approx([16 / 6] * 3)  # six rows are trained
    assert not torch.isnan(fields["advantages"].values()).any()
    anchors = fields["old_log_probs"].unbind()[2]
    assert anchors[1:3].tolist() == pytest.approx([-0.2, -0.2])
    metrics = tensors.metrics
    assert metrics["mintrl/trained_rows"] == 6 and metrics["mintrl/rows"] == 12
    assert metrics["mintrl/groups/no_valid_control"] == 1
    assert metrics["mintrl/undecided_rows"] == 4
    assert metrics["mintrl/reward/control"] == pytest.approx(1 / 3)


@pytest.mark.parametrize("sizes", [[16], [8, 8], [4] * 4, [1] * 16, [3, 9, 4]])
def test_micro_batches_add_up(sizes: list[int]) -> None:
    actor = actor_of(beta_2=0.05)
    fields, _ = fields_of(actor.policy_loss)
    new = numbers(1)
    total, start = 0.0, 0
    for size in sizes:
        part = slice(start, start + size)
        cut = TensorDict(
            {k: parts.ragged(v.unbind()[part]) for k, v in fields.items()}, batch_size=size
        )
        total += parts.actor_loss(actor, ROWS[part], new[part], cut, minibatch=16).item()
        start += size
    expected, _ = by_hand(list(range(16)), actor.policy_loss, new)
    assert total == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("loss_scale", ["paper", "matched"])
@pytest.mark.parametrize(("dp_size", "minibatch"), [(1, 8), (2, 16), (2, 8), (4, 8), (2, 4)])
def test_ranks_and_minibatches(dp_size: int, minibatch: int, loss_scale: str) -> None:
    """Each rank steps through its own run of rows; gradients, and so losses, are averaged over
    ranks; each optimiser step has the mean over its own trained rows."""
    actor = actor_of(beta_2=0.05, loss_scale=loss_scale)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(3)).tolist()
    fields, _ = fields_of(actor.policy_loss, minibatch=minibatch, dp_size=dp_size, order=order)
    rows, new = [ROWS[i] for i in order], [numbers(1)[i] for i in order]
    per_rank, share = 16 // dp_size, minibatch // dp_size
    for step in range(16 // minibatch):
        losses, members = [], []
        for rank in range(dp_size):
            part = slice(rank * per_rank + step * share, rank * per_rank + (step + 1) * share)
            cut = TensorDict(
                {k: parts.ragged(v.unbind()[part]) for k, v in fields.items()}, batch_size=share
            )
            members += order[part]
            losses.append(
                float(
                    parts.actor_loss(
                        actor, rows[part], new[part], cut, minibatch=minibatch, dp_size=dp_size
                    )
                )
            )
        trained = [i for i in members if i in (0, 1, 2, 3, 4, 6)]
        if trained:
            expected, _ = by_hand(members, actor.policy_loss, numbers(1))
            assert np.mean(losses) == pytest.approx(expected.item(), rel=1e-5)
        else:
            assert losses == [0.0] * dp_size


def test_rows_that_do_not_split_are_refused() -> None:
    with pytest.raises(UsageError, match="do not split"):
        minibatch_index(12, dp_size=2, minibatch=8)
    assert minibatch_index(8, dp_size=2, minibatch=4).tolist() == [0, 0, 1, 1, 0, 0, 1, 1]


@pytest.mark.parametrize("changes", VARIANTS)
def test_the_trl_adapter_has_the_same_numbers(tmp_path: Path, changes: dict[str, Any]) -> None:
    """One stored set of trajectories, which TRL's trainer has trained on, through veRL's loss."""
    store = RolloutStore(tmp_path / "store")
    trainer = tiny.trained(tmp_path, beta_2=0.05, store=store, **changes)
    rows, problems = store.read()
    assert len(rows) == 16 and not problems
    hand = tiny.Hand(trainer)
    model, old = hand.model(trainer.steps[0]["weights"]), hand.old(0)
    with torch.no_grad():
        olds = [hand.logprobs(old, row).float() for row in rows]
    actor = actor_of(**({"beta_2": 0.05} | changes))
    tensors = regression_tensors(
        rows,
        [row.task_id for row in rows],
        padded(olds),
        torch.zeros(16, dtype=torch.int64),
        actor.policy_loss,
        minibatch=16,
    )
    mask = parts.ragged([torch.ones(len(row.ids)).long() for row in rows])
    loss = parts.actor_loss(
        actor, rows, [hand.logprobs(model, row) for row in rows], actor_fields(tensors, mask),
        minibatch=16,
    )  # fmt: skip
    hand.compare(0, *hand.with_gradient(model, loss), tolerance=5e-5)
    inputs = trainer.micro[0]["inputs"]
    # Both order rows in their own way: TRL's by place, the store's by task and rollout.
    update = trainer.updates[0][0]
    theirs = {
        (update[int(place)].task_id, update[int(place)].rollout): float(a)
        for place, a in zip(inputs["place"], inputs["mintrl_advantage"], strict=True)
    }
    first = tensors.mask_B_T.argmax(dim=1)
    for index, row in enumerate(rows):
        ours = float(tensors.advantages_B_T[index, first[index]])
        assert ours == pytest.approx(theirs[row.task_id, row.rollout], abs=1e-6)


# --- the GRPO phase


def test_the_grpo_phase_has_our_grpo_loss() -> None:
    names = NAMES
    old, new = numbers(0), [part.requires_grad_() for part in numbers(1)]
    tensors = grpo_tensors(ROWS, names, padded(old))
    mask = parts.ragged([torch.ones(len(part)).long() for part in old])
    fields = actor_fields(tensors, mask)
    assert "rollout_is_weights" not in fields.keys()  # noqa: SIM118 (a TensorDict)
    loss_fn = grpo_loss_function(parts.config())
    assert loss_fn.keywords["config"].policy_loss.loss_mode == "vanilla"
    loss = parts.actor_loss(loss_fn.keywords["config"], ROWS, new, fields, minibatch=16)
    rewards = torch.tensor([r.reward if r and r.valid else math.nan for r in ROWS])
    group = torch.tensor([ord(r.task_id[0]) if r else i for i, r in enumerate(ROWS)])
    mask_B_T = tensors.mask_B_T.bool()
    mine = [part.requires_grad_() for part in numbers(1)]
    # In this phase nobody reviews, so that every token in the loss is the policy's.
    expected, _ = grpo_loss(
        padded(mine), padded(old), torch.where(mask_B_T, 0, -1), grpo_advantages(rewards, group)
    )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    ours, theirs = torch.autograd.grad(loss, new), torch.autograd.grad(expected, mine)
    assert all(
        torch.allclose(a, b, rtol=1e-4, atol=1e-8) for a, b in zip(ours, theirs, strict=True)
    )
    assert any(part.any() for part in ours)


# --- registration and config


def test_it_is_registered_under_its_name() -> None:
    from mintrl_env.adapters import verl_plugin

    assert get_policy_loss_fn("mintrl") is verl_plugin._loss  # which calls mintrl_policy_loss
    verl_plugin.register()  # again is harmless


def test_the_config_reaches_the_worker() -> None:
    actor = actor_of(beta_2=0.002, kappa=-0.1, beta_1="inf")
    loss = actor.policy_loss
    assert isinstance(loss, MintrlPolicyLossConfig)
    assert (loss.beta_2, loss.kappa, loss.beta_1) == (0.002, -0.1, math.inf)
    assert (loss.n_control, loss.intervention_updates, loss.loss_mode) == (2, 3, "mintrl")
    made = parts.config()
    assert loss_settings(made) == omega_conf_to_dataclass(made.actor_rollout_ref.actor.policy_loss)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kappa": 0.1}, "kappa"),
        ({"variant": "both"}, "policy_loss.variant is proxy or const, not 'both'"),
        ({"beta_2": 0}, "beta_2"),
        ({"baseline": "median"}, "mean or loo"),
        ({"loss_mode": "vanilla"}, "loss_mode"),
        ({"intervention_updates": -2}, "intervention_updates"),
        ({"rewarm_updates": -1}, "rewarm_updates"),
        ({"n_control": 0}, "n_control"),
    ],
)
def test_values_that_the_objective_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MintrlPolicyLossConfig(**changes)
    made = parts.config()
    OmegaConf.set_struct(made, False)
    with pytest.raises(UsageError, match=message):
        loss_settings(
            OmegaConf.merge(made, {"actor_rollout_ref": {"actor": {"policy_loss": changes}}})
        )


def test_a_batch_without_a_trained_row_has_a_zero_loss_with_a_graph() -> None:
    actor = actor_of(beta_2=0.05)
    new = torch.zeros(2, 3, requires_grad=True)
    actor.global_batch_info.update(dp_size=2, global_batch_size=4)
    nothing = torch.zeros(2, 3)
    loss, metrics = mintrl_policy_loss(
        torch.full((2, 3), math.nan), new, torch.full((2, 3), math.nan), nothing, config=actor,
        rollout_is_weights=torch.full((2, 3), math.nan),
    )  # fmt: skip
    assert loss.item() == 0.0
    loss.backward()
    assert new.grad is not None and not new.grad.any()
    assert all(value == 0.0 for value in metrics.values())
