"""One pass over the data: its number, its requests, and when they take long."""

import gc
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from aioloader import ShuffledIndices
from aioloader._order.epoch import Bookmark, Epoch, EpochNumbers, order_of
from aioloader._order.indices import Order, packed
from aioloader._order.ranks import WHOLE

LONG = (1 << 16) + 1


def epoch_of(sampler: Any, size: int = 4) -> Epoch:
    """Return an epoch over batches of ``size``."""
    batches = BatchSampler(sampler, size, drop_last=False)
    return Epoch(0, order_of(None, batches))


def begun(numbers: EpochNumbers, epoch: Epoch) -> int:
    """Begin an epoch, and count it."""
    epoch.begin(numbers.reserve(epoch))
    numbers.begin(epoch)
    return epoch.number


def test_numbers_are_reserved() -> None:
    """Two iterators have two numbers; that of one that was dropped is free again."""
    order = ShuffledIndices(9)
    numbers = EpochNumbers(order)
    one, other, third = (epoch_of(order) for _ in range(3))
    for epoch in (one, other, third):
        epoch.begin(numbers.reserve(epoch))
    assert [(e.number, e.shuffled) for e in (one, other, third)] == [
        (0, 0),
        (1, 1),
        (2, 2),
    ]
    assert order.epoch == 0
    numbers.begin(other)
    assert (numbers.next, order.epoch) == (2, 1)
    numbers.begin(one)
    assert (numbers.next, order.epoch) == (2, 1)
    del third, epoch
    gc.collect()
    assert begun(numbers, epoch_of(order)) == 2
    assert order.epoch == 2


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_number_that_is_chosen(is_prepared: bool) -> None:
    """It counts from then on, also if an iterator was made before."""
    order = ShuffledIndices(9)
    numbers, epoch = EpochNumbers(order), epoch_of(order)
    if is_prepared:
        epoch.begin(numbers.reserve(epoch))
    numbers.choose(5)
    order.set_epoch(5)
    if is_prepared:
        numbers.begin(epoch)
    assert begun(numbers, epoch_of(order)) == 5
    assert order.epoch == 5
    assert begun(numbers, epoch_of(order)) == 6
    assert order.epoch == 6


def test_an_order_that_is_chosen() -> None:
    """The sampler's own ``set_epoch`` holds for the next epoch."""
    order = ShuffledIndices(9)
    numbers, epoch = EpochNumbers(order), epoch_of(order)
    epoch.begin(numbers.reserve(epoch))
    order.set_epoch(7)
    numbers.begin(epoch)
    assert (numbers.next, order.epoch) == (1, 7)
    epoch = epoch_of(order)
    assert begun(numbers, epoch) == 1
    assert (epoch.shuffled, order.epoch) == (7, 7)


@pytest.mark.parametrize(
    ("sampler", "size", "expected"),
    [
        (SequentialSampler(range(LONG)), 4, []),
        (ShuffledIndices(10**9), 4, []),
        (RandomSampler(range(LONG - 1)), 64, []),
        (RandomSampler(range(LONG)), 1 << 14, [0, 4, 5]),
        (iter([1]), 1, [0, 1, 2, 3, 4, 5]),
        ([1, 2, 3], 1, []),
    ],
    ids=["sequential", "shuffled", "short", "long", "user's", "list"],
)
def test_what_takes_long(sampler: Any, size: int, expected: list[int]) -> None:
    """To permute many indices, first and last; a user's code, always."""
    epoch = epoch_of(sampler, size)
    assert [number for number in range(6) if epoch.draws_long(number)] == expected
    assert epoch.begins_quickly() == (0 not in expected)


def test_what_was_delivered_is_not_requested() -> None:
    """Of a stream it is made again, to get past it, and dropped."""
    bookmark = Bookmark(1, frozenset({2, 4}))
    epoch = epoch_of(SequentialSampler(range(12)), 2)
    epoch.begin(0, bookmark)
    assert [one.number for one in epoch.requests()] == [1, 3, 5]
    assert epoch.dropped() == frozenset()
    epoch = Epoch(0, Order(2, WHOLE))
    epoch.begin(0, bookmark)
    requests = epoch.requests()
    assert [next(requests).number for _ in range(4)] == [1, 2, 3, 4]
    assert epoch.dropped() == {2, 4}


def test_the_state_of_the_generator_is_that_before_the_order() -> None:
    """It is part of the state once the order is drawn, with the first request."""
    generator = torch.Generator().manual_seed(3)
    epoch = epoch_of(RandomSampler(range(9), generator=generator))
    known = {"sampler": "RandomSampler", "length": 9, "replacement": False}
    assert epoch.order.state() == known
    before = generator.get_state()
    epoch.begin(0)
    assert epoch.order.state() == known
    assert torch.equal(generator.get_state(), before)
    next(epoch.requests())
    assert epoch.order.state() == {**known, "generator": packed(before)}
