"""What went wrong with a call to a model server: causes, and which of them a retry can mend.

what happened                             cause        tried again
no connection, cut in mid-reply           connection   yes
no reply in time; HTTP 408, 504           timeout      yes
HTTP 429, 529                             rate_limit   yes, after Retry-After where it is given
429 for want of quota, 402                budget       no
401, 403                                  auth         no
500, 502, 503 ...; not JSON; wrong shape  server       yes
400, 404, 413, 422 ..., 501; too long     server       no
limits.tokens, limits.usd used up         budget       no (nothing is sent)
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from mintrl_env.errors import JudgeCause, MintrlError
from mintrl_env.types import Usage

T = TypeVar("T")
_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)
_NO_QUOTA = ("insufficient_quota", "billing", "insufficient_balance", "insufficient_credit")


class WrongShape(ValueError):
    """A reply whose JSON is not what its wire form says."""


def member(reply: Any, kind: type[T], *path: str | int) -> T:
    """The part of a reply at `path`, of the given kind (`float` takes integers too).

    Raises:
        WrongShape: it is not there, or is something else.
    """
    found: Any = reply
    for depth, step in enumerate(path):
        at = ".".join(map(str, path[: depth + 1]))
        holder: Any = list if isinstance(step, int) else dict
        if not isinstance(found, holder):
            raise WrongShape(f"no {at}: there is {_short(found)}")
        try:
            found = found[step]
        except LookupError:
            raise WrongShape(f"no {at} in {_short(found)}") from None
    good = isinstance(found, (int, float) if kind is float else kind)
    if not good or isinstance(found, bool) is not (kind is bool):
        raise WrongShape(f"{'.'.join(map(str, path))} is {_short(found)}, not {kind.__name__}")
    part: Any = found
    if kind is float:
        try:
            part = float(found)
        except OverflowError:
            raise WrongShape(f"{'.'.join(map(str, path))} is beyond any float") from None
    checked: T = part
    return checked


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


class CallFailed(MintrlError):
    """A call gave no result.

    Attributes:
        cause: what a review records.
        retry: whether another attempt may go better.
        retry_after: seconds that the server asked to wait, or None.
        tells: whether it says something of the server's health, and not of this one request.
        usage: what all attempts used.
    """

    def __init__(
        self,
        cause: JudgeCause,
        message: str,
        *,
        retry: bool,
        retry_after: float | None = None,
        tells: bool = True,
    ) -> None:
        self.cause, self.retry, self.retry_after = cause, retry, retry_after
        self.tells = tells and cause is not JudgeCause.BUDGET
        self.usage = Usage(calls=0)
        super().__init__(message)


def failure_of(error: Exception, where: str) -> CallFailed:
    """Any error of an attempt as a CallFailed whose message begins with `where`."""
    if isinstance(error, CallFailed):
        return CallFailed(
            error.cause,
            f"{where}: {error}",
            retry=error.retry,
            retry_after=error.retry_after,
            tells=error.tells,
        )
    if isinstance(error, TimeoutError):
        return CallFailed(JudgeCause.TIMEOUT, f"{where}: no reply in time", retry=True)
    import httpx

    if isinstance(error, httpx.RequestError):
        said = str(error) or type(error).__name__
        hint = "; is the server running, and the address right?"
        connecting = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
        return CallFailed(
            JudgeCause.CONNECTION, f"{where}: {said}{hint if connecting else ''}", retry=True
        )
    raise error  # a bug, or a missing package: nothing that a retry mends


def refusal(status: int, headers: Mapping[str, str], reply: Any) -> CallFailed | None:
    """What the status of a reply says; None where all is well.

    A 200 whose body is an error counts as that error: some gateways answer so.
    """
    said, code = _said(reply)
    if 200 <= status < 300:
        if not (isinstance(reply, dict) and reply.get("error")):
            return None
        status = code if isinstance(code, int) and 400 <= code < 600 else 500
    message = f"HTTP {status}: {said}"
    if status == 402 or (status in (403, 429) and _is_quota(reply)):
        return CallFailed(JudgeCause.BUDGET, f"{message}; the account has no quota", retry=False)
    if status in (401, 403):
        return CallFailed(JudgeCause.AUTH, f"{message}; check the api_key", retry=False)
    again = status in _AGAIN or status >= 520
    cause = JudgeCause.SERVER
    if status in (408, 504):
        cause = JudgeCause.TIMEOUT
    elif status in (429, 529):
        cause = JudgeCause.RATE_LIMIT
    elif status == 404 or 300 <= status < 400:
        message += "; check base_url (it usually ends in /v1) and the model's name"
    return CallFailed(
        cause,
        message,
        retry=again,
        retry_after=_retry_after(headers) if again else None,
        tells=again or status in (404, 501),
    )


def tokens_of(reply: Any, prompt_tokens: int, max_tokens: int) -> tuple[int, int, int]:
    """Tokens read, written, and read from a cache, as a reply says, OpenAI's or llama.cpp's.

    Args:
        prompt_tokens, max_tokens: stand in for counts that are missing or no counts.
    """
    found = reply if isinstance(reply, dict) else {}
    usage = found.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    read = _count(usage.get("prompt_tokens", found.get("tokens_evaluated")), prompt_tokens)
    written = _count(usage.get("completion_tokens", found.get("tokens_predicted")), max_tokens)
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else 0
    return read, written, _count(cached, 0)


def _count(value: Any, otherwise: int) -> int:
    good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**40
    return value if good else otherwise


def _said(reply: Any) -> tuple[str, Any]:
    """The server's message, short, and its code."""
    error = reply.get("error", reply) if isinstance(reply, dict) else reply
    code = None
    if isinstance(error, dict):
        code = error.get("code")
        error = error.get("message") or error.get("detail") or error
    said = " ".join(str(error).split())
    return (said if len(said) <= 300 else said[:297] + "...") or "no message", code


def _is_quota(reply: Any) -> bool:
    error = reply.get("error") if isinstance(reply, dict) else None
    if not isinstance(error, dict):
        return False
    names = f"{error.get('code')} {error.get('type')}".lower()
    return any(name in names for name in _NO_QUOTA)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait, from `retry-after-ms` or `retry-after` (seconds, or an HTTP date)."""
    seconds = _number(headers.get("retry-after-ms"))
    if seconds is not None:
        return seconds / 1000
    value = headers.get("retry-after")
    if value is None:
        return None
    seconds = _number(value)
    if seconds is not None:
        return seconds
    try:
        return max(parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except (ValueError, TypeError, OverflowError):
        return None


def _number(value: str | None) -> float | None:
    try:
        number = float(value) if value is not None else None
    except ValueError:
        return None
    return number if number is not None and 0 <= number < math.inf else None
