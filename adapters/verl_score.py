"""`compute_score` for veRL: the verifiers as its custom reward function.

    reward.custom_reward_function.path=pkg://mintrl_env.adapters.verl_score
    reward.custom_reward_function.name=compute_score

Nothing here imports veRL or Ray. It works in Ray workers and in daemonic processes: the verifiers
start their helpers by exec.

veRL has no reward for "could not tell". So a row whose gold or tests cannot be read (the same for
its whole group, which then has no advantage) scores `undecided`, 0.0 by default, and is flagged by
`undecided: 1.0` in what veRL logs. A verifier that is unavailable is asked again, and then raises:
zeros that come and go with a service would be trained on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from mintrl_env.errors import UsageError, VerifierError
from mintrl_env.protocols import Verifier
from mintrl_env.registry import resolve
from mintrl_env.scoring import UNAVAILABLE, check_verifier, gold_text, score_batch
from mintrl_env.types import Score, Task

RETRY_S = (1.0, 4.0)
"""Seconds before an unavailable verifier is asked again."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    verifier: str = "auto",
    undecided: float = 0.0,
    **_: Any,
) -> dict[str, Any]:
    """The score of one response, as veRL calls it.

    Args:
        data_source: the row's data set; named in errors.
        solution_str: the response.
        ground_truth: the gold answer; or a code task's tests, an object or its text in JSON.
        extra_info: `limits` and `entry_point` (a code task's) and `index` (the row's name) are
            read, where there.
        verifier: "math", "code", a registered name; "auto": code where the ground truth is an
            object or the text of one, else math.
        undecided: the score of a row that cannot be decided.

    Returns:
        {score, acc, undecided, status}: the keys are the same for every row, as veRL's logs need.

    Raises:
        VerifierError: the verifier is unavailable, after retries.
    """
    info = extra_info or {}
    ground_truth = _alone(ground_truth)
    tests = _tests(ground_truth)
    kind = verifier if verifier != "auto" else "math" if tests is None else "code"
    task = Task(
        task_id=f"{data_source} {info.get('index', '')}".strip(),
        prompt="",
        answer=None if isinstance(ground_truth, Mapping) else gold_text(ground_truth),
        verifier=kind,
        tests=tests,
        metadata={name: info[name] for name in ("limits", "entry_point") if info.get(name)},
    )
    score = _score(kind, task, solution_str)
    reward = score.reward if score.decided else float(undecided)
    return {
        "score": reward,
        "acc": reward,
        "undecided": float(not score.decided),
        "status": score.status,
    }


def _score(kind: str, task: Task, response: str) -> Score:
    for wait_s in (*RETRY_S, None):
        score = score_batch(_verifier(kind), [(task, response)])[0]
        if score.status != UNAVAILABLE:
            break
        if wait_s is None:
            raise VerifierError(f"{task.task_id}: the verifier {kind!r} is down: {score.detail}")
        time.sleep(wait_s)
    return score


@lru_cache(maxsize=16)
def _verifier(kind: str) -> Verifier:
    made = resolve("verifier", kind)
    verifier: Verifier = made() if isinstance(made, type) else made
    check_verifier(verifier)
    return verifier


def _tests(ground_truth: Any) -> Mapping[str, Any] | None:
    """The tests that a ground truth is; None: it is an answer."""
    if isinstance(ground_truth, Mapping):
        return {name: part for name, part in ground_truth.items() if part is not None}
    if isinstance(ground_truth, str) and ground_truth.lstrip().startswith("assert "):
        return {"type": "assert", "asserts": [ground_truth]}
    if isinstance(ground_truth, str) and ground_truth.lstrip()[:1] == "{":
        try:
            value = json.loads(ground_truth)
        except ValueError:
            return None
        return value if isinstance(value, dict) else None
    return None


def _alone(ground_truth: Any) -> Any:
    """A ground truth that a data set wraps in a list (or an array) of one, without the list."""
    given = ground_truth.tolist() if hasattr(ground_truth, "tolist") else ground_truth
    if not isinstance(given, (list, tuple)):
        return given
    if len(given) != 1:
        raise UsageError(f"a ground truth is one answer or tests, not {len(given)} of them")
    return given[0]
