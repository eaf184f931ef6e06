"""Lanes of shards, lanes that take turns, and streams mixed by weights.

Small shards of a lane are opened ahead. What several inputs have ready is interleaved
into one block, and pulls are slices of it, so a turn costs little. The inputs only
count the samples passed on: a position is the position of each, and nothing that was
interleaved is made again after a load.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from aioloader._base.blocks import Block, FailedSample, interleave, join, pick
from aioloader._base.cancellation import cancel, in_thread
from aioloader._order.mixture import IntegerArray, Schedule
from aioloader.datasets._stores.bytes import START_DIVISOR
from aioloader.datasets._stores.failures import saved
from aioloader.datasets._streams.cursors import (
    Ahead,
    Cursor,
    Reading,
    State,
    skip,
)
from aioloader.datasets._streams.shards import (
    ShardFormat,
    ShardPosition,
    ShardReader,
    Summary,
)
from aioloader.errors import ShardChangedError

# Least number of samples that a lane asks its reader for: many share the cost.
_LANE_SAMPLES = 512
# Least number of rows of columns, which are in memory anyway.
_LANE_ROWS = 1 << 14
# Shards that may be opened together.
_TOGETHER = 16
# Most samples interleaved at once: the cost per sample is small if they are many.
_WOVEN = 1 << 15
# Most samples that are mixed at once, and seconds that these may take to come.
_SAMPLES = 2048
_QUICK = 2e-3
# Seconds per sample below which each stream is asked for as many as all together: a
# read costs nearly as much for a few.
_LIGHT = 1e-3
# Most rows of columns that are interleaved on the loop.
_ROWS = 256


class ShardSequence(Cursor):
    """The samples of several shards.

    They are at ``places`` of ``shards``, looked up on access: there may be millions.
    A state is the number of a shard, a position in it, and how many samples after that
    were passed on. Counting them is right for data that does not change; a reader of
    rows, which may be deleted and inserted, names the last one instead. The state of
    the only lane of a reader, which gets the ``summary``, is like that of several.
    """

    overshoots = True

    def __init__(
        self,
        made_by: ShardFormat,
        shards: Sequence[Any],
        places: Sequence[int],
        budget: int,
        state: State,
        summary: Summary | None = None,
    ) -> None:
        super().__init__({})
        self._summary = summary
        self._format = made_by
        self._shards, self._places = shards, places
        self._budget = budget
        self._number: int = state.get("shard", 0)
        # Where the shard is opened, and what is dropped then, until it was.
        self._position: ShardPosition = state.get("at", {})
        self._skip: int = state.get("taken", 0)
        self._least = _LANE_SAMPLES
        self._reader: ShardReader | None = None
        self._ahead: deque[ShardReader] = deque()
        self._done: ShardReader | None = None  # until it is closed

    def begin(self) -> None:
        if self._number < len(self._places):
            self._reader = self._open(self._number, self._position)
            self._reader.begin()

    async def _make(self, limit: int) -> Block:
        """Return a shard's next samples, with a ``FailedSample`` for each lost one."""
        while self._number < len(self._places):
            reader = self._reader
            if reader is None:
                reader = self._reader = self._open(self._number, self._position)
            try:
                if self._skip:
                    await self._drop(reader)
                block = await reader.pull(max(limit, self._least))
            except ShardChangedError:
                raise
            except Exception as error:  # noqa: BLE001  (the loader's policy decides)
                # The rest of the shard is lost, and all that was to be dropped of it.
                self._known = self._here(), None
                await self._turn()
                return [FailedSample(error)]
            if block:
                self._known = self._here(), reader.positions()
                self._least = _LANE_SAMPLES if isinstance(block, list) else _LANE_ROWS
                self._position = reader.position()
                if self._number + 1 < len(self._places) and reader.is_draining():
                    self._open_next()
                return block
            await self._turn()
        return []

    def _here(self) -> State:
        """Return the position of the next sample, with the version of its shard."""
        version = None if self._reader is None else self._reader.version()
        at = {**self._position, **saved(*version)} if version else self._position
        return {"shard": self._number, "at": at, "taken": self._skip}

    def state(self) -> State:
        """Return the position; of all shards, if it is the only lane."""
        state = super().state()
        if self._summary is None:
            return state
        return {"shards": self._summary, "turn": 0, "ended": [], "lanes": [state]}

    def _after(self, before: State, what: Any, count: int) -> State:
        if count and what is not None:
            return {**before, "at": what(count), "taken": 0}
        return {**before, "taken": count} if count else before

    async def _drop(self, reader: ShardReader) -> None:
        """Drop the samples passed on before the state was saved."""
        if missing := await skip(reader.pull, self._skip):
            raise ShardChangedError(
                f"shard {self._number} of its lane ends {missing:,} samples before the "
                "position in the state; resume with the original shards, or start "
                "again"
            )
        self._skip, self._position = 0, reader.position()

    async def _turn(self) -> None:
        """Move to the next shard."""
        self._done = self._reader
        self._reader = self._ahead.popleft() if self._ahead else None
        self._number += 1
        self._position, self._skip = {}, 0
        if self._done is not None:
            await self._done.aclose()
            self._done = None

    async def _close(self) -> None:
        readers = [self._reader, *self._ahead, self._done]
        self._reader = self._done = None
        self._ahead.clear()
        for reader in readers:
            if reader is not None:
                await reader.aclose()

    def _open(self, number: int, position: ShardPosition) -> ShardReader:
        return self._format.open(
            self._shards[self._places[number]], position, self._budget
        )

    def _open_next(self) -> None:
        """Open the next shards ahead, with half of the budget: the rest is kept free.

        Otherwise each small shard would cost the time of a request.
        """
        ahead = self._ahead
        while (number := self._number + len(ahead) + 1) < len(self._places):
            if not self._has_room():
                return
            places = self._places[number : number + _TOGETHER]
            few = [self._shards[place] for place in places]
            ahead.extend(self._format.open_together(few, self._budget))
            if len(ahead) < number - self._number:  # none of them
                ahead.append(self._open(number, {}))
                ahead[-1].begin()

    def _has_room(self) -> bool:
        """Return whether one more shard may be read ahead.

        One whose size is not known yet is expected to be small if the current one is,
        and may take as much as any shard before it is pulled.
        """
        left: float = self._budget // 2
        start = self._budget // START_DIVISOR
        current = None if self._reader is None else self._reader.version()
        is_small = current is None or current[1].size <= start
        for reader in self._ahead:
            count = reader.bytes_ahead()
            if not (is_small if count is None else reader.is_draining()):
                return False
            left -= start if count is None else count
        return not self._ahead or left >= start


async def interleaved(
    blocks: Sequence[Block], join_all: Callable[[Sequence[Block]], Block] = interleave
) -> Block:
    """Return what ``join_all`` makes of blocks; of many columns in a thread."""
    if len(blocks) == 1:
        return blocks[0]
    has_lists = any(isinstance(one, list) for one in blocks)
    is_quick = has_lists or sum(map(len, blocks)) <= _ROWS
    return await in_thread(join_all, blocks, is_quick=is_quick)


class Interleaver(Cursor):
    """Samples of several inputs, which it owns, interleaved.

    ``own`` is its part of the state, who is next; ``key`` names that of the inputs.
    What it notes of a block is the order of its samples.
    """

    overshoots = True

    def __init__(self, inputs: Sequence[Cursor], key: str, own: State) -> None:
        super().__init__({})
        self.inputs = inputs
        self.own = own
        self._key = key
        self._told = 0  # samples of the oldest block that the inputs know of

    def passes(self) -> int | None:
        found = [passes for one in self.inputs if (passes := one.passes()) is not None]
        return min(found, default=None)

    async def _order(self, limit: int) -> IntegerArray:
        """Fill inputs; return which gives each of about ``limit`` samples, or more."""
        raise NotImplementedError

    def _interleaved(self, order: IntegerArray, blocks: Sequence[Block]) -> Block:
        """Return the samples of the blocks of those inputs that have some, in order."""
        raise NotImplementedError

    async def _make(self, limit: int) -> Block:
        order = await self._order(limit)
        if not len(order):
            return []
        each = zip(self.inputs, self._counts(order), strict=True)
        blocks = [one.take(count) for one, count in each if count]
        block = blocks[0]
        if len(blocks) > 1:
            block = await interleaved(blocks, partial(self._interleaved, order))
        self._known = self.own, order
        self.own = self._after(self.own, order, len(order))
        return block

    def _counts(self, order: IntegerArray) -> list[int]:
        counts: list[int] = np.bincount(order, minlength=len(self.inputs)).tolist()
        return counts

    def pass_on(self, count: int) -> None:
        """Note that samples were passed on; tell the inputs of whole blocks."""
        self._passed += count
        while self._made and self._passed >= self._made[0].length:
            self._tell(self._made[0].length)
            self._told = 0
            self._passed -= self._made.popleft().length

    def _tell(self, upto: int) -> None:
        """Tell the inputs how many samples of the oldest block were passed on."""
        part, self._told = self._made[0].what[self._told : upto], upto
        for one, count in zip(self.inputs, self._counts(part), strict=True):
            if count:
                one.pass_on(count)

    def _here(self) -> State:
        return self.own

    def state(self) -> State:
        if self._made:
            self._tell(self._passed)
        return {**super().state(), self._key: [one.state() for one in self.inputs]}

    async def _close(self) -> None:
        for one in self.inputs:
            await one.aclose()


class Interleaved(Interleaver):
    """Lanes of shards that take turns, sample by sample."""

    inputs: Sequence[ShardSequence]
    _has_begun = False

    def __init__(
        self, lanes: Sequence[ShardSequence], state: State, summary: State
    ) -> None:
        turn, ended = state.get("turn", 0), state.get("ended", [])
        own = {"shards": summary, "turn": turn, "ended": ended}
        super().__init__(lanes, "lanes", own)

    def _turns(self) -> list[int]:
        """Return the numbers of the lanes that have not ended, in turn."""
        ended = set(self.own["ended"])
        active = [at for at in range(len(self.inputs)) if at not in ended]
        turn = self.own["turn"] % max(1, len(active))
        return active[turn:] + active[:turn]

    def _turn_to(self, going: Sequence[int]) -> None:
        ended = sorted({*range(len(self.inputs))} - {*going})
        turn = sorted(going).index(going[0]) if going else 0
        self.own = {**self.own, "turn": turn, "ended": ended}

    def _after(self, before: State, what: Any, count: int) -> State:  # noqa: ARG002
        active = len(self.inputs) - len(before["ended"])
        return {**before, "turn": (before["turn"] + count) % max(1, active)}

    async def _order(self, limit: int) -> IntegerArray:
        """Wait until all lanes have samples; return whole rounds of those that do."""
        lanes, turns = self.inputs, self._turns()
        if not self._has_begun:  # all at once, not each when its turn comes
            self._has_begun = True
            for at in turns:
                lanes[at].begin()
        going = [at for at in turns if lanes[at].ready or await lanes[at].fill(limit)]
        if len(going) < len(turns):
            self._turn_to(going)
        rounds = min((lanes[at].ready for at in going), default=0)
        if len(going) > 1:
            rounds = min(rounds, max(1, max(limit, _WOVEN) // len(going)))
        return np.tile(np.array(going, np.intp), rounds)

    def _interleaved(self, order: IntegerArray, blocks: Sequence[Block]) -> Block:
        """Return the samples in turn; blocks are of the lanes in ascending order."""
        first = int(np.argmin(order[: len(blocks)]))  # where the lowest lane is
        return interleave([*blocks[-first:], *blocks[:-first]] if first else blocks)


class AsTheyCome(Interleaved):
    """Lanes in whichever order they have samples: faster over uneven connections."""

    def __init__(
        self, lanes: Sequence[ShardSequence], state: State, summary: State
    ) -> None:
        super().__init__(lanes, state, summary)
        self._fills: dict[int, asyncio.Task[bool]] = {}

    async def _order(self, limit: int) -> IntegerArray:
        """Wait until a lane has samples; return it alone."""
        while turns := self._turns():
            for at in turns:
                if not self.inputs[at].ready and at not in self._fills:
                    fill = asyncio.create_task(self.inputs[at].fill(limit))
                    self._fills[at] = fill
            for place, at in enumerate(turns):
                if ready := self.inputs[at].ready:
                    # The others come before it the next time.
                    turn = (self.own["turn"] + place + 1) % len(turns)
                    self.own = {**self.own, "turn": turn}
                    return np.full(min(limit, ready), at)
            await asyncio.wait(
                self._fills.values(), return_when=asyncio.FIRST_COMPLETED
            )
            done = [at for at, fill in self._fills.items() if fill.done()]
            ended = {at for at in done if not self._fills.pop(at).result()}
            self._turn_to([at for at in turns if at not in ended])
        return np.empty(0, np.intp)

    def _after(self, before: State, what: Any, count: int) -> State:  # noqa: ARG002
        return before  # whose turn it is does not depend on the number of samples

    async def _close(self) -> None:
        fills = [*self._fills.values()]
        self._fills.clear()
        await cancel(fills)
        await super()._close()


class Mixed(Interleaver):
    """Samples of several streams in the order of a ``schedule``.

    The state counts the samples of each stream, and has the numbers of those that have
    ended.
    """

    def __init__(
        self,
        cursors: Sequence[Cursor],
        state: State,
        reading: Reading,
        schedule: Schedule,
        ahead: Ahead,
    ) -> None:
        own = {"counts": [0] * len(cursors), "ended": []}
        super().__init__(
            cursors, "up", {name: state.get(name, own[name]) for name in own}
        )
        self._schedule = schedule
        self._share = reading.share
        self._may_grow = ahead is not Ahead.NEVER
        self._ask, self._is_light = 0, False
        self._finished: set[int] = set()  # inputs without more samples than are ready
        # Streams of the next samples, the number of the first one, and which had ended.
        self._planned: IntegerArray = np.empty(0, np.intp)
        self._planned_at: tuple[int, list[int]] = 0, []

    def _after(self, before: State, what: Any, count: int) -> State:
        added = zip(before["counts"], self._counts(what[:count]), strict=True)
        return {**before, "counts": [*map(sum, added)]}

    def _interleaved(self, order: IntegerArray, blocks: Sequence[Block]) -> Block:
        # Sorted by stream, the samples are those of the blocks, one after the other.
        places = np.empty(len(order), np.int64)
        places[np.argsort(order, kind="stable")] = np.arange(len(order))
        indices: Any = places.tolist()
        return pick(join(blocks), indices)

    async def _order(self, limit: int) -> IntegerArray:
        """Plan many samples, and get those of the streams."""
        # As many as come quickly: each sample of a stream may have to be waited for.
        most, began = max(limit, self._ask), time.perf_counter()
        every = len(self.inputs)
        while len(self.own["ended"]) < every:
            plan = self._plan()[:most]
            plan = plan[: await self._fill(plan, began + _QUICK)]
            if len(plan):
                took = time.perf_counter() - began if self._may_grow else math.inf
                self._ask = min(2 * most, _SAMPLES) if took < _QUICK else 0
                self._is_light = took < _LIGHT * len(plan)
                return plan
            # The next stream has ended.
            ended = sorted({*self.own["ended"], int(self._plan()[0])})
            ended = [*range(every)] if self._schedule.until == "first" else ended
            self.own = {**self.own, "ended": ended}
        return np.empty(0, np.intp)

    async def _fill(self, plan: IntegerArray, until: float) -> int:
        """Fill the streams for a plan; return for how many of its samples they suffice.

        After the time ``until`` each stream is asked only once.
        """
        counts, length = self._counts(plan), len(plan)
        least = length if self._is_light else 0
        for at, (one, count) in enumerate(zip(self.inputs, counts, strict=True)):
            while one.ready < count and at not in self._finished:
                if not await one.fill(max(count - one.ready, least)):
                    self._finished.add(at)
                if self._may_grow and time.perf_counter() > until:
                    break  # surplus of the others is read again
            if one.ready < count:
                places = np.flatnonzero(plan == at)
                length = min(length, int(places[one.ready]))
        return length

    def _plan(self) -> IntegerArray:
        """Return the streams of the next samples, at least of one."""
        at, ended = sum(self.own["counts"]), self.own["ended"]
        first, known = self._planned_at
        if ended != known or not first <= at < first + len(self._planned):
            self._planned = self._schedule.sources(at, self._share, ended)
            self._planned_at = first, _ = at, ended
        return self._planned[at - first :]
