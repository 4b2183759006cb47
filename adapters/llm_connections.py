"""Connections to a model server: a pool for each event loop, and one exchange over it."""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mintrl_env.adapters.llm_faults import CallFailed, refusal
from mintrl_env.errors import JudgeCause, MissingExtraError, UsageError

if TYPE_CHECKING:
    import httpx

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_KEEPALIVE_S = 4.0  # uvicorn, and so vLLM, closes an idle connection after 5


@dataclass(slots=True)
class Local:
    """What belongs to one event loop: its connections, and slots that bound their use."""

    client: httpx.AsyncClient
    slots: asyncio.Semaphore
    keeper: AsyncGenerator[None, None]


class Connections:
    """Connections to one server, kept open between requests.

    Args:
        base_url: decides on proxies and certificates.
        headers: of every request.
        concurrent: the most connections of one event loop.
        connect_s: seconds for opening one.
        max_reply_bytes: a longer reply is not read to its end.
    """

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str],
        *,
        concurrent: int,
        connect_s: float,
        max_reply_bytes: int,
    ) -> None:
        self._base_url, self._headers = base_url, headers
        self._concurrent, self._connect_s = concurrent, connect_s
        self._max_reply_bytes = max_reply_bytes
        self._lock = threading.Lock()
        self._locals: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Local] = (
            weakref.WeakKeyDictionary()
        )

    async def here(self) -> Local:
        """The running loop's part, made when it is first asked for."""
        loop = asyncio.get_running_loop()
        with self._lock:
            local = self._locals.get(loop)
        if local is not None:
            return local
        httpx = _httpx()
        client = httpx.AsyncClient(
            headers={**self._headers, "Accept-Encoding": "identity"},  # no bomb behind the bound
            timeout=httpx.Timeout(None, connect=self._connect_s),
            limits=httpx.Limits(
                max_connections=self._concurrent,
                max_keepalive_connections=self._concurrent,
                keepalive_expiry=_KEEPALIVE_S,
            ),
            trust_env=not is_loopback(self._base_url),  # no proxy stands between us and ourselves
            verify=self._base_url.startswith("https:"),  # reading certificates takes 0.1 s
        )
        local = Local(client, asyncio.Semaphore(self._concurrent), _keeper(client))
        with self._lock:
            self._locals[loop] = local
        await anext(local.keeper)
        return local

    async def aclose(self) -> None:
        """Close the running loop's connections."""
        with self._lock:
            local = self._locals.pop(asyncio.get_running_loop(), None)
        if local is not None:
            await local.keeper.aclose()

    async def exchange(
        self,
        local: Local,
        method: str,
        url: str,
        payload: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """One request and its reply's JSON.

        Raises:
            CallFailed: a refusal, a reply that is no JSON or too long. httpx.RequestError: no reply.
        """
        data = bytearray()
        async with local.client.stream(method, url, content=payload, headers=headers) as response:
            async for block in response.aiter_bytes():
                data += block
                if len(data) > self._max_reply_bytes:
                    raise CallFailed(
                        JudgeCause.SERVER,
                        f"the reply is longer than max_reply_bytes = {self._max_reply_bytes}",
                        retry=False,
                    )
        try:
            reply = json.loads(data)
        except (ValueError, RecursionError) as error:
            if response.is_success:
                start = bytes(data[:80])
                message = f"the reply is no JSON: {start!r}{'...' if len(data) > 80 else ''}"
                raise CallFailed(JudgeCause.SERVER, message, retry=True) from error
            reply = data[:500].decode("utf-8", "replace")
        refused = refusal(response.status_code, response.headers, reply)
        if refused is not None:
            raise refused
        return reply


async def _keeper(client: httpx.AsyncClient) -> AsyncGenerator[None, None]:
    """Closes the client when its loop ends: `asyncio.run` finishes all generators that were begun."""
    try:
        yield
    finally:
        await client.aclose()


def checked_url(base_url: str) -> str:
    """An address without a slash at its end.

    Raises:
        UsageError: it is none.
    """
    try:
        parts = urlsplit(base_url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment:
        raise UsageError(
            f"a server's address looks like http://host:8000/v1 or https://host/v1, not {base_url!r}"
        )
    return base_url.rstrip("/")


def is_loopback(base_url: str) -> bool:
    """Is the server this machine itself?"""
    host = urlsplit(base_url).hostname or ""
    return host in LOOPBACK or host.startswith("127.")


def _httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise MissingExtraError("httpx", "openai", "calling a model server") from error
    return httpx
