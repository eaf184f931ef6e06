"""Ranges of remote shards: those that are asked for in one turn of the loop, merged.

A shard is read at one version: that in a pack, or else the one that a check has found,
which comes before the first read on each loop: an ``.idx`` has no version, but a shard
of another length shows in what follows the last sample.
"""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from aioloader._base.cancellation import cancel
from aioloader._order.shuffled_blocks import BlockIndex
from aioloader.datasets._stores.addresses import Address
from aioloader.datasets._stores.bytes import StoredObject
from aioloader.datasets._stores.failures import Version
from aioloader.datasets._stores.storage import Storage
from aioloader.datasets._streams.edges import (
    Edges,
    SampleRange,
    changed_since,
    check_end,
)
from aioloader.errors import DatasetError

T = TypeVar("T")
# Ranges nearer than this are read together, up to so many bytes.
_GAP, _MOST = 1 << 16, 8 << 20
_BLOCK = 512


class SharedRequest(Generic[T]):
    """A request that several reads wait for; it ends when all of them were cancelled.

    A read joins it, and then waits for the result or leaves.
    """

    def __init__(self, request: Coroutine[Any, Any, T]) -> None:
        self.task = asyncio.create_task(request)
        self.task.add_done_callback(self._wake)
        self._reads = 0
        self._waiting: set[asyncio.Future[None]] = set()

    @property
    def is_usable(self) -> bool:
        """Whether it still runs, or has a result."""
        task = self.task
        is_lost = task.done() and (task.cancelled() or task.exception() is not None)
        return not (is_lost or task.cancelling())

    def join(self) -> None:
        self._reads += 1

    def leave(self) -> None:
        self._reads -= 1
        if not (self._reads or self.task.done()):
            self.task.cancel()

    async def result(self) -> T:
        """Wait for it; an error is a copy for each read, which may add notes to it."""
        task = self.task
        try:
            if not task.done():  # a quarter of what ``asyncio.wait`` takes
                waiter = asyncio.get_running_loop().create_future()
                self._waiting.add(waiter)
                await waiter
        finally:
            self.leave()
        if not task.cancelled() and (error := task.exception()) is not None:
            own = type(error).__new__(type(error), *error.args)
            own.__dict__.update(error.__dict__)
            own.__notes__ = [*getattr(error, "__notes__", ())]
            raise own from error.__cause__
        return task.result()

    def _wake(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # retrieved, also if nobody waits
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)


class PendingSample:
    """A sample to read.

    Attributes:
        place: Where it is.
        is_held: Whether no read waits for it yet.
        is_sent: Whether the turn of the loop is over in which it was asked for.
        merged: The request for it and others, and where its bytes start, once sent;
            None: it has its own.
    """

    __slots__ = ("is_held", "is_sent", "merged", "place")

    def __init__(self, place: SampleRange) -> None:
        self.place, self.is_held, self.is_sent = place, True, False
        self.merged: tuple[SharedRequest[memoryview], int] | None = None


class RemoteReads:
    """The reads of one event loop."""

    def __init__(
        self, storage: Storage, addresses: list[Address], edges: Edges
    ) -> None:
        self.users = 0
        self._storage, self._addresses, self._edges = storage, addresses, edges
        self._is_open = False
        self._objects: dict[int, StoredObject] = {}
        self._versions: dict[int, Version] = {}
        self._checks: dict[int, SharedRequest[Version]] = {}
        self._asked: list[PendingSample] = []  # in this turn of the loop
        # Samples of blocks that were asked for, but not yet read, by their indices.
        self._held: dict[int, PendingSample] = {}
        self._requests: set[asyncio.Task[Any]] = set()

    async def read(self, index: int) -> tuple[SampleRange, memoryview]:
        """Return where a sample is, and its bytes."""
        asked = self._held.pop(index, None)
        if asked is None:
            asked = self._ask(index)
            if isinstance(index, BlockIndex):
                self._hold_block(index)
        if asked.is_sent:
            if asked.merged is not None:
                asked.merged[0].join()
        else:
            asked.is_held = False
            try:
                await asyncio.sleep(0)  # all others of this turn are asked for, too
            except asyncio.CancelledError:
                if asked.merged is not None:
                    asked.merged[0].leave()
                raise
        if asked.merged is None or not asked.merged[0].is_usable:
            return asked.place, await self._bytes(*asked.place)
        (shared, first), (_, start, stop) = asked.merged, asked.place
        data = await shared.result()
        return asked.place, data[start - first : stop - first]

    async def aclose(self) -> None:
        """Cancel all requests, and forget what they read."""
        requests, self._requests = self._requests, set()
        self._held, self._checks = {}, {}
        await cancel(requests)
        if self._is_open:
            self._is_open = False
            await self._storage.aclose()

    def _ask(self, index: int) -> PendingSample:
        asked = PendingSample(self._edges.find(index))
        if not self._asked:
            asyncio.get_running_loop().call_soon(self._send)
        self._asked.append(asked)
        return asked

    def _hold_block(self, index: BlockIndex) -> None:
        """Ask for the others of a block; those that nobody will read go in time."""
        (block, window), held = index.spread, self._held
        first = index - index % block
        for one in range(first, min(first + block, len(self._edges))):
            if one != index:
                held[one] = self._ask(one)
        while len(held) > 2 * window + block:
            del held[next(iter(held))]

    def _send(self) -> None:
        """Make requests of all that were asked for since the last turn."""
        asked, self._asked = self._asked, []
        group: list[PendingSample] = []
        start = stop = 0
        for one in sorted(asked, key=lambda one: one.place):
            shard, begin, end = one.place
            one.is_sent = True
            is_near = group and shard == group[0].place[0] and begin <= stop + _GAP
            if not is_near or end - start > _MOST:
                self._merge(group, start, stop)
                group, start, stop = [], begin, begin
            group.append(one)
            stop = max(stop, end)
        self._merge(group, start, stop)

    def _merge(self, group: list[PendingSample], start: int, stop: int) -> None:
        if len(group) > 1:
            shared = self._shared(self._bytes(group[0].place[0], start, stop))
            for one in group:
                one.merged = shared, start
                if not one.is_held:
                    shared.join()

    def _shared(self, request: Coroutine[Any, Any, T]) -> SharedRequest[T]:
        shared = SharedRequest(request)
        self._requests.add(shared.task)
        shared.task.add_done_callback(self._requests.discard)
        return shared

    async def _bytes(self, shard: int, start: int, stop: int) -> memoryview:
        """Return a range of a shard that is as it was indexed."""
        known, stored = await self.version(shard), self._stored(shard)
        try:
            piece = await stored.fetch(start, stop, known)
        except DatasetError as error:
            now = known
            if error.attempts == 1:  # it was refused
                with contextlib.suppress(DatasetError):
                    now = (await stored.fetch(0, 1, None)).version
            if now.is_of(known):
                raise
            raise changed_since(stored.location, known, now) from error
        return memoryview(piece.data).cast("B")

    async def version(self, shard: int) -> Version:
        """Return the version of a shard that is as it was indexed."""
        versions = self._edges.versions
        known = versions[shard] if versions else self._versions.get(shard)
        if known is None:
            check = self._checks.get(shard)
            if check is None or not check.is_usable:
                check = self._checks[shard] = self._shared(self._check(shard))
            check.join()
            known = self._versions[shard] = await check.result()
        return known

    async def _check(self, shard: int) -> Version:
        """Return the version of a shard whose index fits it."""
        end, stored = self._edges.end(shard), self._stored(shard)
        # From a byte before the end on, so that a server returns something.
        piece = await stored.fetch(max(0, end - 1), end + _BLOCK, None)
        rest = bytes(memoryview(piece.data))[min(end, 1) :]
        check_end(stored.location, end, piece.version.size, rest)
        return piece.version

    def _stored(self, shard: int) -> StoredObject:
        if not self._is_open:
            self._is_open = True
            self._storage.enter()
        stored = self._objects.get(shard)
        if stored is None:
            stored = self._storage.stored(self._addresses[shard])
            self._objects[shard] = stored
        return stored
