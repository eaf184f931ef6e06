"""Values that exist once per event loop, and datasets that several loops may read."""

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar, Generic, Self, TypeVar
from weakref import WeakKeyDictionary

from aioloader.protocols import HasLifespan

T = TypeVar("T")


class PerLoop(Generic[T]):
    """One value per event loop, made at first use; only the factory is pickled."""

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
        """Forget the running loop's value; ``here`` then makes a new one."""
        self._values.pop(asyncio.get_running_loop(), None)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._make,)


class LoopDataset(HasLifespan):
    """A dataset with one reader per event loop; each reader counts its ``users``.

    Loaders enter the dataset as an async context manager. The last exit on a loop
    releases that loop's reader.
    """

    # Without this, `for x in dataset` would never end: items are awaitables.
    __iter__: ClassVar[None] = None
    _readers: PerLoop[Any]

    def lifespan(self) -> Self:
        """Return the dataset, which a loader enters on each loop that reads it."""
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
