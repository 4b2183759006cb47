"""FusionSandbox against a local server that speaks Sandbox Fusion's wire format."""

from __future__ import annotations

import ast
import base64
import importlib.util
import json
import os
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest

from mintrl_env.errors import ConfigError
from mintrl_env.tasks import Task
from mintrl_env.verifiers import remote_driver, sandbox_remote
from mintrl_env.verifiers.code_tests import CodeVerifier
from mintrl_env.verifiers.remote_service import Passing, Patience, retry_after
from mintrl_env.verifiers.sandbox import Call, Limits, Ran, Result, Sandbox, SandboxUnavailable
from mintrl_env.verifiers.sandbox_fusion import FusionSandbox

_SPEC = importlib.util.spec_from_file_location(
    "fake_fusion", Path(__file__).with_name("fake_fusion.py")
)
assert _SPEC is not None and _SPEC.loader is not None
fake_fusion = importlib.util.module_from_spec(_SPEC)
sys.modules["fake_fusion"] = fake_fusion
_SPEC.loader.exec_module(fake_fusion)
FakeFusion, Fault = fake_fusion.FakeFusion, fake_fusion.Fault

QUICK = Patience(tries=3, first_wait_s=0.02, longest_wait_s=0.05)
LIMITS = Limits(wall_s=5.0)
ECHO = "print(input()[::-1])"


@pytest.fixture
def fake() -> Iterator[Any]:
    server = FakeFusion()
    yield server
    server.close()


@pytest.fixture
def sandbox(fake: Any) -> Iterator[FusionSandbox]:
    made = FusionSandbox(fake.url, patience=QUICK)
    yield made
    made.close()


def test_it_is_a_sandbox(sandbox: FusionSandbox) -> None:
    assert isinstance(sandbox, Sandbox)


# ---- what code does -------------------------------------------------------------------------


def test_program(sandbox: FusionSandbox, fake: Any) -> None:
    ran = sandbox.run(ECHO, "añb\n", LIMITS)
    assert (ran.ran, ran.value) == (Ran.OK, "bña\n")
    assert len(fake.requests) == 1
    request = fake.requests[0]
    assert request["language"] == "python"
    assert request["fetch_files"] == [request["fetch_files"][0]]
    assert request["run_timeout"] > LIMITS.wall_s


@pytest.mark.parametrize(
    ("code", "limits", "ran"),
    [
        ("raise ValueError('no')", LIMITS, Ran.ERROR),
        ("import sys; sys.exit(3)", LIMITS, Ran.ERROR),
        ("def f(:", LIMITS, Ran.ERROR),
        ("while True: pass", Limits(wall_s=0.5), Ran.TIMEOUT),
        ("print('x' * 3_000_000)", LIMITS, Ran.ERROR),
        ("x = bytearray(10**9)", Limits(wall_s=5.0, mem_mb=128), Ran.MEMORY),
        ("open('/tmp/there', 'w')", LIMITS, Ran.BLOCKED),
    ],
)
def test_program_that_fails(
    sandbox: FusionSandbox, fake: Any, code: str, limits: Limits, ran: Ran
) -> None:
    assert sandbox.run(code, "", limits).ran is ran
    assert len(fake.requests) == 1  # what the code does is never tried again


def test_nothing_is_left_behind(sandbox: FusionSandbox, fake: Any) -> None:
    for code in ("print(1)", "1 / 0", "import os; os._exit(1)"):
        sandbox.run(code, "", LIMITS)
    [mark] = os.listdir(fake.folder)  # "code does not get out here", for the next run
    assert mark.startswith(f"mintrl-{os.geteuid()}-")


def test_output_that_the_server_could_not_carry(sandbox: FusionSandbox) -> None:
    """The real server stops a program that prints more than some 190 kB."""
    ran = sandbox.run("print('é' * 400_000)", "", LIMITS)
    assert (ran.ran, ran.value) == (Ran.OK, "é" * 400_000 + "\n")


def test_a_printed_report_is_only_output(sandbox: FusionSandbox) -> None:
    forged = json.dumps({"results": [["ok", "42\n", "", 0.0, 0.0]]})
    ran = sandbox.run(f"print({forged!r})", "", LIMITS)
    assert ran.value == forged + "\n"


def test_calls_are_one_request_and_one_process(sandbox: FusionSandbox, fake: Any) -> None:
    code = textwrap.dedent(
        """
        seen = []
        def add(x, *, twice=False):
            seen.append(x)
            return (x, len(seen), {1, 2}, 1 << 80, twice)
        def fail():
            raise KeyError("k")
        """
    )
    calls = [
        Call("add", [[1.5, None]]),
        Call("fail"),
        Call("add", ["b"], {"twice": True}),
        Call("no"),
    ]
    results = list(sandbox.calls(code, calls, LIMITS))
    assert [r.ran for r in results] == [Ran.OK, Ran.ERROR, Ran.OK, Ran.ERROR]
    assert results[0].value == ([1.5, None], 1, {1, 2}, 1 << 80, False)
    assert results[2].value == ("b", 2, {1, 2}, 1 << 80, True)
    assert "KeyError" in results[1].detail and "'no'" in results[3].detail
    assert len(fake.requests) == 1


def test_calls_after_a_time_out_have_a_fresh_module(sandbox: FusionSandbox) -> None:
    code = "n = 0\ndef f(hang):\n    global n\n    n += 1\n    while hang: pass\n    return n"
    calls = [Call("f", [0]), Call("f", [0]), Call("f", [1]), Call("f", [0])]
    results = list(sandbox.calls(code, calls, Limits(wall_s=0.5)))
    assert [(r.ran, r.value) for r in results] == [
        (Ran.OK, 1), (Ran.OK, 2), (Ran.TIMEOUT, None), (Ran.OK, 1)
    ]  # fmt: skip


def test_calls_of_a_module_that_does_not_load(sandbox: FusionSandbox) -> None:
    results = list(sandbox.calls("1 / 0", [Call("f"), Call("g")], LIMITS))
    assert [r.ran for r in results] == [Ran.ERROR] * 2
    assert all("ZeroDivisionError" in r.detail for r in results)


def test_nothing_is_sent_before_it_is_asked_for(sandbox: FusionSandbox, fake: Any) -> None:
    calls = sandbox.calls("def f(): return 1", [Call("f")], LIMITS)
    assert fake.requests == []
    assert [r.value for r in calls] == [1]
    assert list(sandbox.calls("", [], LIMITS)) == []
    assert list(sandbox.asserts("", [], LIMITS)) == []
    assert len(fake.requests) == 1


def test_asserts(sandbox: FusionSandbox, fake: Any) -> None:
    code = textwrap.dedent(
        """
        class Pair:
            def __init__(self, a): self.a = a
        def grow(items):
            items.append(len(items))
            return items[-1]
        def encode(text): return text[::-1]
        def decode(text): return text[::-1]
        def refuse(x): raise ValueError(f"not {x}")
        def weight(pair): return pair.a
        """
    )
    snippets = [
        "items = [7]\nassert grow(items) == 1\nassert items == [7, 1]",
        "import random\nfor _ in range(50):\n"
        "    text = str(random.random())\n    assert decode(encode(text)) == text",
        "try:\n    refuse(3)\n    assert False\nexcept ValueError as error:\n"
        "    assert str(error) == 'not 3'",
        "assert weight(Pair(5)) == 5",
        "assert grow(items) == 99",
        "assert missing(1) == 1",
    ]
    results = list(sandbox.asserts(code, snippets, LIMITS))
    assert [r.ran for r in results] == [Ran.OK] * 4 + [Ran.FAILED, Ran.ERROR]
    assert len(fake.requests) == 1


def test_what_a_snippet_expects_stays_out_of_the_code_s_process(sandbox: FusionSandbox) -> None:
    code = textwrap.dedent(
        """
        import gc, sys
        def look():
            texts = [t for o in gc.get_objects() if isinstance(o, dict) for t in o.values()]
            frame = sys._getframe()
            while frame:
                texts += frame.f_locals.values()
                frame = frame.f_back
            found = [t for t in texts if isinstance(t, str) and "zebra" + "-crossing" in t]
            for name in ("cmdline", "environ", "mem", "maps"):
                for pid in ("self", "1"):
                    try:
                        found += [n for n in [open(f"/proc/{pid}/{name}").read()] if "zebra-" in n]
                    except (OSError, ValueError):
                        pass
            return len(found)
        """
    )
    marker = "'zebra-crossing'"
    results = list(sandbox.asserts(code, [f"x = {marker}\nassert look() == 0"], LIMITS))
    assert [r.ran for r in results] == [Ran.OK], results[0].detail


def test_all_tests_together_are_bounded(
    sandbox: FusionSandbox, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Limits, "total_s", lambda *_: 0.1)
    limits = Limits(wall_s=0.02)
    code = "def f():\n    while True: pass"
    results = list(sandbox.calls(code, [Call("f")] * 200, limits))
    assert {r.ran for r in results} == {Ran.TIMEOUT}
    assert len(results) == 200 and "not run" in results[-1].detail
    assert len(fake.requests) == 1


# ---- a service that fails -------------------------------------------------------------------


@pytest.fixture
def quick_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that writes ECHO's report without running anything: half a second less a run."""
    text = '{"results": [["ok", "ba\\n", "", 0.0, 0.0]]}'
    monkeypatch.setattr(
        sandbox_remote,
        "_script",
        lambda job, report: f"with open({report!r}, 'w') as file: file.write({text!r})\n",
    )


PASSING = [
    Fault(429, body="slow down"),
    Fault(429, {"Retry-After": "0"}),
    Fault(408),
    Fault(500, body={"detail": "boom", "traceback": []}),
    Fault(502, body="<html>bad gateway</html>"),
    Fault(503, {"Retry-After": "nonsense"}),
    Fault(504),
    Fault(kind="reset"),
    Fault(kind="cut"),
    Fault(kind="killed"),
    Fault(200, body='{"status": "Succ'),
    Fault(200, body=[1, 2]),
    Fault(200, body={"status": "Success", "message": "", "run_result": None, "files": {}}),
    Fault(200, body={"status": "SandboxError", "message": "no place", "run_result": None}),
    Fault(200, body={"status": "Failed", "run_result": {"status": "TimeLimitExceeded"}}),
    Fault(200, body={"status": "SandboxError", "run_result": {"status": "Error", "stderr": "x"}}),
    Fault(200, body={"status": "Success", "run_result": "text", "files": []}),
]


@pytest.mark.parametrize("fault", PASSING, ids=lambda f: f"{f.kind}-{f.status}-{str(f.body)[:20]}")
@pytest.mark.usefixtures("quick_run")
def test_a_failure_that_passes(sandbox: FusionSandbox, fake: Any, fault: Any) -> None:
    fake.faults.append(fault)
    ran = sandbox.run(ECHO, "ab", LIMITS)
    assert (ran.ran, ran.value) == (Ran.OK, "ba\n")
    assert len(fake.requests) == 2


@pytest.mark.parametrize("fault", [Fault(503), Fault(kind="reset"), Fault(200, body="{")])
@pytest.mark.usefixtures("quick_run")
def test_a_failure_that_stays(sandbox: FusionSandbox, fake: Any, fault: Any) -> None:
    fake.faults.extend([fault] * 10)
    with pytest.raises(SandboxUnavailable, match=r"after 3 tries.*Patience"):
        sandbox.run(ECHO, "ab", LIMITS)
    assert len(fake.requests) == 3
    fake.faults.clear()
    assert sandbox.run(ECHO, "ab", LIMITS).ran is Ran.OK  # and works again once the service does


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault(401, body="who"), "no access.*token"),
        (Fault(403), "no access"),
        (Fault(402), "quota"),
        (Fault(429, body={"error": "Quota exceeded for this month"}), "quota"),
        (Fault(404, body={"detail": "Not Found"}), "address of a Sandbox Fusion server"),
        (Fault(422, body={"detail": []}), "/run_code"),
        (Fault(302, {"Location": "http://127.0.0.1:1/"}), "address of a Sandbox Fusion"),
    ],
)
@pytest.mark.usefixtures("quick_run")
def test_a_refusal_is_not_tried_again(
    sandbox: FusionSandbox, fake: Any, fault: Any, words: str
) -> None:
    fake.faults.append(fault)
    with pytest.raises(SandboxUnavailable, match=f"(?s){words}"):
        sandbox.run(ECHO, "ab", LIMITS)
    assert len(fake.requests) == 1


@pytest.mark.usefixtures("quick_run")
def test_retry_after_is_obeyed(fake: Any) -> None:
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=3), usegmt=True)
    fake.faults.extend([Fault(429, {"Retry-After": "1.2"}), Fault(503, {"Retry-After": soon})])
    began = time.time()
    with closing(FusionSandbox(fake.url, patience=QUICK)) as sandbox:
        assert sandbox.run(ECHO, "ab", LIMITS).ran is Ran.OK
    assert len(fake.times) == 3
    assert fake.times[1] - fake.times[0] >= 1.2
    assert time.time() - began >= 1.9  # the date has whole seconds


def test_a_retry_after_past_the_deadline_ends_the_tries(sandbox: FusionSandbox, fake: Any) -> None:
    fake.faults.append(Fault(429, {"Retry-After": "86400"}))
    with pytest.raises(SandboxUnavailable, match="asks for a wait of 86400 s"):
        sandbox.run(ECHO, "ab", LIMITS)
    assert len(fake.requests) == 1


def test_a_server_that_hangs(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_remote, "START_S", 0.1)
    fake.faults.extend([Fault(kind="hang")] * 5)
    patience = Patience(deadline_s=5, answer_s=0.2, tries=2, first_wait_s=0.01)
    with (
        closing(FusionSandbox(fake.url, patience=patience)) as sandbox,
        pytest.raises(SandboxUnavailable, match=r"2 tries.*no answer within"),
    ):
        sandbox.run(ECHO, "ab", Limits(wall_s=0.1))
    assert len(fake.requests) == 2


def test_the_deadline_is_over_everything(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_remote, "START_S", 0.1)
    fake.faults.extend([Fault(503), Fault(kind="hang")])
    patience = Patience(deadline_s=3, answer_s=60, tries=9, first_wait_s=0.01)
    with (
        closing(FusionSandbox(fake.url, patience=patience)) as sandbox,
        pytest.raises(SandboxUnavailable, match=r"no answer within .* answered 503"),
    ):
        sandbox.run(ECHO, "ab", Limits(wall_s=0.1))
    assert len(fake.requests) == 2


def test_nobody_listens() -> None:
    server = FakeFusion()
    server.close()
    with (
        closing(FusionSandbox(server.url, patience=QUICK)) as sandbox,
        pytest.raises(SandboxUnavailable, match=r"3 tries.*ConnectError"),
    ):
        sandbox.run(ECHO, "ab", LIMITS)


def test_a_machine_that_cannot_confine_is_refused_once(fake: Any) -> None:
    with (
        closing(FusionSandbox(fake.url, packages=["no_such_one"], patience=QUICK)) as sandbox,
        pytest.raises(SandboxUnavailable, match=r"no_such_one.*is not installed here"),
    ):
        sandbox.run(ECHO, "ab", LIMITS)
    assert len(fake.requests) == 1


def test_close_ends_what_is_open(fake: Any) -> None:
    sandbox = FusionSandbox(fake.url, patience=QUICK)
    fake.faults.append(Fault(kind="hang"))
    outcome: list[BaseException] = []
    thread = threading.Thread(target=_catch(lambda: sandbox.run(ECHO, "", LIMITS), outcome))
    thread.start()
    while not fake.requests:
        time.sleep(0.01)
    sandbox.close()
    thread.join(30)
    assert not thread.is_alive()
    assert isinstance(outcome[0], SandboxUnavailable) and "closed" in str(outcome[0])
    with pytest.raises(SandboxUnavailable, match="closed"):
        sandbox.run(ECHO, "", LIMITS)
    sandbox.close()


def test_threads_share_bounded_connections(fake: Any) -> None:
    results: list[Result] = []
    with closing(FusionSandbox(fake.url, concurrency=2, patience=QUICK)) as sandbox:
        threads = [
            threading.Thread(target=lambda n=n: results.append(sandbox.run(ECHO, f"{n}", LIMITS)))
            for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert sorted(str(r.value) for r in results) == [f"{n}\n" for n in range(8)]
    assert fake.most_running == 2
    assert fake.connections == 2


def test_in_a_forked_child(fake: Any) -> None:
    program = f"""
        import os, warnings
        warnings.simplefilter("ignore")
        from mintrl_env.verifiers.sandbox import Limits
        from mintrl_env.verifiers.sandbox_fusion import FusionSandbox
        sandbox = FusionSandbox({fake.url!r})
        print(sandbox.run("print(1)", "", Limits(wall_s=5)).value, flush=True)
        child = os.fork()
        if child == 0:
            print(sandbox.run("print(2)", "", Limits(wall_s=5)).value, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print(sandbox.run("print(3)", "", Limits(wall_s=5)).value, flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["1", "2", "3"], done.stderr
    assert len(fake.requests) == 3


# ---- in the verifier ------------------------------------------------------------------------


def test_verdicts_through_the_verifier(sandbox: FusionSandbox, fake: Any) -> None:
    verifier = CodeVerifier(sandbox=sandbox)
    tests = {"type": "call", "fn_name": "f", "inputs": [[1], [2]], "outputs": [2, 4]}
    task = Task("t", "double", verifier="code", tests=tests)
    right = verifier.score_sync(task, "```python\ndef f(x):\n    return 2 * x\n```")
    wrong = verifier.score_sync(task, "```python\ndef f(x):\n    return 3 * x\n```")
    assert (right.reward, right.status) == (1.0, "passed")
    assert (wrong.reward, wrong.status) == (0.0, "failed")
    assert len(fake.requests) == 2
    fake.faults.extend([Fault(503)] * 3)
    undecided = verifier.score_sync(task, "```python\ndef f(x):\n    return 2 * x\n```")
    assert not undecided.decided and "503" in undecided.detail


# ---- parts ----------------------------------------------------------------------------------


def test_addresses(monkeypatch: pytest.MonkeyPatch, fake: Any) -> None:
    monkeypatch.delenv("SANDBOX_FUSION_ENDPOINT", raising=False)
    with pytest.raises(ConfigError, match="SANDBOX_FUSION_ENDPOINT"):
        FusionSandbox()
    with pytest.raises(ConfigError, match="http://"):
        FusionSandbox("localhost:8080")
    monkeypatch.setenv("SANDBOX_FUSION_ENDPOINT", fake.url + "/run_code")
    with closing(FusionSandbox(token="tick", headers={"X-Team": "blue"})) as sandbox:
        assert sandbox.run(ECHO, "ab", LIMITS).value == "ba\n"
    sent = {name.lower(): value for name, value in fake.requests[0]["headers"].items()}
    assert (sent["authorization"], sent["x-team"]) == ("Bearer tick", "blue")


@pytest.mark.parametrize(
    "report",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"results": 3}',
        b'{"results": [["ok", "a", "", 0.0]]}',
        b'{"results": [["passed", "a", "", 0.0, 0.0]]}',
        b'{"results": [["ok", 5, "", 0.0, 0.0]]}',
        b'{"results": [["ok", "a", "", "soon", 0.0]]}',
        b'{"results": [["ok", "a", "", NaN, 0.0]]}',
        b'{"results": [["ok", "abcdefghi", "", 0.0, 0.0]]}',
        b'{"broken": "Traceback"}',
        b'{"refused": "no process could be started"}',
        b"[" * 100_000,
    ],
)
def test_a_report_that_makes_no_sense_is_the_service_s_fault(report: bytes) -> None:
    with pytest.raises(Passing):
        sandbox_remote._results(report, kind="run", limits=Limits(output_bytes=8))


def test_a_forged_value_is_plain_or_nothing() -> None:
    rows = [["ok", text, "", 0.0, 0.0] for text in ('{"o": [0, "x"]}', '{"q": 1}', "[[[", "[1]")]
    report = json.dumps({"results": rows}).encode()
    results = sandbox_remote._results(report, kind="calls", limits=LIMITS)
    assert [(r.ran, r.value) for r in results] == [(Ran.ERROR, None)] * 3 + [(Ran.OK, [1])]
    [snippet] = sandbox_remote._results(
        b'{"results": [["ok", [1], "", 0.0, 0.0]]}', kind="asserts", limits=LIMITS
    )
    assert snippet.value is None


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(None, None), ("", None), ("3", 3.0), ("0.5", 0.5), ("-1", None), ("inf", None), ("x", None),
     ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0)],
)  # fmt: skip
def test_retry_after_header(value: str | None, seconds: float | None) -> None:
    assert retry_after(value) == seconds


def test_what_is_sent_is_python_3_10() -> None:
    """The image of Sandbox Fusion runs code with Python 3.10."""
    packed = zlib.decompress(base64.b64decode(sandbox_remote._sources()))
    sources: dict[str, str] = json.loads(packed)
    sources["driver"] = Path(remote_driver.__file__).read_text()
    assert "mintrl_env/verifiers/sandbox_local.py" in sources
    assert not any("e2b" in name or "remote" in name for name in sources)
    launch = sources["mintrl_env/verifiers/sandbox_launch.py"]
    assert remote_driver.NO_SCRIPT_FOLDER in launch  # else what the driver strikes out is not there
    for name, source in sources.items():
        tree = ast.parse(source, name, feature_version=(3, 10))
        imported = {
            alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        }
        assert not imported & {"datetime.UTC", "typing.Self", "tomllib", "asyncio.timeout"}
        own = {n for n in imported if n.split(".")[0] == "mintrl_env"}
        assert {n.split(".")[0] for n in imported - own} <= {
            *sys.stdlib_module_names,
            *_siblings(sources),
        }


@pytest.mark.slow
def test_honest_and_hostile_programs(sandbox: FusionSandbox, fake: Any) -> None:
    spec = importlib.util.spec_from_file_location(
        "code_cases", Path(__file__).with_name("test_code_cases.py")
    )
    assert spec is not None and spec.loader is not None
    cases = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cases)
    if not cases.CASES.exists():
        pytest.skip("../shared/cases/code_sandbox.jsonl is not there")
    verifier = CodeVerifier(sandbox=sandbox)
    with cases.world() as here:
        wrong = [w for case in cases.load() for w in cases.problems(case, verifier, here)]
    assert wrong == []


def _siblings(sources: dict[str, str]) -> set[str]:
    return {Path(name).stem for name in sources}


def _catch(action: Callable[[], Any], into: list[BaseException]) -> Callable[[], None]:
    def run() -> None:
        try:
            action()
        except BaseException as error:
            into.append(error)

    return run
