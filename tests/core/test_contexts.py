"""User code sees the context variables of its consumer."""

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from aioloader import DataLoader
from beside import beside
from core.kit import ASYNC_WAYS, IN_PROCESS, THREADS, bounded, make
from samples import AsyncMap, SyncMap, collect

pytestmark = pytest.mark.slow

NAME: contextvars.ContextVar[str] = contextvars.ContextVar("NAME", default="nobody")


def consumer(_: Any = None) -> str:
    """Return the name of the consumer in this context."""
    return NAME.get()


async def consumer_async(_: Any = None) -> str:
    """Return the name of the consumer in this context."""
    await asyncio.sleep(0)
    return NAME.get()


class Sync(SyncMap):
    """Samples are the name of their consumer."""

    def __getitem__(self, index: int) -> Any:
        return consumer()


class Async(AsyncMap):
    async def __getitem__(self, index: int) -> Any:
        return await consumer_async()


class Stream(IterableDataset[str]):
    def __iter__(self) -> Any:
        for _ in range(20):
            yield consumer()


class AsyncStream:
    """The same, as a stream on a loop."""

    async def __aiter__(self) -> Any:
        for _ in range(20):
            yield await consumer_async()


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "sync dataset": (Sync, IN_PROCESS),
    "async dataset": (Async, IN_PROCESS),
    "stream": (Stream, IN_PROCESS),
    "async stream": (AsyncStream, IN_PROCESS),
    "transform": (SyncMap, {"transform": consumer}),
    "transform of async samples": (AsyncMap, {"transform": consumer}),
    "async transform": (SyncMap, {"transform": consumer_async}),
    "collate": (SyncMap, {"collate_fn": consumer}),
    "collate of async samples": (AsyncMap, {"collate_fn": consumer}),
    "async collate": (AsyncMap, {"collate_fn": consumer_async}),
    "dataset in threads": (Sync, THREADS),
    "transform in threads": (SyncMap, {**THREADS, "transform": consumer}),
    "collate in threads": (SyncMap, {**THREADS, "collate_fn": consumer}),
    "transform for threads": (AsyncMap, {**THREADS, "transform": consumer}),
}


def loader_of(case: str, way: str) -> DataLoader[Any]:
    """Return a loader whose batches hold the name of their consumer."""
    dataset, options = CASES[case]
    return make(way, dataset(), **options)


def names(batches: list[Any]) -> set[str]:
    return {name for b in batches for name in ([b] if type(b) is str else b)}


async def consume(name: str, loader: DataLoader[Any]) -> tuple[str, set[str]]:
    """Iterate in a task, which has its own context, as a request does."""
    NAME.set(name)
    batches = []
    async for batch in loader:
        batches.append(batch)
        await asyncio.sleep(0)
    return name, names(batches)


@pytest.mark.parametrize("way", ASYNC_WAYS)
@pytest.mark.parametrize("case", CASES)
async def test_concurrent_consumers_see_their_own_contexts(case: str, way: str) -> None:
    """Three tasks share one open loader."""
    people = ["ann", "bob", "cem"]
    async with loader_of(case, way) as loader:
        for _ in range(2):
            tasks = [asyncio.create_task(consume(name, loader)) for name in people]
            results = await bounded(asyncio.gather(*tasks))
            assert results == [(name, {name}) for name in people]


@pytest.mark.parametrize("case", CASES)
async def test_successive_consumers_see_their_own_contexts(case: str) -> None:
    """Two loops iterate the same open loader, each in its own context."""

    def work() -> list[set[str]]:
        seen = []
        with loader_of(case, "for") as loader:
            for name in ("ann", "bob"):
                context = contextvars.copy_context()
                context.run(NAME.set, name)
                seen.append(names(context.run(list, loader)))
        return seen

    assert await beside(work) == [{"ann"}, {"bob"}]


@pytest.mark.parametrize("way", ASYNC_WAYS)
async def test_variables_that_user_code_sets_do_not_leak(way: str) -> None:
    """A transform's value reaches neither the consumer nor a later iteration."""

    def set_other(sample: Any) -> Any:
        seen = NAME.get()
        NAME.set("other")
        return seen

    NAME.set("ann")
    loader = make(way, AsyncMap(4), transform=set_other, batch_size=1)
    async with loader:
        for _ in range(2):
            first = (await bounded(collect(loader)))[0]
            assert first == ["ann"]
    assert NAME.get() == "ann"
