"""Judges, guards, budgets, failing tools and records as wrappers around the policy's view.

A review happens on the way down, so whoever reviews stands further out than whoever checks:

    env = gymnasium.make("MinTRL/Policy-v0")
    env = GuardWrapper(env, "leak")
    env = JudgeIntervention(env, OracleJudge())
    env = RecordTrajectories(env, rows)

Two judges are compared by swapping one wrapper.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import gymnasium
from gymnasium.utils import RecordConstructorArgs

from mintrl_env.episode import Finished
from mintrl_env.errors import UsageError
from mintrl_env.guards import SpecialTokenGuard
from mintrl_env.loops import sync
from mintrl_env.protocols import Guard, Judge
from mintrl_env.registry import resolve
from mintrl_env.reviewing import check_judge, guard_verdict, review_chunk
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import ReviewRequest, StopReason, Turn, Verdict, VerdictKind

_Step = tuple[Any, Any, bool, bool, dict[str, Any]]


class _TurnWrapper(gymnasium.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """A wrapper that looks at turns. Constructor arguments are kept by reference, for the spec."""

    def __init__(self, env: gymnasium.Env[Any, Any], **arguments: Any) -> None:
        RecordConstructorArgs.__init__(self, _disable_deepcopy=True, **arguments)
        gymnasium.Wrapper.__init__(self, env)

    def as_turn(self, action: Any) -> Turn:
        turn = self.get_wrapper_attr_below("as_turn")(action)
        assert isinstance(turn, Turn)
        return turn

    def review_request(self, turn: Turn) -> ReviewRequest | None:
        request = self.get_wrapper_attr_below("review_request")(turn)
        assert request is None or isinstance(request, ReviewRequest)
        return request

    def get_wrapper_attr_below(self, name: str) -> Any:
        """As `get_wrapper_attr`, from the wrapped environment on."""
        try:
            return self.env.get_wrapper_attr(name)
        except AttributeError as error:
            raise UsageError(
                f"{type(self).__name__} wraps environments of the policy's view "
                f"(MinTRL/Policy-v0); {self.env} has no {name}"
            ) from error

    def _check(self, request: ReviewRequest) -> Callable[[Verdict], str]:
        return partial(self.get_wrapper_attr_below("illegal_because"), request=request)


class JudgeIntervention(_TurnWrapper):
    """A judge reviews every chunk that is open to review.

    It may keep the chunk, or cut it at its earliest wrong step and put a correction there. Whatever
    goes wrong with it is a recorded Keep: a judge's failure never ends an episode. A turn that
    carries a review already is left alone.

    Args:
        env: an environment of the policy's view, wrapped or not.
        judge: a Judge, or a registered name (`keep`, `oracle`).
    """

    def __init__(self, env: gymnasium.Env[Any, Any], judge: str | Judge) -> None:
        super().__init__(env, judge=judge)
        self.judge: Judge = make_judge(judge)

    def step(self, action: Any) -> _Step:
        turn = self.as_turn(action)
        if turn.review is None:
            request = self.review_request(turn)
            if request is not None:
                guard = SpecialTokenGuard(self.get_wrapper_attr_below("tokenizer"))
                review = review_chunk(
                    self.judge, request, guards=(guard,), check=self._check(request)
                )
                turn = turn.with_verdict(sync(review))
        return self.env.step(turn)


class GuardWrapper(_TurnWrapper):
    """The shell that runs one guard: it may turn a Revise from further out into a Keep.

    Args:
        env: an environment of the policy's view, wrapped or not.
        guard: an async (request, verdict) -> verdict, or a registered name (`leak`), which is
            called with the policy's tokenizer.
    """

    def __init__(self, env: gymnasium.Env[Any, Any], guard: str | Guard) -> None:
        super().__init__(env, guard=guard)
        self.guard: Guard
        if isinstance(guard, str):
            self.guard = resolve("guard", guard)(self.get_wrapper_attr_below("tokenizer"))
        else:
            self.guard = guard

    def step(self, action: Any) -> _Step:
        turn = self.as_turn(action)
        if _is_revise(turn):
            request = self.review_request(turn)
            if request is not None:
                verdict = turn.review
                assert isinstance(verdict, Verdict)
                checked = guard_verdict((self.guard,), request, verdict, check=self._check(request))
                turn = turn.with_verdict(sync(checked))
        return self.env.step(turn)


class InterventionBudget(_TurnWrapper):
    """Caps the Revises of an episode: past the cap a Revise becomes a Keep.

    R, the cap on reviews, is the episode's own (`max_reviews`). Counted are the Revises that were
    carried out, so that what a guard further in keeps costs nothing here.

    Args:
        env: an environment of the policy's view, wrapped or not.
        max_revises: the most Revises of an episode.
    """

    name = "intervention_budget"

    def __init__(self, env: gymnasium.Env[Any, Any], max_revises: int) -> None:
        if isinstance(max_revises, bool) or not isinstance(max_revises, int) or max_revises < 0:
            raise UsageError(f"max_revises is an integer >= 0, not {max_revises!r}")
        super().__init__(env, max_revises=max_revises)
        self.max_revises = max_revises
        self._revises = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self._revises = 0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> _Step:
        turn = self.as_turn(action)
        if self._revises >= self.max_revises and _is_revise(turn):
            assert isinstance(turn.review, Verdict)
            spent = f"the episode has had its {self.max_revises} Revise(s)"
            turn = turn.with_verdict(turn.review.kept_by(self.name, spent))
        result = self.env.step(turn)
        self._revises += result[4]["verdict"] == VerdictKind.REVISE.value
        return result


class ToolFailure(_TurnWrapper):
    """Lets tools fail: with a given probability their answer in a step is an error text.

    For robustness tests of agents. The tool does not run then. Draws come from the environment's
    own generator, so that a seed repeats them.

    Args:
        env: an environment of the policy's view with `turns=True`.
        probability: of a failure, for each step.
        text: what the policy reads instead of the tool's answer.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        probability: float,
        text: str = "Error: the tool is not available. Try again.\n",
    ) -> None:
        if not 0.0 <= probability <= 1.0:
            raise UsageError(f"probability lies in [0, 1], not {probability!r}")
        super().__init__(env, probability=probability, text=text)
        self.probability = probability
        self.text = text

    def step(self, action: Any) -> _Step:
        turn = self.as_turn(action)
        fails = self.np_random.random() < self.probability
        self.get_wrapper_attr_below("fail_environment")(self.text if fails else None)
        return self.env.step(turn)


class Appendable(Protocol):
    def append(self, row: Trajectory, /) -> Any: ...


class RecordTrajectories(_TurnWrapper):
    """Hands every episode's frozen record to a list or a function (a store's writer).

    Rows are numbered in the order in which their task's episodes end. An episode that is cut off
    from outside (a time limit, a `reset` or `close` in its middle) is recorded too, as not valid,
    if it holds a token.

    Args:
        env: an environment of the policy's view, wrapped or not.
        sink: something with `append`, or a function of one Trajectory.
        update: the update that the records are filed under.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        sink: Appendable | Callable[[Trajectory], Any],
        update: int = 0,
    ) -> None:
        super().__init__(env, sink=sink, update=update)
        write = getattr(sink, "append", sink)
        if not callable(write):
            raise UsageError(f"sink is a function or has append, {type(sink).__name__} neither")
        self._write: Callable[[Trajectory], Any] = write
        self.update = update
        self._rollouts: dict[str, int] = {}
        self._open = False

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        self._record("reset before its end", StopReason.ERROR)
        result = self.env.reset(seed=seed, options=options)
        self._open = True
        return result

    def step(self, action: Any) -> _Step:
        result = self.env.step(action)
        if result[2] or result[3]:
            self._record("ended from outside", StopReason.DEADLINE)
        return result

    def close(self) -> None:
        self._record("closed before its end", StopReason.ERROR)
        self.env.close()

    def _record(self, detail: str, reason: StopReason) -> None:
        """Write the open episode's record, once; an unfinished one ends here."""
        if not self._open:
            return
        self._open = False
        episode = self.get_wrapper_attr_below("episode")
        if not isinstance(episode.need, Finished):
            self.get_wrapper_attr_below("abandon")(detail, reason)
        if not len(episode):
            return
        task_id = episode.task.task_id
        rollout = self._rollouts.get(task_id, 0)
        self._rollouts[task_id] = rollout + 1
        record = self.get_wrapper_attr_below("trajectory")
        self._write(record(update=self.update, rollout=rollout))


def make_judge(judge: str | Judge) -> Judge:
    """A judge, or the one of a registered name, made without arguments."""
    if not isinstance(judge, str):
        check_judge(judge)
        return judge
    thing = resolve("judge", judge)
    try:
        made: Judge = thing() if isinstance(thing, type) else thing
    except TypeError as error:
        raise UsageError(
            f"the judge {judge!r} needs arguments; make it and pass the object: {error}"
        ) from error
    return made


def _is_revise(turn: Turn) -> bool:
    return isinstance(turn.review, Verdict) and turn.review.kind is VerdictKind.REVISE
