"""Context variables: the user's code sees those of the consumer that it works for."""

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
    """Say for whom this runs."""
    return WHO.get()


async def who_async(_: Any = None) -> str:
    """Say for whom this runs."""
    await asyncio.sleep(0)
    return WHO.get()


class Sync(SyncMap):
    """Samples say for whom they are read."""

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
    """Return a loader whose batches say for whom they were made."""
    dataset, options = CASES[case]
    return make(way, dataset(), **options)


def names(batches: list[Any]) -> set[str]:
    """Return for whom these batches were made."""
    return {name for one in batches for name in ([one] if type(one) is str else one)}


async def consume(name: str, loader: DataLoader[Any]) -> tuple[str, set[str]]:
    """Iterate as a request does: in a task, thus in a context."""
    WHO.set(name)
    found = []
    async for batch in loader:
        found.append(batch)
        await asyncio.sleep(0)
    return name, names(found)


@pytest.mark.parametrize("way", ASYNC_WAYS)
@pytest.mark.parametrize("case", CASES)
async def test_two_consumers_at_once(case: str, way: str) -> None:
    """Of one loader that the service shares, kept open."""
    people = ["ann", "bob", "cem"]
    async with loader_of(case, way) as loader:
        for _ in range(2):
            tasks = [asyncio.create_task(consume(name, loader)) for name in people]
            found = await bounded(asyncio.gather(*tasks))
            assert found == [(name, {name}) for name in people]


@pytest.mark.parametrize("case", CASES)
async def test_one_consumer_after_the_other(case: str) -> None:
    """By plain loops, each in a context."""

    def work() -> list[set[str]]:
        found = []
        with loader_of(case, "for") as loader:
            for name in ("ann", "bob"):
                context = contextvars.copy_context()
                context.run(WHO.set, name)
                found.append(names(context.run(list, loader)))
        return found

    assert await beside(work) == [{"ann"}, {"bob"}]


@pytest.mark.parametrize("way", ASYNC_WAYS)
async def test_what_user_code_sets_stays_in_it(way: str) -> None:
    """Not in the consumer's context, nor in another iteration's."""

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
