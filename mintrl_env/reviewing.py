"""One review from request to event: judge, guards, the rules' refusals. Every driver calls this.

A judge is a service that fails, and none of its failures may lose an episode: whatever it does, the
result is an event that `Episode` takes.

    what happened                                 event
    Keep, or a Revise that passes everything      the verdict
    JudgeError                                    FailedReview(its cause)
    TimeoutError, ConnectionError                 FailedReview("timeout"), FailedReview("connection")
    any other exception of judge or guard         FailedReview("internal")
    a step past the chunk's end                   FailedReview("bad_step")
    a guard turned the Revise into a Keep         Keep, under the guard's name
    a correction that the rules refuse            Keep, under the guard name "special_token"

All of them use up one review. Cancellation passes through.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mintrl_env.errors import JudgeCause, JudgeError, UsageError
from mintrl_env.protocols import Guard, Judge
from mintrl_env.splice import clip_correction
from mintrl_env.types import (
    FailedReview,
    ReviewEvent,
    ReviewRequest,
    Usage,
    Verdict,
    VerdictKind,
)

SPECIAL_TOKEN = "special_token"
_CAUSES = ((TimeoutError, JudgeCause.TIMEOUT), (ConnectionError, JudgeCause.CONNECTION))
_REASON = 20_000  # characters; it is stored with every review
Check = Callable[[Verdict], str]
"""Why the episode would refuse a verdict, or "" where it would take it."""


def check_judge(judge: object) -> None:
    """Refuse, when it is handed over, what could only fail at every review.

    Raises:
        UsageError: a class instead of an object, no `review`, or one that is not async.
    """
    name = judge.__name__ if isinstance(judge, type) else type(judge).__name__
    review = getattr(judge, "review", None)
    if isinstance(judge, type):
        raise UsageError(f"the judge is the class {name}, not an object of it: pass {name}()")
    if not callable(review):
        raise UsageError(f"the judge {name} has no `async def review(self, request) -> Verdict`")
    if inspect.isroutine(review) and not inspect.iscoroutinefunction(review):
        raise UsageError(f"{name}.review is a plain function: write `async def review`")


async def review_chunk(
    judge: Judge,
    request: ReviewRequest,
    *,
    guards: Sequence[Guard] = (),
    check: Check,
) -> ReviewEvent:
    """Ask a judge, then the guards in order, then the rules.

    Args:
        judge: its `review` is awaited once; retries are its own business.
        request: what it is shown, from `NeedReview` or `Episode.preview`.
        guards: each sees a Revise and may turn it into a Keep, which ends the round.
        check: `Episode.illegal_because` (with the request, where it comes from `preview`).

    Returns:
        A Verdict that `check` finds legal, or a FailedReview. Never raises an Exception.
    """
    try:
        verdict = _verdict(await judge.review(request), judge)
    except Exception as error:
        return _failed(error, None)
    return await guard_verdict(guards, request, verdict, check=check)


async def guard_verdict(
    guards: Sequence[Guard], request: ReviewRequest, verdict: Verdict, *, check: Check
) -> ReviewEvent:
    """The guards' and the rules' part of `review_chunk`, for a verdict that is there already."""
    verdict = _clipped(request, verdict)
    usage = verdict.usage  # what the judge spent stays counted when a guard fails after it
    try:
        for guard in guards:
            if verdict.kind is VerdictKind.KEEP or _is_past_end(request, verdict):
                break
            verdict = _verdict(await guard(request, verdict), guard)
    except Exception as error:
        return _failed(error, usage)
    return legal_event(request, verdict, check)


def legal_event(request: ReviewRequest, verdict: Verdict, check: Check) -> ReviewEvent:
    """The verdict where the rules take it, else the Keep that is recorded in its place."""
    if _is_past_end(request, verdict):
        reason = f"step {verdict.step} of a chunk with {len(request.steps)} step(s)"
        return FailedReview(JudgeCause.BAD_STEP.value, reason, verdict.usage)
    refused = check(verdict)
    return verdict.kept_by(SPECIAL_TOKEN, refused) if refused else verdict


def _failed(error: Exception, spent: Usage | None) -> FailedReview:
    usage = Usage() if spent is None else spent
    if not isinstance(error, JudgeError):
        reason = f"{type(error).__name__}: {error}"[:_REASON]
        cause = next((c for kind, c in _CAUSES if isinstance(error, kind)), JudgeCause.INTERNAL)
        return FailedReview(cause.value, reason, usage)
    if isinstance(error.usage, Usage):
        usage = error.usage if spent is None else spent + error.usage
    return FailedReview(error.cause.value, str(error)[:_REASON], usage)


def _clipped(request: ReviewRequest, verdict: Verdict) -> Verdict:
    correction: Any = clip_correction(verdict.correction, request.max_correction)
    reason = verdict.reason[:_REASON]
    if len(correction) == len(verdict.correction) and len(reason) == len(verdict.reason):
        return verdict
    return replace(verdict, correction=correction, reason=reason)


def _verdict(answer: object, author: object) -> Verdict:
    if not isinstance(answer, Verdict):
        name = getattr(author, "__name__", type(author).__name__)
        raise TypeError(f"{name} answered {type(answer).__name__}, not a Verdict")
    return answer


def _is_past_end(request: ReviewRequest, verdict: Verdict) -> bool:
    return verdict.step is not None and verdict.step >= len(request.steps)
