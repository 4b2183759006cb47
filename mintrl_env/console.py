"""What a run shows while it works: stages, progress bars in a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Advance = Callable[[int, str], None]
"""Called with (done, note)."""

_QUIET_S = 10.0


class RunConsole:
    """Progress for people: a live bar where there is a terminal, else a line every ten seconds."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()

    def silenced(self) -> RunConsole:
        """One that shows nothing: of several processes one speaks."""
        return RunConsole(Console(quiet=True, force_terminal=False))

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def bar(self, label: str, total: int) -> Iterator[Advance]:
        """A bar from 0 to `total`; yields the function that moves it."""
        if self.console.is_terminal:
            yield from self._live(label, total)
        else:
            yield from self._lines(label, total)

    def _live(self, label: str, total: int) -> Iterator[Advance]:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task(label, total=total, note="")
            yield lambda done, note: progress.update(task, completed=done, note=note)

    def _lines(self, label: str, total: int) -> Iterator[Advance]:
        started = last = time.monotonic()
        ended = False

        def advance(done: int, note: str) -> None:
            nonlocal last, ended
            now = time.monotonic()
            if now - last >= _QUIET_S or (done >= total and not ended):
                last, ended = now, done >= total
                text = f"{label}: {done}/{total}, {now - started:.0f} s  {note}".rstrip()
                self.console.print(text, highlight=False, soft_wrap=True)

        yield advance
