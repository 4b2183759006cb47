"""The figures that a plan reckons with: a preset, what was measured, and a file of one's own.

Later ones go before earlier ones, key by key, and each key remembers where it came from.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from mintrl_env.config import _read_mapping, _Section
from mintrl_env.errors import ConfigError
from mintrl_env.plan_engine import Speed
from mintrl_env.plan_rows import Distribution, Habits


class SpreadFigures(_Section):
    """A number that varies: median and p99 (or p95) of a log-normal, low and high, or values."""

    median: float | None = Field(None, gt=0)
    p95: float | None = Field(None, gt=0)
    p99: float | None = Field(None, gt=0)
    low: float | None = Field(None, ge=0)
    high: float | None = Field(None, ge=0)
    values: list[float] | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _one_kind(self) -> SpreadFigures:
        given = {name for name in type(self).model_fields if getattr(self, name) is not None}
        if given not in ({"median", "p95"}, {"median", "p99"}, {"low", "high"}, {"values"}):
            raise ValueError("give median and p99, median and p95, low and high, values, or file")
        for low, high in ((self.median, self.p95 or self.p99), (self.low, self.high)):
            if low is not None and high is not None and low > high:
                raise ValueError(f"{low:g} is above {high:g}")
        if self.values is not None and min(self.values) < 0:
            raise ValueError("values are >= 0")
        return self

    def distribution(self) -> Distribution:
        if self.values is not None:
            return Distribution(values=tuple(self.values))
        if self.low is not None and self.high is not None:
            return Distribution(ends=(self.low, self.high))
        assert self.median is not None
        if self.p99 is not None:
            return Distribution.log_normal(self.median, self.p99)
        assert self.p95 is not None
        return Distribution.log_normal(self.median, self.p95, "p95")


Spread = float | SpreadFigures


class EngineFigures(_Section):
    """One inference engine; see `mintrl_env.plan_engine.Speed`."""

    gpus: int = Field(1, ge=1, description="of one engine (tensor parallel)")
    tokens_per_s: dict[int, float] = Field(
        min_length=1, description="rows at once -> tokens/s of all of them, decoding"
    )
    prefill_tokens_per_s: float = Field(math.inf, gt=0, allow_inf_nan=True)
    request_s: float = Field(0.0, ge=0, description="seconds that any request costs besides")
    admit_s: float = Field(0.0, ge=0, description="seconds of letting requests in, however many")
    admit_row_s: float = Field(0.0, ge=0, description="more of it for each row at work")
    context_s: float = Field(0.0, ge=0, description="seconds of a step a token of context")
    slots: int = Field(256, ge=1, description="rows at once")

    @field_validator("tokens_per_s")
    @classmethod
    def _rising(cls, curve: dict[int, float]) -> dict[int, float]:
        if min(curve) < 1 or min(curve.values()) <= 0:
            raise ValueError("rows are >= 1 and tokens/s > 0")
        steps = [rows / curve[rows] for rows in sorted(curve)]
        if any(b < a * 0.999 for a, b in pairwise(steps)):
            raise ValueError(
                "a step of more rows takes no less time: rows / tokens_per_s may not fall"
            )
        return curve

    def speed(self) -> Speed:
        return Speed.of_throughput(
            self.tokens_per_s,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            request_s=self.request_s,
            context_s=self.context_s,
            slots=self.slots,
            admit_s=self.admit_s,
            admit_row_s=self.admit_row_s,
        )


class PolicyFigures(EngineFigures):
    """The policy's engines."""

    in_flight: int | None = Field(
        None, ge=1, description="rows begun and not ended for each engine; null: all at once"
    )
    prefix_cache: bool = Field(True, description="KV is kept from chunk to chunk")


class PricesFigures(_Section):
    """US dollars a million tokens."""

    prompt: float = Field(ge=0)
    completion: float = Field(ge=0)


class JudgeFigures(_Section):
    """Who reviews, how fast, and what for.

    kind: service (latency_s and the limits), own (`engine`, on GPUs of its own), shared (on the
    policy's engines), instant; auto: by the config's judge.
    """

    kind: Literal["auto", "service", "own", "shared", "instant"] = "auto"
    latency_s: Spread = Field(description="of a review, waits for the limits apart")
    engine: EngineFigures | None = None
    calls: float = Field(1.0, ge=1, description="requests a review")
    extra_tokens: float = Field(ge=0, description="read besides prompt, response and chunk")
    tokens: Spread = Field(description="written a review")
    concurrent: int | None = Field(None, ge=1, description="null: the config's")
    rpm: int | None = Field(None, ge=1, description="null: the config's")
    tpm: int | None = Field(None, ge=1, description="null: the config's")
    prices: PricesFigures | None = Field(None, description="null: the config's")


class VerifierFigures(_Section):
    """Scores."""

    seconds: Spread
    workers_per_gpu: float = Field(gt=0, description="scores at once, for each GPU of the run")


class TrainerFigures(_Section):
    """Learning: its forward for the anchor included."""

    tokens_per_s: float = Field(gt=0, description="prompt and response, of one GPU, one pass")
    doubling: float = Field(1.0, gt=0, le=1, description="efficiency left by twice the GPUs")
    fixed_s: float = Field(0.0, ge=0, description="seconds of an update besides")
    min_gpus: int = Field(1, ge=1, description="fewer have no room for model and optimiser")

    def seconds(self, tokens: int, longest: int, gpus: int, passes: int = 1) -> float:
        """Of an update; the GPU with the longest row has at least that to do."""
        rate = self.tokens_per_s * math.pow(self.doubling, math.log2(gpus))
        return self.fixed_s + passes * max(tokens / gpus, float(longest)) / rate


class SyncFigures(_Section):
    """New weights on their way from trainer to engines."""

    seconds: float = Field(0.0, ge=0)
    doubling_s: float = Field(0.0, ge=0, description="more for twice the engines")


class RowFigures(_Section):
    """What policy and judge do with a prompt."""

    prompt_tokens: Spread
    response_tokens: Spread = Field(description="as the policy would end it; cut at max_response")
    revise: float = Field(ge=0, le=1, description="share of reviews that revise")
    kept: Spread = Field(description="share of a revised chunk that stays")
    correction_tokens: Spread


class Figures(_Section):
    """All of them; times in seconds, tokens of the policy's tokenizer."""

    policy: PolicyFigures
    judge: JudgeFigures
    verifier: VerifierFigures
    trainer: TrainerFigures
    sync: SyncFigures
    rows: RowFigures
    gpu_usd_per_hour: float | None = Field(None, ge=0)

    def habits(self, *, latency_factor: float = 1.0, instant: bool = False) -> Habits:
        rows, judge = self.rows, self.judge
        return Habits(
            prompt_tokens=_spread(rows.prompt_tokens),
            response_tokens=_spread(rows.response_tokens),
            revise=rows.revise,
            kept=_spread(rows.kept),
            correction_tokens=_spread(rows.correction_tokens),
            review_extra_tokens=judge.extra_tokens,
            review_tokens=_spread(judge.tokens),
            calls=judge.calls,
            latency_s=Distribution() if instant else _spread(judge.latency_s),
            verifier_s=_spread(self.verifier.seconds),
        )


def _spread(given: Spread) -> Distribution:
    return given.distribution() if isinstance(given, SpreadFigures) else Distribution(given)


@dataclass(frozen=True, slots=True)
class Sourced:
    """Figures, and where each comes from.

    Attributes:
        sources: section.key -> "given: ..." or "measured: ...".
    """

    figures: Figures
    sources: Mapping[str, str]


def gather(*layers: tuple[str, Mapping[str, Any]]) -> Sourced:
    """Figures from (source, nested mapping) pairs, the later over the earlier.

    Raises:
        ConfigError: with every problem, its key and its source.
    """
    data: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for source, layer in layers:
        for section, values in layer.items():
            if not isinstance(values, Mapping):
                data[section], sources[section] = values, source
                continue
            held = data.setdefault(section, {})
            if not isinstance(held, dict):
                held = data[section] = {}
            for key, value in values.items():
                held[key] = value
                sources[f"{section}.{key}"] = source
    try:
        return Sourced(Figures.model_validate(data), sources)
    except ValidationError as error:
        lines = []
        for item in error.errors(include_url=False):
            place = [str(part) for part in item["loc"]]
            source = sources.get(".".join(place[:2])) or sources.get(place[0], "figures")
            message = str(item["msg"]).removeprefix("Value error, ")
            if item["type"] == "extra_forbidden":
                message = "no such key"
            lines.append(f"{'.'.join(place)}: {message} ({source})")
        raise ConfigError(
            f"the plan's figures: {len(lines)} problem(s); docs/planning.md lists the keys\n  "
            + "\n  ".join(dict.fromkeys(lines))
        ) from None


def read_figures(path: Path) -> dict[str, Any]:
    """A file of figures as nested mappings; `file: NAME` beside it becomes its values.

    Raises:
        ConfigError: it cannot be read, or is no YAML mapping; or a file that it names.
    """
    return {key: _with_files(value, path) for key, value in _read_mapping(path, "figures").items()}


def _with_files(value: Any, beside: Path) -> Any:
    if not isinstance(value, dict):
        return value
    if set(value) == {"file"}:
        return {"values": _numbers(beside.parent / str(value["file"]), beside)}
    return {key: _with_files(inner, beside) for key, inner in value.items()}


def _numbers(path: Path, named_by: Path) -> list[float]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{named_by}: file: {path} cannot be read: {error}") from error
    numbers = []
    for line, row in enumerate(text.splitlines(), 1):
        for word in re.split(r"[\s,\[\]]+", row.strip()):
            if not word:
                continue
            try:
                numbers.append(float(word))
            except ValueError:
                raise ConfigError(
                    f"{path}:{line}: {word!r} is no number (named by {named_by})"
                ) from None
    if not numbers:
        raise ConfigError(f"{path}: no numbers (named by {named_by})")
    return numbers
