"""Judges without a model: keep everything, compare with a reference, shuffle corrections.

Judges that ask a model are in `judges_scoring.py` and `judges_self.py`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from mintrl_env.errors import JudgeError, UsageError
from mintrl_env.keys import RowKey, uniforms
from mintrl_env.protocols import Judge
from mintrl_env.splice import FENCE, REPLACEMENT, step_starts
from mintrl_env.types import Finish, ReviewRequest, Task, Verdict, VerdictKind


def _context(task: Task) -> str | None:
    return task.context


class KeepJudge:
    """Keeps everything: with it MInTRL's rollouts are plain ones."""

    async def review(self, request: ReviewRequest) -> Verdict:
        return Verdict.keep("keeps everything")


class OracleJudge:
    """Compares each step with a reference solution's step at the same place.

    The first step that differs (white space at its ends aside) is replaced by the reference's. What
    a chunk leaves unfinished is right as far as it goes, unless the policy ended there. What was
    accepted earlier, and what goes on behind the reference's end, is not looked at. Of use where
    solutions are written one way only: procedural tasks, tests, examples.

    Args:
        delimiters: how the reference is split into steps; those of the episode.
        reference: task -> its reference solution; default `task.context`.
        answer_line: steps of the reference that this expression finds are never written.
    """

    def __init__(
        self,
        delimiters: Sequence[str] = ("\n\n", "```"),
        *,
        reference: Callable[[Task], str | None] = _context,
        answer_line: str | None = None,
    ) -> None:
        self._delimiters = tuple(delimiters)
        self._reference = reference
        try:
            self._answer_line = re.compile(answer_line, re.MULTILINE) if answer_line else None
        except re.error as error:
            raise UsageError(f"answer_line {answer_line!r} is no regex: {error}") from error

    async def review(self, request: ReviewRequest) -> Verdict:
        reference = self._reference(request.task)
        if not reference:
            raise JudgeError(
                "internal", f"task {request.task.task_id!r} has no reference solution (context)"
            )
        wanted = [reference[a:b] for a, b in self._places(reference)]
        # The steps of the whole response, since the chunk may begin and end inside one.
        accepted = len(request.accepted_text)
        text = request.accepted_text + request.chunk_text
        places = self._places(text)
        ended = request.finish is Finish.EOS
        # A delimiter closes its step: a whole "= 1" is no beginning of "= 12".
        closed = ended or any(text.endswith(d) for d in self._delimiters if d != FENCE)
        for (start, stop), right in zip(places, wanted, strict=False):
            is_last, written = stop == len(text), text[start:stop].strip()
            if stop <= accepted and not (is_last and ended):
                continue
            if written == right.strip():
                continue
            # Of an unfinished step the last character, too, may be there in part.
            if is_last and not closed and right.strip().startswith(written.rstrip(REPLACEMENT)):
                continue
            if self._answer_line is not None and self._answer_line.search(right):
                return Verdict.keep("the judge never writes the answer line")
            return self._revise(request, start, right)
        return Verdict.keep("as in the reference")

    def _revise(self, request: ReviewRequest, start: int, right: str) -> Verdict:
        """Replace what the response wrote from `start` on by the reference's step."""
        place, index = len(request.accepted_text), 0
        while index + 1 < len(request.steps) and place + len(request.steps[index].text) <= start:
            place, index = place + len(request.steps[index].text), index + 1
        kept = request.kept_text(index)
        if start < place:  # begun in the accepted text
            if not right.startswith(kept[start:]):
                return Verdict.keep("the wrong part was accepted earlier")
            right = right[place - start :]
        else:  # white space in front of the step, which the cut drops too
            right = request.steps[index].text[: start - place] + right
        return Verdict.revise(index, right, f"the reference has {right.strip()!r}")

    def _places(self, text: str) -> list[tuple[int, int]]:
        starts = step_starts(text, self._delimiters)
        return list(pairwise([*starts, len(text)]))


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
        problem = request.task.prompt_text  # a problem may come under several ids
        others = [c for other, c in self._pool if other != problem and c != own]
        self._pool.append((problem, own))
        alike = [c for c in others if type(c) is type(own) and c[0] == own[0]]
        pool = alike or others
        if not pool:
            return replace(verdict, correction="")
        key = request.key if request.key is not None else RowKey(0, 0, request.task.task_id, 0)
        key = replace(key, task_id=f"{key.task_id}/shuffle", draw=request.review)
        u = float(uniforms(key, 1)[0])
        return replace(verdict, correction=pool[int(u * len(pool))])
