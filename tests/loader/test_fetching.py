"""How many batches are in flight, in which order they arrive, and timeouts."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Sampler

from aioloader import DataLoader
from aioloader.datasets import from_iterable
from aioloader.errors import BatchTimeoutError
from beside import beside
from core.kit import quiet
from samples import AsyncMap, AsyncStream, SyncMap, collect, labels
from working import Numbers


class Gated(AsyncMap):
    """Samples wait at a gate; counts those waiting."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.waiting: dict[int, asyncio.Event] = {}
        self.most = 0
        self.came = asyncio.Event()

    async def __getitem__(self, index: int) -> Any:
        gate = self.waiting[index] = asyncio.Event()
        self.most = max(self.most, len(self.waiting))
        self.came.set()
        await gate.wait()
        del self.waiting[index]
        return await super().__getitem__(index)

    def open(self, *indices: int) -> None:
        """Open the gate for some samples."""
        for index in indices:
            self.waiting[index].set()

    async def until(self, number: int) -> None:
        """Wait until ``number`` samples are at the gate."""
        while len(self.waiting) < number:
            self.came.clear()
            await self.came.wait()


async def test_a_stuck_batch_delays_no_other() -> None:
    """With ``in_order=False``."""
    gate = Gated(12)
    loader = DataLoader(gate, batch_size=2, in_order=False, loop="caller")
    iterator = aiter(loader)
    first = asyncio.ensure_future(anext(iterator))
    await gate.until(12)
    gate.open(*range(1, 12))
    batches = [await first]
    batches += [await anext(iterator) for _ in range(4)]
    gate.open(0)
    batches += [batch async for batch in iterator]
    assert labels(batches)[-1] == [0, 1]
    assert sorted(labels(batches)) == [[i, i + 1] for i in range(0, 12, 2)]


@pytest.mark.parametrize("way", ["caller", "thread", "for"])
@pytest.mark.parametrize("factor", [1, 2, 5])
async def test_prefetch_factor_is_exact(factor: int, way: str) -> None:
    """After k batches, exactly k + prefetch_factor were read."""
    dataset: Any = AsyncMap(60) if way == "caller" else SyncMap(60)
    loop: Any = "caller" if way == "caller" else "thread"
    loader = DataLoader(
        dataset, batch_size=3, prefetch_factor=factor, loop=loop, concurrency=100
    )
    iterator = iter(loader) if way == "for" else aiter(loader)
    for taken in range(1, 6):
        if way == "for":
            await beside(partial(next, iterator))
        else:
            await anext(iterator)
        await (quiet() if way == "caller" else thread_is_idle(iterator))
        assert len(dataset.asked) == 3 * (taken + factor)
    await iterator.aclose()


async def thread_is_idle(iterator: Any) -> None:
    """Wait until the loader's thread has done its work."""
    idle = asyncio.Event()
    loop = asyncio.get_running_loop()
    iterator._core.feed.pipeline.runner.cpu.post(
        lambda: loop.call_soon_threadsafe(idle.set)
    )
    await idle.wait()


class Meeting(AsyncMap):
    """Each sample blocks a thread until all samples of the batch do."""

    def __init__(self, parties: int) -> None:
        super().__init__(120)
        self.parties = parties

    @cached_property
    def barrier(self) -> threading.Barrier:
        """Made in the process that reads; it breaks if there are too few threads."""
        return threading.Barrier(self.parties, timeout=10)

    async def __getitem__(self, index: int) -> Any:
        await asyncio.to_thread(self.barrier.wait)
        return index


class MeetingLater(Meeting):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}], ids=str)
@pytest.mark.parametrize("kind", [Meeting, MeetingLater])
def test_all_concurrent_reads_may_block_threads(kind: Any, options: Any) -> None:
    """There are as many threads as ``concurrency``, even after it has grown."""
    with DataLoader[Any](kind(40), 40, concurrency=40, **options) as loader:
        assert [len(batch) for batch in loader] == [40, 40, 40]
        if not options:
            loader.dataset.barrier = threading.Barrier(60, timeout=10)
            loader.concurrency = loader.batch_sampler.batch_size = 60
            assert [len(batch) for batch in loader] == [60, 60]


async def test_the_default_window_follows_from_concurrency() -> None:
    """The window is ceil(concurrency / batch_size) + 3 batches."""
    for batch_size, concurrency, window in ((4, 10, 6), (64, 64, 4), (100, 8, 4)):
        dataset = AsyncMap(1000)
        loader = DataLoader(
            dataset, batch_size=batch_size, concurrency=concurrency, loop="caller"
        )
        iterator = aiter(loader)
        for _ in range(2):  # the first batch has a head start
            await anext(iterator)
        await quiet()
        assert len(dataset.asked) == batch_size * (2 + window)
        await iterator.aclose()


@pytest.mark.parametrize("make", [SyncMap, AsyncMap])
async def test_making_iterators_reads_nothing(make: Any) -> None:
    """``iter`` and ``aiter`` are lazy."""
    dataset = make()
    loader = DataLoader(dataset, batch_size=4, timeout=5)
    iter(loader)
    aiter(loader)
    assert dataset.asked == []


async def test_a_stream_is_read_no_further_than_the_window() -> None:
    pulled = []

    class Counting(AsyncStream):
        async def __aiter__(self) -> Any:
            async for item in super().__aiter__():
                pulled.append(item)
                yield item

    loader = DataLoader(Counting(60), batch_size=4, prefetch_factor=2, loop="caller")
    iterator = aiter(loader)
    await anext(iterator)
    await quiet()
    assert len(pulled) == 12
    await iterator.aclose()


def test_stats_count_delivered_batches() -> None:
    """The statistics are those of the latest epoch."""
    loader = DataLoader(AsyncMap(20), batch_size=4)
    assert loader.stats().epoch == -1
    list(loader)
    for taken, _ in enumerate(loader, 1):
        stats = loader.stats()
        assert (stats.epoch, stats.batches) == (1, taken)
    assert loader.stats().in_flight == 0
    assert loader.stats().waited > 0


class Tallied(Numbers):
    """Adds a byte to a file for each sample that is read."""

    def __init__(self, path: Path) -> None:
        super().__init__(800)
        self.path = path

    def __getitem__(self, index: int) -> int:
        with self.path.open("ab", buffering=0) as file:
            file.write(b"x")
        return index


class TalliedAsync(Tallied):
    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return super().__getitem__(index)


def tallied_stream(path: Path) -> Any:
    samples = Tallied(path)
    return from_iterable(lambda: map(samples.__getitem__, range(800)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "options", "most"),
    [
        (TalliedAsync, {}, 64 // 8 + 3),
        (TalliedAsync, {"concurrency": 20}, 3 + 3),
        (TalliedAsync, {"num_workers": 2}, 2 * 64 // 8 + 2 * 3),
        (TalliedAsync, {"num_workers": 2, "prefetch_factor": 3}, 2 * 3),
        (TalliedAsync, {"prefetch_bytes": 160}, 3),
        (Tallied, {}, 0),
        (Tallied, {"timeout": 60}, 2),
        (Tallied, {"num_workers": 2, "prefetch_factor": 3}, 2 * 3),
        (tallied_stream, {}, 64 // 8 + 3 + 64),
        (tallied_stream, {"num_workers": 2}, 2 * 64 // 8 + 2 * 3),
        (tallied_stream, {"prefetch_factor": 3}, 3),
    ],
)
def test_no_more_is_in_flight_than_the_guide_says(
    make: Any, options: dict[str, Any], most: int, tmp_path: Path
) -> None:
    """See ``Limit memory`` in ``docs/guides/workers.md``; batches of eight samples."""
    path = tmp_path / "tally"
    delivered = 0
    with DataLoader(make(path), 8, **options) as loader:
        for batch in loader:
            delivered += len(batch)
            assert path.stat().st_size - delivered <= 8 * most
    assert delivered == 800


def test_a_plain_async_for_has_no_more_than_the_guide_says(tmp_path: Path) -> None:
    async def take() -> None:
        delivered = 0
        async for batch in DataLoader(Tallied(tmp_path / "tally"), 8):
            delivered += len(batch)
            assert (tmp_path / "tally").stat().st_size - delivered <= 8 * 66

    asyncio.run(take())


class Stuck:
    """Mixin for datasets: one sample waits until ``let_through`` is set."""

    def __init__(self, stuck: int) -> None:
        super().__init__(8)  # type: ignore[call-arg]
        self.stuck = stuck
        self.entered = threading.Event()
        self.let_through = threading.Event()


class StuckAsync(Stuck, AsyncMap):
    """The sample waits on the loop."""

    async def __getitem__(self, index: int) -> Any:
        if index == self.stuck:
            self.entered.set()
            await beside(self.let_through.wait)
        return await super().__getitem__(index)


class StuckSync(Stuck, SyncMap):
    """The sample blocks its thread."""

    def __getitem__(self, index: int) -> Any:
        if index == self.stuck:
            self.entered.set()
            self.let_through.wait()
        return super().__getitem__(index)


def check(error: BatchTimeoutError, make: Any) -> None:
    """Check that the message names batch, stage, index and, for a thread, the line."""
    text = str(error)
    assert "DataLoader timed out after 0.02 seconds: batch 1 has been in stage" in text
    assert "'fetch'" in text
    assert "first index 5" in text
    assert "queues: " in text
    assert (error.batch, error.timeout) == (1, 0.02)
    assert ("self.let_through.wait()" in text) is (make is StuckSync)


@pytest.mark.parametrize("way", ["for", "async for"])
@pytest.mark.parametrize("make", [StuckAsync, StuckSync])
async def test_a_batch_that_timed_out_is_delivered_later(make: Any, way: str) -> None:
    """Here without workers."""
    dataset = make(stuck=5)
    loader: Any = DataLoader(dataset, batch_size=4, timeout=0.02)
    iterator = iter(loader) if way == "for" else aiter(loader)
    batches: list[Any] = []
    caught: list[RuntimeError] = []
    while len(batches) < 2:
        is_stuck = dataset.entered.is_set() and len(batches) == 1
        try:
            batches.append(
                await beside(partial(next, iterator))
                if way == "for"
                else await anext(iterator)
            )
        except RuntimeError as error:
            caught += [error] * is_stuck
            if len(caught) == 2:
                dataset.let_through.set()
    for timeout in caught[:2]:
        assert isinstance(timeout, BatchTimeoutError)
        check(timeout, make)
    assert labels(batches) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    await iterator.aclose()


def test_a_ready_batch_never_times_out() -> None:
    """The timeout counts from the moment when the consumer waits."""
    loader = DataLoader(SyncMap(8), batch_size=4, timeout=1e-9, prefetch_factor=2)
    iterator = iter(loader)
    taken: list[Any] = []
    while len(taken) < 2:
        try:
            taken.append(next(iterator))
        except BatchTimeoutError:
            feed: Any = iterator._core.feed
            feed.pipeline.ready.wait()
    assert labels(taken) == [[0, 1, 2, 3], [4, 5, 6, 7]]


async def test_a_timeout_names_a_stuck_collate_fn() -> None:
    gate, entered = threading.Event(), threading.Event()

    def collate(samples: Any) -> Any:
        entered.set()
        gate.wait()
        return samples

    loader = DataLoader(AsyncMap(4), batch_size=4, collate_fn=collate, timeout=0.01)
    iterator = aiter(loader)
    is_there = False
    while not is_there:
        is_there = entered.is_set()
        with pytest.raises(BatchTimeoutError) as caught:
            await anext(iterator)
    assert "batch 0 has been in stage 'collate'" in str(caught.value)
    gate.set()
    await iterator.aclose()


async def test_giving_up_after_a_timeout_releases_everything() -> None:
    """A read that is still stuck is cancelled."""
    dataset = StuckAsync(stuck=0)
    with pytest.raises(TimeoutError):
        async for _ in DataLoader(dataset, batch_size=4, timeout=0.01, loop="caller"):
            pass
    dataset.let_through.set()
    await asyncio.sleep(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "timeout", [1, 0.5, np.float32(0.5), np.int64(1), Fraction(1, 2)]
)
def test_a_timeout_is_shown_as_it_was_given(timeout: Any) -> None:
    """Scripts look for torch's message: "1", and not "1.0"."""
    dataset = StuckSync(stuck=0)
    iterator = iter(DataLoader(dataset, batch_size=4, timeout=timeout))
    with pytest.raises(BatchTimeoutError, match=f"timed out after {timeout} seconds"):
        next(iterator)
    dataset.let_through.set()
    iterator.close()


class Doubled(Numbers):
    """Doubles an index, or several at once."""

    def __getitem__(self, index: Any) -> Any:
        return 2 * torch.as_tensor(index)


class DoubledAsync(Doubled):
    async def __getitem__(self, index: Any) -> Any:
        await asyncio.sleep(0)
        return super().__getitem__(index)


class Reusing(Sampler[Any]):
    """Yields the same object each time, with new indices."""

    def __init__(self, make: Callable[[list[int]], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[Any]:
        batch = self.make([0, 0])
        for first in range(0, 12, 2):
            batch[:] = self.make([first, first + 1])
            yield batch


@pytest.mark.parametrize("make", [list, np.array, torch.tensor])
@pytest.mark.parametrize("kind", [Doubled, DoubledAsync])
async def test_indices_of_a_reused_buffer_are_copied(make: Any, kind: Any) -> None:
    """A batch may be read after the sampler's next step."""
    sampler = Reusing(make)
    samples = {"sampler": sampler, "batch_size": None}
    for options in ({"batch_sampler": sampler}, samples):
        loader: Any = DataLoader(kind(), **options)
        batches = [batch.tolist() for batch in await collect(loader)]
        assert batches == [[2 * first, 2 * first + 2] for first in range(0, 12, 2)]
