"""The readers of one rank: one alone, or several in fixed turns.

A reader that has ended leaves holes, and no other takes its place, so the same samples
are at the same positions for any number of ranks. As in lanes, the samples that all
readers have ready are interleaved into one block, and pulls are slices of it. The state
of a reader is the one before what was read ahead, or before samples that other ranks
have yet to deliver; loading it drops the samples in between. Memory holds some hundred
samples more than without turns.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from aioloader._order.blocks import Bad, Block, cut, join, unreadable, weave
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
        # Samples ready in the cursor can be taken one by one, with exact states.
        self._take_there = getattr(cursor, "take", None)
        if self._take_there is not None:
            ahead = 1
        self._taken: int = known["taken"]
        self._known = known
        # Ranks that shared it lagged by this; after its end there is no lag.
        self._lag = 0 if known.get("ended") else at - self._taken
        self._has_ended = False
        # Read ahead: the samples, how many were taken, and the state before.
        self._ahead: Block = []
        self._given = 0
        self._before: State = {}
        self._limit, self._most = 1, ahead
        self._leaves_out = leaves_out

    async def pull(self, limit: int) -> Block | None:
        """Return the next samples, from 1 to ``limit``; None at the end."""
        return self.take(limit) or await self._pull(limit)

    def take(self, limit: int) -> Block | None:
        """Return samples that were read ahead; None if there are none."""
        if self._given >= len(self._ahead):
            block = (
                self._take_there(limit) if self._take_there and not self._lag else None
            )
            self.at += len(block or ())
            self._taken += len(block or ())
            return block
        block = cut(self._ahead, self._given, self._given + limit)
        self._given += len(block)
        self.at += len(block)
        return block

    async def one(self) -> Block | None:
        """Return a block of the next sample; None at the end.

        It reads more samples if they come within about a millisecond.
        """
        before, began = self.streams(), time.perf_counter()
        block = await self._pull(self._limit)
        if block is None:
            return None
        is_quick = time.perf_counter() - began < _QUICK
        grown = min(2 * self._limit, self._most)
        self._limit = grown if is_quick else max(1, self._limit // 4)
        self.at -= len(block)
        self._ahead, self._given, self._before = block, 0, before
        return self.take(1)

    async def _pull(self, limit: int) -> Block | None:
        if self._lag > 0:
            await self._catch_up()
        block = await self._cursor.pull(limit)
        self._has_ended = not len(block)
        count = len(block)
        if self._leaves_out and isinstance(block, list):
            count -= sum(type(one) is Bad for one in block)
        self.at += count
        self._taken += count
        return None if self._has_ended else block

    async def _catch_up(self) -> None:
        missing = await skip(self._cursor, self._lag, self._known.get("failed"))
        self._taken += self._lag - missing
        self._lag = 0

    def streams(self) -> State:
        """Return the state of each reader."""
        if self._lag > 0:
            return {self._name: self._known}
        if self._given < len(self._ahead):  # loading drops the samples taken
            failed = unreadable(cut(self._ahead, 0, self._given))
            return {self._name: {**self._before[self._name], "failed": failed}}
        one = {"taken": self._taken, "state": self._cursor.state()}
        if self._has_ended:
            one["ended"] = True
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
        self._marks = deque([known])  # states, each before a block
        self._failed: list[int] = []  # numbers of unreadable samples
        self._taken: int = known["taken"]
        self._wanted = wanted
        self._stride = stride
        self._block: Block = []
        self._given = 0

    def ready(self) -> int:
        """Return how many samples can be taken without waiting."""
        return len(self._block) - self._given

    def has_ended(self) -> bool:
        """Return whether no samples follow those that are ready."""
        return "ended" in self._marks[-1]

    def look(self, count: int) -> Block:
        """Return the next samples that are ready, without taking them."""
        return cut(self._block, self._given, self._given + count)

    def pass_on(self, count: int) -> None:
        """Note that ``count`` samples were passed on."""
        self._given += count

    async def fill(self, count: int) -> None:
        """Get up to ``count`` samples if none is ready; at least one, or the end."""
        while not self.ready() and not self.has_ended():
            await self._pull(count)

    async def _pull(self, count: int) -> None:
        assert self._cursor is not None
        if self._marks[-1]["taken"] < self._taken:
            self._marks.append(self._here())
        self._forget(self._wanted - self._stride + 1)
        first = self._wanted - self._taken  # samples before it belong to other ranks
        wanted = first + (count - 1) * self._stride + 1
        most = max(count * self._stride, _SAMPLES)
        block = await self._cursor.pull(min(wanted, most))
        start = self._known["taken"]
        again = self._taken - start, self._known_until - start
        check_again(block, *again, self._known.get("failed"))
        self._failed += [self._taken + place for place in unreadable(block)]
        self._taken += len(block)
        if not len(block):
            self._marks.append({**self._marks[-1], "ended": True})
            return
        self._block, self._given = block[first :: self._stride], 0
        self._wanted += len(self._block) * self._stride

    def state(self, given: int) -> State:
        """Return a state from which all undelivered samples can be read.

        Args:
            given: How many samples all ranks in step have delivered; more may be read.
        """
        if self._marks[-1]["taken"] < self._taken <= given:
            self._marks.append(self._here())
        self._forget(given)
        mark = {**self._marks[0]}
        if given <= self._taken:
            mark["failed"] = [at - mark["taken"] for at in self._failed if at < given]
        elif given > self._known_until:
            mark.pop("failed", None)  # only other ranks have read some of them
        return mark

    def _here(self) -> State:
        assert self._cursor is not None
        return {"taken": self._taken, "state": self._cursor.state()}

    def _forget(self, given: int) -> None:
        """Drop states before the last one that suffices."""
        while len(self._marks) > 1 and self._marks[1]["taken"] <= given:
            self._marks.popleft()
        self._failed = [at for at in self._failed if at >= self._marks[0]["taken"]]


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
