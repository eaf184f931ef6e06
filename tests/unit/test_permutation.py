"""Shuffled orders: permutations that are computed position by position."""

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from aioloader import ShuffledIndices
from aioloader._order.epoch import order_of
from aioloader._order.shuffled_blocks import ShuffledBlocks


@given(st.integers(0, 3000), st.integers(-(2**70), 2**70))
def test_every_index_comes_exactly_once(n: int, seed: int) -> None:
    assert sorted(ShuffledIndices(n, seed)) == list(range(n))


@given(st.integers(1, 2**63), st.data())
def test_single_positions_agree_with_blocks(n: int, data: st.DataObject) -> None:
    """A position looked up alone has the index of its block; all are in range."""
    order = ShuffledIndices(n, seed=7)
    start = data.draw(st.integers(0, n - 1))
    stop = min(n, start + 50)
    block = order.take(start, stop)
    assert [order[position] for position in range(start, stop)] == block.tolist()
    backwards = order.at(np.array(range(start, stop), np.uint64)[::-1])
    assert backwards.tolist() == block[::-1].tolist()
    assert len(set(block.tolist())) == stop - start
    assert ((block >= 0) & (block.astype(np.uint64) < n)).all()


@pytest.mark.slow
def test_each_index_is_equally_likely_at_each_position() -> None:
    n, seeds = 12, 6000
    counts = np.zeros((n, n))
    for seed in range(seeds):
        counts[np.arange(n), ShuffledIndices(n, seed).take(0, n)] += 1
    expected = seeds / n
    chi_square = ((counts - expected) ** 2 / expected).sum()
    # 121 degrees of freedom: mean 121, standard deviation 15.6
    assert chi_square < 121 + 6 * 15.6


def test_neighbouring_positions_are_uncorrelated() -> None:
    block = ShuffledIndices(100_000, seed=1).take(0, 100_000).astype(float)
    assert abs(np.corrcoef(block[:-1], block[1:])[0, 1]) < 0.02


def test_the_order_of_a_seed_never_changes() -> None:
    """It is the same in all releases."""
    order = ShuffledIndices(10, seed=1).take(0, 10)
    assert order.tolist() == [4, 3, 6, 9, 2, 1, 7, 5, 8, 0]


def test_set_epoch_does_not_change_a_running_iteration() -> None:
    order = ShuffledIndices(10_000, seed=5)
    expected = list(order)
    iterator = iter(order)
    head = [next(iterator) for _ in range(10)]
    order.set_epoch(9)
    assert head + list(iterator) == expected


def test_shuffled_indices_behave_as_a_sequence() -> None:
    """Negative positions count from the end; positions out of range raise."""
    order = ShuffledIndices(5, seed=2)
    assert order[-1] == order[4]
    assert len(order) == 5
    assert list(pickle.loads(pickle.dumps(order))) == list(order)
    for position in (5, -6):
        with pytest.raises(IndexError, match="of 5 shuffled indices"):
            order[position]
    with pytest.raises(IndexError):
        order.take(3, 6)


@pytest.mark.parametrize("n", [-1, 2**63 + 1])
def test_sizes_beyond_int64_indices_raise(n: int) -> None:
    with pytest.raises(ValueError, match=r"n must be from 0 to 2\*\*63"):
        ShuffledIndices(n)


@pytest.mark.parametrize(
    "order", [ShuffledIndices(1 << 40), ShuffledBlocks(1 << 40, 16, 4096)]
)
def test_a_shuffled_order_can_begin_anywhere(order: Any) -> None:
    """Earlier positions are not computed: that would take hours."""
    sampler, number = BatchSampler(order, 4, drop_last=False), 1 << 36
    batch = next(order_of(order, sampler).batches(number))
    assert batch.indices == [order[4 * number + place] for place in range(4)]
