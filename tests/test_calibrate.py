"""kappa from what a judge writes, the sweep over (k, R, L), and what comes out to paste."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

pytest.importorskip("trl")

import torch
from transformers import AutoModelForCausalLM

from mintrl_env import registry
from mintrl_env.calibrate import (
    OWN,
    STAND_IN,
    calibrate,
    choose,
    grid,
    print_calibration,
    star,
    yaml_lines,
)
from mintrl_env.calibrate_plot import write_plot
from mintrl_env.chat import Capabilities, ChatMessage, ChatReply
from mintrl_env.cli import app
from mintrl_env.config import RunConfig, parse_config
from mintrl_env.console import RunConsole
from mintrl_env.errors import ConfigError, JudgeError, UsageError
from mintrl_env.judges import KeepJudge, ShuffledJudge
from mintrl_env.kappa import RecordingChat, RecordingEngine, Written, kappa_figures, watch_chats
from mintrl_env.keys import RowKey
from mintrl_env.prompts import ByteTokenizer
from mintrl_env.protocols import Sampling
from mintrl_env.run_folder import RunFolder
from mintrl_env.running import open_policy
from mintrl_env.testing import ScriptedJudge
from mintrl_env.types import Chunk, Provenance, ReviewRequest, Usage, Verdict

QUIET = RunConsole()


class TestKappa:
    def test_by_hand(self) -> None:
        found = kappa_figures([Written(-1.0, 4), Written(-3.0, 2), Written(0.0, 4)])
        assert found["kappa"] == pytest.approx(-0.4)  # not the mean of -0.25, -1.5 and 0
        assert (found["corrections"], found["tokens"]) == (3, 10)
        assert found["spread"]["p50"] == -0.25
        low, high = found["kappa_ci95"]
        assert -1.5 <= low < -0.4 < high <= 0.0

    def test_of_nothing(self) -> None:
        assert kappa_figures([])["kappa"] is None
        with pytest.raises(UsageError, match="at least one token"):
            kappa_figures([Written(-1.0, 0)])

    def test_log_probs_that_nobody_told_are_left_out(self) -> None:
        known = [Written(-1.0, 4), Written(-3.0, 2)]
        found = kappa_figures([Written(-np.inf, 3), *known, Written(np.nan, 9)])
        assert (found["kappa"], found["corrections"], found["tokens"]) == (-4 / 6, 2, 6)
        assert found["unknown"] == 2
        none = kappa_figures([Written(np.nan, 9)])
        assert (none["kappa"], none["corrections"], none["unknown"]) == (None, 0, 1)


class Engine:
    """Writes 5, 6, 7 and EOS; the log-prob of token t at place i is -t / 10 - i / 100."""

    rounds = "not a method"

    async def generate(
        self, ids: Any, *, max_tokens: int, stop: Any, sampling: Sampling, key: RowKey
    ) -> Chunk:
        return Chunk(np.array([5, 6, 7, 256][:max_tokens]))

    async def logprobs(self, ids: Any, start: int, *, key: Any = None) -> Any:
        places = np.arange(start, len(ids))
        return (-np.asarray(ids[start:]) / 10 - places / 100).astype(np.float32)


class TestRecorders:
    def written(self, max_tokens: int) -> tuple[Chunk, list[Written]]:
        notes: list[Written] = []
        engine = RecordingEngine(Engine(), ByteTokenizer(), notes.append)
        chunk = asyncio.run(
            engine.generate(
                np.array([1, 2], dtype=np.int32), max_tokens=max_tokens, stop=(),
                sampling=Sampling(0.3), key=RowKey(0, 0, "t", 0),
            )
        )  # fmt: skip
        assert engine.rounds == "not a method"
        return chunk, notes

    def test_an_engine_scores_what_it_wrote_without_its_eos(self) -> None:
        chunk, notes = self.written(8)
        assert chunk.ids.tolist() == [5, 6, 7, 256]
        (note,) = notes
        assert note.tokens == 3
        assert note.logprob == pytest.approx(-(0.5 + 0.6 + 0.7) - (0.02 + 0.03 + 0.04))
        assert self.written(2)[1][0].tokens == 2

    def test_a_chat_model_counts_in_the_policys_tokens(self) -> None:
        notes: list[Written] = []
        chat = RecordingChat(Chat(), ByteTokenizer(), notes.append)
        say = [ChatMessage("user", "go on")]

        async def ask(**options: Any) -> ChatReply:
            return await chat.chat(say, max_tokens=9, **options)

        assert asyncio.run(ask()).text == "1 + 2 = 3"
        assert asyncio.run(ask(schema={"type": "object"})).text.startswith("{")
        # The server's three tokens are nine bytes; the verdict is no correction.
        assert notes == [Written(pytest.approx(-0.9), 9)]
        assert (chat.capabilities.logprobs, chat.name) == (True, "fake")

    def test_a_judge_is_watched_wherever_it_keeps_its_model(self) -> None:
        judge = ShuffledJudge(ChattyJudge())
        notes: list[Written] = []
        assert watch_chats(judge, ByteTokenizer(), notes.append) == 1
        assert watch_chats(judge, ByteTokenizer(), notes.append) == 0
        assert watch_chats(KeepJudge(), ByteTokenizer(), notes.append) == 0


class Chat:
    """A chat model that revises the first step to `1 + 2 = 3`, and tells its log-probs."""

    name = "fake"

    def __init__(self, *, logprobs: bool = True) -> None:
        self.capabilities = Capabilities(logprobs=logprobs)

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        max_tokens: int,
        schema: Mapping[str, Any] | None = None,
        prefill: str = "",
        stop: Sequence[str] = (),
        temperature: float = 1.0,
        seed: int | None = None,
    ) -> ChatReply:
        logprobs = (-0.3, -0.2, -0.4) if self.capabilities.logprobs else None
        if schema is not None:
            text = json.dumps({"reason": "no", "verdict": "revise", "step": 1})
            return ChatReply(text, "stop", Usage(9, 9), logprobs)
        return ChatReply("1 + 2 = 3", "stop", Usage(9, 3), logprobs)


class ChattyJudge:
    """Asks for a verdict, then for the correction."""

    def __init__(self, logprobs: bool = True) -> None:
        self.model = Chat(logprobs=logprobs)

    async def review(self, request: ReviewRequest) -> Verdict:
        ask = [ChatMessage("user", request.chunk_text)]
        reply = await self.model.chat(ask, max_tokens=9, schema={"type": "object"})
        step = json.loads(reply.text)["step"] - 1
        written = await self.model.chat(ask, max_tokens=request.max_correction)
        return Verdict.revise(step, written.text, usage=reply.usage + written.usage)


# --- points


def config(policy: str = "unused", **changes: Any) -> RunConfig:
    data: dict[str, Any] = {
        "method": "mintrl-const",
        "policy": {"path": policy, "chat": False},
        "tasks": {"name": "sums", "options": {"count": 6}},
        "judge": {"name": "arithmetic", "guards": {}},
        "episode": {
            "max_correction": 8, "max_response": 40, "chunk_tokens": 8, "max_reviews": 2,
            "step_delimiters": ["\n"],
        },
        "rollout": {"n_control": 2, "n_intervened": 2, "slots": 8},
        "train": {"updates": 1, "prompts_per_update": 4, "micro_batch": 16},
    }  # fmt: skip
    return parse_config(data | changes, "test")


class TestPoints:
    def test_star(self) -> None:
        assert star(config()) == [
            (4, 2, 8), (16, 2, 8), (8, 1, 8), (8, 4, 8), (8, 2, 4), (8, 2, 16),
        ]  # fmt: skip

    def test_grid(self) -> None:
        assert grid(config(), "4,8", None, "2,3") == [(4, 2, 2), (4, 2, 3), (8, 2, 2), (8, 2, 3)]
        for wrong in ("", "0", "4,", "a", "-1"):
            with pytest.raises(UsageError, match="--r takes numbers from 1"):
                grid(config(), None, wrong, None)
        many = ",".join(map(str, range(1, 10)))
        with pytest.raises(UsageError, match="81 points are too many"):
            grid(config(), many, many, None)


def point(gain: float | None, fraction: float | None, **more: Any) -> dict[str, Any]:
    ends = None if gain is None else [gain - 0.1, gain + 0.1]
    return {
        "k": 8, "R": 2, "L": 4, "reward_gain": gain, "reward_gain_ci95": ends,
        "off_policy_fraction_intervened": fraction, "kappa": -0.2, "source": OWN, **more,
    }  # fmt: skip


class TestChoice:
    @pytest.mark.parametrize(
        ("points", "chosen", "why"),
        [
            ([(0.5, 0.10), (0.2, 0.03), (0.3, 0.04)], 2, "highest gain with at most 4%"),
            ([(0.2, 0.03), (0.2, 0.02)], 1, "highest gain"),
            ([(0.5, 0.10), (0.2, 0.06)], 1, "every point has more than 4%"),
            ([(None, 0.01), (-0.1, 0.02)], 1, "highest gain"),
            ([(None, None)], 0, "the config's own settings stay"),
        ],
    )
    def test_the_gain_within_few_tokens(
        self, points: list[tuple[float | None, float | None]], chosen: int, why: str
    ) -> None:
        found, reason = choose([point(*p) for p in points])
        assert found == chosen
        assert why in reason

    @pytest.mark.parametrize(
        ("kappa", "written"),
        [(-0.23456, -0.235), (None, -0.2), (0.0, 0.0), (-0.0004, 0.0), (1e-9, 0.0)],
    )
    def test_the_lines_are_a_config(self, kappa: float | None, written: float) -> None:
        own = config()
        figures = {
            "points": [point(0.1, 0.03, kappa=kappa, k=12, R=3, L=5)], "chosen": 0,
            "tasks": 4, "why": "because", "source": OWN,
        }  # fmt: skip
        lines = yaml_lines(figures, own)
        data = own.model_dump(mode="json")
        for name, section in yaml.safe_load(lines).items():
            data[name] |= section
        read = parse_config(data, "pasted")
        assert (read.episode.chunk_tokens, read.episode.max_reviews) == (12, 3)
        assert (read.episode.max_correction, read.objective.kappa) == (5, written)
        assert "-0.0\n" not in lines

    def test_the_plot_is_drawn_without_what_has_no_gain(self, tmp_path: Path) -> None:
        path = write_plot([point(0.1, 0.03), point(None, None)], 0, tmp_path / "a" / "x.svg")
        assert path.read_text().count("(8, 2, 4)<") == 1


# --- the pilot


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A policy of two layers over characters, as a transformers folder."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("policy")
    vocab = {c: i for i, c in enumerate("0123456789+=?\n -")}
    for special in ("[unk]", "[eos]", "[pad]"):
        vocab[special] = len(vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="[unk]"))
    backend.decoder = decoders.Fuse()
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[unk]", eos_token="[eos]", pad_token="[pad]"
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(hf), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, initializer_range=0.2,
            max_position_embeddings=256, eos_token_id=hf.eos_token_id,
            pad_token_id=hf.pad_token_id,
        )
    )  # fmt: skip
    model.save_pretrained(str(folder))
    hf.save_pretrained(str(folder))
    return str(folder)


SCORING: dict[str, Any] = {
    "name": "scoring",
    "options": {"tau": -3.0, "stop": ["\n"]},
    "guards": {},
}


class TestPilot:
    def test_a_judge_with_the_policys_weights_finds_its_corrections_as_likely_as_the_policy_does(
        self, tmp_path: Path, tiny_model: str
    ) -> None:
        judge = {**SCORING, "path": tiny_model}
        folder = RunFolder(tmp_path / "out")
        figures = calibrate(
            config(tiny_model, judge=judge), folder, tasks=3, points=[(8, 1, 3)], console=QUIET
        )
        own, small = figures["points"]
        assert [(p["k"], p["R"], p["L"]) for p in figures["points"]] == [(8, 2, 8), (8, 1, 3)]
        assert figures["source"] == OWN
        for found in (own, small):
            judges, policys = found["judge_logprobs"], found["policy_logprobs"]
            assert judges["corrections"] == policys["corrections"] > 0
            assert judges["tokens"] == policys["tokens"]
            assert judges["kappa"] == pytest.approx(policys["kappa"], abs=1e-4)
            assert found["kappa"] == judges["kappa"] < 0
        # Half the reviews and shorter corrections: fewer of the tokens are the judge's.
        assert 0 < small["off_policy_fraction_intervened"] < own["off_policy_fraction_intervened"]
        assert small["control_reward"] == own["control_reward"]
        assert {p.name for p in folder.path.iterdir()} >= {
            "calibrate.json", "calibrate.png", "calibrate.yaml",
        }  # fmt: skip
        assert (folder.path / "calibrate.png").read_bytes().startswith(b"\x89PNG")
        assert (folder.path / "calibrate.yaml").read_text() == figures["yaml"]
        assert json.loads((folder.path / "calibrate.json").read_text()) == figures

    def test_without_log_probs_a_stand_in_is_named(self, tmp_path: Path, tiny_model: str) -> None:
        registry._registered["judge"]["test-script"] = lambda: ScriptedJudge(
            lambda request: Verdict.revise(0, "1+2=3\n")
        )
        try:
            figures = calibrate(
                config(tiny_model, judge={"name": "test-script", "guards": {}}),
                RunFolder(tmp_path / "out"),
                tasks=2,
                console=QUIET,
            )
        finally:
            del registry._registered["judge"]["test-script"]
        assert figures["source"] == STAND_IN
        assert "tells no log-probs" in figures["warnings"][0]
        assert "a stand-in: the policy's log-probs" in figures["yaml"]
        (found,) = figures["points"]
        assert found["judge_logprobs"]["corrections"] == 0
        # 2 tasks x 2 rollouts x 2 reviews of 6 characters each.
        assert found["policy_logprobs"]["tokens"] == 48
        assert found["kappa"] == pytest.approx(self.by_hand(tiny_model), abs=1e-4)

    def by_hand(self, path: str) -> float:
        """The same rollouts again, scored by full forwards."""
        from mintrl_env import recipes
        from mintrl_env.adapters.session import RolloutSession
        from mintrl_env.judge_bench import BENCH

        own = config(path)
        tasks = recipes.load_task_set(own.tasks, "tasks")[:2]
        judge = ScriptedJudge(lambda request: Verdict.revise(0, "1+2=3\n"))
        settings = recipes.rollout_config(own)
        verifier = recipes.make_verifier(own.tasks, tasks, "tasks")
        with RolloutSession(open_policy(own), settings, judge=judge, verifier=verifier) as session:
            groups = session.groups(tasks, update=BENCH, rollouts=[[2, 3]] * 2)
        model = AutoModelForCausalLM.from_pretrained(path).double().eval()
        total, count = 0.0, 0
        for row in (row for rows in groups for row in rows):
            ids = torch.tensor(np.concatenate([row.prompt_ids, row.ids]), dtype=torch.long)
            with torch.no_grad():
                logp = torch.log_softmax(model(ids[None]).logits[0], -1)
            for place in np.flatnonzero(row.provenance == Provenance.INTERVENTION):
                at = len(row.prompt_ids) + int(place)
                total, count = total + float(logp[at - 1, ids[at]]), count + 1
        return total / count

    def test_a_chat_judge_by_its_servers_log_probs(self, tmp_path: Path, tiny_model: str) -> None:
        registry._registered["judge"]["test-chatty"] = ChattyJudge
        try:
            figures = calibrate(
                config(tiny_model, judge={"name": "test-chatty", "guards": {}}),
                RunFolder(tmp_path / "out"),
                tasks=2,
                console=QUIET,
            )
        finally:
            del registry._registered["judge"]["test-chatty"]
        # Three tokens of the server, -0.9 nats, are the nine characters of the policy.
        assert figures["source"] == OWN
        assert figures["kappa"] == pytest.approx(-0.1)
        assert "rests on 8 corrections" in figures["warnings"][0]
        assert "kappa: -0.1\n" in figures["yaml"]

    def test_the_command(
        self, tmp_path: Path, tiny_model: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, out = tmp_path / "c.yaml", tmp_path / "out"
        judge = {**SCORING, "path": tiny_model}
        path.write_text(yaml.safe_dump(config(tiny_model, judge=judge).model_dump(mode="json")))
        arguments = ["calibrate", str(path), "--out", str(out), "--tasks", "2", "--l", "2,4"]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        assert "chunk_tokens: 8" in result.output and "kappa: -" in result.output
        stored = json.loads((out / "calibrate.json").read_text())
        assert [p["L"] for p in stored["points"]] == [8, 2, 4]
        print_calibration(stored, QUIET)

    def test_what_can_not_be_calibrated(self, tmp_path: Path, tiny_model: str) -> None:
        folder = RunFolder(tmp_path / "out")
        with pytest.raises(ConfigError, match="nothing to calibrate"):
            calibrate(config(method="grpo", judge=None), folder, console=QUIET)
        grpo = config(method="grpo", rollout={"n_control": 0, "n_intervened": 4})
        with pytest.raises(ConfigError, match="n_control and n_intervened"):
            calibrate(grpo, folder, console=QUIET)
        registry._registered["judge"]["test-down"] = lambda: ScriptedJudge(
            lambda request: JudgeError("connection", "refused")
        )
        try:
            with pytest.raises(JudgeError, match=r"reviews of the pilot failed, .*refused"):
                calibrate(
                    config(tiny_model, judge={"name": "test-down", "guards": {}}),
                    folder,
                    tasks=2,
                    console=QUIET,
                )
        finally:
            del registry._registered["judge"]["test-down"]

    def test_a_judge_that_keeps_everything(self, tmp_path: Path, tiny_model: str) -> None:
        keep = config(tiny_model, judge={"name": "keep", "guards": {}})
        figures = calibrate(keep, RunFolder(tmp_path / "out"), tasks=2, console=QUIET)
        assert (figures["kappa"], figures["source"]) == (None, None)
        assert "wrote no correction" in figures["warnings"][0]
        assert "its interval holds 0" in figures["warnings"][-1]
        assert "kappa: -0.2\n" in figures["yaml"]
