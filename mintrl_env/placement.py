"""Which GPUs of one node train, which hold the policy's servers, which the judge's: `mintrl train-command`.

place(config, gpus=8)      4 to train, 3 for the policy, 1 for the judge
commands(config, placement, ...)
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from mintrl_env.adapters.llm_connections import is_loopback
from mintrl_env.config import RunConfig
from mintrl_env.errors import ConfigError
from mintrl_env.preflight_servers import asks_service
from mintrl_env.trainer_settings import check_rows, check_split

POLICY_PORT = 8010
POLICY_NAME = "policy"
JUDGE_MEMORY = 0.2
"""Of a GPU that is the trainer's too, what the judge's server takes."""


@dataclass(frozen=True)
class Placement:
    """GPUs of one node, by number.

    Attributes:
        train: a process of the trainer on each.
        policy: a server on each; none where the policy is in the trainer, or elsewhere.
        judge: of one server, over all of them; none where the judge is elsewhere, or in the trainer. On
            a node of one it has a part of that one.
    """

    train: tuple[int, ...]
    policy: tuple[int, ...] = ()
    judge: tuple[int, ...] = ()

    def __str__(self) -> str:
        parts = [f"{len(self.train)} to train"]
        if self.policy:
            parts.append(f"{len(self.policy)} for the policy's servers")
        if set(self.judge) & set(self.train):
            parts.append("a part of it for the judge's server")
        elif self.judge:
            parts.append(f"{len(self.judge)} for the judge's server")
        return ", ".join(parts)


def place(
    config: RunConfig, *, gpus: int, policy: int | None = None, judge: int | None = None
) -> Placement:
    """A placement: a GPU for a judge that is served on this node, of the rest four in seven train.

    Args:
        gpus: of the node.
        policy: for servers of the policy; None: chosen; 0: it stays in the trainer.
        judge: for the judge's server; None: one (of one GPU a part), where the judge needs one.

    Raises:
        ConfigError: too few GPUs, rows that don't split over those that train, or vLLM in each of
            several training processes.
    """
    if judge is None:
        judge = int(local_judge(config) is not None)
    elif judge and local_judge(config) is None:
        raise ConfigError(
            "--judge-gpus: the config's judge has no server on this machine (judge.options.url)"
        )
    left = gpus - judge if gpus > 1 else 1
    if left < 1:
        raise ConfigError(f"--gpus {gpus}: {judge} for the judge leaves none to train on")
    if left == 1 and policy:
        raise ConfigError(
            "--policy-gpus: one GPU can't both train and serve, since NCCL joins no two processes on one: "
            "take rollout.engine: vllm, in the trainer's process"
        )
    if left == 1:
        return Placement((0,), (), tuple(range(gpus)[-judge:]) if judge else ())
    wanted = left - policy if policy is not None else max(1, round(left * 4 / 7))
    if wanted < 1:
        raise ConfigError(f"--gpus {gpus}: nothing is left to train on")
    train = wanted if policy is not None else _divisor(config, wanted)
    # With servers of the policy, they are the engine, whatever the config says.
    (check_rows if train < left else check_split)(config, train)
    numbers = list(range(gpus))
    return Placement(
        tuple(numbers[:train]),
        tuple(numbers[train:left]),
        tuple(numbers[left:]),
    )


def _splits(config: RunConfig, processes: int) -> bool:
    section = config.train
    return not config.rows_per_update % (processes * section.minibatches * section.micro_batch)


def _divisor(config: RunConfig, most: int) -> int:
    return next(n for n in range(most, 0, -1) if _splits(config, n))


def local_judge(config: RunConfig) -> tuple[str, str] | None:
    """Address and model of a judge's server on this machine, by the config; None: there is none."""
    if config.judge is None or not asks_service(config):
        return None
    url, model = config.judge.options.get("url"), config.judge.options.get("model")
    if not isinstance(url, str) or not isinstance(model, str):
        return None
    return (url, model) if is_loopback(url) else None


@dataclass(frozen=True)
class Step:
    """A command and what it is for; `waits`: an address that has to answer before the next."""

    title: str
    environment: dict[str, str]
    words: list[str]
    waits: str = ""

    def text(self) -> str:
        """For a shell; what serves goes into the background."""
        head = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.environment.items())
        command = " ".join(map(shlex.quote, self.words))
        lines = [f"# {self.title}", f"{head} {command}".strip() + (" &" if self.waits else "")]
        return "\n".join(lines)


def commands(
    config: RunConfig, placement: Placement, config_file: str, more: Sequence[str] = ()
) -> list[Step]:
    """What is started, in this order: the judge, the policy's servers, the training.

    Args:
        config_file: as the user writes it.
        more: options of `mintrl train` (--run, --resume, --set).
    """
    steps: list[Step] = []
    if placement.judge:
        steps.append(
            _judge_step(config, placement.judge, shared=placement.judge[0] in placement.train)
        )
    urls = []
    for number, gpu in enumerate(placement.policy):
        port = POLICY_PORT + number
        urls.append(f"http://127.0.0.1:{port}/v1")
        steps.append(_policy_step(config, gpu, port))
    steps.append(_train_step(placement, config_file, urls, list(more)))
    return steps


def _max_length(config: RunConfig) -> int:
    return config.policy.max_prompt + config.episode.max_response


def _judge_step(config: RunConfig, gpus: tuple[int, ...], *, shared: bool) -> Step:
    found = local_judge(config)
    assert found is not None
    url, model = found
    parts = urlsplit(url)
    words = ["vllm", "serve", model, "--port", str(parts.port or 80)]
    # What it reads: the problem, the response so far, its instructions.
    words += ["--max-model-len", str(_max_length(config) + 4096)]
    words += ["--enable-prefix-caching"]
    if len(gpus) > 1:
        words += ["--tensor-parallel-size", str(len(gpus))]
    if shared:
        words += ["--gpu-memory-utilization", str(JUDGE_MEMORY)]
    return Step(f"judge: GPU {_listed(gpus)}", {"CUDA_VISIBLE_DEVICES": _listed(gpus)}, words, url)


def _policy_step(config: RunConfig, gpu: int, port: int) -> Step:
    if config.policy.path.startswith("warmup:"):
        raise ConfigError(
            f"policy.path: {config.policy.path} is made by the run itself, and no server knows it: "
            "take a folder or a Hub id, or --policy-gpus 0"
        )
    words = ["vllm", "serve", config.policy.path, "--port", str(port)]
    words += ["--served-model-name", POLICY_NAME, "--dtype", "bfloat16"]
    words += ["--max-model-len", str(_max_length(config))]
    words += ["--generation-config", "vllm", "--enable-scale-out"]
    if config.rollout.temperature != 1:
        words += ["--logprobs-mode", "processed_logprobs"]
    words += ["--weight-transfer-config", '{"backend": "nccl"}']
    return Step(
        f"policy: GPU {gpu}",
        {"CUDA_VISIBLE_DEVICES": str(gpu), "VLLM_SERVER_DEV_MODE": "1"},
        words,
        f"http://127.0.0.1:{port}/v1",
    )


def _train_step(
    placement: Placement, config_file: str, urls: Sequence[str], more: list[str]
) -> Step:
    command = ["train", config_file, *more]
    if urls:
        options: dict[str, Any] = {"urls": list(urls), "model": POLICY_NAME}
        command += ["--set", "rollout.engine=server"]
        command += ["--set", f"rollout.engine_options={json.dumps(options)}"]
    count = len(placement.train)
    if count == 1:
        words = ["mintrl", *command]
    else:
        words = ["torchrun", "--standalone", "--nproc-per-node", str(count)]
        # Without --, torchrun takes --run for an option of its own.
        words += ["-m", "--", "mintrl_env.cli", *command]
    return Step(
        f"training: GPU {_listed(placement.train)}",
        {"CUDA_VISIBLE_DEVICES": _listed(placement.train)},
        words,
    )


def script(steps: Sequence[Step]) -> str:
    """All commands for a shell, which waits for each server before the training begins."""
    lines = [step.text() for step in steps]
    waits = [step.waits for step in steps if step.waits]
    if waits:
        lines.insert(
            len(steps) - 1,
            "# until all of them answer\n"
            f"for url in {' '.join(waits)}; do until curl -sf $url/models >/dev/null; do sleep 2; "
            "done; done",
        )
    return "\n".join(lines)


def _listed(gpus: Sequence[int]) -> str:
    return ",".join(map(str, gpus))
