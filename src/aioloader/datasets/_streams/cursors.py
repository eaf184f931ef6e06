"""Cursors, which read streams in blocks of samples and can save their positions.

Each step of a stream (``map``, ``filter``, ``take``...) is a cursor over the previous
step's cursor. A position consists of the state before a block, and the number of the
block's samples passed on. Resuming makes the block again, and drops those samples.
"""

import asyncio
import enum
import functools
import inspect
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

from aioloader._base.blocks import Block, FailedSample, join, unreadable
from aioloader._base.cancellation import cancel
from aioloader._base.warnings import warn
from aioloader._order.ranks import ReaderShare
from aioloader._order.stream_states import (
    Description,
    differences,
    is_repeatable,
    warn_of_order,
)
from aioloader.errors import ShardChangedError, StateMismatchError

if TYPE_CHECKING:
    from aioloader.datasets._streams.agreement import Agreement

State: TypeAlias = dict[str, Any]
_MAIN_MODULES = {"__main__", "__mp_main__"}


class Ahead(enum.IntEnum):
    """How far a stream may be read ahead of the samples passed on.

    ``NEVER``: not at all, because a second read may return different samples.
    ``QUICK``: only in mixed streams. ``FREE``: always. Both only while reads are quick.
    """

    NEVER = 0
    QUICK = 1
    FREE = 2


@dataclass(frozen=True)
class Reading:
    """One reader's iteration over its share of a stream, in one epoch."""

    epoch: int
    share: ReaderShare
    stack: AsyncExitStack  # is closed at the end of the iteration
    # Lists of shards by their source's id; all readers of this rank share them.
    listed: dict[Any, Any] = field(default_factory=dict)
    agreement: "Agreement | None" = None  # compares lists of shards among ranks
    begun: int = 0  # the epoch in which the readers began the stream
    reads_whole: ClassVar[bool] = True


class OpenBlock(NamedTuple):
    """The record of a block that has samples not passed on yet."""

    before: State
    length: int
    details: Any  # for ``_state_after``; by default, positions of unreadable samples


class Cursor:
    """The base of sources and steps, which return samples in blocks.

    A subclass implements ``_make``, which returns the next samples, and
    ``_make_state``, which returns a state to make them again. A cursor uses only its
    own entries of a state. The next step calls ``pull``. A step that combines inputs
    and passes samples on later calls ``fill`` and ``take``, and then ``pass_on``.
    """

    overshoots = False  # whether `_make` may return more samples than its limit
    prefetches = False  # whether the next block is made while one is passed on
    ready = 0  # how many samples `take` can return without waiting

    def __init__(self, state: State) -> None:
        # The loaded state; None once the samples passed on before it are dropped again.
        self._loaded = state if state.get("taken") else None
        self._open_blocks: deque[OpenBlock] = deque()
        self._passed = 0  # samples of the first open block
        self._block: Block = []
        self._ahead_state: State | None = None  # before the block made in advance
        # Set by a `_make` that overrides the defaults: the state before its block, and
        # the block's details.
        self._origin: tuple[State, Any] | None = None
        self._making: asyncio.Task[Block] | None = None

    async def _make(self, limit: int) -> Block:
        """Return the next samples, about ``limit``; an empty block at the end.

        A sample that failed is a ``FailedSample``; the stream continues after it.
        """
        raise NotImplementedError

    def _make_state(self) -> State:
        """Return a JSON-ready state from which ``_make`` can repeat its next block."""
        raise NotImplementedError

    def _state_after(self, before: State, details: Any, count: int) -> State:
        """Return the state after the first ``count`` samples of a block."""
        if not count:
            return before
        return {**before, "taken": count, "failed": [k for k in details if k < count]}

    async def _close(self) -> None:
        """Release open resources. Called when ``_make`` is not running."""

    def passes(self) -> int | None:
        """Return the pass number of an endless ``repeat``, or None if there is none."""
        return None

    async def pull(self, limit: int) -> Block:
        """Return the next samples, from 1 to ``limit``; an empty block at the end."""
        if not self.ready:
            if self._loaded is None and not self.overshoots:
                return await self._make(limit)
            await self.fill(limit)
        block = self.take(limit)
        self.pass_on(len(block))
        return block

    def state(self) -> State:
        """Return the position of the first sample that was not passed on."""
        if self._loaded is not None:
            return self._loaded
        if not self._open_blocks:
            return self._ahead_state or self._make_state()
        block = self._open_blocks[0]
        return self._state_after(block.before, block.details, self._passed)

    async def aclose(self) -> None:
        """Stop pending work, wait for it to end, and release open resources."""
        making, self._making = self._making, None
        await cancel([making] if making is not None else [])
        await self._close()

    async def fill(self, limit: int) -> bool:
        """Read about ``limit`` more samples for ``take``; return whether any came."""
        if (state := self._loaded) is not None:
            await self._replay(state["taken"], state.get("failed"))
            self._loaded = None
            if self.ready:
                return True
        block = await self._next_block(limit)
        if self.ready:
            self._block = join([self._block[len(self._block) - self.ready :], block])
        else:
            self._block = block
        self.ready = len(self._block)
        return len(block) > 0

    def take(self, limit: int) -> Block:
        """Return up to ``limit`` of the samples that ``fill`` has read."""
        whole, start = self._block, len(self._block) - self.ready
        if limit < self.ready:
            self.ready -= limit
            return whole[start : start + limit]
        self._block, self.ready = [], 0
        return whole[start:] if start else whole

    def take_blocks(self, size: int, most: int) -> list[Block]:
        """Return up to ``most`` blocks of ``size``; stop before a failed sample."""
        blocks, start = list[Block](), len(self._block) - self.ready
        for number in range(min(self.ready // size, most)):
            first = start + number * size
            block = self._block[first : first + size]
            if isinstance(block, list) and FailedSample in set(map(type, block)):
                break
            blocks.append(block)
        self.ready -= size * len(blocks)
        if not self.ready:
            self._block = []
        return blocks

    def pass_on(self, count: int) -> None:
        """Note that ``count`` samples returned by ``take`` have been passed on."""
        self._passed += count
        while self._open_blocks and self._passed >= self._open_blocks[0].length:
            self._passed -= self._open_blocks.popleft().length

    async def _next_block(self, limit: int) -> Block:
        """Return the next block, and record the state before it."""
        if self.prefetches:
            making = self._making or self._prefetch(limit)
            await asyncio.wait([making])  # cancellation does not reach it
            self._making = None
            block, before = making.result(), self._ahead_state
            self._ahead_state = None
            assert before is not None
        else:
            before = self._make_state()
            block = await self._make(limit)
        self._note_block(before, block)
        if self.prefetches and len(block):
            self._prefetch(limit)
        return block

    def _prefetch(self, limit: int) -> "asyncio.Task[Block]":
        self._ahead_state = self._make_state()
        self._making = asyncio.create_task(self._make(limit))
        return self._making

    def _note_block(self, before: State, block: Block) -> None:
        origin, self._origin = self._origin, None
        if len(block):
            before, details = origin or (before, unreadable(block))
            self._open_blocks.append(OpenBlock(before, len(block), details))

    async def _replay(self, count: int, failed: list[int] | None) -> None:
        """Remake, check and drop the first ``count`` samples after the loaded state."""
        done = 0
        while done < count:
            block = await self._next_block(count - done)
            check_replayed(block, done, count, failed)
            if not len(block):
                break
            dropped = min(len(block), count - done)
            self._block, self.ready = block, len(block) - dropped
            self.pass_on(dropped)
            done += dropped


async def skip(
    pull: Callable[[int], Any], count: int, failed: list[int] | None = None
) -> int:
    """Pull, check and drop ``count`` replayed samples; return how many were missing."""
    done = 0
    while done < count:
        block = await pull(count - done)
        check_replayed(block, done, count, failed)
        if not len(block):
            break
        done += len(block)
    return count - done


def check_replayed(
    block: Block, start: int, count: int, failed: list[int] | None
) -> None:
    """Raise a ShardChangedError unless the same samples are unreadable as before.

    An unreadable shard counts as one sample. If that shard can be read now, or another
    cannot, later samples shift, and the wrong ones would be dropped. ``block`` has the
    samples from position ``start`` of ``count`` on; at the end it is empty. ``failed``:
    positions that were unreadable when the state was saved; None skips the check.
    """
    if failed is None:
        return
    if not len(block) and start < count:
        raise ShardChangedError(
            f"of the {count:,} samples that the state says to read again, there are "
            f"{start:,} now; restore the others, or restart the epoch"
        )
    lost = [start + index for index in unreadable(block)]  # may repeat a position
    stop = min(start + len(block), count)
    now = Counter(position for position in lost if position < stop)
    then = Counter(position for position in failed if start <= position < stop)
    if now == then:
        return
    position = min((now - then) | (then - now))
    error = block[position - start].error if position in lost else None
    change = "could not be read when the state was saved, and now it can"
    if error is not None:
        change = f"could be read when the state was saved, and now it cannot: {error}"
    raise ShardChangedError(
        f"of the {count:,} samples that the state says to read again, number "
        f"{position + 1:,} {change}; the samples after it would shift, so make the "
        "same shards readable as then, or restart the epoch",
        location=getattr(error, "location", ""),
    ) from error


def qualname(function: Any) -> str:
    """Return a callable's qualified name, which is the same in every process."""
    if isinstance(function, functools.partial):
        return f"partial({qualname(function.func)})"
    function = inspect.unwrap(function) if callable(function) else function
    function = getattr(function, "__func__", function)
    named = function if hasattr(function, "__qualname__") else type(function)
    module = getattr(named, "__module__", None)
    is_known = module and module not in _MAIN_MODULES
    return f"{module}.{named.__qualname__}" if is_known else str(named.__qualname__)


def fitted(state: State, description: Description, *, strict: bool) -> State:
    """Return an iterator's state in the form that the described stream can load.

    Unless ``strict``, shards may have other versions if their lengths are the same.
    Raise a StateMismatchError, which names the differences, for another stream's state.
    """
    errors, renamed = differences(state["stream"], description)
    if errors:
        raise StateMismatchError(
            f"the state is of another stream: {'; '.join(errors)}; load it with the "
            "stream that saved it, or restart the epoch",
            expected=state["stream"],
            found=description,
        )
    if renamed:
        warn(
            f"the state was saved with functions of other names: {'; '.join(renamed)}; "
            "if they do something else, the samples differ"
        )
    readers = state["streams"].values()
    if not is_repeatable(description) and any(map(_has_read_ahead, readers)):
        warn_of_order()
    streams = state["streams"] if strict else _without_stamps(state["streams"])
    return {**state, "stream": description, "streams": streams}


def _without_stamps(state: Any) -> Any:
    """Return a state without version stamps, so that other shard versions fit."""
    if isinstance(state, list):
        return [*map(_without_stamps, state)]
    if not isinstance(state, dict):
        return state
    if isinstance(position := state.get("at"), dict):  # in a shard
        return {**state, "at": {k: v for k, v in position.items() if k != "stamp"}}
    return {name: _without_stamps(value) for name, value in state.items()}


def _has_read_ahead(reader: State) -> bool:
    """Tell whether any step of a reader had read ahead of the samples passed on."""
    states = [reader["state"]]
    while states:
        state = states.pop()
        taken = state.get("taken", 0) or state.get("offset", 0)
        up = state.get("up") or []
        if max(taken) if isinstance(taken, list) else taken:
            return True
        states += up if isinstance(up, list) else [up] if up else []
    return False
