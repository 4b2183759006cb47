"""Where the CPU seconds of an update of the quickstart go.

    python benchmarks/update_profile.py [--updates 6]

A real run of `configs/quickstart_mintrl.yaml` (models from the warm-up cache, or warmed up first),
without evaluations and checkpoints. CPU seconds of both threads, the trainer's and the event
loop's, the first update left out:

- policy, judge: the turns of their engines, and the judge's own code. What of the turns is not
  forwards and sampling (slots, moves of KV, draws) is shown besides;
- verifier: its `score`;
- trainer: TRL's update, loss, backward and optimiser step included;
- ours: all the rest: runner, episodes, reviews and their splitting into steps, pump, store,
  baseline and counts.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from pathlib import Path
from typing import Any

from measure import Line, parser, report, spread

from mintrl_env.config import load_config
from mintrl_env.console import RunConsole
from mintrl_env.run_folder import RunFolder
from mintrl_env.training import _Run

CONFIG = Path(__file__).parents[1] / "configs" / "quickstart_mintrl.yaml"
PARTS = ("policy", "judge", "verifier", "trainer", "ours")


class Clock:
    """CPU seconds of the calling thread by part; a part within a part counts for the inner one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner: list[float] = [0.0]

    def call(self, part: str, function: Callable[[], Any]) -> Any:
        self._inner.append(0.0)
        start = time.thread_time()
        try:
            return function()
        finally:
            took = time.thread_time() - start
            self.seconds[part] += took - self._inner.pop()
            self._inner[-1] += took

    def wrap(self, owner: Any, name: str, part: str) -> None:
        """Time a method of an object."""
        function = getattr(owner, name)
        setattr(owner, name, lambda *a, **k: self.call(part, lambda: function(*a, **k)))


class Timed:
    """A coroutine whose own steps are timed, but not its waiting."""

    def __init__(self, clock: Clock, part: str, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._clock, self._part, self._coroutine = clock, part, coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        step = self._coroutine.__await__()
        go: Callable[[], Any] = lambda: next(step)  # noqa: E731
        while True:
            try:
                future = self._clock.call(self._part, go)
            except StopIteration as end:
                return end.value
            try:
                yield future
                go = lambda: next(step)  # noqa: E731
            except BaseException as error:
                go = partial(step.throw, error)  # type: ignore[attr-defined]


class TimedJudge:
    def __init__(self, clock: Clock, judge: Any) -> None:
        self._clock, self._judge = clock, judge

    async def review(self, request: Any) -> Any:
        return await Timed(self._clock, "judge", self._judge.review(request))


class TimedVerifier:
    def __init__(self, clock: Clock, verifier: Any) -> None:
        self._clock, self._verifier = clock, verifier

    async def score(self, task: Any, response: str) -> Any:
        return await Timed(self._clock, "verifier", self._verifier.score(task, response))


def profile(updates: int, overrides: list[str]) -> list[dict[str, float]]:
    """CPU seconds by part of each update but the first."""
    config = load_config(
        CONFIG,
        [
            f"train.updates={updates + 1}",
            "train.checkpoint_every=0",
            "evaluation=null",
            "probe=null",
            *overrides,
        ],
    )
    with tempfile.TemporaryDirectory() as folder:
        run = _Run(config, RunFolder(Path(folder) / "run"), RunConsole())
        run.prepare(preflight=False)
        with run.parts:
            run.parts.callback(run.folder.close)
            run.build(run.folder.open(config, resume=False))
            return _train(run)


def _train(run: Any) -> list[dict[str, float]]:
    main, loop = Clock(), Clock()
    trainer = run.trainer
    session = trainer.session
    for engine in session._engines:
        part = "policy" if engine is session.engine else "judge"
        main.wrap(engine, "turn", f"{part}, slots")
        for name in ("step", "read", "score"):
            main.wrap(engine._reader, name, part)
    parts = session.runner.parts
    parts.judge = TimedJudge(loop, parts.judge)
    parts.verifier = TimedVerifier(loop, parts.verifier)
    main.wrap(session, "groups", "ours")
    for name in ("_rollout", "_regress", "_store_rows", "_calculate_rewards"):
        main.wrap(trainer, name, "ours")
    trainer.rollout_func = lambda prompts, *_: trainer._rollout(prompts)

    updates: list[dict[str, float]] = []
    last = {"main": 0.0, "loop": 0.0}
    run.advance = lambda done, note="": None

    def loop_seconds() -> float:
        thread = session._loop
        if thread is None:
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(thread._thread.ident))

    def after(update: int, logs: dict[str, Any]) -> None:
        now = {"main": time.thread_time(), "loop": loop_seconds()}
        took = {name: now[name] - last[name] for name in now}
        last.update(now)
        ours = main.seconds["ours"] + took["loop"] - sum(loop.seconds.values())
        found = {
            part: main.seconds[part] + main.seconds[f"{part}, slots"] + loop.seconds[part]
            for part in PARTS[:3]
        }
        updates.append(
            {
                **found,
                "trainer": took["main"] - sum(main.seconds.values()),
                "ours": ours,
                "slots": main.seconds["policy, slots"] + main.seconds["judge, slots"],
                "ours, main thread": main.seconds["ours"],
            }
        )
        main.seconds.clear()
        loop.seconds.clear()

    run.after_update = after
    trainer.train()
    return updates[1:]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--updates", type=int, default=6)
    arguments.add_argument("--set", action="append", default=[], dest="overrides")
    args = arguments.parse_args()
    overrides = list(args.overrides)
    if args.quick:
        overrides += ["train.prompts_per_update=2", "train.micro_batch=32"]
    updates = profile(2 if args.quick else args.updates, overrides)
    totals = [sum(update[part] for part in PARTS) for update in updates]
    shares = {
        part: [u[part] / total for u, total in zip(updates, totals, strict=True)] for part in PARTS
    }
    lines = []
    for part in PARTS:
        value, low, high = spread(shares[part])
        seconds = spread([update[part] for update in updates])[0]
        beside = {"CPU s an update": seconds}
        if part == "ours":
            for name in ("ours, main thread", "slots"):
                beside[f"CPU s, {name}"] = spread([update[name] for update in updates])[0]
        target = 0.05 if part == "ours" else None
        lines.append(
            Line(
                "update_profile",
                f"share of an update: {part}",
                value,
                target,
                True,
                low,
                high,
                beside,
            )
        )
    report(lines, args.json)


if __name__ == "__main__":
    main()
