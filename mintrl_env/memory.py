"""`mintrl memory`: what a recipe takes, by formula: memory of a GPU, the judge's work, hours.

Rows, reviews and tokens come from the config, by the arithmetic of the preflight's forecast; how long
responses are, how often the judge revises, how fast GPUs write and learn is stated, not measured.
`mintrl preflight` measures the first two, `mintrl plan` goes into queues and stragglers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from mintrl_env.config import RunConfig, apply_override, parse_config
from mintrl_env.console import RunConsole
from mintrl_env.errors import ConfigError
from mintrl_env.judge_recipes import review_reach
from mintrl_env.memory_formula import GIB, REST, SERVED_SHARE, Training, kv_row, served
from mintrl_env.memory_shapes import shape_of
from mintrl_env.placement import JUDGE_MEMORY, local_judge
from mintrl_env.preflight import plan_of
from mintrl_env.preflight_forecast import JudgeLimits, Measured, forecast
from mintrl_env.preflight_servers import asks_service, is_judged
from mintrl_env.types import Usage

HALVES = (
    "train.updates=half",
    "train.prompts_per_update=half",
    "episode.max_response=half",
    "train.micro_batch=1",
    "policy.lora={r: 16}",
    "policy.dtype=bfloat16",
)
"""What is tried to see what it saves; "half" is half of what the recipe has."""

_INSTRUCTIONS, _PROBLEM, _VERDICT = 700, 250, 120  # tokens
_SAMPLE = 1000  # rows that the shares are worked out for


@dataclass(frozen=True, slots=True)
class Stated:
    """What the formulas are told.

    Attributes:
        gpus, gpu_gib: that train, and what each has.
        response: mean tokens of a response.
        revise: share of reviews that are a Revise.
        write, learn: tokens a second of one GPU, writing responses and learning from them; None: no
            hours are reckoned.
        evaluation: problems of the run's own evaluation, where its section has no limit.
    """

    gpus: int = 1
    gpu_gib: float = 80.0
    response: int = 4096
    revise: float = 0.35
    write: float | None = None
    learn: float | None = None
    evaluation: int = 30


def reckon(config: RunConfig, stated: Stated) -> dict[str, Any]:
    """Bytes, rows, calls, tokens and hours of a whole run.

    Raises:
        ConfigError: a model whose shape is not known.
    """
    if config.policy.path.startswith("warmup:"):
        raise ConfigError("policy.path: the built-in models are too small to reckon with")
    shape = shape_of(config.policy.path)
    length = config.policy.max_prompt + config.episode.max_response
    training = Training(
        shape,
        bf16=config.policy.dtype == "bfloat16",
        lora=config.policy.lora.r if config.policy.lora else 0,
        rows=config.train.micro_batch,
        length=length,
        checkpointing=config.train.gradient_checkpointing,
        gpus=stated.gpus,
    )
    state, step = training.state(), training.step()
    state |= _self_judge(config, training) | _judge_beside(config, stated)
    stays = sum(state.values())
    engine = _engine(config, shape, length, stated, stays=stays)
    learning = stays + sum(step.values()) + REST + engine["while_learning"]
    return {
        "parameters": shape.parameters,
        "trained": training.trained,
        "state": state,
        "step": step,
        "full_logits": training.full_logits(),
        "engine": engine,
        "peak": max(learning, engine["while_writing"]),
        "learning": learning,
        "sharded": training.sharded(max(stated.gpus, 2)),
        "judge_gpu": _judge_gpu(config),
        **_work(config, stated),
    }


def _engine(
    config: RunConfig, shape: Any, length: int, stated: Stated, *, stays: int
) -> dict[str, Any]:
    """The engine's part: bytes while it writes and while the trainer learns, rows that fit."""
    row, rollout = kv_row(shape, length), config.rollout
    found: dict[str, Any] = {"kv_row": row, "kind": rollout.engine}
    if rollout.engine == "transformers":  # shares the weights; its cache stays
        cache = rollout.slots * row
        return {
            **found,
            "rows": float(rollout.slots),
            "while_writing": stays + cache + REST,
            "while_learning": cache,
        }
    # Several training processes have no vLLM in them: `mintrl train-command` takes servers.
    if rollout.engine == "server" or (rollout.engine == "vllm" and stated.gpus > 1):
        room = served(shape, int(SERVED_SHARE * stated.gpu_gib * GIB))
        found |= {"kind": "server"}
        return {**found, "rows": room / row, "while_writing": stays + REST, "while_learning": 0}
    options = rollout.engine_options
    share = int(float(options.get("memory", 0.4)) * stated.gpu_gib * GIB)
    asleep = bool(options.get("sleep", 0))
    return {
        **found,
        "rows": served(shape, share) / row,
        "while_writing": stays + share + REST,
        "while_learning": 0 if asleep else share,
    }


def _self_judge(config: RunConfig, training: Training) -> dict[str, int]:
    """A self-judge lives beside the policy: its first version (the adapter switched off where there is
    one), and the KV cache of three prompts a review."""
    judge = config.judge
    if judge is None or judge.name != "self" or not is_judged(config):
        return {}
    rows = 3 * min(config.rollout.slots, judge.concurrent)
    longest = 2 * (config.policy.max_prompt + review_reach(config)) + 512
    size = 2 if training.bf16 else 4
    copy = {} if training.lora else {"self-judge": size * training.shape.parameters}
    return {**copy, "self-judge's KV": rows * kv_row(training.shape, longest)}


def _judge_beside(config: RunConfig, stated: Stated) -> dict[str, int]:
    """A judge's server on the only GPU, as `mintrl train-command` starts it."""
    if stated.gpus > 1 or local_judge(config) is None:
        return {}
    return {"judge's server": int(JUDGE_MEMORY * stated.gpu_gib * GIB)}


def _judge_gpu(config: RunConfig) -> dict[str, Any] | None:
    """A served judge whose shape is known: its weights, and a review's KV cache."""
    options = config.judge.options if config.judge is not None else {}
    try:
        shape = shape_of(str(options.get("model")))
    except ConfigError:
        return None
    if not asks_service(config):
        return None
    longest = _INSTRUCTIONS + config.policy.max_prompt + review_reach(config) + _VERDICT
    return {"weights": 2 * shape.parameters, "kv_review": kv_row(shape, longest)}


def measured_as_stated(config: RunConfig, stated: Stated) -> Measured:
    """What groups would have used, if they were as is stated."""
    episode, judge = config.episode, config.judge
    response = min(stated.response, episode.max_response)
    apart = (
        episode.chunk_tokens + episode.spacing
    )  # from the start of a review's chunk to the next's
    reviews = min(episode.max_reviews, math.ceil(response / apart))
    correction = episode.max_correction
    calls = prompt = completion = 0.0
    if is_judged(config) and judge is not None and asks_service(config):
        mode = judge.options.get("mode", "two-call")
        if (
            mode == "cut-only"
        ):  # the policy writes the step again; corrected is one that fails twice
            correction = 0
        for index in range(reviews):
            accepted = index * apart
            calls += 1
            prompt += _INSTRUCTIONS + _PROBLEM + accepted + episode.chunk_tokens
            completion += _VERDICT
            if mode == "two-call":
                calls += stated.revise
                prompt += stated.revise * (_INSTRUCTIONS / 2 + _PROBLEM + accepted)
            completion += stated.revise * correction
    revised = reviews * stated.revise
    dropped = revised * episode.chunk_tokens / 2  # a cut falls in the middle, on average
    usage = Usage(
        prompt_tokens=round(_SAMPLE * prompt),
        completion_tokens=round(_SAMPLE * completion),
        calls=round(_SAMPLE * calls),
    )
    inserted = revised * correction
    return Measured(
        rows=2 * _SAMPLE,
        reviewed_rows=_SAMPLE,
        reviews=_SAMPLE * reviews,
        usage=usage,
        sampled_reviewed=round(_SAMPLE * (response + dropped - min(inserted, response))),
        sampled_other=_SAMPLE * response,
        review_seconds=0.0,
        seconds=0.0,
    )


def _work(config: RunConfig, stated: Stated) -> dict[str, Any]:
    section = config.evaluation
    problems = (section.tasks.limit or stated.evaluation) if section else 0
    plan = plan_of(config, evaluation=problems)
    measured = measured_as_stated(config, stated)
    found = forecast(measured, plan, JudgeLimits(service=asks_service(config)))
    response = min(stated.response, config.episode.max_response)
    rows = plan.updates * plan.rows_per_update
    learnt = rows * (response + _PROBLEM) * config.train.iterations
    hours = None
    if stated.write and stated.learn:
        writing = found["policy_tokens"] / (stated.write * stated.gpus) / 3600
        learning = learnt / (stated.learn * stated.gpus) / 3600
        hours = {"writing": writing, "learning": learning, "all": writing + learning}
    names = ("rows", "reviewed_rows", "reviews", "calls", "prompt_tokens", "completion_tokens",
             "policy_tokens")  # fmt: skip
    return {**{name: found[name] for name in names}, "learnt_tokens": learnt, "hours": hours}


# --- halves


def halves(config: RunConfig, stated: Stated) -> list[tuple[str, dict[str, Any]]]:
    """What each change alone makes of it; changes that the config has already, or that do not fit
    it, are left out."""
    found = []
    for change in HALVES:
        key, _, value = change.partition("=")
        data = config.model_dump(mode="json")
        before: Any = data
        for part in key.split("."):
            before = before[part]
        if value == "half":
            if before < 2:
                continue
            change = f"{key}={before // 2}"
        apply_override(data, change)
        try:
            changed = parse_config(data, "a half")
        except ConfigError:
            continue
        if changed == config or (key == "policy.lora" and config.policy.lora is not None):
            continue
        shorter = stated
        if key == "episode.max_response":
            shorter = replace(stated, response=stated.response // 2)
        found.append((change, reckon(changed, shorter)))
    return found


# --- printing


def print_memory(config: RunConfig, stated: Stated, console: RunConsole) -> None:
    """Memory, work and hours as tables, and what halves them."""
    found = reckon(config, stated)
    console.say(
        f"By formula, nothing measured. Stated: {stated.gpus} GPU(s) of {stated.gpu_gib:g} GiB, "
        f"responses of {stated.response:,} tokens, {stated.revise:.0%} of reviews revise"
    )
    console.console.print(_memory_table(found))
    fits = "fits" if found["peak"] <= stated.gpu_gib * GIB else "does not fit"
    console.say(
        f"peak {_gib(found['peak'])} of {stated.gpu_gib:g} GiB: {fits}; sharded over "
        f"{max(stated.gpus, 2)} GPUs (veRL, FSDP) the trainer's part is {_gib(found['sharded'])}"
    )
    engine = found["engine"]
    console.say(
        f"KV cache: {_gib(engine['kv_row'])} a row of full length; {engine['rows']:.0f} such rows fit "
        f"({engine['kind']}), more of shorter ones"
    )
    if (judge := found["judge_gpu"]) is not None:
        beside = "judge's server" in found["state"]
        where = f"in {JUDGE_MEMORY:.0%} of this GPU" if beside else "on a GPU of its own"
        console.say(
            f"the judge, {where}: {_gib(judge['weights'])} of weights, and at most "
            f"{_gib(judge['kv_review'])} of KV a review"
        )
    console.console.print(_work_table(found))
    console.console.print(_halves_table(found, halves(config, stated)))


def _memory_table(found: dict[str, Any]) -> Table:
    table = Table("memory of each training GPU", "GiB")
    for part, size in {**found["state"], **found["step"]}.items():
        table.add_row(part, f"{size / GIB:.1f}")
    table.add_row("the rest", f"{REST / GIB:.1f}")
    table.add_row("learning, in all", f"{found['learning'] / GIB:.1f}")
    table.add_row("writing, in all", f"{found['engine']['while_writing'] / GIB:.1f}")
    table.add_row("(full logits would add)", f"{found['full_logits'] / GIB:.1f}")
    return table


def _work_table(found: dict[str, Any]) -> Table:
    table = Table("the whole run", "")
    table.add_row("rows", f"{found['rows']:,}, {found['reviewed_rows']:,} of them open to review")
    table.add_row("tokens written", _billions(found["policy_tokens"]))
    table.add_row("tokens learnt from", _billions(found["learnt_tokens"]))
    table.add_row("judge calls", f"{found['calls']:,} for {found['reviews']:,} reviews")
    table.add_row(
        "judge tokens",
        f"{_billions(found['prompt_tokens'])} read, {_billions(found['completion_tokens'])} written",
    )
    hours = found["hours"]
    table.add_row(
        "hours",
        "say how fast: --write and --learn, tokens a second of a GPU"
        if hours is None
        else f"{hours['all']:.0f}: writing {hours['writing']:.0f}, learning {hours['learning']:.0f}",
    )
    return table


def _halves_table(found: dict[str, Any], changed: Sequence[tuple[str, dict[str, Any]]]) -> Table:
    table = Table("--set", "peak GiB", "judge calls", "hours")
    for name, values in (("(as it is)", found), *changed):
        hours = values["hours"]
        table.add_row(
            name,
            f"{values['peak'] / GIB:.1f}",
            f"{values['calls']:,}",
            "-" if hours is None else f"{hours['all']:.0f}",
        )
    return table


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


def _billions(count: float) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 1e7 else f"{count:,.0f}"
