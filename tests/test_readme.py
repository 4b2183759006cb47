"""Every Python snippet of README.md runs as written; every command in it exists."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture(scope="module")
def namespace(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a reader's own script has before the drop-in snippet: a model, a data set, a reward."""
    from datasets import Dataset
    from transformers import set_seed

    from mintrl_env.trainers.warmup import ModelSettings, build_model, build_tokenizer, model_config

    set_seed(0)
    tokenizer = build_tokenizer()
    return {
        "tokenizer": tokenizer,
        "model": build_model(model_config(ModelSettings(layers=1, hidden=16, heads=1), tokenizer)),
        "dataset": Dataset.from_list([{"prompt": f"{i}a{i}|"} for i in range(8)]),
        "reward_func": lambda completions, **columns: [
            float(len(text) % 2) for text in completions
        ],
        "my_grpo_kwargs": {
            "output_dir": str(tmp_path_factory.mktemp("out")),
            "num_generations": 8,
            "per_device_train_batch_size": 8,
            "max_completion_length": 40,
            "max_steps": 1,
            "bf16": False,
            "use_cpu": True,
            "gradient_checkpointing": False,
            "report_to": [],
            "save_strategy": "no",
        },
    }


@pytest.mark.parametrize("index", range(len(SNIPPETS)))
def test_a_snippet_runs_as_written(index: int, namespace: dict[str, Any]) -> None:
    exec(compile(SNIPPETS[index], f"README.md, snippet {index}", "exec"), namespace)
    if "ArithmeticJudge()" in SNIPPETS[index] and "env" in namespace and "trainer" not in namespace:
        assert namespace["info"]["verdict"] == "revise"
        assert namespace["obs"].endswith("20 + 22 = 42\n")
    if "trainer" in namespace:
        assert namespace["trainer"].state.global_step == 1
        namespace["trainer"].close()


def test_all_kinds_of_snippets_are_there() -> None:
    text = "\n".join(SNIPPETS)
    for wanted in ("env.step(", "async def review", "MInTRLTrainer("):
        assert wanted in text


def test_its_make_targets_exist() -> None:
    targets = set(
        re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    )
    named = set(re.findall(r"`?make ([a-z0-9-]+)", README))
    assert named - {"one"} <= targets


def test_its_mintrl_commands_and_overrides_exist() -> None:
    from typer.main import get_command

    from mintrl_env.cli import app
    from mintrl_env.config import load_config
    from mintrl_env.suite import load_suite

    commands = get_command(app).commands  # type: ignore[attr-defined]
    lines = re.findall(r"^    mintrl (.+)$", README, flags=re.MULTILINE)
    assert len(lines) >= 6
    for line in lines:
        words = line.split()
        assert words[0] in commands, line
        options = {name for parameter in commands[words[0]].params for name in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, line
        config = next((word for word in words if word.endswith(".yaml")), None)
        if config is not None and words[0] == "eval-suite":
            load_suite(ROOT / config)
        elif config is not None:
            overrides = [b for a, b in pairwise(words) if a == "--set"]
            load_config(ROOT / config, overrides)


CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
JUDGES = [path for path in CONFIGS if path.stem.startswith("judge_")]
SUITES = [path for path in CONFIGS if path.stem.startswith("eval_")]


@pytest.mark.parametrize("path", JUDGES, ids=lambda path: path.stem)
def test_a_judge_file_is_a_judge_section_of_the_config_that_names_it(path: Path) -> None:
    from mintrl_env.config import load_config
    from mintrl_env.registry import names

    config = load_config(ROOT / "configs" / "gsm8k_smollm2.yaml", [f"judge={path.name}"])
    assert config.judge is not None and config.judge.name in names("judge")


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_a_shipped_suite_is_valid_and_begins_with_its_command(path: Path) -> None:
    from mintrl_env.suite import load_suite

    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert re.fullmatch(rf"# mintrl eval-suite runs/\S+ configs/{path.name}", first)
    assert load_suite(path).sets


@pytest.mark.parametrize(
    "path",
    [path for path in CONFIGS if path not in (*JUDGES, *SUITES)],
    ids=lambda path: path.stem,
)
def test_a_shipped_config_is_valid_and_begins_with_its_launch_command(path: Path) -> None:
    from mintrl_env.config import dump_config, load_config, parse_config

    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith(f"# mintrl train configs/{path.name} --run runs/")
    config = load_config(path)
    assert parse_config(yaml.safe_load(dump_config(config)), "again") == config
