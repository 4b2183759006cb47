"""The model servers of a config's judge, before a preflight or a training: fit, reachable, how limited."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from mintrl_env import judge_recipes
from mintrl_env.config import RunConfig
from mintrl_env.loops import sync
from mintrl_env.preflight_forecast import JudgeLimits
from mintrl_env.protocols import Judge

if TYPE_CHECKING:
    from mintrl_env.adapters.server_probe import ChatReport

IN_PROCESS = ("arithmetic", "keep", "oracle", "scoring", "self")
"""Judges that call no service: nothing about them costs money, or can be down."""


def is_judged(config: RunConfig) -> bool:
    """Whether a run of the config has reviews at all."""
    on = config.objective.intervention_updates != 0 and config.method != "grpo"
    return on and config.judge is not None and config.rollout.n_intervened > 0


def asks_service(config: RunConfig) -> bool:
    """Whether the judge may ask somebody else; of one's own judges nobody knows, so they do.

    The judge is the one that does the work: a shuffled one has another in it.
    """
    if config.judge is None or not is_judged(config):
        return False
    name, options = config.judge.name, config.judge.options
    name = str(options.get("judge", "scoring")) if name == "shuffled" else name
    return name not in IN_PROCESS


def check_servers(config: RunConfig) -> list[ChatReport]:
    """Ask each server of the judge what it can do, before any model is loaded.

    Raises:
        ConfigError: a loopback address in a run of several nodes.
        JudgeError: a server that cannot be reached, or answers and does not generate.
    """
    if not asks_service(config):
        return []
    from mintrl_env.adapters.judge_probe import probe_judge
    from mintrl_env.adapters.judge_servers import refuse_unreachable

    made = judge_recipes.make_judge(config)
    if not isinstance(made, Judge):
        assert made is not None
        # Such judges are made without their tokenizer too, when the config is checked.
        made = made(cast(Any, SimpleNamespace(tokenizer=None)))[0]
    refuse_unreachable(made)
    return sync(probe_judge(made))


def limits_of(judge: Judge | None, config: RunConfig) -> tuple[JudgeLimits, list[str]]:
    """What bounds a judge's calls, and what should be said of them."""
    from mintrl_env.adapters.judge_servers import chat_servers

    servers = [] if judge is None else chat_servers(judge)
    if not servers or config.judge is None:
        return JudgeLimits(service=asks_service(config)), []
    limits = [server.client.gate.limits for server in servers]

    def least(name: str) -> Any:
        return min(
            (v for v in (getattr(one, name) for one in limits) if v is not None), default=None
        )

    hits = sum(server.client.cache.hits for server in servers if server.client.cache is not None)
    cached = [
        f"{hits} replies came from the judge's cache: they cost nothing here, and the forecast "
        "takes the run's to be as cheap"
    ]
    found = JudgeLimits(
        concurrent=min(config.judge.concurrent, least("concurrent")),
        rpm=least("rpm"),
        tpm=least("tpm"),
        tokens=least("tokens"),
        usd=least("usd"),
        priced=any(server.client.prices is not None for server in servers),
        service=True,
    )
    return found, cached if hits else []
