"""The command that `mintrl verl-command` makes: read back by veRL's own config, and run on the CPU.

The run is veRL's `main_ppo` with all that belongs to it (Ray, TransferQueue, an FSDP2 actor, agent
loops, replay buffer, checkpoints), a judge behind HTTP, and model servers that sample from the
weights that the actor sends; what stands in is vLLM and the GPU (see verl_cpu.py).
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
pytest.importorskip("trl")
pytest.importorskip("openai")

import torch
import verl
import yaml
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM
from verl.utils.config import validate_config

from mintrl_env.adapters.verl_start import loop_settings
from mintrl_env.adapters.verl_trainer import check_config, loss_settings
from mintrl_env.config import RunConfig, parse_config
from mintrl_env.store import RolloutStore
from mintrl_env.types import Kind, Outcome
from mintrl_env.verl_overrides import Place, _hydra, verl_launch


def module(name: str) -> Any:
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


parts = module("verl_parts")
fake = module("fake_llm_server")
tiny = parts.tiny_trl()
ROOT = Path(__file__).resolve().parent.parent

pytestmark = [pytest.mark.verl, pytest.mark.timeout(900)]
LIMIT_S = 400


def read_back(overrides: list[str]) -> Any:
    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        return compose("ppo_trainer", overrides=overrides)


CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
DATA: dict[str, Any] = {
    "method": "mintrl-const",
    "policy": {
        "path": "/models/my student", "dtype": "bfloat16", "max_prompt": 64,
        "chat_template_kwargs": {"enable_thinking": False},
        "system_prompt": "Answer in {braces}, $x$ and 'quotes'.\nThink: 1, 2.",
    },
    "tasks": {"path": "/data/t.jsonl", "verifier_options": {"timeout_s": 3}},
    "evaluation": {"tasks": {"path": "/data/e.jsonl", "verifier_options": {"timeout_s": 3}},
                   "n": 4, "every": 5},
    "episode": {"chunk_tokens": 12, "max_reviews": 3, "max_correction": 5, "max_response": 96,
                "step_delimiters": ["\n", "```"], "spacing": 2},
    "rollout": {"n_control": 3, "n_intervened": 5, "temperature": 0.8, "deadline_s": 77.0,
                "max_retries": 2, "verifier_concurrent": 5},
    "judge": {"name": "llm", "options": {"url": "http://judge:8000/v1", "model": "j"},
              "guards": {"leak": {"ngram": 7}}, "on_failure": "drop", "max_failure_rate": 0.3,
              "concurrent": 24},
    "objective": {"kappa": -0.15, "beta_1": 2.5, "beta_2": 0.01, "baseline": "loo",
                  "loss_scale": "matched", "intervention_updates": 11, "rewarm_updates": 4},
    "train": {"updates": 17, "prompts_per_update": 8, "minibatches": 2, "micro_batch": 4,
              "learning_rate": 3e-6, "warmup_steps": 6, "weight_decay": 0.02, "max_grad_norm": 0.7,
              "seed": 9, "gradient_checkpointing": True, "checkpoint_every": 3,
              "keep_checkpoints": 4, "report_to": ["tensorboard"]},
}  # fmt: skip


def test_veRL_reads_what_the_config_says(tmp_path: Path) -> None:
    place = Place(tmp_path / "run here", gpus=2, nodes=2, tensor_parallel=2)
    made = read_back(verl_launch(parse_config(DATA, "test"), place).overrides)
    check_config(made)
    actor, rollout = made.actor_rollout_ref.actor, made.actor_rollout_ref.rollout
    expected: dict[str, tuple[Any, Any]] = {
        "model": (made.actor_rollout_ref.model.path, "/models/my student"),
        "checkpointing": (made.actor_rollout_ref.model.enable_gradient_checkpointing, True),
        "dtype": (actor.fsdp_config.model_dtype, "bf16"),
        "prompt": (rollout.prompt_length, 64),
        "response": (rollout.response_length, 96),
        "n": (rollout.n, 8),
        "temperature": (rollout.temperature, 0.8),
        "parallel": (rollout.tensor_model_parallel_size, 2),
        "gpus": ((made.trainer.n_gpus_per_node, made.trainer.nnodes), (2, 2)),
        "batch": (made.data.train_batch_size, 8),
        "minibatch": (actor.ppo_mini_batch_size, 4),
        # 32 rows of a minibatch on 4 GPUs: 8 each, in forwards of 4.
        "micro": (actor.ppo_micro_batch_size_per_gpu, 4),
        "files": ((made.data.train_files, made.data.val_files),
                  (str(place.train_file), str(place.val_file))),
        "val": ((rollout.val_kwargs.n, rollout.val_kwargs.temperature, rollout.val_kwargs.do_sample),
                (4, 0.8, True)),
        "lr": (actor.optim.lr, 3e-6),
        "warm-up": (actor.optim.lr_warmup_steps, 3),
        "decay": (actor.optim.weight_decay, 0.02),
        "clip": (actor.optim.clip_grad, 0.7),
        "steps": ((made.trainer.total_training_steps, made.trainer.test_freq,
                   made.trainer.save_freq), (17, 5, 3)),
        "keep": (made.trainer.max_actor_ckpt_to_keep, 4),
        "seeds": ((made.data.seed, rollout.seed, actor.fsdp_config.seed), (9, 9, 9)),
        "logger": (list(made.trainer.logger), ["console", "tensorboard"]),
        "plug-in": (made.ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES,
                    "mintrl_env.adapters.verl_plugin"),
    }  # fmt: skip
    assert {k: v[0] for k, v in expected.items()} == {k: v[1] for k, v in expected.items()}
    loss = loss_settings(made)
    assert (loss.variant, loss.kappa, loss.beta_1, loss.beta_2) == ("const", -0.15, 2.5, 0.01)
    assert (loss.baseline, loss.loss_scale, loss.n_control) == ("loo", "matched", 3)
    assert (loss.intervention_updates, loss.rewarm_updates) == (11, 4)
    assert loss.max_failure_rate == 0.3 and loss.store == str(place.folder / "rollouts")


def test_a_whole_launch_passes_verls_own_checks(tmp_path: Path) -> None:
    """Also GRPO, Proxy, beta_1 at infinity, and a LoRA adapter."""
    for changes in (
        {"method": "grpo"},
        {"method": "mintrl-proxy", "objective": {}},
        {"policy": {"path": "/m", "lora": {"target_modules": ["q_proj"]}}},
    ):
        made = read_back(
            verl_launch(
                parse_config({**DATA, **changes}, "test"), Place(tmp_path, gpus=2)
            ).overrides
        )
        check_config(made)
        if "lora" not in str(changes):  # veRL asks vLLM for the ranks that it takes
            validate_config(made, use_reference_policy=False, use_critic=False)
        assert loss_settings(made).variant == (
            "proxy" if changes.get("method") == "mintrl-proxy" else "const"
        )


def test_the_agent_loop_is_made_from_the_file(tmp_path: Path) -> None:
    """Through OmegaConf and hydra, as veRL makes it: braces, line ends and quotes survive."""
    place = Place(tmp_path, gpus=1)
    launch = verl_launch(parse_config(DATA, "test"), place)
    place.agent_file.write_text(yaml.safe_dump([launch.agent], sort_keys=False))
    made = read_back(launch.overrides)
    (entry,) = OmegaConf.load(place.agent_file)
    manager = parts.StubManager(lambda *_: [])
    loop = instantiate(
        entry, trainer_config=parts.DictConfigWrap(made), server_manager=manager,
        tokenizer=tiny.tokenizer(chat_template=CHAT), processor=None, dataset_cls=None,
        data_config=parts.DictConfigWrap(made.data),
    )  # fmt: skip
    settings = loop.settings
    assert settings == loop_settings(made)  # what the trainer looks at before step 1
    assert settings.prompts["system_prompt"] == DATA["policy"]["system_prompt"]
    assert settings.prompts["chat_template_kwargs"] == {"enable_thinking": False}
    assert settings.episode == {
        k: v for k, v in DATA["episode"].items() if k != "max_response"
    }  # fmt: skip
    assert settings.judge is not None and settings.judge["guards"] == {"leak": {"ngram": 7}}
    assert settings.rollout == {
        "deadline_s": 77.0, "max_retries": 2, "verifier_concurrency": 5, "on_judge_failure": "drop",
        "judge_concurrency": 3,
    }  # fmt: skip
    assert settings.verifier == {"name": "task", "options": {"timeout_s": 3}}
    assert loop.limits.n_control == 3 and loop.limits.group_size == 8


@pytest.mark.parametrize(
    "value",
    ["a b", "it's", "1e-3", "null", "a,b", "", "end\\", "a\\'b", 'say "x"', "[x]", "{a: b}", "é",
     "~/x", "a=b", "true", "-1", "_x", "x:y", 1e-6, float("inf"), True, None, [1, "a b"], ["c,d"]],
)  # fmt: skip
def test_values_come_back_from_hydra_as_they_were(value: Any) -> None:
    made = read_back([f"+some.key={_hydra(value)}"])
    found = made.some.key
    assert (OmegaConf.to_container(found) if OmegaConf.is_config(found) else found) == value


# --- a run


CPU = [
    "actor_rollout_ref.rollout.name=transformers_cpu",
    "trainer.device=cpu",
    "trainer.logger=[file]",
    "ray_kwargs.ray_init.num_cpus=16",
    "+ray_kwargs.ray_init.num_gpus=1",
    "+ray_kwargs.ray_init.include_dashboard=False",
    "ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES="
    "'verl_cpu,mintrl_env.adapters.verl_plugin'",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
    "data.dataloader_num_workers=0",
    "actor_rollout_ref.rollout.agent.num_workers=1",
    "actor_rollout_ref.rollout.free_cache_engine=False",
    "+actor_rollout_ref.model.override_config.attn_implementation=eager",
    "actor_rollout_ref.model.use_remove_padding=False",
    "actor_rollout_ref.actor.use_torch_compile=False",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
]
REVISE = json.dumps({"reason": "r", "verdict": "revise", "step": 1, "correction": "a2"})


def judge(body: Any) -> str:
    if "verdict" in json.dumps(body.get("response_format") or {}):
        return REVISE
    return f"On {body['messages'][-1]['content'][:12]}"


def run_config(folder: Path, url: str) -> RunConfig:
    tiny.tokenizer().save_pretrained(folder / "model")
    tiny.model().save_pretrained(folder / "model")
    (folder / "tasks.jsonl").write_text(
        "".join(
            json.dumps({"task_id": f"t{i}", "prompt": f"{i}+1=?\n", "answer": str(i + 1)}) + "\n"
            for i in range(4)
        )
    )
    return parse_config(
        {
            "method": "mintrl-const",
            "policy": {"path": str(folder / "model"), "chat": False, "max_prompt": 32},
            "tasks": {"path": str(folder / "tasks.jsonl"), "verifier": "verl_cpu_server:OddLength"},
            "episode": {"chunk_tokens": 6, "max_reviews": 2, "max_correction": 3,
                        "max_response": 16, "step_delimiters": ["\n"]},
            "rollout": {"n_control": 2, "n_intervened": 2, "deadline_s": 120.0},
            "judge": {"name": "llm", "options": {"url": url, "model": "toy", "mode": "one-call"},
                      "guards": {}},
            "objective": {"intervention_updates": 1, "rewarm_updates": 4},
            "train": {"updates": 2, "prompts_per_update": 2, "micro_batch": 2,
                      "learning_rate": 1e-2, "checkpoint_every": 1},
        },
        "test",
    )  # fmt: skip


def launched(folder: Path, name: str, *words: str) -> list[dict[str, Any]]:
    """`mintrl verl-command --run` to its end; a row of figures an update. Killed at the limit."""
    log, figures = folder / f"{name}.log", folder / f"{name}.jsonl"
    extra = [word for override in CPU for word in ("--verl", override)]
    command = [sys.executable, "-m", "mintrl_env.cli", "verl-command", "c.yaml", "--gpus", "1",
               "--out", "run", "--run", *words, *extra]  # fmt: skip
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda",
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu,mintrl_env.adapters.verl_plugin",
        "VERL_FILE_LOGGER_PATH": str(figures),
    }  # fmt: skip
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=file, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"still running after {LIMIT_S} s; its log ends\n{log.read_text()[-3000:]}")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert status == 0, log.read_text()[-6000:]
    return [json.loads(line) for line in figures.read_text().splitlines()]


@dataclass
class Ran:
    folder: Path
    first: list[dict[str, Any]]
    resumed: list[dict[str, Any]]
    judge_calls: int
    log: str


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """Two updates, the switch between them; then a third from the checkpoint, with no judge there."""
    from mintrl_env.config import dump_config

    folder = tmp_path_factory.mktemp("launch")
    with fake.FakeServer() as server:
        server.structured, server.chat = set(), judge
        (folder / "c.yaml").write_text(dump_config(run_config(folder, server.url)))
        first = launched(folder, "first")
        calls = len(server.posts)
    resumed = launched(folder, "resumed", "--set", "train.updates=3")
    yield Ran(folder, first, resumed, calls, (folder / "first.log").read_text())


def test_both_phases_ran(ran: Ran) -> None:
    assert [row["step"] for row in ran.first] == [1, 2]
    reviewed, grpo = (row["data"] for row in ran.first)
    assert reviewed["mintrl/intervention_phase"] == 1.0 and grpo["mintrl/intervention_phase"] == 0.0
    assert reviewed["mintrl/reviews"] == reviewed["mintrl/revises"] == 8.0  # two of each of 4 rows
    assert reviewed["mintrl/reviews_failed"] == 0.0 and grpo["mintrl/reviews"] == 0.0
    assert reviewed["mintrl/trained_rows"] == 8.0 and reviewed["mintrl/rows_missing"] == 0.0
    assert reviewed["mintrl/off_policy_fraction/intervened"] > 0
    assert reviewed["actor/grad_norm"] > 0
    for data in (reviewed, grpo):
        assert data["training/off_policy/trajectory_staleness/mean"] == 0.0


def test_the_judge_was_asked_before_step_1(ran: Ran) -> None:
    assert "the judge's server:" in ran.log and "generates  yes" in ran.log
    assert ran.log.index("generates  yes") < ran.log.index("Training Progress")
    assert ran.judge_calls > 8


def test_the_learning_rate_rises_again_and_a_resumed_run_goes_on_with_it(ran: Ran) -> None:
    factors = [row["data"]["mintrl/lr_factor"] for row in [*ran.first, *ran.resumed]]
    assert factors == [1.0, 0.25, 0.5]


def test_the_run_was_resumed(ran: Ran) -> None:
    """One update more, with no judge to be reached: behind the switch nobody asks it."""
    (row,) = ran.resumed
    assert row["step"] == 3 and row["data"]["mintrl/intervention_phase"] == 0.0


def test_each_update_was_written_by_the_weights_before_it(ran: Ran) -> None:
    store, hf = RolloutStore(ran.folder / "run" / "rollouts"), tiny.tokenizer()
    for update in range(3):
        rows, problems = store.read(update=update)
        assert not problems and len(rows) == 8
        for row in rows:
            assert set(row.policy_versions.tolist()) == {update}
            text = hf.decode(row.ids).removesuffix(hf.eos_token)
            assert row.reward == len(text) % 2, text
            if update == 0 and row.kind is Kind.INTERVENED:
                assert [r.outcome for r in row.reviews] == [Outcome.REVISE] * 2
            else:
                assert row.kind is Kind.CONTROL and not row.reviews


def test_the_run_is_exported(ran: Ran) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mintrl_env.cli", "export", "run", "exported"],
        cwd=ran.folder, capture_output=True, text=True, timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    made, first = (
        AutoModelForCausalLM.from_pretrained(ran.folder / name, dtype=torch.float32).state_dict()
        for name in ("exported", "model")
    )
    assert set(made) == set(first)
    moved = max(float((made[name] - first[name]).abs().max()) for name in made)
    assert 5e-3 < moved < 0.1  # steps of at most 1e-2, three of them, and bfloat16's rounding
