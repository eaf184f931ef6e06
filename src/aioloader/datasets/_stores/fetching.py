"""Requests for the bytes of objects, by ranges or whole, retried where that helps.

Every answer is checked against the version that came first: by a condition of the
request if the server has strong entity tags, and here in any case.
"""

import asyncio
import functools
from typing import TYPE_CHECKING, Any

from aioloader.datasets._stores.bytes import NoRangesError, Piece
from aioloader.datasets._stores.failures import ShortReadError, reason_of, truncated
from aioloader.datasets._stores.flights import Flights
from aioloader.datasets._stores.hub import HubSource
from aioloader.datasets._stores.requests import (
    RefusedError,
    Requests,
    Tries,
    read_failure,
)
from aioloader.datasets._stores.stores import (
    StoreSource,
    import_obstore,
    obstore_errors,
    opened_for_read,
)
from aioloader.datasets._stores.versions import Version, changed
from aioloader.errors import DatasetError

if TYPE_CHECKING:
    from aioloader.datasets._stores.addresses import Address
    from aioloader.datasets._stores.listing import Listing

_CHUNK = 1 << 20
# Endings of names whose objects may be HTML.
_PAGES = {"html", "htm", "xhtml", "shtml", "php", "asp", "aspx", "jsp", "cgi"}
# Objects that are known to have ranges, at most.
_RANGED = 1 << 16


class LoopRequests:
    """The requests of one event loop.

    Attributes:
        listings: The last listing of each root and folder.
        requests: The retry policy.
        tries: Makes requests by that policy.
    """

    def __init__(self, requests: Requests) -> None:
        self.listings: dict[tuple[Address | None, str], Listing] = {}
        self.requests = requests
        self.tries = Tries(requests)
        self._flights: Flights | None = None
        self._ranged: set[int] = set()  # objects of which the server gave a range

    @property
    def flights(self) -> Flights:
        """Return the requests in flight."""
        if self._flights is None:
            self._flights = Flights()
        return self._flights

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
        attempt = functools.partial(self._get, source, key, start, stop, version)
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

    def listed(self, root: "Address | None", key: str) -> Version | None:
        """Return what the last listing shows of an object: its size, if any."""
        for (its_root, folder), listing in self.listings.items():
            if its_root == root and key.startswith(folder):
                size = listing.size_of(key)
                if size:
                    return Version(size)
        return None

    async def look_up(self, source: StoreSource | HubSource, key: str) -> Version:
        """Return what a separate request says of an object that seems to be empty.

        Raises:
            DatasetError: If it cannot be looked up: nothing shows that it is empty.
        """
        assert isinstance(source, StoreSource)  # the Hub gives sizes
        attempt = functools.partial(self._head, source, key)
        return await self.tries.make(attempt, source, key)

    async def _head(self, source: StoreSource, key: str) -> Version:
        location = source.locate(key)
        store = await opened_for_read(source)
        try:
            return version_of(
                await self.flights.follow(import_obstore().head_async(store, key))
            )
        except obstore_errors() as exc:
            failure = read_failure(location, exc, reason_of(exc))
        del store
        raise failure

    async def aclose(self) -> None:
        """Wait for all requests to end."""
        if self._flights is not None:
            await self._flights.drain(0.0)

    async def _get(
        self,
        source: StoreSource | HubSource,
        key: str,
        start: int,
        stop: int,
        version: Version | None,
    ) -> Piece | None:
        """Return a range; None if the object ends before it."""
        location = source.locate(key)
        if isinstance(source, HubSource):
            return _checked(
                location, start, stop, version, await source.get(key, start, stop)
            )
        obstore = import_obstore()
        options: dict[str, Any] = {"range": (start, stop)}
        if version is not None and version.strong:
            options["if_match"] = version.strong
        store = await opened_for_read(source)
        try:
            result = await self.flights.follow(
                obstore.get_async(store, key, options=options)
            )
            found = version_of(result.meta)
            data = await self.flights.follow(result.bytes_async())
        except obstore_errors() as exc:
            reason = reason_of(exc)
            if reason.is_out_of_range and not reason.is_cut_short:
                return None
            failure = read_failure(location, exc, reason)
            if type(exc).__name__ == "NotSupportedError":
                failure = self._no_ranges(location, (source, key))
        else:
            if len(self._ranged) == _RANGED:
                self._ranged.clear()
            self._ranged.add(hash((source, key)))
            return _checked(location, start, stop, version, Piece(data, found))
        # A traceback then shows neither obstore's text (context) nor the store (local).
        del store
        raise failure

    def _no_ranges(self, location: str, name: "tuple[StoreSource, str]") -> Exception:
        """Return the error for a range that was answered with status 200.

        A server that gave a range of this object before has ranges.
        """
        if hash(name) not in self._ranged:
            return NoRangesError()
        text = (
            f"{location!r}: HTTP 200, without the range requested: not from its server?"
        )
        return DatasetError(text, location=location)


class WholeObject:
    """An object read from its first byte on, from a server without ranges.

    If the response breaks off, it is requested again, and the bytes returned are
    skipped.

    Args:
        here: Makes the requests.
        source: The store.
        key: The object.
    """

    def __init__(
        self, here: LoopRequests, source: StoreSource | HubSource, key: str
    ) -> None:
        assert isinstance(source, StoreSource)  # the Hub has ranges
        self._here = here
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
        loop = asyncio.get_running_loop()
        began, make = loop.time(), self._here.tries.make
        while True:
            piece = await make(
                self._next, self._source, self._key, began=began, may_hedge=False
            )
            data = memoryview(piece.data)
            if not data and not self._given:  # an answer that says it is empty
                size = (await self._here.look_up(self._source, self._key)).size
                if size:
                    location = self._source.locate(self._key)
                    raise truncated(location, ShortReadError(size, 0))
            fresh = data[max(0, self._given - (self._at - len(data))) :]
            if fresh or not data:
                self._given += len(fresh)
                return Piece(fresh, piece.version)

    async def _next(self) -> Piece:
        """Return the next chunk of this response, or the first of a new one."""
        obstore, location = import_obstore(), self._source.locate(self._key)
        follow = self._here.flights.follow
        store = await opened_for_read(self._source)
        stream, self._stream = self._stream, None  # kept only after a good read
        failure: Exception
        try:
            if stream is None:
                result = await follow(obstore.get_async(store, self._key))
                check_page(self._source, self._key, result)
                version, self._at = version_of(result.meta), 0
                self._version = self._version or version
                stream = result.stream(min_chunk_size=_CHUNK)
                del result
                if not version.is_of(self._version):
                    del stream  # a traceback would keep its connection open
                    raise RefusedError(changed(location, self._version, version))
            chunk = await follow(anext(stream, b""))
        except obstore_errors() as exc:
            failure = read_failure(location, exc, reason_of(exc))
        else:
            assert self._version is not None
            self._at += len(chunk)
            if chunk or self._at == self._version.size:
                self._stream = stream
                return Piece(chunk, self._version)
            failure = truncated(location, ShortReadError(self._version.size, self._at))
        del store, stream
        raise failure


def _checked(
    location: str, start: int, stop: int, version: Version | None, piece: Piece
) -> Piece:
    """Return a piece if it is whole, and of the expected version.

    Raises:
        RefusedError: If it is of another version: the object has changed.
        TruncatedReadError: If it is shorter or longer than the range.
    """
    if version is not None and not piece.version.is_of(version):
        raise RefusedError(changed(location, version, piece.version))
    expected = max(0, min(stop, piece.version.size) - start)
    if (received := len(memoryview(piece.data))) != expected:
        raise truncated(location, ShortReadError(expected, received), start)
    return piece


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


def version_of(meta: Any) -> Version:
    """Return the version in obstore's metadata of an object."""
    modified = meta["last_modified"].timestamp() or None  # zero means unknown
    return Version(meta["size"], meta.get("e_tag"), modified)
