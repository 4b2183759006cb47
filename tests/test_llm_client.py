"""The client of model servers: limits, breaker, cache, back-pressure; faults are test_llm_faults.py."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from mintrl_env.adapters.llm_cache import ReplyCache
from mintrl_env.adapters.llm_client import ModelClient
from mintrl_env.adapters.llm_faults import CallFailed, WrongShape, member, refusal, tokens_of
from mintrl_env.adapters.llm_limits import (
    Breaker,
    BreakerConfig,
    BreakerOpen,
    Gate,
    Limits,
    OverBudget,
    Prices,
    Timing,
)
from mintrl_env.errors import JudgeCause, MissingExtraError, StoreError, UsageError
from mintrl_env.types import Usage

_SPEC = importlib.util.spec_from_file_location(
    "fake_llm_server", Path(__file__).with_name("fake_llm_server.py")
)
assert _SPEC is not None and _SPEC.loader is not None
fake: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["fake_llm_server"] = fake
_SPEC.loader.exec_module(fake)

BODY = {"model": "toy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def text_in(reply: Any) -> str:
    return member(reply, str, "choices", 0, "message", "content")


async def ask(client: ModelClient, body: Any = BODY, **options: Any) -> tuple[str, Usage]:
    path = "chat/completions"
    return await client.call(path, body, text_in, prompt_tokens=2, max_tokens=4, **options)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class TestGate:
    def test_without_limits_nobody_waits_and_nothing_is_kept(self) -> None:
        gate = Gate(Limits())
        assert [gate.book(10**9)[1] for _ in range(1000)] == [0.0] * 1000
        assert not gate._booked

    def test_any_minute_holds_no_more_than_rpm_requests(self) -> None:
        clock = Clock()
        gate = Gate(Limits(rpm=3), clock=clock)
        assert [gate.book(1)[1] for _ in range(3)] == [0, 0, 0]
        clock.now += 20
        assert gate.book(1)[1] == 40  # the first three leave the window then
        assert gate.book(1)[1] == 40
        assert gate.book(1)[1] == 40
        assert gate.book(1)[1] == 100
        clock.now += 500
        assert gate.book(1)[1] == 0

    def test_begun_requests_in_every_window_of_a_long_run(self) -> None:
        clock = Clock()
        gate = Gate(Limits(rpm=7, tpm=1000), clock=clock)
        begun: list[tuple[float, int]] = []
        for index in range(200):
            clock.now += (index * 37 % 11) / 2
            tokens = 50 + index * 61 % 400
            booking, wait = gate.book(tokens)
            assert wait >= 0
            assert not begun or booking.at >= begun[-1][0]  # in the order of asking
            begun.append((clock.now + wait, tokens))
        for at, _ in begun:
            inside = [tokens for other, tokens in begun if at - 60 < other <= at]
            assert len(inside) <= 7
            assert sum(inside) <= 1000

    def test_tokens_are_an_estimate_until_they_are_known(self) -> None:
        clock = Clock()
        gate = Gate(Limits(tpm=100), clock=clock)
        booking, _ = gate.book(90)
        gate.settle(booking, Usage(prompt_tokens=10, completion_tokens=10))
        assert gate.book(80)[1] == 0
        assert gate.book(1)[1] == 60
        unknown, _ = gate.book(50)
        gate.settle(unknown, Usage())  # a time-out: the server may have read them
        assert unknown.tokens == 50

    def test_a_request_larger_than_a_minute_goes_alone(self) -> None:
        clock = Clock()
        gate = Gate(Limits(tpm=100), clock=clock)
        assert gate.book(5000)[1] == 0
        assert gate.book(5000)[1] == 60
        assert gate.book(1)[1] == 120

    def test_a_place_that_is_not_used_is_given_back(self) -> None:
        gate = Gate(Limits(rpm=1), clock=Clock())
        booking, _ = gate.book(1)
        gate.cancel(booking)
        gate.cancel(booking)
        assert gate.book(1)[1] == 0

    def test_a_pause_holds_back_what_books_after_it(self) -> None:
        clock = Clock()
        gate = Gate(Limits(), clock=clock)
        gate.pause(10)
        gate.pause(3)  # does not shorten it
        assert gate.book(1)[1] == 10
        clock.now += 11
        assert gate.book(1)[1] == 0

    @pytest.mark.parametrize(
        ("limits", "used"),
        [
            (Limits(tokens=100), Usage(prompt_tokens=60, completion_tokens=40)),
            (Limits(usd=0.5), Usage(usd=0.5)),
        ],
    )
    def test_budgets(self, limits: Limits, used: Usage) -> None:
        gate = Gate(limits)
        booking, _ = gate.book(10**6)  # what a call may use is not what it does use
        gate.settle(booking, used)
        with pytest.raises(OverBudget):
            gate.book(1)
        with pytest.raises(OverBudget):
            gate.check_budget()
        assert gate.spent == used + Usage(calls=0)

    @pytest.mark.parametrize(
        "wrong",
        [
            {"concurrent": 0},
            {"concurrent": None},
            {"rpm": 0},
            {"tpm": 1.5},
            {"usd": -1},
            {"rpm": True},
        ],
    )
    def test_limits_that_are_none(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(UsageError, match=f"limits.{next(iter(wrong))}"):
            Limits(**wrong)

    def test_prices(self) -> None:
        prices = Prices(prompt=2.0, completion=8.0, cached=0.5)
        assert prices.usd(1000, 100) == pytest.approx(0.002 + 0.0008)
        assert prices.usd(1000, 100, 400) == pytest.approx((600 * 2 + 400 * 0.5 + 100 * 8) / 1e6)
        assert Prices(prompt=2.0, completion=8.0).usd(1000, 0, 400) == pytest.approx(0.002)


class TestBreaker:
    CONFIG = BreakerConfig(rate=0.5, least=4, window_s=60, cool_down_s=30)

    def test_it_opens_above_the_rate_and_not_at_it(self) -> None:
        breaker = Breaker(self.CONFIG, clock=Clock())
        for failure in (None, JudgeCause.TIMEOUT, None, JudgeCause.TIMEOUT):
            breaker.ended(failure, probe=breaker.admit())
        assert not breaker.is_open
        breaker.ended(JudgeCause.TIMEOUT, probe=breaker.admit())
        assert breaker.is_open
        with pytest.raises(BreakerOpen, match=r"more than 50% .* by timeout; .* in 30 s") as caught:
            breaker.admit()
        assert caught.value.cause is JudgeCause.TIMEOUT

    def test_failures_of_long_ago_do_not_count(self) -> None:
        clock = Clock()
        breaker = Breaker(self.CONFIG, clock=clock)
        for _ in range(10):
            clock.now += 61
            breaker.ended(JudgeCause.SERVER, probe=breaker.admit())
        assert not breaker.is_open

    def opened(self) -> tuple[Breaker, Clock]:
        clock = Clock()
        breaker = Breaker(self.CONFIG, clock=clock)
        for _ in range(4):
            breaker.ended(JudgeCause.SERVER, probe=False)
        return breaker, clock

    def test_one_probe_after_the_cool_down(self) -> None:
        breaker, clock = self.opened()
        clock.now += 30
        assert breaker.admit() is True
        with pytest.raises(BreakerOpen, match="one call is trying it now"):
            breaker.admit()
        breaker.ended(JudgeCause.SERVER, probe=True)
        with pytest.raises(BreakerOpen, match="in 30 s"):
            breaker.admit()
        clock.now += 30
        breaker.ended(None, probe=breaker.admit())
        assert not breaker.is_open
        assert breaker.admit() is False

    def test_a_cancelled_probe_makes_room_for_another(self) -> None:
        breaker, clock = self.opened()
        clock.now += 30
        assert breaker.admit()
        breaker.ended(None, probe=True, tells=False)
        assert breaker.is_open
        assert breaker.admit() is True

    def test_calls_from_before_it_opened(self) -> None:
        breaker, _ = self.opened()
        breaker.ended(JudgeCause.SERVER, probe=False)  # does not prolong it
        assert breaker.is_open
        breaker.ended(None, probe=False)  # the server works after all
        assert not breaker.is_open

    def test_refused_requests_say_nothing_of_the_server(self) -> None:
        async def main() -> None:
            async with ModelClient(server.url, breaker=BreakerConfig(least=2)) as client:
                for _ in range(10):
                    with pytest.raises(CallFailed, match="HTTP 400"):
                        await ask(client)
                assert client.breaker is not None and not client.breaker.is_open

        with fake.FakeServer() as server:
            server.default = fake.Status(400)
            asyncio.run(main())
            assert len(server.posts) == 10


class TestCache:
    def test_a_second_run_asks_nothing_and_gets_the_same(self, tmp_path: Path) -> None:
        async def main(mode: Any) -> list[tuple[str, Usage]]:
            cache = ReplyCache(tmp_path / "replies", mode=mode)
            async with ModelClient(server.url, cache=cache) as client:
                seeded = {**BODY, "seed": 3}
                return [
                    await ask(client, body, cached=True) for body in (BODY, BODY, seeded, seeded)
                ]

        with fake.FakeServer() as server:
            first = asyncio.run(main("use"))
            assert len(server.posts) == 3  # the two that have a seed are one
            second = asyncio.run(main("use"))
            assert len(server.posts) == 3
        third = asyncio.run(main("replay"))  # no server any more
        assert [text for text, _ in first] == [text for text, _ in second]
        assert [text for text, _ in second] == [text for text, _ in third]
        assert first[0][0] != first[1][0]  # sampled twice, and so stored twice
        assert first[2][0] == first[3][0]
        assert [usage for _, usage in third] == [Usage(calls=0)] * 4

    def test_a_replay_that_misses_fails_without_asking(self, tmp_path: Path) -> None:
        async def main() -> None:
            cache = ReplyCache(tmp_path, mode="replay")
            async with ModelClient("http://127.0.0.1:9/v1", cache=cache) as client:
                with pytest.raises(CallFailed, match="mode is replay") as caught:
                    await ask(client, cached=True)
                assert caught.value.cause is JudgeCause.INTERNAL
                assert cache.misses == 1

        asyncio.run(main())

    def test_only_replies_that_can_be_read_are_stored(self, tmp_path: Path) -> None:
        async def main() -> None:
            timing = Timing(attempts=1)
            async with ModelClient(server.url, cache=ReplyCache(tmp_path), timing=timing) as client:
                with pytest.raises(CallFailed):
                    await ask(client, cached=True)

        with fake.FakeServer() as server:
            server.default = fake.Json({"choices": []})
            asyncio.run(main())
        assert not list(tmp_path.rglob("*.json"))

    def test_a_stored_reply_of_another_shape(self, tmp_path: Path) -> None:
        async def main() -> None:
            cache = ReplyCache(tmp_path)
            cache.put(cache.key("chat/completions", {**BODY, "seed": 1}), {"choices": []})
            async with ModelClient(server.url, cache=cache) as client:
                first = await ask(client, {**BODY, "seed": 1}, cached=True)
                again = await ask(client, {**BODY, "seed": 1}, cached=True)
            assert first[0] == again[0] and (first[1].calls, again[1].calls) == (
                1,
                0,
            )  # by then the right one is stored
            replay = ReplyCache(tmp_path, mode="replay")
            replay.put(replay.key("chat/completions", {"seed": 2}), {"choices": []})
            async with ModelClient("http://127.0.0.1:9/v1", cache=replay) as client:
                with pytest.raises(CallFailed, match=r"choices.*; delete it") as caught:
                    await ask(client, {"seed": 2}, cached=True)
            assert caught.value.cause is JudgeCause.INTERNAL

        with fake.FakeServer() as server:
            asyncio.run(main())
            assert len(server.posts) == 1

    @pytest.mark.parametrize("broken", ["{", "", "[" * 100_000, "\udc80"])
    def test_a_broken_file_is_asked_for_again_or_says_what_to_do(
        self, tmp_path: Path, broken: str
    ) -> None:
        cache = ReplyCache(tmp_path)
        key = cache.key("p", {"seed": 1})
        cache.put(key, {"a": 1})
        assert cache.get(key) == {"a": 1}
        (file,) = tmp_path.rglob("*.json")
        file.write_bytes(broken.encode("utf-8", "surrogateescape"))
        assert cache.get(key) is None and (cache.hits, cache.misses) == (1, 1)
        cache.put(key, {"a": 2})
        assert cache.get(key) == {"a": 2}
        file.write_bytes(broken.encode("utf-8", "surrogateescape"))
        with pytest.raises(CallFailed, match=r"no reply that can be read: .*; delete it"):
            ReplyCache(tmp_path, mode="replay").get(key)

    def test_a_reply_that_cannot_be_stored_is_used_all_the_same(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def full(*args: Any, **options: Any) -> Any:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("mintrl_env.adapters.llm_cache.tempfile.mkstemp", full)

        async def main() -> tuple[Any, Usage]:
            async with ModelClient(server.url, cache=ReplyCache(tmp_path)) as client:
                return await ask(client, cached=True)

        with fake.FakeServer() as server:
            _, usage = asyncio.run(main())
        assert usage.calls == 1 and usage.completion_tokens > 0
        assert "No space left on device" in caplog.text

    def test_two_processes_at_once_leave_a_whole_reply(self, tmp_path: Path) -> None:
        program = (
            "import sys\nfrom mintrl_env.adapters.llm_cache import ReplyCache\n"
            "c = ReplyCache(sys.argv[1])\nk = c.key('p', {'seed': 1})\n"
            "for n in range(300):\n    c.put(k, {'by': sys.argv[2], 'x': 'y' * 5000})\n"
            "    assert len(c.get(k)['x']) == 5000\n"
        )
        runs = [
            subprocess.Popen([sys.executable, "-c", program, str(tmp_path), name])
            for name in ("a", "b")
        ]
        assert [run.wait(120) for run in runs] == [0, 0]
        assert [path.suffix for path in tmp_path.rglob("*") if path.is_file()] == [".json"]

    def test_other_requests_have_other_names(self, tmp_path: Path) -> None:
        cache = ReplyCache(tmp_path)
        bodies = [{"seed": 1, "a": 1}, {"seed": 2, "a": 1}, {"a": 1, "temperature": 0}]
        keys = [cache.key("p", body) for body in bodies] + [cache.key("q", bodies[0])]
        assert len(set(keys)) == 4
        assert cache.key("p", {"a": 1, "seed": 1}) == keys[0]  # whatever the order of its fields

    def test_a_folder_that_cannot_be_made(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(StoreError, match="cannot be made"):
            ReplyCache(tmp_path / "file" / "x")


class TestClient:
    def test_what_is_sent(self) -> None:
        async def main() -> None:
            headers = {"X-Extra": "1"}
            async with ModelClient(server.url, api_key="k-1", headers=headers) as client:
                await ask(client, row="r", request="q")

        with fake.FakeServer() as server:
            server.script.append(fake.Status(500))
            asyncio.run(main())
        first, second = server.posts
        assert first.path == "/v1/chat/completions"
        assert first.body == BODY
        assert first.headers["authorization"] == "Bearer k-1"
        assert first.headers["x-extra"] == "1"
        assert first.headers["accept-encoding"] == "identity"
        assert [first.headers["x-session-id"], second.headers["x-session-id"]] == ["r", "r"]
        assert [first.headers["x-request-id"], second.headers["x-request-id"]] == ["q-0", "q-1"]

    def test_no_more_calls_at_once_than_asked_for(self) -> None:
        async def main() -> None:
            async with ModelClient(server.url, limits=Limits(concurrent=8)) as client:
                calls = [asyncio.ensure_future(ask(client)) for _ in range(50)]
                while server.at_work < 8:
                    await asyncio.sleep(0.005)
                await asyncio.sleep(0.1)
                assert server.at_work == 8
                for call in calls:
                    call.cancel()
                await asyncio.gather(*calls, return_exceptions=True)

        with fake.FakeServer() as server:
            server.default = fake.Hang()
            asyncio.run(main())
            assert len(server.posts) == 8

    def test_a_body_is_made_when_its_turn_has_come(self) -> None:
        """Thousands of calls may wait: a long prompt as JSON is kept for those at work alone."""
        made = []

        async def main() -> None:
            async with ModelClient(server.url, limits=Limits(concurrent=3)) as client:
                calls = [
                    asyncio.ensure_future(ask(client, lambda n=n: made.append(n) or BODY))
                    for n in range(20)
                ]
                while server.at_work < 3:
                    await asyncio.sleep(0.005)
                assert made == [0, 1, 2]
                for call in calls:
                    call.cancel()
                await asyncio.gather(*calls, return_exceptions=True)

        with fake.FakeServer() as server:
            server.default = fake.Hang()
            asyncio.run(main())

    def test_connections_are_used_again(self) -> None:
        async def main() -> None:
            async with ModelClient(server.url, limits=Limits(concurrent=8)) as client:
                await asyncio.gather(*(ask(client) for _ in range(100)))

        with fake.FakeServer() as server:
            asyncio.run(main())
            assert len(server.posts) == 100
            assert server.connections <= 8

    def test_waiting_for_a_slot_is_not_held_against_a_call(self) -> None:
        async def main() -> None:
            timing = Timing(attempts=1, attempt_s=3.0, deadline_s=3.0)
            limits = Limits(concurrent=1)
            async with ModelClient(server.url, limits=limits, timing=timing) as client:
                await asyncio.gather(*(ask(client) for _ in range(40)))

        with fake.FakeServer() as server:
            server.latency = 0.1  # 4 s in all
            asyncio.run(main())
            assert len(server.posts) == 40

    def test_waiting_for_the_minute_gives_its_place_back_when_cancelled(self) -> None:
        async def main() -> None:
            async with ModelClient(server.url, limits=Limits(rpm=1)) as client:
                await ask(client)
                waiting = asyncio.ensure_future(ask(client))
                while len(client.gate._booked) < 2:
                    await asyncio.sleep(0.001)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
                assert len(client.gate._booked) == 1

        with fake.FakeServer() as server:
            asyncio.run(main())
            assert len(server.posts) == 1

    def test_each_loop_has_its_own_connections_and_limits_are_common(self) -> None:
        from mintrl_env.loops import sync

        with fake.FakeServer() as server:
            client = ModelClient(server.url)
            sync(ask(client))
            asyncio.run(ask(client))
            sync(ask(client))
            assert server.connections == 2
            assert client.gate.spent.calls == 3
            sync(client.aclose())

    def test_a_closed_client_opens_again(self) -> None:
        async def main() -> None:
            client = ModelClient(server.url)
            await client.aclose()
            await ask(client)
            await client.aclose()
            await ask(client)
            await client.aclose()

        with fake.FakeServer() as server:
            asyncio.run(main())
            assert server.connections == 2

    def test_questions_about_the_server(self) -> None:
        async def main() -> None:
            async with ModelClient(server.url) as client:
                assert (await client.get("models"))["data"][0]["id"] == "toy"
                assert await client.get("/version") == {"version": "0.32.0"}
                with pytest.raises(CallFailed, match=r"GET .*/v1/nothing: HTTP 404"):
                    await client.get("nothing")

        with fake.FakeServer() as server:
            asyncio.run(main())

    def test_texts_that_are_no_unicode_are_sent_all_the_same(self) -> None:
        body = {**BODY, "messages": [{"role": "user", "content": "a\ud800b é"}]}

        async def main() -> None:
            async with ModelClient(server.url) as client:
                await ask(client, body)

        with fake.FakeServer() as server:
            asyncio.run(main())
        assert server.posts[0].body["messages"][0]["content"] == "a?b é"

    @pytest.mark.parametrize(
        "url",
        [
            "localhost:8000",
            "ftp://h/v1",
            "http://",
            "http://h:99999/v1",
            "http://h/v1?k=hidden",
            "http://h/v1#hidden",
            "http://h/v1\n",
            "http://h h/v1",
            "",
        ],
    )
    def test_an_address_that_is_none(self, url: str) -> None:
        with pytest.raises(UsageError, match="looks like") as caught:
            ModelClient(url)
        assert "hidden" not in str(caught.value)

    @pytest.mark.parametrize("url", ["https://me:hidden@h/v1", "http://hidden@h/v1"])
    def test_an_address_with_a_password_is_refused_and_not_shown(self, url: str) -> None:
        with pytest.raises(UsageError, match="holds a name or password") as caught:
            ModelClient(url)
        assert "hidden" not in str(caught.value) and "//***@h/v1" in str(caught.value)

    def test_certificates_are_checked_however_https_is_written(self) -> None:
        import httpx

        made: list[Any] = []

        class Recorded(httpx.AsyncClient):
            def __init__(self, **options: Any) -> None:
                made.append(options["verify"])
                super().__init__(**options)

        async def main(url: str) -> None:
            async with ModelClient(url) as client:
                await client._connections.here()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(httpx, "AsyncClient", Recorded)
            for url in ("https://h/v1", "HTTPS://h/v1", "Https://h/v1", "http://h/v1"):
                asyncio.run(main(url))
        assert made == [True, True, True, False]
        assert ModelClient("HTTPS://h/V1").base_url == "https://h/V1"

    def test_a_proxy_that_makes_no_sense(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HTTP_PROXY", "carrier-pigeon://coop:1")
        with pytest.raises(UsageError, match=r"http://h:1/v1 can be made: .*HTTP_PROXY"):
            asyncio.run(ask(ModelClient("http://h:1/v1")))

    def test_no_proxy_stands_before_a_server_of_this_machine(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
        monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")

        async def main() -> None:
            async with ModelClient(server.url) as client:
                await ask(client)

        with fake.FakeServer() as server:
            asyncio.run(main())
            assert len(server.posts) == 1

    def test_ipv6(self) -> None:
        import socket

        try:
            with socket.socket(socket.AF_INET6) as probe:
                probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6 loopback")

        async def main() -> None:
            async with ModelClient(server.url, timing=Timing(attempts=1)) as client:
                await ask(client)

        with fake.FakeServer(host="::1") as server:
            assert server.url.startswith("http://[::1]:")
            asyncio.run(main())
            assert len(server.posts) == 1

    def test_addresses(self) -> None:
        for base in ("http://h:1/v1", "http://h:1/v1/"):
            client = ModelClient(base)
            assert client.url("chat/completions") == "http://h:1/v1/chat/completions"
            assert client.url("/completion") == "http://h:1/completion"
            assert not client.is_loopback
        assert ModelClient("http://h/beta").url("/x") == "http://h/beta/x"
        assert ModelClient("http://[::1]:8/v1").is_loopback
        for host in ("127.0.0.2", "127.1", "0.0.0.0", "LocalHost.", "a.localhost"):
            assert ModelClient(f"http://{host}/v1").is_loopback, host
        for host in ("[::ffff:127.0.0.1]", "[::]", "[0:0:0:0:0:0:0:1]"):
            assert ModelClient(f"http://{host}/v1").is_loopback, host
        for host in ("127.example.com", "10.0.0.1", "[2001:db8::1]", "localhost.example.com"):
            assert not ModelClient(f"http://{host}/v1").is_loopback, host

    def test_a_limit_on_money_needs_prices(self) -> None:
        with pytest.raises(UsageError, match="prices"):
            ModelClient("http://h/v1", limits=Limits(usd=1.0))

    def test_a_key_with_a_newline_and_keys_in_texts(self) -> None:
        with pytest.raises(UsageError, match="newline") as caught:
            ModelClient("http://h/v1", api_key="secret\n")
        assert "secret" not in str(caught.value)
        assert "secret" not in repr(ModelClient("http://h/v1", api_key="secret"))

    @pytest.mark.parametrize(
        "behaviour",
        [
            lambda key: fake.Status(401, f"Incorrect API key: {key}"),
            lambda key: fake.Status(500, {"headers": {"authorization": f"Bearer {key}"}}),
            lambda key: fake.Json({"headers": {"authorization": f"Bearer {key}"}}),
            lambda key: fake.Json({"error": {"message": f"no such key {key}", "code": 401}}),
            lambda key: fake.Raw(f"<html>{key}".encode()),
            lambda key: fake.Status(429, "x" * 290 + key),  # where the message is cut
        ],
    )
    def test_a_key_that_a_server_repeats_is_in_no_error(
        self, behaviour: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        key, other = "sk-made-up/0123456789", "another-made-up-key"
        caplog.set_level("DEBUG")

        async def main() -> CallFailed:
            timing = Timing(attempts=2, backoff_s=0.01)
            async with ModelClient(
                server.url, api_key=key, headers={"X-Key": other}, timing=timing
            ) as client:
                with pytest.raises(CallFailed) as caught:
                    await ask(client)
                return caught.value

        for shown in (key, other):
            with fake.FakeServer() as server:
                server.default = behaviour(shown)
                error = asyncio.run(main())
            assert server.posts[0].headers["authorization"] == f"Bearer {key}"
            whole = "".join(traceback.format_exception(error)) + caplog.text
            assert shown not in whole and shown[:9] not in whole

    @pytest.mark.parametrize("wrong", [{"attempts": 0}, {"attempt_s": 0}, {"deadline_s": -1}])
    def test_times_that_are_none(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(UsageError, match=next(iter(wrong))):
            Timing(**wrong)

    @pytest.mark.parametrize("package", ["httpx", "tenacity"])
    def test_a_missing_package_names_the_extra(
        self, package: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(MissingExtraError, match=rf"{package}.*mintrl-env\[openai\]"):
            asyncio.run(ask(ModelClient("http://127.0.0.1:9/v1")))

    def test_importing_the_modules_loads_neither_httpx_nor_openai_nor_torch(self) -> None:
        names = "llm_client chat_server policy_server server_probe policy_probe llm_cache".split()
        lines = [f"import mintrl_env.adapters.{name}" for name in names]
        program = "\n".join([*lines, "import sys, json", "print(json.dumps(list(sys.modules)))"])
        run = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        loaded = {name.partition(".")[0] for name in json.loads(run.stdout)}
        assert not loaded & {"httpx", "openai", "tenacity", "torch", "transformers"}


class TestReplies:
    def test_parts_of_a_reply(self) -> None:
        reply = {"a": [{"b": 1, "c": "x", "d": True}]}
        assert member(reply, int, "a", 0, "b") == 1
        assert member(reply, float, "a", 0, "b") == 1
        assert member(reply, str, "a", 0, "c") == "x"
        for path, kind, said in (
            (("a", 1), dict, r"no a\.1"),
            (("x",), int, "no x"),
            (("a", "b"), int, r"no a\.b"),
            (("a", 0, "c"), int, r"a\.0\.c is 'x', not int"),
            (("a", 0, "d"), int, "is True, not int"),
        ):
            with pytest.raises(WrongShape, match=said):
                member(reply, kind, *path)  # type: ignore[arg-type]

    def test_tokens_of_openai_of_llama_and_of_none(self) -> None:
        usage = {"prompt_tokens": 7, "completion_tokens": 3}
        assert tokens_of({"usage": usage}, 99, 99) == (7, 3, 0)
        details = {"prompt_tokens_details": {"cached_tokens": 5}}
        assert tokens_of({"usage": {**usage, **details}}, 99, 99) == (7, 3, 5)
        assert tokens_of({"tokens_evaluated": 4, "tokens_predicted": 2}, 99, 99) == (4, 2, 0)
        for odd in ({}, [], None, {"usage": None}, {"usage": {"prompt_tokens": "7"}}):
            assert tokens_of(odd, 10, 20) == (10, 20, 0)
        assert tokens_of({"usage": {"prompt_tokens": -1, "completion_tokens": True}}, 1, 2)[:2] == (
            1,
            2,
        )

    def test_prices_that_are_none(self) -> None:
        for wrong in ({"prompt": -1.0}, {"prompt": float("nan")}, {"cached": float("inf")}):
            with pytest.raises(UsageError, match="prices"):
                Prices(**{"prompt": 1.0, "completion": 1.0, **wrong})

    def test_what_a_status_says(self) -> None:
        assert refusal(200, {}, {"choices": []}) is None
        assert refusal(200, {}, {"error": None}) is None
        unavailable = refusal(503, {}, "<html>")
        assert unavailable is not None and unavailable.retry and "<html>" in str(unavailable)
        not_there = refusal(404, {}, {"detail": "Not Found"})
        assert not_there is not None and "Not Found; check base_url" in str(not_there)
        long = refusal(500, {}, {"error": {"message": "x" * 5000}})
        assert long is not None and len(str(long)) < 400
