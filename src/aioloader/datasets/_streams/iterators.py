"""What ``aiter`` of a stream returns: one iteration, its share and its position."""

from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

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

    def __aiter__(self) -> "StreamIterator[Sample_co]":
        return self

    async def __anext__(self) -> Sample_co:
        block = await self.pull(1)
        if not len(block):
            raise StopAsyncIteration
        sample = block[0]
        if type(sample) is Bad:
            raise sample.error
        result: Sample_co = sample
        return result

    async def pull(self, limit: int) -> Block:
        """Return the next samples, from 1 to ``limit``; an empty block at the end.

        What failed is a ``Bad`` in a list, and the stream goes on behind it.
        """
        if self._is_closed:
            return []
        if self._cursor is None:
            reading = Reading(self._epoch, self._share, self._stack)
            self._cursor = await self._stream.open(reading, self._state)
        block = await self._cursor.pull(limit)
        if not len(block):
            await self.aclose()
        return block

    def state_dict(self) -> State:
        """Return the position behind the last sample returned, ready for JSON."""
        inner = self._state if self._cursor is None else self._cursor.state()
        return {"version": VERSION, "epoch": self._epoch, "stream": inner}

    async def aclose(self) -> None:
        """End what is under way, and wait for its end."""
        if not self._is_closed:
            self._is_closed = True
            self._state = self.state_dict()["stream"]
            cursor, self._cursor = self._cursor, None
            async with self._stack:
                if cursor is not None:
                    await cursor.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.aclose()
