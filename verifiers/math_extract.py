r"""Where is the answer in a response? One linear pass each; nothing is evaluated here.

1. Only text after the last `</think>` or `###Response` counts, where one is present.
2. The last complete box (`\boxed{}`, `\boxed 2`, `\fbox{}`) is the answer. If the last box is
   empty or cut off, there is no answer, and no earlier box is revived. Boxes next to each other
   form a list, but "or" between them is a hedge, which answers nothing.
3. Without a box, the text after the last explicit anchor ("the answer is", "Answer:", "####").
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

_SEGMENT = re.compile(r"</think>|###\s{0,3}Response\b:?")
_BOX = re.compile(r"\\{1,4}(?:boxed|fbox)(?![A-Za-z])|\\.|[{}]", re.DOTALL)
_NAME = re.compile(r"(?<=\\)(?:boxed|fbox)")
_BARE_BOX = re.compile(
    r"[ \t]{0,4}(-?\d[\d.,]*|-?\\[a-z]+(?:\{[^{}\n]{0,200}\}|\d)*|[A-Za-z](?![A-Za-z]))"
)
_GAP_LIST = re.compile(r"(?:[\s$,;、，&]|\\[,;!\s()]|\\quad|\\text\{\s*and\s*\}|\band\b|和)*")
_HEDGE = re.compile(r"\b(?:or|maybe|perhaps|possibly|alternatively)\b|或", re.IGNORECASE)
_CORRECTION = re.compile(r"[.!?\n]|\b(?:rather|instead|actually|no|better)\b", re.IGNORECASE)
_SPECIAL = re.compile(r"<\|[^|>\n]{1,40}\|>|</?(?:s|eos|answer|pad)>")
_LEAD = re.compile(
    r"(?:approximately|about|roughly|exactly|just|simply|equal to|given by|therefore|thus|then|"
    r"indeed|clearly|now|option|choice)\s+",
    re.IGNORECASE,
)
_MAX_GAP = 60
_MAX_BOXES = 2000
"""So many of the last boxes are looked at."""

_ANCHOR = re.compile(r"####|(?<!/)\b(?:answer|option|choice)\b|答案", re.IGNORECASE)
_ANCHOR_REST = re.compile(
    r"(?: to [^.\n:]{1,80}?)?\s{0,8}"
    r"(?:>|\*{0,2}\s{0,4}[:：=]|\b(?:is|equals|would be|must be|should be)\b|是|为)",
    re.IGNORECASE,
)
_TAIL = 2000
"""Characters at the end in which the last anchor is looked for first."""
_MAX_ANCHORS = 500
"""So many of the last anchors are looked at."""
_HASH_VALUE = re.compile(r"[-+$\\(\[{.]*\s?\d|[-+$]*\\")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_HEADING = re.compile(r"[^\W\d_]{3}")
_AFTERTHOUGHT = re.compile(
    r"[,;]?\s(?:because|since|as|so|which|where|when|but|after|given|not|rather)\b"
    r"|[,;:]\s(?:we|this|that|the|it|I)\b"
    r"|[.?](?:\s|$)|[。！？]|\s\((?=[A-Za-z]{3})",
)
_MATH_SPAN = re.compile(
    r"\$\$([^$]{1,2000})\$\$|\$([^$]{1,2000})\$|\\\((.{1,2000}?)\\\)|\\\[(.{1,2000}?)\\\]",
    re.DOTALL,
)
_MAX_ANCHORED = 4000


@dataclass(frozen=True, slots=True)
class Extracted:
    """What a response answers.

    Attributes:
        parts: the texts that were found; several are the elements of a list; none: no answer.
        reason: why there is no answer, or where it was found.
        line: the whole line of prose that a part was taken from: an answer in words may hold what
            elsewhere ends an answer ("because", a second formula).
    """

    parts: tuple[str, ...]
    reason: str
    line: str = ""


def extract(response: str) -> Extracted:
    """The answer text of a response, by the conventions above. Linear in its length."""
    start = 0
    for match in _SEGMENT.finditer(response):
        start = match.end()
    text = response[start:]
    boxes = _boxes(text)
    if boxes is not None:
        return boxes
    return _anchored(text)


@dataclass(slots=True)
class _Box:
    start: int
    inner: int
    end: int = -1  # past the closing brace; -1 while it is open
    content: str = ""


def _find_boxes(text: str) -> list[_Box]:
    boxes: list[_Box] = []
    stack: list[_Box | None] = []
    last = deque((m.start() for m in _NAME.finditer(text)), _MAX_BOXES)
    position = last[0] if last else len(text)
    # Braces before the first box close none; of many backslashes in a row the last ones will do.
    before = text[max(0, position - 64) : position]
    position -= len(before) - len(before.rstrip("\\"))
    while (match := _BOX.search(text, position)) is not None:
        position = match.end()
        token = match.group()
        if token == "{":
            stack.append(None)
        elif token == "}":
            box = stack.pop() if stack else None
            if box is not None:
                box.end, box.content = match.end(), text[box.inner : match.start()]
        elif len(token) > 2:
            brace = position
            while brace < len(text) and text[brace] in " \t\n" and brace - position < 8:
                brace += 1
            if brace < len(text) and text[brace] == "{":
                box = _Box(match.start(), brace + 1)
                stack.append(box)
                boxes.append(box)
                position = brace + 1
            elif bare := _BARE_BOX.match(text, position):
                content = bare.group(1).rstrip(".,")
                boxes.append(_Box(match.start(), position, bare.end(), content))
                position = bare.start(1) + len(content)
    return boxes


def _boxes(text: str) -> Extracted | None:
    """The last box or run of boxes; None where there is no box at all."""
    found = _find_boxes(text)
    if not found:
        return None
    if found[-1].end < 0:
        return Extracted((), "the last box is cut off")
    outer: list[_Box] = []
    for box in found:  # in order of their starts; a box inside a whole box belongs to it
        if box.end >= 0 and not (outer and box.start < outer[-1].end):
            outer.append(box)
    run = [outer.pop()]
    while outer:
        gap = text[outer[-1].end : run[-1].start]
        if len(gap) > _MAX_GAP:
            break
        if _HEDGE.search(gap) and not _CORRECTION.search(gap):
            return Extracted((), "a hedge between boxes")
        if not _GAP_LIST.fullmatch(gap):
            break
        run.append(outer.pop())
    contents = [unbox(box.content).strip() for box in reversed(run)]
    if not contents[-1]:
        return Extracted((), "the last box is empty")
    return Extracted(tuple(dict.fromkeys(c for c in contents if c)), "box")


def unbox(text: str) -> str:
    r"""The content of an inner `\boxed{...}` where that is all there is, else plain groups."""
    for _ in range(8):
        inner = [box for box in _find_boxes(text) if box.end >= 0] if "box" in text else []
        if not inner:
            return text.strip()
        last = inner[-1]
        around = text[: last.start] + text[last.end :]
        if re.search(r"[\d+*/^_-]", re.sub(r"\\[A-Za-z]+|\\.", "", around)):
            break
        text = last.content
    return re.sub(r"\\(?:boxed|fbox)(?![A-Za-z])", "", text).strip()


def _anchored(text: str) -> Extracted:
    found = _last_anchor(text, max(0, len(text) - _TAIL)) or _last_anchor(text, 0)
    if found is None:
        return Extracted((), "no box and no explicit answer")
    rest = text[found.end() :].lstrip(" \t\r\n*:：_=>")[:_MAX_ANCHORED]
    rest = _SPECIAL.split(rest, maxsplit=1)[0]
    whole = _first_line(rest)
    line = clean_prose(whole)
    if not line:
        return Extracted((), "nothing after the answer's anchor")
    return Extracted((line,), "anchor", whole.strip().strip("*_`").strip())


def _last_anchor(text: str, start: int) -> re.Match[str] | None:
    for match in reversed(deque(_ANCHOR.finditer(text, start), _MAX_ANCHORS)):
        if match.group() == "####":  # GSM8K's mark, or only a heading?
            if _is_mark(text, match.end()):
                return match
        elif rest := _ANCHOR_REST.match(text, match.end()):
            return rest
    return None


def _is_mark(text: str, start: int) -> bool:
    """Is `####` before an answer: a number or a formula, or, on the last line, no word of prose?"""
    if _HASH_VALUE.match(text[start : start + 40].lstrip()):
        return True
    rest = text[start : start + _MAX_ANCHORED].strip()
    return bool(rest) and "\n" not in rest and not _HEADING.search(_COMMAND.sub("", rest))


def _first_line(text: str) -> str:
    """The first line, and what follows it while a formula or a brace is open."""
    if match := _MATH_SPAN.match(text):
        return text[: match.end()] + text[match.end() :].split("\n", 1)[0]
    line, _, rest = text.partition("\n")
    while rest and line.count("{") > line.count("}") and len(line) < _MAX_ANCHORED:
        more, _, rest = rest.partition("\n")
        line += " " + more
    return line


def _sentence_end(line: str) -> int:
    """Where the answer ends in prose: at a full stop or an afterthought outside braces."""
    for match in _AFTERTHOUGHT.finditer(line):
        before = line[: match.start()]
        if before.count("{") <= before.count("}"):
            return match.start()
    return len(line)


def clean_prose(line: str) -> str:
    """The answer at the start of a line of prose: its formula, or all up to the sentence's end."""
    line = line.strip().strip("*_`").strip()
    if lead := _LEAD.match(line):
        line = line[lead.end() :]
    if match := _MATH_SPAN.match(line):
        inner = next(group for group in match.groups() if group is not None)
        tail = line[match.end() :]
        # A tail that goes on with the answer (a unit, "or $3$") is kept; a sentence is not.
        tail = tail[: _sentence_end(tail)].rstrip(" .*")
        return (inner + " " + tail).strip() if len(tail) <= 40 else inner.strip()
    line = line[: _sentence_end(line)]
    return line.strip().strip("*_`").rstrip(".,;:").strip()
