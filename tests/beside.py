"""Run a function that would block the test's loop in its own thread."""

from collections.abc import Callable
from typing import TypeVar

from aioloader._base.cancellation import in_thread
from aioloader._base.cpu_threads import CpuThread

T = TypeVar("T")


async def beside(function: Callable[[], T]) -> T:
    """Return ``function()``, run in its own thread while the loop keeps running."""
    return await in_thread(function, executor=CpuThread.once())
