"""Requests for objects on one event loop: ranges, whole objects, and their versions.

All are retried where that helps. Every answer is checked against the version that came
first: by a condition of the request if the server has strong entity tags, and here in
any case. A wrong length is detected by the cheapest requests that can.
"""

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from aioloader.datasets._stores.bytes import NoRangesError, Piece
from aioloader.datasets._stores.failures import Reason, truncated
from aioloader.datasets._stores.flights import Flights, import_obstore
from aioloader.datasets._stores.hub import HubSource
from aioloader.datasets._stores.requests import RefusedError, Requests, Tries
from aioloader.datasets._stores.stores import StoreSource, version_of
from aioloader.datasets._stores.versions import Version, changed
from aioloader.errors import DatasetError

if TYPE_CHECKING:
    from obstore import Bytes
    from obstore.store import ObjectStore

    from aioloader.datasets._stores.addresses import Address
    from aioloader.datasets._stores.listing import Listing

_CHUNK = 1 << 20
# Endings of names whose objects may be HTML.
_PAGES = {"html", "htm", "xhtml", "shtml", "php", "asp", "aspx", "jsp", "cgi"}
# Objects that are known to have ranges, at most.
_RANGED = 1 << 16


class Client:
    """The requests of one dataset on one event loop.

    All methods belong to the loop's thread.

    Args:
        policy: How requests are retried.

    Attributes:
        listings: The last listing of each root and folder.
        tries: Makes requests by the policy.
        flights: The requests in flight.
        users: Contexts of the dataset that are entered on this loop.
    """

    def __init__(self, policy: Requests) -> None:
        self.listings: dict[tuple[Address | None, str], Listing] = {}
        self.tries = Tries(policy)
        self.flights = Flights()
        self.users = 0
        self._ranged: set[int] = set()  # objects of which the server gave a range
        self._has_ranges = True

    def listed(self, root: "Address | None", key: str) -> Version | None:
        """Return what the last listing shows of an object: its size, if any."""
        for (its_root, folder), listing in self.listings.items():
            if its_root == root and key.startswith(folder):
                size = listing.size_of(key)
                if size:
                    return Version(size)
        return None

    # -- ranges -------------------------------------------------------------------

    async def fetch(
        self,
        source: StoreSource | HubSource,
        key: str,
        start: int,
        stop: int,
        version: Version | None,
    ) -> Piece:
        """Return a range of an object at ``version``; ``version``, past its end.

        Raises:
            NoRangesError: If the server has no ranges.
            DatasetError: If the object has changed, or cannot be read.
        """
        attempt = partial(self._get, source, key, start, stop, version)
        piece = await self.tries.make(attempt, source, key)
        if piece is not None:
            return piece
        # It ends before the range: obstore does not report its size now.
        if start:
            now = (await self.fetch(source, key, 0, 1, None)).version
        else:
            now = await self.look_up(source, key)
        if version is not None and not now.is_of(version):
            raise changed(source.locate(key), version, now)
        return Piece(b"", now)

    async def look_up(self, source: StoreSource | HubSource, key: str) -> Version:
        """Return what a separate request says of an object that seems to be empty.

        Raises:
            DatasetError: If it cannot be looked up: nothing shows that it is empty.
        """
        assert isinstance(source, StoreSource)  # the Hub gives sizes
        attempt = partial(source.head, self.flights, key)
        return await self.tries.make(attempt, source, key)

    async def _get(
        self,
        source: StoreSource | HubSource,
        key: str,
        start: int,
        stop: int,
        version: Version | None,
    ) -> Piece | None:
        """Return a range, checked; None if the object ends before it."""
        location, name = source.locate(key), hash((source, key))
        try:
            piece = await source.get(self.flights, key, start, stop, version)
        except NoRangesError:
            if name not in self._ranged:
                raise
            text = (
                f"{location!r}: HTTP 200, without the range requested: not from its "
                "server?"
            )
            raise DatasetError(text, location=location) from None
        if piece is None:
            return None
        if len(self._ranged) == _RANGED:
            self._ranged.clear()
        self._ranged.add(name)
        if version is not None and not piece.version.is_of(version):
            raise RefusedError(changed(location, version, piece.version))
        expected = max(0, min(stop, piece.version.size) - start)
        if (received := len(memoryview(piece.data))) != expected:
            raise truncated(location, expected, received, start)
        return piece

    # -- whole objects ------------------------------------------------------------

    async def read(self, source: StoreSource, key: str, size: int) -> "Bytes":
        """Read one object.

        Args:
            source: The store.
            key: Its key.
            size: Its size when it was listed, in bytes; 0 if not known.

        Returns:
            A read-only buffer, owned by the caller.

        Raises:
            TruncatedReadError: If the body differs in length from the announcement.
            DatasetError: If it cannot be read, or is a web page in place of the object.
        """
        read = partial(self._read, source, key, size)
        return await self.tries.make(partial(source.ask, key, read), source, key)

    async def _read(
        self, source: StoreSource, key: str, size: int, store: "ObjectStore"
    ) -> "Bytes":
        obstore, follow = import_obstore(), self.flights.follow
        try:
            # No variable for a request: see ``Flights.follow``.
            if size and self._has_ranges:
                # One byte more than listed, to notice an object that has grown. This
                # one step costs a quarter less CPU than ``get`` and ``bytes``.
                body: Bytes = await follow(
                    obstore.get_range_async(store, key, start=0, end=size + 1)
                )
                if len(body) == size:
                    return body
        except obstore.exceptions.NotSupportedError:
            self._has_ranges = False
        except obstore.exceptions.GenericError as exc:
            if not (reason := Reason(exc)).is_cut_short and not reason.is_out_of_range:
                raise
        body = await self._read_announced(source, key, store)
        if not body or (size and len(body) != size):
            # It is empty or has changed since the listing; or this is not the object.
            meta = await follow(obstore.head_async(store, key))
            if meta["size"] != len(body):
                raise truncated(source.locate(key), meta["size"], len(body))
        return body

    async def _read_announced(
        self, source: StoreSource, key: str, store: "ObjectStore"
    ) -> "Bytes":
        """Read an object, and check its body against the announced length."""
        obstore, follow = import_obstore(), self.flights.follow
        result = await follow(obstore.get_async(store, key))
        check_page(source, key, result)
        body: Bytes
        try:
            body = await follow(result.bytes_async())
        except obstore.exceptions.GenericError as exc:
            if not Reason(exc).is_cut_short:
                raise
            # Once more, to find how far it gets.
            whole, pieces = WholeObject(self, source, key, chunk=1), []
            while piece := (await whole.next(store)).data:
                pieces.append(piece)
            body = obstore.Bytes(b"".join(pieces))
        else:
            # obstore itself accepts a body that ends early.
            if len(body) != result.meta["size"]:
                raise truncated(source.locate(key), result.meta["size"], len(body))
        return body


class WholeObject:
    """An object read from its first byte on, from a server without ranges.

    If the response breaks off, it is requested again, and the bytes returned are
    skipped.

    Args:
        client: Makes the requests.
        source: The store.
        key: The object.
        chunk: Least bytes of a piece.
    """

    def __init__(
        self,
        client: Client,
        source: StoreSource | HubSource,
        key: str,
        chunk: int = _CHUNK,
    ) -> None:
        assert isinstance(source, StoreSource)  # the Hub has ranges
        self._chunk = chunk
        self._client = client
        self._source = source
        self._key = key
        self._version: Version | None = None
        self._given = 0
        self._stream: Any = None
        self._at = 0

    async def read(self) -> Piece:
        """Return the next piece; an empty one at the end.

        Raises:
            DatasetError: If there was no progress until the deadline.
        """
        client, source, key = self._client, self._source, self._key
        began = asyncio.get_running_loop().time()
        attempt = partial(source.ask, key, self.next)
        while True:
            piece = await client.tries.make(
                attempt, source, key, began=began, may_hedge=False
            )
            data = memoryview(piece.data)
            if not data and not self._given:  # an answer that says it is empty
                size = (await client.look_up(source, key)).size
                if size:
                    raise truncated(source.locate(key), size, 0)
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
        obstore, follow = import_obstore(), self._client.flights.follow
        location = self._source.locate(self._key)
        stream, self._stream = self._stream, None  # kept only after a good read
        if stream is None:
            result = await follow(obstore.get_async(store, self._key))
            check_page(self._source, self._key, result)
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


def check_page(source: StoreSource, key: str, result: Any) -> None:
    """Check that an answer is no web page in place of an object.

    Raises:
        DatasetError: If it is HTML, which its name and its tags do not suggest.
    """
    kind = str(result.attributes.get("Content-Type", ""))
    if "text/html" not in kind.lower():
        return
    location = source.locate(key)
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
