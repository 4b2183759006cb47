"""One review from request to event: nothing that a judge does may lose an episode."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from mintrl_env.episode import Episode, EpisodeConfig
from mintrl_env.errors import JudgeCause, JudgeError, UsageError
from mintrl_env.prompts import ByteTokenizer
from mintrl_env.reviewing import guard_verdict, legal_event, review_chunk
from mintrl_env.testing import ScriptedJudge
from mintrl_env.types import (
    Chunk,
    FailedReview,
    Kind,
    ReviewRequest,
    Task,
    Usage,
    Verdict,
    VerdictKind,
)

SPENT = Usage(prompt_tokens=10, completion_tokens=2, usd=0.5)


@pytest.fixture
def episode() -> Episode:
    return Episode(
        Task("t", "p"),
        [1, 2],
        kind=Kind.INTERVENED,
        tokenizer=ByteTokenizer(),
        config=EpisodeConfig(max_correction=3),
    )


def request_of(episode: Episode) -> ReviewRequest:
    request = episode.preview(Chunk(np.array(list(b"a\n\nb"))))
    assert request is not None
    return request


def review(episode: Episode, answer: Any, *guards: Any) -> Any:
    request = request_of(episode)
    return asyncio.run(
        review_chunk(
            ScriptedJudge([answer]),
            request,
            guards=guards,
            check=lambda verdict: episode.illegal_because(verdict, request),
        )
    )


@pytest.mark.parametrize(
    "verdict",
    [Verdict.keep("ok"), Verdict.revise(1, "c"), Verdict.revise(0), Verdict.revise(0, [5])],
)
def test_a_legal_verdict_passes_as_it_is(episode: Episode, verdict: Verdict) -> None:
    assert review(episode, verdict) is verdict


@pytest.mark.parametrize("cause", list(JudgeCause))
def test_a_judge_error_keeps_cause_and_cost(episode: Episode, cause: JudgeCause) -> None:
    event = review(episode, JudgeError(cause, "why", usage=SPENT))
    assert event == FailedReview(cause.value, f"{cause.value}: why", SPENT)
    assert review(episode, JudgeError(cause)).usage == Usage()


def test_any_other_exception_is_internal(episode: Episode) -> None:
    assert review(episode, ZeroDivisionError("x")) == FailedReview(
        "internal", "ZeroDivisionError: x", Usage()
    )


def test_a_step_past_the_end(episode: Episode) -> None:
    event = review(episode, Verdict.revise(2, "c", usage=SPENT))
    assert event == FailedReview("bad_step", "step 2 of a chunk with 2 step(s)", SPENT)


@pytest.mark.parametrize("ids", [[256], [99, 256], [257], [-1]])
def test_a_correction_that_the_rules_refuse(episode: Episode, ids: list[int]) -> None:
    event = review(episode, Verdict.revise(0, ids, usage=SPENT))
    assert (event.kind, event.guard, event.usage) == (VerdictKind.KEEP, "special_token", SPENT)
    assert event.reason


def test_a_guard_that_fails_keeps_the_judges_usage_and_adds_its_own(episode: Episode) -> None:
    async def fails(request: ReviewRequest, verdict: Verdict) -> Verdict:
        raise JudgeError("budget", usage=Usage(usd=0.25, calls=2))

    event = review(episode, Verdict.revise(0, "c", usage=SPENT), fails)
    assert event == FailedReview("budget", "budget", Usage(10, 2, 0.75, 0.0, 3))


def test_a_guard_may_shorten_and_the_rules_look_at_what_it_made(episode: Episode) -> None:
    async def other(request: ReviewRequest, verdict: Verdict) -> Verdict:
        return Verdict.revise(7, "c")

    async def unseen(request: ReviewRequest, verdict: Verdict) -> Verdict:
        raise AssertionError("a bad step ends the round")

    assert review(episode, Verdict.revise(0, "c"), other, unseen).cause == "bad_step"


def test_cancellation_passes_through(episode: Episode) -> None:
    request = request_of(episode)

    async def run() -> None:
        hanging = review_chunk(ScriptedJudge([], latency=60), request, check=lambda verdict: "")
        task = asyncio.ensure_future(hanging)
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_guard_verdict_and_legal_event_are_the_latter_parts(episode: Episode) -> None:
    request = request_of(episode)
    verdict = Verdict.revise(0, "c")
    assert legal_event(request, verdict, lambda v: "") is verdict
    assert asyncio.run(guard_verdict((), request, verdict, check=lambda v: "")) is verdict
    kept = legal_event(request, verdict, lambda v: "no")
    assert kept == verdict.kept_by("special_token", "no")


@pytest.mark.parametrize(
    ("error", "cause"), [(TimeoutError("t"), "timeout"), (ConnectionResetError("r"), "connection")]
)
def test_pythons_own_names_for_a_services_failures(
    episode: Episode, error: Exception, cause: str
) -> None:
    event = review(episode, error)
    assert isinstance(event, FailedReview) and event.cause == cause


def test_megabytes_from_a_judge_cost_nothing(episode: Episode) -> None:
    seen: list[int] = []

    async def guard(request: ReviewRequest, verdict: Verdict) -> Verdict:
        seen.append(len(verdict.correction))
        return verdict

    limit = request_of(episode).max_correction
    for correction in ("y" * 20_000_000, [121] * 2_000_000):
        event = review(episode, Verdict.revise(0, correction, "because " * 10**6), guard)
        assert isinstance(event, Verdict) and len(event.reason) == 20_000
    # What L tokens could hold at 256 characters each, and a little more.
    assert seen == [(limit + 8) * 256, limit + 8]
    failed = review(episode, JudgeError("server", "x" * 10**6))
    assert isinstance(failed, FailedReview) and len(failed.reason) == 20_000


def test_a_judge_that_could_only_fail_is_refused_when_it_is_handed_over() -> None:
    from mintrl_env.judges import KeepJudge
    from mintrl_env.reviewing import check_judge

    class Plain:
        def review(self, request: object) -> Verdict:
            return Verdict.keep()

    check_judge(KeepJudge())
    for judge, why in (
        (KeepJudge, r"the class KeepJudge, not an object of it: pass KeepJudge\(\)"),
        (object(), "the judge object has no `async def review"),
        (Plain(), "Plain.review is a plain function"),
    ):
        with pytest.raises(UsageError, match=why):
            check_judge(judge)
