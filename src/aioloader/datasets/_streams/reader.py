"""Reads one shard: blocks are made in steps, and passed on in pieces.

A step makes some blocks, in a thread or on the loop in a short turn; one step runs at a
time. Memory holds the blocks of a step, and with ``is_ahead`` those of the next one. A
pull that is cancelled loses nothing: the next pull gets what its step has made.
"""

import abc
import asyncio
from collections import deque
from collections.abc import Coroutine, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

from aioloader._base.blocks import Block
from aioloader._base.outlast import in_thread, outlast
from aioloader._base.raising import raisable
from aioloader.datasets._streams.shards import ShardReader
from aioloader.errors import ShardChangedError

# The blocks of a step, each with the mark before it: where it can be made again.
Made: TypeAlias = list[tuple[Any, Block]]


class Reader(ShardReader):
    """One shard, read a step at a time.

    A subclass makes the steps, and the positions: of ``mark`` and ``taken``, or of
    ``passed``, each with ``skip`` added.

    Args:
        location: Redacted address of the shard.
        mark: The mark before the first block; then that before the current one.
        skip: Samples that are still to be dropped.
    """

    is_ahead = False  # whether the next step runs while the blocks of one are passed on
    location: str
    mark: Any
    skip: int
    taken: int  # samples of the current block that were passed on or dropped
    passed: int  # and of all blocks
    is_over: bool  # no other step will follow; one that runs should end

    def __init__(self, location: str, mark: Any, skip: int = 0) -> None:
        self.location, self.mark, self.skip = location, mark, skip
        self.taken = self.passed = 0
        self.is_over = False
        # What makes the samples is closed in the thread that runs it: the reader's own,
        # or any of the loop's.
        self.generator: Generator[Any, Any, Any] | None = None
        self.thread: ThreadPoolExecutor | None = None
        self._block: Block = []
        self._made: deque[tuple[Any, Block]] = deque()
        self._making: asyncio.Task[Made] | None = None
        self._failure: BaseException | None = None

    # -- what a subclass says -------------------------------------------------------

    @abc.abstractmethod
    async def make(self) -> Made:
        """Make the next blocks, mostly by ``gather`` in a thread; runs in a task."""

    async def make_here(self) -> Made | None:
        """Make the next blocks on the loop, in a short turn; None: only a task can."""
        return None

    async def interrupt(self) -> None:
        """End what a step in a thread of its own waits for."""

    async def release(self) -> None:
        """Release what is open; nothing runs any more."""

    def gather(self, blocks: Iterable[tuple[Any, Block]]) -> Made:
        """Make the blocks of a step, and join lists; in any thread.

        An error ends the shard, and is raised after the samples before it.
        """
        made: Made = []
        try:
            for mark, block in blocks:
                last = made[-1][1] if made else None
                if isinstance(last, list) and isinstance(block, list):
                    last.extend(block)
                else:
                    made.append((mark, block))
        except BaseException as error:  # noqa: BLE001  (raised by ``pull``)
            self._failure, self.is_over = raisable(error, "the format"), True
        return made

    def own_thread(self) -> ThreadPoolExecutor:
        """Return a thread that may wait, and so is none of the loop's."""
        self.thread = self.thread or ThreadPoolExecutor(1, "aioloader")
        return self.thread

    def start(self, step: "Coroutine[Any, Any, Made] | None" = None) -> None:
        """Start ``make``, or another step for this reader; unless one runs already."""
        if self._making is None and not self.is_over:
            self._making = asyncio.create_task(self.make() if step is None else step)

    # -- what a lane calls ----------------------------------------------------------

    async def pull(self, limit: int) -> Block:
        """Return the next samples, from 1 to ``limit``; an empty block at the end.

        Raises:
            ShardChangedError: If there are fewer samples than were passed on before.
        """
        while self.taken < len(self._block) or await self._more():
            dropped = min(self.skip, len(self._block) - self.taken)
            start = self.taken + dropped
            part = self._block[start : start + limit]
            self.skip -= dropped
            self.taken = start + len(part)
            self.passed += dropped + len(part)
            if self.taken >= len(self._block):
                self._block = []
            if len(part):
                return part
        if self._failure is not None:
            raise self._failure
        if self.skip:
            raise ShardChangedError(
                f"{self.location!r} ends {self.skip:,} samples before the position in "
                "the state; resume with the original shards, or start again",
                location=self.location,
            )
        return []

    async def aclose(self) -> None:
        """Stop pending work and wait for it to end, even if cancelled meanwhile."""
        self.is_over = True
        is_quick = self._making is None and self.thread is None
        end = self._end()
        await (end if is_quick else outlast(asyncio.ensure_future(end)))

    async def _more(self) -> bool:
        """Move to the next block; return whether there is one."""
        while not self._made:
            if self._making is None:
                if self.is_over:
                    return False
                if (here := await self.make_here()) is not None:
                    self._made.extend(here)
                    continue
                self.start()
            assert self._making is not None
            await asyncio.wait([self._making])  # cancellation does not reach it
            making, self._making = self._making, None
            self._made.extend(making.result())
            if self.is_ahead:
                self.start()
        self.mark, self._block = self._made.popleft()
        self.taken = 0
        return True

    async def _end(self) -> None:
        making, self._making = self._making, None
        thread, self.thread = self.thread, None
        try:
            if thread is not None:
                await self.interrupt()
            if making is not None:
                making.cancel()
                await asyncio.wait([making])
                if not making.cancelled():
                    making.exception()  # retrieved: nobody else will
            if self.generator is not None:
                close = self.generator.close
                await in_thread(close, executor=thread) if thread else close()
        finally:
            if thread is not None:
                thread.shutdown(wait=False)
            await self.release()
