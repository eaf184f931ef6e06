"""Opening addresses: paths and URLs to bytes, whatever the store.

Paths and ``file://`` are read by aiofiles, all others by obstore, with one store per
bucket or host. Patterns are expanded: braces always, ``*`` and ``?`` by a listing.
``addresses`` defines addresses and patterns.
"""

import asyncio
import copy
import functools
import glob
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from typing_extensions import Buffer

from aioloader.datasets._stores.addresses import (
    Address,
    braces,
    folder_of,
    has_signs,
    is_local,
    local_pattern,
    matching,
    name_of,
    opened,
    path_of,
    pattern_of,
    sealed,
    spell,
    split,
)
from aioloader.datasets._stores.bytes import (
    Bytes,
    Closing,
    Fetch,
    ObjectBytes,
    file_failure,
)
from aioloader.datasets._stores.cache_dir import CacheDir
from aioloader.datasets._stores.cached import CachedRanges
from aioloader.datasets._stores.fetching import LoopRequests, WholeObject
from aioloader.datasets._stores.file_bytes import FileBytes
from aioloader.datasets._stores.hub import HubSource, is_hub
from aioloader.datasets._stores.listing import list_async
from aioloader.datasets._stores.options import Options, check_no_options
from aioloader.datasets._stores.per_loop import PerLoop
from aioloader.datasets._stores.requests import Requests
from aioloader.datasets._stores.stores import (
    StoreSource,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore

Source: TypeAlias = StoreSource | HubSource
_CHUNK = 1 << 20


class Places:
    """Opens addresses; pickled without open stores.

    Args:
        store: What addresses are relative to; None: they are paths and URLs.
        options: Options of obstore's stores.
        requests: How requests are retried.
        cache: Cache for bytes read from stores, or None.
    """

    def __init__(
        self,
        store: "str | os.PathLike[str] | ObjectStore | None",
        options: Options,
        requests: Requests,
        cache: CacheDir | None = None,
    ) -> None:
        self.kept_in = cache
        self._options = options
        self._requests = requests
        self._base: Source | None = None
        self._folder = ""
        if store is not None:
            if isinstance(store, (str, os.PathLike)) and is_local(os.fspath(store)):
                self._folder = path_of(os.fspath(store))
                check_no_options(self._folder, options)
            else:
                self._base = _source(store, options)
        self._sources: dict[Address, Source] = {}
        self._per_loop: PerLoop[LoopRequests] = PerLoop(
            functools.partial(LoopRequests, requests)
        )

    def check(self, addresses: list[Address]) -> None:
        """Check that the first address is valid, and the store accepts its options.

        Raises:
            ImportError: If obstore is needed, and not installed.
            ValueError: If it is of an unknown kind, or options are wrong.
        """
        if self._base is not None:
            return
        remote = (one for one in addresses if not is_local(one))
        first = next(remote, None) if self._options else addresses[0]
        if first is None:
            check_no_options(opened(addresses[0]), self._options)
        elif is_local(first):
            path_of(opened(first))
        else:
            if "{" in opened(split(first)[0]):
                first = next(braces(first))
            self._source_of(first)

    # -- addresses ----------------------------------------------------------------

    async def expand(self, patterns: Any) -> list[Any]:
        """Return the addresses that ``patterns`` match: in order, sorted for a ``*``.

        Args:
            patterns: What ``sealed`` returned; or one or many strings.

        Raises:
            ValueError: If a pattern matches nothing.
            DatasetError: If listing fails.
        """
        found: list[Address] = []
        for pattern in sealed(patterns):
            for address in braces(pattern):
                listed = await self._listed(address)
                if found:
                    found += listed
                else:
                    found = listed  # avoids copying a million of them
        if not found:
            raise ValueError("no shards: the list of addresses is empty")
        return found

    async def _listed(self, address: Address) -> list[Address]:
        """Return an address, or its matches if it is a pattern."""
        if self._base is not None:
            key = opened(address)
            if not has_signs(key):
                return [address]
            found = await self._match(self._base, None, key.removeprefix("/"))
        elif is_local(address):
            pattern = local_pattern(opened(address))
            if not has_signs(pattern):
                return [address]
            found = await asyncio.to_thread(_globbed, pattern, self._folder)
        else:
            searched = pattern_of(address)
            if searched is None:
                return [address]
            root, pattern = searched
            found = await self._match(self._source(root), root, pattern)
        if not found:
            label = self.label(address)
            hint = "names that contain * ? [ are written as glob.escape() does it"
            if self.path(address) and not await asyncio.to_thread(_has_folder, label):
                hint = f"there is no directory {folder_of(label)!r}"
            raise ValueError(f"no shard matches {label!r}; {hint}")
        return found

    async def _match(
        self, source: Source, root: Address | None, pattern: str
    ) -> list[Address]:
        listing: Iterable[str]
        if isinstance(source, HubSource):
            listing = await source.keys(folder_of(pattern))
        else:
            listing = await list_async(source, folder_of(pattern), self._requests)
        return await asyncio.to_thread(_matching, listing, pattern, root)

    def label(self, address: Address) -> str:
        """Return an address as it may be shown."""
        if self._base is None and is_local(address):
            return os.path.join(self._folder, path_of(opened(address)))  # noqa: PTH118
        source, key = self._source_of(address)
        return source.locate(key)

    def name(self, address: Address) -> str:
        """Return a shard's name, redacted; its ending shows its compression."""
        return opened(address) if self._base is not None else name_of(address)

    def _source_of(self, address: Address) -> tuple[Source, str]:
        if self._base is not None:
            return self._base, opened(address)
        root, key = split(address)
        return self._source(root), key

    def _source(self, root: Address) -> Source:
        source = self._sources.get(root)
        if source is None:
            source = self._sources[root] = _source(root, self._options)
        return source

    # -- bytes --------------------------------------------------------------------

    def open(
        self,
        address: Address,
        start: int,
        budget: int,
        size: int | None = None,
        stop: int | None = None,
    ) -> Bytes:
        """Return the bytes of a shard from ``start`` on; nothing is read yet.

        Args:
            address: The shard's address.
            start: First byte.
            budget: Most bytes to hold.
            size: Length that the shard must have, if known.
            stop: Where to stop before its end.
        """
        here = self._per_loop.here()
        if self._base is None and is_local(address):
            return FileBytes(self.label(address), start, budget, size, stop)
        source, key = self._source_of(address)
        location = source.locate(key)
        fetch: Fetch = functools.partial(here.fetch, source, key)
        whole = functools.partial(WholeObject, here, source, key)
        if self._keeps_nothing(source):
            return ObjectBytes(fetch, whole, location, start, budget, size, stop)
        assert self.kept_in is not None
        cached = CachedRanges(fetch, self.kept_in, self._full(address))
        found = ObjectBytes(cached.fetch, whole, location, start, budget, size, stop)
        return Closing(found, cached.aclose)

    def path(self, address: Address) -> str | None:
        """Return the path of a local file, or None."""
        if self._base is None and is_local(address):
            return self.label(address)
        return None

    async def size(self, address: Address) -> int:
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
        return piece.version.size

    async def read(self, address: Address, start: int, stop: int) -> Buffer:
        """Return bytes of an object, at the version seen by ``size``."""
        source, key = self._source_of(address)
        here = self._per_loop.here()
        fetch: Fetch = functools.partial(here.fetch, source, key)
        if self.kept_in is not None and not self._keeps_nothing(source):
            fetch = CachedRanges(fetch, self.kept_in, self._full(address)).fetch
        piece = await fetch(start, stop, here.versions.get(address))
        return piece.data

    def cached(self, cache: CacheDir) -> Self:
        """Return the same places, read through a cache."""
        clone = copy.copy(self)
        clone.kept_in = cache
        return clone

    def _keeps_nothing(self, source: Source) -> bool:
        """Return whether there is no cache; all in-memory stores have the same name."""
        return self.kept_in is None or source.label == "memory://"

    def _full(self, address: Address) -> str:
        """Return a unique name of an object; never shown."""
        if self._base is None:
            return opened(address)
        return f"{self._base.label}\n{opened(address)}"

    async def aclose(self) -> None:
        """Wait for this loop's requests in flight, and drop idle connections."""
        await self._per_loop.here().aclose()
        for source in (self._base, *self._sources.values()):
            if source is not None:
                source.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sources": {}}


def _source(store: Any, options: Options) -> Source:
    return HubSource(store, options) if is_hub(store) else StoreSource(store, options)


# -- patterns, in a thread --------------------------------------------------------


def _globbed(pattern: str, folder: str) -> list[Any]:
    """Return the files that match, relative to ``folder``, as keys of a store are."""
    found = glob.glob(pattern, root_dir=folder or None, recursive=True)  # noqa: PTH207
    # Like a store: no folders; a dangling link stays, and fails on reading.
    # Two segments ** find the same files twice.
    return sorted(
        path
        for path in set(found)
        if not os.path.isdir(os.path.join(folder, path))  # noqa: PTH112, PTH118
    )


def _has_folder(pattern: str) -> bool:
    return not has_signs(pattern) or Path(folder_of(pattern) or ".").is_dir()


def _matching(keys: Iterable[str], pattern: str, root: Address | None) -> list[Address]:
    found = matching(keys, pattern)
    return [*found] if root is None else [spell(root, key) for key in found]
