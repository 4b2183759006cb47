"""MInTRLTrainer on the real TRL: what it stands on, one path for prompts and draws, the drop-in
form, the store, resume. What it computes is in test_trl_loss.py."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from mintrl_env.adapters.slot_cache import forward_options
from mintrl_env.adapters.trl_trainer import MInTRLTrainer
from mintrl_env.errors import StoreError, UsageError
from mintrl_env.judges import KeepJudge
from mintrl_env.store import RolloutStore
from mintrl_env.testing import FunctionVerifier, ScriptedJudge
from mintrl_env.types import Kind, Provenance, Score, Task, Verdict

_SPEC = importlib.util.spec_from_file_location("tiny_trl", Path(__file__).with_name("tiny_trl.py"))
assert _SPEC is not None and _SPEC.loader is not None
tiny = importlib.util.module_from_spec(_SPEC)
sys.modules["tiny_trl"] = tiny
_SPEC.loader.exec_module(tiny)
Hand, LORA, trained = tiny.Hand, tiny.LORA, tiny.trained
torch.set_num_threads(1)


# --- what of TRL is overridden or called


def test_signatures_of_trl() -> None:
    """A release of TRL that changes one of these has to be looked at, before the pin is widened."""
    expected = {
        "_generate_and_score_completions": ["self", "inputs"],
        "_calculate_rewards": ["self", "inputs", "prompts", "completions", "completion_ids_list"],
        "_compute_loss": ["self", "model", "inputs"],
        "_prepare_inputs": ["self", "generation_batch"],
        "training_step": ["self", "model", "inputs", "num_items_in_batch"],
        "_get_train_sampler": ["self", "dataset"],
        "_save_checkpoint": ["self", "model", "trial"],
        "create_scheduler": ["self", "num_training_steps", "optimizer"],
        "log": ["self", "logs", "start_time"],
    }
    for name, parameters in expected.items():
        found = list(inspect.signature(getattr(GRPOTrainer, name)).parameters)
        assert found == parameters, f"TRL changed GRPOTrainer.{name}: {found}"
    called = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
    leading = ["self", "model", "input_ids", "attention_mask", "logits_to_keep"]
    assert list(called)[:5] == leading, "TRL changed _get_per_token_logps_and_entropies"
    assert {"compute_entropy", "compute_aux_loss"} <= set(called)
    theirs = set(inspect.signature(GRPOTrainer.__init__).parameters)
    ours = set(inspect.signature(MInTRLTrainer.__init__).parameters)
    # Rollouts are ours; tools need an environment, which TRL's own loop would run.
    assert theirs - ours == {"tools", "rollout_func", "environment_factory"}


def test_what_is_read_of_trl(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path)
    for name in (
        "_step", "_buffered_inputs", "_metrics", "_logs", "reward_weights", "num_generations",
        "num_generations_eval", "num_iterations", "pad_to_multiple_of", "eos_token_ids",
        "aux_loss_enabled", "router_aux_loss_coef", "_is_vlm", "_tokenizer", "rollout_func",
    ):  # fmt: skip
        assert hasattr(trainer, name), f"TRL has no GRPOTrainer.{name} any more"
    assert trainer.loss_is_scaled_for_ga is True, "TRL no longer scales the loss itself"


def test_prompts_arrive_repeated(tmp_path: Path) -> None:
    arrived = []

    class Spy(tiny.Watched):
        def _rollout(self, prompts: Any) -> Any:
            arrived.append(list(prompts))
            return super()._rollout(prompts)

    trained(tmp_path, kind=Spy, num_generations=4, n_control=2)
    (prompts,) = arrived
    assert len(prompts) == 16
    assert all(len(set(prompts[first : first + 4])) == 1 for first in range(0, 16, 4))
    assert len(set(prompts)) == 4


def test_prompts_that_do_not_arrive_repeated_are_refused(tmp_path: Path) -> None:
    class Once(tiny.Watched):
        def _rollout(self, prompts: Any) -> Any:
            return super()._rollout([f"{index}" for index, _ in enumerate(prompts)])

    with pytest.raises(UsageError, match="does not repeat prompts"):
        trained(tmp_path, kind=Once)


# --- one path for prompts and draws


CHAT = (
    "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% if not thinking %}:|{% endif %}{% endif %}"
)


@pytest.mark.parametrize("form", ["text", "messages"])
def test_prompt_ids_are_the_same_in_every_phase(tmp_path: Path, form: str) -> None:
    if form == "text":
        prompts: list[Any] = ["1+1=?\n", "2="]
        hf, kwargs = tiny.tokenizer(bos=True), {}
    else:
        prompts = [
            [{"role": "system", "content": "a b"}, {"role": "user", "content": "1+1=?"}],
            [{"role": "user", "content": "2="}],
        ]
        hf = tiny.tokenizer(bos=True, chat_template=CHAT)
        kwargs = {"chat_template_kwargs": {"thinking": False}}
    data = Dataset.from_dict({"prompt": prompts})

    def anything(completions: Any, **_: Any) -> list[float]:
        return [float(index % 3) for index, _ in enumerate(completions)]

    trainer = trained(
        tmp_path,
        processing_class=hf,
        train_dataset=data,
        eval_dataset=data,
        reward_funcs=anything,
        intervention_updates=1,
        max_steps=2,
        max_prompt_length=40,
        eval_strategy="steps",
        eval_steps=1,
        per_device_eval_batch_size=16,
        **kwargs,
    )
    theirs, _, _ = trainer._tokenize_prompts([row["prompt"] for row in data])
    assert theirs[0][0] == hf.bos_token_id or form == "messages"
    assert hf.decode(theirs[1]).endswith(":|" if form == "messages" else "2=")
    phases = [trainer.updates[0][0], trainer.updates[1][0], *trainer.evaluations]
    assert any(row.reviews for row in phases[0]) and not any(row.reviews for row in phases[1])
    for rows in phases:
        kinds = {kind: set() for kind in Kind}
        for row in rows:
            kinds[row.kind].add(tuple(row.prompt_ids.tolist()))
        for found in kinds.values():
            assert found in (set(), {tuple(ids) for ids in theirs})


def identical(tmp_path: Path, updates: int, **changes: Any) -> None:
    def rows(judge: Any) -> list[Any]:
        trainer = trained(
            tmp_path,
            judge=judge,
            model=tiny.model(dtype=torch.float64),
            learning_rate=0.0,
            max_steps=updates,
            **changes,
        )
        return [row for made, _ in trainer.updates for row in made]

    kept, plain = rows(KeepJudge()), rows(None)
    assert sum(len(row.reviews) for row in kept) > 0
    for a, b in zip(kept, plain, strict=True):
        assert (a.task_id, a.update, a.rollout) == (b.task_id, b.update, b.rollout)
        assert a.ids.tolist() == b.ids.tolist()
        assert np.allclose(a.logprobs, b.logprobs, atol=1e-6)


@pytest.mark.parametrize("schedule", ["rounds", "free"])
def test_a_judge_that_always_keeps_gives_grpos_ids(tmp_path: Path, schedule: str) -> None:
    identical(tmp_path, 2, schedule=schedule)


@pytest.mark.slow
def test_a_judge_that_always_keeps_gives_grpos_ids_for_long(tmp_path: Path) -> None:
    identical(
        tmp_path,
        12,
        schedule="free",
        max_completion_length=96,
        chunk_tokens=7,
        per_device_train_batch_size=32,
        train_dataset=tiny.dataset(10),
    )


# --- the drop-in form


def test_drop_in_form(tmp_path: Path) -> None:
    """Several reward functions, one of them async, weights, columns, a model and a tokenizer from a
    folder, TensorBoard, evaluations, completions logged."""
    columns: list[Any] = []

    def by_column(
        prompts: Any, completions: Any, difficulty: list[int], tests: Any, **_: Any
    ) -> list[Any]:
        columns.append((difficulty, tests))
        return [float(d % 2) for d in difficulty]

    async def asynchronous(completions: Any, **_: Any) -> list[Any]:
        return [None if index % 5 == 0 else len(c) / 16 for index, c in enumerate(completions)]

    saved = tmp_path / "model"
    tiny.model().save_pretrained(saved)
    tiny.tokenizer().save_pretrained(saved)
    data = tiny.dataset(
        4, difficulty=[3, 4, 5, 6], tests=["a", "b", "c", "d"], system_prompt=["abc"] * 4
    )
    grpo_kwargs = {
        "output_dir": str(tmp_path / "out"),
        "bf16": False,
        "use_cpu": True,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "num_generations": 8,
        "max_completion_length": 12,
        "num_train_epochs": 2,
        "learning_rate": 1e-3,
        "reward_weights": [0.5, 2.0],
        "report_to": ["tensorboard"],
        "logging_steps": 1,
        "log_completions": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "num_generations_eval": 4,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    judge = ScriptedJudge(tiny.revise_first)
    trainer = tiny.Watched(
        str(saved),
        reward_funcs=[by_column, asynchronous],
        train_dataset=data,
        eval_dataset=tiny.dataset(2, difficulty=[1, 2], tests=["x", "y"]),
        peft_config=copy.deepcopy(LORA),
        judge=judge,
        args=tiny.MInTRLConfig(
            **grpo_kwargs, n_control=4, max_prompt_length=16, chunk_tokens=6, engine_slots=16
        ),
    )
    trainer.train()
    assert len(trainer.updates) == 4  # two prompts an update, four prompts, two epochs
    difficulties, tests = columns[0]
    assert len(difficulties) == 16 and len(set(difficulties[:8])) == 1 and set(tests) <= set("abcd")
    rows, _ = trainer.updates[0]
    rewards = trainer.micro[0]["inputs"]
    for place, reward in zip(
        rewards["place"].tolist(), rewards["mintrl_reward"].tolist(), strict=True
    ):
        text = trainer._tokenizer.decode(rows[place].ids, skip_special_tokens=True)
        second = 0.0 if place % 5 == 0 else 2.0 * len(text) / 16
        assert reward == pytest.approx(0.5 * (difficulties[place] % 2) + second)
        assert rows[place].reward == pytest.approx(reward)
    # After steps 2 and 4, two prompts of four rows; never reviewed, with draws of their own.
    assert [[len(e), e[0].update] for e in trainer.evaluations] == [[8, -3], [8, -5]]
    assert all(not row.reviews for e in trainer.evaluations for row in e)
    assert len(trainer.logged("eval_reward")) == 2
    assert all(request.key.update >= 0 for request in judge.requests)
    assert list((tmp_path / "out").rglob("events.out.tfevents.*"))
    tables = list((tmp_path / "out" / "completions").glob("*.parquet"))
    assert tables
    assert not trainer._dataset_rows[0].keys() & {"env_mask"}
    trainer.close()


def test_logged_advantages_are_ours(tmp_path: Path) -> None:
    trainer = trained(tmp_path)
    hand = Hand(trainer)
    assert list(trainer._logs["advantages"]) == pytest.approx(
        hand.advantages(trainer.updates[0][0]), abs=1e-6
    )


def test_the_model_is_as_it_was_after_generating(tmp_path: Path) -> None:
    model = tiny.model(attention_dropout=0.3)
    trainer = tiny.trainer(tmp_path, model=model, gradient_checkpointing=True)
    modes = []
    model.model.register_forward_pre_hook(
        lambda module, _: modes.append((module.training, torch.is_grad_enabled()))
    )
    trainer._prepare_for_training(1, trainer.get_train_dataloader(), None)
    model.gradient_checkpointing_enable()
    model.train()
    model.model.norm.eval()  # a module that somebody froze stays so
    trainer.session.groups([Task("t", "1+1=")], update=0)
    assert set(modes) == {(False, False)}
    assert model.training and model.model.layers[0].training and not model.model.norm.training
    assert model.is_gradient_checkpointing
    assert torch.is_grad_enabled()
    trainer.close()


def test_a_repeated_prompt_has_rows_of_its_own(tmp_path: Path) -> None:
    data = Dataset.from_dict({"prompt": ["1=\n", "1=\n"]})
    trainer = trained(tmp_path, train_dataset=data, learning_rate=0.0, judge=None)
    rows, _ = trainer.updates[0]
    first, second = rows[:8], rows[8:]
    assert second[0].task_id == f"{first[0].task_id}#2"
    assert all(a.ids.tolist() != b.ids.tolist() for a, b in zip(first, second, strict=True))


def test_an_evaluation_in_several_batches(tmp_path: Path) -> None:
    """A prompt that comes again in another batch has draws of its own; the same evaluation again
    has the same."""
    data = Dataset.from_dict({"prompt": ["1=\n", "2=\n", "1=\n"]})
    trainer = tiny.trainer(tmp_path, eval_dataset=data, per_device_eval_batch_size=8)
    for _ in range(2):
        trainer.evaluate()
    trainer.close()
    first, again = trainer.evaluations[:3], trainer.evaluations[3:]
    texts = [[row.ids.tolist() for row in rows] for rows in first]
    assert texts == [[row.ids.tolist() for row in rows] for rows in again]
    by_prompt: dict[Any, list[Any]] = {}
    for rows, ids in zip(first, texts, strict=True):
        by_prompt.setdefault(tuple(rows[0].prompt_ids), []).append(ids)
    (repeated,) = (found for found in by_prompt.values() if len(found) == 2)
    assert repeated[0] != repeated[1]


def test_self_judge_with_the_adapter_switched_off(tmp_path: Path) -> None:
    """The policy's first version is the judge: same weights, adapter disabled, in the same pump."""
    scores: list[tuple[float, float]] = []

    def factory(host: Any) -> Any:
        base = host.engine(around=host.model.disable_adapter)
        policy = host.engine()

        class Judge:
            async def review(self, request: Any) -> Verdict:
                ids = np.concatenate([request.prompt_ids, request.accepted_ids, request.chunk_ids])
                start = len(request.prompt_ids)
                key = replace(request.key, task_id=request.key.task_id + "/judge")
                scored = [
                    float((await engine.logprobs(ids, start, key=key)).sum())
                    for engine in (base, policy)
                ]
                scores.append((scored[0], scored[1]))
                return Verdict.revise(0, "1") if scored[0] < -12 else Verdict.keep()

        return Judge(), (base, policy)

    trainer = trained(
        tmp_path, judge=factory, peft_config=LORA, max_steps=2, learning_rate=0.05, schedule="free"
    )
    n = len(scores) // 2
    assert n > 0
    assert all(base == pytest.approx(policy, abs=1e-4) for base, policy in scores[:8])
    assert any(abs(base - policy) > 1e-3 for base, policy in scores[n:])
    hand = Hand(trainer, lora=LORA)
    hand.check(0)
    hand.check(1)
    assert all(p.requires_grad == ("lora_" in n) for n, p in trainer.model.named_parameters())


def test_reward_functions_beside_a_verifier(tmp_path: Path) -> None:
    """The verifier is the first of the reward functions; the store has the sum."""
    store = RolloutStore(tmp_path / "rollouts")

    def correct(task: Task, response: str) -> float | Score:
        if "+" in response:
            return Score.undecided("unavailable")
        return float("1" in response)

    trainer = trained(
        tmp_path,
        verifier=FunctionVerifier(correct),
        reward_funcs=[lambda completions, **_: [len(c) / 10 for c in completions]],
        reward_weights=[1.0, 0.5],
        store=store,
        max_steps=2,
    )
    assert trainer.reward_func_names[0] == "verifier"
    for update, (rows, _) in enumerate(trainer.updates):
        stored, problems = store.read(update=update)
        assert not problems
        found = {(row.task_id, row.rollout): row for row in stored}
        assert len(found) == 16
        for row in rows:
            text = tiny.tokenizer().decode(row.ids, skip_special_tokens=True)
            other = found[row.task_id, row.rollout]
            assert other.ids.tolist() == row.ids.tolist()
            if "+" in text:
                assert not other.valid and math.isnan(other.reward)
            else:
                expected = float("1" in text) + 0.5 * len(text) / 10
                assert other.reward == pytest.approx(expected, abs=1e-6)
                assert other.score.status in ("correct", "wrong")


def test_store_with_reward_functions(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path / "rollouts")
    trainer = trained(
        tmp_path,
        store=store,
        run_attempt=3,
        max_steps=2,
        eval_dataset=tiny.dataset(2),
        eval_strategy="steps",
        per_device_eval_batch_size=16,
        reward_funcs=lambda completions, **_: [
            None if index == 0 else tiny.ones(None, [c])[0] for index, c in enumerate(completions)
        ],
    )
    # One file an update, and nothing of the evaluations.
    names = sorted(path.name for path in store.folder.iterdir())
    assert names == ["update-u000000.parquet", "update-u000001.parquet"]
    for update, (rows, _) in enumerate(trainer.updates):
        stored, _ = store.read(update=update)
        found = {(row.task_id, row.rollout): row for row in stored}
        for index, row in enumerate(rows):
            other = found[row.task_id, row.rollout]
            assert other.run_attempt == 3
            assert other.provenance.tolist() == row.provenance.tolist()
            assert len(other.reviews) == len(row.reviews)
            if index == 0:
                assert not other.valid and math.isnan(other.reward)
            else:
                text = tiny.tokenizer().decode(row.ids, skip_special_tokens=True)
                assert other.reward == pytest.approx(tiny.ones(None, [text])[0], abs=1e-6)
                assert other.score.status == "rewarded" and other.valid


# --- save and resume


@pytest.mark.parametrize(
    ("stop", "changes"),
    [
        pytest.param(2, {}, id="between updates"),
        pytest.param(3, {"num_iterations": 2}, id="inside an update"),
        pytest.param(
            5,
            {"train_dataset": tiny.dataset(4), "num_train_epochs": 4, "max_steps": 7},
            id="in a later epoch",
        ),
        pytest.param(2, {"peft_config": LORA}, id="LoRA"),
    ],
)
def test_resume(tmp_path: Path, stop: int, changes: dict[str, Any]) -> None:
    """Bit-equal: batches do not depend on latency, draws are keyed, the order follows the epoch."""
    settings = {
        "max_steps": 6,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": stop,
        "max_grad_norm": 1.0,
        "seed": 5,
    } | changes
    store = RolloutStore(tmp_path / "rollouts")
    whole = trained(tmp_path / "whole", store=store, **settings)
    checkpoint = tmp_path / "whole" / f"checkpoint-{stop}"

    resumed = tiny.trainer(tmp_path / "resumed", store=store, run_attempt=1, **settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    resumed.close()

    per_update = whole.num_iterations
    first = stop // per_update
    mine = [rows for rows, _ in resumed.updates]
    theirs = [rows for rows, _ in whole.updates][first:]
    assert [rows[0].update for rows in mine] == [rows[0].update for rows in theirs]
    # Each micro-batch is of the update that it was of.
    assert of_updates(resumed) == of_updates(whole)[len(whole.micro) - len(resumed.micro) :]
    inside = stop % per_update > 0
    for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert [row.task_id for row in a] == [row.task_id for row in b]
        assert all(row.run_attempt == 1 for row in a)
        # An update that was half learnt from is rolled out again, by weights that have moved since.
        if not inside:
            assert [row.ids.tolist() for row in a] == [row.ids.tolist() for row in b], index
    # Readers take the latest attempt.
    stored, _ = store.read()
    assert {row.run_attempt for row in stored if row.update >= first} == {1}
    assert {row.run_attempt for row in stored if row.update < first} <= {0}
    if not inside:
        ours, other = resumed.weights(), whole.weights()
        assert all(torch.equal(ours[name], other[name]) for name in other)
        assert resumed.logged("loss") == whole.logged("loss")


def of_updates(trainer: Any) -> list[int]:
    return [trainer.updates[int(micro["inputs"]["update"])][0][0].update for micro in trainer.micro]


def test_training_twice_starts_again(tmp_path: Path) -> None:
    trainer = tiny.trainer(tmp_path, max_steps=2, intervention_updates=1)
    trainer.train()
    trainer.train()
    trainer.close()
    assert [rows[0].update for rows, _ in trainer.updates] == [0, 1, 0, 1]
    assert [bool(rows[-1].reviews) for rows, _ in trainer.updates] == [True, False, True, False]


def test_the_update_counts_over_short_last_steps(tmp_path: Path) -> None:
    """Three updates an epoch, two a step: the epoch's last step has one."""
    settings = {
        "train_dataset": tiny.dataset(6),
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 1,
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "beta_2": 0.05,
    }
    whole = trained(tmp_path / "whole", **settings)
    assert [rows[0].update for rows, _ in whole.updates] == [0, 1, 2, 3, 4, 5]
    assert [len(step["micro"]) for step in whole.steps] == [2, 1, 2, 1]
    for index in range(4):
        Hand(whole).check(index)
    resumed = tiny.trainer(tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    resumed.close()
    assert [rows[0].update for rows, _ in resumed.updates] == [3, 4, 5]
    ours, other = resumed.weights(), whole.weights()
    assert all(torch.equal(ours[name], other[name]) for name in other)


# --- arguments that contradict one another


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing scores"):
        tiny.trainer(tmp_path, reward_funcs=None)
    with pytest.raises(UsageError, match="MInTRLConfig"):
        plain = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
        MInTRLTrainer(tiny.model(), tiny.ones, plain, tiny.dataset())
    with pytest.raises(UsageError, match="no row to review"):
        tiny.trainer(tmp_path, n_control=8)


def test_no_warning_about_what_is_used_inside(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    tiny.trainer(tmp_path)
    assert not [w for w in recwarn if "rollout_func" in str(w.message)]


def test_clip_share_is_logged(tmp_path: Path) -> None:
    trainer = trained(tmp_path, max_grad_norm=1e-6)
    assert trainer.logged("mintrl/clip_share") == [1.0]
    trainer = trained(tmp_path, max_grad_norm=1e6)
    assert trainer.logged("mintrl/clip_share") == [0.0]


@pytest.mark.parametrize(
    ("changes", "tolerance"), [({"temperature": 1.7}, 2e-5), ({"bf16": True}, 0.1)], ids=str
)
def test_the_engine_samples_what_the_trainer_scores(
    tmp_path: Path, changes: dict[str, Any], tolerance: float
) -> None:
    """Under bf16 the engine runs under the trainer's autocast, so both see one policy."""
    trainer = trained(tmp_path, per_device_train_batch_size=8, steps_per_generation=2, **changes)
    rows, _ = trainer.updates[0]
    inputs = trainer.micro[0]["inputs"]
    for place, scored in zip(inputs["place"], inputs["old_per_token_logps"], strict=True):
        row = rows[place]
        policy = row.provenance == Provenance.POLICY
        assert np.array_equal(policy, ~np.isnan(row.logprobs))
        difference = row.logprobs[policy] - scored[: len(row.ids)].float().numpy()[policy]
        assert np.abs(difference).max() < tolerance
    assert "logits_to_keep" in forward_options(trainer.session.engine.model)


def test_a_checkpoint_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").write_text("a file in the way")
    with pytest.raises(StoreError, match=r"the checkpoint after step 1 cannot be written.*resume"):
        trained(tmp_path, max_steps=1, save_strategy="steps", save_steps=1)
