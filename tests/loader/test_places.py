"""Where loaders work: any thread, any loop, nested, several at once."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import sniffio
import trio

from aioloader import DataLoader
from aioloader._pipeline import pipeline as run
from samples import AsyncMap, AsyncStream, SyncMap, SyncStream, collect, labels

EXPECTED = [[i, i + 1, i + 2, i + 3] for i in range(0, 20, 4)]
KINDS = [SyncMap, AsyncMap, SyncStream, AsyncStream]


@pytest.mark.parametrize("loop", ["thread", "caller"])
@pytest.mark.parametrize("make", KINDS)
async def test_nested(make: Any, loop: Any) -> None:
    """A loop over a loader inside of a loop over it."""
    loader = DataLoader(make(), batch_size=4, loop=loop)
    inner = [[labels([b])[0] async for b in loader] async for _ in loader]
    assert inner == [EXPECTED] * 5


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


async def test_for_does_not_block_the_callers_loop_forever() -> None:
    """Nor over an iterator of ``async for``."""
    iterator = aiter(DataLoader(AsyncMap(), batch_size=4, loop="caller"))
    with pytest.raises(RuntimeError, match="a plain `for` would block it"):
        next(iterator)
    await iterator.aclose()


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


class Blocking(SyncMap):
    """Plain code that runs a loop itself, over an async dataset that it holds."""

    def __init__(self) -> None:
        super().__init__(4)
        self.inner = AsyncMap(4)

    def __getitem__(self, index: int) -> Any:
        return asyncio.run(self.inner[index])


async def test_plain_functions_do_not_run_on_the_loop() -> None:
    """They run in the loader's thread, wherever coroutines run."""
    threads: set[str] = set()

    def look(value: Any) -> Any:
        threads.add(threading.current_thread().name)
        return value

    for loop in ("thread", "caller"):
        options: Any = {"transform": look, "collate_fn": look, "loop": loop}
        await collect(DataLoader(AsyncMap(), **options))
        assert labels(await collect(DataLoader(Blocking(), 4, loop=loop))) == [
            [0, 1, 2, 3]
        ]
    await collect(DataLoader(SyncMap(), transform=look, collate_fn=look))
    assert threads == {"aioloader-cpu"}


class AnyioMap(AsyncMap):
    """Reads by anyio, as datasets for any async library do."""

    async def __getitem__(self, index: int) -> Any:
        await anyio.lowlevel.checkpoint()
        assert sniffio.current_async_library() == "asyncio"
        return await super().__getitem__(index)


class AnyioStream(AsyncStream):
    """Streams by anyio."""

    async def __aiter__(self) -> AsyncIterator[Any]:
        await anyio.lowlevel.checkpoint()
        async for item in super().__aiter__():
            yield item


def iterate(make: Callable[[], Any]) -> list[list[int]]:
    return labels(list(DataLoader(make(), batch_size=4)))


async def iterate_plainly(make: Callable[[], Any]) -> list[list[int]]:
    return iterate(make)


async def iterate_async(make: Callable[[], Any], loop: Any) -> list[list[int]]:
    """Iterate twice while entered, so that the second joins a host that runs."""
    async with DataLoader(make(), batch_size=4, loop=loop) as loader:
        assert labels(await collect(loader)) == EXPECTED
        return labels(await collect(loader))


@pytest.mark.parametrize("loop", ["thread", "caller"])
@pytest.mark.parametrize("make", [*KINDS, AnyioMap, AnyioStream])
def test_in_an_anyio_application(make: Any, loop: Any) -> None:
    """anyio keeps the name of its backend in a context variable, where sniffio is."""
    assert anyio.run(iterate_async, make, loop) == EXPECTED


@pytest.mark.blocking
@pytest.mark.parametrize("make", [*KINDS, AnyioMap, AnyioStream])
@pytest.mark.parametrize(
    "start",
    [trio.run, partial(anyio.run, backend="trio"), anyio.run],
    ids=["trio", "anyio on trio", "anyio"],
)
def test_plain_for_inside_of_any_library(start: Any, make: Any) -> None:
    """The loader's own loop is asyncio's, whatever runs where it is made."""
    assert start(iterate_plainly, make) == EXPECTED


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("loop", ["thread", "caller"])
@pytest.mark.parametrize("make", KINDS)
def test_async_for_under_trio(make: Any, loop: Any, num_workers: int) -> None:
    """It names asyncio, and leaves nothing behind."""

    async def consume() -> None:
        loader = DataLoader(make(), batch_size=4, loop=loop, num_workers=num_workers)
        async for _ in loader:
            raise AssertionError("no batch can come")

    with pytest.raises(RuntimeError, match="needs asyncio"):
        trio.run(consume)


@pytest.mark.parametrize(
    "part", [(run.Pipeline, "main"), (run, "Lanes")], ids=["start", "tasks"]
)
@pytest.mark.parametrize("loop", ["thread", "caller"])
async def test_a_pipeline_that_cannot_start_fails_its_consumer(
    loop: Any, part: tuple[Any, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes wrong as it, or its own tasks, begin is raised by the first batch."""

    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise LookupError("planted")

    monkeypatch.setattr(*part, refuse)
    loader = DataLoader(AsyncMap(), batch_size=4, loop=loop)
    with pytest.raises(LookupError, match="planted"):
        await collect(loader)
    monkeypatch.undo()
    assert labels(await collect(loader)) == EXPECTED
