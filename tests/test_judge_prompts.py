"""Prompt files, and what of a case is shown: exact texts, fixed part first, nothing privileged unasked."""

from __future__ import annotations

import os
import re
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest

from mintrl_env.episode import Episode, EpisodeConfig
from mintrl_env.errors import JudgeError, UsageError
from mintrl_env.judge_prompts import (
    DOMAINS,
    FIELDS,
    PRIVILEGED,
    JudgePrompts,
    case_values,
    fill,
    given_text,
    is_unfinished,
    parse_sections,
    rubrics_of,
    steps_text,
)
from mintrl_env.judge_prompts import tests_text as text_of_tests
from mintrl_env.prompts import ByteTokenizer
from mintrl_env.types import Chunk, Finish, Kind, ReviewRequest, Task, Verdict, frozen_ids

TOKENS = ByteTokenizer()
DELIMITERS = ("\n\n", "```")


def request_of(
    chunk: str, accepted: str = "", *, end: bool = False, task: Task | None = None
) -> ReviewRequest:
    episode = Episode(
        task or Task("t", "1 + 2 + 3?"),
        [1],
        kind=Kind.INTERVENED,
        tokenizer=TOKENS,
        config=EpisodeConfig(chunk_tokens=4096, max_response=65536, step_delimiters=DELIMITERS),
    )
    if accepted:
        episode.send(Chunk(frozen_ids(TOKENS.encode(accepted))))
        episode.send(Verdict.keep())
    ids = TOKENS.encode(chunk) + [TOKENS.EOS] * end
    finish = Finish.EOS if end else Finish.LENGTH
    request = episode.preview(Chunk(frozen_ids(ids), finish=finish))
    assert request is not None
    return request


class TestFiles:
    @pytest.mark.parametrize("domain", DOMAINS)
    def test_each_domain_has_what_its_judge_needs(self, domain: str) -> None:
        prompts = JudgePrompts.load(domain)
        needed = {"review", "case", "correct", "correct_inside"}
        if domain == "rubric":
            needed |= {"derive", "derive_case"}
        else:
            needed |= {"review_and_correct", "write", "write_case"}
        assert needed <= set(prompts.sections)
        assert prompts.has("correct_code") == (domain == "code")
        assert prompts.latex == (domain != "code")
        for section, text in prompts.sections.items():
            assert not text.endswith("\\") and "\\\n" not in text
            known = {field for fields in FIELDS[section] for field in fields}
            assert set(re.findall(r"\{([a-z_]+)\}", text)) <= known
        for section in ("review", "review_and_correct"):
            if prompts.has(section):
                text = prompts.sections[section]
                assert '{"reason": "...", "verdict": "...", "step": ...' in text
                assert "unfinished" in text or "isn't finished" in text

    @pytest.mark.parametrize("domain", ["math", "rubric"])
    def test_a_correction_never_states_the_answer(self, domain: str) -> None:
        prompts = JudgePrompts.load(domain)
        for section in ("correct", "correct_inside", "review_and_correct"):
            if prompts.has(section):
                assert "Never write the final answer." in prompts.sections[section]

    def test_the_files_are_in_the_package_data(self) -> None:
        import mintrl_env

        folder = Path(mintrl_env.__file__).parent / "prompts_data"
        assert sorted(os.listdir(folder)) == [f"{domain}.txt" for domain in DOMAINS]

    def test_a_file_of_your_own_replaces_what_it_has(self, tmp_path: Path) -> None:
        own = tmp_path / "own.txt"
        own.write_text(
            "A note.\n\n[[review]]\nLook \\\nclosely: {x}.\n\nNow.\n\n[[correct]]\nWrite {step}."
        )
        prompts = JudgePrompts.load("math", own)
        assert prompts.text("review") == "Look closely: {x}.\n\nNow."
        assert prompts.text("correct", step="3", tail="") == "Write 3."
        assert prompts.sections["case"] == JudgePrompts.load("math").sections["case"]
        assert JudgePrompts.load("code", own).latex is False

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("no section", "there is no section"),
            ("[[reveiw]]\nx", r"no prompt section is called \[\[reveiw\]\]; there are review, "),
            ("[[case]]\n{problem}", r"\[\[case\]\] does not hold {steps}"),
            ("[[review]]\na\n[[review]]\nb", "stands there twice"),
        ],
    )
    def test_a_wrong_file_is_refused(self, tmp_path: Path, text: str, why: str) -> None:
        own = tmp_path / "own.txt"
        own.write_text(text)
        with pytest.raises(UsageError, match=rf"prompt_file .*own\.txt'.*{why}"):
            JudgePrompts.load("math", own)

    def test_what_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="cannot be read"):
            JudgePrompts.load("math", tmp_path / "none.txt")
        with pytest.raises(UsageError, match="no prompts for the domain 'chess'"):
            JudgePrompts.load("chess")
        with pytest.raises(UsageError, match=r"no section \[\[write\]\]"):
            JudgePrompts({"review": "x"}).text("write")

    def test_sections_and_fields(self) -> None:
        text = (
            "intro\r\n[[review]]\r\na [[b]] c\r\n[[1, 2]]\r\n\r\n[[ case ]]\r\n{problem}{steps}\r\n"
        )
        assert parse_sections(text) == {"review": "a [[b]] c\n[[1, 2]]", "case": "{problem}{steps}"}
        assert fill("{a} {b} {c} {{a}}", a="{b}", b=r"\1") == r"{b} \1 {c} {{b}}"
        assert fill("{a}") == "{a}"


class TestCase:
    def test_the_whole_case(self) -> None:
        request = request_of("1 + 2 = 4\n\n4 + 3 = ", "We add.\n\n")
        values = case_values(request, "", delimiters=DELIMITERS)
        assert JudgePrompts.load("math").text("case", **values) == (
            "<problem>\n1 + 2 + 3?\n</problem>\n\n"
            "The accepted part of the solution:\n<accepted>\nWe add.\n\n\n</accepted>\n\n"
            'The next steps:\n<step n="1">\n1 + 2 = 4\n</step>\n'
            '<step n="2" unfinished="yes">\n4 + 3 =\n</step>\n\n'
            "The student will go on from here. Which step is the earliest wrong one, if any? Answer "
            "with the JSON object."
        )

    def test_what_changes_comes_last(self) -> None:
        """Two reviews of one row share all up to the accepted text's end, which only grows."""
        prompts = JudgePrompts.load("math")
        task = Task("t", "P", context="R")
        texts = [
            prompts.text(
                "case",
                **case_values(
                    request_of(chunk, accepted, task=task), given_text(task, "reference")
                ),
            )
            for accepted, chunk in (("a\n\n", "b\n\n"), ("a\n\nb\n\n", "c\n\n"))
        ]
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False))
        common = "".join(a for a, _ in pairs)
        assert common.endswith(
            "<reference>\nR\n</reference>\nThe accepted part of the solution:\n<accepted>\na\n\n"
        )

    def test_steps(self) -> None:
        request = request_of("half\n\n\n```\n  x = 1\n\n\n  y\n```\nend\n\n", "begun ")
        assert steps_text(request, DELIMITERS) == (
            '<step n="1" begun="above">\nhalf\n</step>\n'
            '<step n="2">\n```\n  x = 1\n</step>\n'
            '<step n="3">\n  y\n```\n</step>\n'
            '<step n="4">\nend\n</step>'
        )
        assert "begun" not in steps_text(request_of("x", "a\n"), DELIMITERS)

    @pytest.mark.parametrize(
        ("chunk", "end", "wanted"),
        [("a", False, True), ("a\n", False, True), ("a\n\n", False, False), ("a", True, False),
         ("```\na\n```\n", False, False), ("```\na\n```", False, False)],
    )  # fmt: skip
    def test_an_unfinished_step(self, chunk: str, end: bool, wanted: bool) -> None:
        request = request_of(chunk, end=end)
        assert is_unfinished(request, DELIMITERS) is wanted
        values = case_values(request, "", delimiters=DELIMITERS)
        assert ('unfinished="yes"' in values["steps"]) is wanted
        goes_on = "The student will go on from here."
        assert values["ending"] == ("The student ended here." if end else goes_on)

    def test_an_empty_start_and_an_outcome(self) -> None:
        values = case_values(request_of("x"), "", outcome="1 of 2 tests passed")
        assert values["accepted"] == "(nothing yet)"
        assert values["outcome"] == "\n<test_outcome>\n1 of 2 tests passed\n</test_outcome>"
        assert len(case_values(request_of("x"), "", outcome="x" * 99999)["outcome"]) < 4100
        assert case_values(request_of("x"), "", outcome=" \n")["outcome"] == ""


class TestPrivileged:
    TASK = Task(
        "t",
        "P",
        answer="42",
        context="REFERENCE",
        tests={"type": "stdin", "inputs": ["1 2\n"], "outputs": ["3\n"]},
        metadata={"rubric": ["RUBRIC one", "two"]},
    )

    @pytest.mark.parametrize(
        ("privileged", "wanted"),
        [
            ("none", ""),
            ("reference", "<reference>\nREFERENCE\n</reference>"),
            ("rubric", "<rubric>\n1. RUBRIC one\n2. two\n</rubric>"),
            ("tests", "<tests>\nInput: 1 2\nOutput: 3\n</tests>"),
        ],
    )
    def test_nothing_but_what_is_asked_for(self, privileged: Any, wanted: str) -> None:
        assert given_text(self.TASK, privileged) == wanted
        assert privileged in PRIVILEGED

    def test_the_answer_where_there_is_no_solution(self) -> None:
        given = given_text(Task("t", "P", answer="42"), "reference")
        assert given == "<reference>\nThe final answer is 42.\n</reference>"

    @pytest.mark.parametrize("privileged", ["reference", "rubric", "tests"])
    def test_a_task_without_it_is_a_failure(self, privileged: Any) -> None:
        with pytest.raises(JudgeError, match=r"^internal: task 't' has no "):
            given_text(Task("t", "P", answer=" "), privileged)

    def test_rubrics(self) -> None:
        def of(value: object) -> tuple[str, ...]:
            return rubrics_of(Task("t", "P", metadata={"r": value}), "r")

        assert of("one ") == ("one",)
        assert of(["a", " ", {"criterion": "b", "weight": 2}, {"title": "c"}]) == ("a", "b", "c")
        assert of({"description": "d"}) == ("d",)
        assert of(None) == of(3) == of([]) == of([{}]) == ()

    def test_tests(self) -> None:
        call = {"type": "call", "fn_name": "f", "inputs": [[1, [2]], ["a"]], "outputs": [3, None]}
        assert text_of_tests(call) == (
            'Function: f\nInput: [1, [2]]\nOutput: 3\nInput: ["a"]\nOutput: null'
        )
        assert (
            text_of_tests({"asserts": ["assert f(1)\n", "assert f(2)"]})
            == "assert f(1)\nassert f(2)"
        )
        assert text_of_tests({"check": "def check(c):\n  pass\n"}) == "def check(c):\n  pass"
        assert text_of_tests({"inputs": ["1\n2\n"], "outputs": ["3"]}) == "Input: \n1\n2\nOutput: 3"
        assert text_of_tests({"type": "odd"}) == '{"type": "odd"}'
        assert text_of_tests({}) == ""
        assert len(text_of_tests({"asserts": ["x" * 100] * 100})) < 4100
