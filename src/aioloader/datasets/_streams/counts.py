"""Steps that count samples: take, skip and batch."""

from typing import Any

from aioloader._order.blocks import Bad, Block, cut, join, unreadable
from aioloader.datasets._streams.cursors import (
    Cursor,
    State,
    Trail,
    check_again,
    skip,
)


class Taken:
    """Takes the first samples; the stream after them is not read."""

    has_state = True

    def __init__(self, upstream: Cursor, count: int) -> None:
        self._upstream = upstream
        self._left = count
        self.aclose = upstream.aclose

    def load(self, state: State) -> None:
        """Resume from ``state``."""
        self._left = state.get("left", self._left)

    async def pull(self, limit: int) -> Block:
        """Return the next samples, until the count is reached."""
        if self._left <= 0:
            return []
        block = await self._upstream.pull(min(limit, self._left))
        self._left -= len(block)
        return block

    def state(self) -> State:
        """Return how many samples are left, and the position."""
        return {"up": self._upstream.state(), "left": self._left}


class Skipped:
    """Drops the first samples, which are read, and gives the rest."""

    has_state = True

    def __init__(self, upstream: Cursor, count: int) -> None:
        self._upstream = upstream
        self._trail = Trail(upstream)
        self._left = count
        self._block: Block = []  # read, and not yet dropped
        self._loaded: State | None = None  # until its samples are dropped
        self.aclose = upstream.aclose

    def load(self, state: State) -> None:
        """Resume from ``state``."""
        self._left = state.get("left", self._left)
        self._loaded = state if state.get("taken") else None

    async def pull(self, limit: int) -> Block:
        """Return the next samples, preceded by those that could not be read.

        A failure may be a whole shard, in place of which others' samples were dropped.
        """
        if self._loaded is not None:
            await skip(self._upstream, self._loaded["taken"], self._loaded["failed"])
            self._loaded = None
        while self._left > 0:
            if not len(self._block):
                before = self._upstream.state()
                self._block = await self._upstream.pull(self._left)
                self._trail.add(before, self._block)
            block, lost = self._block, unreadable(self._block)
            count = lost[limit] if len(lost) > limit else len(block)
            self._block = cut(block, count)
            self._left = self._left - count if len(block) else 0
            self._trail.advance(count)
            if lost:
                return [block[place] for place in lost[:limit]]
        return await self._upstream.pull(limit)

    def state(self) -> State:
        """Return how many samples are still to be dropped, and the position."""
        return self._loaded or {**self._trail.state(), "left": self._left}


class Batched:
    """Makes batches, as lists or as columns; each is one sample of this stream.

    Failed samples of a batch come before it, one by one.
    """

    has_state = True

    def __init__(self, upstream: Cursor, size: int, *, drop_last: bool) -> None:
        self._upstream = upstream
        self._size = size
        self._drop_last = drop_last
        self._made: list[Any] = []  # of the samples read since:
        self._before: State = {}
        self._taken = 0
        self._failed: list[int] | None = None  # its unreadable samples
        self.aclose = upstream.aclose

    def load(self, state: State) -> None:
        """Drop the batches and failures passed on before ``state`` was taken."""
        self._taken = state.get("taken", 0)
        self._failed = state.get("failed") if self._taken else None

    async def pull(self, limit: int) -> Block:  # noqa: ARG002  (one is enough)
        """Return the next batch."""
        if not self._made:
            self._before = self._upstream.state()
            self._made = await self._make()
        if not self._made:
            return []
        self._taken += 1
        one = self._made.pop(0)
        if not self._made:
            self._taken, self._failed = 0, None
        return [one]

    def state(self) -> State:
        """Return the state before the current samples, and how many were passed on."""
        up = self._before if self._made else self._upstream.state()
        failed = {} if self._failed is None else {"failed": self._failed}
        return {"up": up, "taken": self._taken, **failed}

    async def _make(self) -> list[Any]:
        parts: list[Block] = []
        found = 0
        while found < self._size:
            block = await self._upstream.pull(self._size - found)
            if not len(block):
                break
            parts.append(block)
            found += len(block)
        if not found:
            return []
        whole = join(parts)
        check_again(whole, 0, found, self._failed)
        self._failed = None
        failed: list[Any] = []
        if isinstance(whole, list) and Bad in set(map(type, whole)):
            self._failed = unreadable(whole)
            failed = [sample for sample in whole if type(sample) is Bad][self._taken :]
            whole = [sample for sample in whole if type(sample) is not Bad]
        is_dropped = self._drop_last and found < self._size
        return failed if is_dropped or not whole else [*failed, whole]
