"""Does every gold answer of a data set accept itself, and no neighbour of it?

Used by `benchmarks/verifiers.py golds` and by tests/test_math_data.py. A file holds one JSON object
a line with `id` and `answer`.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

from mintrl_env.types import Task
from mintrl_env.verifiers.math_answer import MathVerifier, gold_readings
from mintrl_env.verifiers.math_equal import is_expression
from mintrl_env.verifiers.math_expr import NotRational, TooBig, Undefined, contains, exact

COLUMNS = (
    "golds",
    "unreadable",
    "box",
    "words",
    "rewritten",
    "plus one",
    "negated",
    "others",
    "others equal",
)
"""The last four count what was tried; what was accepted and should not be is in `Golds.wrong`."""


@dataclass
class Golds:
    """What one file gave.

    Attributes:
        counts: by the names of COLUMNS.
        refused: (id, form, gold, status): a gold that did not accept itself.
        unreadable: (id, gold): golds that no answer can be compared with.
        wrong: (id, kind, gold, answer): a neighbour that was accepted, or left undecided.
        equal: (id, gold, answer): other rows' answers that are the same written differently.
    """

    counts: Counter[str] = field(default_factory=Counter)
    refused: list[tuple[str, str, str, str]] = field(default_factory=list)
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    wrong: list[tuple[str, str, str, str]] = field(default_factory=list)
    equal: list[tuple[str, str, str]] = field(default_factory=list)


def rows(path: Path) -> list[tuple[str, str]]:
    """(id, answer) of every row."""
    parsed = map(json.loads, path.read_text(encoding="utf-8").rstrip("\n").split("\n"))
    return [(row["id"], row["answer"]) for row in parsed]


def box(answer: str) -> str:
    return f"We count the cases.\n\nThus $\\boxed{{{answer}}}$."


def words(gold: str) -> Iterator[str]:
    """The answer in the last line of a solution."""
    yield f"We count the cases.\n\nThe answer is {gold}."
    yield f"We count the cases.\n\n**Answer:** {gold}"
    if "$" not in gold and "\\(" not in gold:
        yield f"We count the cases.\n\nSo the final answer is ${gold}$."
        yield f"We count the cases.\n\nSo the answer is:\n\\[ {gold} \\]\n"


def rewritings(gold: str) -> Iterator[str]:
    """The same answer, as another writer sets it."""
    plain = gold.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    yield plain.replace("\\frac", "\\dfrac")
    yield plain.replace("\\frac", "\\tfrac")
    yield f" {gold} "
    yield gold + "."
    yield re.sub(r"(?<![\\A-Za-z^_{])([-+=,])(?!\\)", r" \1 ", gold)
    bare = re.sub(r"\\(?:left|right)(?![A-Za-z])", "", gold)
    yield bare
    if not re.search(r"\\[bB]ig", gold) and bare.count("(") == bare.count(")"):
        yield bare.replace("(", "\\left(").replace(")", "\\right)")


def neighbours(gold: str) -> Iterator[tuple[str, str]]:
    """(kind, answer): one more, and negated, where the gold has a value."""
    reading = gold_readings(gold)[0]
    while reading[0] == "unit":
        reading = reading[2]
    if not is_expression(reading) or contains(reading, "pm", "mp"):
        return
    try:
        value = exact(reading)
        one_more = str(value + 1)
    except (NotRational, TooBig, Undefined, ValueError):  # ValueError: too many digits to write
        yield "plus one", f"{gold}+1"
        yield "negated", f"-({gold})"
        return
    yield "plus one", one_more
    if value:
        yield "negated", str(-value)


_SIGNS = re.compile(
    r"\\(?:text|mbox|mathrm)\s*\{[^{}]*\}(?:\^\{?\d\}?)?|\^\{?\\*circ\}?|_\{?\d+\}?$|\\\$"
    r"|\\(?:left|right|[,!; ])|\\mathrm|\\?%|[\s{}$]|[.,/]+$|\^$"
)


def _crude(answer: str) -> str | Fraction:
    """An answer without what may be missing (unit, base, percent sign) and without style, by a few
    lines that share nothing with the verifier: who says that two rows' answers are the same?"""
    text = re.sub(r"\\[dt]frac", r"\\frac", re.sub(r",\\!", "", answer))
    if match := re.fullmatch(r"\s*\\\$?\s*\\frac\s*\{?(\d)\}?\s*\{?(\d)\}?\s*", text):
        return Fraction(int(match[1]), int(match[2]))
    if match := re.fullmatch(r"(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}", text):
        return int(match[1]) + Fraction(int(match[2]), int(match[3]))
    if match := re.fullmatch(r"\\binom\{(\d+)\}\{(\d+)\}", text):
        return f"{match[1]} over {min(int(match[2]), int(match[1]) - int(match[2]))}"
    while (shorter := _SIGNS.sub("", text)) != text:
        text = shorter
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    try:
        return Fraction(text)
    except (ValueError, ZeroDivisionError):
        return text


def check(path: Path, verifier: MathVerifier, others: Iterable[str] = (), every: int = 1) -> Golds:
    """Try every `every`-th gold of a file.

    Args:
        others: answers of other files; each gold meets its two successors in alphabetical order
            among them and its file's, and one drawn from its file.
    """
    found = Golds()
    draw = random.Random(path.name)
    all_rows = rows(path)
    ordered = sorted({*others, *(answer for _, answer in all_rows)})
    place = {answer: at for at, answer in enumerate(ordered)}
    for row, gold in all_rows[::every]:
        task = Task(row, "", gold)
        found.counts["golds"] += 1
        if not gold_readings(gold):
            found.counts["unreadable"] += 1
            found.unreadable.append((row, gold))
            continue
        for form, responses in (
            ("box", [box(gold)]),
            ("words", list(words(gold))),
            ("rewritten", [box(text) for text in rewritings(gold)]),
        ):
            statuses = {verifier.score_sync(task, response).status for response in responses}
            found.counts[form] += statuses == {"correct"}
            found.refused += [(row, form, gold, s) for s in sorted(statuses - {"correct"})]
        for kind, answer in neighbours(gold):
            found.counts[kind] += 1
            if verifier.score_sync(task, box(answer)).reward != 0.0:
                found.wrong.append((row, kind, gold, answer))
        successors = ordered[place[gold] + 1 : place[gold] + 3]
        for answer in (*successors, draw.choice(all_rows)[1]):
            if answer == gold or not gold_readings(answer):
                continue
            found.counts["others"] += 1
            if verifier.score_sync(task, box(answer)).reward == 0.0:
                continue
            if _crude(answer) == _crude(gold):
                found.counts["others equal"] += 1
                found.equal.append((row, gold, answer))
            else:
                found.wrong.append((row, "others", gold, answer))
    return found
