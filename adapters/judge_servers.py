"""The model servers that a judge asks, and whether a run of several nodes can reach them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from mintrl_env.adapters.chat_server import ChatServer
from mintrl_env.adapters.server_probe import refuse_loopback
from mintrl_env.protocols import Judge

# How many nodes there are: torchrun and accelerate, a step of Slurm's, what other launchers set.
_NODE_COUNTS = ("GROUP_WORLD_SIZE", "SLURM_STEP_NUM_NODES", "NNODES", "PET_NNODES")


def chat_servers(judge: object) -> list[ChatServer]:
    """The servers that a judge, or a judge in it, keeps as attributes; each once.

    A judge that keeps its connections elsewhere has none that could be found.
    """
    found = {id(server): server for server in _servers(judge, set())}
    return list(found.values())


def _servers(thing: object, seen: set[int]) -> Iterator[ChatServer]:
    seen.add(id(thing))
    for value in getattr(thing, "__dict__", {}).values():
        if isinstance(value, ChatServer):
            yield value
        elif isinstance(value, Judge) and id(value) not in seen:
            yield from _servers(value, seen)


def node_count(environ: Mapping[str, str] | None = None) -> int:
    """On how many machines this run was started, by what its launcher put into the environment."""
    environ = os.environ if environ is None else environ

    def number(name: str) -> int:
        text = environ.get(name, "")
        return int(text) if text.isascii() and text.isdigit() else 0

    world, local = number("WORLD_SIZE"), number("LOCAL_WORLD_SIZE")
    by_size = -(-world // local) if world and local else 1
    return max(1, by_size, *map(number, _NODE_COUNTS))


def refuse_unreachable(judge: object) -> None:
    """Refuse a judge whose server each node would look for on itself.

    Raises:
        ConfigError: a loopback address, on several nodes.
    """
    servers = chat_servers(judge)
    if servers and (nodes := node_count()) > 1:
        for server in servers:
            refuse_loopback(server.client.base_url, nodes=nodes)
