"""docs/judges.md: its examples run, its names, files and commands exist."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import yaml

from mintrl_env.config import JudgeSection
from mintrl_env.errors import JudgeCause
from mintrl_env.registry import names

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "judges.md"
TEXT = PAGE.read_text(encoding="utf-8")


def column(heading: str, number: int) -> list[str]:
    part = TEXT.split(heading, 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\|(.*)\|$", part, flags=re.MULTILINE)[2:]
    return [row.split("|")[number].strip() for row in rows]


def test_the_examples_run() -> None:
    text = re.sub(r"^```$", "", TEXT, flags=re.MULTILINE)
    test = doctest.DocTestParser().get_doctest(text, {}, "judges", str(PAGE), 0)
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(test)
    assert runner.failures == 0 and runner.tries > 6


def test_every_judge_of_a_config_is_listed() -> None:
    listed = re.findall(r"`(\w+)`", " ".join(column("# Judges", 0)))
    assert sorted(listed) == sorted(names("judge"))


def test_the_yaml_is_a_judge_section() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.DOTALL)
    section = JudgeSection.model_validate(yaml.safe_load(text)["judge"])
    from mintrl_env.adapters.llm_judge import LLMJudge

    options = dict(section.options)
    assert options.pop("api_key_env") and options.pop("prompt_file") and options.pop("cache")
    assert repr(LLMJudge(**options)) == "LLMJudge('https://host/v1', 'Qwen/Qwen3-4B-Instruct-2507')"
    assert set(section.guards) <= set(names("guard"))


def test_causes_are_those_that_reviews_record() -> None:
    causes = [cell.strip("`") for cell in column("## Faults of a server", 1)]
    assert set(causes) - {"none"} <= {cause.value for cause in JudgeCause}


def test_its_files_and_commands_exist() -> None:
    for file in re.findall(r"`((?:tests|configs|mintrl_env)/[^`*]+\.\w+)`", TEXT):
        assert (ROOT / file).exists(), file
    from mintrl_env.cli import app

    commands = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert set(re.findall(r"`mintrl ([a-z-]+)", TEXT)) <= commands
