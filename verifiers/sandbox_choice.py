"""Which sandbox runs the code: the first that works here, or the one that was named.

    local         forks of a clean Python, Landlock and seccomp; the default
    bubblewrap    a process in namespaces of its own, for kernels without Landlock
    e2b, fusion   a service, by name only: it costs money or needs a server
    unconfined    none at all, by name only, and loudly

A sandbox of this machine is tried with programs that attempt to get out (`sandbox_canaries`) once
in a process; it is never used where one of them succeeds.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from mintrl_env.errors import ConfigError
from mintrl_env.verifiers.sandbox import Sandbox, SandboxUnavailable

NAMES = ("auto", "local", "bubblewrap", "unconfined", "e2b", "fusion")

UNCONFINED = (
    "code from responses runs UNCONFINED in this process's account: it can read and change files, "
    "use the network and start processes; only its time, memory and output are limited"
)

_log = logging.getLogger(__name__)
_held: set[tuple[str, str]] = set()
_state = threading.Lock()
_warned = False


@dataclass(frozen=True, slots=True)
class Probe:
    """One thing that a sandbox needs, looked at here.

    Attributes:
        name: what was looked at.
        ok: it is there.
        detail: the version, or the error with its errno.
        remedy: what to do; empty where it is there.
    """

    name: str
    ok: bool
    detail: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.detail}" + (f"; {self.remedy}" if self.remedy else "")


def choose_sandbox(name: str = "auto", options: Mapping[str, Any] | None = None) -> Sandbox:
    """The sandbox of this name, tried where it is one of this machine.

    Args:
        name: one of NAMES. "auto": local, else bubblewrap.
        options: arguments of that sandbox's class by name, for instance {"packages": ["numpy"]};
            of "auto", those that local and bubblewrap share.

    Raises:
        ConfigError: an unknown name or option.
        SandboxUnavailable: it does not work here; the message lists every probe.
        MissingExtraError: a remote one's client is not installed.
    """
    given = dict(options or {})
    if isinstance(given.get("packages"), str):
        raise ConfigError(f"packages is a list of names: [{given['packages']!r}]")
    if name not in NAMES:
        raise ConfigError(f"no sandbox {name!r}: one of {', '.join(NAMES)}")
    if name == "unconfined":
        return _unconfined(given)
    if name in ("e2b", "fusion"):
        return _made(name, _remote(name), given)
    problems = []
    for candidate in ("local", "bubblewrap") if name == "auto" else (name,):
        try:
            sandbox = _made(candidate, _class(candidate), given)
            _try(sandbox, (candidate, repr(sorted(given.items()))))
            return sandbox
        except SandboxUnavailable as error:
            problems.append(f"{candidate}: {error}")
            _log.info("the %s sandbox cannot be used: %s", candidate, error)
    raise SandboxUnavailable(_refusal(problems))


def probes() -> list[Probe]:
    """What this machine offers to sandboxes. Runs nothing untrusted and changes nothing."""
    if sys.platform != "linux":
        remedy = "run in a Linux container or virtual machine (Windows: WSL2), or use e2b or fusion"
        return [Probe("Linux", False, f"this is {sys.platform}", remedy)]
    return [_landlock(), _seccomp(), _namespaces(), _bubblewrap()]


def _refusal(problems: list[str]) -> str:
    lines = ["no sandbox for code works here, so none is run."]
    lines += [f"  {problem}" for problem in problems]
    lines.append("What this machine offers:")
    lines += [f"  {probe}" for probe in probes()]
    lines.append(
        'Elsewhere: sandbox "e2b" (a service) or "fusion" (a server of yours). For code that you '
        'trust only: "unconfined". See docs/sandbox.md.'
    )
    return "\n".join(lines)


def _class(name: str) -> Callable[..., Sandbox]:
    if name == "local":
        from mintrl_env.verifiers.sandbox_local import LocalSandbox

        return LocalSandbox
    from mintrl_env.verifiers.sandbox_bwrap import BwrapSandbox

    return BwrapSandbox


def _remote(name: str) -> Callable[..., Sandbox]:
    if name == "e2b":
        from mintrl_env.verifiers.sandbox_e2b import E2BSandbox

        return E2BSandbox
    from mintrl_env.verifiers.sandbox_fusion import FusionSandbox

    return FusionSandbox


def _made(name: str, make: Callable[..., Sandbox], options: dict[str, Any]) -> Sandbox:
    known = [p for p in inspect.signature(make).parameters if p != "unconfined"]
    if unknown := sorted(set(options) - set(known)):
        raise ConfigError(
            f"the {name} sandbox has no option {', '.join(map(repr, unknown))}; "
            f"it has {', '.join(known)}"
        )
    return make(**options)


def _try(sandbox: Sandbox, key: tuple[str, str]) -> None:
    """Run the programs that try to get out, once per process and kind of sandbox."""
    from mintrl_env.verifiers.sandbox_canaries import require_confined

    with _state:
        if key in _held:
            return
        try:
            require_confined(sandbox)
        except BaseException:
            sandbox.close()
            raise
        _held.add(key)


def _unconfined(options: dict[str, Any]) -> Sandbox:
    from mintrl_env.verifiers.sandbox_local import LocalSandbox

    sandbox = _made("unconfined", partial(LocalSandbox, unconfined=True), options)
    global _warned
    with _state:
        first, _warned = not _warned, True
    if first:
        _log.warning(UNCONFINED)
        print(f"WARNING: {UNCONFINED}", file=sys.stderr, flush=True)
    return sandbox


def _landlock() -> Probe:
    from mintrl_env.verifiers import sandbox_confine

    try:
        return Probe("Landlock", True, f"ABI {sandbox_confine.landlock_abi()}")
    except sandbox_confine.ConfineError as error:
        remedy = {
            errno.ENOSYS: "needs Linux 5.13 or later, built with CONFIG_SECURITY_LANDLOCK",
            errno.EOPNOTSUPP: "is switched off: add landlock to the lsm= boot parameter",
            errno.EPERM: "a seccomp profile around this process forbids it: update the container "
            "engine (Docker 23 or later), or run with a profile that allows landlock_*",
        }.get(error.errno or 0, "")
        return Probe("Landlock", False, _with_name(error), remedy)


def _seccomp() -> Probe:
    from mintrl_env.verifiers import sandbox_confine

    try:
        sandbox_confine.seccomp_available()
    except sandbox_confine.ConfineError as error:
        remedy = "needs Linux with CONFIG_SECCOMP_FILTER on x86-64 or arm64"
        return Probe("seccomp filter", False, _with_name(error), remedy)
    return Probe("seccomp filter", True, os.uname().machine)


def _namespaces() -> Probe:
    """Whether this user may make a user namespace, which bubblewrap needs unless it is root's."""
    for path, off in (
        ("/proc/sys/user/max_user_namespaces", "0"),
        ("/proc/sys/kernel/unprivileged_userns_clone", "0"),
        ("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1"),
    ):
        with contextlib.suppress(OSError), open(path, encoding="ascii") as file:
            value = file.read().strip()
            if value == off and (os.geteuid() != 0 or path.endswith("max_user_namespaces")):
                key = path.removeprefix("/proc/sys/").replace("/", ".")
                remedy = f"an administrator can change {key}"
                return Probe("user namespaces", False, f"{key} = {value}", remedy)
    return Probe("user namespaces", True, "not forbidden by a setting")


def _bubblewrap() -> Probe:
    from mintrl_env.verifiers.sandbox_bwrap import find_bwrap

    try:
        program = find_bwrap()
    except SandboxUnavailable as error:
        return Probe("bubblewrap", False, str(error))
    command = [program, "--unshare-all", "--unshare-user", "--ro-bind", "/", "/", "true"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=20, stdin=subprocess.DEVNULL)
        version = subprocess.run([program, "--version"], capture_output=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        return Probe("bubblewrap", False, f"{program}: {error}")
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip()[:300]
        remedy = "in a container it needs user namespaces (docs/sandbox.md)"
        return Probe("bubblewrap", False, f"{program}: {said}", remedy)
    return Probe("bubblewrap", True, version.stdout.decode("ascii", "replace").strip() or program)


def _with_name(error: OSError) -> str:
    return f"{errno.errorcode.get(error.errno or 0, '?')} ({error.errno}), {error.strerror}"


def _after_fork_in_child() -> None:
    global _state
    _state = threading.Lock()  # another thread may have held it when we were forked


os.register_at_fork(after_in_child=_after_fork_in_child)
