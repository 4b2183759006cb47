"""The shipped recipes: every value that the paper states, and what they differ in."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from mintrl_env.config import RunConfig, config_differences, load_config
from mintrl_env.errors import ConfigError
from mintrl_env.judge_recipes import make_judge
from mintrl_env.judges_chat import ChatJudge
from mintrl_env.memory import Stated, halves, reckon
from mintrl_env.memory_formula import GIB
from mintrl_env.preflight_servers import asks_service
from mintrl_env.suite import load_suite
from mintrl_env.verl_overrides import Place, verl_launch

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
PAPER = ("qwen3_1.7b_math", "qwen3_1.7b_code", "qwen3_4b_math", "qwen3_4b_code", "qwen3_4b_self")


def config(name: str, *overrides: str) -> RunConfig:
    return load_config(CONFIGS / f"{name}.yaml", overrides)


def differing(a: RunConfig, b: RunConfig) -> set[str]:
    return {key for key, _, _ in config_differences(a, b)}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_values(name: str) -> None:
    run = config(name)
    code = name.endswith("code")
    assert run.method == "mintrl-const"
    paths = {
        "1.7b": "Qwen/Qwen3-1.7B",
        "4b": "Qwen/Qwen3-4B",
        "self": "Qwen/Qwen3-4B-Instruct-2507",
    }
    kind = "self" if name == "qwen3_4b_self" else name.split("_")[1]
    assert run.policy.path == paths[kind]
    if kind != "self":
        assert run.policy.chat_template_kwargs == {"enable_thinking": False}
    assert (run.policy.max_prompt, run.episode.max_response) == (2048, 16384)
    assert (run.train.prompts_per_update, run.rollout.n_control, run.rollout.n_intervened) == (
        32,
        8,
        8,
    )
    assert run.rollout.temperature == 1.0
    episode = run.episode
    assert (episode.chunk_tokens, episode.max_reviews, episode.max_correction) == (
        (128, 4, 64) if code else (512, 4, 64)
    )
    assert episode.step_delimiters == ["\n\n", "```"]
    objective = run.objective
    assert objective.kappa == (-0.1 if code else -0.2)
    assert math.isinf(objective.beta_1) and objective.beta_2 == 1e-3
    assert (objective.baseline, objective.loss_scale) == ("mean", "paper")
    assert (objective.intervention_updates, run.train.updates) == (200, 500)
    train = run.train
    assert (train.learning_rate, train.max_grad_norm, train.checkpoint_every) == (1e-6, 1.0, 50)
    assert run.judge is not None
    if run.judge.name == "llm":
        assert run.judge.options["model"] == "Qwen/Qwen3-4B-Instruct-2507"
        assert run.judge.options["mode"] == "two-call"
        assert run.judge.options["temperature"] == 1.0
    else:
        assert run.judge.options["privileged"] == "reference"


@pytest.mark.parametrize("name", [name for name in PAPER if name != "qwen3_4b_self"])
@pytest.mark.parametrize("override", ["method=mintrl-const", "method=mintrl-proxy", "method=grpo",
                                      "judge=judge_blackbox.yaml"])  # fmt: skip
def test_verl_reads_the_same_file(name: str, override: str) -> None:
    run = config(name, override)
    launch = verl_launch(run, Place(Path("runs/x"), gpus=8))
    text = "\n".join(map(str, launch.overrides))
    for value in ("16384", "2048", run.policy.path):
        assert value in text
    assert not any(key.startswith(("episode", "objective", "tasks")) for key in launch.unused)


def test_verl_refuses_a_self_judge_by_name() -> None:
    with pytest.raises(ConfigError, match=r"judge\.name: 'self' needs a model in its process"):
        verl_launch(config("qwen3_4b_self"), Place(Path("runs/x"), gpus=8))


@pytest.mark.parametrize("domain", ["math", "code"])
def test_sizes_differ_in_the_model_alone(domain: str) -> None:
    small, big = config(f"qwen3_1.7b_{domain}"), config(f"qwen3_4b_{domain}")
    assert differing(small, big) == {"policy.path", "rollout.engine_options.memory"}


def test_domains_differ_in_problems_prompt_chunks_and_kappa() -> None:
    found = differing(config("qwen3_1.7b_math"), config("qwen3_1.7b_code"))
    sections = {key for key in found if not key.startswith(("tasks.", "evaluation."))}
    assert sections == {"policy.system_prompt", "episode.chunk_tokens", "objective.kappa"}


def test_the_self_judge_differs_in_policy_problems_and_judge() -> None:
    found = differing(config("qwen3_4b_math"), config("qwen3_4b_self"))
    rest = {key for key in found if not key.startswith(("tasks.", "judge."))}
    assert rest == {
        "policy.path", "policy.chat_template_kwargs", "policy.chat_template_kwargs.enable_thinking",
        "rollout.engine_options.memory", "train.micro_batch",
    }  # fmt: skip


def test_methods_and_judges_are_one_line_each() -> None:
    const = config("qwen3_4b_code")
    for method in ("mintrl-proxy", "grpo"):
        assert differing(const, config("qwen3_4b_code", f"method={method}")) == {"method"}
    black = config("qwen3_4b_code", "judge=judge_blackbox.yaml")
    assert all(key.startswith("judge.") for key in differing(const, black))
    assert black.judge is not None
    assert black.judge.options["capabilities"] == {
        "structured": "json_object", "prefill": "none", "logprobs": False,
    }  # fmt: skip
    assert "perplexity" not in black.judge.guards and black.objective.kappa == -0.1
    assert asks_service(black) and not asks_service(config("qwen3_4b_self"))


def test_a_chat_judge_has_the_prompts_of_the_runs_verifier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "none")

    def prompts(run: RunConfig) -> Any:
        made: Any = make_judge(run)
        judge: Any = made if hasattr(made, "review") else made(_Host())[0]
        inner = judge._judge
        assert isinstance(inner, ChatJudge)
        return inner._prompts

    class _Host:
        tokenizer = None

    math_prompts, code_prompts = (prompts(config(f"qwen3_4b_{d}")) for d in ("math", "code"))
    assert math_prompts != code_prompts
    assert prompts(config("qwen3_4b_code", "judge.options.domain=math")) == math_prompts
    assert prompts(config("qwen3_4b_code", "judge=judge_blackbox.yaml")) == code_prompts


def test_every_value_says_where_it_comes_from() -> None:
    """A line with a value of these sections ends with (paper) or (ours), or stands under one that does."""
    for name in PAPER:
        section = ""
        for line in (CONFIGS / f"{name}.yaml").read_text().splitlines():
            if re.match(r"^\w+:", line):
                section = line.split(":")[0]
            keyed = re.match(r"^  (\w+): \S", line)
            if keyed and section in ("episode", "rollout", "objective", "train", "policy"):
                told = re.search(r"# \((paper|ours)\)", line)
                assert told or keyed[1] in ("engine_options",), f"{name}: {line}"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("qwen3*.yaml")), ids=lambda p: p.stem)
def test_the_first_lines_are_the_commands(path: Path) -> None:
    train, pilot = path.read_text().splitlines()[:2]
    assert pilot.startswith(f"# first: mintrl filter configs/{path.name} --out data/")
    out = pilot.split()[-1]
    assert train == (
        f"# mintrl train configs/{path.name} --run runs/{path.stem} --set tasks.path={out}"
    )


def test_the_tables_in_the_docs_are_what_mintrl_memory_says() -> None:
    text = (CONFIGS.parent / "docs" / "recipes.md").read_text()
    found = re.findall(r"^\| `(qwen3_[\w.]+)`( LoRA)? \| 8 x (\d+) \|", text, re.MULTILINE)
    assert {name for name, _, _ in found} == set(PAPER) and len(found) == 8
    for name, lora, gib in found:
        write, learn = (4000, 9000) if "1.7b" in name else (2000, 4000)
        stated = Stated(gpus=8, gpu_gib=int(gib), write=write, learn=learn)
        got = reckon(config(name, *(["policy.lora={r: 16}"] if lora else [])), stated)
        assert (
            f"| `{name}`{lora} | 8 x {gib} | {got['peak'] / GIB:.0f} | {got['sharded'] / GIB:.0f} | "
            f"{got['calls']:,} | {got['prompt_tokens'] / 1e9:.2f} + "
            f"{got['completion_tokens'] / 1e9:.2f} | {got['hours']['all']:.0f} |\n"
        ) in text
        assert got["peak"] <= int(gib) * GIB  # the table's GPUs are large enough
    run, stated = config("qwen3_1.7b_math"), Stated(gpus=8, write=4000, learn=9000)
    for change, got in [("(as it is)", reckon(run, stated)), *halves(run, stated)]:
        row = f"| `{change}` | {got['peak'] / GIB:.0f} | {got['calls']:,} | {got['hours']['all']:.0f} |\n"
        assert row in text


def test_the_data_sets_in_the_docs_are_those_of_the_configs() -> None:
    text = (CONFIGS.parent / "docs" / "recipes.md").read_text()
    named = {section.path for suite in ("math", "code")
             for section in load_suite(CONFIGS / f"eval_{suite}.yaml").sets.values()}  # fmt: skip
    for name in PAPER:
        run = config(name)
        named |= {run.tasks.path, run.evaluation.tasks.path if run.evaluation else None}
    assert {f"`{path}`" for path in named if path} <= set(re.findall(r"`[\w./-]+`", text))
