"""Each batch has a record of its times, wherever it is made."""

import asyncio
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from aioloader import DataLoader
from aioloader.datasets import from_iterable
from beside import beside
from samples import AsyncBatchMap, AsyncMap, AsyncStream, SyncMap, SyncStream

KINDS = [SyncMap, AsyncMap, SyncStream, AsyncStream]
PLACES: dict[str, dict[str, Any]] = {
    "in process": {},
    "threads": {"num_workers": 2, "workers": "thread"},
    "processes": {"num_workers": 2},
}


def records(loader: DataLoader[Any]) -> list[Any]:
    """Return the records of the latest epoch."""
    return [*loader.stats()._records]


def check(records: list[Any], *, size: int, busy: bool = False) -> None:
    """Assert that times increase, from batch to batch and within each."""
    assert records
    before = 0.0
    for record in records:
        began, read, started, transformed, collated, seconds, *_ = record.made
        assert record.samples == size
        assert 0 < began <= read <= started
        assert started <= transformed <= collated <= record.taken
        assert before <= record.asked <= record.taken
        assert (seconds > 0) == busy
        before = record.taken


def plus(sample: Any) -> Any:
    return sample


async def plus_async(sample: Any) -> Any:
    """Serve as an async transform."""
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
    """Of when it was requested, read, collated and taken, and by which worker."""
    options = {"batch_size": 4, "transform": transform, **PLACES[place]}
    async with DataLoader(kind(24), **options) as loader:
        if way == "for":
            batches = await beside(lambda: len(list(loader)))
        else:
            batches = len([batch async for batch in loader])
        latest = records(loader)
        assert len(latest) == batches == loader.stats().batches
        is_awaited = kind is AsyncMap or transform is plus_async
        check(latest, size=4, busy=is_awaited)
        lanes = {record.worker for record in latest}
        assert lanes <= ({0} if place == "in process" else {0, 1})
        assert [record.number for record in latest] == list(range(batches))


async def test_batches_made_by_other_ways_have_records() -> None:
    """Read by batches, gathered, blocks of a stream, or made by an executor."""
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
    """Raise for each second sample."""
    if sample[1] % 2:
        raise ValueError("planted")
    return sample


@pytest.mark.slow
@pytest.mark.parametrize("transform", [None, refuse_odd])
@pytest.mark.parametrize("place", [*PLACES, "executor"])
@pytest.mark.parametrize("kind", KINDS)
async def test_only_delivered_samples_count(
    kind: Any, place: str, transform: Any
) -> None:
    """Not those that were skipped, nor those after the end of a stream."""
    with ThreadPoolExecutor(2) as pool:
        options = PLACES.get(place, {"num_workers": 2, "workers": pool})
        loader = DataLoader(
            kind(10), 4, transform=transform, on_error="skip", **options
        )
        async with loader:
            batches: list[Any] = await beside(partial(list, loader))
    sizes = [len(batch[1]) for batch in batches]
    assert 1 <= min(sizes) <= 2
    assert [record.samples for record in records(loader)] == sizes
    assert loader.stats().samples == sum(sizes)


def test_stats_measure_the_bytes_of_any_batch() -> None:
    """Tensors, bytes and text, in any container; of many items, some are measured."""

    def nbytes(batch: Any) -> float:
        loader = DataLoader(range(2), collate_fn=lambda _: batch)
        list(loader)
        return loader.stats().batch_bytes

    tensor = torch.zeros(10, 10)
    batch = {"a": tensor, "b": (b"12345", ["abc"]), "c": tensor.numpy()}
    assert nbytes(batch) == 400 + 5 + 3 + 400
    assert nbytes([tensor] * 1000) == 400_000
    assert nbytes([]) == 0
    assert nbytes(torch.eye(3).to_sparse()) >= 0
    circle: list[Any] = []
    circle.append(circle)
    assert nbytes(circle) == 0
