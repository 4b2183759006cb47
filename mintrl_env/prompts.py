"""The one place where a chat template is applied and a prompt becomes ids.

Intervened, control, GRPO, evaluation and veRL paths all call `PromptBuilder.ids`, so that a policy
never sees two versions of one prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mintrl_env.errors import TaskError, UsageError
from mintrl_env.protocols import Tokenizer
from mintrl_env.surrogates import whole_text
from mintrl_env.types import IdsLike, Task, frozen_ids


class HFTokenizer:
    """A transformers tokenizer as the rules need it (`mintrl_env.protocols.Tokenizer`).

    Args:
        tokenizer: a `PreTrainedTokenizerBase`; it needs an EOS token.
        extra_eos: more ids that end a response, such as a generation config's `eos_token_id` list.
    """

    def __init__(self, tokenizer: Any, extra_eos: IdsLike = ()) -> None:
        if tokenizer.eos_token_id is None:
            raise UsageError(
                f"the tokenizer {getattr(tokenizer, 'name_or_path', '')!r} has no EOS token, so no "
                "response could end: set `tokenizer.eos_token` (an instruct model's has one)"
            )
        self.hf = tokenizer
        self._alone: dict[int, str] = {}  # what single tokens write
        # Where transformers only hands ids on to the Rust tokenizer, ask that: a fifth of the time.
        plain = getattr(type(tokenizer), "_decode", None)
        on = getattr(plain, "__module__", "") == "transformers.tokenization_utils_tokenizers"
        on = on and getattr(type(tokenizer).decode, "__module__", "") == plain.__module__
        self._backend = tokenizer.backend_tokenizer if on else None
        self._eos = frozenset({int(tokenizer.eos_token_id), *(int(i) for i in extra_eos)})
        added = getattr(tokenizer, "added_tokens_decoder", {})
        # Some vocabularies (GPT-NeoX's) add runs of spaces, which are text like any other.
        marks = {int(i) for i, token in added.items() if str(token).strip()}
        self._special = frozenset(map(int, tokenizer.all_special_ids)) | marks | self._eos
        # Ids may leave gaps, so the number of tokens is not always the last id + 1.
        self._vocab_size = max(len(tokenizer), *(int(i) + 1 for i in added), 0)

    @property
    def eos_ids(self) -> frozenset[int]:
        return self._eos

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_id(self) -> int:
        """The tokenizer's own EOS, which masked rows consist of."""
        return int(self.hf.eos_token_id)

    def encode(self, text: str) -> list[int]:
        return list(self.hf.encode(whole_text(text), add_special_tokens=False))

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a prompt that no chat template wrote, with the BOS that the tokenizer may add.

        An EOS that it may add is left out: the response would begin behind its own end.
        """
        text = whole_text(text)
        ids = list(self.hf(text)["input_ids"])
        if ids and ids[-1] in self._eos and self.encode(text)[-1:] != ids[-1:]:
            ids.pop()
        return ids

    def decode(self, ids: IdsLike) -> str:
        tokens = np.asarray(ids, dtype=np.int64).tolist()
        if len(tokens) != 1:
            return self._decode(tokens)
        # Splitting a chunk into steps asks for every token by itself, again and again.
        if tokens[0] not in self._alone:
            self._alone[tokens[0]] = self._decode(tokens)
        return self._alone[tokens[0]]

    def _decode(self, tokens: list[int]) -> str:
        if self._backend is not None:
            return str(self._backend.decode(tokens, skip_special_tokens=False))
        # clean_up_tokenization_spaces would make a text that its own tokens do not add up to.
        return str(
            self.hf.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )


class ByteTokenizer:
    """UTF-8 bytes as tokens, 0 to 255, then EOS, 256: built in, for bare environments and tests."""

    EOS = 256

    @property
    def eos_ids(self) -> frozenset[int]:
        return frozenset({self.EOS})

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset({self.EOS})

    @property
    def vocab_size(self) -> int:
        return 257

    @property
    def eos_id(self) -> int:
        return self.EOS

    def encode(self, text: str) -> list[int]:
        return list(whole_text(text).encode("utf-8"))

    def decode(self, ids: IdsLike) -> str:
        pieces, run = [], bytearray()
        for i in map(int, ids):
            if i < 256:
                run.append(i)
            else:
                pieces.append(run.decode("utf-8", "replace") + "<|eos|>")
                run = bytearray()
        pieces.append(run.decode("utf-8", "replace"))
        return "".join(pieces)


_OUR_KWARGS = {"conversation", "tokenize", "add_generation_prompt", "continue_final_message"}


@dataclass(frozen=True, slots=True)
class PromptBuilder:
    """Task -> prompt ids.

    Attributes:
        tokenizer: the policy's.
        system_prompt: put first, unless the task has its own ("": none) or its messages do.
        template: how the task's text stands in the user's message; `{problem}` is the text. A
            prompt of messages is taken as it is.
        chat: apply the tokenizer's chat template (True), encode the text as it is (False), or by
            the prompt's form: messages get the template, text does not (None, as TRL does it).
        chat_template_kwargs: passed to the template (`{"enable_thinking": False}`).
        max_prompt: the most tokens; a longer prompt is refused, never cut.
    """

    tokenizer: Tokenizer
    system_prompt: str | None = None
    template: str = "{problem}"
    chat: bool | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    max_prompt: int = 2048

    def __post_init__(self) -> None:
        if "{problem}" not in self.template:
            raise UsageError(f"prompt_template {self.template!r} does not hold {{problem}}")
        if self.max_prompt < 1:
            raise UsageError(f"max_prompt counts tokens and must be >= 1, not {self.max_prompt}")
        ours = _OUR_KWARGS & set(self.chat_template_kwargs)
        if ours:
            raise UsageError(f"chat_template_kwargs: {min(ours)} is set by the prompt builder")
        if self.chat and not self._has_template:
            raise UsageError(
                "chat: true needs a tokenizer with a chat template; a base model takes chat: false"
            )

    @property
    def _has_template(self) -> bool:
        return bool(getattr(getattr(self.tokenizer, "hf", None), "chat_template", None))

    def is_chat(self, task: Task) -> bool:
        return not isinstance(task.prompt, str) if self.chat is None else self.chat

    def messages(self, task: Task) -> list[dict[str, Any]]:
        """The chat messages that the template is applied to."""
        system = task.system_prompt if task.system_prompt is not None else self.system_prompt
        if isinstance(task.prompt, str):
            body = [{"role": "user", "content": self.template.replace("{problem}", task.prompt)}]
        else:
            body = [dict(message) for message in task.prompt]
        if system and not (body and body[0].get("role") == "system"):
            body.insert(0, {"role": "system", "content": system})
        return body

    def text(self, task: Task) -> str:
        """The prompt as the policy reads it, special tokens written out.

        Raises:
            TaskError: chat messages without a template, or which the template refuses.
        """
        messages = self.messages(task)
        if not self.is_chat(task):
            contents = (message.get("content") for message in messages)
            return "\n\n".join(str(content) for content in contents if content)
        if not self._has_template:
            raise TaskError(
                f"task {task.task_id!r}: its prompt is chat messages, but the tokenizer has no "
                "chat template; give the prompt as text or use an instruct model's tokenizer"
            )
        try:
            return str(
                self.tokenizer.hf.apply_chat_template(  # type: ignore[attr-defined]
                    messages,
                    tokenize=False,
                    add_generation_prompt=True,
                    **self.chat_template_kwargs,
                )
            )
        except Exception as error:  # templates raise on roles that they do not know, and the like
            raise TaskError(
                f"task {task.task_id!r}: the tokenizer's chat template refuses the prompt "
                f"(roles: {', '.join(str(m.get('role')) for m in messages)}): {error}"
            ) from error

    def ids(self, task: Task) -> npt.NDArray[np.int32]:
        """The prompt's ids, int32 (P,).

        Raises:
            TaskError: the prompt is empty or longer than `max_prompt`.
        """
        text = self.text(task)
        if self.is_chat(task):
            ids = self.tokenizer.encode(text)  # the template wrote the special tokens
        else:
            ids = getattr(self.tokenizer, "encode_prompt", self.tokenizer.encode)(text)
        if not ids or not task.prompt_text.strip():
            raise TaskError(f"task {task.task_id!r}: the prompt is empty")
        if len(ids) > self.max_prompt:
            raise TaskError(
                f"task {task.task_id!r}: the prompt has {len(ids)} tokens, more than max_prompt = "
                f"{self.max_prompt}; raise it or leave the task out"
            )
        return frozen_ids(ids)
