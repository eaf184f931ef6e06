"""What is noted of each batch: the same in every place where batches are made."""

import asyncio
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from aioloader import DataLoader
from aioloader._base.records import BatchRecord, bytes_of
from aioloader.datasets import from_iterable
from beside import beside
from samples import AsyncBatchMap, AsyncMap, AsyncStream, SyncMap, SyncStream

KINDS = [SyncMap, AsyncMap, SyncStream, AsyncStream]
PLACES: dict[str, dict[str, Any]] = {
    "in process": {},
    "threads": {"num_workers": 2, "workers": "thread"},
    "processes": {"num_workers": 2},
}


def records(loader: DataLoader[Any]) -> list[BatchRecord]:
    """Return those of the latest epoch."""
    return [*loader.stats()._records]


def check(found: list[BatchRecord], *, size: int, busy: bool = False) -> None:
    """Assert that clocks go forwards, from batch to batch and within each."""
    assert found
    assert all(one.samples == size for one in found)
    before = 0.0
    for one in found:
        began, read, started, transformed, collated, seconds, *_ = one.made
        assert 0 < began <= read <= started
        assert started <= transformed <= collated <= one.taken
        assert before <= one.asked <= one.taken
        assert (seconds > 0) == busy
        before = one.taken


def plus(sample: Any) -> Any:
    """Transform."""
    return sample


async def plus_async(sample: Any) -> Any:
    """Transform."""
    await asyncio.sleep(0)
    return sample


@pytest.mark.slow
@pytest.mark.parametrize("transform", [None, plus, plus_async])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["for", "async for"])
async def test_each_batch_has_a_record(
    way: str, kind: Any, place: str, transform: Any
) -> None:
    """Of when it was asked for, read, collated and taken, and by whom."""
    options = {"batch_size": 4, "transform": transform, **PLACES[place]}
    async with DataLoader(kind(24), **options) as loader:
        if way == "for":
            batches = await beside(lambda: len(list(loader)))
        else:
            batches = len([batch async for batch in loader])
        found = records(loader)
        assert len(found) == batches == loader.stats().batches
        is_awaited = kind is AsyncMap or transform is plus_async
        check(found, size=4, busy=is_awaited)
        lanes = {one.worker for one in found}
        assert lanes <= ({0} if place == "in process" else {0, 1})
        assert [one.number for one in found] == list(range(batches))


async def test_batches_made_elsewhere() -> None:
    """Read as a whole; gathered at once; a stream's block; those of other processes."""
    for dataset in (
        AsyncBatchMap(24),
        TensorDataset(torch.arange(24)),
        from_iterable(range(24)),
    ):
        loader: DataLoader[Any] = DataLoader(dataset, 4, shuffle=False)
        await beside(partial(list, loader))
        check(records(loader), size=4)
    loader = DataLoader(AsyncBatchMap(24), 4, transform=plus_async)
    await beside(partial(list, loader))
    check(records(loader), size=4, busy=True)
    for executor in (ThreadPoolExecutor(2), ProcessPoolExecutor(2)):
        with executor:
            loader = DataLoader(SyncMap(24), 4, num_workers=2, workers=executor)
            await beside(partial(list, loader))
            check(records(loader), size=4)


def refuse_odd(sample: Any) -> Any:
    """Fail at each second sample."""
    if sample[1] % 2:
        raise ValueError("planted")
    return sample


@pytest.mark.slow
@pytest.mark.parametrize("transform", [None, refuse_odd])
@pytest.mark.parametrize("place", [*PLACES, "executor"])
@pytest.mark.parametrize("kind", KINDS)
async def test_samples_of_a_batch(kind: Any, place: str, transform: Any) -> None:
    """Neither those that were skipped nor those after the end of a stream."""
    with ThreadPoolExecutor(2) as pool:
        options = PLACES.get(place, {"num_workers": 2, "workers": pool})
        loader = DataLoader(
            kind(10), 4, transform=transform, on_error="skip", **options
        )
        async with loader:
            batches: list[Any] = await beside(partial(list, loader))
    sizes = [len(batch[1]) for batch in batches]
    assert 1 <= min(sizes) <= 2
    assert [one.samples for one in records(loader)] == sizes
    assert loader.stats().samples == sum(sizes)


def test_bytes_of_a_batch() -> None:
    """Tensors, bytes and text, in any container; of many items, some are measured."""
    tensor = torch.zeros(10, 10)
    batch = {"a": tensor, "b": (b"12345", ["abc"]), "c": tensor.numpy()}
    assert bytes_of(batch) == 400 + 5 + 3 + 400
    assert bytes_of([tensor] * 1000) == 400_000
    assert bytes_of([]) == 0
    assert bytes_of(torch.eye(3).to_sparse()) >= 0
    circle: list[Any] = []
    circle.append(circle)
    assert bytes_of(circle) == 0
