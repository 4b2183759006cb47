"""The judge that asks a chat model: another model behind a server, or anything that answers chats.

mode       calls a Keep / a Revise   correction
two-call   1 / 2                     the kept text gone on with, after the verdict (the paper's way)
one-call   1 / 1                     in the same answer as the verdict
cut-only   1 / 1 or 2                none, so that the policy writes the step again; the second
                                     Revise in a row at one place gets that of two-call
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

from mintrl_env.chat import ChatMessage, ChatModel, ChatReply
from mintrl_env.errors import JudgeCause, JudgeError, UsageError
from mintrl_env.judge_corrections import (
    correction_verdict,
    inside_fence,
    join_correction,
    open_line,
)
from mintrl_env.judge_parsing import (
    Answer,
    last_object,
    parse_answer,
    restore_latex,
    unparsed,
)
from mintrl_env.judge_prompts import (
    PRIVILEGED,
    JudgePrompts,
    Privileged,
    RunTests,
    case_values,
    given_text,
)
from mintrl_env.judges_scoring import judge_key
from mintrl_env.keys import RowKey, uniforms
from mintrl_env.protocols import Tokenizer
from mintrl_env.types import ReviewRequest, Usage, Verdict, VerdictKind

Mode = Literal["two-call", "one-call", "cut-only"]

_SLACK = 16  # tokens beyond L: the judge's are not the policy's, and a fence or a label takes some
_DRAWS = 64  # seeds that a review may use
_CAUSES = ((TimeoutError, JudgeCause.TIMEOUT), (ConnectionError, JudgeCause.CONNECTION))


def answer_schema(**more: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a verdict. The reason comes first: a model that has found the words for
    what is wrong finds the step more often."""
    properties: dict[str, Any] = {
        "reason": {"type": "string"},
        "verdict": {"type": "string", "enum": ["keep", "revise"]},
        "step": {"type": ["integer", "null"]},
        **more,
    }
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


class Asker:
    """Asks a chat model on behalf of one review, and adds up what that costs.

    Attributes:
        usage: of all calls so far; of a failed one, too, once `accounted` has seen it.
    """

    def __init__(self, chat: ChatModel, request: ReviewRequest) -> None:
        self.chat = chat
        self.usage = Usage(calls=0)
        self._request = request
        self._asked = 0

    async def ask(
        self,
        messages: Sequence[ChatMessage],
        *,
        max_tokens: int,
        temperature: float,
        schema: Mapping[str, Any] | None = None,
        prefill: str = "",
        chat: ChatModel | None = None,
    ) -> ChatReply:
        """One call, of another model where one is given; arguments as in `ChatModel.chat`."""
        reply = await (chat or self.chat).chat(
            messages,
            max_tokens=max_tokens,
            schema=schema,
            prefill=prefill,
            temperature=temperature,
            seed=self._seed(),
        )
        self.usage += reply.usage
        return reply

    def _seed(self) -> int | None:
        """Equal for a row that is run again, different for every call of a run."""
        if not isinstance(self._request.key, RowKey):
            return None
        draw = self._request.review * _DRAWS + self._asked
        self._asked += 1
        return int(uniforms(judge_key(self._request, "chat").at(draw), 1)[0] * 2**31)

    @contextmanager
    def accounted(self) -> Iterator[None]:
        """Any error in here becomes a JudgeError that carries the cost of all calls."""
        try:
            yield
        except JudgeError as error:
            if isinstance(error.usage, Usage):
                self.usage += error.usage
            error.usage = self.usage
            raise
        except Exception as error:
            cause = next((c for kind, c in _CAUSES if isinstance(error, kind)), JudgeCause.INTERNAL)
            raise JudgeError(cause, f"{type(error).__name__}: {error}", usage=self.usage) from error


def verdict_turn(step: int, reason: str) -> ChatMessage:
    """A Revise as the model's own turn, in words: behind its JSON a small model writes more of it."""
    return ChatMessage("assistant", f"Step {step + 1} is wrong. {reason}".strip())


async def write_step(
    asker: Asker,
    prompts: JudgePrompts,
    request: ReviewRequest,
    step: int,
    *,
    given: str,
    said: Sequence[ChatMessage],
    delimiters: Sequence[str],
    temperature: float,
) -> str:
    """Let a chat model go on with what is kept before `step`, by one step.

    Where its server can continue a text, it does so behind the sections [[write]] and
    [[write_case]]; elsewhere it is asked in a further turn of the verdict's chat ([[correct]],
    [[correct_inside]] within a line, [[correct_code]] within a block of code).

    Args:
        given: from `given_text`.
        said: the chat so far, its answer included.

    Returns:
        The text as it joins the kept text, "" where the model wrote nothing of use.

    Raises:
        JudgeError: "unparsed" where it gave its verdict once more.
    """
    if request.max_correction < 1:
        return ""
    kept = request.kept_text(step)
    continued = (
        asker.chat.capabilities.prefill != "none"
        and prompts.has("write")
        and prompts.has("write_case")
    )
    fenced = False
    if continued:
        case = prompts.text("write_case", problem=request.task.prompt_text, given=given)
        messages = [ChatMessage("system", prompts.text("write")), ChatMessage("user", case)]
    else:
        tail = open_line(kept)
        inside = bool(tail.strip()) and prompts.has("correct_inside")
        section = "correct_inside" if inside else "correct"
        fenced = section == "correct" and inside_fence(kept) and prompts.has("correct_code")
        section = "correct_code" if fenced else section
        turn = prompts.text(section, step=str(step + 1), tail=tail)
        messages = [*said, ChatMessage("user", turn)]
    # No stop strings: where a server drops the white space at a prefill's end, the model writes the
    # empty line first and would stop at once.
    reply = await asker.ask(
        messages,
        max_tokens=request.max_correction + _SLACK,
        temperature=temperature,
        prefill=kept if continued else "",
    )
    return join_correction(
        request,
        step,
        reply.text if continued else _step_of(reply.text, prompts),
        delimiters=delimiters,
        finished=reply.finish != "length",
        continued=continued,
        fenced=fenced,
    )


def _step_of(text: str, prompts: JudgePrompts) -> str:
    """A correction that the model wrote as JSON though it was asked for text, taken out of it."""
    found = last_object(text, "correction")
    if found is not None and isinstance(found["correction"], str):
        return restore_latex(found["correction"]) if prompts.latex else str(found["correction"])
    if last_object(text, "verdict") is not None:
        raise unparsed(text, "asked for the next step, it gave its verdict once more")
    return text


class ChatJudge:
    """Asks a chat model whether the pending steps are right, and for the step as it should be.

    Args:
        chat: the model. What its server can do (structured answers, prefill) is used.
        tokenizer: the policy's, in which corrections are cut to L tokens here, before the guards
            look at them; None leaves that to the episode.
        prompts: the texts; default those for math.
        mode: see above.
        privileged: what the judge is shown of the task that the policy isn't: nothing, the
            reference solution (else the answer), the rubric, the tests.
        rubric_field: where the task's metadata hold the rubric.
        delimiters: of steps; those of the episode.
        run_tests: shows the judge how the public tests go on what has been written.
        temperature: of corrections and, unless `verdict_temperature` is given, of verdicts.
        verdict_tokens: the most that a verdict may have, its reason included.
        reasks: further attempts at a verdict that can't be parsed or names no step.
        memory: rows whose last bare cut is remembered (cut-only).

    Raises:
        UsageError: an unknown mode, a number that makes no sense, a prompt that is missing.
    """

    def __init__(
        self,
        chat: ChatModel,
        tokenizer: Tokenizer | None = None,
        *,
        prompts: JudgePrompts | None = None,
        mode: Mode = "two-call",
        privileged: Privileged = "none",
        rubric_field: str = "rubric",
        delimiters: Sequence[str] = ("\n\n", "```"),
        run_tests: RunTests | None = None,
        temperature: float = 1.0,
        verdict_temperature: float | None = None,
        verdict_tokens: int = 512,
        reasks: int = 0,
        memory: int = 4096,
    ) -> None:
        if mode not in get_args(Mode):
            raise UsageError(f"mode is one of {', '.join(get_args(Mode))}, not {mode!r}")
        if privileged not in PRIVILEGED:
            raise UsageError(f"privileged is one of {', '.join(PRIVILEGED)}, not {privileged!r}")
        for name, value, least in (
            ("temperature", temperature, 0),
            ("verdict_temperature", verdict_temperature or 0, 0),
            ("verdict_tokens", verdict_tokens, 1),
            ("memory", memory, 1),
        ):
            if not value >= least:
                raise UsageError(f"{name} must be >= {least}, not {value!r}")
        if not 0 <= reasks < _DRAWS // 2:
            raise UsageError(f"reasks must be between 0 and {_DRAWS // 2 - 1}, not {reasks!r}")
        self._chat, self._tokenizer = chat, tokenizer
        self._prompts = prompts if prompts is not None else JudgePrompts.load("math")
        self._mode = mode
        self._privileged: Privileged = privileged
        self._rubric_field = rubric_field
        self._delimiters = tuple(delimiters)
        self._run_tests = run_tests
        self._temperature = temperature
        cold = verdict_temperature
        self._verdict_temperature = temperature if cold is None else cold
        self._verdict_tokens = verdict_tokens
        self._attempts = 1 + reasks
        self._cuts = _Cuts(memory)
        self._section = "review_and_correct" if mode == "one-call" else "review"
        needed = [self._section, "case", *([] if mode == "one-call" else ["correct"])]
        missing = [section for section in needed if not self._prompts.has(section)]
        if missing:
            raise UsageError(f"the judge's prompts have no section [[{missing[0]}]]")

    async def review(self, request: ReviewRequest) -> Verdict:
        """One or two calls; see the module's table, and `judge_parsing` for what each answer means.

        Raises:
            JudgeError: no usable verdict; with the cost of all calls.
        """
        if not request.chunk_text.strip():
            return Verdict.keep("nothing but the end", Usage(calls=0))
        asker = Asker(self._chat, request)
        with asker.accounted():
            return await self._review(request, asker)

    async def _review(self, request: ReviewRequest, asker: Asker) -> Verdict:
        given = given_text(request.task, self._privileged, rubric_field=self._rubric_field)
        values = case_values(
            request, given, delimiters=self._delimiters, outcome=await self._outcome(request)
        )
        said = [
            ChatMessage("system", self._prompts.text(self._section)),
            ChatMessage("user", self._prompts.text("case", **values)),
        ]
        answer, finished = await self._verdict(asker, said, request)
        if answer.kind is VerdictKind.KEEP:
            return Verdict.keep(answer.reason, asker.usage)
        assert answer.step is not None
        step, reason = answer.step, answer.reason
        if self._mode == "cut-only" and not self._cuts.again(request, step):
            return Verdict.revise(step, "", reason, asker.usage)
        if self._mode == "one-call":
            text = join_correction(
                request, step, answer.correction, delimiters=self._delimiters, finished=finished
            )
        else:
            text = await write_step(
                asker,
                self._prompts,
                request,
                step,
                given=given,
                said=[*said, verdict_turn(step, reason)],
                delimiters=self._delimiters,
                temperature=self._temperature,
            )
        return correction_verdict(
            request, step, text, tokenizer=self._tokenizer, reason=reason, usage=asker.usage
        )

    async def _verdict(
        self, asker: Asker, said: Sequence[ChatMessage], request: ReviewRequest
    ) -> tuple[Answer, bool]:
        """The answer, and whether it came to its own end."""
        room = self._verdict_tokens
        schema = answer_schema()
        if self._mode == "one-call":
            room += request.max_correction + _SLACK
            schema = answer_schema(correction={"type": "string"})
        for attempt in range(self._attempts):
            reply = await asker.ask(
                said, max_tokens=room, temperature=self._verdict_temperature, schema=schema
            )
            finished = reply.finish != "length"
            try:
                latex = self._prompts.latex
                return parse_answer(reply.text, len(request.steps), latex=latex), finished
            except JudgeError as error:
                if attempt + 1 < self._attempts:
                    continue
                if reply.finish == "stop":
                    raise
                why = str(error).removeprefix(f"{error.cause.value}: ")
                hint = (
                    f"max_tokens = {room}: raise verdict_tokens, or what a reasoning model may "
                    "think on top of it"
                )
                how = reply.finish if finished else hint
                raise JudgeError(error.cause, f"{why} (it ended by {how})") from error
        raise AssertionError("unreachable")

    async def _outcome(self, request: ReviewRequest) -> str:
        if self._run_tests is None:
            return ""
        try:
            text = request.accepted_text + request.chunk_text
            return await self._run_tests(request.task, text) or ""
        except Exception as error:
            # The judge can do without; that it had to is in the prompt, and in a replay's cache.
            return f"(the tests could not be run: {type(error).__name__}: {error})"[:300]


class _Cuts:
    """Where each row was last cut without a correction; of the latest rows only.

    A row is `request.key`'s, or the task and prompt where there is none (two environments that write
    the same response to one task then count as one row).
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._last: OrderedDict[Any, bytes] = OrderedDict()

    def again(self, request: ReviewRequest, step: int) -> bool:
        """Was the row's last cut at this place? Remembers it."""
        key = request.key
        row = key.row if isinstance(key, RowKey) else (request.task.task_id, _digest(request))
        place = hashlib.blake2b(request.kept_ids(step).tobytes(), digest_size=16).digest()
        same = self._last.get(row) == place
        self._last[row] = place
        self._last.move_to_end(row)
        while len(self._last) > self._rows:
            self._last.popitem(last=False)
        return same


def _digest(request: ReviewRequest) -> bytes:
    return hashlib.blake2b(request.prompt_ids.tobytes(), digest_size=16).digest()
