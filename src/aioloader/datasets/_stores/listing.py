"""Listings of a store: the keys in order, and their sizes.

The keys are sorted by code point, for stores promise no order. Memory holds the whole
listing once as a dict, then as arrays.
"""

import asyncio
import contextlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from aioloader.datasets._stores.failures import failure_of
from aioloader.datasets._stores.flights import Flights
from aioloader.datasets._stores.names import NameTable
from aioloader.datasets._stores.stores import (
    StoreSource,
    import_obstore,
    obstore_errors,
)

if TYPE_CHECKING:
    from obstore import ListStream, ObjectMeta
    from obstore.store import ObjectStore

_PAGE = 1000


class Listing(Iterable[str]):
    """Hold the keys of a store, sorted, and their sizes.

    An empty object with keys below it is a console's marker of a folder, which obstore
    cannot even read; it is left out.

    Args:
        found: Size in bytes of each key.

    Attributes:
        keys: The keys, sorted.
        sizes: Their sizes in bytes, shape ``(len(keys),)``, dtype int64.
    """

    def __init__(self, found: dict[str, int]) -> None:
        every = sorted(found)
        kept = [key for key in every if found[key] or not _is_folder(key, every)]
        self.keys = NameTable(kept)
        self.sizes = np.fromiter((found[key] for key in kept), np.int64, len(kept))

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys)


def _is_folder(key: str, keys: list[str]) -> bool:
    below = f"{key}/" if key else ""
    at = bisect_left(keys, below)
    return not key or (at < len(keys) and keys[at].startswith(below))


def list_blocking(source: StoreSource, prefix: str) -> Listing:
    """List a store in the calling thread.

    Raises:
        ValueError: If nothing is found.
        DatasetError: If listing fails.
    """
    found: dict[str, int] = {}
    store = source.open()
    try:
        for page in _pages(store, prefix):
            _take(found, page)
    except obstore_errors() as exc:
        failure = failure_of("list", source.locate(prefix), exc)
    else:
        return _non_empty(found, source.locate(prefix))
    # So a traceback shows neither obstore's text (context) nor the store (local).
    del store
    raise failure


async def list_async(source: StoreSource, prefix: str) -> Listing:
    """List a store without blocking the event loop.

    Raises:
        ValueError: If nothing is found.
        DatasetError: If listing fails.
    """
    flights = Flights()
    store = await asyncio.to_thread(source.open)
    try:
        found = await _gather(store, prefix, flights)
    except obstore_errors() as exc:
        failure = failure_of("list", source.locate(prefix), exc)
    else:
        return _non_empty(found, source.locate(prefix))
    finally:
        await flights.drain(0.0)
    del store
    raise failure


async def _gather(
    store: "ObjectStore", prefix: str, flights: Flights
) -> dict[str, int]:
    found: dict[str, int] = {}
    pages = _pages(store, prefix)
    with contextlib.suppress(StopAsyncIteration):
        while True:
            _take(found, await flights.follow(anext(pages)))
    return found


def _pages(store: "ObjectStore", prefix: str) -> "ListStream[Sequence[ObjectMeta]]":
    pages: ListStream[Sequence[ObjectMeta]]
    pages = import_obstore().list(store, prefix or None, chunk_size=_PAGE)
    return pages


def _take(found: dict[str, int], page: "Iterable[ObjectMeta]") -> None:
    found.update((meta["path"], meta["size"]) for meta in page)


def _non_empty(found: dict[str, int], location: str) -> Listing:
    listing = Listing(found)
    if not listing.keys:
        raise ValueError(
            f"no object in {location!r}; a prefix is made of whole path segments: "
            f"'train' has 'train/a' but not 'training/a'"
        )
    return listing
