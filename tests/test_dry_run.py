"""Every recipe goes through all of its stages with a tiny model; what is replaced is said."""

from __future__ import annotations

import io
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from mintrl_env.cli import app
from mintrl_env.config import RunConfig, config_differences, load_config, parse_config
from mintrl_env.console import RunConsole
from mintrl_env.dry_run import dry_run
from mintrl_env.dry_run_config import made_small
from mintrl_env.dry_run_judge import stand_in
from mintrl_env.dry_run_model import byte_tokenizer
from mintrl_env.errors import ConfigError, MintrlError, StoreError
from mintrl_env.prompts import HFTokenizer, PromptBuilder
from mintrl_env.types import Task

pytest.importorskip("trl")
CONFIGS = Path(__file__).resolve().parent.parent / "configs"
SELF_TESTS = (
    "judge=judge_self_privileged.yaml",
    "judge.options.privileged=tests",
    "judge.options.run_tests=all",
)
FAST: list[tuple[str, tuple[str, ...]]] = [("qwen3_1.7b_code", ())]
SLOW: list[tuple[str, tuple[str, ...]]] = [
    ("qwen3_1.7b_math", ()),
    ("qwen3_1.7b_math", ("method=mintrl-proxy",)),
    ("qwen3_1.7b_code", ("method=grpo",)),
    ("qwen3_4b_math", ("policy.lora={r: 16}",)),
    ("qwen3_4b_code", ("judge=judge_blackbox.yaml",)),
    ("qwen3_4b_code", SELF_TESTS),
    ("qwen3_4b_self", ()),
    ("gsm8k_smollm2", ()),
    ("gsm8k_smollm2", ("judge=judge_llm.yaml",)),
    ("gsm8k_smollm2", ("judge=judge_oracle.yaml",)),
    ("quickstart_grpo", ()),
    ("quickstart_mintrl", ()),
]


def test_every_run_in_configs_is_dry_run() -> None:
    runs = {p.stem for p in CONFIGS.glob("*.yaml") if not p.stem.startswith(("judge_", "eval_"))}
    assert {name for name, _ in [*FAST, *SLOW]} == runs
    judges = {p.name for p in CONFIGS.glob("judge_*.yaml")}
    named = {
        o.partition("=")[2] for _, overrides in SLOW for o in overrides if o.startswith("judge=")
    }
    own = {"judge_qwen3_4b.yaml", "judge_self_privileged.yaml", "judge_self.yaml"}  # of a recipe
    assert named | own == judges


def config(name: str, overrides: tuple[str, ...] = ()) -> RunConfig:
    return load_config(CONFIGS / f"{name}.yaml", overrides)


def go(recipe: RunConfig, folder: Path) -> tuple[dict[str, str], str]:
    said = io.StringIO()
    stages = dry_run(recipe, folder, console=RunConsole(Console(file=said, width=200)))
    return stages, said.getvalue()


def check(name: str, overrides: tuple[str, ...], folder: Path) -> None:
    recipe = config(name, overrides)
    stages, said = go(recipe, folder)
    assert json.loads((folder / "dry_run.json").read_text()) == stages
    for stage, what in stages.items():
        assert f"{stage}: {what}" in said
    judged = recipe.method != "grpo"
    assert stages["tasks"] == "4 loaded"
    if recipe.tasks.name is None:
        kind = recipe.tasks.verifier
        assert stages["verify"] == f"{kind}: 4 right responses are paid, 4 wrong ones are not"
    assert stages["preflight"] == "passed"
    assert stages["rollouts"] == f"16 rows, {4 if judged else 0} of them open to review"
    phases = "intervention, then grpo" if judged else "grpo"
    assert stages["updates"].startswith("2, loss ") and stages["updates"].endswith(f"; {phases}")
    assert stages["checkpoint"] == "checkpoint-2"
    assert stages["mintrl eval, last"].endswith("problems, model")
    assert ("mintrl eval, best" in stages) == (recipe.evaluation is not None)
    assert (folder / "run" / "report.html").stat().st_size > 50_000
    if judged and recipe.judge is not None and recipe.judge.name in ("llm", "oracle"):
        reviews, revises = (
            int(part.split()[-1]) for part in stages["reviews"].split(" Revise")[0].split(", ")
        )
        spliced = int(stages["reviews"].split("; ")[1].split()[0])
        assert reviews == 8 and 0 < revises <= 8 and spliced > 0


@pytest.mark.parametrize(("name", "overrides"), FAST, ids=[name for name, _ in FAST])
def test_a_recipe_goes_through_all_stages(
    name: str, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    check(name, overrides, tmp_path / "dry")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides"), SLOW, ids=["-".join((name, *overrides[:1])) for name, overrides in SLOW]
)
def test_the_other_recipes_do_so_too(
    name: str, overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)
    check(name, overrides, tmp_path / "dry")


@pytest.mark.slow
def test_the_command_says_what_it_replaces_and_may_be_repeated(tmp_path: Path) -> None:
    path, folder = CONFIGS / "qwen3_1.7b_math.yaml", tmp_path / "dry"
    command = ["train", str(path), "--dry-run", "--run", str(folder)]
    for _ in range(2):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    for line in (
        "replaced: policy.path: Qwen/Qwen3-1.7B -> a random qwen3",
        "replaced: tasks: nvidia/AceReason-Math -> 4 built-in problems",
        "replaced: judge.options.url: http://127.0.0.1:8001/v1 -> a stand-in",
        "replaced: rollout.engine: vllm -> transformers",
        "the recipe runs: all stages in",
    ):
        assert line in done.output


# --- its parts


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("all of it")
    with pytest.raises(StoreError, match="holds something else than a dry run"):
        go(config("qwen3_1.7b_math"), tmp_path)
    assert (tmp_path / "thesis.txt").exists()


def test_a_verifier_that_pays_a_wrong_response_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "generous.py").write_text(
        "from mintrl_env import Score\n\n\nclass Generous:\n"
        "    async def score(self, task, response):\n        return Score(1.0, 'correct')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    from mintrl_env import registry

    monkeypatch.setitem(registry._BUILTIN["verifier"], "math", "generous:Generous")
    with pytest.raises(
        MintrlError, match=r"verify: the reward of a wrong response is 1\.0, not 0\.0"
    ):
        go(config("qwen3_1.7b_math"), tmp_path / "dry")


def small(recipe: RunConfig, folder: Path) -> tuple[RunConfig, list[str]]:
    made = made_small(recipe, folder, model="MODEL", judge_url="http://127.0.0.1:1/v1")
    return made.config, made.said


def test_what_makes_the_method_stays(tmp_path: Path) -> None:
    recipe = config("qwen3_4b_code", ("policy.lora={r: 16}", "train.minibatches=2"))
    made, _ = small(recipe, tmp_path)
    changed = {key for key, _, _ in config_differences(recipe, made)}
    for key in (
        "method", "policy.chat_template_kwargs.enable_thinking", "policy.system_prompt",
        "policy.max_prompt", "tasks.form", "tasks.verifier", "tasks.verifier_options.limits.wall_s",
        "judge.name", "judge.options.mode", "judge.options.capabilities.prefill", "judge.guards",
        "judge.max_failure_rate", "objective.kappa", "objective.beta_2", "train.learning_rate",
        "train.minibatches", "train.gradient_checkpointing", "episode.step_delimiters",
        "rollout.temperature", "preflight.min_parse_rate",
    ):  # fmt: skip
        assert key not in changed, key
    assert (made.policy.path, made.policy.lora is not None and made.policy.lora.r) == ("MODEL", 4)


def test_a_key_that_only_the_service_wants_is_not_asked_for(tmp_path: Path) -> None:
    made, said = small(config("qwen3_1.7b_math", ("judge=judge_blackbox.yaml",)), tmp_path)
    assert made.judge is not None and "api_key_env" not in made.judge.options
    assert any("without api_key_env" in line for line in said)
    own = config("qwen3_1.7b_math", ("judge={name: 'mine:Judge'}",))
    made, said = small(own, tmp_path)
    assert made.judge is not None and made.judge.name == "keep"
    assert any(line.startswith("judge.name: mine:Judge -> keep") for line in said)


def test_what_it_has_no_problems_or_no_model_for_is_refused(tmp_path: Path) -> None:
    data = {"method": "grpo", "policy": {"path": "Qwen/Qwen3-4B"}, "tasks": {"path": "x.jsonl"}}
    own: dict[str, Any] = {**data, "tasks": {"path": "x.jsonl", "verifier": "mine:Exact"}}
    with pytest.raises(
        ConfigError, match="has problems for math and code, and none for 'mine:Exact'"
    ):
        small(parse_config(own, "test"), tmp_path)
    unknown: dict[str, Any] = {**data, "policy": {"path": "Some/Model"}}
    with pytest.raises(ConfigError, match="the shape of 'Some/Model' is not known here"):
        small(parse_config(unknown, "test"), tmp_path)


def test_the_tokenizer_reads_back_all_texts_and_has_the_template_without_thinking() -> None:
    tokenizer = HFTokenizer(byte_tokenizer())
    text = "héllo \n\n日本 😀 ```python\n"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
    prompts = PromptBuilder(tokenizer, chat=True, chat_template_kwargs={"enable_thinking": False})
    assert prompts.text(Task("t", "Hi")) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    thinking = PromptBuilder(tokenizer, chat=True)
    assert thinking.text(Task("t", "Hi")).endswith("<|im_start|>assistant\n")


def post(url: str, **body: Any) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        found: dict[str, Any] = json.load(reply)
        return found


def test_the_stand_in_does_what_it_declares_and_no_more() -> None:
    schema = {
        "type": "object",
        "properties": {
            "verdict": {"type": "string", "enum": ["keep", "revise"]},
            "step": {"type": ["integer", "null"]},
        },
    }
    structured = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    chats = [[{"role": "user", "content": f"Is {i} right?"}] for i in range(16)]
    with stand_in("judge", {"structured": "json_schema", "prefill": "none"}) as url:
        said = [
            json.loads(
                post(url, messages=c, response_format=structured)["choices"][0]["message"][
                    "content"
                ]
            )
            for c in chats
        ]
        kinds = [answer["verdict"] for answer in said]
        assert 2 <= kinds.count("revise") <= 14
        assert all(a["step"] == (1 if a["verdict"] == "revise" else None) for a in said)
        begun = [*chats[0], {"role": "assistant", "content": "The capital of France is Par"}]
        answered = post(url, messages=begun, continue_final_message=True)["choices"][0]["message"]
        assert not answered["content"].startswith("is")
    with stand_in("judge", {"structured": "none", "prefill": "vllm"}) as url:
        reply = post(url, messages=begun, continue_final_message=True, logprobs=True)
        assert reply["choices"][0]["message"]["content"] == "is."
        assert [entry["logprob"] for entry in reply["choices"][0]["logprobs"]["content"]] == [-0.5]
        assert reply["usage"]["prompt_tokens"] > 5
        plain = post(url, messages=chats[0], response_format=structured, max_tokens=4)
        text = plain["choices"][0]["message"]["content"]
        assert 0 < len(text) <= 16 and "{" not in text
