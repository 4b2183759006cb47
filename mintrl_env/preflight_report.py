"""The page of a preflight: does it hold, what was measured, and what was said, word for word.

Self-contained like the run's report, with the same looks. What a model wrote is shown as text
whatever it holds.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mintrl_env.preflight_record import Exchange
from mintrl_env.preflight_tables import Line, figure_lines, forecast_lines
from mintrl_env.preflight_uplift import Continued
from mintrl_env.report import _page
from mintrl_env.report_html import (
    _VERDICTS,
    CLASS_N,
    LEGEND,
    group_line,
    number,
    plain,
    prompt_block,
    rollout_card,
    visible,
)
from mintrl_env.report_pieces import Decode, pieces_of, prompt_pieces
from mintrl_env.report_select import choose
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Outcome, Review

_REVIEWS, _FORKS, _GROUPS = 60, 16, 4  # the most that are shown
_LINE = 'style="white-space: nowrap"'
_TEXT = 20_000  # characters of one block
_ORDER = (Outcome.UNPARSED, Outcome.FAILED, Outcome.GUARDED, Outcome.REVISE, Outcome.KEEP)


@dataclass(frozen=True, slots=True, eq=False)
class ReviewRecord:
    """One review with what is known of it.

    Attributes:
        reward: the row's, None where it has none.
        steps: the pending chunk's, as the judge was shown them; kept: what stood before them.
        written: the correction as the judge wrote it, whatever became of it; at `wrong_step`.
        spliced: what of it stands in the response.
        leak: why it gives the answer away, else ""; through: it does so in the response.
        seconds: how long the judge took.
        exchanges: what the judge's models were asked.
    """

    task_id: str
    rollout: int
    review: Review
    reward: float | None = None
    steps: tuple[str, ...] = ()
    kept: str = ""
    written: str = ""
    wrong_step: int | None = None
    spliced: str = ""
    leak: str = ""
    through: bool = False
    seconds: float | None = None
    exchanges: tuple[Exchange, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For preflight.json; the prompts are on the page only."""
        return {
            "task_id": self.task_id,
            "rollout": self.rollout,
            "review": self.review.index,
            "outcome": self.review.outcome.value,
            "step": self.wrong_step,
            "reason": self.review.reason[:2000],
            "cause": self.review.cause,
            "guard": self.review.guard,
            "written": self.written[:2000],
            "spliced": self.spliced,
            "leak": self.leak,
            "leak_through": self.through,
            "seconds": self.seconds,
            "reward": self.reward,
        }


@dataclass(frozen=True, slots=True, eq=False)
class Page:
    """What is shown. `config` is its YAML; `decode` and `special_ids` are the policy's tokenizer's."""

    figures: Mapping[str, Any]
    groups: Sequence[Sequence[Trajectory]]
    records: Sequence[ReviewRecord]
    continued: Sequence[Continued]
    config: str
    decode: Decode
    special_ids: Collection[int] = ()
    title: str = "Preflight"


def render(page: Page) -> str:
    """The page as text."""
    figures = page.figures
    sections = [
        ("checks", "Checks", _checks(figures)),
        ("figures", "Figures", _lines(figure_lines(figures))),
        ("forecast", "Forecast of the whole run", _forecast(figures["forecast"])),
        ("servers", "The judge's server", "".join(map(_block, figures["servers"]))),
        ("prompts", "What policy and judge are given", _prompts(page)),
        ("uplift", "Corrections against going on alone", _uplift(page)),
        ("reviews", "Reviews", _reviews(page)),
        ("rollouts", "Rollouts", _rollouts(page)),
        ("config", "Configuration", _block(page.config, 60_000)),
    ]
    shown = [(key, name, body) for key, name, body in sections if body]
    word = "passed" if figures["passed"] else "failed"
    look = "good" if figures["passed"] else "bad"
    body = [
        f"<h1>{plain(page.title, 200)}</h1>",
        f'<p><span class="badge {look}">{word}</span> '
        f"{'the run may be begun' if figures['passed'] else 'the run should not be begun yet'}</p>",
        '<nav aria-label="Sections"><ul>'
        + "".join(f'<li><a href="#{key}">{name}</a></li>' for key, name, _ in shown)
        + "</ul></nav>",
        *(
            f'<section id="{key}"><h2>{name}</h2>{body}</section>'
            for key, name, body in shown
        ),
    ]  # fmt: skip
    return _page(page.title, "\n".join(body), "")


# --- figures


def _checks(figures: Mapping[str, Any]) -> str:
    rows = []
    for check in figures["checks"]:
        look, word = ("good", "ok") if check["passed"] else ("bad", "failed")
        todo = "" if check["passed"] else plain(check["todo"], 1500)
        rows.append(
            f'<tr><td><span class="badge {look}">{word}</span></td>'
            f'<th scope="row" {_LINE}>{plain(check["name"], 80)}</th>'
            f"<td {_LINE}>{plain(check['value'], 200)}</td>"
            f"<td {_LINE}>{plain(check['wanted'], 200)}</td><td>{todo}</td></tr>"
        )
    head = "".join(f'<th scope="col">{h}</th>' for h in ("", "check", "found", "wanted", "to do"))
    notes = "".join(f"<li>{plain(note, 800)}</li>" for note in figures["notes"])
    return _table(head, rows, "Checks") + (
        f'<div class="warn"><strong>Worth a look</strong><ul>{notes}</ul></div>' if notes else ""
    )


def _lines(lines: Sequence[Line]) -> str:
    rows = [
        f'<tr><th scope="row">{plain(what, 120)}</th><td class="n">{plain(value, 120)}</td>'
        f'<td class="soft">{plain(meaning, 400)}</td></tr>'
        for what, value, meaning in lines
    ]
    return _table("", rows, "Figures")


def _forecast(forecast: Mapping[str, Any]) -> str:
    taken = "".join(f"<li>{plain(line, 600)}</li>" for line in forecast["assumptions"])
    return f'{_lines(forecast_lines(forecast))}<p>It assumes:</p><ul class="soft">{taken}</ul>'


def _table(head: str, rows: Sequence[str], caption: str) -> str:
    top = f"<thead><tr>{head}</tr></thead>" if head else ""
    return (
        f'<div class="scroll"><table><caption class="hidden">{caption}</caption>{top}'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


# --- texts


def _block(text: str, limit: int = _TEXT) -> str:
    more = f"\n... ({len(text) - limit:,} more characters)" if len(text) > limit else ""
    return f'<pre class="text" tabindex="0">\n{visible(text[:limit])}{more}</pre>'


def _prompts(page: Page) -> str:
    parts = []
    first = next((row for rows in page.groups for row in rows), None)
    if first is not None:
        pieces = prompt_pieces(first.prompt_ids, page.decode, special_ids=page.special_ids)
        parts.append(f"<h3>The policy's prompt, task {plain(first.task_id, 120)}</h3>")
        parts.append(prompt_block(pieces, len(first.prompt_ids)))
    for outcome in (
        Outcome.REVISE,
        Outcome.KEEP,
        Outcome.GUARDED,
        Outcome.UNPARSED,
        Outcome.FAILED,
    ):
        record = next(
            (r for r in page.records if r.review.outcome is outcome and r.exchanges), None
        )
        if record is not None:
            told = f"What the judge was asked: a review that ended as {outcome}"
            calls = "".join(_exchange(record.exchanges, i) for i in range(len(record.exchanges)))
            body = f'<div class="group">{_where(record)}{calls}</div>'
            parts.append(
                f"<details><summary>{told}</summary>{body}</details>"
                if any("What the judge was asked" in part for part in parts)
                else f"<h3>{told}</h3>{body}"
            )
    if page.records and not any(record.exchanges for record in page.records):
        parts.append(
            '<p class="soft">The judge asks no model that could be listened to, so there is no '
            "prompt of its to show.</p>"
        )
    return "".join(parts)


def _exchange(exchanges: Sequence[Exchange], index: int) -> str:
    """One call; a message that stood at the same place in the call before is not repeated."""
    exchange = exchanges[index]
    before = exchanges[index - 1].messages if index else ()
    parts = [f"<h4>Call {index + 1}</h4>"]
    for place, (role, text) in enumerate(exchange.messages):
        same = place < len(before) and before[place] == (role, text)
        note = f", as in call {index}" if same else ""
        parts.append(f'<p class="soft small">{plain(role, 60)}{note}</p>')
        parts.append("" if same else _block(text))
    answer = _block(exchange.answer)
    return "".join(parts) + f'<p class="soft small">its answer</p>{answer}'


def _where(record: ReviewRecord) -> str:
    review, seconds = record.review, record.seconds
    facts = [
        f"task {plain(record.task_id, 120)}",
        f"rollout {record.rollout}",
        f"review {review.index + 1}",
        *([f"{seconds:.3g} s"] if seconds is not None else []),
        f"{review.usage.prompt_tokens:,} tokens read, {review.usage.completion_tokens:,} written",
    ]
    return f'<ul class="facts">{"".join(f"<li>{fact}</li>" for fact in facts)}</ul>'


def _uplift(page: Page) -> str:
    if not page.continued:
        return ""
    rank = sorted(page.continued, key=lambda c: (c.difference is None, c.difference or 0.0))
    rows = []
    for item in rank[: _FORKS // 2] + rank[_FORKS // 2 :][-_FORKS // 2 :]:
        tail = page.decode(item.fork.kept[-60:].tolist())
        rows.append(
            f"<tr><td>{plain(item.fork.task.task_id, 80)}</td>"
            f'<td><pre class="text">\n… {visible(tail)}<ins class="judge">'
            f"{visible(page.decode(item.fork.correction.tolist()))}"
            '<span class="end"></span></ins></pre></td>'
            f"<td{CLASS_N}>{_rewards(item.corrected)}</td><td{CLASS_N}>{_rewards(item.alone)}</td>"
            f"</tr>"
        )
    head = (
        '<th scope="col">task</th><th scope="col">kept end and correction</th>'
        f'<th scope="col"{CLASS_N}>reward with it</th><th scope="col"{CLASS_N}>alone</th>'
    )
    shown = f"The worst and the best of {len(page.continued)}." if len(rank) > _FORKS else ""
    return (
        "<p>From the place of each correction the policy goes on to the response's end, behind the "
        f"correction and without it; nobody reviews. {shown}</p>"
        + _table(head, rows, "Corrections and the rewards of both continuations")
        + "".join(
            f"<details><summary>The two texts of the {name}</summary>"
            f'<p class="soft small">with the correction</p>{_block(item.corrected_text)}'
            f'<p class="soft small">alone</p>{_block(item.alone_text)}</details>'
            for name, item in (("worst", rank[0]), ("best", rank[-1]))
        )
    )


def _rewards(values: Sequence[float]) -> str:
    return ", ".join("?" if math.isnan(value) else number(value) for value in values)


def _reviews(page: Page) -> str:
    order = {outcome: place for place, outcome in enumerate(_ORDER)}
    records = sorted(page.records, key=lambda r: (not r.through, order[r.review.outcome]))
    if not records:
        return ""
    shown = _spread(records)
    count = f"{len(shown)} of {len(records)} are shown; preflight.json has all of them." if len(
        shown
    ) < len(records) else ""  # fmt: skip
    return f"<p>Steps count from 0. {count}</p>" + "".join(map(_review, shown))


def _spread(records: Sequence[ReviewRecord]) -> list[ReviewRecord]:
    """Some of every outcome: an even share of the page each, what is left to the first ones."""
    by_outcome: dict[Outcome, list[ReviewRecord]] = {}
    for record in records:
        by_outcome.setdefault(record.review.outcome, []).append(record)
    share = _REVIEWS // max(1, len(by_outcome))
    chosen = {id(r) for group in by_outcome.values() for r in group[:share]}
    for record in records:
        if len(chosen) < _REVIEWS:
            chosen.add(id(record))
    return [record for record in records if id(record) in chosen]


def _review(record: ReviewRecord) -> str:
    review = record.review
    words, look = _VERDICTS[review.outcome]
    badges = [f'<span class="badge {look}">{words}</span>']
    if record.leak:
        name = "leak, in the response" if record.through else "leak, stopped"
        badges.append(f'<span class="badge {"bad" if record.through else "doubt"}">{name}</span>')
    why = [f"guard {plain(review.guard, 80)}"] if review.guard else []
    why += [plain(review.cause, 80)] if review.cause else []
    why += [plain(review.reason, 800)] if review.reason else []
    leak = f'<p class="small">Leak: {plain(record.leak, 300)}</p>' if record.leak else ""
    return (
        f'<article class="card"><header>{" ".join(badges)}</header>{_where(record)}'
        f"<p>{': '.join(why) or '–'}</p>{leak}{_chunk(record)}</article>"
    )


def _chunk(record: ReviewRecord) -> str:
    """The reviewed steps; where one is wrong, what was cut and what was written for it."""
    if not record.steps:
        return ""
    wrong = record.wrong_step
    steps, cut = record.steps, ""
    if wrong is not None and wrong < len(steps):
        dropped = "".join(steps[wrong:])
        steps = steps[:wrong]
        cut = (
            f'<del class="dropped">{visible(dropped)}<span class="end"></span></del>'
            f'<ins class="judge">{visible(record.written)}<span class="end"></span></ins>'
        )
    before = f"… {visible(record.kept[-200:])}" if record.kept else ""
    kept = visible("".join(steps))
    return f'<pre class="text" tabindex="0">\n<span class="soft">{before}</span>{kept}{cut}</pre>'


# --- rollouts


def _rollouts(page: Page) -> str:
    rows = [row for group in page.groups for row in group]
    if not rows:
        return ""
    parts = [f"<details><summary>How to read them</summary>{LEGEND}</details>"]
    for place, shown in enumerate(choose(rows, max_groups=_GROUPS)):
        first = shown.chosen[0]
        prompt = prompt_pieces(first.prompt_ids, page.decode, special_ids=page.special_ids)
        cards = [
            rollout_card(
                row,
                pieces_of(row, page.decode, special_ids=page.special_ids),
                f"r{place}-{row.rollout}",
            )
            for row in shown.chosen
        ]
        parts.append(
            f"<h3>Task {plain(shown.task_id, 120)}</h3>"
            f'<div class="group">{group_line(shown)}'
            f"{prompt_block(prompt, len(first.prompt_ids))}{''.join(cards)}</div>"
        )
    return "".join(parts)
