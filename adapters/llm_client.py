"""Calls to a model server: JSON over HTTP, with everything that can go wrong given an outcome.

    slot (back-pressure) -> breaker -> [ minute's limits -> attempt -> settle ] with retries

httpx carries it, not the `openai` package: the same connections serve wire forms which that package
does not know (ids in and out, llama.cpp's), replies are read under a bound and as they are, and
importing it takes seconds. All retries are made here, so that each of them is counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from mintrl_env.adapters.llm_cache import ReplyCache
from mintrl_env.adapters.llm_connections import (
    Connections,
    Local,
    bearer,
    checked_url,
    is_loopback,
)
from mintrl_env.adapters.llm_faults import CallFailed, WrongShape, failure_of, tokens_of
from mintrl_env.adapters.llm_limits import (
    Booking,
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

T = TypeVar("T")
Body = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
_log = logging.getLogger(__name__)
_TIMING, _LIMITS, _BREAKER = Timing(), Limits(), BreakerConfig()


@dataclass(slots=True)
class _Call:
    """One call under way."""

    url: str
    payload: bytes
    prompt_tokens: int
    max_tokens: int
    row: str
    request: str
    seconds: float = 0.0  # of attempts and of waits between them
    used: Usage = field(default_factory=lambda: Usage(calls=0))

    def headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self.row:
            headers["X-Session-Id"] = self.row
        if self.request:
            headers["X-Request-Id"] = f"{self.request}-{self.used.calls}"
        return headers

    async def rest(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.seconds += seconds


class ModelClient:
    """A model server's address, and how it is called.

    May be used from any number of event loops: each gets its own connections, closed with `aclose`,
    or by the loop when `asyncio.run` ends it. Limits, breaker and spending are common to all.

    Args:
        base_url: as OpenAI's clients take it, "http://host:8000/v1".
        api_key: sent as a bearer token; never in an error.
        headers: more of them, for every request.
        timing, limits, prices: see there.
        breaker: None: every call is tried, however many have failed.
        cache: replies to take instead of asking, where a call allows it.
        max_reply_bytes: a longer reply is not read to its end.

    Raises:
        UsageError: an address that is none, a limit on money without prices.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        timing: Timing = _TIMING,
        limits: Limits = _LIMITS,
        prices: Prices | None = None,
        breaker: BreakerConfig | None = _BREAKER,
        cache: ReplyCache | None = None,
        max_reply_bytes: int = 8 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.base_url = checked_url(base_url)
        self.timing, self.prices, self.cache = timing, prices, cache
        self.gate = Gate(limits, clock=clock)
        self.breaker = Breaker(breaker, clock=clock) if breaker is not None else None
        if limits.usd is not None and prices is None:
            raise UsageError("limits.usd needs the server's prices, or nothing would be counted")
        sent = {"Accept": "application/json", **(headers or {}), **bearer(api_key)}
        self._connections = Connections(
            self.base_url,
            sent,
            secrets=[*(headers or {}).values(), *([api_key] if api_key is not None else [])],
            concurrent=limits.concurrent,
            connect_s=timing.connect_s,
            max_reply_bytes=max_reply_bytes,
        )

    def __repr__(self) -> str:
        return f"ModelClient({self.base_url!r})"

    @property
    def is_loopback(self) -> bool:
        """Is the server this machine itself?"""
        return is_loopback(self.base_url)

    def url(self, path: str) -> str:
        """The address of `path`: under `base_url`, or with a leading slash under the server's root
        (`base_url` without its /v1)."""
        root = self.base_url.removesuffix("/v1") if path.startswith("/") else self.base_url
        return f"{root}/{path.lstrip('/')}"

    async def call(
        self,
        path: str,
        body: Body,
        read: Callable[[Any], T],
        *,
        prompt_tokens: int,
        max_tokens: int,
        cached: bool = False,
        row: str = "",
        request: str = "",
    ) -> tuple[T, Usage]:
        """POST a JSON body until there is a reply that `read` can read, or no hope of one.

        Args:
            path: see `url`.
            body: or what makes it once the call's turn has come; a long prompt is better kept as an
                array until then, since thousands of calls may wait.
            read: makes the result of the reply's JSON; raises WrongShape where it can't.
            prompt_tokens, max_tokens: how much will be read and may be written, for the minute's
                limit, and in place of counts that the reply lacks.
            cached: whether a reply from the cache will do.
            row: names what calls belong together, for routers that send those to one replica.
            request: names this call, for the server's log; an attempt's number is added, since a
                server may still be at work on the one before.

        Returns:
            The result, and what all attempts together used.

        Raises:
            CallFailed: no result; with the cause, and what was used all the same.
        """
        key = None
        if cached and self.cache is not None:
            body = body() if callable(body) else body
            key = self.cache.key(path, body)
            stored = self.cache.get(key)
            if stored is not None:
                try:
                    return read(stored), Usage(calls=0)
                except (WrongShape, ArithmeticError, RecursionError) as error:
                    self.cache.reject(key, str(error))
        call = _Call(self.url(path), b"", prompt_tokens, max_tokens, row, request)
        local = await self._connections.here()
        async with local.slots:
            call.payload = _encoded(body() if callable(body) else body)
            with self._breaker():
                reply, result = await self._attempts(local, call, read)
        if key is not None and self.cache is not None:
            try:
                self.cache.put(key, reply)
            except StoreError as error:  # the reply was paid for, and is as good without a copy
                _log.error("%s; a replay will miss it", error)
        return result, call.used

    async def get(self, path: str) -> Any:
        """The JSON at `path`; one attempt, no limits: for questions about the server.

        Raises:
            CallFailed: none, or not in time.
        """
        local = await self._connections.here()
        url = self.url(path)
        try:
            async with asyncio.timeout(min(self.timing.attempt_s, self.timing.deadline_s)):
                return await self._connections.exchange(local, "GET", url)
        except Exception as error:
            raise failure_of(error, f"GET {url}") from error

    async def aclose(self) -> None:
        """Close the running loop's connections; another call opens new ones."""
        await self._connections.aclose()

    async def __aenter__(self) -> ModelClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    # -- one call --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _breaker(self) -> Any:
        if self.breaker is None:
            yield
            return
        try:
            probe = self.breaker.admit()
        except BreakerOpen as error:
            raise CallFailed(error.cause, str(error), retry=False) from error
        failure, tells = None, False
        try:
            yield
            tells = True
        except CallFailed as error:
            failure, tells = error.cause, error.tells
            raise
        finally:
            self.breaker.ended(failure, probe=probe, tells=tells)

    async def _attempts(self, local: Local, call: _Call, read: Callable[[Any], T]) -> tuple[Any, T]:
        tenacity = _tenacity()
        timing = self.timing
        jitter = tenacity.wait_random_exponential(
            multiplier=timing.backoff_s, max=timing.max_backoff_s
        )

        def wait(state: Any) -> float:
            failure = state.outcome.exception() if state.outcome is not None else None
            asked = failure.retry_after if isinstance(failure, CallFailed) else None
            if asked is None:
                return float(jitter(state))
            return asked * random.uniform(1.0, 1.1)  # not all at the same moment

        def stop(state: Any) -> bool:
            return call.seconds + state.upcoming_sleep >= timing.deadline_s

        def note(state: Any) -> None:
            failure = state.outcome.exception() if state.outcome is not None else None
            _log.info("again in %.1f s: %s", state.upcoming_sleep, failure)

        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(lambda e: isinstance(e, CallFailed) and e.retry),
            stop=tenacity.stop_any(tenacity.stop_after_attempt(timing.attempts), stop),
            wait=wait,
            sleep=call.rest,
            before_sleep=note,
            reraise=True,
        )
        try:
            found: tuple[Any, T] = await retrying(self._attempt, local, call, read)
            return found
        except CallFailed as error:
            error.usage = replace(call.used, seconds=call.seconds)
            raise
        finally:
            call.used = replace(call.used, seconds=call.seconds)

    async def _attempt(self, local: Local, call: _Call, read: Callable[[Any], T]) -> tuple[Any, T]:
        booking = await self._booked(call)
        used = Usage(calls=1)
        started = time.monotonic()
        try:
            left = max(self.timing.deadline_s - call.seconds, 0.001)
            async with asyncio.timeout(min(self.timing.attempt_s, left)):
                reply = await self._connections.exchange(
                    local, "POST", call.url, call.payload, call.headers()
                )
            used = self._usage(reply, 0, 0)  # what is known
            try:
                result = read(reply)
                used = self._usage(reply, call.prompt_tokens, call.max_tokens)
                return reply, result
            # Numbers beyond float, lists in lists without end: no shape of ours either.
            except (WrongShape, ArithmeticError, RecursionError) as error:
                message = f"the reply is not of the expected shape: {error}"
                raise CallFailed(JudgeCause.SERVER, message, retry=True) from error
        except Exception as error:
            failure = failure_of(error, f"POST {call.url}")
            if failure.retry_after is not None and failure.retry_after < self.timing.deadline_s:
                self.gate.pause(failure.retry_after)
            raise failure from error
        finally:
            call.seconds += time.monotonic() - started
            call.used = call.used + used
            self.gate.settle(booking, used)

    async def _booked(self, call: _Call) -> Booking:
        try:
            booking, wait = self.gate.book(call.prompt_tokens + call.max_tokens)
            if wait > 0:
                try:
                    self._refuse_long_rest(call, rest := min(wait, self.gate.rest_s()))
                    await asyncio.sleep(wait)
                    call.seconds += rest
                    self.gate.check_budget()
                except BaseException:
                    self.gate.cancel(booking)
                    raise
            return booking
        except OverBudget as error:
            raise CallFailed(JudgeCause.BUDGET, f"not called: {error}", retry=False) from error

    def _refuse_long_rest(self, call: _Call, rest: float) -> None:
        """A rest that the server asked of another call counts towards this one's deadline."""
        if rest > 0 and call.seconds + rest >= self.timing.deadline_s:
            message = f"POST {call.url}: the server asked for {rest:.0f} s more without a request"
            raise CallFailed(JudgeCause.RATE_LIMIT, message, retry=False)

    def _usage(self, reply: Any, prompt_tokens: int, max_tokens: int) -> Usage:
        read, written, cached = tokens_of(reply, prompt_tokens, max_tokens)
        usd = self.prices.usd(read, written, cached) if self.prices is not None else 0.0
        return Usage(prompt_tokens=read, completion_tokens=written, usd=usd, calls=1)


def _encoded(body: Mapping[str, Any]) -> bytes:
    text = json.dumps(body, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "replace")  # lone surrogates are no UTF-8


def _tenacity() -> Any:
    try:
        import tenacity
    except ImportError as error:
        raise MissingExtraError("tenacity", "openai", "calling a model server") from error
    return tenacity
