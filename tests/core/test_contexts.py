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

WHO: contextvars.ContextVar[str] = contextvars.ContextVar("WHO", default="nobody")


def who(_: Any = None) -> str:
    """Return the name of the consumer in this context."""
    return WHO.get()


async def who_async(_: Any = None) -> str:
    """Return the name of the consumer in this context."""
    await asyncio.sleep(0)
    return WHO.get()


class Sync(SyncMap):
    """Samples are the name of their consumer."""

    def __getitem__(self, index: int) -> Any:
        return who()


class Async(AsyncMap):
    """The same, on a loop."""

    async def __getitem__(self, index: int) -> Any:
        return await who_async()


class Stream(IterableDataset[str]):
    """The same, as a stream."""

    def __iter__(self) -> Any:
        for _ in range(20):
            yield who()


class AsyncStream:
    """The same, as a stream on a loop."""

    async def __aiter__(self) -> Any:
        for _ in range(20):
            yield await who_async()


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "sync dataset": (Sync, IN_PROCESS),
    "async dataset": (Async, IN_PROCESS),
    "stream": (Stream, IN_PROCESS),
    "async stream": (AsyncStream, IN_PROCESS),
    "transform": (SyncMap, {"transform": who}),
    "transform of async samples": (AsyncMap, {"transform": who}),
    "async transform": (SyncMap, {"transform": who_async}),
    "collate": (SyncMap, {"collate_fn": who}),
    "collate of async samples": (AsyncMap, {"collate_fn": who}),
    "async collate": (AsyncMap, {"collate_fn": who_async}),
    "dataset in threads": (Sync, THREADS),
    "transform in threads": (SyncMap, {**THREADS, "transform": who}),
    "collate in threads": (SyncMap, {**THREADS, "collate_fn": who}),
    "transform for threads": (AsyncMap, {**THREADS, "transform": who}),
}


def loader_of(case: str, way: str) -> DataLoader[Any]:
    """Return a loader whose batches hold the name of their consumer."""
    dataset, options = CASES[case]
    return make(way, dataset(), **options)


def names(batches: list[Any]) -> set[str]:
    """Return all names in these batches."""
    return {name for b in batches for name in ([b] if type(b) is str else b)}


async def consume(name: str, loader: DataLoader[Any]) -> tuple[str, set[str]]:
    """Iterate in a task, which has its own context, as a request does."""
    WHO.set(name)
    batches = []
    async for batch in loader:
        batches.append(batch)
        await asyncio.sleep(0)
    return name, names(batches)


@pytest.mark.parametrize("way", ASYNC_WAYS)
@pytest.mark.parametrize("case", CASES)
async def test_concurrent_consumers_see_their_own_contexts(case: str, way: str) -> None:
    """They share one open loader."""
    people = ["ann", "bob", "cem"]
    async with loader_of(case, way) as loader:
        for _ in range(2):
            tasks = [asyncio.create_task(consume(name, loader)) for name in people]
            results = await bounded(asyncio.gather(*tasks))
            assert results == [(name, {name}) for name in people]


@pytest.mark.parametrize("case", CASES)
async def test_successive_consumers_see_their_own_contexts(case: str) -> None:
    """Each iterates by ``for``, in its own context."""

    def work() -> list[set[str]]:
        seen = []
        with loader_of(case, "for") as loader:
            for name in ("ann", "bob"):
                context = contextvars.copy_context()
                context.run(WHO.set, name)
                seen.append(names(context.run(list, loader)))
        return seen

    assert await beside(work) == [{"ann"}, {"bob"}]


@pytest.mark.parametrize("way", ASYNC_WAYS)
async def test_variables_that_user_code_sets_do_not_leak(way: str) -> None:
    """Neither into the consumer's context nor into another iteration's."""

    def set_other(sample: Any) -> Any:
        seen = WHO.get()
        WHO.set("other")
        return seen

    WHO.set("ann")
    loader = make(way, AsyncMap(4), transform=set_other, batch_size=1)
    async with loader:
        for _ in range(2):
            first = (await bounded(collect(loader)))[0]
            assert first == ["ann"]
    assert WHO.get() == "ann"
