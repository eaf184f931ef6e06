"""Helpers that run awaitables for plain code and report errors of user code."""

import asyncio
import concurrent.futures
import threading
import types
from collections.abc import Coroutine, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from aioloader._base.awaitables import close_coroutines, resolved
from aioloader._base.blocks import FailedSample, failed
from aioloader._base.forks import fork_safe
from aioloader._base.raising import ends_task, iterator_closed, raisable
from aioloader._base.waiting import LOOK_UP

if TYPE_CHECKING:
    from aioloader._pipeline.runner import LoopRunner

T = TypeVar("T")


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends; return its result."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise AssertionError("reading a plain iterator suspended")


def user_error(error: BaseException, source: str) -> BaseException:
    """Return the error to report; re-raise ``error`` if it ends this task."""
    if ends_task(error):
        raise error
    return raisable(error, source)


def refuse_coroutines(values: Any, source: str) -> None:
    """Raise a TypeError if a plain function has returned coroutines; close them."""
    if isinstance(values, types.CoroutineType):
        values = [values]
    if type(values) is not list or types.CoroutineType not in map(type, values):
        return
    close_coroutines(values)
    raise TypeError(
        f"the {source} is a plain function but returned a coroutine; declare it (or "
        "its wrapper) `async def`, so that it runs on the loader's loop"
    )


class SideLoop:
    """An event loop for awaitables that plain code in other threads has returned.

    If no loop is given, the first awaitable starts a loop in a thread. This loop runs
    until ``close``, because clients and sessions are bound to one loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop
        self._runner: LoopRunner | None = None  # of a loop that this object has started
        self._pending: set[concurrent.futures.Future[list[Any]]] = set()
        self._lock = fork_safe(threading.RLock())  # a finalizer may need it too
        self.is_closed: bool = False

    def resolve(self, values: Iterable[Any], limit: int) -> list[Any]:
        """Block until all values are awaited, ``limit`` at a time; return the results.

        Errors are returned as ``FailedSample``. If ``close`` is called meanwhile, the
        awaiting is cancelled, and ``LoaderClosedError`` is raised.
        """
        with self._lock:
            if self.is_closed:
                raise iterator_closed()
            if self._loop is None:
                from aioloader._pipeline.runner import LoopRunner

                self._runner = runner = LoopRunner()
                runner.start()
                self._loop = runner.loop
            if self._runner is not None:
                self._runner.allow(limit)
            gathered = _gathered(values, limit)
            future = asyncio.run_coroutine_threadsafe(gathered, self._loop)
            self._pending.add(future)
        try:
            while concurrent.futures.wait([future], LOOK_UP).not_done:
                pass  # Python handles signals here
            return future.result()
        except concurrent.futures.CancelledError:
            raise iterator_closed() from None
        finally:
            future.cancel()  # after Ctrl-C
            self._pending.discard(future)

    def wait_for(self, value: Any) -> Any:
        """Block until ``value`` is awaited; return its result, or raise its error."""
        (result,) = self.resolve([value], 1)
        if type(result) is FailedSample:
            raise result.error
        return result

    def close(self) -> None:
        """Cancel all waits; end the loop if this object owns it. Safe in finalizers."""
        with self._lock:
            self.is_closed = True
            for future in list(self._pending):
                future.cancel()
            runner, self._runner = self._runner, None
            if runner is not None:
                runner.release()


async def _gathered(values: Iterable[Any], limit: int) -> list[Any]:
    permits = asyncio.Semaphore(limit)

    async def await_value(value: Any) -> Any:
        async with permits:
            try:
                return await resolved(value)
            except BaseException as error:  # handed to the policy
                return failed(user_error(error, "the dataset"))

    return await asyncio.gather(*map(await_value, values))
