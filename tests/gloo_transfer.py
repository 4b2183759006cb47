"""Tensors from a trainer to servers over a gloo group: what vLLM's nccl backend does, on a CPU."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)


def join_group(address: str, port: int, rank: int, size: int) -> Any:
    store = dist.TCPStore(address, port, size, rank == 0, TIMEOUT)
    return dist.ProcessGroupGloo(dist.PrefixStore("weights", store), rank, size, TIMEOUT), store


def _broadcast(group: Any, tensor: torch.Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    group[0].broadcast([tensor], options).wait()


def received(group: Any, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    _broadcast(group, tensor)
    return tensor


class GlooTransfer:
    """For `engine_options: {transfer: "gloo_transfer:GlooTransfer"}`."""

    def join(self, address: str, port: int, size: int) -> None:
        self.group = join_group(address, port, 0, size)

    def send(self, tensor: torch.Tensor) -> None:
        _broadcast(self.group, tensor.detach().contiguous())

    def finish(self, timeout_s: float) -> None:
        pass
