"""Waits that cancellation must not interrupt, and waits for several tasks."""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")
_AT_ONCE = 32


async def outlast(work: "asyncio.Future[Any]") -> Any:
    """Return the result of ``work``; if cancelled, wait for it to end first."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not work.cancelled():
            work.exception()  # retrieved: nobody else will
        raise cancelled
    return work.result()


async def cancel(tasks: Iterable["asyncio.Future[Any]"]) -> None:
    """Cancel tasks, and wait for them to end."""
    tasks = [*tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def off_loop(function: Callable[..., T], *args: Any, is_quick: bool) -> T:
    """Run a function in a thread, or here if that costs less than a thread."""
    return function(*args) if is_quick else await asyncio.to_thread(function, *args)


async def in_thread(
    function: Callable[..., T], *args: Any, executor: Executor | None = None
) -> T:
    """Run a function in a thread; if cancelled, wait for it to end first."""
    loop, run = asyncio.get_running_loop(), contextvars.copy_context().run
    result: T = await outlast(loop.run_in_executor(executor, run, function, *args))
    return result


async def each(
    function: Callable[[Any], Awaitable[T]], addresses: Sequence[Any]
) -> list[T]:
    """Return ``function`` of each address, several at a time, in order.

    The first failure ends the others.
    """
    found: dict[int, T] = {}
    waiting = iter(enumerate(addresses))

    async def work() -> None:
        for number, address in waiting:
            found[number] = await function(address)

    workers = [
        asyncio.ensure_future(work()) for _ in range(min(_AT_ONCE, len(addresses)))
    ]
    try:
        await asyncio.gather(*workers)
    finally:
        await cancel(workers)
    return [found[number] for number in range(len(addresses))]
