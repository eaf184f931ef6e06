"""Requests for the bytes of objects, by ranges or whole, retried where that helps.

Every answer is checked against the version that came first: by a condition of the
request if the server has strong entity tags, and here in any case.
"""

import asyncio
import functools
from typing import TYPE_CHECKING, Any

from aioloader.datasets._stores.bytes import NoRangesError, Piece, Version, changed
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
)
from aioloader.errors import DatasetError

if TYPE_CHECKING:
    from aioloader.datasets._stores.addresses import Address

_CHUNK = 1 << 20


class LoopRequests:
    """The requests of one event loop.

    Attributes:
        versions: Versions of objects whose size was looked up.
        requests: The retry policy.
        tries: Makes requests by that policy.
    """

    def __init__(self, requests: Requests) -> None:
        self.versions: dict[Address, Version] = {}
        self.requests = requests
        self.tries = Tries(requests)
        self._flights: Flights | None = None

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
        piece = await self.tries.make(attempt, source.locate(key))
        if piece is not None:
            return piece
        # It ends before the range: obstore does not report its size now.
        begin = await self.fetch(source, key, 0, 1, None) if start else None
        now = begin.version if begin else Version(0)
        if version is not None and not now.is_of(version):
            raise changed(source.locate(key), version, now)
        return Piece(b"", now)

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
        if isinstance(source, HubSource):
            piece = await source.get(key, start, stop)
            location = source.locate(key)
            return piece if version is None else _same(location, version, piece)
        obstore, location = import_obstore(), source.locate(key)
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
                failure = NoRangesError()
        else:
            piece = Piece(data, found)
            return piece if version is None else _same(location, version, piece)
        # A traceback then shows neither obstore's text (context) nor the store (local).
        del store
        raise failure


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
        self._failure: DatasetError | None = None

    async def read(self) -> Piece:
        """Return the next piece; an empty one at the end.

        Raises:
            DatasetError: If there was no progress until the deadline.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + self._here.requests.deadline
        location, tries = self._source.locate(self._key), self._here.tries
        while True:
            piece = await tries.make(self._next, location, may_hedge=False)
            data = memoryview(piece.data)
            fresh = data[max(0, self._given - (self._at - len(data))) :]
            if fresh or not data:
                self._given += len(fresh)
                return Piece(fresh, piece.version)
            if self._failure is not None and loop.time() >= until:
                raise self._failure

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
        if isinstance(failure, DatasetError):
            self._failure = failure
        raise failure


def _same(location: str, version: Version, piece: Piece) -> Piece:
    """Return a piece if it is of the expected version.

    Raises:
        RefusedError: If it is not: the object has changed.
    """
    if not piece.version.is_of(version):
        raise RefusedError(changed(location, version, piece.version))
    return piece


async def opened_for_read(source: StoreSource) -> Any:
    """Return the store.

    Raises:
        RefusedError: If it cannot be opened: a retry would not help.
    """
    try:
        return await source.opened()
    except (ValueError, DatasetError) as error:
        failure = RefusedError(error)
    raise failure


def version_of(meta: Any) -> Version:
    """Return the version in obstore's metadata of an object."""
    modified = meta["last_modified"].timestamp() or None  # zero means unknown
    return Version(meta["size"], meta.get("e_tag"), modified)
