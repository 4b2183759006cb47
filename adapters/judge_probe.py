"""Asking the servers of a judge, by generations, what they can do, before anything depends on them."""

from __future__ import annotations

from dataclasses import replace

from mintrl_env.adapters.chat_server import ChatServer
from mintrl_env.adapters.judge_servers import chat_servers
from mintrl_env.adapters.server_probe import ChatReport, probe_chat

_ATTEMPTS, _SECONDS = 3, 120.0


async def probe_judge(judge: object) -> list[ChatReport]:
    """A report of each server that a judge asks; a judge that asks none has none.

    Args:
        judge: one that was made to be asked this: its connections are closed afterwards. A server
            whose replies are all replayed from a cache is left alone.

    Raises:
        JudgeError: a server that cannot be reached, or answers and does not generate.
    """
    return [
        await _probed(server)
        for server in chat_servers(judge)
        if server.client.cache is None or server.client.cache.mode != "replay"
    ]


async def _probed(server: ChatServer) -> ChatReport:
    client = server.client
    client.timing = replace(
        client.timing,
        attempts=min(client.timing.attempts, _ATTEMPTS),
        deadline_s=min(client.timing.deadline_s, _SECONDS),
    )
    client.cache = None
    try:
        report = await probe_chat(client, server.model, settings=server.settings)
    finally:
        await client.aclose()
    report.check()
    differences = _capability_notes(server, report)
    return replace(report, notes=(*report.notes, *differences))


def _capability_notes(server: ChatServer, report: ChatReport) -> list[str]:
    """Where what was declared of the server is not what it does."""
    declared, found = server.capabilities, report.capabilities
    pairs: list[tuple[str, str, str]] = [("structured", declared.structured, found.structured)]
    pairs += [("prefill", declared.prefill, found.prefill)]
    if declared.logprobs:
        pairs += [("logprobs", "true", str(found.logprobs).lower())]
    return [
        f"judge.options.capabilities.{name}: {said} is declared, and {server.model} at "
        f"{server.client.base_url} does {there}: set {name}: {there}"
        for name, said, there in pairs
        if said != there
    ]
