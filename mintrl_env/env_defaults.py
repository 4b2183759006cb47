"""What an environment is made of, from names or from objects, and the built-in parts of bare ones.

Made bare, `gymnasium.make("MinTRL/Policy-v0")` has the task set `sums`, the byte tokenizer and the
verifier `last_integer`; "MinTRL/Judge-v0" has the policy `sums` besides. All arguments may be names
and numbers, so that a spec is JSON; objects are taken as they are.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mintrl_env.episode import EpisodeConfig
from mintrl_env.errors import MissingExtraError, PolicyError, UsageError
from mintrl_env.keys import RowKey, uniforms
from mintrl_env.loops import sync
from mintrl_env.prompts import ByteTokenizer, HFTokenizer, PromptBuilder
from mintrl_env.protocols import Policy, Sampling, Tokenizer, Verifier
from mintrl_env.registry import resolve
from mintrl_env.tasks import TaskColumns, load_tasks
from mintrl_env.types import Chunk, Finish, Score, Task

_INTEGER = re.compile(r"-?\d+")
_LIMITS = tuple(field.name for field in dataclasses.fields(EpisodeConfig))


@dataclass(frozen=True, slots=True)
class Setup:
    """The parts that every environment has.

    Attributes:
        tasks: the tasks, at least one.
        prompts: makes prompt ids; its tokenizer is the policy's.
        config: the limits of an episode.
        verifier: the one verifier, or None: each task's own, by its registered name.
        made: the verifiers that were made by name, each once.
    """

    tasks: tuple[Task, ...]
    prompts: PromptBuilder
    config: EpisodeConfig
    verifier: Verifier | None
    made: dict[str, Verifier] = field(default_factory=dict)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.prompts.tokenizer

    def verifier_of(self, task: Task) -> Verifier:
        """Who scores this task's responses. RegistryError where its verifier has no such name."""
        if self.verifier is not None:
            return self.verifier
        if task.verifier not in self.made:
            self.made[task.verifier] = make_verifier(task.verifier)
        return self.made[task.verifier]

    def close(self) -> None:
        """Close the verifiers that were made by name. A second call does nothing."""
        while self.made:
            _, verifier = self.made.popitem()
            close = getattr(verifier, "close", None)
            result = close() if close is not None else None
            if isinstance(result, Awaitable):
                sync(result)


def make_setup(
    *,
    tasks: str | Sequence[Task],
    tokenizer: str | Tokenizer,
    verifier: str | Verifier | None,
    config: EpisodeConfig | None,
    prompts: PromptBuilder | Mapping[str, Any] | None,
    columns: TaskColumns | Mapping[str, Any] | None,
    limits: Mapping[str, Any],
) -> Setup:
    """The parts from names or objects (`PolicyEnv` says what each argument may be).

    Raises:
        UsageError: arguments that contradict each other, or an unknown one, with the nearest.
        TaskError, RegistryError, MissingExtraError: a part that cannot be made.
    """
    for name in limits:
        if name not in _LIMITS:
            raise UsageError(unknown("argument", name, _LIMITS))
    if config is not None and limits:
        raise UsageError(f"give {sorted(limits)[0]} in `config` or as an argument, not both")
    if not isinstance(prompts, PromptBuilder):
        built = make_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        try:
            prompts = PromptBuilder(built, **dict(prompts or {}))
        except TypeError as error:
            raise UsageError(f"prompts: {error}") from error
    elif not isinstance(tokenizer, str) and tokenizer is not prompts.tokenizer:
        raise UsageError("tokenizer and prompts.tokenizer are two objects; give one of them")
    setup = Setup(
        tasks=make_tasks(tasks, columns),
        prompts=prompts,
        config=config if config is not None else EpisodeConfig(**limits),
        verifier=None if isinstance(verifier, str) else verifier,
    )
    if isinstance(verifier, str):
        setup.made[verifier] = make_verifier(verifier)
        setup = dataclasses.replace(setup, verifier=setup.made[verifier])
    return setup


def make_tokenizer(name: str) -> Tokenizer:
    """`bytes`, or a path or Hub id of a transformers tokenizer."""
    if name == "bytes":
        return ByteTokenizer()
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtraError("transformers", "trl", f"the tokenizer {name!r}") from error
    try:
        return HFTokenizer(AutoTokenizer.from_pretrained(name))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"tokenizer {name!r} is neither 'bytes' nor a folder or Hub id that holds one: {error}"
        ) from error


def make_tasks(
    tasks: str | Sequence[Task], columns: TaskColumns | Mapping[str, Any] | None = None
) -> tuple[Task, ...]:
    """Tasks from a registered name, a file, a Hub id or a sequence; their ids are unique."""
    if isinstance(tasks, str):
        is_file = Path(tasks).suffix in (".jsonl", ".json", ".parquet") or Path(tasks).exists()
        if is_file or ("/" in tasks and ":" not in tasks):
            if not isinstance(columns, TaskColumns):
                columns = TaskColumns(**dict(columns or {}))
            found: Sequence[Task] = load_tasks(tasks, columns)
        else:
            found = resolve("tasks", tasks)()
    else:
        found = tasks
        wrong = next((task for task in found if not isinstance(task, Task)), None)
        if wrong is not None:
            raise UsageError(
                f"tasks are mintrl_env.Task objects, a file or a registered name, not "
                f"{type(wrong).__name__}: Task(task_id, prompt, answer)"
            )
    if not found:
        raise UsageError("an environment needs at least one task")
    if len({task.task_id for task in found}) != len(found):
        raise UsageError("two tasks have one id; `reset` could not tell them apart")
    return tuple(found)


def make_verifier(name: str) -> Verifier:
    """The verifier of a registered name."""
    thing = resolve("verifier", name)
    made: Verifier = thing() if isinstance(thing, type) else thing
    return made


def make_policy(policy: str | Policy, tokenizer: Tokenizer) -> Policy:
    """A policy: an object, or a registered name, which is called with the tokenizer."""
    if not isinstance(policy, str):
        return policy
    made: Policy = resolve("policy", policy)(tokenizer)
    return made


def unknown(what: str, name: object, known: Sequence[str]) -> str:
    """The message for a name that is not known, with the nearest one that is."""
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    shown = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
    return f"unknown {what} {name!r}{hint} (known: {shown})"


class LastIntegerVerifier:
    """Right where the response's last integer equals the gold answer; for procedural tasks.

    Statuses: correct (1.0), wrong, no_answer (0.0); undecided bad_gold where the gold is none.
    """

    async def score(self, task: Task, response: str) -> Score:
        gold = (task.answer or "").strip()
        if not _INTEGER.fullmatch(gold):
            return Score.undecided("bad_gold", f"the answer {task.answer!r} is no integer")
        found = _INTEGER.findall(response)
        if not found:
            return Score(0.0, "no_answer")
        # Compared as text: int() of a long run of digits is slow, and refused by Python.
        if _plain(found[-1]) == _plain(gold):
            return Score(1.0, "correct")
        return Score(0.0, "wrong", f"last integer {found[-1][:40]}")


def _plain(number: str) -> str:
    digits = number.lstrip("-").lstrip("0") or "0"
    return f"-{digits}" if number.startswith("-") and digits != "0" else digits


class SumPolicy:
    """A flawed solver of the task set `sums`: the policy of a bare "MinTRL/Judge-v0".

    It writes one equation a step and the answer, and gets each sum wrong by 1, 10 or 100 with
    probability `error_rate`. It takes the last stated result as it stands, so that a correction
    (or its absence) decides what follows. Draws are keyed: the same row and draw, the same error.
    """

    def __init__(self, tokenizer: Tokenizer, error_rate: float = 0.4) -> None:
        self._tokenizer = tokenizer
        self._error_rate = error_rate

    async def generate(
        self,
        ids: npt.NDArray[np.int32],
        *,
        max_tokens: int,
        stop: Sequence[str],
        sampling: Sampling,
        key: RowKey,
    ) -> Chunk:
        text = self._tokenizer.decode(ids)
        numbers, _, response = text.partition("= ?\n")
        terms = [int(n) for n in _INTEGER.findall(numbers)]
        if not terms:
            raise PolicyError(f"the policy 'sums' finds no sum in the prompt {text[:80]!r}")
        eos = min(self._tokenizer.eos_ids)
        out = [*self._tokenizer.encode(self._rest(terms, response, key)), eos][:max_tokens]
        return Chunk(np.array(out), finish=Finish.EOS if out[-1] == eos else Finish.LENGTH)

    def _rest(self, terms: list[int], response: str, key: RowKey) -> str:
        """What is still to be written: equations, then the answer."""
        *lines, tail = response.split("\n\n")
        total = terms[0]
        for line in lines:
            total = _last_integer(line, total)
        left = terms[1 + len(lines) :]
        written = ""
        if tail:
            # A line was cut in two by a review, or a correction ended without a delimiter.
            right = f"{total} + {left[0]} = {total + left[0]}" if left else f"Answer: {total}"
            finished = right[len(tail) :] if right.startswith(tail) else ""
            if not left and right.startswith(tail):
                return finished
            written = finished + "\n\n"
            total = _last_integer(tail + finished, total)
            left = left[1:]
        draws = iter(uniforms(key, 2 * len(left)))
        for term in left:
            result = total + term
            if next(draws) < self._error_rate:
                result += (1, 10, 100)[int(next(draws) * 3)]
            written += f"{total} + {term} = {result}\n\n"
            total = result
        return f"{written}Answer: {total}"


def _last_integer(text: str, default: int) -> int:
    found = _INTEGER.findall(text)
    return int(found[-1][:18]) if found else default
