"""The arithmetic of the benchmarks: ratios, the bound, the page. Nothing is timed."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports a script of benchmarks/ as `python benchmarks/NAME.py` would find it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))

    def module(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield module


def test_a_ratio_is_the_median_of_neighbours_ratios(load: Any) -> None:
    measure = load("measure")
    line = measure.ratio_line("b", "n", [2.0, 30.0, 8.0], [1.0, 10.0, 2.0], target=3.5, s=1.5)
    assert (line.value, line.low, line.high) == (3.0, 2.5, 3.5)
    assert line.met is True
    assert line.beside == {"s": 1.5}
    assert measure.spread([4.0]) == (4.0, 4.0, 4.0)


@pytest.mark.parametrize(
    ("value", "target", "at_most", "met"),
    [(1.0, 1.0, True, True), (1.1, 1.0, True, False), (1.0, 1.0, False, True),
     (0.9, 1.0, False, False), (1.0, None, True, None), (None, 1.0, True, None)],
)  # fmt: skip
def test_targets(load: Any, value: Any, target: Any, at_most: bool, met: Any) -> None:
    assert load("measure").Line("b", "n", value, target, at_most).met is met


def test_contestants_take_turns(load: Any) -> None:
    order: list[str] = []
    runs = {name: (lambda name=name: order.append(name)) for name in "ab"}
    times = load("measure").interleaved(runs, 3)
    assert order == list("ab" * 4), "one warm-up, then three repeats"
    assert [len(times[name].wall) for name in "ab"] == [3, 3]
    assert [len(times[name].cpu) for name in "ab"] == [3, 3]


def test_latencies_have_the_tail_that_was_asked_for(load: Any) -> None:
    drawn = load("runner_latency").latencies(20_000, 10)
    assert np.median(drawn) == pytest.approx(1.0, rel=0.02)
    assert np.quantile(drawn, 0.99) == pytest.approx(20.0, rel=0.05)


def test_the_bound_by_hand(load: Any) -> None:
    bound = load("runner_latency").bound

    def one(n: int) -> float:
        return 1.0

    # One episode: 2 chunks of 3 forwards and a review of 5 between them.
    assert bound(np.array([[5.0]]), one, at_once=1, chunk=3) == 11.0
    # Two at once write together; the second waits 2 for its judge, the first 5.
    assert bound(np.array([[5.0], [2.0]]), one, at_once=2, chunk=3) == 11.0
    # One after the other.
    assert bound(np.array([[5.0], [2.0]]), one, at_once=1, chunk=3) == 19.0
    # A forward over two rows takes twice as long: 3 x 2 together; the second is back at 8 and
    # writes alone to 11, the first at 11 and writes alone to 14.
    assert bound(np.array([[5.0], [2.0]]), float, at_once=2, chunk=3) == 14.0
    # No review: a single chunk.
    assert bound(np.empty((3, 0)), one, at_once=3, chunk=4) == 4.0


def test_forwards_between_measured_sizes_are_interpolated(load: Any) -> None:
    step = load("runner_latency").interpolated({1: 1.0, 4: 2.5, 8: 4.5})
    assert [step(n) for n in (1, 2, 3, 4, 6, 8)] == [1.0, 1.5, 2.0, 2.5, 3.5, 4.5]


def test_every_environment_is_timed_around_2048_tokens(load: Any) -> None:
    worker = load("env_step_worker")
    for chunk in load("env_step").CHUNKS:
        before, timed = worker.turns(chunk)
        seen = [worker.PROMPT + chunk * (before + i + 1) for i in range(timed)]
        assert abs(np.mean(seen) - 2048) <= chunk
        assert len(worker.texts(chunk)) == before + timed
    reset, step, actions = worker.mintrl(64)
    reset()
    results = [step(action) for action in actions]
    assert not any(terminated or truncated for _, _, terminated, truncated, _ in results)
    assert [len(result[0]) for result in results[-2:]] == [worker.TO - 64, worker.TO]
    _, step, actions = worker.gymnasium_box(512)


def test_parts_of_parts_are_counted_once(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = load("update_profile")
    now = [0.0]
    monkeypatch.setattr(profile.time, "thread_time", lambda: now[0])
    clock = profile.Clock()

    def spend(seconds: float) -> None:
        now[0] += seconds

    def outer() -> None:
        spend(1.0)
        clock.call("policy", lambda: spend(4.0))
        spend(2.0)

    clock.call("ours", outer)
    spend(10.0)
    clock.call("policy", lambda: spend(1.0))
    assert dict(clock.seconds) == {"policy": 5.0, "ours": 3.0}


async def _waits(log: list[str], future: Any) -> int:
    log.append("before")
    await future
    log.append("after")
    return 7


def test_a_timed_coroutine_is_timed_at_its_steps_alone(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    profile = load("update_profile")
    now = [0.0]
    monkeypatch.setattr(profile.time, "thread_time", lambda: now[0])

    class Log(list[str]):
        def append(self, entry: str) -> None:
            now[0] += 1.0
            super().append(entry)

    async def main() -> None:
        clock, log = profile.Clock(), Log()
        future = asyncio.get_running_loop().create_future()

        async def timed() -> Any:
            return await profile.Timed(clock, "judge", _waits(log, future))

        task = asyncio.create_task(timed())
        await asyncio.sleep(0)
        now[0] += 100.0  # others' work
        future.set_result(None)
        assert await task == 7
        assert clock.seconds["judge"] == 2.0
        # An exception is passed on into the coroutine.
        broken = asyncio.get_running_loop().create_future()
        broken.set_exception(ValueError("no"))
        with pytest.raises(ValueError, match="no"):
            await profile.Timed(clock, "judge", _waits(log, broken))
        assert log == ["before", "after", "before"]

    asyncio.run(main())


def content(lines: list[dict[str, Any]], others: list[str]) -> dict[str, Any]:
    machine = {"cores": 2, "cpu": "A CPU", "python": "3.11.7", "versions": {"torch": "2"}}
    return {"machine": machine, "minutes": 12.5, "of_other_runs": others, "lines": lines}


def test_the_page_has_figures_targets_and_what_stands_in_the_way(load: Any) -> None:
    from dataclasses import asdict

    Line = load("measure").Line
    lines = [
        asdict(Line("slot_engine", "fast", 0.8, 1.05, True, 0.7, 0.9, {"s": 1.25})),
        asdict(Line("env_step", "slow", 0.61234, 1.0, False)),
        asdict(Line("env_step", "elsewhere", None, beside={"not installed": True})),
    ]
    page = load("performance_page").page(content(lines, ["env_step"]))
    assert "2 cores, A CPU; Python 3.11.7, torch 2. The run took 12.5 minutes." in page
    assert "Of an earlier run: env_step." in page
    assert "| fast | 0.8 | 0.7 to 0.9 | <= 1.05 | met |" in page
    assert "| slow | 0.612 |  | >= 1 | **not met** |" in page
    assert "| elsewhere | not measured |  |  |  |" in page
    assert "- fast: s 1.25" in page
    blockers = load("performance_page").BLOCKERS
    assert blockers["env_step"] in page and blockers["slot_engine"] not in page


def test_the_page_says_what_a_gpu_did(load: Any) -> None:
    page = load("performance_page").page
    without = page(content([], []))
    assert "## On a GPU\n\nNot run: there is no benchmarks/gpu.json." in without
    assert "`python benchmarks/soak.py`" in without
    found = {
        "device": "cuda", "tiny": False, "seconds": 301.4,
        "machine": {"python": "3.11.7", "torch": "2.9", "vllm": None, "card": "A Card", "card_mb": 81559},
        "parts": {
            "logprobs": {"status": "ok", "rows": [
                {"what": "full", "figures": {"step s": 0.25, "peak MB": 12345.0}},
                {"what": "longer", "figures": {}, "failed": "out of memory"},
            ]},
            "vllm": {"status": "skipped", "rows": [], "why": "vllm is not installed"},
        },
    }  # fmt: skip
    text = page(content([], []), found)
    assert "`scripts/gpu_check.sh`, 301 s: A Card, 81,559 MB; python 3.11.7, torch 2.9.\n" in text
    assert "| logprobs | full | step s 0.25, peak MB 1.234e+04 |" in text
    assert "| logprobs | longer | out of memory |" in text
    assert "| vllm | skipped | vllm is not installed |" in text and "Not run" not in text
    tiny = {**found, "device": "cpu", "tiny": True, "machine": {"torch": "2.9"}}
    assert "no GPU, but cpu; torch 2.9. A tiny model, unfit" in page(content([], []), tiny)


def test_the_page_alone_is_written_from_what_is_there(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bench = load("bench_all")
    figures, out = tmp_path / "performance.json", tmp_path / "page.md"
    held = content([{"bench": "divergence", "name": "a figure", "value": 0.5}], ["divergence"])
    figures.write_text(json.dumps(held))
    monkeypatch.setattr(bench, "GPU", tmp_path / "gpu.json")
    command = ["bench_all.py", "--only", "--json", str(figures), "--page", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 0 and json.loads(figures.read_text()) == held
    assert "| a figure | 0.5 |" in out.read_text() and "Not run" in out.read_text()


def test_the_committed_page_is_that_of_the_committed_figures(load: Any) -> None:
    gpu = load("bench_all").GPU
    found = json.loads(gpu.read_text()) if gpu.exists() else None
    figures = json.loads((BENCHMARKS / "performance.json").read_text())
    text = (BENCHMARKS.parent / "docs" / "performance.md").read_text(encoding="utf-8")
    assert text == load("performance_page").page(figures, found)


def test_a_windows_peak_is_a_share_of_its_limit(load: Any) -> None:
    figures = {name: 1.0 for name in load("window_memory").BESIDE}
    line = load("window_memory").line(
        {**figures, "peak_mb": 512.0, "episodes": 4096, "tokens_each": 2048, "seconds": 3.0}
    )
    assert (line.value, line.met, line.bench) == (0.25, True, "window_memory")
    assert line.name == "peak of 4,096 episodes of 2,048 tokens over 2,048 MB"


def test_a_part_run_renews_its_own_lines_and_says_so(load: Any) -> None:
    bench = load("bench_all")
    old = {"lines": [{"bench": "env_step", "name": "old"}, {"bench": "divergence", "name": "old"}]}
    new = bench.merged(
        old, {"divergence": [{"bench": "divergence", "name": "new"}]}, {"minutes": 1}
    )
    assert [(line["bench"], line["name"]) for line in new["lines"]] == [
        ("env_step", "old"), ("divergence", "new")
    ]  # fmt: skip
    assert new["of_other_runs"] == ["env_step"] and new["minutes"] == 1
    whole = bench.merged(old, {"env_step": [], "divergence": []}, {})
    assert whole["of_other_runs"] == [] and whole["lines"] == []


def test_every_benchmark_has_a_script_a_text_and_a_blocker_for_its_targets(load: Any) -> None:
    page = load("performance_page")
    assert set(load("bench_all").BENCHES) == set(page.ABOUT)
    assert set(page.BLOCKERS) == set(page.ABOUT) - {"divergence"}, "it has no target"
    for name in page.ABOUT:
        assert (BENCHMARKS / f"{name}.py").exists()


def test_figures_are_shown_short(load: Any) -> None:
    shown = load("measure").shown
    assert (shown(1 / 3), shown(4096), shown(True)) == ("0.3333", "4096", "True")
