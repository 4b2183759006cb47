"""Every fault of a model server, from a real server that misbehaves to the review that records it."""

from __future__ import annotations

import asyncio
import gzip
import importlib.util
import json
import sys
import time
import tracemalloc
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from mintrl_env.adapters.chat_server import ChatServer
from mintrl_env.adapters.llm_client import ModelClient
from mintrl_env.adapters.llm_limits import BreakerConfig, Limits, Prices, Timing
from mintrl_env.chat import ChatMessage
from mintrl_env.reviewing import review_chunk
from mintrl_env.types import (
    FailedReview,
    Finish,
    ReviewEvent,
    ReviewRequest,
    Step,
    Task,
    Usage,
    Verdict,
    frozen_ids,
)

_SPEC = importlib.util.spec_from_file_location(
    "fake_llm_server", Path(__file__).with_name("fake_llm_server.py")
)
assert _SPEC is not None and _SPEC.loader is not None
fake: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["fake_llm_server"] = fake
_SPEC.loader.exec_module(fake)

QUICK = Timing(attempts=3, attempt_s=10.0, deadline_s=15.0, backoff_s=0.01, max_backoff_s=0.05)
IMPATIENT = Timing(attempts=3, attempt_s=0.4, deadline_s=15.0, backoff_s=0.01, max_backoff_s=0.05)
GUARD_S = 30.0
NO_MONEY = {"error": {"message": "You exceeded your quota", "code": "insufficient_quota"}}
REQUEST = ReviewRequest(
    Task("t", "What is 1 + 1?", "2"),
    frozen_ids([1]),
    frozen_ids([]),
    "",
    frozen_ids([2]),
    (Step("two", 0),),
    0,
    3,
    8,
    Finish.LENGTH,
)


class AskingJudge:
    """Keeps whatever the server says, with what that cost."""

    def __init__(self, client: ModelClient) -> None:
        self.server = ChatServer(client, "toy")

    async def review(self, request: ReviewRequest) -> Verdict:
        messages = [ChatMessage("user", request.task.prompt_text)]
        reply = await self.server.chat(messages, max_tokens=5)
        return Verdict.keep(reply.text, reply.usage)


async def reviewed(client: ModelClient) -> ReviewEvent:
    judge = AskingJudge(client)
    async with asyncio.timeout(GUARD_S):
        return await review_chunk(judge, REQUEST, check=lambda verdict: "")


async def quiet(server: Any) -> None:
    """Wait until the server's side of every connection is closed."""
    async with asyncio.timeout(GUARD_S):
        while server.open_now:
            await asyncio.sleep(0.01)


@dataclass(frozen=True)
class Fault:
    name: str
    script: Sequence[Any]
    cause: str | None  # None: the review succeeds
    requests: int
    timing: Timing = QUICK


ANSWER = json.dumps({"choices": [{"message": {"content": "hi"}}], "usage": {}}).encode()
BOMB = gzip.compress(bytes(48 << 20), 1)  # 0.2 MB
BOMBS = gzip.compress(BOMB, 1)


def packed(data: bytes, coding: str) -> Any:
    return fake.Raw(data, {"Content-Encoding": coding})


FAULTS = [
    Fault("packed", [packed(gzip.compress(ANSWER), "gzip")] * 9, None, 1),
    Fault("packed_zlib", [packed(zlib.compress(ANSWER), "deflate")] * 9, None, 1),
    Fault("bomb", [packed(BOMB, "gzip")] * 9, "server", 1),
    Fault("bomb_in_a_bomb", [packed(BOMBS, "gzip, gzip")] * 9, "server", 1),
    Fault("packed_oddly", [packed(ANSWER, "br")] * 9, "server", 1),
    Fault("not_packed", [packed(ANSWER, "gzip")], None, 2),
    Fault("huge_head", [fake.Raw(ANSWER, {"X-Much": "x" * (10 << 20)})] * 9, "connection", 3),
    Fault("html", [fake.Raw(b"<html>", {"Content-Type": "text/html"})] * 9, "server", 3),
    Fault("other_type", [fake.Raw(ANSWER, {"Content-Type": "text/plain"})] * 9, None, 1),
    Fault("empty", [fake.Raw(b"")] * 9, "server", 3),
    Fault("half_utf8", [fake.Raw(ANSWER[:40] + b"\xff\xfe")] * 9, "server", 3),
    Fault("huge_number", [fake.Raw(b"[" + b"9" * 5000 + b"]")] * 9, "server", 3),
    Fault("nan_counts", [fake.Raw(ANSWER.replace(b"{}", b'{"prompt_tokens": NaN}'))], None, 1),
    Fault("moved_elsewhere", [fake.Status(307, headers={"Location": "/v1/x"})] * 9, "server", 1),
    Fault("never_answers", [fake.Hang()] * 9, "timeout", 3, IMPATIENT),
    Fault("slow_once", [fake.Hang()], None, 2, replace(QUICK, attempt_s=1.5)),
    Fault("never_ends", [fake.Trickle(0.1)] * 9, "timeout", 3, IMPATIENT),
    Fault("after_the_deadline", [fake.Answer(delay=4.0)] * 9, "timeout", 3, IMPATIENT),
    Fault("no_time_left", [fake.Hang()] * 9, "timeout", 1, replace(IMPATIENT, deadline_s=0.4)),
    Fault("429", [fake.Status(429)] * 9, "rate_limit", 3),
    Fault("429_once", [fake.Status(429)], None, 2),
    Fault("429_wait", [fake.Status(429, headers={"Retry-After": "0.3"})], None, 2),
    Fault("429_long", [fake.Status(429, headers={"Retry-After": "60"})] * 9, "rate_limit", 1),
    Fault("500_then_fine", [fake.Status(500)], None, 2),
    Fault("503", [fake.Status(503)] * 9, "server", 3),
    Fault("504", [fake.Status(504)] * 9, "timeout", 3),
    Fault("cut_mid_body", [fake.Cut()] * 9, "connection", 3),
    Fault("cut_once", [fake.Cut()], None, 2),
    Fault("dropped", [fake.Drop()] * 9, "connection", 3),
    Fault("wrong_shape", [fake.Json({"choices": []})] * 9, "server", 3),
    Fault("wrong_shape_list", [fake.Json([1, 2])] * 9, "server", 3),
    Fault("wrong_shape_once", [fake.Json({"choices": [{"message": None}]})], None, 2),
    Fault("text_is_number", [fake.Json({"choices": [{"message": {"content": 7}}]})], None, 2),
    Fault("no_json", [fake.Raw(b"<html>502</html>")] * 9, "server", 3),
    Fault("deep_json", [fake.Raw(b"[" * 200_000)], None, 2),
    Fault("error_as_200", [fake.Json({"error": {"message": "busy", "code": 429}})], None, 2),
    Fault("10_mb", [fake.Huge(10 << 20)] * 9, "server", 1),
    Fault("auth", [fake.Status(401)] * 9, "auth", 1),
    Fault("forbidden", [fake.Status(403)] * 9, "auth", 1),
    Fault("quota", [fake.Status(429, NO_MONEY)] * 9, "budget", 1),
    Fault("payment", [fake.Status(402)] * 9, "budget", 1),
    Fault("refused_request", [fake.Status(400)] * 9, "server", 1),
    Fault("no_such_model", [fake.Status(404)] * 9, "server", 1),
    Fault("moved", [fake.Status(301)] * 9, "server", 1),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_its_cause_its_requests_and_its_time(fault: Fault) -> None:
    async def main() -> ReviewEvent:
        async with ModelClient(server.url, timing=fault.timing, breaker=None) as client:
            event = await reviewed(client)  # within GUARD_S
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await quiet(server)
        return event

    with fake.FakeServer() as server:
        server.script += fault.script
        event = asyncio.run(main())
        assert len(server.posts) == fault.requests
    if fault.cause is None:
        assert isinstance(event, Verdict)
        assert event.reason and event.usage.completion_tokens > 0
    else:
        assert isinstance(event, FailedReview)
        assert event.cause == fault.cause
        assert server.url in event.reason  # the place
        # Nothing is known of what these attempts used.
        assert (event.usage.prompt_tokens, event.usage.completion_tokens) == (0, 0)
    assert event.usage.calls == fault.requests


def test_a_bomb_is_measured_before_it_stands_in_memory() -> None:
    async def main() -> ReviewEvent:
        async with ModelClient(server.url, timing=QUICK, max_reply_bytes=1 << 20) as client:
            await reviewed(client)  # what is loaded at first use
            server.default = packed(BOMB, "gzip")
            tracemalloc.start()
            try:
                event = await reviewed(client)
                assert tracemalloc.get_traced_memory()[1] < 12 << 20
            finally:
                tracemalloc.stop()
            return event

    with fake.FakeServer() as server:
        event = asyncio.run(main())
    assert isinstance(event, FailedReview)
    assert "longer than max_reply_bytes = 1048576" in event.reason


def test_a_server_that_closes_behind_each_answer() -> None:
    """Its kept connections are dead ones: a call may find out, and lose a request, but no reply."""

    async def main() -> list[ReviewEvent]:
        async with ModelClient(server.url, timing=QUICK, breaker=None) as client:
            return [await reviewed(client) for _ in range(30)]

    with fake.FakeServer() as server:
        server.default = fake.Cut(after=1 << 20)
        events = asyncio.run(main())
    assert [type(event) for event in events] == [Verdict] * 30


def test_nobody_listens() -> None:
    async def main() -> ReviewEvent:
        async with ModelClient(server.url, timing=QUICK, breaker=None) as client:
            return await reviewed(client)

    with fake.FakeServer() as server:
        pass
    event = asyncio.run(main())
    assert isinstance(event, FailedReview)
    assert event.cause == "connection"
    assert "is the server running" in event.reason
    assert event.usage.calls == 3


def test_retry_after_is_waited_for_by_the_other_calls_too() -> None:
    async def main() -> list[float]:
        async with ModelClient(server.url, timing=QUICK, breaker=None) as client:
            first = asyncio.ensure_future(reviewed(client))
            while client.gate._paused_until < 0:  # until the 429 has arrived
                await asyncio.sleep(0.005)
            await asyncio.gather(first, *(reviewed(client) for _ in range(4)))
        return [seen.at for seen in server.posts]

    with fake.FakeServer() as server:
        server.script.append(fake.Status(429, headers={"Retry-After": "0.6"}))
        times = asyncio.run(main())
    assert len(times) == 6
    assert min(times[1:]) - times[0] >= 0.55


def test_a_rest_for_all_counts_towards_each_deadline() -> None:
    """A server that always asks for a rest can hold no call beyond its deadline: neither the one that
    was told, nor those that wait because of it."""
    timing = Timing(attempts=50, attempt_s=1.0, deadline_s=1.5, backoff_s=0.01)

    async def main() -> list[ReviewEvent]:
        async with ModelClient(server.url, timing=timing, breaker=None) as client:
            return list(await asyncio.gather(*(reviewed(client) for _ in range(20))))

    with fake.FakeServer() as server:
        server.default = fake.Status(429, headers={"Retry-After": "0.6"})
        events = asyncio.run(main())
        assert len(server.posts) < 20 * 4
    for event in events:
        assert isinstance(event, FailedReview)
        assert event.cause in (
            "rate_limit",
            "timeout",
        )  # its last attempt may be cut by the deadline
        assert event.usage.seconds < timing.deadline_s + timing.attempt_s


def test_a_long_rest_fails_those_who_have_no_time_for_it() -> None:
    now = [0.0]

    async def main() -> ReviewEvent:
        timing = Timing(deadline_s=5.0)
        async with ModelClient(
            server.url, timing=timing, breaker=None, clock=lambda: now[0]
        ) as client:
            client.gate.pause(60.0)
            event = await reviewed(client)
            now[0] = 61.0
            assert isinstance(await reviewed(client), Verdict)
            return event

    with fake.FakeServer() as server:
        event = asyncio.run(main())
        assert len(server.posts) == 1
    assert isinstance(event, FailedReview) and event.cause == "rate_limit"
    assert "asked for 60 s more" in event.reason


def test_tls_where_there_is_none() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")  # as servers answer what is no HTTP
        await writer.drain()
        await reader.read()
        writer.close()

    async def main() -> ReviewEvent:
        server = await asyncio.start_server(refuse, "127.0.0.1", 0)
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        async with server, ModelClient(url, timing=QUICK, breaker=None) as client:
            return await reviewed(client)

    event = asyncio.run(main())
    assert isinstance(event, FailedReview) and event.cause == "connection"
    assert "SSL" in event.reason


def test_an_http_date_as_retry_after() -> None:
    from email.utils import formatdate

    from mintrl_env.adapters.llm_faults import refusal

    date = formatdate(time.time() + 30, usegmt=True)
    for value, low, high in (
        (date, 25, 31),
        ("7", 7, 7),
        ("soon", None, None),
        ("-1", None, None),
        ("inf", None, None),
        ("nan", None, None),
        ("1e9", 1e9, 1e9),
        ("", None, None),
        ("Mon, 01 Jan 0001 00:00:00 GMT", 0, 0),
        ("Mon, 01 Jan 99999 00:00:00 GMT", None, None),
    ):
        failure = refusal(429, {"retry-after": value}, {})
        assert failure is not None
        if low is None:
            assert failure.retry_after is None
        else:
            assert low <= failure.retry_after <= high
    milliseconds = refusal(503, {"retry-after-ms": "250", "retry-after": "9"}, {})
    assert milliseconds is not None and milliseconds.retry_after == 0.25


def test_a_server_that_is_restarted_in_mid_run() -> None:
    timing = Timing(attempts=99, attempt_s=20.0, deadline_s=25.0, backoff_s=0.05, max_backoff_s=0.2)

    async def main() -> list[ReviewEvent]:
        async with ModelClient(server.url, timing=timing) as client:
            calls = [asyncio.ensure_future(reviewed(client)) for _ in range(40)]
            while len(server.posts) < 10:
                await asyncio.sleep(0.005)
            await asyncio.to_thread(server.stop)
            await asyncio.sleep(0.3)
            server.default = fake.Answer()
            await asyncio.to_thread(server.start)
            return list(await asyncio.gather(*calls))

    with fake.FakeServer() as server:
        server.default = fake.Hang()  # so that calls are under way when it stops
        events = asyncio.run(main())
    assert [type(event) for event in events] == [Verdict] * 40
    assert (
        sum(event.usage.calls for event in events) >= 50
    )  # ten at least were cut, and tried again


def test_what_failed_attempts_cost_is_counted() -> None:
    """A reply that can't be used was paid for: the wrong shape with a usage, then the right one."""
    useless = {"choices": [], "usage": {"prompt_tokens": 1000, "completion_tokens": 500}}

    async def main() -> tuple[ReviewEvent, Usage]:
        prices = Prices(prompt=1.0, completion=4.0)
        async with ModelClient(server.url, timing=QUICK, prices=prices, breaker=None) as client:
            return await reviewed(client), client.gate.spent

    with fake.FakeServer() as server:
        server.script.append(fake.Json(useless))
        event, spent = asyncio.run(main())
        assert isinstance(event, Verdict)
        server.script += [fake.Json(useless)] * 3
        failed, _ = asyncio.run(main())
    assert event.usage.prompt_tokens > 1000 and event.usage.completion_tokens > 500
    assert event.usage.usd > 0.003
    assert spent.usd == pytest.approx(event.usage.usd)
    assert isinstance(failed, FailedReview)
    assert (failed.usage.prompt_tokens, failed.usage.completion_tokens) == (3000, 1500)
    assert failed.usage.usd == pytest.approx(3 * (1000 * 1.0 + 500 * 4.0) / 1e6)


def test_a_budget_that_is_used_up_fails_at_once_and_sends_nothing() -> None:
    async def main() -> list[ReviewEvent]:
        limits = Limits(tokens=20)
        async with ModelClient(server.url, timing=QUICK, limits=limits) as client:
            return [await reviewed(client) for _ in range(6)]

    with fake.FakeServer() as server:
        events = asyncio.run(main())
        sent = len(server.posts)
    causes = [e.cause if isinstance(e, FailedReview) else "" for e in events]
    assert sent == causes.count("") < 6
    assert causes[-1] == "budget"
    assert events[-1].usage == Usage(calls=0)


def test_the_breaker_fails_fast_then_sends_one_probe() -> None:
    now = [0.0]

    async def main() -> None:
        once = Timing(attempts=1, attempt_s=5, deadline_s=5)
        breaker = BreakerConfig(rate=0.5, least=4, cool_down_s=30)
        async with ModelClient(
            server.url, timing=once, breaker=breaker, clock=lambda: now[0]
        ) as client:

            async def causes(count: int) -> list[str]:
                events = await asyncio.gather(*(reviewed(client) for _ in range(count)))
                return [e.cause if isinstance(e, FailedReview) else "" for e in events]

            server.default = fake.Status(500)
            assert await causes(4) == ["server"] * 4
            assert len(server.posts) == 4
            assert await causes(50) == ["server"] * 50
            assert len(server.posts) == 4  # not one of them was sent
            now[0] = 31.0
            assert await causes(10) == ["server"] * 10
            assert len(server.posts) == 5  # the probe, which failed
            now[0] = 62.0
            server.default = fake.Answer()
            server.latency = 0.05
            assert sorted(await causes(10)) == [""] + ["server"] * 9
            assert len(server.posts) == 6  # the probe, which went well
            assert await causes(10) == [""] * 10
            assert len(server.posts) == 16

    with fake.FakeServer() as server:
        asyncio.run(main())


def test_cancelling_closes_the_connection_and_frees_the_slot() -> None:
    async def main() -> None:
        async with ModelClient(server.url, limits=Limits(concurrent=2)) as client:
            for _ in range(20):
                calls = [asyncio.ensure_future(reviewed(client)) for _ in range(5)]
                while server.at_work < 2:
                    await asyncio.sleep(0.002)
                for call in calls:
                    call.cancel()
                ended = await asyncio.gather(*calls, return_exceptions=True)
                assert all(isinstance(e, asyncio.CancelledError) for e in ended)
                async with asyncio.timeout(GUARD_S):  # the server sees them go
                    while server.at_work:
                        await asyncio.sleep(0.002)
            server.default = fake.Answer()
            assert isinstance(await reviewed(client), Verdict)
            assert asyncio.all_tasks() == {asyncio.current_task()}
        await quiet(server)

    with fake.FakeServer() as server:
        server.default = fake.Hang()
        asyncio.run(main())
        assert server.gone == 40
        assert len(server.posts) == 41


def test_faults_leave_no_descriptor_behind() -> None:
    process = psutil.Process()
    once = Timing(attempts=2, attempt_s=0.1, deadline_s=0.3, backoff_s=0.001, max_backoff_s=0.002)

    async def main() -> None:
        async with ModelClient(server.url, timing=once, breaker=None) as client:
            for fault in FAULTS:
                server.script.clear()
                server.script += fault.script[:2]
                await reviewed(client)
        await quiet(server)

    with fake.FakeServer() as server:
        asyncio.run(main())  # what is loaded at first use is not a leak
        before = process.num_fds()
        asyncio.run(main())
        assert process.num_fds() <= before


def test_a_loop_that_ends_closes_connections_that_nobody_closed() -> None:
    process = psutil.Process()

    async def main() -> None:
        assert isinstance(await reviewed(client), Verdict)

    with fake.FakeServer() as server:
        client = ModelClient(server.url)
        asyncio.run(main())
        before = process.num_fds()
        for _ in range(5):
            asyncio.run(main())
        asyncio.run(quiet(server))
        assert process.num_fds() <= before
        assert server.connections == 6


def test_a_policy_fails_by_the_same_causes() -> None:
    from mintrl_env.adapters.policy_server import ServerPolicy
    from mintrl_env.errors import PolicyError
    from mintrl_env.keys import RowKey
    from mintrl_env.prompts import ByteTokenizer

    async def main(cause: str) -> None:
        timing = IMPATIENT if cause == "timeout" else QUICK
        async with ModelClient(server.url, timing=timing, breaker=None) as client:
            policy = ServerPolicy(client, "toy", ByteTokenizer())
            with pytest.raises(PolicyError, match=f"^{cause}: POST {server.url}"):
                await policy.generate(np.array([100]), max_tokens=4, key=RowKey(0, 0, "t", 0))

    for cause, behaviour in (
        ("timeout", fake.Hang()),
        ("connection", fake.Cut()),
        ("server", fake.Json({"choices": [{"token_ids": [1.5], "finish_reason": "stop"}]})),
        ("auth", fake.Status(401)),
    ):
        with fake.FakeServer() as server:
            server.default = behaviour
            asyncio.run(main(cause))
