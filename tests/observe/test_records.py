"""What is noted of each batch: the same in every place where batches are made."""

import asyncio
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from aioloader import DataLoader
from aioloader._base.records import Record, bytes_of
from aioloader._pipeline import lanes
from aioloader._pipeline.batch_task import BatchTask
from aioloader._pipeline.lanes import Lanes
from aioloader.datasets import from_iterable
from beside import beside
from samples import AsyncBatchMap, AsyncMap, AsyncStream, SyncMap, SyncStream

KINDS = [SyncMap, AsyncMap, SyncStream, AsyncStream]
PLACES: dict[str, dict[str, Any]] = {
    "in process": {},
    "threads": {"num_workers": 2, "workers": "thread"},
    "processes": {"num_workers": 2},
}


def records(loader: DataLoader[Any]) -> list[Record]:
    """Return those of the latest epoch."""
    return [*loader.stats()._records]


def check(found: list[Record], *, size: int, busy: bool = False) -> None:
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
        lanes = {one.lane for one in found}
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


async def test_seconds_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its coroutines are summed, and one in eight is measured."""
    clock: Any = SimpleNamespace(now=5.0)
    clock.perf_counter = lambda: clock.now
    monkeypatch.setattr(lanes, "time", clock)

    async def transform(task: BatchTask, position: int) -> None:
        clock.now += 0.25
        task.samples[position] += 1

    task = BatchTask(0, range(20), samples=[*range(20)])
    four = Lanes(4)
    jobs = await four.run(task, transform, 20)
    await four.aclose()
    assert task.samples == [*range(1, 21)]
    assert (jobs.began, jobs.busy) == (5, 20 * 0.25)


async def test_processor_time_of_some() -> None:
    """Of some, where one thread makes the whole batch."""
    for options in PLACES.values():
        async with DataLoader(SyncMap(68), 2, **options) as loader:
            await beside(partial(list, loader))
            cpu = [one.made[6] for one in records(loader)]
            measured = [at for at, seconds in enumerate(cpu) if seconds]
            assert measured == [1, 3, 7, 15, 17, 33]


async def test_failed_and_skipped_batches_have_none() -> None:
    """Only what was delivered counts."""

    def refuse(sample: Any) -> Any:
        if sample[1] < 8:
            raise ValueError("planted")
        return sample

    loader = DataLoader(SyncMap(24), 4, transform=refuse, on_error="skip")
    await beside(lambda: list(loader))
    assert [one.number for one in records(loader)] == [2, 3, 4, 5]


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
