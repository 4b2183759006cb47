"""`mintrl verl-command`: the files and the command that run a config under veRL.

launch = prepare(config, place)      # writes what the command names
print(command_text(launch, extra))
run(launch, extra)
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import yaml

from mintrl_env import judge_recipes, recipes
from mintrl_env.config import RunConfig, dump_config
from mintrl_env.errors import ConfigError, MissingExtraError, StoreError
from mintrl_env.prompts import HFTokenizer, PromptBuilder
from mintrl_env.protocols import Judge
from mintrl_env.run_folder import RunFolder
from mintrl_env.training import refuse_overlap
from mintrl_env.verl_entry import is_reviewed
from mintrl_env.verl_overrides import Launch, Place, verl_launch

MODULE = "verl.trainer.main_ppo"


def prepare(config: RunConfig, place: Place) -> Launch:
    """Write what the command names into `place.folder`: agent.yaml, the tasks, config.yaml.

    Again with the same config writes the same, so that a run goes on where it stopped.

    Raises:
        ConfigError: a key that veRL cannot honour, a judge that other nodes cannot reach, another
            config's run in the folder, tasks that are too few.
        TaskError: a task that cannot be used. StoreError: the folder cannot be written.
    """
    RunFolder(place.folder).check(config, resume=True)
    launch = verl_launch(_with_a_folder(config), place)
    _check_judge(config, place.nodes)
    tasks = recipes.load_task_set(config.tasks, "tasks", seed=config.train.seed)
    if len(tasks) < config.train.prompts_per_update:
        raise ConfigError(
            f"tasks: {len(tasks)} task(s) are fewer than train.prompts_per_update = "
            f"{config.train.prompts_per_update}"
        )
    recipes.make_verifier(config.tasks, tasks, "tasks")  # what is wrong with it is said now
    held_out = []
    if config.evaluation is not None:
        held_out = recipes.load_task_set(
            config.evaluation.tasks, "evaluation.tasks", seed=config.train.seed
        )
        refuse_overlap(tasks, held_out, "evaluation.tasks")
    prompts = _prompts(config)
    from mintrl_env.adapters.verl_rows import write_verl_rows

    try:
        place.folder.mkdir(parents=True, exist_ok=True)
        place.agent_file.write_text(
            yaml.safe_dump([launch.agent], sort_keys=False, allow_unicode=True), encoding="utf-8"
        )
        write_verl_rows(tasks, place.train_file, prompts, split="train")
        if config.evaluation is not None:
            write_verl_rows(held_out, place.val_file, prompts, split="test")
        (place.folder / "config.yaml").write_text(dump_config(config), encoding="utf-8")
    except OSError as error:
        raise StoreError(f"{place.folder}: cannot be written: {error.strerror}") from error
    return launch


def command(launch: Launch, extra: Sequence[str] = ()) -> list[str]:
    """The command's words; `extra` are overrides in veRL's own terms, which win.

    Raises:
        ConfigError: one of them is no `key=value`.
    """
    for word in extra:
        if "=" not in word:
            raise ConfigError(f"--verl {word!r}: write it as key=value, in veRL's own terms")
    return ["python", "-m", MODULE, *launch.overrides, *extra]


def command_text(launch: Launch, extra: Sequence[str] = ()) -> str:
    """The command for a shell, an override a line."""
    python, m, module, *overrides = map(shlex.quote, command(launch, extra))
    return " \\\n    ".join([f"{python} {m} {module}", *overrides])


def run(launch: Launch, extra: Sequence[str] = ()) -> int:
    """Run the command with this Python, to its end; its exit status.

    Raises:
        MissingExtraError: veRL is not installed.
    """
    if importlib.util.find_spec("verl") is None:
        raise MissingExtraError("verl", "verl", "mintrl verl-command --run")
    # A judge or verifier of one's own lies beside the config, for Ray's workers too.
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), os.getcwd()]))
    return subprocess.call(
        [sys.executable, *command(launch, extra)[1:]], env={**os.environ, "PYTHONPATH": path}
    )


def _with_a_folder(config: RunConfig) -> RunConfig:
    """The config with a policy's path that means the same in any working folder."""
    path = recipes.resolve_path(config.policy.path, config)
    if Path(path).exists():
        path = str(Path(path).resolve())
    return config.model_copy(update={"policy": config.policy.model_copy(update={"path": path})})


def _prompts(config: RunConfig) -> PromptBuilder:
    path = recipes.resolve_path(config.policy.path, config)
    tokenizer = HFTokenizer(recipes.load_tokenizer(path, "policy.path"))
    return recipes.make_prompts(tokenizer, config.policy)


def _check_judge(config: RunConfig, nodes: int) -> None:
    """Refuse wrong options, and a server that each node would look for on itself."""
    if not is_reviewed(config):
        return
    from mintrl_env.adapters.judge_servers import chat_servers
    from mintrl_env.adapters.server_probe import refuse_loopback

    made = judge_recipes.make_judge(config)
    if not isinstance(made, Judge):  # as `preflight_servers` makes them
        assert made is not None
        made = made(cast(Any, SimpleNamespace(tokenizer=None)))[0]
    for server in chat_servers(made):
        refuse_loopback(server.client.base_url, nodes=nodes)
