"""`rollout.engine: server`: `mintrl rollout` and `mintrl eval` by model servers, over real HTTP."""

from __future__ import annotations

import copy
import importlib.util
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from mintrl_env import recipes
from mintrl_env.adapters.policy_served import ServedPolicy, probe_servers
from mintrl_env.adapters.server_options import ServerOptions
from mintrl_env.calibrate import calibrate, star
from mintrl_env.config import RunConfig, parse_config
from mintrl_env.console import RunConsole
from mintrl_env.errors import ConfigError, PolicyError, UsageError
from mintrl_env.keys import RowKey
from mintrl_env.loops import sync
from mintrl_env.preflight import preflight
from mintrl_env.prompts import HFTokenizer
from mintrl_env.run_folder import RunFolder
from mintrl_env.running import evaluate, open_policy, rollout
from mintrl_env.trajectory import Trajectory


def _beside(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


fake = _beside("fake_vllm_serve")
bytes_server = _beside("fake_llm_server")

TINY: dict[str, Any] = {
    "method": "mintrl-const",
    "policy": {"path": "warmup:student", "chat": False, "max_prompt": 32},
    "tasks": {"name": "table_chain", "options": {"count": 6, "seed": 1}},
    "evaluation": {
        "tasks": {"name": "table_chain", "split": "heldout", "options": {"count": 4, "seed": 2}},
    },
    "episode": {
        "chunk_tokens": 12,
        "max_reviews": 3,
        "max_correction": 3,
        "max_response": 32,
        "step_delimiters": ["\n"],
    },
    "rollout": {"n_control": 2, "n_intervened": 2, "slots": 8},
    "judge": {
        "name": "scoring",
        "path": "warmup:teacher",
        "options": {"tau": -2.0, "never": "^B", "stop": ["\n"]},
        "guards": {"leak": {"answer_line": "^B", "ngram": 0}},
    },
    "train": {"updates": 1, "prompts_per_update": 3, "micro_batch": 4},
    "warmup": {
        kind: {"steps": 12, "batch": 8, "model": {"layers": 1, "hidden": 32, "intermediate": 48}}
        for kind in ("student", "teacher")
    },
}


def quiet() -> RunConsole:
    from rich.console import Console

    return RunConsole(Console(file=io.StringIO()))


def config(**rollout_keys: Any) -> RunConfig:
    data = copy.deepcopy(TINY)
    data["rollout"] |= rollout_keys
    return parse_config(data, "test")


def served(*urls: str, **options: Any) -> dict[str, Any]:
    return {"engine": "server", "engine_options": {"urls": list(urls), **options}}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Warmed-up models of these tests only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINTRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@pytest.fixture(scope="module")
def student() -> str:
    return recipes.resolve_path("warmup:student", config())


@pytest.fixture(scope="module")
def server(student: str) -> Iterator[Any]:
    with fake.VllmServe(student) as made:
        yield made


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[Trajectory]]:
    folder = RunFolder(tmp_path_factory.mktemp("embedded") / "run")
    summary = rollout(config(), folder, updates=2, console=quiet())
    return summary, folder.store().read()[0]


def same(ours: list[Trajectory], theirs: list[Trajectory]) -> None:
    assert [(r.update, r.task_id, r.rollout) for r in ours] == [
        (r.update, r.task_id, r.rollout) for r in theirs
    ]
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.provenance, b.provenance)
        np.testing.assert_array_equal(a.policy_versions, b.policy_versions)
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
        assert (a.reward, a.valid, a.stop_reason) == (b.reward, b.valid, b.stop_reason)


class TestRollouts:
    @pytest.mark.parametrize("wire", ["auto", "vllm_completions", "vllm_generate"])
    def test_a_server_writes_the_ids_that_the_embedded_engine_does(
        self, wire: str, server: Any, embedded: Any, tmp_path: Path
    ) -> None:
        summary, rows = embedded
        assert summary["revises"] > 0 and len(rows) == 24
        folder = RunFolder(tmp_path / "run")
        found = rollout(config(**served(server.url, wire=wire)), folder, updates=2, console=quiet())
        same(folder.store().read()[0], rows)
        timed = {key for key in summary if "seconds" in key or "latency" in key}
        assert {k: v for k, v in found.items() if k not in timed} == {
            k: v for k, v in summary.items() if k not in timed
        }

    def test_rows_are_shared_out_over_replicas_and_stay(
        self, student: str, server: Any, embedded: Any, tmp_path: Path
    ) -> None:
        folder = RunFolder(tmp_path / "run")
        with fake.VllmServe(student) as second:
            before = len(server.bodies_sent)
            chosen = config(**served(server.url, second.url))
            rollout(chosen, folder, updates=2, console=quiet())
            rows = [
                {body["session_id"] for body in bodies if body.get("session_id")}
                for bodies in (server.bodies_sent[before:], second.bodies_sent)
            ]
        same(folder.store().read()[0], embedded[1])
        probe = RowKey(0, 0, "probe", 0).philox_key().tobytes().hex()
        first_only, second_only = (found - {probe} for found in rows)
        assert not first_only & second_only and min(len(first_only), len(second_only)) >= 4

    def test_an_evaluation_equals_the_embedded_one(self, server: Any, tmp_path: Path) -> None:
        asked: dict[str, Any] = {"checkpoint": None, "n": 2, "ks": [1, 2], "console": quiet()}
        ours = evaluate(config(), RunFolder(tmp_path / "a"), **asked)
        theirs = evaluate(config(**served(server.url)), RunFolder(tmp_path / "b"), **asked)
        assert ours == theirs and theirs["problems"] == 4
        with pytest.raises(ConfigError, match="--checkpoint x: the policy is behind a server"):
            evaluate(config(**served(server.url)), RunFolder(tmp_path / "c"),
                     **{**asked, "checkpoint": "x"})  # fmt: skip

    def test_a_row_that_a_server_fails_goes_to_the_next(
        self, student: str, server: Any, embedded: Any, tmp_path: Path
    ) -> None:
        folder = RunFolder(tmp_path / "run")
        with fake.VllmServe(student) as bad:
            bad.fail_after = 13  # the probe's, and a few rows'
            chosen = config(**served(server.url, bad.url, attempts=1))
            found = rollout(chosen, folder, console=quiet())
        assert found["trajectories"] == 12 and len(bad.written) == 13
        rows = folder.store().read()[0]
        assert all(row.valid for row in rows)
        assert {row.retry for row in rows} == {0, 1}

    def test_preflight_and_calibrate_ask_the_server_too(self, server: Any, tmp_path: Path) -> None:
        chosen = config(**served(server.url))
        before = len(server.written)
        found = preflight(chosen, tmp_path / "preflight", n=2, console=quiet())
        assert found["passed"] and len(server.written) > before + 8
        ours, theirs = (
            calibrate(c, RunFolder(tmp_path / name), tasks=2, points=star(c)[:1], console=quiet())
            for c, name in ((config(), "a"), (chosen, "b"))
        )
        assert ours["kappa"] == pytest.approx(theirs["kappa"], abs=1e-4)

    def test_what_is_said_of_the_server(self, server: Any) -> None:
        host = open_policy(config(**served(server.url)))
        assert host.model is None
        lines = host.report.splitlines()
        assert lines[0] == "the policy's server:"
        assert lines[1] == f"server     {server.url}"
        assert {"model      policy", "ids        vllm_completions", "log-probs  raw"} <= set(lines)
        with pytest.raises(UsageError, match="behind a server"):
            host.engine()


class TestRefusals:
    def test_no_server(self, tmp_path: Path, student: str) -> None:
        with fake.VllmServe(student) as gone:
            url = gone.url
        folder = RunFolder(tmp_path / "run")
        with pytest.raises(PolicyError, match=r"engine_options: connection: GET .*/v1/models: "):
            rollout(config(**served(url, connect_s=2)), folder, console=quiet())
        assert not folder.path.exists()

    def test_another_model(self, server: Any) -> None:
        with pytest.raises(PolicyError, match="it serves policy; and not 'other': correct model"):
            open_policy(config(**served(server.url, model="other")))

    def test_a_server_that_takes_no_ids(self) -> None:
        with bytes_server.FakeServer() as chat:
            chat.wires = {"chat"}
            with pytest.raises(PolicyError, match="it takes no ids in any form"):
                open_policy(config(**served(chat.url)))

    def test_servers_that_differ(self, server: Any, student: str) -> None:
        with (
            fake.VllmServe(student, "another") as other,
            pytest.raises(PolicyError, match=r"not alike: model (policy|another) and "),
        ):
            open_policy(config(**served(server.url, other.url)))

    def test_log_probs_of_another_mode(self, server: Any) -> None:
        with pytest.raises(PolicyError, match="its log-probs are raw, and logprobs_mode says proc"):
            open_policy(config(**served(server.url, logprobs_mode="processed")))

    def test_loopback_on_several_nodes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NNODES", "2")
        with pytest.raises(ConfigError, match="the run has 2 nodes"):
            open_policy(config(**served("http://127.0.0.1:1/v1")))

    def test_a_key_that_is_not_there(self, monkeypatch: pytest.MonkeyPatch, server: Any) -> None:
        monkeypatch.delenv("POLICY_KEY", raising=False)
        with pytest.raises(ConfigError, match="api_key_env: the environment variable POLICY_KEY"):
            open_policy(config(**served(server.url, api_key_env="POLICY_KEY")))
        monkeypatch.setenv("POLICY_KEY", "secret")
        open_policy(config(**served(server.url, api_key_env="POLICY_KEY")))
        assert "Bearer secret" in server.auth

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({}, "urls: is missing"),
            ({"url": "host:8000"}, "looks like http://host:8000/v1"),
            ({"url": "http://a/v1", "urls": ["http://b/v1"]}, "url or urls, not both"),
            ({"urls": ["http://a/v1", "http://a/v1/"]}, "one stands here twice"),
            ({"url": "http://a/v1", "concurent": 3}, "concurent: no such key; did you mean conc"),
            ({"url": "http://a/v1", "concurrent": 0}, "concurrent: a whole number > 0, not 0"),
            ({"url": "http://a/v1", "deadline_s": "1h"}, "deadline_s: seconds > 0"),
            ({"url": "http://a/v1", "wire": "tgi"}, "wire: auto, vllm_completions or"),
            ({"url": "http://a/v1", "seeded": 1}, "seeded: true or false, not 1"),
            ({"url": "http://a/v1", "transfer": "ipc"}, "transfer: nccl or package.module:Class"),
            ({"url": "http://a/v1", "model": 3}, "model: a text, not 3"),
        ],
    )
    def test_options(self, options: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigError, match=f"rollout: engine_options: .*{said}"):
            config(engine="server", engine_options=options)

    def test_no_rounds(self) -> None:
        with pytest.raises(ConfigError, match="which a server's batches are not"):
            config(**served("http://a/v1"), schedule="rounds")


class TestServedPolicy:
    def test_versions_scores_and_faces(self, student: str, server: Any) -> None:
        from mintrl_env.protocols import Policy, Scorer

        options = ServerOptions.of({"url": server.url})
        tokenizer = HFTokenizer(recipes.load_tokenizer(student, "test"))
        ids = np.array(tokenizer.encode("a1b2"), dtype=np.int32)
        key = RowKey(0, 0, "t", 0)

        async def use() -> Any:
            found = await probe_servers(options, tokenizer, ids)
            policy = ServedPolicy.over(options, found, tokenizer)
            policy.policy_version = 4
            try:
                chunk = await policy.generate(ids, max_tokens=5, key=key)
                whole = np.concatenate([ids, chunk.ids])
                return policy, chunk, await policy.logprobs(whole, len(ids))
            finally:
                await policy.aclose()

        policy, chunk, scores = sync(use())
        assert isinstance(policy, Policy) and isinstance(policy, Scorer)
        assert (chunk.policy_version, policy.policy_version) == (4, 4)
        np.testing.assert_allclose(chunk.logprobs, scores, atol=1e-5)
        assert server.bodies_sent[-1]["cache_salt"] == "v4"
