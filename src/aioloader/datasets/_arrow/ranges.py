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
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from typing_extensions import Buffer

from aioloader.errors import DatasetError, TruncatedReadError

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
        left: How many of the wanted bytes were not read yet.
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

    @property
    def size(self) -> int:
        """Length, in bytes."""
        return self.stop - self.start


def plan(spans: Iterable[Span], most: int) -> list[Range]:
    """Return the requests for ``spans`` of a file, in their order of use.

    The spans are read in parallel, each from start to end, like columns: long ones are
    cut, and the n-th parts of all come before the next parts. Adjacent short spans are
    joined.

    Args:
        spans: Starts and stops, in any order; empty ones are left out.
        most: Most bytes of a request.
    """
    groups: list[Range] = []
    for start, stop in sorted(span for span in spans if span[0] < span[1]):
        last = groups[-1] if groups else None
        is_near = last is not None and last.stop <= start <= last.stop + _GAP
        if last is not None and is_near and stop - last.start <= most:
            groups[-1] = Range(last.start, stop, last.wanted + stop - start)
        else:
            groups.append(Range(start, stop, stop - start))
    ranges: list[tuple[float, int, Range]] = []
    for group in groups:
        step = -(-group.size // -(-group.size // most))
        for start in range(group.start, group.stop, step):
            stop = min(group.stop, start + step)
            wanted = group.wanted if step == group.size else stop - start
            found = Range(start, stop, wanted)
            ranges.append(((start - group.start) / group.size, start, found))
    return [found for *_, found in sorted(ranges, key=lambda one: one[:2])]


class RangeFile(io.RawIOBase):
    """A file object for pyarrow.

    Args:
        size: Its length.
        read: Returns the bytes from a start to a stop.
    """

    def __init__(self, size: int, read: Callable[[int, int], Buffer]) -> None:
        self._size = size
        self._read = read
        self._at = 0

    def read(self, nbytes: int = -1) -> Buffer:
        """Return the next bytes, fewer only at the end of the file."""
        start = self._at
        stop = self._size if nbytes < 0 else min(self._size, start + nbytes)
        self._at = max(start, stop)
        return self._read(start, stop)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position."""
        base = {io.SEEK_CUR: self._at, io.SEEK_END: self._size}
        self._at = base.get(whence, 0) + offset
        return self._at

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True


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
        read: Callable[[int, int], Awaitable[Buffer]],
        size: int,
        plan: list[Range],
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
        self._next = 0
        self._held = 0
        self._is_closed = False
        self._by_start = sorted(plan, key=lambda found: found.start)
        self._starts = [found.start for found in self._by_start]
        self._skippable = iter(self._by_start if in_order else ())
        self._oldest = next(self._skippable, None)
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
        while not self.is_draining():
            found = self._plan[self._next]
            if not found.is_asked and not found.is_passed:
                if self._held and self._held + found.size > self._budget:
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
        self._held += found.size
        task = self._loop.create_task(self._fetch(found.start, found.stop))
        self._tasks.add(task)
        task.add_done_callback(partial(self._settle, found.body))

    async def _fetch(self, start: int, stop: int) -> Buffer:
        data = await self._read(start, stop)
        expected, received = stop - start, memoryview(data).nbytes
        if received != expected:
            raise TruncatedReadError(
                f"{self._location!r} gave {received:,} of {expected:,} bytes from byte "
                f"{start:,} on",
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
        self._pass_before(start)
        while start < stop:
            found = self._find(start, stop)
            if not found.is_asked:
                self._post(self._ask, found)
            body, end = found.body.result(), min(stop, found.stop)
            parts.append(body[start - found.start : end - found.start])
            found.left -= end - start
            if found.left <= 0:
                self._pass(found)
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

    def _pass_before(self, start: int) -> None:
        """Release the ranges before ``start`` if reads only move forward."""
        while self._oldest is not None and self._oldest.stop <= start:
            if self._oldest.is_asked:
                self._pass(self._oldest)
            self._oldest.is_passed = True
            self._oldest = next(self._skippable, None)

    def _pass(self, found: Range) -> None:
        """Release a range; a later read requests it once more."""
        found.is_passed = True
        found.body, found.is_asked, found.left = Future(), False, found.wanted
        self._post(self._release, found.size)

    def _post(self, function: Callable[..., None], argument: object) -> None:
        if self._loop is None or self._loop.is_closed():
            raise DatasetError("the event loop is closed", location=self._location)
        self._loop.call_soon_threadsafe(function, argument)
