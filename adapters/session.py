"""A policy that runs in this process: its engine, its judge's, its runner and its loop thread.

Trainers, evaluations and `mintrl rollout` all ask one `RolloutSession` for groups, so that they
share prompts, sampling, judge and store.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import torch

from mintrl_env.adapters.checkpoint_weights import checkpoint_weights
from mintrl_env.adapters.judge_servers import refuse_unreachable
from mintrl_env.adapters.policy_transformers import SlotEngine
from mintrl_env.adapters.pump import LoopThread, Pumped, Rounds, run_with_pump
from mintrl_env.errors import UsageError
from mintrl_env.prompts import HFTokenizer, PromptBuilder
from mintrl_env.protocols import Guard, Judge, Verifier
from mintrl_env.reviewing import check_judge
from mintrl_env.rollout import Environment, Parts, RolloutConfig, Runner
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Task

_CLOSE_S = 10.0
_LEAST_WINDOW = 512
T = TypeVar("T")
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class EngineHost:
    """What an engine in this process needs; judges that run on the same machine are made from it.

    Attributes:
        model: the policy (with LoRA the peft model); None: it is behind a server, and not here.
        tokenizer, prompts: the policy's.
        slots, max_length: of the KV cache.
        autocast: see SlotEngine.
        rounds: shared by all engines of the run; None for free-running ones.
        policy_engine: makes the policy's engine where it is another than the embedded one
            (`policy_vllm.vllm_policy`, a ServedPolicy); judges keep to `engine`.
        report: what to tell the user of the policy's engine before it is used.
        before_update: called with the update's number before its rollouts, while nothing is pumped
            (a self-judge takes over newer weights then).
    """

    model: torch.nn.Module | None
    tokenizer: HFTokenizer
    prompts: PromptBuilder
    slots: int
    max_length: int
    autocast: torch.dtype | None = None
    rounds: Rounds | None = None
    policy_engine: PolicyEngine | None = None
    report: str = ""
    before_update: list[Callable[[int], None]] = field(default_factory=list)

    def engine(
        self,
        model: torch.nn.Module | None = None,
        *,
        slots: int | None = None,
        max_length: int | None = None,
        **options: Any,
    ) -> SlotEngine:
        """An engine over `model` (default: the policy); `options` go to SlotEngine.

        Raises:
            UsageError: no model is given, and the policy is behind a server.
        """
        model = self.model if model is None else model
        if model is None:
            raise UsageError("the policy is behind a server, so no engine here can run it")
        pad_id = self.tokenizer.hf.pad_token_id
        return SlotEngine(
            model,
            eos_ids=self.tokenizer.eos_ids,
            vocab_size=self.tokenizer.vocab_size,
            slots=slots or self.slots,
            max_length=max_length or self.max_length,
            pad_id=self.tokenizer.eos_id if pad_id is None else pad_id,
            decode=self.tokenizer.decode,
            rounds=self.rounds,
            autocast=self.autocast,
            **options,
        )


PolicyEngine: TypeAlias = Callable[[EngineHost], Any]
"""Makes an engine for the policy: a Policy with `policy_version` and `reset`, Pumped where it runs in
this process, with `load_weights` where it has a copy of the weights, with `rest` where it may sleep
until the next groups."""

JudgeFactory: TypeAlias = Callable[[EngineHost], tuple[Judge, Sequence[Pumped]]]
"""Makes a judge that runs in this process, and the engines that the pump has to serve for it."""


class RolloutSession:
    """Runs groups while the calling thread, which owns the models, serves the engines.

    Args:
        host: the policy and what engines are made of.
        config: how rollouts run.
        judge: an object with `review`, or a JudgeFactory; None: nobody reviews.
        guards, verifier, environment: see `Parts`; a guard with `with_scorer` is given the policy.
        seed, run_attempt, on_group: see `Runner`.

    Raises:
        UsageError: a judge that could only fail (see `check_judge`).
        ConfigError: a judge's server on a loopback address, in a run of several nodes.
    """

    def __init__(
        self,
        host: EngineHost,
        config: RolloutConfig,
        *,
        judge: Judge | JudgeFactory | None = None,
        guards: Sequence[Guard] = (),
        verifier: Verifier | None = None,
        environment: Environment | None = None,
        seed: int = 0,
        run_attempt: int = 0,
        on_group: Callable[[Sequence[Trajectory]], object] | None = None,
    ) -> None:
        self.host = host
        if host.rounds is not None:
            # A round waits for every live episode, so none may wait for another at a semaphore.
            config = replace(config, policy_concurrency=sys.maxsize, judge_concurrency=sys.maxsize)
        self.engine = host.engine() if host.policy_engine is None else host.policy_engine(host)
        reviewer, engines = _judge_of(judge, host)
        # A gate that asks the policy asks it as it is now.
        guards = [g.with_scorer(self.engine) if hasattr(g, "with_scorer") else g for g in guards]
        served = () if hasattr(self.engine, "pumping") else (self.engine,)
        self._engines = tuple(e for e in (self.engine, *engines) if e not in served)
        self._served = served
        self.runner = Runner(
            Parts(self.engine, reviewer, guards, verifier, environment),
            host.prompts,
            config,
            seed=seed,
            run_attempt=run_attempt,
            on_group=on_group,
            on_live=self.set_live,
        )
        self._loop: LoopThread | None = None
        self._pid = os.getpid()

    @property
    def window(self) -> int | None:
        """Rows at once where there are any number: enough for a full batch whatever judges and
        verifiers take, and few enough that none waits out its deadline in the queue.

        None in rounds, whose batches are made of all rows.
        """
        return None if self.host.rounds is not None else max(_LEAST_WINDOW, 8 * self.host.slots)

    def set_live(self, live: int) -> None:
        """Say how many episodes run, to engines that work in rounds; the runner does it itself."""
        if self.host.rounds is not None:
            self.host.rounds.live = live

    def groups(
        self,
        tasks: Sequence[Task],
        *,
        update: int,
        reviewed: bool = True,
        rollouts: Sequence[Sequence[int]] | None = None,
        on_progress: Progress = lambda done, total: None,
        at_once: int | None = None,
    ) -> list[list[Trajectory]]:
        """The groups of `tasks`, in their order, by the weights as they are now.

        Arguments as in `Runner.groups`; a negative `update` is for what is not training.
        """
        self._renew(max(update, 0))
        if update >= 0:
            for hook in self.host.before_update:
                hook(update)
        found = self.run(
            lambda: self.runner.collect(
                tasks,
                update=update,
                reviewed=reviewed,
                rollouts=rollouts,
                on_progress=on_progress,
                at_once=at_once,
            )
        )
        if hasattr(self.engine, "rest"):
            self.engine.rest()
        return found

    def run(self, factory: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the session's loop while the calling thread serves the engines."""
        if self._pid != os.getpid():
            # OpenMP's threads stayed in the parent, and a forward would wait for them for ever.
            torch.set_num_threads(1)
            self._pid = os.getpid()
        if self._loop is None or not self._loop.is_alive:
            self._loop = LoopThread()
        return run_with_pump(self._engines, factory, loop=self._loop)

    def _renew(self, version: int) -> None:
        """The engine forgets what older weights computed, and gets the new ones if it has a copy."""
        if hasattr(self.engine, "load_weights"):
            assert self.host.model is not None
            self.engine.load_weights(checkpoint_weights(self.host.model), version=version)
        else:
            self.engine.reset()
            self.engine.policy_version = version

    def close(self) -> None:
        """End the loop thread, and the connections of judge and policy; closing twice is harmless."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        for part in (self.runner.parts.judge, *self._served):
            close = getattr(part, "aclose", None)
            if close is not None and loop.is_alive:  # its connections live on this loop
                with contextlib.suppress(Exception):
                    loop.submit(close).result(_CLOSE_S)
        loop.close()

    def __enter__(self) -> RolloutSession:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _judge_of(
    judge: Judge | JudgeFactory | None, host: EngineHost
) -> tuple[Judge | None, Sequence[Pumped]]:
    engines: Sequence[Pumped] = ()
    if judge is None:
        return None, engines
    if not isinstance(judge, Judge) and callable(judge):
        judge, engines = judge(host)
    check_judge(judge)
    assert isinstance(judge, Judge)
    refuse_unreachable(judge)
    return judge, engines


def distinct_ids(ids: Sequence[str], seen: dict[str, int] | None = None) -> list[str]:
    """The same ids with every repeated one made unique (`id#2`), so that no two groups of an update
    share a key and with it their draws.

    Args:
        seen: names that are taken; the new ones are added, for a set that comes in parts.
    """
    seen = {} if seen is None else seen
    out = []
    for task_id in ids:
        name, count = task_id, seen.get(task_id, 0)
        while name in seen:
            count += 1
            name = f"{task_id}#{count}"
        seen[task_id] = max(count, 1)
        seen.setdefault(name, 1)
        out.append(name)
    return out


def task_id_of(row: Mapping[str, object]) -> str:
    """An id for a data set row that has none: a hash of its prompt, equal on every rank and run."""
    text = json.dumps(row.get("prompt"), sort_keys=True, default=str)
    return "row-" + hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
