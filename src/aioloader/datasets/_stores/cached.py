"""One object of a store, through a local cache if there is one.

A stream's blocks are aligned: each is read from the store once per machine, for all
processes and any start. A table's ranges are kept as they are. The name of a range
contains the object's version, so a changed object is read again; that costs one small
request per object and reader. For tables, the version is trusted for ten minutes.
"""

import asyncio
import json
import time
from functools import partial

from typing_extensions import Buffer

from aioloader._observe.warnings import warn
from aioloader.datasets._stores.bytes import NoRangesError, Piece
from aioloader.datasets._stores.cache_dir import CacheDir
from aioloader.datasets._stores.client import Client, WholeObject
from aioloader.datasets._stores.hub import HubSource
from aioloader.datasets._stores.stores import StoreSource
from aioloader.datasets._stores.versions import Version
from aioloader.errors import DatasetError

_BLOCK = 4 << 20
# Seconds for which the version of a table's file is trusted.
_FRESH = 600.0
_WARNED: set[tuple[str, str]] = set()


class StoredObject:
    """The ranges of one object.

    Args:
        client: Requests them.
        source: The store.
        key: The object.
        cache: Where they are kept, or None.
        name: Name of the object in the cache; kept as a hash only.

    Attributes:
        location: Its redacted address.
        block: Length of the aligned blocks to fetch it by, or 0.
    """

    def __init__(
        self,
        client: Client,
        source: StoreSource | HubSource,
        key: str,
        cache: CacheDir | None,
        name: str,
    ) -> None:
        self.location = source.locate(key)
        self.block = _BLOCK if cache is not None else 0
        self.whole = partial(WholeObject, client, source, key)
        self._request = partial(client.fetch, source, key)
        self._store = source.label
        self._cache = cache
        self._name = name

    async def fetch(self, start: int, stop: int, version: Version | None) -> Piece:
        """Return a range within one block, at a version; less at the object's end.

        Raises:
            NoRangesError: If the server has no ranges.
            DatasetError: If the object has changed, or cannot be read.
        """
        if self._cache is None:
            return await self._request(start, stop, version)
        now = version
        if now is None or now.e_tag is None:
            now = await self._look(version)
            if now.e_tag is None:
                return await self._request(start, stop, version)
        if start >= now.size:
            return Piece(b"", now)
        first = start - start % _BLOCK
        block = await self.read(first, min(first + _BLOCK, now.size), now)
        return Piece(memoryview(block)[start - first : stop - first], now)

    async def version(self, expected: Version | None) -> Version:
        """Return the object's version: a recent one that is kept, or the current."""
        found = json.loads(await self._get("version") or "[0]")
        if abs(time.time() - found[0]) < _FRESH:
            version = Version(*found[1:])
            if expected is None or version.is_of(expected):
                return version
        version = await self._look(expected)
        if version.e_tag is not None:
            await self._put("version", json.dumps([time.time(), *version]).encode())
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

    async def read(self, start: int, stop: int, version: Version) -> Buffer:
        """Return a range at a version, as it is or was kept before."""
        if self._cache is None or version.e_tag is None:
            return (await self._request(start, stop, version)).data
        size, e_tag, modified = version
        told = e_tag if version.strong else f"{e_tag} {modified}"
        what = f"{told}\n{size}\n{start}-{stop}"
        data: Buffer | None = await self._get(what)
        if data is None:
            try:
                data = (await self._request(start, stop, version)).data
            except DatasetError:  # it may be of another version now
                await self._put("version", b"[0]")
                raise
            if len(memoryview(data)) == min(stop, size) - start:
                await self._put(what, data)
        return data

    async def _get(self, what: str) -> bytes | None:
        if self._cache is None:
            return None
        return await asyncio.to_thread(self._cache.get, f"{self._name}\n{what}")

    async def _put(self, what: str, data: Buffer) -> None:
        if self._cache is not None:
            await asyncio.to_thread(self._cache.put, f"{self._name}\n{what}", data)

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
