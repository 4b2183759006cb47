"""ServerPolicy in all its wire forms, against a real server with a model that can be computed again."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from mintrl_env.adapters.llm_client import ModelClient
from mintrl_env.adapters.llm_faults import WrongShape
from mintrl_env.adapters.llm_limits import Limits, Timing
from mintrl_env.adapters.policy_probe import PolicyReport, probe_policy, template_difference
from mintrl_env.adapters.policy_server import ServerPolicy
from mintrl_env.adapters.policy_values import spread
from mintrl_env.adapters.policy_wires import Ask, LlamaCpp, VllmCompletions, VllmGenerate
from mintrl_env.chat import ChatMessage
from mintrl_env.episode import Episode, EpisodeConfig
from mintrl_env.errors import PolicyError, UsageError
from mintrl_env.keys import RowKey
from mintrl_env.prompts import ByteTokenizer, PromptBuilder
from mintrl_env.protocols import Policy, Sampling, Scorer
from mintrl_env.rollout import Parts, RolloutConfig, Runner, drive
from mintrl_env.testing import FunctionVerifier, ScriptedJudge
from mintrl_env.types import Chunk, Finish, Kind, Provenance, StopReason, Task, Verdict

_SPEC = importlib.util.spec_from_file_location(
    "fake_llm_server", Path(__file__).with_name("fake_llm_server.py")
)
assert _SPEC is not None and _SPEC.loader is not None
fake: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["fake_llm_server"] = fake
_SPEC.loader.exec_module(fake)

WIRES = ("vllm_completions", "vllm_generate", "llama_cpp")
TOKENIZER = ByteTokenizer()
KEY = RowKey(0, 3, "task", 1)
PROMPT = np.array([*b"a question"], dtype=np.int32)
TIMING = Timing(attempts=2, attempt_s=30, deadline_s=60, backoff_s=0.01)


def run(
    server: Any,
    use: Callable[[ServerPolicy], Awaitable[Any]],
    *,
    wire: Any = "vllm_completions",
    **options: Any,
) -> Any:
    async def main() -> Any:
        async with ModelClient(server.url, timing=TIMING, breaker=None) as client:
            return await use(ServerPolicy(client, "toy", TOKENIZER, wire=wire, **options))

    return asyncio.run(main())


def write(server: Any, *, ids: Any = PROMPT, key: RowKey = KEY, **asked: Any) -> Chunk:
    """One chunk; `wire` and the policy's other options stand among `asked`."""
    options = {n: asked.pop(n) for n in ("wire", "logprobs_mode", "seeded") if n in asked}
    options |= {n: asked.pop(n) for n in ("policy_version",) if n in asked}
    asked = {"max_tokens": 12, "stop": (), "sampling": Sampling(), **asked}
    chunk = run(server, lambda policy: policy.generate(ids, key=key, **asked), **options)
    assert isinstance(chunk, Chunk)
    return chunk


def expected(server: Any, ids: Sequence[int], start: int, temperature: float = 1.0) -> np.ndarray:
    return np.array(
        [server.model.logprobs(ids[i - 1], temperature)[ids[i]] for i in range(start, len(ids))],
        dtype=np.float32,
    )


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestWriting:
    def test_ids_and_log_probs(self, wire: str) -> None:
        with fake.FakeServer() as server:
            chunk = write(server, wire=wire)
        assert 1 <= len(chunk.ids) <= 12
        whole = [*PROMPT.tolist(), *chunk.ids.tolist()]
        np.testing.assert_allclose(chunk.logprobs, expected(server, whole, len(PROMPT)), atol=1e-6)
        assert (chunk.finish is Finish.EOS) == (chunk.ids[-1] == TOKENIZER.EOS)

    def test_the_faces(self) -> None:
        policy = ServerPolicy(ModelClient("http://h/v1"), "m", TOKENIZER)
        assert isinstance(policy, Policy) and isinstance(policy, Scorer)
        assert repr(policy) == "ServerPolicy('http://h/v1', 'm')"

    def test_an_eos_ends_the_chunk_and_is_part_of_it(self, wire: str) -> None:
        with fake.FakeServer(fake.ToyModel(alphabet="ab")) as server:
            chunk = write(server, wire=wire, max_tokens=400)
        assert chunk.finish is Finish.EOS
        assert chunk.ids[-1] == TOKENIZER.EOS
        assert list(chunk.ids).count(TOKENIZER.EOS) == 1
        assert not np.isnan(chunk.logprobs).any()

    def test_a_seed_for_every_row_draw_and_chunk(self, wire: str) -> None:
        with fake.FakeServer() as server:
            first, again = write(server, wire=wire), write(server, wire=wire)
            other = write(server, wire=wire, key=KEY.at(12))
            write(server, wire=wire, seeded=False)
        assert np.array_equal(first.ids, again.ids)
        assert not np.array_equal(first.ids, other.ids)
        sent = [seen.body.get("sampling_params", seen.body) for seen in server.posts]
        assert sent[0]["seed"] == sent[1]["seed"] != sent[2]["seed"]
        assert "seed" not in sent[3]

    def test_greedy_in_parts_is_greedy_at_once(self, wire: str) -> None:
        greedy = Sampling(temperature=0)
        with fake.FakeServer() as server:
            whole = write(server, wire=wire, sampling=greedy, max_tokens=8)
            first = write(server, wire=wire, sampling=greedy, max_tokens=4)
            ids = np.concatenate([PROMPT, first.ids])
            rest = write(server, wire=wire, ids=ids, sampling=greedy, max_tokens=4, key=KEY.at(4))
        assert np.array_equal(whole.ids, np.concatenate([first.ids, rest.ids]))
        together = [*PROMPT.tolist(), *whole.ids.tolist()]
        np.testing.assert_allclose(
            whole.logprobs, expected(server, together, len(PROMPT)), atol=1e-6
        )

    def test_the_policy_version_is_that_of_the_request(self) -> None:
        async def use(policy: ServerPolicy) -> list[int]:
            first = asyncio.ensure_future(policy.generate(PROMPT, max_tokens=2, key=KEY))
            while not server.posts:
                await asyncio.sleep(0.002)
            policy.policy_version = 8
            second = await policy.generate(PROMPT, max_tokens=2, key=KEY)
            return [(await first).policy_version, second.policy_version]

        with fake.FakeServer() as server:
            server.latency = 0.1
            assert run(server, use, policy_version=7) == [7, 8]
        assert [seen.body["cache_salt"] for seen in server.posts] == ["v7", "v8"]

    @pytest.mark.parametrize(
        ("ids", "asked", "said"),
        [
            ([], {}, "at least one"),
            ([0.5], {}, "integers"),
            ([300], {}, "0 to 256"),
            ([-1], {}, "0 to 256"),
            ([1], {"max_tokens": 0}, "max_tokens"),
            ([1], {"stop": ("",)}, "empty stop"),
        ],
    )
    def test_what_the_caller_may_not_ask(self, ids: Any, asked: Any, said: str) -> None:
        with fake.FakeServer() as server:
            with pytest.raises(UsageError, match=said):
                write(server, ids=np.array(ids), **asked)
            assert not server.posts


class TestTemperature:
    """Log-probs are those of the distribution that was sampled from, or NaN."""

    @pytest.mark.parametrize("temperature", [0.5, 2.0])
    def test_llama_cpp_tells_them(self, temperature: float) -> None:
        sampling = Sampling(temperature)
        with fake.FakeServer() as server:
            chunk = write(server, wire="llama_cpp", sampling=sampling)
        whole = [*PROMPT.tolist(), *chunk.ids.tolist()]
        wanted = expected(server, whole, len(PROMPT), temperature)
        np.testing.assert_allclose(chunk.logprobs, wanted, atol=1e-5)

    @pytest.mark.parametrize("form", ["vllm_completions", "vllm_generate"])
    @pytest.mark.parametrize(
        ("mode", "temperature", "known"),
        [
            ("raw", 1.0, True),
            ("raw", 0.0, True),
            ("raw", 0.5, False),
            ("processed", 1.0, True),
            ("processed", 0.5, True),
            ("processed", 0.0, False),
        ],
    )
    def test_vllm_by_its_logprobs_mode(
        self, form: str, mode: str, temperature: float, known: bool
    ) -> None:
        with fake.FakeServer() as server:
            server.logprobs_mode = mode
            chunk = write(server, wire=form, logprobs_mode=mode, sampling=Sampling(temperature))
        whole = [*PROMPT.tolist(), *chunk.ids.tolist()]
        if known:
            wanted = expected(server, whole, len(PROMPT), temperature or 1.0)
            np.testing.assert_allclose(chunk.logprobs, wanted, atol=1e-5)
        else:
            assert np.isnan(chunk.logprobs).all()


class TestStopping:
    def test_the_stop_string_stays_and_the_token_that_ends_it_is_the_last(self, wire: str) -> None:
        with fake.FakeServer(fake.ToyModel(eos_bias=-60.0)) as server:
            chunk = write(server, wire=wire, max_tokens=300, stop=("b\n", "gh"))
        text = TOKENIZER.decode(chunk.ids)
        assert chunk.finish is Finish.STOP
        assert text.endswith(("b\n", "gh"))
        assert "b\n" not in text[:-1] and "gh" not in text[:-1]
        known = ~np.isnan(chunk.logprobs)
        whole = [*PROMPT.tolist(), *chunk.ids.tolist()]
        wanted = expected(server, whole, len(PROMPT))
        np.testing.assert_allclose(chunk.logprobs[known], wanted[known], atol=1e-6)
        # llama.cpp tells none for the stop string's own tokens.
        assert (~known).sum() == (2 if wire == "llama_cpp" else 0)

    @pytest.mark.parametrize("form", ["vllm_completions", "vllm_generate"])
    def test_what_a_server_wrote_behind_it_is_dropped(self, form: str) -> None:
        with fake.FakeServer() as server:
            exact = write(server, wire=form, max_tokens=300, stop=("b",))
            server.after_stop = 5
            chunk = write(server, wire=form, max_tokens=300, stop=("b",))
        assert np.array_equal(chunk.ids, exact.ids)
        assert chunk.finish is Finish.STOP
        assert len(chunk.logprobs) == len(chunk.ids)

    def test_vllm_is_told_to_keep_it_and_which_ids_end(self) -> None:
        with fake.FakeServer() as server:
            write(server, stop=("zz",))
        body = server.posts[0].body
        assert body["include_stop_str_in_output"] is True
        assert body["skip_special_tokens"] is False
        assert (body["ignore_eos"], body["stop_token_ids"]) == (True, [256])

    def test_an_eos_that_comes_first(self, wire: str) -> None:
        with fake.FakeServer(fake.ToyModel(alphabet="ab")) as server:
            chunk = write(server, wire=wire, max_tokens=400, stop=("never",))
        assert chunk.finish is Finish.EOS

    def test_an_end_that_is_none_for_the_tokenizer(self, caplog: pytest.LogCaptureFixture) -> None:
        """A model's other EOS: the episode goes on, and the user hears of it, once."""

        class Ends(fake.FakeServer):  # type: ignore[misc]
            def _llama(self, body: Any) -> Any:
                reply = super()._llama({**body, "n_predict": 3})
                return {**reply, "stop_type": "eos"}

        with Ends() as server:
            chunk = write(server, wire="llama_cpp", key=KEY.at(1))
        assert chunk.finish is Finish.LENGTH
        assert f"extra_eos=[{chunk.ids[-1]}]" in caplog.text


class TestPrefixes:
    """The server must go on from exactly these ids."""

    def test_a_row_is_known_by_one_name_and_each_chunk_by_its_own(self) -> None:
        with fake.FakeServer() as server:
            for draw in (0, 12):
                write(server, key=KEY.at(draw))
            write(server, key=RowKey(0, 3, "task", 2))
        bodies = [seen.body for seen in server.posts]
        headers = [seen.headers for seen in server.posts]
        assert bodies[0]["session_id"] == bodies[1]["session_id"] != bodies[2]["session_id"]
        assert [h["x-session-id"] for h in headers] == [b["session_id"] for b in bodies]
        names = [h["x-request-id"] for h in headers]
        assert len(set(names)) == 3
        row = bodies[0]["session_id"]
        assert names[:2] == [f"{row}-0-0-0", f"{row}-12-0-0"]

    def test_llama_cpp_keeps_the_prompt(self) -> None:
        with fake.FakeServer() as server:
            write(server, wire="llama_cpp")
        assert server.posts[0].body["cache_prompt"] is True
        assert server.posts[0].body["samplers"] == ["temperature"]

    def test_a_bos_that_the_server_adds_is_refused(self, wire: str) -> None:
        with fake.FakeServer() as server:
            server.bos = 97
            with pytest.raises(PolicyError, match=r"read 11 ids where 10 were sent"):
                write(server, wire=wire)
            assert len(server.posts) == 1

    def test_a_prompt_of_the_same_length_that_differs(self) -> None:
        class Other(fake.FakeServer):  # type: ignore[misc]
            def _prompt(self, ids: list[int]) -> list[int]:
                return [98, *ids[1:]]

        with Other() as server, pytest.raises(PolicyError, match="were sent, or others"):
            write(server)

    def test_a_prompt_that_comes_back_in_front_of_the_answer(self) -> None:
        class Echo(fake.FakeServer):  # type: ignore[misc]
            def _completions(self, body: Any) -> Any:
                reply = super()._completions(body)
                choice = reply["choices"][0]
                choice["token_ids"] = [*body["prompt"], *choice["token_ids"]]
                choice["logprobs"]["token_logprobs"] += [-1.0] * len(body["prompt"])
                return reply

        with Echo() as server, pytest.raises(PolicyError, match="the prompt stands in front"):
            write(server)

    def test_a_short_answer_with_the_prompt_in_front(self) -> None:
        """It fits into max_tokens; by the server's own count it is too long."""

        class Echo(fake.FakeServer):  # type: ignore[misc]
            def _generate(self, body: Any) -> Any:
                reply = super()._generate(body)
                choice = reply["choices"][0]
                choice["token_ids"] = [*body["token_ids"], *choice["token_ids"]]
                choice["logprobs"] = None
                return reply

        refused = pytest.raises(PolicyError, match=r"the server counts .* stands in front")
        with Echo() as server, refused:
            write(server, wire="vllm_generate", max_tokens=64)

    def test_a_policy_that_says_its_prompt_again(self) -> None:
        class Again(fake.FakeServer):  # type: ignore[misc]
            def _generate(self, body: Any) -> Any:
                reply = super()._generate(body)
                reply["choices"][0] |= {"token_ids": [*body["token_ids"], 97], "logprobs": None}
                return {**reply, "usage": {"prompt_tokens": 10, "completion_tokens": 11}}

        with Again() as server:
            assert write(server, wire="vllm_generate", max_tokens=64).ids.tolist() == [*PROMPT, 97]

    def test_a_prompt_that_llama_cpp_cut_is_refused(self) -> None:
        class Cuts(fake.FakeServer):  # type: ignore[misc]
            def _llama(self, body: Any) -> Any:
                return {**super()._llama(body), "truncated": True}

        with Cuts() as server, pytest.raises(PolicyError, match="cut the prompt"):
            write(server, wire="llama_cpp")


class TestWeights:
    """Whose tokens these are."""

    def test_a_server_that_comes_back_with_another_model(self, wire: str) -> None:
        class Named(fake.FakeServer):  # type: ignore[misc]
            def _post(self, path: str, body: Any) -> Any:
                status, reply = super()._post(path, body)
                return status, {**reply, "model": self.model_name}

        async def use(policy: ServerPolicy) -> None:
            for draw in (0, 12):
                await policy.generate(PROMPT, max_tokens=4, key=KEY.at(draw))
            await asyncio.to_thread(server.stop)
            server.model_name = "another"
            await asyncio.to_thread(server.start)
            with pytest.raises(PolicyError, match="'another' now and called it 'toy' before"):
                await policy.generate(PROMPT, max_tokens=4, key=KEY.at(24))

        with Named() as server:
            run(server, use, wire=wire)

    def test_new_weights_in_the_middle_of_a_chunk(self) -> None:
        class Changes(fake.FakeServer):  # type: ignore[misc]
            def _generate(self, body: Any) -> Any:
                reply = super()._generate(body)
                reply["choices"][0]["weight_versions"] = [{"version": v} for v in self.held]
                return reply

        with Changes() as server:
            server.held = [3, 3]
            assert len(write(server, wire="vllm_generate").ids)
            server.held = [3, 4]
            with pytest.raises(PolicyError, match="one chunk was written by the weights 3, 4"):
                write(server, wire="vllm_generate")


class TestPadding:
    """Rows that pad the embedding are sampled by some servers, and are no tokens."""

    def test_a_chunk_ends_before_one(self, wire: str) -> None:
        with fake.FakeServer(fake.ToyModel(pad_logit=0.0)) as server:
            chunks = [write(server, wire=wire, key=KEY.at(64 * n)) for n in range(12)]
        written = [len(chunk.ids) for chunk in chunks]
        assert all(chunk.ids.max() <= 256 for chunk in chunks)
        assert any(
            n < 12 and c.finish is Finish.LENGTH for n, c in zip(written, chunks, strict=True)
        )
        assert len(server.posts) > 12  # some began with one, and were asked again

    def test_a_model_that_writes_nothing_else(self, wire: str) -> None:
        with fake.FakeServer(fake.ToyModel(pad_logit=60.0)) as server:
            with pytest.raises(PolicyError, match="from 257 on"):
                write(server, wire=wire)
            bodies = [seen.body.get("sampling_params", seen.body) for seen in server.posts]
        assert len({body["seed"] for body in bodies}) == 3  # not the same draw three times


class TestScoring:
    def test_log_probs_of_given_ids(self, wire: str) -> None:
        ids = np.array([*b"abc\nabc"], dtype=np.int32)
        with fake.FakeServer() as server:
            scores = run(server, lambda policy: policy.logprobs(ids, 3, key=KEY), wire=wire)
            assert len(server.posts) == (4 if wire == "llama_cpp" else 1)
        assert scores.dtype == np.float32
        np.testing.assert_allclose(scores, expected(server, ids.tolist(), 3), atol=1e-6)

    def test_sampling_and_scoring_agree(self, wire: str) -> None:
        async def use(policy: ServerPolicy) -> None:
            chunk = await policy.generate(PROMPT, max_tokens=20, key=KEY)
            whole = np.concatenate([PROMPT, chunk.ids])
            scores = await policy.logprobs(whole, len(PROMPT))
            np.testing.assert_allclose(scores, chunk.logprobs, atol=1e-6)

        with fake.FakeServer() as server:
            run(server, use, wire=wire)

    def test_an_unfinished_character_of_llama_cpp(self) -> None:
        """It has no entry of its own: it is looked for among the likeliest."""

        class Lists(fake.FakeServer):  # type: ignore[misc]
            def _llama(self, body: Any) -> Any:
                reply = super()._llama(body)
                for entry in reply["completion_probabilities"]:
                    scores = self.model.logprobs(body["prompt"][-1])
                    likeliest = np.argsort(-scores)[: body["n_probs"]]
                    entry["top_logprobs"] = [
                        {"id": int(i), "logprob": float(scores[i])} for i in likeliest
                    ]
                return reply

        ids = np.array([97, 0xC3, 0xA9], dtype=np.int32)
        with Lists() as server:
            scores = run(server, lambda p: p.logprobs(ids, 1), wire="llama_cpp")
        np.testing.assert_allclose(scores, expected(server, ids.tolist(), 1), atol=1e-6)

    def test_nothing_to_score_and_what_cannot_be(self, wire: str) -> None:
        with fake.FakeServer() as server:
            assert run(server, lambda p: p.logprobs(PROMPT, len(PROMPT)), wire=wire).shape == (0,)
            for start in (0, 11):
                with pytest.raises(UsageError, match="start must be 1 to 10"):
                    run(server, lambda p, s=start: p.logprobs(PROMPT, s), wire=wire)
            assert not server.posts


class TestWires:
    """Replies in the shapes that real servers sent; ids and figures are made up."""

    ASK = Ask("m", np.array([5, 6], dtype=np.int32), 8, (), 1.0, (2,))

    def test_a_completion_of_vllm(self) -> None:
        reply = {
            "id": "cmpl-1",
            "object": "text_completion",
            "model": "m",
            "choices": [
                {
                    "index": 0,
                    "text": " so",
                    "logprobs": {
                        "text_offset": [0, 3],
                        "token_logprobs": [-0.5, 1e-7],
                        "tokens": [" so", "<eos>"],
                        "top_logprobs": [{" so": -0.5}, {"<eos>": 0.0}],
                    },
                    "finish_reason": "stop",
                    "stop_reason": 2,
                    "token_ids": [9, 2],
                    "prompt_logprobs": None,
                    "prompt_token_ids": [5, 6],
                }
            ],
            "usage": {"prompt_tokens": 2, "total_tokens": 4, "completion_tokens": 2},
        }
        written = VllmCompletions().read(reply, self.ASK)
        assert (written.ids, written.logprobs, written.stopped) == ([9, 2], [-0.5, 0.0], "eos")
        assert (written.prompt_ids, written.prompt_tokens) == ([5, 6], 2)

    def test_a_generation_of_vllm(self) -> None:
        content = [{"token": "token_id:9", "logprob": -0.5, "bytes": None, "top_logprobs": []}]
        reply = {
            "request_id": "r",
            "choices": [
                {
                    "index": 0,
                    "logprobs": {"content": content},
                    "finish_reason": "length",
                    "token_ids": [9],
                    "weight_versions": [0],
                }
            ],
            "prompt_logprobs": None,
        }
        written = VllmGenerate().read(reply, self.ASK)
        assert (written.ids, written.logprobs, written.stopped) == ([9], [-0.5], "length")
        assert (written.prompt_ids, written.prompt_tokens) == (None, None)

    @pytest.mark.parametrize(
        ("value", "known"),
        [
            (-0.5, -0.5),
            (0.0005, 0.0),  # float32
            (-9999.0, math.nan),  # vLLM's for what JSON has no number for
            (-math.inf, math.nan),
            (math.nan, math.nan),
            (0.5, math.nan),
            (None, math.nan),
            ("-0.5", math.nan),
            (True, math.nan),
            (-(10**400), math.nan),
        ],
    )
    def test_log_probs_that_are_none(self, value: Any, known: float) -> None:
        choice = {"token_ids": [9, 8], "finish_reason": "length"}
        completion = {**choice, "logprobs": {"token_logprobs": [-1.0, value]}}
        generated = {**choice, "logprobs": {"content": [{"logprob": -1.0}, {"logprob": value}]}}
        for form, given in ((VllmCompletions(), completion), (VllmGenerate(), generated)):
            written = form.read({"choices": [given]}, self.ASK)
            np.testing.assert_array_equal(written.logprobs, [-1.0, known])

    def test_scores_that_are_none(self) -> None:
        def scores(value: Any) -> list[float]:
            return VllmGenerate().read_scores(
                {"prompt_logprobs": [None, {"6": {"logprob": value}}]}, self.ASK
            )

        assert scores(-9999.0) == [-math.inf]
        for odd in (None, "-1", 10**400):
            with pytest.raises(WrongShape):
                scores(odd)

    def test_no_tokens_and_an_end_that_is_not_there(self) -> None:
        choice = {"finish_reason": "length", "token_ids": []}
        with pytest.raises(WrongShape, match="'length' after 0 tokens"):
            VllmGenerate().read({"choices": [choice]}, self.ASK)
        eos = min(self.ASK.eos_ids)
        ended = {"finish_reason": "stop", "token_ids": [9], "stop_reason": eos}
        with pytest.raises(WrongShape, match=f"ended at id {eos}, which is not among"):
            VllmCompletions().read({"choices": [ended]}, self.ASK)
        named = {"finish_reason": "stop", "token_ids": [9], "stop_reason": "a"}
        assert VllmCompletions().read({"choices": [named]}, self.ASK).stopped == "string"

    def test_prompt_log_probs_of_vllm(self) -> None:
        entry = {"6": {"logprob": -2.5, "rank": 4, "decoded_token": "b"}, "7": {"logprob": -0.1}}
        completion = {"choices": [{"prompt_logprobs": [None, entry]}]}
        assert VllmCompletions().read_scores(completion, self.ASK) == [-2.5]
        assert VllmGenerate().read_scores({"prompt_logprobs": [None, entry]}, self.ASK) == [-2.5]
        for odd in (None, [None], [None, {"7": {"logprob": -0.1}}], [None, None]):
            with pytest.raises(WrongShape):
                VllmGenerate().read_scores({"prompt_logprobs": odd}, self.ASK)

    def test_an_abort_of_vllm_keeps_what_was_written(self) -> None:
        choice = {"token_ids": [9], "finish_reason": "abort", "logprobs": None}
        assert VllmGenerate().read({"choices": [choice]}, self.ASK).stopped == "length"
        with pytest.raises(WrongShape, match="'abort' after 0 tokens"):
            VllmGenerate().read({"choices": [{**choice, "token_ids": []}]}, self.ASK)

    @pytest.mark.parametrize(
        "choice",
        [
            {},
            {"token_ids": None, "finish_reason": "stop"},
            {"token_ids": ["9"], "finish_reason": "stop"},
            {"token_ids": [9], "finish_reason": "error"},
            {"token_ids": [9, 9], "finish_reason": "stop", "logprobs": {"token_logprobs": [0.0]}},
            {"token_ids": [9], "finish_reason": "stop", "logprobs": {"token_logprobs": 1}},
        ],
    )
    def test_shapes_that_are_none(self, choice: Any) -> None:
        with pytest.raises(WrongShape):
            VllmCompletions().read({"choices": [choice]}, self.ASK)

    def test_a_completion_of_llama_cpp(self) -> None:
        reply = {
            "index": 0,
            "content": "é",
            "tokens": [7, 8, 2],
            "stop": True,
            "tokens_predicted": 3,
            "tokens_evaluated": 2,
            "truncated": False,
            "stop_type": "eos",
            "stopping_word": "",
            "completion_probabilities": [
                {"id": 8, "token": "é", "bytes": [195, 169], "logprob": -0.25, "top_logprobs": []},
                {"id": 2, "token": "", "bytes": [], "logprob": -1.5, "top_logprobs": []},
            ],
        }
        written = LlamaCpp().read(reply, self.ASK)
        assert (written.ids, written.stopped, written.prompt_tokens) == ([7, 8, 2], "eos", 2)
        np.testing.assert_array_equal(written.logprobs, [math.nan, -0.25, -1.5])
        for odd in ({"stop_type": "none"}, {"tokens": []}, {"tokens": None}, {"stop_type": 1}):
            with pytest.raises(WrongShape):
                LlamaCpp().read({**reply, **odd}, self.ASK)

    def test_entries_belong_to_tokens_only_where_there_is_one_way(self) -> None:
        nan = math.nan
        for ids, entries, found in (
            ([1, 2, 3], [1, 2, 3], [0.0, 1.0, 2.0]),
            ([1, 2, 3], [1, 3], [0.0, nan, 1.0]),
            ([1, 1, 3], [1, 3], [nan, nan, 1.0]),  # which of the two?
            ([1, 2, 1, 3], [2, 1], [nan, 0.0, 1.0, nan]),
            ([1, 2], [], [nan, nan]),
        ):
            values = [float(i) for i in range(len(entries))]
            np.testing.assert_array_equal(spread(ids, entries, values), found)
        for entries in ([3, 1], [4], [1, 2, 3, 3]):
            with pytest.raises(WrongShape, match="not written"):
                spread([1, 2, 3], entries, [0.0] * len(entries))


class TestProbe:
    def probe(self, server: Any, **options: Any) -> PolicyReport:
        async def main() -> PolicyReport:
            async with ModelClient(server.url, timing=TIMING, breaker=None) as client:
                return await probe_policy(client, "toy", TOKENIZER, PROMPT, **options)

        return asyncio.run(main())

    @pytest.mark.parametrize("mode", ["raw", "processed"])
    @pytest.mark.parametrize("form", ["vllm_completions", "vllm_generate"])
    def test_vllm(self, form: Any, mode: str) -> None:
        with fake.FakeServer() as server:
            server.logprobs_mode = mode
            server.wires = {form.removeprefix("vllm_")}
            report = self.probe(server)
        report.check()
        assert (report.wire, report.logprobs_mode) == (form, mode)
        assert (report.scores, report.seeds, report.notes) == (True, True, ())
        assert f"ids        {form}" in str(report)

    def test_llama_cpp(self) -> None:
        with fake.FakeServer() as server:
            server.wires = {"llama"}
            report = self.probe(server)
        assert (report.wire, report.problem, report.scores) == ("llama_cpp", "", True)

    def test_a_server_without_any_form(self) -> None:
        with fake.FakeServer() as server:
            server.wires = set()
            report = self.probe(server)
        assert report.wire is None
        assert report.problem.count("HTTP 404") == 3
        with pytest.raises(PolicyError, match="takes no ids in any form"):
            report.check()

    def test_a_server_that_adds_a_bos(self) -> None:
        with fake.FakeServer() as server:
            server.bos = 97
            assert self.probe(server).problem.count("adds a BOS") == 3

    def test_a_server_that_ignores_seeds_is_noted(self) -> None:
        class Random(fake.FakeServer):  # type: ignore[misc]
            def _seed(self, seed: int | None) -> int:
                return int(super()._seed(None))

        with Random() as server:
            report = self.probe(server)
        assert not report.seeds and report.problem == ""
        assert any("a seed does not decide" in note for note in report.notes)

    def test_a_server_that_samples_where_it_should_not(self) -> None:
        class Warm(fake.FakeServer):  # type: ignore[misc]
            def _completions(self, body: Any) -> Any:
                return super()._completions({**body, "temperature": 50.0, "seed": None})

        with Warm() as server:
            report = self.probe(server, wires=["vllm_completions"])
        assert "samples at temperature 0" in report.problem

    def test_a_chat_template_that_differs(self) -> None:
        class Chat(fake.FakeServer):  # type: ignore[misc]
            def _chat(self, body: Any) -> Any:
                reply = super()._chat(body)
                reply["prompt_token_ids"] = [1, *body["messages"][0]["content"].encode()]
                reply["choices"][0]["token_ids"] = [97]
                return reply

        async def main(ids: list[int]) -> str:
            async with ModelClient(server.url, timing=TIMING) as client:
                return await template_difference(client, "toy", [ChatMessage("user", "hi")], ids)

        with Chat() as server:
            assert asyncio.run(main([1, *b"hi"])) == ""
            said = asyncio.run(main([*b"hi"]))
        assert said.startswith("the server's prompt has 3 ids, ours 2; they differ from id 0 on")
        with fake.FakeServer() as server, pytest.raises(PolicyError, match="no prompt_token_ids"):
            asyncio.run(main([1]))


class TestEpisodes:
    def test_a_reviewed_episode_goes_on_from_exactly_what_it_holds(self, wire: str) -> None:
        judge = ScriptedJudge(
            lambda r: Verdict.revise(0, "cab\n") if r.review == 0 else Verdict.keep()
        )

        async def use(policy: ServerPolicy) -> Episode:
            config = EpisodeConfig(
                chunk_tokens=8, max_response=64, max_reviews=3, step_delimiters=("\n",)
            )
            key = RowKey(0, 0, "t", 0)
            episode = Episode(
                Task("t", "q"),
                PROMPT,
                kind=Kind.INTERVENED,
                tokenizer=TOKENIZER,
                config=config,
                key=key,
            )
            await drive(episode, Parts(policy, judge), RolloutConfig(episode=config))
            return episode

        with fake.FakeServer() as server:
            episode = run(server, use, wire=wire)
        assert Provenance.INTERVENTION in episode.provenance
        prompts = [seen.body.get("token_ids", seen.body.get("prompt")) for seen in server.posts]
        assert prompts[0] == PROMPT.tolist()
        assert prompts[1] == [*PROMPT.tolist(), *b"cab\n"]
        whole = [*PROMPT.tolist(), *episode.ids.tolist()]
        assert all(prompt == whole[: len(prompt)] for prompt in prompts)

    @pytest.mark.slow
    @pytest.mark.timeout(900)
    def test_a_thousand_episodes_without_a_leak(self) -> None:
        """Through the real runner, against a server in a process of its own: no descriptor, task or
        memory stays behind. The figures of a run stand in its captured output."""
        program = Path(__file__).with_name("fake_llm_server.py")
        process = psutil.Process()
        server = subprocess.Popen(
            [sys.executable, str(program), "0", "0.002"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert server.stdin is not None and server.stdout is not None
        try:
            port = int(server.stdout.readline())
            judge = ScriptedJudge(
                lambda r: Verdict.revise(0, "ba\n") if r.review == 1 else Verdict.keep()
            )

            async def update(index: int, tasks: int) -> tuple[int, int, int, float]:
                judge.requests.clear()
                config = RolloutConfig(
                    episode=EpisodeConfig(
                        chunk_tokens=16, max_response=96, step_delimiters=("\n",)
                    ),
                    n_control=4,
                    n_intervened=4,
                    deadline_s=600.0,
                )
                parts = Parts(policy, judge, verifier=FunctionVerifier(lambda p, r: 1.0))
                runner = Runner(parts, PromptBuilder(TOKENIZER, chat=False), config)
                todo = [Task(f"t{index}-{n}", "a question", "x") for n in range(tasks)]
                rows = valid = tokens = 0
                async for group in runner.groups(todo, update=index):
                    rows += len(group)
                    valid += sum(row.valid for row in group)
                    tokens += sum(len(row.ids) for row in group)
                    assert {row.stop_reason for row in group} <= {StopReason.EOS, StopReason.LENGTH}
                assert asyncio.all_tasks() == {asyncio.current_task()}
                return rows, valid, tokens, process.memory_info().rss / 2**20

            async def main() -> list[tuple[int, int, int, float]]:
                async with ModelClient(
                    f"http://127.0.0.1:{port}/v1", limits=Limits(concurrent=64), breaker=None
                ) as client:
                    nonlocal policy
                    policy = ServerPolicy(client, "toy", TOKENIZER)
                    updates = [await update(index, 25) for index in range(6)]
                    assert process.num_fds() <= idle + 64 + 8  # connections that wait for more
                    return updates

            policy: Any = None
            idle = process.num_fds()
            updates = asyncio.run(main())
            assert process.num_fds() <= idle + 2  # what libraries keep open for good
            assert [rows for rows, *_ in updates] == [200] * 6
            assert [valid for _, valid, *_ in updates] == [200] * 6
            memory = [mib for *_, mib in updates]
            print("MiB after each 200 episodes:", [round(mib, 1) for mib in memory])
            assert memory[-1] - memory[0] < 20  # the first loaded everything
        finally:
            server.stdin.close()
            server.wait(30)
