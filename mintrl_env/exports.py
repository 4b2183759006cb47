"""A store's rows as data for other trainers and benchmarks.

    sft           whole responses that came right: prompt, completion
    pairs         a dropped step and the correction in its place: prompt, rejected, chosen
    first-error   where the judge saw the first wrong step: problem, steps, first_error
    int           the response up to and with a correction, where the continuation came right:
                  prompt, completion, without what follows and without an EOS

Each row holds texts and the policy's own token ids. Pure, but for `write_export`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mintrl_env.errors import UsageError
from mintrl_env.judge_audit import reviewed_chunk, reviewed_steps
from mintrl_env.protocols import Tokenizer
from mintrl_env.splice import settled_text, step_starts
from mintrl_env.trajectory import Trajectory
from mintrl_env.types import IdsLike, Outcome, Provenance, Review, Step

_CONTEXT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Reading:
    """What it takes to read a run's tokens as steps.

    Attributes:
        tokenizer: the run's policy's.
        delimiters: `episode.step_delimiters` of the run.
        problems: a task's id -> its text. For a task that is not in it the prompt, as the policy
            read it, stands in (first-error rows).
    """

    tokenizer: Tokenizer
    delimiters: tuple[str, ...] = ("\n\n", "```")
    problems: Mapping[str, str] = field(default_factory=dict)

    def text(self, ids: IdsLike, before: IdsLike = ()) -> str:
        """What `ids` add to the text of the tokens before them."""
        context = [int(i) for i in before[-_CONTEXT_TOKENS:]]
        whole = self.tokenizer.decode([*context, *map(int, ids)])
        return whole[len(settled_text(self.tokenizer, context, whole)) :] if context else whole

    def without_eos(self, ids: np.ndarray) -> np.ndarray:
        end = len(ids)
        while end and int(ids[end - 1]) in self.tokenizer.eos_ids:
            end -= 1
        return ids[:end]

    def problem(self, row: Trajectory) -> str:
        # A trainer tells two groups of one task in one update apart by `id#2`.
        name = row.task_id if row.task_id in self.problems else row.task_id.rpartition("#")[0]
        return self.problems.get(name) or self.text(row.prompt_ids)

    def steps(self, row: Trajectory, review: Review) -> tuple[str, tuple[Step, ...]]:
        """The accepted text before a reviewed chunk, and its steps, as the judge was shown them.

        Raises:
            UsageError: they are not those of the record: another tokenizer or other delimiters.
        """
        text, steps = reviewed_steps(row, review, self.tokenizer, self.delimiters)
        if review.outcome is Outcome.REVISE and (
            review.step >= len(steps) or review.position + steps[review.step].cut != review.cut
        ):
            raise UsageError(
                f"update {row.update}, task {row.task_id!r}, rollout {row.rollout}, review "
                f"{review.index}: step {review.step} does not begin at token {review.cut}: these are "
                "not the tokenizer and the step delimiters that the run was made with"
            )
        return text, steps


@dataclass(frozen=True, slots=True)
class RowFilter:
    """Which trajectories are exported.

    Attributes:
        valid_only: leave out those that are not valid.
        min_reward: leave out those with less, and undecided ones; None: whatever the reward.
    """

    valid_only: bool = True
    min_reward: float | None = None

    def __call__(self, row: Trajectory) -> bool:
        if self.valid_only and not row.valid:
            return False
        return self.min_reward is None or row.reward >= self.min_reward  # False for NaN


def sft_rows(row: Trajectory, reading: Reading) -> Iterator[dict[str, Any]]:
    """The whole response; `input_ids` end with its EOS where the policy wrote one."""
    yield {
        **_key(row),
        "prompt": reading.tokenizer.decode(row.prompt_ids),
        "completion": reading.text(reading.without_eos(row.ids), row.prompt_ids),
        **_trained(row, len(row.ids)),
    }


def pair_rows(row: Trajectory, reading: Reading) -> Iterator[dict[str, Any]]:
    """One row a Revise that wrote something: the judge's correction before the step it dropped."""
    for review in _revises(row):
        _, steps = reading.steps(row, review)
        begin = steps[review.step].cut
        ends = [step.cut for step in steps[review.step + 1 :]]
        stop = next((end for end in ends if end > begin), None)
        prompt = np.concatenate([row.prompt_ids, row.ids[: review.cut]])
        chosen = row.ids[review.cut : review.cut + review.correction_tokens]
        rejected = review.dropped_ids[: None if stop is None else stop - begin]
        rejected = reading.without_eos(rejected)
        if not len(rejected):
            continue  # the policy wrote nothing there but its end
        yield {
            **_key(row, review),
            "prompt": reading.tokenizer.decode(prompt),
            "chosen": reading.text(chosen, prompt),
            "rejected": reading.text(rejected, prompt),
            "prompt_ids": prompt,
            "chosen_ids": chosen,
            "rejected_ids": rejected,
        }


def first_error_rows(row: Trajectory, reading: Reading) -> Iterator[dict[str, Any]]:
    """One row a Revise: the response up to the end of the chunk that the judge cut.

    A response of which the judge kept every chunk and which came right is a row without an error.
    """
    for review in row.reviews:
        if review.outcome is Outcome.REVISE:
            accepted, steps = reading.steps(row, review)
            texts = [step.text for step in steps]
            # Its first letter: the blanks in front may belong to the step before.
            blanks = len(texts[review.step]) - len(texts[review.step].lstrip())
            wrong = len(accepted) + len("".join(texts[: review.step])) + blanks
            ids = reading.without_eos(np.concatenate(reviewed_chunk(row, review)))
            yield _labelled(row, reading, review, accepted + "".join(texts), ids, wrong)
    kept = bool(row.reviews) and all(r.outcome is Outcome.KEEP for r in row.reviews)
    if kept and row.reward >= 1.0:
        ids = reading.without_eos(row.ids)
        yield _labelled(row, reading, None, reading.tokenizer.decode(ids), ids, None)


def _labelled(
    row: Trajectory,
    reading: Reading,
    review: Review | None,
    text: str,
    ids: np.ndarray,
    wrong: int | None,
) -> dict[str, Any]:
    """`wrong`: the place of the wrong step's first letter in the text; None: there is no error."""
    starts = step_starts(text, reading.delimiters)
    pieces = [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
    # A chunk may begin inside a step, which is then the wrong one.
    first = -1 if wrong is None else max(i for i, start in enumerate(starts) if start <= wrong)
    return {
        **_key(row, review),
        "problem": reading.problem(row),
        "steps": pieces,
        "first_error": first,
        "prompt_ids": row.prompt_ids,
        "response_ids": ids,
    }


def intervention_rows(row: Trajectory, reading: Reading) -> Iterator[dict[str, Any]]:
    """One row a Revise that wrote something: what was kept before it and the correction, no more."""
    for review in _revises(row):
        end = review.cut + review.correction_tokens
        yield {
            **_key(row, review),
            "prompt": reading.tokenizer.decode(row.prompt_ids),
            "completion": reading.text(row.ids[:end], row.prompt_ids),
            "intervention": reading.text(row.ids[review.cut : end], row.ids[: review.cut]),
            **_trained(row, end),
        }


def _revises(row: Trajectory) -> Iterator[Review]:
    for review in row.reviews:
        if review.outcome is Outcome.REVISE and review.correction_tokens:
            yield review


def _trained(row: Trajectory, length: int) -> dict[str, Any]:
    """Prompt and response as one sequence; what a tool wrote is not trained on."""
    mask = row.provenance[:length] != Provenance.ENVIRONMENT
    return {
        "input_ids": np.concatenate([row.prompt_ids, row.ids[:length]]),
        "completion_mask": np.concatenate([np.zeros(len(row.prompt_ids), np.int8), mask]),
    }


def _key(row: Trajectory, review: Review | None = None) -> dict[str, Any]:
    parts = [row.run, row.update, row.task_id, row.rollout, row.run_attempt]
    parts += [] if review is None else [review.index]
    return {
        "id": "/".join(str(part) for part in parts if part != ""),
        "run": row.run,
        "update": row.update,
        "task_id": row.task_id,
        "rollout": row.rollout,
        "kind": row.kind.value,
        "stop_reason": row.stop_reason.value,
        "valid": row.valid,
        "reward": None if math.isnan(row.reward) else row.reward,
    }


@dataclass(frozen=True, slots=True)
class Export:
    """A kind of export.

    Attributes:
        rows: a trajectory's rows.
        min_reward: of the trajectories that it takes, unless another is asked for.
        columns: its own columns: text, texts (a list), int, ids or mask; those that tell where the
            row is from come first.
    """

    rows: Callable[[Trajectory, Reading], Iterator[dict[str, Any]]]
    min_reward: float | None
    columns: Mapping[str, str]


_SEQUENCE = {"input_ids": "ids", "completion_mask": "mask"}
EXPORTS = {
    "sft": Export(sft_rows, 1.0, {"prompt": "text", "completion": "text", **_SEQUENCE}),
    "pairs": Export(
        pair_rows,
        None,
        {
            **dict.fromkeys(("prompt", "chosen", "rejected"), "text"),
            **dict.fromkeys(("prompt_ids", "chosen_ids", "rejected_ids"), "ids"),
        },
    ),
    "first-error": Export(
        first_error_rows,
        None,
        {
            "problem": "text",
            "steps": "texts",
            "first_error": "int",
            "prompt_ids": "ids",
            "response_ids": "ids",
        },
    ),
    "int": Export(
        intervention_rows,
        1.0,
        {**dict.fromkeys(("prompt", "completion", "intervention"), "text"), **_SEQUENCE},
    ),
}
_OF_IDS = ("ids", "mask")


def export_of(kind: str) -> Export:
    """The export called `kind`.

    Raises:
        UsageError: there is none of that name.
    """
    if kind not in EXPORTS:
        raise UsageError(f"--kind is one of {', '.join(EXPORTS)}, not {kind!r}")
    return EXPORTS[kind]


def export_rows(
    rows: Iterable[Trajectory],
    kind: str,
    reading: Reading | Callable[[str], Reading],
    *,
    keep: RowFilter | None = None,
    ids: bool = True,
) -> Iterator[dict[str, Any]]:
    """The export's rows, one after the other.

    Args:
        kind: a name in EXPORTS.
        reading: of all rows, or a function from a row's `run` to it, for merged stores.
        keep: which trajectories; default the valid ones with the kind's own least reward.
        ids: False leaves the token ids out: another model's tokens are others.

    Raises:
        UsageError: no such kind, or a reading that does not fit the rows.
    """
    export = export_of(kind)
    keep = keep or RowFilter(min_reward=export.min_reward)
    dropped = () if ids else [n for n, form in export.columns.items() if form in _OF_IDS]
    for row in rows:
        if keep(row):
            for out in export.rows(row, reading(row.run) if callable(reading) else reading):
                yield {name: value for name, value in out.items() if name not in dropped}


def columns_of(kind: str, *, ids: bool = True) -> Sequence[tuple[str, str]]:
    """The names and forms of an export's columns, in their order."""
    own = export_of(kind).columns.items()
    return [*_KEY_COLUMNS.items(), *((n, form) for n, form in own if ids or form not in _OF_IDS)]


_KEY_COLUMNS = {
    "id": "text",
    "run": "text",
    "update": "int",
    "task_id": "text",
    "rollout": "int",
    "kind": "text",
    "stop_reason": "text",
    "valid": "flag",
    "reward": "number",
}
