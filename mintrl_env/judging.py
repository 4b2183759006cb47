"""`mintrl judge-bench`: a config's judge on labelled rows, and what it brings on rollouts."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mintrl_env import judge_recipes, recipes
from mintrl_env.config import RunConfig
from mintrl_env.console import RunConsole
from mintrl_env.errors import ConfigError, StoreError
from mintrl_env.evaluation import sample
from mintrl_env.judge_bench import (
    BENCH,
    RowVerdict,
    costs,
    gain,
    judge_rows,
    judged,
    review_request,
)
from mintrl_env.judge_data import JudgeRow, load_judge_rows
from mintrl_env.judge_metrics import KEEP, always, judge_score, position_only
from mintrl_env.judge_tables import bench_lines, bench_tables
from mintrl_env.prompts import HFTokenizer, PromptBuilder
from mintrl_env.protocols import Judge
from mintrl_env.run_folder import RunFolder, write_json, write_text
from mintrl_env.running import open_policy
from mintrl_env.trajectory import RolloutStats, Trajectory
from mintrl_env.types import Kind, Outcome, ReviewRequest

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from mintrl_env.adapters.pump import Pumped

T = TypeVar("T")


def judge_bench(
    config: RunConfig,
    folder: RunFolder,
    *,
    data: str,
    split: str | None = None,
    limit: int | None = None,
    rollouts: int = 0,
    resume: bool = False,
    console: RunConsole | None = None,
) -> dict[str, Any]:
    """Review every row of a benchmark, and write verdicts.jsonl and judge_bench.json.

    A judge is shown a reference solution only where `tasks.columns.context` names a field that the
    rows have.

    Args:
        folder: `resume` asks again only for rows without a verdict, or whose review a service failed.
        data, split, limit: see `load_judge_rows`.
        rollouts: also run so many of the config's own tasks, with and without reviews.

    Returns:
        The figures: `judge`, the baselines, `cost`, and `rollouts`.

    Raises:
        ConfigError: no judge. TaskError: a row that cannot be used. JudgeError: it failed too often.
    """
    if config.judge is None:
        raise ConfigError("judge: the config names none, so there is nothing to benchmark")
    console = console or RunConsole()
    seed = config.train.seed
    rows = load_judge_rows(
        data, split=split, limit=limit, seed=seed, context=_context_fields(config)
    )
    asked = {"data": data, "split": split, "rows": len(rows), "digest": _digest(rows)}
    folder.check(config, resume=resume, asked=asked)
    with console.bar("models", 1) as advance:
        bench = _open_judge(config, rows, recipes.warmup_note(advance))
        advance(1, "")
    folder.open(config, resume=resume, asked=asked)
    with closing(folder):
        verdicts = _verdicts(config, folder, bench, rows, console)
        figures = bench_figures(rows, verdicts, seed=seed)
        figures = {
            "judge_name": config.judge.name,
            "concurrent": config.judge.concurrent,
            **asked,
            **figures,
        }
        file = folder.path / "judge_bench.json"
        write_json(file, figures)
        if rollouts:
            figures["rollouts"] = rollout_gain(config, rollouts, console)
            write_json(file, figures)
        folder.write_summary(figures)
    return figures


def bench_figures(
    rows: Sequence[JudgeRow], verdicts: Sequence[RowVerdict], *, seed: int = 0
) -> dict[str, Any]:
    """The judge's figures beside the baselines' on the same rows."""
    marked = judged(rows, verdicts)
    several = len({row.source for row in rows}) > 1
    return {
        "judge": judge_score(marked, seed=seed, by_source=several),
        "baselines": {
            "always correct": judge_score(always(marked, KEEP), seed=seed),
            "always first": judge_score(always(marked, 0), seed=seed),
            "position only": judge_score(
                position_only(marked, seed=seed), seed=seed, by_source=several
            ),
        },
        "cost": costs(verdicts),
    }


def _context_fields(config: RunConfig) -> tuple[str, ...]:
    named = config.tasks.columns.get("context", ())
    return (named,) if isinstance(named, str) else tuple(named)


def _digest(rows: Sequence[JudgeRow]) -> str:
    text = json.dumps([[r.row_id, r.problem, r.steps, r.first_error, r.context] for r in rows])
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


# --- the judge


@dataclass(frozen=True)
class _Bench:
    """A judge, ready to be asked.

    Attributes:
        requests: one a row.
        engines: what the pump has to serve while it is asked.
    """

    judge: Judge
    tokenizer: HFTokenizer
    requests: Sequence[ReviewRequest]
    engines: Sequence[Pumped] = ()

    def run(self, factory: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine of the judge's, and close what it opened."""

        async def whole() -> T:
            try:
                return await factory()
            finally:
                close = getattr(self.judge, "aclose", None)
                if close is not None:
                    await close()

        if not self.engines:
            return asyncio.run(whole())
        from mintrl_env.adapters.pump import run_with_pump

        return run_with_pump(self.engines, whole)


def _open_judge(
    config: RunConfig, rows: Sequence[JudgeRow], progress: recipes.WarmupProgress
) -> _Bench:
    assert config.judge is not None
    judge = judge_recipes.make_judge(config, progress)
    assert judge is not None
    recipes.quiet_transformers()
    if isinstance(judge, Judge):  # no model of this process: the policy's tokenizer will do
        path = recipes.resolve_path(config.policy.path, config, progress)
        tokenizer = HFTokenizer(recipes.load_tokenizer(path, "policy.path"))
        return _Bench(judge, tokenizer, _requests(config, rows, tokenizer))
    host = open_policy(config, progress=progress)
    requests = _requests(config, rows, host.tokenizer)
    longest = max(len(r.prompt_ids) + len(r.chunk_ids) for r in requests)
    room = max(host.max_length, longest + config.episode.max_correction)
    # Longer rows, but no more memory than a run of the config takes.
    slots = max(1, host.slots * host.max_length // room)
    host = replace(host, max_length=room, slots=slots, rounds=None)
    made, engines = judge(host)
    return _Bench(made, host.tokenizer, requests, engines)


def _requests(
    config: RunConfig, rows: Sequence[JudgeRow], tokenizer: HFTokenizer
) -> list[ReviewRequest]:
    # A benchmark's problem may be longer than those that the policy is trained on.
    section = config.policy.model_copy(update={"max_prompt": 1 << 20})
    prompts: PromptBuilder = recipes.make_prompts(tokenizer, section)
    decoded = lru_cache(maxsize=None)(lambda i: tokenizer.decode([i]))
    return [
        review_request(
            row,
            prompts,
            max_correction=config.episode.max_correction,
            delimiters=config.episode.step_delimiters,
            seed=config.train.seed,
            decoded=decoded,
        )
        for row in rows
    ]


# --- verdicts


def _verdicts(
    config: RunConfig,
    folder: RunFolder,
    bench: _Bench,
    rows: Sequence[JudgeRow],
    console: RunConsole,
) -> list[RowVerdict]:
    assert config.judge is not None
    section, path = config.judge, folder.path / "verdicts.jsonl"
    truth = {row.row_id: row for row in rows}
    stored = [v for v in read_verdicts(path) if v.row_id in truth]
    found = {v.row_id: v for v in stored if v.outcome is not Outcome.FAILED}
    write_text(path, "".join(_line(v, truth) for v in found.values()))
    left = [r for r in bench.requests if r.task.task_id not in found]
    with console.bar("reviews", len(rows)) as advance, path.open("a", encoding="utf-8") as file:
        advance(len(found), "")

        def keep(verdict: RowVerdict) -> None:
            found[verdict.row_id] = verdict
            file.write(_line(verdict, truth))
            file.flush()
            advance(len(found), "")

        if left:
            bench.run(
                lambda: judge_rows(
                    bench.judge,
                    left,
                    bench.tokenizer,
                    concurrent=section.concurrent,
                    deadline_s=config.rollout.deadline_s,
                    max_failure_rate=section.max_failure_rate,
                    on_verdict=keep,
                )
            )
    return [found[row.row_id] for row in rows]


def _line(verdict: RowVerdict, truth: Mapping[str, JudgeRow]) -> str:
    row = truth[verdict.row_id]
    known = {"source": row.source, "first_error": row.first_error, "steps": len(row.steps)}
    right = verdict.predicted is not None and verdict.predicted == row.first_error
    return json.dumps({**verdict.as_dict(), **known, "right": right}, ensure_ascii=False) + "\n"


def read_verdicts(path: Path) -> list[RowVerdict]:
    """The verdicts of a file; a last line that a kill cut short is left out.

    Raises:
        StoreError: a line that is no verdict.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(RowVerdict.from_dict(json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            if number == len(lines):
                break
            raise StoreError(f"{path}:{number}: no verdict of ours: {error}") from error
    return found


# --- rollouts


def rollout_gain(config: RunConfig, count: int, console: RunConsole) -> dict[str, Any]:
    """The config's own tasks with and without reviews: rewards, their difference, tokens.

    Args:
        count: tasks, from the first on; each runs the config's whole group.
    """
    from mintrl_env.adapters.session import RolloutSession

    assert config.judge is not None
    if not (config.rollout.n_control and config.rollout.n_intervened):
        raise ConfigError("rollout: a gain needs n_control and n_intervened of at least 1")
    tasks = recipes.load_task_set(config.tasks, "tasks", seed=config.train.seed)[:count]
    verifier = recipes.make_verifier(config.tasks, tasks, "tasks")
    with console.bar("rollouts", len(tasks) * config.group_size) as advance:
        judge = judge_recipes.make_judge(config, recipes.warmup_note(advance))
        host = open_policy(config, progress=recipes.warmup_note(advance))
        recipes.check_prompts(host.prompts, tasks)
        guards = judge_recipes.make_guards(config.judge, host.tokenizer, verifier)
        with RolloutSession(
            host,
            recipes.rollout_config(config),
            judge=judge,
            guards=guards,
            verifier=verifier,
            seed=config.train.seed,
        ) as session:
            groups = sample(session, tasks, BENCH, range(config.group_size), True, advance)
    return group_gain(groups)


def group_gain(groups: Sequence[Sequence[Trajectory]]) -> dict[str, Any]:
    """Mean reward of intervened rows less that of controls, over tasks that have both."""
    pairs = []
    for rows in groups:
        scored = [row for row in rows if row.valid and row.score.decided]
        control = [row.reward for row in scored if row.kind is Kind.CONTROL]
        intervened = [row.reward for row in scored if row.kind is Kind.INTERVENED]
        if control and intervened:
            pairs.append((sum(control) / len(control), sum(intervened) / len(intervened)))
    stats = RolloutStats.over(groups)
    failed = stats.outcomes[Outcome.FAILED.value] + stats.outcomes[Outcome.UNPARSED.value]
    counts = stats.as_dict()
    names = ("off_policy_fraction_intervened", "revises_per_review", "reviews", "judge_usd")
    return {
        **(gain(pairs) if pairs else {"tasks": 0}),
        **{name: counts[name] for name in names},
        "reviews_without_verdict": failed,
        "rollouts": stats.trajectories,
    }


def print_bench(figures: Mapping[str, Any], console: RunConsole) -> None:
    """Print the figures: the judge beside the baselines, by source, cost, rollouts."""
    for table in bench_tables(figures):
        console.console.print(table)
    for line in bench_lines(figures):
        console.say(line)
