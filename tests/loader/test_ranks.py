"""Ranks: global batches are the same sets on any number of them."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    TensorDataset,
)

from aioloader import DataLoader, ShuffledIndices, merge_states
from aioloader.errors import StateMismatchError
from samples import AsyncMap
from stateful import Cursors, Plain
from working import AsyncNumbers, Numbers

GLOBAL = 24
WORLDS = [1, 2, 3, 4, 8]
Loader: Any = DataLoader  # options are tables here


class AsyncLines(AsyncMap):
    """Async iterable, without a state."""

    async def __aiter__(self) -> Any:
        for index in range(self.n):
            yield index


KINDS: dict[str, Callable[[int], Any]] = {
    "map": Numbers,
    "async map": AsyncNumbers,
    "tensors": lambda n: TensorDataset(torch.arange(n)),
    "iterable": Plain,
    "async iterable": AsyncLines,
    "stateful": Cursors,
}
ORDERS: dict[str, Callable[[int], dict[str, Any]]] = {
    "plain": lambda _: {},
    "shuffle": lambda _: {
        "shuffle": True,
        "generator": torch.Generator().manual_seed(5),
    },
    "sampler": lambda n: {"sampler": ShuffledIndices(n, 3)},
    "list": lambda n: {"sampler": list(range(n))[::-1]},
}


def loaders(
    kind: str, n: int, world_size: int, order: str = "plain", **options: Any
) -> list[DataLoader[Any]]:
    """Return the loaders of all ranks."""
    return [
        Loader(
            KINDS[kind](n),
            batch_size=GLOBAL // world_size,
            rank=rank,
            world_size=world_size,
            **ORDERS[order](n),
            **options,
        )
        for rank in range(world_size)
    ]


def listed(batch: Any) -> list[int]:
    """Return the samples of a batch that do not stand in."""
    if isinstance(batch, (list, tuple)) and len(batch) == 2:
        batch, mask = batch
        batch = batch[0] if isinstance(batch, list) else batch
        return list(batch[mask].tolist())
    batch = batch[0] if isinstance(batch, list) else batch
    return list(batch.tolist())


def batches(ranks: list[Any]) -> list[list[int]]:
    """Return global batches, sorted: what all ranks deliver, one after the other."""
    found = [[listed(batch) for batch in loader] for loader in ranks]
    return [
        sorted(one for rank in found if number < len(rank) for one in rank[number])
        for number in range(max(map(len, found)))
    ]


# -- the same sets ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@given(n=st.integers(1, 100), world_size=st.sampled_from(WORLDS))
def test_map_style(order: str, n: int, world_size: int) -> None:
    """Nothing is lost or repeated where ranks may differ, or a mask tells."""
    whole = batches(loaders("map", n, 1, order, tail="uneven"))
    assert sorted(sum(whole, [])) == list(range(n))  # noqa: RUF017
    assert batches(loaders("map", n, world_size, order, tail="uneven")) == whole
    assert batches(loaders("map", n, world_size, order, tail="pad")) == whole


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", WORLDS)
def test_kinds(kind: str, world_size: int) -> None:
    """So it is for all kinds of datasets."""
    for n in (0, 5, 48, 53):
        whole = batches(loaders(kind, n, 1, tail="uneven"))
        assert [len(batch) for batch in whole] == [24] * (n // 24) + [n % 24] * (
            n % 24 > 0
        )
        assert batches(loaders(kind, n, world_size, tail="uneven")) == whole
        if kind != "stateful":
            assert batches(loaders(kind, n, world_size, tail="pad")) == whole


@given(n=st.integers(0, 100), world_size=st.sampled_from(WORLDS), drop=st.booleans())
def test_tails(n: int, world_size: int, drop: bool) -> None:
    """How many samples each rank gets, and how long it says that it is."""
    sizes = {}
    for tail in ("wrap", "pad", "drop", "uneven"):
        ranks = loaders("map", n, world_size, tail=tail, drop_last=drop)
        found = [list(loader) for loader in ranks]
        assert [len(rank) for rank in found] == [len(loader) for loader in ranks]
        sizes[tail] = [
            sum(len(batch[0] if tail == "pad" else batch) for batch in rank)
            for rank in found
        ]
    n = n - n % GLOBAL if drop else n
    most, least = -(-n // world_size), n // world_size
    assert sizes["wrap"] == sizes["pad"] == [most] * world_size
    assert sizes["drop"] == [least] * world_size
    left_over = n % world_size
    assert sizes["uneven"] == [least + (rank < left_over) for rank in range(world_size)]


@given(n=st.integers(1, 100), world_size=st.sampled_from(WORLDS))
def test_wraps_as_torch_does(n: int, world_size: int) -> None:
    """In order, each rank's samples are those of DistributedSampler."""
    data: Any = range(n)
    for rank, loader in enumerate(loaders("map", n, world_size)):
        theirs: Any = DistributedSampler(data, world_size, rank, shuffle=False)
        found = [one for batch in loader for one in listed(batch)]
        assert found == list(theirs)


def test_torchs_sampler_is_left_alone() -> None:
    """It has dealt already."""
    data: Any = range(10)
    loader: Any = DataLoader(
        Numbers(10), 2, sampler=DistributedSampler(data, 2, 1, shuffle=False)
    )
    assert [batch.tolist() for batch in loader] == [[1, 3], [5, 7], [9]]


# -- on other ranks ---------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* has no state_dict:UserWarning")
@pytest.mark.parametrize("tail", ["uneven", "pad"])
@pytest.mark.parametrize(
    ("kind", "order"),
    [
        ("map", "plain"),
        ("map", "shuffle"),
        ("map", "list"),
        ("async map", "sampler"),
        ("tensors", "shuffle"),
        ("iterable", "plain"),
        ("async iterable", "plain"),
        ("stateful", "plain"),
    ],
)
@pytest.mark.parametrize("k", [0, 1, 2, 3, 4])
def test_from_four_onto_three(kind: str, order: str, tail: str, k: int) -> None:
    """Whatever rank's state it is: nothing is lost, nothing repeated."""
    whole = batches(loaders(kind, 101, 1, order, tail="uneven"))
    assert len(whole) == 5
    four = loaders(kind, 101, 4, order, tail=tail)
    states = []
    for loader in four:
        iterator = iter(loader)
        for _ in range(k):
            next(iterator)
        states.append(json.loads(json.dumps(loader.state_dict())))
        iterator.close()
    for state in states:
        three = loaders(kind, 101, 3, order, tail=tail)
        for loader in three:
            loader.load_state_dict(state)
        assert batches(three) == whole[k:]


@pytest.mark.parametrize("delivered", [0, 1])
@pytest.mark.parametrize(
    ("sampler", "word"),
    [
        (lambda seed: ShuffledIndices(60, seed), "seed"),
        (lambda seed: RandomSampler(range(60), replacement=seed == 1), "replacement"),
        (lambda seed: range(60 + seed), "length"),
    ],
)
def test_ranks_with_other_orders_are_not_merged(
    sampler: Callable[[int], Any], word: str, delivered: int
) -> None:
    """One of the orders would be lost; those of one run are merged."""
    states = [state_of_rank(rank, sampler(1), delivered) for rank in range(2)]
    assert merge_states(states) == states[0]
    states[1] = state_of_rank(1, sampler(2), delivered)
    words = f"not of one run .*: {word} of the order is .* sampler, seeded alike"
    with pytest.raises(StateMismatchError, match=words):
        merge_states(states)


@pytest.mark.parametrize("seeds", [(1, 1), (1, 2)])
def test_ranks_with_generators(seeds: tuple[int, int]) -> None:
    """Seeded alike they have one order; the error names the seeds."""
    states = []
    for rank, seed in enumerate(seeds):
        generator = torch.Generator().manual_seed(seed)
        sampler = RandomSampler(range(60), generator=generator)
        states.append(state_of_rank(rank, sampler, 1))
    if len(set(seeds)) == 1:
        assert merge_states(states)["order"] == states[1]["order"]
        return
    words = "generator of the order is {'seed': 1, .* and {'seed': 2, .{,70} in another"
    with pytest.raises(StateMismatchError, match=words):
        merge_states(states)


def state_of_rank(rank: int, sampler: Any, delivered: int) -> Any:
    """Return the state of one rank of two after some batches."""
    torch.manual_seed(3)
    loader = Loader(Numbers(60), 6, sampler=sampler, rank=rank, world_size=2)
    iterator = iter(loader)
    for _ in range(delivered):
        next(iterator)
    state = loader.state_dict()
    iterator.close()
    return state
