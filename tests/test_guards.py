"""Guards: what leaks, and, as important, what does not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mintrl_env.episode import Episode, EpisodeConfig
from mintrl_env.errors import UsageError
from mintrl_env.guards import LeakGuard, SpecialTokenGuard
from mintrl_env.leaks import held, shares_run
from mintrl_env.prompts import ByteTokenizer
from mintrl_env.types import (
    Chunk,
    Kind,
    ReviewRequest,
    Task,
    Usage,
    Verdict,
    VerdictKind,
    frozen_ids,
)

TOKENS = ByteTokenizer()


def request_of(chunk: str, accepted: str = "", **task: Any) -> ReviewRequest:
    """The request that an episode would raise for `chunk` behind `accepted`."""
    config = EpisodeConfig(chunk_tokens=4096, max_response=65536, step_delimiters=("\n",))
    episode = Episode(
        Task("t", **{"prompt": "p", **task}),
        [1],
        kind=Kind.INTERVENED,
        tokenizer=TOKENS,
        config=config,
    )
    if accepted:
        episode.send(Chunk(frozen_ids(TOKENS.encode(accepted))))
        episode.send(Verdict.keep())
    request = episode.preview(Chunk(frozen_ids(TOKENS.encode(chunk))))
    assert request is not None
    return request


def leak(
    answer: str | None,
    correction: str,
    *,
    problem: str = "How many?",
    chunk: str = "wrong\n",
    accepted: str = "",
    step: int = 0,
    context: str | None = None,
    **options: Any,
) -> str:
    """Why the guard keeps, or ""."""
    request = request_of(chunk, accepted, prompt=problem, answer=answer, context=context)
    verdict = Verdict.revise(step, correction, usage=Usage(usd=1.0))
    after = asyncio.run(LeakGuard(TOKENS, **options)(request, verdict))
    if after is verdict:
        return ""
    assert (after.kind, after.guard, after.usage) == (VerdictKind.KEEP, "leak", verdict.usage)
    return after.reason


# --- the answer in the text

HELD = [
    ("18", "18"),
    ("18", "So it is 18."),
    ("18", "9 * 2 = 18"),
    ("18", "18 * 2 = 36"),  # as an operand, too
    ("18", "=18\n"),
    ("18", "costs $18, which"),
    ("18", "18.0"),
    ("18", "18.00 dollars"),
    ("18", "018"),
    ("18", "18cm and 18%"),
    ("18", "**18**"),
    ("18", "\\boxed{18}"),
    ("18", "\\(18\\)"),
    ("18", "(18)"),
    ("18", "17,18,19"),
    ("18", "1, 18, 3"),
    ("18", "x=18"),
    ("18", "10-18 is negative"),
    ("18", "- 18 apples"),  # a bullet
    ("18.0", "18"),
    ("18.50", "it costs 18.5"),
    ("$18", "18"),
    ("\\$18", "18"),
    ("18\\%", "18 percent"),
    ("45^\\circ", "an angle of 45 degrees"),
    ("45^{\\circ}", "45°"),
    ("18 \\text{ cm}", "18 cm"),
    ("18 apples", "she has 18"),
    ("x = 5", "then 5"),
    ("0", "x = 0"),
    ("0", "-0"),
    ("0.5", "0.5"),
    (".5", "0.50"),
    ("0.5", "about .5"),
    ("1000", "1,000"),
    ("1,000", "1000"),
    ("1000", "1{,}000"),
    ("1000", "1\\,000"),
    ("1000", "1 000 dollars"),
    ("1234567.5", "1,234,567.50"),
    ("10" * 200, "10" * 200),
    ("-5", "x = -5"),
    ("-5", "x = \u22125"),
    ("-5", "= - 5"),
    ("-5", "falls to -5 degrees"),
    ("-5", "3, -5"),
    ("-5", "($-5$)"),
    ("\\frac{3}{4}", "\\frac{3}{4}"),
    ("\\frac{3}{4}", "\\frac {3} { 4 }"),
    ("\\frac{3}{4}", "$\\dfrac{3}{4}$"),
    ("\\frac{3}{4}", "\\tfrac34"),
    ("\\frac34", "3/4"),
    ("3/4", "so 3 / 4 of it"),
    ("-\\frac{3}{4}", "= -\\frac{3}{4}"),
    ("\\frac{x}{2}", "\\frac{x} {2}"),
    ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\frac{\\pi}{2})"),
    ("2\\pi", "= 2 \\pi"),
    ("x+1", "f = x + 1"),
    ("(3,4)", "at (3, 4)"),
    ("[2,5)", "on [2, 5)"),
    ("6:30", "at 6:30"),
    ("Alice", "It was alice."),
    ("New York", "to New\nYork"),
    ("\\text{Friday}", "on Friday"),
    ("Zoë", "Zoë!"),
]


@pytest.mark.parametrize(("answer", "text"), HELD)
def test_held(answer: str, text: str) -> None:
    assert held(text, answer)
    assert leak(answer, text)


NOT_HELD = [
    ("18", ""),
    ("18", "180"),
    ("18", "118"),
    ("18", "1.18"),
    ("18", "0.18"),
    ("18", "18.5"),
    ("18", "18,000"),
    ("18", "2,018"),
    ("18", "1,018.5"),
    ("18", "x18 + a_18 + a_{18}"),
    ("18", "2^18"),
    ("18", "2^{18}"),
    ("18", "the 18th day"),
    ("18", "18x + 3"),
    ("18", "18\\pi"),
    ("18", "x = -18"),
    ("18", "= \u221218"),
    ("18", "one-eighteen"),
    ("123", "1,2,3"),
    ("12", "1,2"),
    ("5", ".5 and 0.5"),
    ("5", "1.5.2"),
    ("2", "the 2nd and x^2 + 2y"),
    ("200", "1,200"),
    ("-5", "10-5"),
    ("-5", "10 - 5"),
    ("-5", "10 -5"),
    ("-5", "x - 5"),
    ("-5", "(x)-5"),
    ("-5", "5"),
    ("-5", "- 5 apples\n- 5 pears"),
    ("-5", "one of the 4-5 best"),
    ("3/4", "13/4"),
    ("3/4", "3/40"),
    ("3/4", "3/4.5"),
    ("3/4", "4/3 and 3, 4"),
    ("3/4", "= -3/4"),
    ("-3/4", "3/4"),
    ("\\frac{3}{4}", "\\frac{13}{4}"),
    ("x+1", "2x+1"),
    ("x+1", "x+10"),
    ("x+1", "x+1.5"),
    ("2\\pi", "12\\pi"),
    ("2\\pi", "2\\pit"),
    ("Alice", "Malice and Alices"),
    ("New York", "Newyork"),
    ("", "anything"),
    ("$$", "anything"),
]


@pytest.mark.parametrize(("answer", "text"), NOT_HELD)
def test_not_held(answer: str, text: str) -> None:
    assert not held(text, answer)
    assert leak(answer, text) == ""


STATED = [
    ("A", "A"),
    ("A", "(A)"),
    ("(A)", "So (A)."),
    ("A", "The answer is A"),
    ("A", "so the correct option is A.\n"),
    ("A", "choose A because"),
    ("\\text{(C)}", "Choice C fits"),
    ("C", "\\boxed{\\text{C}}"),
    ("yes", "Yes."),
    ("No", "So the answer is no, as"),
    ("even", "so n is even."),
    ("even", "Therefore: even"),
    ("true", "#### True"),
    ("x", "the answer: x"),
]


@pytest.mark.parametrize(("answer", "text"), STATED)
def test_letters_and_common_words_that_are_stated(answer: str, text: str) -> None:
    assert held(text, answer) == "states"
    # The problem lists the choices, which is no licence to name one.
    assert leak(answer, text, problem="(A) (B) (C), yes or no, true or x, even or odd?")


NOT_STATED = [
    ("A", "A train leaves at noon. A second one follows."),
    ("A", "Let A be the area, so A = 3 and AB = AC."),
    ("a", "This is a step in a proof."),
    ("B", "from A to B we go, then back"),
    ("I", "I add the two."),
    ("x", "2x + 3 = x - 1, so x = 4"),
    ("no", "There is no way around it."),
    ("No", "no apples are left, so she has none"),
    ("even", "even then the sum is odd"),
    ("all", "all of these are equal"),
    ("true", "it is true for n = 1 and so on"),
    ("one", "one of them is red"),
]


@pytest.mark.parametrize(("answer", "text"), NOT_STATED)
def test_letters_and_common_words_in_ordinary_text(answer: str, text: str) -> None:
    assert held(text, answer) == ""
    assert leak(answer, text) == ""


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("18", "in all \uff11\uff18"),  # full width
        ("18", "in all \U0001d7cf\U0001d7d6"),  # mathematical bold
        ("18", "in all 1\u200b8"),  # zero width
        ("18", "in all 1\u00ad8"),  # soft hyphen
        ("18", "in all 1\\!8"),
        ("18", "in all 1\\,8"),
        ("18", "in all 1{}8"),
        ("12000", "in all 12\u202f000"),
        ("318", "in all \u0663\u0661\u0668"),
        ("1/2", "in all \u00bd"),
        ("18", "eighteen eggs"),
        ("42", "forty-two eggs"),
        ("42", "Forty two eggs"),
        ("42", "forty\u2011two eggs"),
        ("105", "a hundred and five eggs"),
        ("1200", "one thousand two hundred eggs"),
        ("-15", "minus fifteen degrees"),
        ("2", "The answer is two."),
        ("Alice", "It was Al\u200bice"),
        ("x+1", "f = \uff58 \uff0b 1"),
    ],
)
def test_look_alikes_and_words_are_the_answer_too(answer: str, text: str) -> None:
    assert held(text, answer)
    assert leak(answer, text)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("2", "two apples and two pears"),
        ("1", "one of them"),
        ("18", "one hundred eighteen eggs"),
        ("18", "eighteen hundred eggs"),
        ("18", "eighteen thousand"),
        ("18", "the eighteenth"),
        ("20", "twenty-one"),
        ("5", "three point five"),
        ("15", "minus fifteen degrees"),
        ("-15", "fifteen degrees"),
        ("118", "1\u00b9\u2078"),
        ("18", "\\frac{1}{8}"),
        ("18", "weighteen"),
        ("3.5", "thirty-five"),
    ],
)
def test_words_and_raised_digits_that_are_something_else(answer: str, text: str) -> None:
    assert held(text, answer) == ""


@pytest.mark.parametrize("answer", ["18", "3/4", "-5", "1,000", "(3, 4)", "x+1"])
@pytest.mark.parametrize(
    "text", ["111," * 15_000, "111 " * 15_000 + "1", "1" * 60_000, "1\\," * 20_000, "18 " * 9_000]
)
def test_a_policy_that_repeats_itself_is_read_once(answer: str, text: str) -> None:
    """Each took up to minutes, for all rows of the loop, where digits were gone over again."""
    assert held(text, answer) == ("holds" if text.startswith(answer + " ") else "")


@given(st.integers(-(10**9), 10**9), st.sampled_from(["", "so x = ", "she has ", "\n", "("]))
def test_every_integer_is_found_as_itself_only(n: int, lead: str) -> None:
    assert held(f"{lead}{n}", str(n))
    assert held(f"{lead}{n:,}", str(n))
    assert not held(f"{lead}{n}", str(n + 1))
    assert not held(f"{lead}{n}7", str(n))
    if n:
        assert not held(f"{lead}{-n}", str(n))


@given(st.text(max_size=40), st.text(max_size=12), st.text(max_size=12))
def test_any_text_has_a_result(text: str, answer: str, before: str) -> None:
    assert held(text, answer, before) in ("", "holds", "states")
    shares_run(text, before, 2, but_not=answer)


# --- what stands in front


def test_an_answer_that_straddles_the_border() -> None:
    assert held("8", "18", "= 1") and not held("8", "8", "= 1")
    assert not held("1", "1", "= 12.")
    assert held("5", "-5", "x = -") and not held("5", "5", "x = -")
    assert not held("plus", "18", "18 ")  # what stands before is not the text's
    assert leak("18", "8", accepted="9 * 2 = 1", chunk="7\n")
    assert leak("8", "8 and so on", accepted="9 * 2 = 1", chunk="7\n") == ""


# --- what is known


def test_restating_a_known_value_is_no_leak() -> None:
    assert leak("18", "18 - 3 = 15") == "the correction holds the answer"
    assert leak("18", "18 - 3 = 15", problem="She has 18 eggs.") == ""
    assert leak("18", "18 - 3 = 15", problem="She has 180 eggs.")
    assert leak("18", "18 - 3 = 15", chunk="9 * 2 = 18\nbad\n", step=1) == ""
    assert leak("18", "18 - 3 = 15", accepted="9 * 2 = 18\n") == ""
    assert leak("18", "18 - 3 = 15", problem="She has 18 eggs.", allow_seen=False)


def test_only_what_is_kept_is_known() -> None:
    assert leak("18", "x = 18", chunk="good\nbad\nx = 18\n", step=1)
    assert leak("18", "x = 18", chunk="x = 18\n", step=0)
    assert leak("18", "x = 18", chunk="x = 18\nbad\n", step=1) == ""
    # A step past the end is somebody else's to refuse; nothing of the last step is known.
    assert leak("18", "x = 18", chunk="x = 18\n", step=5)


def test_a_known_value_may_not_be_called_the_answer() -> None:
    for text in ("The answer is 18.", "\\boxed{18}", "#### 18", "so our final answer: $18$"):
        assert leak("18", text, problem="She has 18 eggs.") == "the correction states the answer"
        assert leak("18", text, accepted="x = 18\n") == "the correction states the answer"
    assert leak("18", "18.", accepted="So the answer is ", problem="18 eggs", chunk="17\n")
    assert leak("Bob", "So the tallest is Bob.", problem="Alice or Bob?")
    assert leak("Bob", "Bob is 5 cm taller than Alice", problem="Alice or Bob?") == ""
    assert leak("18", "To answer this. She has 18 eggs.", problem="She has 18 eggs.") == ""


def test_messages_are_a_problem_too() -> None:
    request = request_of("x\n", prompt=({"role": "user", "content": "18 eggs"},), answer="18")
    verdict = Verdict.revise(0, "18 - 3")
    assert asyncio.run(LeakGuard(TOKENS)(request, verdict)) is verdict


# --- answer lines


@pytest.mark.parametrize(
    ("accepted", "correction", "leaks"),
    [
        ("", "Answer: 5\n", True),
        ("", "a step\nAnswer: 5\n", True),
        ("", "The Answer: none\n", False),
        ("one\nAns", "wer: 5\n", True),  # begun in the kept text
        ("one\nAnswer: ", "5\n", True),  # continued by the correction
        ("Answer: 5\n", "a step\n", False),  # a whole line before it
        ("one\n", "another\n", False),
    ],
)
def test_answer_lines(accepted: str, correction: str, leaks: bool) -> None:
    why = leak("99", correction, accepted=accepted, answer_line="^Answer:")
    assert why == ("the correction writes the answer line" if leaks else "")


def test_answer_lines_of_ids_without_a_gold_answer() -> None:
    request = request_of("x\n", answer=None)
    verdict = Verdict.revise(0, TOKENS.encode("#### 7"))
    assert asyncio.run(LeakGuard(TOKENS, answer_line="####")(request, verdict)).guard == "leak"
    assert asyncio.run(LeakGuard(TOKENS)(request, verdict)) is verdict


# --- same_answer, n-grams


def test_same_answer_is_asked_last_but_one_and_only_for_what_is_left() -> None:
    asked: list[str] = []

    async def same(task: Task, text: str) -> bool:
        asked.append(text)
        return text == "\\sqrt{324}"

    assert leak("18", "\\sqrt{324}", same_answer=same) == "the correction equals the answer"
    assert leak("18", "\\sqrt{9}", same_answer=same) == ""
    assert leak("18", "18", same_answer=same) == "the correction holds the answer"
    assert asked == ["\\sqrt{324}", "\\sqrt{9}"]


REFERENCE = "First add the three eggs, then multiply by the price of $2 to get it."


@pytest.mark.parametrize(
    ("correction", "n", "leaks"),
    [
        ("then MULTIPLY -- by the price of 2 to get", 8, True),
        ("then multiply by the price of 2 to", 8, True),
        ("then multiply by the price of 2", 8, False),  # seven
        ("then multiply by the price of 2", 7, True),
        ("First add these eggs, then multiply by a price of 2", 8, False),
        ("hen multiply by the price of 2 to", 8, False),  # words, not characters
        ("then multiply by the price of 2 to get it", 0, False),
    ],
)
def test_ngrams(correction: str, n: int, leaks: bool) -> None:
    why = leak(None, correction, context=REFERENCE, ngram=n)
    assert why == (f"the correction repeats {n} words of the reference solution" if leaks else "")


def test_all_of_a_short_reference() -> None:
    assert leak(None, REFERENCE, context=REFERENCE, ngram=99) == (
        "the correction repeats all of the reference solution"
    )
    assert leak(None, REFERENCE[:-4], context=REFERENCE, ngram=99) == ""
    assert leak("9", "add them all up", context="add them all up") == ""  # four words


def test_ngrams_of_the_problem_and_of_the_kept_response_are_known() -> None:
    problem = "Janet sells what is left at the market each day. How much?"
    context = "Janet sells what is left at the market each day, so it is nine times two."
    restated = "Janet sells what is left at the market each day"
    assert leak(None, restated, context=context)
    assert leak(None, restated, context=context, problem=problem) == ""
    assert leak(None, restated, context=context, accepted=restated + ".\n") == ""
    assert leak(None, restated, context=context, problem=problem, allow_seen=False)
    assert leak(None, restated + " so it is nine times", context=context, problem=problem)


HIDDEN = "Start from the back and carry the seven over twice"


@pytest.mark.parametrize(
    ("task", "what"),
    [
        ({"context": HIDDEN}, "reference solution"),
        ({"answer": HIDDEN + " : 18"}, "answer"),
        ({"tests": {"asserts": [f"# {HIDDEN}", "assert f(1) == 2"]}}, "tests"),
        ({"tests": {"inputs": ["1 2"], "outputs": [[HIDDEN]]}}, "tests"),
        ({"metadata": {"gold_solution": HIDDEN}}, "task's gold_solution"),
        ({"metadata": {"rationale": HIDDEN}}, "task's rationale"),
        ({"metadata": {"rubric": ["Right.", {"criterion": HIDDEN}]}}, "task's rubric"),
        # the context is one solution, and the row has another
        ({"context": "Something else.", "metadata": {"solution": HIDDEN}}, "task's solution"),
    ],
)
def test_whatever_the_policy_is_not_shown_counts_as_reference(
    task: dict[str, Any], what: str
) -> None:
    def why(correction: str, **options: Any) -> str:
        request = request_of("wrong\n", prompt="How many?", **task)
        verdict = Verdict.revise(0, correction)
        return asyncio.run(LeakGuard(TOKENS, **options)(request, verdict)).reason

    copied = "from the back and carry the SEVEN over"
    assert why(copied) == f"the correction repeats 8 words of the {what}"
    assert why(copied.replace("carry", "c\u200barry")) != ""
    assert why("from the front and carry the seven over") == ""
    assert why(copied, ngram=0) == ""
    if "metadata" in task:
        assert why(copied, fields=[]) == ""


@pytest.mark.parametrize(
    ("metadata", "correction", "reason"),
    [
        ({"gold": "18"}, "9 * 2 = 18", "the correction holds the answer"),
        ({"final_answer": 18}, "it is eighteen eggs", "the correction holds the answer"),
        ({"answers": ["17", "18"]}, "9 * 2 = 18", "the correction holds the answer"),
        ({"gold": "18"}, "9 * 2 = 19", ""),
        ({"gold": ["17", ["18"]]}, "9 * 2 = 18", "the correction holds the answer"),
        ({"level": 18, "rubric": "18"}, "9 * 2 = 18", ""),  # no answers
    ],
)
def test_a_gold_answer_in_another_column(
    metadata: dict[str, Any], correction: str, reason: str
) -> None:
    request = request_of("wrong\n", prompt="How many?", metadata=metadata)
    verdict = asyncio.run(LeakGuard(TOKENS)(request, Verdict.revise(0, correction)))
    assert verdict.reason == reason


def test_a_short_reference_is_the_answer_where_there_is_no_other() -> None:
    assert leak(None, "9 * 2 = 18", context="18") == "the correction holds the answer"
    assert leak("36", "9 * 2 = 18", context="18") == ""  # a step of the way


def test_hidden_tests_of_megabytes_are_read_in_part() -> None:
    numbers = [str(n) for n in range(300_000)]
    request = request_of("x\n", tests={"inputs": numbers, "outputs": numbers})
    copied = Verdict.revise(0, " ".join(numbers[100:110]))
    assert asyncio.run(LeakGuard(TOKENS)(request, copied)).guard == "leak"


# --- the guard's shell


def test_keeps_and_bare_cuts_pass() -> None:
    request = request_of("x\n", answer="18")
    for verdict in (Verdict.keep("18"), Verdict.revise(0), Verdict.revise(0, [])):
        assert asyncio.run(LeakGuard(TOKENS)(request, verdict)) is verdict
        assert asyncio.run(SpecialTokenGuard(TOKENS)(request, verdict)) is verdict


def test_options_are_checked() -> None:
    with pytest.raises(UsageError, match=r"answer_line '\(' is no regex"):
        LeakGuard(TOKENS, answer_line="(")
    with pytest.raises(UsageError, match="fields is a list"):
        LeakGuard(TOKENS, fields="gold")
    for ngram in (-1, 1.5, True, None):
        with pytest.raises(UsageError, match="ngram"):
            LeakGuard(TOKENS, ngram=ngram)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["byte", "bpe", "sentencepiece", "metaspace", "char"])
def test_special_tokens_as_ids_and_as_text(made_tokenizers: dict[str, Any], kind: str) -> None:
    tokenizer = made_tokenizers[kind]
    guard = SpecialTokenGuard(tokenizer)
    request = request_of("x\n")
    plain = tokenizer.encode("a step")
    for special in sorted(tokenizer.special_ids):
        for ids in ([special], [*plain, special], [special, *plain], [*plain, special, *plain]):
            kept = asyncio.run(guard(request, Verdict.revise(0, ids, usage=Usage(usd=2.0))))
            assert (kept.kind, kept.guard) == (VerdictKind.KEEP, "special_token")
            assert kept.usage.usd == 2.0 and "special token" in kept.reason
    for verdict in (Verdict.revise(0, plain), Verdict.revise(0, "a step")):
        assert asyncio.run(guard(request, verdict)) is verdict
    # A text that writes a special token is one in tokenizers that read it so.
    written = Verdict.revise(0, "a<|eos|>")
    is_special = not tokenizer.special_ids.isdisjoint(tokenizer.encode("a<|eos|>"))
    assert is_special == (kind != "byte")
    assert (asyncio.run(guard(request, written)) is written) != is_special
