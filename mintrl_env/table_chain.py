"""Table chain: the procedural task of the quickstart, genuinely learnt and genuinely hard to explore.

A fixed random Latin square `*` over the ten digits is the knowledge. A problem gives a start digit
and twelve tagged digits; the response applies the square twelve times, one expression line and one
result line a step, and then reports four of the states:

    prompt      6a9b4c0d7e1f3g8h2i5j6k9l4|
    response    a6*9            tag, state so far, operand looked up in the prompt
                =2              the cell of the square
                b2*4
                ...
                Bc8f3i7l0       the answer line: the states after steps c, f, i and l, then EOS

A row of a Latin square holds each digit once, so two different states never meet on the same operand:
an error stays an error until another error happens to mend it, and the facts (100 cells) are
independent of each other. The student's demonstrations know some cells well, some half, some hardly,
and write a fixed wrong value otherwise; the teacher's know nearly all, are blind on a few, and are
written in a dialect with a note `!` before most results. The teacher is thus an imperfect judge: it
rejects right values of its blind cells, and misses wrong ones where both share the misconception.

Everything follows from `ChainSettings`; every random choice takes a numpy Generator. Splits are
disjoint by construction: a prompt's own hash says which split it belongs to.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mintrl_env.errors import UsageError
from mintrl_env.types import Score, Task

VERIFIER = "exact_line"
NOTE = "!"
ANSWER_MARK = "B"
STEP_DELIMITER = "\n"
TAGS = "abcdefghijkl"
REPORTED = (2, 5, 8, 11)
"""Indices of the steps whose states the answer line reports."""
ALPHABET = "0123456789" + TAGS + "*=" + NOTE + ANSWER_MARK + "|\n"

Writer = Literal["student", "teacher"]
Split = Literal["train", "validation", "heldout", "probe", "warmup"]
# Residues modulo 16 of a prompt's hash.
_SPLITS: dict[str, tuple[int, ...]] = {
    "heldout": (0,),
    "validation": (1,),
    "probe": (2,),
    "warmup": (3, 4, 5, 6, 7, 8, 9),
    "train": (10, 11, 12, 13, 14, 15),
}
SPLITS = tuple(_SPLITS)


class Cell(IntEnum):
    """How well the student knows a cell of the square. A step is hard where it is not KNOWN."""

    KNOWN = 0
    MIDDLING = 1
    RARE = 2


@dataclass(frozen=True, slots=True)
class ChainSettings:
    """What fixes the square, who knows which cell, and how hard the prompts are.

    Attributes:
        square_seed: draws the square, the classes of its cells, the wrong values, the blind cells.
        hard_cells: cells of each class MIDDLING and RARE; the other ones of the 100 are KNOWN.
        student_p: share of right values in the student's demonstrations, by class.
        hard_share: range of the share of hard steps, drawn uniformly for each prompt.
        teacher_p, teacher_blind, teacher_blind_p: share of right values in the teacher's
            demonstrations, the number of hard cells where it is blind, and its share there.
        note_share: share of results with a note, in a demonstration written in the dialect.
        student_dialect, teacher_dialect: share of demonstrations written in the dialect.

    Why the defaults are what they are: with a share of hard steps of 0.2 to 0.6 the warmed student
    solves about 2 %. At a `student_dialect` of 0.02 it loses its place after a correction that holds
    a note: reviews lift its success only from 5 to 10 %, against 5 to 35 % at 0.1 (144 problems,
    hard_share (0.2, 0.5), 4 reviews of 24 tokens), and then the judge has nothing to teach.
    A hard_share of (0, 0.4) is the easier start, about 17 %.
    """

    square_seed: int = 7
    hard_cells: tuple[int, int] = (25, 15)
    student_p: tuple[float, float, float] = (0.985, 0.3, 0.03)
    hard_share: tuple[float, float] = (0.2, 0.6)
    teacher_p: float = 0.992
    teacher_blind: int = 2
    teacher_blind_p: float = 0.1
    note_share: float = 0.6
    student_dialect: float = 0.1
    teacher_dialect: float = 1.0

    def __post_init__(self) -> None:
        middling, rare = self.hard_cells
        hard = middling + rare
        if min(self.hard_cells) < 0 or hard % 10 or not 10 <= hard <= 90:
            raise UsageError(
                f"hard_cells {self.hard_cells}: their sum must be 10, 20, ... 90, so that every row "
                "of the square has as many hard cells as the others"
            )
        if not 0 <= self.teacher_blind <= hard:
            raise UsageError(f"teacher_blind must lie in 0 to {hard}, not {self.teacher_blind}")
        if len(self.student_p) != len(Cell):
            raise UsageError(f"student_p needs one share a class, {len(Cell)} in all")
        shares = {
            "student_p": self.student_p,
            "hard_share": self.hard_share,
            "the teacher's shares": (self.teacher_p, self.teacher_blind_p),
            "note and dialect": (self.note_share, self.student_dialect, self.teacher_dialect),
        }
        for name, values in shares.items():
            if not all(0.0 <= value <= 1.0 for value in values):
                raise UsageError(f"{name}: shares lie in 0 to 1, not {values}")
        if self.hard_share[0] > self.hard_share[1]:
            raise UsageError(f"hard_share is a range (low, high), not {self.hard_share}")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ChainSettings:
        """Settings from a mapping, also one whose tuples JSON or YAML made lists of."""
        known = [field.name for field in fields(cls)]
        unknown = [name for name in data if name not in known]
        if unknown:
            raise UsageError(f"no setting {unknown[0]!r}; there are {', '.join(known)}")
        values: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in data.items()
        }
        return cls(**values)


def split_of(prompt: str) -> str:
    """The split that a prompt belongs to: a function of its text alone, so splits never overlap."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    residue = int.from_bytes(digest, "little") % 16
    return next(name for name, residues in _SPLITS.items() if residue in residues)


def parse_prompt(prompt: str) -> tuple[int, tuple[int, ...]]:
    """Start digit and operands of a prompt.

    Raises:
        UsageError: the text is not a prompt of this task.
    """
    start, tagged = prompt[:1], prompt[1:-1]
    tags, operands = tagged[0::2], tagged[1::2]
    digits = start + operands
    if tags != TAGS or prompt[-1:] != "|" or not (digits.isascii() and digits.isdigit()):
        raise UsageError(f"not a table-chain prompt: {prompt!r}")
    return int(start), tuple(int(digit) for digit in operands)


def check(answer: str, response: str) -> bool:
    """Is the response's last line exactly the answer line? `answer` is `B` and the four states."""
    return response.rsplit("\n", 1)[-1] == answer


class ExactLineVerifier:
    """The verifier `exact_line`: 1 where the response's last line is the task's answer, else 0."""

    async def score(self, task: Task, response: str) -> Score:
        """Score the response's text (without EOS); a task without an answer is undecided."""
        if task.answer is None:
            return Score.undecided("bad_gold", f"task {task.task_id} has no answer")
        if check(task.answer, response):
            return Score(1.0, "correct")
        last = response.rsplit("\n", 1)[-1]
        return Score(
            0.0,
            "wrong" if last.startswith(ANSWER_MARK) else "no_answer",
            f"{last!r}, not {task.answer!r}",
        )


class TableChain:
    """The square, its problems, its demonstrations and its exact step checker.

    Attributes:
        square: int8 (10, 10); `square[state, operand]` is the next state.
        wrong: int8 (10, 10); the misconception: the fixed wrong value of each cell.
        cells: int8 (10, 10); the student's class of each cell (`Cell`).
        blind: bool (10, 10); where the teacher is blind.
    """

    def __init__(self, settings: ChainSettings | None = None) -> None:
        self.settings = settings or ChainSettings()
        rng = np.random.default_rng(self.settings.square_seed)
        self.square = _latin_square(rng)
        offset = rng.integers(1, 10, size=(10, 10))
        self.wrong = ((self.square + offset) % 10).astype(np.int8)
        middling, rare = self.settings.hard_cells
        in_row = (middling + rare) // 10
        # The same number of hard cells in each row: a prompt can go hard or easy from any state.
        operands = np.stack([rng.permutation(10)[:in_row] for _ in range(10)])
        classes = rng.permutation([Cell.MIDDLING] * middling + [Cell.RARE] * rare)
        self.cells = np.full((10, 10), Cell.KNOWN, dtype=np.int8)
        self.cells[np.arange(10)[:, None], operands] = classes.reshape(10, in_row)
        hard = np.argwhere(self.cells != Cell.KNOWN)
        self.blind = np.zeros((10, 10), dtype=np.bool_)
        for row, column in hard[rng.permutation(len(hard))[: self.settings.teacher_blind]]:
            self.blind[row, column] = True
        self._hard = [np.flatnonzero(row != Cell.KNOWN) for row in self.cells]
        self._known = [np.flatnonzero(row == Cell.KNOWN) for row in self.cells]
        by_class = np.asarray(self.settings.student_p)
        self._p_right: dict[str, npt.NDArray[np.float64]] = {
            "student": by_class[self.cells],
            "teacher": np.where(self.blind, self.settings.teacher_blind_p, self.settings.teacher_p),
        }

    def prompt(self, rng: np.random.Generator, split: Split) -> str:
        """A prompt of `split` whose share of hard steps was drawn from `settings.hard_share`.

        Raises:
            UsageError: unknown split.
        """
        if split not in _SPLITS:
            raise UsageError(f"unknown split {split!r}; there are {', '.join(SPLITS)}")
        while True:
            share = rng.uniform(*self.settings.hard_share)
            start = state = int(rng.integers(10))
            text = [str(start)]
            for tag in TAGS:
                pool = (self._hard if rng.random() < share else self._known)[state]
                operand = int(pool[rng.integers(len(pool))])
                text.append(f"{tag}{operand}")
                state = int(self.square[state, operand])
            prompt = "".join(text) + "|"
            if split_of(prompt) == split:
                return prompt

    def states(self, prompt: str) -> list[int]:
        """The right states after each step."""
        state, operands = parse_prompt(prompt)
        states = []
        for operand in operands:
            state = int(self.square[state, operand])
            states.append(state)
        return states

    def answer(self, prompt: str) -> str:
        """The right answer line."""
        return _answer_line(self.states(prompt))

    def hard_steps(self, prompt: str) -> int:
        """How many of the prompt's steps the student does not know well."""
        state, operands = parse_prompt(prompt)
        states = [state, *self.states(prompt)[:-1]]
        return sum(
            int(self.cells[s, o] != Cell.KNOWN) for s, o in zip(states, operands, strict=True)
        )

    def tasks(self, split: Split, count: int, seed: int) -> list[Task]:
        """`count` different problems of a split; the same for the same split, count and seed.

        A longer list starts with the shorter one.
        """
        rng = np.random.default_rng([seed, SPLITS.index(split) if split in SPLITS else 0])
        prompts: dict[str, None] = {}
        while len(prompts) < count:
            prompts.setdefault(self.prompt(rng, split))
        return [
            Task(
                task_id=f"table-chain/{split}/{prompt[:-1]}",
                prompt=prompt,
                answer=self.answer(prompt),
                verifier=VERIFIER,
                metadata={"hard_steps": self.hard_steps(prompt)},
            )
            for prompt in prompts
        ]

    def demonstration(self, prompt: str, writer: Writer, rng: np.random.Generator) -> str:
        """A response as `writer` would give it, flaws and dialect included; EOS is the caller's.

        Written values are what the writer believes; later steps go on from them.
        """
        chain = self.settings
        share = chain.student_dialect if writer == "student" else chain.teacher_dialect
        dialect = rng.random() < share
        p_right = self._p_right[writer]
        state, operands = parse_prompt(prompt)
        lines, states = [], []
        for tag, operand in zip(TAGS, operands, strict=True):
            right = rng.random() < p_right[state, operand]
            note = NOTE if dialect and rng.random() < chain.note_share else ""
            result = int((self.square if right else self.wrong)[state, operand])
            lines.append(f"{tag}{state}*{operand}\n={note}{result}\n")
            states.append(result)
            state = result
        return "".join(lines) + _answer_line(states)

    def first_wrong_line(self, prompt: str, response: str, start: int = 0) -> int | None:
        """Index of the first line at or after `start` that does not follow from the lines before it.

        A line is judged against what is written, not against the whole true chain: after a wrong
        result that was kept, a step that goes on from it rightly is right. A last line that is
        unfinished is right as long as it can still become right. Notes are ignored.
        """
        state, operands = parse_prompt(prompt)
        states: list[int] = []
        lines = response.split("\n")
        for index, line in enumerate(lines):
            text = line.replace(NOTE, "")
            step = index // 2
            if index % 2 == 0:
                if step < len(TAGS):
                    right = f"{TAGS[step]}{state}*{operands[step]}"
                else:
                    right = _answer_line(states) if step == len(TAGS) else ""
            else:
                right = f"={self.square[state, operands[step]]}" if step < len(TAGS) else ""
            last = index == len(lines) - 1
            if index >= start and text != right and not (last and right.startswith(text)):
                return index
            if index % 2 and step < len(TAGS):
                written = text[1:2]
                # A result that can't be read leaves nothing to judge the rest by: assume the right one.
                readable = written.isascii() and written.isdigit()
                state = int(written) if readable else int(self.square[state, operands[step]])
                states.append(state)
        return None


def _answer_line(states: list[int]) -> str:
    return ANSWER_MARK + "".join(f"{TAGS[i]}{states[i]}" for i in REPORTED)


def _latin_square(rng: np.random.Generator) -> npt.NDArray[np.int8]:
    """A random Latin square: rows found one by one as random permutations without a clash.

    A row is a random perfect matching between columns and the digits they still lack, which always
    exists (Hall), found by augmenting paths in random order.
    """
    square = np.full((10, 10), -1, dtype=np.int8)
    for row in range(10):
        lacking = [rng.permutation(np.setdiff1d(np.arange(10), square[:row, c])) for c in range(10)]
        column_of: dict[int, int] = {}
        for column in rng.permutation(10):
            _place(int(column), lacking, column_of, set())
        for digit, column in column_of.items():
            square[row, column] = digit
    return square


def _place(
    column: int, lacking: list[npt.NDArray[Any]], column_of: dict[int, int], seen: set[int]
) -> bool:
    """Give `column` one of the digits it lacks, moving other columns where needed."""
    for digit in map(int, lacking[column]):
        if digit in seen:
            continue
        seen.add(digit)
        if digit not in column_of or _place(column_of[digit], lacking, column_of, seen):
            column_of[digit] = column
            return True
    return False


def make_tasks(
    split: Split = "train", *, count: int = 1024, seed: int = 0, **settings: Any
) -> list[Task]:
    """The task set `table_chain` of a config; `settings` are fields of `ChainSettings`."""
    return TableChain(ChainSettings.from_dict(settings)).tasks(split, count, seed)
