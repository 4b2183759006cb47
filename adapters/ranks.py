"""The processes that train together: who is the main one, and what all of them agree on.

What goes through here are small Python objects, over a gloo group of its own: nothing waits on a GPU,
and the model's collectives are not in the way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, TypeVar

from mintrl_env.errors import MintrlError

T = TypeVar("T")
_DEFAULT_S = 1800.0
# What collectives say when the process at the other end is gone.
_LOST = ("closed by peer", "reset by peer", "gloo", "nccl", "broken pipe", "timed out waiting")


class RankError(MintrlError):
    """Another process of the run has failed; what it printed itself says more."""


class Ranks(Protocol):
    """The processes that train together."""

    @property
    def rank(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def is_main(self) -> bool: ...

    def barrier(self) -> None:
        """Wait until every rank is here."""
        ...

    def share(self, value: T) -> T:
        """The main rank's value, on every rank; nobody has it before the main rank gives it."""
        ...

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank, in the order of ranks."""
        ...


class OneRank:
    """A trainer of one process."""

    rank, count, is_main = 0, 1, True

    def barrier(self) -> None:
        pass

    def share(self, value: T) -> T:
        return value

    def gather(self, value: T) -> list[T]:
        return [value]


class TorchRanks:
    """The ranks of torch.distributed's default group, which has to be there. All of them make one.

    Args:
        timeout_s: how long a rank waits for the others.
    """

    def __init__(self, timeout_s: float = _DEFAULT_S) -> None:
        import torch.distributed as dist

        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        import torch.distributed as dist

        with lost_ranks():
            dist.barrier(group=self._group)

    def share(self, value: T) -> T:
        import torch.distributed as dist

        values = [value]
        with lost_ranks():
            dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def gather(self, value: T) -> list[T]:
        import torch.distributed as dist

        values: list[Any] = [None] * self.count
        with lost_ranks():
            dist.all_gather_object(values, value, group=self._group)
        return values


def launched() -> int:
    """Of how many processes this one was started as one (torchrun, accelerate launch)."""
    text = os.environ.get("WORLD_SIZE", "")
    return max(1, int(text)) if text.isascii() and text.isdigit() else 1


@contextmanager
def joined(timeout_s: float) -> Iterator[Ranks]:
    """The ranks that a launcher started, with torch.distributed's group; one where nobody did.

    Args:
        timeout_s: how long ranks wait for one another, in the model's collectives too.
    """
    if launched() == 1:
        yield OneRank()
        return
    import torch
    import torch.distributed as dist

    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "nccl"
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    ranks = TorchRanks(timeout_s)
    with lost_ranks():
        yield ranks
        ranks.barrier()  # whoever leaves first takes the store with it
    if ours:
        dist.destroy_process_group()


@contextmanager
def lost_ranks() -> Iterator[None]:
    """A collective that failed because another process is gone says so.

    Raises:
        RankError
    """
    try:
        yield
    except RuntimeError as error:
        text = str(error).lower()
        if not any(sign in text for sign in _LOST):
            raise
        first = str(error).strip().splitlines()[0]
        raise RankError(
            "another process of this run has ended, or did not answer: its own message, above or "
            f"below, says why ({first[:200]})"
        ) from error


def on_main(ranks: Ranks, what: Callable[[], T]) -> T:
    """What the main rank makes of it, on every rank; the others wait.

    Raises:
        Whatever `what` raises, on the main rank. RankError with its message, on the others.
    """
    error: Exception | None = None
    value: Any = None
    if ranks.is_main:
        try:
            value = what()
        except Exception as failed:
            error = failed
    value, said = ranks.share((value, None if error is None else str(error)))
    if error is not None:
        raise error
    if said is not None:
        raise RankError(f"on the main process: {said}")
    result: T = value
    return result


def main_first(ranks: Ranks, what: Callable[[], T]) -> T:
    """The same on every rank, but on the main one first: what it downloads or makes is there then.

    Raises:
        As `on_main`.
    """
    kept: list[T] = []
    on_main(ranks, lambda: kept.append(what()))
    return kept[0] if kept else what()
