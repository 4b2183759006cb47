"""Own spaces: membership at the edges, sampling, JSON, equality, pickling."""

from __future__ import annotations

import pickle
import time

import numpy as np
import pytest

from mintrl_env.errors import UsageError
from mintrl_env.spaces import TokenIds, UnicodeText


def ids(*values: int, dtype: type = np.int32) -> np.ndarray:
    return np.array(values, dtype=dtype)


class TestTokenIds:
    @pytest.mark.parametrize(
        ("value", "belongs"),
        [
            (ids(), False),  # min_len is 1
            (ids(0), True),
            (ids(9), True),
            (ids(10), False),
            (ids(-1), False),
            (ids(np.iinfo(np.int32).min), False),
            (ids(1, 2, 3), True),
            (ids(1, 2, 3, 4), False),
            (ids(1, dtype=np.int64), False),
            (ids(1).astype(np.float32), False),
            (np.array([[1, 2]], dtype=np.int32), False),
            ([1, 2], False),
            ("12", False),
            (None, False),
            (ids(1, 2, 9), True),  # 9 may stand at the end only
            (ids(1, 9, 2), False),
            (ids(9, 9), False),
            (ids(5, 6, 7, 8, 9, 0)[::-2], True),  # not contiguous: 0, 8, 6
        ],
    )
    def test_contains(self, value: object, belongs: bool) -> None:
        space = TokenIds(10, 3, min_len=1, last_only=[9])
        assert (value in space) is belongs

    def test_an_empty_array_belongs_where_min_len_is_0(self) -> None:
        assert ids() in TokenIds(10, 3)

    def test_samples_belong_and_reach_every_length_and_id(self) -> None:
        space = TokenIds(4, 50, min_len=1, last_only=[3], sample_len=3, seed=0)
        samples = [space.sample() for _ in range(300)]
        assert all(sample in space for sample in samples)
        assert {len(sample) for sample in samples} == {1, 2, 3}
        assert {int(sample[-1]) for sample in samples} == {0, 1, 2, 3}
        assert {int(i) for sample in samples for i in sample[:-1]} == {0, 1, 2}

    def test_a_seed_repeats_the_samples(self) -> None:
        space = TokenIds(1000, 20)
        space.seed(7)
        first = [space.sample().tolist() for _ in range(5)]
        space.seed(7)
        assert [space.sample().tolist() for _ in range(5)] == first

    def test_json_and_back(self) -> None:
        space = TokenIds(10, 5)
        assert space.to_jsonable([ids(1, 2), ids()]) == [[1, 2], []]
        back = space.from_jsonable([[1, 2], []])
        assert [b.tolist() for b in back] == [[1, 2], []]
        assert all(b in space for b in back)

    def test_equality_hash_repr_pickle(self) -> None:
        space = TokenIds(10, 5, min_len=1, last_only=[9, 3])
        assert space == TokenIds(10, 5, min_len=1, last_only=(3, 9))
        assert hash(space) == hash(TokenIds(10, 5, min_len=1, last_only=(3, 9)))
        assert space != TokenIds(10, 5, min_len=1)
        assert space != TokenIds(10, 6, min_len=1, last_only=(3, 9))
        assert space != "a space"
        assert repr(space) == "TokenIds(10, 5, min_len=1)"
        assert pickle.loads(pickle.dumps(space)) == space
        assert not space.is_np_flattenable

    def test_refuses_impossible_lengths_and_masks(self) -> None:
        with pytest.raises(UsageError, match="min_len"):
            TokenIds(10, 3, min_len=4)
        with pytest.raises(UsageError, match="vocab"):
            TokenIds(0, 3)
        with pytest.raises(UsageError, match="last_only"):
            TokenIds(2, 3, last_only=[0, 1])
        with pytest.raises(UsageError, match="mask"):
            TokenIds(10, 3).sample(mask=np.ones(3))

    def test_checks_fast(self) -> None:
        space, observation = TokenIds(152_000, 20_000), np.zeros(2048, dtype=np.int32)
        start = time.perf_counter()
        for _ in range(1000):
            assert observation in space
        # 144k/s on a quiet machine; Sequence(Discrete) does under 100/s.
        assert time.perf_counter() - start < 1.0


class TestUnicodeText:
    @pytest.mark.parametrize(
        ("value", "belongs"),
        [
            ("", False),
            ("a", True),
            ("äöü", True),
            ("\N{GRINNING FACE}\n\x00", True),
            ("abcd", False),
            (b"a", False),
            (1, False),
        ],
    )
    def test_contains(self, value: object, belongs: bool) -> None:
        assert (value in UnicodeText(3, min_length=1)) is belongs

    def test_samples_belong_and_repeat(self) -> None:
        space = UnicodeText(1000, min_length=1, sample_length=4, seed=1)
        samples = [space.sample() for _ in range(100)]
        assert all(sample in space for sample in samples)
        assert {len(sample) for sample in samples} == {1, 2, 3, 4}
        space.seed(1)
        assert [space.sample() for _ in range(100)] == samples

    def test_equality_repr_pickle_json(self) -> None:
        space = UnicodeText(5, min_length=1)
        assert space == UnicodeText(5, min_length=1)
        assert hash(space) == hash(UnicodeText(5, min_length=1))
        assert space != UnicodeText(5)
        assert repr(space) == "UnicodeText(5, min_length=1)"
        assert pickle.loads(pickle.dumps(space)) == space
        assert space.from_jsonable(space.to_jsonable(["a", "ö"])) == ["a", "ö"]

    def test_refuses_impossible_lengths_and_masks(self) -> None:
        with pytest.raises(UsageError, match="min_length"):
            UnicodeText(3, min_length=4)
        with pytest.raises(UsageError, match="mask"):
            UnicodeText(3).sample(mask=(1, None))
