"""The script that a remote service runs: the local sandbox, unpacked there, with one job.

`sandbox_remote` sends this file's text with a call of `main` below it. The code of the response is
confined at the service by the same means as here, in processes of its own; the tests' snippets run
in others, and what they expect is never in a process that runs the code.

Standard library only, nothing of this package before it is unpacked, and no syntax or library newer
than Python 3.10.
"""

from __future__ import annotations

import base64
import enum
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
import zlib
from typing import Any

NO_SCRIPT_FOLDER = '"-P", '
"""How a command of the local sandbox says that the script's folder is not to be imported from."""


def main(bundle: str, job: str, report: str) -> None:
    """Do the job and write its report into the working directory.

    Args:
        bundle, job: packed JSON: sources by file name; what to run, see `work`.
        report: the file's name. It holds {"results": [...]}, {"refused": why} where the sandbox
            cannot work here, or {"broken": traceback}.
    """
    place = os.path.join(os.getcwd(), report)
    folder = tempfile.mkdtemp(prefix="mintrl-")
    try:
        unpack(read(bundle), folder)
        # Code that is confined can make no file, so the mark says what it says.
        version = hashlib.sha256(bundle.encode("ascii")).hexdigest()[:32]
        mark = os.path.join(tempfile.gettempdir(), f"mintrl-{os.geteuid()}-{version}")
        answer = work(read(job), mark)
    except BaseException:
        answer = {"broken": traceback.format_exc()[-2000:]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    with open(place + ".part", "w", encoding="ascii") as file:
        json.dump(answer, file)
    os.rename(place + ".part", place)


def read(packed: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(packed)))


def unpack(sources: dict[str, str], folder: str) -> None:
    for name, text in sources.items():
        path = os.path.join(folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if sys.version_info < (3, 11):  # noqa: UP036
            text = text.replace(NO_SCRIPT_FOLDER, "")  # an option that is not known there
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    os.chmod(folder, 0o755)
    sys.dont_write_bytecode = True
    sys.path.insert(0, folder)
    if not hasattr(enum, "StrEnum"):  # new in Python 3.11

        class StrEnum(str, enum.Enum):  # noqa: UP042
            __str__ = str.__str__

        enum.StrEnum = StrEnum  # type: ignore[misc, assignment]


def choose(packages: Any, mark: str) -> Any:
    """A sandbox of this machine that was seen to hold: now, or before the mark was made.

    Raises:
        SandboxUnavailable: there is none.
    """
    from mintrl_env.verifiers.sandbox_choice import choose_sandbox
    from mintrl_env.verifiers.sandbox_local import LocalSandbox

    if os.path.exists(mark) and os.stat(mark).st_uid == os.geteuid():
        return LocalSandbox(packages=packages)
    sandbox = choose_sandbox("auto", {"packages": packages})
    if isinstance(sandbox, LocalSandbox):
        os.close(os.open(mark, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600))
    return sandbox


def work(job: dict[str, Any], mark: str) -> dict[str, Any]:
    """Run a program, calls or snippets; results as far as the job's `budget_s` reaches."""
    from mintrl_env.verifiers import plain_values
    from mintrl_env.verifiers.sandbox import Call, Limits, SandboxUnavailable

    limits, code = Limits(**job["limits"]), job["code"]
    try:
        sandbox = choose(job["packages"], mark)
        try:
            if job["kind"] == "run":
                results = iter([sandbox.run(code, job["stdin"], limits)])
            elif job["kind"] == "calls":
                calls = [
                    Call(name, plain_values.loads(args), plain_values.loads(kwargs))
                    for name, args, kwargs in job["calls"]
                ]
                results = sandbox.calls(code, calls, limits)
            else:
                results = sandbox.asserts(code, job["snippets"], limits)
            packed = []
            ends = time.monotonic() + job["budget_s"]
            for result in results:
                value = result.value
                if job["kind"] == "calls" and result.ran == "ok":
                    value = plain_values.dumps(value)
                packed.append(
                    [str(result.ran), value, result.detail, result.seconds, result.memory_mb]
                )
                if time.monotonic() > ends:
                    break
            return {"results": packed}
        finally:
            sandbox.close()
    except SandboxUnavailable as error:
        return {"refused": str(error)}
