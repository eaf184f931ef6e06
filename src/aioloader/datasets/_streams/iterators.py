"""What ``aiter`` of a stream returns: one iteration, its share and its position.

A step that is cancelled loses nothing: what it reads goes on in a task of its own, and
is the next step's.
"""

import asyncio
import sys
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

from aioloader._order.blocks import Bad, Block
from aioloader.datasets._streams.cursors import Cursor, State

Sample_co = TypeVar("Sample_co", covariant=True)
VERSION = 1


@dataclass(frozen=True)
class Share:
    """Which part of a stream is read here.

    Attributes:
        reader: Number of this reader among all ranks' workers.
        readers: How many there are.
    """

    reader: int = 0
    readers: int = 1


@dataclass(frozen=True)
class Reading:
    """One iteration over a stream.

    Attributes:
        epoch: Its number.
        share: What is read here.
        stack: Closes what the iteration needs.
    """

    epoch: int
    share: Share
    stack: AsyncExitStack


class Opens(Protocol):
    """A stream, as its iterator sees it."""

    async def open(self, reading: Reading, state: State) -> Cursor:
        """Return a cursor; ``state`` is what its ``state`` returned, or empty."""


class StreamIterator(Generic[Sample_co]):
    """One iteration; a loader pulls blocks, ``async for`` single samples.

    Args:
        stream: What is read.
        epoch: Number of the epoch.
        share: What is read here.
        state: Where to begin.
    """

    def __init__(self, stream: Opens, epoch: int, share: Share, state: State) -> None:
        self._stream = stream
        self._epoch = epoch
        self._share = share
        self._state = state
        self._stack = AsyncExitStack()
        self._cursor: Cursor | None = None
        self._is_closed = False
        self._reading: asyncio.Task[Block] | None = None
        self._closing: asyncio.Task[None] | None = None

    def __aiter__(self) -> "StreamIterator[Sample_co]":
        return self

    async def __anext__(self) -> Sample_co:
        if self._reading is None and not self._is_closed:
            # If this step is cancelled, the state is that before it.
            self._state = self.state_dict()["stream"]
            self._reading = _begun(self.pull(1))
        block: Block = []
        if self._reading is not None:
            if not self._reading.done():
                await asyncio.wait([self._reading])  # a cancellation leaves it alone
            reading, self._reading = self._reading, None
            block = reading.result()
        if not len(block):
            raise StopAsyncIteration
        sample = block[0]
        if type(sample) is Bad:
            raise sample.error
        result: Sample_co = sample
        return result

    async def pull(self, limit: int) -> Block:
        """Return the next samples, from 1 to ``limit``; an empty block at the end.

        What failed is a ``Bad`` in a list, and the stream goes on behind it. Who
        cancels this can only close.
        """
        if self._is_closed:
            return []
        if self._cursor is None:
            reading = Reading(self._epoch, self._share, self._stack)
            self._cursor = await self._stream.open(reading, self._state)
        block = await self._cursor.pull(limit)
        if not len(block):
            await self._release()
        return block

    def state_dict(self) -> State:
        """Return the position behind the last sample returned, ready for JSON."""
        inner = self._state
        is_between = self._reading is None and not self._is_closed
        if is_between and self._cursor is not None:
            inner = self._cursor.state()
        return {"version": VERSION, "epoch": self._epoch, "stream": inner}

    async def aclose(self) -> None:
        """End what is under way, and wait for its end; cancelled, it goes on."""
        if self._closing is None:
            self._closing = _begun(self._close())
        await asyncio.wait([self._closing])
        self._closing.result()

    async def _close(self) -> None:
        self._settle()
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
        await self._release()

    def _settle(self) -> None:
        """Keep the state: the last one."""
        self._state = self.state_dict()["stream"]
        self._is_closed = True

    async def _release(self) -> None:
        """Close what is open; again, if that was cancelled."""
        self._settle()
        async with self._stack:
            if self._cursor is not None:
                await self._cursor.aclose()
        self._cursor = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.aclose()


def _begun(job: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Return a task; where Python can, it has come to its first wait already."""
    if sys.version_info >= (3, 12):
        loop = asyncio.get_running_loop()
        return asyncio.Task(job, loop=loop, eager_start=True)
    return asyncio.create_task(job)
