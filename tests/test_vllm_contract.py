"""What we use of vLLM, name by name, held against its source: 0.31, and whatever else is given.

    MINTRL_VLLM_SOURCE     a folder `vllm` of any release; else the installed one is read

The source is read, and vLLM is not imported (but for one file that stands alone), so that a release can be
checked on a machine that could not run it.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from pathlib import Path

import pytest

from mintrl_env.adapters.vllm_answers import logprobs_of
from mintrl_env.errors import PolicyError

METHODS = {
    ("v1/engine/llm_engine.py", "LLMEngine"): {
        "add_request": ["request_id", "prompt", "params"],
        "abort_request": ["request_ids"],
        "step": [],
        "has_unfinished_requests": [],
        "reset_prefix_cache": [],
        "sleep": ["level"],
        "wake_up": ["tags"],
        "collective_rpc": ["method", "timeout", "args", "kwargs"],
        "from_engine_args": ["engine_args"],
    },
    ("v1/worker/gpu_model_runner.py", "GPUModelRunner"): {
        "reload_weights": ["weights_iterator", "weights_path"],
    },
    ("v1/worker/gpu_worker.py", "Worker"): {"reload_weights": []},
    ("config/model.py", "ModelConfig"): {"get_vocab_size": []},
}
FIELDS = {
    ("sampling_params.py", "SamplingParams"): [
        "n", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p",
        "top_k", "min_p", "seed", "stop_token_ids", "ignore_eos", "max_tokens", "logprobs",
        "prompt_logprobs", "flat_logprobs", "detokenize", "output_kind",
    ],
    ("sampling_params.py", "RequestOutputKind"): ["CUMULATIVE", "FINAL_ONLY"],
    ("outputs.py", "CompletionOutput"): ["token_ids", "logprobs", "finish_reason", "stop_reason"],
    ("logprobs.py", "FlatLogprobs"): ["start_indices", "end_indices", "token_ids", "logprobs"],
    ("logprobs.py", "Logprob"): ["logprob"],
    ("inputs/engine.py", "TokensInput"): ["type", "prompt_token_ids"],
    ("inputs/engine.py", "_InputOptions"): ["cache_salt"],
    ("engine/arg_utils.py", "EngineArgs"): [
        "model", "max_model_len", "max_num_seqs", "gpu_memory_utilization", "dtype",
        "enable_sleep_mode", "seed", "logprobs_mode", "enable_prefix_caching",
        "generation_config", "skip_tokenizer_init", "disable_log_stats",
    ],
    ("config/model.py", "ModelConfig"): ["max_model_len", "logprobs_mode", "enable_sleep_mode"],
    ("config/parallel.py", "ParallelConfig"): [
        "data_parallel_size", "distributed_executor_backend", "world_size",
    ],
    ("config/cache.py", "CacheConfig"): ["enable_prefix_caching"],
}  # fmt: skip
PHRASES = {
    # what is done with ids that come as they are, with temperatures near 0, and with ends
    "v1/engine/input_processor.py": ['isinstance(prompt, dict) and "type" in prompt', "cache_salt"],
    "sampling_params.py": ["_MAX_TEMP = 1e-2", "self.temperature > 2.0"],
    "v1/engine/__init__.py": ['("stop", "length", "abort", "error", "repetition")'],
    "v1/engine/llm_engine.py": ["if not multiprocess_mode:", "self.model_executor ="],
    "v1/engine/exceptions.py": ["class EngineDeadError"],
    "config/model.py": ['"raw_logprobs"', '"processed_logprobs"'],
    "envs.py": ["VLLM_ENABLE_V1_MULTIPROCESSING"],
}


def vllm_source() -> Path:
    """vLLM's folder: MINTRL_VLLM_SOURCE, or where it is installed. It is read, never imported."""
    given = os.environ.get("MINTRL_VLLM_SOURCE")
    if given:
        return Path(given)
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed, and MINTRL_VLLM_SOURCE names no copy of its source")
    return Path(spec.origin).parent


def classes(path: Path) -> dict[str, ast.ClassDef]:
    tree = ast.parse(path.read_text("utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


@pytest.mark.parametrize(("file", "name"), METHODS)
def test_vllm_has_the_methods(file: str, name: str) -> None:
    body = classes(vllm_source() / file)[name].body
    found = {n.name: n.args for n in body if isinstance(n, ast.FunctionDef)}
    for method, wanted in METHODS[file, name].items():
        names = [a.arg for a in (*found[method].args, *found[method].kwonlyargs)][1:]
        assert names[: len(wanted)] == wanted, method
        needed = len(found[method].args) - 1 - len(found[method].defaults)
        assert needed <= len(wanted), method


@pytest.mark.parametrize(("file", "name"), FIELDS)
def test_vllm_has_the_fields(file: str, name: str) -> None:
    found = set()
    for node in classes(vllm_source() / file)[name].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Assign):
            found.update(t.id for t in node.targets if isinstance(t, ast.Name))
    assert set(FIELDS[file, name]) <= found, set(FIELDS[file, name]) - found


@pytest.mark.parametrize("file", PHRASES)
def test_vllm_still_does_what_was_read(file: str) -> None:
    text = (vllm_source() / file).read_text("utf-8")
    for phrase in PHRASES[file]:
        assert phrase in text, phrase


def test_request_outputs_have_what_is_read() -> None:
    source = classes(vllm_source() / "outputs.py")["RequestOutput"]
    init = next(n for n in source.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    names = {a.arg for a in init.args.args}
    wanted = {"request_id", "prompt_token_ids", "prompt_logprobs", "outputs", "finished"}
    assert wanted <= names


def test_real_logprobs_are_read() -> None:
    path = vllm_source() / "logprobs.py"
    spec = importlib.util.spec_from_file_location("vllm_logprobs_alone", path)
    assert spec is not None and spec.loader is not None
    real = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = real  # dataclasses look there
    try:
        spec.loader.exec_module(real)
        for flat in (True, False):
            prompt, sampled = real.create_prompt_logprobs(flat), real.create_sample_logprobs(flat)
            for token, value in ((7, -0.5), (9, -1.5)):
                for entries in (prompt, sampled):
                    real.append_logprobs_for_next_position(entries, [token], [value], [None], 3, 0)
            for entries, first in ((prompt, 1), (sampled, 0)):
                found = logprobs_of(entries, [7, 9], first)
                assert found is not None and found.tolist() == [-0.5, -1.5]
            with pytest.raises(PolicyError, match="other tokens"):
                logprobs_of(prompt, [7, 9], 0)  # nothing stands before the first id
    finally:
        del sys.modules[spec.name]


def test_the_stand_in_takes_what_vllm_takes() -> None:
    """The stand-in's arguments are a part of vLLM's own, in its order."""
    path = vllm_source() / "v1/engine/llm_engine.py"
    body = classes(path)["LLMEngine"].body
    real = {n.name: [a.arg for a in n.args.args] for n in body if isinstance(n, ast.FunctionDef)}
    mine = classes(Path(__file__).with_name("fake_vllm.py"))["LLMEngine"].body
    for node in mine:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            names = [a.arg for a in node.args.args]
            assert real[node.name][: len(names)] == names, node.name


ROUTES = {
    "post": [
        "/pause", "/resume", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
        "/finish_weight_update", "/sleep", "/wake_up",
    ],
    "get": ["/is_paused", "/is_sleeping", "/get_world_size"],
}  # fmt: skip
LATER_ROUTES = {"get": ["/weight_info"], "post": []}  # since 0.31


def test_vllm_serve_has_the_routes() -> None:
    folder = vllm_source() / "entrypoints"
    names = ("rlhf/api_router.py", "online/api_router.py", "sleep/api_router.py")
    files = [path for path in folder.rglob("api_router.py") if path.as_posix().endswith(names)]
    text = "\n".join(path.read_text("utf-8") for path in files)
    routes = ROUTES
    if "weight_version" in text:
        routes = {method: [*ROUTES[method], *LATER_ROUTES[method]] for method in ROUTES}
        assert "weight_version: Annotated[str | None, Body(embed=True)] = None" in text
    for method, paths in routes.items():
        for path in paths:
            assert f'@router.{method}("{path}")' in text, path
    for argument in ("update_info", "init_info", "clear_cache", '"mode"', '"tags"', '"level"'):
        assert argument in text or argument.strip('"') + ":" in text, argument


def test_weight_versions_are_spans_where_they_are_told() -> None:
    found = classes(vllm_source() / "outputs.py").get("WeightVersionSpan")
    if found is None:
        pytest.skip("this release does not say by which weights a token was sampled (before 0.32)")
    fields = [n.target.id for n in found.body if isinstance(n, ast.AnnAssign)]  # type: ignore[union-attr]
    assert "version" in fields
