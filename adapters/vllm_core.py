"""The states of a vLLM engine: awake, asleep, without weights, broken; and what takes it from one to
another between two pumps."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeAlias

from mintrl_env.adapters.vllm_engine import runs_in_process
from mintrl_env.errors import PolicyError, UsageError

Weights: TypeAlias = "Iterable[tuple[str, Any]] | str | os.PathLike[str]"
SleepLevel = Literal[0, 1, 2]
_FAILED_STEPS = 3  # in a row, until the engine is given up
_RESET_TRIES = 100


class Core:
    """A `vllm.LLMEngine` and what is known of its state.

    Args:
        llm: the engine, checked (`vllm_engine.checked_engine`).
        level: how deep `fall_asleep` puts it to sleep; 0: not at all.
    """

    def __init__(self, llm: Any, level: SleepLevel) -> None:
        self.llm = llm
        self._level = level
        self._asleep: list[str] = []
        self._lacks_weights = ""  # why
        self._failed_steps = 0
        self.broken: Exception | None = None

    def given_up(self) -> PolicyError:
        """The error of every request to a broken engine."""
        return failure("vLLM has failed and is not to be trusted; make a new engine", self.broken)

    def check_usable(self) -> None:
        """Raises PolicyError for a broken engine, UsageError for one without weights."""
        if self.broken is not None:
            raise self.given_up()
        if self._lacks_weights:
            raise UsageError(f"vLLM has no weights ({self._lacks_weights}): load_weights first")

    # -- one step --------------------------------------------------------------------------------

    def step(self) -> list[Any]:
        """Outputs of a step; raises what vLLM raises, after `distrust`."""
        try:
            outputs: list[Any] = self.llm.step()
        except Exception as error:
            self._failed_steps += 1
            if type(error).__name__ == "EngineDeadError" or self._failed_steps >= _FAILED_STEPS:
                self.broken = self.broken or error
            raise
        if outputs:
            self._failed_steps = 0
        return outputs

    def abort(self, names: Sequence[str]) -> None:
        """Take requests out of the engine; where that fails it is broken."""
        if not names or self.broken is not None:
            return
        try:
            self.llm.abort_request(list(names))
        except Exception as error:
            self.broken = error

    def distrust(self, error: Exception | None) -> None:
        """A step was left half done. vLLM has filed its blocks in the prefix cache before it computed
        them, so they must go; where they don't, the engine is broken."""
        try:
            self.drop_cache()
        except Exception as further:
            self.broken = self.broken or error or further

    # -- between two pumps -----------------------------------------------------------------------

    def drop_cache(self) -> None:
        """Forget every prefix. Blocks of requests that were just aborted are free once the step that
        was under way has ended, so it may take a few.

        Raises:
            PolicyError: vLLM does not let go of it, or is broken.
        """
        if self.broken is not None:
            raise self.given_up()
        for _ in range(_RESET_TRIES):
            try:
                if self.llm.reset_prefix_cache():
                    return
                if runs_in_process(self.llm):
                    self.llm.step()
                else:  # it steps by itself, and waiting for its output would be for ever
                    time.sleep(0.05)
            except Exception as error:
                raise failure("vLLM did not drop its prefix cache", error) from error
        raise PolicyError("vLLM does not drop its prefix cache: has it requests of somebody else?")

    def load_weights(self, weights: Weights) -> None:
        """See `VLLMEngine.load_weights`."""
        given: dict[str, Any]
        if isinstance(weights, (str, os.PathLike)):
            given = {"weights_path": os.fspath(weights)}
        elif runs_in_process(self.llm):
            given = {"weights_iterator": iter(weights)}
        else:
            raise UsageError(
                "tensors reach vLLM only within one process and without tensor parallelism: make the "
                "engine with load_vllm, or with VLLM_ENABLE_V1_MULTIPROCESSING=0 in the environment, "
                "or give a folder"
            )
        # KV memory comes back only when it is needed, so that it need not fit beside what is loaded.
        self.wake("weights")
        self._lacks_weights = "loading them failed"
        try:
            self.llm.collective_rpc("reload_weights", kwargs=given)
        except Exception as error:
            raise failure("vLLM could not load the weights", error) from error
        self._lacks_weights = ""
        self.drop_cache()

    def wake(self, *parts: str) -> None:
        """Bring back "weights" or "kv_cache", as far as they sleep. Raises PolicyError."""
        tags = [part for part in parts if part in self._asleep]
        if not tags:
            return
        try:
            self.llm.wake_up(tags)
        except Exception as error:
            raise failure("vLLM did not wake up (is the trainer in its memory?)", error) from error
        self._asleep = [tag for tag in self._asleep if tag not in tags]

    def fall_asleep(self) -> None:
        """Give up memory, if it is to. Raises PolicyError."""
        if self._level == 0 or self._asleep or self.broken is not None:
            return
        try:
            self.llm.sleep(self._level)
        except Exception as error:
            raise failure("vLLM did not fall asleep", error) from error
        self._asleep = ["weights", "kv_cache"]
        if self._level == 2:
            self._lacks_weights = "sleep level 2 drops them"


def failure(what: str, error: Exception | None) -> PolicyError:
    """`what` and vLLM's own words."""
    failed = PolicyError(f"{what}: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed
