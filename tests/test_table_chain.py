"""The table chain: square, splits, demonstrations, answers and the step checker, by hand values."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mintrl_env.errors import UsageError
from mintrl_env.table_chain import (
    ALPHABET,
    SPLITS,
    TAGS,
    VERIFIER,
    Cell,
    ChainSettings,
    ExactLineVerifier,
    TableChain,
    check,
    parse_prompt,
    split_of,
)
from mintrl_env.types import Task

CHAIN = TableChain()


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@given(st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_every_seed_gives_a_latin_square_with_wrong_values_that_are_wrong(seed: int) -> None:
    chain = TableChain(ChainSettings(square_seed=seed))
    digits = np.arange(10)
    assert all((np.sort(line) == digits).all() for line in (*chain.square, *chain.square.T))
    assert (chain.wrong != chain.square).all()
    assert ((chain.wrong >= 0) & (chain.wrong <= 9)).all()
    assert [(chain.cells == c).sum() for c in Cell] == [60, 25, 15]
    assert ((chain.cells != Cell.KNOWN).sum(axis=1) == 4).all()
    assert chain.blind.sum() == 2 and (chain.cells[chain.blind] != Cell.KNOWN).all()


def test_the_square_is_fixed_by_its_seed_alone() -> None:
    again = TableChain(ChainSettings(hard_share=(0.0, 1.0), note_share=0.1))
    assert (again.square == CHAIN.square).all() and (again.wrong == CHAIN.wrong).all()
    other = TableChain(ChainSettings(square_seed=8))
    assert (other.square != CHAIN.square).any()


def test_answer_by_hand() -> None:
    prompt = "6a9b4c0d6e7f7g2h1i1j7k5l9|"
    assert parse_prompt(prompt) == (6, (9, 4, 0, 6, 7, 7, 2, 1, 1, 7, 5, 9))
    state, states = 6, []
    for operand in (9, 4, 0, 6, 7, 7, 2, 1, 1, 7, 5, 9):
        state = int(CHAIN.square[state][operand])
        states.append(state)
    assert CHAIN.states(prompt) == states
    assert CHAIN.answer(prompt) == f"Bc{states[2]}f{states[5]}i{states[8]}l{states[11]}"


@pytest.mark.parametrize(
    "text", ["", "6", "6a9|", "6a9b4c0d6e7f7g2h1i1j7k5l9", "xa9b4c0d6e7f7g2h1i1j7k5l9|"]
)
def test_what_is_no_prompt_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="not a table-chain prompt"):
        parse_prompt(text)


def test_splits_never_share_a_prompt_and_are_repeatable() -> None:
    prompts = {name: [t.prompt for t in CHAIN.tasks(name, 300, seed=3)] for name in SPLITS}
    for name, texts in prompts.items():
        assert len(set(texts)) == 300
        assert {split_of(str(text)) for text in texts} == {name}
    everything = [text for texts in prompts.values() for text in texts]
    assert len(set(everything)) == 300 * len(SPLITS)
    assert [t.prompt for t in CHAIN.tasks("train", 40, seed=3)] == prompts["train"][:40]
    assert [t.prompt for t in CHAIN.tasks("train", 40, seed=4)] != prompts["train"][:40]


@given(st.text(alphabet=ALPHABET, max_size=30))
def test_every_text_has_one_split(text: str) -> None:
    assert split_of(text) in SPLITS


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown split 'test'"):
        CHAIN.tasks("test", 1, seed=0)  # type: ignore[arg-type]


def test_tasks_carry_answer_verifier_and_hardness() -> None:
    for task in CHAIN.tasks("heldout", 20, seed=0):
        assert isinstance(task.prompt, str) and set(task.prompt) <= set(ALPHABET)
        assert len(task.prompt) == 26 and task.verifier == VERIFIER
        assert task.answer == CHAIN.answer(task.prompt)
        assert task.metadata["hard_steps"] == CHAIN.hard_steps(task.prompt)


def test_the_share_of_hard_steps_follows_its_range() -> None:
    for low, high in ((0.0, 0.0), (1.0, 1.0), (0.2, 0.7)):
        chain = TableChain(ChainSettings(hard_share=(low, high)))
        steps = [t.metadata["hard_steps"] for t in chain.tasks("train", 400, seed=0)]
        assert np.mean(steps) / 12 == pytest.approx((low + high) / 2, abs=0.03)


def shares(chain: TableChain, writer: str, count: int = 1500) -> tuple[dict[str, float], float]:
    """Share of right values by kind of cell, and of results with a note, counted in the text."""
    generator = rng(1)
    right: dict[str, list[bool]] = {}
    notes = []
    for _ in range(count):
        prompt = chain.prompt(generator, "warmup")
        lines = chain.demonstration(prompt, writer, generator).split("\n")  # type: ignore[arg-type]
        for expression, result in zip(lines[0:24:2], lines[1:24:2], strict=True):
            state, operand, value = int(expression[1]), int(expression[3]), int(result[-1])
            kind = (
                "blind" if chain.blind[state, operand] else Cell(chain.cells[state, operand]).name
            )
            is_right = value == chain.square[state, operand]
            assert is_right or value == chain.wrong[state, operand]
            right.setdefault(kind, []).append(is_right)
            notes.append(result[1] == "!")
    return {kind: float(np.mean(values)) for kind, values in right.items()}, float(np.mean(notes))


def test_the_student_and_the_teacher_know_what_they_should() -> None:
    known, notes = shares(CHAIN, "student")
    assert known["KNOWN"] == pytest.approx(0.985, abs=0.01)
    assert known["MIDDLING"] == pytest.approx(0.3, abs=0.03)
    assert known["RARE"] == pytest.approx(0.03, abs=0.015)
    assert notes == pytest.approx(0.1 * 0.6, abs=0.015)
    known, notes = shares(CHAIN, "teacher")
    assert min(known[c.name] for c in Cell) > 0.98
    assert known["blind"] == pytest.approx(0.1, abs=0.05)
    assert notes == pytest.approx(0.6, abs=0.02)


def test_a_perfect_demonstration_is_right_and_a_flawed_one_goes_on_from_its_error() -> None:
    perfect = TableChain(ChainSettings(teacher_p=1.0, teacher_blind=0, note_share=0.0))
    prompt = perfect.prompt(rng(), "train")
    text = perfect.demonstration(prompt, "teacher", rng())
    assert check(perfect.answer(prompt), text) and len(text) == 105
    assert perfect.first_wrong_line(prompt, text) is None
    hopeless = TableChain(ChainSettings(student_p=(0.0, 0.0, 0.0), student_dialect=0.0))
    lines = hopeless.demonstration(prompt, "student", rng()).split("\n")
    for before, after in zip(lines[1:22:2], lines[2:24:2], strict=True):
        assert before[1] == after[1]
    assert lines[-1] == "B" + "".join(f"{TAGS[i]}{lines[2 * i + 1][1]}" for i in (2, 5, 8, 11))


def test_an_error_is_mended_only_by_another_error() -> None:
    """Two states never meet on one operand, so one wrong value makes all states after it wrong."""
    prompt = CHAIN.prompt(rng(), "train")
    _, operands = parse_prompt(prompt)
    right = CHAIN.states(prompt)
    state = (right[3] + 1) % 10
    for step in range(4, 12):
        state = int(CHAIN.square[state, operands[step]])
        assert state != right[step]


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("a6*9\n=2\nBc8f3i7l0", True),
        ("Bc8f3i7l0", True),
        ("Bc8f3i7l0\n", False),
        ("Bc8f3i7l1", False),
        ("Bc8f3i7l0 ", False),
        ("xBc8f3i7l0", False),
        ("Bc8f3i7l0\nBc8f3i7l1", False),
        ("", False),
    ],
)
def test_check_compares_the_last_line_exactly(response: str, right: bool) -> None:
    assert check("Bc8f3i7l0", response) is right
    score = asyncio.run(ExactLineVerifier().score(Task("t", "p", "Bc8f3i7l0", VERIFIER), response))
    assert score.reward == float(right)
    assert score.status == (
        "correct" if right else "wrong" if response.split("\n")[-1][:1] == "B" else "no_answer"
    )


def test_a_task_without_an_answer_is_undecided() -> None:
    score = asyncio.run(ExactLineVerifier().score(Task("t", "p"), "Bc8f3i7l0"))
    assert math.isnan(score.reward) and score.status == "bad_gold"


class TestFirstWrongLine:
    prompt = CHAIN.prompt(rng(5), "train")
    right = TableChain(ChainSettings(teacher_p=1.0, teacher_blind=0, note_share=0.0)).demonstration(
        prompt, "teacher", rng()
    )

    def lines(self) -> list[str]:
        return self.right.split("\n")

    def find(self, lines: list[str], start: int = 0) -> int | None:
        return CHAIN.first_wrong_line(self.prompt, "\n".join(lines), start)

    def test_right_text_has_none_at_any_length(self) -> None:
        for end in range(len(self.right) + 1):
            assert CHAIN.first_wrong_line(self.prompt, self.right[:end]) is None

    def test_notes_do_not_matter(self) -> None:
        assert self.find([line.replace("=", "=!") for line in self.lines()]) is None

    def test_a_wrong_result_is_found_and_what_rightly_follows_it_is_right(self) -> None:
        lines = self.lines()
        wrong = (int(lines[5][1]) + 1) % 10
        lines[5] = f"={wrong}"
        assert self.find(lines) == 5
        # The next line still copies the old state, which does not follow from what is written.
        assert self.find(lines, start=6) == 6
        lines[6] = f"d{wrong}{lines[6][2:]}"
        assert self.find(lines[:7], start=6) is None

    @pytest.mark.parametrize("place", [0, 1, 2, 3])
    def test_any_wrong_character_of_an_expression_is_found(self, place: int) -> None:
        lines = self.lines()
        old = lines[8]
        new = {0: "a", 1: str((int(old[1]) + 1) % 10), 2: "=", 3: str((int(old[3]) + 1) % 10)}
        lines[8] = old[:place] + new[place] + old[place + 1 :]
        assert self.find(lines) == 8

    def test_answer_line_missing_step_and_surplus_line(self) -> None:
        lines = self.lines()
        assert self.find([*lines[:-1], "Bc0f0i0lx"]) == 24
        assert self.find([*lines[:4], *lines[6:]]) == 4
        assert self.find([*lines, "a"]) == 25
        assert self.find([*lines[:3], lines[3] + "0", *lines[4:]]) == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hard_cells": (25, 16)}, "hard_cells"),
        ({"hard_cells": (0, 0)}, "hard_cells"),
        ({"teacher_blind": 41}, "teacher_blind"),
        ({"student_p": (1.0, 0.5)}, "student_p"),
        ({"student_p": (1.2, 0.5, 0.0)}, "student_p"),
        ({"hard_share": (0.7, 0.2)}, "hard_share"),
        ({"note_share": -0.1}, "note"),
    ],
)
def test_settings_that_cannot_be_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ChainSettings(**change)  # type: ignore[arg-type]
