"""Sources of streams: plain and async iterators, and aioloader's own streams.

All are read the same way: ``read(limit)`` returns the next block, and the iterator's
state is then the one after that block. Reading a plain iterator never suspends.
"""

import contextlib
import inspect
from collections.abc import AsyncIterator
from typing import Any, NamedTuple, TypeAlias

from torch.utils.data import ChainDataset

from aioloader._order.blocks import (
    Bad,
    Block,
    SameErrors,
    failed,
    join,
    read_block,
    read_block_async,
)
from aioloader._order.raising import ends_task
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


class IteratorSource:
    """The blocks of a plain or async iterator.

    Args:
        iterator: The user's iterator.
        most: Limit on samples held in memory at once.
        is_async: Which of the two it is.
    """

    fills = True
    leaves_out = False

    def __init__(self, iterator: Any, most: int, *, is_async: bool) -> None:
        self._iterator = iterator
        self._most = most
        self._is_async = is_async
        self._same_errors = SameErrors()

    async def read(self, limit: int) -> Read:
        """Read sample by sample; a plain iterator never suspends."""
        limit = min(limit, self._most)
        if self._is_async:
            block, has_ended = await read_block_async(self._iterator, limit)
        else:
            block, has_ended = read_block(self._iterator, limit)
        is_stuck = self._same_errors.is_stuck(block)
        return Read(block, len(block), has_ended or is_stuck)


class OwnSource:
    """The blocks of one of aioloader's streams, cut after each failed sample.

    Args:
        iterator: The stream's iterator.
        repeated: Where to repeat its samples; None: from the beginning.

    Its flags are those of ``BlockIterator``.
    """

    def __init__(
        self, iterator: BlockIterator, repeated: dict[str, Any] | None = None
    ) -> None:
        self.fills = iterator.fills
        self.leaves_out = iterator.leaves_out
        self.refills = iterator.refills
        self._iterator = iterator
        self._rest: Block = []  # of the last block, after a failed sample
        self._repeated: BlockIterator | None = None
        self._start = repeated
        self._has_repeated = repeated is not None  # since its latest beginning

    async def read(self, limit: int) -> Read:
        """Read a block, or the rest of the last one."""
        block, self._rest = self._rest, []
        if not len(block):
            try:
                block = await self._iterator.pull(limit)
            except StopAsyncIteration:
                return Read([], 0, has_ended=True)
            except BaseException as error:
                if ends_task(error):
                    raise
                # No sample failed: the stream cannot be read at all.
                return Read([failed(error)], 1, has_ended=True)
            if self.fills and not len(block):
                return Read([], 0, has_ended=True)
        if isinstance(block, list) and Bad in set(map(type, block)):
            stop = 1 + next(k for k, one in enumerate(block) if type(one) is Bad)
            block, self._rest = block[:stop], block[stop:]
        is_whole = not (self.fills or len(self._rest))
        return Read(block, limit if is_whole else len(block), has_ended=False)

    async def again(self, count: int) -> Block:
        """Read samples again, from the first one on, over and over.

        Failed ones are left out. There are fewer than ``count`` if all are.
        """
        parts: list[Block] = []
        while count:
            if self._repeated is None:
                self._repeated = self._iterator.again(self._start)
            block: Block | None
            try:
                block = await self._repeated.pull(count)
            except StopAsyncIteration:
                block = None
            if block is None or (self.fills and not len(block)):
                if not self._has_repeated:
                    break
                await self.aclose()
                self._start, self._has_repeated = None, False
                continue
            if isinstance(block, list):
                block = [sample for sample in block if type(sample) is not Bad]
            self._has_repeated |= len(block) > 0
            parts.append(block)
            count -= len(block)
        return join(parts)

    def repeated(self) -> dict[str, Any]:
        """Return where ``again`` continues, as a part of a state."""
        now = self._start if self._repeated is None else self._repeated.position()
        return {} if now is None else {"again": now}

    async def aclose(self) -> None:
        """Stop to repeat."""
        repeated, self._repeated = self._repeated, None
        if repeated is not None:
            await repeated.aclose()


BlockSource: TypeAlias = IteratorSource | OwnSource


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
