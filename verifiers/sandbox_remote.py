"""What the remote code sandboxes share: jobs out, reports in.

A remote sandbox is the local one at another place: each request carries its sources, so that the
code of a response is confined there by the same means, with the same results. One request answers
one `run`, or all calls or snippets of one response.

The report comes from a machine on which untrusted code ran. It is checked field by field, its
values are built of plain types alone, and where it makes no sense the service is to blame.
"""

from __future__ import annotations

import ast
import base64
import functools
import json
import math
import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mintrl_env
from mintrl_env.verifiers import plain_values
from mintrl_env.verifiers.remote_service import Client, Job, Passing, Patience, Service
from mintrl_env.verifiers.sandbox import Call, Limits, Ran, Result, SandboxUnavailable

START_S = 20.0
"""Seconds that unpacking and starting the sandbox may take at a busy service."""
"""Seconds that all tests of one response may take together, or ten times the limit of one."""

_FOLDER = Path(__file__).parent
_FOR_NOW = ("could be started", "was not ready", "died twice")
_NOT_SENT = {"sandbox_e2b", "sandbox_fusion", "sandbox_remote"}


class RemoteSandbox:
    """A sandbox whose code runs at a service. All of it is thread-safe; every method blocks its
    thread and raises SandboxUnavailable for what the code did not cause.

    Args:
        make: makes the service, when it is first needed.
        concurrency: the most requests at once.
        packages: importable names (numpy) that the code may use besides the standard library;
            they must be installed at the service.
        patience: how long failures are borne.
    """

    name = "remote"

    def __init__(
        self,
        make: Callable[[], Service],
        *,
        concurrency: int,
        packages: Sequence[str],
        patience: Patience,
    ) -> None:
        self._packages = list(packages)
        self._client = Client(make, concurrency=concurrency, patience=patience)

    def run(self, code: str, stdin: str, limits: Limits) -> Result:
        """Run a program (`__name__ == "__main__"`) on a standard input: one request."""
        return self._ask({"kind": "run", "code": code, "stdin": stdin}, 1, limits)[0]

    def calls(self, code: str, calls: Iterable[Call], limits: Limits) -> Iterator[Result]:
        """Load a module and make calls in it: one request for all, sent with the first `next`.

        Calls that would begin when all together took longer than `limits.total_s` are time-outs.
        """
        rows = []
        for call in calls:
            try:
                args, kwargs = (plain_values.dumps(v) for v in (list(call.args), dict(call.kwargs)))
            except plain_values.NotPlain as error:
                raise SandboxUnavailable(
                    f"the arguments of a test cannot be sent: {error}"
                ) from error
            rows.append([call.function, args, kwargs])
        if rows:
            yield from self._ask({"kind": "calls", "code": code, "calls": rows}, len(rows), limits)

    def asserts(self, code: str, snippets: Sequence[str], limits: Limits) -> Iterator[Result]:
        """Run test snippets against a module: one request for all, sent with the first `next`."""
        job = {"kind": "asserts", "code": code, "snippets": list(snippets)}
        if snippets:
            yield from self._ask(job, len(snippets), limits)

    def close(self) -> None:
        """End open requests and what lives at the service; closing twice is harmless."""
        self._client.close()

    def _ask(self, job: dict[str, Any], tests: int, limits: Limits) -> list[Result]:
        budget_s = limits.total_s(tests)
        report = f"report-{secrets.token_hex(16)}.json"
        whole = {
            **job, "limits": asdict(limits), "packages": self._packages, "budget_s": budget_s
        }  # fmt: skip
        # The last test may begin just before the budget ends; loading the module is another.
        seconds = min(budget_s, tests * limits.wall_s) + 2 * limits.wall_s + START_S
        read = functools.partial(_results, kind=job["kind"], limits=limits)
        results = self._client.execute(Job(_script(whole, report), report, seconds), read)
        if len(results) > tests or (len(results) < tests and not results):
            raise SandboxUnavailable(f"{self.name} answered {len(results)} results for {tests}")
        left = f"not run: all tests together took more than {budget_s:g} s"
        return results + [Result(Ran.TIMEOUT, detail=left)] * (tests - len(results))


def _script(job: dict[str, Any], report: str) -> str:
    """The driver with its job, as one Python source."""
    driver = (_FOLDER / "remote_driver.py").read_text(encoding="utf-8")
    return f'{driver}\n\nmain("{_sources()}", "{_pack(job)}", "{report}")\n'


def _pack(value: Any) -> str:
    """JSON, compressed, in letters that need no quoting."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode("ascii"))).decode()


@functools.cache
def _sources() -> str:
    """The local sandbox's modules, packed: what `sandbox_local` imports, and the files beside it,
    some of which its processes load by path."""
    root = Path(mintrl_env.__file__).parent.parent
    sources = {"mintrl_env/__init__.py": "", "mintrl_env/verifiers/__init__.py": ""}
    beside = {path.stem for path in _FOLDER.glob("sandbox_*.py")} - _NOT_SENT
    todo = [f"mintrl_env.verifiers.{name}" for name in sorted(beside | {"plain_values"})]
    while todo:
        module = todo.pop()
        name = module.replace(".", "/") + ".py"
        if module.split(".")[-1] in _NOT_SENT or name in sources or not (root / name).exists():
            continue
        sources[name] = (root / name).read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(sources[name])):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mintrl_env."):
                todo += [f"{node.module}.{alias.name}" for alias in node.names]
                todo.append(str(node.module))
    return _pack(sources)


def _results(report: bytes, *, kind: str, limits: Limits) -> list[Result]:
    """The results in a report.

    Raises:
        Passing: it is no report of the driver's.
        SandboxUnavailable: the sandbox cannot work at the service.
    """
    try:
        answer = json.loads(report)
        if "refused" in answer:
            why = f"at the service: {str(answer['refused'])[:2000]}"
            # What a machine lacks it will lack again; out of processes or memory it is for now.
            raise (Passing if any(w in why for w in _FOR_NOW) else SandboxUnavailable)(why)
        if "broken" in answer:
            raise Passing(f"the driver failed: {str(answer['broken'])[-500:]}")
        return [_result(row, kind, limits) for row in answer["results"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Passing(f"a report that is none: {error!r}") from error


def _result(row: Any, kind: str, limits: Limits) -> Result:
    ran, value, detail, seconds, memory_mb = row
    for number in (seconds, memory_mb):
        if not isinstance(number, (int, float)):
            raise TypeError("a time or memory that is no number")
    result = Result(Ran(ran), None, str(detail)[:2000], float(seconds), float(memory_mb))
    if kind == "run" and value is not None:
        if not isinstance(value, str) or len(value) > limits.output_bytes:
            raise TypeError("an output that is no text, or too long")
    elif kind == "calls" and result.ran is Ran.OK:
        try:
            value = plain_values.loads(value)
        except plain_values.NotPlain as error:
            return Result(Ran.ERROR, None, f"the value cannot be read back: {error}", seconds)
    else:
        value = None
    if math.isnan(result.seconds) or result.seconds < 0:
        raise ValueError("a time that is none")
    return Result(result.ran, value, result.detail, result.seconds, result.memory_mb)
