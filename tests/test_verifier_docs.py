"""docs/verifiers.md: its examples run, its tables hold, its commands exist."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import Any

import pytest

from mintrl_env import registry
from mintrl_env.types import Task
from mintrl_env.verifiers.math_answer import MathVerifier
from mintrl_env.verifiers.math_extract import extract
from mintrl_env.verifiers.sandbox import SandboxUnavailable
from mintrl_env.verifiers.sandbox_choice import choose_sandbox

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "verifiers.md"
TEXT = PAGE.read_text(encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading, without the code marks."""
    part = TEXT.split(f"\n## {heading}\n", 1)[1]
    rows = re.findall(r"^\|(.*)\|$", part.split("\n## ", 1)[0], flags=re.MULTILINE)[2:]
    return [[cell.strip().strip("`") for cell in row.split("|")] for row in rows]


def test_the_examples_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._registered, "verifier", {})
    names: dict[str, Any] = {}
    tried = 0
    for section in re.split(r"\n(?=## )", TEXT):
        heading = section.split("\n", 1)[0]
        if heading == "## Code" and not sandboxed():
            continue
        # The closing fence right after a line of output is no output.
        text = re.sub(r"^```$", "", section, flags=re.MULTILINE)
        test = doctest.DocTestParser().get_doctest(text, names, heading, str(PAGE), 0)
        runner = doctest.DocTestRunner(verbose=False)
        runner.run(test, clear_globs=False)
        names.update(test.globs)
        assert runner.failures == 0, heading
        tried += runner.tries
    assert tried > 15


def sandboxed() -> bool:
    try:
        choose_sandbox("auto")
    except SandboxUnavailable:
        return False
    return True


@pytest.mark.parametrize(("response", "read"), table("Math: what is read"))
def test_what_is_read(response: str, read: str) -> None:
    assert ", ".join(extract(response).parts) == ("" if read == "nothing" else read)


@pytest.mark.parametrize(
    ("gold", "answer", "paid"), [row[:3] for row in table("Math: what is equal")]
)
def test_what_is_equal(gold: str, answer: str, paid: str) -> None:
    score = MathVerifier(workers=1).score_sync(Task("t", "", gold), f"\\boxed{{{answer}}}")
    assert score.status == {"yes": "correct", "no": "wrong"}[paid]


def test_its_commands_and_links_exist() -> None:
    for script in set(re.findall(r"python (benchmarks/\S+\.py)", TEXT)):
        assert (ROOT / script).exists()
    headings = {
        re.sub(r"[^a-z0-9 -]", "", heading.lower()).strip().replace(" ", "-")
        for heading in re.findall(r"^## (.*)$", TEXT, flags=re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]*)\)", TEXT)) <= headings
    for page in re.findall(r"\]\(([a-z_]+\.md)\)", TEXT):
        assert (PAGE.parent / page).exists()
