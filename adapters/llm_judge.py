"""The chat judge over a model server, from plain options: what scripts and configs name.

judge = LLMJudge("http://host:8000/v1", "Qwen/Qwen3-4B-Instruct-2507", limits={"usd": 20},
                 prices={"prompt": 0.1, "completion": 0.4})
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from mintrl_env.adapters.chat_server import ChatServer, ChatSettings
from mintrl_env.adapters.llm_cache import ReplyCache
from mintrl_env.adapters.llm_client import ModelClient
from mintrl_env.adapters.llm_limits import Limits, Prices, Timing
from mintrl_env.chat import Capabilities
from mintrl_env.errors import UsageError
from mintrl_env.judge_prompts import JudgePrompts, Privileged, RunTests
from mintrl_env.judges_chat import ChatJudge, Mode
from mintrl_env.judges_rubric import ValidatorCorrectorVerifier
from mintrl_env.protocols import Tokenizer
from mintrl_env.types import ReviewRequest, Verdict

T = TypeVar("T")
CacheMode = Literal["use", "replay"]


def make_chat(
    url: str,
    model: str,
    *,
    capabilities: Capabilities | Mapping[str, Any] | None = None,
    settings: ChatSettings | Mapping[str, Any] | None = None,
    timing: Timing | Mapping[str, Any] | None = None,
    limits: Limits | Mapping[str, Any] | None = None,
    prices: Prices | Mapping[str, Any] | None = None,
    api_key_env: str | None = None,
    cache: str | Path | None = None,
    cache_mode: CacheMode = "use",
) -> ChatServer:
    """A chat model behind a server, from objects or from mappings of their fields.

    Args:
        url, model: the server's address, "http://host:8000/v1", and its name for the model.
        capabilities: what the server can do; default JSON by schema and no prefill. What
            `server_probe.probe_chat` reports goes here.
        settings: how the model wants to be asked (a reasoning model's effort and tokens).
        timing, limits, prices: of `ModelClient`.
        api_key_env: the environment variable with the key. There is no default, so that no key is
            sent to a server that it wasn't meant for.
        cache: a folder for replies; `cache_mode` "replay" asks the server for none.

    Raises:
        UsageError: an unknown field, a value that makes no sense, a variable that isn't set.
    """
    api_key = None
    if api_key_env is not None:
        api_key = os.environ.get(api_key_env)
        if not api_key:
            raise UsageError(f"api_key_env: the environment variable {api_key_env} is not set")
    if cache_mode not in ("use", "replay"):
        raise UsageError(f"cache_mode is use or replay, not {cache_mode!r}")
    client = ModelClient(
        url,
        api_key=api_key,
        timing=_made(Timing, timing, "timing"),
        limits=_made(Limits, limits, "limits"),
        prices=None if prices is None else _made(Prices, prices, "prices"),
        cache=None if cache is None else ReplyCache(cache, mode=cache_mode),
    )
    return ChatServer(
        client,
        model,
        capabilities=_made(Capabilities, capabilities, "capabilities"),
        settings=_made(ChatSettings, settings, "settings"),
    )


class LLMJudge:
    """A `ChatJudge` that asks a model server.

    Args:
        url, model, capabilities, settings, timing, limits, prices, api_key_env, cache, cache_mode:
            see `make_chat`.
        domain: whose prompts to use, "math" or "code"; in a config, that of the verifier.
        prompt_file: a file with prompts of your own (`JudgePrompts.load`).
        tokenizer, mode, privileged, rubric_field, delimiters, run_tests, temperature,
            verdict_temperature, verdict_tokens, reasks: see `ChatJudge`.

    Attributes:
        chat: the model; `chat.client` has its limits and spending.

    Raises:
        UsageError: an option that makes no sense.
    """

    def __init__(
        self,
        url: str,
        model: str,
        tokenizer: Tokenizer | None = None,
        *,
        domain: str = "math",
        prompt_file: str | Path | None = None,
        mode: Mode = "two-call",
        privileged: Privileged = "none",
        rubric_field: str = "rubric",
        delimiters: Sequence[str] = ("\n\n", "```"),
        run_tests: RunTests | None = None,
        temperature: float = 1.0,
        verdict_temperature: float | None = None,
        verdict_tokens: int = 512,
        reasks: int = 0,
        capabilities: Capabilities | Mapping[str, Any] | None = None,
        settings: ChatSettings | Mapping[str, Any] | None = None,
        timing: Timing | Mapping[str, Any] | None = None,
        limits: Limits | Mapping[str, Any] | None = None,
        prices: Prices | Mapping[str, Any] | None = None,
        api_key_env: str | None = None,
        cache: str | Path | None = None,
        cache_mode: CacheMode = "use",
    ) -> None:
        self.chat = make_chat(
            url,
            model,
            capabilities=capabilities,
            settings=settings,
            timing=timing,
            limits=limits,
            prices=prices,
            api_key_env=api_key_env,
            cache=cache,
            cache_mode=cache_mode,
        )
        self._judge = ChatJudge(
            self.chat,
            tokenizer,
            prompts=JudgePrompts.load(domain, prompt_file),
            mode=mode,
            privileged=privileged,
            rubric_field=rubric_field,
            delimiters=delimiters,
            run_tests=run_tests,
            temperature=temperature,
            verdict_temperature=verdict_temperature,
            verdict_tokens=verdict_tokens,
            reasks=reasks,
        )

    def __repr__(self) -> str:
        return f"LLMJudge({self.chat.client.base_url!r}, {self.chat.model!r})"

    async def review(self, request: ReviewRequest) -> Verdict:
        """See `ChatJudge.review`."""
        return await self._judge.review(request)

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        await self.chat.client.aclose()


class LLMRubricJudge:
    """A `ValidatorCorrectorVerifier` (RTI) that asks a model server; its perplexity gate is the guard
    `perplexity`.

    Args:
        url, model, and the rest of `make_chat`'s in `server`: the model that plays all three parts.
        tokenizer: the policy's.
        prompt_file: a file with prompts of your own (`JudgePrompts.load`).
        rubric_field, ngram, derivable, delimiters, temperature, verdict_tokens: see there.

    Raises:
        UsageError: an option that makes no sense.
    """

    def __init__(
        self,
        url: str,
        model: str,
        tokenizer: Tokenizer | None = None,
        *,
        server: Mapping[str, Any] | None = None,
        prompt_file: str | Path | None = None,
        rubric_field: str = "rubric",
        ngram: int = 5,
        derivable: bool = True,
        delimiters: Sequence[str] = ("\n\n", "```"),
        temperature: float = 1.0,
        verdict_tokens: int = 512,
    ) -> None:
        try:
            self.chat = make_chat(url, model, **(server or {}))
        except TypeError as error:
            raise UsageError(f"server: {error}") from error
        self._judge = ValidatorCorrectorVerifier(
            self.chat,
            tokenizer,
            prompts=JudgePrompts.load("rubric", prompt_file),
            rubric_field=rubric_field,
            ngram=ngram,
            derivable=derivable,
            delimiters=delimiters,
            temperature=temperature,
            verdict_tokens=verdict_tokens,
        )

    async def review(self, request: ReviewRequest) -> Verdict:
        """See `ValidatorCorrectorVerifier.review`."""
        return await self._judge.review(request)

    async def aclose(self) -> None:
        """Close the connections of the running loop."""
        await self.chat.client.aclose()


def _made(kind: type[T], given: T | Mapping[str, Any] | None, name: str) -> T:
    """An object of a dataclass, from itself, from a mapping of its fields, or its defaults."""
    if given is None:
        return kind()
    if isinstance(given, kind):
        return given
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if not isinstance(given, Mapping):
        raise UsageError(f"{name} is a mapping of {', '.join(known)}, not {given!r}")
    unknown = [key for key in given if key not in known]
    if unknown:
        raise UsageError(f"{name} has no {unknown[0]!r}; there are {', '.join(known)}")
    try:
        return kind(**given)
    except TypeError as error:
        raise UsageError(f"{name}: {error}") from error
