"""What becomes of a failed review, and when services fail so often that a run stops.

A run would go on as something else without a word: a judge that always fails makes MInTRL a GRPO; a
verifier or policy that always fails leaves no row to learn from. Counts run over updates until there
are enough of them to judge by, then begin again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mintrl_env.errors import JudgeCause, JudgeError, PolicyError, UsageError, VerifierError
from mintrl_env.scoring import UNAVAILABLE
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import Outcome, Review, StopReason

_NO_VERDICT = (Outcome.FAILED, Outcome.UNPARSED)


def failure_rule(text: str) -> dict[JudgeCause, str]:
    """What a failed review does to its row, by cause.

    Args:
        text: "keep" (the chunk is accepted, and the failure recorded), "drop" (the row is not
            valid) or "stop" (the run ends, resumable), for all causes; or with exceptions:
            "keep, auth=stop, budget=stop, unparsed=drop".

    Raises:
        UsageError: another word, or a cause that there is not.
    """
    first, *others = (part.strip() for part in text.split(","))
    pairs = [(cause, first) for cause in JudgeCause]
    for part in others:
        name, _, word = (piece.strip() for piece in part.partition("="))
        if name not in list(JudgeCause):
            raise UsageError(
                f"{name!r} in {text!r} is no cause of a failed review; one of "
                f"{', '.join(JudgeCause)}, as in: keep, auth=stop"
            )
        pairs.append((JudgeCause(name), word))
    for _, word in pairs:
        if word not in ("keep", "drop", "stop"):
            raise UsageError(
                f"a failed review is keep, drop or stop, not {word!r}, for all causes or by cause, "
                "as in: keep, auth=stop"
            )
    return dict(pairs)


def stopped_by(cause: JudgeCause, reason: str) -> JudgeError:
    """The error that ends a run whose rule says stop."""
    return JudgeError(
        cause,
        f"{_short(reason)}; on_failure says stop for this cause. The finished groups are stored; "
        "mend the judge and go on with --resume",
    )


class FailureWatch:
    """Counts failed reviews and failed rows.

    Args:
        rate: the share of failures above which `check` raises.
        least: the fewest reviews, or rows, that are judged.
    """

    def __init__(self, rate: float, least: int) -> None:
        self._rate, self._least = rate, least
        self._reviews = self._rows = 0
        self._failed_reviews: list[Review] = []
        self._failed_rows: list[Trajectory] = []

    def add(self, rows: Sequence[Trajectory]) -> None:
        for row in rows:
            self._rows += 1
            if failed_by_service(row):
                self._failed_rows.append(row)
            self._reviews += len(row.reviews)
            self._failed_reviews += [r for r in row.reviews if r.outcome in _NO_VERDICT]

    def check(self) -> None:
        """Raise where too many of what was added have failed.

        Raises:
            JudgeError: reviews. VerifierError, PolicyError: rows, by their most frequent cause.
        """
        self._check_reviews()
        self._check_rows()
        if self._reviews >= self._least:
            self._reviews, self._failed_reviews = 0, []
        if self._rows >= self._least:
            self._rows, self._failed_rows = 0, []

    def _too_many(self, failed: int, all: int) -> bool:
        return all >= self._least and failed > self._rate * all

    def _check_reviews(self) -> None:
        failed, count = self._failed_reviews, self._reviews
        if not self._too_many(len(failed), count):
            return
        cause, often = Counter(review.cause for review in failed).most_common(1)[0]
        example = next(review.reason for review in failed if review.cause == cause)
        raise JudgeError(
            cause,
            f"{len(failed)} of {count} reviews failed, {often} of them so: {_short(example)}. That "
            f"is more than max_failure_rate = {self._rate:g}: training would silently become GRPO. "
            "The finished groups are stored; mend the judge and go on with --resume",
        )

    def _check_rows(self) -> None:
        failed, count = self._failed_rows, self._rows
        if not self._too_many(len(failed), count):
            return
        example, often = Counter(row.cause for row in failed).most_common(1)[0]
        row = next(row for row in failed if row.cause == example)
        by_verifier = row.stop_reason not in (StopReason.DEADLINE, StopReason.ERROR)
        detail = row.score.detail if by_verifier else example
        kind = VerifierError if by_verifier else PolicyError
        raise kind(
            f"{len(failed)} of {count} trajectories failed, {often} of them so: {_short(detail)}. "
            f"That is more than max_failure_rate = {self._rate:g}: there would be little to learn "
            "from. The finished groups are stored; mend the cause and go on with --resume"
        )


def failed_by_service(row: Trajectory) -> bool:
    """Did a service or a deadline fail the row? Another try may not; a bad gold answer stays one."""
    if row.stop_reason in (StopReason.DEADLINE, StopReason.ERROR):
        return True
    return not row.valid and row.score.status == UNAVAILABLE


def _short(text: str) -> str:
    return repr(text if len(text) <= 300 else text[:297] + "...")
