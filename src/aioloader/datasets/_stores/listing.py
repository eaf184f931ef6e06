"""Listings of a store: the keys in order, and their sizes.

The keys are sorted by code point, because stores promise no order. Memory holds the
whole listing twice, as arrays: page by page as it comes, and joined; once more if
folder markers are left out. A page is packed on the loop, in a millisecond; anything
slower runs in a thread. If a request fails, pages already received are not requested
again.
"""

import asyncio
import heapq
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np
from anyio.from_thread import start_blocking_portal

from aioloader.datasets._stores.failures import reason_of
from aioloader.datasets._stores.flights import Flights
from aioloader.datasets._stores.names import NameTable
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
from aioloader.errors import DatasetError

if TYPE_CHECKING:
    from obstore import ListStream, ObjectMeta
    from obstore.store import ObjectStore

_PAGE = 1000
_AS_A_RULE = Requests()


class Listing(Iterable[str]):
    """Hold the keys of a store, sorted, and their sizes.

    An empty object with keys below it is a console's folder marker, which obstore
    cannot even read; it is left out.

    Args:
        found: Size in bytes of each key.

    Attributes:
        keys: The keys, sorted.
        sizes: Their sizes in bytes, shape ``(len(keys),)``, dtype int64.
    """

    def __init__(self, found: Mapping[str, int]) -> None:
        every = sorted(found)
        kept = [
            key
            for at, key in enumerate(every)
            if found[key] or not _is_folder(every, at)
        ]
        self.keys = NameTable(kept)
        self.sizes = np.fromiter((found[key] for key in kept), np.int64, len(kept))

    @classmethod
    def joined(cls, pages: "list[Listing]") -> "Listing":
        """Return one listing of several, in whatever order they come.

        The pages are removed from the list, to be freed. If the store lists in order,
        arrays are concatenated; otherwise, or with markers among the keys, all is
        packed again.
        """
        found = [page for page in pages if page.keys]
        pages.clear()
        if any(one.keys[-1] >= other.keys[0] for one, other in pairwise(found)):
            merged = heapq.merge(*(page.items() for page in found))
            same = groupby(merged, itemgetter(0))
            found = list(_packed(next(items) for _, items in same))
        whole = cls._concatenated(found)
        empty = np.flatnonzero(whole.sizes == 0).tolist()
        markers = {at for at in empty if _is_folder(whole.keys, at)}
        if markers:
            items = enumerate(whole.items())
            kept = (item for at, item in items if at not in markers)
            whole = cls._concatenated(list(_packed(kept)))
        return whole

    @classmethod
    def _concatenated(cls, pages: "list[Listing]") -> "Listing":
        made = cls({})
        made.keys = NameTable.joined(page.keys for page in pages)
        made.sizes = np.concatenate([made.sizes, *(page.sizes for page in pages)])
        pages.clear()
        return made

    def size_of(self, key: str) -> int | None:
        """Return the size of a key, in bytes; None if it is not listed."""
        at = bisect_left(self.keys, key)
        is_found = at < len(self.keys) and self.keys[at] == key
        return int(self.sizes[at]) if is_found else None

    def items(self) -> Iterator[tuple[str, int]]:
        """Return the keys with their sizes."""
        return zip(self.keys, map(int, self.sizes), strict=True)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys)


def _is_folder(keys: Sequence[str], at: int) -> bool:
    key = keys[at]
    # Keys below it follow it directly; only then is a search worthwhile.
    if key and not (at + 1 < len(keys) and keys[at + 1].startswith(key)):
        return False
    below = f"{key}/"
    first = bisect_left(keys, below, at + 1)
    return not key or (first < len(keys) and keys[first].startswith(below))


def _packed(items: Iterable[tuple[str, int]]) -> Iterator[Listing]:
    items = iter(items)
    while page := dict(islice(items, _PAGE)):
        yield Listing(page)


def list_blocking(
    source: StoreSource, prefix: str, policy: Requests = _AS_A_RULE
) -> Listing:
    """List a store in the calling thread, which waits: see ``list_async``."""
    with start_blocking_portal() as portal:
        return portal.call(list_async, source, prefix, policy)


async def list_async(
    source: StoreSource, prefix: str, policy: Requests = _AS_A_RULE
) -> Listing:
    """List a store without blocking the event loop.

    Args:
        source: The store.
        prefix: Whole path segments that keys start with.
        policy: How long, and with which delays, a page is retried.

    Raises:
        ValueError: If nothing is found.
        DatasetError: If listing fails.
    """
    tries, flights = Tries(policy), Flights()
    walk = _Walk(source, prefix, flights)
    try:
        while page := await tries.make(walk.next, source, prefix, may_hedge=False):
            walk.add(page)
    finally:
        await flights.drain(0.0)
    return await asyncio.to_thread(walk.listing)


class _Walk:
    """The pages of a listing, and where it resumes after a failed request."""

    def __init__(self, source: StoreSource, prefix: str, flights: Flights) -> None:
        self._source = source
        self._root = source.web_root()
        self._prefix = prefix
        self._flights = flights
        self._stream: ListStream[Sequence[ObjectMeta]] | None = None
        self._pages: list[Listing] = []
        self._last = ""
        self._is_ordered = True

    async def next(self) -> "Sequence[ObjectMeta] | None":
        """Return the next page; None at the end."""
        stream, self._stream = self._stream, None  # kept only after a good page
        store = await opened_for_read(self._source)
        try:
            stream = stream or self._rest(store)
            page = await self._flights.follow(anext(stream, None))
        except obstore_errors() as exc:
            failure = self._failure(exc)
        else:
            self._stream = stream
            return page
        # A traceback then shows neither obstore's text (context) nor the store (local).
        del store, stream
        raise failure

    def _rest(self, store: "ObjectStore") -> "ListStream[Sequence[ObjectMeta]]":
        """Return the remaining pages: all pages where keys come in no order."""
        if not self._is_ordered:
            self._pages, self._last, self._is_ordered = [], "", True
        pages: ListStream[Sequence[ObjectMeta]]
        pages = import_obstore().list(
            store, self._prefix or None, offset=self._last or None, chunk_size=_PAGE
        )
        return pages

    def add(self, page: "Iterable[ObjectMeta]") -> None:
        """Add a page."""
        start = self._root
        found = {meta["path"].removeprefix(start): meta["size"] for meta in page}
        self._pages.append(Listing(found))
        # The missing keys are those after the largest, if keys come in order. With
        # folder markers they do not: the slash that sorts them is not in the key.
        first = min((key for key in found if found[key]), default=self._last + "~")
        self._is_ordered &= self._last < first
        self._last = max(found, default=self._last)

    def _failure(self, exc: Exception) -> Exception:
        """Return the error to raise for an exception of obstore."""
        location = self._source.locate(self._prefix)
        failure = read_failure(location, exc, reason_of(exc), "list")
        # Not every HTTP server has a listing.
        is_final = type(failure) is DatasetError and location.startswith("http")
        return RefusedError(failure) if is_final else failure

    def listing(self) -> Listing:
        """Return the whole listing, and release the pages.

        Raises:
            ValueError: If there are no keys.
        """
        listing = Listing.joined(self._pages)
        if not listing.keys:
            location = self._source.locate(self._prefix)
            raise ValueError(
                f"no object in {location!r}; a prefix is made of whole path "
                f"segments: 'train' has 'train/a' but not 'training/a'"
            )
        return listing
