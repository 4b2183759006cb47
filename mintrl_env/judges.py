"""Judges that need no model: keep everything, compare with a reference, shuffle another's corrections.

Judges that ask a model are in `judges_scoring.py` and `judges_self.py`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from mintrl_env.errors import JudgeError, UsageError
from mintrl_env.keys import RowKey, uniforms
from mintrl_env.protocols import Judge
from mintrl_env.splice import step_starts
from mintrl_env.types import ReviewRequest, Task, Verdict, VerdictKind


class KeepJudge:
    """Keeps everything: with it MInTRL's rollouts are plain ones."""

    async def review(self, request: ReviewRequest) -> Verdict:
        return Verdict.keep("keeps everything")


class OracleJudge:
    """Compares each step with a reference solution's step at the same place.

    The first step that differs (white space at its ends aside) is replaced by the reference's. Of
    use where solutions are written one way only: procedural tasks, tests, examples.

    Args:
        delimiters: how the reference is split into steps; those of the episode.
        reference: task -> its reference solution; default `task.context`.
        answer_line: steps of the reference that this expression finds are never written.
    """

    def __init__(
        self,
        delimiters: Sequence[str] = ("\n\n", "```"),
        *,
        reference: Callable[[Task], str | None] = lambda task: task.context,
        answer_line: str | None = None,
    ) -> None:
        self._delimiters = tuple(delimiters)
        self._reference = reference
        self._answer_line = re.compile(answer_line, re.MULTILINE) if answer_line else None

    async def review(self, request: ReviewRequest) -> Verdict:
        reference = self._reference(request.task)
        if not reference:
            raise JudgeError(
                "internal", f"task {request.task.task_id!r} has no reference solution (context)"
            )
        wanted = self._split(reference)
        # The chunk's first step may continue a step that the accepted prefix left unfinished.
        begun = self._split(request.accepted_text) if request.accepted_text else []
        written, head = len(begun), ""
        if begun and not any(request.accepted_text.endswith(d) for d in self._delimiters):
            written, head = written - 1, begun[-1]
        for index, step in enumerate(request.steps):
            place = written + index
            if place >= len(wanted):
                break
            text = (head + step.text if index == 0 else step.text).strip()
            is_last = index == len(request.steps) - 1
            right = wanted[place].strip()
            if text == right or (is_last and right.startswith(text)):
                continue
            if self._answer_line is not None and self._answer_line.search(wanted[place]):
                return Verdict.keep("the judge never writes the answer line")
            correction = wanted[place]
            if index == 0 and head:
                if not correction.startswith(head):
                    return Verdict.keep("the wrong part was accepted earlier")
                correction = correction[len(head) :]
            return Verdict.revise(index, correction, f"the reference has {right!r}")
        return Verdict.keep("as in the reference")

    def _split(self, text: str) -> list[str]:
        starts = step_starts(text, self._delimiters)
        return [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]


class ShuffledJudge:
    """A control: another judge's verdicts with the corrections of other problems.

    Each Revise gets a correction that the judge wrote for another problem, one with the same first
    token where there is one, so that the form stays right and only the content is wrong. Until
    another problem has been corrected, a Revise is a bare cut. If a policy learns from this judge,
    it was not the corrections' content that taught it.
    """

    def __init__(self, judge: Judge, *, memory: int = 512) -> None:
        if memory < 1:
            raise UsageError("memory counts corrections and must be >= 1")
        self._judge = judge
        self._pool: deque[tuple[str, str | tuple[int, ...]]] = deque(maxlen=memory)

    async def review(self, request: ReviewRequest) -> Verdict:
        verdict = await self._judge.review(request)
        if verdict.kind is VerdictKind.KEEP or not len(verdict.correction):
            return verdict
        own = verdict.correction
        others = [c for task_id, c in self._pool if task_id != request.task.task_id and c != own]
        self._pool.append((request.task.task_id, own))
        alike = [c for c in others if type(c) is type(own) and c[0] == own[0]]
        pool = alike or others
        if not pool:
            return replace(verdict, correction="")
        key = request.key if request.key is not None else RowKey(0, 0, request.task.task_id, 0)
        u = float(uniforms(replace(key, task_id=f"{key.task_id}/shuffle", draw=request.review), 1)[0])
        return replace(verdict, correction=pool[int(u * len(pool))])
