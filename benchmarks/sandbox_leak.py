"""Does the local sandbox leave anything behind? Many runs of every kind, counted before and after.

    python benchmarks/sandbox_leak.py [--runs 20000] [--threads 4]

Prints one line a measure (processes below this one, descriptors and memory of this process and of
the zygote, temporary files) and exits with status 1 where one of them grew.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from mintrl_env.verifiers.sandbox import Call, Limits, Ran
from mintrl_env.verifiers.sandbox_local import LocalSandbox

HONEST, SHORT = Limits(wall_s=60), Limits(wall_s=0.05)
MEMORY_MB = 8.0
"""How much this process and the zygote may grow: allocators keep some of what they once held."""

KINDS = (
    "program", "call", "assert", "exception", "exit", "crash", "silent exit", "load error",
    "forged answer", "thread left", "fork", "closed generator", "time-out",
)  # fmt: skip


def once(box: LocalSandbox, kind: str) -> Ran:
    """One run of a kind; how it ended."""
    if kind == "program":
        return box.run("print(int(input()) + 1)", "4", HONEST).ran
    if kind == "assert":
        [result] = box.asserts("def f(x): return x + 1", ["assert f(1) == 2"], HONEST)
        return result.ran
    if kind == "time-out":
        return box.run("while True: pass", "", SHORT).ran
    if kind == "closed generator":
        results = box.calls("def f(): return 1", [Call("f")] * 3, HONEST)
        first = next(results)
        results.close()  # type: ignore[attr-defined]
        return first.ran
    program = {
        "call": "def f(): return 1",
        "exception": "def f(): raise ValueError",
        "exit": "import sys\ndef f(): sys.exit(0)",
        "crash": "import os\ndef f(): os.abort()",
        "silent exit": "import os\nos._exit(0)",
        "load error": "1 / 0",
        "forged answer": "import os\ndef f(): os.write(3, b'[' * 1000)",
        "thread left": (
            "import threading, time\n"
            "def f(): threading.Thread(target=time.sleep, args=(100,)).start()"
        ),
        "fork": "import os\ndef f():\n try: os.fork()\n except OSError: return 1",
    }[kind]
    [result] = box.calls(program, [Call("f")], HONEST)
    return result.ran


def measure(box: LocalSandbox) -> dict[str, float]:
    """What is there now."""
    gc.collect()
    me = psutil.Process()
    [zygote] = [psutil.Process(pid) for pid in box.pids()]
    folders = {Path(tempfile.gettempdir()), Path("/dev/shm")}
    return {
        "processes below this one": len(me.children(recursive=True)),
        "threads": threading.active_count(),
        "descriptors": me.num_fds(),
        "descriptors of the zygote": zygote.num_fds(),
        "temporary files": sum(len(os.listdir(f)) for f in folders if f.is_dir()),
        "memory, MiB": me.memory_info().rss / 2**20,
        "memory of the zygote, MiB": zygote.memory_info().rss / 2**20,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--unconfined", action="store_true", help="with resource limits only")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:  # nobody else's files are counted
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        return check(options.runs, options.threads, LocalSandbox(unconfined=options.unconfined))


def check(runs: int, threads: int, box: LocalSandbox) -> int:
    """Run, count, print; 0 where nothing was left behind."""
    # A time-out takes as long as twenty other runs.
    kinds = [*KINDS[:-1]] * 20 + [KINDS[-1]]
    with ThreadPoolExecutor(threads) as executor:

        def some(numbers: range) -> Counter[Ran]:
            return Counter(executor.map(lambda n: once(box, kinds[n % len(kinds)]), numbers))

        some(range(1000))
        time.sleep(2)
        before, started = measure(box), time.monotonic()
        ended: Counter[Ran] = Counter()
        for first in range(0, runs, 500):  # all at once would keep as many futures
            ended += some(range(first, min(first + 500, runs)))
        seconds = time.monotonic() - started
        time.sleep(2)
        after = measure(box)
    print(f"{runs} runs, {threads} threads, {seconds:.0f} s:", end=" ")
    print(", ".join(f"{count} {ran.value}" for ran, count in sorted(ended.items())))
    grown = []
    for name, was in before.items():
        now = after[name]
        allowed = MEMORY_MB if "MiB" in name else 0
        if now > was + allowed:
            grown.append(name)
        print(f"  {name:28} {was:8.1f} -> {now:8.1f}{'  GREW' if name in grown else ''}")
    box.close()
    left = psutil.Process().children(recursive=True)
    print(f"  {'processes after closing':28} {len(left):8d}")
    return 1 if grown or left else 0


if __name__ == "__main__":
    sys.exit(main())
