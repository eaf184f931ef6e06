"""The order of one epoch, from any batch on, and made again from its state."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler

from aioloader import DataLoader, ShuffledIndices
from aioloader._order.epoch import index_sampler_of, order_of
from aioloader._order.indices import Order, described
from aioloader._order.ranks import Part

DATA = range(23)
SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": lambda: RandomSampler(DATA),
    "generator": lambda: RandomSampler(DATA, generator=torch.Generator()),
    "replacement": lambda: RandomSampler(DATA, replacement=True),
    "subset": lambda: SubsetRandomSampler(DATA),
    "shuffled": lambda: ShuffledIndices(23, 9),
    "list": lambda: list(DATA),
}


@given(
    name=st.sampled_from(sorted(SAMPLERS)),
    size=st.integers(1, 7),
    drop_last=st.booleans(),
    rank=st.integers(0, 3),
    tail=st.sampled_from(["wrap", "pad", "drop", "uneven"]),
    start=st.integers(0, 24),
)
@pytest.mark.filterwarnings("ignore:list has no state_dict:UserWarning")
def test_from_any_batch_on(
    name: str, size: int, drop_last: bool, rank: int, tail: Any, start: int
) -> None:
    """The saved order gives what is left; numbers and places are those of all ranks."""
    part = Part(rank % 3, 3, tail) if rank else Part()
    sampler = SAMPLERS[name]()
    batches = BatchSampler(sampler, size, drop_last)
    order = order_of(sampler, batches, part)
    whole = list(order.batches())
    state = json.loads(json.dumps(order.state()))
    sampler = SAMPLERS[name]()
    again = order_of(sampler, BatchSampler(sampler, size, drop_last), part, state)
    assert [
        (one.number, one.first, list(one.indices), one.padding)
        for one in again.batches(start)
    ] == [
        (one.number, one.first, list(one.indices), one.padding)
        for one in whole
        if one.number >= start
    ]


def test_batches_of_the_users_are_dealt_whole() -> None:
    """Rank r of R gets batch r of each R; the last ones wrap."""
    batches = [[0, 1], [2], [3, 4], [5], [6]]

    def of(rank: int, tail: Any) -> list[Any]:
        order = order_of(None, batches, Part(rank, 3, tail))
        return [
            (one.number, one.first, one.indices, one.padding) for one in order.batches()
        ]

    assert of(0, "uneven") == [(0, 0, [0, 1], 0), (1, 5, [5], 0)]
    assert of(1, "uneven") == [(0, 2, [2], 0), (1, 6, [6], 0)]
    assert of(2, "uneven") == [(0, 3, [3, 4], 0)]
    assert of(2, "wrap") == [(0, 3, [3, 4], 0), (1, 7, [0, 1], 2)]
    assert of(0, "drop") == [(0, 0, [0, 1], 0)]


def test_places_of_a_stream() -> None:
    """They go on for ever; ranks take every so many-th."""
    batches = Order(2, Part(1, 3)).batches(4)
    batch = next(batches)
    assert (batch.number, batch.first, list(batch.indices)) == (4, 25, [25, 28])
    assert next(batches).number == 5


class Uncounted:
    """A batch sampler whose number of batches is not known, as graph samplers say."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([0], [1, 2])

    def __len__(self) -> int:
        raise ValueError("the number of batches is ambiguous")


def test_a_length_that_raises_is_not_asked_for() -> None:
    """torch's loader iterates without it."""
    for num_workers in (0, 2):
        loader = DataLoader(
            range(3), batch_sampler=Uncounted(), num_workers=num_workers
        )
        assert [batch.tolist() for batch in loader] == [[0], [1, 2]]
    with pytest.raises(ValueError, match="ambiguous"):
        len(loader)


def test_what_is_described() -> None:
    """Enough to tell samplers apart, before anything is drawn."""
    order = ShuffledIndices(9, 2)
    order.set_epoch(4)
    assert described(order) == {
        "sampler": "ShuffledIndices",
        "length": 9,
        "seed": 2,
        "epoch": 4,
    }
    assert described(iter([])) == {"sampler": "list_iterator", "length": None}
    assert described(Uncounted()) == {"sampler": "Uncounted", "length": None}
    assert index_sampler_of(order, BatchSampler(order, 2, drop_last=False)) is order
    assert index_sampler_of(order, None) is order
    batches = [[1]]
    assert index_sampler_of(None, batches) is batches


async def test_the_epoch_of_a_state_during_the_first_step() -> None:
    """It is that of the order that is about to be delivered, then and ever after."""
    loader = DataLoader(list(range(12)), 4, sampler=ShuffledIndices(12), num_workers=1)
    async for _ in loader:
        pass
    iterator = aiter(loader)
    step = asyncio.ensure_future(anext(iterator))
    for _ in range(3):
        await asyncio.sleep(0)
    early = loader.state_dict()
    first = await step
    late = loader.state_dict()
    assert early["order"] == late["order"]
    resumed = DataLoader(list(range(12)), 4, sampler=ShuffledIndices(12))
    resumed.load_state_dict(early)
    assert next(iter(resumed)).tolist() == first.tolist()
    await iterator.aclose()
