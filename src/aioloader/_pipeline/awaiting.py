"""Small helpers for ``await`` and for errors of user code."""

import asyncio
import inspect
import types
from collections.abc import Awaitable, Iterable
from typing import Any

from aioloader._order.blocks import Bad, failed
from aioloader._order.raising import Carried, carried, ends_task, raisable
from aioloader._pipeline.cpu import CpuThread


async def resolved(value: Any) -> Any:
    """Await ``value`` and the awaitables in its tuples, lists and dicts.

    Wrappers of async datasets (``Subset``, ``StackDataset``) return awaitables, or
    containers of them. A container's awaitables are awaited concurrently.
    """
    if inspect.isawaitable(value):
        value = await value
    if type(value) in {tuple, list} and _has_awaitable(value):
        return type(value)(await together(value))
    if type(value) is dict and _has_awaitable(value.values()):
        return dict(zip(value, await together(value.values()), strict=True))
    return value


async def together(values: Iterable[Any]) -> list[Any]:
    """Resolve ``values`` concurrently; the first error cancels the others."""
    tasks = [asyncio.ensure_future(_resolved_in_task(value)) for value in values]
    try:
        return await asyncio.gather(*tasks)
    except Carried as passed:
        raise passed.error from passed.error.__cause__
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _resolved_in_task(value: Any) -> Any:
    try:
        return await resolved(value)
    except BaseException as error:
        raise carried(error)  # noqa: B904  (it keeps its cause)


def _has_awaitable(values: Iterable[Any]) -> bool:
    return any(
        isinstance(value, Awaitable)
        or (type(value) in {tuple, list} and _has_awaitable(value))
        or (type(value) is dict and _has_awaitable(value.values()))
        for value in values
    )


def user_error(error: BaseException, what: str) -> BaseException:
    """Return the error of a user's coroutine as the consumer gets it.

    Args:
        error: The error.
        what: What raised it.

    Raises:
        BaseException: ``error``, if it ends this task.
    """
    if ends_task(error):
        raise error
    return raisable(error, what)


def holds_coroutines(samples: Any) -> bool:
    """Tell whether there is a coroutine in a list of samples."""
    return type(samples) is list and types.CoroutineType in map(type, samples)


def close_coroutines(samples: Any) -> None:
    """Close the coroutines among samples that will not be awaited."""
    if type(samples) is list:
        for sample in samples:
            if isinstance(sample, types.CoroutineType):
                sample.close()


def refuse_coroutines(values: Any, what: str) -> None:
    """Raise a clear error if a plain function has returned coroutines.

    Raises:
        TypeError: If there are coroutines; they are closed.
    """
    if isinstance(values, types.CoroutineType):
        values = [values]
    is_list = type(values) is list and values
    if not is_list or not isinstance(values[0], types.CoroutineType):
        return
    close_coroutines(values)
    raise TypeError(
        f"the {what} is a plain function but returned a coroutine; declare it (or its "
        "wrapper) `async def`, so that it runs on the loader's loop"
    )


class SideLoop:
    """An event loop in a thread, for plain code that returns awaitables.

    It starts with the first awaitable and runs until ``close``: clients and sessions
    are bound to one loop.

    Args:
        loop: The caller's loop, to await on that one instead.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop
        self._thread: CpuThread | None = None
        self._runner: asyncio.Runner | None = None

    def resolve(self, values: Iterable[Any], limit: int) -> list[Any]:
        """Await all, at most ``limit`` at a time; block until the results are there.

        A failed one is returned as ``Bad``.
        """
        if self._loop is not None:
            gathered = _gathered(values, limit)
            return asyncio.run_coroutine_threadsafe(gathered, self._loop).result()
        if self._thread is None:
            self._thread = CpuThread("aioloader-side-loop")
            self._runner = asyncio.Runner()
        runner = self._runner
        assert runner is not None
        return self._thread.wait_for(lambda: runner.run(_gathered(values, limit)))

    def wait_for(self, value: Any) -> Any:
        """Await ``value``; block until the result is there, or raise its error."""
        (found,) = self.resolve([value], 1)
        if type(found) is Bad:
            raise found.error
        return found

    def is_open(self) -> bool:
        """Tell whether its thread runs."""
        return self._thread is not None

    def close(self) -> None:
        """End the loop and its thread; a later awaitable starts another."""
        thread, self._thread = self._thread, None
        if thread is not None and self._runner is not None:
            thread.stop(self._runner.close)


async def _gathered(values: Iterable[Any], limit: int) -> list[Any]:
    places = asyncio.Semaphore(limit)

    async def one(value: Any) -> Any:
        async with places:
            try:
                return await resolved(value)
            except BaseException as error:  # handed to the policy
                return failed(user_error(error, "the dataset"))

    return await asyncio.gather(*map(one, values))
