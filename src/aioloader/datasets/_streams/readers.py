"""The readers of one rank, either a single one or several that take turns.

A reader that has ended leaves its turns empty, so the same samples are at the same
positions for any number of ranks. A reader's state is at or before the first sample
that some rank has not delivered; resuming drops the samples delivered since that state.
"""

import asyncio
import time
from collections.abc import Sequence
from itertools import accumulate

from aioloader._base.blocks import Block, FailedSample, join
from aioloader._base.cancellation import cancel
from aioloader._order.ranks import ReaderAssignment
from aioloader.datasets._streams.cursors import Cursor, State
from aioloader.datasets._streams.interleave import (
    ROWS_PER_READ,
    SAMPLES_PER_READ,
    interleaved,
)

# Readers that take turns read the samples of up to this many pulls at once.
_MAX_PULLS = 4
# Samples are read in advance if a read takes less than this.
_QUICK_SECONDS = 1e-3
# Most samples to read in advance: more leave the processor's cache.
_MAX_SAMPLES = 2048


class OneReader:
    """A rank's only reader; the rank takes all of its samples.

    ``position`` counts the samples taken, without failed ones if ``leaves_out`` is set.
    ``ahead``: how many samples ``one`` may read at once. ``known``: the reader's state;
    the samples from that state up to number ``wanted`` were already delivered.
    """

    def __init__(
        self,
        cursor: Cursor,
        known: State,
        wanted: int,
        position: int,
        *,
        ahead: int,
        leaves_out: bool,
    ) -> None:
        self.position = position
        self._cursor = cursor
        self._known: State | None = known  # None once a sample or the end was read
        self._taken: int = known["taken"]
        self._passed = self._taken  # samples passed on, of those taken
        self._to_drop = wanted - self._taken
        self._max_ahead, self._leaves_out = ahead, leaves_out
        self._ask = 1
        self._has_ended = False

    def take_one(self) -> Block | None:
        """Return the next sample as a block, or None if it is not ready."""
        if not self._cursor.ready:
            return None
        block = self._cursor.take(1)
        self._taken += 1
        self.position += 1
        return block

    def has_more(self, count: int = 1) -> bool:
        """Tell whether ``take`` can return ``count`` samples."""
        return self._cursor.ready >= count and not self._to_drop

    def take(self, size: int, most: int) -> list[Block]:
        """Return up to ``most`` blocks of ``size``; stop before a failed sample."""
        blocks = self._cursor.take_blocks(size, most)
        self._taken += size * len(blocks)
        self.position += size * len(blocks)
        return blocks

    async def one(self) -> Block | None:
        """Return the next sample as a block, or None at the end; may read ahead."""
        if self._max_ahead == 1:
            return await self.pull(1)
        if not self._cursor.ready:
            await self._fill(1, self._max_ahead - 1)
        return self.take_one()

    async def _fill(self, limit: int, more: int) -> None:
        """Read about ``limit`` samples, plus up to ``more`` if reads were quick."""
        began = time.perf_counter()
        await self._settle()
        ask = max(limit, min(self._ask, limit + more))
        self._has_ended = not await self._cursor.fill(ask)
        self._known = None
        is_quick = time.perf_counter() - began < _QUICK_SECONDS
        self._ask = min(2 * ask, _MAX_SAMPLES) if is_quick else max(1, ask // 4)

    async def pull(self, limit: int, more: int = 0) -> Block | None:
        """Return 1 to ``limit`` samples or None at the end; may read ``more`` ahead."""
        if self._cursor.ready or (
            more and self._max_ahead > 1 and not self._leaves_out
        ):
            if not self._cursor.ready:
                await self._fill(limit, more)
            block = self._cursor.take(limit)
            self._taken += len(block)
            self.position += len(block)
            return block if len(block) else None
        if self._to_drop or self._passed != self._taken:
            await self._settle()
        block = await self._cursor.pull(limit)
        self._known, self._has_ended = None, not len(block)
        self.position += self._count(block)
        return block if len(block) else None

    async def _settle(self) -> None:
        """Pass taken samples on; drop samples delivered before the state was saved."""
        self._pass()
        while self._to_drop:
            block = await self._cursor.pull(self._to_drop)
            self._known = None
            count = self._count(block)
            self._to_drop = self._to_drop - count if len(block) else 0

    def _pass(self) -> None:
        self._cursor.pass_on(self._taken - self._passed)
        self._passed = self._taken

    def _count(self, block: Block) -> int:
        """Count a pulled block's samples as taken; return its number of positions."""
        count = len(block)
        if self._leaves_out and isinstance(block, list):
            count -= sum(type(sample) is FailedSample for sample in block)
        self._taken = self._passed = self._taken + count
        return count

    def states(self) -> list[State]:
        if self._known is not None:
            return [self._known]
        self._pass()
        ended = {"ended": True} if self.has_ended() else {}
        return [{"taken": self._taken, "state": self._cursor.state(), **ended}]

    def has_ended(self) -> bool:
        return self._has_ended and not self._cursor.ready

    async def aclose(self) -> None:
        """Do nothing, because no read is pending."""


class Reader:
    """One of a rank's several readers; the rank takes every ``stride``-th sample.

    ``wanted`` is the number of the first sample to take, and ``known`` is the state to
    start from. ``cursor`` is None if the reader has ended in that state.
    """

    def __init__(
        self, cursor: Cursor | None, known: State, wanted: int, stride: int
    ) -> None:
        self.cursor = cursor
        self.has_ended = cursor is None
        self._known = known
        self._read: int = known["taken"]  # samples, also those of other ranks
        self._passed = self._read  # samples before the cursor's state
        self._wanted = wanted
        self._stride = stride
        self.ready: Block = []  # samples for ``take``

    def take(self, count: int) -> Block:
        part, self.ready = self.ready[:count], self.ready[count:]
        return part

    async def fill(self, count: int) -> None:
        """If no sample is ready, read from 1 to about ``count``, or none at the end."""
        cursor, stride = self.cursor, self._stride
        while not (len(self.ready) or self.has_ended):
            assert cursor is not None
            self._pass(self._wanted - stride + 1)
            first = self._wanted - self._read  # samples before it belong to other ranks
            if not cursor.ready:
                most = first + (count - 1) * stride + 1
                await cursor.fill(min(most, max(count * stride, SAMPLES_PER_READ)))
            block = cursor.take(cursor.ready)
            self._read += len(block)
            self.has_ended = not len(block)
            self.ready = block[first::stride]
            self._wanted += len(self.ready) * stride

    def _pass(self, delivered: int) -> int:
        """Pass on the samples that all ranks delivered; return their total number."""
        passed: int = max(self._passed, min(delivered, self._read))
        if self.cursor is not None and passed > self._passed:
            self.cursor.pass_on(passed - self._passed)
        self._passed = passed
        return passed

    def state(self, delivered: int) -> State:
        """Return a state at or before the first sample that a rank did not deliver."""
        is_fresh = self._read == self._known["taken"] and not self.has_ended
        if self.cursor is None or is_fresh:
            return self._known
        passed = self._pass(delivered)
        ended = {"ended": True} if self.has_ended and passed == self._read else {}
        return {"taken": passed, "state": self.cursor.state(), **ended}


class ReadersInTurn:
    """A rank's readers, which take turns, one sample at a time.

    ``position``: how many positions this rank has taken, including empty turns. All
    ranks together are at position ``position * ranks + shift``.
    """

    def __init__(
        self,
        assignment: ReaderAssignment,
        readers: Sequence[Reader],
        position: int,
        shift: int,
    ) -> None:
        self.position = position
        self._shift = shift
        self._assignment = assignment
        self._readers = readers
        self._ask = 0
        self._fills: list[asyncio.Task[None]] = []
        # The interleaved block, its number of positions, and how many were taken.
        self._interleaved: Block = []
        self._length = self._passed = 0
        self._before: list[int] = [0]  # samples before each position of a round

    def _take(self, limit: int) -> Block | None:
        """Return samples at up to ``limit`` positions; None if the block is used up."""
        start = self._passed
        if start >= self._length:
            return None
        stop = self._passed = min(self._length, start + limit)
        self.position += stop - start
        return self._interleaved[self._samples(start) : self._samples(stop)]

    def _samples(self, positions: int) -> int:
        """Return how many samples the first ``positions`` of the block contain."""
        rounds, places = divmod(positions, len(self._readers))
        return rounds * self._before[-1] + self._before[places]

    def take_one(self) -> Block | None:
        block = self._take(1)
        while block is not None and not len(block):
            block = self._take(1)
        return block

    async def one(self) -> Block | None:
        while (block := self.take_one()) is None:
            if not await self._interleave(1):
                return None
        return block

    async def pull(self, limit: int, _more: int = 0) -> Block | None:
        """Return the samples at the next ``limit`` positions; None at the end."""
        parts: list[Block] = []
        end = self.position + limit
        while self.position < end:
            block = self._take(end - self.position)
            if block is not None:
                parts.append(block)
            elif not await self._interleave(end - self.position):
                # All readers have ended.
                return join(parts) if any(map(len, parts)) else None
        return join(parts)

    async def _interleave(self, limit: int) -> bool:
        """Interleave whole rounds of ready samples; return whether there are any."""
        turn = self.position % len(self._readers)
        order = [*self._readers[turn:], *self._readers[:turn]]
        await self._fill(order, limit)
        ready = [reader for reader in order if len(reader.ready)]
        rounds = min((len(reader.ready) for reader in ready), default=0)
        self._before = [0, *accumulate(min(1, len(reader.ready)) for reader in order)]
        if ready:
            blocks = [reader.take(rounds) for reader in ready]
            self._interleaved = await interleaved(blocks)
        self._length, self._passed = rounds * len(order), 0
        return bool(ready)

    async def _fill(self, order: Sequence[Reader], limit: int) -> None:
        """Fill empty readers concurrently, until each one has samples or has ended."""
        is_list = isinstance(self._interleaved, list)
        # More than needed: reading one sample costs as much as reading many.
        most = min(_MAX_PULLS * limit, SAMPLES_PER_READ) if is_list else ROWS_PER_READ
        ask = min(2 * self._ask, most // len(order))
        self._ask = max(ask, -(-limit // len(order)))
        if not self._fills:
            empty = [r for r in order if not (len(r.ready) or r.has_ended)]
            jobs = [reader.fill(self._ask) for reader in empty]
            self._fills = [asyncio.create_task(job) for job in jobs]
        if self._fills:
            await asyncio.wait(self._fills)  # cancellation does not reach them
        fills, self._fills = self._fills, []
        for error in [fill.exception() for fill in fills]:
            if error is not None:
                raise error

    def states(self) -> list[State]:
        # Each reader's samples that all ranks delivered; the first may have one more.
        position = self.position * self._assignment.ranks + self._shift
        delivered, extra = divmod(position, self._assignment.readers)
        each = zip(self._assignment.assigned(), self._readers, strict=True)
        return [reader.state(delivered + (k < extra)) for k, reader in each]

    def has_ended(self) -> bool:
        is_ready = self._passed < self._length
        return not is_ready and all(
            reader.has_ended and not len(reader.ready) for reader in self._readers
        )

    async def aclose(self) -> None:
        fills, self._fills = self._fills, []
        await cancel(fills)
