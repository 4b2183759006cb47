"""The forms in which model servers take token ids and give token ids back.

    vllm_completions   POST /v1/completions          `vllm serve`, and servers that copied it
    vllm_generate      POST /inference/v1/generate   `vllm serve --enable-scale-out` (or --tokens-only)
    llama_cpp          POST /completion              llama.cpp's server, and xllamacpp

vLLM's third form, /v1/chat/completions, gives ids but takes messages: a policy that goes on from ids
cannot use it. `read_chat_ids` reads it, to compare a server's chat template with ours.

Nothing here has a network: a form makes requests and reads replies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from mintrl_env.adapters.llm_faults import WrongShape, member
from mintrl_env.adapters.policy_values import (
    CLAMPED,
    count,
    ids_of,
    log,
    name_of,
    number,
    spread,
    versions_of,
)

WireName = Literal["vllm_completions", "vllm_generate", "llama_cpp"]
LogprobsMode = Literal["raw", "processed"]


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """What a policy wants written."""

    model: str
    ids: npt.NDArray[np.int32]
    max_tokens: int
    stop: tuple[str, ...]
    temperature: float
    eos_ids: tuple[int, ...]
    seed: int | None = None
    row: str = ""
    salt: str | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """What a server wrote.

    Attributes:
        ids: as sampled, EOS and the tokens of a stop string included.
        logprobs: one for each id, NaN where it is not known, or None.
        stopped: "eos", "length", or "string".
        prompt_tokens, completion_tokens: how many ids the server says that it read and wrote, or
            None where it doesn't.
        prompt_ids: those that it read, where it tells them.
        model: what the server calls its model.
        versions: of the weights that wrote it, where the server tells them.
    """

    ids: list[int]
    logprobs: list[float] | None
    stopped: Literal["eos", "length", "string"]
    prompt_tokens: int | None = None
    prompt_ids: list[int] | None = None
    completion_tokens: int | None = None
    model: str | None = None
    versions: tuple[str, ...] = ()


class Wire(Protocol):
    """One form."""

    @property
    def path(self) -> str: ...

    def body(self, ask: Ask) -> dict[str, Any]: ...

    def read(self, reply: Any, ask: Ask) -> Written:
        """Raises WrongShape."""
        ...

    def score_body(self, ask: Ask) -> dict[str, Any]:
        """Asks for the log-probs of `ask.ids` as a prompt."""
        ...

    def read_scores(self, reply: Any, ask: Ask) -> list[float]:
        """Of all ids but the first. Raises WrongShape."""
        ...


def wire_for(name: WireName, mode: LogprobsMode) -> Wire:
    """The form of that name; `mode` is vLLM's --logprobs-mode."""
    if name == "vllm_completions":
        return VllmCompletions(mode)
    if name == "vllm_generate":
        return VllmGenerate(mode)
    return LlamaCpp()


def _vllm_sampling(ask: Ask) -> dict[str, Any]:
    params: dict[str, Any] = {
        "max_tokens": ask.max_tokens,
        "temperature": ask.temperature,
        # Said, not left out: vLLM takes defaults from the model's generation_config.json.
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "n": 1,
        # Our EOS ids end a text and no others, as in the engine in process.
        "ignore_eos": True,
        "stop_token_ids": list(ask.eos_ids),
        "logprobs": 0,  # of the sampled token alone
    }
    if ask.stop:
        params |= {
            "stop": list(ask.stop),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,  # or a stop string that holds one is never seen
            "spaces_between_special_tokens": False,
        }
    if ask.seed is not None:
        params["seed"] = ask.seed
    return params


def _vllm_head(ask: Ask) -> dict[str, Any]:
    head: dict[str, Any] = {"model": ask.model}
    if ask.row:
        head["session_id"] = ask.row
    if ask.salt is not None:
        head["cache_salt"] = ask.salt
    return head


def _vllm_known(mode: LogprobsMode, temperature: float) -> bool:
    """Are the server's log-probs those of the distribution that was sampled from?

    Of temperature 0 the log-probs at temperature 1 are wanted, which only "raw" is sure to give.
    """
    return temperature == 1 or (temperature == 0) is (mode == "raw")


def _vllm_read(reply: Any, choice: Any, values: Sequence[Any] | None, ask: Ask) -> Written:
    ids = ids_of(choice, "token_ids")
    finish = choice.get("finish_reason")
    if finish not in ("stop", "length", "abort") or not ids:
        raise WrongShape(f"finish_reason is {finish!r} after {len(ids)} tokens")
    stopped: Literal["eos", "length", "string"] = "length"
    if finish == "stop":
        stopped = "eos" if ids[-1] in ask.eos_ids else "string"
        by = choice.get("stop_reason")
        if isinstance(by, int) and by in ask.eos_ids and stopped != "eos":
            raise WrongShape(f"it ended at id {by}, which is not among the ids that came")
    logprobs = None
    if values is not None:
        if len(values) != len(ids):
            raise WrongShape(f"{len(values)} log-probs came for {len(ids)} tokens")
        logprobs = [number(value) for value in values]
    prompt_ids = ids_of(choice, "prompt_token_ids") if choice.get("prompt_token_ids") else None
    usage = reply.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    return Written(
        ids,
        logprobs,
        stopped,
        count(usage.get("prompt_tokens")),
        prompt_ids,
        count(usage.get("completion_tokens")),
        name_of(reply.get("model")),
        versions_of(choice.get("weight_versions")),
    )


def _prompt_scores(entries: Any, ask: Ask) -> list[float]:
    """From vLLM's `prompt_logprobs`: null for the first id, then {"id": {"logprob": x}} for each."""
    if not isinstance(entries, list) or len(entries) != len(ask.ids):
        came = len(entries) if isinstance(entries, list) else "no"
        raise WrongShape(f"{came} prompt_logprobs came for {len(ask.ids)} ids")
    values = [
        member(entry, float, str(token), "logprob")
        for token, entry in zip(ask.ids[1:].tolist(), entries[1:], strict=True)
    ]
    # A given token may be impossible; vLLM writes -9999, for which JSON has a number.
    return [-math.inf if value <= CLAMPED else value for value in values]


@dataclass(frozen=True, slots=True)
class VllmCompletions:
    """/v1/completions with `prompt: [ids]` and `return_token_ids`."""

    mode: LogprobsMode = "raw"
    path: str = "completions"

    def body(self, ask: Ask) -> dict[str, Any]:
        more = {"prompt": ask.ids.tolist(), "return_token_ids": True}
        return {**_vllm_head(ask), **more, **_vllm_sampling(ask)}

    def read(self, reply: Any, ask: Ask) -> Written:
        choice = member(reply, dict, "choices", 0)
        values = None
        if _vllm_known(self.mode, ask.temperature) and choice.get("logprobs") is not None:
            values = member(choice, list, "logprobs", "token_logprobs")
        return _vllm_read(reply, choice, values, ask)

    def score_body(self, ask: Ask) -> dict[str, Any]:
        head = {**_vllm_head(ask), "prompt": ask.ids.tolist()}
        return {**head, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}

    def read_scores(self, reply: Any, ask: Ask) -> list[float]:
        choice = member(reply, dict, "choices", 0)
        return _prompt_scores(choice.get("prompt_logprobs"), ask)


@dataclass(frozen=True, slots=True)
class VllmGenerate:
    """/inference/v1/generate: `token_ids` and `sampling_params`, no text anywhere."""

    mode: LogprobsMode = "raw"
    path: str = "/inference/v1/generate"

    def body(self, ask: Ask) -> dict[str, Any]:
        more = {"token_ids": ask.ids.tolist(), "sampling_params": _vllm_sampling(ask)}
        return {**_vllm_head(ask), **more}

    def read(self, reply: Any, ask: Ask) -> Written:
        choice = member(reply, dict, "choices", 0)
        values = None
        if _vllm_known(self.mode, ask.temperature) and choice.get("logprobs") is not None:
            content = member(choice, list, "logprobs", "content")
            values = [member(entry, dict).get("logprob") for entry in content]
        return _vllm_read(reply, choice, values, ask)

    def score_body(self, ask: Ask) -> dict[str, Any]:
        params = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
        return {**_vllm_head(ask), "token_ids": ask.ids.tolist(), "sampling_params": params}

    def read_scores(self, reply: Any, ask: Ask) -> list[float]:
        return _prompt_scores(member(reply, dict).get("prompt_logprobs"), ask)


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """/completion of llama.cpp's server."""

    path: str = "/completion"

    def body(self, ask: Ask) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt": ask.ids.tolist(),
            "n_predict": ask.max_tokens,
            "temperature": ask.temperature,
            "samplers": ["temperature"],  # else top-k, top-p and min-p cut the distribution
            "return_tokens": True,
            "cache_prompt": True,
            "n_probs": 1,
            "post_sampling_probs": _at_temperature(ask),
        }
        if ask.stop:
            body["stop"] = list(ask.stop)
        if ask.seed is not None:
            body["seed"] = ask.seed % (2**32 - 1)  # its last value means "any"
        return body

    def read(self, reply: Any, ask: Ask) -> Written:
        ids = ids_of(reply, "tokens")
        how = member(reply, str, "stop_type")
        if member(reply, dict).get("truncated") is True:
            raise WrongShape("the server cut the prompt to its context (truncated: true)")
        if not ids or how not in ("eos", "limit", "word"):
            raise WrongShape(f"{len(ids)} tokens, stop_type {how!r}")
        stopped: Literal["eos", "length", "string"] = "eos" if how == "eos" else "length"
        if how == "word":
            stopped = "string"
        logprobs = None
        entries = reply.get("completion_probabilities")
        if isinstance(entries, list):
            values = [
                log(member(entry, float, "prob"))
                if _at_temperature(ask)
                else number(member(entry, float, "logprob"))
                for entry in entries
            ]
            logprobs = spread(ids, [member(entry, int, "id") for entry in entries], values)
        return Written(
            ids,
            logprobs,
            stopped,
            member(reply, int, "tokens_evaluated"),
            model=name_of(reply.get("model")),
        )

    def score_body(self, ask: Ask) -> dict[str, Any]:
        raise NotImplementedError  # it scores no prompts: `force_body`

    def read_scores(self, reply: Any, ask: Ask) -> list[float]:
        raise NotImplementedError

    def force_body(self, ids: npt.NDArray[np.int32], token: int, listed: int = 1) -> dict[str, Any]:
        """Makes the server write `token` after `ids`, and tell the log-prob that it had before it
        was forced, and those of the `listed` likeliest: how single tokens are scored here."""
        return {
            "prompt": ids.tolist(),
            "n_predict": 1,
            "temperature": 0,
            "samplers": ["temperature"],
            "logit_bias": [[token, 10_000.0]],
            "return_tokens": True,
            "cache_prompt": True,
            "n_probs": listed,
        }

    def read_forced(self, reply: Any, token: int) -> float | None:
        """None: the token leaves a character unfinished, and has no entry."""
        if ids_of(reply, "tokens") != [token]:
            raise WrongShape(f"the server wrote {reply['tokens']} where {token} was forced")
        if not reply.get("completion_probabilities"):
            return None
        return float(member(reply, float, "completion_probabilities", 0, "logprob"))

    def read_listed(self, reply: Any, token: int) -> float:
        """NaN: it is not among the likeliest."""
        entries = member(reply, list, "completion_probabilities", 0, "top_logprobs")
        found = (e for e in entries if member(e, int, "id") == token)
        return next((float(member(e, float, "logprob")) for e in found), math.nan)


def _at_temperature(ask: Ask) -> bool:
    return ask.temperature not in (0, 1)


def read_chat_ids(reply: Any) -> tuple[list[int], list[int]]:
    """Ids of the prompt and of the answer, from a chat completion with `return_token_ids`."""
    choice = member(reply, dict, "choices", 0)
    return ids_of(reply, "prompt_token_ids"), ids_of(choice, "token_ids")
