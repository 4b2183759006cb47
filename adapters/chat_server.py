"""A chat model behind an OpenAI-compatible server: what judges ask.

    client = ModelClient("http://host:8000/v1", limits=Limits(concurrent=32))
    model = ChatServer(client, "Qwen/Qwen3-32B", capabilities=Capabilities(prefill="vllm"))

Retries, limits and spending are the client's business; here is what differs between servers: how
JSON is asked for, how a text is continued, what is left out of a reply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mintrl_env.adapters.llm_client import ModelClient
from mintrl_env.adapters.llm_faults import CallFailed, WrongShape, member
from mintrl_env.chat import Capabilities, ChatMessage, ChatReply
from mintrl_env.errors import JudgeError, UsageError

_PATH = "chat/completions"
_CHARACTERS_A_TOKEN = 4
_NONE = -9999.0


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """How a model wants to be asked.

    Attributes:
        reasoning_effort: sent where given ("low", "medium", "high" ...).
        reasoning_tokens: added to every `max_tokens`, where a model's thoughts count towards it.
        max_tokens_name: OpenAI's reasoning models refuse "max_tokens".
        think: what encloses thoughts at the start of an answer; None: they stay in it.
        prefill_repeated: whether a server with trailing prefill repeats it in its answer; None: it
            does where the answer begins like it, which a short prefill may do by chance.
        extra_body: more fields of the request; these win, and null takes a field out (as in
            {"temperature": null} for models that refuse it).
    """

    reasoning_effort: str | None = None
    reasoning_tokens: int = 0
    max_tokens_name: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    think: tuple[str, str] | None = ("<think>", "</think>")
    prefill_repeated: bool | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.reasoning_tokens < 0:
            raise UsageError(f"reasoning_tokens must be >= 0, not {self.reasoning_tokens}")
        if self.think is not None and not all(self.think):
            raise UsageError("think is two strings, before and behind the thoughts, or null")


_SETTINGS = ChatSettings()
_CAPABILITIES = Capabilities()


class ChatServer:
    """A `ChatModel` over HTTP.

    Args:
        client: the server, with its limits, prices and cache.
        model: the name by which the server knows the model.
        capabilities: what the server can do; `server_probe.probe_chat` finds out.
        settings: see `ChatSettings`.
    """

    def __init__(
        self,
        client: ModelClient,
        model: str,
        *,
        capabilities: Capabilities = _CAPABILITIES,
        settings: ChatSettings = _SETTINGS,
    ) -> None:
        self.client, self.model = client, model
        self.capabilities, self.settings = capabilities, settings

    def __repr__(self) -> str:
        return f"ChatServer({self.client.base_url!r}, {self.model!r})"

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        max_tokens: int,
        schema: Mapping[str, Any] | None = None,
        prefill: str = "",
        stop: Sequence[str] = (),
        temperature: float = 1.0,
        seed: int | None = None,
    ) -> ChatReply:
        """Answer a chat (see `mintrl_env.chat.ChatModel`).

        Raises:
            UsageError: a prefill that the server can't go on with.
            JudgeError: no answer.
        """
        body = self.body(
            messages,
            max_tokens=max_tokens,
            schema=schema,
            prefill=prefill,
            stop=stop,
            temperature=temperature,
            seed=seed,
        )
        characters = sum(len(message["content"]) for message in body["messages"])
        try:
            reply, usage = await self.client.call(
                _PATH,
                body,
                lambda reply: read_reply(reply, prefill, self.capabilities, self.settings),
                prompt_tokens=characters // _CHARACTERS_A_TOKEN + 4 * len(body["messages"]),
                max_tokens=max_tokens + self.settings.reasoning_tokens,
                cached=True,
            )
        except CallFailed as error:
            raise JudgeError(error.cause, str(error), usage=error.usage) from error
        text, finish, logprobs = reply
        return ChatReply(text, finish, usage, logprobs)

    def body(
        self,
        messages: Sequence[ChatMessage],
        *,
        max_tokens: int,
        schema: Mapping[str, Any] | None,
        prefill: str,
        stop: Sequence[str],
        temperature: float,
        seed: int | None,
    ) -> dict[str, Any]:
        """The request that `chat` sends."""
        settings = self.settings
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": m.role, "content": m.content} for m in messages],
            settings.max_tokens_name: max_tokens + settings.reasoning_tokens,
            "temperature": temperature,
        }
        if stop:
            body["stop"] = list(stop)
        if seed is not None:
            body["seed"] = seed
        if settings.reasoning_effort is not None:
            body["reasoning_effort"] = settings.reasoning_effort
        if self.capabilities.logprobs:
            # One, not none: llama.cpp takes 0 for "no log-probs", and sends twenty if not told.
            body |= {"logprobs": True, "top_logprobs": 1}
        if schema is not None:
            body |= _structured(self.capabilities.structured, schema)
        if prefill:
            last, more = _continued(self.capabilities.prefill, prefill, self)
            body["messages"].append(last)
            body |= more
        body |= settings.extra_body
        return {name: value for name, value in body.items() if value is not None}


def _structured(form: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    if form == "json_schema":
        asked = {"name": "answer", "schema": dict(schema), "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": asked}}
    if form == "structured_outputs":
        return {"structured_outputs": {"json": dict(schema)}}
    if form == "json_object":
        return {"response_format": {"type": "json_object"}}
    return {}


def _continued(
    form: str, prefill: str, server: ChatServer
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The last message, and more fields."""
    last = {"role": "assistant", "content": prefill}
    if form == "vllm":
        return last, {"continue_final_message": True, "add_generation_prompt": False}
    if form == "deepseek":
        return {**last, "prefix": True}, {}
    if form == "trailing":
        return last, {}
    raise UsageError(
        f"{server} can't go on with a text: its capabilities say prefill: none. Ask without a "
        "prefill, or declare how the server continues one (vllm, trailing, deepseek)"
    )


Read = tuple[str, str, tuple[float, ...] | None]


def read_reply(
    reply: Any, prefill: str, capabilities: Capabilities, settings: ChatSettings
) -> Read:
    """Text, finish reason and log-probs of a chat completion.

    Raises:
        WrongShape: it is none.
    """
    choice = member(reply, dict, "choices", 0)
    message = member(choice, dict, "message")
    finish = choice.get("finish_reason")
    refused = message.get("refusal")
    if isinstance(refused, str) and refused:
        return "", "refusal", None
    raw = _text(message.get("content"))
    text = raw
    if prefill:
        if capabilities.prefill == "trailing":
            text = without_prefill(raw, prefill, settings.prefill_repeated)
    elif settings.think is not None:
        text = without_thoughts(raw, *settings.think)
    logprobs = None
    if capabilities.logprobs and isinstance(choice.get("logprobs"), dict):
        logprobs = logprobs_of(choice["logprobs"].get("content"), text)
    return text, finish if isinstance(finish, str) else "unknown", logprobs


def _text(content: Any) -> str:
    """A message's text; a model that only thought has none (null)."""
    if content is None:
        return ""
    if isinstance(content, list):  # parts
        return "".join(
            member(p, str, "text") for p in content if isinstance(p, dict) and "text" in p
        )
    if not isinstance(content, str):
        raise WrongShape(f"choices.0.message.content is {type(content).__name__}, not str")
    return content


def without_prefill(text: str, prefill: str, repeated: bool | None) -> str:
    """What follows the prefill, of a text that may repeat it."""
    if repeated is False:
        return text
    for head in (prefill, prefill.strip()):  # some templates strip a message
        if head and text.startswith(head):
            return text[len(head) :]
    return text


def without_thoughts(text: str, start: str, end: str) -> str:
    """The answer behind the thoughts that open a text; "" where they never end.

    Where a template has put `start` into the prompt already, a text may hold `end` alone.
    """
    opened = text.lstrip().startswith(start)
    before, found, after = text.partition(end)
    if found and (opened or start not in before):
        return after.lstrip()
    return "" if opened else text


def logprobs_of(entries: Any, text: str) -> tuple[float, ...] | None:
    """The log-probs of the tokens that make up `text`; None where that can't be told.

    A server's entries may hold thoughts and an EOS too, and some servers' don't belong to the text
    that they sent (llama.cpp's, where a grammar refused its first choice), or are no log-probs of what
    was sampled: NaN, above 0, or -9999, which stands for "none" with OpenAI and vLLM.
    """
    if not isinstance(entries, list):
        return None
    try:
        pieces = [_bytes(entry) for entry in entries]
        values = [member(entry, float, "logprob") for entry in entries]
    except (WrongShape, ValueError, TypeError):
        return None
    joined, wanted = b"".join(pieces), text.encode("utf-8", "replace")
    begin = 0 if joined.startswith(wanted) else joined.rfind(wanted)
    ends = [0]
    for piece in pieces:
        ends.append(ends[-1] + len(piece))
    if begin < 0 or begin not in ends or begin + len(wanted) not in ends:
        return None
    first, last = ends.index(begin), ends.index(begin + len(wanted))
    if not all(_NONE < value < 1e-3 for value in values[first:last]):
        return None
    return tuple(min(value, 0.0) for value in values[first:last])


def _bytes(entry: Any) -> bytes:
    given = entry.get("bytes") if isinstance(entry, dict) else None
    if isinstance(given, list):
        return bytes(given)
    return member(entry, str, "token").encode("utf-8", "replace")
