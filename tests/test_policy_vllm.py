"""vLLM as the policy's engine, against a stand-in whose every log-prob can be computed again.

That the stand-in takes what vLLM takes is `test_vllm_contract.py`'s business.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mintrl_env.adapters.policy_vllm import VLLMEngine
from mintrl_env.adapters.pump import Pumped, Rounds, run_with_pump
from mintrl_env.adapters.vllm_answers import logprobs_of
from mintrl_env.adapters.vllm_engine import load_vllm
from mintrl_env.adapters.vllm_requests import vllm_package
from mintrl_env.episode import Episode, EpisodeConfig
from mintrl_env.errors import MissingExtraError, PolicyError, UsageError
from mintrl_env.keys import RowKey
from mintrl_env.prompts import ByteTokenizer
from mintrl_env.protocols import Policy, Sampling, Scorer
from mintrl_env.rollout import Parts, RolloutConfig, drive
from mintrl_env.testing import FunctionVerifier, ScriptedJudge
from mintrl_env.types import Chunk, Finish, Kind, Provenance, Task, Verdict

_SPEC = importlib.util.spec_from_file_location(
    "fake_vllm", Path(__file__).with_name("fake_vllm.py")
)
assert _SPEC is not None and _SPEC.loader is not None
fake: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["fake_vllm"] = fake
_SPEC.loader.exec_module(fake)

TOKENIZER = ByteTokenizer()
GREEDY = Sampling(temperature=0.0)
EOS, VOCAB = fake.EOS, fake.VOCAB
PROMPT = np.array([*b"a cab bed "], dtype=np.int32)


@pytest.fixture(autouse=True)
def _stand_in() -> Iterator[None]:
    with fake.installed():
        yield


def core(model: Any = None, **options: Any) -> Any:
    return fake.LLMEngine(model or fake.ToyModel(), **options)


def engine_for(llm: Any, **options: Any) -> VLLMEngine:
    settings: dict[str, Any] = {"eos_ids": [EOS], "vocab_size": VOCAB, "decode": TOKENIZER.decode}
    return VLLMEngine(llm, **(settings | options))


def key(rollout: int = 0, draw: int = 0, task: str = "t") -> RowKey:
    return RowKey(seed=3, update=0, task_id=task, rollout=rollout, draw=draw)


def pump(engine: Any, factory: Any, **options: Any) -> Any:
    engines = engine if isinstance(engine, list) else [engine]
    return run_with_pump(engines, factory, **options)


def write(engine: VLLMEngine, ids: np.ndarray = PROMPT, **asked: Any) -> Chunk:
    asked = {"max_tokens": 12, "key": key(), **asked}
    chunk = pump(engine, lambda: engine.generate(ids, **asked))
    assert isinstance(chunk, Chunk)
    return chunk


def rows(count: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    letters = np.frombuffer(b"abcdefgh \n", dtype=np.uint8)
    return [rng.choice(letters, rng.integers(3, 20)).astype(np.int32) for _ in range(count)]


def expected(llm: Any, ids: np.ndarray, chunk: Chunk, temperature: float = 1.0) -> np.ndarray:
    whole = [*ids.tolist(), *chunk.ids.tolist()]
    return np.asarray(llm.model.logprobs(whole, len(ids), temperature))


# -- ids in, ids out --------------------------------------------------------------------------------


def test_it_is_an_engine_as_others_are() -> None:
    engine = engine_for(core())
    pumped: Pumped = engine  # for the type checker
    assert isinstance(pumped, VLLMEngine)
    assert isinstance(engine, Policy) and isinstance(engine, Scorer)
    assert engine.max_length == 96


@pytest.mark.parametrize("late", [False, True])
def test_forty_rows_at_once_are_the_same_as_each_alone(late: bool) -> None:
    prompts = rows(40)
    together = engine_for(core(late=late))

    async def all_of_them() -> list[Chunk]:
        tasks = [
            together.generate(ids, max_tokens=5 + i % 9, key=key(i))
            for i, ids in enumerate(prompts)
        ]
        return list(await asyncio.gather(*tasks))

    chunks = pump(together, all_of_them)
    for i, (ids, chunk) in enumerate(zip(prompts, chunks, strict=True)):
        llm = core()
        alone = write(engine_for(llm), ids, max_tokens=5 + i % 9, key=key(i))
        assert chunk.ids.tolist() == alone.ids.tolist()
        assert len(chunk.ids) == 5 + i % 9 or chunk.ids[-1] == EOS
        np.testing.assert_allclose(chunk.logprobs, expected(llm, ids, chunk), atol=1e-5)
    assert len({chunk.ids.tobytes() for chunk in chunks}) > 30  # each row draws its own


def test_every_default_of_vllm_that_changes_the_distribution_is_overruled() -> None:
    llm = core()
    write(engine_for(llm), sampling=Sampling(0.7), max_tokens=3)
    ((name, prompt, params),) = llm.added
    row = key().philox_key().tobytes().hex()
    assert name == f"{row}-0-0"
    assert prompt == {
        "type": "token", "prompt_token_ids": PROMPT.tolist(), "cache_salt": "v0"
    }  # fmt: skip
    assert (params.top_p, params.top_k, params.min_p, params.n) == (1.0, 0, 0.0, 1)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (
        1,
        0,
        0,
    )
    assert (params.ignore_eos, params.stop_token_ids, params.stop) == (True, [EOS], None)
    assert (params.temperature, params.max_tokens, params.logprobs) == (0.7, 3, 0)
    assert params.output_kind is fake.RequestOutputKind.FINAL_ONLY
    assert not params.detokenize and params.flat_logprobs


def test_seeds_follow_from_row_and_draw() -> None:
    def seed(row: RowKey, **options: Any) -> Any:
        llm = core()
        sampling = options.pop("sampling", Sampling())
        write(engine_for(llm, **options), key=row, max_tokens=1, sampling=sampling)
        return llm.added[0][2].seed

    same, other_row, other_draw = seed(key(1)), seed(key(2)), seed(key(1, draw=1))
    assert seed(key(1)) == same and len({same, other_row, other_draw}) == 3
    assert all(0 <= s < 2**63 for s in (same, other_row, other_draw))
    assert seed(key(1), seeded=False) is None and seed(key(1), sampling=GREEDY) is None


def test_a_row_resumed_from_its_ids_has_the_same_name_and_draws() -> None:
    first = core()
    engine = engine_for(first)
    head = write(engine, max_tokens=6, key=key(5))
    ids = np.concatenate([PROMPT, head.ids]).astype(np.int32)
    tail = write(engine, ids, max_tokens=6, key=key(5, draw=6))

    second = core()  # another process, from what was stored
    again = write(engine_for(second), ids, max_tokens=6, key=key(5, draw=6))
    assert again == tail
    assert second.added[0][0] == first.added[1][0]
    row = key(5).philox_key().tobytes().hex()
    assert [name for name, *_ in first.added] == [f"{row}-0-0", f"{row}-6-0"]


def test_a_chunk_reads_only_what_the_prefix_cache_lacks() -> None:
    llm = core()
    engine = engine_for(llm)
    cached: list[int] = []
    llm.spoil = lambda output: cached.append(output.num_cached_tokens) or output
    head = write(engine, max_tokens=1)
    write(
        engine, np.concatenate([PROMPT, head.ids]).astype(np.int32), key=key(draw=1), max_tokens=1
    )
    assert cached == [0, len(PROMPT) // fake.BLOCK * fake.BLOCK]


# -- where a chunk ends -----------------------------------------------------------------------------


def test_finish_reasons() -> None:
    ends = core(fake.ToyModel(eos_bias=60.0))
    chunk = write(engine_for(ends))
    assert (chunk.ids.tolist(), chunk.finish) == ([EOS], Finish.EOS)
    goes_on = core(fake.ToyModel(eos_bias=-60.0))
    chunk = write(engine_for(goes_on), max_tokens=7)
    assert (len(chunk.ids), chunk.finish) == (7, Finish.LENGTH)
    # without an EOS of ours the model's own ends nothing
    chunk = write(engine_for(core(fake.ToyModel(eos_bias=60.0)), eos_ids=[]), max_tokens=4)
    assert (chunk.ids.tolist(), chunk.finish) == ([EOS] * 4, Finish.LENGTH)


@pytest.mark.parametrize("late", [False, True])
def test_a_stop_string_ends_a_chunk_and_stays_in_it(late: bool) -> None:
    llm = core(fake.ToyModel(eos_bias=-60.0), late=late)
    free = write(engine_for(llm), max_tokens=40)
    text = TOKENIZER.decode(free.ids)
    stop = text[7:9]
    end = text.index(stop) + len(stop)
    stopped = core(fake.ToyModel(eos_bias=-60.0), late=late)
    chunk = write(engine_for(stopped), max_tokens=40, stop=["never", stop])
    assert TOKENIZER.decode(chunk.ids) == text[:end] and chunk.finish is Finish.STOP
    assert chunk.ids.tolist() == free.ids[:end].tolist()
    np.testing.assert_array_equal(chunk.logprobs, free.logprobs[:end])
    assert [call[0] for call in stopped.calls if call[0] == "abort"] == ["abort"]
    assert stopped.added[0][2].stop is None  # vLLM looks for none
    assert not stopped.has_unfinished_requests() or late


def test_a_stop_string_that_the_prompt_has_a_part_in_is_none() -> None:
    llm = core(fake.ToyModel(eos_bias=-60.0))
    free = write(engine_for(llm), max_tokens=10)
    stop = "d " + TOKENIZER.decode(free.ids[:1])  # the prompt ends in "d "
    assert stop not in TOKENIZER.decode(free.ids)
    chunk = write(engine_for(core(fake.ToyModel(eos_bias=-60.0))), max_tokens=10, stop=[stop])
    assert chunk == free


def test_an_eos_that_completes_a_stop_string_is_an_eos() -> None:
    chunk = write(engine_for(core(fake.ToyModel(eos_bias=60.0))), stop=[TOKENIZER.decode([EOS])])
    assert (chunk.ids.tolist(), chunk.finish) == ([EOS], Finish.EOS)


def test_a_chunk_ends_before_an_id_that_is_no_token() -> None:
    llm = core(fake.ToyModel(pad_logit=0.0, eos_bias=-60.0))
    for rollout in range(30):
        chunk = write(engine_for(llm), max_tokens=30, key=key(rollout), stop=["\n\n\n"])
        again = write(engine_for(llm), max_tokens=30, key=key(rollout))
        assert len(chunk.ids) >= 1 and chunk.ids.max() < VOCAB
        assert chunk.finish is Finish.LENGTH or "\n\n\n" in TOKENIZER.decode(chunk.ids)
        assert again.ids.tolist()[: len(chunk.ids)] == chunk.ids.tolist()
        np.testing.assert_allclose(chunk.logprobs, expected(llm, PROMPT, chunk), atol=1e-5)
    short = [c for _, _, c in llm.added if c.seed is not None]
    assert len(short) > 60  # some first tokens were none, and drawn again


def test_a_first_token_that_is_none_is_drawn_again_three_times_at_most() -> None:
    llm = core(fake.ToyModel(pad_logit=60.0))
    with pytest.raises(PolicyError, match="3 times the first token was an id from 257 on"):
        write(engine_for(llm))
    names = [name for name, *_ in llm.added]
    assert [name.rsplit("-", 1)[1] for name in names] == ["0", "1", "2"]
    assert len({params.seed for _, _, params in llm.added}) == 3


# -- what vLLM must not do --------------------------------------------------------------------------


def spoilt(change: Any, **asked: Any) -> Any:
    llm = core(fake.ToyModel(eos_bias=-60.0))
    llm.spoil = change
    return write(engine_for(llm), **asked)


def test_a_prompt_merged_into_the_answer_is_refused() -> None:
    def merged(output: Any) -> Any:
        if output.finished:
            output.outputs[0].token_ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        return output

    with pytest.raises(PolicyError, match=r"22 tokens came where 12 .* the prompt stands in front"):
        spoilt(merged)

    def longer(output: Any) -> Any:
        output.outputs[0].token_ids = [97] * 13
        return output

    with pytest.raises(PolicyError, match=r"13 tokens came where 12 were asked for$"):
        spoilt(longer)


def test_another_prompt_than_the_one_given_is_refused() -> None:
    def with_bos(output: Any) -> Any:
        output.prompt_token_ids = [1, *output.prompt_token_ids]
        return output

    with pytest.raises(PolicyError, match="vLLM read 11 ids where 10 were given"):
        spoilt(with_bos)


@pytest.mark.parametrize("reason", ["abort", "error", "repetition", None])
def test_an_end_that_is_none_fails_the_request(reason: str | None) -> None:
    def ended(output: Any) -> Any:
        output.finished, output.outputs[0].finish_reason = True, reason
        return output

    with pytest.raises(PolicyError, match=f"ended the request with {reason!r}"):
        spoilt(ended)


def test_a_request_that_vllm_forgets_is_not_waited_for() -> None:
    with pytest.raises(PolicyError, match="vLLM has lost the request"):
        spoilt(lambda output: None)


def test_an_answer_of_unknown_shape_fails_its_request_alone() -> None:
    llm = core(fake.ToyModel(eos_bias=-60.0))

    def change(output: Any) -> Any:
        if output.finished and output.prompt_token_ids[0] == 98:
            output.outputs[0].logprobs = object()
        return output

    llm.spoil = change
    engine = engine_for(llm)
    prompts = [np.array([98, 99]), np.array([99, 98])]

    async def both() -> Any:
        tasks = [engine.generate(p, max_tokens=3, key=key(i)) for i, p in enumerate(prompts)]
        return await asyncio.gather(*tasks, return_exceptions=True)

    bad, good = pump(engine, both)
    assert isinstance(bad, PolicyError) and "could not be read: TypeError" in str(bad)
    assert len(good.ids) == 3


# -- log-probs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_logprobs_are_those_of_the_sampling_temperature_or_unknown(
    mode: str, temperature: float
) -> None:
    llm = core(logprobs_mode=mode)
    chunk = write(engine_for(llm), sampling=Sampling(temperature))
    if mode == "raw_logprobs" and temperature == 0.5:
        assert np.isnan(chunk.logprobs).all() and len(chunk.ids) > 1
    else:
        wanted = expected(llm, PROMPT, chunk, temperature)
        np.testing.assert_allclose(chunk.logprobs, wanted, atol=1e-5)


def test_absent_logprobs_are_nan_and_nan_is_an_error() -> None:
    def without(output: Any) -> Any:
        output.outputs[0].logprobs = None
        return output

    chunk = spoilt(without)
    assert len(chunk.ids) == 12 and np.isnan(chunk.logprobs).all()
    broken = core(fake.ToyModel(weight=float("nan")))
    with pytest.raises(PolicyError, match="logits are NaN"):
        write(engine_for(broken))


def test_logprobs_of_flat_and_nested_entries() -> None:
    nested = [{7: fake.Logprob(-0.5), 8: fake.Logprob(-1.0)}, {9: fake.Logprob(1e-7)}]
    flat = fake.FlatLogprobs()
    for entry in nested:
        flat.append(entry)
    for entries in (nested, flat):
        found = logprobs_of(entries, [7, 9])
        assert found is not None and found.tolist() == [-0.5, 0.0]
        with pytest.raises(PolicyError, match=r"belong to other tokens \(at 1, not 7\)"):
            logprobs_of(entries, [7, 7])
        with pytest.raises(PolicyError, match="2 log-probs came for 3 tokens"):
            logprobs_of(entries, [7, 9, 9])
    assert logprobs_of(None, [7]) is None
    empty = fake.FlatLogprobs()
    empty.append(None)
    for entries in ([None], empty):
        with pytest.raises(PolicyError, match="other tokens"):
            logprobs_of(entries, [7])


def test_scores_are_the_models() -> None:
    llm = core()
    engine = engine_for(llm)
    ids = rows(1, seed=4)[0]
    for start in (1, 3, len(ids)):
        found = pump(engine, lambda start=start: engine.logprobs(ids, start, key=key()))
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, llm.model.logprobs(ids.tolist(), start), atol=1e-5)
    assert len(llm.added) == 2  # nothing to ask where nothing is to be scored
    assert llm.added[0][2].prompt_logprobs == 0 and llm.added[0][2].max_tokens == 1


def test_scores_of_one_row_at_once_have_names_of_their_own() -> None:
    llm = core()
    engine = engine_for(llm)
    prompts = rows(3, seed=2)

    async def scores() -> Any:
        asked = [engine.logprobs(ids, 1, key=key(0)) for ids in prompts]
        return await asyncio.gather(*asked, *(engine.logprobs(ids, 1) for ids in prompts))

    found = pump(engine, scores)
    for got, ids in zip(found, [*prompts, *prompts], strict=True):
        np.testing.assert_allclose(got, llm.model.logprobs(ids.tolist(), 1), atol=1e-5)
    row = key(0).philox_key().tobytes().hex()
    assert [name for name, *_ in llm.added] == [
        f"{row}-score", f"{row}-score.1", f"{row}-score.2",
        "no-row-score", "no-row-score.1", "no-row-score.2",
    ]  # fmt: skip


def test_prompt_logprobs_that_are_missing_or_refused() -> None:
    def score(change: Any) -> Any:
        llm = core()
        llm.spoil = change
        engine = engine_for(llm)
        return pump(engine, lambda: engine.logprobs(PROMPT, 1))

    def none(output: Any) -> Any:
        output.prompt_logprobs = None
        return output

    def aborted(output: Any) -> Any:
        output.outputs[0].finish_reason = "abort"
        return output

    with pytest.raises(PolicyError, match="no prompt_logprobs"):
        score(none)
    with pytest.raises(PolicyError, match="ended the request with 'abort'"):
        score(aborted)


# -- failures and cancellation ----------------------------------------------------------------------


def test_a_failed_step_fails_its_own_requests_and_leaves_no_block_behind() -> None:
    llm = core(fake.ToyModel(eos_bias=-60.0))
    llm.fail = [RuntimeError("CUDA error: an illegal memory access")]
    engine = engine_for(llm)
    other_llm = core(fake.ToyModel(eos_bias=-60.0))
    other = engine_for(other_llm)

    async def main() -> Any:
        asked = [engine.generate(PROMPT, max_tokens=5, key=key(i)) for i in range(3)]
        asked.append(other.generate(PROMPT, max_tokens=5, key=key(9)))
        first = await asyncio.gather(*asked, return_exceptions=True)
        return first, await engine.generate(PROMPT, max_tokens=5, key=key(4))

    (*failed, fine), after = pump([engine, other], main)
    for error in failed:
        assert isinstance(error, PolicyError)
        assert "a step of vLLM failed: RuntimeError: CUDA error" in str(error)
    assert len({id(error) for error in failed}) == 3
    assert len(fine.ids) == 5 and len(after.ids) == 5
    np.testing.assert_allclose(after.logprobs, expected(llm, PROMPT, after), atol=1e-5)
    assert ("reset_prefix_cache",) in llm.calls and not llm.has_unfinished_requests()


def test_an_engine_that_goes_on_failing_is_given_up() -> None:
    llm = core()
    llm.fail = [RuntimeError(f"fault {i}") for i in range(9)]
    engine = engine_for(llm)
    said = []
    for rollout in range(3):
        with pytest.raises(PolicyError) as caught:
            write(engine, key=key(rollout))
        said.append(str(caught.value))
    assert said == [f"a step of vLLM failed: RuntimeError: fault {i}" for i in range(3)]
    with pytest.raises(PolicyError, match="make a new engine: RuntimeError: fault 2"):
        write(engine)
    with pytest.raises(PolicyError, match="make a new engine"):
        engine.reset()
    assert llm.steps == 3


def test_a_dead_engine_is_given_up_at_once_and_says_so_to_those_that_come_later() -> None:
    class EngineDeadError(Exception):
        pass

    llm = core(inproc=False)
    llm.fail = [EngineDeadError("EngineCore encountered an issue.")]
    engine = engine_for(llm)

    async def main() -> Any:
        asked = [engine.generate(PROMPT, max_tokens=5, key=key(0))]
        first = await asyncio.gather(*asked, return_exceptions=True)
        second = await asyncio.gather(
            engine.generate(PROMPT, max_tokens=5, key=key(1)), return_exceptions=True
        )
        return [*first, *second]

    first, second = pump(engine, main)
    assert "a step of vLLM failed: EngineDeadError" in str(first)
    assert "make a new engine: EngineDeadError" in str(second)
    assert len(llm.added) == 1


def test_a_refused_request_fails_alone() -> None:
    llm = core(fake.ToyModel(eos_bias=-60.0))
    engine = engine_for(llm)

    async def main() -> Any:
        return await asyncio.gather(
            engine.generate(PROMPT, max_tokens=4, key=key(0), sampling=Sampling(2.5)),
            engine.generate(PROMPT, max_tokens=4, key=key(1)),
            return_exceptions=True,
        )

    bad, good = pump(engine, main)
    assert isinstance(bad, PolicyError)
    assert "did not take the request: ValidationError: temperature must be in [0, 2]" in str(bad)
    assert len(good.ids) == 4


@pytest.mark.parametrize("late", [False, True])
def test_cancellation_takes_the_request_out_of_vllm(late: bool) -> None:
    llm = core(fake.ToyModel(eos_bias=-60.0), late=late, max_model_len=100_000)
    engine = engine_for(llm)

    async def main() -> Any:
        endless = asyncio.create_task(engine.generate(PROMPT, max_tokens=90_000, key=key(0)))
        stays = asyncio.create_task(engine.generate(PROMPT, max_tokens=20, key=key(1)))
        while llm.steps < 3:
            await asyncio.sleep(0.001)
        endless.cancel()
        chunk = await stays
        while not any(call[0] == "abort" for call in llm.calls):  # the name is taken until then
            await asyncio.sleep(0.001)
        again = await engine.generate(PROMPT, max_tokens=5, key=key(0))  # the same row
        return endless, chunk, again

    endless, chunk, again = pump(engine, main)
    assert endless.cancelled() and len(chunk.ids) == 20 and len(again.ids) == 5
    row = key(0).philox_key().tobytes().hex()
    assert [call for call in llm.calls if call[0] == "abort"] == [("abort", f"{row}-0-0")]
    assert llm.added[0][0] == llm.added[2][0]  # stable, and free again
    alone = core(fake.ToyModel(eos_bias=-60.0))
    assert chunk.ids.tolist() == write(engine_for(alone), max_tokens=20, key=key(1)).ids.tolist()
    engine.reset()  # nothing holds a block


def test_requests_that_are_open_when_the_pump_ends_fail_and_leave_vllm() -> None:
    llm = core(fake.ToyModel(eos_bias=-60.0), max_model_len=100_000, late=True)
    engine = engine_for(llm)
    left: list[asyncio.Task[Any]] = []

    async def main() -> None:
        for rollout in range(3):
            row = key(rollout)
            left.append(asyncio.create_task(engine.generate(PROMPT, max_tokens=90_000, key=row)))
        while llm.steps < 2:
            await asyncio.sleep(0.001)

    from mintrl_env.adapters.pump import LoopThread

    with LoopThread() as loop:
        pump(engine, main, loop=loop)

        async def ends() -> Any:
            return await asyncio.gather(*left, return_exceptions=True)

        errors = loop.submit(ends).result(30)
    assert all("the pump of VLLMEngine ended" in str(error) for error in errors)
    assert not llm._requests
    engine.reset()
    assert len(write(engine, max_tokens=5).ids) == 5


def test_an_interrupted_step_leaves_no_block_behind() -> None:
    llm = core(fake.ToyModel(eos_bias=-60.0))
    llm.fail = [KeyboardInterrupt()]
    engine = engine_for(llm)
    with pytest.raises(KeyboardInterrupt):
        write(engine)
    chunk = write(engine, max_tokens=5)
    np.testing.assert_allclose(chunk.logprobs, expected(llm, PROMPT, chunk), atol=1e-5)


def test_it_is_pumped_once_at_a_time() -> None:
    engine = engine_for(core())

    async def main() -> None:
        with pytest.raises(UsageError, match="being pumped already"):
            await asyncio.to_thread(pump, engine, asyncio.sleep)
        with pytest.raises(UsageError, match="weights change between two pumps"):
            engine.load_weights([])

    pump(engine, main)


# -- weights ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
def test_new_weights_between_updates_drop_the_prefix_cache(late: bool) -> None:
    llm = core(late=late)
    engine = engine_for(llm)
    before = write(engine, max_tokens=6, sampling=GREEDY)
    assert before.policy_version == 0
    llm.calls.clear()
    engine.load_weights([("weight", torch.tensor(0.4))], version=1)
    assert llm.calls[0] == ("reload_weights", "tensors")
    assert ("reset_prefix_cache",) in llm.calls and not llm._cache
    after = write(engine, max_tokens=6, sampling=GREEDY)
    assert after.policy_version == 1 and llm.added[-1][1]["cache_salt"] == "v1"
    np.testing.assert_allclose(after.logprobs, expected(llm, PROMPT, after), atol=1e-5)
    assert not np.allclose(expected(llm, PROMPT, before), before.logprobs, atol=1e-3)


def test_the_stand_in_would_show_blocks_of_old_weights() -> None:
    """What the test above relies on: without a reset and a salt, the log-probs are wrong."""
    llm = core()
    engine = engine_for(llm)
    write(engine, max_tokens=6)
    llm.model.weight = 0.4
    stale = write(engine, max_tokens=6, key=key(1))
    assert not np.allclose(stale.logprobs, expected(llm, PROMPT, stale), atol=1e-3)
    engine.policy_version = 1
    fresh = write(engine, max_tokens=6, key=key(1))
    np.testing.assert_allclose(fresh.logprobs, expected(llm, PROMPT, fresh), atol=1e-5)


def test_another_version_alone_drops_the_cache_and_the_same_one_does_not() -> None:
    llm = core()
    engine = engine_for(llm)
    engine.policy_version = 0
    assert llm.calls == []
    engine.policy_version = 4
    assert llm.calls == [("reset_prefix_cache",)] and engine.policy_version == 4


def test_a_folder_may_be_loaded_by_any_engine_tensors_only_here(tmp_path: Path) -> None:
    far = core(inproc=False)
    engine = engine_for(far)
    engine.load_weights(tmp_path, version=2)
    assert far.calls[0] == ("reload_weights", str(tmp_path))
    with pytest.raises(UsageError, match="VLLM_ENABLE_V1_MULTIPROCESSING=0"):
        engine.load_weights([("weight", 1.0)])
    with pytest.raises(UsageError, match="without tensor parallelism"):
        engine_for(core(world_size=2)).load_weights([("weight", 1.0)])
    write(engine)  # refusals leave it as it was


def test_weights_that_failed_to_load_are_not_sampled_from() -> None:
    llm = core()
    engine = engine_for(llm)

    def breaks() -> Iterator[tuple[str, float]]:
        yield "weight", 0.2
        raise ValueError("no such parameter")

    with pytest.raises(PolicyError, match="could not load the weights: ValueError: no such"):
        engine.load_weights(breaks(), version=1)
    assert engine.policy_version == 0
    with pytest.raises(UsageError, match=r"no weights \(loading them failed\)"):
        write(engine)
    engine.load_weights([("weight", 0.2)], version=1)
    assert write(engine).policy_version == 1


def test_a_cache_that_vllm_keeps_is_an_error() -> None:
    llm = core()
    llm.add_request("somebody else's", {"type": "token", "prompt_token_ids": [97]},
                    fake.SamplingParams(max_tokens=None, temperature=0.0))  # fmt: skip
    with pytest.raises(PolicyError, match="requests of somebody else"):
        engine_for(llm).reset()


# -- sleep ------------------------------------------------------------------------------------------


def test_it_sleeps_between_pumps_and_never_between_chunks() -> None:
    llm = core(enable_sleep_mode=True)
    engine = engine_for(llm, sleep=1)

    async def two_chunks() -> None:
        await engine.generate(PROMPT, max_tokens=3, key=key())
        await engine.generate(PROMPT, max_tokens=3, key=key(draw=3))

    def naps() -> list[Any]:
        found = [call for call in llm.calls if call[0] in ("sleep", "wake_up", "reload_weights")]
        llm.calls.clear()
        return found

    pump(engine, two_chunks)
    assert naps() == [("sleep", 1)] and llm.is_sleeping()
    pump(engine, two_chunks)  # the same weights again, as for an evaluation
    assert naps() == [("wake_up", "weights", "kv_cache"), ("sleep", 1)]
    engine.load_weights([("weight", 0.3)], version=1)
    # the KV stays away until somebody writes
    assert naps() == [("wake_up", "weights"), ("reload_weights", "tensors")] and llm.is_sleeping()
    chunk = write(engine)
    assert naps() == [("wake_up", "kv_cache"), ("sleep", 1)]
    np.testing.assert_allclose(chunk.logprobs, expected(llm, PROMPT, chunk), atol=1e-5)


def test_at_level_two_the_weights_are_gone_until_they_are_loaded() -> None:
    llm = core(enable_sleep_mode=True)
    engine = engine_for(llm, sleep=2)
    write(engine)
    with pytest.raises(UsageError, match=r"no weights \(sleep level 2 drops them\)"):
        write(engine)
    engine.load_weights([("weight", 0.3)], version=1)
    chunk = write(engine)
    np.testing.assert_allclose(chunk.logprobs, expected(core(fake.ToyModel(weight=0.3)), PROMPT, chunk),
                               atol=1e-5)  # fmt: skip


def test_a_sleeper_that_does_not_wake() -> None:
    llm = core(enable_sleep_mode=True)
    engine = engine_for(llm, sleep=1)
    write(engine)

    def no_memory(tags: Sequence[str]) -> None:
        raise RuntimeError("CUDA out of memory")

    llm.wake_up = no_memory
    with pytest.raises(PolicyError, match=r"did not wake up .*: RuntimeError: CUDA out of memory"):
        write(engine)


# -- rounds, episodes -------------------------------------------------------------------------------


def test_rounds_begin_together_in_the_order_of_the_rows() -> None:
    rounds = Rounds()
    llm = core(fake.ToyModel(eos_bias=-60.0))
    engine = engine_for(llm, rounds=rounds)
    rounds.live = 3

    async def row(rollout: int) -> None:
        for draw in (0, 2):
            await asyncio.sleep(0.01 * (3 - rollout))
            await engine.generate(PROMPT, max_tokens=2, key=key(rollout, draw=draw))
        rounds.live -= 1

    async def main() -> None:
        await asyncio.gather(*map(row, range(3)))

    pump(engine, main)
    names = [key(i).philox_key().tobytes().hex() for i in range(3)]
    assert [name for name, *_ in llm.added] == [f"{n}-{d}-0" for d in (0, 2) for n in names]
    with pytest.raises(UsageError, match="needs a key"):
        asyncio.run(engine.logprobs(PROMPT, 1))


def test_an_episode_with_a_correction_through_the_pump() -> None:
    llm = core(fake.ToyModel(eos_bias=-3.0))
    engine = engine_for(llm)

    def verdict(request: Any) -> Verdict:
        return Verdict.revise(0, "fed.") if request.review == 0 else Verdict.keep()

    config = EpisodeConfig(chunk_tokens=12, max_response=48, max_reviews=2, max_correction=8)
    episode = Episode(
        Task("t", "a cab bed "),
        PROMPT,
        kind=Kind.INTERVENED,
        tokenizer=TOKENIZER,
        config=config,
        key=key(2),
    )
    parts = Parts(
        engine,
        ScriptedJudge(verdict),
        verifier=FunctionVerifier(lambda task, text: float("fed." in text)),
    )
    pump(engine, lambda: drive(episode, parts, RolloutConfig(episode=config)))
    ids, provenance = episode.ids, episode.provenance
    assert bytes(ids[:4].tolist()) == b"fed."
    assert (provenance[:4] == Provenance.INTERVENTION).all()
    wrote = np.flatnonzero(provenance == Provenance.POLICY)
    assert wrote.tolist() == list(range(4, len(ids))) and len(wrote) > 4
    whole = [*PROMPT.tolist(), *ids.tolist()]
    wanted = llm.model.logprobs(whole, len(PROMPT))[wrote]
    np.testing.assert_allclose(episode.logprobs[wrote], wanted, atol=1e-5)
    # ids in, ids out: each prompt is the start of the row as it is in the end, or the dropped chunk's
    prompts = [prompt["prompt_token_ids"] for _, prompt, _ in llm.added]
    assert prompts[0] == PROMPT.tolist()
    assert all(prompt == whole[: len(prompt)] for prompt in prompts)
    row = key(2).philox_key().tobytes().hex()
    assert [name for name, *_ in llm.added][:2] == [f"{row}-0-0", f"{row}-12-0"]


# -- usage ------------------------------------------------------------------------------------------


def test_what_a_caller_may_not_ask() -> None:
    engine = engine_for(core())

    def ask(ids: Any = PROMPT, **asked: Any) -> None:
        asyncio.run(engine.generate(ids, **{"max_tokens": 4, "key": key(), **asked}))

    for match, asked in {
        "ids is empty": {"ids": []},
        "one row of integers": {"ids": [97.5]},
        "ids must be 0 to 256, not 97 to 257": {"ids": [97, 257]},
        "max_tokens must be >= 1": {"max_tokens": 0},
        "10 tokens and max_tokens 87 exceed vLLM's max_model_len 96": {"max_tokens": 87},
        "an empty stop string": {"stop": ["x", ""]},
        "draws count from 0": {"key": key(draw=-1)},
        "vLLM samples at temperature 0.01 where 0.005": {"sampling": Sampling(0.005)},
    }.items():
        with pytest.raises(UsageError, match=match):
            ask(**asked)
    with pytest.raises(UsageError, match="need the engine's `decode`"):
        engine = engine_for(core(), decode=None)
        ask(stop=["x"])
    for start in (0, 11):
        with pytest.raises(UsageError, match="start must be 1 to 10"):
            asyncio.run(engine.logprobs(PROMPT, start))
    with pytest.raises(UsageError, match="96 tokens and one that vLLM has to write exceed"):
        asyncio.run(engine.logprobs(np.full(96, 97), 1))


def test_engines_that_cannot_be_used_are_refused_with_the_option_to_change() -> None:
    for match, config, options in [
        ("vocab_size must be 1 to the model's 264, not 300", {}, {"vocab_size": 300}),
        ("eos_ids .300. must be ids below", {}, {"eos_ids": [300]}),
        ('logprobs_mode="processed_logprobs"', {"logprobs_mode": "raw_logits"}, {}),
        ("enable_sleep_mode=True", {}, {"sleep": 1}),
        ("sleep is 0, 1 or 2, not 3", {"enable_sleep_mode": True}, {"sleep": 3}),
        ("data_parallel_size > 1", {"data_parallel_size": 2}, {}),
        (
            "external_launcher over several ranks",
            {"world_size": 2, "distributed_executor_backend": "external_launcher"},
            {},
        ),
    ]:
        with pytest.raises(UsageError, match=match):
            engine_for(core(**config), **options)


def test_a_prefix_cache_that_is_off_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_for(core(enable_prefix_caching=False))
    assert "prefix cache is off" in caplog.text
    assert len(write(engine).ids) >= 1


def test_load_vllm_asks_for_what_a_policy_needs_and_keeps_random_states(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    torch.manual_seed(5)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    llm = load_vllm(tmp_path, max_length=64, rows=8, sleep=True, enforce_eager=True)
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    args = vllm_package().LLMEngine.made.pop()
    assert (args.model, args.max_model_len, args.max_num_seqs) == (str(tmp_path), 64, 8)
    assert args.logprobs_mode == "processed_logprobs" and args.enable_prefix_caching
    assert args.generation_config == "vllm" and args.skip_tokenizer_init and args.enforce_eager
    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING")
    engine = engine_for(type("LLM", (), {"llm_engine": llm})(), sleep=1)  # a vllm.LLM will do
    assert len(write(engine).ids) >= 1


def test_without_vllm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtraError, match=r'pip install "mintrl-env\[vllm\]"'):
        vllm_package()
