"""What a config asks of so many GPUs, as something that can be simulated."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from mintrl_env.config import RunConfig
from mintrl_env.errors import ConfigError, UsageError
from mintrl_env.plan_figures import Figures, JudgeFigures, TrainerFigures
from mintrl_env.plan_rows import Batches
from mintrl_env.plan_sim import simulate
from mintrl_env.plan_split import Needs, Split
from mintrl_env.plan_system import JudgeSystem, Mode, Outcome, System
from mintrl_env.preflight_servers import is_judged
from mintrl_env.recipes import episode_config

if TYPE_CHECKING:
    from mintrl_env.adapters.llm_limits import Limits, Prices

_KINDS = {"keep": "instant", "oracle": "instant", "arithmetic": "instant",
          "scoring": "shared", "self": "shared"}  # fmt: skip
_MANY = 4096


@dataclass(frozen=True)
class Wanted:
    """What is asked.

    Attributes:
        gpus: the counts to plan for.
        mode: when rows may begin.
        split: auto, colocated or TRAIN:POLICY[:JUDGE].
        updates: simulated for each figure; 0: as many as the mode needs.
        scale_prompts: an update's prompts grow with the GPUs, from the first count on.
        seed: of all draws.
    """

    gpus: Sequence[int]
    mode: Mode = field(default_factory=Mode)
    split: str = "auto"
    updates: int = 0
    scale_prompts: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.gpus or min(self.gpus) < 1:
            raise UsageError("--gpus takes counts >= 1, as 8,64,512")

    def window(self, short: bool, rows: int) -> tuple[int, int]:
        """Updates that are simulated first and not looked at, and those that are looked at after.

        Asynchronous runs come in bursts of max_lag + 1 updates, since as many begin together: a
        window holds whole bursts. Short ones compare; they count from the start, which all share.

        Args:
            rows: of an update; very many say enough in one.
        """
        if self.mode.name == "sync":
            return (0, 1) if short else (0, self.updates or (3 if rows < _MANY else 1))
        if self.mode.name == "one-step":
            return (0, 3) if short else (2, self.updates or 4)
        burst = max(2, self.mode.max_lag + 1)
        return (0, 2 * burst) if short else (2 * burst, self.updates or max(4, 2 * burst))


def judge_kind(config: RunConfig, figures: Figures) -> str | None:
    """service, own, shared or instant; None: nobody reviews."""
    if config.judge is None or not is_judged(config):
        return None
    kind = figures.judge.kind
    return _KINDS.get(config.judge.name, "service") if kind == "auto" else kind


def judge_limits(config: RunConfig, figures: JudgeFigures) -> tuple[Limits, Prices | None]:
    """What the judge's calls may use: the figures' own limits, else those of the config's judge.

    Raises:
        ConfigError: the config's limits or prices are not what the judge takes.
    """
    from mintrl_env.adapters.llm_limits import Limits, Prices

    section = config.judge
    options = section.options if section is not None else {}
    try:
        limits = Limits(**(options.get("limits") or {}))
        prices = Prices(**options["prices"]) if options.get("prices") else None
    except (TypeError, UsageError) as error:
        raise ConfigError(f"judge.options.limits or prices: {error}") from error
    bound = section.concurrent if section is not None else limits.concurrent
    # The runner bounds reviews whatever their judge is; only a service has the client's bound too.
    if options.get("limits"):
        bound = min(bound, limits.concurrent)
    limits = replace(
        limits,
        concurrent=figures.concurrent or bound,
        rpm=figures.rpm or limits.rpm,
        tpm=figures.tpm or limits.tpm,
    )
    if figures.prices is not None:
        prices = Prices(figures.prices.prompt, figures.prices.completion)
    return limits, prices


@dataclass(frozen=True)
class Planned:
    """One number of GPUs.

    Raises, where its parts are asked for:
        ConfigError: figures or limits that can't be used.
    """

    config: RunConfig
    figures: Figures
    wanted: Wanted
    gpus: int

    @cached_property
    def kind(self) -> str | None:
        return judge_kind(self.config, self.figures)

    @cached_property
    def limits(self) -> tuple[Limits, Prices | None]:
        return judge_limits(self.config, self.figures.judge)

    @cached_property
    def prompts(self) -> int:
        prompts = self.config.train.prompts_per_update
        if self.wanted.scale_prompts:
            prompts = max(1, round(prompts * self.gpus / self.wanted.gpus[0]))
        return prompts

    def workers(self, split: Split) -> int:
        """Scores at once: what the machines can do, no more than the training processes, of which
        each training GPU has one, let begin."""
        machines = max(1, round(self.figures.verifier.workers_per_gpu * self.gpus))
        return min(machines, self.config.rollout.verifier_concurrent * split.train)

    @cached_property
    def batches(self) -> dict[bool, Batches]:
        """The rows with (True) and without a judge."""
        config, habits = self.config, self.figures.habits(instant=self.kind == "instant")
        return {
            judged: Batches(
                habits,
                episode_config(config),
                self.prompts,
                config.rollout.n_control,
                config.rollout.n_intervened,
                judged,
                self.wanted.seed,
            )
            for judged in (True, False)
        }

    # --- the system

    def needs(self) -> Needs:
        engine = self.figures.judge.engine
        if self.kind == "own" and engine is None:
            raise ConfigError("judge.kind own: judge.engine says how fast its engines are")
        judge = engine.gpus if self.kind == "own" and engine is not None else 0
        return Needs(self.figures.policy.gpus, judge, self.figures.trainer.min_gpus)

    def system(self, split: Split, judged: bool, faster: str = "") -> System:
        """The machines; the part `faster` takes half its time."""
        figures, passes = self.figures, self.config.train.iterations

        def factor(part: str) -> float:
            return 0.5 if part == faster else 1.0

        trainer, train_factor = figures.trainer, factor("trainer")
        sync = figures.sync.seconds + figures.sync.doubling_s * math.log2(split.engines)
        return System(
            policy=figures.policy.speed().times(factor("policy")),
            engines=split.engines,
            train_s=lambda tokens: train_factor * _learn(trainer, tokens, split.train, passes),
            sync_s=sync * factor("sync"),
            judge=self._judge(split, factor("judge")) if judged else None,
            verifier_workers=self.workers(split),
            verifier_factor=factor("verifier"),
            in_flight=(figures.policy.in_flight or sys.maxsize) * split.engines,
            prefix_cache=figures.policy.prefix_cache,
            deadline_s=self.config.rollout.deadline_s,
        )

    def _judge(self, split: Split, factor: float) -> JudgeSystem:
        limits, engine = self.limits[0], self.figures.judge.engine
        if self.kind == "shared":
            return JudgeSystem(concurrent=limits.concurrent, shared=True)
        if self.kind == "own" and engine is not None:
            return JudgeSystem(
                concurrent=limits.concurrent,
                engine=engine.speed().times(factor),
                engines=split.judge_engines,
            )
        from mintrl_env.adapters.llm_limits import Gate

        def grown(limit: int | None) -> int | None:
            return None if limit is None else round(limit / factor)

        minute = replace(
            limits, rpm=grown(limits.rpm), tpm=grown(limits.tpm), tokens=None, usd=None
        )
        bounded = minute.rpm is not None or minute.tpm is not None
        return JudgeSystem(
            concurrent=limits.concurrent,
            booker=(lambda clock: Gate(minute, clock=clock)) if bounded else None,
            factor=factor,
        )

    def run(self, split: Split, judged: bool, *, faster: str = "", short: bool = False) -> Outcome:
        rows = self.prompts * self.config.group_size
        skip, updates = self.wanted.window(short, rows)
        return simulate(
            self.system(split, judged, faster),
            self.batches[judged],
            self.wanted.mode,
            updates=skip + updates,
            skip=skip,
        )


def _learn(trainer: TrainerFigures, tokens: Sequence[int], gpus: int, passes: int) -> float:
    return trainer.seconds(sum(tokens), max(tokens), gpus, passes)
