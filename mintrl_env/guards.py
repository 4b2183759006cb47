"""Guards: a second look at a Revise, which may turn it into a Keep.

A guard is one `async (request, verdict) -> verdict`. The wrapper's shell, the runner and veRL run the
same ones; what a guard rejects is recorded in the review under its name and uses up one of R.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from mintrl_env.errors import UsageError
from mintrl_env.protocols import Tokenizer
from mintrl_env.types import ReviewRequest, Task, Verdict, VerdictKind

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


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
    """Keeps where a correction gives the answer away: it corrects a step, it never writes the answer.

    Rejected are a correction that
    - holds the gold answer as a word or number of its own (white space and thousands separators
      aside), unless the policy had written that number itself in the kept response or it stands in
      the problem: restating a known value is no leak;
    - begins or continues an answer line (`answer_line`);
    - equals the gold answer by `same_answer`, where one is injected (the math verifier);
    - shares a run of `ngram` words with the privileged context.

    Args:
        tokenizer: decodes corrections given as ids.
        answer_line: a regular expression that finds an answer line at a line's start.
        same_answer: async `(task, text) -> bool`.
        ngram: 0 turns the last rule off.
        allow_seen: the exception of the first rule.
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
        self._tokenizer = tokenizer
        try:
            self._answer_line = re.compile(answer_line, re.MULTILINE) if answer_line else None
        except re.error as error:
            raise UsageError(f"answer_line {answer_line!r} is no regular expression: {error}") from error
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
        if task.answer:
            seen = f"{task.prompt_text}\n{kept}" if self._allow_seen else ""
            if _holds(text, task.answer) and not _holds(seen, task.answer):
                return "the correction holds the answer"
        if self._same_answer is not None and await self._same_answer(task, text):
            return "the correction equals the answer"
        if self._ngram and task.context and _shared_run(text, task.context, self._ngram):
            return f"the correction repeats {self._ngram} words of the reference solution"
        return ""


def _squeeze(text: str) -> str:
    return re.sub(r"(?<=\d),(?=\d{3})|\s+", "", text)


def _holds(text: str, answer: str) -> bool:
    """Is the answer in the text, on its own (not as part of a longer number or word)?"""
    squeezed = _squeeze(answer)
    if not squeezed:
        return False
    number = _NUMBER.fullmatch(squeezed)
    if number:
        wanted = squeezed.rstrip("0").rstrip(".") if "." in squeezed else squeezed
        for match in _NUMBER.finditer(text):
            found = match.group().replace(",", "")
            found = found.rstrip("0").rstrip(".") if "." in found else found
            if found == wanted:
                return True
        return False
    pattern = r"(?<!\w)" + re.escape(squeezed) if squeezed[0].isalnum() else re.escape(squeezed)
    if squeezed[-1].isalnum():
        pattern += r"(?!\w)"
    # A short word answer must stand as a word in the text as written; a longer expression is
    # looked for with all white space gone, since LaTeX is spaced at will.
    if squeezed.isalnum():
        return re.search(pattern, text) is not None
    return squeezed in _squeeze(text)


def _shared_run(text: str, context: str, length: int) -> bool:
    words = re.findall(r"\w+", text.lower())
    if len(words) < length:
        return False
    reference = " " + " ".join(re.findall(r"\w+", context.lower())) + " "
    return any(
        f" {' '.join(words[i : i + length])} " in reference for i in range(len(words) - length + 1)
    )
