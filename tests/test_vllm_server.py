"""A policy and chats against a real vLLM server: `make test-vllm`.

    MINTRL_VLLM_URL     http://host:8000/v1
    MINTRL_VLLM_MODEL   the folder or Hub id that it serves; its tokenizer is loaded from there

Start it as `vllm serve MODEL --enable-scale-out` for all forms; `--dtype float32` gives the closest
log-probs. Figures are compared within what the server itself says, so that any model will do.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import numpy as np
import pytest

from mintrl_env.adapters.chat_server import ChatServer
from mintrl_env.adapters.llm_client import ModelClient
from mintrl_env.adapters.policy_probe import probe_policy, template_difference
from mintrl_env.adapters.policy_server import ServerPolicy
from mintrl_env.adapters.server_probe import probe_chat
from mintrl_env.chat import Capabilities, ChatMessage
from mintrl_env.episode import EpisodeConfig
from mintrl_env.keys import RowKey
from mintrl_env.prompts import HFTokenizer, PromptBuilder
from mintrl_env.protocols import Sampling
from mintrl_env.rollout import Parts, RolloutConfig, Runner
from mintrl_env.testing import ScriptedJudge
from mintrl_env.types import Finish, Provenance, Task, Verdict

URL = os.environ.get("MINTRL_VLLM_URL", "")
MODEL = os.environ.get("MINTRL_VLLM_MODEL", "")
KEY = RowKey(0, 0, "t", 0)
QUESTION = "What is the capital of France?"
CLOSE = 0.1  # nats; bfloat16 and the batch's size move a log-prob

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not (URL and MODEL), reason="MINTRL_VLLM_URL and MINTRL_VLLM_MODEL not set"),
]


@pytest.fixture(scope="module")
def tokenizer() -> HFTokenizer:
    from transformers import AutoTokenizer

    return HFTokenizer(AutoTokenizer.from_pretrained(MODEL))


@pytest.fixture(params=["vllm_completions", "vllm_generate"])
def wire(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def use(what: Any) -> Any:
    async def main() -> Any:
        async with ModelClient(URL, breaker=None) as client:
            return await what(client)

    return asyncio.run(main())


def prompt(tokenizer: HFTokenizer, text: str = QUESTION) -> np.ndarray:
    return PromptBuilder(tokenizer, chat=True).ids(Task("t", text))


def test_the_probes(tokenizer: HFTokenizer, wire: Any) -> None:
    async def what(client: ModelClient) -> Any:
        ids = prompt(tokenizer)
        return (
            await probe_policy(client, MODEL, tokenizer, ids, wires=[wire]),
            await probe_chat(client, MODEL),
        )

    policy, chat = use(what)
    print(policy, chat, sep="\n")
    policy.check()
    assert policy.wire == wire and policy.scores
    assert chat.kind == "vllm"
    chat.check()
    assert chat.capabilities.structured in ("json_schema", "structured_outputs")
    assert chat.capabilities.logprobs


def test_sampling_scoring_and_parts_agree(tokenizer: HFTokenizer, wire: Any) -> None:
    async def what(client: ModelClient) -> None:
        policy = ServerPolicy(client, MODEL, tokenizer, wire=wire)
        ids = prompt(tokenizer)
        chunk = await policy.generate(ids, max_tokens=32, key=KEY)
        scores = await policy.logprobs(np.concatenate([ids, chunk.ids]), len(ids))
        assert np.abs(scores - chunk.logprobs).max() < CLOSE
        again = await policy.generate(ids, max_tokens=32, key=KEY)
        assert again.ids[0] == chunk.ids[0]
        greedy = Sampling(temperature=0)
        whole = await policy.generate(ids, max_tokens=16, sampling=greedy, key=KEY)
        first = await policy.generate(ids, max_tokens=8, sampling=greedy, key=KEY)
        joined = np.concatenate([ids, first.ids])
        rest = await policy.generate(joined, max_tokens=8, sampling=greedy, key=KEY.at(8))
        assert whole.ids[:9].tolist() == [*first.ids.tolist(), *rest.ids.tolist()][:9]

    use(what)


def test_eos_and_stop_strings(tokenizer: HFTokenizer, wire: Any) -> None:
    async def what(client: ModelClient) -> None:
        policy = ServerPolicy(client, MODEL, tokenizer, wire=wire)
        ids = prompt(tokenizer, "Say hi.")
        greedy = Sampling(temperature=0)
        ended = await policy.generate(ids, max_tokens=400, sampling=greedy, key=KEY)
        assert ended.finish is Finish.EOS and int(ended.ids[-1]) in tokenizer.eos_ids
        string = tokenizer.decode(ended.ids)[3:6]
        cut = await policy.generate(ids, max_tokens=400, stop=(string,), sampling=greedy, key=KEY)
        assert cut.finish is Finish.STOP
        assert string in tokenizer.decode(cut.ids)
        assert string not in tokenizer.decode(cut.ids[:-1])
        assert not np.isnan(cut.logprobs).any()  # type: ignore[arg-type]

    use(what)


def test_the_chat_template_is_ours(tokenizer: HFTokenizer) -> None:
    async def what(client: ModelClient) -> str:
        messages = [ChatMessage("user", QUESTION)]
        return await template_difference(client, MODEL, messages, prompt(tokenizer).tolist())

    assert use(what) == ""


def test_a_verdict_and_a_continuation(tokenizer: HFTokenizer) -> None:
    schema = {
        "type": "object",
        "properties": {"verdict": {"enum": ["keep", "revise"]}},
        "required": ["verdict"],
        "additionalProperties": False,
    }

    async def what(client: ModelClient) -> None:
        for form in ("json_schema", "structured_outputs"):
            can = Capabilities(form, "vllm", True)  # type: ignore[arg-type]
            model = ChatServer(client, MODEL, capabilities=can)
            ask = [ChatMessage("user", "Count from 1 to 9.")]
            verdict = await model.chat(ask, max_tokens=100, schema=schema, temperature=0)
            assert json.loads(verdict.text)["verdict"] in ("keep", "revise")
            goes_on = await model.chat(ask, max_tokens=6, prefill="1, 2, 3, 4,", temperature=0)
            assert goes_on.text.startswith(" 5")
            assert goes_on.logprobs is not None

    use(what)


def test_reviewed_episodes_through_the_runner(tokenizer: HFTokenizer, wire: Any) -> None:
    judge = ScriptedJudge(lambda r: Verdict.revise(0, "Paris") if r.review == 0 else Verdict.keep())

    async def what(client: ModelClient) -> Any:
        config = RolloutConfig(
            episode=EpisodeConfig(chunk_tokens=16, max_response=48, max_reviews=2),
            n_control=4,
            n_intervened=4,
        )
        policy = ServerPolicy(client, MODEL, tokenizer, wire=wire)
        runner = Runner(Parts(policy, judge), PromptBuilder(tokenizer, chat=True), config)
        return await runner.collect([Task("a", QUESTION), Task("b", "Say hi.")], update=0)

    for group in use(what):
        assert [row.cause for row in group] == [""] * 8
        assert all(Provenance.INTERVENTION in row.provenance for row in group[4:])
