"""Streams that begin again, and epochs of a given length.

Each pass is an epoch of its own to the steps before, so that shuffles differ. The state
is that of the present pass and its number.
"""

import asyncio
from collections.abc import Awaitable, Callable

from aioloader._order.blocks import Bad, Block
from aioloader._order.shares import Share
from aioloader.datasets._stores.outlast import outlast
from aioloader.datasets._streams.cursors import Cursor, State
from aioloader.errors import DatasetError

# Empty passes in a row that end a stream without ``times``. Where shards are shuffled,
# one reader's share of a pass may be empty, and that of the next one not.
_EMPTY = 8
# What opens a pass, from a state on.
OpenPass = Callable[[int, State], Awaitable[Cursor]]


def epoch_of_pass(epoch: int, number: int) -> int:
    """Return the epoch that one pass is to the steps before; of the first, the same."""
    return epoch + (number << 32)


class Repeated:
    """A stream from its beginning, again and again.

    Without ``times``, some empty passes in a row end it. A pass in which all samples
    failed is an error, for no policy could ever come to an end of them.

    Args:
        cursor: The present pass; owned.
        open_pass: Opens another one.
        times: How many there are; None: without end.
        state: What ``state`` returned.
    """

    def __init__(
        self, cursor: Cursor, open_pass: OpenPass, times: int | None, state: State
    ) -> None:
        self._cursor = cursor
        self._open_pass = open_pass
        self._times = times
        self._pass: int = state.get("pass", 0)
        self._has_good: bool = state.get("good", False)
        self._is_over = False
        lost = state.get("lost")
        self._lost: Exception | None = None if lost is None else DatasetError(lost)

    async def pull(self, limit: int) -> Block:
        """Return the next samples, all of one pass."""
        empty = 0
        while True:
            block = await self._cursor.pull(limit)
            if len(block):
                self._look(block)
                return block
            if self._lost is not None and not self._has_good:
                lost, self._lost = self._lost, None
                lost.add_note("aioloader: all samples failed; they are not repeated")
                raise lost
            empty = 0 if self._has_good else empty + 1
            self._is_over |= self._times is None and empty == _EMPTY
            if self._is_over or self._pass + 1 == self._times:
                return []
            before = self._cursor
            self._cursor = await self._open_pass(self._pass + 1, {})
            self._pass += 1
            self._has_good = False
            # A close that is broken off would leave files open.
            await outlast(asyncio.create_task(before.aclose()))

    def _look(self, block: Block) -> None:
        """Note whether there was a sample that did not fail."""
        if self._has_good:
            return
        bad = [one for one in block if type(one) is Bad] if type(block) is list else []
        self._has_good = len(bad) < len(block)
        self._lost = bad[-1].error if bad else None

    def state(self) -> State:
        """Return where the present pass is, and its number."""
        up = self._cursor.state()
        lost = {} if self._lost is None else {"lost": str(self._lost)}
        return {"up": up, "pass": self._pass, "good": self._has_good, **lost}

    async def aclose(self) -> None:
        """Close the present pass."""
        await self._cursor.aclose()


class EpochPart:
    """One reader's part of an epoch of a given length.

    Args:
        upstream: Samples without end; owned.
        count: How many there are in the epoch for this reader.
        share: Which reader that is.
        state: What ``state`` returned.
        counts_failed: Whether samples that failed are among them.
    """

    def __init__(
        self,
        upstream: Cursor,
        count: int,
        share: Share,
        state: State,
        *,
        counts_failed: bool = True,
    ) -> None:
        self._upstream = upstream
        self._given: int = state.get("given", 0)
        self._count = count
        self._share = share
        self._counts_failed = counts_failed
        self.aclose = upstream.aclose

    async def pull(self, limit: int) -> Block:
        """Return the next samples of the epoch.

        Raises:
            ValueError: If there is none to repeat.
        """
        left = self._count - self._given
        if left <= 0:
            return []
        block = await self._upstream.pull(min(limit, left))
        self._given += len(block)
        if not self._counts_failed and isinstance(block, list):
            self._given -= sum(type(one) is Bad for one in block)
        if not len(block):
            raise ValueError(
                f"reader {self._share.reader} of {self._share.readers} has no samples "
                f"at all, so its {self._count:,} of this epoch cannot be made; give it "
                "shards that have some, or use fewer readers"
            )
        return block

    def state(self) -> State:
        """Return how many samples were given, and where the next one is."""
        return {"up": self._upstream.state(), "given": self._given}
