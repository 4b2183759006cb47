"""locks/: every line a version, within the ranges that the project states, and the pins of each stack."""

from __future__ import annotations

import importlib.util
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKS = ("cpu", "trl-vllm-0.31", "verl-vllm-0.24")


def versions(file: Path) -> dict[str, str]:
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    pairs = [line.split("#")[0].strip().split("==") for line in lines if line.strip()]
    assert all(len(pair) == 2 for pair in pairs), [pair for pair in pairs if len(pair) != 2]
    return {canonicalize_name(name): version for name, version in pairs}


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_locks", ROOT / "scripts/write_locks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_is_a_lock_for_each_stack() -> None:
    assert sorted(path.stem for path in (ROOT / "locks").glob("*.txt")) == sorted(LOCKS)
    assert sorted(script().NOTES) == sorted(LOCKS)


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_is_within_the_ranges_of_the_project(name: str) -> None:
    found = versions(ROOT / "locks" / f"{name}.txt")
    assert len(found) > 60
    extras = ["trl", "openai", "e2b", *(["vllm"] if name.startswith("trl-vllm") else [])]
    extras += ["verl"] if name.startswith("verl") else []
    optional = PROJECT["optional-dependencies"]
    for line in [*PROJECT["dependencies"], *(line for extra in extras for line in optional[extra])]:
        needed = Requirement(line)
        version = found[canonicalize_name(needed.name)]
        assert needed.specifier.contains(Version(version)), (line, version)
    for pin in script().STACKS.get(name, ()):
        needed = Requirement(pin)
        assert found[canonicalize_name(needed.name)] == next(iter(needed.specifier)).version


def test_the_cpu_lock_agrees_with_what_make_install_takes() -> None:
    lock, given = versions(ROOT / "locks" / "cpu.txt"), versions(ROOT / "constraints.txt")
    both = set(lock) & set(given)
    assert {"torch", "transformers", "trl", "openai", "numpy"} <= both
    assert {name: lock[name] for name in both} == {name: given[name] for name in both}
