"""Listings of a store: the keys in order, and their sizes.

The keys are sorted by code point, because stores promise no order. Memory holds the
whole listing twice, as arrays: page by page as it comes, and joined; for a moment as
strings, if keys come in no order or folder markers are left out. A page is packed on
the loop, in a millisecond; anything slower runs in a thread. If a request fails, pages
already received are not requested again.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import numpy as np
from anyio.from_thread import start_blocking_portal

from aioloader.datasets._stores.flights import Flights, import_obstore
from aioloader.datasets._stores.names import NameTable
from aioloader.datasets._stores.requests import Requests, Tries
from aioloader.datasets._stores.stores import StoreSource

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
        """Return one listing of several, which are removed from the list, to be freed.

        If they come in order, their arrays are concatenated.
        """
        found = [page for page in pages if page.keys]
        pages.clear()
        if any(one.keys[-1] >= other.keys[0] for one, other in pairwise(found)):
            return cls(dict(chain.from_iterable(page.items() for page in found)))
        whole = cls({})
        whole.keys = NameTable.joined(page.keys for page in found)
        whole.sizes = np.concatenate([whole.sizes, *(page.sizes for page in found)])
        found.clear()
        empty = np.flatnonzero(whole.sizes == 0).tolist()
        has_markers = any(_is_folder(whole.keys, at) for at in empty)
        return cls(dict(whole.items())) if has_markers else whole

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
    tries, flights, pages = Tries(policy), Flights(), _Pages(source.web_root())
    stream: ListStream[Sequence[ObjectMeta]] | None = None

    async def page(store: "ObjectStore") -> "Sequence[ObjectMeta] | None":
        nonlocal stream
        rest, stream = stream, None  # kept only after a good page
        if rest is None:
            last = pages.resume()
            rest = import_obstore().list(
                store, prefix or None, offset=last, chunk_size=_PAGE
            )
        found = await flights.follow(anext(rest, None))
        stream = rest
        return found

    try:
        attempt = partial(source.ask, prefix, page, "list")
        while found := await tries.make(attempt, source, prefix, may_hedge=False):
            pages.add(found)
    finally:
        await flights.drain(0.0)
    listing = await asyncio.to_thread(Listing.joined, pages.pages)
    if not listing.keys:
        raise ValueError(
            f"no object in {source.locate(prefix)!r}; a prefix is made of whole path "
            f"segments: 'train' has 'train/a' but not 'training/a'"
        )
    return listing


class _Pages:
    """The pages of a listing so far, and where it resumes after a failed request.

    Args:
        root: What the store adds to each key.
    """

    def __init__(self, root: str) -> None:
        self.pages: list[Listing] = []
        self._root = root
        self._last = ""
        self._is_ordered = True

    def resume(self) -> str | None:
        """Return the key after which the missing pages start.

        None, without pages: all are missing where keys come in no order.
        """
        if not self._is_ordered:
            self.pages, self._last, self._is_ordered = [], "", True
        return self._last or None

    def add(self, page: "Iterable[ObjectMeta]") -> None:
        """Add a page."""
        found = {meta["path"].removeprefix(self._root): meta["size"] for meta in page}
        self.pages.append(Listing(found))
        # The missing keys are those after the largest, if keys come in order. With
        # folder markers they do not: the slash that sorts them is not in the key.
        first = min((key for key in found if found[key]), default=self._last + "~")
        self._is_ordered &= self._last < first
        self._last = max(found, default=self._last)
