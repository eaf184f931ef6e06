"""Reading one whole object, by the cheapest requests that detect a wrong length."""

from typing import TYPE_CHECKING

from aioloader.datasets._stores.failures import ShortReadError, reason_of
from aioloader.datasets._stores.fetching import check_page
from aioloader.datasets._stores.flights import Flights
from aioloader.datasets._stores.requests import Requests, Tries
from aioloader.datasets._stores.stores import (
    StoreSource,
    import_obstore,
    obstore_errors,
)

if TYPE_CHECKING:
    from obstore import Bytes
    from obstore.store import ObjectStore


class ObjectReader:
    """Read the objects of one dataset on one event loop.

    All methods belong to the loop's thread. ``tries`` counts attempts for callers that
    read again; ``errors`` are what ``read`` may raise besides ``ShortReadError``:
    exceptions of obstore, which may hold secrets.
    """

    def __init__(self, requests: Requests) -> None:
        self.tries = Tries(requests)
        self._obstore = import_obstore()
        self.errors = obstore_errors()
        self.flights = Flights()
        self.users = 0
        self._has_ranges = True

    async def read(
        self, store: "ObjectStore", source: StoreSource, key: str, size: int
    ) -> "Bytes":
        """Read one object.

        Args:
            store: The store to read from.
            source: What made it.
            key: Path of the object in ``store``.
            size: Its size when it was listed, in bytes; 0 if not known.

        Returns:
            A read-only buffer, owned by the caller.

        Raises:
            ShortReadError: If the body differs in length from the announcement.
            DatasetError: If it is a web page in place of the object.
        """
        if size and self._has_ranges:
            body = await self._read_listed(store, key, size)
            if body is not None and len(body) == size:
                return body
        body = await self._read_announced(store, source, key)
        if not body or (size and len(body) != size):
            # It is empty or has changed since the listing; or this is not the object.
            meta = await self.flights.follow(self._obstore.head_async(store, key))
            if meta["size"] != len(body):
                raise ShortReadError(meta["size"], len(body))
        return body

    async def _read_listed(
        self, store: "ObjectStore", key: str, size: int
    ) -> "Bytes | None":
        """Read an object of known size in one step, or return None if that fails.

        One byte more than listed is requested, so that an object that has grown is
        noticed. A ranged read costs a quarter less CPU than ``get`` and ``bytes``.
        """
        exceptions = self._obstore.exceptions
        try:
            # No variable for the request: see ``Flights.follow``.
            return await self.flights.follow(
                self._obstore.get_range_async(store, key, start=0, end=size + 1)
            )
        except exceptions.NotSupportedError:
            self._has_ranges = False
        except exceptions.GenericError as exc:
            reason = reason_of(exc)
            if reason.is_cut_short:
                return await self._read_in_pieces(store, key)
            if not reason.is_out_of_range:
                raise
        return None

    async def _read_announced(
        self, store: "ObjectStore", source: StoreSource, key: str
    ) -> "Bytes":
        """Read an object, and check its body against the announced length."""
        result = await self.flights.follow(self._obstore.get_async(store, key))
        check_page(source, key, result)
        expected = result.meta["size"]
        body: Bytes
        try:
            body = await self.flights.follow(result.bytes_async())
        except self._obstore.exceptions.GenericError as exc:
            if not reason_of(exc).is_cut_short:
                raise
        else:
            # obstore itself accepts a body that ends early.
            if len(body) != expected:
                raise ShortReadError(expected, len(body))
            return body
        return await self._read_in_pieces(store, key)

    async def _read_in_pieces(self, store: "ObjectStore", key: str) -> "Bytes":
        """Read an object whose body broke off again, to find how far it gets."""
        result = await self.flights.follow(self._obstore.get_async(store, key))
        expected, pieces = result.meta["size"], []
        stream = result.stream(min_chunk_size=1)
        try:
            while True:
                pieces.append(await self.flights.follow(anext(stream)))
        except StopAsyncIteration:
            pass
        except self._obstore.exceptions.GenericError as exc:
            if not reason_of(exc).is_cut_short:
                raise
        body = b"".join(pieces)
        if len(body) != expected:
            raise ShortReadError(expected, len(body))
        whole: Bytes = self._obstore.Bytes(body)
        return whole
