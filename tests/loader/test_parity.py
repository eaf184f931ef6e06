"""The batches are torch's, for every dataset and every way to iterate."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    ConcatDataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    TensorDataset,
)
from torch.utils.data import DataLoader as TorchLoader

from aioloader import DataLoader, ShuffledIndices
from beside import beside
from core import kit
from core.kit import WAYS
from samples import (
    AsyncBatchMap,
    AsyncMap,
    AsyncStream,
    SyncMap,
    SyncStream,
    collect,
    labels,
    tensors,
)

pytestmark = pytest.mark.slow


async def batches(way: str, dataset: Any, **options: Any) -> list[Any]:
    """Return all batches, iterated in one of the three ways."""
    return await iterated(way, kit.make(way, dataset, **{"batch_size": 1, **options}))


async def iterated(way: str, loader: Any) -> list[Any]:
    """Return all batches; a ``for`` loop runs in a thread, for it blocks."""
    if way == "for":
        return await beside(lambda: list(loader))
    return await collect(loader)


MAPS: dict[str, Callable[[], Any]] = {
    "sync": SyncMap,
    "async": AsyncMap,
    "async batches": AsyncBatchMap,
    "tensors": tensors,
    "concat": lambda: ConcatDataset([SyncMap(20), SyncMap(0)]),
    "async concat": lambda: ConcatDataset([AsyncMap(20), SyncMap(0)]),
    "subset": lambda: Subset(AsyncMap(), range(20)),
    "subset of batches": lambda: Subset(AsyncBatchMap(), range(20)),
}
STREAMS: dict[str, Callable[[], Any]] = {
    "sync": SyncStream,
    "async": AsyncStream,
    "chain": lambda: ChainDataset([SyncStream(20), SyncStream(0)]),
    "iterator class": lambda: (item for item in SyncStream()),
}


OPTIONS: list[dict[str, Any]] = [
    {},
    {"batch_size": 6},
    {"batch_size": 6, "drop_last": True},
    {"batch_size": 6, "shuffle": True},
    {"batch_size": 6, "shuffle": True, "generator": 11},
    {"batch_sampler": [[3, 1], [2], [0, 19, 4]]},
    {"sampler": [5, 3, 3], "batch_size": 2},
    {"batch_size": 50},
]


def seeded(options: dict[str, Any]) -> dict[str, Any]:
    """Seed torch, and return the options with the generator of that seed."""
    torch.manual_seed(4)
    seed = options.get("generator")
    own = torch.Generator().manual_seed(seed) if seed else None
    return {**options, "generator": own}


def expected_of(options: dict[str, Any]) -> tuple[list[Any], torch.Tensor]:
    """Return two epochs of torch's loader, and the random number after them."""
    theirs = TorchLoader(SyncMap(), **seeded(options))
    return [labels(list(theirs)) for _ in range(2)], torch.rand(1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
async def test_batches_are_torchs(way: str, name: str, options: dict[str, Any]) -> None:
    """In two epochs; the random number after them is torch's, too."""
    expected = expected_of(options)
    loader_options = seeded(options)
    dataset = MAPS[name]()
    # the generator continues, as in one loader
    epochs = [labels(await batches(way, dataset, **loader_options)) for _ in range(2)]
    assert (epochs, torch.rand(1)) == expected


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("drop_last", [False, True])
async def test_stream_batches_are_torchs(way: str, name: str, drop_last: bool) -> None:
    """With and without the short last batch."""
    loaded = await batches(way, STREAMS[name](), batch_size=6, drop_last=drop_last)
    expected = TorchLoader(SyncStream(), batch_size=6, drop_last=drop_last)
    assert labels(loaded) == labels(list(expected))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [SyncMap, AsyncMap, SyncStream, AsyncStream])
async def test_without_batching_samples_are_converted(way: str, make: Any) -> None:
    """Single samples are not stacked."""
    samples = await batches(way, make(5), batch_size=None)
    assert [index for _, index in samples] == list(range(5))
    assert all(rows.shape == (3,) for rows, _ in samples)


@pytest.mark.parametrize("way", WAYS)
async def test_stacked_async_datasets_are_awaited(way: str) -> None:
    """Awaitables may be inside tuples and dicts."""
    pairs = await batches(way, StackDataset(AsyncMap(3), SyncMap(3)), batch_size=3)
    assert torch.equal(pairs[0][0][1], pairs[0][1][1])
    named = await batches(way, StackDataset(a=AsyncBatchMap2(3)), batch_size=3)
    assert named[0]["a"][1].tolist() == [0, 1, 2]


class AsyncBatchMap2(AsyncBatchMap):
    """Has both methods, so a stack may use either."""

    async def __getitem__(self, index: int) -> Any:
        return (await self.__getitems__([index]))[0]


class Chained(IterableDataset[Any]):
    """An async stream of torch's base class."""

    def __iter__(self) -> Any:
        raise AssertionError("the async iterator should have been used")

    def __aiter__(self) -> Any:
        return aiter(AsyncStream(3))


@pytest.mark.parametrize("way", WAYS)
async def test_chained_streams_follow_each_other(way: str) -> None:
    """A chain may have sync and async parts."""
    chain = ChainDataset([Chained(), SyncStream(2)])
    assert labels(await batches(way, chain, batch_size=4)) == [[0, 1, 2, 0], [1]]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [SyncMap, AsyncMap, AsyncStream, SyncStream])
@pytest.mark.parametrize("colours", ["ss", "sa", "as", "aa"])
async def test_functions_are_sync_or_async(way: str, make: Any, colours: str) -> None:
    """Each of transform and collate_fn."""

    def double(pair: Any) -> int:
        return 2 * int(pair[1])

    async def double_async(pair: Any) -> int:
        await asyncio.sleep(0)
        return double(pair)

    async def total_async(samples: list[int]) -> int:
        await asyncio.sleep(0)
        return sum(samples)

    options: dict[str, Any] = {
        "transform": double if colours[0] == "s" else double_async,
        "collate_fn": sum if colours[1] == "s" else total_async,
    }
    assert await batches(way, make(10), batch_size=4, **options) == [12, 44, 34]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [tensors, SyncMap, AsyncMap])
async def test_shuffled_indices_reorder_each_epoch(way: str, make: Any) -> None:
    """Unless an epoch is set, by the loader or by the sampler."""
    order = ShuffledIndices(20, seed=3)
    loader: Any = kit.make(way, make(), sampler=order, batch_size=20)

    async def epoch() -> list[int]:
        return labels(await iterated(way, loader))[0]

    first, second = await epoch(), await epoch()
    assert first == list(ShuffledIndices(20, seed=3))
    assert sorted(second) == sorted(first) != second
    loader.set_epoch(0)
    assert await epoch() == first
    order.set_epoch(1)
    assert await epoch() == second


def test_gathered_batches_are_copies() -> None:
    """Writing into a batch does not change the dataset, in order or shuffled."""
    dataset = tensors(8)
    for shuffle in (False, True):
        for rows, _ in DataLoader(dataset, batch_size=4, shuffle=shuffle):
            rows.add_(100)
    assert dataset.tensors[0].max() == 7


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(4)},
        lambda: {"sampler": [4, 0, -1]},
        lambda: {"sampler": [4, 0, -1], "rng": "worker"},
        lambda: {"rank": 1, "world_size": 2},
    ],
    ids=["generator", "sampler", "workers' draws", "rank"],
)
def test_rows_are_selected_on_the_cpu(make: Any) -> None:
    """The tensors are on the CPU, whatever torch's default device is."""

    def epoch(context: Any) -> list[Any]:
        iterator = iter(DataLoader(tensors(5), batch_size=2, **make()))
        with context:  # entered now: torch cannot draw its seed on "meta"
            return [[part.tolist() for part in batch] for batch in iterator]

    assert epoch(torch.device("meta")) == epoch(contextlib.nullcontext())


UNUSUAL: dict[str, Callable[[], Any]] = {
    "sparse": lambda: TensorDataset(torch.arange(6.0).to_sparse()),
    "parameter": lambda: TensorDataset(torch.nn.Parameter(torch.arange(6.0))),
    "subclass": lambda: type(
        "Mine", (TensorDataset,), {"__getitem__": lambda s, i: i * 2}
    )(torch.arange(6.0)),
}


@pytest.mark.parametrize("indices", [range(6), [True, 2], [0, 9]])
@pytest.mark.parametrize("name", [*UNUSUAL, "tensors"])
def test_unusual_tensors_behave_as_in_torch(name: str, indices: Any) -> None:
    """Batches and errors are torch's."""
    dataset = UNUSUAL.get(name, lambda: tensors(6))()

    def outcome(cls: Any) -> Any:
        try:
            return [b[0].tolist() for b in cls(dataset, 2, sampler=indices)]
        except (RuntimeError, IndexError) as error:
            return type(error), str(error)[:20]

    assert outcome(DataLoader) == outcome(TorchLoader)


REPLACED: list[tuple[Any, str, Any]] = [
    (RandomSampler, "__iter__", lambda _self: iter([3, 0, 2])),
    (SequentialSampler, "__iter__", lambda _self: iter([3, 0, 2])),
    (BatchSampler, "__iter__", lambda _self: iter([[3, 0], [2], [1]])),
    (Subset, "__getitems__", lambda _self, indices: [-index for index in indices]),
]


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(("cls", "name", "method"), REPLACED)
def test_patched_methods_of_torchs_classes_are_called(
    num_workers: int, cls: Any, name: str, method: Any, monkeypatch: Any
) -> None:
    """Tests patch them for a fixed order."""
    monkeypatch.setattr(cls, name, method)

    def outcome(base: Any) -> Any:
        shuffle = cls is RandomSampler
        numbers: Any = range(6)
        loader = base(
            Subset(numbers, numbers), 2, shuffle=shuffle, num_workers=num_workers
        )
        return len(loader), [batch.tolist() for batch in loader]

    assert outcome(DataLoader) == outcome(TorchLoader)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_big_batches_are_no_views(dtype: Any, num_workers: int) -> None:
    """Only then they can be detached in place, as in torch."""
    samples = [torch.ones(1 << 18, dtype=dtype)] * 2
    for batch in DataLoader(samples, 2, num_workers=num_workers):
        assert not batch.requires_grad_().detach_().requires_grad


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("is_batched", [False, True])
def test_an_abandoned_epoch_draws_from_a_generator_as_in_torch(
    num_workers: int, is_batched: bool
) -> None:
    """The next epoch's order shows it: the end of a sampler draws once more."""

    def next_epoch(make: Any, stop: int) -> list[int]:
        generator, numbers = torch.Generator().manual_seed(3), range(200)
        options = {"batch_size": 10, "shuffle": True, "generator": generator}
        if is_batched:
            sampler = RandomSampler(numbers, generator=generator)
            options = {"batch_sampler": BatchSampler(sampler, 10, drop_last=False)}
        loader = make(numbers, num_workers=num_workers, **options)
        iterator = iter(loader)
        for _ in range(stop):
            next(iterator)
        del iterator
        return [int(number) for number in next(iter(loader))]

    for stop in (1, 12, 16, 17, 20):
        assert next_epoch(DataLoader, stop) == next_epoch(TorchLoader, stop)
