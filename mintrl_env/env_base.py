"""What the policy's and the judge's view share: one Episode, tasks, scoring, info, rendering."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from mintrl_env.env_defaults import Setup, unknown
from mintrl_env.episode import (
    Ended,
    EnvironmentOutput,
    Episode,
    Event,
    Finished,
    NeedChunk,
    NeedEnvironment,
    NeedScore,
)
from mintrl_env.errors import UsageError
from mintrl_env.keys import RowKey
from mintrl_env.loops import sync
from mintrl_env.protocols import Tokenizer
from mintrl_env.scoring import score_response
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Chunk, IdsLike, Kind, Provenance, Score, StopReason, Task

Environment = Callable[[Task, NeedEnvironment], Awaitable[tuple[str | IdsLike, bool]]]
"""Answers a turn or a tool call: its output (text or ids), and whether it ends the episode."""

OPTIONS = ("task_id", "control")
_INTERVENTION = Provenance.INTERVENTION  # an enum's attributes are slow to look up
_MARKS = {Provenance.INTERVENTION: "judge", Provenance.ENVIRONMENT: "environment"}


class EpisodeEnv(gymnasium.Env[Any, Any]):
    """Base of the two views. It owns the Episode; subclasses say what observations and actions are.

    Args:
        setup: tasks, prompts, limits, verifier.
        environment: answers turns; needed with `turns`, refused without.
        control: the kind of the episodes where `reset` does not say.
        render_mode: "ansi" or None.
    """

    metadata = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 - Gymnasium's form

    def __init__(
        self,
        setup: Setup,
        *,
        environment: Environment | None,
        control: bool,
        render_mode: str | None,
    ) -> None:
        if setup.config.turns and environment is None:
            raise UsageError(
                "turns=True: EOS ends a turn, so somebody has to answer it; pass `environment`, an "
                "async (task, need) -> (text, done)"
            )
        if environment is not None and not setup.config.turns:
            raise UsageError("an `environment` is only asked with turns=True; set it")
        if render_mode not in (None, "ansi"):
            raise UsageError(f"render_mode is 'ansi' or None, not {render_mode!r}")
        self.setup = setup
        self.environment = environment
        self.control = control
        self.render_mode = render_mode
        self._by_id = {task.task_id: task for task in setup.tasks}
        self._blank: dict[str, Any] = {}  # the info of a step in which nothing happened
        self._episode: Episode | None = None
        self._tool_failure: str | None = None
        self._buffer = np.empty(0, dtype=np.int32)
        self._filled = 0  # tokens of prompt and response that the buffer holds
        self._logged = 0  # entries of the episode's log that are in it

    @property
    def tokenizer(self) -> Tokenizer:
        return self.setup.tokenizer

    @property
    def episode(self) -> Episode:
        """The episode under construction. UsageError before the first `reset`."""
        if self._episode is None:
            raise UsageError("there is no episode yet: call reset() first")
        return self._episode

    # --- reset

    def _begin(self, options: Mapping[str, Any] | None, *, can_be_control: bool = True) -> None:
        """Start an episode on the task that the options name, or on a random one."""
        known = OPTIONS if can_be_control else OPTIONS[:1]
        options = options or {}
        for name in options:
            if name not in known:
                raise UsageError(unknown("reset option", name, known))
        control = options.get("control", self.control)
        if not isinstance(control, (bool, np.bool_)):
            raise UsageError(f"options['control'] is True or False, not {control!r}")
        task_id = options.get("task_id")
        if task_id is not None and task_id not in self._by_id:
            raise UsageError(unknown("task id", task_id, list(self._by_id)))
        # Drawn in any case, so that naming a task does not shift the draws that follow.
        index = int(self.np_random.integers(len(self.setup.tasks)))
        seed = int(self.np_random.integers(2**63))
        task = self.setup.tasks[index] if task_id is None else self._by_id[task_id]
        prompt_ids = self.setup.prompts.ids(task)
        self.setup.verifier_of(task)  # one that is not known or not installed fails here, not late
        self._episode = Episode(
            task,
            prompt_ids,
            kind=Kind.CONTROL if control else Kind.INTERVENED,
            tokenizer=self.tokenizer,
            config=self.setup.config,
            key=RowKey(seed=seed, update=0, task_id=task.task_id, rollout=0),
        )
        self._blank = {
            "task_id": task.task_id,
            "kind": self._episode.kind.value,
            "chunk": (),
            "verdict": "",
            "step": -1,
            "correction": (),
            "dropped": 0,
            "provenance": (),
            "reason": "",
            "cause": "",
            "guard": "",
            "reviews_left": 0,
            "tokens_left": 0,
            "max_tokens": 0,
        }
        self._tool_failure = None
        self._filled = self._logged = 0
        self._fill(prompt_ids)

    def _start_info(self) -> dict[str, Any]:
        episode = self.episode
        return {
            "task_id": episode.task.task_id,
            "kind": episode.kind.value,
            "prompt_tokens": len(episode.prompt_ids),
            **self._budget(),
        }

    def _budget(self) -> dict[str, int]:
        episode = self.episode
        need = episode.need
        return {
            "reviews_left": episode.reviews_left,
            "tokens_left": episode.config.max_response - len(episode),
            "max_tokens": need.max_tokens if isinstance(need, NeedChunk) else 0,
        }

    # --- what the episode needs

    async def settle(self) -> None:
        """Fulfil the episode's needs of tools and verifier, until policy or judge is needed."""
        while True:
            need = self.episode.need
            if isinstance(need, NeedEnvironment):
                self.episode.send(await self._answer(need))
            elif isinstance(need, NeedScore):
                self.episode.send(await self._score(need))
            else:
                self._tool_failure = None
                return

    @property
    def wants_settling(self) -> bool:
        """Does the episode need a tool or the verifier now?"""
        return isinstance(self.episode.need, (NeedEnvironment, NeedScore))

    def _settle_now(self) -> None:
        # Most steps end in "next chunk, please": no need to wake another thread for that.
        if type(self.episode.need) is not NeedChunk and self.wants_settling:
            sync(self.settle())
        self._tool_failure = None

    async def _answer(self, need: NeedEnvironment) -> Event:
        assert self.environment is not None
        if self._tool_failure is not None:
            failure, self._tool_failure = self._tool_failure, None
            return EnvironmentOutput(self.tokenizer.encode(failure))
        try:
            output, done = await self.environment(self.episode.task, need)
            ids = self.tokenizer.encode(output) if isinstance(output, str) else output
            return EnvironmentOutput(ids, bool(done))
        except Exception as error:
            # Not the response's fault: the row is not valid, and the caller's loop goes on.
            return Ended(StopReason.ERROR, f"environment: {type(error).__name__}: {error}")

    async def _score(self, need: NeedScore) -> Score:
        task = self.episode.task
        return await score_response(self.setup.verifier_of(task), task, need.text)

    def fail_environment(self, text: str | None) -> None:
        """Let the environment's next answer within the coming step be this text; None: its own."""
        self._tool_failure = text

    def abandon(self, detail: str, reason: StopReason = StopReason.ERROR) -> None:
        """End an unfinished episode; its record is not valid."""
        if not isinstance(self.episode.need, Finished):
            self.episode.send(Ended(reason, detail))

    # --- observations and info

    def _fill(self, ids: npt.NDArray[np.int32]) -> None:
        end = self._filled + len(ids)
        if end > len(self._buffer):
            grown = np.empty(max(end, 2 * len(self._buffer), 1024), dtype=np.int32)
            grown[: self._filled] = self._buffer[: self._filled]
            self._buffer = grown
        self._buffer[self._filled : end] = ids
        self._filled = end

    def _ids(self) -> npt.NDArray[np.int32]:
        """Prompt and accepted response, a fresh int32 array. What was accepted is never cut."""
        episode = self.episode
        if self._logged < episode.log_length:
            for segment in episode.log_from(self._logged):
                self._fill(segment.ids)
            self._logged = episode.log_length
        return self._buffer[: self._filled].copy()

    def _step_info(self, chunk: Chunk, reviews: int, logged: int) -> dict[str, Any]:
        """What happened since the log had `logged` entries and `reviews` reviews.

        Values keep their types from step to step and ragged ones are tuples, since vector
        environments stack them.
        """
        episode = self.episode
        need = episode.need
        info = self._blank.copy()
        info["chunk"] = tuple(chunk.ids.tolist())
        provenance: tuple[int, ...] = ()
        for segment in episode.log_from(logged):
            author = segment.provenance
            provenance += (int(author),) * len(segment.ids)
            if author is _INTERVENTION:
                info["correction"] += tuple(segment.ids.tolist())
        info["provenance"] = provenance
        info["reviews_left"] = episode.reviews_left
        info["tokens_left"] = episode.config.max_response - len(episode)
        info["max_tokens"] = need.max_tokens if type(need) is NeedChunk else 0
        if len(episode.reviews) > reviews:
            review = episode.reviews[reviews]
            info["verdict"] = review.outcome.value
            info["step"] = review.step
            info["dropped"] = len(review.dropped_ids)
            info["reason"], info["cause"] = review.reason, review.cause
            info["guard"] = review.guard
        if isinstance(need, Finished):
            info["score"] = {
                "status": need.score.status,
                "detail": need.score.detail,
                "decided": need.score.decided,
            }
            info["stop_reason"] = need.stop_reason.value
            info["valid"] = need.valid
            info["detail"] = need.detail
        return info

    def _ending(self) -> tuple[float, bool, bool]:
        """Reward, terminated, truncated. Undecided is reward 0.0; info["score"] says so."""
        end = self.episode.need
        if type(end) is NeedChunk or not isinstance(end, Finished):
            return 0.0, False, False
        reward = float(end.score.reward) if end.score.decided else 0.0
        terminated = end.stop_reason in (StopReason.EOS, StopReason.ENVIRONMENT)
        return reward, terminated, not terminated

    # --- records

    def trajectory(self, *, update: int = 0, rollout: int = 0) -> Trajectory:
        """The frozen record of the finished episode.

        Raises:
            UsageError: it is not finished.
        """
        return Trajectory.of(self.episode, update=update, rollout=rollout)

    def render(self) -> str | None:
        """The response with its authors by mark, where render_mode is "ansi".

        The policy's text stands as it is; ⟦judge: ...⟧ and ⟦environment: ...⟧ mark the others'.
        """
        if self.render_mode is None:
            return None
        episode = self.episode
        title = f"[{episode.task.task_id}, {episode.kind.value}]"
        lines = [title, episode.task.prompt_text, "---"]
        text = ""
        for segment in episode.log:
            piece = self.tokenizer.decode(segment.ids)
            mark = _MARKS.get(segment.provenance)
            text += f"⟦{mark}: {piece}⟧" if mark else piece
        lines.append(text)
        for review in episode.reviews:
            words = [f"review {review.index}: {review.outcome.value}", review.guard, review.cause]
            if review.step >= 0:
                words.append(f"step {review.step}, {len(review.dropped_ids)} tokens dropped")
            lines.append(f"({', '.join(filter(None, words))})")
        if isinstance(end := episode.need, Finished):
            score = end.score
            lines.append(f"({end.stop_reason.value}: {score.status}, reward {score.reward})")
        return "\n".join(lines)

    def close(self) -> None:
        """Close the verifiers that this environment made. A second call does nothing."""
        self.setup.close()
