"""Where untrusted code runs: the face that every sandbox shows to the code verifier.

Local ones (`sandbox_local`, `sandbox_bwrap`) and remote ones (`sandbox_e2b`, `sandbox_fusion`)
answer the same three questions: what does a program print, what do these calls return, do these
assert snippets hold. None of them ever compares anything with an expected value of a stdin or call
test: that is the verifier's business, in the verifier's process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from mintrl_env.errors import VerifierError


class SandboxUnavailable(VerifierError):
    """No sandbox can be had, or a service failed: our fault, the row is undecided, never wrong."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one test may use.

    Attributes:
        wall_s: seconds of one stdin run, of loading a module, of one call, of one snippet.
        mem_mb: MiB above what the fresh interpreter maps.
        output_bytes: the most that a program may print.
    """

    wall_s: float = 3.0
    mem_mb: int = 512
    output_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        for name in ("wall_s", "mem_mb", "output_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"{name} must be a number > 0, not {value!r}")

    def total_s(self, tests: int) -> float:
        """Seconds that all tests of a response may take together where nobody says: as long as each
        of them may, and a second to start it in, so that no honest program is ended for the number
        of its tests; but not more than ten minutes or ten tests, so that none holds a worker for
        an hour. At least a minute."""
        return max(60.0, min((self.wall_s + 1.0) * tests, max(600.0, 10 * self.wall_s)))


class Ran(StrEnum):
    """How a piece of code ended.

    OK: a program exited with status 0, a call returned a value that could be read, a snippet held.
    FAILED: an assert of a snippet did not hold.
    ERROR: an exception, a syntax error, a missing function, an early or non-zero exit, a crash, too
        much output, a value that cannot be read back.
    TIMEOUT, MEMORY: over the limit. BLOCKED: ended by an exception that came from an operation
        which the sandbox refused.
    """

    OK = "ok"
    FAILED = "failed"
    ERROR = "error"
    TIMEOUT = "timeout"
    MEMORY = "memory"
    BLOCKED = "blocked"


@dataclass(frozen=True, slots=True)
class Result:
    """How one run, call or snippet went.

    Attributes:
        ran: how it ended.
        value: what a call returned, made of plain built-in types alone; of a program its standard
            output (str, bytes that are no UTF-8 as U+FFFD); else None.
        detail: the exception or the reason, short, for people.
        seconds: wall time.
        memory_mb: peak memory of the process above the fresh interpreter's, NaN where unknown.
    """

    ran: Ran
    value: Any = None
    detail: str = ""
    seconds: float = 0.0
    memory_mb: float = float("nan")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a function of the code: a global one, or a method `Class.method` of a new object
    for each call."""

    function: str
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Sandbox(Protocol):
    """Runs code. Every method blocks its thread, may be called from many threads at once, and
    raises SandboxUnavailable for what the code did not cause."""

    name: str

    def run(self, code: str, stdin: str, limits: Limits) -> Result:
        """Run a program (`__name__ == "__main__"`) on a standard input."""
        ...

    def calls(self, code: str, calls: Iterable[Call], limits: Limits) -> Iterator[Result]:
        """Load a module (`__name__` is not `__main__`) and make calls in it, in one process.

        Lazy: a call is made when its result is asked for, and closing the iterator ends the process.
        Yields one Result a call. Where the module does not load, every call has that result. After a
        call that ended the process (a time-out, an exit, a crash) the module is loaded anew for the
        next.
        """
        ...

    def asserts(self, code: str, snippets: Sequence[str], limits: Limits) -> Iterator[Result]:
        """Run test snippets, in order, in one namespace, against a module that lives in another
        process. The names that a snippet uses and nobody else defines are the module's.

        Lazy like `calls`; yields one Result a snippet, OK only where it ran to its end.
        """
        ...

    def close(self) -> None:
        """End every process; closing twice is harmless."""
        ...
