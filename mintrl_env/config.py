"""A run as one YAML file: pydantic models that report all problems at once, with key path and file.

config = load_config("configs/quickstart_mintrl.yaml", ["train.updates=2"])
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from mintrl_env.errors import ConfigError, UsageError
from mintrl_env.splice import FENCE


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class LoraSection(_Section):
    """Train a LoRA adapter instead of the whole model (peft)."""

    r: int = Field(16, ge=1)
    alpha: int = Field(32, ge=1)
    dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: list[str] | str = "all-linear"


class PolicySection(_Section):
    """The policy: its weights, its prompt, its precision."""

    path: str = Field(description="a transformers folder, a Hub id, or warmup:student")
    dtype: Literal["float32", "bfloat16"] = "float32"
    lora: LoraSection | None = None
    chat: bool | None = Field(True, description="apply the chat template; null: only to messages")
    chat_template_kwargs: dict[str, Any] = {}
    system_prompt: str | None = None
    prompt_template: str = "{problem}"
    max_prompt: int = Field(2048, ge=1)


_FILES_KEYS = ("subset", "columns", "answer_regex", "form", "verifier")


class TasksSection(_Section):
    """Where tasks come from: a file or Hub id (`path`), or a procedural set (`name`)."""

    path: str | None = None
    name: str | None = None
    options: dict[str, Any] = {}
    split: str = "train"
    subset: str | list[str] | None = Field(None, description="of a Hub id; several: one by one")
    columns: dict[str, str | list[str]] = {}
    answer_regex: str | None = None
    form: Literal["deepcoder", "livecodebench", "humaneval", "mbpp"] | None = Field(
        None, description="of a public set with tests in a form of its own"
    )
    verifier: str = Field("math", description="a procedural set names its own")
    verifier_options: dict[str, Any] = {}
    limit: int | None = Field(None, ge=1)
    shuffle: bool = Field(False, description="by the run's seed, before `limit`")

    @model_validator(mode="after")
    def _one_source(self) -> TasksSection:
        if (self.path is None) == (self.name is None):
            raise ValueError("give either path (a file or Hub id) or name (a procedural set)")
        # A key that nothing reads is a misunderstanding.
        names, whose = (_FILES_KEYS, "path") if self.name is not None else (("options",), "name")
        idle = [n for n in names if getattr(self, n) != type(self).model_fields[n].default]
        if idle:
            raise ValueError(f"{', '.join(idle)}: goes with {whose}, which is not given")
        return self


class EvalSection(_Section):
    """Held-out problems, sampled by the policy alone: nobody reviews."""

    tasks: TasksSection
    n: int = Field(1, ge=1, description="samples a problem")
    before: bool = True
    after: bool = True
    every: int = Field(0, ge=0, description="also every so many updates; 0: never")


class ProbeSection(_Section):
    """A frozen set of prompts on which the judge's revises per review are measured."""

    tasks: TasksSection
    n: int = Field(1, ge=1, description="reviewed samples a problem")


class EpisodeSection(_Section):
    """(k, R, L), T and the steps; see `mintrl_env.episode.EpisodeConfig`."""

    chunk_tokens: int = Field(512, ge=1)
    max_reviews: int = Field(4, ge=0)
    max_correction: int = Field(64, ge=0)
    max_response: int = Field(16384, ge=1)
    step_delimiters: list[Annotated[str, Field(min_length=1)]] = ["\n\n", FENCE]
    spacing: int = Field(0, ge=0)


class RolloutSection(_Section):
    """How rollouts run; see `mintrl_env.rollout.RolloutConfig`."""

    n_control: int = Field(8, ge=0)
    n_intervened: int = Field(8, ge=0)
    temperature: float = Field(1.0, gt=0)
    deadline_s: float = Field(1800.0, gt=0)
    max_retries: int = Field(1, ge=0)
    slots: int = Field(16, ge=1, description="rows of the engine's KV cache; memory grows with it")
    schedule: Literal["free", "rounds"] = "free"
    verifier_concurrent: int = Field(16, ge=1, description="scores at once, of one process")
    engine: Literal["transformers", "vllm", "server"] = Field(
        "transformers", description="vllm: in this process, on the trainer's GPU; server: by HTTP"
    )
    engine_options: dict[str, Any] = Field(
        {}, description="vllm: memory, sleep, EngineArgs; server: `adapters.server_options`"
    )

    @model_validator(mode="after")
    def _engine(self) -> RolloutSection:
        from mintrl_env.adapters.server_options import check_engine

        check_engine(self.engine, self.schedule, self.engine_options)
        return self


class JudgeSection(_Section):
    """The judge and its guards."""

    name: str = Field(description="a registered name or package.module:Class")
    path: str | None = Field(None, description="weights of a judge that runs in this process")
    options: dict[str, Any] = {}
    guards: dict[str, dict[str, Any]] = Field(
        {"leak": {}}, description="guard name -> its options, in order"
    )
    on_failure: str = Field(
        "keep", description="keep, drop or stop; by cause: keep, auth=stop, unparsed=drop"
    )
    max_failure_rate: float = Field(0.5, gt=0, le=1)
    concurrent: int = Field(64, ge=1)

    @field_validator("on_failure")
    @classmethod
    def _rule(cls, text: str) -> str:
        from mintrl_env.failures import failure_rule

        try:
            failure_rule(text)
        except UsageError as error:
            raise ValueError(str(error)) from None
        return text


class PreflightSection(_Section):
    """What is looked at before a run burns money or hours, and what refuses it; `mintrl preflight`."""

    before_training: Literal["auto", "always", "never"] = Field(
        "auto", description="auto: where the judge is not one that runs in this process"
    )
    tasks: int = Field(5, ge=1, description="of the one before a training; --n of the command")
    corrections: int = Field(4, ge=0, description="whose uplift is measured, a task; 0: none")
    samples: int = Field(1, ge=1, description="continuations of each, with and without it")
    min_parse_rate: float = Field(0.9, ge=0, le=1, description="verdicts / answers")
    max_leaks: int = Field(0, ge=0, description="corrections with the answer, guards passed")
    min_decided: float = Field(0.95, ge=0, le=1, description="rows scored / rows finished")
    min_finished: float = Field(0.95, ge=0, le=1, description="rows finished / rows")


def _verifier_problems(own: TasksSection, other: TasksSection, where: str) -> list[str]:
    keys = ["verifier_options"]
    if own.path is not None and other.path is not None:  # procedural sets name their own
        keys.append("verifier")
    return [
        f"{where}.{key}: {getattr(other, key)!r} is not that of tasks, {getattr(own, key)!r}: a run "
        "has one verifier; give the same, or use `mintrl eval` with a config of its own"
        for key in keys
        if getattr(own, key) != getattr(other, key)
    ]


def _infinity(value: Any) -> Any:
    return math.inf if value in ("inf", ".inf", "infinity") else value


class ObjectiveSection(_Section):
    """The regression (arXiv 2609.12419); see `mintrl_env.trainers.objective`."""

    kappa: float = Field(-0.2, le=0, description="Const's anchor, nats a token")
    beta_1: Annotated[float, BeforeValidator(_infinity)] = Field(math.inf, gt=0, allow_inf_nan=True)
    beta_2: float = Field(1e-3, gt=0)
    baseline: Literal["mean", "loo"] = "mean"
    loss_scale: Literal["paper", "matched"] = "paper"
    intervention_updates: int = Field(200, ge=-1, description="-1: the judge stays on")
    rewarm_updates: int = Field(0, ge=0)


class TrainSection(_Section):
    """Updates, batches and the optimiser."""

    updates: int = Field(500, ge=1)
    prompts_per_update: int = Field(32, ge=1)
    minibatches: int = Field(1, ge=1, description="optimiser steps that split an update's rows")
    iterations: int = Field(1, ge=1, description="passes over an update's rows")
    micro_batch: int = Field(16, ge=1, description="rows a forward")
    learning_rate: float = Field(1e-6, gt=0)
    warmup_steps: int = Field(0, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    seed: int = Field(0, ge=0, lt=2**32)
    threads: int = Field(1, ge=1, description="torch threads on the CPU")
    gradient_checkpointing: bool = False
    checkpoint_every: int = Field(50, ge=0, description="updates; 0: only at the end")
    keep_checkpoints: int = Field(2, ge=1)
    report_to: list[str] = []


class RunConfig(_Section):
    """One run."""

    method: Literal["mintrl-const", "mintrl-proxy", "grpo"]
    policy: PolicySection
    tasks: TasksSection
    evaluation: EvalSection | None = None
    probe: ProbeSection | None = None
    episode: EpisodeSection = EpisodeSection()
    rollout: RolloutSection = RolloutSection()
    judge: JudgeSection | None = None
    objective: ObjectiveSection = ObjectiveSection()
    train: TrainSection = TrainSection()
    preflight: PreflightSection = PreflightSection()
    warmup: dict[Literal["student", "teacher"], dict[str, Any]] = Field(
        {}, description="settings of the built-in models that paths warmup:student|teacher name"
    )

    @model_validator(mode="after")
    def _consistent(self) -> RunConfig:
        problems = []
        if self.method != "grpo":
            if self.judge is None:
                problems.append(f"judge: {self.method} needs one (method: grpo does not)")
            if self.rollout.n_control < 1:
                problems.append("rollout.n_control: no baseline without a control")
            if self.rollout.n_intervened < 1:
                problems.append("rollout.n_intervened: nothing to review; method: grpo does that")
        if self.rollout.n_control + self.rollout.n_intervened < 2:
            problems.append("rollout: a group needs two rows at least")
        rows = self.rows_per_update
        if rows % (self.train.micro_batch * self.train.minibatches):
            problems.append(
                f"train: {rows} rows an update (prompts_per_update x group) don't split into "
                f"{self.train.minibatches} minibatch(es) of {self.train.micro_batch}-row forwards: "
                f"change train.micro_batch (to a divisor of {rows // self.train.minibatches})"
            )
        for where, section in (("evaluation", self.evaluation), ("probe", self.probe)):
            if section is not None:
                problems += _verifier_problems(self.tasks, section.tasks, f"{where}.tasks")
        if self.probe is not None and self.judge is None:
            problems.append("probe: it measures a judge, and there is none")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def group_size(self) -> int:
        return self.rollout.n_control + self.rollout.n_intervened

    @property
    def rows_per_update(self) -> int:
        return self.train.prompts_per_update * self.group_size


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file and apply `a.b=c` overrides (values are YAML).

    `judge` may be the name of a YAML file with the section's keys (beside the config, or in the
    working folder), so that judges are swapped by one line.

    Raises:
        ConfigError: with every problem, its key and the file.
    """
    file = Path(path)
    data = _read_mapping(file, "a config")
    if "sets" in data and "policy" not in data:
        raise ConfigError(f"{file} is a suite of evaluations: mintrl eval-suite RUN {file}")
    if "name" in data and "policy" not in data:
        raise ConfigError(
            f"{file} is a judge's file: a run's config names it, as judge: {file.name}"
        )
    _read_judge(data, file)
    for override in overrides:
        apply_override(data, override)
        _read_judge(data, file)
    return parse_config(data, str(file))


def _read_judge(data: dict[str, Any], config: Path) -> None:
    if isinstance(data.get("judge"), str):
        file = _beside(config, data["judge"])
        data["judge"] = _read_mapping(file, "a judge's file")
        if "policy" in data["judge"]:
            raise ConfigError(
                f"judge: {file} is a run's config, not a judge's file (name, options, guards, ...)"
            )


def _beside(config: Path, name: str) -> Path:
    """A file named in a config: beside the config, else in the working folder."""
    near = config.parent / name
    return near if near.exists() else Path(name)


def _read_mapping(file: Path, what: str) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is no UTF-8 text: {error}") from error
    try:
        data = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: no YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: {what} is a mapping of keys, not {type(data).__name__}")
    return data


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice: YAML takes the last one without a word."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = key.value
            if name != "<<" and str(name) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {name!r} stands here a second time", key.start_mark
                )
            seen.add(str(name))
        return super().construct_mapping(node, deep)


def parse_config(data: Mapping[str, Any], where: str) -> RunConfig:
    """A mapping as a RunConfig; see `load_config`."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        lines = [_problem(item, data) for item in error.errors(include_url=False)]
        count = f"{len(lines)} problem{'s' if len(lines) > 1 else ''}"
        raise ConfigError(f"{where}: {count}\n  " + "\n  ".join(lines)) from None


def dump_config(config: RunConfig) -> str:
    """The resolved config as YAML that `load_config` reads back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def config_differences(a: RunConfig, b: RunConfig) -> list[tuple[str, Any, Any]]:
    """The keys in which two resolved configs differ, with both values."""
    flat_a, flat_b = _flat(a.model_dump(mode="json")), _flat(b.model_dump(mode="json"))
    return [
        (key, flat_a.get(key), flat_b.get(key))
        for key in dict.fromkeys([*flat_a, *flat_b])
        if flat_a.get(key) != flat_b.get(key)
    ]


def _flat(data: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(data, dict) or not data:
        return {prefix: data}
    out: dict[str, Any] = {}
    for key, value in data.items():
        out |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return out


def apply_override(data: dict[str, Any], override: str) -> None:
    """Write `section.key=value` into nested mappings; the value is YAML. ConfigError if it isn't."""
    key, equals, text = override.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise ConfigError(f"--set {override!r}: write it as section.key=value")
    try:
        value = yaml.safe_load(text) if text.strip() else None
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override!r}: the value is no YAML: {error}") from error
    at: Any = data
    for name in names[:-1]:
        if not isinstance(at.get(name), dict):
            at[name] = {}
        at = at[name]
    at[names[-1]] = value


def _problem(item: Any, data: Mapping[str, Any]) -> str:
    place = ".".join(str(part) for part in item["loc"]) or "(the whole)"
    if item["type"] == "extra_forbidden":
        known = _known_keys(item["loc"][:-1])
        near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
        return f"{place}: no such key; {hint}"
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "missing":
        return f"{place}: is missing"
    if item["type"] == "value_error":
        return f"{place}: {message}" if item["loc"] else message
    return f"{place}: {message} (it is {item['input']!r})"


def _known_keys(loc: Sequence[Any]) -> list[str]:
    model: Any = RunConfig
    for part in loc:
        field = model.model_fields.get(part) if hasattr(model, "model_fields") else None
        if field is None:
            return []
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
        model = next((c for c in candidates if hasattr(c, "model_fields")), None)
    return sorted(model.model_fields) if hasattr(model, "model_fields") else []
