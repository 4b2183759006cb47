"""Names -> objects: ours, registered, installed packages' and dotted paths; nothing is overwritten."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mintrl_env import registry
from mintrl_env.errors import MintrlError, MissingExtraError, RegistryError
from mintrl_env.guards import LeakGuard
from mintrl_env.judges import KeepJudge, OracleJudge
from mintrl_env.registry import names, register, resolve

KINDS = ("verifier", "policy", "judge", "guard", "tasks")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {kind: {} for kind in KINDS})


def install(
    monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, points: str, module: str = ""
) -> None:
    """A fake distribution on sys.path, as an installed package has it."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)
    (folder / f"{name}.py").write_text(module)
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()


@pytest.mark.parametrize("kind", KINDS)
def test_every_built_in_resolves(kind: str) -> None:
    assert names(kind)
    for name in registry._BUILTIN[kind]:
        assert callable(resolve(kind, name))


def test_registered_things_are_found_as_they_are() -> None:
    mine = object()
    register("judge", "mine", mine)
    assert resolve("judge", "mine") is mine
    assert names("judge") == sorted([*registry._BUILTIN["judge"], "mine"])
    register("guard", "mine", None)  # another kind; and None is a thing like any other
    assert resolve("guard", "mine") is None


@pytest.mark.parametrize("name", ["oracle", "mine", "theirs"])
def test_no_name_is_taken_twice(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path, "theirs_a", "[mintrl_env.judge]\ntheirs = theirs_a:Judge\n")
    register("judge", "mine", 1)
    with pytest.raises(RegistryError, match=f"judge '{name}' is registered already"):
        register("judge", name, 2)
    assert resolve("judge", "oracle") is OracleJudge and resolve("judge", "mine") == 1


def test_unknown_names_with_the_nearest() -> None:
    with pytest.raises(RegistryError, match=r"no judge is called 'orcale', did you mean 'oracle'"):
        resolve("judge", "orcale")
    register("judge", "my_special_judge", 1)
    with pytest.raises(RegistryError, match="did you mean 'my_special_judge'"):
        resolve("judge", "my_special_juge")
    with pytest.raises(RegistryError) as caught:
        resolve("guard", "zzzzzz")
    assert "did you mean" not in str(caught.value)
    assert str(caught.value) == (
        "no guard is called 'zzzzzz'. Known: leak, perplexity, special_token, or give a path "
        "package.module:attribute"
    )
    with pytest.raises(RegistryError, match="no judge is called ''"):
        resolve("judge", "")


def test_unknown_kinds() -> None:
    for call in (
        lambda: resolve("jugde", "oracle"),
        lambda: names("jugde"),
        lambda: register("jugde", "x", 1),
    ):
        with pytest.raises(RegistryError, match="unknown kind 'jugde'; known: verifier, policy"):
            call()


def test_dotted_paths() -> None:
    assert resolve("judge", "mintrl_env.judges:KeepJudge") is KeepJudge
    assert resolve("judge", "mintrl_env.types:Verdict.keep").__name__ == "keep"
    register("judge", "a:b", 3)
    assert resolve("judge", "a:b") == 3


@pytest.mark.parametrize(
    "path",
    [
        "no_such_package_here:Judge",
        "mintrl_env.no_such_module:Judge",
        "mintrl_env.judges:NoSuchJudge",
        "mintrl_env.judges:KeepJudge.no.such",
        "mintrl_env.judges:",
        ":KeepJudge",
        ":",
        ".judges:KeepJudge",
        "mintrl_env..judges:KeepJudge",
    ],
)
def test_paths_that_cannot_be_loaded(path: str) -> None:
    with pytest.raises(RegistryError) as caught:
        resolve("judge", path)
    assert str(caught.value).startswith(f"judge {path!r}: {path} cannot be loaded: ")
    assert isinstance(caught.value.__cause__, Exception)


def test_entry_points(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    points = (
        "[mintrl_env.judge]\nfriendly = fake_a:Box.Judge\ngone = fake_a:Gone\n"
        "broken = fake_missing:Judge\noracle = fake_a:Box\n[mintrl_env.guard]\nkind = fake_a:Box\n"
    )
    module = "class Box:\n    class Judge:\n        pass\n"
    install(monkeypatch, tmp_path / "a", "fake_a", points, module)
    assert {"friendly", "gone", "oracle"} <= set(names("judge")) and "kind" not in names("judge")
    assert resolve("judge", "friendly").__qualname__ == "Box.Judge"
    assert resolve("guard", "kind").__qualname__ == "Box"
    assert resolve("judge", "oracle") is OracleJudge  # a package takes no name of ours
    with pytest.raises(RegistryError, match="judge 'gone': fake_a:Gone cannot be loaded"):
        resolve("judge", "gone")
    with pytest.raises(RegistryError, match="'broken': fake_missing:Judge cannot be loaded"):
        resolve("judge", "broken")
    with pytest.raises(RegistryError, match="did you mean 'friendly'"):
        resolve("judge", "freindly")


def test_two_packages_with_one_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    install(monkeypatch, tmp_path / "b", "fake_b", "[mintrl_env.judge]\nx = fake_b:J\n", "J = 1")
    assert resolve("judge", "x") == 1
    # Seen twice, as an editable install is: one thing.
    again = "[mintrl_env.judge]\nx = fake_b:J\n"
    install(monkeypatch, tmp_path / "b2", "fake_b2", again)
    assert resolve("judge", "x") == 1
    install(monkeypatch, tmp_path / "c", "fake_c", "[mintrl_env.judge]\nx = fake_c:J\n", "J = 2")
    with pytest.raises(RegistryError, match=r"'x' is offered by several .*fake_b:J, fake_c:J"):
        resolve("judge", "x")
    assert resolve("judge", "fake_c:J") == 2


def test_a_missing_extra_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = (
        "from mintrl_env.errors import MissingExtraError\n"
        "raise MissingExtraError('left-pad', 'openai', 'this judge')\n"
    )
    points = "[mintrl_env.judge]\nneedy = fake_needy:Judge\n"
    install(monkeypatch, tmp_path, "fake_needy", points, module)
    for name in ("needy", "fake_needy:Judge"):
        with pytest.raises(MissingExtraError, match=r'pip install "mintrl-env\[openai\]"'):
            resolve("judge", name)
    assert issubclass(MissingExtraError, ImportError) and issubclass(MissingExtraError, MintrlError)


def test_names_load_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    points = "[mintrl_env.judge]\nboom = fake_boom:Judge\n"
    install(monkeypatch, tmp_path, "fake_boom", points, "raise SystemExit('imported')")
    assert "boom" in names("judge")
    assert resolve("guard", "leak") is LeakGuard


def test_register_takes_classes_and_factories() -> None:
    def factory(**options: Any) -> KeepJudge:
        return KeepJudge()

    register("judge", "made", factory)
    assert resolve("judge", "made") is factory


def test_the_command_finds_modules_beside_the_config(tmp_path: Path) -> None:
    """A console script has its own folder on sys.path, not the one that it is called from."""
    (tmp_path / "my_judge.py").write_text("class MyJudge:\n    pass\n")
    program = (
        "import sys\n"
        "sys.path[:] = [p for p in sys.path if p not in ('', sys.argv[1])]\n"
        "sys.argv[1:] = ['--version']\n"
        "from mintrl_env import cli, registry\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        "print(registry.resolve('judge', 'my_judge:MyJudge').__name__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines()[-1:] == ["MyJudge"], done.stderr
