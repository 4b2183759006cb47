"""What `env.step` costs beside gymnasium's Box, gem and skyrl-gym.

    python benchmarks/env_step.py [--peers PYTHON] [--repeats 15]

Unwrapped, ids in and out, observations of 2,048 tokens on average, no step ends the episode: what is
timed is what the rules, fresh arrays and the info cost. Chunks of 32, 64, 128 and 512 tokens (the
quickstart's are of 24, the paper's of 128 for code and of 512 for math). Each environment runs in a
process of its own, and they take turns, 15 times.

gem and skyrl-gym want other packages than ours; install them in an environment of their own and
name its Python, here or in MINTRL_BENCH_PEERS:

    python3 -m venv ~/peers && ~/peers/bin/pip install gem-llm skyrl-gym
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from env_step_worker import CHARACTERS, FROM, PROMPT, TO, turns
from measure import Line, parser, ratio_line, report, spread

WORKER = Path(__file__).with_name("env_step_worker.py")
CHUNKS = (32, 64, 128, 512)
STEPS = 3200  # timed ones of a repeat
TITLES = {"gem": "gem (history wrapper)", "skyrl_gym": "skyrl-gym", "gymnasium_box": "Box"}


class Contestant:
    """A worker process and its answers."""

    def __init__(self, name: str, python: str, chunk: int) -> None:
        self.name = name
        self.chunk = chunk
        self.times: list[float] = []
        self._process = subprocess.Popen(
            [python, str(WORKER), name, str(chunk)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            self.version = str(self._read())
        except ValueError:
            self.close()
            raise

    def _read(self) -> object:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def ask(self, episodes: int) -> float:
        """Microseconds a step over some episodes."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{episodes}\n")
        self._process.stdin.flush()
        answer = self._read()
        assert isinstance(answer, float)
        return answer

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(10)


def measure(chunk: int, peers: str, repeats: int, steps: int) -> list[Line]:
    """The lines of one chunk length; a peer that is not installed is named and left out."""
    field: list[Contestant] = []
    missing = []
    for name, python in (
        ("mintrl", sys.executable),
        ("gymnasium_box", sys.executable),
        ("gem", peers),
        ("skyrl_gym", peers),
    ):
        try:
            field.append(Contestant(name, python, chunk))
        except (OSError, ValueError):
            missing.append(name)
    for name in missing:
        print(f"{name} is not installed for {peers}; see the top of {Path(__file__).name}")
    try:
        episodes = max(1, steps // turns(chunk)[1])
        for one in field:
            one.ask(max(1, episodes // 4))
        for _ in range(repeats):
            for one in field:
                one.times.append(one.ask(episodes))
    finally:
        for one in field:
            one.close()
    ours = field[0].times
    beside = {f"us, {one.name} {one.version}": spread(one.times)[0] for one in field}
    lines = []
    for one in field[1:]:
        title = TITLES[one.name]
        # Steps a second over theirs: times the other way round.
        lines.append(
            ratio_line(
                "env_step",
                f"steps/s over {title}, chunks of {chunk}",
                one.times,
                ours,
                target=1.0 if one.name == "gem" else None,
                at_most=False,
                **(beside if one.name == "gem" or "gem" in missing else {}),
            )
        )
    for name in missing:
        lines.append(
            Line(
                "env_step",
                f"steps/s over {TITLES[name]}, chunks of {chunk}",
                None,
                beside={"not installed": True},
            )
        )
    return lines


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=15)
    arguments.add_argument(
        "--peers", default=os.environ.get("MINTRL_BENCH_PEERS") or sys.executable
    )
    args = arguments.parse_args()
    repeats, steps = (3, 320) if args.quick else (args.repeats, STEPS)
    print(
        f"observations of {FROM} to {TO} tokens behind a prompt of {PROMPT}; "
        f"a token is {CHARACTERS} letters where text is taken"
    )
    lines = [line for chunk in CHUNKS for line in measure(chunk, args.peers, repeats, steps)]
    report(lines, args.json)


if __name__ == "__main__":
    main()
