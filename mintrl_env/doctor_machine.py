"""What this machine offers: Python, room to write."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from mintrl_env.doctor_check import Check, Status

_NEWEST_PYTHON = (3, 12)
_ROOM_FAIL, _ROOM_WARN = 200 * 2**20, 5 * 2**30


def python_checks(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> list[Check]:
    """Python's version and where it lives."""
    text = ".".join(map(str, version))
    where = f"{text} at {sys.prefix}"
    if version < (3, 11):
        fix = "use Python 3.11 or 3.12"
        return [Check("Python", "version", Status.FAIL, f"{where}: older than 3.11", fix)]
    if version[:2] > _NEWEST_PYTHON:
        detail = f"{where}: newer than 3.12, where nothing was tried"
        return [Check("Python", "version", Status.WARN, detail, "use Python 3.11 or 3.12")]
    checks = [Check("Python", "version", Status.OK, where)]
    if sys.prefix == sys.base_prefix and not os.environ.get("CONDA_PREFIX"):
        fix = "python -m venv .venv && . .venv/bin/activate"
        detail = "none: packages are installed for the whole system"
        checks.append(Check("Python", "virtual environment", Status.WARN, detail, fix))
    return checks


def folder_checks(folder: Path) -> list[Check]:
    """Can runs be written here, and is there room?"""
    where = folder.resolve()
    checks = []
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".mintrl-doctor-") as file:
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
        checks.append(Check("this machine", "write access", Status.OK, str(where)))
    except OSError as error:
        fix = "go to a folder of yours, or give --run"
        detail = f"{where}: {error.strerror}"
        checks.append(Check("this machine", "write access", Status.FAIL, detail, fix))
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        detail = f"not known: {error.strerror}"
        return [*checks, Check("this machine", "disk space", Status.WARN, detail)]
    status = Status.FAIL if free < _ROOM_FAIL else Status.WARN if free < _ROOM_WARN else Status.OK
    fix = (
        "" if status is Status.OK else "free some: models, checkpoints and rollouts take gigabytes"
    )
    detail = f"{free / 2**30:.1f} GiB free"
    checks.append(Check("this machine", "disk space", status, detail, fix))
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        cores = os.cpu_count() or 1
    checks.append(Check("this machine", "processors", Status.OK, f"{cores} usable"))
    return checks
