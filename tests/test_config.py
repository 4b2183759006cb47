"""A config reports every problem at once, with key, file and the nearest right key."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from mintrl_env.config import config_differences, dump_config, load_config, parse_config
from mintrl_env.errors import ConfigError

GOOD = """
method: mintrl-const
policy: {path: some/model}
tasks: {path: rows.jsonl}
judge: {name: oracle}
train: {learning_rate: 1e-3, prompts_per_update: 2, micro_batch: 8}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "method: mintrl\npolicy: {pth: x}\ntasks: {path: a.jsonl, name: sums}\n"
        "train: {updates: 0, lerning_rate: 1}\n",
    )
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["objective.bta_2=3"])
    text = str(caught.value)
    assert text.startswith(f"{path}: 7 problems")
    for line in (
        "method: Input should be",
        "policy.path: is missing",
        "policy.pth: no such key; did you mean path?",
        "tasks: give either path",
        "train.updates: Input should be greater than or equal to 1 (it is 0)",
        "train.lerning_rate: no such key; did you mean learning_rate?",
        "objective.bta_2: no such key; did you mean beta_2?",
    ):
        assert f"\n  {line}" in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("judge=null", "judge: mintrl-const needs one"),
        ("rollout.n_control=0", "rollout.n_control: no baseline without a control"),
        ("rollout.n_intervened=0", "rollout.n_intervened: nothing to review"),
        ("train.micro_batch=7", "32 rows an update"),
        ("objective.kappa=0.1", "objective.kappa"),
        ("rollout.temperature=0", "rollout.temperature"),
        ("rollout.temperature=.inf", "rollout.temperature: Input should be a finite number"),
        ("train.learning_rate=.inf", "train.learning_rate: Input should be a finite number"),
        ("objective.beta_1=.nan", "objective.beta_1"),
        ("train.seed=4294967296", "train.seed: Input should be less than 4294967296"),
        ("episode.step_delimiters=['']", "episode.step_delimiters.0: String should have"),
        ("tasks.options={count: 3}", "tasks: options: goes with name, which is not given"),
        (
            "tasks={name: sums, subset: main, columns: {prompt: q}}",
            "tasks: subset, columns: goes with path, which is not given",
        ),
        (
            "evaluation.tasks={path: b.jsonl, verifier: last_integer}",
            "evaluation.tasks.verifier: 'last_integer' is not that of tasks, 'math'",
        ),
        (
            "probe.tasks={path: b.jsonl, verifier_options: {x: 1}}",
            r"probe.tasks.verifier_options: \{'x': 1\} is not that of tasks, \{\}",
        ),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, GOOD), [override])


def test_overrides_are_yaml_and_reach_absent_sections(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path, GOOD),
        ["objective.beta_1=inf", "train.learning_rate=3e-4", "tasks.columns={prompt: [a, b]}"],
    )
    assert math.isinf(config.objective.beta_1)
    assert config.train.learning_rate == 3e-4
    assert config.tasks.columns == {"prompt": ["a", "b"]}


def test_a_key_that_stands_twice_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "train: {updates: 3}\n")
    with pytest.raises(
        ConfigError, match=r"the key 'train' stands here a second time(?s:.*)line 7"
    ):
        load_config(path)


def test_yaml_anchors_and_merges_still_work(tmp_path: Path) -> None:
    text = GOOD.replace("tasks: {path: rows.jsonl}", "tasks: &t {path: rows.jsonl}")
    path = write(tmp_path, text + "evaluation: {tasks: {<<: *t, path: b.jsonl}}\n")
    config = load_config(path)
    assert config.evaluation is not None and config.evaluation.tasks.path == "b.jsonl"


def test_a_judge_may_stand_in_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "judges").mkdir()
    (tmp_path / "judges" / "keep.yaml").write_text("{name: keep, concurrent: 3}\n")
    (tmp_path / "broken.yaml").write_text("- keep\n")
    path = write(tmp_path, GOOD.replace("judge: {name: oracle}", "judge: judges/keep.yaml"))
    judge = load_config(path).judge
    assert judge is not None and (judge.name, judge.concurrent) == ("keep", 3)
    swapped = load_config(write(tmp_path, GOOD), ["judge=judges/keep.yaml", "judge.concurrent=5"])
    assert swapped.judge is not None
    assert (swapped.judge.name, swapped.judge.concurrent) == ("keep", 5)
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read"):
        load_config(path, ["judge=none.yaml"])
    with pytest.raises(ConfigError, match=r"broken\.yaml: a judge's file is a mapping"):
        load_config(path, ["judge=broken.yaml"])


@pytest.mark.parametrize("override", ["train.updates", "=3", "train..updates=3", "a.b={"])
def test_a_malformed_override_is_named(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        load_config(write(tmp_path, GOOD), [override])


@pytest.mark.parametrize(
    ("text", "message"),
    [("- a\n", "a config is a mapping"), ("a: [\n", "no YAML"), ("", "a config is a mapping")],
)
def test_a_file_that_is_no_config_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(path)
    assert str(path) in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "absent.yaml")


def test_a_resolved_config_reads_back_and_differences_are_by_key(tmp_path: Path) -> None:
    a = load_config(write(tmp_path, GOOD))
    path = write(tmp_path, dump_config(a))
    assert load_config(path) == a
    b = load_config(path, ["method=grpo", "objective.beta_2=0.5"])
    assert config_differences(a, b) == [
        ("method", "mintrl-const", "grpo"),
        ("objective.beta_2", 1e-3, 0.5),
    ]
    assert parse_config({"method": "grpo", "policy": {"path": "x"}, "tasks": {"name": "sums"}}, "y")
