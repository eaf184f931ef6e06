"""Listings of a store's keys, sorted by code point, with their sizes.

A listing is held as arrays, to save memory. While pages are joined, there are two
copies; strings exist only while unordered keys are sorted or folder markers removed.
The loop packs a page in about a millisecond; slower work runs in a thread. After a
failure, only the missing pages are requested, unless keys come unordered.
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

# With more empty objects in a listing, none is checked for being a folder marker.
_MAX_EMPTY = 1000


class Listing(Iterable[str]):
    """The sorted keys of a store, and their sizes in bytes as an int64 array.

    Empty objects with keys below them are left out: web consoles create them as folder
    markers, and obstore cannot read them. ``list_async`` removes other markers.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        keys = sorted(sizes)
        kept = [k for n, k in enumerate(keys) if sizes[k] or not _is_folder(keys, n)]
        self.keys = NameTable(kept)
        self.sizes = np.fromiter((sizes[key] for key in kept), np.int64, len(kept))

    @classmethod
    def joined(cls, pages: "list[Listing]") -> "Listing":
        """Join ``pages`` into one listing; clear ``pages`` to free memory early."""
        parts = [page for page in pages if page.keys]
        pages.clear()
        if any(left.keys[-1] >= right.keys[0] for left, right in pairwise(parts)):
            return cls(dict(chain.from_iterable(page.items() for page in parts)))
        whole = cls({})
        whole.keys = NameTable.joined(page.keys for page in parts)
        whole.sizes = np.concatenate([whole.sizes, *(page.sizes for page in parts)])
        parts.clear()
        empty = np.flatnonzero(whole.sizes == 0).tolist()
        has_markers = any(_is_folder(whole.keys, index) for index in empty)
        return cls(dict(whole.items())) if has_markers else whole

    def size_of(self, key: str) -> int | None:
        """Return the size of a key's object in bytes; None if the key is not listed."""
        index = bisect_left(self.keys, key)
        is_listed = index < len(self.keys) and self.keys[index] == key
        return int(self.sizes[index]) if is_listed else None

    def items(self) -> Iterator[tuple[str, int]]:
        return zip(self.keys, map(int, self.sizes), strict=True)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys)


def _is_folder(keys: Sequence[str], index: int) -> bool:
    """Return whether ``keys[index]`` is empty, or sorted ``keys`` has keys below it."""
    key = keys[index]
    # Quick check: if keys are below this key, the next key starts with it.
    if key and not (index + 1 < len(keys) and keys[index + 1].startswith(key)):
        return False
    below = f"{key}/"
    first = bisect_left(keys, below, index + 1)
    return not key or (first < len(keys) and keys[first].startswith(below))


async def list_async(store: Store, prefix: str, policy: Requests = USUAL) -> Listing:
    """List the objects below ``prefix``; raise a ValueError if there are none."""
    pages: list[Listing] = []
    stream: Any = None
    last, is_ordered = "", True  # where to resume after a failed request

    async def add_page() -> bool:
        """Request and add the next page; return False at the end of the listing."""
        nonlocal stream, last, is_ordered
        rest, stream = stream, None  # restored below if the page arrives
        if rest is None:
            if not is_ordered:  # any key may still be missing: start again
                pages.clear()
                last, is_ordered = "", True
            rest = store.pages(prefix, last or None)
        page = await store.ask(prefix, anext(rest, None), "list")
        stream = rest
        if not page:
            return False
        # If an object and a folder marker share a key, keep the larger size.
        sizes = dict(sorted(page))
        if sizes.get(prefix) == 0:
            del sizes[prefix]
        pages.append(Listing(sizes))
        # If keys are in order, a failed listing resumes after the largest. Markers may
        # be out of order: the server sorts them by a slash that obstore strips.
        first = min((key for key in sizes if sizes[key]), default=last + "~")
        is_ordered &= last < first
        last = max(sizes, default=last)
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
    """Return the listing without folder markers; keep all if many keys are empty."""
    indices = np.flatnonzero(listing.sizes == 0)[: _MAX_EMPTY + 1]
    empty = [listing.keys[index] for index in indices]
    if not empty or len(empty) > _MAX_EMPTY:
        return listing

    async def exists(key: str) -> bool:
        try:
            await tries.make(lambda: store.ask(key, store.head(key)), store, key)
        except DatasetError as error:  # other errors recur at the first read
            return not isinstance(error, ObjectNotFoundError)
        return True

    are_objects = await each(exists, empty)
    markers = {
        key for key, is_key in zip(empty, are_objects, strict=True) if not is_key
    }
    kept = {key: size for key, size in listing.items() if key not in markers}
    return Listing(kept) if markers else listing
