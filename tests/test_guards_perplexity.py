"""The perplexity gate: what is scored, where the line is, what it takes for a failure."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mintrl_env.episode import Episode, EpisodeConfig
from mintrl_env.errors import JudgeError, UsageError
from mintrl_env.guards_perplexity import PerplexityGate, perplexity, window_perplexities
from mintrl_env.judges_scoring import judge_key
from mintrl_env.keys import RowKey
from mintrl_env.prompts import ByteTokenizer, PromptBuilder
from mintrl_env.protocols import Scorer, Tokenizer
from mintrl_env.reviewing import review_chunk
from mintrl_env.rollout import Parts, RolloutConfig, Runner
from mintrl_env.testing import FunctionVerifier, ScriptedJudge, ScriptedPolicy
from mintrl_env.types import (
    Chunk,
    FailedReview,
    Kind,
    Outcome,
    ReviewRequest,
    Task,
    Usage,
    Verdict,
    VerdictKind,
    frozen_ids,
)

TOKENS = ByteTokenizer()


class Scores:
    """Gives every token the log-prob `value`, or one after the other."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.calls: list[tuple[list[int], int, RowKey | None]] = []

    async def logprobs(self, ids: Any, start: int, *, key: RowKey | None = None) -> Any:
        self.calls.append((ids.tolist(), start, key))
        count = len(ids) - start
        return np.broadcast_to(np.asarray(self.value, dtype=np.float32), (count,)).copy()


def episode_of(
    chunk: str, accepted: str = "", tokenizer: Tokenizer = TOKENS, **config: Any
) -> tuple[Episode, ReviewRequest]:
    settings = {"chunk_tokens": 500, "max_response": 5000, **config}
    episode = Episode(
        Task("t", "p"),
        [7, 8],
        kind=Kind.INTERVENED,
        tokenizer=tokenizer,
        config=EpisodeConfig(**settings),
        key=RowKey(1, 2, "t", 3),
    )
    if accepted:
        episode.send(Chunk(frozen_ids(tokenizer.encode(accepted))))
        episode.send(Verdict.keep())
    episode.send(Chunk(frozen_ids(tokenizer.encode(chunk))))
    return episode, episode.need.request  # type: ignore[union-attr]


def gated(gate: PerplexityGate, request: ReviewRequest, verdict: Verdict) -> Verdict:
    return asyncio.run(gate(request, verdict))


@pytest.mark.parametrize(
    ("value", "passes"), [(-1.0, True), (-math.log(20), True), (-3.0, False), (-np.inf, False)]
)
def test_the_line(value: float, passes: bool) -> None:
    _, request = episode_of("a\n\nb", "k\n\n")
    verdict = Verdict.revise(1, "good", "r", Usage(usd=1.0))
    after = gated(PerplexityGate(TOKENS, Scores(value), tau=20.0001), request, verdict)
    if passes:
        assert after is verdict
        return
    assert (after.kind, after.guard, after.usage) == (
        VerdictKind.KEEP, "perplexity", verdict.usage,
    )  # fmt: skip
    shown = "inf" if value == -np.inf else "20.09"
    assert after.reason == f"the correction's perplexity is {shown}, above 20"


def test_it_is_the_mean_that_counts() -> None:
    _, request = episode_of("a")
    gate = PerplexityGate(TOKENS, Scores([-4.0, 0.0]), tau=math.exp(2.0) + 1e-6)
    verdict = Verdict.revise(0, "xy")
    assert gated(gate, request, verdict) is verdict


def test_what_is_scored() -> None:
    _, request = episode_of("a\n\nb", "k\n\n", max_correction=3)
    for correction in ("good", tuple(TOKENS.encode("good"))):
        scores = Scores(0.0)
        gated(PerplexityGate(TOKENS, scores, tau=1.0), request, Verdict.revise(1, correction))
        ((ids, start, key),) = scores.calls
        assert ids == [7, 8, *TOKENS.encode("k\n\na\n\ngoo")]  # cut to L, as it will be spliced in
        assert start == len(ids) - 3
        assert key == judge_key(request, "perplexity")


def test_what_a_cut_token_carried_is_scored_with_it(made_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = made_tokenizers["bpe"]
    scores = Scores(0.0)
    episode, request = episode_of(
        "Step one: a + b = c.", tokenizer=tokenizer, step_delimiters=("te",)
    )
    assert [(s.text, s.carry) for s in request.steps] == [("Ste", ""), ("p one: a + b = c.", "Ste")]
    verdict = Verdict.revise(1, "p 42.")
    gate = PerplexityGate(tokenizer, scores, tau=1.0)
    assert gated(gate, request, verdict) is verdict
    ((ids, _, _),) = scores.calls
    episode.send(verdict)
    assert ids == [7, 8, *episode.ids.tolist()]


@pytest.mark.parametrize(
    "verdict", [Verdict.keep("k"), Verdict.revise(0, ""), Verdict.revise(9, "past the end")]
)
def test_nothing_to_score(verdict: Verdict) -> None:
    _, request = episode_of("a")
    scores = Scores(-9.0)
    assert gated(PerplexityGate(TOKENS, scores, tau=1.0), request, verdict) is verdict
    assert scores.calls == []


def test_no_room_for_a_correction() -> None:
    _, request = episode_of("a", max_correction=0)
    scores = Scores(-9.0)
    verdict = Verdict.revise(0, "x")
    assert gated(PerplexityGate(TOKENS, scores, tau=1.0), request, verdict) is verdict
    assert scores.calls == []


def test_nan_is_a_failure_with_the_judges_cost() -> None:
    episode, request = episode_of("a")
    gate = PerplexityGate(TOKENS, Scores(np.nan), tau=5.0)
    with pytest.raises(JudgeError, match=r"shape \(1,\) for 1 tokens, 1 of them NaN"):
        gated(gate, request, Verdict.revise(0, "x"))
    judge = ScriptedJudge([Verdict.revise(0, "x", usage=Usage(usd=2.0))])
    event = asyncio.run(review_chunk(judge, request, guards=[gate], check=episode.illegal_because))
    assert isinstance(event, FailedReview)
    assert (event.cause, event.usage) == ("internal", Usage(usd=2.0))


def test_the_scorer_may_come_later() -> None:
    _, request = episode_of("a")
    gate = PerplexityGate(TOKENS, tau=3.0)
    with pytest.raises(UsageError, match="has no scorer"):
        gated(gate, request, Verdict.revise(0, "x"))
    bound = gate.with_scorer(Scores(-9.0))
    assert bound.tau == 3.0 and isinstance(Scores(0), Scorer)
    assert gated(bound, request, Verdict.revise(0, "x")).guard == "perplexity"


def test_tau_from_a_sample(tmp_path: Path) -> None:
    sample = [float(n) for n in range(1, 102)]
    assert PerplexityGate(TOKENS, quantile=0.9, sample=sample).tau == pytest.approx(91.0)
    path = tmp_path / "sample.json"
    path.write_text(json.dumps(sample))
    assert PerplexityGate(TOKENS, quantile=0.5, sample=path).tau == 51.0
    assert PerplexityGate(TOKENS, quantile=1, sample=str(path)).tau == 101.0


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "give tau, or a quantile"),
        ({"tau": 3.0, "quantile": 0.5}, "give tau, or a quantile"),
        ({"tau": 0.5}, "tau is a perplexity and must be >= 1, not 0.5"),
        ({"tau": math.nan}, "must be >= 1, not nan"),
        ({"tau": 3.0, "sample": [2.0]}, "a sample is of use with a quantile only"),
        ({"quantile": 0.5}, "a quantile needs a sample"),
        ({"quantile": 1.5, "sample": [2.0]}, "between 0 and 1, not 1.5"),
        ({"quantile": 0.5, "sample": []}, "at least one"),
        ({"quantile": 0.5, "sample": [0.5]}, "numbers >= 1"),
        ({"quantile": 0.5, "sample": [math.nan]}, "numbers >= 1"),
        ({"quantile": 0.5, "sample": ["a"]}, "is no list of numbers"),
        ({"quantile": 0.5, "sample": "none.json"}, "sample 'none.json' cannot be read"),
    ],
)
def test_wrong_options(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        PerplexityGate(TOKENS, **options)


def test_perplexities() -> None:
    assert perplexity([-1.0, -3.0]) == pytest.approx(math.exp(2.0))
    assert perplexity([-np.inf]) == perplexity([-9e9]) == math.inf
    for wrong in ([], [np.nan, -1.0]):
        with pytest.raises(UsageError, match="a perplexity needs log-probs"):
            perplexity(wrong)
    row = [-1.0, -1.0, np.nan, -2.0, -2.0, -3.0, np.nan, np.nan, -4.0, -4.0, -5.0, -5.0]
    found = window_perplexities(row, 2)
    assert found == pytest.approx([math.exp(n) for n in (1, 2, 4, 5)])
    assert window_perplexities(row, 5) == window_perplexities([], 1) == []
    with pytest.raises(UsageError, match="length counts tokens"):
        window_perplexities(row, 0)


def test_in_the_runner() -> None:
    chunks = [TOKENS.encode("bad\n\n"), [*TOKENS.encode("end"), TOKENS.EOS]]
    judge = ScriptedJudge([Verdict.revise(0, "good\n\n"), Verdict.keep()])
    gate = PerplexityGate(TOKENS, Scores(-5.0), tau=10.0)
    verifier = FunctionVerifier(lambda task, response: 1.0)
    runner = Runner(
        Parts(ScriptedPolicy(chunks), judge, [gate], verifier),
        PromptBuilder(TOKENS),
        RolloutConfig(EpisodeConfig(max_response=100), n_control=0, n_intervened=1),
    )
    ((row,),) = asyncio.run(runner.collect([Task("t", "p")], update=0))
    assert TOKENS.decode(row.ids[:-1]) == "bad\n\nend"
    assert (row.reviews[0].outcome, row.reviews[0].guard) == (Outcome.GUARDED, "perplexity")
    assert "148.4, above 10" in row.reviews[0].reason
