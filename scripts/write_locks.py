"""Write locks/: which versions go together, one file a stack.

    .venv/bin/python scripts/write_locks.py cpu             # constraints.txt, else what is installed
    .venv/bin/python scripts/write_locks.py trl-vllm-0.31   # what pip resolves; installs nothing
    .venv/bin/python scripts/write_locks.py verl-vllm-0.24

A lock is a constraints file: `pip install -c locks/cpu.txt -e ".[trl,openai,e2b]"`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("trl", "math", "openai", "e2b")
STACKS: dict[str, tuple[str, ...]] = {
    # vLLM's own range holds torch and transformers; TRL 1.16 runs with the newest it allows.
    "trl-vllm-0.31": (
        "vllm==0.31.0", "trl==1.16.0", "torch==2.13.0", "transformers==5.17.0", "datasets==5.2.0",
        "accelerate==1.15.0", "huggingface_hub==1.33.0", "tokenizers==0.23.3",
    ),
    # veRL 0.9.1 takes transformers below 5.11, and vLLM 0.24 torch 2.11.
    "verl-vllm-0.24": (
        "vllm==0.24.0", "verl[verl-core]==0.9.1", "torch==2.11.0", "transformers==5.9.0",
        "trl==1.16.0",
    ),
}  # fmt: skip
NOTES = {
    "cpu": (
        "What the project's tests ran with, on Python 3.11 on Linux, without a GPU.",
        'pip install -c locks/cpu.txt -e ".[trl,openai,e2b]"',
    ),
    "trl-vllm-0.31": (
        "TRL and vLLM in one environment. Resolved by pip on Python 3.11 on Linux, installed and run\n"
        "# by nobody yet: no GPU was at hand. It was resolved beside a build of torch for the CPU, so the\n"
        "# CUDA libraries that torch itself asks for are not in it: pip adds them.",
        'pip install -c locks/trl-vllm-0.31.txt -e ".[trl,openai,e2b,vllm]"',
    ),
    "verl-vllm-0.24": (
        "veRL and vLLM in one environment; its own, since the extras vllm and verl do not go together.\n"
        "# Resolved by pip on Python 3.11 on Linux, installed and run by nobody yet: no GPU was at hand.",
        'pip install -c locks/verl-vllm-0.24.txt -e ".[trl,openai,e2b,verl]" vllm==0.24.0',
    ),
}


def requirements(extras: Iterable[str]) -> list[Requirement]:
    """The project's own requirements with those of some extras."""
    optional = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in optional[extra])]
    return [Requirement(line) for line in lines]


def installed(roots: Sequence[Requirement]) -> dict[str, str]:
    """Versions in this environment of the requirements and of all that they need."""
    found: dict[str, str] = {}
    todo = [(root.name, frozenset(root.extras)) for root in roots]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        name, extras = todo.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        package = metadata.distribution(name)
        found[canonicalize_name(package.metadata["Name"])] = package.version
        for line in package.requires or ():
            needed = Requirement(line)
            marker = needed.marker
            if marker is None or any(marker.evaluate({"extra": e}) for e in (*extras, "")):
                todo.append((needed.name, frozenset(needed.extras)))
    return found


def constrained(found: dict[str, str]) -> dict[str, str]:
    """With the versions of constraints.txt, which a fresh `make install` takes."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line.split("#")[0].strip().split("==") for line in lines if line.split("#")[0].strip()]
    given = {canonicalize_name(name): version for name, version in pins}
    return {name: given.get(name, version) for name, version in found.items()}


def resolved(pins: Sequence[str]) -> dict[str, str]:
    """Versions that pip would install for the pins and the project's requirements."""
    own = [
        str(r) for r in requirements(EXTRAS) if r.name not in {Requirement(p).name for p in pins}
    ]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "-qq",
             "--report", str(report), *pins, *own],
            check=True,
        )  # fmt: skip
        items = json.loads(report.read_text())["install"]
    return {canonicalize_name(i["metadata"]["name"]): i["metadata"]["version"] for i in items}


def write(stack: str) -> Path:
    found = (
        constrained(installed(requirements(EXTRAS))) if stack == "cpu" else resolved(STACKS[stack])
    )
    # A build's own mark (+cpu, +cu130) is the machine's business.
    lines = [f"{name}=={version.partition('+')[0]}" for name, version in sorted(found.items())]
    what, how = NOTES[stack]
    head = f"# {what}\n#     {how}\n# Made by: python scripts/write_locks.py {stack}\n"
    path = ROOT / "locks" / f"{stack}.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_text(head + "\n".join(lines) + "\n")
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write a file of locks/.")
    parser.add_argument("stack", choices=sorted(NOTES))
    print(write(parser.parse_args().stack))
