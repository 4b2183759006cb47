"""The policy's view: an action is the policy's next chunk, an observation is what it reads.

    env = gymnasium.make("MinTRL/Policy-v0")
    obs, info = env.reset(seed=0)
    while True:
        chunk = write(obs, at_most=info["max_tokens"])
        obs, reward, terminated, truncated, info = env.step(chunk)
        if terminated or truncated:
            break

Judges, guards, budgets and tool failures are wrappers (`wrappers.py`). The environment alone owns
the Episode, and no pending chunk survives a call of `step`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mintrl_env.env_base import Environment, EpisodeEnv
from mintrl_env.env_defaults import make_setup
from mintrl_env.episode import EpisodeConfig, Finished, NeedChunk
from mintrl_env.errors import UsageError
from mintrl_env.prompts import PromptBuilder
from mintrl_env.protocols import Tokenizer, Verifier
from mintrl_env.reviewing import legal_event
from mintrl_env.spaces import TokenIds, UnicodeText
from mintrl_env.splice import CHARACTERS_PER_TOKEN
from mintrl_env.tasks import TaskColumns
from mintrl_env.types import Chunk, Finish, NoReview, ReviewRequest, Task, Turn, Verdict

_NOBODY = NoReview()
_EOS, _LENGTH = Finish.EOS, Finish.LENGTH  # an enum's attributes are slow to look up
_SAMPLED_TOKENS = 64


class PolicyEnv(EpisodeEnv):
    """`MinTRL/Policy-v0`. All parts may be names and numbers, or objects.

    Args:
        tasks: a registered name, a .jsonl or .parquet file, a Hub id, or Task objects.
        tokenizer: "bytes", a path or Hub id, or a `protocols.Tokenizer`.
        verifier: a registered name or a Verifier for all tasks; None: each task's own.
        config: the limits of an episode; or give its fields as arguments (`chunk_tokens=128`).
        prompts: a PromptBuilder, or its arguments (`{"chat": True, "system_prompt": ...}`).
        columns: how a file's rows become tasks, a TaskColumns or its arguments.
        action: "ids" (int32, shape (n,)) or "text", which is encoded once, on arrival; a text that
            ends with `eos_text` ends the response.
        observation: "ids" or "text" of prompt and accepted response; default: as the action.
        environment: async (task, NeedEnvironment) -> (text or ids, done), with `turns=True`.
        control: the kind of the episodes where `reset` does not say: True is never reviewed.
        render_mode: "ansi", or None.
        **limits: fields of EpisodeConfig.

    `reset(options={"task_id": str, "control": bool})` chooses the episode. The reward is the
    verifier's at the end (0.0 where it could not tell: `info["score"]["decided"]`), else 0.0. EOS
    terminates; the limit T, a deadline or an error truncates.
    """

    def __init__(
        self,
        *,
        tasks: str | Sequence[Task] = "sums",
        tokenizer: str | Tokenizer = "bytes",
        verifier: str | Verifier | None = None,
        config: EpisodeConfig | None = None,
        prompts: PromptBuilder | Mapping[str, Any] | None = None,
        columns: TaskColumns | Mapping[str, Any] | None = None,
        action: str = "ids",
        observation: str | None = None,
        environment: Environment | None = None,
        control: bool = False,
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
        super().__init__(setup, environment=environment, control=control, render_mode=render_mode)
        self.action = _view("action", action)
        self.observation = _view("observation", action if observation is None else observation)
        self._previewed: tuple[Chunk, ReviewRequest | None] | None = None
        self._eos_ids = setup.tokenizer.eos_ids
        config, tokens = setup.config, setup.tokenizer
        longest = setup.prompts.max_prompt + config.max_response
        sampled = min(_SAMPLED_TOKENS, config.chunk_tokens, config.max_response)
        if self.action == "ids":
            self.action_space = TokenIds(
                tokens.vocab_size,
                config.max_response,
                min_len=1,
                last_only=tokens.eos_ids,
                sample_len=sampled,
            )
        else:
            self.action_space = UnicodeText(
                config.max_response * CHARACTERS_PER_TOKEN, min_length=1, sample_length=sampled
            )
        if self.observation == "ids":
            self.observation_space = TokenIds(tokens.vocab_size, longest)
        else:
            self.observation_space = UnicodeText(longest * CHARACTERS_PER_TOKEN)

    def sibling(self) -> PolicyEnv:
        """Another environment with the same parts, shared, and an episode of its own."""
        other = PolicyEnv(
            tasks=self.setup.tasks,
            tokenizer=self.tokenizer,
            verifier=self.setup.verifier,
            config=self.setup.config,
            prompts=self.setup.prompts,
            action=self.action,
            observation=self.observation,
            environment=self.environment,
            control=self.control,
            render_mode=self.render_mode,
        )
        other.setup = self.setup
        return other

    @property
    def eos_text(self) -> str:
        """What ends a text action that ends the response."""
        return self.tokenizer.decode([min(self.tokenizer.eos_ids)])

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._previewed = None
        self._begin(options)
        return self.observe(), self._start_info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a chunk: ids, text, a Chunk, or a Turn that somebody may have reviewed.

        Raises:
            UsageError: the chunk is illegal (longer than `info["max_tokens"]`, an EOS inside, an id
                outside the vocabulary); the episode is unchanged.
        """
        turn = self.as_turn(action)
        before = self.take(turn)
        self._settle_now()
        return self.outcome(turn, before)

    # --- the three parts of a step, which the vector environment runs for all its episodes at once

    def take(self, turn: Turn) -> tuple[int, int]:
        """Send the chunk and its review; returns the counts of reviews and log entries before."""
        episode = self.episode
        if type(episode.need) is not NeedChunk:
            self._refuse_step()
        before = len(episode.reviews), episode.log_length
        event = turn.review
        if event is None or type(event) is NoReview:
            episode.send(turn.chunk)
            if episode.awaits_review:
                episode.send(_NOBODY)
            return before
        request = self.review_request(turn)
        if request is None:
            raise UsageError(
                "this chunk is open to no review (a control, no review left, or spacing), but the "
                "turn carries one: ask review_request(turn) first"
            )
        if isinstance(event, Verdict):
            event = legal_event(
                request, event, lambda verdict: episode.illegal_because(verdict, request)
            )
        episode.send(turn.chunk)
        episode.send(event)
        return before

    def outcome(
        self, turn: Turn, before: tuple[int, int]
    ) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """What `step` returns, once the episode is settled."""
        self._previewed = None
        info = self._step_info(turn.chunk, *before)
        return self.observe(), *self._ending(), info

    # --- for wrappers, through get_wrapper_attr

    def as_turn(self, action: Any) -> Turn:
        """The action as a Turn; one that is a Turn already passes through.

        Raises:
            UsageError: it is neither a Turn, a Chunk nor what the action space holds.
        """
        if type(action) is np.ndarray:
            ids = action
        elif isinstance(action, Turn):
            return action
        elif isinstance(action, Chunk):
            return Turn(action)
        elif isinstance(action, str):
            if self.action != "text":
                raise UsageError('this environment takes ids; make it with action="text" for text')
            return Turn(self._encode(action))
        else:
            ids = np.asarray(action)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
            raise UsageError(
                "an action is a non-empty 1-D array of token ids"
                + (" or a text" if self.action == "text" else "")
                + f", not {type(action).__name__} of shape {ids.shape} and type {ids.dtype}"
            )
        return Turn(Chunk(ids, None, _EOS if ids.item(-1) in self._eos_ids else _LENGTH))

    def review_request(self, turn: Turn) -> ReviewRequest | None:
        """What a judge of this turn is shown; None: a control, no review left, or spacing.

        Changes nothing. Raises UsageError where `step` would.
        """
        if not isinstance(self.episode.need, NeedChunk):
            self._refuse_step()
        # A judge and several guards ask for the same chunk: split it into steps once.
        if self._previewed is None or self._previewed[0] is not turn.chunk:
            self._previewed = (turn.chunk, self.episode.preview(turn.chunk))
        return self._previewed[1]

    def illegal_because(self, verdict: Verdict, request: ReviewRequest) -> str:
        """Why the episode would refuse this verdict on this request, or ""."""
        return self.episode.illegal_because(verdict, request)

    # ---

    def _encode(self, text: str) -> Chunk:
        eos_text = self.eos_text
        ended = bool(eos_text) and text.endswith(eos_text)
        ids = self.tokenizer.encode(text.removesuffix(eos_text) if ended else text)
        if ended:
            ids = [*ids, min(self.tokenizer.eos_ids)]
        return Chunk(np.array(ids), finish=Finish.EOS if ended else Finish.LENGTH)

    def observe(self) -> Any:
        """Prompt and accepted response, as `reset` and `step` return them."""
        ids = self._ids()
        return ids if self.observation == "ids" else self.tokenizer.decode(ids)

    def _refuse_step(self) -> None:
        if isinstance(self.episode.need, Finished):
            raise UsageError("the episode is finished: call reset()")
        raise UsageError("the last step failed midway: call reset()")


def _view(name: str, value: str) -> str:
    if value not in ("ids", "text"):
        raise UsageError(f"{name} is 'ids' or 'text', not {value!r}")
    return value
