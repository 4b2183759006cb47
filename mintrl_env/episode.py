"""The one set of rules: a state machine for one response under construction.

No model, no network, no clock, no randomness. It says what it needs next and takes events:

    while not isinstance(need := episode.need, Finished):
        episode.send(await fulfil(need))

    state         event                              next state
    CHUNK         Chunk                              REVIEW, or as if kept
    REVIEW        Verdict, FailedReview, NoReview    CHUNK | ENVIRONMENT | SCORE
    ENVIRONMENT   EnvironmentOutput                  CHUNK | SCORE
    SCORE         Score                              FINISHED
    any of these  Ended                              FINISHED

An illegal event raises UsageError and leaves the state unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import numpy as np
import numpy.typing as npt

from mintrl_env.errors import JudgeCause, UsageError
from mintrl_env.event_log import EventLog, Segment
from mintrl_env.keys import RowKey
from mintrl_env.needs import (
    Ended,
    EnvironmentOutput,
    EpisodeConfig,
    Event,
    Finished,
    Need,
    NeedChunk,
    NeedEnvironment,
    NeedReview,
    NeedScore,
)
from mintrl_env.protocols import Tokenizer
from mintrl_env.splice import REPLACEMENT, correction_ids, settled_text, split_steps
from mintrl_env.types import (
    Chunk,
    FailedReview,
    Finish,
    IdsLike,
    Kind,
    NoReview,
    Outcome,
    Provenance,
    Review,
    ReviewRequest,
    Score,
    StopReason,
    Task,
    Usage,
    Verdict,
    VerdictKind,
    frozen_ids,
)

__all__ = [
    "Ended",
    "EnvironmentOutput",
    "Episode",
    "EpisodeConfig",
    "Event",
    "Finished",
    "Need",
    "NeedChunk",
    "NeedEnvironment",
    "NeedReview",
    "NeedScore",
    "Segment",
]


class _State(Enum):
    __hash__ = object.__hash__  # Enum's own is Python code, and `send` looks a state up each time

    CHUNK = auto()
    REVIEW = auto()
    ENVIRONMENT = auto()
    SCORE = auto()
    FINISHED = auto()


# An enum's attributes are slow to look up, and these are in every step.
_UINT32 = np.dtype(np.uint32)
_largest = np.maximum.reduce
_CHUNK, _REVIEW, _CONTROL, _STOP = _State.CHUNK, _State.REVIEW, Kind.CONTROL, Finish.STOP


class Episode:
    """One response under construction.

    Args:
        task: the problem.
        prompt_ids: the policy's prompt, from `prompts.py`.
        kind: CONTROL is never reviewed.
        tokenizer: the policy's.
        config: the limits.
        key: names the row for engines and judges; optional.
    """

    def __init__(
        self,
        task: Task,
        prompt_ids: IdsLike,
        *,
        kind: Kind,
        tokenizer: Tokenizer,
        config: EpisodeConfig,
        key: RowKey | None = None,
    ) -> None:
        self.task = task
        self.prompt_ids = frozen_ids(prompt_ids)
        if not len(self.prompt_ids):
            raise UsageError(f"task {task.task_id!r} has an empty prompt: a policy cannot start")
        self.kind = Kind(kind)
        self.tokenizer = tokenizer
        self.config = config
        self.key = key
        self.reviews: list[Review] = []
        self.draws = 0
        self._eos_ids = tokenizer.eos_ids
        self._first_eos = min(tokenizer.eos_ids, default=tokenizer.vocab_size)
        self._vocab_size = tokenizer.vocab_size
        self._log = EventLog()
        self._views: dict[str, Any] = {}  # made when asked for, dropped when log or reviews grow
        self._turn_start = 0
        self._gap = 0  # tokens still to be written unreviewed
        self._pending: Chunk | None = None
        self._end_of_turn = False
        self._stop: StopReason | None = None
        self._finished: Finished | None = None
        self._state = _State.CHUNK
        self._need: Need | None = None

    # --- views of the log

    @property
    def log(self) -> tuple[Segment, ...]:
        return tuple(self._log.segments)

    def log_from(self, start: int) -> list[Segment]:
        """The log's entries from index `start`, for views that grow with the episode."""
        return self._log.segments[start:]

    @property
    def log_length(self) -> int:
        return len(self._log.segments)

    @property
    def ids(self) -> npt.NDArray[np.int32]:
        """The accepted response, int32 (N,), read-only as all of these are."""
        return self._log.ids

    @property
    def provenance(self) -> npt.NDArray[np.int8]:
        """Who wrote each accepted token, int8 (N,)."""
        return self._log.provenance

    @property
    def logprobs(self) -> npt.NDArray[np.float32]:
        """Sampling log-probs, float32 (N,), NaN where the policy did not sample."""
        return self._log.logprobs

    @property
    def policy_versions(self) -> npt.NDArray[np.int32]:
        """The weights at work when each token was written, int32 (N,)."""
        return self._log.policy_versions

    def __len__(self) -> int:
        return len(self._log)

    @property
    def text(self) -> str:
        """The accepted response as text, a final EOS left out."""
        if "text" not in self._views:
            self._views["text"] = self._text_from(0)
        return str(self._views["text"])

    def _text_from(self, start: int) -> str:
        ids = self.ids[start:]
        end = len(ids)
        while end and int(ids[end - 1]) in self.tokenizer.eos_ids:
            end -= 1
        return self.tokenizer.decode(ids[:end])

    @property
    def reviews_left(self) -> int:
        return 0 if self.kind is _CONTROL else self.config.max_reviews - len(self.reviews)

    # --- what is needed next

    @property
    def awaits_review(self) -> bool:
        """Is a review pending? Unlike `need`, this splits no chunk into steps."""
        return self._state is _REVIEW

    @property
    def need(self) -> Need:
        if self._need is None:
            self._need = self._make_need()
        return self._need

    def _make_need(self) -> Need:
        if self._state is _CHUNK:
            return NeedChunk(self._max_tokens(), self.config.stop, self.draws)
        if self._state is _State.REVIEW:
            assert self._pending is not None
            return NeedReview(self._request(self._pending))
        if self._state is _State.ENVIRONMENT:
            return NeedEnvironment(self._text_from(self._turn_start), self._end_of_turn)
        if self._state is _State.SCORE:
            assert self._stop is not None
            return NeedScore(self.text, self._stop)
        assert self._finished is not None
        return self._finished

    def _max_tokens(self) -> int:
        config = self.config
        left = config.max_response - self._log.length
        if not self.reviews_left:
            return left
        wanted = self._gap or config.chunk_tokens
        return wanted if wanted < left else left

    def preview(self, chunk: Chunk) -> ReviewRequest | None:
        """The review request that `chunk` would raise, or None where it would not be reviewed.

        Changes nothing. Raises UsageError where `send(chunk)` would.
        """
        if self._state is not _State.CHUNK:
            raise UsageError(f"a chunk cannot be previewed in state {self._state.name}")
        self._check_chunk(chunk)
        return self._request(chunk) if self._is_reviewed() else None

    def _is_reviewed(self) -> bool:
        return not self._gap and self.reviews_left > 0

    def _request(self, chunk: Chunk) -> ReviewRequest:
        request: ReviewRequest | None
        # A previewed chunk is asked about again when it is sent: the same object, the same request.
        known, request = self._views.get("request", (None, None))
        if known is not chunk or request is None:
            request = self._make_request(chunk)
            self._views["request"] = (chunk, request)
        return request

    def _make_request(self, chunk: Chunk) -> ReviewRequest:
        accepted, text = self.ids, self.text
        if len(accepted) and int(accepted[-1]) in self.tokenizer.eos_ids:
            text = self.tokenizer.decode(accepted)  # it ended a turn, and the response goes on
        if text.endswith(REPLACEMENT):  # perhaps a character that the chunk completes
            whole = self.tokenizer.decode([*accepted, *chunk.ids])
            text = settled_text(self.tokenizer, accepted, whole)
        return ReviewRequest(
            task=self.task,
            prompt_ids=self.prompt_ids,
            accepted_ids=accepted,
            accepted_text=text,
            chunk_ids=chunk.ids,
            steps=split_steps(
                self.tokenizer,
                chunk.ids,
                self.config.step_delimiters,
                before_ids=accepted,
                before_text=text,
            ),
            review=len(self.reviews),
            reviews_left=self.reviews_left - 1,
            max_correction=min(
                self.config.max_correction, self.config.max_response - len(self._log)
            ),
            finish=chunk.finish,
            key=self.key,
        )

    # --- events

    def send(self, event: Event) -> None:
        """Take an event.

        Raises:
            UsageError: the event is illegal here; the state is unchanged.
        """
        handler = _TABLE.get((self._state, type(event)))
        if handler is None:
            raise UsageError(
                f"{type(event).__name__} is not legal in state {self._state.name}; "
                f"the episode needs {type(self.need).__name__}"
            )
        handler(self, event)
        self._need = None

    def _check_chunk(self, chunk: Chunk) -> None:
        limit, count = self._max_tokens(), len(chunk.ids)
        if not 1 <= count <= limit:
            raise UsageError(f"a chunk has 1 to {limit} tokens here, not {count}")
        # As unsigned numbers negative ids are huge, so that one look checks both bounds. This is
        # the cheapest look that keeps the interpreter lock (on up to 500 ids): argmax lets it go,
        # and gets it back a millisecond later where a model's thread wants it as well.
        largest = int(_largest(chunk.ids.view(_UINT32)))
        if largest >= self._vocab_size:
            wrong = next(i for i in chunk.ids.tolist() if not 0 <= i < self._vocab_size)
            raise UsageError(
                f"token id {wrong} is outside the tokenizer's vocabulary of {self._vocab_size}"
            )
        # In most vocabularies EOS stands behind all text, so that the largest id says enough.
        if largest >= self._first_eos and not self._eos_ids.isdisjoint(chunk.ids[:-1].tolist()):
            raise UsageError("an EOS stands inside the chunk: it may only be its last token")

    def _on_chunk(self, chunk: Chunk) -> None:
        self._check_chunk(chunk)
        reviewed = self._is_reviewed()
        self.draws += len(chunk.ids)
        if reviewed:
            self._pending, self._state = chunk, _REVIEW
            return
        self._gap = max(0, self._gap - len(chunk.ids))
        self._accept(chunk)

    def _on_no_review(self, event: NoReview) -> None:
        self._accept(self._take_pending())

    def _on_failed_review(self, event: FailedReview) -> None:
        unparsed = event.cause in (JudgeCause.UNPARSED, JudgeCause.BAD_STEP)
        self._keep(
            Outcome.UNPARSED if unparsed else Outcome.FAILED,
            reason=event.reason,
            usage=event.usage,
            cause=event.cause,
        )

    def _on_verdict(self, verdict: Verdict) -> None:
        if verdict.kind is VerdictKind.KEEP:
            self._keep(
                Outcome.GUARDED if verdict.guard else Outcome.KEEP,
                reason=verdict.reason,
                usage=verdict.usage,
                guard=verdict.guard or "",
            )
        else:
            self._revise(verdict)

    def _keep(
        self, outcome: Outcome, *, reason: str, usage: Usage, cause: str = "", guard: str = ""
    ) -> None:
        chunk = self._take_pending()
        self.reviews.append(
            Review(
                index=len(self.reviews),
                position=len(self._log),
                chunk_tokens=len(chunk.ids),
                outcome=outcome,
                reason=reason,
                cause=cause,
                guard=guard,
                usage=usage,
            )
        )
        self._gap = self.config.spacing
        self._accept(chunk)

    def _revise(self, verdict: Verdict) -> None:
        assert self._pending is not None and verdict.step is not None
        request = self._request(self._pending)
        correction = frozen_ids(self._check_revise(request, verdict))
        chunk = self._take_pending()
        step = request.steps[verdict.step]
        position = len(self._log)
        self._append_chunk(chunk, step.cut)
        cut = len(self._log)
        self._append(correction, Provenance.INTERVENTION, chunk.policy_version)
        self.reviews.append(
            Review(
                index=len(self.reviews),
                position=position,
                chunk_tokens=len(chunk.ids),
                outcome=Outcome.REVISE,
                step=verdict.step,
                cut=cut,
                correction_tokens=len(correction),
                dropped_ids=frozen_ids(chunk.ids[step.cut :]),
                reason=verdict.reason,
                usage=verdict.usage,
            )
        )
        self._gap = self.config.spacing
        self._go_on()

    def _check_revise(self, request: ReviewRequest, verdict: Verdict) -> list[int]:
        assert verdict.step is not None
        if verdict.step >= len(request.steps):
            raise UsageError(
                f"step {verdict.step} is past the end: the chunk has {len(request.steps)} step(s), "
                "counted from 0"
            )
        step = request.steps[verdict.step]
        if not isinstance(verdict.correction, str) and any(
            not 0 <= i < self.tokenizer.vocab_size for i in verdict.correction
        ):
            raise UsageError("the correction holds ids outside the tokenizer's vocabulary")
        room = self.config.max_response - len(request.accepted_ids) - step.cut
        ids = correction_ids(
            self.tokenizer,
            verdict.correction,
            carry=step.carry,
            limit=min(self.config.max_correction, room),
            before=request.kept_ids(verdict.step),
        )
        refused = [i for i in ids if i in self.tokenizer.special_ids]
        if refused:
            raise UsageError(
                f"the correction holds special token id {refused[0]}: a judge corrects a step, "
                "only the policy ends a response"
            )
        return ids

    def illegal_because(self, verdict: Verdict, request: ReviewRequest | None = None) -> str:
        """Why a review would refuse this verdict, or "" where it would take it.

        Args:
            request: what was reviewed, from `preview`; None for the pending review's.
        """
        if request is None:
            if not isinstance(need := self.need, NeedReview):
                raise UsageError("no review is pending")
            request = need.request
        if verdict.kind is VerdictKind.KEEP:
            return ""
        try:
            self._check_revise(request, verdict)
        except UsageError as error:
            return str(error)
        return ""

    def _on_environment(self, output: EnvironmentOutput) -> None:
        ids = frozen_ids(output.ids)
        if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= self.tokenizer.vocab_size):
            raise UsageError("the environment's output holds ids outside the vocabulary")
        room = self.config.max_response - len(self._log)
        cut_short = len(ids) > room
        self._append(ids[:room], Provenance.ENVIRONMENT, self._log.segments[-1].policy_version)
        self._turn_start = len(self._log)
        if output.done:
            self._to_score(StopReason.ENVIRONMENT)
        elif cut_short or len(self._log) >= self.config.max_response:
            self._to_score(StopReason.LENGTH)
        else:
            self._state = _State.CHUNK

    def _on_score(self, score: Score) -> None:
        assert self._stop is not None
        self._finish(self._stop, score, score.decided or score.status == "deferred")

    def _on_ended(self, event: Ended) -> None:
        if event.reason not in (StopReason.DEADLINE, StopReason.ERROR):
            raise UsageError(f"Ended is for deadlines and errors, not for {event.reason}")
        if self._pending is not None:
            chunk = self._take_pending()
            self._append_chunk(chunk)
        self._finish(
            event.reason, Score.undecided("unavailable", event.detail), False, event.detail
        )

    # --- moves

    def _take_pending(self) -> Chunk:
        assert self._pending is not None
        chunk, self._pending = self._pending, None
        self._views.clear()
        return chunk

    def _append(
        self,
        ids: npt.NDArray[np.int32],
        provenance: Provenance,
        policy_version: int,
        logprobs: npt.NDArray[np.float32] | None = None,
    ) -> None:
        self._log.append(ids, provenance, policy_version, logprobs)
        self._views.clear()

    def _append_chunk(self, chunk: Chunk, length: int | None = None) -> None:
        ids = chunk.ids if length is None else chunk.ids[:length]
        self._append(ids, Provenance.POLICY, chunk.policy_version, chunk.logprobs)

    def _accept(self, chunk: Chunk) -> None:
        self._append_chunk(chunk)
        ended = chunk.ids.item(-1) in self._eos_ids
        stopped = chunk.finish is _STOP and bool(self.config.stop)
        if ended and not self.config.turns:
            self._to_score(StopReason.EOS)
        elif ended or stopped:
            self._end_of_turn, self._state = ended, _State.ENVIRONMENT
        else:
            self._go_on()

    def _go_on(self) -> None:
        if self._log.length >= self.config.max_response:
            self._to_score(StopReason.LENGTH)
        else:
            self._state = _CHUNK

    def _to_score(self, reason: StopReason) -> None:
        self._stop, self._state = reason, _State.SCORE

    def _finish(self, reason: StopReason, score: Score, valid: bool, detail: str = "") -> None:
        self._finished = Finished(reason, score, valid, detail)
        self._state = _State.FINISHED


_TABLE: dict[tuple[_State, type], Callable[[Episode, Any], None]] = {
    (_State.CHUNK, Chunk): Episode._on_chunk,
    (_State.REVIEW, Verdict): Episode._on_verdict,
    (_State.REVIEW, FailedReview): Episode._on_failed_review,
    (_State.REVIEW, NoReview): Episode._on_no_review,
    (_State.ENVIRONMENT, EnvironmentOutput): Episode._on_environment,
    (_State.SCORE, Score): Episode._on_score,
    **{(state, Ended): Episode._on_ended for state in _State if state is not _State.FINISHED},
}
