"""A chat model's verdict: from the text that it wrote to a verdict, or a JudgeError with its cause.

what it wrote                                    outcome
the JSON object that was asked for               the verdict
the object in a fence, behind prose, thoughts    the last object with a "verdict" outside thoughts
trailing commas, raw newlines, bad escapes       mended
cut off inside a text (max_tokens)               closed there: an over-long correction is used
anything else; 'verdict' neither of the two      JudgeError("unparsed")
revise, step 2 | "2" | "Step 2" | 2.0            the second step
revise, step 0, past the end, 1.5, null, [2]     JudgeError("bad_step")
keep, whatever the step                          Keep
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mintrl_env.errors import JudgeCause, JudgeError
from mintrl_env.surrogates import whole_text
from mintrl_env.types import VerdictKind

MAX_REPLY = 1 << 17
"""Characters of a reply that are looked at."""

_REASON = 2000
_UNMATCHED = 4  # braces without a partner that are followed to the end of the text

_THINK = re.compile(r"\s*+<(think|thinking)>")
_OBJECT = re.compile(r'\{\s*"')
_OURS = re.compile(r'\{\s*"(?:reason|verdict|step|correction|failed|derivable)"')
_CUT_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"|"|[{}]', re.DOTALL)
# A string that never ends is one to the text's end: else each quote in it is tried as a beginning.
_STRING = re.compile(r'"(?:[^"\\]|\\.|\\\Z)*+(?:"|\Z)|,(?=\s*+[}\]])', re.DOTALL)
_ESCAPE = re.compile(r'\\(?:u[0-9a-fA-F]{4}|["\\/bfnrt]|(.)|\Z)', re.DOTALL)
_NUMBER = re.compile(
    r"\s*+(?:step\s*+)?[#(\[]?\s*+([0-9]{1,9})\s*+[)\]]?\s*+[.:]?\s*+", re.IGNORECASE
)

# What JSON makes of LaTeX with single backslashes: control characters and the rest of the command.
_LATEX = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"\x08(?=[A-Za-z])", r"\\b"),
        (r"\f(?=[A-Za-z])", r"\\f"),
        (r"\r(?=(?:ight\w*|angle|ho|ceil|floor|ule|aise)(?![a-z]))", r"\\r"),
        (
            r"\t(?=(?:imes|ext\w*|heta|frac|riangle\w*|au|ilde|an|o|op|binom)(?![a-z]))",
            r"\\t",
        ),
        (r"\n(?=(?:eq|abla|ot|otin|eg|mid|leq|geq|subseteq|cong)(?![A-Za-z]))", r"\\n"),
    )
]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a chat model answered to a review.

    Attributes:
        kind: keep or revise.
        step: 0-based (revise only).
        reason: at most 2000 characters.
        correction: the text, "" where there is none.
    """

    kind: VerdictKind
    step: int | None = None
    reason: str = ""
    correction: str = ""


def parse_answer(text: str, steps: int, *, latex: bool = False) -> Answer:
    """A verdict from what a model wrote.

    Args:
        text: the reply; at most `MAX_REPLY` characters of it are read.
        steps: how many steps the chunk has; the model counts them from 1.
        latex: give back the backslashes of LaTeX commands that JSON took for escapes.

    Raises:
        JudgeError: "unparsed" or "bad_step"; nothing else is ever raised.
    """
    found = last_object(text, "verdict")
    if found is None:
        raise unparsed(text, "no JSON object with a verdict")
    word = found["verdict"]
    word = word.strip(" .!\n").lower() if isinstance(word, str) else word
    reason = _text(found.get("reason"), latex)[:_REASON]
    if word == "keep":
        return Answer(VerdictKind.KEEP, reason=reason)
    if word != "revise":
        raise unparsed(text, f"the verdict is {_short(word)}, neither keep nor revise")
    correction = found.get("correction")
    if correction is not None and not isinstance(correction, str):
        raise unparsed(text, f"the correction is {_short(correction)}, no text")
    step = step_index(found.get("step"), steps)
    return Answer(VerdictKind.REVISE, step, reason, _text(correction, latex))


def step_index(value: object, steps: int) -> int:
    """The 0-based index of a step that a model named, counted from 1.

    Raises:
        JudgeError: "bad_step" where it names none of the `steps`.
    """
    number: int | None = None
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value)
        number = int(match[1]) if match else None
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and value == value // 1:
        number = int(value)
    if number is None:
        raise JudgeError(JudgeCause.BAD_STEP, f"the step is {_short(value)}, no number")
    if not 1 <= number <= steps:
        raise JudgeError(
            JudgeCause.BAD_STEP, f"step {_short(number)} of {steps} step(s), counted from 1"
        )
    return number - 1


def last_object(text: str, key: str) -> dict[str, Any] | None:
    """The last JSON object of a text that has a key; None where there is none.

    What is inside another object, or among thoughts, does not count. An object that the end of the
    text cuts off inside a string is closed there; where that does not help, an earlier object is
    not taken in its place.
    """
    text = without_thoughts(text)[:MAX_REPLY]
    whole = _load(text)
    if isinstance(whole, dict):
        return whole if key in whole else None
    closed, rest = _objects(text)
    candidates = _closed(rest) if rest else reversed(closed)
    for candidate in candidates:
        found = _load(candidate)
        if isinstance(found, dict) and key in found:
            return found
    return None


def without_thoughts(text: str) -> str:
    """A reply without the reasoning that it begins with. One that never ends leaves nothing."""
    place = 0
    while opened := _THINK.match(text, place):
        closed = text.find(f"</{opened[1]}>", opened.end())
        place = len(text) if closed < 0 else closed + len(opened[1]) + 3
    text = text[place:]
    if not text.lstrip().startswith(("{", "```")):  # some templates open the thoughts themselves
        before, end, after = text.partition("</think>")
        text = after if end else before
    return text


def unparsed(text: str, why: str) -> JudgeError:
    """The error for a reply that is no verdict."""
    return JudgeError(JudgeCause.UNPARSED, f"{why} in {_short(text)}")


def restore_latex(text: str) -> str:
    """Undo what JSON makes of single backslashes: `\\frac` is a form feed and `rac` to it.

    A tab or a newline is one unless it can only be a command's beginning: `\\times`, not `\\nu`.
    """
    for pattern, by in _LATEX:
        text = pattern.sub(by, text)
    return text


def _text(value: object, latex: bool) -> str:
    if value is None:
        return ""
    text = whole_text(value if isinstance(value, str) else str(value)[:_REASON])
    return restore_latex(text) if latex else text


def _short(value: object) -> str:
    if isinstance(value, str):
        value = whole_text(value[:MAX_REPLY])
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:200]} ... {text[-60:]}"


def _objects(text: str) -> tuple[list[str], str]:
    """The outermost objects of a text, and one of ours that the text's end cuts off ("": none)."""
    closed: list[str] = []
    place = unmatched = 0
    while unmatched < _UNMATCHED and (start := _OBJECT.search(text, place)):
        end = _end(text, start.start())
        if end is not None:
            closed.append(text[start.start() : end])
        elif _OURS.match(text, start.start()):
            return closed, text[start.start() :]
        else:
            unmatched += 1
        place = end or start.end()
    return closed, ""


def _end(text: str, start: int) -> int | None:
    """Where the object that starts at `start` ends, braces inside strings left aside."""
    depth = 0
    for token in _TOKEN.finditer(text, start):
        if token[0] == '"':  # opens a string that never ends
            return None
        depth += {"{": 1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return token.end()
    return None


def _closed(rest: str) -> Iterator[str]:
    """An object that was cut off, closed behind or inside its last string.

    Not behind a number, which may be cut off itself.
    """
    if rest.rstrip().endswith('"'):
        yield rest + "}"
    yield _CUT_ESCAPE.sub("", rest) + '"}'


def _load(text: str) -> Any:
    """The JSON value of a text, mended where it has to be; None where it is none."""
    for form in (text, None):
        try:
            return json.loads(_mended(text) if form is None else form, strict=False)
        except (ValueError, RecursionError):
            continue
    return None


def _mended(text: str) -> str:
    """JSON with trailing commas taken out and backslashes doubled that escape nothing."""
    return _STRING.sub(lambda m: _ESCAPE.sub(_escaped, m[0]) if m[0][0] == '"' else "", text)


def _escaped(match: re.Match[str]) -> str:
    return match[0] if match[1] is None else "\\" + match[0]
