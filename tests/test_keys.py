"""Keyed draws: the same numbers however they are asked for, and what a number selects."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mintrl_env.errors import PolicyError, UsageError
from mintrl_env.keys import RowKey, inverse_cdf, uniforms

KEY = RowKey(seed=1, update=2, task_id="a", rollout=3)
PINNED_KEY = [12538644762355858975, 11884353660043888935]
PINNED = [
    0.13483156757167636,
    0.7482839412058987,
    0.20969080999289735,
    0.885270144108987,
    0.9704402611123009,
]
PINNED_TEXT = [0.04902393640605396]


def test_pinned_values() -> None:
    """A change here changes every run that anybody wants to repeat."""
    assert KEY.philox_key().tolist() == PINNED_KEY
    assert uniforms(KEY, 3).tolist() == PINNED[:3]
    assert uniforms(KEY.at(63), 2).tolist() == PINNED[3:]
    assert uniforms(RowKey(0, 0, "日本\ud800", 0), 1).tolist() == PINNED_TEXT


def test_the_stream_is_numpys_own() -> None:
    philox = np.random.Philox(key=KEY.philox_key(), counter=np.zeros(4, dtype=np.uint64))
    assert uniforms(KEY, 64).tolist() == np.random.Generator(philox).random(64).tolist()


@given(st.integers(0, 400), st.lists(st.integers(0, 150), max_size=6))
def test_draws_do_not_depend_on_how_they_are_split(start: int, counts: list[int]) -> None:
    whole = uniforms(KEY.at(start), sum(counts))
    assert whole.dtype == np.float64 and whole.shape == (sum(counts),)
    parts, draw = [], start
    for count in counts:
        parts += uniforms(KEY.at(draw), count).tolist()
        draw += count
    assert parts == whole.tolist()


def test_draws_are_uniform_and_never_repeat() -> None:
    u = uniforms(KEY, 100_000)
    assert u.min() >= 0.0 and u.max() < 1.0
    assert len(np.unique(u)) == len(u)
    assert abs(u.mean() - 0.5) < 0.004 and abs(u.var() - 1 / 12) < 0.002
    counts = np.histogram(u, bins=20, range=(0, 1))[0]
    assert abs(counts - 5000).max() < 5 * np.sqrt(5000)
    assert abs(np.corrcoef(u[:-64], u[64:])[0, 1]) < 0.02, "neighbouring blocks"


def test_every_part_of_a_row_counts() -> None:
    rows = [
        KEY,
        RowKey(2, 2, "a", 3),
        RowKey(1, 3, "a", 3),
        RowKey(1, 2, "b", 3),
        RowKey(1, 2, "a", 4),
        RowKey(1, 2, "a", 3, retry=1),
        RowKey(1, -2, "a", 3),
        RowKey(12, 2, "a", 3),
        RowKey(1, 22, "a", 3),
        RowKey(1, 2, "a\x1f3", 3),
        RowKey(1, 2, "", 3),
    ]
    draws = np.concatenate([uniforms(row, 50) for row in rows])
    assert len(np.unique(draws)) == len(draws)
    assert len({row.row for row in rows}) == len(rows)


def test_a_row_is_the_same_at_every_draw() -> None:
    later = KEY.at(70)
    assert later.row == KEY.row and later.draw == 70 and KEY.draw == 0
    assert later.philox_key().tolist() == KEY.philox_key().tolist()
    assert uniforms(later, 1)[0] == uniforms(KEY, 71)[70]


@pytest.mark.parametrize(("draw", "count"), [(-1, 1), (0, -1), (-70, 100)])
def test_negative_draws_are_refused(draw: int, count: int) -> None:
    with pytest.raises(UsageError, match="count from 0"):
        uniforms(KEY.at(draw), count)


# --- inverse_cdf


@pytest.mark.parametrize(
    ("probs", "u", "token"),
    [
        ([0.25, 0.25, 0.5], 0.0, 0),
        ([0.25, 0.25, 0.5], 0.2499, 0),
        ([0.25, 0.25, 0.5], 0.25, 1),
        ([0.25, 0.25, 0.5], 0.5, 2),
        ([0.25, 0.25, 0.5], 0.9999999, 2),
        ([1.0], 0.0, 0),
        # a token without probability is never taken, at no edge
        ([0.0, 0.5, 0.0, 0.5, 0.0], 0.0, 1),
        ([0.0, 0.5, 0.0, 0.5, 0.0], 0.5, 3),
        ([0.0, 0.5, 0.0, 0.5, 0.0], 1.0 - 2.0**-53, 3),
        ([0.0, 0.0, 1.0], 0.0, 2),
        # weights need not sum to 1
        ([1.0, 1.0, 2.0], 0.25, 1),
        ([1.0, 1.0, 2.0], 0.5, 2),
        ([1e-30, 1e-30], 0.75, 1),
    ],
)
def test_selection_by_hand(probs: list[float], u: float, token: int) -> None:
    assert inverse_cdf(np.array(probs), u) == token
    assert inverse_cdf(np.array(probs, dtype=np.float32), u) == token


_WEIGHTS = st.floats(0.0, 1.0, width=32) | st.just(0.0) | st.floats(0.0, 1e-30)
_DRAWS = st.floats(0.0, 1.0, exclude_max=True) | st.just(1.0 - 2.0**-53) | st.just(0.0)


@given(st.lists(_WEIGHTS, min_size=1, max_size=40).filter(any), _DRAWS)
def test_a_token_without_probability_is_never_taken(probs: list[float], u: float) -> None:
    for dtype in (np.float64, np.float32):
        probs_V = np.array(probs, dtype=dtype)
        if probs_V.any():
            token = inverse_cdf(probs_V, u)
            assert probs_V[token] > 0
            cdf_V = np.cumsum(probs_V, dtype=np.float64)
            target = u * cdf_V[-1]
            assert cdf_V[token] > target or target >= cdf_V[-1]
            assert token == 0 or cdf_V[token - 1] <= target


def test_selection_follows_the_distribution() -> None:
    probs_V = np.array([0.1, 0.0, 0.6, 0.3])
    tokens = [inverse_cdf(probs_V, u) for u in uniforms(KEY, 20_000)]
    assert np.allclose(np.bincount(tokens, minlength=4) / 20_000, probs_V, atol=0.012)


@pytest.mark.parametrize(
    "probs", [[], [0.0, 0.0], [np.nan, 1.0], [1.0, np.nan], [np.inf, 1.0], [-0.5, 1.0]]
)
def test_what_is_no_distribution_is_an_error_of_the_policy(probs: list[float]) -> None:
    with pytest.raises(PolicyError, match="not a distribution"):
        inverse_cdf(np.array(probs), 0.5)
