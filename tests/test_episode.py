"""The rules, one test each with values by hand, then all of them at once on random scripts.

With the built-in ByteTokenizer one ASCII character is one token, so that counts can be read off.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mintrl_env.episode import (
    Ended,
    EnvironmentOutput,
    Episode,
    EpisodeConfig,
    Finished,
    NeedChunk,
    NeedEnvironment,
    NeedReview,
    NeedScore,
)
from mintrl_env.errors import JudgeCause, UsageError
from mintrl_env.keys import RowKey
from mintrl_env.prompts import ByteTokenizer
from mintrl_env.protocols import Tokenizer
from mintrl_env.splice import encode_behind
from mintrl_env.types import (
    Chunk,
    FailedReview,
    Finish,
    Kind,
    NoReview,
    Outcome,
    Review,
    ReviewRequest,
    Score,
    StopReason,
    Task,
    Usage,
    Verdict,
    frozen_ids,
)

BYTES = ByteTokenizer()
EOS = BYTES.EOS
TASK = Task("t", "p")
P, I, E = 0, 1, 2  # noqa: E741


def episode(kind: str = "intervened", tokenizer: Tokenizer = BYTES, **config: Any) -> Episode:
    return Episode(
        TASK, [112], kind=Kind(kind), tokenizer=tokenizer, config=EpisodeConfig(**config)
    )


def chunk(text: str, *, eos: bool = False, version: int = 0, finish: Finish | None = None) -> Chunk:
    """The text's bytes; token i has log-prob -(i + 1)."""
    ids = [*text.encode(), *([EOS] if eos else [])]
    reason = finish or (Finish.EOS if eos else Finish.LENGTH)
    return Chunk(frozen_ids(ids), -1.0 - np.arange(len(ids)), reason, version)  # type: ignore[arg-type]


def send(e: Episode, *events: Any) -> Episode:
    for event in events:
        e.send(event)
    return e


def request(e: Episode) -> ReviewRequest:
    assert isinstance(e.need, NeedReview), e.need
    return e.need.request


def observables(e: Episode) -> dict[str, Any]:
    """Everything that can be seen of an episode, in a form that `==` compares."""
    arrays = (e.ids, e.provenance, e.logprobs, e.policy_versions)
    return {
        "arrays": [(a.dtype.str, a.tobytes()) for a in arrays],
        "length": len(e),
        "text": e.text,
        "need": e.need,
        "draws": e.draws,
        "reviews": tuple(e.reviews),
        "reviews_left": e.reviews_left,
        "log": [(s.ids.tolist(), s.provenance, s.policy_version) for s in e.log],
        "task": e.task,
        "prompt": e.prompt_ids.tolist(),
    }


def refuses(e: Episode, event: Any, match: str | None = None) -> None:
    before = observables(e)
    with pytest.raises(UsageError, match=match):
        e.send(event)
    assert observables(e) == before


# --- the states, and every event where it is illegal


def in_state(name: str) -> Episode:
    e = episode(turns=True)
    if name == "CHUNK":
        return e
    send(e, chunk("ab\n\ncd", eos=True))
    if name == "REVIEW":
        return e
    send(e, Verdict.keep())
    if name == "ENVIRONMENT":
        return e
    send(e, EnvironmentOutput([120], done=True))
    if name == "SCORE":
        return e
    return send(e, Score(1.0, "correct"))


EVENTS: dict[str, tuple[set[str], list[Any]]] = {
    "chunk": ({"CHUNK"}, [chunk("x")]),
    "review": (
        {"REVIEW"},
        [
            Verdict.keep(),
            Verdict.revise(0, "y"),
            Verdict.keep().kept_by("g", ""),
            NoReview(),
            FailedReview("timeout"),
        ],
    ),
    "environment": ({"ENVIRONMENT"}, [EnvironmentOutput([120]), EnvironmentOutput(done=True)]),
    "score": ({"SCORE"}, [Score(0.0, "wrong"), Score.undecided("unavailable")]),
    "ended": (
        {"CHUNK", "REVIEW", "ENVIRONMENT", "SCORE"},
        [Ended(StopReason.DEADLINE), Ended(StopReason.ERROR, "boom")],
    ),
    "no event": (set(), [None, "x", 3, [1, 2], NeedScore("", StopReason.EOS)]),
}


@pytest.mark.parametrize("state", ["CHUNK", "REVIEW", "ENVIRONMENT", "SCORE", "FINISHED"])
@pytest.mark.parametrize("name", EVENTS)
def test_an_illegal_event_raises_and_changes_nothing(state: str, name: str) -> None:
    legal, events = EVENTS[name]
    for event in events:
        e = in_state(state)
        if state in legal:
            before = observables(e)
            e.send(event)
            assert observables(e) != before
        else:
            refuses(e, event, f"not legal in state {state}")


def test_what_is_needed_in_each_state() -> None:
    assert in_state("CHUNK").need == NeedChunk(512, (), 0)
    assert isinstance(in_state("REVIEW").need, NeedReview)
    assert in_state("ENVIRONMENT").need == NeedEnvironment("ab\n\ncd", end_of_turn=True)
    assert in_state("SCORE").need == NeedScore("ab\n\ncd<|eos|>x", StopReason.ENVIRONMENT)
    assert in_state("FINISHED").need == Finished(
        StopReason.ENVIRONMENT, Score(1.0, "correct"), valid=True
    )


@pytest.mark.parametrize(
    ("ids", "why"),
    [
        ([], "1 to 4 tokens"),
        ([97] * 5, "1 to 4 tokens"),
        ([-1], "-1 is outside"),
        ([257], "257 is outside"),
        ([97, 257], "257 is outside"),
        ([EOS, 97], "EOS stands inside"),
        ([EOS, EOS], "EOS stands inside"),
    ],
)
def test_chunks_that_are_refused(ids: list[int], why: str) -> None:
    e = episode(chunk_tokens=4)
    bad = Chunk(frozen_ids(ids))
    refuses(e, bad, why)
    with pytest.raises(UsageError, match=why):
        e.preview(bad)


# --- token in, token out


def test_ids_provenance_logprobs_and_versions_by_hand() -> None:
    e = episode()
    assert len(e) == 0 and e.text == ""
    for array, dtype in (
        (e.ids, np.int32),
        (e.provenance, np.int8),
        (e.logprobs, np.float32),
        (e.policy_versions, np.int32),
    ):
        assert array.dtype == dtype and array.shape == (0,)
    send(e, chunk("ab\n\ncd\n\nef", version=3), Verdict.revise(1, "XY"), chunk("g", version=4))
    send(e, Verdict.keep())
    assert bytes(e.ids.tolist()) == b"ab\n\nXYg"
    assert e.provenance.tolist() == [P, P, P, P, I, I, P]
    assert e.policy_versions.tolist() == [3, 3, 3, 3, 3, 3, 4]
    np.testing.assert_array_equal(e.logprobs, np.float32([-1, -2, -3, -4, np.nan, np.nan, -1]))
    for array in (e.ids, e.provenance, e.logprobs, e.policy_versions):
        assert len(array) == len(e) == 7
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0
    assert [s.provenance for s in e.log] == [P, I, P]


def test_views_are_made_once_between_events() -> None:
    e = send(episode(), chunk("ab"), Verdict.keep())
    assert e.ids is e.ids and e.provenance is e.provenance and e.logprobs is e.logprobs
    old = e.ids
    send(e, chunk("c"), NoReview())
    assert bytes(old.tolist()) == b"ab" and bytes(e.ids.tolist()) == b"abc"


def test_an_episode_is_freed_when_it_is_let_go() -> None:
    """Thousands are open at once, with their arrays: none may wait for the cycle collector."""
    gc.disable()
    try:
        e = send(episode(), chunk("ab\n\ncd"), Verdict.revise(1, "x"))
        assert e.need and e.preview(chunk("y"))
        gone = weakref.ref(e)
        del e
        assert gone() is None
    finally:
        gc.enable()


# --- reviews


def test_keep() -> None:
    e = send(episode(), chunk("ab"), Verdict.keep("fine", Usage(5, 6)))
    assert e.text == "ab"
    assert e.reviews == [Review(0, 0, 2, Outcome.KEEP, reason="fine", usage=Usage(5, 6))]
    send(e, chunk("cde"), Verdict.keep())
    assert e.reviews[1] == Review(1, 2, 3, Outcome.KEEP)


def test_revise_keeps_what_is_before_the_step_and_records_what_it_drops() -> None:
    e = send(episode(), chunk("zz"), Verdict.keep(), chunk("ab\n\ncd\n\nef", eos=True))
    assert [s.text for s in request(e).steps] == ["ab\n\n", "cd\n\n", "ef"]
    send(e, Verdict.revise(1, "XY", "wrong", Usage(7, 8)))
    assert e.text == "zzab\n\nXY"
    assert e.reviews[1] == Review(
        index=1,
        position=2,
        chunk_tokens=11,
        outcome=Outcome.REVISE,
        step=1,
        cut=6,
        correction_tokens=2,
        dropped_ids=frozen_ids([*b"cd\n\nef", EOS]),
        reason="wrong",
        usage=Usage(7, 8),
    )
    assert isinstance(e.need, NeedChunk), "the EOS went with the rest: only the policy ends"
    assert e.draws == 13, "dropped tokens count"


def test_a_bare_cut() -> None:
    for empty in ("", ()):
        e = send(episode(), chunk("ab\n\ncd", eos=True), Verdict.revise(1, empty))
        assert e.text == "ab\n\n" and e.provenance.tolist() == [P] * 4
        assert e.reviews[0].correction_tokens == 0 and e.reviews[0].cut == 4
        send(episode(), chunk("ab"), Verdict.revise(0, empty))
    e = send(episode(), chunk("a", eos=True), Verdict.revise(0))
    assert len(e) == 0 and e.log == () and isinstance(e.need, NeedChunk)
    assert e.reviews[0].dropped_ids.tolist() == [97, EOS]


def test_a_chunk_with_only_an_eos() -> None:
    e = send(episode(), chunk("ab"), Verdict.keep(), chunk("", eos=True))
    assert [(s.text, s.cut) for s in request(e).steps] == [("", 0)]
    revised = send(e, Verdict.revise(0, "c"))
    assert revised.text == "abc" and revised.reviews[1].dropped_ids.tolist() == [EOS]
    ended = send(episode(), chunk("", eos=True), Verdict.keep())
    assert ended.need == NeedScore("", StopReason.EOS) and ended.ids.tolist() == [EOS]


def test_the_same_step_may_be_revised_again_with_a_new_attempt() -> None:
    e = episode(chunk_tokens=4)
    first = chunk("abcd")
    send(e, first, Verdict.revise(0))
    assert e.need == NeedChunk(4, (), 4)
    assert len(e) == 0
    # The very same object again: its request is another one.
    assert e.preview(first) is not None
    send(e, first)
    assert request(e).review == 1 and request(e).reviews_left == 2
    send(e, Verdict.keep(), first)
    assert request(e).accepted_text == "abcd" and request(e).accepted_ids.tolist() == [*b"abcd"]
    assert e.draws == 12


def test_at_most_r_reviews_and_what_uses_them_up() -> None:
    e = episode(max_reviews=5, chunk_tokens=3, max_response=100)
    events: list[tuple[Any, Outcome]] = [
        (Verdict.keep(), Outcome.KEEP),
        (Verdict.revise(0, "x"), Outcome.REVISE),
        (FailedReview("timeout", "slow"), Outcome.FAILED),
        (FailedReview("unparsed"), Outcome.UNPARSED),
        (Verdict.revise(0, "x").kept_by("leak", "why"), Outcome.GUARDED),
    ]
    for used, (event, outcome) in enumerate(events):
        assert e.reviews_left == 5 - used
        send(e, chunk("abc"), NoReview())
        assert e.reviews_left == 5 - used, "NoReview is free"
        send(e, chunk("abc"))
        assert request(e).review == used and request(e).reviews_left == 4 - used
        send(e, event)
        assert e.reviews[-1].outcome is outcome and e.reviews[-1].index == used
    assert e.reviews_left == 0
    assert e.reviews[2].cause == "timeout" and e.reviews[2].reason == "slow"
    assert e.reviews[4].guard == "leak" and e.reviews[4].step == -1
    assert len(e) == 3 * 9 + 1 and e.draws == 30
    assert e.need == NeedChunk(100 - 28, (), 30), "after the last: all that is left"
    assert e.preview(chunk("abc")) is None
    send(e, chunk("a" * 71, eos=True))
    assert isinstance(e.need, NeedScore) and len(e.reviews) == 5


@pytest.mark.parametrize("cause", list(JudgeCause))
def test_failed_and_unparsed_reviews_are_counted_apart(cause: JudgeCause) -> None:
    e = send(episode(), chunk("ab"), FailedReview(cause, usage=Usage(1, 1)))
    unparsed = cause in (JudgeCause.UNPARSED, JudgeCause.BAD_STEP)
    assert e.reviews[0].outcome is (Outcome.UNPARSED if unparsed else Outcome.FAILED)
    assert e.reviews[0].cause == cause and e.reviews[0].usage == Usage(1, 1)
    assert e.text == "ab" and e.reviews_left == 3


def test_a_control_is_never_reviewed() -> None:
    e = episode("control", max_response=1000, chunk_tokens=10)
    assert e.need == NeedChunk(1000, (), 0) and e.reviews_left == 0
    assert e.preview(chunk("ab")) is None
    send(e, chunk("ab"))
    assert e.need == NeedChunk(998, (), 2) and e.text == "ab"
    send(e, chunk("c", eos=True), Score(1.0, "correct"))
    assert e.need == Finished(StopReason.EOS, Score(1.0, "correct"), valid=True)


def test_no_reviews_at_all() -> None:
    e = episode(max_reviews=0, max_response=1000)
    assert e.need == NeedChunk(1000, (), 0)
    assert isinstance(send(e, chunk("ab")).need, NeedChunk)


def test_the_last_chunk_is_reviewed_too() -> None:
    for last, reason in ((chunk("cd", eos=True), StopReason.EOS), (chunk("cdef"), "length")):
        e = send(episode(max_response=6), chunk("ab"), Verdict.keep(), last)
        request(e)
        send(e, Verdict.keep())
        assert isinstance(e.need, NeedScore) and e.need.stop_reason == reason


def test_the_accepted_prefix_is_never_cut() -> None:
    e = send(episode(), chunk("ab\n\ncd"), Verdict.keep(), chunk("ef"))
    refuses(e, Verdict.revise(1, "x"), r"step 1 is past the end: the chunk has 1 step\(s\)")
    send(e, Verdict.revise(0, "x"))
    assert e.text == "ab\n\ncdx"


def test_preview_is_the_request_that_follows() -> None:
    e = send(episode(), chunk("zz"), Verdict.keep())
    pending = chunk("ab\n\ncd", eos=True)
    before = observables(e)
    preview = e.preview(pending)
    assert observables(e) == before
    send(e, pending)
    assert request(e) == preview
    with pytest.raises(UsageError, match="previewed in state REVIEW"):
        e.preview(pending)
    assert preview is not None
    assert preview.accepted_text == "zz" and preview.chunk_text == "ab\n\ncd"
    assert preview.chunk_ids.tolist() == [*b"ab\n\ncd", EOS]
    assert preview.max_correction == 64 and preview.finish is Finish.EOS
    assert preview.prompt_ids.tolist() == [112] and preview.task is TASK


def test_the_request_carries_the_rows_key() -> None:
    key = RowKey(0, 0, "t", 0)
    e = Episode(TASK, [1], kind=Kind.INTERVENED, tokenizer=BYTES, config=EpisodeConfig(), key=key)
    assert request(send(e, chunk("ab"))).key is key


# --- corrections


def test_a_correction_is_cut_to_l() -> None:
    e = send(episode(max_correction=4), chunk("ab"), Verdict.revise(0, "aé€"))
    assert e.text == "aé", "no half of a character"
    assert e.reviews[0].correction_tokens == 3
    e = send(episode(max_correction=0), chunk("ab\n\ncd"), Verdict.revise(1, "x"))
    assert e.text == "ab\n\n" and e.reviews[0].correction_tokens == 0


def test_t_inside_a_correction() -> None:
    e = send(episode(max_response=6), chunk("ab\n\nc"))
    assert request(e).max_correction == 6
    send(e, Verdict.revise(1, "WXYZ"))
    assert e.need == NeedScore("ab\n\nWX", StopReason.LENGTH)
    assert e.provenance.tolist() == [P, P, P, P, I, I] and e.reviews[0].correction_tokens == 2
    # A character that does not fit leaves a token for the policy.
    e = send(episode(max_response=6), chunk("ab\n\nc"), Verdict.revise(1, "W€"))
    assert e.text == "ab\n\nW" and e.need == NeedChunk(1, (), 5)
    # A chunk that T stopped is reviewed, and a cut makes room again.
    e = send(episode(max_response=6), chunk("ab\n\ncd"), Verdict.revise(1))
    assert e.need == NeedChunk(2, (), 6)


@pytest.mark.parametrize("kind", ["bpe", "sentencepiece", "metaspace"])
def test_a_straddled_cut_restores_the_text_that_the_token_carried(
    made_tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    tokenizer = made_tokenizers[kind]
    ids = tokenizer.encode("So 42.\n\nSo we add.")
    e = episode(tokenizer=tokenizer, step_delimiters=(".",))
    send(e, Chunk(frozen_ids(ids)))
    step = request(e).steps[1]
    assert step.text == "\n\nSo we add." and step.carry.endswith(".")
    send(e, Verdict.revise(1, "\nSo"))
    assert e.text == "So 42.\nSo"
    assert e.ids[: step.cut].tolist() == ids[: step.cut]
    assert e.reviews[0].dropped_ids.tolist() == ids[step.cut :]
    bare = send(episode(tokenizer=tokenizer, step_delimiters=(".",)), Chunk(frozen_ids(ids)))
    send(bare, Verdict.revise(1))
    assert bare.ids.tolist() == ids[: step.cut], "a bare cut restores nothing"
    by_ids = send(episode(tokenizer=tokenizer, step_delimiters=(".",)), Chunk(frozen_ids(ids)))
    newline = encode_behind(tokenizer, ids, "\nSo")
    send(by_ids, Verdict.revise(1, newline))
    assert by_ids.text == "So 42.\nSo"


def test_a_correction_holds_no_special_token(made_tokenizers: dict[str, Tokenizer]) -> None:
    e = send(episode(), chunk("ab\n\ncd"))
    bad = Verdict.revise(1, [120, EOS])
    refuses(e, bad, "special token id 256")
    assert "special token id 256" in e.illegal_because(bad)
    bpe = made_tokenizers["bpe"]
    for text in ("x<|eos|>", "<|im_start|>", "a<think>b", "<|pad|>"):
        e = send(episode(tokenizer=bpe), Chunk(frozen_ids(bpe.encode("a + b"))))
        refuses(e, Verdict.revise(0, text), "special token")


@pytest.mark.parametrize("ids", [[-1], [257], [120, 10**12], [-5] * 100])
def test_a_correction_stays_in_the_vocabulary(
    made_tokenizers: dict[str, Tokenizer], ids: list[int]
) -> None:
    refuses(send(episode(), chunk("ab")), Verdict.revise(0, ids), "vocabulary")
    bpe = made_tokenizers["bpe"]
    e = send(episode(tokenizer=bpe), Chunk(frozen_ids(bpe.encode("a + b"))))
    refuses(e, Verdict.revise(0, [i if i < 0 else i + 1000 for i in ids]), "vocabulary")


def test_illegal_because() -> None:
    e = episode()
    pending = chunk("ab\n\ncd")
    preview = e.preview(pending)
    with pytest.raises(UsageError, match="no review is pending"):
        e.illegal_because(Verdict.keep())
    for ask in (
        lambda verdict: e.illegal_because(verdict, preview),
        lambda verdict: send_and_ask(verdict),
    ):
        assert ask(Verdict.keep()) == "" and ask(Verdict.revise(1, "x")) == ""
        assert "past the end" in ask(Verdict.revise(2, "x"))
        assert "special" in ask(Verdict.revise(1, [EOS]))
        assert "vocabulary" in ask(Verdict.revise(1, [300]))


def send_and_ask(verdict: Verdict) -> str:
    e = send(episode(), chunk("ab\n\ncd"))
    before = observables(e)
    why = e.illegal_because(verdict)
    assert observables(e) == before
    return why


# --- characters over the edges of chunks


def test_a_chunk_that_begins_inside_a_character() -> None:
    euro = "€".encode()
    e = send(episode(), Chunk(frozen_ids([97, *euro[:2]])), Verdict.keep())
    assert e.text == "a\ufffd"
    send(e, Chunk(frozen_ids([euro[2], *b"\n\nb"])))
    assert request(e).accepted_text == "a" and request(e).chunk_text == "€\n\nb"
    assert request(e).accepted_ids.tolist() == [97, *euro[:2]]
    assert [s.cut for s in request(e).steps] == [0, 3]
    send(e, Verdict.revise(1, "c"))
    assert e.text == "a€\n\nc"


# --- limits


def test_t_is_never_exceeded() -> None:
    e = episode(max_response=5, chunk_tokens=3)
    assert e.need == NeedChunk(3, (), 0)
    send(e, chunk("abc"), Verdict.keep())
    assert e.need == NeedChunk(2, (), 3)
    refuses(e, chunk("def"), "1 to 2 tokens here, not 3")
    send(e, chunk("de"), Verdict.keep())
    assert e.need == NeedScore("abcde", StopReason.LENGTH)
    e = send(episode(max_response=3), chunk("ab", eos=True), Verdict.keep())
    assert e.need == NeedScore("ab", StopReason.EOS), "an EOS in the last place is an EOS"


def test_spacing() -> None:
    e = episode(spacing=5, chunk_tokens=3, max_reviews=2, max_response=100)
    send(e, chunk("abc"), Verdict.revise(0, "x"))
    assert e.need == NeedChunk(5, (), 3), "the gap, which nobody looks at, in one go"
    assert e.preview(chunk("de")) is None
    send(e, chunk("de"))
    assert e.need == NeedChunk(3, (), 5)
    refuses(e, chunk("fghi"), "1 to 3 tokens")
    send(e, chunk("fgh"))
    assert e.need == NeedChunk(3, (), 8)
    send(e, chunk("ijk"))
    assert request(e).accepted_text == "xdefgh"
    send(e, NoReview())
    assert e.need == NeedChunk(3, (), 11), "nobody reviewed: no gap"
    send(e, chunk("lmn"), FailedReview("timeout"))
    assert e.need == NeedChunk(88, (), 14), "no review is left: nothing to space"


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"chunk_tokens": 0}, "chunk_tokens must be an integer >= 1"),
        ({"max_reviews": -1}, "max_reviews"),
        ({"max_correction": -1}, "max_correction"),
        ({"max_response": 0}, "max_response"),
        ({"spacing": -1}, "spacing"),
        ({"chunk_tokens": 1.5}, "chunk_tokens"),
        ({"max_reviews": True}, "max_reviews"),
        ({"step_delimiters": "\n\n"}, "step_delimiters is a list"),
        ({"step_delimiters": ("\n\n", "")}, "step_delimiters holds strings"),
        ({"stop": ("x",)}, "set turns=True"),
        ({"stop": "x", "turns": True}, "stop is a list"),
        ({"stop": ("",), "turns": True}, "stop holds strings"),
    ],
)
def test_configs_that_are_refused(config: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        EpisodeConfig(**config)


def test_the_papers_numbers_are_the_defaults() -> None:
    config = EpisodeConfig()
    assert (config.chunk_tokens, config.max_reviews, config.max_correction) == (512, 4, 64)
    assert config.max_response == 16384 and config.step_delimiters == ("\n\n", "```")
    assert EpisodeConfig(step_delimiters=["\n"]).step_delimiters == ("\n",)  # type: ignore[arg-type]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(UsageError, match="empty prompt"):
        Episode(TASK, [], kind=Kind.CONTROL, tokenizer=BYTES, config=EpisodeConfig())


# --- tools and turns


def test_an_eos_ends_a_turn_not_the_episode() -> None:
    e = send(episode(turns=True), chunk("call()", eos=True))
    request(e)  # reviewed before it runs
    send(e, Verdict.keep())
    assert e.need == NeedEnvironment("call()", end_of_turn=True)
    send(e, EnvironmentOutput(list(b"[4]")))
    assert e.provenance.tolist() == [P] * 7 + [E] * 3
    assert np.isnan(e.logprobs[7:]).all() and e.policy_versions.tolist() == [0] * 10
    assert e.need == NeedChunk(512, (), 7), "the environment takes no draws"
    send(e, chunk("so 4", eos=True, version=1), Verdict.keep())
    assert e.need == NeedEnvironment("so 4", end_of_turn=True), "only since it last spoke"
    send(e, EnvironmentOutput(done=True))
    assert e.need == NeedScore("call()<|eos|>[4]so 4", StopReason.ENVIRONMENT)
    assert e.ids.tolist() == [*b"call()", EOS, *b"[4]so 4", EOS]


def test_the_eos_of_an_earlier_turn_is_shown_to_the_judge() -> None:
    for output, text in (([], "call()<|eos|>"), ([*b"[4]"], "call()<|eos|>[4]")):
        e = send(episode(turns=True), chunk("call()", eos=True), Verdict.keep())
        send(e, EnvironmentOutput(output), chunk("so"))
        assert request(e).accepted_text == text and request(e).chunk_text == "so"


def test_a_revised_tool_call_does_not_run() -> None:
    e = send(episode(turns=True), chunk("x\n\ncall()", eos=True), Verdict.revise(1, "y"))
    assert isinstance(e.need, NeedChunk) and e.text == "x\n\ny"
    send(e, chunk("z", eos=True), Verdict.keep())
    assert e.need == NeedEnvironment("x\n\nyz", end_of_turn=True), "the judge's part included"


def test_a_stop_string_hands_over_inside_a_turn() -> None:
    e = episode(turns=True, stop=("</call>",))
    assert e.need == NeedChunk(512, ("</call>",), 0)
    send(e, chunk("</call>", finish=Finish.STOP), Verdict.keep())
    assert e.need == NeedEnvironment("</call>", end_of_turn=False)
    send(e, EnvironmentOutput(), chunk("a"), Verdict.keep())
    assert isinstance(e.need, NeedChunk)
    # Without stop strings of ours, an engine's own stop is no handing over.
    e = send(episode(), chunk("a", finish=Finish.STOP), Verdict.keep())
    assert isinstance(e.need, NeedChunk)


def test_the_environments_output_is_cut_at_t() -> None:
    e = send(episode(turns=True, max_response=5), chunk("ab", eos=True), Verdict.keep())
    send(e, EnvironmentOutput(list(b"wxyz")))
    assert e.ids.tolist() == [*b"ab", EOS, *b"wx"]
    assert isinstance(e.need, NeedScore) and e.need.stop_reason is StopReason.LENGTH
    for output, reason in (
        (EnvironmentOutput(list(b"wx")), StopReason.LENGTH),
        (EnvironmentOutput(list(b"wxyz"), done=True), StopReason.ENVIRONMENT),
    ):
        e = send(episode(turns=True, max_response=5), chunk("ab", eos=True), Verdict.keep())
        send(e, output)
        assert isinstance(e.need, NeedScore) and e.need.stop_reason is reason
    # An EOS in the last place leaves no room for the next turn, but what was asked for still runs.
    e = send(episode(turns=True, max_response=3), chunk("ab", eos=True), Verdict.keep())
    assert isinstance(e.need, NeedEnvironment)
    send(e, EnvironmentOutput())
    assert isinstance(e.need, NeedScore) and e.need.stop_reason is StopReason.LENGTH


def test_environment_output_that_is_refused() -> None:
    e = send(episode(turns=True), chunk("ab", eos=True), Verdict.keep())
    for ids in ([257], [-1]):
        refuses(e, EnvironmentOutput(ids), "outside the vocabulary")
    for wrong in ([1.5], [2**40], "abc"):
        with pytest.raises(UsageError):
            EnvironmentOutput(wrong)  # type: ignore[arg-type]
    ids = np.array([120])
    output = EnvironmentOutput(ids)
    ids[0] = 121
    assert bytes(send(e, output).ids[-1:].tolist()) == b"x", "special tokens are the template's"


# --- ends


def test_a_score_finishes() -> None:
    for score, valid in (
        (Score(1.0, "correct"), True),
        (Score(0.0, "wrong"), True),
        (Score.undecided("unavailable"), False),
        (Score.undecided("bad_gold"), False),
        (Score.undecided("deferred"), True),
    ):
        e = send(episode(), chunk("a", eos=True), Verdict.keep(), score)
        assert isinstance(e.need, Finished)
        assert e.need.valid is valid and e.need.score is score
        assert e.need.stop_reason is StopReason.EOS
    e = send(episode("control", max_response=2), chunk("ab"), Score(1.0, "correct"))
    assert isinstance(e.need, Finished) and e.need.valid, "cut at T is truncated, and valid"


@pytest.mark.parametrize("state", ["CHUNK", "REVIEW", "ENVIRONMENT", "SCORE"])
@pytest.mark.parametrize("reason", [StopReason.DEADLINE, StopReason.ERROR])
def test_deadlines_and_errors_end_from_any_state(state: str, reason: StopReason) -> None:
    e = in_state(state)
    length = len(e)
    send(e, Ended(reason, "took 3 s"))
    assert isinstance(e.need, Finished)
    assert e.need.stop_reason is reason and e.need.valid is False and e.need.detail == "took 3 s"
    assert not e.need.score.decided
    if state == "REVIEW":
        assert bytes(e.ids.tolist()[:-1]) == b"ab\n\ncd" and e.reviews == []
        assert e.logprobs.tolist() == [-1, -2, -3, -4, -5, -6, -7]
    else:
        assert len(e) == length


def test_ended_is_for_deadlines_and_errors() -> None:
    for reason in (StopReason.EOS, StopReason.LENGTH, StopReason.ENVIRONMENT):
        refuses(in_state("CHUNK"), Ended(reason), "deadlines and errors")
    ended = send(in_state("CHUNK"), Ended("deadline"))  # type: ignore[arg-type]
    assert isinstance(ended.need, Finished) and ended.need.stop_reason is StopReason.DEADLINE
    with pytest.raises(ValueError):
        Ended("boredom")  # type: ignore[arg-type]


# --- all rules at once

# The order of events is hypothesis' to choose and to shorten, what is in them comes from here.
RANDOM = st.integers(0, 2**32 - 1).map(random.Random)


class Rules(RuleBasedStateMachine):
    """Random events, legal and illegal, against a list that is kept by the simplest means.

    The list holds (id, author, log-prob or None, version) for each accepted token.
    """

    tokenizer: Tokenizer = BYTES
    texts = (
        "a",
        "b\n\n",
        ".\n\n",
        "42.\n\n",
        "x.\n\n\n",
        "\n",
        "é",
        "😀",
        "日本",
        "```\n",
        " ",
        "42",
        "So",
        "\ufffd",
    )

    @initialize(
        kind=st.sampled_from(["intervened", "intervened", "intervened", "control"]),
        chunk_tokens=st.sampled_from([30, 12, 5, 1]),
        max_reviews=st.sampled_from([4, 2, 9, 0]),
        max_correction=st.sampled_from([64, 5, 2, 0]),
        max_response=st.sampled_from([100, 300, 20, 7, 1]),
        spacing=st.sampled_from([0, 0, 5]),
        turns=st.booleans(),
        delimiters=st.sampled_from([("\n\n", "```"), (".",), ("4", "\n"), ("日",), ()]),
    )
    def start(self, kind: str, turns: bool, delimiters: tuple[str, ...], **limits: int) -> None:
        stop = ("!",) if turns else ()
        self.config = EpisodeConfig(**limits, turns=turns, stop=stop, step_delimiters=delimiters)
        self.e = Episode(TASK, [5], kind=Kind(kind), tokenizer=self.tokenizer, config=self.config)
        self.rows: list[tuple[int, int, float | None, int]] = []
        self.reviews = self.draws = self.gap = self.version = 0
        self.previewed: tuple[Chunk, ReviewRequest | None] | None = None
        self.seen: Counter[str] = Counter()
        self.rest: list[int] = []
        self.eos = min(self.tokenizer.eos_ids)
        self.ordinary = sorted(set(range(self.tokenizer.vocab_size)) - self.tokenizer.special_ids)

    # What the rules say, once more

    def left(self) -> int:
        return 0 if self.e.kind is Kind.CONTROL else self.config.max_reviews - self.reviews

    def room(self) -> int:
        return self.config.max_response - len(self.rows)

    def needs(self, kind: type) -> bool:
        return hasattr(self, "e") and isinstance(self.e.need, kind)

    def accept(self, pending: Chunk, n: int | None = None) -> None:
        assert pending.logprobs is not None
        for token, logprob in zip(pending.ids[:n], pending.logprobs[:n], strict=True):
            self.rows.append((int(token), P, float(logprob), pending.policy_version))

    def make_ids(self, rng: random.Random, most: int) -> list[int]:
        ids = self.tokenizer.encode("".join(rng.choices(self.texts, k=rng.randint(1, 15))))
        if rng.random() < 0.15:
            ids = rng.choices(self.ordinary, k=rng.randint(1, 12))
        if self.rest and rng.random() < 0.7:  # goes on where k cut the last one, within a character
            ids = self.rest
        self.rest = ids[most:]
        return ids[:most]

    def make_chunk(self, rng: random.Random) -> Chunk:
        assert isinstance(self.e.need, NeedChunk)
        most = self.e.need.max_tokens
        ids, finish = self.make_ids(rng, most), Finish.LENGTH
        ending = rng.random()
        if ending < 0.2:
            ids, finish = [*ids, self.eos][-most:], Finish.EOS
        elif ending < 0.3:
            finish = Finish.STOP
        self.version += rng.randint(0, 1)
        logprobs = -np.arange(self.draws, self.draws + len(ids), dtype=np.float32)
        return Chunk(frozen_ids(ids), logprobs, finish, self.version)

    def after_accepting(self, pending: Chunk) -> None:
        ended = int(pending.ids[-1]) == self.eos
        if ended and not self.config.turns:
            assert isinstance(self.e.need, NeedScore)
            assert self.e.need.stop_reason is StopReason.EOS
        elif ended or (self.config.stop and pending.finish is Finish.STOP):
            assert isinstance(self.e.need, NeedEnvironment)
            assert self.e.need.end_of_turn is ended
        else:
            self.after_going_on()

    def after_going_on(self) -> None:
        if self.room():
            assert isinstance(self.e.need, NeedChunk)
        else:
            assert isinstance(self.e.need, NeedScore)
            assert self.e.need.stop_reason is StopReason.LENGTH

    # Legal events

    @precondition(lambda self: self.needs(NeedChunk))
    @rule(rng=RANDOM)
    def preview(self, rng: random.Random) -> None:
        pending = self.make_chunk(rng)
        before = observables(self.e)
        self.previewed = (pending, self.e.preview(pending))
        assert observables(self.e) == before

    @precondition(lambda self: self.needs(NeedChunk))
    @rule(rng=RANDOM)
    def write(self, rng: random.Random) -> None:
        e = self.e
        pending, preview = self.previewed or (self.make_chunk(rng), None)
        assert isinstance(e.need, NeedChunk)
        gap = self.gap if self.left() else 0
        most = min(gap or self.config.chunk_tokens, self.room()) if self.left() else self.room()
        assert e.need == NeedChunk(most, self.config.stop, self.draws)
        e.send(pending)
        self.draws += len(pending.ids)
        reviewed = self.left() > 0 and not gap
        assert isinstance(e.need, NeedReview) is reviewed
        if self.previewed:
            assert (preview is not None) is reviewed
            assert not reviewed or request(e) == preview
        self.previewed = None
        if reviewed:
            self.pending = pending
            settled = request(e).accepted_text
            self.seen["over the edge"] += settled != self.tokenizer.decode(e.ids)
            body = [i for i in pending.ids.tolist() if i != self.eos]
            whole = self.tokenizer.decode([*e.ids.tolist(), *body])
            assert settled + request(e).chunk_text == whole or "\ufffd" in whole[:-1]
        else:
            self.gap = max(0, self.gap - len(pending.ids))
            self.accept(pending)
            self.after_accepting(pending)

    @precondition(lambda self: self.needs(NeedReview))
    @rule(event=st.sampled_from(["keep", "none", "timeout", "unparsed", "bad_step", "guard"]))
    def keep(self, event: str) -> None:
        outcomes = {
            "keep": (Verdict.keep("ok"), Outcome.KEEP),
            "none": (NoReview(), None),
            "timeout": (FailedReview("timeout"), Outcome.FAILED),
            "unparsed": (FailedReview("unparsed"), Outcome.UNPARSED),
            "bad_step": (FailedReview("bad_step"), Outcome.UNPARSED),
            "guard": (Verdict.revise(0).kept_by("g", "no"), Outcome.GUARDED),
        }
        sent, outcome = outcomes[event]
        position = len(self.rows)
        self.e.send(sent)
        self.accept(self.pending)
        if outcome is not None:
            self.reviews += 1
            self.gap = self.config.spacing
            review = self.e.reviews[-1]
            assert review.outcome is outcome and review.position == position
            assert review.chunk_tokens == len(self.pending.ids)
            assert (review.step, review.cut, len(review.dropped_ids)) == (-1, -1, 0)
        self.after_accepting(self.pending)

    @precondition(lambda self: self.needs(NeedReview))
    @rule(rng=RANDOM)
    def revise(self, rng: random.Random) -> None:
        asked = request(self.e)
        index = max(rng.randrange(len(asked.steps)) for _ in range(2))
        step = asked.steps[index]
        correction: str | list[int] = "".join(rng.choices(self.texts[:-1], k=rng.randint(0, 5)))
        if rng.random() < 0.3:
            correction = self.tokenizer.encode(str(correction))
        position = len(self.rows)
        verdict = Verdict.revise(index, correction)
        assert self.e.illegal_because(verdict) == ""
        self.e.send(verdict)

        self.accept(self.pending, step.cut)
        cut = len(self.rows)
        limit = min(self.config.max_correction, self.config.max_response - cut)
        written = [int(i) for i in self.e.ids[cut:]]
        assert len(written) <= limit
        assert not set(written) & self.tokenizer.special_ids
        if not correction:
            assert not written
        self.rows += [(i, I, None, self.pending.policy_version) for i in written]
        kept = [row[0] for row in self.rows[:cut]]
        if isinstance(correction, str) and correction:
            # Longest runs in front are what tests/test_splice.py is about; here they are clean.
            wanted = self.tokenizer.decode(kept) + step.carry + correction
            assert wanted.startswith(self.e.text) or "\ufffd" in wanted
        self.seen["carry"] += bool(step.carry and written)
        self.seen["bare cut"] += not correction
        self.seen["EOS revised"] += int(self.pending.ids[-1]) == self.eos
        self.seen["later step"] += index > 0
        self.seen["cut to L"] += len(written) == self.config.max_correction > 0
        self.seen["T in a correction"] += not self.room()
        review = self.e.reviews[-1]
        assert review == Review(
            index=self.reviews,
            position=position,
            chunk_tokens=len(self.pending.ids),
            outcome=Outcome.REVISE,
            step=index,
            cut=cut,
            correction_tokens=len(written),
            dropped_ids=frozen_ids(self.pending.ids[step.cut :]),
        )
        self.reviews += 1
        self.gap = self.config.spacing
        self.after_going_on()

    @precondition(lambda self: self.needs(NeedEnvironment))
    @rule(rng=RANDOM, done=st.sampled_from([False, False, False, True]))
    def answer(self, rng: random.Random, done: bool) -> None:
        ids = rng.choices([*self.ordinary, self.eos], k=rng.randint(0, 8))
        room, version = self.room(), self.rows[-1][3]
        self.e.send(EnvironmentOutput(ids, done))
        self.rows += [(i, E, None, version) for i in ids[:room]]
        if done:
            assert isinstance(self.e.need, NeedScore)
            assert self.e.need.stop_reason is StopReason.ENVIRONMENT
        else:
            self.after_going_on()

    @precondition(lambda self: self.needs(NeedScore))
    @rule()
    def score(self) -> None:
        self.e.send(Score(1.0, "correct"))
        assert isinstance(self.e.need, Finished) and self.e.need.valid

    # Illegal ones

    @precondition(lambda self: hasattr(self, "e"))
    @rule(rng=RANDOM)
    def break_a_rule(self, rng: random.Random) -> None:
        one = self.ordinary[0]
        outside = self.tokenizer.vocab_size
        events: list[Any] = []
        if isinstance(self.e.need, NeedChunk):
            most = self.e.need.max_tokens
            bad: list[list[int]] = [[], [one] * (most + 1), [outside], [-1]]
            bad += [[self.eos, one], [one, self.eos, self.eos]]
            events += [Chunk(frozen_ids(ids)) for ids in bad]
        else:
            events.append(Chunk(frozen_ids([one])))
        if isinstance(self.e.need, NeedReview):
            steps = len(request(self.e).steps)
            events += [Verdict.revise(steps, "a"), Verdict.revise(steps + 5)]
            events += [Verdict.revise(0, [outside]), Verdict.revise(0, [one, -1])]
            cut = len(self.rows) + request(self.e).steps[0].cut
            if min(self.config.max_correction, self.config.max_response - cut):
                events.append(Verdict.revise(0, [self.eos]))
        else:
            events += [Verdict.keep(), Verdict.revise(0, "a"), NoReview(), FailedReview("x")]
        if isinstance(self.e.need, NeedEnvironment):
            events += [EnvironmentOutput([outside]), EnvironmentOutput([one, -1])]
        else:
            events.append(EnvironmentOutput([one]))
        if not isinstance(self.e.need, NeedScore):
            events.append(Score(0.0, "wrong"))
        events += [Ended(StopReason.EOS), Ended(StopReason.LENGTH), None]
        if isinstance(self.e.need, Finished):
            events.append(Ended(StopReason.ERROR))
        refuses(self.e, rng.choice(events))

    # What holds after every event

    @invariant()
    def the_list_says_the_same(self) -> None:
        if not hasattr(self, "e"):
            return
        e = self.e
        assert len(e.ids) == len(e.provenance) == len(e.logprobs) == len(e.policy_versions)
        assert len(e) == len(e.ids) == sum(len(s.ids) for s in e.log)
        assert e.ids.tolist() == [row[0] for row in self.rows]
        assert e.provenance.tolist() == [row[1] for row in self.rows]
        expected = np.array([row[2] for row in self.rows], dtype=np.float32)
        np.testing.assert_array_equal(e.logprobs, expected)
        assert e.policy_versions.tolist() == [row[3] for row in self.rows]
        assert [str(a.dtype) for a in (e.ids, e.provenance, e.logprobs)] == [
            "int32",
            "int8",
            "float32",
        ]
        assert len(e) <= self.config.max_response
        assert len(e.reviews) == self.reviews <= self.config.max_reviews
        assert e.reviews_left == self.left()
        assert e.draws == self.draws
        body = e.ids.tolist()
        while body and body[-1] == self.eos:
            body.pop()
        assert e.text == self.tokenizer.decode(body)


@pytest.mark.parametrize("kind", ["byte", "bpe", "sentencepiece"])
def test_the_rules_on_short_scripts(made_tokenizers: dict[str, Tokenizer], kind: str) -> None:
    """Hypothesis looks for the shortest script that breaks something."""
    machine: Callable[[], Rules] = type("Made", (Rules,), {"tokenizer": made_tokenizers[kind]})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("kind", ["byte", "bpe", "sentencepiece"])
def test_the_rules_on_many_whole_scripts(made_tokenizers: dict[str, Tokenizer], kind: str) -> None:
    """From start to end, and everything that is hard is known to have come up."""
    made: Callable[[], Rules] = type("Made", (Rules,), {"tokenizer": made_tokenizers[kind]})
    seen: Counter[str] = Counter()
    for seed in range(200):
        try:
            seen += whole_script(made(), random.Random(seed))
        except Exception as error:
            error.add_note(f"in the script of seed {seed}")
            raise
    assert seen["revise"] >= 0.3 * seen["review"]
    hard = ["bare cut", "EOS revised", "later step", "cut to L", "T in a correction", "answer"]
    hard += ["over the edge"] + (["carry"] if kind != "byte" else [])
    assert not [name for name in hard if seen[name] < 2], seen


def whole_script(rules: Rules, rng: random.Random) -> Counter[str]:
    """Run one episode to its end; what came up in it."""
    rules.start(
        kind=rng.choice(["intervened", "intervened", "intervened", "control"]),
        chunk_tokens=rng.choice([1, 5, 12, 30, 30, 30]),
        max_reviews=rng.choice([0, 2, 4, 4, 9]),
        max_correction=rng.choice([0, 2, 5, 64]),
        max_response=rng.choice([1, 7, 20, 40, 100, 300]),
        spacing=rng.choice([0, 0, 5]),
        turns=rng.random() < 0.5,
        delimiters=rng.choice([("\n\n", "```"), (".",), (".",), ("4", "\n"), ("日",), ()]),
    )
    while not isinstance(need := rules.e.need, Finished):
        if rng.random() < 0.2:
            rules.break_a_rule(rng)
        if isinstance(need, NeedChunk):
            if rng.random() < 0.3:
                rules.preview(rng)
            rules.write(rng)
        elif isinstance(need, NeedReview):
            event = rng.choice(["revise", "revise", "revise", "keep", "none", "timeout", "guard"])
            rules.seen.update(["review", event])
            if event == "revise":
                rules.revise(rng)
            else:
                rules.keep(event)
        elif isinstance(need, NeedEnvironment):
            rules.seen["answer"] += 1
            rules.answer(rng, rng.random() < 0.2)
        else:
            rules.score()
        rules.the_list_says_the_same()
    return rules.seen
