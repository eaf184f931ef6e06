"""Sources of streams: plain and async iterators, and aioloader's own streams.

All are read the same way: ``read(limit)`` returns the next block, and the iterator's
state is then the one after that block. Reading a plain iterator never suspends.
"""

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple, Protocol

from torch.utils.data import ChainDataset

from aioloader._order.blocks import (
    Bad,
    Block,
    SameErrors,
    cut,
    failed,
    is_cancelled,
    read_block,
    read_block_async,
)
from aioloader.protocols import BlockIterator, HasLifespan, has_aiter


class Read(NamedTuple):
    """The result of one read.

    Attributes:
        block: The samples; only the last one may be ``Bad``.
        places: How many positions of the stream these take: more than samples if
            several readers take turns and some of them have ended.
        has_ended: Whether there is no more. With a ``Bad``, its error ended the stream,
            so no policy can skip it.
    """

    block: Block
    places: int
    has_ended: bool


class BlockSource(Protocol):
    """An iterator that is read in blocks.

    Attributes:
        fills: As in ``BlockIterator``.
        leaves_out: As in ``BlockIterator``.
    """

    fills: bool
    leaves_out: bool

    async def read(self, limit: int) -> Read:
        """Read at most ``limit`` positions, at least one unless the stream ends."""


class PlainSource:
    """The blocks of a plain iterator.

    Args:
        iterator: The user's iterator.
        most: Limit on samples held in memory at once.
    """

    fills = True
    leaves_out = False

    def __init__(self, iterator: Iterator[Any], most: int) -> None:
        self._iterator = iterator
        self._most = most
        self._same_errors = SameErrors()

    async def read(self, limit: int) -> Read:
        """Read without suspending."""
        block, has_ended = read_block(self._iterator, min(limit, self._most))
        is_stuck = self._same_errors.is_stuck(block)
        return Read(block, len(block), has_ended or is_stuck)


class AsyncSource:
    """The blocks of an async iterator.

    Args:
        iterator: The user's iterator.
        most: Limit on samples held in memory at once.
    """

    fills = True
    leaves_out = False

    def __init__(self, iterator: AsyncIterator[Any], most: int) -> None:
        self._iterator = iterator
        self._most = most
        self._same_errors = SameErrors()

    async def read(self, limit: int) -> Read:
        """Read sample by sample."""
        limit = min(limit, self._most)
        block, has_ended = await read_block_async(self._iterator, limit)
        is_stuck = self._same_errors.is_stuck(block)
        return Read(block, len(block), has_ended or is_stuck)


class OwnSource:
    """The blocks of one of aioloader's streams, cut after each failed sample.

    Args:
        iterator: The stream's iterator.
    """

    def __init__(self, iterator: BlockIterator) -> None:
        self.fills = iterator.fills
        self.leaves_out = iterator.leaves_out
        self._iterator = iterator
        self._rest: Block = []  # of the last block, after a failed sample

    async def read(self, limit: int) -> Read:
        """Read a block, or the rest of the last one."""
        block, self._rest = self._rest, []
        if not len(block):
            try:
                block = await self._iterator.pull(limit)
            except StopAsyncIteration:
                return Read([], 0, has_ended=True)
            except (Exception, asyncio.CancelledError) as error:
                if is_cancelled(error):
                    raise
                # No sample failed: the stream cannot be read at all.
                return Read([failed(error)], 1, has_ended=True)
            if self.fills and not len(block):
                return Read([], 0, has_ended=True)
        if isinstance(block, list) and Bad in set(map(type, block)):
            stop = 1 + next(k for k, one in enumerate(block) if type(one) is Bad)
            block, self._rest = block[:stop], cut(block, stop)
        is_whole = not (self.fills or len(self._rest))
        return Read(block, limit if is_whole else len(block), has_ended=False)


async def open_async(dataset: Any, stack: contextlib.AsyncExitStack) -> Any:
    """Return an async iterator of ``dataset``, which ``stack`` closes."""
    is_chain = isinstance(dataset, ChainDataset) and not has_aiter(dataset)
    iterator = _chained(dataset.datasets) if is_chain else aiter(dataset)
    if isinstance(iterator, HasLifespan):
        await stack.enter_async_context(iterator.lifespan())
    if inspect.isasyncgen(iterator):
        stack.push_async_callback(iterator.aclose)
    return iterator


async def _chained(datasets: Any) -> AsyncIterator[Any]:
    """Yield from plain and async iterables, one after the other."""
    for dataset in datasets:
        if not has_aiter(dataset):
            for sample in dataset:
                yield sample
            continue
        async with contextlib.AsyncExitStack() as stack:
            async for sample in await open_async(dataset, stack):
                yield sample  # noqa: ASYNC119  (its reader closes it)
