from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mintrl_env.episode import (
    EnvironmentOutput,
    Episode,
    EpisodeConfig,
    Finished,
    NeedChunk,
    NeedEnvironment,
    NeedReview,
    NeedScore,
)
from mintrl_env.errors import StoreError, UsageError
from mintrl_env.metrics import MetricsLog
from mintrl_env.prompts import ByteTokenizer
from mintrl_env.report import render_report, write_report
from mintrl_env.report_html import plain, visible
from mintrl_env.report_pieces import Author, Gap, Mark, Text, pieces_of, prompt_pieces
from mintrl_env.report_run import config_differences, load_runs, without_secrets
from mintrl_env.report_select import choose, features, stages
from mintrl_env.store import RolloutStore
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import (
    Chunk,
    FailedReview,
    Kind,
    ReviewEvent,
    Score,
    StopReason,
    Task,
    Usage,
    Verdict,
)
from mintrl_env.view_server import make_server

TOKENIZER = ByteTokenizer()
CONFIG = EpisodeConfig(
    chunk_tokens=4000, max_reviews=4, max_correction=64, max_response=200_000,
    step_delimiters=("\n\n",),
)  # fmt: skip
RIGHT, WRONG = Score(1.0, "correct"), Score(0.0, "wrong")


def played(
    script: Sequence[str | bytes | list[int] | ReviewEvent],
    *,
    prompt: str = "What is 6 * 7 + 8?",
    task_id: str = "t1",
    score: Score = RIGHT,
    kind: Kind = Kind.INTERVENED,
    update: int = 0,
    rollout: int = 0,
    config: EpisodeConfig = CONFIG,
    environment: Sequence[str] = (),
) -> Trajectory:
    """A real episode: chunks (texts, an EOS after the last one) and review events in turn."""
    chunks = [part for part in script if isinstance(part, (str, bytes, list))]
    reviews = [part for part in script if not isinstance(part, (str, bytes, list))]
    outputs = list(environment)
    episode = Episode(
        Task(task_id, prompt), TOKENIZER.encode(prompt), kind=kind, tokenizer=TOKENIZER,
        config=config,
    )  # fmt: skip
    while not isinstance(need := episode.need, Finished):
        if isinstance(need, NeedChunk):
            part = chunks.pop(0)
            ids = list(part.encode() if isinstance(part, str) else part)
            if not chunks or config.turns:
                ids.append(TOKENIZER.eos_id)
            episode.send(Chunk(ids, np.full(len(ids), -0.5), policy_version=update))  # type: ignore[arg-type]
        elif isinstance(need, NeedReview):
            episode.send(reviews.pop(0) if reviews else Verdict.keep())
        elif isinstance(need, NeedEnvironment):
            text = outputs.pop(0) if outputs else ""
            episode.send(EnvironmentOutput(TOKENIZER.encode(text), done=not outputs))
        elif isinstance(need, NeedScore):
            episode.send(score)
    return Trajectory.of(episode, update=update, rollout=rollout)


def shown(row: Trajectory, **kwargs: Any) -> list[Any]:
    return pieces_of(row, TOKENIZER.decode, special_ids=TOKENIZER.special_ids, **kwargs)


REVISED = ["6 * 7 = 42\n\n42 + 8 = 51\n\nSo 51", Verdict.revise(1, "42 + 8 = 50"), "\n\nSo 50"]


def test_dropped_text_stands_where_it_was_cut_before_the_correction() -> None:
    assert shown(played(REVISED)) == [
        Text(Author.POLICY, "6 * 7 = 42\n\n"),
        Mark(0),
        Text(Author.DROPPED, "42 + 8 = 51\n\nSo 51"),
        Text(Author.JUDGE, "42 + 8 = 50"),
        Text(Author.POLICY, "\n\nSo 50"),
        Text(Author.POLICY, "<|eos|>", special=True),
        Mark(1),
    ]


def test_a_keep_is_marked_after_its_chunk_and_does_not_split_a_character() -> None:
    # The emoji's four bytes lie two and two on both sides of the reviewed chunk's end.
    emoji = "🙂".encode()
    row = played([b"a" + emoji[:2], Verdict.keep(), emoji[2:] + b"b", Verdict.keep()])
    assert shown(row) == [
        Text(Author.POLICY, "a"),
        Mark(0),
        Text(Author.POLICY, "🙂b"),
        Text(Author.POLICY, "<|eos|>", special=True),
        Mark(1),
    ]


def test_two_corrections_in_a_row_stay_two() -> None:
    row = played(["x = 1", Verdict.revise(0, "x = 2"), "\n\ny", Verdict.revise(0, "!"), " end"])
    assert shown(row)[:6] == [
        Mark(0),
        Text(Author.DROPPED, "x = 1"),
        Text(Author.JUDGE, "x = 2"),
        Mark(1),
        Text(Author.DROPPED, "\n\ny"),
        Text(Author.JUDGE, "!"),
    ]


def test_a_bare_cut_and_a_cut_end_of_sequence_are_shown() -> None:
    row = played(["one\n\ntwo", Verdict.revise(1, ""), "three"])
    assert shown(row)[:4] == [
        Text(Author.POLICY, "one\n\n"),
        Mark(0),
        Text(Author.DROPPED, "two"),
        Text(Author.POLICY, "three"),
    ]
    # The judge drops an EOS that the policy had written.
    row = played([[*b"7\n\n8", TOKENIZER.EOS], Verdict.revise(1, "9"), ""])
    assert [p for p in shown(row) if isinstance(p, Text) and p.author is Author.DROPPED] == [
        Text(Author.DROPPED, "8"),
        Text(Author.DROPPED, "<|eos|>", special=True),
    ]


def test_environment_text_has_its_own_author() -> None:
    config = EpisodeConfig(turns=True, max_reviews=0)
    row = played(["call", "done"], config=config, environment=["result: 5\n", ""])
    assert [p.text for p in shown(row) if p.author is Author.ENVIRONMENT] == ["result: 5\n"]


def test_a_very_long_row_is_cut_and_says_by_how_much() -> None:
    config = EpisodeConfig(chunk_tokens=100_000, max_reviews=1, max_response=100_000)
    row = played(["a" * 60_000 + "b" * 39_999], config=config)
    first, gap, last, *_ = shown(row, max_tokens=300)
    assert first == Text(Author.POLICY, "a" * 200) and last == Text(Author.POLICY, "b" * 100)
    assert gap == Gap(Author.POLICY, 99_999 - 300)
    total = sum(len(p.text) for p in shown(row, max_tokens=300) if isinstance(p, Text))
    assert total == 300 + len("<|eos|>")


def test_very_many_runs_are_bounded_too() -> None:
    ids = np.tile([97, TOKENIZER.EOS], 20_000)
    pieces = prompt_pieces(ids, TOKENIZER.decode, special_ids={TOKENIZER.EOS})
    assert len(pieces) < 1000
    assert sum(p.tokens for p in pieces if isinstance(p, Gap)) + sum(
        1 if p.special else len(p.text) for p in pieces if isinstance(p, Text)
    ) == len(ids)


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_the_pieces_hold_every_character_of_the_row_once(data: st.DataObject) -> None:
    words = st.text(st.sampled_from("ab é🙂\n"), min_size=1, max_size=12)
    script: list[str | ReviewEvent] = []
    for _ in range(data.draw(st.integers(1, 4))):
        script.append(data.draw(words))
        script.append(
            data.draw(
                st.one_of(
                    st.just(Verdict.keep()),
                    st.builds(Verdict.revise, st.just(0), st.text("xy🙃", max_size=5)),
                    st.just(FailedReview("timeout")),
                )
            )
        )
    script.append("end")
    row = played(script)
    pieces = shown(row)
    for author, ids in (
        (Author.POLICY, row.ids[row.provenance == 0]),
        (Author.JUDGE, row.ids[row.provenance == 1]),
        (Author.DROPPED, np.concatenate([[], *(r.dropped_ids for r in row.reviews)])),
    ):
        text = "".join(p.text for p in pieces if isinstance(p, Text) and p.author is author)
        assert text == TOKENIZER.decode(ids)
    assert [p.review for p in pieces if isinstance(p, Mark)] == list(range(len(row.reviews)))


def test_decode_of_another_tokenizer_is_a_clear_error() -> None:
    def decode(ids: list[int]) -> str:
        raise IndexError("256")

    with pytest.raises(UsageError, match="tokenizer that the run was made with"):
        pieces_of(played(REVISED), decode)


# --- HTML


class _Page(HTMLParser):
    """Counts tags, collects ids, links and the text of <pre> blocks."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: dict[str, int] = {}
        self.ids: list[str] = []
        self.links: list[str] = []
        self.sources: list[str] = []
        self.pres: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        values = dict(attrs)
        self.ids += [values["id"] or ""] if "id" in values else []
        self.links += [values["href"] or ""] if "href" in values else []
        self.sources += [values["src"] or ""] if "src" in values else []
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag == "pre":
            self.pres.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data: str) -> None:
        if "pre" in self.open:
            self.pres[-1] += data


HOSTILE = "</pre></del><script>alert(1)</script><img src=x onerror=y>&lt;\u202e\x1b[31m"


def write_run(folder: Path, *, name: str = "", rows: Sequence[Trajectory] | None = None) -> Path:
    """A run of one update, of which the rows can be given."""
    run = folder / name
    store = RolloutStore(run / "rollouts")
    given = rows or [
        played(["6 * 7 = 42\n\n= 51"], kind=Kind.CONTROL, score=WRONG),
        played(REVISED, rollout=1),
    ]
    groups: dict[tuple[int, str], list[Trajectory]] = {}
    for row in given:
        groups.setdefault((row.update, row.task_id), []).append(row)
    for group in groups.values():
        store.write_group(group)
    with MetricsLog(run / "metrics.jsonl") as log:
        log.write(0, {"reward_control": 0.25, "phase": "mintrl", "loss": math.nan})
    (run / "curves.png").write_bytes(b"drawn")  # newer than the metrics: taken as it is
    (run / "config.yaml").write_text(f"method: {name or 'x'}\njudge:\n  api_key: sk-very-secret\n")
    return run


def page_of(run: Path, **kwargs: Any) -> str:
    kwargs = {"decode": TOKENIZER.decode, "special_ids": TOKENIZER.special_ids} | kwargs
    page = write_report(run, **kwargs).read_text()
    parsed = _Page(page)
    assert parsed.open == []
    assert len(parsed.ids) == len(set(parsed.ids))
    assert {link[1:] for link in parsed.links if link.startswith("#")} <= set(parsed.ids)
    return page


def test_the_page_holds_itself_and_tells_the_authors_apart(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path))
    parsed = _Page(page)
    assert all(link.startswith("#") for link in parsed.links)
    assert all(source.startswith("data:image/png;base64,") for source in parsed.sources)
    assert parsed.tags["script"] == 1 and "http://" not in page and "https://" not in page
    assert 'dropped: </span>42 + 8 = 51<span class="nl"></span>\n' in page
    assert 'judge wrote: </span>42 + 8 = 50<span class="end"></span></ins>' in page
    assert ">1 revise</a>" in page and ">2 keep</a>" in page
    assert "✓ reward 1, correct" in page and "✗ reward 0, wrong" in page
    assert "control, never reviewed" in page and "stopped by eos" in page
    kept, judge = len("6 * 7 = 42\n\n\n\nSo 50") + 1, len("42 + 8 = 50")
    assert f"{kept + judge} tokens: {kept} policy, {judge} judge" in page
    assert f"off-policy {100 * judge / (kept + judge):.1f} %" in page


def test_curves_are_drawn_anew_where_the_metrics_are_newer(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    assert base64.b64encode(b"drawn").decode() in page_of(run)
    old = (run / "metrics.jsonl").stat().st_mtime - 60
    os.utime(run / "curves.png", (old, old))
    assert "base64,iVBORw0KGgo" in page_of(run)  # a PNG's signature
    assert (run / "curves.png").read_bytes() == b"drawn"  # the report writes itself alone
    (run / "metrics.jsonl").write_text("")
    (run / "curves.png").unlink()
    assert "<h2>Curves</h2>" not in page_of(run)


def test_a_closing_sign_stays_on_the_line_of_the_text_it_closes(tmp_path: Path) -> None:
    page = page_of(
        write_run(tmp_path, rows=[played(["a\n\nb\n\n", Verdict.revise(1, "c\n"), "d"])])
    )
    end = '<span class="nl"></span><span class="end"></span>\n'
    assert f'dropped: </span>b<span class="nl"></span>\n{end}</del>' in page
    assert f"judge wrote: </span>c{end}</ins>d" in page


def test_copied_text_is_the_text(tmp_path: Path) -> None:
    row = played(["a\tb  c\n\n <d>&amp; \nlast"], kind=Kind.CONTROL)
    page = page_of(write_run(tmp_path, rows=[row]))
    assert "a\tb  c\n\n <d>&amp; \nlast<|eos|>" in [text.lstrip("\n") for text in _Page(page).pres]


def test_hostile_text_stays_text_wherever_it_comes_from(tmp_path: Path) -> None:
    row = played(
        [HOSTILE, Verdict.revise(0, HOSTILE, reason=HOSTILE + "\ud800"), HOSTILE],
        prompt=HOSTILE,
        task_id=HOSTILE,
        score=Score(0.5, HOSTILE, HOSTILE),
    )
    run = write_run(tmp_path, rows=[row])
    (run / "config.yaml").write_text(HOSTILE)
    (run / "summary.json").write_text(json.dumps({HOSTILE: HOSTILE, "\ud800": 1}))
    page = page_of(run, title=HOSTILE)
    parsed = _Page(page)
    assert parsed.tags["script"] == 1  # ours
    assert parsed.tags.get("img", 0) == 1  # the curves
    assert not re.search("[\\x00-\\x08\\x0e-\\x1f\\u202e\\ud800-\\udfff]", page)
    assert '<span class="odd">U+202E</span>' in page and '<span class="odd">ESC</span>' in page


def test_only_the_pages_own_script_may_run(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path))
    script = re.search(r"<script>(.*)</script>", page, re.DOTALL)
    assert script is not None
    digest = base64.b64encode(hashlib.sha256(script.group(1).encode()).digest()).decode()
    styles = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert f"{styles}; script-src 'sha256-{digest}'" in page


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_visible_text_reads_back(text: str) -> None:
    page = _Page(f"<pre>{visible(text)}</pre>")
    assert page.open == [] and "script" not in page.tags
    odd = {c for c in page.pres[0]} - set(text)
    assert odd <= set("U+0123456789ABCDEFRNLS")


def test_lone_surrogates_are_written_out() -> None:
    assert visible("a\ud83d") == 'a<span class="odd">U+D83D</span>'
    assert plain("a\ud83d<") == "a\\ud83d&lt;"
    assert plain("x" * 50, limit=10) == "x" * 10 + " … (40 more characters)"


def test_a_long_prompt_is_folded_away_and_a_short_one_is_not(tmp_path: Path) -> None:
    short = page_of(write_run(tmp_path, name="a"))
    assert '<p class="soft small">Prompt, 18 tokens</p>' in short
    long = write_run(tmp_path, name="b", rows=[played(["x"], prompt="why? " * 20_000)])
    page = page_of(long)
    assert "<summary>Prompt, 100,000 tokens: why? why?" in page
    assert f"{100_000 - 2400:,} tokens not shown" in page
    assert len(page) < 400_000


def test_rows_that_count_for_nothing_say_why(tmp_path: Path) -> None:
    failed = Trajectory.failed(
        task_id="t", prompt_ids=[1], kind=Kind.CONTROL, update=0, rollout=0, eos_id=256,
        cause="deadline", stop_reason=StopReason.DEADLINE,
    )  # fmt: skip
    deferred = played(["x"], rollout=1, task_id="t", score=Score.undecided("deferred"))
    page = page_of(write_run(tmp_path, rows=[failed, deferred]))
    assert "? not valid: deadline" in page and "? reward later (deferred)" in page
    assert "stopped by deadline" in page


def test_guards_and_failures_are_told_apart(tmp_path: Path) -> None:
    usage = Usage(prompt_tokens=612, completion_tokens=7, usd=0.001)
    row = played(
        [
            "a", Verdict.revise(0, "b", usage=usage).kept_by("leak", "holds the answer"),
            "c", FailedReview("timeout", "30 s"), "d", FailedReview("unparsed"), "e",
        ]
    )  # fmt: skip
    page = page_of(write_run(tmp_path, rows=[row]))
    assert "guard leak: holds the answer" in page and "timeout: 30 s" in page
    for number, word in ((1, "guarded"), (2, "failed"), (3, "unparsed"), (4, "keep")):
        assert f">{number} {word}</a>" in page
    assert '<td class="n">612</td><td class="n">7</td><td class="n">0.0010</td>' in page


# --- what is chosen


def test_first_middle_and_last_update_are_shown() -> None:
    assert stages([]) == []
    assert stages([4]) == [("only", 4)]
    assert stages([4, 2]) == [("first", 2), ("last", 4)]
    assert stages([-1, 0, 1, 2, 3]) == [("first", 0), ("middle", 1), ("last", 3)]
    assert stages([-2, -2]) == [("only", -2)]  # an evaluation alone


def test_the_contrast_of_a_failed_control_and_a_mended_rollout_comes_first() -> None:
    rows = [
        played(["x"], task_id="a", kind=Kind.CONTROL),
        played(["x"], task_id="a", rollout=1),
        played(["x"], task_id="b", kind=Kind.CONTROL, score=WRONG),
        played(["x"], task_id="b", kind=Kind.CONTROL, score=WRONG, rollout=1),
        played(REVISED, task_id="b", rollout=2),
        played(["x"], task_id="c", kind=Kind.CONTROL, score=WRONG),
        played(["x", FailedReview("timeout")], task_id="c", rollout=1, score=WRONG),
    ]
    groups = choose(rows, max_groups=9)
    first = groups[0]
    assert first.task_id == "b" and [row.rollout for row in first.chosen] == [0, 2]
    assert len(first.rows) == 3
    assert [shown.task_id for shown in groups] == ["b", "a", "c"]
    # A further group needs something new.
    assert [shown.task_id for shown in choose(rows, max_groups=1)] == ["b"]
    assert len(choose(rows[:2], max_groups=5)) == 1


def test_what_a_row_can_show() -> None:
    assert features(played(REVISED)) == {"revised right"}
    assert features(played(["x"], kind=Kind.CONTROL, score=WRONG)) == {"control wrong"}
    assert features(played(["x", FailedReview("timeout")])) == {"kept right", "failed"}


# --- the run's files


def test_methods_are_compared_in_one_page(tmp_path: Path) -> None:
    write_run(tmp_path, name="grpo")
    write_run(tmp_path, name="mintrl-const")
    methods = {
        "mintrl-const": {"accuracy_after": 0.5, "accuracy_after_ci95": [0.457, 0.543]},
        "grpo": {"accuracy_after": 0.096, "tokens": {"policy": 12345}},
    }
    (tmp_path / "summary.json").write_text(json.dumps({"methods": methods}))
    runs = load_runs(tmp_path)
    assert [run.name for run in runs] == ["mintrl-const", "grpo"]  # the summary's order
    assert runs[1].figures["tokens.policy"] == 12345
    assert config_differences(runs) == [("method", ['"mintrl-const"', '"grpo"'])]
    page = page_of(tmp_path)
    assert '50.0 % <span class="soft small">95 %: 45.7 to 54.3</span>' in page
    assert "9.6 %" in page and "12,345" in page
    assert "Rollouts: mintrl-const" in page and "Rollouts: grpo" in page
    assert "very-secret" not in page


def test_figures_are_counted_where_there_is_no_summary(tmp_path: Path) -> None:
    (run,) = load_runs(write_run(tmp_path))
    assert run.figures["trajectories"] == 2 and run.figures["revises"] == 1
    assert run.figures["tokens.dropped"] == len("42 + 8 = 51\n\nSo 51")


def test_secrets_of_a_config_are_hidden() -> None:
    text = """judge:
  api_key: sk-1
  hf_token: 'abc'
  "Authorization": Bearer x
  password:   p
  url: http://me:pw@host/v1
max_tokens: 160
eos_token: <|im_end|>
api_key_name: OPENAI_API_KEY
secret: null
"""
    hidden = without_secrets(text)
    for word in ("sk-1", "abc", "Bearer", " p\n", "pw"):
        assert word not in hidden
    assert "max_tokens: 160" in hidden and "eos_token: <|im_end|>" in hidden
    assert "http://(hidden)@host/v1" in hidden and "secret: null" in hidden


def test_what_cannot_be_read_is_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    (run / "summary.json").write_text("{")
    (run / "rollouts" / "part-u000000-a0-torn-00000000.parquet").write_bytes(b"PAR1")
    (run / "metrics.jsonl").write_text("x\n{}\n")
    page = page_of(run)
    assert "summary.json: cannot be read" in page and "part-u000000-a0-torn" in page
    assert "metrics.jsonl:1" in page and ">1 revise</a>" in page


def test_a_run_that_has_only_begun_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    page = page_of(tmp_path)
    assert "No figures yet." in page and "No group has finished yet." in page


def test_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no run here"):
        render_report(tmp_path, decode=TOKENIZER.decode)
    with pytest.raises(StoreError, match="no run here"):
        render_report(tmp_path / "missing", decode=TOKENIZER.decode)
    with pytest.raises(UsageError, match="max_groups"):
        render_report(write_run(tmp_path), decode=TOKENIZER.decode, max_groups=0)


def test_the_same_run_gives_the_same_page(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    assert page_of(run) == page_of(run)


# --- the server


@pytest.fixture
def served(tmp_path: Path) -> Any:
    run = write_run(tmp_path)
    server = make_server(run, decode=TOKENIZER.decode, special_ids=TOKENIZER.special_ids)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield run, server.server_port
    server.shutdown()
    server.server_close()
    thread.join()


def _get(port: int, path: str, host: str = "") -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    if host:
        request.add_header("Host", host)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_the_server_shows_what_is_new(served: tuple[Path, int]) -> None:
    run, port = served
    status, page = _get(port, "/")
    assert status == 200 and ">1 revise</a>" in page and "update 1" not in page.lower()
    _, version = _get(port, "/version")
    assert f'data-version="{version}"' in page and 'fetch("/version")' in page
    RolloutStore(run / "rollouts").write_group([played(["new"], update=1, task_id="later")])
    assert _get(port, "/version")[1] != version
    assert "Update 1 (last), task later" in _get(port, "/")[1]


def test_the_server_answers_only_its_own_paths_and_names(served: tuple[Path, int]) -> None:
    _, port = served
    assert _get(port, "/config.yaml")[0] == 404
    assert _get(port, "/../metrics.jsonl")[0] == 404
    assert _get(port, "/", host="evil.example")[0] == 403
    assert _get(port, "/version", host=f"localhost:{port}")[0] == 200


def test_a_taken_port_is_a_clear_error(served: tuple[Path, int]) -> None:
    run, port = served
    with pytest.raises(UsageError, match=f"port {port} cannot be used"):
        make_server(run, port, decode=TOKENIZER.decode)


def heed_ctrl_c() -> None:
    """A shell's background job ignores SIGINT, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_ends_the_server_cleanly(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    code = (
        "import sys; from mintrl_env.view_server import serve; "
        "serve(sys.argv[1], decode=str, announce=lambda line: print(line, flush=True))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(run)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd=Path(__file__).parent.parent, preexec_fn=heed_ctrl_c,
    )  # fmt: skip
    assert process.stdout is not None
    assert re.match(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, "")
