"""A policy behind one model server or several replicas of it: what `rollout.engine: server` runs on.

    found = sync(probe_servers(options, tokenizer, prompt_ids)); print(found)
    policy = ServedPolicy.over(options, found, tokenizer)

Every row stays with one replica, whose prefix cache knows it; a row that is tried again goes to the
next one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast, get_args

import numpy as np
import numpy.typing as npt

from mintrl_env.adapters.judge_servers import node_count
from mintrl_env.adapters.llm_client import ModelClient
from mintrl_env.adapters.llm_faults import CallFailed
from mintrl_env.adapters.policy_probe import PolicyReport, probe_policy
from mintrl_env.adapters.policy_server import ServerPolicy
from mintrl_env.adapters.policy_wires import LogprobsMode, WireName
from mintrl_env.adapters.server_options import AUTO, ServerOptions
from mintrl_env.adapters.server_probe import refuse_loopback
from mintrl_env.errors import JudgeCause, PolicyError, TaskError
from mintrl_env.keys import RowKey
from mintrl_env.prompts import PromptBuilder
from mintrl_env.protocols import Sampling, Tokenizer
from mintrl_env.types import Chunk, IdsLike, Task

_DEFAULT = Sampling()
_PROBE_ATTEMPTS, _PROBE_S = 2, 60.0
_PROBE_TEXT = "What is 12 + 30?"


@dataclass(frozen=True, slots=True)
class Served:
    """What the servers of a policy can do, all of them the same.

    Attributes:
        model: its name there.
        wire, logprobs_mode: for ServerPolicy.
        reports: of each server.
    """

    model: str
    wire: WireName
    logprobs_mode: LogprobsMode
    reports: tuple[PolicyReport, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.reports))


class ServedPolicy:
    """Policy and Scorer over the servers of `ServerOptions`; an engine without a pump.

    Args:
        replicas: each over a client of its own.
    """

    def __init__(self, replicas: Sequence[ServerPolicy]) -> None:
        self.replicas = tuple(replicas)

    @classmethod
    def over(cls, options: ServerOptions, served: Served, tokenizer: Tokenizer) -> ServedPolicy:
        return cls(replicas_of(options, served, tokenizer))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.replicas))})"

    @property
    def policy_version(self) -> int:
        """Of chunks whose requests begin from now on."""
        return self.replicas[0].policy_version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        for replica in self.replicas:
            replica.policy_version = version

    async def generate(
        self,
        ids: npt.NDArray[np.int32],
        *,
        max_tokens: int,
        stop: Sequence[str] = (),
        sampling: Sampling = _DEFAULT,
        key: RowKey,
    ) -> Chunk:
        """See ServerPolicy."""
        return await self._of(key).generate(
            ids, max_tokens=max_tokens, stop=stop, sampling=sampling, key=key
        )

    async def logprobs(
        self, ids: npt.NDArray[np.int32], start: int, *, key: RowKey | None = None
    ) -> npt.NDArray[np.float32]:
        """See ServerPolicy."""
        replica = self.replicas[0] if key is None else self._of(key)
        return await replica.logprobs(ids, start, key=key)

    def _of(self, key: RowKey) -> ServerPolicy:
        first = int(replace(key, retry=0).philox_key()[0])
        return self.replicas[(first + key.retry) % len(self.replicas)]

    def reset(self) -> None:
        """Nothing: a server's prefix cache is kept apart by `policy_version`."""

    async def aclose(self) -> None:
        """Close the running loop's connections."""
        await asyncio.gather(*(replica.client.aclose() for replica in self.replicas))


def replicas_of(options: ServerOptions, served: Served, tokenizer: Tokenizer) -> list[ServerPolicy]:
    """A ServerPolicy for each address."""
    return [
        ServerPolicy(
            client_of(options, url),
            served.model,
            tokenizer,
            wire=served.wire,
            logprobs_mode=served.logprobs_mode,
            seeded=options.seeded,
        )
        for url in options.urls
    ]


def client_of(options: ServerOptions, url: str) -> ModelClient:
    """The client of one server; without a breaker, since a run without its policy can but wait."""
    return ModelClient(
        url,
        api_key=options.api_key(),
        timing=options.timing(),
        limits=options.limits(),
        breaker=None,
    )


def refuse_other_nodes(options: ServerOptions) -> None:
    """Refuse servers that each node of a run would look for on itself.

    Raises:
        ConfigError: a loopback address, in a run of several nodes.
    """
    for url in options.urls:
        refuse_loopback(url, nodes=node_count())


def probe_ids(prompts: PromptBuilder) -> npt.NDArray[np.int32]:
    """A prompt such as a run sends."""
    try:
        return prompts.ids(Task("probe", _PROBE_TEXT))
    except TaskError:  # longer than max_prompt
        tokenizer = prompts.tokenizer
        ids = tokenizer.encode("1")[:1] or [min(tokenizer.eos_ids)]
        return np.array(ids, dtype=np.int32)


async def probe_servers(
    options: ServerOptions, tokenizer: Tokenizer, prompt_ids: IdsLike
) -> Served:
    """Ask every server what it can do, by generating.

    Args:
        prompt_ids: a prompt as a run would send it.

    Raises:
        PolicyError: a server that is not there, serves another model, takes no ids, or does not do
            what the options or the other servers say.
    """
    reports = await asyncio.gather(
        *(_probed(options, url, tokenizer, prompt_ids) for url in options.urls)
    )
    for report in reports:
        report.check()
    first = reports[0]
    assert first.wire is not None
    for name, values in (
        ("model", {report.model for report in reports}),
        ("wire", {report.wire for report in reports}),
        ("logprobs_mode", {report.logprobs_mode for report in reports}),
    ):
        if len(values) > 1:
            raise PolicyError(
                f"the servers of the policy are not alike: {name} {' and '.join(map(str, values))}; "
                "start all of them in the same way\n" + "\n".join(map(str, reports))
            )
    mode = first.logprobs_mode
    if options.logprobs_mode not in (AUTO, mode) and first.scores:
        raise PolicyError(
            f"{first.url}: its log-probs are {mode}, and logprobs_mode says "
            f"{options.logprobs_mode}; leave it out, or start the server with "
            f"--logprobs-mode {options.logprobs_mode}_logprobs"
        )
    if options.logprobs_mode != AUTO:
        mode = cast(LogprobsMode, options.logprobs_mode)
    return Served(first.model, first.wire, mode, tuple(reports))


async def _probed(
    options: ServerOptions, url: str, tokenizer: Tokenizer, prompt_ids: IdsLike
) -> PolicyReport:
    wires = get_args(WireName) if options.wire == AUTO else (cast(WireName, options.wire),)
    client = client_of(options, url)
    client.timing = replace(
        client.timing,
        attempts=min(options.attempts, _PROBE_ATTEMPTS),
        deadline_s=min(options.deadline_s, _PROBE_S),
    )
    async with client:
        model = await _model_of(client, options.model)
        return await probe_policy(client, model, tokenizer, prompt_ids, wires=wires)


async def _model_of(client: ModelClient, wanted: str | None) -> str:
    """The model's name at a server: the one that is given, if it is listed, or the only one."""
    try:
        listed = await client.get("models")
    except CallFailed as error:
        if error.cause in (JudgeCause.CONNECTION, JudgeCause.TIMEOUT, JudgeCause.AUTH):
            raise PolicyError(f"rollout.engine_options: {error.cause}: {error}") from error
        listed = None
    names: list[str] = []
    with contextlib.suppress(LookupError, TypeError):
        names = [str(entry["id"]) for entry in listed["data"]]
    if wanted is not None and (not names or wanted in names):
        return wanted
    if wanted is None and len(names) == 1:
        return names[0]
    there = f"it serves {', '.join(names[:5])}" if names else "it lists no models"
    said = "set model" if wanted is None else f"and not {wanted!r}: correct model"
    raise PolicyError(f"{client.base_url}: {there}; {said} in rollout.engine_options")
