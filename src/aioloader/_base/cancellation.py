"""Waits that cancellation must not interrupt, and waits for several tasks."""

import asyncio
import contextvars
from collections import deque
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Sequence,
)
from concurrent.futures import Executor
from functools import partial
from typing import Any, Generic, TypeVar

from aioloader._base.waiting import looking_up

T = TypeVar("T")
_MAX_UNDER_WAY = 64


async def in_thread(
    function: Callable[..., T],
    *args: Any,
    executor: Executor | None = None,
    is_quick: bool = False,
    abandon_on_cancel: bool = False,
) -> T:
    """Run a function in a thread; a cancelled task first waits for it to end.

    The function gets a copy of this task's context. The thread is from ``executor``, or
    from the loop's default executor if None. With ``is_quick`` the function runs in the
    caller's thread, which costs less. With ``abandon_on_cancel`` a cancelled task does
    not wait; this is for functions that may hang on a server or a mount.
    """
    if is_quick:
        return function(*args)
    loop, run = asyncio.get_running_loop(), contextvars.copy_context().run
    start = partial(loop.run_in_executor, executor, run, function, *args)
    if not abandon_on_cancel:
        return await finish_despite_cancel(start())
    with looking_up(loop):
        return await start()


class finish_despite_cancel(Generic[T]):  # noqa: N801  (awaited like a coroutine)
    """Await the result of ``work``; a cancelled task first waits for it to end.

    To asyncio this object is a future (``asyncio.isfuture``) that ends with ``work``.
    """

    def __init__(self, work: "asyncio.Future[T]") -> None:
        self._work, self._is_cancelled = work, False

    def __await__(self) -> "Generator[finish_despite_cancel[T], None, T]":
        try:
            if not self._work.done():
                self._asyncio_future_blocking = True
                yield self
            return self._work.result()
        finally:
            del self._work  # a traceback would keep the error in a reference cycle
            if self._is_cancelled:
                raise asyncio.CancelledError

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._work.get_loop()

    def add_done_callback(self, *args: Any, **kwargs: Any) -> None:
        self._work.add_done_callback(*args, **kwargs)

    def cancel(self, msg: object = None) -> bool:  # noqa: ARG002
        self._is_cancelled = True
        return True


async def to_the_end(wait: Callable[[], Awaitable[T]]) -> T:
    """Await ``wait()``, again after each cancellation; then raise the last of these."""
    cancelled: asyncio.CancelledError | None = None
    try:
        while True:
            try:
                return await wait()
            except asyncio.CancelledError as error:
                cancelled = error
    finally:
        if cancelled is not None:
            raise cancelled


async def cancel(tasks: Iterable["asyncio.Future[Any]"]) -> None:
    """Cancel the tasks and wait until all have ended; their errors are dropped."""
    tasks = [*tasks]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def each(
    function: Callable[[Any], Coroutine[Any, Any, T]], addresses: Sequence[Any]
) -> list[T]:
    """Return the results of ``function`` for all addresses, awaited concurrently."""
    return [result async for result in in_order(function, addresses)]


async def in_order(
    function: Callable[[Any], Coroutine[Any, Any, T]], addresses: Sequence[Any]
) -> AsyncGenerator[T, None]:
    """Yield the results of ``function`` in the order of ``addresses``.

    Up to ``_MAX_UNDER_WAY`` calls run ahead of the next result. An error is raised in
    its turn and cancels the later calls. Callers that stop early close the generator.
    """
    under_way = deque[asyncio.Task[T]]()
    try:
        for done in range(-_MAX_UNDER_WAY, len(addresses)):
            if (number := done + _MAX_UNDER_WAY) < len(addresses):
                under_way.append(asyncio.create_task(function(addresses[number])))
            if done >= 0:
                yield await under_way.popleft()
    finally:
        await cancel(under_way)
