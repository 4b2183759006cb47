"""A config's judge and guards: objects, or factories for those that run on the policy's machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mintrl_env.config import JudgeSection, RunConfig
from mintrl_env.errors import ConfigError, UsageError
from mintrl_env.prompts import HFTokenizer
from mintrl_env.protocols import Guard, Judge, Verifier
from mintrl_env.recipes import (
    WarmupProgress,
    load_model,
    make,
    make_prompts,
    parameters_of,
    resolve_path,
)
from mintrl_env.registry import resolve
from mintrl_env.reviewing import check_judge
from mintrl_env.scoring import answers_right
from mintrl_env.types import Task

if TYPE_CHECKING:
    from mintrl_env.adapters.session import EngineHost, JudgeFactory


def make_guards(
    section: JudgeSection, tokenizer: HFTokenizer, verifier: Verifier | None
) -> list[Guard]:
    """The guards of a judge, in the config's order."""
    return [
        make(
            f"judge.guards.{name}",
            resolve("guard", name),
            options or {},
            tokenizer=tokenizer,
            same_answer=None if verifier is None else answers_right(verifier),
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


def judge_share(judge: JudgeSection, processes: int) -> JudgeSection:
    """A process's share of what a judge may use, where several ask it: `concurrent`, and the limits
    among its options, which are for the whole run and hold in each process."""
    limits = judge.options.get("limits")
    shares = {
        name: max(1, value // processes) if isinstance(value, int) else value / processes
        for name, value in (limits.items() if isinstance(limits, Mapping) else ())
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    update: dict[str, Any] = {"concurrent": max(1, judge.concurrent // processes)}
    if shares:
        update["options"] = {**judge.options, "limits": {**judge.options["limits"], **shares}}
    return judge.model_copy(update=update)


def judge_domain(config: RunConfig) -> str:
    """Whose prompts a chat judge takes, unless its options say."""
    return "code" if config.tasks.verifier == "code" else "math"


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
    given: dict[str, Any] = {
        "delimiters": config.episode.step_delimiters,
        "domain": judge_domain(config),
    }

    def build(**parts: Any) -> Judge:
        judge = make("judge.options", judge_class, options, **given, **parts)
        try:
            check_judge(judge)
        except UsageError as error:
            raise ConfigError(f"judge.name: {error}") from error
        made: Judge = judge
        return made

    plain = build()  # what is wrong with it is said before any model is loaded
    if "tokenizer" not in parameters_of(judge_class) or "tokenizer" in options:
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
        # A verdict prompt holds the problem, the reference and what reviews reach of the response. Each
        # row has three prompts (verdict, the same without the reference, correction), whose KV is kept.
        seen = host.max_length - config.episode.max_response + review_reach(config)
        rows = 3 * min(host.slots, config.judge.concurrent if config.judge else host.slots)
        size: dict[str, Any] = {"slots": rows, "max_length": 2 * seen + 512}
        disable_adapter = getattr(host.model, "disable_adapter", None)
        if path is None and disable_adapter is not None and not refresh:
            engine = host.engine(around=disable_adapter, **size)
        else:
            weights = path or resolve_path(config.policy.path, config)
            model = load_model(weights, "judge.path", dtype=config.policy.dtype)
            engine = host.engine(model.to(_device(host)), **size)
            if refresh and host.model is not None:  # what is behind a server is not trained here
                host.before_update.append(refresher(host, model, engine, refresh))

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


def review_reach(config: RunConfig) -> int:
    """The most tokens of a response that its reviews may see."""
    episode = config.episode
    each = episode.chunk_tokens + episode.max_correction + episode.spacing
    return min(episode.max_reviews * each, episode.max_response)


def refresher(host: EngineHost, model: Any, engine: Any, every: int) -> Callable[[int], None]:
    """Gives a judge's copy the policy's weights, a LoRA adapter added, when a multiple of `every`
    updates has come (after a resume: with the first update that is asked for)."""
    from mintrl_env.adapters.checkpoint_weights import copy_weights

    taken, source = 0, host.model
    assert source is not None

    def refresh(update: int) -> None:
        nonlocal taken
        if update // every > taken:
            taken = update // every
            copy_weights(source, model)
            engine.reset()

    return refresh


def _try_options(judge: Callable[..., Any], options: Mapping[str, Any], *parts: str) -> None:
    """Refuse wrong options now: the judge itself is made only when its model is loaded."""
    make("judge.options", judge, options, **dict.fromkeys(parts))


def _device(host: EngineHost) -> Any:
    if host.model is None:  # the policy is behind a server
        import torch

        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return next(host.model.parameters()).device
