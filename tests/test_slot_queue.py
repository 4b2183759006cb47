"""Who gets a slot next: order, rows that come back, and waiting for them while it pays."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from mintrl_env.adapters.pump import LoopThread, Returns
from mintrl_env.adapters.slot_queue import SlotQueue
from mintrl_env.adapters.slot_requests import Ask, Generate, Score
from mintrl_env.keys import RowKey
from mintrl_env.protocols import Sampling

IDS = np.array([1, 2, 3], dtype=np.int32)


def write(rollout: int) -> Generate:
    return Generate(IDS, RowKey(0, 0, "t", rollout), 4, (), Sampling())


def score(rollout: int | None) -> Score:
    return Score(IDS, None if rollout is None else RowKey(0, 0, "t", rollout), 1)


def take(queue: SlotQueue, kind: type[Ask], most: int, active: Any = (), first: Any = ()) -> list:
    rows = {RowKey(0, 0, "t", i).row for i in active}
    taken = queue.take(
        kind, most, is_active=rows.__contains__, first=[RowKey(0, 0, "t", i).row for i in first]
    )
    return [None if ask.key is None else ask.key.rollout for ask in taken]


def test_rows_in_the_order_of_their_arrival_each_once() -> None:
    queue = SlotQueue()
    queue.extend([write(2), write(0), write(2), write(1)])
    assert len(queue) == 3
    assert take(queue, Generate, 2) == [2, 0]
    assert take(queue, Generate, 5, active=[2]) == [1], "2 is at work: its second request waits"
    assert take(queue, Generate, 5) == [2]
    assert len(queue) == 0 and not list(queue)


def test_a_row_asks_in_order_whatever_it_asks() -> None:
    queue = SlotQueue()
    queue.extend([write(0), score(0), score(1), score(None), score(None)])
    assert take(queue, Score, 9) == [1, None, None], "0 has to be written first"
    assert take(queue, Score, 9) == []
    assert take(queue, Generate, 9) == [0]
    assert take(queue, Score, 9) == [0]


def test_rows_that_have_kv_go_first() -> None:
    queue = SlotQueue()
    queue.extend([write(i) for i in range(5)])
    assert take(queue, Generate, 3, first=[4, 9, 2]) == [4, 2, 0]
    assert queue.waits(RowKey(0, 0, "t", 1).row)
    assert not queue.waits(RowKey(0, 0, "t", 0).row) and not queue.waits(None)
    assert take(queue, Generate, 1, first=[3]) == [3]


def test_what_was_cancelled_is_forgotten() -> None:
    queue = SlotQueue()
    asks = [write(0), write(1), score(1)]
    queue.extend(asks)
    asks[1].cancelled = True
    queue.drop_cancelled()
    assert list(queue) == [asks[0], asks[2]]
    assert take(queue, Score, 9) == [1], "nothing of the row stands before it any more"
    queue.clear()
    assert len(queue) == 0 and take(queue, Generate, 9) == []


def test_waiting_is_given_up_for_longer_and_longer_where_nobody_returns() -> None:
    with LoopThread() as thread:
        returns = Returns(longest=4)

        def waited() -> bool:
            returns.expect({thread.loop})
            return returns.wait()

        assert not returns.wait(), "no answer is out"
        pauses = []
        for _ in range(5):
            pause = 0
            while not waited():
                pause += 1
            pauses.append(pause)
            returns.learn(False)
        assert pauses == [0, 1, 2, 4, 4]
        while not waited():
            pass
        returns.learn(True)
        assert waited(), "somebody came: it pays again"


def test_a_wait_lasts_until_the_tasks_that_were_answered_have_run() -> None:
    with LoopThread() as thread:
        log: list[str] = []

        async def one() -> asyncio.Future[None]:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            async def waits() -> None:
                await future
                log.append("ran")

            log.append("asked")
            thread_task.append(asyncio.ensure_future(waits()))
            await asyncio.sleep(0)
            return future

        thread_task: list[Any] = []
        future = thread.submit(one).result(10)
        returns = Returns()
        thread.loop.call_soon_threadsafe(future.set_result, None)
        returns.expect({thread.loop})
        assert returns.wait()
        assert log == ["asked", "ran"]
