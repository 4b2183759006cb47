"""Guards: a second look at a Revise, which may turn it into a Keep.

A guard is one `async (request, verdict) -> verdict`. The wrapper's shell, the runner and veRL run
the same ones; what a guard rejects is recorded in the review under its name and uses up one of R.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from mintrl_env.errors import UsageError
from mintrl_env.leaks import held, shares_run, words_of
from mintrl_env.protocols import Tokenizer
from mintrl_env.types import ReviewRequest, Task, Verdict, VerdictKind

SOLUTIONS = (
    "answer answers canonical_solution context editorial final_answer gold gold_answer gold_solution "
    "proof rationale reference reference_answer reference_solution solution"
).split()
"""Columns of a task's row that may hold its solution, though another one was taken for it."""

_CRITERIA = ("rubric", "rubrics")
_TEXTS = ("reference solution", "tests", *(f"task's {name}" for name in _CRITERIA))
_LEAST_WORDS = 5  # of a shorter text only the whole counts, as of an answer
_READ = 100_000  # characters of one text; hidden tests can have megabytes


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
    - shares a run of `ngram` words with what the policy is not shown of the task and neither the
      problem nor the kept response holds: the reference solution, the tests, a worked-out answer, and
      the row's other columns in `fields`. A shorter text counts where all of it is repeated; one of
      under five words is an answer.

    Args:
        tokenizer: decodes corrections given as ids.
        answer_line: a regular expression that finds an answer line, `^` being a line's start.
        same_answer: async `(task, text) -> bool`.
        ngram: 0 turns the last rule off.
        allow_seen: the exceptions for what is known.
        fields: of the task's metadata; default `SOLUTIONS` and the rubric.
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
        fields: Sequence[str] = (*SOLUTIONS, *_CRITERIA),
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
        if isinstance(fields, str):
            raise UsageError(f"fields is a list of columns, not {fields!r}")
        self._fields = tuple(fields)

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
        hidden = list(_hidden(task, self._fields))
        golds = [text for _, text in hidden if len(words_of(text)) < _LEAST_WORDS]
        for gold in dict.fromkeys([*([task.answer] if task.answer else []), *golds]):
            how = held(text, gold, line)
            if how == "states":
                return "the correction states the answer"
            if how and not held(known, gold):
                return "the correction holds the answer"
        if self._same_answer is not None and await self._same_answer(task, text):
            return "the correction equals the answer"
        for name, reference in hidden if self._ngram else ():
            count = len(words_of(reference))
            if count < _LEAST_WORDS:
                continue
            if shares_run(text, reference, min(self._ngram, count), but_not=known):
                much = f"{self._ngram} words" if count >= self._ngram else "all"
                return f"the correction repeats {much} of the {name}"
        return ""


def _hidden(task: Task, fields: Sequence[str]) -> Iterator[tuple[str, str]]:
    """What the policy is not shown of a task: what it is called, and its text."""
    parts: list[tuple[str, Any]] = [
        ("reference solution", task.context),
        ("answer", task.answer),
        ("tests", task.tests),
        *((f"task's {name}", task.metadata.get(name)) for name in fields),
    ]
    for name, value in parts:
        texts = [text[:_READ] for text in _texts(value)]
        if name in _TEXTS and (name != "reference solution" or task.answer is not None):
            # Single words of these are no answers; of a reference they are, where it is all there is.
            whole = "\n".join(texts)[:_READ]
            texts = [whole] if len(words_of(whole)) >= _LEAST_WORDS else []
        yield from ((name, text) for text in texts)


def _texts(value: Any) -> Iterator[str]:
    """The texts in a column, numbers as texts."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, str):
        if value.strip():
            yield value
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield str(value)
    elif isinstance(value, Sequence) or hasattr(value, "tolist"):
        items = value.tolist() if hasattr(value, "tolist") else value
        for item in items if isinstance(items, Sequence) and not isinstance(items, str) else ():
            yield from _texts(item)
