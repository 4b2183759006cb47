"""From what a chat model wrote to a correction that joins the kept text. Pure functions.

what it wrote                                      what becomes of it
thoughts, a fence or a <step> around the text,     taken off
"Step 3:" that the student didn't write
the kept text or its last steps once more          taken off
white space in front                               as the kept text and the step that is cut have it
more than one step                                 the first one
more than L tokens                                 cut after the last whole character that fits
nothing                                            a bare cut
what was cut                                       Keep ("equal")
EOS, <think>, another model's template             Keep ("special_token")
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from mintrl_env.judge_parsing import MAX_REPLY, without_thoughts
from mintrl_env.protocols import Tokenizer
from mintrl_env.reviewing import SPECIAL_TOKEN
from mintrl_env.splice import (
    FENCE,
    clip_correction,
    correction_ids,
    step_starts,
    token_ends,
)
from mintrl_env.surrogates import whole_text
from mintrl_env.types import Finish, ReviewRequest, Usage, Verdict

EQUAL = "equal"
"""The guard name of a Revise that would have written again what it cut."""

_REPEAT = 8  # characters; a shorter beginning may stand there twice on purpose
_LOOK_BACK = 8  # steps of the kept text that a repetition may begin with
_TAIL = 200  # characters of the line that is shown to whoever goes on with it

_FENCE_LINE = re.compile(r"^```+[^\n`]*$", re.MULTILINE)
_FENCED = re.compile(r"\A\s*```+([^\n`]*)\n(.*?)\n?^```+\s*\Z", re.DOTALL | re.MULTILINE)
# A block that a model opens although one is open: its answer, whatever it says around it.
_TAGGED_BLOCK = re.compile(
    r"^```+[ \t]*[A-Za-z][^\n`]*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE
)
_BARE_BLOCK = re.compile(r"\A\s*```+[ \t]*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)
_TAGGED = re.compile(r"\A\s*<step[^>\n]*>\n?(.*?)\n?(?:</step>\s*)?\Z", re.DOTALL)
_PLAIN = ("", "text", "txt", "markdown", "md", "plaintext")
# Marks of any model's template, since the judge's are not the policy's.
_MARKUP = re.compile(
    r"<\|[^<>|\s]{1,40}\|>|<\uff5c[^<>\n]{1,40}\uff5c>|</?think(?:ing)?>|\u25c1/?think\u25b7|</s>"
    r"|<(?:bos|eos|pad|unk)>|<</?SYS>>|\[/?(?:INST|TOOL_CALLS|THINK)\]|</?tool_call>"
    r"|<(?:start|end)_of_turn>|<end_of_utterance>"
)


def inside_fence(text: str) -> bool:
    """Does a text end inside a block of code?"""
    return len(_FENCE_LINE.findall(text)) % 2 == 1


def open_line(text: str) -> str:
    """The end of the line that a text stops in, at most 200 characters; "" at a line's start."""
    return text[text.rfind("\n") + 1 :][-_TAIL:]


def join_correction(
    request: ReviewRequest,
    step: int,
    written: str,
    *,
    delimiters: Sequence[str],
    finished: bool = True,
    continued: bool = False,
    fenced: bool = False,
) -> str:
    """The text that goes behind `request.kept_text(step)`; "" where nothing is left.

    Args:
        written: what a model wrote, of which the first `MAX_REPLY` characters are read.
        delimiters: of steps; the correction ends with the first of its steps.
        finished: False where the model was stopped in the middle (max_tokens).
        continued: the model went on with the kept text itself (a prefill).
        fenced: it was asked for a fence around its lines, being inside a block of code.
    """
    kept, cut = request.kept_text(step), request.steps[step].text
    text = whole_text(without_thoughts(written)[:MAX_REPLY]).replace("\r\n", "\n")
    if not continued:
        text = _unwrapped(text, kept, cut, fenced)
        text = _without_label(text, step + 1, cut)
    text = _without_repetition(text, kept, delimiters)
    text = _joined(text, kept, "" if continued else cut)
    if not text.strip():
        return ""
    starts = step_starts(text, delimiters, kept)
    if len(starts) > 1:
        return text[: starts[1]]
    closing = _closing(request, cut, delimiters) if finished else ""
    return text.rstrip() + closing if closing else text


def correction_verdict(
    request: ReviewRequest,
    step: int,
    text: str,
    *,
    tokenizer: Tokenizer | None,
    reason: str,
    usage: Usage,
) -> Verdict:
    """The verdict of a correction: a Revise, or the Keep that a rule makes of it.

    Args:
        text: from `join_correction`.
        reason, usage: of the verdict.
        tokenizer: the policy's. With it the text is encoded here, once, and cut to
            `request.max_correction` tokens; without, the episode does so.

    Returns:
        A Revise, its correction being ids where no token straddles the cut, else a text; or a Keep
        under the guard name "equal" or "special_token".
    """
    clipped = str(clip_correction(text, request.max_correction))
    correction: str | tuple[int, ...] = clipped
    if clipped and tokenizer is not None:
        correction, clipped = _fitted(request, step, clipped, tokenizer)
    verdict = Verdict.revise(step, correction, reason, usage)
    if not clipped.strip():
        return verdict
    mark = _MARKUP.search(clipped)
    is_cut = len(clipped.rstrip()) < len(text.rstrip())
    if mark:
        guard, why = SPECIAL_TOKEN, f"the correction holds {mark[0]!r}"
    elif _is_equal(request, step, clipped, is_cut=is_cut):
        guard, why = EQUAL, "the correction is what was cut"
    else:
        return verdict
    return verdict.kept_by(guard, f"{why}; {reason}" if reason else why)


def _unwrapped(text: str, kept: str, cut: str, fenced: bool) -> str:
    """Without the tags or the fence that a model puts around its answer."""
    tagged = _TAGGED.match(text)
    if tagged:
        text = tagged[1]
    if inside_fence(kept):
        block = _TAGGED_BLOCK.search(text)
        if block is None and (fenced or len(_FENCE_LINE.findall(text)) > 1):
            block = _BARE_BLOCK.match(text)  # a single bare fence may close the student's block
        return block[1] if block else text
    whole = _FENCED.match(text)
    if whole and whole[1].strip().lower() in _PLAIN and not cut.lstrip().startswith(FENCE):
        return whole[2]
    return text


def _without_label(text: str, number: int, cut: str) -> str:
    label = re.compile(  # behind the white space, so that none of it is gone over twice
        rf"[*#\[ ]*(?:(?:the )?(?:new|next|correct(?:ed)?|revised) step(?: {number})?"
        rf"|step {number})[*\]]*[:.][* ]*\n?",
        re.IGNORECASE,
    )
    body = text.lstrip()
    found = None if label.match(cut.lstrip()) else label.match(body)
    return body[found.end() :] if found else text


def _without_repetition(text: str, kept: str, delimiters: Sequence[str]) -> str:
    """Without the kept text's end, where the model begins with it."""
    body = text.lstrip()
    line = kept[kept.rfind("\n") + 1 :]
    starts = [0, *step_starts(kept, delimiters)[-_LOOK_BACK:]]
    for start in sorted(set(starts)):
        repeated = kept[start:].strip() if not line.strip() else kept[start:].lstrip()
        if len(repeated.strip()) >= _REPEAT and body.startswith(repeated):
            rest = body[len(repeated) :]
            # "x = 1" is no repetition in front of "x = 12"; of an open line it is what we look for.
            if line.strip() or not rest.strip() or rest.lstrip(" \t").startswith("\n"):
                return rest
    if len(line.strip()) >= _REPEAT // 2 and body.startswith(line.lstrip()):
        return body[len(line.lstrip()) :]
    return text


def _joined(text: str, kept: str, cut: str) -> str:
    """With the white space in front that the place needs."""
    if not kept or kept.endswith("\n"):
        text = re.sub(r"\A(?:[ \t]*\n)+", "", text)
        return text if inside_fence(kept) else text.lstrip()
    if kept[-1].isspace():
        return text.lstrip()
    if not text or text[0].isspace() or text[0] in ".,;:!?)":
        return text
    return cut[: len(cut) - len(cut.lstrip())] + text


def _closing(request: ReviewRequest, cut: str, delimiters: Sequence[str]) -> str:
    """What ends a finished correction: the white space behind the step that it replaces."""
    behind = cut[len(cut.rstrip()) :]
    if behind or request.finish is Finish.EOS:
        return behind
    return next((d for d in delimiters if d.strip("\n") == ""), "")


def _fitted(
    request: ReviewRequest, step: int, text: str, tokenizer: Tokenizer
) -> tuple[str | tuple[int, ...], str]:
    """The correction cut to L tokens, as the verdict takes it and as text."""
    before, carry = request.kept_ids(step), request.steps[step].carry
    ids = correction_ids(tokenizer, text, carry=carry, limit=request.max_correction, before=before)
    fits, _ = token_ends(tokenizer, ids, before)
    if carry:  # encoded together with it, by the episode
        fits = fits[len(carry) :] if fits.startswith(carry) else ""
        return fits, fits
    return tuple(ids), fits


def _is_equal(request: ReviewRequest, step: int, text: str, *, is_cut: bool) -> bool:
    dropped = "".join(s.text for s in request.steps[step:]).strip()
    if is_cut and dropped.startswith(text.strip()):
        return True
    return text.strip() in (request.steps[step].text.strip(), dropped)
