"""Listings of a store: the keys in order, and their sizes.

The keys are sorted by code point, because stores promise no order. Memory holds the
whole listing twice, as arrays: page by page as it comes, and joined; for a moment as
strings, if keys come in no order or folder markers are left out. A page is packed on
the loop, in a millisecond; anything slower runs in a thread. If a request fails, pages
already received are not requested again.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np

from aioloader._base.cancellation import each, in_thread
from aioloader.datasets._stores.names import NameTable
from aioloader.datasets._stores.sources import USUAL, Requests, Store, Tries
from aioloader.errors import DatasetError, ObjectNotFoundError

# Empty keys of a listing that are looked up.
_FEW = 1000


class Listing(Iterable[str]):
    """Hold the keys of a store, sorted, and their sizes.

    An empty object with keys below it is a console's folder marker, which obstore
    cannot even read; it is left out, and ``list_async`` leaves out other markers.

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
        at = bisect_left(self.keys, key)
        is_found = at < len(self.keys) and self.keys[at] == key
        return int(self.sizes[at]) if is_found else None

    def items(self) -> Iterator[tuple[str, int]]:
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


async def list_async(store: Store, prefix: str, policy: Requests = USUAL) -> Listing:
    """List a store without blocking the event loop."""
    pages: list[Listing] = []
    # Where it resumes after a failed request.
    stream: Any = None
    last, is_ordered = "", True

    async def add_page() -> bool:
        """Add the next page; return whether there was one."""
        nonlocal stream, last, is_ordered
        rest, stream = stream, None  # kept only after a good page
        if rest is None:
            if not is_ordered:  # the missing keys may be any
                pages.clear()
                last, is_ordered = "", True
            rest = store.pages(prefix, last or None)
        page = await store.ask(prefix, anext(rest, None), "list")
        stream = rest
        if not page:
            return False
        # The larger of an object and of a marker next to it; none of the prefix.
        found = dict(sorted(page))
        if found.get(prefix) == 0:
            del found[prefix]
        pages.append(Listing(found))
        # The missing keys are those after the largest, if keys come in order. With
        # folder markers they do not: the slash that sorts them is not in the key.
        first = min((key for key in found if found[key]), default=last + "~")
        is_ordered &= last < first
        last = max(found, default=last)
        return True

    tries = Tries(policy)
    try:
        while await tries.make(add_page, store, prefix, may_hedge=False):
            pass
        listing = await in_thread(Listing.joined, pages)
        listing = await _without_markers(listing, store, tries)
    finally:
        if stream is not None:
            await stream.aclose()
        await store.drain()
    if not listing.keys:
        raise ValueError(
            f"no object in {store.locate(prefix)!r}; a prefix is made of whole path "
            f"segments: 'train' has 'train/a' but not 'training/a'"
        )
    return listing


async def _without_markers(listing: Listing, store: Store, tries: Tries) -> Listing:
    """Leave out markers of folders with nothing below: no object has their name.

    Only if there are few empty keys, since each costs a request.
    """
    empty = [listing.keys[at] for at in np.flatnonzero(listing.sizes == 0)[: _FEW + 1]]
    if not empty or len(empty) > _FEW:
        return listing

    async def is_there(key: str) -> bool:
        try:
            await tries.make(lambda: store.ask(key, store.head(key)), store, key)
        except DatasetError as error:  # reading it may say so too
            return not isinstance(error, ObjectNotFoundError)
        return True

    there = await each(is_there, empty)
    markers = {key for key, is_key in zip(empty, there, strict=True) if not is_key}
    kept = {key: size for key, size in listing.items() if key not in markers}
    return Listing(kept) if markers else listing
