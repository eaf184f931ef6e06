"""A file for pyarrow whose bytes come by ranged requests, many of them in advance.

The reads are known in advance: a plan of ranges, in their order of use. Requests run
ahead within a budget, on the event loop; pyarrow reads in a thread, which waits for
missing bytes. A range is released when all of it was read. A read outside the plan
makes its own request: the plan changes time and memory, not results.
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

# Ranges nearer than this are read in one request: a round trip costs more.
_GAP = 1 << 16


@dataclass
class FetchedRange:
    """A range of the file, released when its ``left`` bytes were read."""

    start: int
    stop: int
    left: int
    body: "Future[memoryview] | None" = None  # once requested and until released
    is_passed: bool = False  # released, so that it is not requested ahead


def plan(
    spans: Iterable[ByteSpan], most: int, *, in_order: bool = False
) -> list[FetchedRange]:
    """Return the requests for ``spans`` of a file, in their order of use.

    Long spans are cut, and adjacent short ones joined, up to ``most`` bytes. If not
    ``in_order``, they are read in parallel, like columns: the n-th parts of all come
    before the next parts.
    """
    groups: list[FetchedRange] = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        last = groups[-1] if groups else None
        is_near = last is not None and last.stop <= start <= last.stop + _GAP
        if last is not None and is_near and stop - last.start <= most:
            last.stop, last.left = stop, last.left + stop - start
        else:
            groups.append(FetchedRange(start, stop, stop - start))
    found: list[tuple[float, int, FetchedRange]] = []
    for group in groups:
        size = group.stop - group.start
        step = -(-size // -(-size // most))
        for start in range(group.start, group.stop, step):
            stop = min(group.stop, start + step)
            one = group if step == size else FetchedRange(start, stop, stop - start)
            turn = 0 if in_order else (start - group.start) / size
            found.append((turn, start, one))
    return [one for *_, one in sorted(found, key=lambda item: item[:2])]


class RangeFile(io.RawIOBase):
    """A file object for pyarrow; ``read`` returns the bytes from a start to a stop."""

    def __init__(self, size: int, read: Callable[[int, int], Buffer]) -> None:
        self._size = size
        self._read = read
        self._at = 0

    def read(self, nbytes: int = -1) -> Buffer:
        start = self._at
        stop = self._size if nbytes < 0 else min(self._size, start + nbytes)
        self._at = max(start, stop)
        return self._read(start, stop)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_CUR: self._at, io.SEEK_END: self._size}
        self._at = base.get(whence, 0) + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    seekable = readable


class FetchedRanges:
    """The bytes of one file, requested ahead by ``read``.

    ``begin`` and ``aclose`` belong to the loop's thread, ``read`` to one other thread,
    which starts after ``begin`` and alone decides what is requested. No two ranges of
    the ``plan`` overlap; one may exceed the ``budget`` of bytes. If reads only move
    forward (``in_order``), skipped ranges are released too.

    Attributes:
        tail: The end of the file, which is not requested, if that is known.
        failure: Raised by the first request that failed, if any.
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
        self._by_start = sorted(plan, key=lambda found: found.start)
        self._starts = [found.start for found in self._by_start]
        self._skippable = iter(self._by_start if in_order else ())
        self._oldest = next(self._skippable, None)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- on the loop ----------------------------------------------------------------

    def begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ask_ahead()

    def is_draining(self) -> bool:
        return self._is_closed or self._next >= len(self._plan)

    async def aclose(self) -> None:
        """Cancel the requests; a thread that waits for bytes fails."""
        self._is_closed = True
        await cancel(self._tasks)

    async def _fetch(self, start: int, stop: int) -> memoryview:
        task = asyncio.current_task()
        if self._is_closed or task is None:
            raise asyncio.CancelledError
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return self._whole(start, stop, await self._read(start, stop))
        except Exception as error:
            self.failure = self.failure or error
            raise

    def _whole(self, start: int, stop: int, body: Buffer) -> memoryview:
        data = memoryview(body).cast("B")
        if len(data) != stop - start:
            what = f" from byte {start:,} on"
            raise truncated(self._location, stop - start, len(data), what)
        return data

    # -- in the thread --------------------------------------------------------------

    def read(self, start: int, stop: int) -> Buffer:
        """Return bytes of the file; waits for those in flight, raises what they do."""
        if self.tail and start >= (known := self._size - len(self.tail)):
            return self.tail[start - known : stop - known]
        parts: list[memoryview] = []
        while self._oldest is not None and self._oldest.stop <= start:
            self._pass(self._oldest)
            self._oldest = next(self._skippable, None)
        while start < stop:
            found = self._find(start, stop)
            data, end = self._wait_for(found), min(stop, found.stop)
            parts.append(data[start - found.start : end - found.start])
            found.left -= end - start
            if found.left <= 0:
                self._pass(found)
            start = end
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _find(self, start: int, stop: int) -> FetchedRange:
        """Return the range that contains ``start``, or a new one outside the plan."""
        place = bisect.bisect_right(self._starts, start)
        if place and start < self._by_start[place - 1].stop:
            return self._by_start[place - 1]
        if place < len(self._starts):
            stop = min(stop, self._starts[place])
        return FetchedRange(start, stop, stop - start)

    def _wait_for(self, found: FetchedRange) -> memoryview:
        try:
            return (found.body or self._ask(found)).result()
        except CancelledError:
            text = f"{self._location!r} was closed while being read; read it again"
            raise DatasetError(text, location=self._location) from None

    def _ask_ahead(self) -> None:
        while not self.is_draining():
            found = self._plan[self._next]
            if found.body is None and not found.is_passed:
                size = found.stop - found.start
                if self._held and self._held + size > self._budget:
                    break
                self._ask(found)
            self._next += 1

    def _ask(self, found: FetchedRange) -> "Future[memoryview]":
        loop = self._loop
        if loop is None or loop.is_closed():
            raise DatasetError(
                "the event loop is closed; read it again", location=self._location
            )
        self._held += found.stop - found.start
        request = self._fetch(found.start, found.stop)
        found.body = body = asyncio.run_coroutine_threadsafe(request, loop)
        return body

    def _pass(self, found: FetchedRange) -> None:
        """Release a range; a later read requests it once more."""
        size = found.stop - found.start
        if found.body is not None:
            self._held -= size
        found.body, found.is_passed, found.left = None, True, size
        self._ask_ahead()
