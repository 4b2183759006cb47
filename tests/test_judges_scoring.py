"""The scoring judge: exact token ranges, what is never looked at, what is spliced, what it cost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from mintrl_env.episode import Episode, EpisodeConfig
from mintrl_env.errors import JudgeError, UsageError
from mintrl_env.judges_scoring import ScoringJudge, judge_key
from mintrl_env.keys import RowKey
from mintrl_env.prompts import ByteTokenizer
from mintrl_env.protocols import Tokenizer
from mintrl_env.testing import ScriptedPolicy
from mintrl_env.types import (
    Chunk,
    Finish,
    Kind,
    ReviewRequest,
    Task,
    Usage,
    Verdict,
    VerdictKind,
    frozen_ids,
)

BYTES = ByteTokenizer()
PROMPT = [1, 2, 3]
KEY = RowKey(5, 6, "t", 7)
TOKENIZERS = ("byte", "bpe", "sentencepiece", "metaspace", "char")


class Scores:
    """Log-prob -0.1 for every token, `low` at the given places of the chunk."""

    def __init__(self, *low: int, value: float = -9.0) -> None:
        self.low, self.value = low, value
        self.calls: list[tuple[list[int], int, RowKey | None]] = []

    async def logprobs(self, ids: Any, start: int, *, key: RowKey | None = None) -> Any:
        self.calls.append((ids.tolist(), start, key))
        scores = np.full(len(ids) - start, -0.1, dtype=np.float32)
        scores[[place for place in self.low if place < len(scores)]] = self.value
        return scores


def episode_of(tokenizer: Tokenizer = BYTES, **config: Any) -> Episode:
    settings = {"step_delimiters": ("\n\n",), "chunk_tokens": 500, "max_response": 2000, **config}
    return Episode(
        Task("t", "p"),
        PROMPT,
        kind=Kind.INTERVENED,
        tokenizer=tokenizer,
        config=EpisodeConfig(**settings),
        key=KEY,
    )


def request_of(
    text: str, accepted: str = "", *, tokenizer: Tokenizer = BYTES, end: bool = False, **config: Any
) -> tuple[Episode, ReviewRequest]:
    episode = episode_of(tokenizer, **config)
    if accepted:
        episode.send(Chunk(frozen_ids(tokenizer.encode(accepted))))
        episode.send(Verdict.keep())
    ids = tokenizer.encode(text) + [min(tokenizer.eos_ids)] * end
    episode.send(Chunk(frozen_ids(ids), finish=Finish.EOS if end else Finish.LENGTH))
    return episode, episode.need.request  # type: ignore[union-attr]


def judged(
    request: ReviewRequest,
    scores: Scores,
    writes: Sequence[int] | Callable[[RowKey], Any] = (),
    *,
    tokenizer: Tokenizer = BYTES,
    **options: Any,
) -> tuple[Verdict, ScriptedPolicy]:
    script = writes if callable(writes) else [list(writes)]
    policy = ScriptedPolicy(script, eos_ids=tuple(tokenizer.eos_ids))
    judge = ScoringJudge(scores, policy, tokenizer, **options)
    return asyncio.run(judge.review(request)), policy


# --- which step


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_token_belongs_to_exactly_one_step(
    made_tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = made_tokenizers[kind]
    text = "a + b = c.\n\nwe add 1.\n\nSo the answer is 42.\n\nThe"
    _, request = request_of(text, "We add.\n\n", tokenizer=tokenizer, end=True)
    assert len(request.steps) == 4
    body = len(request.chunk_ids) - 1
    found = []
    for place in range(body):
        verdict, _ = judged(request, Scores(place), [5], tokenizer=tokenizer)
        assert verdict.step is not None
        cuts = [*(step.cut for step in request.steps), body]
        assert cuts[verdict.step] <= place < cuts[verdict.step + 1]
        found.append(verdict.step)
    assert found == sorted(found) and set(found) == {0, 1, 2, 3}
    # The EOS is not scored: a low place there doesn't exist.
    assert judged(request, Scores(body), tokenizer=tokenizer)[0].kind is VerdictKind.KEEP


def test_the_earliest_wrong_step_counts() -> None:
    _, request = request_of("ab\n\ncd\n\nef")
    assert judged(request, Scores(9, 5), [7])[0].step == 1
    assert judged(request, Scores(8), [7])[0].step == 2


def test_tau_is_a_strict_bound() -> None:
    _, request = request_of("ab\n\n")
    assert judged(request, Scores(0, value=-2.0), [7], tau=-2.0)[0].kind is VerdictKind.KEEP
    assert judged(request, Scores(0, value=-2.01), [7], tau=-2.0)[0].step == 0
    assert judged(request, Scores(0, value=-np.inf), [7])[0].step == 0
    for tau in (0.0, 1.0, float("nan")):
        with pytest.raises(UsageError, match="tau"):
            ScoringJudge(Scores(), ScriptedPolicy([]), BYTES, tau=tau)


def test_what_is_scored() -> None:
    episode, request = request_of("ab\n\ncd", "xy\n\n", end=True)
    scores = Scores()
    verdict, policy = judged(request, scores)
    assert scores.calls == [
        (PROMPT + BYTES.encode("xy\n\nab\n\ncd"), 3 + 4, judge_key(request, "judge"))
    ]
    assert policy.calls == []
    assert verdict.kind is VerdictKind.KEEP
    assert (verdict.usage.prompt_tokens, verdict.usage.completion_tokens) == (13, 0)
    assert verdict.usage.calls == 1
    episode.send(verdict)


def test_nothing_but_the_end_costs_nothing() -> None:
    _, request = request_of("", "ab\n\n", end=True)
    scores = Scores(0)
    verdict, policy = judged(request, scores)
    assert (verdict.kind, verdict.usage) == (VerdictKind.KEEP, Usage(calls=0))
    assert (scores.calls, policy.calls) == ([], [])


# --- never


@pytest.mark.parametrize(
    ("accepted", "text", "low", "step"),
    [
        ("", "ab\n\nBad\n\nef", 5, None),  # the answer line itself
        ("", "ab\n\nBad\n\nef", 10, None),  # and what follows it
        ("", "ab\n\nBad\n\nef", 1, 0),  # not what precedes it
        ("", "ab\n\ncB\n\n", 5, 1),  # not at a line's start
        ("ab\n\nB", "ad\n\nef", 1, None),  # begun in the accepted text
        ("ab\n\nc", "Bd\n\nef", 1, 0),
        ("B\n\n", "ad\n\n", 1, 0),  # a line of its own, before
    ],
)
def test_never(accepted: str, text: str, low: int, step: int | None) -> None:
    _, request = request_of(text, accepted)
    verdict, _ = judged(request, Scores(low), [7], never="^B")
    assert verdict.step == step
    with pytest.raises(UsageError, match="never"):
        ScoringJudge(Scores(), ScriptedPolicy([]), BYTES, never="(")


# --- the correction


def test_the_teacher_continues_the_kept_prefix() -> None:
    episode, request = request_of("ab\n\ncd\n\nef", "xy\n\n", max_correction=6)
    verdict, policy = judged(
        request, Scores(5), BYTES.encode("CD\n\n"), stop=("\n\n",), temperature=0.5
    )
    assert (verdict.step, verdict.correction) == (1, tuple(BYTES.encode("CD\n\n")))
    ((key, ids, max_tokens),) = policy.calls
    assert ids.tolist() == PROMPT + BYTES.encode("xy\n\nab\n\n")
    assert max_tokens == 6
    # A row of the judge's own; the second review takes the draws behind the first one's.
    assert key.row == judge_key(request, "judge").row != KEY.row
    assert key.draw == 1 << 20  # the second review
    read, written = 3 + 4 + 10, 4
    assert (verdict.usage.prompt_tokens, verdict.usage.calls) == (read + 3 + 8, 2)
    assert verdict.usage.completion_tokens == written
    episode.send(verdict)
    assert episode.text == "xy\n\nab\n\nCD\n\n"


def test_generate_gets_stop_and_sampling() -> None:
    seen: dict[str, Any] = {}

    class Writer:
        async def generate(self, ids: Any, **options: Any) -> Chunk:
            seen.update(options)
            return Chunk(frozen_ids([7]))

    _, request = request_of("ab\n\n")
    judge = ScoringJudge(Scores(0), Writer(), BYTES, stop=("\n", ";"), temperature=0.25)
    assert asyncio.run(judge.review(request)).correction == (7,)
    assert seen["stop"] == ("\n", ";") and seen["sampling"].temperature == 0.25


@pytest.mark.parametrize(
    ("writes", "correction"),
    [([65, 256], (65,)), ([256], ()), ([65, 66, 67, 68], (65, 66, 67))],
)
def test_an_eos_is_left_out_and_the_limit_holds(
    writes: list[int], correction: tuple[int, ...]
) -> None:
    episode, request = request_of("ab\n\n", max_correction=3)
    verdict, _ = judged(request, Scores(0), writes)
    assert verdict.correction == correction
    assert verdict.usage.completion_tokens == min(3, len(writes))  # what was generated is paid for
    assert episode.illegal_because(verdict) == ""
    episode.send(verdict)
    assert episode.ids.tolist() == list(correction)


def test_no_room_is_a_bare_cut_without_a_call() -> None:
    episode, request = request_of("ab\n\ncd", max_correction=0)
    verdict, policy = judged(request, Scores(5), [65])
    assert (verdict.step, verdict.correction, policy.calls) == (1, (), [])
    assert (verdict.usage.prompt_tokens, verdict.usage.calls) == (3 + 6, 1)
    episode.send(verdict)
    assert episode.text == "ab\n\n"


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_teacher_reads_what_the_episode_will_splice(
    made_tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    """Delimiters that straddle tokens: the carry is put in front of the correction, once."""
    tokenizer = made_tokenizers[kind]
    carried = 0
    for delimiter, text in (
        (" b", "a b = c. b + c"),
        (".", "a = c.\n\nb + c"),
        ("d", "added e"),
    ):
        episode, request = request_of(
            text, "We.", tokenizer=tokenizer, step_delimiters=(delimiter,)
        )
        if len(request.steps) < 2:
            continue
        step = request.steps[-1]
        carried += bool(step.carry)
        writes = tokenizer.encode("x1")[-1:]
        low = Scores(*range(step.cut, len(request.chunk_ids)))
        verdict, policy = judged(request, low, writes, tokenizer=tokenizer)
        assert verdict.step == len(request.steps) - 1
        read = policy.calls[0][1].tolist()
        assert policy.calls[0][2] == request.max_correction - (
            len(read) - 3 - len(request.kept_ids(verdict.step))
        )
        episode.send(verdict)
        assert PROMPT + episode.ids.tolist() == read + list(verdict.correction)
        assert episode.text.startswith(request.kept_text(verdict.step))
    if kind == "bpe":
        assert carried


# --- a scorer that fails


def test_a_scorer_that_gives_nonsense_is_a_judge_error() -> None:
    class Short:
        async def logprobs(self, ids: Any, start: int, *, key: RowKey | None = None) -> Any:
            return np.zeros(1, dtype=np.float32)

    _, request = request_of("ab\n\n")
    for scorer in (Scores(1, value=float("nan")), Short()):
        with pytest.raises(JudgeError, match="log-probs for 4 tokens") as caught:
            asyncio.run(ScoringJudge(scorer, ScriptedPolicy([]), BYTES).review(request))
        assert caught.value.cause == "internal"
        assert caught.value.usage == Usage(prompt_tokens=7)


def test_judge_key_without_a_runner() -> None:
    _, request = request_of("ab\n\n")
    object.__setattr__(request, "key", None)
    assert judge_key(request, "x") == RowKey(0, 0, "t/x", 0)
