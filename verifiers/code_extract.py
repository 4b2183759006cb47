"""Where is the program in a response? One linear pass; nothing is parsed or run here.

1. CRLF counts as LF. Text inside `<think>...</think>` is dropped: also where only one of the two
   tags is there (a prompt that ends with `<think>`, a response that was cut while it thought).
   Inside a code block a tag is text like any other.
2. A fence is three or more backticks at the start of a line; as many or more close it, or else the
   end of the response, or the next fence that names a language.
3. The last non-empty block tagged python, py or python3 is the program, else the last untagged one.
   Other languages never count, nor does code without a fence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mintrl_env.surrogates import whole_text

PYTHON_TAGS = frozenset({"python", "py", "python3"})
_MARK = re.compile(r"^(`{3,})([^\n]*)|<think>", re.MULTILINE)
_END = "</think>"
_TAG = re.compile(r"[\w+#.-]+")
_CLOSES_LINE = re.compile(r"[ \t]*(?:\n|\Z|```)")


@dataclass(frozen=True, slots=True)
class Extracted:
    """A response's program.

    Attributes:
        code: its text, or None.
        reason: which block it is, or why there is none.
    """

    code: str | None
    reason: str


def extract(response: str) -> Extracted:
    """The program of a response, by the rules above."""
    tagged = untagged = None
    other = ""
    for tag, body in _blocks(_without_thoughts(_plain_text(response))):
        body = body.removeprefix("\ufeff")
        if not body.strip():
            continue
        if tag in PYTHON_TAGS:
            tagged = body
        elif not tag:
            untagged = body
        else:
            other = tag
    if tagged is not None:
        return Extracted(tagged, "the last python block")
    if untagged is not None:
        return Extracted(untagged, "the last untagged block")
    if other:
        return Extracted(None, f"no python block, only {other[:20]}")
    return Extracted(None, "no block of code (between lines of three backticks)")


def _plain_text(response: str) -> str:
    return whole_text(response).removeprefix("\ufeff").replace("\r\n", "\n")


def _without_thoughts(text: str) -> str:
    """What is left when the thinking is dropped."""
    end = text.find(_END)
    if end >= 0 and text.rfind("<think>", 0, end) < 0:
        fence = _fence_at(text, end)
        # Within a line of a program it is more likely the program's own text than a thought's end.
        if not fence or _CLOSES_LINE.match(text, end + len(_END)):
            text = text[end + len(_END) :]
    kept: list[str] = []
    fence, start, at = "", 0, 0
    last = text.rfind(_END)  # looked for once: a long text may hold many tags
    while "<think>" in text and (mark := _MARK.search(text, at)):
        at = mark.end()
        if mark.group(1):
            fence = _after_fence(mark, fence)
        elif not fence:
            end = text.find(_END, at) if at <= last else -1
            if end < 0 and not _starts_line(text, mark.start()):
                continue  # prose that speaks of the tag
            kept.append(text[start : mark.start()])
            start = at = len(text) if end < 0 else end + len(_END)
    return "".join(kept) + text[start:]


def _starts_line(text: str, at: int) -> bool:
    while at and text[at - 1] != "\n" and text[at - 1].isspace():
        at -= 1
    return not at or text[at - 1] == "\n"


def _fence_at(text: str, end: int) -> str:
    fence = ""
    for mark in _MARK.finditer(text, 0, end):
        if mark.group(1):
            fence = _after_fence(mark, fence)
    return fence


def _after_fence(mark: re.Match[str], fence: str) -> str:
    """The fence that is open after a line of backticks; "" for none."""
    ticks, info = mark.group(1), mark.group(2).strip()
    if "`" in info:
        return fence  # code within a line, not a fence
    if not fence:
        return ticks
    if _opens(info):
        return ticks
    return "" if len(ticks) >= len(fence) else fence


def _opens(info: str) -> bool:
    """Does the text behind the backticks name a language (one word), and not go on in prose?"""
    return _TAG.fullmatch(info) is not None


def _blocks(text: str) -> list[tuple[str, str]]:
    """(tag, body) of each block in order."""
    found: list[tuple[str, str]] = []
    fence, tag, start = "", "", 0
    for mark in _MARK.finditer(text):
        if not mark.group(1):
            continue
        after = _after_fence(mark, fence)
        if after == fence and not (fence and _opens(mark.group(2).strip())):
            continue
        if fence:
            found.append((tag, text[start : mark.start()]))
        fence = after
        if fence:
            name = _TAG.match(mark.group(2).strip().lstrip("{."))
            tag = name.group().lower() if name else ""
            if mark.group(2).strip() and not name:
                tag = "?"
            start = min(len(text), mark.end() + 1)
    if fence:
        found.append((tag, text[start:]))
    return found
