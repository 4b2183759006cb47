"""What a `vllm serve` is asked about its weights: pause, new weights, version, sleep.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --weight-transfer-config '{"backend": "nccl"}' ...

Who asks all of it in the right order is `vllm_sync`.
"""

from __future__ import annotations

import asyncio
import json as json_module
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mintrl_env.adapters.llm_connections import (
    bearer,
    checked_url,
    is_loopback,
    without_secrets,
)
from mintrl_env.errors import MissingExtraError, PolicyError

Pause = Literal["abort", "wait"]
_PROBE = (0,)  # ids of a prompt of which one token is asked, to see by which weights
_AGAIN_S = (0.2, 1.0)


class WeightSyncError(PolicyError):
    """A server did not take new weights, or is not known to have.

    Attributes:
        server: its address.
        paused: whether servers were left paused, since they may hold half-new weights.
    """

    def __init__(self, message: str, *, server: str = "", paused: bool = False) -> None:
        self.server, self.paused = server, paused
        super().__init__(message)


class WeightServer:
    """One `vllm serve`, as far as its weights go (vLLM 0.31 and later; 0.24 knows no versions).

    Every method raises WeightSyncError, with what the server said and what to do. Those that may be
    called twice without harm (pause, resume, sleep, wake_up, and questions) are tried again where no
    connection was to be had.

    Args:
        base_url: with or without the /v1 that its other routes have.
        api_key: sent as a bearer token; never in an error.
        timeout_s: for one request; the transfer of a whole model has to fit in.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        connect_s: float = 10.0,
    ) -> None:
        self.root = checked_url(base_url).removesuffix("/v1")
        self._timeout_s, self._connect_s = timeout_s, connect_s
        self._headers = bearer(api_key or None)
        self._secrets = [api_key] if api_key else []

    def __repr__(self) -> str:
        return f"WeightServer({self.root!r})"

    async def pause(self, mode: Pause = "abort") -> None:
        """Stop generation: "abort" ends what is being written, "wait" lets it end. Drops the KV."""
        await self._post("/pause", {"mode": mode, "clear_cache": "true"}, again=True)

    async def resume(self) -> None:
        await self._post("/resume", again=True)

    async def is_paused(self) -> bool:
        return bool(_member(await self._get("/is_paused"), "is_paused", self.root))

    async def init_transfer(self, init_info: Mapping[str, Any]) -> None:
        """Have the server join the transfer's group; returns once it has, so the trainer joins
        meanwhile."""
        await self._post("/init_weight_transfer_engine", json={"init_info": dict(init_info)})

    async def start_update(self) -> None:
        await self._post(
            "/start_weight_update", json={"is_checkpoint_format": True}
        )  # as 0.24 asks

    async def update(self, update_info: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Have the server receive one batch of tensors; returns once it has."""
        await self._post("/update_weights", json={"update_info": update_info})

    async def finish_update(self, version: str) -> None:
        await self._post("/finish_weight_update", json={"weight_version": version})

    async def version(self) -> str | None:
        """The version of the last update that was finished; None from a server that knows none."""
        info = await self._get("/weight_info", missing_ok=True)
        return None if info is None else str(_member(info, "weight_version", self.root))

    async def sampled_versions(self, model: str) -> list[str] | None:
        """Of the weights that one token was just sampled by; None where the server doesn't say (before
        0.32, or without --enable-scale-out)."""
        params = {"max_tokens": 1, "temperature": 0.0}
        body = {"model": model, "token_ids": list(_PROBE), "sampling_params": params}
        reply = await self._request("POST", "/inference/v1/generate", json=body, missing_ok=True)
        return None if reply is None else weight_versions(reply)

    async def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Give up KV memory, and the weights: to the host (1), or for good (2)."""
        await self._post("/sleep", {"level": str(level)}, again=True)

    async def wake_up(self, *tags: Literal["weights", "kv_cache"]) -> None:
        """Take memory back, all of it without tags. With all of it back, the server generates."""
        await self._post("/wake_up", {"tags": list(tags)} if tags else None, again=True)

    async def is_sleeping(self) -> bool:
        """Is it asleep, or paused? vLLM makes no difference."""
        return bool(_member(await self._get("/is_sleeping"), "is_sleeping", self.root))

    async def world_size(self) -> int:
        """How many processes of the server join the transfer's group."""
        return int(_member(await self._get("/get_world_size"), "world_size", self.root))

    # -- one request -----------------------------------------------------------------------------

    async def _post(
        self,
        path: str,
        params: Mapping[str, Any] | None = None,
        *,
        json: Any = None,
        again: bool = False,
    ) -> None:
        await self._request("POST", path, params=params, json=json, again=again)

    async def _get(self, path: str, *, missing_ok: bool = False) -> Any:
        return await self._request("GET", path, missing_ok=missing_ok, again=True)

    async def _request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        json: Any = None,
        missing_ok: bool = False,
        again: bool = False,
    ) -> Any:
        """The reply's JSON, or {} where it has none (as /sleep)."""
        httpx = _httpx()
        waits = list(_AGAIN_S) if again else []
        where = f"{method} {self.root}{path}"
        while True:
            try:
                # A connection each: they are few, far apart, and from whatever loop there is.
                async with httpx.AsyncClient(
                    timeout=httpx.Timeout(self._timeout_s, connect=self._connect_s),
                    trust_env=not is_loopback(self.root),
                    verify=self.root.startswith("https:"),  # reading certificates takes 0.1 s
                    headers=self._headers,
                ) as client:
                    reply = await client.request(
                        method, f"{self.root}{path}", params=params, json=json
                    )
                break
            except httpx.TimeoutException as error:
                raise WeightSyncError(
                    f"{where}: no reply within {self._timeout_s:.0f} s (timeout_s); is the other side "
                    "of the transfer still there?",
                    server=self.root,
                ) from error
            except httpx.HTTPError as error:
                if not waits:
                    said = str(error) or type(error).__name__
                    message = f"{where}: {said}; is the server running, and the address right?"
                    raise WeightSyncError(message, server=self.root) from error
            await asyncio.sleep(waits.pop(0))
        if reply.status_code == 404 and missing_ok:
            return None
        if not reply.is_success:
            raise WeightSyncError(f"{where}: {self._refusal(reply)}", server=self.root)
        try:
            return reply.json() if reply.content.strip() else {}
        except ValueError as error:
            raise WeightSyncError(f"{where}: the reply is no JSON", server=self.root) from error

    def _refusal(self, reply: Any) -> str:
        data = without_secrets(reply.content, self._secrets)
        try:
            said = json_module.loads(data)
        except (ValueError, RecursionError):
            said = data.decode("utf-8", "replace")
        for name in ("error", "message", "detail"):
            if isinstance(said, dict) and said.get(name):
                said = said[name]
        text = " ".join(str(said).split())
        message = f"HTTP {reply.status_code}: {text[:300] or 'no message'}"
        if reply.status_code == 404:
            message += "; vLLM has this route only when it is started with VLLM_SERVER_DEV_MODE=1"
        elif "weight transfer" in text.lower() and "config" in text.lower():
            message += """; start it with --weight-transfer-config '{"backend": "nccl"}'"""
        elif reply.status_code in (401, 403):
            message += "; check the api_key"
        return message


def weight_versions(reply: Any) -> list[str] | None:
    """The versions in the `weight_versions` of a reply of /inference/v1/generate, in order; None where
    a choice has none.

    Raises:
        WeightSyncError: they are of another shape.
    """
    found: list[str] = []
    try:
        for choice in reply["choices"]:
            spans = choice.get("weight_versions")
            if spans is None:
                return None
            found += [str(span["version"]) for span in spans]
    except (KeyError, TypeError, AttributeError) as error:
        raise WeightSyncError(f"no weight_versions in {str(reply)[:200]}") from error
    return list(dict.fromkeys(found))


def _member(reply: Any, name: str, server: str) -> Any:
    if not isinstance(reply, dict) or name not in reply:
        raise WeightSyncError(f"{server}: no {name} in {str(reply)[:200]}", server=server)
    return reply[name]


def _httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise MissingExtraError("httpx", "openai", "calling a model server") from error
    return httpx
