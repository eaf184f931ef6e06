"""Await the awaitables that wrappers of async datasets return, also in containers."""

import asyncio
import inspect
import types
from collections.abc import Awaitable, Collection, Iterable
from typing import Any

import numpy as np
import torch

from aioloader._base.cancellation import cancel
from aioloader._base.raising import WrappedExit, carried

_CONTAINERS = {tuple, list, dict}
# The usual types of samples, none of which is awaitable.
_PLAIN = frozenset((int, float, str, bytes, torch.Tensor, np.ndarray))


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
    """Return ``values``, resolved concurrently; the first error cancels the others."""
    tasks = [asyncio.ensure_future(_resolved_in_task(value)) for value in values]
    try:
        return await asyncio.gather(*tasks)
    except WrappedExit as passed:
        raise passed.error from passed.error.__cause__
    finally:
        await cancel(tasks)


async def _resolved_in_task(value: Any) -> Any:
    try:
        return await resolved(value)
    except BaseException as error:
        raise carried(error)  # noqa: B904  (it keeps its own cause)


def _has_awaitable(values: Collection[Any]) -> bool:
    """Tell whether ``values``, or containers nested in them, hold an awaitable."""
    kinds = set(map(type, values))
    if not kinds <= _PLAIN and any(issubclass(kind, Awaitable) for kind in kinds):
        return True
    return not kinds.isdisjoint(_CONTAINERS) and any(
        _has_awaitable(value.values() if type(value) is dict else value)
        for value in values
        if type(value) in _CONTAINERS
    )


def holds_awaitables(samples: Any) -> bool:
    """Tell whether a list of samples holds awaitables, also in containers.

    Of the containers, only the last tuple, last list and last dict are searched.
    """
    if type(samples) is not list:
        return False
    kinds = set(map(type, samples))
    if kinds <= _PLAIN:  # the fast path: this runs for every batch
        return False
    if kinds.isdisjoint(_CONTAINERS):
        return any(issubclass(kind, Awaitable) for kind in kinds)
    return _has_awaitable({type(sample): sample for sample in samples}.values())


def close_coroutines(samples: Any) -> None:
    """Close the coroutines in a list of samples; nothing will await them."""
    if type(samples) is list:
        for sample in samples:
            if isinstance(sample, types.CoroutineType):
                sample.close()
