"""One self-contained HTML page about a run: figures, curves, and some rollouts with who wrote what.

No network, no files beside it; readable printed, in the dark and by a screen reader. What a model
wrote is shown as text whatever it holds.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import tempfile
from collections.abc import Collection
from html import escape
from pathlib import Path
from typing import Any

from mintrl_env.curves import write_curves
from mintrl_env.errors import MissingExtraError, StoreError, UsageError
from mintrl_env.report_html import (
    CLASS_N,
    LEGEND,
    group_line,
    number,
    percent,
    plain,
    prompt_block,
    rollout_card,
)
from mintrl_env.report_pieces import Decode, pieces_of, prompt_pieces
from mintrl_env.report_run import Run, config_differences, load_runs
from mintrl_env.report_select import Shown, choose, stages
from mintrl_env.report_style import CSS, FOLLOW_SCRIPT, SCRIPT


def write_report(
    run_dir: str | Path,
    out: str | Path | None = None,
    *,
    decode: Decode,
    max_groups: int = 9,
    title: str = "",
    special_ids: Collection[int] = (),
) -> Path:
    """Write `report.html`.

    Args:
        run_dir: a run's folder (`rollouts/`, `metrics.jsonl`, `config.yaml`, `summary.json`), or
            one that holds one such folder a method.
        out: where to; `report.html` in the run's folder by default.
        decode: text of token ids, special tokens written out (`Tokenizer.decode`).
        max_groups: the most groups shown of each run, a third each from its first, middle and last
            update.
        title: the page's; the folder's name by default.
        special_ids: tokens set apart from the text (`Tokenizer.special_ids`).

    Raises:
        StoreError: there is no run in the folder, or the page cannot be written.
        UsageError: `decode` cannot read the run's ids.
    """
    run_dir = Path(run_dir)
    out = run_dir / "report.html" if out is None else Path(out)
    page = render_report(
        run_dir, decode=decode, max_groups=max_groups, title=title, special_ids=special_ids
    )
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(page, encoding="utf-8", errors="backslashreplace")
        temporary.replace(out)
    except OSError as error:
        raise StoreError(f"{out}: cannot be written: {error.strerror}") from error
    return out


def render_report(
    run_dir: str | Path,
    *,
    decode: Decode,
    max_groups: int = 9,
    title: str = "",
    special_ids: Collection[int] = (),
    version: str = "",
) -> str:
    """The page as text; see `write_report`.

    Args:
        version: set by the view server: the page then asks it for news.
    """
    if max_groups < 1:
        raise UsageError(f"max_groups must be at least 1, not {max_groups}")
    run_dir = Path(run_dir)
    runs = load_runs(run_dir)
    title = title or f"MInTRL run {run_dir.resolve().name}"
    sections = [_rollouts(run, decode, max_groups, special_ids, len(runs) > 1) for run in runs]
    curves = _curves(run_dir, runs)
    problems = list(dict.fromkeys(p for run in runs for p in run.problems))
    links = [("figures", "Figures")] + ([("curves", "Curves")] if curves else [])
    links += [("legend", "How to read the rollouts")]
    links += [(f"run-{i}", f"Rollouts: {run.name}") for i, run in enumerate(runs)]
    links += [("config", "Configuration")] if any(run.config for run in runs) else []
    body = [
        f"<h1>{plain(title, 200)}</h1>",
        f'<p class="soft">{_subtitle(runs)}</p>',
        '<nav aria-label="Sections"><ul>'
        + "".join(f'<li><a href="#{key}">{plain(name, 80)}</a></li>' for key, name in links)
        + "</ul></nav>",
        _problems(problems),
        f'<section id="figures"><h2>Figures</h2>{_figures(runs)}</section>',
        curves,
        f'<section id="legend"><h2>How to read the rollouts</h2>{LEGEND}</section>',
        *(f'<section id="run-{i}">{section}</section>' for i, section in enumerate(sections)),
        _config(runs),
    ]
    return _page(title, "\n".join(body), version)


def _page(title: str, body: str, version: str) -> str:
    script = SCRIPT + (FOLLOW_SCRIPT if version else "")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Even if a response's markup ever got through, no script but this one would run, nothing load.
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    policy += "; connect-src 'self'" if version else ""
    fresh = (
        '<div id="fresh" role="status" hidden><a href="">The run has gone on: show it</a></div>'
        if version
        else ""
    )
    return (
        f'<!doctype html>\n<html lang="en" data-version="{escape(version)}">\n<head>\n'
        '<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{plain(title, 200)}</title>\n<style>{CSS}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n{fresh}\n<script>{script}</script>\n</body>\n</html>\n"
    )


def _subtitle(runs: list[Run]) -> str:
    parts = []
    for run in runs:
        updates = [u for u in run.updates if u >= 0] or [row["update"] for row in run.metrics]
        reach = f"updates {min(updates)} to {max(updates)}" if updates else "no update yet"
        parts.append(f"{plain(run.name, 80)}: {reach}")
    return "; ".join(parts)


def _problems(problems: list[str]) -> str:
    if not problems:
        return ""
    heading = "<strong>Not everything could be read</strong>"
    items = "".join(f"<li>{plain(problem, 400)}</li>" for problem in problems[:20])
    more = f"<li>and {len(problems) - 20} more</li>" if len(problems) > 20 else ""
    return f'<div class="warn">{heading}<ul>{items}{more}</ul></div>'


# --- figures

_FIRST = (
    "accuracy_before", "accuracy_after", "held_out_problems", "updates", "rollouts", "seconds",
    "reviews", "revises", "revises_per_review", "off_policy_fraction_intervened",
    "off_policy_fraction_all", "control_reward", "intervened_reward", "all_fail_share",
    "all_succeed_share", "tokens.policy", "tokens.intervention", "tokens.environment",
    "tokens.dropped", "tokens.judge_prompt", "tokens.judge_completion",
)  # fmt: skip
_SHARES = ("accuracy", "fraction", "share", "per_review", "rate")


def _figures(runs: list[Run]) -> str:
    keys = dict.fromkeys(k for k in _FIRST if any(k in run.figures for run in runs))
    keys |= dict.fromkeys(k for run in runs for k in run.figures if not k.endswith("_ci95"))
    # "rollouts" and the columns' heads say these already.
    said = {"method"} | ({"trajectories"} if "rollouts" in keys else set())
    shown = [
        key
        for key in keys
        if key not in said and any(_is_figure(run.figures.get(key)) for run in runs)
    ]
    if not shown:
        return '<p class="soft">No figures yet.</p>'
    head = "".join(f'<th scope="col"{CLASS_N}>{plain(run.name, 80)}</th>' for run in runs)
    rows = []
    for key in shown:
        big = " big" if key.startswith("accuracy") else ""
        cells = "".join(f'<td class="n{big}">{_figure(run.figures, key)}</td>' for run in runs)
        rows.append(f'<tr><th scope="row">{plain(_label(key), 100)}</th>{cells}</tr>')
    return _folded_table("<td></td>" + head, rows, len(_FIRST), "more figures", "Figures")


def _folded_table(head: str, rows: list[str], limit: int, what: str, caption: str) -> str:
    def table(part: list[str]) -> str:
        return (
            f'<div class="scroll"><table><caption class="hidden">{caption}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{''.join(part)}</tbody></table></div>"
        )

    if len(rows) <= limit + 3:
        return table(rows)
    summary = f"<summary>{len(rows) - limit} {what}</summary>"
    return f"{table(rows[:limit])}<details>{summary}{table(rows[limit:])}</details>"


def _is_figure(value: Any) -> bool:
    return isinstance(value, (int, float, str)) and value != ""


def _label(key: str) -> str:
    words = key.replace("_", " ").replace(".", ": ").replace("off policy", "off-policy")
    return words[:1].upper() + words[1:]


def _figure(figures: dict[str, Any], key: str) -> str:
    value: Any = figures.get(key)
    if not _is_figure(value):
        return "–"
    if isinstance(value, str):
        return plain(value, 120)
    share = any(word in key for word in _SHARES) and 0 <= value <= 1 and value is not True
    text = percent(float(value)) if share else number(value)
    bounds = figures.get(f"{key}_ci95")
    if isinstance(bounds, list) and len(bounds) == 2 and all(_is_figure(b) for b in bounds):
        low, high = (100 * float(b) if share else float(b) for b in bounds)
        text += f' <span class="soft small">95 %: {low:.1f} to {high:.1f}</span>'
    return text


# --- curves


def _curves(run_dir: Path, runs: list[Run]) -> str:
    names = ", ".join(run.name for run in runs)
    image = _curves_png(run_dir, runs)
    if image is None:
        return ""
    if isinstance(image, str):
        return f'<section id="curves"><h2>Curves</h2><p class="soft">{plain(image)}</p></section>'
    data = base64.b64encode(image).decode()
    tables = _metrics_tables(runs)
    return (
        '<section id="curves"><h2>Curves</h2>'
        f'<img class="curves" alt="Curves over updates of {plain(names, 200)}; the same figures '
        f'are in the tables below" src="data:image/png;base64,{data}">{tables}</section>'
    )


def _curves_png(run_dir: Path, runs: list[Run]) -> bytes | str | None:
    """The run's curves.png, or one drawn now where it is missing or older than the metrics."""
    path = run_dir / "curves.png"
    logs = [run.folder / "metrics.jsonl" for run in runs if run.metrics]
    try:
        if path.is_file() and all(log.stat().st_mtime <= path.stat().st_mtime for log in logs):
            return path.read_bytes()
    except OSError:
        pass  # it went away in between: draw it
    if not logs:
        return None
    with tempfile.TemporaryDirectory() as folder:
        try:
            drawn = write_curves(
                {run.name: run.metrics for run in runs}, Path(folder) / "curves.png"
            )
            return drawn.read_bytes()
        except UsageError:
            return None
        except MissingExtraError as error:
            return str(error)


def _metrics_tables(runs: list[Run]) -> str:
    tables = []
    for run in runs:
        keys = list(
            dict.fromkeys(
                key
                for row in run.metrics
                for key, value in row.items()
                if isinstance(value, (int, float, str)) and key not in ("update", "run_attempt")
            )
        )[:24]
        if not keys:
            continue
        # A long run's table keeps its ends and every n-th update between.
        stride = math.ceil(len(run.metrics) / 60)
        rows = [
            row for i, row in enumerate(run.metrics) if i % stride == 0 or row is run.metrics[-1]
        ]
        head = "".join(
            f'<th scope="col"{CLASS_N}>{plain(key, 60)}</th>' for key in ["update", *keys]
        )
        lines = "".join(
            f'<tr><th scope="row"{CLASS_N}>{row["update"]}</th>'
            + "".join(f"<td{CLASS_N}>{_figure({'x': row.get(key)}, 'x')}</td>" for key in keys)
            + "</tr>"
            for row in rows
        )
        tables.append(
            '<details class="aside"><summary>Table of these figures: '
            f"{plain(run.name, 80)}</summary>"
            f'<div class="scroll small"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{lines}</tbody></table></div></details>"
        )
    return "".join(tables)


# --- rollouts


def _rollouts(
    run: Run, decode: Decode, max_groups: int, special_ids: Collection[int], several: bool
) -> str:
    heading = f"Rollouts: {plain(run.name, 80)}" if several else "Rollouts"
    parts = [f"<h2>{heading}</h2>"]
    chosen = stages(run.updates)
    if not chosen:
        parts.append('<p class="soft">No group has finished yet.</p>')
    left = max_groups
    for place, (name, update) in enumerate(chosen):
        quota = math.ceil(left / (len(chosen) - place))
        groups = choose(run.rollouts(update), max_groups=quota) if quota else []
        left -= len(groups)
        for shown in groups:
            parts.append(_group(run, shown, name, decode, special_ids))
    return "\n".join(parts)


def _group(run: Run, shown: Shown, stage: str, decode: Decode, special_ids: Collection[int]) -> str:
    first = shown.chosen[0]
    key = hashlib.sha256(
        f"{run.folder}\0{shown.update}\0{shown.task_id}".encode("utf-8", "surrogatepass")
    ).hexdigest()[:10]
    prompt = prompt_pieces(first.prompt_ids, decode, special_ids=special_ids)
    when = f"Evaluation {shown.update}" if shown.update < 0 else f"Update {shown.update}"
    cards = [
        rollout_card(row, pieces_of(row, decode, special_ids=special_ids), f"g{key}-{row.rollout}")
        for row in shown.chosen
    ]
    return (
        f"<h3>{when} ({stage}), task {plain(shown.task_id, 120)}</h3>"
        f'<div class="group">{group_line(shown)}{prompt_block(prompt, len(first.prompt_ids))}'
        f"{''.join(cards)}</div>"
    )


# --- configuration


def _config(runs: list[Run]) -> str:
    if not any(run.config for run in runs):
        return ""
    parts = ['<section id="config"><h2>Configuration</h2>']
    if len(runs) > 1:
        head = '<th scope="col">key</th>' + "".join(
            f'<th scope="col">{plain(run.name, 80)}</th>' for run in runs
        )
        rows = [
            f'<tr><th scope="row"><code>{plain(key, 120)}</code></th>'
            + "".join(f"<td>{plain(value, 200)}</td>" for value in values)
            + "</tr>"
            for key, values in config_differences(runs)
        ]
        parts.append(
            "<p>The keys in which the runs differ:</p>" if rows else "<p>No differences.</p>"
        )
        parts.append(_folded_table(head, rows, 40, "more keys", "Differences") if rows else "")
    parts += [
        f"<details><summary>config.yaml of {plain(run.name, 80)}</summary>"
        f'<pre class="text" tabindex="0">\n{plain(run.config, 60000)}</pre></details>'
        for run in runs
        if run.config
    ]
    return "".join(parts) + "</section>"
