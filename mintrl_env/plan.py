"""`mintrl plan`: what a run will take on so many GPUs, and what will hold it up, by simulation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mintrl_env import plan_split
from mintrl_env.config import RunConfig
from mintrl_env.driving import RolloutConfig
from mintrl_env.errors import ConfigError, UsageError
from mintrl_env.needs import EpisodeConfig
from mintrl_env.plan_figures import Figures, JudgeFigures, Sourced, TrainerFigures
from mintrl_env.plan_rows import Batches
from mintrl_env.plan_sim import JudgeSystem, Mode, Outcome, System, simulate
from mintrl_env.plan_split import Needs, Split
from mintrl_env.preflight_forecast import JudgeLimits
from mintrl_env.preflight_servers import is_judged

if TYPE_CHECKING:
    from mintrl_env.adapters.llm_limits import Limits, Prices

PARTS = ("policy", "judge", "verifier", "trainer", "sync")
_KINDS = {"keep": "instant", "oracle": "instant", "arithmetic": "instant",
          "scoring": "shared", "self": "shared"}  # fmt: skip
_LEAST_GAIN = 0.02


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
    mode: Mode = Mode()
    split: str = "auto"
    updates: int = 0
    scale_prompts: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.gpus or min(self.gpus) < 1:
            raise UsageError("--gpus takes counts >= 1, as 8,64,512")

    @property
    def skip(self) -> int:
        """Updates before a pipeline is full."""
        return {"sync": 0, "one-step": 2, "async": self.mode.max_lag + 2}[self.mode.name]

    @property
    def measured(self) -> int:
        return self.updates or (3 if self.mode.name == "sync" else 5)


def plan(config: RunConfig, sourced: Sourced, wanted: Wanted) -> dict[str, Any]:
    """Simulate a run of the config for each number of GPUs.

    Returns:
        `runs`: one entry a count (split, phases, the whole run); `figures`, `sources`,
        `assumptions`. All of it JSON-able.

    Raises:
        ConfigError, UsageError: figures, limits or splits that can't be used.
    """
    each = [_Planned(config, sourced.figures, wanted, gpus) for gpus in wanted.gpus]
    runs = [one.result() for one in each]
    return {
        "mode": wanted.mode.name,
        "max_lag": wanted.mode.max_lag if wanted.mode.name == "async" else None,
        "seed": wanted.seed,
        "judge_kind": judge_kind(config, sourced.figures),
        "runs": runs,
        "figures": _short(sourced.figures.model_dump(mode="json")),
        "sources": dict(sourced.sources),
        "assumptions": _assumptions(config, wanted),
        "notes": [note for run in runs for note in run["notes"]],
    }


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
class _Planned:
    """One number of GPUs."""

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

    @cached_property
    def batches(self) -> dict[bool, Batches]:
        """The rows with (True) and without a judge."""
        config, habits = self.config, self.figures.habits(instant=self.kind == "instant")
        episode = EpisodeConfig(
            chunk_tokens=config.episode.chunk_tokens,
            max_reviews=config.episode.max_reviews,
            max_correction=config.episode.max_correction,
            max_response=config.episode.max_response,
            spacing=config.episode.spacing,
        )
        return {
            judged: Batches(
                habits,
                episode,
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
        workers = max(1, round(figures.verifier.workers_per_gpu * self.gpus))
        sync = figures.sync.seconds + figures.sync.doubling_s * math.log2(split.engines)
        return System(
            policy=figures.policy.speed().times(factor("policy")),
            engines=split.engines,
            train_s=lambda tokens: train_factor * _learn(trainer, tokens, split.train, passes),
            sync_s=sync * factor("sync"),
            judge=self._judge(split, factor("judge")) if judged else None,
            # Twice as fast is twice the workers, where there are too few, and half of a score.
            verifier_workers=workers,
            verifier_factor=factor("verifier"),
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

        minute = replace(limits, rpm=grown(limits.rpm), tpm=grown(limits.tpm), tokens=None, usd=None)
        bounded = minute.rpm is not None or minute.tpm is not None
        return JudgeSystem(
            concurrent=limits.concurrent,
            booker=(lambda clock: Gate(minute, clock=clock)) if bounded else None,
            factor=factor,
        )

    def run(
        self, split: Split, judged: bool, *, faster: str = "", updates: int | None = None
    ) -> Outcome:
        wanted, skip = self.wanted, self.wanted.skip
        return simulate(
            self.system(split, judged, faster),
            self.batches[judged],
            wanted.mode,
            updates=skip + (updates or wanted.measured),
            skip=skip,
        )

    # --- results

    @cached_property
    def updates(self) -> tuple[int, int]:
        """With a judge, and without."""
        from mintrl_env.preflight import plan_of

        rows = plan_of(self.config)
        return rows.judged_updates, rows.updates - rows.judged_updates

    def phases(self) -> list[bool]:
        """Those that the run has, the one with the judge first."""
        return [judged for judged, n in zip((True, False), self.updates, strict=True) if n]

    def choose(self) -> Split:
        """The split with the shortest run."""
        sync = self.wanted.mode.name == "sync"
        found = plan_split.parse(self.wanted.split, self.gpus, self.needs(), sync=sync)
        if len(found) == 1:
            return found[0]
        weights = dict(zip((True, False), self.updates, strict=True))

        def seconds(split: Split) -> float:
            return sum(
                weights[judged] * self.run(split, judged, updates=1 if sync else 2).seconds
                for judged in self.phases()
            )

        return min(found, key=seconds)

    def result(self) -> dict[str, Any]:
        split = self.choose()
        phases = {judged: self.phase(split, judged) for judged in self.phases()}
        run = self.whole(phases)
        return {
            "gpus": self.gpus,
            "split": {**asdict(split), "text": str(split)},
            "prompts_per_update": self.prompts,
            "rows_per_update": self.prompts * self.config.group_size,
            "judged": phases.get(True),
            "plain": phases.get(False),
            "run": run,
            "notes": self.notes(phases, run, split),
        }

    def phase(self, split: Split, judged: bool) -> dict[str, Any]:
        outcome = self.run(split, judged)
        window, rows, n = outcome.window, outcome.rows, outcome.updates
        sampled = sum(row.sampled for row in rows)
        reviews = [review for row in rows for review in row.reviews] if judged else []
        corrected = [row for row in rows if row.reviews]
        responses = sum(row.response for row in corrected)
        lag_rows = sum(outcome.lags.values())
        gains = self.gains(split, judged, outcome.seconds)
        best = max(gains, key=lambda part: gains[part])
        return {
            "update_s": outcome.seconds,
            "rollout_s": outcome.rollout_s,
            "tail_s": outcome.tail_s,
            "train_s": window.train_s / n,
            "sync_s": window.sync_s / n,
            "trajectories_per_s": len(rows) / window.at,
            "tokens_per_s": sampled / window.at,
            "rows_at_once": window.row_steps / window.steps if window.steps else 0.0,
            "idle": self.idle(split, outcome, judged),
            "sync_share": window.sync_s / window.at,
            "per_update": {
                "policy_tokens": sampled / n,
                "learnt_tokens": sum(row.prompt + row.response for row in rows) / n,
                "reviews": len(reviews) / n,
                **{k: v / n for k, v in self.usage(reviews).items() if v is not None},
            },
            "off_policy_fraction_intervened": sum(row.corrected for row in corrected) / responses
            if responses
            else None,
            "truncated_share": sum(row.truncated for row in rows) / len(rows),
            "late_share": window.late / max(1, window.ended),
            "lags": {str(lag): count / lag_rows for lag, count in outcome.lags.items()},
            "lag_mean": sum(lag * count for lag, count in outcome.lags.items()) / max(1, lag_rows),
            "lag_max": max(outcome.lags, default=0),
            "gains": gains,
            "bottleneck": best if gains[best] >= _LEAST_GAIN else "none",
        }

    def gains(self, split: Split, judged: bool, seconds: float) -> dict[str, float]:
        """What an update would gain, as a share, if one part took half its time."""
        parts = [p for p in PARTS if p != "judge" or (judged and self.kind in ("service", "own"))]
        return {p: 1 - self.run(split, judged, faster=p).seconds / seconds for p in parts}

    def usage(self, reviews: Sequence[Any]) -> dict[str, float | None]:
        """Calls, tokens and money of reviews; money None where there are no prices."""
        prompt = sum(review.prompt_tokens for review in reviews)
        completion = sum(review.completion_tokens for review in reviews)
        prices = self.limits[1]
        calls = sum(review.calls for review in reviews) if self.kind == "service" else 0
        return {
            "judge_calls": calls,
            "judge_prompt_tokens": prompt,
            "judge_completion_tokens": completion,
            "judge_usd": None if prices is None else prices.usd(prompt, completion),
        }

    def idle(self, split: Split, outcome: Outcome, judged: bool) -> dict[str, float | None]:
        """The share of its time in which each part has nothing to do."""
        window, figures = outcome.window, self.figures
        seconds = window.at
        workers = max(1, round(figures.verifier.workers_per_gpu * self.gpus))
        judge = None
        if judged and self.kind == "service":
            judge = 1 - window.judge_busy / (self.limits[0].concurrent * seconds)
        elif judged and self.kind == "own":
            judge = 1 - window.judge_busy / (split.judge_engines * seconds)
        engine = figures.policy.gpus
        judge_gpus = figures.judge.engine.gpus if figures.judge.engine and split.judge else 0
        busy = (
            engine * window.policy_busy
            + judge_gpus * (window.judge_busy if judged else 0.0)
            + split.train * window.train_s
            + split.policy * window.sync_s
        )
        return {
            "policy": 1 - window.policy_busy / (split.engines * seconds),
            "judge": judge,
            "verifier": 1 - window.verifier_busy / (workers * seconds),
            "trainer": 1 - window.train_s / seconds,
            "gpus": 1 - busy / (self.gpus * seconds),
        }

    def whole(self, phases: Mapping[bool, Mapping[str, Any]]) -> dict[str, Any]:
        """The whole run: first with the judge, then without."""
        counts = dict(zip((True, False), self.updates, strict=True))

        def total(name: str) -> float:
            return sum(counts[judged] * p["per_update"].get(name, 0.0) for judged, p in phases.items())

        hours = {judged: counts[judged] * p["update_s"] / 3600 for judged, p in phases.items()}
        price = self.figures.gpu_usd_per_hour
        priced = self.kind == "service" and self.limits[1] is not None
        whole = sum(hours.values())
        return {
            "judged_updates": counts[True],
            "plain_updates": counts[False],
            "judged_hours": hours.get(True, 0.0),
            "plain_hours": hours.get(False, 0.0),
            "hours": whole,
            "gpu_hours": whole * self.gpus,
            "gpu_usd": None if price is None else whole * self.gpus * price,
            "policy_tokens": round(total("policy_tokens")),
            "reviews": round(total("reviews")),
            "judge_calls": round(total("judge_calls")),
            "judge_prompt_tokens": round(total("judge_prompt_tokens")),
            "judge_completion_tokens": round(total("judge_completion_tokens")),
            "judge_usd": total("judge_usd") if priced else None,
        }

    def notes(
        self, phases: Mapping[bool, Mapping[str, Any]], run: Mapping[str, Any], split: Split
    ) -> list[str]:
        """What should be looked at."""
        from mintrl_env.preflight_figures import _forecast_notes

        found, limits = [], self.limits[0]
        late = max(phase["late_share"] for phase in phases.values())
        if late:
            found.append(
                f"{100 * late:.2g} % of the rows end by rollout.deadline_s "
                f"({self.config.rollout.deadline_s:g} s): raise it, or shorten what they wait for"
            )
        if split.gpus < self.gpus:
            found.append(f"{self.gpus - split.gpus} GPUs are left over by the split ({split})")
        rows = self.prompts * self.config.group_size
        if rows < 2 * split.engines:
            found.append(
                f"an update's {rows:,} rows are few for {split.engines} engines: with "
                "--scale-prompts (or --set train.prompts_per_update=...) more GPUs do more work"
            )
        phase = phases.get(True)
        if phase and phase["bottleneck"] == "judge" and self.kind == "service":
            found.append(
                f"the judge holds the run up: {limits.concurrent} reviews at once (judge.concurrent, "
                f"judge.options.limits), rpm {limits.rpm or '-'}, tpm {limits.tpm or '-'}"
            )
        if self.kind == "service":
            bounds = JudgeLimits(tokens=limits.tokens, usd=limits.usd)
            usage = {
                "limits": asdict(bounds),
                "usd": run["judge_usd"],
                "prompt_tokens": run["judge_prompt_tokens"],
                "completion_tokens": run["judge_completion_tokens"],
            }
            found += _forecast_notes(usage)
        return [f"{self.gpus} GPUs: {note}" for note in found]


def _learn(trainer: TrainerFigures, tokens: Sequence[int], gpus: int, passes: int) -> float:
    return trainer.seconds(sum(tokens), max(tokens), gpus, passes)


def _assumptions(config: RunConfig, wanted: Wanted) -> list[str]:
    lines = [
        "a policy that learns may come to write longer or shorter responses, and to need fewer "
        "corrections; here every update is like the first",
        "evaluations, probes, checkpoints, failures and retries are not in the hours",
        "rows stay with their engine; an engine that runs out of KV memory is not simulated: "
        "policy.slots has to fit",
    ]
    if wanted.mode.name == "async":
        lines.append("rows in flight go on with the new weights after a sync")
    if config.rollout.n_intervened and is_judged(config) and RolloutConfig().max_retries:
        lines.append("a review that fails, or is asked again, is not simulated")
    return lines


def _short(data: Any) -> Any:
    """Figures for people: measured values as their quantiles."""
    if isinstance(data, dict):
        values = data.get("values")
        if isinstance(values, list):
            at = np.quantile(values, (0.05, 0.5, 0.95))
            return {"measured": len(values), "p5": at[0], "p50": at[1], "p95": at[2]}
        return {key: _short(value) for key, value in data.items() if value is not None}
    if isinstance(data, float) and math.isinf(data):
        return None
    return data
