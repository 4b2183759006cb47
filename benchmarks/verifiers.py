"""The verifiers, measured.

    python benchmarks/verifiers.py golds  DATA_FOLDER            every gold against itself and others
    python benchmarks/verifiers.py speed  CASES.jsonl DATA_FOLDER  beside math-verify and TRL
    python benchmarks/verifiers.py memory [--kind math|code]       100,000 checks, 20,000 programs
    python benchmarks/verifiers.py code                            beside bare Python and bubblewrap

DATA_FOLDER holds files of one JSON object a line with `id` and `answer`; CASES.jsonl rows `gold`,
`response`, `expected` (and `lenient`, `hostile`). One thread; workers are separate processes, one at
a time. Times are wall milliseconds of one check (of others without the pipe to their process, which is
killed after 5 s); what is printed of several repeats is the median.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import verifier_code as code
import verifier_golds as golds
import verifier_peers as peers
from rich.console import Console
from rich.table import Table

from mintrl_env.errors import VerifierError
from mintrl_env.types import Task
from mintrl_env.verifiers import worker
from mintrl_env.verifiers.math_answer import MathVerifier

CONSOLE = Console(width=int(os.environ.get("COLUMNS", "110")))
Grader = Callable[[str, str], tuple[bool, float]]
"""(gold, response) -> (paid?, seconds)."""
PEER_LIMIT_S = 5.0


@dataclass(frozen=True)
class Case:
    gold: str
    response: str
    expected: bool


def table(title: str, *columns: str) -> Table:
    made = Table(title=title, title_justify="left", show_edge=False)
    for at, column in enumerate(columns):
        made.add_column(column, justify="right" if at else "left")
    return made


def run_golds(folder: Path) -> int:
    """Every gold of every file; 1 if one is refused or a neighbour accepted."""
    paths = sorted(folder.glob("*.jsonl"))
    answers = {answer for path in paths for _, answer in golds.rows(path)}
    verifier = MathVerifier(workers=1)
    shown = table("gold answers", "file", *golds.COLUMNS, "wrong")
    found = {path.stem: golds.check(path, verifier, answers) for path in paths}
    for name, one in found.items():
        counts = [str(one.counts[column]) for column in golds.COLUMNS]
        shown.add_row(name, *counts, str(len(one.wrong)))
    totals = [sum(one.counts[column] for one in found.values()) for column in golds.COLUMNS]
    shown.add_row("all", *map(str, totals), str(sum(len(one.wrong) for one in found.values())))
    CONSOLE.print(shown)
    for one in found.values():
        for row, gold in one.unreadable:
            print("cannot be read:", row, ascii(gold))
        for row, form, gold, status in one.refused[:20]:
            print("refused:", row, form, ascii(gold), status)
        for row, kind, gold, answer in one.wrong[:20]:
            print("accepted:", row, kind, ascii(gold), ascii(answer))
    return int(any(one.refused or one.wrong for one in found.values()))


def ours() -> Grader:
    verifier = MathVerifier(workers=1)

    def grade(gold: str, response: str) -> tuple[bool, float]:
        started = time.perf_counter()
        score = verifier.score_sync(Task("", "", gold), response)
        return score.reward == 1.0, time.perf_counter() - started

    grade(r"\sqrt{50}", r"\boxed{5\sqrt2}")  # the worker stands before the clock runs
    return grade


def peer(name: str) -> Grader:
    pool = worker.WorkerPool("verifier_peers:handle", memory_bytes=1 << 32)

    def grade(gold: str, response: str) -> tuple[bool, float]:
        request = {"grader": name, "gold": gold, "response": response}
        try:
            answer = pool.call(request, PEER_LIMIT_S)
        except worker.WorkerTimeout:  # killed; the next one is warm before it is timed
            with contextlib.suppress(VerifierError):
                pool.call({"grader": name, "gold": "1", "response": "\\boxed{2}"}, 60.0)
            return False, PEER_LIMIT_S
        except worker.WorkerFailed:
            return False, PEER_LIMIT_S
        return answer["paid"], answer["seconds"]

    with contextlib.suppress(VerifierError):
        pool.call({"grader": name, "gold": "1", "response": "\\boxed{2}"}, 60.0)
    return grade


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def corpus(path: Path) -> list[Case]:
    rows = map(json.loads, path.read_text(encoding="utf-8").rstrip("\n").split("\n"))
    return [Case(r["gold"], r["response"], r["expected"]) for r in rows if not r.get("lenient")]


def real(folder: Path, count: int) -> list[Case]:
    """Distinct golds of all files, each with a right answer set otherwise and with a wrong one."""
    every = {answer for path in folder.glob("*.jsonl") for _, answer in golds.rows(path)}
    answers = sorted(answer for answer in every if golds.gold_readings(answer))
    drawn = random.Random(0).sample(answers, min(count, len(answers)))
    cases = []
    for gold, other in zip(drawn, drawn[1:] + drawn[:1], strict=True):
        set_otherwise = gold.replace("\\frac", "\\dfrac")
        cases.append(Case(gold, golds.box(f" {set_otherwise}"), True))
        near = dict(golds.neighbours(gold)).get("plus one", other)
        cases.append(Case(gold, golds.box(near), False))
    return cases


def run_speed(cases: Path, folder: Path, repeats: int, count: int) -> int:
    graders = {
        "mintrl": ours(),
        **{name: peer(name) for name in peers.GRADERS},
    }
    for title, chosen in (("cases", corpus(cases)), ("golds", real(folder, count))):
        measure(f"{title}: {len(chosen)} checks, {repeats} repeats", chosen, graders, repeats)
    integers(graders, repeats)
    return 0


def measure(title: str, cases: Sequence[Case], graders: dict[str, Grader], repeats: int) -> None:
    times: dict[str, list[list[float]]] = {name: [] for name in graders}
    paid: dict[str, list[bool]] = {}
    for _ in range(repeats):
        for name, grade in graders.items():
            taken, verdicts = [], []
            for case in cases:
                verdict, seconds = grade(case.gold, case.response)
                verdicts.append(verdict)
                taken.append(seconds * 1e3)
            times[name].append(taken)
            paid[name] = verdicts
    columns = (
        "right %",
        "false +",
        "false -",
        "p50 ms",
        "p95 ms",
        "max ms",
        "p50 ratio",
        "p95 ratio",
    )
    shown = table(title, "grader", *columns)
    own: tuple[float, float] | None = None
    for name in graders:
        p50, p95, most = (
            statistics.median(percentile(taken, share) for taken in times[name])
            for share in (0.5, 0.95, 1.0)
        )
        own = own or (p50, p95)
        pairs = list(zip(cases, paid[name], strict=True))
        shown.add_row(
            name,
            f"{100 * sum(p == c.expected for c, p in pairs) / len(pairs):.1f}",
            str(sum(p and not c.expected for c, p in pairs)),
            str(sum(c.expected and not p for c, p in pairs)),
            *(f"{value:.3f}" for value in (p50, p95, most)),
            *(f"1/{theirs / mine:.1f}" for theirs, mine in zip((p50, p95), own, strict=True)),
        )
    CONSOLE.print(shown)


def integers(graders: dict[str, Grader], repeats: int, count: int = 4096) -> None:
    """Integer answers, half of them right: the whole of GSM8K and AIME is such."""
    draw = random.Random(1)
    cases = []
    for _ in range(count):
        gold = draw.randrange(10**6)
        cases.append((str(gold), golds.box(str(gold + draw.randrange(2)))))
    shown = table(f"{count} integer answers, one core", "grader", "seconds", "checks/s", "ratio")
    taken: dict[str, list[float]] = {name: [] for name in graders}
    for _ in range(repeats):
        for name, grade in graders.items():
            taken[name].append(sum(grade(gold, response)[1] for gold, response in cases))
    own = statistics.median(next(iter(taken.values())))
    for name, seconds in taken.items():
        middle = statistics.median(seconds)
        shown.add_row(name, f"{middle:.2f}", f"{count / middle:.0f}", f"{middle / own:.1f}")
    CONSOLE.print(shown)


def resident_mb(pid: int) -> float:
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmRSS"))


def run_memory(checks: int) -> int:
    """All distinct, one in ten for a worker: RSS of this process and of its workers."""
    grade = ours()
    shown = table(
        f"resident memory, MiB, over {checks} checks", "checks", "this process", "workers"
    )
    draw = random.Random(2)
    for done in range(checks + 1):
        if done in (0, checks // 10, checks // 2, checks):
            pids = [pid for pool in worker._live for pid in pool.pids()]
            rss = ", ".join(f"{resident_mb(pid):.1f}" for pid in pids)
            shown.add_row(str(done), f"{resident_mb(os.getpid()):.1f}", rss)
        n, right = draw.randrange(10**9), draw.randrange(2)
        if done % 10:
            gold, answer = rf"\frac{{{n}}}{{{n + 1}}}", rf"\frac{{{2 * n}}}{{{2 * n + 2 * right}}}"
        else:
            k = 2 + n % 10_000
            gold, answer = rf"{k}\sqrt{{2}}+{n}", rf"\sqrt{{{2 * k * k}}}+{n + (1 - right) * 3}"
        assert grade(gold, golds.box(answer))[0] == bool(right), (gold, answer)
    CONSOLE.print(shown)
    return 0


def run_code(repeats: int, count: int) -> int:
    taken = code.times(repeats)
    shown = table(f"one run, {repeats} repeats in turn", "what", "p50 ms", "p95 ms", "p50 ratio")
    own = statistics.median(next(iter(taken.values())))
    for name, values in taken.items():
        middle = statistics.median(values)
        ratio = f"1/{middle / own:.1f}"
        shown.add_row(name, f"{middle:.2f}", f"{percentile(values, 0.95):.2f}", ratio)
    CONSOLE.print(shown)
    cores = len(os.sched_getaffinity(0))
    shown = table(
        f"passing call tests, {cores} cores", "requests open", "tests/s", "p50 ms", "scale"
    )
    base = 0.0
    for at_once in (1, 2, 4, 8, 16, 32, 64):
        rate, middle = code.throughput(at_once, count)
        base = base or rate
        shown.add_row(str(at_once), f"{rate:.0f}", f"{middle:.1f}", f"{rate / base:.2f}")
    CONSOLE.print(shown)
    return 0


def run_code_memory(checks: int) -> int:
    """What stays after very many programs."""
    verifier = code.CodeVerifier()
    code.runs(verifier, 0, 100)
    states = {100: code.left_behind()}
    shown = table(f"left behind over {checks} programs", "programs", *states[100])
    for done in (checks // 2, checks):
        code.runs(verifier, max(states), done - max(states))
        states[done] = code.left_behind()
    for done, state in states.items():
        shown.add_row(str(done), *map(str, state.values()))
    CONSOLE.print(shown)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("golds")
    command.add_argument("folder", type=Path)
    command = commands.add_parser("speed")
    command.add_argument("cases", type=Path)
    command.add_argument("folder", type=Path)
    command.add_argument("--repeats", type=int, default=3)
    command.add_argument("--count", type=int, default=300, help="golds drawn from the folder")
    command = commands.add_parser("memory")
    command.add_argument("--checks", type=int, help="default 100,000 (math), 20,000 (code)")
    command.add_argument("--kind", choices=("math", "code"), default="math")
    command = commands.add_parser("code")
    command.add_argument("--repeats", type=int, default=100)
    command.add_argument("--count", type=int, default=300, help="tests of a measure of throughput")
    given = parser.parse_args()
    if given.command == "golds":
        return run_golds(given.folder)
    if given.command == "speed":
        return run_speed(given.cases, given.folder, given.repeats, given.count)
    if given.command == "code":
        return run_code(given.repeats, given.count)
    if given.kind == "code":
        return run_code_memory(given.checks or 20_000)
    return run_memory(given.checks or 100_000)


if __name__ == "__main__":
    sys.exit(main())
