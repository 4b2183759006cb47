"""`mintrl plan`: what a run will take on so many GPUs, and what will hold it up, by simulation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mintrl_env import plan_split
from mintrl_env.config import RunConfig
from mintrl_env.plan_figures import Sourced
from mintrl_env.plan_machines import Planned, Wanted, judge_kind
from mintrl_env.plan_split import Split
from mintrl_env.plan_system import Outcome
from mintrl_env.preflight_forecast import JudgeLimits, budget_notes
from mintrl_env.preflight_servers import is_judged

__all__ = ["Wanted", "plan"]

PARTS = ("policy", "judge", "verifier", "trainer", "sync")
_LEAST_GAIN = 0.02


def plan(config: RunConfig, sourced: Sourced, wanted: Wanted) -> dict[str, Any]:
    """Simulate a run of the config for each number of GPUs.

    Returns:
        `runs`: one entry a count (split, phases, the whole run); `figures`, `sources`,
        `assumptions`. All of it JSON-able.

    Raises:
        ConfigError, UsageError: figures, limits or splits that can't be used.
    """
    each = [_Results(config, sourced.figures, wanted, gpus) for gpus in wanted.gpus]
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


@dataclass(frozen=True)
class _Results(Planned):
    """The figures of one number of GPUs."""

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
        """The split with the shortest update, of one with the judge where there are such."""
        sync = self.wanted.mode.name == "sync"
        found = plan_split.parse(self.wanted.split, self.gpus, self.needs(), sync=sync)
        if len(found) == 1:
            return found[0]
        judged = self.phases()[0]
        found.sort(key=lambda split: self.run(split, judged, short=True).seconds)
        if sync:
            return found[0]
        # From the start on, filling the pipeline weighs too much: the best have a closer look.
        return min(found[:3], key=lambda split: self.run(split, judged).seconds)

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
        gains = self.gains(split, judged)
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

    def gains(self, split: Split, judged: bool) -> dict[str, float]:
        """What an update would gain, as a share, if one part took half its time."""
        parts = [p for p in PARTS if p != "judge" or (judged and self.kind in ("service", "own"))]
        short = self.wanted.mode.name != "sync"

        def seconds(faster: str) -> float:
            return self.run(split, judged, faster=faster, short=short).seconds

        now = seconds("")
        return {part: 1 - seconds(part) / now for part in parts}

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
            "verifier": 1 - window.verifier_busy / (self.workers(split) * seconds),
            "trainer": 1 - window.train_s / seconds,
            "gpus": 1 - busy / (self.gpus * seconds),
        }

    def whole(self, phases: Mapping[bool, Mapping[str, Any]]) -> dict[str, Any]:
        """The whole run: first with the judge, then without."""
        counts = dict(zip((True, False), self.updates, strict=True))

        def total(name: str) -> float:
            parts = (
                counts[judged] * p["per_update"].get(name, 0.0) for judged, p in phases.items()
            )
            return float(sum(parts))

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
            found += budget_notes(usage)
        return [f"{self.gpus} GPUs: {note}" for note in found]


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
    if is_judged(config):
        lines.append("a review that fails, or is asked again, is not simulated")
    return lines


def _short(data: Any) -> Any:
    """Figures for people: measured values as their quantiles."""
    if isinstance(data, dict):
        values = data.get("values")
        if isinstance(values, list):
            at = np.quantile(values, (0.05, 0.5, 0.95))
            return dict(
                zip(("measured", "p5", "p50", "p95"), (len(values), *map(float, at)), strict=True)
            )
        return {key: _short(value) for key, value in data.items() if value is not None}
    if isinstance(data, float) and math.isinf(data):
        return None
    return data
