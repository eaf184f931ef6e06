"""The bytes of one shard, read ahead in large pieces, in order.

A file is read into three buffers in turn, one while another is used. An object comes by
ranged requests, several in flight; the first one smaller, so that samples come soon.
No more than the budget is held. Every piece is checked against the size and version
that the first one told.
"""

import asyncio
import os
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import aiofiles
from typing_extensions import Buffer

from aioloader._transport.slots import Slot, SlotPool
from aioloader.errors import (
    DatasetError,
    ObjectNotFoundError,
    ObjectPermissionError,
    TruncatedReadError,
)

_LARGEST = 8 << 20
_SMALLEST = 1 << 16
# Small enough for the cache, large enough for a hop to a thread.
_FILE_PIECE = 1 << 21
# Pieces in flight per object, and before anybody reads it; the size of the first one.
_AHEAD, _AHEAD_UNREAD = 4, 2
_FIRST = 1 << 22


class Bytes(Protocol):
    """Bytes in order."""

    async def read(self) -> Buffer:
        """Return the next piece, valid until the next call returns; empty at the end.

        Raises:
            DatasetError: If it cannot be read.
        """

    def begin(self) -> None:
        """Begin to read ahead."""

    def is_draining(self) -> bool:
        """Tell whether all was requested."""

    async def aclose(self) -> None:
        """End what is under way, and wait for its end."""


@dataclass(frozen=True)
class Piece:
    """A part of an object.

    Attributes:
        data: The bytes.
        size: Size of the whole object.
        version: Names its contents: an etag, or whatever the store has.
    """

    data: Buffer
    size: int
    version: str | None


class NoRangesError(Exception):
    """Says, within this room, that a server gives objects only as a whole."""


# Start, stop and the version that is expected (None: any) to a piece.
Fetch: TypeAlias = Callable[[int, int, str | None], Awaitable[Piece]]
# The whole object, from the front.
Chunks: TypeAlias = Callable[[], AsyncIterator[Buffer]]


class ObjectBytes:
    """An object's bytes, by ranged requests, or in one if the server has no ranges.

    Args:
        fetch: Reads a range; it may give less than asked at the object's end. Raises
            ``NoRangesError``.
        whole: Reads all of it, then.
        location: What is read, for errors; redacted.
        start: First byte.
        budget: Bytes to hold at most.
    """

    def __init__(
        self, fetch: Fetch, whole: Chunks, location: str, start: int, budget: int
    ) -> None:
        self._fetch = fetch
        self._whole = whole
        self._chunks: AsyncIterator[Buffer] | None = None
        self._start = start
        self._location = location
        self._at = start
        # While one object is used up, another may have begun: both are in the budget.
        self._largest = max(
            _SMALLEST, min(_LARGEST, budget // (_AHEAD + _AHEAD_UNREAD))
        )
        self._ahead = _AHEAD_UNREAD
        self._length = min(_FIRST, self._largest)
        self._size: int | None = None
        self._version: str | None = None
        self._pieces: deque[asyncio.Task[Piece]] = deque()

    def begin(self) -> None:
        """Send the first request."""
        if self._size is None and not self._pieces:
            self._request(self._at + self._length)

    async def read(self) -> Buffer:
        """Return the next piece."""
        if self._chunks is not None:
            return await self._next_chunk(self._chunks)
        self._ahead = _AHEAD
        self.begin()
        if not self._pieces:
            return b""
        await asyncio.wait([self._pieces[0]])  # a cancellation leaves it alone
        try:
            piece = self._pieces.popleft().result()
        except NoRangesError:
            self._size = self._at
            self._chunks = self._whole()
            return await self._next_chunk(self._chunks)
        self._fill()
        return piece.data

    def is_draining(self) -> bool:
        """Tell whether all was requested."""
        return self._size is not None and self._at >= self._size

    async def aclose(self) -> None:
        """Cancel the requests in flight."""
        pieces = list(self._pieces)
        self._pieces.clear()
        self._size = self._at
        for piece in pieces:
            piece.cancel()
        await asyncio.gather(*pieces, return_exceptions=True)

    async def _next_chunk(self, chunks: AsyncIterator[Buffer]) -> Buffer:
        """Return what comes next of the whole, behind the start."""
        async for chunk in chunks:
            data = memoryview(chunk)[self._start :]
            self._start -= min(self._start, len(memoryview(chunk)))
            if len(data):
                return data
        return b""

    def _fill(self) -> None:
        """Send requests until the window is full; what is beyond the end is not."""
        size = self._size or 0
        self._at = min(self._at, size)
        while len(self._pieces) < self._ahead and self._at < size:
            self._request(min(self._at + self._length, size))

    def _request(self, stop: int) -> None:
        start, self._at = self._at, stop
        self._length = min(2 * self._length, self._largest)
        self._pieces.append(asyncio.create_task(self._get(start, stop)))

    async def _get(self, start: int, stop: int) -> Piece:
        piece = await self._fetch(start, stop, self._version)
        expected = max(0, min(stop, piece.size) - start)
        if (received := len(memoryview(piece.data))) != expected:
            raise TruncatedReadError(
                f"{self._location!r} gave {received:,} of {expected:,} bytes from "
                f"byte {start:,} on",
                location=self._location,
                expected=expected,
                received=received,
            )
        if self._size is None:  # the first piece tells; the others need not wait longer
            self._size, self._version = piece.size, piece.version
            self._fill()
        return piece


class Closing:
    """Bytes, and what is to be closed with them.

    Args:
        inner: The bytes.
        then: Called when they are closed.
    """

    def __init__(self, inner: Bytes, then: Callable[[], Awaitable[None]]) -> None:
        self._inner = inner
        self._then = then
        self.read = inner.read
        self.begin = inner.begin
        self.is_draining = inner.is_draining

    async def aclose(self) -> None:
        """Close both."""
        await self._inner.aclose()
        await self._then()


class FileBytes:
    """A file's bytes, read into three buffers in turn by ``aiofiles``.

    Args:
        path: The file.
        start: First byte.
        budget: Bytes to hold at most.
        pool: Where buffers come from, and go back to for the next file.
    """

    def __init__(self, path: str, start: int, budget: int, pool: SlotPool) -> None:
        self._path = path
        self._pool = pool
        self._at = start
        self._length = max(_SMALLEST, min(_FILE_PIECE, budget // 3))
        self._spare: list[Slot] = []
        self._used: deque[Slot] = deque()
        self._file: Any = None
        self._facts: tuple[int, int] = 0, 0
        self._reading: asyncio.Task[tuple[Slot, int]] | None = None
        self._has_ended = False

    def begin(self) -> None:
        """Begin to read the first piece."""
        if self._reading is None and not self._has_ended:
            self._reading = asyncio.create_task(self._next())

    async def read(self) -> Buffer:
        """Return the next piece."""
        self.begin()
        if self._reading is None:
            return b""
        await asyncio.wait([self._reading])  # a cancellation leaves it alone
        reading, self._reading = self._reading, None
        buffer, length = reading.result()
        self._used.append(buffer)
        if len(self._used) > 2:
            self._spare.append(self._used.popleft())
        self._has_ended = not length
        if length:
            self.begin()
        return buffer.data[:length]

    def is_draining(self) -> bool:
        """Tell whether the end is near."""
        return self._has_ended or (
            self._file is not None and self._at >= self._facts[0]
        )

    async def aclose(self) -> None:
        """Wait for the read under way, and close the file."""
        self._has_ended = True
        if self._reading is not None:
            # A read in a thread cannot be cancelled; it is of one piece.
            await asyncio.wait([self._reading])
            if not self._reading.cancelled():
                self._reading.exception()  # seen: nobody else will ask for it
            self._reading = None
        if self._file is not None:
            # If that is cancelled before its thread has begun, it is done again.
            await self._file.close()
            self._file = None

    async def _next(self) -> tuple[Slot, int]:
        try:
            if self._file is None:
                await self._open()
            return await self._fill()
        except OSError as error:
            raise file_failure(self._path, error) from error

    async def _open(self) -> None:
        # Unbuffered: what is read in pieces of megabytes needs no second copy.
        self._file = await aiofiles.open(self._path, "rb", buffering=0)
        self._facts = self._look()
        if self._at:
            await self._file.seek(self._at)

    def _look(self) -> tuple[int, int]:
        facts = os.fstat(self._file.fileno())
        return facts.st_size, facts.st_mtime_ns

    async def _fill(self) -> tuple[Slot, int]:
        """Read one piece; hold the file against what it was at the beginning."""
        size, _ = self._facts
        buffer = self._spare.pop() if self._spare else self._pool.lease(self._length)
        wanted = min(self._length, max(0, size - self._at))
        length = await self._file.readinto(buffer.data[:wanted]) if wanted else 0
        self._at += length
        if length < wanted or not wanted:
            self._check(wanted, length)
        return buffer, length

    def _check(self, wanted: int, length: int) -> None:
        size, changed = self._look()
        if (size, changed) != self._facts:
            raise DatasetError(
                f"{self._path!r} has changed while it was read: it had "
                f"{self._facts[0]:,} bytes and has {size:,}, changed at {changed} ns; "
                "write shards under another name and rename them",
                location=self._path,
            )
        if wanted and not length:
            raise TruncatedReadError(
                f"{self._path!r} gave {self._at:,} of {size:,} bytes",
                location=self._path,
                expected=size,
                received=self._at,
            )


def file_failure(path: str, cause: OSError) -> DatasetError:
    """Return the house error for a file that cannot be read."""
    match cause:
        case FileNotFoundError():
            return ObjectNotFoundError(f"no such file: {path!r}", location=path)
        case PermissionError():
            return ObjectPermissionError(f"may not read {path!r}", location=path)
        case IsADirectoryError():
            text = f"{path!r} is a directory, not a file"
        case _:
            text = f"cannot read {path!r}: {cause.strerror or cause}"
    return DatasetError(text, location=path)
