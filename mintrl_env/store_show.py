"""One trajectory for a terminal: who wrote what, by colour and by mark.

[+...+] the judge wrote   [-...-] was dropped   [>...<] a tool or turn answered
<2 revise> the place of the second review
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mintrl_env.report_pieces import Author, Gap, Mark, Piece, pieces_of, prompt_pieces
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Outcome, Provenance, Review

_LOOKS = {
    Author.POLICY: ("", "", ""),
    Author.JUDGE: ("[+", "+]", "bold green"),
    Author.ENVIRONMENT: ("[>", "<]", "cyan"),
    Author.DROPPED: ("[-", "-]", "red strike"),
}
_MARKS = {
    Outcome.KEEP: "green",
    Outcome.REVISE: "bold yellow",
    Outcome.GUARDED: "magenta",
    Outcome.FAILED: "bold red",
    Outcome.UNPARSED: "bold red",
}
# Control characters, which could steer the terminal, and signs without a look or that reorder text.
_ODD = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ud800-\udfff]"
)


def printable(text: str, *, line_ends: bool = True) -> str:
    """Text from a run that cannot steer the terminal; odd characters are written `\\u001b`."""
    text = _ODD.sub(lambda match: f"\\u{ord(match.group()):04x}", text)
    return text if line_ends else text.replace("\n", "\\n").replace("\t", "\\t")


def show(
    console: Console,
    row: Trajectory,
    decode: Callable[[list[int]], str],
    *,
    special_ids: Collection[int] = (),
    max_tokens: int = 2400,
) -> None:
    """Print one trajectory: its key and reward, prompt, response, reviews.

    Args:
        decode: text of ids, special tokens written out.
        special_ids: tokens to set apart.
        max_tokens: the most tokens shown of one stretch by one author.
    """
    options = {"special_ids": special_ids, "max_tokens": max_tokens}
    prompt = prompt_pieces(row.prompt_ids, decode, **options)  # type: ignore[arg-type]
    pieces = pieces_of(row, decode, **options)  # type: ignore[arg-type]
    _say(console, _heading(row))
    if row.cause or row.score.detail:
        _say(console, Text(printable(row.cause or row.score.detail, line_ends=False), "dim"))
    _say(console, Text(f"\nprompt, {len(row.prompt_ids):,} tokens", "bold"))
    _say(console, _text(prompt, row))
    _say(console, _counts(row))
    _say(console, _text(pieces, row))
    if row.reviews:
        _say(console, Text("\nreviews", "bold"))
        console.print(_reviews(row.reviews))


def _say(console: Console, text: Text) -> None:
    text.no_wrap, text.overflow = True, "ignore"  # the terminal wraps; copied text is the text
    console.print(text, soft_wrap=True)


def _heading(row: Trajectory) -> Text:
    out = Text()
    if row.run:
        out.append(printable(row.run, line_ends=False) + "  ", "dim")
    out.append(printable(row.task_id, line_ends=False), "bold")
    out.append(f"  update {row.update}  rollout {row.rollout} ({row.kind})  ")
    if not row.valid:
        out.append("not valid", "bold magenta")
    elif not row.score.decided:
        out.append(f"reward later ({printable(row.score.status, line_ends=False)})", "magenta")
    else:
        style = "bold green" if row.reward > 0 else "bold red"
        status = printable(row.score.status, line_ends=False)
        out.append(f"reward {row.reward:g} ({status})", style)
    out.append(f"  ended by {row.stop_reason}")
    if row.retry or row.run_attempt:
        out.append(f"  retry {row.retry}, run attempt {row.run_attempt}", "dim")
    return out


def _counts(row: Trajectory) -> Text:
    names = {
        Provenance.POLICY: "policy",
        Provenance.INTERVENTION: "judge",
        Provenance.ENVIRONMENT: "environment",
    }
    counts = [
        f"{row.count(author):,} {name}" for author, name in names.items() if row.count(author)
    ]
    if row.dropped_tokens:
        counts.append(f"{row.dropped_tokens:,} dropped")
    return Text(f"\nresponse, {len(row.ids):,} tokens ({', '.join(counts)})", "bold")


def _text(pieces: list[Piece], row: Trajectory) -> Text:
    """Pieces in a row, each stretch of one author between its marks; a prompt has none."""
    out = Text()
    is_prompt = not any(isinstance(p, Mark) or p.author is not Author.ENVIRONMENT for p in pieces)
    for piece, author, first, last in _stretches(pieces):
        if isinstance(piece, Mark):
            outcome = row.reviews[piece.review].outcome
            out.append(f"<{piece.review + 1} {outcome}>", _MARKS[outcome])
            continue
        opening, closing, style = ("", "", "") if is_prompt else _LOOKS[author]
        out.append(opening if first else "", style)
        if isinstance(piece, Gap):
            text, style = f" ... {piece.tokens:,} tokens not shown ... ", "dim"
        else:
            text, style = printable(piece.text), "dim" if piece.special else style
        # A closing mark stands before a last line end, not on a line of its own.
        end = "\n" if last and closing and text.endswith("\n") else ""
        out.append(text.removesuffix(end) if end else text, style)
        out.append((closing if last else "") + end, _LOOKS[author][2])
    return out


def _stretches(pieces: list[Piece]) -> Iterator[tuple[Piece, Author, bool, bool]]:
    """Each piece with its author, and whether it begins and ends a stretch of that author's."""
    authors = [None if isinstance(piece, Mark) else piece.author for piece in pieces]
    for i, (piece, author) in enumerate(zip(pieces, authors, strict=True)):
        before = authors[i - 1] if i else None
        after = authors[i + 1] if i + 1 < len(authors) else None
        yield piece, author or Author.POLICY, before is not author, after is not author


def _reviews(reviews: tuple[Review, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    for head in ("#", "verdict", "chunk", "step", "dropped", "wrote", "why"):
        table.add_column(head, overflow="fold")
    for review in reviews:
        revised = review.outcome is Outcome.REVISE
        why = ": ".join(part for part in (review.guard or review.cause, review.reason) if part)
        table.add_row(
            str(review.index + 1),
            Text(review.outcome, _MARKS[review.outcome]),
            f"{review.position}-{review.position + review.chunk_tokens}",
            str(review.step + 1) if revised else "",
            str(len(review.dropped_ids)) if revised else "",
            str(review.correction_tokens) if revised else "",
            Text(_short(printable(why, line_ends=False))),
        )
    return table


def _short(text: str, limit: int = 400) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
