"""Listings of a store: the keys in order, and their sizes.

The keys are sorted by code point, because stores promise no order. Memory holds the
whole listing twice, as arrays: page by page as it comes, and joined; once more if
folder markers are left out. A page is packed on the loop, in a millisecond; anything
slower runs in a thread. If a request fails, pages already received are not requested
again.
"""

import asyncio
import heapq
import random
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING

import numpy as np

from aioloader.datasets._stores.failures import failure_of, reason_of
from aioloader.datasets._stores.flights import Flights
from aioloader.datasets._stores.names import NameTable
from aioloader.datasets._stores.requests import RefusedError, Requests, read_failure
from aioloader.datasets._stores.stores import (
    StoreSource,
    import_obstore,
    obstore_errors,
)

if TYPE_CHECKING:
    from obstore import ListStream, ObjectMeta
    from obstore.store import ObjectStore

    from aioloader.errors import DatasetError

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
    """List a store in the calling thread.

    source: The store.
    prefix: Whole path segments that keys start with.
    policy: How long, and with which delays, a page is retried.

    Raises:
        ValueError: If nothing is found.
        DatasetError: If listing fails.
    """
    walk = _Walk(source, prefix, policy)
    store = source.open()
    while True:
        try:
            for page in walk.rest(store):
                walk.add(page)
        except obstore_errors() as exc:
            walk.note(exc)
        else:
            return walk.listing()
        if walk.failure is not None:
            break
        time.sleep(walk.delay)
    # A traceback then shows neither obstore's text (context) nor the store (local).
    del store
    raise walk.failure


async def list_async(
    source: StoreSource, prefix: str, policy: Requests = _AS_A_RULE
) -> Listing:
    """List a store without blocking the event loop.

    Args:
        source: As for ``list_blocking``.
        prefix: As for ``list_blocking``.
        policy: As for ``list_blocking``.

    Raises:
        ValueError: If nothing is found.
        DatasetError: If listing fails.
    """
    walk, flights = _Walk(source, prefix, policy), Flights()
    store = await asyncio.to_thread(source.open)
    try:
        while not await _is_complete(walk, store, flights):
            if walk.failure is not None:
                break
            await asyncio.sleep(walk.delay)
    finally:
        await flights.drain(0.0)
    del store
    if walk.failure is not None:
        raise walk.failure
    return await asyncio.to_thread(walk.listing)


async def _is_complete(walk: "_Walk", store: "ObjectStore", flights: Flights) -> bool:
    """Add pages; return whether all came."""
    pages = walk.rest(store)
    try:
        while True:
            walk.add(await flights.follow(anext(pages)))
    except StopAsyncIteration:
        return True
    except obstore_errors() as exc:
        walk.note(exc)
        return False


class _Walk:
    """The pages of a listing, and where it resumes after a failed request.

    Attributes:
        failure: The error to raise, if a retry is not worthwhile.
        delay: Seconds to wait before the next try.
    """

    def __init__(self, source: StoreSource, prefix: str, policy: Requests) -> None:
        self.failure: DatasetError | None = None
        self.delay = 0.0
        self._location = source.locate(prefix)
        self._root = source.web_root()
        self._prefix = prefix
        self._policy = policy
        self._pages: list[Listing] = []
        self._last = ""
        self._is_ordered = True
        self._moved()

    def _moved(self) -> None:
        self._until = time.monotonic() + self._policy.deadline
        self._tries = self._sent = 0

    def rest(self, store: "ObjectStore") -> "ListStream[Sequence[ObjectMeta]]":
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
        self._moved()

    def note(self, exc: Exception) -> None:
        """Decide how to handle an exception of obstore."""
        failure = failure_of("list", self._location, exc)
        self._sent += failure.attempts
        bound = min(self._policy.max_delay, self._policy.base_delay * 2.0**self._tries)
        self._tries += 1
        self.delay = random.uniform(0.0, bound)  # noqa: S311  (jitter, not a secret)
        # Errors that end a read end a listing, and not every HTTP server has a listing.
        refused = read_failure(self._location, exc, reason_of(exc))
        if isinstance(refused, RefusedError) or self._location.startswith("http"):
            self.failure = failure
        elif time.monotonic() + self.delay >= self._until:
            after = f"given up after {self._policy.deadline:g} s, {self._sent} attempts"
            failure.args = (f"{failure}; {after}",)
            failure.attempts = self._sent
            self.failure = failure

    def listing(self) -> Listing:
        """Return the whole listing, and release the pages.

        Raises:
            ValueError: If there are no keys.
        """
        listing = Listing.joined(self._pages)
        if not listing.keys:
            raise ValueError(
                f"no object in {self._location!r}; a prefix is made of whole path "
                f"segments: 'train' has 'train/a' but not 'training/a'"
            )
        return listing
