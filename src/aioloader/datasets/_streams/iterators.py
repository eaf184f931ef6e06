"""What ``aiter`` of a stream returns: one iteration, its share and its position.

A step that is cancelled loses nothing: what it reads goes on in a task of its own, and
is the next step's.
"""

import asyncio
import sys
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, Self, TypeVar

from aioloader._observe.warnings import warn
from aioloader._order.blocks import Bad, Block
from aioloader._order.shares import Deal, Share
from aioloader._order.stream_states import part_of, state_of
from aioloader.datasets._streams.agreement import Agreement, RankStore
from aioloader.datasets._streams.cursors import Ahead, Cursor, State
from aioloader.datasets._streams.turns import Alone, Hosted, Turns
from aioloader.errors import ShardChangedError, StateMismatchError
from aioloader.protocols import BlockIterator

Sample_co = TypeVar("Sample_co", covariant=True)
# Samples that ``async for`` reads at once, at most, if they come quickly.
_AHEAD = 256


@dataclass(frozen=True)
class Reading:
    """One reader's iteration over a stream.

    Attributes:
        epoch: Its number.
        share: What is read.
        stack: Closes what the iteration needs.
        listed: What all readers here have in common, by the identity of a source.
        agreement: How ranks compare their lists of shards; None: they do not.
    """

    epoch: int
    share: Share
    stack: AsyncExitStack
    listed: dict[Any, Any] = field(default_factory=dict)
    agreement: Agreement | None = None


class Opens(Protocol):
    """A stream, as its iterator sees it.

    Attributes:
        leaves_out: Whether samples that failed do not count.
    """

    leaves_out: bool

    async def open(self, reading: Reading, state: State) -> Cursor:
        """Return a cursor; ``state`` is what its ``state`` returned, or empty."""

    def describe(self) -> State:
        """Return what a state is bound to."""

    def ahead(self) -> Ahead:
        """Return how far it may be read ahead of what is passed on."""

    def total(self) -> int | None:
        """Return how many samples an epoch of all ranks has, if that is known."""


class StreamIterator(BlockIterator, Generic[Sample_co]):
    """One iteration; a loader pulls blocks, ``async for`` single samples.

    Attributes:
        fills: Whether a batch may be filled by several pulls. If not, one pull is one
            batch: what stands at its positions, of which some may be empty.

    Args:
        stream: What is read.
        epoch: Number of the epoch.
        deal: Which positions of the order are read here.
        state: Where to begin, if not at the beginning.
        store: Where ranks compare their lists of shards; None: nowhere.

    Raises:
        StateMismatchError: If ``state`` lacks what this rank reads.
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
        self._stream = stream
        self._description = stream.describe()
        self._epoch = epoch
        self._deal = deal
        if state is None:
            fresh = {str(reader): {"taken": 0, "state": {}} for reader in deal.hosted()}
            state = state_of(self._description, epoch, deal.readers, 0, fresh)
        self._is_strict = state.get("strict", True)
        self._state = part_of({k: v for k, v in state.items() if k != "strict"}, deal)
        self.at: int = -(-self._state["position"] // deal.ranks)
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
        """Return a block of one sample that is there already, without a wait."""
        if self._course is not None:
            while (block := self._course.take(1)) is not None:
                if len(block):
                    return block
        return None

    async def _next(self) -> Block:
        """Return a block of one sample, read in a task of its own."""
        if self._reading is None and not self._is_closed:
            # If this step is cancelled, the state is that before it.
            self._state = self.state_dict()
            self._reading = _begun(self._read(None))
        block: Block | None = None
        if self._reading is not None:
            if not self._reading.done():
                await asyncio.wait([self._reading])  # a cancellation leaves it alone
            reading, self._reading = self._reading, None
            block = reading.result()
        if block is None:
            raise StopAsyncIteration
        return block

    async def pull(self, limit: int) -> Block:
        """Return the next samples: what stands at the next ``limit`` positions.

        If it ``fills``, there are from 1 to ``limit``, and an empty block is the end.
        If not, there may be fewer, and none. What failed is a ``Bad`` in a list, and
        the stream goes on after it. Once cancelled, it can only be closed.

        Raises:
            StopAsyncIteration: At the end, if it does not fill.
        """
        block = await self._read(limit)
        if block is not None:
            return block
        if not self.fills:
            raise StopAsyncIteration
        return []

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
            # Nothing follows the place of the state, whoever pulls again.
            self._refusal = error
            raise
        if block is None:
            self._state = self._now()
            await self._release()
        return block

    async def _open(self) -> Alone | Turns:
        """Open what is read here, from where the state is."""
        deal, streams = self._deal, self._state["streams"]
        listed: dict[Any, Any] = {}
        at = self.at
        hosted: list[Hosted] = []
        for reader, wanted in zip(deal.hosted(), deal.wanted(at), strict=True):
            known = streams[str(reader)]
            cursor: Cursor | None = None
            if self.fills or not known.get("ended"):
                share = deal.share(reader)
                reading = Reading(
                    self._epoch, share, self._stack, listed, self._agreement
                )
                cursor = await self._cursor(reading, known["state"])
                self._cursors.append(cursor)
            if self.fills and cursor is not None:
                ahead = _AHEAD if self._stream.ahead() is Ahead.FREE else 1
                return Alone(reader, cursor, at, known, ahead=ahead)
            given = -(-(self._state["position"] - reader) // deal.readers)
            hosted.append(Hosted(cursor, known, wanted, deal.stride, given))
        return Turns(deal, hosted, at)

    async def _cursor(self, reading: Reading, state: State) -> Cursor:
        """Open one reader; at its beginning if its state may be ignored, and must."""
        try:
            return await self._stream.open(reading, state)
        except StateMismatchError as error:
            if self._is_strict:
                raise
            what = f"reader {reading.share.reader} begins the epoch anew"
            warn(f"the state is ignored, and {what}: {error}")
        return await self._stream.open(reading, {})

    def state_dict(self) -> State:
        """Return the position after the last sample returned, ready for JSON.

        It says how far all ranks in step have come, and where the readers are that this
        one reads; ``merge_states`` makes one of those of all ranks.
        """
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
            course.at * deal.ranks,
            course.streams(),
            has_ended=course.has_ended(),
        )

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
        self._state = self.state_dict()
        self._is_closed = True

    async def _release(self) -> None:
        """Close what is open; again, if that was cancelled."""
        self._settle()
        async with self._stack:
            if self._course is not None:
                await self._course.aclose()
            for cursor in self._cursors:
                await cursor.aclose()
        self._cursors = []

    def lifespan(self) -> Self:
        """Return itself: it is closed when it is left."""
        return self

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
