"""The policy of a training behind `vllm serve`: all ranks write by the same weights, an update's.

    all ranks: load_weights -> (barrier, pause, tensors, version, resume: `vllm_sync`) -> rollouts

One update of weights for each call of `RolloutSession.groups`, never one a chunk, and no collective
between chunks: each rank's episodes talk to the servers on their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from mintrl_env.adapters.policy_served import (
    Served,
    ServedPolicy,
    probe_ids,
    probe_servers,
    refuse_other_nodes,
    replicas_of,
)
from mintrl_env.adapters.policy_server import ServerPolicy
from mintrl_env.adapters.pump import LoopThread
from mintrl_env.adapters.ranks import Ranks, on_main
from mintrl_env.adapters.server_options import ServerOptions
from mintrl_env.adapters.session import EngineHost
from mintrl_env.adapters.vllm_sync import WeightSync
from mintrl_env.adapters.vllm_transfer import Transfer, batches, meeting_place, transfer_of
from mintrl_env.adapters.vllm_weights import WeightServer
from mintrl_env.errors import ConfigError
from mintrl_env.loops import sync
from mintrl_env.protocols import Tokenizer
from mintrl_env.types import IdsLike


class TrainedPolicy(ServedPolicy):
    """A ServedPolicy whose servers take the trainer's weights.

    Args:
        replicas: as in ServedPolicy.
        weights: gives all servers new ones.
        transfer: the main rank's; None on the others.
        ranks: all of them call `load_weights` and `rest` together.
        options: of the servers.
    """

    def __init__(
        self,
        replicas: Sequence[ServerPolicy],
        weights: WeightSync,
        transfer: Transfer | None,
        ranks: Ranks,
        options: ServerOptions,
    ) -> None:
        super().__init__(replicas)
        self._weights, self._transfer, self._ranks = weights, transfer, ranks
        self._options = options
        self._given = 0
        self._connected = False

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], *, version: int) -> None:
        """Give the servers these weights; returns when all of them generate by them (a collective).

        Raises:
            WeightSyncError: a server did not take them; RankError: on the other ranks.
        """
        with LoopThread("mintrl-weights") as loop:
            if not self._connected:
                on_main(self._ranks, partial(self._connect, loop))
                self._connected = True
            self._given += 1
            pieces = batches(weights, self._transfer, timeout_s=self._options.weights_timeout_s)
            self._weights.run(pieces, version=self._given, loop=loop, ranks=self._ranks)
        self.policy_version = version

    def _connect(self, loop: LoopThread) -> None:
        transfer = self._transfer
        assert transfer is not None
        address, port = meeting_place(self._options.urls, self._options.transfer_address)
        self._weights.connect(
            address=address, port=port, join=partial(transfer.join, address, port), loop=loop
        )

    def rest(self) -> None:
        """All rollouts are there: the servers may give their memory to the trainer (`sleep`)."""
        level = self._options.sleep
        if not level:
            return
        self._ranks.barrier()  # others still write

        async def sleep() -> None:
            for server in self._weights.servers:
                await server.sleep(level)

        on_main(self._ranks, lambda: sync(sleep()))


def trained_policy(options: ServerOptions, ranks: Ranks) -> Callable[[EngineHost], TrainedPolicy]:
    """A policy's engine for `EngineHost.policy_engine`, made by all ranks together.

    Raises, when it is made:
        PolicyError: a server that is no fit for a policy.
        ConfigError: one that can't take weights, or that other nodes would not reach.
        MissingExtraError: the transfer's package.
    """

    def make(host: EngineHost) -> TrainedPolicy:
        found = on_main(
            ranks, lambda: check_trainable(options, host.tokenizer, probe_ids(host.prompts))
        )
        transfer: list[Transfer] = []
        on_main(ranks, lambda: transfer.append(transfer_of(options.transfer)))
        weights = WeightSync(
            weight_servers(options), model=found.model, unversioned=options.unversioned
        )
        return TrainedPolicy(
            replicas_of(options, found, host.tokenizer),
            weights,
            transfer[0] if transfer else None,
            ranks,
            options,
        )

    return make


def weight_servers(options: ServerOptions) -> list[WeightServer]:
    """The same servers, as far as their weights go."""
    return [
        WeightServer(
            url,
            api_key=options.api_key(),
            timeout_s=options.weights_timeout_s,
            connect_s=options.connect_s,
        )
        for url in options.urls
    ]


def check_trainable(options: ServerOptions, tokenizer: Tokenizer, prompt_ids: IdsLike) -> Served:
    """What the servers can do for a policy in training; they are woken and resumed, since what an
    earlier run left paused or asleep gets new weights before anything else.

    Raises:
        PolicyError: a server that is not there, takes no weights (WeightSyncError), or is no fit for a
            policy. ConfigError: a loopback address in a run of several nodes.
    """
    refuse_other_nodes(options)

    async def look() -> Served:
        for server in weight_servers(options):
            if await server.is_sleeping():
                await server.wake_up()
                await server.resume()
        return await probe_servers(options, tokenizer, prompt_ids)

    found = sync(look())
    if found.wire == "llama_cpp":
        raise ConfigError(
            "rollout.engine_options: llama.cpp's server takes no new weights, so it can't be the policy "
            "of a training: take `vllm serve`, or the embedded engine (rollout.engine: transformers)"
        )
    return found
