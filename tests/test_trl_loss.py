"""The loss of MInTRLTrainer on the real TRL, against a computation by hand (see tiny_trl.py)."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl")

from torch import Tensor
from trl import GRPOTrainer

from mintrl_env.adapters import trl_loss
from mintrl_env.episode import NeedEnvironment
from mintrl_env.errors import JudgeError, UsageError
from mintrl_env.testing import ScriptedJudge
from mintrl_env.trainers.baselines import grpo_advantages, grpo_loss
from mintrl_env.types import Kind, Provenance, StopReason, Task, Verdict

_SPEC = importlib.util.spec_from_file_location("tiny_trl", Path(__file__).with_name("tiny_trl.py"))
assert _SPEC is not None and _SPEC.loader is not None
tiny = importlib.util.module_from_spec(_SPEC)
sys.modules["tiny_trl"] = tiny
_SPEC.loader.exec_module(tiny)
Hand, LORA, trained = tiny.Hand, tiny.LORA, tiny.trained
torch.set_num_threads(1)


# --- the loss


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"variant": "proxy"}, id="proxy"),
        pytest.param({"kappa": -0.7}, id="const"),
        pytest.param({"beta_1": 0.3}, id="soft value"),
        pytest.param({"baseline": "loo"}, id="loo"),
        pytest.param({"loss_scale": "matched"}, id="matched"),
        pytest.param({"temperature": 1.7}, id="temperature"),
        pytest.param({"pad_to_multiple_of": 8}, id="padded to a multiple"),
    ],
)
def test_loss_and_gradient_of_one_step(tmp_path: Path, changes: dict[str, Any]) -> None:
    trainer = trained(tmp_path, beta_2=0.05, **changes)
    hand = Hand(trainer)
    hand.check(0)
    rows, _ = trainer.updates[0]
    intervened = [row for row in rows if row.kind is Kind.INTERVENED]
    assert len(intervened) == 8
    assert sum(int(hand.written_by_judge(row).sum()) for row in intervened) == 16
    for row in rows:
        judged = torch.tensor(row.provenance == Provenance.INTERVENTION)
        assert torch.equal(judged, hand.written_by_judge(row))
    # Cut at T and yet in the loss, with its reward.
    assert any(row.stop_reason is StopReason.LENGTH for row in rows)
    assert trainer.logged("mintrl/trained_rows") == [16.0]
    assert trainer.logged("grad_norm")[0] == pytest.approx(tiny.norm(trainer.steps[0]["gradients"]))


def test_micro_batches_of_one_step(tmp_path: Path) -> None:
    trainer = trained(
        tmp_path, per_device_train_batch_size=4, gradient_accumulation_steps=4, beta_2=0.05
    )
    assert len(trainer.micro) == 4 and len(trainer.steps) == 1
    Hand(trainer).check(0)
    assert trainer.logged("loss") == pytest.approx([sum(m["loss"] for m in trainer.micro)])


@pytest.mark.parametrize("loss_scale", ["paper", "matched"])
def test_minibatches_regress_on_the_old_logprobs(tmp_path: Path, loss_scale: str) -> None:
    trainer = trained(
        tmp_path,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        max_steps=2,
        beta_2=0.05,
        loss_scale=loss_scale,
    )
    assert len(trainer.updates) == 1 and len(trainer.steps) == 2
    Hand(trainer).check(0)
    Hand(trainer).check(1)
    # The second step moved away from what wrote the rows: its log-ratio is not that of the first.
    first, second = (trainer.steps[i]["weights"] for i in (0, 1))
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_minibatches_with_rows_that_are_left_out(tmp_path: Path) -> None:
    """The mean is over the trained rows of the step, not over a share of the update's."""
    trainer = trained(
        tmp_path,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        max_steps=2,
        reward_funcs=lambda completions, **_: [
            None if index in (1, 5, 6, 7, 13) else tiny.ones(None, [text])[0]
            for index, text in enumerate(completions)
        ],
        beta_2=0.05,
    )
    undecided = {1, 5, 6, 7, 13}
    rows, _ = trainer.updates[0]
    hand = Hand(
        trainer,
        lambda row, text: math.nan if rows.index(row) in undecided else tiny.ones(None, [text])[0],
    )
    left = [len(undecided & {place for _, place in hand.places(step)}) for step in trainer.steps]
    assert sum(left) == 5 and left[0] != left[1]
    hand.check(0)
    hand.check(1)


@pytest.mark.parametrize("variant", ["proxy", "const"])
def test_reused_batches(tmp_path: Path, variant: str) -> None:
    trainer = trained(tmp_path, num_iterations=2, max_steps=4, beta_2=0.05, variant=variant)
    assert len(trainer.updates) == 2 and len(trainer.steps) == 4
    for index in range(4):
        Hand(trainer).check(index)
    ratios = trainer.logged("mintrl/log_ratio/max")
    assert len(ratios) == 4  # the second pass, where the log-ratio counts, is logged too
    if variant == "proxy":
        assert ratios[0] == 0.0 and ratios[1] != 0.0


def test_several_updates_in_one_step(tmp_path: Path) -> None:
    trainer = trained(
        tmp_path,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        steps_per_generation=2,
        beta_2=0.05,
    )
    assert len(trainer.updates) == 2 and len(trainer.steps) == 1
    Hand(trainer).check(0)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora(tmp_path: Path, checkpointing: bool) -> None:
    """Dropout is off although the adapter asks for it; the base's weights stay as they were."""
    trainer = trained(
        tmp_path,
        peft_config=LORA,
        max_steps=2,
        num_iterations=2,
        beta_2=0.05,
        gradient_checkpointing=checkpointing,
    )
    hand = Hand(trainer, lora=LORA)
    hand.check(0)
    hand.check(1)
    assert all("lora_" in name for name in trainer.steps[0]["gradients"])
    before, after = trainer.steps[0]["weights"], trainer.weights()
    for name in before:
        assert torch.equal(before[name], after[name]) == ("lora_" not in name)


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    trainer = trained(tmp_path, gradient_checkpointing=True, beta_2=0.05)
    Hand(trainer).check(0)


# --- rows that are not trained on


def drops(request: Any) -> Verdict:
    if request.key.rollout in (5, 6):
        raise JudgeError("server", "gone")
    return tiny.revise_first(request)


def test_rows_that_are_not_valid(tmp_path: Path) -> None:
    """The judge fails and the config drops the row: it keeps its tokens, its reward is void."""
    trainer = trained(tmp_path, judge=ScriptedJudge(drops), on_judge_failure="drop", beta_2=0.05)
    rows, _ = trainer.updates[0]
    assert [row.rollout for row in rows if not row.valid] == [5, 6, 5, 6]
    Hand(trainer).check(0)
    assert trainer.logged("mintrl/rows_not_valid") == [4.0]
    assert trainer.logged("mintrl/trained_rows") == [12.0]
    assert trainer.logged("mintrl/undecided_rows") == [4.0]


def test_rows_that_failed(tmp_path: Path) -> None:
    """The policy's engine fails: a row of one EOS that is masked."""

    class Failing(tiny.Watched):
        @property
        def session(self) -> Any:
            session = super().session
            policy = session.runner.parts.policy

            class Policy:
                async def generate(self, ids: Any, *, key: Any, **options: Any) -> Any:
                    if key.rollout in (0, 4):
                        raise RuntimeError("no memory")
                    return await policy.generate(ids, key=key, **options)

            session.runner.parts.policy = Policy()
            return session

    trainer = trained(tmp_path, kind=Failing, beta_2=0.05, schedule="free")
    rows, _ = trainer.updates[0]
    failed = [row for row in rows if not row.valid]
    assert [row.rollout for row in failed] == [0, 4, 0, 4]
    assert all(row.ids.tolist() == [trainer.tokenizer.eos_id] for row in failed)
    assert all("no memory" in row.cause for row in failed)
    Hand(trainer).check(0)


def test_undecided_rewards_and_a_group_without_a_control(tmp_path: Path) -> None:
    def some(completions: list[str], **_: Any) -> list[float | None]:
        # All controls of the first group, one control and one intervened row of the second.
        undecided = {0, 1, 2, 3, 9, 14}
        return [
            None if index in undecided else tiny.ones(None, [text])[0]
            for index, text in enumerate(completions)
        ]

    trainer = trained(tmp_path, reward_funcs=some, beta_2=0.05)
    rows, _ = trainer.updates[0]
    undecided = {0, 1, 2, 3, 9, 14}
    hand = Hand(
        trainer,
        lambda row, text: math.nan if rows.index(row) in undecided else tiny.ones(None, [text])[0],
    )
    hand.check(0)
    assert trainer.logged("mintrl/groups/no_valid_control") == [1.0]
    assert trainer.logged("mintrl/trained_rows") == [6.0]
    assert [row.valid for row in rows] == [index not in undecided for index in range(16)]
    inputs = trainer.micro[0]["inputs"]
    dropped = torch.isnan(inputs["mintrl_advantage"])
    assert sorted(inputs["place"][dropped].tolist()) == [*range(8), 9, 14]


def test_an_update_without_a_row_to_learn_from(tmp_path: Path) -> None:
    trainer = trained(tmp_path, reward_funcs=lambda completions, **_: [None] * len(completions))
    assert trainer.micro[0]["loss"] == 0.0
    assert tiny.norm(trainer.steps[0]["gradients"]) == 0.0
    assert trainer.logged("mintrl/trained_rows") == [0.0]


class WithTurns(tiny.Watched):  # type: ignore[misc, name-defined]
    """A session whose environment answers each turn."""

    @property
    def session(self) -> Any:
        session = super().session
        runner = session.runner
        if runner.parts.environment is None:

            async def answers(task: Task, need: NeedEnvironment) -> tuple[str, bool]:
                return "|:|", False

            runner.parts.environment = answers
            episode = replace(runner.config.episode, turns=True)
            runner.config = replace(runner.config, episode=episode)
        return session


def often_ending() -> Any:
    """A model that ends its turn about every third token."""
    model = tiny.model()
    hf = tiny.tokenizer()
    with torch.no_grad():
        direction = model.lm_head.weight[hf.eos_token_id]
        model.lm_head.weight[hf.eos_token_id] = direction * 0.0
        model.model.norm.weight.mul_(0.3)  # nearly uniform
    return model


def test_environment_tokens_are_masked(tmp_path: Path) -> None:
    trainer = trained(tmp_path, kind=WithTurns, model=often_ending(), beta_2=0.05)
    rows, _ = trainer.updates[0]
    hf = tiny.tokenizer()
    spoken = [hf.decode(row.ids[row.provenance == Provenance.ENVIRONMENT]) for row in rows]
    assert any(spoken) and all("|:||:||:||:||:|".startswith(text) for text in spoken)
    Hand(trainer).check(0)


# --- first batch of a run


def test_a_loss_that_is_bypassed_is_noticed(tmp_path: Path) -> None:
    class Bypassed(tiny.Watched):
        def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
            return GRPOTrainer._compute_loss(self, model, inputs)

    trainer = tiny.trainer(tmp_path, kind=Bypassed)
    before = trainer.weights()
    with pytest.raises(UsageError, match="loss did not run"):
        trainer.train()
    assert all(torch.equal(before[name], value) for name, value in trainer.weights().items())
    trained(tmp_path, kind=Bypassed, judge=None)  # GRPO's loss is no mistake there


def test_a_masked_token_with_a_gradient_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = trl_loss.mintrl_loss

    def leaking(logp_B_T: Tensor, *args: Any, **options: Any) -> Any:
        loss, metrics = honest(logp_B_T, *args, **options)
        return loss + 1e-6 * logp_B_T.sum(), metrics

    monkeypatch.setattr(trl_loss, "mintrl_loss", leaking)
    with pytest.raises(UsageError, match="masked tokens"):
        trained(tmp_path)


def test_an_evaluation_between_reused_batches(tmp_path: Path) -> None:
    """Rows of an evaluation are the last that were made when the batch is used again."""
    trainer = trained(
        tmp_path,
        num_iterations=2,
        max_steps=2,
        eval_dataset=tiny.dataset(2),
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=16,
        beta_2=0.05,
    )
    assert len(trainer.evaluations) == 2
    Hand(trainer).check(0)
    Hand(trainer).check(1)


# --- the GRPO phase


def grpo_by_hand(hand: Hand, index: int) -> tuple[float, dict[str, Tensor]]:
    """One step of TRL's GRPO by `trainers.baselines`, over the rows of its micro-batches."""
    trainer = hand.trainer
    step = trainer.steps[index]
    model = hand.model(step["weights"])
    logps, olds, provenances, advantages, valid = [], [], [], [], []
    for update, place in hand.places(step):
        rows, _ = trainer.updates[update]
        rewards = [
            hand.reward(row, hand.hf.decode(row.ids, skip_special_tokens=True))
            if row.valid
            else math.nan
            for row in rows
        ]
        groups = torch.arange(len(rows)) // trainer.args.num_generations
        row = rows[place]
        logps.append(hand.logprobs(model, row))
        with torch.no_grad():
            olds.append(hand.logprobs(hand.old(update), row))
        provenances.append(torch.tensor(row.provenance.astype(np.int64)))
        advantages.append(grpo_advantages(torch.tensor(rewards).double(), groups)[place])
        valid.append(row.valid)

    def padded(parts: list[Tensor], value: float) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=value)

    # TRL's mean is over the tokens of the whole update, of which a step has its share.
    rows = trainer.updates[update][0]
    tokens = sum(len(row.ids) for row in rows if row.valid)
    share = len(logps) / len(rows)
    loss, _ = grpo_loss(
        padded(logps, 0.0),
        padded(olds, 0.0),
        padded(provenances, -1),
        torch.stack(advantages),
        torch.tensor(valid),
        denominator=tokens * share,
    )
    return hand.with_gradient(model, loss)


@pytest.mark.parametrize(
    "off", [{"judge": None}, {"intervention_updates": 0}], ids=["no judge", "no update"]
)
def test_plain_grpo_is_trls_own(tmp_path: Path, off: dict[str, Any]) -> None:
    trainer = trained(
        tmp_path,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        max_steps=4,
        learning_rate=0.05,  # enough for the clip to act in an update's second step
        **off,
    )
    assert all(row.kind is Kind.CONTROL for rows, _ in trainer.updates for row in rows)
    hand = Hand(trainer)
    for index in range(4):
        hand.compare(index, *grpo_by_hand(hand, index))
    assert max(trainer.logged("clip_ratio/region_mean")) > 0
    assert trainer.logged("mintrl/intervention_phase") == [0.0, 0.0]
    assert not trainer.logged("mintrl/trained_rows")


def test_grpo_leaves_undecided_rows_out(tmp_path: Path) -> None:
    """By TRL alone they have no advantage, but their tokens would count in the mean."""
    trainer = trained(
        tmp_path,
        judge=None,
        reward_funcs=lambda completions, **_: [
            None if index in (2, 3, 12) else tiny.ones(None, [text])[0]
            for index, text in enumerate(completions)
        ],
    )
    rows, _ = trainer.updates[0]
    assert [index for index, row in enumerate(rows) if not row.valid] == [2, 3, 12]
    hand = Hand(trainer)
    hand.compare(0, *grpo_by_hand(hand, 0))


def test_the_loss_follows_the_batch_over_the_switch(tmp_path: Path) -> None:
    trainer = trained(tmp_path, num_iterations=2, max_steps=4, intervention_updates=1, beta_2=0.05)
    active = [bool(micro["inputs"]["mintrl_active"]) for micro in trainer.micro]
    assert active == [True, True, False, False]
    hand = Hand(trainer)
    hand.check(0)
    hand.check(1)
    for index in (2, 3):
        hand.compare(index, *grpo_by_hand(hand, index))
    assert all(not row.reviews for row in trainer.updates[1][0])
    assert trainer.logged("mintrl/reviews")[1:] == [0.0]


@pytest.mark.parametrize(
    ("changes", "factors"),
    [
        ({}, [1, 1, 1 / 3, 2 / 3, 1, 1]),
        ({"num_iterations": 2}, [1, 1, 1, 1, 1 / 3, 1 / 3]),
        # A step of two updates.
        (
            {
                "per_device_train_batch_size": 8,
                "gradient_accumulation_steps": 4,
                "steps_per_generation": 2,
            },
            [1, 1 / 3, 1, 1, 1, 1],
        ),
    ],
)
def test_learning_rate_warms_up_again_at_the_switch(
    tmp_path: Path, changes: dict[str, Any], factors: list[float]
) -> None:
    trainer = trained(
        tmp_path,
        max_steps=6,
        intervention_updates=2,
        rewarm_updates=3,
        learning_rate=1e-3,
        **changes,
    )
    assert trainer.logged("learning_rate") == pytest.approx([1e-3 * f for f in factors])


def test_rewarming_what_is_no_function_of_the_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="rewarm_updates"):
        trained(
            tmp_path,
            rewarm_updates=2,
            intervention_updates=1,
            lr_scheduler_type="reduce_lr_on_plateau",
            lr_scheduler_kwargs={},
            eval_dataset=tiny.dataset(2),
            eval_strategy="steps",
            per_device_eval_batch_size=16,
        )


# --- a mixture of experts


def test_a_mixture_of_experts_balances_its_load(tmp_path: Path) -> None:
    """As in TRL's own loss: the router's coefficient times its auxiliary loss is added."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    def loss(coefficient: float) -> tuple[float, float]:
        torch.manual_seed(0)
        settings = tiny.model().config.to_dict()
        names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
        names += ("num_key_value_heads", "head_dim", "eos_token_id", "pad_token_id")
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **{name: settings[name] for name in names},
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=16,
                max_position_embeddings=256,
            )
        )
        trainer = trained(tmp_path, model=model, router_aux_loss_coef=coefficient)
        return trainer.micro[0]["loss"], trainer.logged("mintrl/trained_rows")[0]

    (plain, rows), (once, _), (twice, _) = loss(0.0), loss(0.1), loss(0.2)
    assert rows == 16.0
    # Four experts of which two are used: about 1 a balanced layer, in TRL's measure times two.
    assert once - plain > 0.1
    assert twice - plain == pytest.approx(2 * (once - plain), rel=1e-4)
