"""Repeated streams, and epochs of a given length.

To the previous steps each pass is a separate epoch, so shuffles differ. The state is
that of the current pass and its number.
"""

import asyncio
from collections.abc import Awaitable, Callable

from aioloader._order.blocks import Bad, Block
from aioloader._order.shares import Share
from aioloader.datasets._stores.outlast import outlast
from aioloader.datasets._streams.cursors import Cursor, State, skip
from aioloader.errors import DatasetError

# Empty passes in a row after which an endless stream is an error. If shards are
# shuffled, a reader's share of a pass may be empty, and its share of the next one not.
_EMPTY = 8
# Opens a pass, starting at a state.
OpenPass = Callable[[int, State], Awaitable[Cursor]]


def epoch_of_pass(epoch: int, number: int) -> int:
    """Return the epoch of a pass for the previous steps; the first: ``epoch``."""
    return epoch + (number << 32)


class Repeated:
    """A stream, repeated from its beginning.

    Without ``times``, several empty passes in a row are an error, because other ranks
    would wait for this one. So is a pass in which all samples failed: no policy could
    ever end it.

    Args:
        cursor: The current pass; owned.
        open_pass: Opens another one.
        times: Number of passes; None: endless.
        share: The reader.
        state: What ``state`` returned.
    """

    def __init__(
        self,
        cursor: Cursor,
        open_pass: OpenPass,
        times: int | None,
        share: Share,
        state: State,
    ) -> None:
        self._cursor = cursor
        self._open_pass = open_pass
        self._times = times
        self._share = share
        self._pass: int = state.get("pass", 0)
        self._has_good: bool = state.get("good", False)
        lost = state.get("lost")
        self._lost: BaseException | None = None if lost is None else DatasetError(lost)

    async def pull(self, limit: int) -> Block:
        """Return the next samples, all of one pass.

        Raises:
            ValueError: If there are none to repeat without end.
        """
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
            if self._pass + 1 == self._times:
                return []
            empty = 0 if self._has_good else empty + 1
            if self._times is None and empty == _EMPTY:
                raise ValueError(
                    f"reader {self._share.reader} of {self._share.readers} had no "
                    f"samples in {empty} passes in a row, so it has none to repeat; "
                    "give it shards that have some, use fewer readers, or an iterable "
                    "that can be read again"
                )
            before = self._cursor
            self._cursor = await self._open_pass(self._pass + 1, {})
            self._pass += 1
            self._has_good = False
            # If closing is interrupted, files stay open.
            await outlast(asyncio.create_task(before.aclose()))

    def _look(self, block: Block) -> None:
        """Note whether any sample did not fail."""
        if self._has_good:
            return
        bad = [one for one in block if type(one) is Bad] if type(block) is list else []
        self._has_good = len(bad) < len(block)
        self._lost = bad[-1].error if bad else None

    def state(self) -> State:
        """Return the position of the current pass, and its number."""
        up = self._cursor.state()
        lost = {} if self._lost is None else {"lost": str(self._lost)}
        return {"up": up, "pass": self._pass, "good": self._has_good, **lost}

    async def aclose(self) -> None:
        """Close the current pass."""
        await self._cursor.aclose()


class EpochPart:
    """One reader's part of an epoch of a given length.

    Args:
        upstream: An endless stream of samples; owned.
        count: How many of the epoch's samples belong to this reader.
        real: How many of these are not padding, which the next epoch has again.
        state: What ``state`` returned.
        counts_failed: Whether failed samples count.
    """

    def __init__(
        self,
        upstream: Cursor,
        count: int,
        real: int,
        state: State,
        *,
        counts_failed: bool = True,
    ) -> None:
        self._upstream = upstream
        self._given: int = state.get("given", 0)
        # Samples of the previous epoch to drop; the state before the padding.
        self._again: int = state.get("again", 0)
        self._next: State | None = state.get("next")
        self._count, self._real = count, real
        self._counts_failed = counts_failed
        self.aclose = upstream.aclose

    async def pull(self, limit: int) -> Block:
        """Return the next samples of the epoch."""
        if self._again:
            await skip(self._upstream, self._again)
            self._again = 0
        left = self._real - self._given
        if left <= 0:
            left = self._count - self._given
            if left <= 0:
                return []
            self._next = self._next or self._upstream.state()
        block = await self._upstream.pull(min(limit, left))
        self._given += len(block)
        if not self._counts_failed and isinstance(block, list):
            self._given -= sum(type(one) is Bad for one in block)
        return block

    def state(self) -> State:
        """Return how many samples were given, and the position of the next one."""
        more: State = {"again": self._again} if self._again else {}
        more |= {} if self._next is None else {"next": self._next}
        return {"up": self._upstream.state(), "given": self._given, **more}
