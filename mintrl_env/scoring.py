"""One score from request to result. Every driver calls this.

A verifier is a service that may fail, and its failure is no verdict on the response:

    what happened                                 result
    a Score                                       the Score
    VerifierError, or any other exception         undecided, status "unavailable"
    UsageError, MissingExtraError                 raised: no later score would be any better
    an answer that is no Score                    UsageError

Cancellation passes through. `score_batch` scores many at once from plain code, by any verifier: the
protocol asks for `score` alone.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from mintrl_env.errors import MissingExtraError, UsageError
from mintrl_env.loops import sync
from mintrl_env.protocols import Verifier
from mintrl_env.types import Score, Task

UNAVAILABLE = "unavailable"


def gold_text(value: Any) -> str | None:
    """The gold answer of a data set's cell; None: there is none. A solution in GSM8K's form ends in
    `#### ANSWER`, and that is the answer: compared as a whole, it would equal no response."""
    return None if value is None else str(value).rpartition("####")[2].strip()


def check_verifier(verifier: object) -> None:
    """Refuse, when it is handed over, what could score no response.

    Raises:
        UsageError: a class instead of an object, no `score`, or one that is not async.
    """
    name = verifier.__name__ if isinstance(verifier, type) else type(verifier).__name__
    score = getattr(verifier, "score", None)
    if isinstance(verifier, type):
        raise UsageError(f"the verifier is the class {name}, not an object of it: pass {name}()")
    if not callable(score):
        raise UsageError(
            f"the verifier {name} has no `async def score(self, task, response) -> Score`"
        )
    if inspect.isroutine(score) and not inspect.iscoroutinefunction(score):
        raise UsageError(f"{name}.score is a plain function: write `async def score`")


async def score_response(verifier: Verifier, task: Task, text: str) -> Score:
    """The verifier's score of a whole response, final EOS left out.

    Raises:
        UsageError: the verifier broke its own rules (a class, a plain `def score`, an infinite
            reward, an answer of another type). MissingExtraError: it needs a package that is not installed.
    """
    try:
        if isinstance(verifier, type):
            check_verifier(verifier)
        asked: Any = verifier.score(task, text)
        if not inspect.isawaitable(asked):
            check_verifier(verifier)
        score = await asked
    except (UsageError, MissingExtraError):
        raise
    except Exception as error:
        return Score.undecided(UNAVAILABLE, f"{type(error).__name__}: {error}")
    if not isinstance(score, Score):
        raise UsageError(
            f"{type(verifier).__name__}.score answered {type(score).__name__}, not a Score: "
            'return Score(reward, "correct"), for instance'
        )
    return score


def score_batch(
    verifier: Verifier, pairs: Iterable[tuple[Task, str]], *, at_once: int = 32
) -> list[Score]:
    """Scores in the order of `pairs`; blocks the calling thread.

    By the verifier's own `score_batch(pairs)` where it has one, else by its `score`, `at_once` of
    them at a time, on the event loop of `sync`.

    Raises:
        as `score_response`.
    """
    todo = list(pairs)
    own = getattr(verifier, "score_batch", None)
    if own is None:
        return sync(_gathered(verifier, todo, at_once))
    try:
        scores = list(own(todo))
    except (UsageError, MissingExtraError):
        raise
    except Exception as error:
        return [Score.undecided(UNAVAILABLE, f"{type(error).__name__}: {error}")] * len(todo)
    if len(scores) != len(todo) or not all(isinstance(score, Score) for score in scores):
        raise UsageError(
            f"{type(verifier).__name__}.score_batch answers one Score for each of {len(todo)} pairs, "
            f"in their order; it answered {len(scores)} things"
        )
    return scores


async def _gathered(verifier: Verifier, pairs: list[tuple[Task, str]], at_once: int) -> list[Score]:
    free = asyncio.Semaphore(at_once)

    async def one(task: Task, text: str) -> Score:
        async with free:
            return await score_response(verifier, task, text)

    jobs = [asyncio.ensure_future(one(task, text)) for task, text in pairs]
    try:
        return list(await asyncio.gather(*jobs))
    finally:
        for job in jobs:
            job.cancel()


def answers_right(verifier: Verifier) -> Callable[[Task, str], Awaitable[bool]]:
    """Whether a text is a right answer to a task, by a verifier: what guards ask for."""

    async def same_answer(task: Task, text: str) -> bool:
        return (await verifier.score(task, text)).reward >= 1.0

    return same_answer
