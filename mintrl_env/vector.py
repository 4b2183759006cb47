"""Many policy's views as one vector environment: their judge calls run side by side.

`gymnasium.make_vec("MinTRL/Policy-v0", num_envs=8)` makes one (its `vector_entry_point`). Wrappers
cannot be put around its episodes, so judge and guards are arguments. Gymnasium's own SyncVectorEnv
and AsyncVectorEnv (`shared_memory=False`) work too, with wrappers, one episode after the other or
one process each.

Autoreset is DISABLED, since episodes differ in length: reset the finished ones with
`reset(options={"reset_mask": done})` before the next step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from mintrl_env.env import PolicyEnv
from mintrl_env.env_base import OPTIONS
from mintrl_env.env_defaults import unknown
from mintrl_env.errors import UsageError
from mintrl_env.guards import SpecialTokenGuard
from mintrl_env.loops import sync
from mintrl_env.protocols import Guard, Judge
from mintrl_env.reviewing import review_chunk
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Turn
from mintrl_env.wrappers import make_judge

_Bools = npt.NDArray[np.bool_]


class PolicyVectorEnv(VectorEnv[Any, Any, Any]):
    """`num_envs` episodes of `MinTRL/Policy-v0`.

    Actions are one per episode, as `PolicyEnv` takes them; observations are a tuple, since they are
    ragged; infos are Gymnasium's (arrays with `_key` masks).

    Args:
        num_envs: number of episodes.
        judge: a Judge or a registered name; None: nobody reviews.
        guards: look at its Revises, in order.
        **kwargs: as `PolicyEnv` takes them; parts are made once and shared.

    `reset(seed=s)` seeds episode i with s + i (or pass a list). The options `task_id` and `control`
    are one for all, or a list of `num_envs`; `reset_mask` chooses episodes.
    """

    metadata = {  # noqa: RUF012 - Gymnasium's form
        "render_modes": ["ansi"],
        "render_fps": 1,
        "autoreset_mode": AutoresetMode.DISABLED,
    }

    def __init__(
        self,
        num_envs: int = 1,
        *,
        judge: str | Judge | None = None,
        guards: Sequence[Guard] = (),
        **kwargs: Any,
    ) -> None:
        if num_envs < 1:
            raise UsageError(f"num_envs counts episodes and must be >= 1, not {num_envs}")
        first = PolicyEnv(**kwargs)
        self.envs = [first, *(first.sibling() for _ in range(num_envs - 1))]
        self.num_envs = num_envs
        self.judge = None if judge is None else make_judge(judge)
        self.guards: tuple[Guard, ...] = (SpecialTokenGuard(first.tokenizer), *guards)
        self.render_mode = first.render_mode
        self.single_action_space = first.action_space
        self.single_observation_space = first.observation_space
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self._done = np.ones(num_envs, dtype=np.bool_)  # nothing is running before the first reset

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Start the episodes that `reset_mask` chooses (all, where it is not given).

        The observations of the others are their present ones; infos hold the started ones only.
        """
        if isinstance(seed, (int, np.integer)):
            super().reset(seed=int(seed))
            seed = [int(seed) + i for i in range(self.num_envs)]
        seeds = [None] * self.num_envs if seed is None else list(seed)
        options = dict(options or {})
        mask = self._mask(options.pop("reset_mask", None))
        chosen = self._each_options(options)
        if len(seeds) != self.num_envs:
            raise UsageError(f"{len(seeds)} seeds for {self.num_envs} episodes")
        kept = {i: env.observe() for i, env in enumerate(self.envs) if not mask[i]}
        infos: dict[str, Any] = {}
        observations = []
        for i, env in enumerate(self.envs):
            if mask[i]:
                single = seeds[i]
                observation, info = env.reset(
                    seed=None if single is None else int(single), options=chosen[i]
                )
                infos = self._add_info(infos, info, i)
                self._done[i] = False
            else:
                observation = kept[i]
            observations.append(observation)
        return tuple(observations), infos

    def step(
        self, actions: Sequence[Any]
    ) -> tuple[tuple[Any, ...], npt.NDArray[np.float64], _Bools, _Bools, dict[str, Any]]:
        """One chunk for each episode.

        Raises:
            UsageError: an episode is finished, or an action is illegal; no episode has changed.
        """
        if len(actions) != self.num_envs:
            raise UsageError(f"{len(actions)} actions for {self.num_envs} episodes")
        if self._done.any():
            raise UsageError(
                f"episodes {np.flatnonzero(self._done).tolist()} are not running: "
                'reset(options={"reset_mask": terminations | truncations})'
            )
        turns = [env.as_turn(action) for env, action in zip(self.envs, actions, strict=True)]
        turns = self._reviewed(turns)
        before = [env.take(turn) for env, turn in zip(self.envs, turns, strict=True)]
        if any(env.wants_settling for env in self.envs):
            sync(self._settle())
        observations = []
        rewards = np.zeros(self.num_envs, dtype=np.float64)
        terminations = np.zeros(self.num_envs, dtype=np.bool_)
        truncations = np.zeros(self.num_envs, dtype=np.bool_)
        infos: dict[str, Any] = {}
        for i, env in enumerate(self.envs):
            result = env.outcome(turns[i], before[i])
            observations.append(result[0])
            rewards[i], terminations[i], truncations[i] = result[1:4]
            infos = self._add_info(infos, result[4], i)
        self._done = terminations | truncations
        return tuple(observations), rewards, terminations, truncations, infos

    def _reviewed(self, turns: Sequence[Turn]) -> list[Turn]:
        # Every request is made, judge or not: an illegal chunk raises before any episode moves.
        requests = [env.review_request(turn) for env, turn in zip(self.envs, turns, strict=True)]
        judge = self.judge
        if judge is None:
            return list(turns)

        async def review(index: int) -> Turn:
            turn, request, env = turns[index], requests[index], self.envs[index]
            if request is None or turn.review is not None:
                return turn
            event = await review_chunk(
                judge,
                request,
                guards=self.guards,
                check=lambda verdict: env.illegal_because(verdict, request),
            )
            return turn.with_verdict(event)

        async def review_all() -> list[Turn]:
            return list(await asyncio.gather(*map(review, range(self.num_envs))))

        return sync(review_all())

    async def _settle(self) -> None:
        await asyncio.gather(*(env.settle() for env in self.envs))

    def _mask(self, mask: Any) -> _Bools:
        if mask is None:
            return np.ones(self.num_envs, dtype=np.bool_)
        chosen: _Bools = np.asarray(mask)
        if chosen.shape != (self.num_envs,) or chosen.dtype != np.bool_ or not chosen.any():
            raise UsageError(
                f"reset_mask is a bool array of shape ({self.num_envs},) with at least one True, "
                f"not {mask!r}"
            )
        return chosen

    def _each_options(self, options: dict[str, Any]) -> list[dict[str, Any]]:
        each: list[dict[str, Any]] = [{} for _ in self.envs]
        for name, value in options.items():
            if name not in OPTIONS:
                raise UsageError(unknown("reset option", name, (*OPTIONS, "reset_mask")))
            many = isinstance(value, (list, tuple, np.ndarray))
            if many and len(value) != self.num_envs:
                raise UsageError(f"{len(value)} values of {name} for {self.num_envs} episodes")
            for i in range(self.num_envs):
                each[i][name] = value[i] if many else value
        return each

    def trajectories(self, *, update: int = 0) -> list[Trajectory]:
        """The records of all episodes, row i of episode i. UsageError where one is not finished."""
        return [env.trajectory(update=update, rollout=i) for i, env in enumerate(self.envs)]

    def render(self) -> tuple[Any, ...]:
        return tuple(env.render() for env in self.envs)

    def close_extras(self, **kwargs: Any) -> None:
        for env in self.envs:
            env.close()
