"""docs/performance.md from the JSON file of `bench_all.py`. Pure text; measures nothing."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measure import Line, shown

SCRIPTS = Path(__file__).parents[1] / "scripts"
HEAD = """\
# Performance

Written by `make bench`: do not edit. Every figure but a GPU's is a share, or a ratio of contestants that
took turns within one process or side by side, the median over repeats with its quartiles; seconds
depend on the machine, ratios much less. "CPU" is the process's CPU time, which a busy machine spoils least.
"""
ABOUT = {
    "slot_engine": """\
## Rollouts beside `generate`

The whole runner over the slot engine, beside one call of transformers' `generate` that writes as
many tokens: without a judge, and with four reviews a response that are answered at once. Random
Qwen3-shaped models, ragged prompts, one thread.
""",
    "runner_latency": """\
## Slow judges

Latencies are log-normal with a 99th percentile of 20 medians; the median is given in times of what
the engine takes for one chunk of a full batch. *Lockstep* writes a chunk for all, reviews all, goes
on. The *bound* is a simulation over the same latencies and measured forwards in which every episode
waits for its own judge alone: nobody's runner can be faster with as many in flight.
""",
    "episodes_scaling": """\
## Many episodes at once

One engine with 64 slots, four chunks a response, an instant judge. Nearly all episodes wait for a
slot nearly all the time; a trajectory should not cost more for it.
""",
    "env_step": """\
## `env.step`

Steps a second beside other libraries' environments, unwrapped, with observations of 2,048 tokens on
average, no step ending the episode. gem's history wrapper joins strings and skyrl-gym keeps no history
at all; `Box` is a bare `gymnasium.Env` that copies a padded array. None of the three checks an action
or says in `info` what happened.
""",
    "logprobs_memory": """\
## Log-probs of a large vocabulary

`trainers.logprobs.token_logprobs`, forward and backward, beside full logits and `log_softmax`.
""",
    "update_profile": """\
## Where an update of the quickstart goes

Shares of the CPU time of both threads. *Ours* is what neither the engines' turns, nor the judge,
the verifier or TRL's update take: runner, episodes, reviews, pump, store, baseline.
""",
    "divergence": """\
## Free-running beside rounds

Draws are keyed, so that batches decide nothing but the last bits of float32 logits. Rows of a
free-running run that hold another token than in `schedule: rounds`, where batches are the same
whatever the latencies (`adapters.divergence.compare_with_rounds` counts it in your run):
""",
    "plan_check": """\
## Planned beside real

`mintrl plan`'s simulation and the real runner with the slot engine, at three numbers of episodes at
once and judges of two speeds. The simulation knows what was measured in the same run without slow
judges (a step by rows at once, a row's begin, an instant review) and the latencies. The ratio is that
of the longer to the shorter time; 1.15 is within 15 %. Seconds are those of the wall, less those in
which the engine's thread was ready and the machine gave it no core:
""",
    "window_memory": """\
## Memory of a window

The growth of the resident set by all episodes of one window, model and KV cache apart: half of them
reviewed four times, all of them finished and waiting for the last one, then collected and stored.
""",
}
ON_A_GPU = """\
## On a GPU
"""
NOT_RUN = """\
Not run: there is no benchmarks/gpu.json. On a machine with an NVIDIA GPU

    scripts/gpu_check.sh --out benchmarks/gpu.json --smollm2 .cache/smollm2
    make bench ARGS=--only

takes eight minutes and writes it and this page.
"""
SOAK = """\
## A soak

No part of `make bench`, since it takes longer: `python benchmarks/soak.py` (`--resume` goes on with it)
drives 50,000 episodes with faults in everything around them, and prints how many are accounted for, by
how much memory has grown, and the processes that are left.
"""
BLOCKERS = {
    "slot_engine": """\
What stands in the way: reviews are split into steps and taken through the rules on the event loop's
thread, which takes turns with the forwards for the interpreter lock.
""",
    "runner_latency": """\
What stands in the way: the bound counts nothing but forwards and latencies. A review's own work
(splitting, rules, the way through two threads), reading the tokens of a row that comes back, and
forwards over batches that are not full cost the difference; it is largest where chunks are short.
""",
    "episodes_scaling": """\
What stands in the way: a row that comes back after others had its slot reads its prefix again.
""",
    "env_step": """\
What stands in the way: a step of ours goes through the rules that the runner uses as well (bounds
and EOS of the ids, the state machine, a log of who wrote what) and returns fresh arrays and an info
of 14 entries, about 45 calls of Python functions. A wrapper that joins a few strings, or keeps no
history, does none of it; the fewer turns make up an observation, the cheaper joining is. Beside
what a model takes for a chunk, either is a thousandth or less.
""",
    "logprobs_memory": """\
What stands in the way: a chunk's logits, computed twice, and a gradient of the lm_head in float32.
""",
    "update_profile": """\
What stands in the way: with a student of 160 thousand parameters a forward is as cheap as a review's
bookkeeping. With four reviews each, 64 of the 128 rows of an update make 256 reviews, each split
into steps, judged, spliced and stored, at about a millisecond; with a model of a thousand times the
size the same work is a thousandth.
""",
    "plan_check": """\
What stands in the way: reviews that come back one by one cost more than the simulation's constant,
the more rows are at work; other programs on the same cores stretch both sides unequally.
""",
    "window_memory": """\
What stands in the way: every token has its id, who wrote it, its log-prob and its weights' version (13
bytes), a reviewed row also what was dropped; arrays grow by doubling.
""",
}


def page(content: Mapping[str, Any], gpu: Mapping[str, Any] | None = None) -> str:
    """The document.

    Args:
        content: the JSON file's: `machine`, `minutes`, `of_other_runs`, `lines`.
        gpu: what `scripts/gpu_check.sh` has written; None: it was not run.
    """
    lines = [Line(**line) for line in content["lines"]]
    parts = [HEAD, _machine(content)]
    for bench, about in ABOUT.items():
        mine = [line for line in lines if line.bench == bench]
        if mine:
            parts += [about, _table(mine), _beside(mine)]
            if any(line.met is False for line in mine) and bench in BLOCKERS:
                parts.append(BLOCKERS[bench])
    parts += [ON_A_GPU, NOT_RUN if gpu is None else _gpu(gpu), SOAK]
    return "\n".join(part for part in parts if part)


def _gpu(found: Mapping[str, Any]) -> str:
    """The card, the versions, and the table that the check itself prints."""
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPTS / "gpu_check.py")
    assert spec is not None and spec.loader is not None
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    machine = dict(found["machine"])
    card, size = machine.pop("card", None), machine.pop("card_mb", None)
    where = f"{card}, {size:,} MB" if card else f"no GPU, but {found['device']}"
    versions = ", ".join(f"{name} {v}" for name, v in machine.items() if v is not None)
    small = " A tiny model, unfit for figures." if found["tiny"] else ""
    return (
        f"`scripts/gpu_check.sh`, {found['seconds']:.0f} s: {where}; {versions}.{small}\n\n"
        f"{check.table(found)}\n"
    )


def _machine(content: Mapping[str, Any]) -> str:
    machine = content["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    text = (
        f"The machine: {machine['cores']} cores, {machine['cpu']}; Python {machine['python']}, "
        f"{versions}. The run took {content['minutes']:g} minutes.\n"
    )
    if content["of_other_runs"]:
        text += f"\nOf an earlier run: {', '.join(content['of_other_runs'])}.\n"
    return text


def _table(lines: Sequence[Line]) -> str:
    rows = ["| | ratio | quartiles | target | |", "|---|---|---|---|---|"]
    for line in lines:
        value = "not measured" if line.value is None else f"{line.value:.3g}"
        span = "" if line.low is None or line.high is None else f"{line.low:.3g} to {line.high:.3g}"
        sign = "<=" if line.at_most else ">="
        target = "" if line.target is None else f"{sign} {line.target:.3g}"
        verdict = {None: "", True: "met", False: "**not met**"}[line.met]
        rows.append(f"| {line.name} | {value} | {span} | {target} | {verdict} |")
    return "\n".join(rows) + "\n"


def _beside(lines: Sequence[Line]) -> str:
    """The seconds, bytes and counts behind the ratios, once each."""
    found = [
        f"- {line.name}: " + ", ".join(f"{name} {shown(v)}" for name, v in line.beside.items())
        for line in lines
        if line.beside
    ]
    return "\n".join(["Behind them:\n", *found]) + "\n" if found else ""
