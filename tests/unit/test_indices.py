"""Index batches equal torch's, and so do the generators afterwards."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from aioloader import ShuffledIndices
from aioloader._order.epoch import order_of
from aioloader._order.indices import IndexOrder


def index_batches(sampler: Any) -> Iterator[Any]:
    """Yield the batches that a loader would ask for."""
    return (batch.indices for batch in order_of(None, sampler).batches())


def drawn(make: Any, *, ours: bool, own_generator: bool) -> tuple[Any, Any, Any]:
    """Return two epochs of batches, and the next draws of both generators."""
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(5) if own_generator else None
    sampler = make(generator)
    epochs = [list(index_batches(sampler) if ours else sampler) for _ in range(2)]
    return epochs, torch.rand(1).item(), torch.rand(1, generator=generator).item()


@given(
    st.integers(1, 40), st.integers(1, 9), st.booleans(), st.booleans(), st.booleans()
)
def test_equals_torch(
    n: int, size: int, drop_last: bool, shuffle: bool, own_generator: bool
) -> None:
    """Order and draws are torch's, epoch after epoch."""

    def make(generator: torch.Generator | None) -> Any:
        data = range(n)
        sampler: Any = SequentialSampler(data)
        if shuffle:
            sampler = RandomSampler(data, generator=generator)
        return BatchSampler(sampler, size, drop_last)

    theirs = drawn(make, ours=False, own_generator=own_generator)
    assert drawn(make, ours=True, own_generator=own_generator) == theirs


@pytest.mark.parametrize(
    "make",
    [
        lambda g: RandomSampler(range(9), replacement=True, generator=g),
        lambda g: RandomSampler(range(9), num_samples=20, generator=g),
        lambda g: RandomSampler(range(9), num_samples=4, generator=g),
        lambda g: SubsetRandomSampler([2, 4, 6], generator=g),
        lambda g: WeightedRandomSampler([0.1, 0.9], 7, generator=g),
    ],
    ids=["replacement", "longer", "shorter", "subset", "weighted"],
)
def test_other_samplers_are_taken_as_they_are(make: Any) -> None:
    """Nothing is short-cut that is not exactly known."""

    def batched(generator: torch.Generator | None) -> BatchSampler:
        return BatchSampler(make(generator), 4, drop_last=False)

    assert not isinstance(order_of(make(None), None), IndexOrder)
    theirs = drawn(batched, ours=False, own_generator=True)
    assert drawn(batched, ours=True, own_generator=True) == theirs


def test_subclasses_are_not_short_cut() -> None:
    """A subclass may do anything in ``__iter__``."""

    class Backwards(SequentialSampler):
        def __iter__(self) -> Any:
            return reversed(range(3))

    sampler = BatchSampler(Backwards(range(3)), 2, drop_last=False)
    assert list(index_batches(sampler)) == [[2, 1], [0]]


@pytest.mark.slow
@given(st.integers(1, 70_000), st.integers(1, 5000), st.booleans())
def test_lazy_order_is_cut_into_the_same_batches(
    n: int, size: int, drop_last: bool
) -> None:
    """Blocks of a lazy order are invisible outside."""
    order = ShuffledIndices(n, seed=1)
    batches = list(index_batches(BatchSampler(order, size, drop_last)))
    kept = n - n % size if drop_last else n
    assert [index for batch in batches for index in batch] == list(order)[:kept]
    assert all(len(batch) == size for batch in batches[:-1])


def test_nothing_is_drawn_before_the_first_batch() -> None:
    """Making the iterator leaves the generators alone."""
    sampler = BatchSampler(RandomSampler(range(9)), 2, drop_last=False)
    before = torch.get_rng_state()
    iterator = index_batches(sampler)
    assert torch.equal(before, torch.get_rng_state())
    next(iterator)
    assert not torch.equal(before, torch.get_rng_state())
