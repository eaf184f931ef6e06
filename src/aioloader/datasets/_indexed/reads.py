"""Random reads of remote shards; near ranges of one turn of the loop are merged.

A shard is read at one version, which its pack records, or which a check finds before
the process's first read of the shard. An ``.idx`` records no version, so the check
compares the index with the shard's length and the bytes after the last sample.
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
)
from aioloader.errors import DatasetError

T = TypeVar("T")
# Ranges at most this far apart share a request, of up to this many bytes.
_MAX_GAP, _MAX_BYTES = 1 << 16, 8 << 20


class SharedRequest(Generic[T]):
    """A request shared by several reads; if all leave early, it is cancelled."""

    def __init__(self, request: Coroutine[Any, Any, T]) -> None:
        self.task = asyncio.create_task(request)
        self.task.add_done_callback(self._wake)
        self._reads = 0
        self._waiting: set[asyncio.Future[None]] = set()

    @property
    def is_usable(self) -> bool:
        """Whether the request is running and not being cancelled, or has a result."""
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
        """Return the result and leave; each read gets a separate copy of an error."""
        task = self.task
        try:
            if not task.done():  # takes a quarter of the time of ``asyncio.wait``
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
            task.exception()  # mark it as retrieved, even if no read waits
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)


class PendingSample:
    """A requested sample, whose request may not have been sent yet.

    Attributes:
        place: The number of the sample's shard, and the byte range in that shard.
        is_held: True unless a read was waiting for the sample when ``_send`` ran.
        is_sent: Whether ``_send`` has run since the sample was requested.
        merged: The shared request, and the offset of its first byte in the shard; None
            before ``_send``, or if a separate request reads the sample.
    """

    __slots__ = ("is_held", "is_sent", "merged", "place")

    def __init__(self, place: SampleRange) -> None:
        self.place, self.is_held, self.is_sent = place, True, False
        self.merged: tuple[SharedRequest[memoryview], int] | None = None


class RemoteReads:
    """One event loop's reads of remote shards."""

    def __init__(
        self, storage: Storage, addresses: list[Address], edges: Edges
    ) -> None:
        self.users = 0
        self._storage, self._addresses, self._edges = storage, addresses, edges
        self._is_open = False
        self._objects: dict[int, StoredObject] = {}
        self._checks: dict[int, SharedRequest[Version]] = {}
        self._pending: list[PendingSample] = []  # in this turn of the loop
        # Requested samples of blocks that no read waits for yet, by their indices.
        self._held: dict[int, PendingSample] = {}
        self._requests: set[asyncio.Task[Any]] = set()

    async def read(self, index: int) -> tuple[SampleRange, memoryview]:
        """Return a sample's shard number and byte range, and its bytes."""
        sample = self._held.pop(index, None)
        if sample is None:
            sample = self._request(index)
            if isinstance(index, BlockIndex):
                self._hold_block(index)
        if sample.is_sent:
            if sample.merged is not None:
                sample.merged[0].join()
        else:
            sample.is_held = False
            try:
                await asyncio.sleep(0)  # until the requests of this turn are merged
            except asyncio.CancelledError:
                if sample.merged is not None:
                    sample.merged[0].leave()
                raise
        if sample.merged is None or not sample.merged[0].is_usable:
            return sample.place, await self._bytes(*sample.place)
        (shared, first), (_, start, stop) = sample.merged, sample.place
        data = await shared.result()
        return sample.place, data[start - first : stop - first]

    async def aclose(self) -> None:
        """Cancel all requests, forget their results, and leave the storage."""
        requests, self._requests = self._requests, set()
        self._held, self._checks = {}, {}
        await cancel(requests)
        if self._is_open:
            self._is_open = False
            await self._storage.aclose()

    def _request(self, index: int) -> PendingSample:
        """Request a sample; ``_send`` runs at the end of this turn of the loop."""
        sample = PendingSample(self._edges.find(index))
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._send)
        self._pending.append(sample)
        return sample

    def _hold_block(self, index: BlockIndex) -> None:
        """Request the block's other samples; forget the oldest if too many are held."""
        (block, window), held = index.spread, self._held
        first = index - index % block
        for number in range(first, min(first + block, len(self._edges))):
            if number != index:
                held[number] = self._request(number)
        while len(held) > 2 * window + block:
            del held[next(iter(held))]

    def _send(self) -> None:
        """Send a shared request for each group of two or more near ranges."""
        samples, self._pending = self._pending, []
        group: list[PendingSample] = []
        start = stop = 0
        for sample in sorted(samples, key=lambda sample: sample.place):
            shard, begin, end = sample.place
            sample.is_sent = True
            is_near = group and shard == group[0].place[0] and begin <= stop + _MAX_GAP
            if not is_near or end - start > _MAX_BYTES:
                self._merge(group, start, stop)
                group, start, stop = [], begin, begin
            group.append(sample)
            stop = max(stop, end)
        self._merge(group, start, stop)

    def _merge(self, group: list[PendingSample], start: int, stop: int) -> None:
        if len(group) > 1:
            shared = self._shared(self._bytes(group[0].place[0], start, stop))
            for sample in group:
                sample.merged = shared, start
                if not sample.is_held:
                    shared.join()

    def _shared(self, request: Coroutine[Any, Any, T]) -> SharedRequest[T]:
        shared = SharedRequest(request)
        self._requests.add(shared.task)
        shared.task.add_done_callback(self._requests.discard)
        return shared

    async def _bytes(self, shard: int, start: int, stop: int) -> memoryview:
        """Return a byte range of a shard; raise an error if the shard has changed."""
        known, stored = await self.version(shard), self._stored(shard)
        try:
            piece = await stored.fetch(start, stop, known)
        except DatasetError as error:
            now = known
            if error.attempts == 1:  # refused at once, perhaps because of a change
                with contextlib.suppress(DatasetError):
                    now = (await stored.fetch(0, 1, None)).version
            if now.is_of(known):
                raise
            raise changed_since(stored.location, known, now) from error
        return memoryview(piece.data).cast("B")

    async def version(self, shard: int) -> Version:
        """Return a shard's version; raise if the index does not fit the shard."""
        known = self._edges.version(shard)
        if known is None:
            check = self._checks.get(shard)
            if check is None or not check.is_usable:
                check = self._checks[shard] = self._shared(self._check(shard))
            check.join()
            known = self._edges.seen.setdefault(shard, await check.result())
        return known

    async def _check(self, shard: int) -> Version:
        """Return the version of a shard after checking that its index fits it."""
        end, stored = self._edges.end(shard), self._stored(shard)
        # From one byte before the end: a server may refuse an empty range.
        piece = await stored.fetch(max(0, end - 1), end + Edges.trailer_bytes, None)
        rest = bytes(memoryview(piece.data))[min(end, 1) :]
        self._edges.check_end(shard, stored.location, piece.version.size, rest)
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
