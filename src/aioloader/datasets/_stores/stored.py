"""One object of a store: ranges of it, the whole of it, its version; cached or not.

All requests are retried where that helps. Every answer is checked against the version
that came first: by a condition of the request if the server has strong entity tags, and
here in any case. A wrong length is detected by the cheapest requests that can.

In a cache a stream's blocks are aligned: each is read from the store once per machine,
for all processes and any start. A table's ranges are kept as they are. The name of a
range contains the object's version, so a changed object is read again; that costs one
small request per object and reader. For tables, the version is trusted for ten minutes.
"""

import asyncio
import json
import time
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from typing_extensions import Buffer

from aioloader._observe.warnings import warn
from aioloader.datasets._stores.cache_dir import CacheDir
from aioloader.datasets._stores.failures import NoRangesError, Reason, truncated
from aioloader.datasets._stores.flights import Flights, import_obstore
from aioloader.datasets._stores.hub import HubSource
from aioloader.datasets._stores.requests import RefusedError, Requests, Tries
from aioloader.datasets._stores.stores import StoreSource, version_of
from aioloader.datasets._stores.versions import Piece, Version, changed
from aioloader.errors import DatasetError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from obstore import Bytes
    from obstore.store import ObjectStore

    from aioloader.datasets._stores.addresses import Address
    from aioloader.datasets._stores.listing import Listing

T = TypeVar("T")

_BLOCK = 4 << 20
_CHUNK = 1 << 20
# Seconds for which the version of a table's file is trusted.
_FRESH = 600.0
# Endings of names whose objects may be HTML.
_PAGES = {"html", "htm", "xhtml", "shtml", "php", "asp", "aspx", "jsp", "cgi"}
# Objects that are known to have ranges, at most.
_RANGED = 1 << 16
_WARNED: set[tuple[str, str]] = set()


class Client:
    """What the requests of one dataset on one event loop share.

    Args:
        policy: How requests are retried.

    Attributes:
        listings: The last listing of each root and folder.
        tries: Makes requests by the policy.
        flights: The requests in flight.
        users: Contexts of the dataset that are entered on this loop.
        ranged: Hashes of objects of which the server gave a range.
        has_ranges: Whether no server refused a range of an object of known size.
    """

    def __init__(self, policy: Requests) -> None:
        self.listings: dict[tuple[Address | None, str], Listing] = {}
        self.tries = Tries(policy)
        self.flights = Flights()
        self.users = 0
        self.ranged: set[int] = set()
        self.has_ranges = True

    @cached_property
    def obstore(self) -> Any:
        """The module, imported at first use."""
        return import_obstore()

    def listed(self, root: "Address | None", key: str) -> Version | None:
        """Return what the last listing shows of an object: its size, if any."""
        for (its_root, folder), listing in self.listings.items():
            if its_root == root and key.startswith(folder):
                size = listing.size_of(key)
                if size:
                    return Version(size)
        return None


class StoredObject:
    """One object of a store.

    Args:
        client: Makes the requests.
        source: The store.
        key: The object.
        cache: Where its ranges are kept, or None.
        name: Name of the object in the cache; kept as a hash only.

    Attributes:
        client: The same.
        key: The same.
        block: Length of the aligned blocks to fetch it by, or 0.
    """

    def __init__(
        self,
        client: Client,
        source: StoreSource | HubSource,
        key: str,
        cache: CacheDir | None = None,
        name: str = "",
    ) -> None:
        self.client = client
        self.block = _BLOCK if cache is not None else 0
        self._source = source
        self.key = key
        self._cache = cache
        self._name = name

    @property
    def location(self) -> str:
        """Its redacted address."""
        return self._source.locate(self.key)

    def ask(
        self, request: "Callable[[ObjectStore], Awaitable[T]]", **options: Any
    ) -> "Awaitable[T]":
        """Return the result of a request, given the store; retried."""
        source, key = self._source, self.key
        assert isinstance(source, StoreSource)  # the Hub is not asked so
        attempt = partial(source.ask, key, request)
        return self.client.tries.make(attempt, source, key, **options)

    async def look_up(self) -> Version:
        """Return what a separate request says of an object that seems to be empty.

        Raises:
            DatasetError: If it cannot be looked up: nothing shows that it is empty.
        """

        async def head(store: "ObjectStore") -> Version:
            request = self.client.obstore.head_async(store, self.key)
            return version_of(await self.client.flights.follow(request))

        return await self.ask(head)

    # -- ranges ---------------------------------------------------------------------

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
        return await asyncio.to_thread(self._cache.get, f"{self._name}\n{what}")

    async def _keep(self, what: str, data: Buffer) -> None:
        if self._cache is not None:
            await asyncio.to_thread(self._cache.put, f"{self._name}\n{what}", data)

    def _warn(self, reason: str) -> None:
        """Warn once for a store and a cache, in this process."""
        cache, store = self._cache, self._source.label
        if cache is None or (cache.directory, store) in _WARNED:
            return
        _WARNED.add((cache.directory, store))
        warn(
            f"cache= keeps nothing of {store!r}: the server {reason}; read without "
            "cache=, or from a store with ETags and ranges (warned once)",
            RuntimeWarning,
        )

    async def _request(self, start: int, stop: int, version: Version | None) -> Piece:
        """Return a range from the store; ``version``, past its end."""
        attempt = partial(self._get, start, stop, version)
        piece = await self.client.tries.make(attempt, self._source, self.key)
        if piece is not None:
            return piece
        # It ends before the range: obstore does not report its size now.
        now = (
            (await self._request(0, 1, None)).version if start else await self.look_up()
        )
        if version is not None and not now.is_of(version):
            raise changed(self.location, version, now)
        if (expected := min(stop, now.size) - start) > 0:
            raise truncated(self.location, expected, 0, start)
        return Piece(b"", now)

    async def _get(
        self, start: int, stop: int, version: Version | None
    ) -> Piece | None:
        """Return a range, checked; None if the object ends before it."""
        client, source, key = self.client, self._source, self.key
        name = hash((source, key))
        try:
            piece = await source.get(client.flights, key, start, stop, version)
        except NoRangesError:
            if name not in client.ranged:
                raise
            text = (
                f"{self.location!r}: HTTP 200, without the range requested: not from "
                "its server?"
            )
            raise DatasetError(text, location=self.location) from None
        if piece is None:
            return None
        if len(client.ranged) == _RANGED:
            client.ranged.clear()
        client.ranged.add(name)
        if version is not None and not piece.version.is_of(version):
            raise RefusedError(changed(self.location, version, piece.version))
        expected = max(0, min(stop, piece.version.size) - start)
        if (received := len(memoryview(piece.data))) != expected:
            raise truncated(self.location, expected, received, start)
        return piece

    # -- the whole ------------------------------------------------------------------

    def read_whole(self, size: int) -> "Awaitable[Bytes]":
        """Return all of it: a read-only buffer, owned by the caller.

        Args:
            size: Its size when it was listed, in bytes; 0 if not known.

        Raises:
            TruncatedReadError: If the body differs in length from the announcement.
            DatasetError: If it cannot be read, or is a web page in place of the object.
        """
        return self.ask(partial(self._read_whole, size))

    async def _read_whole(self, size: int, store: "ObjectStore") -> "Bytes":
        obstore, follow = self.client.obstore, self.client.flights.follow
        try:
            # No variable for a request: see ``Flights.follow``.
            if size and self.client.has_ranges:
                # One byte more than listed, to notice an object that has grown. This
                # one step costs a quarter less CPU than ``get`` and ``bytes``.
                body: Bytes = await follow(
                    obstore.get_range_async(store, self.key, start=0, end=size + 1)
                )
                if len(body) == size:
                    return body
        except obstore.exceptions.NotSupportedError:
            self.client.has_ranges = False
        except obstore.exceptions.GenericError as exc:
            if not (reason := Reason(exc)).is_cut_short and not reason.is_out_of_range:
                raise
        body = await self._read_announced(store)
        if not body or (size and len(body) != size):
            # It is empty or has changed since the listing; or this is not the object.
            meta = await follow(obstore.head_async(store, self.key))
            if meta["size"] != len(body):
                raise truncated(self.location, meta["size"], len(body))
        return body

    async def _read_announced(self, store: "ObjectStore") -> "Bytes":
        """Read it, and check its body against the announced length."""
        obstore, follow = self.client.obstore, self.client.flights.follow
        result = await follow(obstore.get_async(store, self.key))
        self.check_page(result)
        body: Bytes
        try:
            body = await follow(result.bytes_async())
        except obstore.exceptions.GenericError as exc:
            if not Reason(exc).is_cut_short:
                raise
            # Once more, to find how far it gets.
            whole, pieces = WholeObject(self, chunk=1), []
            while piece := (await whole.next(store)).data:
                pieces.append(piece)
            body = obstore.Bytes(b"".join(pieces))
        else:
            # obstore itself accepts a body that ends early.
            if len(body) != result.meta["size"]:
                raise truncated(self.location, result.meta["size"], len(body))
        return body

    def stream(self) -> "WholeObject":
        """Return its bytes from the first one on, for a server without ranges."""
        return WholeObject(self)

    def check_page(self, result: Any) -> None:
        """Check that an answer is no web page in place of the object.

        Raises:
            DatasetError: If it is HTML, which its name and its tags do not suggest.
        """
        kind = str(result.attributes.get("Content-Type", ""))
        if "text/html" not in kind.lower():
            return
        location = self.location
        name = location.rpartition("/")[2].lower()
        _, dot, ending = name.rpartition(".")
        has_tag = version_of(result.meta)[1:] != (None, None)
        is_web = location.startswith("http")
        if ending in _PAGES or (has_tag and not (dot and is_web)):
            return
        raise DatasetError(
            f"{location!r}: the answer is a web page ({kind}, {result.meta['size']:,} "
            "bytes), not the object; it comes from a gateway, a proxy or a login page",
            location=location,
        )


class WholeObject:
    """An object read from its first byte on, from a server without ranges.

    If the response breaks off, it is requested again, and the bytes returned are
    skipped.

    Args:
        object: The object.
        chunk: Least bytes of a piece.
    """

    def __init__(self, object: StoredObject, chunk: int = _CHUNK) -> None:  # noqa: A002
        self._object = object
        self._chunk = chunk
        self._version: Version | None = None
        self._given = 0
        self._stream: Any = None
        self._at = 0

    async def read(self) -> Piece:
        """Return the next piece; an empty one at the end.

        Raises:
            DatasetError: If there was no progress until the deadline.
        """
        began = asyncio.get_running_loop().time()
        while True:
            piece = await self._object.ask(self.next, began=began, may_hedge=False)
            data = memoryview(piece.data)
            if not data and not self._given:  # an answer that says it is empty
                size = (await self._object.look_up()).size
                if size:
                    raise truncated(self._object.location, size, 0)
            fresh = data[max(0, self._given - (self._at - len(data))) :]
            if fresh or not data:
                self._given += len(fresh)
                return Piece(fresh, piece.version)

    async def next(self, store: "ObjectStore") -> Piece:
        """Return the next chunk of this response, or the first of a new one.

        Raises:
            TruncatedReadError: If the response ends early.
            RefusedError: If the object has changed since the first one.
        """
        obstore, location = self._object.client.obstore, self._object.location
        follow = self._object.client.flights.follow
        stream, self._stream = self._stream, None  # kept only after a good read
        if stream is None:
            result = await follow(obstore.get_async(store, self._object.key))
            self._object.check_page(result)
            version, self._at = version_of(result.meta), 0
            self._version = self._version or version
            if not version.is_of(self._version):
                del result  # a traceback would keep its connection open
                raise RefusedError(changed(location, self._version, version))
            stream = result.stream(min_chunk_size=self._chunk)
            del result
        try:
            chunk = await follow(anext(stream, b""))
        except obstore.exceptions.GenericError as exc:
            if not Reason(exc).is_cut_short:
                raise
            chunk = b""
        assert self._version is not None
        self._at += len(chunk)
        if not chunk and self._at != self._version.size:
            del stream  # as above
            raise truncated(location, self._version.size, self._at)
        self._stream = stream
        return Piece(chunk, self._version)
