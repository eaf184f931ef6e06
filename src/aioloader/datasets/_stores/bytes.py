"""The bytes of one shard, read ahead in large pieces, in order.

A file is read into one buffer, and what uses a piece can do so in the thread that has
read it. An object comes by ranged requests, several in flight; the first ones smaller,
so that samples come soon. No more than the budget is held. Every piece is checked
against the size and version that came with the first.
"""

import asyncio
import os
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from io import FileIO
from typing import Any, Protocol, TypeAlias, TypeVar

import aiofiles
import numpy as np
from typing_extensions import Buffer

from aioloader.datasets._stores.outlast import in_thread, outlast
from aioloader.errors import (
    DatasetError,
    ObjectNotFoundError,
    ObjectPermissionError,
    TruncatedReadError,
)

T = TypeVar("T")

_LARGEST = 8 << 20
_SMALLEST = 1 << 16
# A piece of a file is small enough for one core's cache, where it is cut; several make
# a hop to a thread worth its while.
_FILE_PIECE, _FILE_PIECES = 1 << 19, 1 << 22
# Pieces in flight per object, but fewer before they are smaller than that.
_AHEAD, _WORTHWHILE = 16, 1 << 20

# What part of the budget may be requested of a shard before it is read: one of so many.
BEGUN = 8


class Bytes(Protocol):
    """Bytes in order."""

    async def read(self) -> Buffer:
        """Return the next piece, valid until the next call; empty at the end.

        Raises:
            DatasetError: If it cannot be read.
        """

    def begin(self) -> None:
        """Begin to read ahead."""

    def is_draining(self) -> bool:
        """Tell whether another shard may be opened: the rest of this one is coming."""

    def bytes_ahead(self) -> int | None:
        """Return what was requested and not read; None if the size is not known."""

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
        stop: Where to end before the end of the object.
    """

    def __init__(
        self,
        fetch: Fetch,
        whole: Chunks,
        location: str,
        start: int,
        budget: int,
        stop: int | None = None,
    ) -> None:
        self._fetch = fetch
        self._whole = whole
        self._chunks: AsyncIterator[Buffer] | None = None
        self._location = location
        self._start = self._read = self._at = start
        self._end = sys.maxsize if stop is None else stop
        largest = max(budget // _AHEAD, min(budget // 4, _WORTHWHILE))
        # A power of two, for pieces end at multiples of it.
        largest = 1 << max(_SMALLEST, min(_LARGEST, largest)).bit_length() - 1
        self._largest, self._length = largest, _SMALLEST
        self._most = max(2 * largest, min(budget, _AHEAD * largest))
        self._window = max(_SMALLEST, budget // BEGUN)  # until somebody reads
        self._size: int | None = None
        self._version: str | None = None
        self._pieces: deque[asyncio.Task[Piece]] = deque()

    def begin(self) -> None:
        """Send the first request, a small one: it tells the size."""
        if self._at >= self._end:
            self._size = self._at
        if self._size is None and not self._pieces:
            self._request()

    async def read(self) -> Buffer:
        """Return the next piece."""
        if self._chunks is not None:
            return await self._next_chunk(self._chunks)
        self._window = self._most
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
        self._read += len(memoryview(piece.data))
        self._fill()
        return piece.data

    def is_draining(self) -> bool:
        """Tell whether all was requested, and half of the budget is free."""
        is_all = self._size is not None and self._at >= self._size
        return is_all and self._at - self._read <= self._most // 2

    def bytes_ahead(self) -> int | None:
        """Return how much is held, or on its way."""
        return None if self._size is None else self._at - self._read

    async def aclose(self) -> None:
        """Cancel the requests in flight."""
        pieces = list(self._pieces)
        self._pieces.clear()
        self._size = self._at
        for piece in pieces:
            piece.cancel()
        await asyncio.gather(*pieces, return_exceptions=True)

    async def _next_chunk(self, chunks: AsyncIterator[Buffer]) -> Buffer:
        """Return the next part of the whole, after the start."""
        async for chunk in chunks:
            data = memoryview(chunk)[self._start :]
            self._start -= min(self._start, len(memoryview(chunk)))
            if len(data := data[: self._end - self._read]):
                self._read += len(data)
                return data
        return b""

    def _fill(self) -> None:
        """Send requests until the window is full; what is beyond the end is not."""
        size = self._size or 0
        self._at = min(self._at, size)
        while self._at < size and self._stop() - self._read <= self._window:
            self._request()

    def _stop(self) -> int:
        """Return where the next piece ends: as blocks of a cache, at a multiple."""
        stop = self._at - self._at % self._length + self._length
        return min(stop, self._end if self._size is None else self._size)

    def _request(self) -> None:
        start, self._at = self._at, self._stop()
        # They grow, so that those which are asked for at once do not come at once.
        self._length = min(self._largest, max(2 * self._length, self._largest // 8))
        self._pieces.append(asyncio.create_task(self._get(start, self._at)))

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
            if piece.size < self._end < sys.maxsize:
                raise _changed(self._location, self._end, piece.size)
            self._size, self._version = min(piece.size, self._end), piece.version
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
        self.bytes_ahead = inner.bytes_ahead

    async def aclose(self) -> None:
        """Close both."""
        await self._inner.aclose()
        await self._then()


class FileBytes:
    """A file's bytes, opened by ``aiofiles`` and read into one buffer.

    Attributes:
        at_once: Bytes that are best read in one hop to a thread.

    Args:
        path: The file.
        start: First byte.
        budget: Bytes to hold at most.
        stop: Where to end before the end of the file.
    """

    def __init__(
        self, path: str, start: int, budget: int, stop: int | None = None
    ) -> None:
        self._path = path
        self._at = start
        self._end = sys.maxsize if stop is None else stop
        # Besides the buffer there is what is made of it.
        self.at_once = max(_SMALLEST, min(_FILE_PIECES, budget // 2))
        self._length = min(_FILE_PIECE, self.at_once)
        self._buffer = memoryview(b"")
        self._file: Any = None
        self._facts: tuple[int, int] = 0, 0

    def begin(self) -> None:
        """Do nothing: a file is there."""

    async def read(self) -> Buffer:
        """Return the next piece."""
        return await self.use(_next)

    async def use(self, function: Callable[[Callable[[], Buffer]], T]) -> T:
        """Return what ``function`` makes of the next pieces, in the same thread.

        It is called with what reads a piece, which is valid until the next one is read.
        One hop is cheaper than one per piece, and pieces are in that core's cache.
        """
        if self._file is None:
            try:
                await outlast(asyncio.create_task(self._open()))
            except OSError as error:
                raise file_failure(self._path, error) from error
        return await in_thread(function, self._next)

    def is_draining(self) -> bool:
        """Tell whether the end is near."""
        return self._file is not None and self._at >= min(self._facts[0], self._end)

    def bytes_ahead(self) -> int:
        """Return 0: a file is read when it is asked for."""
        return 0

    async def aclose(self) -> None:
        """Close the file."""
        if self._file is not None:
            # If that is cancelled before its thread has begun, it is done again.
            await self._file.close()
            self._file = None

    async def _open(self) -> None:
        # Unbuffered: what is read in large pieces needs no second copy.
        self._file = await aiofiles.open(self._path, "rb", buffering=0)
        self._facts = self._look()
        if self._facts[0] < self._end < sys.maxsize:
            raise _changed(self._path, self._end, self._facts[0])
        if self._at:
            await self._file.seek(self._at)

    def _look(self) -> tuple[int, int]:
        facts = os.fstat(self._file.fileno())
        return facts.st_size, facts.st_mtime_ns

    def _next(self) -> Buffer:
        try:
            length = self._fill()
        except OSError as error:
            raise file_failure(self._path, error) from error
        return self._buffer[:length]

    def _fill(self) -> int:
        """Read one piece; hold the file against what it was at the beginning."""
        stop = min(self._facts[0], self._end)
        wanted = min(self._length, max(0, stop - self._at))
        if not self._buffer:
            # Not mapped: once the C library has freed a block of this size, it keeps as
            # much for samples, which else cost up to a page fault for every 4 KB.
            self._buffer = np.empty(min(_FILE_PIECES, self._facts[0]), np.uint8).data
        length = self._read_into(self._buffer[:wanted]) if wanted else 0
        self._at += length
        if length < wanted or not wanted:
            self._check(wanted, length)
        return length

    def _read_into(self, buffer: memoryview) -> int:
        # The file of aiofiles would hop to a thread of its own.
        return FileIO(self._file.fileno(), closefd=False).readinto(buffer) or 0

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


def _changed(location: str, expected: int, found: int) -> DatasetError:
    """Return the error for a shard that is shorter than when it was cut or listed."""
    text = f"{location!r} has {found:,} bytes, but had {expected:,} when it was cut or "
    text += "listed: it has changed, or its end is missing"
    return DatasetError(text, location=location)


def _next(read: Callable[[], Buffer]) -> Buffer:
    return read()


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
