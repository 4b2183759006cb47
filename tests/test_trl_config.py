"""MInTRLConfig: takes what GRPOConfig takes, refuses what it would ignore, pins the GRPO phase."""

from __future__ import annotations

import dataclasses
import inspect
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

from trl import GRPOConfig

from mintrl_env.adapters.trl_config import MInTRLConfig, rollout_keywords
from mintrl_env.episode import EpisodeConfig
from mintrl_env.errors import UsageError
from mintrl_env.protocols import Sampling
from mintrl_env.rollout import RolloutConfig
from mintrl_env.splice import FENCE


def made(tmp_path: Path, **keys: Any) -> MInTRLConfig:
    settings = {
        "output_dir": str(tmp_path),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 16,
        "report_to": [],
    }
    return MInTRLConfig(**(settings | keys))


def test_takes_every_keyword_of_grpo_config(tmp_path: Path) -> None:
    theirs = inspect.signature(GRPOConfig).parameters
    ours = inspect.signature(MInTRLConfig).parameters
    assert set(theirs) <= set(ours)
    # Each with the value that GRPOConfig itself gives it: nothing that is left alone is refused.
    defaults = {
        field.name: getattr(
            GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False), field.name
        )
        for field in dataclasses.fields(GRPOConfig)
        if field.init and field.name in theirs
    }
    settings = defaults | {"steps_per_generation": None, "per_device_train_batch_size": 8}
    config = made(tmp_path, **settings, n_control=4)
    assert config.num_generations == 8
    assert config.learning_rate == 1e-6
    assert config.lr_scheduler_type == "linear"


def test_defaults_are_the_papers(tmp_path: Path) -> None:
    config = made(tmp_path)
    paper = {
        "num_generations": 16,
        "n_control": 8,
        "max_completion_length": 16384,
        "max_prompt_length": 2048,
        "chunk_tokens": 512,
        "max_reviews": 4,
        "max_correction": 64,
        "step_delimiters": ("\n\n", FENCE),
        "learning_rate": 1e-6,
        "temperature": 1.0,
        "top_p": 1.0,
        "kappa": -0.2,
        "beta_1": math.inf,
        "beta_2": 1e-3,
        "variant": "const",
        "baseline": "mean",
        "intervention_updates": 200,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
    }
    assert {name: getattr(config, name) for name in paper} == paper
    rollouts = config.rollout_config()
    assert (rollouts.n_control, rollouts.n_intervened) == (8, 8)
    assert rollouts.episode.max_response == 16384
    assert config.optim.value.startswith("adamw")


def test_rollout_settings_survive_the_way_through_the_trainers_config(tmp_path: Path) -> None:
    settings = RolloutConfig(
        episode=EpisodeConfig(
            chunk_tokens=7,
            max_reviews=2,
            max_correction=5,
            max_response=90,
            step_delimiters=("\n", ";"),
            spacing=3,
        ),
        sampling=Sampling(0.7),
        n_control=3,
        n_intervened=2,
        deadline_s=12.0,
        max_retries=4,
        on_judge_failure="drop",
        max_failure_rate=0.25,
        judge_concurrency=9,
        verifier_concurrency=11,
    )
    plain = RolloutConfig()
    same = {
        field.name
        for field in dataclasses.fields(RolloutConfig)
        if getattr(settings, field.name) == getattr(plain, field.name)
    }
    assert same == {"min_reviews", "policy_concurrency"}, "those that the trainer does not offer"
    for config in (settings, plain):
        keywords = rollout_keywords(config) | {"per_device_train_batch_size": config.group_size}
        assert made(tmp_path, **keywords).rollout_config() == config


def test_vllm_in_several_processes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert made(tmp_path, rollout_engine="vllm").rollout_engine == "vllm"
    monkeypatch.setattr(MInTRLConfig, "world_size", 4)
    with pytest.raises(UsageError, match=r"4 processes would all .* take rollout\.engine: server"):
        made(tmp_path, rollout_engine="vllm")
    assert made(tmp_path).rollout_engine == "transformers"


def test_the_grpo_phase_is_pinned(tmp_path: Path) -> None:
    config = made(tmp_path)
    pinned = {
        "loss_type": "dapo",  # token-mean over the whole batch
        "scale_rewards": "group",
        "epsilon": 0.2,
        "epsilon_high": None,
        "delta": None,
        "beta": 0.0,
        "importance_sampling_level": "token",
        "mask_truncated_completions": False,
        "vllm_importance_sampling_correction": False,
        "num_iterations": 1,
        "disable_dropout": True,
    }
    assert {name: getattr(config, name) for name in pinned} == pinned


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_vllm", True),
        ("use_transformers_continuous_batching", True),
        ("generation_kwargs", {"top_p": 0.9}),
        ("top_p", 0.95),
        ("top_k", 20),
        ("min_p", 0.1),
        ("repetition_penalty", 1.1),
        ("beta", 0.04),
        ("mask_truncated_completions", True),
        ("top_entropy_quantile", 0.2),
        ("off_policy_mask_threshold", 0.5),
        ("entropy_coef", 0.01),
        ("use_adaptive_entropy", True),
        ("multi_objective_aggregation", "normalize_then_sum"),
    ],
)
def test_what_would_be_ignored_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(UsageError, match=key):
        made(tmp_path, **{key: value})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"n_control": 0}, "no baseline without a control"),
        ({"n_control": 17}, "n_control must be 1 to num_generations = 16"),
        ({"variant": "prox"}, "variant is proxy or const, not 'prox'"),
        ({"baseline": "median"}, "baseline is mean or loo"),
        ({"loss_scale": "none"}, "loss_scale is paper or matched"),
        ({"schedule": "fast"}, "schedule is free or rounds"),
        ({"kappa": 0.1}, "kappa"),
        ({"beta_1": 0.0}, "beta_1"),
        ({"beta_2": 0.0}, "beta_2"),
        ({"temperature": 0.0}, "temperature"),
        ({"intervention_updates": -2}, "-1 keeps the judge on"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"step_delimiters": ("",)}, "step_delimiters"),
        ({"max_completion_length": None}, "max_completion_length"),
        ({"on_judge_failure": "ignore"}, "on_judge_failure"),
    ],
)
def test_settings_that_make_no_sense(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        made(tmp_path, **keys)


def test_several_wrong_settings_are_named_together(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"top_p=0\.9.*beta=0\.1"):
        made(tmp_path, top_p=0.9, beta=0.1)


@pytest.mark.parametrize("keys", [{"top_k": None}, {"top_k": -1}, {"min_p": 0.0}])
def test_other_ways_to_say_off_are_taken(tmp_path: Path, keys: dict[str, Any]) -> None:
    made(tmp_path, **keys)


def test_kappa_zero_warns_and_proxy_does_not_look_at_it(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="kappa = 0"):
        made(tmp_path, kappa=0.0)
    made(tmp_path, variant="proxy", kappa=1.0)


def test_the_judge_may_stay_on_or_off(tmp_path: Path) -> None:
    assert made(tmp_path, intervention_updates=-1).updates_with_judge > 10**6
    plain = made(tmp_path, intervention_updates=0, num_generations=4, n_control=8)
    assert plain.updates_with_judge == 0
    assert plain.rollout_config().group_size == 4
