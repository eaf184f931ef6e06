"""Values that belong to one event loop, and datasets that several loops may read."""

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar, Generic, Self, TypeVar
from weakref import WeakKeyDictionary

from aioloader.protocols import HasLifespan

T = TypeVar("T")


class PerLoop(Generic[T]):
    """One value per event loop, made at first use; pickles hold only the factory."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: WeakKeyDictionary[asyncio.AbstractEventLoop, T]
        self._values = WeakKeyDictionary()

    def here(self) -> T:
        loop = asyncio.get_running_loop()
        value = self._values.get(loop)
        if value is None:
            value = self._values[loop] = self._make()
        return value

    def drop(self) -> None:
        """Drop the running loop's value."""
        self._values.pop(asyncio.get_running_loop(), None)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._make,)


class LoopDataset(HasLifespan):
    """A dataset with one reader per event loop, which counts its ``users``.

    It is an async context manager, entered by loaders; the last exit on a loop releases
    the loop's reader.
    """

    # Without this, `for x in dataset` would never end: items are awaitables.
    __iter__: ClassVar[None] = None
    _readers: PerLoop[Any]

    def lifespan(self) -> Self:
        """Return the dataset itself, which a loader enters on each reading loop."""
        return self

    async def __aenter__(self) -> Self:
        self._readers.here().users += 1
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        reader = self._readers.here()
        reader.users -= 1
        if not reader.users:
            await self._release()

    async def _release(self) -> None:
        await self._readers.here().aclose()
