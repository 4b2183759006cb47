"""All benchmarks in one run: one JSON file and the table of docs/performance.md.

    make bench                       # under 20 minutes on two quiet cores
    make bench ARGS="--only env_step slot_engine"
    make bench ARGS=--quick          # do they run? writes nothing

Each benchmark is a script of its own, in a process of its own; every line is a ratio of contestants
that took turns within it. `--only` renews the named ones in the JSON file and leaves the rest, which
the document then says; without a name it writes the document alone. Exit status 1: a benchmark failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measure import Line, machine
from performance_page import page

HERE = Path(__file__).parent
BENCHES = (
    "slot_engine",
    "runner_latency",
    "episodes_scaling",
    "env_step",
    "logprobs_memory",
    "update_profile",
    "divergence",
    "plan_check",
    "window_memory",
)
GPU = HERE / "gpu.json"
"""What `scripts/gpu_check.sh` found, where somebody has run it."""
LONGEST_S = 900.0


def run(name: str, quick: bool) -> tuple[list[dict[str, Any]] | None, float]:
    """The lines of one benchmark (None: it failed) and its wall seconds."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "lines.json"
        command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(out)]
        start = time.monotonic()
        try:
            subprocess.run(
                command + ["--quick"] * quick, env=environment, timeout=LONGEST_S, check=True
            )
        except (subprocess.SubprocessError, OSError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return None, time.monotonic() - start
        lines: list[dict[str, Any]] = json.loads(out.read_text())
        return lines, time.monotonic() - start


def merged(
    old: Mapping[str, Any], found: Mapping[str, Sequence[dict[str, Any]]], about: Mapping[str, Any]
) -> dict[str, Any]:
    """The JSON file's new content: benchmarks that ran now, and what it held of the others."""
    lines = [line for name in found for line in found[name]]
    kept = [line for line in old.get("lines", []) if line["bench"] not in found]
    order = {name: i for i, name in enumerate(BENCHES)}
    everything = sorted([*kept, *lines], key=lambda line: order[line["bench"]])
    return {**about, "of_other_runs": sorted({line["bench"] for line in kept}), "lines": everything}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    arguments.add_argument("--quick", action="store_true", help="a trial: small, writes nothing")
    arguments.add_argument("--only", nargs="*", choices=BENCHES, default=BENCHES)
    arguments.add_argument("--json", type=Path, default=HERE / "performance.json")
    arguments.add_argument("--page", type=Path, default=HERE.parent / "docs" / "performance.md")
    args = arguments.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    seconds: dict[str, float] = {}
    failed = []
    for name in args.only:
        print(f"\n== {name}", flush=True)
        lines, seconds[name] = run(name, args.quick)
        if lines is None:
            failed.append(name)
        else:
            found[name] = lines
    total = sum(seconds.values())
    print(f"\n{total / 60:.1f} minutes: " + ", ".join(f"{n} {s:.0f} s" for n, s in seconds.items()))
    unmet = [Line(**line) for lines in found.values() for line in lines]
    unmet = [line for line in unmet if line.met is False]
    for line in unmet:
        print(f"not met: {line.name}: {line.value:.3f}")
    if not args.quick:
        old = json.loads(args.json.read_text()) if args.json.exists() else {}
        about = {"machine": machine(), "minutes": round(total / 60, 1)}
        content = merged(old, found, about) if args.only else old
        args.json.write_text(json.dumps(content, indent=1) + "\n")
        args.page.write_text(page(content, json.loads(GPU.read_text()) if GPU.exists() else None))
        print(f"written: {args.json}, {args.page}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
