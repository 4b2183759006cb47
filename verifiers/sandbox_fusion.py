"""Code runs in a Sandbox Fusion server (github.com/bytedance/SandboxFusion), over HTTP.

Each run is one `POST /run_code`; nothing is kept at the server between two of them. The report
comes back as a fetched file, not as standard output: the server reads a program's output only after
its end, so that more than some 190 kB of it would stop the program, and a busy server may return
none of it at all.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from mintrl_env.errors import ConfigError
from mintrl_env.verifiers.remote_service import (
    Job,
    Passing,
    Patience,
    patience_of,
    require,
    retry_after,
)
from mintrl_env.verifiers.sandbox import SandboxUnavailable
from mintrl_env.verifiers.sandbox_remote import RemoteSandbox

ENDPOINT = "SANDBOX_FUSION_ENDPOINT"
"""The environment variable that the service's own client reads too."""

_SLACK_S = 10.0  # for the interpreter to start on a busy server
_MAX_ANSWER = 1 << 27
_CONNECT_S = 10.0


class FusionSandbox(RemoteSandbox):
    """A sandbox whose code runs in a Sandbox Fusion server.

    Whatever the server's own isolation (`none` or `lite` in its configuration), the code of a
    response is confined as it would be here; a server whose kernel cannot do that is refused.

    Args:
        endpoint: its address, such as "http://localhost:8080"; None reads SANDBOX_FUSION_ENDPOINT.
        token: sent as `Authorization: Bearer` for a gateway in front of it; the server itself
            has no accounts.
        headers: sent with every request, for gateways that want others.
        concurrency: the most requests at once; the server queues what is over its own limit.
        packages: importable names (numpy), installed at the service, that code may use besides the
            standard library.
        patience: how long failures are borne; a mapping gives the fields of `Patience`.

    Raises:
        ConfigError: no address.
    """

    name = "fusion"

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
        concurrency: int = 16,
        packages: Sequence[str] = (),
        patience: Patience | Mapping[str, float] | None = None,
    ) -> None:
        require("httpx", "e2b", "FusionSandbox")
        require("tenacity", "e2b", "FusionSandbox")
        address = endpoint or os.environ.get(ENDPOINT)
        if not address:
            raise ConfigError(
                f'no address of a Sandbox Fusion server: pass endpoint="http://host:8080" or set '
                f"{ENDPOINT}"
            )
        if not address.startswith(("http://", "https://")):
            raise ConfigError(
                f"a Sandbox Fusion address begins with http:// or https://: {address}"
            )
        given = dict(headers or {})
        if token is not None:
            given["Authorization"] = f"Bearer {token}"
        url = address.rstrip("/").removesuffix("/run_code") + "/run_code"
        borne = patience_of(patience)
        super().__init__(
            lambda: _Fusion(url, given, concurrency, borne),
            concurrency=concurrency,
            packages=packages,
            patience=borne,
        )


class _Fusion:
    """One client with its connections; lives on one event loop."""

    name = "Sandbox Fusion"

    def __init__(
        self, url: str, headers: Mapping[str, str], concurrency: int, patience: Patience
    ) -> None:
        import httpx

        self._url, self._patience = url, patience
        self._client = httpx.AsyncClient(
            headers=dict(headers),
            limits=httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
        )

    async def execute(self, job: Job) -> bytes:
        import httpx

        request = {
            "code": job.script,
            "language": "python",
            "run_timeout": job.seconds + _SLACK_S,
            "compile_timeout": _SLACK_S,
            "files": {},
            "fetch_files": [job.report],
        }
        # Between two bytes, so that a server which has gone away is noticed before the deadline.
        timeout = httpx.Timeout(job.seconds + self._patience.answer_s, connect=_CONNECT_S)
        try:
            async with self._client.stream(
                "POST", self._url, json=request, timeout=timeout
            ) as response:
                body = await _body(response)
        except httpx.TransportError as error:
            raise Passing(f"{self._url}: {type(error).__name__} {error}".rstrip()) from error
        if response.status_code != 200:
            raise _refusal(self._url, response.status_code, response.headers, body)
        return _report(body, job.report)

    async def aclose(self) -> None:
        await self._client.aclose()


async def _body(response: Any) -> bytes:
    parts, size = [], 0
    async for part in response.aiter_bytes():
        size += len(part)
        if size > _MAX_ANSWER:
            raise Passing(f"an answer of more than {_MAX_ANSWER} bytes")
        parts.append(part)
    return b"".join(parts)


def _refusal(url: str, status: int, headers: Mapping[str, str], body: bytes) -> Exception:
    """What an answer other than 200 means: worth another try, or not."""
    text = " ".join(body[:300].decode(errors="replace").split())
    said = f"{url} answered {status}" + (f": {text}" if text else "")
    if status in (401, 403, 407):
        return SandboxUnavailable(
            f"{said}; no access: look at the token or headers given to FusionSandbox"
        )
    if status == 402 or (status == 429 and "quota" in text.lower()):
        return SandboxUnavailable(f"{said}; the quota is used up: raise it, or use another sandbox")
    if status in (408, 425, 429) or status >= 500:
        return Passing(said, retry_after(headers.get("retry-after")))
    return SandboxUnavailable(
        f"{said}; is this the address of a Sandbox Fusion server of a version that has /run_code?"
    )


def _report(body: bytes, name: str) -> bytes:
    """The report's bytes out of a RunCodeResponse.

    Raises:
        Passing: the server says that it failed, or the script did not live to write its report.
    """
    try:
        answer = json.loads(body)
        status, run = answer["status"], answer.get("run_result") or {}
        files = answer.get("files") or {}
        if not isinstance(status, str) or not isinstance(run, dict) or not isinstance(files, dict):
            raise TypeError("fields of other types than RunCodeResponse has")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Passing(f"an answer that is no RunCodeResponse: {error!r}") from error
    if status == "SandboxError" or run.get("status") == "Error":
        raise Passing(f"SandboxError: {_short(answer.get('message') or run.get('stderr'))}")
    if run.get("status") == "TimeLimitExceeded":
        raise Passing(
            f"the run was stopped after {run.get('execution_time')} s, though the script ends by "
            "itself before its limit: the server is too busy"
        )
    if name not in files:
        raise Passing(
            f"the script ended with status {run.get('return_code')} and left no report: "
            f"{_short(run.get('stderr'))}"
        )
    try:
        return base64.b64decode(files[name], validate=True)
    except (binascii.Error, ValueError, TypeError) as error:
        raise Passing(f"a report that is no base64: {error}") from error


def _short(text: Any) -> str:
    return " ".join(str(text or "").split())[-300:]
