"""Code runs in E2B sandboxes (e2b.dev), through the package `e2b-code-interpreter`.

A sandbox is a small virtual machine that costs money while it lives, so it is used for many runs,
one at a time, and killed when it is old, has failed, or is no longer needed. Runs do not see each
other, since the code of each is confined inside the machine as it would be here (Landlock and
seccomp); a machine whose kernel cannot do that is refused.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import os
import time
import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mintrl_env.errors import ConfigError
from mintrl_env.verifiers.remote_service import Job, Passing, Patience, patience_of, require
from mintrl_env.verifiers.sandbox import SandboxUnavailable
from mintrl_env.verifiers.sandbox_remote import RemoteSandbox

KEY = "E2B_API_KEY"

_SLACK_S = 10.0  # for the kernel and the interpreter to start on a busy machine
_KILL_S = 10.0
_LATE_S = 30.0  # how much later than hoped for a machine may come and still be ended
_COMING_S = 3.0  # what closing waits for machines that are on their way
_MAX_REPORT = 1 << 27


class E2BSandbox(RemoteSandbox):
    """A sandbox whose code runs in virtual machines of E2B.

    Args:
        api_key: None reads E2B_API_KEY.
        template: the template's name or id; None: the package's default (`code-interpreter-v1`).
        domain: of an installation of one's own; None reads E2B_DOMAIN, else e2b.app.
        internet: whether the machines may reach the network (the code in them never may).
        lifetime_s: the age at which the service ends a machine, and at which it is replaced here;
            what is lost (this process was killed) lives and costs no longer than this.
        runs: how many runs one machine serves before it is replaced.
        concurrency: the most machines that live at once (an account's limit counts them all).
        packages: importable names (numpy), installed in the template, that code may use besides
            the standard library.
        patience: how long failures are borne; a mapping gives the fields of `Patience`.

    Raises:
        ConfigError: no key.
        MissingExtraError: the package is not installed.
    """

    name = "e2b"

    def __init__(
        self,
        api_key: str | None = None,
        *,
        template: str | None = None,
        domain: str | None = None,
        internet: bool = False,
        lifetime_s: float = 900.0,
        runs: int = 200,
        concurrency: int = 8,
        packages: Sequence[str] = (),
        patience: Patience | Mapping[str, float] | None = None,
    ) -> None:
        require("e2b_code_interpreter", "e2b", "E2BSandbox")
        require("tenacity", "e2b", "E2BSandbox")
        key = api_key or os.environ.get(KEY)
        if not key:
            raise ConfigError(f"no key for E2B: pass api_key or set {KEY} (e2b.dev/dashboard)")
        for name, number in (("lifetime_s", lifetime_s), ("runs", runs)):
            if not number > 0:
                raise ConfigError(f"{name} must be positive, not {number!r}")
        borne = patience_of(patience)
        machines = _Machines(key, template, domain, internet, lifetime_s, runs)
        super().__init__(
            lambda: _E2B(machines, borne),
            concurrency=concurrency,
            packages=packages,
            patience=borne,
        )


@dataclass(frozen=True, slots=True)
class _Machines:
    """How they are made and for how long they are used; see E2BSandbox."""

    key: str
    template: str | None
    domain: str | None
    internet: bool
    lifetime_s: float
    runs: int


@dataclass(slots=True, eq=False)
class _Box:
    """One living sandbox."""

    sandbox: Any
    born: float
    runs: int = 0


class _E2B:
    """The pool; lives on one event loop, and one job uses a sandbox at a time."""

    name = "E2B"

    def __init__(self, options: _Machines, patience: Patience) -> None:
        self._options, self._patience = options, patience
        self._idle: list[_Box] = []
        self._alive: set[_Box] = set()
        self._making: set[asyncio.Task[Any]] = set()
        self._kills: set[asyncio.Task[None]] = set()
        self._throttled = False
        self._owner = os.getpid()
        global _first_pid
        if _first_pid is None:
            _first_pid = self._owner

    async def execute(self, job: Job) -> bytes:
        if _first_pid != os.getpid():
            raise SandboxUnavailable(
                "E2B was used before this process was forked, and its client does not survive a "
                "fork: start workers by spawn, or make the sandbox in the worker first"
            )
        box = await self._take(job)
        try:
            report = await self._run(box, job)
        except BaseException:
            self._drop(box)
            raise
        if box.runs >= self._options.runs:
            self._drop(box)
        else:
            self._idle.append(box)
        return report

    async def _run(self, box: _Box, job: Job) -> bytes:
        box.runs += 1
        try:
            # Limits inside the script come first; this one is for a machine that has stopped.
            async with asyncio.timeout(job.seconds + _SLACK_S):
                execution = await box.sandbox.run_code(
                    _cell(job),
                    timeout=job.seconds + _SLACK_S,
                    request_timeout=self._patience.answer_s,
                )
        except TimeoutError as error:
            raise Passing(f"a sandbox gave no answer in {job.seconds + _SLACK_S:g} s") from error
        except Exception as error:
            raise _judged(error) from error
        if execution.error is not None:
            # The program's own exceptions stay in the report: this one is the kernel's.
            raise Passing(
                f"the kernel failed: {execution.error.name}: {_short(execution.error.value)}"
            )
        return _report("".join(execution.logs.stdout), job.report)

    async def _take(self, job: Job) -> _Box:
        """An idle sandbox that lives long enough, or a new one."""
        needs = job.seconds + _SLACK_S
        for box in list(self._idle):
            if time.monotonic() - box.born + needs > self._options.lifetime_s:
                self._idle.remove(box)
                self._drop(box)
        if self._idle:
            return self._idle.pop()
        if self._kills:  # the account counts a sandbox until it is gone
            await asyncio.wait(set(self._kills))
        return await self._make(needs)

    async def _make(self, needs: float) -> _Box:
        task = asyncio.get_running_loop().create_task(self._create(needs))
        self._making.add(task)
        try:
            # What was ordered comes and costs, whether or not anybody still waits for it.
            box = _Box(await asyncio.shield(task), time.monotonic())
        except asyncio.CancelledError:
            task.add_done_callback(self._unwanted)
            raise
        finally:
            if task.done():
                self._making.discard(task)
        self._alive.add(box)
        return box

    async def _create(self, needs: float) -> Any:
        from e2b_code_interpreter import AsyncSandbox

        options = self._options
        try:
            sandbox = await AsyncSandbox.create(
                template=options.template,
                timeout=int(max(options.lifetime_s, needs)) + 30,
                allow_internet_access=options.internet,
                metadata={"application": "mintrl-env"},
                api_key=options.key,
                domain=options.domain,
                # Longer than anybody waits, since an order that is given up here is still served.
                request_timeout=self._patience.answer_s + _LATE_S,
                # The client obeys Retry-After, which its exceptions do not carry; but it would also
                # ask again where a quota is used up. So it may, once that has been ruled out.
                retries=8 if self._throttled else 0,
                idempotency_key=str(uuid.uuid4()),
            )
        except Exception as error:
            judged = _judged(error)
            self._throttled = isinstance(judged, Passing)
            raise judged from error
        self._throttled = False
        return sandbox

    def _unwanted(self, task: asyncio.Task[Any]) -> None:
        self._making.discard(task)
        if not task.cancelled() and task.exception() is None:
            self._drop(_Box(task.result(), time.monotonic()))

    def _drop(self, box: _Box) -> None:
        """Kill a sandbox, in the background; one that cannot be killed ends by its lifetime."""
        self._alive.discard(box)
        task = asyncio.get_running_loop().create_task(_kill(box.sandbox))
        self._kills.add(task)
        task.add_done_callback(self._kills.discard)

    async def aclose(self) -> None:
        if self._making:
            await asyncio.wait(set(self._making), timeout=_COMING_S)
            await asyncio.sleep(0)  # their callbacks
            for task in set(self._making):
                task.cancel()
        for box in list(self._alive):
            self._drop(box)
        self._idle.clear()
        if self._kills:
            await asyncio.wait(set(self._kills))


_first_pid: int | None = None


async def _kill(sandbox: Any) -> None:
    try:
        async with asyncio.timeout(_KILL_S):
            await sandbox.kill(request_timeout=_KILL_S)
    except Exception:
        return  # it ends by its lifetime


def _cell(job: Job) -> str:
    """The notebook cell that runs a script in a fresh interpreter and prints its report."""
    packed = base64.b64encode(zlib.compress(job.script.encode())).decode()
    return f"""\
def _mintrl_run(name, seconds, packed):
    import base64, os, shutil, signal, subprocess, sys, tempfile, zlib
    folder = tempfile.mkdtemp(prefix="mintrl-")
    try:
        with open(os.path.join(folder, "stderr"), "w+b") as errors:
            run = subprocess.Popen([sys.executable, "-I", "-"], stdin=subprocess.PIPE, cwd=folder,
                                   stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True)
            try:
                run.communicate(zlib.decompress(base64.b64decode(packed)), timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()
            errors.seek(0)
            said = errors.read()[-300:].decode(errors="replace")
        try:
            with open(os.path.join(folder, name), "rb") as file:
                report = base64.b64encode(zlib.compress(file.read())).decode()
            print(name + ":report:" + report + ":" + name, flush=True)
        except OSError:
            print(name + ":none:" + str(run.returncode) + " " + said + ":" + name, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
try:
    _mintrl_run({job.report!r}, {job.seconds + _SLACK_S / 2!r}, {packed!r})
finally:
    del _mintrl_run
"""


def _report(printed: str, name: str) -> bytes:
    """The report out of what the cell printed.

    Raises:
        Passing: there is none, or it is broken.
    """
    _, found, rest = printed.partition(f"{name}:report:")
    packed, whole, _ = rest.partition(f":{name}")
    if not found or not whole:
        _, _, said = printed.partition(f"{name}:none:")
        raise Passing(f"the script left no report; it ended with {_short(said) or 'no word'}")
    try:
        unpack = zlib.decompressobj()
        report = unpack.decompress(base64.b64decode(packed, validate=True), _MAX_REPORT)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise Passing(f"a report that cannot be read: {error}") from error
    if not unpack.eof:
        raise Passing(f"a report that is cut, or longer than {_MAX_REPORT} bytes")
    return report


def _judged(error: Exception) -> Exception:
    """What an exception of the client means: Passing, or SandboxUnavailable."""
    import e2b

    text = _short(error)
    said = f"{type(error).__name__}: {text}"
    code = getattr(error, "status_code", None)
    if code is None and text[:3].isdigit():
        code = int(text[:3])  # what the kernel's server answers has its status only in words
    if isinstance(error, e2b.AuthenticationException) or code in (401, 403):
        return SandboxUnavailable(f"E2B gives no access: {said}; look at {KEY} and at the account")
    if code == 402 or (code == 429 and _is_quota(text)):
        return SandboxUnavailable(
            f"E2B's quota is used up: {said}; lower `concurrency`, end sandboxes that were left "
            "over, or raise the account's limit"
        )
    if isinstance(error, (e2b.NotFoundException, e2b.TimeoutException)):
        return Passing(f"the sandbox is gone or does not answer: {said}")
    if isinstance(error, (e2b.InvalidArgumentException, e2b.TemplateException)):
        return SandboxUnavailable(
            f"E2B refuses the request: {said}; look at the arguments of E2BSandbox"
        )
    if isinstance(code, int) and 400 <= code < 500 and code not in (408, 409, 425, 429):
        return SandboxUnavailable(
            f"E2B refuses the request: {said}; look at the arguments of E2BSandbox"
        )
    if isinstance(error, json.JSONDecodeError):
        return Passing(f"an answer that is no JSON: {text}")
    # Rate limits, a busy service, a guest that does not respond, broken connections, 5xx.
    return Passing(said)


def _is_quota(text: str) -> bool:
    return any(words in text.lower() for words in ("quota", "maximum number of", "billing"))


def _short(text: Any) -> str:
    return " ".join(str(text or "").split())[:300]
