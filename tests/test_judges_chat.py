"""The judge that asks a chat model: exact messages, exact corrections, every cost counted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mintrl_env.chat import Capabilities, ChatMessage, ChatModel, ChatReply
from mintrl_env.episode import Episode, EpisodeConfig
from mintrl_env.errors import JudgeCause, JudgeError, UsageError
from mintrl_env.guards import LeakGuard
from mintrl_env.judge_corrections import (
    correction_verdict,
    inside_fence,
    join_correction,
    open_line,
)
from mintrl_env.judge_prompts import JudgePrompts, case_values
from mintrl_env.judges_chat import ChatJudge, answer_schema
from mintrl_env.keys import RowKey
from mintrl_env.prompts import ByteTokenizer, PromptBuilder
from mintrl_env.protocols import Judge, Tokenizer
from mintrl_env.reviewing import check_judge, review_chunk
from mintrl_env.rollout import Parts, RolloutConfig, Runner
from mintrl_env.testing import FunctionVerifier, ScriptedPolicy
from mintrl_env.types import (
    Chunk,
    FailedReview,
    Finish,
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
DELIMITERS = ("\n\n", "```")
COST = Usage(prompt_tokens=10, completion_tokens=3, usd=0.5, seconds=0.25, calls=1)
MATH, CODE = JudgePrompts.load("math"), JudgePrompts.load("code")


class ScriptedChat:
    """Answers in turn; an exception in the script is raised."""

    def __init__(self, *replies: str | ChatReply | Exception, **capabilities: Any) -> None:
        self.capabilities = Capabilities(**capabilities)
        self._replies = list(replies)
        self.calls: list[dict[str, Any]] = []

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
        self.calls.append(
            {"messages": list(messages), "max_tokens": max_tokens, "schema": schema,
             "prefill": prefill, "stop": stop, "temperature": temperature, "seed": seed}
        )  # fmt: skip
        await asyncio.sleep(0)
        reply = self._replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply if isinstance(reply, ChatReply) else ChatReply(reply, "stop", COST)


def revise(step: object, reason: str = "wrong", **more: object) -> str:
    return json.dumps({"reason": reason, "verdict": "revise", "step": step, **more})


KEEP = json.dumps({"reason": "fine", "verdict": "keep", "step": None})


def episode_of(
    chunk: str,
    accepted: str = "",
    *,
    end: bool = False,
    task: Task | None = None,
    tokenizer: Tokenizer = TOKENS,
    **config: Any,
) -> tuple[Episode, ReviewRequest]:
    config = {"chunk_tokens": 4096, "max_response": 65536, "max_correction": 64, **config}
    episode = Episode(
        task or Task("t", "1 + 2 + 3?"),
        [1, 2],
        kind=Kind.INTERVENED,
        tokenizer=tokenizer,
        config=EpisodeConfig(step_delimiters=DELIMITERS, **config),
        key=RowKey(5, 6, "t", 7),
    )
    if accepted:
        episode.send(Chunk(frozen_ids(tokenizer.encode(accepted))))
        episode.send(Verdict.keep())
    ids = tokenizer.encode(chunk) + [min(tokenizer.eos_ids)] * end
    episode.send(Chunk(frozen_ids(ids), finish=Finish.EOS if end else Finish.LENGTH))
    return episode, episode.need.request  # type: ignore[union-attr]


def review(judge: Judge, request: ReviewRequest) -> Verdict:
    return asyncio.run(judge.review(request))


def text_of(verdict: Verdict) -> str:
    correction = verdict.correction
    return correction if isinstance(correction, str) else TOKENS.decode(correction)


STEPS = "1 + 2 = 3\n\n3 + 3 = 7\n\nSo 7."


class TestTwoCalls:
    def test_a_keep_is_one_call(self) -> None:
        _, request = episode_of(STEPS, "We add.\n\n")
        chat = ScriptedChat(KEEP)
        verdict = review(ChatJudge(chat, TOKENS), request)
        assert verdict == Verdict.keep("fine", COST)
        (call,) = chat.calls
        assert call["messages"] == [
            ChatMessage("system", MATH.sections["review"]),
            ChatMessage(
                "user", MATH.text("case", **case_values(request, "", delimiters=DELIMITERS))
            ),
        ]
        assert (call["max_tokens"], call["temperature"], call["prefill"]) == (512, 1.0, "")
        assert call["schema"] == answer_schema()
        assert list(call["schema"]["properties"]) == ["reason", "verdict", "step"]

    def test_a_revise_asks_for_the_step_in_the_same_chat(self) -> None:
        episode, request = episode_of(STEPS, "We add.\n\n")
        chat = ScriptedChat(revise(2, "3 + 3 is 6"), "3 + 3 = 6")
        verdict = review(ChatJudge(chat, TOKENS, temperature=0.7), request)
        correction = tuple(TOKENS.encode("3 + 3 = 6\n\n"))
        assert verdict == Verdict.revise(1, correction, "3 + 3 is 6", COST + COST)
        first, second = chat.calls
        assert second["messages"] == [
            *first["messages"],
            ChatMessage("assistant", "Step 2 is wrong. 3 + 3 is 6"),
            ChatMessage("user", MATH.text("correct", step="2", tail="")),
        ]
        assert "from where step 2 begins" in second["messages"][-1].content
        assert (second["schema"], second["prefill"], second["max_tokens"]) == (None, "", 64 + 16)
        assert (second["stop"], second["temperature"]) == ((), 0.7)
        episode.send(verdict)
        assert episode.text == "We add.\n\n1 + 2 = 3\n\n3 + 3 = 6\n\n"

    def test_a_server_that_can_goes_on_with_the_kept_text(self) -> None:
        task = Task("t", "1 + 2 + 3?", context="REF")
        _, request = episode_of(STEPS, "We add.\n\n", task=task)
        written = "3 + 3 = 6\n\nSo the sum is 6.\n\nDone"
        chat = ScriptedChat(revise(2), ChatReply(written, "length", COST), prefill="vllm")
        verdict = review(ChatJudge(chat, TOKENS, privileged="reference"), request)
        assert text_of(verdict) == "3 + 3 = 6\n\n"
        call = chat.calls[1]
        assert call["prefill"] == "We add.\n\n1 + 2 = 3\n\n"
        given = "<reference>\nREF\n</reference>"
        assert call["messages"] == [
            ChatMessage("system", MATH.sections["write"]),
            ChatMessage("user", MATH.text("write_case", problem="1 + 2 + 3?", given=given)),
        ]

    def test_within_a_line_the_model_sees_where_to_go_on(self) -> None:
        _, request = episode_of(" is 4.\n\nSo 4.", "First.\n\nThe sum of 1 and 2")
        chat = ScriptedChat(revise(1), "is 3.")
        verdict = review(ChatJudge(chat, TOKENS), request)
        assert text_of(verdict) == " is 3.\n\n"
        turn = chat.calls[1]["messages"][-1].content
        assert "ends within a line:\nThe sum of 1 and 2\n" in turn
        assert '<step n="1" begun="above">' in chat.calls[0]["messages"][1].content

    def test_inside_a_program_the_model_is_asked_for_a_block(self) -> None:
        program = "```python\ndef f(x):\n    y = x\n\n"
        _, request = episode_of("    return y + 2\n\n    pass\n", program)
        chat = ScriptedChat(revise(1), "```python\n    return y + 1\n```\nThat is right.")
        judge = ChatJudge(chat, TOKENS, prompts=CODE)
        assert text_of(review(judge, request)) == "    return y + 1\n\n"
        assert chat.calls[1]["messages"][-1].content == CODE.text("correct_code", step="1", tail="")

    def test_a_model_that_cannot_leave_off_json(self) -> None:
        _, request = episode_of(STEPS)
        chat = ScriptedChat(revise(2), '```json\n{"step": 2, "correction": "3 + 3 \\neq 7"}\n```')
        verdict = review(ChatJudge(chat, TOKENS), request)
        assert text_of(verdict) == "3 + 3 \\neq 7\n\n"
        chat = ScriptedChat(revise(2), f"{revise(2)},\n{revise(2)}")
        with pytest.raises(JudgeError, match="unparsed: asked for the next step") as caught:
            review(ChatJudge(chat, TOKENS), request)
        assert caught.value.usage == COST + COST
        # Going on with a text, it writes text.
        chat = ScriptedChat(revise(2), '{"verdict": 1}', prefill="vllm")
        assert text_of(review(ChatJudge(chat, TOKENS), request)) == '{"verdict": 1}\n\n'

    def test_no_room_no_second_call(self) -> None:
        _, request = episode_of(STEPS, max_correction=0)
        chat = ScriptedChat(revise(2))
        assert review(ChatJudge(chat, TOKENS), request) == Verdict.revise(1, "", "wrong", COST)

    def test_an_empty_correction_is_a_bare_cut(self) -> None:
        episode, request = episode_of(STEPS)
        verdict = review(ChatJudge(ScriptedChat(revise(2), " \n"), TOKENS), request)
        assert verdict == Verdict.revise(1, "", "wrong", COST + COST)
        episode.send(verdict)
        assert episode.text == "1 + 2 = 3\n\n"

    def test_nothing_but_the_end_is_kept_without_a_call(self) -> None:
        _, request = episode_of("", "a\n\n", end=True)
        verdict = review(ChatJudge(ScriptedChat(), TOKENS), request)
        assert (verdict.kind, verdict.usage) == (VerdictKind.KEEP, Usage(calls=0))

    def test_seeds_are_of_the_row_and_the_review(self) -> None:
        _, request = episode_of(STEPS)
        seeds = []
        for _ in range(2):
            chat = ScriptedChat(revise(2), "x")
            review(ChatJudge(chat, TOKENS), request)
            seeds.append([call["seed"] for call in chat.calls])
        assert seeds[0] == seeds[1] and len(set(seeds[0])) == 2
        assert all(isinstance(seed, int) and 0 <= seed < 2**31 for seed in seeds[0])
        _, later = episode_of(STEPS, "a\n\n")
        chat = ScriptedChat(KEEP)
        review(ChatJudge(chat, TOKENS), later)
        assert chat.calls[0]["seed"] not in seeds[0]


class TestOneCall:
    def test_verdict_and_correction_in_one_answer(self) -> None:
        _, request = episode_of(STEPS)
        chat = ScriptedChat(revise(2, correction="3 + 3 = \\frac{12}{2}"))
        verdict = review(ChatJudge(chat, TOKENS, mode="one-call"), request)
        assert text_of(verdict) == "3 + 3 = \\frac{12}{2}\n\n"
        assert (verdict.step, verdict.usage) == (1, COST)
        (call,) = chat.calls
        assert call["messages"][0].content == MATH.sections["review_and_correct"]
        assert list(call["schema"]["required"]) == ["reason", "verdict", "step", "correction"]
        assert call["max_tokens"] == 512 + 64 + 16

    @pytest.mark.parametrize("more", [{}, {"correction": None}, {"correction": " "}])
    def test_no_correction_is_a_bare_cut(self, more: dict[str, Any]) -> None:
        _, request = episode_of(STEPS)
        judge = ChatJudge(ScriptedChat(revise(1, **more)), TOKENS, mode="one-call")
        assert review(judge, request) == Verdict.revise(0, "", "wrong", COST)

    def test_an_answer_that_was_cut_off_is_used(self) -> None:
        _, request = episode_of(STEPS)
        text = revise(2, correction="3 + 3 = 6, so the sum").removesuffix('"}')
        chat = ScriptedChat(ChatReply(text, "length", COST))
        verdict = review(ChatJudge(chat, TOKENS, mode="one-call"), request)
        assert text_of(verdict) == "3 + 3 = 6, so the sum"

    def test_ten_megabytes(self) -> None:
        _, request = episode_of(STEPS)
        chat = ScriptedChat(revise(2, correction="x" * 10_000_000))
        verdict = review(ChatJudge(chat, TOKENS, mode="one-call"), request)
        assert text_of(verdict) == "x" * 64


class TestCutOnly:
    def test_the_second_cut_at_a_place_gets_a_correction(self) -> None:
        episode, request = episode_of(STEPS)
        chat = ScriptedChat(revise(2), revise(1), "3 + 3 = 6")
        judge = ChatJudge(chat, TOKENS, mode="cut-only")
        verdict = review(judge, request)
        assert verdict == Verdict.revise(1, "", "wrong", COST)
        episode.send(verdict)
        episode.send(Chunk(frozen_ids(TOKENS.encode("3 + 3 = 8\n\n"))))
        again = review(judge, episode.need.request)  # type: ignore[union-attr]
        assert (again.step, text_of(again), again.usage) == (0, "3 + 3 = 6\n\n", COST + COST)
        episode.send(again)
        assert episode.text == "1 + 2 = 3\n\n3 + 3 = 6\n\n"

    def test_other_places_and_other_rows_are_first_cuts(self) -> None:
        _, request = episode_of(STEPS)
        chat = ScriptedChat(*[revise(n) for n in (2, 1, 2, 2)], "6")
        judge = ChatJudge(chat, TOKENS, mode="cut-only")
        for _ in range(3):  # steps 2, 1, 2: never twice in a row at one place
            assert review(judge, request).correction == ""
        assert review(judge, request).correction != ""
        chat = ScriptedChat(*[revise(2)] * 4)
        judge = ChatJudge(chat, TOKENS, mode="cut-only", memory=2)
        for rollout in (1, 2, 3, 1):  # the first is forgotten by then
            key = RowKey(5, 6, "t", rollout)
            changed = ReviewRequest(
                request.task, request.prompt_ids, request.accepted_ids, request.accepted_text,
                request.chunk_ids, request.steps, 0, 1, 64, request.finish, key,
            )  # fmt: skip
            assert review(judge, changed).correction == ""
        assert len(judge._cuts._last) == 2

    def test_outside_a_runner_the_prompt_names_the_row(self) -> None:
        def without_key(prompt: int) -> ReviewRequest:
            episode = Episode(
                Task("t", "p"),
                [prompt],
                kind=Kind.INTERVENED,
                tokenizer=TOKENS,
                config=EpisodeConfig(),
            )
            request = episode.preview(Chunk(frozen_ids(TOKENS.encode(STEPS))))
            assert request is not None and request.key is None
            return request

        chat = ScriptedChat(revise(2), revise(2), revise(2), "6")
        judge = ChatJudge(chat, TOKENS, mode="cut-only")
        assert review(judge, without_key(1)).correction == ""
        assert review(judge, without_key(2)).correction == ""
        assert review(judge, without_key(2)).correction != ""
        assert [call["seed"] for call in chat.calls] == [None] * 4


class TestFailures:
    @pytest.mark.parametrize(
        ("reply", "cause"),
        [
            ("I think it is fine.", "unparsed"),
            (revise(0), "bad_step"),
            (revise(4), "bad_step"),
            (revise("two"), "bad_step"),
            (revise(None), "bad_step"),
            (revise(1).replace("revise", "delete"), "unparsed"),
        ],
    )
    def test_an_answer_that_is_none(self, reply: str, cause: str) -> None:
        _, request = episode_of(STEPS)
        with pytest.raises(JudgeError) as caught:
            review(ChatJudge(ScriptedChat(reply), TOKENS), request)
        assert (caught.value.cause, caught.value.usage) == (JudgeCause(cause), COST)

    @pytest.mark.parametrize("step", ["2", "Step 2", 2.0])
    def test_a_step_as_text(self, step: object) -> None:
        _, request = episode_of(STEPS)
        assert review(ChatJudge(ScriptedChat(revise(step), "x"), TOKENS), request).step == 1

    def test_reasks(self) -> None:
        _, request = episode_of(STEPS)
        chat = ScriptedChat("what?", revise(9), revise(2), "6")
        verdict = review(ChatJudge(chat, TOKENS, reasks=2), request)
        assert (verdict.step, verdict.usage) == (1, COST + COST + COST + COST)
        assert len({call["seed"] for call in chat.calls}) == 4
        chat = ScriptedChat("what?", "what?")
        with pytest.raises(JudgeError, match="unparsed") as caught:
            review(ChatJudge(chat, TOKENS, reasks=1), request)
        assert caught.value.usage == COST + COST

    def test_a_verdict_that_was_cut_off_says_so(self) -> None:
        _, request = episode_of(STEPS)
        chat = ScriptedChat(ChatReply('{"reason": "Let me', "length", COST))
        with pytest.raises(JudgeError, match=r"^unparsed: no JSON .*ended by max_tokens = 512"):
            review(ChatJudge(chat, TOKENS), request)
        chat = ScriptedChat(ChatReply("", "refusal", COST))
        with pytest.raises(JudgeError, match=r"^unparsed: no JSON .* \(it ended by refusal\)"):
            review(ChatJudge(chat, TOKENS), request)

    @pytest.mark.parametrize(
        ("error", "cause", "spent"),
        [
            (JudgeError("rate_limit", "429", usage=Usage(calls=3, usd=2.0)), "rate_limit",
             COST + Usage(calls=3, usd=2.0)),
            (JudgeError("budget", "no more"), "budget", COST),
            (TimeoutError("slow"), "timeout", COST),
            (ConnectionResetError("gone"), "connection", COST),
            (KeyError("bug"), "internal", COST),
        ],
    )  # fmt: skip
    def test_a_second_call_that_fails_keeps_the_cost_of_the_first(
        self, error: Exception, cause: str, spent: Usage
    ) -> None:
        episode, request = episode_of(STEPS)
        judge = ChatJudge(ScriptedChat(revise(2), error), TOKENS)
        event = asyncio.run(review_chunk(judge, request, check=episode.illegal_because))
        assert isinstance(event, FailedReview)
        assert (event.cause, event.usage) == (cause, spent)

    def test_a_task_without_what_the_judge_is_to_see(self) -> None:
        _, request = episode_of(STEPS)
        chat = ScriptedChat()
        with pytest.raises(JudgeError, match="internal: task 't' has no reference") as caught:
            review(ChatJudge(chat, TOKENS, privileged="reference"), request)
        assert caught.value.usage == Usage(calls=0)

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            ({"mode": "three-call"}, "mode is one of two-call, one-call, cut-only"),
            ({"privileged": "all"}, "privileged is one of"),
            ({"temperature": -1.0}, "temperature must be >= 0"),
            ({"verdict_temperature": float("nan")}, "verdict_temperature must be >= 0"),
            ({"verdict_tokens": 0}, "verdict_tokens must be >= 1"),
            ({"reasks": -1}, "reasks must be between 0 and 31"),
            ({"memory": 0}, "memory must be >= 1"),
            ({"prompts": JudgePrompts({"review": "x"})}, r"no section \[\[case\]\]"),
            (
                {"mode": "one-call", "prompts": JudgePrompts.load("rubric")},
                r"no section \[\[review_and_correct\]\]",
            ),
        ],
    )
    def test_wrong_options(self, options: dict[str, Any], why: str) -> None:
        with pytest.raises(UsageError, match=why):
            ChatJudge(ScriptedChat(), TOKENS, **options)


class TestTests:
    def test_the_outcome_is_shown_behind_the_steps(self) -> None:
        seen: list[tuple[str, str]] = []

        async def run(task: Task, text: str) -> str:
            seen.append((task.task_id, text))
            return "1 of 2 tests passed"

        _, request = episode_of("a\n\nb", "kept\n\n")
        chat = ScriptedChat(KEEP)
        review(ChatJudge(chat, TOKENS, prompts=CODE, run_tests=run), request)
        assert seen == [("t", "kept\n\na\n\nb")]
        shown = chat.calls[0]["messages"][1].content
        assert "</step>\n\n<test_outcome>\n1 of 2 tests passed\n</test_outcome>\n" in shown

    def test_a_run_that_fails_costs_no_verdict(self) -> None:
        async def run(task: Task, text: str) -> str:
            raise RuntimeError("no sandbox")

        _, request = episode_of("a")
        chat = ScriptedChat(KEEP)
        verdict = review(ChatJudge(chat, TOKENS, prompts=CODE, run_tests=run), request)
        assert verdict.kind is VerdictKind.KEEP
        shown = chat.calls[0]["messages"][1].content
        assert "(the tests could not be run: RuntimeError: no sandbox)" in shown


def joined(written: str, chunk: str, accepted: str = "", step: int = 0, **options: Any) -> str:
    _, request = episode_of(chunk, accepted, end=options.pop("end", False))
    return join_correction(request, step, written, delimiters=DELIMITERS, **options)


class TestJoining:
    @pytest.mark.parametrize(
        ("written", "wanted"),
        [
            ("So 4.", "So 4.\n\n"),
            ("\n\n  So 4.\n", "So 4.\n\n"),
            ("<think>hm</think>\nSo 4.", "So 4.\n\n"),
            ("Step 2: So 4.", "So 4.\n\n"),
            ("**Step 2:** So 4.", "So 4.\n\n"),
            ("Corrected step:\nSo 4.", "So 4.\n\n"),
            ('<step n="2">\nSo 4.\n</step>', "So 4.\n\n"),
            ("```\nSo 4.\n```", "So 4.\n\n"),
            ("```text\nSo 4.\n```\n", "So 4.\n\n"),
            ("```python\nx = 1\n```", "```python\nx = 1\n```\n\n"),
            ("So 4.\n\nAnd 5.", "So 4.\n\n"),
            ("So 4.\r\n\r\n\r\nAnd 5.", "So 4.\n\n\n"),
            ("We see:\n```python\nx\n```", "We see:\n"),
            ("Step 3: So 4.", "Step 3: So 4.\n\n"),  # another number is the student's own
            ("", ""),
            (" \n\t", ""),
            ("<think>never ends", ""),
            # The kept text once more:
            ("Take two and two.\n\nSo 4.", "So 4.\n\n"),
            ("First of all.\n\nTake two and two.\n\nSo 4.", "So 4.\n\n"),
            ("Take two and two.", ""),
            ("Take two and two.\nSo 4.", "So 4.\n\n"),
            ("Take two and two. So 4.", "Take two and two. So 4.\n\n"),
        ],
    )
    def test_a_step_behind_steps(self, written: str, wanted: str) -> None:
        chunk = "Take two and two.\n\nSo 5.\n\nDone."
        assert joined(written, chunk, "First of all.\n\n", 1) == wanted

    def test_the_student_numbers_its_steps(self) -> None:
        chunk = "Step 1: a\n\nStep 2: b\n\n"
        assert joined("Step 2: c", chunk, step=1) == "Step 2: c\n\n"

    @pytest.mark.parametrize(
        ("written", "cut", "wanted"),
        [
            ("is 4.", " is 5.\n\n", " is 4.\n\n"),
            (" is 4.", " is 5.\n\n", " is 4.\n\n"),
            ("The sum of them is 4.", " is 5.\n\n", " is 4.\n\n"),
            ("s 4.", "s 5.\n\n", "s 4.\n\n"),
            (", which is 4.", " is 5.\n\n", ", which is 4.\n\n"),
        ],
    )
    def test_within_a_line(self, written: str, cut: str, wanted: str) -> None:
        assert joined(written, cut, "First.\n\nThe sum of them") == wanted

    def test_a_blank_at_the_end_of_what_is_kept(self) -> None:
        assert joined(" 4.", "5.\n\n", "The sum is ") == "4.\n\n"
        assert joined("4.", "5.\n\n", "The sum is ") == "4.\n\n"

    def test_a_continued_text_is_taken_as_it_is(self) -> None:
        assert joined("s 4.\n\nAnd", " to 5.\n\n", "This equal", continued=True) == "s 4.\n\n"
        assert joined("Step 1: x\n\ny", "z\n\n", "a\n\n", continued=True) == "Step 1: x\n\n"
        # A server that dropped the white space at the prefill's end.
        assert joined("\n\nSo 4.\n\nx", "So 5.\n\n", "We add.\n\n", continued=True) == "So 4.\n\n"
        # One that repeats the prefix.
        kept = "We add two and two.\n\n"
        assert joined(kept + "So 4.", "So 5.\n\n", kept, continued=True) == "So 4.\n\n"

    def test_a_text_that_was_cut_off_is_not_closed(self) -> None:
        assert joined("So 4, which", "So 5.\n\n", finished=False) == "So 4, which"
        assert joined("So 4.\n\nAnd", "So 5.\n\n", finished=False) == "So 4.\n\n"

    def test_what_closes_a_step(self) -> None:
        assert joined("So 4.", "So 5.\n\n\n") == "So 4.\n\n\n"
        assert joined("So 4.", "So 5") == "So 4.\n\n"  # unfinished
        assert joined("So 4.", "So 5.", end=True) == "So 4."
        assert joined("So 4.\n", "So 5.", end=True) == "So 4.\n"

    @pytest.mark.parametrize(
        ("written", "options", "wanted"),
        [
            ("    return 1", {}, "    return 1\n\n"),
            ("\n\n    return 1", {}, "    return 1\n\n"),
            ("```python\n    return 1\n```", {}, "    return 1\n\n"),
            ("Here it is:\n```py\n    return 1\n```\nBetter.", {}, "    return 1\n\n"),
            ("```python\n    return 1", {"finished": False}, "    return 1"),
            ("```\n    return 1\n```", {}, "    return 1\n\n"),
            ("```\n    return 1", {"fenced": True}, "    return 1\n\n"),
            ("```\nThat is all.", {}, "```\n"),  # the student's block is closed
            ("    return 1\n```\nDone.", {}, "    return 1\n```\n"),
            ("    a = 1\n    b = 2\n\n    c", {}, "    a = 1\n    b = 2\n\n"),
        ],
    )
    def test_inside_a_program(self, written: str, options: dict[str, Any], wanted: str) -> None:
        kept = "Code:\n\n```python\ndef f():\n\n"
        assert inside_fence(kept)
        assert joined(written, "    return 2\n\n", kept, **options) == wanted

    def test_short_lines_may_stand_there_twice(self) -> None:
        kept = "```python\nx = 1\n\n"
        assert joined("x = 1\ny = 2", "y = 3\n\n", kept) == "x = 1\ny = 2\n\n"

    def test_places(self) -> None:
        assert open_line("a\nb c") == "b c" and open_line("a\n") == open_line("") == ""
        assert open_line("x" * 999) == "x" * 200
        assert not inside_fence("```\na\n```\n") and inside_fence("```\na\n```\n\n```py\n")


def verdict_of(text: str, chunk: str = STEPS, step: int = 1, **config: Any) -> Verdict:
    _, request = episode_of(chunk, **config)
    return correction_verdict(request, step, text, tokenizer=TOKENS, reason="r", usage=COST)


class TestVerdicts:
    @pytest.mark.parametrize("text", ["3 + 3 = 7\n\n", " 3 + 3 = 7", "3 + 3 = 7\n\nSo 7."])
    def test_what_was_cut_is_no_correction(self, text: str) -> None:
        verdict = verdict_of(text)
        assert (verdict.kind, verdict.guard, verdict.usage) == (VerdictKind.KEEP, "equal", COST)
        assert verdict.reason == "the correction is what was cut; r"

    def test_what_was_cut_up_to_l_tokens_is_none_either(self) -> None:
        assert verdict_of("3 + 3 = 7, I am sure of it", max_correction=9).guard == "equal"
        assert verdict_of("3 + 3", max_correction=9).kind is VerdictKind.REVISE
        assert verdict_of("3 + 3 = 6", max_correction=9).kind is VerdictKind.REVISE

    @pytest.mark.parametrize(
        "mark",
        ["<|im_end|>", "<|eot_id|>", "</s>", "<think>", "</think>", "[/INST]", "<end_of_turn>",
         "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|endoftext|>",
         "<eos>", "<bos>", "<pad>", "<<SYS>>", "[TOOL_CALLS]", "[/THINK]", "<tool_call>",
         "<|fim-middle|>", "\u25c1/think\u25b7", "<end_of_utterance>"],
    )  # fmt: skip
    def test_marks_of_any_template(self, mark: str) -> None:
        verdict = verdict_of(f"3 + 3 = 6{mark}\n\n")
        assert (verdict.kind, verdict.guard) == (VerdictKind.KEEP, "special_token")
        assert mark in verdict.reason
        assert verdict_of("a" * 64 + mark).kind is VerdictKind.REVISE  # behind the cut

    @pytest.mark.parametrize(
        "text", ["a <b> | c |> d", "f <| x |> g", "if a < b and c > d: [INSTALL]", "<s>x</b>"]
    )
    def test_what_only_looks_like_one(self, text: str) -> None:
        assert verdict_of(text).kind is VerdictKind.REVISE

    def test_cut_to_l_tokens(self) -> None:
        verdict = verdict_of("é" * 40, max_correction=9)
        assert verdict.correction == tuple(TOKENS.encode("éééé"))
        assert len(verdict.correction) == 8  # the ninth byte is half a character
        _, request = episode_of(STEPS)
        text = "x" * 99_999
        plain = correction_verdict(request, 1, text, tokenizer=None, reason="", usage=COST)
        assert isinstance(plain.correction, str) and len(plain.correction) == (64 + 8) * 256

    @pytest.mark.parametrize("kind", ["byte", "bpe", "sentencepiece", "metaspace", "char"])
    def test_what_the_judge_cuts_is_what_is_spliced_in(
        self, made_tokenizers: dict[str, Tokenizer], kind: str
    ) -> None:
        tokenizer = made_tokenizers[kind]
        for limit in (1, 3, 8, 40):
            episode, request = episode_of(
                "Step one: a + b = c.\n\nStep two: 12.\n\n",
                tokenizer=tokenizer,
                max_correction=limit,
            )
            text = "We add: 30 = 42. We stop."
            verdict = correction_verdict(
                request, 1, text, tokenizer=tokenizer, reason="", usage=COST
            )
            before = episode.text
            episode.send(verdict)
            review = episode.reviews[-1]
            assert before == "" and review.outcome is Outcome.REVISE
            assert review.correction_tokens <= limit
            if not isinstance(verdict.correction, str):
                assert tuple(episode.ids[review.cut :]) == verdict.correction
            assert episode.text.startswith("Step one: a + b = c.")
            if limit == 40 and kind != "sentencepiece":
                assert episode.text == "Step one: a + b = c.\n\n" + text

    def test_what_a_cut_token_carried_is_the_episodes_to_restore(
        self, made_tokenizers: dict[str, Tokenizer]
    ) -> None:
        tokenizer = made_tokenizers["bpe"]
        episode = Episode(
            Task("t", "p"),
            [1],
            kind=Kind.INTERVENED,
            tokenizer=tokenizer,
            config=EpisodeConfig(step_delimiters=("te",), max_correction=4),
        )
        chunk = Chunk(frozen_ids(tokenizer.encode("Step one: a + b = c.")))
        request = episode.preview(chunk)
        assert request is not None and request.steps[1].carry == "Ste"
        text = "p 42. And more of it."
        verdict = correction_verdict(request, 1, text, tokenizer=tokenizer, reason="", usage=COST)
        assert isinstance(verdict.correction, str) and text.startswith(verdict.correction)
        episode.send(chunk)
        episode.send(verdict)
        assert episode.text == "Ste" + verdict.correction and len(episode) == 4

    @given(
        st.text(alphabet="aé😀 \n`.", max_size=40),
        st.text(alphabet="aé😀 \n`.", min_size=1, max_size=40),
        st.text(alphabet="bé😀 \n`.<|s>/", max_size=60),
        st.integers(0, 20),
        st.booleans(),
    )
    @settings(deadline=None)
    def test_the_rules_take_every_correction(
        self, accepted: str, chunk: str, written: str, limit: int, continued: bool
    ) -> None:
        episode, request = episode_of(chunk, accepted, max_correction=limit)
        kept_before = request.accepted_ids.tolist()
        for step in range(len(request.steps)):
            text = join_correction(
                request, step, written, delimiters=DELIMITERS, continued=continued
            )
            verdict = correction_verdict(
                request, step, text, tokenizer=TOKENS, reason="", usage=COST
            )
            assert episode.illegal_because(verdict) == ""
        episode.send(verdict)
        assert episode.ids.tolist()[: len(kept_before)] == kept_before


def test_the_leak_guard_sees_the_correction() -> None:
    task = Task("t", "1 + 2 + 3?", answer="6")
    episode, request = episode_of(STEPS, task=task)
    judge = ChatJudge(ScriptedChat(revise(3), "So the answer is 6."), TOKENS)
    event = asyncio.run(
        review_chunk(judge, request, guards=[LeakGuard(TOKENS)], check=episode.illegal_because)
    )
    assert isinstance(event, Verdict) and event.guard == "leak"


def test_it_is_a_judge_and_the_script_a_chat_model() -> None:
    judge = ChatJudge(ScriptedChat())
    check_judge(judge)
    assert isinstance(judge, Judge) and isinstance(ScriptedChat(), ChatModel)


def test_in_the_runner() -> None:
    """One row end to end: corrected, kept, and kept by a rule."""
    eos = TOKENS.EOS
    chunks = [
        TOKENS.encode("1 + 2 = 4\n\nSo 4"),
        TOKENS.encode("3 + 3 = 6\n\n"),
        [*TOKENS.encode("So it's 6."), eos],
        [*TOKENS.encode("Six."), eos],
    ]
    chat = ScriptedChat(
        revise(1, "1 + 2 is 3"), "1 + 2 = 3", KEEP, revise(1, "no"), "So it's 6.",
    )  # fmt: skip
    parts = Parts(
        ScriptedPolicy(chunks),
        ChatJudge(chat, TOKENS),
        verifier=FunctionVerifier(lambda task, response: float(response.endswith("6."))),
    )
    config = RolloutConfig(
        EpisodeConfig(chunk_tokens=64, max_reviews=3, max_response=400), n_control=0, n_intervened=1
    )
    runner = Runner(parts, PromptBuilder(TOKENS), config)
    ((row,),) = asyncio.run(runner.collect([Task("t", "1 + 2 + 3?")], update=0))
    assert TOKENS.decode(row.ids[:-1]) == "1 + 2 = 3\n\n3 + 3 = 6\n\nSo it's 6."
    assert (row.valid, row.reward) == (True, 1.0)
    first, second, third = row.reviews
    assert (first.outcome, first.step, first.cut, first.correction_tokens) == (
        Outcome.REVISE, 0, 0, len("1 + 2 = 3\n\n"),
    )  # fmt: skip
    assert (second.outcome, second.reason) == (Outcome.KEEP, "fine")
    assert (third.outcome, third.guard) == (Outcome.GUARDED, "equal")
    assert [r.usage.calls for r in row.reviews] == [2, 1, 2]
    assert "".join(map(chr, row.provenance[: len("1 + 2 = 3\n\n")])) == "\x01" * 11
