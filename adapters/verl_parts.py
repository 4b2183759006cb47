"""What an agent loop needs beside veRL: prompts, judge, guards, verifier, runner, from plain mappings.

Nothing here imports veRL. veRL makes a new loop object for every trajectory, so the runner, and with
it the judge's connections and its limit of calls in flight, is kept once a process (`runner_for`).
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

from mintrl_env.adapters.judge_servers import refuse_unreachable
from mintrl_env.adapters.model_ends import model_ends
from mintrl_env.adapters.verl_names import NEEDS_MODEL
from mintrl_env.adapters.verl_policy import ServerManagerPolicy
from mintrl_env.episode import EpisodeConfig
from mintrl_env.errors import ConfigError, MintrlError, MissingExtraError
from mintrl_env.prompts import HFTokenizer, PromptBuilder
from mintrl_env.protocols import Guard, Judge, Sampling, Verifier
from mintrl_env.registry import resolve
from mintrl_env.reviewing import check_judge
from mintrl_env.rollout import Parts, RolloutConfig, Runner
from mintrl_env.scoring import answers_right
from mintrl_env.types import ReviewRequest, Score, Task, Verdict

START_S = 600.0
"""Seconds that the trainer waits for the judge's server before its first step, unless told."""
_JUDGE = ("name", "domain", "options", "guards", "timeout_s", "start_s")
_RUNNERS: dict[Any, tuple[Runner, Any]] = {}


@dataclass(frozen=True)
class LoopSettings:
    """The keys of the agent loop's YAML entry, beside `name` and `_target_`.

    Attributes:
        prompts: of PromptBuilder: system_prompt, template, chat, chat_template_kwargs.
        extra_eos: ids that end a response beside the tokenizer's own EOS; those of the model's
            generation config are taken anyway.
        episode: of EpisodeConfig (chunk_tokens, max_reviews, ...); `max_response` is veRL's
            `rollout.response_length`.
        rollout: of RolloutConfig (deadline_s, max_retries, on_judge_failure, judge_concurrency, ...);
            group sizes and temperature are veRL's.
        judge: {name, domain, options, guards, timeout_s, start_s}; none: nobody reviews. `domain`
            is "math" or "code", for a chat judge's prompts; `timeout_s` is of a review; `start_s` is
            how long the trainer waits before step 1 for the judge's server to come up.
        verifier: {name, options}; name "task" (default) takes each task's own. None: veRL's reward
            loop scores (`mintrl_env.adapters.verl_score`).
        seed: of the rows' keys.
    """

    prompts: Mapping[str, Any] = field(default_factory=dict)
    extra_eos: Sequence[int] = ()
    episode: Mapping[str, Any] = field(default_factory=dict)
    rollout: Mapping[str, Any] = field(default_factory=dict)
    judge: Mapping[str, Any] | None = None
    verifier: Mapping[str, Any] | None = field(default_factory=lambda: {"name": "task"})
    seed: int = 0


def settings_of(entry: Mapping[str, Any]) -> LoopSettings:
    """Settings from plain values, a null as the default (of the verifier: veRL's reward loop).

    Raises:
        ConfigError: a key that the loop does not know.
    """
    _known("agent loop", entry, [each.name for each in fields(LoopSettings)])
    given = {k: v for k, v in entry.items() if v is not None or k == "verifier"}
    return LoopSettings(**given)


@dataclass(frozen=True)
class VerlLimits:
    """What veRL's own config fixes: T, the longest prompt, the temperature, N_c and N_c + N_m."""

    max_response: int
    max_prompt: int
    temperature: float
    n_control: int
    group_size: int


class DeadlineJudge:
    """A judge whose every review ends: after `seconds` it is recorded as failed ("timeout")."""

    def __init__(self, judge: Judge, seconds: float) -> None:
        if not seconds > 0:
            raise ConfigError(f"judge.timeout_s must be positive, not {seconds}")
        self._judge, self._seconds = judge, seconds

    async def review(self, request: ReviewRequest) -> Verdict:
        async with asyncio.timeout(self._seconds):
            return await self._judge.review(request)


class TaskVerifier:
    """Scores by the verifier that each task names."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    async def score(self, task: Task, response: str) -> Score:
        return await self._verifier(task.verifier).score(task, response)

    @lru_cache(maxsize=16)  # noqa: B019 (one object a process)
    def _verifier(self, name: str) -> Verifier:
        made: Verifier = _make("verifier.options", resolve("verifier", name), self._options)
        return made


def tokenizer_of(hf: Any, model_path: str | None, extra_eos: Sequence[int]) -> HFTokenizer:
    """The policy's tokenizer, with the ends of its generation config, as the other trainers have."""
    return HFTokenizer(hf, [*_generation_ends(model_path), *extra_eos])


@lru_cache(maxsize=8)
def _generation_ends(model_path: str | None) -> tuple[int, ...]:
    if not model_path:
        return ()
    try:
        return tuple(model_ends(model_path))
    except ConfigError:  # it names none
        return ()


def prompt_builder(
    settings: LoopSettings, tokenizer: HFTokenizer, limits: VerlLimits
) -> PromptBuilder:
    """The prompts of every path.

    Raises:
        ConfigError: an unknown key or a value that PromptBuilder refuses.
    """
    return _made(
        "prompts", PromptBuilder, {"chat": True, **settings.prompts},
        tokenizer=tokenizer, max_prompt=limits.max_prompt,
    )  # fmt: skip


def rollout_config(settings: LoopSettings, limits: VerlLimits) -> RolloutConfig:
    """The driver's limits.

    Raises:
        ConfigError: an unknown key, or one that is veRL's to set.
    """
    episode = _made("episode", EpisodeConfig, settings.episode, max_response=limits.max_response)
    if episode.turns:
        raise ConfigError("episode.turns: environments are not offered under veRL")
    return _made(
        "rollout", RolloutConfig, settings.rollout,
        episode=episode,
        sampling=Sampling(limits.temperature),
        n_control=limits.n_control,
        n_intervened=limits.group_size - limits.n_control,
    )  # fmt: skip


def judge_of(
    settings: LoopSettings, tokenizer: HFTokenizer, verifier: Verifier | None
) -> tuple[Judge | None, list[Guard]]:
    """The judge, with a deadline for each review, and its guards.

    Raises:
        ConfigError: a judge that needs its model in this process (serve it: judge `llm`), an option
            that nobody knows, a server that other machines cannot reach.
    """
    section = settings.judge
    if section is None:
        return None, []
    _known("judge", section, _JUDGE)
    name = section.get("name")
    if name is None or name in NEEDS_MODEL:
        raise ConfigError(
            f"judge.name: {name!r} needs a model in this process, which agent loops have not: serve "
            "the judge's model and name the judge llm, or give package.module:Class"
        )
    options = dict(section.get("options") or {})
    if options.get("run_tests"):
        options["run_tests"] = _public_tests(options["run_tests"], settings.verifier)
    offered = {
        "delimiters": tuple(
            settings.episode.get("step_delimiters", EpisodeConfig().step_delimiters)
        ),
        "tokenizer": tokenizer,
        "domain": section.get("domain", "math"),
    }
    judge = _make("judge.options", resolve("judge", name), options, **offered)
    check_judge(judge)
    refuse_unreachable(judge)

    guards = [
        _make(
            f"judge.guards.{name}", resolve("guard", name), options or {},
            tokenizer=tokenizer, same_answer=None if verifier is None else answers_right(verifier),
        )
        for name, options in dict(section.get("guards", {"leak": {}})).items()
    ]  # fmt: skip
    return DeadlineJudge(judge, float(section.get("timeout_s", 300.0))), guards


def _public_tests(count: Any, verifier: Mapping[str, Any] | None) -> Any:
    """Runs a code task's first tests for the judge, as the verifier would."""
    from mintrl_env.verifiers.code_public import PublicTests

    options = {k: v for k, v in ((verifier or {}).get("options") or {}).items() if k != "reward"}
    return _make("judge.options.run_tests", PublicTests, {"count": count, **options})


def verifier_of(settings: LoopSettings) -> Verifier | None:
    """The verifier that scores inside the loop; None: veRL's reward loop does."""
    section = settings.verifier
    if section is None:
        return None
    _known("verifier", section, ("name", "options"))
    name, options = section.get("name", "task"), dict(section.get("options") or {})
    if name == "task":
        return TaskVerifier(**options)
    made: Verifier = _make("verifier.options", resolve("verifier", name), options)
    return made


def runner_for(
    settings: LoopSettings,
    limits: VerlLimits,
    prompts: PromptBuilder,
    manager: Any,
    params: Mapping[str, Any],
) -> Runner:
    """This process's runner for these settings and sampling parameters, on the running event loop.

    Raises:
        ConfigError: see `judge_of`, `rollout_config`.
    """
    key = (
        json.dumps([vars(settings), vars(limits), dict(params)], sort_keys=True, default=str),
        id(manager),
        asyncio.get_running_loop(),
    )
    if key not in _RUNNERS:
        tokenizer = prompts.tokenizer
        assert isinstance(tokenizer, HFTokenizer)
        verifier = verifier_of(settings)
        judge, guards = judge_of(settings, tokenizer, verifier)
        policy = ServerManagerPolicy(manager, tokenizer, params)
        runner = Runner(
            Parts(policy, judge, guards, verifier),
            prompts,
            rollout_config(settings, limits),
            seed=settings.seed,
        )
        _RUNNERS[key] = runner, manager  # the manager is kept, so that its id stays its own
    return _RUNNERS[key][0]


def _made(where: str, kind: Callable[..., Any], given: Mapping[str, Any], **fixed: Any) -> Any:
    taken = [name for name in given if name in fixed]
    if taken:
        raise ConfigError(f"{where}.{taken[0]}: is set by veRL's own config; leave it out")
    return _make(where, kind, given, **fixed)


def _make(where: str, kind: Callable[..., Any], options: Mapping[str, Any], **offered: Any) -> Any:
    """`kind(**options)`, with what it also asks for out of `offered`."""
    parameters = inspect.signature(kind).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if not takes_any:
        _known(where, options, [name for name in parameters if name != "self"])
    more = {k: v for k, v in offered.items() if k in parameters and k not in options}
    try:
        return kind(**options, **more)
    except MissingExtraError:
        raise
    except (TypeError, ValueError, MintrlError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _known(where: str, given: Mapping[str, Any], names: Sequence[str]) -> None:
    unknown = [name for name in given if name not in names]
    if unknown:
        raise ConfigError(
            f"{where}.{unknown[0]}: no such key; known keys: {', '.join(names) or 'none'}"
        )
