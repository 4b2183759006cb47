"""A bound on calls in flight that can be closed for a while, as for new weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turnstile:
    """At most so many inside at once, and nobody while it is closed. It belongs to one event loop.

        async with turnstile:                 # a call
            ...
        async with turnstile.closed():        # begins once everybody has left
            ...

    Args:
        most: how many may be inside.
    """

    def __init__(self, most: int) -> None:
        self._places = asyncio.Semaphore(most)
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._empty.set()
        self._one_closer = asyncio.Lock()
        self.inside = 0

    async def __aenter__(self) -> None:
        await self._places.acquire()
        try:
            while not self._open.is_set():
                await self._open.wait()
        except BaseException:
            self._places.release()
            raise
        self.inside += 1
        self._empty.clear()

    async def __aexit__(self, *exc: object) -> None:
        self.inside -= 1
        self._places.release()
        if not self.inside:
            self._empty.set()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Let nobody in, wait until nobody is inside, and open again at the end."""
        async with self._one_closer:
            self._open.clear()
            try:
                await self._empty.wait()
                yield
            finally:
                self._open.set()
