"""A shard made of bytes: read, decompressed if needed, and cut into samples."""

import asyncio
import copy
import functools
import gc
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Self, TypeAlias

from typing_extensions import Buffer

from aioloader._order.raising import raisable
from aioloader.datasets._cuts import Cuts, Part, checksum_of, cut_shards
from aioloader.datasets._stores.bytes import Bytes
from aioloader.datasets._stores.cache_dir import CacheDir
from aioloader.datasets._stores.file_bytes import FileBytes
from aioloader.datasets._stores.outlast import in_thread
from aioloader.datasets._stores.places import Places
from aioloader.datasets._stores.unpack import Unpacked, unpacker_of
from aioloader.datasets._stores.versions import Known, Version
from aioloader.datasets._streams.shards import (
    CountsBytes,
    CutsShards,
    KnowsVersion,
    MarksEnd,
    Parser,
    Position,
    Quick,
    ShardReader,
    Summary,
    WeighsShards,
    summary_of,
)
from aioloader.errors import ShardChangedError

# A parser of one shard: its label, and the offset of the first byte it will get.
MakeParser = Callable[[str, int], Parser]
# Where a block starts, and its samples.
_Cut: TypeAlias = tuple[int, list[Any]]
# Most samples cut at once: short lines would be many. Fewer of those that are
# containers, because the garbage collector scans all that are held: with more of
# them it costs more than parsing.
_AT_ONCE, _TRACKED_AT_ONCE = 2048, 256
# Bytes cut at once without a thread: about half a millisecond's work.
_HERE = 1 << 17


class ParsedShard(KnowsVersion, CountsBytes):
    """Samples of one shard, in order.

    They are cut in threads, a block at a time; by a ``Quick`` parser without a thread,
    as long as a file's bytes are in the page cache. A position is the start of a block
    and the number of samples passed on since. A failed sample counts too: it is
    reported once. A compressed shard can only start at its beginning; samples read
    before are read again, and dropped.

    Args:
        source: The shard's unpacked bytes; owned.
        parser: Cuts the bytes.
        skip: Samples to drop first.
        is_packed: Whether positions count from the shard's start.
        location: Redacted address, for errors.
    """

    def __init__(
        self,
        source: Bytes,
        parser: Parser,
        *,
        skip: int,
        is_packed: bool,
        location: str,
    ) -> None:
        self._source = source
        self._location = location
        self._parser = parser
        self._skip = skip
        self._is_packed = is_packed
        self._byte = parser.offset
        # Samples before the block; the block; how much of it was passed on.
        self._before = 0
        self._block: list[Any] = []
        self._passed = 0
        self._limit = _TRACKED_AT_ONCE
        self._cutting: asyncio.Task[_Cut] | None = None
        # Whether the last piece has more, and whether it is the last of the shard.
        self._has_rest = self._has_ended = False
        self._failure: BaseException | None = None
        self._is_cached = isinstance(parser, Quick) and isinstance(source, FileBytes)
        self.is_draining = source.is_draining
        self.begin = source.begin

    async def pull(self, limit: int) -> list[Any]:
        """Return the next samples, from 1 to ``limit``; an empty list at the end."""
        while self._passed < len(self._block) or await self._turn():
            dropped = min(self._skip, len(self._block) - self._passed)
            self._skip -= dropped
            start = self._passed + dropped
            self._passed = min(start + limit, len(self._block))
            if start < self._passed:
                return self._block[start : self._passed]
        if self._skip:
            raise ShardChangedError(
                f"{self._location!r} ends {self._skip:,} samples before the position "
                "in the state; it has changed since",
                location=self._location,
            )
        return []

    def version(self) -> tuple[str, Version] | None:
        """Return the address and version of the stored shard."""
        version = self._source.version
        return None if version is None else (self._location, version)

    def position(self) -> Position:
        """Return the position of the next sample."""
        passed = self._before + self._passed + self._skip
        return {"byte": self._byte, "sample": passed}

    def bytes_ahead(self) -> int | None:
        """Return the number of bytes requested and not yet cut."""
        return self._source.bytes_ahead()

    async def aclose(self) -> None:
        """Stop pending work and wait for it to end."""
        if self._cutting is not None:
            self._cutting.cancel()
            await asyncio.wait([self._cutting])
            if not self._cutting.cancelled():
                self._cutting.exception()  # retrieved: nobody else will
            self._cutting = None
        await self._source.aclose()

    async def _turn(self) -> bool:
        """Move to the next block; return whether there is one."""
        while (
            self._cutting is not None
            or self._failure is not None
            or self._has_rest
            or not self._has_ended
        ):
            byte, block = await self._cut_here() or await self._cut_in_thread()
            if block:
                is_tracked = gc.is_tracked(block[-1])
                self._limit = _TRACKED_AT_ONCE if is_tracked else _AT_ONCE
                if self._is_packed:
                    self._before += len(self._block)
                else:
                    self._byte = byte
                self._block, self._passed = block, 0
                return True
        return False

    async def _cut_here(self) -> _Cut | None:
        """Cut a block from what the page cache has of a file, without a thread.

        None if a thread must do it: from the first time on that bytes are missing, or
        that samples are large. Other tasks of the loop get a turn before each block.
        """
        source = self._source
        if not (self._is_cached and isinstance(source, FileBytes)):
            return None
        await source.open()
        await asyncio.sleep(0)
        cut = self._cut_pieces(_HERE, source.read_cached)
        self._is_cached = bool(cut[1])
        return cut if self._is_cached or self._has_ended else None

    async def _cut_in_thread(self) -> _Cut:
        """Cut a block in a thread; if this call is cancelled, the next one has it."""
        if self._cutting is None:
            self._cutting = asyncio.create_task(self._cut())
        await asyncio.wait([self._cutting])  # cancellation does not reach it
        cutting, self._cutting = self._cutting, None
        return cutting.result()

    async def _cut(self) -> _Cut:
        if isinstance(self._source, FileBytes):
            feed = functools.partial(self._cut_pieces, self._source.at_once)
            return await self._source.use(feed)
        piece = None if self._has_rest else await self._source.read()
        return await in_thread(self._cut_piece, piece)

    def _cut_piece(self, piece: Buffer | None) -> _Cut:
        """Cut one block from a piece, or from the rest of the last one."""
        begin = self._parser.offset
        try:
            if piece is not None:
                self._feed(piece)
            return begin, self._take(self._limit)
        except BaseException as error:  # noqa: BLE001  (raised)
            raise raisable(error, "the parser")  # noqa: B904  (it keeps its cause)

    def _cut_pieces(self, length: int, read: Callable[[], Buffer | None]) -> _Cut:
        """Cut one block from the rest of the last piece, and from several more."""
        if self._failure is not None:
            raise self._failure
        begin, block = self._parser.offset, list[Any]()
        try:
            while len(block) < self._limit:
                if not self._has_rest:
                    if length <= 0 or self._has_ended:
                        break
                    piece = read()
                    if piece is None:
                        break
                    length -= len(memoryview(piece))
                    self._feed(piece)
                block += self._take(self._limit - len(block))
        except BaseException as error:  # noqa: BLE001  (raised)
            self._failure = raisable(error, "the parser")
            if not block:  # or else after the samples before it
                raise self._failure  # noqa: B904  (it keeps its cause)
        return begin, block

    def _feed(self, piece: Buffer) -> None:
        if memoryview(piece):
            self._parser.feed(piece)
        else:
            self._parser.end()
            self._has_ended = True

    def _take(self, limit: int) -> list[Any]:
        taken = self._parser.take(limit)
        self._has_rest = len(taken) == limit
        self._has_ended = self._has_ended or self._parser.is_over
        return taken


class ParsedFormat(CutsShards, WeighsShards):
    """Shards of bytes, cut by a parser.

    Args:
        addresses: Patterns of the shards' addresses.
        places: Opens addresses.
        make: Makes a parser.
        cuts: Finds where a shard can be cut; None: nowhere.
    """

    def __init__(
        self,
        addresses: Any,
        places: Places,
        make: MakeParser,
        cuts: Cuts | None = None,
    ) -> None:
        self._addresses = addresses
        self.places = places
        self._make = make
        self._cuts = cuts

    def cached(self, cache: CacheDir) -> Self:
        """Return the same format, with shards read through a cache."""
        clone = copy.copy(self)
        clone.places = self.places.cached(cache)
        return clone

    async def shards(
        self, stack: AsyncExitStack, _known: Summary | None = None
    ) -> list[Any]:
        """Return the addresses, in order."""
        stack.push_async_callback(self.places.aclose)
        return await self.places.expand(self._addresses)

    async def cut(self, shards: Sequence[Any], count: int) -> Sequence[Any]:
        """Return ``count`` parts of the shards, if they can be cut.

        Raises:
            ValueError: If only some of them can be.
        """
        if self._cuts is None:
            return shards
        return await cut_shards(self.places, shards, count, self._cuts)

    async def sizes(self, shards: Sequence[Any], *, must: bool) -> Sequence[int] | None:
        """Return the lengths of the shards, in bytes, if all are known."""
        if isinstance(shards[0], Part):
            return [part.stop - part.start for part in shards]
        return await self.places.sizes(shards, must=must)

    def summary(self, shards: Sequence[Any]) -> Summary:
        """Return the number of shards, their names, and their cuts."""
        if not isinstance(shards[0], Part):
            return summary_of(shards)
        names = summary_of(part.address for part in shards)
        return {**names, "cuts": checksum_of(shards)}

    def describe(self) -> dict[str, Any]:
        """Return nothing: the stream's kind determines what its parser makes."""
        return {}

    def open(self, shard: Any, position: Position, budget: int) -> ShardReader:
        """Return a reader of one shard."""
        address, first, stop, version = shard, 0, None, None
        if isinstance(shard, Part):
            address, first, stop, version = shard
        unpacker = unpacker_of(self.places.name(address))
        label = self.places.label(address)
        start = position.get("byte", first)
        if unpacker is not None:
            start, stop = 0, None
        known = Known.of(position, version)
        source = self.places.open(address, start, budget, known, stop)
        if unpacker is not None:
            source = Unpacked(source, unpacker, label)
        parser = self._make(label, start)
        if isinstance(parser, MarksEnd) and stop is not None and version is not None:
            parser.is_part = stop < version.size
        return ParsedShard(
            source,
            parser,
            skip=position.get("sample", 0),
            is_packed=unpacker is not None,
            location=label,
        )
