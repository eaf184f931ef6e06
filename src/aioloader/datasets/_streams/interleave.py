"""Cursors over sequences of shards, interleaved sequences, and mixed streams.

A sequence opens small shards in advance. The ready samples of several inputs are
interleaved into one block, and a pull returns a slice of the block, so a turn costs
little. A position contains the inputs' positions, so resuming needs no earlier block.
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
from aioloader.datasets._streams.cursors import Ahead, Cursor, Reading, State, skip
from aioloader.datasets._streams.shards import (
    ShardFormat,
    ShardPosition,
    ShardReader,
    Summary,
)
from aioloader.errors import ShardChangedError

# Samples, or rows of columns, to request from a shard's reader at once, so that they
# share the cost of a call. More rows are requested, because they are in memory anyway.
SAMPLES_PER_READ, ROWS_PER_READ = 512, 1 << 14
# Most shards that a format is asked to open together.
_MAX_OPENED = 16
# Most samples to interleave at once, so that they share the cost of a call.
_MAX_INTERLEAVED = 1 << 15
# Most samples to mix at once, and the seconds within which they count as quick.
_MAX_MIXED, _QUICK_SECONDS = 2048, 2e-3
# Below this time per sample, each stream is asked for as many samples as a whole plan
# has, because reading a few costs nearly as much.
_LIGHT_SECONDS = 1e-3
# Most rows of columns to interleave on the loop.
_LOOP_ROWS = 256


class ShardSequence(Cursor):
    """The samples of several shards, one shard after another.

    ``indices`` selects the shards from ``shards``, which may contain millions. A state
    contains a shard's number, a position in that shard, and how many samples after the
    position were passed on. In an SQL table, the position names the last row passed on,
    because rows may be inserted or deleted. If the sequence is its reader's only one,
    it has a ``summary``, and its state has the form of an ``Interleaved`` state.
    """

    overshoots = True

    def __init__(
        self,
        made_by: ShardFormat,
        shards: Sequence[Any],
        indices: Sequence[int],
        budget: int,
        state: State,
        summary: Summary | None = None,
    ) -> None:
        super().__init__({})
        self._summary = summary
        self._format = made_by
        self._shards, self._indices = shards, indices
        self._budget = budget
        self._number: int = state.get("shard", 0)
        # Where to open the shard, and how many samples to drop after that.
        self._position: ShardPosition = state.get("at", {})
        self._skip: int = state.get("taken", 0)
        self._min_limit = SAMPLES_PER_READ
        self._reader: ShardReader | None = None
        self._ahead: deque[ShardReader] = deque()  # of the next shards
        self._closing: ShardReader | None = None

    def begin(self) -> None:
        if self._number < len(self._indices):
            self._reader = self._open(self._number, self._position)
            self._reader.begin()

    async def _make(self, limit: int) -> Block:
        """Return a shard's next samples, or a failed sample if none can be read."""
        while self._number < len(self._indices):
            reader = self._reader
            if reader is None:
                reader = self._reader = self._open(self._number, self._position)
            try:
                if self._skip:
                    await self._drop(reader)
                block = await reader.pull(max(limit, self._min_limit))
            except ShardChangedError:
                raise
            except Exception as error:  # noqa: BLE001  (the loader's policy decides)
                # The rest of the shard is lost, with all samples still to be dropped.
                self._origin = self._make_state(), None
                await self._next_shard()
                return [FailedSample(error)]
            if block:
                self._origin = self._make_state(), reader.positions()
                is_list = isinstance(block, list)
                self._min_limit = SAMPLES_PER_READ if is_list else ROWS_PER_READ
                self._position = reader.position()
                if self._number + 1 < len(self._indices) and reader.is_draining():
                    self._open_next()
                return block
            await self._next_shard()
        return []

    def _make_state(self) -> State:
        """Return the position of the next sample, with the version of its shard."""
        version = None if self._reader is None else self._reader.version()
        position = {**self._position, **(saved(*version) if version else {})}
        return {"shard": self._number, "at": position, "taken": self._skip}

    def state(self) -> State:
        """Return the position, as an ``Interleaved`` state if there is a summary."""
        state = super().state()
        if self._summary is None:
            return state
        return {"shards": self._summary, "turn": 0, "ended": [], "lanes": [state]}

    def _state_after(self, before: State, details: Any, count: int) -> State:
        if count and details is not None:  # the reader's ``positions``
            return {**before, "at": details(count), "taken": 0}
        return {**before, "taken": count} if count else before

    async def _drop(self, reader: ShardReader) -> None:
        """Drop the samples passed on before the state was saved."""
        if missing := await skip(reader.pull, self._skip):
            raise ShardChangedError(
                f"shard {self._number} of its slot ends {missing:,} samples before the "
                "position in the state; resume with the original shards, or start "
                "again"
            )
        self._skip, self._position = 0, reader.position()

    async def _next_shard(self) -> None:
        """Move to the next shard, and close the reader of the current one."""
        self._closing = self._reader
        self._reader = self._ahead.popleft() if self._ahead else None
        self._number += 1
        self._position, self._skip = {}, 0
        if self._closing is not None:
            await self._closing.aclose()
            self._closing = None

    async def _close(self) -> None:
        readers = [self._reader, *self._ahead, self._closing]
        self._reader = self._closing = None
        self._ahead.clear()
        for reader in readers:
            if reader is not None:
                await reader.aclose()

    def _open(self, number: int, position: ShardPosition) -> ShardReader:
        shard = self._shards[self._indices[number]]
        return self._format.open(shard, position, self._budget)

    def _open_next(self) -> None:
        """Open the next shards in advance if they are small, to hide their latency."""
        ahead = self._ahead
        while (number := self._number + len(ahead) + 1) < len(self._indices):
            if not self._has_room():
                return
            indices = self._indices[number : number + _MAX_OPENED]
            shards = [self._shards[index] for index in indices]
            ahead.extend(self._format.open_together(shards, self._budget))
            if len(ahead) < number - self._number:  # none was opened
                ahead.append(self._open(number, {}))
                ahead[-1].begin()

    def _has_room(self) -> bool:
        """Tell whether one more shard may be read ahead.

        A shard of unknown size is assumed to be small if the current one is. It counts
        as ``budget // START_DIVISOR`` bytes, the most it may request before a pull.
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
    blocks: Sequence[Block], merge: Callable[[Sequence[Block]], Block] = interleave
) -> Block:
    """Return blocks combined by ``merge``, in a thread for large blocks of columns."""
    if len(blocks) == 1:
        return blocks[0]
    has_lists = any(isinstance(block, list) for block in blocks)
    is_quick = has_lists or sum(map(len, blocks)) <= _LOOP_ROWS
    return await in_thread(merge, blocks, is_quick=is_quick)


class Interleaver(Cursor):
    """The base of cursors that interleave the samples of several inputs they own.

    ``own``: this cursor's entries of the state, which decide the next input. ``key``:
    the inputs' entry in states. A block's details are its samples' input numbers.
    """

    overshoots = True

    def __init__(self, inputs: Sequence[Cursor], key: str, own: State) -> None:
        super().__init__({})
        self.inputs = inputs
        self.own = own
        self._key = key
        self._forwarded = 0  # samples of the oldest block that the inputs have counted

    def passes(self) -> int | None:
        passes = [cursor.passes() for cursor in self.inputs]
        return min((number for number in passes if number is not None), default=None)

    async def _order(self, limit: int) -> IntegerArray:
        """Fill inputs; return the next samples' input numbers (empty at the end)."""
        raise NotImplementedError

    def _merged(self, order: IntegerArray, blocks: Sequence[Block]) -> Block:
        """Merge ``blocks`` (one per input used, ascending) into one in ``order``."""
        raise NotImplementedError

    async def _make(self, limit: int) -> Block:
        order = await self._order(limit)
        if not len(order):
            return []
        each = zip(self.inputs, self._counts(order), strict=True)
        blocks = [cursor.take(count) for cursor, count in each if count]
        block = blocks[0]
        if len(blocks) > 1:
            block = await interleaved(blocks, partial(self._merged, order))
        self._origin = self.own, order
        self.own = self._state_after(self.own, order, len(order))
        return block

    def _counts(self, order: IntegerArray) -> list[int]:
        """Return how often each input's number occurs in ``order``."""
        counts: list[int] = np.bincount(order, minlength=len(self.inputs)).tolist()
        return counts

    def pass_on(self, count: int) -> None:
        """Count samples as passed on; the inputs count theirs after a whole block."""
        self._passed += count
        while self._open_blocks and self._passed >= self._open_blocks[0].length:
            self._forward(self._open_blocks[0].length)
            self._forwarded = 0
            self._passed -= self._open_blocks.popleft().length

    def _forward(self, stop: int) -> None:
        """Have the inputs count the oldest block's samples before position ``stop``."""
        order = self._open_blocks[0].details[self._forwarded : stop]
        self._forwarded = stop
        for cursor, count in zip(self.inputs, self._counts(order), strict=True):
            if count:
                cursor.pass_on(count)

    def _make_state(self) -> State:
        return self.own

    def state(self) -> State:
        if self._open_blocks:
            self._forward(self._passed)
        return {**super().state(), self._key: [up.state() for up in self.inputs]}

    async def _close(self) -> None:
        for cursor in self.inputs:
            await cursor.aclose()


class Interleaved(Interleaver):
    """Sequences of shards, interleaved round-robin, one sample at a time."""

    inputs: Sequence[ShardSequence]
    _has_begun = False

    def __init__(
        self, sequences: Sequence[ShardSequence], state: State, summary: State
    ) -> None:
        turn, ended = state.get("turn", 0), state.get("ended", [])
        own = {"shards": summary, "turn": turn, "ended": ended}
        super().__init__(sequences, "lanes", own)

    def _turns(self) -> list[int]:
        """Return the numbers of inputs that have not ended; the next one is first."""
        ended = set(self.own["ended"])
        active = [k for k in range(len(self.inputs)) if k not in ended]
        turn = self.own["turn"] % max(1, len(active))
        return active[turn:] + active[:turn]

    def _set_turns(self, active: Sequence[int]) -> None:
        """Record that only the ``active`` inputs have not ended; the first is next."""
        ended = sorted({*range(len(self.inputs))} - {*active})
        turn = sorted(active).index(active[0]) if active else 0
        self.own = {**self.own, "turn": turn, "ended": ended}

    def _state_after(self, before: State, details: Any, count: int) -> State:  # noqa: ARG002
        active = len(self.inputs) - len(before["ended"])
        return {**before, "turn": (before["turn"] + count) % max(1, active)}

    async def _order(self, limit: int) -> IntegerArray:
        """Wait until all inputs have samples or have ended; return whole rounds."""
        inputs, turns = self.inputs, self._turns()
        if not self._has_begun:  # start all concurrently
            self._has_begun = True
            for k in turns:
                inputs[k].begin()
        active = [k for k in turns if inputs[k].ready or await inputs[k].fill(limit)]
        if len(active) < len(turns):
            self._set_turns(active)
        rounds = min((inputs[k].ready for k in active), default=0)
        if len(active) > 1:
            rounds = min(rounds, max(1, max(limit, _MAX_INTERLEAVED) // len(active)))
        return np.tile(np.array(active, np.intp), rounds)

    def _merged(self, order: IntegerArray, blocks: Sequence[Block]) -> Block:
        """Return the samples round-robin; ``blocks`` are in ascending input order."""
        first = int(np.argmin(order[: len(blocks)]))  # the lowest input's turn
        return interleave([*blocks[-first:], *blocks[:-first]] if first else blocks)


class AsTheyCome(Interleaved):
    """Sequences of shards whose samples are used as they arrive, not round-robin."""

    def __init__(
        self, sequences: Sequence[ShardSequence], state: State, summary: State
    ) -> None:
        super().__init__(sequences, state, summary)
        self._fills: dict[int, asyncio.Task[bool]] = {}

    async def _order(self, limit: int) -> IntegerArray:
        """Wait until an input has samples; return an order of only that input."""
        while turns := self._turns():
            for k in turns:
                if not self.inputs[k].ready and k not in self._fills:
                    self._fills[k] = asyncio.create_task(self.inputs[k].fill(limit))
            for place, k in enumerate(turns):
                if ready := self.inputs[k].ready:
                    # Next time, this input is checked last.
                    turn = (self.own["turn"] + place + 1) % len(turns)
                    self.own = {**self.own, "turn": turn}
                    return np.full(min(limit, ready), k)
            fills, first = self._fills.values(), asyncio.FIRST_COMPLETED
            await asyncio.wait(fills, return_when=first)
            done = [k for k, fill in self._fills.items() if fill.done()]
            ended = {k for k in done if not self._fills.pop(k).result()}
            self._set_turns([k for k in turns if k not in ended])
        return np.empty(0, np.intp)

    def _state_after(self, before: State, details: Any, count: int) -> State:  # noqa: ARG002
        return before  # whose turn it is does not depend on the number of samples

    async def _close(self) -> None:
        fills = [*self._fills.values()]
        self._fills.clear()
        await cancel(fills)
        await super()._close()


class Mixed(Interleaver):
    """Samples of several streams, in the order of a ``schedule``.

    The state contains each stream's sample count, and the numbers of ended streams.
    """

    def __init__(
        self,
        cursors: Sequence[Cursor],
        state: State,
        reading: Reading,
        schedule: Schedule,
        ahead: Ahead,
    ) -> None:
        fresh = {"counts": [0] * len(cursors), "ended": []}
        own = {name: state.get(name, value) for name, value in fresh.items()}
        super().__init__(cursors, "up", own)
        self._schedule = schedule
        self._share = reading.share
        self._may_grow = ahead is not Ahead.NEVER
        self._ask, self._is_light = 0, False
        self._finished: set[int] = set()  # streams that cannot be filled any further
        # The next samples' streams; the plan's first position and then-ended streams.
        self._planned: IntegerArray = np.empty(0, np.intp)
        self._plan_start: tuple[int, list[int]] = 0, []

    def _state_after(self, before: State, details: Any, count: int) -> State:
        added = zip(before["counts"], self._counts(details[:count]), strict=True)
        return {**before, "counts": [*map(sum, added)]}

    def _merged(self, order: IntegerArray, blocks: Sequence[Block]) -> Block:
        # The joined blocks have the samples as a stable sort by stream orders them.
        places = np.empty(len(order), np.int64)
        places[np.argsort(order, kind="stable")] = np.arange(len(order))
        indices: Any = places.tolist()
        return pick(join(blocks), indices)

    async def _order(self, limit: int) -> IntegerArray:
        """Return the stream number of each next sample, for as many as come quickly."""
        most, began = max(limit, self._ask), time.perf_counter()
        count = len(self.inputs)
        while len(self.own["ended"]) < count:
            plan = self._plan()[:most]
            plan = plan[: await self._fill(plan, began + _QUICK_SECONDS)]
            if len(plan):
                took = time.perf_counter() - began if self._may_grow else math.inf
                self._ask = min(2 * most, _MAX_MIXED) if took < _QUICK_SECONDS else 0
                self._is_light = took < _LIGHT_SECONDS * len(plan)
                return plan
            # The next stream has ended.
            ended = sorted({*self.own["ended"], int(self._plan()[0])})
            ended = [*range(count)] if self._schedule.until == "first" else ended
            self.own = {**self.own, "ended": ended}
        return np.empty(0, np.intp)

    async def _fill(self, plan: IntegerArray, until: float) -> int:
        """Fill the streams for a plan; return how many of its first samples are ready.

        After time ``until``, a stream that may be read ahead is filled at most once.
        """
        counts, length = self._counts(plan), len(plan)
        least = length if self._is_light else 0
        for k, (cursor, count) in enumerate(zip(self.inputs, counts, strict=True)):
            while cursor.ready < count and k not in self._finished:
                if not await cursor.fill(max(count - cursor.ready, least)):
                    self._finished.add(k)
                if self._may_grow and time.perf_counter() > until:
                    break  # a later plan uses the surplus of the other streams
            if cursor.ready < count:
                places = np.flatnonzero(plan == k)
                length = min(length, int(places[cursor.ready]))
        return length

    def _plan(self) -> IntegerArray:
        """Return the stream numbers of the next samples, at least one."""
        start, ended = sum(self.own["counts"]), self.own["ended"]
        first, known = self._plan_start
        if ended != known or not first <= start < first + len(self._planned):
            self._planned = self._schedule.sources(start, self._share, ended)
            self._plan_start = first, _ = start, ended
        return self._planned[start - first :]
