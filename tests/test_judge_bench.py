"""Figures of judges by hand, rows as reviews, the command, and the player of MinTRL/Judge-v0."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from mintrl_env.cli import app
from mintrl_env.config import RunConfig, parse_config
from mintrl_env.console import RunConsole
from mintrl_env.env_defaults import SumPolicy
from mintrl_env.episode import EpisodeConfig
from mintrl_env.errors import ConfigError, JudgeError, StoreError, UsageError
from mintrl_env.judge_bench import (
    RowVerdict,
    costs,
    gain,
    judge_row,
    judge_rows,
    judged,
    play,
    review_request,
)
from mintrl_env.judge_data import JudgeRow, load_judge_rows
from mintrl_env.judge_metrics import Judged, always, judge_score, position_only
from mintrl_env.judge_tables import bench_tables
from mintrl_env.judges_arithmetic import ArithmeticJudge
from mintrl_env.judging import bench_figures, group_gain, judge_bench, read_verdicts
from mintrl_env.prompts import PromptBuilder
from mintrl_env.protocols import Tokenizer
from mintrl_env.rollout import Parts, RolloutConfig, Runner
from mintrl_env.run_folder import RunFolder
from mintrl_env.tasks import sum_tasks
from mintrl_env.testing import ScriptedJudge
from mintrl_env.types import Finish, Kind, Outcome, ReviewRequest, Usage, Verdict

SHARED = Path(__file__).resolve().parent.parent.parent / "shared" / "data"


def marks(*pairs: tuple[int, int | None], steps: int = 5) -> list[Judged]:
    """(first error, predicted) as rows, each of a problem of its own."""
    return [Judged(f"p{i}", steps, a, b) for i, (a, b) in enumerate(pairs)]


class TestScore:
    def test_by_hand(self) -> None:
        # Erroneous: exact, early by 1, late by 2, missed. Correct: two kept, one revised.
        rows = marks((2, 2), (3, 2), (1, 3), (0, -1), (-1, -1), (-1, -1), (-1, 4))
        score = judge_score(rows)
        assert (score["rows"], score["erroneous"], score["correct"]) == (7, 4, 3)
        assert score["accuracy_erroneous"] == 1 / 4
        assert score["accuracy_correct"] == 2 / 3
        assert score["f1"] == pytest.approx(2 * (1 / 4) * (2 / 3) / (1 / 4 + 2 / 3))
        assert score["accuracy"] == 3 / 7
        assert score["step_distance"] == (0 + 1 + 2) / 3
        assert score["verdicts"] == {
            "exact": 1, "early": 1, "late": 1, "missed": 1,
            "right_keep": 2, "false_revise": 1, "abstained": 0,
        }  # fmt: skip
        low, high = score["f1_ci95"]
        assert 0 <= low < score["f1"] < high <= 1

    def test_an_abstention_matches_nothing_and_is_counted_apart(self) -> None:
        score = judge_score(marks((1, 1), (1, None), (-1, -1), (-1, None)))
        assert score["abstained"] == 2
        assert (score["accuracy_erroneous"], score["accuracy_correct"]) == (0.5, 0.5)
        assert score["answered"] == {"accuracy_erroneous": 1, "accuracy_correct": 1, "f1": 1}
        assert judge_score(marks((1, None)))["answered"] is None

    def test_no_rows_of_a_kind(self) -> None:
        score = judge_score(marks((1, 1), (2, 0)))
        assert (score["f1"], score["accuracy_correct"]) == (None, None)
        assert score["accuracy_correct_ci95"] is None
        with pytest.raises(UsageError, match="no rows"):
            judge_score([])

    def test_rows_of_one_problem_are_drawn_together(self) -> None:
        apart = marks(*[(1, 1), (1, 0)] * 20)
        together = [Judged("one" if i % 2 else "two", 5, r.first_error, r.predicted)
                    for i, r in enumerate(apart)]  # fmt: skip
        low, high = judge_score(apart)["accuracy_erroneous_ci95"]
        wide_low, wide_high = judge_score(together)["accuracy_erroneous_ci95"]
        assert (wide_low, wide_high) == (0.0, 1.0)
        assert 0.2 < low < 0.5 < high < 0.8

    def test_by_source(self) -> None:
        rows = [Judged("a", 3, 1, 1, "x"), Judged("b", 3, -1, 0, "y")]
        score = judge_score(rows, by_source=True)
        assert {name: part["accuracy"] for name, part in score["by_source"].items()} == {
            "x": 1.0,
            "y": 0.0,
        }

    @given(st.lists(st.tuples(st.integers(-1, 4), st.integers(-1, 4)), min_size=1, max_size=30))
    @settings(max_examples=40, deadline=None)
    def test_the_verdicts_cover_the_rows_and_f1_lies_between(
        self, pairs: list[tuple[int, int | None]]
    ) -> None:
        score = judge_score(marks(*pairs), draws=50)
        assert sum(score["verdicts"].values()) == len(pairs)
        if score["f1"] is not None:
            a, b = score["accuracy_erroneous"], score["accuracy_correct"]
            assert min(a, b) - 1e-12 <= score["f1"] <= max(a, b) + 1e-12
        hits = sum(a == b for a, b in pairs)
        assert score["accuracy"] == pytest.approx(hits / len(pairs))


class TestBaselines:
    def test_always(self) -> None:
        rows = marks((0, 3), (2, 3), (-1, 3))
        correct, first = judge_score(always(rows, -1)), judge_score(always(rows, 0))
        assert (correct["accuracy_erroneous"], correct["accuracy_correct"]) == (0, 1)
        assert (first["accuracy_erroneous"], first["accuracy_correct"]) == (1 / 2, 0)
        assert correct["f1"] == first["f1"] == 0
        assert first["step_distance"] == 1

    def test_a_set_that_gives_the_error_away_by_its_length(self) -> None:
        # Long solutions are wrong at the last step but one, short ones are right.
        rows = [Judged(f"p{i}", 9, 7, None) for i in range(60)]
        rows += [Judged(f"q{i}", 4, -1, None) for i in range(60)]
        assert judge_score(position_only(rows))["f1"] == 1.0

    def test_a_place_from_the_end_over_many_lengths(self) -> None:
        rows = [Judged(f"p{i}", 3 + i % 15, 2 + i % 15, None) for i in range(200)]
        rows += [Judged(f"q{i}", 1, -1, None) for i in range(100)]
        assert judge_score(position_only(rows))["f1"] == 1.0

    def test_no_row_is_answered_by_a_rule_that_saw_it(self) -> None:
        # Noise: what one half says is nothing to the other, so that no guess beats chance by much.
        generator = np.random.default_rng(0)
        rows = [Judged(f"p{i}", 40, int(generator.integers(0, 40)), None) for i in range(400)] + [
            Judged(f"q{i}", 40, -1, None) for i in range(400)
        ]
        score = judge_score(position_only(rows))
        assert score["accuracy_erroneous"] < 0.08
        assert position_only(rows) == position_only(rows)

    def test_few_rows(self) -> None:
        for count in (1, 2, 3):
            assert len(position_only(marks(*[(1, 0)] * count))) == count


# --- rows as reviews

ROW = JudgeRow("r", "What is 2 + 3, times 4?", ("2 + 3 = 5", "", "5 * 4 = 21", "It is 21."), 2)


def prompts(tokenizer: Tokenizer) -> PromptBuilder:
    return PromptBuilder(tokenizer, chat=False)


@pytest.mark.parametrize("kind", ["byte", "bpe", "sentencepiece", "metaspace"])
class TestRequest:
    def test_all_steps_are_one_chunk(
        self, made_tokenizers: dict[str, Tokenizer], kind: str
    ) -> None:
        tokenizer = made_tokenizers[kind]
        request = review_request(ROW, prompts(tokenizer), max_correction=9)
        assert [step.text.strip() for step in request.steps] == list(ROW.steps)
        assert request.chunk_text == "2 + 3 = 5\n\n\n\n5 * 4 = 21\n\nIt is 21."
        assert (request.accepted_text, request.finish) == ("", Finish.EOS)
        assert int(request.chunk_ids[-1]) in tokenizer.eos_ids
        assert (request.task.answer, request.task.context) == (None, None)
        assert request.max_correction == 9
        cuts = [step.cut for step in request.steps]
        assert cuts[0] == 0 and cuts == sorted(cuts)
        if kind in ("byte", "bpe"):  # the others write some of these characters otherwise
            for index, step in enumerate(request.steps):
                kept = tokenizer.decode(request.chunk_ids[: step.cut])
                assert kept + step.carry == request.kept_text(index)

    def test_the_reference_is_shown_where_the_row_has_it(
        self, made_tokenizers: dict[str, Tokenizer], kind: str
    ) -> None:
        row = JudgeRow("r", "p", ("a",), -1, context="the reference")
        request = review_request(row, prompts(made_tokenizers[kind]), max_correction=9)
        assert request.task.context == "the reference"


def run(
    judge: Any, rows: Sequence[JudgeRow], tokenizer: Tokenizer, **options: Any
) -> list[RowVerdict]:
    requests = [review_request(row, prompts(tokenizer), max_correction=8) for row in rows]
    return asyncio.run(judge_rows(judge, requests, tokenizer, **options))


def rows(count: int) -> list[JudgeRow]:
    return [JudgeRow(f"r{i}", f"p{i}", ("a", "b", "c"), i % 4 - 1) for i in range(count)]


class TestRows:
    def test_outcomes(self, made_tokenizers: dict[str, Tokenizer]) -> None:
        answers = [
            Verdict.keep("fine", Usage(10, 2, 0.5)),
            Verdict.revise(1, "B", "no", Usage(20, 4, 0.25)),
            Verdict.revise(1, "B<|eos|>"),
            Verdict.revise(7, "B"),
            JudgeError("unparsed", "no JSON", usage=Usage(5, 5)),
            JudgeError("timeout", "slow"),
            RuntimeError("a bug"),
            Verdict.revise(0, made_tokenizers["bpe"].encode("A")),
        ]
        script = dict(zip((f"r{i}" for i in range(8)), answers, strict=True))
        judge = ScriptedJudge(lambda request: script[request.task.task_id])
        found = run(judge, rows(8), made_tokenizers["bpe"])
        assert [(v.outcome.value, v.predicted, v.cause) for v in found] == [
            ("keep", -1, ""),
            ("revise", 1, ""),
            ("revise", 1, ""),
            ("unparsed", None, "bad_step"),
            ("unparsed", None, "unparsed"),
            ("failed", None, "timeout"),
            ("failed", None, "internal"),
            ("revise", 0, ""),
        ]
        assert [bool(v.refused) for v in found] == [False, False, True] + [False] * 5
        assert "special token" in found[2].refused
        assert found[7].correction == "A"
        cost = costs(found)
        assert (cost["prompt_tokens"], cost["completion_tokens"], cost["usd"]) == (35, 11, 0.75)
        assert cost["no_verdict_by_cause"] == {
            "bad_step": 1, "unparsed": 1, "timeout": 1, "internal": 1,
        }  # fmt: skip
        assert (cost["refused_corrections"], cost["empty_corrections"]) == (1, 0)
        # first errors are -1, 0, 1, 2, -1, 0, 1, 2
        score = judge_score(judged(rows(8), found))
        assert score["verdicts"] == {
            "exact": 1, "early": 1, "late": 1, "missed": 0,
            "right_keep": 1, "false_revise": 0, "abstained": 4,
        }  # fmt: skip

    def test_a_judge_that_hangs_is_a_timeout(self, made_tokenizers: dict[str, Tokenizer]) -> None:
        judge = ScriptedJudge([Verdict.keep()], latency=60.0)
        (found,) = run(judge, rows(1), made_tokenizers["byte"], deadline_s=0.05)
        assert (found.outcome, found.cause) == (Outcome.FAILED, "timeout")

    def test_at_most_so_many_at_once(self, made_tokenizers: dict[str, Tokenizer]) -> None:
        live = most = 0

        class Counting:
            async def review(self, request: ReviewRequest) -> Verdict:
                nonlocal live, most
                live += 1
                most = max(most, live)
                await asyncio.sleep(0)
                live -= 1
                return Verdict.keep()

        run(Counting(), rows(20), made_tokenizers["byte"], concurrent=3)
        assert most == 3

    def test_a_judge_that_only_fails_is_given_up(
        self, made_tokenizers: dict[str, Tokenizer]
    ) -> None:
        done: list[RowVerdict] = []
        down = ScriptedJudge(lambda request: JudgeError("connection", "refused"))
        with pytest.raises(JudgeError, match=r"32 of 32 reviews failed, .*refused"):
            run(down, rows(50), made_tokenizers["byte"], concurrent=1, on_verdict=done.append)
        assert len(done) == 32
        # Answers that can't be parsed are the judge's own, and a result.
        mute = ScriptedJudge(lambda request: JudgeError("unparsed", "no JSON"))
        assert len(run(mute, rows(50), made_tokenizers["byte"])) == 50

    def test_a_verdict_goes_through_json(self) -> None:
        verdict = RowVerdict(
            "r", Outcome.REVISE, 2, "x", "why", refused="no", usage=Usage(1, 2, 0.5), seconds=0.25
        )
        data = json.loads(json.dumps({**verdict.as_dict(), "more": 1}))
        assert RowVerdict.from_dict(data) == verdict

    def test_a_row_without_a_verdict(self) -> None:
        with pytest.raises(UsageError, match="'r1' has no verdict"):
            judged(rows(2), [RowVerdict("r0", Outcome.KEEP)])

    def test_one_row(self, made_tokenizers: dict[str, Tokenizer]) -> None:
        tokenizer = made_tokenizers["byte"]
        request = review_request(ROW, prompts(tokenizer), max_correction=20)
        found = asyncio.run(judge_row(ArithmeticJudge(), request, tokenizer))
        assert (found.predicted, found.correction) == (2, "5 * 4 = 20\n\n")


# --- MinTRL/Judge-v0


class TestJudgeEnv:
    @pytest.mark.parametrize("seed", range(6))
    def test_a_verdict_as_action_is_a_review_of_the_runner(self, seed: int) -> None:
        limits = {"chunk_tokens": 12, "max_reviews": 3, "max_correction": 20, "max_response": 80}
        env: Any = gymnasium.make("MinTRL/Judge-v0", **limits)
        try:
            reward, _ = play(env, ArithmeticJudge(), seed=seed)
            played, episode = env.unwrapped.trajectory(), env.unwrapped.episode
            setup = env.unwrapped.setup
            runner = Runner(
                Parts(
                    SumPolicy(setup.tokenizer),
                    ArithmeticJudge(),
                    verifier=setup.verifier_of(episode.task),
                ),
                setup.prompts,
                RolloutConfig(episode=EpisodeConfig(**limits), n_control=0, n_intervened=1),
                seed=episode.key.seed,
            )
            ((row,),) = asyncio.run(runner.collect([episode.task], update=0))
        finally:
            env.close()
        assert row.ids.tolist() == played.ids.tolist()
        assert row.provenance.tolist() == played.provenance.tolist()
        outcomes = [(r.outcome, r.step, r.cut, r.dropped_ids.tolist()) for r in row.reviews]
        assert outcomes == [
            (r.outcome, r.step, r.cut, r.dropped_ids.tolist()) for r in played.reviews
        ]
        assert row.reward == reward

    def test_a_failed_review_is_a_keep(self) -> None:
        env = gymnasium.make("MinTRL/Judge-v0")
        try:
            judge = ScriptedJudge(lambda request: JudgeError("timeout", "slow"))
            reward, info = play(env, judge, seed=1)
        finally:
            env.close()
        assert info["valid"] and reward in (0.0, 1.0)

    def test_gain_by_hand(self) -> None:
        found = gain([(0.0, 1.0), (0.5, 0.5), (1.0, 0.5)])
        assert found["reward_gain"] == pytest.approx(0.5 / 3)
        assert (found["control_reward"], found["intervened_reward"]) == (0.5, pytest.approx(2 / 3))
        low, high = found["reward_gain_ci95"]
        assert -0.5 <= low <= found["reward_gain"] <= high <= 1.0


# --- the command


def config(policy: str = "unused", **changes: Any) -> RunConfig:
    data: dict[str, Any] = {
        "method": "mintrl-const",
        "policy": {"path": policy, "chat": False},
        "tasks": {"name": "sums", "options": {"count": 6}},
        "judge": {"name": "arithmetic", "guards": {}},
        "episode": {"max_correction": 24, "max_response": 64, "chunk_tokens": 16},
        "rollout": {"n_control": 2, "n_intervened": 2, "slots": 8},
        "train": {"updates": 1, "prompts_per_update": 4, "micro_batch": 16},
    }
    return parse_config(data | changes, "test")


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A policy of two layers over characters, as a transformers folder."""
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("policy")
    characters = "0123456789+-*/=?.\n abcdefghijklmnopqrstuvwxyzASTWI"
    vocab = {c: i for i, c in enumerate(dict.fromkeys(characters))}
    for special in ("[unk]", "[eos]", "[pad]"):
        vocab[special] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="[unk]"))
    backend.decoder = decoders.Fuse()
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[unk]", eos_token="[eos]", pad_token="[pad]"
    )
    import torch

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(hf), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, initializer_range=0.2,
            max_position_embeddings=512, eos_token_id=hf.eos_token_id,
            pad_token_id=hf.pad_token_id,
        )
    )  # fmt: skip
    model.save_pretrained(str(folder))
    hf.save_pretrained(str(folder))
    return str(folder)


@pytest.fixture
def data(tmp_path: Path) -> str:
    """Twelve rows: 6 with a wrong product at step 1, 6 without an error."""
    path = tmp_path / "rows.jsonl"
    lines = []
    for i in range(12):
        product = 3 * (i + 2) + (i % 2)
        steps = [f"1 + {i + 1} = {i + 2}", f"3 * {i + 2} = {product}", f"so it is {product}"]
        row = {
            "id": f"row{i}", "problem": f"problem {i}", "steps": steps,
            "first_error": 1 if i % 2 else -1, "source": "odd" if i % 2 else "even",
            "solution": f"3 * {i + 2} = {3 * (i + 2)}",
        }  # fmt: skip
        lines.append(json.dumps(row) + "\n")
    path.write_text("".join(lines))
    return str(path)


QUIET = RunConsole()


class TestCommand:
    def test_a_judge_without_a_model(self, tmp_path: Path, tiny_model: str, data: str) -> None:
        path = tmp_path / "c.yaml"
        path.write_text(yaml.safe_dump(config(tiny_model).model_dump(mode="json")))
        out = tmp_path / "out"
        result = CliRunner().invoke(
            app, ["judge-bench", str(path), "--data", data, "--out", str(out)]
        )
        assert result.exit_code == 0, result.output
        assert "12 rows, 6 with an error" in result.output
        for name in ("arithmetic", "always correct", "always first", "position only"):
            assert name in result.output
        figures = json.loads((out / "judge_bench.json").read_text())
        assert figures["judge"]["f1"] == 1.0
        assert figures["judge"]["verdicts"]["exact"] == 6
        assert figures["baselines"]["always correct"]["accuracy_correct"] == 1.0
        assert figures["judge"]["by_source"]["odd"]["accuracy_erroneous"] == 1.0
        lines = [json.loads(line) for line in (out / "verdicts.jsonl").read_text().splitlines()]
        assert len(lines) == 12 and all(line["right"] for line in lines)
        assert lines[1]["correction"].startswith("3 * ")

    def test_finished_rows_are_kept(self, tmp_path: Path, tiny_model: str, data: str) -> None:
        folder = RunFolder(tmp_path / "out")
        judge_bench(config(tiny_model), folder, data=data, console=QUIET)
        path = folder.path / "verdicts.jsonl"
        stored = [json.loads(line) for line in path.read_text().splitlines()]
        # As if a kill had come: one row's service failed, three are not there, one is half there.
        stored[0] |= {"outcome": "failed", "cause": "connection", "right": False}
        stored[1] |= {"reason": "kept from the first run"}
        text = "".join(json.dumps(line) + "\n" for line in stored[:8])
        path.write_text(text + json.dumps(stored[8])[:40])
        with pytest.raises(StoreError, match="--resume"):
            judge_bench(config(tiny_model), folder, data=data, console=QUIET)
        figures = judge_bench(config(tiny_model), folder, data=data, resume=True, console=QUIET)
        assert figures["judge"]["f1"] == 1.0
        found = {v.row_id: v for v in read_verdicts(path)}
        assert len(found) == 12
        assert found["row1"].reason == "kept from the first run"
        assert found["row0"].outcome is Outcome.KEEP
        with pytest.raises(ConfigError, match="begun with another"):
            judge_bench(config(tiny_model), folder, data=data, limit=5, resume=True, console=QUIET)

    def test_a_broken_line_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "verdicts.jsonl"
        path.write_text('{"row_id": "a"}\n{"row_id": "b", "outcome": "keep"}\n')
        with pytest.raises(StoreError, match=r"verdicts\.jsonl:1: no verdict of ours"):
            read_verdicts(path)

    def test_no_judge(self, tmp_path: Path, data: str) -> None:
        plain = config(method="grpo", judge=None)
        with pytest.raises(ConfigError, match="nothing to benchmark"):
            judge_bench(plain, RunFolder(tmp_path / "out"), data=data, console=QUIET)

    def test_the_reference_goes_only_where_the_config_sends_it(
        self, tmp_path: Path, tiny_model: str, data: str
    ) -> None:
        # The self-judge can't do without one: it abstains from every row, and says why.
        own: dict[str, Any] = {"judge": {"name": "self", "options": {"stop": ["\n"]}}}
        alone = judge_bench(
            config(tiny_model, **own), RunFolder(tmp_path / "a"), data=data, console=QUIET
        )
        assert alone["judge"]["abstained"] == 12
        assert alone["cost"]["no_verdict_by_cause"] == {"internal": 12}
        tasks = {**config().tasks.model_dump(), "name": None, "options": {}, "path": data}
        tasks["columns"] = {"context": ["solution"]}
        shown = judge_bench(
            config(tiny_model, tasks=tasks, **own),
            RunFolder(tmp_path / "b"),
            data=data,
            console=QUIET,
        )
        assert shown["judge"]["abstained"] == 0
        assert shown["cost"]["calls"] > 12

    def test_rollouts_stand_beside(self, tmp_path: Path, tiny_model: str, data: str) -> None:
        figures = judge_bench(
            config(tiny_model),
            RunFolder(tmp_path / "out"),
            data=data,
            rollouts=3,
            console=QUIET,
        )
        found = figures["rollouts"]
        assert (found["tasks"], found["rollouts"]) == (3, 12)
        assert found["reward_gain"] == found["intervened_reward"] - found["control_reward"]
        stored = json.loads((tmp_path / "out" / "judge_bench.json").read_text())
        assert stored["rollouts"] == found
        (table, *_) = bench_tables(figures)
        assert list(table.columns[-1].cells) == [f"{found['reward_gain']:+.3f}", "+0.000", "-", "-"]

    def test_gain_over_groups_by_hand(self) -> None:
        runner = Runner(
            Parts(
                SumPolicy(prompts_bytes().tokenizer),
                ArithmeticJudge(),
                verifier=_last_integer(),
            ),
            prompts_bytes(),
            RolloutConfig(
                episode=EpisodeConfig(max_response=100, chunk_tokens=32),
                n_control=3,
                n_intervened=2,
            ),
            seed=5,
        )
        groups = asyncio.run(runner.collect(sum_tasks(count=8), update=0))
        by_kind = {
            kind: [np.mean([r.reward for r in rows if r.kind is kind]) for rows in groups]
            for kind in Kind
        }
        found = group_gain(groups)
        assert found["control_reward"] == pytest.approx(np.mean(by_kind[Kind.CONTROL]))
        assert found["intervened_reward"] == pytest.approx(np.mean(by_kind[Kind.INTERVENED]))
        assert found["reward_gain"] > 0.2
        assert found["tasks"] == 8
        assert group_gain([rows[:3] for rows in groups])["tasks"] == 0


def prompts_bytes() -> PromptBuilder:
    from mintrl_env.prompts import ByteTokenizer

    return PromptBuilder(ByteTokenizer())


def _last_integer() -> Any:
    from mintrl_env.env_defaults import LastIntegerVerifier

    return LastIntegerVerifier()


# --- published rows


@pytest.mark.skipif(not (SHARED / "judge").is_dir(), reason="the benchmark files are not here")
class TestPublished:
    def figures(self, name: str, source: str = "") -> dict[str, Any]:
        from mintrl_env.prompts import ByteTokenizer

        found = load_judge_rows(str(SHARED / "judge" / f"{name}.jsonl"))
        found = [row for row in found if source in row.source and len(row.steps) <= 20]
        return bench_figures(found, run(ArithmeticJudge(), found, ByteTokenizer()))

    def test_arithmetic_is_seen(self) -> None:
        figures = self.figures("bigbench_mistake", "multistep_arithmetic")
        judge, guess = figures["judge"], figures["baselines"]["position only"]
        assert (judge["rows"], judge["abstained"]) == (256, 0)
        assert judge["accuracy_erroneous"] > 0.95
        assert judge["accuracy_correct"] > 0.75
        assert judge["f1_ci95"][0] > guess["f1_ci95"][1] + 0.3

    def test_a_judge_that_sees_nothing_else_is_not_above_a_guess(self) -> None:
        figures = self.figures("prmbench_p1")
        assert figures["judge"]["accuracy_correct"] > 0.97
        assert figures["judge"]["f1"] < figures["baselines"]["position only"]["f1"] + 0.05
