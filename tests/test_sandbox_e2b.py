"""E2BSandbox: the real client of E2B against a local server that speaks the service's wire format."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mintrl_env.errors import ConfigError
from mintrl_env.tasks import Task
from mintrl_env.verifiers import sandbox_remote
from mintrl_env.verifiers.code_tests import CodeVerifier
from mintrl_env.verifiers.remote_service import Patience
from mintrl_env.verifiers.sandbox import Call, Limits, Ran, Result, Sandbox, SandboxUnavailable
from mintrl_env.verifiers.sandbox_e2b import E2BSandbox

pytest.importorskip("e2b_code_interpreter", reason="needs the extra `e2b`")

_SPEC = importlib.util.spec_from_file_location("fake_e2b", Path(__file__).with_name("fake_e2b.py"))
assert _SPEC is not None and _SPEC.loader is not None
fake_e2b = importlib.util.module_from_spec(_SPEC)
sys.modules["fake_e2b"] = fake_e2b
_SPEC.loader.exec_module(fake_e2b)
FakeE2B, Fault, KEY = fake_e2b.FakeE2B, fake_e2b.Fault, fake_e2b.KEY

QUICK = Patience(tries=3, first_wait_s=0.02, longest_wait_s=0.05)
LIMITS = Limits(wall_s=5.0)
ECHO = "print(input()[::-1])"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    server = FakeE2B()
    monkeypatch.setenv("E2B_API_URL", server.url)
    monkeypatch.setenv("E2B_SANDBOX_URL", server.url)
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    yield server
    server.close()


@pytest.fixture
def make(fake: Any) -> Iterator[Callable[..., E2BSandbox]]:
    made: list[E2BSandbox] = []

    def one(**options: Any) -> E2BSandbox:
        made.append(E2BSandbox(**{"api_key": KEY, "patience": QUICK, **options}))
        return made[-1]

    yield one
    for sandbox in made:
        sandbox.close()


def echoes(sandbox: E2BSandbox) -> bool:
    ran = sandbox.run(ECHO, "ab", LIMITS)
    return (ran.ran, ran.value) == (Ran.OK, "ba\n")


# ---- what code does -------------------------------------------------------------------------


def test_all_three_questions_in_one_machine(make: Callable[..., E2BSandbox], fake: Any) -> None:
    sandbox = make()
    assert isinstance(sandbox, Sandbox)
    assert echoes(sandbox)
    code = "def grow(x):\n    x.append(1)\n    return tuple(x)"
    [called] = sandbox.calls(code, [Call("grow", [[0]])], LIMITS)
    assert (called.ran, called.value) == (Ran.OK, (0, 1))
    snippets = ["x = [5]\nassert grow(x) == (5, 1)\nassert x == [5, 1]", "assert grow([]) == 2"]
    assert [r.ran for r in sandbox.asserts(code, snippets, LIMITS)] == [Ran.OK, Ran.FAILED]
    assert len(os.listdir(fake.folder)) == 1  # the mark that code was seen not to get out
    assert (len(fake.creations), len(fake.executions)) == (1, 3)
    asked = fake.creations[0]
    assert asked["templateID"] == "code-interpreter-v1"
    assert asked["allow_internet_access"] is False
    assert asked["timeout"] == 930
    assert fake.kills == []
    sandbox.close()
    assert len(fake.kills) == 1 and fake.machines == {}


@pytest.mark.parametrize(
    ("code", "limits", "ran"),
    [
        ("raise ValueError('no')", LIMITS, Ran.ERROR),
        ("import os; os._exit(4)", LIMITS, Ran.ERROR),
        ("while True: pass", Limits(wall_s=0.5), Ran.TIMEOUT),
        ("import socket; socket.create_connection(('127.0.0.1', 49999))", LIMITS, Ran.BLOCKED),
        ("import os; os.kill(os.getppid(), 9)", LIMITS, Ran.BLOCKED),
    ],
)
def test_what_the_program_does_is_its_own_fault(
    make: Callable[..., E2BSandbox], fake: Any, code: str, limits: Limits, ran: Ran
) -> None:
    sandbox = make()
    assert sandbox.run(code, "", limits).ran is ran
    assert echoes(sandbox)  # in the same machine
    assert (len(fake.creations), len(fake.executions), fake.kills) == (1, 2, [])


def test_large_input_and_output(make: Callable[..., E2BSandbox]) -> None:
    ran = make().run("import sys; print(sys.stdin.read()[::-1])", "xy" * 400_000, LIMITS)
    assert (ran.ran, ran.value) == (Ran.OK, "yx" * 400_000 + "\n")


# ---- the life of machines -------------------------------------------------------------------


@pytest.mark.usefixtures("quick_run")
def test_a_machine_is_replaced_after_its_runs(make: Callable[..., E2BSandbox], fake: Any) -> None:
    sandbox = make(runs=2, internet=True, template="mine", lifetime_s=300)
    assert all(echoes(sandbox) for _ in range(5))
    assert len(fake.creations) == 3
    assert fake.most_alive == 1  # the old one is gone before the next is made
    asked = fake.creations[0]
    assert (asked["templateID"], asked["allow_internet_access"]) == ("mine", True)
    assert asked["timeout"] == 330


@pytest.mark.usefixtures("quick_run")
def test_a_machine_that_may_not_live_long_enough_is_replaced(
    make: Callable[..., E2BSandbox], fake: Any
) -> None:
    sandbox = make(lifetime_s=20)  # a run may take longer than that
    assert echoes(sandbox) and echoes(sandbox)
    assert len(fake.creations) == 2
    assert fake.creations[0]["timeout"] > 50  # yet the service lets a run end


def test_machines_are_bounded_and_reused(make: Callable[..., E2BSandbox], fake: Any) -> None:
    sandbox = make(concurrency=2)
    results: list[Result] = []
    threads = [
        threading.Thread(target=lambda n=n: results.append(sandbox.run(ECHO, f"{n}", LIMITS)))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(str(r.value) for r in results) == [f"{n}\n" for n in range(8)]
    assert (len(fake.creations), len(fake.executions)) == (2, 8)
    assert (fake.most_alive, fake.most_running) == (2, 2)


def test_machines_are_killed_when_the_process_ends(fake: Any) -> None:
    program = f"""
        from mintrl_env.verifiers.sandbox import Limits
        from mintrl_env.verifiers.sandbox_e2b import E2BSandbox
        print(E2BSandbox({KEY!r}).run("print(7)", "", Limits(wall_s=5)).value)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split() == ["7"], done.stderr
    assert done.stderr == ""
    assert len(fake.kills) == 1 and fake.machines == {}


def test_a_forked_child_is_told(fake: Any) -> None:
    program = f"""
        import os, warnings
        warnings.simplefilter("ignore")
        from mintrl_env.verifiers.sandbox import Limits, SandboxUnavailable
        from mintrl_env.verifiers.sandbox_e2b import E2BSandbox
        sandbox = E2BSandbox({KEY!r})
        print(sandbox.run("print(1)", "", Limits(wall_s=5)).value, flush=True)
        child = os.fork()
        if child == 0:
            try:
                sandbox.run("print(2)", "", Limits(wall_s=5))
            except SandboxUnavailable as error:
                print("fork" in str(error), flush=True)
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
    assert done.stdout.split() == ["1", "True", "3"], done.stderr
    assert fake.machines == {}


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


CELL_FAULTS = [
    Fault(kind="dies"),
    Fault(kind="kernel"),
    Fault(kind="silent"),
    Fault(kind="garbage"),
    Fault(kind="reset"),
    Fault(kind="cut"),
    Fault(404, body="Context not found"),
    Fault(429, body="too many requests"),
    Fault(500, body="Internal Server Error"),
    Fault(502, body={"message": "The sandbox was not found", "code": 502}),
    Fault(503, body="busy"),
]


@pytest.mark.parametrize("fault", CELL_FAULTS, ids=lambda f: f"{f.kind}-{f.status}")
@pytest.mark.usefixtures("quick_run")
def test_a_machine_that_fails_is_replaced(
    make: Callable[..., E2BSandbox], fake: Any, fault: Any
) -> None:
    sandbox = make()
    assert echoes(sandbox)
    fake.cell_faults.append(fault)
    assert echoes(sandbox)
    assert (len(fake.creations), len(fake.executions)) == (2, 3)
    assert fake.kills[0] == fake.executions[1][0]  # also one that looks dead: it may cost money
    assert len(fake.machines) == 1


@pytest.mark.usefixtures("quick_run")
def test_a_machine_that_ended_between_two_runs(make: Callable[..., E2BSandbox], fake: Any) -> None:
    sandbox = make()
    assert echoes(sandbox)
    fake.end_machine(fake.executions[0][0])
    assert echoes(sandbox)
    assert (len(fake.creations), len(fake.executions)) == (2, 3)


@pytest.mark.usefixtures("quick_run")
def test_machines_that_keep_dying(make: Callable[..., E2BSandbox], fake: Any) -> None:
    sandbox = make()
    fake.cell_faults.extend([Fault(kind="dies")] * 3)
    with pytest.raises(SandboxUnavailable, match=r"3 tries.*Patience"):
        sandbox.run(ECHO, "ab", LIMITS)
    assert (len(fake.creations), len(fake.executions)) == (3, 3)
    assert echoes(sandbox)


CREATE_FAULTS = [
    Fault(429, body={"code": 429, "message": "too many requests"}),
    Fault(500, body={"code": 500, "message": "no node"}),
    Fault(503, body={"code": 503, "message": "no capacity"}),
    Fault(504, body="gateway"),
    Fault(409, body={"code": 409, "error_code": "sandbox_snapshot_guest_agent_unresponsive",
                     "message": "guest does not respond"}),
    Fault(201, body='{"sandboxID": "x'),
    Fault(201, body={"clientID": "x"}),
    Fault(kind="reset"),
    Fault(kind="cut"),
]  # fmt: skip


@pytest.mark.parametrize("fault", CREATE_FAULTS, ids=lambda f: f"{f.kind}-{f.status}")
@pytest.mark.usefixtures("quick_run")
def test_a_creation_that_fails_is_tried_again(
    make: Callable[..., E2BSandbox], fake: Any, fault: Any
) -> None:
    fake.faults.append(fault)
    assert echoes(make())
    assert (len(fake.creations), len(fake.executions)) == (2, 1)


@pytest.mark.usefixtures("quick_run")
def test_retry_after_of_a_rate_limit(make: Callable[..., E2BSandbox], fake: Any) -> None:
    """The first answer only says that it is no quota; from then on the client keeps to the header."""
    limited = Fault(429, {"Retry-After": "1"}, {"code": 429, "message": "too many requests"})
    fake.faults.extend([limited, limited])
    assert echoes(make())
    assert len(fake.times) == 3
    assert fake.times[2] - fake.times[1] >= 1.0


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault(401, body={"code": 401, "message": "Invalid API key"}), "no access.*E2B_API_KEY"),
        (Fault(403, body={"code": 403, "message": "team is blocked"}), "no access.*blocked"),
        (Fault(402, body={"code": 402, "message": "pay"}), "quota"),
        (
            Fault(429, body={"code": 429, "message": "you have reached the maximum number of "
                             "concurrent E2B sandboxes (20)"}),
            "quota.*concurrency",
        ),
        (Fault(400, body={"code": 400, "message": "bad timeout"}), "refuses.*E2BSandbox"),
        (Fault(404, body={"code": 404, "message": "template 'x' not found"}), "template 'x'"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("quick_run")
def test_a_refusal_is_not_tried_again(
    make: Callable[..., E2BSandbox], fake: Any, fault: Any, words: str
) -> None:
    sandbox = make()
    fake.faults.append(fault)
    with pytest.raises(SandboxUnavailable, match=words):
        sandbox.run(ECHO, "ab", LIMITS)
    assert (len(fake.creations), fake.executions) == (1, [])
    assert echoes(sandbox)


@pytest.mark.usefixtures("quick_run")
def test_a_key_that_is_wrong(make: Callable[..., E2BSandbox], fake: Any) -> None:
    with pytest.raises(SandboxUnavailable, match="no access"):
        make(api_key="e2b_1111").run(ECHO, "ab", LIMITS)
    assert len(fake.creations) == 1


@pytest.mark.usefixtures("quick_run")
def test_no_key(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="E2B_API_KEY"):
        E2BSandbox()
    with pytest.raises(ConfigError, match="runs"):
        E2BSandbox(KEY, runs=0)
    with pytest.raises(ConfigError, match=r"hurry.*deadline_s"):
        E2BSandbox(KEY, patience={"hurry": 1.0})
    monkeypatch.setenv("E2B_API_KEY", KEY)
    sandbox = E2BSandbox(patience={"tries": 1})
    assert echoes(sandbox)
    sandbox.close()
    assert fake.creations[0]["key"] == KEY


@pytest.mark.parametrize("where", ["faults", "cell_faults"])
def test_a_service_that_hangs(
    make: Callable[..., E2BSandbox], fake: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(sandbox_remote, "START_S", 0.1)
    getattr(fake, where).extend([Fault(kind="hang")] * 5)
    sandbox = make(patience=Patience(deadline_s=5, answer_s=0.7, tries=2, first_wait_s=0.01))
    with pytest.raises(SandboxUnavailable, match=r"2 tries.*(answer|imed out)"):
        sandbox.run(ECHO, "ab", Limits(wall_s=0.1))
    assert len(fake.creations) == 2
    sandbox.close()
    assert fake.machines == {}


@pytest.mark.usefixtures("quick_run")
def test_a_machine_that_comes_too_late_is_killed(
    make: Callable[..., E2BSandbox], fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_remote, "START_S", 0.1)
    fake.faults.append(Fault(kind="late", seconds=3.0))
    sandbox = make(patience=Patience(deadline_s=60, answer_s=1.5, tries=5, first_wait_s=0.01))
    assert sandbox.run(ECHO, "ab", Limits(wall_s=0.1)).ran is Ran.OK
    assert len(fake.creations) >= 2
    for _ in range(1000):
        if len(fake.kills) == len(fake.creations) - 1:
            break
        time.sleep(0.02)
    assert len(fake.kills) == len(fake.creations) - 1 and len(fake.machines) == 1
    sandbox.close()
    assert len(fake.kills) == len(fake.creations) and fake.machines == {}


def test_close_ends_what_is_open(make: Callable[..., E2BSandbox], fake: Any) -> None:
    sandbox = make()
    fake.cell_faults.append(Fault(kind="hang"))
    outcome: list[BaseException] = []

    def run() -> None:
        try:
            sandbox.run(ECHO, "", LIMITS)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while not fake.executions:
        time.sleep(0.01)
    sandbox.close()
    thread.join(30)
    assert not thread.is_alive()
    assert isinstance(outcome[0], SandboxUnavailable) and "closed" in str(outcome[0])
    assert len(fake.kills) == 1 and fake.machines == {}
    with pytest.raises(SandboxUnavailable, match="closed"):
        sandbox.run(ECHO, "", LIMITS)


# ---- in the verifier ------------------------------------------------------------------------


def test_verdicts_through_the_verifier(make: Callable[..., E2BSandbox], fake: Any) -> None:
    verifier = CodeVerifier(sandbox=make())
    tests = {"type": "stdin", "inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]}
    task = Task("t", "double", verifier="code", tests=tests)
    right = verifier.score_sync(task, "```python\nprint(2 * int(input()))\n```")
    wrong = verifier.score_sync(task, "```python\nprint(3 * int(input()))\n```")
    assert (right.reward, right.status) == (1.0, "passed")
    assert (wrong.reward, wrong.status) == (0.0, "failed")
    assert len(fake.executions) == 3  # the second test of the wrong one is never run
    fake.cell_faults.extend([Fault(kind="dies")] * 3)
    undecided = verifier.score_sync(task, "```python\nprint(2 * int(input()))\n```")
    assert not undecided.decided and "E2B" in undecided.detail


@pytest.mark.slow
def test_honest_and_hostile_programs(make: Callable[..., E2BSandbox], fake: Any) -> None:
    spec = importlib.util.spec_from_file_location(
        "code_cases", Path(__file__).with_name("test_code_cases.py")
    )
    assert spec is not None and spec.loader is not None
    cases = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cases)
    if not cases.CASES.exists():
        pytest.skip("../shared/cases/code_sandbox.jsonl is not there")
    verifier = CodeVerifier(sandbox=make())
    with cases.world() as here:
        wrong = [w for case in cases.load() for w in cases.problems(case, verifier, here)]
    assert wrong == []
    assert all(machine.kernel.poll() is None for machine in fake.machines.values())
    assert len(fake.creations) == 1  # no hostile program broke the machine
