"""Opening addresses: paths and URLs to bytes, whatever the store.

Paths and ``file://`` are read from disk, all others by obstore, with one store per
bucket or host. Patterns are expanded: braces always, ``*`` and ``?`` by a listing.
``addresses`` defines addresses and patterns.
"""

import asyncio
import contextlib
import copy
import functools
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

from typing_extensions import Buffer

from aioloader.datasets._stores.addresses import (
    Address,
    braces,
    folder_of,
    globbed,
    has_signs,
    is_local,
    local_pattern,
    matching,
    name_of,
    path_of,
    pattern_of,
    sealed,
    spell,
    split,
)
from aioloader.datasets._stores.bytes import Bytes, ObjectBytes
from aioloader.datasets._stores.cache_dir import CacheDir
from aioloader.datasets._stores.failures import NoRangesError, file_failure
from aioloader.datasets._stores.file_bytes import FileBytes
from aioloader.datasets._stores.hub import HubSource, is_hub
from aioloader.datasets._stores.listing import Listing, list_async
from aioloader.datasets._stores.options import Options, check_no_options
from aioloader.datasets._stores.per_loop import PerLoop
from aioloader.datasets._stores.requests import Requests
from aioloader.datasets._stores.stored import Client, StoredObject
from aioloader.datasets._stores.stores import (
    StoreSource,
)
from aioloader.datasets._stores.versions import (
    NOTHING,
    Known,
    Version,
    version_of_file,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore

Source: TypeAlias = StoreSource | HubSource
T = TypeVar("T")
# Files whose sizes or ends are read at once.
_AT_ONCE = 32


class Listed(list[Any]):
    """Addresses, or shards, and their lengths where all of these were listed."""

    sizes: "list[int] | None" = None


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
        self._per_loop: PerLoop[Client] = PerLoop(functools.partial(Client, requests))

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
            check_no_options(addresses[0], self._options)
        elif is_local(first):
            path_of(first)
        else:
            if "{" in split(first)[0]:
                first = next(braces(first))
            self._source_of(first)

    # -- addresses ----------------------------------------------------------------

    async def expand(self, patterns: Any) -> Listed:
        """Return the addresses that ``patterns`` match: in order, sorted for a ``*``.

        Args:
            patterns: What ``sealed`` returned; or one or many strings.

        Raises:
            ValueError: If a pattern matches nothing.
            DatasetError: If listing fails.
        """
        found = Listed()
        for pattern in sealed(patterns):
            for address in braces(pattern):
                listed = await self._listed(address)
                if not found:
                    found = listed  # avoids copying a million of them
                    continue
                found += listed
                if found.sizes is None or listed.sizes is None:
                    found.sizes = None
                else:
                    found.sizes += listed.sizes
        if not found:
            raise ValueError("no shards: the list of addresses is empty")
        return found

    async def _listed(self, address: Address) -> Listed:
        """Return an address, or its matches if it is a pattern."""
        if self._base is not None:
            if not has_signs(address):
                return Listed([address])
            found = await self._match(self._base, None, address.removeprefix("/"))
        elif is_local(address):
            pattern = local_pattern(address)
            if not has_signs(pattern):
                return Listed([address])
            files, _ = await asyncio.to_thread(globbed, pattern, self._folder)
            found = Listed(files)
        else:
            searched = pattern_of(address)
            if searched is None:
                return Listed([address])
            root, pattern = searched
            found = await self._match(self._source_of(root)[0], root, pattern)
        if not found:
            label = self.label(address)
            hint = "names that contain * ? [ are written as glob.escape() does it"
            if self.path(address) and not await asyncio.to_thread(_has_folder, label):
                hint = f"there is no directory {folder_of(label)!r}"
            raise ValueError(f"no shard matches {label!r}; {hint}")
        return found

    async def _match(
        self, source: Source, root: Address | None, pattern: str
    ) -> Listed:
        client, folder = self._per_loop.here(), folder_of(pattern)
        listing: Iterable[str]
        if isinstance(source, HubSource):
            attempt = functools.partial(source.keys, folder)
            listing = await client.tries.make(attempt, source, folder)
        else:
            listing = await list_async(source, folder, self._requests)
            client.listings[root, folder] = listing
        return await asyncio.to_thread(_matching, listing, pattern, root)

    def label(self, address: Address) -> str:
        """Return an address as it may be shown."""
        if self._base is None and is_local(address):
            return os.path.join(self._folder, path_of(address))  # noqa: PTH118
        source, key = self._source_of(address)
        return source.locate(key)

    def name(self, address: Address) -> str:
        """Return a shard's name, redacted; its ending shows its compression."""
        return address if self._base is not None else name_of(address)

    def _source_of(self, address: Address) -> tuple[Source, str]:
        """Return the store of an address, and the key in it."""
        if self._base is not None:
            return self._base, address
        root, key = split(address)
        if root not in self._sources:
            self._sources[root] = _source(root, self._options)
        return self._sources[root], key

    # -- bytes --------------------------------------------------------------------

    def open(
        self,
        address: Address,
        start: int,
        budget: int,
        known: Known = NOTHING,
        stop: int | None = None,
    ) -> Bytes:
        """Return the bytes of a shard from ``start`` on; nothing is read yet.

        Args:
            address: The shard's address.
            start: First byte.
            budget: Most bytes to hold.
            known: What the shard must be; besides, it has the size that was listed.
            stop: Where to stop before its end.
        """
        if (path := self.path(address)) is not None:
            return FileBytes(path, start, budget, known, stop)
        if known.version is None:
            known = known._replace(version=self._as_listed(address))
        return ObjectBytes(self._object(address), start, budget, known, stop)

    def _object(self, address: Address) -> StoredObject:
        source, key = self._source_of(address)
        # All in-memory stores have the same name.
        cache = None if source.label == "memory://" else self.kept_in
        name = address if self._base is None else f"{source.label}\n{key}"
        return StoredObject(self._per_loop.here(), source, key, cache, name)

    def path(self, address: Address) -> str | None:
        """Return the path of a local file, or None."""
        if self._base is None and is_local(address):
            return self.label(address)
        return None

    async def version(self, address: Address) -> Version:
        """Return the version of a shard, which has the size that was listed."""
        if (path := self.path(address)) is not None:
            try:
                return await asyncio.to_thread(version_of_file, path)
            except OSError as error:
                raise file_failure(path, error) from error
        return await self._object(address).version(self._as_listed(address))

    async def sizes(
        self, addresses: Sequence[Address], *, must: bool
    ) -> list[int] | None:
        """Return the lengths of shards, in bytes; None if some are unknown.

        Args:
            addresses: What ``expand`` returned, or a part of it.
            must: Whether to ask stores that have not listed them.
        """
        if isinstance(addresses, Listed) and addresses.sizes is not None:
            return addresses.sizes
        found = await asyncio.to_thread(self._local_sizes, addresses)
        if found is None and must:
            with contextlib.suppress(NoRangesError):
                return [one.size for one in await each(self.version, addresses)]
        return found

    def _local_sizes(self, addresses: Sequence[Address]) -> list[int] | None:
        found: list[int] = []
        for address in addresses:
            path = self.path(address)
            try:
                found.append(os.stat(path or "").st_size)  # noqa: PTH116  (many)
            except OSError:
                return None  # remote, or missing, which reading it will tell
        return found

    def _as_listed(self, address: Address) -> Version | None:
        here = self._per_loop.here()
        if not here.listings:
            return None
        place = (None, address) if self._base is not None else split(address)
        return here.listed(*place)

    async def read(
        self, address: Address, start: int, stop: int, version: Version
    ) -> Buffer:
        """Return bytes of an object at a version."""
        return await self._object(address).read(start, stop, version)

    def cached(self, cache: CacheDir) -> Self:
        """Return the same places, read through a cache."""
        clone = copy.copy(self)
        clone.kept_in = cache
        return clone

    async def aclose(self) -> None:
        """Wait for this loop's requests in flight, and drop idle connections."""
        await self._per_loop.here().flights.drain(0.0)
        for source in (self._base, *self._sources.values()):
            if source is not None:
                source.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_sources": {}}


def _source(store: Any, options: Options) -> Source:
    return HubSource(store, options) if is_hub(store) else StoreSource(store, options)


# -- patterns, in a thread --------------------------------------------------------


def _has_folder(pattern: str) -> bool:
    return not has_signs(pattern) or Path(folder_of(pattern) or ".").is_dir()


def _matching(keys: Iterable[str], pattern: str, root: Address | None) -> Listed:
    found = matching(keys, pattern)
    made = Listed(found if root is None else [spell(root, key) for key in found])
    if isinstance(keys, Listing):
        every = keys.items()  # in the same order
        made.sizes = [
            next(size for name, size in every if name == key) for key in found
        ]
    return made


async def each(
    function: Callable[[Any], Awaitable[T]], addresses: Sequence[Any]
) -> list[T]:
    """Return ``function`` of each address, several at a time, in order.

    The first failure ends the others.
    """
    found: dict[int, T] = {}
    waiting = iter(enumerate(addresses))

    async def work() -> None:
        for number, address in waiting:
            found[number] = await function(address)

    workers = [
        asyncio.ensure_future(work()) for _ in range(min(_AT_ONCE, len(addresses)))
    ]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [found[number] for number in range(len(addresses))]
