"""Where shards lie: addresses to bytes, whatever the store.

Paths and ``file://`` are read by aiofiles, all else by obstore, with a store for each
bucket or host. Patterns are spelled out: braces always, ``*`` and ``?`` by a listing.
"""

import asyncio
import copy
import fnmatch
import functools
import glob
import os
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import unquote, urlsplit

from typing_extensions import Buffer

from aioloader.datasets._stores.bytes import (
    Bytes,
    Closing,
    Fetch,
    FileBytes,
    NoRangesError,
    ObjectBytes,
    Piece,
    file_failure,
)
from aioloader.datasets._stores.cache_dir import CacheDir
from aioloader.datasets._stores.cached import CachedRanges
from aioloader.datasets._stores.failures import (
    ShortReadError,
    failure_of,
    reason_of,
    truncated,
)
from aioloader.datasets._stores.flights import Flights
from aioloader.datasets._stores.hub import SCHEME, HubSource
from aioloader.datasets._stores.listing import list_async
from aioloader.datasets._stores.per_loop import PerLoop
from aioloader.datasets._stores.redact import redact_url
from aioloader.datasets._stores.requests import Requests, Tries, read_failure
from aioloader.datasets._stores.stores import (
    StoreSource,
    import_obstore,
    obstore_errors,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_CHUNK = 1 << 20


class Places:
    """Open what addresses name; pickled without what is open.

    Args:
        store: What addresses are relative to; None: they are paths and URLs.
        options: Options of obstore's stores.
        requests: How requests are retried.
        cache: Where what is read from stores is kept, or None.
    """

    def __init__(
        self,
        store: "str | os.PathLike[str] | ObjectStore | None",
        options: Mapping[str, Any],
        requests: Requests,
        cache: CacheDir | None = None,
    ) -> None:
        self.kept_in = cache
        self._options = dict(options)
        self._requests = requests
        self._base: StoreSource | HubSource | None = None
        self._folder = ""
        if store is not None:
            if isinstance(store, (str, os.PathLike)) and _is_local(os.fspath(store)):
                self._folder = _path_of(os.fspath(store))
            else:
                self._base = _source(store, options)
        self._sources: dict[str, StoreSource | HubSource] = {}
        self._per_loop: PerLoop[_Here] = PerLoop(functools.partial(_Here, requests))

    # -- addresses ----------------------------------------------------------------

    async def expand(self, patterns: str | Iterable[str]) -> list[str]:
        """Return what ``patterns`` name: in their order, and sorted for a ``*``.

        Raises:
            ValueError: If a pattern names nothing.
            DatasetError: If listing fails.
        """
        if isinstance(patterns, (str, os.PathLike)):
            patterns = [os.fspath(patterns)]
        found: list[str] = []
        for pattern in patterns:
            for address in _braces(os.fspath(pattern)):
                listed = await self._listed(address)
                if found:
                    found += listed
                else:
                    found = listed  # a million of them are not copied
        if not found:
            raise ValueError("no shards: the list of addresses is empty")
        return found

    async def _listed(self, address: str) -> list[str]:
        if not any(sign in address for sign in "*?["):
            return [address]
        if self._base is None and _is_local(address):
            path = os.path.join(self._folder, _path_of(address))  # noqa: PTH118
            found = await asyncio.to_thread(_globbed, path)
        elif "://" in address and "*" not in address:
            return [address]  # what begins with a question mark is a query
        else:
            found = await self._match(address)
        if not found:
            raise ValueError(f"no shard matches {self.label(address)!r}")
        return found

    async def _match(self, address: str) -> list[str]:
        source, key = self._source_of(address)
        if isinstance(source, HubSource):
            start = address[: len(address) - len(key)]
            return [start + found for found in await source.match(key)]
        folder = key[: min(key.find(sign) for sign in "*?[" if sign in key)]
        prefix = folder.rpartition("/")[0]
        listing = await list_async(source, prefix, self._requests)
        start = address[: len(address) - len(key)]
        return await asyncio.to_thread(_matching, listing, start, key)

    def label(self, address: str) -> str:
        """Return what may be shown of an address."""
        if self._base is None and _is_local(address):
            return os.path.join(self._folder, _path_of(address))  # noqa: PTH118
        source, key = self._source_of(address)
        return source.locate(key)

    def _source_of(self, address: str) -> tuple[StoreSource | HubSource, str]:
        if self._base is not None:
            return self._base, address
        parts = urlsplit(address)
        if parts.scheme == "hf":
            root, key = SCHEME, address.removeprefix(SCHEME)
        elif parts.query:
            root, key = address, ""  # signed: it is what it is
        else:
            root, key = f"{parts.scheme}://{parts.netloc}", unquote(parts.path[1:])
        source = self._sources.get(root)
        if source is None:
            source = self._sources[root] = _source(root, self._options)
        return source, key

    # -- bytes --------------------------------------------------------------------

    def open(
        self, address: str, start: int, budget: int, stop: int | None = None
    ) -> Bytes:
        """Return the bytes of a shard, or of a part; nothing is read yet."""
        here = self._per_loop.here()
        if self._base is None and _is_local(address):
            return FileBytes(self.label(address), start, budget, stop)
        source, key = self._source_of(address)
        fetch: Fetch = functools.partial(here.fetch, source, key)
        whole = functools.partial(here.chunks, source, key)
        location = source.locate(key)
        if self.kept_in is None:
            return ObjectBytes(fetch, whole, location, start, budget, stop)
        cached = CachedRanges(fetch, self.kept_in, self._full(address))
        found = ObjectBytes(cached.fetch, whole, location, start, budget, stop)
        return Closing(found, cached.aclose)

    def path(self, address: str) -> str | None:
        """Return the path of a local file, or None."""
        is_local = self._base is None and _is_local(address)
        return self.label(address) if is_local else None

    async def size(self, address: str) -> int:
        """Return the length of a shard, in bytes; an object's version is remembered."""
        if (path := self.path(address)) is not None:
            try:
                return (await asyncio.to_thread(os.stat, path)).st_size
            except OSError as error:
                raise file_failure(path, error) from error
        source, key = self._source_of(address)
        here = self._per_loop.here()
        piece = await here.fetch(source, key, 0, 1, None)
        here.versions[address] = piece.version
        return piece.size

    async def read(self, address: str, start: int, stop: int) -> Buffer:
        """Return bytes of an object, as it was when its size was asked for."""
        source, key = self._source_of(address)
        here = self._per_loop.here()
        fetch: Fetch = functools.partial(here.fetch, source, key)
        if self.kept_in is not None:
            fetch = CachedRanges(fetch, self.kept_in, self._full(address)).fetch
        piece = await fetch(start, stop, here.versions.get(address))
        return piece.data

    def cached(self, cache: CacheDir) -> Self:
        """Return the same places, read through a cache."""
        clone = copy.copy(self)
        clone.kept_in = cache
        return clone

    def _full(self, address: str) -> str:
        """Return what names an object among all of them; never shown."""
        return address if self._base is None else f"{self._base.label}\n{address}"

    async def aclose(self) -> None:
        """Wait for this loop's requests in flight, and drop idle connections."""
        await self._per_loop.here().aclose()
        for source in (self._base, *self._sources.values()):
            if source is not None:
                source.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sources": {}}


class _Here:
    """What one event loop has: its requests."""

    def __init__(self, requests: Requests) -> None:
        self.versions: dict[str, str | None] = {}
        self._tries = Tries(requests)
        self._flights: Flights | None = None

    async def fetch(
        self,
        source: StoreSource | HubSource,
        key: str,
        start: int,
        stop: int,
        version: str | None,
    ) -> Piece:
        """Return a range of an object, tried again where that may help."""
        if self._flights is None:
            self._flights = Flights()
        attempt = functools.partial(self._get, source, key, start, stop, version)
        return await self._tries.make(attempt, source.locate(key))

    async def chunks(
        self, source: StoreSource | HubSource, key: str
    ) -> AsyncIterator[Buffer]:
        """Yield a whole object, from a server that has no ranges; tried but once."""
        obstore, location = import_obstore(), source.locate(key)
        assert self._flights is not None
        assert isinstance(source, StoreSource)  # the Hub has ranges
        try:
            store = source.open()
            result = await self._flights.follow(obstore.get_async(store, key))
            size = left = result.meta["size"]
            stream = result.stream(min_chunk_size=_CHUNK)
            while left > 0:
                chunk = await self._flights.follow(anext(stream, b""))
                if not chunk:
                    raise truncated(location, ShortReadError(size, size - left))
                left -= len(chunk)
                yield chunk
        except obstore_errors() as exc:
            failure = failure_of("read", location, exc)
        else:
            return
        del store
        raise failure

    async def aclose(self) -> None:
        if self._flights is not None:
            await self._flights.drain(0.0)

    async def _get(
        self,
        source: StoreSource | HubSource,
        key: str,
        start: int,
        stop: int,
        version: str | None,
    ) -> Piece:
        if isinstance(source, HubSource):
            return await source.get(key, start, stop)
        obstore, flights = import_obstore(), self._flights
        assert flights is not None
        options: dict[str, Any] = {"range": (start, stop)}
        if version is not None:
            options["if_match"] = version
        location = source.locate(key)
        try:
            store = source.open()
            result = await flights.follow(
                obstore.get_async(store, key, options=options)
            )
            meta = result.meta
            data = await flights.follow(result.bytes_async())
            return Piece(data, meta["size"], meta.get("e_tag"))
        except obstore_errors() as exc:
            reason = reason_of(exc)
            if reason.is_out_of_range and not reason.is_cut_short:
                return Piece(b"", start, version)  # the object ends before
            failure = read_failure(location, exc, reason)
            if type(exc).__name__ == "NotSupportedError":
                failure = NoRangesError()
        # So a traceback shows neither obstore's text (context) nor the store (local).
        del store
        raise failure


def _source(
    store: "str | os.PathLike[str] | ObjectStore", options: Mapping[str, Any]
) -> StoreSource | HubSource:
    if isinstance(store, str) and store.startswith(SCHEME):
        return HubSource(store, options)
    return StoreSource(store, options)


# -- what is local, and patterns --------------------------------------------------


def shown_address(address: str) -> str:
    """Return an address or a pattern as it may be shown."""
    return repr(address if _is_local(address) else redact_url(address))


def _is_local(address: str) -> bool:
    return "://" not in address or address.startswith("file://")


def _globbed(pattern: str) -> list[str]:
    return sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207


def _matching(keys: Iterable[str], start: str, pattern: str) -> list[str]:
    matches = re.compile(fnmatch.translate(pattern)).match
    return [start + key for key in keys if matches(key)]


def _path_of(address: str) -> str:
    return unquote(urlsplit(address).path) if "://" in address else address


def _braces(pattern: str) -> list[str]:
    """Spell out ``{a,b}`` and ``{000..127}``."""
    from braceexpand import braceexpand  # noqa: PLC0415  (only where there are any)

    return list(braceexpand(pattern)) if "{" in pattern else [pattern]
