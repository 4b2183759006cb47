"""Connections to a model server: a pool for each event loop, and one exchange over it."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import re
import threading
import weakref
import zlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mintrl_env.adapters.llm_faults import CallFailed, refusal
from mintrl_env.errors import JudgeCause, MissingExtraError, UsageError

if TYPE_CHECKING:
    import httpx

_SECRET = 12  # characters; a shorter "key" is a word ("EMPTY") that stands in ordinary text
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
        secrets: what no reply may say again: a server's error page may show what it was sent.
        concurrent: the most connections of one event loop.
        connect_s: seconds for opening one.
        max_reply_bytes: a longer reply is not read to its end.
    """

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str],
        *,
        secrets: Sequence[str] = (),
        concurrent: int,
        connect_s: float,
        max_reply_bytes: int,
    ) -> None:
        self._base_url, self._headers, self._secrets = base_url, headers, tuple(secrets)
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
        try:
            client = httpx.AsyncClient(
                headers={**self._headers, "Accept-Encoding": "identity"},
                timeout=httpx.Timeout(None, connect=self._connect_s),
                limits=httpx.Limits(
                    max_connections=self._concurrent,
                    max_keepalive_connections=self._concurrent,
                    keepalive_expiry=_KEEPALIVE_S,
                ),
                trust_env=not is_loopback(self._base_url),  # none stands between us and ourselves
                verify=self._base_url.startswith("https:"),  # reading certificates takes 0.1 s
            )
        except (ValueError, ImportError) as error:  # what the environment says of proxies
            raise UsageError(
                f"no connection to {self._base_url} can be made: {error}. Look at the environment's "
                "HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY"
            ) from error
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
        data: bytearray | bytes = bytearray()
        async with local.client.stream(method, url, content=payload, headers=headers) as response:
            # As sent: decoded by httpx, a small bomb would stand in memory before it is measured.
            async for block in response.aiter_raw():
                data += block
                if len(data) > self._max_reply_bytes:
                    raise _too_long(self._max_reply_bytes)
        coding = response.headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            data = _unpacked(bytes(data), coding, self._max_reply_bytes)
        data = without_secrets(bytes(data), self._secrets)
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


def _too_long(limit: int) -> CallFailed:
    message = f"the reply is longer than max_reply_bytes = {limit}"
    return CallFailed(JudgeCause.SERVER, message, retry=False)


def _unpacked(data: bytes, coding: str, limit: int) -> bytes:
    """A reply that came compressed though none was asked for, no further than to the limit."""
    if coding not in ("gzip", "x-gzip", "deflate"):
        message = f"the reply is compressed ({coding[:40]}), though none was asked for"
        raise CallFailed(JudgeCause.SERVER, message, retry=False)
    unpacker = zlib.decompressobj(zlib.MAX_WBITS | 32)  # gzip's header or zlib's
    try:
        found = unpacker.decompress(data, limit + 1)
    except zlib.error as error:
        message = f"the reply is no {coding}, though it says so: {error}"
        raise CallFailed(JudgeCause.SERVER, message, retry=True) from error
    if len(found) > limit:
        raise _too_long(limit)
    return found


def without_secrets(data: bytes, secrets: Sequence[str]) -> bytes:
    """A reply without keys that it repeats."""
    for secret in secrets:
        for form in {secret, secret.replace("/", "\\/")}:  # as some JSON writers have it
            if len(secret) >= _SECRET:
                data = data.replace(form.encode(), b"***")
    return data


def bearer(api_key: str | None) -> dict[str, str]:
    """The header that carries a key.

    Raises:
        UsageError: no header can carry it; the key is not shown.
    """
    if api_key is None:
        return {}
    if not api_key.isascii() or not api_key.isprintable() or api_key != api_key.strip():
        raise UsageError("api_key holds characters that no HTTP header takes (a newline?)")
    return {"Authorization": f"Bearer {api_key}"}


def checked_url(base_url: str) -> str:
    """An address without a slash at its end, its scheme in small letters.

    Raises:
        UsageError: it is none, or holds a password. What may be secret in it is not shown.
    """
    shown = re.sub(r"//[^/]*@", "//***@", re.sub(r"[?#].*", "?...", base_url, flags=re.DOTALL))
    try:
        parts = urlsplit(base_url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        good = good and base_url.isprintable() and " " not in base_url
    except ValueError:
        good = False
    if not good or parts.query or parts.fragment:
        raise UsageError(
            f"a server's address looks like http://host:8000/v1 or https://host/v1, not {shown!r}"
        )
    if "@" in parts.netloc:
        raise UsageError(
            f"the address {shown!r} holds a name or password, which every error and report would "
            "show: give the server a key (api_key_env) instead"
        )
    return parts.scheme + base_url[len(parts.scheme) :].rstrip("/")


def is_loopback(base_url: str) -> bool:
    """Is the server this machine itself?"""
    host = (urlsplit(base_url).hostname or "").rstrip(".")
    if host == "localhost" or host.endswith(".localhost") or re.fullmatch(r"127(\.\d+){1,3}", host):
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False  # a name
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified


def _httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise MissingExtraError("httpx", "openai", "calling a model server") from error
    return httpx
