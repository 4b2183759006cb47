"""What vLLM is asked; nothing here runs an engine.

vLLM samples from the distribution that MInTRL trains on only if it is told so: no top-k, top-p, min-p
or penalty, our EOS ids and no others, no stop strings of its own (it looks for them in a text that the
prompt has a part in, where every other engine here looks at the chunk alone).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from mintrl_env.adapters.slot_requests import Ask, Generate
from mintrl_env.errors import MissingExtraError, UsageError

LEAST_TEMPERATURE = 0.01  # vLLM samples at this one where a smaller one is asked for


def vllm_package() -> Any:
    """The package `vllm`, imported when it is needed: that takes seconds, and may take the GPU.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import vllm
    except ImportError as error:
        raise MissingExtraError("vllm", "vllm", "vLLM as the policy's engine") from error
    return vllm


def row_name(ask: Ask) -> str:
    """Names a request's row, the same in every run of the same rollout; "" without a key."""
    return "" if ask.key is None else ask.key.philox_key().tobytes().hex()


def seed_of(row: str, draw: int, attempt: int) -> int:
    """The seed of a chunk, 63 bits: as it is derived for a policy behind a server."""
    text = f"{row} {draw} {attempt}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def prompt_for(ids: npt.NDArray[np.int32], salt: str) -> dict[str, Any]:
    """Ids as vLLM's engine takes them when no renderer shall touch them (`vllm.inputs.TokensInput`).

    Args:
        salt: blocks of the prefix cache are shared between requests of one salt only.
    """
    return {"type": "token", "prompt_token_ids": ids.tolist(), "cache_salt": salt}


def generate_params(vllm: Any, ask: Generate, eos_ids: Collection[int], *, seed: int | None) -> Any:
    """`vllm.SamplingParams` for a chunk."""
    kinds = vllm.sampling_params.RequestOutputKind
    return vllm.SamplingParams(
        max_tokens=ask.max_tokens,
        temperature=ask.sampling.temperature,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        n=1,
        seed=None if ask.sampling.temperature == 0 else seed,
        ignore_eos=True,  # the model's own notion of an end; ours follows
        stop_token_ids=sorted(eos_ids),
        logprobs=0,  # of the sampled token alone
        flat_logprobs=True,
        detokenize=False,
        # With stop strings we look at every token as it comes; without, once.
        output_kind=kinds.CUMULATIVE if ask.stop else kinds.FINAL_ONLY,
    )


def score_params(vllm: Any) -> Any:
    """`vllm.SamplingParams` for the log-probs of a prompt; vLLM has to write one token with it."""
    return vllm.SamplingParams(
        max_tokens=1,
        temperature=0.0,
        n=1,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
    )


def check_temperature(temperature: float) -> None:
    """Raises UsageError for a temperature that vLLM would silently change."""
    if 0 < temperature < LEAST_TEMPERATURE:
        raise UsageError(
            f"vLLM samples at temperature {LEAST_TEMPERATURE} where {temperature} is asked for; "
            "take 0 (greedy), or at least that"
        )
