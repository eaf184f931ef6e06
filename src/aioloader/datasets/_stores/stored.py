"""One object of a store: ranges of it, the whole of it, its version; cached or not.

All requests are retried where that helps. Every answer is checked against the version
that came first: by a condition of the request if the server has strong entity tags, and
here in any case. A wrong length is detected by the cheapest requests that can.

In a cache a stream's blocks are aligned: each is read from the store once per machine,
for all processes and any start. A table's ranges are kept as they are. The name of a
range contains the object's version, so a changed object is read again; that costs one
small request per object and reader. For tables, the version is trusted for ten minutes.
"""

import json
import time
from functools import partial
from typing import TYPE_CHECKING

from typing_extensions import Buffer

from aioloader._base.outlast import in_thread
from aioloader._base.warnings import warn
from aioloader.datasets._stores.cache_dir import CacheDir
from aioloader.datasets._stores.failures import NoRangesError, truncated
from aioloader.datasets._stores.requests import RefusedError, Requests, Tries
from aioloader.datasets._stores.sources import Store
from aioloader.datasets._stores.stores import ObstoreStore, WholeObject
from aioloader.datasets._stores.versions import Piece, Version, changed
from aioloader.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from obstore import Bytes

    from aioloader.datasets._stores.addresses import Address
    from aioloader.datasets._stores.listing import Listing

_BLOCK = 4 << 20
# Seconds for which the version of a table's file is trusted.
_FRESH = 600.0
# Objects that are known to have ranges, at most.
_RANGED = 1 << 16
_WARNED: set[tuple[str, str]] = set()


class Client:
    """What the requests of one dataset on one event loop share.

    Attributes:
        listings: The last listing of each root and folder.
        tries: Makes requests by the policy.
        users: Iterations, or contexts of the dataset, that are open on this loop.
        ranged: Hashes of objects of which the server gave a range.
    """

    def __init__(self, policy: Requests) -> None:
        self.listings: dict[tuple[Address | None, str], Listing] = {}
        self.tries: Tries = Tries(policy)
        self.users = 0
        self.ranged: set[int] = set()

    def listed(self, root: "Address | None", key: str) -> Version | None:
        """Return what the last listing shows of an object: its size, if any."""
        for (its_root, folder), listing in self.listings.items():
            if its_root == root and key.startswith(folder):
                size = listing.size_of(key)
                if size:
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
        self._client, self._store, self._key = client, store, key
        self._cache, self._name = cache, name

    @property
    def location(self) -> str:
        return self._store.locate(self._key)

    def whole(self, size: int) -> "Awaitable[Bytes | bytes | memoryview]":
        """Return all of it: a read-only buffer, owned by the caller."""
        store, key = self._store, self._key
        attempt = lambda: store.ask(key, store.whole(key, size))  # noqa: E731
        return self._client.tries.make(attempt, store, key)

    def stream(self) -> WholeObject:
        """Return its bytes from the first one on, for a server without ranges."""
        assert isinstance(self._store, ObstoreStore)  # no other lacks them
        return WholeObject(self._store, self._key, self._client.tries)

    # -- ranges ---------------------------------------------------------------------

    async def fetch(self, start: int, stop: int, version: Version | None) -> Piece:
        """Return a range within one block, at a version; less at the object's end."""
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
        """Warn once for a store and a cache, in this process."""
        if self._cache is not None:
            warn_once(self._cache, self._store.label, f"the server {reason}")

    async def _request(self, start: int, stop: int, version: Version | None) -> Piece:
        """Return a range from the store; less at the object's end."""
        attempt = partial(self._get, start, stop, version)
        return await self._client.tries.make(attempt, self._store, self._key)

    async def _get(self, start: int, stop: int, version: Version | None) -> Piece:
        ranged, store, key = self._client.ranged, self._store, self._key
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
        if version is not None and not piece.version.is_of(version):
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
