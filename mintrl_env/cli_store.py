"""`mintrl store`: what is in a store, whether it is whole, and its rows for other programs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from mintrl_env.exports import Reading

app = typer.Typer(
    name="store",
    help="Look at, check, merge and export the rollouts that runs have stored.",
    no_args_is_help=True,
)

StorePath = Annotated[
    Path, typer.Argument(metavar="STORE", help="A run's folder, or a folder of Parquet parts.")
]
Update = Annotated[
    str | None,
    typer.Option(
        "--update", metavar="N|A:B", help="One update, or A to B (default: all of the training)."
    ),
]
TokenizerPath = Annotated[
    str | None,
    typer.Option(metavar="PATH", help="A tokenizer's folder or Hub id (default: the run's own)."),
]
Run = Annotated[str | None, typer.Option("--run", metavar="NAME", help="Of a merged store.")]


@app.command("ls")
def list_rows(
    store: StorePath,
    update: Update = None,
    groups: Annotated[bool, typer.Option("--groups", help="A line a group.")] = False,
) -> None:
    """What there is: a line an update, or with --groups one a group."""
    from mintrl_env.store_source import open_source
    from mintrl_env.store_tables import group_table, ls_table

    source, problems = open_source(store), list[str]()
    rows = source.rows(*_updates(update), problems=problems)
    _console().print(group_table(rows) if groups else ls_table(rows))
    _say(problems)


@app.command()
def show(
    store: StorePath,
    task: Annotated[str | None, typer.Argument(metavar="[TASK]", help="Its id.")] = None,
    update: Update = None,
    rollout: Annotated[int | None, typer.Option("--rollout", help="Its number.")] = None,
    run: Run = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Trajectories at most.")] = 1,
    max_tokens: Annotated[
        int, typer.Option(min=12, help="Tokens shown of one stretch by one author.")
    ] = 2400,
    tokenizer: TokenizerPath = None,
) -> None:
    """Print trajectories: who wrote what, what was dropped, each review, the reward."""
    from mintrl_env.errors import UsageError
    from mintrl_env.store_show import show as show_row
    from mintrl_env.store_source import open_source

    source, problems, shown = open_source(store), list[str](), 0
    console = _console()
    for row in source.rows(*_updates(update), problems=problems):
        if task not in (None, row.task_id) or rollout not in (None, row.rollout):
            continue
        if run not in (None, row.run):
            continue
        if shown == limit:
            break
        if shown:
            console.rule()
        reader = source.tokenizer(row.run, tokenizer)
        special = reader.special_ids
        show_row(console, row, reader.decode, special_ids=special, max_tokens=max_tokens)
        shown += 1
    _say(problems)
    if not shown:
        raise UsageError(
            f"{store}: no such trajectory; mintrl store ls {store} --groups lists them"
        )


@app.command()
def stats(
    store: StorePath,
    update: Update = None,
    as_json: Annotated[bool, typer.Option("--json", help="All counts, a line an update.")] = False,
) -> None:
    """Counts and fractions by update: rewards, reviews, off-policy tokens, hopeless groups."""
    from mintrl_env.store_source import open_source
    from mintrl_env.store_tables import stats_of, stats_table

    source, problems = open_source(store), list[str]()
    figures = stats_of(source.rows(*_updates(update), problems=problems))
    if as_json:
        for row in figures:
            print(json.dumps(row, allow_nan=False))
    else:
        _console().print(stats_table(figures))
    _say(problems)


@app.command()
def validate(store: StorePath) -> None:
    """Look at every file and row; name what is torn, doubled, missing or wrong, and exit 1."""
    from mintrl_env.store_check import check_store
    from mintrl_env.store_source import open_source

    source = open_source(store)
    found = check_store(source.store, group_size=source.group_size)
    for line in found.problems:
        print(line)
    _say([f"note: {line}" for line in [*found.notes, *source.remarks]])
    print(f"{found.files} file(s), {found.rows:,} row(s), {len(found.problems)} problem(s)")
    if found.problems:
        print(
            f"readable rows without doubles: mintrl store merge {store} --out NEW", file=sys.stderr
        )
        raise typer.Exit(1)


@app.command()
def merge(
    stores: Annotated[
        list[Path], typer.Argument(metavar="STORE...", help="Runs' folders or stores.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="A new folder.")],
) -> None:
    """Put the rows of several runs into one store; their column `run` tells them apart."""
    from mintrl_env.store_source import merge_sources

    count, names, problems = merge_sources(stores, out)
    _say(problems)
    print(f"{out}: {count:,} rows of {', '.join(names)}")


@app.command()
def export(
    store: StorePath,
    out: Annotated[Path, typer.Argument(metavar="FILE", help="A new .jsonl or .parquet.")],
    kind: Annotated[str, typer.Option("--kind", help="sft, pairs, first-error or int.")],
    update: Update = None,
    min_reward: Annotated[
        float | None,
        typer.Option(help="Of the trajectory (default: 1 for sft and int, else any)."),
    ] = None,
    all_rows: Annotated[bool, typer.Option("--all", help="Also those that are not valid.")] = False,
    ids: Annotated[
        bool, typer.Option("--ids/--no-ids", help="The policy's token ids beside the texts.")
    ] = True,
    tokenizer: TokenizerPath = None,
    delimiter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help=r"Step delimiter, \n for a line end (default: the run's)."
        ),
    ] = None,
) -> None:
    """Rows for other trainers and benchmarks, as docs/store.md describes them."""
    from functools import cache

    from mintrl_env.export_files import check_out, write_export
    from mintrl_env.exports import RowFilter, columns_of, export_of, export_rows
    from mintrl_env.store_source import open_source

    least = export_of(kind).min_reward if min_reward is None else min_reward
    check_out(out)
    source, problems = open_source(store), list[str]()
    delimiters = [text.replace(r"\n", "\n") for text in delimiter or []]

    @cache
    def reading(run: str) -> Reading:
        return source.reading(run, tokenizer=tokenizer, delimiters=delimiters)

    rows = export_rows(
        source.rows(*_updates(update), problems=problems),
        kind,
        reading,
        keep=RowFilter(valid_only=not all_rows, min_reward=least),
        ids=ids,
    )
    count = write_export(rows, out, columns_of(kind, ids=ids))
    _say([*problems, *source.remarks])
    print(f"{out}: {count:,} rows")


def _updates(text: str | None) -> tuple[int | None, int | None]:
    """`3` as (3, 3), `2:5` as (2, 5), `2:` as (2, None)."""
    from mintrl_env.errors import UsageError

    if text is None:
        return None, None
    first, colon, last = text.partition(":")
    try:
        low = int(first) if first else None
        high = (int(last) if last else None) if colon else low
    except ValueError as error:
        raise UsageError(f"--update takes N or A:B, as 3, 2:5 or 4:; not {text!r}") from error
    if low is None and high is None:
        raise UsageError("--update takes N or A:B, as 3, 2:5 or 4:")
    return low, high


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    # In a file or a pipe nothing is folded, and a table is no use with half its columns.
    width = max(console.width, 100) if console.is_terminal else 400
    return Console(highlight=False, width=width)


def _say(lines: list[str]) -> None:
    for line in dict.fromkeys(lines):
        print(line, file=sys.stderr)
