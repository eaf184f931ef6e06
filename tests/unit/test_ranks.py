"""Whose a sample is: parts make up each global batch, and tails are what they say."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SequentialSampler

from aioloader._order.epoch import order_of
from aioloader._order.permutation import ShuffledIndices
from aioloader._order.ranks import WHOLE, Part

TAILS = ["wrap", "pad", "drop", "uneven"]


def order(sampler: Any, size: int, part: Part, *, drop_last: bool = False) -> Any:
    """Return the order of one rank's batches."""
    return order_of(None, BatchSampler(sampler, size, drop_last), part)


@given(
    n=st.integers(0, 90),
    size=st.integers(1, 6),
    world_size=st.integers(1, 8),
    tail=st.sampled_from(TAILS),
    drop_last=st.booleans(),
)
def test_cut(n: int, size: int, world_size: int, tail: Any, drop_last: bool) -> None:
    """Parts are disjoint and cover; what stands in comes last and is counted."""
    parts = [Part(rank, world_size, tail) for rank in range(world_size)]
    places = SequentialSampler(range(n))
    found = [
        list(order(places, size, part, drop_last=drop_last).batches()) for part in parts
    ]
    for part, batches in zip(parts, found, strict=True):
        assert len(batches) == part.batches(n, size, drop_last=drop_last)
        assert all(len(batch.indices) <= size for batch in batches)
    whole = size * world_size
    end = n - n % whole if drop_last else n
    if tail == "drop":
        end -= end % world_size
    real = sorted(
        int(index)
        for batches in found
        for batch in batches
        for index in list(batch.indices)[: len(batch.indices) - batch.padding]
    )
    assert real == list(range(end))
    if tail in {"wrap", "pad", "drop"}:
        assert len({sum(len(one.indices) for one in batches) for batches in found}) == 1
    for batches, part in zip(found, parts, strict=True):
        for batch in batches:
            assert batch.first == batch.number * whole + part.rank
            assert batch.padding in {0, 1}
            assert not batch.padding or tail in {"wrap", "pad"}


@given(st.integers(0, 300_000), st.integers(1, 64))
def test_only_the_rest_is_computed(start: int, size: int) -> None:
    """The middle of a long order is found by its place."""
    shuffled = ShuffledIndices(10**12, 3)
    batch = next(order(shuffled, size, WHOLE).batches(start, as_lists=False))
    assert isinstance(batch.indices, torch.Tensor)
    expected = shuffled.take(start * size, (start + 1) * size)
    assert batch.indices.tolist() == expected.tolist()
    assert (batch.number, batch.first) == (start, start * size)


def test_shares() -> None:
    """Seven samples for three ranks."""
    shares = {
        tail: [Part(rank, 3, tail).share(7) for rank in range(3)]  # type: ignore[arg-type]
        for tail in TAILS
    }
    assert shares == {
        "wrap": [(3, 0), (2, 1), (2, 1)],
        "pad": [(3, 0), (2, 1), (2, 1)],
        "drop": [(2, 0), (2, 0), (2, 0)],
        "uneven": [(3, 0), (2, 0), (2, 0)],
    }


def test_the_whole() -> None:
    """One rank has it all."""
    assert list(WHOLE.places(4, 8)) == [4, 5, 6, 7]
    assert list(Part(1, 3).places(6, 12)) == [7, 10]
