"""A stream being read: blocks of samples, and a position that can be saved.

Each step of a stream (``map``, ``filter``, ``take``...) is a cursor over the previous
step. A step pulls at most as many samples as it was asked for, so its state is that of
the previous step; a step that reads ahead records the states it passed in a ``Trail``.
"""

import asyncio
import enum
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias

from aioloader._order.blocks import (
    Bad,
    Block,
    failed,
    unreadable,
)
from aioloader._order.raising import ends_task
from aioloader.errors import ShardChangedError

State: TypeAlias = dict[str, Any]


class Cursor(Protocol):
    """Samples that come in blocks."""

    async def pull(self, limit: int) -> Block:
        """Return the next samples, from 1 to ``limit``; an empty block at the end.

        A sample that failed is a ``Bad``; the stream continues after it.
        """

    def state(self) -> State:
        """Return the position of the next sample, to be saved as JSON."""

    async def aclose(self) -> None:
        """Stop pending work and wait for it to end."""


class Ahead(enum.IntEnum):
    """How far a stream may be read ahead of the samples passed on.

    ``NEVER``: reading again may give other samples. ``QUICK``: only while samples come
    quickly, because each may have to be waited for. ``FREE``: any block.
    """

    NEVER = 0
    QUICK = 1
    FREE = 2


class Pulls(Protocol):
    """The part of a cursor or a reader that ``skip`` needs."""

    async def pull(self, limit: int) -> Block:
        """Return the next samples."""


class Trail:
    """The states a cursor passed while reading ahead, to find its position again.

    Args:
        upstream: The cursor being read.
    """

    def __init__(self, upstream: Cursor) -> None:
        self._upstream = upstream
        # For each block: the state before it, its length, and its unreadable samples.
        self._blocks: deque[tuple[State, int, list[int]]] = deque()
        self._taken = 0
        self._begun: State | None = None

    def begin(self, before: State) -> None:
        """Note that a pull begins: the upstream has no state until it is added."""
        self._begun = before

    def add(self, before: State, block: Block) -> None:
        """Note that ``block`` was pulled, starting at the state ``before``."""
        self._begun = None
        if len(block):
            self._blocks.append((before, len(block), unreadable(block)))

    def advance(self, count: int) -> None:
        """Note that ``count`` more samples were passed on."""
        self._taken += count
        while self._blocks and self._taken >= self._blocks[0][1]:
            self._taken -= self._blocks.popleft()[1]

    def state(self) -> State:
        """Return the position of the first sample not yet passed on."""
        if not self._blocks:
            up = self._begun or self._upstream.state()
            return {"up": up, "taken": 0, "failed": []}
        before, _, failed = self._blocks[0]
        taken = self._taken
        passed = [place for place in failed if place < taken]
        return {"up": before, "taken": taken, "failed": passed}


async def skip(cursor: Pulls, count: int, known: list[int] | None = None) -> int:
    """Pull and drop ``count`` samples; return how many were missing.

    Raises:
        ShardChangedError: See ``check_again``; ``known`` is passed to it.
    """
    found = 0
    while found < count:
        block = await cursor.pull(count - found)
        check_again(block, found, count, known)
        if not len(block):
            break
        found += len(block)
    return count - found


def check_again(block: Block, at: int, count: int, known: list[int] | None) -> None:
    """Check that the same samples fail when the samples passed on are read again.

    An unreadable shard counts as one failed sample. If it can be read now, or another
    one no longer can, all later samples shift, and the wrong ones would be dropped.

    Args:
        block: Samples that were read again; empty at the end.
        at: Position of the block among the samples passed on.
        count: How many samples were passed on.
        known: Positions of those that were unreadable then; None: not known.

    Raises:
        ShardChangedError: If other samples fail now, or if there are fewer samples.
    """
    if known is None:
        return
    if not len(block) and at < count:
        raise ShardChangedError(
            f"of the {count:,} samples that the state says to read again, there are "
            f"{at:,} now; restore the others, or restart the epoch"
        )
    found = {at + place: block[place].error for place in unreadable(block)}
    stop = min(at + len(block), count)
    now = {place for place in found if place < stop}
    then = {place for place in known if at <= place < stop}
    if now == then:
        return
    place = min(now ^ then)
    error = found.get(place)
    what = "could not be read when the state was saved, and now it can"
    if error is not None:
        what = f"could be read when the state was saved, and now it cannot: {error}"
    raise ShardChangedError(
        f"of the {count:,} samples that the state says to read again, number "
        f"{place + 1:,} {what}; the samples after it would be others, so make the same "
        "shards readable as then, or restart the epoch",
        location=getattr(error, "location", ""),
    ) from error


async def guarded(
    function: Callable[[Any], Awaitable[Any]], sample: Any, stage: str
) -> Any:
    """Return what a coroutine function makes of a sample, or its error as ``Bad``."""
    if type(sample) is Bad:
        return sample
    try:
        return await function(sample)
    except BaseException as error:
        if ends_task(error):
            raise
        return bad(error, stage)


def bad(error: BaseException, stage: str) -> Bad:
    """Return ``error`` as a ``Bad``, with a note that names the stage."""
    sample = failed(error, f"the function of {stage!r}")
    sample.error.add_note(f"aioloader: in {stage!r} of the stream")
    return sample


class Mapped:
    """Applies a plain function to each sample, a block at a time, in a thread."""

    has_state = False
    stage = "map"  # for error notes

    def __init__(self, upstream: Cursor, function: Callable[[Any], Any]) -> None:
        self._upstream = upstream
        self._function = function
        self.aclose = upstream.aclose

    def state(self) -> State:
        """Return the position of the next sample."""
        return {"up": self._upstream.state()}

    async def pull(self, limit: int) -> Block:
        """Return the next samples, mapped."""
        block = await self._upstream.pull(limit)
        return await asyncio.to_thread(self._apply, block) if len(block) else []

    def _apply(self, block: Block) -> list[Any]:
        function, made = self._function, []
        for sample in block:
            try:
                made.append(sample if type(sample) is Bad else function(sample))
            except BaseException as error:  # noqa: BLE001  (the policy decides)
                made.append(bad(error, self.stage))
        return made


class MappedAsync:
    """Applies a coroutine function to each sample, many at a time, in order.

    When a call ends, the next one starts, whether or not there is a pull. Memory holds
    up to ``concurrency`` samples that wait for a call, and as many results that wait
    for their turn.
    """

    has_state = True

    def __init__(
        self,
        upstream: Cursor,
        function: Callable[[Any], Awaitable[Any]],
        concurrency: int,
    ) -> None:
        self._upstream = upstream
        self._function = function
        self._concurrency = concurrency
        self._trail = Trail(upstream)
        self._waiting: deque[Any] = deque()
        self._tasks: deque[asyncio.Task[Any]] = deque()
        self._under_way = 0
        self._reading: asyncio.Task[None] | None = None
        self._has_ended = False
        self._loaded: State | None = None  # until its samples are dropped

    def load(self, state: State) -> None:
        """Drop the samples passed on before ``state`` was taken."""
        self._loaded = state if state.get("taken") else None

    async def pull(self, limit: int) -> Block:
        """Return the mapped samples that are ready, at least one."""
        if self._loaded is not None:
            known = self._loaded.get("failed")
            await skip(self._upstream, self._loaded["taken"], known)
            self._loaded = None
        self._refill()
        while not self._tasks and self._reading is not None:
            reading = self._reading
            await asyncio.wait([reading])  # cancellation does not reach it
            if reading.exception() is not None:
                self._reading = None
            reading.result()
            self._refill()
        made: list[Any] = []
        while self._tasks and len(made) < limit:
            if made and not self._tasks[0].done():
                break
            await asyncio.wait([self._tasks[0]])  # cancellation does not reach it
            made.append(self._tasks.popleft().result())
        self._trail.advance(len(made))
        self._refill()
        return made

    def _refill(self) -> None:
        """Start calls, and read more samples for later ones."""
        if self._reading is not None and self._reading.done():
            if self._reading.exception() is not None:
                return  # raised after the last result
            self._reading = None
        while self._waiting and self._under_way < self._concurrency:
            if len(self._tasks) >= 2 * self._concurrency:
                return
            job = guarded(self._function, self._waiting.popleft(), "map")
            task = asyncio.create_task(job)
            self._under_way += 1
            task.add_done_callback(self._ended_call)
            self._tasks.append(task)
        # Many at once: one pull costs the same for one sample as for many.
        is_low = 2 * len(self._waiting) <= self._concurrency
        if is_low and self._reading is None and not self._has_ended:
            before = self._upstream.state()
            self._trail.begin(before)
            self._reading = asyncio.create_task(self._read(before))
            self._reading.add_done_callback(self._ended_reading)

    async def _read(self, before: State) -> None:
        block = await self._upstream.pull(self._concurrency)
        self._has_ended = not len(block)
        self._trail.add(before, block)
        self._waiting.extend(block)

    def _ended_call(self, _task: asyncio.Task[Any]) -> None:
        self._under_way -= 1
        self._refill()

    def _ended_reading(self, reading: asyncio.Task[None]) -> None:
        if not reading.cancelled() and reading.exception() is None:
            self._refill()

    def state(self) -> State:
        """Return the position of the first sample not yet passed on."""
        return self._loaded or self._trail.state()

    async def aclose(self) -> None:
        """Cancel pending calls and reads."""
        self._has_ended = True
        self._waiting.clear()
        reading, self._reading = self._reading, None
        tasks = [*self._tasks, *([] if reading is None else [reading])]
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._upstream.aclose()


class Filtered:
    """Keeps the samples for which a function, plain or async, returns true."""

    has_state = False

    def __init__(
        self, upstream: Cursor, function: Callable[[Any], Any], *, is_async: bool
    ) -> None:
        self._upstream = upstream
        self._function = function
        self._is_async = is_async
        self.aclose = upstream.aclose

    def state(self) -> State:
        """Return the position of the next sample."""
        return {"up": self._upstream.state()}

    async def pull(self, limit: int) -> Block:
        """Return the next samples that pass."""
        while True:
            block = await self._upstream.pull(limit)
            if not len(block):
                return []
            kept = await self._kept(block)
            if kept:
                return kept

    async def _kept(self, block: Block) -> list[Any]:
        if self._is_async:
            jobs = [guarded(self._function, sample, "filter") for sample in block]
            said = await asyncio.gather(*jobs)
        else:
            said = await asyncio.to_thread(self._ask, block)
        # A sample for which the function failed is passed on as its error.
        return [
            answer if type(answer) is Bad else sample
            for sample, answer in zip(block, said, strict=True)
            if type(answer) is Bad or answer
        ]

    def _ask(self, block: Block) -> list[Any]:
        function, said = self._function, []
        for sample in block:
            try:
                said.append(sample if type(sample) is Bad else function(sample))
            except BaseException as error:  # noqa: BLE001  (the policy decides)
                said.append(bad(error, "filter"))
        return said
