"""A batch that is ready does not wait for reads of later batches."""

import asyncio
import itertools
import threading
from typing import Any

import pytest

from aioloader import DataLoader
from core.kit import ASYNC_WAYS, BY, PATIENCE, Gated, bounded, make, quiet
from samples import AsyncMap, SyncMap, collect, labels

MARKS: dict[str, asyncio.Event] = {}


def mark() -> asyncio.Event:
    return MARKS.setdefault("entered", asyncio.Event())


class Behind(AsyncMap):
    """Samples of later batches come only after an async function was entered."""

    async def __getitem__(self, index: int) -> Any:
        if index >= 4:
            await mark().wait()
        return index

    async def pass_on(self, sample: Any) -> Any:
        """Set the mark, and return the sample."""
        mark().set()
        await asyncio.sleep(0)
        return sample


@pytest.mark.slow
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("concurrency", [1, 4, 6, 64])
@pytest.mark.parametrize("stage", ["collate_fn", "transform"])
async def test_async_stages_do_not_wait_for_later_reads(
    stage: str, concurrency: int, in_order: bool, by: str
) -> None:
    """Later reads wait until the async stage of batch 0 has run."""
    MARKS.clear()
    dataset = Behind(40)
    options: Any = {stage: dataset.pass_on, **BY[by]}
    options |= {"concurrency": concurrency, "in_order": in_order, "prefetch_factor": 4}
    if by == "processes":
        options["num_workers"] = 1
    loader = make("thread", dataset, timeout=PATIENCE, **options)
    assert len(await bounded(collect(loader))) == 10


async def test_a_slow_collate_call_does_not_stop_later_reads() -> None:
    """The first collate call waits until later samples were read."""
    dataset = Gated(400, free=400)
    entered, leave = asyncio.Event(), asyncio.Event()

    async def collate(samples: list[int]) -> list[int]:
        if samples[0] == 0:
            entered.set()
            await leave.wait()
        return samples

    loader = make("caller", dataset, collate_fn=collate, concurrency=2)
    task = asyncio.create_task(collect(loader))
    await bounded(entered.wait())
    await bounded(dataset.until(8))
    leave.set()
    assert len(await bounded(task)) == 100


# -- how far ahead ------------------------------------------------------------------


def growing(first: int, later: int, number: int) -> list[list[int]]:
    """Return ``number`` batches of ``later`` samples after one of ``first``."""
    starts = [0, *range(first, first + later * number, later)]
    return [list(range(start, start + (later if start else first))) for start in starts]


async def ahead_of(loader: DataLoader[Any], dataset: Gated) -> int:
    """Return how many samples have started when no more start by themselves."""
    iterator = aiter(loader)
    await bounded(anext(iterator))
    seen = -1
    while seen != dataset.begun:
        seen = dataset.begun
        await quiet()
    await iterator.aclose()
    return seen


def alternating() -> list[list[int]]:
    """Return large and small batches alternately."""
    sizes = [1 if number % 2 else 256 for number in range(120)]
    ends = itertools.accumulate(sizes)
    return [[*range(end - size, end)] for end, size in zip(ends, sizes, strict=True)]


@pytest.mark.parametrize(
    ("batches", "most"),
    [
        *((growing(first, 512, 60), first + 64 + 4 * 512) for first in (1, 8, 64)),
        (alternating(), 256 + 64 + 4 * 257),
    ],
    ids=["1, 512, ...", "8, 512, ...", "64, 512, ...", "256, 1, 256, ..."],
)
async def test_small_batches_do_not_widen_the_window(
    batches: list[list[int]], most: int
) -> None:
    """Prefetched samples are bounded by the batches' real sizes."""
    dataset = Gated(40_000, free=40_000)
    loader: Any = DataLoader(
        dataset, batch_sampler=batches, concurrency=64, loop="caller"
    )
    assert await ahead_of(loader, dataset) <= most


@pytest.mark.parametrize("concurrency", [1, 64, 300])
async def test_a_large_first_batch_does_not_narrow_the_window(concurrency: int) -> None:
    """``concurrency`` samples are in flight, although later batches are small."""
    batches = growing(512, 1, 600)
    dataset = Gated(2000, free=512)
    loader: Any = DataLoader(
        dataset, batch_sampler=batches, concurrency=concurrency, loop="caller"
    )
    iterator = aiter(loader)
    await bounded(anext(iterator))
    await dataset.until(512 + concurrency)
    await quiet()
    assert dataset.begun == 512 + concurrency
    await iterator.aclose()


@pytest.mark.parametrize("size", [1, 3, 64, 100])
async def test_small_batches_fill_the_concurrency(size: int) -> None:
    """At most five batches beyond ``concurrency`` samples are prefetched."""
    dataset = Gated(4000)
    loader = make("caller", dataset, batch_size=size, concurrency=64)
    iterator = aiter(loader)
    step = asyncio.ensure_future(anext(iterator))
    await dataset.until(64)
    await quiet()
    assert dataset.begun == 64
    dataset.gate.set()
    await bounded(step)
    await quiet()
    assert dataset.begun <= 64 + 5 * size
    await iterator.aclose()


# -- tasks that share an iterator -------------------------------------------------

IN_ORDER = [[i, i + 1, i + 2, i + 3] for i in range(0, 16, 4)]


class Closed(SyncMap):
    """Samples wait until the gate is open."""

    def __init__(self, n: int, gate: threading.Event) -> None:
        super().__init__(n)
        self.gate = gate

    def __getitem__(self, index: int) -> Any:
        assert self.gate.wait(PATIENCE)
        return super().__getitem__(index)


@pytest.mark.slow
@pytest.mark.parametrize("turns", range(6))
@pytest.mark.parametrize("kind", [SyncMap, AsyncMap])
@pytest.mark.parametrize("way", ASYNC_WAYS)
async def test_tasks_get_batches_in_order_of_arrival(
    way: str, kind: Any, turns: int
) -> None:
    """Even if a batch is ready before the first task has woken up."""
    iterator = aiter(make(way, kind(16)))
    steps = []
    for _ in range(4):
        steps.append(asyncio.create_task(anext(iterator)))
        for _ in range(turns):
            await asyncio.sleep(0)
    assert labels(await bounded(asyncio.gather(*steps))) == IN_ORDER


@pytest.mark.slow
@pytest.mark.parametrize("cancelled", range(4))
@pytest.mark.parametrize("way", ASYNC_WAYS)
async def test_a_cancelled_task_loses_no_batch(way: str, cancelled: int) -> None:
    """Tasks that wait after a cancelled one move up."""
    gate = threading.Event()
    iterator = aiter(make(way, Closed(16, gate)))
    steps = [asyncio.create_task(anext(iterator)) for _ in range(4)]
    await asyncio.sleep(0)
    steps.pop(cancelled).cancel()
    await asyncio.sleep(0)
    gate.set()
    batches = await bounded(asyncio.gather(*steps, anext(iterator)))
    assert labels(batches) == IN_ORDER
    await iterator.aclose()
