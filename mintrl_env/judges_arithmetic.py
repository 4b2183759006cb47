"""A judge without a model: it works out the arithmetic that a step states."""

from __future__ import annotations

from mintrl_env.arithmetic import Equation, find_equations, written
from mintrl_env.errors import UsageError
from mintrl_env.types import Finish, ReviewRequest, Usage, Verdict

_FREE = Usage(calls=0)


class ArithmeticJudge:
    """Revises the first step with an equation between numbers that does not hold.

    It sees no other error: not a wrong plan, not a number copied wrongly. The correction is the step
    up to the wrong number, with the right one in its place, and what follows if that holds no digit;
    where that would be long, the equation alone.

    Args:
        correct: write corrections; False: bare cuts, the policy tries again.
    """

    def __init__(self, *, correct: bool = True) -> None:
        if not isinstance(correct, bool):
            raise UsageError(f"correct is True or False, not {correct!r}")
        self._correct = correct

    async def review(self, request: ReviewRequest) -> Verdict:
        # An equation may have begun on the line that the chunk goes on with.
        line = request.accepted_text[request.accepted_text.rfind("\n") + 1 :]
        text = line + request.chunk_text
        end = len(text)
        start = len(line)
        for index, step in enumerate(request.steps):
            step_start, start = start, start + len(step.text)
            begin = 0 if index == 0 else step_start
            for equation in find_equations(text[begin:start]):
                unfinished = request.finish is not Finish.EOS and (
                    begin + equation.end >= len(text[:end].rstrip(".,"))
                )
                inside = begin + equation.right_start >= step_start
                if equation.holds or not inside or unfinished:
                    continue
                return self._revise(request, index, text[begin:start], step_start - begin, equation)
        return Verdict.keep("the arithmetic is right", _FREE)

    def _revise(
        self, request: ReviewRequest, index: int, text: str, offset: int, equation: Equation
    ) -> Verdict:
        wrong = text[equation.right_start : equation.end]
        right = written(equation.value, wrong if _is_plain(wrong) else "")
        left = text[equation.start : equation.right_start].rstrip()
        reason = f"{left} {right}, not {wrong}"
        if not self._correct:
            return Verdict.revise(index, "", reason, _FREE)
        tail = text[equation.end :]
        if any(c.isdigit() for c in tail):
            tail = ""
        head = text[offset : equation.right_start]
        # At least two characters a token in all but odd tokenizers: what is longer would be cut.
        if len(head) + len(right) > 2 * request.max_correction:
            blank = head[: len(head) - len(head.lstrip())]
            head = f"{blank}{left} "
        return Verdict.revise(index, f"{head}{right}{tail}", reason, _FREE)


def _is_plain(text: str) -> bool:
    return not any(c in text for c in "()*/^+×÷·") and "-" not in text.lstrip("-− ")
