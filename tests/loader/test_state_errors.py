"""A state that does not belong to the loader is refused, and the refusal names both."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from aioloader import DataLoader, ShuffledIndices
from aioloader.errors import StateMismatchError
from samples import AsyncStream, SyncStream
from working import Numbers

Loader: Any = DataLoader  # options are tables here


def seeded(seed: int) -> torch.Generator:
    """Return a generator of the user's."""
    return torch.Generator().manual_seed(seed)


def numbers(n: int = 60_000, size: int | None = 32, **options: Any) -> Any:
    """Return a loader of numbers."""
    return Loader(Numbers(n), size, **options)


Case = tuple[Callable[[], Any], Callable[[], Any], Any, Any, str]
CASES: dict[str, Case] = {
    "length": (
        lambda: numbers(50_000),
        numbers,
        50_000,
        60_000,
        "saved for 50,000 samples, but the dataset has 60,000",
    ),
    "batch size": (numbers, lambda: numbers(size=16), 32, 16, "of 32 .* makes 16"),
    "no batches": (
        numbers,
        lambda: numbers(size=None),
        32,
        1,
        "of 32 .* makes 1",
    ),
    "world size": (
        lambda: numbers(size=8, rank=0, world_size=4),
        lambda: numbers(size=8, rank=0, world_size=3),
        32,
        24,
        "of 32 samples .*makes 24; .* batch_size x world_size",
    ),
    "sampler": (
        lambda: numbers(shuffle=True),
        numbers,
        "RandomSampler",
        "SequentialSampler",
        "with the sampler 'RandomSampler', but the loader has the sampler 'Seq",
    ),
    "indices": (
        lambda: numbers(sampler=SequentialSampler(range(50))),
        lambda: numbers(sampler=SequentialSampler(range(60))),
        50,
        60,
        "a sampler of 50 indices, but the loader has a sampler of 60",
    ),
    "replacement": (
        lambda: numbers(9, shuffle=True),
        lambda: numbers(9, sampler=RandomSampler(range(9), replacement=True)),
        False,
        True,
        "with replacement=False of the sampler, but the loader has replacement=True",
    ),
    "seed": (
        lambda: numbers(sampler=ShuffledIndices(60_000, 1)),
        lambda: numbers(sampler=ShuffledIndices(60_000, 2)),
        1,
        2,
        "the seed 1 of the sampler, but the loader has the seed 2",
    ),
    "generator": (
        lambda: numbers(shuffle=True, generator=seeded(1)),
        lambda: numbers(shuffle=True, generator=seeded(2)),
        1,
        2,
        "a generator of seed 1 for the order, but the loader has a generator of seed 2",
    ),
    "sampler's generator": (
        lambda: numbers(sampler=RandomSampler(range(9), generator=seeded(1))),
        lambda: numbers(sampler=RandomSampler(range(9), generator=seeded(2))),
        1,
        2,
        "seed 1 for the order, .* seed 2",
    ),
    "a generator more": (
        lambda: numbers(shuffle=True),
        lambda: numbers(shuffle=True, generator=seeded(2)),
        None,
        2,
        "seed None for the order, .* seed 2",
    ),
    "a generator less": (
        lambda: numbers(shuffle=True, generator=seeded(1)),
        lambda: numbers(shuffle=True),
        1,
        None,
        "seed 1 for the order, .* seed None",
    ),
    "kind": (
        lambda: Loader(SyncStream(9), 3),
        lambda: Loader(AsyncStream(9), 3),
        "iterable",
        "async iterable",
        "kind 'iterable', but this one's is 'async iterable'",
    ),
    "readers": (
        lambda: Loader(AsyncStream(9), 3),
        lambda: Loader(AsyncStream(9), 3, num_workers=2, fetch="workers"),
        1,
        2,
        "with 1 readers .* the loader has 2; .* num_workers",
    ),
}


@pytest.mark.parametrize("delivered", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_mismatches(name: str, delivered: int) -> None:
    """At once, also between epochs; the loader is as it was."""
    make, make_other, expected, found, what = CASES[name]
    loader, other = make(), make_other()
    iterator = iter(loader)
    for _ in range(delivered):
        next(iterator)
    state = loader.state_dict() if delivered else make().state_dict()
    before = other.state_dict()
    with pytest.raises(StateMismatchError, match=what) as caught:
        other.load_state_dict(state)
    assert (caught.value.expected, caught.value.found) == (expected, found)
    assert other.state_dict() == before
    iterator.close()


def subset(indices: Any) -> Any:
    """Return a sampler of some indices."""
    return SubsetRandomSampler(indices, generator=seeded(1))


def weighted(weights: Any, *, replacement: bool = True) -> Any:
    """Return a sampler of nine weighted indices."""
    return WeightedRandomSampler(weights, 9, replacement, generator=seeded(1))


WEIGHTS = [1.0] * 9 + [0.0] * 9
# Samplers, equal ones, and others.
CONTENTS: dict[str, tuple[Any, Any, Any]] = {
    "indices": (
        lambda: subset(range(9)),
        lambda: subset(torch.arange(9)),
        lambda: subset([*range(9, 18)]),
    ),
    "weights": (
        lambda: weighted(WEIGHTS),
        lambda: weighted(torch.tensor(WEIGHTS)),
        lambda: weighted(WEIGHTS[::-1]),
    ),
    "in a batch sampler": (
        lambda: BatchSampler(subset(range(9)), 3, drop_last=False),
        lambda: BatchSampler(subset([*range(9)]), 3, drop_last=False),
        lambda: BatchSampler(subset(range(9, 18)), 3, drop_last=False),
    ),
}


def sampled(sampler: Any) -> Any:
    """Return a loader with a sampler, or a batch sampler."""
    if isinstance(sampler, BatchSampler):
        return Loader(Numbers(18), batch_sampler=sampler)
    return Loader(Numbers(18), 3, sampler=sampler)


@pytest.mark.parametrize("name", CONTENTS)
def test_samplers_of_other_indices_or_weights(name: str) -> None:
    """Refused within an epoch; the next one is drawn from those of then."""
    make, make_equal, make_other = CONTENTS[name]
    loader = sampled(make())
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    equal, other = sampled(make_equal()), sampled(make_other())
    equal.load_state_dict(state)
    assert [one.tolist() for one in equal] == [one.tolist() for one in iterator]
    words = r"with checksum \d+, but .*; set them as they were at the start"
    with pytest.raises(StateMismatchError, match=words):
        other.load_state_dict(state)
    other.load_state_dict(sampled(make()).state_dict())


def test_weights_that_change_within_an_epoch() -> None:
    """They are for the next one: the order of this one is known."""
    sampler = weighted(WEIGHTS)
    loader = sampled(sampler)
    iterator = iter(loader)
    next(iterator)
    sampler.weights = torch.tensor(WEIGHTS[::-1])
    resumed = sampled(weighted(WEIGHTS))
    resumed.load_state_dict(loader.state_dict())
    assert [one.tolist() for one in resumed] == [one.tolist() for one in iterator]


@pytest.mark.parametrize("indices", [["a", "b"], [None], [2**70]], ids=repr)
def test_indices_that_are_no_numbers(indices: Any) -> None:
    """They are not compared, and iterated as in torch."""
    keys = dict.fromkeys([*indices, "c", "d"], 1)
    loader = Loader(keys, 1, sampler=subset([*indices, "c"]))
    iterator = iter(loader)
    next(iterator)
    Loader(keys, 1, sampler=subset([*indices, "d"])).load_state_dict(
        loader.state_dict()
    )
    iterator.close()


@pytest.mark.parametrize("version", [3, "4"])
def test_versions(version: Any) -> None:
    """A state of another version is not guessed at."""
    loader = numbers()
    state = loader.state_dict()
    state["version"] = version
    with pytest.raises(StateMismatchError, match=f"of version {version!r}") as caught:
        loader.load_state_dict(state)
    assert (caught.value.expected, caught.value.found) == (version, 4)


def test_what_may_differ() -> None:
    """Workers, prefetching, places and hosts are not in the state."""
    loader = numbers(96, shuffle=True)
    state = loader.state_dict()
    for options in (
        {"num_workers": 2},
        {"num_workers": 2, "workers": "thread"},
        {"prefetch_factor": 9},
        {"device": "cpu"},
        {"loop": "caller"},
        {"in_order": False},
    ):
        other = numbers(96, shuffle=True, **options)
        other.load_state_dict(state)
        assert other.state_dict() == state
