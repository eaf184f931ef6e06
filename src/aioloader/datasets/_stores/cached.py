"""Ranged reads through a local cache, kept by version.

A stream's blocks are aligned: each is read from the store once per machine, for all
processes and any start. A table's ranges are kept as they are. The name of a range
contains the object's version, so a changed object is read again; that costs one small
request per object and reader. For tables, the version is trusted for ten minutes.
"""

import asyncio
import json
import time
from collections.abc import Awaitable
from typing import Any

from typing_extensions import Buffer

from aioloader._observe.warnings import warn
from aioloader.datasets._stores.bytes import Fetch, NoRangesError, Piece
from aioloader.datasets._stores.cache_dir import CacheDir
from aioloader.datasets._stores.versions import Version
from aioloader.errors import DatasetError

_BLOCK = 4 << 20
# Seconds for which the version of a table's file is trusted.
_FRESH = 600.0
_WARNED: set[tuple[str, str]] = set()


class KeptRanges:
    """One object's ranges in a cache, by version.

    Args:
        cache: The directory; None: nothing is kept.
        name: Name of the object in the cache; kept as a hash only.
        store: Address of the store, for a warning.
    """

    def __init__(self, cache: CacheDir | None, name: str, store: str) -> None:
        self._cache = cache
        self._name = name
        self._store = store

    async def version(self, fetch: Fetch, expected: Version | None) -> Version:
        """Return the object's version: a recent one that is kept, or the current."""
        cache = self._cache
        if cache is not None:
            found = await asyncio.to_thread(cache.get, self._key("version"))
            seen, *fields = json.loads(found or "[0]")
            if abs(time.time() - seen) < _FRESH:
                version = Version(*fields)
                if expected is None or version.is_of(expected):
                    return version
        version = (await self.looked(fetch(0, 1, expected))).version
        if cache is not None and version.e_tag is not None:
            facts = json.dumps([time.time(), *version]).encode()
            await asyncio.to_thread(cache.put, self._key("version"), facts)
        return version

    async def looked(self, request: Awaitable[Piece]) -> Piece:
        """Return the first bytes; warn once if nothing can be kept."""
        try:
            piece = await request
        except NoRangesError:
            self._warn("has no ranges")
            raise
        if piece.version.e_tag is None:
            self._warn("sends no ETag, so changes would not be noticed")
        return piece

    async def read(
        self, fetch: Fetch, start: int, stop: int, version: Version | None
    ) -> Buffer:
        """Return a range at a version, which is kept if it is known."""
        if self._cache is None or version is None or version.e_tag is None:
            return (await fetch(start, stop, version)).data
        size, e_tag, modified = version
        told = e_tag if version.strong else f"{e_tag} {modified}"
        what = f"{told}\n{size}\n{start}-{stop}"
        data: Buffer | None
        data = await asyncio.to_thread(self._cache.get, self._key(what))
        if data is None:
            try:
                data = (await fetch(start, stop, version)).data
            except DatasetError:  # it may be of another version now
                put = self._cache.put
                await asyncio.to_thread(put, self._key("version"), b"[0]")
                raise
            if len(memoryview(data)) == min(stop, size) - start:
                await asyncio.to_thread(self._cache.put, self._key(what), data)
        return data

    def _key(self, what: str) -> str:
        """Return a key of the cache; no variable, for the name may be a signed URL."""
        return f"{self._name}\n{what}"

    def _warn(self, reason: str) -> None:
        """Warn once for a store and a cache, in this process."""
        cache, store = self._cache, self._store
        if cache is None or (cache.directory, store) in _WARNED:
            return
        _WARNED.add((cache.directory, store))
        warn(
            f"cache= keeps nothing of {store!r}: the server {reason}; read without "
            "cache=, or from a store with ETags and ranges (warned once)",
            RuntimeWarning,
        )


class CachedRanges:
    """One object's ranges, through a cache, in aligned blocks.

    Args:
        fetch: Reads a range from the store.
        kept: Its ranges in the cache.
    """

    def __init__(self, fetch: Fetch, kept: KeptRanges) -> None:
        self._fetch = fetch
        self._kept = kept
        # Pieces share blocks: each is read once, and released after the last piece.
        self._blocks: dict[int, asyncio.Task[Buffer]] = {}
        self._facts: asyncio.Task[Piece] | None = None

    async def fetch(self, start: int, stop: int, version: Version | None) -> Piece:
        """Return a range, as ``Fetch`` does."""
        if self._facts is None:
            request = self._kept.looked(self._fetch(0, 1, version))
            self._facts = asyncio.create_task(request)
        facts: Piece = await _waited(self._facts)
        if facts.version.e_tag is None:
            return await self._fetch(start, stop, version)
        stop = min(stop, facts.version.size)
        parts: list[Buffer] = []
        for number in range(start // _BLOCK, -(-stop // _BLOCK)):
            block = await self._block(number, facts)
            first = number * _BLOCK
            parts.append(memoryview(block)[max(0, start - first) : stop - first])
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        return Piece(data, facts.version)

    async def _block(self, number: int, facts: Piece) -> Buffer:
        blocks = self._blocks.items()
        for passed in [at for at, one in blocks if at < number - 4 and one.done()]:
            del self._blocks[passed]
        task = self._blocks.get(number)
        if task is None or (task.done() and task.exception() is not None):
            task = asyncio.create_task(self._read(number, facts))
            self._blocks[number] = task
        block: Buffer = await _waited(task)
        return block

    async def _read(self, number: int, facts: Piece) -> Buffer:
        start = number * _BLOCK
        stop = min(start + _BLOCK, facts.version.size)
        return await self._kept.read(self._fetch, start, stop, facts.version)

    async def aclose(self) -> None:
        """Stop pending work."""
        tasks = [*self._blocks.values(), *([self._facts] if self._facts else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _waited(task: "asyncio.Task[Any]") -> Any:
    """Return the result of a task that others may wait for too."""
    await asyncio.wait([task])  # cancellation does not reach it
    return task.result()
