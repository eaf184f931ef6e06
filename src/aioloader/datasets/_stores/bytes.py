"""Readers of stored objects and local files, by single byte ranges or as a stream.

All responses for an object must have the same version and the requested length. With a
cache, streams are read in aligned blocks, which processes share; a table's ranges are
cached as requested. Cache keys include the object's version, for which a cached stream
requests one byte; cached tables reuse a version for ten minutes.
"""

import asyncio
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from io import FileIO
from typing import TYPE_CHECKING, Any, TypeVar

import aiofiles
import numpy as np
from typing_extensions import Buffer

from aioloader._base.cancellation import cancel, finish_despite_cancel, in_thread
from aioloader._base.warnings import warn
from aioloader.datasets._stores.cache_dir import CacheDir
from aioloader.datasets._stores.failures import (
    ANY_VERSION,
    ExpectedVersion,
    NoRangesError,
    Piece,
    Version,
    changed,
    file_failure,
    opener,
    truncated,
    version_of_file,
)
from aioloader.datasets._stores.sources import RefusedError, Requests, Store, Tries
from aioloader.datasets._stores.stores import ObstoreStore, WholeObject
from aioloader.errors import DatasetError

if TYPE_CHECKING:
    from obstore import Bytes

    from aioloader.datasets._stores.addresses import Address
    from aioloader.datasets._stores.listing import Listing

_CACHE_BLOCK = 4 << 20
# Seconds for which a cached version of a table's file is not requested again.
_FRESH_SECONDS = 600.0
_MAX_RANGED = 1 << 16  # maximum entries of ``Client.ranged``
_WARNED: set[tuple[str, str]] = set()
# Limits of a piece in bytes; each request of a stream returns one piece.
_MIN_PIECE, _MAX_PIECE = 1 << 16, 8 << 20
# Pieces in flight per object besides the one being parsed. With a small budget, their
# number is reduced before their size falls below ``_WORTHWHILE`` bytes.
_MAX_AHEAD, _WORTHWHILE = 15, 1 << 20
# If even the fastest request takes longer, the store is far: request the whole budget.
_FAR_SECONDS = 0.02
# From a near store, ``Client.ahead`` pieces are requested. The number doubles if waits
# take over half of the time of ``_WAITS`` pieces, and the last doubling saved 1/4.
_WAITS, _MIN_WAITING, _MAX_REMAINING = 32, 0.5, 0.75
# Before its first read, a shard may request ``budget // START_DIVISOR`` bytes.
START_DIVISOR = 8
T = TypeVar("T")

# Bytes of a local file's piece (fits a core's cache), and bytes per thread call.
_FILE_PIECE, _FILE_PIECES = 1 << 19, 1 << 22


class Client:
    """The state shared by all requests of one dataset on one event loop.

    Attributes:
        listings: The latest listing of each (store URL, folder).
        users: How many iterations or contexts of the dataset are open on this loop.
        ranged: Hashes of the objects for which the server has honoured a range.
        soonest: Duration of the fastest request, in seconds.
        ahead: How many pieces a reader of a near store requests ahead.
    """

    def __init__(self, policy: Requests) -> None:
        self.listings: dict[tuple[Address | None, str], Listing] = {}
        self.tries: Tries = Tries(policy)
        self.users = 0
        self.ranged: set[int] = set()
        self.soonest: float = math.inf
        self.ahead: int = 2
        # Seconds waited for recent pieces, and in total before ``ahead`` last doubled.
        self._waits, self._before = list[float](), math.inf
        self._since = time.perf_counter()

    def note(self, waited: float) -> None:
        """Record the seconds waited for a piece, and adapt ``ahead``."""
        self._waits.append(waited)
        if len(self._waits) < _WAITS:
            return
        total, took = sum(self._waits), time.perf_counter() - self._since
        self._waits, self._since = [], self._since + took
        if _MIN_WAITING * took < total < _MAX_REMAINING * self._before:
            self._before, self.ahead = total, 2 * self.ahead
        elif total > 2 * self._before:  # the network has changed
            self._before = math.inf

    def listed(self, root: "Address | None", key: str) -> Version | None:
        """Return a version with a listed size; None for an unlisted or empty object."""
        for (listed_root, folder), listing in self.listings.items():
            is_in = listed_root == root and key.startswith(folder)
            if is_in and (size := listing.size_of(key)):
                return Version(size)
        return None


class StoredObject:
    """An object in a store; with a cache, streams fetch it in aligned blocks."""

    def __init__(
        self,
        client: Client,
        store: Store,
        key: str,
        cache: CacheDir | None = None,
        name: str = "",
    ) -> None:
        self.block = _CACHE_BLOCK if cache is not None else 0
        self.client: Client = client
        self._store, self._key = store, key
        self._cache, self._name = cache, name

    @property
    def location(self) -> str:
        return self._store.locate(self._key)

    def whole(self, size: int) -> "Awaitable[Bytes | bytes | memoryview]":
        """Read the whole object into a read-only buffer, which the caller owns."""
        store, key = self._store, self._key
        attempt = lambda: store.ask(key, store.whole(key, size))  # noqa: E731
        return self.client.tries.make(attempt, store, key)

    def stream(self) -> WholeObject:
        """Return a reader of the whole object, for a server without ranges."""
        assert isinstance(self._store, ObstoreStore)  # other stores support ranges
        return WholeObject(self._store, self._key, self.client.tries)

    async def fetch(self, start: int, stop: int, version: Version | None) -> Piece:
        """Return a byte range, cut at the object's end; check ``version`` if given."""
        if self._cache is None:
            return await self._request(start, stop, version)
        now = version
        if now is None or now.e_tag is None:
            now = await self._request_version(version)
            if now.e_tag is None:
                return await self._request(start, stop, version)
        stop, parts = min(stop, now.size), list[Buffer]()
        for first in range(start - start % _CACHE_BLOCK, stop, _CACHE_BLOCK):
            block = await self.read(first, min(first + _CACHE_BLOCK, now.size), now)
            parts.append(memoryview(block)[max(start - first, 0) : stop - first])
        return Piece(parts[0] if len(parts) == 1 else b"".join(parts), now)

    async def read(self, start: int, stop: int, version: Version) -> Buffer:
        """Return a byte range of the object at ``version``, if possible from cache."""
        if self._cache is None or version.e_tag is None:
            return (await self._request(start, stop, version)).data
        size, e_tag, modified = version
        tag = e_tag if version.strong else f"{e_tag} {modified}"
        name = f"{tag}\n{size}\n{start}-{stop}"
        data: Buffer | None = await self._get_cached(name)
        if data is None:
            try:
                data = (await self._request(start, stop, version)).data
            except DatasetError:  # the object may have changed: forget the version
                await self._put_cached("version", b"[0]")
                raise
            if len(memoryview(data)) == min(stop, size) - start:
                await self._put_cached(name, data)
        return data

    async def version(self, expected: Version | None) -> Version:
        """Return the object's version, from the cache if recent, or by a request."""
        kept = json.loads(await self._get_cached("version") or "[0]")
        if abs(time.time() - kept[0]) < _FRESH_SECONDS:
            version = Version(*kept[1:])
            if expected is None or version.is_of(expected):
                return version
        version = await self._request_version(expected)
        if version.e_tag is not None:
            kept = json.dumps([time.time(), *version])
            await self._put_cached("version", kept.encode())
        return version

    async def _request_version(self, expected: Version | None) -> Version:
        """Request the current version; warn if the answer rules out caching."""
        try:
            version = (await self._request(0, 1, expected)).version
        except NoRangesError:
            self._warn("has no ranges")
            raise
        if version.e_tag is None:
            self._warn("sends no ETag, so changes would not be noticed")
        return version

    async def _get_cached(self, name: str) -> bytes | None:
        if self._cache is None:
            return None
        return await in_thread(self._cache.get, f"{self._name}\n{name}")

    async def _put_cached(self, name: str, data: Buffer) -> None:
        if self._cache is not None:
            await in_thread(self._cache.put, f"{self._name}\n{name}", data)

    def _warn(self, reason: str) -> None:
        if self._cache is not None:
            warn_once(self._cache, self._store.label, f"the server {reason}")

    async def _request(self, start: int, stop: int, version: Version | None) -> Piece:
        attempt = partial(self._get, start, stop, version)
        return await self.client.tries.make(attempt, self._store, self._key)

    async def _get(self, start: int, stop: int, version: Version | None) -> Piece:
        ranged, store, key = self.client.ranged, self._store, self._key
        name = hash((store, key))
        try:
            piece = await store.ask(key, store.get(key, start, stop, version))
        except RefusedError as refused:
            if name not in ranged or not isinstance(refused.error, NoRangesError):
                raise
            text = (
                f"{self.location!r}: HTTP 200, without the range requested: check "
                "the proxy and the endpoint"
            )
            raise DatasetError(text, location=self.location) from None
        if len(ranged) == _MAX_RANGED:
            ranged.clear()
        ranged.add(name)
        current = piece.version
        if not (version is None or current is version or current.is_of(version)):
            raise RefusedError(changed(self.location, version, current))
        expected = max(0, min(stop, current.size) - start)
        if (received := len(memoryview(piece.data))) != expected:
            where = f" from byte {start:,} on"
            raise truncated(self.location, expected, received, where)
        return piece


def warn_once(cache: CacheDir, label: str, reason: str) -> None:
    """Warn once per cache and store that the cache holds none of its objects."""
    if (cache.directory, label) not in _WARNED:
        _WARNED.add((cache.directory, label))
        warn(
            f"cache= keeps nothing of {label!r}: {reason}; read without "
            "cache=, or from a store with ETags and ranges (warned once)",
            RuntimeWarning,
        )


class ObjectBytes:
    """Streams an object by ranged requests, or by one request if ranges fail."""

    def __init__(
        self,
        object: StoredObject,  # noqa: A002
        start: int,
        budget: int,
        expected: ExpectedVersion = ANY_VERSION,
        stop: int | None = None,
    ) -> None:
        self.version: Version | None = None  # until the first response
        self._object, self._expected = object, expected
        self._whole: WholeObject | None = None
        self._stop = sys.maxsize if stop is None else stop
        self._start = self._read = self._sent = start  # bytes delivered, and requested
        self._is_over = start >= self._stop
        largest = max(budget // _MAX_AHEAD, min(budget // 4, _WORTHWHILE))
        # A power of two, because pieces end at multiples of their length.
        largest = 1 << max(_MIN_PIECE, min(_MAX_PIECE, largest)).bit_length() - 1
        self._largest, self._length = largest, _MIN_PIECE
        if object.block:
            self._largest = self._length = largest = object.block
        self._max_window = max(2 * largest, min(budget, _MAX_AHEAD * largest))
        self._window = max(_MIN_PIECE, budget // START_DIVISOR)  # until the first read
        self._pieces: deque[asyncio.Task[Piece]] = deque()

    @property
    def _end(self) -> int:
        return (
            self._stop if self.version is None else min(self.version.size, self._stop)
        )

    def begin(self) -> None:
        """Send the first request, whose response also reports the object's size."""
        if self.version is None and not (self._pieces or self._is_over):
            self._request()

    async def read(self) -> Buffer:
        """Return the next piece, empty at the end; it is valid until the next call."""
        if self._whole is not None:
            return await self._next_chunk(self._whole)
        self.begin()
        if not self._pieces:
            return b""
        began = time.perf_counter()
        await asyncio.wait([self._pieces[0]])  # if cancelled, the request continues
        try:
            piece = self._pieces.popleft().result()
        except NoRangesError:
            await self.aclose()
            self._start = self._read
            self._whole = self._object.stream()
            return await self._next_chunk(self._whole)
        length = len(memoryview(piece.data))
        self._read += length
        client = self._object.client
        if length == self._largest:
            client.note(time.perf_counter() - began)
        self._window = self._max_window
        # The first request may have been slow because it had to connect.
        if length == _MIN_PIECE or client.soonest < _FAR_SECONDS:
            self._window = min(self._max_window, client.ahead * self._largest)
        self._fill()
        return piece.data

    def is_draining(self) -> bool:
        """Return whether all bytes are requested and half of the window is free."""
        is_all = self._is_over or (self.version is not None and self._sent >= self._end)
        return is_all and self._sent - self._read <= self._max_window // 2

    def bytes_ahead(self) -> int | None:
        """Return how many requested bytes are unread; None until the size is known."""
        is_known = self.version is not None or self._is_over
        return self._sent - self._read if is_known else None

    async def aclose(self) -> None:
        """Cancel the ranged requests in flight; no further ones are sent."""
        self._is_over = True
        pieces, self._pieces = self._pieces, deque()
        await cancel(pieces)

    async def _next_chunk(self, whole: WholeObject) -> Buffer:
        while True:
            piece = await whole.read()
            self._learn(piece.version)
            data = memoryview(piece.data)
            if not data:
                return data
            fresh = data[self._start :]
            self._start -= len(data) - len(fresh)
            if fresh := fresh[: self._stop - self._read]:
                self._read += len(fresh)
            if fresh or self._read >= self._stop:
                return fresh

    def _fill(self) -> None:
        """Send requests until the window is full or all bytes are requested."""
        if not self._is_over:
            self._sent = min(self._sent, self._end)
            while self._sent < self._end and self._next() - self._read <= self._window:
                self._request()

    def _next(self) -> int:
        """Return the offset where the next piece ends, aligned like cache blocks."""
        return min(self._sent - self._sent % self._length + self._length, self._end)

    def _request(self) -> None:
        start, self._sent = self._sent, self._next()
        # Sizes grow from piece to piece, so that responses do not all arrive at once.
        self._length = min(self._largest, max(2 * self._length, self._largest // 8))
        self._pieces.append(asyncio.create_task(self._get(start, self._sent)))

    async def _get(self, start: int, stop: int) -> Piece:
        version, began = self.version or self._expected.version, time.perf_counter()
        piece = await self._object.fetch(start, stop, version)
        client = self._object.client
        client.soonest = min(client.soonest, time.perf_counter() - began)
        if self.version is None:
            self._learn(piece.version)
            self._fill()  # the size is known now
        return piece

    def _learn(self, version: Version) -> None:
        """Check and store the first response's version; ignore later versions."""
        if self.version is None:
            self._expected.check(self._object.location, version, self._start)
            self.version = version


class FileBytes:
    """Streams a local file through one buffer, by reads in a thread."""

    def __init__(
        self,
        path: str,
        start: int,
        budget: int,
        expected: ExpectedVersion = ANY_VERSION,
        stop: int | None = None,
    ) -> None:
        self.version: Version | None = None  # until the file is open
        self._path, self._expected = path, expected
        self._offset, self._stop = start, sys.maxsize if stop is None else stop
        # Bytes per thread call; the other half of the budget is for parsed data.
        self.at_once: int = max(_MIN_PIECE, min(_FILE_PIECES, budget // 2))
        self._length = min(_FILE_PIECE, self.at_once)
        self._buffer = memoryview(b"")
        self._file: Any = None

    def begin(self) -> None:
        """Do nothing: a file needs no request."""

    def bytes_ahead(self) -> int:
        return 0

    async def read(self) -> Buffer:
        return await self.use(lambda read: read())

    async def use(self, function: Callable[[Callable[[], Buffer]], T]) -> T:
        """Run ``function`` in a thread; its argument is a function that reads a piece.

        A piece is valid until the next is read. One thread call for several pieces is
        cheaper than one per piece, and keeps the pieces in one core's cache.
        """
        await self.open()
        return await in_thread(function, self.read_here)

    async def open(self) -> None:
        if self._file is None:
            try:
                await finish_despite_cancel(asyncio.create_task(self._open()))
            except OSError as error:
                raise file_failure(self._path, error) from error

    def is_draining(self) -> bool:
        return self.version is not None and self._offset >= self._stop

    async def aclose(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            await finish_despite_cancel(asyncio.ensure_future(file.close()))

    async def _open(self) -> None:
        # Unbuffered, so that large reads are not copied twice.
        self._file = await aiofiles.open(self._path, "rb", buffering=0, opener=opener)
        version = version_of_file(self._file.fileno())
        if self._offset or self._expected is not ANY_VERSION:
            self._expected.check(self._path, version, self._offset)
        self.version, self._stop = version, min(version.size, self._stop)
        if self._offset:
            await self._file.seek(self._offset)

    def read_here(self, cached: int = 0) -> Any:
        """Return the next piece of the open file; raise if the file changed. Blocks.

        If ``cached`` is not 0, return at most ``cached`` bytes from the page cache,
        without blocking; None if the page cache has none.
        """
        assert self.version is not None
        size, limit = self.version.size, min(cached or self._length, self._length)
        if not self._buffer:
            # Not a mapping: malloc reuses a freed block of this size for samples, whose
            # memory would otherwise cost up to one page fault per 4 KB.
            self._buffer = np.empty(min(_FILE_PIECES, size), np.uint8).data
        count = min(limit, max(0, self._stop - self._offset))
        # Methods of the aiofiles object would call another thread.
        file: int = self._file.fileno()
        try:
            read = _read_cached if cached else _read_into
            length = read(file, self._buffer[:count]) if count else 0
            if length is None:
                return None
            current = version_of_file(file)
        except OSError as error:
            raise file_failure(self._path, error) from error
        self._offset += length
        if current != self.version:
            raise changed(self._path, self.version, current)
        if count and not length:
            raise truncated(self._path, size, self._offset, "")
        return self._buffer[:length]


def _read_into(file: int, buffer: memoryview) -> int:
    return FileIO(file, closefd=False).readinto(buffer) or 0


def _read_cached(file: int, buffer: memoryview) -> int | None:
    """Return how many bytes were read from cached pages; None if none could be read."""
    try:
        # -1: from the current position. Linux 5.9 and 5.10 may return 0 anywhere.
        return os.preadv(file, [buffer], -1, os.RWF_NOWAIT) or None
    except (AttributeError, OSError):  # not Linux, or an unsupported file system
        return None


def bounds(start: int, stop: int, size: int) -> tuple[int, int]:
    """Resolve a negative ``start`` and a ``stop`` of 0 (the end) against ``size``."""
    return max(0, start + size) if start < 0 else start, stop or size


def read_local(
    path: str, start: int, stop: int, version: Version | None
) -> tuple[bytes, Version]:
    """Return a byte range of a local file, and its version; see ``Storage.part``."""
    try:
        with open(path, "rb", buffering=0, opener=opener) as file:
            current = version_of_file(file.fileno())
            start, stop = bounds(start, stop, current.size)
            file.seek(start)
            data = file.read(stop - start)
    except OSError as error:
        raise file_failure(path, error) from error
    ExpectedVersion(version).check(path, current)
    return checked(data, stop - start, path), current


def checked(data: bytes, expected: int, location: str) -> bytes:
    """Return ``data``; raise if its length is not ``expected``."""
    if len(data) != expected:
        raise truncated(
            location, expected, len(data), ": it was rewritten; start again"
        )
    return data
