"""Nothing waits for the garbage collector: it is off in all tests here.

Tasks, threads, processes and memory of an iteration are released by the end of the
last reference to its iterator, by a close, or by a cancellation.
"""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import pytest

from aioloader import DataLoader
from aioloader.testing import no_leaks
from beside import beside
from core.kit import ASYNC_WAYS, BY, WAYS, bounded, make, quiet, released
from samples import AsyncMap, AsyncStream, SyncMap, SyncStream, labels


@pytest.fixture(autouse=True)
def uncollected(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Turn the collector off, and make ``gc.collect`` do nothing."""
    gc.collect()
    gc.disable()
    monkeypatch.setattr(gc, "collect", lambda *_generation: 0)
    yield
    monkeypatch.undo()
    gc.enable()
    gc.collect()


KINDS = [SyncMap, AsyncMap, SyncStream, AsyncStream]
# With threads, plain streams are read as without workers.
ALL = [(kind, by) for kind in KINDS for by in BY]
ALL.remove((SyncStream, "threads"))
EVERYWHERE = pytest.mark.parametrize(("kind", "by"), ALL)


# -- cancellation -------------------------------------------------------------------


@pytest.mark.slow
@EVERYWHERE
@pytest.mark.parametrize("way", ASYNC_WAYS)
async def test_a_cancelled_group_leaves_nothing(kind: Any, way: str, by: str) -> None:
    """anyio's cancellation is level-triggered; nothing holds its error."""
    async with released():
        loader = make(way, kind(4000), **BY[by])
        begun = asyncio.Event()

        async def consume() -> None:
            async for _ in loader:
                begun.set()

        async with anyio.create_task_group() as group:
            group.start_soon(consume)
            await bounded(begun.wait())
            group.cancel_scope.cancel()
        await quiet()
        assert "open=0" in repr(loader)
        if by == "processes" and kind in {AsyncMap, AsyncStream}:
            await loader.aclose()  # which keeps its fork server until then


class Never(AsyncMap):
    """Samples after the first batch never come."""

    async def __getitem__(self, index: int) -> Any:
        if index > 3:
            await asyncio.Event().wait()
        return await super().__getitem__(index)


@pytest.mark.parametrize("way", ASYNC_WAYS)
async def test_requests_cancelled_during_a_read_release_everything(way: str) -> None:
    """Requests are cancelled in ``anext``; the framework keeps their errors."""
    kept: list[BaseException] = []
    begun = asyncio.Event()

    async def request(loader: DataLoader[Any]) -> None:
        try:
            async for _ in loader:
                begun.set()
        except asyncio.CancelledError as error:
            kept.append(error)

    async with released():
        loader = make(way, Never(80))
        tasks = [asyncio.create_task(request(loader)) for _ in range(5)]
        await bounded(begun.wait())
        await quiet()
        for task in tasks:
            task.cancel()
        await bounded(asyncio.wait(tasks))
        del task, tasks
        await quiet()
        assert "open=0" in repr(loader)
    assert len(kept) == 5


class Lingering(Never):
    """Cancelled reads take a while to end."""

    def __init__(self) -> None:
        super().__init__(80)
        self.loop = asyncio.get_running_loop()
        self.cleaning, self.may_end = asyncio.Event(), asyncio.Event()
        self.cleaned = 0

    async def __getitem__(self, index: int) -> Any:
        try:
            return await super().__getitem__(index)
        finally:
            if index == 4:
                self.cleaning.set()
                await self.may_end.wait()
                self.cleaned += 1


async def test_a_second_cancellation_waits_for_the_release() -> None:
    """A task cancelled while it closes its loader ends after the release."""
    async with released():
        dataset = Lingering()
        loader = make("caller", dataset)
        begun = asyncio.Event()

        async def consume() -> None:
            async with loader:
                async for _ in loader:
                    begun.set()

        task = asyncio.create_task(consume())
        await bounded(begun.wait())
        await quiet()
        task.cancel()
        await bounded(dataset.cleaning.wait())
        for _ in range(3):
            task.cancel()
            await quiet()
            assert not task.done()
        dataset.may_end.set()
        await bounded(asyncio.wait([task]))
        assert task.cancelled()
        assert dataset.cleaned == 1
        assert len(asyncio.all_tasks()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("way", ASYNC_WAYS)
@pytest.mark.parametrize("kind", KINDS)
async def test_aclose_works_in_a_cancelled_scope(kind: Any, way: str) -> None:
    """The ``aclose`` of an iterator, and of a loader."""
    async with released():
        loader = make(way, kind(4000))
        iterator = aiter(loader)
        await anext(iterator)
        for closing in (iterator.aclose, loader.aclose):
            with anyio.CancelScope() as scope:
                scope.cancel()
                await closing()
        assert await anext(iterator, None) is None


# -- errors that are held -----------------------------------------------------------


async def iterate(way: str, loader: DataLoader[Any]) -> None:
    """Iterate to the end."""
    if way != "for":
        async for _ in loader:
            pass
        return

    def loop() -> None:
        for _ in loader:
            pass

    await beside(loop)


def fail(_: Any = None) -> Any:
    """Raise, as a read, a transform or a collate_fn."""
    raise OSError("no sample")


def failing() -> Iterator[int]:
    """Yield a few numbers and raise, as a sampler or a stream."""
    yield from range(6)
    fail()


class Failing(SyncMap):
    """No sample can be read."""

    def __getitem__(self, index: int) -> Any:
        fail()


class AsyncFailing(AsyncMap):
    async def __getitem__(self, index: int) -> Any:
        fail()


SOURCES: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "map": lambda: (Failing(400), {}),
    "async map": lambda: (AsyncFailing(400), {}),
    "transform": lambda: (AsyncMap(400), {"transform": fail}),
    "collate_fn": lambda: (AsyncMap(400), {"collate_fn": fail}),
    "sampler": lambda: (AsyncMap(400), {"sampler": failing()}),
    "stream": lambda: (failing(), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("source", SOURCES)
async def test_a_kept_error_keeps_no_pipeline(source: str, way: str, by: str) -> None:
    """The error has its traceback."""
    if by != "in process" and "map" not in source:
        pytest.skip("as in process")
    dataset, options = SOURCES[source]()
    async with released():
        loader = make(way, dataset, **options, **BY[by])
        del dataset, options
        with pytest.raises(OSError, match="no sample") as caught:
            await bounded(iterate(way, loader))
        await quiet()
        assert "open=0" in repr(loader)
    assert caught.value.__traceback__ is not None


@pytest.mark.parametrize("way", WAYS)
async def test_a_kept_error_of_the_consumer_keeps_no_pipeline(way: str) -> None:
    """Its traceback holds the frame of the loop, which has dropped the iterator."""
    async with released():
        loader = make(way, AsyncMap(400))

        def plain() -> None:
            for _ in loader:
                raise LookupError

        async def asynchronous() -> None:
            async for _ in loader:
                raise LookupError

        with pytest.raises(LookupError) as caught:
            await (beside(plain) if way == "for" else asynchronous())
        await quiet()
        assert "open=0" in repr(loader)
    assert caught.value.__traceback__ is not None


# -- references ---------------------------------------------------------------------


async def take(way: str, loader: DataLoader[Any], *, whole: bool) -> None:
    """Take a whole epoch, or one batch of it."""
    if way == "for":
        await beside(lambda: list(loader) if whole else next(iter(loader)))
        return
    async for _ in loader:
        if not whole:
            break


@pytest.mark.slow
@EVERYWHERE
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("whole", [False, True])
async def test_a_dropped_loader_keeps_no_dataset(
    whole: bool, kind: Any, way: str, by: str
) -> None:
    """No reference cycle keeps the dataset, after a break or a whole epoch."""
    dataset = kind(24)
    gone = weakref.ref(dataset)
    async with released():
        loader = make(way, dataset, **BY[by])
        await take(way, loader, whole=whole)
        del loader, dataset
    await quiet()
    assert gone() is None


# -- the iterator -------------------------------------------------------------------

EXPECTED = [[i, i + 1, i + 2, i + 3] for i in range(0, 24, 4)]


@pytest.mark.parametrize("way", ASYNC_WAYS)
@pytest.mark.parametrize("kind", KINDS)
async def test_anext_is_a_coroutine_that_loses_no_batch(kind: Any, way: str) -> None:
    """So ``create_task(anext(it))``, ``gather`` and ``wait_for`` work."""
    iterator = aiter(make(way, kind(24)))
    batches = [await bounded(asyncio.create_task(anext(iterator)))]
    batches += await bounded(asyncio.gather(anext(iterator), anext(iterator)))
    batches += [await asyncio.wait_for(anext(iterator), 20)]
    batches += [await anext(iterator, None)]
    dropped = anext(iterator)
    assert asyncio.iscoroutine(dropped)
    dropped.close()  # never started: takes no batch
    batches += [await bounded(iterator.__anext__())]
    assert labels(batches) == EXPECTED
    assert await anext(iterator, None) is None


@pytest.mark.slow
@EVERYWHERE
@pytest.mark.parametrize("way", ASYNC_WAYS)
async def test_a_pending_anext_keeps_its_iterator(kind: Any, way: str, by: str) -> None:
    """``await anext(aiter(loader))`` gets a first batch, and releases the rest."""
    async with released():
        loader = make(way, kind(24), **BY[by])
        batches = [await bounded(anext(aiter(loader)))]
        batches += [await bounded(aiter(loader).__anext__())]
        batches += [await bounded(asyncio.create_task(anext(aiter(loader))))]
        assert labels(batches) == EXPECTED[:1] * 3
        await quiet()
        assert "open=0" in repr(loader)
        if by == "processes" and kind in {AsyncMap, AsyncStream}:
            await loader.aclose()  # which keeps its fork server until then


async def close_by(how: str, loader: DataLoader[Any]) -> None:
    """Take a batch and close in one of three ways."""
    async with contextlib.AsyncExitStack() as stack:
        if how == "async with":
            await stack.enter_async_context(loader)
        iterator = aiter(loader)
        await anext(iterator)
        if how != "async with":
            await (iterator if how == "iterator" else loader).aclose()


@pytest.mark.slow
@pytest.mark.parametrize("way", ASYNC_WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["iterator", "loader", "async with"])
async def test_aclose_leaves_no_task_or_thread(how: str, kind: Any, way: str) -> None:
    """No task remains when it returns; threads end soon after."""
    async with released():
        tasks = asyncio.all_tasks()
        await close_by(how, make(way, kind(4000)))
        assert asyncio.all_tasks() == tasks


@pytest.mark.slow
@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("kind", [SyncMap, AsyncMap])
@pytest.mark.parametrize("how", ["iterator", "loader", "with"])
def test_close_leaves_no_thread_or_worker(how: str, kind: Any, by: str) -> None:
    """Worker processes have ended when ``close`` returns."""
    with no_leaks():
        loader = make("for", kind(4000), **BY[by])
        with loader if how == "with" else contextlib.nullcontext():
            iterator = iter(loader)
            next(iterator)
            if how != "with":
                (iterator if how == "iterator" else loader).close()
        loader.close()  # it keeps its fork server until then
