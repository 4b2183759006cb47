"""Validator, corrector, verifier: every stage that fails is a Keep with its name, or a JudgeError."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mintrl_env.chat import Capabilities, ChatMessage, ChatReply
from mintrl_env.episode import Episode, EpisodeConfig
from mintrl_env.errors import JudgeError, UsageError
from mintrl_env.guards_perplexity import PerplexityGate
from mintrl_env.judge_prompts import JudgePrompts, case_values
from mintrl_env.judges_rubric import ValidatorCorrectorVerifier, shift_weights
from mintrl_env.keys import RowKey
from mintrl_env.prompts import ByteTokenizer, PromptBuilder
from mintrl_env.protocols import Judge
from mintrl_env.reviewing import check_judge
from mintrl_env.rollout import Parts, RolloutConfig, Runner
from mintrl_env.testing import FunctionVerifier, ScriptedPolicy
from mintrl_env.types import (
    Chunk,
    Kind,
    Outcome,
    ReviewRequest,
    Task,
    Usage,
    Verdict,
    VerdictKind,
    frozen_ids,
)

TOKENS = ByteTokenizer()
COST = Usage(10, 3, 0.5, 0.25, 1)
RUBRICS = ("Greets the customer by name.", "Offers a refund within thirty days of the purchase.")
TASK = Task("t", "Answer the letter of Ms Low.", metadata={"rubric": list(RUBRICS)})
PROMPTS = JudgePrompts.load("rubric")
STEPS = "Dear Ms Low,\n\nwe can't help you.\n\nBest"


class ScriptedChat:
    """Answers in turn; an exception in the script is raised."""

    def __init__(self, *replies: str | Exception) -> None:
        self.capabilities = Capabilities()
        self._replies = list(replies)
        self.calls: list[tuple[list[ChatMessage], dict[str, Any]]] = []

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        max_tokens: int,
        schema: Mapping[str, Any] | None = None,
        prefill: str = "",
        stop: Sequence[str] = (),
        temperature: float = 1.0,
        seed: int | None = None,
    ) -> ChatReply:
        options = {"max_tokens": max_tokens, "schema": schema, "temperature": temperature}
        self.calls.append((list(messages), options))
        reply = self._replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return ChatReply(reply, "stop", COST)


class Scores:
    def __init__(self, value: float) -> None:
        self.value = value

    async def logprobs(self, ids: Any, start: int, *, key: RowKey | None = None) -> Any:
        return np.full(len(ids) - start, self.value, dtype=np.float32)


def fails(step: object = 2, rubric: object = 2) -> str:
    return json.dumps({"reason": "no help", "verdict": "revise", "step": step, "rubric": rubric})


KEEP = json.dumps({"reason": "fine", "verdict": "keep", "step": None, "rubric": None})
YES = json.dumps({"reason": "it follows", "derivable": True})
NO = json.dumps({"reason": "who says so?", "derivable": False})
FIX = "we are sorry, and will pay you back."


def request_of(chunk: str = STEPS, task: Task = TASK) -> ReviewRequest:
    episode = Episode(
        task,
        [1],
        kind=Kind.INTERVENED,
        tokenizer=TOKENS,
        config=EpisodeConfig(),
        key=RowKey(1, 2, "t", 3),
    )
    request = episode.preview(Chunk(frozen_ids(TOKENS.encode(chunk))))
    assert request is not None
    return request


def reviewed(*replies: str | Exception, **options: Any) -> tuple[Verdict, ScriptedChat]:
    chat = ScriptedChat(*replies)
    judge = ValidatorCorrectorVerifier(chat, TOKENS, **options)
    return asyncio.run(judge.review(request_of())), chat


def test_no_failing_rubric_is_a_keep() -> None:
    verdict, chat = reviewed(KEEP)
    assert verdict == Verdict.keep("fine", COST)
    ((messages, options),) = chat.calls
    rubric = f"<rubric>\n1. {RUBRICS[0]}\n2. {RUBRICS[1]}\n</rubric>"
    values = case_values(request_of(), rubric, delimiters=("\n\n", "```"))
    assert messages == [
        ChatMessage("system", PROMPTS.sections["review"]),
        ChatMessage("user", PROMPTS.text("case", **values)),
    ]
    assert list(options["schema"]["properties"]) == ["reason", "verdict", "step", "rubric"]
    assert options["temperature"] == 0.0


def test_a_repair_that_passes_every_stage() -> None:
    gate = PerplexityGate(TOKENS, Scores(-1.0), tau=3.0)
    verdict, chat = reviewed(fails(), FIX, YES, gate=gate)
    ids = tuple(TOKENS.encode(FIX + "\n\n"))
    assert verdict == Verdict.revise(1, ids, "rubric 2: no help", COST + COST + COST)
    (said, _), (turn, correcting), (check, checking) = chat.calls
    assert turn == [
        *said,
        ChatMessage("assistant", "Step 2 is wrong. It fails rubric 2: no help"),
        ChatMessage("user", PROMPTS.text("correct", step="2", tail="")),
    ]
    assert (correcting["temperature"], correcting["schema"]) == (1.0, None)
    # Who checks has not seen the rubrics.
    assert check == [
        ChatMessage("system", PROMPTS.sections["derive"]),
        ChatMessage(
            "user",
            PROMPTS.text(
                "derive_case",
                problem=TASK.prompt_text,
                accepted="Dear Ms Low,\n\n",
                correction=FIX,
            ),
        ),
    ]
    assert not any(rubric in message.content for message in check for rubric in RUBRICS)
    assert list(checking["schema"]["properties"]) == ["reason", "derivable"]


@pytest.mark.parametrize(
    ("replies", "options", "guard", "reason", "calls"),
    [
        (("we offer a refund within thirty days of the purchase.",), {}, "rubric_overlap",
         "5 words of a rubric; rubric 2: no help", 2),
        ((FIX, NO), {}, "not_derivable", "who says so?; rubric 2: no help", 3),
        ((FIX, YES), {"gate": PerplexityGate(TOKENS, Scores(-5.0), tau=3.0)}, "perplexity",
         "the correction's perplexity is 148.4, above 3", 3),
        (("we can't help you.",), {}, "equal", "the correction is what was cut; rubric 2: no help", 2),
        (("we pay.<|im_end|>",), {}, "special_token",
         "the correction holds '<|im_end|>'; rubric 2: no help", 2),
    ],
)  # fmt: skip
def test_a_stage_that_fails_keeps(
    replies: tuple[str, ...], options: dict[str, Any], guard: str, reason: str, calls: int
) -> None:
    verdict, chat = reviewed(fails(), *replies, **options)
    assert (verdict.kind, verdict.guard, verdict.reason) == (VerdictKind.KEEP, guard, reason)
    assert len(chat.calls) == verdict.usage.calls == calls


def test_stages_can_be_left_out() -> None:
    words = "we offer a refund within thirty days of the purchase."
    verdict, chat = reviewed(fails(), words, ngram=0, derivable=False)
    assert (verdict.step, len(chat.calls)) == (1, 2)
    # What the student has seen is no leak.
    task = Task("t", f"Write that you {words}", metadata=TASK.metadata)
    chat = ScriptedChat(fails(), words)
    judge = ValidatorCorrectorVerifier(chat, TOKENS, derivable=False)
    assert asyncio.run(judge.review(request_of(task=task))).step == 1


def test_another_model_checks() -> None:
    other = ScriptedChat(NO)
    verdict, chat = reviewed(fails(), FIX, verifier=other)
    assert (verdict.guard, len(chat.calls), len(other.calls)) == ("not_derivable", 2, 1)
    assert verdict.usage == COST + COST + COST


def test_a_bare_cut_has_nothing_to_check() -> None:
    verdict, _ = reviewed(fails(), " ")
    assert verdict == Verdict.revise(1, "", "rubric 2: no help", COST + COST)


@pytest.mark.parametrize(
    ("replies", "cause", "calls"),
    [
        (("hm",), "unparsed", 1),
        ((fails(step=0),), "bad_step", 1),
        ((fails(rubric=3),), "unparsed", 1),
        ((fails(rubric=None),), "unparsed", 1),
        ((fails(), TimeoutError("slow")), "timeout", 1),
        ((fails(), FIX, "maybe"), "unparsed", 3),
        ((fails(), FIX, '{"derivable": 1}'), "unparsed", 3),
        ((fails(), FIX, JudgeError("server", "500", usage=COST)), "server", 3),
    ],
)
def test_failures_keep_their_cost(replies: tuple[Any, ...], cause: str, calls: int) -> None:
    with pytest.raises(JudgeError) as caught:
        reviewed(*replies)
    assert caught.value.cause.value == cause
    assert isinstance(caught.value.usage, Usage) and caught.value.usage.calls == calls


@pytest.mark.parametrize("value", ["true", "Yes", True])
def test_words_for_yes(value: object) -> None:
    assert reviewed(fails(), FIX, json.dumps({"derivable": value}))[0].step == 1
    assert reviewed(fails("Step 2", "2."), FIX, json.dumps({"derivable": value}))[0].step == 1


def test_a_task_without_rubrics_is_a_failure() -> None:
    judge = ValidatorCorrectorVerifier(ScriptedChat(), TOKENS)
    with pytest.raises(JudgeError, match=r"internal: task 'u' has no rubric: .*'rubric'") as caught:
        asyncio.run(judge.review(request_of(task=Task("u", "p"))))
    assert caught.value.usage == Usage(calls=0)
    verdict = asyncio.run(judge.review(request_of("\n\n", Task("u", "p"))))
    assert verdict == Verdict.keep("nothing but the end", Usage(calls=0))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"ngram": -1}, "ngram counts words"),
        ({"ngram": True}, "ngram counts words"),
        ({"temperature": -1}, "temperature must be >= 0"),
        ({"verdict_tokens": 0}, "verdict_tokens must be >= 1"),
        ({"prompts": JudgePrompts.load("math")}, r"no section \[\[derive\]\]"),
    ],
)
def test_wrong_options(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        ValidatorCorrectorVerifier(ScriptedChat(), TOKENS, **options)


def test_in_the_runner() -> None:
    chat = ScriptedChat(fails(), FIX, YES, KEEP)
    judge = ValidatorCorrectorVerifier(chat, TOKENS)
    check_judge(judge)
    assert isinstance(judge, Judge)
    chunks = [TOKENS.encode(STEPS), [*TOKENS.encode("Yours"), TOKENS.EOS]]
    runner = Runner(
        Parts(ScriptedPolicy(chunks), judge, verifier=FunctionVerifier(lambda t, r: 1.0)),
        PromptBuilder(TOKENS),
        RolloutConfig(EpisodeConfig(max_response=200), n_control=0, n_intervened=1),
    )
    ((row,),) = asyncio.run(runner.collect([TASK], update=0))
    assert TOKENS.decode(row.ids[:-1]) == f"Dear Ms Low,\n\n{FIX}\n\nYours"
    assert [(r.outcome, r.usage.calls) for r in row.reviews] == [
        (Outcome.REVISE, 3),
        (Outcome.KEEP, 1),
    ]


class TestWeights:
    def test_values(self) -> None:
        weights = shift_weights([-1.0, -1.0, -4.0], [-1.0, -2.0, -1.0], alpha=0.5, w_max=2.0)
        assert weights == pytest.approx(np.array([1.0, 1.5, 2.0]) / 1.5)
        assert weights.dtype == np.float32
        assert shift_weights([-9.0, -1.0], [-1.0, -1.0], alpha=0) == pytest.approx([1.0, 1.0])
        assert shift_weights([-np.inf, -1.0], [-1.0, -1.0], w_max=4) == pytest.approx([1.6, 0.4])
        assert shift_weights([], []).shape == (0,)

    @pytest.mark.parametrize(
        ("a", "b", "options", "why"),
        [
            ([-1.0], [-1.0, -2.0], {}, "are not of one row"),
            ([[-1.0]], [[-1.0]], {}, "are not of one row"),
            ([np.nan], [-1.0], {}, "1 of the differences are NaN"),
            ([-np.inf], [-np.inf], {}, "1 of the differences are NaN"),
            ([-1.0], [-1.0], {"alpha": -1.0}, "alpha must be >= 0"),
            ([-1.0], [-1.0], {"w_max": 0.5}, "w_max >= 1"),
        ],
    )
    def test_what_makes_no_sense(self, a: Any, b: Any, options: dict[str, float], why: str) -> None:
        with pytest.raises(UsageError, match=why):
            shift_weights(a, b, **options)

    @given(
        st.lists(st.tuples(st.floats(-30, 0), st.floats(-30, 0)), min_size=1, max_size=50),
        st.floats(0, 10),
        st.floats(1, 20),
    )
    def test_the_mean_is_one(
        self, pairs: list[tuple[float, float]], alpha: float, w_max: float
    ) -> None:
        a, b = zip(*pairs, strict=True)
        weights = shift_weights(a, b, alpha=alpha, w_max=w_max)
        assert float(weights.mean()) == pytest.approx(1.0, rel=1e-5)
        assert weights.min() > 0 and weights.max() / weights.min() <= w_max * (1 + 1e-5)
        order = np.argsort(np.abs(np.subtract(a, b)))
        assert (np.diff(weights[order]) >= -1e-6).all()
