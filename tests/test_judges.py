"""Judges without a model: the oracle at every border, shuffled corrections, keeping everything."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mintrl_env.episode import Episode, EpisodeConfig, Finished, NeedChunk, NeedReview, NeedScore
from mintrl_env.errors import JudgeError, UsageError
from mintrl_env.judges import KeepJudge, OracleJudge, ShuffledJudge
from mintrl_env.keys import RowKey
from mintrl_env.prompts import ByteTokenizer
from mintrl_env.tasks import sum_tasks
from mintrl_env.testing import ScriptedJudge
from mintrl_env.types import (
    Chunk,
    Finish,
    Kind,
    ReviewRequest,
    Score,
    Task,
    Usage,
    Verdict,
    VerdictKind,
    frozen_ids,
)

TOKENS = ByteTokenizer()
SUM = "12 + 30 = 42\n\n42 + 5 = 47\n\n"
CHAIN = "a6*9\n=2\nb2*4\n=7\nBc8f3\n"
FENCED = "Think é.\n\n```python\nx = 1\n\ny = 2\n```\nSo y = 2.\n\nDone 日.\n\n"


def request_of(
    chunk: str,
    accepted: str = "",
    *,
    reference: str | None = SUM,
    delimiters: tuple[str, ...] = ("\n\n", "```"),
    end: bool = False,
    task_id: str = "t",
    prompt: str = "p",
) -> ReviewRequest:
    episode = Episode(
        Task(task_id, prompt, context=reference),
        [1],
        kind=Kind.INTERVENED,
        tokenizer=TOKENS,
        config=EpisodeConfig(chunk_tokens=4096, max_response=65536, step_delimiters=delimiters),
    )
    if accepted:
        episode.send(Chunk(frozen_ids(TOKENS.encode(accepted))))
        episode.send(Verdict.keep())
    ids = TOKENS.encode(chunk) + [TOKENS.EOS] * end
    request = episode.preview(Chunk(frozen_ids(ids), finish=Finish.EOS if end else Finish.LENGTH))
    assert request is not None
    return request


def judge(request: ReviewRequest, **options: Any) -> tuple[int, str] | None:
    """Step and correction of the oracle's Revise, or None for a Keep."""
    verdict = asyncio.run(OracleJudge(**options).review(request))
    if verdict.kind is VerdictKind.KEEP:
        return None
    assert verdict.step is not None and isinstance(verdict.correction, str)
    return verdict.step, verdict.correction


LINES = {"delimiters": ("\n",)}


def chain(chunk: str, accepted: str = "", end: bool = False, **options: Any) -> Any:
    return judge(request_of(chunk, accepted, reference=CHAIN, end=end, **LINES), **LINES, **options)


@pytest.mark.parametrize(
    ("accepted", "chunk", "wanted"),
    [
        ("", SUM, None),
        ("", "12 + 30 = 42\n\n", None),
        ("", "12 + 30", None),  # unfinished
        ("", "12 + 30 = 4", None),
        ("", "12 + 30 = 4\n\n", (0, "12 + 30 = 42\n\n")),  # finished by its delimiter
        ("12 + 30 = 4", "\n", None),
        ("", "12 + 30 = 41\n\n42", (0, "12 + 30 = 42\n\n")),
        ("", "12 + 30 = 42\n\n42 + 5 = 48\n\n", (1, "42 + 5 = 47\n\n")),
        ("", " 12 + 30 = 42 \n\n\n42 + 5 = 4", None),  # white space at the ends
        ("", "12+30 = 42\n\n", (0, "12 + 30 = 42\n\n")),  # and inside
        ("", "42 + 5 = 47\n\n", (0, "12 + 30 = 42\n\n")),  # a step was skipped
        ("12 + 30 = 42\n\n", "so 42\n\n42 + 5 = 47\n\n", (0, "42 + 5 = 47\n\n")),  # one too many
        ("", SUM + "thanks\n\n", None),  # behind the reference's end
        (SUM, "thanks\n\n", None),
        # The chunk begins inside a step.
        ("12 + 3", "0 = 42\n\n42 + 6", (1, "42 + 5 = 47\n\n")),
        ("12 + 3", "0 = 42\n\n42 + ", None),
        ("12 + 3", "1 = 43\n\n", (0, "0 = 42\n\n")),
        ("12 + 30 = 42\n\n42 + ", "6", (0, "5 = 47\n\n")),
        ("12 + 40", " = 52\n\n", None),  # the wrong part was accepted earlier
        ("12 + 40 = 52\n\n42 + ", "6", (0, "5 = 47\n\n")),  # and is looked at no more
        # It begins inside a delimiter.
        ("12 + 30 = 42\n", "\n42 + 5 = 4", None),
        ("12 + 30 = 42\n", "\n43", (0, "\n42 + 5 = 47\n\n")),
        ("12 + 30 = 42", "\n\n43", (0, "\n\n42 + 5 = 47\n\n")),
        ("12 + 30 = 4", "\n\n42 + 5", (0, "2\n\n")),  # what was accepted had to go on
        ("12 + 30 = 42", "\n43\n\n", (0, "\n\n")),
        ("12 + 30 = 42\n\n", "\n \n43", (0, "\n42 + 5 = 47\n\n")),
    ],
)
def test_sums(accepted: str, chunk: str, wanted: tuple[int, str] | None) -> None:
    assert judge(request_of(chunk, accepted)) == wanted


@pytest.mark.parametrize(
    ("accepted", "chunk", "wanted"),
    [
        ("", CHAIN, None),
        ("", "a6*9\n=3\nb3*4\n", (1, "=2\n")),
        ("a6*9\n", "=2\nb2*", None),
        ("a6*9\n=", "3\nb3", (0, "2\n")),
        ("a6*", "8\n", (0, "9\n")),
        ("a6*9", "\n=3\n", (0, "\n=2\n")),
        ("a6*9\n=2\nb2*4\n=7\n", "Bc8f4\n", (0, "Bc8f3\n")),
    ],
)
def test_table_chains(accepted: str, chunk: str, wanted: tuple[int, str] | None) -> None:
    assert chain(chunk, accepted) == wanted


def test_the_answer_line_is_never_written() -> None:
    assert chain("Bc8f4\n", "a6*9\n=2\nb2*4\n=7\n", answer_line="^B") is None
    assert chain("=8\nBc8f4\n", "a6*9\n=2\nb2*4\n", answer_line="^B") == (0, "=7\n")
    # Nor where the policy skips to it: the step that is missing may be written.
    assert chain("Bc8f3\n", "a6*9\n=2\n", answer_line="^B") == (0, "b2*4\n")
    with pytest.raises(UsageError, match="answer_line"):
        OracleJudge(answer_line="(")


def test_a_response_that_ended_is_not_unfinished() -> None:
    assert chain("a6*9\n=", end=False) is None
    assert chain("a6*9\n=", end=True) == (1, "=2\n")
    assert chain("a6*9\n=2", end=True) is None  # the step is whole, only the next ones are missing
    assert chain("", "a6*9\n=", end=True) == (0, "2\n")  # nothing but EOS
    assert chain("", "a6*9\n", end=True) is None
    assert chain("", "a6*8", end=True) is None


def test_code_fences_that_close_in_the_accepted_text() -> None:
    at = FENCED.index("So y")
    assert judge(request_of("So y = 3.\n\n", FENCED[:at], reference=FENCED)) == (
        0,
        "So y = 2.\n\n",
    )
    at = FENCED.index("thon")
    fenced = request_of("thon\nx = 1\n\ny = 3\n```\nSo", FENCED[:at], reference=FENCED)
    assert judge(fenced) == (1, "y = 2\n```\n")


def test_without_a_reference() -> None:
    for reference in (None, ""):
        with pytest.raises(JudgeError, match="internal: task 't' has no reference") as caught:
            judge(request_of("x", reference=reference))
        assert caught.value.cause == "internal"
    request = request_of("1\n\n", reference=None)
    assert judge(request, reference=lambda task: "2\n\n") == (0, "2\n\n")


def test_an_oracle_pickles() -> None:
    again = pickle.loads(pickle.dumps(OracleJudge(answer_line="^B")))
    assert asyncio.run(again.review(request_of("13"))).step == 0


@settings(max_examples=150, deadline=None)
@given(
    reference=st.sampled_from([SUM, CHAIN, FENCED, "a\n\nb", "é\n\n\n\n日\n\n"]),
    lines=st.booleans(),
    chunk_tokens=st.integers(1, 20),
    faults=st.lists(st.integers(0, 25), max_size=30),
)
def test_whatever_the_policy_writes_the_oracle_leads_back(
    reference: str, lines: bool, chunk_tokens: int, faults: list[int]
) -> None:
    """Bytes as tokens: chunk borders fall into steps, delimiters, fences and characters."""
    delimiters = ("\n",) if lines else ("\n\n", "```")
    whole, answers = TOKENS.encode(reference), iter(faults)
    config = EpisodeConfig(
        chunk_tokens=chunk_tokens,
        max_reviews=500,
        max_correction=200,
        max_response=100_000,
        step_delimiters=delimiters,
    )
    episode = Episode(
        Task("t", "p", context=reference),
        [1],
        kind=Kind.INTERVENED,
        tokenizer=TOKENS,
        config=config,
    )
    oracle, clean = OracleJudge(delimiters), 0
    while not isinstance(need := episode.need, Finished):
        if isinstance(need, NeedScore):
            episode.send(Score(1.0, "correct"))
        elif isinstance(need, NeedReview):
            verdict = asyncio.run(oracle.review(need.request))
            if clean:  # what is right is never corrected
                assert verdict.kind is VerdictKind.KEEP
            episode.send(verdict)
        else:
            assert isinstance(need, NeedChunk)
            done = len(episode.ids)
            assert episode.ids.tolist() == whole[:done]  # all wrong text is gone again
            ids = whole[done : done + need.max_tokens]
            fault = next(answers, None)
            # White space at a step's ends is nobody's business, and half a character that was
            # accepted can't be completed by any text.
            whole_characters = TOKENS.encode(TOKENS.decode(whole[:done])) == whole[:done]
            clean = (
                fault is None
                or fault >= len(ids)
                or chr(ids[fault]).isspace()
                or not whole_characters
            )
            if not clean and fault is not None:
                ids[fault] = ord("Z")
            end = done + len(ids) == len(whole) and len(ids) < need.max_tokens
            ids += [TOKENS.EOS] * end
            episode.send(Chunk(frozen_ids(ids), finish=Finish.EOS if end else Finish.LENGTH))
    assert episode.text == reference


def test_the_oracle_solves_the_built_in_sums() -> None:
    for task in sum_tasks(count=3):
        assert task.context is not None
        good = request_of(task.context, reference=task.context)
        assert judge(good) is None
        bad = task.context.replace(f"= {task.answer}", "= 1")
        step = task.context.split("\n\n")[1] + "\n\n"
        assert judge(request_of(bad, reference=task.context)) == (1, step)


def test_keep_keeps() -> None:
    verdict = asyncio.run(KeepJudge().review(request_of("anything")))
    assert verdict.kind is VerdictKind.KEEP and verdict.guard is None


# --- shuffled


def shuffled(
    script: list[tuple[str, str, Verdict]], **options: Any
) -> tuple[list[Verdict], ShuffledJudge]:
    """The shuffled judge's answers to (task id, problem, the inner judge's verdict) in turn."""
    answers = iter([verdict for _, _, verdict in script])
    wrapped = ShuffledJudge(ScriptedJudge(lambda request: next(answers)), **options)
    requests = [request_of("x", task_id=i, prompt=p) for i, p, _ in script]

    async def run() -> list[Verdict]:
        return [await wrapped.review(request) for request in requests]

    return asyncio.run(run()), wrapped


def test_shuffled_never_gives_the_own_problems_correction() -> None:
    # The same problem under two ids, as a trainer names it when it comes twice in an update.
    script = [(f"t{i}", f"problem {i % 4}", Verdict.revise(0, f"=c{i % 4}{i}")) for i in range(40)]
    verdicts, _ = shuffled(script)
    for place, ((_, problem, _), verdict) in enumerate(zip(script, verdicts, strict=True)):
        text = verdict.correction
        assert isinstance(text, str)
        if place == 0:
            assert text == ""  # nobody else has been corrected: a bare cut
        else:
            assert text.startswith("=c") and text[2] != problem[-1]
            assert text in {v.correction for _, _, v in script[:place]}  # a real one, seen before
    assert len({v.correction for v in verdicts}) > 10
    assert verdicts == shuffled(script)[0]


def test_shuffled_keeps_form_verdict_and_cost() -> None:
    usage = Usage(usd=1.0)
    script = [
        ("a", "A", Verdict.revise(0, "=1")),
        ("b", "B", Verdict.revise(0, "b2")),
        ("c", "C", Verdict.revise(0, [7, 1])),
        ("d", "D", Verdict.revise(3, "=4", "why", usage)),  # as =1
        ("e", "E", Verdict.revise(0, "b5")),  # as b2
        ("f", "F", Verdict.revise(0, [7, 9])),  # as [7, 1]
        ("g", "G", Verdict.keep("fine", usage)),
        ("h", "H", Verdict.revise(2, "", "cut", usage)),
        ("i", "I", JudgeError("timeout")),
    ]
    verdicts, judge_ = shuffled(script[:-1])
    assert verdicts[3] == Verdict.revise(3, "=1", "why", usage)
    assert verdicts[4].correction == "b2"
    assert verdicts[5].correction == (7, 1)
    assert verdicts[6:8] == [script[6][2], script[7][2]]
    with pytest.raises(JudgeError, match="timeout"):
        shuffled(script)
    assert all(len(correction) for _, correction in judge_._pool)


def test_shuffled_is_the_same_whoever_else_is_there_and_differs_by_draw() -> None:
    script = [(f"t{i}", f"p{i}", Verdict.revise(0, f"={i}")) for i in range(20)]
    _, wrapped = shuffled(script)
    pool = list(wrapped._pool)

    def ask(key: RowKey) -> Any:
        again = ShuffledJudge(ScriptedJudge([Verdict.revise(0, "=x")]))
        again._pool.extend(pool)
        request = request_of("x", task_id="new", prompt="new")
        object.__setattr__(request, "key", key)
        return asyncio.run(again.review(request)).correction

    keys = [RowKey(0, 0, "new", rollout) for rollout in range(12)]
    assert [ask(key) for key in keys] == [ask(key.at(5)) for key in keys]
    assert len({ask(key) for key in keys}) > 3


def test_shuffled_memory_is_bounded() -> None:
    script = [(f"t{i}", f"p{i}", Verdict.revise(0, f"={i}")) for i in range(9)]
    _, wrapped = shuffled(script, memory=4)
    assert [correction for _, correction in wrapped._pool] == ["=5", "=6", "=7", "=8"]
    with pytest.raises(UsageError, match="memory"):
        ShuffledJudge(KeepJudge(), memory=0)
