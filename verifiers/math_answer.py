"""The math verifier: is the final answer of a response equal to the gold answer?

Extraction (`math_extract`), parsing (`math_parse`) and exact arithmetic (`math_equal`) are ours,
bounded in size, and run where they are called. What needs hundreds of digits or algebra
(`math_handler`) runs in a worker process that is killed at its deadline (`worker`).
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache

from mintrl_env.types import Score, Task
from mintrl_env.verifiers.math_equal import equal
from mintrl_env.verifiers.math_expr import Node
from mintrl_env.verifiers.math_extract import Extracted, clean_prose, extract, unbox
from mintrl_env.verifiers.math_normal import (
    GROUPED,
    MAX_ANSWER,
    ParseError,
    canonical_text,
    unescaped,
)
from mintrl_env.verifiers.math_parse import parse
from mintrl_env.verifiers.math_value import Oracle
from mintrl_env.verifiers.worker import (
    WorkerFailed,
    WorkerPool,
    WorkerTimeout,
    WorkerUnavailable,
    shared_pool,
)

HANDLER = "mintrl_env.verifiers.math_handler:handle"
_LONG_RESPONSE = 200_000
"""Characters above which even the linear extraction is kept off the event loop."""


_INTEGER = re.compile(r"[+-]?[0-9]{1,400}")


class _NeedsWorker(Exception):
    """Raised by the oracle of the first, in-process pass."""


def _no_oracle(a: Node, b: Node, mode: str) -> bool:
    raise _NeedsWorker


class MathVerifier:
    """Scores a response 1.0 if its final answer equals `task.answer`, else 0.0.

    Statuses: correct, wrong, no_answer, timeout (the comparison was stopped), error (it failed);
    undecided, with a NaN reward: bad_gold, unavailable (no worker could be started).

    Args:
        timeout_s: how long one comparison may take in a worker, in seconds.
        workers: worker processes of this process, started when first needed; None: half the cores,
            at most 4. Verifiers with the same number share them.

    Safe to use from any thread and any event loop, and after a fork; it holds no process or lock
    itself, so it can be pickled.
    """

    def __init__(self, *, timeout_s: float = 1.5, workers: int | None = None) -> None:
        if not timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, not {timeout_s}")
        if workers is not None and workers < 1:
            raise ValueError(f"workers must be at least 1, not {workers}")
        self.timeout_s = timeout_s
        self.workers = workers or max(1, min(4, (os.cpu_count() or 2) // 2))

    async def score(self, task: Task, response: str) -> Score:
        """Score one response without blocking the event loop."""
        loop = asyncio.get_running_loop()
        if len(response) <= _LONG_RESPONSE:
            try:
                return _score(task, response, _no_oracle)
            except _NeedsWorker:
                pass
        return await loop.run_in_executor(self._pool().executor(), self.score_sync, task, response)

    def score_sync(self, task: Task, response: str) -> Score:
        """Score one response; blocks the calling thread for at most about `timeout_s`."""
        left = self.timeout_s

        def ask(a: Node, b: Node, mode: str) -> bool:
            nonlocal left
            if left <= 0:
                raise WorkerTimeout("the comparison's time is used up")
            started = time.monotonic()
            answer = self._pool().call({"mode": mode, "a": a, "b": b}, left)
            left -= time.monotonic() - started
            return bool(answer["equal"])

        try:
            return _score(task, response, ask)
        except WorkerTimeout as error:
            return Score(0.0, "timeout", str(error))
        except WorkerUnavailable as error:
            return Score.undecided("unavailable", str(error))
        except WorkerFailed as error:
            return Score(0.0, "error", str(error))

    def score_batch(self, pairs: Iterable[tuple[Task, str]]) -> list[Score]:
        """Scores in the order of `pairs`, the slow ones on all workers at once."""
        todo: Sequence[tuple[Task, str]] = list(pairs)
        scores: list[Score | None] = [None] * len(todo)
        waiting = []
        for index, (task, response) in enumerate(todo):
            try:
                scores[index] = _score(task, response, _no_oracle)
            except _NeedsWorker:
                job = self._pool().executor().submit(self.score_sync, task, response)
                waiting.append((index, job))
        for index, job in waiting:
            scores[index] = job.result()
        return [score for score in scores if score is not None]

    def _pool(self) -> WorkerPool:
        return shared_pool(HANDLER, self.workers)


def _score(task: Task, response: str, oracle: Oracle) -> Score:
    gold = unescaped(task.answer or "").strip()
    found = extract(unescaped(response))
    if len(found.parts) == 1 and _INTEGER.fullmatch(gold) and _INTEGER.fullmatch(found.parts[0]):
        correct = int(gold) == int(found.parts[0])  # most answers are such
    else:
        readings = gold_readings(gold)
        if not readings:
            return Score.undecided("bad_gold", f"task {task.task_id}: no gold answer can be read")
        if not found.parts:
            return Score(0.0, "no_answer", found.reason)
        correct = _matches(gold, readings, found, oracle)
    shown = ascii(", ".join(found.parts)[:80])
    return Score(
        1.0 if correct else 0.0, "correct" if correct else "wrong", f"{found.reason}: {shown}"
    )


def _readings(text: str) -> list[Node]:
    """The ways to read a text: `1,234` is a number, or else a list."""
    found: list[Node] = []
    for thousands in (True, False) if GROUPED.search(text[:MAX_ANSWER]) else (True,):
        try:
            node = parse(text, thousands=thousands)
        except ParseError:
            continue
        if node not in found:
            found.append(node)
    return found


_ANCHORED = re.compile(r"\\f?box(?:ed)?\b|####|\banswer\s*(?:is\b|:)", re.IGNORECASE)
_BALANCE = re.compile(r"\\.|[{}]", re.DOTALL)
_MEANING = re.compile(r"\w|\\(?:infty|emptyset|varnothing|div|pm)|[∞∅]")


@lru_cache(maxsize=2048)  # a group's responses share their gold
def gold_readings(gold: str) -> list[Node]:
    """How the gold answer reads; as bare text where it is no mathematics; [] if it is no answer."""
    gold = _gold_text(gold)
    if not _MEANING.search(re.sub(r"\\[A-Za-z]+\s*", "", gold)) and not _MEANING.search(gold):
        return []
    depth = 0
    for brace in _BALANCE.finditer(gold):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth < 0:
            return []
    if depth or not re.sub(r"\\text[a-z]*\s*\{\s*\}", "", gold).strip():
        return []
    readings = _readings(gold)
    if not readings and len(gold) < 400 and (match := re.search(r"\bis\s+(\S.*)$", gold)):
        readings = _readings(clean_prose(match.group(1)))
    return readings or [("text", canonical_text(gold))]


def _gold_text(gold: str) -> str:
    """The answer within a gold field that holds more: a box, an anchor, display delimiters."""
    if _ANCHORED.search(gold):
        found = extract(gold)
        if found.parts:
            return ", ".join(found.parts)
    return unbox(gold)


def _matches(gold: str, readings: list[Node], found: Extracted, oracle: Oracle) -> bool:
    answer = ", ".join(found.parts)
    if len(answer) <= 50 * MAX_ANSWER and _plain(gold) in (_plain(answer), _plain(found.line)):
        return True
    if len(answer) > MAX_ANSWER:
        return False
    for gold_reading in readings:
        for answer_reading in _readings(answer):
            if equal(gold_reading, answer_reading, oracle):
                return True
    return False


_WRAPPERS = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox|textrm|mathbf)\s*(?=\{)")


def _plain(text: str) -> str:
    """Text for the comparison of words: no wrappers, braces, case or blanks."""
    text = canonical_text(_WRAPPERS.sub("", text)) if "\\" in text else canonical_text(text)
    words = re.sub(r"[{}]", "", text) if "_" not in text and "^" not in text else text
    return words.casefold() if re.search(r"[A-Za-z]{3}", words) and "\\" not in words else words
