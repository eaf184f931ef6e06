"""Waiting for what is not to be broken off."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


async def outlast(work: "asyncio.Future[Any]") -> Any:
    """Return the result of ``work``; a cancellation waits for its end."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not work.cancelled():
            work.exception()  # seen: nobody else will ask for it
        raise cancelled
    return work.result()


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Run a function in a thread; a cancellation waits for its end."""
    loop = asyncio.get_running_loop()
    result: T = await outlast(loop.run_in_executor(None, function, *args))
    return result
