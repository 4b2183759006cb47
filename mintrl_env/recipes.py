"""A config's sections -> the objects that they name. The only place that wires all parts together.

Everything that can be wrong is looked at before a model is trained: tasks, prompts, names, options.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mintrl_env.config import PolicySection, RunConfig, TasksSection
from mintrl_env.console import Advance
from mintrl_env.episode import EpisodeConfig
from mintrl_env.errors import ConfigError, MintrlError, MissingExtraError, UsageError
from mintrl_env.prompts import HFTokenizer, PromptBuilder
from mintrl_env.protocols import Sampling, Verifier
from mintrl_env.registry import resolve
from mintrl_env.rollout import RolloutConfig
from mintrl_env.scoring import check_verifier
from mintrl_env.tasks import TaskColumns, load_tasks
from mintrl_env.types import Task

if TYPE_CHECKING:
    from mintrl_env.trainers.warmup import Kind as WarmupKind

CACHE_VARIABLE = "MINTRL_CACHE"
"""Environment variable: where warmed-up models are kept; default .cache in the working folder."""

WarmupProgress = Callable[[str, int, int, float], None]


def make(where: str, factory: Any, options: Mapping[str, Any], **given: Any) -> Any:
    """`factory(**options)`, with what it also asks for out of `given`; an object is ready made.

    Raises:
        ConfigError: an option that the factory has no parameter for, or a value that it refuses.
    """
    if not callable(factory):
        if options:
            raise ConfigError(
                f"{where}: the object is ready made and takes no {', '.join(options)}"
            )
        return factory
    parameters = parameters_of(factory)
    unknown = [name for name in options if parameters and name not in parameters]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if unknown and not takes_any:
        known = [name for name in parameters if name not in given]
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]}? Known" if near else "known"
        listed = ", ".join(known) or "none"
        raise ConfigError(f"{where}: no option {unknown[0]!r}; {hint} options: {listed}")
    offered = {k: v for k, v in given.items() if k in parameters and k not in options}
    try:
        return factory(**options, **offered)
    except (TypeError, ValueError, MintrlError) as error:
        if isinstance(error, MissingExtraError):
            raise
        raise ConfigError(f"{where}: {error}") from error


def parameters_of(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a builtin: let the call itself complain
        return {}


def load_task_set(
    section: TasksSection,
    where: str,
    *,
    seed: int = 0,
    on_unusable: Callable[[str], None] | None = None,
) -> list[Task]:
    """The tasks of a section; `on_unusable` as in `load_tasks`.

    Raises:
        TaskError: a row that cannot be used. ConfigError: options that the set does not know.
    """
    if section.name is not None:
        factory = resolve("tasks", section.name)
        tasks = list(make(f"{where}.options", factory, section.options, split=section.split))
    else:
        assert section.path is not None
        tasks = load_tasks(
            section.path,
            task_columns(section),
            split=section.split,
            subset=section.subset,
            limit=None if section.shuffle else section.limit,
            on_unusable=on_unusable,
        )
    if section.shuffle:
        import numpy as np

        order = np.random.default_rng([seed, 0x7A5C]).permutation(len(tasks))
        tasks = [tasks[i] for i in order]
    return tasks[: section.limit]


def task_columns(section: TasksSection) -> TaskColumns:
    """How a section's rows become tasks."""
    return TaskColumns(section.columns, section.answer_regex, section.verifier, form=section.form)


def make_verifier(section: TasksSection, tasks: Sequence[Task], where: str) -> Verifier:
    """The verifier of a task section; a procedural set's tasks name their own."""
    names = {task.verifier for task in tasks}
    if len(names) > 1:
        raise ConfigError(f"{where}: tasks name several verifiers: {', '.join(sorted(names))}")
    name = names.pop() if section.name is not None else section.verifier
    verifier = make(
        f"{where}.verifier_options", resolve("verifier", name), section.verifier_options
    )
    try:
        check_verifier(verifier)
    except UsageError as error:
        raise ConfigError(f"{where}.verifier: {error}") from error
    return verifier  # type: ignore[no-any-return]


def episode_config(config: RunConfig) -> EpisodeConfig:
    section = config.episode
    return EpisodeConfig(
        chunk_tokens=section.chunk_tokens,
        max_reviews=section.max_reviews,
        max_correction=section.max_correction,
        max_response=section.max_response,
        step_delimiters=tuple(section.step_delimiters),
        spacing=section.spacing,
    )


def rollout_config(
    config: RunConfig, *, n_control: int | None = None, n_intervened: int | None = None
) -> RolloutConfig:
    """The runner's settings; counts may be replaced (an evaluation has controls only)."""
    section, judge = config.rollout, config.judge
    settings: dict[str, Any] = {}
    if judge is not None:
        settings = {
            "on_judge_failure": judge.on_failure,
            "max_failure_rate": judge.max_failure_rate,
            "judge_concurrency": judge.concurrent,
        }
    return RolloutConfig(
        episode=episode_config(config),
        sampling=Sampling(section.temperature),
        n_control=section.n_control if n_control is None else n_control,
        n_intervened=section.n_intervened if n_intervened is None else n_intervened,
        deadline_s=section.deadline_s,
        max_retries=section.max_retries,
        verifier_concurrency=section.verifier_concurrent,
        **settings,
    )


# --- models


def warmup_note(advance: Advance) -> WarmupProgress:
    """A warm-up's progress as the note of a bar."""
    notes: dict[str, str] = {}

    def progress(kind: str, done: int, total: int, nll: float) -> None:
        notes[kind] = f"{kind} {done}/{total} (nll {nll:.2f})"
        advance(0, "warm-up: " + ", ".join(notes.values()))

    return progress


def resolve_path(path: str, config: RunConfig, progress: WarmupProgress | None = None) -> str:
    """A model's path; `warmup:student` and `warmup:teacher` are made first where they are missing."""
    kind = path.removeprefix("warmup:")
    if kind == path:
        return path
    folders = warmup_models(config, progress)
    if kind not in folders:
        raise ConfigError(f"path {path!r}: there are warmup:student and warmup:teacher")
    return str(folders[kind])


def warmup_models(config: RunConfig, progress: WarmupProgress | None = None) -> dict[str, Path]:
    """The built-in models that the config names, warmed up side by side unless they are cached."""
    from mintrl_env.trainers.warmup import WarmupSettings, ensure_models

    named = [config.policy.path, config.judge.path if config.judge else None]
    kinds: list[WarmupKind] = [k for k in ("student", "teacher") if f"warmup:{k}" in named]
    try:
        settings = {kind: WarmupSettings.from_dict(config.warmup.get(kind, {})) for kind in kinds}
    except (TypeError, ValueError, MintrlError) as error:
        raise ConfigError(f"warmup: {error}") from error
    cache = Path(os.environ.get(CACHE_VARIABLE) or ".cache") / "warmup"
    return dict(ensure_models(settings, cache, progress))  # type: ignore[arg-type]


def load_model(path: str, where: str, *, dtype: str = "float32") -> Any:
    """A causal language model from a folder or the Hub.

    Raises:
        ConfigError: it cannot be loaded.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise MissingExtraError("transformers", "trl", where) from error
    quiet_transformers()
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    except Exception as error:
        raise ConfigError(_load_failure(where, path, "model", error)) from error


def quiet_transformers() -> None:
    """No bars and notices of transformers' own between ours."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def load_tokenizer(path: str, where: str) -> Any:
    """The tokenizer of a folder or Hub id; its pad token is set where it has none."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtraError("transformers", "trl", where) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    except Exception as error:
        raise ConfigError(_load_failure(where, path, "tokenizer", error)) from error
    HFTokenizer(tokenizer)  # refuses one without an EOS
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _load_failure(where: str, path: str, what: str, error: Exception) -> str:
    if Path(path).exists():
        return f"{where}: the {what} in {path} cannot be loaded: {error}"
    return (
        f"{where}: {path!r} is no folder here, and its {what} could not be loaded from the Hub: "
        f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    )


def make_prompts(tokenizer: HFTokenizer, section: PolicySection) -> PromptBuilder:
    return PromptBuilder(
        tokenizer,
        system_prompt=section.system_prompt,
        template=section.prompt_template,
        chat=section.chat,
        chat_template_kwargs=section.chat_template_kwargs,
        max_prompt=section.max_prompt,
    )


def check_prompts(prompts: PromptBuilder, tasks: Sequence[Task]) -> None:
    """Refuse, before anything runs, the first task whose prompt is empty or too long."""
    for task in tasks:
        prompts.ids(task)
