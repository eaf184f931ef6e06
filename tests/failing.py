"""Datasets that fail on purpose, and a consumer that continues after errors."""

import asyncio
from collections.abc import Callable
from typing import Any

from core.kit import step
from samples import AsyncMap, SyncMap


class OddError(Exception):
    """Cannot be rebuilt from its ``args``."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


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
    """Return batches as lists, and errors as they are, until the end of the epoch."""
    iterator = iter(loader) if way == "for" else aiter(loader)
    results: list[Any] = []
    while True:
        try:
            batch = await step(way, iterator)
        except Exception as error:  # noqa: BLE001  (a result)
            batch = error
        if batch is None:
            return results
        results.append(batch if isinstance(batch, Exception) else batch.tolist())
