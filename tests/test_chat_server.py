"""ChatServer and the chat probe against a real server that can be told what it can do."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mintrl_env.adapters.chat_server import (
    ChatServer,
    ChatSettings,
    logprobs_of,
    without_prefill,
    without_thoughts,
)
from mintrl_env.adapters.llm_cache import ReplyCache
from mintrl_env.adapters.llm_client import ModelClient
from mintrl_env.adapters.llm_limits import Prices, Timing
from mintrl_env.adapters.server_probe import ChatReport, probe_chat, refuse_loopback
from mintrl_env.chat import Capabilities, ChatMessage, ChatModel, ChatReply
from mintrl_env.errors import ConfigError, JudgeCause, JudgeError, UsageError

_SPEC = importlib.util.spec_from_file_location(
    "fake_llm_server", Path(__file__).with_name("fake_llm_server.py")
)
assert _SPEC is not None and _SPEC.loader is not None
fake: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["fake_llm_server"] = fake
_SPEC.loader.exec_module(fake)

MESSAGES = (ChatMessage("system", "Be brief."), ChatMessage("user", "Is 1 + 1 = 2?"))
SCHEMA = {
    "type": "object",
    "properties": {"verdict": {"enum": ["keep", "revise"]}, "step": {"type": "integer"}},
    "required": ["verdict", "step"],
    "additionalProperties": False,
}
PLAIN, DEFAULT = Capabilities(), ChatSettings()
ONCE = Timing(attempts=1, attempt_s=20, deadline_s=20)


def chat(
    server: Any,
    capabilities: Capabilities = PLAIN,
    settings: ChatSettings = DEFAULT,
    messages: Sequence[ChatMessage] = MESSAGES,
    client: dict[str, Any] | None = None,
    **options: Any,
) -> ChatReply:
    """One chat; what was sent is `server.posts[-1].body`."""

    async def main() -> ChatReply:
        async with ModelClient(server.url, timing=ONCE, **(client or {})) as opened:
            model = ChatServer(opened, "toy", capabilities=capabilities, settings=settings)
            assert isinstance(model, ChatModel)
            return await model.chat(messages, **{"max_tokens": 6, **options})

    return asyncio.run(main())


class TestAsking:
    def test_the_plain_request(self) -> None:
        with fake.FakeServer() as server:
            reply = chat(server, temperature=0.5, stop=("\n",), seed=7)
        assert server.posts[0].body == {
            "model": "toy",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Is 1 + 1 = 2?"},
            ],
            "max_tokens": 6,
            "temperature": 0.5,
            "stop": ["\n"],
            "seed": 7,
        }
        assert reply.finish in ("stop", "length")
        assert reply.logprobs is None
        assert reply.usage.prompt_tokens == len("Be brief.\nIs 1 + 1 = 2?")
        assert reply.usage.completion_tokens == len(reply.text)
        assert reply.usage.calls == 1

    @pytest.mark.parametrize("form", ["json_schema", "structured_outputs", "json_object", "none"])
    def test_each_form_of_json(self, form: Any) -> None:
        with fake.FakeServer() as server:
            reply = chat(server, Capabilities(form), schema=SCHEMA)
        body = server.posts[0].body
        sent = {
            name: body[name] for name in ("response_format", "structured_outputs") if name in body
        }
        strict = {"name": "answer", "schema": SCHEMA, "strict": True}
        assert (
            sent
            == {
                "json_schema": {"response_format": {"type": "json_schema", "json_schema": strict}},
                "structured_outputs": {"structured_outputs": {"json": SCHEMA}},
                "json_object": {"response_format": {"type": "json_object"}},
                "none": {},
            }[form]
        )
        if form in ("json_schema", "structured_outputs"):
            assert json.loads(reply.text) == {"verdict": "keep", "step": 1}

    @pytest.mark.parametrize(
        ("form", "last", "more"),
        [
            ("vllm", {}, {"continue_final_message": True, "add_generation_prompt": False}),
            ("deepseek", {"prefix": True}, {}),
            ("trailing", {}, {}),
        ],
    )
    def test_each_form_of_prefill(self, form: Any, last: dict[str, Any], more: Any) -> None:
        with fake.FakeServer() as server:
            server.prefill, server.echo = form, form == "trailing"
            server.chat = lambda body: " two."
            reply = chat(server, Capabilities(prefill=form), prefill="1 + 1 is")
        body = server.posts[0].body
        assert body["messages"][-1] == {"role": "assistant", "content": "1 + 1 is", **last}
        assert {k: v for k, v in body.items() if "_message" in k or "_prompt" in k} == more
        assert reply.text == " two."

    def test_a_prefill_where_none_is_possible(self) -> None:
        with fake.FakeServer() as server:
            with pytest.raises(UsageError, match="prefill: none"):
                chat(server, prefill="x")
            assert not server.posts

    def test_reasoning_models(self) -> None:
        settings = ChatSettings(
            reasoning_effort="low",
            reasoning_tokens=1000,
            max_tokens_name="max_completion_tokens",
            extra_body={"temperature": None, "top_k": 20, "chat_template_kwargs": {"a": 1}},
        )
        with fake.FakeServer() as server:
            server.message = {"reasoning_content": "Let me think.", "content": "Yes."}
            reply = chat(server, settings=settings)
        body = server.posts[0].body
        assert body["max_completion_tokens"] == 1006
        assert "max_tokens" not in body and "temperature" not in body
        assert body["reasoning_effort"] == "low"
        assert body["top_k"] == 20 and body["chat_template_kwargs"] == {"a": 1}
        assert reply.text == "Yes."

    def test_settings_that_are_wrong(self) -> None:
        with pytest.raises(UsageError, match="reasoning_tokens"):
            ChatSettings(reasoning_tokens=-1)
        with pytest.raises(UsageError, match="think"):
            ChatSettings(think=("", "</think>"))


class TestReading:
    @pytest.mark.parametrize(
        ("text", "answer"),
        [
            ("<think>hm, no</think>\n\nKeep", "Keep"),
            ("\n<think>\na</think>Keep", "Keep"),
            ("so it is</think>\nKeep", "Keep"),  # the template wrote <think>
            ("<think>never done", ""),
            ("Keep", "Keep"),
            ("I <think> so", "I <think> so"),  # a guard's business
            ("I <think>x</think> so", "I <think>x</think> so"),
            ("<think>a</think>b</think>c", "b</think>c"),
        ],
    )
    def test_thoughts(self, text: str, answer: str) -> None:
        assert without_thoughts(text, "<think>", "</think>") == answer
        with fake.FakeServer() as server:
            server.chat = lambda body: text
            assert chat(server).text == answer
            kept = chat(server, settings=ChatSettings(think=None))
            assert kept.text == text
            assert kept.usage.completion_tokens == len(text)  # thoughts cost what answers do

    def test_a_correction_keeps_its_think_for_the_guard(self) -> None:
        with fake.FakeServer() as server:
            server.chat = lambda body: "<think>so</think> 4"
            reply = chat(server, Capabilities(prefill="trailing"), prefill="2 + 2 =")
        assert reply.text == "<think>so</think> 4"

    def test_a_prefill_that_is_repeated(self) -> None:
        assert without_prefill("ab cd", "ab", None) == " cd"
        assert without_prefill(" cd", "ab", None) == " cd"
        assert without_prefill("ab cd", " ab\n", None) == " cd"  # a template stripped it
        assert without_prefill("12", "1", False) == "12"  # it goes on with 12, and repeats nothing
        assert without_prefill("112", "1", True) == "12"

    @pytest.mark.parametrize(
        ("message", "text", "finish"),
        [
            ({"content": None}, "", "stop"),
            (
                {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                "ab",
                "stop",
            ),
            ({"content": None, "refusal": "I can't."}, "", "refusal"),
        ],
    )
    def test_messages_of_other_kinds(self, message: Any, text: str, finish: str) -> None:
        with fake.FakeServer() as server:
            server.chat = lambda body: "x"
            server.message = message
            reply = chat(server)
        assert (reply.text, reply.finish) == (text, finish)

    def test_a_reply_without_usage_is_counted_at_its_most(self) -> None:
        with fake.FakeServer() as server:
            server.with_usage = False
            reply = chat(server, client={"prices": Prices(1.0, 1.0)})
        assert reply.usage.completion_tokens == 6
        assert reply.usage.prompt_tokens == len("Be brief.Is 1 + 1 = 2?") // 4 + 8
        assert reply.usage.usd == pytest.approx(19 / 1e6)

    def test_failures_are_judge_errors_with_their_cost(self) -> None:
        with fake.FakeServer() as server:
            server.default = fake.Status(401)
            with pytest.raises(JudgeError, match="check the api_key") as caught:
                chat(server)
        assert caught.value.cause is JudgeCause.AUTH
        assert caught.value.usage.calls == 1  # type: ignore[union-attr]

    def test_replies_are_cached(self, tmp_path: Path) -> None:
        with fake.FakeServer() as server:
            first = chat(server, client={"cache": ReplyCache(tmp_path)})
            again = chat(server, client={"cache": ReplyCache(tmp_path)})
            assert len(server.posts) == 1
        assert again.text == first.text
        assert again.usage.calls == 0


class TestLogprobs:
    def test_they_come_when_the_server_has_them(self) -> None:
        with fake.FakeServer() as server:
            reply = chat(server, Capabilities(logprobs=True))
        body = server.posts[0].body
        assert (body["logprobs"], body["top_logprobs"]) == (True, 1)
        assert reply.logprobs == tuple(-ord(c) / 1000 for c in reply.text)

    def test_of_the_answer_alone(self) -> None:
        with fake.FakeServer() as server:
            server.chat = lambda body: "<think>hm</think>ab"
            reply = chat(server, Capabilities(logprobs=True))
        assert reply.logprobs == (-0.097, -0.098)

    def entries(self, *pieces: str) -> list[dict[str, Any]]:
        return [{"token": p, "logprob": -float(i)} for i, p in enumerate(pieces)]

    def test_which_tokens_make_up_a_text(self) -> None:
        assert logprobs_of(self.entries("a", "b", "<eos>"), "ab") == (0.0, -1.0)
        assert logprobs_of(self.entries("<think>", "</think>", "a"), "a") == (-2.0,)
        assert logprobs_of(self.entries("ab", "c"), "bc") is None  # in the middle of a token
        assert logprobs_of(self.entries("`", "x"), "ab") is None  # of another text
        assert logprobs_of(self.entries("a"), "") == ()
        halves = [{"token": "�", "bytes": [0xC3], "logprob": -1}]
        halves += [{"token": "�", "bytes": [0xA9], "logprob": -2}]
        assert logprobs_of(halves, "é") == (-1.0, -2.0)
        for odd in (None, {}, ["x"], [{"token": "a"}], [{"bytes": [999], "logprob": 0.0}]):
            assert logprobs_of(odd, "a") is None


def probe(server: Any, settings: ChatSettings = DEFAULT) -> ChatReport:
    async def main() -> ChatReport:
        async with ModelClient(server.url, timing=ONCE) as client:
            return await probe_chat(client, "toy", settings=settings)

    return asyncio.run(main())


def fluent(body: Any) -> str:
    """Answers, and goes on with what it is given where the server does so."""
    last = body["messages"][-1]
    if last["role"] == "assistant" and last["content"].endswith("Par"):
        return "is." if last.get("continues") else "Paris is the capital."
    if last["role"] == "assistant":
        return " 5, 6" if last.get("continues") else "1, 2, 3"
    return f"An answer to: {last['content'][:10]}"


class Fluent(fake.FakeServer):  # type: ignore[misc]
    """Continues in one form only; else it answers the last message anew."""

    def _chat(self, body: Any) -> Any:
        last = body["messages"][-1]
        flagged = body.get("continue_final_message") is True
        last["continues"] = (
            (self.prefill == "trailing")
            or (self.prefill == "vllm" and flagged)
            or (self.prefill == "deepseek" and last.get("prefix") is True)
        )
        return super()._chat(body)


class TestProbe:
    @pytest.mark.parametrize("form", ["json_schema", "structured_outputs", "json_object", "none"])
    @pytest.mark.parametrize("prefill", ["trailing", "vllm", "deepseek", "none"])
    def test_it_finds_what_the_server_can_do(self, form: str, prefill: str) -> None:
        with Fluent() as server:
            server.chat = fluent
            server.structured = {form}
            server.prefill, server.echo = prefill, prefill == "trailing"
            server.wires = {"llama"}
            report = probe(server)
        assert report.problem == ""
        report.check()
        assert report.capabilities == Capabilities(form, prefill, True)  # type: ignore[arg-type]
        assert report.prefill_repeated is {"trailing": True, "none": None}.get(prefill, False)
        assert report.kind == "llama.cpp"
        assert f"json       {form}" in str(report)
        assert report.notes == ()

    def test_forms_that_are_refused_are_not_there(self) -> None:
        class Strict(Fluent):
            def _chat(self, body: Any) -> Any:
                if "response_format" in body or "structured_outputs" in body or "logprobs" in body:
                    raise ValueError
                return super()._chat(body)

            def _post(self, path: str, body: Any) -> tuple[int, Any]:
                try:
                    return super()._post(path, body)
                except ValueError:
                    return 400, {"error": {"message": "unknown field"}}

        with Strict() as server:
            server.chat = fluent
            server.prefill = "none"
            report = probe(server)
        assert report.capabilities == Capabilities("none", "none", False)
        assert report.problem == ""

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("", "with nothing"),
            ("   ", "with nothing"),
            ("ok", "does not generate: two different questions got the same 'ok'"),
        ],
    )
    def test_a_server_that_answers_but_does_not_generate(self, text: str, said: str) -> None:
        with fake.FakeServer() as server:
            server.chat = lambda body: text
            report = probe(server)
        assert said in report.problem
        with pytest.raises(JudgeError, match=f"{server.url}, model 'toy': it answers") as caught:
            report.check()
        assert caught.value.cause is JudgeCause.SERVER
        assert f"generates  no: {report.problem}" in str(report)

    def test_a_server_that_ignores_max_tokens(self) -> None:
        with fake.FakeServer() as server:
            server.chat = lambda body: body["messages"][-1]["content"] * 50
            assert "ignores max_tokens" in probe(server).problem

    def test_a_model_that_only_thinks(self) -> None:
        class Thinker(fake.FakeServer):  # type: ignore[misc]
            def _chat(self, body: Any) -> Any:
                reply = super()._chat(body)
                reply["choices"][0]["finish_reason"] = "length"
                return reply

        with Thinker() as server:
            server.chat = lambda body: "<think>first, I"
            assert "reasoning_tokens" in probe(server).problem

    def test_a_server_that_is_not_there_or_lets_nobody_in(self) -> None:
        with fake.FakeServer() as server:
            server.default = fake.Status(401)
            assert "check the api_key" in probe(server).problem
        assert "is the server running" in probe(server).problem

    def test_a_model_that_the_server_does_not_list(self) -> None:
        with Fluent() as server:
            server.chat = fluent
            server.model_name = "other"
            assert probe(server).notes == ("it lists other, and not toy",)

    def test_a_loopback_address_on_several_nodes(self) -> None:
        refuse_loopback("http://localhost:8000/v1", nodes=1)
        refuse_loopback("http://judge.cluster:8000/v1", nodes=2)
        for url in ("http://localhost:8000/v1", "http://127.0.0.1/v1", "http://[::1]:1/v1"):
            with pytest.raises(ConfigError, match="the run has 2 nodes"):
                refuse_loopback(url, nodes=2)
