"""Datasets that fail on purpose, and a consumer that goes on."""

import asyncio
from collections.abc import Callable
from typing import Any

from aioloader import DataLoader
from beside import beside
from samples import AsyncMap, SyncMap

WAYS = ["for", "thread", "caller"]


class OddError(Exception):
    """Cannot be made from its args alone."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def failing(base: Any, *bad: int, error: Callable[[], BaseException]) -> Any:
    """Return a dataset of indices whose reads at ``bad`` raise."""

    class Sync(SyncMap):
        def __getitem__(self, index: int) -> Any:
            self.asked.append(index)
            if index in bad:
                raise error()
            return index

    class Async(AsyncMap):
        async def __getitem__(self, index: int) -> Any:
            self.asked.append(index)
            await asyncio.sleep(0)
            if index in bad:
                raise error()
            return index

    return (Sync if base is SyncMap else Async)(12)


async def drain(way: str, loader: Any) -> list[Any]:
    """Return batches as lists and errors as they are, to the end of the epoch."""
    found: list[Any] = []
    if way == "for":
        iterator = iter(loader)

        def step() -> Any:
            return next(iterator, None)

        while True:
            try:
                batch = await beside(step)
            except Exception as error:  # noqa: BLE001  (what is looked at)
                batch = error
            if batch is None:
                return found
            found.append(batch if isinstance(batch, Exception) else batch.tolist())
    iterator = aiter(loader)
    while True:
        try:
            batch = await anext(iterator, None)
        except Exception as error:  # noqa: BLE001  (what is looked at)
            batch = error
        if batch is None:
            return found
        found.append(batch if isinstance(batch, Exception) else batch.tolist())


def make(way: str, dataset: Any, **options: Any) -> Any:
    """Return a loader of batches of four for one of the three ways."""
    loop: Any = "caller" if way == "caller" else "thread"
    return DataLoader(dataset, batch_size=4, loop=loop, **options)
