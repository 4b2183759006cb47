"""`mintrl train-command`: which GPU does what, and commands that the other side understands."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mintrl_env.adapters.server_options import ServerOptions
from mintrl_env.cli import app
from mintrl_env.config import RunConfig, load_config
from mintrl_env.errors import ConfigError
from mintrl_env.placement import Placement, commands, place, script

ROOT = Path(__file__).parent.parent
RECIPE = str(ROOT / "configs" / "qwen3_1.7b_math.yaml")
JUDGE = "http://127.0.0.1:8001/v1"


def recipe(*overrides: str) -> RunConfig:
    return load_config(RECIPE, list(overrides))


def words(line: str) -> tuple[dict[str, str], list[str]]:
    """Environment and words of a printed line, as a shell reads it."""
    parts = shlex.split(line.removesuffix(" &"))
    head = [part for part in parts if "=" in part and part.split("=")[0].isupper()]
    return dict(part.split("=", 1) for part in head), parts[len(head) :]


@pytest.mark.parametrize(
    ("gpus", "given", "expected"),
    [
        (8, {}, Placement((0, 1, 2, 3), (4, 5, 6), (7,))),
        (8, {"judge": 0}, Placement((0, 1, 2, 3), (4, 5, 6, 7))),
        (8, {"judge": 2, "policy": 2}, Placement((0, 1, 2, 3), (4, 5), (6, 7))),
        (4, {}, Placement((0, 1), (2,), (3,))),
        (2, {}, Placement((0,), (), (1,))),
        (2, {"judge": 0}, Placement((0,), (1,))),
        (1, {}, Placement((0,), (), (0,))),
    ],
)
def test_placements(gpus: int, given: dict[str, Any], expected: Placement) -> None:
    assert place(recipe(), gpus=gpus, **given) == expected


def test_a_policy_that_stays_in_several_trainers() -> None:
    embedded = recipe("rollout.engine=transformers", "rollout.engine_options={}")
    everywhere = Placement(tuple(range(8)))
    assert place(embedded, gpus=8, judge=0, policy=0) == everywhere
    elsewhere = recipe(
        "rollout.engine=server", "rollout.engine_options={url: 'http://policy:8010/v1'}"
    )
    assert place(elsewhere, gpus=8, judge=0, policy=0) == everywhere
    # One process may have vLLM in it, with or without a GPU for the judge.
    assert place(recipe(), gpus=2, policy=0) == Placement((0,), (), (1,))


@pytest.mark.parametrize(
    ("url", "gpus"),
    [("http://0.0.0.0:8001/v1", (7,)), ("http://[::1]:8001/v1", (7,)),
     ("http://judge.localhost:8001/v1", (7,)), ("http://127.1:8001/v1", (7,)),
     ("http://127.example.com:8001/v1", ()), ("http://10.0.0.5:8001/v1", ())],
)  # fmt: skip
def test_a_judge_on_this_machine_gets_a_gpu(url: str, gpus: tuple[int, ...]) -> None:
    assert place(recipe(f"judge.options.url={url}"), gpus=8).judge == gpus


def test_a_judge_elsewhere_takes_no_gpu() -> None:
    remote = recipe("judge.options.url=https://api.example.com/v1")
    assert place(remote, gpus=8) == Placement((0, 1, 2, 3), (4, 5, 6, 7))
    assert place(recipe("method=grpo"), gpus=2) == Placement((0,), (1,))
    with pytest.raises(ConfigError, match="the config's judge has no server on this machine"):
        place(remote, gpus=8, judge=1)


def test_what_cannot_be_placed() -> None:
    with pytest.raises(ConfigError, match="512 rows an update don't split over 3 processes"):
        place(recipe(), gpus=8, policy=4, judge=1)
    with pytest.raises(ConfigError, match="2 for the judge leaves none"):
        place(recipe(), gpus=2, judge=2)
    with pytest.raises(ConfigError, match="nothing is left to train on"):
        place(recipe(), gpus=4, policy=3, judge=1)
    with pytest.raises(ConfigError, match="one GPU can't both train and serve"):
        place(recipe(), gpus=1, policy=1)
    for given, processes in (({"judge": 0}, 8), ({}, 7)):
        engine = (
            f"rollout.engine: .* {processes} processes would all .* take rollout.engine: server"
        )
        with pytest.raises(ConfigError, match=engine):
            place(recipe(), gpus=8, policy=0, **given)
    # Of its own accord it takes a number that splits.
    odd = recipe("train.prompts_per_update=3", "train.micro_batch=16")
    assert place(odd, gpus=8).train == (0, 1, 2)


def test_the_commands_for_eight() -> None:
    config = recipe("rollout.temperature=0.8")
    steps = commands(config, place(config, gpus=8), RECIPE, ["--run", "runs/my run"])
    text = script(steps)
    lines = [line for line in text.splitlines() if not line.startswith(("#", "for "))]
    judge, *servers, train = map(words, lines)
    assert judge[0] == {"CUDA_VISIBLE_DEVICES": "7"}
    assert judge[1][:5] == ["vllm", "serve", "Qwen/Qwen3-4B-Instruct-2507", "--port", "8001"]
    urls = []
    for gpu, (environment, command) in zip("456", servers, strict=True):
        assert environment == {"CUDA_VISIBLE_DEVICES": gpu, "VLLM_SERVER_DEV_MODE": "1"}
        options = dict(zip(command[3::2], command[4::2], strict=False))
        assert command[:3] == ["vllm", "serve", "Qwen/Qwen3-1.7B"]
        assert options["--max-model-len"] == str(2048 + 16384)
        assert json.loads(command[command.index("--weight-transfer-config") + 1]) == {
            "backend": "nccl"
        }
        assert command[command.index("--logprobs-mode") + 1] == "processed_logprobs"
        urls.append(f"http://127.0.0.1:{options['--port']}/v1")
    assert train[0] == {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    launcher = "torchrun --standalone --nproc-per-node 4 -m -- mintrl_env.cli train".split()
    assert train[1][:8] == launcher and train[1][8:11] == [RECIPE, "--run", "runs/my run"]
    # Every server is waited for, the judge's too; ports are nobody's twice.
    wait = next(line for line in text.splitlines() if line.startswith("for "))
    assert wait.startswith(f"for url in {JUDGE} {' '.join(urls)}; do")
    assert len({JUDGE, *urls}) == 4
    # What the trainer is told is what it reads.
    overrides = [train[1][at + 1] for at, word in enumerate(train[1]) if word == "--set"]
    told = recipe(*overrides)
    assert told.rollout.engine == "server"
    options = ServerOptions.of(told.rollout.engine_options)
    assert (list(options.urls), options.model, options.sleep) == (urls, "policy", 0)


def test_one_gpu_has_room_for_a_judge() -> None:
    judge, alone = commands(recipe(), place(recipe(), gpus=1), RECIPE)
    assert judge.words[-2:] == ["--gpu-memory-utilization", "0.2"]
    assert alone.words == ["mintrl", "train", RECIPE]  # vLLM in the trainer, as the recipe says


def test_the_command_prints_them() -> None:
    done = CliRunner().invoke(
        app, ["train-command", RECIPE, "--gpus", "8", "--resume", "--set", "train.updates=7"]
    )
    assert done.exit_code == 0, done.output
    assert "8 GPUs: 4 to train, 3 for the policy's servers, 1 for the judge's server" in done.output
    last = words(done.stdout.strip().splitlines()[-1])[1]
    assert last[8:12] == [RECIPE, "--resume", "--set", "train.updates=7"]


@pytest.mark.parametrize(
    ("gpus", "overrides"),
    [(1, []), (2, []), (2, ["method=grpo"]), (8, [])],
)
def test_the_commands_in_the_docs_are_those(gpus: int, overrides: list[str]) -> None:
    text = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8").replace("\\\n", " ")
    for i in range(3):  # the loop over three servers, written out
        loop = text.split("for i in 0 1 2; do")[1].split("done")[0]
        text += loop.replace("$((4 + i))", str(4 + i)).replace("$((8010 + i))", str(8010 + i))
    text = " ".join(text.split())
    config = recipe(*overrides)
    more = [word for override in overrides for word in ("--set", override)]
    steps = commands(config, place(config, gpus=gpus), "configs/qwen3_1.7b_math.yaml", more)
    for step in steps:
        line = step.text().splitlines()[-1]
        assert " ".join(line.split()) in text, line
