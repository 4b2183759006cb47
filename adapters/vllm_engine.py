"""Making a `vllm.LLMEngine` for a policy, and checking one that somebody else has made."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mintrl_env.adapters.vllm_answers import LogprobsMode
from mintrl_env.adapters.vllm_requests import vllm_package
from mintrl_env.errors import UsageError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What of vLLM's configuration a policy has to know."""

    max_length: int
    logprobs_mode: LogprobsMode


def load_vllm(
    folder: str | os.PathLike[str],
    *,
    max_length: int,
    rows: int = 256,
    memory: float = 0.4,
    dtype: str = "auto",
    sleep: bool = False,
    seed: int = 0,
    **options: Any,
) -> Any:
    """A `vllm.LLMEngine` in this process, beside a trainer.

    Sets VLLM_ENABLE_V1_MULTIPROCESSING=0: in a process of its own, vLLM could take no tensors from
    this one. The random states that vLLM seeds when it starts are put back.

    Args:
        folder: the model, as `save_pretrained` writes it.
        max_length: the most tokens in a row, prompt and response together.
        rows: the most rows at work at once; others wait within vLLM.
        memory: share of the GPU's memory that vLLM takes for weights and KV.
        dtype: of the weights; "auto" takes the checkpoint's.
        sleep: whether it can be put to sleep (`VLLMEngine(sleep=...)`).
        options: more fields of `vllm.EngineArgs`.

    Raises:
        MissingExtraError: vLLM is not installed.
        Whatever vLLM raises.
    """
    vllm = vllm_package()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    settings: dict[str, Any] = {
        "model": os.fspath(folder),
        "max_model_len": max_length,
        "max_num_seqs": rows,
        "gpu_memory_utilization": memory,
        "dtype": dtype,
        "enable_sleep_mode": sleep,
        "seed": seed,
        "logprobs_mode": "processed_logprobs",  # those of the sampling temperature
        "enable_prefix_caching": True,  # else each chunk reads its row anew
        "generation_config": "vllm",  # not the checkpoint's top-p, penalties and ends
        "skip_tokenizer_init": True,  # ids in, ids out
        "disable_log_stats": True,
    }
    args = vllm.EngineArgs(**(settings | options))
    with _kept_random_states():
        return vllm.LLMEngine.from_engine_args(args)


def checked_engine(llm: Any, *, vocab_size: int, sleep: int) -> tuple[Any, EngineFacts]:
    """The `LLMEngine` of an engine or a `vllm.LLM`, and what is to be known of it.

    Raises:
        UsageError: a policy cannot use it; says which option to change.
    """
    llm = getattr(llm, "llm_engine", llm)
    model, parallel = llm.model_config, llm.vllm_config.parallel_config
    rows = model.get_vocab_size()
    if not 0 < vocab_size <= rows:
        raise UsageError(
            f"vocab_size must be 1 to the model's {rows}, not {vocab_size}: a tokenizer with more "
            "tokens than the model has embeddings is another model's"
        )
    if model.logprobs_mode not in ("raw_logprobs", "processed_logprobs"):
        raise UsageError(
            f"vLLM's logprobs_mode {model.logprobs_mode!r} gives no log-probs; make the engine with "
            'logprobs_mode="processed_logprobs"'
        )
    if sleep not in (0, 1, 2):
        raise UsageError(f"sleep is 0, 1 or 2, not {sleep!r}")
    if sleep and not model.enable_sleep_mode:
        raise UsageError("sleep needs an engine that was made with enable_sleep_mode=True")
    if parallel.data_parallel_size > 1:
        raise UsageError(
            "data_parallel_size > 1: its engines step together, and ours steps when it has rows; "
            "make one engine for each rank"
        )
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise UsageError(
            "external_launcher over several ranks wants the same requests on each, and every rank "
            "has rows of its own; give each rank an engine, or use `vllm serve`"
        )
    if not llm.vllm_config.cache_config.enable_prefix_caching:
        _log.warning(
            "vLLM's prefix cache is off (enable_prefix_caching), so that every chunk reads its whole "
            "row again"
        )
    return llm, EngineFacts(model.max_model_len, model.logprobs_mode)


def runs_in_process(llm: Any) -> bool:
    """Does the engine's core run in this thread, and its model in this process?"""
    here = hasattr(llm, "model_executor")  # vLLM sets it for a core in this process alone
    return here and llm.vllm_config.parallel_config.world_size == 1


@contextmanager
def _kept_random_states() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
