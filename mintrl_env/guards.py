"""Guards: a second look at a Revise, which may turn it into a Keep.

A guard is one `async (request, verdict) -> verdict`. The wrapper's shell, the runner and veRL run
the same ones; what a guard rejects is recorded in the review under its name and uses up one of R.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from mintrl_env.errors import UsageError
from mintrl_env.leaks import held, shares_run
from mintrl_env.protocols import Tokenizer
from mintrl_env.types import ReviewRequest, Task, Verdict, VerdictKind


class SpecialTokenGuard:
    """Keeps where a correction holds EOS or another special token: only the policy ends a response.

    Always on in every driver, since `Episode` refuses such corrections.
    """

    name = "special_token"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def __call__(self, request: ReviewRequest, verdict: Verdict) -> Verdict:
        if verdict.kind is VerdictKind.KEEP:
            return verdict
        ids = verdict.correction
        if isinstance(ids, str):
            ids = tuple(self._tokenizer.encode(ids))
        if any(i in self._tokenizer.special_ids for i in ids):
            return verdict.kept_by(self.name, "the correction holds a special token")
        return verdict


class LeakGuard:
    """Keeps where a correction gives the answer away: a judge corrects a step, no more.

    Rejected are a correction that
    - begins or continues an answer line (`answer_line`);
    - holds the gold answer on its own (`mintrl_env.leaks.held`), unless the kept response or the
      problem holds it too: restating a known value is no leak. What the cut drops doesn't count;
    - states the gold answer as the answer, whatever is known;
    - equals the gold answer by `same_answer`, where one is injected (the math verifier);
    - shares a run of `ngram` words with the privileged context that neither the problem nor the
      kept response holds.

    Args:
        tokenizer: decodes corrections given as ids.
        answer_line: a regular expression that finds an answer line, `^` being a line's start.
        same_answer: async `(task, text) -> bool`.
        ngram: 0 turns the last rule off.
        allow_seen: the exceptions for what is known.
    """

    name = "leak"

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        answer_line: str | None = None,
        same_answer: Callable[[Task, str], Awaitable[bool]] | None = None,
        ngram: int = 8,
        allow_seen: bool = True,
    ) -> None:
        if isinstance(ngram, bool) or not isinstance(ngram, int) or ngram < 0:
            raise UsageError(f"ngram counts words and must be an integer >= 0, not {ngram!r}")
        self._tokenizer = tokenizer
        try:
            self._answer_line = re.compile(answer_line, re.MULTILINE) if answer_line else None
        except re.error as error:
            raise UsageError(f"answer_line {answer_line!r} is no regex: {error}") from error
        self._same_answer = same_answer
        self._ngram = ngram
        self._allow_seen = allow_seen

    async def __call__(self, request: ReviewRequest, verdict: Verdict) -> Verdict:
        if verdict.kind is VerdictKind.KEEP or not len(verdict.correction):
            return verdict
        text = verdict.correction
        if not isinstance(text, str):
            text = self._tokenizer.decode(text)
        assert verdict.step is not None
        # An out-of-range step is another check's business; there is nothing to look at here.
        step = min(verdict.step, len(request.steps) - 1)
        why = await self._leak(request, request.kept_text(step), text)
        return verdict.kept_by(self.name, why) if why else verdict

    async def _leak(self, request: ReviewRequest, kept: str, text: str) -> str:
        line = kept[kept.rfind("\n") + 1 :]
        if self._answer_line is not None and self._answer_line.search(line + text):
            return "the correction writes the answer line"
        task = request.task
        known = f"{task.prompt_text}\n{kept}" if self._allow_seen else ""
        how = held(text, task.answer, line) if task.answer else ""
        if how == "states":
            return "the correction states the answer"
        if how and task.answer and not held(known, task.answer):
            return "the correction holds the answer"
        if self._same_answer is not None and await self._same_answer(task, text):
            return "the correction equals the answer"
        if (
            self._ngram
            and task.context
            and shares_run(text, task.context, self._ngram, but_not=known)
        ):
            return f"the correction repeats {self._ngram} words of the reference solution"
        return ""
