"""Beside anyio, sniffio and trio: every async loader runs, or says what it needs."""

import asyncio
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


@pytest.mark.parametrize("loop", ["thread", "caller"])
async def test_in_an_asyncio_application(loop: Any) -> None:
    """The task group is used by its own task, never by a callback."""
    assert await iterate_async(AnyioMap, loop) == EXPECTED


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


@pytest.mark.parametrize("loop", ["thread", "caller"])
async def test_a_pipeline_that_cannot_start_fails_its_consumer(
    loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes wrong while it is started is raised by the first batch."""

    def refuse(self: Any) -> None:
        raise LookupError("planted")

    monkeypatch.setattr(run.Pipeline, "main", refuse)
    loader = DataLoader(AsyncMap(), batch_size=4, loop=loop)
    with pytest.raises(LookupError, match="planted"):
        await collect(loader)
    monkeypatch.undo()
    assert labels(await collect(loader)) == EXPECTED


@pytest.mark.parametrize("loop", ["thread", "caller"])
async def test_a_pipeline_that_fails_at_once_fails_its_consumer(
    loop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So is what goes wrong as its own tasks begin."""

    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise LookupError("planted")

    monkeypatch.setattr(run, "Lanes", refuse)
    loader = DataLoader(AsyncMap(), batch_size=4, loop=loop)
    with pytest.raises(LookupError, match="planted"):
        await collect(loader)
    monkeypatch.undo()
    assert labels(await collect(loader)) == EXPECTED


async def test_a_pipeline_that_is_dropped_before_it_starts() -> None:
    """Its lease is returned, and the host ends."""
    loader = DataLoader(AsyncMap(), batch_size=4, loop="caller")
    iterator = aiter(loader)
    step = asyncio.ensure_future(anext(iterator))
    await asyncio.sleep(0)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    await iterator.aclose()
    assert labels(await collect(loader)) == EXPECTED
