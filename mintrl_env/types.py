"""The whole vocabulary: what a task, a chunk, a review, a verdict and a score are.

Token arrays are numpy: ids int32, provenance int8, log-probs float32 with NaN where the policy did
not sample the token. They are made read-only when they enter a frozen type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum, StrEnum
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt

from mintrl_env.errors import UsageError

IdsLike = Sequence[int] | npt.NDArray[Any]


class Provenance(IntEnum):
    """Who wrote a response token."""

    POLICY = 0
    INTERVENTION = 1
    ENVIRONMENT = 2


class Kind(StrEnum):
    """Whether a trajectory is open to review."""

    CONTROL = "control"
    INTERVENED = "intervened"


class StopReason(StrEnum):
    """Why an episode ended. A DEADLINE or ERROR row is not valid; a LENGTH row is (truncated)."""

    EOS = "eos"
    LENGTH = "length"
    ENVIRONMENT = "environment"
    DEADLINE = "deadline"
    ERROR = "error"


class Finish(StrEnum):
    """Why a policy stopped writing a chunk: end of sequence, max_tokens, or a stop string."""

    EOS = "eos"
    LENGTH = "length"
    STOP = "stop"


class VerdictKind(StrEnum):
    KEEP = "keep"
    REVISE = "revise"


class Outcome(StrEnum):
    """What became of a review; counted apart, since only KEEP says that the judge saw no error."""

    KEEP = "keep"
    REVISE = "revise"
    GUARDED = "guarded"
    FAILED = "failed"
    UNPARSED = "unparsed"


_INT32 = np.iinfo(np.int32)
_INT32_DTYPE = np.dtype(np.int32)
_set = object.__setattr__
_NANS = np.full(1024, np.nan, dtype=np.float32)  # shared by all chunks without log-probs
_NANS.flags.writeable = False


def frozen_ids(ids: IdsLike) -> npt.NDArray[np.int32]:
    """A read-only int32 copy of token ids, shape (T,).

    Raises:
        UsageError: not one row of integers that fit int32 (a float id is never rounded).
    """
    if type(ids) is np.ndarray and ids.dtype is _INT32_DTYPE and ids.ndim == 1:
        copy: npt.NDArray[np.int32] = ids.copy()  # the case of every step
        copy.setflags(write=False)
        return copy
    given = np.asarray(ids)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise UsageError(
            f"token ids are one row of integers, not {given.dtype} of shape {given.shape}"
        )
    fits = given.dtype == np.int32 or not given.size
    if not fits and not (_INT32.min <= given.min() and given.max() <= _INT32.max):
        raise UsageError("a token id does not fit into int32")
    array = given.astype(np.int32)
    array.flags.writeable = False
    return array


def frozen_logprobs(logprobs: Any, length: int) -> npt.NDArray[np.float32]:
    """A read-only float32 copy, shape (length,); None becomes NaN throughout.

    Raises:
        UsageError: not one row of numbers, or not `length` of them.
    """
    if logprobs is None:
        if length <= len(_NANS):
            return _NANS[:length]
        array = np.full(length, np.nan, dtype=np.float32)
    else:
        array = np.array(logprobs, dtype=np.float32)
    if array.shape != (length,):
        raise UsageError(f"{length} token ids came with log-probs of shape {array.shape}")
    array.flags.writeable = False
    return array


class _ByValue:
    """Equality by value for dataclasses that hold arrays: NaN equals NaN, int32 differs from int64.

    The `==` that dataclasses write themselves raises on arrays.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(
            _equal(getattr(self, f.name), getattr(other, f.name))
            for f in fields(self)  # type: ignore[arg-type]
        )

    __hash__ = None  # type: ignore[assignment]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    return bool(a == b)


def _count(name: str, value: Any) -> int:
    try:
        number = index(value)
    except TypeError as error:
        raise UsageError(f"{name} is an integer, not {value!r}") from error
    if not 0 <= number < 2**63:
        raise UsageError(f"{name} counts from 0, in 63 bits, not {number}")
    return number


def _int_ids(ids: IdsLike) -> tuple[int, ...]:
    try:
        return tuple(index(i) for i in ids)
    except TypeError as error:
        raise UsageError(f"a correction is a text or token ids, not {ids!r}") from error


@dataclass(frozen=True, slots=True)
class Task:
    """One problem.

    Attributes:
        task_id: unique within its set.
        prompt: the user's text, or chat messages (`{"role", "content"}` mappings).
        answer: the gold answer, where the verifier compares with one.
        verifier: the registered name of the verifier.
        tests: a code task's tests, as the code verifier reads them.
        context: privileged context (a reference solution) for a self-judge; the policy never sees
            it.
        system_prompt: overrides the config's system prompt, where given.
        metadata: other columns of the row, kept as they were.
    """

    task_id: str
    prompt: str | tuple[Mapping[str, Any], ...]
    answer: str | None = None
    verifier: str = "math"
    tests: Mapping[str, Any] | None = None
    context: str | None = None
    system_prompt: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.answer is not None and not isinstance(self.answer, str):
            raise UsageError(
                f"task {self.task_id}: the answer is text, as {str(self.answer)!r}, or None, not "
                f"{type(self.answer).__name__}"
            )

    @property
    def prompt_text(self) -> str:
        """The prompt as plain text (the messages' contents joined), for judges and reports."""
        if isinstance(self.prompt, str):
            return self.prompt
        contents = (message.get("content") for message in self.prompt)
        return "\n\n".join(str(content) for content in contents if content)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk(_ByValue):
    """Up to k tokens that the policy wrote in one go.

    Attributes:
        ids: int32, shape (n,); an EOS may stand at the end only.
        logprobs: float32, shape (n,); the sampling log-probs at the sampling temperature, or None
            where the engine has none (kept as NaN).
        finish: why the policy stopped.
        policy_version: the weights that wrote it (the update's index).
    """

    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32] | None
    finish: Finish
    policy_version: int

    # Written out, since one is made in every step: the generated one would set each field twice.
    def __init__(
        self,
        ids: IdsLike,
        logprobs: npt.NDArray[np.float32] | None = None,
        finish: Finish = Finish.LENGTH,
        policy_version: int = 0,
    ) -> None:
        frozen = frozen_ids(ids)
        _set(self, "ids", frozen)
        _set(self, "logprobs", frozen_logprobs(logprobs, len(frozen)))
        _set(self, "finish", finish if type(finish) is Finish else Finish(finish))
        _set(self, "policy_version", policy_version)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a review cost: tokens read and written by the judge, money, seconds."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    usd: float = 0.0
    seconds: float = 0.0
    calls: int = 1

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "completion_tokens", "calls"):
            object.__setattr__(self, name, _count(name, getattr(self, name)))
        for name in ("usd", "seconds"):
            value: Any = getattr(self, name)
            try:
                number = float(value)
            except (TypeError, ValueError) as error:
                raise UsageError(f"{name} is a number, not {value!r}") from error
            if not 0 <= number < math.inf:
                raise UsageError(f"{name} is finite and >= 0, not {value!r}")
            object.__setattr__(self, name, number)

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.usd + other.usd,
            self.seconds + other.seconds,
            self.calls + other.calls,
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """A judge's answer to a review.

    Attributes:
        kind: KEEP or REVISE.
        step: 0-based index in the pending chunk of the earliest wrong step (REVISE only).
        correction: text, or ids of the policy's tokenizer; empty means a bare cut (REVISE only).
        reason: free text, for people.
        usage: what the review cost.
        guard: the name of the guard that turned a Revise into this Keep.
    """

    kind: VerdictKind
    step: int | None = None
    correction: str | tuple[int, ...] = ""
    reason: str = ""
    usage: Usage = Usage()
    guard: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", VerdictKind(self.kind))
        for name, kinds in (
            ("reason", (str,)),
            ("usage", (Usage,)),
            ("guard", (str, type(None))),
        ):
            if not isinstance(getattr(self, name), kinds):
                raise UsageError(
                    f"a verdict's {name} is {kinds[0].__name__}, not {getattr(self, name)!r}"
                )
        given: Any = "" if self.correction is None else self.correction
        object.__setattr__(self, "correction", given if isinstance(given, str) else _int_ids(given))
        if self.kind is VerdictKind.KEEP:
            if self.step is not None or len(self.correction):
                raise UsageError("a Keep has neither a step nor a correction")
        elif isinstance(self.step, bool) or not isinstance(self.step, (int, np.integer)):
            raise UsageError(f"a Revise needs a 0-based step index, not {self.step!r}")
        elif self.step < 0:
            raise UsageError(f"steps count from 0, not {self.step}")
        else:
            object.__setattr__(self, "step", int(self.step))

    @classmethod
    def keep(cls, reason: str = "", usage: Usage = Usage()) -> Verdict:
        return cls(VerdictKind.KEEP, reason=reason, usage=usage)

    @classmethod
    def revise(
        cls,
        step: int,
        correction: str | IdsLike | None = "",
        reason: str = "",
        usage: Usage = Usage(),
    ) -> Verdict:
        given: Any = correction  # made a text or a tuple of int in __post_init__
        return cls(VerdictKind.REVISE, step, given, reason, usage)

    def kept_by(self, guard: str, reason: str) -> Verdict:
        """The Keep that a guard makes of this Revise."""
        return Verdict(VerdictKind.KEEP, reason=reason, usage=self.usage, guard=guard)


@dataclass(frozen=True, slots=True)
class NoReview:
    """Nobody reviews the pending chunk: it is accepted and costs no budget."""


@dataclass(frozen=True, slots=True)
class FailedReview:
    """The judge failed and the policy for that cause says Keep: it costs one review."""

    cause: str
    reason: str = ""
    usage: Usage = Usage()


ReviewEvent = Verdict | NoReview | FailedReview


@dataclass(frozen=True, slots=True)
class Turn:
    """What travels down the wrappers: a chunk and, once somebody has reviewed it, the review."""

    chunk: Chunk
    review: ReviewEvent | None = None

    def with_verdict(self, review: ReviewEvent) -> Turn:
        return replace(self, review=review)


@dataclass(frozen=True, slots=True)
class Step:
    """One piece of a pending chunk, the unit that a judge points at.

    Attributes:
        text: its text, delimiter included.
        cut: how many tokens of the chunk stay when this step and all after it are dropped.
        carry: text before the step's start that the token straddling it carried, which a correction
            has to restore.
    """

    text: str
    cut: int
    carry: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class ReviewRequest(_ByValue):
    """What a judge is shown.

    Attributes:
        task: the problem.
        prompt_ids: the policy's prompt, int32 (P,).
        accepted_ids: the response so far, which no verdict can change, int32 (N,).
        accepted_text: its text; a character that the chunk completes is in the chunk's text alone.
        chunk_ids: the pending chunk, int32 (n,), a final EOS included.
        steps: the chunk's steps in order; their texts joined are the chunk's text.
        review: 0-based index of this review in the episode.
        reviews_left: reviews left after this one.
        max_correction: the most tokens that a correction may have here.
        finish: why the policy stopped writing.
        key: the row's key, for engines that keep its KV; None outside a runner.
    """

    task: Task
    prompt_ids: npt.NDArray[np.int32]
    accepted_ids: npt.NDArray[np.int32]
    accepted_text: str
    chunk_ids: npt.NDArray[np.int32]
    steps: tuple[Step, ...]
    review: int
    reviews_left: int
    max_correction: int
    finish: Finish
    key: Any = None

    @property
    def chunk_text(self) -> str:
        return "".join(step.text for step in self.steps)

    def kept_text(self, step: int) -> str:
        """The text of the response before `step` of the pending chunk."""
        return self.accepted_text + "".join(s.text for s in self.steps[:step])

    def kept_ids(self, step: int) -> npt.NDArray[np.int32]:
        """The whole tokens of the response before `step` of the pending chunk."""
        return np.concatenate([self.accepted_ids, self.chunk_ids[: self.steps[step].cut]])


@dataclass(frozen=True, slots=True, eq=False)
class Review(_ByValue):
    """The record of one review.

    Attributes:
        index: 0-based, in the episode.
        position: response tokens accepted before the chunk.
        chunk_tokens: length of the reviewed chunk.
        outcome: what became of it.
        step: 0-based wrong step, or -1.
        cut: response length after the cut (where the correction starts), or -1.
        correction_tokens: judge-written tokens spliced in at `cut`.
        dropped_ids: the tokens that were cut, int32.
        reason, cause, guard: text of the judge, why a review failed, which guard kept.
        usage: what it cost.
    """

    index: int
    position: int
    chunk_tokens: int
    outcome: Outcome
    step: int = -1
    cut: int = -1
    correction_tokens: int = 0
    dropped_ids: npt.NDArray[np.int32] = field(default_factory=lambda: frozen_ids(()))
    reason: str = ""
    cause: str = ""
    guard: str = ""
    usage: Usage = Usage()


@dataclass(frozen=True, slots=True)
class Score:
    """A verifier's result.

    Attributes:
        reward: a finite number, or NaN where the verifier could not tell. What the response itself
            causes is a number; what we or a service cause is NaN.
        status: "correct", "wrong", "no_answer", "timeout", "error" ...; undecided: "bad_gold",
            "unavailable", "deferred".
        detail: one line for people.
    """

    reward: float
    status: str
    detail: str = ""

    def __post_init__(self) -> None:
        given: Any = self.reward
        if isinstance(given, (str, bytes)) or not hasattr(type(given), "__float__"):
            raise UsageError(f"a reward is a number, not {given!r}")
        reward = float(given)
        if math.isinf(reward):
            raise UsageError("a reward must be finite, or NaN for undecided")
        object.__setattr__(self, "reward", reward)

    @property
    def decided(self) -> bool:
        return not math.isnan(self.reward)

    @classmethod
    def undecided(cls, status: str, detail: str = "") -> Score:
        return cls(math.nan, status, detail)
