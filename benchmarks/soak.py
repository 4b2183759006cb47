"""A soak: many short episodes with faults in everything around them. Nothing may leak or get lost.

    python benchmarks/soak.py [--episodes 50000] [--run runs/soak] [--minutes 9.5] [--resume]

A scripted policy that fails now and then; a judge that times out, loses its connection, crashes,
answers nonsense, points past the end, writes special tokens, or hangs; a verifier that raises, cannot
decide, or hangs, over the package's own math verifier, whose worker processes are killed at random.
Every fault follows from a row's key or text, so that afterwards each stored row can be compared with
what should have become of it.

Looked at, in the end: every episode is in the store once, with the outcome that its faults call for;
the resident memory has not grown; no process is left. Exit status 1 where one of these does not hold.
After --minutes it stops between two updates, and --resume goes on; Ctrl-C and kill are survived too.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import statistics
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from mintrl_env.episode import EpisodeConfig
from mintrl_env.errors import JudgeCause, JudgeError, PolicyError, VerifierError
from mintrl_env.keys import RowKey, uniforms
from mintrl_env.prompts import ByteTokenizer, PromptBuilder
from mintrl_env.protocols import Sampling
from mintrl_env.rollout import Parts, RolloutConfig, Runner
from mintrl_env.store import RolloutStore
from mintrl_env.store_check import check_store
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import (
    Chunk,
    Finish,
    Kind,
    Outcome,
    ReviewRequest,
    Score,
    StopReason,
    Task,
    Verdict,
)
from mintrl_env.verifiers import worker
from mintrl_env.verifiers.math_answer import MathVerifier

GROUP, GROUPS = 8, 250  # rows of a group, groups of an update
DEADLINE_S = 20.0
HANGS_IN = 8  # every so many updates something hangs: each of them takes a deadline
GROWTH_MB = 16.0
MARK = "MINTRL_SOAK"  # in the environment of every process that the soak starts
TOKENS = ByteTokenizer()

POLICY_FAULTS = 0.002
JUDGE_FAULTS: dict[str, tuple[float, Outcome, str]] = {
    "timeout": (0.03, Outcome.FAILED, "timeout"),
    "server": (0.03, Outcome.FAILED, "server"),
    "connection": (0.03, Outcome.FAILED, "connection"),
    "crash": (0.02, Outcome.FAILED, "internal"),
    "nonsense": (0.02, Outcome.FAILED, "internal"),
    "unparsed": (0.03, Outcome.UNPARSED, "unparsed"),
    "past the end": (0.02, Outcome.UNPARSED, "bad_step"),
    "special token": (0.02, Outcome.GUARDED, ""),
    "hang": (0.0005, Outcome.FAILED, "timeout"),
    "revise": (0.30, Outcome.REVISE, ""),
}
VERIFIER_FAULTS = {"raise": 0.03, "undecided": 0.02, "hang": 0.0005, "worker": 0.01}


def draw(key: RowKey, salt: str) -> float:
    """A number that belongs to a place in a row, whenever and in which process it is asked for."""
    name = RowKey(key.seed, key.update, f"{key.task_id}/{salt}", key.rollout, key.retry)
    return float(uniforms(name, 1)[0])


def judge_fault(key: RowKey, review: int) -> str:
    u = draw(key, f"judge {review}")
    for name, (share, _, _) in JUDGE_FAULTS.items():
        if u < share:
            return "keep" if name == "hang" and key.update % HANGS_IN else name
        u -= share
    return "keep"


def verifier_fault(task_id: str, text: str) -> str:
    u = draw(RowKey(0, 0, text, 0), "verifier")
    for name, share in VERIFIER_FAULTS.items():
        if u < share:
            calm = int(task_id.partition("-")[0]) % HANGS_IN
            return "none" if name == "hang" and calm else name
        u -= share
    return "none"


class Policy:
    async def generate(
        self,
        ids: npt.NDArray[np.int32],
        *,
        max_tokens: int,
        stop: Sequence[str],
        sampling: Sampling,
        key: RowKey,
    ) -> Chunk:
        u = uniforms(key, 20)
        await asyncio.sleep(0.004 * u[0])
        if draw(key, f"policy {key.draw}") < POLICY_FAULTS:
            raise PolicyError("the engine is gone")
        words = "".join(chr(97 + int(26 * x)) for x in u[2:18])
        text = f"{words[:6]} = {words[6:10]}\n\n{words[10:16]}"
        if u[1] < 0.5 or max_tokens > 16:
            text = f"{words[:2]} \\boxed{{{int(10 * u[18])}}}"
        written = TOKENS.encode(text)[: max_tokens - 1]
        ended = text.endswith("}") and len(written) == len(text)
        if ended:
            written.append(TOKENS.EOS)
        logprobs = -u[: len(written)] if len(written) <= len(u) else None
        finish = Finish.EOS if ended else Finish.LENGTH
        return Chunk(np.array(written, np.int32), logprobs, finish)


class Judge:
    async def review(self, request: ReviewRequest) -> Any:
        fault = judge_fault(request.key, request.review)
        await asyncio.sleep(0.01 * draw(request.key, f"latency {request.review}"))
        if fault in ("timeout", "server", "unparsed"):
            raise JudgeError(JudgeCause(fault), "as scripted")
        if fault == "connection":
            raise ConnectionResetError("as scripted")
        if fault == "crash":
            raise KeyError("as scripted")
        if fault == "hang":
            await asyncio.sleep(3600)
        answers = {
            "nonsense": "Revise, I think",
            "past the end": Verdict.revise(99, "x"),
            "special token": Verdict.revise(0, (65, TOKENS.EOS)),
            "revise": Verdict.revise(0, "no: "),
        }
        return answers.get(fault) or Verdict.keep()


class Verifier:
    def __init__(self) -> None:
        self.math = MathVerifier(workers=1)

    async def score(self, task: Task, response: str) -> Score:
        fault = verifier_fault(task.task_id, response)
        if fault == "raise":
            raise VerifierError("as scripted")
        if fault == "undecided":
            return Score.undecided("unavailable", "as scripted")
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "worker":  # an answer that only a worker process can compare
            return await self.math.score(
                task, r"\boxed{\sin(2)^2+\cos(2)^2+" + (task.answer or "") + "}"
            )
        return await self.math.score(task, response)


async def kill_workers(chance: random.Random) -> None:
    """Kill a worker process of the verifier now and then."""
    while True:
        await asyncio.sleep(chance.uniform(4.0, 12.0))
        for child in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                child.kill()


# --- the run


@dataclass
class Soak:
    """A soak's folder: what was asked for, the store, memory after each update."""

    folder: Path
    episodes: int

    @property
    def updates(self) -> int:
        return -(-self.episodes // (GROUP * GROUPS))

    @property
    def store(self) -> RolloutStore:
        return RolloutStore(self.folder / "rollouts")

    def tasks(self, update: int) -> list[Task]:
        groups = min(GROUPS, -(-self.episodes // GROUP) - update * GROUPS)
        return [Task(f"{update}-{i}", f"Sum {i}?", answer=str(i % 10)) for i in range(groups)]

    async def go(self, until: float, attempt: int) -> list[float]:
        """Run until all is done or the time is up; returns memory in MB after each update."""
        parts = Parts(Policy(), Judge(), (), Verifier())
        config = RolloutConfig(
            episode=EpisodeConfig(
                chunk_tokens=16, max_reviews=3, max_correction=6, max_response=80
            ),
            n_control=GROUP // 2,
            n_intervened=GROUP // 2,
            deadline_s=DEADLINE_S,
            judge_concurrency=512,
            verifier_concurrency=64,
        )
        store, memory = self.store, list[float]()
        runner = Runner(
            parts, PromptBuilder(TOKENS), config, run_attempt=attempt, on_group=store.write_group
        )
        killer = asyncio.ensure_future(kill_workers(random.Random(attempt)))
        try:
            for update in range(self.updates):
                done = collections.Counter(row.task_id for row in store.read(update=update)[0])
                left = [task for task in self.tasks(update) if done[task.task_id] < GROUP]
                if left:
                    if time.monotonic() > until:
                        break
                    async for _ in runner.groups(left, update=update):
                        pass
                    memory.append(psutil.Process().memory_info().rss / 2**20)
                store.compact(update)
                if left and update % 5 == 4:
                    print(f"update {update + 1} of {self.updates}: {memory[-1]:.0f} MB", flush=True)
        finally:
            killer.cancel()
        return memory

    def missing(self) -> int:
        """Episodes that are not in the store."""
        there = sum(len(self.store.read(update=u)[0]) for u in range(self.updates))
        return sum(len(self.tasks(u)) for u in range(self.updates)) * GROUP - there


# --- the account


def expected(row: Trajectory, seed: int = 0) -> list[str]:
    """What is wrong with a row, given the faults that its key and text call for."""
    key = RowKey(seed, row.update, row.task_id, row.rollout, row.retry)
    wrong = []
    for review in row.reviews:
        fault = judge_fault(key, review.index)
        _, outcome, cause = JUDGE_FAULTS.get(fault, (0, Outcome.KEEP, ""))
        late = row.stop_reason is StopReason.DEADLINE and review.cause == "timeout"
        if (review.outcome, review.cause) != (outcome, cause) and not late:
            wrong.append(f"review {review.index}: {review.outcome}/{review.cause}, not {fault}")
    if row.kind is Kind.CONTROL and row.reviews:
        wrong.append("a control was reviewed")
    if row.stop_reason is StopReason.ERROR:
        if row.valid or row.retry != 1 or "the engine is gone" not in row.cause:
            wrong.append(f"an error row with retry {row.retry}: {row.cause}")
        return wrong
    if row.stop_reason is StopReason.DEADLINE:
        return [*wrong, "valid after its deadline"] if row.valid else wrong
    ids = row.ids[:-1] if row.ids[-1] == TOKENS.EOS else row.ids
    fault = verifier_fault(row.task_id, TOKENS.decode(ids))
    unavailable = fault in ("raise", "undecided")
    if row.valid == unavailable:
        wrong.append(f"valid is {row.valid}, but the verifier's fault is {fault}")
    if fault == "hang":
        wrong.append("scored, though the verifier hung")
    return wrong


def account(soak: Soak) -> tuple[dict[str, Any], list[str]]:
    """Figures over the whole store, and what does not add up."""
    counts: collections.Counter[str] = collections.Counter()
    wrong: list[str] = []
    for update in range(soak.updates):
        rows, problems = soak.store.read(update=update)
        wrong += [line for line in problems if "unfinished" not in line]
        planned = {(task.task_id, r) for task in soak.tasks(update) for r in range(GROUP)}
        there = collections.Counter((row.task_id, row.rollout) for row in rows)
        if there.keys() != planned or any(n != 1 for n in there.values()):
            wrong.append(f"update {update}: {len(there)} of {len(planned)} episodes")
        for row in rows:
            wrong += [f"{row.task_id}/{row.rollout}: {text}" for text in expected(row)]
            counts["episodes"] += 1
            counts["valid"] += row.valid
            counts["started afresh"] += row.retry > 0
            counts[f"ended by {row.stop_reason}"] += 1
            counts[f"score {row.score.status}"] += 1
            for review in row.reviews:
                counts[f"review {review.outcome}"] += 1
                if review.cause:
                    counts[f"review failed by {review.cause}"] += 1
    found = check_store(soak.store)
    wrong += found.problems
    counts["tokens"] = sum(
        len(row.ids) for u in range(soak.updates) for row in soak.store.read(update=u)[0]
    )
    return dict(sorted(counts.items())), wrong


def growth_mb(memory: Sequence[float]) -> float | None:
    """Median of the last quarter of updates over that of the second; the first warms up."""
    quarter = len(memory) // 4
    if quarter < 2:
        return None
    return statistics.median(memory[-quarter:]) - statistics.median(memory[quarter : 2 * quarter])


def left_behind(mark: str) -> list[str]:
    """Other processes that carry the soak's mark, wherever they hang in the tree by now."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(f"{process.pid} {' '.join(process.cmdline())[:80]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=50_000)
    parser.add_argument("--run", type=Path, default=Path("runs/soak"))
    parser.add_argument("--minutes", type=float, default=9.5, help="stop after so long")
    parser.add_argument("--resume", action="store_true", help="go on with the soak in the folder")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    arguments = parser.parse_args()
    soak, attempt = Soak(arguments.run, arguments.episodes), 0
    log = arguments.run / "soak.jsonl"
    if log.exists():
        if not arguments.resume:
            sys.exit(f"{arguments.run} holds a soak: go on with --resume, or choose another --run")
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        soak.episodes, attempt = lines[0]["episodes"], len(lines)
    mark = os.environ[MARK] = uuid.uuid4().hex
    started = time.monotonic()
    _append(log, {"attempt": attempt, "episodes": soak.episodes})
    memory = asyncio.run(soak.go(started + 60 * arguments.minutes, attempt))
    seconds = time.monotonic() - started
    missing = soak.missing()
    worker.close_all()
    left = left_behind(mark)
    grown = growth_mb(memory)
    wrong = [f"left behind: {line}" for line in left]
    if grown is not None and grown > GROWTH_MB:
        wrong.append(f"memory grew by {grown:.1f} MB over {len(memory)} updates")
    print(f"{len(memory)} updates in {seconds:.0f} s in this process, {missing:,} episodes to go")
    if memory:
        print(f"memory MB: first {memory[0]:.1f}, last {memory[-1]:.1f}, most {max(memory):.1f}")
    print("memory growth: " + ("too few updates to say" if grown is None else f"{grown:+.1f} MB"))
    print(f"processes left behind: {len(left)}")
    if missing:
        print(f"not done: python benchmarks/soak.py --run {arguments.run} --resume")
    counts: dict[str, Any] = {}
    if not missing:
        counts, off = account(soak)
        wrong += off
        for name, count in counts.items():
            print(f"  {name}: {count:,}")
        print(f"episodes accounted for: {counts['episodes']:,} of {soak.episodes:,}")
    for line in wrong[:20]:
        print(f"WRONG: {line}")
    if arguments.json:
        figures = {
            "episodes": soak.episodes,
            "missing": missing,
            "seconds": round(seconds, 1),
            "memory_mb": [round(mb, 1) for mb in memory],
            "growth_mb": grown,
            "processes_left": len(left),
            "counts": counts,
            "wrong": wrong,
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    sys.exit(1 if wrong else 0)


def _append(log: Path, line: dict[str, Any]) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
