"""`rollout.engine: vllm` holds for evaluations too: the engine is asked for, with the config's options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mintrl_env.config import parse_config
from mintrl_env.dry_run_model import tiny_model
from mintrl_env.errors import MissingExtraError
from mintrl_env.running import open_policy


def test_the_policy_of_a_vllm_config_is_written_by_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    folder = tiny_model(tmp_path, "qwen3", positions=256)
    data: dict[str, Any] = {
        "method": "grpo",
        "policy": {"path": folder},
        "tasks": {"path": "x.jsonl"},
        "rollout": {"engine": "vllm", "engine_options": {"memory": 0.3, "sleep": 1}, "slots": 5},
        "episode": {"max_response": 100},
    }
    asked: dict[str, Any] = {}

    def load(model: str, **options: Any) -> Any:
        asked.update(options, model=model)
        raise MissingExtraError("vllm", "vllm", "the test")

    monkeypatch.setattr("mintrl_env.adapters.policy_vllm.load_vllm", load)
    host = open_policy(parse_config(data, "test"), folder)
    assert host.policy_engine is not None
    with pytest.raises(MissingExtraError):
        host.policy_engine(host)
    assert asked == {
        "model": folder, "max_length": 2148, "rows": 5, "memory": 0.3, "sleep": True,
    }  # fmt: skip
    data["rollout"] = {}
    assert open_policy(parse_config(data, "test"), folder).policy_engine is None
