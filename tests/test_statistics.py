"""pass@k, Wilson and bootstrap intervals against hand values and direct enumeration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mintrl_env.errors import UsageError
from mintrl_env.statistics import mean_interval, pass_at_k, wilson_interval


@given(st.integers(1, 7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_success(n: int, data: st.DataObject) -> None:
    correct = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    right = [i < correct for i in range(n)]
    subsets = list(itertools.combinations(right, k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, 2, 5), (4, 2, 0), (4, -1, 1)])
def test_pass_at_k_refuses_nonsense(n: int, c: int, k: int) -> None:
    with pytest.raises(UsageError):
        pass_at_k(n, c, k)


def test_wilson_interval_has_its_textbook_values() -> None:
    # 8 of 10: 0.4902 to 0.9433; 0 of 10: 0 to 0.2775 (Wilson 1927, z = 1.96).
    assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_a_mean_interval_agrees_with_the_normal_one_on_many_values() -> None:
    values = np.random.default_rng(1).normal(0.3, 1.0, size=400)
    low, high = mean_interval(values.tolist())
    half = 1.96 * values.std() / 20
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.02)
    assert mean_interval([1.0, 1.0]) == (1.0, 1.0)
    assert mean_interval(values.tolist()) == (low, high)  # seeded
    with pytest.raises(UsageError):
        mean_interval([])
