"""State that belongs to one event loop, for datasets that several loops may read."""

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class PerLoop(Generic[T]):
    """One value for each event loop, made at first use and dropped with the loop.

    Pickles contain the factory, never the values.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values: WeakKeyDictionary[asyncio.AbstractEventLoop, T]
        self._values = WeakKeyDictionary()

    def here(self) -> T:
        """Return the value of the running loop."""
        loop = asyncio.get_running_loop()
        value = self._values.get(loop)
        if value is None:
            value = self._values[loop] = self._make()
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._make,)
