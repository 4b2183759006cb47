"""The self-judge: the policy's first version, shown what the policy is not (a reference solution).

A small model can't be trusted to write a verdict in JSON, so none is written: Keep and the number
of each step are scored as answers, by log-prob, and the best one is the verdict. Nothing is parsed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mintrl_env.errors import JudgeError, UsageError
from mintrl_env.judge_prompts import PRIVILEGED, Privileged, RunTests, fill, given_text
from mintrl_env.judges_scoring import judge_key, write_correction
from mintrl_env.protocols import Policy, Sampling, Scorer, Tokenizer
from mintrl_env.types import ReviewRequest, Usage, Verdict, frozen_ids

VERDICT_PROMPT = """\
You check a student's solution, step by step, against a reference solution.

Problem:
{problem}

Reference solution (the student can't see it):
{context}

The student's solution so far:
{accepted}

The next steps of the student, numbered:
{steps}

If all of these steps are right, answer Keep. Otherwise answer the number of the earliest step that \
is wrong. A step that is only unfinished is not wrong.
Answer with one word or number."""

CORRECTION_PROMPT = """\
Solve the problem step by step in your own words. A reference solution is given for your eyes \
only: never mention it, and don't state the final answer before it follows from your steps.

Problem:
{problem}

Reference solution:
{context}"""

NO_CONTEXT = "(not available)"


@dataclass(frozen=True, slots=True)
class SelfJudgePrompts:
    """The two prompts. Fields: {problem}, {context}, and for the verdict {accepted} and {steps};
    other braces are text.

    Raises:
        UsageError: a prompt without its {context}, a verdict's without {steps}.
    """

    verdict: str = VERDICT_PROMPT
    correction: str = CORRECTION_PROMPT

    def __post_init__(self) -> None:
        for name, fields in (("verdict", ("context", "steps")), ("correction", ("context",))):
            for field in fields:
                if f"{{{field}}}" not in getattr(self, name):
                    raise UsageError(f"the self-judge's {name} prompt does not hold {{{field}}}")


class SelfJudge:
    """Verdict by scored answers, correction as a continuation of the kept prefix.

    Args:
        scorer, policy: pi_0, with the policy's tokenizer (with LoRA: the adapter disabled).
        tokenizer: theirs.
        chat_ids: user text -> prompt ids, with the generation prompt (`PromptBuilder`'s template).
        prompts: the texts.
        contrast: score each answer by how much *more* likely the reference makes it, since a small
            model's taste for one number or word is otherwise stronger than anything that it read.
        keep_bonus: nats added to Keep; higher means fewer corrections.
        max_steps: steps shown and offered as answers; those after it are not looked at. From 10 on
            a number begins like another, which weighs on the scores.
        stop: strings that end a correction.
        temperature: of the correction.
        privileged: the context z: the task's reference solution, its rubric, its tests, or "none"
            beside `run_tests`.
        rubric_field: where the task's metadata hold the rubric.
        run_tests: its words on how the response so far fares under tests are part of z.
    """

    def __init__(
        self,
        scorer: Scorer,
        policy: Policy,
        tokenizer: Tokenizer,
        *,
        chat_ids: Callable[[str], Sequence[int]],
        prompts: SelfJudgePrompts = SelfJudgePrompts(),
        contrast: bool = True,
        keep_bonus: float = 0.0,
        max_steps: int = 9,
        stop: Sequence[str] = ("\n\n",),
        temperature: float = 1.0,
        privileged: Privileged = "reference",
        rubric_field: str = "rubric",
        run_tests: RunTests | None = None,
    ) -> None:
        if max_steps < 1:
            raise UsageError("max_steps must be >= 1")
        if privileged not in PRIVILEGED or (privileged == "none" and run_tests is None):
            known = ", ".join(PRIVILEGED[1:])
            raise UsageError(f"privileged is one of {known}, not {privileged!r}: without a context "
                             "the self-judge knows no more than the policy")  # fmt: skip
        self._scorer, self._policy, self._tokenizer = scorer, policy, tokenizer
        self._chat_ids = chat_ids
        self._prompts = prompts
        self._contrast = contrast
        self._keep_bonus = keep_bonus
        self._max_steps = max_steps
        self._stop = tuple(stop)
        self._sampling = Sampling(temperature=temperature)
        self._privileged, self._rubric_field = privileged, rubric_field
        self._run_tests = run_tests

    async def _context(self, request: ReviewRequest) -> str:
        """z: what the judge knows and the policy does not. No driver puts it into a prompt of the
        policy's; `LeakGuard` looks for it in corrections."""
        task = request.task
        if self._privileged == "reference":
            known = (task.context or "").strip()
        else:
            known = given_text(task, self._privileged, rubric_field=self._rubric_field).strip()
        if self._run_tests is not None:
            outcome = await self._run_tests(task, request.accepted_text + request.chunk_text)
            known = "\n\n".join(part for part in (known, outcome) if part)
        elif not known:
            raise JudgeError(
                "internal",
                f"task {task.task_id!r} has no privileged context for a self-judge: map it "
                "with tasks.columns.context",
            )
        return known or NO_CONTEXT

    async def review(self, request: ReviewRequest) -> Verdict:
        started = time.monotonic()
        if not request.chunk_text.strip():
            return Verdict.keep("nothing but the end", Usage(calls=0))
        context = await self._context(request)
        if context == NO_CONTEXT:  # no test has run yet: there is nothing to know better by
            return Verdict.keep("no outcome of tests yet", Usage(calls=0))
        answers = ["Keep", *map(str, range(1, min(len(request.steps), self._max_steps) + 1))]
        scores, usage = await self._score(request, context, answers, "verdict")
        if self._contrast:
            prior, cost = await self._score(request, NO_CONTEXT, answers, "prior")
            with np.errstate(invalid="ignore"):  # -inf less -inf is NaN, and refused below
                scores = scores - prior
            usage = usage + cost
        if np.isnan(scores).any():
            raise JudgeError("internal", f"log-probs of {answers} are {scores}", usage=usage)
        scores[0] += self._keep_bonus
        best = int(np.argmax(scores))
        reason = ", ".join(f"{a} {s:+.2f}" for a, s in zip(answers, scores, strict=True))
        if best == 0:
            return Verdict.keep(reason, replace(usage, seconds=time.monotonic() - started))
        prompt = fill(self._prompts.correction, problem=request.task.prompt_text, context=context)
        correction, cost = await write_correction(
            self._policy,
            self._tokenizer,
            self._chat_ids(prompt),
            request,
            best - 1,
            stop=self._stop,
            sampling=self._sampling,
            key=judge_key(request, "correction"),
        )
        usage = replace(usage + cost, seconds=time.monotonic() - started)
        return Verdict.revise(best - 1, correction, reason, usage)

    async def _score(
        self, request: ReviewRequest, context: str, answers: Sequence[str], purpose: str
    ) -> tuple[np.ndarray, Usage]:
        """Log-prob of each answer after the verdict prompt, summed over its tokens."""
        steps = request.steps[: self._max_steps]
        text = fill(
            self._prompts.verdict,
            problem=request.task.prompt_text,
            context=context,
            accepted=request.accepted_text.strip() or "(nothing yet)",
            steps="\n".join(f"{i}. {s.text.strip()}" for i, s in enumerate(steps, 1)),
        )
        head = list(self._chat_ids(text))
        key = judge_key(request, purpose)
        scores = np.empty(len(answers))
        # One row, one answer after the other: the engine keeps the prompt's KV between them.
        for index, answer in enumerate(answers):
            ids = [*head, *self._tokenizer.encode(answer)]
            logprobs = await self._scorer.logprobs(frozen_ids(ids), len(head), key=key)
            scores[index] = float(np.sum(logprobs, dtype=np.float64))
        return scores, Usage(prompt_tokens=len(head), completion_tokens=1)
