"""`mintrl calibrate`: the pilot before a run. kappa, and what (k, R, L) bring for how much of the text.

The config's judge reviews rollouts of the config's policy; nothing is learnt. Every point of the sweep
runs the same tasks with the same draws, and has the same controls.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mintrl_env import judge_recipes, recipes
from mintrl_env.calibrate_plot import BEST, write_plot
from mintrl_env.config import RunConfig
from mintrl_env.console import RunConsole
from mintrl_env.errors import ConfigError, JudgeError, UsageError
from mintrl_env.judge_bench import BENCH
from mintrl_env.judge_tables import gain_line
from mintrl_env.judging import group_gain
from mintrl_env.kappa import RecordingEngine, Written, kappa_figures, watch_chats
from mintrl_env.protocols import Judge
from mintrl_env.run_folder import RunFolder, write_json, write_text
from mintrl_env.running import open_policy
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Outcome, Provenance, Task, frozen_ids

if TYPE_CHECKING:
    from mintrl_env.adapters.session import EngineHost, JudgeFactory, RolloutSession

Limits = tuple[int, int, int]
"""(k, R, L): chunk_tokens, max_reviews, max_correction."""

_FEW = 30  # corrections
OWN, STAND_IN = "the judge's own log-probs", "a stand-in: the policy's log-probs"


def calibrate(
    config: RunConfig,
    folder: RunFolder,
    *,
    tasks: int = 16,
    points: Sequence[Limits] = (),
    console: RunConsole | None = None,
) -> dict[str, Any]:
    """Run the pilot and the sweep; write calibrate.json, calibrate.png and calibrate.yaml.

    Args:
        tasks: so many of the config's, from the first on, a whole group each.
        points: what is tried beside the config's own (k, R, L); see `star` and `grid`.

    Returns:
        The figures: `points` (the config's own first), `chosen`, `kappa`, `source`, `yaml`.

    Raises:
        ConfigError: no judge, or no controls to compare with. JudgeError: it failed too often.
    """
    if config.judge is None:
        raise ConfigError("judge: the config names none, so there is nothing to calibrate")
    if not (config.rollout.n_control and config.rollout.n_intervened):
        raise ConfigError("rollout: a gain needs n_control and n_intervened of at least 1")
    console = console or RunConsole()
    folder.check(config, resume=None)
    chosen_tasks = recipes.load_task_set(config.tasks, "tasks", seed=config.train.seed)[:tasks]
    pilot = _open(config, chosen_tasks, console)
    own = (
        config.episode.chunk_tokens,
        config.episode.max_reviews,
        config.episode.max_correction,
    )
    order = list(dict.fromkeys([own, *points]))
    folder.open(config, resume=False, asked={"tasks": len(chosen_tasks), "points": len(order)})
    with closing(folder), pilot.session as session:
        rows = config.rollout
        total = rows.n_control + rows.n_intervened * len(order)
        with console.bar("pilot", total * len(chosen_tasks)) as advance:
            done = 0

            def run(first: int, last: int, reviewed: bool) -> list[list[Trajectory]]:
                nonlocal done
                start = done
                groups = session.groups(
                    chosen_tasks,
                    update=BENCH,
                    reviewed=reviewed,
                    rollouts=[range(first, last)] * len(chosen_tasks),
                    on_progress=lambda n, of: advance(start + n, ""),
                )
                done += (last - first) * len(chosen_tasks)
                return groups

            controls = run(0, rows.n_control, False)
            found = []
            for limits in order:
                pilot.set_limits(limits)
                groups = run(rows.n_control, config.group_size, True)
                found.append(_point(limits, pilot, controls, groups, config))
        figures = _result(found, config, len(chosen_tasks))
        write_json(folder.path / "calibrate.json", figures)
        write_text(folder.path / "calibrate.yaml", figures["yaml"])
        write_plot(figures["points"], figures["chosen"], folder.path / "calibrate.png")
        folder.write_summary(figures)
    return figures


# --- points


def star(config: RunConfig) -> list[Limits]:
    """Each of k, R and L halved and doubled, the others as the config has them."""
    section = config.episode
    own = (section.chunk_tokens, section.max_reviews, section.max_correction)
    points = []
    for place in range(3):
        for value in (max(1, own[place] // 2), 2 * own[place]):
            changed = list(own)
            changed[place] = min(value, section.max_response)
            points.append((changed[0], changed[1], changed[2]))
    return list(dict.fromkeys(p for p in points if p != own))


def grid(config: RunConfig, k: str | None, r: str | None, l: str | None) -> list[Limits]:  # noqa: E741
    """All combinations of lists such as "12,24"; what is None stays as the config has it.

    Raises:
        UsageError: no list of positive numbers, or over 64 points.
    """
    section = config.episode
    own = (section.chunk_tokens, section.max_reviews, section.max_correction)
    lists = []
    for name, text, value in zip(("--k", "--r", "--l"), (k, r, l), own, strict=True):
        if text is not None and not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
            raise UsageError(f"{name} takes numbers from 1 with commas between, not {text!r}")
        lists.append([value] if text is None else [int(part) for part in text.split(",")])
    points = list(itertools.product(*lists))
    if len(points) > 64:
        raise UsageError(f"{len(points)} points are too many for a pilot: give shorter lists")
    return [(a, b, c) for a, b, c in points]


# --- the pilot


@dataclass
class _Pilot:
    """A session whose judge is listened to.

    Attributes:
        written: the corrections noted since the last `take`.
    """

    session: RolloutSession
    written: list[Written] = field(default_factory=list)

    def set_limits(self, limits: Limits) -> None:
        runner = self.session.runner
        k, r, l = limits  # noqa: E741
        episode = replace(runner.config.episode, chunk_tokens=k, max_reviews=r, max_correction=l)
        runner.config = replace(runner.config, episode=episode)

    def take(self) -> list[Written]:
        taken, self.written[:] = list(self.written), []
        return taken

    def policy_logprobs(self, groups: Sequence[Sequence[Trajectory]]) -> list[Written]:
        """What the policy itself gives each correction that stands in a row."""
        rows = [row for rows in groups for row in rows if row.count(Provenance.INTERVENTION)]

        async def score() -> list[Written]:
            found = []
            for row in rows:
                ids = frozen_ids(np.concatenate([row.prompt_ids, row.ids]))
                logprobs = await self.session.engine.logprobs(ids, len(row.prompt_ids))
                for review in row.reviews:
                    if review.outcome is Outcome.REVISE and review.correction_tokens:
                        span = logprobs[review.cut : review.cut + review.correction_tokens]
                        total = float(np.sum(span, dtype=np.float64))
                        found.append(Written(total, review.correction_tokens))
            return found

        return self.session.run(score) if rows else []


def _open(config: RunConfig, tasks: Sequence[Task], console: RunConsole) -> _Pilot:
    from mintrl_env.adapters.session import RolloutSession

    assert config.judge is not None
    verifier = recipes.make_verifier(config.tasks, tasks, "tasks")
    with console.bar("models", 1) as advance:
        judge = judge_recipes.make_judge(config, recipes.warmup_note(advance))
        host = open_policy(config, progress=recipes.warmup_note(advance))
        advance(1, "")
    assert judge is not None
    recipes.check_prompts(host.prompts, tasks)
    written: list[Written] = []
    session = RolloutSession(
        host,
        recipes.rollout_config(config),
        judge=_listened(judge, host, written.append),
        guards=judge_recipes.make_guards(config.judge, host.tokenizer, verifier),
        verifier=verifier,
        seed=config.train.seed,
    )
    return _Pilot(session, written)


def _listened(
    judge: Judge | JudgeFactory, host: EngineHost, note: Callable[[Written], object]
) -> Judge | JudgeFactory:
    """The judge, with recorders in front of its engines and its chat models."""
    if isinstance(judge, Judge):
        watch_chats(judge, host.tokenizer, note)
        return judge
    factory = judge

    def made(host: EngineHost) -> tuple[Judge, Sequence[Any]]:
        inner, engines = factory(_listening_host(host, note))
        watch_chats(inner, host.tokenizer, note)
        return inner, engines

    return made


def _listening_host(host: EngineHost, note: Callable[[Written], object]) -> EngineHost:
    from mintrl_env.adapters.session import EngineHost

    class ListeningHost(EngineHost):
        """Whatever a judge makes its engines from, it gets recorders."""

        def engine(self, *args: Any, **options: Any) -> Any:
            engine = super().engine(*args, **options)
            return RecordingEngine(engine, self.tokenizer, note)

    return ListeningHost(**{name: getattr(host, name) for name in host.__dataclass_fields__})


def _point(
    limits: Limits,
    pilot: _Pilot,
    controls: Sequence[Sequence[Trajectory]],
    groups: Sequence[Sequence[Trajectory]],
    config: RunConfig,
) -> dict[str, Any]:
    own, by_policy = kappa_figures(pilot.take()), kappa_figures(pilot.policy_logprobs(groups))
    whole = [[*a, *b] for a, b in zip(controls, groups, strict=True)]
    found = group_gain(whole)
    reviews, failed = found["reviews"], found["reviews_without_verdict"]
    assert config.judge is not None
    if reviews and failed > config.judge.max_failure_rate * reviews:
        reasons = [r for rows in groups for row in rows for r in row.reviews if r.cause]
        raise JudgeError(
            reasons[-1].cause,
            f"{failed} of {reviews} reviews of the pilot failed, the last one so: "
            f"{reasons[-1].reason[:300]!r}",
        )
    k, r, l = limits  # noqa: E741
    source = OWN if own["corrections"] else STAND_IN
    kappa = own["kappa"] if own["corrections"] else by_policy["kappa"]
    return {
        "k": k,
        "R": r,
        "L": l,
        **found,
        "kappa": kappa,
        "source": source if kappa is not None else None,
        "judge_logprobs": own,
        "policy_logprobs": by_policy,
    }


# --- what comes out


def choose(points: Sequence[Mapping[str, Any]]) -> tuple[int, str]:
    """The point with the highest gain among those with few judge-written tokens, and why.

    Few is up to 4 %, the paper's best being 2 to 4 %. Where no point has so few, the one with the
    fewest is taken.
    """
    usable = [i for i, p in enumerate(points) if p["off_policy_fraction_intervened"] is not None]
    usable = [i for i in usable if _gain(points[i]) is not None]
    if not usable:
        return 0, "no point has scored rows of both kinds: the config's own settings stay"
    few = [i for i in usable if points[i]["off_policy_fraction_intervened"] <= BEST[1]]
    if few:
        best = max(
            few, key=lambda i: (_gain(points[i]), -points[i]["off_policy_fraction_intervened"])
        )
        return best, f"the highest gain with at most {BEST[1]:.0%} of the tokens from the judge"
    best = min(usable, key=lambda i: points[i]["off_policy_fraction_intervened"])
    return best, (
        f"every point has more than {BEST[1]:.0%} of its tokens from the judge; this one has fewest"
    )


def _gain(point: Mapping[str, Any]) -> float | None:
    value = point.get("reward_gain")
    return None if value is None else float(value)


def _result(points: list[dict[str, Any]], config: RunConfig, tasks: int) -> dict[str, Any]:
    chosen, why = choose(points)
    point = points[chosen]
    kappa, source = point["kappa"], point["source"]
    warnings = []
    if kappa is None:
        warnings.append("the judge wrote no correction: kappa stays as the config has it")
    elif source == STAND_IN:
        warnings.append(
            "the judge tells no log-probs, so kappa is the policy's own mean over the corrections, "
            "with which Const is about what Proxy is. Ask a server that gives log-probs, or an "
            "in-process judge, for the judge's kappa"
        )
    elif kappa > -0.005:
        warnings.append("kappa is about 0: the judge is certain of what it writes, as an oracle is")
    used = point["judge_logprobs" if source == OWN else "policy_logprobs"]
    count = used["corrections"]
    if used["unknown"]:
        warnings.append(
            f"{used['unknown']} correction(s) are left out of kappa: the log-prob of a token is not known"
        )
    if kappa is not None and count < _FEW:
        warnings.append(f"kappa rests on {count} corrections only: take more with --tasks")
    ends = point.get("reward_gain_ci95")
    if ends is not None and ends[0] <= 0:
        warnings.append("the gain may be nothing: its interval holds 0")
    figures: dict[str, Any] = {
        "tasks": tasks,
        "points": points,
        "chosen": chosen,
        "why": why,
        "kappa": kappa,
        "source": source,
        "warnings": warnings,
    }
    return {**figures, "yaml": yaml_lines(figures, config)}


def yaml_lines(figures: Mapping[str, Any], config: RunConfig) -> str:
    """The lines to paste into a config."""
    point = figures["points"][figures["chosen"]]
    kappa = config.objective.kappa if point["kappa"] is None else min(0.0, point["kappa"])
    kappa = round(kappa, 3) + 0.0  # no "-0"
    lines = [
        f"# mintrl calibrate, {figures['tasks']} tasks: {figures['why']}",
        "episode:",
        f"  chunk_tokens: {point['k']}",
        f"  max_reviews: {point['R']}",
        f"  max_correction: {point['L']}",
        f"# kappa: {figures['source'] or 'as it was'}",
        "objective:",
        f"  kappa: {kappa}",
    ]
    return "\n".join(lines) + "\n"


def print_calibration(figures: Mapping[str, Any], console: RunConsole) -> None:
    """Print the points, what was chosen and why, and the lines to paste."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, pad_edge=False)
    for name in ("k", "R", "L", "gain", "off-policy", "revises", "kappa", "policy's"):
        table.add_column(name, justify="right", no_wrap=True)
    for index, point in enumerate(figures["points"]):
        gain, ends = _gain(point), point.get("reward_gain_ci95")
        known = gain is not None and ends is not None
        table.add_row(
            ("* " if index == figures["chosen"] else "") + str(point["k"]),
            str(point["R"]),
            str(point["L"]),
            f"{gain:+.2f} ({ends[0]:.2f} to {ends[1]:.2f})" if known else "-",
            _number(point["off_policy_fraction_intervened"]),
            _number(point["revises_per_review"]),
            _number(point["judge_logprobs"]["kappa"]),
            _number(point["policy_logprobs"]["kappa"]),
        )
    console.console.print(table)
    chosen = figures["points"][figures["chosen"]]
    console.say(f"*: {figures['why']}")
    console.say(gain_line(chosen))
    for warning in figures["warnings"]:
        console.say(f"note: {warning}")
    console.say(figures["yaml"].rstrip())


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
