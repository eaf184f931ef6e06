"""Waits that cancellation must not interrupt, and waits for several tasks."""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, TypeVar

from aioloader._base.waiting import resolve

T = TypeVar("T")
_AT_ONCE = 32


async def in_thread(
    function: Callable[..., T],
    *args: Any,
    executor: Executor | None = None,
    is_quick: bool = False,
    abandon_on_cancel: bool = False,
) -> T:
    """Run a function in a thread; if cancelled, wait for it to end first.

    Args:
        function: Called with a copy of this task's context.
        *args: Its arguments.
        executor: Has the thread; None: the loop's executor.
        is_quick: Whether it costs less than a thread, and so runs here.
        abandon_on_cancel: Whether a cancelled task does not wait: for functions that
            may wait for ever, as for a server, and that nothing depends on.
    """
    if is_quick:
        return function(*args)
    loop, run = asyncio.get_running_loop(), contextvars.copy_context().run
    start = partial(loop.run_in_executor, executor, run, function, *args)
    result: T = await (start() if abandon_on_cancel else outlast(start()))
    return result


async def outlast(work: "asyncio.Future[Any]") -> Any:
    """Return the result of ``work``; if cancelled, wait for it to end first."""
    await to_the_end(partial(_ended, work))
    try:
        return work.result()
    finally:
        del work  # no frame of an error's traceback holds the error


async def to_the_end(wait: Callable[[], Awaitable[object]]) -> None:
    """Wait, again after each cancellation of this task; then raise the last one."""
    cancelled: asyncio.CancelledError | None = None
    try:
        while True:
            try:
                await wait()
            except asyncio.CancelledError as error:
                cancelled = error
            else:
                return
    finally:
        if cancelled is not None:
            raise cancelled


def _ended(work: "asyncio.Future[Any]") -> "asyncio.Future[None]":
    """Return what is done when ``work`` is; cancellation does not reach ``work``."""
    ended: asyncio.Future[None] = work.get_loop().create_future()

    def end(_work: object) -> None:
        if not work.cancelled():
            work.exception()  # retrieved, also if cancellation is raised instead
        resolve(ended)

    work.add_done_callback(end)
    return ended


async def cancel(tasks: Iterable["asyncio.Future[Any]"]) -> None:
    """Cancel tasks, and wait for them to end."""
    tasks = [*tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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
