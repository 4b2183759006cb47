"""Rollouts without training: `mintrl rollout`, `mintrl eval`, `mintrl export`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mintrl_env import judge_recipes, recipes
from mintrl_env.config import RunConfig, load_config
from mintrl_env.console import RunConsole
from mintrl_env.errors import ConfigError, MissingExtraError, StoreError, UsageError
from mintrl_env.evaluation import EVALUATION, evaluate_groups, sample
from mintrl_env.failures import failed_by_service
from mintrl_env.prompts import HFTokenizer
from mintrl_env.run_folder import RunFolder
from mintrl_env.served import ask_servers, served_host
from mintrl_env.statistics import mean_interval, pass_at_k
from mintrl_env.store import RolloutStore
from mintrl_env.trajectory import RolloutStats, Trajectory
from mintrl_env.types import Outcome

if TYPE_CHECKING:
    from mintrl_env.adapters.session import EngineHost

_REASON = 1000  # characters of a reason in a summary


def rollout(
    config: RunConfig,
    folder: RunFolder,
    *,
    updates: int = 1,
    resume: bool = False,
    console: RunConsole | None = None,
) -> dict[str, Any]:
    """The rollouts of the first `updates` updates by the policy as it is, stored in the folder.

    Returns:
        The counts over all of them (`RolloutStats.as_dict`), also written to summary.json.
    """
    from mintrl_env.adapters.session import RolloutSession

    folder.check(config, resume=resume)
    console = console or RunConsole()
    tasks = recipes.load_task_set(config.tasks, "tasks", seed=config.train.seed)
    verifier = recipes.make_verifier(config.tasks, tasks, "tasks")
    with console.bar("models", 1) as advance:
        judge = judge_recipes.make_judge(config, recipes.warmup_note(advance))
        host = open_policy(config, progress=recipes.warmup_note(advance))
        advance(1, "")
    if host.report:
        console.say(host.report)
    recipes.check_prompts(host.prompts, tasks)
    guards = (
        judge_recipes.make_guards(config.judge, host.tokenizer, verifier) if config.judge else []
    )
    attempt = folder.open(config, resume=resume)
    with closing(folder):
        store = folder.store()
        stats, size = RolloutStats(), config.train.prompts_per_update
        reasons: dict[str, str] = {}
        with (
            RolloutSession(
                host,
                recipes.rollout_config(config),
                judge=judge,
                guards=guards,
                verifier=verifier,
                seed=config.train.seed,
                run_attempt=attempt,
                on_group=store.write_group,
            ) as session,
            console.bar("rollouts", updates * size * config.group_size) as advance,
        ):
            for update in range(updates):
                # Round and round over the tasks, in their order.
                chosen = [
                    tasks[(update * size + i) % len(tasks)] for i in range(min(size, len(tasks)))
                ]
                groups = _stored_groups(store, update, config.group_size)
                for rows in sample(
                    session,
                    [task for task in chosen if task.task_id not in groups],
                    update,
                    range(config.group_size),
                    config.method != "grpo",
                    advance,
                    done=(update * size + len(groups)) * config.group_size,
                ):
                    groups[rows[0].task_id] = rows
                for rows in groups.values():
                    stats.add_group(rows)
                    reasons = {**_first_reasons(rows), **reasons}
                store.compact(update)
        summary = {"method": config.method, "updates": updates, **stats.as_dict(), **reasons}
        folder.write_summary(summary)
        return summary


def _first_reasons(rows: Sequence[Trajectory]) -> dict[str, str]:
    """Why the first review failed and the first response could not be scored, where one did."""
    found: dict[str, str] = {}
    for row in rows:
        if not row.score.decided and row.score.detail:
            found.setdefault("first_undecided", f"{row.score.status}: {row.score.detail}")
        for review in row.reviews:
            if review.outcome in (Outcome.FAILED, Outcome.UNPARSED):
                found.setdefault("first_failed_review", f"{review.cause}: {review.reason}")
    return {name: text[:_REASON] for name, text in found.items()}


def evaluate(
    config: RunConfig,
    folder: RunFolder,
    *,
    checkpoint: str | None,
    n: int,
    ks: Sequence[int],
    resume: bool = False,
    console: RunConsole | None = None,
) -> dict[str, Any]:
    """pass@1 and unbiased pass@k on the held-out problems, sampled by the policy alone.

    Args:
        folder: gets the rollouts, and the figures as summary.json; `resume` samples only the
            problems that it does not hold yet.
        checkpoint: a run folder, a checkpoint or a model folder; None: the config's policy.
        n: samples a problem.
        ks: each at most n.

    Returns:
        The figures, with each problem's share under `by_task`.
    """
    console = console or RunConsole()
    wrong = [k for k in ks if not 1 <= k <= n]
    if wrong:
        raise UsageError(f"--k {wrong[0]}: pass@k needs 1 <= k <= n, and n is {n}")
    from mintrl_env.adapters.session import RolloutSession

    section = config.evaluation.tasks if config.evaluation else config.tasks
    where = "evaluation.tasks" if config.evaluation else "tasks"
    asked = {"checkpoint": checkpoint or config.policy.path, "n": n}
    # Problems of another set may have the same ids.
    question = {**asked, "tasks": section.model_dump(mode="json")}
    folder.check(config, resume=resume, asked=question)
    tasks = recipes.load_task_set(section, where, seed=config.train.seed)
    verifier = recipes.make_verifier(section, tasks, where)
    with console.bar("model", 1) as advance:
        host = open_policy(config, checkpoint, progress=recipes.warmup_note(advance))
        advance(1, "")
    if host.report:
        console.say(host.report)
    recipes.check_prompts(host.prompts, tasks)
    attempt = folder.open(config, resume=resume, asked=question)
    with closing(folder):
        store = folder.store()
        groups = _stored_groups(store, EVALUATION, n)
        left = [task for task in tasks if task.task_id not in groups]
        settings = recipes.rollout_config(config, n_control=n, n_intervened=0)
        with (
            RolloutSession(
                host,
                settings,
                verifier=verifier,
                seed=config.train.seed,
                run_attempt=attempt,
                on_group=store.write_group,
            ) as session,
            console.bar("evaluation", len(tasks) * n) as advance,
        ):
            for rows in sample(
                session, left, EVALUATION, range(n), False, advance, done=len(groups) * n
            ):
                groups[rows[0].task_id] = rows
        store.compact(EVALUATION)
        whole = [groups[task.task_id] for task in tasks]
        result = {**asked, **evaluate_groups(whole)}
        for k in ks:
            shares = _pass_at_k(whole, k)
            if not shares:
                raise StoreError(
                    f"no problem could be scored: see the statuses in {folder.path}/rollouts"
                )
            result[f"pass@{k}"] = sum(shares) / len(shares)
            result[f"pass@{k}_ci95"] = list(mean_interval(shares))
        folder.write_summary(result)
        return result


def _stored_groups(store: RolloutStore, update: int, n: int) -> dict[str, list[Trajectory]]:
    """The whole groups of an update, of n rows each, that a run which was cut short left behind.

    One in which a service or a deadline failed a row is sampled again: its cause may be mended.
    """
    groups: dict[str, list[Trajectory]] = {}
    for row in store.read(update=update)[0]:
        groups.setdefault(row.task_id, []).append(row)
    return {
        task_id: rows
        for task_id, rows in groups.items()
        if len(rows) == n and not any(map(failed_by_service, rows))
    }


def _pass_at_k(groups: Sequence[Sequence[Trajectory]], k: int) -> list[float]:
    shares = []
    for rows in groups:
        rewards = [row.reward for row in rows if row.valid and row.score.decided]
        if len(rewards) >= k:
            shares.append(pass_at_k(len(rewards), sum(r >= 1.0 for r in rewards), k))
    return shares


def open_policy(
    config: RunConfig,
    checkpoint: str | None = None,
    *,
    progress: Callable[[str, int, int, float], None] | None = None,
) -> EngineHost:
    """The config's policy, or a checkpoint of it, ready for engines, or behind its servers.

    Raises:
        PolicyError: a server that is no fit for a policy.
        ConfigError: a checkpoint of a policy that servers have.
    """
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            str(error.name), "trl", "running a model in this process"
        ) from error
    from mintrl_env.adapters.pump import Rounds
    from mintrl_env.adapters.session import EngineHost

    torch.set_num_threads(config.train.threads)
    recipes.quiet_transformers()
    base = recipes.resolve_path(config.policy.path, config, progress)
    on_gpu = torch.cuda.is_available()
    is_served = config.rollout.engine == "server"
    if is_served and checkpoint is not None:
        raise ConfigError(
            f"--checkpoint {checkpoint}: the policy is behind a server, which has weights of its own: "
            "serve a folder made by `mintrl export`, or take rollout.engine: transformers"
        )
    if is_served:
        from mintrl_env.adapters.model_ends import model_ends

        model, extra_eos = None, model_ends(base)
    else:
        path = base if checkpoint is None else str(model_folder(checkpoint))
        model = _load(path, base, config.policy.dtype)
        if on_gpu:
            model = model.to("cuda")
        ends = getattr(model.generation_config, "eos_token_id", None)
        extra_eos = [] if ends is None else ends if isinstance(ends, list) else [ends]
    tokenizer = HFTokenizer(recipes.load_tokenizer(base, "policy.path"), extra_eos)
    host = EngineHost(
        model=model,
        tokenizer=tokenizer,
        prompts=recipes.make_prompts(tokenizer, config.policy),
        slots=config.rollout.slots,
        max_length=config.policy.max_prompt + config.episode.max_response,
        autocast=torch.bfloat16 if on_gpu else None,  # as the trainer runs it
        rounds=Rounds() if config.rollout.schedule == "rounds" else None,
    )
    if is_served:
        host = served_host(config, host, ask_servers(config, host.prompts))
    elif config.rollout.engine == "vllm":
        from mintrl_env.adapters.policy_vllm import vllm_policy

        # A checkpoint's weights are copied in, as a training's are.
        engine = vllm_policy(base, **config.rollout.engine_options)
        host = replace(host, policy_engine=engine)
    return host


def model_folder(checkpoint: str) -> Path:
    """The folder with weights that a path means: itself, or a run's final model or last checkpoint.

    Raises:
        StoreError: there are no weights.
    """
    path = Path(checkpoint)
    candidates = [path, path / "model"]
    last = RunFolder(path).last_checkpoint()
    if last is not None:
        candidates.append(last)
    for folder in candidates:
        if any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
            return folder
    raise StoreError(
        f"{checkpoint}: no model here: expected config.json or adapter_config.json in it, in its "
        "model/ or in its checkpoints/"
    )


def _load(path: str, base: str, dtype: str) -> Any:
    """A model; a LoRA adapter is put on its base and merged."""
    if not (Path(path) / "adapter_config.json").is_file():
        return recipes.load_model(path, "policy.path", dtype=dtype)
    try:
        from peft import PeftModel
    except ImportError as error:
        raise MissingExtraError("peft", "trl", "a LoRA checkpoint") from error
    model = recipes.load_model(base, "policy.path", dtype=dtype)
    return PeftModel.from_pretrained(model, path).merge_and_unload()


def export(checkpoint: str, out: Path) -> Path:
    """Write a checkpoint (LoRA merged) as a plain transformers folder, tokenizer included.

    Raises:
        StoreError: no model at `checkpoint`, or `out` exists.
    """
    folder = model_folder(checkpoint)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise StoreError(f"{out} exists already: choose a new folder")
    base = str(folder)
    if (folder / "adapter_config.json").is_file():
        base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
        if not base:
            raise ConfigError(f"{folder}: the adapter does not name its base model")
    model = _load(str(folder), base, "float32")
    has_tokenizer = (folder / "tokenizer_config.json").is_file()
    tokenizer = recipes.load_tokenizer(str(folder) if has_tokenizer else base, "checkpoint")
    model.save_pretrained(str(out))
    tokenizer.save_pretrained(str(out))
    return out


def run_tokenizer(run: Path) -> HFTokenizer:
    """The tokenizer of a run (or of the runs in a folder): its model's, else its config's policy's.

    Raises:
        StoreError: no run, or no tokenizer that can be loaded.
    """
    folders = [run, *sorted(path for path in run.glob("*") if path.is_dir())]
    for folder in folders:
        if (folder / "model" / "tokenizer_config.json").is_file():
            return HFTokenizer(recipes.load_tokenizer(str(folder / "model"), str(folder)))
    for folder in folders:
        if (folder / "config.yaml").is_file():
            config = load_config(folder / "config.yaml")
            path = recipes.resolve_path(config.policy.path, config)
            return HFTokenizer(recipes.load_tokenizer(path, "policy.path"))
    raise StoreError(f"{run}: no run here: neither it nor a folder in it has config.yaml")


def parse_ks(text: str) -> list[int]:
    """`1,4,8` as numbers."""
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise UsageError(f"--k takes numbers with commas between, as 1,4,8; not {text!r}")
    return [int(part) for part in text.split(",")]
