"""`mintrl verl-command` without veRL: what each key becomes, what is refused, what is written.

test_verl_launch.py reads the overrides back through veRL's own config, and runs them.
"""

from __future__ import annotations

import json
import math
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from mintrl_env import verl_command
from mintrl_env.config import RunConfig, apply_override, load_config, parse_config
from mintrl_env.errors import ConfigError, MissingExtraError
from mintrl_env.verl_overrides import Launch, Place, verl_launch, verl_overrides

PLACE = Place(Path("/runs/x"), gpus=2)
BASE: dict[str, Any] = {
    "method": "mintrl-const",
    "policy": {"path": "/models/student", "lora": {"target_modules": ["q_proj", "v_proj"]}},
    "tasks": {"path": "/data/train.jsonl"},
    "evaluation": {"tasks": {"path": "/data/test.jsonl"}, "n": 4, "every": 10},
    "episode": {"step_delimiters": ["\n\n", "```"]},
    "rollout": {"engine": "vllm", "engine_options": {"memory": 0.6}},
    "judge": {
        "name": "llm",
        "options": {
            "url": "http://judge:8000/v1", "model": "j",
            "prices": {"prompt": 0.1, "completion": 0.4},
            "limits": {"concurrent": 32, "rpm": 600, "tokens": 10**6, "usd": 4.0},
        },
        "guards": {"leak": {"ngram": 8}},
    },
    "train": {"updates": 40, "prompts_per_update": 8, "minibatches": 2, "micro_batch": 16},
}  # fmt: skip

# A change of each key, alone or with what it needs. IN_FILES: it decides what is in the tasks' files.
IN_FILES = "in the tasks' files, or elsewhere"
CHANGES: dict[str, Any] = {
    "method": {"method": "mintrl-proxy"},
    "policy.path": "/models/other",
    "policy.dtype": "bfloat16",
    "policy.lora.r": 8,
    "policy.lora.alpha": 8,
    "policy.lora.dropout": 0.1,
    "policy.lora.target_modules": "all-linear",
    "policy.chat": None,
    "policy.chat_template_kwargs": {"enable_thinking": False},
    "policy.system_prompt": "Think.",
    "policy.prompt_template": "{problem}!",
    "policy.max_prompt": 99,
    "tasks.verifier_options": {
        "tasks.verifier_options": {"timeout_s": 3},
        "evaluation.tasks.verifier_options": {"timeout_s": 3},
    },
    "evaluation.tasks.verifier_options": IN_FILES,  # those of `tasks`, or the config is refused
    "evaluation.n": 5,
    "evaluation.before": False,
    "evaluation.after": {"evaluation.after": False, "evaluation.every": 0},
    "evaluation.every": 7,
    "probe": {"probe": {"tasks": {"path": "/data/probe.jsonl"}}},
    "episode.chunk_tokens": 9,
    "episode.max_reviews": 9,
    "episode.max_correction": 9,
    "episode.max_response": 99,
    "episode.step_delimiters": ["\n"],
    "episode.spacing": 9,
    "rollout.n_control": {"rollout.n_control": 6, "rollout.n_intervened": 10},
    "rollout.n_intervened": 24,
    "rollout.temperature": 0.7,
    "rollout.deadline_s": 60.0,
    "rollout.max_retries": 3,
    "rollout.verifier_concurrent": 5,
    "rollout.slots": 7,
    "rollout.schedule": {
        "rollout.schedule": "rounds", "rollout.engine": "transformers", "rollout.engine_options": {},
    },
    "rollout.engine": IN_FILES,  # see test_the_engine_is_verls_own
    "rollout.engine_options": {"memory": 0.3, "max_num_batched_tokens": 4096},
    "judge.name": "keep",
    "judge.path": "/models/judge",
    "judge.options": {"url": "http://other:8000/v1", "model": "j"},
    "judge.guards": {},
    "judge.on_failure": "drop",
    "judge.max_failure_rate": 0.1,
    "judge.concurrent": 16,
    "objective.kappa": -0.1,
    "objective.beta_1": 2.0,
    "objective.beta_2": 0.5,
    "objective.baseline": "loo",
    "objective.loss_scale": "matched",
    "objective.intervention_updates": 3,
    "objective.rewarm_updates": 3,
    "train.updates": 41,
    "train.prompts_per_update": 16,
    "train.minibatches": 1,
    "train.iterations": 2,
    "train.micro_batch": 8,
    "train.learning_rate": 1e-5,
    "train.warmup_steps": 4,
    "train.weight_decay": 0.1,
    "train.max_grad_norm": 0.5,
    "train.seed": 7,
    "train.threads": 3,
    "train.gradient_checkpointing": True,
    "train.checkpoint_every": 5,
    "train.keep_checkpoints": 5,
    "train.report_to": ["tensorboard"],
    **dict.fromkeys(
        [f"preflight.{name}" for name in (
            "before_training", "tasks", "corrections", "samples", "min_parse_rate", "max_leaks",
            "min_decided", "min_finished",
        )],
        IN_FILES,
    ),
    "warmup": IN_FILES,  # of the models that policy.path names
}  # fmt: skip


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The keys of a config, sections walked through, the optional ones too."""
    for name, field in model.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        section = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), None)
        if section is not None and name != "probe":  # refused as a whole
            yield from leaves(section, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def config(**changes: Any) -> RunConfig:
    data: dict[str, Any] = yaml.safe_load(yaml.safe_dump(BASE))
    for key, value in changes.items():
        apply_override(data, f"{key}={json.dumps(value)}")  # JSON is YAML
    return parse_config(data, "test")


def values(launch: Launch) -> dict[str, str]:
    return dict(override.split("=", 1) for override in launch.overrides)


def test_each_key_of_a_config_is_accounted_for() -> None:
    """A new key belongs into CHANGES, with what veRL makes of it."""
    files = ("tasks.", "evaluation.tasks.")  # what `recipes.load_task_set` reads
    keys = {
        key
        for key in leaves(RunConfig)
        if not key.startswith(files) or key.endswith(".verifier_options")
    }
    assert keys == set(CHANGES)


@pytest.mark.parametrize("key", [key for key, change in CHANGES.items() if change is not IN_FILES])
def test_no_key_is_dropped_without_a_word(key: str) -> None:
    """Another value makes another launch, or is refused by its name, or is named as not used."""
    base = verl_launch(config(), PLACE)
    change = CHANGES[key]
    named = isinstance(change, dict) and key in change
    try:
        other = verl_launch(config(**(change if named else {key: change})), PLACE)
    except ConfigError as error:
        assert f"\n  {key}: " in str(error)
        return
    if (other.overrides, other.agent) == (base.overrides, base.agent):
        assert key in base.unused
    else:
        assert key not in base.unused


def test_the_engine_is_verls_own() -> None:
    none = {"rollout.engine_options": {}}
    vllm = verl_launch(config(**none), PLACE)
    embedded = verl_launch(config(**none, **{"rollout.engine": "transformers"}), PLACE)
    assert (embedded.overrides, embedded.agent) == (vllm.overrides, vllm.agent)
    assert "rollout.engine" in vllm.unused and "rollout.engine" in embedded.unused


def test_the_preflight_is_named_as_not_used() -> None:
    assert "mintrl preflight" in verl_launch(config(), PLACE).unused["preflight"]


def test_values_that_are_not_just_copied() -> None:
    found = values(verl_launch(config(), PLACE))
    loss = "+actor_rollout_ref.actor.policy_loss."
    expected = {
        "actor_rollout_ref.rollout.n": "16",
        "actor_rollout_ref.actor.ppo_mini_batch_size": "4",  # prompts of 2 minibatches of 8
        # 64 rows of a minibatch on 2 GPUs are 32 each, in forwards of 16.
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "16",
        "actor_rollout_ref.rollout.gpu_memory_utilization": "0.6",
        "actor_rollout_ref.model.target_modules": "[q_proj,v_proj]",
        "actor_rollout_ref.rollout.load_format": "safetensors",
        "trainer.test_freq": "10",
        "trainer.save_freq": "50",
        "trainer.logger": "[console]",
        f"{loss}beta_1": "inf",
        f"{loss}variant": "const",
        f"{loss}store": "/runs/x/rollouts",
    }
    assert {key: found[key] for key in expected} == expected


def test_a_micro_batch_divides_what_a_gpu_has() -> None:
    found = values(verl_launch(config(), Place(Path("/runs/x"), gpus=8)))
    assert found["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"] == "8"


@pytest.mark.parametrize(
    ("changes", "test_freq", "before"),
    [
        ({"evaluation.every": 10}, "10", "True"),
        ({"evaluation.every": 0}, "40", "True"),
        ({"evaluation.every": 0, "evaluation.after": False}, "-1", "True"),
        ({"evaluation": None}, "-1", "False"),
    ],
)
def test_when_veRL_evaluates(changes: dict[str, Any], test_freq: str, before: str) -> None:
    found = values(verl_launch(config(**changes), PLACE))
    assert found["trainer.test_freq"] == test_freq
    assert found["trainer.val_before_train"] == before
    held_out = "/runs/x/train.parquet" if "evaluation" in changes else "/runs/x/val.parquet"
    assert found["data.val_files"] == held_out


def test_grpo_has_no_judge() -> None:
    launch = verl_launch(config(method="grpo"), PLACE)
    assert "judge" not in launch.agent and launch.unused["judge"] == "no update has reviews"
    assert values(launch)["+actor_rollout_ref.actor.policy_loss.intervention_updates"] == "0"


@pytest.mark.parametrize(("verifier", "domain"), [("code", "code"), ("math", "math")])
def test_a_chat_judges_prompts_are_those_of_the_verifier(verifier: str, domain: str) -> None:
    both = {"tasks.verifier": verifier, "evaluation.tasks.verifier": verifier}
    assert verl_launch(config(**both), PLACE).agent["judge"]["domain"] == domain


def test_limits_of_a_process_are_shares_of_the_judges() -> None:
    """8 processes have agent loops; of a judge that takes 3 calls at once, 3."""
    agent = verl_launch(config(), PLACE).agent
    shares = {"concurrent": 4, "rpm": 75, "tokens": 125_000, "usd": 0.5}
    assert agent["judge"]["options"]["limits"] == shares
    assert agent["rollout"]["judge_concurrency"] == 8
    small = verl_launch(config(**{"judge.options.limits": {"concurrent": 3, "tpm": 100}}), PLACE)
    assert small.agent["judge"]["options"]["limits"] == {"concurrent": 1, "tpm": 33}
    assert values(small)["actor_rollout_ref.rollout.agent.num_workers"] == "3"
    plain = {"url": "http://judge:8000/v1", "model": "j"}
    without = verl_launch(config(**{"judge.options": plain}), PLACE)
    assert without.agent["judge"]["options"] == plain


def test_all_that_is_refused_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        verl_overrides(
            config(**{
                "judge.name": "self", "judge.path": "/m", "policy.lora.dropout": 0.5,
                "train.report_to": ["comet_ml"], "train.warmup_steps": 3,
                "evaluation.after": False, "evaluation.every": 7,
                "rollout.engine_options": {"hf_overrides": {"a": 1}},
                "policy.system_prompt": "a ${b}",
            }),
            PLACE,
        )  # fmt: skip
    text = str(caught.value)
    for key in (
        "judge.name", "judge.path", "policy.lora.dropout", "train.report_to", "train.warmup_steps",
        "evaluation.after", "rollout.engine_options.hf_overrides", "policy.system_prompt",
    ):  # fmt: skip
        assert f"\n  {key}: " in text


@pytest.mark.parametrize(
    ("changes", "place", "said"),
    [
        ({"train.minibatches": 8, "train.prompts_per_update": 4, "train.micro_batch": 8}, PLACE,
         "train.minibatches"),
        ({}, Place(Path("/r"), gpus=3), "do not split over 3 GPUs"),
        ({"policy.path": "warmup:student"}, PLACE, "policy.path"),
    ],
)  # fmt: skip
def test_sizes_and_paths_that_do_not_fit(changes: dict[str, Any], place: Place, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        verl_overrides(config(**changes), place)


@pytest.mark.parametrize(
    ("gpus", "parallel", "said"), [(8, 3, "does not divide 8"), (0, 1, "gpus")]
)
def test_a_place_that_cannot_be(gpus: int, parallel: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Place(Path("/r"), gpus=gpus, tensor_parallel=parallel)


def test_values_in_hydras_grammar() -> None:
    """test_verl_launch.py reads such values back by hydra itself."""
    from mintrl_env.verl_overrides import _hydra

    cases = {
        "plain/path-1.0": "plain/path-1.0", "a b": "'a b'", "it's": r"'it\'s'", "1e-3": "'1e-3'",
        "null": "'null'", "a,b": "'a,b'", "": "''", "end\\": r"'end\\'",
    }  # fmt: skip
    for text, written in cases.items():
        assert _hydra(text) == written
    assert _hydra([True, None, 1e-6, math.inf, "x y"]) == "[True,null,1e-06,inf,'x y']"
    with pytest.raises(ConfigError, match=r"would take the \$"):
        _hydra("a$b")


def test_every_recipe_is_mapped_or_refused_by_name() -> None:
    folder = Path(__file__).resolve().parent.parent / "configs"
    for file in sorted(folder.glob("*.yaml")):
        if "method" not in yaml.safe_load(file.read_text()):
            continue  # a judge's file
        resolved = load_config(file)
        try:
            launch = verl_launch(resolved, Place(Path("/runs/x"), gpus=1))
        except ConfigError as error:
            lines = str(error).splitlines()[1:]
            keys = [line.strip().split(":")[0] for line in lines]
            assert keys and set(keys) <= {*CHANGES, "train"}, (file.name, lines)
        else:
            assert values(launch)["data.train_batch_size"] == str(
                resolved.train.prompts_per_update
            ), file.name


# --- what is written


@pytest.fixture
def run_config(tmp_path: Path) -> RunConfig:
    """A config that can be prepared: tasks and a tokenizer that are there."""
    from transformers import PreTrainedTokenizerFast

    from mintrl_env.prompts import ByteTokenizer  # noqa: F401 (documents what a tokenizer needs)

    backend = _characters()
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eos|>", pad_token="<|pad|>")
    hf.save_pretrained(tmp_path / "model")
    for name, count in (("train", 8), ("test", 3)):
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(
                f'{{"task_id": "{name}{i}", "prompt": "{name} {i}+1=", "answer": "{i + 1}"}}\n'
                for i in range(count)
            )
        )
    return config(**{
        "policy.path": str(tmp_path / "model"), "policy.chat": False, "policy.lora": None,
        "tasks.path": str(tmp_path / "train.jsonl"),
        "evaluation.tasks.path": str(tmp_path / "test.jsonl"),
    })  # fmt: skip


def _characters() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocab = {c: i for i, c in enumerate(["<unk>", *map(chr, range(32, 127)), "<|eos|>", "<|pad|>"])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return backend


def test_what_is_written(run_config: RunConfig, tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    from mintrl_env.adapters.verl_rows import task_of

    place = Place(tmp_path / "run", gpus=2)
    launch = verl_command.prepare(run_config, place)
    assert values(launch)["actor_rollout_ref.model.path"] == str(tmp_path / "model")
    (entry,) = yaml.safe_load(place.agent_file.read_text())
    assert entry == launch.agent
    for file, name, count in ((place.train_file, "train", 8), (place.val_file, "test", 3)):
        rows = parquet.read_table(file).to_pylist()
        tasks = [task_of(row) for row in rows]
        assert [task.task_id for task in tasks] == [f"{name}{i}" for i in range(count)]
        assert [task.answer for task in tasks] == [str(i + 1) for i in range(count)]
        assert {task.verifier for task in tasks} == {"math"}
    assert load_config(place.folder / "config.yaml") == run_config
    before = place.train_file.read_bytes()
    assert verl_command.prepare(run_config, place) == launch  # the same again
    assert place.train_file.read_bytes() == before


def test_a_folder_with_another_run_is_refused(run_config: RunConfig, tmp_path: Path) -> None:
    place = Place(tmp_path / "run", gpus=2)
    verl_command.prepare(run_config, place)
    other = run_config.model_copy(
        update={"objective": run_config.objective.model_copy(update={"kappa": -0.4})}
    )
    with pytest.raises(ConfigError, match=r"objective\.kappa"):
        verl_command.prepare(other, place)


@pytest.mark.parametrize("changes", [{"train.prompts_per_update": 16}])
def test_tasks_that_are_too_few(
    run_config: RunConfig, tmp_path: Path, changes: Mapping[str, Any]
) -> None:
    train = run_config.train.model_copy(update={"prompts_per_update": 16})
    with pytest.raises(ConfigError, match="8 task\\(s\\) are fewer"):
        verl_command.prepare(
            run_config.model_copy(update={"train": train}), Place(tmp_path / "run", gpus=2)
        )
    assert not (tmp_path / "run").exists()


def test_a_judge_on_this_machine_is_refused_on_several_nodes(
    run_config: RunConfig, tmp_path: Path
) -> None:
    pytest.importorskip("openai")
    judge = run_config.judge
    assert judge is not None
    local = judge.model_copy(
        update={"options": {**judge.options, "url": "http://localhost:8000/v1"}}
    )
    there = run_config.model_copy(update={"judge": local})
    with pytest.raises(ConfigError, match=r"localhost.*2 nodes"):
        verl_command.prepare(there, Place(tmp_path / "run", gpus=2, nodes=2))
    verl_command.prepare(there, Place(tmp_path / "one", gpus=2))
    verl_command.prepare(run_config, Place(tmp_path / "two", gpus=2, nodes=2))


# --- the command


def test_the_printed_command_is_what_a_shell_takes_apart(tmp_path: Path) -> None:
    launch = verl_launch(
        config(**{"policy.path": '/models/it\'s a "student"'}), Place(tmp_path / "a b", gpus=2)
    )
    extra = ["data.dataloader_num_workers=0", "+x.y='a b'"]
    text = verl_command.command_text(launch, extra)
    assert shlex.split(text.replace("\\\n", "")) == verl_command.command(launch, extra)
    assert text.splitlines()[0] == "python -m verl.trainer.main_ppo \\"
    assert text.splitlines()[-1].strip() == shlex.quote(extra[-1])
    done = subprocess.run(
        ["bash", "-c", text.replace("python -m verl.trainer.main_ppo", "printf '%s\\n'", 1)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [*launch.overrides, *extra]
    with pytest.raises(ConfigError, match="key=value"):
        verl_command.command(launch, ["data.seed"])


def test_running_it(run_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    launch = verl_launch(config(), PLACE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verl_command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"mintrl-env\[verl\]"):
        verl_command.run(launch)
    monkeypatch.setattr(verl_command.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(
        verl_command.subprocess, "call", lambda words, env: called.append((words, env)) or 3
    )
    assert verl_command.run(launch, ["a=b"]) == 3
    ((words, env),) = called
    assert words == [sys.executable, "-m", "verl.trainer.main_ppo", *launch.overrides, "a=b"]
    assert env["PYTHONPATH"].split(":")[-1] == str(tmp_path)  # a judge of one's own lies there


def test_the_command_line(
    run_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from mintrl_env.cli import app
    from mintrl_env.config import dump_config

    (tmp_path / "c.yaml").write_text(dump_config(run_config))
    monkeypatch.chdir(tmp_path)
    asked = ["verl-command", "c.yaml", "--gpus", "2", "--set", "train.updates=3", "--verl", "a.b=c"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    words = shlex.split(done.stdout.replace("\\\n", ""))
    assert "trainer.total_training_steps=3" in words and words[-1] == "a.b=c"
    assert f"data.train_files={tmp_path}/runs/c-verl/train.parquet" in words
    assert (tmp_path / "runs" / "c-verl" / "agent.yaml").exists()
    assert "not used under veRL: train.threads" in done.stderr
    statuses = []
    monkeypatch.setattr(verl_command, "run", lambda launch, extra: statuses.append(extra) or 5)
    assert CliRunner().invoke(app, [*asked, "--run"]).exit_code == 5
    assert statuses == [["a.b=c"]]
