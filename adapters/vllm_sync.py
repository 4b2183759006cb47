"""New weights for all the `vllm serve` of a run, between two updates and for all ranks at once.

    sync = WeightSync([WeightServer("http://host:8000/v1")], model="MODEL")
    # on every rank, in its main thread:
    sync.run(batches, version=update + 1, loop=loop, ranks=TorchRanks())
    policy.policy_version = update + 1

    all ranks arrive -> pause -> start_weight_update -> update_weights ... -> finish_weight_update
    -> the servers say the new version -> resume -> all ranks leave

A server that may hold half-new weights stays paused: it answers nobody, and the error says so. Rows that
are being written when weights change would be of two policies, so nothing is kept over a pause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from mintrl_env.adapters.pump import LoopThread
from mintrl_env.adapters.ranks import OneRank, Ranks, TorchRanks
from mintrl_env.adapters.vllm_weights import Pause, WeightServer, WeightSyncError
from mintrl_env.errors import UsageError

__all__ = ["Batch", "OneRank", "Ranks", "TorchRanks", "WeightSync"]


@dataclass(frozen=True)
class Batch:
    """Tensors that go over in one piece.

    Attributes:
        update_info: what the servers are told of them, as their transfer backend wants it (nccl: names,
            dtype_names, shapes).
        transfer: sends them, in the main thread, while the servers receive; None where `update_info`
            says all (ipc).
    """

    update_info: Mapping[str, Any]
    transfer: Callable[[], None] | None = None


class WeightSync:
    """Gives new weights to all servers of a run, so that no rank's rows are written by old ones.

    Args:
        servers: every replica.
        model: the name by which the servers know the model, to see by which weights they sample; ""
            leaves that out.
        unversioned: take servers that cannot say which version they hold (vLLM 0.24).
        refusal_s: seconds that a server has to refuse a batch before its tensors are sent; a collective
            that a server is not in never ends.
    """

    def __init__(
        self,
        servers: Sequence[WeightServer],
        *,
        model: str = "",
        unversioned: bool = False,
        refusal_s: float = 0.2,
    ) -> None:
        if not servers:
            raise UsageError("no servers to give weights to")
        self.servers, self.model, self.unversioned = list(servers), model, unversioned
        self._refusal_s = refusal_s

    def connect(
        self, *, address: str, port: int, join: Callable[[int], None], loop: LoopThread
    ) -> None:
        """Make the group that tensors go through (backend nccl), once, on the main rank.

        Args:
            address, port: where the trainer, the group's rank 0, waits for the servers.
            join: joins a group of so many processes in this thread, while the servers do.

        Raises:
            WeightSyncError: a server does not join.
        """
        sizes = loop.submit(lambda: self._each(WeightServer.world_size)).result()
        total = 1 + sum(sizes)
        offsets = {s: 1 + sum(sizes[:at]) for at, s in enumerate(self.servers)}
        joined = loop.submit(
            lambda: self._each(
                lambda server: server.init_transfer(
                    {
                        "master_address": address,
                        "master_port": port,
                        "rank_offset": offsets[server],
                        "world_size": total,
                    }
                )
            )
        )
        self._together(joined, lambda: join(total))

    def run(
        self,
        batches: Iterable[Batch],
        *,
        version: int,
        loop: LoopThread,
        ranks: Ranks | None = None,
        pause: Pause = "abort",
    ) -> None:
        """One update, called by every rank in its main thread once it writes no more rows.

        Returns on any rank only after every server generates with the new weights, or raises on all.

        Args:
            batches: all weights. Every rank iterates it, since gathering sharded parameters takes all
                of them; the main rank's are sent. A transfer must end by itself where the other side
                is gone (a time-out of its group).
            version: of the policy from now on.
            loop: where the requests run, while the transfer has this thread.
            pause: what becomes of rows of others (there should be none).

        Raises:
            WeightSyncError: on the main rank with its cause, on the others with its message.
        """
        ranks = ranks or OneRank()
        ranks.barrier()
        error: Exception | None = None
        left = iter(batches)
        try:
            if ranks.is_main:
                self._give(left, str(version), loop, pause)
        except Exception as failed:
            error = failed
        try:
            for _ in left:  # gathered together, also when the main rank has failed
                pass
        except Exception as failed:
            error = error or failed
        outcome = ranks.share((str(error), getattr(error, "paused", False)) if error else None)
        if error is not None:
            raise error
        if outcome is not None:
            message, paused = outcome
            raise WeightSyncError(f"on the main rank: {message}", paused=paused)

    def _give(self, batches: Iterable[Batch], version: str, loop: LoopThread, pause: Pause) -> None:
        asleep = loop.submit(lambda: self._each(WeightServer.is_sleeping)).result()
        try:
            loop.submit(lambda: self._prepare(asleep, pause)).result()
        except Exception:
            awake = [s for s, sleeps in zip(self.servers, asleep, strict=True) if not sleeps]
            loop.submit(lambda: _resume_quietly(awake)).result()
            raise
        try:
            loop.submit(lambda: self._each(WeightServer.start_update)).result()
            for batch in batches:
                self._send(batch, loop)
            loop.submit(lambda: self._each(lambda s: s.finish_update(version))).result()
            loop.submit(lambda: self._check_version(version)).result()
        except Exception as error:
            raise _left_paused(error) from error
        loop.submit(lambda: self._go_on(asleep)).result()
        if self.model:
            loop.submit(lambda: self._check_sampled(version, pause)).result()

    def _send(self, batch: Batch, loop: LoopThread) -> None:
        received = loop.submit(lambda: self._each(lambda s: s.update(batch.update_info)))
        self._together(received, batch.transfer)

    def _together(self, theirs: Future[Any], ours: Callable[[], None] | None) -> None:
        """Our part of a collective in this thread, while the servers do theirs."""
        try:
            if ours is not None:
                if wait([theirs], self._refusal_s).done:
                    theirs.result()
                ours()
        except BaseException as error:
            if theirs.done() and not theirs.cancelled() and (refused := theirs.exception()):
                raise refused from error  # why ours could not end
            theirs.cancel()  # the servers wait for what will not come
            raise
        theirs.result()

    async def _each(self, what: Callable[[WeightServer], Any]) -> list[Any]:
        """The same of every server; waits for all of them, and raises the first error."""
        done = await asyncio.gather(*map(what, self.servers), return_exceptions=True)
        for result in done:
            if isinstance(result, BaseException):
                raise result
        return list(done)

    async def _prepare(self, asleep: Sequence[bool], pause: Pause) -> None:
        sleeps = dict(zip(self.servers, asleep, strict=True))

        async def one(server: WeightServer) -> None:
            # Its KV comes back when the weights are in place. vLLM says that it sleeps when it is but
            # paused, and would go on generating here: hence the pause in any case.
            if sleeps[server]:
                await server.wake_up("weights")
            await server.pause(pause)

        await self._each(one)

    async def _go_on(self, asleep: Sequence[bool]) -> None:
        sleeps = dict(zip(self.servers, asleep, strict=True))

        async def one(server: WeightServer) -> None:
            if sleeps[server]:
                await server.wake_up("kv_cache")
            await server.resume()

        await self._each(one)

    async def _check_version(self, version: str) -> None:
        for server, found in zip(self.servers, await self._each(WeightServer.version), strict=True):
            if found is None and not self.unversioned:
                raise WeightSyncError(
                    f"{server.root} does not say which weights it holds (vLLM before 0.31?): update "
                    "it, or take it as it is (unversioned=True)",
                    server=server.root,
                )
            if found is not None and found != version:
                raise WeightSyncError(
                    f"{server.root} says that it holds weights {found!r}, not {version!r}: has "
                    "somebody else updated it?",
                    server=server.root,
                )

    async def _check_sampled(self, version: str, pause: Pause) -> None:
        found = await self._each(lambda server: server.sampled_versions(self.model))
        for server, versions in zip(self.servers, found, strict=True):
            if versions is not None and versions != [version]:
                await self._each(lambda s: s.pause(pause))
                raise WeightSyncError(
                    f"{server.root} samples by weights {versions}, not {version!r}; the servers are "
                    "paused",
                    server=server.root,
                    paused=True,
                )


async def _resume_quietly(servers: Sequence[WeightServer]) -> None:
    await asyncio.gather(*(server.resume() for server in servers), return_exceptions=True)


def _left_paused(error: Exception) -> WeightSyncError:
    return WeightSyncError(
        f"{error}. The servers stay paused, since they may hold half-new weights: run the update "
        "again, or restart them",
        server=getattr(error, "server", ""),
        paused=True,
    )
