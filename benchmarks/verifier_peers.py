"""Other people's math graders, each in a process of its own that can be killed: some never end.

`handle` answers {grader, gold, response} with {paid, seconds}: their time is taken where they run,
without the pipe. Both use alarms for their limits, so they need a process's main thread.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

Grade = Callable[[str, str], bool]


def handle(request: dict[str, Any]) -> dict[str, Any]:
    grade = GRADERS[request["grader"]]()
    started = time.perf_counter()
    try:
        paid = grade(request["gold"], request["response"])
    except Exception:
        paid = False
    return {"paid": paid, "seconds": time.perf_counter() - started}


@lru_cache
def hardened_math_verify() -> Grade:
    """math-verify on the last box after the last `</think>`, both sides in `$`, limits of 1 s."""
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)

    def grade(gold: str, response: str) -> bool:
        answer = last_box(response.rpartition("</think>")[2])
        if answer is None:
            return False
        sides = [parse(f"${text}$", parsing_timeout=1) for text in (gold, answer)]
        return bool(verify(*sides, timeout_seconds=1))

    return grade


def last_box(text: str) -> str | None:
    r"""The content of the last balanced `\boxed{...}`."""
    for match in reversed(list(re.finditer(r"\\boxed\s*\{", text))[-50:]):
        depth = 1
        for place in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if not depth:
                return text[match.end() : place]
    return None


@lru_cache
def trl_accuracy_reward() -> Grade:
    """TRL's reward function, the gold in a box, since it does not read a bare one."""
    from trl.rewards import accuracy_reward

    logging.disable(logging.CRITICAL)

    def grade(gold: str, response: str) -> bool:
        completion = [{"role": "assistant", "content": response}]
        return bool(accuracy_reward([completion], [f"\\boxed{{{gold}}}"])[0] == 1.0)

    return grade


GRADERS: dict[str, Callable[[], Grade]] = {
    "math-verify, hardened": hardened_math_verify,
    "TRL accuracy_reward": trl_accuracy_reward,
}
