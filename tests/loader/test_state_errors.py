"""A state that does not belong to the loader is refused, with both in the error."""

import copy
import json
import random
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from aioloader import DataLoader, ShuffledIndices, merge_states
from aioloader.datasets import CSVDataset, from_iterable, mix
from aioloader.errors import StateMismatchError
from datasets.shards import arrow, parquet, sqlite, tar, text
from loader.states import begun, left_at, listed, rest_of, seeded
from samples import AsyncStream, SyncMap, SyncStream
from stateful import Batches, Counted, Cursors, Kept
from working import Numbers

Loader: Any = DataLoader  # options are tables here
A: Any = range(9)


def numbers(n: int = 60_000, size: int | None = 32, **options: Any) -> Any:
    return Loader(Numbers(n), size, **options)


def grouped(batches: Any, **options: Any) -> Any:
    """Return a loader with a batch sampler."""
    return Loader(Numbers(12), batch_sampler=batches, **options)


STREAMS: dict[str, Any] = {"iterable": SyncStream, "async iterable": AsyncStream}
# A function that makes a loader of a value, two values, and the error message.
Case = tuple[Callable[[Any], Any], tuple[Any, Any], str]
CASES: dict[str, Case] = {
    "length": (
        numbers,
        (50_000, 60_000),
        "saved for 50,000 samples, but the dataset has 60,000",
    ),
    "batch size": (lambda size: numbers(size=size), (32, 16), "of 32 .* makes 16"),
    "no batches": (
        lambda size: numbers(size=size if size > 1 else None),
        (32, 1),
        "of 32 .* makes 1",
    ),
    "world size": (
        lambda size: numbers(size=8, rank=0, world_size=size // 8),
        (32, 24),
        "of 32 samples .*makes 24; .* batch_size x world_size",
    ),
    "world size, no batches": (
        lambda ranks: numbers(size=None, rank=0, world_size=ranks),
        (2, 1),
        "of 2 .* makes 1",
    ),
    "batches of torch's": (
        lambda size: grouped(BatchSampler(range(12), size, drop_last=False)),
        (4, 2),
        "of 4 .* makes 2",
    ),
    "batches of a user's": (
        lambda ranks: grouped([[1], [2, 3], [4]], rank=0, world_size=ranks),
        (2, 1),
        "saved on 2 ranks, but there are 1",
    ),
    "sampler": (
        lambda name: numbers(shuffle=name == "RandomSampler"),
        ("RandomSampler", "SequentialSampler"),
        "with the sampler 'RandomSampler', but the loader has the sampler 'Seq",
    ),
    "indices": (
        lambda count: numbers(sampler=SequentialSampler(range(count))),
        (50, 60),
        "a sampler of 50 indices, but the loader has a sampler of 60",
    ),
    "replacement": (
        lambda flag: numbers(9, sampler=RandomSampler(range(9), replacement=flag)),
        (False, True),
        "with replacement=False of the sampler, but the loader has replacement=True",
    ),
    "seed": (
        lambda seed: numbers(sampler=ShuffledIndices(60_000, seed)),
        (1, 2),
        "the seed 1 of the sampler, but the loader has the seed 2",
    ),
    "distributed seed": (
        lambda seed: numbers(9, sampler=DistributedSampler(A, 1, 0, seed=seed)),
        (1, 2),
        "the seed 1 of the sampler, but the loader has the seed 2",
    ),
    "distributed shuffle": (
        lambda flag: grouped(BatchSampler(DistributedSampler(A, 1, 0, flag), 2, True)),
        (False, True),
        "with shuffle=False of the sampler, but the loader has shuffle=True",
    ),
    "generator": (
        lambda seed: numbers(shuffle=True, generator=seeded(seed)),
        (1, 2),
        "a generator of seed 1 for the order, but the loader has a generator of seed 2",
    ),
    "sampler's generator": (
        lambda seed: numbers(sampler=RandomSampler(range(9), generator=seeded(seed))),
        (1, 2),
        "seed 1 for the order, .* seed 2",
    ),
    "a generator more": (
        lambda seed: numbers(shuffle=True, generator=seed and seeded(seed)),
        (None, 2),
        "seed None for the order, .* seed 2",
    ),
    "a generator less": (
        lambda seed: numbers(shuffle=True, generator=seed and seeded(seed)),
        (1, None),
        "seed 1 for the order, .* seed None",
    ),
    "kind": (
        lambda kind: Loader(STREAMS[kind](9), 3),
        ("iterable", "async iterable"),
        "kind 'iterable', but this one's is 'async iterable'",
    ),
    "readers": (
        lambda count: Loader(
            AsyncStream(9), 3, num_workers=count - count % 2, fetch="workers"
        ),
        (1, 2),
        "with 1 readers .* the loader has 2; .* num_workers",
    ),
}


@pytest.mark.parametrize("delivered", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_a_state_of_another_loader_is_refused(name: str, delivered: int) -> None:
    """At once, also between epochs; the loader does not change."""
    make, (expected, actual), message = CASES[name]
    loader, target = make(expected), make(actual)
    iterator, state = begun(loader, delivered)
    state = state if delivered else make(expected).state_dict()
    before = target.state_dict()
    with pytest.raises(StateMismatchError, match=message) as caught:
        target.load_state_dict(state)
    assert (caught.value.expected, caught.value.found) == (expected, actual)
    assert target.state_dict() == before
    iterator.close()


def subset(indices: Any) -> Any:
    return SubsetRandomSampler(indices, generator=seeded(1))


def weighted(weights: Any, *, replacement: bool = True) -> Any:
    """Return a sampler of nine weighted indices."""
    return WeightedRandomSampler(weights, 9, replacement, generator=seeded(1))


def mixture(weight: int) -> Any:
    """Return a loader of a mixture of map-style datasets."""
    return Loader(mix([Numbers(9), Numbers(9)], [1, weight]), 3, shuffle=True)


WEIGHTS = [1.0] * 9 + [0.0] * 9
# Samplers, equal ones, and different ones.
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
    "list": (lambda: [*A], lambda: [*A], lambda: [*A[::-1]]),
    "range": (lambda: A, lambda: A, lambda: A[::-1]),
    "batches": (
        lambda: Loader(A, batch_sampler=[[0, 1], [2]]),
        lambda: Loader(A, batch_sampler=[(0, 1), (2,)]),
        lambda: Loader(A, batch_sampler=[[0, 2], [1]]),
    ),
    "mixture": (lambda: mixture(2), lambda: mixture(2), lambda: mixture(3)),
    "last batch": (
        lambda: Loader(A, 4),
        lambda: Loader(A, 4, num_workers=1, workers="thread"),
        lambda: Loader(A, 4, drop_last=True),
    ),
    "in a batch sampler": (
        lambda: BatchSampler(subset(range(9)), 3, drop_last=False),
        lambda: BatchSampler(subset([*range(9)]), 3, drop_last=False),
        lambda: BatchSampler(subset(range(9, 18)), 3, drop_last=False),
    ),
}


def sampled(sampler: Any) -> Any:
    """Return a loader with a sampler, or a batch sampler."""
    if isinstance(sampler, DataLoader):
        return sampler
    if isinstance(sampler, BatchSampler):
        return Loader(Numbers(18), batch_sampler=sampler)
    return Loader(Numbers(18), 3, sampler=sampler)


@pytest.mark.parametrize("name", CONTENTS)
def test_a_state_of_another_sampler_is_refused_mid_epoch(name: str) -> None:
    """Between epochs, the state of a different sampler is accepted."""
    make, make_equal, make_other = CONTENTS[name]
    loader = sampled(make())
    iterator, state = begun(loader)
    equal, different = sampled(make_equal()), sampled(make_other())
    equal.load_state_dict(state)
    assert listed(equal) == listed(iterator)
    words = r"checksum \d+, but .*; set them as they were at the start|drop_last=False,"
    with pytest.raises(StateMismatchError, match=words):
        different.load_state_dict(state)
    different.load_state_dict(sampled(make()).state_dict())


def test_weights_may_change_within_an_epoch() -> None:
    """The new weights are for the next epoch; this one's order is saved."""
    sampler = weighted(WEIGHTS)
    loader = sampled(sampler)
    iterator = iter(loader)
    next(iterator)
    sampler.weights = torch.tensor(WEIGHTS[::-1])
    assert rest_of(sampled(weighted(WEIGHTS)), loader.state_dict()) == listed(iterator)


@pytest.mark.parametrize("indices", [["a", "b"], [None], [2**70]], ids=repr)
def test_indices_that_are_no_numbers_are_not_compared(indices: Any) -> None:
    """Such indices work as in torch."""
    keys = dict.fromkeys([*indices, "c", "d"], 1)
    loader = Loader(keys, 1, sampler=subset([*indices, "c"]))
    iterator = iter(loader)
    next(iterator)
    Loader(keys, 1, sampler=subset([*indices, "d"])).load_state_dict(
        loader.state_dict()
    )
    iterator.close()


Make = Callable[[], Any]


@cache
def folder() -> Path:
    return Path(tempfile.mkdtemp())


def csv() -> Any:
    """Return rows of CSV."""
    for shard in range(3):
        (folder() / f"{shard}.csv").write_text("a,b\n" + f"{shard},2\n" * 9)
    return CSVDataset("*.csv", store=folder(), interleave=2)


def streams() -> dict[str, Make]:
    """Return makers of streams: every format and every step."""
    return {
        "tar": lambda: tar(folder(), interleave=3),
        "lines": lambda: text(folder(), shuffle=True, interleave=2).readers(4),
        "csv": csv,
        "parquet": lambda: parquet(folder()).shuffle(5),
        "arrow": lambda: arrow(folder()).repeat(2),
        "sql": lambda: sqlite(folder()).skip(3).take(20),
        "mix": lambda: from_iterable(range(9)).mix(from_iterable(range(30))).batch(2),
        "epoch": lambda: from_iterable(range(9)).map(str).readers(2).epoch_length(30),
    }


def streamed(name: str) -> Any:
    return Loader(streams()[name](), 2, collate_fn=list)


MAKERS: dict[str, Make] = {
    "map": lambda: Loader(SyncMap(12), 2),
    "seed": lambda: Loader(SyncMap(12), 2, shuffle=True),
    "generator": lambda: Loader(SyncMap(12), 2, shuffle=True, generator=seeded(3)),
    "sampler": lambda: Loader(
        SyncMap(12), 2, sampler=WeightedRandomSampler([1.0] * 12, 12), in_order=False
    ),
    "batches": lambda: Loader(SyncMap(12), batch_sampler=Batches()),
    "ranks": lambda: Loader(SyncMap(24), 2, shuffle=True, rank=0, world_size=2),
    "copies": lambda: Loader(Counted(), 1, num_workers=2),
    "iterable": lambda: Loader(SyncStream(12), 2),
    "dataset": lambda: Loader(Kept(12), 2),
    "iterator": lambda: Loader(Cursors(12), 2),
    "workers": lambda: Loader(
        from_iterable(range(30)), 2, num_workers=2, fetch="workers"
    ),
    **{name: partial(streamed, name) for name in streams()},
}


@cache
def saved(name: str) -> str:
    """Return the state after three batches, as JSON."""
    return json.dumps(left_at(MAKERS[name](), 3))


def places(state: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the holder and the key of each part of a state."""
    for key in state if isinstance(state, dict) else range(len(state)):
        yield state, key
        if isinstance(state[key], (dict, list)):
            yield from places(state[key])


def changed(value: Any, draw: random.Random) -> Any:
    """Return a value with a different type, sign, length or content."""
    values: list[Any] = ["x", -1, 2.5, None, [], {}, float("nan"), 10**18, [[1]]]
    if isinstance(value, list) and value:
        values += [value[:-1], value[1:], value[::-1], [*value, *value]]
    elif isinstance(value, (int, float)):
        values += [-value, value + 1, str(value)] * 3
    elif isinstance(value, dict) and len(value) > 1:
        keys = list(value)
        values += [dict(zip(keys, [*value.values()][::-1], strict=True))] * 5
    return draw.choice([option for option in values if repr(option) != repr(value)])


def damaged(state: Any, draw: random.Random) -> Any:
    """Return a copy of a state that is damaged at one place."""
    state = copy.deepcopy(state)
    holder, key = draw.choice(list(places(state)))
    _, _, twin, place = holder, key, *draw.choice(list(places(state)))
    damage = draw.randrange(4)
    if damage == 0:
        del holder[key]
    elif damage == 1 and not (holder is twin and key == place):
        holder[key] = copy.deepcopy(twin[place])
    else:
        holder[key] = changed(holder[key], draw)
    return state


@pytest.mark.slow
@pytest.mark.law
@pytest.mark.parametrize("name", MAKERS)
@given(seed=st.integers(0, 10**9))
def test_a_damaged_state_is_refused(name: str, seed: int) -> None:
    """By loading and by merging, whichever value is damaged."""
    whole = json.loads(saved(name))
    state = damaged(whole, random.Random(seed))
    if repr(state) == repr(whole):
        return
    for load in (MAKERS[name]().load_state_dict, lambda part: merge_states([part])):
        with pytest.raises(
            StateMismatchError, match=r"as it was saved|version|no state"
        ):
            load(state)


async def state_of(stream: Any) -> Any:
    """Return the state of a stream's own iterator after four samples."""
    async with aiter(stream) as iterator:
        for _ in range(4):
            await anext(iterator)
        return json.loads(json.dumps(iterator.state_dict()))


@pytest.mark.slow
@pytest.mark.parametrize("name", streams())
async def test_a_damaged_state_of_a_stream_is_refused(name: str) -> None:
    """By the stream's own ``load_state_dict``."""
    stream = streams()[name]()
    whole = await state_of(stream)
    stream.load_state_dict(whole)
    draw = random.Random(1)
    for state in (damaged(whole, draw) for _ in range(100)):
        if repr(state) != repr(whole):
            with pytest.raises(StateMismatchError, match=r"as it was saved|version"):
                stream.load_state_dict(state)


@pytest.mark.parametrize("name", MAKERS)
def test_harmless_changes_of_a_state_are_accepted(name: str) -> None:
    """The order of keys, tuples for lists, and additional keys."""
    state = json.loads(json.dumps(json.loads(saved(name)), sort_keys=True))
    loader = MAKERS[name]()
    loader.load_state_dict({**state, "another": 1, "beyond": tuple(state["beyond"])})
    assert json.loads(json.dumps(loader.state_dict())) == json.loads(saved(name))


@pytest.mark.parametrize(
    "state", ["x", 5, [1], {"a": 1}, None, {"version": 3}, {"version": "4"}], ids=repr
)
def test_values_that_are_no_states_are_refused(state: Any) -> None:
    """States of another version are refused, too."""
    version = state.get("version") if isinstance(state, dict) else None
    words = "no state of" if version is None else f"of version {version!r}"
    with pytest.raises(StateMismatchError, match=words) as caught:
        MAKERS["seed"]().load_state_dict(state)
    versions = caught.value.expected, caught.value.found
    assert version is None or versions == (version, 5)
    with pytest.raises(StateMismatchError):
        merge_states([state])


@pytest.mark.parametrize("epoch", ["3", 2.5, None, -1], ids=repr)
def test_set_epoch_needs_a_count(epoch: Any) -> None:
    """The number is saved in states."""
    with pytest.raises((TypeError, ValueError)):
        MAKERS["seed"]().set_epoch(epoch)


@pytest.mark.parametrize("name", ["seed", "generator", "lines", "epoch"])
def test_a_huge_epoch_number_costs_nothing(name: str) -> None:
    """Resuming does not loop over the epochs before."""
    loader, resumed = MAKERS[name](), MAKERS[name]()
    loader.set_epoch(10**18)
    iterator, state = begun(loader)
    torch.manual_seed(1)  # as in another process
    resumed.load_state_dict(state)
    assert str(list(resumed)) == str(list(iterator))
