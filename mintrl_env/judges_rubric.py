"""Repair by rubrics: a validator finds the failed rubric, a corrector writes, a verifier looks again.

Our reading of RTI, of which an abstract is public: the corrector sees the rubrics, so what it writes
may carry them into the response. Hence three looks at a correction, the cheapest first:

    stage            a correction fails it where                                   recorded as
    rubric_overlap   it has a run of n words that a rubric has and the student     Keep, that guard
                     has not seen
    not_derivable    a model that is not shown the rubrics says that nobody        Keep, that guard
                     could come to it
    perplexity       the policy finds it too surprising (`PerplexityGate`)         Keep, that guard
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mintrl_env.chat import ChatMessage, ChatModel
from mintrl_env.errors import JudgeCause, JudgeError, UsageError
from mintrl_env.judge_corrections import correction_verdict
from mintrl_env.judge_parsing import (
    Answer,
    last_object,
    parse_answer,
    step_index,
    unparsed,
)
from mintrl_env.judge_prompts import (
    NOTHING,
    JudgePrompts,
    block,
    case_values,
    numbered,
    rubrics_of,
)
from mintrl_env.judges_chat import Asker, answer_schema, verdict_turn, write_step
from mintrl_env.leaks import shares_run
from mintrl_env.protocols import Guard, Tokenizer
from mintrl_env.surrogates import whole_text
from mintrl_env.types import ReviewRequest, Usage, Verdict, VerdictKind

OVERLAP, NOT_DERIVABLE = "rubric_overlap", "not_derivable"

_RUBRIC = {"rubric": {"type": ["integer", "null"]}}
_DERIVABLE: Mapping[str, Any] = {
    "type": "object",
    "properties": {"reason": {"type": "string"}, "derivable": {"type": "boolean"}},
    "required": ["reason", "derivable"],
    "additionalProperties": False,
}


class ValidatorCorrectorVerifier:
    """A judge that repairs a response by its task's rubrics.

    Args:
        chat: validator and corrector.
        tokenizer: the policy's, in which corrections are cut to L tokens here; None leaves that to the
            episode.
        prompts: default those of the domain "rubric".
        verifier: who is asked whether a correction is derivable; default `chat`.
        rubric_field: where the task's metadata hold the rubrics.
        ngram: words in a row that count as a rubric's; 0 leaves the stage out.
        derivable: False leaves that stage out.
        gate: the last stage, a `PerplexityGate` as a rule; None leaves it out.
        delimiters: of steps; those of the episode.
        temperature: of corrections; verdicts and checks are greedy.
        verdict_tokens: the most that a verdict or a check may have.

    Raises:
        UsageError: a number that makes no sense, a prompt that is missing.
    """

    def __init__(
        self,
        chat: ChatModel,
        tokenizer: Tokenizer | None = None,
        *,
        prompts: JudgePrompts | None = None,
        verifier: ChatModel | None = None,
        rubric_field: str = "rubric",
        ngram: int = 5,
        derivable: bool = True,
        gate: Guard | None = None,
        delimiters: Sequence[str] = ("\n\n", "```"),
        temperature: float = 1.0,
        verdict_tokens: int = 512,
    ) -> None:
        if isinstance(ngram, bool) or not isinstance(ngram, int) or ngram < 0:
            raise UsageError(f"ngram counts words and must be an integer >= 0, not {ngram!r}")
        if not temperature >= 0:
            raise UsageError(f"temperature must be >= 0, not {temperature!r}")
        if not verdict_tokens >= 1:
            raise UsageError(f"verdict_tokens must be >= 1, not {verdict_tokens!r}")
        self._prompts = prompts if prompts is not None else JudgePrompts.load("rubric")
        needed = ["review", "case", "correct", *(["derive", "derive_case"] if derivable else [])]
        missing = [section for section in needed if not self._prompts.has(section)]
        if missing:
            raise UsageError(f"the judge's prompts have no section [[{missing[0]}]]")
        self._chat, self._tokenizer = chat, tokenizer
        self._verifier = verifier if verifier is not None else chat
        self._rubric_field = rubric_field
        self._ngram = ngram
        self._derivable = derivable
        self._gate = gate
        self._delimiters = tuple(delimiters)
        self._temperature = temperature
        self._verdict_tokens = verdict_tokens

    async def review(self, request: ReviewRequest) -> Verdict:
        """Validate, correct, verify.

        Raises:
            JudgeError: a stage gave no usable answer; with the cost of all calls. "internal" where
                the task has no rubrics.
        """
        if not request.chunk_text.strip():
            return Verdict.keep("nothing but the end", Usage(calls=0))
        asker = Asker(self._chat, request)
        with asker.accounted():
            rubrics = rubrics_of(request.task, self._rubric_field)
            if not rubrics:
                raise JudgeError(
                    JudgeCause.INTERNAL,
                    f"task {request.task.task_id!r} has no rubric: its row needs a field "
                    f"{self._rubric_field!r}",
                )
            verdict = await self._repair(request, rubrics, asker)
            if verdict.kind is VerdictKind.REVISE and len(verdict.correction):
                verdict = await self._verify(request, verdict, rubrics, asker)
            return replace(verdict, usage=asker.usage)

    async def _repair(
        self, request: ReviewRequest, rubrics: Sequence[str], asker: Asker
    ) -> Verdict:
        given = block("rubric", numbered(rubrics))
        values = case_values(request, given, delimiters=self._delimiters)
        said = [
            ChatMessage("system", self._prompts.text("review")),
            ChatMessage("user", self._prompts.text("case", **values)),
        ]
        reply = await asker.ask(
            said,
            max_tokens=self._verdict_tokens,
            temperature=0.0,
            schema=answer_schema(**_RUBRIC),
        )
        answer, rubric = self._parse(reply.text, len(request.steps), len(rubrics))
        if answer.step is None:
            return Verdict.keep(answer.reason)
        reason = f"rubric {rubric + 1}: {answer.reason}"
        text = await write_step(
            asker,
            self._prompts,
            request,
            answer.step,
            given=given,
            said=[*said, verdict_turn(answer.step, f"It fails {reason}")],
            delimiters=self._delimiters,
            temperature=self._temperature,
        )
        return correction_verdict(
            request,
            answer.step,
            text,
            tokenizer=self._tokenizer,
            reason=reason,
            usage=asker.usage,
        )

    def _parse(self, text: str, steps: int, rubrics: int) -> tuple[Answer, int]:
        """The answer, and the 0-based rubric that a revise names."""
        answer = parse_answer(text, steps, latex=self._prompts.latex)
        if answer.kind is VerdictKind.KEEP:
            return answer, -1
        named = (last_object(text, "verdict") or {}).get("rubric")
        try:
            return answer, step_index(named, rubrics)
        except JudgeError as error:
            raise unparsed(text, f"the rubric is none of the {rubrics}") from error

    async def _verify(
        self, request: ReviewRequest, verdict: Verdict, rubrics: Sequence[str], asker: Asker
    ) -> Verdict:
        assert verdict.step is not None
        kept = request.kept_text(verdict.step)
        text = verdict.correction
        if not isinstance(text, str):
            assert self._tokenizer is not None
            text = self._tokenizer.decode(text)
        known = f"{request.task.prompt_text}\n{kept}"
        if self._ngram and any(shares_run(text, r, self._ngram, but_not=known) for r in rubrics):
            return verdict.kept_by(OVERLAP, f"{self._ngram} words of a rubric; {verdict.reason}")
        if self._derivable:
            why = await self._not_derivable(request, kept, text, asker)
            if why is not None:
                return verdict.kept_by(NOT_DERIVABLE, f"{why}; {verdict.reason}")
        if self._gate is not None:
            return await self._gate(request, verdict)
        return verdict

    async def _not_derivable(
        self, request: ReviewRequest, kept: str, text: str, asker: Asker
    ) -> str | None:
        """Why nobody could come to the correction without the rubrics; None: one could."""
        case = self._prompts.text(
            "derive_case",
            problem=request.task.prompt_text,
            accepted=kept or NOTHING,
            correction=text.strip(),
        )
        reply = await asker.ask(
            [ChatMessage("system", self._prompts.text("derive")), ChatMessage("user", case)],
            chat=self._verifier,
            max_tokens=self._verdict_tokens,
            temperature=0.0,
            schema=_DERIVABLE,
        )
        found = last_object(reply.text, "derivable")
        value = found["derivable"] if found is not None else None
        if isinstance(value, str):
            value = {"true": True, "yes": True, "false": False, "no": False}.get(value.lower())
        if not isinstance(value, bool):
            raise unparsed(reply.text, "no JSON object with derivable: true or false")
        assert found is not None
        return None if value else whole_text(str(found.get("reason") or "not derivable")[:2000])


def shift_weights(
    with_rubric_T: npt.ArrayLike,
    without_T: npt.ArrayLike,
    *,
    alpha: float = 1.0,
    w_max: float = 3.0,
) -> npt.NDArray[np.float32]:
    """Weights of tokens by how much the rubrics shift the reasoning there.

    w_t = clip(1 + alpha |log pi(y_t | ctx, rubric) - log pi(y_t | ctx)|, 1, w_max), divided by
    their mean, so that a loss keeps its scale.

    Args:
        with_rubric_T, without_T: log-probs of the same tokens in nats, shape (T,).
        alpha: weight a nat, >= 0; 0 weighs all tokens alike.
        w_max: the most that a token may count before the division, >= 1.

    Returns:
        float32, shape (T,), mean 1.

    Raises:
        UsageError: shapes that differ, a difference that is not defined, numbers out of range.
    """
    if not alpha >= 0 or not 1 <= w_max < np.inf:
        raise UsageError(f"alpha must be >= 0 and w_max >= 1, not {alpha} and {w_max}")
    a_T = np.asarray(with_rubric_T, dtype=np.float64)
    b_T = np.asarray(without_T, dtype=np.float64)
    if a_T.shape != b_T.shape or a_T.ndim != 1:
        raise UsageError(f"log-probs of shapes {a_T.shape} and {b_T.shape} are not of one row")
    with np.errstate(invalid="ignore"):  # -inf less -inf, refused below
        shift_T = np.abs(a_T - b_T)
    if np.isnan(shift_T).any():
        raise UsageError(f"{int(np.isnan(shift_T).sum())} of the differences are NaN")
    if not shift_T.size:
        return np.zeros(0, dtype=np.float32)
    weights_T = np.ones_like(shift_T) if alpha == 0 else np.clip(1 + alpha * shift_T, 1, w_max)
    mean_one_T: npt.NDArray[np.float32] = (weights_T / weights_T.mean()).astype(np.float32)
    return mean_one_T
