"""The interface of sharded formats, which list shards and read one from a position.

Everything common to tar files, tables and rows (order, interleaving, shuffling, sharing
among readers, state) is built on ``ShardFormat`` and ``ShardReader`` alone. A
``BlockReader`` makes blocks in steps, one step at a time. Memory holds the blocks of a
step, and with ``is_ahead`` also the next step's.
"""

import abc
import asyncio
import math
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from hashlib import blake2b
from typing import Any, ClassVar, Generic, Literal, TypeAlias

from typing_extensions import TypeVar

from aioloader._base.blocks import Block
from aioloader._base.cancellation import finish_despite_cancel, in_thread
from aioloader._base.raising import raisable
from aioloader.datasets._stores.addresses import Address, name_of
from aioloader.datasets._stores.failures import Version
from aioloader.errors import ShardChangedError

Shard = TypeVar("Shard", default=Any)  # of the type that a format chooses
ShardPosition: TypeAlias = dict[str, Any]
# Summary of all shards, kept in a state.
Summary: TypeAlias = dict[str, Any]
# Whether a shard without an end mark is an error, or only worth a warning.
MissingEnd: TypeAlias = Literal["error", "warn"]
# Names to compare or hash before other threads get a turn.
_CHUNK = 1 << 10
# The blocks of a step, each with the mark from which it can be made again.
PositionedBlocks: TypeAlias = list[tuple[Any, Block]]


class ShardReader(abc.ABC):
    """A forward reader of a shard. Only ``pull`` and ``position`` have no default."""

    @abc.abstractmethod
    async def pull(self, limit: int) -> Block:
        """Return the next samples, from 1 to ``limit``; an empty block at the end."""

    @abc.abstractmethod
    def position(self) -> ShardPosition:
        """Return the position after the last sample returned."""

    def begin(self) -> None:  # noqa: B027  (a default)
        """Start reading ahead before the first pull. Calling it is optional."""

    def positions(self) -> Callable[[int], ShardPosition] | None:
        """Return a function from ``n`` to the position after a block's ``n``-th sample.

        The block is the last one that ``pull`` returned. With a result of None, a state
        counts samples from before a block, so the shard's samples must not change.
        """
        return None

    def version(self) -> tuple[str, Version] | None:
        """Return the shard's redacted address and version, or None if unknown.

        A state includes a known version. ``open`` gets the version in the position, to
        check that the shard is the same.
        """
        return None

    def bytes_ahead(self) -> float | None:
        """Return how many bytes were requested and not yet pulled.

        Small shards are opened in advance while these bytes fit in half of the budget.
        Return None until the shard's size is known; the reader may then request up to
        an eighth of the budget (``START_DIVISOR``) before the first pull. Return
        infinity if the size stays unknown; later shards are then not opened in advance.
        """
        return math.inf

    def is_draining(self) -> bool:
        """Tell whether all bytes were requested; if so, another shard may be opened."""
        return False

    async def aclose(self) -> None:  # noqa: B027  (a default)
        """Stop pending work and wait for it to end."""


class ShardFormat(abc.ABC, Generic[Shard]):
    """An interface to list and open the shards of one dataset.

    Only ``shards``, ``summary`` and ``open`` have no default.

    Attributes:
        changes: Whether a shard may have other samples when it is read again.
    """

    changes: ClassVar[bool] = False

    @abc.abstractmethod
    async def shards(
        self, stack: AsyncExitStack, known: Summary | None = None, /
    ) -> Sequence[Shard]:
        """Return the shards in their canonical order.

        Args:
            stack: Closes, after the iteration, the resources that the shards share.
            known: The summary in a loaded state, or the first rank's, or None. A format
                that cuts its shards itself must cut at the same positions again.
        """

    @abc.abstractmethod
    def summary(self, shards: Sequence[Shard]) -> Summary:
        """Return a small JSON-serialisable summary of ``shards``, to keep in a state.

        A state is loaded only if the shards found have an equal summary. A summary
        includes ``"count"``, the number of shards.
        """

    @abc.abstractmethod
    def open(self, shard: Shard, position: ShardPosition, budget: int) -> ShardReader:
        """Return a reader of ``shard`` that starts at ``position``.

        Args:
            shard: One of ``shards``.
            position: The result of a reader's ``position``, or ``{}`` for the start.
            budget: Bytes that the reader may read ahead of the pulls.
        """

    def describe(self) -> dict[str, Any]:
        """Return the settings that decide a shard's samples, as JSON-serialisable data.

        Examples are columns or an encoding. A state with another description is
        refused. Leave out the shards' location, and secrets.
        """
        return {}

    def count(self, shards: Sequence[Shard]) -> int:
        """Return the number of shards, not counting those known to be empty."""
        return len(shards)

    async def cut(self, shards: Sequence[Shard], count: int) -> Sequence[Shard]:  # noqa: ARG002
        """Cut shards into ``count`` parts with the same samples in the same order.

        Called if there are fewer shards than readers. A format that cannot cut returns
        the shards unchanged. All ranks must get the same cuts; ``summary`` must include
        what decides the cuts.

        Raises:
            ValueError: If ``count`` parts are impossible; the message says what to do.
        """
        return shards

    async def sizes(
        self,
        shards: Sequence[Shard],  # noqa: ARG002
        *,
        must: bool,  # noqa: ARG002
    ) -> Sequence[int] | None:
        """Return the lengths of the shards, all in one unit; None if any is unknown.

        Lengths equalise readers' shares. With ``must``, ask the store for unknown ones.
        """
        return None

    def open_together(self, shards: Sequence[Shard], budget: int) -> list[ShardReader]:  # noqa: ARG002
        """Start and return readers of the first few ``shards``; by default of none.

        This is for small shards that can be read together. The readers together may
        read ``budget`` bytes ahead of the pulls.
        """
        return []


def summary_of(addresses: Iterable[Address]) -> Summary:
    """Return a summary with the number of shards and a digest of their names."""
    names = names_of(addresses)
    digest = blake2b(digest_size=8)
    # In parts, so that other threads get a turn.
    for start in range(0, len(names), _CHUNK):
        text = "".join(f"{name}\0" for name in names[start : start + _CHUNK])
        digest.update(text.encode("utf-8", "surrogateescape"))
    return {"count": len(names), "names": digest.hexdigest()}


def names_of(addresses: Iterable[Address]) -> list[str]:
    """Return the names of shards, relative to their deepest common directory.

    The names include neither accounts nor queries, which may hold signatures.
    """
    plain = [name_of(address) for address in addresses]
    parts = [plain[start : start + _CHUNK] for start in range(0, len(plain), _CHUNK)]
    first, last = min(map(min, parts), default=""), max(map(max, parts), default="")
    # A prefix of the first and the last name is one of all names.
    pairs = enumerate(zip(first, last, strict=False))
    shared = next((k for k, (a, b) in pairs if a != b), min(len(first), len(last)))
    start = first.rfind("/", 0, shared) + 1
    return [name[start:] for part in parts for name in part]


class BlockReader(ShardReader):
    """The base of readers that make the blocks of a shard in steps.

    A subclass implements ``make`` and ``position``. A position consists of ``mark`` and
    ``taken + skip``, or only of ``passed + skip``.
    """

    is_ahead = False  # whether the next step runs while blocks are passed on
    location: str
    mark: Any  # from which the current block can be made again
    skip: int  # samples still to be dropped
    taken: int  # samples of the current block that were passed on or dropped
    passed: int  # the same, for all blocks so far
    is_over: bool  # whether no other step follows; a running one should end

    def __init__(self, location: str, mark: Any, skip: int = 0) -> None:
        self.location, self.mark, self.skip = location, mark, skip
        self.taken = self.passed = 0
        self.is_over = False
        # Makes the samples; is closed in ``thread``, or else on the loop.
        self.generator: Generator[Any, Any, Any] | None = None
        self.thread: ThreadPoolExecutor | None = None
        self._block: Block = []
        self._blocks_made: deque[tuple[Any, Block]] = deque()
        self._making: asyncio.Task[PositionedBlocks] | None = None
        self._failure: BaseException | None = None

    @abc.abstractmethod
    async def make(self) -> PositionedBlocks:
        """Make the next blocks, usually by ``gather`` in a thread; runs in a task."""

    async def make_here(self) -> PositionedBlocks | None:
        """Make the next blocks on the loop if that is quick; otherwise return None."""
        return None

    async def interrupt(self) -> None:
        """End the wait of a step that blocks the reader's thread."""

    async def release(self) -> None:
        """Release open resources. Called when no step is running."""

    def gather(self, blocks: Iterable[tuple[Any, Block]]) -> PositionedBlocks:
        """Collect the blocks of a step, joining adjacent lists. Runs in any thread.

        An error ends the shard, and is raised after the samples before it.
        """
        made: PositionedBlocks = []
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
        """Return an executor of the reader's own thread, which may block for long."""
        self.thread = self.thread or ThreadPoolExecutor(1, "aioloader")
        return self.thread

    def start(
        self, step: "Coroutine[Any, Any, PositionedBlocks] | None" = None
    ) -> None:
        """Start ``make``, or another step, unless a step is running."""
        if self._making is None and not self.is_over:
            self._making = asyncio.create_task(self.make() if step is None else step)

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
        await (end if is_quick else finish_despite_cancel(asyncio.ensure_future(end)))

    async def _more(self) -> bool:
        """Move to the next block; return whether there is one."""
        while not self._blocks_made:
            if self._making is None:
                if self.is_over:
                    return False
                if (here := await self.make_here()) is not None:
                    self._blocks_made.extend(here)
                    continue
                self.start()
            assert self._making is not None
            await asyncio.wait([self._making])  # cancellation does not reach it
            making, self._making = self._making, None
            self._blocks_made.extend(making.result())
            if self.is_ahead:
                self.start()
        self.mark, self._block = self._blocks_made.popleft()
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
                    making.exception()  # mark it as retrieved
            if self.generator is not None:
                close = self.generator.close
                await in_thread(close, executor=thread) if thread else close()
        finally:
            if thread is not None:
                thread.shutdown(wait=False)
            await self.release()
