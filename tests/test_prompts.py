"""Prompts are made in one place, as the tokenizer itself makes them, and refused when unusable."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mintrl_env.errors import TaskError, UsageError
from mintrl_env.prompts import ByteTokenizer, HFTokenizer, PromptBuilder
from mintrl_env.types import Task

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|eos|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)
STRICT = "{{ raise_exception('no ' + messages[0]['role']) }}"
Made = dict[str, Any]


def hugging(made: Made, **options: Any) -> Any:
    """A transformers tokenizer of its own, so that no test changes the session's."""
    from transformers import PreTrainedTokenizerFast

    template = options.pop("chat_template", None)
    backend = made["bpe"].hf.backend_tokenizer
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, **options)
    hf.chat_template = template
    return hf


@pytest.fixture(scope="module")
def chat(made_tokenizers: Made) -> HFTokenizer:
    return HFTokenizer(
        hugging(made_tokenizers, eos_token="<|eos|>", pad_token="<|pad|>", chat_template=CHATML)
    )


def shown(tokenizer: Any, ids: Any) -> str:
    return str(tokenizer.decode(ids))


# --- the forms of a prompt


def test_text_stays_text_by_default_and_messages_get_the_template(chat: HFTokenizer) -> None:
    builder = PromptBuilder(chat)
    assert shown(chat, builder.ids(Task("t", "1 + 1?"))) == "1 + 1?"
    messages = ({"role": "user", "content": "1 + 1?"},)
    wanted = "<|im_start|>user\n1 + 1?<|eos|>\n<|im_start|>assistant\n"
    assert shown(chat, builder.ids(Task("t", messages))) == wanted
    assert shown(chat, PromptBuilder(chat, chat=True).ids(Task("t", "1 + 1?"))) == wanted
    assert shown(chat, PromptBuilder(chat, chat=False).ids(Task("t", messages))) == "1 + 1?"


def test_equal_to_the_tokenizers_own_chat_template(chat: HFTokenizer) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "日本 😀 <think> {problem} {{x}}"},
        {"role": "assistant", "content": "a\n\nb"},
        {"role": "user", "content": "So?"},
    ]
    for kwargs in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
        own = chat.hf.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=True, **kwargs
        )["input_ids"]
        builder = PromptBuilder(chat, chat_template_kwargs=kwargs)
        ids = builder.ids(Task("t", tuple(messages)))
        assert ids.tolist() == own
        assert ids.dtype == np.int32 and not ids.flags.writeable
    assert shown(chat, ids).endswith("assistant\n")
    off = PromptBuilder(chat, chat_template_kwargs={"enable_thinking": False})
    assert shown(chat, off.ids(Task("t", tuple(messages)))).endswith("assistant\n<think></think>")


@pytest.mark.parametrize("is_chat", [True, False])
def test_whose_system_prompt_counts(chat: HFTokenizer, is_chat: bool) -> None:
    builder = PromptBuilder(chat, system_prompt="ours", chat=is_chat)

    def read(task: Task) -> list[str]:
        text = shown(chat, builder.ids(task))
        return [word for word in ("ours", "own", "theirs") if word in text]

    assert read(Task("t", "p")) == ["ours"]
    assert read(Task("t", "p", system_prompt="own")) == ["own"]
    assert read(Task("t", "p", system_prompt="")) == []
    user = {"role": "user", "content": "p"}
    assert read(Task("t", (user,))) == ["ours"]
    theirs = ({"role": "system", "content": "theirs"}, user)
    assert read(Task("t", theirs)) == ["theirs"]
    assert read(Task("t", theirs, system_prompt="own")) == ["theirs"]


def test_the_template_is_filled_once_and_braces_are_text(chat: HFTokenizer) -> None:
    builder = PromptBuilder(chat, template=r"Solve: {problem} in \boxed{x}. {problem}")
    task = Task("t", r"{problem} {0} {} \frac{1}{2}")
    text = r"Solve: {problem} {0} {} \frac{1}{2} in \boxed{x}. {problem} {0} {} \frac{1}{2}"
    assert shown(chat, builder.ids(task)) == text
    with pytest.raises(UsageError, match=r"does not hold \{problem\}"):
        PromptBuilder(chat, template="Solve: {question}")


def test_messages_without_content_are_not_written_as_none(chat: HFTokenizer) -> None:
    messages = ({"role": "user", "content": "a"}, {"role": "assistant", "content": None})
    assert shown(chat, PromptBuilder(chat, chat=False).ids(Task("t", messages))) == "a"
    only_role = ({"role": "user", "content": "a"}, {"role": "tool"})
    assert shown(chat, PromptBuilder(chat, chat=False).ids(Task("t", only_role))) == "a"


# --- BOS and EOS


def with_marks(made: Made, template: str) -> HFTokenizer:
    """A tokenizer that puts special tokens around a text, as Llama's and T5's do."""
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_str(made["bpe"].hf.backend_tokenizer.to_str())
    marks = [(t, backend.token_to_id(t)) for t in ("<|im_start|>", "<|eos|>")]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=marks)
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|eos|>"
    )
    hf.chat_template = "<|im_start|>{{ messages[0]['content'] }}"
    return HFTokenizer(hf)


def test_a_bos_once_in_text_and_once_in_chat(made_tokenizers: Made) -> None:
    tokenizer = with_marks(made_tokenizers, "<|im_start|> $A")
    bos = tokenizer.hf.bos_token_id
    text = PromptBuilder(tokenizer).ids(Task("t", "abc"))
    assert text.tolist() == [bos, *tokenizer.encode("abc")]
    messages = ({"role": "user", "content": "abc"},)
    assert PromptBuilder(tokenizer).ids(Task("t", messages)).tolist() == text.tolist()
    assert tokenizer.encode("abc")[0] != bos


def test_a_prompt_never_ends_with_an_eos_that_the_tokenizer_adds(made_tokenizers: Made) -> None:
    tokenizer = with_marks(made_tokenizers, "<|im_start|> $A <|eos|>")
    bos, eos = tokenizer.hf.bos_token_id, tokenizer.eos_id
    builder = PromptBuilder(tokenizer)
    assert builder.ids(Task("t", "abc")).tolist() == [bos, *tokenizer.encode("abc")]
    # One that the text itself ends with is the text's.
    assert builder.ids(Task("t", "abc<|eos|>")).tolist()[-1] == eos


def test_a_tokenizer_without_eos(made_tokenizers: Made) -> None:
    with pytest.raises(UsageError, match=r"no EOS token.*eos_token"):
        HFTokenizer(hugging(made_tokenizers))


# --- refusals


def test_empty_and_over_long_prompts(chat: HFTokenizer) -> None:
    for builder in (
        PromptBuilder(chat),
        PromptBuilder(chat, system_prompt="s", template="Q{problem}"),
    ):
        for prompt in ("", " \n", ({"role": "user", "content": ""},)):
            with pytest.raises(TaskError, match="'a/1': the prompt is empty"):
                builder.ids(Task("a/1", prompt))
    tokens = ByteTokenizer()
    assert len(PromptBuilder(tokens, max_prompt=4).ids(Task("t", "abcd"))) == 4
    with pytest.raises(TaskError, match="'t': the prompt has 5 tokens, more than max_prompt = 4"):
        PromptBuilder(tokens, max_prompt=4).ids(Task("t", "abcde"))
    with pytest.raises(UsageError, match="max_prompt"):
        PromptBuilder(tokens, max_prompt=0)


def test_chat_without_a_template(made_tokenizers: Made) -> None:
    messages = ({"role": "user", "content": "x"},)
    for tokenizer in (ByteTokenizer(), made_tokenizers["bpe"]):
        with pytest.raises(UsageError, match="chat: true needs"):
            PromptBuilder(tokenizer, chat=True)
        with pytest.raises(TaskError, match="'t': its prompt is chat messages, but"):
            PromptBuilder(tokenizer).ids(Task("t", messages))
        assert len(PromptBuilder(tokenizer).ids(Task("t", "x")))


def test_a_template_that_refuses_names_task_and_roles(made_tokenizers: Made) -> None:
    tokenizer = HFTokenizer(hugging(made_tokenizers, eos_token="<|eos|>", chat_template=STRICT))
    task = Task("t", ({"role": "critic", "content": "x"}, {"role": "user", "content": "y"}))
    with pytest.raises(TaskError, match=r"'t': the tokenizer's chat .*critic, user\): no critic"):
        PromptBuilder(tokenizer).ids(task)


def test_kwargs_that_are_the_builders_own(chat: HFTokenizer) -> None:
    for name in ("tokenize", "add_generation_prompt", "continue_final_message"):
        with pytest.raises(UsageError, match=f"chat_template_kwargs: {name}"):
            PromptBuilder(chat, chat_template_kwargs={name: True})


# --- tokenizers


def test_special_ids_are_the_added_tokens_that_are_no_white_space(made_tokenizers: Made) -> None:
    from tokenizers import AddedToken, Tokenizer
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_str(made_tokenizers["bpe"].hf.backend_tokenizer.to_str())
    backend.add_tokens([AddedToken("    ", normalized=False), AddedToken("\t\t", normalized=False)])
    tokenizer = HFTokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eos|>", pad_token="<|pad|>"),
        extra_eos=[5],
    )
    spaces = backend.token_to_id("    ")
    assert spaces in tokenizer.encode("x:\n    y")  # GPT-NeoX's way: indentation is one added token
    assert spaces not in tokenizer.special_ids
    for mark in ("<|eos|>", "<|pad|>", "<|im_start|>", "<think>"):
        assert backend.token_to_id(mark) in tokenizer.special_ids
    assert tokenizer.eos_ids == {5, tokenizer.eos_id} <= tokenizer.special_ids
    assert tokenizer.vocab_size == backend.get_vocab_size()


def test_a_vocabulary_with_gaps_counts_up_to_its_last_id() -> None:
    class Gaps:
        eos_token_id = 1
        all_special_ids = (1,)
        added_tokens_decoder = {1: "</s>", 9: "<mark>"}  # noqa: RUF012

        def __len__(self) -> int:
            return 4

    assert HFTokenizer(Gaps()).vocab_size == 10
    assert HFTokenizer(Gaps()).special_ids == {1, 9}


@pytest.mark.parametrize("kind", ["byte", "bpe", "sentencepiece", "metaspace", "char"])
def test_surrogates_never_reach_a_tokenizer(made_tokenizers: Made, kind: str) -> None:
    tokenizer = made_tokenizers[kind]
    assert tokenizer.encode("a\ud800b") == tokenizer.encode("a\ufffdb")
    assert tokenizer.encode("\ud83d\ude00") == tokenizer.encode("😀")  # the halves of one character
    ids = PromptBuilder(tokenizer).ids(Task("t", "a\udc00b"))
    assert ids.tolist() == PromptBuilder(tokenizer).ids(Task("t", "a\ufffdb")).tolist()


def test_surrogates_in_chat(chat: HFTokenizer) -> None:
    one, other = (({"role": "user", "content": f"a{c}b"},) for c in ("\ud800", "\ufffd"))
    builder = PromptBuilder(chat)
    assert builder.ids(Task("t", one)).tolist() == builder.ids(Task("t", other)).tolist()


@given(st.binary(max_size=12), st.lists(st.integers(0, 4), max_size=3))
def test_bytes_round_trip(data: bytes, places: list[int]) -> None:
    tokenizer = ByteTokenizer()
    ids = list(data)
    assert tokenizer.decode(ids) == data.decode("utf-8", "replace")
    text = data.decode("utf-8", "ignore")
    assert tokenizer.decode(tokenizer.encode(text)) == text
    for place in places:
        ids.insert(place, tokenizer.EOS)
    assert tokenizer.decode(np.array(ids, np.int32)).count("<|eos|>") == len(places)
