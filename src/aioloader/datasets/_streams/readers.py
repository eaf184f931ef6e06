"""The readers of one rank: one alone, or several in fixed turns.

A reader that has ended leaves holes, and no other takes its place, so the same samples
are at the same positions for any number of ranks. A reader's state is that after the
samples that all ranks in step have delivered, or before some that others have read
further: loading it drops the samples in between.
"""

import asyncio
import time
from collections.abc import Sequence
from itertools import accumulate

from aioloader._base.blocks import Block, FailedSample, join
from aioloader._base.cancellation import cancel
from aioloader._order.ranks import ReaderAssignment
from aioloader.datasets._streams.cursors import Cursor, State
from aioloader.datasets._streams.interleave import interleaved

# Most samples that all readers here are asked for at once; most pulls' worth.
_SAMPLES = 512
_PULLS = 4
# Seconds in which samples after the next one must come to be read with it.
_QUICK = 1e-3
# Most samples of lists that are read so: more are no longer in the processor's cache.
_MOST = 2048
# Most rows of columns asked for at once; they are in memory anyway.
_ROWS = 1 << 14


class OneReader:
    """The one reader of a rank, all of whose samples it takes.

    ``at`` counts those that were taken; with ``leaves_out``, failed samples have no
    position. For single samples it reads up to ``ahead`` at once (after a load, those
    not given are read again). ``known`` is its state; the samples after it and before
    number ``wanted`` were delivered already.
    """

    def __init__(
        self,
        cursor: Cursor,
        known: State,
        wanted: int,
        at: int,
        *,
        ahead: int,
        leaves_out: bool,
    ) -> None:
        self.at = at
        self._cursor = cursor
        self._known: State | None = known  # until a sample, or the end, was read
        # Samples taken; those that the cursor knows of.
        self._taken: int = known["taken"]
        self._passed = self._taken
        self._again = wanted - self._taken  # samples to drop first
        self._most, self._leaves_out = ahead, leaves_out
        self._ask = 1
        self._has_ended = False

    def take_one(self) -> Block | None:
        """Return a block of the next sample, if that was read already."""
        if not self._cursor.ready:
            return None
        block = self._cursor.take(1)
        self._taken += 1
        self.at += 1
        return block

    def has_more(self, count: int = 1) -> bool:
        """Tell whether so many samples can be taken that were read already."""
        return self._cursor.ready >= count and not self._again

    def take(self, size: int, most: int) -> list[Block]:
        """Return up to so many blocks of ``size`` samples, up to one that failed."""
        blocks = self._cursor.take_blocks(size, most)
        self._taken += size * len(blocks)
        self.at += size * len(blocks)
        return blocks

    async def one(self) -> Block | None:
        """Return a block of the next sample; None at the end.

        More are read if they come within about a millisecond.
        """
        if self._most == 1:
            return await self.pull(1)
        if not self._cursor.ready:
            await self._fill(1, self._most - 1)
        return self.take_one()

    async def _fill(self, limit: int, more: int) -> None:
        """Read up to ``limit`` samples, and ``more`` if they come quickly."""
        began = time.perf_counter()
        await self._settle()
        ask = max(limit, min(self._ask, limit + more))
        self._has_ended = not await self._cursor.fill(ask)
        self._known = None
        is_quick = time.perf_counter() - began < _QUICK
        self._ask = min(2 * ask, _MOST) if is_quick else max(1, ask // 4)

    async def pull(self, limit: int, more: int = 0) -> Block | None:
        """Return from 1 to ``limit`` samples; None at the end."""
        if self._cursor.ready or (more and self._most > 1 and not self._leaves_out):
            if not self._cursor.ready:
                await self._fill(limit, more)
            block = self._cursor.take(limit)
            self._taken += len(block)
            self.at += len(block)
            return block if len(block) else None
        if self._again or self._passed != self._taken:
            await self._settle()
        block = await self._cursor.pull(limit)
        self._known, self._has_ended = None, not len(block)
        self.at += self._count(block)
        return block if len(block) else None

    async def _settle(self) -> None:
        """Let the cursor forget samples that were taken, or delivered before a load."""
        self._pass()
        while self._again:
            block = await self._cursor.pull(self._again)
            self._known = None
            count = self._count(block)
            self._again = self._again - count if len(block) else 0

    def _pass(self) -> None:
        self._cursor.pass_on(self._taken - self._passed)
        self._passed = self._taken

    def _count(self, block: Block) -> int:
        """Note that a block was pulled; return how many positions it has."""
        count = len(block)
        if self._leaves_out and isinstance(block, list):
            count -= sum(type(one) is FailedSample for one in block)
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
        """Do nothing: no read is pending."""


class Reader:
    """The samples of one reader that this rank takes: ``wanted``, and every stride-th.

    ``known`` is its state; without a ``cursor`` it has ended. When it ``has_ended``, no
    samples follow those that are ready.
    """

    def __init__(
        self, cursor: Cursor | None, known: State, wanted: int, stride: int
    ) -> None:
        self.cursor = cursor
        self.has_ended = cursor is None
        self._known = known
        # Samples read; those before the cursor's state; the next one to read and take.
        self._read: int = known["taken"]
        self._passed = self._read
        self._wanted = wanted
        self._stride = stride
        self.ready: Block = []  # samples that can be taken

    def take(self, count: int) -> Block:
        part, self.ready = self.ready[:count], self.ready[count:]
        return part

    async def fill(self, count: int) -> None:
        """Get about ``count`` samples if none is ready; at least one, or the end."""
        cursor, stride = self.cursor, self._stride
        while not (len(self.ready) or self.has_ended):
            assert cursor is not None
            self._pass(self._wanted - stride + 1)
            first = self._wanted - self._read  # samples before it belong to other ranks
            if not cursor.ready:
                most = first + (count - 1) * stride + 1
                await cursor.fill(min(most, max(count * stride, _SAMPLES)))
            block = cursor.take(cursor.ready)
            self._read += len(block)
            self.has_ended = not len(block)
            self.ready = block[first::stride]
            self._wanted += len(self.ready) * stride

    def _pass(self, given: int) -> int:
        """Let the cursor forget samples that all ranks have; return how many it has."""
        passed: int = max(self._passed, min(given, self._read))
        if self.cursor is not None and passed > self._passed:
            self.cursor.pass_on(passed - self._passed)
        self._passed = passed
        return passed

    def state(self, given: int) -> State:
        """Return a state; all but what ``given`` by all ranks can be read from it."""
        is_fresh = self._read == self._known["taken"] and not self.has_ended
        if self.cursor is None or is_fresh:
            return self._known
        passed = self._pass(given)
        ended = {"ended": True} if self.has_ended and passed == self._read else {}
        return {"taken": passed, "state": self.cursor.state(), **ended}


class ReadersInTurn:
    """A rank's readers, which take turns, sample by sample.

    ``at`` counts the positions of this rank that were taken, holes included; the
    position of all ranks is ``at`` times their number, and ``shift``.
    """

    def __init__(
        self, deal: ReaderAssignment, readers: Sequence[Reader], at: int, shift: int
    ) -> None:
        self.at = at
        self._shift = shift
        self._deal = deal
        self._readers = readers
        self._ask = 0
        self._fills: list[asyncio.Task[None]] = []
        # The interleaved block: samples, positions and how many of these were taken;
        # how many readers that have samples precede each place of a round.
        self._interleaved: Block = []
        self._length = self._passed = 0
        self._before: list[int] = [0]

    def _take(self, limit: int) -> Block | None:
        """Return the samples at the next positions, if they are interleaved already."""
        start = self._passed
        if start >= self._length:
            return None
        stop = self._passed = min(self._length, start + limit)
        self.at += stop - start
        return self._interleaved[self._samples(start) : self._samples(stop)]

    def _samples(self, positions: int) -> int:
        """Return how many samples are at the first positions of the block."""
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
        """Return the samples at the next ``limit`` positions; None at the end.

        There may be fewer samples, or none, because of holes.
        """
        parts: list[Block] = []
        end = self.at + limit
        while self.at < end:
            block = self._take(end - self.at)
            if block is not None:
                parts.append(block)
            elif not await self._interleave(end - self.at):
                # After all have ended, there are only holes.
                return join(parts) if any(map(len, parts)) else None
        return join(parts)

    async def _interleave(self, limit: int) -> bool:
        """Interleave the ready samples: whole rounds; return whether there are any."""
        turn = self.at % len(self._readers)
        order = [*self._readers[turn:], *self._readers[:turn]]
        await self._fill(order, limit)
        ready = [one for one in order if len(one.ready)]
        rounds = min((len(one.ready) for one in ready), default=0)
        self._before = [0, *accumulate(min(1, len(one.ready)) for one in order)]
        if ready:
            self._interleaved = await interleaved([one.take(rounds) for one in ready])
        self._length, self._passed = rounds * len(order), 0
        return bool(ready)

    async def _fill(self, order: Sequence[Reader], limit: int) -> None:
        """Wait until each reader has samples, or has ended; all read at once.

        Each asks for more than needed, because one sample costs as much as many.
        """
        is_list = isinstance(self._interleaved, list)
        most = min(_PULLS * limit, _SAMPLES) if is_list else _ROWS
        ask = min(2 * self._ask, most // len(order))
        self._ask = max(ask, -(-limit // len(order)))
        if not self._fills:
            lacking = [one for one in order if not (len(one.ready) or one.has_ended)]
            jobs = [one.fill(self._ask) for one in lacking]
            self._fills = [asyncio.create_task(job) for job in jobs]
        if self._fills:
            await asyncio.wait(self._fills)  # cancellation does not reach them
        fills, self._fills = self._fills, []
        for error in [fill.exception() for fill in fills]:
            if error is not None:
                raise error

    def states(self) -> list[State]:
        # Each has delivered this many samples on all ranks in step, or one more.
        position = self.at * self._deal.ranks + self._shift
        given, last = divmod(position, self._deal.readers)
        each = zip(self._deal.assigned(), self._readers, strict=True)
        return [one.state(given + (number < last)) for number, one in each]

    def has_ended(self) -> bool:
        is_ready = self._passed < self._length
        return not is_ready and all(
            one.has_ended and not len(one.ready) for one in self._readers
        )

    async def aclose(self) -> None:
        fills, self._fills = self._fills, []
        await cancel(fills)
