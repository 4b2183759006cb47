"""New weights for `vllm serve`, against a real HTTP server with its routes and habits."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from mintrl_env.adapters.pump import LoopThread
from mintrl_env.adapters.vllm_sync import Batch, OneRank, TorchRanks, WeightSync
from mintrl_env.adapters.vllm_weights import WeightServer, WeightSyncError, weight_versions
from mintrl_env.errors import PolicyError, UsageError

_SPEC = importlib.util.spec_from_file_location(
    "fake_vllm_weights", Path(__file__).with_name("fake_vllm_weights.py")
)
assert _SPEC is not None and _SPEC.loader is not None
fake: Any = importlib.util.module_from_spec(_SPEC)
sys.modules["fake_vllm_weights"] = fake
_SPEC.loader.exec_module(fake)

INFO = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2]]}
UPDATE = [
    "/is_sleeping",
    "/pause?mode=abort&clear_cache=true",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/weight_info",
    "/resume",
]


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    with LoopThread() as thread:
        yield thread


@pytest.fixture
def servers(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    with ExitStack() as stack:
        yield [stack.enter_context(fake.WeightRoutes()) for _ in range(2)]


def sync_for(servers: list[Any], **options: Any) -> WeightSync:
    return WeightSync([WeightServer(s.url, timeout_s=20) for s in servers], **options)


def refusing(status: int, reply: Any) -> Callable[[Any], bool]:
    return lambda request: fake.send(request, status, reply)


# -- one server -------------------------------------------------------------------------------------


def test_each_request_is_what_vllm_takes() -> None:
    async def all_of_them(server: WeightServer) -> list[Any]:
        found: list[Any] = [await server.is_paused()]
        await server.pause("wait")
        found += [await server.is_paused(), await server.is_sleeping()]
        await server.init_transfer({"master_address": "host", "rank_offset": 1})
        await server.start_update()
        await server.update(INFO)
        await server.finish_update("7")
        await server.resume()
        found += [await server.version(), await server.sampled_versions("M")]
        await server.sleep(2)
        await server.wake_up("weights", "kv_cache")
        await server.wake_up()
        return [*found, await server.world_size()]

    with fake.WeightRoutes(world=4) as routes:
        server = WeightServer(routes.url, api_key="secret")
        assert asyncio.run(all_of_them(server)) == [False, True, True, "7", ["7"], 4]
    assert routes.log == [
        "/is_paused", "/pause?mode=wait&clear_cache=true", "/is_paused", "/is_sleeping",
        "/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
        "/finish_weight_update", "/resume", "/weight_info", "/inference/v1/generate",
        "/sleep?level=2", "/wake_up?tags=weights&tags=kv_cache", "/wake_up", "/get_world_size",
    ]  # fmt: skip
    assert routes.bodies["/init_weight_transfer_engine"] == {
        "init_info": {"master_address": "host", "rank_offset": 1}
    }
    assert routes.bodies["/start_weight_update"] == {"is_checkpoint_format": True}
    assert routes.received == [INFO]
    assert routes.bodies["/finish_weight_update"] == {"weight_version": "7"}
    assert routes.bodies["/inference/v1/generate"] == {
        "model": "M", "token_ids": [0], "sampling_params": {"max_tokens": 1, "temperature": 0.0}
    }  # fmt: skip
    assert routes.auth == {"Bearer secret"}
    assert "secret" not in repr(server)


@pytest.mark.parametrize(
    ("release", "version", "sampled"),
    [("0.24", None, None), ("0.31", "3", None), ("0.32", "3", ["3"])],
)
def test_older_servers_say_less(release: str, version: Any, sampled: Any) -> None:
    async def what(server: WeightServer) -> Any:
        await server.pause()
        await server.start_update()
        await server.finish_update("3")
        await server.sleep()  # answers nothing, or JSON
        await server.wake_up()
        return await server.version(), await server.sampled_versions("M")

    with fake.WeightRoutes(release) as routes:
        assert asyncio.run(what(WeightServer(routes.url))) == (version, sampled)


def test_every_refusal_says_what_where_and_what_next() -> None:
    for status, reply, match in [
        (404, {"detail": "Not Found"}, r"HTTP 404: Not Found; .* VLLM_SERVER_DEV_MODE=1"),
        (
            500,
            {
                "error": {
                    "message": "Weight transfer not configured. Please set weight_transfer_config"
                }
            },
            r"HTTP 500: Weight transfer not configured.* --weight-transfer-config '.\"backend\"",
        ),
        (401, {"error": "Unauthorized"}, r"HTTP 401: Unauthorized; check the api_key"),
        (500, b"Internal Server Error", r"HTTP 500: Internal Server Error$"),
        (500, None, r"HTTP 500: no message$"),
        (200, b"<html>", r"the reply is no JSON"),
    ]:
        with fake.WeightRoutes() as routes:
            routes.behave["/start_weight_update"] = refusing(status, reply)
            server = WeightServer(routes.url)
            with pytest.raises(WeightSyncError, match=match) as caught:
                asyncio.run(server.start_update())
            assert f"POST {server.root}/start_weight_update" in str(caught.value)
            assert caught.value.server == server.root and isinstance(caught.value, PolicyError)
            assert len(routes.log) == 1


def test_what_may_be_repeated_is_where_there_was_no_answer() -> None:
    with fake.WeightRoutes() as routes:
        turns = iter([True, True, False])
        for path in ("/pause", "/start_weight_update"):
            routes.behave[path] = lambda request: next(turns, True) and fake.drop(request)
        server = WeightServer(routes.url)
        asyncio.run(server.pause())
        assert routes.log == ["/pause?mode=abort&clear_cache=true"] * 3 and routes.paused
        with pytest.raises(WeightSyncError, match="is the server running"):
            asyncio.run(server.start_update())
        assert routes.log[3:] == ["/start_weight_update"]
    with pytest.raises(WeightSyncError, match="is the server running, and the address right"):
        asyncio.run(WeightServer(routes.url).resume())


def test_a_server_that_never_answers() -> None:
    with fake.WeightRoutes() as routes:
        routes.delay, routes.active = 3.0, True
        with pytest.raises(WeightSyncError, match=r"no reply within 0 s .* other side"):
            asyncio.run(WeightServer(routes.url, timeout_s=0.2).update(INFO))


def test_replies_of_another_shape() -> None:
    with fake.WeightRoutes() as routes:
        routes.behave["/weight_info"] = refusing(200, {"version": "3"})
        routes.behave["/is_paused"] = refusing(200, [1])
        server = WeightServer(routes.url)
        with pytest.raises(WeightSyncError, match=r"no weight_version in .'version'"):
            asyncio.run(server.version())
        with pytest.raises(WeightSyncError, match=r"no is_paused in .1."):
            asyncio.run(server.is_paused())
    with pytest.raises(UsageError, match="looks like http"):
        WeightServer("host:8000")


def test_versions_in_a_reply() -> None:
    def spans(*versions: str) -> list[dict[str, Any]]:
        return [{"version": v, "start": at, "end": at + 1} for at, v in enumerate(versions)]

    reply = {"choices": [{"weight_versions": spans("3", "4")}, {"weight_versions": spans("4")}]}
    assert weight_versions(reply) == ["3", "4"]
    assert weight_versions({"choices": [{"weight_versions": spans("3")}, {}]}) is None
    for wrong in (
        {},
        {"choices": [{"weight_versions": [1]}]},
        {"choices": [{"weight_versions": [{}]}]},
    ):
        with pytest.raises(WeightSyncError, match="no weight_versions in"):
            weight_versions(wrong)


# -- an update of all servers -----------------------------------------------------------------------


def test_an_update_in_its_order_on_every_server(servers: list[Any], loop: LoopThread) -> None:
    sent: list[int] = []
    main = threading.get_ident()

    def transfer(at: int) -> Callable[[], None]:
        def send() -> None:
            assert threading.get_ident() == main  # collectives live there
            for server in servers:  # they receive meanwhile
                wait_until(lambda server=server: server.log.count("/update_weights") == at + 1)
            sent.append(at)

        return send

    for server in servers:
        server.delay = 0.05
    batches = (Batch({**INFO, "names": [str(at)]}, transfer(at)) for at in range(2))
    sync_for(servers, model="M").run(batches, version=4, loop=loop)
    assert sent == [0, 1]
    for server in servers:
        assert server.log == [
            *UPDATE[:4], "/update_weights", *UPDATE[4:], "/inference/v1/generate"
        ]  # fmt: skip
        assert [info["names"] for info in server.received] == [["0"], ["1"]]
        assert (server.version, server.paused) == ("4", False)


def wait_until(what: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not what():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_sleeping_servers_get_their_weights_before_their_kv(
    servers: list[Any], loop: LoopThread
) -> None:
    asyncio.run(WeightServer(servers[0].url).sleep(2))
    sync_for(servers).run([Batch(INFO)], version=1, loop=loop)
    assert servers[0].log[1:] == [
        "/is_sleeping", "/wake_up?tags=weights", *UPDATE[1:6], "/wake_up?tags=kv_cache", "/resume"
    ]  # fmt: skip
    assert servers[1].log == UPDATE
    assert not servers[0].asleep and not servers[0].paused


def test_a_server_that_cannot_be_paused_lets_the_others_go_on(
    servers: list[Any], loop: LoopThread
) -> None:
    servers[1].behave["/pause"] = refusing(500, {"error": "Failed to pause generation: x"})
    with pytest.raises(WeightSyncError, match="Failed to pause generation") as caught:
        sync_for(servers).run([Batch(INFO)], version=1, loop=loop)
    assert not caught.value.paused and not servers[0].paused
    assert servers[0].log == [*UPDATE[:2], "/resume"] and servers[0].version == "default"


@pytest.mark.parametrize(
    "path", ["/start_weight_update", "/update_weights", "/finish_weight_update"]
)
def test_half_new_weights_stay_paused_and_can_be_updated_again(
    path: str, servers: list[Any], loop: LoopThread
) -> None:
    servers[1].behave[path] = refusing(500, {"error": {"message": "CUDA error"}})
    sync = sync_for(servers)
    with pytest.raises(WeightSyncError, match=r"CUDA error\. The servers stay paused") as caught:
        sync.run([Batch(INFO)], version=1, loop=loop)
    assert caught.value.paused and caught.value.server == sync.servers[1].root
    assert all(server.paused for server in servers)
    assert not any("/resume" in server.log for server in servers)
    servers[1].behave.clear()
    for server in servers:
        server.active = False  # as vLLM's own, after an update that failed
        server.log.clear()
    sync.run([Batch(INFO)], version=1, loop=loop)
    # a paused server says that it sleeps: it is woken, and paused again before anything else
    again = ["/is_sleeping", "/wake_up?tags=weights", *UPDATE[1:6], "/wake_up?tags=kv_cache"]
    assert [server.log for server in servers] == [[*again, "/resume"]] * 2
    assert [server.version for server in servers] == ["1", "1"]


def test_a_transfer_that_fails_does_not_wait_for_the_servers(
    servers: list[Any], loop: LoopThread
) -> None:
    def breaks() -> None:
        raise RuntimeError("NCCL timeout")

    servers[0].delay = servers[1].delay = 2.0
    started = time.monotonic()
    with pytest.raises(WeightSyncError, match=r"NCCL timeout\. The servers stay paused"):
        sync_for(servers).run([Batch(INFO, breaks)], version=1, loop=loop)
    assert time.monotonic() - started < 30
    assert servers[0].paused


def test_a_refused_batch_is_not_sent(servers: list[Any], loop: LoopThread) -> None:
    servers[0].behave["/update_weights"] = refusing(400, {"error": {"message": "bad names"}})
    sent: list[int] = []
    with pytest.raises(WeightSyncError, match="HTTP 400: bad names"):
        sync_for(servers, refusal_s=20).run(
            [Batch(INFO, lambda: sent.append(1))], version=1, loop=loop
        )
    assert sent == []  # it would have waited for a server that is not there


@pytest.mark.parametrize("model", ["", "M"])
def test_another_version_than_the_one_given_stays_paused(
    model: str, servers: list[Any], loop: LoopThread
) -> None:
    key, match = ("/weight_info", "says that it holds weights '0', not '1'")
    reply: Any = {"weight_version": "0"}
    if model:
        key, match = "/inference/v1/generate", r"samples by weights \['0', '1'\], not '1'"
        spans = [{"version": v, "start": 0, "end": 1} for v in "01"]
        reply = {"choices": [{"weight_versions": spans}]}
    servers[1].behave[key] = refusing(200, reply)
    with pytest.raises(WeightSyncError, match=match) as caught:
        sync_for(servers, model=model).run([Batch(INFO)], version=1, loop=loop)
    assert caught.value.paused and all(server.paused for server in servers)


def test_servers_that_know_no_versions_are_taken_only_if_told(loop: LoopThread) -> None:
    with fake.WeightRoutes("0.24") as routes:
        with pytest.raises(WeightSyncError, match="does not say which weights it holds"):
            sync_for([routes], model="M").run([Batch(INFO)], version=1, loop=loop)
        assert routes.paused
        sync_for([routes], model="M", unversioned=True).run([Batch(INFO)], version=1, loop=loop)
        assert not routes.paused
    with pytest.raises(UsageError, match="no servers"):
        WeightSync([])


def test_the_group_is_joined_by_all_at_once(loop: LoopThread) -> None:
    with fake.WeightRoutes(world=2) as first, fake.WeightRoutes(world=4) as second:
        joined: list[int] = []
        sync_for([first, second]).connect(
            address="trainer", port=29500, join=joined.append, loop=loop
        )
        assert joined == [7]
        infos = [s.bodies["/init_weight_transfer_engine"]["init_info"] for s in (first, second)]
    wanted = {"master_address": "trainer", "master_port": 29500, "world_size": 7}
    assert infos == [{**wanted, "rank_offset": 1}, {**wanted, "rank_offset": 3}]


# -- ranks ------------------------------------------------------------------------------------------


class Threads:
    """Ranks that are threads."""

    def __init__(self, count: int) -> None:
        self._barrier, self._values = threading.Barrier(count), [None]
        self.rank = threading.local()

    @property
    def is_main(self) -> bool:
        return bool(self.rank.number == 0)

    def barrier(self) -> None:
        self._barrier.wait(30)

    def share(self, value: Any) -> Any:
        if self.is_main:
            self._values[0] = value
        self.barrier()
        return self._values[0]


def on_ranks(count: int, what: Callable[[Threads], Any]) -> list[Any]:
    ranks = Threads(count)

    def run(number: int) -> Any:
        ranks.rank.number = number
        try:
            return what(ranks)
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def test_no_rank_leaves_before_the_servers_generate_with_the_new_weights(
    servers: list[Any], loop: LoopThread
) -> None:
    servers[1].delay = 0.3
    gathered: list[int] = []
    arrived = threading.Event()

    def rank(ranks: Threads) -> Any:
        if ranks.rank.number == 2:
            time.sleep(0.2)  # still writes rows, by the old weights
            assert not servers[0].log
            arrived.set()

        def batches() -> Iterator[Batch]:
            for _ in range(2):
                gathered.append(ranks.rank.number)  # a collective, with sharded parameters
                yield Batch(INFO)

        sync_for(servers).run(batches(), version=5, loop=loop, ranks=ranks)
        return [(server.version, server.paused) for server in servers]

    assert on_ranks(3, rank) == [[("5", False), ("5", False)]] * 3
    assert arrived.is_set() and sorted(gathered) == [0, 0, 1, 1, 2, 2]
    assert servers[0].log.count("/update_weights") == 2  # from one rank only


def test_a_failure_is_every_ranks_and_nobody_hangs(servers: list[Any], loop: LoopThread) -> None:
    servers[0].behave["/start_weight_update"] = refusing(500, {"error": {"message": "CUDA error"}})
    gathered: list[int] = []

    def rank(ranks: Threads) -> Any:
        def batches() -> Iterator[Batch]:
            for _ in range(2):
                gathered.append(ranks.rank.number)
                yield Batch(INFO)

        return sync_for(servers).run(batches(), version=5, loop=loop, ranks=ranks)

    main, *others = on_ranks(3, rank)
    assert isinstance(main, WeightSyncError) and "CUDA error" in str(main)
    for error in others:
        assert isinstance(error, WeightSyncError) and error.paused
        assert str(error) == f"on the main rank: {main}"
    assert sorted(gathered) == [0, 0, 1, 1, 2, 2]  # also by the rank that had failed


def test_one_rank_and_torchs(tmp_path: Path) -> None:
    import torch.distributed as dist

    one = OneRank()
    assert (one.is_main, one.share({"a": 1})) == (True, {"a": 1})
    one.barrier()
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        ranks = TorchRanks()
        ranks.barrier()
        assert (ranks.is_main, ranks.share(("m", True))) == (True, ("m", True))
    finally:
        dist.destroy_process_group()
