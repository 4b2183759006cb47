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

from mintrl_env.config import JudgeSection, PolicySection, RunConfig, TasksSection
from mintrl_env.console import Advance
from mintrl_env.episode import EpisodeConfig
from mintrl_env.errors import ConfigError, MintrlError, MissingExtraError, UsageError
from mintrl_env.prompts import HFTokenizer, PromptBuilder
from mintrl_env.protocols import Guard, Judge, Sampling, Verifier
from mintrl_env.registry import resolve
from mintrl_env.reviewing import check_judge
from mintrl_env.rollout import RolloutConfig
from mintrl_env.scoring import check_verifier
from mintrl_env.tasks import TaskColumns, load_tasks
from mintrl_env.types import Task

if TYPE_CHECKING:
    from mintrl_env.adapters.session import EngineHost, JudgeFactory
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
    parameters = _parameters(factory)
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


def _parameters(factory: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(factory).parameters
    except (TypeError, ValueError):  # a builtin: let the call itself complain
        return {}


def load_task_set(section: TasksSection, where: str, *, seed: int = 0) -> list[Task]:
    """The tasks of a section.

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
            TaskColumns(section.columns, section.answer_regex, section.verifier),
            split=section.split,
            subset=section.subset,
            limit=None if section.shuffle else section.limit,
        )
    if section.shuffle:
        import numpy as np

        order = np.random.default_rng([seed, 0x7A5C]).permutation(len(tasks))
        tasks = [tasks[i] for i in order]
    return tasks[: section.limit]


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


# --- judges and guards


def make_guards(
    section: JudgeSection, tokenizer: HFTokenizer, verifier: Verifier | None
) -> list[Guard]:
    """The guards of a judge, in the config's order."""

    async def same_answer(task: Task, text: str) -> bool:
        assert verifier is not None
        return (await verifier.score(task, text)).reward >= 1.0

    return [
        make(
            f"judge.guards.{name}",
            resolve("guard", name),
            options or {},
            tokenizer=tokenizer,
            same_answer=None if verifier is None else same_answer,
        )
        for name, options in section.guards.items()
    ]


def make_judge(
    config: RunConfig, progress: WarmupProgress | None = None
) -> Judge | JudgeFactory | None:
    """The config's judge: an object, or a factory for one that runs on the policy's machine."""
    section = config.judge
    if section is None:
        return None
    return _judge(section.name, section.path, dict(section.options), config, progress)


def _judge(
    name: str,
    path: str | None,
    options: dict[str, Any],
    config: RunConfig,
    progress: WarmupProgress | None,
) -> Judge | JudgeFactory:
    if options.get("run_tests"):
        options = {**options, "run_tests": _public_tests(config, options["run_tests"])}
    if name == "shuffled":
        inner = options.pop("judge", "scoring")
        return _shuffled(_judge(inner, path, options, config, progress))
    if name == "scoring":
        if path is None:
            raise ConfigError("judge.path: a scoring judge needs the weights of its teacher")
        return _scoring(resolve_path(path, config, progress), options)
    if name == "self":
        return _self(path and resolve_path(path, config, progress), options, config)
    judge_class = resolve("judge", name)
    if path is not None:
        raise ConfigError(f"judge.path: the judge {name!r} has no weights to load; leave it out")
    given: dict[str, Any] = {"delimiters": config.episode.step_delimiters}

    def build(**parts: Any) -> Judge:
        judge = make("judge.options", judge_class, options, **given, **parts)
        try:
            check_judge(judge)
        except UsageError as error:
            raise ConfigError(f"judge.name: {error}") from error
        made: Judge = judge
        return made

    plain = build()  # what is wrong with it is said before any model is loaded
    if "tokenizer" not in _parameters(judge_class) or "tokenizer" in options:
        return plain
    return lambda host: (build(tokenizer=host.tokenizer), ())


def _public_tests(config: RunConfig, count: Any) -> Any:
    """Runs the first `count` tests of a code task ("all" of them), for a judge that looks at their
    outcome."""
    from mintrl_env.verifiers.code_public import PublicTests

    options = {k: v for k, v in config.tasks.verifier_options.items() if k != "reward"}
    return make("judge.options.run_tests", PublicTests, {"count": count, **options})


def _shuffled(inner: Judge | JudgeFactory) -> Judge | JudgeFactory:
    from mintrl_env.judges import ShuffledJudge

    if isinstance(inner, Judge):
        return ShuffledJudge(inner)

    def factory(host: EngineHost) -> tuple[Judge, Sequence[Any]]:
        judge, engines = inner(host)
        return ShuffledJudge(judge), engines

    return factory


def _scoring(path: str, options: Mapping[str, Any]) -> JudgeFactory:
    from mintrl_env.judges_scoring import ScoringJudge

    _try_options(ScoringJudge, options, "scorer", "policy", "tokenizer")

    def factory(host: EngineHost) -> tuple[Judge, Sequence[Any]]:
        engine = host.engine(load_model(path, "judge.path").to(_device(host)))
        judge = make(
            "judge.options", ScoringJudge, options,
            scorer=engine, policy=engine, tokenizer=host.tokenizer,
        )  # fmt: skip
        return judge, (engine,)

    return factory


def _self(path: str | None, options: Mapping[str, Any], config: RunConfig) -> JudgeFactory:
    """The policy's first version: its adapter switched off (LoRA), or the weights it started from;
    with `refresh_updates` the policy as it was at the last multiple of so many updates."""
    from mintrl_env.judges_self import SelfJudge

    options = dict(options)
    refresh = options.pop("refresh_updates", 0)
    if isinstance(refresh, bool) or not isinstance(refresh, int) or refresh < 0:
        raise ConfigError(
            f"judge.options.refresh_updates counts updates (0: never), not {refresh!r}"
        )
    _try_options(SelfJudge, options, "scorer", "policy", "tokenizer", "chat_ids")

    def factory(host: EngineHost) -> tuple[Judge, Sequence[Any]]:
        # A verdict prompt holds the problem, the reference and the response. Each row has three
        # prompts (verdict, the same without the reference, correction), whose KV is kept.
        size: dict[str, Any] = {"slots": 3 * host.slots, "max_length": 2 * host.max_length + 512}
        disable_adapter = getattr(host.model, "disable_adapter", None)
        if path is None and disable_adapter is not None and not refresh:
            engine = host.engine(around=disable_adapter, **size)
        else:
            weights = path or resolve_path(config.policy.path, config)
            model = load_model(weights, "judge.path", dtype=config.policy.dtype)
            engine = host.engine(model.to(_device(host)), **size)
            if refresh:
                host.before_update.append(_refresher(host, model, engine, refresh))

        plain = {"prompt_template": "{problem}", "system_prompt": None}
        section = config.policy.model_copy(update={**plain, "max_prompt": size["max_length"]})
        prompts = make_prompts(host.tokenizer, section)

        def chat_ids(text: str) -> Sequence[int]:
            return [int(i) for i in prompts.ids(Task("self-judge", text))]

        judge = make(
            "judge.options", SelfJudge, options,
            scorer=engine, policy=engine, tokenizer=host.tokenizer, chat_ids=chat_ids,
        )  # fmt: skip
        return judge, (engine,)

    return factory


def _refresher(host: EngineHost, model: Any, engine: Any, every: int) -> Callable[[int], None]:
    """Gives a judge's copy the policy's weights, a LoRA adapter added, when a multiple of `every`
    updates has come (after a resume: with the first update that is asked for)."""
    from mintrl_env.adapters.checkpoint_weights import copy_weights

    taken = 0

    def refresh(update: int) -> None:
        nonlocal taken
        if update // every > taken:
            taken = update // every
            copy_weights(host.model, model)
            engine.reset()

    return refresh


def _try_options(judge: Callable[..., Any], options: Mapping[str, Any], *parts: str) -> None:
    """Refuse wrong options now: the judge itself is made only when its model is loaded."""
    make("judge.options", judge, options, **dict.fromkeys(parts))


def _device(host: EngineHost) -> Any:
    return next(host.model.parameters()).device
