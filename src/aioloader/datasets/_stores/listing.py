"""Listings of a store: the keys in order, and their sizes.

The keys are sorted by code point, because stores promise no order. Memory holds the
whole listing twice, as arrays: page by page as it comes, and joined; for a moment as
strings, if keys come in no order or folder markers are left out. A page is packed on
the loop, in a millisecond; anything slower runs in a thread. If a request fails, pages
already received are not requested again.
"""

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
from anyio.from_thread import start_blocking_portal

from aioloader.datasets._stores.names import NameTable
from aioloader.datasets._stores.requests import USUAL, Requests, Tries
from aioloader.datasets._stores.sources import Sized, Store


class Listing(Iterable[str]):
    """Hold the keys of a store, sorted, and their sizes.

    An empty object with keys below it is a console's folder marker, which obstore
    cannot even read; it is left out.

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


def list_blocking(store: Store, prefix: str, policy: Requests = USUAL) -> Listing:
    """List a store in the calling thread, which waits: see ``list_async``."""
    with start_blocking_portal() as portal:
        return portal.call(list_async, store, prefix, policy)


async def list_async(store: Store, prefix: str, policy: Requests = USUAL) -> Listing:
    """List a store without blocking the event loop."""
    tries, walk = Tries(policy), _Walk(store, prefix)
    try:
        while await tries.make(walk.step, store, prefix, may_hedge=False):
            pass
    finally:
        await walk.aclose()
        await store.drain()
    listing = await asyncio.to_thread(Listing.joined, walk.pages)
    if not listing.keys:
        raise ValueError(
            f"no object in {store.locate(prefix)!r}; a prefix is made of whole path "
            f"segments: 'train' has 'train/a' but not 'training/a'"
        )
    return listing


class _Walk:
    """The pages of a listing so far, and where it resumes after a failed request."""

    def __init__(self, store: Store, prefix: str) -> None:
        self.pages: list[Listing] = []
        self._store, self._prefix = store, prefix
        self._rest: AsyncIterator[Sized] | None = None
        self._last = ""
        self._is_ordered = True

    async def step(self) -> bool:
        """Add the next page; return whether there was one."""
        rest, self._rest = self._rest, None  # kept only after a good page
        if rest is None:
            if not self._is_ordered:  # the missing keys may be any
                self.pages, self._last, self._is_ordered = [], "", True
            rest = self._store.pages(self._prefix, self._last or None)
        page = await self._store.ask(self._prefix, anext(rest, None), "list")
        self._rest = rest
        if not page:
            return False
        found = dict(page)
        self.pages.append(Listing(found))
        # The missing keys are those after the largest, if keys come in order. With
        # folder markers they do not: the slash that sorts them is not in the key.
        first = min((key for key in found if found[key]), default=self._last + "~")
        self._is_ordered &= self._last < first
        self._last = max(found, default=self._last)
        return True

    async def aclose(self) -> None:
        rest: Any = self._rest
        if rest is not None:
            await rest.aclose()
