"""The bytes of one shard, read ahead in large pieces, in order.

An object comes by ranged requests, several in flight; the first ones are smaller, so
that samples come soon. At most the budget is held. Every piece is checked against the
size and version that came with the first.
"""

import asyncio
import sys
from collections import deque

from typing_extensions import Buffer

from aioloader._base.outlast import cancel
from aioloader.datasets._stores.failures import NoRangesError
from aioloader.datasets._stores.stored import StoredObject
from aioloader.datasets._stores.stores import WholeObject
from aioloader.datasets._stores.versions import NOTHING, Known, Piece, Version

_LARGEST = 8 << 20
SMALLEST = 1 << 16
# Pieces in flight per object, besides the one that is being cut; fewer, rather than
# pieces smaller than the second.
_AHEAD, _WORTHWHILE = 15, 1 << 20
# A shard that nothing was pulled from yet may request ``budget // START_DIVISOR``.
START_DIVISOR = 8


class ObjectBytes:
    """An object's bytes, by ranged requests, or in one if the server has no ranges."""

    def __init__(
        self,
        object: StoredObject,  # noqa: A002
        start: int,
        budget: int,
        known: Known = NOTHING,
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
        self._window = self._most
        self.begin()
        if not self._pieces:
            return b""
        await asyncio.wait([self._pieces[0]])  # cancellation does not reach it
        try:
            piece = self._pieces.popleft().result()
        except NoRangesError:
            await self.aclose()
            self._start = self._read
            self._whole = self._object.stream()
            return await self._next_chunk(self._whole)
        self._read += len(memoryview(piece.data))
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
        """Return the next part of the whole object, after the start."""
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
        known = self.version or self._known.version
        piece = await self._object.fetch(start, stop, known)
        if self.version is None:
            self._learn(piece.version)
            self._fill()  # the size is known, so the others need not wait
        return piece

    def _learn(self, version: Version) -> None:
        """Check the object's version; further pieces are compared with it."""
        if self.version is None:
            self._known.check(self._object.location, version, self._start)
            self.version = version
