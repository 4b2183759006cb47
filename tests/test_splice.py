"""Where steps begin, where that is between tokens, and what a correction is encoded to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from mintrl_env.prompts import ByteTokenizer
from mintrl_env.protocols import Tokenizer
from mintrl_env.splice import (
    correction_ids,
    encode_behind,
    place_of,
    settled_text,
    split_steps,
    step_starts,
    token_ends,
)
from mintrl_env.types import Step

KINDS = ["byte", "bpe", "sentencepiece", "metaspace", "char"]
BYTE_KINDS = ["byte", "bpe", "sentencepiece"]  # those that write any text
DELIMITERS = ("\n\n", "```")
BYTES = ByteTokenizer()

relaxed = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))

# Texts that hurt: delimiters in every company, characters of one to four bytes, joined emoji.
PLAIN = ["a", "b", "x", " ", "  ", ".", "\n", "\n\n", ".\n\n", "```", "```\n", "\n```", "So"]
PLAIN += ["Step", " answer", "42", "日本", "語", "の", "計算", "日"]
WILD = ["é", "😀", "🎉", "👩‍👩‍👧", "語\n\n", "🎉\n\n", "\ufffd", "ﬀ", "\t", "\u200d"]
WILD += ["<think>", "ß"]


def texts(kind: str, *, max_size: int = 12) -> st.SearchStrategy[str]:
    return st.lists(
        st.sampled_from(PLAIN + WILD if kind in BYTE_KINDS else PLAIN), max_size=max_size
    ).map("".join)


def token_lists(
    tokenizer: Tokenizer, kind: str, *, max_size: int = 24
) -> st.SearchStrategy[list[int]]:
    """Ids as a policy may write them: of a text, of pieces that never were one text, of nothing."""
    ordinary = sorted(set(range(tokenizer.vocab_size)) - tokenizer.eos_ids)
    any_ids = st.lists(st.sampled_from(ordinary), max_size=max_size)
    if kind == "sentencepiece":  # bytes in a row, valid or not, which its decoder reads as a whole
        any_ids |= st.lists(st.sampled_from([*range(1, 257), 257, 258]), max_size=max_size)
    of_text = texts(kind).map(lambda text: tokenizer.encode(text))
    cut = st.tuples(of_text, st.integers(0, 8), st.integers(0, 8))
    return any_ids | of_text | cut.map(lambda c: c[0][c[1] : len(c[0]) - c[2]])


def texts_before(tokenizer: Tokenizer, before: list[int], ids: list[int]) -> tuple[str, int]:
    """The whole text, and how much of it `before` has written already."""
    whole = tokenizer.decode([*before, *ids])
    settled = (tokenizer.decode(before[:place]) for place in range(len(before), -1, -1))
    return whole, next(len(text) for text in settled if whole.startswith(text))


def clean_ends(tokenizer: Tokenizer, before: list[int], ids: list[int]) -> list[int]:
    """The definition of `token_ends`, in the plainest and slowest way."""
    whole, base = texts_before(tokenizer, before, ids)
    ends = []
    for place in range(len(ids) + 1):
        written = tokenizer.decode([*before, *ids[:place]])
        clean = whole.startswith(written) and len(written) >= base
        ends.append(len(written) - base if clean else -1)
    ends[0] = 0
    return ends


# --- step_starts: places in text, by hand


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("", [""]),
        ("one", ["one"]),
        ("one\n\ntwo", ["one\n\n", "two"]),
        ("one\n\ntwo\n\n", ["one\n\n", "two\n\n"]),
        ("one\ntwo", ["one\ntwo"]),
        # a run of newlines is one boundary and belongs to the step before it
        ("one\n\n\ntwo", ["one\n\n\n", "two"]),
        ("one\n\n\n\n\ntwo", ["one\n\n\n\n\n", "two"]),
        # a chunk that begins or ends with a delimiter has no empty step there
        ("\n\none\n\ntwo", ["\n\none\n\n", "two"]),
        ("\none", ["\none"]),
        ("one\n\n  \n\n", ["one\n\n  \n\n"]),
        ("\n\n", ["\n\n"]),
        ("one\n\n  \n\ntwo", ["one\n\n  \n\n", "two"]),
        # a fence begins a step with its opening line and ends it with its closing line
        ("see\n```py\nx\n```\nso", ["see\n", "```py\nx\n```\n", "so"]),
        ("```py\nx\n```\nso", ["```py\nx\n```\n", "so"]),
        ("see\n\n```py\nx\n```\n\nso", ["see\n\n", "```py\nx\n```\n\n", "so"]),
        ("see\n```py\nx\n\ny\n```\nso", ["see\n", "```py\nx\n\n", "y\n```\n", "so"]),
        ("see\n```py\nx\n```", ["see\n", "```py\nx\n```"]),
        ("see\n````py\nx\n````\nso", ["see\n", "````py\nx\n````\n", "so"]),
        # three backticks that are no fence: inside a line, and code within one line
        ("use ```x``` here\n\nso", ["use ```x``` here\n\n", "so"]),
        ("```x``` here\nthen\n```\ny\n```\nso", ["```x``` here\nthen\n", "```\ny\n```\n", "so"]),
    ],
)
def test_steps_by_hand(text: str, pieces: list[str]) -> None:
    starts = step_starts(text, DELIMITERS)
    assert [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)] == pieces


@pytest.mark.parametrize(
    ("before", "text", "starts"),
    [
        ("```py\nx\n", "y\n```\nso", [0, 6]),  # the fence closes here
        ("```py\nx\n```\n", "y\n```\nso", [0, 2]),  # and opens here
        ("```py\nx\n", "```\nso", [0, 4]),
        ("```py\nx\n``", "`\nso", [0, 2]),  # a closing fence over the chunk's edge
        ("so\n``", "`py\nx\n```\nthen", [0, 10]),  # an opening one
        ("so\n```", "py\nx\n```\nthen", [0, 9]),
        ("so\n```py", "\nx\n```\nthen", [0, 7]),
        ("x", "```\nso\n```\nso", [0, 7]),  # not at a line's beginning: no fence
        ("a\n```b", "```c\n```\nx\n```\ny", [0, 5, 15]),
    ],
)
def test_a_fence_may_begin_in_an_earlier_chunk(before: str, text: str, starts: list[int]) -> None:
    assert step_starts(text, DELIMITERS, before) == starts


def test_other_delimiters() -> None:
    assert step_starts("one\n\ntwo", ()) == [0]
    assert step_starts("a\nb\n\n\nc", ("\n",)) == [0, 2, 6]
    assert step_starts("a; b;; c;", ("; ",)) == [0, 3, 7]
    assert step_starts("a;;b", (";",)) == [0, 3]
    assert step_starts("a.*b", (".*",)) == [0, 3], "a delimiter is no regular expression"
    # White space after a delimiter that another delimiter ends belongs to the step before.
    assert step_starts("A.\n\nB", (".", "\n\n")) == [0, 4]
    assert step_starts("A.  \n\nB.", (".", "\n\n")) == [0, 6]


@relaxed
@given(
    texts("byte"),
    texts("byte"),
    st.lists(st.sampled_from(["\n\n", "```", "\n", ".", ". ", "a", "\n\n\n"]), unique=True),
)
def test_every_step_has_something_in_it(before: str, text: str, delimiters: list[str]) -> None:
    starts = step_starts(text, delimiters, before)
    assert starts[0] == 0 and starts == sorted(set(starts))
    pieces = [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
    assert "".join(pieces) == text
    if len(pieces) > 1:
        assert all(piece.strip() for piece in pieces)
    if "\n\n" in delimiters:
        assert not any("\n\n" in piece.strip() for piece in pieces)
        assert not any(piece.startswith("\n") for piece in pieces[1:] if "```" not in delimiters)


# --- token_ends: places in text that are places between tokens


def test_ends_of_bytes_by_hand() -> None:
    text, ends = token_ends(BYTES, "aé€😀".encode())
    assert text == "aé€😀"
    assert ends.tolist() == [0, 1, -1, 2, -1, -1, 3, -1, -1, -1, 4]
    assert [place_of(ends, boundary) for boundary in range(5)] == [0, 1, 3, 6, 10]


def test_an_unfinished_character_at_the_end_is_text() -> None:
    text, ends = token_ends(BYTES, [97, 0xE2, 0x82])
    assert text == "a\ufffd"
    assert ends.tolist() == [0, 1, 2, 2]


def test_a_chunk_may_begin_inside_a_character() -> None:
    text, ends = token_ends(BYTES, [0xAC, 97], before=[98, 0xE2, 0x82])
    assert text == "€a", "the character belongs to the chunk that completes it"
    assert ends.tolist() == [0, 1, 2]
    text, ends = token_ends(BYTES, [97], before=[98, 0xE2, 0x82])
    assert text == "a", "nothing completes it: its U+FFFD was written before"


def test_a_character_over_the_edge_is_shown_once(made_tokenizers: dict[str, Tokenizer]) -> None:
    for kind in BYTE_KINDS:
        tokenizer = made_tokenizers[kind]
        ids = tokenizer.encode("a日本😀語👩‍👩‍👧")
        for edge in range(len(ids) + 1):
            settled = settled_text(tokenizer, ids[:edge], tokenizer.decode(ids))
            text, _ = token_ends(tokenizer, ids[edge:], ids[:edge])
            assert settled + text == "a日本😀語👩‍👩‍👧"
    assert settled_text(BYTES, [97, 0xE2, 0x82], "a€") == "a"
    assert settled_text(BYTES, [97, 0xE2, 0x82], "a\ufffdb") == "a\ufffd", "nothing completes it"


def test_a_replacement_character_that_was_really_written() -> None:
    text, ends = token_ends(BYTES, "a\ufffd\n\nb".encode())
    assert text == "a\ufffd\n\nb"
    assert ends[4] == 2 and ends[5] == 3 and ends[7] == 5


def test_empty_inputs() -> None:
    for before in ([], [97], [0xE2]):
        text, ends = token_ends(BYTES, [], before)
        assert text == "" and ends.tolist() == [0]
    assert token_ends(BYTES, np.array([97], dtype=np.int32), np.array([97]))[0] == "a"


@pytest.mark.parametrize("kind", KINDS)
@relaxed
@given(data=st.data())
def test_ends_are_what_they_are_defined_to_be(
    made_tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = made_tokenizers[kind]
    ids = data.draw(token_lists(tokenizer, kind, max_size=60))
    # Of a long run of broken bytes in front only the last few tokens are looked at, hence 8.
    before = data.draw(token_lists(tokenizer, kind))[:8]
    text, ends = token_ends(tokenizer, ids, before)
    whole, base = texts_before(tokenizer, before, ids)
    assert text == whole[base:]
    assert ends.dtype == np.int64
    assert ends.tolist() == clean_ends(tokenizer, before, ids)


@pytest.mark.parametrize("kind", KINDS)
@relaxed
@given(data=st.data())
def test_ends_in_long_texts(
    made_tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    """Longer than the window that is decoded at once, behind more than what is looked back at."""
    tokenizer = made_tokenizers[kind]
    ids = tokenizer.encode(data.draw(texts(kind, max_size=60)).replace("\ufffd", "?"))
    edge = data.draw(st.integers(0, len(ids)))
    before, ids = ids[:edge], ids[edge:]
    text, ends = token_ends(tokenizer, ids, before)
    whole, base = texts_before(tokenizer, before, ids)
    assert text == whole[base:]
    assert ends.tolist() == clean_ends(tokenizer, before, ids)


def test_ends_in_a_long_run_of_broken_bytes(made_tokenizers: dict[str, Tokenizer]) -> None:
    """A decoder with byte fallback writes the whole run as U+FFFD for one wrong byte at its end."""
    good, half = "é".encode() * 14, b"\xc3"
    for kind, first in (("byte", 0), ("sentencepiece", 1)):  # the id of byte 0
        tokenizer = made_tokenizers[kind]
        for run in (good + half, half + good, good + half + good, half * 30 + good, b"a" + good):
            ids = [first + byte for byte in run]
            for edge in (0, 3, 8):
                text, ends = token_ends(tokenizer, ids[edge:], ids[:edge])
                whole, base = texts_before(tokenizer, ids[:edge], ids[edge:])
                assert text == whole[base:]
                assert ends.tolist() == clean_ends(tokenizer, ids[:edge], ids[edge:])


# --- split_steps: the cut


@pytest.mark.parametrize("kind", KINDS)
@relaxed
@given(data=st.data())
def test_a_cut_is_the_longest_run_of_whole_tokens(
    made_tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = made_tokenizers[kind]
    before = data.draw(token_lists(tokenizer, kind))[:8]
    body = data.draw(token_lists(tokenizer, kind))
    ids = [*body, *data.draw(st.sampled_from([[], sorted(tokenizer.eos_ids)[:1]]))]
    before_text = tokenizer.decode(before)
    steps = split_steps(tokenizer, ids, DELIMITERS, before_ids=before, before_text=before_text)

    whole, base = texts_before(tokenizer, before, body)
    assert "".join(step.text for step in steps) == whole[base:]
    ends = clean_ends(tokenizer, before, body)
    start = 0
    for step in steps:
        assert step.cut == max(i for i, end in enumerate(ends) if 0 <= end <= start)
        assert 0 <= step.cut <= len(body)
        if ends[step.cut] or whole.startswith(before_text):
            kept = tokenizer.decode([*before, *body[: step.cut]])
            assert kept + step.carry == whole[: base + start]
        start += len(step.text)
    cuts = [step.cut for step in steps]
    assert cuts == sorted(cuts)


def test_a_delimiter_inside_a_token(made_tokenizers: dict[str, Tokenizer]) -> None:
    bpe = made_tokenizers["bpe"]
    ids = bpe.encode("a + b.\n\nSo")
    assert [bpe.decode([i]) for i in ids] == ["a", " +", " b", ".\n\n", "So"]
    assert split_steps(bpe, ids, ("\n\n",)) == (Step("a + b.\n\n", 0), Step("So", 4))
    # The token ".\n\n" lies astride a boundary behind the full stop: it is dropped whole.
    steps = split_steps(bpe, ids, (".",))
    assert steps == (Step("a + b.", 0), Step("\n\nSo", 3, "."))
    kept = ids[:3]
    new = correction_ids(bpe, " So", carry=".", limit=64, before=kept)
    assert bpe.decode([*kept, *new]) == "a + b. So"
    assert correction_ids(bpe, "", carry=".", limit=64, before=kept) == []


def test_a_token_that_holds_half_a_character_and_a_delimiter(
    made_tokenizers: dict[str, Tokenizer],
) -> None:
    bpe = made_tokenizers["bpe"]
    ids = bpe.encode("語\n\n x")
    pieces = [bpe.decode([i]) for i in ids]
    assert "\ufffd" in pieces[0] or len(ids) >= 2
    steps = split_steps(bpe, ids, DELIMITERS)
    assert [step.text for step in steps] == ["語\n\n", " x"]
    assert bpe.decode(ids[: steps[1].cut]) + steps[1].carry == "語\n\n"


def test_only_an_eos(made_tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in made_tokenizers.values():
        eos = sorted(tokenizer.eos_ids)
        assert split_steps(tokenizer, eos, DELIMITERS) == (Step("", 0),)
        ids = [*tokenizer.encode("a\n\nb"), *eos]
        steps = split_steps(tokenizer, ids, DELIMITERS)
        assert "".join(step.text for step in steps) == "a\n\nb", "an EOS has no text"


# --- corrections


def test_corrections_by_hand() -> None:
    def ids(correction: str | list[int], carry: str = "", limit: int = 64) -> bytes:
        return bytes(correction_ids(BYTES, correction, carry=carry, limit=limit))

    assert ids("So 4.") == b"So 4."
    assert ids("So", carry=".\n") == b".\nSo"
    assert ids([83, 111], carry=".\n") == b".\nSo"
    assert ids("", carry=".\n") == b"", "a bare cut restores nothing"
    assert ids([], carry=".\n") == b""
    assert ids("abc", limit=2) == b"ab"
    assert ids("abc", limit=3) == b"abc"
    assert ids("abc", carry="xy", limit=3) == b"xya", "the carry counts"
    assert ids("aé€", limit=2) == b"a" and ids("aé€", limit=3) == "aé".encode()
    assert ids("aé€", limit=5) == "aé".encode() and ids("aé€", limit=6) == "aé€".encode()
    assert ids("😀", limit=3) == b"" and ids("a", limit=0) == b""
    assert ids(list("aé€".encode()), limit=4) == "aé".encode()


def behind(tokenizer: Tokenizer, kind: str, data: st.DataObject) -> list[int]:
    """Kept tokens that end with a whole character, as the kept part of a chunk does."""
    return tokenizer.encode(data.draw(texts(kind)).replace("\ufffd", "?"))


@pytest.mark.parametrize("kind", KINDS)
@relaxed
@given(data=st.data())
def test_kept_and_carry_and_correction_read_as_they_were_written(
    made_tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = made_tokenizers[kind]
    before = behind(tokenizer, kind, data)
    body = tokenizer.encode(data.draw(texts(kind)).replace("\ufffd", "?"))
    correction = data.draw(texts(kind).filter(bool))
    # Where steps end is not the question here, so any delimiter may be one.
    delimiters = data.draw(st.sampled_from([DELIMITERS, (".",), ("a", "\n"), ("日",), ("`", "4")]))
    steps = split_steps(tokenizer, body, delimiters, before_ids=before)
    step = data.draw(st.sampled_from(steps))
    kept = [*before, *body[: step.cut]]
    written = tokenizer.decode(kept)
    # Metaspace cannot write a space at the very beginning of a response.
    assume(kind != "metaspace" or written or not (step.carry + correction).startswith(" "))
    ids = correction_ids(tokenizer, correction, carry=step.carry, limit=10**6, before=kept)
    assert tokenizer.decode([*kept, *ids]) == written + step.carry + correction


@pytest.mark.parametrize("kind", KINDS)
@relaxed
@given(data=st.data())
def test_a_long_correction_is_cut_after_the_last_whole_character_that_fits(
    made_tokenizers: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    tokenizer = made_tokenizers[kind]
    before = behind(tokenizer, kind, data)
    carry = data.draw(st.sampled_from(["", ".", "日", ".\n"]))
    correction = data.draw(texts(kind).filter(bool).map(lambda text: text.replace("\ufffd", "?")))
    limit = data.draw(st.integers(0, 12))
    full = correction_ids(tokenizer, correction, carry=carry, limit=10**6, before=before)
    ids = correction_ids(tokenizer, correction, carry=carry, limit=limit, before=before)
    assert len(ids) <= limit and ids == full[: len(ids)]
    assert "\ufffd" not in tokenizer.decode([*before, *ids])
    longer = [tokenizer.decode([*before, *full[:n]]) for n in range(len(ids) + 1, limit + 1)]
    whole = tokenizer.decode([*before, *full])
    if len(full) > limit:
        assert not any(whole.startswith(text) for text in longer)


def test_a_space_is_neither_added_nor_lost(made_tokenizers: dict[str, Tokenizer]) -> None:
    for kind in ("sentencepiece", "metaspace"):
        tokenizer = made_tokenizers[kind]
        kept = tokenizer.encode("So a=")
        assert tokenizer.decode([*kept, *tokenizer.encode("b")]) == "So a= b", "the trap"
        for text in ("b", " b", "\n\nb", "=b"):
            ids = encode_behind(tokenizer, kept, text)
            assert tokenizer.decode([*kept, *ids]) == "So a=" + text
        assert tokenizer.decode(encode_behind(tokenizer, [], "b")) == "b"
        assert encode_behind(tokenizer, kept, "") == []


def test_what_a_tokenizer_cannot_write_is_left_to_it(made_tokenizers: dict[str, Tokenizer]) -> None:
    char = made_tokenizers["char"]
    assert char.decode(encode_behind(char, [], "a😀b")) == "a<unk>b"


def test_a_special_token_in_a_correction_stays_visible(
    made_tokenizers: dict[str, Tokenizer],
) -> None:
    """Episode refuses it; here it must not vanish or be cut into ordinary pieces."""
    for kind in ("bpe", "sentencepiece", "metaspace", "char"):
        tokenizer = made_tokenizers[kind]
        ids = correction_ids(tokenizer, "a<|eos|>", carry="", limit=64)
        assert set(ids) & tokenizer.eos_ids


def test_the_cost_of_splitting_grows_with_the_chunk_alone() -> None:
    """However long the prefix, a few tokens are decoded for each token of the chunk."""

    class Counting(ByteTokenizer):
        decoded = 0

        def decode(self, ids: object) -> str:  # type: ignore[override]
            self.decoded += len(list(ids))  # type: ignore[call-overload]
            return super().decode(ids)  # type: ignore[arg-type]

    def cost(n: int, prefix: int) -> int:
        tokenizer = Counting()
        split_steps(tokenizer, b"Step one.\n\n" * (n // 11), DELIMITERS, before_ids=b"x" * prefix)
        return tokenizer.decoded

    assert cost(512, 16000) < 6 * 512
    assert cost(512, 16000) < cost(512, 100) + 100
    assert cost(5120, 0) < 11 * cost(512, 0)
