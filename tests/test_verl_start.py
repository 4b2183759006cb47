"""What the trainer looks at before step 1, and a judge whose server goes away and comes back."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")
pytest.importorskip("trl")
pytest.importorskip("openai")

import yaml
from verl.trainer.ppo.v1 import PPOTrainerSync

from mintrl_env.adapters import verl_start, verl_trainer
from mintrl_env.adapters.verl_parts import DeadlineJudge, LoopSettings, judge_of
from mintrl_env.adapters.verl_start import check_judge, loop_settings, node_count
from mintrl_env.adapters.verl_trainer import MintrlTrainerSync
from mintrl_env.errors import ConfigError, JudgeError
from mintrl_env.judge_prompts import JudgePrompts
from mintrl_env.prompts import HFTokenizer
from mintrl_env.store_rows import from_row
from mintrl_env.types import Outcome, Task
from mintrl_env.verifiers.code_public import PublicTests


def module(name: str) -> Any:
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


parts = module("verl_parts")
fake = module("fake_llm_server")
HF = parts.tiny_trl().tokenizer()
EOS = HF.eos_token_id
TARGET = "mintrl_env.adapters.verl_agent_loop.MintrlAgentLoop"

pytestmark = pytest.mark.verl


def answer(body: Any) -> str:
    """Another one for each question, so that the server generates."""
    return f"On {body['messages'][-1]['content'][:12]}"


@pytest.fixture
def server() -> Iterator[Any]:
    with fake.FakeServer() as running:
        running.structured, running.chat = set(), answer
        yield running


def judge_at(url: str, **options: Any) -> dict[str, Any]:
    return {"name": "llm", "options": {"url": url, "model": "toy", **options}, "guards": {}}


def config(tmp_path: Path, judge: Any = None, *, loop: str = "mintrl_agent", **entry: Any) -> Any:
    """veRL's config, with an agent loop's file."""
    given = {"name": "mintrl_agent", "_target_": TARGET, "prompts": {"chat": False}, **entry}
    if judge is not None:
        given["judge"] = judge
    (tmp_path / "agent.yaml").write_text(
        yaml.safe_dump([{"name": "other", "_target_": "x"}, given])
    )
    agent = "actor_rollout_ref.rollout.agent"
    return parts.config(
        f"{agent}.agent_loop_config_path={tmp_path / 'agent.yaml'}",
        f"{agent}.default_agent_loop={loop}",
    )


def test_the_loops_settings_are_those_of_its_file(tmp_path: Path) -> None:
    judge = judge_at("http://judge:8000/v1")
    made = loop_settings(
        config(tmp_path, judge, episode={"chunk_tokens": 9}, seed=3, verifier=None)
    )
    assert made is not None
    assert (made.judge, made.episode, made.seed) == (judge, {"chunk_tokens": 9}, 3)
    assert made.verifier is None and made.prompts == {"chat": False}


@pytest.mark.parametrize(
    ("entry", "loop", "said"),
    [
        ({}, "third", "no agent loop 'third'"),
        ({"chunk_tokens": 9}, "mintrl_agent", "agent loop.chunk_tokens: no such key"),
        ({}, "mintrl_agent", "has no judge"),
    ],
)
def test_a_loop_that_cannot_be_used(
    tmp_path: Path, entry: dict[str, Any], loop: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_judge(config(tmp_path, loop=loop, **entry), HF, nodes=1)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    made = config(tmp_path)
    (tmp_path / "agent.yaml").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        loop_settings(made)
    with pytest.raises(ConfigError, match="names no file"):
        loop_settings(parts.config())


def test_a_loop_of_somebody_elses_is_left_alone(tmp_path: Path) -> None:
    assert check_judge(config(tmp_path, loop="other"), HF, nodes=1) == []


def test_the_judge_is_asked_for_generations(server: Any, tmp_path: Path) -> None:
    (report,) = check_judge(config(tmp_path, judge_at(server.url)), HF, nodes=1)
    assert report.problem == "" and report.url == server.url
    assert len(server.posts) >= 2  # answers to two questions, at least


def test_a_judge_that_answers_and_does_not_generate(server: Any, tmp_path: Path) -> None:
    server.chat = lambda body: "ok"
    with pytest.raises(JudgeError, match="does not generate"):
        check_judge(config(tmp_path, judge_at(server.url)), HF, nodes=1)


def test_a_server_that_never_comes_up(tmp_path: Path) -> None:
    judge = judge_at("http://127.0.0.1:9/v1", timing={"attempts": 1}) | {"start_s": 0}
    with pytest.raises(JudgeError, match=r"127\.0\.0\.1:9"):
        check_judge(config(tmp_path, judge), HF, nodes=1)


def test_a_server_that_comes_up_late_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake.FakeServer() as first:
        port = first.port
    late = fake.FakeServer(port=port)
    late.structured, late.chat = set(), answer
    monkeypatch.setattr(verl_start, "_POLL_S", 0.2)
    waited = threading.Event()
    real = verl_start.probe_judge

    async def probe(judge: Any) -> Any:
        try:
            return await real(judge)
        except JudgeError:
            if not waited.is_set():
                waited.set()
                late.start()
            raise

    monkeypatch.setattr(verl_start, "probe_judge", probe)
    judge = judge_at(f"http://127.0.0.1:{port}/v1", timing={"attempts": 1})
    try:
        (report,) = check_judge(config(tmp_path, judge), HF, nodes=1)
    finally:
        if waited.is_set():
            late.stop()
    assert report.problem == "" and waited.is_set()
    assert "waiting for the judge's server" in capsys.readouterr().out


def test_a_server_that_other_nodes_would_look_for_on_themselves(tmp_path: Path) -> None:
    judge = judge_at("http://localhost:8000/v1")
    with pytest.raises(ConfigError, match="this machine itself, and the run has 2 nodes"):
        check_judge(config(tmp_path, judge), HF, nodes=2)


def test_nodes_are_those_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    made = parts.config("trainer.nnodes=2")
    assert node_count(made) == 2
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    alive = [{"Alive": True}, {"Alive": True}, {"Alive": True}, {"Alive": False}]
    monkeypatch.setattr(ray, "nodes", lambda: alive)
    assert node_count(made) == 3


@pytest.mark.parametrize(("step", "asked"), [(0, 1), (2, 1), (3, 0)])
def test_the_trainer_asks_before_its_first_step(
    monkeypatch: pytest.MonkeyPatch, step: int, asked: int
) -> None:
    """A run that is resumed behind the switch, after 3 updates here, needs no judge."""
    calls: list[Any] = []
    monkeypatch.setattr(
        verl_trainer, "check_judge",
        lambda config, tokenizer, nodes: calls.append((tokenizer, nodes)) or [],
    )  # fmt: skip
    monkeypatch.setattr(PPOTrainerSync, "on_init_end", lambda self: calls.append("weights"))
    trainer = MintrlTrainerSync(parts.config())
    trainer.global_steps, trainer.tokenizer = step, HF
    trainer.on_init_end()
    assert calls == [(HF, 1)] * asked + ["weights"]


def test_the_actors_worker_is_the_one_with_a_learning_rate_to_scale() -> None:
    from mintrl_env.adapters.verl_worker import MintrlActorWorker

    trainer = MintrlTrainerSync(parts.config())
    trainer._init_resource_pool_mgr()
    (worker,) = trainer.role_worker_mapping.values()
    assert worker.__ray_metadata__.modified_class.__mro__[1] is MintrlActorWorker or issubclass(
        worker.__ray_metadata__.modified_class, MintrlActorWorker
    )
    groups = [{"lr": 9.0}, {"lr": 9.0}]
    engine = SimpleNamespace(
        optimizer=SimpleNamespace(param_groups=groups),
        lr_scheduler=SimpleNamespace(get_last_lr=lambda: [4.0, 2.0]),
    )
    here = SimpleNamespace(actor=SimpleNamespace(engine=engine))
    for _ in range(2):  # factors do not pile up
        MintrlActorWorker.scale_learning_rate(here, 0.5)
    assert groups == [{"lr": 2.0}, {"lr": 1.0}]


def test_a_judges_domain_and_its_public_tests() -> None:
    """A chat judge takes the prompts of the run's verifier, and runs tests as that would."""
    section = judge_at("http://judge:8000/v1", run_tests=2) | {"domain": "code"}
    settings = LoopSettings(
        judge=section, verifier={"name": "task", "options": {"limits": {"wall_s": 3.0}}}
    )
    made, _ = judge_of(settings, HFTokenizer(HF), None)
    assert isinstance(made, DeadlineJudge)
    chat = made._judge._judge  # type: ignore[attr-defined]
    assert chat._prompts.sections == JudgePrompts.load("code").sections
    assert isinstance(chat._run_tests, PublicTests)
    with pytest.raises(ConfigError, match=r"judge\.options\.run_tests"):
        judge_of(replace(settings, judge=section | {"options": {**section["options"],
                 "run_tests": -1}}), HFTokenizer(HF), None)  # fmt: skip


REVISE = json.dumps({"reason": "r", "verdict": "revise", "step": 1, "correction": "a1"})


def test_a_judges_server_that_is_restarted(server: Any, tmp_path: Path) -> None:
    """It goes away between two reviews of a row and comes back while the second is tried again."""
    server.chat = lambda body: REVISE
    down = threading.Timer(1.0, server.start)
    before: list[int] = []

    def script(request: str, prompt: list[int], params: dict[str, Any]) -> list[int]:
        turn = len(manager.calls) - 1
        if turn == 1:  # the first chunk has been reviewed
            before.append(len(server.posts))
            server.stop()
            down.start()
        written = HF.encode("12\n34\n" if turn < 2 else "5", add_special_tokens=False)
        return [*written, EOS][: params["max_tokens"]] if turn == 2 else written

    manager = parts.StubManager(script)
    judge = judge_at(
        server.url, mode="one-call",
        timing={"attempts": 50, "backoff_s": 0.1, "max_backoff_s": 0.2, "deadline_s": 60},
    )  # fmt: skip
    loop = parts.loop(
        manager, HF, prompts={"chat": False}, judge=judge,
        episode={
            "chunk_tokens": 6, "max_reviews": 2, "max_correction": 3, "step_delimiters": ["\n"],
        },
    )  # fmt: skip
    task = Task("t", "1+1=\n", answer="2")
    given = parts.fields(task, HF, session_id=3, global_steps=1)
    try:
        output = asyncio.run(loop.run({"temperature": 1.0}, **given))
    finally:
        if before:
            down.join()
    row = from_row(output.extra_fields["mintrl"])
    assert [review.outcome for review in row.reviews] == [Outcome.REVISE, Outcome.REVISE]
    assert row.valid and before == [1] and len(server.posts) == 2
