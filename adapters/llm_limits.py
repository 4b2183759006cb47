"""What calls to a model server may use: time, requests and tokens a minute, tokens and money in all.

Nothing here waits or talks to a server. `Gate.book` says how long to wait, `Breaker.admit` whether
to try at all; clocks are injected. Both may be used from several threads and event loops.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields

from mintrl_env.errors import JudgeCause, UsageError
from mintrl_env.types import Usage

WINDOW_S = 60.0
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars for a million tokens.

    Attributes:
        prompt, completion: tokens read and written.
        cached: tokens read from the server's cache; None: as `prompt`.
    """

    prompt: float
    completion: float
    cached: float | None = None

    def __post_init__(self) -> None:
        for name in ("prompt", "completion", "cached"):
            price = getattr(self, name)
            if price is not None and not 0 <= price < math.inf:
                raise UsageError(f"prices.{name} is a number >= 0, not {price!r}")

    def usd(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0) -> float:
        """What a call cost; `cached_tokens` are a part of `prompt_tokens`."""
        cached = min(cached_tokens, prompt_tokens)
        rate = self.prompt if self.cached is None else self.cached
        read = (prompt_tokens - cached) * self.prompt + cached * rate
        return (read + completion_tokens * self.completion) / 1e6


@dataclass(frozen=True, slots=True)
class Limits:
    """What calls may use. None: no limit.

    Attributes:
        concurrent: calls in flight on one event loop.
        rpm: requests begun in any 60 seconds.
        tpm: tokens, read and written, of the requests begun in any 60 seconds.
        tokens: read and written in all.
        usd: spent in all; needs the prices.
    """

    concurrent: int = 64
    rpm: int | None = None
    tpm: int | None = None
    tokens: int | None = None
    usd: float | None = None

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if value is None and name != "concurrent":
                continue
            number = isinstance(value, (int, float) if name == "usd" else int)
            if isinstance(value, bool) or not number or not value > 0:
                raise UsageError(f"limits.{name} is a number > 0 or null, not {value!r}")


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a call may take, and how often it is tried.

    Attributes:
        attempts: the most requests of one call.
        attempt_s: of one request, from connecting to the last byte.
        deadline_s: of all of them with the waits between them; not the wait for a slot or for the
            minute's limits, which no server is to blame for.
        connect_s: of connecting alone.
        backoff_s, max_backoff_s: the wait before retry n = 1, 2 ... is drawn from 0 to the
            lesser of backoff_s * 2^(n-1) and max_backoff_s.
    """

    attempts: int = 6
    attempt_s: float = 120.0
    deadline_s: float = 300.0
    connect_s: float = 10.0
    backoff_s: float = 0.5
    max_backoff_s: float = 30.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise UsageError(f"attempts must be >= 1, not {self.attempts}")
        for name in ("attempt_s", "deadline_s", "connect_s", "backoff_s", "max_backoff_s"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be positive, not {getattr(self, name)!r}")


class OverBudget(Exception):
    """The tokens or the money of `Limits` are used up."""


@dataclass(slots=True, eq=False)
class Booking:
    """A request's place in the minute: when it may begin, and the tokens it is thought to use."""

    at: float
    tokens: int


class Gate:
    """Spreads requests over the minute and keeps count of tokens and money.

    Each request books the earliest time at which any 60 seconds hold no more than the limits, in the
    order of asking: nobody is overtaken, nobody polls. Its tokens are an estimate until `settle`.
    Budgets are looked at when a request begins, so that they are overrun by what was in flight then.

    Args:
        limits: see `Limits`.
        clock: seconds, monotonic.
    """

    def __init__(self, limits: Limits, *, clock: Clock = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._lock = threading.Lock()
        self._booked: deque[Booking] = deque()  # in the order of their times
        self._paused_until = -math.inf
        self._spent = Usage(calls=0)

    @property
    def spent(self) -> Usage:
        """Everything so far, failed attempts included."""
        return self._spent

    def book(self, tokens: int) -> tuple[Booking, float]:
        """A place for a request of about `tokens`, and the seconds to wait for it.

        Raises:
            OverBudget: nothing is left; no request may begin any more.
        """
        with self._lock:
            self._refuse_over_budget()
            now = self._clock()
            while self._booked and self._booked[0].at <= now - WINDOW_S:
                self._booked.popleft()
            last = self._booked[-1].at if self._booked else now
            # A request of more than a minute's tokens fits where there is nothing else.
            booking = Booking(max(now, self._paused_until, last), min(tokens, self._most_tokens()))
            self._move_to_free(booking)
            if self.limits.rpm is not None or self.limits.tpm is not None:
                self._booked.append(booking)
            return booking, booking.at - now

    def settle(self, booking: Booking, used: Usage) -> None:
        """An attempt of `booking` has ended and used this; no tokens: unknown, the estimate stays."""
        with self._lock:
            tokens = used.prompt_tokens + used.completion_tokens
            if tokens:
                booking.tokens = min(tokens, self._most_tokens())
            self._spent = self._spent + used

    def cancel(self, booking: Booking) -> None:
        """The request of `booking` never began."""
        with self._lock:
            if booking in self._booked:
                self._booked.remove(booking)

    def pause(self, seconds: float) -> None:
        """The server asks for a rest: what books from now on does not begin before its end."""
        with self._lock:
            self._paused_until = max(self._paused_until, self._clock() + seconds)

    def rest_s(self) -> float:
        """How long the rest that the server asked for goes on, seconds."""
        with self._lock:
            return max(self._paused_until - self._clock(), 0.0)

    def _most_tokens(self) -> int:
        return self.limits.tpm if self.limits.tpm is not None else sys.maxsize

    def check_budget(self) -> None:
        """Raise OverBudget where nothing is left."""
        with self._lock:
            self._refuse_over_budget()

    def _refuse_over_budget(self) -> None:
        limits, spent = self.limits, self._spent
        tokens = spent.prompt_tokens + spent.completion_tokens
        if limits.tokens is not None and tokens >= limits.tokens:
            raise OverBudget(f"{tokens} tokens are used, limits.tokens is {limits.tokens}")
        if limits.usd is not None and spent.usd >= limits.usd:
            raise OverBudget(f"{spent.usd:.4f} USD are spent, limits.usd is {limits.usd:g}")

    def _move_to_free(self, new: Booking) -> None:
        """Move `new`, the last of all, to the earliest time that the limits allow."""
        most_requests = self.limits.rpm if self.limits.rpm is not None else sys.maxsize
        most_tokens = self._most_tokens()
        requests = len(self._booked)
        tokens = sum(booking.tokens for booking in self._booked)
        for oldest in self._booked:  # they leave the window one by one as `new` moves on
            fits = requests + 1 <= most_requests and tokens + new.tokens <= most_tokens
            if oldest.at > new.at - WINDOW_S:
                if fits:
                    return
                new.at = oldest.at + WINDOW_S
            requests -= 1
            tokens -= oldest.tokens


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    """When to stop calling a server that fails.

    Attributes:
        rate: the share of failed calls above which the breaker opens.
        least: the fewest calls in the window that are judged by.
        window_s: the calls of how many seconds are looked at.
        cool_down_s: how long calls fail at once; then one is tried.
    """

    rate: float = 0.5
    least: int = 20
    window_s: float = 60.0
    cool_down_s: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1 or self.least < 1:
            raise UsageError("a breaker's rate is a share between 0 and 1, its least is >= 1")
        if not (self.window_s > 0 and self.cool_down_s > 0):
            raise UsageError("a breaker's window_s and cool_down_s are positive")


class BreakerOpen(Exception):
    """The server failed too often; `cause` is that of the last failure."""

    def __init__(self, cause: JudgeCause, message: str) -> None:
        self.cause = cause
        super().__init__(message)


class Breaker:
    """Calls (retries done) fail at once for a while after too many have failed; then one is tried.

    closed --failure rate above `rate`--> open --cool-down--> one probe --> closed, or open again
    """

    def __init__(self, config: BreakerConfig, *, clock: Clock = time.monotonic) -> None:
        self._config = config
        self._clock = clock
        self._lock = threading.Lock()
        self._calls: deque[tuple[float, bool]] = deque()
        self._failed = 0
        self._open_until: float | None = None
        self._probing = False
        self._cause = JudgeCause.SERVER

    @property
    def is_open(self) -> bool:
        return self._open_until is not None

    def admit(self) -> bool:
        """May a call begin? Its end is told to `ended`, with the answer: is it the probe?

        Raises:
            BreakerOpen: not now.
        """
        with self._lock:
            if self._open_until is None:
                return False
            left = self._open_until - self._clock()
            if left <= 0 and not self._probing:
                self._probing = True
                return True
            when = f"the next try is in {left:.0f} s" if left > 0 else "one call is trying it now"
            raise BreakerOpen(
                self._cause,
                f"not called, since more than {self._config.rate:.0%} of the calls of the last "
                f"{self._config.window_s:g} s failed, the last of them by {self._cause}; {when}",
            )

    def ended(self, failure: JudgeCause | None, *, probe: bool, tells: bool = True) -> None:
        """A call that was let in has ended.

        Args:
            failure: its cause, or None: it went well.
            probe: what `admit` answered.
            tells: False where the end says nothing of the server (cancelled, refused request).
        """
        with self._lock:
            if probe:
                self._probing = False
            if not tells:
                return
            if failure is None:
                self._open_until = None  # also by a call that began before the breaker opened
                self._add(False)
                return
            self._cause = failure
            if self._open_until is None:
                self._add(True)
                count = len(self._calls)
                if count >= self._config.least and self._failed > self._config.rate * count:
                    self._open()
            elif probe:
                self._open()

    def _add(self, failed: bool) -> None:
        now = self._clock()
        self._calls.append((now, failed))
        self._failed += failed
        while self._calls[0][0] <= now - self._config.window_s:
            self._failed -= self._calls.popleft()[1]

    def _open(self) -> None:
        self._open_until = self._clock() + self._config.cool_down_s
        self._calls.clear()
        self._failed = 0
