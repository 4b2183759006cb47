"""The judge's view: an action is a verdict, the environment holds the policy.

This is how a judge is trained or benchmarked, and how a controller that decides where to intervene
is learnt. Every observation shows one pending chunk; an episode has at most R of them.

    env = gymnasium.make("MinTRL/Judge-v0")
    obs, info = env.reset(seed=0)
    action = {"verdict": 1, "step": 0, "correction": "12 + 30 = 42\\n\\n"}
    obs, reward, terminated, truncated, info = env.step(action)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from mintrl_env.env_base import Environment, EpisodeEnv
from mintrl_env.env_defaults import make_policy, make_setup
from mintrl_env.episode import Ended, EpisodeConfig, Finished, NeedChunk, NeedReview
from mintrl_env.errors import PolicyError, UsageError
from mintrl_env.loops import sync
from mintrl_env.prompts import PromptBuilder
from mintrl_env.protocols import Policy, Sampling, Tokenizer, Verifier
from mintrl_env.reviewing import legal_event
from mintrl_env.spaces import TokenIds, UnicodeText
from mintrl_env.splice import CHARACTERS_PER_TOKEN
from mintrl_env.tasks import TaskColumns
from mintrl_env.types import Chunk, ReviewRequest, StopReason, Task, Verdict

KEEP, REVISE = 0, 1


class JudgeEnv(EpisodeEnv):
    """`MinTRL/Judge-v0`. All parts may be names and numbers, or objects.

    The action is a dict: `verdict` (0 Keep, 1 Revise), `step` (0-based index of the earliest wrong
    step) and `correction` (both of no effect with a Keep); a `Verdict` is taken too. An illegal
    Revise is a recorded Keep, as for every judge: `info["cause"]` or `info["guard"]` says why.

    The observation is a dict: `task` and `accepted` (texts), `steps` (the pending chunk's, a tuple
    of texts; a step's place is its number; empty at the end) and `reviews_left` (after this one).

    Args:
        policy: a registered name (called with the tokenizer) or a Policy.
        temperature: of the policy's sampling.
        correction: "text", or "ids" of the policy's tokenizer.
        tasks, tokenizer, verifier, config, prompts, columns, environment, render_mode, limits:
            as `PolicyEnv` has them.

    The reward is the verifier's at the end, else 0.0; EOS terminates, the limit T or an error of
    the policy truncates.
    """

    def __init__(
        self,
        *,
        policy: str | Policy = "sums",
        temperature: float = 1.0,
        correction: str = "text",
        tasks: str | Sequence[Task] = "sums",
        tokenizer: str | Tokenizer = "bytes",
        verifier: str | Verifier | None = None,
        config: EpisodeConfig | None = None,
        prompts: PromptBuilder | Mapping[str, Any] | None = None,
        columns: TaskColumns | Mapping[str, Any] | None = None,
        environment: Environment | None = None,
        render_mode: str | None = None,
        **limits: Any,
    ) -> None:
        setup = make_setup(
            tasks=tasks,
            tokenizer=tokenizer,
            verifier=verifier,
            config=config,
            prompts=prompts,
            columns=columns,
            limits=limits,
        )
        super().__init__(setup, environment=environment, control=False, render_mode=render_mode)
        config, tokens = setup.config, setup.tokenizer
        if config.max_reviews < 1:
            raise UsageError("with max_reviews = 0 a judge has nothing to do")
        if correction not in ("text", "ids"):
            raise UsageError(f"correction is 'text' or 'ids', not {correction!r}")
        self.policy = make_policy(policy, tokens)
        self.sampling = Sampling(temperature)
        self.correction = correction
        written: spaces.Space[Any]
        if correction == "text":
            written = UnicodeText(
                config.max_correction * CHARACTERS_PER_TOKEN, sample_length=config.max_correction
            )
        else:
            written = TokenIds(tokens.vocab_size, config.max_correction)
        self.action_space = spaces.Dict(
            {
                "verdict": spaces.Discrete(2),
                "step": spaces.Discrete(config.chunk_tokens),
                "correction": written,
            }
        )
        characters = config.max_response * CHARACTERS_PER_TOKEN
        longest = max(len(task.prompt_text) for task in setup.tasks)
        self.observation_space = spaces.Dict(
            {
                "task": UnicodeText(longest),
                "accepted": UnicodeText(characters),
                "steps": spaces.Sequence(UnicodeText(characters)),
                "reviews_left": spaces.Discrete(config.max_reviews + 1),
            }
        )

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode and let the policy write its first chunk. Options: task_id."""
        super().reset(seed=seed)
        self._begin(options, can_be_control=False)
        sync(self._go_on())
        if isinstance(end := self.episode.need, Finished):
            raise PolicyError(f"the policy wrote nothing to review: {end.detail}")
        return self._observe(), self._start_info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        request = self._request()
        if request is None:
            raise UsageError("the episode is finished: call reset()")
        episode = self.episode
        event = legal_event(request, self.as_verdict(action), episode.illegal_because)
        reviews, logged = len(episode.reviews), episode.log_length
        episode.send(event)
        sync(self._go_on())
        info = self._step_info(Chunk(request.chunk_ids), reviews, logged)
        return self._observe(), *self._ending(), info

    def as_verdict(self, action: Any) -> Verdict:
        """The action as a Verdict. UsageError where it is none."""
        if isinstance(action, Verdict):
            return action
        if not isinstance(action, Mapping) or "verdict" not in action:
            raise UsageError("an action is a dict of verdict (0 or 1), step and correction")
        if action["verdict"] == KEEP:
            return Verdict.keep()
        if action["verdict"] != REVISE:
            raise UsageError(f"verdict is 0 (Keep) or 1 (Revise), not {action['verdict']!r}")
        correction = action.get("correction", "")
        if not isinstance(correction, str):
            correction = tuple(int(i) for i in correction)
        try:
            return Verdict.revise(action.get("step"), correction)  # type: ignore[arg-type]
        except (ValueError, TypeError) as error:
            raise UsageError(f"this Revise is none: {error}") from error

    async def _go_on(self) -> None:
        """Let policy, tools and verifier go on to the next review or the end."""
        episode = self.episode
        await self.settle()
        while isinstance(need := episode.need, NeedChunk):
            assert episode.key is not None
            try:
                chunk = await self.policy.generate(
                    np.concatenate([episode.prompt_ids, episode.ids]),
                    max_tokens=need.max_tokens,
                    stop=need.stop,
                    sampling=self.sampling,
                    key=episode.key.at(need.draw),
                )
            except UsageError:
                raise
            except Exception as error:
                episode.send(Ended(StopReason.ERROR, f"policy: {type(error).__name__}: {error}"))
                return
            episode.send(chunk)
            await self.settle()

    def _request(self) -> ReviewRequest | None:
        need = self.episode.need
        return need.request if isinstance(need, NeedReview) else None

    def _observe(self) -> dict[str, Any]:
        request, episode = self._request(), self.episode
        return {
            "task": episode.task.prompt_text,
            "accepted": episode.text,
            "steps": tuple(step.text for step in request.steps) if request else (),
            "reviews_left": np.int64(request.reviews_left if request else 0),
        }
