"""The trainer `mintrl_sync` over veRL's own steps, with a TransferQueue and workers in this process.

What is real: the config, the agent loop, PPOTrainer's padding and balancing, its log-probs, advantage
and update steps, and the actor's loss. What stands in: TransferQueue's storage (a dictionary), the
worker group (which computes veRL's `ppo_loss` on made-up log-probs) and the model servers.
"""

from __future__ import annotations

import asyncio
import importlib.util
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("verl")
pytest.importorskip("trl")

from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo import padding_utils
from verl.trainer.ppo.v1 import get_trainer_cls, trainer_base
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass

from mintrl_env.adapters import verl_trainer
from mintrl_env.adapters.verl_trainer import MarkedManager, MintrlTrainerSync, check_config
from mintrl_env.errors import JudgeError, UsageError
from mintrl_env.store import RolloutStore
from mintrl_env.types import Kind, Outcome, Score, Task, Verdict

_SPEC = importlib.util.spec_from_file_location(
    "verl_parts", Path(__file__).with_name("verl_parts.py")
)
assert _SPEC is not None and _SPEC.loader is not None
parts = importlib.util.module_from_spec(_SPEC)
sys.modules["verl_parts"] = parts
_SPEC.loader.exec_module(parts)
tiny = parts.tiny_trl()

pytestmark = pytest.mark.verl
HF = tiny.tokenizer()
EOS = HF.eos_token_id
ROOT = Path(__file__).resolve().parent.parent


class _HoldsTwo:
    """1 where the response holds a 2, undecided where it holds a 9."""

    async def score(self, task: Task, response: str) -> Score:
        if "9" in response:
            return Score.undecided("unavailable", "no sandbox")
        return Score(float("2" in response), "correct" if "2" in response else "wrong")


class _FirstStep:
    async def review(self, request: Any) -> Verdict:
        return Verdict.revise(0, "a2") if request.review == 0 else Verdict.keep()


class _Fails:
    async def review(self, request: Any) -> Verdict:
        raise JudgeError("server", "gone")


@pytest.fixture(scope="module", autouse=True)
def _names() -> Iterator[None]:
    with parts.registered(
        verifier={"holds_two": _HoldsTwo}, judge={"first_step": _FirstStep, "fails": _Fails}
    ):
        yield


class Queue:
    """TransferQueue's key-value calls over a dictionary."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, Any]] = {}
        self.tags: dict[str, dict[str, Any]] = {}

    def kv_batch_put(
        self, keys: Any, partition_id: str, fields: Any = None, tags: Any = None, **_: Any
    ) -> Any:
        for index, key in enumerate(keys):
            if fields is not None:
                row = self.values.setdefault(key, {})
                row.update({name: self._part(value, index) for name, value in fields.items()})
            if tags is not None:
                self.tags.setdefault(key, {}).update(tags[index])
        return KVBatchMeta(
            keys=list(keys), tags=[self.tags[key] for key in keys], partition_id=partition_id
        )

    def _part(self, value: Any, index: int) -> Any:
        part = value.unbind()[index] if getattr(value, "is_nested", False) else value[index]
        return part if isinstance(part, torch.Tensor) else getattr(part, "data", part)

    def kv_batch_get(self, keys: Any, partition_id: str, select_fields: Any = None) -> TensorDict:
        rows = [self.values[key] for key in keys]
        names = [n for n in (select_fields or rows[0]) if all(n in row for row in rows)]
        made: dict[str, Any] = {}
        for name in names:
            values = [row[name] for row in rows]
            if all(isinstance(value, torch.Tensor) and value.dim() for value in values):
                made[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
            else:
                made[name] = tu.list_of_dict_to_tensordict([{"x": v} for v in values]).get("x")
        return TensorDict(made, batch_size=len(rows))

    def kv_clear(self, keys: Any, partition_id: str) -> None:
        for key in keys:
            self.values.pop(key, None)


class Workers:
    """The actor's worker group: log-probs that follow from key and place, and veRL's own loss.

    Args:
        ranks: how many share a batch.
    """

    def __init__(self, queue: Queue, config: Any, ranks: int = 1) -> None:
        self.queue, self.ranks = queue, ranks
        self._dispatch_info = {"actor": list(range(ranks))}
        self.actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
        self.losses: list[float] = []
        self.set: list[Any] = []
        self.factors: list[float] = []

    def set_loss_fn(self, loss_fn: Any) -> None:
        self.set.append(loss_fn)
        self.actor = loss_fn.keywords["config"]

    def scale_learning_rate(self, factor: float) -> None:
        self.factors.append(factor)

    def logp(self, key: str, count: int, shift: float) -> torch.Tensor:
        return -torch.arange(1, count + 1) / 10 - (sum(map(ord, key)) % 7) / 10 + shift

    def compute_log_prob(self, batch: Any) -> Any:
        whole, entropy = [], []
        for key in batch.keys:
            row = self.queue.values[key]
            own = self.logp(key, len(row["responses"]), 0.0)
            whole.append(torch.cat([torch.zeros(len(row["prompts"]) - 1), own, torch.zeros(1)]))
            entropy.append(torch.ones_like(whole[-1]))
        fields = {"log_probs": parts.ragged(whole), "entropy": parts.ragged(entropy)}
        return self.queue.kv_batch_put(
            batch.keys, batch.partition_id, TensorDict(fields, batch_size=len(batch))
        )

    def update_actor(self, batch: Any) -> Any:
        size = batch.extra_info["mini_batch_size"]
        share, per_rank = size // self.ranks, len(batch) // self.ranks
        names = ["response_mask", "loss_mask", "advantages", "old_log_probs", "rollout_is_weights"]
        for step in range(len(batch) // size):
            total = 0.0
            for rank in range(self.ranks):
                start = rank * per_rank + step * share
                keys = batch.keys[start : start + share]
                fields = self.queue.kv_batch_get(keys, batch.partition_id, names)
                lengths = [len(part) for part in fields["loss_mask"].unbind()]
                rows = [
                    SimpleNamespace(prompt_ids=self.queue.values[key]["prompts"]) for key in keys
                ]
                loss = parts.actor_loss(
                    self.actor, rows,
                    [self.logp(k, n, 0.25) for k, n in zip(keys, lengths, strict=True)],
                    fields, minibatch=size, dp_size=self.ranks,
                )  # fmt: skip
                total += float(loss) / self.ranks
            self.losses.append(total)
        metrics = {"loss": self.losses[-1:], "grad_norm": [2.0], "mfu": [0.0]}
        return {"metrics": metrics}


class Run:
    """A trainer whose rows come from agent loops over a stub server."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *overrides: str, ranks: int = 1,
        judge: str = "first_step", deferred: bool = False,
    ) -> None:  # fmt: skip
        self.config = parts.config(*overrides)
        self.queue = Queue()
        for module in (trainer_base, verl_trainer, padding_utils):
            monkeypatch.setattr(module, "tq", self.queue)
        self.trainer = MintrlTrainerSync(self.config)
        self.trainer.tokenizer = HF
        self.trainer.actor_rollout_wg = self.workers = Workers(self.queue, self.config, ranks)
        self.settings = {
            "prompts": {"chat": False},
            "episode": {
                "chunk_tokens": 4, "max_reviews": 1, "max_correction": 3, "step_delimiters": ["\n"],
            },
            "judge": {"name": judge, "guards": {}},
            "rollout": {"max_retries": 0},
            "verifier": None if deferred else {"name": "holds_two"},
        }  # fmt: skip

    def row(self, text: str, uid: str, session: int, step: int) -> None:
        """What AgentLoopWorkerTQ does with one session, by its script `text`."""

        def script(request: str, prompt: list[int], params: dict[str, Any]) -> list[int]:
            if not text:
                return []  # an aborted request
            turn = len(manager.calls) - 1
            piece = HF.encode(text, add_special_tokens=False)[4 * turn :]
            return [*piece, EOS][: params["max_tokens"]]

        manager = parts.StubManager(script, version=step - 1)
        made = parts.loop(manager, HF, self.config, **self.settings)
        task = Task(uid.replace("uid", "task"), "1+1=\n", answer="2")
        given = parts.fields(task, HF, uid=uid, session_id=session, global_steps=step)
        output = asyncio.run(made.run({"temperature": 1.0}, **given))
        if output.reward_score is None:  # RewardLoopManager's part
            output.reward_score = 1.0 if "2" in text else 0.0
            output.extra_fields["reward_extra_info"] = {
                "undecided": float("9" in text), "status": "rewarded",
            }  # fmt: skip
        field = output.as_dict()
        field.update(given)
        field["loss_mask"] = field["response_mask"]
        ids = torch.cat([field["prompts"], field["responses"]])
        field |= {
            "input_ids": ids,
            "position_ids": torch.arange(len(ids)),
            "multi_modal_inputs": {},
        }
        tag = {
            "status": "success", "prompt_len": len(field["prompts"]),
            "response_len": len(field["responses"]), "seq_len": len(ids), "global_steps": step,
            "min_global_steps": field["extra_fields"]["min_global_steps"],
            "max_global_steps": field["extra_fields"]["max_global_steps"],
        }  # fmt: skip
        self.queue.kv_batch_put(
            [f"{uid}_{session}_0"], "train", tu.list_of_dict_to_tensordict([field]), [tag]
        )

    def step(self, groups: dict[str, list[str]], step: int = 1) -> tuple[Any, dict[str, Any]]:
        """Roll out, then veRL's own steps from balancing to the actor's update."""
        self.queue.values.clear()
        self.queue.tags.clear()
        trainer, metrics = self.trainer, {}
        trainer.global_steps = step
        for uid, texts in groups.items():
            for session, text in enumerate(texts):
                self.row(text, uid, session, step)
        keys = list(self.queue.values)
        batch = KVBatchMeta(
            partition_id="train", keys=keys, tags=[self.queue.tags[key] for key in keys]
        )
        batch = trainer._balance_batch(batch, metrics)
        batch = trainer._compute_old_log_prob(batch, metrics)
        batch = trainer._compute_advantage(batch, metrics)
        batch = trainer._update_actor(batch, metrics)
        return batch, metrics

    def value(self, uid: str, session: int, name: str) -> list[float]:
        return self.queue.values[f"{uid}_{session}_0"][name].tolist()


GROUPS = {"uid0": ["1", "1+2", "3", "1+1=\n33"], "uid1": ["2", "22", "0", "3"]}


def by_hand(run: Run, groups: dict[str, list[str]], *, kappa: float | None = -0.2) -> list[float]:
    """The squares of an update's trained rows, from log-probs and the rows' provenance."""
    squares = []
    for uid, texts in groups.items():
        rewards = []
        for session in range(len(texts)):
            row = run.queue.values[f"{uid}_{session}_0"]["extra_fields"]["mintrl"]
            rewards.append(row["reward"] if row["valid"] else None)
        controls = [r for r in rewards[:2] if r is not None]
        for session, reward in enumerate(rewards):
            if reward is None or not controls:
                continue
            key = f"{uid}_{session}_0"
            row = run.queue.values[key]["extra_fields"]["mintrl"]
            count = len(row["ids"])
            old, new = (run.workers.logp(key, count, shift) for shift in (0.0, 0.25))
            anchor = [
                kappa if who == 1 and kappa is not None else float(o)
                for who, o in zip(row["provenance"], old, strict=True)
            ]
            ratio = sum(float(n) - a for n, a in zip(new, anchor, strict=True))
            squares.append((1e-3 * ratio - (reward - sum(controls) / len(controls))) ** 2)
    return squares


@pytest.mark.parametrize("variant", ["const", "proxy"])
def test_an_update(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    run = Run(monkeypatch, f"+actor_rollout_ref.actor.policy_loss.variant={variant}")
    batch, metrics = run.step(GROUPS)
    assert len(batch) == 8
    squares = by_hand(run, GROUPS, kappa=-0.2 if variant == "const" else None)
    assert len(squares) == 8
    assert run.workers.losses == pytest.approx([sum(squares) / 8], rel=1e-5)
    # V of the first group is 0.5 (one of two controls), of the second 1; reviewed rows wrote "a2".
    assert run.value("uid0", 0, "advantages") == [-0.5, -0.5]
    assert set(run.value("uid0", 1, "advantages")) == {0.5}
    assert set(run.value("uid0", 2, "advantages")) == {0.5}
    assert set(run.value("uid1", 3, "advantages")) == {0.0}
    first = run.value("uid0", 2, "old_log_probs")
    assert (first[:2] == pytest.approx([-0.2, -0.2])) is (variant == "const")
    assert metrics["mintrl/trained_rows"] == 8 and metrics["mintrl/revises"] == 4
    assert metrics["mintrl/reviews"] == 4 and metrics["mintrl/rows_missing"] == 0
    assert metrics["mintrl/intervention_phase"] == 1.0
    assert metrics["mintrl/clip_share"] == 1.0  # a norm of 2 at the default clip of 1
    assert metrics["actor/entropy"] == pytest.approx(1.0)


def test_padding_and_rows_that_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three ranks, so that veRL pads; a group without a valid control, and an undecided row."""
    groups = {"uid0": ["9", "", "3", "3"], "uid1": ["2", "0", "9", "3"]}
    run = Run(
        monkeypatch, "actor_rollout_ref.actor.ppo_mini_batch_size=3", ranks=3,
    )  # fmt: skip
    batch, metrics = run.step(groups)
    assert len(batch) == 12 and sum(tag.get("is_padding", False) for tag in batch.tags) == 4
    squares = by_hand(run, groups)
    assert len(squares) == 4 and run.workers.losses == pytest.approx([sum(squares) / 4], rel=1e-5)
    assert metrics["mintrl/groups/without_control"] == 1
    assert metrics["mintrl/groups/no_valid_control"] == 1
    assert metrics["mintrl/rows"] == 8 and metrics["mintrl/trained_rows"] == 4
    assert metrics["mintrl/rows_not_valid"] == 2  # undecided, and aborted; "a2" has no 9 in it
    for session in range(4):
        assert not any(run.value("uid0", session, "response_mask"))
    assert not torch.isnan(run.queue.values["uid0_2_0"]["advantages"]).any()


def test_several_minibatches_on_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, "actor_rollout_ref.actor.ppo_mini_batch_size=1", ranks=2)
    groups = {"uid0": ["1", "9", "3", "1"], "uid1": ["2", "0", "9", "3"]}
    batch, _ = run.step(groups)
    assert len(run.workers.losses) == 2
    per_key = dict(
        zip(
            [k for k in (f"{u}_{s}_0" for u in groups for s in range(4)) if k != "uid0_1_0"],
            by_hand(run, groups),
            strict=True,
        )
    )
    for step, loss in enumerate(run.workers.losses):
        keys = [k for rank in (0, 1) for k in batch.keys[rank * 4 + step * 2 :][:2]]
        squares = [per_key[k] for k in keys if k in per_key]
        assert loss == pytest.approx(sum(squares) / len(squares), rel=1e-5)


def test_scores_of_verls_reward_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deferred scores are read from rm_scores; `undecided` of verl_score leaves a row out."""
    run = Run(monkeypatch, deferred=True)
    _, metrics = run.step({"uid0": ["2", "9", "2", "3"], "uid1": ["3", "3", "3", "2"]})
    assert metrics["mintrl/trained_rows"] == 7 and metrics["mintrl/undecided_rows"] == 1
    assert set(run.value("uid0", 3, "advantages")) == {-1.0}
    assert set(run.value("uid1", 3, "advantages")) == {1.0}
    assert not any(run.value("uid0", 1, "response_mask"))


def test_the_switch_to_grpo_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    for step in (1, 3):
        _, metrics = run.step(GROUPS, step)
        assert metrics["mintrl/intervention_phase"] == 1.0 and not run.workers.set
    _, metrics = run.step(GROUPS, 4)  # update 3 is the first of GRPO
    assert metrics["mintrl/intervention_phase"] == 0.0 and metrics["mintrl/reviews"] == 0
    (loss,) = run.workers.set
    actor = loss.keywords["config"]
    assert actor.policy_loss.loss_mode == "vanilla" and actor.loss_agg_mode == "token-mean"
    row = run.queue.values["uid0_3_0"]
    assert "rollout_is_weights" not in row and row["extra_fields"]["mintrl"]["kind"] == "control"
    # Rewards 0, 1, 0, 0: one in four, standard deviation 0.5.
    (advantage,) = set(run.value("uid0", 1, "advantages"))
    assert advantage == pytest.approx(0.75 / 0.5001, rel=1e-5)
    # vanilla at a ratio of exp(0.25), over the update's tokens.
    rows = [run.queue.values[f"{u}_{s}_0"] for u in GROUPS for s in range(4)]
    ratio, total, tokens = math.exp(0.25), 0.0, 0
    for row in rows:
        for advantage in row["advantages"].tolist():
            total -= min(ratio * advantage, min(ratio, 1.2) * advantage)
            tokens += 1
    assert run.workers.losses[-1] == pytest.approx(total / tokens, rel=1e-5)
    run.step(GROUPS, 5)
    assert len(run.workers.set) == 1  # set once


def test_the_learning_rate_rises_again_at_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates 3, 4 and 5 are the first of GRPO; a resumed run is where it was."""
    rewarm = "+actor_rollout_ref.actor.policy_loss.rewarm_updates=3"
    run = Run(monkeypatch, rewarm)
    logged = [run.step(GROUPS, step)[1]["mintrl/lr_factor"] for step in range(3, 8)]
    assert logged == pytest.approx([1.0, 1 / 3, 2 / 3, 1.0, 1.0])
    assert run.workers.factors == pytest.approx([1 / 3, 2 / 3])
    resumed = Run(monkeypatch, rewarm)
    resumed.step(GROUPS, 5)
    assert resumed.workers.factors == pytest.approx([2 / 3])


def test_a_run_that_starts_behind_the_switch_sets_the_loss_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(monkeypatch, "actor_rollout_ref.actor.policy_loss.intervention_updates=0")
    run.step(GROUPS, 1)
    assert len(run.workers.set) == 1


def test_a_judge_that_fails_too_often_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, "+actor_rollout_ref.actor.policy_loss.min_reviews=4", judge="fails")
    with pytest.raises(JudgeError, match="4 of 4 reviews failed"):
        run.step(GROUPS)


def test_the_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = Run(monkeypatch, f"+actor_rollout_ref.actor.policy_loss.store={tmp_path}")
    run.step(GROUPS)
    rows, problems = RolloutStore(tmp_path).read()
    assert not problems and len(rows) == 8
    assert {row.task_id for row in rows} == {"task0", "task1"}
    reviewed = [row for row in rows if row.kind is Kind.INTERVENED]
    assert len(reviewed) == 4
    assert all(row.reviews[0].outcome is Outcome.REVISE for row in reviewed)
    assert all(row.score.decided for row in rows)
    # A resumed run comes to the update again: its rows win whole.
    assert {row.run_attempt for row in rows} == {0}
    run.step(GROUPS)
    rows, _ = RolloutStore(tmp_path).read()
    assert len(rows) == 8 and {row.run_attempt for row in rows} == {1}


def test_rows_of_another_agent_loop_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    run.step(GROUPS)
    with pytest.raises(UsageError, match="default_agent_loop"):
        verl_trainer.trajectories([{"turn_scores": []}], [0.0])


def test_rows_whose_loop_raised_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    _, metrics = run.step({"uid0": ["1", "2", "3"], "uid1": ["1", "2", "3", "3"]})
    assert metrics["mintrl/rows_missing"] == 1 and metrics["mintrl/trained_rows"] == 7


# --- validation, config, registration


def test_each_batch_says_whether_it_is_a_validations() -> None:
    seen = []
    manager = MarkedManager(
        SimpleNamespace(generate_sequences=lambda batch: seen.append(batch), extra="kept")
    )
    for validate in (None, True):
        batch = tu.get_tensordict({"uid": ["a", "b"]})
        if validate is not None:
            tu.assign_non_tensor_data(batch, "validate", validate)
        manager.generate_sequences(batch)
    assert [batch["mintrl_validate"] for batch in seen] == [False, True]
    assert manager.extra == "kept"


def test_the_trainer_is_registered_and_takes_verls_sync_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert get_trainer_cls("mintrl_sync") is MintrlTrainerSync
    run = Run(monkeypatch)
    assert run.trainer.trainer_mode == "sync"
    assert type(run.trainer.replay_buffer).__name__ == "ReplayBuffer"


@pytest.mark.parametrize(
    "override",
    [
        "algorithm.use_kl_in_reward=True",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        "actor_rollout_ref.rollout.top_p=0.9",
        "algorithm.rollout_correction.bypass_mode=True",
        "algorithm.adv_estimator=gae",
        "actor_rollout_ref.actor.policy_loss.n_control=5",
    ],
)
def test_settings_that_are_refused(override: str) -> None:
    key = override.partition("=")[0].rpartition(".")[2]
    with pytest.raises(UsageError, match=key):
        check_config(parts.config(override))
    check_config(parts.config())


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        check_config(
            parts.config("actor_rollout_ref.rollout.top_p=0.9", "actor_rollout_ref.rollout.top_k=5")
        )
    assert "top_p=0.9" in str(caught.value) and "top_k=5" in str(caught.value)
    with pytest.raises(UsageError, match=r"policy_loss\._target_"):
        check_config(
            parts.config(
                "actor_rollout_ref.actor.policy_loss._target_=verl.workers.config.PolicyLossConfig"
            )
        )


def in_a_process(folder: Path, code: str) -> Any:
    """Python with `folder` (and the tree) on its path: a plug-in's entry point, as pip installs it."""
    info = folder / "planted-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[verl.plugins]\nmintrl = mintrl_env.adapters.verl_plugin\n"
    )
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(folder)!r}, {str(ROOT)!r}]\n{code}"],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def test_the_entry_point_registers_in_a_new_process(tmp_path: Path) -> None:
    done = in_a_process(
        tmp_path,
        "import verl\n"
        "from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn\n"
        "from verl.trainer.ppo.v1 import get_trainer_cls\n"
        "print(get_policy_loss_fn('mintrl').__module__, get_trainer_cls('mintrl_sync').__name__)\n"
        "get_adv_estimator_fn('mintrl')",
    )
    assert done.returncode == 0, done.stderr
    assert "mintrl_env.adapters.verl_plugin MintrlTrainerSync" in done.stdout


@pytest.mark.parametrize("module", ["verl_agent_loop", "verl_loss", "verl_worker"])
def test_any_of_our_modules_may_be_the_first(tmp_path: Path, module: str) -> None:
    """It imports veRL, which imports the plug-in before the module is whole."""
    done = in_a_process(
        tmp_path,
        f"import mintrl_env.adapters.{module}\n"
        "from verl.trainer.ppo.core_algos import get_policy_loss_fn\n"
        "from verl.trainer.ppo.v1 import get_trainer_cls\n"
        "print(get_policy_loss_fn('mintrl').__name__, get_trainer_cls('mintrl_sync').__name__)",
    )
    assert done.returncode == 0, done.stderr
    assert "MintrlTrainerSync" in done.stdout and "could not be registered" not in done.stderr


def test_a_registration_that_fails_is_loud(tmp_path: Path) -> None:
    done = in_a_process(
        tmp_path,
        "import importlib.metadata as m\n"
        "known = m.version\n"
        "m.version = lambda name: '0.12.0' if name == 'verl' else known(name)\n"
        "import verl\n"
        "from verl.trainer.ppo.core_algos import get_policy_loss_fn\n"
        "get_policy_loss_fn('mintrl')",
    )
    assert "veRL 0.12.0 is installed" in done.stderr  # veRL itself has swallowed it
    assert "Unsupported loss mode: mintrl" in done.stderr and done.returncode == 1
