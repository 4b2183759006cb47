"""How a run's GPUs are shared between trainer, policy and judge."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from mintrl_env.errors import UsageError


@dataclass(frozen=True, slots=True)
class Needs:
    """What the parts need.

    Attributes:
        policy, judge: GPUs of one engine; judge 0: no GPUs of its own.
        trainer: the fewest GPUs that hold model and optimiser.
    """

    policy: int
    judge: int
    trainer: int


@dataclass(frozen=True, slots=True)
class Split:
    """GPUs of each part.

    Attributes:
        train, policy, judge: GPUs; where colocated, trainer and policy take turns on the same.
        engines, judge_engines: that run on them.
    """

    train: int
    policy: int
    judge: int
    engines: int
    judge_engines: int
    colocated: bool

    @property
    def gpus(self) -> int:
        """That do anything; what does not divide into engines is idle."""
        return self.judge + (self.policy if self.colocated else self.policy + self.train)

    def __str__(self) -> str:
        judge = f", {self.judge} judge" if self.judge else ""
        if self.colocated:
            return f"{self.policy} train and policy in turns{judge}"
        return f"{self.train} train, {self.policy} policy{judge}"


def make(needs: Needs, *, train: int, policy: int, judge: int, colocated: bool) -> Split | None:
    """A split into so many GPUs, rounded down to whole engines; None where a part has too few."""
    engines = policy // needs.policy
    judge_engines = judge // needs.judge if needs.judge else 0
    if not colocated:
        train += policy - engines * needs.policy
        policy = engines * needs.policy
    if engines < 1 or train < needs.trainer or (needs.judge and judge_engines < 1):
        return None
    return Split(train, policy, judge_engines * needs.judge, engines, judge_engines, colocated)


def candidates(gpus: int, needs: Needs, *, sync: bool) -> list[Split]:
    """The splits that a search tries: judge a sixteenth to a half, trainer an eighth to three
    quarters of the rest, and, where all is in turns anyway, both on all the rest."""
    found: list[Split | None] = []
    for judge in _judges(gpus, needs):
        rest = gpus - judge
        if sync:
            found.append(make(needs, train=rest, policy=rest, judge=judge, colocated=True))
        for eighths in range(1, 7):
            train = max(1, rest * eighths // 8)
            found.append(
                make(needs, train=train, policy=rest - train, judge=judge, colocated=False)
            )
    return list(dict.fromkeys(split for split in found if split is not None))


def _judges(gpus: int, needs: Needs) -> Iterator[int]:
    if not needs.judge:
        yield 0
        return
    for share in (16, 8, 4, 2):
        yield max(needs.judge, gpus // share // needs.judge * needs.judge)


_RATIO = re.compile(r"(\d+):(\d+)(?::(\d+))?")


def parse(text: str, gpus: int, needs: Needs, *, sync: bool) -> list[Split]:
    """The splits that `--split` means for so many GPUs.

    Args:
        text: auto; colocated; or TRAIN:POLICY[:JUDGE] in any unit.

    Raises:
        UsageError: no such split, or one that these GPUs are too few for.
    """
    if text == "auto":
        found = candidates(gpus, needs, sync=sync)
    elif text == "colocated":
        if not sync:
            raise UsageError("--split colocated: trainer and policy in turns is --mode sync")
        found = [s for s in candidates(gpus, needs, sync=True) if s.colocated]
    else:
        match = _RATIO.fullmatch(text)
        if match is None:
            raise UsageError(f"--split {text!r}: auto, colocated, or TRAIN:POLICY[:JUDGE] as 4:3:1")
        parts = [int(part or 0) for part in match.groups()]
        if bool(parts[2]) != bool(needs.judge) or not parts[0] or not parts[1]:
            wanted = "TRAIN:POLICY:JUDGE" if needs.judge else "TRAIN:POLICY: this judge has no GPUs"
            raise UsageError(f"--split {text}: {wanted} is needed, each >= 1")
        unit = gpus / sum(parts)
        judge = max(needs.judge, round(parts[2] * unit)) if needs.judge else 0
        policy = max(needs.policy, round(parts[1] * unit))
        split = make(
            needs, train=gpus - judge - policy, policy=policy, judge=judge, colocated=False
        )
        found = [] if split is None else [split]
    if not found:
        judge_text = f", {needs.judge} for the judge's engine" if needs.judge else ""
        together = " (in turns on the same, where --mode is sync)" if sync else ""
        raise UsageError(
            f"--gpus {gpus} with --split {text}: too few: {needs.trainer} for the trainer, "
            f"{needs.policy} for an engine{judge_text} are needed{together}"
        )
    return found
