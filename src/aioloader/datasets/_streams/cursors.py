"""A stream being read: blocks of samples, and a position that can be saved.

Each step of a stream (``map``, ``filter``, ``take``...) is a cursor over the previous
one. ``Cursor`` is the one kind of position: the state before a block, and how many of
its samples were passed on. Loading it makes the block again, and drops those.
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
_MAIN = {"__main__", "__mp_main__"}


class Ahead(enum.IntEnum):
    """How far a stream may be read ahead of the samples passed on.

    ``NEVER``: reading again may give other samples. ``QUICK``: only while samples come
    quickly, because each may have to be waited for. ``FREE``: any block.
    """

    NEVER = 0
    QUICK = 1
    FREE = 2


@dataclass(frozen=True)
class Reading:
    """One reader's iteration over a stream: its part of it, in an epoch."""

    epoch: int
    share: ReaderShare
    stack: AsyncExitStack  # closes what the iteration needs
    # What all readers here share, by the identity of a source.
    listed: dict[Any, Any] = field(default_factory=dict)
    agreement: "Agreement | None" = None  # how ranks compare their lists of shards
    begun: int = 0  # the epoch in which the stream was at its beginning
    reads_whole: ClassVar[bool] = True


class OpenBlock(NamedTuple):
    """A block that was made and not passed on whole."""

    before: State
    length: int
    what: Any  # what ``_after`` needs to know of it: mostly its unreadable samples


class Cursor:
    """Samples that come in blocks: the base of sources and steps.

    A subclass says how to ``_make`` the next samples, and from which state: ``_here``.
    Steps over it call ``pull``. What interleaves several cursors, and passes their
    samples on later, calls ``fill`` and ``take``, and then ``pass_on``.

    A subclass takes its own entries of the state.
    """

    overshoots = False  # whether `_make` may give more samples than it was asked for
    makes_ahead = False  # whether the next block is made while one is passed on
    ready = 0  # how many samples can be taken without waiting

    def __init__(self, state: State) -> None:
        # Until the samples passed on before it was saved are dropped again.
        self._loaded = state if state.get("taken") else None
        self._made: deque[OpenBlock] = deque()
        self._passed = 0  # of the first one
        self._block: Block = []
        self._begun: State | None = None  # before the block that is made in advance
        # Set by `_make` if that knows better: the state before its block, and what
        # `_after` needs to know of it.
        self._known: tuple[State, Any] | None = None
        self._making: asyncio.Task[Block] | None = None

    async def _make(self, limit: int) -> Block:
        """Return the next samples, about ``limit``; an empty block at the end.

        A sample that failed is a ``FailedSample``; the stream continues after it.
        """
        raise NotImplementedError

    def _here(self) -> State:
        """Return a state from which ``_make`` gives what it gives next, for JSON."""
        raise NotImplementedError

    def _after(self, before: State, what: Any, count: int) -> State:
        """Return the state after ``count`` samples of a block, none or some."""
        if not count:
            return before
        return {**before, "taken": count, "failed": [at for at in what if at < count]}

    async def _close(self) -> None:
        """Release what is open; nothing is being made."""

    def passes(self) -> int | None:
        """Return the number of the pass of an endless repeat below; None if none is."""
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
        if not self._made:
            return self._begun or self._here()
        made = self._made[0]
        return self._after(made.before, made.what, self._passed)

    async def aclose(self) -> None:
        """Stop pending work, wait for it to end, and release what is open."""
        making, self._making = self._making, None
        await cancel([making] if making is not None else [])
        await self._close()

    async def fill(self, limit: int) -> bool:
        """Get about ``limit`` more samples; return whether there are any."""
        if (state := self._loaded) is not None:
            await self._replay(state["taken"], state.get("failed"))
            self._loaded = None
            if self.ready:
                return True
        block = await self._more(limit)
        if self.ready:
            self._block = join([self._block[len(self._block) - self.ready :], block])
        else:
            self._block = block
        self.ready = len(self._block)
        return len(block) > 0

    def take(self, limit: int) -> Block:
        """Return up to ``limit`` samples that are ready."""
        whole, start = self._block, len(self._block) - self.ready
        if limit < self.ready:
            self.ready -= limit
            return whole[start : start + limit]
        self._block, self.ready = [], 0
        return whole[start:] if start else whole

    def take_blocks(self, size: int, most: int) -> list[Block]:
        """Return up to so many blocks of ``size`` samples, up to one that failed."""
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
        """Note that ``count`` samples that were taken have been passed on."""
        self._passed += count
        while self._made and self._passed >= self._made[0].length:
            self._passed -= self._made.popleft().length

    async def _more(self, limit: int) -> Block:
        """Make the next block, and note where it began."""
        if self.makes_ahead:
            making = self._making or self._make_ahead(limit)
            await asyncio.wait([making])  # cancellation does not reach it
            self._making = None
            block, before = making.result(), self._begun
            self._begun = None
            assert before is not None
        else:
            before = self._here()
            block = await self._make(limit)
        self._note(before, block)
        if self.makes_ahead and len(block):
            self._make_ahead(limit)
        return block

    def _make_ahead(self, limit: int) -> "asyncio.Task[Block]":
        self._begun = self._here()
        self._making = asyncio.create_task(self._make(limit))
        return self._making

    def _note(self, before: State, block: Block) -> None:
        known, self._known = self._known, None
        if len(block):
            before, what = known or (before, unreadable(block))
            self._made.append(OpenBlock(before, len(block), what))

    async def _replay(self, count: int, known: list[int] | None) -> None:
        """Make samples again, and drop them."""
        found = 0
        while found < count:
            block = await self._more(count - found)
            check_again(block, found, count, known)
            if not len(block):
                break
            dropped = min(len(block), count - found)
            self._block, self.ready = block, len(block) - dropped
            self.pass_on(dropped)
            found += dropped


async def skip(
    pull: Callable[[int], Any], count: int, known: list[int] | None = None
) -> int:
    """Pull and drop samples, as in ``check_again``; return how many were missing."""
    found = 0
    while found < count:
        block = await pull(count - found)
        check_again(block, found, count, known)
        if not len(block):
            break
        found += len(block)
    return count - found


def check_again(block: Block, at: int, count: int, known: list[int] | None) -> None:
    """Check that the same samples fail when the samples passed on are read again.

    An unreadable shard counts as one failed sample. If it can be read now, or another
    one no longer can, all later samples shift, and the wrong ones would be dropped.
    ``block`` was read again, at position ``at`` of ``count``; it is empty at the end.
    ``known`` are positions of those that were unreadable then; None: not known.
    """
    if known is None:
        return
    if not len(block) and at < count:
        raise ShardChangedError(
            f"of the {count:,} samples that the state says to read again, there are "
            f"{at:,} now; restore the others, or restart the epoch"
        )
    lost = unreadable(block)
    found = {at + place: block[place].error for place in lost}
    stop = min(at + len(block), count)
    now = Counter(at + place for place in lost if at + place < stop)
    then = Counter(place for place in known if at <= place < stop)
    if now == then:
        return
    place = min((now - then) | (then - now))
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


def name_of(function: Any) -> str:
    """Return the qualified name of a function, or of the class of a callable.

    It is the same in each process: no addresses, arguments or contents.
    """
    if isinstance(function, functools.partial):
        return f"partial({name_of(function.func)})"
    function = inspect.unwrap(function) if callable(function) else function
    function = getattr(function, "__func__", function)
    named = function if hasattr(function, "__qualname__") else type(function)
    module = getattr(named, "__module__", None)
    is_known = module and module not in _MAIN
    return f"{module}.{named.__qualname__}" if is_known else str(named.__qualname__)


def fitted(state: State, found: Description, *, strict: bool) -> State:
    """Return a state of an iterator in the form that the described stream can load.

    If ``strict``, shards must have the same versions, not only the same lengths. A
    StateMismatchError if it is of another stream; it names the differences.
    """
    errors, renamed = differences(state["stream"], found)
    if errors:
        raise StateMismatchError(
            f"the state is of another stream: {'; '.join(errors)}; load it with the "
            "stream that saved it, or restart the epoch",
            expected=state["stream"],
            found=found,
        )
    if renamed:
        warn(
            f"the state was saved with functions of other names: {'; '.join(renamed)}; "
            "if they do something else, the samples are others"
        )
    if not is_repeatable(found) and any(map(_counts, state["streams"].values())):
        warn_of_order()
    streams = state["streams"] if strict else _without_stamps(state["streams"])
    return {**state, "stream": found, "streams": streams}


def _without_stamps(state: Any) -> Any:
    """Return a state that any shards of the same sizes fit."""
    if isinstance(state, list):
        return [*map(_without_stamps, state)]
    if not isinstance(state, dict):
        return state
    if isinstance(at := state.get("at"), dict):  # in a shard
        return {**state, "at": {k: one for k, one in at.items() if k != "stamp"}}
    return {name: _without_stamps(one) for name, one in state.items()}


def _counts(one: State) -> bool:
    """Return whether steps of a reader had read ahead of the samples passed on."""
    found = [one["state"]]
    while found:
        state = found.pop()
        taken = state.get("taken", 0) or state.get("offset", 0)
        up = state.get("up") or []
        if max(taken) if isinstance(taken, list) else taken:
            return True
        found += up if isinstance(up, list) else [up] if up else []
    return False
