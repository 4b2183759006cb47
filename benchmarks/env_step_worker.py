"""One environment, stepped on request: the part of `env_step.py` that runs in a peer's own Python.

    python env_step_worker.py NAME CHUNK     # then a number of episodes a line; answers µs a step

Nothing but the standard library is imported before a name is chosen. Every environment takes
episodes of the same shape: a prompt of `PROMPT` tokens, then chunks of CHUNK tokens, none of which
ends it. Only the steps whose observation has 1,024 to 3,072 tokens are timed: 2,048 on average.
Where an environment takes text, a token is `CHARACTERS` letters.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

PROMPT, FROM, TO, CHARACTERS = 256, 1024, 3072, 4
Parts = tuple[Callable[[], object], Callable[[Any], object], list[Any]]


def turns(chunk: int) -> tuple[int, int]:
    """How many chunks come before the timed ones, and how many are timed."""
    return (FROM - PROMPT) // chunk, (TO - FROM) // chunk


def mintrl(chunk: int) -> Parts:
    """`MinTRL/Policy-v0` unwrapped: ids in, prompt and response as ids out."""
    import numpy as np

    from mintrl_env.env import PolicyEnv
    from mintrl_env.types import Task

    # The byte tokenizer puts nothing around a prompt, so this one has PROMPT tokens.
    task = Task("benchmark", "x" * PROMPT, answer="1", verifier="last_integer")
    env = PolicyEnv(
        tasks=[task],
        max_response=2 * TO,
        chunk_tokens=chunk,
        max_reviews=sum(turns(chunk)) + 1,
        prompts={"max_prompt": PROMPT},
    )
    obs, _ = env.reset(seed=0)
    assert len(obs) == PROMPT, len(obs)
    rng = np.random.default_rng(0)
    chunks = [rng.integers(97, 123, chunk, np.int32) for _ in range(sum(turns(chunk)))]
    return env.reset, env.step, chunks


def gymnasium_box(chunk: int) -> Parts:
    """A bare `gymnasium.Env` that pads prompt and response to a Box and checks nothing."""
    import gymnasium
    import numpy as np

    class Padded(gymnasium.Env[Any, Any]):
        observation_space = gymnasium.spaces.Box(0, 256, (4096,), np.int32)
        action_space = gymnasium.spaces.Box(0, 256, (chunk,), np.int32)

        def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            super().reset(seed=seed)
            self.ids = np.zeros(4096, np.int32)
            self.ids[:PROMPT] = 120
            self.filled = PROMPT
            return self.ids.copy(), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            self.ids[self.filled : self.filled + chunk] = action
            self.filled += chunk
            return self.ids.copy(), 0.0, False, False, {}

    env = Padded()
    rng = np.random.default_rng(0)
    chunks = [rng.integers(97, 123, chunk, np.int32) for _ in range(sum(turns(chunk)))]
    return env.reset, env.step, chunks


def gem(chunk: int) -> Parts:
    """gem's history wrapper (`concat_with_action`) around an environment that does nothing."""
    import gem.core
    from gem.wrappers.observation_wrapper import ObservationWrapper

    class Nothing(gem.core.Env):  # type: ignore[misc]
        def reset(self, seed: Any = None) -> tuple[str, dict[str, Any]]:
            return "x" * (PROMPT * CHARACTERS), {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return "", 0.0, False, False, {}

    env = ObservationWrapper(Nothing(), include_action=True, include_chat_template=False)
    return env.reset, env.step, texts(chunk)


def skyrl_gym(chunk: int) -> Parts:
    """skyrl-gym's text environment that does nothing. It keeps no history: its caller does."""
    from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

    class Nothing(BaseTextEnv):  # type: ignore[misc]
        def step(self, action: str) -> Any:
            self.turns += 1
            return BaseTextEnvStepOutput(observations=[], reward=0.0, done=False, metadata={})

    env = Nothing()
    prompt = [{"role": "user", "content": "x" * (PROMPT * CHARACTERS)}]
    return (lambda: env.init(prompt)), env.step, texts(chunk)


def texts(chunk: int) -> list[Any]:
    return [chr(97 + turn % 26) * (chunk * CHARACTERS) for turn in range(sum(turns(chunk)))]


MAKERS = {f.__name__: f for f in (mintrl, gymnasium_box, gem, skyrl_gym)}
PACKAGES = {
    "mintrl": "mintrl-env",
    "gymnasium_box": "gymnasium",
    "gem": "gem-llm",
    "skyrl_gym": "skyrl-gym",
}


def run(parts: Parts, chunk: int, episodes: int) -> float:
    """Microseconds a timed step."""
    reset, step, actions = parts
    before, timed = turns(chunk)
    total = 0.0
    for _ in range(episodes):
        reset()
        for action in actions[:before]:
            step(action)
        start = time.perf_counter()
        for action in actions[before:]:
            step(action)
        total += time.perf_counter() - start
    return total / episodes / timed * 1e6


def main() -> None:
    name, chunk = sys.argv[1], int(sys.argv[2])
    parts = MAKERS[name](chunk)
    print(json.dumps(version(PACKAGES[name])), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(parts, chunk, int(line))), flush=True)


if __name__ == "__main__":
    main()
