"""A shard made of bytes: read, unpacked if it is packed, and cut into samples."""

import asyncio
import copy
from collections.abc import Callable
from typing import Any

from aioloader.datasets._stores.bytes import Bytes
from aioloader.datasets._stores.cache_dir import CacheDir
from aioloader.datasets._stores.places import Places
from aioloader.datasets._stores.unpack import Unpacked, unpacker_of
from aioloader.datasets._streams.shards import Parser, Position, ShardReader

# A parser of one shard: its label, and the offset of the first byte it will get.
MakeParser = Callable[[str, int], Parser]


class ParsedShard:
    """Samples of one shard, in order.

    A packed shard has no place to begin at but its start: what was read before is read
    again, and dropped.

    Args:
        source: The shard's unpacked bytes; owned.
        parser: Cuts them.
        skip: Samples to drop first.
        is_packed: Whether the position is a count of samples, not a byte.
        in_thread: Whether to parse in a thread, for it takes long.
    """

    def __init__(
        self,
        source: Bytes,
        parser: Parser,
        *,
        skip: int,
        is_packed: bool,
        in_thread: bool,
    ) -> None:
        self._source = source
        self._parser = parser
        self._skip = skip
        self._taken = skip
        self._is_packed = is_packed
        self._in_thread = in_thread
        self._has_ended = False
        self.is_draining = source.is_draining
        self.begin = source.begin
        self.aclose = source.aclose

    async def pull(self, limit: int) -> list[Any]:
        """Return the next samples, from 1 to ``limit``; an empty list at the end."""
        while self._skip:
            dropped = await self._take(self._skip)
            self._skip -= len(dropped) or self._skip
        samples = await self._take(limit)
        self._taken += len(samples)
        return samples

    def position(self) -> Position:
        """Return where the next sample is."""
        if self._is_packed:
            return {"sample": self._taken}
        return {"byte": self._parser.offset}

    async def _take(self, limit: int) -> list[Any]:
        parser = self._parser
        while True:
            if self._in_thread:
                samples = await asyncio.to_thread(parser.take, limit)
            else:
                samples = parser.take(limit)
            if samples or self._has_ended or parser.is_over:
                return samples
            piece = await self._source.read()
            if memoryview(piece):
                parser.feed(piece)
            else:
                parser.end()
                self._has_ended = True


class ParsedFormat:
    """Shards that are bytes, cut by a parser.

    Args:
        addresses: Patterns of the shards' addresses.
        places: Where they lie.
        make: Makes a parser.
        in_thread: Whether to parse in a thread.
    """

    def __init__(
        self, addresses: Any, places: Places, make: MakeParser, *, in_thread: bool
    ) -> None:
        self._addresses = addresses
        self.places = places
        self._make = make
        self._in_thread = in_thread

    def cached(self, cache: CacheDir) -> "ParsedFormat":
        """Return the same format, with shards read through a cache."""
        clone = copy.copy(self)
        clone.places = self.places.cached(cache)
        return clone

    async def shards(self, stack: Any) -> list[str]:
        """Return the addresses, in order."""
        stack.push_async_callback(self.places.aclose)
        return await self.places.expand(self._addresses)

    def open(self, shard: str, position: Position, budget: int) -> ShardReader:
        """Return a reader of one shard."""
        unpacker = unpacker_of(shard)
        label = self.places.label(shard)
        start = 0 if unpacker else position.get("byte", 0)
        source = self.places.open(shard, start, budget)
        if unpacker is not None:
            source = Unpacked(source, unpacker, label)
        return ParsedShard(
            source,
            self._make(label, start),
            skip=position.get("sample", 0),
            is_packed=unpacker is not None,
            in_thread=self._in_thread or unpacker is not None,
        )
