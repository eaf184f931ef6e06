"""Access to the bytes, versions and sizes of shards, on disk or in any store.

Paths and ``file://`` URLs are read from disk, other URLs through a store per bucket or
host. Braces in patterns are expanded as text; ``*``, ``?`` and ``[`` need a listing.
"""

import contextlib
import copy
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeAlias

from typing_extensions import Buffer

from aioloader._base.cancellation import each, in_thread
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
from aioloader.datasets._stores.bytes import (
    Client,
    FileBytes,
    ObjectBytes,
    StoredObject,
    bounds,
    checked,
    read_local,
    warn_once,
)
from aioloader.datasets._stores.cache_dir import CacheDir
from aioloader.datasets._stores.failures import (
    ANY_VERSION,
    ExpectedVersion,
    NoRangesError,
    Version,
    file_failure,
    version_of_file,
)
from aioloader.datasets._stores.listing import Listing, list_async
from aioloader.datasets._stores.options import StoreOptions, check_no_options
from aioloader.datasets._stores.per_loop import PerLoop
from aioloader.datasets._stores.sources import OwnStore, Requests, Store
from aioloader.datasets._stores.stores import store_of
from aioloader.datasets._stores.unpack import UNPACK_BYTES

# A reader of a shard's bytes, in order.
Bytes: TypeAlias = FileBytes | ObjectBytes


class SizedListing(list[Any]):
    """A list of addresses or shards, with the ``sizes`` of all if they are known."""

    sizes: "list[int] | None" = None


class Storage:
    """Opens shards by address, or by key in ``store``; pickles hold no open store.

    ``options`` are the store options for URLs. ``addresses`` are those to open later;
    if all are paths, the storage needs no client.
    """

    def __init__(
        self,
        store: Any,
        options: StoreOptions,
        requests: Requests,
        cache: CacheDir | None = None,
        addresses: Sequence[Address] = (),
        unpack_bytes: int = UNPACK_BYTES,
    ) -> None:
        self.cache = cache
        self.unpack_bytes = unpack_bytes
        self._options = options
        self._requests = requests
        self._store: Store | None = None
        self._folder = ""
        if isinstance(store, (str, os.PathLike)) and is_local(os.fspath(store)):
            self._folder = path_of(os.fspath(store))
            check_no_options(self._folder, options)
        elif store is not None:
            self._store = store_of(store, options)
        self._stores: dict[Address, Store] = {}
        self._per_loop: PerLoop[Client] | None = None
        if self._store is not None or any("://" in address for address in addresses):
            self._per_loop = PerLoop(partial(Client, self._requests))
        if self._store is None and (self._per_loop is not None or options):
            self._check(addresses)

    def _check(self, addresses: Sequence[Address]) -> None:
        """Check the first address and its store; with options, the first remote one."""
        remote = (address for address in addresses if not is_local(address))
        first = next(remote, None) if self._options else addresses[0]
        if first is None:
            check_no_options(addresses[0], self._options)
        elif is_local(first):
            path_of(first)
        else:
            if "{" in split(first)[0]:
                first = next(braces(first))
            self._store_of(first)

    def cached(self, cache: CacheDir) -> Self:
        clone = copy.copy(self)
        clone.cache = cache
        return clone

    def elsewhere(self, address: Address) -> Self:
        """Return an uncached storage for an address that is not in the given store."""
        options = self.options_of(address)
        return type(self)(None, options, self._requests, None, [address])

    def options_of(self, address: Address) -> StoreOptions:
        """Return the store options that apply to an address; none apply to a path."""
        return {} if is_local(address) else self._options

    def enter(self) -> None:
        """Keep this loop's connections open until the matching ``aclose``."""
        if self._per_loop is not None:
            self._per_loop.here().users += 1

    async def expand(self, patterns: Any) -> SizedListing:
        """Return the addresses that match ``patterns``, sorted within each pattern.

        Every iteration begins with this call and ends with ``aclose``.
        """
        self.enter()
        addresses = SizedListing()
        for pattern in sealed(patterns):
            for address in braces(pattern) if "{" in pattern else [pattern]:
                is_plain = not has_signs(address)
                listed = (
                    SizedListing([address])
                    if is_plain
                    else await self._matches(address)
                )
                if not addresses:
                    addresses = listed  # not copied: there may be a million
                    continue
                addresses += listed
                if addresses.sizes is None or listed.sizes is None:
                    addresses.sizes = None
                else:
                    addresses.sizes += listed.sizes
        if not addresses:
            raise ValueError("no shards: the list of addresses is empty")
        return addresses

    async def _matches(self, address: Address) -> SizedListing:
        """List a pattern's matches; an HTTP URL without ``*`` matches only itself."""
        store, root, pattern = self._store, None, address
        if store is not None:
            pattern = address.removeprefix("/")
        elif is_local(address):
            pattern = local_pattern(address)
        elif searched := pattern_of(address):
            root, pattern = searched
            store, _ = self._store_of(root)
        else:
            return SizedListing([address])
        if store is None:
            files, _ = await _read_in_thread(globbed, pattern, self._folder)
            matches = SizedListing(files)
        else:
            folder = folder_of(pattern)
            listing = await list_async(store, folder, self._requests)
            self._client().listings[root, folder] = listing
            matches = await in_thread(_matching_keys, listing, pattern, root)
        if not matches:
            label = self.label(address)
            hint = "names that contain * ? [ are written as glob.escape() does it"
            folder = folder_of(label)
            is_path = store is None and has_signs(label)
            if is_path and not await _read_in_thread(Path(folder or ".").is_dir):
                hint = f"there is no directory {folder!r}"
            raise ValueError(f"no shard matches {label!r}; {hint}")
        return matches

    def label(self, address: Address) -> str:
        """Return an address as shown in messages, without secrets."""
        if (path := self.path(address)) is not None:
            return path
        store, key = self._store_of(address)
        return store.locate(key)

    def name(self, address: Address) -> str:
        """Return a shard's name without secrets; its folders may name columns."""
        return address if self._store is not None else name_of(address)

    def path(self, address: Address) -> str | None:
        """Return the path of a local file; None for a remote object."""
        if self._store is not None:
            return None
        if "://" in address:  # a quick check, because most addresses are paths
            if not is_local(address):
                return None
            address = path_of(address)
        return os.path.join(self._folder, address)  # noqa: PTH118

    def _client(self) -> Client:
        assert self._per_loop is not None  # callers have a store
        return self._per_loop.here()

    def _store_of(self, address: Address) -> tuple[Store, str]:
        if self._store is not None:
            return self._store, address
        root, key = split(address)
        if root not in self._stores:
            self._stores[root] = store_of(root, self._options)
        return self._stores[root], key

    def open(
        self,
        address: Address,
        start: int,
        budget: int,
        expected: ExpectedVersion = ANY_VERSION,
        stop: int | None = None,
    ) -> Bytes:
        """Return a reader of a shard's bytes from ``start``; send no request yet."""
        if (path := self.path(address)) is not None:
            return FileBytes(path, start, budget, expected, stop)
        if expected.version is None:
            expected = expected._replace(version=self._listed_version(address))
        return ObjectBytes(self.stored(address), start, budget, expected, stop)

    async def version(self, address: Address) -> Version:
        if (path := self.path(address)) is not None:
            try:
                return await _read_in_thread(version_of_file, path)
            except OSError as error:
                raise file_failure(path, error) from error
        return await self.stored(address).version(self._listed_version(address))

    async def read(
        self, address: Address, start: int, stop: int, version: Version
    ) -> Buffer:
        return await self.stored(address).read(start, stop, version)

    async def part(
        self,
        address: Address,
        start: int,
        stop: int = 0,
        version: Version | None = None,
    ) -> tuple[bytes, Version]:
        """Return a byte range of a shard, and its version; check ``version`` if given.

        A negative ``start`` counts from the end; a ``stop`` of 0 is the end.
        """
        if (path := self.path(address)) is not None:
            return await _read_in_thread(read_local, path, start, stop, version)
        version = version or await self.version(address)
        start, stop = bounds(start, stop, version.size)
        data = b""
        if start < stop:
            data = bytes(memoryview(await self.read(address, start, stop, version)))
        return checked(data, stop - start, self.label(address)), version

    def check(self, address: Address, version: Version) -> None:
        """Raise if a local file has changed, but not if it was deleted. Blocks."""
        if (path := self.path(address)) is None:
            return
        try:
            current = version_of_file(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise file_failure(path, error) from error
        ExpectedVersion(version).check(path, current)

    async def sizes(
        self, addresses: Sequence[Address], *, must: bool
    ) -> list[int] | None:
        """Return the lengths of shards in bytes; None unless all are known.

        With ``must``, all sizes are requested unless they are known.
        """
        if isinstance(addresses, SizedListing) and addresses.sizes is not None:
            return addresses.sizes
        sizes = await _read_in_thread(self._local_sizes, addresses)
        if sizes is None and must:
            with contextlib.suppress(NoRangesError):
                return [version.size for version in await each(self.version, addresses)]
        return sizes

    def _local_sizes(self, addresses: Sequence[Address]) -> list[int] | None:
        try:
            return [os.stat(self.path(a) or "").st_size for a in addresses]  # noqa: PTH116  (many)
        except OSError:
            return None  # a shard is remote, or missing: reading it will raise

    def stored(self, address: Address) -> StoredObject:
        """Return a remote object, whose requests run on this loop."""
        store, key = self._store_of(address)
        cache, name = self.cache, address
        if self._store is not None:
            name = f"{store.cache_name}\n{key}"
        if cache is not None and store.cache_name is None:
            if isinstance(store, OwnStore):
                warn_once(cache, store.label, "it has no label to name its bytes")
            cache = None
        return StoredObject(self._client(), store, key, cache, name)

    def _listed_version(self, address: Address) -> Version | None:
        here = self._client()
        if not here.listings:
            return None
        place = (None, address) if self._store is not None else split(address)
        return here.listed(*place)

    async def aclose(self) -> None:
        """Wait for this loop's requests; after the last user, close connections."""
        if self._per_loop is None:
            return
        here = self._client()
        here.users = max(0, here.users - 1)
        for store in (self._store, *self._stores.values()):
            if store is not None:
                await (store.drain() if here.users > 0 else store.aclose())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_stores": {}}


async def read_whole(source: Bytes) -> bytes:
    parts: list[bytes] = []
    try:
        while data := bytes(await source.read()):
            parts.append(data)
    finally:
        await source.aclose()
    return b"".join(parts)


# Cancellation abandons the call: file systems may hang, and the call changes nothing.
_read_in_thread = partial(in_thread, abandon_on_cancel=True)


def _matching_keys(
    listing: Listing, pattern: str, root: Address | None
) -> SizedListing:
    keys = matching(listing, pattern)
    addresses = SizedListing(
        keys if root is None else [spell(root, key) for key in keys]
    )
    items = listing.items()  # an iterator, in the order of ``keys``
    addresses.sizes = [
        next(size for name, size in items if name == key) for key in keys
    ]
    return addresses
