"""Code in the local sandbox: honest, broken and hostile, and the processes behind it."""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from mintrl_env.verifiers import sandbox_launch, sandbox_local
from mintrl_env.verifiers.sandbox import Call, Limits, Ran, Result, Sandbox, SandboxUnavailable
from mintrl_env.verifiers.sandbox_launch import LauncherDied
from mintrl_env.verifiers.sandbox_local import LocalSandbox
from mintrl_env.verifiers.sandbox_process import Process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the local sandbox is Linux only")

PATIENT = Limits(wall_s=60.0)
"""For code that ends by itself: no busy machine may turn it into a time-out."""
SHORT = Limits(wall_s=0.7)
"""For code that never ends."""


def unconfined() -> LocalSandbox:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LocalSandbox(unconfined=True)


def confines() -> bool:
    try:
        return LocalSandbox().run("", "", PATIENT).ran is Ran.OK
    except SandboxUnavailable:
        return False


@pytest.fixture(scope="module")
def box() -> Iterator[LocalSandbox]:
    """The best that this machine has: nothing below is about what confinement refuses."""
    sandbox = LocalSandbox() if confines() else unconfined()
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def confined() -> Iterator[LocalSandbox]:
    if not confines():
        pytest.skip("this machine has no Landlock or no seccomp filters")
    sandbox = LocalSandbox()
    yield sandbox
    sandbox.close()


def code(text: str) -> str:
    return textwrap.dedent(text)


def call(box: Sandbox, program: str, *args: Any, function: str = "f", **options: Any) -> Result:
    [result] = box.calls(code(program), [Call(function, args)], options.pop("limits", PATIENT))
    return result


def asserts(box: Sandbox, program: str, *snippets: str, limits: Limits = PATIENT) -> list[Result]:
    return list(box.asserts(code(program), [code(s) for s in snippets], limits))


def holds(box: Sandbox, program: str, *snippets: str) -> None:
    """Every snippet holds."""
    results = asserts(box, program, *snippets)
    assert [(r.ran, r.detail) for r in results] == [(Ran.OK, "")] * len(snippets)


class TestPrograms:
    @pytest.mark.parametrize(
        ("program", "stdin", "printed"),
        [
            ("print(sum(map(int, input().split())))", "1 2 3\n", "6\n"),
            ("import sys\nfor line in sys.stdin: print(line.strip()[::-1])", "ab\ncd", "ba\ndc\n"),
            ("import sys\nprint(sys.stdin.readline() + sys.stdin.read())", "1\n2\n", "1\n2\n\n"),
            ("print(open(0).read())", "x", "x\n"),
            ("import os\nprint(os.read(0, os.fstat(0).st_size))", "abc", "b'abc'\n"),
            ("print(repr(input()))", "3\r\n", "'3'\n"),
            ("n = input()\nprint(n.upper(), '✓', len(n))", "über\n", "ÜBER ✓ 4\n"),
            ("import sys\nsys.stdout.buffer.write(b'\\xff a')", "", "\ufffd a"),
            ("if __name__ == '__main__': print('main')", "", "main\n"),
            (
                "import sys\nprint(sys.stdin.mode, sys.stdout.mode, sys.stderr.mode,\n"
                "      sys.stdin.fileno(), sys.stdout.name, sys.stdin.encoding)",
                "",
                "r w w 0 <stdout> utf-8\n",
            ),
            ("n = 1\ndef f():\n    global n\n    n += 1\nf()\nprint(n)", "", "2\n"),
            ("import sys\nprint('a')\nsys.exit()\nprint('b')", "", "a\n"),
            ("import sys\nprint('a')\nsys.exit(0)", "", "a\n"),
            ("import os\nprint('a', flush=True)\nos._exit(0)", "", "a\n"),
            ("import atexit\natexit.register(print, 'bye')\nprint('hi')", "", "hi\nbye\n"),
            ("import sys\nprint('a')\nsys.stdout.flush()\nsys.stdout = None", "", "a\n"),
            ("import sys\nprint('a')\nsys.stdout.close()", "", "a\n"),
            ("import os\nos.closerange(3, 100)\nprint('a')", "", "a\n"),
            ("import sys\nprint(sys.argv, __file__)", "", "['solution.py'] solution.py\n"),
            ("import sys\nprint(len(sys.stdin.read()))", "é" * 300_000, "300000\n"),
            ("print('x' * 500_000)", "", "x" * 500_000 + "\n"),
        ],
    )
    def test_runs_as_python_runs_it(
        self, box: LocalSandbox, program: str, stdin: str, printed: str
    ) -> None:
        result = box.run(program, stdin, PATIENT)
        assert (result.ran, result.value, result.detail) == (Ran.OK, printed, "")
        assert 0 < result.seconds < 60
        assert result.memory_mb >= 0

    def test_threads_are_joined_and_daemons_are_not(self, box: LocalSandbox) -> None:
        program = """
            import threading, time
            def late():
                time.sleep(0.2)
                print("late")
            threading.Thread(target=late).start()
            threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
            print("main")
            """
        assert box.run(code(program), "", PATIENT).value == "main\nlate\n"

    def test_classes_that_look_themselves_up(self, box: LocalSandbox) -> None:
        program = """
            import dataclasses, pickle
            @dataclasses.dataclass
            class A:
                x: int
            print(pickle.loads(pickle.dumps(A(3))))
            """
        assert box.run(code(program), "", PATIENT).value == "A(x=3)\n"

    @pytest.mark.parametrize(
        "program",
        [
            "def d(n): return n and 1 + d(n - 1)\nprint(d(990))",
            "import sys\nsys.setrecursionlimit(10**6)\n"
            "def d(n): return n and 1 + d(n - 1)\nprint(d(50000))",
            "import functools, sys\nsys.setrecursionlimit(10**6)\n"
            "@functools.cache\ndef d(n): return n and 1 + d(n - 1)\nprint(d(20000))",
            "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 26)\n"
            "def d(n): return n and 1 + d(n - 1)\n"
            "t = threading.Thread(target=lambda: print(d(50000)))\nt.start()\nt.join()",
        ],
        ids=["default", "python", "through C", "thread"],
    )
    def test_deep_recursion(self, box: LocalSandbox, program: str) -> None:
        result = box.run(program, "", PATIENT)
        assert (result.ran, result.detail) == (Ran.OK, "")
        assert result.value in ("990\n", "50000\n", "20000\n")

    @pytest.mark.parametrize(
        ("program", "ran", "detail"),
        [
            ("1 / 0", Ran.ERROR, "ZeroDivisionError: division by zero"),
            ("print(1", Ran.ERROR, "SyntaxError"),
            ("print(1)\0", Ran.ERROR, "null bytes"),
            ("print('\ud800')", Ran.ERROR, "UnicodeEncodeError"),
            ("import sys; print(1); sys.exit(3)", Ran.ERROR, "SystemExit: 3"),
            ("import sys; sys.exit('bad')", Ran.ERROR, "SystemExit: bad"),
            ("import os; os._exit(7)", Ran.ERROR, "exit status 7"),
            ("import os; os.abort()", Ran.ERROR, "SIGABRT"),
            ("import os; os.kill(os.getpid(), 9)", Ran.ERROR, "SIGKILL"),
            ("import ctypes; ctypes.string_at(0)", Ran.ERROR, "SIGSEGV"),
            ("def d(): d()\nd()", Ran.ERROR, "RecursionError"),
            ("import nothing_like_this", Ran.ERROR, "ModuleNotFoundError"),
            ("bytearray(1 << 40)", Ran.MEMORY, "MemoryError"),
            ("b = []\nwhile True: b.append(bytes(10000))", Ran.MEMORY, "MemoryError"),
            ("b = []\nwhile True: b.append([1, 2])", Ran.MEMORY, ""),
            ("raise PermissionError(13, 'no')", Ran.BLOCKED, "PermissionError"),
            ("raise PermissionError('no')", Ran.ERROR, "PermissionError"),
            (
                "try: raise PermissionError(1, 'no')\nexcept OSError as e: raise ValueError from e",
                Ran.BLOCKED,
                "ValueError",
            ),
            (
                "class E(Exception):\n def __str__(self): 1 / 0\nraise E",
                Ran.ERROR,
                "cannot be shown",
            ),
        ],
    )
    def test_how_they_fail(self, box: LocalSandbox, program: str, ran: Ran, detail: str) -> None:
        result = box.run(program, "", Limits(wall_s=60, mem_mb=64))
        assert result.ran is ran, result
        assert detail in result.detail
        assert result.value is None

    @pytest.mark.parametrize(
        "program",
        [
            "while True: pass",
            "sum(iter(int, 1))",
            "import time; time.sleep(100)",
            "import atexit, time; atexit.register(time.sleep, 100)",
            "import threading, time; threading.Thread(target=time.sleep, args=(100,)).start()",
            """
            import signal
            for number in range(1, 32):
                try:
                    signal.signal(number, signal.SIG_IGN)
                except (OSError, ValueError):
                    pass
            while True:
                try:
                    while True: pass
                except BaseException: pass
            """,
        ],
        ids=["loop", "loop in C", "sleep", "exit handler", "thread", "ignores everything"],
    )
    def test_time_is_over(self, box: LocalSandbox, program: str) -> None:
        result = box.run(code(program), "", SHORT)
        assert (result.ran, result.value) == (Ran.TIMEOUT, None)
        assert "0.7 s" in result.detail
        assert 0.7 <= result.seconds < 30

    def test_output_up_to_the_last_byte_and_not_one_more(self, box: LocalSandbox) -> None:
        limits = Limits(wall_s=60, output_bytes=5000)
        assert box.run("print('x' * 4999)", "", limits).value == "x" * 4999 + "\n"
        over = box.run("print('x' * 5000)", "", limits)
        assert (over.ran, over.detail) == (Ran.ERROR, "printed more than 5000 bytes")

    def test_too_much_output_is_an_error_also_when_it_was_swallowed(
        self, box: LocalSandbox
    ) -> None:
        program = """
            import os, sys
            try:
                for _ in range(1000): sys.stdout.write("x" * 65536)
            except OSError: pass
            os._exit(0)
            """
        result = box.run(code(program), "", PATIENT)
        assert (result.ran, result.detail) == (Ran.ERROR, "printed more than 1048576 bytes")

    @pytest.mark.parametrize(
        "said",
        [
            {"unconfined": "nothing here is confined"},
            {"ready": True},
            {"flavour": "ok", "detail": "passed"},
            {"done": {"ran": "ok"}},
        ],
    )
    def test_what_a_program_says_on_our_socket_is_never_a_pass(
        self, box: LocalSandbox, said: dict[str, object]
    ) -> None:
        body = json.dumps(said).encode()
        frame = len(body).to_bytes(4, "big") + body
        result = box.run(f"import os\nos.write(3, {frame!r})\nos._exit(5)", "", PATIENT)
        assert result.ran is Ran.ERROR

    def test_runs_are_repeatable_but_for_random_numbers(self, box: LocalSandbox) -> None:
        order = "print({str(i) for i in range(50)}, list({'a', 'b', 'c'}))"
        assert box.run(order, "", PATIENT).value == box.run(order, "", PATIENT).value
        draw = "import random; print(random.random())"
        assert box.run(draw, "", PATIENT).value != box.run(draw, "", PATIENT).value

    def test_nothing_of_one_run_is_there_in_the_next(self, box: LocalSandbox) -> None:
        box.run(
            "import builtins, math\nbuiltins.kept = math.kept = 'a secret of the first'",
            "",
            PATIENT,
        )
        program = """
            import builtins, gc, math
            found = [hasattr(builtins, "kept"), hasattr(math, "kept")]
            # In pieces, so that this text is not found itself.
            wanted = "a secret " + "of the"
            dicts = [str(o.values())[:99] for o in gc.get_objects() if isinstance(o, dict)]
            found.append(any(wanted in text for text in dicts))
            print(found)
            """
        assert box.run(code(program), "", PATIENT).value == "[False, False, False]\n"

    def test_the_environment_is_empty(
        self, box: LocalSandbox, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RLVR_SECRET", "zq")
        fresh = LocalSandbox() if box._key[0] else unconfined()
        fresh._launcher.close()
        printed = fresh.run(
            "import os; print('RLVR_SECRET' in os.environ, os.getcwd())", "", PATIENT
        )
        assert printed.value == "False /\n"


class TestCalls:
    def test_values_and_one_process_for_all_calls(self, box: LocalSandbox) -> None:
        program = code(
            """
            n = 0
            def f(x, y=0):
                global n
                n += 1
                print("debug", x)
                return [n, x, y]
            class Counter2:
                def __init__(self): self.n = 0
                def up(self, by): self.n += by; return self.n
            """
        )
        calls = [
            Call("f", [1]),
            Call("f", ["a"], {"y": (2, {3})}),
            Call("Counter2.up", [5]),
            Call("Counter2.up", [5]),
            Call("f", [None]),
        ]
        results = list(box.calls(program, calls, PATIENT))
        assert [r.ran for r in results] == [Ran.OK] * 5
        assert [r.value for r in results] == [[1, 1, 0], [2, "a", (2, {3})], 5, 5, [3, None, 0]]
        assert all(r.memory_mb >= 0 for r in results)

    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            ("2**100", 2**100),
            ("float('nan')", math.nan),
            ("(1, [2], {3: {4}}, frozenset({5}), b'6', 7j, range(8), None, True)",
             (1, [2], {3: {4}}, frozenset({5}), b"6", 7j, range(8), None, True)),
            ("Counter('aab'), deque([1]), defaultdict(int, {1: 2}), OrderedDict(a=1)",
             ({"a": 2, "b": 1}, [1], {1: 2}, {"a": 1})),
            ("'\\ud800'", "\ud800"),
        ],
    )  # fmt: skip
    def test_plain_values_come_back_as_they_are(
        self, box: LocalSandbox, value: str, expected: object
    ) -> None:
        result = call(box, f"def f(): return {value}")
        assert result.ran is Ran.OK, result
        assert repr(result.value) == repr(expected)

    @pytest.mark.parametrize(
        ("program", "why"),
        [
            ("class L(list): pass\ndef f(): return L([1])", "class L"),
            ("class I(int): pass\ndef f(): return [I(1)]", "class I"),
            ("def f(): yield 1", "class generator"),
            ("def f(): return {}.keys()", "class dict_keys"),
            ("def f(): return namedtuple('P', 'a')(1)", "class P"),
            ("def f(): return [0] * 10**7", "2000000 values"),
            ("def f(): return 'x' * (1 << 25)", "16777216 characters"),
            ("def f():\n r = []\n for _ in range(10**5): r = [r]\n return r", "200 deep"),
            ("def f():\n r = []\n r.append(r)\n return r", "200 deep"),
        ],
    )
    def test_what_cannot_be_read_back_is_an_error(
        self, box: LocalSandbox, program: str, why: str
    ) -> None:
        result = call(box, program)
        assert result.ran is Ran.ERROR
        assert "cannot be read back" in result.detail
        assert why in result.detail

    def test_usual_names_are_there_without_an_import(self, box: LocalSandbox) -> None:
        program = """
            def f(n: List[int]) -> Optional[int]:
                return [
                    gcd(4, 6), bisect_left([1, 2], 2), bisect.bisect([1], 1), bisect([1], 1),
                    deepcopy([1]), copy.copy(2), pow(2, 3, 5), inf, math.isqrt(9), heapq.nlargest(1, n),
                    list(accumulate(n)), reduce(add, n), string.digits, sum(n), lru_cache(abs)(-2),
                ]
            """
        assert call(box, program, [1, 2]).value == [
            2, 1, 1, 1, [1], 2, 3, math.inf, 3, [2], [1, 3], 3, "0123456789", 3, 2,
        ]  # fmt: skip

    @pytest.mark.parametrize(
        ("program", "function"),
        [
            ("x = 1", "f"),
            ("x = 1", "gcd"),  # a usual name is not the code's
            ("x = 1", "len"),
            ("class Solution:\n def g(self): pass", "f"),
            ("class Solution:\n def g(self): pass", "Solution.f"),
            ("class A: pass", "B.f"),
        ],
    )
    def test_a_missing_function(self, box: LocalSandbox, program: str, function: str) -> None:
        result = call(box, program, function=function)
        assert result.ran is Ran.ERROR
        assert "the code" in result.detail

    def test_functions_that_are_found(self, box: LocalSandbox) -> None:
        assert call(box, "from math import gcd", 4, 6, function="gcd").value == 2
        assert call(box, "class Solution:\n def f(self, x): return x + 1", 4).value == 5
        assert call(box, "f = lambda x: -x", 4).value == -4
        assert call(box, "class A:\n @staticmethod\n def g(): return 3", function="A.g").value == 3

    @pytest.mark.parametrize(
        ("program", "ran", "detail"),
        [
            ("def f(x): raise KeyError(x)", Ran.ERROR, "KeyError: 1"),
            ("def f(x): raise StopIteration(x)", Ran.ERROR, "StopIteration: 1"),
            ("import sys\ndef f(x): sys.exit(0)", Ran.ERROR, "SystemExit: 0"),
            ("import os\ndef f(x): os._exit(0)", Ran.ERROR, "exit status 0 in f"),
            ("def f(x): return input()", Ran.ERROR, "EOFError"),
            ("f = 3", Ran.ERROR, "not callable"),
            ("def f(): pass", Ran.ERROR, "TypeError"),
            ("def f(x): return bytearray(1 << 40)", Ran.MEMORY, "MemoryError"),
            ("import os\ndef f(x): os.closerange(3, 99); return 1", Ran.ERROR, "in f"),
            # Loading fails: every call has that result.
            ("import sys\nsys.exit(0)", Ran.ERROR, "SystemExit: 0"),
            ("import os\nos._exit(0)", Ran.ERROR, "exit status 0 while the module was loaded"),
            ("1 / 0", Ran.ERROR, "ZeroDivisionError"),
            ("def f(x)", Ran.ERROR, "SyntaxError"),
            ("x = bytearray(1 << 40)", Ran.MEMORY, "MemoryError"),
            ("raise PermissionError(1, 'no')", Ran.BLOCKED, "PermissionError"),
            ("import builtins\ndel builtins.isinstance, builtins.len", Ran.ERROR, ""),
        ],
    )
    def test_how_they_fail(self, box: LocalSandbox, program: str, ran: Ran, detail: str) -> None:
        results = list(box.calls(program, [Call("f", [1])] * 2, PATIENT))
        assert [r.ran for r in results] == [ran, ran], results
        assert detail in results[0].detail
        assert [r.value for r in results] == [None, None]

    @pytest.mark.parametrize("end", ["while True: pass", "sum(iter(int, 1))", "os._exit(3)"])
    def test_after_a_call_that_ended_the_process_the_module_is_fresh(
        self, box: LocalSandbox, end: str
    ) -> None:
        program = f"import os\nn = 0\ndef f(x):\n global n\n n += 1\n if x:\n  {end}\n return n"
        limits = PATIENT if "exit" in end else SHORT
        results = list(box.calls(program, [Call("f", [x]) for x in (0, 0, 1, 0)], limits))
        failed = Ran.ERROR if "exit" in end else Ran.TIMEOUT
        assert [r.ran for r in results] == [Ran.OK, Ran.OK, failed, Ran.OK]
        assert [r.value for r in results] == [1, 2, None, 1]

    def test_a_module_that_never_loads(self, box: LocalSandbox) -> None:
        results = list(box.calls("while True: pass", [Call("f")] * 3, SHORT))
        assert [r.ran for r in results] == [Ran.TIMEOUT] * 3
        assert "while the module was loaded" in results[0].detail

    def test_calls_are_lazy_and_closing_ends_the_process(self, box: LocalSandbox) -> None:
        asked = []

        def calls() -> Iterator[Call]:
            for n in range(100):
                asked.append(n)
                yield Call("f", [n])

        program = "import os\ndef f(n): return os.getpid()"
        iterator = box.calls(program, calls(), PATIENT)
        pid = next(iterator).value
        assert asked == [0]
        assert psutil.pid_exists(pid)
        iterator.close()  # type: ignore[attr-defined]
        gone(pid)

    def test_arguments_that_cannot_be_sent_are_no_fault_of_the_code(
        self, box: LocalSandbox
    ) -> None:
        with pytest.raises(SandboxUnavailable, match="cannot be sent"):
            call(box, "def f(x): return 1", object())

    @pytest.mark.parametrize(
        ("said", "detail"),
        [
            (b"\xff\xff\xff\xff", "4294967295 bytes"),
            (b'{"status": "passed", "reward": 1}\n', "bytes, over"),
            ({"n": 99, "value": 12}, "no answer"),
            ({"n": 1, "value": {"nonsense": 1}}, "cannot be read"),
            ({"n": 1, "value": {"o": 1}}, "cannot be read"),
            ({"n": 1, "raised": 5}, ""),
            ({"n": 1}, "no answer"),
            ([1], "not a JSON object"),
            ({"n": 1, "value": {"e": [{"i": hex(k * (2**61 - 1))} for k in range(1, 999)]}},
             "same hash"),
        ],
    )  # fmt: skip
    def test_forged_answers_are_refused(self, box: LocalSandbox, said: Any, detail: str) -> None:
        if not isinstance(said, bytes):
            body = json.dumps(said).encode()
            said = len(body).to_bytes(4, "big") + body
        result = call(box, f"import os\ndef f():\n os.write(3, {said!r})\n return 1")
        assert result.ran is Ran.ERROR
        assert detail in result.detail

    def test_a_nest_that_would_be_too_deep_for_the_reader(self, box: LocalSandbox) -> None:
        program = """
            import os
            def f():
                body = b'{"n":1,"value":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
                body = len(body).to_bytes(4, "big") + body
                while body:
                    body = body[os.write(3, body):]
            """
        assert call(box, program).ran is Ran.ERROR

    def test_threads_that_are_left_running_end_with_the_process(self, box: LocalSandbox) -> None:
        program = """
            import os, threading, time
            def f():
                threading.Thread(target=time.sleep, args=(100,)).start()
                return os.getpid()
            """
        result = call(box, program)
        assert result.ran is Ran.OK
        gone(result.value)

    def test_what_a_function_does_to_its_arguments_stays_there(self, box: LocalSandbox) -> None:
        mine = [1]
        assert call(box, "def f(x): x.append(2); return x", mine).value == [1, 2]
        assert mine == [1]


class TestAsserts:
    def test_one_namespace_and_one_result_a_snippet(self, box: LocalSandbox) -> None:
        results = asserts(
            box,
            "def f(x): return x + 1",
            "import math\ny = f(1)",
            "assert y == 2",
            "assert f(1) == 3, 'no'",
            "assert f('a') == 3",
            "assert y == math.sqrt(4)",
        )
        assert [r.ran for r in results] == [Ran.OK, Ran.OK, Ran.FAILED, Ran.ERROR, Ran.OK]
        assert results[2].detail == "AssertionError: no at: assert f(1) == 3, 'no'"
        assert results[3].detail.startswith("TypeError: can only concatenate")

    def test_arguments_are_changed_in_place(self, box: LocalSandbox) -> None:
        holds(
            box,
            """
            def f(a): a.sort()
            def g(a):
                a[0].append(9)
                a.append(a[0])
            def h(d, s, b):
                d["k"] = [1]
                s.add(5)
                b[:] = b"xy"
            def same(a): return a
            """,
            "x = [3, 1]\nassert f(x) is None\nassert x == [1, 3]",
            "inner = [1]\nx = [inner, 2]\ng(x)\nassert inner == [1, 9]\n"
            "assert x == [[1, 9], 2, [1, 9]] and x[2] is inner and x[0] is inner",
            "d, s, b = {}, {1}, bytearray()\nh(d, s, b)\nassert (d, s, b) == ({'k': [1]}, {1, 5}, b'xy')",
            "x = [1]\nassert same(x) is x",
            "x = [1]\nx.append(x)\nassert same(x) is x and x[1] is x",
            "row = [0]\nx = [row, row]\nassert same(x)[0] is same(x)[1]",
        )

    def test_exceptions_reach_the_tests_with_their_type(self, box: LocalSandbox) -> None:
        holds(
            box,
            """
            class Mine(KeyError): pass
            def f(x): raise ValueError("negative", x)
            def g(): raise Mine("q")
            """,
            "try:\n    f(-1)\nexcept ValueError as e:\n    assert e.args == ('negative', -1)\n"
            "else:\n    raise AssertionError",
            "try:\n    g()\nexcept Mine as e:\n    assert e.args == ('q',)",
            "try:\n    g()\nexcept KeyError:\n    pass",
        )
        [result] = asserts(box, "def f(): assert False", "f()")
        assert result.ran is Ran.ERROR  # the code's own assert is no verdict of the tests

    def test_forms_of_tests(self, box: LocalSandbox) -> None:
        holds(
            box,
            """
            from collections import Counter, deque, namedtuple
            class Solution:
                def twice(self, x): return 2 * x
            def f(x): return x
            def keep(t, kind): return [x for x in t if isinstance(x, kind)]
            def gcd(a, b): return 7
            def point(): return namedtuple("P", "x y")(1, 2)
            def std(x): return Counter(x), deque(x, 5)
            def big(n): return list(range(n))
            """,
            "def check(candidate):\n    assert candidate(2) is 2\ncheck(f)",
            "def check(candidate):\n    assert candidate(x=3) == 6\ncheck(Solution().twice)",
            "assert twice(4) == 8",
            "assert keep((1, 'a', 2), int) == [1, 2]",
            "from math import *\nassert gcd(4, 6) == 7 and sqrt(4) == 2",
            "assert point() == (1, 2)",
            "from collections import Counter, deque\n"
            "assert std('aab') == (Counter('aab'), deque('aab', 5))",
            "assert f(re.sub('a', 'b', 'aa')) == 'bb' and sys.maxsize > 2",
            "assert f(iter([1, 2])) is not None and list(f(x for x in [1])) == [1]",
            "def typed(x: List[int]) -> int: return f(x)\nassert typed([1]) == [1]",
            "assert big(300_000) == list(range(300_000))",
        )

    def test_functions_of_the_tests(self, box: LocalSandbox) -> None:
        holds(
            box,
            """
            def apply(f, *args): return [f(x) for x in args]
            def catch(f):
                try: f(1)
                except ValueError as error: return str(error)
            class Box:
                def __init__(self, n): self.n = n
            def boxed(f, n): return f(Box(n))
            """,
            "assert apply(lambda x: x * 2, 1, 'a') == [2, 'aa']",
            "seen = []\nassert apply(lambda x: seen.append(x), 1, [2]) == [None, None]\n"
            "assert seen == [1, [2]]",
            "assert apply(len, [1], 'ab') == [1, 2]",
            "def bad(x): raise ValueError('no')\nassert catch(bad) == 'ValueError: no'",
            "assert boxed(lambda b: b.n + 1, 4) == 5",
            "assert apply(lambda f: f(2), lambda x: x + 1) == [3]",
        )
        results = asserts(
            box, "def f(g): return g(1)", "f(lambda x: 1 / 0)", "assert f(lambda x: x) == 1"
        )
        assert [r.ran for r in results] == [Ran.ERROR, Ran.OK]

    def test_objects_of_the_code(self, box: LocalSandbox) -> None:
        holds(
            box,
            """
            class Node:
                def __init__(self, data): self.data, self.left, self.right = data, None, None
                def __len__(self): return 4
                def __str__(self): return "a node"
                def __getitem__(self, key): return key + 1
            def height(node): return 0 if node is None else 1 + max(height(node.left), height(node.right))
            def total(nodes): return sum(node.data for node in nodes)
            def up(n):
                for i in range(n): yield i
            def forever():
                while True: yield 1
            def thunks(): return [lambda: 5]
            """,
            "root = Node(1)\nroot.left = Node(2)\nroot.left.left = Node(4)\n"
            "assert height(root) == 3 and root.left.left.data == 4 and root.right is None\n"
            "assert root.left is root.left and total([root, root.left]) == 3",
            "assert len(root) == 4 and str(root) == 'a node' and root[2] == 3",
            "assert list(up(3)) == [0, 1, 2] and sum(x for x in up(4)) == 6",
            "from itertools import islice\nassert list(islice(forever(), 3)) == [1, 1, 1]",
            "it = up(1)\nassert next(it) == 0\ntry:\n    next(it)\nexcept StopIteration:\n    pass\n"
            "else:\n    assert False",
            "assert thunks()[0]() == 5 and up.__name__ == 'up'",
        )

    @pytest.mark.parametrize(
        "test",
        [
            "assert f() == 1",
            "assert not f() != 1",
            "assert f() in [1, 2]",
            "assert 3 in f()",
            "assert [f()] == [1]",
            "assert {'a': f()} == {'a': 1}",
            "assert abs(f() - 2) < 1e-6",
            "assert f() < 3",
            "assert f() >= 3",
            "assert max(f(), 3) == 3",
            "assert round(f(), 2) == 1",
            "import math\nassert math.isclose(f(), 1)",
            "assert int(f()) == 1 and float(f()) == 1",
            "assert isinstance(f(), int)",
            "assert 1 == f()",
            "assert abs(f()) == 0",
        ],
    )
    def test_no_operator_of_the_code_decides(self, box: LocalSandbox, test: str) -> None:
        program = """
            class Yes(int):
                def __eq__(self, other): return True
                def __ne__(self, other): return False
                def __sub__(self, other): return 0
                __rsub__ = __abs__ = __round__ = lambda self, *a: 0
                def __lt__(self, other): return True
                __gt__ = __le__ = __ge__ = __contains__ = __lt__
                def __hash__(self): return hash(1)
                def __index__(self): return 1
                __int__ = __index__
                def __float__(self): return 1.0
                __class__ = int
            def f(): return Yes()
            """
        [result] = asserts(box, program, test)
        assert result.ran in (Ran.FAILED, Ran.ERROR)

    def test_nothing_of_the_library_stands_in_for_missing_code(self, box: LocalSandbox) -> None:
        for test in ("assert gcd(4, 6) == 2", "assert f() == 1", "assert Counter('a') == {'a': 1}"):
            [result] = asserts(box, "pass", test)
            assert result.ran is Ran.ERROR
            assert "NameError" in result.detail

    def test_the_code_cannot_replace_what_the_tests_use(self, box: LocalSandbox) -> None:
        program = """
            import builtins
            class math: isclose = staticmethod(lambda *a, **k: True)
            def abs(x): return 0
            def all(x): return True
            builtins.AssertionError = SystemExit
            builtins.abs = abs
            def f(): return 5
            """
        results = asserts(
            box,
            program,
            "assert math.isclose(f(), 4)",
            "assert abs(f() - 4) < 1",
            "assert all([f() == 4])",
        )
        assert [r.ran for r in results] == [Ran.FAILED] * 3

    def test_how_the_code_fails(self, box: LocalSandbox) -> None:
        program = """
            import os, sys
            def f(x):
                if x == 1: os._exit(0)
                if x == 2: sys.exit(0)
                if x == 3: bytearray(1 << 40)
                if x == 4: raise PermissionError(13, "no")
                if x == 5: return [0] * 10**7
                return x
            """
        results = asserts(
            box,
            program,
            "assert f(1) == 1",
            "assert f(2) == 2",
            "f(3)",
            "f(4)",
            "f(5)",
            "assert f(6) == 6",
        )
        assert [r.ran for r in results] == [
            Ran.ERROR, Ran.ERROR, Ran.MEMORY, Ran.BLOCKED, Ran.ERROR, Ran.OK,
        ]  # fmt: skip
        assert results[0].detail == "exit status 0 in a call of the tests"

    def test_a_module_that_does_not_load(self, box: LocalSandbox) -> None:
        for program in ("import os\nos._exit(0)", "1 / 0", "def f(:"):
            results = asserts(box, program, "assert f() == 1", "pass")
            assert [r.ran for r in results] == [Ran.ERROR] * 2

    def test_a_call_that_hangs_takes_its_snippet_only(self, box: LocalSandbox) -> None:
        program = "def f(x):\n    while x: pass\n    return 5"
        results = asserts(
            box,
            program,
            "kept = 5",
            "assert f(1) == 5",
            "try:\n    f(1)\nexcept:\n    pass",
            "assert f(0) == kept",
            limits=Limits(wall_s=1.5),
        )
        assert [r.ran for r in results] == [Ran.OK, Ran.TIMEOUT, Ran.TIMEOUT, Ran.OK]

    def test_tests_that_hang_by_themselves(self, box: LocalSandbox) -> None:
        """What had held before is run again in the new process, so that the names are there."""
        results = asserts(
            box,
            "def f(x): return x\ndef forever():\n    while True: yield 1",
            "kept = f(5)",
            "sum(forever())",
            "assert f(5) == kept",
            limits=Limits(wall_s=1.5),
        )
        assert [r.ran for r in results] == [Ran.OK, Ran.TIMEOUT, Ran.OK]

    def test_forged_answers_are_refused(self, box: LocalSandbox) -> None:
        program = """
            import json, os
            def f(said):
                body = json.dumps(said).encode()
                os.write(3, len(body).to_bytes(4, "big") + body)
                return 5
            """
        for said in ({"done": {"ran": "ok"}}, {"n": 7, "value": 1}, {"gone": ""}, [1], 1):
            [result] = asserts(box, program, f"assert f({said!r}) == 1")
            assert result.ran is Ran.ERROR, said

    def test_the_code_sees_nothing_of_the_tests(self, box: LocalSandbox) -> None:
        program = """
            import gc, sys
            def f(x):
                seen, frame = [], sys._getframe()
                while frame:
                    seen.append(str(frame.f_locals))
                    frame = frame.f_back
                seen += [str(thing) for thing in gc.get_objects() if type(thing) in (list, tuple)]
                wanted = "opa" + chr(108)  # in pieces, so that this text is not found itself
                return any(wanted in text for text in seen)
            """
        holds(box, program, "assert f(1) is False, 'kx7-3391-opal'")


class TestConfinement:
    """That the processes are confined at all; tests of what confinement refuses stand elsewhere."""

    @pytest.mark.parametrize(
        "program",
        [
            "open('{marker}', 'w')",
            "import socket\nsocket.create_connection(('127.0.0.1', 9))",
            "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:9/')",
            "import subprocess\nsubprocess.run(['true'])",
            "import os\nos.fork()",
            "import os\nos.kill(os.getppid(), 9)",
        ],
    )
    def test_it_is_refused(self, confined: LocalSandbox, tmp_path: Path, program: str) -> None:
        marker = tmp_path / "marker"
        result = confined.run(program.replace("{marker}", str(marker)), "", PATIENT)
        assert result.ran is Ran.BLOCKED, result
        assert not marker.exists()

    def test_as_a_module_and_in_calls(self, confined: LocalSandbox) -> None:
        assert call(confined, "open('/etc/passwd')").ran is Ran.BLOCKED
        assert call(confined, "def f(): open('/etc/passwd')").ran is Ran.BLOCKED
        assert asserts(confined, "def f(): open('/etc/passwd')", "f()")[0].ran is Ran.BLOCKED

    def test_the_tests_are_confined_too(self, confined: LocalSandbox) -> None:
        assert asserts(confined, "", "open('/etc/passwd')")[0].ran is Ran.ERROR

    def test_a_child_that_cannot_be_confined_runs_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = Path(sandbox_launch.__file__).parent
        for path in folder.glob("*.py"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
        (tmp_path / "sandbox_confine.py").write_text(
            "def prepare(packages): return 1\n"
            "def confine(plan, **options): raise OSError(38, 'Function not implemented')\n"
        )
        monkeypatch.setattr(sandbox_launch, "__file__", str(tmp_path / "sandbox_launch.py"))
        launcher = sandbox_launch.ZygoteLauncher(confine=True)
        sandbox = LocalSandbox()
        monkeypatch.setattr(sandbox, "_launcher", launcher)
        try:
            for action in (
                lambda: sandbox.run("print(1)", "", PATIENT),
                lambda: call(sandbox, "def f(): return 1"),
                lambda: asserts(sandbox, "", "pass"),
            ):
                with pytest.raises(SandboxUnavailable, match="Function not implemented"):
                    action()
        finally:
            launcher.close()

    def test_a_machine_without_it_is_told_so(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = Path(sandbox_launch.__file__).parent
        for path in folder.glob("*.py"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
        (tmp_path / "sandbox_confine.py").write_text(
            "def prepare(packages): raise OSError(38, 'landlock_create_ruleset')\nconfine = None\n"
        )
        monkeypatch.setattr(sandbox_launch, "__file__", str(tmp_path / "sandbox_launch.py"))
        launcher = sandbox_launch.ZygoteLauncher(confine=True)
        with pytest.raises(SandboxUnavailable, match="landlock_create_ruleset"):
            launcher.launch([], PATIENT, 1.0)
        launcher.close()

    def test_unconfined_is_loud(self) -> None:
        with pytest.warns(RuntimeWarning, match="UNCONFINED"):
            LocalSandbox(unconfined=True)

    def test_unconfined_code_can_fork_but_its_orphans_are_killed(self, tmp_path: Path) -> None:
        marker = tmp_path / "pids"
        program = f"""
            import os, time
            print(7, flush=True)
            for _ in range(3):
                if os.fork() == 0:
                    os.setsid()
                    if os.fork() == 0:
                        with open({str(marker)!r}, "a") as file: print(os.getpid(), file=file)
                        time.sleep(300)
                    os._exit(0)
            while True:
                time.sleep(0.01)
                if len(open({str(marker)!r}).read().split()) == 3: break
            """
        marker.touch()
        result = unconfined().run(code(program), "", PATIENT)
        assert (result.ran, result.value) == (Ran.OK, "7\n")
        pids = [int(word) for word in marker.read_text().split()]
        assert len(pids) == 3
        for pid in pids:
            gone(pid)


def gone(pid: int, within_s: float = 30.0) -> None:
    """Wait until a process is no more."""
    deadline = time.monotonic() + within_s
    while psutil.pid_exists(pid):
        assert time.monotonic() < deadline, f"process {pid} still lives"
        time.sleep(0.01)


def good(box: Sandbox) -> list[object]:
    """An honest test of each type."""
    return [
        box.run("print(int(input()) + 1)", "4", PATIENT).value,
        call(box, "def f(x): return x + 1", 5).value,
        asserts(box, "def f(x): return x + 1", "assert f(6) == 7")[0].ran,
    ]


GOOD: list[object] = ["5\n", 6, Ran.OK]


@pytest.fixture
def own(box: LocalSandbox) -> Iterator[Callable[[], LocalSandbox]]:
    """Makes the sandbox of a test's own, whose zygote may be killed."""
    launcher = sandbox_launch.ZygoteLauncher(confine=box._key[0])
    sandbox = LocalSandbox() if box._key[0] else unconfined()
    sandbox._launcher = launcher
    yield lambda: sandbox
    launcher.close()


class TestProcesses:
    def test_one_zygote_serves_all_and_is_replaced_when_it_dies(self, own: Any) -> None:
        box = own()
        assert good(box) == GOOD
        [pid] = box.pids()
        assert good(box) == GOOD
        assert box.pids() == [pid]
        os.kill(pid, signal.SIGKILL)
        assert good(box) == GOOD
        assert box.pids() != [pid]

    def test_a_zygote_that_dies_under_a_program(self, own: Any) -> None:
        """The program is run again; the child of the dead zygote dies with it."""
        box = own()
        good(box)
        [pid] = box.pids()
        threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
        result = box.run("import time\ntime.sleep(1.5)\nprint(5)", "", PATIENT)
        assert (result.ran, result.value) == (Ran.OK, "5\n")
        assert box.pids() != [pid]

    def test_a_zygote_that_dies_between_two_calls(self, own: Any) -> None:
        box = own()
        results = box.calls(
            "import os\ndef f(x): return x, os.getpid()",
            [Call("f", [i]) for i in range(4)],
            PATIENT,
        )
        first = next(results).value
        os.kill(box.pids()[0], signal.SIGKILL)
        rest = [result.value for result in results]
        assert [value[0] for value in [first, *rest]] == [0, 1, 2, 3]
        gone(first[1])

    def test_zygotes_that_keep_dying_leave_the_row_undecided(self, own: Any) -> None:
        box = own()
        good(box)
        stop = threading.Event()

        def killer() -> None:
            while not stop.wait(0.05):
                for pid in box.pids():
                    os.kill(pid, signal.SIGKILL)

        thread = threading.Thread(target=killer)
        thread.start()
        try:
            with pytest.raises(SandboxUnavailable):
                box.run("import time\ntime.sleep(5)", "", PATIENT)
        finally:
            stop.set()
            thread.join()
        assert good(box) == GOOD

    def test_after_every_attempt_the_next_honest_test_passes(self, box: LocalSandbox) -> None:
        for program in (
            "import os\nos.kill(0, 9)",
            "import os\nos.closerange(0, 1000)",
            "import signal, os\nos.kill(os.getppid(), signal.SIGTERM)",
            "import os\nwhile True: os.write(3, b'x' * 65536)",
        ):
            assert box.run(program, "", SHORT).ran is not Ran.OK or "closerange" in program
            assert good(box) == GOOD

    def test_many_threads_at_once(self, box: LocalSandbox) -> None:
        def one(n: int) -> object:
            if n % 3 == 0:
                return box.run("print(int(input()) + 1)", str(n), PATIENT).value == f"{n + 1}\n"
            if n % 3 == 1:
                return call(box, "def f(x): return x + 1", n).value == n + 1
            return (
                asserts(box, "def f(x): return x + 1", f"assert f({n}) == {n + 1}")[0].ran is Ran.OK
            )

        with ThreadPoolExecutor(16) as executor:
            assert all(executor.map(one, range(90)))

    def test_asyncio(self, box: LocalSandbox) -> None:
        async def many() -> list[list[object]]:
            return await asyncio.gather(*(asyncio.to_thread(good, box) for _ in range(8)))

        assert asyncio.run(many()) == [GOOD] * 8

    def test_a_daemonic_forked_process_has_a_zygote_of_its_own(self, box: LocalSandbox) -> None:
        good(box)
        before = box.pids()
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        process = context.Process(
            target=lambda: queue.put((good(box), box.pids(), os.getpid())), daemon=True
        )
        with warnings.catch_warnings():  # that this process has threads
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        values, pids, _ = queue.get()
        process.join()
        assert values == GOOD
        assert len(pids) == 1
        assert pids != before
        gone(pids[0])
        assert good(box) == GOOD
        assert box.pids() == before

    def test_closing_ends_everything(self, own: Any) -> None:
        box = own()
        pid = call(box, "import os\ndef f(): return os.getppid()").value
        assert [pid] == box.pids()
        running = box.calls("import os\ndef f(): return os.getpid()", [Call("f")] * 2, PATIENT)
        child = next(running).value
        box._launcher.close()
        gone(pid)
        gone(child)
        assert box.pids() == []

    def test_a_closed_sandbox_says_so_and_leaves_its_sisters_alone(self, box: LocalSandbox) -> None:
        other = LocalSandbox() if box._key[0] else unconfined()
        good(other)
        pids = other.pids()
        other.close()
        other.close()
        for action in (
            lambda: other.run("", "", PATIENT),
            lambda: other.calls("", [], PATIENT),
            lambda: other.asserts("", [], PATIENT),
        ):
            with pytest.raises(SandboxUnavailable, match="closed"):
                action()
        assert box.pids() == pids
        assert good(box) == GOOD

    def test_other_systems_are_told_what_to_use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sandbox_launch.sys, "platform", "darwin")
        with pytest.raises(
            SandboxUnavailable, match="needs Linux, this is darwin; use a remote one"
        ):
            sandbox_launch.ZygoteLauncher(confine=True).launch([], PATIENT, 1.0)

    def test_it_is_a_sandbox(self) -> None:
        assert isinstance(LocalSandbox(), Sandbox)
        assert LocalSandbox().name == "local"

    def test_packages_are_importable_where_they_were_asked_for(self, box: LocalSandbox) -> None:
        assert call(box, "def f():\n import numpy").detail.startswith("ModuleNotFoundError")
        if not box._key[0]:
            pytest.skip("one zygote with numpy is enough, and this one would be unconfined")
        with_numpy = LocalSandbox(packages=("numpy",))
        program = """
            import numpy as np
            def f(x): return (np.array(x) @ np.eye(len(x))).tolist()
            def draw(): return float(np.random.rand())
            """
        try:
            assert call(with_numpy, program, [1.5, 2.0]).value == [1.5, 2.0]
            draws = [call(with_numpy, program, function="draw").value for _ in range(2)]
            assert draws[0] != draws[1]
        finally:
            with_numpy.close()
        with pytest.raises(SandboxUnavailable, match="'no_such_package'"):
            good(LocalSandbox(packages=("no_such_package",)))


class TestSpares:
    """Processes that are started ahead."""

    def test_they_are_used_in_quick_succession_and_soon_gone(self, own: Any) -> None:
        box = own()
        program = "import os\ndef f(): return os.getpid(), os.getppid()"
        good(box)
        before = psutil.Process().num_fds()
        pids = [call(box, program).value for _ in range(30)]
        [zygote] = box.pids()
        assert {parent for _, parent in pids} == {zygote}
        assert len({pid for pid, _ in pids}) == 30  # each serves once
        deadline = time.monotonic() + 30
        while psutil.Process(zygote).children() or psutil.Process().num_fds() > before:
            assert time.monotonic() < deadline, "something is left"
            time.sleep(0.05)

    def test_one_that_waited_too_long_is_not_used(self, own: Any) -> None:
        box = own()
        good(box)
        spare = Process(box._launcher, PATIENT, 60.0, spare_s=0.01)
        try:
            with pytest.raises(LauncherDied, match="a spare was taken too late"):
                spare.life.wait(30.0)
            assert isinstance(spare.life, sandbox_launch.ZygoteLife)
            deadline = time.monotonic() + 30
            while spare.life.take(60.0):  # the zygote is about to close its end
                assert time.monotonic() < deadline
        finally:
            spare.close()

    def test_other_limits_need_other_processes(self, own: Any) -> None:
        box = own()
        program = "import resource\ndef f(): return resource.getrlimit(resource.RLIMIT_FSIZE)[0]"
        sizes = [1000, 1000, 1000, 2000, 1000, 1000]
        limits = [Limits(wall_s=60, output_bytes=size) for size in sizes]
        values = [call(box, program, limits=these).value for these in limits]
        assert values == [size + 1 for size in sizes]


GRADER = """
import os, sys
from mintrl_env.verifiers.sandbox import Call, Limits
from mintrl_env.verifiers.sandbox_launch import LauncherDied
from mintrl_env.verifiers.sandbox_local import LocalSandbox
from mintrl_env.verifiers.sandbox_process import Process
box = LocalSandbox(unconfined={unconfined})
calls = box.calls("import os\\ndef f(): return os.getpid()", [Call("f")] * 2, Limits(60))
print(next(calls).value, *box.pids(), flush=True)
"""


class TestGrader:
    """A grader that ends, in whatever way, leaves no process behind."""

    @pytest.fixture
    def start(self, box: LocalSandbox) -> Iterator[Callable[[str], Any]]:
        started: list[subprocess.Popen[str]] = []

        def start(rest: str) -> Any:
            text = GRADER.replace("{unconfined}", str(not box._key[0])) + rest
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", text],
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
                # A job in the background ignores Ctrl-C, and so would its children.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
            started.append(process)
            assert process.stdout is not None
            return process, [int(word) for word in process.stdout.readline().split()]

        yield start
        for process in started:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def test_killed(self, start: Any) -> None:
        process, pids = start("box.run('while True: pass', '', Limits(600))")
        process.kill()
        for pid in pids:
            gone(pid)

    def test_killed_while_a_forked_child_lives_on(self, start: Any) -> None:
        process, pids = start("import time\nif os.fork(): os.kill(os.getpid(), 9)\ntime.sleep(60)")
        for pid in pids:
            gone(pid)
        os.killpg(process.pid, signal.SIGKILL)

    def test_ended_in_order(self, start: Any) -> None:
        process, pids = start("")
        process.wait()
        for pid in pids:
            gone(pid)

    def test_interrupted(self, start: Any) -> None:
        process, pids = start(
            "try:\n"
            "    print('on', flush=True)\n"
            "    box.run('while True: pass', '', Limits(600))\n"
            "except KeyboardInterrupt:\n"
            "    print(box.run('print(5)', '', Limits(60)).value, *box.pids(), flush=True)\n"
        )
        process.stdout.readline()
        time.sleep(0.3)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does it: to all of the group
        out, _ = process.communicate()
        assert out.split() == ["5", str(pids[1])]
        for pid in pids:
            gone(pid)


def test_sandboxes_that_are_made_alike_share_a_zygote() -> None:
    assert LocalSandbox()._launcher is LocalSandbox()._launcher
    assert LocalSandbox()._launcher is not LocalSandbox(packages=("json",))._launcher
    sandbox_local.close_all()
