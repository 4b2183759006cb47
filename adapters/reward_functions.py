"""The verifiers as reward functions, in the form that TRL's trainers call them.

    from mintrl_env.adapters.reward_functions import math_reward

    GRPOTrainer(model, reward_funcs=math_reward(), train_dataset=dataset, ...)

A reward function is called with a whole batch, `f(prompts=..., completions=..., **columns)`, and
answers one float for each completion, or None where the verifier could not tell: TRL leaves such a
reward out. Nothing here imports TRL, so other trainers that call the same form may use it too.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from mintrl_env.errors import UsageError
from mintrl_env.protocols import Verifier
from mintrl_env.registry import resolve
from mintrl_env.scoring import check_verifier, gold_text, score_batch
from mintrl_env.types import Score, Task

ANSWER_COLUMNS = ("answer", "gold", "solution")
TEST_COLUMNS = ("tests",)
_CODE_COLUMNS = ("limits", "entry_point")


class VerifierReward:
    """A reward function that asks a verifier. The whole batch is scored concurrently.

    Args:
        verifier: the verifier, or its registered name ("math", "code", one of your own).
        name: what the trainer's logs call it.
        answer: columns of the gold answer; in each row the first that is there and not None counts.
        tests: the same for a code task's tests (an object, or its text in JSON).
        at_once: how many responses are scored at once by a verifier that has no `score_batch`.

    Other columns that are read where they are there: `limits` and `entry_point` (a code task's),
    `task_id` or `id`. A completion is a text or a list of messages, of which the last assistant's counts.

    Raises:
        UsageError: the verifier has no `async def score`; on a call, no column of those is in the
            batch. Where a whole batch is undecided, the first reason is a warning, once.
    """

    def __init__(
        self,
        verifier: Verifier | str,
        *,
        name: str,
        answer: str | Sequence[str] = (),
        tests: str | Sequence[str] = (),
        at_once: int = 32,
    ) -> None:
        made = resolve("verifier", verifier) if isinstance(verifier, str) else verifier
        self.verifier: Verifier = made() if isinstance(made, type) else made
        self.__name__ = name
        self.answer = (answer,) if isinstance(answer, str) else tuple(answer)
        self.tests = (tests,) if isinstance(tests, str) else tuple(tests)
        self.at_once = at_once
        self._warned = False
        check_verifier(self.verifier)

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        scores = self.scores(completions, **columns)
        # TRL's own hooks, which every rank calls alike: why a reward is missing shows in its logs.
        if callable(log_extra := columns.get("log_extra")):
            log_extra(f"{self.__name__}/status", [score.status for score in scores])
        if callable(log_metric := columns.get("log_metric")) and scores:
            undecided = sum(not score.decided for score in scores)
            log_metric(f"{self.__name__}/undecided", undecided / len(scores))
        if scores and not self._warned and not any(score.decided for score in scores):
            self._warned = True
            warnings.warn(
                f"{self.__name__}: none of {len(scores)} responses could be scored, so that there "
                f"is no reward. The first: {scores[0].status}: {scores[0].detail}",
                stacklevel=2,
            )
        return [score.reward if score.decided else None for score in scores]

    def scores(self, completions: Sequence[Any], **columns: Any) -> list[Score]:
        """The scores behind the rewards, with their statuses."""
        answers = self._column("answer", self.answer, columns)
        tests = self._column("tests", self.tests, columns)
        for what, values in (("answer", answers), ("tests", tests)):
            if values is not None and len(values) != len(completions):
                raise UsageError(
                    f"{self.__name__}: {len(completions)} completions and {len(values)} rows for "
                    f"the {what}: a column has one for each completion"
                )
        ids = columns.get("task_id", columns.get("id"))
        more = {name: columns[name] for name in _CODE_COLUMNS if columns.get(name) is not None}
        pairs = []
        for place, completion in enumerate(completions):
            given = tests[place] if tests else None
            extra = {name: _without_nulls(values[place]) for name, values in more.items()}
            task = Task(
                task_id=str(ids[place]) if ids else f"row {place}",
                prompt="",
                answer=gold_text(answers[place]) if answers else None,
                tests=_without_nulls(given),
                metadata={name: part for name, part in extra.items() if part is not None},
            )
            pairs.append((task, completion_text(completion)))
        return score_batch(self.verifier, pairs, at_once=self.at_once)

    def _column(
        self, what: str, names: Sequence[str], columns: Mapping[str, Any]
    ) -> list[Any] | None:
        """In each row the first value that is not None; None where no column is asked for."""
        if not names:
            return None
        there = [columns[name] for name in names if columns.get(name) is not None]
        if not there:
            lists = sorted(name for name, value in columns.items() if isinstance(value, list))
            raise UsageError(
                f"{self.__name__}: the data set has no column {' or '.join(map(repr, names))} for "
                f"the {what}; it has: {', '.join(lists) or 'none'}. Name yours: {what}='...'"
            )
        rows = zip(*there, strict=True)
        return [next((value for value in row if value is not None), None) for row in rows]


def math_reward(
    *, answer: str | Sequence[str] = ANSWER_COLUMNS, verifier: Verifier | None = None
) -> VerifierReward:
    """1.0 where the final answer equals the gold answer, else 0.0; None where no one can tell.

    A gold answer may be a number, hold a box, or end in `#### ANSWER` as GSM8K's do.
    """
    return VerifierReward(verifier or "math", name="math_reward", answer=answer)


def code_reward(
    *, tests: str | Sequence[str] = TEST_COLUMNS, verifier: Verifier | None = None
) -> VerifierReward:
    """1.0 where the program passes the row's tests, else 0.0; None where no one can tell.

    Pass `verifier=CodeVerifier(reward="fraction")` for the share of tests that pass.
    """
    return VerifierReward(verifier or "code", name="code_reward", tests=tests)


def completion_text(completion: Any) -> str:
    """The text of a completion: itself, or the content of the last message of an assistant."""
    if isinstance(completion, str):
        return completion
    if not isinstance(completion, Sequence):
        raise UsageError(f"a completion is a text or a list of messages, not {completion!r:.80}")
    for message in reversed(completion):
        if message.get("role", "assistant") == "assistant":
            content = message.get("content")
            if isinstance(content, str):
                return content
            parts = content if isinstance(content, Sequence) else ()
            return "".join(str(part.get("text") or "") for part in parts)
    return ""


def _without_nulls(value: Any) -> Any:
    """A row of a data set has every key that any row has, with None for those it lacks."""
    if isinstance(value, Mapping):
        return {name: part for name, part in value.items() if part is not None}
    return value


def check_rewards(functions: Sequence[object]) -> None:
    """Refuse what makes a reward function where one is asked for.

    Raises:
        UsageError
    """
    for factory in (math_reward, code_reward):
        if factory in functions:
            raise UsageError(
                f"reward_funcs: {factory.__name__} makes a reward function: pass "
                f"{factory.__name__}()"
            )
