"""What runs inside bubblewrap: become the process that `sandbox_bwrap` was asked for.

    sandbox_bwrap_main.py paths OPTIONS     print, as JSON, what has to be mounted
    sandbox_bwrap_main.py run OPTIONS       confine this process and do what the first message says

Standard library only; its siblings are loaded from their files.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import threading
import types
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

TALK_FD = 3
MAIN_STACK_BYTES = 120 << 20
"""Room that the kernel leaves below the stack whatever its limit was at exec."""
THREAD_STACK_BYTES = 8 << 20


def _load_sibling(name: str) -> types.ModuleType:
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _prepare(options: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Import all that is needed; the modules for the code and for confinement, and its plan."""
    sys.path += options["paths"]
    for name in options["packages"]:
        importlib.import_module(name)
    _load_sibling("library_values")
    _load_sibling("plain_values")
    child, confine = _load_sibling("sandbox_child"), _load_sibling("sandbox_confine")
    child.prepare()
    plan = confine.prepare(
        tuple(options["packages"]),
        landlock=options["landlock"],
        mapped_bytes=options.get("mapped_bytes", 0),
    )
    return child, confine, plan


def show_paths(options: dict[str, Any]) -> None:
    """Print which files code may read, and what this Python itself is made of."""
    confine, plan = _prepare(options)[1:]
    found = {
        "python": os.path.realpath(sys.executable),
        "stdlib": os.path.dirname(os.path.realpath(os.__file__)),
        "hidden": sorted(confine.NOT_STANDARD),
        "readable": plan.readable,
        "mapped_bytes": plan.mapped_bytes,
    }
    print(json.dumps(found))


def run(options: dict[str, Any]) -> None:
    """Never returns."""
    fds = [int(fd) for fd in options["fds"]]
    null = os.open(os.devnull, os.O_RDWR)
    stdin, stdout = fds[1:] if len(fds) == 3 else (null, null)
    # First above the places where they are to come to, whatever numbers they were passed under.
    sources = [_above(fd) for fd in (stdin, stdout, null, fds[0])]
    for target, source in enumerate(sources):
        os.dup2(source, target)
    try:
        hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
        limit = MAIN_STACK_BYTES if hard < 0 else min(MAIN_STACK_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_STACK, (limit, hard))
        threads = min(options["threads"], *_positive(resource.getrlimit(resource.RLIMIT_NPROC)))
        resource.setrlimit(resource.RLIMIT_NPROC, (threads, threads))
        threading.stack_size(THREAD_STACK_BYTES)
        child, confine, plan = _prepare(options)
        confine.confine(
            plan,
            cpu_s=options["cpu_s"],
            mem_mb=options["mem_mb"],
            output_bytes=options["output_bytes"],
            keep_fds=(0, 1, 2, TALK_FD),
        )
    except BaseException as error:
        body = json.dumps({"unconfined": f"{type(error).__name__}: {error}"}).encode("ascii")
        os.write(TALK_FD, len(body).to_bytes(4, "big") + body)
        os._exit(1)
    child.main(TALK_FD)


def _positive(limits: tuple[int, int]) -> tuple[int, ...]:
    return tuple(limit for limit in limits if limit >= 0) or (1 << 30,)


def _above(fd: int) -> int:
    copy = os.dup(fd)
    while copy <= TALK_FD:  # the lower ones stay open until dup2 replaces them
        copy = os.dup(fd)
    return copy


if __name__ == "__main__":
    if sys.argv[1] == "paths":
        show_paths(json.loads(sys.argv[2]))
    else:
        run(json.loads(sys.argv[2]))
