"""The pump: engines run in the thread that owns the model, everything else on an event loop.

Grad mode, autocast and collectives belong to a thread, so forwards run where the trainer runs,
while episodes, judges and verifiers live on the loop of a `LoopThread`. A request travels through
the engine's `Inbox`; its result goes back with `call_soon_threadsafe`. There is no batching window:
what has arrived when an engine has its turn is in the next forward.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol, TypeVar

from mintrl_env.errors import PolicyError, UsageError

T = TypeVar("T")
_GRACE_S = 10.0
_STALL_S = 60.0
_log = logging.getLogger(__name__)


class Request:
    """One question to an engine: where its answer goes, and whether anybody still waits for it."""

    __slots__ = ("cancelled", "future", "loop")

    def __init__(self) -> None:
        self.cancelled = False
        self.loop: asyncio.AbstractEventLoop
        self.future: asyncio.Future[Any]


class Inbox:
    """Requests on their way from any event loop to the thread that pumps."""

    def __init__(self) -> None:
        self._items: deque[Request | None] = deque()
        self.wake = threading.Event()  # the pump puts the event here that it waits on

    async def ask(self, request: Request) -> Any:
        """Send a request and wait for its answer; raises what the engine failed it with."""
        request.loop = asyncio.get_running_loop()
        request.future = request.loop.create_future()
        self._put(request)
        try:
            return await request.future
        except asyncio.CancelledError:
            request.cancelled = True
            self._put(None)  # something was cancelled: look for it
            raise

    def _put(self, item: Request | None) -> None:
        self._items.append(item)
        self.wake.set()

    def drain(self) -> tuple[list[Any], bool]:
        """The requests that have arrived, and whether any request was cancelled since last time."""
        arrived: list[Any] = []
        any_cancelled = False
        while self._items:
            item = self._items.popleft()
            if item is None:
                any_cancelled = True
            else:
                arrived.append(item)
        return arrived, any_cancelled

    def __len__(self) -> int:
        return len(self._items)


def deliver(
    answers: Iterable[tuple[Request, Any]],
) -> set[asyncio.AbstractEventLoop]:
    """Hand answers to the loops that wait for them; an exception as answer is raised there.

    Returns:
        the loops.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Request, Any]]] = {}
    for request, answer in answers:
        by_loop.setdefault(request.loop, []).append((request, answer))
    for loop, batch in by_loop.items():
        # A closed loop has nobody left on it who could wait.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_set_answers, batch)
    return set(by_loop)


def _set_answers(batch: list[tuple[Request, Any]]) -> None:
    for request, answer in batch:
        if request.future.done():
            continue
        if isinstance(answer, BaseException):
            request.future.set_exception(answer)
        else:
            request.future.set_result(answer)


class Rounds:
    """Makes batches a function of the episodes alone, whatever anybody's latency is.

    The rule: no request is begun before every live episode has one open, in whichever engine that
    shares this object; then all open requests run to their end, admitted in the order of their row
    keys, and requests that arrive meanwhile wait for the next round. So a round waits for the
    slowest judge or verifier: this is for tests, resume and bit-exact runs on CPU, not for speed.

    Whoever runs the episodes keeps `live` at the number of episodes that run: each of them will ask
    something more, or end and lower it (so none may wait for another to end, at a semaphore for
    instance). Several requests of one row (a judge that scores candidates at once) count once and
    should be sent together, in one `gather`.
    """

    def __init__(self) -> None:
        self._live = 0
        self._inboxes: list[Inbox] = []

    @property
    def live(self) -> int:
        return self._live

    @live.setter
    def live(self, count: int) -> None:
        self._live = count
        for inbox in self._inboxes:
            inbox.wake.set()

    def join(self, inbox: Inbox) -> None:
        self._inboxes.append(inbox)

    def advance(self, engines: Sequence[Pumped]) -> None:
        """Begin the next round if the last has ended and every live episode waits for an answer."""
        if any(engine.in_round for engine in engines) or not self._complete(engines):
            return
        # A loop may be half-way through sending several requests of one row, or through putting a
        # new episode in the place of an ended one: let every loop finish what it was at, and look
        # again. Two passes, for a task that was itself just started.
        loops = {request.loop for engine in engines for request in engine.held}
        for _ in range(2):
            for loop in loops:
                pass_through(loop)
        if self._complete(engines):
            for engine in engines:
                engine.begin_round()

    def report_stall(self, engines: Sequence[Pumped]) -> None:
        """Say what a round is waiting for; a rule that nobody keeps would look like a hang."""
        waiting = len({request.row for engine in engines for request in engine.held})
        if waiting and not any(engine.in_round for engine in engines):
            _log.warning(
                "rounds: %d of %d live episodes have a request open, and nothing has happened for "
                "%d s. A slow judge or verifier, or something that lets fewer run at once?",
                waiting,
                self._live,
                _STALL_S,
            )

    def _complete(self, engines: Sequence[Pumped]) -> bool:
        for engine in engines:
            engine.drain()
        rows = {request.row for engine in engines for request in engine.held}
        return len(rows) >= max(self._live, 1)


def pass_through(loop: asyncio.AbstractEventLoop) -> None:
    """Wait until a loop has run every callback that was ready before now."""
    passed = threading.Event()
    try:
        loop.call_soon_threadsafe(passed.set)
    except RuntimeError:  # closed
        return
    passed.wait(_GRACE_S)


class Returns:
    """Whether it pays to wait until the loops have dealt with the answers that they were given.

    A row whose review is instant asks for more as soon as its loop has run; one whose judge takes
    seconds does not, and waiting for it would only cost time. So every wait in vain doubles the
    number of deliveries that are not waited for.
    """

    def __init__(self, longest: int = 256) -> None:
        self._loops: set[asyncio.AbstractEventLoop] = set()
        self._longest = longest
        self._pause = self._skipped = 0

    def expect(self, loops: set[asyncio.AbstractEventLoop]) -> None:
        """Answers went to these loops."""
        self._loops |= loops

    def wait(self) -> bool:
        """Wait, if answers are out and it is worth while; True where it did."""
        if not self._loops:
            return False
        loops, self._loops = self._loops, set()
        if self._skipped < self._pause:
            self._skipped += 1
            return False
        for _ in range(2):  # the answers' own callbacks, then the tasks that they woke
            for loop in loops:
                pass_through(loop)
        return True

    def learn(self, came: bool) -> None:
        """Say whether anybody came back."""
        self._skipped = 0
        self._pause = 0 if came else min(max(1, 2 * self._pause), self._longest)


class Pumped(Protocol):
    """What the pump needs of an engine; `SlotEngine` is one."""

    rounds: Rounds | None

    def pumping(self, wake: threading.Event) -> AbstractContextManager[None]:
        """Everything that has to hold while the engine is pumped (eval mode, fresh KV)."""
        ...

    def turn(self, forwards: int) -> bool:
        """Drain, admit, run up to `forwards` forwards, deliver; False when there was nothing.

        May end before as many: when somebody has an answer, or something has arrived.
        """
        ...

    def drain(self) -> None: ...

    @property
    def held(self) -> Iterable[Any]:
        """Requests that wait for the next round."""
        ...

    @property
    def in_round(self) -> bool:
        """Whether requests of the round in progress are left."""
        ...

    def begin_round(self) -> None: ...


def run_pump(
    engines: Sequence[Pumped], until: concurrent.futures.Future[Any], *, forwards: int = 8
) -> None:
    """Serve engines in the calling thread until a future is done.

    Args:
        engines: served in turn; their models belong to this thread while the pump runs.
        until: whose end ends the pump; its result is the caller's business. Requests that are still
            open then fail with PolicyError, since nobody will serve them.
        forwards: the most forwards of one engine before the next has its turn and new requests are
            looked at.

    Raises:
        UsageError: an engine is already being pumped.
        Whatever interrupts the thread (KeyboardInterrupt), after all open requests were failed. An
        exception inside a forward does not end the pump: it goes to that forward's requests.
    """
    wake = threading.Event()
    until.add_done_callback(lambda _: wake.set())
    shared = {id(e.rounds): e.rounds for e in engines if e.rounds is not None}
    with ExitStack() as stack:
        for engine in engines:
            stack.enter_context(engine.pumping(wake))
        while not until.done():
            # Cleared before looking, so that whatever arrives while we look ends the wait.
            wake.clear()
            for rounds in shared.values():
                rounds.advance([e for e in engines if e.rounds is rounds])
            busy = [engine.turn(forwards) for engine in engines]
            if any(busy) or until.done():
                continue
            if not wake.wait(_STALL_S if shared else None):
                for rounds in shared.values():
                    rounds.report_stall([e for e in engines if e.rounds is rounds])


class LoopThread:
    """An asyncio event loop on a daemon thread of its own; one per run, used again and again."""

    def __init__(self, name: str = "mintrl-loop") -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    @property
    def is_alive(self) -> bool:
        """Whether somebody runs the loop: not after `close`, and not in a forked child."""
        return self._thread.is_alive() and not self._loop.is_closed()

    def submit(self, factory: Callable[[], Coroutine[Any, Any, T]]) -> concurrent.futures.Future[T]:
        """Start `factory()` on the loop.

        Raises:
            UsageError: nobody runs the loop (any more).
        """
        if not self.is_alive:
            raise UsageError(
                "this LoopThread is closed, or was left behind by a fork; make a new one"
            )

        async def start() -> T:
            return await factory()

        return asyncio.run_coroutine_threadsafe(start(), self._loop)

    def cancel_all(self, grace_s: float = _GRACE_S) -> None:
        """Cancel every task on the loop; wait, at most `grace_s` seconds, until they have ended."""

        async def cancel() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=grace_s)

        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(cancel(), self._loop).result(grace_s + 1.0)

    def close(self) -> None:
        """Cancel what still runs, stop the loop and end the thread. Closing twice is harmless."""
        if not self.is_alive:  # the loop of a forked child's parent is not the child's to close
            return
        self.cancel_all()
        # What async clients keep open ends with them, and writers end what they write.
        for end in (self._loop.shutdown_asyncgens, self._loop.shutdown_default_executor):
            with contextlib.suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(end(), self._loop).result(_GRACE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_GRACE_S)
        if not self._thread.is_alive():
            self._loop.close()

    def __enter__(self) -> LoopThread:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def run_with_pump(
    engines: Sequence[Pumped],
    factory: Callable[[], Coroutine[Any, Any, T]],
    *,
    loop: LoopThread | None = None,
    forwards: int = 8,
) -> T:
    """Run a coroutine on a loop thread while the calling thread serves its engines.

    Args:
        engines: see `run_pump`.
        factory: called on the loop's thread; makes the coroutine to run.
        loop: the run's loop thread; None makes one for this call and closes it after.

    Returns:
        What the coroutine returned.

    Raises:
        Whatever the coroutine raised. An interrupt of this thread (Ctrl-C) cancels the coroutine,
        gives it a few seconds to clean up, and is raised again.
    """
    with _loop_for(loop) as thread:
        future = thread.submit(factory)
        try:
            run_pump(engines, future, forwards=forwards)
        except BaseException:
            if not future.done():
                thread.cancel_all()
            raise
        return future.result()


@contextlib.contextmanager
def _loop_for(loop: LoopThread | None) -> Iterator[LoopThread]:
    if loop is not None:
        yield loop
        return
    with LoopThread() as own:
        yield own


def unserved(engine: str) -> PolicyError:
    """The error of requests that are open when their engine's pump ends."""
    return PolicyError(
        f"the pump of {engine} ended while this request was open; start another with run_pump"
    )
