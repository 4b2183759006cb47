"""Ranks that agree: what the main one makes, what fails there, and how a process of several ends."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mintrl_env.adapters.ranks import (
    OneRank,
    RankError,
    Ranks,
    joined,
    launched,
    lost_ranks,
    main_first,
    on_main,
)
from mintrl_env.config import JudgeSection
from mintrl_env.errors import StoreError
from mintrl_env.judge_recipes import judge_share


class Threads:
    """Ranks that are threads."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._barrier, self._values = threading.Barrier(count), [None] * count
        self._here = threading.local()

    @property
    def rank(self) -> int:
        return int(self._here.rank)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        self._barrier.wait(60)

    def gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self.barrier()
        found = list(self._values)
        self.barrier()
        return found

    def share(self, value: Any) -> Any:
        return self.gather(value)[0]

    def run(self, what: Callable[[Ranks], Any]) -> list[Any]:
        def one(rank: int) -> Any:
            self._here.rank = rank
            try:
                return what(self)
            except Exception as error:
                return error

        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(one, range(self.count)))


def test_the_main_rank_works_and_all_have_it() -> None:
    worked: list[int] = []

    def use(ranks: Ranks) -> str:
        return on_main(ranks, lambda: worked.append(ranks.rank) or "made")

    assert Threads(3).run(use) == ["made"] * 3
    assert worked == [0]
    assert on_main(OneRank(), lambda: 5) == 5


def test_what_fails_there_fails_everywhere() -> None:
    def use(ranks: Ranks) -> None:
        def work() -> None:
            raise StoreError("no room")

        on_main(ranks, work)

    first, *others = Threads(3).run(use)
    assert isinstance(first, StoreError) and str(first) == "no room"
    assert [(type(e), str(e)) for e in others] == [(RankError, "on the main process: no room")] * 2


def test_the_main_rank_is_first() -> None:
    order: list[int] = []

    def use(ranks: Ranks) -> int:
        return main_first(ranks, lambda: order.append(ranks.rank) or ranks.rank)

    assert Threads(3).run(use) == [0, 1, 2]
    assert order[0] == 0 and sorted(order) == [0, 1, 2]


def test_a_lost_rank_is_told_from_a_bug() -> None:
    with (
        pytest.raises(
            RankError, match=r"another process .* says why \(\[pair.cc\] Connection closed"
        ),
        lost_ranks(),
    ):
        raise RuntimeError("[pair.cc] Connection closed by peer [127.0.0.1]:4711\nstack")
    with pytest.raises(RuntimeError, match="shapes"), lost_ranks():
        raise RuntimeError("shapes differ")


def test_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, count in (("", 1), ("1", 1), ("4", 4), ("x", 1)):
        monkeypatch.setenv("WORLD_SIZE", text)
        assert launched() == count
    monkeypatch.delenv("WORLD_SIZE")
    with joined(60.0) as ranks:
        assert (ranks.rank, ranks.count, ranks.is_main, ranks.gather("a")) == (0, 1, True, ["a"])


PROGRAM = """
import threading
from mintrl_env.ending import end_with
from mintrl_env.errors import PolicyError
threading.Thread(target=threading.Event().wait).start()  # somebody who waits for ever
end_with(PolicyError("the server is gone"))
"""


def test_a_process_of_several_ends_at_once_and_says_which_it_is() -> None:
    env = os.environ | {"RANK": "1", "WORLD_SIZE": "2"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "error (process 1 of 2): the server is gone\n"


def test_what_the_judge_may_use_is_shared_out_over_processes() -> None:
    limits = {"concurrent": 10, "rpm": 120, "tpm": None, "tokens": 1_000_001, "usd": 3.0}
    judge = JudgeSection(name="llm", options={"url": "http://x/v1", "limits": limits}, concurrent=6)
    share = judge_share(judge, 4)
    assert share.concurrent == 1
    assert share.options == {
        "url": "http://x/v1",
        "limits": {"concurrent": 2, "rpm": 30, "tpm": None, "tokens": 250_000, "usd": 0.75},
    }
    assert judge.options["limits"] == limits
    assert judge_share(judge, 1) == judge
    assert judge_share(JudgeSection(name="keep"), 100).concurrent == 1
