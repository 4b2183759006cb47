"""The self-judge: answers are scored, never parsed; corrections are the kept ids' continuation."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mintrl_env.episode import Episode, EpisodeConfig
from mintrl_env.errors import JudgeError, UsageError
from mintrl_env.judges_scoring import judge_key
from mintrl_env.judges_self import NO_CONTEXT, SelfJudge, SelfJudgePrompts
from mintrl_env.keys import RowKey
from mintrl_env.prompts import ByteTokenizer
from mintrl_env.protocols import Tokenizer
from mintrl_env.testing import ScriptedPolicy
from mintrl_env.types import (
    Chunk,
    Finish,
    Kind,
    ReviewRequest,
    Task,
    Usage,
    Verdict,
    VerdictKind,
    frozen_ids,
)

BYTES = ByteTokenizer()
CONTEXT = "The reference: 1 + 1 = 2."


class Answers:
    """Scores an answer by a table, with or without the reference in the prompt."""

    def __init__(
        self, informed: Mapping[str, float], prior: Mapping[str, float] | None = None
    ) -> None:
        self.informed, self.prior = informed, prior or {}
        self.calls: list[tuple[str, str, RowKey | None]] = []

    async def logprobs(self, ids: Any, start: int, *, key: RowKey | None = None) -> Any:
        prompt, answer = BYTES.decode(ids[:start]), BYTES.decode(ids[start:])
        self.calls.append((prompt, answer, key))
        table = self.prior if NO_CONTEXT in prompt else self.informed
        # Spread over the answer's tokens: the sum is what counts.
        each = table.get(answer, -1.0) / (len(ids) - start)
        return np.full(len(ids) - start, each, dtype=np.float32)


def request_of(
    text: str,
    accepted: str = "",
    *,
    context: str | None = CONTEXT,
    problem: str = "1 + 1?",
    end: bool = False,
    tokenizer: Tokenizer = BYTES,
    **config: Any,
) -> tuple[Episode, ReviewRequest]:
    settings = {"step_delimiters": ("\n\n",), "chunk_tokens": 500, "max_response": 2000, **config}
    episode = Episode(
        Task("t", problem, context=context),
        [1, 2],
        kind=Kind.INTERVENED,
        tokenizer=tokenizer,
        config=EpisodeConfig(**settings),
        key=RowKey(5, 6, "t", 7),
    )
    if accepted:
        episode.send(Chunk(frozen_ids(tokenizer.encode(accepted))))
        episode.send(Verdict.keep())
    ids = tokenizer.encode(text) + [min(tokenizer.eos_ids)] * end
    episode.send(Chunk(frozen_ids(ids), finish=Finish.EOS if end else Finish.LENGTH))
    return episode, episode.need.request  # type: ignore[union-attr]


def judged(
    request: ReviewRequest, answers: Any, writes: tuple[int, ...] = (65,), **options: Any
) -> tuple[Verdict, ScriptedPolicy]:
    policy = ScriptedPolicy([list(writes)])
    judge = SelfJudge(answers, policy, BYTES, chat_ids=BYTES.encode, **options)
    return asyncio.run(judge.review(request)), policy


STEPS = "one\n\ntwo\n\nthree"


@pytest.mark.parametrize(
    ("scores", "bonus", "step"),
    [
        ({"Keep": -0.1}, 0.0, None),
        ({"2": -0.1}, 0.0, 1),
        ({"3": -0.5, "1": -0.6}, 0.0, 2),
        ({}, 0.0, None),  # all alike: Keep comes first
        ({"2": -0.1}, 1.0, None),
        ({"Keep": -0.1}, -1.0, 0),
        ({"2": -np.inf, "Keep": -np.inf, "1": -np.inf}, 0.0, 2),
    ],
)
def test_the_likeliest_answer_is_the_verdict(
    scores: dict[str, float], bonus: float, step: int | None
) -> None:
    _, request = request_of(STEPS)
    verdict, _ = judged(request, Answers(scores), contrast=False, keep_bonus=bonus)
    assert verdict.step == step
    assert (verdict.kind is VerdictKind.KEEP) == (step is None)


def test_contrast_takes_off_what_the_answer_is_worth_without_the_reference() -> None:
    _, request = request_of(STEPS)
    informed = {"Keep": -1.0, "1": -0.2, "2": -2.0, "3": -5.0}
    prior = {"Keep": -1.5, "1": -0.1, "2": -4.0, "3": -5.5}
    assert judged(request, Answers(informed, prior), contrast=False)[0].step == 0
    verdict, _ = judged(request, Answers(informed, prior))
    assert verdict.step == 1
    assert verdict.reason == "Keep +0.50, 1 -0.10, 2 +2.00, 3 +0.50"


def test_what_is_asked() -> None:
    _, request = request_of("two\n\n three \n\n", "one\n\n")
    answers = Answers({})
    judged(request, answers)
    assert [answer for _, answer, _ in answers.calls] == ["Keep", "1", "2"] * 2
    prompts = [prompt for prompt, _, _ in answers.calls]
    assert len(set(prompts)) == 2 and CONTEXT in prompts[0] and NO_CONTEXT in prompts[3]
    assert prompts[3] == prompts[0].replace(CONTEXT, NO_CONTEXT)
    assert "\nProblem:\n1 + 1?\n" in prompts[0]
    assert "so far:\none\n" in prompts[0] and "numbered:\n1. two\n2. three\n" in prompts[0]
    keys = [key for _, _, key in answers.calls]
    assert keys == [judge_key(request, "verdict")] * 3 + [judge_key(request, "prior")] * 3
    _, request = request_of(STEPS)
    judged(request, answers := Answers({}))
    assert "so far:\n(nothing yet)\n" in answers.calls[0][0]


def test_braces_in_everything() -> None:
    problem = r"\frac{1}{2} {context} {steps} {0} {} {{x}} {problem}"
    context = r"\boxed{\{accepted\}} {problem} {nothing"
    _, request = request_of("{} a {steps}\n\n}{", "{accepted} {", problem=problem, context=context)
    answers = Answers({"1": 0.0})
    prompts = SelfJudgePrompts(
        verdict=r"\boxed{} {{x}} P={problem} C={context} A={accepted} S={steps}",
        correction=r"{} P={problem} C={context}",
    )
    verdict, policy = judged(request, answers, contrast=False, prompts=prompts)
    assert verdict.step == 0
    wanted = rf"\boxed{{}} {{{{x}}}} P={problem} C={context} A={{accepted}} {{ S="
    assert answers.calls[0][0] == wanted + "1. {} a {steps}\n2. }{"
    read = BYTES.decode(policy.calls[0][1])
    assert read == rf"{{}} P={problem} C={context}" + "{accepted} {"
    for field, value in (("verdict", "{context}"), ("verdict", "{steps}"), ("correction", "x")):
        with pytest.raises(UsageError, match=f"{field} prompt does not hold"):
            SelfJudgePrompts(**{field: value})


def test_the_correction_continues_the_kept_ids() -> None:
    episode, request = request_of("two\n\nthree", "one\n\n", max_correction=5)
    verdict, policy = judged(request, Answers({"2": 0.0}), tuple(BYTES.encode("THREE!!")))
    assert (verdict.step, verdict.correction) == (1, tuple(BYTES.encode("THREE")))
    ((key, ids, max_tokens),) = policy.calls
    kept = request.kept_ids(1).tolist()
    assert ids.tolist()[-len(kept) :] == kept == BYTES.encode("one\n\ntwo\n\n")
    prompt = BYTES.decode(ids[: -len(kept)])
    assert prompt.endswith(f"Problem:\n1 + 1?\n\nReference solution:\n{CONTEXT}")
    assert (key, max_tokens) == (judge_key(request, "correction").at(1 << 20), 5)
    episode.send(verdict)
    assert episode.text == "one\n\ntwo\n\nTHREE"


def test_odd_tokens_are_never_encoded_again(made_tokenizers: dict[str, Tokenizer]) -> None:
    """Kept ids that no encoder would give for their text reach the writer as they are."""
    tokenizer = made_tokenizers["bpe"]
    odd = [tokenizer.encode(c)[0] for c in "step"]
    assert odd != tokenizer.encode("step")
    chunk = [*odd, *tokenizer.encode("\n\n"), *tokenizer.encode("bad")]
    episode = Episode(
        Task("t", "p", context=CONTEXT),
        [1],
        kind=Kind.INTERVENED,
        tokenizer=tokenizer,
        config=EpisodeConfig(),
    )
    request = episode.preview(Chunk(frozen_ids(chunk)))
    assert request is not None

    class Second:
        async def logprobs(self, ids: Any, start: int, *, key: RowKey | None = None) -> Any:
            is_two = ids[start:].tolist() == tokenizer.encode("2")
            return np.full(len(ids) - start, 0.0 if is_two else -3.0, dtype=np.float32)

    policy = ScriptedPolicy([tokenizer.encode("good")], eos_ids=tuple(tokenizer.eos_ids))
    judge = SelfJudge(Second(), policy, tokenizer, chat_ids=tokenizer.encode, contrast=False)
    verdict = asyncio.run(judge.review(request))
    assert verdict.step == 1
    assert policy.calls[0][1].tolist()[-len(chunk) :][-len(request.kept_ids(1)) :] == (
        request.kept_ids(1).tolist()
    )
    assert request.kept_ids(1).tolist() == chunk[: request.steps[1].cut]
    assert request.kept_ids(1).tolist()[:4] == odd


def test_max_steps_bounds_what_is_shown_and_offered() -> None:
    text = "\n\n".join(f"s{i}" for i in range(1, 13))
    _, request = request_of(text)
    judged(request, answers := Answers({}), contrast=False)
    assert [a for _, a, _ in answers.calls] == ["Keep", *map(str, range(1, 10))]
    assert "9. s9\n" in answers.calls[0][0] and "10. " not in answers.calls[0][0]
    judged(request, answers := Answers({}), contrast=False, max_steps=12)
    assert answers.calls[-1][1] == "12" and "12. s12\n" in answers.calls[0][0]
    with pytest.raises(UsageError, match="max_steps"):
        judged(request, Answers({}), max_steps=0)


@pytest.mark.parametrize("context", [None, "", "  \n"])
def test_a_missing_context_is_a_judge_error(context: str | None) -> None:
    _, request = request_of(STEPS, context=context)
    with pytest.raises(JudgeError, match=r"task 't' has no privileged .*tasks\.columns\.context"):
        judged(request, Answers({}))


def test_nan_is_a_failure_not_a_verdict() -> None:
    _, request = request_of(STEPS)
    with pytest.raises(JudgeError, match="internal: log-probs of") as caught:
        judged(request, Answers({"2": float("nan")}))
    assert isinstance(caught.value.usage, Usage) and caught.value.usage.calls == 2
    # An answer that is impossible with and without the reference can't be compared.
    with pytest.raises(JudgeError):
        judged(request, Answers({"2": -np.inf}, {"2": -np.inf}))


def test_nothing_but_the_end_is_kept_without_a_call() -> None:
    _, request = request_of("", "one\n\n", end=True)
    verdict, _ = judged(request, answers := Answers({"1": 0.0}))
    assert (verdict.kind, verdict.usage, answers.calls) == (VerdictKind.KEEP, Usage(calls=0), [])


def test_usage_counts_both_readings_and_the_correction() -> None:
    _, request = request_of(STEPS, max_correction=8)
    answers = Answers({"1": 0.0})
    verdict, policy = judged(request, answers, (65, 66, 256))
    read = sum({prompt: len(BYTES.encode(prompt)) for prompt, _, _ in answers.calls}.values())
    assert verdict.correction == (65, 66)
    assert verdict.usage.prompt_tokens == read + len(policy.calls[0][1])
    assert verdict.usage.completion_tokens == 1 + 1 + 3
    assert verdict.usage.calls == 3 and verdict.usage.seconds > 0
    _, request = request_of(STEPS, max_correction=0)
    verdict, policy = judged(request, answers)
    assert (verdict.correction, policy.calls, verdict.usage.calls) == ((), [], 2)


def with_task(request: ReviewRequest, **fields: Any) -> ReviewRequest:
    return replace(request, task=replace(request.task, context=None, **fields))


def test_a_rubric_or_the_tests_may_be_the_context() -> None:
    _, request = request_of(STEPS)
    answers = Answers({"2": -0.1})
    ruled = with_task(request, metadata={"rules": ["Names every unit.", "Adds up."]})
    verdict, _ = judged(ruled, answers, privileged="rubric", rubric_field="rules")
    assert verdict.step == 1
    informed = [prompt for prompt, _, _ in answers.calls if NO_CONTEXT not in prompt]
    assert all("1. Names every unit.\n2. Adds up." in prompt for prompt in informed)
    with pytest.raises(JudgeError, match="no rubric"):
        judged(with_task(request), Answers({}), privileged="rubric")


def test_the_outcome_of_hidden_tests_is_part_of_the_context() -> None:
    seen: list[str] = []

    async def run_tests(task: Task, text: str) -> str:
        seen.append(text)
        return "test 1: failed: expected 4, got 5"

    _, request = request_of("two\n\nthree", accepted="one\n\n")
    answers = Answers({"1": -0.1})
    verdict, _ = judged(with_task(request), answers, privileged="none", run_tests=run_tests)
    assert seen == ["one\n\ntwo\n\nthree"] and verdict.step == 0
    informed = [prompt for prompt, _, _ in answers.calls if NO_CONTEXT not in prompt]
    assert informed and all("expected 4, got 5" in prompt for prompt in informed)

    async def nothing_yet(task: Task, text: str) -> str:
        return ""

    kept, _ = judged(with_task(request), Answers({}), privileged="none", run_tests=nothing_yet)
    assert kept.kind is VerdictKind.KEEP and kept.usage.calls == 0


@pytest.mark.parametrize("privileged", ["none", "answers"])
def test_a_self_judge_that_knows_no_more_than_the_policy_is_refused(privileged: Any) -> None:
    with pytest.raises(UsageError, match="privileged is one of reference, rubric, tests"):
        SelfJudge(
            Answers({}), ScriptedPolicy([]), BYTES, chat_ids=BYTES.encode, privileged=privileged
        )
