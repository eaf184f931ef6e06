"""A file for pyarrow whose bytes come by ranged requests, many of them in advance.

The reads are known in advance: a plan of ranges, in their order of use. Requests run
ahead within a budget, on the event loop; pyarrow reads in a thread, which waits for
missing bytes. A range is released when all of it was read. A read outside the plan
makes its own request: the plan changes time and memory, not results.
"""

import asyncio
import bisect
import io
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

from typing_extensions import Buffer

from aioloader.errors import DatasetError, TruncatedReadError

Read: TypeAlias = Callable[[int, int], Awaitable[Buffer]]
Span: TypeAlias = tuple[int, int]

# Ranges nearer than this are read in one request: a round trip costs more.
_GAP = 1 << 16


@dataclass
class Range:
    """A range of the file.

    Attributes:
        start: First byte.
        stop: One past the last byte.
        wanted: How many of its bytes will be read; then it is released.
        body: Future of the bytes.
        is_asked: Whether they were requested.
        is_passed: Whether all was read once.
    """

    start: int
    stop: int
    wanted: int
    body: "Future[memoryview]" = field(default_factory=Future)
    is_asked: bool = False
    is_passed: bool = False
    left: int = 0

    def __post_init__(self) -> None:
        self.left = self.wanted


def plan(spans: Iterable[Span], most: int) -> list[Range]:
    """Return the requests for ``spans`` of a file, in their order of use.

    The spans are read in parallel, each from start to end, like columns: long ones are
    cut, and the n-th parts of all come before the next parts. Adjacent short spans are
    joined.

    Args:
        spans: Starts and stops, in any order; empty ones are left out.
        most: Most bytes of a request.
    """
    ranges: list[tuple[float, Range]] = []
    for start, stop, wanted in _grouped(spans, most):
        count = -(-(stop - start) // most)
        step = -(-(stop - start) // count)
        for number in range(count):
            first = start + number * step
            last = min(stop, first + step)
            ranges.append(
                (
                    number / count,
                    Range(first, last, wanted if count == 1 else last - first),
                )
            )
    ranges.sort(key=lambda found: (found[0], found[1].start))
    return [found for _, found in ranges]


def _grouped(spans: Iterable[Span], most: int) -> list[tuple[int, int, int]]:
    """Join adjacent short spans; return each with its number of wanted bytes."""
    groups: list[tuple[int, int, int]] = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        if groups:
            first, last, wanted = groups[-1]
            if start - last <= _GAP and stop - first <= most and start >= last:
                groups[-1] = first, stop, wanted + stop - start
                continue
        groups.append((start, stop, stop - start))
    return groups


class Ranges:
    """The bytes of one file, requested ahead.

    ``begin`` and ``aclose`` belong to the loop's thread, ``read`` to one other thread.

    Args:
        read: Requests the bytes from a start to a stop.
        size: Length of the file.
        plan: The ranges to read, in the order of use; no two overlap.
        budget: Most bytes to hold; one range may exceed it.
        location: Redacted address, for errors.
        in_order: Whether reads only move forward; then skipped ranges are released too.
    """

    def __init__(
        self,
        read: Read,
        size: int,
        plan: Sequence[Range],
        *,
        budget: int,
        location: str,
        in_order: bool = False,
    ) -> None:
        self.size = size
        self.failure: Exception | None = None
        self._read = read
        self._budget = budget
        self._location = location
        self._plan = plan
        self._in_order = in_order
        self._next = 0
        self._behind = 0
        self._held = 0
        self._is_closed = False
        self._by_start = sorted(plan, key=lambda found: found.start)
        self._starts = [found.start for found in self._by_start]
        self._tasks: set[asyncio.Task[Buffer]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- on the loop ----------------------------------------------------------------

    def begin(self) -> None:
        """Start requesting the plan."""
        self._loop = asyncio.get_running_loop()
        self._ask_ahead()

    def is_draining(self) -> bool:
        """Return whether the whole plan was requested."""
        return self._next >= len(self._plan)

    async def aclose(self) -> None:
        """Cancel the requests; a thread that waits for bytes fails."""
        self._is_closed = True
        self._next = len(self._plan)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ask_ahead(self) -> None:
        while self._next < len(self._plan):
            found = self._plan[self._next]
            if not found.is_asked and not found.is_passed:
                size = found.stop - found.start
                if self._held and self._held + size > self._budget:
                    break
                self._ask(found)
            self._next += 1

    def _ask(self, found: Range) -> None:
        if found.is_asked:
            return
        found.is_asked = True
        if self._is_closed or self._loop is None:
            found.body.set_exception(self._closed())
            return
        self._held += found.stop - found.start
        task = self._loop.create_task(self._fetch(found))
        self._tasks.add(task)
        task.add_done_callback(partial(self._settle, found.body))

    async def _fetch(self, found: Range) -> Buffer:
        data = await self._read(found.start, found.stop)
        expected, received = found.stop - found.start, memoryview(data).nbytes
        if received != expected:
            raise TruncatedReadError(
                f"{self._location!r} gave {received:,} of {expected:,} bytes from byte "
                f"{found.start:,} on",
                location=self._location,
                expected=expected,
                received=received,
            )
        return data

    def _settle(self, body: "Future[memoryview]", task: "asyncio.Task[Buffer]") -> None:
        self._tasks.discard(task)
        if task.cancelled():
            body.set_exception(self._closed())
        elif (error := task.exception()) is not None:
            if isinstance(error, Exception):
                self.failure = self.failure or error
            body.set_exception(error)
        else:
            body.set_result(memoryview(task.result()).cast("B"))

    def _release(self, nbytes: int) -> None:
        self._held -= nbytes
        if not self._is_closed:
            self._ask_ahead()

    def _closed(self) -> DatasetError:
        text = f"{self._location!r} was closed while being read"
        return DatasetError(text, location=self._location)

    # -- in the thread --------------------------------------------------------------

    def read(self, start: int, stop: int) -> Buffer:
        """Return bytes of the file; waits for those in flight.

        Raises:
            Exception: Raised by a request.
            DatasetError: If it is closed meanwhile.
        """
        parts: list[memoryview] = []
        if self._in_order:
            self._release_before(start)
        while start < stop:
            found = self._find(start, stop)
            if not found.is_asked:
                self._post(self._ask, found)
            body = found.body.result()
            end = min(stop, found.stop)
            parts.append(body[start - found.start : end - found.start])
            self._count(found, end - start)
            start = end
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _find(self, start: int, stop: int) -> Range:
        """Return the range that contains ``start``, or a new one outside the plan."""
        place = bisect.bisect_right(self._starts, start)
        if place and start < self._by_start[place - 1].stop:
            return self._by_start[place - 1]
        if place < len(self._starts):
            stop = min(stop, self._starts[place])
        return Range(start, stop, stop - start)

    def _count(self, found: Range, nbytes: int) -> None:
        """Release a range that was read; it could be requested once more."""
        found.left -= nbytes
        if found.left <= 0:
            self._pass(found)

    def _release_before(self, start: int) -> None:
        """Release skipped ranges before ``start``."""
        while self._behind < len(self._by_start):
            found = self._by_start[self._behind]
            if found.stop > start:
                return
            self._behind += 1
            if found.is_asked:
                self._pass(found)
            found.is_passed = True

    def _pass(self, found: Range) -> None:
        found.is_passed = True
        found.body, found.is_asked, found.left = Future(), False, found.wanted
        self._post(self._release, found.stop - found.start)

    def _post(self, function: Callable[..., None], argument: object) -> None:
        if self._loop is None or self._loop.is_closed():
            raise DatasetError("the event loop is closed", location=self._location)
        self._loop.call_soon_threadsafe(function, argument)


class RangeFile:
    """A file object for pyarrow.

    Args:
        size: Its length.
        read: Returns the bytes from a start to a stop.
        known: Parts of the file that are known: start to bytes.
    """

    closed = False

    def __init__(
        self,
        size: int,
        read: Callable[[int, int], Buffer],
        known: Mapping[int, bytes] = MappingProxyType({}),
    ) -> None:
        self._size = size
        self._read = read
        self._known = known
        self._at = 0

    def read(self, nbytes: int = -1) -> Buffer:
        """Return the next bytes, fewer only at the end of the file."""
        size, start = self._size, self._at
        stop = size if nbytes is None or nbytes < 0 else min(size, start + nbytes)
        self._at = max(start, stop)
        for first, data in self._known.items():
            if first <= start and stop <= first + len(data):
                return memoryview(data)[start - first : stop - first]
        return self._read(start, stop)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position."""
        base = {io.SEEK_CUR: self._at, io.SEEK_END: self._size}
        self._at = base.get(whence, 0) + offset
        return self._at

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def close(self) -> None:
        """Do nothing: the owner of the ranges closes them."""

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def writable(self) -> bool:
        """Return False."""
        return False
