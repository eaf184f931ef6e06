"""Small helpers around ``await``."""

import asyncio
import inspect
from collections.abc import Awaitable, Iterable
from typing import Any


async def resolved(value: Any) -> Any:
    """Await ``value``, and what tuples, lists and dicts in it hold.

    Wrappers of async datasets (``Subset``, ``StackDataset``) return awaitables, or
    containers of them. Those of one container are awaited together.
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
    tasks = [asyncio.ensure_future(resolved(value)) for value in values]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def is_being_cancelled() -> bool:
    """Tell whether the current task itself, not what it awaits, was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _has_awaitable(values: Iterable[Any]) -> bool:
    return any(
        isinstance(value, Awaitable)
        or (type(value) in {tuple, list} and _has_awaitable(value))
        or (type(value) is dict and _has_awaitable(value.values()))
        for value in values
    )
