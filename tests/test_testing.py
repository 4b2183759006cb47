"""The scripted peers do what their docstrings say: people write their own tests with them."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import numpy as np
import pytest

from mintrl_env.episode import Episode, EpisodeConfig
from mintrl_env.errors import JudgeError, UsageError
from mintrl_env.keys import RowKey, uniforms
from mintrl_env.prompts import ByteTokenizer
from mintrl_env.protocols import Judge, Policy, Sampling, Verifier
from mintrl_env.testing import FunctionVerifier, ScriptedJudge, ScriptedPolicy
from mintrl_env.types import Chunk, Finish, Kind, ReviewRequest, Score, Task, Verdict, frozen_ids

KEY = RowKey(0, 0, "t", 0)


def write(policy: ScriptedPolicy, key: RowKey = KEY, max_tokens: int = 99) -> Chunk:
    return asyncio.run(
        policy.generate(
            frozen_ids([1, 2]), max_tokens=max_tokens, stop=(), sampling=Sampling(), key=key
        )
    )


def request(review: int = 0) -> ReviewRequest:
    episode = Episode(
        Task("t", "p"),
        [1],
        kind=Kind.INTERVENED,
        tokenizer=ByteTokenizer(),
        config=EpisodeConfig(max_reviews=9),
    )
    for _ in range(review):
        episode.send(Chunk(frozen_ids([65])))
        episode.send(Verdict.keep())
    found = episode.preview(Chunk(frozen_ids([65])))
    assert found is not None
    return found


def test_they_are_what_they_stand_in_for() -> None:
    assert isinstance(ScriptedPolicy([]), Policy)
    assert isinstance(ScriptedJudge([]), Judge)
    assert isinstance(FunctionVerifier(lambda task, text: 1.0), Verifier)


def test_a_policy_writes_in_turn_per_row() -> None:
    policy = ScriptedPolicy([[1, 2, 3], [4, 256]])
    other = RowKey(0, 0, "t", 1)
    assert write(policy).ids.tolist() == [1, 2, 3]
    assert write(policy, other).ids.tolist() == [1, 2, 3]
    second = write(policy, KEY.at(3))  # a row goes on whatever its draw
    assert (second.ids.tolist(), second.finish) == ([4, 256], Finish.EOS)
    with pytest.raises(UsageError, match=r"\('?.*'t', 0, 0\) has only 2 chunk\(s\)"):
        write(policy)
    assert [(key, ids.tolist(), n) for key, ids, n in policy.calls][:2] == [
        (KEY, [1, 2], 99),
        (other, [1, 2], 99),
    ]


def test_a_policy_is_cut_and_finishes_as_an_engine_does() -> None:
    cut = write(ScriptedPolicy([[1, 2, 256]]), max_tokens=2)
    assert (cut.ids.tolist(), cut.finish) == ([1, 2], Finish.LENGTH)
    own = write(ScriptedPolicy([[1, 7]], eos_ids=(7, 8)))
    assert own.finish is Finish.EOS
    by_row = ScriptedPolicy(lambda key: [[key.rollout]])
    assert write(by_row, RowKey(0, 0, "t", 5)).ids.tolist() == [5]


def test_a_policys_logprobs_are_its_draws() -> None:
    chunk = write(ScriptedPolicy([[1, 2, 3]]), KEY.at(10))
    assert chunk.logprobs is not None
    wanted = -uniforms(KEY.at(10), 3).astype(np.float32)
    assert np.array_equal(chunk.logprobs, wanted) and (chunk.logprobs <= 0).all()


def test_a_judge_gives_verdicts_by_review_and_raises_what_is_scripted() -> None:
    script = [Verdict.revise(0, "x"), JudgeError("timeout"), Verdict.keep("yes")]
    judge = ScriptedJudge(script)
    assert asyncio.run(judge.review(request(0))) is script[0]
    assert asyncio.run(judge.review(request(2))) is script[2]
    with pytest.raises(JudgeError, match="timeout"):
        asyncio.run(judge.review(request(1)))
    assert asyncio.run(judge.review(request(3))) == Verdict.keep("the script has ended")
    assert [r.review for r in judge.requests] == [0, 2, 1, 3]


def test_a_judge_may_be_a_function() -> None:
    def judge(asked: ReviewRequest) -> Any:
        return ValueError("odd") if asked.review else Verdict.revise(0, asked.chunk_text)

    scripted = ScriptedJudge(judge)
    assert asyncio.run(scripted.review(request())).correction == "A"
    with pytest.raises(ValueError, match="odd"):
        asyncio.run(scripted.review(request(1)))


def test_latency_is_waited_for() -> None:
    started = time.monotonic()
    write(ScriptedPolicy([[1]], latency=lambda key: 0.02 + key.rollout))
    asyncio.run(ScriptedJudge([], latency=lambda asked: 0.02).review(request()))
    assert 0.04 <= time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("result", "wanted"),
    [
        (1.0, Score(1.0, "correct")),
        (0.5, Score(0.5, "correct")),
        (0, Score(0.0, "wrong")),
        (-1.0, Score(-1.0, "wrong")),
        (True, Score(1.0, "correct")),
        (np.float32(1.0), Score(1.0, "correct")),
        (Score(0.25, "partly"), Score(0.25, "partly")),
    ],
)
def test_a_verifier_from_a_function(result: Any, wanted: Score) -> None:
    verifier = FunctionVerifier(lambda task, text: result)
    assert asyncio.run(verifier.score(Task("t", "p"), "x")) == wanted


@pytest.mark.parametrize("nothing", [None, math.nan])
def test_no_reward_is_undecided_not_wrong(nothing: float | None) -> None:
    verifier = FunctionVerifier(lambda task, text: nothing)
    score = asyncio.run(verifier.score(Task("t", "p"), "x"))
    assert not score.decided and score.status == "unavailable"
    with pytest.raises(UsageError, match="finite"):
        asyncio.run(FunctionVerifier(lambda task, text: math.inf).score(Task("t", "p"), "x"))
