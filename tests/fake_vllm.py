"""The part of vLLM that a policy's engine uses, in memory: names, arguments and habits of 0.24 to 0.32.

    with installed():                              # `import vllm` gives the stand-in
        engine = VLLMEngine(LLMEngine(ToyModel()), ...)

Its model keeps a state that the prefix cache holds in blocks, as KV is held, so that blocks of old
weights, or blocks whose forward failed, show in the log-probs. What was read in vLLM's source:

- `add_request` files a request under the caller's id and a random ending; answers carry the former.
- Blocks are filed in the prefix cache when they are scheduled, before they are computed.
- `FINAL_ONLY` answers once; `CUMULATIVE` answers each step, with the very list that grows.
- A request that is aborted gives no answer, and holds its blocks until the step under way has ended.
- Ids are sampled from all rows of the embedding; `raw_logprobs` are those of temperature 1.
- A temperature between 0 and 0.01 becomes 0.01; one above 2 is refused.
- `sleep` drops the prefix cache and pauses; `wake_up` goes on once all parts are back.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import random
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

import numpy as np

EOS = 256
VOCAB = 257
PADDED = 264  # rows of the embedding: 257 to 263 are no tokens
BLOCK = 4


class ToyModel:
    """logits(next) = table[last] + state, where state sums one weight for every token so far."""

    def __init__(
        self,
        seed: int = 0,
        *,
        pad_logit: float = -60.0,
        eos_bias: float = -2.0,
        weight: float = 0.05,
    ) -> None:
        rng = np.random.default_rng(seed)
        letters = [*b"abcdefgh \n", EOS]
        self.table = np.full((PADDED, PADDED), -60.0)
        self.table[:, letters] = rng.normal(size=(PADDED, len(letters)))
        self.table[:, EOS] += eos_bias
        self.table[:, VOCAB:] = pad_logit
        self.slope = np.zeros(PADDED)
        self.slope[letters] = np.linspace(-1, 1, len(letters))
        self.weight = weight

    def logits(self, last: int, state: float) -> np.ndarray:
        return np.asarray(self.table[last] + self.slope * state)

    def state(self, ids: Sequence[int]) -> float:
        return float(sum(self.weight * (i % 5 - 1) for i in ids))

    def logprobs(self, ids: Sequence[int], start: int, temperature: float = 1.0) -> np.ndarray:
        """Of ids[start:], by one reading of the whole row: what the engine's must equal."""
        found = []
        for at in range(start, len(ids)):
            found.append(log_softmax(self.logits(ids[at - 1], self.state(ids[:at])), temperature))
        return np.array([row[ids[start + n]] for n, row in enumerate(found)], dtype=np.float32)


def log_softmax(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    scaled = logits / (temperature or 1.0)
    scaled = scaled - scaled.max()
    return np.asarray(scaled - np.log(np.exp(scaled).sum()))


# -- vllm.sampling_params, vllm.logprobs, vllm.outputs ----------------------------------------------


class ValidationError(ValueError):
    """vLLM's own is called VLLMValidationError."""


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class SamplingParams:
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        if 0 < self.temperature < 1e-2:
            self.temperature = 1e-2
        if not 0 <= self.temperature <= 2:
            raise ValidationError(f"temperature must be in [0, 2], got {self.temperature}.")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValidationError(f"max_tokens must be at least 1, got {self.max_tokens}.")
        if self.stop and not self.detokenize:
            raise ValidationError("stop strings are only supported when detokenize is True.")


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class FlatLogprobs:
    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def append(self, entry: dict[int, Logprob] | None) -> None:
        self.start_indices.append(len(self.logprobs))
        for token, one in (entry or {}).items():
            self.token_ids.append(token)
            self.logprobs.append(one.logprob)
        self.end_indices.append(len(self.logprobs))

    def __len__(self) -> int:
        return len(self.start_indices)


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    logprobs: Any
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: Any
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None = None


# -- vllm.LLMEngine -------------------------------------------------------------------------------


@dataclass
class _ModelConfig:
    max_model_len: int = 96
    logprobs_mode: str = "processed_logprobs"
    enable_sleep_mode: bool = False

    def get_vocab_size(self) -> int:
        return PADDED


@dataclass
class _Request:
    internal: str
    external: str
    prompt: list[int]
    salt: str
    params: SamplingParams
    rng: np.random.Generator
    out: list[int] = field(default_factory=list)
    logprobs: Any = None
    prompt_logprobs: Any = None
    state: float | None = None  # of all tokens but the last
    blocks: list[Any] = field(default_factory=list)
    cached: int = 0


@dataclass
class _Block:
    """A block of the prefix cache: the step that filed it, and the state at its end once known."""

    filed: int
    state: float | None = None


class LLMEngine:
    """See the module. `calls` lists what was called, `steps` counts forwards, and:

    fail: errors that the next steps raise, half-way through.
    spoil: given each answer before it goes out, may change it.
    late: answers come one step after their forward, as with asynchronous scheduling.
    hold: how many more times blocks refuse to go.
    """

    def __init__(
        self, model: ToyModel, *, late: bool = False, inproc: bool = True, **config: Any
    ) -> None:
        options = {n: config.pop(n) for n in ("enable_prefix_caching",) if n in config}
        self.parallel = types.SimpleNamespace(
            data_parallel_size=1, distributed_executor_backend="uni", world_size=1
        )
        for name in vars(self.parallel).keys() & config.keys():
            setattr(self.parallel, name, config.pop(name))
        self.model_config = _ModelConfig(**config)
        self.vllm_config = types.SimpleNamespace(
            parallel_config=self.parallel,
            cache_config=types.SimpleNamespace(
                enable_prefix_caching=options.get("enable_prefix_caching", True)
            ),
        )
        if inproc:
            self.model_executor = object()
        self.model = model
        self.late = late
        self.fail: list[Exception] = []
        self.spoil: Callable[[RequestOutput], RequestOutput | None] = lambda output: output
        self.calls: list[tuple[Any, ...]] = []
        self.added: list[tuple[str, dict[str, Any], SamplingParams]] = []
        self.steps = 0
        self.hold = 0
        self.asleep: set[str] = set()
        self.level = 0
        self._requests: dict[str, _Request] = {}
        self._cache: dict[tuple[Any, ...], _Block] = {}
        self._pending: list[RequestOutput] = []

    # what a policy calls, with vLLM's own arguments

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Any = None,
        priority: int = 0,
    ) -> str:
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, got {type(request_id)}")
        assert prompt["type"] == "token"  # anything else is tokenised, or warned of
        ids = list(prompt["prompt_token_ids"])
        if not ids or len(ids) >= self.model_config.max_model_len:
            raise ValidationError(f"The decoder prompt (length {len(ids)}) is too long.")
        if any(not 0 <= i < PADDED for i in params.stop_token_ids or ()):
            raise ValidationError("stop_token_ids contain out-of-vocab token ids")
        internal = f"{request_id}-{random.getrandbits(32):08x}"
        new = _Request(
            internal, request_id, ids, prompt.get("cache_salt") or "", params,
            np.random.default_rng(params.seed),
        )  # fmt: skip
        if params.logprobs is not None:
            new.logprobs = FlatLogprobs() if params.flat_logprobs else []
        self._requests[internal] = new
        self.added.append((request_id, prompt, params))
        return internal

    def abort_request(self, request_ids: list[str], internal: bool = False) -> None:
        self.calls.append(("abort", *request_ids))
        gone = [r for r in self._requests.values() if r.external in request_ids]
        for request in gone:
            del self._requests[request.internal]
        if gone and self.late:
            self.hold = max(self.hold, 1)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests or self._pending)

    def step(self) -> list[RequestOutput]:
        self.hold = max(self.hold - 1, 0)
        due, self._pending = self._pending, []
        if self.asleep:
            return due
        self.steps += 1
        running = list(self._requests.values())
        for request in running:
            self._schedule(request)
        if self.fail:
            raise self.fail.pop(0)
        made = [output for request in running if (output := self._forward(request))]
        if self.late:
            self._pending = made
            return due
        return made

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        self.calls.append(("reset_prefix_cache",))
        if self._requests or self.hold:
            if not hasattr(self, "model_executor"):
                self.hold = max(self.hold - 1, 0)  # its own process steps on
            return False
        self._cache.clear()
        return True

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.calls.append(("sleep", level))
        self.reset_prefix_cache()
        self.asleep, self.level = {"weights", "kv_cache"}, level
        if level == 2:
            self.model.weight = float("nan")

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append(("wake_up", *(tags or ())))
        self.asleep -= set(tags or self.asleep)

    def is_sleeping(self) -> bool:
        return bool(self.asleep)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        assert method == "reload_weights"
        assert "weights" not in self.asleep
        given = dict(kwargs or {})
        self.calls.append(("reload_weights", given.get("weights_path", "tensors")))
        if "weights_iterator" in given:
            for name, tensor in given["weights_iterator"]:
                assert name == "weight"
                self.model.weight = float(tensor)
        return [None]

    # inside

    def _blocks(self, request: _Request, ids: Sequence[int]) -> Iterator[tuple[Any, ...]]:
        for end in range(BLOCK, len(ids) + 1, BLOCK):
            yield (request.salt, *ids[:end])

    def _schedule(self, request: _Request) -> None:
        """Find the prompt's start in the prefix cache; file what is missing, empty as yet."""
        if request.state is not None:
            return
        if not self.vllm_config.cache_config.enable_prefix_caching:
            return
        reads = request.params.prompt_logprobs is None
        for end, key in enumerate(self._blocks(request, request.prompt[:-1]), 1):
            block = self._cache.setdefault(key, _Block(self.steps))
            if block.filed < self.steps and reads:
                assert block.state is not None, "read a block that was never computed"
                request.cached, request.state = end * BLOCK, block.state

    def _forward(self, request: _Request) -> RequestOutput | None:
        params, model = request.params, self.model
        if not request.out:
            known = request.prompt[request.cached : -1]
            request.state = (request.state or 0.0) + model.state(known)
            if params.prompt_logprobs is not None:
                request.prompt_logprobs = self._prompt_logprobs(request)
        last = request.out[-1] if request.out else request.prompt[-1]
        assert request.state is not None
        request.state += model.state([last])
        self._file(request)
        logits = model.logits(last, request.state)
        at_temperature = log_softmax(logits, params.temperature)
        if params.temperature == 0 or np.isnan(logits).any():
            token = int(logits.argmax())
        else:
            token = int(request.rng.choice(PADDED, p=np.exp(at_temperature)))
        request.out.append(token)
        if request.logprobs is not None:
            raw = self.model_config.logprobs_mode == "raw_logprobs"
            value = float((log_softmax(logits) if raw else at_temperature)[token])
            request.logprobs.append({token: Logprob(value, 1)})
        return self._answer(request, token)

    def _file(self, request: _Request) -> None:
        """The blocks that are complete now, computed."""
        if not self.vllm_config.cache_config.enable_prefix_caching:
            return
        before = 0.0
        for key in self._blocks(request, [*request.prompt, *request.out]):
            block = self._cache.setdefault(key, _Block(self.steps))
            if block.state is None:
                block.state = before + self.model.state(key[-BLOCK:])
            before = block.state

    def _prompt_logprobs(self, request: _Request) -> Any:
        found: Any = FlatLogprobs() if request.params.flat_logprobs else []
        found.append(None)
        for token, value in zip(
            request.prompt[1:], self.model.logprobs(request.prompt, 1), strict=True
        ):
            found.append({token: Logprob(float(value), 1)})
        return found

    def _answer(self, request: _Request, token: int) -> RequestOutput | None:
        params = request.params
        reason: str | None = None
        if token in (params.stop_token_ids or ()):
            reason = "stop"
        elif len(request.out) == params.max_tokens:
            reason = "length"
        output = RequestOutput(
            request.external,
            None,
            request.prompt,
            request.prompt_logprobs,
            [
                CompletionOutput(
                    0, "", request.out, None, request.logprobs, reason,
                    token if reason == "stop" else None,
                )
            ],
            reason is not None,
            request.cached,
        )  # fmt: skip
        spoilt = self.spoil(output)
        finished = spoilt is None or spoilt.finished
        if finished:
            self._requests.pop(request.internal, None)
        if spoilt is None or (not finished and params.output_kind is RequestOutputKind.FINAL_ONLY):
            return None
        return spoilt


@dataclass
class EngineArgs:
    model: str = ""
    max_model_len: int = 0
    max_num_seqs: int | None = None
    gpu_memory_utilization: float = 0.9
    dtype: str = "auto"
    enable_sleep_mode: bool = False
    seed: int = 0
    logprobs_mode: str = "raw_logprobs"
    enable_prefix_caching: bool | None = None
    generation_config: str = "auto"
    skip_tokenizer_init: bool = False
    disable_log_stats: bool = False
    enforce_eager: bool = False


class _FromArgs(LLMEngine):
    """What `vllm.LLMEngine` is here: made from arguments, with a model of its own."""

    made: ClassVar[list[EngineArgs]] = []

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLMEngine:
        cls.made.append(engine_args)
        random.seed(engine_args.seed)
        np.random.seed(engine_args.seed)
        return LLMEngine(
            ToyModel(),
            max_model_len=engine_args.max_model_len,
            logprobs_mode=engine_args.logprobs_mode,
            enable_sleep_mode=engine_args.enable_sleep_mode,
            enable_prefix_caching=bool(engine_args.enable_prefix_caching),
        )


def package() -> Any:
    """A module called `vllm`."""
    vllm: Any = types.ModuleType("vllm")
    vllm.__spec__ = importlib.machinery.ModuleSpec("vllm", None)
    vllm.sampling_params = types.ModuleType("vllm.sampling_params")
    vllm.sampling_params.RequestOutputKind = RequestOutputKind
    vllm.SamplingParams = vllm.sampling_params.SamplingParams = SamplingParams
    vllm.LLMEngine, vllm.EngineArgs = _FromArgs, EngineArgs
    vllm.RequestOutput = RequestOutput
    return vllm


@contextlib.contextmanager
def installed() -> Iterator[Any]:
    """`import vllm` gives the stand-in, whether or not the real one is there."""
    names = [n for n in sys.modules if n == "vllm" or n.startswith("vllm.")]
    before = {name: sys.modules.pop(name) for name in names}
    vllm = package()
    sys.modules["vllm"], sys.modules["vllm.sampling_params"] = vllm, vllm.sampling_params
    try:
        yield vllm
    finally:
        del sys.modules["vllm"], sys.modules["vllm.sampling_params"]
        sys.modules.update(before)
