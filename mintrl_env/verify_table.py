"""What `mintrl verify` says: how far it is, and a table of what came of the rows."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from mintrl_env.verify import Summary

_SHOWN = 1000  # characters of a detail
_LIVE_S, _QUIET_S = 0.5, 10.0


def row_counter() -> Callable[[Summary], None]:
    """Says on standard error how many rows are done: live where that is a terminal, else a line
    every ten seconds."""
    live = sys.stderr.isatty()
    started = last = time.monotonic()

    def say(summary: Summary) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < (_LIVE_S if live else _QUIET_S):
            return
        last = now
        text = f"verify: {summary.rows} rows, {now - started:.0f} s"
        # The next print begins at the line's start, and is longer than this one.
        print(text, end="\r" if live else "\n", file=sys.stderr, flush=True)

    return say


def print_summary(summary: Summary, out: Path) -> None:
    """A table for people, on standard output."""
    from rich.console import Console
    from rich.table import Table

    table = Table(show_edge=False)
    for name in ("status", "rows", "share", "s a row"):
        table.add_column(name, justify="left" if name == "status" else "right")
    for status, count in summary.statuses.most_common():
        mean = summary.seconds[status] / count
        table.add_row(status, str(count), f"{count / summary.rows:.1%}", f"{mean:.4f}")
    console = Console()
    if summary.rows:
        console.print(table)
    for line in (*summary_lines(summary), f"written: {out}"):
        shown = _printable(line).encode(console.encoding, "backslashreplace")
        console.print(shown.decode(console.encoding), highlight=False, markup=False, soft_wrap=True)


def summary_lines(summary: Summary) -> list[str]:
    """Counts, what could not be decided with the first reason of each status, and accuracy."""
    mean = f"{summary.rewards / max(1, summary.decided):.4f} of {summary.decided} decided"
    lines = [
        f"rows: {summary.rows} in {summary.wall_s:.1f} s",
        f"mean reward: {mean if summary.decided else 'none decided'}",
    ]
    if undecided := summary.rows - summary.decided:
        lines.append(f"undecided: {undecided} (reward null)")
        for status, first in summary.first_undecided.items():
            lines.append(f"first {status}: {first[:_SHOWN]}")
    if summary.unread_lines:
        many = "lines that are" if summary.unread_lines > 1 else "line that is"
        lines.append(f"skipped: {summary.unread_lines} {many} no JSON")
    if summary.expected:
        lines.append(
            f"accuracy: {summary.right / summary.expected:.2%} ({summary.right} of "
            f"{summary.expected}), false positives {summary.false_positives}, false negatives "
            f"{summary.false_negatives}"
        )
    if summary.status_expected:
        lines.append(f"status as expected: {summary.status_right} of {summary.status_expected}")
    if not summary.rows:
        lines.append("there was no row to score: rows are JSON Lines in UTF-8, an object a line")
    return lines


def _printable(text: str) -> str:
    """What a row says can't move the cursor or colour the terminal."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )
