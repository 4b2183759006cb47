"""`mintrl verify`: score a file of responses, one verdict a line, in the order of the rows.

Rows are `{id, gold, response}` (math) or `{id, response, tests, limits?}` (code); other fields are
ignored. The file is streamed: a few rows are scored at once and none is kept, so that its size does
not matter. Nothing in a row ends the run:

    in the file                             out
    a row                                   {id, reward, status, detail, seconds}
    a row with a field missing or wrong     reward null, status "bad_row"
    the verifier could not tell             reward null, its status
    a line that is no JSON                  no verdict; reported with its line number
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from mintrl_env.errors import MissingExtraError, StoreError, UsageError
from mintrl_env.protocols import Verifier
from mintrl_env.registry import resolve
from mintrl_env.scoring import UNAVAILABLE, check_verifier, gold_text, score_response
from mintrl_env.types import Score, Task

BAD_ROW = "bad_row"
MAX_LINE = 1 << 28
"""Bytes of the longest line that is read (256 MiB)."""
_WINDOW_BYTES = 1 << 26
"""Bytes of lines that may wait for their verdicts at once, unless one line alone has more."""
_NAMED = 12
"""Fields of a row that a message names."""
_CODE_FIELDS = ("limits", "entry_point")
"""What a code row may say besides its tests."""
_AT_ONCE = 16
"""Rows scored at once by a verifier that says nothing about `workers`."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the file.

    Attributes:
        line: its number, from 1.
        id: whatever the row calls itself; None where it does not.
        task, response: what is scored; task None: nothing, `problem` says why.
        expected: the reward that the row says is right, None where it says nothing.
        statuses: the statuses that it allows; none: any.
        size: bytes of the line.
    """

    line: int
    id: Any = None
    task: Task | None = None
    response: str = ""
    problem: str = ""
    expected: float | None = None
    statuses: frozenset[str] = frozenset()
    size: int = 0


@dataclass
class Summary:
    """What came of a file: counts, by status where a name stands before them, and seconds.

    With `expected` rows an undecided one counts as not paid.
    """

    rows: int = 0
    rewards: float = 0.0
    decided: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    first_undecided: dict[str, str] = field(default_factory=dict)  # by status: line and detail
    seconds: dict[str, float] = field(default_factory=dict)  # by status
    wall_s: float = 0.0
    expected: int = 0
    right: int = 0
    false_positives: int = 0
    false_negatives: int = 0
    status_expected: int = 0
    status_right: int = 0
    unread_lines: int = 0

    @property
    def could_not_run(self) -> bool:
        """No row was scored, for want of a worker or a sandbox."""
        return self.rows > 0 and self.statuses[UNAVAILABLE] == self.rows

    def add(self, row: Row, score: Score, seconds: float) -> None:
        self.rows += 1
        self.statuses[score.status] += 1
        self.seconds[score.status] = self.seconds.get(score.status, 0.0) + seconds
        if score.decided:
            self.decided += 1
            self.rewards += score.reward
        elif score.status not in self.first_undecided:
            self.first_undecided[score.status] = f"line {row.line}: {score.detail}"
        if row.expected is not None:
            paid = score.reward if score.decided else 0.0
            self.expected += 1
            self.right += abs(paid - row.expected) <= 1e-9
            self.false_positives += paid > row.expected + 1e-9
            self.false_negatives += paid < row.expected - 1e-9
        if row.statuses:
            self.status_expected += 1
            self.status_right += score.status in row.statuses


def verify_file(
    path: Path,
    out: Path,
    *,
    kind: str = "math",
    options: Mapping[str, Any] | None = None,
    on_row: Callable[[Summary], None] | None = None,
    on_unread: Callable[[int, str], None] | None = None,
) -> Summary:
    """Score the rows of `path`, write the verdicts to `out`.

    They are written to `out` + ".part", which gets its name when all are there; what an interrupt
    leaves is that file with whole lines.

    Args:
        kind: the name of a verifier: "math", "code", a registered one, or `module:attribute`.
        options: arguments of the verifier (`workers`, `timeout_s`, `sandbox`); a name that it does
            not have is refused.
        on_row: called after each verdict. on_unread: called with (line number, reason).

    Raises:
        StoreError: a file that cannot be read or written.
        RegistryError, UsageError: no such verifier, or options that it does not take.
        MissingExtraError: it needs a package that is not installed.
    """
    verifier = make_verifier(kind, options or {})
    part = out.with_name(out.name + ".part")
    if out.exists() and (out.is_dir() or (path.exists() and out.samefile(path))):
        raise StoreError(f"--out {out} is {'a folder' if out.is_dir() else 'the file to verify'}")
    summary, started = Summary(), time.monotonic()
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "rb") as source, open(part, "w", 1, "ascii") as target:
            rows = _rows(source, kind, summary, on_unread)
            asyncio.run(_write(rows, verifier, target, summary, on_row))
        part.replace(out)
    except OSError as error:
        raise StoreError(f"cannot verify {path} to {out}: {error}") from error
    finally:
        summary.wall_s = time.monotonic() - started
        close = getattr(verifier, "close", None)
        if close is not None:
            close()
    return summary


def options_of(
    kind: str, *, workers: int | None, timeout_s: float | None, sandbox: str | None
) -> dict[str, Any]:
    """The command's options as the arguments of the verifier."""
    options: dict[str, Any] = {"workers": workers, "sandbox": sandbox}
    if timeout_s is not None:
        options |= {"limits": {"wall_s": timeout_s}} if kind == "code" else {"timeout_s": timeout_s}
    return options


def make_verifier(kind: str, options: Mapping[str, Any]) -> Verifier:
    """The verifier of that name, made with the options that are not None."""
    made = resolve("verifier", kind)
    given = {name: value for name, value in options.items() if value is not None}
    if not isinstance(made, type):
        if given:
            raise UsageError(f"verifier {kind!r} is ready made and takes no {', '.join(given)}")
        check_verifier(made)
        return made  # type: ignore[no-any-return]
    known = inspect.signature(made).parameters
    for name in given:
        if name not in known:
            takes = ", ".join(known) or "nothing"
            raise UsageError(f"the verifier {kind!r} has no option {name!r}; it takes: {takes}")
    try:
        verifier = made(**given)
    except UsageError:
        raise
    except (TypeError, ValueError) as error:
        raise UsageError(f"verifier {kind!r}: {error}") from error
    check_verifier(verifier)
    return verifier  # type: ignore[no-any-return]


# --- reading -------------------------------------------------------------------------------------


def _rows(
    source: IO[bytes],
    kind: str,
    summary: Summary,
    on_unread: Callable[[int, str], None] | None,
) -> Iterator[Row]:
    number = 0
    while line := source.readline(MAX_LINE):
        number += 1
        reason = ""
        if len(line) == MAX_LINE and not line.endswith(b"\n"):
            while line and not line.endswith(b"\n"):
                line = source.readline(MAX_LINE)
            reason = f"longer than {MAX_LINE >> 20} MiB"
        elif not line.strip(b" \t\r\n\xef\xbb\xbf"):
            continue
        else:
            try:
                value = _parsed(line)
            except (ValueError, RecursionError) as error:
                reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        if reason:
            summary.unread_lines += 1
            if on_unread is not None:
                on_unread(number, reason)
            continue
        yield read_row(value, kind, line=number, size=len(line))


def _parsed(line: bytes) -> Any:
    """The value of a line of JSON. Lone surrogates, raw or escaped, are let through."""
    try:
        text = line.decode("utf-8-sig", "surrogatepass")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.reason} at byte {error.start}") from error
    try:
        # Control characters inside strings are no JSON by the letter, but whole rows all the same.
        return json.loads(text, strict=False, parse_int=_integer, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos}") from error


def _integer(digits: str) -> int | str:
    return int(digits) if len(digits) < 4300 else digits  # Python reads no longer ones


def _refuse(name: str) -> Any:
    raise ValueError(f"not JSON: {name}")


def read_row(value: Any, kind: str, *, line: int, size: int = 0) -> Row:
    """What a line's value asks for. A mistake in it is the row's `problem`, never an error."""
    if not isinstance(value, dict):
        hint = "; write its rows one a line" if isinstance(value, list) else ""
        return Row(line, problem=f"a row is an object, not {_kind(value)}{hint}", size=size)
    made: dict[str, Any] = {"line": line, "id": value.get("id"), "size": size}
    made["expected"], made["statuses"] = _expectation(value.get("expected"))
    problem = ""
    response, tests = value.get("response"), value.get("tests")
    gold: Any = value.get("gold")
    if isinstance(gold, (int, float)) and not isinstance(gold, bool):
        gold = _number(gold)
    if not isinstance(response, str):
        problem = _wrong("response", "a text", value)
    elif not isinstance(gold, str) and (kind == "math" or gold is not None):
        problem = _wrong("gold", "a text or a number", value)
    elif not isinstance(tests, (dict, str)) and (kind == "code" or tests is not None):
        problem = _wrong("tests", "an object", value)
    if problem:
        return Row(**made, problem=problem)
    extra = {name: value[name] for name in _CODE_FIELDS if value.get(name) is not None}
    task = Task(
        task_id=f"line {line}" if value.get("id") is None else str(value["id"])[:200],
        prompt="",
        answer=gold_text(gold),
        verifier=kind,
        tests=tests,
        metadata=extra,
    )
    return Row(**made, task=task, response=response)  # type: ignore[arg-type]


def _number(value: float) -> str | None:
    try:
        return repr(value) if math.isfinite(value) else None
    except (OverflowError, ValueError):  # an integer of very many digits
        return None


def _wrong(name: str, wanted: str, row: Mapping[str, Any]) -> str:
    if name not in row:
        there = ", ".join(sorted(map(str, row))[:_NAMED]) or "nothing"
        return f"no field {name!r}; the row has {there:.200}"
    return f"field {name!r} must be {wanted}, not {_kind(row[name])}"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false"}
    return "null" if value is None else names.get(type(value), "a number")


def _expectation(value: Any) -> tuple[float | None, frozenset[str]]:
    """The reward and the statuses that a row expects: a number, true or false, or an object with
    `reward` (and `status`, `also_ok`); anything else says nothing."""
    statuses: frozenset[str] = frozenset()
    if isinstance(value, dict):
        also = value.get("also_ok")
        named = [value.get("status"), *(also if isinstance(also, list) else [])]
        if isinstance(named[0], str):
            statuses = frozenset(name for name in named if isinstance(name, str))
        value = value.get("reward")
    if isinstance(value, (bool, int, float)):
        with contextlib.suppress(OverflowError):
            if math.isfinite(value):
                return float(value), statuses
    return None, statuses


# --- scoring and writing -------------------------------------------------------------------------


async def _write(
    rows: Iterator[Row],
    verifier: Verifier,
    target: IO[str],
    summary: Summary,
    on_row: Callable[[Summary], None] | None,
) -> None:
    async for row, score, seconds in _scored(rows, verifier):
        summary.add(row, score, seconds)
        target.write(_verdict(row, score, seconds) + "\n")
        if on_row is not None:
            on_row(summary)


def _verdict(row: Row, score: Score, seconds: float) -> str:
    verdict = {
        "id": row.id,
        "reward": score.reward if score.decided else None,
        "status": score.status,
        "detail": score.detail,
        "seconds": round(seconds, 6),
    }
    try:
        return json.dumps(verdict, allow_nan=False)
    except (ValueError, RecursionError):  # an id such as 1e999
        return json.dumps({**verdict, "id": None})


async def _scored(
    rows: Iterator[Row], verifier: Verifier
) -> AsyncIterator[tuple[Row, Score, float]]:
    """Rows with their scores, in order; so many at once as the verifier has workers, and as many
    again read ahead several times over, so that a slow row does not keep the others waiting."""
    at_once = max(1, int(getattr(verifier, "workers", 0) or _AT_ONCE))
    free = asyncio.Semaphore(at_once)
    waiting: deque[tuple[Row, asyncio.Task[tuple[Score, float]]]] = deque()
    held = 0
    try:
        for row in rows:
            waiting.append((row, asyncio.create_task(_score(verifier, row, free))))
            held += row.size
            while waiting and (
                len(waiting) > 16 * at_once or held > _WINDOW_BYTES or waiting[0][1].done()
            ):
                first, job = waiting.popleft()
                score, seconds = await job
                held -= first.size
                yield first, score, seconds
        while waiting:
            first, job = waiting.popleft()
            score, seconds = await job
            yield first, score, seconds
    finally:
        for _, job in waiting:
            job.cancel()


async def _score(verifier: Verifier, row: Row, free: asyncio.Semaphore) -> tuple[Score, float]:
    if row.task is None:
        return Score.undecided(BAD_ROW, row.problem), 0.0
    async with free:
        started = time.perf_counter()
        try:
            score = await score_response(verifier, row.task, row.response)
        except MissingExtraError:
            raise
        except Exception as error:
            score = Score.undecided(UNAVAILABLE, f"{type(error).__name__}: {error}")
        return score, time.perf_counter() - started
