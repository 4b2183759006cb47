"""What a chat server can do for a judge, found out by asking it, before a run depends on it.

    report = await probe_chat(client, "model")
    print(report); report.check()

(`policy_probe` does the same for policies.)

Every answer comes from a generation: a server may list a model and not run it, take a field and
ignore it, answer 200 with a fixed text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from mintrl_env.adapters.chat_server import ChatServer, ChatSettings
from mintrl_env.adapters.llm_client import ModelClient
from mintrl_env.adapters.llm_connections import is_loopback
from mintrl_env.adapters.llm_faults import CallFailed
from mintrl_env.chat import Capabilities, ChatMessage, ChatReply, Prefill, Structured
from mintrl_env.errors import ConfigError, JudgeCause, JudgeError

_TOKENS = 16
_JSON_TOKENS = 200
_SETTINGS = ChatSettings()
_QUESTIONS = ("Write one sentence about the sea.", "Count down from nine to one, in words.")
# No answer to the question has this form by itself.
_SCHEMA = {
    "type": "object",
    "properties": {"q7": {"type": "string", "enum": ["zx"]}},
    "required": ["q7"],
    "additionalProperties": False,
}
# In the middle of a word, and of a list: what goes on with both continues, and answers nothing.
_PREFILLS = (
    ("What is the capital of France?", "The capital of France is Par", "is"),
    ("Count from 1 to 9.", "1, 2, 3, 4,", " 5"),
)
_NO_PREFILL = ("api.openai.com", "api.anthropic.com")


@dataclass(frozen=True, slots=True)
class ChatReport:
    """What a chat server can do.

    Attributes:
        url, model, kind: whom was asked; "vllm", "llama.cpp" or "unknown".
        capabilities: for `ChatServer`.
        prefill_repeated: for `ChatSettings`; None where nothing is continued.
        problem: why it is unfit to judge; "" where it is not.
        notes: what else a user should know.
        seconds: of the first answer.
    """

    url: str
    model: str
    kind: str
    capabilities: Capabilities
    prefill_repeated: bool | None = None
    problem: str = ""
    notes: tuple[str, ...] = ()
    seconds: float = math.nan

    def check(self) -> None:
        """Raise JudgeError where the server is unfit."""
        if self.problem:
            raise JudgeError(JudgeCause.SERVER, f"{self.url}, model {self.model!r}: {self.problem}")

    def __str__(self) -> str:
        can = self.capabilities
        repeated = ", repeating it" if self.prefill_repeated else ""
        lines = [
            f"server     {self.url} ({self.kind})",
            f"model      {self.model}",
            f"generates  {'no: ' + self.problem if self.problem else f'yes, {self.seconds:.2f} s'}",
        ]
        if not self.problem:
            lines += [
                f"json       {can.structured}",
                f"prefill    {can.prefill}{repeated}",
                f"log-probs  {'yes' if can.logprobs else 'no'}",
            ]
        return "\n".join([*lines, *(f"note       {note}" for note in self.notes)])


async def probe_chat(
    client: ModelClient, model: str, *, settings: ChatSettings = _SETTINGS
) -> ChatReport:
    """Ask a chat server what it can do: five to twelve short generations."""
    kind, notes = await _kind_of(client, model)
    plain = ChatServer(client, model, capabilities=Capabilities("none"), settings=settings)
    report = ChatReport(client.base_url, model, kind, plain.capabilities, notes=notes)
    try:
        answers = [await _asked(plain, question) for question in _QUESTIONS]
    except JudgeError as error:
        return replace(report, problem=str(error))
    report = replace(report, seconds=answers[0].usage.seconds, problem=_problem_of(answers))
    if report.problem:
        return report
    prefill, repeated = await _prefill_of(plain, kind)
    capabilities = Capabilities(await _structured_of(plain), prefill, await _has_logprobs(plain))
    return replace(report, capabilities=capabilities, prefill_repeated=repeated)


async def _kind_of(client: ModelClient, model: str) -> tuple[str, tuple[str, ...]]:
    kind, notes = "unknown", []
    for path, name, field in (
        ("/version", "vllm", "version"),
        ("/props", "llama.cpp", "total_slots"),
    ):
        try:
            found = await client.get(path)
        except CallFailed:
            continue
        if isinstance(found, dict) and field in found:
            kind = name
            break
    try:
        listed = await client.get("models")
        names = [entry["id"] for entry in listed["data"]]
        if names and model not in names:
            notes.append(f"it lists {', '.join(map(str, names[:5]))}, and not {model}")
    except (CallFailed, LookupError, TypeError):
        notes.append("it lists no models")
    return kind, tuple(notes)


async def _asked(
    server: ChatServer, question: str, *, tokens: int = _TOKENS, **options: Any
) -> ChatReply:
    messages = [ChatMessage("user", question)]
    return await server.chat(messages, max_tokens=tokens, temperature=0.0, **options)


def _problem_of(answers: Sequence[ChatReply]) -> str:
    texts = [answer.text.strip() for answer in answers]
    if not any(texts):
        if any(a.usage.completion_tokens and a.finish == "length" for a in answers):
            return (
                f"it wrote {answers[0].usage.completion_tokens} tokens and no answer: a reasoning "
                "model? Raise reasoning_tokens, or lower reasoning_effort"
            )
        return "it answers, but with nothing: no model generates there"
    if texts[0] == texts[1]:
        return f"it answers, but does not generate: two different questions got the same {texts[0][:60]!r}"
    longest = max(len(text) for text in texts)
    if longest > _TOKENS * 30:
        return f"it ignores max_tokens: {longest} characters came for {_TOKENS} tokens"
    return ""


async def _structured_of(plain: ChatServer) -> Structured:
    question = "Say hello, as JSON."  # OpenAI's json_object wants the word
    forms: tuple[Structured, ...] = ("json_schema", "structured_outputs", "json_object")
    for form in forms:
        try:
            reply = await _asked(
                _with(plain, Capabilities(form)), question, tokens=_JSON_TOKENS, schema=_SCHEMA
            )
            found = json.loads(reply.text)
        except JudgeError:
            continue  # refused
        except ValueError:
            continue
        if found == {"q7": "zx"} or (form == "json_object" and isinstance(found, dict)):
            return form
    return "none"


async def _prefill_of(plain: ChatServer, kind: str) -> tuple[Prefill, bool | None]:
    if urlsplit(plain.client.base_url).hostname in _NO_PREFILL:
        return "none", None
    forms: tuple[Prefill, ...] = ("trailing", "vllm", "deepseek")
    if kind == "vllm":
        forms = ("vllm",)
    for form in forms:
        # As if nothing were repeated, to see what is.
        as_sent = replace(plain.settings, prefill_repeated=False)
        server = _with(plain, Capabilities("none", form), as_sent)
        repeats = []
        for question, prefill, then in _PREFILLS:
            try:
                text = (await _asked(server, question, prefill=prefill)).text
            except JudgeError:
                break
            repeats.append(text.startswith(prefill))
            if not text.removeprefix(prefill).startswith((then, then.strip())):
                break
        else:
            return form, repeats[0]
    return "none", None


async def _has_logprobs(plain: ChatServer) -> bool:
    server = _with(plain, Capabilities("none", logprobs=True))
    try:
        return bool((await _asked(server, _QUESTIONS[0])).logprobs)
    except JudgeError:
        return False


def _with(
    server: ChatServer, capabilities: Capabilities, settings: ChatSettings | None = None
) -> ChatServer:
    return ChatServer(
        server.client,
        server.model,
        capabilities=capabilities,
        settings=settings or server.settings,
    )


def refuse_loopback(base_url: str, *, nodes: int) -> None:
    """Refuse a server that each node of a run would look for on itself.

    Raises:
        ConfigError: a loopback address on several nodes.
    """
    if nodes > 1 and is_loopback(base_url):
        raise ConfigError(
            f"{base_url} is this machine itself, and the run has {nodes} nodes: each would call its "
            "own. Give the address by which all of them reach the server"
        )
