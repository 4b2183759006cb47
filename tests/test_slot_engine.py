"""The embedded engine against the stock model: `generate`, a full forward, and the keyed draws."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen3Config

from mintrl_env.adapters.keyed_sampling import draw
from mintrl_env.adapters.policy_transformers import SlotEngine
from mintrl_env.adapters.pump import LoopThread, Returns, Rounds, run_pump, run_with_pump
from mintrl_env.errors import PolicyError, UsageError
from mintrl_env.keys import RowKey, inverse_cdf, uniforms
from mintrl_env.protocols import Policy, Sampling, Scorer
from mintrl_env.types import Chunk, Finish

VOCAB = 48
EOS = 1
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(
    kind: str = "qwen3",
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    vocab: int = VOCAB,
) -> Any:
    shape = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,  # peaked distributions, so that greedy tokens differ by row
    }
    torch.manual_seed(7)
    if kind == "qwen3":
        config: Any = Qwen3Config(head_dim=12, **shape)
    else:  # as SmolLM2: tied embeddings, head_dim from the hidden size
        config = LlamaConfig(tie_word_embeddings=True, **shape)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return model.to(dtype).eval()


def engine_for(model: Any, *, endless: bool = False, **options: Any) -> SlotEngine:
    settings: dict[str, Any] = {"vocab_size": VOCAB, "slots": 6, "max_length": 96}
    settings["eos_ids"] = () if endless else [EOS]  # endless: for tests that count tokens
    return SlotEngine(model, **(settings | options))


def prompts(count: int, seed: int = 0, low: int = 3, high: int = 24) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCAB, rng.integers(low, high)).astype(np.int32) for _ in range(count)]


def key(rollout: int, draw: int = 0, task: str = "t") -> RowKey:
    return RowKey(seed=3, update=0, task_id=task, rollout=rollout, draw=draw)


def full_logprobs(
    model: Any, ids: np.ndarray, start: int, temperature: float = 1.0, vocab: int = VOCAB
) -> np.ndarray:
    """Log-probs of ids[start:] from one forward without a cache, float64."""
    batch = torch.tensor(np.asarray(ids), dtype=torch.long)[None]
    with torch.no_grad():
        logits = model(batch).logits[0, start - 1 : -1, :vocab].double() / temperature
    picked = logits.log_softmax(-1).gather(-1, batch[0, start:, None])
    return picked[:, 0].numpy()


def reference_greedy(model: Any, ids: np.ndarray, count: int) -> list[int]:
    batch = torch.tensor(ids, dtype=torch.long)[None]
    out = model.generate(
        batch,
        attention_mask=torch.ones_like(batch),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    return [int(i) for i in out[0, len(ids) :]]


def reference_sample(
    model: Any,
    ids: np.ndarray,
    count: int,
    row: RowKey,
    *,
    temperature: float = 1.0,
    endless: bool = False,
) -> list[int]:
    """Keyed sampling by full forwards, one row alone: what the contract says, spelt out."""
    ids, written = list(ids), []
    for u in uniforms(row, count):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1, :VOCAB].double() / temperature
        token = inverse_cdf(logits.softmax(-1).numpy(), float(u))
        ids.append(token)
        written.append(token)
        if token == EOS and not endless:
            break
    return written


async def generate_all(
    engine: SlotEngine, rows: list[np.ndarray], count: int, **options: Any
) -> Any:
    return await asyncio.gather(
        *(
            engine.generate(ids, max_tokens=count, key=key(i), **options)
            for i, ids in enumerate(rows)
        )
    )


# -- equal to the stock model ----------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_greedy_equals_generate_for_ragged_prompts_with_more_rows_than_slots(
    kind: str, attention: str
) -> None:
    model = tiny(kind, attention=attention)
    engine = engine_for(model, slots=4)
    rows = [*prompts(9), np.array([5], dtype=np.int32)]
    chunks = run_with_pump([engine], lambda: generate_all(engine, rows, 20, sampling=GREEDY))
    for ids, chunk in zip(rows, chunks, strict=True):
        assert list(chunk.ids) == reference_greedy(model, ids, 20)
        whole = np.concatenate([ids, chunk.ids])
        assert np.abs(chunk.logprobs - full_logprobs(model, whole, len(ids))).max() < 1e-5
        assert chunk.finish == (Finish.EOS if chunk.ids[-1] == EOS else Finish.LENGTH)
    assert len({tuple(c.ids) for c in chunks}) > 5  # the rows do differ


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_float64_logprobs_equal_a_full_forward_to_1e_10(kind: str) -> None:
    model = tiny(kind, torch.float64)
    engine = engine_for(model)
    rows = prompts(5)

    async def main() -> None:
        for i, ids in enumerate(rows):
            written, logprobs, _, _ = await engine._generate(
                ids, 15, (), Sampling(temperature=0.7), key(i)
            )
            whole = np.concatenate([ids, written])
            expected = full_logprobs(model, whole, len(ids), 0.7)
            assert np.abs(logprobs - expected).max() < 1e-10
            for start in (1, len(ids), len(whole) - 1):
                for row in (None, key(i)):
                    scores = await engine._logprobs(whole, start, row)
                    assert scores.shape == (len(whole) - start,)
                    assert np.abs(scores - full_logprobs(model, whole, start)).max() < 1e-10

    run_with_pump([engine], main)


def test_logprobs_of_many_ragged_rows_in_small_pieces() -> None:
    model = tiny()
    engine = engine_for(model, slots=5, prefill_tokens=7)  # forces pieces and groups
    rows = prompts(11, low=4, high=40)

    async def main() -> list[np.ndarray]:
        return await asyncio.gather(
            *(engine.logprobs(ids, 1 + i % (len(ids) - 1)) for i, ids in enumerate(rows))
        )

    for i, (ids, scores) in enumerate(zip(rows, run_with_pump([engine], main), strict=True)):
        start = 1 + i % (len(ids) - 1)
        assert scores.dtype == np.float32
        assert np.abs(scores - full_logprobs(model, ids, start)).max() < 1e-5


def test_scoring_splits_the_logits_where_the_vocabulary_is_large() -> None:
    """8 places * 16384 numbers, a vocabulary of 32768: four places a forward."""
    model = tiny(dtype=torch.float64, vocab=32768)
    engine = engine_for(model, prefill_tokens=8, vocab_size=32768)
    ids = prompts(1, low=30, high=31)[0]
    seen = feeds(engine)
    scores = run_with_pump([engine], lambda: engine._logprobs(ids, 1, None))
    assert seen == [(1, 4)] * 7 + [(1, 1)]
    assert np.abs(scores - full_logprobs(model, ids, 1, vocab=32768)).max() < 1e-10


def test_start_at_the_end_scores_nothing() -> None:
    engine = engine_for(tiny())
    ids = prompts(1)[0]
    assert run_with_pump([engine], lambda: engine.logprobs(ids, len(ids))).shape == (0,)


def test_bf16_runs_and_agrees_with_its_own_forward() -> None:
    model = tiny(dtype=torch.bfloat16)
    engine = engine_for(model)
    rows = prompts(4)
    for ids, chunk in zip(
        rows, run_with_pump([engine], lambda: generate_all(engine, rows, 8)), strict=True
    ):
        whole = np.concatenate([ids, chunk.ids])
        assert np.abs(chunk.logprobs - full_logprobs(model, whole, len(ids))).mean() < 0.15


def test_autocast_runs_fp32_weights_in_bf16_and_leaves_training_alone() -> None:
    model = tiny().train()
    engine = engine_for(model, autocast=torch.bfloat16)
    rows = prompts(3)
    with torch.autocast("cpu", torch.bfloat16):
        chunks = run_with_pump([engine], lambda: generate_all(engine, rows, 6))
        batch = torch.tensor(np.concatenate([rows[0], chunks[0].ids]), dtype=torch.long)[None]
        model(batch).logits.float().logsumexp(-1).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert engine._cache._dtype == torch.bfloat16


# -- cut-back, admission, eviction -----------------------------------------------------------------


def feeds(engine: SlotEngine) -> list[tuple[int, int]]:
    """Records (rows, width) of every forward from here on."""
    seen: list[tuple[int, int]] = []
    forward = engine._reader.forward

    def spy(lo: int, hi: int, ids: Any, *rest: Any) -> torch.Tensor:
        seen.append((hi - lo, ids.shape[1]))
        return forward(lo, hi, ids, *rest)

    engine._reader.forward = spy  # type: ignore[method-assign]
    return seen


def test_cut_back_feeds_only_what_follows_the_common_prefix() -> None:
    model = tiny(dtype=torch.float64)
    engine = engine_for(model, endless=True)
    ids = prompts(1, low=10, high=11)[0]

    async def main() -> None:
        first = await engine.generate(ids, max_tokens=12, key=key(0))
        seen = feeds(engine)
        # A judge keeps 5 of the 12 tokens and writes 3 others.
        wrong = (int(first.ids[5]) + 1) % (VOCAB - 2) + 2
        revised = np.concatenate([ids, first.ids[:5], [wrong, 7, 9]]).astype(np.int32)
        second = await engine._generate(revised, 6, (), Sampling(), key(0, draw=12))
        assert seen[0] == (1, 2)  # wrong, 7; the 9 is the first step's own input
        assert seen[1:] == [(1, 1)] * 6
        assert list(second[0]) == reference_sample(model, revised, 6, key(0, draw=12), endless=True)
        whole = np.concatenate([revised, second[0]])
        assert np.abs(second[1] - full_logprobs(model, whole, len(revised))).max() < 1e-10
        # A Keep: nothing is read again but the last token.
        del seen[:]
        third = await engine._generate(whole, 3, (), Sampling(), key(0, draw=18))
        assert seen == [(1, 1)] * 3
        assert list(third[0]) == reference_sample(model, whole, 3, key(0, draw=18), endless=True)
        # A shorter request than the row's KV, and another prompt under the same key.
        for again in (ids[:4], prompts(1, seed=9)[0]):
            fourth = await engine._generate(again, 5, (), Sampling(), key(0))
            assert list(fourth[0]) == reference_sample(model, again, 5, key(0), endless=True)

    run_with_pump([engine], main)


def test_rows_join_and_leave_in_mid_flight() -> None:
    model = tiny(dtype=torch.float64)
    engine = engine_for(model, slots=5)
    rows = prompts(14)
    lengths = [3 + 5 * (i % 7) for i in range(14)]

    async def row(i: int) -> Chunk:
        await asyncio.sleep(0.002 * i)  # staggered: some come when others are at work
        return await engine.generate(rows[i], max_tokens=lengths[i], key=key(i))

    async def main() -> list[Chunk]:
        return await asyncio.gather(*(row(i) for i in range(14)))

    seen = feeds(engine)
    for i, chunk in enumerate(run_with_pump([engine], main, forwards=2)):
        assert list(chunk.ids) == reference_sample(model, rows[i], lengths[i], key(i))
    # Compaction: the forwards covered hardly more row-steps than there were tokens.
    written = sum(rows_ for rows_, width in seen if width == 1)
    assert written <= sum(lengths) + 14


def test_evicted_rows_are_read_again_and_idle_ones_are_dropped_oldest_first() -> None:
    model = tiny(dtype=torch.float64)
    engine = engine_for(model, slots=3, endless=True)
    rows = prompts(4, low=8, high=9)

    async def main() -> None:
        text = {}
        for i in range(4):  # the fourth takes row 0's slot
            chunk = await engine.generate(rows[i], max_tokens=4, key=key(i))
            text[i] = np.concatenate([rows[i], chunk.ids])
        seen = feeds(engine)
        for i, cached in ((2, True), (3, True), (1, True), (0, False), (2, False)):
            del seen[:]
            chunk = await engine.generate(text[i], max_tokens=2, key=key(i, draw=4))
            assert list(chunk.ids) == reference_sample(
                model, text[i], 2, key(i, draw=4), endless=True
            )
            assert (seen[0] == (1, 1)) is cached, i

    run_with_pump([engine], main)


def test_rows_that_come_back_at_once_keep_their_kv_though_others_wait() -> None:
    """8 rows in 2 slots, 3 chunks each without a pause between: every prompt is read once."""
    engine = engine_for(tiny(), endless=True, slots=2)
    # Every return is waited for. By default a wait in vain (rows that ended) is followed by one that
    # is left out, and then the machine's speed decides who keeps its KV.
    engine._returns = Returns(longest=0)
    rows = prompts(8, low=9, high=10)
    seen = feeds(engine)
    ended: list[int] = []

    async def row(i: int) -> None:
        ids = rows[i]
        for chunk in range(3):
            written = await engine.generate(ids, max_tokens=4, key=key(i, draw=4 * chunk))
            ids = np.concatenate([ids, written.ids])
        ended.append(i)

    async def main() -> None:
        await asyncio.gather(*(row(i) for i in range(8)))

    run_with_pump([engine], main)
    assert sum(count for count, width in seen if width > 1) == 8
    assert [sorted(ended[i : i + 2]) for i in range(0, 8, 2)] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_group_reads_its_prompt_once() -> None:
    model = tiny(dtype=torch.float64)
    engine = engine_for(model, slots=8)
    a, b = prompts(2, low=15, high=20)
    rows = [a, b, a, a, b, a]
    seen = feeds(engine)
    chunks = run_with_pump([engine], lambda: generate_all(engine, rows, 9))
    assert sum(count for count, width in seen if width > 1) == 2
    for i, chunk in enumerate(chunks):
        assert list(chunk.ids) == reference_sample(model, rows[i], 9, key(i))


def test_many_chunks_with_cuts_in_few_slots_equal_the_row_alone() -> None:
    """Rows of a driver that keeps, cuts and splices at random, against one row by full forwards."""
    model = tiny(dtype=torch.float64)
    rows = prompts(9, seed=4, low=3, high=14)

    async def episode(i: int, write: Any) -> list[int]:
        rng = np.random.default_rng(i)
        ids, draws = [int(t) for t in rows[i]], 0
        for _ in range(5):
            chunk = [int(t) for t in await write(np.array(ids), int(rng.integers(1, 8)), i, draws)]
            draws += len(chunk)
            if rng.random() < 0.5:  # revise: cut somewhere, write up to three tokens
                chunk = chunk[: int(rng.integers(0, len(chunk) + 1))]
                chunk += [int(t) for t in rng.integers(2, VOCAB, rng.integers(0, 4))]
            ids += chunk
        return ids

    def everything(write: Any) -> Any:
        async def main() -> list[list[int]]:
            return await asyncio.gather(*(episode(i, write) for i in range(len(rows))))

        return main

    async def alone(ids: np.ndarray, count: int, i: int, draws: int) -> list[int]:
        return reference_sample(model, ids, count, key(i, draws))

    expected = asyncio.run(everything(alone)())
    for slots in (2, 5, 9):
        engine = engine_for(model, slots=slots)

        async def write(
            ids: np.ndarray, count: int, i: int, draws: int, engine: SlotEngine = engine
        ) -> Any:
            chunk = await engine.generate(ids, max_tokens=count, key=key(i, draws))
            return chunk.ids

        assert run_with_pump([engine], everything(write), forwards=3) == expected, slots


# -- sampling --------------------------------------------------------------------------------------


def test_draws_do_not_depend_on_the_batch_nor_on_how_a_row_is_split() -> None:
    model = tiny(dtype=torch.float64)
    rows = prompts(6)
    together = engine_for(model, endless=True)
    chunks = run_with_pump([together], lambda: generate_all(together, rows, 70))
    engine = engine_for(model, slots=1, endless=True)

    async def in_pieces(i: int) -> list[int]:
        ids, written = rows[i], []
        for count in (1, 2, 60, 7):  # over the edge of a block of 64 draws
            chunk = await engine.generate(
                np.concatenate([ids, written]).astype(np.int32),
                max_tokens=count,
                key=key(i, len(written)),
            )
            written += [int(t) for t in chunk.ids]
            if chunk.finish is Finish.EOS:
                break
        return written

    for i in range(3):
        assert run_with_pump([engine], lambda i=i: in_pieces(i)) == list(chunks[i].ids)


def test_draw_is_inverse_cdf_row_by_row() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(200, 31)) * 3
    logits[:, 4] = -np.inf
    logits[:50, -3:] = -np.inf
    temperature = rng.choice([0.0, 0.5, 1.0, 1.7], size=200)
    u = rng.random(200)
    u[:60] = 1 - 2**-53  # the largest that a draw can be
    u[60:70] = 0.0
    ids, logp = draw(torch.tensor(logits), torch.tensor(temperature), torch.tensor(u), greedy=True)
    for b in range(200):
        scaled = logits[b] / (temperature[b] or 1.0)
        probs = np.exp(scaled - scaled.max())
        expected = int(logits[b].argmax()) if temperature[b] == 0 else inverse_cdf(probs, u[b])
        assert int(ids[b]) == expected
        assert np.isclose(float(logp[b]), np.log(probs[expected] / probs.sum()), atol=1e-12)


def test_padded_vocabulary_is_never_sampled_and_has_no_share() -> None:
    model = tiny(dtype=torch.float64, vocab=VOCAB + 16)
    with torch.no_grad():
        model.lm_head.weight[VOCAB:] = 5 * model.lm_head.weight[2:18]
    engine = engine_for(model, endless=True)
    rows = prompts(6)
    for sampling in (Sampling(), GREEDY):
        for ids, chunk in zip(
            rows,
            run_with_pump([engine], lambda s=sampling: generate_all(engine, rows, 30, sampling=s)),
            strict=True,
        ):
            assert chunk.ids.max() < VOCAB
            whole = np.concatenate([ids, chunk.ids])
            expected = full_logprobs(model, whole, len(ids))  # over the real vocabulary alone
            assert np.abs(chunk.logprobs - expected).max() < 1e-5
    with torch.no_grad():  # the padded rows would have been taken
        logits = model(torch.tensor([list(rows[0])])).logits[0]
    assert (logits.argmax(-1) >= VOCAB).any()


def test_stop_strings_end_a_chunk_with_the_token_that_completes_them() -> None:
    model = tiny()

    def decode(ids: Any) -> str:
        return "".join(chr(97 + int(i) % 26) for i in ids)

    engine = engine_for(model, decode=decode, endless=True)
    ids = prompts(1)[0]

    async def main() -> tuple[Chunk, Chunk, Chunk]:
        free = await engine.generate(ids, max_tokens=40, key=key(0))
        text = decode(free.ids)
        stop = text[10:13]
        stopped = await engine.generate(ids, max_tokens=40, stop=[stop, "\n"], key=key(0))
        end = text.index(stop) + 3
        assert list(stopped.ids) == list(free.ids[:end])
        resumed = await engine.generate(
            np.concatenate([ids, stopped.ids]), max_tokens=40 - end, key=key(0, end)
        )
        return free, stopped, resumed

    free, stopped, resumed = run_with_pump([engine], main)
    assert stopped.finish is Finish.STOP
    assert list(stopped.ids) + list(resumed.ids) == list(free.ids)
    with pytest.raises(UsageError, match="decode"):
        plain = engine_for(model)
        run_with_pump([plain], lambda: plain.generate(ids, max_tokens=2, stop=["x"], key=key(0)))


# -- weights ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["version", "in place", "reset"])
def test_an_update_of_the_weights_voids_the_kv(how: str) -> None:
    model = tiny(dtype=torch.float64)
    engine = engine_for(model, policy_version=4, endless=True)
    ids = prompts(1)[0]
    first = run_with_pump([engine], lambda: engine.generate(ids, max_tokens=8, key=key(0)))
    assert first.policy_version == 4
    if how == "in place":  # as an optimiser writes
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        model(torch.tensor([list(ids)])).logits.logsumexp(-1).sum().backward()
        optimizer.step()
    else:
        for parameter in model.parameters():
            parameter.data.mul_(1.5)
        if how == "version":
            engine.policy_version = 5
        else:
            engine.reset()
    whole = np.concatenate([ids, first.ids])
    second = run_with_pump([engine], lambda: engine.generate(whole, max_tokens=8, key=key(0, 8)))
    assert list(second.ids) == reference_sample(model, whole, 8, key(0, 8), endless=True)
    expected = full_logprobs(model, np.concatenate([whole, second.ids]), len(whole))
    assert np.abs(second.logprobs - expected).max() < 1e-5
    assert second.policy_version == (5 if how == "version" else 4)


def test_modes_are_restored_and_dropout_is_off_while_pumping() -> None:
    model = tiny()
    model.train()
    model.model.layers[1].eval()
    before = [module.training for module in model.modules()]
    engine = engine_for(model)
    inside = []

    async def main() -> None:
        await engine.generate(np.array([3, 4]), max_tokens=2, key=key(0))
        inside.append(any(module.training for module in model.modules()))

    run_with_pump([engine], main)
    assert inside == [False]
    assert [module.training for module in model.modules()] == before
    model(torch.tensor([[3, 4]])).logits.sum().backward()  # parameters still take gradients


# -- the pump --------------------------------------------------------------------------------------


def test_two_engines_in_one_pump() -> None:
    policy, judge = tiny("qwen3", torch.float64), tiny("llama", torch.float64)
    a, b = engine_for(policy, slots=3), engine_for(judge, slots=2, policy_version=9)
    rows = prompts(5)

    async def row(i: int) -> tuple[Chunk, np.ndarray, Chunk]:
        chunk = await a.generate(rows[i], max_tokens=6, key=key(i))
        whole = np.concatenate([rows[i], chunk.ids])
        scores = await b.logprobs(whole, len(rows[i]), key=key(i))
        return chunk, scores, await b.generate(whole, max_tokens=5, key=key(i))

    async def main() -> Any:
        return await asyncio.gather(*(row(i) for i in range(5)))

    for i, (chunk, scores, reply) in enumerate(run_with_pump([a, b], main)):
        whole = np.concatenate([rows[i], chunk.ids])
        assert list(chunk.ids) == reference_sample(policy, rows[i], 6, key(i))
        assert np.abs(scores - full_logprobs(judge, whole, len(rows[i]))).max() < 1e-5
        assert list(reply.ids) == reference_sample(judge, whole, 5, key(i))
        assert reply.policy_version == 9


def test_requests_of_one_row_run_one_after_another() -> None:
    model = tiny(dtype=torch.float64)
    engine = engine_for(model, slots=4)
    ids = prompts(1, low=12, high=13)[0]

    async def main() -> Any:
        return await asyncio.gather(
            *(
                engine._logprobs(np.append(ids[: 6 + i], [5 + i, 9]), 6 + i, key(0))
                for i in range(5)
            ),
            engine.generate(ids, max_tokens=4, key=key(0)),
            engine.generate(ids, max_tokens=4, key=key(1)),
        )

    *scores, own, other = run_with_pump([engine], main)
    for i, score in enumerate(scores):
        whole = np.append(ids[: 6 + i], [5 + i, 9])
        assert np.abs(score - full_logprobs(model, whole, 6 + i)).max() < 1e-10
    assert list(own.ids) == reference_sample(model, ids, 4, key(0))
    assert list(other.ids) == reference_sample(model, ids, 4, key(1))


def test_a_cancelled_request_frees_its_slot() -> None:
    model = tiny(dtype=torch.float64)
    engine = engine_for(model, slots=2, endless=True)
    rows = prompts(3, high=6)

    async def main() -> Chunk:
        long = [
            asyncio.create_task(engine.generate(rows[i], max_tokens=90, key=key(i)))
            for i in range(2)
        ]
        waiting = asyncio.create_task(engine.generate(rows[2], max_tokens=5, key=key(7)))
        while engine._table.active < 2:
            await asyncio.sleep(0.001)
        waiting.cancel()  # one that waits in the queue
        for task in long:
            task.cancel()
        await asyncio.gather(*long, waiting, return_exceptions=True)
        assert all(task.cancelled() for task in (*long, waiting))
        return await engine.generate(rows[2], max_tokens=5, key=key(2))

    chunk = run_with_pump([engine], main)
    assert list(chunk.ids) == reference_sample(model, rows[2], 5, key(2), endless=True)
    assert engine._table.active == 0


@pytest.mark.parametrize("where", ["reading", "writing", "scoring"])
def test_an_error_in_a_forward_reaches_its_requests_and_the_pump_goes_on(where: str) -> None:
    model = tiny(dtype=torch.float64)
    engine = engine_for(model, slots=4)
    rows = prompts(3, low=8, high=12)
    forward, calls = engine._reader.forward, [0]

    def breaks(lo: int, hi: int, ids: Any, position: Any, column: Any, keep: Any) -> torch.Tensor:
        kind = "scoring" if keep == 0 else "reading" if ids.shape[1] > 1 else "writing"
        if kind == where and not calls[0]:
            calls[0] = 1
            raise RuntimeError("out of luck")
        return forward(lo, hi, ids, position, column, keep)

    engine._reader.forward = breaks  # type: ignore[method-assign]

    async def ask(i: int) -> Any:
        if where == "scoring":
            return await engine.logprobs(rows[i], 2, key=key(i))
        return await engine.generate(rows[i], max_tokens=6, key=key(i))

    async def main() -> Any:
        failed = await asyncio.gather(*(ask(i) for i in range(3)), return_exceptions=True)
        return failed, await asyncio.gather(*(ask(i) for i in range(3)))

    failed, again = run_with_pump([engine], main)
    errors = [e for e in failed if isinstance(e, PolicyError)]
    assert errors and all("RuntimeError: out of luck" in str(e) for e in errors)
    assert all(isinstance(e.__cause__, RuntimeError) for e in errors)
    for i, answer in enumerate(again):
        if where == "scoring":
            assert np.abs(answer - full_logprobs(model, rows[i], 2)).max() < 1e-5
        else:
            assert list(answer.ids) == reference_sample(model, rows[i], 6, key(i))


def test_nan_fails_its_own_row_only_and_leaves_nothing_behind() -> None:
    model = tiny(dtype=torch.float64)
    with torch.no_grad():
        model.model.embed_tokens.weight[2] = torch.nan  # whoever reads token 2 is lost
    engine = engine_for(model, slots=2, endless=True)
    good = np.array([5, 6, 7], dtype=np.int32)
    bad = np.array([5, 6, 7, 8, 9, 2, 7, 9], dtype=np.int32)
    long = np.arange(5, 15, dtype=np.int32)

    async def main() -> Any:
        out = await asyncio.gather(
            engine.generate(good, max_tokens=4, key=key(0)),
            engine.generate(bad, max_tokens=4, key=key(1)),
            engine.logprobs(bad, 1, key=key(1)),
            engine.logprobs(bad, 1, key=key(2)),
            return_exceptions=True,
        )
        # Both slots have held NaN, in columns that a short row beside a long one would see masked.
        again = [
            await asyncio.gather(
                engine._logprobs(rows[0], 1, key(3)), engine._logprobs(rows[1], 1, key(4))
            )
            for rows in ((good, long), (long, good))
        ]
        return out, again

    (chunk, *lost), again = run_with_pump([engine], main)
    for error in lost:
        assert isinstance(error, PolicyError) and "NaN" in str(error)
    first = reference_sample(model, good, 4, key(0), endless=True)
    assert list(chunk.ids) == first and 2 not in first
    for scores, ids in zip(again[0] + again[1], (good, long, long, good), strict=True):
        assert np.abs(scores - full_logprobs(model, ids, 1)).max() < 1e-10


def test_an_exception_of_the_coroutine_comes_out_and_open_requests_fail() -> None:
    engine = engine_for(tiny(), endless=True)

    async def main(loop_tasks: list[Any]) -> None:
        loop_tasks.append(
            asyncio.create_task(engine.generate(np.array([3]), max_tokens=90, key=key(0)))
        )
        while not engine._table.active:
            await asyncio.sleep(0.001)
        raise ValueError("the runner broke")

    tasks: list[Any] = []
    with LoopThread() as loop:
        with pytest.raises(ValueError, match="the runner broke"):
            run_with_pump([engine], lambda: main(tasks), loop=loop)

        async def outcome() -> Any:
            return (await asyncio.gather(*tasks, return_exceptions=True))[0]

        failure = loop.submit(outcome).result(10)
        assert isinstance(failure, PolicyError) and "pump" in str(failure)
        # The same thread and engine serve the next run.
        again = run_with_pump(
            [engine], lambda: engine.generate(np.array([3]), max_tokens=4, key=key(0)), loop=loop
        )
    assert len(again.ids) == 4


def test_ctrl_c_in_the_pump_cancels_the_run_and_leaves_the_engine_usable() -> None:
    model = tiny(dtype=torch.float64)
    engine = engine_for(model, endless=True)
    forward, calls = engine._reader.forward, [0]

    def interrupted(*args: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == 5:
            raise KeyboardInterrupt
        return forward(*args)

    engine._reader.forward = interrupted  # type: ignore[method-assign]
    ended = []

    async def main() -> None:
        try:
            await engine.generate(np.array([3, 4]), max_tokens=50, key=key(0))
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    started = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        run_with_pump([engine], main)
    assert time.perf_counter() - started < 5
    assert ended == [True]
    ids = np.array([3, 4], dtype=np.int32)
    chunk = run_with_pump([engine], lambda: engine.generate(ids, max_tokens=6, key=key(0)))
    assert list(chunk.ids) == reference_sample(model, ids, 6, key(0), endless=True)


def test_generate_from_two_loops_at_once_and_one_pump_only() -> None:
    model = tiny(dtype=torch.float64)
    engine = engine_for(model)
    rows = prompts(2)
    until: concurrent.futures.Future[None] = concurrent.futures.Future()
    results: dict[int, Chunk] = {}

    def ask(i: int) -> None:
        results[i] = asyncio.run(engine.generate(rows[i], max_tokens=10, key=key(i)))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(2)]

    def close() -> None:
        for thread in threads:
            thread.join()
        with pytest.raises(UsageError, match="already"):
            run_pump([engine], concurrent.futures.Future())
        until.set_result(None)

    for thread in (*threads, threading.Thread(target=close)):
        thread.start()
    run_pump([engine], until)
    for i in range(2):
        assert list(results[i].ids) == reference_sample(model, rows[i], 10, key(i))


def test_the_models_attention_is_put_back_after_every_turn() -> None:
    model = tiny()
    engine = engine_for(model)
    inside: set[str] = set()
    forward = engine._reader.forward

    def spy(*args: Any) -> torch.Tensor:
        inside.add(model.config._attn_implementation)
        if args[2].shape[1] > 1:
            raise RuntimeError("broken")
        return forward(*args)

    engine._reader.forward = spy  # type: ignore[method-assign]

    async def main() -> None:
        with pytest.raises(PolicyError):
            await engine.generate(np.array([3, 4, 5]), max_tokens=3, key=key(0))
        assert model.config._attn_implementation == "sdpa"

    run_with_pump([engine], main)
    assert inside == {"mintrl_slots"}
    assert model.config._attn_implementation == "sdpa"


def test_an_idle_pump_sleeps() -> None:
    engine = engine_for(tiny())
    turns = []
    turn = engine.turn

    def counted(forwards: int) -> bool:
        turns.append(forwards)
        return turn(forwards)

    engine.turn = counted  # type: ignore[method-assign]
    run_with_pump([engine], lambda: asyncio.sleep(0.3))
    assert len(turns) < 5


# -- rounds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rounds_make_batches_independent_of_latency(seed: int) -> None:
    """fp32, where another batch would round otherwise: bit-equal log-probs and equal forwards."""
    policy, judge = tiny("qwen3"), tiny("llama")
    rows = prompts(7, seed=2)

    def run(delays: np.random.Generator) -> tuple[Any, list[tuple[int, int]]]:
        rounds = Rounds()
        a = engine_for(policy, slots=4, rounds=rounds)
        b = engine_for(judge, slots=3, rounds=rounds)
        seen = feeds(a)

        async def episode(i: int) -> list[Any]:
            ids, out, draws = rows[i], [], 0
            for turn in range(2 + i % 3):
                await asyncio.sleep(float(delays.random()) * 0.01)
                chunk = await a.generate(ids, max_tokens=3 + i, key=key(i, draws))
                draws += len(chunk.ids)
                ids = np.concatenate([ids, chunk.ids])
                await asyncio.sleep(float(delays.random()) * 0.01)
                keep, cut = await asyncio.gather(
                    b.logprobs(ids, len(ids) - 1, key=key(i)),
                    b.logprobs(ids[:-1], 1, key=key(i)),
                )
                if turn % 2:
                    ids = ids[:-2]
                out.append(
                    (chunk.ids.tobytes(), chunk.logprobs.tobytes(), keep.tobytes(), cut.tobytes())
                )
            a.live -= 1
            return out

        async def main() -> Any:
            a.live = len(rows)
            return await asyncio.gather(*(episode(i) for i in range(len(rows))))

        return run_with_pump([a, b], main), seen

    assert run(np.random.default_rng(seed)) == run(np.random.default_rng(seed + 100))


def test_a_round_waits_for_what_the_loop_is_at() -> None:
    engine = engine_for(tiny(), rounds=Rounds())
    ids, begun = prompts(1)[0], []
    begin = engine.begin_round

    def spy() -> None:
        begun.append(len(engine.held))
        begin()

    engine.begin_round = spy  # type: ignore[method-assign]

    async def busy() -> None:
        time.sleep(0.2)  # the loop is at work between the row's two requests

    async def main() -> None:
        engine.live = 1
        await asyncio.gather(
            engine.logprobs(ids, 1, key=key(0)), busy(), engine.logprobs(ids, 2, key=key(0))
        )

    run_with_pump([engine], main)
    assert begun == [2]


def test_a_round_that_never_fills_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mintrl_env.adapters.pump._STALL_S", 0.05)
    engine = engine_for(tiny(), rounds=Rounds())

    async def main() -> None:
        engine.live = 2  # but one episode only
        asking = asyncio.create_task(engine.generate(np.array([3]), max_tokens=2, key=key(0)))
        while not caplog.records:
            await asyncio.sleep(0.01)
        assert not asking.done()
        engine.live = 1
        await asking

    run_with_pump([engine], main)
    assert "1 of 2 live episodes" in caplog.text


def test_live_without_rounds_is_only_kept_and_rounds_need_keys() -> None:
    engine = engine_for(tiny())
    engine.live = 5
    assert engine.live == 5
    run_with_pump([engine], lambda: engine.generate(np.array([3]), max_tokens=2, key=key(0)))
    bound = engine_for(tiny(), rounds=Rounds())
    with pytest.raises(UsageError, match="key"):
        run_with_pump([bound], lambda: bound.logprobs(np.array([3, 4]), 1))


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda e: e.generate(np.arange(90) % 40 + 2, max_tokens=7, key=key(0)), "max_length 96"),
        (lambda e: e.generate(np.array([], dtype=int), max_tokens=7, key=key(0)), "empty"),
        (lambda e: e.generate(np.array([VOCAB]), max_tokens=7, key=key(0)), "not 48 to 48"),
        (lambda e: e.generate(np.array([-1]), max_tokens=7, key=key(0)), "not -1"),
        (lambda e: e.generate(np.array([3]), max_tokens=0, key=key(0)), "max_tokens"),
        (lambda e: e.generate(np.array([3]), max_tokens=1, stop=[""], key=key(0)), "empty stop"),
        (lambda e: e.logprobs(np.array([3, 4]), 0), "start"),
        (lambda e: e.logprobs(np.array([3, 4]), 3), "start"),
        (lambda e: e.logprobs(np.arange(97) % 40, 3), "max_length"),
    ],
)
def test_bad_requests_raise_at_once_without_a_pump(ask: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        asyncio.run(ask(engine_for(tiny())))


def test_a_row_may_fill_max_length_to_the_last_token() -> None:
    model = tiny(dtype=torch.float64)
    engine = engine_for(model, endless=True, max_length=40)
    ids = prompts(1)[0]
    count = 40 - len(ids)
    chunk = run_with_pump([engine], lambda: engine.generate(ids, max_tokens=count, key=key(0)))
    assert list(chunk.ids) == reference_sample(model, ids, count, key(0), endless=True)
    whole = np.concatenate([ids, chunk.ids])
    scores = run_with_pump([engine], lambda: engine.logprobs(whole, 1, key=key(0)))
    assert np.abs(scores - full_logprobs(model, whole, 1)).max() < 1e-5


def test_sharded_and_other_unfit_models_are_refused() -> None:
    class FullyShardedDataParallel(torch.nn.Module):  # FSDP1 by name: needs no process group here
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    with pytest.raises(UsageError, match=r"sharded \(FSDP\)"):
        engine_for(FullyShardedDataParallel(tiny()))

    zero3 = tiny()
    for parameter in zero3.parameters():
        parameter.ds_id = 1  # as DeepSpeed marks partitioned parameters
        parameter.data = torch.empty(0)
    with pytest.raises(UsageError, match="ZeRO-3"):
        engine_for(zero3)

    empty = tiny()
    empty.model.layers[0].mlp.up_proj.weight.data = torch.empty(0)
    with pytest.raises(UsageError, match="empty local"):
        engine_for(empty)

    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(tiny().config)
    with pytest.raises(UsageError, match="meta"):
        engine_for(meta)
    with pytest.raises(UsageError, match="no transformers model"):
        engine_for(torch.nn.Linear(2, 2))

    flash = tiny()
    flash.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UsageError, match="set_attn_implementation"):
        engine_for(flash)

    sliding = AutoModelForCausalLM.from_config(
        MistralConfig(
            vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, sliding_window=20,
        )
    )  # fmt: skip
    with pytest.raises(UsageError, match="slides over 20"):
        engine_for(sliding)


@pytest.mark.parametrize(
    "options",
    [
        {"vocab_size": VOCAB + 1},
        {"vocab_size": 0},
        {"slots": 0},
        {"max_length": 1},
        {"eos_ids": [VOCAB]},
        {"pad_id": VOCAB},
    ],
)
def test_bad_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        engine_for(tiny(), **options)


def test_dtensor_parameters_are_refused(tmp_path: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = tiny()
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
        with pytest.raises(UsageError, match="sharded"):
            engine_for(model)
        wrapped = torch.nn.parallel.DistributedDataParallel(tiny())
        engine = engine_for(wrapped)
        assert engine.model is wrapped.module
    finally:
        dist.destroy_process_group()


def test_it_is_a_policy_and_a_scorer() -> None:
    engine = engine_for(tiny())
    assert isinstance(engine, Policy) and isinstance(engine, Scorer)
    assert engine.kv_bytes == 2 * 2 * 6 * 2 * 104 * 12 * 4
