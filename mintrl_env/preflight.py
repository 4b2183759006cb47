"""`mintrl preflight`: some tasks through the real thing, before a run burns money or hours.

The config's policy, judge, guards and verifier run whole groups as training does; then the policy
goes on behind some corrections and without them. What comes out is a page, preflight.json, and
whether the run should be begun.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mintrl_env import judge_recipes, recipes
from mintrl_env.config import RunConfig, dump_config
from mintrl_env.console import RunConsole
from mintrl_env.errors import JudgeError, PolicyError, VerifierError
from mintrl_env.preflight_figures import (
    Leaks,
    Limits,
    checks,
    coverage,
    latency,
    notes,
    review_figures,
    row_figures,
)
from mintrl_env.preflight_forecast import Measured, Plan, forecast
from mintrl_env.preflight_record import ReviewNote, listening
from mintrl_env.preflight_report import Page, ReviewRecord, render
from mintrl_env.preflight_servers import check_servers, is_judged, limits_of
from mintrl_env.preflight_uplift import Continued, continue_forks, forks_of, uplift_figures
from mintrl_env.protocols import Guard, Judge, Verifier
from mintrl_env.run_folder import write_json, write_text
from mintrl_env.running import open_policy
from mintrl_env.splice import clip_correction
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Outcome, Task, Verdict, VerdictKind

if TYPE_CHECKING:
    from mintrl_env.adapters.server_probe import ChatReport
    from mintrl_env.adapters.session import RolloutSession

PREFLIGHT, UPLIFT = -4, -5
"""Update numbers: their draws are no training's, evaluation's or benchmark's."""


def preflight(
    config: RunConfig, out: Path, *, n: int = 20, console: RunConsole | None = None
) -> dict[str, Any]:
    """Run `n` of the config's tasks and write preflight.html and preflight.json.

    Args:
        out: the folder; an earlier preflight in it is replaced.
        n: tasks, drawn by the run's seed, a whole group each.

    Returns:
        The figures; `passed` says whether all checks hold.

    Raises:
        ConfigError: something in the config is wrong. JudgeError: the judge's server is unfit.
    """
    from mintrl_env.adapters.session import RolloutSession

    console = console or RunConsole()
    reports = check_servers(config)
    tasks = recipes.load_task_set(config.tasks, "tasks", seed=config.train.seed)
    verifier = recipes.make_verifier(config.tasks, tasks, "tasks")
    outside = {
        where: len(recipes.load_task_set(section.tasks, f"{where}.tasks", seed=config.train.seed))
        for where, section in (("evaluation", config.evaluation), ("probe", config.probe))
        if section is not None
    }
    with console.bar("models", 1) as advance:
        judge = (
            judge_recipes.make_judge(config, recipes.warmup_note(advance))
            if is_judged(config)
            else None
        )
        host = open_policy(config, progress=recipes.warmup_note(advance))
        advance(1, "")
    recipes.check_prompts(host.prompts, tasks)
    guards = (
        judge_recipes.make_guards(config.judge, host.tokenizer, verifier) if config.judge else []
    )
    with RolloutSession(
        replace(host, rounds=None),
        recipes.rollout_config(config),
        judge=judge,
        guards=guards,
        verifier=verifier,
        seed=config.train.seed,
    ) as session:
        return look(
            session, config, choose_tasks(tasks, n, config.train.seed), out,
            plan=plan_of(config, **outside), verifier=verifier, reports=reports, console=console,
        )  # fmt: skip


def choose_tasks(tasks: Sequence[Task], n: int, seed: int) -> list[Task]:
    """`n` of the tasks in their order, drawn by the seed: a file's first rows may be its easiest."""
    if n >= len(tasks):
        return list(tasks)
    chosen = np.random.default_rng([seed, 0x9EF1]).choice(len(tasks), size=n, replace=False)
    return [tasks[i] for i in sorted(chosen)]


def plan_of(config: RunConfig, *, evaluation: int = 0, probe: int = 0) -> Plan:
    """The rows of the whole run.

    Args:
        evaluation, probe: problems in these sets.
    """
    train, section = config.train, config.evaluation
    judged = config.objective.intervention_updates if is_judged(config) else 0
    times = 0
    if section is not None:
        times = section.before + section.after
        times += train.updates // section.every if section.every else 0
    return Plan(
        updates=train.updates,
        judged_updates=train.updates if judged < 0 else min(judged, train.updates),
        prompts=train.prompts_per_update,
        n_control=config.rollout.n_control,
        n_intervened=config.rollout.n_intervened,
        probe_rows=2 * probe * config.probe.n if config.probe else 0,
        evaluation_rows=evaluation * section.n * times if section else 0,
    )


# --- the run


@dataclass
class _Seen:
    """What a few groups have shown."""

    groups: list[list[Trajectory]] = field(default_factory=list)
    notes: list[ReviewNote] = field(default_factory=list)
    leaks: Leaks = field(default_factory=lambda: Leaks({}, {}))
    continued: list[Continued] = field(default_factory=list)
    seconds: float = 0.0
    stopped: str = ""


def look(
    session: RolloutSession,
    config: RunConfig,
    tasks: Sequence[Task],
    out: Path,
    *,
    plan: Plan,
    verifier: Verifier,
    reports: Sequence[ChatReport] = (),
    console: RunConsole,
) -> dict[str, Any]:
    """A preflight in a session, whose judge is listened to meanwhile; see `preflight`."""
    judge = session.runner.parts.judge if is_judged(config) else None
    seen = _Seen()
    _run_groups(session, config, tasks, judge, seen, console)
    if judge is not None:
        _find_leaks(session, config, verifier, seen)
        _continue(session, config, tasks, verifier, seen, console)
    limits, cached = limits_of(judge, config)
    measured = Measured.of(
        seen.groups,
        seconds=seen.seconds,
        review_seconds=sum(note.seconds for note in seen.notes),
    )
    figures = _figures(config, seen, forecast(measured, plan, limits))
    figures["notes"] += [*cached, *(note for report in reports for note in report.notes)]
    figures["servers"] = [str(report) for report in reports]
    records = _records(seen, session)
    write_json(out / "preflight.json", {**figures, "all_reviews": [r.as_dict() for r in records]})
    tokenizer = session.host.tokenizer
    page = Page(
        figures=figures,
        groups=seen.groups,
        records=records,
        continued=seen.continued,
        config=dump_config(config),
        decode=tokenizer.decode,
        special_ids=tokenizer.special_ids,
    )
    write_text(out / "preflight.html", render(page))
    return figures


def _run_groups(
    session: RolloutSession,
    config: RunConfig,
    tasks: Sequence[Task],
    judge: Judge | None,
    seen: _Seen,
    console: RunConsole,
) -> None:
    runner = session.runner
    groups: dict[str, list[Trajectory]] = {}
    before = runner.parts, runner.on_group
    runner.on_group = lambda rows: groups.update({rows[0].task_id: list(rows)})
    rows = len(tasks) * runner.config.group_size
    try:
        with ExitStack() as stack:
            if judge is not None:
                heard, seen.notes = stack.enter_context(listening(judge, session.host.tokenizer))
                runner.parts = replace(before[0], judge=heard)
            advance = stack.enter_context(console.bar("preflight", rows))
            started = time.monotonic()
            try:
                session.groups(
                    tasks,
                    update=PREFLIGHT,
                    reviewed=judge is not None,
                    on_progress=lambda done, total: advance(done, ""),
                )
            except (JudgeError, VerifierError, PolicyError) as error:
                seen.stopped = str(error)  # too many failures: the checks say which, and the rest
            seen.seconds = time.monotonic() - started
    finally:
        runner.parts, runner.on_group = before
    seen.groups = [groups[task.task_id] for task in tasks if task.task_id in groups]


def _auditor(session: RolloutSession, config: RunConfig, verifier: Verifier) -> Guard:
    """The leak guard by which all corrections are looked at: the config's, else one as it comes."""
    assert config.judge is not None
    options = config.judge.guards.get("leak") or {}
    section = config.judge.model_copy(update={"guards": {"leak": options}})
    return judge_recipes.make_guards(section, session.host.tokenizer, verifier)[0]


def _find_leaks(
    session: RolloutSession, config: RunConfig, verifier: Verifier, seen: _Seen
) -> None:
    audit = _auditor(session, config, verifier)
    rows = {(r.task_id, r.rollout, r.retry): r for group in seen.groups for r in group}

    async def why(note: ReviewNote, verdict: Verdict) -> str:
        try:
            found = await audit(note.request, verdict)
        except Exception:  # a guard that fails here fails in the run, where its review says so
            return ""
        return found.reason if found.guard else ""

    async def both() -> Leaks:
        written, through = {}, {}
        for note in seen.notes:
            verdict = note.verdict
            if verdict is None or verdict.kind is VerdictKind.KEEP:
                continue
            clipped: Any = clip_correction(verdict.correction, note.request.max_correction)
            if found := await why(note, replace(verdict, correction=clipped)):
                written[note.place] = found
            row = rows.get(note.place[:3])
            review = row.reviews[note.place[3]] if row is not None else None
            if row is None or review is None or review.outcome is not Outcome.REVISE:
                continue
            spliced = row.ids[review.cut : review.cut + review.correction_tokens]
            if found := await why(note, Verdict.revise(review.step, spliced)):
                through[note.place] = found
        return Leaks(written, through)

    seen.leaks = session.run(both)


def _continue(
    session: RolloutSession,
    config: RunConfig,
    tasks: Sequence[Task],
    verifier: Verifier,
    seen: _Seen,
    console: RunConsole,
) -> None:
    section, seed = config.preflight, config.train.seed
    forks = forks_of(seen.groups, tasks, per_task=section.corrections, seed=seed)
    if not forks:
        return
    total = 2 * section.samples * len(forks)
    with console.bar("uplift", total) as advance:

        def live(count: int) -> None:
            session.set_live(count)
            advance(total - count, "")

        seen.continued = session.run(
            lambda: continue_forks(
                forks,
                session.engine,
                verifier,
                session.host.tokenizer,
                session.runner.config,
                update=UPLIFT,
                samples=section.samples,
                seed=seed,
                on_live=live,
            )
        )


def _figures(config: RunConfig, seen: _Seen, expected: Mapping[str, Any]) -> dict[str, Any]:
    section, judged = config.preflight, is_judged(config)
    figures: dict[str, Any] = {
        "judge": config.judge.name if config.judge is not None and judged else None,
        "rows": row_figures(seen.groups),
        "reviews": review_figures(seen.groups),
        "leaks": {
            "written": len(seen.leaks.written),
            "caught": sum(
                review.guard == "leak" for g in seen.groups for row in g for review in row.reviews
            ),
            "through": len(seen.leaks.through),
        },
        "latency": latency([note.seconds for note in seen.notes]),
        "uplift": uplift_figures(seen.continued, seed=config.train.seed),
        "coverage": coverage(
            seen.groups,
            chunk_tokens=config.episode.chunk_tokens,
            max_reviews=config.episode.max_reviews,
        ),
        "forecast": dict(expected),
        "seconds": seen.seconds,
    }
    limits = Limits(
        min_parse_rate=section.min_parse_rate,
        max_failure_rate=config.judge.max_failure_rate if config.judge is not None else 1.0,
        max_leaks=section.max_leaks,
        min_decided=section.min_decided,
        min_finished=section.min_finished,
    )
    found = checks(figures, limits, judged=judged)
    said = [f"the preflight was stopped: {seen.stopped}"] if seen.stopped else []
    return {
        "passed": all(check.passed for check in found) and not seen.stopped,
        "checks": [check.as_dict() for check in found],
        "notes": [*said, *notes(figures, judged=judged)],
        **figures,
    }


def _records(seen: _Seen, session: RolloutSession) -> list[ReviewRecord]:
    """Every review of the rows with what the judge said, in the rows' order."""
    decode, by_place = session.host.tokenizer.decode, {note.place: note for note in seen.notes}
    records = []
    for row in (row for group in seen.groups for row in group):
        for review in row.reviews:
            place = (row.task_id, row.rollout, row.retry, review.index)
            note = by_place.get(place)
            written: Any = note.verdict.correction if note is not None and note.verdict else ""
            stop = review.cut + review.correction_tokens
            revised = review.outcome is Outcome.REVISE
            records.append(
                ReviewRecord(
                    task_id=row.task_id,
                    rollout=row.rollout,
                    review=review,
                    reward=row.reward if row.valid and row.score.decided else None,
                    steps=tuple(s.text for s in note.request.steps) if note is not None else (),
                    kept=note.request.accepted_text if note is not None else "",
                    written=written if isinstance(written, str) else decode(written),
                    wrong_step=note.verdict.step if note is not None and note.verdict else None,
                    spliced=decode(row.ids[review.cut : stop]) if revised else "",
                    leak=seen.leaks.written.get(place, ""),
                    through=place in seen.leaks.through,
                    seconds=note.seconds if note is not None else None,
                    exchanges=tuple(note.exchanges) if note is not None else (),
                )
            )
    return records
