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

from aioloader._order.blocks import Bad, Block, cut, join, weave
from aioloader._order.shares import Deal
from aioloader.datasets._streams.cursors import Cursor, State, check_again, skip

# Most samples that all readers here are asked for at once; most pulls' worth.
_SAMPLES = 512
_PULLS = 4
# Seconds in which samples after the next one must come to be read with it.
_QUICK = 1e-3
# Most rows of columns asked for at once; they are in memory anyway.
_ROWS = 1 << 14


class Alone:
    """The only reader of a rank, not shared with other ranks.

    Attributes:
        at: How many positions of this rank were taken.

    Args:
        reader: Its number.
        cursor: The reader's cursor.
        at: Where to start.
        known: What ``streams`` returned for it.
        ahead: Most samples that ``one`` reads at once; after a load, those not given
            are read again.
        leaves_out: Whether failed samples have no position.
    """

    def __init__(
        self,
        reader: int,
        cursor: Cursor,
        at: int,
        known: State,
        *,
        ahead: int,
        leaves_out: bool,
    ) -> None:
        self.at = at
        self._name = str(reader)
        self._cursor = cursor
        self._taken: int = known["taken"]
        self._known = known
        # Ranks that shared it lagged by this; after its end there is no lag.
        self._lag = 0 if known.get("ended") else at - self._taken
        self._has_ended = False
        # Taken from the cursor, how much was given of it, and what the cursor knows of.
        self._ahead: Block = []
        self._given = self._told = 0
        self._limit, self._most = 1, ahead
        self._leaves_out = leaves_out

    async def pull(self, limit: int) -> Block | None:
        """Return the next samples, from 1 to ``limit``; None at the end."""
        block = self.take(limit)
        if block is None:
            if self._lag > 0:
                await self._catch_up()
            self._tell()
            block = await self._cursor.pull(limit)
            self._has_ended = not len(block)
            self._count(block)
        return None if self._has_ended else block

    def take(self, limit: int) -> Block | None:
        """Return samples that were read ahead; None if there are none."""
        start = self._given
        if start >= len(self._ahead):
            return None
        block: Block = self._ahead[start : start + limit]
        self._given += len(block)
        self._count(block)
        return block

    async def one(self) -> Block | None:
        """Return a block of the next sample; None at the end.

        It reads more samples if they come within about a millisecond.
        """
        if self._lag > 0:
            await self._catch_up()
        self._tell()
        began = time.perf_counter()
        self._has_ended = not await self._cursor.fill(self._limit)
        is_quick = time.perf_counter() - began < _QUICK
        grown = min(2 * self._limit, self._most)
        self._limit = grown if is_quick else max(1, self._limit // 4)
        self._ahead = self._cursor.take(self._cursor.ready())
        self._given = self._told = 0
        return self.take(1)

    def _count(self, block: Block) -> None:
        count = len(block)
        if self._leaves_out and isinstance(block, list):
            count -= sum(type(one) is Bad for one in block)
        self.at += count
        self._taken += count

    def _tell(self) -> None:
        """Tell the cursor how many samples were given."""
        self._cursor.pass_on(self._given - self._told)
        self._told = self._given

    async def _catch_up(self) -> None:
        missing = await skip(self._cursor, self._lag, self._known.get("failed"))
        self._taken += self._lag - missing
        self._lag = 0

    def streams(self) -> State:
        """Return the state of each reader."""
        if self._lag > 0:
            return {self._name: self._known}
        self._tell()
        ended = {"ended": True} if self._has_ended else {}
        one = {"taken": self._taken, "state": self._cursor.state(), **ended}
        return {self._name: one}

    def has_ended(self) -> bool:
        """Return whether it is known that there are no more samples."""
        return self._has_ended

    async def aclose(self) -> None:
        """Do nothing: nothing is pending."""


class Hosted:
    """One of several readers: the samples of it that this rank takes.

    Args:
        cursor: The reader's cursor; None if the reader has ended.
        known: What ``state`` returned.
        wanted: Number of the first sample to take.
        stride: Distance to the next one.
        given: How many samples all ranks in step have delivered.
    """

    def __init__(
        self,
        cursor: Cursor | None,
        known: State,
        wanted: int,
        stride: int,
        given: int,
    ) -> None:
        self._cursor = cursor
        self._known, self._known_until = known, given
        # Samples read; those before the cursor's state; the next one to take.
        self._read: int = known["taken"]
        self._passed = self._read
        self._wanted = wanted
        self._stride = stride
        self._has_ended = "ended" in known
        self._block: Block = []
        self._given = 0

    def ready(self) -> int:
        """Return how many samples can be taken without waiting."""
        return len(self._block) - self._given

    def has_ended(self) -> bool:
        """Return whether no samples follow those that are ready."""
        return self._has_ended

    def look(self, count: int) -> Block:
        """Return the next samples that are ready, without taking them."""
        return cut(self._block, self._given, self._given + count)

    def pass_on(self, count: int) -> None:
        """Note that ``count`` samples were passed on."""
        self._given += count

    async def fill(self, count: int) -> None:
        """Get up to ``count`` samples if none is ready; at least one, or the end."""
        while not self.ready() and not self._has_ended:
            await self._pull(count)

    async def _pull(self, count: int) -> None:
        assert self._cursor is not None
        self._pass(self._wanted - self._stride + 1)
        first = self._wanted - self._read  # samples before it belong to other ranks
        wanted = first + (count - 1) * self._stride + 1
        most = min(wanted, max(count * self._stride, _SAMPLES))
        if not self._cursor.ready():
            await self._cursor.fill(most)
        block = self._cursor.take(most)
        start = self._known["taken"]
        again = self._read - start, self._known_until - start
        check_again(block, *again, self._known.get("failed"))
        self._read += len(block)
        self._has_ended = not len(block)
        self._block, self._given = block[first :: self._stride], 0
        self._wanted += len(self._block) * self._stride

    def _pass(self, given: int) -> int:
        """Let the cursor forget samples that all ranks have; return how many it has."""
        passed: int = max(self._passed, min(given, self._read))
        if self._cursor is not None:
            self._cursor.pass_on(passed - self._passed)
        self._passed = passed
        return passed

    def state(self, given: int) -> State:
        """Return a state from which all undelivered samples can be read.

        Args:
            given: How many samples all ranks in step have delivered; more may be read.
        """
        start, failed = self._known["taken"], self._known.get("failed")
        if self._cursor is None or self._read == start:
            one = {**self._known}
        else:
            passed = self._pass(given)
            one = {"taken": passed, "state": self._cursor.state()}
            if failed is not None:
                later = [start + place - passed for place in failed]
                one["failed"] = [place for place in later if place >= 0]
        if given > self._known_until:
            one.pop("failed", None)  # only other ranks have read some of them
        if self._has_ended and one["taken"] == self._read:
            one["ended"] = True
        return one


class Turns:
    """Readers that take fixed turns, sample by sample.

    Attributes:
        at: How many positions of this rank were taken, including holes.

    Args:
        deal: The positions of the order that are taken here.
        hosted: Its readers, in the order of their turns.
        at: Where to start.
        shift: Difference of the position of all ranks to ``at`` times their number.
    """

    def __init__(
        self, deal: Deal, hosted: Sequence[Hosted], at: int, shift: int
    ) -> None:
        self.at = at
        self._shift = shift
        self._deal = deal
        self._hosted = hosted
        self._named = [
            (str(reader), reader, one)
            for reader, one in zip(deal.hosted(), hosted, strict=True)
        ]
        self._ask = 0
        self._fills: list[asyncio.Task[None]] = []
        # The interleaved block: samples, positions and how many of these were taken;
        # its readers, and how many of them precede each place of a round.
        self._woven: Block = []
        self._length = self._passed = 0
        self._weft: list[Hosted] = []
        self._before: list[int] = [0]

    def take(self, limit: int) -> Block | None:
        """Return the samples at the next positions, if the block has them already."""
        left = self._length - self._passed
        return self._take(min(limit, left)) if left > 0 else None

    async def one(self) -> Block | None:
        """Return a block of the next sample; None at the end."""
        while (block := await self.pull(1)) is not None and not len(block):
            pass
        return block

    async def pull(self, limit: int) -> Block | None:
        """Return the samples at the next ``limit`` positions; None at the end.

        There may be fewer samples, or none, because of holes.
        """
        parts: list[Block] = []
        left = limit
        while left:
            if self._passed >= self._length and not await self._weave(left):
                break
            count = min(left, self._length - self._passed)
            parts.append(self._take(count))
            left -= count
        if left and not any(map(len, parts)):
            return None
        return join(parts)  # after all have ended, there are only holes

    def _take(self, count: int) -> Block:
        """Take the next positions of the block."""
        start, self._passed = self._passed, self._passed + count
        part = cut(self._woven, self._samples(start), self._samples(self._passed))
        self.at += count
        if self._passed >= self._length:
            for one in self._weft:
                one.pass_on(self._length // len(self._hosted))
        return part

    def _samples(self, positions: int) -> int:
        """Return how many samples are at the first positions of the block."""
        rounds, places = divmod(positions, len(self._hosted))
        return rounds * self._before[-1] + self._before[places]

    async def _weave(self, limit: int) -> bool:
        """Interleave the ready samples: whole rounds; return whether there are any."""
        turn = self.at % len(self._hosted)
        order = [*self._hosted[turn:], *self._hosted[:turn]]
        await self._fill(order, limit)
        weft = [one for one in order if one.ready()]
        if not weft:
            return False
        rounds = min(one.ready() for one in weft)
        blocks = [one.look(rounds) for one in weft]
        if len(blocks) > 1 and not isinstance(blocks[0], list):
            self._woven = await asyncio.to_thread(weave, blocks)  # may be many columns
        else:
            self._woven = weave(blocks)
        self._weft = weft
        self._before = [0, *accumulate(min(1, one.ready()) for one in order)]
        self._length, self._passed = rounds * len(order), 0
        return True

    async def _fill(self, order: Sequence[Hosted], limit: int) -> None:
        """Wait until each reader has samples, or has ended; all read at once.

        Each asks for more than needed, because one sample costs as much as many.
        """
        is_list = isinstance(self._woven, list)
        most = min(_PULLS * limit, _SAMPLES) if is_list else _ROWS
        ask = min(2 * self._ask, most // len(order))
        self._ask = max(ask, -(-limit // len(order)))
        if not self._fills:
            lacking = [one for one in order if not (one.ready() or one.has_ended())]
            jobs = [one.fill(self._ask) for one in lacking]
            self._fills = [asyncio.create_task(job) for job in jobs]
        if self._fills:
            await asyncio.wait(self._fills)  # cancellation does not reach them
        fills, self._fills = self._fills, []
        for error in [fill.exception() for fill in fills]:
            if error is not None:
                raise error

    def streams(self) -> State:
        """Return the state of each reader."""
        # Each reader has delivered this many samples on all ranks in step, or one more.
        position = self.at * self._deal.ranks + self._shift
        given, last = divmod(position, self._deal.readers)
        return {
            name: one.state(given + (reader < last))
            for name, reader, one in self._named
        }

    def has_ended(self) -> bool:
        """Return whether it is known that there are no more samples here."""
        return not any(one.ready() or not one.has_ended() for one in self._hosted)

    async def aclose(self) -> None:
        """Stop pending reads."""
        fills, self._fills = self._fills, []
        for fill in fills:
            fill.cancel()
        await asyncio.gather(*fills, return_exceptions=True)
