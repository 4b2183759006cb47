"""Where code under test can run: the sandbox that would be used is started and tried."""

from __future__ import annotations

import os
from importlib import metadata

from mintrl_env.doctor_check import Check, Status
from mintrl_env.errors import VerifierError
from mintrl_env.verifiers.sandbox_choice import choose_sandbox, probes

_GROUP = "sandboxes"


def sandbox_checks() -> list[Check]:
    """The sandbox for code tests, its start and its canaries included, then what it rests on."""
    details = [
        Check(
            _GROUP,
            probe.name,
            Status.OK if probe.ok else Status.WARN,
            probe.detail,
            probe.remedy,
        )
        for probe in probes()
    ]
    return [_code_tests(), *details, _e2b()]


def _code_tests() -> Check:
    name = "code tests"
    try:
        sandbox = choose_sandbox()
    except VerifierError as error:
        detail = f"no sandbox works here, so code tests would be refused (math needs none): {error}"
        fix = "install bubblewrap, or use E2B or Sandbox Fusion"
        return Check(_GROUP, name, Status.WARN, detail, fix)
    ways = {"local": "Landlock and seccomp"}
    detail = (
        f"run in {ways.get(sandbox.name, sandbox.name)}; every escape that was tried is refused"
    )
    sandbox.close()
    return Check(_GROUP, name, Status.OK, detail)


def _e2b() -> Check:
    """Whether a key is set; never which."""
    key = bool(os.environ.get("E2B_API_KEY"))
    try:
        version = metadata.version("e2b-code-interpreter")
    except metadata.PackageNotFoundError:
        version = ""
    parts = [f"e2b-code-interpreter {version}" if version else "package not installed"]
    parts.append("E2B_API_KEY is set (not tried)" if key else "E2B_API_KEY is not set")
    fixes = [] if version else ['pip install "mintrl-env[e2b]"']
    fixes += [] if key else ["export E2B_API_KEY=..."]
    return Check(
        _GROUP,
        "E2B",
        Status.OK if key and version else Status.WARN,
        ", ".join(parts),
        f"if wanted: {'; '.join(fixes)}" if fixes else "",
    )
