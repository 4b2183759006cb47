"""Every gold answer of the public data sets accepts itself, however written, and no neighbour."""

from __future__ import annotations

import sys
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

from mintrl_env.verifiers.math_answer import MathVerifier

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT.parent / "shared" / "data" / "math"
GOLDS = {
    "aime2024": 30,
    "aime2025": 30,
    "aime_1983_2023": 975,
    "dapo_3000": 3000,
    "deepscaler_sub": 1188,
    "gsm8k_test": 1119,
    "gsm8k_train": 7473,
    "math500": 500,
    "math_test_other": 4500,
    "math_train": 7498,
    "omni_math_rule": 2792,
}
CUT_OFF = {"dsr-1187", "omni-0183", "omni-0682", "omni-0710", "omni-1468"}
"""Golds whose last closing brace is missing in the data: undecided, never paid."""

pytestmark = pytest.mark.skipif(
    not DATA.is_dir(), reason="the data sets are not there: no ../shared beside the repository"
)


@pytest.fixture(scope="module")
def golds() -> ModuleType:
    """benchmarks/verifier_golds.py, which is no part of the package."""
    spec = util.spec_from_file_location("verifier_golds", ROOT / "benchmarks" / "verifier_golds.py")
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def everything(golds: ModuleType, every: int) -> None:
    paths = sorted(DATA.glob("*.jsonl"))
    answers = {answer for path in paths for _, answer in golds.rows(path)}
    verifier = MathVerifier(workers=1)
    assert {path.stem for path in paths} == set(GOLDS)
    unreadable: set[str] = set()
    for path in paths:
        found = golds.check(path, verifier, answers, every)
        assert found.refused == [], path.stem
        assert found.wrong == [], path.stem
        count = len(range(0, GOLDS[path.stem], every))
        assert found.counts["golds"] == count
        readable = count - len(found.unreadable)
        assert all(found.counts[form] == readable for form in ("box", "words", "rewritten"))
        assert found.counts["others"] > 2 * readable
        assert all(gold.count("{") > gold.count("}") for _, gold in found.unreadable)
        unreadable |= {row for row, _ in found.unreadable}
    assert unreadable <= CUT_OFF
    if every == 1:
        assert unreadable == CUT_OFF


def test_a_sample_of_every_file(golds: ModuleType) -> None:
    everything(golds, 37)


@pytest.mark.slow
def test_every_gold_answer(golds: ModuleType) -> None:
    everything(golds, 1)
