"""What a chat model is asked: texts in files that people can edit, and how a case is shown in them.

A prompt file has sections that begin with a line `[[name]]`; a backslash at a line's end joins it
with the next. Fixed text comes first and what changes from review to review last, so that a server
reads what two prompts have in common only once: the instructions for all of them, then the problem
and what is given with it for all rows of a task, then the accepted text, then the steps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from mintrl_env.errors import JudgeCause, JudgeError, UsageError
from mintrl_env.splice import FENCE
from mintrl_env.types import Finish, ReviewRequest, Task

Privileged = Literal["none", "reference", "rubric", "tests"]
"""What of a task a judge is shown that the policy is not."""

RunTests = Callable[[Task, str], Awaitable[str]]
"""Runs a task's public tests on a response so far, and says in words how that went ("": nothing)."""

PRIVILEGED: tuple[Privileged, ...] = ("none", "reference", "rubric", "tests")
DOMAINS = ("code", "math", "rubric")
"""The prompt files of this package."""

# section -> the fields that it must hold, those that it may hold
FIELDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = MappingProxyType(
    {
        "review": ((), ()),
        "review_and_correct": ((), ()),
        "case": (("problem", "steps"), ("given", "accepted", "outcome", "ending")),
        "correct": (("step",), ("tail",)),
        "correct_inside": (("step", "tail"), ()),
        "correct_code": (("step",), ("tail",)),
        "write": ((), ()),
        "write_case": (("problem",), ("given",)),
        "derive": ((), ()),
        "derive_case": (("problem", "correction"), ("accepted",)),
    }
)
_SECTION = re.compile(r"^\[\[([A-Za-z_ ]+)\]\][ \t]*$", re.MULTILINE)
_TESTS = 4000  # characters of a task's tests, and of a test run's outcome
NOTHING = "(nothing yet)"


@dataclass(frozen=True, slots=True)
class JudgePrompts:
    """The texts of a judge, by section.

    Attributes:
        sections: section -> text, as `FIELDS` lists them; not all of them are needed by every judge.
        latex: its answers hold LaTeX (see `judge_parsing.restore_latex`).

    Raises:
        UsageError: an unknown section, or one without a field that it must hold.
    """

    sections: Mapping[str, str]
    latex: bool = True

    def __post_init__(self) -> None:
        for name, text in self.sections.items():
            if name not in FIELDS:
                raise UsageError(
                    f"no prompt section is called [[{name}]]; there are {', '.join(FIELDS)}"
                )
            for field in FIELDS[name][0]:
                if f"{{{field}}}" not in text:
                    raise UsageError(f"the prompt section [[{name}]] does not hold {{{field}}}")

    @classmethod
    def load(cls, domain: str = "math", file: str | Path | None = None) -> JudgePrompts:
        """The texts of a domain, with the sections of a file of your own in their place.

        Args:
            domain: one of `DOMAINS`.
            file: a prompt file; what it leaves out is the domain's.

        Raises:
            UsageError: no such domain; a file that cannot be read or used.
        """
        if domain not in DOMAINS:
            raise UsageError(
                f"no prompts for the domain {domain!r}; there are {', '.join(DOMAINS)}"
            )
        sections = dict(_of_package(domain))
        if file is not None:
            try:
                text = Path(file).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"prompt_file {str(file)!r} cannot be read: {error}") from error
            try:
                sections |= parse_sections(text)
                return cls(sections, latex=domain != "code")
            except UsageError as error:
                raise UsageError(f"prompt_file {str(file)!r}: {error}") from error
        return cls(sections, latex=domain != "code")

    def has(self, section: str) -> bool:
        return section in self.sections

    def text(self, section: str, **values: str) -> str:
        """A section with its fields filled in.

        Raises:
            UsageError: there is no such section.
        """
        if section not in self.sections:
            raise UsageError(f"the judge's prompts have no section [[{section}]]")
        return fill(self.sections[section], **values)


@cache
def _of_package(domain: str) -> Mapping[str, str]:
    path = resources.files("mintrl_env") / "prompts_data" / f"{domain}.txt"
    return MappingProxyType(parse_sections(path.read_text(encoding="utf-8")))


def parse_sections(text: str) -> dict[str, str]:
    """Section -> text of a prompt file, lines joined, white space around a section taken off.

    Raises:
        UsageError: no section, or one that stands there twice.
    """
    parts = _SECTION.split(text.replace("\r\n", "\n"))[1:]
    names = [name.strip() for name in parts[::2]]
    if not names:
        raise UsageError("there is no section: a line such as [[review]] begins one")
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise UsageError(f"the section [[{min(twice)}]] stands there twice")
    bodies = (re.sub(r"\\\n", "", body).strip() for body in parts[1::2])
    return dict(zip(names, bodies, strict=True))


def fill(template: str, **values: str) -> str:
    """Put values into a text, once: neither braces in the template nor in a value matter."""
    if not values:
        return template
    fields = "|".join(values)
    return re.sub(rf"\{{({fields})\}}", lambda match: values[match[1]], template)


def case_values(
    request: ReviewRequest, given: str, *, delimiters: Sequence[str] = (), outcome: str = ""
) -> dict[str, str]:
    """The fields of [[case]].

    Args:
        given: from `given_text`.
        delimiters: of steps; without one at its end, and without an EOS, the last is unfinished.
        outcome: what running the public tests said; "" shows nothing.
    """
    ended = request.finish is Finish.EOS
    return {
        "problem": request.task.prompt_text,
        "given": given,
        "accepted": request.accepted_text or NOTHING,
        "steps": steps_text(request, delimiters),
        "outcome": block("test_outcome", outcome[:_TESTS], before="\n") if outcome.strip() else "",
        "ending": "The student ended here." if ended else "The student will go on from here.",
    }


def steps_text(request: ReviewRequest, delimiters: Sequence[str] = ()) -> str:
    """The pending steps, numbered from 1, white space at their ends and empty lines left out."""
    lines = []
    for number, step in enumerate(request.steps, 1):
        mark = ""
        if number == 1 and request.accepted_text[-1:] not in ("", "\n"):
            mark += ' begun="above"'
        if number == len(request.steps) and is_unfinished(request, delimiters):
            mark += ' unfinished="yes"'
        text = re.sub(r"\A(?:[ \t]*\n)+", "", step.text).rstrip()
        lines.append(f'<step n="{number}"{mark}>\n{text}\n</step>')
    return "\n".join(lines)


def is_unfinished(request: ReviewRequest, delimiters: Sequence[str]) -> bool:
    """Does the chunk end inside a step?"""
    if request.finish is Finish.EOS:
        return False
    ends = tuple(d for d in delimiters if d and d != FENCE)
    text = request.chunk_text
    closes_fence = FENCE in delimiters and text.rstrip("\n").endswith(FENCE)
    return not (text.endswith(ends) or closes_fence)


def given_text(task: Task, privileged: Privileged, *, rubric_field: str = "rubric") -> str:
    """What a judge is shown of the task besides the problem, "" where it is nothing.

    Raises:
        JudgeError: "internal", the task does not hold it.
    """
    if privileged == "none":
        return ""
    if privileged == "reference":
        if task.context and task.context.strip():
            return block("reference", task.context.strip())
        if task.answer and task.answer.strip():
            return block("reference", f"The final answer is {task.answer.strip()}.")
        missing = "no reference (context or answer): map one with tasks.columns.context"
    elif privileged == "rubric":
        rubrics = rubrics_of(task, rubric_field)
        if rubrics:
            return block("rubric", numbered(rubrics))
        missing = f"no rubric: its row needs a field {rubric_field!r}"
    else:
        tests = tests_text(task.tests or {})
        if tests:
            return block("tests", tests)
        missing = "no tests"
    raise JudgeError(JudgeCause.INTERNAL, f"task {task.task_id!r} has {missing}")


def rubrics_of(task: Task, field: str = "rubric") -> tuple[str, ...]:
    """A task's rubrics out of its metadata: a text, a list of texts, or of mappings that hold one
    as `criterion`, `description`, `text` or `title`."""
    value = task.metadata.get(field)
    items = [value] if isinstance(value, (str, Mapping)) else value
    if not isinstance(items, Sequence):
        return ()
    texts = []
    for item in items:
        if isinstance(item, Mapping):
            names = ("criterion", "description", "text", "title")
            item = next((item[name] for name in names if item.get(name)), "")
        if str(item).strip():
            texts.append(str(item).strip())
    return tuple(texts)


def numbered(texts: Sequence[str]) -> str:
    return "\n".join(f"{i}. {text}" for i, text in enumerate(texts, 1))


def tests_text(tests: Mapping[str, Any]) -> str:
    """A code task's tests for a reader, at most 4000 characters of them."""
    lines: list[str] = []
    if tests.get("fn_name"):
        lines.append(f"Function: {tests['fn_name']}")
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if isinstance(inputs, Sequence) and isinstance(outputs, Sequence):
        for given, wanted in zip(inputs, outputs, strict=False):
            lines += [f"Input: {_plain(given)}", f"Output: {_plain(wanted)}"]
    elif isinstance(tests.get("asserts"), Sequence) and not isinstance(tests["asserts"], str):
        lines += [str(snippet).strip() for snippet in tests["asserts"]]
    elif tests.get("check"):
        lines.append(str(tests["check"]).strip())
    elif tests:
        lines.append(_plain(dict(tests)))
    text = "\n".join(lines)
    return text if len(text) <= _TESTS else text[:_TESTS] + "\n..."


def _plain(value: object) -> str:
    if isinstance(value, str):
        return value.strip("\n") if "\n" not in value.strip("\n") else "\n" + value.strip("\n")
    return json.dumps(value, ensure_ascii=False, default=str)


def block(tag: str, text: str, *, before: str = "") -> str:
    return f"{before}<{tag}>\n{text}\n</{tag}>"
