"""Other people's math graders, as `benchmarks/verifiers.py` calls them: (gold, response) -> paid?

Both use alarms for their time limits, so they run in a main thread only.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

Grader = Callable[[str, str], bool]


def hardened_math_verify() -> Grader:
    """math-verify on the last box after the last `</think>`, both sides in `$`, limits of 1 s."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def grade(gold: str, response: str) -> bool:
        answer = last_box(response.rpartition("</think>")[2])
        if answer is None:
            return False
        try:
            sides = [parse(f"${text}$", parsing_timeout=1) for text in (gold, answer)]
            return bool(verify(*sides, timeout_seconds=1))
        except Exception:
            return False

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


def trl_accuracy_reward() -> Grader:
    """TRL's reward function, the gold in a box, since it does not read a bare one."""
    from trl.rewards import accuracy_reward

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def grade(gold: str, response: str) -> bool:
        completion = [{"role": "assistant", "content": response}]
        try:
            return accuracy_reward([completion], [f"\\boxed{{{gold}}}"])[0] == 1.0
        except Exception:
            return False

    return grade
