"""A file object for pyarrow that gets its bytes by prefetched range requests.

The plan lists the ranges in their order of use. Requests run on the event loop, ahead
of their use and within a budget; pyarrow reads in a thread and waits there for missing
bytes. A range is released once read. A read outside the plan sends a separate request,
so the plan affects time and memory, not results.
"""

import asyncio
import bisect
import io
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, TypeAlias

from typing_extensions import Buffer

from aioloader._base.cancellation import cancel
from aioloader.datasets._stores.failures import truncated
from aioloader.errors import DatasetError

ByteSpan: TypeAlias = tuple[int, int]

# Spans with a smaller gap share a request: a round trip costs more than the gap.
_MAX_GAP = 1 << 16


@dataclass
class FetchedRange:
    """A byte range of a file to request; released when no bytes are ``unread``."""

    start: int
    stop: int
    unread: int
    body: "Future[memoryview] | None" = None  # while requested and not yet released
    is_released: bool = False  # if so, it is not prefetched again


def plan(
    spans: Iterable[ByteSpan], max_bytes: int, *, in_order: bool = False
) -> list[FetchedRange]:
    """Return the requests for ``spans`` of a file, in the order of their use.

    Spans longer than ``max_bytes`` are cut, and short neighbouring spans are joined.
    Unless ``in_order``, spans are assumed to be read in parallel, like columns:
    requests are sorted by their relative position within the span.
    """
    groups: list[FetchedRange] = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        last = groups[-1] if groups else None
        is_near = last is not None and last.stop <= start <= last.stop + _MAX_GAP
        if last is not None and is_near and stop - last.start <= max_bytes:
            last.stop, last.unread = stop, last.unread + stop - start
        else:
            groups.append(FetchedRange(start, stop, stop - start))
    requests: list[tuple[float, int, FetchedRange]] = []
    for group in groups:
        size = group.stop - group.start
        step = -(-size // -(-size // max_bytes))
        for start in range(group.start, group.stop, step):
            stop = min(group.stop, start + step)
            request = group if step == size else FetchedRange(start, stop, stop - start)
            turn = 0 if in_order else (start - group.start) / size
            requests.append((turn, start, request))
    return [request for *_, request in sorted(requests, key=lambda item: item[:2])]


class RangeFile(io.RawIOBase):
    """A seekable file object for pyarrow that calls ``read(start, stop)``."""

    def __init__(self, size: int, read: Callable[[int, int], Buffer]) -> None:
        self._size = size
        self._read = read
        self._offset = 0

    def read(self, nbytes: int = -1) -> Buffer:
        start = self._offset
        stop = self._size if nbytes < 0 else min(self._size, start + nbytes)
        self._offset = max(start, stop)
        return self._read(start, stop)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_CUR: self._offset, io.SEEK_END: self._size}
        self._offset = base.get(whence, 0) + offset
        return self._offset

    def tell(self) -> int:
        return self._offset

    def readable(self) -> bool:
        return True

    seekable = readable


class FetchedRanges:
    """Prefetched ranges of one file, within ``budget`` bytes.

    ``begin`` and ``aclose`` run on the loop's thread. ``read`` runs in one decoding
    thread, which starts after ``begin``; from then on, only this thread sends requests.
    The ranges of ``plan`` do not overlap; a single range may exceed the budget. If
    ``in_order``, reads only move forward, so skipped ranges are also released.

    Attributes:
        tail: The end of the file, if known; ``read`` serves it without a request.
        failure: The error of the first request that failed.
    """

    def __init__(
        self,
        read: Callable[[int, int], Awaitable[Buffer]],
        size: int,
        plan: list[FetchedRange],
        *,
        budget: int,
        location: str,
        in_order: bool = False,
    ) -> None:
        self.tail = b""
        self.failure: Exception | None = None
        self._read = read
        self._size = size
        self._budget = budget
        self._location = location
        self._plan = plan
        self._next = 0
        self._held = 0
        self._is_closed = False
        self._by_start = sorted(plan, key=lambda planned: planned.start)
        self._starts = [planned.start for planned in self._by_start]
        self._skippable = iter(self._by_start if in_order else ())
        self._oldest = next(self._skippable, None)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- on the loop ----------------------------------------------------------------

    def begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._prefetch()

    def is_draining(self) -> bool:
        return self._is_closed or self._next >= len(self._plan)

    async def aclose(self) -> None:
        """Cancel the requests; a thread that waits for bytes gets a DatasetError."""
        self._is_closed = True
        await cancel(self._tasks)

    async def _fetch(self, start: int, stop: int) -> memoryview:
        task = asyncio.current_task()
        if self._is_closed or task is None:
            raise asyncio.CancelledError
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return self._checked(start, stop, await self._read(start, stop))
        except Exception as error:
            self.failure = self.failure or error
            raise

    def _checked(self, start: int, stop: int, body: Buffer) -> memoryview:
        data = memoryview(body).cast("B")
        if len(data) != stop - start:
            where = f" from byte {start:,} on"
            raise truncated(self._location, stop - start, len(data), where)
        return data

    # -- in the thread --------------------------------------------------------------

    def read(self, start: int, stop: int) -> Buffer:
        """Return a byte range; wait for its requests, and raise their errors."""
        if self.tail and start >= (tail_start := self._size - len(self.tail)):
            return self.tail[start - tail_start : stop - tail_start]
        parts: list[memoryview] = []
        while self._oldest is not None and self._oldest.stop <= start:
            self._release(self._oldest)
            self._oldest = next(self._skippable, None)
        while start < stop:
            fetched = self._find(start, stop)
            data, end = self._wait_for(fetched), min(stop, fetched.stop)
            parts.append(data[start - fetched.start : end - fetched.start])
            fetched.unread -= end - start
            if fetched.unread <= 0:
                self._release(fetched)
            start = end
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _find(self, start: int, stop: int) -> FetchedRange:
        """Return the planned range that contains ``start``, or a new range."""
        index = bisect.bisect_right(self._starts, start)
        if index and start < self._by_start[index - 1].stop:
            return self._by_start[index - 1]
        if index < len(self._starts):
            stop = min(stop, self._starts[index])
        return FetchedRange(start, stop, stop - start)

    def _wait_for(self, fetched: FetchedRange) -> memoryview:
        try:
            return (fetched.body or self._request(fetched)).result()
        except CancelledError:
            text = f"{self._location!r} was closed while being read; read it again"
            raise DatasetError(text, location=self._location) from None

    def _prefetch(self) -> None:
        while not self.is_draining():
            planned = self._plan[self._next]
            if planned.body is None and not planned.is_released:
                size = planned.stop - planned.start
                if self._held and self._held + size > self._budget:
                    break
                self._request(planned)
            self._next += 1

    def _request(self, fetched: FetchedRange) -> "Future[memoryview]":
        loop = self._loop
        if loop is None or loop.is_closed():
            raise DatasetError(
                "the event loop is closed; read it again", location=self._location
            )
        self._held += fetched.stop - fetched.start
        request = self._fetch(fetched.start, fetched.stop)
        fetched.body = body = asyncio.run_coroutine_threadsafe(request, loop)
        return body

    def _release(self, fetched: FetchedRange) -> None:
        """Release a range's bytes, and prefetch more; later reads request it again."""
        size = fetched.stop - fetched.start
        if fetched.body is not None:
            self._held -= size
        fetched.body, fetched.is_released, fetched.unread = None, True, size
        self._prefetch()
