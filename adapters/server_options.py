"""What `rollout.engine_options` says of a policy behind model servers (`rollout.engine: server`).

rollout:
  engine: server
  engine_options: {urls: [http://127.0.0.1:8000/v1, http://127.0.0.1:8001/v1], model: policy}
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from mintrl_env.adapters.llm_connections import checked_url
from mintrl_env.adapters.llm_limits import Limits, Timing
from mintrl_env.adapters.policy_wires import LogprobsMode, WireName
from mintrl_env.errors import UsageError

AUTO = "auto"
ENGINES = ("transformers", "vllm", "server")
_SECONDS = ("attempt_s", "deadline_s", "connect_s", "weights_timeout_s")
_COUNTS = ("concurrent", "attempts")


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How a policy's servers are called.

    Attributes:
        urls: OpenAI-style addresses, with /v1; every row stays with one of them. `url` for a single
            one.
        model: the name by which the servers know the model; None: the only one that they list.
        wire: see `policy_wires`; "auto": the first that works.
        logprobs_mode: vLLM's --logprobs-mode; "auto": found out.
        api_key_env: the environment variable with the key.
        concurrent: requests in flight to each server, from each process.
        attempts, attempt_s, deadline_s, connect_s: see `llm_limits.Timing`.
        seeded: send seeds, so that a row asked for again draws the same.
        transfer: how new weights reach the servers in a training: "nccl", or package.module:Class
            (see `vllm_transfer`).
        transfer_address: where the servers reach the main rank; None: this machine's loopback where
            all servers are on it, else the address by which this machine reaches them.
        weights_timeout_s: for one request of an update of weights.
        sleep: while nothing is rolled out in a training, the servers sleep at this level (1, 2) and
            give their memory to a trainer on the same GPU; needs --enable-sleep-mode. 0: they don't.
        unversioned: take servers that can't say which weights they hold (vLLM before 0.31).
    """

    urls: tuple[str, ...]
    model: str | None = None
    wire: WireName | str = AUTO
    logprobs_mode: LogprobsMode | str = AUTO
    api_key_env: str | None = None
    concurrent: int = 256
    attempts: int = 6
    attempt_s: float = 600.0
    deadline_s: float = 1200.0
    connect_s: float = 10.0
    seeded: bool = True
    transfer: str = "nccl"
    transfer_address: str | None = None
    weights_timeout_s: float = 600.0
    sleep: Literal[0, 1, 2] = 0
    unversioned: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> ServerOptions:
        """From a config's mapping.

        Raises:
            UsageError: with everything that is wrong with it.
        """
        given = dict(options)
        problems = []
        known = [field.name for field in fields(cls)]
        for name in [name for name in given if name not in (*known, "url")]:
            near = difflib.get_close_matches(str(name), [*known, "url"], n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"known: url, {', '.join(known)}"
            problems.append(f"{name}: no such key; {hint}")
            del given[name]
        if "url" in given and "urls" in given:
            problems.append("give url or urls, not both")
        urls = given.pop("urls", None) or ([given.pop("url")] if given.get("url") else [])
        given.pop("url", None)
        problems += _url_problems(urls)
        problems += _value_problems(given)
        if problems:
            raise UsageError("; ".join(problems))
        return cls(urls=tuple(url.rstrip("/") for url in urls), **given)

    def timing(self) -> Timing:
        return Timing(
            attempts=self.attempts,
            attempt_s=self.attempt_s,
            deadline_s=self.deadline_s,
            connect_s=self.connect_s,
        )

    def limits(self) -> Limits:
        return Limits(concurrent=self.concurrent)

    def api_key(self) -> str | None:
        """The key out of the environment.

        Raises:
            UsageError: the variable is not set.
        """
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env)
        if not key:
            raise UsageError(
                f"api_key_env: the environment variable {self.api_key_env} is not set: export it "
                "before the run starts"
            )
        return key


def _url_problems(urls: Any) -> list[str]:
    if not isinstance(urls, (list, tuple)) or not all(isinstance(url, str) for url in urls):
        return [f"urls: a list of addresses, not {urls!r}"]
    if not urls:
        return ["urls: is missing: the address of one server at least, as http://host:8000/v1"]
    problems = []
    for url in urls:
        try:
            checked_url(url)
        except UsageError as error:
            problems.append(f"urls: {error}")
    if len({url.rstrip("/") for url in urls}) != len(urls):
        problems.append("urls: one stands here twice")
    return problems


def _value_problems(given: Mapping[str, Any]) -> list[str]:
    problems = []
    for name in ("model", "api_key_env", "transfer", "transfer_address"):
        if given.get(name) is not None and not (isinstance(given[name], str) and given[name]):
            problems.append(f"{name}: a text, not {given[name]!r}")
    for name in ("seeded", "unversioned"):
        if not isinstance(given.get(name, True), bool):
            problems.append(f"{name}: true or false, not {given[name]!r}")
    for name in (*_COUNTS, *_SECONDS):
        value = given.get(name, 1)
        number = isinstance(value, (int, float) if name in _SECONDS else int)
        if isinstance(value, bool) or not number or not 0 < value < math.inf:
            kind = "seconds" if name in _SECONDS else "a whole number"
            problems.append(f"{name}: {kind} > 0, not {value!r}")
    for name, values in (("wire", get_args(WireName)), ("logprobs_mode", get_args(LogprobsMode))):
        if given.get(name, AUTO) not in (AUTO, *values):
            problems.append(f"{name}: {AUTO}, {' or '.join(values)}, not {given[name]!r}")
    sleep = given.get("sleep", 0)
    if isinstance(sleep, bool) or sleep not in (0, 1, 2):
        problems.append(f"sleep: 0, 1 or 2, not {sleep!r}")
    transfer = given.get("transfer", "nccl")
    if isinstance(transfer, str) and not re.fullmatch(r"nccl|[\w.]+:\w+", transfer):
        problems.append(f"transfer: nccl or package.module:Class, not {transfer!r}")
    return problems


def check_processes(engine: str, processes: int) -> None:
    """Refuse an engine that several training processes cannot have each.

    Raises:
        UsageError
    """
    if engine == "vllm" and processes > 1:
        raise UsageError(
            f"vllm is an engine in the trainer's process, and {processes} processes would all put theirs "
            "on the first GPU: take rollout.engine: server (`mintrl train-command CONFIG --gpus N` "
            "prints the commands)"
        )


def check_engine(engine: str, schedule: str, options: Mapping[str, Any] | None) -> None:
    """Refuse what a rollout engine cannot do.

    Raises:
        UsageError
    """
    if engine != "transformers" and schedule == "rounds":
        whose = "vLLM's" if engine == "vllm" else "a server's"
        raise UsageError(f"schedule rounds is bit-exact, which {whose} batches are not: take free")
    if engine == "transformers" and options:
        raise UsageError(
            "engine_options are vLLM's and the servers'; the embedded engine has its slots alone"
        )
    if engine == "server":
        try:
            ServerOptions.of(options or {})
        except UsageError as error:
            raise UsageError(f"engine_options: {error}") from None
