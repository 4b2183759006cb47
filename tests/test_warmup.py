"""Warm-up: the tokenizer and model are plain transformers parts, training learns, the cache is sound."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mintrl_env.errors import PolicyError, UsageError
from mintrl_env.table_chain import ALPHABET, ChainSettings, TableChain

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from mintrl_env.trainers.warmup import (  # noqa: E402
    EOS,
    PAD,
    RECORD,
    UNK,
    ModelSettings,
    WarmupSettings,
    build_model,
    build_tokenizer,
    encode_batch,
    ensure_models,
    finished,
    learning_rate,
    model_config,
    warm_up,
)

TINY = WarmupSettings(
    steps=20,
    batch=4,
    rise=2,
    model=ModelSettings(layers=1, hidden=16, heads=1, head_dim=16, intermediate=16),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warm_up("student", TINY, tmp_path_factory.mktemp("warm") / "student")


@given(st.text(alphabet=ALPHABET, max_size=60))
def test_tokenizer_round_trip_one_token_a_character(text: str) -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(tokenizer.all_special_ids)


def test_tokenizer_has_its_own_special_tokens() -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == [PAD, EOS, UNK]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert len(tokenizer) == 3 + len(ALPHABET) == len(set(ALPHABET)) + 3
    assert tokenizer.encode("Z", add_special_tokens=False) == [2]
    assert tokenizer.decode([5, 1, 0]) == ALPHABET[2] + EOS + PAD
    chat = [{"role": "user", "content": "6a9|"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "6a9|"


def test_batch_by_hand() -> None:
    tokenizer = build_tokenizer()
    ids, labels = encode_batch(tokenizer, ["0|", "1|"], ["2", "345"])
    bar = 3 + ALPHABET.index("|")
    assert ids.tolist() == [[3, bar, 5, 1, 0, 0], [4, bar, 6, 7, 8, 1]]
    assert labels.tolist() == [[-100, -100, 5, 1, -100, -100], [-100, -100, 6, 7, 8, 1]]


def test_model_is_a_qwen3_of_the_stated_size_fixed_by_its_seed() -> None:
    config = model_config(ModelSettings(), build_tokenizer())
    state = torch.random.get_rng_state()
    one, two, three = (build_model(config, seed) for seed in (1, 1, 2))
    assert torch.equal(state, torch.random.get_rng_state())
    assert type(one).__name__ == "Qwen3ForCausalLM"
    assert 140_000 < sum(p.numel() for p in one.parameters()) < 160_000
    assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.lm_head.weight, three.lm_head.weight)


def test_learning_rate_rises_then_falls_to_a_tenth() -> None:
    settings = WarmupSettings(steps=110, rise=10, lr=1.0)
    assert [learning_rate(settings, s) for s in (0, 4, 9)] == [0.1, 0.5, 1.0]
    assert learning_rate(settings, 10) == 1.0
    assert learning_rate(settings, 60) == pytest.approx(0.55)
    assert learning_rate(settings, 110) == pytest.approx(0.1)


def test_twenty_steps_lower_the_nll_of_fresh_demonstrations(folder: Path) -> None:
    chain, rng = TableChain(TINY.chain), np.random.default_rng(123)
    prompts = [chain.prompt(rng, "validation") for _ in range(16)]
    responses = [chain.demonstration(prompt, "student", rng) for prompt in prompts]
    tokenizer = build_tokenizer()
    ids, labels = (torch.from_numpy(a) for a in encode_batch(tokenizer, prompts, responses))

    def nll(model: torch.nn.Module) -> float:
        with torch.no_grad():
            return float(model(input_ids=ids, labels=labels).loss)

    fresh = build_model(model_config(TINY.model, tokenizer), TINY.seed)
    warmed = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert nll(fresh) == pytest.approx(np.log(len(tokenizer)), abs=0.2)
    assert nll(warmed) < nll(fresh) - 0.1


def test_the_folder_is_plain_transformers(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert type(model).__name__ == "Qwen3ForCausalLM" and model.dtype == torch.float32
    assert isinstance(tokenizer, transformers.PreTrainedTokenizerFast)
    ours = build_tokenizer()
    text = "6a9b4|a6*9\n=!2\nBc8f3i7l0"
    assert tokenizer.encode(text) == ours.encode(text, add_special_tokens=False)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.eos_token, tokenizer.pad_token) == (EOS, PAD)
    assert tokenizer.padding_side == "left" and tokenizer.chat_template
    assert model.config.eos_token_id == tokenizer.eos_token_id == 1
    assert model.config.pad_token_id == tokenizer.pad_token_id == 0
    written = model.generation_config
    assert (written.eos_token_id, written.do_sample, written.top_p) == (1, True, 1.0)


def test_warm_up_is_deterministic_and_kinds_differ(folder: Path, tmp_path: Path) -> None:
    def weights(path: Path) -> bytes:
        return (path / "model.safetensors").read_bytes()

    assert weights(warm_up("student", TINY, tmp_path / "again")) == weights(folder)
    assert weights(warm_up("teacher", TINY, tmp_path / "teacher")) != weights(folder)


def test_the_key_names_everything_that_fixes_the_weights() -> None:
    base = TINY.key("student")
    changed = [
        TINY.key("teacher"),
        replace(TINY, steps=21).key("student"),
        replace(TINY, seed=1).key("student"),
        replace(TINY, model=replace(TINY.model, layers=2)).key("student"),
        replace(TINY, chain=ChainSettings(note_share=0.5)).key("student"),
    ]
    assert len({base, *changed}) == 6
    again = WarmupSettings.from_dict(json.loads(json.dumps(asdict(TINY))))
    assert again == TINY and again.key("student") == base


def test_a_finished_folder_is_used_again(folder: Path) -> None:
    calls: list[int] = []
    before = (folder / RECORD).stat().st_mtime_ns
    assert warm_up("student", TINY, folder, lambda *report: calls.append(1)) == folder
    assert not calls and (folder / RECORD).stat().st_mtime_ns == before
    assert not finished("teacher", TINY, folder)
    assert not finished("student", replace(TINY, seed=1), folder)
    with pytest.raises(UsageError, match="no warm-up of these settings"):
        warm_up("student", replace(TINY, seed=1), folder)


def test_an_interrupted_warm_up_leaves_nothing_that_is_trusted(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def interrupt(kind: str, step: int, total: int, nll: float) -> None:
        raise Stop

    with pytest.raises(Stop):
        warm_up("student", TINY, tmp_path / "student", interrupt)
    assert not any(tmp_path.iterdir())


def test_a_folder_without_its_record_is_not_trusted(folder: Path, tmp_path: Path) -> None:
    for text in (None, "{", "[]", '{"kind": "student"}'):
        copy = tmp_path / f"copy-{text is None}-{len(text or '')}"
        shutil.copytree(folder, copy)
        (copy / RECORD).unlink()
        if text is not None:
            (copy / RECORD).write_text(text)
        assert not finished("student", TINY, copy)


def test_a_failed_save_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        warm_up("student", TINY, tmp_path / "student")
    assert not any(tmp_path.iterdir())


def test_two_at_once_make_one_folder(tmp_path: Path) -> None:
    barrier = threading.Barrier(2, timeout=60)
    results: list[Path] = []

    def wait_at_the_end(kind: str, step: int, total: int, nll: float) -> None:
        if step == total:
            barrier.wait()

    def work() -> None:
        results.append(warm_up("student", TINY, tmp_path / "student", wait_at_the_end))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [tmp_path / "student"] * 2
    assert [p.name for p in tmp_path.iterdir()] == ["student"]
    assert finished("student", TINY, tmp_path / "student")


def test_ensure_models_warms_both_in_processes_and_then_hits_the_cache(tmp_path: Path) -> None:
    reports: dict[str, list[int]] = {"student": [], "teacher": []}

    def progress(kind: str, step: int, total: int, nll: float) -> None:
        assert total == 20 and 0 < nll < 10
        reports[kind].append(step)

    settings = {"student": TINY, "teacher": replace(TINY, seed=3)}
    folders = ensure_models(settings, tmp_path, progress)  # type: ignore[arg-type]
    assert reports == {"student": [10, 20], "teacher": [10, 20]}
    assert folders == {k: tmp_path / v.key(k) for k, v in settings.items()}  # type: ignore[arg-type]
    assert ensure_models(settings, tmp_path, progress) == folders  # type: ignore[arg-type]
    assert reports == {"student": [10, 20], "teacher": [10, 20]}
    here = warm_up("teacher", settings["teacher"], tmp_path / "here")
    there = folders["teacher"]  # type: ignore[index]
    names = ("model.safetensors", "tokenizer.json")
    assert all((here / n).read_bytes() == (there / n).read_bytes() for n in names)


def test_a_child_that_fails_is_an_error_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho out of luck\nexit 3\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(
        PolicyError, match="warm-up of the student ended with status 3: out of luck"
    ):
        ensure_models({"student": TINY}, tmp_path / "cache")
    assert not any((tmp_path / "cache").iterdir())


def test_unknown_kind_and_empty_training_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown kind 'pupil'"):
        warm_up("pupil", TINY, tmp_path / "x")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="steps"):
        WarmupSettings(steps=0)
