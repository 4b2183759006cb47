"""What the benchmarks share: interleaved repeats, ratios with their spread, one JSON line each."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Line:
    """One line of the table.

    Attributes:
        bench: the script that measured it.
        name: what was measured.
        value: the figure, a ratio or a share; None where it could not be measured here.
        target: the most (`at_most`) or the least that it should be; None where nothing was asked.
        low, high: the quartiles over repeats, where there are repeats.
        beside: other figures of the same run, by name.
    """

    bench: str
    name: str
    value: float | None
    target: float | None = None
    at_most: bool = True
    low: float | None = None
    high: float | None = None
    beside: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None where there is none."""
        if self.target is None or self.value is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target


@dataclass(frozen=True)
class Times:
    """Wall and CPU seconds of one contestant, one entry a repeat."""

    wall: list[float]
    cpu: list[float]


def interleaved(
    runs: Mapping[str, Callable[[], object]], repeats: int, *, warm_up: bool = True
) -> dict[str, Times]:
    """Times of each run, in turns (a, b, a, b, ...), so that a busy spell hits all of them.

    CPU seconds are the whole process's, so what another thread of ours does is counted.
    """
    times = {name: Times([], []) for name in runs}
    if warm_up:
        for run in runs.values():
            run()
    for _ in range(repeats):
        for name, run in runs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            times[name].cpu.append(time.process_time() - cpu)
            times[name].wall.append(time.perf_counter() - wall)
    return times


def ratios(over: Sequence[float], under: Sequence[float]) -> tuple[float, float, float]:
    """Median and quartiles of the ratio repeat by repeat: neighbours in time are compared."""
    each = [a / b for a, b in zip(over, under, strict=True)]
    return spread(each)


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def ratio_line(
    bench: str,
    name: str,
    over: Sequence[float],
    under: Sequence[float],
    *,
    target: float | None = None,
    at_most: bool = True,
    **beside: Any,
) -> Line:
    """The line of the median ratio of two contestants' times."""
    value, low, high = ratios(over, under)
    return Line(bench, name, value, target, at_most, low, high, dict(beside))


def machine() -> dict[str, Any]:
    """Cores that this process may use, the CPU's model, and the versions that matter."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [row for row in info.read_text().splitlines() if row.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    affinity = getattr(os, "sched_getaffinity", None)
    from importlib.metadata import version

    packages = ("torch", "transformers", "numpy", "gymnasium", "trl")
    return {
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "cpu": model,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }


def peak_mb() -> float:
    """The most that this process has held, MB.

    Not getrusage's ru_maxrss, which a program inherits from the process that started it.
    """
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that every benchmark has."""
    made = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    made.add_argument("--json", type=Path, help="also write the lines to this file")
    made.add_argument("--quick", action="store_true", help="small and unfit for figures: a trial")
    return made


def report(lines: Sequence[Line], path: Path | None) -> None:
    """Print the lines; write them to a file where one is named."""
    for line in lines:
        about = "" if line.met is None else ("  met" if line.met else "  NOT MET")
        sign = "<=" if line.at_most else ">="
        target = "" if line.target is None else f"  (target {sign} {line.target:g}){about}"
        value = "not measured" if line.value is None else f"{line.value:.3f}"
        span = "" if line.low is None else f"  [{line.low:.3g}, {line.high:.3g}]"
        print(f"{line.name:<66} {value:>8}{span}{target}", flush=True)
        if line.beside:
            print("    " + ", ".join(f"{k}: {shown(v)}" for k, v in line.beside.items()))
    if path is not None:
        path.write_text(json.dumps([asdict(line) for line in lines], indent=1) + "\n")


def shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
