"""Runs the parts of the GPU check, each in a process of its own: `scripts/gpu_check.sh`.

A part that fails, runs out of memory or of time is written down with what it had found, and the next
one starts. The whole keeps to `--budget` seconds. What the parts do is in gpu_check_parts.py; this
file needs the standard library alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PARTS = {"logprobs": 90, "update": 90, "trl": 80, "smollm2": 110, "vllm": 110}
"""Most seconds of each part, in the order in which they run: their sum is the budget."""


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="a model of some 40k parameters")
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--smollm2", type=Path, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--parts", default=",".join(PARTS), help="which, by commas")
    parser.add_argument("--budget", type=float, default=sum(PARTS.values()), help="seconds in all")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(given)
    unknown = set(args.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"--parts are {', '.join(PARTS)}, not {', '.join(sorted(unknown))}")
    return args


def run_part(name: str, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """The part's record: `status` (ok, failed, timed out, skipped), `rows`, and why."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        command = [sys.executable, __file__, "--part", name, "--result", str(result)]
        command += ["--device", args.device, *(["--tiny"] if args.tiny else [])]
        if args.smollm2 is not None:
            command += ["--smollm2", str(args.smollm2.resolve())]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,  # so that its own children end with it
            )
        try:
            code: int | None = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        record: dict[str, Any] = {"status": "ok", "rows": []}
        if result.exists():
            record |= json.loads(result.read_text())
        if code is None:
            record |= {"status": "timed out", "why": f"stopped after {seconds:.0f} s"}
        elif code != 0:
            lines = log.read_text(errors="replace").strip().splitlines()
            record |= {"status": "failed", "why": lines[-1] if lines else f"exit status {code}"}
            record["log"] = lines[-20:]
    record["seconds"] = round(time.monotonic() - started, 1)
    return record


def not_here(name: str, args: argparse.Namespace) -> str:
    """Why the part cannot run on this machine; "" where it can."""
    if name == "vllm" and args.device != "cuda":
        return "needs a GPU"
    package = {"vllm": "vllm", "trl": "trl"}.get(name)
    if package and importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
    if name == "smollm2" and (args.smollm2 is None or not (args.smollm2 / "config.json").exists()):
        return "no folder of SmolLM2 was given (--smollm2)"
    return ""


def table(found: dict[str, Any]) -> str:
    """The record as Markdown."""
    lines = ["| part | what | figures |", "|---|---|---|"]
    for name, record in found["parts"].items():
        for row in record["rows"]:
            told = row.get("failed") or ", ".join(
                f"{key} {value:,.4g}" if isinstance(value, float) else f"{key} {value:,}"
                for key, value in row["figures"].items()
            )
            lines.append(f"| {name} | {row['what']} | {told} |")
        if record["status"] != "ok":
            lines.append(f"| {name} | {record['status']} | {record.get('why', '')} |")
    return "\n".join(lines)


def main() -> int:
    args = arguments()
    if args.part:
        import torch

        if args.device == "cuda" and not torch.cuda.is_available():
            raise SystemExit("no CUDA device is to be seen by this torch")
        import gpu_check_parts

        gpu_check_parts.run(args.part, args)
        return 0
    started = time.monotonic()
    found: dict[str, Any] = {"device": args.device, "tiny": args.tiny, "machine": {}, "parts": {}}
    for name in args.parts.split(","):
        left = args.budget - (time.monotonic() - started)
        why = "no time left" if left < 5 else not_here(name, args)
        if why:
            record: dict[str, Any] = {"status": "skipped", "rows": [], "why": why, "seconds": 0.0}
        else:
            print(f"gpu_check: {name} ...", flush=True)
            record = run_part(name, args, min(PARTS[name], left))
        found["machine"] |= record.pop("machine", {})
        found["parts"][name] = record
        found["seconds"] = round(time.monotonic() - started, 1)
        args.out.write_text(json.dumps(found, indent=1) + "\n")  # so that a killed run leaves some
        print(f"gpu_check: {name}: {record['status']}, {record['seconds']} s", flush=True)
    print(json.dumps(found["machine"]))
    print(table(found))
    failed = [n for n, r in found["parts"].items() if r["status"] in ("failed", "timed out")]
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
