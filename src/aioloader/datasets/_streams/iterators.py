"""The iterator of a stream: one iteration, its share and its position.

Cancelling a step loses nothing: its read continues in a separate task, and the next
step gets the result.
"""

import asyncio
import sys
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any, Generic, Protocol, Self, TypeVar

from aioloader._order.blocks import Bad, Block
from aioloader._order.shares import Deal
from aioloader._order.stream_states import part_of, sealed, state_of
from aioloader.datasets._streams.agreement import Agreement, RankStore
from aioloader.datasets._streams.cursors import Ahead, Cursor, Reading, State
from aioloader.datasets._streams.turns import Alone, Hosted, Turns
from aioloader.errors import ShardChangedError
from aioloader.protocols import BlockIterator

Sample_co = TypeVar("Sample_co", covariant=True)
# Most samples that ``async for`` reads at once, if they come quickly.
_AHEAD = 256


class Opens(Protocol):
    """A stream, as its iterator sees it.

    Attributes:
        leaves_out: Whether failed samples do not count.
        refills: As in ``BlockIterator``.
    """

    leaves_out: bool
    refills: bool

    async def open(self, reading: Reading, state: State) -> Cursor:
        """Return a cursor; ``state`` is what its ``state`` returned, or empty."""

    def describe(self) -> State:
        """Return what a state depends on."""

    def ahead(self) -> Ahead:
        """Return how far it may be read ahead of the samples passed on."""

    def total(self) -> int | None:
        """Return how many samples an epoch of all ranks has, if known."""


class StreamIterator(BlockIterator, Generic[Sample_co]):
    """One iteration; a loader pulls blocks, ``async for`` single samples.

    Attributes:
        fills: Whether several pulls may fill one batch. If not, one pull is one batch:
            the samples at its positions, some of which may be empty.

    Args:
        stream: The stream to read.
        epoch: Number of the epoch.
        deal: The positions of the order that are read here.
        state: Where to start, if not at the beginning.
        store: Where ranks compare their lists of shards; None: nowhere.

    Raises:
        StateMismatchError: If ``state`` lacks a reader of this rank.
    """

    def __init__(
        self,
        stream: Opens,
        epoch: int,
        deal: Deal,
        state: State | None = None,
        store: RankStore | None = None,
    ) -> None:
        self.fills: bool = deal.is_alone
        total = stream.total()
        self.real: int | None = None if total is None else deal.part(total)
        self.leaves_out: bool = stream.leaves_out and deal.is_alone
        self.refills: bool = stream.refills
        self._stream = stream
        self._description = stream.describe()
        self._epoch = epoch
        self._deal = deal
        if state is None:
            state = state_of(self._description, epoch, deal.readers, 0, {}, begun=epoch)
        if not state["streams"]:  # all are at their beginning
            fresh = {str(reader): {"taken": 0, "state": {}} for reader in deal.hosted()}
            state = {**state, "streams": fresh}
        self._begun: int = state["begun"]
        self._is_strict = state.get("strict", True)
        self._state = part_of({k: v for k, v in state.items() if k != "strict"}, deal)
        # Ranks take turns from the position on, also if not all had as many before.
        position = self._state["position"]
        self.at: int = -(-(position - deal.rank) // deal.ranks)
        self._shift = position - self.at * deal.ranks
        self._agreement: Agreement | None = None
        if store is not None:
            self._agreement = Agreement(store, deal.rank, deal.ranks, epoch)
        self._stack = AsyncExitStack()
        self._cursors: list[Cursor] = []
        self._course: Alone | Turns | None = None
        self._is_closed = False
        self._refusal: ShardChangedError | None = None
        self._reading: asyncio.Task[Block | None] | None = None
        self._closing: asyncio.Task[None] | None = None

    def __aiter__(self) -> "StreamIterator[Sample_co]":
        return self

    async def __anext__(self) -> Sample_co:
        block = None if self._reading is not None or self._is_closed else self._taken()
        if block is None:
            block = await self._next()
        sample = block[0]
        if type(sample) is Bad:
            raise sample.error
        result: Sample_co = sample
        return result

    def _taken(self) -> Block | None:
        """Return a block of one sample if one is ready, without waiting."""
        if self._course is not None:
            while (block := self._course.take(1)) is not None:
                if len(block):
                    return block
        return None

    async def _next(self) -> Block:
        """Return a block of one sample, read in a separate task."""
        if self._reading is None and not self._is_closed:
            # If this step is cancelled, the state stays that before it.
            self._state = self.position()
            self._reading = _begun(self._read(None))
        block: Block | None = None
        if self._reading is not None:
            if not self._reading.done():
                await asyncio.wait([self._reading])  # cancellation does not reach it
            reading, self._reading = self._reading, None
            block = reading.result()
        if block is None:
            raise StopAsyncIteration
        return block

    async def pull(self, limit: int) -> Block:
        """Return the samples at the next ``limit`` positions.

        If it ``fills``, there are 1 to ``limit``, and an empty block is the end.
        Otherwise there may be fewer, or none. A failed sample is a ``Bad`` in a list,
        and the stream continues after it. Once cancelled, it can only be closed.

        Raises:
            StopAsyncIteration: At the end, if it does not fill.
        """
        block = await self._read(limit)
        if block is not None:
            return block
        if not self.fills:
            raise StopAsyncIteration
        return []

    def again(self, state: State | None) -> "StreamIterator[Sample_co]":
        """Return an iteration over the same samples, from the first one or a state."""
        return StreamIterator(self._stream, self._epoch, self._deal, state)

    async def _read(self, limit: int | None) -> Block | None:
        """Return the next block, or a block of one sample; None at the end."""
        if self._is_closed:
            return None
        if self._refusal is not None:
            raise self._refusal
        if self._course is None:
            self._course = await self._open()
        course = self._course
        try:
            block = await (course.one() if limit is None else course.pull(limit))
        except ShardChangedError as error:
            # Nothing follows the position of the state, even if pulled again.
            self._refusal = error
            raise
        if block is None:
            self._state = self._now()
            await self._release()
        return block

    async def _open(self) -> Alone | Turns:
        """Open the readers at their positions in the state."""
        deal, streams = self._deal, self._state["streams"]
        listed: dict[Any, Any] = {}
        at = self.at
        hosted: list[Hosted] = []
        for reader, wanted in zip(deal.hosted(), deal.wanted(at), strict=True):
            known = streams[str(reader)]
            cursor: Cursor | None = None
            if self.fills or not known.get("ended"):
                share = deal.share(reader)
                part = self._epoch, share, self._stack, listed, self._agreement
                reading = Reading(*part, self._is_strict, self._begun)
                cursor = await self._stream.open(reading, known["state"])
                self._cursors.append(cursor)
            if self.fills and cursor is not None:
                ahead = _AHEAD if self._stream.ahead() is Ahead.FREE else 1
                return Alone(
                    reader, cursor, at, known, ahead=ahead, leaves_out=self.leaves_out
                )
            given = -(-(self._state["position"] - reader) // deal.readers)
            hosted.append(Hosted(cursor, known, wanted, deal.stride, given))
        return Turns(deal, hosted, at, self._shift)

    def state_dict(self) -> State:
        """Return the position after the last sample returned, ready for JSON.

        It has the progress of all ranks in step, and the positions of the readers that
        this one reads; ``merge_states`` makes one state from those of all ranks.
        """
        return sealed(self.position())

    def position(self) -> State:
        """Return the state without its checksum, which takes longer."""
        is_between = self._reading is None and not self._is_closed
        return self._now() if is_between else self._state

    def _now(self) -> State:
        course, deal = self._course, self._deal
        if course is None:
            return self._state
        return state_of(
            self._description,
            self._epoch,
            deal.readers,
            course.at * deal.ranks + self._shift,
            course.streams(),
            begun=self._begun,
            has_ended=course.has_ended(),
        )

    async def aclose(self) -> None:
        """Stop pending work and wait for it to end; if cancelled, it continues."""
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
        """Keep the last state."""
        self._state = self.position()
        self._is_closed = True

    async def _release(self) -> None:
        """Close what is open; can be called again if that was cancelled."""
        self._settle()
        async with self._stack:
            if self._course is not None:
                await self._course.aclose()
            for cursor in self._cursors:
                await cursor.aclose()
        self._cursors = []

    def lifespan(self) -> Self:
        """Return itself: leaving it closes it."""
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.aclose()


def _begun(job: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Return a task; where Python allows it, it has already run to its first wait."""
    if sys.version_info >= (3, 12):
        loop = asyncio.get_running_loop()
        return asyncio.Task(job, loop=loop, eager_start=True)
    return asyncio.create_task(job)
