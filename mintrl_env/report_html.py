"""HTML fragments of the report. All that comes from a run passes through `plain` or `visible`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from html import escape

from mintrl_env.report_pieces import Author, Gap, Mark, Piece, Text
from mintrl_env.report_select import Shown
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Kind, Outcome, Provenance, Review

_ODD = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, carriage return included
    "\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff"  # invisible, reordering
    "\ud800-\udfff"  # lone surrogates
)
_VISIBLE = re.compile(
    rf"(?P<nl>\n)|(?P<tab>\t)|(?P<ws>(?:^|(?<=\n)) +| +(?=\n|$)| {{2,}})|(?P<odd>[{_ODD}])"
)

_VERDICTS = {
    Outcome.KEEP: ("Keep", "good"),
    Outcome.REVISE: ("Revise", "revise"),
    Outcome.GUARDED: ("guarded", "doubt"),
    Outcome.FAILED: ("judge failed", "bad"),
    Outcome.UNPARSED: ("unparsed", "bad"),
}
_MARKS = {
    Outcome.KEEP: "keep",
    Outcome.REVISE: "revise",
    Outcome.GUARDED: "guarded",
    Outcome.FAILED: "failed",
    Outcome.UNPARSED: "unparsed",
}


def visible(text: str) -> str:
    """Escaped text in which line ends, tabs, runs of spaces and characters without a look show.

    The signs are drawn by the style sheet, so that copied text is the text itself.
    """
    out, done = [], 0
    for match in _VISIBLE.finditer(text):
        out.append(escape(text[done : match.start()]))
        done = match.end()
        if match.group("nl"):
            out.append('<span class="nl"></span>\n')
        elif match.group("tab"):
            out.append('<span class="tab">\t</span>')
        elif match.group("ws"):
            out.append(f'<span class="ws">{match.group()}</span>')
        else:
            out.append(f'<span class="odd">{_code_point(match.group())}</span>')
    out.append(escape(text[done:]))
    return "".join(out)


def _code_point(character: str) -> str:
    return {"\r": "CR", "\x1b": "ESC", "\x00": "NUL"}.get(character, f"U+{ord(character):04X}")


def plain(text: str, limit: int = 2000) -> str:
    """Escaped prose from a run, one that may be hostile or endless."""
    if len(text) > limit:
        text = f"{text[:limit]} … ({len(text) - limit:,} more characters)"
    return re.sub(f"[{_ODD}]", lambda m: f"\\u{ord(m.group()):04x}", escape(text))


_OPEN = {
    Author.POLICY: "",
    Author.JUDGE: '<ins class="judge"><span class="hidden">judge wrote: </span>',
    Author.ENVIRONMENT: '<samp class="environment"><span class="hidden">environment: </span>',
    Author.DROPPED: '<del class="dropped"><span class="hidden">dropped: </span>',
}
_CLOSE = {
    Author.POLICY: "",
    Author.JUDGE: "</ins>",
    Author.ENVIRONMENT: "</samp>",
    Author.DROPPED: "</del>",
}
_END = '<span class="end"></span>'  # where the style sheet draws a closing sign


def _close(out: list[str], author: Author) -> None:
    """Close an author's text; the closing sign goes before a last line end, not after it."""
    if author in (Author.JUDGE, Author.DROPPED):
        at_line_end = out[-1].endswith("\n")
        out[-1] = f"{out[-1][:-1]}{_END}\n" if at_line_end else out[-1] + _END
    out.append(_CLOSE[author])


def text_block(pieces: Iterable[Piece], *, reviews: Sequence[Review] = (), anchor: str = "") -> str:
    """Pieces as one preformatted block; a mark links to its row in the table of reviews."""
    out: list[str] = []
    author = Author.POLICY
    for piece in pieces:
        now = Author.POLICY if isinstance(piece, Mark) else piece.author
        if now is not author or isinstance(piece, Mark):
            _close(out, author)
            out.append(_OPEN[now])
            author = now
        if isinstance(piece, Mark):
            outcome = reviews[piece.review].outcome
            link = f'class="mark {_VERDICTS[outcome][1]}" href="#{anchor}-{piece.review}"'
            out.append(f"<a {link}>{piece.review + 1} {_MARKS[outcome]}</a>")
        elif isinstance(piece, Gap):
            out.append(f'<span class="gap">{piece.tokens:,} tokens not shown</span>')
        elif piece.special:
            out.append(f'<span class="special">{visible(piece.text)}</span>')
        else:
            out.append(visible(piece.text))
    _close(out, author)
    # HTML drops a newline right after <pre>: this one, and not the text's own.
    return f'<pre class="text" tabindex="0">\n{"".join(out)}</pre>'


def prompt_block(pieces: list[Piece], tokens: int) -> str:
    """The prompt; folded away where it is long."""
    as_policy = [
        Text(Author.POLICY, piece.text, piece.special)
        if isinstance(piece, Text)
        else Gap(Author.POLICY, piece.tokens)
        for piece in pieces
        if not isinstance(piece, Mark)
    ]
    block = text_block(as_policy)
    text = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    if len(text) > 1200 or text.count("\n") > 20:
        start = " ".join(text[:400].split())[:110]
        summary = f"Prompt, {tokens:,} tokens: {plain(start)} …"
        return f'<details class="small"><summary>{summary}</summary>{block}</details>'
    return f'<p class="soft small">Prompt, {tokens:,} tokens</p>{block}'


def reward_badge(row: Trajectory) -> str:
    """The reward with a sign beside its colour."""
    if not row.valid:
        status = plain(row.cause or row.score.status, 120)
        return f'<span class="badge doubt">? not valid: {status}</span>'
    if not row.score.decided:
        return f'<span class="badge doubt">? reward later ({plain(row.score.status, 60)})</span>'
    look, sign = ("good", "✓") if row.reward > 0 else ("bad", "✗")
    return (
        f'<span class="badge {look}">{sign} reward {number(row.reward)}, '
        f"{plain(row.score.status, 60)}</span>"
    )


def rollout_card(row: Trajectory, pieces: list[Piece], anchor: str) -> str:
    """One rollout: facts, text, reviews."""
    counts = {p: row.count(p) for p in Provenance}
    learnt = counts[Provenance.POLICY] + counts[Provenance.INTERVENTION]
    facts = [
        f"stopped by {row.stop_reason.value}",
        f"{len(row.ids):,} tokens: {counts[Provenance.POLICY]:,} policy, "
        f"{counts[Provenance.INTERVENTION]:,} judge"
        + (
            f", {counts[Provenance.ENVIRONMENT]:,} environment"
            if counts[Provenance.ENVIRONMENT]
            else ""
        ),
    ]
    if row.kind is Kind.INTERVENED:
        fraction = counts[Provenance.INTERVENTION] / learnt if learnt else math.nan
        facts.append(f"off-policy {percent(fraction)}")
        facts.append(f"{row.dropped_tokens:,} dropped")
    facts.append(f"{row.draws:,} sampled")
    versions = sorted(set(row.policy_versions.tolist()))
    if versions != [row.update]:
        facts.append("policy version " + ", ".join(map(str, versions[:8])))
    facts += [f"retry {row.retry}"] if row.retry else []
    facts += [f"run attempt {row.run_attempt}"] if row.run_attempt else []
    kind = "control, never reviewed" if row.kind is Kind.CONTROL else "intervened"
    detail = (
        f'<p class="small soft">Verifier: {plain(row.score.detail, 300)}</p>'
        if row.score.detail
        else ""
    )
    return (
        f'<article class="card" id="{anchor}"><header><h4>Rollout {row.rollout}</h4> '
        f'<span class="badge plain">{kind}</span> {reward_badge(row)}</header>'
        f'<ul class="facts">{"".join(f"<li>{fact}</li>" for fact in facts)}</ul>{detail}'
        f"{text_block(pieces, reviews=row.reviews, anchor=anchor)}"
        f"{reviews_table(row.reviews, anchor)}</article>"
    )


def reviews_table(reviews: Sequence[Review], anchor: str) -> str:
    if not reviews:
        return ""
    money = any(review.usage.usd for review in reviews)
    numbers = ["step", "at token", "chunk", "dropped", "correction", "judge read", "wrote"]
    numbers += ["US$"] if money else []
    head = "".join(f'<th scope="col">{name}</th>' for name in ("review", "verdict", "why"))
    head += "".join(f'<th scope="col"{CLASS_N}>{name}</th>' for name in numbers)
    rows = []
    for place, review in enumerate(reviews):
        words, look = _VERDICTS[review.outcome]
        revised = review.outcome is Outcome.REVISE
        cells = [
            str(review.step) if revised else "–",
            f"{review.cut if revised else review.position:,}",
            f"{review.chunk_tokens:,}",
            f"{len(review.dropped_ids):,}" if revised else "–",
            f"{review.correction_tokens:,}" if revised else "–",
            f"{review.usage.prompt_tokens:,}",
            f"{review.usage.completion_tokens:,}",
        ]
        cells += [f"{review.usage.usd:.4f}"] if money else []
        why = [f"guard {plain(review.guard, 80)}"] if review.guard else []
        why += [plain(review.cause, 80)] if review.cause else []
        why += [plain(review.reason, 600)] if review.reason else []
        rows.append(
            f'<tr id="{anchor}-{place}"><th scope="row">{place + 1}</th>'
            f'<td><span class="badge {look}">{words}</span></td>'
            f'<td class="why">{": ".join(why) or "–"}</td>'
            + "".join(f"<td{CLASS_N}>{cell}</td>" for cell in cells)
            + "</tr>"
        )
    return (
        '<div class="scroll"><table class="reviews"><caption class="hidden">Reviews; lengths in '
        f"tokens</caption><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


CLASS_N = ' class="n"'
_PLURAL = {Kind.CONTROL: "controls", Kind.INTERVENED: "intervened"}


def group_line(shown: Shown) -> str:
    """How the whole group did, rows not shown included."""
    parts = []
    for kind in Kind:
        rows = [row for row in shown.rows if row.kind is kind]
        known = [row.reward for row in rows if row.valid and row.score.decided]
        if not rows:
            continue
        rewards = ", ".join(number(reward) for reward in known[:16]) + (
            " …" if len(known) > 16 else ""
        )
        mean = (
            f"mean reward {number(sum(known) / len(known))} ({rewards})" if known else "no reward"
        )
        name = "control" if kind is Kind.CONTROL and len(rows) == 1 else _PLURAL[kind]
        parts.append(f"{len(rows)} {name}: {mean}")
    parts.append(f"{len(shown.chosen)} of {len(shown.rows)} shown")
    return f'<p class="soft small">{"; ".join(parts)}</p>'


LEGEND = """
<p>The policy, the model that is trained, writes a response in chunks. A judge reads each chunk and,
where a step is wrong, cuts the response there and writes a short correction; the policy goes on
from it. Controls are responses that nobody reviews: their mean reward is the baseline.</p>
<dl class="legend">
<dt>plain text</dt><dd>written by the policy</dd>
<dt><ins class="judge">text<span class="end"></span></ins></dt><dd>written by the judge: a
correction</dd>
<dt><del class="dropped">text<span class="end"></span></del></dt><dd>written by the policy and cut
by the judge, the wrong step and all after it: no longer part of the response</dd>
<dt><samp class="environment">text</samp></dt><dd>written by the environment, such as a tool's
output: not learnt from</dd>
<dt><span class="mark revise">2 revise</span></dt><dd>place and result of a review; it leads to the
review's row in the table below the text, where steps count from 0. <em>keep</em>: no error seen.
<em>guarded</em>: a guard stopped the correction. <em>failed</em>, <em>unparsed</em>: the judge gave
no verdict. In these cases nothing was changed</dd>
<dt><span class="special">&lt;|eos|&gt;</span> <span class="nl"></span>&nbsp;<span
class="ws">  </span></dt><dd>a special token, the end of a line, more than one space</dd>
</dl>
"""


def number(value: float) -> str:
    """A figure as people read it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def percent(value: float) -> str:
    return f"{100 * value:.1f} %" if math.isfinite(value) else "–"
