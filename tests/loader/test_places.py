"""Where loaders work: any thread, any loop, nested, several at once; and what opens."""

import asyncio
import contextlib
import contextvars
import gc
import threading
import weakref
from typing import Any, Self

import pytest

from aioloader import DataLoader
from beside import beside
from samples import AsyncMap, AsyncStream, SyncMap, SyncStream, collect, labels

EXPECTED = [[i, i + 1, i + 2, i + 3] for i in range(0, 20, 4)]
KINDS = [SyncMap, AsyncMap, SyncStream, AsyncStream]


@pytest.mark.parametrize("make", KINDS)
def test_in_another_thread(make: Any) -> None:
    """``for`` and ``async for`` off the main thread."""
    found: list[Any] = []

    def work() -> None:
        loader = DataLoader(make(), batch_size=4)
        found.append(labels(list(loader)))
        found.append(labels(asyncio.run(collect(loader))))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [EXPECTED, EXPECTED]


@pytest.mark.blocking
@pytest.mark.parametrize("make", KINDS)
async def test_plain_for_inside_a_running_loop(make: Any) -> None:
    """It blocks the loop, as plain loops do, and works all the same."""
    assert labels(list(DataLoader(make(), batch_size=4))) == EXPECTED


@pytest.mark.parametrize("loop", ["thread", "caller"])
@pytest.mark.parametrize("make", KINDS)
async def test_several_at_once(make: Any, loop: Any) -> None:
    """Loaders do not disturb each other; nor do two iterations of one."""
    one, other = (DataLoader(make(), batch_size=4, loop=loop) for _ in range(2))
    found = await asyncio.gather(*map(collect, (one, one, other)))
    assert [labels(batches) for batches in found] == [EXPECTED] * 3


@pytest.mark.parametrize("loop", ["thread", "caller"])
@pytest.mark.parametrize("make", KINDS)
async def test_nested(make: Any, loop: Any) -> None:
    """A loop over a loader inside of a loop over it."""
    loader = DataLoader(make(), batch_size=4, loop=loop)
    inner = [[labels([b])[0] async for b in loader] async for _ in loader]
    assert inner == [EXPECTED] * 5


@pytest.mark.parametrize("loop", ["thread", "caller"])
def test_one_loop_after_the_other(loop: Any) -> None:
    """A loader is not tied to the first event loop that iterates it."""
    loader = DataLoader(AsyncMap(), batch_size=4, loop=loop)
    for _ in range(3):
        assert labels(asyncio.run(collect(loader))) == EXPECTED


async def test_two_consumers_share_one_iterator() -> None:
    """Each batch goes to one of them, none is lost."""
    iterator = aiter(DataLoader(AsyncMap(), batch_size=4))
    found = await asyncio.gather(*(collect(iterator) for _ in range(3)))
    assert sorted(labels([b for part in found for b in part])) == EXPECTED


def test_two_threads_share_one_iterator() -> None:
    """The same for threads, over the thread and over the loop."""
    for dataset in (SyncMap(), AsyncMap()):
        iterator = iter(DataLoader(dataset, batch_size=4, prefetch_factor=2))
        found: list[Any] = []
        threads = [
            threading.Thread(target=found.extend, args=(iterator,)) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(labels(found)) == EXPECTED


def test_for_cannot_be_hosted_on_the_callers_loop() -> None:
    """It would wait for the loop that it blocks: said at once."""
    with pytest.raises(RuntimeError, match="use `async for`, or loop='thread'"):
        next(iter(DataLoader(AsyncMap(), loop="caller")))
    assert len(list(DataLoader(SyncMap(), loop="caller"))) == 20


async def test_the_callers_loop_is_where_coroutines_run() -> None:
    """And with the default they do not run there."""
    seen: set[Any] = set()

    class Looking(AsyncMap):
        async def __getitem__(self, index: int) -> Any:
            seen.add(asyncio.get_running_loop())
            return await super().__getitem__(index)

    await collect(DataLoader(Looking(), loop="caller"))
    assert seen == {asyncio.get_running_loop()}
    seen.clear()
    await collect(DataLoader(Looking()))
    assert len(seen) == 1
    assert seen != {asyncio.get_running_loop()}


async def test_plain_functions_do_not_run_on_the_loop() -> None:
    """Transform and collate run in the loader's thread, wherever coroutines run."""
    threads: set[str] = set()

    def look(value: Any) -> Any:
        threads.add(threading.current_thread().name)
        return value

    for loop in ("thread", "caller"):
        options: Any = {"transform": look, "collate_fn": look, "loop": loop}
        await collect(DataLoader(AsyncMap(), **options))
    await collect(DataLoader(SyncMap(), transform=look, collate_fn=look))
    assert threads == {"aioloader-cpu"}


PLACE: contextvars.ContextVar[str] = contextvars.ContextVar("PLACE", default="none")


@pytest.mark.parametrize("loop", ["thread", "caller"])
async def test_context_variables_are_kept(loop: Any) -> None:
    """The user's functions see the values of whoever iterates."""
    seen: set[str] = set()

    class Looking(AsyncMap):
        async def __getitem__(self, index: int) -> Any:
            seen.add(PLACE.get())
            return index

    def look(sample: Any) -> Any:
        seen.add(PLACE.get())
        return sample

    PLACE.set("consumer")
    await collect(DataLoader(Looking(4), transform=look, loop=loop))
    await collect(DataLoader(SyncMap(4), transform=look))
    assert seen == {"consumer"}


class Opening:
    """Mixed into datasets: counts how often they are open, and says where."""

    def __init__(self) -> None:
        super().__init__(8)  # type: ignore[call-arg]
        self.opened = 0
        self.closed = 0
        self.where: list[str] = []

    def came(self) -> None:
        """Note an opening."""
        self.opened += 1
        self.where.append(threading.current_thread().name)

    def went(self) -> None:
        """Note a closing, in the same place."""
        self.closed += 1
        assert threading.current_thread().name == self.where[-1]


class AsyncOpening(Opening, AsyncMap):
    """An async context manager."""

    async def __aenter__(self) -> Self:
        await asyncio.sleep(0)
        self.came()
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await asyncio.sleep(0)
        self.went()


class SyncOpening(Opening, SyncMap):
    """A plain context manager."""

    def __enter__(self) -> Self:
        self.came()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.went()


@pytest.mark.parametrize(
    ("make", "loop", "place"),
    [
        (AsyncOpening, "thread", "aioloader-loop"),
        (AsyncOpening, "caller", "MainThread"),
        (SyncOpening, "thread", "aioloader-cpu"),
    ],
)
async def test_datasets_are_opened_and_closed_where_they_run(
    make: Any, loop: Any, place: str
) -> None:
    """Once per epoch; once for iterations at the same time; once inside ``with``."""
    dataset = make()
    loader = DataLoader(dataset, batch_size=2, loop=loop)
    await collect(loader)
    assert (dataset.opened, dataset.closed, dataset.where) == (1, 1, [place])
    await asyncio.gather(*(collect(loader) for _ in range(3)))
    assert (dataset.opened, dataset.closed) == (2, 2)
    async with loader:
        for _ in range(3):
            await collect(loader)
        assert (dataset.opened, dataset.closed) == (3, 2)
    assert (dataset.opened, dataset.closed) == (3, 3)
    await collect(loader)
    assert (dataset.opened, dataset.closed) == (4, 4)


def test_datasets_are_opened_for_plain_loops() -> None:
    """In the caller's thread, or in the loader's if there is a deadline."""
    dataset: Any = SyncOpening()
    loader = DataLoader(dataset, batch_size=2)
    list(loader)
    with loader:
        list(loader)
        list(loader)
        assert dataset.closed == 1
    assert (dataset.opened, dataset.closed) == (2, 2)
    for _ in loader:
        break
    assert (dataset.opened, dataset.closed) == (3, 3)
    list(DataLoader(dataset, batch_size=2, timeout=60))
    assert dataset.where == ["MainThread"] * 3 + ["aioloader-cpu"]
    hosted: Any = AsyncOpening()
    with DataLoader(hosted) as loader:
        list(loader)
        assert hosted.closed == 0
    assert (hosted.opened, hosted.closed) == (1, 1)


@pytest.mark.parametrize("loop", ["thread", "caller"])
async def test_a_dataset_that_does_not_open(loop: Any) -> None:
    """Its error reaches the consumer; the next epoch tries again."""

    class Shut(AsyncOpening):
        async def __aenter__(self) -> Any:
            self.came()
            raise ConnectionRefusedError(self.opened)

    class ShutSync(SyncOpening):
        def __enter__(self) -> Any:
            self.came()
            raise ConnectionRefusedError(self.opened)

    for make in (Shut, ShutSync):
        loader = DataLoader(make(), loop=loop)
        for attempt in (1, 2):
            with pytest.raises(ConnectionRefusedError, match=str(attempt)):
                await collect(loader)
            assert loader.dataset.closed == 0


@pytest.mark.parametrize("what", ["__aenter__", "__aexit__"])
async def test_errors_of_a_dataset_keep_no_iterator(what: str) -> None:
    """Neither that it does not open, nor that it does not close."""

    async def refuse(*_: object) -> Any:
        raise ConnectionRefusedError

    loader = DataLoader(type("Refusing", (AsyncOpening,), {what: refuse})())
    iterator = aiter(loader)
    left = weakref.ref(iterator)
    with contextlib.suppress(ConnectionRefusedError):
        while True:
            await anext(iterator)
    del iterator, loader
    join()  # the thread that met the error has it still
    gc.collect()
    assert left() is None


def join() -> None:
    """Wait for the threads of loaders."""
    for thread in threading.enumerate():
        if thread.name.startswith("aioloader"):
            thread.join(10)


@pytest.mark.parametrize("loop", ["thread", "caller"])
async def test_a_dataset_that_does_not_close(loop: Any) -> None:
    """Its error is raised at the end of the loop, after all batches."""

    class Stuck(AsyncOpening):
        async def __aexit__(self, *_exc: object) -> None:
            self.went()
            raise BrokenPipeError("late")

    class StuckSync(SyncOpening):
        def __exit__(self, *_exc: object) -> None:
            self.went()
            raise BrokenPipeError("late")

    for make in (Stuck, StuckSync):
        loader = DataLoader(make(), batch_size=4, loop=loop)
        with pytest.raises(BrokenPipeError, match="late"):
            await collect(loader)
        assert loader.stats().batches == 2


async def test_an_iterator_that_is_a_context_manager_is_closed() -> None:
    """A cursor, say, in the thread where it is pulled."""
    events: list[str] = []

    class Cursor:
        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            raise StopIteration

        def __enter__(self) -> Any:
            events.append("enter")
            return self

        def __exit__(self, *_exc: object) -> None:
            events.append("exit")

    class Table:
        def __iter__(self) -> Any:
            return Cursor()

    await beside(lambda: list(DataLoader(Table())))
    await collect(DataLoader(Table()))
    assert events == ["enter", "exit"] * 2


async def test_an_async_iterator_that_is_a_context_manager_is_closed() -> None:
    """The same on the loop."""
    events: list[str] = []

    class AsyncCursor:
        def __aiter__(self) -> Any:
            return self

        async def __anext__(self) -> int:
            raise StopAsyncIteration

        async def __aenter__(self) -> Any:
            events.append("aenter")
            return self

        async def __aexit__(self, *_exc: object) -> None:
            events.append("aexit")

    class AsyncTable:
        def __aiter__(self) -> Any:
            return AsyncCursor()

    await collect(DataLoader(AsyncTable()))
    assert events == ["aenter", "aexit"]
