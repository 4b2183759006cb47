"""The chat judge over HTTP: options from a config, and a real server that answers."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mintrl_env.adapters.chat_server import ChatServer, ChatSettings
from mintrl_env.adapters.llm_judge import LLMJudge, LLMRubricJudge, make_chat
from mintrl_env.adapters.llm_limits import Limits
from mintrl_env.chat import Capabilities
from mintrl_env.episode import Episode, EpisodeConfig
from mintrl_env.errors import ConfigError, UsageError
from mintrl_env.keys import RowKey
from mintrl_env.prompts import ByteTokenizer, PromptBuilder
from mintrl_env.protocols import Judge
from mintrl_env.recipes import make
from mintrl_env.reviewing import check_judge, review_chunk
from mintrl_env.rollout import Parts, RolloutConfig, Runner
from mintrl_env.testing import FunctionVerifier, ScriptedPolicy
from mintrl_env.types import Chunk, FailedReview, Kind, Outcome, Task, Verdict, frozen_ids

TOKENS = ByteTokenizer()
STEPS = "1 + 2 = 3\n\n3 + 3 = 7\n\nSo 7."
REVISE = json.dumps({"reason": "3 + 3 is 6", "verdict": "revise", "step": 2})
URL = "http://127.0.0.1:1/v1"


@pytest.fixture(scope="module")
def fake() -> Any:
    """The module of the server, which has no package to be imported from."""
    path = Path(__file__).with_name("fake_llm_server.py")
    spec = importlib.util.spec_from_file_location("fake_llm_server_for_judges", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def server(fake: Any) -> Iterator[Any]:
    with fake.FakeServer() as running:
        running.structured = set()  # its text is ours, whatever form is asked for
        yield running


def pending(**fields: Any) -> Episode:
    episode = Episode(
        Task("t", "1 + 2 + 3?", **fields),
        [1],
        kind=Kind.INTERVENED,
        tokenizer=TOKENS,
        config=EpisodeConfig(),
        key=RowKey(1, 2, "t", 3),
    )
    episode.send(Chunk(frozen_ids(TOKENS.encode(STEPS))))
    return episode


def reviewed(judge: LLMJudge) -> Any:
    episode = pending()

    async def ask() -> Any:
        try:
            request = episode.need.request  # type: ignore[union-attr]
            return await review_chunk(judge, request, check=episode.illegal_because)
        finally:
            await judge.aclose()

    return asyncio.run(ask())


def test_two_calls(server: Any) -> None:
    server.chat = lambda body: "3 + 3 = 6" if len(body["messages"]) > 2 else REVISE
    judge = LLMJudge(
        server.url, "toy", TOKENS, prices={"prompt": 1.0, "completion": 2.0}, temperature=0.5
    )
    event = reviewed(judge)
    assert isinstance(event, Verdict)
    assert (event.step, event.correction) == (1, tuple(TOKENS.encode("3 + 3 = 6\n\n")))
    first, second = (seen.body for seen in server.posts)
    asked = first["response_format"]["json_schema"]
    assert asked["strict"] is True and set(asked["schema"]["required"]) == {
        "reason", "verdict", "step",
    }  # fmt: skip
    assert "response_format" not in second and second["messages"][:2] == first["messages"]
    assert first["temperature"] == second["temperature"] == 0.5
    assert isinstance(first["seed"], int) and first["seed"] != second["seed"]
    assert event.usage.calls == 2 and event.usage.usd > 0
    assert event.usage.prompt_tokens > event.usage.completion_tokens > 0


@pytest.mark.parametrize(
    ("form", "echo"), [("vllm", False), ("trailing", True), ("deepseek", False)]
)
def test_prefill(server: Any, form: str, echo: bool) -> None:
    server.prefill, server.echo = form, echo
    server.chat = lambda body: (
        "3 + 3 = 6\n\nSo 6." if body["messages"][-1]["role"] == "assistant" else REVISE
    )
    event = reviewed(LLMJudge(server.url, "toy", TOKENS, capabilities={"prefill": form}))
    assert event.correction == tuple(TOKENS.encode("3 + 3 = 6\n\n"))
    last = server.posts[1].body["messages"][-1]
    assert (last["role"], last["content"]) == ("assistant", "1 + 2 = 3\n\n")


def test_thoughts_in_front(server: Any) -> None:
    server.chat = lambda body: (
        "<think>\nsix\n</think>\n\n3 + 3 = 6"
        if len(body["messages"]) > 2
        else f"<think>\n{{'verdict'...\n</think>\n\n{REVISE}"
    )
    judge = LLMJudge(server.url, "toy", TOKENS, settings={"reasoning_tokens": 1000})
    assert reviewed(judge).correction == tuple(TOKENS.encode("3 + 3 = 6\n\n"))
    assert server.posts[0].body["max_tokens"] == 512 + 1000


def test_a_server_that_fails(server: Any, fake: Any) -> None:
    server.script += [fake.Answer(), *[fake.Status(500)] * 3]
    server.chat = lambda body: REVISE
    timing = {"attempts": 2, "backoff_s": 0.01}
    event = reviewed(LLMJudge(server.url, "toy", TOKENS, timing=timing))
    assert isinstance(event, FailedReview)
    assert (event.cause, event.usage.calls) == ("server", 3)  # the verdict, and two attempts


def test_a_text_that_is_no_verdict(server: Any) -> None:
    server.chat = lambda body: "I'd rather not say."
    event = reviewed(LLMJudge(server.url, "toy", TOKENS, reasks=1))
    assert isinstance(event, FailedReview)
    assert (event.cause, event.usage.calls, len(server.posts)) == ("unparsed", 2, 2)


def test_replay(server: Any, tmp_path: Path) -> None:
    server.chat = lambda body: "3 + 3 = 6" if len(body["messages"]) > 2 else REVISE
    first = reviewed(LLMJudge(server.url, "toy", TOKENS, cache=tmp_path))
    again = reviewed(LLMJudge(server.url, "toy", TOKENS, cache=tmp_path, cache_mode="replay"))
    assert len(server.posts) == 2
    assert (again.step, again.correction) == (first.step, first.correction)
    assert again.usage.calls == 0


def test_in_the_runner(server: Any) -> None:
    """Sixteen rows at once, without the policy's tokenizer: the episode encodes the correction."""
    replies = {True: "3 + 3 = 6", False: REVISE}
    server.chat = lambda body: replies[len(body["messages"]) > 2]
    judge = LLMJudge(server.url, "toy", limits={"concurrent": 4})
    check_judge(judge)
    assert isinstance(judge, Judge)
    chunks = [TOKENS.encode(STEPS), [*TOKENS.encode("So 6."), TOKENS.EOS]]
    runner = Runner(
        Parts(ScriptedPolicy(chunks), judge, verifier=FunctionVerifier(lambda t, r: 1.0)),
        PromptBuilder(TOKENS),
        RolloutConfig(
            EpisodeConfig(chunk_tokens=64, max_reviews=1, max_response=200),
            n_control=0,
            n_intervened=16,
        ),
    )
    ((*rows,),) = asyncio.run(runner.collect([Task("t", "1 + 2 + 3?")], update=0))
    assert {TOKENS.decode(row.ids[:-1]) for row in rows} == {"1 + 2 = 3\n\n3 + 3 = 6\n\nSo 6."}
    assert all([r.outcome for r in row.reviews] == [Outcome.REVISE] for row in rows)
    assert len(server.posts) == 32 and server.most_at_work <= 4


def test_objects_or_mappings() -> None:
    chat = make_chat(
        URL,
        "m",
        capabilities={"prefill": "vllm"},
        limits=Limits(concurrent=3),
        settings={"reasoning_effort": "low"},
    )
    assert isinstance(chat, ChatServer)
    assert chat.capabilities == Capabilities(prefill="vllm")
    assert chat.settings == ChatSettings(reasoning_effort="low")
    assert chat.client.gate.limits == Limits(concurrent=3)
    assert repr(LLMJudge(URL, "m")) == f"LLMJudge('{URL}', 'm')"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"limits": {"rps": 3}}, "limits has no 'rps'; there are concurrent, rpm"),
        ({"limits": {"rpm": 0}}, "limits.rpm is a number > 0"),
        ({"limits": 3}, "limits is a mapping of concurrent"),
        ({"prices": {"prompt": 1.0}}, "prices: .*completion"),
        ({"limits": {"usd": 1.0}}, "needs the server's prices"),
        ({"cache_mode": "off"}, "cache_mode is use or replay"),
        ({"api_key_env": "MINTRL_TEST_NO_SUCH_KEY"}, "variable MINTRL_TEST_NO_SUCH_KEY is not set"),
        ({"domain": "chess"}, "no prompts for the domain 'chess'"),
        ({"mode": "three-call"}, "mode is one of"),
        ({"prompt_file": "none.txt"}, "prompt_file 'none.txt' cannot be read"),
    ],
)
def test_wrong_options(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        LLMJudge(URL, "m", **options)
    with pytest.raises(ConfigError, match=rf"judge\.options: .*{why}"):
        make("judge.options", LLMJudge, {"url": URL, "model": "m", **options})


def test_the_key_is_sent_and_not_shown(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINTRL_TEST_KEY", "made-up-key")
    server.chat = lambda body: REVISE.replace("revise", "keep")
    judge = LLMJudge(server.url, "toy", api_key_env="MINTRL_TEST_KEY")
    assert reviewed(judge).reason == "3 + 3 is 6"
    assert server.posts[0].headers["authorization"] == "Bearer made-up-key"
    assert "made-up-key" not in repr(judge)


def test_the_rubric_judge(server: Any) -> None:
    failed = {"reason": "3 + 3 is 6", "verdict": "revise", "step": 2, "rubric": 1}

    def answers(body: dict[str, Any]) -> str:
        if "response_format" in body:
            asked = body["response_format"]["json_schema"]["schema"]["required"]
            return json.dumps(
                {"reason": "yes", "derivable": True} if "derivable" in asked else failed
            )
        return "3 + 3 = 6"

    server.chat = answers
    judge = LLMRubricJudge(server.url, "toy", TOKENS, server={"limits": {"concurrent": 2}})
    check_judge(judge)
    episode = pending(metadata={"rubric": ["Every sum is right."]})

    async def ask() -> Any:
        try:
            request = episode.need.request  # type: ignore[union-attr]
            return await review_chunk(judge, request, check=episode.illegal_because)
        finally:
            await judge.aclose()

    event = asyncio.run(ask())
    assert isinstance(event, Verdict)
    assert (event.step, event.correction) == (1, tuple(TOKENS.encode("3 + 3 = 6\n\n")))
    assert event.usage.calls == 3 and "rubric 1" in event.reason
    with pytest.raises(UsageError, match="server: "):
        LLMRubricJudge(server.url, "toy", server={"urls": 1})
