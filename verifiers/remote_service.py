"""A remote service behind plain blocking calls: bounded, patient, and closed at the end.

Threads hand in jobs; the service's coroutines run on the process's background loop, so that its
connections are reused whatever thread asks. A failure that may pass is tried again, with jitter
and within a deadline; the rest is SandboxUnavailable at once.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib.util
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Protocol, TypeVar

from mintrl_env.errors import ConfigError, MissingExtraError, UsageError
from mintrl_env.loops import sync
from mintrl_env.verifiers.sandbox import SandboxUnavailable

T = TypeVar("T")
_CLOSE_S = 15.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a service that fails is given.

    Attributes:
        deadline_s: seconds from a request's first try until SandboxUnavailable, on top of what the
            code itself may take. Waiting here for a free place is not counted: who holds one is
            bounded by the same deadline.
        answer_s: seconds of one try, likewise on top.
        tries: the most times that one request is sent.
        first_wait_s: the wait before the second try; it doubles from try to try, half of it at
            random. A service's Retry-After is obeyed where it is longer; one that reaches past the
            deadline ends the tries.
        longest_wait_s: its limit.
    """

    deadline_s: float = 180.0
    answer_s: float = 60.0
    tries: int = 5
    first_wait_s: float = 0.5
    longest_wait_s: float = 20.0

    def __post_init__(self) -> None:
        for name in ("deadline_s", "answer_s", "tries", "first_wait_s", "longest_wait_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"{name} must be a number > 0, not {value!r}")


def patience_of(given: Patience | Mapping[str, float] | None) -> Patience:
    """Patience from what a configuration holds.

    Raises:
        ConfigError: an unknown field, or a number that is not positive.
    """
    if given is None or isinstance(given, Patience):
        return given or Patience()
    try:
        return Patience(**given)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"patience: {error}; its fields: {', '.join(Patience.__slots__)}"
        ) from None


@dataclass(frozen=True, slots=True)
class Job:
    """One script for the service.

    Attributes:
        script: Python source that keeps to its own limits and writes its report, bytes, to the file
            `report` in its working directory.
        report: a name that the script's programs cannot guess.
        seconds: the most that the script may take.
    """

    script: str
    report: str
    seconds: float


class Passing(Exception):
    """A failure that another try may not see; `retry_after_s` is what the service asked for."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Service(Protocol):
    """One remote service; made and used on the background loop alone."""

    name: str

    async def execute(self, job: Job) -> bytes:
        """Run a script once and return its report.

        Raises:
            Passing: worth another try.
            SandboxUnavailable: not worth one (no access, no quota, a request that it refuses).
        """
        ...

    async def aclose(self) -> None:
        """End what is left at the service."""
        ...


def require(package: str, extra: str, why: str) -> None:
    """Raise MissingExtraError where a package is not installed, without importing it."""
    if importlib.util.find_spec(package) is None:
        raise MissingExtraError(package, extra, why)


def retry_after(value: str | None) -> float | None:
    """Seconds of a Retry-After header: a number, or a date of HTTP; None: absent or unreadable."""
    if not value:
        return None
    with contextlib.suppress(ValueError):
        seconds = float(value)
        return seconds if 0 <= seconds < float("inf") else None
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    return None


async def patiently(
    once: Callable[[], Awaitable[T]], patience: Patience, seconds: float, name: str
) -> T:
    """Try until it works, within the deadline.

    Args:
        once: one try; raises Passing where another is worth it.
        seconds: what the script itself may take.
        name: the service's, for the message.

    Raises:
        SandboxUnavailable: names the last failure and what to do.
    """
    import tenacity

    def wait(state: tenacity.RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        asked = error.retry_after_s if isinstance(error, Passing) else None
        own = min(patience.longest_wait_s, patience.first_wait_s * 2.0 ** (tries - 1))
        jitter: float = tenacity.wait_random(0, own / 2)(state)
        return max(own / 2, asked or 0.0) + jitter

    tries = 0
    last: Passing | None = None

    async def attempt() -> T:
        nonlocal last, tries
        tries += 1
        try:
            async with asyncio.timeout(seconds + patience.answer_s) as limit:
                return await once()
        except Passing as error:
            last = error
            raise
        except TimeoutError:
            if not limit.expired():
                raise  # the deadline over everything
            last = Passing(f"no answer within {seconds + patience.answer_s:g} s")
            raise last from None

    whole = patience.deadline_s + seconds
    retrying = tenacity.AsyncRetrying(
        stop=tenacity.stop_after_attempt(int(patience.tries)) | tenacity.stop_before_delay(whole),
        wait=wait,
        retry=tenacity.retry_if_exception_type(Passing),
        reraise=True,
    )
    try:
        async with asyncio.timeout(whole):
            return await retrying(attempt)
    except Passing as error:
        why = str(error)
        if error.retry_after_s is not None:
            why += f" (asks for a wait of {error.retry_after_s:g} s)"
    except TimeoutError:
        why = f"no answer within {whole:g} s" + (f"; before that: {last}" if last else "")
    raise SandboxUnavailable(
        f"{name} could not run a test, after {tries} {'try' if tries == 1 else 'tries'}: {why}. "
        "Look at the state of the service, or give it more time (Patience)"
    ) from last


class Client:
    """Blocking access to a service from any number of threads.

    Args:
        make: makes the service; called on the background loop, when it is first needed.
        concurrency: the most jobs at once; further ones wait for their turn.
        patience: how long failures are borne.
    """

    def __init__(
        self, make: Callable[[], Service], *, concurrency: int, patience: Patience
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {concurrency}")
        self._make, self._concurrency, self.patience = make, concurrency, patience
        self._closed = False
        self._inherited: list[Any] = []
        self._reset()

    def _reset(self) -> None:
        self._service: Service | None = None
        self._gate: asyncio.Semaphore | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    def execute(self, job: Job, read: Callable[[bytes], T]) -> T:
        """Run a script at the service and read its report; blocks the calling thread only.

        Args:
            read: makes something of the report, in a thread; raises Passing where the report is
                none, so that the script is run again.

        Raises:
            SandboxUnavailable: the service failed for good, or this client is closed.
        """
        return sync(self._execute(job, read))

    async def _execute(self, job: Job, read: Callable[[bytes], T]) -> T:
        if self._closed:
            raise SandboxUnavailable("the remote sandbox is closed; make a new one")
        if self._service is None or self._gate is None:
            self._service, self._gate = self._make(), asyncio.Semaphore(self._concurrency)
            _open.add(self)
        service = self._service
        task = asyncio.current_task()
        assert task is not None

        async def once() -> T:
            return await asyncio.to_thread(read, await service.execute(job))

        self._tasks.add(task)
        try:
            async with self._gate:
                return await patiently(once, self.patience, job.seconds, service.name)
        except asyncio.CancelledError:
            if self._closed:
                raise SandboxUnavailable(
                    f"the sandbox at {service.name} was closed while a test ran"
                ) from None
            raise
        finally:
            self._tasks.discard(task)

    def close(self) -> None:
        """End open requests and what is left at the service. Closing twice is harmless."""
        self._closed = True
        _open.discard(self)
        if self._service is None:
            return
        closing = self._aclose()
        try:
            sync(closing)
        except UsageError:  # called on the background loop, which cannot wait for itself
            task = asyncio.get_running_loop().create_task(self._aclose())
            self._tasks.add(task)
        except Exception as error:
            _log.warning("closing a remote sandbox failed: %s", error)

    async def _aclose(self) -> None:
        service, self._service = self._service, None
        if service is None:
            return
        tasks = self._tasks - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        async with asyncio.timeout(_CLOSE_S):
            await asyncio.gather(*tasks, return_exceptions=True)
            await service.aclose()

    def _forget_parent(self) -> None:
        # What the parent made is kept, unused: ending it here would close the parent's connections.
        self._inherited += [self._service, self._gate, self._tasks]
        self._reset()


_open: set[Client] = set()
"""Those with something at a service: held here, since it costs until it is ended."""


def _close_all() -> None:
    for client in list(_open):
        client.close()


def _after_fork_in_child() -> None:
    for client in list(_open):
        client._forget_parent()
    _open.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
