"""Cancellation at every await: nothing lost, nothing leaked, still usable or closed."""

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any, Self

import pytest

from aioloader import DataLoader
from aioloader.testing import no_leaks
from samples import AsyncBatchMap, AsyncMap, AsyncStream, SyncMap, collect, labels

EXPECTED = [[i, i + 1, i + 2, i + 3] for i in range(0, 12, 4)]
KINDS = [SyncMap, AsyncMap, AsyncBatchMap, AsyncStream]
LOOPS: list[Any] = ["thread", "caller"]


class Suspensions:
    """Drives a coroutine and calls ``hook`` at suspension number ``position``."""

    def __init__(self, position: int, hook: Any) -> None:
        self.position = position
        self.hook = hook
        self.seen = 0

    @types.coroutine
    def drive(self, coroutine: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Run ``coroutine`` as ``await`` would."""
        value: Any = None
        error: BaseException | None = None
        while True:
            try:
                if error is None:
                    yielded = coroutine.send(value)
                else:
                    yielded = coroutine.throw(error)
            except StopIteration as stop:
                return stop.value
            if self.seen == self.position:
                self.hook()
            self.seen += 1
            try:
                value, error = (yield yielded), None
            except BaseException as thrown:  # noqa: BLE001  (as `await` would)
                value, error = None, thrown


def cancel_me() -> None:
    """Cancel the task that runs this."""
    task = asyncio.current_task()
    assert task is not None
    task.cancel()


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("make", KINDS)
async def test_a_cancelled_consumer_loses_no_batch(make: Any, loop: Any) -> None:
    """Cancelled at suspension k, for every k; then iteration resumes."""
    for position in range(100):
        with no_leaks():
            iterator = aiter(DataLoader(make(12), batch_size=4, loop=loop))
            suspensions = Suspensions(position, cancel_me)
            batches: list[Any] = []

            async def consume(
                iterator: Any = iterator,
                suspensions: Suspensions = suspensions,
                batches: list[Any] = batches,
            ) -> None:
                while True:
                    try:
                        batches.append(await suspensions.drive(iterator.__anext__()))
                    except StopAsyncIteration:
                        return

            task = asyncio.ensure_future(consume())
            await asyncio.wait([task])
            was_cancelled = task.cancelled()
            batches += [batch async for batch in iterator]
            assert labels(batches) == EXPECTED
            del iterator, task, consume
        if not was_cancelled and suspensions.seen <= position:
            return
    raise AssertionError("never ran to the end")


class Hooked(AsyncMap):
    """Calls ``hook`` at await number ``position`` of its reads."""

    def __init__(self, n: int, position: int, hook: Any) -> None:
        super().__init__(n)
        self.position = position
        self.hook = hook
        self.opened = 0

    async def step(self) -> None:
        """Suspend once."""
        self.position -= 1
        if self.position == -1:
            self.hook()
        await asyncio.sleep(0)

    async def __aenter__(self) -> Self:
        await self.step()
        self.opened += 1
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await asyncio.sleep(0)
        self.opened -= 1

    async def __getitem__(self, index: int) -> Any:
        await self.step()
        return await super().__getitem__(index)

    async def transform(self, sample: Any) -> Any:
        """Return the sample after a suspension."""
        await self.step()
        return sample

    async def collate(self, samples: list[Any]) -> Any:
        """Return the labels after a suspension."""
        await self.step()
        return [index for _, index in samples]


def hooked(position: int, hook: Any, **options: Any) -> tuple[Hooked, Any]:
    """Return a dataset that awaits in every stage, and a loader over it."""
    dataset = Hooked(12, position, hook)
    options |= {"transform": dataset.transform, "collate_fn": dataset.collate}
    return dataset, DataLoader(dataset, 4, lifespan=lambda dataset: dataset, **options)


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("in_order", [True, False])
async def test_closing_at_any_await_leaks_nothing(in_order: bool, loop: Any) -> None:
    """Close while the pipeline is at its await number k, for every k."""
    for position in range(200):
        with no_leaks():
            mine = asyncio.get_running_loop()
            reached = asyncio.Event()

            def hook(mine: Any = mine, reached: asyncio.Event = reached) -> None:
                mine.call_soon_threadsafe(reached.set)

            dataset, loader = hooked(position, hook, loop=loop, in_order=in_order)
            iterator = aiter(loader)
            task = asyncio.ensure_future(collect(iterator))
            closing = asyncio.ensure_future(reached.wait())
            await asyncio.wait([task, closing], return_when="FIRST_COMPLETED")
            was_reached = reached.is_set()
            closing.cancel()
            await asyncio.wait([closing])
            await iterator.aclose()
            batches = await task
            assert dataset.opened == 0
            del iterator, task
        if not was_reached:
            assert sorted(batches) == EXPECTED
            return
    raise AssertionError("never ran to the end")


@pytest.mark.slow
@pytest.mark.parametrize("in_order", [True, False])
def test_ending_the_callers_loop_at_any_await_leaks_nothing(in_order: bool) -> None:
    """``asyncio.run`` cancels all tasks, the loader's among them, at await number k."""
    for position in range(200):
        was_reached = False

        async def main(position: int = position) -> None:
            nonlocal was_reached
            reached = asyncio.Event()
            _, loader = hooked(position, reached.set, loop="caller", in_order=in_order)
            task = asyncio.ensure_future(collect(loader))
            waiting = asyncio.ensure_future(reached.wait())
            await asyncio.wait([task, waiting], return_when="FIRST_COMPLETED")
            was_reached = reached.is_set()

        with no_leaks():
            asyncio.run(main())
        if not was_reached:
            return
    raise AssertionError("never ran to the end")


async def test_running_reads_are_cancelled_once_and_may_clean_up() -> None:
    """A read's ``finally`` may await: cancellation is not repeated."""
    cleaned: list[int] = []
    entered = asyncio.Event()

    class Careful(AsyncMap):
        async def __getitem__(self, index: int) -> Any:
            try:
                if index == 4:
                    entered.set()
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                cleaned.append(index)

    iterator = aiter(DataLoader(Careful(8), batch_size=4, concurrency=5, loop="caller"))
    task = asyncio.ensure_future(anext(iterator))
    await entered.wait()
    task.cancel()
    await asyncio.wait([task])
    await iterator.aclose()
    assert sorted(cleaned) == [0, 1, 2, 3, 4]


async def test_aclose_waits_for_the_finally_of_a_stream() -> None:
    events: list[str] = []

    async def rows() -> Any:
        try:
            for row in range(100):
                yield row
                await asyncio.sleep(0)
        finally:
            await asyncio.sleep(0)
            events.append("closed")

    class Rows:
        def __aiter__(self) -> Any:
            return rows()

    for loop in LOOPS:
        iterator = aiter(DataLoader(Rows(), batch_size=4, loop=loop))
        await anext(iterator)
        await iterator.aclose()
    assert events == ["closed"] * 2


async def test_a_closed_iterator_yields_no_more_batches() -> None:
    """Closing again does nothing."""
    for make in KINDS:
        iterator = aiter(DataLoader(make(12), batch_size=4))
        await anext(iterator)
        await iterator.aclose()
        await iterator.aclose()
        assert [batch async for batch in iterator] == []
        unborn = aiter(DataLoader(make(12), batch_size=4))
        await unborn.aclose()
        assert [batch async for batch in unborn] == []


class Never(AsyncMap):
    """No sample ever comes."""

    async def __getitem__(self, index: int) -> Any:
        await asyncio.Event().wait()


@pytest.mark.parametrize("loop", LOOPS)
async def test_closing_ends_the_wait_of_another_task(loop: Any) -> None:
    """The waiting task sees the end of the iteration."""
    loader = DataLoader(Never(), loop=loop)
    task = asyncio.ensure_future(collect(loader))
    for _ in range(10):
        await asyncio.sleep(0)
    await loader.aclose()
    assert await task == []
