"""Which sandbox is chosen, what is refused, and that the programs which try to get out notice."""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest

if sys.platform != "linux":
    pytest.skip("Landlock and seccomp are Linux's", allow_module_level=True)

from mintrl_env.errors import ConfigError
from mintrl_env.verifiers import sandbox_canaries, sandbox_choice, sandbox_confine
from mintrl_env.verifiers.sandbox import Limits, Ran, Result, Sandbox, SandboxUnavailable
from mintrl_env.verifiers.sandbox_choice import choose_sandbox, probes
from mintrl_env.verifiers.sandbox_local import LocalSandbox


def _can_confine() -> bool:
    try:
        sandbox_confine.landlock_abi()
        sandbox_confine.seccomp_available()
    except sandbox_confine.ConfineError:
        return False
    return True


confines = pytest.mark.skipif(not _can_confine(), reason="this kernel has no Landlock or seccomp")


class Told:
    """A sandbox that answers what it was told to."""

    def __init__(self, name: str, *results: Result | Exception) -> None:
        self.name, self.results, self.closed = name, list(results), 0

    def run(self, code: str, stdin: str, limits: Limits) -> Result:
        result = self.results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    def calls(self, *args: Any) -> Iterator[Result]:
        raise NotImplementedError

    def asserts(self, *args: Any) -> Iterator[Result]:
        raise NotImplementedError

    def close(self) -> None:
        self.closed += 1


HOLDS = Result(Ran.OK, '{"escaped": [], "errors": {}, "ended": true}\n')
NOT_EXECUTED = Result(Ran.OK, "not executed\n")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was tried and nobody was warned yet."""
    monkeypatch.setattr(sandbox_choice, "_held", set())
    monkeypatch.setattr(sandbox_choice, "_warned", False)


def _offer(monkeypatch: pytest.MonkeyPatch, **sandboxes: Told) -> None:
    monkeypatch.setattr(sandbox_choice, "_class", lambda name: lambda: sandboxes[name])


# ---- canaries -------------------------------------------------------------------------------


@confines
def test_nothing_gets_out_of_the_local_sandbox() -> None:
    sandbox = LocalSandbox()
    assert sandbox_canaries.escapes(sandbox) == []


def test_the_canaries_notice_a_process_that_is_not_confined() -> None:
    with pytest.warns(RuntimeWarning, match="UNCONFINED"):
        sandbox = LocalSandbox(unconfined=True)
    found = sandbox_canaries.escapes(sandbox)
    for expected in (
        "read a file of the grader's",
        "write a file",
        "change a file's mode",
        "connect to a port of this machine",
        "connect to an abstract socket",
        "signal the grader",
        "fork",
        "make a file in memory",
        "change a directory",  # seen from outside, whatever the program says
        "connect to a port",
        "execute a program",
    ):
        assert expected in found
    assert len(found) == len(set(found))
    with pytest.raises(
        SandboxUnavailable, match="can get out, so it is refused here: it could rea"
    ):
        sandbox_canaries.require_confined(sandbox)


def test_one_escape_is_enough() -> None:
    leaky = Result(Ran.OK, '{"escaped": ["fork"], "errors": {}, "ended": true}')
    assert sandbox_canaries.escapes(Told("x", leaky, NOT_EXECUTED)) == ["fork"]
    assert sandbox_canaries.escapes(Told("x", HOLDS, Result(Ran.OK, ""))) == ["execute a program"]
    assert sandbox_canaries.escapes(Told("x", HOLDS, NOT_EXECUTED)) == []


@pytest.mark.parametrize(
    "result, message",
    [
        (
            Result(Ran.ERROR, None, "ended by signal 11"),
            "did not run in the x sandbox: error, ended",
        ),
        (Result(Ran.OK, "hello"), "printed 'hello'"),
        (Result(Ran.OK, "[]"), "printed"),
        (Result(Ran.OK, '{"escaped": [], "ended": false}'), "threads do not work"),
    ],
)
def test_a_sandbox_that_does_not_work_is_no_sandbox(result: Result, message: str) -> None:
    with pytest.raises(SandboxUnavailable, match=message):
        sandbox_canaries.escapes(Told("x", result))


# ---- the choice -----------------------------------------------------------------------------


@confines
def test_auto_is_local_where_that_works(fresh: None) -> None:
    sandbox = choose_sandbox()
    assert sandbox.name == "local"
    assert isinstance(sandbox, Sandbox)
    assert sandbox.run("print(6 * 7)", "", Limits()).value == "42\n"


@confines
def test_a_package_that_was_not_named_is_missing(fresh: None) -> None:
    sandbox = choose_sandbox("local", {"packages": ["numpy"]})
    code = (
        "import numpy as np, numpy.f2py, numpy.testing\n"  # with optional imports of their own
        "a = np.random.default_rng(0).random((50, 50))\n"
        "print(np.allclose(np.linalg.inv(a) @ a, np.eye(50)))\n"
        "try: import pydantic\n"
        "except ModuleNotFoundError as error: print(error)\n"
        "try: open(np.__file__.replace('numpy', 'pydantic'))\n"
        "except PermissionError: print('and closed')\n"
    )
    result = sandbox.run(code, "", Limits(wall_s=20))
    assert (result.ran, result.value) == (Ran.OK, "True\nNo module named 'pydantic'\nand closed\n")


def test_a_sandbox_is_tried_once(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    local = Told("local", HOLDS, NOT_EXECUTED)
    _offer(monkeypatch, local=local)
    assert choose_sandbox("local") is local
    assert choose_sandbox("auto") is local
    assert local.results == []
    assert local.closed == 0


def test_auto_falls_back(
    fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    local = Told("local", SandboxUnavailable("ENOSYS (38)"))
    bubblewrap = Told("bubblewrap", HOLDS, NOT_EXECUTED)
    _offer(monkeypatch, local=local, bubblewrap=bubblewrap)
    with caplog.at_level(logging.INFO):
        assert choose_sandbox() is bubblewrap
    assert "the local sandbox cannot be used: ENOSYS (38)" in caplog.text
    assert local.closed == 1


def test_a_leaky_sandbox_is_not_fallen_back_to(
    fresh: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    leaky = Result(Ran.OK, '{"escaped": ["write a file"], "errors": {}, "ended": true}')
    local = Told("local", SandboxUnavailable("no Landlock"))
    bubblewrap = Told("bubblewrap", leaky, NOT_EXECUTED)
    _offer(monkeypatch, local=local, bubblewrap=bubblewrap)
    with pytest.raises(SandboxUnavailable) as refused:
        choose_sandbox()
    text = str(refused.value)
    assert "local: no Landlock" in text
    assert "bubblewrap: code in the bubblewrap sandbox can get out" in text
    assert "it could write a file" in text
    for name in ("Landlock: ", "seccomp filter: ", "user namespaces: ", "bubblewrap: "):
        assert f"\n  {name}" in text
    assert "docs/sandbox.md" in text
    assert bubblewrap.closed == 1


def test_a_named_sandbox_has_no_substitute(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    _offer(monkeypatch, bubblewrap=Told("bubblewrap", SandboxUnavailable("bwrap is missing")))
    with pytest.raises(SandboxUnavailable, match="bubblewrap: bwrap is missing"):
        choose_sandbox("bubblewrap")


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("docker", None, "no sandbox 'docker': one of auto, local, bubblewrap, unconfined, e2b"),
        ("local", {"speed": 1}, "the local sandbox has no option 'speed'; it has packages"),
        ("local", {"unconfined": True}, "no option 'unconfined'"),
        ("unconfined", {"unconfined": False}, "no option 'unconfined'"),
        ("e2b", {"key": "x"}, "the e2b sandbox has no option 'key'; it has api_key"),
        ("fusion", {"url": "x"}, "the fusion sandbox has no option 'url'; it has endpoint"),
    ],
)
def test_wrong_names_and_options(name: str, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_sandbox(name, options)


def test_unconfined_is_loud_once(
    fresh: None, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.warns(RuntimeWarning, match="UNCONFINED"):
        first, second = choose_sandbox("unconfined"), choose_sandbox("unconfined")
    assert first.run("open('/dev/null').close(); print(1)", "", Limits()).value == "1\n"
    assert second.name == first.name
    assert capsys.readouterr().err.count("WARNING: code from responses runs UNCONFINED") == 1
    assert [r.levelname for r in caplog.records if "UNCONFINED" in r.message] == ["WARNING"]


# ---- probes ---------------------------------------------------------------------------------


def test_probes_name_the_errno_and_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int) -> Any:
        def function() -> int:
            raise sandbox_confine.ConfineError(number, "landlock_create_ruleset")

        return function

    for number, name, remedy in (
        (errno.ENOSYS, "ENOSYS (38)", "Linux 5.13"),
        (errno.EOPNOTSUPP, "(95)", "lsm="),
        (errno.EPERM, "EPERM (1)", "Docker 23"),
    ):
        monkeypatch.setattr(sandbox_confine, "landlock_abi", refuse(number))
        probe = probes()[0]
        assert not probe.ok
        assert probe.name == "Landlock"
        assert name in probe.detail
        assert remedy in probe.remedy
        assert str(probe) == f"Landlock: {probe.detail}; {probe.remedy}"


def test_probes_say_when_bubblewrap_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    probe = probes()[3]
    assert (probe.name, probe.ok) == ("bubblewrap", False)
    assert "apt-get install bubblewrap" in probe.detail


@confines
def test_probes_of_a_machine_that_can() -> None:
    found = {probe.name: probe for probe in probes()}
    assert found["Landlock"].ok and found["Landlock"].detail.startswith("ABI ")
    assert found["seccomp filter"].ok


def test_other_systems_are_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    (probe,) = probes()
    assert not probe.ok
    assert probe.detail == "this is darwin"
    assert "e2b or fusion" in probe.remedy
