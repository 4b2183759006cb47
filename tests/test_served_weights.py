"""A policy in training behind `vllm serve`: weights given before rollouts, sleep, and what is refused."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import torch

from mintrl_env.adapters.ranks import OneRank
from mintrl_env.adapters.served_weights import TrainedPolicy, trained_policy
from mintrl_env.adapters.server_options import ServerOptions
from mintrl_env.adapters.session import EngineHost, RolloutSession
from mintrl_env.adapters.vllm_weights import WeightSyncError
from mintrl_env.episode import EpisodeConfig
from mintrl_env.errors import ConfigError, PolicyError
from mintrl_env.prompts import HFTokenizer, PromptBuilder
from mintrl_env.rollout import RolloutConfig
from mintrl_env.testing import FunctionVerifier
from mintrl_env.types import Task

HERE = Path(__file__).parent


def _beside(name: str) -> Any:
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


tiny = _beside("tiny_trl")
fake = _beside("fake_vllm_serve")
chat = _beside("fake_llm_server")

TASKS = [Task("a", "1+1=?\n", "2"), Task("b", "2=")]
CONFIG = RolloutConfig(
    episode=EpisodeConfig(
        chunk_tokens=6, max_correction=3, max_response=12, step_delimiters=("\n",)
    ),
    n_control=2,
    n_intervened=0,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny.model().save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def server(folder: Path) -> Iterator[Any]:
    with fake.VllmServe(folder) as made:
        yield made


def session(url: str, model: Any, **options: Any) -> RolloutSession:
    hf = HFTokenizer(tiny.tokenizer())
    given = {"url": url, "transfer": "gloo_transfer:GlooTransfer", **options}
    host = EngineHost(
        model=model,
        tokenizer=hf,
        prompts=PromptBuilder(hf),
        slots=4,
        max_length=40,
        policy_engine=trained_policy(ServerOptions.of(given), OneRank()),
    )
    verifier = FunctionVerifier(lambda task, text: float("1" in text))
    return RolloutSession(host, CONFIG, verifier=verifier)


def same_weights(server: Any, model: Any) -> None:
    theirs = server.model.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, theirs[name]), name


def test_rollouts_are_by_the_weights_of_the_moment(server: Any) -> None:
    model = tiny.model(seed=1)  # other than the server's own
    with session(server.url, model) as made:
        assert isinstance(made.engine, TrainedPolicy)
        for update in range(2):
            rows = [row for group in made.groups(TASKS, update=update) for row in group]
            assert {int(v) for row in rows for v in row.policy_versions} == {update}
            same_weights(server, model)
            with torch.no_grad():
                model.model.embed_tokens.weight.add_(0.1)
        made.groups(TASKS, update=-1)
        same_weights(server, model)
    assert server.version == "3" and server.log.count("/pause?mode=abort&clear_cache=true") == 3
    assert len(server.received) == 3


def test_an_adapter_is_added_on_the_way(server: Any) -> None:
    from peft import get_peft_model

    model = get_peft_model(tiny.model(), copy.deepcopy(tiny.LORA))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    with session(server.url, model) as made:
        made.groups(TASKS, update=0)
    merged = model.merge_and_unload()
    for name, tensor in merged.state_dict().items():
        torch.testing.assert_close(server.model.state_dict()[name], tensor, rtol=1e-5, atol=1e-5)


def test_servers_sleep_while_the_trainer_learns(server: Any) -> None:
    with session(server.url, tiny.model(), sleep=2) as made:
        for update in range(2):
            made.groups(TASKS, update=update)
            assert server.asleep == {"weights", "kv_cache"} and server.paused
    at = server.log.index("/sleep?level=2")
    routes = [path for path in server.log[at + 1 :] if "v1" not in path]
    assert routes == [
        "/is_sleeping", "/wake_up?tags=weights", "/pause?mode=abort&clear_cache=true",
        "/start_weight_update", "/update_weights", "/finish_weight_update", "/weight_info",
        "/wake_up?tags=kv_cache", "/resume", "/sleep?level=2",
    ]  # fmt: skip


def test_what_an_earlier_run_left_paused_is_taken_up(server: Any) -> None:
    server.paused, server.asleep = True, {"kv_cache"}
    model = tiny.model(seed=2)
    with session(server.url, model) as made:
        made.groups(TASKS, update=0)
    same_weights(server, model)
    assert not server.paused and not server.asleep


def test_half_new_weights_end_the_run(server: Any) -> None:
    with session(server.url, tiny.model()) as made:
        made.groups(TASKS, update=0)
        before = len(server.written)
        server.behave["/finish_weight_update"] = lambda request: fake.weights_routes.send(
            request, 500, {"error": {"message": "CUDA error"}}
        )
        with pytest.raises(WeightSyncError, match=r"CUDA error\. The servers stay paused"):
            made.groups(TASKS, update=1)
    assert server.paused and len(server.written) == before


class TestRefusals:
    def test_a_server_without_the_routes(self, server: Any) -> None:
        server.behave["/is_sleeping"] = lambda request: fake.weights_routes.send(
            request, 404, {"detail": "Not Found"}
        )
        with pytest.raises(WeightSyncError, match="VLLM_SERVER_DEV_MODE=1"):
            session(server.url, tiny.model())

    def test_one_that_takes_no_weights(self, server: Any) -> None:
        server.behave["/init_weight_transfer_engine"] = lambda request: fake.weights_routes.send(
            request,
            500,
            {"error": {"message": "Weight transfer not configured; weight_transfer_config"}},
        )
        with (
            session(server.url, tiny.model()) as made,
            pytest.raises(WeightSyncError, match="--weight-transfer-config"),
        ):
            made.groups(TASKS, update=0)

    def test_a_transfer_that_is_none(self, server: Any) -> None:
        with pytest.raises(ConfigError, match="no_such:Transfer cannot be loaded"):
            session(server.url, tiny.model(), transfer="no_such:Transfer")

    def test_llama_cpp(self) -> None:
        with chat.FakeServer() as other:
            other.wires = {"llama"}
            with pytest.raises(PolicyError, match="VLLM_SERVER_DEV_MODE"):
                session(other.url, tiny.model())
