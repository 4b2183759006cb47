"""GRPO and NLL against TRL 1.16's own formula and against hand computations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mintrl_env.trainers.baselines import grpo_advantages, grpo_loss, nll_loss
from mintrl_env.trainers.objective import ENVIRONMENT, INTERVENTION, PAD, POLICY

torch.set_num_threads(1)
NAN = math.nan
P, J, E, X = POLICY, INTERVENTION, ENVIRONMENT, PAD


def f64(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def same(actual: Tensor | None, expected: object, tol: float = 1e-12) -> None:
    assert actual is not None
    expected = torch.as_tensor(expected, dtype=actual.dtype)
    torch.testing.assert_close(actual, expected, rtol=tol, atol=tol)


def test_advantages_by_hand() -> None:
    # Mean 0.5, deviations +-0.5, std with n - 1: sqrt(4 * 0.25 / 3).
    std = math.sqrt(1 / 3)
    group = torch.tensor([4, 4, 9, 4, 4, 9])
    value = grpo_advantages(f64([1, 0, 1, 1, 0, 1]), group)
    a = 0.5 / (std + 1e-4)
    same(value, [a, -a, 0, a, -a, 0])


def test_undecided_invalid_and_lone_rows_get_zero() -> None:
    rewards, group = f64([1, 0, NAN, 5, 3]), torch.tensor([0, 0, 0, 0, 1])
    valid = torch.tensor([True, True, True, False, True])
    a = 0.5 / (math.sqrt(0.5) + 1e-4)
    same(grpo_advantages(rewards, group, valid), [a, -a, 0, 0, 0])


def test_advantages_equal_trls() -> None:
    # `trl/trainer/grpo_trainer.py` at 1.16: scale_rewards="group", one reward function.
    trl_utils = pytest.importorskip("trl.trainer.utils")
    g = torch.Generator().manual_seed(0)
    rewards = torch.randint(0, 3, (64,), generator=g).float()
    rewards[[3, 17, 18]] = NAN
    grouped = rewards.view(-1, 16)
    mean = torch.nanmean(grouped, dim=1).repeat_interleave(16)
    std = trl_utils.nanstd(grouped, dim=1).repeat_interleave(16)
    expected = torch.nan_to_num((rewards - mean) / (std + 1e-4), nan=0.0)
    same(grpo_advantages(rewards, torch.arange(64) // 16), expected, tol=1e-6)


def test_grpo_loss_at_pi_t_is_the_token_mean_policy_gradient() -> None:
    logp = f64([[-1.0, -2.0, -3.0], [-1.0, -1.0, -9.0]]).requires_grad_()
    provenance = torch.tensor([[P, E, P], [P, X, X]])
    loss, metrics = grpo_loss(logp, logp.detach(), provenance, f64([2.0, -1.0]))
    loss.backward()
    same(loss, -(2 + 2 - 1) / 3)
    same(logp.grad, [[-2 / 3, 0, -2 / 3], [1 / 3, 0, 0]])
    assert {k: float(v) for k, v in metrics.items()} == {
        "grpo/tokens": 3,
        "grpo/clip_low": 0,
        "grpo/clip_high": 0,
    }


def test_grpo_clips_at_a_fifth_on_the_side_that_the_advantage_pushes_to() -> None:
    ratios = f64([[1.5, 0.5, 1.1], [1.5, 0.5, 0.9]])
    logp = ratios.log().requires_grad_()
    advantage = f64([1.0, -1.0])
    loss, metrics = grpo_loss(logp, torch.zeros(2, 3), torch.full((2, 3), P), advantage)
    loss.backward()
    same(loss, -(1.2 + 0.5 + 1.1 - 1.5 - 0.8 - 0.9) / 6)
    # d(-ratio * A)/d logp = -ratio * A where not clipped, 0 where it is.
    same(logp.grad, [[0, -0.5 / 6, -1.1 / 6], [1.5 / 6, 0, 0.9 / 6]])
    assert float(metrics["grpo/clip_low"]) == pytest.approx(1 / 6)
    assert float(metrics["grpo/clip_high"]) == pytest.approx(1 / 6)


def test_grpo_leaves_out_other_authors_invalid_rows_and_nan() -> None:
    logp = f64([[-1.0, NAN, NAN], [NAN, NAN, NAN]]).requires_grad_()
    old = f64([[-1.0, NAN, NAN], [-1.0, -1.0, -1.0]])
    provenance = torch.tensor([[P, J, X], [P, P, P]])
    loss, _ = grpo_loss(logp, old, provenance, f64([1.0, NAN]), torch.tensor([True, False]))
    loss.backward()
    same(loss, -1.0)
    same(logp.grad, [[-1, 0, 0], [0, 0, 0]])


def test_denominators_add_micro_batches_up() -> None:
    g = torch.Generator().manual_seed(0)
    logp = torch.randn(4, 3, dtype=torch.float64, generator=g)
    old = logp - 0.3 * torch.randn(4, 3, dtype=torch.float64, generator=g)
    provenance = torch.tensor([[P, P, X], [P, J, P], [E, P, P], [P, X, X]])
    advantage = f64([1.0, -1.0, 0.5, 2.0])
    whole, metrics = grpo_loss(logp, old, provenance, advantage)
    parts = [
        grpo_loss(logp[i], old[i], provenance[i], advantage[i], denominator=metrics["grpo/tokens"])
        for i in (slice(0, 1), slice(1, 4))
    ]
    same(parts[0][0] + parts[1][0], whole)
    nll = nll_loss(logp, provenance)
    split = [nll_loss(logp[i], provenance[i], denominator=8) for i in (slice(0, 3), slice(3, 4))]
    same(split[0] + split[1], nll)


def test_nll_by_hand() -> None:
    logp = f64([[-1.0, -2.0, NAN], [-3.0, -4.0, NAN], [-100.0, -1.0, -1.0]]).requires_grad_()
    provenance = torch.tensor([[J, J, X], [P, J, E], [J, J, J]])
    loss = nll_loss(logp, provenance, torch.tensor([True, True, False]))
    loss.backward()
    same(loss, 2.5)
    same(logp.grad, [[-0.25, -0.25, 0], [-0.25, -0.25, 0], [0, 0, 0]])


def test_no_token_gives_zero_with_a_graph() -> None:
    logp = torch.full((1, 2), NAN, requires_grad=True)
    provenance = torch.tensor([[X, E]])
    grpo, _ = grpo_loss(logp, logp.detach(), provenance, torch.tensor([1.0]))
    (grpo + nll_loss(logp, provenance)).backward()
    assert grpo.item() == 0.0
    assert logp.grad is not None and logp.grad.tolist() == [[0.0, 0.0]]
