"""How tensors get from the trainer's main rank to `vllm serve`: in batches, through a group of both.

    vllm serve MODEL --weight-transfer-config '{"backend": "nccl"}'     and VLLM_SERVER_DEV_MODE=1

`nccl` is vLLM's own backend; its trainer's side comes from the vllm that is installed here. A server
with a backend of its own has a `Transfer` of its own: engine_options.transfer: package.module:Class.
"""

from __future__ import annotations

import importlib
import socket
import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch

from mintrl_env.adapters.llm_connections import is_loopback
from mintrl_env.adapters.vllm_sync import Batch
from mintrl_env.errors import ConfigError, MissingExtraError, PolicyError

BATCH_BYTES = 1 << 30
_POLL_S = 0.005


class Transfer(Protocol):
    """The trainer's side of a group with the servers' processes; used in the main thread."""

    def join(self, address: str, port: int, size: int) -> None:
        """Join as rank 0 of `size`, waiting at an address of this machine; returns once all have."""
        ...

    def send(self, tensor: torch.Tensor) -> None:
        """Send to all; may return before it has gone."""
        ...

    def finish(self, timeout_s: float) -> None:
        """Wait until all that was sent has gone.

        Raises:
            PolicyError: it has not, after so many seconds.
        """
        ...


class NcclTransfer:
    """vLLM's backend `nccl`, one broadcast a tensor.

    Raises:
        MissingExtraError: vllm is not installed here.
    """

    def __init__(self) -> None:
        try:
            from vllm.distributed.weight_transfer import nccl_common
        except ImportError as error:
            raise MissingExtraError("vllm", "vllm", "giving weights to servers by nccl") from error
        self._common: Any = nccl_common
        self._group: Any = None

    def join(self, address: str, port: int, size: int) -> None:
        self._group = self._common.trainer_init(
            {"master_address": address, "master_port": port, "world_size": size}
        )

    def send(self, tensor: torch.Tensor) -> None:
        assert self._group is not None
        stream = torch.cuda.current_stream()
        self._group.broadcast(tensor.detach().cuda().contiguous(), src=0, stream=stream)

    def finish(self, timeout_s: float) -> None:
        # Not synchronize(): a broadcast to a server that is gone never ends.
        sent = torch.cuda.Event()
        sent.record(torch.cuda.current_stream())
        until = time.monotonic() + timeout_s
        while not sent.query():
            if time.monotonic() > until:
                raise PolicyError(
                    f"the weights have not gone after {timeout_s:.0f} s (weights_timeout_s): is a "
                    "server gone?"
                )
            time.sleep(_POLL_S)


def transfer_of(name: str) -> Transfer:
    """`nccl`, or an object of the class at package.module:Class.

    Raises:
        MissingExtraError: see NcclTransfer. ConfigError: there is no such class.
    """
    if name == "nccl":
        return NcclTransfer()
    module, _, attribute = name.partition(":")
    try:
        made: Transfer = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"rollout.engine_options.transfer: {name} cannot be loaded: {error}"
        ) from error
    return made


def batches(
    weights: Iterable[tuple[str, torch.Tensor]],
    transfer: Transfer | None,
    *,
    timeout_s: float,
    most: int = BATCH_BYTES,
) -> Iterator[Batch]:
    """Weights in pieces of about `most` bytes, as vLLM's backends want them told.

    Args:
        transfer: None on ranks that iterate only because gathering takes all of them.
    """
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    size = 0
    for name, tensor in weights:
        if transfer is not None:
            names.append(name)
            tensors.append(tensor)
        size += tensor.numel() * tensor.element_size()
        if size >= most:
            yield _batch(names, tensors, transfer, timeout_s)
            names, tensors, size = [], [], 0
    if size:
        yield _batch(names, tensors, transfer, timeout_s)


def _batch(
    names: list[str], tensors: list[torch.Tensor], transfer: Transfer | None, timeout_s: float
) -> Batch:
    if transfer is None:
        return Batch({})

    def go() -> None:
        for tensor in tensors:
            transfer.send(tensor)
        transfer.finish(timeout_s)

    told = {
        "names": names,
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
        "shapes": [list(tensor.shape) for tensor in tensors],
    }
    return Batch(told, go)


def meeting_place(urls: Iterable[str], given: str | None) -> tuple[str, int]:
    """An address of this machine that the servers reach, and a port that is free on it now.

    Args:
        given: the address, where the user says it.
    """
    address = given or _own_address(next((url for url in urls if not is_loopback(url)), None))
    with socket.socket() as free:
        free.bind(("", 0))
        return address, int(free.getsockname()[1])


def _own_address(url: str | None) -> str:
    """This machine's, as seen from a server's; loopback where all servers are here."""
    if url is None:
        return "127.0.0.1"
    parts = urlsplit(url)
    family = socket.AF_INET6 if ":" in (parts.hostname or "") else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as route:  # nothing is sent
        try:
            route.connect((parts.hostname, parts.port or 80))
        except OSError as error:
            raise ConfigError(
                f"no way to {url} was found ({error}): set rollout.engine_options.transfer_address to "
                "this machine's address"
            ) from error
        return str(route.getsockname()[0])
