"""A judge on rows whose first wrong step is known, and in `MinTRL/Judge-v0`.

A row is one review: all its steps are the pending chunk, nothing was accepted before it, the response
has ended. Guards are not asked, since a Keep of theirs says nothing about the judge.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium
import numpy as np

from mintrl_env.episode import Episode, EpisodeConfig, NeedReview
from mintrl_env.errors import JudgeError, UsageError
from mintrl_env.judge_data import JudgeRow
from mintrl_env.judge_metrics import KEEP, Judged
from mintrl_env.judges import KeepJudge
from mintrl_env.keys import RowKey
from mintrl_env.loops import sync
from mintrl_env.prompts import PromptBuilder
from mintrl_env.protocols import Judge, Tokenizer
from mintrl_env.reviewing import review_chunk
from mintrl_env.splice import FENCE, place_of, token_ends
from mintrl_env.statistics import mean_interval
from mintrl_env.types import (
    FailedReview,
    Finish,
    Kind,
    Outcome,
    ReviewRequest,
    Step,
    Task,
    Usage,
    Verdict,
    VerdictKind,
    frozen_ids,
)

BENCH = -3
"""Update number of benchmark reviews and of the rollouts beside them: never a training's draws."""

_UNPARSED = ("unparsed", "bad_step")
_LEAST = 32  # reviews, before a judge that only fails is given up


@dataclass(frozen=True, slots=True)
class RowVerdict:
    """What a judge said of a row.

    Attributes:
        row_id: the row's.
        outcome: keep, revise, failed or unparsed.
        step: of a Revise, 0-based; else -1.
        correction: its text.
        reason, cause: the judge's words; why there is no verdict.
        refused: why an episode would have refused the correction ("": it would have taken it).
        usage: tokens, money, calls; `usage.seconds` is the time that the judge itself tells.
        seconds: from the question to the answer, as it was waited for.
    """

    row_id: str
    outcome: Outcome
    step: int = KEEP
    correction: str = ""
    reason: str = ""
    cause: str = ""
    refused: str = ""
    usage: Usage = field(default_factory=Usage)
    seconds: float = 0.0

    @property
    def predicted(self) -> int | None:
        """The step, -1 for a Keep, None where there was no verdict."""
        return self.step if self.outcome in (Outcome.KEEP, Outcome.REVISE) else None

    def as_dict(self) -> dict[str, Any]:
        usage = {
            name: getattr(self.usage, name)
            for name in ("prompt_tokens", "completion_tokens", "usd", "seconds", "calls")
        }
        values = {name: getattr(self, name) for name in self.__slots__ if name != "usage"}
        return {**values, "outcome": self.outcome.value, "usage": usage}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RowVerdict:
        """Raises TypeError or ValueError where `data` is none of ours."""
        values = {name: data[name] for name in cls.__slots__ if name in data}
        values["outcome"] = Outcome(values["outcome"])
        values["usage"] = Usage(**values.get("usage", {}))
        return cls(**values)


def review_request(
    row: JudgeRow,
    prompts: PromptBuilder,
    *,
    max_correction: int,
    delimiters: Sequence[str] = ("\n\n",),
    seed: int = 0,
    decoded: Callable[[int], str] | None = None,
) -> ReviewRequest:
    """A row as the one review of a finished response.

    Args:
        max_correction: L.
        delimiters: the episode's; the first one that is no code fence stands between the steps.
        decoded: an id's own text; a cache of it makes many rows faster.

    Raises:
        TaskError: a problem that has no prompt.
    """
    joiner = next((d for d in delimiters if d != FENCE), "\n\n")
    last = len(row.steps) - 1
    texts = [s if i == last or s.endswith(joiner) else s + joiner for i, s in enumerate(row.steps)]
    task = Task(row.row_id, row.problem, context=row.context, metadata={"source": row.source})
    tokenizer = prompts.tokenizer
    body, steps = _tokens(texts, tokenizer, decoded or (lambda i: tokenizer.decode([i])))
    return ReviewRequest(
        task=task,
        prompt_ids=frozen_ids(prompts.ids(task)),
        accepted_ids=frozen_ids(()),
        accepted_text="",
        chunk_ids=frozen_ids([*body, min(tokenizer.eos_ids)]),
        steps=steps,
        review=0,
        reviews_left=0,
        max_correction=max_correction,
        finish=Finish.EOS,
        key=RowKey(seed, BENCH, row.row_id, 0),
    )


def _tokens(
    texts: Sequence[str], tokenizer: Tokenizer, decoded: Callable[[int], str]
) -> tuple[list[int], tuple[Step, ...]]:
    """The ids of the steps written one after the other, and the steps with their cuts."""
    whole = "".join(texts)
    starts = np.cumsum([0, *(len(text) for text in texts)])[:-1]
    ids = list(tokenizer.encode(whole))
    pieces = [decoded(i) for i in ids]
    text = "".join(pieces)
    if text == whole:  # each token is a text of its own, as mostly
        ends = np.cumsum([0, *map(len, pieces)])
    else:
        text, ends = token_ends(tokenizer, ids)
    if text == whole:
        cuts = [place_of(ends, int(start)) for start in starts]
        carries = [whole[int(ends[cut]) : start] for cut, start in zip(cuts, starts, strict=True)]
    else:  # the tokenizer can't write it as it is: the steps are what they are all the same
        parts = [list(tokenizer.encode(text)) for text in texts]
        ids = [i for part in parts for i in part]
        cuts = [int(n) for n in np.cumsum([0, *map(len, parts)])[:-1]]
        carries = [""] * len(texts)
    steps = (Step(t, c, carry) for t, c, carry in zip(texts, cuts, carries, strict=True))
    return ids, tuple(steps)


async def judge_row(
    judge: Judge, request: ReviewRequest, tokenizer: Tokenizer, *, deadline_s: float = 1800.0
) -> RowVerdict:
    """One row's review. A judge's failure is a verdict's absence, never an exception."""
    chunk = len(request.chunk_ids)
    episode = Episode(
        request.task,
        request.prompt_ids,
        kind=Kind.INTERVENED,
        tokenizer=tokenizer,
        config=EpisodeConfig(
            chunk_tokens=chunk,
            max_reviews=1,
            max_correction=request.max_correction,
            max_response=chunk + max(request.max_correction, 1),
        ),
    )
    started = time.monotonic()
    try:
        async with asyncio.timeout(deadline_s):
            # What the rules would refuse is recorded beside the verdict, which stands.
            event = await review_chunk(judge, request, check=lambda verdict: "")
    except TimeoutError:
        event = FailedReview("timeout", f"no verdict within {deadline_s:g} s")
    seconds = time.monotonic() - started
    name = request.task.task_id
    if isinstance(event, FailedReview):
        outcome = Outcome.UNPARSED if event.cause in _UNPARSED else Outcome.FAILED
        return RowVerdict(
            name,
            outcome,
            reason=event.reason,
            cause=event.cause,
            usage=event.usage,
            seconds=seconds,
        )
    assert isinstance(event, Verdict)
    if event.kind is VerdictKind.KEEP:
        return RowVerdict(
            name, Outcome.KEEP, reason=event.reason, usage=event.usage, seconds=seconds
        )
    assert event.step is not None
    written = event.correction
    return RowVerdict(
        name,
        Outcome.REVISE,
        event.step,
        written if isinstance(written, str) else tokenizer.decode(written),
        event.reason,
        refused=episode.illegal_because(event, request),
        usage=event.usage,
        seconds=seconds,
    )


async def judge_rows(
    judge: Judge,
    requests: Sequence[ReviewRequest],
    tokenizer: Tokenizer,
    *,
    concurrent: int = 64,
    deadline_s: float = 1800.0,
    max_failure_rate: float = 0.5,
    on_verdict: Callable[[RowVerdict], object] = lambda verdict: None,
) -> list[RowVerdict]:
    """Review rows, at most `concurrent` at once, in their order.

    Args:
        max_failure_rate: above this share of *failed* reviews (a service's doing; an answer that
            can't be parsed is the judge's own, and a result) the run ends.
        on_verdict: called with each verdict when it is there.

    Raises:
        JudgeError: too many reviews failed; the finished ones were handed to `on_verdict`.
    """
    slots, done = asyncio.Semaphore(concurrent), []
    given_up = asyncio.Event()

    async def one(request: ReviewRequest) -> RowVerdict:
        async with slots:
            if given_up.is_set():
                raise asyncio.CancelledError
            verdict = await judge_row(judge, request, tokenizer, deadline_s=deadline_s)
            on_verdict(verdict)
            done.append(verdict)
            failed = [v for v in done if v.outcome is Outcome.FAILED]
            if len(done) < _LEAST or len(failed) <= max_failure_rate * len(done):
                return verdict
            given_up.set()
            raise JudgeError(
                failed[-1].cause,
                f"{len(failed)} of {len(done)} reviews failed, the last one so: "
                f"{failed[-1].reason[:300]!r}. That is more than judge.max_failure_rate = "
                f"{max_failure_rate:g}: mend the judge and go on with --resume",
            )

    tasks = [asyncio.ensure_future(one(request)) for request in requests]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def judged(rows: Sequence[JudgeRow], verdicts: Sequence[RowVerdict]) -> list[Judged]:
    """Rows with their verdicts, as the metrics take them.

    Raises:
        UsageError: a row without a verdict.
    """
    by_id = {verdict.row_id: verdict for verdict in verdicts}
    missing = [row.row_id for row in rows if row.row_id not in by_id]
    if missing:
        raise UsageError(f"row {missing[0]!r} has no verdict ({len(missing)} in all)")
    return [
        Judged(r.problem, len(r.steps), r.first_error, by_id[r.row_id].predicted, r.source)
        for r in rows
    ]


def costs(verdicts: Sequence[RowVerdict]) -> dict[str, Any]:
    """What the reviews cost, and how long they took: totals, and the middle and the slow ones."""
    total = sum((v.usage for v in verdicts), Usage(calls=0))
    seconds = [v.seconds for v in verdicts]
    causes: dict[str, int] = {}
    for verdict in verdicts:
        if verdict.cause:
            causes[verdict.cause] = causes.get(verdict.cause, 0) + 1
    return {
        "calls": total.calls,
        "prompt_tokens": total.prompt_tokens,
        "completion_tokens": total.completion_tokens,
        "usd": total.usd,
        "seconds_p50": float(np.quantile(seconds, 0.5)) if seconds else None,
        "seconds_p95": float(np.quantile(seconds, 0.95)) if seconds else None,
        "no_verdict_by_cause": causes,
        "refused_corrections": sum(bool(v.refused) for v in verdicts),
        "empty_corrections": sum(
            v.outcome is Outcome.REVISE and not v.correction for v in verdicts
        ),
    }


# --- MinTRL/Judge-v0


def play(
    env: gymnasium.Env[Any, Any], judge: Judge, *, seed: int, task_id: str | None = None
) -> tuple[float, dict[str, Any]]:
    """One episode of `MinTRL/Judge-v0` with the judge's verdicts as actions.

    A review that fails is a Keep, as it is in rollouts.

    Returns:
        The reward, and the last step's info.
    """
    options = None if task_id is None else {"task_id": task_id}
    _, info = env.reset(seed=seed, options=options)
    reward, over = 0.0, False
    while not over:
        need = env.get_wrapper_attr("episode").need
        assert isinstance(need, NeedReview)
        # The environment itself says what is illegal, and records it.
        event = sync(review_chunk(judge, need.request, check=lambda verdict: ""))
        action = event if isinstance(event, Verdict) else Verdict.keep(f"failed: {event}")
        if isinstance(event, FailedReview):
            action = replace(action, usage=event.usage)
        _, gained, terminated, truncated, info = env.step(action)
        reward, over = reward + float(gained), terminated or truncated
    return reward, info


def judge_env_gain(
    env: gymnasium.Env[Any, Any], judge: Judge, *, episodes: int, seed: int = 0
) -> dict[str, Any]:
    """The reward that a judge brings in `MinTRL/Judge-v0`, over one that keeps everything.

    Both play the same tasks with the same draws of the policy, so that the difference is paired.
    """
    if episodes < 1:
        raise UsageError(f"episodes must be at least 1, not {episodes}")
    pairs = []
    for episode in range(episodes):
        reward, info = play(env, judge, seed=seed + episode)
        plain, _ = play(env, KeepJudge(), seed=seed + episode, task_id=info["task_id"])
        pairs.append((plain, reward))
    return gain(pairs)


def gain(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """(control, intervened) rewards, one pair a task, as figures with a paired interval."""
    differences = [b - a for a, b in pairs]
    return {
        "tasks": len(pairs),
        "control_reward": sum(a for a, _ in pairs) / len(pairs),
        "intervened_reward": sum(b for _, b in pairs) / len(pairs),
        "reward_gain": sum(differences) / len(pairs),
        "reward_gain_ci95": list(mean_interval(differences)),
    }
