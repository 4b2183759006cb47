"""What is installed, what works here, what is missing and how to get it.

Every check is quick (a few seconds on an idle machine), changes nothing and never raises. Heavy
imports happen in child processes that run beside the other checks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mintrl_env import doctor_machine, doctor_packages, doctor_parts, doctor_sandboxes
from mintrl_env.doctor_check import Check, Status


def diagnose(folder: str | Path = ".", *, timeout_s: float = 60.0) -> list[Check]:
    """All checks.

    Args:
        folder: where runs will be written.
        timeout_s: the longest that the child processes may take; they take seconds, unless the
            disk is cold or the machine busy.
    """
    parts = doctor_parts.start(timeout_s)
    try:
        checks = [
            *_guarded("Python", doctor_machine.python_checks),
            *_guarded("packages", doctor_packages.package_checks),
            *_guarded("sandboxes", doctor_sandboxes.sandbox_checks),
            *_guarded("this machine", lambda: doctor_machine.folder_checks(Path(folder))),
        ]
        engines = _guarded("engines", parts.engine_checks)
        names = _guarded("registered names", parts.registry_checks)
    finally:
        parts.stop()
    # Sorted as one reads: what is installed, what works, then the details.
    places = {"Python": 0, "packages": 1, "engines": 2, "sandboxes": 3, "registered names": 4}
    return sorted([*checks, *engines, *names], key=lambda check: places.get(check.group, 5))


def _guarded(group: str, checks: Callable[[], list[Check]]) -> list[Check]:
    """A check that breaks is a finding, not the end of the others."""
    try:
        return checks()
    except Exception as error:
        detail = f"the check itself failed: {type(error).__name__}: {error}"
        return [Check(group, "all of it", Status.WARN, detail, "please report this")]


def worst(checks: Sequence[Check]) -> Status:
    """FAIL if any check failed, else WARN if any warned, else OK."""
    found = {check.status for check in checks}
    return next((s for s in (Status.FAIL, Status.WARN) if s in found), Status.OK)


def exit_status(checks: Sequence[Check]) -> int:
    """1 where a check failed, else 0: what is merely not installed is no failure."""
    return int(worst(checks) is Status.FAIL)


def run_doctor(folder: str | Path = ".") -> int:
    """Check, print, and return the command's exit status."""
    from rich.console import Console

    console = Console()
    with console.status("looking at packages, engines, sandboxes ..."):
        checks = diagnose(folder)
    print_checks(checks, console)
    return exit_status(checks)


_SIGNS = {
    Status.OK: "[green]✓ ok[/]",
    Status.WARN: "[yellow]! warn[/]",
    Status.FAIL: "[red]✗ fail[/]",
}


def print_checks(checks: Sequence[Check], console: Any = None) -> None:
    """A table for people.

    Args:
        console: a `rich.console.Console`; standard output by default.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    console = console or Console()
    width = max((len(check.name) for check in checks), default=0)
    for group in dict.fromkeys(check.group for check in checks):
        title = Text(group[:1].upper() + group[1:], style="bold")
        table = Table(title=title, title_justify="left", box=None, show_header=False)
        table.add_column(no_wrap=True, width=6)
        table.add_column(no_wrap=True, width=min(width, 30))
        table.add_column(overflow="fold")
        for check in checks:
            if check.group == group:
                found = escape(check.detail)
                if check.fix:
                    found += f"\n[bold]→[/] {escape(check.fix)}"
                table.add_row(_SIGNS[check.status], escape(check.name), found)
        console.print(table)
        console.print()
    counts = {status: sum(check.status is status for check in checks) for status in Status}
    summary = f"{counts[Status.OK]} ok, {counts[Status.WARN]} warn, {counts[Status.FAIL]} fail"
    if counts[Status.FAIL]:
        summary += ": what is marked fail has to be mended before a run"
    elif counts[Status.WARN]:
        summary += ": what is marked warn is optional, or works with a limit"
    console.print(summary)
