"""What a model's text means: every form has its outcome, and nothing but a JudgeError comes out."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mintrl_env.errors import JudgeCause, JudgeError
from mintrl_env.judge_parsing import (
    MAX_REPLY,
    Answer,
    last_object,
    parse_answer,
    restore_latex,
    step_index,
    without_thoughts,
)
from mintrl_env.surrogates import whole_text
from mintrl_env.types import VerdictKind

KEEP = '{"reason": "fine", "verdict": "keep", "step": null}'
REVISE = '{"reason": "2 + 2 is 4", "verdict": "revise", "step": 2, "correction": "So 4."}'
REVISED = Answer(VerdictKind.REVISE, 1, "2 + 2 is 4", "So 4.")


@pytest.mark.parametrize(
    "text",
    [
        REVISE,
        f"  {REVISE}\n",
        f"```json\n{REVISE}\n```",
        f"Let me see: {{1, 2}} is a set.\n{REVISE}\nThat is all.",
        f"First I thought {KEEP}, but no: {REVISE}",
        f"<think>\n{KEEP}\n</think>\n{REVISE}",
        f"{KEEP} hm </think> {REVISE}",
        f"<think>a</think><thinking>{KEEP}</thinking>{REVISE}",
        REVISE.replace('4."}', '4.",}'),
        REVISE.replace('"revise"', '" Revise."'),
        REVISE.replace(": 2,", ': "2",'),
        REVISE.replace(": 2,", ': "Step 2",'),
        REVISE.replace(": 2,", ': "step 2.",'),
        REVISE.replace(": 2,", ': " #2 ",'),
        REVISE.replace(": 2,", ': "[2]",'),
        REVISE.replace(": 2,", ": 2.0,"),
        REVISE.replace('{"reason"', '{"extra": [1, {"verdict": "keep"}], "reason"'),
        REVISE.removesuffix("}"),
        REVISE.removesuffix('"}'),
        f"Here: {REVISE.removesuffix('}')}",
    ],
)
def test_the_same_verdict_in_many_forms(text: str) -> None:
    assert parse_answer(text, 3) == REVISED


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no JSON object with a verdict in ''"),
        ("keep", "no JSON object"),
        ("[1, 2]", "no JSON object"),
        ('{"step": 2}', "no JSON object with a verdict"),
        ('{"answer": {"verdict": "keep"}}', "no JSON object with a verdict"),
        ("{'verdict': 'keep'}", "no JSON object"),
        ('{"verdict": "maybe"}', "the verdict is 'maybe', neither keep nor revise"),
        ('{"verdict": null}', "the verdict is None"),
        ('{"verdict": ["keep"]}', r"the verdict is \['keep'\]"),
        ('{"verdict": "revise", "step": 1, "correction": 5}', "the correction is 5, no text"),
        ('{"verdict": "revise", "step": 1', "no JSON object"),  # 1, or the beginning of 12
        (f"<think>{KEEP}", "no JSON object"),
        (f'{KEEP} and {{"reason": "no, the', "no JSON object"),  # a draft is no verdict
        ('{"verdict": "revise", "step": ' + "9" * 5000 + "}", "no JSON object"),
        ('{"a": ' * 20_000, "no JSON object"),
    ],
)
def test_unparsed(text: str, why: str) -> None:
    with pytest.raises(JudgeError, match=f"^unparsed: .*{why}") as caught:
        parse_answer(text, 3)
    assert caught.value.cause is JudgeCause.UNPARSED
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "step",
    ["0", "4", "-1", "1.5", "true", "false", "null", "[2]", "{}", '""', '"two"', '"2-3"', '"Step"',
     '"0"', '"step 4"', "1e400", "-Infinity", "NaN", "9" * 4000, '"99999999999999999"'],
)  # fmt: skip
def test_a_step_that_is_none(step: str) -> None:
    with pytest.raises(JudgeError, match=r"^bad_step: ") as caught:
        parse_answer(f'{{"verdict": "revise", "step": {step}}}', 3)
    assert caught.value.cause is JudgeCause.BAD_STEP
    # With keep it says nothing.
    assert parse_answer(f'{{"verdict": "keep", "step": {step}}}', 3).kind is VerdictKind.KEEP


def test_the_step_messages() -> None:
    with pytest.raises(JudgeError, match=r"step 0 of 3 step\(s\), counted from 1"):
        step_index(0, 3)
    with pytest.raises(JudgeError, match="the step is 'two', no number"):
        step_index("two", 3)
    with pytest.raises(JudgeError, match="the step is None"):
        parse_answer('{"verdict": "revise"}', 1)
    assert [step_index(n, 3) for n in (1, 3, "1", "Step 3:", 2.0)] == [0, 2, 0, 2, 1]


def test_what_may_be_missing() -> None:
    assert parse_answer('{"verdict": "keep"}', 1) == Answer(VerdictKind.KEEP)
    for more in ("", ', "correction": null', ', "correction": ""'):
        answer = parse_answer(f'{{"verdict": "revise", "step": 1{more}}}', 1)
        assert answer == Answer(VerdictKind.REVISE, 0, "", "")
    assert parse_answer('{"verdict": "keep", "reason": ["a", 1]}', 1).reason == "['a', 1]"
    assert (
        parse_answer(json.dumps({"verdict": "keep", "reason": "x" * 9999}), 1).reason == "x" * 2000
    )


def test_json_is_mended() -> None:
    raw = '{"reason": "a\nb", "verdict": "revise", "step": 1, "correction": "\\sin \\(x\\) \\u12",}'
    assert parse_answer(raw, 1) == Answer(VerdictKind.REVISE, 0, "a\nb", "\\sin \\(x\\) \\u12")
    # A comma in front of a bracket inside a text is text.
    assert parse_answer('{"verdict": "keep", "reason": "f(a,) and [1,]",}', 1).reason == (
        "f(a,) and [1,]"
    )
    # Cut inside an escape.
    for cut in ("\\", "\\u", "\\u00e"):
        text = '{"verdict": "revise", "step": 1, "correction": "ab' + cut
        assert parse_answer(text, 1).correction == "ab"
    lone = parse_answer('{"verdict": "revise", "step": 1, "correction": "a\\ud800b"}', 1)
    assert lone.correction == "a\ufffdb"
    pair = parse_answer('{"verdict": "revise", "step": 1, "correction": "\\ud83d\\ude00"}', 1)
    assert pair.correction == "😀"


def test_latex_gets_its_backslashes_back() -> None:
    commands = (
        r"\frac{1}{2} \times \text{m} \theta \tan x \to \neq \nabla \notin \not \rightarrow \right)"
        r" \rho \beta \boxed{5} \binom{n}{k} \forall \tfrac12 \triangle \tau"
    )
    body = '{"verdict": "revise", "step": 1, "correction": "%s"}'
    assert parse_answer(body % commands, 1, latex=True).correction == commands
    escaped = commands.replace("\\", "\\\\")
    assert parse_answer(body % escaped, 1, latex=True).correction == commands
    # Tabs and newlines of a text stay, and code is not touched.
    text = "a\n\tb = 1\nnot so\n\tx\r\nTo\tin"
    assert restore_latex(text) == text
    assert parse_answer(body % r"\tan", 1).correction == "\tan"


def test_thoughts() -> None:
    assert without_thoughts("<think>a</think> b") == " b"
    assert without_thoughts("a</think>b</think>c") == "b</think>c"
    assert without_thoughts("<think>never ends") == ""
    assert without_thoughts("no thoughts") == "no thoughts"
    text = '{"verdict": "revise", "step": 1, "correction": "<think>a</think>b"}'
    assert without_thoughts(text) == text  # a guard's business
    assert parse_answer(text, 1).correction == "<think>a</think>b"


def test_last_object() -> None:
    assert last_object('{"x": 1} {"y": 2} {"x": 3, "z": {"x": 4}} {"y": 5}', "x") == {
        "x": 3,
        "z": {"x": 4},
    }
    assert last_object('\\frac{1}{"a" and "b} {"x": 1}', "x") == {"x": 1}
    assert last_object('{"x": "}{"} tail } {', "x") == {"x": "}{"}
    assert last_object("{x: 1}", "x") is None


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ('{"verdict": "revise", "step": "' + " " * 100_000 + '"}', "bad_step"),
        ('{"verdict": "revise", "step": "step' + " " * 100_000 + 'x"}', "bad_step"),
        ('{"verdict": "' + '\\"' * 60_000, "unparsed"),
        ('"' + '\\"' * 60_000, "unparsed"),
        ('{"verdict": "' + '\\"' * 60_000 + "\\", "unparsed"),
        ("<think></think>" * 500_000, "unparsed"),
        ("<think>" * 1_000_000, "unparsed"),
        ('{"verdict": "' + "\ud800" * 100_000 + '"}', "unparsed"),
        ('{"verdict": ' + "[" * 900 + "]" * 900 + "}", "unparsed"),
        ('{"verdict": "revise", "step": ' + "9" * 4000 + "}", "bad_step"),
        ('{"verdict": "revise", "step": ' + "9" * 5000 + "}", "unparsed"),
        ('{"verdict": "revise", "step": 1e400}', "bad_step"),
        ('{"verdict": "revise", "step": NaN}', "bad_step"),
        ('{"verdict": "revise", "step": -Infinity}', "bad_step"),
    ],
)
def test_what_repeats_itself_is_read_once(text: str, cause: str) -> None:
    """Each of these took minutes or more where any part was gone over again for every other part."""
    with pytest.raises(JudgeError) as caught:
        parse_answer(text, 3)
    assert caught.value.cause == cause
    assert len(str(caught.value)) < 1000


def test_the_last_of_two_keys_and_an_object_in_a_list() -> None:
    assert parse_answer('{"verdict": "keep", "verdict": "revise", "step": 9, "step": 2}', 3) == (
        Answer(VerdictKind.REVISE, 1)
    )
    assert parse_answer('[{"verdict": "revise", "step": 2}]', 3).step == 1


def test_halves_of_characters_are_joined_or_replaced() -> None:
    text = "a\ud83d\ude00b\ud800\ud800\udc00\udc00c"
    assert whole_text(text) == "a\U0001f600b\ufffd\U00010000\ufffdc"
    assert whole_text("\ud800" * 200_000) == "\ufffd" * 200_000


def test_a_huge_reply_is_bounded() -> None:
    started = time.monotonic()
    text = '{"verdict": "revise", "step": 1, "correction": "' + "x" * 10_000_000 + '"}'
    answer = parse_answer(text, 1)
    assert answer.step == 0 and set(answer.correction) == {"x"}
    assert MAX_REPLY - 100 < len(answer.correction) < MAX_REPLY
    for hostile in ('{"', '{"a": {', "{" * 100, '{"verdict', "\\", '"', '{"a": "\\', "<think>"):
        with pytest.raises(JudgeError):
            parse_answer(hostile * (2_000_000 // len(hostile)), 1)
    assert time.monotonic() - started < 120  # a hang guard


PIECES = st.sampled_from(
    ['{"verdict"', ": ", '"revise"', '"keep"', '"step"', "2", '"2"', "{", "}", '"', "\\", ",", "[",
     "]", "\n", "<think>", "</think>", "```json\n", "null", "\\u12", '"correction": "', "\ud800",
     "1e999", "-", "é", '{"reason": "x", "verdict": "revise", "step": 1, "correction": "']
)  # fmt: skip


@given(st.one_of(st.text(), st.lists(PIECES, max_size=40).map("".join)), st.integers(0, 5))
@example('{"verdict": "revise", "step": 1}', 0)
def test_nothing_but_a_judge_error_is_raised(text: str, steps: int) -> None:
    try:
        answer = parse_answer(text, steps, latex=True)
    except JudgeError as error:
        assert error.cause in (JudgeCause.UNPARSED, JudgeCause.BAD_STEP)
        str(error).encode()
        return
    (answer.reason + answer.correction).encode()
    if answer.kind is VerdictKind.REVISE:
        assert answer.step is not None and 0 <= answer.step < steps
    else:
        assert answer == Answer(VerdictKind.KEEP, reason=answer.reason)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.dictionaries(st.sampled_from(["reason", "verdict", "step", "correction"]), JSON),
    st.text(alphabet="abc .\n", max_size=20),
    st.text(alphabet="abc .\n", max_size=20),
)
def test_prose_around_an_object_changes_nothing(body: Any, before: str, after: str) -> None:
    def outcome(text: str) -> object:
        try:
            return parse_answer(text, 3)
        except JudgeError as error:
            return error.cause

    text = json.dumps({"verdict": "revise", **body})
    assert outcome(f"{before}{text}{after}") == outcome(text)


@given(st.text(), st.text(), st.integers(1, 9))
def test_what_json_writes_is_read_back(reason: str, correction: str, step: int) -> None:
    body = {"reason": reason, "verdict": "revise", "step": step, "correction": correction}
    for text in (json.dumps(body), f"Well:\n```\n{json.dumps(body, indent=1)}\n```"):
        answer = parse_answer(text, 9)
        clean = reason.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        assert (answer.step, answer.reason) == (step - 1, clean[:2000])
        assert (
            answer.correction.encode()
            == correction.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
        )
