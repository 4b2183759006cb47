"""Pass rates of a pilot: the file that they are gathered in, which of them are kept, their histogram.

The file is JSON lines, so that a run which was cut short loses no finished problem: first what the
rates are of, then one line a problem.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from mintrl_env.errors import StoreError, UsageError
from mintrl_env.failures import failed_by_service
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import StopReason

_BAR = 40  # characters


@dataclass(frozen=True, slots=True)
class Rate:
    """What became of one problem's samples.

    Attributes:
        task_id: whose.
        samples: that were asked for; of these `decided` could be scored, `passed` of them right.
        truncated: samples that were cut at T.
        tokens: of all samples.
        failed: samples that a service or a deadline failed; `--resume` tries the problem again.
    """

    task_id: str
    samples: int
    decided: int
    passed: int
    truncated: int
    tokens: int
    failed: int = 0

    @classmethod
    def of(cls, rows: Sequence[Trajectory]) -> Rate:
        decided = [row for row in rows if row.valid and row.score.decided]
        return cls(
            task_id=rows[0].task_id,
            samples=len(rows),
            decided=len(decided),
            passed=sum(row.reward >= 1.0 for row in decided),
            truncated=sum(row.stop_reason is StopReason.LENGTH for row in rows),
            tokens=sum(len(row.ids) for row in rows),
            failed=sum(map(failed_by_service, rows)),
        )

    @property
    def share(self) -> float:
        """passed / decided; NaN where no sample could be scored."""
        return self.passed / self.decided if self.decided else math.nan


@dataclass(frozen=True, slots=True)
class Band:
    """The pass rates that are kept, ends included."""

    low: float
    high: float

    @classmethod
    def parse(cls, text: str) -> Band:
        """`0.1..0.9`.

        Raises:
            UsageError: it is none, or nothing lies in it.
        """
        low, dots, high = text.partition("..")
        try:
            band = cls(float(low), float(high))
        except ValueError:
            band = cls(math.nan, math.nan)
        if not dots or not 0.0 <= band.low <= band.high <= 1.0:
            raise UsageError(
                f"--keep takes two pass rates from 0 to 1 as 0.1..0.9, the lower one first, not "
                f"{text!r}"
            )
        return band

    def __contains__(self, rate: Rate) -> bool:
        return self.low <= rate.share <= self.high

    def __str__(self) -> str:
        return f"{self.low:g}..{self.high:g}"


def refuse_other_pilot(path: Path, *, resume: bool) -> None:
    """Refuse a file that is there where nobody asked to go on with it.

    Raises:
        StoreError
    """
    if path.exists() and not resume:
        raise StoreError(f"{path} holds a pilot already: go on with it by --resume, or remove it")


class PilotFile:
    """Where rates are written as they come.

    Args:
        path: the file.
        asked: what the rates are of; a file of something else is refused.
        resume: go on with a file that is there.

    Attributes:
        rates: all so far, by problem.

    Raises:
        StoreError: there is a file and `resume` is False, it is of something else, it cannot be
            read or written.
    """

    def __init__(self, path: Path, asked: Mapping[str, Any], *, resume: bool) -> None:
        self.path, self.rates = path, {}
        head = json.loads(json.dumps(asked))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            refuse_other_pilot(path, resume=resume)
            if path.exists():
                self._read(head)
            self._file: IO[bytes] = path.open("ab")
            if not self._file.tell():
                self._write({"asked": head})
        except OSError as error:
            raise StoreError(f"{path}: cannot be read or written: {error.strerror}") from error

    rates: dict[str, Rate]

    def _read(self, head: Any) -> None:
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]  # a kill may have torn the last line
        if len(whole) != len(data):
            os.truncate(self.path, len(whole))
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            before = lines[0]["asked"] if lines else head
            rates = [Rate(**line) for line in lines[1:]]
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{self.path} is no pilot's file: {error}") from error
        if before != head:
            changed = [key for key in {**before, **head} if before.get(key) != head.get(key)]
            raise StoreError(
                f"{self.path} is a pilot of another {', '.join(sorted(changed))}: remove it, or choose "
                "another --out"
            )
        self.rates = {rate.task_id: rate for rate in rates}

    def add(self, rate: Rate) -> None:
        """Write one problem's rate; it is on the disk when this returns."""
        self._write(asdict(rate))
        self.rates[rate.task_id] = rate

    def _write(self, row: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(row).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be written: {error.strerror}") from error

    def __enter__(self) -> PilotFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def histogram(rates: Iterable[Rate], band: Band) -> list[str]:
    """A line a pass rate that occurs, with a bar and whether it is kept; then those undecided."""
    decided, undecided = [], 0
    for rate in rates:
        if rate.decided:
            decided.append(rate)
        else:
            undecided += 1
    counts = Counter(round(rate.share, 4) for rate in decided)
    kept = {round(rate.share, 4) for rate in decided if rate in band}
    most = max(counts.values(), default=1)
    width = len(str(max(most, undecided)))
    lines = [
        f"{share:6.3f}  {counts[share]:{width}}  {'#' * max(1, round(_BAR * counts[share] / most))}"
        f"{'  kept' if share in kept else ''}"
        for share in sorted(counts)
    ]
    if undecided:
        lines.append(f"     -  {undecided:{width}}  could not be scored")
    return lines


def nothing_left(rates: Sequence[Rate], band: Band) -> str:
    """Why a band keeps none of the rates, and what to do about it."""
    never = sum(rate.passed == 0 and rate.decided > 0 for rate in rates)
    always = sum(rate.passed == rate.decided > 0 for rate in rates)
    undecided = sum(rate.decided == 0 for rate in rates)
    between = len(rates) - never - always - undecided
    parts = [
        f"{never} never solved" if never else "",
        f"{always} always solved" if always else "",
        f"{between} in between, outside the band" if between else "",
        f"{undecided} that could not be scored" if undecided else "",
    ]
    todo = "give a wider --keep"
    if undecided == len(rates):
        todo = "see why by `mintrl preflight`: no response could be scored"
    elif never and not always and not between:
        cut = sum(rate.truncated for rate in rates) / max(1, sum(rate.samples for rate in rates))
        todo = "take more samples (--n), easier problems or a better policy"
        if cut > 0.5:
            todo = f"{cut:.0%} of the responses were cut: raise episode.max_response, or {todo}"
    found = ", ".join(part for part in parts if part)
    return f"no problem is left: of {len(rates)}, {found}. What to do: {todo}"
