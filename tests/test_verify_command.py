"""`mintrl verify`: verdicts in order, nothing in a file ends the run, nothing is left behind."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from mintrl_env import registry, verify
from mintrl_env.errors import MissingExtraError, RegistryError, StoreError, UsageError
from mintrl_env.scoring import score_batch
from mintrl_env.types import Score, Task
from mintrl_env.verify import BAD_ROW, Summary, make_verifier, options_of, verify_file


class Echo:
    """A verifier of one's own with no more than the protocol asks for: the response is the reward."""

    workers = 4

    def __init__(self) -> None:
        self.running = self.most = self.calls = 0

    async def score(self, task: Task, response: str) -> Score:
        self.calls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(0.002 * (self.calls % 5))
            if response == "raise":
                raise RuntimeError("no service")
            if response == "infinite":
                return Score(math.inf, "x")  # a UsageError
            if response == "missing":
                raise MissingExtraError("sympy", "math", "this")
            return Score(float(response), "rewarded", task.task_id)
        finally:
            self.running -= 1


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Echo:
    made = Echo()
    monkeypatch.setitem(registry._registered["verifier"], "echo", made)
    return made


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def verdicts(
    tmp_path: Path, rows: list[Any], kind: str = "math", **given: Any
) -> tuple[list[dict[str, Any]], Summary]:
    """Rows that are bytes are written as they are."""
    source, out = tmp_path / "rows.jsonl", tmp_path / "verdicts.jsonl"
    made = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    source.write_bytes(b"\n".join(made) + b"\n")
    summary = verify_file(source, out, kind=kind, **given)
    assert not out.with_name("verdicts.jsonl.part").exists()
    found = lines(out)
    assert all(list(row) == ["id", "reward", "status", "detail", "seconds"] for row in found)
    assert all(isinstance(row["seconds"], float) and 0 <= row["seconds"] < 60 for row in found)
    assert summary.rows == len(found)
    return found, summary


def test_math_rows(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "gold": "1/2", "response": r"so \boxed{0.5}", "expected": True},
        {"id": 7, "gold": r"\sqrt{50}", "response": r"\boxed{5\sqrt{2}}", "expected": 1},
        {"id": None, "gold": "3", "response": "#### 4", "expected": {"reward": 0.0}},
        {"gold": "3", "response": "I give up", "expected": True, "more": [1, {"a": None}]},
        {"id": ["x"], "gold": "", "response": r"\boxed{1}", "expected": False},
        {"id": "g", "gold": 12, "response": "The answer is 12."},
        {"id": "h", "gold": 2.5, "response": r"\boxed{5/2}", "expected": False},
    ]
    found, summary = verdicts(tmp_path, rows)
    assert [row["id"] for row in found] == ["a", 7, None, None, ["x"], "g", "h"]
    assert [row["reward"] for row in found] == [1.0, 1.0, 0.0, 0.0, None, 1.0, 1.0]
    assert [row["status"] for row in found] == [
        *("correct", "correct", "wrong", "no_answer", "bad_gold", "correct", "correct")
    ]
    assert (summary.expected, summary.right) == (6, 4)
    assert (summary.false_positives, summary.false_negatives) == (1, 1)
    assert (summary.decided, summary.rewards) == (6, 4.0)


def test_nothing_in_a_row_ends_the_run(tmp_path: Path) -> None:
    good = {"id": "good", "gold": "6", "response": r"\boxed{6}"}
    rows: list[Any] = [
        good,
        b'{"id": "s", "gold": "6", "response": "\\ud800 \\\\boxed{6}"}',
        b'{"id": "raw", "gold": "6", "response": "\xed\xa0\x80 \\\\boxed{6}"}',
        b'{"id": "nul", "gold": "6", "response": "\\u0000\x00 \\\\boxed{6}"}',
        {"id": "\ud800", "gold": "6", "response": r"\boxed{6}"},
        {"id": "long", "gold": "6", "response": "word " * 2_000_000 + r"\boxed{6}"},
        {"id": "gold", "gold": "9" * 100_000, "response": r"\boxed{6}"},
        b'{"id": "digits", "gold": ' + b"9" * 5000 + b', "response": "#### 9"}',
        b'{"id": 1e999, "gold": "6", "response": "#### 6", "expected": 1e999}',
        good,
    ]
    found, _ = verdicts(tmp_path, rows)
    assert [row["reward"] for row in found] == [1.0] * 6 + [0.0, 0.0, 1.0, 1.0]
    assert [row["id"] for row in found][4:] == [*("\ud800", "long", "gold", "digits", None, "good")]


BAD = [
    {},
    {"id": "x"},
    {"id": "x", "gold": "6"},
    {"id": "x", "response": "6"},
    {"id": "x", "gold": None, "response": "6"},
    {"id": "x", "gold": ["6"], "response": "6"},
    {"id": "x", "gold": True, "response": "6"},
    {"id": "x", "gold": "6", "response": None},
    {"id": "x", "gold": "6", "response": 6},
    {"id": "x", "gold": "6", "response": ["6"]},
    [1, 2],
    "text",
    None,
    3,
]


def test_a_row_that_cannot_be_scored_is_undecided(tmp_path: Path) -> None:
    found, summary = verdicts(tmp_path, BAD)
    assert [row["status"] for row in found] == [BAD_ROW] * len(BAD)
    assert {row["reward"] for row in found} == {None}
    assert all(row["detail"] for row in found)
    assert found[1]["detail"] == "no field 'response'; the row has id"
    assert found[5]["detail"] == "field 'gold' must be a text or a number, not a list"
    assert summary.decided == 0 and not summary.could_not_run


def test_code_rows_need_tests(tmp_path: Path) -> None:
    rows = [{"id": 1, "response": "x"}, {"id": 2, "response": "x", "tests": [1]}]
    for row in rows:
        read = verify.read_row(row, "code", line=1)
        assert read.task is None and "tests" in read.problem
    tests = {"type": "stdin", "inputs": ["1"], "outputs": ["1"]}
    row = {"id": 3, "response": "x", "tests": tests, "limits": {"wall_s": 1}, "gold": "ignored"}
    task = verify.read_row({**row, "entry_point": "f"}, "code", line=1).task
    assert task is not None and task.tests == tests
    assert task.metadata == {"limits": {"wall_s": 1}, "entry_point": "f"}


def test_lines_that_are_no_json_are_reported_and_skipped(tmp_path: Path) -> None:
    good = {"id": 1, "gold": "6", "response": "#### 6"}
    seen: list[tuple[int, str]] = []
    rows: list[Any] = [
        b"\xef\xbb\xbf" + json.dumps(good).encode() + b"\r",
        b"{not json}",
        b"",
        b"   \r",
        b"\xff\xfe",
        b'{"id": NaN}',
        b"[" * 100_000,
        b'{"id": 1} {"id": 2}',
        good,
    ]
    found, summary = verdicts(tmp_path, rows, on_unread=lambda n, why: seen.append((n, why)))
    assert [row["reward"] for row in found] == [1.0, 1.0]
    assert [number for number, _ in seen] == [2, 5, 6, 7, 8]
    assert summary.unread_lines == 5
    assert seen[0][1].startswith("not JSON") and seen[1][1].startswith("not UTF-8")


def test_a_line_that_is_too_long_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "MAX_LINE", 1 << 20)
    good = {"id": 1, "gold": "6", "response": "#### 6"}
    seen: list[int] = []
    long = {"id": 2, "gold": "6", "response": "x" * (3 << 20)}
    found, _ = verdicts(tmp_path, [good, long, good], on_unread=lambda n, _: seen.append(n))
    assert [row["id"] for row in found] == [1, 1] and seen == [2]


def test_an_empty_file(tmp_path: Path) -> None:
    assert verdicts(tmp_path, [b""])[0] == []


# --- any verifier --------------------------------------------------------------------------------


def test_a_verifier_of_ones_own(tmp_path: Path, echo: Echo) -> None:
    rows = [{"id": i, "response": str(i / 400)} for i in range(400)]
    rows[10]["response"], rows[20]["response"] = "raise", "infinite"
    found, summary = verdicts(tmp_path, rows, kind="echo")
    assert [row["id"] for row in found] == list(range(400))
    wanted = [None if i in (10, 20) else i / 400 for i in range(400)]
    assert [row["reward"] for row in found] == wanted
    assert found[10]["detail"] == "RuntimeError: no service"
    assert found[20]["status"] == "unavailable"
    assert echo.most == Echo.workers
    assert summary.statuses == {"rewarded": 398, "unavailable": 2}


def test_reading_keeps_a_short_way_ahead(tmp_path: Path, echo: Echo) -> None:
    read = 0
    real = verify.read_row

    def counted(*args: Any, **given: Any) -> Any:
        nonlocal read
        read += 1
        return real(*args, **given)

    ahead: list[int] = []
    rows = [{"id": i, "response": "1"} for i in range(1000)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "read_row", counted)
        verdicts(tmp_path, rows, kind="echo", on_row=lambda done: ahead.append(read - done.rows))
    assert max(ahead) <= 16 * Echo.workers + 1


def test_large_rows_wait_for_those_before_them(
    tmp_path: Path, echo: Echo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "_WINDOW_BYTES", 3000)
    rows = [{"id": i, "response": "1", "padding": "x" * 1000} for i in range(50)]
    verdicts(tmp_path, rows, kind="echo")
    assert echo.most <= 3


def test_a_missing_package_ends_the_run(tmp_path: Path, echo: Echo) -> None:
    with pytest.raises(MissingExtraError):
        verdicts(tmp_path, [{"id": 1, "response": "missing"}], kind="echo")
    part = tmp_path / "verdicts.jsonl.part"
    assert part.exists() and not (tmp_path / "verdicts.jsonl").exists()


def test_a_batch_by_any_verifier() -> None:
    """`score` alone is enough; a verifier's own `score_batch` is used where it has one."""
    verifier = Echo()
    pairs = [(Task(str(i), ""), text) for i, text in enumerate(["0.5", "raise", "0.25"] * 5)]
    scores = score_batch(verifier, pairs, at_once=3)
    assert [s.reward for s in scores if s.decided] == [0.5, 0.25] * 5
    assert [s.status for s in scores][1::3] == ["unavailable"] * 5
    assert verifier.most == 3
    with pytest.raises(UsageError, match="finite"):
        score_batch(verifier, [(Task("t", ""), "infinite")])

    class Own(Echo):
        answer: Any = None

        def score_batch(self, pairs: list[tuple[Task, str]]) -> Any:
            if self.answer is None:
                raise OSError("down")
            return self.answer

    own = Own()
    assert [s.status for s in score_batch(own, pairs)] == ["unavailable"] * 15
    own.answer = [Score(1.0, "fine")] * 15
    assert score_batch(own, pairs) == own.answer
    own.answer = [Score(1.0, "fine")] * 3
    with pytest.raises(UsageError, match="one Score for each of 15 pairs"):
        score_batch(own, pairs)


# --- settings ------------------------------------------------------------------------------------


def test_options_reach_the_verifier() -> None:
    made: Any = make_verifier("math", options_of("math", workers=3, timeout_s=0.5, sandbox=None))
    assert (made.workers, made.timeout_s) == (3, 0.5)
    assert options_of("code", workers=None, timeout_s=2.0, sandbox="x")["limits"] == {"wall_s": 2.0}
    with pytest.raises(UsageError, match="no option 'sandbox'; it takes: timeout_s, workers"):
        make_verifier("math", {"sandbox": "bwrap"})
    with pytest.raises(UsageError, match="must be positive"):
        make_verifier("math", {"timeout_s": -1.0})
    with pytest.raises(RegistryError, match="did you mean 'math'"):
        make_verifier("maths", {})


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    with pytest.raises(StoreError, match="cannot verify"):
        verify_file(rows, tmp_path / "out.jsonl")
    rows.write_text("{}\n")
    with pytest.raises(StoreError, match="the file to verify"):
        verify_file(rows, rows)
    with pytest.raises(StoreError, match="a folder"):
        verify_file(rows, tmp_path)
    assert rows.read_text() == "{}\n"
    made = tmp_path / "new" / "folder" / "out.jsonl"
    verify_file(rows, made)
    assert len(lines(made)) == 1


def shared(name: str) -> Path:
    path = Path(__file__).resolve().parents[2] / "shared" / "cases" / name
    if not path.exists():
        pytest.skip(f"the corpus {name} is not there: no ../shared beside the repository")
    return path


def test_the_corpus_of_code_cases(tmp_path: Path) -> None:
    """Those whose attack needs no harness are scored as they say, through the command's own path."""
    summary = verify_file(shared("code_sandbox.jsonl"), tmp_path / "out.jsonl", kind="code")
    if summary.could_not_run:
        pytest.skip("no sandbox on this machine")
    assert (summary.rows, summary.expected, summary.right) == (36, 36, 36)
    assert summary.status_right == summary.status_expected == 36


def test_the_corpus_of_math_cases(tmp_path: Path) -> None:
    summary = verify_file(shared("math_verify.jsonl"), tmp_path / "out.jsonl")
    assert summary.rows == summary.expected == 201 and summary.unread_lines == 0
    assert summary.false_positives <= 2 and summary.right >= 0.97 * 201


# --- the command ---------------------------------------------------------------------------------


def mintrl(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mintrl_env.cli", "verify", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, **env}
    )


def test_the_command(tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    row = {"id": "a", "gold": "6", "response": "#### 6", "expected": {"reward": 1, "status": "x"}}
    rows.write_text(json.dumps(row) + "\nnot json\n" + json.dumps({**row, "gold": "7"}) + "\n")
    done = mintrl(rows, "--kind", "math", "--out", out, "--workers", "1", COLUMNS="100")
    assert done.returncode == 0, done.stderr
    assert [row["reward"] for row in lines(out)] == [1.0, 0.0]
    assert f"{rows}:2: skipped: not JSON" in done.stderr
    for wanted in (
        "correct",
        "mean reward: 0.5000 of 2 decided",
        "accuracy: 50.00% (1 of 2), false positives 0, false negatives 1",
        "skipped: 1 line that is no JSON",
        f"written: {out}\n",
        "status as expected: 0 of 2",
    ):
        assert wanted in done.stdout
    done = mintrl(tmp_path / "none.jsonl", "--out", out)
    assert done.returncode == 1 and "error: cannot verify" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_without_any_worker(tmp_path: Path) -> None:
    """A run in which no row could be scored is no success."""
    (tmp_path / "down.py").write_text(
        "class Down:\n    async def score(self, task, response):\n        raise OSError('down')\n"
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"id": 1, "response": "x"}) + "\n")
    out = tmp_path / "out.jsonl"
    done = mintrl(rows, "--kind", "down:Down", "--out", out, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1 and "no row could be scored" in done.stderr
    assert lines(out)[0]["detail"] == "OSError: down"


def math_row(n: int) -> dict[str, Any]:
    """One that a worker decides."""
    return {"id": n, "gold": rf"\sqrt{{{2 * n * n}}}", "response": rf"\boxed{{{n}\sqrt2}}"}


def code_row(n: int) -> dict[str, Any]:
    """The first one answers, the others sleep until they are stopped."""
    code = f"```python\nimport time\ntime.sleep({n > 3} * 60)\nprint({n})\n```"
    tests = {"type": "stdin", "inputs": [""], "outputs": [str(n)]}
    return {"id": n, "response": code, "tests": tests, "limits": {"wall_s": 90}}


@pytest.mark.parametrize("row", [math_row, code_row])
def test_an_interrupt_leaves_whole_lines_and_no_process(
    tmp_path: Path, row: Callable[[int], dict[str, Any]]
) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    part = tmp_path / "out.jsonl.part"
    kind = "math" if row is math_row else "code"
    with open(rows, "w") as file:
        for n in range(3, 20_000):
            file.write(json.dumps(row(n)) + "\n")
    command = [sys.executable, "-m", "mintrl_env.cli", "verify", str(rows), "--out", str(out)]
    command += ["--kind", kind]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # A job in the background ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not (part.exists() and part.stat().st_size > 0) and time.monotonic() < deadline:
            time.sleep(0.02)
        started = psutil.Process(child.pid).children(recursive=True)
        child.send_signal(signal.SIGINT)
        _, stderr = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 130, stderr
    assert stderr == f"interrupted; the verdicts so far are in {part}\n"
    assert started and psutil.wait_procs(started, timeout=10)[1] == []
    assert not out.exists()
    found = lines(part)
    assert [row["id"] for row in found] == list(range(3, 3 + len(found))) and found
    if found[0]["status"] == "unavailable":
        pytest.skip("no sandbox on this machine")
    assert found[0]["reward"] == 1.0
