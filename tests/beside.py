"""Run a function that would block the test's loop in its own thread."""

from collections.abc import Callable
from typing import TypeVar

from aioloader._base.cpu_threads import CpuThread
from aioloader._base.outlast import in_thread

T = TypeVar("T")


async def beside(function: Callable[[], T]) -> T:
    """Return ``function()``, run in its own thread while the loop keeps running."""
    return await in_thread(function, executor=CpuThread.once())
