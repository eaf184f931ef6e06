"""Run what would block the test's loop in a thread of its own."""

from collections.abc import Callable
from typing import TypeVar

from aioloader._base.cancellation import in_thread
from aioloader._base.cpu_threads import CpuThread

T = TypeVar("T")


async def beside(function: Callable[[], T]) -> T:
    """Return ``function()``, run in a thread of its own while the loop goes on."""
    return await in_thread(function, executor=CpuThread.once())
