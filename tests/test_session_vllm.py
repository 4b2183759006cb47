"""A session whose policy writes with vLLM (a stand-in): each call of `groups` has the weights of now."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from mintrl_env.adapters.policy_vllm import VLLMEngine, vllm_policy
from mintrl_env.adapters.pump import Rounds
from mintrl_env.adapters.session import EngineHost, RolloutSession
from mintrl_env.adapters.trl_config import MInTRLConfig
from mintrl_env.config import parse_config
from mintrl_env.episode import EpisodeConfig
from mintrl_env.errors import ConfigError, UsageError
from mintrl_env.judges import KeepJudge
from mintrl_env.prompts import ByteTokenizer, PromptBuilder
from mintrl_env.rollout import RolloutConfig
from mintrl_env.types import Task

_SPEC = importlib.util.spec_from_file_location(
    "fake_vllm_for_session", Path(__file__).with_name("fake_vllm.py")
)
assert _SPEC is not None and _SPEC.loader is not None
fake: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["fake_vllm_for_session"] = fake
_SPEC.loader.exec_module(fake)

CONFIG = RolloutConfig(
    episode=EpisodeConfig(
        chunk_tokens=6, max_correction=3, max_response=18, step_delimiters=("\n",)
    ),
    n_control=2,
    n_intervened=2,
)
TASKS = [Task("a", "a cab "), Task("b", "bed ")]


class Model(torch.nn.Module):
    """The stand-in's only weight, as a trainer holds it."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(weight))


@pytest.fixture(autouse=True)
def _stand_in() -> Iterator[None]:
    with fake.installed():
        yield


def session(model: torch.nn.Module, llm: Any) -> RolloutSession:
    tokenizer: Any = ByteTokenizer()

    def engine(host: EngineHost) -> VLLMEngine:
        ends, size = host.tokenizer.eos_ids, host.tokenizer.vocab_size
        return VLLMEngine(llm, eos_ids=ends, vocab_size=size, decode=host.tokenizer.decode)

    host = EngineHost(
        model, tokenizer, PromptBuilder(tokenizer), slots=8, max_length=64, policy_engine=engine
    )
    return RolloutSession(host, CONFIG, judge=KeepJudge(), seed=3)


def ids(groups: Any) -> list[list[list[int]]]:
    return [[row.ids.tolist() for row in rows] for rows in groups]


def test_the_weights_of_now_write_and_stamp_their_version() -> None:
    model, llm = Model(0.05), fake.LLMEngine(fake.ToyModel())
    with session(model, llm) as running:
        first = running.groups(TASKS, update=0)
        assert ids(running.groups(TASKS, update=0)) == ids(first), "the same draws"
        with torch.no_grad():
            model.weight.fill_(0.8)
        second = running.groups(TASKS, update=1)
    assert llm.model.weight == pytest.approx(0.8)
    assert [call for call in llm.calls if call[0] == "reload_weights"] == [
        ("reload_weights", "tensors")
    ] * 3
    assert ids(second) != ids(first)
    assert {int(v) for rows in second for row in rows for v in row.policy_versions} == {1}
    fresh = fake.LLMEngine(fake.ToyModel(weight=0.8))
    with session(Model(0.8), fresh) as other:
        assert ids(other.groups(TASKS, update=1)) == ids(second), (
            "nothing old was left in its cache"
        )


def test_an_engine_is_loaded_as_the_host_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def load(folder: Any, **options: Any) -> Any:
        asked.update(options, folder=folder)
        return fake.LLMEngine(fake.ToyModel())

    monkeypatch.setattr("mintrl_env.adapters.policy_vllm.load_vllm", load)
    tokenizer: Any = ByteTokenizer()
    host = EngineHost(
        Model(0.1), tokenizer, PromptBuilder(tokenizer), slots=5, max_length=77, rounds=Rounds()
    )
    engine = vllm_policy("folder", memory=0.3, max_num_batched_tokens=512)(host)
    assert asked == {
        "folder": "folder",
        "max_length": 77,
        "rows": 5,
        "memory": 0.3,
        "sleep": False,
        "max_num_batched_tokens": 512,
    }
    assert engine.rounds is host.rounds and engine.vocab_size == tokenizer.vocab_size


def test_what_an_engine_cannot_do_is_refused(tmp_path: Path) -> None:
    plain: dict[str, Any] = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False}
    plain["per_device_train_batch_size"] = 16
    with pytest.raises(UsageError, match="bit-exact"):
        MInTRLConfig(**plain, rollout_engine="vllm", schedule="rounds")
    with pytest.raises(UsageError, match="engine_options are vLLM's"):
        MInTRLConfig(**plain, engine_options={"memory": 0.5})
    with pytest.raises(UsageError, match="rollout_engine is transformers or vllm"):
        MInTRLConfig(**plain, rollout_engine="sglang")
    config = {
        "method": "grpo",
        "policy": {"path": "m"},
        "tasks": {"path": "t.jsonl"},
        "rollout": {"engine": "vllm", "schedule": "rounds"},
    }
    with pytest.raises(ConfigError, match="bit-exact"):
        parse_config(config, "run.yaml")
