"""What is around the code: the wheel and the sdist, the links, the Makefile, CI's script.

Built from a copy of the tree, with this environment's setuptools, so no network is needed.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import mintrl_env

ROOT = Path(__file__).resolve().parent.parent
LINKED = ("adapters", "configs", "trainers", "verifiers")
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PYPROJECT["project"]["optional-dependencies"]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z][a-z0-9-]*):", MAKEFILE, re.MULTILINE))
PHONY = set(" ".join(re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)).split())


def run(*command: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Without what an outer `make` or test run would hand down to the command."""
    kept = {
        k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "PYTHONPATH")
    }
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=kept | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=240,
    )


def copy_of_tree(target: Path) -> Path:
    """The tree as a clone has it, links kept as links, without what .gitignore names."""
    ignored = shutil.ignore_patterns(
        ".git", ".venv", ".cache", "runs", "build", "dist", "*.egg-info", "__pycache__", ".*_cache",
        ".hypothesis", "tests", "benchmarks", "docs",
    )  # fmt: skip
    return Path(shutil.copytree(ROOT, target, symlinks=True, ignore=ignored))


def files_of_package(root: Path) -> set[str]:
    """Every file under root/mintrl_env, through the links, as `mintrl_env/...`."""
    found = set()
    for folder, folders, names in os.walk(root / "mintrl_env", followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        found |= {(Path(folder) / name).relative_to(root).as_posix() for name in names}
    return {name for name in found if not Path(name).name.startswith(".")}


class Built(NamedTuple):
    tree: Path
    wheel: Path
    sdist: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The sdist of a copy of the tree, and the wheel that is built from that sdist."""
    tmp = tmp_path_factory.mktemp("package")
    tree, dist = copy_of_tree(tmp / "tree"), tmp / "dist"
    done = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", dist, tree, cwd=tmp)
    assert done.returncode == 0, done.stdout
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    return Built(tree, wheel, sdist)


def names_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def test_wheel_holds_exactly_the_tree(built: Built) -> None:
    expected = files_of_package(built.tree)
    assert {name for name in names_in(built.wheel) if name.startswith("mintrl_env/")} == expected
    # The comparison is worth something only if the walk went through the links.
    assert {f"mintrl_env/{name}/__init__.py" for name in LINKED} <= expected
    assert "mintrl_env/py.typed" in expected
    assert any(name.startswith("mintrl_env/verifiers/math_") for name in expected)
    recipes = {f"mintrl_env/configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")}
    assert recipes <= expected


def test_wheel_installs_no_other_top_level_name(built: Built) -> None:
    version = mintrl_env.__version__
    assert {name.split("/")[0] for name in names_in(built.wheel)} == {
        "mintrl_env",
        f"mintrl_env-{version}.dist-info",
    }


def test_wheel_metadata(built: Built) -> None:
    info = f"mintrl_env-{mintrl_env.__version__}.dist-info"
    with zipfile.ZipFile(built.wheel) as archive:
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
        scripts = archive.read(f"{info}/entry_points.txt").decode()
        license_text = archive.read(f"{info}/licenses/LICENSE").decode()
    assert metadata["Name"] == "mintrl-env"
    assert metadata["Version"] == mintrl_env.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata["Requires-Python"].split(",")) == {">=3.11", "<3.13"}
    assert set(metadata.get_all("Provides-Extra", [])) == set(EXTRAS)
    assert [line for line in scripts.splitlines() if line] == [
        "[console_scripts]", "mintrl = mintrl_env.cli:main",
        "[verl.plugins]", "mintrl = mintrl_env.adapters.verl_plugin",
    ]  # fmt: skip
    assert "Version 2.0, January 2004" in license_text
    needed = {
        Requirement(r).name for r in metadata.get_all("Requires-Dist", []) if "extra" not in r
    }
    assert needed.isdisjoint({"torch", "transformers", "trl", "openai", "sympy", "math-verify"})


def test_sdist_holds_the_modules_as_files(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    for name in files_of_package(built.tree):
        assert members[name].isfile(), f"{name} is not an ordinary file in the sdist"
    assert {"pyproject.toml", "LICENSE"} <= set(members)


def test_wheel_works_outside_the_repository(built: Built, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    done = run(*pip, "--no-deps", "--no-index", "--target", site, built.wheel, cwd=elsewhere)
    assert done.returncode == 0, done.stdout
    program = """
import importlib, importlib.resources
for name in ("", ".adapters", ".configs", ".trainers", ".verifiers"):
    module = importlib.import_module("mintrl_env" + name)
    print(module.__file__)
import mintrl_env.verifiers.worker
files = importlib.resources.files("mintrl_env.configs").iterdir()
print(sorted(f.name for f in files if f.name.endswith(".yaml")))
"""
    done = run(sys.executable, "-c", program, cwd=elsewhere, PYTHONPATH=str(site))
    assert done.returncode == 0, done.stdout
    *places, recipes = done.stdout.splitlines()
    assert places == [str(site / "mintrl_env" / name / "__init__.py") for name in ("", *LINKED)]
    assert ast.literal_eval(recipes) == sorted(p.name for p in (ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("name", LINKED)
def test_linked_packages(name: str) -> None:
    link = ROOT / "mintrl_env" / name
    assert os.readlink(link) == f"../{name}"
    assert (link / "__init__.py").exists()
    # Flat, and no module that hides a library when it is run from inside the folder.
    assert not [p for p in (ROOT / name).rglob("*.py") if p.parent != ROOT / name]
    libraries = {
        Requirement(r).name.replace("-", "_")
        for rs in (*EXTRAS.values(), PYPROJECT["project"]["dependencies"])
        for r in rs
    }
    stems = {path.stem for path in (ROOT / name).glob("*.py")}
    assert stems.isdisjoint(libraries | set(sys.stdlib_module_names) | {"sympy", "ray"})


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone")
def test_links_are_committed_as_links() -> None:
    done = run("git", "ls-files", "-s", *(f"mintrl_env/{name}" for name in LINKED), cwd=ROOT)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["120000"] * len(LINKED)


def test_every_pin_fits_what_pyproject_asks_for() -> None:
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, version = line.split("==")
            pins[canonicalize_name(name)] = version
    assert pins["torch"] == "2.13.0"
    asked = list(PYPROJECT["project"]["dependencies"])
    asked += [r for extra, rs in EXTRAS.items() if extra != "vllm" for r in rs]
    for requirement in map(Requirement, asked):
        pin = pins.get(canonicalize_name(requirement.name))
        assert pin is not None, f"constraints.txt has no version of {requirement.name}"
        assert requirement.specifier.contains(pin), f"{requirement} does not admit {pin}"


def test_extras_that_errors_name_exist() -> None:
    """A MissingExtraError sends the user to `pip install "mintrl-env[extra]"`."""
    named = set()
    for name in files_of_package(ROOT):
        if not name.endswith(".py"):
            continue
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "id", "") == "MissingExtraError"
                and len(node.args) > 1
                and isinstance(node.args[1], ast.Constant)
            ):
                named.add((name, node.args[1].value))
    assert named, "no module raises MissingExtraError with a literal extra: has it been renamed?"
    assert {extra for _, extra in named} <= set(EXTRAS)


def test_versions_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == mintrl_env.__version__
    assert citation["license"] == PYPROJECT["project"]["license"]
    changes = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert changes[0] == "Unreleased"


def test_help_lists_every_target() -> None:
    done = run("make", "help", cwd=ROOT)
    assert done.returncode == 0, done.stdout
    listed = dict(re.findall(r"^  make ([a-z0-9-]+) +(\S.*)$", done.stdout, re.MULTILINE))
    assert set(listed) == TARGETS == PHONY
    assert {"quickstart", "test", "test-slow", "test-verl", "check", "smollm2"} <= TARGETS
    assert run("make", cwd=ROOT).stdout == done.stdout, "help is not the default"


def test_make_commands_in_the_documents_are_targets() -> None:
    if not (ROOT / "README.md").exists():
        pytest.skip("no README.md yet")
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        # In code only: an indented or fenced line that starts with make, or `make ...`.
        for words in re.findall(r"(?:^ *|`)make ([a-z][a-z0-9 -]*)", document.read_text(), re.M):
            named = words.split()
            assert set(named) <= TARGETS, f"{document.name}: make {words}"


def test_install_runs_again_only_when_its_inputs_change(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    stamp = tmp_path / ".venv" / ".installed"
    stamp.parent.mkdir()
    assert run("make", "-q", "install", cwd=tmp_path).returncode == 1
    stamp.touch()
    assert run("make", "-q", "install", cwd=tmp_path).returncode == 0
    for name in ("pyproject.toml", "constraints.txt"):
        later = stamp.stat().st_mtime + 10
        os.utime(tmp_path / name, (later, later))
        assert run("make", "-q", "install", cwd=tmp_path).returncode == 1, name
        os.utime(stamp, (later + 10, later + 10))
        assert run("make", "-q", "install", cwd=tmp_path).returncode == 0, name


def test_install_says_which_python_it_needs(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    done = run("make", "install", "PYTHON=/nowhere/python3.9", cwd=tmp_path)
    assert done.returncode == 2
    assert "needs Python 3.11 or 3.12" in done.stdout
    assert "make install PYTHON=/path/to/python3.11" in done.stdout
    assert not (tmp_path / ".venv").exists()


PASSED = "===== 3 passed in 0.10s ====="


@pytest.mark.parametrize(
    ("broken", "ran", "code"),
    [
        ("", ["install", "check", "test", "test-slow", "test-verl"], 0),
        ("install", ["install"], 1),
        ("check", ["install", "check", "test", "test-slow", "test-verl"], 1),
        ("test", ["install", "check", "test"], 1),
        ("test-verl", ["install", "check", "test", "test-slow", "test-verl"], 1),
        ("test-slow", ["install", "check", "test", "test-slow", "test-verl"], 1),
    ],
)
def test_ci_runs_the_targets_and_tells(
    tmp_path: Path, broken: str, ran: list[str], code: int
) -> None:
    """.ci/run on a Makefile whose targets only note that they ran; one of them fails."""
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    lines = []
    for name in ("install", "check", "test", "test-slow", "test-verl"):
        verdict = PASSED.replace("passed", "failed") if name == broken else PASSED
        lines.append(f".PHONY: {name}\n{name}:\n\t@echo {name} $(CI) >> ran; echo '{verdict}'")
        lines.append(f"\t@{'exit 3' if name == broken else 'true'}")
    (tmp_path / "Makefile").write_text("\n".join(lines) + "\n")
    done = run("bash", ".ci/run", cwd=tmp_path, CI="true")
    assert done.returncode == code, done.stdout
    assert (tmp_path / "ran").read_text().splitlines() == [f"{name} true" for name in ran]
    if broken:
        assert f"=== FAILED: {broken}\n" in done.stdout
    tests = [name for name in ran if name.startswith("test")]
    closing = [PASSED.replace("passed", "failed") if name == broken else PASSED for name in tests]
    assert done.stdout.splitlines()[len(done.stdout.splitlines()) - len(closing) :] == closing


def test_ci_script_calls_real_targets() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    calls = [line for line in lines if re.match(r" *(if )?step [a-z]", line)]
    called = re.findall(r"\bstep ([a-z-]+)", " ".join(calls))
    assert called == ["install", "check", "test", "test-slow", "test-verl"]
    assert set(called) <= TARGETS
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_pre_commit_hooks_need_no_network() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert {hook["language"] for hook in hooks} == {"system"}
    commands = {" ".join(hook["entry"].split()[:2]) for hook in hooks}
    assert commands == {".venv/bin/ruff check", ".venv/bin/ruff format", ".venv/bin/mypy -p"}
