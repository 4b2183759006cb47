"""What an episode asks for, what it takes, and its limits: the language of `Episode`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mintrl_env.errors import UsageError
from mintrl_env.splice import FENCE
from mintrl_env.types import (
    Chunk,
    FailedReview,
    IdsLike,
    NoReview,
    ReviewRequest,
    Score,
    StopReason,
    Verdict,
    frozen_ids,
)


@dataclass(frozen=True, slots=True)
class EpisodeConfig:
    """The limits of an episode (paper: (k, R, L) = (512, 4, 64) math, (128, 4, 64) code).

    Attributes:
        chunk_tokens: k, the most tokens that the policy writes between two reviews.
        max_reviews: R; Keep and Revise both use one up.
        max_correction: L, the most judge-written tokens of a correction, in the policy's tokenizer.
        max_response: T, over kept POLICY, INTERVENTION and ENVIRONMENT tokens.
        step_delimiters: literal strings; "```" stands for code fences.
        spacing: policy tokens that are not reviewed after each review (R k bounds what a judge
            ever sees; spacing spreads it).
        turns: EOS ends a turn, not the episode, and the environment answers (tools, agents).
        stop: strings at which the policy stops for the environment inside a turn (needs `turns`).
    """

    chunk_tokens: int = 512
    max_reviews: int = 4
    max_correction: int = 64
    max_response: int = 16384
    step_delimiters: tuple[str, ...] = ("\n\n", FENCE)
    spacing: int = 0
    turns: bool = False
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("step_delimiters", "stop"):
            strings = getattr(self, name)
            if isinstance(strings, str):
                raise UsageError(f"{name} is a list of strings: write [{strings!r}]")
            if not all(isinstance(string, str) and string for string in strings):
                raise UsageError(f"{name} holds strings that are not empty, not {strings!r}")
            object.__setattr__(self, name, tuple(strings))
        for name, least in (
            ("chunk_tokens", 1),
            ("max_reviews", 0),
            ("max_correction", 0),
            ("max_response", 1),
            ("spacing", 0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UsageError(f"{name} must be an integer >= {least}, not {value!r}")
        if self.stop and not self.turns:
            raise UsageError("stop strings hand over to an environment: set turns=True with them")


# --- needs


class NeedChunk(NamedTuple):
    """The policy's next chunk, 1 to `max_tokens` tokens, the first of them taking draw `draw`."""

    max_tokens: int
    stop: tuple[str, ...]
    draw: int


@dataclass(frozen=True, slots=True)
class NeedReview:
    request: ReviewRequest


@dataclass(frozen=True, slots=True)
class NeedEnvironment:
    """The environment's answer to what the policy just did.

    Attributes:
        text: what was written since the environment last spoke, by policy and judge.
        end_of_turn: the policy ended its turn (EOS); else it stopped at a stop string.
    """

    text: str
    end_of_turn: bool


@dataclass(frozen=True, slots=True)
class NeedScore:
    """The verifier's verdict on the whole response, final EOS left out."""

    text: str
    stop_reason: StopReason


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing more. `valid` is False where a deadline or an error ended the episode, or where the
    verifier could not tell; a deferred score (a trainer's own reward functions) is valid."""

    stop_reason: StopReason
    score: Score
    valid: bool
    detail: str = ""


Need = NeedChunk | NeedReview | NeedEnvironment | NeedScore | Finished


# --- events that types.py does not hold already


@dataclass(frozen=True, slots=True)
class EnvironmentOutput:
    """Tokens that the environment appends (ENVIRONMENT), and whether it ends the episode."""

    ids: IdsLike = ()
    done: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", frozen_ids(self.ids))


@dataclass(frozen=True, slots=True)
class Ended:
    """A deadline or an error ends the episode; a pending chunk is kept unreviewed."""

    reason: StopReason
    detail: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", StopReason(self.reason))


Event = Chunk | Verdict | NoReview | FailedReview | EnvironmentOutput | Score | Ended
