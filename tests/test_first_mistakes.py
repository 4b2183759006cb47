"""What somebody new gets wrong with parts of their own, and what they are told: cause, place, what
to write instead."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from typer.testing import CliRunner

from mintrl_env import Score, Task, recipes
from mintrl_env.adapters.reward_functions import (
    VerifierReward,
    check_rewards,
    code_reward,
    math_reward,
)
from mintrl_env.adapters.verl_score import compute_score
from mintrl_env.cli import app
from mintrl_env.config import TasksSection, load_config
from mintrl_env.errors import ConfigError, MissingExtraError, RegistryError, StoreError, UsageError
from mintrl_env.evaluation import evaluate_groups
from mintrl_env.judge_tables import bench_lines
from mintrl_env.loops import sync
from mintrl_env.placement import Placement, commands
from mintrl_env.registry import resolve
from mintrl_env.run_folder import RunFolder
from mintrl_env.scoring import check_verifier, gold_text, score_response
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Kind, StopReason
from mintrl_env.verifiers.math_answer import MathVerifier
from mintrl_env.verify import verify_file
from mintrl_env.verify_table import summary_lines

CONFIGS = Path(__file__).parents[1] / "configs"
TASK = Task("t", "1 + 1?", "2")
MODULE = """
from mintrl_env import Score


class Exact:
    async def score(self, task, response):
        return Score(float(task.answer == response), "compared")


class Words:
    def __init__(self, words):
        self.words = words

    async def score(self, task, response):
        return Score(float(len(response.split()) <= self.words), "counted")


class Plain:
    def score(self, task, response):
        return Score(1.0, "correct")


class Nothing:
    pass


ready = Exact()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of somebody's own, in the current folder."""
    (tmp_path / "mistaken_part.py").write_text(MODULE)
    (tmp_path / "mistaken_import.py").write_text("import json\nimport nothing_of_that_name\n")
    (tmp_path / "mistaken_syntax.py").write_text("x = 1\ndef f(:\n")
    (tmp_path / "mistaken_line.py").write_text("x = 1\ny = x / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "mistaken_part"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("mistaken_part:Exakt", "has no attribute 'Exakt', did you mean 'Exact'?"),
        ("mistaken_part.Exact", "did you mean 'mistaken_part:Exact'?"),
        ("mistaken_part.py:Exact", "without .py: mistaken_part:Exact"),
        ("mistaken_nowhere:Exact", "'mistaken_nowhere'; it is looked for in the current folder"),
        ("mistaken_import:X", "No module named 'nothing_of_that_name' (*mistaken_import.py:2)"),
        ("mistaken_syntax:X", "SyntaxError: invalid syntax (mistaken_syntax.py, line 2)"),
        ("mistaken_line:X", "ZeroDivisionError: division by zero (*mistaken_line.py:2)"),
    ],
)
def test_a_path_that_cannot_be_loaded(module: str, path: str, said: str) -> None:
    with pytest.raises(RegistryError) as caught:
        resolve("verifier", path)
    start, _, end = said.partition("*")
    assert start in str(caught.value) and end in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Plain", "Plain.score is a plain function: write `async def score`"),
        ("Nothing", "the verifier Nothing has no `async def score(self, task, response) -> Score`"),
    ],
)
def test_a_verifier_that_could_score_nothing(
    module: str, tmp_path: Path, name: str, said: str
) -> None:
    made = resolve("verifier", f"{module}:{name}")()
    section = TasksSection(path="t.jsonl", verifier=f"{module}:{name}")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"gold": "1", "response": "1"}\n')
    for error, call in (
        (UsageError, lambda: check_verifier(made)),
        (UsageError, lambda: VerifierReward(made, name="mine")),
        (UsageError, lambda: verify_file(rows, tmp_path / "out", kind=f"{module}:{name}")),
        (UsageError, lambda: compute_score("d", "1", "1", verifier=f"{module}:{name}")),
        (ConfigError, lambda: recipes.make_verifier(section, [], "tasks")),
    ):
        with pytest.raises(error) as caught:
            call()
        assert said in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_plain_score_is_refused_where_it_is_met_first() -> None:
    class Plain:
        def score(self, task: Task, response: str) -> Score:
            return Score(1.0, "correct")

    with pytest.raises(UsageError, match="write `async def score`"):
        sync(score_response(Plain(), TASK, "2"))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"is the class Plain, .* pass Plain\(\)"):
        sync(score_response(Plain, TASK, "2"))  # type: ignore[arg-type]


def test_an_object_is_a_part_as_its_class_is(module: str) -> None:
    for name in ("Exact", "ready"):
        section = TasksSection(path="t.jsonl", verifier=f"{module}:{name}")
        assert type(recipes.make_verifier(section, [], "tasks")).__name__ == "Exact"
    ready = resolve("verifier", f"{module}:ready")
    with pytest.raises(ConfigError, match="the object is ready made and takes no words"):
        recipes.make("tasks.verifier_options", ready, {"words": 3})


def test_an_option_with_a_typo_gets_the_nearest() -> None:
    def factory(words: int, tau: float) -> None:
        raise AssertionError

    with pytest.raises(ConfigError, match="no option 'word'; did you mean words"):
        recipes.make("judge.options", factory, {"word": 3})


def test_golds_in_the_form_of_gsm8k() -> None:
    whole = "She sold 48 / 2 = 24, so 48 + 24 = 72.\n#### 72"
    assert (gold_text(whole), gold_text(72), gold_text("72"), gold_text(None)) == (
        *("72",) * 3,
        None,
    )
    said = [r"\boxed{72}", "#### 72", "#### 24"]
    assert math_reward()(prompts=["?"] * 3, completions=said, answer=[whole] * 3) == [1.0, 1.0, 0.0]
    assert compute_score("gsm8k", "#### 72", whole)["score"] == 1.0


def test_no_gold_is_undecided_for_verl() -> None:
    found = compute_score("gsm8k", "#### None", None)
    assert (found["score"], found["undecided"], found["status"]) == (0.0, 1.0, "bad_gold")


def test_columns_of_another_length() -> None:
    for answer in (["2"], "2"):
        with pytest.raises(UsageError, match="2 completions and 1 rows for the answer"):
            math_reward()(prompts=["?"] * 2, completions=["2", "3"], answer=answer)


def test_a_batch_without_any_reward_says_why_once() -> None:
    reward = code_reward()
    batch: dict[str, Any] = {"prompts": ["?"], "completions": ["x"], "tests": ["no tests"]}
    with pytest.warns(
        UserWarning, match="code_reward: none of 1 responses could be scored"
    ) as said:
        assert reward(**batch) == [None] and reward(**batch) == [None]
    assert len(said) == 1 and "bad_tests: " in str(said[0].message)


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_verify_shows_the_first_reason_of_each_status(tmp_path: Path) -> None:
    rows = write(
        tmp_path / "rows.jsonl",
        {"gold": "72", "response": "#### 72"},
        {"gold": "She has 72.\n#### 72", "response": "#### 72"},
        {"answer": "7", "response": "7"},
        {"gold": "7", "response": ["7"]},
        [{"gold": "7", "response": "7"}],
    )
    summary = verify_file(rows, tmp_path / "out")
    assert summary.statuses == {"correct": 2, "bad_row": 3}
    assert "first bad_row: line 3: no field 'gold'; the row has answer, response" in summary_lines(
        summary
    )
    details = [json.loads(line)["detail"] for line in (tmp_path / "out").open()]
    assert details[3:] == [
        "field 'response' must be a text, not a list",
        "a row is an object, not a list; write its rows one a line",
    ]


def test_verify_has_a_word_for_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1\x15\x04\xff")
    summary = verify_file(tmp_path / "rows.parquet", tmp_path / "out")
    assert summary_lines(summary)[-2:] == [
        "skipped: 1 line that is no JSON",
        "there was no row to score: rows are JSON Lines in UTF-8, an object a line",
    ]


def test_verify_takes_options_of_the_verifier_and_shows_no_control_characters(
    module: str, tmp_path: Path
) -> None:
    row = {"response": "a b c"}
    rows = write(tmp_path / "rows.jsonl", row, {"\ud800\x1b[31m": 1})
    asked = ["verify", str(rows), "--out", "out.jsonl", "--kind", f"{module}:Words"]
    for words, reward in ((2, 0.0), (3, 1.0)):
        result = CliRunner().invoke(app, [*asked, "--set", f"words={words}"])
        assert result.exit_code == 0, result.output
        assert json.loads(Path("out.jsonl").read_text().splitlines()[0])["reward"] == reward
        assert r"the row has \ud800\x1b[31m" in result.output
    with pytest.raises(ConfigError, match=r"write it as section\.key=value"):
        CliRunner().invoke(app, [*asked, "--set", "words"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"structured": "json"}, "capabilities.structured is one of json_schema, structured_outp"),
        ({"prefill": True}, "capabilities.prefill is one of none, vllm, trailing, deepseek, not T"),
        ({"logprobs": "yes"}, "capabilities.logprobs is true or false, not 'yes'"),
    ],
)
def test_what_a_server_can_do_is_checked_before_it_is_asked(
    given: dict[str, Any], said: str
) -> None:
    from mintrl_env.adapters.llm_judge import LLMJudge

    with pytest.raises(UsageError) as caught:
        LLMJudge("http://127.0.0.1:9/v1", "m", capabilities=given)
    assert said in str(caught.value)


def test_a_command_without_resume_does_not_offer_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.config_file.write_text("{}")
    for resume, said in ((None, "already: choose another"), (False, "go on with it by --resume")):
        with pytest.raises(StoreError, match=said):
            folder.check(None, resume=resume)  # type: ignore[arg-type]


def test_seconds_of_a_review_are_readable() -> None:
    def line(p50: float | None, p95: float | None) -> str:
        cost = {"calls": 1, "prompt_tokens": 1, "completion_tokens": 1, "usd": 0.0}
        cost |= {"seconds_p50": p50, "seconds_p95": p95, "no_verdict_by_cause": {}}
        figures = {"cost": cost | {"refused_corrections": 0}, "judge": {"verdicts": {}}}
        return bench_lines(figures | {"concurrent": 4})[1]

    assert "a review takes 0.036 ms (p50), 12.3 s (p95), 4 at once" in line(3.57e-5, 12.34)
    assert "a review takes - (p50), - (p95)" in line(None, None)


def test_rollouts_say_why_reviews_failed_and_rows_are_undecided() -> None:
    from types import SimpleNamespace

    from mintrl_env.running import _first_reasons
    from mintrl_env.types import Outcome

    kept = SimpleNamespace(outcome=Outcome.KEEP, cause="", reason="fine")
    failed = SimpleNamespace(outcome=Outcome.FAILED, cause="internal", reason="KeyError: 'x'")
    fine: Any = SimpleNamespace(score=Score(1.0, "correct", "box"), reviews=[kept])
    bad: Any = SimpleNamespace(
        score=Score.undecided("unavailable", "KeyError: 'y'"), reviews=[kept, failed]
    )
    rows: list[Trajectory] = [fine, bad, bad]
    assert _first_reasons(rows) == {
        "first_undecided": "unavailable: KeyError: 'y'",
        "first_failed_review": "internal: KeyError: 'x'",
    }
    assert _first_reasons([fine]) == {}


@pytest.mark.parametrize(
    "gold",
    ["The answer is 72", "She has 9 * 8.\n#### 72", "The final answer is $72$.", "Answer: 72"],
)
def test_a_gold_that_is_a_sentence_is_read_at_its_anchor(gold: str) -> None:
    verifier = MathVerifier(workers=1)
    assert verifier.score_sync(Task("t", "", gold), r"So \boxed{72}.").reward == 1.0
    assert verifier.score_sync(Task("t", "", gold), r"So \boxed{8}.").reward == 0.0


def test_an_answer_is_text() -> None:
    with pytest.raises(UsageError, match="task t: the answer is text, as '2', or None, not int"):
        Task("t", "1 + 1?", 2)  # type: ignore[arg-type]


def test_an_environments_tasks_are_tasks() -> None:
    with pytest.raises(UsageError, match=r"not dict: Task\(task_id, prompt, answer\)"):
        gymnasium.make("MinTRL/Policy-v0", tasks=[{"prompt": "1+1", "answer": "2"}])


def test_a_reward_is_made_by_a_call() -> None:
    with pytest.raises(UsageError, match=r"math_reward makes .*: pass math_reward\(\)"):
        check_rewards([len, math_reward])
    check_rewards([len, math_reward()])


def test_a_data_set_has_rows_and_prompts() -> None:
    datasets = pytest.importorskip("datasets")
    from mintrl_env.adapters.trl_rows import check_dataset

    check_dataset("train_dataset", datasets.Dataset.from_list([{"prompt": "x"}]))
    check_dataset("train_dataset", None)
    with pytest.raises(UsageError, match="train_dataset has no row"):
        check_dataset("train_dataset", datasets.Dataset.from_list([]))
    with pytest.raises(UsageError, match="no column 'prompt'; its columns are question, answer"):
        check_dataset(
            "train_dataset", datasets.Dataset.from_list([{"question": "x", "answer": "y"}])
        )


@pytest.mark.parametrize(
    ("file", "overrides", "message"),
    [
        (
            "judge_llm.yaml",
            [],
            "judge_llm.yaml is a judge's file: a run's config names it, as judge:",
        ),
        ("eval_math.yaml", [], "is a suite of evaluations: mintrl eval-suite RUN"),
        (
            "quickstart_mintrl.yaml",
            ["judge=quickstart_grpo.yaml"],
            "quickstart_grpo.yaml is a run's config, not a judge's file",
        ),
    ],
)
def test_files_of_another_kind_are_told_apart(
    file: str, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(CONFIGS / file, overrides)
    assert len(str(caught.value).splitlines()) == 1


def test_no_server_is_given_a_built_in_model() -> None:
    config = load_config(CONFIGS / "quickstart_mintrl.yaml", [])
    with pytest.raises(
        ConfigError, match=r"policy\.path: warmup:student is made by the run itself"
    ):
        commands(config, Placement((0,), (1,), ()), "x.yaml")


def test_alike_values_have_an_interval_with_a_width() -> None:
    row = Trajectory.failed(
        task_id="t", prompt_ids=[1], kind=Kind.CONTROL, update=-1, rollout=0, eos_id=2,
        cause="", stop_reason=StopReason.EOS,
    )  # fmt: skip
    wrong = replace(row, valid=True, score=Score(0.0, "wrong"))
    groups = [[replace(wrong, task_id=f"t{i}"), wrong] for i in range(8)]
    found = evaluate_groups(groups)
    assert found["accuracy"] == 0.0
    assert found["ci95"] == pytest.approx([0.0, 0.3244], abs=1e-4)  # Wilson, 0 of 8


def test_a_package_that_is_hidden_is_told_from_one_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hidden_package.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def message(statement: str) -> str:
        try:
            exec(statement)
        except ImportError:
            return str(MissingExtraError("hidden_package", "trl", "this"))
        raise AssertionError(statement)

    missing = 'which is not installed: pip install "mintrl-env[trl]"'
    assert missing in message("import no_such_package")
    assert missing in message("import no_such_package.inside")
    hidden = "what goes by that name fails"
    assert hidden in message("from hidden_package import y")
    assert hidden in message("import hidden_package.inside")
    assert missing in str(MissingExtraError("trl", "trl", "this"))
