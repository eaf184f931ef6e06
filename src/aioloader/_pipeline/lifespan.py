"""The context manager of a dataset's resources, entered where samples are read.

The user's ``lifespan=`` function returns it; the loader never enters the dataset
itself. However the iteration ends, the context manager exits without an exception, so
that code after a bare ``yield`` runs.
"""

import contextlib
import inspect
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial
from typing import Any, TypeAlias

from aioloader._base.cancellation import in_thread
from aioloader._base.failures import noted
from aioloader._base.raising import ends_task, raisable
from aioloader._base.waiting import context_elsewhere
from aioloader.protocols import (
    Kind,
    is_async_function,
    kind_of,
    own_datasets,
    reads_async,
)

MakeLifespan: TypeAlias = Callable[
    [Any], AbstractContextManager[Any] | AbstractAsyncContextManager[Any]
]

_ADVICE = (
    "return a plain context manager (contextlib.contextmanager), or read with "
    "coroutine functions"
)


class Lifespan:
    """A dataset's context manager in one thread or loop; may be entered repeatedly."""

    def __init__(self, dataset: Any, make: MakeLifespan | None = None) -> None:
        self._dataset = dataset
        self._make = make
        self._stack = contextlib.ExitStack()
        self._loop_stack = contextlib.AsyncExitStack()

    def enter(self) -> None:
        """Enter a plain context manager in this thread; refuse an async one."""
        if self._make is None:
            return
        try:
            self._refuse_async(self._enter_plain(self._make))
        except BaseException as error:
            raise _noted(error, "entering")  # noqa: B904  (it keeps its cause)

    def leave(self) -> None:
        """Exit the context manager, in the thread that entered it."""
        try:
            self._stack.close()
        except BaseException as error:
            raise _noted(error, "leaving")  # noqa: B904  (it keeps its cause)

    async def enter_async(self, thread: Executor) -> None:
        """Enter on this loop, or in ``thread`` if the manager and reads are plain."""
        make = self._make
        manager: Any = None
        try:
            for dataset in own_datasets(self._dataset):
                await self._loop_stack.enter_async_context(dataset.lifespan())
            if make is not None and reads_on_loop(self._dataset):
                manager = self._made(make)
            elif make is not None:
                # Pushed first: a cancelled entry still completes. Both share a context.
                run = context_elsewhere().run
                call = partial(in_thread, run, executor=thread, abandon_on_cancel=True)
                self._loop_stack.push_async_callback(call, self._stack.close)
                manager = await call(self._enter_plain, make)
            if hasattr(manager, "__aenter__"):
                await self._loop_stack.enter_async_context(manager)
            elif manager is not None:
                self._loop_stack.enter_context(manager)
        except BaseException as error:
            if ends_task(error):
                raise
            raise _noted(error, "entering")  # noqa: B904  (it keeps its cause)

    async def leave_async(self) -> None:
        """Exit what ``enter_async`` entered, on the same loop and thread."""
        try:
            await self._loop_stack.aclose()
        except BaseException as error:
            if ends_task(error):
                raise
            raise _noted(error, "leaving")  # noqa: B904  (it keeps its cause)

    def _enter_plain(self, make: MakeLifespan) -> Any:
        """Make the manager; enter it in this thread if it is plain, else return it."""
        manager = self._made(make)
        if not hasattr(manager, "__enter__"):
            return manager
        self._stack.enter_context(manager)
        return None

    def _made(self, make: MakeLifespan) -> Any:
        manager = make(self._dataset)
        if hasattr(manager, "__enter__") or hasattr(manager, "__aenter__"):
            return manager
        if inspect.iscoroutine(manager):
            manager.close()
        raise TypeError(
            "lifespan must return a context manager, plain or async, got "
            f"{type(manager).__name__!r}; decorate a generator function with "
            "contextlib.contextmanager or contextlib.asynccontextmanager"
        )

    def _refuse_async(self, manager: Any) -> None:
        if manager is not None:
            raise TypeError(
                f"lifespan returned the async context manager "
                f"{type(manager).__name__!r}, but plain functions read "
                f"{type(self._dataset).__name__!r} where no event loop runs: {_ADVICE}"
            )


def check_lifespan(make: Any, dataset: Any, transform: Any, collate_fn: Any) -> None:
    """Check the argument ``lifespan`` of a loader.

    Raises:
        TypeError: If ``make`` is not a function that returns a context manager.
        ValueError: If the manager is async, but dataset and functions are plain.
    """
    # A context manager made by contextlib is callable, too: it is a decorator.
    decorators = contextlib.ContextDecorator, contextlib.AsyncContextDecorator
    if isinstance(make, decorators) or not callable(make):
        raise TypeError(
            "lifespan must be a function that returns a context manager for the "
            f"dataset, got {type(make).__name__!r}"
        )
    is_async = inspect.isasyncgenfunction(make) or is_async_function(make)
    if is_async or inspect.isgeneratorfunction(make):
        word = "asynccontextmanager" if is_async else "contextmanager"
        raise TypeError(
            "lifespan must return a context manager: make it a generator function "
            f"decorated with contextlib.{word}"
        )
    is_plain = not any(map(is_async_function, (transform, collate_fn)))
    if is_plain and not reads_on_loop(dataset) and _makes_async(make):
        raise ValueError(
            "lifespan returns an async context manager, but dataset, transform and "
            f"collate_fn are plain, so no event loop runs for them: {_ADVICE}"
        )


def _makes_async(make: Any) -> bool:
    """Tell whether ``make`` certainly returns an async context manager."""
    if isinstance(make, type):
        return hasattr(make, "__aenter__") and not hasattr(make, "__enter__")
    return inspect.isasyncgenfunction(inspect.unwrap(make))


def reads_on_loop(dataset: Any) -> bool:
    """Tell whether ``dataset`` is read on an event loop, by coroutines."""
    return kind_of(dataset) is Kind.ASYNC_ITERABLE or reads_async(dataset)


def _noted(error: BaseException, action: str) -> BaseException:
    """Return the error to raise for a lifespan's ``error``, noting ``action``."""
    return noted(raisable(error, "lifespan"), f"in stage 'lifespan', {action} it")
