"""Run what would block the test's loop in a thread of its own."""

from collections.abc import Callable
from typing import TypeVar

from aioloader._base.cpu_threads import CpuThread
from aioloader._base.waiting import Latch

T = TypeVar("T")


async def beside(function: Callable[[], T]) -> T:
    """Return ``function()``, run in a thread of its own while the loop goes on."""
    results: list[T] = []
    errors: list[BaseException] = []
    done = Latch()

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001  (raised by the caller)
            errors.append(error)

    thread = CpuThread("aioloader-once")
    thread.post(call)
    thread.stop(done.set)
    await done.wait_async()
    if errors:
        raise errors[0]
    return results[0]
