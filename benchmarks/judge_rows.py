"""Rows for `mintrl judge-bench` out of worked solutions: one step of each is made wrong, or none.

    python benchmarks/judge_rows.py GSM8K.jsonl rows.jsonl --rows 600
    mintrl judge-bench CONFIG --data rows.jsonl

Three sources, equally many rows each:
    result   the result of one equation is off; the steps after it are as they were
    operand  one number of an equation is another, and its result agrees: no sum is wrong
    correct  as it was
The marks <<...>> and the last line (#### answer) are taken out.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

from mintrl_env.arithmetic import Equation, find_equations, written

SOURCES = ("result", "operand", "correct")


def steps_of(solution: str) -> list[str]:
    lines = re.sub(r"<<[^>]*>>", "", solution).split("\n")
    return [line.strip() for line in lines if line.strip() and not line.startswith("####")]


def with_wrong_result(step: str, equation: Equation, draw: random.Random) -> str | None:
    number = step[equation.right_start : equation.end]
    digits = re.sub(r"\D", "", number)
    if not digits or any(sign in number for sign in "+*/()"):
        return None
    off = draw.choice([-10, -2, -1, 1, 2, 10])
    wrong = written(equation.value + off, number)
    changed = step[: equation.right_start] + wrong + step[equation.end :]
    return changed if equation.value + off > 0 else None


def with_wrong_operand(step: str, equation: Equation, draw: random.Random) -> str | None:
    left = step[equation.start : equation.right_start]
    numbers = list(re.finditer(r"(?<![\d.,])\d{1,6}(?![\d.,%])", left))
    if not numbers:
        return None
    chosen = draw.choice(numbers)
    other = str(int(chosen.group()) + draw.choice([1, 2, 3, 5]))
    start, end = (equation.start + place for place in chosen.span())
    changed = step[:start] + other + step[end:]
    found = [e for e in find_equations(changed) if e.start == equation.start]
    if not found or found[0].holds:
        return None
    right = written(found[0].value, changed[found[0].right_start : found[0].end])
    changed = changed[: found[0].right_start] + right + changed[found[0].end :]
    return changed if all(e.holds for e in find_equations(changed)) else None


def make_row(
    source: str, steps: Sequence[str], draw: random.Random
) -> tuple[list[str], int] | None:
    """The steps and the index of the wrong one; None where nothing fits."""
    if source == "correct":
        return list(steps), -1
    places = [(i, e) for i, step in enumerate(steps) for e in find_equations(step)]
    if not places or not all(e.holds for _, e in places):
        return None  # wrong already, or nothing to make wrong
    change = with_wrong_result if source == "result" else with_wrong_operand
    index, equation = draw.choice(places)
    changed = change(steps[index], equation, draw)
    if changed is None:
        return None
    return [*steps[:index], changed, *steps[index + 1 :]], index


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("solutions", type=Path, help="JSONL with problem | question and solution")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    draw = random.Random(asked.seed)
    problems = [json.loads(line) for line in asked.solutions.read_text().splitlines()]
    draw.shuffle(problems)
    rows: list[dict[str, object]] = []
    for number, problem in enumerate(problems):
        if len(rows) == asked.rows:
            break
        source = SOURCES[len(rows) % len(SOURCES)]
        text = problem.get("solution") or problem["answer"]
        made = make_row(source, steps_of(text), draw)
        if made is None:
            continue
        steps, first_error = made
        rows.append(
            {
                "id": f"{source}-{number}",
                "source": source,
                "problem": problem.get("problem") or problem["question"],
                "steps": steps,
                "first_error": first_error,
                "solution": text,
            }
        )
    asked.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print(f"{asked.out}: {len(rows)} rows")


if __name__ == "__main__":
    main()
