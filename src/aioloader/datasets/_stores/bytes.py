"""The bytes of one object or file: ranges of it, and all of it in order, read ahead.

Every answer is checked against the version that came first, and its length. In a cache
a stream's blocks are aligned: each is read from the store once per machine, for all
processes and any start; a table's ranges are kept as they are. The name of a range
contains the object's version, so a changed object is read again; that costs one small
request per object and reader. For tables, the version is trusted for ten minutes.

Requests for a shard are in flight together, the first ones smaller, so that samples
come soon. At most the budget is held.
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
    NOTHING,
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

_BLOCK = 4 << 20
# Seconds for which the version of a table's file is trusted.
_FRESH = 600.0
# Objects that are known to have ranges, at most.
_RANGED = 1 << 16
_WARNED: set[tuple[str, str]] = set()
_LARGEST = 8 << 20
SMALLEST = 1 << 16
# Pieces in flight per object, besides the one that is being cut; fewer, rather than
# pieces smaller than the second.
_AHEAD, _WORTHWHILE = 15, 1 << 20
# A store whose quickest request takes longer is far: the whole budget is requested. Of
# others a few pieces are; twice as many if waits are half of the time that so many
# pieces take, as long as that shortens the waits by a quarter.
_FAR, _TRIED, _SHARE, _SHORTER = 0.02, 32, 0.5, 0.75
# A shard that nothing was pulled from yet may request ``budget // START_DIVISOR``.
START_DIVISOR = 8
T = TypeVar("T")

# A piece of a file fits into one core's cache, where it is parsed; several are worth
# the switch to a thread.
_FILE_PIECE, _FILE_PIECES = 1 << 19, 1 << 22


class Client:
    """What the requests of one dataset on one event loop share.

    Attributes:
        listings: The last listing of each root and folder.
        users: Iterations, or contexts of the dataset, that are open on this loop.
        ranged: Hashes of objects of which the server gave a range.
        soonest: Seconds of the quickest request.
        ahead: How many pieces a reader of a near store requests ahead.
    """

    def __init__(self, policy: Requests) -> None:
        self.listings: dict[tuple[Address | None, str], Listing] = {}
        self.tries: Tries = Tries(policy)
        self.users = 0
        self.ranged: set[int] = set()
        self.soonest: float = math.inf
        self.ahead: int = 2
        # Seconds waited for the latest pieces, and with half as many ahead; since when.
        self._waits, self._before = list[float](), math.inf
        self._since = time.perf_counter()

    def note(self, waited: float) -> None:
        """Adapt ``ahead`` to the seconds waited for a piece."""
        self._waits.append(waited)
        if len(self._waits) < _TRIED:
            return
        total, took = sum(self._waits), time.perf_counter() - self._since
        self._waits, self._since = [], self._since + took
        if _SHARE * took < total < _SHORTER * self._before:
            self._before, self.ahead = total, 2 * self.ahead
        elif total > 2 * self._before:  # another network
            self._before = math.inf

    def listed(self, root: "Address | None", key: str) -> Version | None:
        """Return what the last listing shows of an object: its size, if any."""
        for (its_root, folder), listing in self.listings.items():
            is_in = its_root == root and key.startswith(folder)
            if is_in and (size := listing.size_of(key)):
                return Version(size)
        return None


class StoredObject:
    """One object of a store, fetched by aligned blocks if there is a cache."""

    def __init__(
        self,
        client: Client,
        store: Store,
        key: str,
        cache: CacheDir | None = None,
        name: str = "",
    ) -> None:
        self.block = _BLOCK if cache is not None else 0
        self.client: Client = client
        self._store, self._key = store, key
        self._cache, self._name = cache, name

    @property
    def location(self) -> str:
        return self._store.locate(self._key)

    def whole(self, size: int) -> "Awaitable[Bytes | bytes | memoryview]":
        """Return all of it: a read-only buffer, owned by the caller."""
        store, key = self._store, self._key
        attempt = lambda: store.ask(key, store.whole(key, size))  # noqa: E731
        return self.client.tries.make(attempt, store, key)

    def stream(self) -> WholeObject:
        """Return its bytes from the first one on, for a server without ranges."""
        assert isinstance(self._store, ObstoreStore)  # no other lacks them
        return WholeObject(self._store, self._key, self.client.tries)

    async def fetch(self, start: int, stop: int, version: Version | None) -> Piece:
        """Return a range, at a version if one is given; less at the object's end."""
        if self._cache is None:
            return await self._request(start, stop, version)
        now = version
        if now is None or now.e_tag is None:
            now = await self._look(version)
            if now.e_tag is None:
                return await self._request(start, stop, version)
        stop, parts = min(stop, now.size), list[Buffer]()
        for first in range(start - start % _BLOCK, stop, _BLOCK):
            block = await self.read(first, min(first + _BLOCK, now.size), now)
            parts.append(memoryview(block)[max(start - first, 0) : stop - first])
        return Piece(parts[0] if len(parts) == 1 else b"".join(parts), now)

    async def read(self, start: int, stop: int, version: Version) -> Buffer:
        """Return a range at a version, as it is or was kept before."""
        if self._cache is None or version.e_tag is None:
            return (await self._request(start, stop, version)).data
        size, e_tag, modified = version
        told = e_tag if version.strong else f"{e_tag} {modified}"
        what = f"{told}\n{size}\n{start}-{stop}"
        data: Buffer | None = await self._get_kept(what)
        if data is None:
            try:
                data = (await self._request(start, stop, version)).data
            except DatasetError:  # it may be of another version now
                await self._keep("version", b"[0]")
                raise
            if len(memoryview(data)) == min(stop, size) - start:
                await self._keep(what, data)
        return data

    async def version(self, expected: Version | None) -> Version:
        """Return the object's version: a recent one that is kept, or the current."""
        found = json.loads(await self._get_kept("version") or "[0]")
        if abs(time.time() - found[0]) < _FRESH:
            version = Version(*found[1:])
            if expected is None or version.is_of(expected):
                return version
        version = await self._look(expected)
        if version.e_tag is not None:
            await self._keep("version", json.dumps([time.time(), *version]).encode())
        return version

    async def _look(self, expected: Version | None) -> Version:
        """Return the current version; warn once if nothing can be kept."""
        try:
            version = (await self._request(0, 1, expected)).version
        except NoRangesError:
            self._warn("has no ranges")
            raise
        if version.e_tag is None:
            self._warn("sends no ETag, so changes would not be noticed")
        return version

    async def _get_kept(self, what: str) -> bytes | None:
        if self._cache is None:
            return None
        return await in_thread(self._cache.get, f"{self._name}\n{what}")

    async def _keep(self, what: str, data: Buffer) -> None:
        if self._cache is not None:
            await in_thread(self._cache.put, f"{self._name}\n{what}", data)

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
        if len(ranged) == _RANGED:
            ranged.clear()
        ranged.add(name)
        found = piece.version
        if not (version is None or found is version or found.is_of(version)):
            raise RefusedError(changed(self.location, version, piece.version))
        expected = max(0, min(stop, piece.version.size) - start)
        if (received := len(memoryview(piece.data))) != expected:
            what = f" from byte {start:,} on"
            raise truncated(self.location, expected, received, what)
        return piece


def warn_once(cache: CacheDir, label: str, reason: str) -> None:
    """Warn that a cache keeps nothing of a store; once for both, in this process."""
    if (cache.directory, label) not in _WARNED:
        _WARNED.add((cache.directory, label))
        warn(
            f"cache= keeps nothing of {label!r}: {reason}; read without "
            "cache=, or from a store with ETags and ranges (warned once)",
            RuntimeWarning,
        )


class ObjectBytes:
    """An object's bytes, by ranged requests, or in one if the server has no ranges."""

    def __init__(
        self,
        object: StoredObject,  # noqa: A002
        start: int,
        budget: int,
        known: ExpectedVersion = NOTHING,
        stop: int | None = None,
    ) -> None:
        self.version: Version | None = None  # until it is known
        self._object, self._known = object, known
        self._whole: WholeObject | None = None
        self._stop = sys.maxsize if stop is None else stop
        self._start = self._read = self._at = start
        self._is_over = start >= self._stop
        largest = max(budget // _AHEAD, min(budget // 4, _WORTHWHILE))
        # A power of two, because pieces end at multiples of it.
        largest = 1 << max(SMALLEST, min(_LARGEST, largest)).bit_length() - 1
        self._largest, self._length = largest, SMALLEST
        if object.block:
            self._largest = self._length = largest = object.block
        self._most = max(2 * largest, min(budget, _AHEAD * largest))
        self._window = max(SMALLEST, budget // START_DIVISOR)  # until the first read
        self._pieces: deque[asyncio.Task[Piece]] = deque()

    @property
    def _end(self) -> int:
        return (
            self._stop if self.version is None else min(self.version.size, self._stop)
        )

    def begin(self) -> None:
        """Send the first request, a small one, which returns the size."""
        if self.version is None and not (self._pieces or self._is_over):
            self._request()

    async def read(self) -> Buffer:
        """Return the next piece, valid until the next call; empty at the end."""
        if self._whole is not None:
            return await self._next_chunk(self._whole)
        self.begin()
        if not self._pieces:
            return b""
        began = time.perf_counter()
        await asyncio.wait([self._pieces[0]])  # cancellation does not reach it
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
        self._window = self._most
        if length == SMALLEST or client.soonest < _FAR:  # the first waits to connect
            self._window = min(self._most, client.ahead * self._largest)
        self._fill()
        return piece.data

    def is_draining(self) -> bool:
        """Return whether all was requested, and half of the budget is free."""
        is_all = self._is_over or (self.version is not None and self._at >= self._end)
        return is_all and self._at - self._read <= self._most // 2

    def bytes_ahead(self) -> int | None:
        """Return how much is held or in flight; None if the size is not known."""
        is_known = self.version is not None or self._is_over
        return self._at - self._read if is_known else None

    async def aclose(self) -> None:
        """Cancel the requests in flight; no other is sent."""
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
        """Send requests until the window is full, none beyond the end."""
        if not self._is_over:
            self._at = min(self._at, self._end)
            while self._at < self._end and self._next() - self._read <= self._window:
                self._request()

    def _next(self) -> int:
        """Return where the next piece ends: at a multiple, like blocks of a cache."""
        return min(self._at - self._at % self._length + self._length, self._end)

    def _request(self) -> None:
        start, self._at = self._at, self._next()
        # Sizes grow, so that requests sent together do not all arrive together.
        self._length = min(self._largest, max(2 * self._length, self._largest // 8))
        self._pieces.append(asyncio.create_task(self._get(start, self._at)))

    async def _get(self, start: int, stop: int) -> Piece:
        known, began = self.version or self._known.version, time.perf_counter()
        piece = await self._object.fetch(start, stop, known)
        client = self._object.client
        client.soonest = min(client.soonest, time.perf_counter() - began)
        if self.version is None:
            self._learn(piece.version)
            self._fill()  # the size is known, so the others need not wait
        return piece

    def _learn(self, version: Version) -> None:
        """Check the object's version; further pieces are compared with it."""
        if self.version is None:
            self._known.check(self._object.location, version, self._start)
            self.version = version


class FileBytes:
    """A file's bytes, opened by ``aiofiles`` and read into one buffer."""

    def __init__(
        self,
        path: str,
        start: int,
        budget: int,
        known: ExpectedVersion = NOTHING,
        stop: int | None = None,
    ) -> None:
        self.version: Version | None = None  # until it is open
        self._path, self._known = path, known
        self._at, self._stop = start, sys.maxsize if stop is None else stop
        # Bytes best read in one thread call; parsed data needs room besides the buffer.
        self.at_once: int = max(SMALLEST, min(_FILE_PIECES, budget // 2))
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
        """Return what ``function`` makes of the next pieces, in the same thread.

        Its argument reads one piece, which is valid until the next one is read. One
        thread call is cheaper than one per piece, and pieces stay in that core's cache.
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
        return self.version is not None and self._at >= self._stop

    async def aclose(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            await finish_despite_cancel(asyncio.ensure_future(file.close()))

    async def _open(self) -> None:
        # Unbuffered: large reads need no second copy.
        self._file = await aiofiles.open(self._path, "rb", buffering=0, opener=opener)
        version = version_of_file(self._file.fileno())
        if self._at or self._known is not NOTHING:
            self._known.check(self._path, version, self._at)
        self.version, self._stop = version, min(version.size, self._stop)
        if self._at:
            await self._file.seek(self._at)

    def read_here(self, cached: int = 0) -> Any:
        """Return the next piece of the open file, which must be unchanged.

        Without a thread it has at most so many ``cached`` bytes; None if that might
        wait, for a disk or network.
        """
        assert self.version is not None
        size, most = self.version.size, min(cached or self._length, self._length)
        if not self._buffer:
            # Not mapped: once the C library has freed a block of this size, it keeps as
            # much for samples, which otherwise cost up to a page fault per 4 KB.
            self._buffer = np.empty(min(_FILE_PIECES, size), np.uint8).data
        wanted = min(most, max(0, self._stop - self._at))
        # The file of aiofiles would use another thread.
        file: int = self._file.fileno()
        try:
            read = _read_cached if cached else _read_into
            length = read(file, self._buffer[:wanted]) if wanted else 0
            if length is None:
                return None
            now = version_of_file(file)
        except OSError as error:
            raise file_failure(self._path, error) from error
        self._at += length
        if now != self.version:
            raise changed(self._path, self.version, now)
        if wanted and not length:
            raise truncated(self._path, size, self._at, "")
        return self._buffer[:length]


def _read_into(file: int, buffer: memoryview) -> int:
    return FileIO(file, closefd=False).readinto(buffer) or 0


def _read_cached(file: int, buffer: memoryview) -> int | None:
    """Read what is in the page cache; None if nothing is, or that cannot be known.

    Linux 5.9 and 5.10 may return 0 before the end: then it is not known, either.
    """
    try:
        # -1: where the file is at
        return os.preadv(file, [buffer], -1, os.RWF_NOWAIT) or None
    except (AttributeError, OSError):  # no Linux; a file system that may always wait
        return None


def bounds(start: int, stop: int, size: int) -> tuple[int, int]:
    return max(0, start + size) if start < 0 else start, stop or size


def read_local(
    path: str, start: int, stop: int, version: Version | None
) -> tuple[bytes, Version]:
    """Return some bytes of a local file, and its version, as ``Places.part``."""
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
    if len(data) != expected:
        raise truncated(
            location, expected, len(data), ": it was rewritten; start again"
        )
    return data
