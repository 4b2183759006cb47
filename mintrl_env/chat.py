"""The face of a chat model, as judges use one. Servers are in the adapters; nothing here has a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from mintrl_env.errors import UsageError
from mintrl_env.types import Usage

Structured = Literal["json_schema", "structured_outputs", "json_object", "none"]
"""How a server can be made to answer in JSON, the strictest first."""

Prefill = Literal["none", "vllm", "trailing", "deepseek"]
"""How a server can be made to go on with a text: not at all, `continue_final_message`, a trailing
assistant message, one marked `prefix`."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a server can do; declared by its user or found by a probe.

    Attributes:
        structured: the strictest form of JSON answers.
        prefill: how it continues a text.
        logprobs: whether it tells the log-probs of what it wrote.

    Raises:
        UsageError: a value that is none of these; a server would be asked in a wrong way all along.
    """

    structured: Structured = "json_schema"
    prefill: Prefill = "none"
    logprobs: bool = False

    def __post_init__(self) -> None:
        for name, known in (("structured", Structured), ("prefill", Prefill)):
            value = getattr(self, name)
            if value not in get_args(known):
                listed = ", ".join(get_args(known))
                raise UsageError(f"capabilities.{name} is one of {listed}, not {value!r}")
        if not isinstance(self.logprobs, bool):
            raise UsageError(f"capabilities.logprobs is true or false, not {self.logprobs!r}")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class ChatReply:
    """What a chat model wrote.

    Attributes:
        text: the answer, without a prefill that some servers repeat, and without a reasoning part.
        finish: "stop", "length", or what else the server said.
        usage: what it cost, failed attempts included.
        logprobs: one per written token (temperature 1), or None.
    """

    text: str
    finish: str
    usage: Usage = field(default_factory=Usage)
    logprobs: tuple[float, ...] | None = None


@runtime_checkable
class ChatModel(Protocol):
    """A model that answers chats."""

    capabilities: Capabilities

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
        """Answer a chat.

        Args:
            max_tokens: of the answer.
            schema: the JSON schema of the answer; held to as far as `capabilities.structured` goes.
            prefill: text that the answer goes on with; only where `capabilities.prefill` allows it.

        Raises:
            JudgeError: no answer, with its cause and what was spent; retries are done by then.
        """
        ...
